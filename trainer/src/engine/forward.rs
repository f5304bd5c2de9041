//! Forward computation of each operation, in backend primitives.

use burn_backend::ops::{ConvOptions, ConvTransposeOptions};
use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn_backend::{Backend, Shape, Slice, TensorMetadata, get_device_settings};

use super::kernels::{Kernels, Windows};
use super::tensor::{dims, expand, flag_type, pad_rank, positions_tensor, reshape, zeros_like};
use super::training::{self, Kept};
use crate::graph::{Binary, Compare, Conv3Spec, ConvSpec, Op, PoolSpec, Unary};

/// √(2/π), of the tanh approximation of Gelu.
pub(super) const GELU_SCALE: f64 = 0.797_884_560_802_865_4;
/// The cubic coefficient of the tanh approximation of Gelu.
pub(super) const GELU_CUBIC: f64 = 0.044_715;

/// The output of an operation, and what its derivative needs besides inputs and output.
pub(super) type Forward<B> = (FloatTensor<B>, Option<Kept<B>>);

/// Computes one operation as in evaluation; `shape` is the shape of its output.
pub(super) fn forward<B: Kernels>(op: &Op, inputs: &[FloatTensor<B>], shape: &[usize]) -> Forward<B> {
    let input = |index: usize| inputs[index].clone();
    let output = match op {
        Op::MatMul => B::float_matmul(input(0), input(1)),
        Op::Binary(kind) => {
            let rank = shape.len();
            let (a, b) = (pad_rank::<B>(input(0), rank), pad_rank::<B>(input(1), rank));
            match kind {
                Binary::Add => B::float_add(a, b),
                Binary::Sub => B::float_sub(a, b),
                Binary::Mul => B::float_mul(a, b),
                Binary::Div => B::float_div(a, b),
                Binary::Max | Binary::Min => {
                    let (a, b) = (expand::<B>(a, shape), expand::<B>(b, shape));
                    let below = B::float_lower(a.clone(), b.clone(), flag_type::<B>(&a));
                    let (first, second) = if *kind == Binary::Max { (a, b) } else { (b, a) };
                    B::float_mask_where(first, below, second)
                }
                Binary::Pow => B::float_powf(expand::<B>(a, shape), expand::<B>(b, shape)),
            }
        }
        Op::Compare(kind) => {
            let both = [0, 1].map(|index| expand::<B>(pad_rank::<B>(input(index), shape.len()), shape));
            let [a, b] = both;
            let (flags, kind_of_float) = (flag_type::<B>(&a), a.dtype());
            let holds = match kind {
                Compare::Equal => B::float_equal(a, b, flags),
                Compare::Less => B::float_lower(a, b, flags),
                Compare::LessOrEqual => B::float_lower_equal(a, b, flags),
            };
            B::bool_into_float(holds, kind_of_float.into())
        }
        Op::Where => {
            let [condition, a, b] =
                [0, 1, 2].map(|index| expand::<B>(pad_rank::<B>(input(index), shape.len()), shape));
            B::float_mask_where(b, holds::<B>(condition), a)
        }
        Op::Unary(kind) => unary::<B>(*kind, input(0)),
        Op::Softmax(axis) => B::softmax(input(0), *axis),
        Op::LogSoftmax(axis) => B::log_softmax(input(0), *axis),
        Op::Conv(spec) => B::convolution(input(0), input(1), inputs.get(2).cloned(), options(spec)),
        Op::Conv3(spec) => B::conv3d(input(0), input(1), None, options3(spec)),
        Op::ConvTranspose(spec) => B::conv_transpose2d(
            input(0),
            input(1),
            None,
            ConvTransposeOptions::new(spec.strides, [0; 2], [0; 2], spec.dilations, spec.groups),
        ),
        Op::MaxPool(spec) => {
            let PoolSpec { kernel, strides, padding, dilations, .. } = *spec;
            let (output, places) = B::max_pool(input(0), Windows { kernel, strides, padding, dilations });
            return (output, Some(Kept::Picked(places)));
        }
        Op::AveragePool(spec) => {
            B::avg_pool2d(input(0), spec.kernel, spec.strides, spec.padding, spec.count_include_pad, false)
        }
        Op::Pad { before, value } => {
            let x = input(0);
            let inner = inside(&dims::<B>(&x), before);
            let (target, device) = (Shape::from(shape.to_vec()), B::float_device(&x));
            let filled = if *value == 0.0 {
                B::float_zeros(target, &device, x.dtype().into())
            } else {
                B::float_full(target, f64::from(*value).into(), &device, x.dtype().into())
            };
            B::float_slice_assign(filled, &inner, x)
        }
        Op::Expand => expand::<B>(pad_rank::<B>(input(0), shape.len()), shape),
        Op::Slice { axis, start } => B::float_slice(input(0), &region(shape, *axis, *start)),
        Op::Select { axis, positions } => {
            let x = input(0);
            let positions = positions_tensor::<B>(positions, &B::float_device(&x));
            B::float_select(x, *axis, positions)
        }
        Op::Lookup { .. } => {
            let table = input(0);
            let rows = rows_of::<B>(input(1));
            let flat = flat_table::<B>(table);
            reshape::<B>(B::float_select(flat, 0, rows), shape)
        }
        Op::Pick(axis) => B::float_gather(*axis, input(0), positions_of::<B>(input(1))),
        Op::Put(axis) => B::float_scatter_add(*axis, input(0), positions_of::<B>(input(1)), input(2)),
        // The interpreter finds the positions, since a device may fail to hand over the elements.
        Op::Rank { .. } => zeros_like::<B>(&inputs[0], shape),
        Op::Reshape => reshape::<B>(input(0), shape),
        Op::Permute(order) => B::float_permute(input(0), order),
        Op::Concat(axis) => B::float_cat(inputs.to_vec(), *axis),
        Op::Sum(axes) => reshape::<B>(fold::<B>(input(0), axes), shape),
        Op::Mean(axes) => {
            let count: usize = axes.iter().map(|axis| dims::<B>(&inputs[0])[*axis]).product();
            let sum = fold::<B>(input(0), axes);
            let mean = B::float_mul_scalar(sum, (1.0 / count as f64).into());
            reshape::<B>(mean, shape)
        }
        Op::Max(axes) => {
            let most = axes.iter().fold(input(0), |tensor, axis| B::float_max_dim(tensor, *axis));
            reshape::<B>(most, shape)
        }
        Op::BatchNorm { epsilon, .. } => {
            let (output, kept) = training::by_running_statistics::<B>(inputs, *epsilon);
            return (output, Some(kept));
        }
        Op::Dropout(_) => input(0),
    };
    (output, None)
}

/// Where a condition of zeros and ones holds.
pub(super) fn holds<B: Backend>(condition: FloatTensor<B>) -> BoolTensor<B> {
    let flags = flag_type::<B>(&condition);
    B::float_not_equal_elem(condition, 0.0.into(), flags)
}

/// Whole numbers as positions, in one dimension.
pub(super) fn rows_of<B: Backend>(numbers: FloatTensor<B>) -> IntTensor<B> {
    let kind = get_device_settings::<B>(&B::float_device(&numbers)).int_dtype;
    let count = dims::<B>(&numbers).iter().product();
    B::float_into_int(reshape::<B>(numbers, &[count]), kind)
}

/// Whole numbers as positions, in their shape.
pub(super) fn positions_of<B: Backend>(numbers: FloatTensor<B>) -> IntTensor<B> {
    let kind = get_device_settings::<B>(&B::float_device(&numbers)).int_dtype;
    B::float_into_int(numbers, kind)
}

/// A table with one axis for its rows and one for their elements.
pub(super) fn flat_table<B: Backend>(table: FloatTensor<B>) -> FloatTensor<B> {
    let shape = dims::<B>(&table);
    let width = shape[1..].iter().product();
    reshape::<B>(table, &[shape[0], width])
}

pub(super) fn options3(spec: &Conv3Spec) -> ConvOptions<3> {
    ConvOptions::new(spec.strides, spec.padding, spec.dilations, spec.groups)
}

/// `shape` elements, from `start` on one axis and from 0 on the others.
pub(super) fn region(shape: &[usize], axis: usize, start: usize) -> Vec<Slice> {
    let from = |a: usize| if a == axis { start } else { 0 };
    shape.iter().enumerate().map(|(a, size)| Slice::from(from(a)..from(a) + size)).collect()
}

pub(super) fn options(spec: &ConvSpec) -> ConvOptions<2> {
    ConvOptions::new(spec.strides, spec.padding, spec.dilations, spec.groups)
}

/// The region of a value inside its padding.
pub(super) fn inside(shape: &[usize], before: &[usize]) -> Vec<Slice> {
    shape.iter().zip(before).map(|(size, offset)| Slice::from(*offset..offset + size)).collect()
}

fn fold<B: Backend>(tensor: FloatTensor<B>, axes: &[usize]) -> FloatTensor<B> {
    axes.iter().fold(tensor, |tensor, axis| B::float_sum_dim(tensor, *axis))
}

/// tanh(√(2/π) · (x + 0.044715 x³))
pub(super) fn gelu_tanh<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let square = B::float_mul(x.clone(), x.clone());
    let factor =
        B::float_add_scalar(B::float_mul_scalar(square, (GELU_SCALE * GELU_CUBIC).into()), GELU_SCALE.into());
    B::float_tanh(B::float_mul(factor, x))
}

fn unary<B: Backend>(kind: Unary, x: FloatTensor<B>) -> FloatTensor<B> {
    match kind {
        Unary::Relu => B::relu(x),
        Unary::LeakyRelu(slope) => B::leaky_relu(x, f64::from(slope).into()),
        Unary::Sigmoid => B::sigmoid(x),
        Unary::Tanh => B::float_tanh(x),
        Unary::Gelu => B::gelu(x),
        Unary::GeluTanh => {
            let bent = B::float_add_scalar(gelu_tanh::<B>(x.clone()), 1.0.into());
            B::float_mul(B::float_mul_scalar(x, 0.5.into()), bent)
        }
        Unary::Erf => B::float_erf(x),
        Unary::Exp => B::float_exp(x),
        Unary::Log => B::float_log(x),
        Unary::Sqrt | Unary::Root => B::float_sqrt(x),
        Unary::Neg => B::float_neg(x),
        Unary::Scale(factor) => B::float_mul_scalar(x, f64::from(factor).into()),
        Unary::Shift(offset) => B::float_add_scalar(x, f64::from(offset).into()),
        Unary::Abs => B::float_abs(x),
        Unary::Reciprocal => B::float_recip(x),
        Unary::Pow(exponent) => B::float_powf_scalar(x, f64::from(exponent).into()),
        Unary::Clip(low, high) => {
            let x = if low == f32::NEG_INFINITY { x } else { B::float_clamp_min(x, f64::from(low).into()) };
            if high == f32::INFINITY { x } else { B::float_clamp_max(x, f64::from(high).into()) }
        }
        Unary::Elu(factor) => {
            let flags = flag_type::<B>(&x);
            let above = B::float_greater_elem(x.clone(), 0.0.into(), flags);
            let power = B::float_exp(B::float_clamp_max(x.clone(), 0.0.into()));
            let bent =
                B::float_mul_scalar(B::float_add_scalar(power, (-1.0).into()), f64::from(factor).into());
            B::float_mask_where(bent, above, x)
        }
        Unary::Softplus => {
            // max(x, 0) + ln(1 + e^−|x|) does not overflow.
            let power = B::float_exp(B::float_neg(B::float_abs(x.clone())));
            B::float_add(B::float_clamp_min(x, 0.0.into()), B::float_log1p(power))
        }
        Unary::Sin => B::float_sin(x),
        Unary::Cos => B::float_cos(x),
        Unary::Tan => B::float_tan(x),
        Unary::Asin => B::float_asin(x),
        Unary::Acos => B::float_acos(x),
        Unary::Atan => B::float_atan(x),
        Unary::Sinh => B::float_sinh(x),
        Unary::Cosh => B::float_cosh(x),
        Unary::Asinh => B::float_asinh(x),
        Unary::Acosh => B::float_acosh(x),
        Unary::Atanh => B::float_atanh(x),
        Unary::Sign => B::float_sign(x),
        Unary::Floor => B::float_floor(x),
        Unary::Ceil => B::float_ceil(x),
        Unary::Round => B::float_round(x),
        Unary::Trunc => B::float_trunc(x),
    }
}
