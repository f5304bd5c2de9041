//! Numbers of distinct values and the most frequent values, in bounded memory.

use std::collections::{HashMap, HashSet};

use crate::feed::hash::NumberMap;

/// Values that are counted one by one.
const EXACT_MAX: usize = 1024;
/// Bits of a hash that choose a register.
const REGISTER_BITS: u32 = 12;
/// Values whose occurrences are counted.
const FREQUENT_MAX: usize = 1024;
/// Frequent values that are shown.
const TOP: usize = 5;

/// HyperLogLog over hashes, and the hashes themselves as long as there are few.
#[derive(Default)]
pub(super) struct DistinctCounter {
    exact: HashSet<u64>,
    registers: Vec<u8>,
}

impl DistinctCounter {
    pub(super) fn add(&mut self, hash: u64) {
        if self.registers.is_empty() {
            if self.exact.contains(&hash) {
                return;
            }
            if self.exact.len() < EXACT_MAX {
                self.exact.insert(hash);
                return;
            }
            self.registers = vec![0; 1 << REGISTER_BITS];
            for hash in std::mem::take(&mut self.exact) {
                self.register(hash);
            }
        }
        self.register(hash);
    }

    fn register(&mut self, hash: u64) {
        let zeros = (hash << REGISTER_BITS).leading_zeros().min(64 - REGISTER_BITS) as u8;
        if let Some(register) = self.registers.get_mut((hash >> (64 - REGISTER_BITS)) as usize) {
            *register = (*register).max(zeros + 1);
        }
    }

    pub(super) fn estimate(&self) -> u64 {
        if self.registers.is_empty() {
            return self.exact.len() as u64;
        }
        let m = self.registers.len() as f64;
        let sum: f64 = self.registers.iter().map(|zeros| 0.5f64.powi(i32::from(*zeros))).sum();
        let estimate = 0.7213 / (1.0 + 1.079 / m) * m * m / sum;
        let empty = self.registers.iter().filter(|zeros| **zeros == 0).count();
        if estimate <= 2.5 * m && empty > 0 {
            return (m * (m / empty as f64).ln()).round() as u64;
        }
        estimate.round() as u64
    }
}

/// Misra and Gries's counters: a value that is more than 1/1024 of all is among them.
pub(super) struct FrequentValues<T> {
    counts: NumberMap<u64, (T, u64)>,
}

impl<T> Default for FrequentValues<T> {
    fn default() -> Self {
        Self { counts: HashMap::default() }
    }
}

impl<T: Clone> FrequentValues<T> {
    pub(super) fn add(&mut self, hash: u64, value: impl FnOnce() -> T) {
        if let Some((_, count)) = self.counts.get_mut(&hash) {
            *count += 1;
        } else if self.counts.len() < FREQUENT_MAX {
            self.counts.insert(hash, (value(), 1));
        } else {
            self.counts.retain(|_, (_, count)| {
                *count -= 1;
                *count > 0
            });
        }
    }

    /// The most frequent values that came more than once.
    pub(super) fn top(&self) -> Vec<(T, u64)> {
        let mut all: Vec<(&u64, &(T, u64))> =
            self.counts.iter().filter(|(_, (_, count))| *count > 1).collect();
        all.sort_by_key(|(hash, (_, count))| (std::cmp::Reverse(*count), **hash));
        all.into_iter().take(TOP).map(|(_, (value, count))| (value.clone(), *count)).collect()
    }
}
