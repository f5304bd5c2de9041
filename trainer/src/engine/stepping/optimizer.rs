//! The arithmetic of one step of each optimizer, on tensors: that of the host's loops (`optim/steps.rs`).

use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

use super::super::resident::{Moments, Rule};

fn times<B: Backend>(tensor: &FloatTensor<B>, factor: f32) -> FloatTensor<B> {
    B::float_mul_scalar(tensor.clone(), f64::from(factor).into())
}

/// `shares[0] · old + shares[1] · new`
fn mixed<B: Backend>(old: &FloatTensor<B>, new: &FloatTensor<B>, shares: [f32; 2]) -> FloatTensor<B> {
    B::float_add(times::<B>(old, shares[0]), times::<B>(new, shares[1]))
}

/// `shares[0] · old + shares[1] · new · new`
fn mixed_square<B: Backend>(old: &FloatTensor<B>, new: &FloatTensor<B>, shares: [f32; 2]) -> FloatTensor<B> {
    let square = B::float_mul(times::<B>(new, shares[1]), new.clone());
    B::float_add(times::<B>(old, shares[0]), square)
}

/// The gradient with the slope of the weight decay.
fn decayed<B: Backend>(grad: FloatTensor<B>, weight: &FloatTensor<B>, decay: f32) -> FloatTensor<B> {
    match decay == 0.0 {
        true => grad,
        false => B::float_add(grad, times::<B>(weight, decay)),
    }
}

/// `√square + epsilon`
fn root<B: Backend>(square: FloatTensor<B>, epsilon: f32) -> FloatTensor<B> {
    B::float_add_scalar(B::float_sqrt(square), f64::from(epsilon).into())
}

/// The new moments, and what the weight moves by.
fn adam<B: Backend>(
    constants: &Moments,
    grad: &FloatTensor<B>,
    [first, second]: [FloatTensor<B>; 2],
) -> ([FloatTensor<B>; 2], FloatTensor<B>) {
    let first = mixed::<B>(&first, grad, constants.first);
    let second = mixed_square::<B>(&second, grad, constants.second);
    let spread = times::<B>(&B::float_sqrt(second.clone()), constants.root_correction);
    let spread = B::float_add_scalar(spread, f64::from(constants.epsilon).into());
    let change = B::float_div(times::<B>(&first, constants.step_size), spread);
    ([first, second], change)
}

/// The new weight and the new slots of a parameter, for its mean gradient. None if the rule has another number of slots.
pub(super) fn moved<B: Backend>(
    rule: &Rule,
    weight: FloatTensor<B>,
    grad: FloatTensor<B>,
    slots: Vec<FloatTensor<B>>,
) -> Option<(FloatTensor<B>, Vec<FloatTensor<B>>)> {
    let mut slots = slots.into_iter();
    let (change, kept) = match *rule {
        Rule::Sgd { rate, decay, momentum, nesterov } => {
            let grad = decayed::<B>(grad, &weight, decay);
            match momentum {
                None => (times::<B>(&grad, rate), vec![]),
                Some(momentum) => {
                    let velocity = B::float_add(times::<B>(&slots.next()?, momentum), grad.clone());
                    let direction = match nesterov {
                        true => B::float_add(grad, times::<B>(&velocity, momentum)),
                        false => velocity.clone(),
                    };
                    (times::<B>(&direction, rate), vec![velocity])
                }
            }
        }
        Rule::Adam { moments, decay } => {
            let grad = decayed::<B>(grad, &weight, decay);
            let (kept, change) = adam::<B>(&moments, &grad, [slots.next()?, slots.next()?]);
            (change, kept.into())
        }
        Rule::AdamW { moments, keep } => {
            let (kept, change) = adam::<B>(&moments, &grad, [slots.next()?, slots.next()?]);
            let weight = B::float_sub(times::<B>(&weight, keep), change);
            return slots.next().is_none().then_some((weight, kept.into()));
        }
        Rule::AdaGrad { rate, decay, epsilon } => {
            let grad = decayed::<B>(grad, &weight, decay);
            let squares = mixed_square::<B>(&slots.next()?, &grad, [1.0, 1.0]);
            let change = B::float_div(times::<B>(&grad, rate), root::<B>(squares.clone(), epsilon));
            (change, vec![squares])
        }
        Rule::RmsProp { rate, decay, square, epsilon, centered, momentum } => {
            let grad = decayed::<B>(grad, &weight, decay);
            let mean_square = mixed_square::<B>(&slots.next()?, &grad, square);
            let mut kept = vec![mean_square.clone()];
            let mut variance = mean_square;
            if centered {
                let mean = mixed::<B>(&slots.next()?, &grad, square);
                let apart = B::float_sub(variance, B::float_mul(mean.clone(), mean.clone()));
                // Rounding may bring an estimate of about 0 below it.
                variance = B::float_clamp_min(apart, 0.0.into());
                kept.push(mean);
            }
            let mut direction = B::float_div(grad, root::<B>(variance, epsilon));
            if let Some(momentum) = momentum {
                direction = B::float_add(times::<B>(&slots.next()?, momentum), direction);
                kept.push(direction.clone());
            }
            (times::<B>(&direction, rate), kept)
        }
    };
    slots.next().is_none().then_some((B::float_sub(weight, change), kept))
}

/// The value moved by `share` towards the weight, as `torch.lerp`: it keeps the end that is nearer.
pub(super) fn lerp<B: Backend>(value: FloatTensor<B>, weight: FloatTensor<B>, share: f32) -> FloatTensor<B> {
    let distance = B::float_sub(weight.clone(), value.clone());
    match share < 0.5 {
        true => B::float_add(value, times::<B>(&distance, share)),
        false => B::float_sub(weight, times::<B>(&distance, 1.0 - share)),
    }
}
