//! Proof of an epoch: which rows came, how often, and in which order.

use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::feed::error::{FeedError, Result};
use crate::feed::plan::Plan;
use crate::feed::select::SELECTABLE_ROWS_MAX;

/// Rows that a report names.
const NAMED_MAX: usize = 10;

/// Rows of one epoch as readers deliver them. Takes one bit a row.
pub struct Coverage {
    plan: Arc<Plan>,
    seen: Vec<u64>,
    order: Sha256,
    rows: u64,
    repeated: Rows,
}

/// Number of rows of some kind, and the first of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rows {
    /// How many there are.
    pub count: u64,
    /// The first ones, by their global row index.
    pub first: Vec<u64>,
}

/// Result of a [`Coverage`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CoverageReport {
    /// SHA-256 of the global row indices in the order in which they were added, each in 8 bytes, little endian.
    pub digest: String,
    /// Rows that were added.
    pub rows: u64,
    /// Rows of the plan that did not come.
    pub missing: Rows,
    /// Rows that came again.
    pub repeated: Rows,
    /// Rows that came but are not in the plan.
    pub foreign: Rows,
}

impl Rows {
    fn add(&mut self, row: u64) {
        self.count += 1;
        if self.first.len() < NAMED_MAX {
            self.first.push(row);
        }
    }

    fn add_bits(&mut self, word: usize, mut bits: u64) {
        while bits != 0 {
            self.add(word as u64 * 64 + u64::from(bits.trailing_zeros()));
            bits &= bits - 1;
        }
    }
}

impl CoverageReport {
    /// Whether each row of the plan came exactly once, and no other row.
    pub fn is_exact(&self) -> bool {
        self.missing.count == 0 && self.repeated.count == 0 && self.foreign.count == 0
    }
}

impl Coverage {
    /// Nothing has come yet.
    ///
    /// # Errors
    /// [`FeedError::TooLarge`] for a dataset whose bits would take more than 2 GiB.
    pub fn new(plan: Arc<Plan>) -> Result<Self> {
        let (rows, limit) = (plan.row_indices(), SELECTABLE_ROWS_MAX);
        if rows > limit {
            let path = plan.dataset().path().to_owned();
            return Err(FeedError::TooLarge { path, what: "the number of rows to verify", limit });
        }
        let seen = vec![0; rows.div_ceil(64) as usize];
        Ok(Self { plan, seen, order: Sha256::new(), rows: 0, repeated: Rows::default() })
    }

    /// Adds the rows that came next, by their global row index.
    pub fn add(&mut self, rows: &[u64]) {
        for row in rows {
            self.order.update(row.to_le_bytes());
            self.rows += 1;
            let bit = 1 << (row % 64);
            match self.seen.get_mut((row / 64) as usize) {
                Some(word) if *word & bit == 0 => *word |= bit,
                _ => self.repeated.add(*row),
            }
        }
    }

    /// Compares what came with the rows of the plan.
    pub fn report(self) -> CoverageReport {
        let (mut missing, mut foreign) = (Rows::default(), Rows::default());
        let total = self.plan.row_indices();
        let selected = self.plan.selected_words();
        for (at, seen) in self.seen.iter().enumerate() {
            let left = total - at as u64 * 64;
            let all = if left < 64 { (1 << left) - 1 } else { u64::MAX };
            let expected = selected.map_or(all, |words| words.get(at).copied().unwrap_or(0));
            missing.add_bits(at, expected & !seen);
            foreign.add_bits(at, seen & !expected);
        }
        let digest = hex::encode(self.order.finalize());
        CoverageReport { digest, rows: self.rows, missing, repeated: self.repeated, foreign }
    }
}
