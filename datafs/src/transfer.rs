//! Copying of trees between local folders, volumes and buckets: in parallel and resumable.
//!
//! A file appears under its final name only when it is complete. A local file is written under a temporary
//! name and renamed. A file of a volume is written without a name and then linked. An object of a bucket
//! exists when its upload ends. A file with the same size and time at the target is not copied again, so
//! running an interrupted copy again resumes it.

mod bucket;
mod local;
#[cfg(test)]
mod tests;
mod tree;
mod volume;
mod walk;
mod xattr;

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use object_store::ObjectStore;
use serde::Serialize;

use crate::datafs::Datafs;
use crate::error::{Error, Result};
use crate::fs::View;

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

/// Options of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyOptions {
    /// Copy folders with all their content; otherwise a folder is refused.
    pub recursive: bool,
    /// Files that are copied concurrently, 1 to 256.
    pub parallel: usize,
}

impl Default for CopyOptions {
    fn default() -> CopyOptions {
        CopyOptions { recursive: false, parallel: 8 }
    }
}

/// The result of a copy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct CopyReport {
    /// Files copied.
    pub files: u64,
    /// Bytes of their data, without the holes that the source reports.
    pub bytes: u64,
    /// Files that the target already had with the same size and time.
    pub unchanged: u64,
    /// Folders created.
    pub folders: u64,
    /// Symbolic and hard links created, or already right.
    pub links: u64,
    /// Entries left out: pipes, sockets, devices, and what the target cannot hold, such as links in buckets.
    pub left_out: u64,
    /// Failures: the path below the source and the reason; at most 100.
    pub failed: Vec<(String, String)>,
    /// Number of all failures.
    pub failures: u64,
}

/// Progress of a copy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CopyProgress {
    /// Files found so far.
    pub found: u64,
    /// Files finished, copied or not.
    pub done: u64,
    /// Bytes copied.
    pub bytes: u64,
}

impl Datafs {
    /// Copies `from` to `to`. A folder is merged into an existing one, files are replaced when they differ,
    /// nothing is deleted. Modes, times, symbolic and hard links, extended attributes and holes are kept
    /// where both sides have them; the owner is the user that runs this. A single file whose target is a
    /// folder is copied into the folder. A copy into a volume is durable when this returns. Several threads
    /// call `progress`; returning false stops the copy.
    ///
    /// # Errors
    /// [`Error::NotFound`] when the source does not exist, [`Error::IsADirectory`] for a folder without
    /// `recursive`, [`Error::Invalid`] when the copy was stopped, an option is wrong, or a folder would be copied into
    /// itself. Failures of single files are in the report.
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
        from.check()?;
        to.check()?;
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
        let kind = source.root()?.kind;
        if kind == tree::Kind::Folder && to.is_inside(from) {
            return Err(Error::Invalid(
                "cannot copy a folder into itself: the target is inside the source, and the copy would have no end; name a \
                 target outside of it, or copy from a snapshot"
                    .into(),
            ));
        }
        if kind == tree::Kind::File
            && into.find(Path::new(""))?.is_some_and(|there| there.kind == tree::Kind::Folder)
        {
            into = target(&to.join(from.file_name()));
        }
        walk::run(source.as_ref(), into.as_ref(), options, progress)
    }
}

impl Endpoint {
    /// The last component of its path.
    fn file_name(&self) -> OsString {
        match self {
            Endpoint::Local(path) | Endpoint::Volume(_, path) => path.file_name().unwrap_or_default().into(),
            Endpoint::Bucket(_, prefix) => prefix.filename().unwrap_or_default().into(),
        }
    }

    /// Refuses `..` in a volume: with links, only a walk could tell where it leads.
    fn check(&self) -> Result<()> {
        match self {
            Endpoint::Volume(_, path) if path.components().any(|part| part == Component::ParentDir) => {
                let name = path.to_string_lossy().into_owned();
                Err(Error::InvalidName { name, reason: "paths have no '..'" })
            }
            _ => Ok(()),
        }
    }

    /// Whether it is below the folder of another one. A volume and its mount are not compared.
    fn is_inside(&self, other: &Endpoint) -> bool {
        match (self, other) {
            (Endpoint::Local(own), Endpoint::Local(other)) => {
                // A folder has several paths where it is mounted again.
                let identity = |path: &Path| fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
                let source = identity(other);
                let (own, other) = (without_links(own), without_links(other));
                let mut above = own.ancestors().skip(1);
                own != other
                    && (own.starts_with(other)
                        || above.any(|path| source.is_some() && identity(path) == source))
            }
            (Endpoint::Volume(view, own), Endpoint::Volume(other_view, other)) => {
                let (own, other) = (without_dots(own), without_dots(other));
                view.spec() == other_view.spec() && own != other && own.starts_with(other)
            }
            (Endpoint::Bucket(store, own), Endpoint::Bucket(other_store, other)) => {
                store.to_string() == other_store.to_string() && own != other && own.prefix_matches(other)
            }
            _ => false,
        }
    }

    /// The endpoint of a name below it.
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

/// A local path with the links in its longest part that exists resolved.
fn without_links(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    for existing in path.ancestors() {
        if let (Ok(real), Ok(rest)) = (fs::canonicalize(existing), path.strip_prefix(existing)) {
            return Path::new("/").join(without_dots(&real.join(rest)));
        }
    }
    Path::new("/").join(without_dots(&path))
}

/// A path with `.` and `..` resolved by their names alone, and without a root.
fn without_dots(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => plain.push(name),
            Component::ParentDir => {
                plain.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    plain
}
