//! The order of rows within blocks of batches: rows of like length stand together.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use super::Buckets;
use crate::feed::Plan;
use crate::feed::permutation::{Permutation, derive_key};
use crate::feed::pick::Picker;
use crate::feed::places::{LanePositions, lane_positions};

/// Most batches of a block.
const BLOCK_BATCHES: u64 = 64;
/// Most rows of a block of several batches.
const BLOCK_ROWS: u64 = 1 << 20;
/// Blocks that are kept: those of readers that are a little apart.
const BLOCKS_KEPT: usize = 4;
/// Purpose of a derived key; the order uses 1 and 2, rows 3 and 4, packed documents 5.
const KEY_BATCHES: u64 = 6;

/// The places of a plan with buckets.
pub(crate) struct PlaceMap {
    plan: Arc<Plan>,
    buckets: Arc<Buckets>,
    picker: Picker,
    /// Rows of a block, a multiple of those of a batch.
    block: u64,
    blocks: Mutex<VecDeque<(u64, Arc<Vec<u32>>)>>,
}

impl PlaceMap {
    pub(crate) fn new(plan: &Arc<Plan>, buckets: &Arc<Buckets>) -> Self {
        let order = plan.order();
        // The lanes of a block stay within one window, which the cache has room for.
        let window = order.window.saturating_mul(order.lanes);
        let batches = BLOCK_BATCHES.min(BLOCK_ROWS / order.batch).min(window / order.batch).max(1);
        Self {
            plan: Arc::clone(plan),
            buckets: Arc::clone(buckets),
            picker: Picker::new(Arc::clone(plan)),
            block: batches * order.batch,
            blocks: Mutex::default(),
        }
    }

    /// The positions of the rows of a batch or of a part of it, lane by lane: of the rows at `places` those with the
    /// numbers `share`.
    pub(crate) fn lanes(&self, places: &Range<u64>, share: &Range<u64>) -> Vec<LanePositions> {
        let lanes = self.plan.order().lanes;
        let number = places.start / self.block;
        let (first, block) = (number * self.block, self.block_at(number));
        let within = (places.start - first) as usize..(places.end - first) as usize;
        let sources = block.get(within).unwrap_or_default();
        let at = |source: &u32| (first + u64::from(*source)) % lanes;
        let mut found: Vec<(u64, u64)> =
            sources.iter().map(|source| (at(source), (first + u64::from(*source)) / lanes)).collect();
        found.sort_unstable();
        let share = share.start as usize..share.end as usize;
        let mut merged: Vec<LanePositions> = Vec::new();
        for (lane, position) in found.get(share).unwrap_or_default() {
            match merged.last_mut() {
                Some((last, positions)) if *last == *lane && positions.end == *position => positions.end += 1,
                _ => merged.push((*lane, *position..*position + 1)),
            }
        }
        merged
    }

    /// The positions of the block of a place, for reading ahead.
    pub(crate) fn block_lanes(&self, place: u64) -> Vec<LanePositions> {
        let first = place / self.block * self.block;
        lane_positions(self.plan.order(), &(first..first + self.block), &(0..self.block))
    }

    fn block_at(&self, number: u64) -> Arc<Vec<u32>> {
        let known =
            self.blocks.lock().iter().find(|(at, _)| *at == number).map(|(_, block)| Arc::clone(block));
        known.unwrap_or_else(|| {
            let block = Arc::new(self.make(number * self.block..(number + 1) * self.block));
            let mut blocks = self.blocks.lock();
            if let Some((_, known)) = blocks.iter().find(|(at, _)| *at == number) {
                // Another task has made it meanwhile.
                return Arc::clone(known);
            }
            blocks.push_back((number, Arc::clone(&block)));
            if blocks.len() > BLOCKS_KEPT {
                blocks.pop_front();
            }
            block
        })
    }

    /// For each place of a block, the place in the order whose row it has, counted from the first place of the block.
    fn make(&self, block: Range<u64>) -> Vec<u32> {
        let (order, rows) = (self.plan.order(), self.plan.rows());
        let mut sources = Vec::with_capacity((block.end - block.start) as usize);
        let mut start = block.start;
        while start < block.end {
            // A pass ends at a multiple of the rows.
            let segment = start..block.end.min((start / rows + 1) * rows);
            let sorted = self.sorted(&segment);
            let batch = order.batch as usize;
            let head = ((order.batch - start % order.batch) % order.batch).min(sorted.len() as u64) as usize;
            // The batch in which a pass ends takes the longest lists of both passes.
            let (batches, ends) = sorted.split_at((sorted.len() - head) / batch * batch);
            let (head, tail) = ends.split_at(head);
            let key = derive_key(&[order.seed, KEY_BATCHES, start]);
            let count = batches.len() / batch;
            let shuffle = Permutation::new(count as u64, key);
            let shuffled = (0..count).flat_map(|at| {
                let first = shuffle.apply(at as u64) as usize * batch;
                &batches[first..first + batch]
            });
            // A block has at most 2^22 rows, those of the largest batch.
            let offset = |place: &u64| (place - block.start) as u32;
            sources.extend(head.iter().chain(shuffled).chain(tail).map(offset));
            start = segment.end;
        }
        sources
    }

    /// The places of a segment by the bucket of their rows; those of one bucket in order.
    fn sorted(&self, segment: &Range<u64>) -> Vec<u64> {
        let lanes_of_order = self.plan.order().lanes;
        let rows = segment.end - segment.start;
        let lanes = lane_positions(self.plan.order(), segment, &(0..rows));
        let picks = self.picker.pick(&lanes, rows as usize);
        let mut of_places = vec![0u8; rows as usize];
        let places = lanes.iter().flat_map(|(lane, positions)| {
            positions.clone().map(move |position| position * lanes_of_order + lane)
        });
        for (place, (source, within)) in places.zip(&picks.index) {
            let row = self.plan.base(picks.groups[*source]) + *within as u64;
            of_places[(place - segment.start) as usize] = self.buckets.of(row);
        }
        let mut sorted: Vec<u64> = segment.clone().collect();
        sorted.sort_by_key(|place| of_places[(place - segment.start) as usize]);
        sorted
    }
}
