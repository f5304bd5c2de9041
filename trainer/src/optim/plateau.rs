//! The `plateau` schedule: a learning rate that falls when the validation loss no longer does.

use serde::{Deserialize, Serialize};

/// Smallest change of the learning rate that takes place, as PyTorch's `eps`.
const CHANGE_MIN: f64 = 1e-8;

/// Settings of the `plateau` schedule; the defaults are those of PyTorch's `ReduceLROnPlateau`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Plateau {
    /// Factor of the rate, above 0 and below 1; 0.1 when absent.
    pub factor: f64,
    /// Evaluations in a row without a lower loss that leave the rate as it is; 10 when absent.
    pub patience: u64,
    /// Share by which a loss has to be lower than the lowest one, 0 to below 1; 0.0001 when absent.
    pub threshold: f64,
    /// Evaluations after a change of the rate that do not count as ones without a lower loss; 0 when absent.
    pub cooldown: u64,
    /// The lowest rate, 0 or more; 0 when absent.
    pub min: f64,
}

impl Default for Plateau {
    fn default() -> Plateau {
        Plateau { factor: 0.1, patience: 10, threshold: 1e-4, cooldown: 0, min: 0.0 }
    }
}

impl Plateau {
    /// The learning rate after the evaluations with these losses, a function of them and the base rate alone.
    pub fn rate(&self, base: f64, losses: impl IntoIterator<Item = f64>) -> f64 {
        let (mut rate, mut lowest) = (base, f64::INFINITY);
        let (mut worse, mut cooldown) = (0u64, 0u64);
        for loss in losses {
            if loss < lowest * (1.0 - self.threshold) {
                (lowest, worse) = (loss, 0);
            } else {
                worse += 1;
            }
            if cooldown > 0 {
                (cooldown, worse) = (cooldown - 1, 0);
            }
            if worse > self.patience {
                let reduced = (rate * self.factor).max(self.min);
                if rate - reduced > CHANGE_MIN {
                    rate = reduced;
                }
                (cooldown, worse) = (self.cooldown, 0);
            }
        }
        rate
    }
}
