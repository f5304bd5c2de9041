//! An open datafs: the metadata engine, the object pool and the other state of this process.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};

use crate::compact::Compaction;
use crate::config::{Config, LOCK_WAIT_MS_MAX};
use crate::data::{Finished, LocalPack, ObjectPool, ObjectWriter, Pack, Packs, RemotePack, Unsynced};
use crate::error::{Error, Result};
use crate::fs::lock::HoldersAsked;
use crate::fs::open_table::OpenTable;
use crate::fs::orphan::Orphans;
use crate::gc::{Collector, RoomMaker};
use crate::identity;
use crate::meta::codec::Decoder;
use crate::meta::engine::{Durability, Prerequisite};
use crate::meta::keys;
use crate::meta::metadata::Metadata;
use crate::meta::postgres::target::Target;
use crate::meta::postgres::{self, Postgres};
use crate::meta::reserve::Reserve;
use crate::meta::sqlite::Sqlite;
use crate::meta_url::MetaUrl;
use crate::metrics;
use crate::node::{FIRST_INO, INO_MAX};
use crate::object::{ExpectedKeys, StoredObject};
use crate::private;
use crate::session::{self, Session};
use crate::watch::Watchers;

/// Inode numbers that a process reserves at a time; unused ones are lost.
const INO_BATCH: u64 = 1_024;

/// The volumes under one home folder. A clone is another handle to the same state. Every method blocks and
/// may be called from any thread (inside an async runtime, through `spawn_blocking`).
#[derive(Debug, Clone)]
pub struct Datafs {
    // Dropped first.
    pub(crate) in_use: Arc<InUse>,
    pub(crate) shared: Arc<Shared>,
}

/// Held by every public handle. The drop of the last one commits all answered operations before it returns:
/// the collector may keep `Shared` alive for a moment, and the process may end first.
#[derive(Debug)]
pub(crate) struct InUse(Weak<Shared>);

impl Drop for InUse {
    fn drop(&mut self) {
        let Some(shared) = self.0.upgrade() else { return };
        shared.collector.stop();
        if let Err(error) = shared.meta.settle() {
            tracing::error!(%error, "closing the volumes lost the last changes");
        }
        shared.collector.wait_for_stop();
    }
}

/// The state that the handles of one [`Datafs`] share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// The home folder.
    pub(crate) home: std::path::PathBuf,
    pub(crate) config: Config,
    pub(crate) meta: Metadata,
    pub(crate) pool: ObjectPool,
    /// The packs for small files.
    pub(crate) packs: Packs,
    pub(crate) session: Session,
    pub(crate) sessions_dir: std::path::PathBuf,
    pub(crate) open: OpenTable,
    pub(crate) orphans: Orphans,
    pub(crate) holders_asked: HoldersAsked,
    /// Unflushed bytes of all open files.
    pub(crate) unflushed_bytes: AtomicUsize,
    pub(crate) collector: Collector,
    pub(crate) room_maker: RoomMaker,
    pub(crate) watchers: Watchers,
    pub(crate) compaction: Compaction,
    /// The keys that the objects of each volume may be encrypted with.
    pub(crate) expected_keys: RwLock<HashMap<u64, Arc<ExpectedKeys>>>,
    inos: Mutex<HashMap<u64, std::ops::Range<u64>>>,
}

impl Datafs {
    /// Opens the state below `home`; creates missing folders and files. Several processes may have the same
    /// home open.
    ///
    /// Fails with [`Error::NewerFormat`] when a newer Millrace has written it, and with
    /// [`Error::NotWritable`] when this process may not write it.
    pub fn open(home: &Path, config: &Config) -> Result<Datafs> {
        let shared = Shared::open(home, config)?;
        identity::check(&shared.meta, &shared.pool)?;
        Collector::start(&shared)?;
        Ok(Datafs { in_use: Arc::new(InUse(Arc::downgrade(&shared))), shared })
    }
}

impl Shared {
    /// [`Datafs::open`] without the check of the store's identity and without a collector.
    pub(crate) fn open(home: &Path, config: &Config) -> Result<Arc<Shared>> {
        if !(1..=LOCK_WAIT_MS_MAX).contains(&config.lock_wait_ms) {
            return Err(Error::Invalid(format!(
                "[datafs] lock_wait_ms must be 1 to {LOCK_WAIT_MS_MAX}, a day, not {}",
                config.lock_wait_ms
            )));
        }
        metrics::export();
        let sessions_dir = config.sessions_path(home);
        let (meta, session) = match &config.meta_url {
            Some(url) => open_server(home, config, url)?,
            None => open_file(home, config, &sessions_dir)?,
        };
        if config.store_url.is_none() {
            create_dir(&config.store_path(home))?;
        }
        let pool = ObjectPool::open(home, config, session.id()).inspect_err(|_| session.end(&meta))?;
        Ok(Arc::new(Shared {
            home: home.to_owned(),
            config: config.clone(),
            meta,
            packs: Packs::new(pool.clone()),
            pool,
            session,
            sessions_dir,
            open: OpenTable::default(),
            orphans: Orphans::default(),
            holders_asked: HoldersAsked::default(),
            unflushed_bytes: AtomicUsize::new(0),
            collector: Collector::default(),
            room_maker: RoomMaker::default(),
            watchers: Watchers::default(),
            compaction: Compaction::default(),
            expected_keys: RwLock::default(),
            inos: Mutex::new(HashMap::new()),
        }))
    }
}

impl Datafs {
    /// The home folder.
    pub fn home(&self) -> &Path {
        &self.shared.home
    }
}

/// Opens the metadata file of this machine.
fn open_file(home: &Path, config: &Config, sessions_dir: &Path) -> Result<(Metadata, Session)> {
    let meta_path = config.meta_path(home);
    create_dir(meta_path.parent().unwrap_or(home))?;
    Reserve::of(&meta_path).let_open();
    let engine = Sqlite::open(&meta_path, Duration::from_millis(config.lock_wait_ms))?;
    let meta = Metadata::grouped(engine)?;
    create_dir(sessions_dir)?;
    let session = Session::start(&meta, sessions_dir)?;
    meta.take_back_reserve();
    Ok((meta, session))
}

/// Opens the metadata on a server, which machines share.
fn open_server(home: &Path, config: &Config, url: &MetaUrl) -> Result<(Metadata, Session)> {
    if !(1_000..=86_400_000).contains(&config.session_lease_ms) {
        return Err(Error::Invalid("[datafs] session_lease_ms must be 1000 to 86400000, a day".into()));
    }
    let passfile = config.meta_passfile.as_ref().map(|path| home.join(path));
    let target = Target::parse(url.reveal(), &config.meta_schema, passfile.as_deref())?;
    let options = postgres::Options {
        wait: Duration::from_millis(config.lock_wait_ms),
        connections_max: config.meta_connections_max,
        cache_bytes_max: config.meta_cache_bytes_max,
        lease: Duration::from_millis(config.session_lease_ms),
    };
    let id = session::leased_id()?;
    let meta = Metadata::direct(Arc::new(Postgres::open(target, id, &options)?));
    let session = Session::start_leased(&meta, id)?;
    Ok((meta, session))
}

impl Shared {
    /// The metadata file or server, for error messages.
    pub(crate) fn place_of_metadata(&self) -> String {
        match &self.config.meta_url {
            Some(url) => format!("{url}, schema {}", self.config.meta_schema),
            None => self.config.meta_path(&self.home).display().to_string(),
        }
    }

    /// Allocates unique inode numbers. Must not be called inside a transaction.
    pub(crate) fn allocate_inos(&self, volume: u64, count: u64) -> Result<std::ops::Range<u64>> {
        let mut inos = self.inos.lock();
        let free = inos.entry(volume).or_insert(0..0);
        if free.end - free.start < count {
            let batch = count.max(INO_BATCH);
            let key = keys::next_ino(volume);
            *free = self.meta.transact(Durability::Relaxed, |txn| {
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
        }
        let taken = free.start..free.start + count;
        free.start = taken.end;
        Ok(taken)
    }

    /// Completes an object durably. The returned guard owns it, since nothing points at it yet.
    pub(crate) fn finish(self: &Arc<Self>, mut writer: ObjectWriter) -> Result<FreshObject> {
        let object = self.complete(&mut writer)?;
        object.sync()?;
        Ok(object)
    }

    /// Completes an object. The returned guard owns it, since nothing points at it yet. A commit that will
    /// point at it requires [`FreshObject::prerequisite`].
    pub(crate) fn complete(self: &Arc<Self>, writer: &mut ObjectWriter) -> Result<FreshObject> {
        // The collection of this session finds what a failure leaves in the store.
        let finished = writer.complete().inspect_err(|_| self.session.leave_unclean())?;
        let Finished { object, unsynced } = finished;
        Ok(FreshObject { shared: Arc::clone(self), object, unsynced, settled: false })
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

impl Pack {
    /// The prerequisite that makes all appended bytes durable.
    pub(crate) fn prerequisite(&self) -> Arc<dyn Prerequisite> {
        match self {
            Self::Local(pack) => Arc::clone(pack) as Arc<dyn Prerequisite>,
            Self::RemotePack(pack) => Arc::clone(pack) as Arc<dyn Prerequisite>,
        }
    }
}

impl Prerequisite for LocalPack {
    fn make_durable(&self) -> Result<()> {
        Ok(self.sync()?)
    }
}

impl Prerequisite for RemotePack {
    fn make_durable(&self) -> Result<()> {
        Ok(self.sync()?)
    }

    fn linger(&self) -> Duration {
        RemotePack::linger(self)
    }
}

impl Prerequisite for Unsynced {
    fn make_durable(&self) -> Result<()> {
        Ok(self.sync()?)
    }
}

/// A complete object that no metadata points at yet. Dropping it deletes it.
#[derive(Debug)]
pub(crate) struct FreshObject {
    shared: Arc<Shared>,
    object: StoredObject,
    unsynced: Option<Arc<Unsynced>>,
    settled: bool,
}

impl FreshObject {
    pub(crate) fn object(&self) -> StoredObject {
        self.object
    }

    /// The prerequisite that makes it durable; `None` if it is.
    pub(crate) fn prerequisite(&self) -> Option<Arc<dyn Prerequisite>> {
        self.unsynced.as_ref().map(|unsynced| Arc::clone(unsynced) as Arc<dyn Prerequisite>)
    }

    /// Makes it durable.
    pub(crate) fn sync(&self) -> Result<()> {
        self.unsynced.as_ref().map_or(Ok(()), |unsynced| Ok(unsynced.sync()?))
    }

    /// Whether it was created through this open datafs.
    pub(crate) fn belongs_to(&self, shared: &Arc<Shared>) -> bool {
        Arc::ptr_eq(&self.shared, shared)
    }

    /// Releases ownership: a commit points at it now.
    pub(crate) fn settle(mut self) {
        self.settled = true;
    }

    /// Releases ownership when it is unknown whether a commit points at it: the object stays until the
    /// session is collected. A later commit that points at it still has to require
    /// [`FreshObject::prerequisite`].
    pub(crate) fn abandon(&mut self) {
        self.shared.session.leave_unclean();
        self.settled = true;
    }
}

impl Drop for FreshObject {
    fn drop(&mut self) {
        if self.settled {
            return;
        }
        if let Err(error) = self.shared.pool.delete(self.object.id) {
            tracing::warn!(object = %self.object.id, %error, "deleting an object that was not published");
            self.shared.session.leave_unclean();
        }
    }
}

/// Creates a folder and its missing parents durably: everything durable is below it.
fn create_dir(path: &Path) -> Result<()> {
    let missing = path.ancestors().take_while(|folder| !folder.exists()).count();
    private::create_dir_all(path).map_err(|e| Error::io("create folder", path, e))?;
    for parent in path.ancestors().skip(1).take(missing) {
        let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
        fs::File::open(parent)
            .and_then(|folder| folder.sync_all())
            .map_err(|e| Error::io("sync folder", parent, e))?;
    }
    Ok(())
}
