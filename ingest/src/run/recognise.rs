//! Recognition of the topic whose records the volume holds.
//!
//! A topic that was deleted and created again has the same name, and once it is as long as the old one its
//! offsets look the same. The record at an offset of a topic never changes, so the last record that landed is
//! read again and compared.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use millrace_streams::KafkaConfig;
use millrace_streams::topic::{Consumer, Records};

use super::{BATCH_BYTES_MAX, BATCH_ROWS_MAX, Marks, WAIT, topic_error};
use crate::config::Job;
use crate::error::{Error, Result};
use crate::state::LastRecord;

/// Longest time for the brokers to send an awaited record.
const WAIT_MAX: Duration = Duration::from_secs(60);
/// Partitions whose last records are read at once. The brokers also send the records after them.
const PARTITIONS_AT_ONCE: usize = 8;

/// Compares the last landed record of each partition with the topic's record at that offset. Records that
/// retention or compaction removed meanwhile cannot be compared and are skipped.
///
/// # Errors
/// [`Error::TopicReplaced`]; [`Error::OffsetLost`] when the topic has become shorter meanwhile; [`Error::Topic`] when the
/// brokers do not send the records.
pub(super) async fn check(
    job: &Job,
    kafka: &KafkaConfig,
    last: &BTreeMap<i32, LastRecord>,
    marks: &Marks,
) -> Result<()> {
    let is_held = |partition: &i32, offset: i64| {
        marks.get(partition).is_some_and(|(low, high)| (*low..*high).contains(&offset))
    };
    let mut open: BTreeMap<i32, &LastRecord> = last
        .iter()
        .filter(|(partition, last)| is_held(partition, last.offset))
        .map(|(partition, last)| (*partition, last))
        .collect();
    while !open.is_empty() {
        check_some(job, kafka, &mut open).await?;
    }
    Ok(())
}

/// As [`check`], for a few partitions of `open`; removes those that are done, at least one.
async fn check_some(job: &Job, kafka: &KafkaConfig, open: &mut BTreeMap<i32, &LastRecord>) -> Result<()> {
    let some: Vec<i32> = open.keys().take(PARTITIONS_AT_ONCE).copied().collect();
    let start: Vec<(String, i32, i64)> =
        some.iter().map(|partition| (job.topic().to_owned(), *partition, open[partition].offset)).collect();
    let mut consumer = match Consumer::assign(kafka, &start).await {
        // Retention removed the record after the watermarks were read. A topic that ends before it is an error.
        Err(millrace_streams::Error::OffsetOutOfRange { partition, requested, low, .. })
            if requested < low =>
        {
            open.remove(&partition);
            return Ok(());
        }
        consumer => consumer.map_err(|e| topic_error(job, kafka, e))?,
    };
    let (began, awaited) = (Instant::now(), open.len());
    loop {
        match consumer.next(BATCH_ROWS_MAX as usize, BATCH_BYTES_MAX as usize, WAIT).await {
            Ok(Some(batch)) => {
                let records = Records::new(&batch).map_err(|e| topic_error(job, kafka, e))?;
                compare(job, &records, open)?;
            }
            Ok(None) | Err(millrace_streams::Error::Undecodable { .. }) => {}
            // The consumer has ended; the next call retries the partitions that are still open.
            Err(millrace_streams::Error::OffsetOutOfRange { partition, requested, low, .. })
                if requested < low =>
            {
                open.remove(&partition);
                return Ok(());
            }
            Err(error) => return Err(topic_error(job, kafka, error)),
        }
        // The position passed an offset that holds no record any more.
        for ((_, partition), next) in consumer.positions() {
            if open.get(partition).is_some_and(|last| last.offset < *next) {
                open.remove(partition);
            }
        }
        if !some.iter().any(|partition| open.contains_key(partition)) {
            return Ok(());
        }
        if began.elapsed() >= WAIT_MAX {
            if open.len() < awaited {
                // A slow link: the next call retries the open partitions, without the records after the
                // others.
                return Ok(());
            }
            let error = millrace_streams::Error::Unreachable {
                bootstrap_servers: kafka.bootstrap_servers.clone(),
                waited_ms: began.elapsed().as_millis() as u64,
                reason: "the last landed record was not received".to_owned(),
            };
            return Err(topic_error(job, kafka, error));
        }
    }
}

/// Removes from `open` the partitions whose record is in `records`.
fn compare(job: &Job, records: &Records<'_>, open: &mut BTreeMap<i32, &LastRecord>) -> Result<()> {
    for row in 0..records.len() {
        let (partition, offset) = (records.partition(row), records.offset(row));
        let Some(last) = open.get(&partition).filter(|last| last.offset <= offset) else { continue };
        if last.offset == offset && last.digest != records.digest(row) {
            return Err(Error::TopicReplaced {
                job: job.name().to_owned(),
                volume: job.config.volume.clone(),
                topic: job.topic().to_owned(),
                partition,
                offset,
            });
        }
        open.remove(&partition);
    }
    Ok(())
}
