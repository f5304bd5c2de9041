//! Rows at any places of the order.
//!
//! Lanes take the places in turn (`order.rs`). A batch of places lists its rows lane by lane, so that a reader with a
//! part of the batch touches few lanes. For the places of a whole global batch these are its slots.

use std::ops::Range;
use std::sync::Arc;

use crate::feed::Plan;
use crate::feed::order::Order;
use crate::feed::pick::Picker;

/// Places that are looked up at a time.
const CHUNK: u64 = 1 << 16;

/// A lane with some of its positions.
pub(crate) type LanePositions = (u64, Range<u64>);

/// The rows at `places`, lane by lane; of these the ones with the numbers `share`.
pub(crate) fn lane_positions(order: &Order, places: &Range<u64>, share: &Range<u64>) -> Vec<LanePositions> {
    // Position p of a lane is place p·lanes + lane: the first position that is not before a place.
    let position = |place: u64, lane: u64| (place + (order.lanes - 1 - lane)) / order.lanes;
    let mut found = Vec::new();
    let mut before = 0;
    for lane in 0..order.lanes {
        if before >= share.end {
            break;
        }
        let (first, end) = (position(places.start, lane), position(places.end, lane));
        let rows = end - first;
        let cut = |number: u64| first + number.saturating_sub(before).min(rows);
        let own = cut(share.start)..cut(share.end);
        if !own.is_empty() {
            found.push((lane, own));
        }
        before += rows;
    }
    found
}

impl Plan {
    /// The place of a slot of a global batch. Slots of a batch have the places `[step·B, (step+1)·B)`, though in another
    /// order.
    pub fn place_of_slot(&self, step: u64, slot: usize) -> u64 {
        let (order, slot) = (self.order(), slot as u64);
        let per_lane = order.per_lane();
        let position = step.saturating_mul(per_lane).saturating_add(slot % per_lane);
        position.saturating_mul(order.lanes).saturating_add(slot / per_lane)
    }

    /// Calls `visit` with the global row index of each row of a pass, in the order of the dataset.
    pub fn visit_all_rows(&self, mut visit: impl FnMut(u64)) {
        let Some(words) = self.selected_words() else { return (0..self.rows()).for_each(visit) };
        for (at, word) in words.iter().enumerate() {
            let mut left = *word;
            while left != 0 {
                visit(at as u64 * 64 + u64::from(left.trailing_zeros()));
                left &= left - 1;
            }
        }
    }

    /// Calls `visit` with the global row index of the row at each of some places, in no particular order. Reads
    /// nothing; takes some tens of nanoseconds a row.
    pub fn visit_rows(self: &Arc<Self>, places: Range<u64>, mut visit: impl FnMut(u64)) {
        let picker = Picker::new(Arc::clone(self));
        let mut from = places.start;
        while from < places.end {
            let chunk = from..places.end.min(from.saturating_add(CHUNK));
            let rows = chunk.end - chunk.start;
            let lanes = lane_positions(self.order(), &chunk, &(0..rows));
            picker.pick(&lanes, rows as usize).rows.into_iter().for_each(&mut visit);
            from = chunk.end;
        }
    }
}
