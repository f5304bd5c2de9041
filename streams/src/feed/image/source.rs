//! Encoded images in the columns of row groups, and the paths of those that are files.

use arrow::array::{Array, ArrayRef, AsArray};
use arrow::datatypes::{DataType, Fields};
use object_store::path::Path;

use crate::dataset::Dataset;

/// What an image column holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// Encoded images.
    Bytes,
    /// A struct whose field at this position holds encoded images, as Hugging Face datasets have it.
    Field(usize),
    /// Names of files.
    Names,
}

impl Source {
    /// The source that a column of this type is; `None` for other types.
    pub(super) fn of(kind: &DataType) -> Option<Source> {
        let is_binary =
            |kind: &DataType| matches!(kind, DataType::Binary | DataType::LargeBinary | DataType::BinaryView);
        let bytes_of = |fields: &Fields| {
            fields.iter().position(|field| field.name() == "bytes" && is_binary(field.data_type()))
        };
        match kind {
            kind if is_binary(kind) => Some(Source::Bytes),
            DataType::Struct(fields) => bytes_of(fields).map(Source::Field),
            DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => Some(Source::Names),
            _ => None,
        }
    }

    /// The encoded image of a row; `None` for a null.
    pub(super) fn bytes(self, column: &ArrayRef, row: usize) -> Option<&[u8]> {
        if column.is_null(row) {
            return None;
        }
        let column = match self {
            Source::Field(at) => column.as_struct().column(at),
            Source::Bytes | Source::Names => column,
        };
        if column.is_null(row) {
            return None;
        }
        match column.data_type() {
            DataType::Binary => Some(column.as_binary::<i32>().value(row)),
            DataType::LargeBinary => Some(column.as_binary::<i64>().value(row)),
            DataType::BinaryView => Some(column.as_binary_view().value(row)),
            _ => None,
        }
    }

    /// The name of a row's file; `None` for a null.
    pub(super) fn name(column: &ArrayRef, row: usize) -> Option<&str> {
        if column.is_null(row) {
            return None;
        }
        match column.data_type() {
            DataType::Utf8 => Some(column.as_string::<i32>().value(row)),
            DataType::LargeUtf8 => Some(column.as_string::<i64>().value(row)),
            DataType::Utf8View => Some(column.as_string_view().value(row)),
            _ => None,
        }
    }
}

/// The folder that names of files are relative to: that of the dataset, or of its only file.
pub(super) fn folder_of(dataset: &Dataset) -> String {
    let path = dataset.path().trim_matches('/');
    match dataset.files() {
        [only] if only.path.trim_matches('/') == path => {
            path.rsplit_once('/').map_or("", |(folder, _)| folder).to_string()
        }
        _ => path.to_string(),
    }
}

/// The file that a name stands for.
pub(super) fn locate(folder: &str, name: &str) -> Result<Path, String> {
    let wrong = |what: &str| {
        format!(
            "the file name {name:?} {what}; write a path relative to the dataset, or from the volume's root with '/'"
        )
    };
    let base = if name.starts_with('/') { "" } else { folder };
    let parts: Vec<&str> =
        base.split('/').chain(name.split('/')).filter(|part| !part.is_empty() && *part != ".").collect();
    if name.split('/').all(|part| part.is_empty() || part == ".") {
        return Err(wrong("names no file"));
    }
    if parts.contains(&"..") {
        return Err(wrong("has '..' in it"));
    }
    Path::parse(parts.join("/")).map_err(|error| wrong(&format!("is not a path ({error})")))
}
