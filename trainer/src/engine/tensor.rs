//! Tensor helpers: transfers between vectors and a backend, and shape adjustments.

use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{
    Backend, BoolDType, Element, Shape, TensorData, TensorMetadata, get_device_settings, try_read_sync,
};

pub(super) fn upload<B: Backend, E: Element>(
    values: Vec<E>,
    shape: &[usize],
    device: &Device<B>,
) -> FloatTensor<B> {
    B::float_from_data(TensorData::new(values, Shape::from(shape.to_vec())), device)
}

/// Appends the elements of a tensor, row-major.
pub(super) fn download<B: Backend, E: Element>(
    tensor: FloatTensor<B>,
    into: &mut Vec<E>,
) -> Result<(), String> {
    let data = try_read_sync(B::float_into_data(tensor))
        .ok_or("the device did not answer")?
        .map_err(|error| error.to_string())?;
    let slice = data.as_slice::<E>().map_err(|error| format!("unexpected element type: {error:?}"))?;
    into.extend_from_slice(slice);
    Ok(())
}

pub(super) fn dims<B: Backend>(tensor: &FloatTensor<B>) -> Vec<usize> {
    tensor.shape().to_vec()
}

pub(super) fn reshape<B: Backend>(tensor: FloatTensor<B>, shape: &[usize]) -> FloatTensor<B> {
    if dims::<B>(&tensor) == shape {
        return tensor;
    }
    B::float_reshape(tensor, Shape::from(shape.to_vec()))
}

/// The shape with leading ones, up to `rank`.
pub(super) fn with_rank(shape: &[usize], rank: usize) -> Vec<usize> {
    let mut lifted = vec![1; rank.saturating_sub(shape.len())];
    lifted.extend(shape);
    lifted
}

/// Adds leading ones to a tensor, since primitives broadcast equal ranks only.
pub(super) fn pad_rank<B: Backend>(tensor: FloatTensor<B>, rank: usize) -> FloatTensor<B> {
    let shape = with_rank(&dims::<B>(&tensor), rank);
    reshape::<B>(tensor, &shape)
}

/// Sums a gradient over the axes along which its value was broadcast.
pub(super) fn reduce_to<B: Backend>(grad: FloatTensor<B>, shape: &[usize]) -> FloatTensor<B> {
    let from = dims::<B>(&grad);
    let target = with_rank(shape, from.len());
    let mut grad = grad;
    for axis in 0..from.len() {
        if target[axis] == 1 && from[axis] != 1 {
            grad = B::float_sum_dim(grad, axis);
        }
    }
    reshape::<B>(grad, shape)
}

/// Repeats a tensor along its axes of size 1.
pub(super) fn expand<B: Backend>(tensor: FloatTensor<B>, shape: &[usize]) -> FloatTensor<B> {
    if dims::<B>(&tensor) == shape {
        return tensor;
    }
    B::float_expand(tensor, Shape::from(shape.to_vec()))
}

/// The type of truth values on a tensor's device.
pub(super) fn flag_type<B: Backend>(tensor: &FloatTensor<B>) -> BoolDType {
    get_device_settings::<B>(&B::float_device(tensor)).bool_dtype
}

/// Positions on an axis as a tensor.
pub(super) fn positions_tensor<B: Backend>(positions: &[usize], device: &Device<B>) -> IntTensor<B> {
    let kind = get_device_settings::<B>(device).int_dtype;
    // An axis has at most 2^30 elements.
    let positions: Vec<i64> = positions.iter().map(|position| *position as i64).collect();
    let shape = Shape::from(vec![positions.len()]);
    B::int_from_data(TensorData::new(positions, shape).convert_dtype(kind.into()), device)
}

/// Zeros of a shape, of the type and on the device of another tensor.
pub(super) fn zeros_like<B: Backend>(tensor: &FloatTensor<B>, shape: &[usize]) -> FloatTensor<B> {
    B::float_zeros(Shape::from(shape.to_vec()), &B::float_device(tensor), tensor.dtype().into())
}
