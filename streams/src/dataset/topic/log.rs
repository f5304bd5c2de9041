//! The log of a topic as ranges are read from it: that of a Kafka cluster or of the embedded broker.

use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};
use std::sync::atomic::AtomicBool;

use parking_lot::Mutex;

use crate::config::KafkaConfig;
use crate::error::Result;
use crate::topic::{Record, SpanReader};

/// Clients that wait for the next range. Each has a few threads.
const IDLE_MAX: usize = 8;

/// Visitor of records; breaks to end the reading.
pub(super) type Visit<'v> = &'v mut dyn FnMut(Record<'_>) -> Result<ControlFlow<()>>;

/// A topic of which ranges of offsets are read. Calls block.
pub(super) trait Log: Send + Sync + 'static {
    /// First offset, and the offset after the last record that can be read, by partition from 0.
    fn watermarks(&self) -> Result<BTreeMap<i32, (i64, i64)>>;

    /// The first offset with a record of `time_ms` or later, by partition; a partition without one is left out.
    fn offsets_at(&self, time_ms: i64, partitions: &[i32]) -> Result<BTreeMap<i32, i64>>;

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
            None => SpanReader::connect(&self.kafka, &self.topic)?,
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

    fn read(&self, partition: i32, offsets: Range<i64>, stop: &AtomicBool, visit: Visit<'_>) -> Result<()> {
        self.with(Some((partition, offsets.start)), |reader| reader.read(partition, offsets, stop, visit))
    }
}
