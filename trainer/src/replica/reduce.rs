//! Reduction of a step's gradients: from the parts of this rank to the mean gradient of the global batch.
//!
//! One type per strategy behind [`Reduction`]. Every rank cuts the global batch into the same parts and computes
//! a contiguous range of them. A part is what the engine differentiates in one pass, and what a tally counts.

use thiserror::Error;

use crate::collective::{self, Ring};
use crate::fixed::{FRACTION_BITS_DEFAULT, FixedError, Scale};
use crate::job::JobFile;
use crate::ledger::Tally;
use crate::strategy::Strategy;
use crate::wide::wide;

/// Why a step has no total. Nothing was applied.
#[derive(Debug, Error)]
pub(super) enum ReduceError {
    #[error(transparent)]
    Collective(#[from] collective::Error),
    /// The ranks summed other figures than those of this step.
    #[error("the sum of the ranks' figures has another form than this rank's")]
    Tally,
}

/// What all ranks know after they have summed a step.
#[derive(Debug)]
pub(super) enum Reduced {
    /// The sum holds; its total tally.
    Sum(Tally),
    /// Every rank has to compute its parts again.
    Again,
    /// A gradient overflowed on some rank: every rank has to compute its parts again with a smaller loss.
    Overflow,
}

/// A strategy's way from gradients to their mean, with what it remembers between steps.
///
/// A step calls `begin`, then `clear`, `add` for each part and `reduce`, again while `reduce` gives no sum, then
/// `mean` and `commit`. A step that fails before its `commit` changes nothing that the next `begin` sees.
pub(super) trait Reduction: Send {
    /// The parts of a global batch in a ring of `world` ranks; at least `world`.
    fn parts(&self, world: usize) -> usize;

    /// Begins a step with what the last committed one left.
    fn begin(&mut self);

    /// Forgets the gradients of this rank.
    fn clear(&mut self, parameters: usize);

    /// Adds the gradient of a part, and returns what the tally records as its largest magnitude.
    fn add(&mut self, grad: Vec<f32>) -> Result<f32, FixedError>;

    /// Sums gradients and tallies over all ranks: the same result on every rank.
    fn reduce(&mut self, step: u64, tally: Tally, ring: &mut Ring<'_>) -> Result<Reduced, ReduceError>;

    /// Writes the mean gradient, for rows of the positive weight `weight`: the same bits on every rank.
    fn mean(&mut self, weight: f64, mean: &mut Vec<f32>) -> Result<(), FixedError>;

    /// The step is applied.
    fn commit(&mut self) {}

    /// The scale of exact sums, which is part of the run's state; none for a strategy without one.
    fn fraction_bits(&self) -> Option<i32> {
        None
    }

    /// Takes over the scale of a state.
    fn restore(&mut self, _fraction_bits: Option<i32>) -> Result<(), FixedError> {
        Ok(())
    }
}

/// The reduction of the job's strategy.
pub(super) fn of(job: &JobFile) -> Result<Box<dyn Reduction>, FixedError> {
    Ok(match job.strategy {
        Strategy::Strict => Box::new(Strict::new(job.step_shards())?),
        Strategy::Allreduce => Box::new(Allreduce { passes: job.accumulate_steps, sum: Vec::new() }),
    })
}

/// Exact sums over virtual shards ([`crate::fixed`]): no result depends on the number of ranks.
struct Strict {
    shards: usize,
    /// The scale of the last committed step: what every worker holds.
    scale: Scale,
    /// The scale of this step.
    tried: Scale,
    sums: Vec<i64>,
    parameters: usize,
}

impl Strict {
    fn new(shards: usize) -> Result<Strict, FixedError> {
        let scale = scale(FRACTION_BITS_DEFAULT, shards)?;
        Ok(Strict { shards, scale, tried: scale, sums: Vec::new(), parameters: 0 })
    }
}

impl Reduction for Strict {
    fn parts(&self, _world: usize) -> usize {
        self.shards
    }

    fn begin(&mut self) {
        self.tried = self.scale;
    }

    fn clear(&mut self, parameters: usize) {
        self.parameters = parameters;
        self.sums.clear();
        self.sums.resize(parameters, 0);
    }

    fn add(&mut self, grad: Vec<f32>) -> Result<f32, FixedError> {
        self.tried.add(&grad, &mut self.sums)
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

/// One pass of each rank over its rows of each accumulated batch, and sums of f32. Losses and counts stay exact.
struct Allreduce {
    passes: usize,
    /// The sum of this rank, then of all ranks.
    sum: Vec<f32>,
}

impl Reduction for Allreduce {
    fn parts(&self, world: usize) -> usize {
        world * self.passes
    }

    fn begin(&mut self) {}

    fn clear(&mut self, _parameters: usize) {
        self.sum.clear();
    }

    fn add(&mut self, grad: Vec<f32>) -> Result<f32, FixedError> {
        if self.sum.is_empty() {
            self.sum = grad;
        } else {
            self.sum.iter_mut().zip(grad).for_each(|(sum, value)| *sum += value);
        }
        // No scale needs the largest magnitude.
        Ok(0.0)
    }

    fn reduce(&mut self, step: u64, tally: Tally, ring: &mut Ring<'_>) -> Result<Reduced, ReduceError> {
        let mut lanes = Vec::with_capacity(tally.lanes());
        tally.encode(&mut lanes);
        ring.all_reduce(step, &mut lanes)?;
        let total = tally.decode(&lanes).ok_or(ReduceError::Tally)?;
        // Every rank knows the total, so that all of them leave out the sum.
        if total.has_overflowed() {
            return Ok(Reduced::Overflow);
        }
        if total.weight() > 0.0 {
            ring.all_reduce(step, &mut self.sum)?;
        }
        Ok(Reduced::Sum(total))
    }

    fn mean(&mut self, weight: f64, mean: &mut Vec<f32>) -> Result<(), FixedError> {
        std::mem::swap(mean, &mut self.sum);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn division_takes_any_weight_and_names_what_is_not_finite() {
        let mut sum = [3.0, -0.5e-38, 3e38];
        divide(&mut sum, 2.0).unwrap();
        assert_eq!(sum, [1.5, -0.25e-38, 1.5e38]);
        // A reciprocal beyond f32.
        let mut sum = [1e-30, 0.0];
        divide(&mut sum, 1e-45).unwrap();
        assert_eq!(sum, [(f64::from(1e-30f32) * 1e45) as f32, 0.0]);
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let error = divide(&mut [1.0, value, f32::NAN], 1.0).unwrap_err();
            assert!(matches!(error, FixedError::NonFinite { index: 1, .. }), "{error}");
        }
    }
}
