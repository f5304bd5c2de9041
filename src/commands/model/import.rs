//! `millrace model import`: an ONNX file of another program becomes the next version of a model.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use millrace_bundle::onnx::ModelProto;
use millrace_bundle::{Bundle, Imported, Lineage, MixedDataset};
use millrace_datafs::Name;
use millrace_serving::hazards::{self, Divisors};
use serde::Deserialize;
use tokio::runtime::Handle;

use super::publish::{self, Place};
use super::{graph, read};
use crate::context::{Context, live};
use crate::failure::{Exit, fail};
use crate::output::bytes;

/// Longest text copied from a file, in characters.
const PRODUCER_CHARS_MAX: usize = 160;

/// Largest file with the origin of a version: a manifest, which holds it, has 1 MiB.
const LINEAGE_BYTES_MAX: u64 = 1 << 20;
/// Largest file with the record of a training.
const TRAINING_BYTES_MAX: u64 = 16 << 20;
/// Name of the record of a training inside a version's folder.
const TRAINING_FILE: &str = "training.json";

/// The files that become a version.
pub(super) struct Source {
    /// The graph.
    pub(super) file: PathBuf,
    /// An [`Origin`].
    pub(super) lineage: Option<PathBuf>,
    /// The record of the training, kept as it is.
    pub(super) training: Option<PathBuf>,
}

/// The content of the file of `--lineage`: the origin of a version, as its manifest has it.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Origin {
    lineage: Trained,
    metrics: BTreeMap<String, f64>,
}

/// The fields of a [`Lineage`] that a training knows.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Trained {
    volume: String,
    snapshot: String,
    path: String,
    topic: String,
    mixture: Vec<MixedDataset>,
    selection: String,
    offsets: BTreeMap<String, BTreeMap<i32, i64>>,
    config_sha256: String,
    seed: u64,
    code_version: String,
    steps: u64,
    epochs: u64,
}

/// Publishes the file as the next version of a model in a volume, if the key of the volume that is `expected` has its
/// value.
pub(super) async fn into_volume(
    context: &Context,
    source: Source,
    name: String,
    volume: &Name,
    expected: Option<(String, String)>,
) -> Result<Bundle> {
    let datafs = context.volumes().await?;
    let (spec, runtime) = (live(volume), Handle::current());
    let make = move || {
        let view = datafs.view(&spec)?;
        let place = Place { version: None, expected };
        publish::into_volume(&view, &runtime, &name, &place, |version| bundle(&source, &name, version))
    };
    context.run_abandonable(make).await
}

/// Writes the file as the next version of a model in a folder. A failure leaves nothing behind.
pub(super) fn into_folder(source: &Source, name: &str, folder: &Path) -> Result<Bundle> {
    publish::into_folder(folder, name, None, |version| bundle(source, name, version))
}

fn bundle(source: &Source, name: &str, version: u64) -> Result<Bundle> {
    let file = source.file.as_path();
    let Origin { lineage, metrics } = origin(source.lineage.as_deref())?;
    let training = source.training.as_deref().map(|file| small_file(file, TRAINING_BYTES_MAX)).transpose()?;
    let (graph_bytes, model) = read(file)?;
    graph(&model, file)?;
    Bundle::check_initializers(&model).with_context(|| format!("cannot import {}", file.display()))?;
    // The server checks divisors, since its configuration may vouch for them.
    if let Err(hazard) = hazards::check(&model, Divisors::Trusted) {
        return fail(Exit::Usage, format!("cannot import {}: {hazard}", file.display()));
    }
    let file_name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let imported = Imported { file: file_name, producer: producer(&model) };
    // The decoded model holds the weights a second time.
    drop(model);
    let context = || format!("cannot import {}", file.display());
    let weights = Bundle::weight_files(&graph_bytes).with_context(context)?;
    let weights = weights.into_iter().map(|path| {
        let content = weights_of(file, &path)?;
        Ok((path, content))
    });
    let weights = weights.collect::<Result<Vec<_>>>()?;
    // A file that was trained on a known dataset is no import of another program's model.
    let imported = (lineage.volume.is_empty() && lineage.topic.is_empty() && lineage.mixture.is_empty())
        .then_some(imported);
    let bundle =
        Bundle::with_weights(name, version, graph_bytes, weights, lineage.into_lineage(imported), metrics)
            .with_context(context)?;
    match training {
        Some(training) => bundle.with_file(TRAINING_FILE, training.into()).with_context(context),
        None => Ok(bundle),
    }
}

/// The origin that a file describes; an empty one without a file.
fn origin(file: Option<&Path>) -> Result<Origin> {
    let Some(file) = file else { return Ok(Origin::default()) };
    match serde_json::from_slice(&small_file(file, LINEAGE_BYTES_MAX)?) {
        Ok(origin) => Ok(origin),
        Err(error) => {
            fail(Exit::Usage, format!("{} is not the lineage of a version: {error}", file.display()))
        }
    }
}

/// Reads a file of bounded size.
fn small_file(file: &Path, bytes_max: u64) -> Result<Vec<u8>> {
    let what = || format!("cannot read {}", file.display());
    if !file.metadata().with_context(what)?.is_file() {
        return fail(Exit::Usage, format!("{} is not a file", file.display()));
    }
    let mut content = Vec::new();
    let opened = std::fs::File::open(file);
    opened.and_then(|file| file.take(bytes_max + 1).read_to_end(&mut content)).with_context(what)?;
    if content.len() as u64 > bytes_max {
        return fail(Exit::Usage, format!("{} is larger than {}", file.display(), bytes(bytes_max)));
    }
    Ok(content)
}

impl Trained {
    fn into_lineage(self, imported: Option<Imported>) -> Lineage {
        let Trained {
            volume,
            snapshot,
            path,
            topic,
            mixture,
            selection,
            offsets,
            config_sha256,
            seed,
            code_version,
            steps,
            epochs,
        } = self;
        Lineage {
            volume,
            snapshot,
            path,
            topic,
            mixture,
            selection,
            offsets,
            config_sha256,
            seed,
            code_version,
            steps,
            epochs,
            imported,
            quantized: None,
        }
    }
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
