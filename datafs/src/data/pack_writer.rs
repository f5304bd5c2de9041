//! The writer of packs: pieces are collected in memory, then written and synced together before a commit
//! points at them.
//!
//! This is for local stores; `remote_pack.rs` does the same for buckets. An append does no I/O until 4 MiB are in
//! memory: a write that extends a file waits for the file system's journal whenever another thread syncs, and
//! other files are synced all the time. Appended bytes can be read at once: a reader in this process first
//! has a piece written to the file. They survive a power failure after [`LocalPack::sync`], which every
//! commit that points at them waits for.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::codec::Codec;
use super::deleted::{self, KeepsOpen, is_deleted};
use super::error::{ObjectError, Result};
use super::pack::{PACK_BYTES, append_pieces};
use super::pool::ObjectPool;
use super::remote_pack::{RemotePack, RemotePackWriters};
use crate::failpoint;
use crate::metrics;
use crate::object::{Extent, Layout, ObjectId};

/// A pack that this process has begun.
#[derive(Debug, Clone)]
pub(crate) enum Pack {
    /// A file that grows.
    Local(Arc<LocalPack>),
    /// A pack in memory that is sent to a bucket.
    RemotePack(Arc<RemotePack>),
}

impl Pack {
    /// The object id of the pack.
    pub(crate) fn id(&self) -> ObjectId {
        match self {
            Self::Local(pack) => pack.id(),
            Self::RemotePack(pack) => pack.id(),
        }
    }

    /// Records that a transaction is going to refer to the pack. Returns whether an earlier one already did.
    pub(crate) fn refer(&self) -> bool {
        match self {
            Self::Local(pack) => pack.refer(),
            Self::RemotePack(pack) => pack.refer(),
        }
    }

    /// Sends a pack to a bucket. Does nothing for a local pack: the commit that needs it syncs it.
    pub(crate) fn send(&self) -> Result<()> {
        match self {
            Self::Local(_) => Ok(()),
            Self::RemotePack(pack) => pack.sync(),
        }
    }

    /// Makes all earlier appends survive a power failure.
    #[cfg(test)]
    pub(super) fn sync(&self) -> Result<()> {
        match self {
            Self::Local(pack) => pack.sync(),
            Self::RemotePack(pack) => pack.sync(),
        }
    }
}

/// Above this many bytes in memory, the next append first writes them out. As many again can be in memory
/// while they are being written.
const GATHER_BYTES: usize = 4 << 20;

/// A pack in a local file. Dropping one that no transaction has referred to deletes it.
#[derive(Debug)]
pub(crate) struct LocalPack {
    pool: ObjectPool,
    id: ObjectId,
    path: PathBuf,
    file: File,
    tail: Mutex<Tail>,
    /// Locked while the tail is written to the file; reused as the next tail's buffer.
    writing: Mutex<Vec<u8>>,
    synced: Mutex<Synced>,
    referenced: AtomicBool,
}

/// The end of the pack that is not in the file yet.
#[derive(Debug, Default)]
struct Tail {
    /// Bytes that are in the file.
    written: u64,
    /// Bytes that are being written to it.
    leaving: u64,
    /// Bytes after those.
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

    /// The object id of the pack.
    pub(super) fn id(&self) -> ObjectId {
        self.id
    }

    /// See [`Pack::refer`].
    fn refer(&self) -> bool {
        self.referenced.swap(true, Ordering::AcqRel)
    }

    /// Appends runs (by file offset, disjoint, in order) as pieces; adjacent runs share one.
    fn append<'a>(
        &self,
        (volume, ino): (u64, u64),
        runs: impl Iterator<Item = (u64, &'a [u8])>,
    ) -> Vec<Extent> {
        let mut tail = self.tail.lock();
        let base = tail.written + tail.leaving;
        append_pieces(&mut tail.bytes, (self.id, base), (volume, ino), runs)
    }

    /// Writes all earlier appends to the file, where readers find them. Bytes that could not be written stay
    /// in memory for the next call.
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

    /// Writes the bytes before `end` to the file.
    pub(super) fn write_out_to(&self, end: u64) -> Result<()> {
        if self.tail.lock().written >= end { Ok(()) } else { self.write_out() }
    }

    /// Makes all earlier appends survive a power failure.
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
                // The kernel reports a lost write once: a later sync that succeeds proves nothing.
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

/// The result of an append: the pack, and the position of the bytes.
#[derive(Debug)]
pub(crate) struct Packed {
    /// The pack.
    pub(crate) pack: Pack,
    /// The runs as extents, in order.
    pub(crate) extents: Vec<Extent>,
}

/// The packs of this process: one is appended to, and the next one is created ahead of time.
#[derive(Debug)]
pub(crate) struct Packs {
    pool: ObjectPool,
    current: Arc<Current>,
    ahead: Arc<Ahead>,
    /// Packs for a bucket.
    gathering: RemotePackWriters,
}

/// The local pack that is appended to.
#[derive(Debug, Default)]
struct Current(Mutex<Option<Arc<LocalPack>>>);

impl KeepsOpen for Current {
    /// An unlinked pack was garbage: nothing points at it. A transaction that is going to must place the
    /// bytes elsewhere (see `Referral` in `fs/content.rs`).
    fn close_deleted(&self) {
        let over = self.0.lock().take_if(|pack| is_deleted(&pack.file));
        drop(over);
    }
}

/// A pack that was created before it is needed.
#[derive(Debug, Default)]
struct Ahead {
    /// A thread has created it, or is creating it.
    asked: AtomicBool,
    state: Mutex<AheadState>,
}

#[derive(Debug, Default)]
struct AheadState {
    pack: Option<Arc<LocalPack>>,
    closed: bool,
}

impl Packs {
    /// Creates no pack yet.
    pub(crate) fn new(pool: ObjectPool) -> Packs {
        let current = Arc::<Current>::default();
        if pool.is_local() {
            deleted::look_after(pool.runtime(), &current);
        }
        Packs { pool, current, ahead: Arc::default(), gathering: RemotePackWriters::default() }
    }

    /// Whether small files of volumes with this codec share packs.
    pub(crate) fn serve(&self, codec: &Codec) -> bool {
        !self.pool.is_local() || codec.is_plain()
    }

    /// Appends runs of a file (by file offset, disjoint, in order) as pieces of at most
    /// [`PIECE_BYTES_MAX`](super::pack::PIECE_BYTES_MAX); adjacent runs share a piece. The bytes survive a
    /// power failure once [`Pack::prerequisite`] is durable; a full disk may show only then. `codec` is the
    /// volume's, see [`Packs::serve`].
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
                // The append that needs the pack tries again and returns the error.
                Err(error) => tracing::debug!(%error, "beginning a pack ahead"),
            }
        });
    }

    /// Stops appending to a pack, because it is being deleted.
    pub(crate) fn give_up(&self, pack: &Pack) {
        match pack {
            Pack::Local(pack) => {
                let mut current = self.current.0.lock();
                if current.as_ref().is_some_and(|current| Arc::ptr_eq(current, pack)) {
                    *current = None;
                }
            }
            Pack::RemotePack(pack) => self.gathering.give_up(pack),
        }
    }

    /// Drops the current packs and stops creating packs ahead.
    pub(crate) fn close(&self) {
        *self.current.0.lock() = None;
        self.gathering.close();
        let mut ahead = self.ahead.state.lock();
        ahead.closed = true;
        ahead.pack = None;
    }
}
