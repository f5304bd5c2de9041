//! Tests of the sources: any cutting reads as a naive parser does, and hostile files are refused with their place.

mod cutting;
mod hostile;
mod tars;

use std::io::Write;

use arrow::array::RecordBatch;
use arrow::datatypes::{Schema, SchemaRef};

use super::cutter::Bounds;
use super::fuzzing::scan_bytes;
use super::*;

/// The message with which a file is refused.
pub(super) fn refusal(path: &str, bytes: &[u8]) -> String {
    match scan_bytes(path, bytes, Bounds::TEXT) {
        Err(error) => of_file(path, error).to_string(),
        Ok(found) => panic!("{path} is accepted: {found:?}"),
    }
}

impl fmt::Debug for Scanned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?} {:?}", self.row_groups, self.cuts, self.columns)
    }
}

/// Scans a file with bounds, and decodes every row group from its range of bytes alone.
pub(super) fn read_in_groups(path: &str, bytes: &[u8], bounds: Bounds) -> (SchemaRef, Vec<RecordBatch>) {
    fuzzing::read_in_groups(path, bytes, bounds).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// All rows of a file, as JSON objects with nulls.
pub(super) fn rows(path: &str, bytes: &[u8], bounds: Bounds) -> Vec<serde_json::Value> {
    let (_, batches) = read_in_groups(path, bytes, bounds);
    batches.iter().flat_map(json).collect()
}

pub(super) fn json(batch: &RecordBatch) -> Vec<serde_json::Value> {
    let builder = arrow::json::WriterBuilder::new().with_explicit_nulls(true);
    let mut writer = builder.build::<_, arrow::json::writer::LineDelimited>(Vec::new());
    writer.write(batch).unwrap();
    writer.finish().unwrap();
    let text = String::from_utf8(writer.into_inner()).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

pub(super) fn schema_of(path: &str, bytes: &[u8]) -> Schema {
    read_in_groups(path, bytes, Bounds::TEXT).0.as_ref().clone()
}

pub(super) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

pub(super) const SMALL: Bounds = Bounds { rows: 3, bytes: 64 };
