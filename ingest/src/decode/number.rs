//! JSON numbers: grammar, exact integers, correctly rounded floats.

use super::reject::Fault;

/// A number as read: its text, and its digits as `mantissa · 10^exponent` where they fit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Number<'a> {
    /// The number's text.
    pub(crate) text: &'a str,
    negative: bool,
    /// The first 19 significant digits.
    mantissa: u64,
    /// Power of ten of the mantissa's last digit.
    exponent: i32,
    /// Whether the mantissa has all digits.
    complete: bool,
    /// Neither fraction nor exponent.
    integer: bool,
}

/// Most digits that always fit a `u64`.
const DIGITS_MAX: u32 = 19;
/// Exponents beyond this are the same as infinite.
const EXPONENT_MAX: i32 = 100_000;
/// Powers of ten that `f64` holds exactly.
const POWERS_F64: [f64; 23] = [
    1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18,
    1e19, 1e20, 1e21, 1e22,
];
/// Powers of ten that `f32` holds exactly.
const POWERS_F32: [f32; 11] = [1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10];

impl<'a> Number<'a> {
    /// Reads the number at the start of `text`; on failure the position and the reason.
    pub(crate) fn read(text: &'a str) -> Result<Self, (usize, &'static str)> {
        let bytes = text.as_bytes();
        let mut number = Self {
            text,
            negative: bytes.first() == Some(&b'-'),
            mantissa: 0,
            exponent: 0,
            complete: true,
            integer: true,
        };
        let mut digits = 0;
        let mut at = usize::from(number.negative);
        let start = at;
        while let Some(&digit @ b'0'..=b'9') = bytes.get(at) {
            number.push(digit, &mut digits, 0);
            at += 1;
        }
        if at == start {
            return Err((at, "expected a digit"));
        }
        if at > start + 1 && bytes[start] == b'0' {
            return Err((start, "a number with a leading zero"));
        }
        if bytes.get(at) == Some(&b'.') {
            number.integer = false;
            at += 1;
            let fraction = at;
            while let Some(&digit @ b'0'..=b'9') = bytes.get(at) {
                number.push(digit, &mut digits, -1);
                at += 1;
            }
            if at == fraction {
                return Err((at, "expected a digit after the decimal point"));
            }
        }
        if let Some(b'e' | b'E') = bytes.get(at) {
            number.integer = false;
            at += 1;
            let negative = bytes.get(at) == Some(&b'-');
            if let Some(b'+' | b'-') = bytes.get(at) {
                at += 1;
            }
            let start = at;
            let mut exponent = 0;
            while let Some(&digit @ b'0'..=b'9') = bytes.get(at) {
                exponent = EXPONENT_MAX.min(exponent * 10 + i32::from(digit - b'0'));
                at += 1;
            }
            if at == start {
                return Err((at, "expected a digit in the exponent"));
            }
            let exponent = if negative { -exponent } else { exponent };
            number.exponent = number.exponent.saturating_add(exponent);
        }
        number.text = &text[..at];
        Ok(number)
    }

    fn push(&mut self, digit: u8, digits: &mut u32, shift: i32) {
        let digit = u64::from(digit - b'0');
        if *digits < DIGITS_MAX {
            self.mantissa = self.mantissa * 10 + digit;
            // Leading zeros are not digits of the mantissa.
            *digits += u32::from(self.mantissa != 0);
            self.exponent = self.exponent.saturating_add(shift);
        } else {
            self.complete = false;
            self.exponent = self.exponent.saturating_add(shift + 1);
        }
    }

    /// Whether it has neither fraction nor exponent.
    pub(crate) fn is_integer(self) -> bool {
        self.integer
    }

    /// The exact integer.
    pub(crate) fn to_i64(self) -> Result<i64, Fault> {
        if !self.integer {
            return Err(Fault::Fraction);
        }
        if !self.complete {
            return Err(Fault::Range);
        }
        if self.negative {
            0i64.checked_sub_unsigned(self.mantissa).ok_or(Fault::Range)
        } else {
            i64::try_from(self.mantissa).map_err(|_| Fault::Range)
        }
    }

    /// The exact integer.
    pub(crate) fn to_i32(self) -> Result<i32, Fault> {
        i32::try_from(self.to_i64()?).map_err(|_| Fault::Range)
    }

    /// The nearest `f64`; integers must be exact, nothing becomes infinite or vanishes.
    pub(crate) fn to_f64(self) -> Result<f64, Fault> {
        // Both factors exact: one rounding, the right one.
        if self.complete && self.mantissa <= 1 << 53 && self.exponent.unsigned_abs() <= 22 {
            let power = POWERS_F64[self.exponent.unsigned_abs() as usize];
            let mantissa = self.mantissa as f64;
            let value = if self.exponent < 0 { mantissa / power } else { mantissa * power };
            return Ok(if self.negative { -value } else { value });
        }
        let value: f64 = self.text.parse().map_err(|_| Fault::Range)?;
        if value.is_infinite() || (value == 0.0 && self.mantissa != 0) {
            return Err(Fault::Range);
        }
        if self.integer && format!("{value:.0}") != self.text {
            return Err(Fault::Lossy);
        }
        Ok(value)
    }

    /// The nearest `f32`; integers must be exact, nothing becomes infinite or vanishes.
    pub(crate) fn to_f32(self) -> Result<f32, Fault> {
        if self.complete && self.mantissa <= 1 << 24 && self.exponent.unsigned_abs() <= 10 {
            let power = POWERS_F32[self.exponent.unsigned_abs() as usize];
            let mantissa = self.mantissa as f32;
            let value = if self.exponent < 0 { mantissa / power } else { mantissa * power };
            return Ok(if self.negative { -value } else { value });
        }
        let value: f32 = self.text.parse().map_err(|_| Fault::Range)?;
        if value.is_infinite() || (value == 0.0 && self.mantissa != 0) {
            return Err(Fault::Range);
        }
        if self.integer && format!("{value:.0}") != self.text {
            return Err(Fault::Lossy);
        }
        Ok(value)
    }
}
