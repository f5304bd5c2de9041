//! Reader of bounded ranges of offsets, for readers that come back to the same records.
//!
//! [`crate::topic::Consumer`] follows a topic. This reader reads `first..end` of one partition, and then another range.
//! It waits for [`ANSWER_MAX`] at most without a record before it gives up.

use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rdkafka::config::FromClientConfigAndContext;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::KafkaError;
use rdkafka::message::Message;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use rdkafka::types::RDKafkaErrorCode as Code;

use super::admin::watermarks_of;
use super::client::{ANSWER_WAIT, Context, client_config, partitions, translate};
use super::leader::{Leader, leader_of, watermarks_of_partition};
use super::tail::{self, TailAction};
use crate::config::KafkaConfig;
use crate::error::{Error, Result, is_leader_change, is_unanswered};

/// Longest wait for the next record of a range.
const ANSWER_MAX: Duration = Duration::from_secs(30);
/// The part of [`ANSWER_MAX`] in which brokers are asked for the leader of the partition, to name it.
const LEADER_WAIT: Duration = Duration::from_secs(2);
/// Interval at which a wait checks whether the reader should stop.
const POLL: Duration = Duration::from_millis(100);

/// A record of a partition.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Record<'r> {
    pub(crate) offset: i64,
    /// Milliseconds since 1970-01-01 UTC.
    pub(crate) timestamp_ms: Option<i64>,
    pub(crate) value: Option<&'r [u8]>,
}

/// The records of transactions that a reader sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Isolation {
    /// Those of committed transactions, up to the last stable offset: the first record of the first open transaction.
    Committed,
    /// All, also those of open and aborted transactions.
    Uncommitted,
}

/// Reads ranges of one topic, one at a time. Blocks.
pub(crate) struct SpanReader {
    kafka: KafkaConfig,
    topic: String,
    context: Context,
    client: BaseConsumer<Context>,
    /// The partition that is assigned, and the offset of its next record.
    at: Option<(i32, i64)>,
}

impl SpanReader {
    pub(crate) fn connect(kafka: &KafkaConfig, topic: &str, isolation: Isolation) -> Result<Self> {
        let context = Context::default();
        let level = match isolation {
            Isolation::Committed => "read_committed",
            Isolation::Uncommitted => "read_uncommitted",
        };
        let config = client_config(
            kafka,
            &[
                ("allow.auto.create.topics", "false"),
                ("check.crcs", "true"),
                ("fetch.queue.backoff.ms", "5"),
                // A fetch at the end of the log delays the next range by this time.
                ("fetch.wait.max.ms", "50"),
                // What the client has fetched beyond a range is fetched in vain.
                ("queued.max.messages.kbytes", "1024"),
                ("reconnect.backoff.max.ms", "1000"),
                ("socket.timeout.ms", "10000"),
                ("max.poll.interval.ms", "86400000"),
            ],
            &[
                ("group.id", "millrace"),
                ("enable.auto.commit", "false"),
                ("enable.auto.offset.store", "false"),
                ("enable.partition.eof", "true"),
                ("auto.offset.reset", "error"),
                ("isolation.level", level),
            ],
        )?;
        let client = BaseConsumer::from_config_and_context(&config, context.clone())
            .map_err(|error| translate(kafka, &context, "create a consumer", Duration::ZERO, error))?;
        Ok(Self { kafka: kafka.clone(), topic: topic.to_owned(), context, client, at: None })
    }

    /// Whether the next record that it would give is that one.
    pub(crate) fn is_at(&self, partition: i32, offset: i64) -> bool {
        self.at == Some((partition, offset))
    }

    /// First offset, and the offset after the last record that the reader sees, by partition.
    pub(crate) fn watermarks(&self) -> Result<BTreeMap<i32, (i64, i64)>> {
        watermarks_of(&self.kafka, &self.context, &self.client, &self.topic)
    }

    /// The first offset with a record of `time_ms` or later that the reader sees, by partition; a partition without one is
    /// left out.
    pub(crate) fn offsets_at(&self, time_ms: i64, partitions: &[i32]) -> Result<BTreeMap<i32, i64>> {
        let action = format!("find the offsets of a time in topic {}", self.topic);
        let failed = |error| translate(&self.kafka, &self.context, &action, ANSWER_WAIT, error);
        let mut times = TopicPartitionList::new();
        for partition in partitions {
            times
                .add_partition_offset(&self.topic, *partition, Offset::Offset(time_ms.max(0)))
                .map_err(failed)?;
        }
        let found = self.client.offsets_for_times(times, ANSWER_WAIT).map_err(failed)?;
        let mut offsets = BTreeMap::new();
        for element in found.elements() {
            element.error().map_err(failed)?;
            if let Offset::Offset(offset) = element.offset() {
                offsets.insert(element.partition(), offset);
            }
        }
        Ok(offsets)
    }

    /// Hands the records of `offsets` to `visit` in their order, until it breaks.
    ///
    /// # Errors
    /// [`Error::RecordsRemoved`] when the range is not in the log; [`Error::RecordsChanged`] when the topic has no such
    /// partition; [`Error::Unreachable`] when no record came for [`ANSWER_MAX`]; [`Error::Closed`] once `stop` is set;
    /// those of `visit`.
    pub(crate) fn read(
        &mut self,
        partition: i32,
        offsets: Range<i64>,
        stop: &AtomicBool,
        visit: &mut dyn FnMut(Record<'_>) -> Result<ControlFlow<()>>,
    ) -> Result<()> {
        if offsets.is_empty() {
            return Ok(());
        }
        let is_continued = self.is_at(partition, offsets.start);
        // A range that ends early leaves the client at an unknown place.
        self.at = None;
        if !is_continued {
            self.assign(partition, &offsets)?;
        }
        // As of `tail::at_end`: an assignment checks the log. The report of an end may have waited since the range
        // before, when the log was shorter.
        let mut is_confirmed = !is_continued;
        let mut next = offsets.start;
        let mut since = Instant::now();
        while next < offsets.end {
            if stop.load(Ordering::Relaxed) {
                return Err(Error::Closed { what: "reader of the topic" });
            }
            match self.client.poll(POLL) {
                Some(Ok(message)) if message.partition() != partition || message.offset() < next => {}
                Some(Ok(message)) if message.offset() >= offsets.end => return Ok(()),
                Some(Ok(message)) => {
                    since = Instant::now();
                    is_confirmed = false;
                    next = message.offset() + 1;
                    let record = Record {
                        offset: message.offset(),
                        timestamp_ms: message.timestamp().to_millis(),
                        value: message.payload(),
                    };
                    if visit(record)?.is_break() {
                        if next == offsets.end {
                            break;
                        }
                        return Ok(());
                    }
                }
                Some(Err(KafkaError::PartitionEOF(of))) if of == partition => {
                    let rest = next..offsets.end;
                    let found = tail::at_end(&self.client, (&self.topic, partition), rest.end, is_confirmed);
                    match found.map_err(|error| self.failed(partition, next, since, error))? {
                        TailAction::Pass => break,
                        TailAction::ReadAgain => self.assign(partition, &rest)?,
                        TailAction::Fail { low, high } => {
                            return Err(self.removed(partition, &rest, (low, high)));
                        }
                    }
                    is_confirmed = true;
                }
                Some(Err(KafkaError::PartitionEOF(_))) | None => {}
                Some(Err(error)) => self.check(partition, &(next..offsets.end), error)?,
            }
            if since.elapsed() >= ANSWER_MAX.saturating_sub(LEADER_WAIT) {
                return Err(self.silent(partition, next, since));
            }
        }
        self.at = Some((partition, offsets.end));
        Ok(())
    }

    fn assign(&self, partition: i32, offsets: &Range<i64>) -> Result<()> {
        let started = Instant::now();
        let failed = |error| self.failed(partition, offsets.start, started, error);
        let away = |error: Error| match error {
            Error::Unreachable { .. } => self.away(partition, offsets.start, started.elapsed()),
            error => error,
        };
        // Tells at once of a topic that does not exist.
        let found = partitions(&self.kafka, &self.context, self.client.client(), Some(&self.topic));
        let count = found.map_err(away)?.get(&self.topic).copied().ok_or_else(|| self.unknown())?;
        if partition >= count {
            // Partitions are added and never removed: the topic was created again.
            let (topic, first, next) = (self.topic.clone(), offsets.start, offsets.end);
            return Err(Error::RecordsChanged { topic, partition, first, next });
        }
        let marks = watermarks_of_partition(&self.client, &self.topic, partition);
        let (low, high) = marks.map_err(failed)?;
        if offsets.start < low || offsets.end > high {
            return Err(self.removed(partition, offsets, (low, high)));
        }
        let mut list = TopicPartitionList::new();
        list.add_partition_offset(&self.topic, partition, Offset::Offset(offsets.start)).map_err(failed)?;
        self.client.assign(&list).map_err(failed)
    }

    /// The error of a call for the record at `next` that began at `started`.
    fn failed(&self, partition: i32, next: i64, started: Instant, error: KafkaError) -> Error {
        let action = format!("read topic {} partition {partition}", self.topic);
        let is_leaderless = error.rdkafka_error_code().is_some_and(is_leader_change);
        match translate(&self.kafka, &self.context, &action, started.elapsed(), error) {
            Error::Unreachable { .. } => self.silent(partition, next, started),
            _ if is_leaderless => self.silent(partition, next, started),
            error => error,
        }
    }

    fn removed(&self, partition: i32, offsets: &Range<i64>, (low, high): (i64, i64)) -> Error {
        let (topic, first, next) = (self.topic.clone(), offsets.start, offsets.end);
        Error::RecordsRemoved { topic, partition, first, next, low, high }
    }

    fn unknown(&self) -> Error {
        let bootstrap_servers = self.kafka.bootstrap_servers.clone();
        Error::UnknownTopic { topic: self.topic.clone(), bootstrap_servers }
    }

    /// Fails for an error that does not pass. `rest` is what was not read yet.
    fn check(&self, partition: i32, rest: &Range<i64>, error: KafkaError) -> Result<()> {
        let (topic, action) = (&self.topic, format!("read topic {} partition {partition}", self.topic));
        match error.rdkafka_error_code() {
            Some(code) if is_unanswered(code) || is_leader_change(code) => Ok(()),
            Some(Code::UnknownTopicOrPartition | Code::UnknownTopic | Code::UnknownPartition) => {
                Err(self.unknown())
            }
            // Checks the log. A new leader may not have known its end yet, and then the rest is read.
            Some(Code::AutoOffsetReset | Code::OffsetOutOfRange) => self.assign(partition, rest),
            Some(Code::InvalidMessage | Code::BadMessage | Code::BadCompression) => Err(Error::Damaged {
                topic: topic.clone(),
                partition,
                offset: rest.start,
                bootstrap_servers: self.kafka.bootstrap_servers.clone(),
            }),
            _ => Err(translate(&self.kafka, &self.context, &action, Duration::ZERO, error)),
        }
    }

    /// The error of a wait for the record at `next` that began at `started`, with the leader as the brokers tell it.
    fn silent(&self, partition: i32, next: i64, started: Instant) -> Error {
        let reason = match leader_of(&self.client, &self.topic, partition, LEADER_WAIT) {
            Ok(Some(Leader::Broker(name))) => format!("{}; its leader is {name}", self.context.reason()),
            Ok(Some(Leader::Missing)) => "no broker leads the partition at present".to_owned(),
            Ok(None) | Err(_) => self.context.reason(),
        };
        self.away_because(partition, next, started.elapsed(), &reason)
    }

    fn away(&self, partition: i32, next: i64, waited: Duration) -> Error {
        self.away_because(partition, next, waited, &self.context.reason())
    }

    fn away_because(&self, partition: i32, next: i64, waited: Duration, reason: &str) -> Error {
        Error::Unreachable {
            bootstrap_servers: self.kafka.bootstrap_servers.clone(),
            waited_ms: waited.as_millis() as u64,
            reason: format!(
                "topic {} partition {partition} gave no record at offset {next}: {reason}",
                self.topic
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use rdkafka::mocking::MockCluster;
    use rdkafka::producer::DefaultProducerContext;
    use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

    use super::*;
    use crate::topic::{OutRecord, Producer};

    /// Records in topic `t`.
    const END: i64 = 300;

    /// Two brokers of the client library, with [`END`] records in one partition. A fetch gives one of at least 30 batches.
    fn cluster_with_records() -> (MockCluster<'static, DefaultProducerContext>, KafkaConfig) {
        let cluster = MockCluster::new(2).unwrap();
        cluster.create_topic("t", 1, 2).unwrap();
        cluster.partition_leader("t", 0, Some(1)).unwrap();
        let mut kafka = KafkaConfig::new(cluster.bootstrap_servers());
        // The client fetches the next batch once it has handed out the last one.
        kafka.properties.insert("queued.min.messages".to_owned(), "1".into());
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let producer = Producer::connect(&kafka).await.unwrap();
            for _ in 0..END / 10 {
                producer.send_all((0..10).map(|_| OutRecord::new("t", "v"))).await.unwrap();
            }
        });
        (cluster, kafka)
    }

    #[test]
    fn a_range_is_read_once_while_its_leader_changes() {
        let (cluster, kafka) = cluster_with_records();
        let mut reader = SpanReader::connect(&kafka, "t", Isolation::Committed).unwrap();
        let mut offsets = Vec::new();
        let outcome = reader.read(0, 0..END, &AtomicBool::new(false), &mut |record| {
            match record.offset {
                50 => cluster.partition_leader("t", 0, Some(2)).unwrap(),
                150 => cluster.partition_leader("t", 0, Some(1)).unwrap(),
                _ => {}
            }
            offsets.push(record.offset);
            Ok(ControlFlow::Continue(()))
        });
        outcome.unwrap();
        assert!(offsets.into_iter().eq(0..END));
    }

    #[test]
    fn offsets_are_asked_for_again_while_a_leader_changes() {
        let (cluster, kafka) = cluster_with_records();
        let reader = SpanReader::connect(&kafka, "t", Isolation::Committed).unwrap();
        // One error for each of the two ends of the log.
        let moved = RDKafkaRespErr::RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION;
        cluster.request_errors(RDKafkaApiKey::ListOffsets, &[moved; 2]);
        assert_eq!(reader.watermarks().unwrap(), BTreeMap::from([(0, (0, END))]));
    }

    #[test]
    fn a_partition_without_a_leader_is_named_and_read_later() {
        let (cluster, kafka) = cluster_with_records();
        cluster.partition_leader("t", 0, None).unwrap();
        let mut reader = SpanReader::connect(&kafka, "t", Isolation::Committed).unwrap();
        let mut rows = 0;
        let mut read = || {
            reader.read(0, 7..END, &AtomicBool::new(false), &mut |_| {
                rows += 1;
                Ok(ControlFlow::Continue(()))
            })
        };
        let error = read().unwrap_err();
        let text = error.to_string();
        assert!(error.is_retryable(), "{text}");
        for word in ["topic t partition 0", "offset 7", "no broker leads", kafka.bootstrap_servers.as_str()] {
            assert!(text.contains(word), "{text}");
        }
        cluster.partition_leader("t", 0, Some(2)).unwrap();
        read().unwrap();
        assert_eq!(rows, END - 7);
    }
}
