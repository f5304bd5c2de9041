//! Cache of decoded row groups under a byte limit. Each is decoded once, however many batches wait for it.

#[cfg(test)]
mod tests;

use std::future::Future;
use std::sync::Arc;

use arrow::array::{Array as _, ArrayData, RecordBatch};
use arrow::buffer::Buffer;
use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use parking_lot::Mutex;
use tokio_util::task::AbortOnDropHandle;

use crate::feed::error::{FeedError, Result};
use crate::feed::hash::NumberMap;
use crate::feed::metrics;

/// A decoding in progress, shared by all waiters.
pub(crate) type Loading = Shared<BoxFuture<'static, Result<Arc<RecordBatch>>>>;

/// Result of a lookup.
pub(crate) enum Lookup {
    Ready(Arc<RecordBatch>),
    Loading(Loading),
}

/// A prefetch evicts row groups whose last step is further than this from its step, and no nearer ones.
const STEPS_NEAR: u64 = 2;

struct Entry {
    state: EntryState,
    bytes: u64,
    /// Number of the last call that asked for it: the least recent is evicted first.
    used: u64,
    /// Step for which it was last asked for.
    step: u64,
}

enum EntryState {
    Ready(Arc<RecordBatch>),
    Loading(Loading),
}

#[derive(Default)]
struct Table {
    entries: NumberMap<u32, Entry>,
    /// Bytes of all entries; of those that are loading, an estimate.
    bytes: u64,
    loading: usize,
    calls: u64,
}

/// The cache; its keys are the row group numbers of the plan.
pub(crate) struct GroupCache {
    table: Mutex<Table>,
    bytes_max: u64,
    loading_max: usize,
}

impl GroupCache {
    /// Keeps at most `bytes_max` bytes beyond what the current call uses; prefetching starts no more
    /// than `loading_max` decodings at a time.
    pub(crate) fn new(bytes_max: u64, loading_max: usize) -> Arc<Self> {
        Arc::new(Self { table: Mutex::default(), bytes_max, loading_max })
    }

    /// Looks up the row groups that one batch needs, and begins to decode the missing ones. `nearby` are
    /// marked as used without being loaded.
    pub(crate) fn demand<F, R>(
        self: &Arc<Self>,
        step: u64,
        groups: &[u32],
        nearby: &[u32],
        mut load: F,
    ) -> Vec<Lookup>
    where
        F: FnMut(u32) -> (u64, R),
        R: Future<Output = Result<RecordBatch>> + Send + 'static,
    {
        let mut table = self.table.lock();
        table.calls += 1;
        let used = table.calls;
        for group in nearby {
            if let Some(entry) = table.entries.get_mut(group) {
                entry.used = used;
                entry.step = step;
            }
        }
        groups
            .iter()
            .map(|&group| {
                if let Some(entry) = table.entries.get_mut(&group) {
                    entry.used = used;
                    entry.step = step;
                    return match &entry.state {
                        EntryState::Ready(batch) => Lookup::Ready(Arc::clone(batch)),
                        EntryState::Loading(loading) => Lookup::Loading(loading.clone()),
                    };
                }
                let (bytes, reading) = load(group);
                Lookup::Loading(self.start(&mut table, group, step, bytes, reading))
            })
            .collect()
    }

    /// Begins to decode row groups that batches near `step` will need, while there is room without evicting
    /// those in use. Returns how many of `groups`, from the front, are decoded or being decoded.
    pub(crate) fn prefetch<F, R>(self: &Arc<Self>, step: u64, groups: &[u32], mut load: F) -> usize
    where
        F: FnMut(u32) -> (u64, R),
        R: Future<Output = Result<RecordBatch>> + Send + 'static,
    {
        let mut table = self.table.lock();
        for (i, &group) in groups.iter().enumerate() {
            let used = table.calls;
            if let Some(entry) = table.entries.get_mut(&group) {
                entry.used = used;
                entry.step = step;
                continue;
            }
            if table.loading >= self.loading_max {
                return i;
            }
            let (bytes, reading) = load(group);
            let room = self.bytes_max.saturating_sub(bytes);
            table.evict(room, |e| e.step.abs_diff(step) > STEPS_NEAR);
            if table.bytes > room {
                return i;
            }
            drop(self.start(&mut table, group, step, bytes, reading));
        }
        groups.len()
    }

    /// Bytes kept, including estimates for what is loading.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> u64 {
        self.table.lock().bytes
    }

    fn start<R>(self: &Arc<Self>, table: &mut Table, group: u32, step: u64, bytes: u64, reading: R) -> Loading
    where
        R: Future<Output = Result<RecordBatch>> + Send + 'static,
    {
        let cache = Arc::clone(self);
        // The task waits for the table's lock, which is held here, before it reports.
        let task = tokio::spawn(async move {
            let result = reading.await.map(Arc::new);
            cache.finish(group, &result);
            result
        });
        let task = AbortOnDropHandle::new(task);
        let loading = async move {
            let stopped = |_| FeedError::Stopped { file: format!("row group {group}") };
            task.await.map_err(stopped)?
        }
        .boxed()
        .shared();
        let state = EntryState::Loading(loading.clone());
        table.loading += 1;
        table.add(bytes);
        let used = table.calls;
        table.entries.insert(group, Entry { state, bytes, used, step });
        loading
    }

    fn finish(&self, group: u32, result: &Result<Arc<RecordBatch>>) {
        let mut table = self.table.lock();
        table.loading = table.loading.saturating_sub(1);
        match result {
            // A failure is not cached: the next call tries again.
            Err(_) => {
                if let Some(entry) = table.entries.remove(&group) {
                    table.subtract(entry.bytes);
                }
            }
            Ok(batch) => {
                let bytes = memory_bytes(batch);
                let Some(entry) = table.entries.get_mut(&group) else {
                    return;
                };
                let estimate = std::mem::replace(&mut entry.bytes, bytes);
                entry.state = EntryState::Ready(Arc::clone(batch));
                table.subtract(estimate);
                table.add(bytes);
                metrics::count(&metrics::GROUPS_DECODED, 1);
                metrics::count(&metrics::ROWS_DECODED, batch.num_rows() as u64);
                // Row groups of the latest call stay: that call holds them anyway.
                let calls = table.calls;
                table.evict(self.bytes_max, |e| e.used < calls);
            }
        }
    }
}

/// Memory of a batch. An allocation of which several buffers are parts counts once.
pub(crate) fn memory_bytes(batch: &RecordBatch) -> u64 {
    let mut buffers = Vec::new();
    for column in batch.columns() {
        add_buffers(&column.to_data(), &mut buffers);
    }
    buffers.sort_unstable();
    let again = buffers.windows(2).filter(|pair| pair[0].0 == pair[1].0);
    let again: usize = again.map(|pair| pair[1].1).sum();
    batch.get_array_memory_size().saturating_sub(again) as u64
}

/// Adds the address and the size of the allocation of each buffer.
fn add_buffers(data: &ArrayData, into: &mut Vec<(usize, usize)>) {
    let valid = data.nulls().map(|nulls| nulls.buffer());
    let buffers = data.buffers().iter().chain(valid);
    into.extend(buffers.map(|buffer: &Buffer| (buffer.data_ptr().as_ptr().addr(), buffer.capacity())));
    data.child_data().iter().for_each(|child| add_buffers(child, into));
}

impl Table {
    fn add(&mut self, bytes: u64) {
        self.bytes += bytes;
        metrics::cache_bytes_changed(i64::try_from(bytes).unwrap_or(0));
    }

    fn subtract(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
        metrics::cache_bytes_changed(-i64::try_from(bytes).unwrap_or(0));
    }

    /// Evicts decoded row groups for which `may_go` is true, least recently used first, until `bytes_max`
    /// holds.
    fn evict(&mut self, bytes_max: u64, may_go: impl Fn(&Entry) -> bool) {
        while self.bytes > bytes_max {
            let oldest = self
                .entries
                .iter()
                .filter(|(_, e)| matches!(e.state, EntryState::Ready(_)) && may_go(e))
                .min_by_key(|(group, e)| (e.used, **group))
                .map(|(group, _)| *group);
            let Some(entry) = oldest.and_then(|group| self.entries.remove(&group)) else {
                return;
            };
            self.subtract(entry.bytes);
        }
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        metrics::cache_bytes_changed(-i64::try_from(self.bytes).unwrap_or(0));
    }
}
