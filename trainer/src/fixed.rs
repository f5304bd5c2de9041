//! Exact sums: gradients as fixed-point integers whose sum does not depend on order.
//!
//! Float addition is not associative, so a float all-reduce gives a different model for every number of
//! workers. Here the contribution of each virtual shard is rounded once, on its own, to a multiple of
//! `2^-fraction_bits`. Integers are then added in any order and grouping with one result.
//!
//! **Scale.** Before a step all workers hold the same scale, which is part of the run's state. The sum itself
//! tells them the largest element of each shard. If that does not suit the scale ([`Scale::suits`]), no
//! worker applies the step: all repeat it with a scale for that element ([`Scale::for_largest`]), which then
//! holds for later steps. So the scale of each step depends on the run alone, and gradients of any float32
//! magnitude can be summed. A step needs a second exchange only where magnitudes change by orders.
//!
//! The first step begins with 46 fraction bits, which suit largest elements of 0.016 to 1e4 (with 12 shards). The largest
//! element of a step uses 40 bits or more. Elements down to 1/65,536 of it keep the 24 bits of a float32, smaller ones
//! fewer, and those below about 1e-12 of it count as 0. [`Scale::underflow`] counts these.
//!
//! **Range.** A sum has at most `contributions` values, one per virtual shard. Each is limited to
//! `(2^63 - 1) / contributions`. No partial or complete sum can therefore overflow, and wrapping addition on
//! the wire is exact.

#[cfg(test)]
mod tests;

use thiserror::Error;

use crate::wide::wide;

/// Fraction bits at the start of a run.
pub const FRACTION_BITS_DEFAULT: i32 = 46;
/// Range of fraction bits that float32 elements can need.
const FRACTION_BITS: std::ops::RangeInclusive<i32> = -100..=200;

/// Most contributions one sum may take.
pub const CONTRIBUTIONS_MAX: u32 = 1 << 12;

/// Bits of the largest element after [`Scale::for_largest`]: at most 2^50, below [`NEAR`] and the limit of
/// [`CONTRIBUTIONS_MAX`].
const LARGEST_BITS: i32 = 50;
/// Smallest allowed value of the largest element, in units of the scale; below it the scale is too coarse.
const LARGEST_MIN: f64 = (1u64 << 40) as f64;

/// Values per block: small enough for the first-level cache.
const BLOCK: usize = 1024;

/// The sign of an f32.
const SIGN: u32 = 1 << 31;
/// Below this magnitude [`round_near`] is exact.
const NEAR: f64 = (1u64 << 51) as f64;
/// 1.5 · 2^52: the unit of an f64 of about this size is 1.
const MAGIC: f64 = 6_755_399_441_055_744.0;
/// Bits of the low part of a whole number that is converted in two parts.
const LOW_BITS: u32 = 20;
const LOW: f64 = (1u64 << LOW_BITS) as f64;

/// Why a value cannot enter an exact sum.
#[derive(Debug, Error, Clone, PartialEq)]
pub enum FixedError {
    /// The value is NaN or infinite.
    #[error(
        "element {index} of the gradient is {value}: training diverged (lower the learning rate, or scale the inputs)"
    )]
    NonFinite {
        /// Index in the flat vector; [`crate::engine::ParamLayout::name_of`] names the parameter.
        index: usize,
        /// The value found.
        value: f32,
    },
    /// Two vectors of one sum differ in length.
    #[error("a sum of {expected} elements was given {found}")]
    Length {
        /// Elements of the sum.
        expected: usize,
        /// Elements of the contribution.
        found: usize,
    },
    /// The scale is out of bounds.
    #[error(
        "a fixed-point sum needs -100 to 200 fraction bits and 1 to {CONTRIBUTIONS_MAX} contributions, not {fraction_bits} and {contributions}"
    )]
    Scale {
        /// The requested fraction bits.
        fraction_bits: i32,
        /// The requested contributions.
        contributions: u32,
    },
}

impl FixedError {
    /// The error for a vector of which a part that begins at `start` was added.
    pub(crate) fn behind(self, start: usize) -> FixedError {
        match self {
            FixedError::NonFinite { index, value } => FixedError::NonFinite { index: start + index, value },
            other => other,
        }
    }

    /// The flat index of the offending element, for naming its parameter.
    pub fn index(&self) -> Option<usize> {
        match self {
            FixedError::NonFinite { index, .. } => Some(*index),
            _ => None,
        }
    }
}

/// Elements of contributions that are rounded to 0, among those that are not 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Underflow {
    /// All that are not 0.
    pub elements: u64,
    /// Those that are rounded to 0.
    pub lost: u64,
}

impl std::ops::AddAssign for Underflow {
    fn add_assign(&mut self, other: Underflow) {
        self.elements += other.elements;
        self.lost += other.lost;
    }
}

/// The scale shared by every contribution of a sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scale {
    fraction_bits: i32,
    contributions: u32,
}

impl Scale {
    /// A scale of `2^-fraction_bits` (-100 to 200) for sums of at most `contributions` values.
    pub fn new(fraction_bits: i32, contributions: u32) -> Result<Scale, FixedError> {
        if !FRACTION_BITS.contains(&fraction_bits) || contributions == 0 || contributions > CONTRIBUTIONS_MAX
        {
            return Err(FixedError::Scale { fraction_bits, contributions });
        }
        Ok(Scale { fraction_bits, contributions })
    }

    /// The scale for contributions whose largest magnitude is `largest`, a finite number.
    #[must_use]
    pub fn for_largest(self, largest: f32) -> Scale {
        // The exponent of an f64, in which every f32 but 0 is a normal number.
        let exponent = (f64::from(largest).abs().to_bits() >> 52) as i32 - 1022;
        let fraction_bits = (LARGEST_BITS - exponent).clamp(*FRACTION_BITS.start(), *FRACTION_BITS.end());
        Scale { fraction_bits, ..self }
    }

    /// Whether contributions whose largest magnitude is `largest` fit, and are not rounded coarsely.
    pub fn suits(&self, largest: f32) -> bool {
        let scaled = f64::from(largest) * self.factor();
        largest == 0.0 || (LARGEST_MIN..=self.limit_fixed()).contains(&scaled)
    }

    /// The fraction bits.
    pub fn fraction_bits(&self) -> i32 {
        self.fraction_bits
    }

    /// A power of two, exact: the exponent is far inside the range of f64.
    fn factor(&self) -> f64 {
        f64::from_bits(((1023 + self.fraction_bits) as u64) << 52)
    }

    /// The limit in fixed-point units, a whole number that f64 holds exactly.
    fn limit_fixed(&self) -> f64 {
        let limit = i64::MAX as u64 / u64::from(self.contributions);
        // Clear the bits that f64 cannot hold, so that the comparison is exact and on the safe side.
        let spare = (64 - limit.leading_zeros()).saturating_sub(53);
        ((limit >> spare) << spare) as f64
    }

    /// Adds the fixed-point form of `values` to `sum`, element by element. Returns the largest magnitude; if
    /// that does not suit the scale, the caller must discard `sum`.
    ///
    /// Rounds to nearest, ties to even. On an error `sum` holds part of the contribution.
    pub fn add(&self, values: &[f32], sum: &mut [i64]) -> Result<f32, FixedError> {
        if values.len() != sum.len() {
            return Err(FixedError::Length { expected: sum.len(), found: values.len() });
        }
        add_blocks(*self, values, sum)
    }

    /// The elements that are 0 in fixed-point form only. Takes about as long as [`Scale::add`].
    pub fn underflow(&self, values: &[f32]) -> Underflow {
        // Half a unit is rounded to the even number, which is 0. Both sides are exact, as every f32 is an f64.
        let half = 0.5 / self.factor();
        let count = |is: &dyn Fn(f64) -> bool| {
            values.iter().filter(|value| is(f64::from(value.abs()))).count() as u64
        };
        Underflow {
            elements: count(&|value| value > 0.0),
            lost: count(&|value| value > 0.0 && value <= half),
        }
    }

    /// The fixed-point form of `values`; for tests and measurements.
    pub fn encode(&self, values: &[f32]) -> Result<Vec<i64>, FixedError> {
        let mut sum = vec![0i64; values.len()];
        self.add(values, &mut sum)?;
        Ok(sum)
    }

    /// The float value of every sum divided by `divisor` (the rows of the global batch), into `out`.
    ///
    /// One rounding to f64, one division, one rounding to f32: the same bits on every worker.
    pub fn mean_into(&self, sum: &[i64], divisor: u64, out: &mut [f32]) -> Result<(), FixedError> {
        self.weighted_mean_into(sum, divisor.max(1) as f64, out)
    }

    /// As [`Scale::mean_into`], for a positive sum of weights as the divisor.
    pub fn weighted_mean_into(&self, sum: &[i64], weight: f64, out: &mut [f32]) -> Result<(), FixedError> {
        if sum.len() != out.len() {
            return Err(FixedError::Length { expected: out.len(), found: sum.len() });
        }
        divide(sum, self.factor() * weight, out);
        Ok(())
    }
}

#[cold]
fn non_finite_value(block: &[f32], start: usize) -> FixedError {
    let at = block.iter().position(|value| !value.is_finite()).unwrap_or_default();
    FixedError::NonFinite { index: start + at, value: block[at] }
}

wide! {
    /// See [`Scale::add`], for slices of equal length.
    fn add_blocks(scale: Scale, values: &[f32], sum: &mut [i64]) -> Result<f32, FixedError> {
        let factor = scale.factor();
        let mut largest = 0.0f32;
        for (block, (slots, values)) in sum.chunks_mut(BLOCK).zip(values.chunks(BLOCK)).enumerate() {
            // The bits of magnitudes sort like their values, with infinity and NaN last. No early exit, so
            // that this loop vectorizes, too.
            let bits = values.iter().fold(0, |most: i32, value| most.max((value.to_bits() & !SIGN) as i32));
            let most = f32::from_bits(bits as u32);
            if !most.is_finite() {
                return Err(non_finite_value(values, block * BLOCK));
            }
            largest = largest.max(most);
            if f64::from(most) * factor <= NEAR {
                for (slot, value) in slots.iter_mut().zip(values) {
                    *slot = slot.wrapping_add(round_near(f64::from(*value) * factor));
                }
                continue;
            }
            for (slot, value) in slots.iter_mut().zip(values) {
                *slot = slot.wrapping_add(round_far(f64::from(*value) * factor));
            }
        }
        Ok(largest)
    }
}

wide! {
    /// Each sum divided by `scale`, rounded to f32.
    fn divide(sum: &[i64], scale: f64, out: &mut [f32]) {
        // The reciprocal of a power of two is exact, and multiplications take less time.
        let reciprocal = 1.0 / scale;
        let is_exact = scale.to_bits() << 12 == 0 && scale.is_normal() && reciprocal.is_normal();
        for (targets, sums) in out.chunks_mut(BLOCK).zip(sum.chunks(BLOCK)) {
            // Whether a sum is outside -2^51..2^51. No early exit, so that the loop vectorizes.
            let high = sums.iter().fold(0, |high, sum| high | (sum.wrapping_add(1 << 51) as u64 >> 52));
            let pairs = targets.iter_mut().zip(sums);
            match (high == 0, is_exact) {
                (true, true) => pairs.for_each(|(target, sum)| *target = (near_float(*sum) * reciprocal) as f32),
                (true, false) => pairs.for_each(|(target, sum)| *target = (near_float(*sum) / scale) as f32),
                (false, true) => pairs.for_each(|(target, sum)| *target = (far_float(*sum) * reciprocal) as f32),
                (false, false) => pairs.for_each(|(target, sum)| *target = (far_float(*sum) / scale) as f32),
            }
        }
    }
}

/// The f64 of a whole number in -2^51..2^51: the inverse of [`round_near`].
#[inline(always)]
fn near_float(value: i64) -> f64 {
    f64::from_bits((MAGIC.to_bits() as i64).wrapping_add(value) as u64) - MAGIC
}

/// The nearest whole number, ties to even, of a value of at most 2^51: adding 1.5 · 2^52 leaves it in the low
/// bits of the mantissa. Unlike a cast, this vectorizes on every processor.
#[inline(always)]
fn round_near(value: f64) -> i64 {
    ((value + MAGIC).to_bits() as i64).wrapping_sub(MAGIC.to_bits() as i64)
}

/// As [`round_near`], for a value of at most 2^63 with 53 bits: a multiple of 2^20, and the rest of at most 2^19.
#[inline(always)]
fn round_far(value: f64) -> i64 {
    let high = value / LOW + MAGIC;
    // Both are exact: the rest has no more bits than the value.
    let rest = value - (high - MAGIC) * LOW;
    let high = (high.to_bits() as i64).wrapping_sub(MAGIC.to_bits() as i64);
    (high << LOW_BITS).wrapping_add(round_near(rest))
}

/// The f64 nearest to any whole number: two exact parts, whose sum is rounded once.
#[inline(always)]
fn far_float(value: i64) -> f64 {
    near_float(value >> LOW_BITS) * LOW + near_float(value & ((1 << LOW_BITS) - 1))
}

/// Adds one partial sum to another, element by element.
///
/// Exact while both together hold at most the contributions of their [`Scale`].
pub fn merge(sum: &mut [i64], other: &[i64]) -> Result<(), FixedError> {
    if sum.len() != other.len() {
        return Err(FixedError::Length { expected: sum.len(), found: other.len() });
    }
    for (slot, value) in sum.iter_mut().zip(other) {
        *slot = slot.wrapping_add(*value);
    }
    Ok(())
}
