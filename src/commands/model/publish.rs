//! Publication of imported and quantized bundles as versions of a model, in a volume or in a folder.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use millrace_bundle::{Bundle, VERSION_MAX, WRITING_FILE, check_name, next_version};
use millrace_datafs::{Publish, View};
use millrace_home::write_atomically;
use millrace_serving::config::VOLUME_ROOT;
use object_store::ObjectStore;
use tokio::runtime::Handle;

use super::check_folder;
use crate::failure::{Exit, fail};

/// Attempts with another version after a conflict with another process.
const ATTEMPTS: usize = 16;

/// Where a bundle is published in a volume.
pub(super) struct Place {
    /// The next version if there is none.
    pub(super) version: Option<u64>,
    /// A key of the volume and its value, without which nothing is published.
    pub(super) expected: Option<(String, String)>,
}

/// Publishes the bundle that `make` builds for a version. One transaction publishes it and retries if another version of
/// the model was published meanwhile, as the trainer does.
pub(super) fn into_volume(
    view: &View,
    runtime: &Handle,
    name: &str,
    place: &Place,
    make: impl Fn(u64) -> Result<Bundle>,
) -> Result<Bundle> {
    check_name(name)?;
    let store = view.object_store();
    let latest_key = format!("{VOLUME_ROOT}/{name}/latest");
    let mut lowest = 1;
    for _ in 0..ATTEMPTS {
        let latest = view.key_get(&latest_key)?;
        let last: u64 = latest
            .as_deref()
            .and_then(|bytes| std::str::from_utf8(bytes).ok())
            .and_then(|text| text.parse().ok())
            .filter(|version| *version < VERSION_MAX)
            .unwrap_or_default();
        let mut publish = Publish::new();
        if let Some((key, value)) = &place.expected {
            publish = publish.expect_key(key, Some(value.clone().into_bytes()));
        }
        let version = match place.version {
            Some(version) => {
                // A version below the newest leaves `latest` as it is. Two publishers of it conflict over this key.
                let claim_key = format!("{VOLUME_ROOT}/{name}/{version}/claim");
                let claim = view.key_get(&claim_key)?;
                if runtime.block_on(is_taken(store.as_ref(), name, version))? {
                    return taken(name, version);
                }
                let own = format!("{:016x}", rand::random::<u64>());
                publish = publish.expect_key(claim_key.clone(), claim).put_key(claim_key, own);
                version
            }
            None => {
                let free = runtime.block_on(next_version(store.as_ref(), VOLUME_ROOT, name))?;
                free.max(last.saturating_add(1)).max(lowest)
            }
        };
        let bundle = make(version)?;
        publish = publish
            // Also against a folder that another program makes, for example in a mount.
            .expect_absent(format!("{VOLUME_ROOT}/{name}/{version}"))
            .expect_key(latest_key.clone(), latest)
            .put_key(latest_key.clone(), version.max(last).to_string());
        for (path, bytes) in bundle.files() {
            let mut staged = view.stage()?;
            staged.append(&bytes)?;
            publish = publish.file(format!("{VOLUME_ROOT}/{name}/{version}/{path}"), staged.finish()?);
        }
        match view.publish(publish) {
            Ok(()) => return Ok(bundle),
            Err(millrace_datafs::Error::Conflict { key })
                if place.expected.as_ref().is_some_and(|(expected, _)| *expected == key) =>
            {
                let spec = view.spec();
                return fail(
                    Exit::Conflict,
                    format!(
                        "cannot publish model {name} to {spec}: key {key} has another value (--expect-key)"
                    ),
                );
            }
            Err(millrace_datafs::Error::Exists { .. }) if place.version.is_some() => {
                return taken(name, version);
            }
            Err(millrace_datafs::Error::Exists { .. }) => lowest = version.saturating_add(1),
            Err(millrace_datafs::Error::Conflict { .. }) => {}
            Err(error) => {
                return Err(error).with_context(|| format!("cannot publish model {name} to {}", view.spec()));
            }
        }
    }
    busy(name)
}

/// Whether a version's place holds any object.
async fn is_taken(store: &dyn ObjectStore, name: &str, version: u64) -> Result<bool> {
    let place = object_store::path::Path::from(format!("{VOLUME_ROOT}/{name}/{version}"));
    match store.list_with_delimiter(Some(&place)).await {
        Ok(listing) => Ok(!listing.objects.is_empty() || !listing.common_prefixes.is_empty()),
        Err(object_store::Error::NotFound { .. }) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Writes the bundle that `make` builds for a version: `requested`, or the next one. A failure leaves nothing
/// behind.
pub(super) fn into_folder(
    folder: &Path,
    name: &str,
    requested: Option<u64>,
    make: impl Fn(u64) -> Result<Bundle>,
) -> Result<Bundle> {
    check_name(name)?;
    check_folder(folder)?;
    let model = folder.join(name);
    let claimed = claim(&model, requested).with_context(|| format!("cannot write to {}", model.display()))?;
    let (version, place) = match (claimed, requested) {
        (Some(claimed), _) => claimed,
        (None, Some(version)) => return taken(name, version),
        (None, None) => return busy(name),
    };
    let written = make(version).and_then(|bundle| {
        let writing = place.join(WRITING_FILE);
        File::create(&writing).with_context(|| format!("cannot write {}", writing.display()))?;
        for (path, bytes) in bundle.files() {
            let path = place.join(path);
            // Files of a bundle may be in subfolders.
            path.parent()
                .map_or(Ok(()), fs::create_dir_all)
                .and_then(|()| write_atomically(&path, &bytes))
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        fs::remove_file(&writing).with_context(|| format!("cannot remove {}", writing.display()))?;
        for made in [model.as_path(), folder] {
            File::open(made)?.sync_all().with_context(|| format!("cannot sync {}", made.display()))?;
        }
        Ok(bundle)
    });
    if written.is_err() {
        fs::remove_dir_all(&place).ok();
        // Fails, and keeps the folder, if other versions exist.
        fs::remove_dir(&model).ok();
    }
    written
}

/// Creates the folder of a version: `requested`, or the next one. Only one process can create it. None if other
/// processes took all attempted versions.
fn claim(model: &Path, requested: Option<u64>) -> io::Result<Option<(u64, PathBuf)>> {
    fs::create_dir_all(model)?;
    let first = match requested {
        Some(version) => version,
        None => {
            let mut highest = 0u64;
            for entry in fs::read_dir(model)? {
                let version = entry?.file_name().to_str().and_then(|name| name.parse().ok());
                highest = version.map_or(highest, |version| highest.max(version));
            }
            highest.saturating_add(1)
        }
    };
    let attempts = if requested.is_some() { 1 } else { ATTEMPTS };
    for version in (first..=u64::MAX).take(attempts) {
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

fn taken<T>(name: &str, version: u64) -> Result<T> {
    fail(Exit::Conflict, format!("model {name} has a version {version} already: versions are never replaced"))
}
