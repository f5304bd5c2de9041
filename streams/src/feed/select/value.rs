//! Values of the columns by which rows are selected.

use std::cmp::Ordering;
use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, BooleanArray, Float64Array, Int64Array, LargeBinaryArray, LargeStringArray,
    UInt64Array,
};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Float64Type, Int64Type, TimeUnit, UInt64Type};
use arrow::error::ArrowError;

/// Kinds of values: those of one kind compare and hash alike, whatever the width of their column's type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Flag,
    Integer,
    Float,
    Text,
    Bytes,
    Time,
}

/// The value of one row.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Value<'a> {
    Null,
    Flag(bool),
    Integer(i128),
    Float(f64),
    /// A number of a filter between this integer and the next one; no column has it.
    Above(i128),
    Text(&'a str),
    Bytes(&'a [u8]),
    /// Nanoseconds since 1970 in UTC.
    Time(i128),
    /// A value of a type without a [`Kind`], of which only null is known.
    Other,
}

/// The values of some rows of one column.
pub(crate) enum Values {
    Flags(BooleanArray),
    Signed(Int64Array),
    Unsigned(UInt64Array),
    Floats(Float64Array),
    Texts(LargeStringArray),
    Bytes(LargeBinaryArray),
    /// Times with the nanoseconds of their unit.
    Times(Int64Array, i128),
    /// Values of a type without a [`Kind`].
    Others(ArrayRef),
}

impl Kind {
    /// The kind of a type; `None` for types by which rows cannot be selected.
    pub(crate) fn of(data_type: &DataType) -> Option<Kind> {
        match data_type {
            DataType::Boolean => Some(Kind::Flag),
            kind if kind.is_integer() => Some(Kind::Integer),
            DataType::Float16 | DataType::Float32 | DataType::Float64 => Some(Kind::Float),
            DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => Some(Kind::Text),
            DataType::Binary
            | DataType::LargeBinary
            | DataType::BinaryView
            | DataType::FixedSizeBinary(_) => Some(Kind::Bytes),
            DataType::Date32 | DataType::Date64 | DataType::Timestamp(..) => Some(Kind::Time),
            _ => None,
        }
    }

    pub(crate) fn is_number(self) -> bool {
        matches!(self, Kind::Integer | Kind::Float)
    }
}

impl Values {
    pub(crate) fn new(array: &ArrayRef) -> Result<Values, ArrowError> {
        let Some(kind) = Kind::of(array.data_type()) else { return Ok(Values::Others(Arc::clone(array))) };
        let signed = || cast(array, &DataType::Int64).map(|array| array.as_primitive::<Int64Type>().clone());
        Ok(match kind {
            Kind::Flag => Values::Flags(array.as_boolean().clone()),
            Kind::Integer if *array.data_type() == DataType::UInt64 => {
                Values::Unsigned(array.as_primitive::<UInt64Type>().clone())
            }
            Kind::Integer => Values::Signed(signed()?),
            Kind::Float => {
                Values::Floats(cast(array, &DataType::Float64)?.as_primitive::<Float64Type>().clone())
            }
            Kind::Text => Values::Texts(cast(array, &DataType::LargeUtf8)?.as_string::<i64>().clone()),
            Kind::Bytes => Values::Bytes(cast(array, &DataType::LargeBinary)?.as_binary::<i64>().clone()),
            Kind::Time => Values::Times(signed()?, nanoseconds(array.data_type())),
        })
    }

    pub(crate) fn get(&self, row: usize) -> Value<'_> {
        let array: &dyn Array = match self {
            Values::Flags(array) => array,
            Values::Signed(array) | Values::Times(array, _) => array,
            Values::Unsigned(array) => array,
            Values::Floats(array) => array,
            Values::Texts(array) => array,
            Values::Bytes(array) => array,
            Values::Others(array) => array,
        };
        // The nulls of a column that has nothing else are not marked.
        if array.is_null(row) || *array.data_type() == DataType::Null {
            return Value::Null;
        }
        match self {
            Values::Flags(array) => Value::Flag(array.value(row)),
            Values::Signed(array) => Value::Integer(array.value(row).into()),
            Values::Unsigned(array) => Value::Integer(array.value(row).into()),
            Values::Floats(array) => Value::Float(array.value(row)),
            Values::Texts(array) => Value::Text(array.value(row)),
            Values::Bytes(array) => Value::Bytes(array.value(row)),
            Values::Times(array, unit) => Value::Time(i128::from(array.value(row)) * unit),
            Values::Others(_) => Value::Other,
        }
    }
}

/// Nanoseconds of the unit in which a type counts times.
fn nanoseconds(data_type: &DataType) -> i128 {
    match data_type {
        DataType::Date32 => 86_400_000_000_000,
        DataType::Timestamp(TimeUnit::Second, _) => 1_000_000_000,
        DataType::Date64 | DataType::Timestamp(TimeUnit::Millisecond, _) => 1_000_000,
        DataType::Timestamp(TimeUnit::Microsecond, _) => 1_000,
        _ => 1,
    }
}

impl Value<'_> {
    pub(crate) fn is_null(self) -> bool {
        matches!(self, Value::Null)
    }

    /// The order of two values that are not null; `None` for NaN and for kinds that do not compare.
    pub(crate) fn order(self, other: Value<'_>) -> Option<Ordering> {
        match (self, other) {
            (Value::Flag(a), Value::Flag(b)) => Some(a.cmp(&b)),
            (Value::Integer(a), Value::Integer(b)) | (Value::Time(a), Value::Time(b)) => Some(a.cmp(&b)),
            (Value::Float(a), Value::Float(b)) => a.partial_cmp(&b),
            (Value::Integer(a), Value::Float(b)) => integer_with_float(a, b),
            (Value::Float(a), Value::Integer(b)) => integer_with_float(b, a).map(Ordering::reverse),
            (Value::Integer(a), Value::Above(b)) => Some(a.cmp(&b).then(Ordering::Less)),
            (Value::Above(a), Value::Integer(b)) => Some(a.cmp(&b).then(Ordering::Greater)),
            (Value::Text(a), Value::Text(b)) => Some(a.as_bytes().cmp(b.as_bytes())),
            (Value::Bytes(a), Value::Bytes(b)) => Some(a.cmp(b)),
            _ => None,
        }
    }
}

/// The exact order of an integer and a float: neither is rounded.
fn integer_with_float(integer: i128, float: f64) -> Option<Ordering> {
    if float.is_nan() {
        return None;
    }
    let whole = float.floor();
    let fraction = if float > whole { Ordering::Less } else { Ordering::Equal };
    // Infinities become the least and the greatest integer, which no column has.
    Some(integer.cmp(&(whole as i128)).then(fraction))
}
