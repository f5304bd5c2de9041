//! Derivatives of each operation: from the gradient of its output to those of its inputs.

use burn_backend::ops::ConvOptions;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, Slice, TensorMetadata, get_device_settings};

use super::forward::{
    GELU_CUBIC, GELU_SCALE, flat_table, gelu_tanh, holds, inside, options, options3, positions_of, region,
    rows_of,
};
use super::kernels::Kernels;
use super::tensor::{dims, expand, flag_type, pad_rank, positions_tensor, reduce_to, reshape, zeros_like};
use super::training::{self, Kept};
use crate::graph::{Binary, ConvSpec, Op, Unary};

/// The inputs of a derivative.
pub(super) struct Step<'a, B: Backend> {
    pub(super) op: &'a Op,
    pub(super) inputs: &'a [FloatTensor<B>],
    /// The transpose of the second input, where it is held ready.
    pub(super) turned: Option<&'a FloatTensor<B>>,
    pub(super) output: &'a FloatTensor<B>,
    /// What the forward computation kept.
    pub(super) kept: Option<&'a Kept<B>>,
    /// For each input, whether it depends on a parameter; the others get no gradient.
    pub(super) needs_gradient: &'a [bool],
}

/// The gradients of the wanted inputs, given that of the output.
pub(super) fn backward<B: Kernels>(step: &Step<'_, B>, grad: FloatTensor<B>) -> Vec<Option<FloatTensor<B>>> {
    let shape = |index: usize| dims::<B>(&step.inputs[index]);
    match step.op {
        Op::MatMul => matmul::<B>(step, grad),
        Op::Binary(kind) => binary::<B>(step, *kind, grad),
        Op::Conv(spec) => conv::<B>(step, spec, grad),
        Op::Concat(axis) => concat::<B>(step, *axis, grad),
        Op::Unary(kind) => vec![Some(unary::<B>(*kind, step.inputs[0].clone(), step.output.clone(), grad))],
        Op::Softmax(axis) => {
            let product = B::float_mul(grad.clone(), step.output.clone());
            let centred = B::float_sub(grad, B::float_sum_dim(product, *axis));
            vec![Some(B::float_mul(centred, step.output.clone()))]
        }
        Op::LogSoftmax(axis) => {
            let total = B::float_sum_dim(grad.clone(), *axis);
            let share = B::float_mul(B::float_exp(step.output.clone()), total);
            vec![Some(B::float_sub(grad, share))]
        }
        Op::MaxPool(spec) => {
            let Some(Kept::Picked(picked)) = step.kept else { return vec![None] };
            vec![Some(
                B::max_pool2d_with_indices_backward(
                    step.inputs[0].clone(),
                    spec.kernel,
                    spec.strides,
                    spec.padding,
                    spec.dilations,
                    false,
                    grad,
                    picked.clone(),
                )
                .x_grad,
            )]
        }
        Op::AveragePool(spec) => vec![Some(B::avg_pool2d_backward(
            step.inputs[0].clone(),
            grad,
            spec.kernel,
            spec.strides,
            spec.padding,
            spec.count_include_pad,
            false,
        ))],
        Op::Pad { before, .. } => vec![Some(B::float_slice(grad, &inside(&shape(0), before)))],
        Op::Conv3(spec) => {
            let (x, weight) = (&step.inputs[0], &step.inputs[1]);
            vec![
                step.needs_gradient[0]
                    .then(|| B::conv3d_x_backward(x.clone(), weight.clone(), grad.clone(), options3(spec))),
                step.needs_gradient[1].then(|| {
                    B::conv3d_weight_backward(x.clone(), weight.clone(), grad.clone(), options3(spec))
                }),
            ]
        }
        Op::ConvTranspose(spec) => conv_transpose::<B>(step, spec, grad),
        // Their derivative is 0 wherever it exists; no gradient reaches them.
        Op::Compare(_) => vec![None, None],
        Op::Where => choice::<B>(step, grad),
        Op::Expand => vec![Some(reduce_to::<B>(grad, &shape(0)))],
        Op::Slice { axis, start } => vec![Some(add_slice::<B>(None, &shape(0), *axis, *start, grad))],
        Op::Select { axis, positions } => {
            let positions = positions_tensor::<B>(positions, &B::float_device(&grad));
            let zeros = zeros_like::<B>(&grad, &shape(0));
            vec![Some(B::float_select_add(zeros, *axis, positions, grad))]
        }
        Op::Lookup { fixed } => vec![
            step.needs_gradient[0].then(|| {
                let table = shape(0);
                let rows = rows_of::<B>(step.inputs[1].clone());
                let flat = flat_table::<B>(zeros_like::<B>(&grad, &table));
                let count = dims::<B>(&step.inputs[1]).iter().product();
                let size = [count, dims::<B>(&flat)[1]];
                let mut grad = reshape::<B>(grad, &size);
                if let Some(row) = fixed {
                    let at = expand::<B>(reshape::<B>(step.inputs[1].clone(), &[count, 1]), &size);
                    let flags = flag_type::<B>(&at);
                    let is_fixed = B::float_equal_elem(at, f64::from(*row).into(), flags);
                    grad = B::float_mask_fill(grad, is_fixed, 0.0.into());
                }
                // Rows that appear more than once are added in their order.
                reshape::<B>(B::float_select_add(flat, 0, rows, grad), &table)
            }),
            None,
        ],
        Op::Pick(axis) => vec![
            step.needs_gradient[0].then(|| {
                let zeros = zeros_like::<B>(&grad, &shape(0));
                B::float_scatter_add(*axis, zeros, positions_of::<B>(step.inputs[1].clone()), grad)
            }),
            None,
        ],
        Op::Put(axis) => {
            let of_elements = step.needs_gradient[2]
                .then(|| B::float_gather(*axis, grad.clone(), positions_of::<B>(step.inputs[1].clone())));
            vec![Some(grad), None, of_elements]
        }
        // No gradient reaches it.
        Op::Rank { .. } => vec![None],
        Op::Max(axes) => vec![Some(maxima::<B>(step, axes, grad))],
        Op::Reshape => vec![Some(reshape::<B>(grad, &shape(0)))],
        Op::Permute(order) => {
            let mut back = vec![0; order.len()];
            for (to, from) in order.iter().enumerate() {
                back[*from] = to;
            }
            vec![Some(B::float_permute(grad, &back))]
        }
        Op::Sum(axes) => vec![Some(unfold::<B>(grad, &shape(0), axes))],
        Op::Mean(axes) => {
            let shape = shape(0);
            let count: usize = axes.iter().map(|axis| shape[*axis]).product();
            let share = B::float_mul_scalar(grad, (1.0 / count as f64).into());
            vec![Some(unfold::<B>(share, &shape, axes))]
        }
        Op::BatchNorm { .. } => training::denormalize::<B>(step, grad),
        Op::Dropout(_) => match step.kept {
            Some(Kept::Mask(mask)) => vec![Some(B::float_mul(grad, mask.clone()))],
            _ => vec![Some(grad)],
        },
    }
}

/// Adds the gradient of a slice to that of the value that it was cut from, which is 0 if not given.
pub(super) fn add_slice<B: Backend>(
    sum: Option<FloatTensor<B>>,
    shape: &[usize],
    axis: usize,
    start: usize,
    grad: FloatTensor<B>,
) -> FloatTensor<B> {
    let region = region(&dims::<B>(&grad), axis, start);
    match sum {
        None => B::float_slice_assign(zeros_like::<B>(&grad, shape), &region, grad),
        Some(sum) => {
            let part = B::float_add(B::float_slice(sum.clone(), &region), grad);
            B::float_slice_assign(sum, &region, part)
        }
    }
}

/// Each side gets the gradient where it was chosen.
fn choice<B: Backend>(step: &Step<'_, B>, grad: FloatTensor<B>) -> Vec<Option<FloatTensor<B>>> {
    let shape = dims::<B>(&grad);
    let condition = expand::<B>(pad_rank::<B>(step.inputs[0].clone(), shape.len()), &shape);
    let fit = |grad, index: usize| reduce_to::<B>(grad, &dims::<B>(&step.inputs[index]));
    let left = step.needs_gradient[1].then(|| {
        let other = B::float_equal_elem(condition.clone(), 0.0.into(), flag_type::<B>(&condition));
        fit(B::float_mask_fill(grad.clone(), other, 0.0.into()), 1)
    });
    let right = step.needs_gradient[2]
        .then(|| fit(B::float_mask_fill(grad.clone(), holds::<B>(condition.clone()), 0.0.into()), 2));
    vec![None, left, right]
}

/// Equal maxima share the gradient.
fn maxima<B: Backend>(step: &Step<'_, B>, axes: &[usize], grad: FloatTensor<B>) -> FloatTensor<B> {
    let x = step.inputs[0].clone();
    let shape = dims::<B>(&x);
    let most = unfold::<B>(step.output.clone(), &shape, axes);
    let equal = B::float_equal(x.clone(), most, flag_type::<B>(&x));
    let chosen = B::bool_into_float(equal, x.dtype().into());
    let count = axes.iter().fold(chosen.clone(), |tensor, axis| B::float_sum_dim(tensor, *axis));
    let share = B::float_div(reshape::<B>(grad, &dims::<B>(&count)), count);
    B::float_mul(chosen, expand::<B>(share, &shape))
}

/// The transpose of a convolution is differentiated by the convolution.
fn conv_transpose<B: Backend>(
    step: &Step<'_, B>,
    spec: &ConvSpec,
    grad: FloatTensor<B>,
) -> Vec<Option<FloatTensor<B>>> {
    let (x, weight) = (&step.inputs[0], &step.inputs[1]);
    let options = || ConvOptions::new(spec.strides, [0; 2], spec.dilations, spec.groups);
    vec![
        step.needs_gradient[0].then(|| B::conv2d(grad.clone(), weight.clone(), None, options())),
        step.needs_gradient[1]
            .then(|| B::conv2d_weight_backward(grad.clone(), weight.clone(), x.clone(), options())),
    ]
}

/// Repeats the gradient of a reduction along the reduced axes.
fn unfold<B: Backend>(grad: FloatTensor<B>, shape: &[usize], axes: &[usize]) -> FloatTensor<B> {
    let mut kept = shape.to_vec();
    for axis in axes {
        kept[*axis] = 1;
    }
    expand::<B>(reshape::<B>(grad, &kept), shape)
}

fn matmul<B: Backend>(step: &Step<'_, B>, grad: FloatTensor<B>) -> Vec<Option<FloatTensor<B>>> {
    let turned = |tensor: &FloatTensor<B>| {
        let rank = dims::<B>(tensor).len();
        B::float_swap_dims(tensor.clone(), rank - 2, rank - 1)
    };
    let [left, right] = [&step.inputs[0], &step.inputs[1]];
    let left_grad = step.needs_gradient[0].then(|| {
        let right = step.turned.cloned().unwrap_or_else(|| turned(right));
        let full = B::float_matmul(grad.clone(), right);
        reduce_to::<B>(full, &dims::<B>(left))
    });
    let right_grad = step.needs_gradient[1].then(|| {
        let full = B::float_matmul(turned(left), grad);
        reduce_to::<B>(full, &dims::<B>(right))
    });
    vec![left_grad, right_grad]
}

fn binary<B: Backend>(step: &Step<'_, B>, kind: Binary, grad: FloatTensor<B>) -> Vec<Option<FloatTensor<B>>> {
    let rank = dims::<B>(&grad).len();
    let input = |index: usize| pad_rank::<B>(step.inputs[index].clone(), rank);
    let fit = |grad, index: usize| reduce_to::<B>(grad, &dims::<B>(&step.inputs[index]));
    let wide = |index: usize| expand::<B>(input(index), &dims::<B>(step.output));
    let left = step.needs_gradient[0].then(|| {
        let full = match kind {
            Binary::Add | Binary::Sub => grad.clone(),
            Binary::Mul => B::float_mul(grad.clone(), input(1)),
            Binary::Div => B::float_div(grad.clone(), input(1)),
            Binary::Max | Binary::Min => share_of_extreme::<B>(step, kind, 0, grad.clone()),
            Binary::Pow => {
                let (a, b) = (wide(0), wide(1));
                let power = B::float_powf(a.clone(), B::float_add_scalar(b.clone(), (-1.0).into()));
                let found = B::float_mul(grad.clone(), B::float_mul(b.clone(), power));
                // A constant 1 has no slope, also at 0.
                let flags = flag_type::<B>(&a);
                let [base, exponent] = [a, b].map(|side| B::float_equal_elem(side, 0.0.into(), flags));
                B::float_mask_fill(found, B::bool_and(base, exponent), 0.0.into())
            }
        };
        fit(full, 0)
    });
    let right = step.needs_gradient[1].then(|| {
        let full = match kind {
            Binary::Add => grad,
            // Sum first: the negation then touches fewer elements.
            Binary::Sub => return B::float_neg(fit(grad, 1)),
            Binary::Mul => B::float_mul(grad, input(0)),
            Binary::Div => {
                let slope = B::float_div(step.output.clone(), input(1));
                B::float_neg(B::float_mul(grad, slope))
            }
            Binary::Max | Binary::Min => share_of_extreme::<B>(step, kind, 1, grad),
            Binary::Pow => {
                // At a base of 0 the power stays 0.
                let base = wide(0);
                let zero = B::float_equal_elem(base.clone(), 0.0.into(), flag_type::<B>(&base));
                let slope = B::float_mul(step.output.clone(), B::float_log(base));
                B::float_mask_fill(B::float_mul(grad, slope), zero, 0.0.into())
            }
        };
        fit(full, 1)
    });
    vec![left, right]
}

/// The gradient of one side of a maximum or minimum; equal sides get half each.
fn share_of_extreme<B: Backend>(
    step: &Step<'_, B>,
    kind: Binary,
    side: usize,
    grad: FloatTensor<B>,
) -> FloatTensor<B> {
    let shape = dims::<B>(&grad);
    let at = |index: usize| expand::<B>(pad_rank::<B>(step.inputs[index].clone(), shape.len()), &shape);
    let (mine, other) = (at(side), at(1 - side));
    let flags = flag_type::<B>(&mine);
    let (low, high) = if kind == Binary::Max { (other, mine) } else { (mine, other) };
    let wins = B::float_lower(low.clone(), high.clone(), flags);
    let ties = B::float_lower_equal(low, high, flags);
    let votes = [wins, ties].map(|flags| B::bool_into_float(flags, grad.dtype().into()));
    let [wins, ties] = votes;
    B::float_mul(grad, B::float_mul_scalar(B::float_add(wins, ties), 0.5.into()))
}

fn conv<B: Kernels>(
    step: &Step<'_, B>,
    spec: &ConvSpec,
    grad: FloatTensor<B>,
) -> Vec<Option<FloatTensor<B>>> {
    let (x, weight) = (&step.inputs[0], &step.inputs[1]);
    let mut grads = vec![
        step.needs_gradient[0]
            .then(|| B::convolution_x_backward(x.clone(), weight.clone(), grad.clone(), options(spec))),
        step.needs_gradient[1]
            .then(|| B::convolution_weight_backward(x.clone(), weight.clone(), grad.clone(), options(spec))),
    ];
    if step.inputs.len() > 2 {
        grads.push(step.needs_gradient[2].then(|| {
            // Sums along the contiguous axis first: the backend's own rule makes one more copy.
            let shape = dims::<B>(&grad);
            let planes = reshape::<B>(grad, &[shape[0], shape[1], shape[2] * shape[3]]);
            let sums = B::float_sum_dim(B::float_sum_dim(planes, 2), 0);
            reshape::<B>(sums, &shape[1..2])
        }));
    }
    grads
}

fn concat<B: Backend>(step: &Step<'_, B>, axis: usize, grad: FloatTensor<B>) -> Vec<Option<FloatTensor<B>>> {
    let mut start = 0;
    step.inputs
        .iter()
        .zip(step.needs_gradient)
        .map(|(input, needs_gradient)| {
            let shape = dims::<B>(input);
            let from = start;
            start += shape[axis];
            needs_gradient.then(|| {
                let part: Vec<Slice> = shape
                    .iter()
                    .enumerate()
                    .map(|(a, size)| {
                        let offset = if a == axis { from } else { 0 };
                        Slice::from(offset..offset + size)
                    })
                    .collect();
                B::float_slice(grad.clone(), &part)
            })
        })
        .collect()
}

/// The gradient through an element-wise function with input `x` and output `y`.
fn unary<B: Backend>(
    kind: Unary,
    x: FloatTensor<B>,
    y: FloatTensor<B>,
    grad: FloatTensor<B>,
) -> FloatTensor<B> {
    let scaled = |tensor, factor: f64| B::float_mul_scalar(tensor, factor.into());
    let square = |tensor: FloatTensor<B>| B::float_mul(tensor.clone(), tensor);
    let one_minus = |tensor| B::float_add_scalar(B::float_mul_scalar(tensor, (-1.0).into()), 1.0.into());
    match kind {
        Unary::Relu => B::relu_backward(y, grad),
        Unary::LeakyRelu(slope) => {
            let settings = get_device_settings::<B>(&B::float_device(&x));
            let below = B::float_lower_elem(x, 0.0.into(), settings.bool_dtype);
            let bent = scaled(grad.clone(), f64::from(slope));
            B::float_mask_where(grad, below, bent)
        }
        Unary::Sigmoid => B::float_mul(grad, B::float_mul(y.clone(), one_minus(y))),
        Unary::Tanh => B::float_mul(grad, one_minus(square(y))),
        Unary::Gelu => {
            // Φ(x) + x·φ(x)
            let erf = B::float_erf(scaled(x.clone(), std::f64::consts::FRAC_1_SQRT_2));
            let cdf = scaled(B::float_add_scalar(erf, 1.0.into()), 0.5);
            let bell = B::float_exp(scaled(square(x.clone()), -0.5));
            let density = scaled(bell, 0.5 * GELU_SCALE);
            B::float_mul(grad, B::float_add(cdf, B::float_mul(x, density)))
        }
        Unary::GeluTanh => {
            // ½(1 + t) + ½·x·(1 − t²)·√(2/π)·(1 + 3·0.044715·x²)
            let t = gelu_tanh::<B>(x.clone());
            let half = scaled(B::float_add_scalar(t.clone(), 1.0.into()), 0.5);
            let inner = B::float_add_scalar(
                scaled(square(x.clone()), 1.5 * GELU_SCALE * GELU_CUBIC),
                (0.5 * GELU_SCALE).into(),
            );
            let bend = B::float_mul(B::float_mul(one_minus(square(t)), inner), x);
            B::float_mul(grad, B::float_add(half, bend))
        }
        Unary::Erf => {
            let bell = B::float_exp(scaled(square(x), -1.0));
            B::float_mul(grad, scaled(bell, std::f64::consts::FRAC_2_SQRT_PI))
        }
        Unary::Exp => B::float_mul(grad, y),
        Unary::Log => B::float_div(grad, x),
        Unary::Sqrt => B::float_div(scaled(grad, 0.5), y),
        Unary::Neg => B::float_neg(grad),
        Unary::Scale(factor) => scaled(grad, f64::from(factor)),
        Unary::Shift(_) => grad,
        Unary::Root => {
            let zero = B::float_equal_elem(y.clone(), 0.0.into(), flag_type::<B>(&y));
            B::float_mask_fill(B::float_div(scaled(grad, 0.5), y), zero, 0.0.into())
        }
        Unary::Abs => B::float_mul(grad, B::float_sign(x)),
        Unary::Reciprocal => B::float_neg(B::float_mul(grad, square(y))),
        Unary::Pow(exponent) => {
            if exponent == 0.0 {
                // A constant 1 has no slope, also at 0.
                let shape = dims::<B>(&grad);
                return zeros_like::<B>(&grad, &shape);
            }
            let exponent = f64::from(exponent);
            let power = B::float_powf_scalar(x, (exponent - 1.0).into());
            B::float_mul(grad, scaled(power, exponent))
        }
        Unary::Clip(low, high) => {
            let flags = flag_type::<B>(&x);
            let below = B::float_lower_equal_elem(x.clone(), f64::from(low).into(), flags);
            let above = B::float_greater_equal_elem(x, f64::from(high).into(), flags);
            B::float_mask_fill(B::float_mask_fill(grad, below, 0.0.into()), above, 0.0.into())
        }
        Unary::Elu(factor) => {
            let below = B::float_lower_equal_elem(x.clone(), 0.0.into(), flag_type::<B>(&x));
            let slope = B::float_add_scalar(y, f64::from(factor).into());
            B::float_mask_where(grad.clone(), below, B::float_mul(grad, slope))
        }
        Unary::Softplus => B::float_mul(grad, B::sigmoid(x)),
        Unary::Sin => B::float_mul(grad, B::float_cos(x)),
        Unary::Cos => B::float_neg(B::float_mul(grad, B::float_sin(x))),
        Unary::Tan => B::float_mul(grad, B::float_add_scalar(square(y), 1.0.into())),
        Unary::Asin => B::float_div(grad, B::float_sqrt(one_minus(square(x)))),
        Unary::Acos => B::float_neg(B::float_div(grad, B::float_sqrt(one_minus(square(x))))),
        Unary::Atan => B::float_div(grad, B::float_add_scalar(square(x), 1.0.into())),
        Unary::Sinh => B::float_mul(grad, B::float_cosh(x)),
        Unary::Cosh => B::float_mul(grad, B::float_sinh(x)),
        Unary::Asinh => B::float_div(grad, B::float_sqrt(B::float_add_scalar(square(x), 1.0.into()))),
        Unary::Acosh => B::float_div(grad, B::float_sqrt(B::float_add_scalar(square(x), (-1.0).into()))),
        Unary::Atanh => B::float_div(grad, one_minus(square(x))),
        // Their slope is 0; no gradient reaches them.
        Unary::Sign | Unary::Floor | Unary::Ceil | Unary::Round | Unary::Trunc => scaled(grad, 0.0),
    }
}
