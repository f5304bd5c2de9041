//! Gathered packs: for a store that takes whole objects only, the bytes of many small files are collected in
//! memory and stored with one request.
//!
//! A gathered pack has the content of any pack (see `pack.rs`) as the data of an encoded object (see
//! `encoded.rs`). So it is compressed and encrypted as its volumes are, and readers treat it like any other
//! object. The pack is closed and sent when it is full, or when a commit that points at it needs it durable.
//! Until the store has it, reads come from memory. A pack that could not be sent stays in memory, and the
//! next [`RemotePack::sync`] sends it again; that memory is bounded.

use std::collections::HashMap;
use std::fmt;
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use millrace_leaf::error_chain;
use parking_lot::{Condvar, Mutex};

use super::backend::Backend;
use super::checksum::FRAME_BYTES;
use super::codec::Codec;
use super::encoded::{self, Encoder};
use super::error::{ObjectError, Result};
use super::pack::{HEADER_BYTES, append_pieces};
use super::reader::OpenObjects;
use crate::config::Config;
use crate::failpoint;
use crate::metrics;
use crate::object::{Extent, Layout, ObjectId};

/// A pack of this size is sent: a reader gets it with one request, and the cost per request is negligible.
pub(crate) const GATHER_BYTES: usize = 4 << 20;

/// A pack that is being collected or sent. Dropping one that no transaction has referred to deletes it.
pub(crate) struct RemotePack {
    backend: Backend,
    open: Arc<OpenObjects>,
    pending: Arc<PendingPacks>,
    id: ObjectId,
    codec: Codec,
    stage: Mutex<Stage>,
    changed: Condvar,
    referenced: AtomicBool,
}

#[derive(Debug)]
enum Stage {
    Open(Vec<u8>),
    Sending(Bytes),
    Failed(Bytes, ObjectError),
    Stored,
}

impl Stage {
    fn bytes(&self) -> Option<&[u8]> {
        match self {
            Self::Open(bytes) => Some(bytes),
            Self::Sending(bytes) | Self::Failed(bytes, _) => Some(bytes),
            Self::Stored => None,
        }
    }
}

impl fmt::Debug for RemotePack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemotePack").field("id", &self.id).finish_non_exhaustive()
    }
}

impl RemotePack {
    /// A new empty pack.
    fn begin(packs: &RemotePackWriters, codec: &Codec) -> RemotePack {
        let id = packs.backend.new_id(Layout::RemotePack);
        failpoint::hit("pack-begun");
        RemotePack {
            backend: packs.backend.clone(),
            open: Arc::clone(&packs.open),
            pending: Arc::clone(&packs.pending),
            id,
            codec: codec.clone(),
            stage: Mutex::new(Stage::Open(Vec::new())),
            changed: Condvar::new(),
            referenced: AtomicBool::new(false),
        }
    }

    pub(super) fn id(&self) -> ObjectId {
        self.id
    }

    pub(super) fn refer(&self) -> bool {
        self.referenced.swap(true, Ordering::AcqRel)
    }

    /// How long a commit may wait for more files to share the pack.
    pub(crate) fn linger(&self) -> Duration {
        self.pending.linger
    }

    /// Appends runs as pieces; `None` when the pack is closed. The flag says whether it is now full.
    fn append(&self, owner: (u64, u64), runs: &[(u64, &[u8])]) -> Option<(Vec<Extent>, bool)> {
        let mut stage = self.stage.lock();
        let Stage::Open(bytes) = &mut *stage else { return None };
        let before = bytes.len();
        let extents = append_pieces(bytes, (self.id, 0), owner, runs.iter().copied());
        self.pending.held.lock().bytes += bytes.len() - before;
        failpoint::hit("pack-appended");
        Some((extents, bytes.len() >= GATHER_BYTES))
    }

    /// Fills `buffer` with the bytes from `offset` on; false when the store has the pack and must be asked.
    fn read_into(&self, offset: u64, buffer: &mut [u8]) -> Result<bool> {
        let stage = self.stage.lock();
        let Some(bytes) = stage.bytes() else { return Ok(false) };
        let end = bytes.len() as u64;
        let part = usize::try_from(offset).ok().and_then(|at| bytes.get(at..at.checked_add(buffer.len())?));
        let reason = "it ends there";
        let part =
            part.ok_or_else(|| ObjectError::Corrupt { id: self.id, byte: end, reason: reason.into() })?;
        buffer.copy_from_slice(part);
        Ok(true)
    }

    /// Closes the pack and sends it in the background.
    fn start(self: &Arc<Self>) {
        let pack = Arc::clone(self);
        self.backend.runtime().handle().spawn_blocking(move || {
            // A commit that waits for the pack gets the error from `sync`, which sends again.
            if let Err(error) = pack.sync() {
                tracing::debug!(object = %pack.id, %error, "a full pack could not be stored yet");
            }
        });
    }

    /// Closes the pack and sends it. Returns when the store has it, or when this attempt has failed.
    pub(crate) fn sync(&self) -> Result<()> {
        let mut tried = false;
        let mut stage = self.stage.lock();
        loop {
            match &mut *stage {
                Stage::Stored => return Ok(()),
                Stage::Sending(_) => {
                    self.changed.wait(&mut stage);
                    tried = true;
                    continue;
                }
                Stage::Failed(_, error) if tried => return Err(error.again()),
                Stage::Open(_) | Stage::Failed(..) => {}
            }
            let bytes = match mem::replace(&mut *stage, Stage::Stored) {
                Stage::Open(bytes) => Bytes::from(bytes),
                Stage::Failed(bytes, _) | Stage::Sending(bytes) => bytes,
                Stage::Stored => Bytes::new(),
            };
            *stage = Stage::Sending(bytes.clone());
            drop(stage);
            failpoint::hit("pack-cut");
            let mut attempt = Attempt { pack: self, bytes, outcome: None };
            attempt.outcome = Some(self.send(&attempt.bytes));
            drop(attempt);
            tried = true;
            stage = self.stage.lock();
        }
    }

    fn send(&self, data: &[u8]) -> Result<()> {
        let not_encoded = |reason: String| ObjectError::Store {
            operation: "encode",
            place: self.backend.place().to_owned(),
            source: reason.into(),
        };
        let mut encoder = Encoder::new(&self.codec, self.id).map_err(not_encoded)?;
        let mut encoded = Vec::with_capacity(data.len() + data.len() / 1024 + 1024);
        let done = encoder.update(data, &mut encoded).and_then(|()| encoder.finish(&mut encoded));
        done.map_err(not_encoded)?;
        let stored = Bytes::from(encoded);
        self.backend.put_data(self.id, vec![stored.clone()])?;
        failpoint::hit("pack-synced");
        metrics::OBJECTS_WRITTEN.inc();
        metrics::OBJECT_WRITTEN_BYTES.inc_by(stored.len() as u64);
        self.cache(data.len() as u64, &stored);
        Ok(())
    }

    /// Puts the pack into the cache, since new data is often read soon. Skipped while the cache is busy.
    fn cache(&self, data_bytes: u64, stored: &Bytes) {
        let Some(cache) = self.backend.cache() else { return };
        let Some(footer) = stored.last_chunk::<{ encoded::FOOTER_BYTES }>() else { return };
        let Ok(trailer_bytes) = encoded::trailer_bytes(footer) else { return };
        let Some(frames_bytes) = (stored.len() as u64).checked_sub(trailer_bytes) else { return };
        let frames = data_bytes.div_ceil(u64::from(FRAME_BYTES));
        let trailer = stored.slice(frames_bytes as usize..);
        if let Some(entry) = cache.create(self.id, frames, frames_bytes, &trailer) {
            cache.put(&entry, 0..frames, 0, stored.slice(..frames_bytes as usize), false);
        }
    }
}

/// A request in progress. Its drop settles the stage even after a panic, so that no caller waits forever.
struct Attempt<'p> {
    pack: &'p RemotePack,
    bytes: Bytes,
    outcome: Option<Result<()>>,
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        let bytes = mem::take(&mut self.bytes);
        let pending = &self.pack.pending;
        let panicked = || ObjectError::Store {
            operation: "write",
            place: self.pack.backend.place().to_owned(),
            source: "the thread that did it has panicked".into(),
        };
        let next = match self.outcome.take().unwrap_or_else(|| Err(panicked())) {
            Ok(()) => {
                pending.stored(self.pack.id, bytes.len());
                Stage::Stored
            }
            Err(error) => {
                pending.failed(&error);
                Stage::Failed(bytes, error)
            }
        };
        *self.pack.stage.lock() = next;
        self.pack.changed.notify_all();
    }
}

impl Drop for RemotePack {
    fn drop(&mut self) {
        let stage = mem::replace(self.stage.get_mut(), Stage::Stored);
        let sent = !matches!(stage, Stage::Open(_));
        if let Some(bytes) = stage.bytes() {
            self.pending.stored(self.id, bytes.len());
        }
        if !sent || self.referenced.load(Ordering::Acquire) {
            return;
        }
        if !matches!(stage, Stage::Stored) {
            // The store may have it after all; the garbage collector finds it.
            self.backend.leave_behind();
            return;
        }
        self.open.forget(self.id);
        if let Err(error) = self.backend.delete(self.id) {
            tracing::warn!(
                object = %self.id, error = error_chain::one_line(&error),
                "deleting a pack that nothing points at"
            );
            self.backend.leave_behind();
        }
    }
}

/// The packs that are appended to, one for each codec.
#[derive(Debug)]
pub(super) struct RemotePackWriters {
    backend: Backend,
    open: Arc<OpenObjects>,
    pending: Arc<PendingPacks>,
    current: Mutex<Vec<Arc<RemotePack>>>,
}

impl RemotePackWriters {
    pub(super) fn new(
        backend: &Backend,
        open: &Arc<OpenObjects>,
        pending: &Arc<PendingPacks>,
    ) -> RemotePackWriters {
        let (backend, open, pending) = (backend.clone(), Arc::clone(open), Arc::clone(pending));
        RemotePackWriters { backend, open, pending, current: Mutex::default() }
    }

    /// Appends runs of a file (by file offset, disjoint, in order) as pieces; adjacent runs share one. Returns the
    /// pack and the extents.
    pub(super) fn append<'a>(
        &self,
        codec: &Codec,
        owner: (u64, u64),
        runs: impl Iterator<Item = (u64, &'a [u8])>,
    ) -> Result<(Arc<RemotePack>, Vec<Extent>)> {
        let runs: Vec<(u64, &[u8])> = runs.collect();
        self.pending.wait_for_room(runs.iter().map(|(_, run)| run.len() + HEADER_BYTES).sum())?;
        let mut packs = self.current.lock();
        loop {
            let at = packs.iter().position(|pack| pack.codec == *codec).unwrap_or_else(|| {
                let pack = Arc::new(RemotePack::begin(self, codec));
                self.pending.add(&pack);
                packs.push(pack);
                packs.len() - 1
            });
            let Some((extents, full)) = packs[at].append(owner, &runs) else {
                // The pack is closed.
                packs.swap_remove(at);
                continue;
            };
            let pack = if full { packs.swap_remove(at) } else { Arc::clone(&packs[at]) };
            if full {
                pack.start();
            }
            return Ok((pack, extents));
        }
    }

    pub(super) fn give_up(&self, pack: &Arc<RemotePack>) {
        self.current.lock().retain(|current| !Arc::ptr_eq(current, pack));
    }

    pub(super) fn close(&self) {
        self.current.lock().clear();
    }
}

/// The packs that the store does not have yet, and the bound of their memory.
#[derive(Debug)]
pub(crate) struct PendingPacks {
    bytes_max: usize,
    linger: Duration,
    /// How long a writer waits for room.
    patience: Duration,
    place: String,
    held: Mutex<Held>,
    room: Condvar,
}

#[derive(Debug, Default)]
struct Held {
    packs: HashMap<ObjectId, Weak<RemotePack>>,
    bytes: usize,
    /// The error of the last request, if it failed.
    failed: Option<ObjectError>,
}

impl PendingPacks {
    pub(super) fn new(config: &Config, place: &str) -> PendingPacks {
        PendingPacks {
            bytes_max: config.pack_buffers_bytes_max,
            linger: Duration::from_millis(config.pack_linger_ms),
            patience: Duration::from_millis(config.store_timeout_ms),
            place: place.to_owned(),
            held: Mutex::default(),
            room: Condvar::new(),
        }
    }

    /// Waits until `bytes` more fit into the memory bound. Fails at once while the store is known to be
    /// unavailable. Threads that wait at the same time may exceed the bound a little.
    fn wait_for_room(&self, bytes: usize) -> Result<()> {
        let begun = Instant::now();
        let mut held = self.held.lock();
        while held.bytes > 0 && held.bytes.saturating_add(bytes) > self.bytes_max {
            if let Some(error) = &held.failed {
                return Err(error.again());
            }
            if self.room.wait_until(&mut held, begun + self.patience).timed_out() {
                return Err(ObjectError::Away {
                    operation: "take more small files",
                    place: self.place.clone(),
                    tried_ms: u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX),
                    source: format!("{} bytes wait to be stored", held.bytes).into(),
                });
            }
        }
        Ok(())
    }

    /// Registers a pack, so that readers find it.
    pub(super) fn add(&self, pack: &Arc<RemotePack>) {
        self.held.lock().packs.insert(pack.id, Arc::downgrade(pack));
    }

    /// Reads from a pack that the store does not have yet; false when there is no pack of that id.
    pub(super) fn read_into(&self, id: ObjectId, offset: u64, buffer: &mut [u8]) -> Result<bool> {
        let pack = self.held.lock().packs.get(&id).and_then(Weak::upgrade);
        pack.map_or(Ok(false), |pack| pack.read_into(offset, buffer))
    }

    /// Whether the store does not have this pack yet.
    pub(super) fn holds(&self, id: ObjectId) -> bool {
        self.held.lock().packs.contains_key(&id)
    }

    fn stored(&self, id: ObjectId, bytes: usize) {
        let mut held = self.held.lock();
        held.packs.remove(&id);
        held.bytes = held.bytes.saturating_sub(bytes);
        held.failed = None;
        drop(held);
        self.room.notify_all();
    }

    fn failed(&self, error: &ObjectError) {
        self.held.lock().failed = Some(error.again());
        self.room.notify_all();
    }
}
