//! The response cache for models that enable it. The key is a digest of the version's content and of the
//! whole request. The cache is bounded by bytes and evicts the least recently used entry first.
//!
//! Digests, copies and frees of tensors happen outside the lock; under it a lookup moves one entry. Equal
//! requests that arrive while the first one runs also run. Entries of an unloaded version need no removal:
//! they are no longer used, so they are evicted next.

mod key;

use std::borrow::Borrow;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use hashlink::LinkedHashMap;
use millrace_bundle::Manifest;
use parking_lot::Mutex;

pub(crate) use key::Key;
use key::VersionDigest;
use millrace_serving_core::error::InferError;
use millrace_serving_core::metrics::{RESPONSE_CACHE_BYTES, RESPONSE_CACHE_EVICTIONS};
use millrace_serving_core::tensor::{Data, Tensor};
use millrace_serving_runtime::session::Work;

/// Overhead of an entry in bytes besides its tensors: key, links, table slot, counts, allocations.
const ENTRY_BYTES: usize = 256;

/// Table capacity below which free slots are kept.
const SPARE_MIN: usize = 1024;

/// The cached answers of all models of a server.
#[derive(Debug)]
pub(crate) struct ResponseCache {
    bytes_max: usize,
    state: Mutex<LruEntries>,
}

/// Entries in order of use, the least recently used first.
#[derive(Debug, Default)]
struct LruEntries {
    entries: LinkedHashMap<Key, Entry>,
    bytes: usize,
}

#[derive(Debug)]
struct Entry {
    outputs: Arc<[Tensor]>,
    /// Stored, as computing it takes time for many elements.
    bytes: usize,
}

impl ResponseCache {
    /// A cache of at most `bytes_max` bytes; `None` if that is 0.
    pub(crate) fn new(bytes_max: usize) -> Option<ResponseCache> {
        (bytes_max > 0).then(|| ResponseCache { bytes_max, state: Mutex::default() })
    }

    /// The cached outputs for a key.
    fn get(&self, key: &Key) -> Option<Arc<[Tensor]>> {
        let mut state = self.state.lock();
        state.entries.to_back(key).map(|entry| Arc::clone(&entry.outputs))
    }

    /// Caches outputs, unless they exceed the size of the whole cache.
    fn put<T: Borrow<Tensor>>(&self, key: Key, outputs: &[T]) {
        let bytes = size(outputs);
        if bytes > self.bytes_max {
            return;
        }
        let entry = Entry { outputs: outputs.iter().map(|output| compact(output.borrow())).collect(), bytes };
        let (replaced, leaving, grown) = {
            let mut state = self.state.lock();
            let before = state.bytes;
            let replaced = state.entries.insert(key, entry);
            state.bytes = state.bytes + bytes - replaced.as_ref().map_or(0, |old| old.bytes);
            let mut leaving = Vec::new();
            while state.bytes > self.bytes_max
                && let Some((_, oldest)) = state.entries.pop_front()
            {
                state.bytes -= oldest.bytes;
                leaving.push(oldest);
            }
            // Otherwise the table would keep free slots, which `bytes` does not count.
            if state.entries.capacity() > SPARE_MIN && state.entries.len() < state.entries.capacity() / 4 {
                state.entries.shrink_to_fit();
            }
            (replaced, leaving, state.bytes as i64 - before as i64)
        };
        RESPONSE_CACHE_BYTES.add(grown);
        RESPONSE_CACHE_EVICTIONS.inc_by(leaving.len() as u64);
        // Freed after the lock is released.
        drop((replaced, leaving));
    }
}

impl Drop for ResponseCache {
    fn drop(&mut self) {
        RESPONSE_CACHE_BYTES.sub(self.state.get_mut().bytes as i64);
    }
}

/// The response cache as seen by one version.
#[derive(Debug)]
pub struct Answers {
    cache: Arc<ResponseCache>,
    head: VersionDigest,
}

impl Answers {
    /// For a version by its manifest, with the signature under which it is served.
    pub(crate) fn new(cache: Arc<ResponseCache>, manifest: &Manifest) -> Answers {
        Answers { cache, head: VersionDigest::new(manifest) }
    }

    /// The key of a checked request.
    ///
    /// # Errors
    /// As [`millrace_serving_core::tensor::TensorHandle::read`].
    pub(crate) fn key(&self, work: &Work) -> Result<Key, InferError> {
        self.head.key(work)
    }

    /// The cached outputs, in the requested order.
    pub(crate) fn get(&self, key: &Key) -> Option<Vec<Tensor>> {
        self.cache.get(key).map(|outputs| outputs.to_vec())
    }

    /// Caches the outputs of a request.
    pub(crate) fn put<T: Borrow<Tensor>>(&self, key: Key, outputs: &[T]) {
        self.cache.put(key, outputs);
    }
}

/// A copy without shared buffers: BYTES elements may be slices of larger buffers.
fn compact(output: &Tensor) -> Tensor {
    let Data::Bytes(values) = &output.data else { return output.clone() };
    let mut whole = BytesMut::with_capacity(values.iter().map(Bytes::len).sum());
    values.iter().for_each(|value| whole.extend_from_slice(value));
    let mut whole = whole.freeze();
    let values = values.iter().map(|value| whole.split_to(value.len())).collect();
    Tensor { name: output.name.clone(), shape: output.shape.clone(), data: Data::Bytes(values) }
}

/// Bytes of an entry with these outputs.
fn size<T: Borrow<Tensor>>(outputs: &[T]) -> usize {
    outputs.iter().map(Borrow::borrow).fold(ENTRY_BYTES, |sum, output| {
        let elements = match &output.data {
            Data::Bytes(values) => {
                values.iter().fold(size_of_val(values.as_slice()), |sum, value| sum + value.len())
            }
            data => data.raw_len(),
        };
        sum + size_of::<Tensor>() + output.name.len() + size_of_val(output.shape.as_slice()) + elements
    })
}

#[cfg(test)]
mod tests;
