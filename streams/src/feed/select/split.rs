//! Split of a dataset by a hash of key columns: the same rows in the same part, whatever the files and readers.

use std::fmt;

use sha2::{Digest, Sha256};

use super::value::Value;
use crate::feed::error::{FeedError, Result};

/// Most parts of a split.
const PARTS_MAX: usize = 64;
/// Most key columns.
const KEYS_MAX: usize = 16;
/// Digits after the point of a fraction.
const DIGITS: usize = 18;
/// The fraction 1.
const ONE: u64 = 1_000_000_000_000_000_000;
/// First bytes of what is hashed: another version of the rules has another text.
const DOMAIN: &[u8] = b"millrace split 1";

/// An exact decimal fraction above 0 and at most 1, in units of 10⁻¹⁸.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Fraction(u64);

/// Parts of a dataset, of which one is taken.
///
/// A row belongs to the part into whose range the hash of its key falls. The ranges follow one another in the
/// order of the parts, from 0. Rows whose hash is beyond the last range are in no part.
///
/// The hash is the first 8 bytes, big endian, of the SHA-256 of `millrace split 1` and the encoded values of the
/// key columns. A value is a byte for its kind and its bytes, numbers little endian: `0` null; `1` an integer of
/// 16 bytes; `2` a flag, one byte; `3` a float of 8 bytes (0 for −0, 0x7ff8000000000000 for NaN); `4` a text and
/// `5` bytes, each after its length of 8 bytes; `6` a time, nanoseconds since 1970 in 16 bytes. Without key
/// columns the key is `7`, the path of the row's file in the volume as a text without kind, and the row's number
/// in the file in 8 bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Split {
    parts: Vec<(String, Fraction)>,
    take: usize,
    by: Vec<String>,
}

impl Split {
    /// The part `take` of `parts`, names with fractions as decimal texts, by the key columns `by`: none for the
    /// file and number of the row.
    ///
    /// # Errors
    /// [`FeedError::Invalid`] for fractions that are not above 0 or exceed 1 together. The same for a part or a key
    /// column that is named twice, and for a part that does not exist.
    pub fn new(parts: &[(String, String)], take: &str, by: &[String]) -> Result<Self> {
        let shown =
            || parts.iter().map(|(name, part)| format!("{name}={part}")).collect::<Vec<_>>().join(",");
        if parts.is_empty() || parts.len() > PARTS_MAX {
            let count = parts.len();
            return Err(FeedError::invalid(format!(
                "splits has {count} parts; it must have 1 to {PARTS_MAX}"
            )));
        }
        let mut total = 0u64;
        let mut read = Vec::with_capacity(parts.len());
        for (at, (name, fraction)) in parts.iter().enumerate() {
            if name.is_empty() || parts.iter().take(at).any(|(other, _)| other == name) {
                let what = if name.is_empty() { "a part without a name" } else { "two parts of one name" };
                return Err(FeedError::invalid(format!("splits {}: {what} ({name:?})", shown())));
            }
            let fraction = Fraction::parse(name, fraction)?;
            total = total.saturating_add(fraction.0);
            read.push((name.clone(), fraction));
        }
        if total > ONE {
            let sum = Fraction(total);
            return Err(FeedError::invalid(format!(
                "splits {}: the parts are {sum} together, more than 1",
                shown()
            )));
        }
        let Some(taken) = read.iter().position(|(name, _)| name == take) else {
            let names: Vec<&str> = read.iter().map(|(name, _)| name.as_str()).collect();
            return Err(FeedError::invalid(format!(
                "split {take:?} is not a part of splits: {}",
                names.join(", ")
            )));
        };
        if by.len() > KEYS_MAX {
            let count = by.len();
            return Err(FeedError::invalid(format!(
                "split_by has {count} columns; at most {KEYS_MAX} are possible"
            )));
        }
        if let Some((_, twice)) =
            by.iter().enumerate().find(|(at, name)| by.iter().take(*at).any(|other| other == *name))
        {
            return Err(FeedError::invalid(format!("split_by names column {twice:?} twice")));
        }
        Ok(Self { parts: read, take: taken, by: by.to_vec() })
    }

    /// The parts with their fractions.
    pub(super) fn parts(&self) -> Vec<(String, String)> {
        self.parts.iter().map(|(name, fraction)| (name.clone(), fraction.to_string())).collect()
    }

    /// The part that is taken.
    pub(super) fn taken(&self) -> &str {
        self.parts.get(self.take).map_or("", |(name, _)| name)
    }

    /// The key columns.
    pub(super) fn by(&self) -> &[String] {
        &self.by
    }

    /// The hashes of the part that is taken.
    pub(super) fn range(&self) -> HashRange {
        let before: u64 = self.parts.iter().take(self.take).map(|(_, fraction)| fraction.0).sum();
        let own = self.parts.get(self.take).map_or(0, |(_, fraction)| fraction.0);
        // Both are at most 1, so the products fit 128 bits.
        let bound = |fraction: u64| (u128::from(fraction) << 64) / u128::from(ONE);
        HashRange { from: bound(before), to: bound(before + own) }
    }
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "split {:?} of ", self.taken())?;
        for (at, (name, fraction)) in self.parts.iter().enumerate() {
            write!(f, "{}{name:?}={fraction}", if at > 0 { "," } else { "" })?;
        }
        match self.by.as_slice() {
            [] => write!(f, " by file and row"),
            by => write!(f, " by {by:?}"),
        }
    }
}

/// A range of hashes.
#[derive(Debug, Clone, Copy)]
pub(super) struct HashRange {
    from: u128,
    to: u128,
}

impl HashRange {
    pub(super) fn contains(self, hash: u64) -> bool {
        (self.from..self.to).contains(&u128::from(hash))
    }
}

/// The hash of the values of key columns.
pub(super) fn hash_of_key<'a>(values: impl Iterator<Item = Value<'a>>) -> u64 {
    let mut hash = Sha256::new_with_prefix(DOMAIN);
    for value in values {
        match value {
            // Types without a kind are refused as keys, and no column has a number above an integer.
            Value::Null | Value::Other | Value::Above(_) => hash.update([0]),
            Value::Integer(number) => {
                hash.update([1]);
                hash.update(number.to_le_bytes());
            }
            Value::Flag(flag) => hash.update([2, u8::from(flag)]),
            Value::Float(number) => {
                hash.update([3]);
                let bits = match number {
                    _ if number.is_nan() => 0x7ff8_0000_0000_0000,
                    0.0 => 0,
                    _ => number.to_bits(),
                };
                hash.update(bits.to_le_bytes());
            }
            Value::Text(text) => {
                hash.update([4]);
                hash.update((text.len() as u64).to_le_bytes());
                hash.update(text);
            }
            Value::Bytes(bytes) => {
                hash.update([5]);
                hash.update((bytes.len() as u64).to_le_bytes());
                hash.update(bytes);
            }
            Value::Time(nanoseconds) => {
                hash.update([6]);
                hash.update(nanoseconds.to_le_bytes());
            }
        }
    }
    first_bytes(hash)
}

/// The hash of a row without key columns.
pub(super) fn hash_of_row(file: &str, row: u64) -> u64 {
    let mut hash = Sha256::new_with_prefix(DOMAIN);
    hash.update([7]);
    hash.update((file.len() as u64).to_le_bytes());
    hash.update(file);
    hash.update(row.to_le_bytes());
    first_bytes(hash)
}

fn first_bytes(hash: Sha256) -> u64 {
    hash.finalize().first_chunk::<8>().map_or(0, |bytes| u64::from_be_bytes(*bytes))
}

impl Fraction {
    /// The fraction of a part.
    fn parse(part: &str, text: &str) -> Result<Self> {
        let invalid = |reason: &str| FeedError::invalid(format!("splits, part {part:?}: {text:?} {reason}"));
        let no_fraction = || invalid("is not a decimal fraction above 0 and at most 1, for example 0.8");
        let (whole, digits) = text.split_once('.').unwrap_or((text, ""));
        let is_number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        if whole.len() + digits.len() == 0 || !is_number(whole) || !is_number(digits) {
            return Err(no_fraction());
        }
        let (whole, digits) = (whole.trim_start_matches('0'), digits.trim_end_matches('0'));
        if digits.len() > DIGITS {
            return Err(invalid("has more than 18 digits after the point"));
        }
        let padded = format!("{whole}{digits:0<DIGITS$}");
        let value = padded.parse().ok().filter(|value| (1..=ONE).contains(value));
        value.map(Self).ok_or_else(no_fraction)
    }
}

impl fmt::Display for Fraction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = format!("{}.{:0>DIGITS$}", self.0 / ONE, self.0 % ONE);
        f.write_str(text.trim_end_matches('0').trim_end_matches('.'))
    }
}
