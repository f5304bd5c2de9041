//! `millrace model import`: an ONNX file of another program becomes the next version of a model.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use millrace_bundle::onnx::ModelProto;
use millrace_bundle::{Bundle, Imported, Lineage, check_name, next_version};
use millrace_datafs::{Name, Publish, View};
use millrace_serving::config::VOLUME_ROOT;
use tokio::runtime::Handle;

use super::{graph, read};
use crate::context::{Context, live};
use crate::failure::{Exit, fail};
use crate::home::write_atomically;

/// How often another version is tried because somebody else was faster.
const ATTEMPTS: usize = 16;
/// Longest text that is taken over from a file, in characters.
const PRODUCER_CHARS_MAX: usize = 160;

/// Publishes the file as the next version of a model in a volume.
pub(super) async fn into_volume(
    context: &Context,
    file: PathBuf,
    name: String,
    volume: &Name,
) -> Result<Bundle> {
    let datafs = context.datafs()?;
    let (spec, runtime) = (live(volume), Handle::current());
    context.blocking(move || publish(&datafs.view(&spec)?, &runtime, &file, &name)).await
}

/// One publish, which fails where another one of the model came first: as trainers do it.
fn publish(view: &View, runtime: &Handle, file: &Path, name: &str) -> Result<Bundle> {
    check_name(name)?;
    let store = view.object_store();
    let latest_key = format!("{VOLUME_ROOT}/{name}/latest");
    for _ in 0..ATTEMPTS {
        let latest = view.key_get(&latest_key)?;
        let last: u64 = latest
            .as_deref()
            .and_then(|bytes| std::str::from_utf8(bytes).ok())
            .and_then(|text| text.parse().ok())
            .unwrap_or_default();
        let free = runtime.block_on(next_version(store.as_ref(), VOLUME_ROOT, name))?;
        let version = free.max(last.saturating_add(1));
        let bundle = bundle(file, name, version)?;
        let mut publish = Publish::new()
            .expect_key(latest_key.clone(), latest)
            .put_key(latest_key.clone(), version.to_string());
        for (path, bytes) in bundle.files() {
            let mut staged = view.stage()?;
            staged.append(&bytes)?;
            publish = publish.file(format!("{VOLUME_ROOT}/{name}/{version}/{path}"), staged.finish()?);
        }
        match view.publish(publish) {
            Ok(()) => return Ok(bundle),
            Err(millrace_datafs::Error::Conflict { .. }) => {}
            Err(error) => {
                return Err(error).with_context(|| format!("cannot publish model {name} to {}", view.spec()));
            }
        }
    }
    busy(name)
}

/// Writes the file as the next version of a model in a folder; after a failure nothing is left of it.
pub(super) fn into_folder(file: &Path, name: &str, folder: &Path) -> Result<Bundle> {
    check_name(name)?;
    if !folder.is_dir() {
        return fail(Exit::NotFound, format!("there is no folder {}", folder.display()));
    }
    let model = folder.join(name);
    let claimed = claim(&model).with_context(|| format!("cannot write to {}", model.display()))?;
    let Some((version, place)) = claimed else { return busy(name) };
    let written = bundle(file, name, version).and_then(|bundle| {
        for (path, bytes) in bundle.files() {
            let path = place.join(path);
            write_atomically(&path, &bytes).with_context(|| format!("cannot write {}", path.display()))?;
        }
        for made in [model.as_path(), folder] {
            File::open(made)?.sync_all().with_context(|| format!("cannot sync {}", made.display()))?;
        }
        Ok(bundle)
    });
    if written.is_err() {
        fs::remove_dir_all(&place).ok();
        // Stays while there are other versions.
        fs::remove_dir(&model).ok();
    }
    written
}

/// Makes the folder of the next version, which only one process can. None when others took all that were
/// tried.
fn claim(model: &Path) -> io::Result<Option<(u64, PathBuf)>> {
    fs::create_dir_all(model)?;
    let mut highest = 0u64;
    for entry in fs::read_dir(model)? {
        let version = entry?.file_name().to_str().and_then(|name| name.parse().ok());
        highest = version.map_or(highest, |version| highest.max(version));
    }
    for version in (highest.saturating_add(1)..=u64::MAX).take(ATTEMPTS) {
        let place = model.join(version.to_string());
        match fs::create_dir(&place) {
            Ok(()) => return Ok(Some((version, place))),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

fn busy<T>(name: &str) -> Result<T> {
    fail(Exit::Conflict, format!("other versions of model {name} are being published: run it again"))
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
