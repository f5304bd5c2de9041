//! `[serving.drift]`: bounds on the comparison of a model's inputs with its training data.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Fewest rows for drift figures; with fewer they would be chance.
pub const ROWS_MIN: u64 = 100;

/// Drift monitoring of versions whose bundles hold statistics of their training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Drift {
    /// Most rows of each version that are examined per second; 0 disables monitoring.
    pub rows_per_second_max: u32,
    /// Smallest window of the figures in rows, once there were as many. Old rows fade: the server halves all
    /// counts at twice this number.
    pub window_rows: u64,
}

impl Default for Drift {
    fn default() -> Self {
        Drift { rows_per_second_max: 100, window_rows: 10_000 }
    }
}

impl Drift {
    /// Refuses windows that are too small for figures or practically endless.
    pub fn check(&self) -> Result<()> {
        let allowed = ROWS_MIN..=1 << 40;
        if allowed.contains(&self.window_rows) {
            return Ok(());
        }
        let (window, least, most) = (self.window_rows, allowed.start(), allowed.end());
        Err(Error::Config { reason: format!("drift.window_rows is {window}: take {least} to {most}") })
    }
}
