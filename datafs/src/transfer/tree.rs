//! What the two sides of a copy can do.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::time::SystemTime;

use bytes::Bytes;

use crate::error::Result;
use crate::fs::Node;

/// Bytes that are read and written at a time.
pub(super) const CHUNK: usize = 4 << 20;

/// Entries of a folder that are in memory at a time.
pub(super) const PAGE: usize = 1_024;

/// What an entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    File,
    Folder,
    Symlink,
    /// A pipe, socket or device.
    Special,
}

/// A file, folder or link.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) name: OsString,
    pub(super) kind: Kind,
    pub(super) size: u64,
    pub(super) mtime: SystemTime,
    /// Permission bits; `None` in buckets.
    pub(super) mode: Option<u32>,
    /// User and group; `None` in buckets.
    pub(super) owner: Option<(u32, u32)>,
    /// Of a file with several names: what all of them have in common.
    pub(super) identity: Option<(u64, u64)>,
    /// In a volume.
    pub(super) node: Option<Node>,
    /// In a bucket, what tells this version of an object from others, if the store says so.
    pub(super) version: Option<String>,
}

impl Entry {
    /// Permission bits of a copy that belongs to this user and group. The bits that lend the rights of an owner
    /// (set-user-ID, set-group-ID) go where the owner is another.
    pub(super) fn mode_of_copy(&self, uid: u32, gid: u32) -> Option<u32> {
        let mut mode = self.mode?;
        if self.owner.is_none_or(|(user, _)| user != uid) {
            mode &= !0o4000;
        }
        if self.owner.is_none_or(|(_, group)| group != gid) {
            mode &= !0o2000;
        }
        Some(mode)
    }
}

/// Extended attributes.
pub(super) type Attributes = Vec<(OsString, Vec<u8>)>;

/// Where files come from. Paths are relative; the empty one is the root.
pub(super) trait Source: Sync {
    /// What the root is.
    fn root(&self) -> Result<Entry>;

    /// Shows what is in a folder, some at a time, until `visit` returns false.
    fn list(&self, path: &Path, folder: &Entry, visit: &mut dyn FnMut(Vec<Entry>) -> bool) -> Result<()>;

    /// What is at a path by now.
    fn look(&self, path: &Path) -> Result<Entry>;

    /// Opens a file.
    fn open<'s>(&'s self, path: &Path, file: &Entry) -> Result<Box<dyn ReadFile + 's>>;

    /// Where a symbolic link leads.
    fn target(&self, path: &Path, link: &Entry) -> Result<OsString>;

    /// Extended attributes of a file or folder.
    fn attributes(&self, path: &Path, entry: &Entry) -> Result<Attributes>;
}

/// A file that is read from its beginning to its end.
pub(super) trait ReadFile {
    /// The next bytes and where they belong; what is skipped is a hole. Fails with [`Error::Stale`] when the
    /// file is no longer the one that was opened.
    ///
    /// [`Error::Stale`]: crate::Error::Stale
    fn next(&mut self) -> Result<Option<(u64, Bytes)>>;

    /// Its size by now.
    fn size(&self) -> Result<u64>;
}

/// Where files go.
pub(super) trait Target: Sync {
    /// Whether times are what they are set to; in buckets they are those of the upload.
    fn keeps_times(&self) -> bool;

    /// Whether it holds links.
    fn has_links(&self) -> bool;

    /// What is there.
    fn find(&self, path: &Path) -> Result<Option<Entry>>;

    /// Makes a folder unless it is there; true when it made one. Until it is finished, a new folder with modes
    /// is its owner's alone.
    fn make_folder(&self, path: &Path, like: &Entry) -> Result<bool>;

    /// Gives a folder its mode, times and attributes, after its content.
    fn finish_folder(&self, path: &Path, like: &Entry, attributes: &Attributes) -> Result<()>;

    /// Begins a file.
    fn create<'s>(&'s self, path: &Path, like: &Entry) -> Result<Box<dyn WriteFile + 's>>;

    /// Makes a symbolic link with the time of another in place of what is there.
    fn make_symlink(&self, path: &Path, target: OsString, like: &Entry) -> Result<()>;

    /// Makes another name of a file that was copied before, in place of what is there.
    fn make_link(&self, existing: &Path, path: &Path) -> Result<()>;

    /// Makes everything durable that has to be.
    fn finish(&self) -> Result<()>;
}

/// A file that is not visible yet. Dropping it leaves nothing under its final name.
pub(super) trait WriteFile {
    /// Writes bytes; offsets only grow.
    fn write(&mut self, offset: u64, bytes: Bytes) -> Result<()>;

    /// Makes the file visible, complete.
    fn finish(self: Box<Self>, attributes: &Attributes) -> Result<()>;
}

/// A name for what is not complete yet, which nobody can guess.
pub(super) fn partial_name() -> OsString {
    format!("{PARTIAL}{:032x}", rand::random::<u128>()).into()
}

const PARTIAL: &str = ".millrace-copy-";

/// Whether a name is one of [`partial_name`].
pub(super) fn is_partial(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(PARTIAL.as_bytes())
}

/// Whether a name that metadata or a listing gave is the name of one thing in a folder.
pub(super) fn is_plain(name: &OsStr) -> bool {
    let bytes = name.as_encoded_bytes();
    !matches!(bytes, b"" | b"." | b"..") && !bytes.iter().any(|byte| matches!(byte, b'/' | 0))
}
