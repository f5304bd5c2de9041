//! Column types: their names in the configuration and their Arrow form.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, TimeUnit};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Deepest nesting of lists in one type.
const LIST_DEPTH_MAX: usize = 4;
/// Widest fixed list.
const FIXED_LIST_MAX: u32 = 1 << 20;

/// Type of a column, and the JSON that it accepts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Type {
    /// `true` or `false`.
    Bool,
    /// A number without fraction or exponent, in range.
    Int32,
    /// A number without fraction or exponent, in range.
    Int64,
    /// A number, rounded to nearest; an integer that is not exactly representable is refused.
    Float32,
    /// A number, rounded to nearest; an integer that is not exactly representable is refused.
    Float64,
    /// A string.
    Utf8,
    /// A string in standard base64 with padding.
    Binary,
    /// Microseconds since 1970 in UTC: an RFC 3339 string, or an integer of milliseconds.
    Timestamp,
    /// Any JSON value, kept as its text.
    Json,
    /// An array of non-null values.
    List(Box<Type>),
    /// An array of exactly that many non-null values.
    FixedList(Box<Type>, u32),
}

impl Type {
    /// The Arrow type.
    #[must_use]
    pub fn arrow(&self) -> DataType {
        match self {
            Self::Bool => DataType::Boolean,
            Self::Int32 => DataType::Int32,
            Self::Int64 => DataType::Int64,
            Self::Float32 => DataType::Float32,
            Self::Float64 => DataType::Float64,
            Self::Utf8 | Self::Json => DataType::Utf8,
            Self::Binary => DataType::Binary,
            Self::Timestamp => DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into())),
            Self::List(item) => DataType::List(item.item_field()),
            Self::FixedList(item, width) => {
                // FIXED_LIST_MAX keeps the width far below i32::MAX.
                DataType::FixedSizeList(item.item_field(), i32::try_from(*width).unwrap_or(i32::MAX))
            }
        }
    }

    pub(crate) fn item_field(&self) -> Arc<Field> {
        Arc::new(Field::new("item", self.arrow(), false))
    }

    /// Least memory of one value in bytes, null or not.
    pub(crate) fn bytes_min(&self) -> usize {
        match self {
            Self::Bool => 1,
            Self::Int32 | Self::Float32 => 4,
            Self::Int64 | Self::Float64 | Self::Timestamp => 8,
            Self::Utf8 | Self::Json | Self::Binary | Self::List(_) => 4,
            Self::FixedList(item, width) => item.bytes_min().saturating_mul(*width as usize),
        }
    }

    fn depth(&self) -> usize {
        match self {
            Self::List(item) | Self::FixedList(item, _) => 1 + item.depth(),
            _ => 0,
        }
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bool => f.write_str("bool"),
            Self::Int32 => f.write_str("int32"),
            Self::Int64 => f.write_str("int64"),
            Self::Float32 => f.write_str("float32"),
            Self::Float64 => f.write_str("float64"),
            Self::Utf8 => f.write_str("utf8"),
            Self::Binary => f.write_str("binary"),
            Self::Timestamp => f.write_str("timestamp"),
            Self::Json => f.write_str("json"),
            Self::List(item) => write!(f, "list<{item}>"),
            Self::FixedList(item, width) => write!(f, "fixed_list<{item},{width}>"),
        }
    }
}

/// A type name that cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not a type ({why}); types are bool, int32, int64, float32, float64, utf8, \
     binary, timestamp, json, list<T> and fixed_list<T,N>, with ? behind the whole for nullable"
)]
pub struct ParseTypeError {
    text: String,
    why: &'static str,
}

impl FromStr for Type {
    type Err = ParseTypeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fail = |why| ParseTypeError { text: text.chars().take(80).collect(), why };
        // Each level of a list costs at least `list<>`, so long text is refused before recursing.
        if text.len() > 256 {
            return Err(fail("too long"));
        }
        let kind = parse(text).map_err(fail)?;
        if kind.depth() > LIST_DEPTH_MAX {
            return Err(fail("lists nested too deep"));
        }
        Ok(kind)
    }
}

fn parse(text: &str) -> Result<Type, &'static str> {
    let text = text.trim();
    if let Some(inner) = text.strip_prefix("list<").and_then(|t| t.strip_suffix('>')) {
        return Ok(Type::List(Box::new(parse(inner)?)));
    }
    if let Some(inner) = text.strip_prefix("fixed_list<").and_then(|t| t.strip_suffix('>')) {
        let (item, width) = inner.rsplit_once(',').ok_or("no width")?;
        let width: u32 = width.trim().parse().map_err(|_| "width is not a number")?;
        if width == 0 || width > FIXED_LIST_MAX {
            return Err("width must be 1 to 1048576");
        }
        return Ok(Type::FixedList(Box::new(parse(item)?), width));
    }
    Ok(match text {
        "bool" => Type::Bool,
        "int32" => Type::Int32,
        "int64" => Type::Int64,
        "float32" => Type::Float32,
        "float64" => Type::Float64,
        "utf8" => Type::Utf8,
        "binary" => Type::Binary,
        "timestamp" => Type::Timestamp,
        "json" => Type::Json,
        _ => return Err("unknown name"),
    })
}

impl Serialize for Type {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Type {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}
