//! Shard of the global batches: the slots that one of several readers takes.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::feed::error::{FeedError, Result};

/// Reader `rank` of `world` readers of the same global batches.
///
/// A shard decides which reader gets a row, never the row's slot in the global batch. Therefore readers may
/// join and leave between any two steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "ShardRecord", into = "ShardRecord")]
pub struct Shard {
    rank: u32,
    world: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ShardRecord {
    rank: u32,
    world: u32,
}

impl TryFrom<ShardRecord> for Shard {
    type Error = FeedError;
    fn try_from(r: ShardRecord) -> Result<Self> {
        Shard::new(r.rank, r.world)
    }
}

impl From<Shard> for ShardRecord {
    fn from(s: Shard) -> Self {
        ShardRecord { rank: s.rank, world: s.world }
    }
}

impl Shard {
    /// The only reader, which takes all slots.
    pub const WHOLE: Shard = Shard { rank: 0, world: 1 };

    /// Reader `rank` (from 0) of `world`.
    ///
    /// # Errors
    /// [`FeedError::Invalid`] unless `rank < world`.
    pub fn new(rank: u32, world: u32) -> Result<Self> {
        if rank >= world {
            return Err(FeedError::invalid(format!(
                "rank {rank} of {world} readers: ranks run from 0 to one less than the readers"
            )));
        }
        Ok(Self { rank, world })
    }

    /// This reader's number, from 0.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Number of readers.
    pub fn world(&self) -> u32 {
        self.world
    }

    /// The slots `[rank·B/world, (rank+1)·B/world)` of a global batch of `B` rows. Shards are contiguous and
    /// disjoint, cover the batch, and differ in size by at most one. Some are empty when there are more
    /// readers than rows in a batch.
    pub fn slots(&self, batch_rows: usize) -> Range<usize> {
        self.slots_of(0..batch_rows)
    }

    /// This reader's part of some slots of a global batch, cut as [`Shard::slots`] cuts the whole batch.
    pub(crate) fn slots_of(&self, slots: Range<usize>) -> Range<usize> {
        let rows = slots.len() as u128;
        let cut = |r: u32| slots.start + (r as u128 * rows / self.world as u128) as usize;
        cut(self.rank)..cut(self.rank + 1)
    }
}
