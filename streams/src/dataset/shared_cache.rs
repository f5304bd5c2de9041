//! Cache of the descriptions of a snapshot at two levels: the home, and the metadata that machines share.
//!
//! The metadata keeps an entry beside the snapshot (`View::derived_put`), not in the application keys of the volume:
//! those are versioned, so every later snapshot would hold plans of earlier ones. An entry there has a name with the
//! version of this format. The rest of the name follows from the path and the options of the plan, which it depends on.
//! The metadata adds the number of the snapshot and a SHA-256, and removes entries with their snapshot. Entries that
//! are large after compression stay in the home.
//!
//! The second level is never an error: what cannot be read or written there is logged, and the plan is made without. Plans
//! of volumes with an encryption key stay in the home: they tell schemas and which rows a condition selects.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use millrace_datafs::{DERIVED_BYTES_MAX, View};
use parking_lot::Mutex;

use super::DatasetCache;
use super::cache::ENTRY_BYTES_MAX;
use super::folder::FolderCache;

/// Version of the entries: one that another program cannot read has another name.
const VERSION: u32 = 1;
/// Level of the compression: an entry of 10,000 Parquet files takes about 100 KB.
const ZSTD_LEVEL: i32 = 3;
/// Longest wait for the metadata to take an entry. Beyond it, storing goes on beside the reader.
const STORE_WAIT: Duration = Duration::from_secs(5);

/// How long this process stores nothing in metadata after that has taken longer than [`STORE_WAIT`].
const QUIET: Duration = Duration::from_secs(60);

static QUIET_UNTIL: Mutex<Option<Instant>> = Mutex::new(None);

/// The cache of one snapshot.
pub(crate) struct SharedCache {
    home: FolderCache,
    snapshot: View,
}

impl SharedCache {
    /// The entries of a snapshot, in the home and in the metadata.
    pub(crate) fn new(home: FolderCache, snapshot: View) -> Self {
        Self { home, snapshot }
    }

    /// The entry in the metadata.
    fn shared(&self, key: &str) -> Option<Vec<u8>> {
        let found = self.snapshot.derived_get(&name(key)).unwrap_or_else(|error| {
            tracing::debug!(snapshot = %self.snapshot.spec(), key, %error, "cannot read a shared plan");
            None
        })?;
        match zstd::bulk::decompress(&found, ENTRY_BYTES_MAX) {
            Ok(value) => Some(value),
            Err(error) => {
                tracing::debug!(snapshot = %self.snapshot.spec(), key, %error, "a shared plan is of another form");
                None
            }
        }
    }

    /// Stores an entry in the metadata, and waits for that for a bounded time.
    fn share(&self, key: &str, value: &[u8]) -> Result<(), String> {
        if QUIET_UNTIL.lock().is_some_and(|until| Instant::now() < until) {
            return Err("the metadata took too long for another entry".to_owned());
        }
        let content = zstd::bulk::compress(value, ZSTD_LEVEL).map_err(|error| error.to_string())?;
        if content.len() > DERIVED_BYTES_MAX {
            return Ok(());
        }
        let (snapshot, name) = (self.snapshot.clone(), name(key));
        let (done, outcome) = mpsc::channel();
        let store = move || {
            let stored = snapshot.derived_put(&name, &content);
            // The last handle of a home may be this one; it is closed before the reader goes on.
            drop(snapshot);
            // Fails when the reader has stopped waiting.
            done.send(stored.map(drop)).ok();
        };
        thread::Builder::new()
            .name("feed-plan-store".into())
            .spawn(store)
            .map_err(|error| format!("cannot start a thread: {error}"))?;
        match outcome.recv_timeout(STORE_WAIT) {
            Ok(stored) => stored.map_err(|error| error.to_string()),
            Err(_) => {
                *QUIET_UNTIL.lock() = Some(Instant::now() + QUIET);
                Err(format!("the metadata takes longer than {} s", STORE_WAIT.as_secs()))
            }
        }
    }
}

fn name(key: &str) -> String {
    format!("{key}/{VERSION}")
}

impl DatasetCache for SharedCache {
    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, String> {
        let own = self.home.get(key);
        if let Ok(Some(value)) = own {
            return Ok(Some(value));
        }
        let Some(value) = self.shared(key) else { return own };
        if let Err(error) = self.home.put(key, &value) {
            tracing::debug!(key, error, "cannot keep a shared plan in the home");
        }
        Ok(Some(value))
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), String> {
        if let Err(error) = self.share(key, value) {
            tracing::debug!(snapshot = %self.snapshot.spec(), key, error, "cannot share a plan");
        }
        self.home.put(key, value)
    }
}

#[cfg(test)]
mod tests;
