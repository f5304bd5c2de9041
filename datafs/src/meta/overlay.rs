//! Transactions over uncommitted data: a transaction's changes, over the batches of the process, over a
//! snapshot of the engine.

use std::collections::{BTreeMap, HashSet};
use std::iter::Peekable;
use std::sync::Arc;

use parking_lot::RwLock;

use super::engine::{Order, Pair, Prerequisite, ReadTxn, WriteTxn};
use super::group::Shared;
use super::key_hash::key_hash;
use super::keys;
use super::known_names::{DirectoryId, READ_MAX};
use super::layer::{Layer, Value};
use super::merge::merge;
use super::prerequisites::Prerequisites;
use super::sqlite::Snapshot;
use crate::error::Result;
use crate::metrics;

/// Uncommitted records that a scan collects at a time, while writers wait.
const UNCOMMITTED_PAGE: usize = 1_024;

/// Smallest such page, for scans with a small limit.
const UNCOMMITTED_PAGE_MIN: usize = 8;

/// Changes that a transaction has made so far.
pub(super) type Changes = BTreeMap<Vec<u8>, Value>;

/// A consistent state of the metadata, as this process sees it.
#[derive(Debug)]
pub(super) struct View<'g> {
    pub(super) shared: &'g Shared,
    /// The committed records; `None` only while the view is dropped.
    pub(super) snapshot: Option<Snapshot>,
    /// The uncommitted batches, newest first.
    pub(super) layers: [Option<Arc<RwLock<Layer>>>; 2],
    /// The newest transaction that the view sees.
    pub(super) version: u64,
    /// Epoch of the view: it uses the cache only in the same epoch.
    pub(super) epoch: u64,
}

impl View<'_> {
    fn snapshot(&self) -> Result<&Snapshot> {
        self.snapshot.as_ref().ok_or_else(|| self.shared.damaged("a view without a snapshot"))
    }

    fn get(&self, key: &[u8]) -> Result<Value> {
        let hash = key_hash(key);
        for layer in self.layers.iter().flatten() {
            if let Some(value) = layer.read().get(key, hash, self.version) {
                metrics::RECORD_CACHE_HITS.inc();
                return Ok(value);
            }
        }
        if let Some(value) = self.shared.cache.lock().get(key, hash, self.epoch) {
            metrics::RECORD_CACHE_HITS.inc();
            return Ok(value);
        }
        metrics::RECORD_CACHE_MISSES.inc();
        let value = self.snapshot()?.get(key)?.map(Arc::from);
        let directory = self.shared.cache.lock().learn(key, hash, &value, self.epoch);
        if let Some(directory) = directory {
            self.read_names(directory)?;
        }
        Ok(value)
    }

    /// Reads the names of a directory into the cache, so that missing names need no lookup. A concurrent
    /// reader may see an older or a newer state. So the set has all committed names and all names of pending
    /// batches, even those that a batch removes.
    fn read_names(&self, directory: DirectoryId) -> Result<()> {
        let (volume, ino) = directory;
        let prefix = keys::live(volume, &keys::children(ino));
        let end = keys::after_prefix(&prefix);
        let mut names = HashSet::new();
        let mut note = |key: &[u8]| {
            let Some((_, name)) = keys::live_child(key) else { return false };
            names.insert(name);
            names.len() <= READ_MAX
        };
        for layer in self.layers.iter().flatten() {
            layer.read().keys(&prefix, &end).all(&mut note);
        }
        self.snapshot()?.pairs(&prefix, &end, Order::Ascending, |next| {
            while let Some((key, _)) = next()? {
                if !note(&key) {
                    break;
                }
            }
            Ok(())
        })?;
        let names = (names.len() <= READ_MAX).then_some(names);
        self.shared.cache.lock().learn_names(directory, names, self.epoch);
        Ok(())
    }

    /// Scans `start..end` with the transaction's `own` changes on top; at most `limit` pairs.
    fn scan(&self, own: &Changes, start: &[u8], end: &[u8], order: Order, limit: usize) -> Result<Vec<Pair>> {
        let (mut start, mut end) = (start.to_vec(), end.to_vec());
        let mut found = Vec::new();
        while start < end && found.len() < limit {
            let page_len = (limit - found.len()).clamp(UNCOMMITTED_PAGE_MIN, UNCOMMITTED_PAGE);
            let page = self.uncommitted(own, &start, &end, order, page_len);
            // The page is complete up to its last key, or for the whole range if it is not full.
            let (mut first, mut last) = (start.clone(), end.clone());
            let more = page.len() == page_len;
            if let Some((key, _)) = page.last().filter(|_| more) {
                match order {
                    Order::Ascending => {
                        last = [key.as_slice(), &[0]].concat();
                        start.clone_from(&last);
                    }
                    Order::Descending => {
                        first.clone_from(key);
                        end.clone_from(key);
                    }
                }
            }
            self.snapshot()?
                .pairs(&first, &last, order, |next| merge(page, next, order, limit, &mut found))?;
            if !more {
                break;
            }
        }
        Ok(found)
    }

    /// The first uncommitted records of a range, each once, in its newest visible version.
    fn uncommitted(
        &self,
        own: &Changes,
        start: &[u8],
        end: &[u8],
        order: Order,
        page_len: usize,
    ) -> Vec<(Vec<u8>, Value)> {
        let locked: Vec<_> = self.layers.iter().flatten().map(|layer| layer.read()).collect();
        let mut sources: Vec<Peekable<Source<'_>>> = Vec::with_capacity(3);
        if !own.is_empty() {
            let range =
                own.range::<[u8], _>((std::ops::Bound::Included(start), std::ops::Bound::Excluded(end)));
            let range = range.map(|(key, value)| (key.as_slice(), value));
            let source: Source<'_> = match order {
                Order::Ascending => Box::new(range),
                Order::Descending => Box::new(range.rev()),
            };
            sources.push(source.peekable());
        }
        for layer in &locked {
            sources.push(layer.range(start, end, order, self.version).peekable());
        }
        let mut page = Vec::new();
        while page.len() < page_len {
            let next = sources.iter_mut().filter_map(|source| source.peek().map(|(key, _)| *key));
            let next = match order {
                Order::Ascending => next.min(),
                Order::Descending => next.max(),
            };
            let Some(key) = next else { break };
            let mut newest = None;
            for source in &mut sources {
                let same = source.next_if(|(other, _)| *other == key);
                newest = newest.or(same);
            }
            page.extend(newest.map(|(key, value)| (key.to_vec(), value.clone())));
        }
        page
    }
}

type Source<'a> = Box<dyn Iterator<Item = (&'a [u8], &'a Value)> + 'a>;

impl Drop for View<'_> {
    fn drop(&mut self) {
        self.shared.close_view(self.version, self.snapshot.take());
    }
}

impl ReadTxn for View<'_> {
    fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        Ok(View::get(self, key)?.map(|value| value.to_vec()))
    }

    fn scan(&mut self, start: &[u8], end: &[u8], order: Order, limit: usize) -> Result<Vec<Pair>> {
        View::scan(self, &Changes::new(), start, end, order, limit)
    }
}

/// A running write transaction.
#[derive(Debug)]
pub(super) struct Write<'g> {
    pub(super) view: View<'g>,
    pub(super) changes: Changes,
    pub(super) prerequisites: Prerequisites,
    /// Directories that the transaction creates.
    pub(super) directories: Vec<DirectoryId>,
    /// Whether the commit may take the reserved space.
    pub(super) makes_room: bool,
}

impl ReadTxn for Write<'_> {
    fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let value = match self.changes.get(key) {
            Some(value) => value.clone(),
            None => self.view.get(key)?,
        };
        Ok(value.map(|value| value.to_vec()))
    }

    fn scan(&mut self, start: &[u8], end: &[u8], order: Order, limit: usize) -> Result<Vec<Pair>> {
        self.view.scan(&self.changes, start, end, order, limit)
    }
}

impl WriteTxn for Write<'_> {
    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        self.changes.insert(key.to_vec(), Some(Arc::from(value)));
        Ok(())
    }

    fn delete(&mut self, key: &[u8]) -> Result<()> {
        self.changes.insert(key.to_vec(), None);
        Ok(())
    }

    fn require(&mut self, prerequisite: Arc<dyn Prerequisite>) -> Result<()> {
        self.prerequisites.add(prerequisite);
        Ok(())
    }

    fn begins(&mut self, directory: DirectoryId) {
        self.directories.push(directory);
    }

    fn makes_room(&mut self) {
        self.makes_room = true;
    }

    fn as_read(&mut self) -> &mut dyn ReadTxn {
        self
    }
}
