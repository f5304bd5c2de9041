//! One schema for many files: columns are matched by name, files may lack some of them (additive
//! evolution), and nobody may disagree about a type.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, RecordBatchOptions, new_null_array};
use arrow::compute::cast;
use arrow::datatypes::{Field, Schema, SchemaRef};
use arrow::error::ArrowError;
use arrow::ipc::convert::{IpcSchemaEncoder, fb_to_schema};
use arrow::ipc::root_as_schema;

use crate::feed::FeedError;
use crate::feed::error::Result;

/// The union of the files' columns in order of first appearance.
///
/// Nullability, field names inside lists and key-value metadata may differ between files.
pub(crate) fn unify<'a>(files: impl Iterator<Item = (&'a str, &'a Schema)>) -> Result<Schema> {
    struct Column<'a> {
        field: Field,
        file: &'a str,
        seen: usize,
    }
    let mut columns: Vec<Column<'_>> = Vec::new();
    let mut by_name: HashMap<String, usize> = HashMap::new();
    let mut total = 0usize;
    for (file, schema) in files {
        total += 1;
        let mut names = HashSet::new();
        if let Some(twice) = schema.fields().iter().find(|field| !names.insert(field.name())) {
            return Err(FeedError::DuplicateColumn { column: twice.name().clone(), file: file.to_string() });
        }
        for field in schema.fields() {
            match by_name.get(field.name()) {
                None => {
                    by_name.insert(field.name().clone(), columns.len());
                    let field = field.as_ref().clone().with_metadata(HashMap::new());
                    columns.push(Column { field, file, seen: 1 });
                }
                Some(&i) => {
                    let column = &mut columns[i];
                    if !column.field.data_type().equals_datatype(field.data_type()) {
                        return Err(FeedError::SchemaConflict {
                            column: field.name().clone(),
                            first_file: column.file.to_string(),
                            first_type: column.field.data_type().to_string(),
                            file: file.to_string(),
                            file_type: field.data_type().to_string(),
                        });
                    }
                    column.seen += 1;
                    if field.is_nullable() {
                        column.field.set_nullable(true);
                    }
                }
            }
        }
    }
    Ok(Schema::new(
        columns
            .into_iter()
            .map(|c| if c.seen < total { c.field.with_nullable(true) } else { c.field })
            .collect::<Vec<_>>(),
    ))
}

/// Brings a decoded batch of one file into `schema`: order of columns, missing ones as nulls,
/// inner field names. No copy where nothing differs.
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
            Some(array) => cast(array, field.data_type()),
        })
        .collect::<Result<Vec<ArrayRef>, ArrowError>>()?;
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    RecordBatch::try_new_with_options(Arc::clone(schema), arrays, &options)
}

/// The schema as hexadecimal Arrow IPC, for plans and caches.
pub(crate) fn encode_schema(schema: &Schema) -> String {
    hex::encode(IpcSchemaEncoder::new().schema_to_fb(schema).finished_data())
}

/// The inverse of [`encode_schema`].
pub(crate) fn decode_schema(text: &str) -> Result<Schema> {
    let unusable = |what: String| FeedError::UnusablePlan { what: format!("schema: {what}") };
    let bytes = hex::decode(text).map_err(|e| unusable(e.to_string()))?;
    root_as_schema(&bytes).map(fb_to_schema).map_err(|e| unusable(e.to_string()))
}
