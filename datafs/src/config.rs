//! The `[datafs]` table of `millrace.toml`.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Where a datafs keeps its state and how much memory and time it takes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The metadata file (SQLite, with `-wal` and `-shm` beside it), relative to the home folder.
    pub meta_file: PathBuf,
    /// The directory of the object store, relative to the home folder.
    pub store_dir: PathBuf,
    /// How long a write waits for other processes before it fails with `Busy`. At least 1.
    pub lock_wait_ms: u64,
    /// Unflushed bytes of one open file that are kept in memory before they become an object.
    pub write_buffer_bytes_max: usize,
    /// Unflushed bytes of all open files of the process together.
    pub write_buffers_bytes_max: usize,
    /// How long the object of a deleted or overwritten file is kept, for readers of other processes
    /// that looked it up just before.
    pub garbage_grace_ms: u64,
    /// How often the background collection of garbage runs; 0 turns it off.
    pub gc_interval_ms: u64,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            meta_file: PathBuf::from("datafs/meta.sqlite"),
            store_dir: PathBuf::from("datafs/objects"),
            lock_wait_ms: 60_000,
            write_buffer_bytes_max: 32 << 20,
            write_buffers_bytes_max: 256 << 20,
            garbage_grace_ms: 10_000,
            gc_interval_ms: 30_000,
        }
    }
}

impl Config {
    pub(crate) fn meta_path(&self, home: &Path) -> PathBuf {
        home.join(&self.meta_file)
    }

    pub(crate) fn store_path(&self, home: &Path) -> PathBuf {
        home.join(&self.store_dir)
    }

    /// Where the processes that use this metadata lock a file each.
    pub(crate) fn sessions_path(&self, home: &Path) -> PathBuf {
        let mut path = self.meta_path(home).into_os_string();
        path.push("-sessions");
        PathBuf::from(path)
    }
}
