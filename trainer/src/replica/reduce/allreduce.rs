//! Sums of f32 for the strategy `allreduce`: a gradient is summed in buckets while the engine computes the rest, by the
//! ring or by the links of the membership epoch. The tally stays on the ring.
//!
//! All ranks have the same [`Buckets`] and sum them in their order, then the tally. So the bits of a sum depend on the
//! number of ranks, and not on the time at which a bucket is complete.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use super::{ReduceError, Reduced, Reduction};
use crate::collective::{self, GradientLinks, Ring};
use crate::engine::{BucketFn, Buckets, EngineError, ShardGradients};
use crate::fixed::FixedError;
use crate::ledger::Tally;
use crate::wide::wide;

#[cfg(test)]
mod tests;

/// One pass of each rank over its rows of each accumulated batch, and sums of f32. Losses and counts stay exact.
pub(in crate::replica) struct Allreduce {
    passes: usize,
    /// Those of the last pass. Parameters that do not train are in none.
    buckets: Buckets,
    /// The sum of this rank's passes; bucket by bucket, that of all ranks takes its place.
    sum: Vec<f32>,
    /// What sums buckets in place of the ring.
    links: Option<Box<dyn GradientLinks>>,
}

impl Allreduce {
    pub(super) fn new(passes: usize, buckets: Buckets) -> Allreduce {
        Allreduce { passes, buckets, sum: Vec::new(), links: None }
    }

    /// Runs `compute`, which hands over this rank's last gradient in buckets, and meanwhile sums each of them over all
    /// ranks. Also returns how long this rank waited for sums after `compute`.
    ///
    /// A broken ring ends `compute` at its next bucket. An error of `compute` ends the sum after the buckets that have left.
    pub(in crate::replica) fn overlap<T>(
        &mut self,
        step: u64,
        ring: &mut Ring<'_>,
        compute: impl FnOnce(&Buckets, &mut BucketFn<'_, f32>) -> Result<T, EngineError>,
    ) -> Result<(T, Duration), ReduceError> {
        let Allreduce { buckets, sum, links, .. } = self;
        let buckets = &*buckets;
        let links: &mut dyn GradientLinks = match links {
            Some(links) => &mut **links,
            None => ring,
        };
        // No bound: it holds at most one gradient, and `compute` never waits for the ring.
        let (sender, receiver) = mpsc::channel();
        let mut hand_over = move |values: Vec<f32>| sender.send(values).map_err(|_| EngineError::Abandoned);
        if buckets.count() == 1 {
            // Nothing is left to compute once the only bucket is complete.
            let found = compute(buckets, &mut hand_over)?;
            let began = Instant::now();
            sum_buckets(step, buckets, receiver, sum, links)?;
            return Ok((found, began.elapsed()));
        }
        thread::scope(move |scope| {
            let work = move || sum_buckets(step, buckets, receiver, sum, links);
            let summing = thread::Builder::new().name("ring".to_owned()).spawn_scoped(scope, work);
            let summing = summing.map_err(ReduceError::Thread)?;
            // Dropped also if `compute` panics: the thread ends when no bucket can come any more.
            let mut hand_over = hand_over;
            let found = compute(buckets, &mut hand_over);
            drop(hand_over);
            let began = Instant::now();
            let summed = summing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            match found {
                Err(error) if !matches!(error, EngineError::Abandoned) => Err(error.into()),
                found => {
                    summed?;
                    Ok((found?, began.elapsed()))
                }
            }
        })
    }
}

/// Adds the received gradients of `buckets` to what `sum` has of earlier passes, and replaces it by the sum over all
/// ranks. Returns early if no further bucket comes.
fn sum_buckets(
    step: u64,
    buckets: &Buckets,
    received: mpsc::Receiver<Vec<f32>>,
    sum: &mut Vec<f32>,
    links: &mut dyn GradientLinks,
) -> Result<(), collective::Error> {
    let is_first = sum.is_empty();
    if is_first {
        *sum = vec![0.0; buckets.flat_elements()];
    }
    for (at, (bucket, mut values)) in buckets.iter().zip(received).enumerate() {
        if !is_first {
            bucket.add_from(sum, &mut values);
        }
        links.sum_bucket(step, at, &mut values)?;
        bucket.copy_to(sum, &values);
    }
    Ok(())
}

impl Reduction for Allreduce {
    fn parts(&self, world: usize) -> usize {
        world * self.passes
    }

    fn begin(&mut self) {}

    fn clear(&mut self, _parameters: usize) {
        self.sum = Vec::new();
    }

    fn add(&mut self, _part: usize, found: ShardGradients) -> Result<(), FixedError> {
        if self.sum.is_empty() {
            self.sum = found.grad;
        } else {
            self.sum.iter_mut().zip(found.grad).for_each(|(sum, value)| *sum += value);
        }
        // No scale needs the largest magnitude.
        Ok(())
    }

    fn in_buckets(&mut self, world: usize) -> Option<&mut Allreduce> {
        (world > 1).then_some(self)
    }

    fn connect(&mut self, links: Option<Box<dyn GradientLinks>>) {
        self.links = links;
    }

    /// The gradients are summed: buckets leave while the engine computes, and a rank alone has no others.
    fn reduce(&mut self, step: u64, tally: Tally, ring: &mut Ring<'_>) -> Result<Reduced, ReduceError> {
        let mut lanes = Vec::with_capacity(tally.lanes());
        tally.encode(&mut lanes);
        ring.all_reduce(step, &mut lanes)?;
        let total = tally.decode(&lanes).ok_or(ReduceError::Tally)?;
        // Every rank knows the total, so that all of them drop the sum.
        Ok(if total.has_overflowed() { Reduced::Overflow } else { Reduced::Sum(total) })
    }

    fn mean(&mut self, weight: f64, mean: &mut Vec<f32>) -> Result<(), FixedError> {
        // Frees the former mean instead of keeping it for the next sum.
        *mean = std::mem::take(&mut self.sum);
        divide(mean, weight)
    }
}

/// Divides a sum by the weight of its rows. A gradient or a sum beyond f32 fails on every rank alike, since all of
/// them hold the same sum.
fn divide(sum: &mut [f32], weight: f64) -> Result<(), FixedError> {
    // No early exit, so that the loop vectorizes.
    if !sum.iter().fold(true, |finite, value| finite & value.is_finite()) {
        let index = sum.iter().position(|value| !value.is_finite()).unwrap_or_default();
        return Err(FixedError::NonFinite { index, value: sum[index] });
    }
    scale_all(sum, 1.0 / weight);
    Ok(())
}

wide! {
    fn scale_all(values: &mut [f32], factor: f64) {
        for value in values {
            *value = (f64::from(*value) * factor) as f32;
        }
    }
}
