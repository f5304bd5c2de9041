//! Batches of transactions that are committed together: their reads, writes and locks.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, OnceLock};

use sha2::{Digest as _, Sha256};

use super::fault::Fault;
use super::rows::Value;
use crate::meta::engine::{Order, Pair};
use crate::meta::keys;
use crate::meta::prerequisites::Prerequisites;

/// Locks of one commit, at most; a commit that needs more takes only the lock of everything.
const LOCKS_MAX: usize = 128;

/// A range that a transaction has read, with a checksum of what it found.
#[derive(Debug, Clone)]
pub(super) struct Scanned {
    pub(super) start: Vec<u8>,
    pub(super) end: Vec<u8>,
    pub(super) order: Order,
    pub(super) limit: usize,
    pub(super) sum: [u8; 32],
}

/// Checksum of a range's pairs, as the server computes it with the function in `schema.rs`.
pub(super) fn sum_of(pairs: &[Pair], order: Order) -> [u8; 32] {
    let mut hash = Sha256::new();
    let mut add = |(key, value): &Pair| {
        for bytes in [key, value] {
            hash.update((bytes.len() as u32).to_be_bytes());
            hash.update(bytes);
        }
    };
    match order {
        Order::Ascending => pairs.iter().for_each(&mut add),
        Order::Descending => pairs.iter().rev().for_each(&mut add),
    }
    hash.finalize().into()
}

/// Outcome of a batch.
#[derive(Debug, Clone)]
pub(super) enum Outcome {
    /// It is committed.
    Landed,
    /// Something that it had read has changed: its transactions must run again.
    Again,
    /// It failed, for all of its transactions.
    Failed(Fault),
}

/// Transactions of several threads that become one commit.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) number: u64,
    /// Values that keys must have on the server before the batch, because its transactions have read them.
    pub(super) reads: HashMap<Vec<u8>, Value>,
    pub(super) scans: Vec<Scanned>,
    pub(super) writes: BTreeMap<Vec<u8>, Value>,
    pub(super) bytes: usize,
    pub(super) prerequisites: Prerequisites,
    pub(super) outcome: Arc<OnceLock<Outcome>>,
}

impl Batch {
    pub(super) fn new(number: u64) -> Batch {
        Batch { number, ..Batch::default() }
    }

    /// Whether it writes a key with `start <= key < end`.
    pub(super) fn writes_in(&self, start: &[u8], end: &[u8]) -> bool {
        start < end
            && self
                .writes
                .range::<[u8], _>((std::ops::Bound::Included(start), std::ops::Bound::Excluded(end)))
                .next()
                .is_some()
    }

    /// The locks of the commit, in the order that all clients use, and whether each is exclusive.
    pub(super) fn locks(&self, schema: &str) -> (Vec<i64>, Vec<bool>) {
        let everything = lock_of_everything(schema);
        let mut locks: BTreeMap<i64, bool> = BTreeMap::new();
        let mut wide = false;
        for key in self.reads.keys() {
            locks.entry(lock_of(schema, scope(key))).or_insert(false);
        }
        for scan in &self.scans {
            let scope = scope(&scan.start);
            // A start that is shorter than a scope may reach into several scopes.
            let within = keys::scope_len(&[scope, &[0; 18]].concat()) <= scope.len()
                && scan.end <= keys::after_prefix(scope);
            wide |= !within;
            locks.entry(lock_of(schema, scope)).or_insert(false);
        }
        for key in self.writes.keys() {
            locks.insert(lock_of(schema, scope(key)), true);
        }
        if wide || locks.len() > LOCKS_MAX {
            return (vec![everything], vec![true]);
        }
        locks.remove(&everything);
        std::iter::once((everything, false)).chain(locks).unzip()
    }
}

fn scope(key: &[u8]) -> &[u8] {
    &key[..keys::scope_len(key)]
}

/// The lock that every commit holds: shared, or exclusive if it touches too much for separate locks.
pub(super) fn lock_of_everything(schema: &str) -> i64 {
    lock_of(schema, &[])
}

/// The lock to create the tables.
pub(super) fn lock_of_making(schema: &str) -> i64 {
    lock_of(schema, b"\0make")
}

/// FNV-1a of 64 bits with a last mix. Part of the protocol between processes: two keys with the same number
/// only wait for each other, but a key must have the same number everywhere.
fn lock_of(schema: &str, scope: &[u8]) -> i64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in schema.bytes().chain([0]).chain(scope.iter().copied()) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash ^= hash >> 32;
    hash = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (hash ^ (hash >> 29)).cast_signed()
}
