//! Polling thread of a consumer: it turns messages and events of the client library into chunks, positions and errors.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use arrow::array::StringArray;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::KafkaError;
use rdkafka::message::Message;
use rdkafka::topic_partition_list::Offset;
use rdkafka::types::RDKafkaErrorCode as Code;
use tokio::sync::mpsc;

use super::Read;
use super::probe::{Probe, ProbeResult, batch_offset, is_undecodable};
use crate::config::KafkaConfig;
use crate::error::{Error, Result};
use crate::topic::admin::watermarks_of;
use crate::topic::batch::Chunk;
use crate::topic::client::{ANSWER_WAIT, Context, partitions, translate};
use crate::topic::headers::headers;
use crate::topic::tail::{self, TailAction};

/// A chunk is passed on at this many rows or bytes, or when nothing more is ready.
const CHUNK_ROWS: usize = 8_192;
const CHUNK_BYTES: usize = 1 << 20;
/// Time without brokers after which the caller gets an error; the error repeats at this interval.
const AWAY_MAX: Duration = Duration::from_secs(30);
/// Pause before brokers that did not answer are asked again for the end of a partition.
const TAIL_PAUSE: Duration = Duration::from_secs(5);
/// Interval at which the thread checks whether it should stop.
pub(super) const POLL: Duration = Duration::from_millis(100);

/// State of the polling thread.
pub(super) struct Reader {
    pub(super) topics: Vec<String>,
    /// By topic index and partition: the end offset before reading began.
    pub(super) ends: Vec<BTreeMap<i32, i64>>,
    pub(super) names: Arc<StringArray>,
    /// By topic index and partition: the lowest offset that may still be handed out.
    pub(super) next: Vec<BTreeMap<i32, i64>>,
    pub(super) client: Arc<BaseConsumer<Context>>,
    pub(super) context: Context,
    pub(super) kafka: KafkaConfig,
    pub(super) stop: Arc<AtomicBool>,
    pub(super) away_since: Option<Instant>,
    /// Partitions of a single topic whose log ended before the expected end.
    pub(super) tails: BTreeMap<i32, Tail>,
}

/// A partition whose log ended before the expected end: see [`tail`].
#[derive(Debug, Clone, Copy)]
pub(super) enum Tail {
    /// The end was reported. `is_confirmed` as of [`tail::at_end`]; brokers are asked at `check_at`.
    Reported { is_confirmed: bool, check_at: Instant },
    /// The log held all offsets before the expected end, and is read from the position again.
    ReadAgain,
}

impl Reader {
    pub(super) fn run(mut self, reads: mpsc::Sender<Read>) {
        while !self.stop.load(Ordering::Acquire) {
            let mut chunk = Chunk::new(self.names.clone());
            let (mut problem, mut ended, mut idle) = (None, Vec::new(), false);
            let client = self.client.clone();
            let mut wait = POLL;
            while chunk.len() < CHUNK_ROWS && chunk.bytes() < CHUNK_BYTES {
                match client.poll(wait) {
                    None => {
                        idle = true;
                        break;
                    }
                    Some(Ok(message)) => self.take(&mut chunk, &message),
                    Some(Err(KafkaError::PartitionEOF(partition))) => ended.push(partition),
                    Some(Err(error)) => {
                        problem = Some(error);
                        break;
                    }
                }
                wait = Duration::ZERO;
            }
            let mut found = Vec::new();
            if chunk.len() > 0 {
                self.away_since = None;
                found.push(chunk.finish().map_or_else(Read::Failed, Read::Chunk));
            }
            if idle || !ended.is_empty() {
                match self.passed(&ended) {
                    Ok(passed) if passed.is_empty() => {}
                    passed => found.push(passed.map_or_else(Read::Failed, Read::Passed)),
                }
            }
            let problem = problem.and_then(|error| self.reported_error(error)).or_else(|| self.probe());
            found.extend(problem.map(Read::Failed));
            for read in found {
                let ends = matches!(&read, Read::Failed(error) if !is_recoverable(error));
                if reads.blocking_send(read).is_err() || ends {
                    return;
                }
            }
        }
    }

    /// Positions that moved beyond the records that were handed out. `ended` has the partitions whose end was
    /// reported.
    ///
    /// The client's position passes transaction markers. After a compacted batch without records, only the
    /// report of the end shows that all was read up to the end as it was at the start.
    fn passed(&mut self, ended: &[i32]) -> Result<BTreeMap<(String, i32), i64>> {
        let mut reached = Vec::new();
        if let Ok(positions) = self.client.position() {
            for element in positions.elements() {
                let topic = self.topics.iter().position(|name| name == element.topic());
                if let (Some(topic), Offset::Offset(offset)) = (topic, element.offset()) {
                    reached.push((topic, element.partition(), offset));
                }
            }
        }
        let mut passed = BTreeMap::new();
        for (topic, partition, offset) in reached {
            self.pass(topic, partition, offset, &mut passed);
        }
        // The report does not name the topic.
        if self.topics.len() == 1 {
            for partition in ended {
                let is_confirmed = matches!(self.tails.get(partition), Some(Tail::ReadAgain));
                self.tails.insert(*partition, Tail::Reported { is_confirmed, check_at: Instant::now() });
            }
            for (partition, end) in self.passed_tails()? {
                self.pass(0, partition, end, &mut passed);
            }
        }
        Ok(passed)
    }

    fn pass(&mut self, topic: usize, partition: i32, offset: i64, passed: &mut BTreeMap<(String, i32), i64>) {
        let next = self.next[topic].entry(partition).or_insert(0);
        if offset > *next {
            *next = offset;
            passed.insert((self.topics[topic].clone(), partition), offset);
        }
    }

    /// Checks the partitions whose log ended before the expected end. Returns those that continue at that end.
    ///
    /// # Errors
    /// [`Error::OffsetOutOfRange`] for a log that has become shorter; other errors that do not pass.
    fn passed_tails(&mut self) -> Result<Vec<(i32, i64)>> {
        let (topic, now) = (self.topics[0].clone(), Instant::now());
        let mut passed = Vec::new();
        for (partition, reported) in self.tails.clone() {
            let Tail::Reported { is_confirmed, check_at } = reported else { continue };
            let next = self.next[0].get(&partition).copied().unwrap_or(0);
            let Some(end) = self.ends[0].get(&partition).copied().filter(|end| next < *end) else {
                self.tails.remove(&partition);
                continue;
            };
            if check_at > now {
                continue;
            }
            match tail::at_end(&self.client, (&topic, partition), end, is_confirmed) {
                Ok(TailAction::Pass) => {
                    self.tails.remove(&partition);
                    passed.push((partition, end));
                }
                Ok(TailAction::ReadAgain) => {
                    let tail = match self.client.seek(&topic, partition, Offset::Offset(next), ANSWER_WAIT) {
                        Ok(()) => Tail::ReadAgain,
                        // The library does not tell a time-out from other errors here.
                        Err(error) => {
                            tracing::warn!(
                                topic, partition, %error,
                                "the end of a partition cannot be read again; it is tried again later"
                            );
                            Tail::Reported { is_confirmed: false, check_at: Instant::now() + TAIL_PAUSE }
                        }
                    };
                    self.tails.insert(partition, tail);
                }
                Ok(TailAction::Fail { low, high }) => {
                    return Err(Error::OffsetOutOfRange { topic, partition, requested: end, low, high });
                }
                Err(error) => match self.reported_error(error) {
                    Some(error) if !error.is_retryable() => return Err(error),
                    // Records may have come since the report, so that it confirms nothing any more.
                    _ => {
                        let check_at = Instant::now() + TAIL_PAUSE;
                        self.tails.insert(partition, Tail::Reported { is_confirmed: false, check_at });
                    }
                },
            }
        }
        Ok(passed)
    }

    fn take(&mut self, chunk: &mut Chunk, message: &rdkafka::message::BorrowedMessage<'_>) {
        let topic = match self.topics.len() {
            1 => 0,
            _ => match self.topics.iter().position(|name| name == message.topic()) {
                Some(index) => index,
                None => return,
            },
        };
        let (partition, offset) = (message.partition(), message.offset());
        let next = self.next[topic].entry(partition).or_insert(0);
        if offset < *next {
            // librdkafka may fetch from the start of a batch again after a reconnect or a seek.
            return;
        }
        *next = offset + 1;
        if self.topics.len() == 1 {
            // A report of the end from before this record confirms nothing any more.
            self.tails.remove(&partition);
        }
        let headers = headers(message).inspect_err(|code| {
            let topic = &self.topics[topic];
            tracing::warn!(topic, partition, offset, error = %code, "the headers of a record cannot be read: the record is returned without them");
        });
        chunk.push(
            (topic as i32, partition, offset),
            message.timestamp().to_millis(),
            message.key(),
            message.payload(),
            headers.into_iter().flatten(),
        );
    }

    /// The error to report to the caller; `None` for a lost connection, which [`Reader::probe`] reports
    /// later.
    fn reported_error(&mut self, error: KafkaError) -> Option<Error> {
        match error.rdkafka_error_code() {
            Some(
                Code::AllBrokersDown
                | Code::BrokerTransportFailure
                | Code::Resolve
                | Code::OperationTimedOut
                | Code::RequestTimedOut,
            ) => {
                self.away_since.get_or_insert_with(Instant::now);
                None
            }
            Some(Code::UnknownTopicOrPartition | Code::UnknownTopic | Code::UnknownPartition) => {
                Some(Error::UnknownTopic {
                    topic: self.topics.join(", "),
                    bootstrap_servers: self.kafka.bootstrap_servers.clone(),
                })
            }
            Some(Code::AutoOffsetReset | Code::OffsetOutOfRange) => Some(self.out_of_range(error)),
            Some(code) if is_undecodable(code) => Some(self.undecodable(error)),
            Some(Code::InvalidMessage) => Some(self.damaged(error)),
            _ => Some(translate(&self.kafka, &self.context, "consume", Duration::ZERO, error)),
        }
    }

    /// Names the partition whose position left the log; the library's error does not.
    fn out_of_range(&self, error: KafkaError) -> Error {
        for (topic, next) in self.topics.iter().zip(&self.next) {
            match watermarks_of(&self.kafka, &self.context, &self.client, topic) {
                Err(error) => return error,
                Ok(marks) => {
                    for (&partition, &requested) in next {
                        match marks.get(&partition) {
                            Some(&(low, high)) if !(low..=high).contains(&requested) => {
                                return Error::OffsetOutOfRange {
                                    topic: topic.clone(),
                                    partition,
                                    requested,
                                    low,
                                    high,
                                };
                            }
                            _ => {}
                        }
                    }
                }
            }
        }
        translate(&self.kafka, &self.context, "consume", Duration::ZERO, error)
    }

    /// Names the partition whose log is damaged; the library's error does not.
    fn damaged(&self, error: KafkaError) -> Error {
        for (topic, partition, offset) in self.positions() {
            match Probe::new(&self.kafka).and_then(|probe| probe.read_at(&topic, partition, offset)) {
                Ok(ProbeResult::Damage) => {
                    let bootstrap_servers = self.kafka.bootstrap_servers.clone();
                    return Error::Damaged { topic, partition, offset, bootstrap_servers };
                }
                Ok(_) => {}
                Err(error) => return error,
            }
        }
        translate(&self.kafka, &self.context, "consume", Duration::ZERO, error)
    }

    /// Finds the batch that cannot be decoded and continues after it. librdkafka's error names neither the
    /// partition nor the last offset.
    fn undecodable(&mut self, error: KafkaError) -> Error {
        let reason = self.context.reason();
        let since = Instant::now();
        loop {
            match self.skip_undecodable(&reason) {
                Ok(Some(undecodable)) => return undecodable,
                // Retry: the batch must not be skipped silently when brokers become unreachable meanwhile.
                Err(error) if error.is_retryable() && since.elapsed() < AWAY_MAX => {
                    if self.stop.load(Ordering::Acquire) {
                        return error;
                    }
                    std::thread::sleep(POLL);
                }
                Ok(None) | Err(_) => {
                    return translate(&self.kafka, &self.context, "consume", Duration::ZERO, error);
                }
            }
        }
    }

    fn skip_undecodable(&mut self, reason: &str) -> Result<Option<Error>> {
        let base = batch_offset(reason);
        let probe = Probe::new(&self.kafka)?;
        for (topic, partition, first) in self.positions() {
            match probe.read_at(&topic, partition, first)? {
                ProbeResult::Undecodable(found) if found == base => {}
                _ => continue,
            }
            let next = match base {
                Some(base) => probe.end_of_batch(&topic, partition, base, first)?,
                None => first + 1,
            };
            self.client.seek(&topic, partition, Offset::Offset(next), ANSWER_WAIT).map_err(|error| {
                translate(&self.kafka, &self.context, "seek past a batch", ANSWER_WAIT, error)
            })?;
            if let Some(index) = self.topics.iter().position(|name| *name == topic) {
                self.next[index].insert(partition, next);
            }
            let (first, reason) = (base.map_or(first, |base| base.max(first)), reason.to_owned());
            return Ok(Some(Error::Undecodable { topic, partition, first, next, reason }));
        }
        Ok(None)
    }

    /// The next offset of each partition.
    fn positions(&self) -> Vec<(String, i32, i64)> {
        let of_topic = |(topic, next): (&String, &BTreeMap<i32, i64>)| {
            let topic = topic.clone();
            next.iter()
                .map(move |(&partition, &offset)| (topic.clone(), partition, offset))
                .collect::<Vec<_>>()
        };
        self.topics.iter().zip(&self.next).flat_map(of_topic).collect()
    }

    /// After brokers were unreachable for [`AWAY_MAX`]: asks once, and reports when no broker answers.
    fn probe(&mut self) -> Option<Error> {
        let since = self.away_since.filter(|since| since.elapsed() >= AWAY_MAX)?;
        let topic = self.topics.first().map(String::as_str);
        match partitions(&self.kafka, &self.context, self.client.client(), topic) {
            Ok(_) => {
                self.away_since = None;
                None
            }
            Err(Error::Unreachable { bootstrap_servers, reason, .. }) => {
                self.away_since = Some(Instant::now());
                let waited_ms = since.elapsed().as_millis() as u64;
                Some(Error::Unreachable { bootstrap_servers, waited_ms, reason })
            }
            Err(error) => Some(error),
        }
    }
}

/// Whether the consumer continues after this error.
fn is_recoverable(error: &Error) -> bool {
    error.is_retryable() || matches!(error, Error::Undecodable { .. })
}
