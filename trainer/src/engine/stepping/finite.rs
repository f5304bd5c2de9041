//! Reductions over all parameters: flags of elements that are not finite, and the factor of a clipped gradient.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, TensorMetadata};

use super::super::tensor::{flag_type, reshape};

/// One number for each tensor: 0 if all its elements are finite, more otherwise.
pub(super) fn finite_flags<'a, B: Backend>(
    tensors: impl Iterator<Item = &'a FloatTensor<B>>,
) -> FloatTensor<B> {
    let flag = |tensor: &FloatTensor<B>| {
        // False for NaN, too.
        let fits = B::float_lower_equal_elem(
            B::float_abs(tensor.clone()),
            f64::from(f32::MAX).into(),
            flag_type::<B>(tensor),
        );
        let bad = B::bool_into_float(B::bool_not(fits), tensor.dtype().into());
        reshape::<B>(B::float_sum(bad), &[1])
    };
    B::float_cat(tensors.map(flag).collect(), 0)
}

/// The factor, as a tensor of one element, that scales gradients down to the norm `limit`. There is at least one gradient,
/// and each has one axis.
pub(super) fn norm_factor<B: Backend>(gradients: &[FloatTensor<B>], limit: f64) -> FloatTensor<B> {
    let largest = gradients.iter().map(|g| reshape::<B>(B::float_max_abs(g.clone()), &[1])).collect();
    let largest = reshape::<B>(B::float_max(B::float_cat(largest, 0)), &[1]);
    // Squares of parts of the largest element neither overflow nor vanish.
    let largest = B::float_clamp_min(largest, f64::from(f32::MIN_POSITIVE).into());
    let squares = gradients.iter().map(|gradient| {
        let part = B::float_div(gradient.clone(), largest.clone());
        reshape::<B>(B::float_sum(B::float_mul(part.clone(), part)), &[1])
    });
    let total = reshape::<B>(B::float_sum(B::float_cat(squares.collect(), 0)), &[1]);
    let norm = B::float_mul(B::float_sqrt(total), largest);
    B::float_clamp_max(B::float_mul_scalar(B::float_recip(norm), limit.into()), 1.0.into())
}
