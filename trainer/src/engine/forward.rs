//! Forward computation of each operation, in backend primitives.

use burn_backend::ops::ConvOptions;
use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{Backend, Shape, Slice, TensorMetadata};

use super::tensor::{dims, pad_rank, reshape};
use crate::graph::{Binary, ConvSpec, Op, Unary};

/// √(2/π), of the tanh approximation of Gelu.
pub(super) const GELU_SCALE: f64 = 0.797_884_560_802_865_4;
/// The cubic coefficient of the tanh approximation of Gelu.
pub(super) const GELU_CUBIC: f64 = 0.044_715;

/// The output of an operation, and for max pooling the positions of the maxima.
pub(super) type Forward<B> = (FloatTensor<B>, Option<IntTensor<B>>);

/// Computes one operation; `shape` is the shape of its output.
pub(super) fn forward<B: Backend>(op: &Op, inputs: &[FloatTensor<B>], shape: &[usize]) -> Forward<B> {
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
            }
        }
        Op::Unary(kind) => unary::<B>(*kind, input(0)),
        Op::Softmax(axis) => B::softmax(input(0), *axis),
        Op::LogSoftmax(axis) => B::log_softmax(input(0), *axis),
        Op::Conv(spec) => B::conv2d(input(0), input(1), inputs.get(2).cloned(), options(spec)),
        Op::MaxPool(spec) => {
            let found = B::max_pool2d_with_indices(
                input(0),
                spec.kernel,
                spec.strides,
                spec.padding,
                spec.dilations,
                false,
            );
            return (found.output, Some(found.indices));
        }
        Op::AveragePool(spec) => {
            B::avg_pool2d(input(0), spec.kernel, spec.strides, spec.padding, spec.count_include_pad, false)
        }
        Op::Pad(before, _) => {
            let x = input(0);
            let inner = inside(&dims::<B>(&x), *before);
            let zeros = B::float_zeros(Shape::from(shape.to_vec()), &B::float_device(&x), x.dtype().into());
            B::float_slice_assign(zeros, &inner, x)
        }
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
    };
    (output, None)
}

pub(super) fn options(spec: &ConvSpec) -> ConvOptions<2> {
    ConvOptions::new(spec.strides, spec.padding, spec.dilations, spec.groups)
}

/// The region of a value inside its zero padding.
pub(super) fn inside(shape: &[usize], before: [usize; 2]) -> Vec<Slice> {
    let offsets = [0, 0, before[0], before[1]];
    shape.iter().zip(offsets).map(|(size, offset)| Slice::from(offset..offset + size)).collect()
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
        Unary::Sqrt => B::float_sqrt(x),
        Unary::Neg => B::float_neg(x),
        Unary::Scale(factor) => B::float_mul_scalar(x, f64::from(factor).into()),
        Unary::Shift(offset) => B::float_add_scalar(x, f64::from(offset).into()),
    }
}
