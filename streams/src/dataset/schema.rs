//! One schema for many files: columns are matched by name, files may lack some of them (additive evolution).
//! A column whose type differs between files cannot be read; the others can. A column of nulls fits each type, and texts
//! and bytes with offsets of 32 bits fit those with 64.
//!
//! Dictionaries and runs are encodings of a column, not types: the schema has the type of the values. Of the metadata of
//! columns, it keeps the name of Arrow's extension type, such as a tensor's with its shape, where all files agree.

use std::collections::{HashMap, HashSet};
use std::panic::catch_unwind;
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, RecordBatchOptions, new_null_array};
use arrow::compute::cast;
use arrow::datatypes::{Field, Schema, SchemaRef};
use arrow::error::ArrowError;
use arrow::ipc::convert::{IpcSchemaEncoder, fb_to_schema};
use arrow::ipc::root_as_schema;
use serde::{Deserialize, Serialize};

use super::column::{Column, plain};
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
/// Of these, only the order of struct fields follows the first file.
pub(crate) fn unify<'a>(files: impl Iterator<Item = (&'a str, &'a Schema)>) -> (Schema, Vec<Conflict>) {
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
                    columns.push(Column::new(field, kind, file));
                }
                Some(&i) => {
                    let column = &mut columns[i];
                    if !column.add(field, &kind, file) && refused.insert(name.clone()) {
                        let first =
                            (column.place().to_string(), Some(column.field().data_type().to_string()));
                        conflicts.push(conflict(first, Some((file.to_string(), kind.to_string()))));
                    }
                }
            }
        }
    }
    let readable = columns.into_iter().filter(|c| !refused.contains(c.field().name()));
    (Schema::new(readable.map(|c| c.finish(total)).collect::<Vec<_>>()), conflicts)
}

/// Converts a decoded batch of one file to `schema`: order of columns, missing ones as nulls, wider types, inner field
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
    let (name, kind) = (field.name(), field.data_type());
    // Arrow casts structs of any field names, by position. A plan of an earlier program may ask for that.
    let united = unite(kind, &plain(array.data_type()));
    if !united.is_some_and(|united| united.equals_datatype(kind)) {
        let found = array.data_type();
        return Err(ArrowError::SchemaError(format!("column {name:?} is {found}, which is not {kind}")));
    }
    cast(array, kind).map_err(|error| match error {
        ArrowError::OffsetOverflowError(bytes) => ArrowError::InvalidArgumentError(format!(
            "column {name:?} takes {bytes} bytes or more in one row group, too many for {kind}; write smaller row groups, or \
             write the column as large_string or large_binary"
        )),
        error => error,
    })
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
///
/// # Errors
/// [`FeedError::UnusablePlan`] also for a schema that reads as another one once it is encoded again.
pub(crate) fn decode_schema(text: &str) -> Result<Schema> {
    let schema = read_schema(text)?;
    let again = encode_schema(&schema).and_then(|text| read_schema(&text));
    if again.is_ok_and(|again| again == schema) {
        return Ok(schema);
    }
    Err(FeedError::UnusablePlan { what: "schema: it cannot be written again".to_owned() })
}

fn read_schema(text: &str) -> Result<Schema> {
    let unusable = |what: String| FeedError::UnusablePlan { what: format!("schema: {what}") };
    let bytes = hex::decode(text).map_err(|e| unusable(e.to_string()))?;
    let decoded = catch_unwind(|| root_as_schema(&bytes).map(fb_to_schema).map_err(|e| e.to_string()));
    decoded.unwrap_or_else(|_| Err("a type is unknown".to_string())).map_err(unusable)
}
