//! Backup and restore of all volumes: the metadata and the objects that it points at, for either metadata engine.
//!
//! A backup is a folder. `objects/` has the layout of a local store; `metadata.sqlite` says which of its
//! objects are part of the backup. A backup into a folder that has one adds objects, then replaces the
//! metadata in one step, then removes unreferenced objects. A crash leaves either the old or the new backup.
//!
//! While objects are copied, a *hold* in the metadata stops garbage collection in every process. The hold
//! belongs to the session of its process, so that a dead process holds nothing.
//!
//! A restore adds objects to the store, then replaces all metadata in one transaction. A crash leaves the
//! volumes either as they were or as in the backup; `fsck` finds objects that nothing points at afterwards.
//! It needs no object that a suspended process may still delete, or it fails (`deletion.rs`).

mod file;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use millrace_leaf::error_chain;
use millrace_leaf::{atomic_file, private};
use nix::fcntl::{Flock, FlockArg};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use self::file::BackupFile;
use crate::config::Config;
use crate::data::{Copied, sync_names};
use crate::datafs::{self, Datafs};
use crate::deletion_record::Pending;
use crate::error::{Error, Result};
use crate::failpoint;
use crate::fs::shared::Shared;
use crate::identity::{StoreId, StoreRow, check_known_keys};
use crate::meta::codec::{Decoder, Encoder};
use crate::meta::engine::{Durability, Pair};
use crate::meta::inode::Timestamp;
use crate::meta::keys;
use crate::object::ObjectId;
use crate::session::{self, DeadSession};

/// Format version of the folder.
const FORMAT: u32 = 1;
/// The file that marks a folder as a backup and names its store.
const ABOUT: &str = "backup.json";
const LOCK: &str = "backup.lock";
const METADATA: &str = "metadata.sqlite";
const PARTIAL: &str = "metadata.sqlite.partial";
const OBJECTS: &str = "objects";
/// Threads that copy objects.
const PARALLEL: usize = 8;

/// The result of a backup.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct BackupReport {
    /// Objects in the backup.
    pub objects: u64,
    /// Bytes that were copied. Objects of an earlier backup in the folder are not copied again.
    pub bytes: u64,
    /// Objects that the volumes need but the store lacks: damage, which `fsck` describes.
    pub missing: u64,
    /// Objects of earlier backups that were removed.
    pub removed: u64,
}

/// The result of a restore.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct RestoreReport {
    /// Objects that the volumes need.
    pub objects: u64,
    /// Bytes that were copied into the store. Objects that it already had are not copied.
    pub bytes: u64,
    /// Objects that were already missing when the backup was made.
    pub missing: u64,
}

/// A callback with the bytes copied so far; `false` cancels the work.
type Progress<'a> = &'a (dyn Fn(u64) -> bool + Sync);

impl Datafs {
    /// Writes a backup of all volumes and snapshots, as of one moment during the call. The folder must be
    /// missing, empty, or hold a backup of the same store. The volumes stay usable meanwhile.
    pub fn backup(&self, to: &Path, progress: Progress<'_>) -> Result<BackupReport> {
        let shared = &self.shared;
        let store = shared.meta.view(StoreRow::get)?.filter(|row| row.marked).ok_or_else(|| {
            Error::Invalid(
                "which object store belongs to the metadata is not recorded yet: open it again".into(),
            )
        })?;
        let folder = Folder::make(to, store.id)?;
        let hold = Hold::take(shared)?;
        failpoint::hit("backup-held");
        let file = BackupFile::create(&folder.path(PARTIAL))?;
        shared.meta.view_committed(|txn| file.fill(txn))?;
        failpoint::hit("backup-metadata-copied");
        let objects = folder.path(OBJECTS);
        let file = Mutex::new(file);
        let copied =
            for_each_object(&file, progress, |id| match shared.pool.backend().export(id, &objects)? {
                Copied::Missing => file.lock().note_missing(id).map(|()| Copied::Missing),
                copied => Ok(copied),
            })?;
        sync_names(&objects)?;
        file.into_inner().finish()?;
        failpoint::hit("backup-objects-copied");
        // If the hold was lost, objects may have been deleted before they were copied.
        hold.release()?;
        folder.replace_metadata()?;
        failpoint::hit("backup-finished");
        let removed = folder.remove_unused()?;
        Ok(BackupReport { objects: copied.objects, bytes: copied.bytes, missing: copied.missing, removed })
    }

    /// Replaces all volumes of a home by those of a backup. Fails with [`Error::InUse`] while another process
    /// has them open. The store may be a different one than the backup's; its other objects stay.
    ///
    /// A store that belongs to other volumes is refused unless `take_store` says that those are gone for
    /// good. They can no longer be opened afterwards.
    pub fn restore(
        home: &Path,
        config: &Config,
        from: &Path,
        take_store: bool,
        progress: Progress<'_>,
    ) -> Result<RestoreReport> {
        let folder = Folder::open(from)?;
        let file = BackupFile::open(&folder.path(METADATA))?;
        let shared = datafs::open_shared(home, &Config { gc_interval_ms: 0, ..config.clone() })?;
        let prefix = keys::encryption_keys();
        check_known_keys(file.page(&prefix, &keys::after_prefix(&prefix), usize::MAX)?, &shared.pool)?;
        // The hold comes first: a process that opens the volumes after it collects nothing.
        let hold = Hold::take(&shared)?;
        check_alone(&shared)?;
        let pending = if take_store { Pending::default() } else { Pending::read(&shared.meta)? };
        pending.check(|object| file.refers_to(object))?;
        let store = own_store(&shared, take_store)?;
        failpoint::hit("restore-held");
        let objects = folder.path(OBJECTS);
        let file = Mutex::new(file);
        let copied =
            for_each_object(&file, progress, |id| match shared.pool.backend().import(id, &objects)? {
                Copied::Missing if !file.lock().was_missing(id)? => Err(Error::corrupt(
                    format!("the backup in {}", from.display()),
                    format!("object {id} is missing there and in the object store"),
                )),
                copied => Ok(copied),
            })?;
        failpoint::hit("restore-objects-copied");
        let file = file.into_inner();
        let store = match store {
            Some(id) => id,
            None => mark_anew(&shared)?,
        };
        failpoint::hit("restore-marked");
        let mut pairs = restored(&shared, &file, store)?.chain(pending.records().iter().cloned().map(Ok));
        shared.meta.replace(&mut || hold.check().and_then(|()| check_alone(&shared)), &mut pairs)?;
        failpoint::hit("restore-finished");
        Ok(RestoreReport { objects: copied.objects, bytes: copied.bytes, missing: copied.missing })
    }
}

/// The id of the store to restore into; `None` if the store has to be marked.
fn own_store(shared: &Shared, take_store: bool) -> Result<Option<StoreId>> {
    let marked = match StoreId::of(&shared.pool) {
        Ok(Some(id)) => id,
        Ok(None) | Err(Error::Corrupt { .. }) => return Ok(None),
        Err(error) => return Err(error),
    };
    let own = shared.meta.view(StoreRow::get)?.map(|row| row.id);
    if own == Some(marked) {
        return Ok(own);
    }
    if take_store {
        return Ok(None);
    }
    Err(Error::Invalid(format!(
        "cannot restore into the object store at {}: it belongs to the volumes of another home, which would share \
         its objects; use an empty store or, if that home is gone for good, take its store (--take-store)",
        shared.pool.place()
    )))
}

/// Marks the store: with the id in the metadata if the marker was lost, else with a new one. Never with the
/// id of the backup's store, which may still be in use.
fn mark_anew(shared: &Shared) -> Result<StoreId> {
    let is_marked = matches!(StoreId::of(&shared.pool), Ok(Some(_)));
    let own = shared.meta.view(StoreRow::get)?.map(|row| row.id).filter(|_| !is_marked);
    let id = own.map_or_else(StoreId::draw, Ok)?;
    id.mark(&shared.pool)?;
    Ok(id)
}

/// The new metadata: that of the backup, with this store and this process's session.
fn restored<'a>(
    shared: &Shared,
    file: &'a BackupFile,
    store: StoreId,
) -> Result<impl Iterator<Item = Result<Pair>> + use<'a>> {
    let own = shared.session.id();
    let set = [
        (keys::STORE.to_vec(), StoreRow { id: store, marked: true }.encode()),
        (keys::ROSTER.to_vec(), own.to_be_bytes().to_vec()),
        (keys::session(own), session::row()),
    ];
    // From here on, the history of this metadata is another one than that of the backup: it draws its own number.
    let left_out = [keys::STORE, keys::ROSTER, keys::BATCH, keys::NUMBER].map(<[u8]>::to_vec);
    // Sessions in the backup may be alive elsewhere: this home must not collect their objects.
    let prefixes = [
        keys::holds(),
        keys::sessions(),
        keys::sessions_in_cleanup(),
        keys::completed_requests(),
        keys::deletions(),
        // In the backup of a program that did not know this table.
        keys::derived(),
    ];
    let kept = move |pair: &Result<Pair>| match pair {
        Ok((key, _)) => !left_out.contains(key) && !prefixes.iter().any(|prefix| key.starts_with(prefix)),
        Err(_) => true,
    };
    Ok(file.pairs().filter(kept).chain(set.map(Ok)))
}

/// Fails while another process has the volumes open.
fn check_alone(shared: &Shared) -> Result<()> {
    let mut others = session::files(&shared.sessions_dir)?;
    shared.meta.each(&keys::sessions(), |key, _| {
        others.push(Decoder::new("session key", &key[1..]).u64()?);
        Ok(())
    })?;
    for other in others.into_iter().filter(|id| *id != shared.session.id()) {
        if DeadSession::claim(&shared.meta, &shared.sessions_dir, other)?.is_none() {
            return Err(Error::InUse { place: shared.place_of_metadata() });
        }
    }
    Ok(())
}

/// A hold on garbage collection in all processes, for as long as its session lives.
struct Hold {
    shared: Arc<Shared>,
    released: bool,
}

impl Hold {
    fn take(shared: &Arc<Shared>) -> Result<Hold> {
        let (seconds, nanos) = Timestamp::now().parts();
        let since = Encoder::default().i64(seconds).u32(nanos).finish();
        let key = keys::hold(shared.session.id());
        shared.meta.transact(Durability::Durable, |txn| {
            if txn.get(&key)?.is_some() {
                return Err(Error::InUse { place: shared.place_of_metadata() });
            }
            txn.put(&key, &since)
        })?;
        Ok(Hold { shared: Arc::clone(shared), released: false })
    }

    /// Fails when another process declared this one dead and removed the hold: objects may be gone.
    fn check(&self) -> Result<()> {
        let key = keys::hold(self.shared.session.id());
        match self.shared.meta.view_committed(|txn| txn.get(&key))? {
            Some(_) => Ok(()),
            None => Err(hold_lost()),
        }
    }

    /// Ends the hold. Fails like [`Hold::check`].
    fn release(mut self) -> Result<()> {
        let key = keys::hold(self.shared.session.id());
        self.shared.meta.transact(Durability::Relaxed, |txn| match txn.get(&key)? {
            Some(_) => txn.delete(&key),
            None => Err(hold_lost()),
        })?;
        self.released = true;
        Ok(())
    }
}

fn hold_lost() -> Error {
    Error::Stale { what: "the hold on garbage, because this process was taken for dead,".into() }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.released {
            return;
        }
        let key = keys::hold(self.shared.session.id());
        if let Err(error) = self.shared.meta.transact(Durability::Relaxed, |txn| txn.delete(&key)) {
            tracing::warn!(
                error = error_chain::one_line(&error),
                "garbage is not deleted before this process has ended"
            );
        }
    }
}

/// Totals over all copied objects.
struct Sum {
    objects: u64,
    bytes: u64,
    missing: u64,
}

/// Calls `copy` for every object that the metadata points at, from several threads.
fn for_each_object(
    file: &Mutex<BackupFile>,
    progress: Progress<'_>,
    copy: impl Fn(ObjectId) -> Result<Copied> + Sync,
) -> Result<Sum> {
    let prefix = keys::all_references();
    let (next, end) = (Mutex::new(prefix.clone()), keys::after_prefix(&prefix));
    let [objects, bytes, missing] = [const { AtomicU64::new(0) }; 3];
    let (failed, stopped) = (Mutex::new(None), AtomicBool::new(false));
    let page = || -> Result<Vec<ObjectId>> {
        let mut start = next.lock();
        let page = file.lock().page(&start, &end, 64)?;
        if let Some((last, _)) = page.last() {
            *start = [last.as_slice(), &[0]].concat();
        }
        let id = |(key, _): &Pair| Ok(ObjectId::from_bytes(Decoder::new("object key", &key[1..]).array()?));
        page.iter().map(id).collect()
    };
    let work = || -> Result<()> {
        loop {
            let page = page()?;
            if page.is_empty() {
                return Ok(());
            }
            for id in page {
                if stopped.load(Ordering::Relaxed) {
                    return Ok(());
                }
                match copy(id)? {
                    Copied::Bytes(written) => drop(bytes.fetch_add(written, Ordering::Relaxed)),
                    Copied::Missing => drop(missing.fetch_add(1, Ordering::Relaxed)),
                }
                objects.fetch_add(1, Ordering::Relaxed);
                if !progress(bytes.load(Ordering::Relaxed)) {
                    let source = io::Error::from(io::ErrorKind::Interrupted);
                    return Err(Error::Io {
                        operation: "copy objects to or from",
                        path: OBJECTS.into(),
                        source,
                    });
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..PARALLEL {
            scope.spawn(|| {
                if let Err(error) = work() {
                    stopped.store(true, Ordering::Relaxed);
                    failed.lock().get_or_insert(error);
                }
            });
        }
    });
    match failed.into_inner() {
        Some(error) => Err(error),
        None => Ok(Sum {
            objects: objects.into_inner(),
            bytes: bytes.into_inner(),
            missing: missing.into_inner(),
        }),
    }
}

#[derive(Serialize, Deserialize)]
struct About {
    format: u32,
    store: String,
}

impl About {
    /// Refuses a folder that holds the backup of another store.
    fn check_store(&self, root: &Path, store: StoreId) -> Result<()> {
        if self.store == store.to_string() {
            return Ok(());
        }
        Err(Error::Invalid(format!(
            "{} holds a backup of another object store ({}): name another folder",
            root.display(),
            self.store
        )))
    }
}

/// A locked backup folder.
struct Folder {
    root: PathBuf,
    _lock: Flock<File>,
}

impl Folder {
    fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// Opens or creates the folder for backups of a store. A folder with other content is refused.
    fn make(root: &Path, store: StoreId) -> Result<Folder> {
        let fail = |e| Error::io("make folder", root, e);
        private::create_dir_all(root).map_err(fail)?;
        let empty = fs::read_dir(root).map_err(fail)?.next().is_none();
        match read_about(root)? {
            // At most what a backup left that was killed before it wrote `backup.json`.
            None if empty || is_begun(root)? => {}
            None => {
                return Err(Error::Invalid(format!(
                    "{} holds other files and no backup: name a folder that is missing or empty",
                    root.display()
                )));
            }
            Some(about) => about.check_store(root, store)?,
        }
        let lock = lock(root, FlockArg::LockExclusiveNonblock, true)?;
        // Another backup may have begun between the check and the lock.
        if let Some(about) = read_about(root)? {
            about.check_store(root, store)?;
        }
        let folder = Folder { root: root.to_owned(), _lock: lock };
        let objects = folder.path(OBJECTS);
        private::create_dir_all(&objects).map_err(fail)?;
        let about = serde_json::json!(About { format: FORMAT, store: store.to_string() }).to_string() + "\n";
        let partial = folder.path("backup.json.partial");
        atomic_file::replace(&folder.path(ABOUT), &partial, about.as_bytes()).map_err(fail)?;
        failpoint::hit("backup-begun");
        folder.sync()?;
        Ok(folder)
    }

    /// Opens a folder that holds a complete backup.
    fn open(root: &Path) -> Result<Folder> {
        let missing = || Error::not_found(format!("a complete backup in {}", root.display()));
        let about = read_about(root)?.ok_or_else(missing)?;
        if about.format > FORMAT {
            let place = root.join(ABOUT).display().to_string();
            return Err(Error::NewerFormat { place, found: about.format, supported: FORMAT });
        }
        let lock = lock(root, FlockArg::LockSharedNonblock, false)?;
        let folder = Folder { root: root.to_owned(), _lock: lock };
        if folder.path(METADATA).exists() { Ok(folder) } else { Err(missing()) }
    }

    /// Replaces the metadata by the new one, durably.
    fn replace_metadata(&self) -> Result<()> {
        let to = self.path(METADATA);
        fs::rename(self.path(PARTIAL), &to).map_err(|e| Error::io("rename to", to, e))?;
        self.sync()
    }

    fn sync(&self) -> Result<()> {
        File::open(&self.root).and_then(|f| f.sync_all()).map_err(|e| Error::io("sync folder", &self.root, e))
    }

    /// Removes objects and unfinished files that the backup does not need. Returns the number of objects.
    fn remove_unused(&self) -> Result<u64> {
        let file = BackupFile::open(&self.path(METADATA))?;
        let (objects, mut removed) = (self.path(OBJECTS), 0);
        let fail = |e| Error::io("list", &objects, e);
        for directory in fs::read_dir(&objects).map_err(fail)? {
            let directory = directory.map_err(fail)?.path();
            if !directory.is_dir() {
                continue;
            }
            for entry in fs::read_dir(&directory).map_err(fail)? {
                let path = entry.map_err(fail)?.path();
                let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
                let id = name.strip_suffix(".sums").unwrap_or(name).parse::<ObjectId>();
                match id {
                    Ok(id) if file.refers_to(id)? => continue,
                    Ok(id) => removed += u64::from(name == id.to_string()),
                    // An unfinished file of a killed backup is `NAME#PID`.
                    Err(()) if name.contains('#') => {}
                    Err(()) => continue,
                }
                fs::remove_file(&path).map_err(|e| Error::io("remove", &path, e))?;
            }
        }
        Ok(removed)
    }
}

fn read_about(root: &Path) -> Result<Option<About>> {
    let path = root.join(ABOUT);
    match fs::read(&path) {
        Ok(text) => {
            let damaged = |e: serde_json::Error| Error::corrupt(path.display().to_string(), e.to_string());
            serde_json::from_slice(&text).map(Some).map_err(damaged)
        }
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
        Err(e) => Err(Error::io("read", path, e)),
    }
}

/// Whether a folder holds only what [`Folder::make`] creates before it writes `backup.json`.
fn is_begun(root: &Path) -> Result<bool> {
    let fail = |e| Error::io("list", root, e);
    for entry in fs::read_dir(root).map_err(fail)? {
        let name = entry.map_err(fail)?.file_name();
        if ![LOCK, OBJECTS, "backup.json.partial"].iter().any(|known| name == **known) {
            return Ok(false);
        }
    }
    Ok(root.join(LOCK).exists())
}

fn lock(root: &Path, how: FlockArg, create: bool) -> Result<Flock<File>> {
    let path = root.join(LOCK);
    let file = private::options().read(true).write(create).create(create).open(&path);
    let file = file.map_err(|e| Error::io("open", &path, e))?;
    Flock::lock(file, how).map_err(|(_, errno)| match errno {
        nix::errno::Errno::EWOULDBLOCK => {
            Error::Invalid(format!("the backup in {} is being made or restored: wait for it", root.display()))
        }
        errno => Error::io("lock", path, errno.into()),
    })
}

#[cfg(test)]
mod tests;
