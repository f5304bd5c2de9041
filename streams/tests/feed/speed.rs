//! The feed's rate beside a bare read of the same files. Run it by name: it measures, and checks only the
//! number of rows.
#![allow(clippy::print_stdout)]

use std::sync::Arc;
use std::time::Instant;

use arrow::array::{
    ArrayRef, FixedSizeListArray, Float32Array, Float64Array, Int64Array, RecordBatch, StringArray,
};
use arrow::datatypes::{DataType, Field};
use futures::StreamExt;
use millrace_streams::feed::{Feed, FeedOptions, Plan, PlanOptions, Shard};
use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use super::data::parquet;

const FILES: usize = 8;
const GROUPS: usize = 5;
const GROUP_ROWS: usize = 25_000;

fn group(first: usize, list: usize) -> RecordBatch {
    let ids: Vec<i64> = (first..first + GROUP_ROWS).map(|i| i as i64).collect();
    let noise = |k: i64| ids.iter().map(move |i| (i.wrapping_mul(0x1e37_79b9_7f4a_7c15 + k)) >> 20);
    let mut columns: Vec<(&str, ArrayRef)> = vec![
        ("id", Arc::new(Int64Array::from(ids.clone()))),
        ("label", Arc::new(Int64Array::from_iter_values(noise(1).map(|x| x & 7)))),
        ("amount", Arc::new(Float64Array::from_iter_values(noise(2).map(|x| x as f64)))),
        ("score", Arc::new(Float32Array::from_iter_values(noise(3).map(|x| x as f32)))),
        ("name", Arc::new(StringArray::from_iter_values(noise(4).map(|x| format!("n{}", x & 0xfffff))))),
    ];
    if list > 0 {
        let values = Float32Array::from_iter_values((0..GROUP_ROWS * list).map(|i| (i % 17) as f32));
        let item = Arc::new(Field::new("item", DataType::Float32, false));
        let pixels = FixedSizeListArray::new(item, list as i32, Arc::new(values), None);
        columns.push(("pixels", Arc::new(pixels)));
    }
    RecordBatch::try_from_iter(columns).unwrap()
}

async fn measure(list: usize, batch_rows: usize) {
    let dir = tempfile::tempdir().unwrap();
    for f in 0..FILES {
        let groups: Vec<RecordBatch> =
            (0..GROUPS).map(|g| group((f * GROUPS + g) * GROUP_ROWS, list)).collect();
        std::fs::write(dir.path().join(format!("{f}.parquet")), parquet(&groups)).unwrap();
    }
    let rows = FILES * GROUPS * GROUP_ROWS;
    let bare = || {
        let start = Instant::now();
        let mut read = 0;
        for f in 0..FILES {
            let file = std::fs::File::open(dir.path().join(format!("{f}.parquet"))).unwrap();
            let reader = ParquetRecordBatchReaderBuilder::try_new(file).unwrap();
            let reader = reader.with_batch_size(8192).build().unwrap();
            read += reader.map(|b| b.unwrap().num_rows()).sum::<usize>();
        }
        assert_eq!(read, rows);
        rows as f64 / start.elapsed().as_secs_f64()
    };
    bare();
    let control = bare();
    let store: Arc<dyn ObjectStore> = Arc::new(LocalFileSystem::new_with_prefix(dir.path()).unwrap());
    let options = PlanOptions { batch_rows, seed: 1, ..PlanOptions::default() };
    let start = Instant::now();
    let plan = Plan::build(&store, "", &options).await.unwrap();
    let planned = start.elapsed();
    let (lanes, window) = (plan.lanes(), plan.window_rows());
    for epochs in [1u64, 2] {
        let feed = Feed::open(plan.clone(), Arc::clone(&store), &FeedOptions::default()).unwrap();
        let steps = feed.plan().steps_for_epochs(epochs);
        let start = Instant::now();
        let mut stream = feed.stream(Shard::WHOLE, feed.plan().cursor(0)).unwrap().take(steps as usize);
        let mut read = 0;
        while let Some(batch) = stream.next().await {
            read += batch.unwrap().batch.num_rows();
        }
        let rate = read as f64 / start.elapsed().as_secs_f64();
        println!(
            "feed/rows {rate:.0} rows/s control={control:.0} ratio={:.2} list={list} batch={batch_rows} epochs={epochs} lanes={lanes} window={window} plan_ms={:.1}",
            rate / control,
            planned.as_secs_f64() * 1e3
        );
    }
}

#[test]
#[ignore = "measures for seconds; run with --ignored --nocapture"]
fn feed_rows_per_second() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    for (list, batch_rows) in [(0, 256), (0, 4096), (64, 256)] {
        runtime.block_on(measure(list, batch_rows));
    }
}
