//! Record cache: committed records in memory, so that repeated reads need no engine.
//!
//! An *epoch* tells which readers may use the cache: those that began while all its records were right for
//! them. It is raised before records in the cache are replaced, so that older readers bypass it.

use std::collections::{HashMap, HashSet};

use super::key_hash::Hashed;
use super::known_names::{DirectoryId, KnownNames};
use super::layer::Value;

/// Approximate memory of an entry in addition to its key and value, in bytes.
const ENTRY_BYTES: usize = 104;

/// The cache, in two generations. When the younger one reaches half of the allowed size, it replaces the
/// older one. Records in the older one that were not used since are dropped.
#[derive(Debug)]
pub(crate) struct RecordCache {
    epoch: u64,
    bytes_max: usize,
    young: Generation,
    young_bytes: usize,
    old: Generation,
    names: KnownNames,
}

/// Records by the hash of their key; of two keys with the same hash the newer replaces the older.
type Generation = HashMap<u64, (Box<[u8]>, Value), Hashed>;

impl RecordCache {
    /// An empty cache that takes about `bytes_max` bytes of memory.
    pub(crate) fn new(bytes_max: usize) -> RecordCache {
        let (young, old) = (Generation::default(), Generation::default());
        RecordCache { epoch: 0, bytes_max, young, young_bytes: 0, old, names: KnownNames::default() }
    }

    /// Begins an epoch: readers that began before it bypass the cache from now on.
    pub(crate) fn begin_epoch(&mut self, epoch: u64) {
        self.epoch = epoch;
    }

    /// The record for a reader of `epoch`, if it is cached. `hash` is the hash of the key.
    pub(crate) fn get(&mut self, key: &[u8], hash: u64, epoch: u64) -> Option<Value> {
        if epoch != self.epoch {
            return None;
        }
        if let Some((known, value)) = self.young.get(&hash) {
            return (**known == *key).then(|| value.clone());
        }
        match self.old.remove(&hash) {
            Some((known, value)) => {
                let found = (*known == *key).then(|| value.clone());
                self.put(known, hash, value);
                found
            }
            None => self.names.is_absent(key).then_some(None),
        }
    }

    /// Caches what a reader of `epoch` found. Returns a directory whose names are worth reading.
    pub(crate) fn learn(&mut self, key: &[u8], hash: u64, value: &Value, epoch: u64) -> Option<DirectoryId> {
        if epoch != self.epoch {
            return None;
        }
        self.put(key.into(), hash, value.clone());
        value.is_none().then(|| self.names.missed(key)).flatten()
    }

    /// Caches the hashes of all names that any reader of `epoch` may find in a directory; `None` if there are
    /// too many.
    pub(crate) fn learn_names(&mut self, of: DirectoryId, names: Option<HashSet<u64>>, epoch: u64) {
        if epoch == self.epoch {
            self.names.learn(of, names);
        }
    }

    /// Adds new directories, in which no reader has seen a name.
    pub(crate) fn begin_directories(&mut self, new: &[DirectoryId]) {
        new.iter().for_each(|directory| self.names.begin(*directory));
    }

    /// Caches a committed record.
    pub(crate) fn replace(&mut self, key: &[u8], hash: u64, value: &Value) {
        self.names.note(key);
        self.old.remove(&hash);
        self.put(key.into(), hash, value.clone());
    }

    fn put(&mut self, key: Box<[u8]>, hash: u64, value: Value) {
        self.young_bytes += entry_bytes(&key, &value);
        if let Some((key, value)) = self.young.insert(hash, (key, value)) {
            self.young_bytes -= entry_bytes(&key, &value);
        }
        if self.young_bytes > self.bytes_max / 2 {
            self.old = std::mem::take(&mut self.young);
            self.young_bytes = 0;
        }
    }

    /// Drops a record that another process has changed.
    pub(crate) fn forget(&mut self, key: &[u8], hash: u64) {
        self.names.note(key);
        if let Some((key, value)) = self.young.remove(&hash) {
            self.young_bytes -= entry_bytes(&key, &value);
        }
        self.old.remove(&hash);
    }

    pub(crate) fn clear(&mut self) {
        (self.young, self.old) = (Generation::default(), Generation::default());
        self.young_bytes = 0;
        self.names.clear();
    }
}

/// What an entry takes.
fn entry_bytes(key: &[u8], value: &Value) -> usize {
    ENTRY_BYTES + key.len() + value.as_ref().map_or(0, |value| value.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meta::key_hash::key_hash;

    fn get(cache: &mut RecordCache, key: &[u8], epoch: u64) -> Option<Value> {
        cache.get(key, key_hash(key), epoch)
    }

    fn learn(cache: &mut RecordCache, key: &[u8], value: &Value, epoch: u64) {
        assert_eq!(cache.learn(key, key_hash(key), value, epoch), None);
    }

    #[test]
    fn it_is_bounded_keeps_what_is_used_and_ends_with_its_epoch() {
        let mut cache = RecordCache::new(100 * 200);
        learn(&mut cache, b"hot", &Some([1].into()), 0);
        for i in 0..10_000u32 {
            learn(&mut cache, &i.to_be_bytes(), &None, 0);
            assert!(get(&mut cache, b"hot", 0).is_some());
        }
        assert!(cache.young.len() + cache.old.len() <= 200);
        cache.replace(b"hot", key_hash(b"hot"), &None);
        assert_eq!(get(&mut cache, b"hot", 0), Some(None));
        cache.begin_epoch(1);
        assert_eq!(get(&mut cache, b"hot", 0), None);
        learn(&mut cache, b"late", &None, 0);
        assert_eq!((get(&mut cache, b"late", 1), get(&mut cache, b"hot", 1)), (None, Some(None)));
        cache.forget(b"hot", key_hash(b"hot"));
        assert_eq!(get(&mut cache, b"hot", 1), None);
        cache.clear();
        assert!(cache.young.is_empty() && cache.old.is_empty());
    }

    #[test]
    fn keys_of_one_hash_are_told_apart() {
        let mut cache = RecordCache::new(100 * 200);
        for (key, value) in [(b"one", 1), (b"two", 2)] {
            cache.learn(key, 7, &Some([value].into()), 0);
        }
        assert_eq!(cache.get(b"one", 7, 0), None);
        assert_eq!(cache.get(b"two", 7, 0), Some(Some([2].into())));
    }
}
