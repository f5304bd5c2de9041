//! Lag of an ingest job or a pipe: the ends of the topic's partitions less the offsets that the volume records.

use std::collections::BTreeMap;

use anyhow::Result;
use millrace_datafs::{Datafs, Name};
use millrace_serving::PipeConfig;
use millrace_streams::KafkaConfig;
use millrace_streams::topic;

use crate::context::live;
use crate::failure::{Exit, fail};

/// Next offset by partition.
type Offsets = BTreeMap<i32, i64>;

/// A lag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Lag {
    /// Records, or gaps in the offsets, between the positions and the ends of all partitions.
    pub(super) records: u64,
    /// Partitions of the topic.
    pub(super) partitions: u64,
}

/// The next offsets of an ingest job. None are recorded before its first publish, and without the volume, which
/// ingest creates. Blocks on metadata.
///
/// # Errors
/// A job that lands another topic; errors of the metadata.
pub(super) fn of_job(datafs: &Datafs, job: &str, topic: &str, volume: &Name) -> Result<Offsets> {
    let view = match datafs.view(&live(volume)) {
        Ok(view) => view,
        Err(error) if error.is_not_found() => return Ok(Offsets::new()),
        Err(error) => return Err(error.into()),
    };
    let mut jobs = millrace_ingest::offsets_by_job(&view)?;
    let Some(mut topics) = jobs.remove(job) else { return Ok(Offsets::new()) };
    match (topics.remove(topic), topics.keys().next()) {
        (Some(offsets), _) => Ok(offsets),
        (None, None) => Ok(Offsets::new()),
        (None, Some(other)) => fail(
            Exit::Usage,
            format!(
                "ingest job {job} of volume {volume} lands topic {other}, not {topic}: correct topic or job"
            ),
        ),
    }
}

/// The next offsets of a pipe. Blocks on metadata.
///
/// # Errors
/// A volume that does not exist: without its model, the pipe cannot run. Errors of the metadata.
pub(super) fn of_pipe(datafs: &Datafs, pipe: &PipeConfig, volume: &Name) -> Result<Offsets> {
    let view = datafs.view(&live(volume))?;
    Ok(millrace_serving::pipe::offsets(&view, pipe)?)
}

/// The lag behind the ends of a topic. `offsets` must have been read before: a consumer can then only have come
/// nearer to the ends.
///
/// # Errors
/// Brokers that do not answer; a topic that does not exist, or that ends before an offset.
pub(super) async fn behind(kafka: &KafkaConfig, topic: &str, offsets: &Offsets) -> Result<Lag> {
    let marks = topic::watermarks(kafka, topic).await?;
    for (partition, next) in offsets {
        let high = marks.get(partition).map(|(_, high)| *high);
        if high.is_none_or(|high| *next > high) && *next > 0 {
            let end = high.map_or("does not exist".to_owned(), |high| format!("ends at {high}"));
            return fail(
                Exit::Conflict,
                format!(
                    "the lag of topic {topic} is unknown: partition {partition} was read up to offset {next} and {end}; the \
                     topic was deleted and created again, so its consumer needs a new name"
                ),
            );
        }
    }
    let lag = |(partition, marks): (&i32, &(i64, i64))| {
        millrace_ingest::partition_lag(offsets.get(partition).copied(), *marks)
    };
    Ok(Lag { records: marks.iter().map(lag).sum(), partitions: marks.len() as u64 })
}
