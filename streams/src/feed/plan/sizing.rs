//! Sizing of a plan: lanes and window as requested, reduced where the dataset is too small for them or its
//! row groups are too large for the memory bound.
//!
//! The result is part of the plan, so it depends on the dataset and the options alone, never on the machine.

use crate::dataset::{DataFile, Dataset, FileFormat, ROW_GROUPS_MAX, RowGroup};
use crate::feed::error::{FeedError, Result};
use crate::feed::plan::{Group, GroupAddress, PlanOptions};
use crate::feed::select::Selected;
use crate::feed::tokens::Packing;

/// Below this many rows a window is not shrunk to save memory; lanes are given up instead.
const WINDOW_ROWS_MIN: u64 = 2048;
/// Parts of large row groups that the memory bound has room for: 16 MiB each with the default, as ingest
/// writes row groups.
const PARTS: u64 = 32;

/// Size in bytes of the parts into which row groups are split; 0 when whole row groups leave a lane and a
/// window within the memory bound. Does not depend on a selection: a unit is decoded whole before its rows are selected.
pub(super) fn part_bytes(dataset: &Dataset, options: &PlanOptions) -> u64 {
    // Only row groups of Parquet files are read in parts.
    if has_uneven_rows(dataset) {
        return 0;
    }
    let whole = Sizes::of(&units(dataset, 0, None).groups, false);
    match lanes_and_window_within(&whole, options) {
        Some(_) => 0,
        None => (options.working_set_bytes_max / PARTS).max(1),
    }
}

/// Whether the rows of a dataset may differ much in size, as images and documents do: those of files without footers.
/// The largest row says little about a window of them, so their sizing takes twice the mean.
pub(super) fn has_uneven_rows(dataset: &Dataset) -> bool {
    dataset.files().first().is_some_and(|file| !file.format.has_footer())
}

/// Number of parts into which a row group is split. Record batches of Arrow IPC files cannot be read in parts.
fn parts(format: FileFormat, group: &RowGroup, part_bytes: u64) -> u64 {
    match format {
        FileFormat::Parquet if part_bytes > 0 => group.bytes.div_ceil(part_bytes).clamp(1, group.rows.max(1)),
        _ => 1,
    }
}

/// Refuses more units of reading than a dataset may have row groups: they are held in memory.
pub(super) fn check_count(dataset: &Dataset, part_bytes: u64) -> Result<()> {
    let of_file = |file: &DataFile| {
        let parts = file.row_groups.iter().map(|group| parts(file.format, group, part_bytes));
        parts.fold(0u64, u64::saturating_add)
    };
    let count = dataset.files().iter().map(of_file).fold(0u64, u64::saturating_add);
    let limit = ROW_GROUPS_MAX as u64;
    if count > limit {
        let what = "the number of parts of row groups (raise working_set_bytes_max)";
        return Err(FeedError::TooLarge { path: dataset.path().to_owned(), what, limit });
    }
    Ok(())
}

/// Units of reading that have selected rows.
pub(super) struct Units {
    pub(super) groups: Vec<Group>,
    /// With a selection, the global index of the first row of each, selected or not.
    pub(super) firsts: Vec<u64>,
}

/// The units of reading: row groups, with those larger than `part_bytes` split into parts of about equal size
/// (0: no split). Units without selected rows are left out.
pub(super) fn units(dataset: &Dataset, part_bytes: u64, selected: Option<&Selected>) -> Units {
    let mut units = Units { groups: Vec::new(), firsts: Vec::new() };
    let mut base = 0u64;
    for (f, file) in dataset.files().iter().enumerate() {
        for (g, group) in file.row_groups.iter().enumerate() {
            let parts = parts(file.format, group, part_bytes);
            // Products of rows and parts stay within 64 bits: both fit 32.
            let cut = |part: u64| group.rows * part / parts;
            for part in 0..parts {
                let (first, end) = (cut(part), cut(part + 1));
                let (rows, bytes) = (end - first, group.bytes / parts);
                let taken = selected.map_or(rows, |selected| selected.count(base + first..base + end));
                if taken == 0 {
                    continue;
                }
                let share = u128::from(bytes) * u128::from(taken) / u128::from(rows);
                units.groups.push(Group {
                    address: GroupAddress {
                        file: f as u32,
                        index: g as u32,
                        first: u32::try_from(first).unwrap_or(u32::MAX),
                        // Bounded when the footer was read and when a stored plan was checked.
                        rows: u32::try_from(rows).unwrap_or(u32::MAX),
                    },
                    rows: u32::try_from(taken).unwrap_or(u32::MAX),
                    // Not more than `bytes`.
                    bytes: share as u64,
                });
                if selected.is_some() {
                    units.firsts.push(base + first);
                }
            }
            base += group.rows;
        }
    }
    units
}

impl Units {
    /// Counts sequences in the place of rows, and leaves units without tokens out.
    pub(super) fn pack(&mut self, packing: &Packing) {
        let has_firsts = !self.firsts.is_empty();
        let (groups, firsts) = (std::mem::take(&mut self.groups), std::mem::take(&mut self.firsts));
        for (at, group) in groups.into_iter().enumerate() {
            let rows = packing.sequences(at);
            if rows > 0 {
                self.groups.push(Group { rows, ..group });
                self.firsts.extend(has_firsts.then(|| firsts[at]));
            }
        }
    }
}

struct Sizes {
    rows: u64,
    bytes: u64,
    group_bytes_max: u64,
    row_bytes_max: u64,
}

impl Sizes {
    fn of(groups: &[Group], is_uneven: bool) -> Self {
        let mut s = Self { rows: 0, bytes: 0, group_bytes_max: 0, row_bytes_max: 1 };
        for group in groups {
            let rows = u64::from(group.rows);
            s.rows += rows;
            s.bytes = s.bytes.saturating_add(group.bytes);
            s.group_bytes_max = s.group_bytes_max.max(group.bytes);
            s.row_bytes_max = s.row_bytes_max.max(group.bytes.div_ceil(rows));
        }
        if is_uneven {
            s.row_bytes_max = s.row_bytes_max.min(s.bytes.saturating_mul(2) / s.rows.max(1)).max(1);
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

pub(super) fn working_set_bytes(groups: &[Group], is_uneven: bool, lanes: u64, window: u64) -> u64 {
    let sizes = Sizes::of(groups, is_uneven);
    sizes.span_bytes(window).saturating_mul(lanes).min(sizes.bytes)
}

pub(super) fn lanes_and_window(groups: &[Group], is_uneven: bool, options: &PlanOptions) -> (u64, u64) {
    let sizes = Sizes::of(groups, is_uneven);
    let (lanes, window) = lanes_and_window_within(&sizes, options)
        .unwrap_or((1, options.window_rows.min(sizes.rows).min(WINDOW_ROWS_MIN)));
    // Windows of equal size: a short last one would be shuffled less than the others.
    let lane_rows = sizes.rows.div_ceil(lanes);
    (lanes, lane_rows.div_ceil(lane_rows.div_ceil(window)))
}

/// The most lanes, and the widest window for them, within the memory bound.
fn lanes_and_window_within(sizes: &Sizes, options: &PlanOptions) -> Option<(u64, u64)> {
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
    // A lane shorter than a window would shuffle less than the window allows.
    let lanes_max = u64::from(options.lanes).min(sizes.rows / window_min).min(batch).max(1);
    (1..=lanes_max).rev().filter(|c| batch.is_multiple_of(*c)).find_map(|c| {
        let window = window_for(c)?;
        (c == 1 || sizes.rows / c >= window).then_some((c, window))
    })
}
