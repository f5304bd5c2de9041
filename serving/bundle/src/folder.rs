//! Model folders in Triton's layout: a configuration next to the versions, and versions that are a graph
//! without a manifest.

use std::collections::BTreeMap;
use std::time::SystemTime;

use bytes::Bytes;
use object_store::path::Path;
use object_store::{GetResultPayload, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, UpdateVersion};

use crate::bundle::{Bundle, decoded};
use crate::error::{Error, Result};
use crate::external;
use crate::manifest::shorten;
use crate::repository::{Limits, model_path, read_bounded, read_tagged, version_path};

/// Triton's configuration of a model, next to its versions.
pub const CONFIG_FILE: &str = "config.pbtxt";
/// The routing between a model's versions, next to them.
pub const ROLLOUT_FILE: &str = "rollout.json";

/// Most files of a version without a manifest.
const FILES_MAX: usize = 256;

/// A store's metadata of a file, which shows changes of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileStat {
    /// Size in bytes.
    pub bytes: u64,
    /// Time of the last write.
    pub modified: SystemTime,
    /// The store's tag of this content, if it has one.
    pub e_tag: Option<String>,
}

impl FileStat {
    pub(crate) fn of(meta: &ObjectMeta) -> FileStat {
        FileStat { bytes: meta.size, modified: meta.last_modified.into(), e_tag: meta.e_tag.clone() }
    }
}

/// A model's folder: the known files next to its versions, by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelFolder {
    /// Model name.
    pub name: String,
    /// [`CONFIG_FILE`] and [`ROLLOUT_FILE`], if they exist.
    pub files: BTreeMap<String, FileStat>,
}

impl ModelFolder {
    pub(crate) fn new(name: &str, beside: &[ObjectMeta]) -> ModelFolder {
        let known = |meta: &&ObjectMeta| {
            meta.location.filename().is_some_and(|file| [CONFIG_FILE, ROLLOUT_FILE].contains(&file))
        };
        ModelFolder { name: name.to_owned(), files: stats(beside.iter().filter(known)) }
    }
}

/// A version without a manifest. Only loading shows whether its graph is complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlainVersion {
    /// Model name.
    pub name: String,
    /// Version, positive.
    pub version: u64,
    /// The files directly in the version's directory, by name.
    pub files: BTreeMap<String, FileStat>,
}

impl PlainVersion {
    pub(crate) fn new(
        name: &str,
        version: u64,
        base: &Path,
        files: &BTreeMap<Path, ObjectMeta>,
    ) -> Result<PlainVersion> {
        let depth = base.parts().count() + 1;
        let direct = files.values().filter(|meta| meta.location.parts().count() == depth);
        let files = stats(direct);
        if files.len() > FILES_MAX {
            return Err(Error::Corrupt {
                path: base.to_string(),
                reason: format!("{} files, the limit is {FILES_MAX}", files.len()),
            });
        }
        Ok(PlainVersion { name: name.to_owned(), version, files })
    }

    /// The store's metadata of a file of the version.
    ///
    /// # Errors
    /// [`Error::Incomplete`] if the file does not exist.
    pub fn stat(&self, file: &str) -> Result<&FileStat> {
        self.files.get(file).ok_or_else(|| Error::Incomplete {
            path: format!("{}/{}", self.name, self.version),
            reason: format!("{} is missing", shorten(file)),
        })
    }
}

/// Loads a version without a manifest; `file` is the graph. The bytes are those of the files that `expected`
/// describes, and the manifest is generated. Includes the files in which the graph keeps weights. Holds the
/// model in memory once.
///
/// # Errors
/// [`Error::Incomplete`] if a file has changed since; [`Error::NotFound`], [`Error::TooLarge`],
/// [`Error::Store`]; the errors of [`Bundle::new`] for the graph.
pub async fn load_plain(
    store: &dyn ObjectStore,
    root: &str,
    version: (&str, u64),
    file: &str,
    expected: &BTreeMap<String, FileStat>,
    limits: &Limits,
) -> Result<Bundle> {
    let (name, version) = version;
    let base = version_path(root, name, version)?;
    let graph = read_unchanged(store, &base, file, expected, limits.model_bytes_max).await?;
    let named = external::files(&mut decoded(&graph)?).map_err(|reason| Error::InvalidModel { reason })?;
    let mut left = limits.model_bytes_max.saturating_sub(graph.len() as u64);
    let mut weights = Vec::with_capacity(named.len());
    for beside in named {
        check_inside(store, &base, &beside).await?;
        let content = read_unchanged(store, &base, &beside, expected, left).await?;
        left = left.saturating_sub(content.len() as u64);
        weights.push((beside, content));
    }
    Bundle::with_weights(name, version, graph.into(), weights, Default::default(), BTreeMap::new())
}

/// Reads a file of a version, if it matches its description.
async fn read_unchanged(
    store: &dyn ObjectStore,
    base: &Path,
    file: &str,
    expected: &BTreeMap<String, FileStat>,
    bytes_max: u64,
) -> Result<Bytes> {
    let changed = |reason: String| Error::Incomplete { path: base.to_string(), reason };
    let expected = expected.get(file).ok_or_else(|| changed(format!("{} is missing", shorten(file))))?;
    let path = base.clone().join(file);
    let content = read_bounded(store, &path, bytes_max).await?;
    if content.len() as u64 != expected.bytes {
        let found = content.len();
        return Err(changed(format!("{file} has {found} bytes and had {} before", expected.bytes)));
    }
    // Checked again: this finds writes during the read.
    match store.head(&path).await {
        Ok(meta) if FileStat::of(&meta) == *expected => Ok(content),
        Ok(_) => Err(changed(format!("{file} changed while it was read"))),
        Err(source) => Err(Error::Store { path: path.to_string(), source }),
    }
}

/// Refuses a file that is a symbolic link leading out of the version's folder.
async fn check_inside(store: &dyn ObjectStore, base: &Path, file: &str) -> Result<()> {
    let path = base.clone().join(file);
    let failed = |source| Error::Store { path: path.to_string(), source };
    let found = store.get(&path).await.map_err(|error| match error {
        object_store::Error::NotFound { .. } => {
            Error::Incomplete { path: base.to_string(), reason: format!("{} is missing", shorten(file)) }
        }
        error => failed(error),
    })?;
    // Other stores have no links.
    let GetResultPayload::File(_, place) = found.payload else { return Ok(()) };
    let inside = || -> std::io::Result<bool> {
        let folder = place.parent().map(std::path::Path::canonicalize).transpose()?;
        Ok(folder.is_some_and(|folder| place.canonicalize().is_ok_and(|real| real.starts_with(folder))))
    };
    match inside() {
        Ok(true) => Ok(()),
        _ => Err(Error::InvalidModel {
            reason: format!(
                "{file:?}, in which the graph keeps weights, is a link out of the version's folder"
            ),
        }),
    }
}

/// The content of a file next to a model's versions, as read.
#[derive(Debug, Clone)]
pub struct FileBeside {
    /// The whole content.
    pub content: Bytes,
    tag: UpdateVersion,
}

/// Reads a file next to a model's versions.
///
/// # Errors
/// [`Error::InvalidName`], [`Error::NotFound`], [`Error::TooLarge`], [`Error::Store`].
pub async fn read_model_file(
    store: &dyn ObjectStore,
    root: &str,
    name: &str,
    file: &str,
    bytes_max: u64,
) -> Result<FileBeside> {
    let (content, tag) = read_tagged(store, &model_path(root, name)?.join(file), bytes_max).await?;
    Ok(FileBeside { content, tag })
}

/// Atomically replaces the file next to a model's versions that `before` was read from; without `before`,
/// creates it. Returns whether it was written: false if another writer has changed or removed it meanwhile.
/// Stores without conditional updates, such as local folders, overwrite the file; there the caller must
/// exclude other writers. As durable as the store's puts.
///
/// # Errors
/// [`Error::InvalidName`], [`Error::Store`].
pub async fn replace_model_file(
    store: &dyn ObjectStore,
    root: &str,
    name: &str,
    file: &str,
    before: Option<&FileBeside>,
    content: Bytes,
) -> Result<bool> {
    let path = model_path(root, name)?.join(file);
    let mode = before.map_or(PutMode::Create, |before| PutMode::Update(before.tag.clone()));
    let mut put = store.put_opts(&path, content.clone().into(), mode.into()).await;
    if matches!(put, Err(object_store::Error::NotImplemented { .. })) {
        put = store.put(&path, content.into()).await;
    }
    match put {
        Ok(_) => Ok(true),
        Err(object_store::Error::Precondition { .. } | object_store::Error::AlreadyExists { .. }) => {
            Ok(false)
        }
        Err(source) => Err(Error::Store { path: path.to_string(), source }),
    }
}

fn stats<'a>(files: impl Iterator<Item = &'a ObjectMeta>) -> BTreeMap<String, FileStat> {
    files.filter_map(|meta| Some((meta.location.filename()?.to_owned(), FileStat::of(meta)))).collect()
}
