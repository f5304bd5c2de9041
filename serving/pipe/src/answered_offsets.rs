//! Answers without a commit: a crash between writing and committing leaves answers behind. The next run reads
//! them at the ends of the output topics and does not answer their records again.
//!
//! An answer carries the timestamp of its record. If the record at that offset has another timestamp, or the
//! offset lies beyond the end of the input, the input topic was deleted and created again. The pipe then
//! refuses to resume.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use millrace_streams::KafkaConfig;
use millrace_streams::topic::{self, Consumer, Records};

use super::output::{ID_HEADER, MODEL_HEADER, PIPE_HEADER, SOURCE_HEADER, TIME_HEADER, Writer, identity};
use super::progress::{EARLIER, Progress};
use super::{CHUNK_BYTES_MAX, CHUNK_ROWS_MAX, chunk_rows};
use crate::error::{Error, Result};
use millrace_serving_core::config::PipeConfig;

/// Partitions whose last records are read at once: for each partition the brokers also send the records
/// behind it.
const PARTITIONS_AT_ONCE: usize = 8;
/// Longest single wait for the ends of the topics.
const POLL: Duration = Duration::from_millis(250);

/// A record at the end of an output topic that answers a record of the input.
struct Answer {
    place: (i32, i64),
    /// Timestamp of the record that it answers; earlier releases wrote none.
    timestamp_ms: Option<i64>,
    /// Whether it carries the [`identity`] of the pipe; earlier releases wrote none.
    is_named: bool,
    /// The pipe's positions id when it answered; earlier releases wrote none.
    id: Option<String>,
    /// Name of the model; dead letters have none.
    model: Option<String>,
}

/// The ends of the output and dead-letter topics, one chunk of records for each partition: there is never
/// more than one chunk between two commits. Answers that name another pipe are left out.
pub(super) struct Tail {
    answers: Vec<Answer>,
}

impl Tail {
    /// Reads the records that the brokers had appended when it was called.
    pub(super) async fn read(writer: &Writer<'_>) -> Result<Tail> {
        let config = writer.config;
        let chunk = i64::try_from(chunk_rows(config)).unwrap_or(i64::MAX);
        let mut tail = Tail { answers: Vec::new() };
        for name in [config.output.clone(), config.dead_letter_topic()] {
            let ends = match topic::watermarks(&writer.kafka, &name).await {
                // The pipe creates the dead-letter topic with the first dead letter.
                Err(millrace_streams::Error::UnknownTopic { .. }) => continue,
                ends => ends?,
            };
            if ends.values().all(|(low, high)| low == high) {
                continue;
            }
            let start: Vec<(String, i32, i64)> = ends
                .iter()
                .map(|(partition, (low, high))| (name.clone(), *partition, *low.max(&(high - chunk))))
                .collect();
            let mut consumer = Consumer::assign(&writer.kafka, &start).await?;
            let is_read = |consumer: &Consumer| {
                consumer
                    .positions()
                    .iter()
                    .all(|((_, partition), next)| ends.get(partition).is_none_or(|(_, high)| next >= high))
            };
            while !is_read(&consumer) {
                match consumer.next(CHUNK_ROWS_MAX, CHUNK_BYTES_MAX, POLL).await {
                    Ok(Some(batch)) => tail.add(&Records::new(&batch)?, config),
                    Ok(None) | Err(millrace_streams::Error::Undecodable { .. }) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(tail)
    }

    fn add(&mut self, records: &Records<'_>, config: &PipeConfig) {
        let own = identity(config);
        for index in 0..records.len() {
            let headers = records.headers(index);
            let header = |wanted: &str| headers.iter().rev().find(|(name, _)| *name == wanted)?.1;
            let text = |wanted: &str| Some(String::from_utf8_lossy(header(wanted)?).into_owned());
            let Some(place) = header(SOURCE_HEADER).and_then(|source| place(source, &config.input)) else {
                continue;
            };
            let pipe = header(PIPE_HEADER);
            if pipe.is_some_and(|pipe| pipe != own.as_bytes()) {
                continue;
            }
            let model = text(MODEL_HEADER).map(|model| match model.rsplit_once('/') {
                Some((name, _)) => name.to_owned(),
                None => model,
            });
            let timestamp_ms = text(TIME_HEADER).and_then(|time| time.parse().ok());
            let is_named = pipe.is_some();
            self.answers.push(Answer { place, timestamp_ms, is_named, id: text(ID_HEADER), model });
        }
    }

    /// Whether this pipe may adopt positions that an earlier release stored by name and input. Not when all
    /// answers of that release come from other models.
    pub(super) fn allows_adoption(&self, config: &PipeConfig) -> bool {
        let unnamed = self.answers.iter().filter(|answer| !answer.is_named);
        let mut models = unnamed.filter_map(|answer| answer.model.as_deref()).peekable();
        models.peek().is_none() || models.any(|model| model == config.model)
    }
}

/// Offsets of the input topic, by partition, that this pipe answered.
#[derive(Debug)]
pub(super) struct AnsweredOffsets {
    name: String,
    input: String,
    /// Those since the last commit, with the timestamp of the record if the answer carries it.
    places: HashMap<(i32, i64), Option<i64>>,
    /// The last answered offset of each partition, committed or not.
    last: BTreeMap<i32, (i64, Option<i64>)>,
}

impl AnsweredOffsets {
    pub(super) fn new(tail: Tail, config: &PipeConfig, progress: &Progress) -> AnsweredOffsets {
        let by_this_pipe = |answer: &&Answer| match (answer.is_named, &answer.id) {
            (true, Some(id)) => *id == progress.id,
            (true, None) => progress.id == EARLIER,
            (false, _) => {
                progress.adopted && answer.model.as_ref().is_none_or(|model| *model == config.model)
            }
        };
        let mut answered = AnsweredOffsets {
            name: config.name.clone(),
            input: config.input.clone(),
            places: HashMap::new(),
            last: BTreeMap::new(),
        };
        for Answer { place, timestamp_ms, .. } in tail.answers.iter().filter(by_this_pipe) {
            let (partition, offset) = *place;
            let last = answered.last.entry(partition).or_insert((offset, *timestamp_ms));
            if offset >= last.0 {
                *last = (offset, *timestamp_ms);
            }
            if progress.next(partition).is_none_or(|next| offset >= next) {
                answered.places.insert(*place, *timestamp_ms);
            }
        }
        if !answered.places.is_empty() {
            tracing::info!(
                pipe = config.name,
                records = answered.places.len(),
                "skipped records that were answered before the last commit"
            );
        }
        answered
    }

    /// Compares the last answer of each partition with the input; `marks` holds the first and the next offset
    /// by partition.
    ///
    /// # Errors
    /// [`Error::InputChanged`] if the record at that offset is not the one that was answered;
    /// [`Error::Streams`].
    pub(super) async fn check(&self, kafka: &KafkaConfig, marks: &BTreeMap<i32, (i64, i64)>) -> Result<()> {
        let mut open: BTreeMap<i32, i64> = BTreeMap::new();
        for (&partition, &(offset, timestamp_ms)) in &self.last {
            match marks.get(&partition) {
                None => return Err(self.changed(partition, "the topic no longer has this partition")),
                Some((_, high)) if offset >= *high => {
                    let reason =
                        format!("the pipe has answered offset {offset}, and the partition ends at {high}");
                    return Err(self.changed(partition, &reason));
                }
                // Retention has removed the record.
                Some((low, _)) if offset < *low => {}
                Some(_) if timestamp_ms.is_some() => drop(open.insert(partition, offset)),
                Some(_) => {}
            }
        }
        while !open.is_empty() {
            self.compare_some(kafka, &mut open).await?;
        }
        Ok(())
    }

    /// Compares the last answers of some partitions of `open` with the input, and removes these partitions
    /// from `open`. A record that retention removes meanwhile cannot be compared.
    async fn compare_some(&self, kafka: &KafkaConfig, open: &mut BTreeMap<i32, i64>) -> Result<()> {
        let some: Vec<i32> = open.keys().take(PARTITIONS_AT_ONCE).copied().collect();
        let start: Vec<(String, i32, i64)> =
            some.iter().map(|partition| (self.input.clone(), *partition, open[partition])).collect();
        let mut consumer = match Consumer::assign(kafka, &start).await {
            Err(millrace_streams::Error::OffsetOutOfRange { partition, requested, low, .. })
                if requested < low =>
            {
                open.remove(&partition);
                return Ok(());
            }
            consumer => consumer?,
        };
        while some.iter().any(|partition| open.contains_key(partition)) {
            match consumer.next(CHUNK_ROWS_MAX, CHUNK_BYTES_MAX, POLL).await {
                Ok(Some(batch)) => {
                    let records = Records::new(&batch)?;
                    for index in 0..records.len() {
                        let (partition, offset) = (records.partition(index), records.offset(index));
                        if open.get(&partition) == Some(&offset)
                            && let Some((_, answered_ms)) = self.last.get(&partition)
                        {
                            self.compare(partition, offset, *answered_ms, records.timestamp_ms(index))?;
                        }
                    }
                }
                Ok(None) | Err(millrace_streams::Error::Undecodable { .. }) => {}
                // The consumer has ended; the caller compares the remaining partitions again.
                Err(millrace_streams::Error::OffsetOutOfRange { partition, requested, low, .. })
                    if requested < low =>
                {
                    open.remove(&partition);
                    return Ok(());
                }
                Err(error) => return Err(error.into()),
            }
            for ((_, partition), next) in consumer.positions() {
                if open.get(partition).is_some_and(|offset| offset < next) {
                    open.remove(partition);
                }
            }
        }
        Ok(())
    }

    /// Whether the record was answered; forgets the answer, so true only once.
    ///
    /// # Errors
    /// [`Error::InputChanged`] if the answer belongs to another record at that offset.
    pub(super) fn take(&mut self, partition: i32, offset: i64, timestamp_ms: Option<i64>) -> Result<bool> {
        if self.places.is_empty() {
            return Ok(false);
        }
        let Some(answered_ms) = self.places.remove(&(partition, offset)) else { return Ok(false) };
        self.compare(partition, offset, answered_ms, timestamp_ms)?;
        Ok(true)
    }

    /// Fails if the timestamp in the answer differs from that of the record at its offset.
    fn compare(&self, partition: i32, offset: i64, answered: Option<i64>, found: Option<i64>) -> Result<()> {
        match (answered, found) {
            (Some(answered), Some(found)) if answered != found => {
                let reason = format!(
                    "the record that the pipe has answered at offset {offset} had the timestamp {answered}, the one \
                     that is there has {found}"
                );
                Err(self.changed(partition, &reason))
            }
            _ => Ok(()),
        }
    }

    fn changed(&self, partition: i32, reason: &str) -> Error {
        Error::InputChanged {
            name: self.name.clone(),
            topic: self.input.clone(),
            partition,
            reason: reason.to_owned(),
        }
    }
}

/// Parses `topic/partition/offset` of the input topic; `None` for anything else, which another producer
/// wrote.
fn place(source: &[u8], input: &str) -> Option<(i32, i64)> {
    let mut parts = std::str::from_utf8(source).ok()?.rsplitn(3, '/');
    let offset = parts.next()?.parse().ok()?;
    let partition = parts.next()?.parse().ok()?;
    (parts.next()? == input).then_some((partition, offset))
}

#[cfg(test)]
mod tests {
    use millrace_streams::broker::{self, Broker};
    use millrace_streams::topic::{OutRecord, Producer};
    use tokio_util::sync::CancellationToken;

    use super::*;

    #[test]
    fn only_complete_input_positions_are_parsed() {
        assert_eq!(place(b"in/3/41", "in"), Some((3, 41)));
        for other in [&b"out/3/41"[..], b"in/3", b"in/x/41", b"in/3/", b"", b"\xff/1/2"] {
            assert_eq!(place(other, "in"), None);
        }
    }

    /// Retention removes the record after the pipe has asked for the ends of the input.
    #[tokio::test(flavor = "multi_thread")]
    async fn answered_record_removed_by_retention_is_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let config = broker::Config {
            listen: ([127, 0, 0, 1], 0).into(),
            segment_bytes_max: 1024,
            ..broker::Config::default()
        };
        let cancel = CancellationToken::new();
        let first = Broker::start(config.clone(), dir.path(), cancel.clone()).await.unwrap();
        let kafka = KafkaConfig::new(first.addr().to_string());
        topic::create_topic(&kafka, "in", 1).await.unwrap();
        let producer = Producer::connect(&kafka).await.unwrap();
        for _ in 0..20 {
            producer.send(OutRecord::new("in", vec![7; 500])).await.unwrap();
        }
        drop(producer);
        first.stop().await.unwrap();
        // A broker applies retention when it starts.
        let config = broker::Config { retention_bytes_max: 1024, ..config };
        let second = Broker::start(config, dir.path(), cancel).await.unwrap();
        let kafka = KafkaConfig::new(second.addr().to_string());
        let (low, high) = topic::watermarks(&kafka, "in").await.unwrap()[&0];
        assert!(low > 2 && high == 20, "{low}..{high}");
        let answered = AnsweredOffsets {
            name: "p".into(),
            input: "in".into(),
            places: HashMap::new(),
            last: BTreeMap::from([(0, (2, Some(1)))]),
        };
        answered.check(&kafka, &BTreeMap::from([(0, (0, high))])).await.unwrap();
        second.stop().await.unwrap();
    }
}
