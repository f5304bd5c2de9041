//! The interfaces of the two sides of a copy: [`Source`] and [`Target`].

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::time::SystemTime;

use bytes::Bytes;

use crate::error::Result;
use crate::node::Node;

/// Bytes per read and write.
pub(super) const CHUNK: usize = 4 << 20;

/// Entries of a folder in memory at a time.
pub(super) const PAGE: usize = 1_024;

/// The kind of an entry.
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
    /// Set for a file with several names, and equal for all of them.
    pub(super) identity: Option<(u64, u64)>,
    /// The node, for an entry of a volume.
    pub(super) node: Option<Node>,
    /// In a bucket, the tag of this version of the object, if the store has tags.
    pub(super) version: Option<String>,
}

impl Entry {
    /// Permission bits of a copy that belongs to this user and group. Set-user-ID and set-group-ID are
    /// dropped where the source has another user or group.
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

/// Extended attributes: names and values.
pub(super) type Attributes = Vec<(OsString, Vec<u8>)>;

/// The source of a copy. Paths are relative; the empty one is the root.
pub(super) trait Source: Sync {
    /// The entry of the root.
    fn root(&self) -> Result<Entry>;

    /// Passes the entries of a folder to `visit`, page by page, until it returns false.
    fn list(&self, path: &Path, folder: &Entry, visit: &mut dyn FnMut(Vec<Entry>) -> bool) -> Result<()>;

    /// The current entry at a path.
    fn look(&self, path: &Path) -> Result<Entry>;

    /// Opens a file.
    fn open<'s>(&'s self, path: &Path, file: &Entry) -> Result<Box<dyn ReadFile + 's>>;

    /// The target of a symbolic link.
    fn target(&self, path: &Path, link: &Entry) -> Result<OsString>;

    /// Extended attributes of a file or folder.
    fn attributes(&self, path: &Path, entry: &Entry) -> Result<Attributes>;
}

/// A file that is read from its beginning to its end.
pub(super) trait ReadFile {
    /// The next bytes and their offset; skipped ranges are holes. Fails with [`Error::Stale`] when the file
    /// was replaced since it was opened.
    ///
    /// [`Error::Stale`]: crate::Error::Stale
    fn next(&mut self) -> Result<Option<(u64, Bytes)>>;

    /// Its current size.
    fn size(&self) -> Result<u64>;
}

/// The target of a copy.
pub(super) trait Target: Sync {
    /// Whether it keeps the times that are set; buckets have the time of the upload.
    fn keeps_times(&self) -> bool;

    /// Whether it supports links.
    fn has_links(&self) -> bool;

    /// The entry at a path, if any.
    fn find(&self, path: &Path) -> Result<Option<Entry>>;

    /// Creates a folder unless it exists; true when it created one. If the source has modes, a new folder is
    /// private to its owner until it is finished.
    fn make_folder(&self, path: &Path, like: &Entry) -> Result<bool>;

    /// Sets mode, times and attributes of a folder, after its content was copied.
    fn finish_folder(&self, path: &Path, like: &Entry, attributes: &Attributes) -> Result<()>;

    /// Begins a file.
    fn create<'s>(&'s self, path: &Path, like: &Entry) -> Result<Box<dyn WriteFile + 's>>;

    /// Creates a symbolic link with the time of `like`; replaces an existing entry.
    fn make_symlink(&self, path: &Path, target: OsString, like: &Entry) -> Result<()>;

    /// Creates another name for a copied file; replaces an existing entry.
    fn make_link(&self, existing: &Path, path: &Path) -> Result<()>;

    /// Makes the copy durable where the target promises that.
    fn finish(&self) -> Result<()>;
}

/// A file that is not visible yet. Dropping it creates nothing under its final name.
pub(super) trait WriteFile {
    /// Writes bytes; offsets only grow.
    fn write(&mut self, offset: u64, bytes: Bytes) -> Result<()>;

    /// Makes the complete file visible.
    fn finish(self: Box<Self>, attributes: &Attributes) -> Result<()>;
}

/// An unguessable name for an incomplete entry.
pub(super) fn partial_name() -> OsString {
    format!("{PARTIAL}{:032x}", rand::random::<u128>()).into()
}

const PARTIAL: &str = ".millrace-copy-";

/// Whether a name is one of [`partial_name`].
pub(super) fn is_partial(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(PARTIAL.as_bytes())
}

/// Whether a name from metadata or a listing is a valid single component of a path.
pub(super) fn is_plain(name: &OsStr) -> bool {
    let bytes = name.as_encoded_bytes();
    !matches!(bytes, b"" | b"." | b"..") && !bytes.iter().any(|byte| matches!(byte, b'/' | 0))
}
