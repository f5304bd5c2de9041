//! Comparison of two model versions: the differences of their outputs, and the run time of each.

use std::time::{Duration, Instant};

use millrace_bundle::Datatype;
use serde::Serialize;

use crate::session::Trial;
use millrace_serving_core::error::InferError;
use millrace_serving_core::tensor::{Data, Tensor};

/// Timed runs of each version.
const ROUNDS: usize = 31;
/// Fewest timed runs of each version, whatever they take.
const ROUNDS_MIN: usize = 5;
/// Time after which no further runs are timed.
const BUDGET: Duration = Duration::from_secs(10);

/// Difference of an output between two versions, over all compared runs.
///
/// Differences of floats are fractions of the range of the first version's output (of its magnitude if that
/// is a single value). For other types the difference is the fraction of unequal elements. A difference is
/// infinite where only one of the versions has a number.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OutputDifference {
    /// Name of the output.
    pub output: String,
    /// Its type.
    pub datatype: Datatype,
    /// Elements that were compared.
    pub elements: u64,
    /// Range of the first version's elements; 0 for types without a range.
    pub range: f64,
    /// The mean difference.
    pub mean: f64,
    /// The largest difference.
    pub max: f64,
    /// For matrices of floats with more than one column: the fraction of rows whose largest element has the
    /// same index. For types other than floats: the fraction of equal elements.
    pub agreement: Option<f64>,
}

/// Differences of all outputs, accumulated over runs.
#[derive(Debug, Default)]
pub struct Comparison {
    outputs: Vec<OutputTotals>,
}

#[derive(Debug)]
struct OutputTotals {
    output: String,
    datatype: Datatype,
    low: f64,
    high: f64,
    elements: u64,
    sum: f64,
    max: f64,
    /// Rows or elements with equal labels; `labelled` counts all of them.
    same: u64,
    labelled: u64,
}

impl Comparison {
    /// Adds the outputs of both versions for the same inputs.
    pub fn add(&mut self, before: &[Tensor], after: &[Tensor]) {
        for (place, tensor) in before.iter().enumerate() {
            if place == self.outputs.len() {
                self.outputs.push(OutputTotals::new(tensor));
            }
            let other = after.get(place).filter(|after| after.shape == tensor.shape);
            self.outputs[place].add(tensor, other);
        }
    }

    /// The differences, in the order of the outputs.
    pub fn outputs(&self) -> Vec<OutputDifference> {
        self.outputs.iter().map(OutputTotals::difference).collect()
    }
}

impl OutputTotals {
    fn new(tensor: &Tensor) -> OutputTotals {
        OutputTotals {
            output: tensor.name.clone(),
            datatype: tensor.data.datatype(),
            low: f64::INFINITY,
            high: f64::NEG_INFINITY,
            elements: 0,
            sum: 0.0,
            max: 0.0,
            same: 0,
            labelled: 0,
        }
    }

    fn add(&mut self, before: &Tensor, after: Option<&Tensor>) {
        let elements = before.data.len();
        self.elements += elements as u64;
        let values = |tensor: &Tensor| if self.is_float() { tensor.data.to_floats() } else { None };
        match (values(before), after.map(|after| (after, values(after)))) {
            // The shape differs, so no element is comparable.
            (_, None) => self.max = f64::INFINITY,
            (Some(before_values), Some((_, Some(after_values)))) => {
                let rows = match before.shape[..] {
                    [_, width] if width > 1 => usize::try_from(width).unwrap_or(0),
                    _ => 0,
                };
                self.add_floats(&before_values, &after_values, rows);
            }
            (_, Some((after, _))) => {
                self.labelled += elements as u64;
                self.same += equal(&before.data, &after.data) as u64;
            }
        }
    }

    /// Adds numbers; `width` is the row length, or 0 if the output has no rows.
    fn add_floats(&mut self, before: &[f64], after: &[f64], width: usize) {
        for (a, b) in before.iter().zip(after) {
            if a.is_finite() {
                (self.low, self.high) = (self.low.min(*a), self.high.max(*a));
            }
            let apart = match (a - b).abs() {
                _ if a == b || (a.is_nan() && b.is_nan()) => 0.0,
                apart if apart.is_nan() => f64::INFINITY,
                apart => apart,
            };
            self.sum += apart;
            self.max = self.max.max(apart);
        }
        if width > 0 {
            let rows = before.chunks_exact(width).zip(after.chunks_exact(width));
            self.same += rows.filter(|(a, b)| largest(a) == largest(b)).count() as u64;
            self.labelled += (before.len() / width) as u64;
        }
    }

    fn difference(&self) -> OutputDifference {
        let share = |part: u64, of: u64| if of == 0 { 0.0 } else { part as f64 / of as f64 };
        let agreement = (self.labelled > 0).then(|| share(self.same, self.labelled));
        let (range, mean, max) = if self.is_float() {
            let range = self.high - self.low;
            let magnitude = self.high.abs().max(self.low.abs());
            let unit = if range > 0.0 && range.is_finite() { range } else { magnitude };
            let part = |apart: f64| match apart {
                0.0 => 0.0,
                // No scale: no finite number, or only zeros.
                apart if !unit.is_finite() || unit == 0.0 => apart * f64::INFINITY,
                apart => apart / unit,
            };
            let mean = if self.max.is_infinite() { self.max } else { self.sum / self.elements.max(1) as f64 };
            (if range.is_finite() { range } else { 0.0 }, part(mean), part(self.max))
        } else if self.max.is_infinite() {
            (0.0, self.max, self.max)
        } else {
            let mean = share(self.labelled - self.same, self.labelled);
            (0.0, mean, if mean > 0.0 { 1.0 } else { 0.0 })
        };
        OutputDifference {
            output: self.output.clone(),
            datatype: self.datatype,
            elements: self.elements,
            range,
            mean,
            max,
            agreement,
        }
    }

    fn is_float(&self) -> bool {
        matches!(self.datatype, Datatype::Fp16 | Datatype::Bf16 | Datatype::Fp32 | Datatype::Fp64)
    }
}

/// The index of the largest number; the first one among equals.
fn largest(row: &[f64]) -> usize {
    (1..row.len()).fold(0, |best, place| if row[place] > row[best] { place } else { best })
}

/// Number of equal elements at the same index.
fn equal(before: &Data, after: &Data) -> usize {
    if let (Data::Bytes(before), Data::Bytes(after)) = (before, after) {
        return before.iter().zip(after).filter(|(a, b)| a == b).count();
    }
    let width = before.datatype().element_bytes().unwrap_or(1);
    if after.datatype() != before.datatype() {
        return 0;
    }
    let (before, after) = (before.to_raw(), after.to_raw());
    before.chunks_exact(width).zip(after.chunks_exact(width)).filter(|(a, b)| a == b).count()
}

/// The median run time of two versions on the same inputs. The runs alternate, so that other load on the
/// machine affects both.
///
/// # Errors
/// As [`Trial::run`].
pub fn median_times(
    before: &mut Trial,
    after: &mut Trial,
    inputs: &[Tensor],
) -> Result<[Duration; 2], InferError> {
    let began = Instant::now();
    let mut times = [Vec::with_capacity(ROUNDS), Vec::with_capacity(ROUNDS)];
    for round in 0..ROUNDS {
        if round >= ROUNDS_MIN && began.elapsed() > BUDGET {
            break;
        }
        // The second run finds warm caches, so the order alternates.
        let second = round % 2;
        for version in [second, 1 - second] {
            let trial = if version == 0 { &mut *before } else { &mut *after };
            times[version].push(trial.run(inputs)?.1);
        }
    }
    Ok(times.map(|mut times| {
        times.sort_unstable();
        times[times.len() / 2]
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floats(shape: &[i64], values: &[f32]) -> Tensor {
        Tensor::fp32("y", shape.to_vec(), values.to_vec()).unwrap()
    }

    fn compared(before: &Tensor, after: &Tensor) -> OutputDifference {
        let mut comparison = Comparison::default();
        comparison.add(std::slice::from_ref(before), std::slice::from_ref(after));
        comparison.outputs().pop().unwrap()
    }

    #[test]
    fn differences_are_parts_of_the_range_over_all_runs() {
        let mut comparison = Comparison::default();
        comparison.add(&[floats(&[1, 2], &[0.0, 1.0])], &[floats(&[1, 2], &[0.0, 2.0])]);
        comparison.add(&[floats(&[2, 2], &[4.0, 3.0, 2.0, 1.0])], &[floats(&[2, 2], &[4.0, 5.0, 2.0, 1.0])]);
        let found = comparison.outputs().pop().unwrap();
        assert_eq!((found.elements, found.range), (6, 4.0));
        assert_eq!((found.mean, found.max), (3.0 / 6.0 / 4.0, 0.5));
        assert_eq!(found.agreement, Some(2.0 / 3.0));
    }

    #[test]
    fn nan_and_empty_ranges_are_reported() {
        let same = floats(&[3], &[f32::NAN, f32::INFINITY, 1.0]);
        let found = compared(&same, &same);
        assert_eq!((found.mean, found.max, found.agreement), (0.0, 0.0, None));
        let other = compared(&floats(&[2], &[1.0, 2.0]), &floats(&[2], &[1.0, f32::NAN]));
        assert_eq!((other.mean, other.max), (f64::INFINITY, f64::INFINITY));
        // One number has no range: the difference is a fraction of its magnitude.
        assert_eq!(compared(&floats(&[1], &[4.0]), &floats(&[1], &[5.0])).mean, 0.25);
        assert_eq!(compared(&floats(&[1], &[0.0]), &floats(&[1], &[0.0])).mean, 0.0);
        assert_eq!(compared(&floats(&[1], &[0.0]), &floats(&[1], &[1.0])).mean, f64::INFINITY);
        let reshaped = compared(&floats(&[2], &[1.0, 2.0]), &floats(&[1, 2], &[1.0, 2.0]));
        assert_eq!(reshaped.mean, f64::INFINITY);
        assert_eq!(compared(&floats(&[0, 2], &[]), &floats(&[0, 2], &[])).mean, 0.0);
    }

    #[test]
    fn values_other_than_floats_are_equal_or_different() {
        let whole = |values: &[i64]| Tensor::new("c", vec![4], Data::Int64(values.to_vec())).unwrap();
        let found = compared(&whole(&[1, 2, 3, 4]), &whole(&[1, 2, 3, 5]));
        assert_eq!((found.mean, found.max, found.agreement), (0.25, 1.0, Some(0.75)));
        let text = |words: [&'static str; 2]| {
            Tensor::new("t", vec![2], Data::Bytes(words.map(Into::into).to_vec())).unwrap()
        };
        assert_eq!(compared(&text(["a", "b"]), &text(["a", "b"])).agreement, Some(1.0));
        assert_eq!(compared(&text(["a", "b"]), &text(["a", "c"])).mean, 0.5);
    }
}
