//! The one type of a column whose files declare it in different forms.
//!
//! Fields of structs are matched by name, as columns are: arrow's `equals_datatype` compares them by position and takes
//! `{min, max}` for `{max, mean}`.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use arrow::datatypes::{DataType, FieldRef, Fields};

/// The type that holds the values of both, without dictionary and run encodings; `None` where these are of different types.
///
/// Nulls fit any type, and texts and bytes with offsets of 32 bits those with 64. The names of list items and of the entries
/// of maps may differ, and nullability inside of lists, structs and maps. Structs have the same set of field names, in any
/// order: the result has that of `first`.
pub(crate) fn unite(first: &DataType, other: &DataType) -> Option<DataType> {
    use DataType::{FixedSizeList, LargeList, List, Map, Struct};
    match (first, other) {
        (DataType::Null, values) | (values, DataType::Null) => Some(values.clone()),
        (DataType::Utf8, DataType::LargeUtf8) | (DataType::LargeUtf8, DataType::Utf8) => {
            Some(DataType::LargeUtf8)
        }
        (DataType::Binary, DataType::LargeBinary) | (DataType::LargeBinary, DataType::Binary) => {
            Some(DataType::LargeBinary)
        }
        (List(first), List(other)) => Some(List(unite_fields(first, other)?)),
        (LargeList(first), LargeList(other)) => Some(LargeList(unite_fields(first, other)?)),
        (FixedSizeList(first, size), FixedSizeList(other, same)) if size == same => {
            Some(FixedSizeList(unite_fields(first, other)?, *size))
        }
        (Struct(first), Struct(other)) => Some(Struct(unite_structs(first, other)?)),
        (Map(first, sorted), Map(other, same)) if sorted == same => {
            Some(Map(unite_entries(first, other)?, *sorted))
        }
        _ => (first == other).then(|| first.clone()),
    }
}

/// A field with the values of both, the name of `first`, and the metadata that both have.
fn unite_fields(first: &FieldRef, other: &FieldRef) -> Option<FieldRef> {
    let kind = unite(first.data_type(), other.data_type())?;
    let holds_nulls =
        [first, other].iter().any(|field| field.is_nullable() || *field.data_type() == DataType::Null);
    let mut field = first.as_ref().clone().with_data_type(kind).with_nullable(holds_nulls);
    field.metadata_mut().retain(|key, value| other.metadata().get(key) == Some(value));
    Some(Arc::new(field))
}

fn unite_structs(first: &Fields, other: &Fields) -> Option<Fields> {
    if first.len() != other.len() {
        return None;
    }
    let by_name: HashMap<&str, &FieldRef> =
        other.iter().map(|field| (field.name().as_str(), field)).collect();
    let in_order = first.iter().zip(other).all(|(first, other)| first.name() == other.name());
    // With a name twice, only the position tells the fields apart.
    match (in_order, by_name.len() == other.len()) {
        (true, _) => first.iter().zip(other).map(|(first, other)| unite_fields(first, other)).collect(),
        (false, true) => {
            let names: HashSet<&str> = first.iter().map(|field| field.name().as_str()).collect();
            if names.len() < first.len() {
                return None;
            }
            first.iter().map(|field| unite_fields(field, by_name.get(field.name().as_str())?)).collect()
        }
        (false, false) => None,
    }
}

/// The entries of maps, whose two fields have their meaning by position.
fn unite_entries(first: &FieldRef, other: &FieldRef) -> Option<FieldRef> {
    let (DataType::Struct(fields), DataType::Struct(others)) = (first.data_type(), other.data_type()) else {
        return None;
    };
    if fields.len() != others.len() {
        return None;
    }
    let united: Option<Fields> = fields.iter().zip(others).map(|(one, two)| unite_fields(one, two)).collect();
    let kind = DataType::Struct(united?);
    Some(Arc::new(first.as_ref().clone().with_data_type(kind)))
}

#[cfg(test)]
mod tests;
