//! The output records of a pipe: predictions and dead letters.

use bytes::Bytes;
use millrace_streams::KafkaConfig;
use millrace_streams::topic::{self, OutRecord, Producer, Records};
use serde_json::{Map, Value, json};

use crate::error::Result;
use millrace_serving_core::config::PipeConfig;
use millrace_serving_core::record::RowOutputs;
use millrace_serving_repository::model::Model;

/// Header with `topic/partition/offset` of the record that was answered.
pub(super) const SOURCE_HEADER: &str = "millrace-source";
/// Header with `name/version` of the model that answered.
pub(super) const MODEL_HEADER: &str = "millrace-model";
/// Header with [`identity`] of the pipe that answered.
pub(super) const PIPE_HEADER: &str = "millrace-pipe";
/// Header with the id of the pipe's positions.
pub(super) const ID_HEADER: &str = "millrace-pipe-id";
/// Header with the timestamp of the record that was answered, in milliseconds since 1970.
pub(super) const TIME_HEADER: &str = "millrace-source-timestamp";
/// Header with the reason why a record is a dead letter.
const REASON_HEADER: &str = "millrace-reason";
/// Header with the size of the value that a shortened dead letter leaves out.
const VALUE_BYTES_HEADER: &str = "millrace-value-bytes";
/// Largest key that a shortened dead letter keeps, in bytes.
const SHORT_KEY_BYTES_MAX: usize = 1024;

/// Identity of a pipe among those that read the same topic: `name/model/output`.
pub(super) fn identity(config: &PipeConfig) -> String {
    format!("{}/{}/{}", config.name, config.model, config.output)
}

/// Builds both kinds of records, with the producer that sends them.
pub(super) struct Writer<'a> {
    pub(super) producer: Producer,
    pub(super) kafka: KafkaConfig,
    pub(super) config: &'a PipeConfig,
    pub(super) output_partitions: usize,
    /// The id of the pipe's positions.
    pub(super) id: String,
}

impl Writer<'_> {
    /// Creates the dead-letter topic if it is missing.
    pub(super) async fn ensure_dead_letter_topic(&self) -> Result<()> {
        topic::create_topic(&self.kafka, &self.config.dead_letter_topic(), 1).await?;
        Ok(())
    }

    /// A prediction with the key of its source. Without a key it goes to the partition with the source's
    /// number, if the output has it, so that the order of the source is kept.
    pub(super) fn prediction(
        &self,
        records: &Records<'_>,
        index: usize,
        carried: &Map<String, Value>,
        model: &Model,
        answer: RowOutputs,
    ) -> OutRecord {
        let (partition, offset) = (records.partition(index), records.offset(index));
        let mut value = json!({
            "model": model.name(),
            "version": model.version(),
            "outputs": answer.outputs,
            "source": { "topic": records.topic(index), "partition": partition, "offset": offset },
        });
        if !answer.argmax.is_empty() {
            value["argmax"] = json!(answer.argmax);
        }
        for (field, carried) in carried {
            // The prediction's own keys win over carried fields of the same name.
            if value.get(field).is_none() {
                value[field] = carried.clone();
            }
        }
        let record = OutRecord::new(self.config.output.clone(), value.to_string());
        let mut record = self
            .signed(record, records, index)
            .header(MODEL_HEADER, format!("{}/{}", model.name(), model.version()));
        record.timestamp_ms = records.timestamp_ms(index);
        record.key = records.key(index).map(Bytes::copy_from_slice);
        let same = usize::try_from(partition).is_ok_and(|number| number < self.output_partitions);
        if record.key.is_none() && same {
            record.partition = Some(partition);
        }
        record
    }

    /// The unchanged record with the reason in a header.
    pub(super) fn dead_letter(&self, records: &Records<'_>, index: usize, reason: &str) -> OutRecord {
        let reason: String = reason.chars().take(1000).collect();
        let mut record = OutRecord {
            topic: self.config.dead_letter_topic(),
            partition: None,
            key: records.key(index).map(Bytes::copy_from_slice),
            payload: records.value(index).map(Bytes::copy_from_slice),
            headers: Vec::new(),
            timestamp_ms: records.timestamp_ms(index),
        };
        for (name, value) in records.headers(index) {
            record.headers.push((name.to_owned(), value.map(Bytes::copy_from_slice)));
        }
        self.signed(record, records, index).header(REASON_HEADER, reason)
    }

    /// A dead letter that is too large for its topic, without the value of its record.
    pub(super) fn shortened(&self, letter: &OutRecord) -> OutRecord {
        let bytes = letter.payload.as_ref().map_or(0, Bytes::len);
        // The pipe's own headers are the last ones.
        let own = letter.headers.iter().rposition(|(name, _)| name == SOURCE_HEADER).unwrap_or(0);
        let short = OutRecord {
            topic: letter.topic.clone(),
            partition: letter.partition,
            key: letter.key.clone().filter(|key| key.len() <= SHORT_KEY_BYTES_MAX),
            payload: None,
            headers: letter.headers[own..].to_vec(),
            timestamp_ms: letter.timestamp_ms,
        };
        short.header(VALUE_BYTES_HEADER, bytes.to_string())
    }

    /// Adds headers with the source record and the identity of the pipe.
    fn signed(&self, record: OutRecord, records: &Records<'_>, index: usize) -> OutRecord {
        let mut record = record.header(SOURCE_HEADER, source(records, index));
        if let Some(timestamp_ms) = records.timestamp_ms(index) {
            record = record.header(TIME_HEADER, timestamp_ms.to_string());
        }
        record.header(PIPE_HEADER, identity(self.config)).header(ID_HEADER, self.id.clone())
    }
}

fn source(records: &Records<'_>, index: usize) -> String {
    format!("{}/{}/{}", records.topic(index), records.partition(index), records.offset(index))
}
