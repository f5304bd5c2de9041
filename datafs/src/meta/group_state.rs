//! State that the threads of group commit share under its lock: the batches, and the moment that readers see.
//!
//! [`super::group`] explains how they go together.

use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace_leaf::error_chain;
use parking_lot::RwLock;

use super::change_log::{Cursor, Read};
use super::group::{ANSWERED_MAX, Shared};
use super::key_hash::key_hash;
use super::layer::Layer;
use super::prerequisites::Prerequisites;
use super::sqlite::Snapshot;
use crate::error::{Error, Result};

#[derive(Debug)]
pub(super) struct State {
    /// Number of the newest acknowledged transaction.
    pub(super) version: u64,
    /// Number of the newest committed batch that views are based on.
    pub(super) base: u64,
    /// Epoch of the cache, see `record_cache.rs`.
    pub(super) epoch: u64,
    /// Position in the change log up to which the cache is current.
    pub(super) cursor: Cursor,
    pub(super) current: Batch,
    pub(super) frozen: Option<Frozen>,
    /// Batches of this process up to this one are committed.
    pub(super) committed: u64,
    /// One entry per active reader: the newest transaction that it sees.
    pub(super) readers: Vec<u64>,
    /// Snapshots for reuse that no reader uses at the moment.
    pub(super) idle: Vec<Snapshot>,
    /// When this process took the writer lock, while it holds it.
    pub(super) turn_since: Option<Instant>,
    /// The writer lock is about to be released: no new transactions.
    pub(super) yielding: bool,
    /// Another process wants the pending batch committed.
    pub(super) flush: bool,
    /// The committing thread sleeps until it is woken.
    pub(super) asleep: bool,
    pub(super) stopping: bool,
    /// Result of the synchronous transaction.
    pub(super) synchronous: Option<Result<()>>,
    /// The full place, and whether a quota is full, while a commit is retried.
    pub(super) full: Option<(String, bool)>,
    /// The unreachable cloud store that a commit waits for.
    pub(super) away: Option<StoreAway>,
    /// Cause of the final failure: every call fails from then on.
    pub(super) failed: Option<Arc<str>>,
}

/// The batch that is being filled.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) layer: Arc<RwLock<Layer>>,
    pub(super) prerequisites: Prerequisites,
    /// When its first transaction was acknowledged.
    pub(super) opened: Option<Instant>,
    /// A caller waits for its commit.
    pub(super) awaited: bool,
    pub(super) full: bool,
    /// It is synchronous: its only transaction is acknowledged after the commit.
    pub(super) synchronous: bool,
    /// Its commit may take the reserved space.
    pub(super) makes_room: bool,
    /// Delay of the commit that its prerequisites allow.
    pub(super) linger: Duration,
}

/// Outage of a cloud store, reported to every caller that would have to wait for it.
#[derive(Debug, Clone)]
pub(super) struct StoreAway {
    place: String,
    operation: &'static str,
    since: Instant,
    cause: String,
}

impl StoreAway {
    /// From the error of a commit that was first tried at `since`.
    pub(super) fn new(error: &Error, since: Instant) -> StoreAway {
        let (place, operation) = match error {
            Error::StoreAway { place, operation, .. } => (place.clone(), *operation),
            _ => ("[datafs] store_url".to_owned(), "write"),
        };
        StoreAway { place, operation, since, cause: error_chain::one_line(error) }
    }

    pub(super) fn since(&self) -> Instant {
        self.since
    }

    pub(super) fn error(&self) -> Error {
        Error::StoreAway {
            place: self.place.clone(),
            operation: self.operation,
            tried_ms: u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX),
            source: self.cause.clone().into(),
        }
    }
}

/// The batch that is being committed.
#[derive(Debug, Clone)]
pub(super) struct Frozen {
    pub(super) number: u64,
    pub(super) layer: Arc<RwLock<Layer>>,
    pub(super) prerequisites: Arc<Prerequisites>,
    pub(super) synchronous: bool,
    pub(super) makes_room: bool,
}

impl Batch {
    /// How long it may fill after it was opened.
    pub(super) fn fills_for(&self) -> Duration {
        self.linger.max(ANSWERED_MAX)
    }
}

impl State {
    /// The number of the batch that is being filled.
    pub(super) fn next_batch(&self) -> u64 {
        self.frozen.as_ref().map_or(self.base, |frozen| frozen.number) + 1
    }

    pub(super) fn check_space(&self) -> Result<()> {
        match self.full.clone() {
            None => Ok(()),
            Some((place, quota)) => Err(Error::NoSpace { place, quota }),
        }
    }

    /// Fails while the commit of acknowledged data waits for space.
    pub(super) fn check_space_to_commit(&self) -> Result<()> {
        match self.full.clone() {
            None => Ok(()),
            Some((place, quota)) => Err(Error::NoSpaceToCommit { place, quota }),
        }
    }

    pub(super) fn check(&self, shared: &Shared) -> Result<()> {
        match &self.failed {
            None => Ok(()),
            Some(cause) => {
                Err(Error::Failed { place: shared.engine.place(), cause: cause.as_ref().to_owned() })
            }
        }
    }

    /// Fails while a commit waits for an unreachable store.
    pub(super) fn check_store(&self) -> Result<()> {
        self.away.as_ref().map_or(Ok(()), |away| Err(away.error()))
    }

    /// Freezes the current batch for its commit.
    pub(super) fn freeze(&mut self, shared: &Shared) -> Frozen {
        let batch = std::mem::take(&mut self.current);
        let frozen = Frozen {
            number: self.next_batch(),
            layer: batch.layer,
            prerequisites: Arc::new(batch.prerequisites),
            synchronous: batch.synchronous,
            // Acknowledged data is not given up for want of the reserve.
            makes_room: batch.makes_room || !batch.synchronous,
        };
        self.frozen = Some(frozen.clone());
        self.flush = false;
        // Readers of an earlier moment must not see the records that are about to enter the cache.
        self.begin_epoch(shared);
        frozen
    }

    /// Takes back a batch that was neither acknowledged nor committed.
    pub(super) fn take_back(&mut self, shared: &Shared, error: Error) {
        self.frozen = None;
        shared.turn.start(self.base);
        shared.turn.finish(self.base);
        self.synchronous = Some(Err(error));
    }

    /// Removes the committed batch, whose records are in the cache. Returns outdated snapshots to drop.
    pub(super) fn thaw(&mut self, shared: &Shared) -> Vec<Snapshot> {
        if let Some(frozen) = self.frozen.take() {
            self.base = frozen.number;
        }
        // No other process has written anything: this process has the writer lock.
        self.cursor = shared.turn.log().end(shared.turn.words());
        self.take_outdated()
    }

    pub(super) fn begin_epoch(&mut self, shared: &Shared) {
        self.epoch += 1;
        shared.cache.lock().begin_epoch(self.epoch);
    }

    pub(super) fn take_outdated(&mut self) -> Vec<Snapshot> {
        let base = self.base;
        self.idle.extract_if(.., |snapshot| snapshot.batch() != base).collect()
    }

    /// Records a batch that has replaced everything. Returns outdated snapshots to drop.
    pub(super) fn replace(&mut self, number: u64, shared: &Shared) -> Vec<Snapshot> {
        (self.base, self.committed) = (number, number);
        self.cursor = shared.turn.log().end(shared.turn.words());
        shared.cache.lock().clear();
        self.begin_epoch(shared);
        self.take_outdated()
    }

    /// Takes in what other processes have committed. This process has no batches. Returns outdated snapshots
    /// to drop.
    pub(super) fn refresh(&mut self, finished: u64, shared: &Shared) -> Vec<Snapshot> {
        if finished <= self.base {
            return Vec::new();
        }
        {
            let mut cache = shared.cache.lock();
            loop {
                match shared.turn.log().read(shared.turn.words(), &mut self.cursor, finished) {
                    Read::End => break,
                    Read::Entry(entry) if entry.writer == shared.writer => {}
                    Read::Entry(entry) => match entry.keys {
                        Some(keys) => keys.iter().for_each(|key| cache.forget(key, key_hash(key))),
                        None => cache.clear(),
                    },
                    Read::Gap => cache.clear(),
                }
            }
        }
        self.begin_epoch(shared);
        self.base = finished;
        self.take_outdated()
    }
}
