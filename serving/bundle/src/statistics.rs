//! Statistics of a model's training inputs, in a file of its bundle. A server compares requests with them to
//! detect drift.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::manifest::shorten;

/// File name of the statistics inside a version's directory.
pub const STATISTICS_FILE: &str = "statistics.json";
/// Most features in the statistics.
pub const FEATURES_MAX: usize = 64;
/// Number of parts of a feature's values, about equal in size; fewer if many values are equal.
const PARTS: usize = 16;
/// Most parts in a file.
const PARTS_MAX: usize = 32;
/// Format of the file.
const FORMAT_VERSION: u64 = 1;
/// Largest file in bytes.
const BYTES_MAX: usize = 1 << 20;
/// Longest name of an input, in bytes.
const INPUT_BYTES_MAX: usize = 1024;

/// Distribution of the inputs of a training, feature by feature.
///
/// Unknown keys are ignored, so that programs may add keys within one format version.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Statistics {
    /// Format of this file.
    pub format_version: u64,
    /// Column of the dataset that fed the input.
    pub column: String,
    /// Number of rows examined.
    pub rows: u64,
    /// The features, at most [`FEATURES_MAX`]: single numbers of a row.
    pub features: Vec<Feature>,
}

/// One number in each row of an input.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Feature {
    /// The model's input.
    pub input: String,
    /// Index of the number in its row, row-major from 0.
    pub element: usize,
    /// Mean of its values.
    pub mean: f64,
    /// Variance of its values.
    pub variance: f64,
    /// The smallest of them.
    pub min: f64,
    /// The largest.
    pub max: f64,
    /// Upper bounds of its parts except the last, ascending, from `min` on and below `max`; a value at a
    /// bound belongs to the part below it.
    pub edges: Vec<f64>,
    /// Share of the values in each part; one more than there are edges.
    pub shares: Vec<f64>,
}

/// Count, mean, variance and range of a series of numbers (Welford's method).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Moments {
    count: u64,
    mean: f64,
    squares: f64,
    min: f64,
    max: f64,
}

impl Default for Moments {
    fn default() -> Moments {
        Moments { count: 0, mean: 0.0, squares: 0.0, min: f64::INFINITY, max: f64::NEG_INFINITY }
    }
}

impl Moments {
    /// Adds a finite number.
    pub fn add(&mut self, value: f64) {
        self.count += 1;
        let apart = value - self.mean;
        self.mean += apart / self.count as f64;
        self.squares += apart * (value - self.mean);
        self.min = self.min.min(value);
        self.max = self.max.max(value);
    }
}

impl Statistics {
    /// Statistics of `rows` rows of a column.
    pub fn new(column: &str, rows: u64, features: Vec<Feature>) -> Statistics {
        Statistics { format_version: FORMAT_VERSION, column: column.to_owned(), rows, features }
    }

    /// The content of the file.
    pub(crate) fn written(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Parses and checks the content of a file; the error names the fault.
    pub(crate) fn read(content: &[u8]) -> std::result::Result<Statistics, String> {
        if content.len() > BYTES_MAX {
            return Err(format!("it has {} bytes, the limit is {BYTES_MAX}", content.len()));
        }
        let statistics: Statistics =
            serde_json::from_slice(content).map_err(|error| shorten(&error.to_string()))?;
        statistics.check()?;
        Ok(statistics)
    }

    /// Checks the statistics; the error names the fault.
    pub(crate) fn check(&self) -> std::result::Result<(), String> {
        if self.format_version != FORMAT_VERSION {
            return Err(format!("format_version {} is unknown", self.format_version));
        }
        if self.features.is_empty() || self.features.len() > FEATURES_MAX {
            return Err(format!("{} features, allowed are 1 to {FEATURES_MAX}", self.features.len()));
        }
        let mut known = BTreeSet::new();
        for feature in &self.features {
            feature.check().map_err(|reason| format!("feature {:?}: {reason}", shorten(&feature.name())))?;
            if !known.insert((feature.input.as_str(), feature.element)) {
                return Err(format!("feature {:?} appears twice", shorten(&feature.name())));
            }
        }
        Ok(())
    }
}

impl Feature {
    /// A feature with these moments, and with parts from a sample of its values; `None` without values.
    pub fn new(input: &str, element: usize, moments: &Moments, mut sample: Vec<f64>) -> Option<Feature> {
        let Moments { count, mean, squares, min, max } = *moments;
        sample.retain(|value| (min..=max).contains(value));
        if count == 0 || sample.is_empty() {
            return None;
        }
        sample.sort_unstable_by(f64::total_cmp);
        let mut edges: Vec<f64> = Vec::with_capacity(PARTS);
        for part in 1..PARTS {
            // The last value of the part.
            let edge = sample[(part * sample.len()).div_ceil(PARTS) - 1];
            // Zero has two signs, which are one value.
            if edge < max && edges.last().is_none_or(|last| *last < edge) {
                edges.push(edge);
            }
        }
        let below = |edge: f64| sample.partition_point(|value| *value <= edge);
        let ends = edges.iter().map(|edge| below(*edge)).chain([sample.len()]);
        let mut start = 0;
        let shares = ends
            .map(|end| {
                let share = (end - start) as f64 / sample.len() as f64;
                start = end;
                share
            })
            .collect();
        let (input, variance) = (input.to_owned(), (squares / count as f64).max(0.0));
        Some(Feature { input, element, mean, variance, min, max, edges, shares })
    }

    /// `input[element]`.
    pub fn name(&self) -> String {
        format!("{}[{}]", self.input, self.element)
    }

    /// Number of bins: its parts, one bin below its range and one above.
    pub fn bins(&self) -> usize {
        self.shares.len() + 2
    }

    /// The bin of a value; NaN belongs to the last one.
    pub fn bin(&self, value: f64) -> usize {
        if value < self.min {
            0
        } else if value <= self.max {
            1 + self.edges.partition_point(|edge| *edge < value)
        } else {
            self.bins() - 1
        }
    }

    /// The share of the training's values in a bin.
    pub fn share(&self, bin: usize) -> f64 {
        bin.checked_sub(1).and_then(|part| self.shares.get(part)).copied().unwrap_or(0.0)
    }

    fn check(&self) -> std::result::Result<(), String> {
        if self.input.is_empty() || self.input.len() > INPUT_BYTES_MAX {
            return Err(format!("the input's name has {} bytes", self.input.len()));
        }
        let numbers = [self.mean, self.variance, self.min, self.max];
        if numbers.iter().any(|number| !number.is_finite()) || self.variance < 0.0 || self.min > self.max {
            return Err("mean, variance, min or max is not finite, or is out of range".into());
        }
        let parts = self.shares.len();
        if parts > PARTS_MAX || parts != self.edges.len() + 1 {
            return Err(format!("{parts} shares for {} edges, at most {PARTS_MAX} parts", self.edges.len()));
        }
        let within = self.edges.iter().all(|edge| (self.min..self.max).contains(edge));
        if !within || !self.edges.is_sorted_by(|a, b| a < b) {
            return Err("its edges do not ascend within its range".into());
        }
        let sum: f64 = self.shares.iter().sum();
        if self.shares.iter().any(|share| !(0.0..=1.0).contains(share)) || (sum - 1.0).abs() > 1e-6 {
            return Err("its shares are not from 0 to 1 or do not sum to 1".into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
