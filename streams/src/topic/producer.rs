//! An idempotent, pipelined producer.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use rdkafka::ClientContext;
use rdkafka::config::{FromClientConfigAndContext, RDKafkaLogLevel};
use rdkafka::error::KafkaError;
use rdkafka::message::{DeliveryResult, Header, Message, OwnedHeaders};
use rdkafka::producer::{BaseRecord, Producer as _, ProducerContext, ThreadedProducer};
use rdkafka::types::RDKafkaErrorCode as Code;
use tokio::sync::{Notify, oneshot};

use super::client::{ANSWER_WAIT, Context, blocking, client_config, property, translate};
use crate::config::KafkaConfig;
use crate::error::{Error, Result};
use crate::metrics;

/// How long a record may wait for its acknowledgement unless `message.timeout.ms` says otherwise.
const DELIVERY_WAIT_MS: u64 = 30_000;

/// Property for the size of the queue of unacknowledged records, in KiB.
const QUEUE_KIB: &str = "queue.buffering.max.kbytes";
/// Default of that property, unless records may be larger.
const QUEUE_KIB_MIN: u64 = 64 << 10;
/// Property for the size of the largest record, in bytes.
const MESSAGE_BYTES: &str = "message.max.bytes";

/// Pause while a full queue drains.
const QUEUE_FULL_WAIT: Duration = Duration::from_millis(2);

/// A record to be produced.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OutRecord {
    /// Topic name.
    pub topic: String,
    /// Partition; without one the key decides (the murmur2 hash of the Java clients), and
    /// records without a key are spread.
    pub partition: Option<i32>,
    /// Key.
    pub key: Option<Bytes>,
    /// Value; `None` is a tombstone.
    pub payload: Option<Bytes>,
    /// Headers in their order.
    pub headers: Vec<(String, Option<Bytes>)>,
    /// Milliseconds since 1970-01-01 UTC; now when absent.
    pub timestamp_ms: Option<i64>,
}

impl OutRecord {
    /// A record with a value only.
    pub fn new(topic: impl Into<String>, payload: impl Into<Bytes>) -> Self {
        Self { topic: topic.into(), payload: Some(payload.into()), ..Self::default() }
    }

    /// Sets the key.
    pub fn key(mut self, key: impl Into<Bytes>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Sets the partition.
    pub fn partition(mut self, partition: i32) -> Self {
        self.partition = Some(partition);
        self
    }

    /// Adds a header.
    pub fn header(mut self, key: impl Into<String>, value: impl Into<Bytes>) -> Self {
        self.headers.push((key.into(), Some(value.into())));
        self
    }

    fn bytes(&self) -> usize {
        self.key.as_ref().map_or(0, Bytes::len) + self.payload.as_ref().map_or(0, Bytes::len)
    }
}

/// Position of a delivered record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delivery {
    /// Partition.
    pub partition: i32,
    /// Offset in the partition.
    pub offset: i64,
}

/// Result of sending several records.
#[derive(Debug)]
pub struct Sent {
    /// Deliveries in record order; `None` where a record was not acknowledged. After a record that could not
    /// be queued, later ones are missing.
    pub deliveries: Vec<Option<Delivery>>,
    /// The first error in record order; without one all records are acknowledged.
    pub error: Option<Error>,
}

/// Result of one record: its delivery, or librdkafka's error.
type Outcome = std::result::Result<Delivery, KafkaError>;

/// Receiver of a record's outcome.
enum Ticket {
    One(oneshot::Sender<Outcome>),
    InGroup { index: usize, group: Arc<DeliveryGroup> },
}

/// Records that one caller awaits together.
struct DeliveryGroup {
    outcomes: Mutex<Vec<Option<Outcome>>>,
    open: AtomicUsize,
    done: Notify,
}

impl DeliveryGroup {
    fn new() -> Arc<DeliveryGroup> {
        Arc::new(DeliveryGroup {
            outcomes: Mutex::new(Vec::new()),
            // One extra for the caller, so that the count cannot reach zero before all are queued.
            open: AtomicUsize::new(1),
            done: Notify::new(),
        })
    }

    /// The ticket of the next record.
    fn ticket(self: &Arc<DeliveryGroup>, index: usize) -> Ticket {
        self.outcomes.lock().push(None);
        self.open.fetch_add(1, Ordering::AcqRel);
        Ticket::InGroup { index, group: Arc::clone(self) }
    }

    /// Takes back the ticket of a record that was not queued.
    fn withdraw(&self) {
        self.open.fetch_sub(1, Ordering::AcqRel);
    }

    /// Waits for all records that were queued; `None` where one was not.
    async fn outcomes(&self) -> Vec<Option<Outcome>> {
        if self.open.fetch_sub(1, Ordering::AcqRel) != 1 {
            self.done.notified().await;
        }
        std::mem::take(&mut *self.outcomes.lock())
    }
}

#[derive(Clone)]
struct Deliveries {
    context: Context,
}

impl ClientContext for Deliveries {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        self.context.log(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.context.error(error, reason);
    }
}

impl ProducerContext for Deliveries {
    type DeliveryOpaque = Box<Ticket>;

    fn delivery(&self, result: &DeliveryResult<'_>, ticket: Box<Ticket>) {
        let outcome = match result {
            Ok(message) => {
                metrics::PRODUCED_RECORDS.inc();
                self.context.delivered();
                Ok(Delivery { partition: message.partition(), offset: message.offset() })
            }
            Err((error, _)) => Err(error.clone()),
        };
        match *ticket {
            // A dropped receiver only means that the caller no longer waits.
            Ticket::One(waiting) => drop(waiting.send(outcome)),
            Ticket::InGroup { index, group } => {
                group.outcomes.lock()[index] = Some(outcome);
                if group.open.fetch_sub(1, Ordering::AcqRel) == 1 {
                    group.done.notify_one();
                }
            }
        }
    }
}

/// A producer; clones share one connection and one queue.
///
/// Always idempotent: an acknowledged record is in the log exactly once, whatever was retried, and records
/// for one partition keep the order of the calls. Acknowledged means what `acks=all` means to the brokers.
/// Dropping the last clone discards records that are not acknowledged yet: await the sends, or
/// [`Producer::flush`], first.
#[derive(Clone)]
pub struct Producer {
    inner: Arc<ThreadedProducer<Deliveries>>,
    deliveries: Deliveries,
    kafka: KafkaConfig,
    delivery_wait_ms: u64,
    /// Size of the queue of unacknowledged records, in bytes.
    queue_bytes: u64,
}

impl std::fmt::Debug for Producer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Producer").field("kafka", &self.kafka).finish_non_exhaustive()
    }
}

impl Producer {
    /// Connects and waits until a broker has answered, at most 10 s.
    ///
    /// # Errors
    /// [`Error::Unreachable`], [`Error::Config`].
    pub async fn connect(kafka: &KafkaConfig) -> Result<Self> {
        let kafka = kafka.clone();
        blocking(move || Self::connect_blocking(kafka)).await
    }

    fn connect_blocking(kafka: KafkaConfig) -> Result<Self> {
        let context = Context::default();
        let wait = DELIVERY_WAIT_MS.to_string();
        // "topic" logs why records are retried.
        let debug = match kafka.properties.get("debug") {
            Some(others) => format!("{},topic", property("debug", others)?),
            None => "topic".to_string(),
        };
        let message_bytes_max = match kafka.properties.get(MESSAGE_BYTES) {
            Some(bytes) => Some(property(MESSAGE_BYTES, bytes)?),
            None => None,
        };
        let queue_kib = queue_kib(message_bytes_max.as_deref()).to_string();
        let mut config = client_config(
            &kafka,
            &[
                ("linger.ms", "2"),
                ("message.timeout.ms", &wait),
                ("partitioner", "murmur2_random"),
                (QUEUE_KIB, &queue_kib),
                ("reconnect.backoff.max.ms", "1000"),
            ],
            &[("enable.idempotence", "true"), ("acks", "all"), ("debug", &debug)],
        )?;
        config.set_log_level(RDKafkaLogLevel::Debug);
        let delivery_wait_ms = config
            .get("message.timeout.ms")
            .or(config.get("delivery.timeout.ms"))
            .and_then(|text| text.parse().ok())
            .unwrap_or(DELIVERY_WAIT_MS);
        let queue_kib = config.get(QUEUE_KIB).and_then(|text| text.parse().ok()).unwrap_or(QUEUE_KIB_MIN);
        let deliveries = Deliveries { context: context.clone() };
        let inner = ThreadedProducer::from_config_and_context(&config, deliveries.clone())
            .map_err(|error| translate(&kafka, &context, "create a producer", Duration::ZERO, error))?;
        let started = Instant::now();
        // The cluster id arrives with the first metadata response, so this call asks for no topic.
        if inner.client().fetch_cluster_id(ANSWER_WAIT).is_none() {
            return Err(Error::Unreachable {
                bootstrap_servers: kafka.bootstrap_servers,
                waited_ms: started.elapsed().as_millis() as u64,
                reason: context.reason(),
            });
        }
        let queue_bytes = queue_kib.saturating_mul(1024);
        Ok(Self { inner: Arc::new(inner), deliveries, kafka, delivery_wait_ms, queue_bytes })
    }

    /// Sends one record and waits for its acknowledgement, up to `message.timeout.ms` (30 s by
    /// default). Many calls may be under way at once; they are sent together.
    ///
    /// Cancel safety: a record whose future is dropped may or may not be produced.
    ///
    /// # Errors
    /// [`Error::Unreachable`], [`Error::BrokerDisk`] or [`Error::NotDelivered`] (after any of them, a record
    /// that was sent may or may not be in the log), [`Error::RecordTooLarge`], [`Error::UnknownTopic`],
    /// [`Error::ProducerLost`]. A partition that does not exist is [`Error::NotDelivered`].
    pub async fn send(&self, record: OutRecord) -> Result<Delivery> {
        let (sender, receiver) = oneshot::channel();
        self.enqueue(&record, Ticket::One(sender)).await?;
        match receiver.await {
            Ok(Ok(delivery)) => Ok(delivery),
            Ok(Err(error)) => Err(self.undelivered(&record.topic, record.bytes(), error)),
            Err(_) => Err(Error::Closed { what: "producer" }),
        }
    }

    /// Sends all records, pipelined, and waits until each is acknowledged. The deliveries come in
    /// the order of the records.
    ///
    /// Cancel safety: as [`Producer::send`].
    ///
    /// # Errors
    /// The first error of [`Producer::send`] in record order; the other records have been
    /// delivered or given up by then, so nothing is sent any more after the return.
    pub async fn send_all<I>(&self, records: I) -> Result<Vec<Delivery>>
    where
        I: IntoIterator<Item = OutRecord>,
    {
        let sent = self.send_each(records).await;
        match sent.error {
            Some(error) => Err(error),
            None => Ok(sent.deliveries.into_iter().flatten().collect()),
        }
    }

    /// As [`Producer::send_all`], but tells for each record whether it was acknowledged.
    pub async fn send_each<I>(&self, records: I) -> Sent
    where
        I: IntoIterator<Item = OutRecord>,
    {
        let group = DeliveryGroup::new();
        let mut topics: Vec<(usize, String)> = Vec::new();
        let mut refused = None;
        for (index, record) in records.into_iter().enumerate() {
            if topics.last().is_none_or(|(_, topic)| *topic != record.topic) {
                topics.push((index, record.topic.clone()));
            }
            if let Err(error) = self.enqueue(&record, group.ticket(index)).await {
                group.withdraw();
                refused = Some(error);
                break;
            }
            if index % 1024 == 1023 {
                tokio::task::yield_now().await;
            }
        }
        let outcomes = group.outcomes().await;
        let mut deliveries = Vec::with_capacity(outcomes.len());
        let mut failed = None;
        for (index, outcome) in outcomes.into_iter().enumerate() {
            deliveries.push(match outcome {
                Some(Ok(delivery)) => Some(delivery),
                Some(Err(error)) => {
                    failed.get_or_insert((index, error));
                    None
                }
                None => None,
            });
        }
        let error = match failed {
            None => refused,
            Some((index, error)) => {
                let at = topics.partition_point(|(first, _)| *first <= index).saturating_sub(1);
                let topic = topics.get(at).map_or("", |(_, topic)| topic);
                Some(self.undelivered(topic, 0, error))
            }
        };
        Sent { deliveries, error }
    }

    /// Sends all records, pipelined, except those that are too large for the producer or their topic. Returns
    /// the indices of the exceptions, ascending; all others are acknowledged then.
    ///
    /// Brokers refuse a whole batch, so the records of a refused batch are sent again one by one. They may
    /// land after later records of their partition.
    ///
    /// Cancel safety: as [`Producer::send`].
    ///
    /// # Errors
    /// The first error of [`Producer::send`] in record order, except [`Error::RecordTooLarge`]; the other
    /// records have been delivered or given up by then.
    pub async fn send_fitting(&self, records: &[OutRecord]) -> Result<Vec<usize>> {
        let group = DeliveryGroup::new();
        let (mut too_large, mut refused) = (Vec::new(), None);
        for (index, record) in records.iter().enumerate() {
            match self.enqueue(record, group.ticket(index)).await {
                Ok(()) => {}
                Err(Error::RecordTooLarge { .. }) => {
                    group.withdraw();
                    too_large.push(index);
                }
                Err(error) => {
                    group.withdraw();
                    refused = Some(error);
                    break;
                }
            }
            if index % 1024 == 1023 {
                tokio::task::yield_now().await;
            }
        }
        let mut alone = Vec::new();
        let outcomes = group.outcomes().await;
        for ((index, record), outcome) in records.iter().enumerate().zip(outcomes) {
            let Some(Err(error)) = outcome else { continue };
            match self.undelivered(&record.topic, record.bytes(), error) {
                Error::RecordTooLarge { .. } => alone.push(index),
                error => return Err(error),
            }
        }
        if let Some(error) = refused {
            return Err(error);
        }
        for index in alone {
            match self.send(records[index].clone()).await {
                Ok(_) => {}
                Err(Error::RecordTooLarge { .. }) => too_large.push(index),
                Err(error) => return Err(error),
            }
        }
        too_large.sort_unstable();
        Ok(too_large)
    }

    /// Waits until everything queued so far was acknowledged or given up, at most `wait_max`.
    ///
    /// # Errors
    /// [`Error::Unreachable`] when records still wait after `wait_max`.
    pub async fn flush(&self, wait_max: Duration) -> Result<()> {
        let this = self.clone();
        blocking(move || {
            this.inner
                .flush(wait_max)
                .map_err(|error| translate(&this.kafka, &this.deliveries.context, "flush", wait_max, error))
        })
        .await
    }

    async fn enqueue(&self, record: &OutRecord, ticket: Ticket) -> Result<()> {
        let mut ticket = Box::new(ticket);
        loop {
            let headers =
                (!record.headers.is_empty()).then(|| {
                    record.headers.iter().fold(
                        OwnedHeaders::new_with_capacity(record.headers.len()),
                        |headers, (key, value)| headers.insert(Header { key, value: value.as_deref() }),
                    )
                });
            let out = BaseRecord {
                topic: &record.topic,
                partition: record.partition,
                payload: record.payload.as_deref(),
                key: record.key.as_deref(),
                timestamp: record.timestamp_ms,
                headers,
                delivery_opaque: ticket,
            };
            match self.inner.send(out) {
                Ok(()) => return Ok(()),
                // The queue counts values only. This value does not fit even into an empty queue.
                Err((KafkaError::MessageProduction(Code::QueueFull), _))
                    if record.payload.as_ref().is_some_and(|value| value.len() as u64 > self.queue_bytes) =>
                {
                    return Err(Error::RecordTooLarge { topic: record.topic.clone(), bytes: record.bytes() });
                }
                Err((KafkaError::MessageProduction(Code::QueueFull), back)) => {
                    ticket = back.delivery_opaque;
                    // Thousands of slots are free by then; waking for the first one would switch threads for
                    // every record.
                    tokio::time::sleep(QUEUE_FULL_WAIT).await;
                }
                Err((error, _)) => return Err(self.undelivered(&record.topic, record.bytes(), error)),
            }
        }
    }

    fn undelivered(&self, topic: &str, bytes: usize, error: KafkaError) -> Error {
        if let Some((_, reason)) = self.inner.client().fatal_error() {
            return Error::ProducerLost { bootstrap_servers: self.kafka.bootstrap_servers.clone(), reason };
        }
        let code = error.rdkafka_error_code();
        let disk_error = match code {
            Some(Code::KafkaStorageError) => Some(error.to_string()),
            Some(Code::MessageTimedOut) => self.deliveries.context.disk_error(),
            _ => None,
        };
        if let Some(reason) = disk_error {
            return Error::BrokerDisk {
                action: format!("produce to topic {topic}"),
                bootstrap_servers: self.kafka.bootstrap_servers.clone(),
                reason: format!("{reason}, for {} s", self.delivery_wait_ms / 1000),
            };
        }
        match code {
            Some(Code::MessageSizeTooLarge | Code::InvalidMessageSize) => {
                Error::RecordTooLarge { topic: topic.to_string(), bytes }
            }
            Some(Code::UnknownTopic | Code::UnknownTopicOrPartition) => Error::UnknownTopic {
                topic: topic.to_string(),
                bootstrap_servers: self.kafka.bootstrap_servers.clone(),
            },
            Some(Code::UnknownPartition) => Error::NotDelivered {
                topic: topic.to_string(),
                reason: "it has no such partition".to_string(),
                retryable: false,
            },
            Some(Code::MessageTimedOut | Code::BrokerTransportFailure | Code::AllBrokersDown) => {
                Error::Unreachable {
                    bootstrap_servers: self.kafka.bootstrap_servers.clone(),
                    waited_ms: self.delivery_wait_ms,
                    reason: self.deliveries.context.reason(),
                }
            }
            code => Error::NotDelivered {
                topic: topic.to_string(),
                reason: error.to_string(),
                retryable: matches!(
                    code,
                    Some(Code::NotLeaderForPartition | Code::LeaderNotAvailable | Code::RequestTimedOut)
                ),
            },
        }
    }
}

/// Size of the queue in KiB: large enough for the largest record.
fn queue_kib(message_bytes_max: Option<&str>) -> u64 {
    let largest: u64 = message_bytes_max.and_then(|text| text.parse().ok()).unwrap_or(0);
    largest.div_ceil(1024).max(QUEUE_KIB_MIN)
}

#[cfg(test)]
mod tests {
    use super::queue_kib;

    #[test]
    fn the_queue_holds_the_largest_record() {
        let sizes = [(None, 65_536), (Some("1000000"), 65_536), (Some("x"), 65_536)];
        for (largest, kib) in sizes.into_iter().chain([(Some("100000001"), 97_657)]) {
            assert_eq!(queue_kib(largest), kib, "{largest:?}");
        }
    }
}
