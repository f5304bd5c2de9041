//! Ours and the control, measured in turn.

use std::time::Duration;

use crate::figure::median;

/// Runs ours and the control in turn, so that a machine whose speed drifts is fair to both, and
/// gives the medians in seconds. One uncounted round first.
pub(crate) fn in_turn(
    rounds: usize,
    mut ours: impl FnMut() -> Duration,
    mut control: impl FnMut() -> Duration,
) -> (f64, f64) {
    let (mut a, mut b) = (Vec::new(), Vec::new());
    for round in 0..=rounds {
        let (x, y) = (ours().as_secs_f64(), control().as_secs_f64());
        if round > 0 {
            a.push(x);
            b.push(y);
        }
    }
    (median(&mut a), median(&mut b))
}
