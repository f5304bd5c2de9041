//! Numbers of rows that stay equal from run to run, for graphs with convolutions on a GPU.
//!
//! ONNX Runtime has cuDNN plan each convolution for the shape of its input and keeps one plan. A run with other rows
//! than the last one plans all convolutions again: 90 ms for ResNet-50, whose run of 16 rows takes 4 ms. Filler rows
//! give runs the number of the last one; the scheduler removes them from the outputs.

use millrace_bundle::onnx::ModelProto;

/// Operators that are planned for a shape.
const PLANNED: [&str; 2] = ["Conv", "ConvTranspose"];
/// After this many runs in a row that fill at most half of the rows, fewer rows are planned: by then, filler rows cost
/// as much as planning.
const SMALL_RUNS_MAX: u32 = 32;

/// Whether a graph has operators that are planned for a shape.
pub(super) fn has_planned(model: &ModelProto) -> bool {
    let of_functions = model.functions.iter().flat_map(|function| &function.node);
    let nodes = model.graph.iter().flat_map(|graph| &graph.node).chain(of_functions);
    nodes.into_iter().any(|node| PLANNED.contains(&node.op_type()))
}

/// The number of rows of a session's runs.
#[derive(Debug, Default)]
pub(super) struct SteadyRows {
    rows: usize,
    /// Runs since the last one that filled more than half of the rows.
    small_runs: u32,
}

impl SteadyRows {
    /// Rows of the next run, which has to hold `rows`. Batches of several requests vary in size, so that their number
    /// grows by powers of two.
    pub(super) fn next(&mut self, rows: usize, is_joined: bool) -> usize {
        if rows.saturating_mul(2) > self.rows {
            self.small_runs = 0;
        } else {
            self.small_runs += 1;
        }
        if rows > self.rows || self.small_runs >= SMALL_RUNS_MAX {
            self.rows = if is_joined { rows.checked_next_power_of_two().unwrap_or(rows) } else { rows };
            self.small_runs = 0;
        }
        self.rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_stay_equal_while_batches_vary() {
        let mut steady = SteadyRows::default();
        let batches = [1, 3, 2, 5, 7, 8, 6].map(|rows| steady.next(rows, true));
        assert_eq!(batches, [1, 4, 4, 8, 8, 8, 8]);
    }

    #[test]
    fn single_requests_keep_their_own_number() {
        let mut steady = SteadyRows::default();
        assert_eq!([12, 12, 9].map(|rows| steady.next(rows, false)), [12, 12, 12]);
        assert_eq!(steady.next(13, false), 13);
    }

    #[test]
    fn many_small_runs_end_a_large_number() {
        let mut steady = SteadyRows::default();
        steady.next(16, true);
        let found: Vec<usize> = (0..SMALL_RUNS_MAX).map(|_| steady.next(1, false)).collect();
        assert!(found[..found.len() - 1].iter().all(|rows| *rows == 16), "{found:?}");
        assert_eq!(found.last(), Some(&1));
        steady.next(16, true);
        for _ in 0..10 {
            (0..SMALL_RUNS_MAX - 1).for_each(|_| assert_eq!(steady.next(1, false), 16));
            assert_eq!(steady.next(9, true), 16, "a larger one begins the count anew");
        }
    }
}
