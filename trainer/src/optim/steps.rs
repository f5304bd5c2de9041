//! The arithmetic of one step of each optimizer, over one stretch of the flat vectors.
//!
//! As PyTorch computes it, in f32; constants are computed in f64 and rounded once. For a device, `rule` gives them to the
//! arithmetic on tensors (`engine/stepping/optimizer.rs`).

use super::config::{AdaGradConfig, AdamConfig, AdamWConfig, OptimizerConfig, RmsPropConfig, SgdConfig};
use crate::engine::{Moments, Rule};

/// What all elements of a step share.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    /// The learning rate.
    pub(super) rate: f64,
    /// Factor of the gradient.
    pub(super) clip: f32,
    /// Steps applied before this one.
    pub(super) step: u64,
    /// The weight decay of the stretch.
    pub(super) decay: f64,
}

pub(super) fn sgd(
    config: &SgdConfig,
    step: Step,
    weights: &mut [f32],
    grad: &[f32],
    slots: &mut [&mut [f32]],
) {
    let (rate, decay, momentum) = (step.rate as f32, step.decay as f32, config.momentum as f32);
    let clip = step.clip;
    match slots.first_mut() {
        None => {
            for (w, g) in weights.iter_mut().zip(grad) {
                *w -= rate * (g * clip + decay * *w);
            }
        }
        Some(velocity) => {
            for ((w, g), v) in weights.iter_mut().zip(grad).zip(velocity.iter_mut()) {
                let g = g * clip + decay * *w;
                *v = momentum * *v + g;
                let direction = if config.nesterov { g + momentum * *v } else { *v };
                *w -= rate * direction;
            }
        }
    }
}

/// Step size and factor of the second moment's root that correct the moments' bias towards 0.
fn corrections(betas: [f64; 2], step: Step) -> (f32, f32) {
    let power = i32::try_from(step.step + 1).unwrap_or(i32::MAX);
    let step_size = (step.rate / (1.0 - betas[0].powi(power))) as f32;
    let root_correction = (1.0 / (1.0 - betas[1].powi(power)).sqrt()) as f32;
    (step_size, root_correction)
}

pub(super) fn adamw(
    config: &AdamWConfig,
    step: Step,
    weights: &mut [f32],
    grad: &[f32],
    slots: &mut [&mut [f32]],
) {
    let [first, second] = slots else { return };
    let [b1, b2] = config.betas;
    let (step_size, root_correction) = corrections(config.betas, step);
    let keep = (1.0 - step.rate * step.decay) as f32;
    let epsilon = config.epsilon as f32;
    let (a1, a2) = (b1 as f32, b2 as f32);
    let (c1, c2) = ((1.0 - b1) as f32, (1.0 - b2) as f32);
    for (((w, g), m), v) in weights.iter_mut().zip(grad).zip(first.iter_mut()).zip(second.iter_mut()) {
        let g = g * step.clip;
        *m = a1 * *m + c1 * g;
        *v = a2 * *v + c2 * g * g;
        *w = *w * keep - step_size * *m / (v.sqrt() * root_correction + epsilon);
    }
}

pub(super) fn adam(
    config: &AdamConfig,
    step: Step,
    weights: &mut [f32],
    grad: &[f32],
    slots: &mut [&mut [f32]],
) {
    let [first, second] = slots else { return };
    let [b1, b2] = config.betas;
    let (step_size, root_correction) = corrections(config.betas, step);
    let (epsilon, decay) = (config.epsilon as f32, step.decay as f32);
    let (a1, a2) = (b1 as f32, b2 as f32);
    let (c1, c2) = ((1.0 - b1) as f32, (1.0 - b2) as f32);
    for (((w, g), m), v) in weights.iter_mut().zip(grad).zip(first.iter_mut()).zip(second.iter_mut()) {
        let g = g * step.clip + decay * *w;
        *m = a1 * *m + c1 * g;
        *v = a2 * *v + c2 * g * g;
        *w -= step_size * *m / (v.sqrt() * root_correction + epsilon);
    }
}

pub(super) fn adagrad(
    config: &AdaGradConfig,
    step: Step,
    weights: &mut [f32],
    grad: &[f32],
    slots: &mut [&mut [f32]],
) {
    let [squares] = slots else { return };
    let rate = (step.rate / (1.0 + step.step as f64 * config.learning_rate_decay)) as f32;
    let (epsilon, decay) = (config.epsilon as f32, step.decay as f32);
    for ((w, g), sum) in weights.iter_mut().zip(grad).zip(squares.iter_mut()) {
        let g = g * step.clip + decay * *w;
        *sum += g * g;
        *w -= rate * g / (sum.sqrt() + epsilon);
    }
}

pub(super) fn rmsprop(
    config: &RmsPropConfig,
    step: Step,
    weights: &mut [f32],
    grad: &[f32],
    slots: &mut [&mut [f32]],
) {
    let Some((square, others)) = slots.split_first_mut() else { return };
    let (mut mean, mut velocity) = match (config.centered, others) {
        (true, [mean, rest @ ..]) => (Some(mean), rest.first_mut()),
        (_, others) => (None, others.first_mut()),
    };
    let (alpha, rest) = (config.alpha as f32, (1.0 - config.alpha) as f32);
    let (rate, decay, momentum) = (step.rate as f32, step.decay as f32, config.momentum as f32);
    let epsilon = config.epsilon as f32;
    for (index, ((w, g), square)) in weights.iter_mut().zip(grad).zip(square.iter_mut()).enumerate() {
        let g = g * step.clip + decay * *w;
        *square = alpha * *square + rest * g * g;
        let variance = match &mut mean {
            Some(mean) => {
                let mean = &mut mean[index];
                *mean = alpha * *mean + rest * g;
                // Rounding may bring an estimate of about 0 below it.
                (*square - *mean * *mean).max(0.0)
            }
            None => *square,
        };
        let direction = g / (variance.sqrt() + epsilon);
        let direction = match &mut velocity {
            Some(velocity) => {
                let velocity = &mut velocity[index];
                *velocity = momentum * *velocity + direction;
                *velocity
            }
            None => direction,
        };
        *w -= rate * direction;
    }
}

/// The step of the functions above as constants, for a device: with a learning rate, a weight decay, and the steps
/// applied before.
pub(super) fn rule(config: &OptimizerConfig, (rate, decay, step): (f64, f64, u64)) -> Rule {
    let shared = Step { rate, clip: 1.0, step, decay };
    let moments = |betas: [f64; 2], epsilon: f64| {
        let (step_size, root_correction) = corrections(betas, shared);
        let share = |beta: f64| [beta as f32, (1.0 - beta) as f32];
        let [first, second] = betas.map(share);
        Moments { first, second, step_size, root_correction, epsilon: epsilon as f32 }
    };
    match config {
        OptimizerConfig::Sgd(config) => Rule::Sgd {
            rate: rate as f32,
            decay: decay as f32,
            momentum: (config.momentum != 0.0).then_some(config.momentum as f32),
            nesterov: config.nesterov,
        },
        OptimizerConfig::AdamW(config) => {
            Rule::AdamW { moments: moments(config.betas, config.epsilon), keep: (1.0 - rate * decay) as f32 }
        }
        OptimizerConfig::Adam(config) => {
            Rule::Adam { moments: moments(config.betas, config.epsilon), decay: decay as f32 }
        }
        OptimizerConfig::AdaGrad(config) => Rule::AdaGrad {
            rate: (rate / (1.0 + step as f64 * config.learning_rate_decay)) as f32,
            decay: decay as f32,
            epsilon: config.epsilon as f32,
        },
        OptimizerConfig::RmsProp(config) => Rule::RmsProp {
            rate: rate as f32,
            decay: decay as f32,
            square: [config.alpha as f32, (1.0 - config.alpha) as f32],
            epsilon: config.epsilon as f32,
            centered: config.centered,
            momentum: (config.momentum > 0.0).then_some(config.momentum as f32),
        },
    }
}
