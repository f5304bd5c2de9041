//! One schema for many files: columns are matched by name, files may lack some of them (additive evolution).
//! A column whose type differs between files cannot be read; the others can.
//!
//! Dictionaries and runs are encodings of a column, not types: the schema has the type of the values.

use std::collections::{HashMap, HashSet};
use std::panic::catch_unwind;
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, RecordBatchOptions, new_null_array};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Field, FieldRef, Schema, SchemaRef};
use arrow::error::ArrowError;
use arrow::ipc::convert::{IpcSchemaEncoder, fb_to_schema};
use arrow::ipc::root_as_schema;
use serde::{Deserialize, Serialize};

use super::types::unite;
use crate::feed::FeedError;
use crate::feed::error::Result;

/// A column that cannot be read: its type differs between files, or a file has it twice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Conflict {
    pub(crate) column: String,
    /// The first file that has the column, and its type there. For a duplicate: its file, and `None`.
    first: (String, Option<String>),
    /// The file that disagrees, and its type there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    other: Option<(String, String)>,
}

impl Conflict {
    /// Values of two types in one column. Each place is a file, or a row of it.
    pub(crate) fn of_values(column: String, first: (String, String), other: (String, String)) -> Self {
        Self { column, first: (first.0, Some(first.1)), other: Some(other) }
    }

    /// The error for a reader of the column.
    pub(crate) fn error(&self) -> FeedError {
        let column = self.column.clone();
        match (&self.first, &self.other) {
            ((first_file, Some(first_type)), Some((file, file_type))) => FeedError::SchemaConflict {
                column,
                first_file: first_file.clone(),
                first_type: first_type.clone(),
                file: file.clone(),
                file_type: file_type.clone(),
            },
            ((file, _), _) => FeedError::DuplicateColumn { column, file: file.clone() },
        }
    }
}

/// The union of the files' columns in order of first appearance, and the columns left out because their types
/// differ between files or a file has them twice.
///
/// Nullability, names of list items, the order of struct fields, encodings and key-value metadata may differ between files.
pub(crate) fn unify<'a>(files: impl Iterator<Item = (&'a str, &'a Schema)>) -> (Schema, Vec<Conflict>) {
    struct Column<'a> {
        field: Field,
        file: &'a str,
        seen: usize,
    }
    let mut columns: Vec<Column<'_>> = Vec::new();
    let mut by_name: HashMap<String, usize> = HashMap::new();
    let mut conflicts: Vec<Conflict> = Vec::new();
    let mut refused: HashSet<String> = HashSet::new();
    let mut total = 0usize;
    for (file, schema) in files {
        total += 1;
        let mut names = HashSet::new();
        for field in schema.fields() {
            let name = field.name();
            let conflict = |first, other| Conflict { column: name.clone(), first, other };
            if !names.insert(name) && refused.insert(name.clone()) {
                conflicts.push(conflict((file.to_string(), None), None));
                continue;
            }
            let kind = plain(field.data_type());
            match by_name.get(name) {
                None => {
                    by_name.insert(name.clone(), columns.len());
                    let field = Field::new(name, kind, field.is_nullable());
                    columns.push(Column { field, file, seen: 1 });
                }
                Some(&i) => {
                    let column = &mut columns[i];
                    let Some(united) = unite(column.field.data_type(), &kind) else {
                        if refused.insert(name.clone()) {
                            let first = (column.file.to_string(), Some(column.field.data_type().to_string()));
                            conflicts.push(conflict(first, Some((file.to_string(), kind.to_string()))));
                        }
                        continue;
                    };
                    column.field.set_data_type(united);
                    column.seen += 1;
                    if field.is_nullable() {
                        column.field.set_nullable(true);
                    }
                }
            }
        }
    }
    let readable = columns.into_iter().filter(|c| !refused.contains(c.field.name()));
    let fields = readable.map(|c| if c.seen < total { c.field.with_nullable(true) } else { c.field });
    (Schema::new(fields.collect::<Vec<_>>()), conflicts)
}

/// The type of the values, without dictionary and run encodings.
fn plain(kind: &DataType) -> DataType {
    let inner = |field: &FieldRef| -> FieldRef {
        Arc::new(field.as_ref().clone().with_data_type(plain(field.data_type())))
    };
    match kind {
        DataType::Dictionary(_, values) => plain(values),
        DataType::RunEndEncoded(_, values) => plain(values.data_type()),
        DataType::List(item) => DataType::List(inner(item)),
        DataType::LargeList(item) => DataType::LargeList(inner(item)),
        DataType::FixedSizeList(item, size) => DataType::FixedSizeList(inner(item), *size),
        DataType::Struct(fields) => DataType::Struct(fields.iter().map(inner).collect()),
        DataType::Map(entries, sorted) => DataType::Map(inner(entries), *sorted),
        other => other.clone(),
    }
}

/// Converts a decoded batch of one file to `schema`: order of columns, missing ones as nulls, inner field
/// names. No copy where nothing differs.
pub(crate) fn conform(
    columns: &HashMap<String, ArrayRef>,
    rows: usize,
    schema: &SchemaRef,
) -> Result<RecordBatch, ArrowError> {
    let arrays = schema
        .fields()
        .iter()
        .map(|field| match columns.get(field.name()) {
            None => Ok(new_null_array(field.data_type(), rows)),
            Some(array) if array.data_type() == field.data_type() => Ok(Arc::clone(array)),
            Some(array) => convert(array, field),
        })
        .collect::<Result<Vec<ArrayRef>, ArrowError>>()?;
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    RecordBatch::try_new_with_options(Arc::clone(schema), arrays, &options)
}

/// Converts a column to the type of its field, in which [`unify`] has united those of the files.
fn convert(array: &ArrayRef, field: &Field) -> Result<ArrayRef, ArrowError> {
    // Arrow casts structs of any field names, by position. A plan of an earlier program may ask for that.
    if unite(field.data_type(), &plain(array.data_type())).as_ref() != Some(field.data_type()) {
        return Err(ArrowError::SchemaError(format!(
            "column {:?} is {}, which is not {}",
            field.name(),
            array.data_type(),
            field.data_type()
        )));
    }
    cast(array, field.data_type())
}

/// The schema as hexadecimal Arrow IPC, for plans and caches.
///
/// # Errors
/// [`FeedError::Invalid`] for a type that Arrow IPC does not have; its encoder panics there.
pub(crate) fn encode_schema(schema: &Schema) -> Result<String> {
    catch_unwind(|| hex::encode(IpcSchemaEncoder::new().schema_to_fb(schema).finished_data()))
        .map_err(|_| FeedError::invalid(format!("the schema cannot be encoded: {schema}")))
}

/// The inverse of [`encode_schema`].
pub(crate) fn decode_schema(text: &str) -> Result<Schema> {
    let unusable = |what: String| FeedError::UnusablePlan { what: format!("schema: {what}") };
    let bytes = hex::decode(text).map_err(|e| unusable(e.to_string()))?;
    let decoded = catch_unwind(|| root_as_schema(&bytes).map(fb_to_schema).map_err(|e| e.to_string()));
    decoded.unwrap_or_else(|_| Err("a type is unknown".to_string())).map_err(unusable)
}
