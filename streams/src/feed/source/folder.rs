//! Folders of files with labels, as torchvision's `ImageFolder` reads them: `root/<class>/…/file`.
//!
//! Each file is a row of columns `path` (below the root), `data` (its bytes), `label` (number of its class among the
//! sorted names of classes) and `class`.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use arrow::array::{ArrayRef, BinaryArray, Int64Array, StringArray};
use arrow::datatypes::{DataType, Field, Schema};

use super::SAMPLE_BYTES_MAX;
use crate::dataset::{DataFile, Dataset, Listing, RowGroup};
use crate::feed::error::{FeedError, Result};

const PATH: &str = "path";
/// The column with the bytes of the files.
pub(super) const DATA: &str = "data";
const LABEL: &str = "label";
const CLASS: &str = "class";

/// The numbers of the classes of a dataset.
#[derive(Debug, Default)]
pub(crate) struct Classes {
    /// Path of the dataset with a slash at the end, as the paths of its files begin.
    root: String,
    labels: HashMap<String, i64>,
}

impl Classes {
    /// The classes of a dataset of a folder; none of other datasets.
    pub(crate) fn of(dataset: &Dataset) -> Self {
        let root = root_of(dataset.path());
        let names: BTreeSet<&str> = match dataset.files().first() {
            Some(file) if file.format == crate::dataset::FileFormat::Folder => {
                dataset.files().iter().map(|file| split(&root, &file.path).1).collect()
            }
            _ => BTreeSet::new(),
        };
        let labels = names.into_iter().zip(0..).map(|(name, label)| (name.to_owned(), label)).collect();
        Self { root, labels }
    }
}

fn root_of(path: &str) -> String {
    match path.trim_matches('/') {
        "" => String::new(),
        path => format!("{path}/"),
    }
}

/// The path of a file below the root, and its class.
fn split<'p>(root: &str, path: &'p str) -> (&'p str, &'p str) {
    let below = path.strip_prefix(root).unwrap_or(path);
    (below, below.split('/').next().unwrap_or(below))
}

pub(super) fn schema() -> Schema {
    let column = |name: &str, kind| Field::new(name, kind, false);
    Schema::new(vec![
        column(PATH, DataType::Utf8),
        column(DATA, DataType::Binary),
        column(LABEL, DataType::Int64),
        column(CLASS, DataType::Utf8),
    ])
}

/// Each file as a row group of one row. Reads nothing.
pub(super) fn describe(listing: Listing) -> Result<Vec<DataFile>> {
    let file = |found: crate::dataset::ListedFile| {
        if found.bytes > SAMPLE_BYTES_MAX {
            return Err(FeedError::Row {
                file: found.path,
                place: "the whole file".to_owned(),
                reason: format!("it has {} bytes, and a row has at most {SAMPLE_BYTES_MAX}", found.bytes),
            });
        }
        // Texts and numbers of the other columns.
        let bytes = found.bytes + found.path.len() as u64 + 24;
        Ok(DataFile {
            path: found.path,
            bytes: found.bytes,
            format: found.format,
            row_groups: vec![RowGroup { rows: 1, bytes }],
            cuts: Vec::new(),
        })
    };
    listing.files.into_iter().map(file).collect()
}

/// The row of a file, only the columns of `schema`. `data` are its bytes, where they are wanted.
pub(super) fn decode(
    path: &str,
    data: &[u8],
    classes: &Classes,
    schema: &Schema,
) -> HashMap<String, ArrayRef> {
    let (below, class) = split(&classes.root, path);
    let column = |field: &Arc<Field>| {
        let array: ArrayRef = match field.name().as_str() {
            PATH => Arc::new(StringArray::from_iter_values([below])),
            CLASS => Arc::new(StringArray::from_iter_values([class])),
            LABEL => Arc::new(Int64Array::from(vec![classes.labels.get(class).copied()])),
            DATA => Arc::new(BinaryArray::from_iter_values([data])),
            _ => return None,
        };
        Some((field.name().clone(), array))
    };
    schema.fields().iter().filter_map(column).collect()
}
