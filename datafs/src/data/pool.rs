//! The object pool: writes, reads, lists and deletes the objects of one store.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use millrace_leaf::random;
use object_store::PutPayload;
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng};

use super::cache::Cache;
use super::codec::Codec;
use super::deleted;
use super::error::{ObjectError, Result, threads_gone};
use super::keyring::Keyring;
#[cfg(test)]
use super::local::LocalStore;
use super::pack::{HEADER_BYTES, Piece};
use super::pack_reader::OpenPacks;
use super::reader::{OpenObject, OpenObjects};
use super::remote::RemoteStore;
use super::remote_pack::PendingPacks;
use super::runtime::{Io, IoRuntime};
use super::segment::Buffers;
use super::space::StoreSpace;
use super::store::Store;
use super::writer::ObjectWriter;
use crate::config::Config;
#[cfg(test)]
use crate::object::StoredObject;
use crate::object::{ExpectedKeys, Layout, ObjectId};

/// The objects of one store. A clone is another handle to the same pool; all may be used from any
/// thread, inside or outside of an async runtime, and block until the store has answered.
#[derive(Debug, Clone)]
pub(crate) struct ObjectPool {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    store: Store,
    runtime: IoRuntime,
    open: Arc<OpenObjects>,
    packs: Arc<OpenPacks>,
    pending: PendingPacks,
    keys: Keyring,
    /// Of a remote store, unless the configuration disables it.
    cache: Option<Arc<Cache>>,
    buffers: Arc<Buffers>,
    /// First half of the names of this process's objects.
    session: u64,
    /// Source of the second half.
    random: Mutex<StdRng>,
    /// An unfinished object is in the store and could not be removed.
    left_behind: AtomicBool,
}

impl ObjectPool {
    /// Opens the store that the configuration names. The names of new objects contain `session`; no other
    /// process uses the same one.
    pub(crate) fn open(home: &Path, config: &Config, session: u64) -> crate::error::Result<ObjectPool> {
        let keys = Keyring::open(config)?;
        let store = Store::open(home, config)?;
        let mut cache = None;
        if matches!(store, Store::Remote(_)) && config.cache_bytes_max > 0 {
            let root = config.cache_path(home);
            let opened = Cache::open(&root, config.cache_bytes_max, config.cache_free_bytes_min);
            let failed = |e| crate::Error::io("start the thread of the cache at", &root, e);
            cache = Some(Arc::new(opened.map_err(failed)?));
        }
        Ok(Self::over(store, session, keys, cache, config)?)
    }

    /// Opens the store in a local directory; creates the directory when it is missing.
    #[cfg(test)]
    pub(crate) fn open_local(root: &Path, session: u64) -> Result<ObjectPool> {
        let config = Config { read_buffers_bytes_max: 0, ..Config::default() };
        Self::over(Store::Local(LocalStore::open(root)?), session, Keyring::default(), None, &config)
    }

    fn over(
        store: Store,
        session: u64,
        keys: Keyring,
        cache: Option<Arc<Cache>>,
        config: &Config,
    ) -> Result<ObjectPool> {
        let failed = |operation, e| ObjectError::io(operation, store.place(), e);
        let runtime = IoRuntime::start().map_err(|e| failed("start the threads of the object store", e))?;
        // Names must differ between processes.
        let seed = random::bytes().map_err(|e| failed("seed object names for", e))?;
        let buffers = Arc::new(Buffers::new(config.read_buffers_bytes_max));
        if matches!(store, Store::Remote(_)) {
            runtime.io().start_future(Buffers::look_after(Arc::downgrade(&buffers)));
        }
        let (open, packs) =
            (Arc::<OpenObjects>::default(), Arc::new(OpenPacks::new(store.root().to_owned())));
        deleted::look_after(runtime.io(), &open);
        if matches!(store, Store::Local(_)) {
            deleted::look_after(runtime.io(), &packs);
        }
        Ok(ObjectPool {
            shared: Arc::new(Shared {
                session,
                random: Mutex::new(StdRng::from_seed(seed)),
                open,
                packs,
                pending: PendingPacks::new(config, store.place()),
                keys,
                cache,
                buffers,
                store,
                runtime,
                left_behind: AtomicBool::new(false),
            }),
        })
    }

    /// The keys of encrypted objects.
    pub(crate) fn keys(&self) -> &Keyring {
        &self.shared.keys
    }

    /// The local cache of a remote store.
    pub(super) fn cache(&self) -> Option<&Arc<Cache>> {
        self.shared.cache.as_ref()
    }

    /// The memory for segments of a remote store.
    pub(super) fn buffers(&self) -> &Arc<Buffers> {
        &self.shared.buffers
    }

    /// The packs that a remote store does not have yet.
    pub(super) fn pending(&self) -> &PendingPacks {
        &self.shared.pending
    }

    /// The store.
    pub(super) fn store(&self) -> &Store {
        &self.shared.store
    }

    /// Records that an unfinished object could not be removed from the store.
    pub(super) fn leave_behind(&self) {
        self.shared.left_behind.store(true, Ordering::Release);
    }

    /// Whether this process leaves an unfinished object in the store, which the garbage collector has to remove.
    pub(crate) fn has_left_behind(&self) -> bool {
        self.shared.left_behind.load(Ordering::Acquire)
    }

    /// A name that no other object has.
    pub(super) fn new_id(&self, layout: Layout) -> ObjectId {
        ObjectId::new(self.shared.session, self.shared.random.lock().random(), layout)
    }

    /// The runtime on which the crate's futures run.
    pub(crate) fn runtime(&self) -> &Io {
        self.shared.runtime.io()
    }

    /// Starts a new object, encoded as `codec` says. It is not readable before [`ObjectWriter::complete`];
    /// dropping the writer before that removes it.
    pub(crate) fn writer(&self, codec: &Codec) -> Result<ObjectWriter> {
        match codec.is_plain() {
            true => Ok(ObjectWriter::new(self.clone())),
            false => ObjectWriter::encoded(self.clone(), codec),
        }
    }

    /// Stores one object; it is durable when this returns.
    #[cfg(test)]
    pub(crate) fn put(&self, bytes: &[u8]) -> Result<StoredObject> {
        let mut writer = self.writer(&Codec::default())?;
        writer.append(bytes)?;
        writer.finish()
    }

    /// Exactly the bytes `range` of an object; otherwise as [`ObjectPool::read_into`].
    #[cfg(test)]
    pub(crate) fn read(&self, id: ObjectId, range: std::ops::Range<u64>) -> Result<bytes::Bytes> {
        self.shared.open.get(self, id)?.read(range)
    }

    /// Fills `buffer` with the bytes of an object from `offset` on, verified. Any protection of the object is
    /// accepted. Fails with [`ObjectError::Corrupt`] when the object has fewer bytes.
    pub(crate) fn read_into(&self, id: ObjectId, offset: u64, buffer: &mut [u8]) -> Result<()> {
        self.read_part(&ExpectedKeys::Unknown, id, offset, offset, buffer)
    }

    /// [`ObjectPool::read_into`] for a part of an extent that begins at `start` of the object. Fails with
    /// [`ObjectError::Protection`] when the object is not protected as its volume requires.
    pub(crate) fn read_part(
        &self,
        expected: &ExpectedKeys,
        id: ObjectId,
        start: u64,
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<()> {
        match id.layout() {
            Layout::Pack => return self.shared.packs.read_into(id, start, offset, buffer),
            Layout::RemotePack if self.shared.pending.read_into(id, offset, buffer)? => return Ok(()),
            _ => {}
        }
        let mut read = |object: &OpenObject| {
            object.check_protection(expected).and_then(|()| object.read_into(offset, buffer))
        };
        let object = self.shared.open.get(self, id)?;
        match (read(&object), self.cache()) {
            // The cached copy may be damaged while the original is not.
            (Err(ObjectError::Corrupt { .. }), Some(cache)) if object.is_copy() => {
                self.forget_copy(cache, id)
            }
            (Err(ObjectError::Protection { .. }), Some(cache)) => self.forget_copy(cache, id),
            (done, _) => return done,
        }
        read(&*self.shared.open.get(self, id)?)
    }

    /// Drops the cached copy, so that the next read opens the object in the store.
    fn forget_copy(&self, cache: &Cache, id: ObjectId) {
        self.shared.open.forget(id);
        cache.discard(id);
    }

    /// Brings all of an object into the cache; passes the bytes of each step to `progress`. Fetched frames
    /// are verified, frames in the cache are not verified again. Does nothing on a local store.
    pub(crate) fn warm(&self, id: ObjectId, progress: &mut dyn FnMut(u64)) -> Result<()> {
        if self.is_local() || self.shared.pending.holds(id) {
            return Ok(());
        }
        let object = self.shared.open.get(self, id)?;
        match object.remote() {
            Some(data) => data.warm(progress),
            None => {
                progress(object.data_bytes());
                Ok(())
            }
        }
    }

    /// Waits until the cache has written or dropped everything queued. Fails when the cache's thread has stopped.
    pub(crate) fn settle_cache(&self) -> Result<()> {
        self.cache().map_or(Ok(()), |cache| cache.settle())
    }

    /// Bytes of data in an object; not for packs of a local store.
    pub(crate) fn data_bytes(&self, id: ObjectId) -> Result<u64> {
        Ok(self.shared.open.get(self, id)?.data_bytes())
    }

    /// The pieces of a pack, up to its end or to a torn tail: position of the data, and the header.
    pub(crate) fn pack_pieces(&self, id: ObjectId) -> Result<Vec<(u64, Piece)>> {
        if id.layout() == Layout::Pack {
            self.shared.packs.write_out(id, u64::MAX)?;
            return self.shared.packs.get(id)?.pieces();
        }
        let mut bytes = vec![0; usize::try_from(self.data_bytes(id)?).unwrap_or(0)];
        self.read_into(id, 0, &mut bytes)?;
        Ok(gathered_pieces(id, &bytes))
    }

    /// The file that holds exactly the object's data. `None` unless the object is plain and, for a remote
    /// store, its cached image is complete. Reads from this file are not verified.
    pub(crate) fn image(&self, id: ObjectId) -> Result<Option<File>> {
        if id.layout() != Layout::Plain {
            return Ok(None);
        }
        match &self.shared.store {
            Store::Local(local) => local.image(id).map(Some),
            Store::Remote(_) => {
                let object = self.shared.open.get(self, id)?;
                let Some(data) = object.remote() else { return Ok(None) };
                let Some((cache, entry)) = &data.kept else { return Ok(None) };
                match cache.image(entry, || data.verify_image()) {
                    Ok(image) => Ok(image),
                    Err(error) => {
                        tracing::debug!(%error, object = %id, "looking for an image in the cache");
                        Ok(None)
                    }
                }
            }
        }
    }

    /// Deletes an object; a missing object is not an error. Another process that has the object open can
    /// read on while it reads at least once a second; afterwards it gets [`ObjectError::Missing`].
    pub(crate) fn delete(&self, id: ObjectId) -> Result<()> {
        self.shared.open.forget(id);
        self.shared.packs.forget(id);
        match &self.shared.store {
            Store::Local(local) => local.delete(id),
            Store::Remote(remote) => {
                if let Some(cache) = self.cache() {
                    cache.discard(id);
                }
                let remote = Arc::clone(remote);
                self.answer(self.runtime().wait(async move { remote.delete(id).await }))
            }
        }
    }

    /// [`ObjectPool::delete`] for many objects.
    pub(crate) fn delete_all(&self, ids: &[ObjectId]) -> Result<()> {
        let Store::Remote(remote) = &self.shared.store else {
            return ids.iter().try_for_each(|id| self.delete(*id));
        };
        for id in ids {
            self.shared.open.forget(*id);
            if let Some(cache) = self.cache() {
                cache.discard(*id);
            }
        }
        let (remote, ids) = (Arc::clone(remote), ids.to_vec());
        self.answer(self.runtime().wait(async move { remote.delete_all(ids).await }))
    }

    /// The objects that a session wrote, including unreferenced ones, in order of id. Scans the whole of a
    /// local store. On a remote store, unfinished uploads of another session, which must be dead, are
    /// aborted.
    pub(crate) fn list_session(&self, session: u64) -> Result<Vec<ObjectId>> {
        let ids = match &self.shared.store {
            Store::Local(local) => local.list_session(session)?,
            Store::Remote(remote) => {
                let (remote, own) = (Arc::clone(remote), self.shared.session);
                self.answer(self.runtime().wait(async move {
                    if session != own {
                        remote.take_back_session(session).await?;
                    }
                    remote.list_session(session).await
                }))?
            }
        };
        Ok(ids.into_iter().collect())
    }

    /// Calls `visit` for every file in the store, in no order: object, whether it is the data (else the
    /// checksum sidecar), and bytes. Memory is bounded.
    pub(crate) fn survey(&self, visit: &mut dyn FnMut(ObjectId, bool, u64)) -> Result<()> {
        match &self.shared.store {
            Store::Local(local) => local.survey(visit),
            Store::Remote(remote) => {
                let remote = Arc::clone(remote);
                let (sender, pages) = std::sync::mpsc::sync_channel(4);
                let done = self.runtime().start_future(async move { remote.survey(sender).await });
                // Ends when the listing has ended and its sender is gone.
                for page in pages {
                    page.into_iter().for_each(|(id, is_data, bytes)| visit(id, is_data, bytes));
                }
                self.answer(done.wait())
            }
        }
    }

    /// Removes unfinished files (after a crash or kill) from a local store once they are as old as `age_of`
    /// says for their session; `None` keeps the file. Returns the number of removed files.
    pub(crate) fn remove_abandoned(&self, age_of: &dyn Fn(u64) -> Option<Duration>) -> Result<u64> {
        match &self.shared.store {
            Store::Local(local) => local.remove_abandoned(age_of),
            Store::Remote(_) => Ok(0),
        }
    }

    #[cfg(test)]
    pub(crate) fn open_files(&self) -> usize {
        self.shared.open.len()
    }

    /// Total, free and available space of the store.
    pub(crate) fn space(&self) -> Result<StoreSpace> {
        match &self.shared.store {
            Store::Local(local) => local.space(),
            Store::Remote(_) => Ok(StoreSpace::BUCKET),
        }
    }

    /// Stores the data of a new object in a remote store with one request.
    pub(super) fn put_data(&self, id: ObjectId, pieces: Vec<Bytes>) -> Result<()> {
        let remote = self.remote()?;
        let payload = PutPayload::from_iter(pieces);
        let put = async move { remote.put_new(&remote.data_path(id), payload).await };
        self.answer(self.runtime().wait(put))
    }

    /// Stores the sidecar of a plain object in a remote store.
    pub(super) fn put_sums(&self, id: ObjectId, sums: Bytes) -> Result<()> {
        let remote = self.remote()?;
        let put = async move { remote.put_new(&remote.sums_path(id), PutPayload::from(sums)).await };
        self.answer(self.runtime().wait(put))
    }

    /// The packs that are open.
    pub(super) fn open_packs(&self) -> &OpenPacks {
        &self.shared.packs
    }

    /// Whether the store is local: objects are files that are written in place.
    pub(crate) fn is_local(&self) -> bool {
        matches!(self.shared.store, Store::Local(_))
    }

    /// Directory of the local store.
    pub(super) fn local_root(&self) -> &Path {
        self.shared.store.root()
    }

    /// The directory of the files that [`ObjectPool::image`] returns; `None` without a cache.
    pub(crate) fn image_root(&self) -> Option<&Path> {
        match self.is_local() {
            true => Some(self.local_root()),
            false => self.cache().map(|cache| cache.root()),
        }
    }

    /// The remote store; an error when the store is local.
    pub(super) fn remote(&self) -> Result<Arc<RemoteStore>> {
        match &self.shared.store {
            Store::Local(_) => self.answer(None),
            Store::Remote(remote) => Ok(Arc::clone(remote)),
        }
    }

    /// Creates a file in the local store, open for reading and writing; returns it with its path.
    pub(super) fn create_local(&self, name: &str) -> Result<(PathBuf, File)> {
        match &self.shared.store {
            Store::Local(local) => local.create(name),
            Store::Remote(_) => self.answer(None),
        }
    }

    /// Makes the name of an object's file survive a power failure.
    pub(super) fn make_name_durable(&self, id: ObjectId) -> Result<()> {
        match &self.shared.store {
            Store::Local(local) => local.make_name_durable(id),
            Store::Remote(_) => Ok(()),
        }
    }

    /// The result of a future; an error when the runtime is gone.
    pub(super) fn answer<T>(&self, outcome: Option<Result<T>>) -> Result<T> {
        outcome.unwrap_or_else(|| Err(threads_gone(self.shared.store.place())))
    }
}

/// Parses the pieces in the bytes of a whole gathered pack.
fn gathered_pieces(id: ObjectId, bytes: &[u8]) -> Vec<(u64, Piece)> {
    let (mut pieces, mut at) = (Vec::new(), 0);
    while let Some(header) = bytes.get(at..).and_then(|rest| rest.first_chunk::<HEADER_BYTES>())
        && let Some(piece) = Piece::decode(header, id, at as u64)
    {
        at += HEADER_BYTES;
        pieces.push((at as u64, piece));
        at += piece.len as usize;
    }
    pieces
}
