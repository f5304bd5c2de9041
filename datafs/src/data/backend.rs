//! The backend of a pool: the store, with the threads, keys, cache and buffers that its readers and writers share.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use millrace_leaf::random;
use object_store::PutPayload;
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng};

use super::cache::Cache;
use super::error::{ObjectError, Result, threads_gone};
use super::keyring::Keyring;
use super::remote::RemoteStore;
use super::runtime::{Io, IoRuntime};
use super::segment::Buffers;
use super::store::Store;
use crate::config::Config;
use crate::object::{Layout, ObjectId};

/// A store, and what its readers and writers share. A clone is another handle to the same backend.
#[derive(Debug, Clone)]
pub(crate) struct Backend {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    store: Store,
    runtime: IoRuntime,
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

impl Backend {
    /// Starts the threads for a store.
    pub(super) fn over(
        store: Store,
        session: u64,
        keys: Keyring,
        cache: Option<Arc<Cache>>,
        config: &Config,
    ) -> Result<Backend> {
        let failed = |operation, e| ObjectError::io(operation, store.place(), e);
        let runtime = IoRuntime::start().map_err(|e| failed("start the threads of the object store", e))?;
        // Names must differ between processes.
        let seed = random::bytes().map_err(|e| failed("seed object names for", e))?;
        let buffers = Arc::new(Buffers::new(config.read_buffers_bytes_max));
        if matches!(store, Store::Remote(_)) {
            runtime.io().start_future(Buffers::look_after(Arc::downgrade(&buffers)));
        }
        Ok(Backend {
            shared: Arc::new(Shared {
                session,
                random: Mutex::new(StdRng::from_seed(seed)),
                keys,
                cache,
                buffers,
                store,
                runtime,
                left_behind: AtomicBool::new(false),
            }),
        })
    }

    /// The store.
    pub(super) fn store(&self) -> &Store {
        &self.shared.store
    }

    /// The name of the store in errors.
    pub(super) fn place(&self) -> &str {
        self.store().place()
    }

    /// Whether the store is local: objects are files that are written in place.
    pub(super) fn is_local(&self) -> bool {
        matches!(self.shared.store, Store::Local(_))
    }

    /// Directory of the local store.
    pub(super) fn local_root(&self) -> &Path {
        self.shared.store.root()
    }

    /// The remote store; an error when the store is local.
    pub(super) fn remote(&self) -> Result<Arc<RemoteStore>> {
        match self.store() {
            Store::Local(_) => self.answer(None),
            Store::Remote(remote) => Ok(Arc::clone(remote)),
        }
    }

    /// The keys of encrypted objects.
    pub(super) fn keys(&self) -> &Keyring {
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

    /// The runtime on which the crate's futures run.
    pub(super) fn runtime(&self) -> &Io {
        self.shared.runtime.io()
    }

    /// The result of a future; an error when the runtime is gone.
    pub(super) fn answer<T>(&self, outcome: Option<Result<T>>) -> Result<T> {
        outcome.unwrap_or_else(|| Err(threads_gone(self.place())))
    }

    /// The session in the names of this process's objects.
    pub(super) fn session(&self) -> u64 {
        self.shared.session
    }

    /// A name that no other object has.
    pub(super) fn new_id(&self, layout: Layout) -> ObjectId {
        ObjectId::new(self.shared.session, self.shared.random.lock().random(), layout)
    }

    /// Records that an unfinished object could not be removed from the store.
    pub(super) fn leave_behind(&self) {
        self.shared.left_behind.store(true, Ordering::Release);
    }

    /// Whether this process leaves an unfinished object in the store, which the garbage collector has to remove.
    pub(super) fn has_left_behind(&self) -> bool {
        self.shared.left_behind.load(Ordering::Acquire)
    }

    /// Removes an object from the store and from the cache; a missing object is not an error.
    pub(super) fn delete(&self, id: ObjectId) -> Result<()> {
        match self.store() {
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

    /// Creates a file in the local store, open for reading and writing; returns it with its path.
    pub(super) fn create_local(&self, name: &str) -> Result<(PathBuf, File)> {
        match self.store() {
            Store::Local(local) => local.create(name),
            Store::Remote(_) => self.answer(None),
        }
    }

    /// Makes the name of an object's file survive a power failure.
    pub(super) fn make_name_durable(&self, id: ObjectId) -> Result<()> {
        match self.store() {
            Store::Local(local) => local.make_name_durable(id),
            Store::Remote(_) => Ok(()),
        }
    }
}
