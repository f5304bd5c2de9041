//! Reasons for dead letters: the text, and its class for metrics.

use std::fmt;

use millrace_leaf::quoting::{self, quote};

use super::{Limits, Scanner};
use crate::schema::{Field, SchemaError, Type};

/// Longest value inside a reason, in characters.
const VALUE_CHARS_MAX: usize = 60;

/// Class of a reason: the label of the dead-letter metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RejectClass {
    /// A record without a value (a tombstone).
    NoValue,
    /// Longer than the limit, too deep, or too many fields.
    TooLarge,
    /// Not UTF-8.
    NotUtf8,
    /// Not JSON.
    NotJson,
    /// JSON, but not an object.
    NotAnObject,
    /// A field occurs twice.
    DuplicateField,
    /// A required field is missing or null.
    MissingField,
    /// A field that has no column.
    UnknownField,
    /// A value of another type than its column.
    WrongType,
    /// A value of the right type that does not fit without loss.
    OutOfRange,
    /// A batch of the topic that cannot be decoded; it counts as one dead letter.
    Undecodable,
}

impl RejectClass {
    /// The metric label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::NoValue => "no_value",
            Self::TooLarge => "too_large",
            Self::NotUtf8 => "not_utf8",
            Self::NotJson => "not_json",
            Self::NotAnObject => "not_an_object",
            Self::DuplicateField => "duplicate_field",
            Self::MissingField => "missing_field",
            Self::UnknownField => "unknown_field",
            Self::WrongType => "wrong_type",
            Self::OutOfRange => "out_of_range",
            Self::Undecodable => "undecodable",
        }
    }
}

/// Reason why a record became a dead letter.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Reject {
    /// Class, for counting.
    pub class: RejectClass,
    /// The reason, for people: names the field and what was expected.
    pub reason: String,
}

/// Defect of one value, before the column's name is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Not JSON at that byte.
    Syntax { at: usize, what: &'static str },
    /// Nested deeper than that.
    Deep { max: usize },
    /// A value of another type.
    Found(super::Kind),
    /// `null` where a value is required.
    Null,
    /// An integer was expected and the number has a fraction or an exponent.
    Fraction,
    /// A number outside the column's range.
    Range,
    /// A value that the column's type cannot hold exactly.
    Lossy,
    /// A fixed list of another length.
    Length { found: usize },
    /// Text that is not what the column's type needs.
    Text(&'static str),
}

impl Reject {
    /// The reject of a batch with the offsets `first..next`.
    pub(crate) fn undecodable((first, next): (i64, i64), reason: &str) -> Self {
        let last = next - 1;
        let reason = format!("the batch with offsets {first} to {last} cannot be decoded: {reason}");
        Self { class: RejectClass::Undecodable, reason }
    }
}

/// A value as the record has it, on one line and shortened.
fn shown(rest: &str, limits: &Limits) -> String {
    let value = Scanner::value_of(rest, limits);
    quoting::shorten(value, VALUE_CHARS_MAX).replace(char::is_control, " ")
}

impl Reject {
    fn new(class: RejectClass, reason: impl fmt::Display) -> Self {
        Self { class, reason: reason.to_string() }
    }

    pub(crate) fn no_value() -> Self {
        Self::new(RejectClass::NoValue, "no value (a tombstone)")
    }

    pub(crate) fn too_large(bytes: usize, max: usize) -> Self {
        Self::new(RejectClass::TooLarge, format_args!("{bytes} bytes, record_bytes_max is {max}"))
    }

    pub(crate) fn not_utf8(at: usize) -> Self {
        Self::new(RejectClass::NotUtf8, format_args!("not UTF-8 at byte {at}"))
    }

    pub(crate) fn too_many_fields(max: usize) -> Self {
        Self::new(RejectClass::TooLarge, format_args!("more than {max} fields"))
    }

    pub(crate) fn too_many_columns(max: usize) -> Self {
        Self::new(RejectClass::TooLarge, format_args!("its new fields would make more than {max} columns"))
    }

    pub(crate) fn not_an_object(found: super::Kind) -> Self {
        Self::new(RejectClass::NotAnObject, format_args!("expected a JSON object, found {found}"))
    }

    pub(crate) fn duplicate(name: &str) -> Self {
        Self::new(RejectClass::DuplicateField, format_args!("field {} appears twice", quote(name)))
    }

    pub(crate) fn missing(name: &str) -> Self {
        Self::new(RejectClass::MissingField, format_args!("required field {} is missing", quote(name)))
    }

    pub(crate) fn unknown(name: &str) -> Self {
        Self::new(RejectClass::UnknownField, format_args!("field {} is not in the schema", quote(name)))
    }

    pub(crate) fn bad_name(error: &SchemaError) -> Self {
        Self::new(RejectClass::UnknownField, error)
    }

    pub(crate) fn no_columns() -> Self {
        Self::new(RejectClass::MissingField, "an object without any value")
    }

    /// The reject of a number in a field without a column, which no column type can hold.
    pub(crate) fn beyond(name: &str, rest: &str, limits: &Limits) -> Self {
        let (name, value) = (quote(name), shown(rest, limits));
        Self::new(
            RejectClass::OutOfRange,
            format_args!(
                "field {name}: neither int64 nor float64 can hold this number, a declared column of type json can: \
                 {value}"
            ),
        )
    }

    /// The reject of a value that its column does not take; `rest` is the record's text from the value on.
    pub(crate) fn of_column(field: &Field, fault: Fault, rest: &str, limits: &Limits) -> Self {
        let name = quote(&field.name);
        let kind = &field.kind;
        let reject = Self::of_fault(&name, kind, fault);
        match fault {
            // These reasons are complete without the value, and the record may end there.
            Fault::Syntax { .. } | Fault::Deep { .. } | Fault::Null => reject,
            _ => Self::new(reject.class, format_args!("{}: {}", reject.reason, shown(rest, limits))),
        }
    }

    fn of_fault(name: &str, kind: &Type, fault: Fault) -> Self {
        match fault {
            Fault::Syntax { .. } | Fault::Deep { .. } => Self::from(fault),
            Fault::Found(found) => Self::new(
                RejectClass::WrongType,
                format_args!("field {name}: expected {kind}, found {found}"),
            ),
            Fault::Null => Self::new(
                RejectClass::MissingField,
                format_args!("field {name}: null where {kind} is required"),
            ),
            Fault::Fraction => Self::new(
                RejectClass::WrongType,
                format_args!("field {name}: expected {kind}, found a number with a fraction or exponent"),
            ),
            Fault::Range => Self::new(
                RejectClass::OutOfRange,
                format_args!("field {name}: a number out of the range of {kind}"),
            ),
            Fault::Lossy => Self::new(
                RejectClass::OutOfRange,
                format_args!("field {name}: {kind} cannot hold this value exactly"),
            ),
            Fault::Length { found } => Self::new(
                RejectClass::WrongType,
                format_args!("field {name}: expected {kind}, found an array of {found}"),
            ),
            Fault::Text(what) => Self::new(
                RejectClass::WrongType,
                format_args!("field {name}: expected {kind}, found a string that is not {what}"),
            ),
        }
    }
}

impl From<Fault> for Reject {
    /// A fault outside any column: only syntax and depth occur there.
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Syntax { at, what } => {
                Self::new(RejectClass::NotJson, format_args!("not JSON at byte {at}: {what}"))
            }
            Fault::Deep { max } => {
                Self::new(RejectClass::TooLarge, format_args!("nested deeper than {max} levels"))
            }
            Fault::Found(found) => Self::not_an_object(found),
            Fault::Null
            | Fault::Fraction
            | Fault::Range
            | Fault::Lossy
            | Fault::Length { .. }
            | Fault::Text(_) => Self::new(RejectClass::WrongType, "a value of another type"),
        }
    }
}
