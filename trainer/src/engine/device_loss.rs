//! Losses that the device judges: only their sum and the number of right rows come to the host.
//!
//! The formulas are those of [`super::loss`], in f32. The host judges the teacher's loss, and an output whose loss is not
//! finite here: it names the row.

use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{Backend, TensorMetadata};

use super::objective::CrossEntropy;
use super::resident::Judged;
use super::tensor::{dims, download, expand, flag_type, reshape, upload};
use super::{Labels, Objective};

/// Integers below this are exact in f32.
const EXACT: usize = 1 << 24;

/// The losses of an output, as tensors.
struct Found<B: Backend> {
    /// Their sum is the loss.
    losses: FloatTensor<B>,
    /// The number of right rows is its sum.
    right: FloatTensor<B>,
    /// The gradient of the loss, as `[rows, outputs]`.
    slope: FloatTensor<B>,
    /// What follows from the labels alone.
    weight: f64,
    ignored: u64,
}

/// The loss of an output with checked labels, and its gradient by the output. None if the host has to judge.
pub(super) fn judge<B: Backend>(
    objective: &Objective,
    labels: &Labels,
    output: FloatTensor<B>,
    rows: usize,
) -> Result<Option<(Judged, FloatTensor<B>)>, String> {
    let shape = dims::<B>(&output);
    let width = shape.iter().product::<usize>() / rows.max(1);
    if rows == 0 || rows >= EXACT || width == 0 || width >= EXACT {
        return Ok(None);
    }
    let output = reshape::<B>(output, &[rows, width]);
    let found = match (objective, labels) {
        (Objective::CrossEntropy(settings), Labels::Class(classes)) => {
            cross_entropy::<B>(settings, classes, output, [rows, width])
        }
        (Objective::Kl(_), _) | (_, Labels::Class(_)) => return Ok(None),
        (_, Labels::Value(values)) => errors::<B>(objective, values, output, [rows, width]),
    };
    let sums = [found.losses, found.right].map(|tensor| reshape::<B>(B::float_sum(tensor), &[1]));
    let mut host = Vec::with_capacity(2);
    download::<B, f32>(B::float_cat(sums.into(), 0), &mut host)?;
    let [loss, right] = host[..] else { return Err("two sums were expected".to_owned()) };
    if !loss.is_finite() {
        return Ok(None);
    }
    let (weight, ignored) = (found.weight, found.ignored);
    let judged = Judged { loss_sum: f64::from(loss), weight, correct: right as u64, ignored };
    Ok(Some((judged, reshape::<B>(found.slope, &shape))))
}

/// Numbers as a tensor, repeated along axes of size 1 up to `shape`.
fn spread<B: Backend>(
    values: Vec<f32>,
    own: [usize; 2],
    shape: [usize; 2],
    device: &Device<B>,
) -> FloatTensor<B> {
    expand::<B>(upload::<B, f32>(values, &own, device), &shape)
}

fn cross_entropy<B: Backend>(
    settings: &CrossEntropy,
    labels: &[i64],
    output: FloatTensor<B>,
    shape: [usize; 2],
) -> Found<B> {
    let [rows, classes] = shape;
    let weight = |class: usize| settings.class_weights.get(class).copied().unwrap_or(1.0);
    let share = settings.label_smoothing / classes as f64;
    let shares: Vec<f64> = (0..classes).map(|class| share * weight(class)).collect();
    let shared: f64 = shares.iter().sum();
    let (mut total_weight, mut ignored) = (0.0, 0);
    // Of each row: the label, its factor, that of the logarithm, and whether it counts.
    let mut columns: [Vec<f32>; 4] = std::array::from_fn(|_| Vec::with_capacity(rows));
    for label in labels {
        let values = if settings.ignore_index == Some(*label) {
            ignored += 1;
            [-1.0, 0.0, 0.0, 0.0]
        } else {
            let own = weight(*label as usize);
            total_weight += own;
            let factor = (1.0 - settings.label_smoothing) * own;
            [*label as f64, factor, factor + shared, 1.0]
        };
        columns.iter_mut().zip(values).for_each(|(column, value)| column.push(value as f32));
    }
    let device = B::float_device(&output);
    let (flags, kind) = (flag_type::<B>(&output), output.dtype());
    let number = |holds| B::bool_into_float(holds, kind.into());
    let [label, factor, log_factor, counts] =
        columns.map(|column| spread::<B>(column, [rows, 1], shape, &device));
    let positions = (0..classes).map(|class| class as f32).collect();
    let positions = spread::<B>(positions, [1, classes], shape, &device);
    let is_label = number(B::float_equal(positions.clone(), label.clone(), flags));
    let is_before = number(B::float_lower(positions, label, flags));

    let largest = expand::<B>(B::float_max_dim(output.clone(), 1), &shape);
    let is_largest = number(B::float_equal(output.clone(), largest.clone(), flags));
    let shifted = B::float_sub(output, largest);
    let powers = B::float_exp(shifted.clone());
    let total = expand::<B>(B::float_sum_dim(powers.clone(), 1), &shape);
    let parts = B::float_div(powers, total.clone());
    // Each row has its logarithm once for each class.
    let logs = B::float_mul_scalar(B::float_log(total), (1.0 / classes as f64).into());
    let mut target = B::float_mul(is_label.clone(), factor);
    if share > 0.0 {
        let shares = shares.into_iter().map(|share| share as f32).collect();
        let shares = spread::<B>(shares, [1, classes], shape, &device);
        target = B::float_add(target, B::float_mul(counts, shares));
    }
    let losses = B::float_mul(log_factor.clone(), logs);
    let losses = B::float_sum_dim(B::float_sub(losses, B::float_mul(target.clone(), shifted)), 1);
    let slope = B::float_sub(B::float_mul(parts, log_factor), target);

    // Of equal outputs the first one counts.
    let earlier = B::float_sum_dim(B::float_mul(is_largest.clone(), is_before), 1);
    let is_first = number(B::float_equal_elem(earlier, 0.0.into(), flags));
    let found = B::float_sum_dim(B::float_mul(is_largest, is_label), 1);
    Found { losses, right: B::float_mul(found, is_first), slope, weight: total_weight, ignored }
}

/// The losses of single outputs, each with the same share of its row.
fn errors<B: Backend>(
    objective: &Objective,
    values: &[f32],
    output: FloatTensor<B>,
    shape: [usize; 2],
) -> Found<B> {
    let [rows, width] = shape;
    let device = B::float_device(&output);
    let (flags, kind) = (flag_type::<B>(&output), output.dtype());
    let truth = upload::<B, f32>(values.to_vec(), &shape, &device);
    let distance = B::float_sub(output.clone(), truth.clone());
    let none_right = || upload::<B, f32>(vec![0.0], &[1, 1], &device);
    let (losses, slope, right) = match objective {
        Objective::Bce => {
            let number = |holds| B::bool_into_float(holds, kind.into());
            let positive = number(B::float_greater_elem(output.clone(), 0.0.into(), flags));
            let labelled = number(B::float_greater_elem(truth.clone(), 0.5.into(), flags));
            let wrong = B::float_sum_dim(B::float_abs(B::float_sub(positive, labelled)), 1);
            let right = number(B::float_equal_elem(wrong, 0.0.into(), flags));
            // −y log σ(z) − (1 − y) log(1 − σ(z)), without overflow.
            let small = B::float_exp(B::float_neg(B::float_abs(output.clone())));
            let linear = B::float_clamp_min(output.clone(), 0.0.into());
            let linear = B::float_sub(linear, B::float_mul(output.clone(), truth.clone()));
            let slope = B::float_sub(B::sigmoid(output), truth);
            (B::float_add(linear, B::float_log1p(small)), slope, right)
        }
        Objective::L1 => (B::float_abs(distance.clone()), B::float_sign(distance), none_right()),
        Objective::Huber(settings) => {
            let delta = settings.delta;
            let size = B::float_abs(distance.clone());
            let near = B::float_clamp_max(size.clone(), delta.into());
            let far = B::float_sub(size, B::float_mul_scalar(near.clone(), 0.5.into()));
            let slope = B::float_clamp(distance, (-delta).into(), delta.into());
            (B::float_mul(near, far), slope, none_right())
        }
        Objective::CrossEntropy(_) | Objective::Kl(_) | Objective::Mse => {
            let square = B::float_mul(distance.clone(), distance.clone());
            (square, B::float_mul_scalar(distance, 2.0.into()), none_right())
        }
    };
    let share = 1.0 / width as f64;
    Found {
        losses: B::float_mul_scalar(losses, share.into()),
        right,
        slope: B::float_mul_scalar(slope, share.into()),
        weight: rows as f64,
        ignored: 0,
    }
}
