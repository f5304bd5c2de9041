//! Documents: the lists of a column of tokens, checked and brought to one of two types.

use std::ops::Range;

use arrow::array::{Array, ArrayRef, AsArray, LargeListArray, UInt64Array};
use arrow::compute::{CastOptions, cast_with_options, min, take};
use arrow::datatypes::{ArrowNumericType, DataType, Field, Int32Type, Int64Type};

use super::UnitTokens;
use crate::feed::error::{FeedError, Result};

/// The type of delivered tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenType {
    /// For columns of at most 32 bits signed or 16 bits unsigned.
    Int32,
    /// For other integers.
    Int64,
}

/// Why a list is no document.
#[derive(Debug)]
pub(super) struct Refused {
    /// The row of the array.
    pub(super) row: usize,
    pub(super) reason: String,
}

impl TokenType {
    /// The type for a column.
    ///
    /// # Errors
    /// [`FeedError::Invalid`] for a column that has no lists of integers.
    pub(crate) fn of(field: &Field) -> Result<Self> {
        let item = match field.data_type() {
            DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => {
                item.data_type()
            }
            other => other,
        };
        let is_list = item != field.data_type();
        match item {
            DataType::Int8 | DataType::Int16 | DataType::Int32 | DataType::UInt8 | DataType::UInt16
                if is_list =>
            {
                Ok(Self::Int32)
            }
            DataType::Int64 | DataType::UInt32 | DataType::UInt64 if is_list => Ok(Self::Int64),
            _ => Err(FeedError::invalid(format!(
                "tokens of column {:?}: it is {}; a column of tokens has lists of integers, one list a document",
                field.name(),
                field.data_type()
            ))),
        }
    }

    pub(super) fn data_type(self) -> DataType {
        match self {
            Self::Int32 => DataType::Int32,
            Self::Int64 => DataType::Int64,
        }
    }

    /// The greatest token.
    pub(super) fn max(self) -> i64 {
        match self {
            Self::Int32 => i32::MAX.into(),
            Self::Int64 => i64::MAX,
        }
    }

    fn lists(self) -> DataType {
        DataType::LargeList(Field::new_list_field(self.data_type(), true).into())
    }

    /// The lists of a column with tokens of this type. Copies the tokens only where the column has another one.
    ///
    /// # Errors
    /// The first list with a null, a negative number or one beyond 63 bits.
    pub(super) fn documents(self, column: &ArrayRef) -> Result<LargeListArray, Refused> {
        let options = CastOptions { safe: false, ..CastOptions::default() };
        let lists = cast_with_options(column, &self.lists(), &options).map_err(|error| {
            // Only 64-bit unsigned numbers do not fit: the row is searched for.
            let fits = |row: &usize| {
                let one = take(column, &UInt64Array::from(vec![*row as u64]), None);
                one.and_then(|one| cast_with_options(&one, &self.lists(), &options)).is_ok()
            };
            let row = (0..column.len()).find(|row| !fits(row));
            Refused { row: row.unwrap_or(0), reason: format!("its tokens do not fit 63 bits ({error})") }
        })?;
        let lists = lists.as_list::<i64>().clone();
        match self {
            Self::Int32 => check::<Int32Type>(&lists)?,
            Self::Int64 => check::<Int64Type>(&lists)?,
        }
        Ok(lists)
    }
}

/// Refuses nulls and negative numbers. What is behind a null list does not count.
fn check<T: ArrowNumericType>(lists: &LargeListArray) -> Result<(), Refused>
where
    T::Native: Into<i64>,
{
    let values = lists.values().as_primitive::<T>();
    let is_negative = |value: T::Native| Into::<i64>::into(value) < 0;
    if values.null_count() == 0 && !min(values).is_some_and(is_negative) {
        return Ok(());
    }
    for (row, range) in ranges(lists) {
        for (at, token) in range.enumerate() {
            if values.is_null(token) {
                return Err(Refused { row, reason: format!("token {at} of the list is null") });
            }
            let value: i64 = values.value(token).into();
            if value < 0 {
                return Err(Refused {
                    row,
                    reason: format!("token {at} of the list is {value}; tokens are numbers from 0"),
                });
            }
        }
    }
    Ok(())
}

/// The tokens of each row that is not null.
fn ranges(lists: &LargeListArray) -> impl Iterator<Item = (usize, Range<usize>)> {
    (0..lists.len()).filter(move |row| lists.is_valid(*row)).map(move |row| (row, range(lists, row)))
}

/// The places of a row's tokens among the values; none for a null list.
pub(super) fn range(lists: &LargeListArray, row: usize) -> Range<usize> {
    if lists.is_null(row) {
        return 0..0;
    }
    let ends = lists.value_offsets();
    // Offsets of an array rise, and are within the values.
    let end = |at: usize| ends.get(at).map_or(0, |end| *end as usize);
    end(row)..end(row + 1)
}

/// Counts documents and tokens.
pub(super) fn count(lists: &LargeListArray) -> UnitTokens {
    let lengths = ranges(lists).map(|(_, range)| range.len() as u64).filter(|length| *length > 0);
    lengths.fold(UnitTokens { documents: 0, tokens: 0 }, |sum, length| UnitTokens {
        documents: sum.documents + 1,
        tokens: sum.tokens + length,
    })
}
