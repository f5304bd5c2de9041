//! The first model of a run: read from an ONNX file, with weights in files beside it, or built from the job
//! file.
pub(crate) mod sharing;

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use millrace_bundle::Bundle;
use millrace_bundle::onnx::ModelProto;
use prost::Message;
use thiserror::Error;

use crate::error::{Error, Result};
use crate::init::{CnnSpec, MlpSpec, ModelSpec};
use crate::job::{JobFile, ModelSource};
use sharing::Restored;

/// Largest ONNX file, and largest model including external weights: the exported model is one file.
pub(crate) const MODEL_BYTES_MAX: u64 = 2 << 30;

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

/// Why a file cannot be read as a model. No message names the file itself.
#[derive(Debug, Error)]
pub enum ModelFileError {
    /// The operating system refused.
    #[error("cannot be read ({0})")]
    Io(io::Error),
    /// A folder, a pipe, a socket or a device.
    #[error("is not a regular file")]
    NotRegular,
    /// More bytes than a model may have.
    #[error("is too large: a model with all its weights has at most {MODEL_BYTES_MAX} bytes")]
    TooLarge,
    /// The bytes are no model.
    #[error("is not an ONNX model ({0})")]
    NotOnnx(prost::DecodeError),
    /// The weights that it keeps in other files cannot be read, or do not fit.
    #[error("{0}")]
    Weights(millrace_bundle::Error),
}

/// Reads an ONNX file, embeds the weights that it keeps in other files, and undoes what the exporter merged
/// ([`sharing`]).
pub(crate) fn read(path: &Path) -> Result<ModelProto, ModelFileError> {
    let mut left = MODEL_BYTES_MAX;
    let bytes = read_bounded(path, &mut left)?;
    let mut model = ModelProto::decode(bytes.as_slice()).map_err(ModelFileError::NotOnnx)?;
    // The bytes hold the weights a second time.
    drop(bytes);
    let weights = |file: &str| {
        let place = weight_path(path, file)?;
        read_bounded(&place, &mut left).map_err(|e| format!("its weights {}: {e}", place.display()))
    };
    Bundle::embed_weights(&mut model, weights).map_err(ModelFileError::Weights)?;
    let restored = sharing::restore(&mut model);
    if restored != Restored::default() {
        tracing::info!(
            model = %path.display(),
            separated = ?restored.separated,
            tied = ?restored.tied,
            biases = ?restored.biases,
            training = ?restored.training,
            "what the exporter merged is separate again, what it copied is tied, and what it left out is back"
        );
    }
    Ok(model)
}

/// Reads a regular file of at most `left` bytes, and subtracts its length.
fn read_bounded(path: &Path, left: &mut u64) -> Result<Vec<u8>, ModelFileError> {
    // Opening a pipe would wait for its writer.
    let metadata = std::fs::metadata(path).map_err(ModelFileError::Io)?;
    if !metadata.is_file() {
        return Err(ModelFileError::NotRegular);
    }
    if metadata.len() > *left {
        return Err(ModelFileError::TooLarge);
    }
    let mut bytes = Vec::new();
    // The file may grow meanwhile, and files of the kernel have no length.
    File::open(path)
        .and_then(|file| file.take(left.saturating_add(1)).read_to_end(&mut bytes))
        .map_err(ModelFileError::Io)?;
    *left = left.checked_sub(bytes.len() as u64).ok_or(ModelFileError::TooLarge)?;
    Ok(bytes)
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
