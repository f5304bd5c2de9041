//! The classification extension: replaces an output by the largest elements of each of its rows, as strings
//! `value:index` in descending order.

use std::cmp::Ordering;
use std::fmt::Display;

use bytes::Bytes;
use half::{bf16, f16};

use millrace_serving_core::error::{InferError, quote};
use millrace_serving_core::tensor::{Data, Tensor, for_numbers};

/// A number by which elements are ranked.
trait Score: Copy + Display {
    /// Compares two numbers; NaN is smaller than any number.
    fn rank(self, other: Self) -> Ordering;
}

macro_rules! integers {
    ($($number:ty),*) => {
        $(impl Score for $number {
            fn rank(self, other: Self) -> Ordering {
                self.cmp(&other)
            }
        })*
    };
}
integers!(u8, u16, u32, u64, i8, i16, i32, i64);

macro_rules! floats {
    ($($number:ty),*) => {
        $(impl Score for $number {
            fn rank(self, other: Self) -> Ordering {
                self.partial_cmp(&other).unwrap_or_else(|| other.is_nan().cmp(&self.is_nan()))
            }
        })*
    };
}
floats!(f16, bf16, f32, f64);

/// The `count` best classes of an output, or all if it has fewer. The result is a BYTES tensor of shape
/// `[rows, classes]` if `batched`, where the first dimension counts rows, else `[classes]`. Among equal
/// elements the lower index comes first.
///
/// # Errors
/// [`InferError::Invalid`] for datatypes that are not numbers.
pub(crate) fn classify(output: &Tensor, count: usize, batched: bool) -> Result<Tensor, InferError> {
    let rows = output.shape.first().filter(|_| batched).map_or(1, |rows| usize::try_from(*rows).unwrap_or(0));
    let width = output.data.len().checked_div(rows).unwrap_or(0);
    let classes = count.min(width);
    let refused = || {
        InferError::invalid(format!(
            "output {} is {}: only numbers have classes",
            quote(&output.name),
            output.data.datatype()
        ))
    };
    let texts = for_numbers!(
        &output.data,
        values => best(values, width, classes),
        bool => { let _ = values; return Err(refused()) },
        bytes => { let _ = values; return Err(refused()) }
    );
    let mut shape = vec![classes as i64];
    if batched {
        shape.insert(0, rows as i64);
    }
    Ok(Tensor { name: output.name.clone(), shape, data: Data::Bytes(texts) })
}

fn best<S: Score>(values: &[S], width: usize, classes: usize) -> Vec<Bytes> {
    let mut texts = Vec::new();
    if classes == 0 {
        return texts;
    }
    let mut order: Vec<usize> = Vec::with_capacity(width);
    for row in values.chunks_exact(width) {
        let better = |a: &usize, b: &usize| row[*b].rank(row[*a]).then(a.cmp(b));
        order.clear();
        order.extend(0..width);
        if classes < width {
            // Only the requested classes need sorting.
            order.select_nth_unstable_by(classes - 1, better);
            order.truncate(classes);
        }
        order.sort_unstable_by(better);
        texts.extend(order.iter().map(|index| Bytes::from(format!("{}:{index}", row[*index]))));
    }
    texts
}

#[cfg(test)]
mod tests;
