//! Rows fed in training order per second against a bare parquet-rs read of the same files.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::{ArrayRef, FixedSizeListArray, Float32Array, Int64Array, RecordBatch};
use arrow::datatypes::{DataType, Field};
use futures::StreamExt;
use millrace_streams::feed::{Cursor, Feed, FeedOptions, Plan, PlanOptions, Shard};
use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::file::properties::WriterProperties;

use crate::figure::{Figure, Kind};
use crate::turns::in_turn;

const FILES: i64 = 4;
const ROWS_PER_FILE: i64 = 200_000;
const WIDTH: i32 = 64;
const ROUNDS: usize = 5;

pub(crate) fn figures() -> Vec<Figure> {
    let dir = tempfile::tempdir().unwrap();
    for file in 0..FILES {
        write(&dir.path().join(format!("{file}.parquet")), file);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let rows = (FILES * ROWS_PER_FILE) as f64;
    let (ours, control) = in_turn(ROUNDS, || runtime.block_on(feed(dir.path())), || bare(dir.path()));
    vec![Figure {
        name: "feed/rows",
        kind: Kind::Rate,
        unit: "rows/s",
        value: rows / ours,
        control: rows / control,
        against: "a bare single-threaded parquet-rs read of the same files in file order (64 floats and 2 integers a row)",
    }]
}

fn write(path: &Path, file: i64) {
    let ids = Int64Array::from_iter_values(file * ROWS_PER_FILE..(file + 1) * ROWS_PER_FILE);
    let labels = Int64Array::from_iter_values((0..ROWS_PER_FILE).map(|i| i % 10));
    let values =
        Float32Array::from_iter_values((0..ROWS_PER_FILE * i64::from(WIDTH)).map(|i| (i * 31 % 17) as f32));
    let item = Arc::new(Field::new("item", DataType::Float32, false));
    let pixels = FixedSizeListArray::new(item, WIDTH, Arc::new(values), None);
    let batch = RecordBatch::try_from_iter([
        ("id", Arc::new(ids) as ArrayRef),
        ("label", Arc::new(labels) as ArrayRef),
        ("pixels", Arc::new(pixels) as ArrayRef),
    ])
    .unwrap();
    // Row groups of 20,000 rows: about 5 MiB decoded.
    let properties = WriterProperties::builder().set_max_row_group_row_count(Some(20_000)).build();
    let mut writer =
        ArrowWriter::try_new(File::create(path).unwrap(), batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

async fn feed(dir: &Path) -> Duration {
    let started = Instant::now();
    let store: Arc<dyn ObjectStore> = Arc::new(LocalFileSystem::new_with_prefix(dir).unwrap());
    let options = PlanOptions { source: "bench".into(), seed: 7, batch_rows: 1024, ..PlanOptions::default() };
    let plan = Plan::build(&store, "/", &options).await.unwrap();
    let steps = plan.rows() / 1024;
    let cursor = Cursor { plan_id: plan.id(), step: 0 };
    let feed = Feed::open(plan, store, &FeedOptions::default()).unwrap();
    let mut stream = feed.stream(Shard::new(0, 1).unwrap(), cursor).unwrap().take(steps as usize);
    let mut rows = 0;
    while let Some(batch) = stream.next().await {
        rows += batch.unwrap().rows.len();
    }
    assert!(rows as i64 > FILES * ROWS_PER_FILE - 1024);
    started.elapsed()
}

fn bare(dir: &Path) -> Duration {
    let started = Instant::now();
    let mut rows = 0;
    for file in 0..FILES {
        let file = File::open(dir.join(format!("{file}.parquet"))).unwrap();
        let reader =
            ParquetRecordBatchReaderBuilder::try_new(file).unwrap().with_batch_size(1024).build().unwrap();
        for batch in reader {
            rows += std::hint::black_box(batch.unwrap()).num_rows();
        }
    }
    assert_eq!(rows as i64, FILES * ROWS_PER_FILE);
    started.elapsed()
}
