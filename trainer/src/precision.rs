//! Number formats of a job's products, and the scale of the loss that narrow gradients need.
//!
//! With `bf16` or `fp16`, training computes matrix products and convolutions on numbers of 16 bits, forward and
//! backward, and sums in 32 bits. Weights, optimizer, normalisations, losses and all other operations keep 32 bits,
//! and so do evaluations and the published model.

use serde::{Deserialize, Serialize};

use crate::wide::wide;

/// The format of the numbers that products take and give in training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 32 bits.
    #[default]
    Fp32,
    /// 16 bits with the range of 32 bits and 8 bits of precision.
    Bf16,
    /// 16 bits with 11 bits of precision, for magnitudes up to 65504. The loss is scaled, so that small gradients are
    /// not rounded to 0.
    Fp16,
}

/// A format of 16 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Half {
    Bf16,
    Fp16,
}

impl Precision {
    /// Whether a job without the key has this precision.
    pub(crate) fn is_default(&self) -> bool {
        *self == Precision::default()
    }

    /// The format of products; none for 32 bits.
    pub(crate) fn half(self) -> Option<Half> {
        match self {
            Precision::Fp32 => None,
            Precision::Bf16 => Some(Half::Bf16),
            Precision::Fp16 => Some(Half::Fp16),
        }
    }
}

impl Half {
    /// Rounds each number to the nearest one of the format, ties to even. Magnitudes beyond the range become infinite.
    pub(crate) fn round(self, values: &mut [f32]) {
        match self {
            Half::Bf16 => round_bf16(values),
            Half::Fp16 => values.iter_mut().for_each(|value| *value = half::f16::from_f32(*value).to_f32()),
        }
    }
}

wide! {
    /// Rounds to the upper 16 bits of each number.
    fn round_bf16(values: &mut [f32]) {
        for value in values {
            let bits = value.to_bits();
            let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000;
            // Rounding may carry a NaN into another number.
            *value = if value.is_nan() { *value } else { f32::from_bits(rounded) };
        }
    }
}

/// The factor by which the loss is scaled while gradients have 16 bits: a power of two.
///
/// A gradient that overflows halves it, and the step is computed again. After [`LossScale::STEADY_STEPS`] steps without
/// an overflow it doubles. It is part of the run's state, since every worker needs the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LossScale {
    /// The scale is 2 to the power of this.
    exponent: u8,
    /// Steps since the scale last changed.
    steady: u32,
}

impl LossScale {
    /// As in PyTorch's `GradScaler`.
    const FIRST_EXPONENT: u8 = 16;
    /// Larger scales help no gradient: 2^-24 is the smallest number of fp16.
    const LAST_EXPONENT: u8 = 24;
    /// As in PyTorch's `GradScaler`.
    const STEADY_STEPS: u32 = 2000;

    /// The scale at the start of a run; none for a precision without one.
    pub(crate) fn of(precision: Precision) -> Option<LossScale> {
        (precision == Precision::Fp16).then_some(LossScale { exponent: Self::FIRST_EXPONENT, steady: 0 })
    }

    /// The scale with a state; none for a precision without one, whatever the state has.
    pub(crate) fn restored(precision: Precision, stored: Option<LossScale>) -> Option<LossScale> {
        let stored =
            stored.map(|scale| LossScale { exponent: scale.exponent.min(Self::LAST_EXPONENT), ..scale });
        Self::of(precision).map(|first| stored.unwrap_or(first))
    }

    /// The factor of the loss, 1 to 2^24.
    pub(crate) fn factor(self) -> f32 {
        (1u32 << self.exponent.min(Self::LAST_EXPONENT)) as f32
    }

    /// The next smaller scale; none below 1.
    pub(crate) fn lower(self) -> Option<LossScale> {
        Some(LossScale { exponent: self.exponent.checked_sub(1)?, steady: 0 })
    }

    /// The scale after a step that was applied with this one.
    pub(crate) fn after_step(self) -> LossScale {
        let steady = self.steady.saturating_add(1);
        if steady < Self::STEADY_STEPS || self.exponent >= Self::LAST_EXPONENT {
            return LossScale { steady, ..self };
        }
        LossScale { exponent: self.exponent + 1, steady: 0 }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn rounding_gives_the_numbers_of_the_format(bits in any::<u32>()) {
            let value = f32::from_bits(bits);
            for (format, expected) in
                [(Half::Bf16, half::bf16::from_f32(value).to_f32()), (Half::Fp16, half::f16::from_f32(value).to_f32())]
            {
                let mut rounded = [value];
                format.round(&mut rounded);
                prop_assert!(rounded[0] == expected || value.is_nan() && rounded[0].is_nan(), "{value} {rounded:?}");
            }
        }
    }

    #[test]
    fn a_scale_falls_with_overflows_and_rises_after_steady_steps() {
        let first = LossScale::of(Precision::Fp16).unwrap();
        assert_eq!(first.factor(), 65536.0);
        assert_eq!(LossScale::of(Precision::Bf16), None);
        let mut lower = first;
        for _ in 0..16 {
            lower = lower.lower().unwrap();
        }
        assert_eq!((lower.factor(), lower.lower()), (1.0, None));
        let steps = |scale: LossScale, count| (0..count).fold(scale, |scale, _| scale.after_step());
        assert_eq!(steps(first, 1999).factor(), 65536.0);
        assert_eq!(steps(first, 2000).factor(), 131_072.0);
        assert_eq!(steps(first, 1_000_000).factor(), (1u32 << 24) as f32);
        let stored = |exponent| Some(LossScale { exponent, steady: 7 });
        assert_eq!(LossScale::restored(Precision::Fp16, stored(3)), stored(3));
        assert_eq!(LossScale::restored(Precision::Fp16, stored(200)), stored(24));
        assert_eq!(LossScale::restored(Precision::Fp16, None), Some(first));
        assert_eq!(LossScale::restored(Precision::Bf16, stored(3)), None);
        // An overflow begins the count again.
        assert_eq!(steps(steps(first, 1999).lower().unwrap(), 1999).factor(), 32768.0);
    }
}
