//! Folders of models as Triton has them: a configuration beside the versions, and versions that are a
//! graph without a manifest.

use std::collections::BTreeMap;
use std::time::SystemTime;

use object_store::ObjectMeta;
use object_store::path::Path;

use crate::error::{Error, Result};
use crate::manifest::shorten;

/// Triton's configuration of a model, beside its versions.
pub const CONFIG_FILE: &str = "config.pbtxt";
/// Which versions of a model answer whom, beside its versions.
pub const ROLLOUT_FILE: &str = "rollout.json";

/// Files of a version without a manifest that are looked at.
const FILES_MAX: usize = 256;

/// What a store says about a file, by which changes of it are told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileStat {
    /// Size in bytes.
    pub bytes: u64,
    /// When it was written last.
    pub modified: SystemTime,
    /// The store's mark of this content, where it has one.
    pub e_tag: Option<String>,
}

impl FileStat {
    pub(crate) fn of(meta: &ObjectMeta) -> FileStat {
        FileStat { bytes: meta.size, modified: meta.last_modified.into(), e_tag: meta.e_tag.clone() }
    }
}

/// A model's folder: the files beside the versions that mean something, by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelFolder {
    /// Model name.
    pub name: String,
    /// [`CONFIG_FILE`] and [`ROLLOUT_FILE`], where they are there.
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

/// A version without a manifest. Whether its graph is whole only loading it can tell.
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

    /// What the store says about a file of the version.
    ///
    /// # Errors
    /// [`Error::Incomplete`] when there is no such file.
    pub fn stat(&self, file: &str) -> Result<&FileStat> {
        self.files.get(file).ok_or_else(|| Error::Incomplete {
            path: format!("{}/{}", self.name, self.version),
            reason: format!("{} is missing", shorten(file)),
        })
    }
}

fn stats<'a>(files: impl Iterator<Item = &'a ObjectMeta>) -> BTreeMap<String, FileStat> {
    files.filter_map(|meta| Some((meta.location.filename()?.to_owned(), FileStat::of(meta)))).collect()
}
