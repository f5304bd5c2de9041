//! Drift detection: compares the inputs of a version with its training data. A fading histogram of some input
//! rows is set against the statistics in the version's bundle.
//!
//! The work is bounded: a fixed number of rows per second, each with one search among a few numbers per
//! feature, and no request waits for the histogram. A version without statistics costs one comparison.

mod histogram;

use std::borrow::Borrow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use millrace_bundle::{Datatype, Feature, Signature, Statistics};
use parking_lot::Mutex;

use histogram::Histogram;
use millrace_serving_core::config::Drift as Options;
use millrace_serving_core::config::ROWS_MIN;
use millrace_serving_core::tensor::{Data, Tensor};

/// Drift detector for the inputs of one version.
#[derive(Debug)]
pub struct Drift {
    features: Vec<ObservedFeature>,
    rows_per_second_max: u32,
    window_rows: u64,
    began: Instant,
    /// Upper half: seconds since `began`. Lower half: rows granted in that second.
    taken: AtomicU64,
    seen: Mutex<Observations>,
}

#[derive(Debug)]
struct ObservedFeature {
    feature: Feature,
    name: String,
    /// Index of its input.
    input: usize,
}

#[derive(Debug)]
struct Observations {
    rows: u64,
    /// Rows of the window, with older rows discounted.
    window: u64,
    histograms: Vec<Histogram>,
}

/// Drift figures of a version.
#[derive(Debug, Clone, PartialEq)]
pub struct DriftFigures {
    /// Rows examined since the version was loaded.
    pub rows: u64,
    /// Rows of the window; with fewer than [`ROWS_MIN`] there are no figures for features.
    pub window_rows: u64,
    /// The features with their names.
    pub features: Vec<(String, FeatureDrift)>,
}

/// Drift of one feature from the training.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FeatureDrift {
    /// Population stability index.
    pub psi: f64,
    /// Difference of the means in standard deviations of the training; `None` if the training had a constant,
    /// or the window has no finite value.
    pub mean_shift: Option<f64>,
    /// Fraction of the values outside the training's range.
    pub outside: f64,
}

impl Drift {
    /// A detector for the features of the statistics whose inputs are 32-bit floats in the signature, as
    /// trainers use. `None` if there are none or detection is disabled.
    pub fn new(statistics: Statistics, signature: &Signature, options: &Options) -> Option<Drift> {
        let watched = |feature: Feature| {
            let input = signature.inputs.iter().position(|spec| spec.name == feature.input)?;
            let name = feature.name();
            let is_float = signature.inputs[input].datatype == Datatype::Fp32;
            is_float.then_some(ObservedFeature { feature, name, input })
        };
        let features: Vec<ObservedFeature> = statistics.features.into_iter().filter_map(watched).collect();
        if features.is_empty() || options.rows_per_second_max == 0 {
            return None;
        }
        let histograms = features.iter().map(|watched| Histogram::new(&watched.feature)).collect();
        Some(Drift {
            features,
            rows_per_second_max: options.rows_per_second_max,
            window_rows: options.window_rows,
            began: Instant::now(),
            taken: AtomicU64::new(0),
            seen: Mutex::new(Observations { rows: 0, window: 0, histograms }),
        })
    }

    /// Examines some rows of inputs; the caller has checked these against the signature.
    pub fn observe<T: Borrow<Tensor>>(&self, inputs: &[T], now: Instant) {
        let rows = rows_of(inputs.first().map(Borrow::borrow));
        let granted = self.grant(rows, now);
        if granted == 0 {
            return;
        }
        // If another request holds the lock, this one skips: requests never wait here.
        let Some(mut seen) = self.seen.try_lock() else { return };
        for turn in 0..granted {
            // Evenly spread over the request, whose rows may be sorted.
            let row = (turn as u128 * rows as u128 / granted as u128) as usize;
            self.add_row(&mut seen, inputs, rows, row);
        }
    }

    /// Number of rows out of `rows` that may be examined in this second.
    fn grant(&self, rows: usize, now: Instant) -> usize {
        let second = now.saturating_duration_since(self.began).as_secs() & u64::from(u32::MAX);
        let wanted = u32::try_from(rows).unwrap_or(u32::MAX);
        let mut before = self.taken.load(Ordering::Relaxed);
        loop {
            // Threads read the clock before this point, so another thread may already have begun the next
            // second.
            let second = second.max(before >> 32);
            let taken = if before >> 32 == second { before as u32 } else { 0 };
            let granted = wanted.min(self.rows_per_second_max.saturating_sub(taken));
            if granted == 0 {
                return 0;
            }
            // At most the limit, which fits into the lower half.
            let after = (second << 32) | u64::from(taken + granted);
            match self.taken.compare_exchange_weak(before, after, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return granted as usize,
                Err(other) => before = other,
            }
        }
    }

    fn add_row<T: Borrow<Tensor>>(&self, seen: &mut Observations, inputs: &[T], rows: usize, row: usize) {
        for (watched, histogram) in self.features.iter().zip(&mut seen.histograms) {
            let tensor = inputs.get(watched.input).map(Borrow::borrow);
            let Some(tensor) = tensor.filter(|tensor| rows_of(Some(tensor)) == rows) else { continue };
            let Data::Fp32(values) = &tensor.data else { continue };
            let width = values.len() / rows;
            if watched.feature.element < width {
                histogram.add(&watched.feature, f64::from(values[row * width + watched.feature.element]));
            }
        }
        seen.rows += 1;
        seen.window += 1;
        if seen.window >= self.window_rows.saturating_mul(2) {
            seen.window /= 2;
            seen.histograms.iter_mut().for_each(Histogram::fade);
        }
    }

    /// The current figures.
    pub fn figures(&self) -> DriftFigures {
        let seen = self.seen.lock();
        let enough = seen.window >= ROWS_MIN;
        let told = self.features.iter().zip(&seen.histograms).filter(|_| enough);
        let features = told
            .filter_map(|(watched, histogram)| {
                Some((watched.name.clone(), histogram.drift(&watched.feature)?))
            })
            .collect();
        DriftFigures { rows: seen.rows, window_rows: seen.window, features }
    }
}

/// Rows of a tensor; 1 for a scalar.
fn rows_of(tensor: Option<&Tensor>) -> usize {
    let extent = tensor.map(|tensor| tensor.shape.first().copied().unwrap_or(1));
    extent.and_then(|extent| usize::try_from(extent).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests;
