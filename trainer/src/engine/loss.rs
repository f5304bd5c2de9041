//! Loss functions: from the model's output and the labels to a sum and its gradient.
//!
//! Computed on the host in f64, row by row in order: outputs are small, and the sum must have the same bits
//! on every machine.

use super::objective::{CrossEntropy, Distillation};
use super::{EngineError, Labels, Loss, Objective};
use crate::graph::{Graph, Op, Unary};
use crate::validation::Scores;

/// The loss of an output.
pub(super) struct LossResult {
    pub(super) loss_sum: f64,
    /// Sum of the rows' weights: the number of rows, unless classes have weights or rows are ignored.
    pub(super) weight: f64,
    pub(super) correct: u64,
    pub(super) ignored: u64,
    /// Gradient of the loss sum by the output, row-major.
    pub(super) slope: Vec<f32>,
}

/// What an output should be.
#[derive(Debug, Clone, Copy)]
pub(super) struct Truth<'a> {
    pub(super) labels: &'a Labels,
    /// The outputs of the teacher; empty without one.
    pub(super) taught: &'a [f32],
}

impl<'a> From<&'a Labels> for Truth<'a> {
    fn from(labels: &'a Labels) -> Truth<'a> {
        Truth { labels, taught: &[] }
    }
}

/// What an evaluation measures beside the loss.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Measures {
    pub(crate) rows: u64,
    pub(crate) loss: f64,
    pub(crate) weight: f64,
    pub(crate) correct: u64,
    pub(crate) ignored: u64,
    /// Rows whose label is among the classes with the largest outputs.
    pub(crate) within_top: u64,
    /// Sum over the rows of the mean absolute error of their outputs.
    pub(crate) absolute: f64,
}

/// Rejects outputs that do not suit the loss.
pub(super) fn check_output(objective: &Objective, graph: &Graph) -> Result<(), EngineError> {
    let loss = objective.kind();
    let refuse = |reason: String| Err(EngineError::Loss { loss, reason });
    let rank = graph.values()[graph.output()].dims.len();
    match objective {
        Objective::CrossEntropy(_) | Objective::Kl(_) => {
            let classes = graph.output_width();
            if rank != 2 || classes < 2 {
                return refuse(format!(
                    "its output {:?} has {rank} dimensions and {classes} values per row, [rows, classes] with two or more classes is needed",
                    graph.output_name(),
                ));
            }
            if graph.ends_in_softmax() {
                return refuse(format!(
                    "its output {:?} is made by Softmax, {loss} takes the logits before it (remove that node)",
                    graph.output_name()
                ));
            }
            let weights = match objective {
                Objective::CrossEntropy(settings) => settings.class_weights.len(),
                _ => 0,
            };
            if weights != 0 && weights != classes {
                return refuse(format!(
                    "loss.class_weights has {weights} weights, its output {:?} has {classes} classes",
                    graph.output_name()
                ));
            }
        }
        Objective::Bce if ends_in_sigmoid(graph) => {
            return refuse(format!(
                "its output {:?} is made by Sigmoid, bce takes the logits before it (remove that node)",
                graph.output_name()
            ));
        }
        _ => {}
    }
    Ok(())
}

/// Whether Sigmoid makes the output, also before nodes that only move elements.
fn ends_in_sigmoid(graph: &Graph) -> bool {
    let mut value = graph.output();
    while let Some(node) = graph.nodes().iter().find(|node| node.output == value) {
        match (&node.op, node.inputs.first()) {
            (Op::Unary(Unary::Sigmoid), _) => return true,
            (Op::Reshape | Op::Permute(_), Some(input)) => value = *input,
            _ => return false,
        }
    }
    false
}

/// Rejects labels that do not match the rows or the classes.
pub(super) fn check_labels(
    objective: &Objective,
    labels: &Labels,
    rows: usize,
    width: usize,
) -> Result<(), EngineError> {
    let loss = objective.kind();
    let refuse = |reason: String| Err(EngineError::Batch { reason });
    match labels {
        Labels::Class(classes) if loss.takes_classes() => {
            if classes.len() != rows {
                return refuse(format!("{rows} rows with {} labels", classes.len()));
            }
            let ignored = objective.ignore_index();
            let outside = |label: &i64| {
                ignored != Some(*label) && usize::try_from(*label).map_or(true, |label| label >= width)
            };
            match classes.iter().position(outside) {
                Some(row) => Err(EngineError::Label { row, label: classes[row], classes: width }),
                None => Ok(()),
            }
        }
        Labels::Value(values) if !loss.takes_classes() => {
            if rows.checked_mul(width) != Some(values.len()) {
                return refuse(format!("{rows} rows of {width} outputs with {} label values", values.len()));
            }
            let fits = |value: &f32| match loss {
                Loss::Bce => (0.0..=1.0).contains(value),
                _ => value.is_finite(),
            };
            match values.iter().position(|value| !fits(value)) {
                Some(index) => {
                    let range = if loss == Loss::Bce { ", bce needs labels from 0 to 1" } else { "" };
                    let row = index / width.max(1);
                    refuse(format!("the label of row {row} is {}{range}", values[index]))
                }
                None => Ok(()),
            }
        }
        Labels::Value(_) => {
            refuse(format!("{loss} needs integer classes, the labels are floats (loss = \"mse\"?)"))
        }
        Labels::Class(_) => {
            refuse(format!("{loss} needs float labels, the labels are integers (loss = \"cross_entropy\"?)"))
        }
    }
}

/// Computes the loss of an output with checked labels; fails on the first row with a loss that is not finite.
pub(super) fn loss_and_gradient<'a>(
    objective: &Objective,
    logits: &[f32],
    truth: impl Into<Truth<'a>>,
    rows: usize,
) -> Result<LossResult, EngineError> {
    let Truth { labels, taught } = truth.into();
    let width = logits.len() / rows.max(1);
    let slope = Vec::with_capacity(logits.len());
    let mut result = LossResult { loss_sum: 0.0, weight: 0.0, correct: 0, ignored: 0, slope };
    for (row, outputs) in logits.chunks_exact(width.max(1)).enumerate() {
        let value = match (objective, labels) {
            (Objective::CrossEntropy(settings), Labels::Class(classes)) => {
                let label = classes.get(row).copied().unwrap_or_default();
                cross_entropy(settings, outputs, label, &mut result)
            }
            (Objective::Kl(settings), Labels::Class(classes)) if taught.len() == logits.len() => {
                let label = classes.get(row).copied().unwrap_or_default();
                distillation(settings, outputs, &taught[row * width..(row + 1) * width], label, &mut result)
            }
            (_, Labels::Value(values)) => {
                let truth = &values[row * width..(row + 1) * width];
                result.weight += 1.0;
                if *objective == Objective::Bce {
                    let right = outputs.iter().zip(truth).all(|(z, y)| (*z > 0.0) == (*y > 0.5));
                    result.correct += u64::from(right);
                }
                error_of_outputs(objective, outputs, truth, &mut result.slope)
            }
            _ => {
                return Err(EngineError::Batch {
                    reason: format!("the labels do not fit loss {}", objective.kind()),
                });
            }
        };
        if !value.is_finite() {
            return Err(EngineError::NonFinite { row, value });
        }
        result.loss_sum += value;
    }
    Ok(result)
}

/// Judges an output with checked labels. `top` is the number of classes among which a label counts as found;
/// `units` are the sizes of the outputs' errors of 1, all 1 if it is empty. `scores` gets the rows' scores for
/// the area under the ROC curve; the outputs suit that.
pub(super) fn measure<'a>(
    objective: &Objective,
    logits: &[f32],
    truth: impl Into<Truth<'a>>,
    rows: usize,
    (top, units): (usize, &[f64]),
    scores: Option<&mut Scores>,
) -> Result<Measures, EngineError> {
    let truth: Truth<'_> = truth.into();
    let labels = truth.labels;
    let LossResult { loss_sum, weight, correct, ignored, .. } =
        loss_and_gradient(objective, logits, truth, rows)?;
    if let Some(scores) = scores {
        scores.add_rows(logits, labels, objective.ignore_index());
    }
    let rows = rows as u64;
    let mut measures = Measures { rows, loss: loss_sum, weight, correct, ignored, ..Measures::default() };
    let width = (logits.len() / (rows as usize).max(1)).max(1);
    match labels {
        Labels::Class(classes) => {
            for (outputs, label) in logits.chunks_exact(width).zip(classes) {
                let class = usize::try_from(*label).ok().filter(|_| objective.ignore_index() != Some(*label));
                if let Some(own) = class.and_then(|class| outputs.get(class).map(|own| (class, *own))) {
                    // Of equal outputs the first one is ahead, as for the accuracy.
                    let ahead =
                        |(class, value): (usize, &f32)| *value > own.1 || (*value == own.1 && class < own.0);
                    let rank =
                        outputs.iter().enumerate().filter(|(class, value)| ahead((*class, value))).count();
                    measures.within_top += u64::from(rank < top);
                }
            }
        }
        Labels::Value(values) => {
            for (outputs, truth) in logits.chunks_exact(width).zip(values.chunks_exact(width)) {
                let errors = outputs.iter().zip(truth).enumerate().map(|(at, (z, y))| {
                    (f64::from(*z) - f64::from(*y)).abs() * units.get(at).copied().unwrap_or(1.0)
                });
                measures.absolute += errors.sum::<f64>() / width as f64;
            }
        }
    }
    Ok(measures)
}

/// With p = softmax(z), y the label, w the weights and s the smoothing of K classes:
/// −(1 − s) w_y log p_y − s/K Σ w_c log p_c.
///
/// Its slope is (a + Σ b_c) p − a · one-hot(y) − b, where a = (1 − s) w_y and b_c = s/K w_c.
fn cross_entropy(settings: &CrossEntropy, outputs: &[f32], label: i64, result: &mut LossResult) -> f64 {
    if settings.ignore_index == Some(label) {
        result.ignored += 1;
        result.slope.resize(result.slope.len() + outputs.len(), 0.0);
        return 0.0;
    }
    let label = label as usize;
    let best = largest(outputs);
    result.correct += u64::from(best == label);
    let largest = f64::from(outputs[best]);
    let shifted = |value: &f32| (f64::from(*value) - largest).exp();
    let total: f64 = outputs.iter().map(shifted).sum();
    let weight = |class: usize| settings.class_weights.get(class).copied().unwrap_or(1.0);
    let spread = settings.label_smoothing / outputs.len() as f64;
    let own = (1.0 - settings.label_smoothing) * weight(label);
    let log_total = total.ln() + largest;
    let (mut value, mut sum) = (own * (log_total - f64::from(outputs[label])), own);
    if spread > 0.0 {
        for (class, output) in outputs.iter().enumerate() {
            let share = spread * weight(class);
            value += share * (log_total - f64::from(*output));
            sum += share;
        }
    }
    for (class, value) in outputs.iter().enumerate() {
        let target = if class == label { own } else { 0.0 };
        let share = if spread > 0.0 { spread * weight(class) } else { 0.0 };
        result.slope.push((sum * (shifted(value) / total) - target - share) as f32);
    }
    result.weight += weight(label);
    value
}

/// The place of the largest output, the first one of equals.
fn largest(outputs: &[f32]) -> usize {
    let mut best = 0;
    for (class, value) in outputs.iter().enumerate() {
        if *value > outputs[best] {
            best = class;
        }
    }
    best
}

/// The logarithms of softmax(outputs / temperature).
fn log_softmax(outputs: &[f32], temperature: f64) -> Vec<f64> {
    let top = f64::from(outputs[largest(outputs)]);
    let shifted: Vec<f64> = outputs.iter().map(|value| (f64::from(*value) - top) / temperature).collect();
    let log_total = shifted.iter().map(|value| value.exp()).sum::<f64>().ln();
    shifted.into_iter().map(|value| value - log_total).collect()
}

/// The loss of [`Distillation`]. With q = softmax(z / T) and p = softmax(u / T), its slope is
/// a T (q − p) + (1 − a) (softmax(z) − one-hot(y)).
fn distillation(
    settings: &Distillation,
    outputs: &[f32],
    taught: &[f32],
    label: i64,
    result: &mut LossResult,
) -> f64 {
    let (label, temperature, alpha) = (label as usize, settings.temperature, settings.alpha);
    result.correct += u64::from(largest(outputs) == label);
    result.weight += 1.0;
    let own = log_softmax(outputs, 1.0);
    let (soft, target) = (log_softmax(outputs, temperature), log_softmax(taught, temperature));
    let mut divergence = 0.0;
    for (class, ((own, soft), target)) in own.iter().zip(&soft).zip(&target).enumerate() {
        let share = target.exp();
        divergence += share * (target - soft);
        let hit = if class == label { 1.0 } else { 0.0 };
        let slope = alpha * temperature * (soft.exp() - share) + (1.0 - alpha) * (own.exp() - hit);
        result.slope.push(slope as f32);
    }
    alpha * temperature * temperature * divergence - (1.0 - alpha) * own[label]
}

/// The mean over the outputs of an error of output and label; appends its slope.
fn error_of_outputs(objective: &Objective, outputs: &[f32], truth: &[f32], slope: &mut Vec<f32>) -> f64 {
    let share = 1.0 / outputs.len() as f64;
    let mut total = 0.0;
    for (value, target) in outputs.iter().zip(truth) {
        let (error, derivative) = error_of_output(objective, f64::from(*value), f64::from(*target));
        total += error * share;
        slope.push((derivative * share) as f32);
    }
    total
}

/// The error of one output `z` with the label `y`, and its derivative by `z`.
fn error_of_output(objective: &Objective, z: f64, y: f64) -> (f64, f64) {
    let distance = z - y;
    match objective {
        // −y log σ(z) − (1 − y) log(1 − σ(z)), without overflow.
        Objective::Bce => {
            let small = (-z.abs()).exp();
            let sigmoid = if z >= 0.0 { 1.0 / (1.0 + small) } else { small / (1.0 + small) };
            (z.max(0.0) - z * y + small.ln_1p(), sigmoid - y)
        }
        Objective::L1 => {
            let sign = if distance == 0.0 { 0.0 } else { distance.signum() };
            (distance.abs(), sign)
        }
        Objective::Huber(settings) if distance.abs() > settings.delta => {
            let delta = settings.delta;
            (delta * (distance.abs() - 0.5 * delta), delta * distance.signum())
        }
        Objective::Huber(_) => (0.5 * distance * distance, distance),
        Objective::CrossEntropy(_) | Objective::Kl(_) | Objective::Mse => {
            (distance * distance, 2.0 * distance)
        }
    }
}
