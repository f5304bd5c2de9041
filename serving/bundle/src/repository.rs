//! The bundle repository: finds and loads bundles below a root path of an object store.

use std::collections::BTreeMap;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt, UpdateVersion};

use crate::bundle::{Bundle, sha256_hex};
use crate::error::{Error, Result};
use crate::folder::{CONFIG_FILE, ModelFolder, PlainVersion};
use crate::manifest::{
    FORMAT_VERSION, MANIFEST_BYTES_MAX, MANIFEST_FILE, MODEL_FILE, Manifest, WRITING_FILE, is_model_name,
    shorten,
};

/// Bounds on reads from a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Largest total size of a version's files without the manifest, in bytes. The default is 32 GiB. An ONNX
    /// file has at most 2 GiB; larger models keep their weights in separate files.
    pub model_bytes_max: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { model_bytes_max: 32 << 30 }
    }
}

/// A complete model version found by [`scan`]: its manifest is valid, and its files exist with the right
/// sizes. [`load`] compares the digests.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelVersion {
    /// Model name.
    pub name: String,
    /// Version, positive.
    pub version: u64,
    /// The manifest.
    pub manifest: Manifest,
}

/// A directory that looks like a model version but cannot be used.
#[derive(Debug)]
pub struct Skipped {
    /// Path in the store.
    pub path: String,
    /// Why it was skipped.
    pub reason: Error,
}

/// The result of a scan.
#[derive(Debug, Default)]
pub struct Listing {
    /// Usable versions, by name, then by version ascending.
    pub complete: Vec<ModelVersion>,
    /// Versions without a manifest, of models that have a `config.pbtxt` or no version with a manifest, in the
    /// same order.
    pub plain: Vec<PlainVersion>,
    /// The known files next to the versions, of models that have any.
    pub folders: Vec<ModelFolder>,
    /// Skipped directories, with the reason.
    pub skipped: Vec<Skipped>,
    /// Names of models whose folder could not be read, with the reason.
    pub unread: Vec<(String, Error)>,
}

/// Usable versions below `root`, by name, then by version ascending. Incomplete and corrupt ones are left
/// out; [`scan`] reports why.
///
/// # Errors
/// [`Error::Store`] when the store itself fails. A root that does not exist holds no models.
pub async fn list(store: &dyn ObjectStore, root: &str) -> Result<Vec<ModelVersion>> {
    Ok(scan(store, root).await?.complete)
}

/// Scans everything below `root`: usable versions, and the others with the reason.
///
/// # Errors
/// [`Error::Store`] when the root cannot be listed.
pub async fn scan(store: &dyn ObjectStore, root: &str) -> Result<Listing> {
    let root = root_path(root)?;
    let mut listing = Listing::default();
    for model in directories(store, &root).await? {
        let Some(name) = model.filename().map(str::to_owned) else {
            continue;
        };
        // Hidden entries belong to other programs, for example to Git or to mounted ConfigMaps.
        if name.starts_with('.') {
            continue;
        }
        if !is_model_name(&name) {
            let reason = Error::InvalidName { name: shorten(&name) };
            listing.skipped.push(Skipped { path: model.to_string(), reason });
            continue;
        }
        // An unreadable model takes no other one down.
        if let Err(reason) = add_versions(store, &model, &name, &mut listing).await {
            listing.unread.push((name, reason));
        }
    }
    listing.complete.sort_by(|a, b| a.name.cmp(&b.name).then(a.version.cmp(&b.version)));
    listing.plain.sort_by(|a, b| a.name.cmp(&b.name).then(a.version.cmp(&b.version)));
    Ok(listing)
}

/// Scans one model below `root`; the result is empty if the model does not exist.
///
/// # Errors
/// [`Error::InvalidName`]; [`Error::Store`] when the store itself fails.
pub async fn scan_model(store: &dyn ObjectStore, root: &str, name: &str) -> Result<Listing> {
    let mut listing = Listing::default();
    add_versions(store, &model_path(root, name)?, name, &mut listing).await?;
    listing.complete.sort_by_key(|found| found.version);
    listing.plain.sort_by_key(|found| found.version);
    Ok(listing)
}

async fn add_versions(
    store: &dyn ObjectStore,
    model: &Path,
    name: &str,
    listing: &mut Listing,
) -> Result<()> {
    let (versions, beside) = children(store, model).await?;
    let folder = ModelFolder::new(name, &beside);
    let configured = folder.files.contains_key(CONFIG_FILE);
    if !folder.files.is_empty() {
        listing.folders.push(folder);
    }
    let (mut bare, mut has_bundles) = (Vec::new(), false);
    for path in versions {
        let version = path.filename().unwrap_or_default().to_owned();
        let found = match parse_version(&version) {
            Some(version) => look_at(store, &path, name, version, configured).await,
            None => Err(Error::InvalidVersion { version: shorten(&version) }),
        };
        match found {
            Ok(FolderContent::Bundle(manifest)) => {
                has_bundles = true;
                listing.complete.push(ModelVersion {
                    name: name.to_owned(),
                    version: manifest.version,
                    manifest: *manifest,
                });
            }
            Ok(FolderContent::Plain(version)) => listing.plain.push(version),
            Ok(FolderContent::Bare(version)) => bare.push((path, version)),
            Err(reason) => {
                // Damaged or incomplete bundles.
                has_bundles |= !matches!(
                    reason,
                    Error::InvalidVersion { .. } | Error::NotFound { .. } | Error::Store { .. }
                );
                listing.skipped.push(Skipped { path: path.to_string(), reason });
            }
        }
    }
    // Next to bundles, a graph without a manifest is a bundle that is still being written, or whose writer
    // failed.
    for (path, version) in bare {
        if has_bundles {
            let path = path.to_string();
            listing.skipped.push(Skipped { reason: no_manifest(&path), path });
        } else {
            listing.plain.push(version);
        }
    }
    Ok(())
}

/// Content of a version's directory.
enum FolderContent {
    Bundle(Box<Manifest>),
    /// A version in Triton's layout, next to a configuration.
    Plain(PlainVersion),
    /// A graph alone, without a configuration.
    Bare(PlainVersion),
}

/// Inspects the directory of a version.
async fn look_at(
    store: &dyn ObjectStore,
    base: &Path,
    name: &str,
    version: u64,
    configured: bool,
) -> Result<FolderContent> {
    let files = match files_below(store, base).await {
        // Versions of an ensemble may have no files.
        Err(Error::NotFound { .. }) if configured => BTreeMap::new(),
        files => files?,
    };
    if configured && !files.contains_key(&base.clone().join(MANIFEST_FILE)) {
        return Ok(FolderContent::Plain(PlainVersion::new(name, version, base, &files)?));
    }
    let has = |file: &str| files.contains_key(&base.clone().join(file));
    if !has(MANIFEST_FILE) && !has(WRITING_FILE) && has(MODEL_FILE) {
        return Ok(FolderContent::Bare(PlainVersion::new(name, version, base, &files)?));
    }
    let (manifest, _) = inspect(store, base, &files, name, version).await?;
    Ok(FolderContent::Bundle(Box::new(manifest)))
}

/// Loads one version with the default [`Limits`]; every byte is verified.
///
/// # Errors
/// [`Error::NotFound`], [`Error::Incomplete`], [`Error::Corrupt`], [`Error::NewerFormat`],
/// [`Error::TooLarge`], [`Error::Store`].
pub async fn load(store: &dyn ObjectStore, root: &str, name: &str, version: u64) -> Result<Bundle> {
    load_with(store, root, name, version, &Limits::default()).await
}

/// Loads one version within the given limits; every byte is verified. Holds the model in memory once.
///
/// # Errors
/// As [`load`].
pub async fn load_with(
    store: &dyn ObjectStore,
    root: &str,
    name: &str,
    version: u64,
    limits: &Limits,
) -> Result<Bundle> {
    let base = version_path(root, name, version)?;
    let files = files_below(store, &base).await?;
    let (manifest, paths) = inspect(store, &base, &files, name, version).await?;
    let total = manifest.files.iter().fold(0u64, |sum, file| sum.saturating_add(file.bytes));
    if total > limits.model_bytes_max {
        let bytes_max = limits.model_bytes_max;
        return Err(Error::TooLarge { path: base.to_string(), bytes: total, bytes_max });
    }
    let mut files = Vec::with_capacity(manifest.files.len());
    for (entry, path) in manifest.files.iter().zip(paths) {
        let content = read_bounded(store, &path, entry.bytes).await?;
        let corrupt = |reason: String| Error::Corrupt { path: path.to_string(), reason };
        if content.len() as u64 != entry.bytes {
            let found = content.len();
            return Err(corrupt(format!("{found} bytes where the manifest says {}", entry.bytes)));
        }
        let found = sha256_hex(&content);
        if found != entry.sha256 {
            return Err(corrupt(format!("SHA-256 {found} where the manifest says {}", entry.sha256)));
        }
        files.push((entry.path.clone(), content));
    }
    Bundle::from_verified(manifest, files)
}

/// Largest version that counts. Nothing publishes a larger one; a folder whose name is one would leave no next version.
pub const VERSION_MAX: u64 = 1 << 53;

/// The version to publish next: one above the highest version directory of the model, complete or not. Directories with
/// numbers of [`VERSION_MAX`] or more do not count.
///
/// # Errors
/// [`Error::InvalidName`], [`Error::Store`].
pub async fn next_version(store: &dyn ObjectStore, root: &str, name: &str) -> Result<u64> {
    let highest = directories(store, &model_path(root, name)?)
        .await?
        .iter()
        .filter_map(|path| path.filename().and_then(parse_version))
        .filter(|version| *version < VERSION_MAX)
        .max();
    Ok(highest.map_or(1, |version| version.saturating_add(1)))
}

/// Path of a version's directory; checks the name and the version.
pub(crate) fn version_path(root: &str, name: &str, version: u64) -> Result<Path> {
    let model = model_path(root, name)?;
    if version == 0 {
        return Err(Error::InvalidVersion { version: version.to_string() });
    }
    Ok(model.join(version.to_string()))
}

/// Path of a model's directory; checks the name.
pub(crate) fn model_path(root: &str, name: &str) -> Result<Path> {
    check_name(name)?;
    Ok(root_path(root)?.join(name))
}

/// Checks that a string is a valid model name.
///
/// # Errors
/// [`Error::InvalidName`], which states the rules.
pub fn check_name(name: &str) -> Result<()> {
    if is_model_name(name) { Ok(()) } else { Err(Error::InvalidName { name: shorten(name) }) }
}

fn root_path(root: &str) -> Result<Path> {
    Path::parse(root.trim_matches('/'))
        .map_err(|error| Error::Store { path: shorten(root), source: error.into() })
}

/// Parses a version directory's name; only the canonical spelling counts, so `01` and `+1` do not duplicate
/// `1`.
fn parse_version(text: &str) -> Option<u64> {
    text.parse::<u64>().ok().filter(|version| *version > 0 && version.to_string() == text)
}

async fn directories(store: &dyn ObjectStore, path: &Path) -> Result<Vec<Path>> {
    Ok(children(store, path).await?.0)
}

/// The entries directly in a directory: directories, and files.
async fn children(store: &dyn ObjectStore, path: &Path) -> Result<(Vec<Path>, Vec<ObjectMeta>)> {
    match store.list_with_delimiter(Some(path)).await {
        Ok(listing) => Ok((listing.common_prefixes, listing.objects)),
        Err(object_store::Error::NotFound { .. }) => Ok((Vec::new(), Vec::new())),
        Err(source) => Err(Error::Store { path: path.to_string(), source }),
    }
}

/// Every file below a version's directory; [`Error::NotFound`] if there is none.
async fn files_below(store: &dyn ObjectStore, base: &Path) -> Result<BTreeMap<Path, ObjectMeta>> {
    let files: BTreeMap<Path, ObjectMeta> =
        store.list(Some(base)).map_ok(|meta| (meta.location.clone(), meta)).try_collect().await.or_else(
            |source| match source {
                object_store::Error::NotFound { .. } => Ok(BTreeMap::new()),
                source => Err(Error::Store { path: base.to_string(), source }),
            },
        )?;
    if files.is_empty() {
        return Err(Error::NotFound { path: base.to_string() });
    }
    Ok(files)
}

fn no_manifest(path: &str) -> Error {
    let reason = format!(
        "it has no {MANIFEST_FILE} yet, and the model folder has no {CONFIG_FILE} as in a Triton repository"
    );
    Error::Incomplete { path: path.to_owned(), reason }
}

/// Reads and checks the manifest, and the existence and sizes of the files. Returns the files' paths in the
/// manifest's order.
async fn inspect(
    store: &dyn ObjectStore,
    base: &Path,
    files: &BTreeMap<Path, ObjectMeta>,
    name: &str,
    version: u64,
) -> Result<(Manifest, Vec<Path>)> {
    let path = base.clone().join(MANIFEST_FILE);
    let incomplete = |reason: String| Error::Incomplete { path: base.to_string(), reason };
    let Some(meta) = files.get(&path) else { return Err(no_manifest(base.as_ref())) };
    if meta.size > MANIFEST_BYTES_MAX {
        let bytes_max = MANIFEST_BYTES_MAX;
        return Err(Error::TooLarge { path: path.to_string(), bytes: meta.size, bytes_max });
    }
    let manifest = parse_manifest(&path, &read_bounded(store, &path, MANIFEST_BYTES_MAX).await?)?;
    let corrupt = |reason: String| Error::Corrupt { path: path.to_string(), reason };
    if manifest.name != name || manifest.version != version {
        return Err(corrupt(format!(
            "it describes {:?} version {}, not {name:?} version {version}",
            shorten(&manifest.name),
            manifest.version
        )));
    }
    let mut paths = Vec::with_capacity(manifest.files.len());
    for entry in &manifest.files {
        let path = entry.path.split('/').fold(base.clone(), |path, part| path.join(part));
        match files.get(&path) {
            None => return Err(incomplete(format!("{} is missing", entry.path))),
            Some(meta) if meta.size != entry.bytes => {
                let (path, reason) = (
                    path.to_string(),
                    format!("{} bytes where the manifest says {}", meta.size, entry.bytes),
                );
                return Err(Error::Corrupt { path, reason });
            }
            Some(_) => paths.push(path),
        }
    }
    Ok((manifest, paths))
}

pub(crate) fn parse_manifest(path: &Path, json: &[u8]) -> Result<Manifest> {
    #[derive(serde::Deserialize)]
    struct Format {
        format_version: u64,
    }
    let corrupt = |reason: String| Error::Corrupt { path: path.to_string(), reason };
    let format: Format =
        serde_json::from_slice(json).map_err(|error| corrupt(format!("it is not a manifest: {error}")))?;
    if format.format_version > FORMAT_VERSION {
        return Err(Error::NewerFormat {
            path: path.to_string(),
            found: format.format_version,
            supported: FORMAT_VERSION,
        });
    }
    let manifest: Manifest =
        serde_json::from_slice(json).map_err(|error| corrupt(format!("it is not a manifest: {error}")))?;
    manifest.check().map_err(corrupt)?;
    Ok(manifest)
}

/// Reads at most `bytes_max` bytes of a file: the size that the store reports may be wrong.
pub(crate) async fn read_bounded(store: &dyn ObjectStore, path: &Path, bytes_max: u64) -> Result<Bytes> {
    Ok(read_tagged(store, path, bytes_max).await?.0)
}

/// [`read_bounded`], with the tag that shows whether the file has changed since.
pub(crate) async fn read_tagged(
    store: &dyn ObjectStore,
    path: &Path,
    bytes_max: u64,
) -> Result<(Bytes, UpdateVersion)> {
    let store_error = |source| match source {
        object_store::Error::NotFound { .. } => Error::NotFound { path: path.to_string() },
        source => Error::Store { path: path.to_string(), source },
    };
    let found = store.get(path).await.map_err(store_error)?;
    let tag = UpdateVersion { e_tag: found.meta.e_tag.clone(), version: found.meta.version.clone() };
    let expected = usize::try_from(found.meta.size.min(bytes_max)).unwrap_or(0);
    let mut stream = found.into_stream();
    let mut content = Vec::with_capacity(expected);
    while let Some(chunk) = stream.next().await {
        let chunk = chunk.map_err(store_error)?;
        let bytes = (content.len() as u64).saturating_add(chunk.len() as u64);
        if bytes > bytes_max {
            return Err(Error::TooLarge { path: path.to_string(), bytes, bytes_max });
        }
        content.extend_from_slice(&chunk);
    }
    Ok((Bytes::from(content), tag))
}
