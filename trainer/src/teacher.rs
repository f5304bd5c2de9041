//! The teacher of a distillation: a model that is read once, when a run begins.
//!
//! The coordinator stores it beside the run's first model, where all workers read it. Its digest is part of the
//! run's id, its place is not.
use std::path::Path;

use millrace_bundle::Bundle;
use millrace_bundle::onnx::ModelProto;
use millrace_datafs::{Datafs, View};
use millrace_leaf::bounded_file;
use millrace_streams::dataset::DatasetSpec;
use prost::Message;
use serde::Deserialize;

use crate::error::{Error, Result};
use crate::job::JobFile;
use crate::labels::{Dictionary, LABELS_FILE};
use crate::model;
use crate::source;

/// The graph in the folder of a bundle.
const MODEL_FILE: &str = "model.onnx";
/// Largest file of labels that is read.
const LABELS_BYTES_MAX: u64 = 128 << 20;

/// A teacher as its bundle or its file has it.
pub(crate) struct Teacher {
    pub(crate) model: ModelProto,
    /// The content of the bundle's file of labels.
    labels: Option<Vec<u8>>,
}

/// The part of [`LABELS_FILE`] that tells the classes.
#[derive(Deserialize)]
struct Texts {
    labels: Vec<String>,
}

/// Reads the teacher of the job's loss, complete; none for other losses.
pub(crate) fn read(datafs: &Datafs, job: &JobFile) -> Result<Option<Teacher>> {
    let Some(place) = job.loss.teacher() else { return Ok(None) };
    let bad = |reason: String| unusable(job, &reason);
    let file = |folder: &str| match folder.to_ascii_lowercase().ends_with(".onnx") {
        true => folder.to_owned(),
        false => format!("{}/{MODEL_FILE}", folder.trim_end_matches('/')),
    };
    if !is_in_volume(place) {
        let path = file(place);
        let model = model::read(path.as_ref()).map_err(|reason| bad(format!("{path}: {reason}")))?;
        let labels = Path::new(&path).with_file_name(LABELS_FILE);
        let labels = match bounded_file::read(&labels, LABELS_BYTES_MAX) {
            Ok(bytes) => Some(bytes),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(bad(format!("{}: {error}", labels.display()))),
        };
        return Ok(Some(Teacher { model, labels }));
    }
    let mut spec: DatasetSpec = place.parse().map_err(|error| bad(format!("{error}")))?;
    source::resolve_snapshot(datafs, &job.name, &mut spec)?;
    let failed = |error| Error::volume(format!("job {}: open loss.teacher {place}", job.name), error);
    let view = datafs.view(&spec.source).map_err(failed)?;
    let path = file(&spec.path);
    let mut left = model::MODEL_BYTES_MAX;
    let bytes = read_bounded(job, &view, &path, &mut left)?;
    let mut model = ModelProto::decode(bytes.as_slice())
        .map_err(|e| bad(format!("{}:{path} is not an ONNX model ({e})", spec.source)))?;
    drop(bytes);
    let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder).to_owned();
    let weights = |file: &str| {
        read_bounded(job, &view, &format!("{folder}/{file}"), &mut left).map_err(|error| error.one_line())
    };
    Bundle::embed_weights(&mut model, weights).map_err(|e| bad(e.to_string()))?;
    // As for a file: the place of a teacher is no part of the run's identity.
    model::sharing::restore(&mut model);
    let labels = format!("{folder}/{LABELS_FILE}");
    let labels = match view.stat(&labels) {
        Ok(_) => Some(read_bounded(job, &view, &labels, &mut { LABELS_BYTES_MAX })?),
        Err(millrace_datafs::Error::NotFound { .. }) => None,
        Err(error) => return Err(failed(error)),
    };
    Ok(Some(Teacher { model, labels }))
}

impl Teacher {
    /// Rejects a teacher whose classes are other texts than those of the job's labels.
    pub(crate) fn check_labels(&self, job: &JobFile, own: Option<&Dictionary>) -> Result<()> {
        let (Some(own), Some(labels)) = (own, &self.labels) else { return Ok(()) };
        let Texts { labels } = serde_json::from_slice(labels)
            .map_err(|e| unusable(job, &format!("its {LABELS_FILE} cannot be read ({e})")))?;
        match own.is(&labels) {
            true => Ok(()),
            false => Err(unusable(
                job,
                &format!(
                    "the classes in its {LABELS_FILE} are not those of column {:?}, which are {}: train it on the same \
                     labels",
                    job.label,
                    own.listed()
                ),
            )),
        }
    }
}

/// Whether the place of a teacher is `volume:/path` or `volume@snapshot:/path`.
pub(crate) fn is_in_volume(place: &str) -> bool {
    place.contains(":/")
}

fn unusable(job: &JobFile, reason: &str) -> Error {
    let teacher = job.loss.teacher().unwrap_or_default();
    Error::Job { job: job.name.to_string(), reason: format!("loss.teacher = {teacher:?}: {reason}") }
}

/// Reads a file of at most `left` bytes, which its size reduces.
fn read_bounded(job: &JobFile, view: &View, path: &str, left: &mut u64) -> Result<Vec<u8>> {
    let place = format!("{}:{path}", view.spec());
    let failed = |error| Error::volume(format!("job {}: read loss.teacher {place}", job.name), error);
    let size = view.stat(path).map_err(failed)?.size;
    *left = left
        .checked_sub(size)
        .ok_or_else(|| unusable(job, &format!("{place} has {size} bytes, which are too many")))?;
    Ok(view.read_file_up_to(path, size).map_err(failed)?.to_vec())
}
