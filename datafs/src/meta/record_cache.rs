//! Records as they are committed, kept in memory so that what is looked at again needs no engine.
//!
//! An *epoch* tells which readers may use it: those that began while everything in it was right for
//! them. It is raised before records in the cache are replaced, so that older readers pass it by.

use std::collections::HashMap;

use super::layer::Value;

/// Memory that an entry takes beside its key and value, about.
const ENTRY_BYTES: usize = 96;

/// The cache. Two generations: what was not used since the younger one was half as large as allowed
/// is dropped with the older one.
#[derive(Debug)]
pub(crate) struct RecordCache {
    epoch: u64,
    bytes_max: usize,
    young: HashMap<Box<[u8]>, Value>,
    young_bytes: usize,
    old: HashMap<Box<[u8]>, Value>,
}

impl RecordCache {
    /// An empty cache that takes about `bytes_max` of memory.
    pub(crate) fn new(bytes_max: usize) -> RecordCache {
        let (young, old) = (HashMap::new(), HashMap::new());
        RecordCache { epoch: 0, bytes_max, young, young_bytes: 0, old }
    }

    /// Readers that began before this pass the cache by from now on.
    pub(crate) fn begin_epoch(&mut self, epoch: u64) {
        self.epoch = epoch;
    }

    /// The record for a reader of `epoch`, if it is known.
    pub(crate) fn get(&mut self, key: &[u8], epoch: u64) -> Option<Value> {
        if epoch != self.epoch {
            return None;
        }
        if let Some(value) = self.young.get(key) {
            return Some(value.clone());
        }
        let (key, value) = self.old.remove_entry(key)?;
        self.put(key, value.clone());
        Some(value)
    }

    /// Notes what a reader of `epoch` found.
    pub(crate) fn learn(&mut self, key: &[u8], value: &Value, epoch: u64) {
        if epoch == self.epoch {
            self.put(key.into(), value.clone());
        }
    }

    /// Notes what was committed.
    pub(crate) fn replace(&mut self, key: &[u8], value: &Value) {
        self.old.remove(key);
        self.put(key.into(), value.clone());
    }

    fn put(&mut self, key: Box<[u8]>, value: Value) {
        self.young_bytes += ENTRY_BYTES + key.len() + value.as_ref().map_or(0, |value| value.len());
        self.young.insert(key, value);
        if self.young_bytes > self.bytes_max / 2 {
            self.old = std::mem::take(&mut self.young);
            self.young_bytes = 0;
        }
    }

    pub(crate) fn forget(&mut self, key: &[u8]) {
        self.young.remove(key);
        self.old.remove(key);
    }

    pub(crate) fn clear(&mut self) {
        (self.young, self.old) = (HashMap::new(), HashMap::new());
        self.young_bytes = 0;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn it_is_bounded_keeps_what_is_used_and_ends_with_its_epoch() {
        let mut cache = RecordCache::new(100 * 200);
        cache.learn(b"hot", &Some([1].into()), 0);
        for i in 0..10_000u32 {
            cache.learn(&i.to_be_bytes(), &None, 0);
            assert!(cache.get(b"hot", 0).is_some());
        }
        assert!(cache.young.len() + cache.old.len() <= 200);
        cache.replace(b"hot", &None);
        assert_eq!(cache.get(b"hot", 0), Some(None));
        cache.begin_epoch(1);
        assert_eq!(cache.get(b"hot", 0), None);
        cache.learn(b"late", &None, 0);
        assert_eq!((cache.get(b"late", 1), cache.get(b"hot", 1)), (None, Some(None)));
        cache.forget(b"hot");
        assert_eq!(cache.get(b"hot", 1), None);
        cache.clear();
        assert!(cache.young.is_empty() && cache.old.is_empty());
    }
}
