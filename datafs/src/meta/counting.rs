//! Test support: an engine that counts the calls that reach it.
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::changes::{ChangeListener, Subscription};
use super::engine::{Durability, Engine, Order, Pair, ReadTxn, WriteTxn};
use crate::error::Result;

/// Calls of all engines that share it.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// Read transactions.
    pub(crate) reads: AtomicU64,
    /// Write transactions.
    pub(crate) writes: AtomicU64,
    /// Scans inside of transactions. A server gets one request for each.
    pub(crate) scans: AtomicU64,
    /// Announcements of many keys. A server gets one request for each.
    pub(crate) prefetches: AtomicU64,
    /// Most scans in one transaction.
    pub(crate) longest: AtomicU64,
    /// Questions about the sessions that live.
    pub(crate) asked: AtomicU64,
}

impl Counts {
    /// Requests that a server would get, at most: keys that are read one by one are mostly in memory.
    pub(crate) fn requests(&self) -> u64 {
        let all = [&self.reads, &self.writes, &self.scans, &self.prefetches, &self.asked];
        all.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }

    fn scan(&self, of_transaction: &mut u64) {
        count(&self.scans);
        *of_transaction += 1;
        self.longest.fetch_max(*of_transaction, Ordering::Relaxed);
    }
}

thread_local! {
    static COUNTS: RefCell<Option<Arc<Counts>>> = const { RefCell::new(None) };
}

/// Counts the calls of engines that this thread opens while `run` runs.
pub(crate) fn with<T>(counts: &Arc<Counts>, run: impl FnOnce() -> T) -> T {
    COUNTS.set(Some(Arc::clone(counts)));
    let result = run();
    COUNTS.set(None);
    result
}

/// The counts of this thread, if any.
pub(crate) fn here() -> Option<Arc<Counts>> {
    COUNTS.with_borrow(Clone::clone)
}

/// An engine that counts.
#[derive(Debug)]
pub(crate) struct Counting {
    pub(crate) inner: Arc<dyn Engine>,
    pub(crate) counts: Arc<Counts>,
}

struct Txn<'a, 'b> {
    inner: &'a mut dyn WriteTxn,
    counts: &'b Counts,
    scans: u64,
}

struct Reading<'a, 'b> {
    inner: &'a mut dyn ReadTxn,
    counts: &'b Counts,
    scans: u64,
}

fn count(which: &AtomicU64) {
    which.fetch_add(1, Ordering::Relaxed);
}

impl ReadTxn for Reading<'_, '_> {
    fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        self.inner.get(key)
    }

    fn scan(&mut self, start: &[u8], end: &[u8], order: Order, limit: usize) -> Result<Vec<Pair>> {
        self.counts.scan(&mut self.scans);
        self.inner.scan(start, end, order, limit)
    }

    fn prefetches(&self) -> bool {
        self.inner.prefetches()
    }

    fn prefetch(&mut self, keys: &[Vec<u8>]) -> Result<()> {
        count(&self.counts.prefetches);
        self.inner.prefetch(keys)
    }
}

impl ReadTxn for Txn<'_, '_> {
    fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        self.inner.get(key)
    }

    fn scan(&mut self, start: &[u8], end: &[u8], order: Order, limit: usize) -> Result<Vec<Pair>> {
        self.counts.scan(&mut self.scans);
        self.inner.scan(start, end, order, limit)
    }

    fn prefetches(&self) -> bool {
        self.inner.prefetches()
    }

    fn prefetch(&mut self, keys: &[Vec<u8>]) -> Result<()> {
        count(&self.counts.prefetches);
        self.inner.prefetch(keys)
    }
}

impl WriteTxn for Txn<'_, '_> {
    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        self.inner.put(key, value)
    }

    fn delete(&mut self, key: &[u8]) -> Result<()> {
        self.inner.delete(key)
    }

    fn makes_room(&mut self) {
        self.inner.makes_room();
    }

    fn as_read(&mut self) -> &mut dyn ReadTxn {
        self
    }
}

impl Counting {
    fn reading(
        &self,
        body: &mut dyn FnMut(&mut dyn ReadTxn) -> Result<()>,
        run: impl FnOnce(&mut dyn FnMut(&mut dyn ReadTxn) -> Result<()>) -> Result<()>,
    ) -> Result<()> {
        count(&self.counts.reads);
        run(&mut |txn| body(&mut Reading { inner: txn, counts: &self.counts, scans: 0 }))
    }
}

impl Engine for Counting {
    fn read(&self, body: &mut dyn FnMut(&mut dyn ReadTxn) -> Result<()>) -> Result<()> {
        self.reading(body, |body| self.inner.read(body))
    }

    /// Not counted as a read: it asks a server only for what is not in memory.
    fn read_recent(&self, body: &mut dyn FnMut(&mut dyn ReadTxn) -> Result<()>) -> Result<()> {
        self.inner.read_recent(&mut |txn| body(&mut Reading { inner: txn, counts: &self.counts, scans: 0 }))
    }

    fn read_once(&self, body: &mut dyn FnMut(&mut dyn ReadTxn) -> Result<()>) -> Result<()> {
        self.reading(body, |body| self.inner.read_once(body))
    }

    fn write(
        &self,
        durability: Durability,
        body: &mut dyn FnMut(&mut dyn WriteTxn) -> Result<()>,
    ) -> Result<()> {
        count(&self.counts.writes);
        self.inner.write(durability, &mut |txn| body(&mut Txn { inner: txn, counts: &self.counts, scans: 0 }))
    }

    fn sync(&self) -> Result<()> {
        self.inner.sync()
    }

    fn barrier(&self) -> Result<()> {
        self.inner.barrier()
    }

    fn end_lapsed(&self, session: u64) -> Result<Option<bool>> {
        // Without leases this asks no server.
        let ended = self.inner.end_lapsed(session)?;
        if ended.is_some() {
            count(&self.counts.asked);
        }
        Ok(ended)
    }

    fn sessions_alive(&self, sessions: &[u64]) -> Result<Option<BTreeSet<u64>>> {
        count(&self.counts.asked);
        self.inner.sessions_alive(sessions)
    }

    fn on_change(&self, listener: ChangeListener) -> Result<Subscription> {
        self.inner.on_change(listener)
    }
}
