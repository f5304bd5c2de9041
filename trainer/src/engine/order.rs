//! Search for the largest or smallest elements along an axis, on the host.
//!
//! Sorting on devices is unstable, and equal elements must be in the order of their positions on every one.

use std::cmp::Ordering;

use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{Backend, Element, ElementConversion};

use super::tensor::{dims, download, upload};

/// What is searched for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Order {
    pub(super) axis: usize,
    pub(super) largest: bool,
    /// Whether the last one of equal elements comes first.
    pub(super) last: bool,
}

impl Order {
    /// The positions of the first elements in the order, in `shape`, whose axis has as many as are wanted.
    pub(super) fn positions<B: Backend, E: Element>(
        self,
        tensor: FloatTensor<B>,
        shape: &[usize],
        device: &Device<B>,
    ) -> Result<FloatTensor<B>, String> {
        let from = dims::<B>(&tensor);
        let mut elements: Vec<E> = Vec::new();
        download::<B, E>(tensor, &mut elements)?;
        let elements: Vec<f64> = elements.into_iter().map(|element| element.elem()).collect();
        let found = self.search(&elements, from[self.axis], shape);
        Ok(upload::<B, E>(found.into_iter().map(|place| (place as f64).elem()).collect(), shape, device))
    }

    /// [`Order::positions`] of elements whose axis has `size`.
    fn search(self, elements: &[f64], size: usize, shape: &[usize]) -> Vec<usize> {
        let (wanted, inner) = (shape[self.axis], shape[self.axis + 1..].iter().product::<usize>());
        let outer: usize = shape[..self.axis].iter().product();
        let mut found = vec![0; outer * wanted * inner];
        let mut places: Vec<usize> = Vec::with_capacity(size);
        for line in 0..outer * inner {
            let (before, after) = (line / inner, line % inner);
            let element = |place: usize| elements[(before * size + place) * inner + after];
            let compare = |one: &usize, other: &usize| {
                let by_size = match self.largest {
                    true => ascending(element(*other), element(*one), true),
                    false => ascending(element(*one), element(*other), false),
                };
                let by_place = if self.last { other.cmp(one) } else { one.cmp(other) };
                by_size.then(by_place)
            };
            places.clear();
            places.extend(0..size);
            if wanted < size {
                places.select_nth_unstable_by(wanted, compare);
                places.truncate(wanted);
            }
            places.sort_unstable_by(compare);
            for (at, place) in places.iter().enumerate() {
                found[(before * wanted + at) * inner + after] = *place;
            }
        }
        found
    }
}

/// The order of two elements; −0 is 0. What is no number comes first among the wanted ones: above all others if the
/// largest are wanted, as in PyTorch.
fn ascending(one: f64, other: f64, is_nan_largest: bool) -> Ordering {
    one.partial_cmp(&other).unwrap_or_else(|| match is_nan_largest {
        true => one.is_nan().cmp(&other.is_nan()),
        false => other.is_nan().cmp(&one.is_nan()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::numbers;

    /// The order, written out: repeated searches for the best element that is left.
    fn plain(order: Order, line: &[f64], wanted: usize) -> Vec<usize> {
        let mut left: Vec<usize> = (0..line.len()).collect();
        (0..wanted)
            .map(|_| {
                let better = |one: usize, other: usize| {
                    let (x, y) = (line[one], line[other]);
                    if x == y || x.is_nan() && y.is_nan() {
                        return if order.last { one > other } else { one < other };
                    }
                    x.is_nan() || !y.is_nan() && if order.largest { x > y } else { x < y }
                };
                let best =
                    (1..left.len()).fold(0, |best, at| if better(left[at], left[best]) { at } else { best });
                left.remove(best)
            })
            .collect()
    }

    #[test]
    fn searches_match_a_plain_loop_with_equal_elements_and_no_numbers() {
        let mut line: Vec<f64> = numbers(60, 3).into_iter().map(|x| f64::from((x * 4.0).round())).collect();
        (line[7], line[31], line[40], line[41]) = (f64::NAN, f64::NAN, 0.0, -0.0);
        for (largest, last) in [(true, false), (true, true), (false, false), (false, true)] {
            for wanted in [1, 2, 19, 20] {
                let order = Order { axis: 1, largest, last };
                let found = order.search(&line, 20, &[1, wanted, 3]);
                for inner in 0..3 {
                    let own: Vec<f64> = line.iter().skip(inner).step_by(3).copied().collect();
                    let expected = plain(order, &own, wanted);
                    let found: Vec<usize> = found.iter().skip(inner).step_by(3).copied().collect();
                    assert_eq!(found, expected, "{order:?}, {wanted}, {own:?}");
                }
            }
        }
    }
}
