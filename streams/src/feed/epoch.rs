//! Epochs: stretches of the endless sequence of places, of all rows or of a part of them.
//!
//! A pass over `N` rows is `N` places, and passes follow one another. An epoch of `q` rows, `q` a number or the
//! fraction `f·N`, is the places `[⌊e·q⌋, ⌊(e+1)·q⌋)`. Epochs therefore go on where the one before ended, and every
//! row comes once before any row comes again. The order itself does not depend on the length of an epoch.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::feed::decimal;
use crate::feed::error::{FeedError, Result};

/// Digits after the point of a fraction.
const DIGITS: usize = 18;
const ONE: u64 = 1_000_000_000_000_000_000;

/// Rows of an epoch, where these are not all rows.
///
/// As a text, a whole number counts rows, and a number with a point is a fraction of the rows: `1000`, `0.25`.
///
/// ```
/// use millrace_streams::feed::{EpochRows, Epochs};
/// let quarter: EpochRows = "0.25".parse()?;
/// let epochs = Epochs::new(1_001, Some(quarter))?;
/// assert_eq!(epochs.places(0..1), 0..250);
/// assert_eq!(epochs.places(3..4), 750..1_001);
/// # Ok::<(), millrace_streams::feed::FeedError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum EpochRows {
    /// A number of rows, at least 1.
    Rows(u64),
    /// A fraction of the rows in units of 10⁻¹⁸, above 0 and at most 1.
    Fraction(u64),
}

impl FromStr for EpochRows {
    type Err = FeedError;

    fn from_str(text: &str) -> Result<Self> {
        let invalid = || {
            FeedError::invalid(format!(
                "rows_per_epoch is {text:?}; it must be a number of rows, such as 10000, or a fraction with a point, \
                 such as 0.25, of at most 18 digits"
            ))
        };
        if text.contains('.') {
            let units = decimal::parse(text, DIGITS).and_then(|units| u64::try_from(units).ok());
            return units.filter(|units| (1..=ONE).contains(units)).map(Self::Fraction).ok_or_else(invalid);
        }
        let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let rows = text.parse().ok().filter(|rows| is_number && *rows > 0);
        rows.map(Self::Rows).ok_or_else(invalid)
    }
}

impl fmt::Display for EpochRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rows(rows) => write!(f, "{rows}"),
            Self::Fraction(ONE) => f.write_str("1.0"),
            Self::Fraction(units) => f.write_str(&decimal::show(u128::from(*units), DIGITS)),
        }
    }
}

impl TryFrom<String> for EpochRows {
    type Error = FeedError;
    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<EpochRows> for String {
    fn from(rows: EpochRows) -> String {
        rows.to_string()
    }
}

/// The places of each epoch of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Epochs {
    /// Rows of an epoch: `rows / denominator`, at least 1.
    rows: u128,
    denominator: u128,
}

impl Epochs {
    /// Epochs of `length` over `rows` rows, at least 1; of all rows without a length.
    ///
    /// # Errors
    /// [`FeedError::Invalid`] for more rows than there are, and for a fraction of less than one row.
    pub fn new(rows: u64, length: Option<EpochRows>) -> Result<Self> {
        let rows = rows.max(1);
        match length {
            None => Ok(Self { rows: rows.into(), denominator: 1 }),
            Some(EpochRows::Rows(count)) if count > rows => Err(FeedError::invalid(format!(
                "rows_per_epoch is {count}, but there are {rows} rows; leave it out to read all of them in each epoch"
            ))),
            Some(EpochRows::Rows(count)) => Ok(Self { rows: count.into(), denominator: 1 }),
            Some(EpochRows::Fraction(part)) => {
                let part = u128::from(rows) * u128::from(part);
                if part < u128::from(ONE) {
                    let length = EpochRows::Fraction((part / u128::from(rows)) as u64);
                    return Err(FeedError::invalid(format!(
                        "rows_per_epoch is {length} of {rows} rows, less than one row; raise it"
                    )));
                }
                Ok(Self { rows: part, denominator: ONE.into() })
            }
        }
    }

    /// The first place of an epoch, which is the end of the one before. Saturates.
    pub fn start(&self, epoch: u64) -> u64 {
        let place = u128::from(epoch).checked_mul(self.rows).map(|rows| rows / self.denominator);
        place.and_then(|place| u64::try_from(place).ok()).unwrap_or(u64::MAX)
    }

    /// The places of consecutive epochs.
    pub fn places(&self, epochs: Range<u64>) -> Range<u64> {
        self.start(epochs.start)..self.start(epochs.end)
    }

    /// The epoch of a place. It is the number of whole epochs before that place, too.
    pub fn of_place(&self, place: u64) -> u64 {
        // The greatest e with ⌊e·q⌋ ≤ place, which is e·q < place + 1.
        let after = ((u128::from(place) + 1) * self.denominator).div_ceil(self.rows);
        u64::try_from(after - 1).unwrap_or(u64::MAX)
    }

    /// The smallest number of batches of `batch_rows` rows that have all rows of the first `epochs` epochs.
    pub fn steps(&self, epochs: u64, batch_rows: u64) -> u64 {
        self.start(epochs).div_ceil(batch_rows.max(1))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lengths() -> impl Strategy<Value = Option<EpochRows>> {
        prop_oneof![
            Just(None),
            (1u64..40).prop_map(|rows| Some(EpochRows::Rows(rows))),
            (1u64..=1000).prop_map(|part| Some(EpochRows::Fraction(part * (ONE / 1000)))),
        ]
    }

    proptest! {
        #[test]
        fn epochs_are_consecutive_and_of_the_given_size(rows in 1u64..5000, length in lengths()) {
            let Ok(epochs) = Epochs::new(rows, length) else {
                let refused = match length {
                    Some(EpochRows::Rows(count)) => count > rows,
                    Some(EpochRows::Fraction(part)) => u128::from(part) * u128::from(rows) < u128::from(ONE),
                    None => false,
                };
                prop_assert!(refused);
                return Ok(());
            };
            let mut place = 0;
            for epoch in 0..50 {
                let places = epochs.places(epoch..epoch + 1);
                prop_assert_eq!(places.start, place);
                place = places.end;
                for inside in [places.start, places.end - 1] {
                    prop_assert_eq!(epochs.of_place(inside), epoch);
                }
                match length {
                    None => prop_assert_eq!(places.end - places.start, rows),
                    Some(EpochRows::Rows(count)) => prop_assert_eq!(places.end - places.start, count),
                    Some(EpochRows::Fraction(part)) => {
                        let exact = part as f64 / ONE as f64 * rows as f64;
                        prop_assert!(((places.end - places.start) as f64 - exact).abs() < 1.000_001);
                    }
                }
            }
        }
    }

    #[test]
    fn a_tenth_makes_a_pass_of_ten_epochs() {
        let epochs = Epochs::new(1_437, Some("0.1".parse().unwrap())).unwrap();
        assert_eq!(epochs.start(10), 1_437);
        assert_eq!(epochs.start(20), 2 * 1_437);
        assert_eq!(epochs.steps(10, 100), 15);
        assert_eq!((epochs.start(u64::MAX), epochs.of_place(u64::MAX) > 1 << 56), (u64::MAX, true));
    }

    #[test]
    fn lengths_are_read_and_printed_exactly() {
        for text in ["1", "1000", "0.25", "1.0", "0.000000000000000001"] {
            let length: EpochRows = text.parse().unwrap();
            assert_eq!(length.to_string(), text);
            let stored = serde_json::to_string(&length).unwrap();
            assert_eq!(serde_json::from_str::<EpochRows>(&stored).unwrap(), length);
        }
        for text in ["", "0", "0.0", "1.1", "-1", "+1", "1e3", "all", "0.0000000000000000001"] {
            let refused = text.parse::<EpochRows>().unwrap_err().to_string();
            assert!(refused.contains("rows_per_epoch"), "{refused}");
        }
        assert!(Epochs::new(10, Some(EpochRows::Rows(11))).is_err());
        assert!(Epochs::new(3, Some("0.3".parse().unwrap())).is_err());
    }
}
