//! The `[datafs]` table of `millrace.toml`.

mod secret;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub use secret::{FromEnvironment, FromFile, Secret};
use serde::{Deserialize, Serialize};

use crate::meta_url::MetaUrl;

/// Longest `lock_wait_ms`: a day. Waiting for longer is waiting for ever, for a program.
pub(crate) const LOCK_WAIT_MS_MAX: u64 = 86_400_000;

/// Where a datafs keeps its state and how much memory and time it takes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The metadata file (SQLite, with `-wal` and `-shm` beside it), relative to the home folder.
    pub meta_file: PathBuf,
    /// A PostgreSQL server (15 or newer) for the metadata instead of the file, so that several machines
    /// share the volumes: `postgres://user@host:port/database`. The password may also come from
    /// `PGPASSWORD` or a password file. `?sslmode=verify-full&sslrootcert=FILE` has it reached through
    /// TLS, with the modes of libpq.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub meta_url: Option<MetaUrl>,
    /// The schema in that database, made when missing; a name of its own for each set of volumes.
    pub meta_schema: String,
    /// A password file (libpq's format, mode 0600), relative to the home folder; without it
    /// `PGPASSFILE`, else `~/.pgpass`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub meta_passfile: Option<PathBuf>,
    /// Connections to the server at most, beside one for notifications. At least 2.
    pub meta_connections_max: usize,
    /// Metadata of the server that this process remembers, in bytes.
    pub meta_cache_bytes_max: usize,
    /// A process that has not been heard of by the metadata server for so long is taken for dead, and
    /// what it had not published is removed. At least 1000. Without a server, locks tell at once.
    pub session_lease_ms: u64,
    /// The directory of the object store, relative to the home folder. Not used with a `store_url`.
    pub store_dir: PathBuf,
    /// Where file data is kept instead: `file:///PATH`, `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` or
    /// `az://CONTAINER/PREFIX`. Stores in the cloud also take the environment variables of their kind
    /// (`AWS_ACCESS_KEY_ID`, …); `store_options` go before those.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store_url: Option<String>,
    /// How long a request to a store in the cloud is tried, with growing pauses, before it fails. At
    /// least 1.
    pub store_timeout_ms: u64,
    /// Where data of a store in the cloud is kept on this machine, for all of its processes; relative to
    /// the home folder.
    pub cache_dir: PathBuf,
    /// Bytes that the cache holds at most; 0 turns it off.
    pub cache_bytes_max: u64,
    /// Bytes of the cache's disk that it leaves free.
    pub cache_free_bytes_min: u64,
    /// Bytes of objects in the cloud that are in memory for readers: what was fetched ahead, mostly.
    pub read_buffers_bytes_max: u64,
    /// How long the commit of a small file to a store in the cloud that nobody waits for may be put off,
    /// so that more of them share one request; other changes wait with it.
    pub pack_linger_ms: u64,
    /// Bytes of small files that are in memory and not in a store in the cloud yet, at most. They are
    /// kept, and tried again, while the store is away.
    pub pack_buffers_bytes_max: usize,
    /// How long a write waits for other processes before it fails with `Busy`. 1 to 86400000, a day.
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
    /// Options of the store, by the names of the `object_store` crate: `endpoint`, `region`,
    /// `allow_http`, `access_key_id`, `secret_access_key`, …
    pub store_options: BTreeMap<String, Secret>,
    /// The keys of encrypted volumes by name: 32 bytes, as they are, in hex or in base64, in a file or in
    /// a variable of the environment.
    pub encryption_keys: BTreeMap<String, Secret>,
}

/// A URL without its password.
pub(crate) fn redacted(url: String) -> String {
    if url.contains('@') { MetaUrl::from(url).to_string() } else { url }
}

impl Default for Config {
    fn default() -> Config {
        Config {
            meta_file: PathBuf::from("datafs/meta.sqlite"),
            meta_url: None,
            meta_schema: "millrace".into(),
            meta_passfile: None,
            meta_connections_max: 8,
            meta_cache_bytes_max: 64 << 20,
            session_lease_ms: 60_000,
            store_dir: PathBuf::from("datafs/objects"),
            store_url: None,
            store_timeout_ms: 30_000,
            cache_dir: PathBuf::from("datafs/cache"),
            cache_bytes_max: 16 << 30,
            cache_free_bytes_min: 1 << 30,
            read_buffers_bytes_max: 128 << 20,
            pack_linger_ms: 50,
            pack_buffers_bytes_max: 64 << 20,
            lock_wait_ms: 60_000,
            write_buffer_bytes_max: 32 << 20,
            write_buffers_bytes_max: 256 << 20,
            garbage_grace_ms: 10_000,
            gc_interval_ms: 30_000,
            store_options: BTreeMap::new(),
            encryption_keys: BTreeMap::new(),
        }
    }
}

impl Config {
    pub(crate) fn meta_path(&self, home: &Path) -> PathBuf {
        home.join(&self.meta_file)
    }

    /// The same without the values of secrets that stand in it: what may be shown.
    #[must_use]
    pub fn without_secrets(&self) -> Config {
        let hide = |(name, value): (&String, &Secret)| (name.clone(), value.hidden());
        Config {
            meta_url: self.meta_url.as_ref().map(MetaUrl::redacted),
            store_url: self.store_url.clone().map(redacted),
            store_options: self.store_options.iter().map(hide).collect(),
            encryption_keys: self.encryption_keys.iter().map(hide).collect(),
            ..self.clone()
        }
    }

    pub(crate) fn store_path(&self, home: &Path) -> PathBuf {
        home.join(&self.store_dir)
    }

    pub(crate) fn cache_path(&self, home: &Path) -> PathBuf {
        home.join(&self.cache_dir)
    }

    /// Where the processes that use this metadata lock a file each.
    pub(crate) fn sessions_path(&self, home: &Path) -> PathBuf {
        let mut path = self.meta_path(home).into_os_string();
        path.push("-sessions");
        PathBuf::from(path)
    }
}
