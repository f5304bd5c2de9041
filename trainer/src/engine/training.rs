//! Computation of nodes with a training mode: normalisation by the statistics of a shard, and dropout.

use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{Backend, Element, ElementConversion};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use sha2::{Digest, Sha256};

use super::ShardKey;
use super::backward::Step;
use super::kernels::Kernels;
use super::tensor::{dims, reshape};
use crate::graph::Dropout;

/// What a derivative needs besides the inputs and the output of its node.
#[derive(Clone)]
pub(super) enum Kept<B: Backend> {
    /// Positions of the maxima that max pooling chose.
    Picked(IntTensor<B>),
    /// The statistics that normalised each channel, as `[1, channels, 1]`.
    Normalized {
        mean: FloatTensor<B>,
        /// 1 / √(variance + ε)
        inverse: FloatTensor<B>,
        /// Whether the statistics are those of the values.
        is_own: bool,
    },
    /// The factor of each element after dropout.
    Mask(FloatTensor<B>),
}

/// Output of a normalisation by the statistics of its values.
pub(super) struct Normalized<B: Backend> {
    pub(super) output: FloatTensor<B>,
    pub(super) kept: Kept<B>,
    /// Mean and population variance of each channel.
    pub(super) moments: [FloatTensor<B>; 2],
}

/// `[values before the channels, channels, values behind them]`
fn planes(shape: &[usize]) -> [usize; 3] {
    [shape[0], shape[1], shape[2..].iter().product()]
}

fn per_channel<B: Backend>(tensor: &FloatTensor<B>) -> FloatTensor<B> {
    let channels = dims::<B>(tensor).iter().product();
    reshape::<B>(tensor.clone(), &[1, channels, 1])
}

fn inverse_deviation<B: Backend>(variance: FloatTensor<B>, epsilon: f32) -> FloatTensor<B> {
    B::float_recip(B::float_sqrt(B::float_add_scalar(variance, f64::from(epsilon).into())))
}

/// Normalises the first input by the statistics of its channels. The next two are scale and bias.
pub(super) fn normalize<B: Kernels>(inputs: &[FloatTensor<B>], epsilon: f32) -> Normalized<B> {
    let shape = dims::<B>(&inputs[0]);
    let [outer, channels, inner] = planes(&shape);
    let values = reshape::<B>(inputs[0].clone(), &[outer, channels, inner]);
    let [mean, variance] = B::channel_moments(values.clone());
    let inverse = inverse_deviation::<B>(variance.clone(), epsilon);
    let factor = B::float_mul(per_channel::<B>(&inputs[1]), inverse.clone());
    let output = B::normalized(values, [mean.clone(), factor, per_channel::<B>(&inputs[2])]);
    Normalized {
        output: reshape::<B>(output, &shape),
        kept: Kept::Normalized { mean: mean.clone(), inverse, is_own: true },
        moments: [mean, variance],
    }
}

/// Normalises the first input by running statistics, the last two inputs.
pub(super) fn by_running_statistics<B: Kernels>(
    inputs: &[FloatTensor<B>],
    epsilon: f32,
) -> (FloatTensor<B>, Kept<B>) {
    let shape = dims::<B>(&inputs[0]);
    let values = reshape::<B>(inputs[0].clone(), &planes(&shape));
    let mean = per_channel::<B>(&inputs[3]);
    let inverse = inverse_deviation::<B>(per_channel::<B>(&inputs[4]), epsilon);
    let factor = B::float_mul(per_channel::<B>(&inputs[1]), inverse.clone());
    let output = B::normalized(values, [mean.clone(), factor, per_channel::<B>(&inputs[2])]);
    (reshape::<B>(output, &shape), Kept::Normalized { mean, inverse, is_own: false })
}

/// The gradients of a normalisation's inputs. With own statistics, each value also moves these.
pub(super) fn denormalize<B: Kernels>(
    step: &Step<'_, B>,
    grad: FloatTensor<B>,
) -> Vec<Option<FloatTensor<B>>> {
    let Some(Kept::Normalized { mean, inverse, is_own }) = step.kept else { return vec![None; 5] };
    let shape = dims::<B>(&step.inputs[0]);
    let [outer, channels, inner] = planes(&shape);
    let grad = reshape::<B>(grad, &[outer, channels, inner]);
    let values = reshape::<B>(step.inputs[0].clone(), &[outer, channels, inner]);
    let by = [mean.clone(), inverse.clone()];
    let [of_scale, of_bias] = B::normalized_sums(values.clone(), grad.clone(), by);
    let of_input = step.needs_gradient[0].then(|| {
        let factor = B::float_mul(per_channel::<B>(&step.inputs[1]), inverse.clone());
        let of_input = if *is_own {
            let share = |sum: &FloatTensor<B>| {
                B::float_mul_scalar(sum.clone(), (1.0 / (outer * inner) as f64).into())
            };
            let by = [mean.clone(), inverse.clone(), share(&of_scale), share(&of_bias), factor];
            B::normalized_backward(values, grad, by)
        } else {
            B::float_mul(grad, factor)
        };
        reshape::<B>(of_input, &shape)
    });
    let flat = |tensor| Some(reshape::<B>(tensor, &[channels]));
    vec![of_input, flat(of_scale), flat(of_bias), None, None]
}

/// The factors of `count` elements: 0, or 1 / (1 − ratio). They depend on the key, the node's place `index` among the
/// dropouts and its seed alone, so that they are equal on every worker and device, and when a step is repeated.
pub(super) fn mask<E: Element>(key: ShardKey, index: usize, dropout: &Dropout, count: usize) -> Vec<E> {
    let mut digest = Sha256::new();
    digest.update(b"millrace dropout 1");
    let seed = dropout.seed.map_or([0; 2], |seed| [1, seed as u64]);
    for word in [key.seed, key.step, key.shard, index as u64].into_iter().chain(seed) {
        digest.update(word.to_le_bytes());
    }
    let mut random = ChaCha8Rng::from_seed(digest.finalize().into());
    let ratio = f64::from(dropout.ratio);
    let dropped_below = (ratio * (1u64 << 32) as f64) as u64;
    let (zero, kept): (E, E) = (0.0f32.elem(), (1.0 / (1.0 - ratio)).elem());
    (0..count).map(|_| if u64::from(random.next_u32()) < dropped_below { zero } else { kept }).collect()
}
