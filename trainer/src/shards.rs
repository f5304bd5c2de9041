//! Checks of a job's virtual shards against batch normalisations in training mode.

use crate::data::shard_slots;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::job::JobFile;

/// Rows of a shard whose statistics represent the data.
const ROWS_ADVISED: usize = 16;
/// Most statistics that a step sums: 1 GiB.
const STATISTICS_MAX: usize = 1 << 27;

/// Rows of the smallest virtual shard. Each step has a whole batch: one that crosses the end of an epoch is filled up
/// with rows of the next one.
fn rows_min(job: &JobFile) -> usize {
    let rows = |shard| shard_slots(shard, job.virtual_shards, job.batch_rows).len();
    (0..job.virtual_shards).map(rows).min().unwrap_or_default()
}

/// Refuses shards in which a channel has a single value, and warns of small ones.
pub(crate) fn check(engine: &Engine, job: &JobFile) -> Result<()> {
    let unfit = |reason: String| Error::Job { job: job.name.to_string(), reason };
    let channels = engine.moving_channels();
    if channels == 0 {
        return Ok(());
    }
    let rows = rows_min(job);
    engine.check_shard_rows(rows).map_err(|error| {
        unfit(format!("batch_rows = {}, virtual_shards = {}: {error}", job.batch_rows, job.virtual_shards))
    })?;
    if channels.saturating_mul(job.step_shards()) > STATISTICS_MAX {
        return Err(unfit(format!(
            "virtual_shards = {}: the statistics of {channels} channels of each shard exceed 1 GiB; use fewer shards",
            job.virtual_shards
        )));
    }
    if rows < ROWS_ADVISED {
        tracing::warn!(
            job = %job.name,
            rows,
            advised = (job.batch_rows / ROWS_ADVISED).max(1),
            "a batch normalisation trains with the statistics of a virtual shard, which has few rows: lower \
             virtual_shards to the advised number, or raise batch_rows"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests;
