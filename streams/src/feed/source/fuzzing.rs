//! A file read through its row groups, as the fuzz target and the tests do: scanned, cut, and each part decoded alone.
//! Panics where a part does not decode to the rows that the scan has counted, or where the rows depend on the cuts.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch};
use arrow::compute::concat_batches;
use arrow::datatypes::SchemaRef;
use bytes::Bytes;

use super::columns::Columns;
use super::cutter::Bounds;
use super::{Classes, Fetched, ScanError, Scanned, decode, scan_text, tar};
use crate::dataset::{DataFile, FileFormat, conform};
use crate::feed::FeedError;

/// Scans a file whose name tells its format.
pub(super) fn scan_bytes(path: &str, bytes: &[u8], bounds: Bounds) -> Result<Scanned, ScanError> {
    match FileFormat::of_path(path) {
        Some(FileFormat::Tar) => tar::scan(io::Cursor::new(bytes), bytes.len() as u64, 0, bounds),
        Some(format) => scan_text(bytes, path, format, bytes.len() as u64, 0, bounds),
        None => Err(ScanError::row(path.to_owned(), "a format is missing".to_owned())),
    }
}

/// The schema and the row groups of a file.
pub(super) fn read_in_groups(
    path: &str,
    bytes: &[u8],
    bounds: Bounds,
) -> Result<(SchemaRef, Vec<RecordBatch>), ScanError> {
    let scanned = scan_bytes(path, bytes, bounds)?;
    let format = FileFormat::of_path(path).unwrap_or(FileFormat::Folder);
    let mut columns = Columns::default();
    assert!(columns.unite(scanned.columns, format == FileFormat::Csv), "{path}: too many columns");
    let (schema, _) = columns.schema(|place| place.at.to_string());
    let schema = Arc::new(schema);
    let Scanned { row_groups, cuts, .. } = scanned;
    let file = DataFile { path: path.to_owned(), bytes: bytes.len() as u64, format, row_groups, cuts };
    let expected_cuts = if file.row_groups.is_empty() { 0 } else { file.row_groups.len() + 1 };
    assert_eq!(file.cuts.len(), expected_cuts, "{path}: {file:?}");
    let mut batches = Vec::new();
    for (index, group) in file.row_groups.iter().enumerate() {
        let range = file.cuts[index] as usize..file.cuts[index + 1] as usize;
        assert!(range.start < range.end, "{path}: {file:?}");
        let head = match format {
            FileFormat::Csv if range.start > 0 => &bytes[..file.cuts[0] as usize],
            _ => &[],
        };
        let body = Bytes::copy_from_slice(&bytes[range]);
        let fetched = Fetched { head: Bytes::copy_from_slice(head), body };
        let rows = group.rows as usize;
        let found: HashMap<String, ArrayRef> =
            match decode(fetched, &file, index, rows, &schema, &Classes::default(), 1 << 30) {
                Ok(found) => found,
                Err(error @ FeedError::Oversized { .. }) => {
                    return Err(ScanError::row(format!("row group {index}"), error.to_string()));
                }
                Err(error) => panic!("{path}: {error}: {error:?}"),
            };
        assert!(found.values().all(|column| column.len() == rows), "{path}: {found:?}");
        match conform(&found, rows, &schema) {
            Ok(batch) => batches.push(batch),
            Err(error) => panic!("{path}: {error}"),
        }
    }
    Ok((schema, batches))
}

/// Reads a file that may be anything, in row groups of a few rows.
pub(crate) fn check(path: &str, bytes: &[u8]) {
    let small = read_in_groups(path, bytes, Bounds { rows: 3, bytes: 64 });
    if let Ok((schema, batches)) = small {
        match read_in_groups(path, bytes, Bounds::TEXT) {
            Ok((whole_schema, whole)) => {
                assert_eq!(schema, whole_schema, "{path}");
                let rows = |batches: &[RecordBatch]| concat_batches(&schema, batches);
                match (rows(&batches), rows(&whole)) {
                    (Ok(small), Ok(whole)) => assert_eq!(small, whole, "{path}"),
                    (small, whole) => panic!("{path}: {small:?} {whole:?}"),
                }
            }
            Err(error) => panic!("{path}: {error}"),
        }
    }
}
