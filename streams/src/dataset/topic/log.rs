//! The log of a topic as ranges are read from it: that of a Kafka cluster or of the embedded broker.

use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use parking_lot::Mutex;

use crate::config::KafkaConfig;
use crate::error::Result;
use crate::topic::{Isolation, Record, SpanReader};

/// Clients that wait for the next range. Each has a few threads.
const IDLE_MAX: usize = 8;

/// Visitor of records; breaks to end the reading.
pub(super) type Visit<'v> = &'v mut dyn FnMut(Record<'_>) -> Result<ControlFlow<()>>;

/// A topic of which ranges of offsets are read. Calls block.
pub(super) trait Log: Send + Sync + 'static {
    /// First offset, and the last stable offset, by partition from 0: the offset after the last record that can be read.
    fn watermarks(&self) -> Result<BTreeMap<i32, (i64, i64)>>;

    /// The first offset with a record of `time_ms` or later below the last stable offset, by partition; a partition
    /// without one is left out.
    fn offsets_at(&self, time_ms: i64, partitions: &[i32]) -> Result<BTreeMap<i32, i64>>;

    /// For each of the partitions the first offset with a record of `time_ms` or later, or the end of the log. Records of
    /// open and aborted transactions count.
    fn ends_at(&self, time_ms: i64, partitions: &[i32]) -> Result<BTreeMap<i32, i64>>;

    /// The time of a record, which may be one of an open transaction, in milliseconds since 1970-01-01 UTC.
    fn time_of(&self, partition: i32, offset: i64, stop: &AtomicBool) -> Result<Option<i64>>;

    /// Waits before the caller asks again whether a transaction has ended.
    fn pause(&self, time: Duration) {
        std::thread::sleep(time);
    }

    /// Hands the records of a range to `visit` in their order, until it breaks. Ends with an error once `stop` is set.
    fn read(&self, partition: i32, offsets: Range<i64>, stop: &AtomicBool, visit: Visit<'_>) -> Result<()>;
}

/// A topic of brokers.
pub(super) struct KafkaLog {
    kafka: KafkaConfig,
    topic: String,
    idle: Mutex<Vec<SpanReader>>,
}

impl KafkaLog {
    pub(super) fn new(kafka: KafkaConfig, topic: String) -> Self {
        Self { kafka, topic, idle: Mutex::default() }
    }

    /// Calls with a client, the one that stands at `place` if there is one. A client that failed is not used again.
    fn with<T>(
        &self,
        place: Option<(i32, i64)>,
        call: impl FnOnce(&mut SpanReader) -> Result<T>,
    ) -> Result<T> {
        let idle = {
            let mut idle = self.idle.lock();
            let is_there =
                |reader: &SpanReader| place.is_some_and(|(partition, at)| reader.is_at(partition, at));
            match idle.iter().position(is_there) {
                Some(at) => Some(idle.swap_remove(at)),
                None => idle.pop(),
            }
        };
        let mut reader = match idle {
            Some(reader) => reader,
            None => SpanReader::connect(&self.kafka, &self.topic, Isolation::Committed)?,
        };
        let called = call(&mut reader)?;
        let mut idle = self.idle.lock();
        if idle.len() < IDLE_MAX {
            idle.push(reader);
        }
        Ok(called)
    }
}

impl Log for KafkaLog {
    fn watermarks(&self) -> Result<BTreeMap<i32, (i64, i64)>> {
        self.with(None, |reader| reader.watermarks())
    }

    fn offsets_at(&self, time_ms: i64, partitions: &[i32]) -> Result<BTreeMap<i32, i64>> {
        self.with(None, |reader| reader.offsets_at(time_ms, partitions))
    }

    fn ends_at(&self, time_ms: i64, partitions: &[i32]) -> Result<BTreeMap<i32, i64>> {
        let reader = SpanReader::connect(&self.kafka, &self.topic, Isolation::Uncommitted)?;
        // In this order: if no record of that time was there, all records before the ends are earlier ones.
        let marks = reader.watermarks()?;
        let found = reader.offsets_at(time_ms, partitions)?;
        let end = |partition: &i32| {
            let (_, high) = marks.get(partition)?;
            Some((*partition, found.get(partition).copied().unwrap_or(*high)))
        };
        Ok(partitions.iter().filter_map(end).collect())
    }

    fn time_of(&self, partition: i32, offset: i64, stop: &AtomicBool) -> Result<Option<i64>> {
        let mut reader = SpanReader::connect(&self.kafka, &self.topic, Isolation::Uncommitted)?;
        let mut time = None;
        reader.read(partition, offset..offset + 1, stop, &mut |record| {
            time = record.timestamp_ms;
            Ok(ControlFlow::Break(()))
        })?;
        Ok(time)
    }

    fn read(&self, partition: i32, offsets: Range<i64>, stop: &AtomicBool, visit: Visit<'_>) -> Result<()> {
        self.with(Some((partition, offsets.start)), |reader| reader.read(partition, offsets, stop, visit))
    }
}
