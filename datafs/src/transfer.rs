//! Copies trees between local folders, volumes and buckets: in parallel, and again where it stopped.
//!
//! A file appears under its final name only when it is complete: local files and files of volumes are
//! written under a name of their own and renamed, objects of buckets exist when their upload ends. A
//! file that is there already with the same size and time is not copied again, so a copy that was
//! interrupted is resumed by running it again.

mod bucket;
mod local;
#[cfg(test)]
mod tests;
mod tree;
mod volume;
mod walk;
mod xattr;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use object_store::ObjectStore;
use serde::Serialize;

use crate::datafs::Datafs;
use crate::error::{Error, Result};
use crate::view::View;

/// One end of a copy.
#[derive(Debug, Clone)]
pub enum Endpoint {
    /// A file or folder of this machine.
    Local(PathBuf),
    /// A file or folder of a volume or snapshot, by path.
    Volume(View, PathBuf),
    /// An object, or all objects whose names begin with a path and `/`.
    Bucket(Arc<dyn ObjectStore>, object_store::path::Path),
}

/// How to copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyOptions {
    /// Copy folders with everything in them; without it a folder is refused.
    pub recursive: bool,
    /// Files that are copied at the same time, 1 to 256.
    pub parallel: usize,
}

impl Default for CopyOptions {
    fn default() -> CopyOptions {
        CopyOptions { recursive: false, parallel: 8 }
    }
}

/// What a copy did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct CopyReport {
    /// Files copied.
    pub files: u64,
    /// Bytes of their data (holes not counted where both sides have them).
    pub bytes: u64,
    /// Files that were there already with the same size and time.
    pub unchanged: u64,
    /// Folders made.
    pub folders: u64,
    /// Symbolic and hard links made.
    pub links: u64,
    /// Pipes, sockets and devices, and what the other side cannot hold: links in buckets, for example.
    pub left_out: u64,
    /// What failed: the path below the source and the reason; at most a hundred.
    pub failed: Vec<(String, String)>,
    /// How many failed.
    pub failures: u64,
}

/// How far a copy has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CopyProgress {
    /// Files found so far.
    pub found: u64,
    /// Files done, copied or not.
    pub done: u64,
    /// Bytes copied.
    pub bytes: u64,
}

impl Datafs {
    /// Copies `from` to `to`, which becomes a copy of `from`: a folder is merged into one that is there,
    /// files are replaced when they differ, nothing is deleted. Modes, times, symbolic and hard links,
    /// extended attributes and holes are kept where both sides have them; the owner is who runs this. A single file
    /// whose target is a folder is put into it.
    /// What is copied into a volume is durable when this returns. `progress` is called from several
    /// threads, and stops the copy by returning false.
    ///
    /// # Errors
    /// [`Error::NotFound`] when there is no source, [`Error::IsADirectory`] without `recursive`,
    /// [`Error::Invalid`]. What failed for single files is in the report.
    pub fn copy(
        &self,
        from: &Endpoint,
        to: &Endpoint,
        options: &CopyOptions,
        progress: &(dyn Fn(CopyProgress) -> bool + Sync),
    ) -> Result<CopyReport> {
        if !(1..=256).contains(&options.parallel) {
            return Err(Error::Invalid("a copy works on 1 to 256 files at a time".into()));
        }
        let runtime = self.shared.pool.runtime();
        let source: Box<dyn tree::Source> = match from {
            Endpoint::Local(path) => Box::new(local::LocalTree::new(path)),
            Endpoint::Volume(view, path) => Box::new(volume::VolumeTree::new(view, path)),
            Endpoint::Bucket(store, prefix) => Box::new(bucket::BucketTree::new(store, prefix, runtime)),
        };
        let target = |to: &Endpoint| -> Box<dyn tree::Target> {
            match to {
                Endpoint::Local(path) => Box::new(local::LocalTree::new(path)),
                Endpoint::Volume(view, path) => Box::new(volume::VolumeTree::new(view, path)),
                Endpoint::Bucket(store, prefix) => Box::new(bucket::BucketTree::new(store, prefix, runtime)),
            }
        };
        let mut into = target(to);
        if source.root()?.kind == tree::Kind::File
            && into.find(Path::new(""))?.is_some_and(|there| there.kind == tree::Kind::Folder)
        {
            into = target(&to.join(from.file_name()));
        }
        walk::run(source.as_ref(), into.as_ref(), options, progress)
    }
}

impl Endpoint {
    /// The last part of its path.
    fn file_name(&self) -> OsString {
        match self {
            Endpoint::Local(path) | Endpoint::Volume(_, path) => path.file_name().unwrap_or_default().into(),
            Endpoint::Bucket(_, prefix) => prefix.filename().unwrap_or_default().into(),
        }
    }

    /// A name below it.
    fn join(&self, name: OsString) -> Endpoint {
        match self {
            Endpoint::Local(path) => Endpoint::Local(path.join(name)),
            Endpoint::Volume(view, path) => Endpoint::Volume(view.clone(), path.join(name)),
            Endpoint::Bucket(store, prefix) => {
                Endpoint::Bucket(Arc::clone(store), prefix.clone().join(name.to_string_lossy().as_ref()))
            }
        }
    }
}
