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

/// The offsets that a volume records for a consumer.
#[derive(Debug, Default)]
pub(super) struct Recorded {
    /// Empty before the consumer's first commit.
    pub(super) offsets: Offsets,
    /// What does not exist, if there are no offsets: before the first commit, or by a wrong name in the trigger.
    pub(super) missing: Option<String>,
}

impl Recorded {
    fn missing(what: String) -> Recorded {
        Recorded { offsets: Offsets::new(), missing: Some(what) }
    }
}

/// The next offsets of an ingest job. None are recorded before its first publish, and without the volume, which
/// ingest creates. Blocks on metadata.
///
/// # Errors
/// A job that lands another topic; errors of the metadata.
pub(super) fn of_job(datafs: &Datafs, job: &str, topic: &str, volume: &Name) -> Result<Recorded> {
    let view = match datafs.view(&live(volume)) {
        Ok(view) => view,
        Err(error) if error.is_not_found() => {
            return Ok(Recorded::missing(format!("volume {volume} does not exist")));
        }
        Err(error) => return Err(error.into()),
    };
    let mut jobs = millrace_ingest::offsets_by_job(&view)?;
    let Some(mut topics) = jobs.remove(job) else {
        return Ok(Recorded::missing(format!("ingest job {job} does not exist in volume {volume}")));
    };
    match (topics.remove(topic), topics.keys().next()) {
        (Some(offsets), _) => Ok(Recorded { offsets, missing: None }),
        (None, None) => Ok(Recorded::default()),
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
pub(super) fn of_pipe(datafs: &Datafs, pipe: &PipeConfig, volume: &Name) -> Result<Recorded> {
    let view = datafs.view(&live(volume))?;
    let offsets = millrace_serving::pipe::offsets(&view, pipe)?;
    if offsets.is_empty() {
        let PipeConfig { name, input, output, model, .. } = pipe;
        return Ok(Recorded::missing(format!(
            "pipe {name} from topic {input} to {output} with model {model} does not exist in volume {volume}"
        )));
    }
    Ok(Recorded { offsets, missing: None })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_of_a_misspelt_volume_or_job_are_missing_with_its_name() {
        let home = tempfile::tempdir().unwrap();
        let datafs = Datafs::open(home.path(), &millrace_datafs::Config::default()).unwrap();
        let [volume, other]: [Name; 2] = ["clicks", "clciks"].map(|name| name.parse().unwrap());
        datafs.volume_create(&volume).unwrap();
        let found = of_job(&datafs, "job", "topic", &other).unwrap();
        assert_eq!(found.missing.as_deref(), Some("volume clciks does not exist"));
        let found = of_job(&datafs, "jbo", "topic", &volume).unwrap();
        assert_eq!(found.missing.as_deref(), Some("ingest job jbo does not exist in volume clicks"));
        assert!(found.offsets.is_empty());
        let pipe = PipeConfig { name: "pieps".into(), ..PipeConfig::default() };
        let missing = of_pipe(&datafs, &pipe, &volume).unwrap().missing.unwrap();
        assert!(missing.starts_with("pipe pieps from topic"), "{missing}");
    }
}
