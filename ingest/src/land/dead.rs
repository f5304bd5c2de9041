//! Dead letters: records that did not decode, whole and with the reason. They go to files of the volume
//! (published with the offsets, exactly once) or to a topic (delivered before the offsets move, at least
//! once).

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use arrow::array::{ArrayRef, RecordBatch, StringArray, UInt32Array};
use arrow::compute::take_record_batch;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use arrow::error::ArrowError;
use bytes::Bytes;
use millrace_datafs::View;
use millrace_streams::topic::{self, OutRecord, Producer, Records};
use tokio::runtime::Handle;

use super::Completed;
use super::file::ParquetFile;
use crate::config::{DeadLetter, Job};
use crate::decode::Reject;
use crate::error::{Error, Result};

/// Columns of a dead-letter file: those of consumed records, and the reason.
static SCHEMA: LazyLock<SchemaRef> = LazyLock::new(|| {
    let mut fields = topic::schema().fields().to_vec();
    fields.push(Arc::new(Field::new("_reason", DataType::Utf8, false)));
    Arc::new(Schema::new(fields))
});

/// Headers that a dead letter on a topic always has, in this order.
const OWN_HEADERS: [&str; 4] = ["millrace.reason", "millrace.topic", "millrace.partition", "millrace.offset"];

/// Destination of the dead letters of a run.
pub(crate) enum DeadLetters {
    Directory {
        folder: String,
        /// One file per partition since the last publish.
        files: BTreeMap<i32, ParquetFile>,
    },
    Topic {
        topic: String,
        producer: Producer,
        runtime: Handle,
    },
}

impl DeadLetters {
    pub(crate) fn new(job: &Job, producer: Option<(Producer, Handle)>) -> Self {
        match (&job.dead_letter, producer) {
            (DeadLetter::Topic(topic), Some((producer, runtime))) => {
                Self::Topic { topic: topic.clone(), producer, runtime }
            }
            (DeadLetter::Topic(folder) | DeadLetter::Directory(folder), _) => {
                Self::Directory { folder: folder.clone(), files: BTreeMap::new() }
            }
        }
    }

    /// Adds the rejected rows of a batch. Brokers have acknowledged dead letters for a topic when it returns.
    pub(crate) fn add(
        &mut self,
        job: &Job,
        view: &View,
        batch: &RecordBatch,
        rejected: &[(usize, Reject)],
        completed: &mut Vec<Completed>,
    ) -> Result<()> {
        let records = Records::new(batch).map_err(|e| topic_error(job, e))?;
        match self {
            Self::Topic { topic, producer, runtime } => {
                let letters: Vec<OutRecord> =
                    rejected.iter().map(|(row, reject)| letter(topic, &records, *row, reject)).collect();
                runtime.block_on(deliver(producer, letters)).map_err(|e| topic_error(job, e))
            }
            Self::Directory { folder, files } => {
                let mut partitions: BTreeMap<i32, Vec<&(usize, Reject)>> = BTreeMap::new();
                for one in rejected {
                    partitions.entry(records.partition(one.0)).or_default().push(one);
                }
                for (partition, rejected) in partitions {
                    let (Some(first), Some(last)) = (rejected.first(), rejected.last()) else {
                        continue;
                    };
                    let (first, last) = (records.offset(first.0), records.offset(last.0));
                    let bytes = rejected.iter().map(|(row, _)| records.memory(*row)).sum();
                    let letters = letters(batch, &rejected).map_err(|source| Error::Arrow {
                        job: job.name().to_owned(),
                        source: Box::new(source),
                    })?;
                    if !files.contains_key(&partition) {
                        if files.len() >= super::FILES_OPEN_MAX {
                            for file in std::mem::take(files).into_values() {
                                completed.push(file.complete(job, folder)?);
                            }
                        }
                        let file = ParquetFile::create(view, job, partition, first, SCHEMA.clone())?;
                        files.insert(partition, file);
                    }
                    if let Some(file) = files.get_mut(&partition) {
                        file.write(job, &letters, bytes, last)?;
                    }
                }
                Ok(())
            }
        }
    }

    /// Completes the files, for the publish.
    pub(crate) fn complete(&mut self, job: &Job) -> Result<Vec<Completed>> {
        match self {
            Self::Topic { .. } => Ok(Vec::new()),
            Self::Directory { folder, files } => {
                std::mem::take(files).into_values().map(|file| file.complete(job, folder)).collect()
            }
        }
    }
}

/// Sends dead letters. A record may be as large as brokers allow and leave no room for the reason. Its dead
/// letter then names the record's position instead of holding the record.
async fn deliver(producer: &Producer, letters: Vec<OutRecord>) -> Result<(), millrace_streams::Error> {
    match producer.send_all(letters.iter().cloned()).await {
        Err(millrace_streams::Error::RecordTooLarge { .. }) => {}
        sent => return sent.map(drop),
    }
    for letter in letters {
        let short = without_record(&letter);
        match producer.send(letter).await {
            Err(millrace_streams::Error::RecordTooLarge { .. }) => producer.send(short).await?,
            sent => sent?,
        };
    }
    Ok(())
}

/// A dead letter with the reason and the source, without the record's content.
fn without_record(letter: &OutRecord) -> OutRecord {
    let bytes = letter.payload.as_ref().map_or(0, Bytes::len);
    let own = OWN_HEADERS.len();
    let at = letter.headers.iter().rposition(|(key, _)| key == OWN_HEADERS[0]).unwrap_or(0);
    let mut headers: Vec<_> = letter.headers.iter().skip(at).take(own).cloned().collect();
    headers.push(("millrace.value_bytes".to_owned(), Some(Bytes::from(bytes.to_string()))));
    OutRecord { payload: None, headers, ..letter.clone() }
}

/// The rejected rows unchanged, with the reasons.
fn letters(batch: &RecordBatch, rejected: &[&(usize, Reject)]) -> Result<RecordBatch, ArrowError> {
    let rows: UInt32Array = rejected.iter().map(|(row, _)| u32::try_from(*row).ok()).collect();
    let reasons = rejected.iter().map(|(_, reject)| reject.reason.as_str());
    let taken = take_record_batch(batch, &rows)?;
    let mut columns: Vec<ArrayRef> = taken.columns().to_vec();
    columns.push(Arc::new(StringArray::from_iter_values(reasons)));
    RecordBatch::try_new(SCHEMA.clone(), columns)
}

/// A dead letter as a record: value and headers unchanged, the source in key and headers.
fn letter(topic: &str, records: &Records<'_>, row: usize, reject: &Reject) -> OutRecord {
    let source = (records.topic(row), records.partition(row), records.offset(row));
    let mut headers: Vec<(String, Option<Bytes>)> = records
        .headers(row)
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value.map(Bytes::copy_from_slice)))
        .collect();
    let header = |key: &str, value: String| (key.to_owned(), Some(Bytes::from(value)));
    let own = [reject.reason.clone(), source.0.to_owned(), source.1.to_string(), source.2.to_string()];
    headers.extend(OWN_HEADERS.into_iter().zip(own).map(|(k, v)| header(k, v)));
    if let Some(key) = records.key(row) {
        headers.push(("millrace.key".to_owned(), Some(Bytes::copy_from_slice(key))));
    }
    OutRecord {
        topic: topic.to_owned(),
        partition: None,
        key: Some(format!("{}/{}/{}", source.0, source.1, source.2).into()),
        payload: records.value(row).map(Bytes::copy_from_slice),
        headers,
        timestamp_ms: records.timestamp_ms(row),
    }
}

fn topic_error(job: &Job, source: millrace_streams::Error) -> Error {
    Error::Topic { job: job.name().to_owned(), topic: job.topic().to_owned(), source: Box::new(source) }
}
