//! The values of one feature, in the bins that its training has.

use millrace_bundle::Feature;

use super::FeatureDrift;

/// What an empty bin counts as, as a logarithm needs: one in ten thousand.
const SHARE_MIN: f64 = 1e-4;

/// Counts of a feature's values by bin; older ones count less.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Histogram {
    bins: Vec<f64>,
    /// Of the finite values.
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

    /// Halves the weight of all that was counted.
    pub(super) fn fade(&mut self) {
        self.bins.iter_mut().for_each(|count| *count /= 2.0);
        self.sum /= 2.0;
        self.finite /= 2.0;
    }

    /// How far the values are from the training; none where nothing was counted.
    ///
    /// The population stability index is the sum over the bins of (a − e) · ln(a / e), with the shares a of the
    /// values here and e of those in training: Kullback and Leibler's divergences in both directions.
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
