//! Kernels of the engine's own for the processor: convolution, max pooling and normalisation by channels of f32.

use burn_backend::ops::{ConvOptions, ModuleOps};
use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{Backend, DType, FloatDType, Shape, TensorData};
use burn_flex::{Flex, FlexTensor};
use rayon::prelude::*;

use super::channels::{self, Planes};
use super::convolution::Plan;
use super::matrices::transposed;
use crate::precision::Half;

/// A backend, with kernels of the engine's own where it has any.
pub(super) trait Kernels: Backend {
    /// The f32 elements of `x` rounded to `half`, as products of that format take them.
    fn narrow(x: FloatTensor<Self>, half: Half) -> FloatTensor<Self> {
        let kind = match half {
            Half::Bf16 => FloatDType::BF16,
            Half::Fp16 => FloatDType::F16,
        };
        Self::float_cast(x, kind)
    }

    /// The f32 elements of a product of the format `half`.
    fn widen(x: FloatTensor<Self>, _half: Half) -> FloatTensor<Self> {
        Self::float_cast(x, FloatDType::F32)
    }

    /// The transpose of the matrix `x` with its rows one after another; none if products of this backend read a view as
    /// fast.
    fn transpose(_x: &FloatTensor<Self>) -> Option<FloatTensor<Self>> {
        None
    }

    /// The convolution of `x`.
    fn convolution(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
        options: ConvOptions<2>,
    ) -> FloatTensor<Self> {
        Self::conv2d(x, weight, bias, options)
    }

    /// The gradient of a convolution's input.
    fn convolution_x_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        options: ConvOptions<2>,
    ) -> FloatTensor<Self> {
        Self::conv2d_x_backward(x, weight, grad, options)
    }

    /// The gradient of a convolution's weights.
    fn convolution_weight_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        options: ConvOptions<2>,
    ) -> FloatTensor<Self> {
        Self::conv2d_weight_backward(x, weight, grad, options)
    }

    /// Mean and population variance of each channel of `[outer, channels, inner]`, as `[1, channels, 1]`.
    fn channel_moments(values: FloatTensor<Self>) -> [FloatTensor<Self>; 2] {
        channels::moments::<Self>(values)
    }

    /// `(values - mean) * factor + bias` of `[outer, channels, inner]`, by channel.
    fn normalized(values: FloatTensor<Self>, by: [FloatTensor<Self>; 3]) -> FloatTensor<Self> {
        channels::normalized::<Self>(values, by)
    }

    /// The gradients of scale and bias of a normalisation by `mean` and `inverse`, as `[1, channels, 1]`.
    fn normalized_sums(
        values: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        by: [FloatTensor<Self>; 2],
    ) -> [FloatTensor<Self>; 2] {
        channels::normalized_sums::<Self>(values, grad, by)
    }

    /// `(grad - of_bias - (values - mean) * inverse * of_scale) * factor`, by channel: `by` has `mean`, `inverse`,
    /// `of_scale`, `of_bias` and `factor`.
    fn normalized_backward(
        values: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        by: [FloatTensor<Self>; 5],
    ) -> FloatTensor<Self> {
        channels::normalized_backward::<Self>(values, grad, by)
    }

    /// The largest element of each window, the first one of equals, and its place in its plane.
    fn max_pool(x: FloatTensor<Self>, windows: Windows) -> (FloatTensor<Self>, IntTensor<Self>) {
        let Windows { kernel, strides, padding, dilations } = windows;
        let found = Self::max_pool2d_with_indices(x, kernel, strides, padding, dilations, false);
        (found.output, found.indices)
    }
}

/// The windows of a pooling.
#[derive(Debug, Clone, Copy)]
pub(super) struct Windows {
    pub(super) kernel: [usize; 2],
    pub(super) strides: [usize; 2],
    pub(super) padding: [usize; 2],
    pub(super) dilations: [usize; 2],
}

impl Kernels for Flex {
    /// Keeps f32: the processor has faster products for it, and their sums have 32 bits.
    fn narrow(x: FlexTensor, half: Half) -> FlexTensor {
        let mut x = x.to_contiguous();
        half.round(x.storage_mut());
        x
    }

    fn widen(x: FlexTensor, half: Half) -> FlexTensor {
        Self::narrow(x, half)
    }

    /// The matrix kernels pack a right factor whose columns are apart element by element, which takes longer than a
    /// product with few rows.
    fn transpose(x: &FlexTensor) -> Option<FlexTensor> {
        let [height, width] = *x.layout().shape().as_slice() else { return None };
        if x.dtype() != DType::F32 || height * width == 0 {
            return None;
        }
        let x = x.to_contiguous();
        let values = transposed(x.storage(), width);
        Some(FlexTensor::from_data(TensorData::new(values, Shape::from(vec![width, height]))))
    }

    fn convolution(
        x: FlexTensor,
        weight: FlexTensor,
        bias: Option<FlexTensor>,
        options: ConvOptions<2>,
    ) -> FlexTensor {
        let Some(plan) = Plan::of(&x, &weight, &options) else {
            return Flex::conv2d(x, weight, bias, options);
        };
        let (x, weight) = (x.to_contiguous(), weight.to_contiguous());
        let bias = bias.map(|bias| bias.to_contiguous());
        let bias = bias.as_ref().map(FlexTensor::storage::<f32>);
        plan.tensor(plan.output(), plan.forward(x.storage(), weight.storage(), bias))
    }

    fn convolution_x_backward(
        x: FlexTensor,
        weight: FlexTensor,
        grad: FlexTensor,
        options: ConvOptions<2>,
    ) -> FlexTensor {
        let Some(plan) = Plan::of(&x, &weight, &options) else {
            return Flex::conv2d_x_backward(x, weight, grad, options);
        };
        let (weight, grad) = (weight.to_contiguous(), grad.to_contiguous());
        plan.tensor(plan.input(), plan.x_backward(weight.storage(), grad.storage()))
    }

    fn convolution_weight_backward(
        x: FlexTensor,
        weight: FlexTensor,
        grad: FlexTensor,
        options: ConvOptions<2>,
    ) -> FlexTensor {
        let Some(plan) = Plan::of(&x, &weight, &options) else {
            return Flex::conv2d_weight_backward(x, weight, grad, options);
        };
        let (x, grad) = (x.to_contiguous(), grad.to_contiguous());
        plan.tensor(plan.weight(), plan.weight_backward(x.storage(), grad.storage()))
    }

    fn channel_moments(values: FlexTensor) -> [FlexTensor; 2] {
        let Some(planes) = Planes::of(&values) else { return channels::moments::<Self>(values) };
        let [mean, variance] = planes.moments(values.to_contiguous().storage());
        [planes.by_channel(mean), planes.by_channel(variance)]
    }

    fn normalized(values: FlexTensor, by: [FlexTensor; 3]) -> FlexTensor {
        let Some(planes) = Planes::of(&values) else { return channels::normalized::<Self>(values, by) };
        let by = by.map(|by| by.to_contiguous());
        let by = by.each_ref().map(FlexTensor::storage::<f32>);
        planes.tensor(planes.normalized(values.to_contiguous().storage(), by))
    }

    fn normalized_sums(values: FlexTensor, grad: FlexTensor, by: [FlexTensor; 2]) -> [FlexTensor; 2] {
        let Some(planes) = Planes::of(&values) else {
            return channels::normalized_sums::<Self>(values, grad, by);
        };
        let (values, grad, by) =
            (values.to_contiguous(), grad.to_contiguous(), by.map(|by| by.to_contiguous()));
        let by = by.each_ref().map(FlexTensor::storage::<f32>);
        planes.normalized_sums(values.storage(), grad.storage(), by).map(|sums| planes.by_channel(sums))
    }

    fn normalized_backward(values: FlexTensor, grad: FlexTensor, by: [FlexTensor; 5]) -> FlexTensor {
        let Some(planes) = Planes::of(&values) else {
            return channels::normalized_backward::<Self>(values, grad, by);
        };
        let (values, grad, by) =
            (values.to_contiguous(), grad.to_contiguous(), by.map(|by| by.to_contiguous()));
        let by = by.each_ref().map(FlexTensor::storage::<f32>);
        planes.tensor(planes.normalized_backward(values.storage(), grad.storage(), by))
    }

    fn max_pool(x: FlexTensor, windows: Windows) -> (FlexTensor, FlexTensor) {
        let Windows { kernel, strides, padding, dilations } = windows;
        let shape = x.layout().shape().as_slice().to_vec();
        let fits = |size: &[usize]| size[0] >= kernel[0] && size[1] >= kernel[1];
        if x.dtype() != DType::F32 || padding != [0, 0] || dilations != [1, 1] || !fits(&shape[2..]) {
            let found = Flex::max_pool2d_with_indices(x, kernel, strides, padding, dilations, false);
            return (found.output, found.indices);
        }
        let out = [0, 1].map(|axis| (shape[2 + axis] - kernel[axis]) / strides[axis] + 1);
        let (values, places) =
            maxima(x.to_contiguous().storage(), [shape[2], shape[3]], kernel, strides, out);
        let shape = Shape::from(vec![shape[0], shape[1], out[0], out[1]]);
        let values = FlexTensor::from_data(TensorData::new(values, shape.clone()));
        (values, FlexTensor::from_data(TensorData::new(places, shape)))
    }
}

/// The largest element of each window of planes of `size`, and its place in its plane.
fn maxima(
    planes: &[f32],
    [height, width]: [usize; 2],
    kernel: [usize; 2],
    strides: [usize; 2],
    out: [usize; 2],
) -> (Vec<f32>, Vec<i64>) {
    let (size, windows) = (height * width, out[0] * out[1]);
    let mut values = vec![0.0; planes.len() / size * windows];
    let mut places = vec![0; values.len()];
    let outputs = values.par_chunks_exact_mut(windows).zip(places.par_chunks_exact_mut(windows));
    planes.par_chunks_exact(size).zip(outputs).for_each(|(plane, (values, places))| {
        let corners = (0..out[0])
            .flat_map(|row| (0..out[1]).map(move |column| row * strides[0] * width + column * strides[1]));
        for (first, (value, place)) in corners.zip(values.iter_mut().zip(places)) {
            let (mut largest, mut at) = (plane[first], first);
            for row in 0..kernel[0] {
                let start = first + row * width;
                for (offset, found) in plane[start..start + kernel[1]].iter().enumerate() {
                    if *found > largest {
                        (largest, at) = (*found, start + offset);
                    }
                }
            }
            (*value, *place) = (largest, at as i64);
        }
    });
    (values, places)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn maxima_equal_the_backends(
            shape in [1usize..4, 1usize..4, 1usize..12, 1usize..12],
            kernel in [1usize..4, 1usize..4],
            strides in [1usize..4, 1usize..4],
            nan in 0usize..40,
        ) {
            prop_assume!(shape[2] >= kernel[0] && shape[3] >= kernel[1]);
            let mut values: Vec<f32> =
                (0..shape.iter().product()).map(|at: usize| ((at * 31) % 7) as f32 - 3.0).collect();
            if let Some(value) = values.get_mut(nan) {
                *value = f32::NAN;
            }
            let x = FlexTensor::from_data(TensorData::new(values, Shape::from(shape.to_vec())));
            for (padding, dilations) in [([0, 0], [1, 1]), ([kernel[0] / 2, kernel[1] / 2], [1, 1])] {
                let windows = Windows { kernel, strides, padding, dilations };
                let (values, places) = Flex::max_pool(x.clone(), windows);
                let found = Flex::max_pool2d_with_indices(x.clone(), kernel, strides, padding, dilations, false);
                prop_assert_eq!(values.layout().shape(), found.output.layout().shape());
                let bits = |tensor: &FlexTensor| -> Vec<u32> {
                    tensor.storage::<f32>().iter().map(|value| value.to_bits()).collect()
                };
                prop_assert_eq!(bits(&values), bits(&found.output));
                prop_assert_eq!(places.storage::<i64>(), found.indices.storage::<i64>());
            }
        }
    }
}
