//! Entry points of the fuzz targets (`fuzz/`) into the decoders of this crate. Not part of the interface.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema};

use crate::dataset::{DataFile, Dataset, FileFormat, RowGroup};
use crate::feed::{Plan, PlanOptions};

pub use crate::broker::fuzzing::{batch, request, sealed};

/// The plan of a small dataset, for seeds.
pub fn plan() -> Option<Plan> {
    let group = |rows| RowGroup { rows, bytes: 100 * rows };
    let file = |path: &str, format| DataFile {
        path: path.to_owned(),
        bytes: 2000,
        format,
        row_groups: vec![group(10), group(7)],
        cuts: Vec::new(),
    };
    let schema = Schema::new(vec![Field::new("x", DataType::Float32, false)]);
    let files =
        vec![file("train/a.parquet", FileFormat::Parquet), file("train/b.arrow", FileFormat::ArrowIpc)];
    let dataset = Dataset::new("train".into(), Arc::new(schema), Vec::new(), files).ok()?;
    let options =
        PlanOptions { batch_rows: 4, lanes: 2, source: "digits@v1".into(), ..PlanOptions::default() };
    Plan::new(dataset, &options).ok()
}

/// Reads a file of a format without a footer: `jsonl`, `csv`, `tsv` or `tar`. Panics where a row group does not decode to
/// what the scan has counted.
pub fn source(format: &str, bytes: &[u8]) {
    crate::feed::source::fuzzing::check(&format!("fuzz.{format}"), bytes);
}
