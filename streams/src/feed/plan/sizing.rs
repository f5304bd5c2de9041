//! How many lanes and how large a window: as asked for, unless the dataset is too small for them to
//! mean anything or its row groups too large for the memory bound.
//!
//! Depends on the dataset and the options alone, never on the machine: the result is part of the
//! plan.

use crate::dataset::Dataset;
use crate::feed::plan::PlanOptions;

/// Below this many rows a window is not shrunk to save memory; lanes are given up instead.
const WINDOW_ROWS_MIN: u64 = 2048;

struct Sizes {
    rows: u64,
    bytes: u64,
    group_bytes_max: u64,
    row_bytes_max: u64,
}

impl Sizes {
    fn of(dataset: &Dataset) -> Self {
        let mut s = Self { rows: 0, bytes: 0, group_bytes_max: 0, row_bytes_max: 1 };
        for group in dataset.files().iter().flat_map(|f| &f.row_groups).filter(|g| g.rows > 0) {
            s.rows += group.rows;
            s.bytes = s.bytes.saturating_add(group.bytes);
            s.group_bytes_max = s.group_bytes_max.max(group.bytes);
            s.row_bytes_max = s.row_bytes_max.max(group.bytes.div_ceil(group.rows));
        }
        s
    }

    /// Bound for the row groups that `window` consecutive rows overlap: those wholly inside are no
    /// larger than their rows, and two lie across the ends.
    fn span_bytes(&self, window: u64) -> u64 {
        let inside = self.row_bytes_max.saturating_mul(window);
        inside.saturating_add(self.group_bytes_max.saturating_mul(2)).min(self.bytes)
    }
}

pub(super) fn working_set_bytes(dataset: &Dataset, lanes: u64, window: u64) -> u64 {
    let sizes = Sizes::of(dataset);
    sizes.span_bytes(window).saturating_mul(lanes).min(sizes.bytes)
}

pub(super) fn lanes_and_window(dataset: &Dataset, options: &PlanOptions) -> (u64, u64) {
    let sizes = Sizes::of(dataset);
    let limit = options.working_set_bytes_max;
    let window_max = options.window_rows.min(sizes.rows);
    let window_min = window_max.min(WINDOW_ROWS_MIN);
    // The widest window that `lanes` lanes may have within the limit.
    let window_for = |lanes: u64| {
        if sizes.bytes <= limit {
            return Some(window_max);
        }
        let span = (limit / lanes).checked_sub(sizes.group_bytes_max.saturating_mul(2))?;
        Some((span / sizes.row_bytes_max).min(window_max)).filter(|&w| w >= window_min)
    };
    let batch = options.batch_rows as u64;
    // A lane shorter than a window would shuffle less than it may.
    let lanes_max = u64::from(options.lanes).min(sizes.rows / window_min).min(batch).max(1);
    let chosen = (1..=lanes_max).rev().filter(|c| batch.is_multiple_of(*c)).find_map(|c| {
        let window = window_for(c)?;
        (c == 1 || sizes.rows / c >= window).then_some((c, window))
    });
    let (lanes, window) = chosen.unwrap_or((1, window_min));
    // Windows of equal size: a short last one would be shuffled less than the others.
    let lane_rows = sizes.rows.div_ceil(lanes);
    (lanes, lane_rows.div_ceil(lane_rows.div_ceil(window)))
}
