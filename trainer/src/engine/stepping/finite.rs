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

#[cfg(test)]
mod tests {
    use burn_flex::{Flex, FlexDevice, FlexTensor};

    use super::super::super::tensor::{download, upload};
    use super::*;

    fn tensor(values: &[f32]) -> FlexTensor {
        upload::<Flex, f32>(values.to_vec(), &[values.len()], &FlexDevice)
    }

    fn host(tensor: FlexTensor) -> Vec<f32> {
        let mut values = Vec::new();
        download::<Flex, f32>(tensor, &mut values).unwrap();
        values
    }

    #[test]
    fn a_norm_neither_overflows_nor_vanishes() {
        for scale in [1.0f32, 1e25, 1e-25] {
            let gradients = [tensor(&[3.0 * scale, 0.0]), tensor(&[-4.0 * scale])];
            let norm = 5.0 * f64::from(scale);
            for (limit, expected) in [(norm * 2.0, 1.0), (norm / 2.0, 0.5), (norm / 10.0, 0.1)] {
                let factor = host(norm_factor::<Flex>(&gradients, limit));
                let close = (f64::from(factor[0]) - expected).abs() < 1e-6;
                assert!(factor.len() == 1 && close, "{scale}, {limit}: {factor:?} is not {expected}");
            }
        }
        assert_eq!(host(norm_factor::<Flex>(&[tensor(&[0.0, 0.0])], 0.5)), [1.0]);
    }

    #[test]
    fn flags_tell_tensors_with_elements_that_are_not_finite() {
        let tensors = [
            tensor(&[1.0, f32::MAX, f32::MIN]),
            tensor(&[0.0, f32::NAN]),
            tensor(&[f32::INFINITY, 1.0]),
            tensor(&[f32::NEG_INFINITY, f32::NAN]),
        ];
        assert_eq!(host(finite_flags::<Flex>(tensors.iter())), [0.0, 1.0, 1.0, 2.0]);
    }
}
