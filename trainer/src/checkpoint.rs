//! Checkpoints in a volume: files, manifest and pointer become visible in one publish.
//!
//! A checkpoint is `checkpoints/<job>/<run>/<step>/state.safetensors` with `manifest.json` beside it; `<run>`
//! is the first 16 digits of the run's id. The application key `trainer/<job>/checkpoint/<run>` lists the
//! run's checkpoints; a directory that it does not list is ignored. The key `trainer/<job>/owner` fences
//! writers: a coordinator sets it when it takes the job's lease (`lease.rs`), and each write here expects that
//! value. A worker that outlived its coordinator, and a deposed coordinator, can therefore write nothing.
//!
//! A run is identified by what a job computes ([`crate::job::JobFile::digest`]), so jobs that differ in their
//! budget alone share checkpoints. Checkpoints of the job's other runs stay beside it, see
//! [`Checkpoints::begin`].
//!
//! Format 1 kept one run per job, directly below `checkpoints/<job>/` and in the key
//! `trainer/<job>/checkpoint`. [`Checkpoints::begin`] adopts a run of that format: the entries move to the
//! run's own key, the files stay in place.
use millrace_datafs::{Publish, StagedFile, View};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::engine::ParamLayout;
use crate::error::{Error, Result};
use crate::job::JobFile;
use crate::state::RunState;

mod pace;
#[cfg(test)]
mod tests;

use pace::Pace;
pub use pace::Throughput;

/// Format version of manifests and of the key that lists checkpoints.
const FORMAT_VERSION: u32 = 2;
/// The earlier format, with one run per job.
const FORMER_VERSION: u32 = 1;
/// Attempts at a publish that conflicts with another writer.
const ATTEMPTS: usize = 8;
/// Finished runs of one job whose checkpoints stay beside those of the current run. Without this limit, a job
/// that is started for each new snapshot would fill the volume.
const FINISHED_RUNS_KEPT: usize = 3;
/// The same limit for unfinished runs. A job continues one of them when its file is changed back.
const UNFINISHED_RUNS_KEPT: usize = 3;
pub(crate) const STATE_FILE: &str = "state.safetensors";
const MANIFEST_FILE: &str = "manifest.json";
const MODEL_FILE: &str = "model.onnx";
const TEACHER_FILE: &str = "teacher.onnx";
pub(crate) const JOB_FILE: &str = "job.json";

/// Why a run has nothing left to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// An epoch's mean training loss reached the target.
    Converged,
    /// All epochs are done.
    EpochsDone,
    /// The last evaluations brought no lower loss.
    NoImprovement,
}

/// The value of a run's key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RunRecord {
    format_version: u32,
    pub(crate) run: String,
    /// When the run was last begun, in seconds since 1970.
    pub(crate) begun: i64,
    /// Whether the newest write of a checkpoint ended the job.
    pub(crate) finished: bool,
    /// The checkpoints, in ascending order of steps.
    pub(crate) kept: Vec<CheckpointEntry>,
    /// When the run stood where.
    #[serde(default, skip_serializing_if = "Pace::is_empty")]
    pub(crate) pace: Pace,
}

/// A checkpoint of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CheckpointEntry {
    pub(crate) step: u64,
    /// Its directory below `checkpoints/<job>/`.
    pub(crate) folder: String,
    /// SHA-256 of `state.safetensors`. Format 1 recorded it for the newest checkpoint only.
    sha256: Option<String>,
}

/// The value of the format 1 key.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct FormerPointer {
    format_version: u32,
    run: String,
    step: u64,
    finish: Option<Finish>,
    sha256: String,
    /// Directories, oldest first; the last one is the newest checkpoint.
    kept: Vec<String>,
}

/// `manifest.json`: a checkpoint's description for people and programs.
#[derive(Debug, Serialize)]
struct Manifest<'a> {
    format_version: u32,
    job: &'a str,
    run: &'a str,
    plan: &'a str,
    step: u64,
    epochs: usize,
    finish: Option<Finish>,
    loss: Option<f64>,
    files: [ManifestFile<'a>; 1],
    code_version: &'a str,
    created_at: String,
}

#[derive(Debug, Serialize)]
struct ManifestFile<'a> {
    path: &'a str,
    bytes: usize,
    sha256: &'a str,
}

/// The checkpoints of one run.
#[derive(Debug, Clone)]
pub(crate) struct Checkpoints {
    /// The live output volume.
    pub(crate) view: View,
    pub(crate) job: String,
    pub(crate) run: String,
    pub(crate) plan: String,
    /// The value of the owner key: only the coordinator that set it, and its workers, may write.
    pub(crate) owner: String,
    pub(crate) keep: usize,
}

/// Another run of the job: its key, the stored value of that key, and the decoded value.
type OtherRun = (String, Vec<u8>, RunRecord);

/// Why a checkpoint was not read.
enum Unread {
    /// Its files are missing or do not match their checksum.
    Damaged(String),
    Failed(Error),
}

impl RunRecord {
    fn new(run: &str) -> RunRecord {
        RunRecord {
            format_version: FORMAT_VERSION,
            run: run.to_owned(),
            begun: 0,
            finished: false,
            kept: Vec::new(),
            pace: Pace::default(),
        }
    }

    /// Decodes the value of `key`; `place` is the job's directory, for messages.
    pub(crate) fn parse(key: &str, bytes: &[u8], place: &str) -> Result<RunRecord> {
        let bad = |reason: String| Error::Checkpoint { place: place.to_owned(), reason };
        let record: RunRecord = serde_json::from_slice(bytes)
            .map_err(|e| bad(format!("key {key} cannot be read ({e}); it may be of a newer version")))?;
        if record.format_version != FORMAT_VERSION {
            return Err(bad(format!("format version {} of key {key} is unknown", record.format_version)));
        }
        Ok(record)
    }

    fn insert(&mut self, kept: CheckpointEntry) {
        let at = self.kept.partition_point(|other| other.step < kept.step);
        self.kept.insert(at, kept);
    }

    /// Removes checkpoints, up to `step` and beyond it separately, and returns them. The newest `keep` of
    /// either part stay; those beyond `step` belong to a job with a larger budget.
    fn prune(&mut self, step: u64, keep: usize) -> Vec<CheckpointEntry> {
        let beyond = self.kept.split_off(self.kept.partition_point(|kept| kept.step <= step));
        let mut dropped = Vec::new();
        let mut left = Vec::new();
        for mut part in [std::mem::take(&mut self.kept), beyond] {
            let stays = part.split_off(part.len().saturating_sub(keep));
            dropped.append(&mut part);
            left.extend(stays);
        }
        self.kept = left;
        dropped
    }

    /// The run's directories, relative to the job's: its own, and those of adopted format 1 checkpoints.
    fn folders(&self) -> impl Iterator<Item = &str> {
        let own = directory(&self.run);
        let beside = self.kept.iter().map(|kept| kept.folder.as_str());
        let beside = beside.filter(move |folder| folder.split('/').next() != Some(own));
        std::iter::once(own).chain(beside)
    }

    fn value(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }
}

impl Checkpoints {
    /// The key that fences writers.
    pub(crate) fn owner_key(job: &str) -> String {
        format!("trainer/{job}/owner")
    }

    /// The same checkpoints through another view of the volume.
    pub(crate) fn through(&self, view: &View) -> Checkpoints {
        Checkpoints { view: view.clone(), ..self.clone() }
    }

    /// Makes the owner of these checkpoints the job's, as a coordinator does with its lease.
    #[cfg(test)]
    pub(crate) fn own(self) -> Checkpoints {
        let owner = Publish::new().put_key(Self::owner_key(&self.job), self.owner.clone());
        self.view.publish(owner).unwrap();
        self
    }

    fn former_key(&self) -> String {
        format!("trainer/{}/checkpoint", self.job)
    }

    fn key_of(&self, run: &str) -> String {
        format!("trainer/{}/checkpoint/{run}", self.job)
    }

    fn key(&self) -> String {
        self.key_of(&self.run)
    }

    /// The directory of the job.
    fn folder(&self) -> String {
        format!("checkpoints/{}", self.job)
    }

    /// Path of the run's first model. Workers read it from the volume, not from the file that the job names.
    pub(crate) fn model_path(&self) -> String {
        format!("{}/{}/{MODEL_FILE}", self.folder(), directory(&self.run))
    }

    /// Path of the model from which the run learns, if its loss has one.
    pub(crate) fn teacher_path(&self) -> String {
        format!("{}/{}/{TEACHER_FILE}", self.folder(), directory(&self.run))
    }

    /// `volume:/path`, for messages.
    fn location(&self, path: &str) -> String {
        format!("{}:/{path}", self.view.spec())
    }

    /// [`Checkpoints::location`] of several directories of the job, separated by commas.
    fn locations<'f>(&self, folders: impl Iterator<Item = &'f str>) -> String {
        let places = folders.map(|folder| self.location(&format!("{}/{folder}", self.folder())));
        places.collect::<Vec<_>>().join(", ")
    }

    /// `volume:/path` of the run's checkpoints, for messages.
    pub(crate) fn run_location(&self) -> String {
        self.location(&format!("{}/{}", self.folder(), directory(&self.run)))
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.view
            .key_get(key)
            .map_err(|e| Error::volume(format!("read key {key} of {}", self.view.spec()), e))
    }

    fn run_record(&self) -> Result<Option<(Vec<u8>, RunRecord)>> {
        let key = self.key();
        let Some(bytes) = self.get(&key)? else { return Ok(None) };
        let record = self.parse(&key, &bytes)?;
        Ok(Some((bytes, record)))
    }

    fn parse(&self, key: &str, bytes: &[u8]) -> Result<RunRecord> {
        RunRecord::parse(key, bytes, &self.location(&self.folder()))
    }

    /// The newest readable state of the run that `wanted` accepts. Skips a damaged checkpoint with a warning.
    pub(crate) fn newest(
        &self,
        layout: &ParamLayout,
        wanted: impl Fn(&RunState) -> bool,
    ) -> Result<Option<RunState>> {
        let Some((_, record)) = self.run_record()? else { return Ok(None) };
        for kept in record.kept.iter().rev() {
            match self.load(kept, layout) {
                Ok(state) if wanted(&state) => return Ok(Some(state)),
                Ok(_) => {}
                Err(Unread::Damaged(reason)) => tracing::warn!(
                    job = self.job,
                    step = kept.step,
                    reason,
                    "checkpoint is damaged: continuing from the one before it, or from step 0"
                ),
                Err(Unread::Failed(error)) => return Err(error),
            }
        }
        Ok(None)
    }

    fn load(&self, kept: &CheckpointEntry, layout: &ParamLayout) -> Result<RunState, Unread> {
        let path = format!("{}/{}/{STATE_FILE}", self.folder(), kept.folder);
        let place = self.location(&path);
        let damaged = |reason: String| Err(Unread::Damaged(format!("{place}: {reason}")));
        let bytes = match self.view.read_file_up_to(&path, RunState::bytes_max(layout)) {
            Ok(bytes) => bytes,
            Err(error) if is_damage(&error) => return damaged(error.to_string()),
            Err(error) => {
                return Err(Unread::Failed(Error::volume(format!("read checkpoint {place}"), error)));
            }
        };
        let found = hex::encode(Sha256::digest(&bytes));
        if kept.sha256.as_ref().is_some_and(|sha256| *sha256 != found) {
            return damaged("its digest differs from the one that was written".to_owned());
        }
        match RunState::decode(layout, &bytes) {
            Ok(state) if state.step != kept.step => {
                damaged(format!("it holds step {}, not {}", state.step, kept.step))
            }
            Ok(state) => Ok(state),
            Err(reason) if kept.sha256.is_none() => damaged(reason),
            // The checksum matches, so a newer program wrote a format that this one cannot decode.
            Err(reason) => Err(Unread::Failed(Error::Checkpoint { place, reason })),
        }
    }

    /// The step of the run's newest checkpoint up to `step`. Does not read it.
    pub(crate) fn newest_step(&self, step: u64) -> Result<Option<u64>> {
        let Some((_, record)) = self.run_record()? else { return Ok(None) };
        Ok(record.kept.iter().map(|kept| kept.step).filter(|kept| *kept <= step).max())
    }

    /// Adds `state` to the run's checkpoints and removes the oldest beyond the number to keep. Replaces one of the
    /// same step, unless that has more evaluations. Durable when it returns.
    pub(crate) fn write(&self, state: &RunState, layout: &ParamLayout, finish: Option<Finish>) -> Result<()> {
        self.add(state, layout, finish, None)
    }

    /// Like [`Checkpoints::write`], unless the run has a readable checkpoint that `is_usable` accepts, of this
    /// position or of a later one.
    pub(crate) fn write_if_newest(
        &self,
        state: &RunState,
        layout: &ParamLayout,
        is_usable: impl Fn(&RunState) -> bool,
    ) -> Result<()> {
        let makes_up = |found: &RunState| position(found) >= position(state) && is_usable(found);
        self.add(state, layout, None, Some(&makes_up))
    }

    fn add(
        &self,
        state: &RunState,
        layout: &ParamLayout,
        finish: Option<Finish>,
        makes_up: Option<&dyn Fn(&RunState) -> bool>,
    ) -> Result<()> {
        let folder = format!("{}/{:012}", directory(&self.run), state.step);
        let path = format!("{}/{folder}", self.folder());
        let bytes = state
            .encode(layout)
            .map_err(|reason| Error::Checkpoint { place: self.location(&path), reason })?;
        let sha256 = hex::encode(Sha256::digest(&bytes));
        for _ in 0..ATTEMPTS {
            let (before, mut record) = match self.run_record()? {
                Some((bytes, record)) => (Some(bytes), record),
                None => (None, RunRecord::new(&self.run)),
            };
            if self.is_superseded(state, &record, layout, makes_up) {
                return Ok(());
            }
            // A late write of an earlier state does not undo the end.
            let is_behind = record.kept.last().is_some_and(|newest| newest.step > state.step);
            record.finished = finish.is_some() || (record.finished && is_behind);
            let (mut dropped, others): (Vec<CheckpointEntry>, Vec<CheckpointEntry>) =
                std::mem::take(&mut record.kept).into_iter().partition(|kept| kept.step == state.step);
            record.kept = others;
            record.insert(CheckpointEntry {
                step: state.step,
                folder: folder.clone(),
                sha256: Some(sha256.clone()),
            });
            record.pace.mark(state.step);
            dropped.extend(record.prune(state.step, self.keep));
            dropped.retain(|kept| kept.folder != folder);
            let manifest = self.manifest(state, &sha256, finish, bytes.len());
            let mut publish = Publish::new()
                .file(format!("{path}/{STATE_FILE}"), self.stage(&bytes)?)
                .file(format!("{path}/{MANIFEST_FILE}"), self.stage(&manifest)?);
            for kept in &dropped {
                publish = self.drop_checkpoint(publish, kept);
            }
            publish = publish
                .expect_key(Self::owner_key(&self.job), Some(self.owner.clone().into_bytes()))
                .expect_key(self.key(), before)
                .put_key(self.key(), record.value());
            match self.view.publish(publish) {
                Ok(()) => {
                    self.drop_folders(dropped.iter().map(|kept| kept.folder.as_str()));
                    // Checkpoints may be written faster than background garbage collection runs.
                    if let Err(error) = self.view.collect_objects() {
                        tracing::warn!(job = self.job, %error, "space of removed checkpoints is not free yet");
                    }
                    tracing::info!(
                        job = self.job,
                        step = state.step,
                        bytes = bytes.len(),
                        "checkpoint written"
                    );
                    return Ok(());
                }
                Err(error) => self.on_conflict(error)?,
            }
        }
        Err(Error::Checkpoint {
            place: self.location(&path),
            reason: format!("other processes changed the key during each of {ATTEMPTS} attempts"),
        })
    }

    /// Whether the run has a checkpoint that makes up for `state`, or one of the same step that is ahead.
    fn is_superseded(
        &self,
        state: &RunState,
        record: &RunRecord,
        layout: &ParamLayout,
        makes_up: Option<&dyn Fn(&RunState) -> bool>,
    ) -> bool {
        // No state of the same step is ahead of one that was evaluated after it.
        let may_lag = state.evaluations.last().is_none_or(|evaluation| evaluation.step < state.step);
        let newer = record.kept.iter().rev().take_while(|kept| kept.step >= state.step);
        newer.filter(|kept| makes_up.is_some() || (may_lag && kept.step == state.step)).any(|kept| {
            // A checkpoint that cannot be read makes up for nothing.
            self.load(kept, layout).is_ok_and(|found| {
                let is_ahead = kept.step == state.step && position(&found) > position(state);
                is_ahead || makes_up.is_some_and(|makes_up| makes_up(&found))
            })
        })
    }

    /// Makes the run the job's current one and stores its model, its teacher if it has one, and its job file.
    ///
    /// Adopts a run of format 1 if `is_same` recognizes its id and its job file. Of the job's other runs,
    /// keeps the newest [`UNFINISHED_RUNS_KEPT`] unfinished and the newest [`FINISHED_RUNS_KEPT`] finished
    /// ones. Logs each run that stays unfinished, and each that it removes.
    pub(crate) fn begin(
        &self,
        model: &[u8],
        teacher: Option<&[u8]>,
        job: &[u8],
        is_same: impl Fn(&str, Option<&[u8]>) -> bool,
    ) -> Result<()> {
        for _ in 0..ATTEMPTS {
            let (before, mut record) = match self.run_record()? {
                Some((bytes, record)) => (Some(bytes), record),
                None => (None, RunRecord::new(&self.run)),
            };
            let others = self.other_runs()?;
            // Later than all other runs, even after the clock was set back.
            let latest = others.iter().map(|(_, _, other)| other.begun).max().unwrap_or(i64::MIN);
            record.begun = chrono::Utc::now().timestamp().max(latest.saturating_add(1));
            let folder = directory(&self.run);
            let mut publish = Publish::new()
                .expect_key(Self::owner_key(&self.job), Some(self.owner.clone().into_bytes()))
                .expect_key(self.key(), before)
                .file(self.model_path(), self.stage(model)?)
                .file(format!("{}/{folder}/{JOB_FILE}", self.folder()), self.stage(job)?);
            if let Some(teacher) = teacher {
                publish = publish.file(self.teacher_path(), self.stage(teacher)?);
            }
            if let Some((bytes, former)) = self.format_1_pointer()? {
                let path = format!("{}/{JOB_FILE}", self.folder());
                let former_job = match self.view.read_file(&path) {
                    Ok(text) => Some(text),
                    // A missing or damaged one identifies no run; one that cannot be read now may.
                    Err(error) => {
                        let error = Error::volume(format!("read {}", self.location(&path)), error);
                        if error.is_outage() {
                            return Err(error);
                        }
                        None
                    }
                };
                if is_same(&former.run, former_job.as_deref()) {
                    publish =
                        publish.expect_key(self.former_key(), Some(bytes)).delete_key(self.former_key());
                    for file in [MODEL_FILE, JOB_FILE] {
                        publish = self.drop_file(publish, format!("{}/{file}", self.folder()));
                    }
                    self.add_format_1_checkpoints(&mut record, former);
                } else {
                    tracing::warn!(
                        job = self.job,
                        step = former.step,
                        place = self.locations(former.kept.iter().map(String::as_str)),
                        "the job, its data or its model changed: earlier checkpoints stay, and are used \
                         again when it is changed back"
                    );
                }
            }
            record.pace.mark(record.kept.last().map_or(0, |newest| newest.step));
            publish = publish.put_key(self.key(), record.value());
            let removed = self.removable(others);
            for (key, bytes, other) in &removed {
                publish = publish.expect_key(key.clone(), Some(bytes.clone())).delete_key(key.clone());
                for kept in &other.kept {
                    publish = self.drop_checkpoint(publish, kept);
                }
                for file in [MODEL_FILE, TEACHER_FILE, JOB_FILE] {
                    let path = format!("{}/{}/{file}", self.folder(), directory(&other.run));
                    publish = self.drop_file(publish, path);
                }
            }
            match self.view.publish(publish) {
                Ok(()) => {
                    self.drop_leftovers(&record);
                    for (_, _, other) in &removed {
                        self.drop_leftovers(&RunRecord::new(&other.run));
                        self.drop_folders(other.kept.iter().map(|kept| kept.folder.as_str()));
                        self.drop_folders([directory(&other.run)].into_iter());
                    }
                    return Ok(());
                }
                Err(error) => self.on_conflict(error)?,
            }
        }
        Err(Error::Busy {
            job: self.job.clone(),
            reason: "another process writes its checkpoints; try again".to_owned(),
        })
    }

    fn format_1_pointer(&self) -> Result<Option<(Vec<u8>, FormerPointer)>> {
        let key = self.former_key();
        let Some(bytes) = self.get(&key)? else { return Ok(None) };
        let bad = |reason: String| Error::Checkpoint { place: self.location(&self.folder()), reason };
        let former: FormerPointer =
            serde_json::from_slice(&bytes).map_err(|e| bad(format!("key {key} cannot be read ({e})")))?;
        if former.format_version != FORMER_VERSION {
            return Err(bad(format!("format version {} of key {key} is unknown", former.format_version)));
        }
        Ok(Some((bytes, former)))
    }

    /// Adds the checkpoints of a format 1 run to `run_record`.
    fn add_format_1_checkpoints(&self, record: &mut RunRecord, former: FormerPointer) {
        record.finished |= former.finish.is_some();
        for folder in former.kept {
            let Ok(step) = folder.parse() else { continue };
            if record.kept.iter().all(|kept| kept.step != step) {
                let sha256 = (step == former.step).then(|| former.sha256.clone());
                record.insert(CheckpointEntry { step, folder, sha256 });
            }
        }
    }

    /// The other runs of the job, the most recently begun first.
    fn other_runs(&self) -> Result<Vec<OtherRun>> {
        let prefix = self.key_of("");
        let found = self
            .view
            .key_scan(&prefix)
            .map_err(|e| Error::volume(format!("read keys {prefix} of {}", self.view.spec()), e))?;
        let mut others = Vec::new();
        for (key, bytes) in found.into_iter().filter(|(key, _)| *key != self.key()) {
            let record = self.parse(&key, &bytes)?;
            others.push((key, bytes, record));
        }
        others.sort_by_key(|(_, _, record)| std::cmp::Reverse(record.begun));
        Ok(others)
    }

    /// Selects the other runs to remove: those without a checkpoint, and those beyond the newest few finished
    /// or unfinished ones.
    fn removable(&self, mut others: Vec<OtherRun>) -> Vec<OtherRun> {
        let (mut finished, mut unfinished) = (0, 0);
        others.retain(|(_, _, record)| {
            let there = |kept: &CheckpointEntry| {
                let path = format!("{}/{}/{STATE_FILE}", self.folder(), kept.folder);
                !self.view.stat(&path).is_err_and(|error| error.is_not_found())
            };
            if !record.kept.iter().any(there) {
                return true;
            }
            let place = self.locations(record.folders());
            let step = record.kept.last().map_or(0, |kept| kept.step);
            let (count, keep) = match record.finished {
                true => (&mut finished, FINISHED_RUNS_KEPT),
                false => (&mut unfinished, UNFINISHED_RUNS_KEPT),
            };
            *count += 1;
            match (record.finished, *count > keep) {
                (true, true) => tracing::warn!(
                    job = self.job,
                    step,
                    place,
                    "removing the checkpoints of a finished run: {FINISHED_RUNS_KEPT} newer ones are kept"
                ),
                (false, true) => tracing::warn!(
                    job = self.job,
                    step,
                    place,
                    "removing the checkpoints of an unfinished run: {UNFINISHED_RUNS_KEPT} newer ones are kept"
                ),
                (false, false) => tracing::warn!(
                    job = self.job,
                    step,
                    place,
                    "the job, its data or its model changed: earlier checkpoints stay, and are used again when it is \
                     changed back, until {UNFINISHED_RUNS_KEPT} newer runs are left unfinished as well"
                ),
                (true, false) => {}
            }
            *count > keep
        });
        others
    }

    fn drop_file(&self, publish: Publish, path: String) -> Publish {
        if self.view.stat(&path).is_ok() { publish.remove(path) } else { publish }
    }

    /// Adds the removal of a checkpoint's files to a publish; files that are missing are skipped.
    fn drop_checkpoint(&self, publish: Publish, kept: &CheckpointEntry) -> Publish {
        [STATE_FILE, MANIFEST_FILE].into_iter().fold(publish, |publish, file| {
            self.drop_file(publish, format!("{}/{}/{file}", self.folder(), kept.folder))
        })
    }

    /// Removes empty directories. A directory that still holds a file stays.
    fn drop_folders<'f>(&self, folders: impl Iterator<Item = &'f str>) {
        for folder in folders {
            let path = format!("{}/{folder}", self.folder());
            if let Err(error) = self.view.remove_dir(&path) {
                tracing::debug!(path, %error, "cannot remove a checkpoint folder");
            }
        }
    }

    /// Removes empty directories of checkpoints that `record` does not list. A process that was killed after it had
    /// removed their files leaves them.
    fn drop_leftovers(&self, record: &RunRecord) {
        let run = directory(&record.run);
        // A run that has written nothing has no directory.
        let Ok(entries) = self.view.list(&format!("{}/{run}", self.folder())) else { return };
        let is_step = |name: &str| name.bytes().all(|byte| byte.is_ascii_digit());
        let folders: Vec<String> = entries
            .iter()
            .filter(|entry| is_step(&entry.name))
            .map(|entry| format!("{run}/{}", entry.name))
            .filter(|folder| record.kept.iter().all(|kept| kept.folder != *folder))
            .collect();
        self.drop_folders(folders.iter().map(String::as_str));
    }

    /// Ignores a conflict over the run's key and a file that was deleted meanwhile, so that the caller retries;
    /// returns any other error.
    fn on_conflict(&self, error: millrace_datafs::Error) -> Result<()> {
        match &error {
            millrace_datafs::Error::NotFound { .. } => Ok(()),
            millrace_datafs::Error::Conflict { key } if *key == self.key() => Ok(()),
            millrace_datafs::Error::Conflict { .. } => Err(self.deposed()),
            _ => Err(Error::volume(format!("write checkpoint {}", self.location(&self.folder())), error)),
        }
    }

    /// The error of a writer whose coordinator is no longer the job's owner.
    pub(crate) fn deposed(&self) -> Error {
        Error::Busy { job: self.job.clone(), reason: "another coordinator has taken it over".to_owned() }
    }

    fn stage(&self, bytes: &[u8]) -> Result<StagedFile> {
        stage(&self.view, bytes)
    }

    fn manifest(&self, state: &RunState, sha256: &str, finish: Option<Finish>, bytes: usize) -> Vec<u8> {
        let manifest = Manifest {
            format_version: FORMAT_VERSION,
            job: &self.job,
            run: &self.run,
            plan: &self.plan,
            step: state.step,
            epochs: state.ledger.epochs.len(),
            finish,
            loss: state.ledger.epochs.last().map(|epoch| epoch.loss),
            files: [ManifestFile { path: STATE_FILE, bytes, sha256 }],
            code_version: env!("CARGO_PKG_VERSION"),
            created_at: chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Secs, true),
        };
        serde_json::to_vec_pretty(&manifest).unwrap_or_default()
    }
}

/// Writes bytes as an object that no file refers to yet.
pub(crate) fn stage(view: &View, bytes: &[u8]) -> Result<StagedFile> {
    let fail = |e| Error::volume(format!("write {} bytes to {}", bytes.len(), view.spec()), e);
    let mut writer = view.stage().map_err(fail)?;
    writer.append(bytes).map_err(fail)?;
    writer.finish().map_err(fail)
}

/// Whether a file is missing or damaged, also by another program that has put a folder, a link that leads nowhere or a larger
/// file in its place. Other errors may pass.
fn is_damage(error: &millrace_datafs::Error) -> bool {
    use millrace_datafs::Error as E;
    match error {
        E::Corrupt { .. }
        | E::NotFound { .. }
        | E::IsADirectory { .. }
        | E::NotADirectory { .. }
        | E::Loop { .. }
        | E::TooLarge { .. } => true,
        // The object is missing or damaged.
        E::Object(_) => !error.is_store_trouble(),
        _ => false,
    }
}

/// Largest job file of a run, which has more characters than the one of the user.
pub(crate) const JOB_RECORD_BYTES_MAX: u64 = 8 << 20;

/// The job file with which a run of a job was last begun; none if it is missing or of another program.
pub(crate) fn job_of_run(view: &View, job: &str, run: &str) -> Result<Option<JobFile>> {
    let path = format!("checkpoints/{job}/{}/{JOB_FILE}", directory(run));
    match view.read_file_up_to(&path, JOB_RECORD_BYTES_MAX) {
        Ok(text) => Ok(serde_json::from_slice(&text).ok()),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) if is_damage(&error) => {
            tracing::warn!(path, %error, "the job of a run cannot be read");
            Ok(None)
        }
        Err(error) => Err(Error::volume(format!("read {}:/{path}", view.spec()), error)),
    }
}

/// The record of the run of a job that was begun last.
pub(crate) fn last_run(view: &View, job: &str) -> Result<Option<RunRecord>> {
    let prefix = format!("trainer/{job}/checkpoint/");
    let failed = |e| Error::volume(format!("read keys {prefix} of {}", view.spec()), e);
    let mut last: Option<RunRecord> = None;
    for (key, bytes) in view.key_scan(&prefix).map_err(failed)? {
        let record = RunRecord::parse(&key, &bytes, &format!("{}:/checkpoints/{job}", view.spec()))?;
        if last.as_ref().is_none_or(|last| last.begun < record.begun) {
            last = Some(record);
        }
    }
    Ok(last)
}

/// Name of a run's directory inside the job's directory.
pub(crate) fn directory(run: &str) -> &str {
    run.get(..16).unwrap_or(run)
}

/// Steps and evaluations of a state: of two states of a run, the one with more is ahead.
fn position(state: &RunState) -> u64 {
    state.step + state.evaluations.len() as u64
}
