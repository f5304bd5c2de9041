//! The pace of a run: when it began and wrote its checkpoints, and the throughput that follows.

use serde::{Deserialize, Serialize};

/// Most marks of a run.
const MARKS_MAX: usize = 256;

/// A moment at which a run stood at a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Mark {
    step: u64,
    /// Milliseconds since 1970.
    at: i64,
}

/// The moments of a run, in their order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Pace(Vec<Mark>);

/// The throughput of a run between two moments.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Throughput {
    /// The last step of the stretch.
    pub step: u64,
    /// Rows of applied steps per second.
    pub rows_per_second: f64,
}

impl Pace {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Records that the run stands at `step` now.
    pub(super) fn mark(&mut self, step: u64) {
        self.mark_at(step, chrono::Utc::now().timestamp_millis());
    }

    fn mark_at(&mut self, step: u64, at: i64) {
        self.0.push(Mark { step, at });
        if self.0.len() > MARKS_MAX {
            self.0.remove(self.least());
        }
    }

    /// The mark whose loss joins the two shortest stretches; the first one where none has a stretch at both sides.
    fn least(&self) -> usize {
        let joined = self.0.windows(3).enumerate().filter_map(|(before, marks)| {
            let [from, mark, to] = marks else { return None };
            let joins = is_stretch(from, mark) && is_stretch(mark, to);
            joins.then(|| (to.at.abs_diff(from.at), before + 1))
        });
        joined.min().map_or(0, |(_, at)| at)
    }

    /// The throughput of each stretch, with `step_rows` rows in a step. Stretches in which the run went back, or the
    /// clock did, have none: a run that begins again is marked at its newest checkpoint.
    pub(crate) fn throughput(&self, step_rows: usize) -> Vec<Throughput> {
        let stretches = self.0.iter().zip(self.0.iter().skip(1));
        stretches
            .filter(|(from, to)| is_stretch(from, to))
            .map(|(from, to)| {
                let rows = (to.step - from.step) as f64 * step_rows as f64;
                let seconds = to.at.abs_diff(from.at) as f64 / 1000.0;
                Throughput { step: to.step, rows_per_second: rows / seconds }
            })
            .collect()
    }
}

/// Whether the run went on from one mark to the next.
fn is_stretch(from: &Mark, to: &Mark) -> bool {
    to.step > from.step && to.at > from.at
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_between_runs_and_backward_clocks_have_no_throughput() {
        let mut pace = Pace::default();
        // Two checkpoints, a pause of a day, a begin at the newest checkpoint, a clock that is set back.
        let day = 86_400_000;
        for (step, at) in [
            (0, 1000),
            (100, 3000),
            (200, 4000),
            (200, day),
            (300, day + 500),
            (400, day - 7),
            (500, day + 993),
        ] {
            pace.mark_at(step, at);
        }
        let found: Vec<_> = pace.throughput(64).iter().map(|t| (t.step, t.rows_per_second)).collect();
        assert_eq!(found, [(100, 3200.0), (200, 6400.0), (300, 12_800.0), (500, 6400.0)]);
        assert_eq!(Pace::default().throughput(64), []);
    }

    #[test]
    fn long_runs_keep_a_bounded_number_of_marks_of_all_their_time() {
        let mut pace = Pace::default();
        for step in 0..10_000 {
            // A pause of a day in the middle.
            let at = step as i64 * 1000 + if step < 5_000 { 0 } else { 86_400_000 };
            if step == 5_000 {
                pace.mark_at((step - 1) * 10, at - 1000);
            }
            pace.mark_at(step * 10, at);
        }
        let found = pace.throughput(32);
        assert!(pace.0.len() <= MARKS_MAX && found.len() > MARKS_MAX / 2, "{found:?}");
        assert!(found.iter().all(|throughput| throughput.rows_per_second == 320.0), "{found:?}");
        let gaps = found.windows(2).map(|pair| pair[1].step - pair[0].step);
        assert!(gaps.max() < Some(2_000), "{found:?}");
        // A run that only begins keeps its newest marks.
        let mut idle = Pace::default();
        (0..1000).for_each(|at| idle.mark_at(0, at));
        assert_eq!((idle.0.len(), idle.0.last().map(|mark| mark.at)), (MARKS_MAX, Some(999)));
    }
}
