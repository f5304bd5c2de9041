//! The record of a script job's run in a volume, for `millrace runs`.
//!
//! The key `trainer/<job>/script/<run>` holds the record. A version that the script publishes is a file of its own,
//! `runs/<job>/<run>/<model>.<version>.json`, which `millrace.publish` writes: it is there even if the launcher is
//! killed at that moment.
use millrace_datafs::{Publish, View};
use serde::{Deserialize, Serialize};

use super::layout::Framework;
use crate::error::{Error, Result};

const FORMAT_VERSION: u32 = 1;
/// Records of one job that are kept; the oldest go first.
const KEPT: usize = 100;
/// Names of variables in a record.
pub(crate) const NAMES_MAX: usize = 1000;
/// Largest record of a publication that is read.
const PUBLISHED_BYTES_MAX: u64 = 1 << 20;

/// What a run was started with, and how it ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ScriptRecord {
    format_version: u32,
    /// The run's id: 64 random hex digits.
    pub run: String,
    /// The job's name.
    pub job: String,
    /// When it began, in seconds since 1970.
    pub begun: i64,
    /// When it ended; null while it runs, or after its launcher was killed.
    pub ended: Option<i64>,
    /// `succeeded`, `stopped` or `failed`; null as `ended`.
    pub outcome: Option<String>,
    /// Why it failed.
    pub failure: Option<String>,
    /// The script as it was named.
    pub script: String,
    /// SHA-256 of the script.
    pub sha256: String,
    /// Its arguments.
    pub args: Vec<String>,
    /// The interpreter that was named.
    pub python: Option<String>,
    /// The dataset with its snapshot.
    pub dataset: Option<String>,
    /// The framework whose environment it got.
    pub framework: Framework,
    /// Workers of each node.
    pub workers_per_node: u32,
    /// Fewest and most nodes.
    pub nodes: (u32, u32),
    /// Parameter servers.
    pub servers: u32,
    /// Restarts that were allowed, and those that happened.
    pub max_restarts: u32,
    /// See `max_restarts`.
    pub restarts: u32,
    /// Rounds that were begun.
    pub rounds: u64,
    /// Workers of the last round.
    pub world: u32,
    /// Names of the variables in the launcher's environment. Values may be secrets and are not recorded.
    pub environment: Vec<String>,
    /// The version of Millrace.
    pub code_version: String,
}

/// A version that a script has published.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ScriptVersion {
    /// The model.
    pub model: String,
    /// Its version.
    pub version: u64,
    /// The volume that has it.
    pub volume: String,
    /// SHA-256 of its graph.
    pub sha256: String,
}

impl ScriptRecord {
    pub(crate) fn new(run: String, job: String, program: &super::messages::Program) -> ScriptRecord {
        ScriptRecord {
            format_version: FORMAT_VERSION,
            run,
            job,
            begun: chrono::Utc::now().timestamp(),
            ended: None,
            outcome: None,
            failure: None,
            script: program.script.clone(),
            sha256: program.sha256.clone(),
            args: program.args.clone(),
            python: program.python.clone(),
            dataset: program.dataset.clone(),
            framework: Framework::default(),
            workers_per_node: 1,
            nodes: (1, 1),
            servers: 0,
            max_restarts: 0,
            restarts: 0,
            rounds: 0,
            world: 0,
            environment: Vec::new(),
            code_version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }

    fn key(&self) -> String {
        format!("{}{}", prefix_of(&self.job), self.run)
    }

    /// Writes the record, and removes the oldest ones of the job.
    pub(crate) fn write(&self, view: &View) -> Result<()> {
        let failed = |error| Error::volume(format!("record run {:.12} in {}", self.run, view.spec()), error);
        let text = serde_json::to_vec(self).map_err(|e| Error::Bundle {
            what: format!("record run {:.12}", self.run),
            source: Box::new(e),
        })?;
        let mut publish = Publish::new().put_key(self.key(), text);
        let mut known: Vec<(i64, String)> = view
            .key_scan(&prefix_of(&self.job))
            .map_err(failed)?
            .into_iter()
            .filter(|(key, _)| *key != self.key())
            .map(|(key, value)| (parse(&value).map_or(0, |record| record.begun), key))
            .collect();
        known.sort();
        let surplus = (known.len() + 1).saturating_sub(KEPT);
        for (_, key) in known.into_iter().take(surplus) {
            publish = publish.delete_key(key);
        }
        view.publish(publish).map_err(failed)
    }

    /// The versions that the run has published, by model and version.
    ///
    /// # Errors
    /// [`Error::Volume`]
    pub fn versions(&self, view: &View) -> Result<Vec<ScriptVersion>> {
        let folder = format!("runs/{}/{}", self.job, self.run);
        let entries = match view.list(&folder) {
            Ok(entries) => entries,
            Err(error) if error.is_not_found() => return Ok(Vec::new()),
            // Other runs are shown all the same.
            Err(error @ millrace_datafs::Error::NotADirectory { .. }) => {
                tracing::warn!(folder, %error, "the versions of a run cannot be read");
                return Ok(Vec::new());
            }
            Err(error) => return Err(Error::volume(format!("list {}:/{folder}", view.spec()), error)),
        };
        let mut versions = Vec::new();
        for entry in entries {
            if !entry.name.ends_with(".json") {
                continue;
            }
            let path = format!("{folder}/{}", entry.name);
            let is_small = entry.stat.size <= PUBLISHED_BYTES_MAX;
            let read = if is_small { view.read_file(&path).ok() } else { None };
            match read.and_then(|text| serde_json::from_slice::<ScriptVersion>(&text).ok()) {
                Some(version) => versions.push(version),
                None => tracing::warn!(path, "the record of a publication cannot be read"),
            }
        }
        versions.sort_by(|a, b| (&a.model, a.version).cmp(&(&b.model, b.version)));
        Ok(versions)
    }
}

/// What the keys of a job's records begin with.
fn prefix_of(job: &str) -> String {
    format!("trainer/{job}/script/")
}

/// Whether a key below `trainer/` is that of a record.
pub(crate) fn is_key(key: &str) -> bool {
    key.strip_prefix("trainer/")
        .and_then(|rest| rest.split_once('/'))
        .is_some_and(|(_, rest)| rest.strip_prefix("script/").is_some_and(|run| !run.is_empty()))
}

/// The record of a key's value; none of another format.
pub(crate) fn parse(value: &[u8]) -> Option<ScriptRecord> {
    serde_json::from_slice::<ScriptRecord>(value)
        .ok()
        .filter(|record| record.format_version == FORMAT_VERSION)
}
