//! Buckets: batches whose rows have lists of like length, so that little is padded.
//!
//! - [`BucketOptions`]: the column of lists, and the bounds of the buckets.
//! - [`Buckets`]: the bucket of each row, found when the plan is made; one byte a row.
//! - `scan`: reading of the lengths of a column.
//! - `places`: the order of rows within blocks of batches.
//!
//! The order of rows is cut into blocks of at most 64 global batches, and at the ends of passes. Within a block, rows are
//! sorted by bucket and cut into batches, and the batches are shuffled. So a row stays in its block and its pass: each row
//! comes once a pass for any number of readers, and a reader begins anywhere with the work of one block. All batches are
//! full. A block has at most as many batches of two or more buckets as there are bounds, and the ends of passes one more.
//!
//! The blocks depend on the size of a batch: a run goes on with the same `batch_rows`.

mod places;
mod scan;
#[cfg(test)]
mod tests;

use std::io::{Read, Write};
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use crate::feed::error::{FeedError, Result};
use crate::feed::plan::Encoder;

pub(crate) use places::PlaceMap;
pub(crate) use scan::scan;

/// Most bounds of buckets.
pub const BUCKETS_MAX: usize = 64;
/// Most rows of a plan with buckets: they take 2 GiB.
const ROWS_MAX: u64 = 1 << 31;
/// Greatest bound.
const LENGTH_MAX: u32 = i32::MAX as u32;

/// Batches of rows with lists of like length.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BucketOptions {
    /// Column of lists. A null list counts as an empty one.
    pub column: String,
    /// The longest list of each bucket, rising, 1 to [`BUCKETS_MAX`] of them. Longer lists have a bucket of their own.
    pub bounds: Vec<u32>,
}

impl BucketOptions {
    /// Checks the bounds.
    ///
    /// # Errors
    /// [`FeedError::Invalid`] that names the column and what is wrong.
    pub fn check(&self) -> Result<()> {
        let BucketOptions { column, bounds } = self;
        let is_rising = bounds.windows(2).all(|pair| pair[0] < pair[1]);
        let is_within = bounds.iter().all(|bound| (1..=LENGTH_MAX).contains(bound));
        if (1..=BUCKETS_MAX).contains(&bounds.len()) && is_rising && is_within {
            return Ok(());
        }
        Err(FeedError::invalid(format!(
            "buckets of column {column:?}: the bounds are {bounds:?}; give 1 to {BUCKETS_MAX} lengths of lists from 1 to \
             {LENGTH_MAX}, each greater than the one before"
        )))
    }

    /// The bucket of a list.
    fn bucket_of(&self, length: usize) -> u8 {
        // At most `BUCKETS_MAX`.
        self.bounds.partition_point(|bound| (*bound as usize) < length) as u8
    }
}

/// The buckets of a plan: its options, and the bucket of each selected row in the order of the dataset.
#[derive(Debug, Clone, PartialEq)]
pub struct Buckets {
    options: BucketOptions,
    of_rows: Arc<[u8]>,
}

impl Buckets {
    /// # Errors
    /// [`FeedError::Invalid`] for options out of bounds, and for a bucket that they do not have.
    pub(crate) fn new(options: BucketOptions, of_rows: Vec<u8>) -> Result<Self> {
        options.check()?;
        if of_rows.iter().any(|bucket| usize::from(*bucket) > options.bounds.len()) {
            return Err(FeedError::invalid("a row is in a bucket that does not exist"));
        }
        Ok(Self { options, of_rows: of_rows.into() })
    }

    /// The options.
    pub fn options(&self) -> &BucketOptions {
        &self.options
    }

    /// Rows of each bucket; the last one has the lists beyond all bounds.
    pub fn counts(&self) -> Vec<u64> {
        let mut counts = vec![0; self.options.bounds.len() + 1];
        for bucket in &*self.of_rows {
            // Checked when this was made.
            counts[usize::from(*bucket)] += 1;
        }
        counts
    }

    /// The bucket of the row with a number among the selected rows.
    fn of(&self, row: u64) -> u8 {
        self.of_rows.get(row as usize).copied().unwrap_or(0)
    }

    pub(crate) fn of_rows(&self) -> &[u8] {
        &self.of_rows
    }

    /// Adds all that decides the batches to an identity.
    pub(crate) fn encode(&self, e: &mut Encoder) {
        e.text("buckets");
        e.text(&self.options.column);
        e.number(self.options.bounds.len() as u64);
        for bound in &self.options.bounds {
            e.number(u64::from(*bound));
        }
        e.bytes(&self.of_rows);
    }

    /// The bucket of each row as compressed text.
    pub(crate) fn encode_rows(of_rows: &[u8]) -> std::io::Result<String> {
        let mut encoder = zstd::Encoder::new(Vec::new(), zstd::DEFAULT_COMPRESSION_LEVEL)?;
        encoder.include_checksum(true)?;
        encoder.write_all(of_rows)?;
        Ok(STANDARD.encode(encoder.finish()?))
    }

    /// The inverse of [`Buckets::encode_rows`] for `rows` rows; `None` for other text.
    pub(crate) fn decode_rows(text: &str, rows: u64) -> Option<Vec<u8>> {
        if rows > ROWS_MAX {
            return None;
        }
        let bytes = STANDARD.decode(text).ok()?;
        let mut plain = Vec::new();
        // One byte more than expected shows that there are too many.
        zstd::Decoder::new(&bytes[..]).ok()?.take(rows + 1).read_to_end(&mut plain).ok()?;
        (plain.len() as u64 == rows).then_some(plain)
    }
}
