//! The object pool: writes, reads, lists and deletes the objects of one store.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::future::ready;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use futures::TryStreamExt as _;
use object_store::local::LocalFileSystem;
use object_store::{ObjectStore, ObjectStoreExt as _};
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng};

use super::durable;
use super::error::{ObjectError, Result};
#[cfg(test)]
use super::object::StoredObject;
use super::object::{Layout, ObjectId, SUMS_SUFFIX};
#[cfg(test)]
use super::pack::Piece;
use super::pack_reader::OpenPacks;
use super::reader::OpenObjects;
use super::runtime::IoRuntime;
use super::writer::ObjectWriter;

/// The objects of one store. A clone is another handle to the same pool; all may be used from any
/// thread, inside or outside of an async runtime, and block until the store has answered.
#[derive(Debug, Clone)]
pub(crate) struct ObjectPool {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    store: Arc<dyn ObjectStore>,
    /// Directory of the local store.
    root: PathBuf,
    runtime: Arc<IoRuntime>,
    open: OpenObjects,
    packs: OpenPacks,
    /// What the names of this process's objects begin with.
    session: u64,
    /// The rest of their names.
    random: Mutex<StdRng>,
    /// Fan-out directories whose own names this process has synced.
    named: Box<[AtomicBool; 256]>,
}

/// How full the store is, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StoreSpace {
    /// Size of the store.
    pub(crate) total_bytes: u64,
    /// Not used by anything.
    pub(crate) free_bytes: u64,
    /// Usable without privilege.
    pub(crate) available_bytes: u64,
}

impl ObjectPool {
    /// Opens the store in a local directory, which is created when missing. New objects are named
    /// after `session`, which no other process uses.
    pub(crate) fn open_local(root: &Path, session: u64) -> Result<ObjectPool> {
        fs::create_dir_all(root).map_err(|e| ObjectError::io("create object store directory", root, e))?;
        let root =
            root.canonicalize().map_err(|e| ObjectError::io("open object store directory", root, e))?;
        let store = LocalFileSystem::new_with_prefix(&root)
            .map_err(|e| ObjectError::store("open", &root.display().to_string(), e))?;
        let runtime = IoRuntime::start()
            .map_err(|e| ObjectError::io("start the threads of the object store", &root, e))?;
        let random = seeded().map_err(|e| ObjectError::io("seed object names for", &root, e))?;
        Ok(ObjectPool {
            shared: Arc::new(Shared {
                session,
                random: Mutex::new(random),
                store: Arc::new(store),
                open: OpenObjects::new(root.clone()),
                packs: OpenPacks::new(root.clone()),
                root,
                runtime: Arc::new(runtime),
                named: Box::new([const { AtomicBool::new(false) }; 256]),
            }),
        })
    }

    /// A name that no other object has.
    pub(super) fn new_id(&self, layout: Layout) -> ObjectId {
        ObjectId::new(self.shared.session, self.shared.random.lock().random(), layout)
    }

    /// The runtime on which the crate's futures run.
    pub(crate) fn runtime(&self) -> &Arc<IoRuntime> {
        &self.shared.runtime
    }

    /// Starts a new object. Nothing is on the store before [`ObjectWriter::complete`]; dropping the
    /// writer before that leaves nothing behind.
    pub(crate) fn writer(&self) -> ObjectWriter {
        ObjectWriter::new(self.clone())
    }

    /// Stores one object; durable when it returns.
    #[cfg(test)]
    pub(crate) fn put(&self, bytes: &[u8]) -> Result<StoredObject> {
        let mut writer = self.writer();
        writer.append(bytes)?;
        writer.finish()
    }

    /// Exactly the bytes `range` of an object; otherwise as [`ObjectPool::read_into`].
    #[cfg(test)]
    pub(crate) fn read(&self, id: ObjectId, range: std::ops::Range<u64>) -> Result<bytes::Bytes> {
        self.shared.open.get(id)?.read(range)
    }

    /// Fills `buffer` with the bytes of an object from `offset` on, verified. Fails with
    /// [`ObjectError::Corrupt`] when the object has fewer bytes than that.
    pub(crate) fn read_into(&self, id: ObjectId, offset: u64, buffer: &mut [u8]) -> Result<()> {
        self.read_part(id, offset, offset, buffer)
    }

    /// [`ObjectPool::read_into`] of a part of an extent that begins at `start` of the object.
    pub(crate) fn read_part(&self, id: ObjectId, start: u64, offset: u64, buffer: &mut [u8]) -> Result<()> {
        match id.layout() {
            Layout::Pack => self.shared.packs.get(id)?.read_into(start, offset, buffer),
            Layout::Framed | Layout::Plain => self.shared.open.get(id)?.read_into(offset, buffer),
        }
    }

    #[cfg(test)]
    /// The pieces of a pack, up to its end or to a torn tail: where the data of each is, and whose it
    /// was.
    pub(crate) fn pack_pieces(&self, id: ObjectId) -> Result<Vec<(u64, Piece)>> {
        self.shared.packs.get(id)?.pieces()
    }

    /// The file that holds the object's data and nothing else; `None` when the object is too small to
    /// have one. What is read from it is not verified.
    pub(crate) fn image(&self, id: ObjectId) -> Result<Option<File>> {
        if id.layout() != Layout::Plain {
            return Ok(None);
        }
        let path = self.shared.root.join(id.data_name());
        match File::open(&path) {
            Ok(file) => Ok(Some(file)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Err(ObjectError::Missing { id }),
            Err(e) => Err(ObjectError::io("open object file", path, e)),
        }
    }

    /// Deletes an object; one that is not there is deleted already. A reader that has it open in
    /// this process reads on for a while; afterwards it sees [`ObjectError::Missing`].
    pub(crate) fn delete(&self, id: ObjectId) -> Result<()> {
        self.shared.open.forget(id);
        self.shared.packs.forget(id);
        self.delete_name(id.data_path())?;
        if id.layout() == Layout::Plain {
            self.delete_name(id.sums_path())?;
        }
        Ok(())
    }

    fn delete_name(&self, name: object_store::path::Path) -> Result<()> {
        match self.on_store("delete", move |store| async move { store.delete(&name).await }) {
            Err(ObjectError::Store { source, .. }) if is_not_found(source.as_ref()) => Ok(()),
            other => other,
        }
    }

    /// The objects on the store that a session wrote, also those that nobody points at, in order of
    /// id. Looks through the whole store.
    pub(crate) fn list_session(&self, session: u64) -> Result<Vec<ObjectId>> {
        let ids: BTreeSet<ObjectId> = self.on_store("list", move |store| async move {
            let id = |entry: object_store::ObjectMeta| -> Option<ObjectId> {
                let name = entry.location.filename()?;
                name.strip_suffix(SUMS_SUFFIX).unwrap_or(name).parse().ok()
            };
            let ours = |id: &ObjectId| id.session() == session;
            store.list(None).try_filter_map(|entry| ready(Ok(id(entry).filter(ours)))).try_collect().await
        })?;
        Ok(ids.into_iter().collect())
    }

    /// Shows everything in the store, in no order: object, whether that is its data (else the sidecar of
    /// its checksums), and bytes. Bounded in memory: one 256th of the store at a time.
    pub(crate) fn survey(&self, visit: &mut dyn FnMut(ObjectId, bool, u64)) -> Result<()> {
        for fan_out in 0..=u8::MAX {
            let prefix = object_store::path::Path::from(format!("{fan_out:02x}"));
            let page: Vec<(ObjectId, bool, u64)> = self.on_store("list", move |store| async move {
                let entry = |entry: object_store::ObjectMeta| {
                    let name = entry.location.filename()?;
                    let data = name.strip_suffix(SUMS_SUFFIX);
                    Some((data.unwrap_or(name).parse().ok()?, data.is_none(), entry.size))
                };
                store.list(Some(&prefix)).try_filter_map(|e| ready(Ok(entry(e)))).try_collect().await
            })?;
            page.into_iter().for_each(|(id, is_data, bytes)| visit(id, is_data, bytes));
        }
        Ok(())
    }

    /// Removes what writers that died (a crash, a kill) have left half-written for longer than
    /// `age`. Returns how many files that were.
    pub(crate) fn remove_abandoned(&self, age: Duration) -> Result<u64> {
        let mut removed = 0;
        let Some(before) = SystemTime::now().checked_sub(age) else { return Ok(0) };
        for fan_out in 0..=u8::MAX {
            let directory = self.shared.root.join(format!("{fan_out:02x}"));
            let entries = match fs::read_dir(&directory) {
                Ok(entries) => entries,
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(ObjectError::io("list object directory", directory, e)),
            };
            for entry in entries {
                let entry = entry.map_err(|e| ObjectError::io("list object directory", &directory, e))?;
                // The local store writes to `NAME#N` and renames.
                if !entry.file_name().to_string_lossy().contains('#') {
                    continue;
                }
                let old = entry.metadata().and_then(|m| m.modified()).is_ok_and(|m| m < before);
                if old && fs::remove_file(entry.path()).is_ok() {
                    removed += 1;
                }
            }
        }
        Ok(removed)
    }

    #[cfg(test)]
    pub(crate) fn open_files(&self) -> usize {
        self.shared.open.len()
    }

    /// How full the store is.
    pub(crate) fn space(&self) -> Result<StoreSpace> {
        let root = &self.shared.root;
        let stat = nix::sys::statvfs::statvfs(root)
            .map_err(|e| ObjectError::io("get free space of", root, e.into()))?;
        let bytes = |blocks: u64| blocks.saturating_mul(stat.fragment_size());
        Ok(StoreSpace {
            total_bytes: bytes(stat.blocks()),
            free_bytes: bytes(stat.blocks_free()),
            available_bytes: bytes(stat.blocks_available()),
        })
    }

    /// Runs an object-store call on the crate's runtime and waits for it.
    pub(super) fn on_store<T, F, Fut>(&self, operation: &'static str, call: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(Arc<dyn ObjectStore>) -> Fut,
        Fut: Future<Output = object_store::Result<T>> + Send + 'static,
    {
        let future = call(Arc::clone(&self.shared.store));
        self.settle(operation, self.shared.runtime.wait(future))
    }

    /// Turns the outcome of a future of the runtime into a result of the pool.
    pub(super) fn settle<T>(
        &self,
        operation: &'static str,
        outcome: Option<object_store::Result<T>>,
    ) -> Result<T> {
        let place = || self.shared.root.display().to_string();
        match outcome {
            Some(result) => result.map_err(|e| ObjectError::store(operation, &place(), e)),
            None => Err(ObjectError::Store {
                operation,
                place: place(),
                source: "the object store's threads have stopped".into(),
            }),
        }
    }

    /// Makes what was just written under `name` survive a power failure, names included.
    pub(super) fn make_durable(&self, id: ObjectId, name: &str) -> Result<()> {
        durable::sync_file(&self.shared.root.join(name))?;
        self.make_name_durable(id)
    }

    /// Whether the objects are files of this machine, which are written in place.
    pub(super) fn is_local(&self) -> bool {
        true
    }

    /// Directory of the local store.
    pub(super) fn local_root(&self) -> &Path {
        &self.shared.root
    }

    /// A new file of the local store, open for reading and writing, and its path.
    pub(super) fn create_local(&self, name: &str) -> Result<(PathBuf, File)> {
        let path = self.shared.root.join(name);
        let create = || File::options().read(true).write(true).create_new(true).open(&path);
        let file = match create() {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let directory = path.parent().unwrap_or(&self.shared.root);
                fs::create_dir_all(directory)
                    .map_err(|e| ObjectError::io("create object directory", directory, e))?;
                create()
            }
            other => other,
        };
        match file {
            Ok(file) => Ok((path, file)),
            Err(e) => Err(ObjectError::io("create the file of an object at", path, e)),
        }
    }

    /// Makes the name of an object's file survive a power failure.
    pub(super) fn make_name_durable(&self, id: ObjectId) -> Result<()> {
        let path = self.shared.root.join(id.data_name());
        durable::sync_directory(path.parent().unwrap_or(&self.shared.root))?;
        let named = &self.shared.named[usize::from(id.fan_out())];
        if !named.load(Ordering::Acquire) {
            durable::sync_directory(&self.shared.root)?;
            named.store(true, Ordering::Release);
        }
        Ok(())
    }
}

/// A generator seeded by the operating system: names must differ between processes.
fn seeded() -> io::Result<StdRng> {
    let mut seed = <StdRng as SeedableRng>::Seed::default();
    File::open("/dev/urandom")?.read_exact(&mut seed)?;
    Ok(StdRng::from_seed(seed))
}

fn is_not_found(error: &(dyn std::error::Error + 'static)) -> bool {
    matches!(error.downcast_ref::<object_store::Error>(), Some(object_store::Error::NotFound { .. }))
}
