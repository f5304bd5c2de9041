//! Reduction of a step's gradients: from the parts of this rank to the mean gradient of the global batch.
//!
//! One type per strategy behind [`Reduction`]. Every rank cuts the global batch into the same parts and computes
//! a contiguous range of them. A part is what the engine differentiates in one pass, and what a tally counts.

use std::sync::Arc;

use thiserror::Error;

use crate::collective::{self, GradientLinks, Ring};
use crate::engine::{Buckets, Device, Engine, EngineError, ShardGradients};
use crate::fixed::FixedError;
use crate::job::JobFile;
use crate::ledger::Tally;
use crate::optim::Groups;
use crate::strategy::Strategy;

mod allreduce;
mod strict;

use allreduce::Allreduce;
use strict::Strict;

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
/// A step calls `begin`, then `clear`, `add` for each part, `finish` after some of them and after the last, and `reduce`;
/// these again while `reduce` gives no sum; then `mean` and `commit`. With `in_buckets`, [`Allreduce::overlap`] takes the place of `add` for the last part. A step
/// that fails before its `commit` changes nothing that the next `begin` sees.
pub(super) trait Reduction: Send {
    /// The parts of a global batch in a ring of `world` ranks; at least `world`.
    fn parts(&self, world: usize) -> usize;

    /// Begins a step with what the last committed one left.
    fn begin(&mut self);

    /// Forgets the gradients of this rank.
    fn clear(&mut self, parameters: usize);

    /// The form in which `add` takes gradients; one flat vector of all parameters if none.
    fn form(&self) -> Option<Arc<Buckets>> {
        None
    }

    /// Adds the gradient of the part `part`. [`Reduction::finish`] may complete the sum.
    fn add(&mut self, part: usize, found: ShardGradients) -> Result<(), FixedError>;

    /// Completes the sum of the parts added so far. Returns parts with what the tally records as their largest magnitude;
    /// for others it records 0.
    fn finish(&mut self) -> Result<Vec<(usize, f32)>, FixedError> {
        Ok(Vec::new())
    }

    /// The strategy that sums the gradient of the last part in buckets while the engine computes, in a ring of `world`
    /// ranks; none if that gradient is added like those of other parts.
    fn in_buckets(&mut self, _world: usize) -> Option<&mut Allreduce> {
        None
    }

    /// Sums gradients over `links` from now on, or over the ring if none. A strategy without buckets ignores it.
    fn connect(&mut self, _links: Option<Box<dyn GradientLinks>>) {}

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
        Strategy::Strict => {
            let in_factors = job.device == Device::Cpu && job.precision.half().is_none();
            let form = Buckets::single(engine.graph(), in_factors, |range| groups.trains(range));
            Box::new(Strict::new(job.step_shards(), form)?)
        }
        Strategy::Allreduce(_) => {
            let buckets = Buckets::new(engine.graph(), |range| groups.trains(range));
            Box::new(Allreduce::new(job.accumulate_steps, buckets))
        }
    })
}
