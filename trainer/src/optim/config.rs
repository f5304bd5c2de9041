//! Optimizer settings, as a job file states them.

use serde::{Deserialize, Serialize};

use super::{OptimError, Plateau};

/// Bounds of numbers that are used as f32.
const ABOVE_0: &str = "1e-45 to 3e38";
const NOT_BELOW_0: &str = "0, or 1e-45 to 3e38";

/// Learning rate over steps, as a factor of the base rate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Schedule {
    /// The base rate at every step.
    // Not a unit variant: Serde refuses no unknown keys beside the tag of one.
    Constant {},
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
    /// The rate times `gamma` after each `every_steps` steps.
    Step {
        /// Steps with one rate, at least 1.
        every_steps: u64,
        /// Factor of the rate, above 0 and at most 1.
        #[serde(default = "default_gamma")]
        gamma: f64,
    },
    /// The rate times `gamma` after each step.
    Exponential {
        /// Factor of the rate, above 0 and at most 1.
        gamma: f64,
    },
    /// Linear warm-up from 0 to the base rate, which then holds.
    Linear {
        /// Steps of the warm-up, at least 1.
        warmup_steps: u64,
    },
    /// Half a cosine up to the base rate, then half a cosine down to far below the first rate, which holds from
    /// `total_steps` on. The momentum stays.
    OneCycle {
        /// Step at which the cycle ends, at least 2.
        total_steps: u64,
        /// Share of the steps in which the rate rises, 0 to below 1.
        #[serde(default = "default_rise")]
        rise: f64,
        /// The base rate over the first rate, at least 1.
        #[serde(default = "default_start_divisor")]
        start_divisor: f64,
        /// The first rate over the last rate, at least 1.
        #[serde(default = "default_end_divisor")]
        end_divisor: f64,
    },
    /// The base rate, reduced each time that the validation loss has stopped falling; needs `[validation]`.
    Plateau(Plateau),
}

impl Default for Schedule {
    fn default() -> Schedule {
        Schedule::Constant {}
    }
}

fn default_gamma() -> f64 {
    0.1
}

fn default_rise() -> f64 {
    0.3
}

fn default_start_divisor() -> f64 {
    25.0
}

fn default_end_divisor() -> f64 {
    1e4
}

/// Half a cosine from `start` to `end` as `progress` goes from 0 to 1.
fn half_cosine(start: f64, end: f64, progress: f64) -> f64 {
    end + (start - end) * 0.5 * (1.0 + (std::f64::consts::PI * progress).cos())
}

impl Schedule {
    /// The factor of the base rate at `step`, counted from 0; 1 for [`Schedule::Plateau`], see
    /// [`Plateau::rate`].
    pub fn factor(&self, step: u64) -> f64 {
        match *self {
            // The plateau's rate follows from evaluations, not from the step.
            Schedule::Constant {} | Schedule::Plateau(_) => 1.0,
            Schedule::Cosine { warmup_steps, total_steps, floor } => {
                if step < warmup_steps {
                    return (step + 1) as f64 / warmup_steps as f64;
                }
                let span = total_steps.saturating_sub(warmup_steps).max(1);
                let progress = ((step - warmup_steps) as f64 / span as f64).min(1.0);
                floor + (1.0 - floor) * 0.5 * (1.0 + (std::f64::consts::PI * progress).cos())
            }
            Schedule::Step { every_steps, gamma } => {
                gamma.powi(i32::try_from(step / every_steps.max(1)).unwrap_or(i32::MAX))
            }
            Schedule::Exponential { gamma } => gamma.powi(i32::try_from(step).unwrap_or(i32::MAX)),
            Schedule::Linear { warmup_steps } if step < warmup_steps => {
                (step + 1) as f64 / warmup_steps as f64
            }
            Schedule::Linear { .. } => 1.0,
            Schedule::OneCycle { total_steps, rise, start_divisor, end_divisor } => {
                let first = 1.0 / start_divisor;
                let last = first / end_divisor;
                let (top, end) = (rise * total_steps as f64 - 1.0, total_steps as f64 - 1.0);
                let step = (step as f64).min(end);
                if step <= top {
                    // Without steps to rise, the rate begins at its top.
                    half_cosine(first, 1.0, if top > 0.0 { step / top } else { 1.0 })
                } else {
                    let top = top.max(0.0);
                    half_cosine(1.0, last, (step - top) / (end - top).max(f64::MIN_POSITIVE))
                }
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
            schedule: Schedule::Constant {},
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
            schedule: Schedule::Constant {},
        }
    }
}

/// Adam with L2 regularization (Kingma and Ba, 2015), as PyTorch computes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdamConfig {
    /// Base learning rate, above 0.
    pub learning_rate: f64,
    /// Decay rates of the first and second moment, each 0 to below 1.
    pub betas: [f64; 2],
    /// Added to the denominator, above 0.
    pub epsilon: f64,
    /// L2 penalty added to the gradient, 0 or more.
    pub weight_decay: f64,
    /// Scales the mean gradient down to this global L2 norm when it is longer.
    pub clip_norm: Option<f64>,
    /// Learning rate over steps.
    pub schedule: Schedule,
}

impl Default for AdamConfig {
    fn default() -> Self {
        AdamConfig {
            learning_rate: 0.001,
            betas: [0.9, 0.999],
            epsilon: 1e-8,
            weight_decay: 0.0,
            clip_norm: None,
            schedule: Schedule::Constant {},
        }
    }
}

/// AdaGrad (Duchi, Hazan and Singer, 2011), as PyTorch computes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdaGradConfig {
    /// Base learning rate, above 0.
    pub learning_rate: f64,
    /// The rate of step n is divided by 1 + n · `learning_rate_decay`, 0 or more.
    pub learning_rate_decay: f64,
    /// First value of the sums of squared gradients, 0 or more.
    pub initial_accumulator: f64,
    /// Added to the denominator, above 0.
    pub epsilon: f64,
    /// L2 penalty added to the gradient, 0 or more.
    pub weight_decay: f64,
    /// Scales the mean gradient down to this global L2 norm when it is longer.
    pub clip_norm: Option<f64>,
    /// Learning rate over steps.
    pub schedule: Schedule,
}

impl Default for AdaGradConfig {
    fn default() -> Self {
        AdaGradConfig {
            learning_rate: 0.01,
            learning_rate_decay: 0.0,
            initial_accumulator: 0.0,
            epsilon: 1e-10,
            weight_decay: 0.0,
            clip_norm: None,
            schedule: Schedule::Constant {},
        }
    }
}

/// RMSprop (Hinton, 2012), as PyTorch computes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RmsPropConfig {
    /// Base learning rate, above 0.
    pub learning_rate: f64,
    /// Decay rate of the mean squared gradient, 0 to below 1.
    pub alpha: f64,
    /// Momentum, 0 to below 1; 0 keeps no state for it.
    pub momentum: f64,
    /// Divides by an estimate of the variance instead of the mean square.
    pub centered: bool,
    /// Added to the denominator, above 0.
    pub epsilon: f64,
    /// L2 penalty added to the gradient, 0 or more.
    pub weight_decay: f64,
    /// Scales the mean gradient down to this global L2 norm when it is longer.
    pub clip_norm: Option<f64>,
    /// Learning rate over steps.
    pub schedule: Schedule,
}

impl Default for RmsPropConfig {
    fn default() -> Self {
        RmsPropConfig {
            learning_rate: 0.01,
            alpha: 0.99,
            momentum: 0.0,
            centered: false,
            epsilon: 1e-8,
            weight_decay: 0.0,
            clip_norm: None,
            schedule: Schedule::Constant {},
        }
    }
}

/// The `[optimizer]` table of a job file, selected by `kind`: `"sgd"`, `"adamw"`, `"adam"`, `"adagrad"` or
/// `"rmsprop"`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum OptimizerConfig {
    /// Stochastic gradient descent.
    Sgd(SgdConfig),
    /// Adam with decoupled weight decay.
    AdamW(AdamWConfig),
    /// Adam with L2 regularization.
    Adam(AdamConfig),
    /// AdaGrad.
    AdaGrad(AdaGradConfig),
    /// RMSprop.
    RmsProp(RmsPropConfig),
}

/// The settings that all optimizers have.
#[derive(Debug, Clone, Copy)]
pub(super) struct Common {
    pub(super) learning_rate: f64,
    pub(super) weight_decay: f64,
    pub(super) clip_norm: Option<f64>,
    pub(super) schedule: Schedule,
}

impl OptimizerConfig {
    /// Checks the bounds of the settings.
    ///
    /// # Errors
    /// [`OptimError::Setting`]
    pub(crate) fn check(&self) -> Result<(), OptimError> {
        validate(self)
    }

    /// Whether the learning rate follows the validation loss.
    pub(crate) fn needs_validation(&self) -> bool {
        matches!(self.common().schedule, Schedule::Plateau(_))
    }

    pub(super) fn common(&self) -> Common {
        macro_rules! common {
            ($config:expr) => {
                Common {
                    learning_rate: $config.learning_rate,
                    weight_decay: $config.weight_decay,
                    clip_norm: $config.clip_norm,
                    schedule: $config.schedule,
                }
            };
        }
        match self {
            OptimizerConfig::Sgd(config) => common!(config),
            OptimizerConfig::AdamW(config) => common!(config),
            OptimizerConfig::Adam(config) => common!(config),
            OptimizerConfig::AdaGrad(config) => common!(config),
            OptimizerConfig::RmsProp(config) => common!(config),
        }
    }
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        OptimizerConfig::AdamW(AdamWConfig::default())
    }
}

/// Whether a number is above 0 and finite as f32.
fn is_above_0(value: f64) -> bool {
    let single = value as f32;
    single > 0.0 && single.is_finite()
}

/// Rejects settings outside their bounds. Steps use them as f32, in which tiny ones are 0 and huge ones infinite.
pub(super) fn validate(config: &OptimizerConfig) -> Result<(), OptimError> {
    let check = |setting, value: f64, expected, ok: bool| {
        if ok && value.is_finite() { Ok(()) } else { Err(OptimError::Setting { setting, value, expected }) }
    };
    let above_0 = |setting, value: f64| check(setting, value, ABOVE_0, is_above_0(value));
    let not_below_0 =
        |setting, value: f64| check(setting, value, NOT_BELOW_0, value == 0.0 || is_above_0(value));
    let below_one = |setting, value: f64| {
        check(setting, value, "0 to 0.9999999", value >= 0.0 && (0.0..1.0).contains(&(value as f32)))
    };
    match config {
        OptimizerConfig::Sgd(c) => {
            below_one("momentum", c.momentum)?;
            check(
                "nesterov",
                f64::from(u8::from(c.nesterov)),
                "false without momentum",
                !c.nesterov || is_above_0(c.momentum),
            )?;
        }
        OptimizerConfig::AdamW(AdamWConfig { betas, epsilon, .. })
        | OptimizerConfig::Adam(AdamConfig { betas, epsilon, .. }) => {
            for beta in *betas {
                below_one("betas", beta)?;
            }
            above_0("epsilon", *epsilon)?;
        }
        OptimizerConfig::AdaGrad(c) => {
            check("learning_rate_decay", c.learning_rate_decay, "0 or more", c.learning_rate_decay >= 0.0)?;
            not_below_0("initial_accumulator", c.initial_accumulator)?;
            above_0("epsilon", c.epsilon)?;
        }
        OptimizerConfig::RmsProp(c) => {
            below_one("alpha", c.alpha)?;
            below_one("momentum", c.momentum)?;
            above_0("epsilon", c.epsilon)?;
        }
    }
    let Common { learning_rate, weight_decay, clip_norm, schedule } = config.common();
    above_0("learning_rate", learning_rate)?;
    not_below_0("weight_decay", weight_decay)?;
    if let Some(norm) = clip_norm {
        above_0("clip_norm", norm)?;
    }
    let at_least =
        |setting, value: u64, least: u64, expected| check(setting, value as f64, expected, value >= least);
    let factor = |value: f64| check("schedule.gamma", value, "1e-45 to 1", is_above_0(value) && value <= 1.0);
    match schedule {
        Schedule::Constant {} => {}
        Schedule::Cosine { warmup_steps, total_steps, floor } => {
            check("schedule.floor", floor, "0 to 1", (0.0..=1.0).contains(&floor))?;
            check(
                "schedule.total_steps",
                total_steps as f64,
                "more than schedule.warmup_steps",
                total_steps > warmup_steps,
            )?;
        }
        Schedule::Step { every_steps, gamma } => {
            at_least("schedule.every_steps", every_steps, 1, "at least 1")?;
            factor(gamma)?;
        }
        Schedule::Exponential { gamma } => factor(gamma)?,
        Schedule::Plateau(Plateau { factor, patience: _, threshold, cooldown: _, min }) => {
            check("schedule.factor", factor, "above 0 and below 1", factor > 0.0 && factor < 1.0)?;
            below_one("schedule.threshold", threshold)?;
            let expected = "0 to below learning_rate";
            check("schedule.min", min, expected, (0.0..learning_rate).contains(&min))?;
        }
        Schedule::Linear { warmup_steps } => {
            at_least("schedule.warmup_steps", warmup_steps, 1, "at least 1")?;
        }
        Schedule::OneCycle { total_steps, rise, start_divisor, end_divisor } => {
            at_least("schedule.total_steps", total_steps, 2, "at least 2")?;
            below_one("schedule.rise", rise)?;
            for (setting, divisor) in
                [("schedule.start_divisor", start_divisor), ("schedule.end_divisor", end_divisor)]
            {
                check(setting, divisor, "1 to 3e38", divisor >= 1.0 && is_above_0(divisor))?;
            }
        }
    }
    Ok(())
}
