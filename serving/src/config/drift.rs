//! `[serving.drift]`: how much is looked at to tell what a model is asked from what it was trained on.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Rows without which figures would be chance.
pub(crate) const ROWS_MIN: u64 = 100;

/// How the inputs of versions are watched whose bundles hold statistics of their training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Drift {
    /// Rows of each version that are looked at within a second, at most; 0 looks at none.
    pub rows_per_second_max: u32,
    /// Rows that the figures tell of, at least, once there were so many; they fade as others come, and are
    /// halved at twice as many.
    pub window_rows: u64,
}

impl Default for Drift {
    fn default() -> Self {
        Drift { rows_per_second_max: 100, window_rows: 10_000 }
    }
}

impl Drift {
    /// Refuses a window in which there would be chance alone, or that never ends.
    pub(crate) fn check(&self) -> Result<()> {
        let allowed = ROWS_MIN..=1 << 40;
        if allowed.contains(&self.window_rows) {
            return Ok(());
        }
        let (window, least, most) = (self.window_rows, allowed.start(), allowed.end());
        Err(Error::Config { reason: format!("drift.window_rows is {window}: take {least} to {most}") })
    }
}
