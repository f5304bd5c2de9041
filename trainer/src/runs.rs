//! The runs of training jobs, as the checkpoints of a volume record them.
//!
//! Nothing is written for this list: it reads the key and the newest checkpoint of each run
//! (`checkpoint.rs`) and the keys of publications (`publish.rs`). A run therefore leaves the list
//! when its checkpoints are removed: a job keeps its current run, and few finished and unfinished ones.
use millrace_datafs::{OpenFlags, View};
use serde::Serialize;

use crate::checkpoint::{JOB_FILE, RunRecord, STATE_FILE, directory};
use crate::error::{Error, Result};
use crate::job::JobFile;
use crate::ledger::EpochRecord;
use crate::publish;
use crate::state::History;

#[cfg(test)]
mod tests;

/// A run of a job.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Run {
    /// Name of the job.
    pub job: String,
    /// Id of the run in hex: a digest of what the job computes, its data and its first model.
    pub run: String,
    /// When the run was last begun, in seconds since 1970.
    pub begun: i64,
    /// Whether the newest checkpoint ended the job.
    pub finished: bool,
    /// Steps of the newest checkpoint that can be read; 0 without one.
    pub step: u64,
    /// Steps at which there are checkpoints, ascending.
    pub checkpoints: Vec<u64>,
    /// The complete epochs up to `step`.
    pub epochs: Vec<EpochRecord>,
    /// Model versions published from the checkpoints that are kept, ascending.
    pub versions: Vec<u64>,
    /// The job file of the last start, with all defaults; null when it cannot be read.
    pub settings: serde_json::Value,
}

/// The runs in a volume, or at a snapshot of it, the most recently begun last. With `job`, only its runs.
///
/// Costs one read per run and kilobytes per checkpoint; the weights are not read. A checkpoint that cannot be
/// read, and a run of a newer format, is left out with a warning.
///
/// # Errors
/// [`Error::Volume`]
pub fn list(view: &View, job: Option<&str>) -> Result<Vec<Run>> {
    let prefix = job.map_or("trainer/".to_owned(), |job| format!("trainer/{job}/checkpoint/"));
    let found = view
        .key_scan(&prefix)
        .map_err(|e| Error::volume(format!("read keys {prefix} of {}", view.spec()), e))?;
    let mut runs = Vec::new();
    for (key, bytes) in found {
        let Some(job) = job_of(&key) else { continue };
        match RunRecord::parse(&key, &bytes, &format!("{}:/checkpoints/{job}", view.spec())) {
            Ok(record) => runs.push(read(view, job, record)?),
            Err(error) => tracing::warn!(%error, "a run is left out"),
        }
    }
    runs.sort_by(|a, b| (a.begun, &a.run).cmp(&(b.begun, &b.run)));
    Ok(runs)
}

/// The job of a run's key, `trainer/<job>/checkpoint/<run>`.
fn job_of(key: &str) -> Option<&str> {
    let (job, rest) = key.strip_prefix("trainer/")?.split_once('/')?;
    rest.strip_prefix("checkpoint/").is_some_and(|run| !run.is_empty()).then_some(job)
}

fn read(view: &View, job: &str, record: RunRecord) -> Result<Run> {
    let folder = format!("checkpoints/{job}");
    let mut history = None;
    for kept in record.kept.iter().rev() {
        let path = format!("{folder}/{}/{STATE_FILE}", kept.folder);
        match read_history(view, &path) {
            Ok(read) => {
                history = Some(read);
                break;
            }
            Err(error) => tracing::warn!(job, step = kept.step, %error, "a checkpoint cannot be read"),
        }
    }
    let settings = view
        .read_file(&format!("{folder}/{}/{JOB_FILE}", directory(&record.run)))
        .ok()
        .and_then(|text| serde_json::from_slice::<serde_json::Value>(&text).ok())
        .unwrap_or_default();
    let mut versions = Vec::new();
    // A job file of a newer program may have keys that this one does not know.
    if let Ok(job) = serde_json::from_value::<JobFile>(settings.clone()) {
        for kept in &record.kept {
            let key = publish::key_of(&job, &record.run, kept.step);
            versions.extend(publish::recorded(view, &key)?.map(|(_, published)| published.version));
        }
    }
    versions.sort_unstable();
    let (step, epochs) = history.map_or((0, Vec::new()), |history| (history.step, history.ledger.epochs));
    Ok(Run {
        job: job.to_owned(),
        run: record.run,
        begun: record.begun,
        finished: record.finished,
        step,
        checkpoints: record.kept.iter().map(|kept| kept.step).collect(),
        epochs,
        versions,
        settings,
    })
}

/// Reads the counters at the head of a state.
fn read_history(view: &View, path: &str) -> Result<History> {
    let place = || format!("{}:/{path}", view.spec());
    let failed = |error| Error::volume(format!("read checkpoint {}", place()), error);
    let damaged = |reason| Error::Checkpoint { place: place(), reason };
    let node = view.stat(path).map_err(failed)?.node;
    let file = view.open(node, OpenFlags::READ).map_err(failed)?;
    let start = file.read_at(0, History::LENGTH_BYTES).map_err(failed)?;
    let end = History::header_end(&start).map_err(damaged)?;
    History::decode(&file.read_at(0, end).map_err(failed)?).map_err(damaged)
}
