//! Entry points of the fuzz targets (`fuzz/`) into the decoders of this crate. Not part of the interface.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema};

use crate::dataset::{DataFile, Dataset, FileFormat, RowGroup};
use crate::feed::{Plan, PlanOptions};

pub use crate::broker::fuzzing::{batch, request, sealed};

/// Decodes a JPEG file of few pixels, and gives the bytes of its pixels. Panics where it decodes to two results.
pub fn jpeg(bytes: &[u8]) -> Option<usize> {
    crate::feed::image::fuzzing::jpeg(bytes)
}

/// JPEG files of `image`: grey, and in colours.
pub fn jpegs() -> Vec<Vec<u8>> {
    let grey = image::GrayImage::from_fn(19, 9, |x, y| image::Luma([(x * 13 + y * 7) as u8]));
    let colours =
        image::RgbImage::from_fn(17, 11, |x, y| image::Rgb([x * 9, y * 20, x * y].map(|v| v as u8)));
    let encoded = |image: image::DynamicImage| {
        let mut bytes = std::io::Cursor::new(Vec::new());
        image.write_to(&mut bytes, image::ImageFormat::Jpeg).ok().map(|()| bytes.into_inner())
    };
    [grey.into(), colours.into()].into_iter().filter_map(encoded).collect()
}

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
