//! The object pool: writes, reads, lists and deletes the objects of one store.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use super::backend::Backend;
use super::cache::Cache;
use super::codec::Codec;
use super::deleted;
use super::error::{ObjectError, Result};
use super::evict::Bounds;
use super::keyring::Keyring;
#[cfg(test)]
use super::local::LocalStore;
use super::local_pack::{GrowingPacks, LocalPack};
use super::pack::{HEADER_BYTES, Piece};
use super::pack_reader::OpenPacks;
use super::reader::{OpenObject, OpenObjects};
use super::remote::Removal;
use super::remote_pack::{PendingPacks, RemotePackWriters};
use super::runtime::Io;
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
    backend: Backend,
    open: Arc<OpenObjects>,
    packs: Arc<OpenPacks>,
    growing: Arc<GrowingPacks>,
    pending: Arc<PendingPacks>,
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
            if config.cache_shared_bound && !root.file_name().is_some_and(Config::is_shared_cache_name) {
                return Err(crate::Error::Invalid(format!(
                    "cannot share the bound of the cache {}: its folder's name is not 32 lower-case hex digits; name \
                     another cache_dir, or leave cache_shared_bound out",
                    root.display()
                )));
            }
            let opened = Cache::open(&root, Bounds::of(config));
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
        let backend = Backend::over(store, session, keys, cache, config)?;
        let open = Arc::<OpenObjects>::default();
        let packs = Arc::new(OpenPacks::new(backend.local_root().to_owned()));
        deleted::look_after(backend.runtime(), &open);
        if backend.is_local() {
            deleted::look_after(backend.runtime(), &packs);
        }
        let pending = Arc::new(PendingPacks::new(config, backend.place()));
        Ok(ObjectPool { backend, open, packs, growing: Arc::default(), pending })
    }

    /// The store, and what its readers and writers share.
    pub(crate) fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Begins a pack of a local store.
    pub(super) fn begin_pack(&self) -> Result<Arc<LocalPack>> {
        let pack = Arc::new(LocalPack::begin(&self.backend, &self.packs)?);
        self.growing.add(&pack);
        Ok(pack)
    }

    /// The writers of packs for a remote store.
    pub(super) fn remote_pack_writers(&self) -> RemotePackWriters {
        RemotePackWriters::new(&self.backend, &self.open, &self.pending)
    }

    /// The name of the store in errors.
    pub(crate) fn place(&self) -> &str {
        self.backend.place()
    }

    /// The keys of encrypted objects.
    pub(crate) fn keys(&self) -> &Keyring {
        self.backend.keys()
    }

    /// Whether this process leaves an unfinished object in the store, which the garbage collector has to remove.
    pub(crate) fn has_left_behind(&self) -> bool {
        self.backend.has_left_behind()
    }

    /// The runtime on which the crate's futures run.
    pub(crate) fn runtime(&self) -> &Io {
        self.backend.runtime()
    }

    /// Starts a new object, encoded as `codec` says. It is not readable before [`ObjectWriter::complete`];
    /// dropping the writer before that removes it.
    pub(crate) fn writer(&self, codec: &Codec) -> Result<ObjectWriter> {
        match codec.is_plain() {
            true => Ok(ObjectWriter::new(self.backend.clone())),
            false => ObjectWriter::encoded(self.backend.clone(), codec),
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
        self.open.get(&self.backend, id)?.read(range)
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
        self.read_part_ahead(expected, id, start, offset, buffer, u64::MAX)
    }

    /// [`ObjectPool::read_part`] by a reader that ends at `ahead_to` of the object: nothing is fetched ahead from there on.
    pub(crate) fn read_part_ahead(
        &self,
        expected: &ExpectedKeys,
        id: ObjectId,
        start: u64,
        offset: u64,
        buffer: &mut [u8],
        ahead_to: u64,
    ) -> Result<()> {
        match id.layout() {
            Layout::Pack => {
                self.growing.write_out(id, offset.saturating_add(buffer.len() as u64))?;
                return self.packs.read_into(id, start, offset, buffer);
            }
            Layout::RemotePack if self.pending.read_into(id, offset, buffer)? => return Ok(()),
            _ => {}
        }
        let mut read = |object: &OpenObject| {
            object.check_protection(expected).and_then(|()| object.read_into(offset, buffer, ahead_to))
        };
        let object = self.open.get(&self.backend, id)?;
        match (read(&object), self.backend.cache()) {
            // The cached copy may be damaged while the original is not.
            (Err(ObjectError::Corrupt { .. }), Some(cache)) if object.is_copy() => {
                self.forget_copy(cache, id)
            }
            (Err(ObjectError::Protection { .. }), Some(cache)) => self.forget_copy(cache, id),
            (done, _) => return done,
        }
        read(&*self.open.get(&self.backend, id)?)
    }

    /// Drops the cached copy, so that the next read opens the object in the store.
    fn forget_copy(&self, cache: &Cache, id: ObjectId) {
        self.open.forget(id);
        cache.discard(id);
    }

    /// Brings all of an object into the cache; passes the bytes of each step to `progress`. Fetched frames
    /// are verified, frames in the cache are not verified again. Does nothing on a local store.
    pub(crate) fn warm(&self, id: ObjectId, progress: &mut dyn FnMut(u64)) -> Result<()> {
        if self.is_local() || self.pending.holds(id) {
            return Ok(());
        }
        let object = self.open.get(&self.backend, id)?;
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
        self.backend.cache().map_or(Ok(()), |cache| cache.settle())
    }

    /// Bytes of data in an object; not for packs of a local store.
    pub(crate) fn data_bytes(&self, id: ObjectId) -> Result<u64> {
        Ok(self.open.get(&self.backend, id)?.data_bytes())
    }

    /// The pieces of a pack, up to its end or to a torn tail: position of the data, and the header.
    pub(crate) fn pack_pieces(&self, id: ObjectId) -> Result<Vec<(u64, Piece)>> {
        if id.layout() == Layout::Pack {
            self.growing.write_out(id, u64::MAX)?;
            return self.packs.get(id)?.pieces();
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
        match self.backend.store() {
            Store::Local(local) => local.image(id).map(Some),
            Store::Remote(_) => {
                let object = self.open.get(&self.backend, id)?;
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
        self.open.forget(id);
        self.packs.forget(id);
        self.backend.delete(id)
    }

    /// [`ObjectPool::delete`] for many objects. Tries all.
    pub(crate) fn delete_all(&self, ids: &[ObjectId]) -> Removal {
        let Store::Remote(remote) = self.backend.store() else {
            let (mut gone, mut result) = (Vec::new(), Ok(()));
            for id in ids {
                match self.delete(*id) {
                    Ok(()) => gone.push(*id),
                    Err(error) => result = result.and(Err(error)),
                }
            }
            return Removal { gone, result, may_be_late: false };
        };
        for id in ids {
            self.open.forget(*id);
            if let Some(cache) = self.backend.cache() {
                cache.discard(*id);
            }
        }
        let (remote, ids) = (Arc::clone(remote), ids.to_vec());
        let done = self.runtime().wait(async move { remote.delete_all(ids).await });
        done.unwrap_or_else(|| Removal {
            gone: Vec::new(),
            result: self.backend.answer(None),
            may_be_late: true,
        })
    }

    /// The objects that a session wrote, including unreferenced ones, in order of id. Scans the whole of a
    /// local store. On a remote store, unfinished uploads of another session, which must be dead, are
    /// aborted.
    pub(crate) fn list_session(&self, session: u64) -> Result<Vec<ObjectId>> {
        let ids = match self.backend.store() {
            Store::Local(local) => local.list_session(session)?,
            Store::Remote(remote) => {
                let (remote, own) = (Arc::clone(remote), self.backend.session());
                self.backend.answer(self.runtime().wait(async move {
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
        match self.backend.store() {
            Store::Local(local) => local.survey(visit),
            Store::Remote(remote) => {
                let remote = Arc::clone(remote);
                let (sender, pages) = std::sync::mpsc::sync_channel(4);
                let done = self.runtime().start_future(async move { remote.survey(sender).await });
                // Ends when the listing has ended and its sender is gone.
                for page in pages {
                    page.into_iter().for_each(|(id, is_data, bytes)| visit(id, is_data, bytes));
                }
                self.backend.answer(done.wait())
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn open_files(&self) -> usize {
        self.open.len()
    }

    /// Total, free and available space of the store.
    pub(crate) fn space(&self) -> Result<StoreSpace> {
        match self.backend.store() {
            Store::Local(local) => local.space(),
            Store::Remote(_) => Ok(StoreSpace::BUCKET),
        }
    }

    /// Whether the store is local: objects are files that are written in place.
    pub(crate) fn is_local(&self) -> bool {
        self.backend.is_local()
    }

    /// The directory of the files that [`ObjectPool::image`] returns; `None` without a cache.
    pub(crate) fn image_root(&self) -> Option<&Path> {
        match self.is_local() {
            true => Some(self.backend.local_root()),
            false => self.backend.cache().map(|cache| cache.root()),
        }
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
