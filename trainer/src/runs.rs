//! The runs of training jobs, as the checkpoints of a volume record them.
//!
//! Nothing is written for this list: it reads the key and the newest checkpoint of each run
//! (`checkpoint.rs`) and the keys of publications (`publish.rs`). A run therefore leaves the list
//! when its checkpoints are removed: a job keeps its current run, and few finished and unfinished ones.
use std::collections::{BTreeSet, HashMap};

use millrace_datafs::{OpenFlags, View};
use serde::Serialize;

pub use crate::checkpoint::Throughput;
use crate::checkpoint::{JOB_FILE, JOB_RECORD_BYTES_MAX, RunRecord, STATE_FILE, directory};
use crate::error::{Error, Result};
use crate::job::JobFile;
use crate::ledger::EpochRecord;
use crate::publish;
use crate::script::{ScriptRecord, ScriptVersion, record};
use crate::state::History;
use crate::validation::{self, Evaluation};

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
    /// The evaluations on the validation data up to `step`.
    pub evaluations: Vec<Evaluation>,
    /// Rows per second from each begin or checkpoint of the run to the next one, in order.
    pub throughput: Vec<Throughput>,
    /// Model versions published from the run, ascending.
    pub versions: Vec<u64>,
    /// The job file of the last start, with all defaults; null when it cannot be read. Of a script: what it was started
    /// with.
    pub settings: serde_json::Value,
    /// The record of a run of `millrace train --script`. Such a run has no checkpoints and epochs that the trainer
    /// knows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub script: Option<ScriptRun>,
}

/// What is known of a script's run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ScriptRun {
    /// How it was started and how it ended.
    #[serde(flatten)]
    pub record: ScriptRecord,
    /// The versions that the script has published.
    pub published: Vec<ScriptVersion>,
}

impl Run {
    /// The evaluation with the lowest loss.
    pub fn best(&self) -> Option<&Evaluation> {
        validation::best(&self.evaluations)
    }
}

/// The runs in a volume, or at a snapshot of it, the most recently begun last. With `job`, only its runs.
///
/// Costs one read per run and kilobytes per checkpoint; the weights are not read. What cannot be read (a
/// checkpoint, the record of a publication, a run of another format) is left out with a warning.
///
/// # Errors
/// [`Error::Volume`]
pub fn list(view: &View, job: Option<&str>) -> Result<Vec<Run>> {
    let prefixes = match job {
        None => vec!["trainer/".to_owned()],
        Some(job) => vec![format!("trainer/{job}/checkpoint"), format!("trainer/{job}/script/")],
    };
    let mut found = Vec::new();
    for prefix in prefixes {
        let keys = view.key_scan(&prefix);
        found.extend(keys.map_err(|e| Error::volume(format!("read keys {prefix} of {}", view.spec()), e))?);
    }
    let mut runs = Vec::new();
    for (key, bytes) in found {
        if record::is_key(&key) {
            match record::parse(&bytes) {
                Some(record) => runs.push(of_script(view, record)?),
                None => {
                    tracing::warn!(key, "the run of a script is left out: its record is of another format")
                }
            }
            continue;
        }
        let Some(job) = job_of(&key) else {
            if let Some(job) = former_job_of(&key) {
                tracing::warn!(
                    job,
                    "a run of checkpoint format 1 is left out: start its job, which changes the run to the newer format"
                );
            }
            continue;
        };
        match RunRecord::parse(&key, &bytes, &format!("{}:/checkpoints/{job}", view.spec())) {
            Ok(record) => runs.push(read(view, job, record)?),
            Err(error) => tracing::warn!(%error, "a run is left out"),
        }
    }
    runs.sort_by(|a, b| (a.begun, &a.run).cmp(&(b.begun, &b.run)));
    Ok(runs)
}

/// The run of a script.
fn of_script(view: &View, record: ScriptRecord) -> Result<Run> {
    let published = record.versions(view)?;
    let mut settings = serde_json::to_value(&record).unwrap_or_default();
    if let Some(settings) = settings.as_object_mut() {
        // What tells runs apart is no setting. The names of variables would hide the others.
        for key in ["run", "job", "begun", "ended", "format_version", "environment"] {
            settings.remove(key);
        }
    }
    let versions: BTreeSet<u64> = published.iter().map(|version| version.version).collect();
    Ok(Run {
        job: record.job.clone(),
        run: record.run.clone(),
        begun: record.begun,
        finished: record.outcome.as_deref() == Some("succeeded"),
        step: 0,
        checkpoints: Vec::new(),
        epochs: Vec::new(),
        evaluations: Vec::new(),
        throughput: Vec::new(),
        versions: versions.into_iter().collect(),
        settings,
        script: Some(ScriptRun { record, published }),
    })
}

/// The job of a run's key, `trainer/<job>/checkpoint/<run>`.
fn job_of(key: &str) -> Option<&str> {
    let (job, rest) = key.strip_prefix("trainer/")?.split_once('/')?;
    rest.strip_prefix("checkpoint/").is_some_and(|run| !run.is_empty()).then_some(job)
}

/// The job of the key of checkpoint format 1, `trainer/<job>/checkpoint`.
fn former_job_of(key: &str) -> Option<&str> {
    let (job, rest) = key.strip_prefix("trainer/")?.split_once('/')?;
    (rest == "checkpoint").then_some(job)
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
        .read_file_up_to(&format!("{folder}/{}/{JOB_FILE}", directory(&record.run)), JOB_RECORD_BYTES_MAX)
        .ok()
        .and_then(|text| serde_json::from_slice::<serde_json::Value>(&text).ok())
        .unwrap_or_default();
    let (step, epochs, evaluations) = history.map_or((0, Vec::new(), Vec::new()), |history| {
        (history.step, history.ledger.epochs, history.evaluations)
    });
    // A job file of a newer program may have keys that this one does not know.
    let (versions, throughput) = match serde_json::from_value::<JobFile>(settings.clone()) {
        Ok(job) => {
            let kept = record.kept.iter().map(|kept| kept.step);
            let steps = kept.chain(ends(&epochs, &evaluations, &job)).collect();
            (versions(view, &job, &record.run, steps)?, record.pace.throughput(job.step_rows()))
        }
        Err(_) => Default::default(),
    };
    Ok(Run {
        job: job.to_owned(),
        run: record.run,
        begun: record.begun,
        finished: record.finished,
        step,
        checkpoints: record.kept.iter().map(|kept| kept.step).collect(),
        epochs,
        evaluations,
        throughput,
        versions,
        settings,
        script: None,
    })
}

/// The steps at which epochs ended. A run is published at the end of an epoch, and its checkpoint may be gone since.
fn ends(epochs: &[EpochRecord], evaluations: &[Evaluation], job: &JobFile) -> Vec<u64> {
    // A step takes rows of the next epoch where those of one do not suffice.
    let ends = epochs.iter().scan(0u64, |rows, epoch| {
        *rows = rows.saturating_add(epoch.rows);
        Some(rows.div_ceil(job.step_rows().max(1) as u64))
    });
    ends.chain(evaluations.iter().map(|evaluation| evaluation.step)).collect()
}

/// The versions that were published from a run after any of these steps, ascending.
fn versions(view: &View, job: &JobFile, run: &str, steps: BTreeSet<u64>) -> Result<Vec<u64>> {
    let prefix = publish::prefix_of(job);
    let recorded = view
        .key_scan(&prefix)
        .map_err(|e| Error::volume(format!("read keys {prefix} of {}", view.spec()), e))?;
    let recorded: HashMap<String, Vec<u8>> = recorded.into_iter().collect();
    if recorded.is_empty() {
        return Ok(Vec::new());
    }
    let mut versions = BTreeSet::new();
    for step in steps {
        let key = publish::key_of(job, run, step);
        let Some(value) = recorded.get(&key) else { continue };
        match publish::published(view, &key, value) {
            Ok(published) => drop(versions.insert(published.version)),
            Err(error) => tracing::warn!(%error, "a published version is left out"),
        }
    }
    Ok(versions.into_iter().collect())
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
