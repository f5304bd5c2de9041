//! `millrace model import`: an ONNX file of another program becomes the next version of a model.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use millrace_bundle::onnx::ModelProto;
use millrace_bundle::{Bundle, Imported, Lineage};
use millrace_datafs::Name;
use tokio::runtime::Handle;

use super::{graph, publish, read};
use crate::context::{Context, live};

/// Longest text that is taken over from a file, in characters.
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
    context.apart(make).await
}

/// Writes the file as the next version of a model in a folder; after a failure nothing is left of it.
pub(super) fn into_folder(file: &Path, name: &str, folder: &Path) -> Result<Bundle> {
    publish::into_folder(folder, name, None, |version| bundle(file, name, version))
}

fn bundle(file: &Path, name: &str, version: u64) -> Result<Bundle> {
    let (bytes, model) = read(file)?;
    graph(&model, file)?;
    let file_name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let imported = Imported { file: file_name, producer: producer(&model) };
    // It holds the weights once more.
    drop(model);
    let lineage = Lineage { imported: Some(imported), ..Lineage::default() };
    Bundle::new(name, version, bytes, lineage, BTreeMap::new())
        .with_context(|| format!("cannot import {}", file.display()))
}

fn producer(model: &ModelProto) -> String {
    let text = format!("{} {}", model.producer_name(), model.producer_version());
    text.trim().chars().take(PRODUCER_CHARS_MAX).collect()
}
