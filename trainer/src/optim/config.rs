//! Optimizer settings, as a job file states them.

use serde::{Deserialize, Serialize};

use super::OptimError;

/// Learning rate over steps, as a factor of the base rate.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Schedule {
    /// The base rate at every step.
    #[default]
    Constant,
    /// Linear warm-up from 0 to the base rate, then half a cosine down to `floor` times the base rate,
    /// which holds from `total_steps` on.
    Cosine {
        /// Steps of linear warm-up.
        #[serde(default)]
        warmup_steps: u64,
        /// Step at which the floor is reached; more than `warmup_steps`.
        total_steps: u64,
        /// Final factor, 0 to 1.
        #[serde(default)]
        floor: f64,
    },
}

impl Schedule {
    /// The factor of the base rate at `step`, counted from 0.
    pub fn factor(&self, step: u64) -> f64 {
        match *self {
            Schedule::Constant => 1.0,
            Schedule::Cosine { warmup_steps, total_steps, floor } => {
                if step < warmup_steps {
                    return (step + 1) as f64 / warmup_steps as f64;
                }
                let span = total_steps.saturating_sub(warmup_steps).max(1);
                let progress = ((step - warmup_steps) as f64 / span as f64).min(1.0);
                floor + (1.0 - floor) * 0.5 * (1.0 + (std::f64::consts::PI * progress).cos())
            }
        }
    }
}

/// Stochastic gradient descent (momentum as in PyTorch: `v = m·v + g`, dampening 0).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SgdConfig {
    /// Base learning rate, above 0.
    pub learning_rate: f64,
    /// Momentum, 0 to below 1; 0 keeps no state.
    pub momentum: f64,
    /// Nesterov's look-ahead; needs momentum.
    pub nesterov: bool,
    /// L2 penalty added to the gradient, 0 or more.
    pub weight_decay: f64,
    /// Scales the mean gradient down to this global L2 norm when it is longer.
    pub clip_norm: Option<f64>,
    /// Learning rate over steps.
    pub schedule: Schedule,
}

impl Default for SgdConfig {
    fn default() -> Self {
        SgdConfig {
            learning_rate: 0.1,
            momentum: 0.9,
            nesterov: false,
            weight_decay: 0.0,
            clip_norm: None,
            schedule: Schedule::Constant,
        }
    }
}

/// Adam with decoupled weight decay (Loshchilov and Hutter, 2019).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdamWConfig {
    /// Base learning rate, above 0.
    pub learning_rate: f64,
    /// Decay rates of the first and second moment, each 0 to below 1.
    pub betas: [f64; 2],
    /// Added to the denominator, above 0.
    pub epsilon: f64,
    /// Decoupled weight decay, 0 or more.
    pub weight_decay: f64,
    /// Scales the mean gradient down to this global L2 norm when it is longer.
    pub clip_norm: Option<f64>,
    /// Learning rate over steps.
    pub schedule: Schedule,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        AdamWConfig {
            learning_rate: 0.003,
            betas: [0.9, 0.999],
            epsilon: 1e-8,
            weight_decay: 0.01,
            clip_norm: None,
            schedule: Schedule::Constant,
        }
    }
}

/// The `[optimizer]` table of a job file, selected by `kind = "sgd" | "adamw"`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum OptimizerConfig {
    /// Stochastic gradient descent.
    Sgd(SgdConfig),
    /// Adam with decoupled weight decay.
    AdamW(AdamWConfig),
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        OptimizerConfig::AdamW(AdamWConfig::default())
    }
}

/// Rejects settings outside their bounds.
pub(super) fn validate(config: &OptimizerConfig) -> Result<(), OptimError> {
    let check = |setting, value: f64, expected, ok: bool| {
        if ok && value.is_finite() { Ok(()) } else { Err(OptimError::Setting { setting, value, expected }) }
    };
    let (rate, decay, clip, schedule) = match config {
        OptimizerConfig::Sgd(c) => {
            check("momentum", c.momentum, "0 to below 1", (0.0..1.0).contains(&c.momentum))?;
            check(
                "nesterov",
                f64::from(u8::from(c.nesterov)),
                "false without momentum",
                !c.nesterov || c.momentum > 0.0,
            )?;
            (c.learning_rate, c.weight_decay, c.clip_norm, c.schedule)
        }
        OptimizerConfig::AdamW(c) => {
            for beta in c.betas {
                check("betas", beta, "0 to below 1", (0.0..1.0).contains(&beta))?;
            }
            check("epsilon", c.epsilon, "above 0", c.epsilon > 0.0)?;
            (c.learning_rate, c.weight_decay, c.clip_norm, c.schedule)
        }
    };
    check("learning_rate", rate, "above 0", rate > 0.0)?;
    check("weight_decay", decay, "0 or more", decay >= 0.0)?;
    if let Some(norm) = clip {
        check("clip_norm", norm, "above 0", norm > 0.0)?;
    }
    if let Schedule::Cosine { warmup_steps, total_steps, floor } = schedule {
        check("schedule.floor", floor, "0 to 1", (0.0..=1.0).contains(&floor))?;
        check(
            "schedule.total_steps",
            total_steps as f64,
            "more than schedule.warmup_steps",
            total_steps > warmup_steps,
        )?;
    }
    Ok(())
}
