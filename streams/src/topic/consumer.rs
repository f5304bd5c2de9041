//! Consumer that returns records as Arrow batches.
//!
//! A separate thread polls librdkafka, copies records into columns and passes chunks over a bounded channel.
//! When the caller is slow, the channel fills, the thread waits, and librdkafka stops fetching at its queue
//! limits. Memory stays bounded without pausing.

mod probe;
mod reader;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use arrow::array::{RecordBatch, StringArray};
use arrow::compute::concat_batches;
use rdkafka::config::FromClientConfigAndContext;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use tokio::sync::mpsc;

use self::reader::Reader;
use super::admin::watermarks_of;
use super::batch::{Records, schema};
use super::client::{ANSWER_WAIT, Context, blocking, client_config, partitions, translate};
use crate::config::KafkaConfig;
use crate::error::{Error, Result};
use crate::metrics;

/// Start offset that means "the first record that the partition holds".
pub const EARLIEST: i64 = -2;
/// Start offset that means "the next record to be written".
pub const LATEST: i64 = -1;

/// Chunks that may wait between the thread and the caller.
const CHUNKS_WAITING: usize = 4;

/// A message from the polling thread to the caller, in order.
enum Read {
    Chunk(RecordBatch),
    /// Positions after offsets that hold no records: transaction markers, aborted transactions.
    Passed(BTreeMap<(String, i32), i64>),
    Failed(Error),
}

/// A consumer of assigned partitions or of a consumer group.
///
/// Records of one partition come in offset order, each once, none below the start offset. Offsets may have
/// gaps; records of aborted transactions are skipped. Dropping the consumer ends its thread within about 100
/// ms.
pub struct Consumer {
    reads: mpsc::Receiver<Read>,
    pending: VecDeque<Read>,
    positions: BTreeMap<(String, i32), i64>,
    client: Arc<BaseConsumer<Context>>,
    context: Context,
    kafka: KafkaConfig,
    stop: Arc<AtomicBool>,
}

impl std::fmt::Debug for Consumer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Consumer").field("positions", &self.positions).finish_non_exhaustive()
    }
}

impl Consumer {
    /// Reads the partitions `(topic, partition, start offset)`; the start may be [`EARLIEST`] or
    /// [`LATEST`], which are resolved before this returns. Nothing is ever committed to a group.
    ///
    /// # Errors
    /// [`Error::UnknownTopic`], [`Error::UnknownPartition`], [`Error::OffsetOutOfRange`],
    /// [`Error::Unreachable`] after 10 s, [`Error::Config`], [`Error::Client`].
    pub async fn assign(kafka: &KafkaConfig, start: &[(String, i32, i64)]) -> Result<Self> {
        let (kafka, start) = (kafka.clone(), start.to_vec());
        blocking(move || Self::assign_blocking(kafka, start)).await
    }

    fn assign_blocking(kafka: KafkaConfig, start: Vec<(String, i32, i64)>) -> Result<Self> {
        let (client, context) = connect(&kafka, None)?;
        let mut marks = BTreeMap::new();
        let mut positions = BTreeMap::new();
        let mut list = TopicPartitionList::new();
        for (topic, partition, requested) in start {
            if !marks.contains_key(&topic) {
                marks.insert(topic.clone(), watermarks_of(&kafka, &context, &client, &topic)?);
            }
            let topic_marks = &marks[&topic];
            let Some(&(low, high)) = topic_marks.get(&partition) else {
                let partitions = topic_marks.len() as i32;
                return Err(Error::UnknownPartition { topic, partition, partitions });
            };
            let offset = match requested {
                EARLIEST => low,
                LATEST => high,
                offset if (low..=high).contains(&offset) => offset,
                _ => return Err(Error::OffsetOutOfRange { topic, partition, requested, low, high }),
            };
            list.add_partition_offset(&topic, partition, Offset::Offset(offset))
                .map_err(|error| translate(&kafka, &context, "assign partitions", Duration::ZERO, error))?;
            positions.insert((topic, partition), offset);
        }
        client
            .assign(&list)
            .map_err(|error| translate(&kafka, &context, "assign partitions", Duration::ZERO, error))?;
        let ends = marks
            .into_iter()
            .map(|(topic, marks)| {
                let ends = marks.into_iter().map(|(partition, (_, high))| (partition, high)).collect();
                (topic, ends)
            })
            .collect();
        Self::start(kafka, client, context, ends, positions)
    }

    /// Reads `topics` as a member of a consumer group, from the committed offsets, else from the earliest.
    /// [`Consumer::commit`] commits what was handed out. Records that were not committed are delivered again,
    /// to this or another member.
    ///
    /// # Errors
    /// [`Error::GroupsUnsupported`] at the embedded broker, [`Error::UnknownTopic`],
    /// [`Error::Unreachable`], [`Error::Config`], [`Error::Client`].
    pub async fn subscribe(kafka: &KafkaConfig, group: &str, topics: &[&str]) -> Result<Self> {
        let kafka = kafka.clone();
        let group = group.to_string();
        let topics: Vec<String> = topics.iter().map(|topic| topic.to_string()).collect();
        blocking(move || {
            let (client, context) = connect(&kafka, Some(&group))?;
            let started = Instant::now();
            match client.client().fetch_cluster_id(ANSWER_WAIT) {
                Some(id) if id.starts_with(crate::broker::CLUSTER_ID_PREFIX) => {
                    return Err(Error::GroupsUnsupported { bootstrap_servers: kafka.bootstrap_servers });
                }
                Some(_) => {}
                None => {
                    return Err(Error::Unreachable {
                        bootstrap_servers: kafka.bootstrap_servers,
                        waited_ms: started.elapsed().as_millis() as u64,
                        reason: context.reason(),
                    });
                }
            }
            for topic in &topics {
                if partitions(&kafka, &context, client.client(), Some(topic))?.is_empty() {
                    return Err(Error::UnknownTopic {
                        topic: topic.clone(),
                        bootstrap_servers: kafka.bootstrap_servers,
                    });
                }
            }
            let names: Vec<&str> = topics.iter().map(String::as_str).collect();
            client
                .subscribe(&names)
                .map_err(|error| translate(&kafka, &context, "subscribe", Duration::ZERO, error))?;
            let ends = topics.into_iter().map(|topic| (topic, BTreeMap::new())).collect();
            Self::start(kafka, client, context, ends, BTreeMap::new())
        })
        .await
    }

    fn start(
        kafka: KafkaConfig,
        client: BaseConsumer<Context>,
        context: Context,
        topics: Vec<(String, BTreeMap<i32, i64>)>,
        positions: BTreeMap<(String, i32), i64>,
    ) -> Result<Self> {
        let (topics, ends): (Vec<String>, Vec<_>) = topics.into_iter().unzip();
        let client = Arc::new(client);
        let stop = Arc::new(AtomicBool::new(false));
        let (sender, reads) = mpsc::channel(CHUNKS_WAITING);
        let reader = Reader {
            next: topics
                .iter()
                .map(|topic| {
                    let of_topic = positions.iter().filter(|((name, _), _)| name == topic);
                    of_topic.map(|((_, partition), offset)| (*partition, *offset)).collect()
                })
                .collect(),
            names: Arc::new(StringArray::from(topics.clone())),
            topics,
            ends,
            client: client.clone(),
            context: context.clone(),
            kafka: kafka.clone(),
            stop: stop.clone(),
            away_since: None,
            tails: BTreeMap::new(),
        };
        std::thread::Builder::new()
            .name("streams-consumer".to_string())
            .spawn(move || reader.run(sender))
            .map_err(Error::io("start a thread for", "streams-consumer"))?;
        Ok(Self { reads, pending: VecDeque::new(), positions, client, context, kafka, stop })
    }

    /// The next records: waits up to `wait_max` for the first, then adds those that are ready. Returns at
    /// most `rows_max` rows and `bytes_max` bytes of memory ([`Records::memory`]), but always one row. `None`
    /// when no record came in time, or as soon as [`Consumer::positions`] moved without one. Never an empty
    /// batch.
    ///
    /// Cancel safe: no record is lost when the future is dropped.
    ///
    /// # Errors
    /// [`Error::Unreachable`] every 30 s while no broker answers (call again to continue waiting);
    /// [`Error::Undecodable`] for a batch that is skipped (call again to continue after it).
    /// [`Error::OffsetOutOfRange`], [`Error::Damaged`], [`Error::UnknownTopic`] and [`Error::Client`] end the
    /// consumer, afterwards [`Error::Closed`]. A log that lost offsets below its end at the start is
    /// [`Error::OffsetOutOfRange`] of that end: [`Consumer::positions`] does not pass lost offsets.
    pub async fn next(
        &mut self,
        rows_max: usize,
        bytes_max: usize,
        wait_max: Duration,
    ) -> Result<Option<RecordBatch>> {
        let (mut parts, mut rows, mut bytes) = (Vec::new(), 0, 0);
        while rows < rows_max.max(1) {
            let read = if parts.is_empty() { self.wait(wait_max).await? } else { self.ready() };
            let chunk = match read {
                None => break,
                Some(Read::Chunk(chunk)) => chunk,
                // The records before it are handed out first.
                Some(other) if !parts.is_empty() => {
                    self.pending.push_front(other);
                    break;
                }
                Some(Read::Passed(passed)) => {
                    self.positions.extend(passed);
                    return Ok(None);
                }
                Some(Read::Failed(error)) => {
                    if let Error::Undecodable { topic, partition, next, .. } = &error {
                        self.positions.insert((topic.clone(), *partition), *next);
                    }
                    return Err(error);
                }
            };
            let records = Records::new(&chunk)?;
            let rows_left = (rows_max.max(1) - rows).min(records.len());
            let bytes_left = bytes_max.saturating_sub(bytes);
            // The largest prefix that fits; sizes grow with the row, so bisect.
            let (mut fits, mut too_many) = (0, rows_left + 1);
            while fits + 1 < too_many {
                let middle = fits.midpoint(too_many);
                if records.memory_before(middle) <= bytes_left { fits = middle } else { too_many = middle }
            }
            if fits == 0 && parts.is_empty() {
                fits = 1;
            }
            let taken_bytes = records.memory_before(fits);
            let whole = fits == chunk.num_rows();
            if !whole {
                self.pending.push_front(Read::Chunk(chunk.slice(fits, chunk.num_rows() - fits)));
            }
            if fits > 0 {
                rows += fits;
                bytes += taken_bytes;
                parts.push(if whole { chunk } else { chunk.slice(0, fits) });
            }
            if !whole {
                break;
            }
        }
        let batch = match parts.len() {
            0 => return Ok(None),
            1 => parts.remove(0),
            _ => concat_batches(&schema(), &parts)?,
        };
        self.advance(&batch)?;
        metrics::CONSUMED_RECORDS.inc_by(rows as u64);
        metrics::CONSUMED_BYTES.inc_by(Records::new(&batch)?.payload_before(rows) as u64);
        Ok(Some(batch))
    }

    /// The next read; `None` when none came in time.
    async fn wait(&mut self, wait_max: Duration) -> Result<Option<Read>> {
        if let Some(read) = self.pending.pop_front() {
            return Ok(Some(read));
        }
        match tokio::time::timeout(wait_max, self.reads.recv()).await {
            Err(_) => Ok(None),
            Ok(None) => Err(Error::Closed { what: "consumer" }),
            Ok(read) => Ok(read),
        }
    }

    /// A message that has already arrived.
    fn ready(&mut self) -> Option<Read> {
        self.pending.pop_front().or_else(|| self.reads.try_recv().ok())
    }

    fn advance(&mut self, batch: &RecordBatch) -> Result<()> {
        let records = Records::new(batch)?;
        let mut row = 0;
        while row < records.len() {
            // Fetches bring runs of one partition; only the last offset of a run matters.
            let (topic, partition) = (records.topic(row), records.partition(row));
            let mut last = row;
            while last + 1 < records.len()
                && records.partition(last + 1) == partition
                && records.topic(last + 1) == topic
            {
                last += 1;
            }
            self.positions.insert((topic.to_string(), partition), records.offset(last) + 1);
            row = last + 1;
        }
        Ok(())
    }

    /// The offset to resume from, per `(topic, partition)`: no record returned by [`Consumer::next`] comes
    /// again, and no other is missed. It passes transaction markers and other offsets without records as soon
    /// as they were read.
    pub fn positions(&self) -> &BTreeMap<(String, i32), i64> {
        &self.positions
    }

    /// Commits [`Consumer::positions`] to the consumer group of [`Consumer::subscribe`].
    ///
    /// # Errors
    /// [`Error::Client`] when the group refuses, for example after a rebalance took the
    /// partitions away; [`Error::Unreachable`].
    pub async fn commit(&self) -> Result<()> {
        let (client, kafka, context) = (self.client.clone(), self.kafka.clone(), self.context.clone());
        let positions = self.positions.clone();
        blocking(move || {
            let started = Instant::now();
            let fail = |error| translate(&kafka, &context, "commit offsets", started.elapsed(), error);
            let owned = client.assignment().map_err(fail)?;
            let mut list = TopicPartitionList::new();
            for ((topic, partition), offset) in &positions {
                if owned.find_partition(topic, *partition).is_some() {
                    list.add_partition_offset(topic, *partition, Offset::Offset(*offset)).map_err(fail)?;
                }
            }
            if list.count() == 0 {
                return Ok(());
            }
            client.commit(&list, CommitMode::Sync).map_err(fail)
        })
        .await
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // Closing the channel frees a thread that waits for room in it.
        self.reads.close();
    }
}

/// A client; without a group it can only be assigned partitions.
fn connect(kafka: &KafkaConfig, group: Option<&str>) -> Result<(BaseConsumer<Context>, Context)> {
    let context = Context::default();
    let config = client_config(
        kafka,
        &[
            ("allow.auto.create.topics", "false"),
            ("check.crcs", "true"),
            // The default of one second leaves a fast reader idle after each full queue.
            ("fetch.queue.backoff.ms", "5"),
            ("queued.max.messages.kbytes", "32768"),
            ("partition.assignment.strategy", "cooperative-sticky"),
            ("reconnect.backoff.max.ms", "1000"),
            // The thread may wait for a slow caller, up to one day.
            ("max.poll.interval.ms", "86400000"),
        ],
        &[
            // librdkafka requires a name even without a group.
            ("group.id", group.unwrap_or("millrace")),
            ("enable.auto.commit", "false"),
            ("enable.auto.offset.store", "false"),
            ("enable.partition.eof", "true"),
            // Group members without a committed offset start here. Assigned partitions never reset silently:
            // their start offsets are checked first, and a later out-of-range offset is an error below.
            ("auto.offset.reset", if group.is_some() { "earliest" } else { "error" }),
        ],
    )?;
    let client = BaseConsumer::from_config_and_context(&config, context.clone())
        .map_err(|error| translate(kafka, &context, "create a consumer", Duration::ZERO, error))?;
    Ok((client, context))
}
