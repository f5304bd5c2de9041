//! Writes packs: pieces are gathered in memory, and written and synced together before a commit points
//! at them.
//!
//! This is for local stores; `gather.rs` does the same for buckets. Who appends a piece does no I/O: a write that extends a file waits
//! for the journal of the file system whenever somebody syncs, and small files are written while others
//! are synced all the time. What was appended can be read at once (a reader in this process that comes
//! to a piece which is not in the file yet has it written first); it survives a power failure after
//! [`LocalPack::sync`], which every commit that points at it waits for.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::codec::Codec;
use super::deleted::{self, KeepsOpen, is_deleted};
use super::error::{ObjectError, Result};
use super::extent::Extent;
use super::gather::{Gathered, Gathering};
use super::object::{Layout, ObjectId};
use super::pack::{PACK_BYTES, append_pieces};
use super::pool::ObjectPool;
use crate::failpoint;
use crate::metrics;

/// A pack that this process has begun.
#[derive(Debug, Clone)]
pub(crate) enum Pack {
    /// A file that grows.
    Local(Arc<LocalPack>),
    /// On its way to a bucket.
    Gathered(Arc<Gathered>),
}

impl Pack {
    /// Its name.
    pub(crate) fn id(&self) -> ObjectId {
        match self {
            Self::Local(pack) => pack.id(),
            Self::Gathered(pack) => pack.id(),
        }
    }

    /// Notes that a transaction is going to refer to it. Returns whether one had tried before.
    pub(crate) fn refer(&self) -> bool {
        match self {
            Self::Local(pack) => pack.refer(),
            Self::Gathered(pack) => pack.refer(),
        }
    }

    /// Sends a pack on its way to a bucket; what is in a file is synced with the commit that needs it.
    pub(crate) fn send(&self) -> Result<()> {
        match self {
            Self::Local(_) => Ok(()),
            Self::Gathered(pack) => pack.sync(),
        }
    }

    /// Makes everything that was appended before the call survive a power failure.
    #[cfg(test)]
    pub(super) fn sync(&self) -> Result<()> {
        match self {
            Self::Local(pack) => pack.sync(),
            Self::Gathered(pack) => pack.sync(),
        }
    }
}

/// With so many bytes in memory who appends writes them out first. As many again are in memory while
/// they are being written.
const GATHER_BYTES: usize = 4 << 20;

/// A pack in a file of this machine. Dropping one that no transaction has referred to deletes it.
#[derive(Debug)]
pub(crate) struct LocalPack {
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

impl LocalPack {
    fn begin(pool: &ObjectPool) -> Result<Arc<LocalPack>> {
        let id = pool.new_id(Layout::Pack);
        let (path, file) = pool.create_local(&id.data_name())?;
        failpoint::hit("pack-begun");
        metrics::OBJECTS_WRITTEN.inc();
        let pack = Arc::new(LocalPack {
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
    pub(super) fn id(&self) -> ObjectId {
        self.id
    }

    /// Notes that a transaction is going to refer to it. Returns whether one had tried before.
    fn refer(&self) -> bool {
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
        append_pieces(&mut tail.bytes, (self.id, base), (volume, ino), runs)
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
            failpoint::hit("pack-durable");
            synced.named = true;
        }
        Ok(())
    }
}

impl Drop for LocalPack {
    fn drop(&mut self) {
        if self.referenced.load(Ordering::Acquire) {
            return;
        }
        if let Err(error) = self.pool.delete(self.id) {
            tracing::warn!(object = %self.id, %error, "deleting a pack that nothing points at");
            self.pool.leave_behind();
        }
    }
}

/// Bytes that were appended to a pack, and where.
#[derive(Debug)]
pub(crate) struct Packed {
    /// The pack.
    pub(crate) pack: Pack,
    /// The runs as extents, in order.
    pub(crate) extents: Vec<Extent>,
}

/// The packs of this process: one at a time is appended to, the next one is begun ahead.
#[derive(Debug)]
pub(crate) struct Packs {
    pool: ObjectPool,
    current: Arc<Current>,
    ahead: Arc<Ahead>,
    /// For a bucket.
    gathering: Gathering,
}

/// The pack that is appended to.
#[derive(Debug, Default)]
struct Current(Mutex<Option<Arc<LocalPack>>>);

impl KeepsOpen for Current {
    /// A pack that has lost its name was garbage: nothing points at it, and whoever is going to has to place the bytes
    /// elsewhere (see `Referral` in `fs/content.rs`).
    fn close_deleted(&self) {
        let over = self.0.lock().take_if(|pack| is_deleted(&pack.file));
        drop(over);
    }
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
    pack: Option<Arc<LocalPack>>,
    closed: bool,
}

impl Packs {
    /// None is begun before it is needed.
    pub(crate) fn new(pool: ObjectPool) -> Packs {
        let current = Arc::<Current>::default();
        if pool.is_local() {
            deleted::look_after(pool.runtime(), &current);
        }
        Packs { pool, current, ahead: Arc::default(), gathering: Gathering::default() }
    }

    /// Whether small files of volumes of this codec share packs.
    pub(crate) fn serve(&self, codec: &Codec) -> bool {
        !self.pool.is_local() || codec.is_plain()
    }

    /// Appends runs of a file (by file offset, disjoint, in order), one piece for each that is no longer
    /// than [`PIECE_BYTES_MAX`](super::pack::PIECE_BYTES_MAX); neighbours share a piece. They survive a
    /// power failure once [`Pack::prerequisite`] is durable, which is also what says that there is no room
    /// for them. `codec` is the volume's, see [`Packs::serve`].
    pub(crate) fn append<'a>(
        &self,
        codec: &Codec,
        volume: u64,
        ino: u64,
        runs: impl Iterator<Item = (u64, &'a [u8])>,
    ) -> Result<Packed> {
        if !self.pool.is_local() {
            return self.gathering.append(&self.pool, codec, (volume, ino), runs);
        }
        let mut current = self.current.0.lock();
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
        Ok(Packed { pack: Pack::Local(pack), extents })
    }

    fn begin(&self) -> Result<Arc<LocalPack>> {
        let ahead = self.ahead.state.lock().pack.take();
        self.ahead.asked.store(false, Ordering::Release);
        ahead.map_or_else(|| LocalPack::begin(&self.pool), Ok)
    }

    fn begin_ahead(&self) {
        let (pool, ahead) = (self.pool.clone(), Arc::clone(&self.ahead));
        self.pool.runtime().handle().spawn_blocking(move || {
            let mut state = ahead.state.lock();
            if state.closed || state.pack.is_some() {
                return;
            }
            match LocalPack::begin(&pool) {
                Ok(pack) => state.pack = Some(pack),
                // Whoever needs it is told.
                Err(error) => tracing::debug!(%error, "beginning a pack ahead"),
            }
        });
    }

    /// Appends no more to a pack: it is being deleted.
    pub(crate) fn give_up(&self, pack: &Pack) {
        match pack {
            Pack::Local(pack) => {
                let mut current = self.current.0.lock();
                if current.as_ref().is_some_and(|current| Arc::ptr_eq(current, pack)) {
                    *current = None;
                }
            }
            Pack::Gathered(pack) => self.gathering.give_up(pack),
        }
    }

    /// Begins no pack ahead any more and lets go of those that there are.
    pub(crate) fn close(&self) {
        *self.current.0.lock() = None;
        self.gathering.close();
        let mut ahead = self.ahead.state.lock();
        ahead.closed = true;
        ahead.pack = None;
    }
}
