//! Configuration of datafs: the `[datafs]` table of `millrace.toml`.

mod public;
mod secret;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

pub use public::{PUBLIC_STORE_OPTIONS, is_public_store_option};
pub use secret::{FromEnvironment, FromFile, Secret};
use serde::{Deserialize, Serialize};

use crate::meta_url::MetaUrl;

/// Longest `lock_wait_ms`: a day.
pub(crate) const LOCK_WAIT_MS_MAX: u64 = 86_400_000;

/// Location and limits of a datafs: its state, memory and time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The metadata file (SQLite, with `-wal` and `-shm` beside it), relative to the home folder.
    pub meta_file: PathBuf,
    /// A PostgreSQL server (15 or newer) for the metadata instead of the file, so that several machines share
    /// the volumes: `postgres://user@host:port/database`. The password may also come from `PGPASSWORD` or a
    /// password file. `?sslmode=verify-full&sslrootcert=FILE` enables TLS, with libpq's modes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub meta_url: Option<MetaUrl>,
    /// The schema in that database, created when missing; use a separate one for each set of volumes.
    pub meta_schema: String,
    /// A password file (libpq's format, mode 0600), relative to the home folder; without it
    /// `PGPASSFILE`, else `~/.pgpass`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub meta_passfile: Option<PathBuf>,
    /// Most connections to the server, plus one for notifications. At least 2.
    pub meta_connections_max: usize,
    /// Bytes of the server's metadata that this process caches.
    pub meta_cache_bytes_max: usize,
    /// Lease of a process on the metadata server. Once it expires, other processes treat this one as dead and
    /// remove what it has not published. 1000 to 86400000, a day. Without a server, file locks show a
    /// process's end at once.
    pub session_lease_ms: u64,
    /// The directory of the object store, relative to the home folder. Not used with a `store_url`.
    pub store_dir: PathBuf,
    /// Where file data is kept instead of `store_dir`: `file:///PATH`, `s3://BUCKET/PREFIX`,
    /// `gs://BUCKET/PREFIX` or `az://CONTAINER/PREFIX`. Remote stores also read the environment variables of
    /// their kind (`AWS_ACCESS_KEY_ID`, …); `store_options` override those.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store_url: Option<String>,
    /// Whether a remote store also takes options and credentials of the process: the environment variables of its
    /// kind, and the machine's identity from the provider's metadata service. With `false`, `store_options` contain
    /// all credentials.
    pub store_environment: bool,
    /// How long a request to a remote store is retried, with growing pauses, before it fails. At least 1.
    pub store_timeout_ms: u64,
    /// The cache of a remote store, shared by all processes of this machine; relative to the home folder.
    pub cache_dir: PathBuf,
    /// Most bytes in the cache; 0 turns it off.
    pub cache_bytes_max: u64,
    /// Whether `cache_bytes_max` bounds this cache together with those beside it: the folders in the parent of
    /// `cache_dir` whose names are 32 hex digits, as its own must be. The CSI driver sets it for the caches of tenants.
    pub cache_shared_bound: bool,
    /// Bytes of its disk that the cache leaves free.
    pub cache_free_bytes_min: u64,
    /// Most bytes of remote objects in memory for readers, mainly prefetched data.
    pub read_buffers_bytes_max: u64,
    /// How long the commit of a small file to a remote store may be delayed while no caller waits for it, so
    /// that more files share one request. Other changes are delayed with it.
    pub pack_linger_ms: u64,
    /// Most bytes of small files in memory that the remote store does not have yet. They are kept and retried
    /// while the store is unavailable.
    pub pack_buffers_bytes_max: usize,
    /// How long a write waits for the metadata locks of other processes before it fails with `Busy`. 1 to
    /// 86400000, a day.
    pub lock_wait_ms: u64,
    /// Most unflushed bytes of one open file in memory; beyond that they are written to an object.
    pub write_buffer_bytes_max: usize,
    /// Most unflushed bytes of all open files of the process.
    pub write_buffers_bytes_max: usize,
    /// How long the object of a deleted or overwritten file is kept for readers in other processes that
    /// looked it up just before.
    pub garbage_grace_ms: u64,
    /// Interval of the background garbage collection; 0 turns it off.
    pub gc_interval_ms: u64,
    /// Options of the store, by the names of the `object_store` crate: `endpoint`, `region`,
    /// `allow_http`, `access_key_id`, `secret_access_key`, …
    pub store_options: BTreeMap<String, Secret>,
    /// The keys of encrypted volumes by name: 32 bytes, raw, in hex or in base64, from a file or an
    /// environment variable.
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
            store_environment: true,
            store_timeout_ms: 30_000,
            cache_dir: PathBuf::from("datafs/cache"),
            cache_bytes_max: 16 << 30,
            cache_shared_bound: false,
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

    /// A copy that may be shown: the values of secrets are replaced.
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

    /// Whether a cache in a folder of this name may share its bound (`cache_shared_bound`): 32 lower-case hex digits, so
    /// that no store or home beside it counts as a cache.
    #[must_use]
    pub fn is_shared_cache_name(name: &OsStr) -> bool {
        let name = name.as_encoded_bytes();
        name.len() == 32 && name.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    }

    /// The folder in which each process that uses this metadata locks a file.
    pub(crate) fn sessions_path(&self, home: &Path) -> PathBuf {
        let mut path = self.meta_path(home).into_os_string();
        path.push("-sessions");
        PathBuf::from(path)
    }
}
