//! Augmentation keys: one number for each row and epoch, from which all random draws of the row derive.

use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array};
use arrow::datatypes::DataType;

use crate::feed::permutation::derive_key;

/// Purpose of a derived key; the order uses 1 and 2.
const KEY_ROW: u64 = 3;
/// Purpose of the keys that are delivered as a column.
const KEY_DELIVERED: u64 = 4;

/// The type of the column of keys.
pub(crate) const KEY_FIELD_TYPE: DataType = DataType::Int64;

/// The random draws of one row in one epoch. Each draw has a number, so that none depends on how many others were
/// made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Draws(u64);

impl Draws {
    pub(crate) fn new(seed: u64, epoch: u64, row: u64) -> Self {
        Self(derive_key(&[seed, KEY_ROW, epoch, row]))
    }

    /// A number from 0 to below 1, a multiple of 2^-53.
    pub(crate) fn unit(self, number: u64) -> f64 {
        (derive_key(&[self.0, number]) >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// A number from 0 to below `end`; 0 for an `end` of 0.
    pub(crate) fn below(self, number: u64, end: u64) -> u64 {
        ((u128::from(derive_key(&[self.0, number])) * u128::from(end)) >> 64) as u64
    }
}

/// A key for each row, for augmentation outside of the feed: 63 bits, so that every framework has a type for it. Each origin
/// of rows has a seed; without `origins`, all rows are of the first one.
pub(crate) fn keys(seeds: &[u64], origins: &[u32], epochs: &[u64], rows: &[u64]) -> ArrayRef {
    let key = |(at, (epoch, row)): (usize, (&u64, &u64))| {
        let seed = seeds[origins.get(at).map_or(0, |origin| *origin as usize)];
        (derive_key(&[seed, KEY_DELIVERED, *epoch, *row]) >> 1) as i64
    };
    Arc::new(Int64Array::from_iter_values(epochs.iter().zip(rows).enumerate().map(key)))
}
