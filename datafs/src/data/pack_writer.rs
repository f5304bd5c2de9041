//! The writer of packs: pieces of small files are appended to packs, which are synced before a commit points at
//! them.
//!
//! On a local store one pack is appended to at a time (`local_pack.rs`), and the next one is created ahead of
//! time. For buckets `remote_pack.rs` collects whole packs in memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::codec::Codec;
use super::deleted::{self, KeepsOpen};
use super::error::Result;
use super::local_pack::{GATHER_BYTES, LocalPack};
use super::pack::PACK_BYTES;
use super::pool::ObjectPool;
use super::remote_pack::{RemotePack, RemotePackWriters};
use crate::failpoint;
use crate::metrics;
use crate::object::{Extent, ObjectId};

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
        let over = self.0.lock().take_if(|pack| pack.is_deleted());
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
        let gathering = pool.remote_pack_writers();
        Packs { pool, current, ahead: Arc::default(), gathering }
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
            let (pack, extents) = self.gathering.append(codec, (volume, ino), runs)?;
            return Ok(Packed { pack: Pack::RemotePack(pack), extents });
        }
        let mut current = self.current.0.lock();
        let mut end = current.as_ref().map_or(0, |pack| pack.end());
        if end >= PACK_BYTES {
            *current = None;
            end = 0;
        }
        let pack = match &*current {
            Some(pack) => Arc::clone(pack),
            None => Arc::clone(current.insert(self.begin()?)),
        };
        if pack.gathered_bytes() >= GATHER_BYTES {
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
        ahead.map_or_else(|| self.pool.begin_pack(), Ok)
    }

    fn begin_ahead(&self) {
        let (pool, ahead) = (self.pool.clone(), Arc::clone(&self.ahead));
        self.pool.runtime().handle().spawn_blocking(move || {
            let mut state = ahead.state.lock();
            if state.closed || state.pack.is_some() {
                return;
            }
            match pool.begin_pack() {
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
