//! The global order: the row in each slot of each global batch.
//!
//! The stream of a plan is one endless sequence of places `t = 0, 1, 2, …`; epoch `e` is exactly the
//! places `[e·N, (e+1)·N)` of a dataset of `N` rows, and global batch `b` exactly the places
//! `[b·B, (b+1)·B)`. So epochs roll over inside the stream, and nothing is padded or dropped.
//!
//! Place `t` belongs to lane `t mod C` at position `t div C`. Inside an epoch the row groups are
//! permuted and laid end to end; each lane walks its own contiguous range of that virtual row space,
//! window by window, and visits the rows of a window in a permuted order. Lane lengths within an
//! epoch differ by at most one row, and lanes stay within one position of each other for ever.
//!
//! Slot `s` of a batch belongs to lane `s div m` with `m = B/C`, so a reader with a contiguous slot
//! range touches few lanes, hence few row groups.
//!
//! All of it is arithmetic on `(seed, epoch, lane, window)`: any place is found in O(1) plus a
//! binary search over the row groups, and the inverse too.

#[cfg(test)]
mod tests;

use std::ops::Range;

use crate::feed::permutation::{Permutation, derive_key};

/// Purpose of a derived key; the first word after the seed.
const KEY_GROUPS: u64 = 1;
const KEY_WINDOW: u64 = 2;

/// Places beyond this are refused: every sum below stays within 63 bits.
pub(crate) const PLACES_MAX: u64 = 1 << 61;

/// The shape of the order; all positive, `batch` a multiple of `lanes`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Order {
    pub(crate) seed: u64,
    pub(crate) rows: u64,
    pub(crate) lanes: u64,
    pub(crate) window: u64,
    pub(crate) batch: u64,
}

/// The window in which a lane stands at one of its positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) epoch: u64,
    pub(crate) lane: u64,
    pub(crate) index: u64,
    /// First row of the window in the virtual row space of its epoch.
    pub(crate) start: u64,
    /// Rows of the window.
    pub(crate) rows: u64,
    /// Index of the requested position among the window's rows, in visiting order.
    pub(crate) offset: u64,
}

impl Order {
    /// Slots of a lane in every batch.
    pub(crate) fn per_lane(&self) -> u64 {
        self.batch / self.lanes
    }

    /// Number of places before `t` that belong to lanes before `lane`.
    fn places_of_earlier_lanes(&self, t: u64, lane: u64) -> u64 {
        (t / self.lanes) * lane + (t % self.lanes).min(lane)
    }

    /// First virtual row of a lane's range in an epoch; that of the next lane is its end.
    fn lane_start(&self, epoch: u64, lane: u64) -> u64 {
        let first = epoch * self.rows;
        self.places_of_earlier_lanes(first + self.rows, lane) - self.places_of_earlier_lanes(first, lane)
    }

    /// Position of a lane at which an epoch begins.
    fn epoch_position(&self, epoch: u64, lane: u64) -> u64 {
        let first = epoch * self.rows;
        first / self.lanes + u64::from(lane < first % self.lanes)
    }

    /// Windows of neighbouring lanes begin at different positions, so that readers need new row
    /// groups one lane after the other and not all at once.
    fn stagger(&self, lane: u64) -> u64 {
        if self.rows / self.lanes <= self.window {
            return 0;
        }
        (u128::from(lane) * u128::from(self.window) / u128::from(self.lanes)) as u64
    }

    pub(crate) fn window_at(&self, lane: u64, position: u64) -> Window {
        let epoch = (position * self.lanes + lane) / self.rows;
        let within = position - self.epoch_position(epoch, lane);
        let lane_start = self.lane_start(epoch, lane);
        let lane_rows = self.lane_start(epoch, lane + 1) - lane_start;
        let stagger = self.stagger(lane);
        let index = (within + stagger) / self.window;
        let start = (index * self.window).saturating_sub(stagger);
        let end = ((index + 1) * self.window - stagger).min(lane_rows);
        Window { epoch, lane, index, start: lane_start + start, rows: end - start, offset: within - start }
    }

    /// The order in which the rows of a window are visited.
    pub(crate) fn shuffle(&self, w: &Window) -> Permutation {
        let key = derive_key(&[self.seed, KEY_WINDOW, w.epoch, w.lane, w.index]);
        Permutation::new(w.rows, key)
    }

    /// The order of the row groups in an epoch.
    fn group_order(&self, groups: usize, epoch: u64) -> Permutation {
        Permutation::new(groups as u64, derive_key(&[self.seed, KEY_GROUPS, epoch]))
    }

    /// The lanes that a slot range touches, each with its positions in the batch of `step`.
    pub(crate) fn lane_positions(
        &self,
        step: u64,
        slots: Range<usize>,
    ) -> impl Iterator<Item = (u64, Range<u64>)> + use<> {
        let m = self.per_lane();
        let (first, end) = (slots.start as u64, slots.end as u64);
        let lanes = if first < end { first / m..(end - 1) / m + 1 } else { 0..0 };
        lanes.map(move |lane| {
            let from = first.max(lane * m) - lane * m;
            let to = end.min((lane + 1) * m) - lane * m;
            (lane, step * m + from..step * m + to)
        })
    }

    /// The virtual row and the epoch of one slot.
    pub(crate) fn virtual_row(&self, step: u64, slot: u64) -> (u64, u64) {
        let m = self.per_lane();
        let window = self.window_at(slot / m, step * m + slot % m);
        (window.epoch, window.start + self.shuffle(&window).apply(window.offset))
    }

    /// The inverse of [`Order::virtual_row`]: step and slot of a virtual row of an epoch.
    pub(crate) fn place_of(&self, epoch: u64, row: u64) -> (u64, u64) {
        let (mut low, mut high) = (0, self.lanes);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if self.lane_start(epoch, middle) <= row { low = middle } else { high = middle }
        }
        // Of several lanes that start here only the last has rows.
        let lane = low;
        let within = row - self.lane_start(epoch, lane);
        let position = self.epoch_position(epoch, lane) + within;
        let window = self.window_at(lane, position);
        let offset = self.shuffle(&window).invert(row - window.start);
        let position = position - window.offset + offset;
        let m = self.per_lane();
        (position / m, lane * m + position % m)
    }
}

/// The row groups of one epoch laid end to end.
#[derive(Debug)]
pub(crate) struct EpochLayout {
    /// Row group at each place of the layout.
    pub(crate) groups: Vec<u32>,
    /// First virtual row of each place, and the total at the end.
    pub(crate) starts: Vec<u64>,
}

impl EpochLayout {
    /// O(row groups); `rows` gives the size of each.
    pub(crate) fn new(order: &Order, epoch: u64, rows: &[u32]) -> Self {
        let permutation = order.group_order(rows.len(), epoch);
        let groups: Vec<u32> = (0..rows.len() as u64).map(|i| permutation.apply(i) as u32).collect();
        let mut starts = Vec::with_capacity(rows.len() + 1);
        let mut start = 0u64;
        for &group in &groups {
            starts.push(start);
            start += u64::from(rows[group as usize]);
        }
        starts.push(start);
        Self { groups, starts }
    }

    /// The place of the layout that holds a virtual row; no row group is empty.
    pub(crate) fn place_of(&self, row: u64) -> usize {
        self.starts.partition_point(|&s| s <= row) - 1
    }

    /// The places of the layout that a virtual row range overlaps.
    pub(crate) fn places(&self, start: u64, rows: u64) -> Range<usize> {
        if rows == 0 {
            return 0..0;
        }
        let first = self.place_of(start);
        let last = first + self.starts[first + 1..].partition_point(|&s| s < start + rows);
        first..last + 1
    }
}
