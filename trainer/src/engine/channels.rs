//! Normalisation by the statistics of channels: for any backend, and in one pass over the memory for the processor.
//!
//! Values are `[outer, channels, inner]`, what belongs to a channel `[1, channels, 1]`. On the processor, sums have 64
//! bits, and their order depends on the sizes alone.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, Shape, TensorData};
use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::tensor::dims;

/// Sums each channel, along the contiguous axis first.
fn sums<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    B::float_sum_dim(B::float_sum_dim(tensor, 2), 0)
}

pub(super) fn moments<B: Backend>(values: FloatTensor<B>) -> [FloatTensor<B>; 2] {
    let shape = dims::<B>(&values);
    let share = 1.0 / (shape[0] * shape[2]) as f64;
    let average = |tensor| B::float_mul_scalar(sums::<B>(tensor), share.into());
    let mean = average(values.clone());
    let centred = B::float_sub(values, mean.clone());
    [mean, average(B::float_mul(centred.clone(), centred))]
}

pub(super) fn normalized<B: Backend>(
    values: FloatTensor<B>,
    [mean, factor, bias]: [FloatTensor<B>; 3],
) -> FloatTensor<B> {
    B::float_add(B::float_mul(B::float_sub(values, mean), factor), bias)
}

pub(super) fn normalized_sums<B: Backend>(
    values: FloatTensor<B>,
    grad: FloatTensor<B>,
    [mean, inverse]: [FloatTensor<B>; 2],
) -> [FloatTensor<B>; 2] {
    let normal = B::float_mul(B::float_sub(values, mean), inverse);
    [sums::<B>(B::float_mul(grad.clone(), normal)), sums::<B>(grad)]
}

pub(super) fn normalized_backward<B: Backend>(
    values: FloatTensor<B>,
    grad: FloatTensor<B>,
    [mean, inverse, of_scale, of_bias, factor]: [FloatTensor<B>; 5],
) -> FloatTensor<B> {
    let normal = B::float_mul(B::float_sub(values, mean), inverse);
    let centred = B::float_sub(B::float_sub(grad, of_bias), B::float_mul(normal, of_scale));
    B::float_mul(centred, factor)
}

/// The sizes of f32 values on the processor.
#[derive(Debug, Clone, Copy)]
pub(super) struct Planes {
    outer: usize,
    channels: usize,
    inner: usize,
}

impl Planes {
    /// None for another type, and for values without elements.
    pub(super) fn of(values: &FlexTensor) -> Option<Planes> {
        let [outer, channels, inner] = *values.layout().shape().as_slice() else { return None };
        let is_some = outer * channels * inner > 0;
        (values.dtype() == DType::F32 && is_some).then_some(Planes { outer, channels, inner })
    }

    pub(super) fn tensor(&self, values: Vec<f32>) -> FlexTensor {
        let shape = Shape::from(vec![self.outer, self.channels, self.inner]);
        FlexTensor::from_data(TensorData::new(values, shape))
    }

    pub(super) fn by_channel(&self, values: Vec<f32>) -> FlexTensor {
        FlexTensor::from_data(TensorData::new(values, Shape::from(vec![1, self.channels, 1])))
    }

    /// The planes of a channel.
    fn planes<'a>(&self, values: &'a [f32], channel: usize) -> impl Iterator<Item = &'a [f32]> + use<'a> {
        let Planes { channels, inner, .. } = *self;
        values.chunks_exact(channels * inner).map(move |row| &row[channel * inner..][..inner])
    }

    fn count(&self) -> f64 {
        (self.outer * self.inner) as f64
    }

    /// Mean and population variance of each channel.
    pub(super) fn moments(&self, values: &[f32]) -> [Vec<f32>; 2] {
        let of_channel = |channel: usize| {
            let mean =
                self.planes(values, channel).map(|plane| sum(plane, plane, |value, _| value)).sum::<f64>();
            let mean = (mean / self.count()) as f32;
            let square = |value: f32, _| (value - mean) * (value - mean);
            let squares: f64 = self.planes(values, channel).map(|plane| sum(plane, plane, square)).sum();
            (mean, (squares / self.count()) as f32)
        };
        let (means, variances) = (0..self.channels).into_par_iter().map(of_channel).unzip();
        [means, variances]
    }

    /// `(values - mean) * factor + bias`
    pub(super) fn normalized(&self, values: &[f32], [mean, factor, bias]: [&[f32]; 3]) -> Vec<f32> {
        let mut output = vec![0.0; values.len()];
        let row = self.channels * self.inner;
        output.par_chunks_exact_mut(row).zip(values.par_chunks_exact(row)).for_each(|(output, values)| {
            let planes = output.chunks_exact_mut(self.inner).zip(values.chunks_exact(self.inner));
            for (channel, (output, values)) in planes.enumerate() {
                let (mean, factor, bias) = (mean[channel], factor[channel], bias[channel]);
                for (output, value) in output.iter_mut().zip(values) {
                    *output = (value - mean) * factor + bias;
                }
            }
        });
        output
    }

    /// The gradients of scale and bias of each channel.
    pub(super) fn normalized_sums(
        &self,
        values: &[f32],
        grad: &[f32],
        [mean, inverse]: [&[f32]; 2],
    ) -> [Vec<f32>; 2] {
        let of_channel = |channel: usize| {
            let (mean, inverse) = (mean[channel], inverse[channel]);
            let planes = || self.planes(grad, channel).zip(self.planes(values, channel));
            let scaled = |grad: f32, value: f32| grad * ((value - mean) * inverse);
            let of_scale: f64 = planes().map(|(grad, values)| sum(grad, values, scaled)).sum();
            let of_bias: f64 = planes().map(|(grad, values)| sum(grad, values, |grad, _| grad)).sum();
            (of_scale as f32, of_bias as f32)
        };
        let (of_scale, of_bias) = (0..self.channels).into_par_iter().map(of_channel).unzip();
        [of_scale, of_bias]
    }

    /// `(grad - of_bias - (values - mean) * inverse * of_scale) * factor`
    pub(super) fn normalized_backward(&self, values: &[f32], grad: &[f32], by: [&[f32]; 5]) -> Vec<f32> {
        let mut output = vec![0.0; values.len()];
        let row = self.channels * self.inner;
        let rows = values.par_chunks_exact(row).zip(grad.par_chunks_exact(row));
        output.par_chunks_exact_mut(row).zip(rows).for_each(|(output, (values, grad))| {
            let planes = values.chunks_exact(self.inner).zip(grad.chunks_exact(self.inner));
            for (channel, (output, (values, grad))) in
                output.chunks_exact_mut(self.inner).zip(planes).enumerate()
            {
                let [mean, inverse, of_scale, of_bias, factor] = by.map(|by| by[channel]);
                for (output, (value, grad)) in output.iter_mut().zip(values.iter().zip(grad)) {
                    *output = (grad - of_bias - (value - mean) * inverse * of_scale) * factor;
                }
            }
        });
        output
    }
}

/// The sum of `term` over pairs of elements, in 64 bits: eight sums side by side, then one.
fn sum(first: &[f32], second: &[f32], term: impl Fn(f32, f32) -> f32) -> f64 {
    let mut lanes = [0f64; 8];
    let ((firsts, first_rest), (seconds, second_rest)) = (first.as_chunks::<8>(), second.as_chunks::<8>());
    for (first, second) in firsts.iter().zip(seconds) {
        for (lane, (first, second)) in lanes.iter_mut().zip(first.iter().zip(second)) {
            *lane += f64::from(term(*first, *second));
        }
    }
    let rest = first_rest.iter().zip(second_rest).map(|(first, second)| f64::from(term(*first, *second)));
    lanes.iter().sum::<f64>() + rest.sum::<f64>()
}

#[cfg(test)]
mod tests {
    use burn_flex::Flex;
    use proptest::prelude::*;

    use super::super::kernels::Kernels;
    use super::*;

    fn tensor(shape: [usize; 3], by: f32) -> FlexTensor {
        let values: Vec<f32> =
            (0..shape.iter().product()).map(|at| (at as f32 * by + 0.3).sin() + by).collect();
        FlexTensor::from_data(TensorData::new(values, Shape::from(shape.to_vec())))
    }

    fn assert_close(ours: &FlexTensor, theirs: &FlexTensor) -> Result<(), TestCaseError> {
        prop_assert_eq!(ours.layout().shape(), theirs.layout().shape());
        let (ours, theirs) = (ours.to_contiguous(), theirs.to_contiguous());
        for (ours, theirs) in ours.storage::<f32>().iter().zip(theirs.storage::<f32>()) {
            prop_assert!((ours - theirs).abs() <= 1e-4 * (1.0 + theirs.abs()), "{ours} is not {theirs}");
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn one_pass_equals_the_backend(shape in [1usize..6, 1usize..6, 1usize..40]) {
            let by = |seed: f32| tensor([1, shape[1], 1], seed);
            let (values, grad) = (tensor(shape, 0.7), tensor(shape, 1.3));
            let (ours, theirs) = (Flex::channel_moments(values.clone()), moments::<Flex>(values.clone()));
            for (ours, theirs) in ours.iter().zip(&theirs) {
                assert_close(ours, theirs)?;
            }
            let three = || [by(0.1), by(0.2), by(0.3)];
            assert_close(
                &Flex::normalized(values.clone(), three()),
                &normalized::<Flex>(values.clone(), three()),
            )?;
            let two = || [by(0.1), by(0.2)];
            let ours = Flex::normalized_sums(values.clone(), grad.clone(), two());
            let theirs = normalized_sums::<Flex>(values.clone(), grad.clone(), two());
            for (ours, theirs) in ours.iter().zip(&theirs) {
                assert_close(ours, theirs)?;
            }
            let five = || [by(0.1), by(0.2), by(0.3), by(0.4), by(0.5)];
            let ours = Flex::normalized_backward(values.clone(), grad.clone(), five());
            assert_close(&ours, &normalized_backward::<Flex>(values, grad, five()))?;
        }
    }
}
