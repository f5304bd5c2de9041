//! Second client of a consumer, which reads at single offsets to find the batch that an error is about.

use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::KafkaError;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use rdkafka::types::RDKafkaErrorCode as Code;

use super::connect;
use super::reader::POLL;
use crate::config::KafkaConfig;
use crate::error::{Error, Result};
use crate::topic::client::{ANSWER_WAIT, Context, translate};

/// Time limit of one [`Probe`] read at an offset.
const DAMAGE_WAIT: Duration = Duration::from_secs(5);

/// Whether the client received a batch that it cannot decode.
pub(super) fn is_undecodable(code: Code) -> bool {
    matches!(code, Code::BadMessage | Code::BadCompression | Code::NotImplemented)
}

/// First offset of the batch that a librdkafka error names: "… at offset 12 (…" or
/// "… of message at 12 of …".
pub(super) fn batch_offset(reason: &str) -> Option<i64> {
    reason.split(" at ").skip(1).find_map(|text| {
        let text = text.strip_prefix("offset ").unwrap_or(text);
        let digits = text.find(|c: char| !c.is_ascii_digit()).map_or(text, |end| &text[..end]);
        digits.parse().ok()
    })
}

/// Result of the first read at an offset.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ProbeResult {
    Record,
    /// The partition ends there, or nothing came in time.
    End,
    /// A batch that cannot be decoded, with its first offset where the library names it.
    Undecodable(Option<i64>),
    /// The broker cannot read its log there.
    Damage,
}

/// A second client, which reads at single offsets.
pub(super) struct Probe {
    kafka: KafkaConfig,
    context: Context,
    client: BaseConsumer<Context>,
}

impl Probe {
    pub(super) fn new(kafka: &KafkaConfig) -> Result<Self> {
        let (client, context) = connect(kafka, None)?;
        Ok(Self { kafka: kafka.clone(), context, client })
    }

    fn fail(&self, error: KafkaError) -> Error {
        translate(&self.kafka, &self.context, "consume", Duration::ZERO, error)
    }

    pub(super) fn read_at(&self, topic: &str, partition: i32, offset: i64) -> Result<ProbeResult> {
        let mut list = TopicPartitionList::new();
        list.add_partition_offset(topic, partition, Offset::Offset(offset)).map_err(|e| self.fail(e))?;
        self.client.assign(&list).map_err(|e| self.fail(e))?;
        let started = Instant::now();
        while started.elapsed() < DAMAGE_WAIT {
            match self.client.poll(POLL) {
                None => {}
                Some(Ok(_)) => return Ok(ProbeResult::Record),
                Some(Err(KafkaError::PartitionEOF(_))) => return Ok(ProbeResult::End),
                Some(Err(error)) => match error.rdkafka_error_code() {
                    Some(code) if is_undecodable(code) => {
                        return Ok(ProbeResult::Undecodable(batch_offset(&self.context.reason())));
                    }
                    Some(Code::InvalidMessage) => return Ok(ProbeResult::Damage),
                    _ => return Err(self.fail(error)),
                },
            }
        }
        Ok(ProbeResult::End)
    }

    /// The first offset after the batch that begins at `base` and holds `within`.
    pub(super) fn end_of_batch(&self, topic: &str, partition: i32, base: i64, within: i64) -> Result<i64> {
        let fail = |error| self.fail(error);
        let (_, high) = self.client.fetch_watermarks(topic, partition, ANSWER_WAIT).map_err(fail)?;
        let (mut inside, mut step) = (within.max(base), 1);
        // A read at any offset of the batch fails with the same first offset.
        let mut outside = loop {
            let offset = inside.saturating_add(step).min(high);
            if offset == high
                || self.read_at(topic, partition, offset)? != ProbeResult::Undecodable(Some(base))
            {
                break offset;
            }
            (inside, step) = (offset, step.saturating_mul(2));
        };
        while inside + 1 < outside {
            let middle = inside.midpoint(outside);
            match self.read_at(topic, partition, middle)? {
                ProbeResult::Undecodable(Some(found)) if found == base => inside = middle,
                _ => outside = middle,
            }
        }
        Ok(outside)
    }
}

#[cfg(test)]
mod tests {
    use super::batch_offset;

    #[test]
    fn errors_of_the_library_name_the_first_offset_of_the_batch() {
        for (reason, offset) in [
            (
                "MessageSet at offset 12 (80 bytes) failed CRC32C check (original 0x1 != calculated 0x2)",
                Some(12),
            ),
            (
                "Decompression (codec 0x1) of message at 4096 of 300 bytes failed: Local: Invalid compressed data",
                Some(4096),
            ),
            ("Unsupported Message(Set) MagicByte 3 at offset 7", Some(7)),
            ("Local: Bad message format", None),
        ] {
            assert_eq!(batch_offset(reason), offset, "{reason}");
        }
    }
}
