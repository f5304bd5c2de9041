//! Folder cache of dataset descriptions in the home, bounded in size: the oldest entries are removed first.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use millrace_leaf::{atomic_file, bounded_file, private};
use sha2::{Digest, Sha256};

use super::DatasetCache;
use super::cache::ENTRY_BYTES_MAX;

/// Maximum bytes of all entries together.
const BYTES_MAX: u64 = 64 << 20;
/// An entry is the SHA-256 of its value, and the value.
const DIGEST_BYTES: usize = 32;

/// Descriptions of the datasets of one snapshot.
pub(crate) struct FolderCache {
    dir: PathBuf,
    scope: String,
}

impl FolderCache {
    /// Entries of `scope` in `<home>/feed`.
    pub(crate) fn new(home: &Path, scope: String) -> Self {
        Self { dir: home.join("feed"), scope }
    }

    fn path(&self, key: &str) -> PathBuf {
        let name = Sha256::digest(format!("{}\n{key}", self.scope));
        self.dir.join(format!("{}.entry", hex::encode(&name[..16])))
    }

    /// Removes the oldest entries until the others fit. Another process may do the same.
    fn remove_oldest(&self) -> io::Result<()> {
        let mut entries = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            let Some(found) = unless_gone(entry.metadata())? else { continue };
            entries.push((found.modified().unwrap_or(SystemTime::UNIX_EPOCH), found.len(), entry.path()));
        }
        entries.sort();
        let mut bytes: u64 = entries.iter().map(|(_, bytes, _)| bytes).sum();
        for (_, size, path) in entries {
            if bytes <= BYTES_MAX {
                break;
            }
            unless_gone(fs::remove_file(path))?;
            bytes -= size;
        }
        Ok(())
    }
}

/// What was found; nothing where another process has removed the file.
fn unless_gone<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    match found {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        found => found.map(Some),
    }
}

impl DatasetCache for FolderCache {
    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, String> {
        let entry = unless_gone(bounded_file::read(&self.path(key), (ENTRY_BYTES_MAX + DIGEST_BYTES) as u64))
            .map_err(|error| format!("{}: {error}", self.dir.display()))?;
        // A damaged entry, or one of an earlier release, is made again.
        Ok(entry.and_then(|entry| {
            let (sha256, value) = entry.split_at_checked(DIGEST_BYTES)?;
            (Sha256::digest(value).as_slice() == sha256).then(|| value.to_vec())
        }))
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), String> {
        let path = self.path(key);
        static WRITES: AtomicU64 = AtomicU64::new(0);
        // Each writer uses a separate temporary name, so that a reader sees a whole entry or none.
        let write = WRITES.fetch_add(1, Ordering::Relaxed);
        let temporary = path.with_extension(format!("{}-{write}.new", std::process::id()));
        private::create_dir_all(&self.dir)
            .and_then(|()| {
                let entry = [Sha256::digest(value).as_slice(), value].concat();
                atomic_file::replace(&path, &temporary, &entry)
            })
            .and_then(|()| self.remove_oldest())
            .map_err(|error| {
                fs::remove_file(&temporary).ok();
                format!("{}: {error}", self.dir.display())
            })
    }
}
