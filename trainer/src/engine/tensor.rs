//! Tensor helpers: transfers between vectors and a backend, and shape adjustments.

use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{Backend, Element, Shape, TensorData, TensorMetadata, try_read_sync};

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
