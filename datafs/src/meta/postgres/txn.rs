//! One run of a transaction's body: reads from the cache where possible, and buffered writes.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::sync::Arc;

use super::Shared;
use super::batch::{Scanned, sum_of};
use super::pool::Lent;
use super::rows::{Reads, Value};
use crate::error::Result;
use crate::meta::engine::{Order, Pair, Prerequisite, ReadTxn, WriteTxn};
use crate::meta::merge::merge;
use crate::meta::prerequisites::Prerequisites;
use crate::metrics;

/// Keys and ranges read, and pairs to write, by one run of a body.
pub(super) struct Txn<'a> {
    shared: &'a Shared,
    /// The server transaction that all reads use, if any.
    moment: Option<&'a Lent<'a>>,
    /// Whether reads see the uncommitted batches of this process.
    pub(super) writes_follow: bool,
    /// The image's clock when the run began.
    pub(super) since: u64,
    /// The count of failed batches when the run began.
    pub(super) failures: u64,
    pub(super) reads: Reads,
    /// Whether the run has sent a request to the server.
    pub(super) asked: bool,
    pub(super) scans: Vec<Scanned>,
    /// Pairs that scans have found: they are known, and checked together with the scan.
    scanned: HashMap<Vec<u8>, Value>,
    pub(super) writes: BTreeMap<Vec<u8>, Value>,
    pub(super) prerequisites: Prerequisites,
}

impl<'a> Txn<'a> {
    /// A run that only reads what is committed.
    pub(super) fn reading(shared: &'a Shared) -> Txn<'a> {
        Txn::new(shared, false, None)
    }

    /// A run that only reads, in a transaction on the server.
    pub(super) fn reading_at(shared: &'a Shared, moment: &'a Lent<'a>) -> Txn<'a> {
        Txn::new(shared, false, Some(moment))
    }

    /// A run that writes, and reads on top of the uncommitted batches of this process.
    pub(super) fn writing(shared: &'a Shared) -> Txn<'a> {
        Txn::new(shared, true, None)
    }

    fn new(shared: &'a Shared, writes_follow: bool, moment: Option<&'a Lent<'a>>) -> Txn<'a> {
        let (since, failures) = shared.begin();
        Txn {
            shared,
            moment,
            writes_follow,
            since,
            failures,
            reads: Reads::default(),
            asked: false,
            scans: Vec::new(),
            scanned: HashMap::new(),
            writes: BTreeMap::new(),
            prerequisites: Prerequisites::default(),
        }
    }

    fn known(&self, key: &[u8]) -> Option<Value> {
        self.writes.get(key).or_else(|| self.reads.keys.get(key)).or_else(|| self.scanned.get(key)).cloned()
    }

    fn value(&mut self, key: &[u8]) -> Result<Value> {
        if let Some(value) = self.known(key) {
            return Ok(value);
        }
        self.bring(&[key])?;
        Ok(self.known(key).flatten())
    }

    /// Reads keys; fetches those that are not in memory in one round trip.
    fn bring(&mut self, keys: &[&[u8]]) -> Result<()> {
        let mut missing = Vec::new();
        for key in keys {
            if self.known(key).is_some() {
                continue;
            }
            let remembered = match self.moment {
                None => self.shared.recall(key, self.writes_follow),
                Some(_) => None,
            };
            match remembered {
                Some(value) => {
                    metrics::RECORD_CACHE_HITS.inc();
                    self.reads.keys.insert(key.to_vec(), value);
                }
                None => missing.push(*key),
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        self.asked = true;
        metrics::RECORD_CACHE_MISSES.inc_by(missing.len() as u64);
        let values = self.shared.fetch(&missing, self.moment)?;
        for (key, value) in missing.into_iter().zip(values) {
            self.reads.keys.insert(key.to_vec(), value);
        }
        Ok(())
    }
}

impl ReadTxn for Txn<'_> {
    fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        Ok(self.value(key)?.map(|value| value.to_vec()))
    }

    fn scan(&mut self, start: &[u8], end: &[u8], order: Order, limit: usize) -> Result<Vec<Pair>> {
        if start >= end || limit == 0 {
            return Ok(Vec::new());
        }
        // Each deletion in this run hides at most one pair of the server.
        let mut own: Vec<(Vec<u8>, Value)> = self
            .writes
            .range::<[u8], _>((Bound::Included(start), Bound::Excluded(end)))
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect();
        if order == Order::Descending {
            own.reverse();
        }
        let hidden = own.iter().filter(|(_, value)| value.is_none()).count();
        let base_limit = limit.saturating_add(hidden);
        if self.writes_follow {
            self.shared.settled(start, end)?;
        }
        self.asked = true;
        let base = self.shared.scan(start, end, order, base_limit, self.moment)?;
        self.reads.ranges.push(start.to_vec()..=end.to_vec());
        if self.writes_follow {
            self.scans.push(Scanned {
                start: start.to_vec(),
                end: end.to_vec(),
                order,
                limit: base_limit,
                sum: sum_of(&base, order),
            });
            for (key, value) in &base {
                self.scanned.entry(key.clone()).or_insert_with(|| Some(value.as_slice().into()));
            }
        }
        if own.is_empty() {
            return Ok(base);
        }
        let mut base = base.into_iter();
        let mut found = Vec::new();
        merge(own, &mut || Ok(base.next()), order, limit, &mut found)?;
        Ok(found)
    }

    fn prefetches(&self) -> bool {
        true
    }

    fn prefetch(&mut self, keys: &[Vec<u8>]) -> Result<()> {
        let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        self.bring(&keys)
    }
}

impl WriteTxn for Txn<'_> {
    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        self.writes.insert(key.to_vec(), Some(value.into()));
        Ok(())
    }

    fn delete(&mut self, key: &[u8]) -> Result<()> {
        self.writes.insert(key.to_vec(), None);
        Ok(())
    }

    fn require(&mut self, prerequisite: Arc<dyn Prerequisite>) -> Result<()> {
        self.prerequisites.add(prerequisite);
        Ok(())
    }

    fn as_read(&mut self) -> &mut dyn ReadTxn {
        self
    }
}
