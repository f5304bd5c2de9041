//! Checks of the parts of a job's batch against batch normalisations in training mode.
//!
//! A normalisation takes the statistics of the rows that are computed in one pass: those of a virtual shard, or, with
//! the strategy `allreduce`, those of a worker.

use crate::data::shard_slots;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::job::JobFile;
use crate::strategy::Strategy;

/// Rows of a part whose statistics represent the data.
const ROWS_ADVISED: usize = 16;
/// Most statistics that a step sums: 1 GiB.
const STATISTICS_MAX: usize = 1 << 27;

/// Most parts of a batch, in a job of up to `workers_max` workers.
fn parts_max(job: &JobFile, workers_max: usize) -> usize {
    match job.strategy {
        Strategy::Strict => job.virtual_shards,
        Strategy::Allreduce(_) => workers_max.max(1),
    }
}

/// Rows of the smallest part. Each step has a whole batch: one that crosses the end of an epoch is filled up with rows
/// of the next one.
fn rows_min(job: &JobFile, parts: usize) -> usize {
    (0..parts).map(|part| shard_slots(part, parts, job.batch_rows).len()).min().unwrap_or_default()
}

/// Refuses parts in which a channel has a single value, and warns of small ones. `workers_max` is the most workers
/// that may train.
pub(crate) fn check(engine: &Engine, job: &JobFile, workers_max: usize) -> Result<()> {
    let unfit = |reason: String| Error::Job { job: job.name.to_string(), reason };
    let channels = engine.moving_channels();
    if channels == 0 {
        return Ok(());
    }
    let parts = parts_max(job, workers_max);
    // The number and the key that changes it.
    let (count, key) = match job.strategy {
        Strategy::Strict => (format!("virtual_shards = {parts}"), "virtual_shards"),
        Strategy::Allreduce(_) => (format!("up to {parts} workers"), "workers_max"),
    };
    let rows = rows_min(job, parts);
    engine.check_shard_rows(rows).map_err(|error| {
        let remedy = match job.strategy {
            Strategy::Strict => "",
            Strategy::Allreduce(_) => {
                "; with the strategy allreduce, that is the share of a worker: lower workers_max"
            }
        };
        unfit(format!("batch_rows = {}, {count}: {error}{remedy}", job.batch_rows))
    })?;
    if channels.saturating_mul(parts).saturating_mul(job.accumulate_steps) > STATISTICS_MAX {
        return Err(unfit(format!(
            "{count}: the statistics of {channels} channels of each part of a step exceed 1 GiB; lower {key}"
        )));
    }
    if rows < ROWS_ADVISED {
        tracing::warn!(
            job = %job.name,
            rows,
            advised = (job.batch_rows / ROWS_ADVISED).max(1),
            "a batch normalisation trains with the statistics of few rows: lower {key} to the advised number, or raise \
             batch_rows"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests;
