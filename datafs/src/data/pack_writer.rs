//! Writes packs: pieces are gathered in memory, and written and synced together before a commit points
//! at them.
//!
//! Packs exist on local stores only. Who appends a piece does no I/O: a write that extends a file waits
//! for the journal of the file system whenever somebody syncs, and small files are written while others
//! are synced all the time. What was appended can be read at once (a reader in this process that comes
//! to a piece which is not in the file yet has it written first); it survives a power failure after
//! [`Pack::sync`], which every commit that points at it waits for.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::error::{ObjectError, Result};
use super::extent::Extent;
use super::object::{Layout, ObjectId};
use super::pack::{HEADER_BYTES, PACK_BYTES, PIECE_BYTES_MAX, Piece};
use super::pool::ObjectPool;
use crate::failpoint;
use crate::metrics;

/// With so many bytes in memory who appends writes them out first. As many again are in memory while
/// they are being written.
const GATHER_BYTES: usize = 4 << 20;

/// A pack that this process has begun. Dropping one that no transaction has referred to deletes it.
#[derive(Debug)]
pub(crate) struct Pack {
    pool: ObjectPool,
    id: ObjectId,
    path: PathBuf,
    file: File,
    tail: Mutex<Tail>,
    /// Held while the tail is written to the file; the room for the next one.
    writing: Mutex<Vec<u8>>,
    synced: Mutex<Synced>,
    referenced: AtomicBool,
}

/// What is not in the file yet.
#[derive(Debug, Default)]
struct Tail {
    /// Bytes that are in the file.
    written: u64,
    /// Bytes that are being written to it.
    leaving: u64,
    /// Those behind.
    bytes: Vec<u8>,
}

impl Tail {
    fn end(&self) -> u64 {
        self.written + self.leaving + self.bytes.len() as u64
    }
}

#[derive(Debug, Default)]
struct Synced {
    end: u64,
    named: bool,
    lost: bool,
}

impl Pack {
    fn begin(pool: &ObjectPool) -> Result<Arc<Pack>> {
        let id = pool.new_id(Layout::Pack);
        let (path, file) = pool.create_local(&id.data_name())?;
        failpoint::hit("pack-begun");
        metrics::OBJECTS_WRITTEN.inc();
        let pack = Arc::new(Pack {
            pool: pool.clone(),
            id,
            path,
            file,
            tail: Mutex::default(),
            writing: Mutex::default(),
            synced: Mutex::default(),
            referenced: AtomicBool::new(false),
        });
        pool.open_packs().grows(&pack);
        Ok(pack)
    }

    /// Its name.
    pub(crate) fn id(&self) -> ObjectId {
        self.id
    }

    /// Notes that a transaction is going to refer to it. Returns whether one had tried before.
    pub(crate) fn refer(&self) -> bool {
        self.referenced.swap(true, Ordering::AcqRel)
    }

    /// Appends runs (by file offset, disjoint, in order) as pieces; neighbours share one.
    fn append<'a>(
        &self,
        (volume, ino): (u64, u64),
        runs: impl Iterator<Item = (u64, &'a [u8])>,
    ) -> Vec<Extent> {
        let mut tail = self.tail.lock();
        let base = tail.written + tail.leaving;
        let bytes = &mut tail.bytes;
        // The data first, each piece behind room for its header.
        let mut spans: Vec<(u64, usize, usize)> = Vec::with_capacity(1);
        for (offset, run) in runs {
            let mut at = offset;
            for part in run.chunks(PIECE_BYTES_MAX) {
                match spans.last_mut() {
                    Some((start, _, len))
                        if *start + *len as u64 == at && *len + part.len() <= PIECE_BYTES_MAX =>
                    {
                        *len += part.len();
                    }
                    _ => {
                        bytes.resize(bytes.len() + HEADER_BYTES, 0);
                        spans.push((at, bytes.len(), part.len()));
                    }
                }
                bytes.extend_from_slice(part);
                at += part.len() as u64;
            }
        }
        let mut extents = Vec::with_capacity(spans.len());
        for (file_offset, at, len) in spans {
            let piece = Piece::new(volume, ino, file_offset, &bytes[at..at + len]);
            let header_at = at - HEADER_BYTES;
            bytes[header_at..at].copy_from_slice(&piece.encode(self.id, base + header_at as u64));
            let object_offset = base + at as u64;
            extents.push(Extent { file_offset, len: len as u64, object: self.id, object_offset });
        }
        extents
    }

    /// Sees that everything that was appended before the call is in the file, where it can be read. What
    /// could not be written stays in memory, and is tried again by the next call.
    pub(super) fn write_out(&self) -> Result<()> {
        let mut writing = self.writing.lock();
        let at = {
            let mut tail = self.tail.lock();
            if tail.bytes.is_empty() {
                return Ok(());
            }
            std::mem::swap(&mut tail.bytes, &mut *writing);
            tail.leaving = writing.len() as u64;
            tail.written
        };
        let written = self.file.write_all_at(&writing, at);
        let mut tail = self.tail.lock();
        tail.leaving = 0;
        match written {
            Ok(()) => {
                tail.written += writing.len() as u64;
                drop(tail);
                writing.clear();
                if writing.capacity() > GATHER_BYTES / 4 {
                    *writing = Vec::new();
                }
                failpoint::hit("pack-written");
                Ok(())
            }
            Err(e) => {
                writing.append(&mut tail.bytes);
                std::mem::swap(&mut tail.bytes, &mut *writing);
                Err(ObjectError::io("append to pack", &self.path, e))
            }
        }
    }

    /// Sees that the bytes before `end` are in the file.
    pub(super) fn write_out_to(&self, end: u64) -> Result<()> {
        if self.tail.lock().written >= end { Ok(()) } else { self.write_out() }
    }

    /// Makes everything that was appended before the call survive a power failure.
    pub(crate) fn sync(&self) -> Result<()> {
        self.write_out()?;
        let end = self.tail.lock().written;
        let mut synced = self.synced.lock();
        if synced.end < end {
            if synced.lost {
                return Err(ObjectError::Io {
                    operation: "sync again, after it failed, pack",
                    path: self.path.clone(),
                    source: std::io::Error::other("an earlier write was lost"),
                });
            }
            if let Err(e) = self.file.sync_data() {
                // The kernel reports a lost write once; nobody may take the next answer for a success.
                synced.lost = true;
                return Err(ObjectError::io("sync pack", &self.path, e));
            }
            failpoint::hit("pack-synced");
            synced.end = end;
        }
        if !synced.named {
            self.pool.make_name_durable(self.id)?;
            synced.named = true;
        }
        Ok(())
    }
}

impl Drop for Pack {
    fn drop(&mut self) {
        if self.referenced.load(Ordering::Acquire) {
            return;
        }
        if let Err(error) = self.pool.delete(self.id) {
            tracing::warn!(object = %self.id, %error, "deleting a pack that nothing points at");
        }
    }
}

/// Bytes that were appended to a pack, and where.
#[derive(Debug)]
pub(crate) struct Packed {
    /// The pack.
    pub(crate) pack: Arc<Pack>,
    /// The runs as extents, in order.
    pub(crate) extents: Vec<Extent>,
}

/// The packs of this process: one at a time is appended to, the next one is begun ahead.
#[derive(Debug)]
pub(crate) struct Packs {
    pool: ObjectPool,
    current: Mutex<Option<Arc<Pack>>>,
    ahead: Arc<Ahead>,
}

/// A pack that was begun before it is needed.
#[derive(Debug, Default)]
struct Ahead {
    /// Somebody has begun, or begins it.
    asked: AtomicBool,
    state: Mutex<AheadState>,
}

#[derive(Debug, Default)]
struct AheadState {
    pack: Option<Arc<Pack>>,
    closed: bool,
}

impl Packs {
    /// None is begun before it is needed.
    pub(crate) fn new(pool: ObjectPool) -> Packs {
        Packs { pool, current: Mutex::new(None), ahead: Arc::default() }
    }

    /// Appends runs of a file (by file offset, disjoint, in order), one piece for each that is no longer
    /// than [`PIECE_BYTES_MAX`]; neighbours share a piece. They survive a power failure after
    /// [`Pack::sync`], which is also what says that there is no room for them.
    pub(crate) fn append<'a>(
        &self,
        volume: u64,
        ino: u64,
        runs: impl Iterator<Item = (u64, &'a [u8])>,
    ) -> Result<Packed> {
        let mut current = self.current.lock();
        let mut end = current.as_ref().map_or(0, |pack| pack.tail.lock().end());
        if end >= PACK_BYTES {
            *current = None;
            end = 0;
        }
        let pack = match &*current {
            Some(pack) => Arc::clone(pack),
            None => Arc::clone(current.insert(self.begin()?)),
        };
        if pack.tail.lock().bytes.len() >= GATHER_BYTES {
            pack.write_out()?;
        }
        let extents = pack.append((volume, ino), runs);
        drop(current);
        failpoint::hit("pack-appended");
        metrics::OBJECT_WRITTEN_BYTES.inc_by(extents.iter().map(|extent| extent.len).sum());
        if end >= PACK_BYTES / 2 && !self.ahead.asked.swap(true, Ordering::AcqRel) {
            self.begin_ahead();
        }
        Ok(Packed { pack, extents })
    }

    fn begin(&self) -> Result<Arc<Pack>> {
        let ahead = self.ahead.state.lock().pack.take();
        self.ahead.asked.store(false, Ordering::Release);
        ahead.map_or_else(|| Pack::begin(&self.pool), Ok)
    }

    fn begin_ahead(&self) {
        let (pool, ahead) = (self.pool.clone(), Arc::clone(&self.ahead));
        self.pool.runtime().handle().spawn_blocking(move || {
            let mut state = ahead.state.lock();
            if state.closed || state.pack.is_some() {
                return;
            }
            match Pack::begin(&pool) {
                Ok(pack) => state.pack = Some(pack),
                // Whoever needs it is told.
                Err(error) => tracing::debug!(%error, "beginning a pack ahead"),
            }
        });
    }

    /// Appends no more to a pack: it is being deleted.
    pub(crate) fn give_up(&self, pack: &Arc<Pack>) {
        let mut current = self.current.lock();
        if current.as_ref().is_some_and(|current| Arc::ptr_eq(current, pack)) {
            *current = None;
        }
    }

    /// Begins no pack ahead any more and lets go of those that there are.
    pub(crate) fn close(&self) {
        *self.current.lock() = None;
        let mut ahead = self.ahead.state.lock();
        ahead.closed = true;
        ahead.pack = None;
    }
}
