//! `millrace model import`: an ONNX file of another program becomes the next version of a model.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use millrace_bundle::onnx::ModelProto;
use millrace_bundle::{Bundle, Imported, Lineage};
use millrace_datafs::Name;
use millrace_serving::hazards::{self, Divisors};
use tokio::runtime::Handle;

use super::{graph, publish, read};
use crate::context::{Context, live};
use crate::failure::{Exit, fail};

/// Longest text copied from a file, in characters.
const PRODUCER_CHARS_MAX: usize = 160;

/// Publishes the file as the next version of a model in a volume.
pub(super) async fn into_volume(
    context: &Context,
    file: PathBuf,
    name: String,
    volume: &Name,
) -> Result<Bundle> {
    let datafs = context.volumes().await?;
    let (spec, runtime) = (live(volume), Handle::current());
    let make = move || {
        let view = datafs.view(&spec)?;
        publish::into_volume(&view, &runtime, &name, None, |version| bundle(&file, &name, version))
    };
    context.run_abandonable(make).await
}

/// Writes the file as the next version of a model in a folder. A failure leaves nothing behind.
pub(super) fn into_folder(file: &Path, name: &str, folder: &Path) -> Result<Bundle> {
    publish::into_folder(folder, name, None, |version| bundle(file, name, version))
}

fn bundle(file: &Path, name: &str, version: u64) -> Result<Bundle> {
    let (bytes, model) = read(file)?;
    graph(&model, file)?;
    // The server checks divisors, since its configuration may vouch for them.
    if let Err(hazard) = hazards::check(&model, Divisors::Trusted) {
        return fail(Exit::Usage, format!("cannot import {}: {hazard}", file.display()));
    }
    let file_name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let imported = Imported { file: file_name, producer: producer(&model) };
    // The decoded model holds the weights a second time.
    drop(model);
    let context = || format!("cannot import {}", file.display());
    let weights = Bundle::weight_files(&bytes).with_context(context)?;
    let weights = weights.into_iter().map(|path| {
        let content = weights_of(file, &path)?;
        Ok((path, content))
    });
    let weights = weights.collect::<Result<Vec<_>>>()?;
    let lineage = Lineage { imported: Some(imported), ..Lineage::default() };
    Bundle::with_weights(name, version, bytes, weights, lineage, BTreeMap::new()).with_context(context)
}

/// Reads a file of external weights. It must be in the folder of the graph or below it. If the graph is a
/// symbolic link, as in download caches, the file may be a link into the graph's real folder.
fn weights_of(graph: &Path, path: &str) -> Result<Bytes> {
    let folder = graph.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let place = folder.join(path);
    let found = || -> std::io::Result<bool> {
        let (folder, graph, real) = (folder.canonicalize()?, graph.canonicalize()?, place.canonicalize()?);
        Ok(real.starts_with(folder) || real.parent() == graph.parent())
    };
    match found() {
        // Reading a pipe would wait, and a device may have no end.
        Ok(true) if !place.is_file() => {
            let message = format!("its weights {} are not a regular file", place.display());
            return fail(Exit::Usage, format!("cannot import {}: {message}", graph.display()));
        }
        Ok(true) => {}
        Ok(false) => {
            let message = format!("{} is outside the folder of {}", place.display(), graph.display());
            return fail(Exit::Usage, format!("cannot import {}: {message}", graph.display()));
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let message = format!("it keeps weights in {}, which does not exist", place.display());
            return fail(Exit::NotFound, format!("cannot import {}: {message}", graph.display()));
        }
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", place.display())),
    }
    let content = std::fs::read(&place).with_context(|| format!("cannot read {}", place.display()))?;
    Ok(content.into())
}

fn producer(model: &ModelProto) -> String {
    let text = format!("{} {}", model.producer_name(), model.producer_version());
    text.trim().chars().take(PRODUCER_CHARS_MAX).collect()
}
