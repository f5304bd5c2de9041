//! A view of a volume: the live tree or a snapshot, by path, with its application keys.
//!
//! The inode level, which the mount uses, is in `fs/`.

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::fs::path::{components, name_it, split_last};
use crate::fs::types::OpenFlags;
use crate::fs::{OpenFile, View};
use crate::meta::engine::{Durability, Order};
use crate::meta::keys;
use crate::meta::versioned::Records as _;
use crate::node::Attr;
use crate::publish::{Publish, check_key};

/// Largest file that [`View::read_file`] reads.
pub const READ_FILE_BYTES_MAX: u64 = 1 << 30;
/// Entries that [`View::list`] reads in one transaction.
const LIST_PAGE: usize = 1_024;
/// Attempts to open a path whose file is replaced again and again before it can be read.
const OPEN_ATTEMPTS: u32 = 100;
/// Keys that [`View::key_scan`] reads per page.
const KEY_PAGE: usize = 1_024;

/// Attributes of a file, as [`View::stat`] returns them.
pub type Stat = Attr;

/// An entry of a directory, as [`View::list`] returns it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirEntry {
    /// Its name, without the path.
    pub name: String,
    /// Its attributes; those of a symbolic link itself.
    pub stat: Stat,
}

impl View {
    /// Attributes of the entry that a path leads to; symbolic links are followed.
    pub fn stat(&self, path: &str) -> Result<Stat> {
        self.resolve(path)
    }

    /// The entries of a directory, sorted by name, without `.` and `..`. All are in memory, about 250 bytes
    /// each. For a large directory, [`View::readdir_attrs`] returns pages, in another order.
    pub fn list(&self, path: &str) -> Result<Vec<DirEntry>> {
        let directory = self.resolve(path)?;
        let mut entries = Vec::new();
        let mut cursor = 0;
        loop {
            let page = self.readdir_attrs(directory.node, cursor, LIST_PAGE)?;
            let Some((last, _)) = page.last() else { break };
            cursor = last.cursor;
            for (entry, stat) in page {
                match entry.name.into_string() {
                    Ok(name) if name != "." && name != ".." => entries.push(DirEntry { name, stat }),
                    _ => {}
                }
            }
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    /// Reads a whole file, at most [`READ_FILE_BYTES_MAX`].
    pub fn read_file(&self, path: &str) -> Result<Bytes> {
        self.read_file_up_to(path, READ_FILE_BYTES_MAX)
    }

    /// Reads a whole file of at most `bytes_max` bytes into memory.
    ///
    /// # Errors
    /// [`Error::TooLarge`] for a larger one, of which nothing is read.
    pub fn read_file_up_to(&self, path: &str, bytes_max: u64) -> Result<Bytes> {
        self.with_file(path, |file| {
            let size = file.attr()?.size;
            if size > bytes_max {
                return Err(Error::TooLarge { what: "file read at once", max: bytes_max });
            }
            file.read_at(0, size as usize)
        })
    }

    /// Opens the file that a path leads to and runs `work` with it. Retries when the file was replaced
    /// between the two, so that an atomic replacement is never seen as a missing file.
    pub(crate) fn with_file<T>(&self, path: &str, mut work: impl FnMut(OpenFile) -> Result<T>) -> Result<T> {
        for _ in 0..OPEN_ATTEMPTS {
            let node = self.resolve(path)?.node;
            match self.open(node, OpenFlags::READ).and_then(&mut work) {
                Err(Error::NotFound { .. }) => {}
                other => return other.map_err(|e| name_it(e, path)),
            }
        }
        Err(Error::Stale { what: format!("each version of {path} that was looked up") })
    }

    /// Writes a whole file atomically: a reader of the path sees the old or the new file. Missing parent
    /// directories are created. Durable when it returns.
    pub fn write_file(&self, path: &str, bytes: &[u8]) -> Result<()> {
        let mut staged = self.stage()?;
        staged.append(bytes)?;
        self.publish(Publish::new().file(path, staged.finish()?))
    }

    /// Creates a directory and its missing parents.
    pub fn create_dir_all(&self, path: &str) -> Result<()> {
        let parts = components(path)?;
        let spare = self.spare_inos(parts.len() as u64)?;
        self.write(Durability::Relaxed, |writer| {
            let mut spare = spare.clone();
            crate::publish::make_directories(writer, &parts, &mut spare).map(drop)
        })
    }

    /// Removes a file or symbolic link (the link itself).
    pub fn remove_file(&self, path: &str) -> Result<()> {
        let (parent, name) = split_last(path)?;
        let parent = self.resolve(parent)?;
        self.unlink(parent.node, name.as_ref()).map_err(|e| name_it(e, path))
    }

    /// Removes an empty directory.
    pub fn remove_dir(&self, path: &str) -> Result<()> {
        let (parent, name) = split_last(path)?;
        let parent = self.resolve(parent)?;
        self.rmdir(parent.node, name.as_ref()).map_err(|e| name_it(e, path))
    }

    /// Moves a file or directory atomically, replacing a file or an empty directory at the target.
    /// The target's parent must exist.
    pub fn rename_path(&self, from: &str, to: &str) -> Result<()> {
        let (from_parent, from_name) = split_last(from)?;
        let (to_parent, to_name) = split_last(to)?;
        let from_parent = self.resolve(from_parent)?.node;
        let to_parent = self.resolve(to_parent)?.node;
        self.rename(from_parent, from_name.as_ref(), to_parent, to_name.as_ref(), false)
            .map_err(|e| name_it(e, from))
    }

    /// Makes all earlier changes durable.
    pub fn sync(&self) -> Result<()> {
        self.shared.meta.sync()
    }

    /// The value of an application key; in a snapshot as of the snapshot.
    pub fn key_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        check_key(key)?;
        self.read(self.root(), |reader| reader.get(&keys::application(key)))
    }

    /// All application keys with a prefix and their values, in order, read in one transaction.
    pub fn key_scan(&self, prefix: &str) -> Result<Vec<(String, Vec<u8>)>> {
        let start = keys::applications(prefix);
        let end = keys::after_prefix(&start);
        self.read(self.root(), |reader| {
            let mut found = Vec::new();
            let mut start = start.clone();
            loop {
                let page = reader.scan(&start, &end, Order::Ascending, KEY_PAGE)?;
                let more = page.len() == KEY_PAGE;
                for (record, value) in page {
                    let key = keys::application_name(&record)
                        .ok_or_else(|| Error::corrupt("application key", "it is not UTF-8"))?;
                    found.push((key.to_owned(), value));
                    start = record;
                }
                if !more {
                    return Ok(found);
                }
                start.push(0);
            }
        })
    }
}
