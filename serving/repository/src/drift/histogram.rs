//! Histogram of one feature's values, in the bins of its training.

use millrace_bundle::Feature;

use super::FeatureDrift;

/// Share assumed for an empty bin, as the logarithm needs one: 1 in 10,000.
const SHARE_MIN: f64 = 1e-4;

/// Counts of a feature's values by bin; older values have less weight.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Histogram {
    bins: Vec<f64>,
    /// Sum of the finite values.
    sum: f64,
    finite: f64,
}

impl Histogram {
    pub(super) fn new(feature: &Feature) -> Histogram {
        Histogram { bins: vec![0.0; feature.bins()], sum: 0.0, finite: 0.0 }
    }

    /// Counts a value.
    pub(super) fn add(&mut self, feature: &Feature, value: f64) {
        self.bins[feature.bin(value)] += 1.0;
        if value.is_finite() {
            self.sum += value;
            self.finite += 1.0;
        }
    }

    /// Halves the weight of all values so far.
    pub(super) fn fade(&mut self) {
        self.bins.iter_mut().for_each(|count| *count /= 2.0);
        self.sum /= 2.0;
        self.finite /= 2.0;
    }

    /// The drift from the training; `None` before the first value.
    ///
    /// The population stability index is the sum over the bins of (a − e) · ln(a / e), where a is the share
    /// of the values here and e that of the training. It equals the Kullback–Leibler divergences in both
    /// directions.
    pub(super) fn drift(&self, feature: &Feature) -> Option<FeatureDrift> {
        let total: f64 = self.bins.iter().sum();
        if total <= 0.0 {
            return None;
        }
        let psi = self.bins.iter().enumerate().map(|(bin, count)| {
            let (actual, expected) = ((count / total).max(SHARE_MIN), feature.share(bin).max(SHARE_MIN));
            (actual - expected) * (actual / expected).ln()
        });
        let outside = (self.bins[0] + self.bins[self.bins.len() - 1]) / total;
        let deviation = feature.variance.sqrt();
        let shift = (self.sum / self.finite - feature.mean) / deviation;
        let mean_shift = (deviation > 0.0 && shift.is_finite()).then_some(shift);
        Some(FeatureDrift { psi: psi.sum(), mean_shift, outside })
    }
}
