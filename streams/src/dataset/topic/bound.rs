//! Bounds of a range of a topic as users write them: a number of records, or a time.

use std::fmt;
use std::str::FromStr;

use chrono::{DateTime, NaiveDate, NaiveTime, SecondsFormat, Utc};

/// The first millisecond beyond the years that RFC 3339 can write.
const TIME_END: i64 = 253_402_300_800_000;
/// Most records that a bound may name: the most rows of a dataset.
const ROWS_MAX: u64 = 1 << 56;

/// The beginning of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Since {
    /// The first record that each partition holds when the range is resolved.
    #[default]
    Earliest,
    /// In each partition the first record with this timestamp or a later one, in milliseconds since 1970-01-01 UTC.
    Time(i64),
}

/// The end of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Until {
    /// The records that have arrived when the range is resolved.
    #[default]
    Latest,
    /// In each partition the records before the first one with this timestamp or a later one, in milliseconds since
    /// 1970-01-01 UTC.
    Time(i64),
    /// This many rows, from all partitions evenly: the next row is one of the partition that has given the fewest. At
    /// least 1.
    Rows(u64),
}

impl FromStr for Since {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "earliest" => Ok(Since::Earliest),
            text => time(text).map(Since::Time).ok_or_else(|| {
                format!("{text:?} is neither \"earliest\" nor a time such as 2026-11-28T06:00:00Z")
            }),
        }
    }
}

impl FromStr for Until {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "latest" {
            return Ok(Until::Latest);
        }
        if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
            let rows = text.parse().ok().filter(|rows| (1..=ROWS_MAX).contains(rows));
            return rows
                .map(Until::Rows)
                .ok_or_else(|| format!("{text} records; the number must be 1 to {ROWS_MAX}"));
        }
        time(text).map(Until::Time).ok_or_else(|| {
            format!(
                "{text:?} is neither \"latest\", nor a number of records, nor a time such as 2026-11-28T06:00:00Z"
            )
        })
    }
}

impl fmt::Display for Since {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Since::Earliest => f.write_str("earliest"),
            Since::Time(milliseconds) => f.write_str(&shown(*milliseconds)),
        }
    }
}

impl fmt::Display for Until {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Until::Latest => f.write_str("latest"),
            Until::Time(milliseconds) => f.write_str(&shown(*milliseconds)),
            Until::Rows(rows) => rows.fmt(f),
        }
    }
}

/// A time of RFC 3339, or a date, which begins at midnight UTC. Milliseconds since 1970-01-01 UTC, not before it and not
/// beyond the year 9999.
fn time(text: &str) -> Option<i64> {
    let at = match DateTime::parse_from_rfc3339(text) {
        Ok(at) => at.with_timezone(&Utc),
        Err(_) => text.parse::<NaiveDate>().ok()?.and_time(NaiveTime::MIN).and_utc(),
    };
    Some(at.timestamp_millis()).filter(|milliseconds| (0..TIME_END).contains(milliseconds))
}

/// A time as RFC 3339 writes it.
pub(super) fn shown(milliseconds: i64) -> String {
    DateTime::from_timestamp_millis(milliseconds)
        .map_or_else(|| milliseconds.to_string(), |at| at.to_rfc3339_opts(SecondsFormat::AutoSi, true))
}
