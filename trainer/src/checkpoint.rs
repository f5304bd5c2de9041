//! Checkpoints in a volume: files, manifest and pointer become visible in one publish.
//!
//! `checkpoints/<job>/<step>/state.safetensors` and `manifest.json` beside it; the application key
//! `trainer/<job>/checkpoint` names the newest one and is the only truth: a directory it does not
//! name is nothing. The key `trainer/<job>/owner` fences writers: whoever starts the job takes it,
//! and a worker that outlived its coordinator can publish nothing any more.
use std::io::Write;

use millrace_datafs::{Publish, StagedFile, View};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::engine::ParamLayout;
use crate::error::{Error, Result};
use crate::state::State;

/// The format of manifests and pointers.
const FORMAT_VERSION: u32 = 1;
/// How often a publish is tried again when another writer was faster.
const ATTEMPTS: usize = 8;
const STATE_FILE: &str = "state.safetensors";
const MANIFEST_FILE: &str = "manifest.json";

/// Why a run has nothing left to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// An epoch's mean training loss reached the target.
    Converged,
    /// All epochs are done.
    EpochsDone,
}

/// The newest checkpoint of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Pointer {
    format_version: u32,
    /// The run it belongs to: [`crate::job::JobFile::digest`].
    pub(crate) run: String,
    pub(crate) step: u64,
    pub(crate) finish: Option<Finish>,
    sha256: String,
    /// Directories of the checkpoints that still exist, oldest first; the last one is the newest.
    kept: Vec<String>,
}

/// `manifest.json`: what a person or a program needs to know about a checkpoint.
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
    /// Who may write: the value of the owner key.
    pub(crate) owner: String,
    pub(crate) keep: usize,
}

impl Checkpoints {
    /// The key that fences writers.
    pub(crate) fn owner_key(job: &str) -> String {
        format!("trainer/{job}/owner")
    }

    fn pointer_key(&self) -> String {
        format!("trainer/{}/checkpoint", self.job)
    }

    fn folder(&self) -> String {
        format!("checkpoints/{}", self.job)
    }

    /// Where the run's first model is kept, so that a restart does not need the file it came from.
    pub(crate) fn model_path(&self) -> String {
        format!("{}/model.onnx", self.folder())
    }

    /// `volume:/path`, for messages.
    fn place(&self, path: &str) -> String {
        format!("{}:/{path}", self.view.spec())
    }

    /// The newest checkpoint of this job, of whatever run.
    pub(crate) fn latest(&self) -> Result<Option<Pointer>> {
        Ok(self.pointer()?.map(|(_, pointer)| pointer))
    }

    fn pointer(&self) -> Result<Option<(Vec<u8>, Pointer)>> {
        let key = self.pointer_key();
        let read = self
            .view
            .key_get(&key)
            .map_err(|e| Error::volume(format!("read key {key} of {}", self.view.spec()), e))?;
        let Some(bytes) = read else { return Ok(None) };
        let bad = |reason: String| Error::Checkpoint { place: self.place(&self.folder()), reason };
        let pointer: Pointer = serde_json::from_slice(&bytes)
            .map_err(|e| bad(format!("the pointer cannot be read ({e}); it may be of a newer version")))?;
        if pointer.format_version != FORMAT_VERSION {
            return Err(bad(format!("format version {} is unknown", pointer.format_version)));
        }
        Ok(Some((bytes, pointer)))
    }

    /// Reads and verifies the checkpoint that `pointer` names.
    pub(crate) fn load(&self, pointer: &Pointer, layout: &ParamLayout) -> Result<State> {
        let folder = pointer.kept.last().cloned().unwrap_or_default();
        let path = format!("{}/{folder}/{STATE_FILE}", self.folder());
        let bytes = self
            .view
            .read_file(&path)
            .map_err(|e| Error::volume(format!("read checkpoint {}", self.place(&path)), e))?;
        let bad = |reason: String| Error::Checkpoint { place: self.place(&path), reason };
        if hex::encode(Sha256::digest(&bytes)) != pointer.sha256 {
            return Err(bad("its digest differs from the pointer's".to_owned()));
        }
        let state = State::decode(layout, &bytes).map_err(bad)?;
        if state.step != pointer.step {
            return Err(bad(format!("it is of step {}, not {}", state.step, pointer.step)));
        }
        Ok(state)
    }

    /// Makes `state` the newest checkpoint; durable when it returns. Writing a checkpoint that is
    /// there already, or one behind the newest, does nothing.
    pub(crate) fn write(&self, state: &State, layout: &ParamLayout, finish: Option<Finish>) -> Result<()> {
        let folder = format!("{:012}", state.step);
        let path = format!("{}/{folder}", self.folder());
        let bytes =
            state.encode(layout).map_err(|reason| Error::Checkpoint { place: self.place(&path), reason })?;
        let sha256 = hex::encode(Sha256::digest(&bytes));
        for _ in 0..ATTEMPTS {
            let before = self.pointer()?;
            let mut kept = Vec::new();
            if let Some((_, newest)) = before.as_ref().filter(|(_, p)| p.run == self.run) {
                let newer = (newest.step, newest.finish.is_some()) >= (state.step, finish.is_some());
                if newer {
                    return Ok(());
                }
                kept.clone_from(&newest.kept);
            }
            kept.retain(|other| *other != folder);
            kept.push(folder.clone());
            let gone = kept.len().saturating_sub(self.keep);
            let dropped: Vec<String> = kept.drain(..gone).collect();
            let pointer = Pointer {
                format_version: FORMAT_VERSION,
                run: self.run.clone(),
                step: state.step,
                finish,
                sha256: sha256.clone(),
                kept,
            };
            let manifest = self.manifest(state, &pointer, bytes.len());
            let mut publish = Publish::new()
                .file(format!("{path}/{STATE_FILE}"), self.stage(&bytes)?)
                .file(format!("{path}/{MANIFEST_FILE}"), self.stage(&manifest)?);
            for other in &dropped {
                publish = self.drop_files(publish, other);
            }
            let pointer = serde_json::to_vec(&pointer).unwrap_or_default();
            publish = publish
                .expect_key(Self::owner_key(&self.job), Some(self.owner.clone().into_bytes()))
                .expect_key(self.pointer_key(), before.map(|(bytes, _)| bytes))
                .put_key(self.pointer_key(), pointer);
            match self.view.publish(publish) {
                Ok(()) => {
                    self.drop_folders(&dropped);
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
            place: self.place(&path),
            reason: format!("other writers were faster {ATTEMPTS} times"),
        })
    }

    /// Takes over the job for `owner` and, when the newest checkpoint is of another run, clears it
    /// away. Returns the newest checkpoint of this run.
    pub(crate) fn begin(&self, model: &[u8], job: &[u8]) -> Result<Option<Pointer>> {
        for _ in 0..ATTEMPTS {
            let before = self.pointer()?;
            let mut publish = Publish::new()
                .put_key(Self::owner_key(&self.job), self.owner.clone().into_bytes())
                .expect_key(self.pointer_key(), before.as_ref().map(|(bytes, _)| bytes.clone()))
                .file(self.model_path(), self.stage(model)?)
                .file(format!("{}/job.json", self.folder()), self.stage(job)?);
            let mut dropped = Vec::new();
            let ours = match before {
                Some((_, pointer)) if pointer.run == self.run => Some(pointer),
                Some((_, pointer)) => {
                    tracing::info!(
                        job = self.job,
                        step = pointer.step,
                        "the job, its data or its model changed: starting over"
                    );
                    for folder in &pointer.kept {
                        publish = self.drop_files(publish, folder);
                    }
                    publish = publish.delete_key(self.pointer_key());
                    dropped = pointer.kept;
                    None
                }
                None => None,
            };
            match self.view.publish(publish) {
                Ok(()) => {
                    self.drop_folders(&dropped);
                    return Ok(ours);
                }
                Err(error) => self.on_conflict(error)?,
            }
        }
        Err(Error::Busy {
            job: self.job.clone(),
            reason: "its checkpoints are being written by somebody else; try again".to_owned(),
        })
    }

    /// Adds the removal of a checkpoint's files, as far as nobody removed them already.
    fn drop_files(&self, mut publish: Publish, folder: &str) -> Publish {
        for file in [STATE_FILE, MANIFEST_FILE] {
            let path = format!("{}/{folder}/{file}", self.folder());
            if self.view.stat(&path).is_ok() {
                publish = publish.remove(path);
            }
        }
        publish
    }

    /// Removes empty folders; one that somebody put a file into stays.
    fn drop_folders(&self, folders: &[String]) {
        for folder in folders {
            let path = format!("{}/{folder}", self.folder());
            if let Err(error) = self.view.remove_dir(&path) {
                tracing::debug!(path, %error, "checkpoint folder stays");
            }
        }
    }

    /// Lets a conflict over the pointer pass, so that the caller tries again.
    fn on_conflict(&self, error: millrace_datafs::Error) -> Result<()> {
        match &error {
            millrace_datafs::Error::Conflict { key } if *key == self.pointer_key() => Ok(()),
            millrace_datafs::Error::Conflict { .. } => Err(Error::Busy {
                job: self.job.clone(),
                reason: "another coordinator has taken it over".to_owned(),
            }),
            _ => Err(Error::volume(format!("write checkpoint {}", self.place(&self.folder())), error)),
        }
    }

    fn stage(&self, bytes: &[u8]) -> Result<StagedFile> {
        stage(&self.view, bytes)
    }

    fn manifest(&self, state: &State, pointer: &Pointer, bytes: usize) -> Vec<u8> {
        let manifest = Manifest {
            format_version: FORMAT_VERSION,
            job: &self.job,
            run: &self.run,
            plan: &self.plan,
            step: state.step,
            epochs: state.ledger.epochs.len(),
            finish: pointer.finish,
            loss: state.ledger.epochs.last().map(|epoch| epoch.loss),
            files: [ManifestFile { path: STATE_FILE, bytes, sha256: &pointer.sha256 }],
            code_version: env!("CARGO_PKG_VERSION"),
            created_at: chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Secs, true),
        };
        serde_json::to_vec_pretty(&manifest).unwrap_or_default()
    }
}

/// Writes bytes as an object that nothing points to yet.
pub(crate) fn stage(view: &View, bytes: &[u8]) -> Result<StagedFile> {
    let fail = |e| Error::volume(format!("write {} bytes to {}", bytes.len(), view.spec()), e);
    let mut writer = view.stage().map_err(fail)?;
    writer
        .write_all(bytes)
        .map_err(|e| Error::io(format!("write {} bytes to {}", bytes.len(), view.spec()), e))?;
    writer.finish().map_err(fail)
}
