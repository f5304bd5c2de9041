//! Answers that were given before, for models that allow it: found by a digest of the version's content and
//! of all that was asked, bounded by bytes; the least recently used goes first.
//!
//! Digests are made and tensors are copied and freed outside the lock, under which a look-up moves one entry.
//! Equal requests that come while the first of them runs run, too. The entries of a version that is gone are
//! not looked for: nobody asks for them any more, so they are the next to go.

mod key;

use std::borrow::Borrow;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use hashlink::LinkedHashMap;
use millrace_bundle::Manifest;
use parking_lot::Mutex;

use crate::error::InferError;
use crate::metrics::{RESPONSE_CACHE_BYTES, RESPONSE_CACHE_EVICTIONS};
use crate::session::Work;
use crate::tensor::{Data, Tensor};
use key::Head;
pub(crate) use key::Key;

/// What an entry takes beside its tensors: key, links, its place in the table, counts, allocations.
const ENTRY_BYTES: usize = 256;

/// Places for entries that are kept though they are free.
const SPARE_MIN: usize = 1024;

/// The answers of all models of a server.
#[derive(Debug)]
pub(crate) struct ResponseCache {
    bytes_max: usize,
    state: Mutex<State>,
}

/// The least recently used is in front.
#[derive(Debug, Default)]
struct State {
    entries: LinkedHashMap<Key, Entry>,
    bytes: usize,
}

#[derive(Debug)]
struct Entry {
    outputs: Arc<[Tensor]>,
    /// Counted once, as that takes time where there are many elements.
    bytes: usize,
}

impl ResponseCache {
    /// Holds at most `bytes_max` bytes; there is none where that is 0.
    pub(crate) fn new(bytes_max: usize) -> Option<ResponseCache> {
        (bytes_max > 0).then(|| ResponseCache { bytes_max, state: Mutex::default() })
    }

    /// The outputs that answered this before.
    fn get(&self, key: &Key) -> Option<Arc<[Tensor]>> {
        let mut state = self.state.lock();
        state.entries.to_back(key).map(|entry| Arc::clone(&entry.outputs))
    }

    /// Keeps outputs, unless they are more than the whole cache may hold.
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
            // Places of entries that are gone are kept for others otherwise, and count nowhere.
            if state.entries.capacity() > SPARE_MIN && state.entries.len() < state.entries.capacity() / 4 {
                state.entries.shrink_to_fit();
            }
            (replaced, leaving, state.bytes as i64 - before as i64)
        };
        RESPONSE_CACHE_BYTES.add(grown);
        RESPONSE_CACHE_EVICTIONS.inc_by(leaving.len() as u64);
        // Freed without the lock.
        drop((replaced, leaving));
    }
}

impl Drop for ResponseCache {
    fn drop(&mut self) {
        RESPONSE_CACHE_BYTES.sub(self.state.get_mut().bytes as i64);
    }
}

/// The cache as one version uses it.
#[derive(Debug)]
pub(crate) struct Answers {
    cache: Arc<ResponseCache>,
    head: Head,
}

impl Answers {
    /// For the version that a manifest describes, with the signature that it is served with.
    pub(crate) fn new(cache: Arc<ResponseCache>, manifest: &Manifest) -> Answers {
        Answers { cache, head: Head::new(manifest) }
    }

    /// What a checked request is known by.
    ///
    /// # Errors
    /// As [`crate::tensor::Held::read`].
    pub(crate) fn key(&self, work: &Work) -> Result<Key, InferError> {
        self.head.key(work)
    }

    /// The outputs that answered this before, in the order asked for.
    pub(crate) fn get(&self, key: &Key) -> Option<Vec<Tensor>> {
        self.cache.get(key).map(|outputs| outputs.to_vec())
    }

    /// Keeps what a request was answered with.
    pub(crate) fn put<T: Borrow<Tensor>>(&self, key: Key, outputs: &[T]) {
        self.cache.put(key, outputs);
    }
}

/// A copy that keeps nothing else alive: elements of BYTES may be parts of something larger.
fn compact(output: &Tensor) -> Tensor {
    let Data::Bytes(values) = &output.data else { return output.clone() };
    let mut whole = BytesMut::with_capacity(values.iter().map(Bytes::len).sum());
    values.iter().for_each(|value| whole.extend_from_slice(value));
    let mut whole = whole.freeze();
    let values = values.iter().map(|value| whole.split_to(value.len())).collect();
    Tensor { name: output.name.clone(), shape: output.shape.clone(), data: Data::Bytes(values) }
}

/// What an entry with these outputs takes.
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
