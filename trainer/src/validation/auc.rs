//! The area under the ROC curve, exact and with ties.
//!
//! The scores of all rows are kept and sorted: the area is the share of pairs of a positive and a negative row in
//! which the positive one has the larger score, where equal scores count half. Both counts are whole numbers
//! below 2^53, so that the result has the same bits whatever the order of the rows.

use thiserror::Error;

use crate::engine::{Labels, Loss};

/// Most rows whose scores a worker keeps, 8 bytes each. All counts of pairs stay exact in an f64.
const ROWS_MAX: u64 = 1 << 24;

/// Why the area cannot be measured.
#[derive(Debug, Error, PartialEq, Eq)]
pub(super) enum AucError {
    #[error(
        "the area is one of two classes, for which loss {loss} needs a model of {outputs} outputs; this model has {found}"
    )]
    Outputs { loss: Loss, outputs: usize, found: usize },
    #[error(
        "it has {rows} rows, of which workers would keep all scores in memory; at most {ROWS_MAX} are allowed (validate on \
         fewer rows, or remove the key)"
    )]
    Rows { rows: u64 },
    #[error(
        "up to {workers} workers would exchange {batch_rows} scores each at a time; at most {ROWS_MAX} in all are allowed \
         (lower batch_rows or workers_max, or remove the key)"
    )]
    Exchange { workers: usize, batch_rows: usize },
}

/// Checks that `rows` rows, in batches of at most `batch_rows`, have an area and stay within bounds of memory.
pub(super) fn check(
    loss: Loss,
    found: usize,
    rows: u64,
    batch_rows: usize,
    workers: usize,
) -> Result<(), AucError> {
    let outputs = if loss.takes_classes() { 2 } else { 1 };
    if found != outputs {
        return Err(AucError::Outputs { loss, outputs, found });
    }
    if rows > ROWS_MAX {
        return Err(AucError::Rows { rows });
    }
    match (batch_rows as u64).saturating_mul(workers as u64) > ROWS_MAX {
        true => Err(AucError::Exchange { workers, batch_rows }),
        false => Ok(()),
    }
}

/// Scores of rows of two classes: larger ones are more likely of the second class.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Scores {
    positive: Vec<f64>,
    negative: Vec<f64>,
}

impl Scores {
    /// Adds the rows of an output with checked labels: of two logits the second minus the first, or one logit. A
    /// label above 0.5 is of the second class.
    pub(crate) fn add_rows(&mut self, logits: &[f32], labels: &Labels, ignored: Option<i64>) {
        match labels {
            Labels::Class(classes) => {
                for (outputs, class) in logits.chunks_exact(2).zip(classes) {
                    if ignored != Some(*class) {
                        self.add(f64::from(outputs[1]) - f64::from(outputs[0]), *class == 1);
                    }
                }
            }
            Labels::Value(values) => {
                for (output, value) in logits.iter().zip(values) {
                    self.add(f64::from(*output), *value > 0.5);
                }
            }
        }
    }

    fn add(&mut self, score: f64, positive: bool) {
        // Both zeros are one score.
        let score = score + 0.0;
        if positive { self.positive.push(score) } else { self.negative.push(score) }
    }

    /// Writes the number of positive rows, then all scores, into lanes of zeros; the rows fit.
    pub(crate) fn encode(&self, lanes: &mut [i64]) {
        let Some((count, lanes)) = lanes.split_first_mut() else { return };
        *count = self.positive.len() as i64;
        for (lane, score) in lanes.iter_mut().zip(self.positive.iter().chain(&self.negative)) {
            *lane = score.to_bits() as i64;
        }
    }

    /// Adds `rows` rows that [`Scores::encode`] wrote.
    pub(crate) fn add_encoded(&mut self, lanes: &[i64], rows: usize) {
        let Some((count, lanes)) = lanes.split_first() else { return };
        let scores = lanes.iter().take(rows).map(|lane| f64::from_bits(*lane as u64));
        for (row, score) in scores.enumerate() {
            self.add(score, (row as i64) < *count);
        }
    }

    /// The area; none without a row of each class. Sorts the scores.
    pub(crate) fn area(&mut self) -> Option<f64> {
        let Scores { positive, negative } = self;
        if positive.is_empty() || negative.is_empty() {
            return None;
        }
        positive.sort_unstable_by(f64::total_cmp);
        negative.sort_unstable_by(f64::total_cmp);
        let (mut below, mut up_to, mut halves) = (0usize, 0usize, 0u64);
        for score in &*positive {
            below += negative[below..].iter().take_while(|other| *other < score).count();
            up_to = up_to.max(below);
            up_to += negative[up_to..].iter().take_while(|other| *other <= score).count();
            halves += (below + up_to) as u64;
        }
        Some(halves as f64 / (2 * positive.len() * negative.len()) as f64)
    }
}
