//! The run's ledger: rows, losses and correct answers of applied steps, equal on every worker.
//!
//! The exact sum of the gradients also carries what a step adds to the ledger. The ledger is therefore part
//! of the replicated state: a step that was not applied is not counted. Rows are counted by the epoch label
//! that the order gives each row, together with a sum of row hashes. At the end of an epoch both must match
//! the rows of the epoch, all or a part of the selected rows of the dataset. That holds only if each of them came exactly
//! once (up to hash collisions).
//!
//! Losses and correct answers come as sums over a step. A step with rows of several epochs is divided among them by
//! [`Share::take`]: each epoch has the part of the sums that its rows have of the step's rows.
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::engine::ChannelMoments;

#[cfg(test)]
mod tests;

/// Fixed lanes, before the others.
const LANES_FIXED: usize = 5;
/// Lanes of each epoch that a step touches.
const LANES_PER_EPOCH: usize = 2;
/// Lanes of each virtual shard.
const LANES_PER_SHARD: usize = 3;

/// A complete epoch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct EpochRecord {
    /// Rows delivered to applied steps, counted from their ids.
    pub rows: u64,
    /// Mean training loss of the epoch's rows, at the weights of each step. Rows count with the weights of their
    /// labels. A step with rows of several epochs adds to each the part of its loss and weight that the epoch's rows
    /// have of its rows.
    pub loss: f64,
    /// Share of the rows without an ignored label that were classified correctly; 0 for regression. Steps with rows of
    /// several epochs are divided as for the loss, in whole rows.
    pub accuracy: f64,
}

/// Rows counted for an incomplete epoch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Count {
    pub(crate) rows: u64,
    pub(crate) digest: u64,
}

/// Counters of a run after some number of steps.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Ledger {
    pub(crate) epochs: Vec<EpochRecord>,
    open: BTreeMap<u64, Count>,
    /// Rows of the next epoch to close. Earlier releases left out those of the step that closed the epoch before.
    rows: u64,
    correct: u64,
    /// Sum of the losses of `rows`, in step order.
    loss: f64,
    /// Those of `rows` with the ignored label.
    #[serde(default, skip_serializing_if = "is_zero")]
    ignored: u64,
    /// Sum of the weights of `rows`; none if each of them weighs 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    weight: Option<f64>,
    /// Figures of the newest step for epochs after the next one to close. Empty once that step's epochs are closed, so
    /// no checkpoint has it.
    #[serde(skip)]
    later: BTreeMap<u64, Share>,
}

/// Figures of rows of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Share {
    rows: u64,
    correct: u64,
    ignored: u64,
    loss: f64,
    weight: f64,
}

impl Share {
    /// Takes the figures of `rows` of these rows: `rows` of `self.rows` parts of the loss and of the weight, and as many
    /// of the rows without an ignored label and of the correct ones, rounded down. The last rows get what is left.
    ///
    /// Every worker divides the same sums, so the results have the same bits.
    fn take(&mut self, rows: u64) -> Share {
        if rows >= self.rows {
            return std::mem::take(self);
        }
        let (part, whole) = (rows as f64, self.rows as f64);
        // The quotient is at most `count`.
        let count_of = |count: u64| (u128::from(count) * u128::from(rows) / u128::from(self.rows)) as u64;
        let scored = count_of(self.rows.saturating_sub(self.ignored));
        let taken = Share {
            rows,
            correct: count_of(self.correct),
            ignored: rows.saturating_sub(scored),
            // Multiplied first: weights of 1 give exactly `rows`.
            loss: self.loss * part / whole,
            weight: self.weight * part / whole,
        };
        *self = Share {
            rows: self.rows - taken.rows,
            correct: self.correct - taken.correct,
            ignored: self.ignored.saturating_sub(taken.ignored),
            loss: self.loss - taken.loss,
            weight: self.weight - taken.weight,
        };
        taken
    }
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// A step's contribution to the ledger, of one worker or of all.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tally {
    pub(crate) rows: u64,
    pub(crate) correct: u64,
    /// Rows with the ignored label.
    pub(crate) ignored: u64,
    /// Members that want to leave after this step, so that another worker can join.
    pub(crate) leave: u64,
    /// Members that were told to stop.
    pub(crate) stop: u64,
    first_epoch: u64,
    counts: Vec<Count>,
    shards: Vec<Shard>,
    /// Statistics of the channels whose running statistics move, for each virtual shard.
    moments: Vec<ChannelMoments>,
    channels: usize,
}

/// A virtual shard's figures of a step. Only one worker computes a shard, so the sum over the workers has
/// exactly its bits.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Shard {
    loss: f64,
    /// Sum of its rows' weights.
    weight: f64,
    /// The largest magnitude of its gradient.
    largest: f32,
}

impl Tally {
    /// An empty tally for a step of `shards` virtual shards that delivers rows of the epochs `first..=last`.
    pub(crate) fn new(first: u64, last: u64, shards: usize) -> Tally {
        let epochs = (last.saturating_sub(first) + 1) as usize;
        Tally {
            rows: 0,
            correct: 0,
            ignored: 0,
            leave: 0,
            stop: 0,
            first_epoch: first,
            counts: vec![Count::default(); epochs],
            shards: vec![Shard::default(); shards],
            moments: Vec::new(),
            channels: 0,
        }
    }

    /// Makes room for the statistics of `channels` channels of each virtual shard.
    pub(crate) fn with_channels(mut self, channels: usize) -> Tally {
        self.channels = channels;
        self.moments = vec![ChannelMoments::default(); channels * self.shards.len()];
        self
    }

    /// The number of integers that [`Tally::encode`] appends.
    pub(crate) fn lanes(&self) -> usize {
        let shards = LANES_PER_SHARD * self.shards.len() + self.moments.len();
        LANES_FIXED + LANES_PER_EPOCH * self.counts.len() + shards
    }

    /// Records the loss of a virtual shard, its rows' weight and the largest magnitude of its gradient.
    pub(crate) fn shard(&mut self, shard: usize, loss: f64, weight: f64, largest: f32) {
        if let Some(noted) = self.shards.get_mut(shard) {
            *noted = Shard { loss, weight, largest };
        }
    }

    /// Records the largest magnitude of a virtual shard's gradient.
    pub(crate) fn record_largest(&mut self, shard: usize, largest: f32) {
        if let Some(noted) = self.shards.get_mut(shard) {
            noted.largest = largest;
        }
    }

    /// Records the statistics of a virtual shard's channels.
    pub(crate) fn record_moments(&mut self, shard: usize, moments: &[ChannelMoments]) {
        if let Some(places) = self.moments.chunks_exact_mut(self.channels.max(1)).nth(shard)
            && places.len() == moments.len()
        {
            places.copy_from_slice(moments);
        }
    }

    /// The statistics of the channels of each virtual shard, in order.
    pub(crate) fn moments(&self) -> impl Iterator<Item = &[ChannelMoments]> {
        self.moments.chunks_exact(self.channels.max(1))
    }

    /// Records that a gradient of a virtual shard is not finite in the step's precision.
    pub(crate) fn overflow(&mut self, shard: usize) {
        self.shard(shard, 0.0, 0.0, f32::INFINITY);
    }

    /// Whether [`Tally::overflow`] was recorded for a shard.
    pub(crate) fn has_overflowed(&self) -> bool {
        self.largest() == f32::INFINITY
    }

    /// The largest magnitude of all gradients.
    pub(crate) fn largest(&self) -> f32 {
        self.shards.iter().fold(0.0, |largest, shard| largest.max(shard.largest))
    }

    /// The loss of all rows, summed in the order of the shards.
    fn loss(&self) -> f64 {
        self.shards.iter().map(|shard| shard.loss).sum()
    }

    /// The weight of all rows, summed in the order of the shards.
    pub(crate) fn weight(&self) -> f64 {
        self.shards.iter().map(|shard| shard.weight).sum()
    }

    /// Counts one row; false if its epoch does not belong to the step.
    #[must_use]
    pub(crate) fn count(&mut self, epoch: u64, row: u64) -> bool {
        let index = epoch.checked_sub(self.first_epoch).and_then(|at| usize::try_from(at).ok());
        let Some(count) = index.and_then(|at| self.counts.get_mut(at)) else { return false };
        count.rows += 1;
        count.digest = count.digest.wrapping_add(row_digest(row));
        self.rows += 1;
        true
    }

    /// Encodes the tally as integers; the sums over all workers encode the total tally.
    pub(crate) fn encode(&self, into: &mut Vec<i64>) {
        into.extend([self.rows, self.correct, self.leave, self.stop, self.ignored].map(|count| count as i64));
        for count in &self.counts {
            into.extend([count.rows as i64, count.digest as i64]);
        }
        for shard in &self.shards {
            let (loss, weight) = (shard.loss.to_bits() as i64, shard.weight.to_bits() as i64);
            into.extend([loss, weight, i64::from(shard.largest.to_bits())]);
        }
        into.extend(self.moments.iter().map(|moments| moments.to_bits() as i64));
    }

    /// Decodes a sum of tallies that have the epochs of this one.
    pub(crate) fn decode(&self, lanes: &[i64]) -> Option<Tally> {
        if lanes.len() != self.lanes() {
            return None;
        }
        let (fixed, others) = lanes.split_at(LANES_FIXED);
        let (epochs, others) = others.split_at(LANES_PER_EPOCH * self.counts.len());
        let (shards, moments) = others.split_at(LANES_PER_SHARD * self.shards.len());
        Some(Tally {
            rows: fixed[0] as u64,
            correct: fixed[1] as u64,
            leave: fixed[2] as u64,
            stop: fixed[3] as u64,
            ignored: fixed[4] as u64,
            first_epoch: self.first_epoch,
            counts: epochs
                .chunks_exact(LANES_PER_EPOCH)
                .map(|count| Count { rows: count[0] as u64, digest: count[1] as u64 })
                .collect(),
            shards: shards
                .chunks_exact(LANES_PER_SHARD)
                .map(|shard| Shard {
                    loss: f64::from_bits(shard[0] as u64),
                    weight: f64::from_bits(shard[1] as u64),
                    largest: f32::from_bits(shard[2] as u32),
                })
                .collect(),
            moments: moments.iter().map(|bits| ChannelMoments::from_bits(*bits as u64)).collect(),
            channels: self.channels,
        })
    }

    /// Mean loss of the tally's rows, 0 if none of them has a weight.
    pub(crate) fn mean_loss(&self) -> f64 {
        mean(self.loss(), self.weight())
    }
}

/// Why an epoch cannot be closed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum EpochError {
    #[error("{delivered} rows were delivered, the epoch has {rows}")]
    Rows { delivered: u64, rows: u64 },
    #[error("{rows} rows were delivered, but some twice and some never")]
    Twice { rows: u64 },
    /// Nothing was learned, so a loss of 0 would be wrong.
    #[error(
        "no row of the epoch counts: each label is loss.ignore_index or has the weight 0 in loss.class_weights \
         (change these keys, or the labels)"
    )]
    Weightless,
}

fn mean(sum: f64, weight: f64) -> f64 {
    if weight > 0.0 { sum / weight } else { 0.0 }
}

impl Ledger {
    /// Adds the tally of an applied step. Close the epochs that end with it before the next one.
    pub(crate) fn add(&mut self, tally: &Tally) {
        let next = self.epochs.len() as u64;
        let mut left = Share {
            rows: tally.rows,
            correct: tally.correct,
            ignored: tally.ignored,
            loss: tally.loss(),
            weight: tally.weight(),
        };
        for (epoch, count) in (tally.first_epoch..).zip(&tally.counts) {
            let open = self.open.entry(epoch).or_default();
            open.rows += count.rows;
            open.digest = open.digest.wrapping_add(count.digest);
            let share = left.take(count.rows);
            if epoch <= next {
                self.add_share(share);
            } else {
                self.later.insert(epoch, share);
            }
        }
    }

    /// Adds figures of rows of the next epoch to close.
    fn add_share(&mut self, share: Share) {
        let weight = self.weight() + share.weight;
        self.rows += share.rows;
        self.weight = (weight != self.rows as f64).then_some(weight);
        self.correct += share.correct;
        self.ignored += share.ignored;
        self.loss += share.loss;
    }

    /// The weight of the rows of the next epoch to close.
    fn weight(&self) -> f64 {
        self.weight.unwrap_or(self.rows as f64)
    }

    /// Closes the next epoch. Fails unless each of its `rows` rows, which have the digest `digest`, was counted once.
    pub(crate) fn close_epoch(&mut self, rows: u64, digest: u64) -> Result<EpochRecord, EpochError> {
        let epoch = self.epochs.len() as u64;
        let count = self.open.remove(&epoch).unwrap_or_default();
        if count.rows != rows {
            return Err(EpochError::Rows { delivered: count.rows, rows });
        }
        // After a checkpoint of an earlier release the figures lack rows: only all rows of an epoch tell that none counts.
        let is_weightless = self.rows > 0 && self.weight() == 0.0;
        if is_weightless && (self.rows >= rows || self.epochs.is_empty()) {
            return Err(EpochError::Weightless);
        }
        if count.digest != digest {
            return Err(EpochError::Twice { rows });
        }
        // After a checkpoint of an earlier release an epoch may have no figures; it repeats those of the last one.
        let record = match (self.rows == 0 || is_weightless, self.epochs.last()) {
            (true, Some(last)) => EpochRecord { rows: count.rows, ..*last },
            _ => EpochRecord {
                rows: count.rows,
                loss: mean(self.loss, self.weight()),
                accuracy: self.correct as f64 / self.rows.saturating_sub(self.ignored).max(1) as f64,
            },
        };
        self.epochs.push(record);
        (self.rows, self.correct, self.loss) = (0, 0, 0.0);
        (self.ignored, self.weight) = (0, None);
        if let Some(share) = self.later.remove(&(epoch + 1)) {
            self.add_share(share);
        }
        Ok(record)
    }
}

/// The digest of rows that an epoch must have; about a nanosecond for each of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RowsDigest(pub(crate) u64);

impl RowsDigest {
    /// Adds a row, in any order.
    pub(crate) fn add(&mut self, row: u64) {
        self.0 = self.0.wrapping_add(row_digest(row));
    }
}

/// The finalizer of SplitMix64 (Steele, Lea and Flood, 2014), a bijection that scatters its input.
fn row_digest(row: u64) -> u64 {
    let mut z = row.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
