//! Exact sums over virtual shards ([`crate::fixed`]) for the strategy `strict`: no result depends on the number of ranks.
//!
//! Gradients of weight matrices come as factors. Each is computed and added tile by tile, for all shards of a pass in
//! turn: the tile and its sums stay in the cache. With 12 shards of 11 rows, gradients in memory take more than half of a
//! step's time.

use std::sync::Arc;

use rayon::prelude::*;

use super::{ReduceError, Reduced, Reduction};
use crate::collective::Ring;
use crate::engine::{Buckets, Product, ShardGradients};
use crate::fixed::{FRACTION_BITS_DEFAULT, FixedError, Scale, Underflow};
use crate::ledger::Tally;

#[cfg(test)]
mod tests;

/// Elements of a tile: with its sums 384 KiB, which the second-level cache holds. Tiles are the same on every worker, since
/// the bits of a matrix product depend on its sizes.
const TILE: usize = 1 << 15;

/// One step of so many counts the elements that are rounded to 0, until it has warned.
const COUNTED_STEP: u64 = 64;
/// The least part of the elements that a warning is for. Confident predictions have some slopes next to 0, without harm.
const LOST_PART: u64 = 16;

/// The sums of a step in a scale that all workers agree on.
pub(super) struct Strict {
    shards: usize,
    form: Arc<Buckets>,
    /// The scale of the last committed step: what every worker holds.
    scale: Scale,
    /// The scale of this step.
    tried: Scale,
    sums: Vec<i64>,
    parameters: usize,
    /// The largest magnitude of each part since the last `finish`, without those of `products`.
    largest: Vec<(usize, f32)>,
    /// Gradients that are not in `sums` yet, each with the position of its part in `largest`.
    products: Vec<(usize, Product<f32>)>,
    /// Elements of the factors of `products`.
    held: usize,
    /// Steps since this process began.
    steps: u64,
    /// Elements of this worker that are rounded to 0 in this step; `None` in a step that does not count them.
    underflow: Option<Underflow>,
    warned: bool,
}

impl Strict {
    /// Sums over `shards` virtual shards of gradients that come in `form`, one bucket.
    pub(super) fn new(shards: usize, form: Buckets) -> Result<Strict, FixedError> {
        let scale = scale(FRACTION_BITS_DEFAULT, shards)?;
        Ok(Strict {
            shards,
            form: Arc::new(form),
            scale,
            tried: scale,
            sums: Vec::new(),
            parameters: 0,
            largest: Vec::new(),
            products: Vec::new(),
            held: 0,
            steps: 0,
            underflow: None,
            warned: false,
        })
    }

    /// Adds the gradients that are held as factors.
    fn add_held(&mut self) -> Result<(), FixedError> {
        self.held = 0;
        let mut products = std::mem::take(&mut self.products);
        // Stable, though the order within a matrix does not matter for integers.
        products.sort_by_key(|(_, product)| product.range().start);
        for of_matrix in products.chunk_by(|(_, one), (_, other)| one.range() == other.range()) {
            let counts = self.underflow.is_some();
            let found = add_products(self.tried, &mut self.sums, of_matrix, counts)?;
            for ((position, _), (found, underflow)) in of_matrix.iter().zip(found) {
                let largest = &mut self.largest[*position].1;
                *largest = largest.max(found);
                self.count(underflow);
            }
        }
        Ok(())
    }

    fn count(&mut self, underflow: Underflow) {
        if let Some(all) = &mut self.underflow {
            *all += underflow;
        }
    }

    /// Warns once where training goes on without a part of the gradient of this worker.
    fn warn_of_underflow(&mut self, step: u64) {
        let Some(Underflow { elements, lost }) = self.underflow else { return };
        if self.warned || lost == 0 || lost.saturating_mul(LOST_PART) < elements {
            return;
        }
        self.warned = true;
        tracing::warn!(
            step,
            "{lost} of {elements} gradient elements count as 0 in exact sums, as they are more than 1e12 times smaller than \
             the largest: bring the columns of features to similar sizes, or set strategy = \"allreduce\""
        );
    }
}

impl Reduction for Strict {
    fn parts(&self, _world: usize) -> usize {
        self.shards
    }

    fn begin(&mut self) {
        self.tried = self.scale;
        self.underflow = (!self.warned && self.steps.is_multiple_of(COUNTED_STEP)).then(Underflow::default);
        self.steps += 1;
    }

    fn clear(&mut self, parameters: usize) {
        self.parameters = parameters;
        self.sums.clear();
        self.sums.resize(parameters, 0);
        self.largest.clear();
        self.products.clear();
        self.held = 0;
        // The step may begin anew, in another scale.
        self.underflow = self.underflow.map(|_| Underflow::default());
    }

    fn form(&self) -> Option<Arc<Buckets>> {
        Some(Arc::clone(&self.form))
    }

    fn add(&mut self, part: usize, found: ShardGradients) -> Result<(), FixedError> {
        let mut largest = 0.0f32;
        let mut start = 0;
        for place in self.form.iter().flat_map(|bucket| bucket.places()) {
            let end = start + place.len();
            let values = &found.grad[start..end];
            let found = self.tried.add(values, &mut self.sums[place.clone()]);
            largest = largest.max(found.map_err(|error| error.behind(place.start))?);
            if let Some(underflow) = &mut self.underflow {
                *underflow += self.tried.underflow(values);
            }
            start = end;
        }
        let position = self.largest.len();
        self.largest.push((part, largest));
        self.held += found.products.iter().map(Product::elements).sum::<usize>();
        self.products.extend(found.products.into_iter().map(|product| (position, product)));
        // Long sequences have factors larger than the gradient.
        if self.held > self.parameters {
            self.add_held()?;
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<Vec<(usize, f32)>, FixedError> {
        self.add_held()?;
        Ok(std::mem::take(&mut self.largest))
    }

    fn reduce(&mut self, step: u64, tally: Tally, ring: &mut Ring<'_>) -> Result<Reduced, ReduceError> {
        tally.encode(&mut self.sums);
        ring.all_reduce(step, &mut self.sums)?;
        let total = tally.decode(&self.sums[self.parameters..]).ok_or(ReduceError::Tally)?;
        if total.has_overflowed() {
            return Ok(Reduced::Overflow);
        }
        let largest = total.largest();
        if self.tried.suits(largest) {
            // One line for a job, whatever the number of its workers.
            if ring.rank() == 0 {
                self.warn_of_underflow(step);
            }
            return Ok(Reduced::Sum(total));
        }
        tracing::debug!(step, largest, "computing the step in another scale");
        self.tried = self.tried.for_largest(largest);
        Ok(Reduced::Again)
    }

    fn mean(&mut self, weight: f64, mean: &mut Vec<f32>) -> Result<(), FixedError> {
        mean.resize(self.parameters, 0.0);
        self.tried.weighted_mean_into(&self.sums[..self.parameters], weight, mean)
    }

    fn commit(&mut self) {
        self.scale = self.tried;
    }

    fn fraction_bits(&self) -> Option<i32> {
        Some(self.scale.fraction_bits())
    }

    fn restore(&mut self, fraction_bits: Option<i32>) -> Result<(), FixedError> {
        self.scale = scale(fraction_bits.unwrap_or(FRACTION_BITS_DEFAULT), self.shards)?;
        Ok(())
    }
}

/// Contributions to a sum: one per virtual shard; nothing else is summed in the gradient's lanes.
fn scale(fraction_bits: i32, shards: usize) -> Result<Scale, FixedError> {
    Scale::new(fraction_bits, u32::try_from(shards).unwrap_or(u32::MAX))
}

/// Adds the gradients of one matrix to the flat vector `sums`. Returns the largest magnitude of each, and the elements that
/// are rounded to 0 if `counts`.
fn add_products(
    scale: Scale,
    sums: &mut [i64],
    products: &[(usize, Product<f32>)],
    counts: bool,
) -> Result<Vec<(f32, Underflow)>, FixedError> {
    let Some((_, first)) = products.first() else { return Ok(Vec::new()) };
    let (start, width) = (first.range().start, first.width());
    let rows = (TILE / width).max(1);
    let add_tile = |values: &mut Vec<f32>, (tile, sums): (usize, &mut [i64])| {
        values.resize(sums.len(), 0.0);
        let add = |(_, product): &(usize, Product<f32>)| {
            product.rows_into(tile * rows, values);
            let largest =
                scale.add(values, sums).map_err(|error| error.behind(start + tile * rows * width))?;
            Ok((largest, if counts { scale.underflow(values) } else { Underflow::default() }))
        };
        products.iter().map(add).collect::<Result<Vec<(f32, Underflow)>, FixedError>>()
    };
    let tiles = sums[first.range().clone()].par_chunks_mut(rows * width).enumerate();
    let of_tiles: Vec<Vec<(f32, Underflow)>> =
        tiles.map_init(Vec::new, add_tile).collect::<Result<_, _>>()?;
    let mut all = vec![(0.0f32, Underflow::default()); products.len()];
    for of_tile in of_tiles {
        for ((largest, underflow), (found, lost)) in all.iter_mut().zip(of_tile) {
            *largest = largest.max(found);
            *underflow += lost;
        }
    }
    Ok(all)
}
