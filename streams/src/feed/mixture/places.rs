//! The rows at the places of a mixture, found without a read.

use std::ops::Range;

use super::Mixture;
use crate::feed::order::PLACES_MAX;
use crate::feed::places::lane_positions;

impl Mixture {
    /// The first place of a global batch: its rows are at `[step·B, (step+1)·B)`. Saturates.
    pub fn place_of_step(&self, step: u64) -> u64 {
        step.saturating_mul(self.batch_rows() as u64)
    }

    /// The place of each slot of a global batch; empty beyond the last batch. Slots of a batch have the places
    /// `[step·B, (step+1)·B)` in another order, since a source lists its rows of a batch lane by lane. Memory and time grow
    /// with the rows of a batch.
    pub fn places_of_batch(&self, step: u64) -> Vec<u64> {
        let places = self.place_of_step(step)..self.place_of_step(step.saturating_add(1));
        if places.end > PLACES_MAX {
            return Vec::new();
        }
        let turns = self.turns().sources(places.clone());
        let mut own = vec![Vec::new(); self.sources().len()];
        for (place, source) in places.clone().zip(&turns) {
            own[*source].push(place);
        }
        let before = self.counts(places.start);
        // The places of each source in the order in which it lists them.
        let mut listed = Vec::with_capacity(own.len());
        for ((source, own), before) in self.sources().iter().zip(&own).zip(before) {
            let (order, rows) = (source.plan.order(), own.len() as u64);
            let mut found = Vec::with_capacity(own.len());
            for (lane, positions) in lane_positions(order, &(before..before + rows), &(0..rows)) {
                found
                    .extend(positions.map(|position| own[(position * order.lanes + lane - before) as usize]));
            }
            listed.push(found.into_iter());
        }
        turns.iter().filter_map(|source| listed[*source].next()).collect()
    }

    /// Calls `visit` with the source and the row index in it of the row at each of some places, in no particular order.
    /// Reads nothing; takes some tens of nanoseconds a row.
    pub fn visit_rows(&self, places: Range<u64>, mut visit: impl FnMut(u32, u64)) {
        let (before, after) = (self.counts(places.start), self.counts(places.end));
        for (at, source) in self.sources().iter().enumerate() {
            source.plan.visit_rows(before[at]..after[at], |row| visit(at as u32, row));
        }
    }
}
