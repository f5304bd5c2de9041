//! Literals of filters that no 64-bit float holds exactly enough to compare them with integers.

/// A number with a point or an exponent that a float rounds to, or across, an integer of 64 bits.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Decimal {
    /// The number as it was written: any shorter form could round another way.
    text: String,
    /// The number for columns of floats.
    float: f64,
    place: Place,
}

/// Where a number lies among the integers: at `floor`, or between it and the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    floor: i128,
    is_whole: bool,
}

/// Digits of the largest integer of 64 bits.
const DIGITS_MAX: i64 = 20;

impl Decimal {
    /// The number of a text and its nearest float, which is finite; `None` where the float does for integers, too.
    pub(super) fn new(text: &str, float: f64) -> Option<Self> {
        let place = Place::of_text(text)?;
        let text = text.strip_prefix('+').unwrap_or(text).to_owned();
        (place.seen() != Place::of_float(float).seen()).then_some(Self { text, float, place })
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }

    pub(super) fn float(&self) -> f64 {
        self.float
    }

    /// The greatest integer that is not above the number.
    pub(super) fn floor(&self) -> i128 {
        self.place.floor
    }

    pub(super) fn is_whole(&self) -> bool {
        self.place.is_whole
    }
}

impl Place {
    fn of_float(float: f64) -> Self {
        let floor = float.floor();
        // Conversion saturates, far beyond all integers of columns.
        Self { floor: floor as i128, is_whole: float <= floor }
    }

    /// The place of a decimal number; `None` far beyond 64 bits. The work is bounded by the text, whatever its exponent.
    fn of_text(text: &str) -> Option<Self> {
        let is_negative = text.starts_with('-');
        let text = text.trim_start_matches(['-', '+']);
        let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let exponent = exponent.parse().unwrap_or(match exponent.starts_with('-') {
            true => i64::MIN,
            false => i64::MAX,
        });
        let digits = [whole, fraction].concat();
        let significant = digits.trim_start_matches('0');
        let zeros = digits.len() - significant.len();
        let significant = significant.trim_end_matches('0');
        if significant.is_empty() {
            return Some(Self { floor: 0, is_whole: true });
        }
        // Digits before the point: lengths of texts fit.
        let before = i64::try_from(whole.len()).ok()?.saturating_sub(i64::try_from(zeros).ok()?);
        let before = before.saturating_add(exponent);
        if before > DIGITS_MAX {
            return None;
        }
        let before = usize::try_from(before).unwrap_or(0);
        let magnitude = significant
            .bytes()
            .chain(std::iter::repeat(b'0'))
            .take(before)
            .fold(0i128, |sum, digit| sum * 10 + i128::from(digit.saturating_sub(b'0')));
        let is_whole = significant.len() <= before;
        Some(Self {
            floor: match (is_negative, is_whole) {
                (false, _) => magnitude,
                (true, true) => -magnitude,
                (true, false) => -magnitude - 1,
            },
            is_whole,
        })
    }

    /// The place as integers of 64 bits see it: all places beyond them are one.
    fn seen(self) -> Self {
        let (least, most) = (i128::from(i64::MIN), i128::from(u64::MAX));
        match self.floor {
            floor if floor < least => Self { floor: least - 1, is_whole: true },
            floor if floor > most => Self { floor: most + 1, is_whole: true },
            _ => self,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_decimal_texts_are_exact() {
        let place = |text: &str| Place::of_text(text).map(|place| (place.floor, place.is_whole));
        for (text, expected) in [
            ("9007199254740993.0", Some((9_007_199_254_740_993, true))),
            ("9007199254740992.5", Some((9_007_199_254_740_992, false))),
            ("-9007199254740992.5", Some((-9_007_199_254_740_993, false))),
            ("0.0009007199254740993e19", Some((9_007_199_254_740_993, true))),
            ("900719925474099300e-2", Some((9_007_199_254_740_993, true))),
            ("90071992547409935e-1", Some((9_007_199_254_740_993, false))),
            ("+12E1", Some((120, true))),
            (".5", Some((0, false))),
            ("-.5", Some((-1, false))),
            ("-0.0", Some((0, true))),
            ("0e99999999999999999999", Some((0, true))),
            ("1e-99999999999999999999", Some((0, false))),
            ("-1e-400", Some((-1, false))),
            ("1e19", Some((10_000_000_000_000_000_000, true))),
            ("1e20", None),
        ] {
            assert_eq!(place(text), expected, "{text}");
        }
    }
}
