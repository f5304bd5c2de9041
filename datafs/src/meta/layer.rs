//! Uncommitted records of a batch, in versions: a reader keeps seeing the versions that were current when it
//! began.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::engine::Order;
use super::key_hash::key_hash;

/// A record's bytes; `None` if there is no such record.
pub(crate) type Value = Option<Arc<[u8]>>;

/// Approximate memory of an entry in addition to its key and value, in bytes.
const ENTRY_BYTES: usize = 96;

/// The changes of one batch.
#[derive(Debug)]
pub(crate) struct Layer {
    records: BTreeMap<Vec<u8>, Version>,
    bytes: usize,
    /// Filter with one bit per key, chosen by its hash: most keys that are looked up are not in the layer.
    filter: Box<[u64; FILTER_WORDS]>,
}

/// Size of the filter in words: 4 KiB, for batches of hundreds of records.
const FILTER_WORDS: usize = 512;

/// Position of a hash in the filter: word and bit mask.
fn filter_bit(hash: u64) -> (usize, u64) {
    ((hash >> 32) as usize % FILTER_WORDS, 1 << (hash >> 58))
}

impl Default for Layer {
    fn default() -> Layer {
        Layer { records: BTreeMap::new(), bytes: 0, filter: Box::new([0; FILTER_WORDS]) }
    }
}

#[derive(Debug)]
struct Version {
    /// The transaction that wrote it.
    number: u64,
    value: Value,
    /// Older versions that a reader may still need, newest first.
    older: Vec<(u64, Value)>,
}

impl Version {
    fn at(&self, number: u64) -> Option<&Value> {
        if self.number <= number {
            return Some(&self.value);
        }
        self.older.iter().find(|(older, _)| *older <= number).map(|(_, value)| value)
    }
}

impl Layer {
    /// Approximate memory use in bytes, without the versions that are kept for readers.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn len(&self) -> usize {
        self.records.len()
    }

    /// Sets a record in transaction `number`, the newest. `readers` are the newest transactions that the
    /// active readers see; the versions that they see are kept.
    pub(crate) fn put(&mut self, key: Vec<u8>, value: Value, number: u64, readers: &[u64]) {
        let (word, bit) = filter_bit(key_hash(&key));
        self.filter[word] |= bit;
        let value_len = value.as_ref().map_or(0, |value| value.len());
        match self.records.get_mut(&key) {
            Some(version) => {
                let old = std::mem::replace(&mut version.value, value);
                self.bytes += value_len;
                self.bytes -= old.as_ref().map_or(0, |old| old.len()).min(self.bytes);
                let mut until = number;
                version.older.insert(0, (version.number, old));
                version.older.retain(|(older, _)| {
                    let read = readers.iter().any(|reader| (*older..until).contains(reader));
                    until = *older;
                    read
                });
                version.number = number;
            }
            None => {
                self.bytes += ENTRY_BYTES + key.len() + value_len;
                self.records.insert(key, Version { number, value, older: Vec::new() });
            }
        }
    }

    /// The record as transaction `number` saw it; `None` when no transaction up to that one has changed it
    /// here. `hash` is the hash of the key.
    pub(crate) fn get(&self, key: &[u8], hash: u64, number: u64) -> Option<Value> {
        let (word, bit) = filter_bit(hash);
        if self.filter[word] & bit == 0 {
            return None;
        }
        self.records.get(key)?.at(number).cloned()
    }

    /// The records of a range as transaction `number` saw them, in order. Requires `start < end`.
    pub(crate) fn range<'a>(
        &'a self,
        start: &[u8],
        end: &[u8],
        order: Order,
        number: u64,
    ) -> Box<dyn Iterator<Item = (&'a [u8], &'a Value)> + 'a> {
        let range =
            self.records.range::<[u8], _>((std::ops::Bound::Included(start), std::ops::Bound::Excluded(end)));
        let seen =
            move |(key, version): (&'a Vec<u8>, &'a Version)| Some((key.as_slice(), version.at(number)?));
        match order {
            Order::Ascending => Box::new(range.filter_map(seen)),
            Order::Descending => Box::new(range.rev().filter_map(seen)),
        }
    }

    /// All keys of a range. Requires `start < end`.
    pub(crate) fn keys(&self, start: &[u8], end: &[u8]) -> impl Iterator<Item = &[u8]> {
        let range = (std::ops::Bound::Included(start), std::ops::Bound::Excluded(end));
        self.records.range::<[u8], _>(range).map(|(key, _)| key.as_slice())
    }

    /// All records with their newest values, in key order.
    pub(crate) fn newest(&self) -> impl Iterator<Item = (&[u8], &Value)> {
        self.records.iter().map(|(key, version)| (key.as_slice(), &version.value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(byte: u8) -> Value {
        Some(Arc::from([byte]))
    }

    #[test]
    fn readers_keep_their_versions_and_nobody_elses() {
        let mut layer = Layer::default();
        let key = || b"k".to_vec();
        layer.put(key(), value(1), 1, &[]);
        layer.put(key(), value(2), 2, &[]);
        let hash = key_hash(b"k");
        assert_eq!(layer.get(b"k", hash, 1), None, "nobody reads at 1");
        layer.put(key(), value(3), 3, &[2]);
        layer.put(key(), None, 4, &[2, 3]);
        layer.put(key(), value(5), 6, &[2, 5]);
        let at = |number| layer.get(b"k", hash, number);
        assert_eq!(
            [at(1), at(2), at(4), at(5), at(6)],
            [None, Some(value(2)), Some(None), Some(None), Some(value(5))]
        );
        assert_eq!(at(3), Some(value(2)), "its reader has gone");
        assert_eq!(layer.range(b"a", b"z", Order::Ascending, 1).count(), 0);
        assert_eq!(layer.range(b"a", b"z", Order::Descending, 4).next(), Some((&b"k"[..], &None)));
        layer.put(key(), value(7), 7, &[]);
        assert!(layer.records[&key()].older.is_empty());
        assert_eq!(layer.bytes(), ENTRY_BYTES + 2);
        assert_eq!(layer.newest().count(), 1);
    }
}
