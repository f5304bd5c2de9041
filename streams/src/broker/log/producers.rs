//! Idempotent producers of one partition: a table that detects duplicate and out-of-order batches.
//!
//! The rules are those of Apache Kafka. A batch is appended when its epoch is current and its first sequence
//! number follows the last one. One of the last five batches sent again is answered with the offset that it
//! already has. The table is part of the log's checkpoint; at start, recovery adds the batches appended
//! since.

use std::collections::{HashMap, VecDeque};

use serde::{Deserialize, Serialize};

use super::batch::Header;
use crate::broker::code;

/// Recent batches kept per producer to detect duplicates; clients have at most five in flight.
const RECENT: usize = 5;
/// Producers remembered per partition; beyond this, the half that was silent longest is dropped.
const PRODUCERS_MAX: usize = 20_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Batch {
    first: i32,
    last: i32,
    base_offset: i64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Producer {
    epoch: i16,
    recent: VecDeque<Batch>,
}

/// The decision about a batch.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Append,
    /// It is in the log already, at this offset.
    Duplicate(i64),
    /// Refuse it with this protocol error and reason.
    Refuse(i16, &'static str),
}

#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub(crate) struct Producers {
    by_id: HashMap<i64, Producer>,
}

/// Sequence numbers wrap from `i32::MAX` to 0.
fn advance(sequence: i32, by: i32) -> i32 {
    ((i64::from(sequence) + i64::from(by)) % (i64::from(i32::MAX) + 1)) as i32
}

/// Whether `sequence` is ahead of `than` on the circle of sequence numbers.
fn is_after(sequence: i32, than: i32) -> bool {
    let circle = i64::from(i32::MAX) + 1;
    let ahead = (i64::from(sequence) - i64::from(than)).rem_euclid(circle);
    ahead != 0 && ahead < circle / 2
}

impl Producers {
    pub(crate) fn check_sequence(&self, header: &Header) -> Verdict {
        if header.producer_id < 0 {
            return Verdict::Append;
        }
        let (first, last) = (header.base_sequence, advance(header.base_sequence, header.count - 1));
        let Some(known) = self.by_id.get(&header.producer_id) else {
            return if first == 0 {
                Verdict::Append
            } else {
                // On this error a client starts again with a fresh id once none of its batches is in flight.
                Verdict::Refuse(code::UNKNOWN_PRODUCER_ID, "the log has no batch of this producer")
            };
        };
        if header.producer_epoch < known.epoch {
            return Verdict::Refuse(
                code::INVALID_PRODUCER_EPOCH,
                "a newer instance of this producer is active",
            );
        }
        if header.producer_epoch > known.epoch {
            return if first == 0 {
                Verdict::Append
            } else {
                Verdict::Refuse(code::OUT_OF_ORDER_SEQUENCE_NUMBER, "a new epoch begins with sequence 0")
            };
        }
        if let Some(seen) = known.recent.iter().find(|seen| seen.first == first && seen.last == last) {
            return Verdict::Duplicate(seen.base_offset);
        }
        let Some(newest) = known.recent.back() else {
            return Verdict::Append;
        };
        if first == advance(newest.last, 1) {
            Verdict::Append
        } else if !is_after(last, newest.last) {
            Verdict::Refuse(
                code::DUPLICATE_SEQUENCE_NUMBER,
                "the batch is already in the log, too far back to give its offset",
            )
        } else {
            Verdict::Refuse(
                code::OUT_OF_ORDER_SEQUENCE_NUMBER,
                "an earlier batch of this producer is missing",
            )
        }
    }

    /// Records a batch that is in the log.
    pub(crate) fn record_batch(&mut self, header: &Header, base_offset: i64) {
        if header.producer_id < 0 {
            return;
        }
        if self.by_id.len() >= PRODUCERS_MAX && !self.by_id.contains_key(&header.producer_id) {
            self.forget_half();
        }
        let known = self.by_id.entry(header.producer_id).or_insert_with(|| Producer {
            epoch: header.producer_epoch,
            recent: VecDeque::with_capacity(RECENT),
        });
        if known.epoch != header.producer_epoch {
            known.epoch = header.producer_epoch;
            known.recent.clear();
        }
        if known.recent.len() == RECENT {
            known.recent.pop_front();
        }
        let last = advance(header.base_sequence, header.count - 1);
        known.recent.push_back(Batch { first: header.base_sequence, last, base_offset });
    }

    fn forget_half(&mut self) {
        let newest = |producer: &Producer| producer.recent.back().map_or(-1, |batch| batch.base_offset);
        let mut offsets: Vec<i64> = self.by_id.values().map(newest).collect();
        let middle = offsets.len() / 2;
        let (_, &mut cut, _) = offsets.select_nth_unstable(middle);
        self.by_id.retain(|_, producer| newest(producer) > cut);
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.by_id.len()
    }
}
