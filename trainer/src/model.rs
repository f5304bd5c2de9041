//! The first model of a run: read from an ONNX file, with weights in files beside it, or built from the job
//! file.
mod sharing;

use std::path::{Path, PathBuf};

use millrace_bundle::Bundle;
use millrace_bundle::onnx::ModelProto;
use prost::Message;

use crate::error::{Error, Result};
use crate::init::{CnnSpec, MlpSpec, ModelSpec};
use crate::job::{JobFile, ModelSource};
use sharing::Restored;

/// Largest ONNX file, and largest model including external weights: the exported model is one file.
const MODEL_BYTES_MAX: u64 = 2 << 30;

/// The run's first model, complete: it refers to no other file.
pub(crate) fn load(job: &JobFile) -> Result<ModelProto> {
    let bad = |reason: String| Error::Job { job: job.name.to_string(), reason };
    match &job.model {
        ModelSource::Init(spec) => {
            let spec = match spec {
                ModelSpec::Mlp(MlpSpec { seed: 0, .. }) | ModelSpec::Cnn(CnnSpec { seed: 0, .. }) => {
                    spec.clone().with_seed(job.seed)
                }
                _ => spec.clone(),
            };
            spec.build().map_err(|e| bad(e.to_string()))
        }
        ModelSource::File(path) => {
            read(path).map_err(|reason| bad(format!("model {}: {reason}", path.display())))
        }
    }
}

/// Reads an ONNX file, embeds the weights that it keeps in other files, and undoes what the exporter merged
/// ([`sharing`]).
pub(crate) fn read(path: &Path) -> Result<ModelProto, String> {
    let mut left = MODEL_BYTES_MAX;
    let bytes = read_bounded(path, &mut left)?;
    let mut model =
        ModelProto::decode(bytes.as_slice()).map_err(|e| format!("is not an ONNX model ({e})"))?;
    // The bytes hold the weights a second time.
    drop(bytes);
    let weights = |file: &str| {
        let place = weight_path(path, file)?;
        read_bounded(&place, &mut left).map_err(|e| format!("its weights {}: {e}", place.display()))
    };
    Bundle::embed_weights(&mut model, weights).map_err(|e| e.to_string())?;
    let restored = sharing::restore(&mut model);
    if restored != Restored::default() {
        tracing::info!(
            model = %path.display(),
            separated = ?restored.separated,
            tied = ?restored.tied,
            "weights that the exporter merged are separate again, and those that it copied are tied"
        );
    }
    Ok(model)
}

fn read_bounded(path: &Path, left: &mut u64) -> Result<Vec<u8>, String> {
    let unreadable = |e: std::io::Error| format!("cannot be read ({e})");
    let bytes = std::fs::metadata(path).map_err(unreadable)?.len();
    *left = left.checked_sub(bytes).ok_or_else(|| {
        format!("{bytes} bytes; a model with all its weights has at most {MODEL_BYTES_MAX}")
    })?;
    std::fs::read(path).map_err(unreadable)
}

/// The path of a weight file: in the folder of the graph or below it. If the graph is a symbolic link, as in
/// download caches, the weight file may be a link into the graph's real folder.
fn weight_path(graph: &Path, file: &str) -> Result<PathBuf, String> {
    let folder = graph.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let place = folder.join(file);
    let inside = || -> std::io::Result<bool> {
        let (folder, graph, real) = (folder.canonicalize()?, graph.canonicalize()?, place.canonicalize()?);
        Ok(real.starts_with(folder) || real.parent() == graph.parent())
    };
    match inside() {
        Ok(true) => Ok(place),
        Ok(false) => Err(format!("it keeps weights in {}, which is outside its folder", place.display())),
        Err(error) => Err(format!("it keeps weights in {}, which cannot be read ({error})", place.display())),
    }
}

#[cfg(test)]
mod tests;
