//! Exact sums: gradients, losses and counts as fixed-point integers whose sum has no order.
//!
//! Float addition is not associative, so a float all-reduce gives a different model for every
//! number of workers. Here every virtual shard's contribution is rounded once, by itself, to a
//! multiple of `2^-fraction_bits`; integers are then added in any order and grouping with one
//! result.
//!
//! **Scale.** The scale is a constant that all workers know beforehand, so no exchange of maxima
//! precedes the sum. With the default of 40 fraction bits the rounding error of one contribution is
//! at most 2^-41 (4.5e-13) per element of a gradient *summed over the rows of a shard*. A float32 sum
//! of magnitude 1e-5 already carries that much rounding, and AdamW divides by
//! `sqrt(v) + 1e-8`, so elements whose mean is below about 1e-12 never matter to a step.
//!
//! **Range.** A sum takes at most `contributions` values (one per virtual shard). Each value is
//! limited to `(2^63 - 1) / contributions`, so no sum, partial or whole, can overflow, and wrapping
//! addition on the wire is exact. With 12 shards and 40 bits a shard's gradient element may reach
//! 6.9e5; beyond that the encoder names the element instead of saturating.

#[cfg(test)]
mod tests;

use thiserror::Error;

/// Fraction bits that suit gradients of standardised inputs.
pub const FRACTION_BITS_DEFAULT: u32 = 40;

/// Most contributions one sum may take.
pub const CONTRIBUTIONS_MAX: u32 = 1 << 20;

/// Values handled at once: small enough for the first cache level.
const BLOCK: usize = 1024;

/// Below this magnitude [`round_near`] is exact.
const NEAR: f64 = (1u64 << 51) as f64;

/// Fraction bits of the low limb of a [`Wide`] value.
const WIDE_FRACTION_BITS: u32 = 40;

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
    /// The value is beyond the range of the scale.
    #[error(
        "element {index} of the gradient is {value:e}, beyond the fixed-point limit of {limit:e} (scale the inputs or the labels, or use fewer fraction bits)"
    )]
    OutOfRange {
        /// Index in the flat vector; [`crate::engine::ParamLayout::name_of`] names the parameter.
        index: usize,
        /// The value found.
        value: f32,
        /// Largest magnitude that can be summed.
        limit: f64,
    },
    /// A loss is NaN, infinite or beyond the range of a wide sum.
    #[error(
        "the loss of a shard is {value:e}: training diverged (lower the learning rate, or scale the inputs)"
    )]
    Loss {
        /// The value found.
        value: f64,
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
        "a fixed-point sum needs 1 to 52 fraction bits and 1 to {CONTRIBUTIONS_MAX} contributions, not {fraction_bits} and {contributions}"
    )]
    Scale {
        /// Fraction bits asked for.
        fraction_bits: u32,
        /// Contributions asked for.
        contributions: u32,
    },
}

impl FixedError {
    /// The flat index of the offending element, for naming its parameter.
    pub fn index(&self) -> Option<usize> {
        match self {
            FixedError::NonFinite { index, .. } | FixedError::OutOfRange { index, .. } => Some(*index),
            _ => None,
        }
    }
}

/// The scale shared by every contribution of a sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scale {
    fraction_bits: u32,
    contributions: u32,
}

impl Scale {
    /// A scale of `2^-fraction_bits` (1 to 52) for sums of at most `contributions` values.
    pub fn new(fraction_bits: u32, contributions: u32) -> Result<Scale, FixedError> {
        if !(1..=52).contains(&fraction_bits) || contributions == 0 || contributions > CONTRIBUTIONS_MAX {
            return Err(FixedError::Scale { fraction_bits, contributions });
        }
        Ok(Scale { fraction_bits, contributions })
    }

    /// Largest magnitude one contribution may have.
    pub fn limit(&self) -> f64 {
        self.limit_fixed() / self.factor()
    }

    fn factor(&self) -> f64 {
        (1u64 << self.fraction_bits) as f64
    }

    /// The limit in fixed-point units, a whole number that f64 holds exactly.
    fn limit_fixed(&self) -> f64 {
        let limit = i64::MAX as u64 / u64::from(self.contributions);
        // Clear the bits that f64 cannot hold, so that the comparison is exact and on the safe side.
        let spare = (64 - limit.leading_zeros()).saturating_sub(53);
        ((limit >> spare) << spare) as f64
    }

    /// Adds the fixed-point form of `values` to `sum`, element by element.
    ///
    /// Rounds to nearest, ties to even. On an error `sum` holds part of the contribution and
    /// must be thrown away.
    pub fn add(&self, values: &[f32], sum: &mut [i64]) -> Result<(), FixedError> {
        if values.len() != sum.len() {
            return Err(FixedError::Length { expected: sum.len(), found: values.len() });
        }
        let (factor, limit) = (self.factor(), self.limit_fixed());
        let mut bad = false;
        for (slots, values) in sum.chunks_mut(BLOCK).zip(values.chunks(BLOCK)) {
            // No early exit, so that this loop vectorises too.
            let far = values.iter().fold(false, |far, value| far | beyond(f64::from(*value) * factor, NEAR));
            if !far {
                for (slot, value) in slots.iter_mut().zip(values) {
                    *slot = slot.wrapping_add(round_near(f64::from(*value) * factor));
                }
                continue;
            }
            for (slot, value) in slots.iter_mut().zip(values) {
                let scaled = f64::from(*value) * factor;
                bad |= beyond(scaled, limit);
                // From 2^51 on, a 24-bit mantissa times a power of two is a whole number already.
                let whole = if beyond(scaled, NEAR) { scaled as i64 } else { round_near(scaled) };
                *slot = slot.wrapping_add(whole);
            }
        }
        if bad {
            return Err(self.offender(values));
        }
        Ok(())
    }

    /// The fixed-point form of `values`.
    pub fn encode(&self, values: &[f32]) -> Result<Vec<i64>, FixedError> {
        let mut sum = vec![0i64; values.len()];
        self.add(values, &mut sum)?;
        Ok(sum)
    }

    #[cold]
    fn offender(&self, values: &[f32]) -> FixedError {
        let limit = self.limit();
        let found = values.iter().enumerate().find(|(_, value)| beyond(f64::from(**value), limit));
        match found {
            Some((index, value)) if value.is_finite() => {
                FixedError::OutOfRange { index, value: *value, limit }
            }
            Some((index, value)) => FixedError::NonFinite { index, value: *value },
            None => FixedError::Length { expected: values.len(), found: values.len() },
        }
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

/// The nearest whole number, ties to even, of a value of at most 2^51: adding 1.5 · 2^52 leaves it in
/// the low bits of the mantissa. Unlike a cast, this vectorises on every processor.
fn round_near(value: f64) -> i64 {
    const MAGIC: f64 = 6_755_399_441_055_744.0;
    ((value + MAGIC).to_bits() as i64).wrapping_sub(MAGIC.to_bits() as i64)
}

/// Whether a value is NaN or larger than the limit on either side.
fn beyond(value: f64, limit: f64) -> bool {
    value.is_nan() | (value.abs() > limit)
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

/// A scalar sum with a wide range (losses): a whole part and a fraction of 2^-40, each an i64, so
/// that it travels in the same i64 all-reduce as the gradients: add the limbs one by one.
///
/// Holds |value| up to 2^62 / [`CONTRIBUTIONS_MAX`] (4.4e12) per contribution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Wide(pub [i64; 2]);

impl Wide {
    /// The fixed-point form of `value`, rounded to a multiple of 2^-40.
    pub fn encode(value: f64) -> Result<Wide, FixedError> {
        let limit = (1u64 << 62) as f64 / f64::from(CONTRIBUTIONS_MAX);
        if beyond(value, limit) {
            return Err(FixedError::Loss { value });
        }
        let whole = value.floor();
        let fraction = ((value - whole) * (1u64 << WIDE_FRACTION_BITS) as f64 + 0.5).floor();
        Ok(Wide([whole as i64, fraction as i64]))
    }

    /// The sum of two, exact for up to [`CONTRIBUTIONS_MAX`] contributions.
    #[must_use]
    pub fn merge(self, other: Wide) -> Wide {
        Wide([self.0[0].wrapping_add(other.0[0]), self.0[1].wrapping_add(other.0[1])])
    }

    /// The value as a float: the same bits on every worker.
    pub fn decode(self) -> f64 {
        let carry = self.0[1] >> WIDE_FRACTION_BITS;
        let fraction = self.0[1] - (carry << WIDE_FRACTION_BITS);
        self.0[0].wrapping_add(carry) as f64 + fraction as f64 / (1u64 << WIDE_FRACTION_BITS) as f64
    }
}
