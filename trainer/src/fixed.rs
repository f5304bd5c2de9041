//! Exact sums: gradients as fixed-point integers whose sum has no order.
//!
//! Float addition is not associative, so a float all-reduce gives a different model for every
//! number of workers. Here every virtual shard's contribution is rounded once, by itself, to a
//! multiple of `2^-fraction_bits`; integers are then added in any order and grouping with one
//! result.
//!
//! **Scale.** All workers hold the same scale before a step, as a part of the run's state, and learn
//! the largest element of each shard with the sum itself. Where that does not suit the scale
//! ([`Scale::suits`]) no worker applies the step: all compute it again with the scale made for that
//! element ([`Scale::for_largest`]), which then holds for later steps. So each step is summed with a
//! scale that depends on the run alone, gradients of any magnitude that float32 holds are summed, and
//! a step needs one exchange except where magnitudes change by orders.
//!
//! The first step begins with 40 fraction bits, which suit largest elements of 1e-3 to 5e5 (with 12
//! shards). The largest element of a step uses 30 bits or more, six more than a float32 has.
//!
//! **Range.** A sum takes at most `contributions` values (one per virtual shard). Each value is
//! limited to `(2^63 - 1) / contributions`, so no sum, partial or whole, can overflow, and wrapping
//! addition on the wire is exact.

#[cfg(test)]
mod tests;

use thiserror::Error;

/// Fraction bits with which a run begins.
pub const FRACTION_BITS_DEFAULT: i32 = 40;
/// Fraction bits that the elements of float32 can ask for.
const FRACTION_BITS: std::ops::RangeInclusive<i32> = -100..=200;

/// Most contributions one sum may take.
pub const CONTRIBUTIONS_MAX: u32 = 1 << 12;

/// Bits of the largest element when a scale is made for it: at most 2^44, below [`NEAR`] by far.
const LARGEST_BITS: i32 = 44;
/// The largest element is at least this in units of the scale, else the scale is too coarse.
const LARGEST_MIN: f64 = (1u64 << 30) as f64;

/// Values handled at once: small enough for the first cache level.
const BLOCK: usize = 1024;

/// The sign of an f32.
const SIGN: u32 = 1 << 31;
/// Below this magnitude [`round_near`] is exact.
const NEAR: f64 = (1u64 << 51) as f64;

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
    /// The scale itself is not usable.
    #[error(
        "a fixed-point sum needs -100 to 200 fraction bits and 1 to {CONTRIBUTIONS_MAX} contributions, not {fraction_bits} and {contributions}"
    )]
    Scale {
        /// Fraction bits asked for.
        fraction_bits: i32,
        /// Contributions asked for.
        contributions: u32,
    },
}

impl FixedError {
    /// The flat index of the offending element, for naming its parameter.
    pub fn index(&self) -> Option<usize> {
        match self {
            FixedError::NonFinite { index, .. } => Some(*index),
            _ => None,
        }
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

    /// Adds the fixed-point form of `values` to `sum`, element by element. Returns the largest magnitude:
    /// where it does not suit the scale, `sum` must be thrown away.
    ///
    /// Rounds to nearest, ties to even. On an error `sum` holds part of the contribution.
    pub fn add(&self, values: &[f32], sum: &mut [i64]) -> Result<f32, FixedError> {
        if values.len() != sum.len() {
            return Err(FixedError::Length { expected: sum.len(), found: values.len() });
        }
        let factor = self.factor();
        let mut largest = 0.0f32;
        for (block, (slots, values)) in sum.chunks_mut(BLOCK).zip(values.chunks(BLOCK)).enumerate() {
            // The bits of magnitudes are in their order, with infinity and NaN above all. No early exit,
            // so that this loop vectorises, too.
            let bits = values.iter().fold(0, |most: i32, value| most.max((value.to_bits() & !SIGN) as i32));
            let most = f32::from_bits(bits as u32);
            if !most.is_finite() {
                return Err(offender(values, block * BLOCK));
            }
            largest = largest.max(most);
            if f64::from(most) * factor <= NEAR {
                for (slot, value) in slots.iter_mut().zip(values) {
                    *slot = slot.wrapping_add(round_near(f64::from(*value) * factor));
                }
                continue;
            }
            for (slot, value) in slots.iter_mut().zip(values) {
                let scaled = f64::from(*value) * factor;
                // From 2^51 on, a 24-bit mantissa times a power of two is a whole number already.
                let whole = if scaled.abs() > NEAR { scaled as i64 } else { round_near(scaled) };
                *slot = slot.wrapping_add(whole);
            }
        }
        Ok(largest)
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
        if sum.len() != out.len() {
            return Err(FixedError::Length { expected: out.len(), found: sum.len() });
        }
        let scale = self.factor() * divisor.max(1) as f64;
        for (target, value) in out.iter_mut().zip(sum) {
            *target = (*value as f64 / scale) as f32;
        }
        Ok(())
    }
}

#[cold]
fn offender(block: &[f32], start: usize) -> FixedError {
    let at = block.iter().position(|value| !value.is_finite()).unwrap_or_default();
    FixedError::NonFinite { index: start + at, value: block[at] }
}

/// The nearest whole number, ties to even, of a value of at most 2^51: adding 1.5 · 2^52 leaves it in
/// the low bits of the mantissa. Unlike a cast, this vectorises on every processor.
fn round_near(value: f64) -> i64 {
    const MAGIC: f64 = 6_755_399_441_055_744.0;
    ((value + MAGIC).to_bits() as i64).wrapping_sub(MAGIC.to_bits() as i64)
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
