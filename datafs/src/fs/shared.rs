//! The state that the handles of an open datafs share: metadata, object pool, and the state of this process.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Weak};

use millrace_leaf::error_chain;
use parking_lot::{Mutex, RwLock};

use super::lock::HoldersAsked;
use super::open_table::OpenTable;
use super::orphan::Orphans;
use super::scattered::Scattered;
use super::watch::Watchers;
use crate::collector::Collector;
use crate::config::Config;
use crate::data::{Codec, ObjectError, ObjectPool, Packs};
use crate::error::{Error, Result};
use crate::garbage::{GarbageList, RoomMaker};
use crate::meta::closing::Open;
use crate::meta::codec::Decoder;
use crate::meta::engine::Durability;
use crate::meta::keys;
use crate::meta::metadata::Metadata;
use crate::meta::versioned::VolumeRow;
use crate::node::{FIRST_INO, INO_MAX};
use crate::object::{ExpectedKeys, ObjectId};
use crate::session::Session;

/// Inode numbers that a process reserves at a time; unused ones are lost.
const INO_BATCH: u64 = 1_024;

/// Held by every public handle. The drop of the last one commits all answered operations before it returns:
/// the collector may keep `Shared` alive for a moment, and the process may end first.
#[derive(Debug)]
pub(crate) struct InUse(Weak<Shared>);

impl InUse {
    pub(crate) fn of(shared: &Arc<Shared>) -> Arc<InUse> {
        Arc::new(InUse(Arc::downgrade(shared)))
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        let Some(shared) = self.0.upgrade() else { return };
        shared.collector.stop();
        if let Err(error) = shared.meta.settle() {
            tracing::error!(
                error = error_chain::one_line(&error),
                "closing the volumes lost the last changes"
            );
        }
        shared.collector.wait_for_stop();
    }
}

/// The state that the handles of one [`Datafs`](crate::Datafs) share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// The home folder.
    pub(crate) home: PathBuf,
    pub(crate) config: Config,
    pub(crate) meta: Metadata,
    pub(crate) pool: ObjectPool,
    /// The packs for small files.
    pub(crate) packs: Packs,
    pub(crate) session: Session,
    pub(crate) sessions_dir: PathBuf,
    pub(crate) open: OpenTable,
    pub(crate) orphans: Orphans,
    pub(crate) holders_asked: HoldersAsked,
    /// Unflushed bytes of all open files.
    pub(crate) unflushed_bytes: AtomicUsize,
    pub(crate) collector: Arc<Collector>,
    pub(crate) room_maker: RoomMaker,
    pub(crate) watchers: Watchers,
    /// Files for the next background pass of compaction.
    pub(crate) scattered: Scattered,
    /// The keys that the objects of each volume may be encrypted with.
    pub(crate) expected_keys: RwLock<HashMap<u64, Arc<ExpectedKeys>>>,
    inos: Mutex<HashMap<u64, Range<u64>>>,
    /// Dropped last.
    pub(crate) open_mark: Open,
}

impl Shared {
    /// The shared state of a new handle.
    pub(crate) fn new(
        home: &Path,
        config: &Config,
        meta: Metadata,
        pool: ObjectPool,
        session: Session,
    ) -> Arc<Shared> {
        Arc::new(Shared {
            open_mark: meta.open_mark(),
            home: home.to_owned(),
            config: config.clone(),
            meta,
            packs: Packs::new(pool.clone()),
            pool,
            session,
            sessions_dir: config.sessions_path(home),
            open: OpenTable::default(),
            orphans: Orphans::default(),
            holders_asked: HoldersAsked::default(),
            unflushed_bytes: AtomicUsize::new(0),
            collector: Arc::default(),
            room_maker: RoomMaker::default(),
            watchers: Watchers::default(),
            scattered: Scattered::default(),
            expected_keys: RwLock::default(),
            inos: Mutex::new(HashMap::new()),
        })
    }

    /// The metadata file or server, for error messages.
    pub(crate) fn place_of_metadata(&self) -> String {
        match &self.config.meta_url {
            Some(url) => format!("{url}, schema {}", self.config.meta_schema),
            None => self.config.meta_path(&self.home).display().to_string(),
        }
    }

    /// Allocates unique inode numbers. Must not be called inside a transaction.
    pub(crate) fn allocate_inos(&self, volume: u64, count: u64) -> Result<Range<u64>> {
        let mut inos = self.inos.lock();
        let free = inos.entry(volume).or_insert(0..0);
        if free.end - free.start < count {
            let batch = count.max(INO_BATCH);
            let key = keys::next_ino(volume);
            let reserved = self.meta.transact(Durability::Relaxed, |txn| {
                let next = match txn.get(&key)? {
                    Some(value) => Decoder::new("inode counter", &value).u64()?,
                    None => FIRST_INO,
                };
                let end = next.saturating_add(batch);
                if end > INO_MAX {
                    return Err(Error::TooLarge { what: "number of inodes ever made", max: INO_MAX });
                }
                txn.put(&key, &end.to_be_bytes())?;
                Ok(next..end)
            })?;
            if let Some(journal) = self.open.journal() {
                journal.reserves(volume, reserved.end);
            }
            *free = reserved;
        }
        let taken = free.start..free.start + count;
        free.start = taken.end;
        Ok(taken)
    }

    /// The garbage list of this store.
    pub(crate) fn garbage(&self) -> GarbageList<'_> {
        GarbageList {
            meta: &self.meta,
            pool: &self.pool,
            collector: &self.collector,
            home: &self.home,
            session: self.session.id(),
        }
    }

    /// Deletes garbage for an operation that found no space, see [`RoomMaker::make_room`].
    pub(crate) fn make_room(&self) -> bool {
        self.room_maker.make_room(self.garbage())
    }

    /// The codec for new data of a volume. Fails when this process lacks its key.
    pub(crate) fn codec_of(&self, row: &VolumeRow) -> Result<Codec> {
        let key = match &row.key {
            None => None,
            Some((name, check)) => {
                let wrong = |missing| Error::wrong_key(format!("volume {}", row.name), name, missing);
                let key = self.pool.keys().get(name).ok_or_else(|| wrong(true))?;
                if key.check() != *check {
                    return Err(wrong(false));
                }
                Some(key.clone())
            }
        };
        Ok(Codec { compression: row.compression, key })
    }

    /// Caches the keys that the objects of a volume may be encrypted with.
    pub(crate) fn expect_keys(&self, volume: u64, row: &VolumeRow) -> Arc<ExpectedKeys> {
        let expected = Arc::new(row.expected_keys());
        self.expected_keys.write().insert(volume, Arc::clone(&expected));
        expected
    }

    /// Reads bytes of an object for a file of a volume, see [`ObjectPool::read_part`]. The volume's record
    /// says how the object must be protected.
    ///
    /// [`ObjectPool::read_part`]: crate::data::ObjectPool::read_part
    pub(crate) fn read_part(
        &self,
        volume: u64,
        object: ObjectId,
        start: u64,
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<(), ObjectError> {
        self.read_part_ahead(volume, object, start, offset, buffer, u64::MAX)
    }

    /// [`Shared::read_part`] by a reader that ends at `ahead_to` of the object.
    pub(crate) fn read_part_ahead(
        &self,
        volume: u64,
        object: ObjectId,
        start: u64,
        offset: u64,
        buffer: &mut [u8],
        ahead_to: u64,
    ) -> Result<(), ObjectError> {
        let look_up = || {
            let row = self.meta.view(|txn| VolumeRow::get(txn, volume));
            row.map(|row| self.expect_keys(volume, &row)).map_err(|error| ObjectError::Store {
                operation: "look up the keys of an object",
                place: format!("volume number {volume}"),
                source: error.into(),
            })
        };
        let known = self.expected_keys.read().get(&volume).map(Arc::clone);
        let expected = known.map_or_else(look_up, Ok)?;
        match self.pool.read_part_ahead(&expected, object, start, offset, buffer, ahead_to) {
            // The volume's key may have been changed since: read its record again.
            Err(ObjectError::Protection { .. }) => {
                self.pool.read_part_ahead(&*look_up()?, object, start, offset, buffer, ahead_to)
            }
            done => done,
        }
    }

    /// [`Shared::codec_of`] for a volume id.
    pub(crate) fn codec_of_volume(&self, volume: u64) -> Result<Codec> {
        self.codec_of(&self.meta.view(|txn| VolumeRow::get(txn, volume))?)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.collector.stop();
        // Closing deletes unreferenced packs: they must not outlive the session's row.
        self.packs.close();
        if self.pool.has_left_behind() {
            self.session.leave_unclean();
        }
        self.session.end(&self.meta);
    }
}
