//! Reduction of a step's gradients: from the parts of this rank to the mean gradient of the global batch.
//!
//! One type per strategy behind [`Reduction`]. Every rank cuts the global batch into the same parts and computes
//! a contiguous range of them. A part is what the engine differentiates in one pass, and what a tally counts.

use thiserror::Error;

use crate::collective::{self, Ring};
use crate::engine::{Buckets, Engine, EngineError};
use crate::fixed::{FRACTION_BITS_DEFAULT, FixedError, Scale};
use crate::job::JobFile;
use crate::ledger::Tally;
use crate::optim::Groups;
use crate::strategy::Strategy;

mod allreduce;

use allreduce::Allreduce;

/// Why a step has no total. Nothing was applied.
#[derive(Debug, Error)]
pub(super) enum ReduceError {
    #[error(transparent)]
    Collective(#[from] collective::Error),
    /// The ranks summed other figures than those of this step.
    #[error("the sum of the ranks' figures has another form than this rank's")]
    Tally,
    /// The gradient could not be computed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// No thread could be started that sums while the engine computes.
    #[error("start the thread that sums gradients")]
    Thread(#[source] std::io::Error),
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
/// `mean` and `commit`. With `in_buckets`, [`Allreduce::overlap`] takes the place of `add` for the last part. A step
/// that fails before its `commit` changes nothing that the next `begin` sees.
pub(super) trait Reduction: Send {
    /// The parts of a global batch in a ring of `world` ranks; at least `world`.
    fn parts(&self, world: usize) -> usize;

    /// Begins a step with what the last committed one left.
    fn begin(&mut self);

    /// Forgets the gradients of this rank.
    fn clear(&mut self, parameters: usize);

    /// Adds the gradient of a part, and returns what the tally records as its largest magnitude.
    fn add(&mut self, grad: Vec<f32>) -> Result<f32, FixedError>;

    /// The strategy that sums the gradient of the last part in buckets while the engine computes, in a ring of `world`
    /// ranks; none if that gradient is added like those of other parts.
    fn in_buckets(&mut self, _world: usize) -> Option<&mut Allreduce> {
        None
    }

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

/// The reduction of the job's strategy, for the parameters of `engine` that train.
pub(super) fn of(job: &JobFile, engine: &Engine, groups: &Groups) -> Result<Box<dyn Reduction>, FixedError> {
    Ok(match job.strategy {
        Strategy::Strict => Box::new(Strict::new(job.step_shards())?),
        Strategy::Allreduce => {
            let buckets = Buckets::new(engine.graph(), |range| groups.trains(range));
            Box::new(Allreduce::new(job.accumulate_steps, buckets))
        }
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
