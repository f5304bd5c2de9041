//! Loss functions: from the model's output and the labels to a sum and its gradient.
//!
//! Computed on the host in f64, row by row in order: outputs are small, and the sum must have the same bits
//! on every machine.

use super::{EngineError, Labels, Loss};
use crate::graph::Graph;

/// The loss of an output.
pub(super) struct LossResult {
    pub(super) loss_sum: f64,
    pub(super) correct: u64,
    /// Gradient of the loss sum by the output, row-major.
    pub(super) slope: Vec<f32>,
}

/// Rejects outputs that do not suit the loss.
pub(super) fn check_output(loss: Loss, graph: &Graph) -> Result<(), EngineError> {
    let refuse = |reason: String| Err(EngineError::Loss { loss, reason });
    let rank = graph.values()[graph.output()].dims.len();
    if loss == Loss::CrossEntropy {
        if rank != 2 || graph.output_width() < 2 {
            return refuse(format!(
                "its output {:?} has {rank} dimensions and {} values per row, [rows, classes] with two or more classes is needed",
                graph.output_name(),
                graph.output_width()
            ));
        }
        if graph.ends_in_softmax() {
            return refuse(format!(
                "its output {:?} is made by Softmax, cross-entropy takes the logits before it (remove that node)",
                graph.output_name()
            ));
        }
    }
    Ok(())
}

/// Rejects labels that do not match the rows or the classes.
pub(super) fn check_labels(
    loss: Loss,
    labels: &Labels,
    rows: usize,
    width: usize,
) -> Result<(), EngineError> {
    let refuse = |reason: String| Err(EngineError::Batch { reason });
    match (loss, labels) {
        (Loss::CrossEntropy, Labels::Class(classes)) => {
            if classes.len() != rows {
                return refuse(format!("{rows} rows with {} labels", classes.len()));
            }
            let outside = |label: &i64| usize::try_from(*label).map_or(true, |l| l >= width);
            match classes.iter().position(outside) {
                Some(row) => Err(EngineError::Label { row, label: classes[row], classes: width }),
                None => Ok(()),
            }
        }
        (Loss::Mse, Labels::Value(values)) => {
            if rows.checked_mul(width) != Some(values.len()) {
                return refuse(format!("{rows} rows of {width} outputs with {} label values", values.len()));
            }
            match values.iter().position(|value| !value.is_finite()) {
                Some(index) => {
                    refuse(format!("the label of row {} is {}", index / width.max(1), values[index]))
                }
                None => Ok(()),
            }
        }
        (Loss::CrossEntropy, Labels::Value(_)) => {
            refuse("cross_entropy needs integer classes, the labels are floats (loss = \"mse\"?)".into())
        }
        (Loss::Mse, Labels::Class(_)) => {
            refuse("mse needs float labels, the labels are integers (loss = \"cross_entropy\"?)".into())
        }
    }
}

/// Computes the loss of an output with checked labels; fails on the first row with a loss that is not finite.
pub(super) fn loss_and_gradient(
    loss: Loss,
    logits: &[f32],
    labels: &Labels,
    rows: usize,
) -> Result<LossResult, EngineError> {
    let width = logits.len() / rows.max(1);
    let mut result = LossResult { loss_sum: 0.0, correct: 0, slope: Vec::with_capacity(logits.len()) };
    for (row, outputs) in logits.chunks_exact(width.max(1)).enumerate() {
        let value = match labels {
            Labels::Class(classes) => {
                let label = classes.get(row).copied().unwrap_or_default() as usize;
                cross_entropy(outputs, label, &mut result)
            }
            Labels::Value(values) => {
                let truth = &values[row * width..(row + 1) * width];
                squared_error(outputs, truth, &mut result.slope)
            }
        };
        if !value.is_finite() {
            return Err(EngineError::NonFinite { row, value });
        }
        result.loss_sum += value;
    }
    debug_assert!(matches!(
        (loss, labels),
        (Loss::CrossEntropy, Labels::Class(_)) | (Loss::Mse, Labels::Value(_))
    ));
    Ok(result)
}

/// log Σ e^z − z_label; its slope is softmax(z) − one-hot(label).
fn cross_entropy(outputs: &[f32], label: usize, result: &mut LossResult) -> f64 {
    let mut best = 0;
    for (class, value) in outputs.iter().enumerate() {
        if *value > outputs[best] {
            best = class;
        }
    }
    result.correct += u64::from(best == label);
    let largest = f64::from(outputs[best]);
    let shifted = |value: &f32| (f64::from(*value) - largest).exp();
    let total: f64 = outputs.iter().map(shifted).sum();
    for (class, value) in outputs.iter().enumerate() {
        let target = if class == label { 1.0 } else { 0.0 };
        result.slope.push((shifted(value) / total - target) as f32);
    }
    total.ln() + largest - f64::from(outputs[label])
}

/// The mean over the outputs of (z − y)²; its slope is 2 (z − y) / outputs.
fn squared_error(outputs: &[f32], truth: &[f32], slope: &mut Vec<f32>) -> f64 {
    let share = 1.0 / outputs.len() as f64;
    let mut total = 0.0;
    for (value, target) in outputs.iter().zip(truth) {
        let distance = f64::from(*value) - f64::from(*target);
        total += distance * distance * share;
        slope.push((2.0 * distance * share) as f32);
    }
    total
}
