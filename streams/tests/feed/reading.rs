//! Tests of reading: recognition of data files, bad input, changing files, failing stores, caching.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use arrow::array::{
    Array, ArrayRef, AsArray, BinaryArray, DictionaryArray, Int64Array, LargeBinaryArray, LargeStringArray,
    ListArray, NullArray, RecordBatch, StringArray, StructArray,
};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field, Int32Type, Schema};
use arrow::ipc::CompressionType;
use arrow::ipc::writer::{FileWriter, IpcWriteOptions, StreamWriter};
use futures::StreamExt;
use futures::future::join_all;
use millrace_leaf::error_chain::one_line;
use millrace_streams::dataset::{Dataset, DatasetCache};
use millrace_streams::feed::{Feed, FeedError, FeedOptions, Plan, PlanOptions, Result, Shard};
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use parquet::arrow::ArrowWriter;
use parquet::basic::Compression;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use proptest::prelude::*;

use super::data::{self, CountingStore, ipc, parquet, put, rows};

fn options() -> PlanOptions {
    PlanOptions { batch_rows: 8, seed: 1, ..PlanOptions::default() }
}

async fn store_of(files: Vec<(&str, Vec<u8>)>) -> Arc<dyn ObjectStore> {
    let store = InMemory::new();
    for (path, bytes) in files {
        put(&store, path, bytes).await;
    }
    Arc::new(store)
}

/// All rows of the first epoch, or the first error.
async fn read_epoch(store: &Arc<dyn ObjectStore>, path: &str) -> Result<Vec<RecordBatch>> {
    let plan = Plan::build(store, path, &options()).await?;
    let feed = Feed::open(plan, Arc::clone(store), &FeedOptions::default())?;
    let steps = feed.plan().steps_for_epochs(1);
    let mut batches = Vec::new();
    for step in 0..steps {
        batches.push(feed.batch(step, 0..8).await?.batch);
    }
    Ok(batches)
}

#[tokio::test]
async fn data_files_are_recognized_by_name_and_sorted_by_path() {
    let store = store_of(vec![
        ("train/b.parquet", parquet(&[rows(30, 10)])),
        ("train/a/z.PARQUET", parquet(&[rows(0, 10)])),
        ("train/a.arrow", ipc(&[rows(10, 10), rows(20, 10)])),
        ("train/_staging/x.parquet", b"half".to_vec()),
        ("train/.tmp.parquet", b"half".to_vec()),
        ("train/README.md", b"read me".to_vec()),
        ("trainer/other.parquet", b"not ours".to_vec()),
    ])
    .await;
    let dataset = Dataset::read(&store, "/train").await.unwrap();
    let paths: Vec<&str> = dataset.files().iter().map(|f| f.path.as_str()).collect();
    // '.' sorts before '/'.
    assert_eq!(paths, ["train/a.arrow", "train/a/z.PARQUET", "train/b.parquet"]);
    assert_eq!(dataset.rows(), 40);
    assert_eq!(dataset.schema().fields().len(), 3);
    let one = Dataset::read(&store, "train/a.arrow").await.unwrap();
    assert_eq!((one.files().len(), one.rows()), (1, 20));
    assert_eq!(one.files()[0].row_groups.len(), 2);
}

#[tokio::test]
async fn a_local_directory_is_a_dataset() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(dir.path().join("set/part.parquet")).unwrap();
    std::fs::write(dir.path().join("set/part.parquet/0.parquet"), parquet(&[rows(0, 50)])).unwrap();
    let store: Arc<dyn ObjectStore> = Arc::new(LocalFileSystem::new_with_prefix(dir.path()).unwrap());
    for path in ["set", "/", "", "/set/part.parquet", "set/part.parquet/0.parquet"] {
        let read = read_epoch(&store, path).await.unwrap();
        assert_eq!(read.iter().map(RecordBatch::num_rows).sum::<usize>(), 56, "{path}");
    }
}

#[tokio::test]
async fn datasets_without_files_or_rows_are_refused() {
    let empty = parquet(&[rows(0, 0)]);
    let store = store_of(vec![("train/a.txt", vec![1]), ("rowless/a.parquet", empty)]).await;
    let error = read_epoch(&store, "train").await.unwrap_err();
    assert!(matches!(error, FeedError::NoFiles { ignored: 1, .. }), "{error}");
    let error = read_epoch(&store, "absent").await.unwrap_err();
    assert!(matches!(error, FeedError::NoFiles { ignored: 0, .. }), "{error}");
    assert!(error.to_string().contains("/absent: no data file found: there is no file"), "{error}");
    let error = read_epoch(&store, "train/a.txt").await.unwrap_err();
    assert!(matches!(error, FeedError::NoFiles { ignored: 1, .. }), "{error}");
    let error = read_epoch(&store, "rowless").await.unwrap_err();
    assert!(matches!(error, FeedError::NoRows { files: 1, .. }), "{error}");
    let error = read_epoch(&store, "a/../b").await.unwrap_err();
    assert!(matches!(error, FeedError::Invalid { .. }), "{error}");
}

#[tokio::test]
async fn truncated_and_corrupt_files_are_named() {
    let good = parquet(&[rows(0, 100), rows(100, 100)]);
    let mut bad_page = good.clone();
    bad_page[100..400].fill(0xff);
    let mut bad_footer = good.clone();
    let end = bad_footer.len();
    bad_footer[end - 60..end - 8].fill(0xff);
    let arrow = ipc(&[rows(0, 100)]);
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("half.parquet", good[..good.len() / 2].to_vec(), "footer"),
        ("cut.parquet", good[..good.len() - 1].to_vec(), "footer"),
        ("short.parquet", good[..7].to_vec(), "footer"),
        ("empty.parquet", Vec::new(), "footer"),
        ("text.parquet", b"id,label\n1,2\n3,4\n5,6\n".to_vec(), "footer"),
        ("footer.parquet", bad_footer, "footer"),
        ("page.parquet", bad_page, "row group 0"),
        ("half.arrow", arrow[..arrow.len() / 2].to_vec(), "footer"),
        ("short.arrow", arrow[..5].to_vec(), "footer"),
    ];
    for (name, bytes, part) in cases {
        let path = format!("train/{name}");
        let store = store_of(vec![("train/good.parquet", good.clone()), (&path, bytes)]).await;
        let error = read_epoch(&store, "train").await.unwrap_err();
        assert!(matches!(error, FeedError::Corrupt { .. }), "{name}: {error:?}");
        let text = error.to_string();
        assert!(text.contains(&path) && text.contains(part), "{name}: {text}");
        assert!(!error.is_retryable());
    }
}

#[tokio::test]
async fn columns_are_projected_in_the_order_asked_for() {
    let store = store_of(vec![("t/a.parquet", parquet(&[rows(0, 20)]))]).await;
    let plan = Arc::new(Plan::build(&store, "t", &options()).await.unwrap());
    let open = |columns: &[&str]| {
        let columns = Some(columns.iter().map(|c| c.to_string()).collect());
        Feed::open(Arc::clone(&plan), Arc::clone(&store), &FeedOptions { columns, ..FeedOptions::default() })
    };
    let feed = open(&["name", "id"]).unwrap();
    let batch = feed.batch(0, 2..7).await.unwrap();
    let schema = batch.batch.schema();
    let names: Vec<&str> = schema.fields().iter().map(|f| f.name().as_str()).collect();
    assert_eq!(names, ["name", "id"]);
    assert_eq!(&schema, feed.schema());
    assert_eq!((batch.batch.num_rows(), batch.rows.len(), batch.epochs.len()), (5, 5, 5));
    assert_eq!(feed.batch(0, 3..3).await.unwrap().batch.num_rows(), 0);

    let error = open(&["id", "label"]).err().unwrap();
    assert_eq!(error.to_string(), "column \"label\" is not in the dataset; it has id, pixels, name");
    assert!(matches!(open(&["id", "id"]), Err(FeedError::Invalid { .. })));
    assert!(matches!(open(&[]), Err(FeedError::Invalid { .. })));
    for slots in [0..9, 9..9, Range { start: 7, end: 3 }] {
        assert!(matches!(feed.batch(0, slots).await, Err(FeedError::Invalid { .. })));
    }
    assert!(matches!(feed.batch(u64::MAX, 0..8).await, Err(FeedError::Invalid { .. })));
}

#[tokio::test]
async fn files_may_lack_columns_but_not_disagree_about_types() {
    let id = |v: Vec<i64>| Arc::new(Int64Array::from(v)) as ArrayRef;
    let note = |v: Vec<&str>| Arc::new(StringArray::from(v)) as ArrayRef;
    let old = RecordBatch::try_from_iter([("id", id(vec![0, 1, 2, 3]))]).unwrap();
    let new = [("note", note(vec!["x"; 4])), ("id", id(vec![4, 5, 6, 7]))];
    let new = RecordBatch::try_from_iter(new).unwrap();
    let store = store_of(vec![
        ("t/0.parquet", parquet(std::slice::from_ref(&old))),
        ("t/1.parquet", parquet(std::slice::from_ref(&new))),
    ])
    .await;
    let batch = &read_epoch(&store, "t").await.unwrap()[0];
    let (ids, notes) = (batch["id"].as_primitive::<arrow::datatypes::Int64Type>(), &batch["note"]);
    assert_eq!(batch.num_rows(), 8);
    for i in 0..8 {
        assert_eq!(notes.is_null(i), ids.value(i) < 4);
    }
    // Only the column that the old file does not have.
    let plan = Plan::build(&store, "t", &options()).await.unwrap();
    let only = FeedOptions { columns: Some(vec!["note".into()]), ..FeedOptions::default() };
    let feed = Feed::open(plan, Arc::clone(&store), &only).unwrap();
    assert_eq!(feed.batch(0, 0..8).await.unwrap().batch["note"].null_count(), 4);

    let text = RecordBatch::try_from_iter([("id", note(vec!["a"]))]).unwrap();
    put(&*store, "t/2.parquet", parquet(&[text])).await;
    let error = read_epoch(&store, "t").await.unwrap_err().to_string();
    assert!(error.contains("t/0.parquet") && error.contains("t/2.parquet"), "{error}");
}

/// Writes the bytes of a file.
type Format = fn(&[RecordBatch]) -> Vec<u8>;

#[tokio::test]
async fn fields_of_structs_are_matched_by_name_or_conflict() {
    // Rows from `first` on, with a box of two fields whose values follow from the field's name.
    let file = |first: i64, names: [&str; 2]| {
        let number = |name: &str| {
            let factor = if name == "min" { 10 } else { 100 };
            Arc::new((first..first + 4).map(|id| Some(id * factor)).collect::<Int64Array>()) as ArrayRef
        };
        let fields = names.map(|name| (Arc::new(Field::new(name, DataType::Int64, true)), number(name)));
        let boxes = Arc::new(StructArray::from(fields.to_vec())) as ArrayRef;
        let ids = Arc::new(Int64Array::from_iter_values(first..first + 4)) as ArrayRef;
        RecordBatch::try_from_iter([("id", ids), ("box", boxes)]).unwrap()
    };
    let of = async |names: [&str; 2], format: Format, ending: &str| {
        let [first, other] =
            [(0, ["min", "max"]), (4, names)].map(|(first, names)| format(&[file(first, names)]));
        store_of(vec![(&*format!("t/0.{ending}"), first), (&*format!("t/1.{ending}"), other)]).await
    };
    for (format, ending) in [(parquet as Format, "parquet"), (ipc, "arrow")] {
        let store = of(["max", "min"], format, ending).await;
        let batch = &read_epoch(&store, "t").await.unwrap()[0];
        let ids = batch["id"].as_primitive::<arrow::datatypes::Int64Type>().values().to_vec();
        for (name, factor) in [("min", 10), ("max", 100)] {
            let found = batch["box"].as_struct().column_by_name(name).unwrap();
            let expected: Vec<i64> = ids.iter().map(|id| id * factor).collect();
            assert_eq!(
                found.as_primitive::<arrow::datatypes::Int64Type>().values().to_vec(),
                expected,
                "{name}"
            );
        }
        for names in [["max", "mean"], ["x", "y"]] {
            let error = read_epoch(&of(names, format, ending).await, "t").await.unwrap_err();
            assert!(matches!(error, FeedError::SchemaConflict { .. }), "{error}");
        }
    }
}

#[tokio::test]
async fn columns_of_nulls_and_of_other_offsets_are_read_as_one() {
    let id = |first: i64| Arc::new(Int64Array::from_iter_values(first..first + 8)) as ArrayRef;
    let texts = vec!["a", "b", "a", "c", "a", "b", "a", "c"];
    let bytes: Vec<&[u8]> = texts.iter().map(|text| text.as_bytes()).collect();
    let coded = texts.iter().copied().collect::<DictionaryArray<Int32Type>>();
    let short = Arc::new(StringArray::from(texts.clone())) as ArrayRef;
    let batch = |first: i64, note: ArrayRef, name: ArrayRef, raw: ArrayRef| {
        let columns = [("id", id(first)), ("note", note), ("name", name), ("raw", raw)];
        RecordBatch::try_from_iter_with_nullable(columns.map(|(name, column)| (name, column, true))).unwrap()
    };
    let nulls =
        batch(0, Arc::new(NullArray::new(8)), short.clone(), Arc::new(BinaryArray::from(bytes.clone())));
    let large = Arc::new(LargeStringArray::from(texts.clone()));
    let large = batch(8, short.clone(), large, Arc::new(LargeBinaryArray::from(bytes.clone())));
    let coded = batch(16, short, Arc::new(coded), Arc::new(BinaryArray::from(bytes)));
    let store = store_of(vec![
        ("t/0.parquet", parquet(&[nulls])),
        ("t/1.arrow", ipc(&[large])),
        ("t/2.parquet", parquet(&[coded])),
    ])
    .await;
    let mut seen = 0;
    for batch in read_epoch(&store, "t").await.unwrap() {
        let ids = batch["id"].as_primitive::<arrow::datatypes::Int64Type>();
        let (note, name, raw) = (
            batch["note"].as_string::<i32>(),
            batch["name"].as_string::<i64>(),
            batch["raw"].as_binary::<i64>(),
        );
        for row in 0..batch.num_rows() {
            let expected = texts[ids.value(row) as usize % 8];
            assert_eq!(note.is_null(row), ids.value(row) < 8);
            assert!(note.is_null(row) || note.value(row) == expected);
            assert_eq!((name.value(row), raw.value(row)), (expected, expected.as_bytes()));
            seen += 1;
        }
    }
    assert_eq!(seen, 24);
}

#[tokio::test]
async fn tensors_of_files_keep_their_extension_type_in_plans_and_batches() {
    let metadata = [
        ("ARROW:extension:name", "arrow.fixed_shape_tensor"),
        ("ARROW:extension:metadata", "{\"shape\":[2,2]}"),
    ];
    let metadata = HashMap::from(metadata.map(|(key, value)| (key.to_owned(), value.to_owned())));
    let batch = rows(0, 16);
    let fields = batch.schema_ref().fields().iter().map(|field| match field.name().as_str() {
        "pixels" => field.as_ref().clone().with_metadata(metadata.clone()),
        _ => field.as_ref().clone(),
    });
    let schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
    let batch = RecordBatch::try_new(schema, batch.columns().to_vec()).unwrap();
    let (first, second) = (batch.slice(0, 8), batch.slice(8, 8));
    let store = store_of(vec![("t/0.parquet", parquet(&[first])), ("t/1.arrow", ipc(&[second]))]).await;
    let plan = Plan::build(&store, "t", &options()).await.unwrap();
    let plan: Plan = serde_json::from_str(&serde_json::to_string(&plan).unwrap()).unwrap();
    let columns = Some(vec!["pixels".to_owned()]);
    let options = FeedOptions { columns, ..FeedOptions::default() };
    let feed = Feed::open(plan, Arc::clone(&store), &options).unwrap();
    let read = feed.batch(0, 0..8).await.unwrap().batch;
    assert_eq!(read.schema().field(0).metadata(), &metadata);
    assert_eq!(feed.schema().field(0).metadata(), &metadata);
}

#[tokio::test]
async fn type_conflict_in_an_unread_column_is_ignored() {
    let id = || Arc::new(Int64Array::from(vec![1, 2, 3, 4])) as ArrayRef;
    let number = || ("odd", id());
    let text = || ("odd", Arc::new(StringArray::from(vec!["a"; 4])) as ArrayRef);
    let twice = ["twice", "id", "twice"].map(|name| Field::new(name, DataType::Int64, false));
    let twice = RecordBatch::try_new(Arc::new(Schema::new(twice.to_vec())), vec![id(), id(), id()]).unwrap();
    let batches = [
        RecordBatch::try_from_iter([("id", id()), number()]).unwrap(),
        RecordBatch::try_from_iter([text(), ("id", id())]).unwrap(),
        twice,
    ];
    let files = batches.map(|batch| parquet(&[batch]));
    let names = ["t/0.parquet", "t/1.parquet", "t/2.parquet"];
    let store = store_of(names.into_iter().zip(files).collect()).await;
    let plan = Plan::build(&store, "t", &options()).await.unwrap();
    let plan: Plan = serde_json::from_str(&serde_json::to_string(&plan).unwrap()).unwrap();
    let plan = Arc::new(plan);
    let open = |columns: Option<&str>| {
        let columns = columns.map(|column| vec![column.to_string()]);
        Feed::open(Arc::clone(&plan), Arc::clone(&store), &FeedOptions { columns, ..FeedOptions::default() })
    };
    let mut ids = Vec::new();
    for step in 0..3 {
        let batch = open(Some("id")).unwrap().batch(step, 0..4).await.unwrap().batch;
        ids.extend(batch["id"].as_primitive::<arrow::datatypes::Int64Type>().values().iter().copied());
    }
    assert_eq!(ids.len(), 12);
    assert!(matches!(open(Some("odd")), Err(FeedError::SchemaConflict { .. })));
    assert!(matches!(open(Some("twice")), Err(FeedError::DuplicateColumn { .. })));
    assert!(matches!(open(None), Err(FeedError::SchemaConflict { .. })));
}

/// A Parquet file with one codec.
fn parquet_with(batch: &RecordBatch, codec: Compression) -> Vec<u8> {
    let properties = WriterProperties::builder().set_compression(codec).build();
    let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties)).unwrap();
    writer.write(batch).unwrap();
    writer.into_inner().unwrap()
}

pub(crate) fn ipc_with(batch: &RecordBatch, codec: CompressionType) -> Vec<u8> {
    let options = IpcWriteOptions::default().try_with_compression(Some(codec)).unwrap();
    let mut writer = FileWriter::try_new_with_options(Vec::new(), &batch.schema(), options).unwrap();
    writer.write(batch).unwrap();
    writer.into_inner().unwrap()
}

#[tokio::test]
async fn an_arrow_stream_is_not_called_damaged() {
    let batch = rows(0, 8);
    let mut writer = StreamWriter::try_new(Vec::new(), &batch.schema()).unwrap();
    writer.write(&batch).unwrap();
    let stream = writer.into_inner().unwrap();
    let cut = ipc(std::slice::from_ref(&batch));
    let store = store_of(vec![("t/0.arrow", stream), ("u/0.arrow", cut[..cut.len() - 9].to_vec())]).await;
    let error = one_line(&read_epoch(&store, "t").await.unwrap_err());
    for part in ["t/0.arrow", "Arrow IPC stream", "pyarrow.ipc.new_file", "Parquet"] {
        assert!(error.contains(part), "{error}");
    }
    assert!(!error.contains("corrupt"), "{error}");
    let error = read_epoch(&store, "u").await.unwrap_err();
    assert!(matches!(error, FeedError::Corrupt { .. }), "{error:?}");
}

#[tokio::test]
async fn every_codec_is_read() {
    let batch = rows(0, 200);
    let codecs = [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::GZIP(Default::default()),
        Compression::BROTLI(Default::default()),
        Compression::LZ4,
        Compression::LZ4_RAW,
        Compression::ZSTD(Default::default()),
    ];
    let parquet = codecs.map(|codec| (codec.to_string(), "t/a.parquet", parquet_with(&batch, codec)));
    let ipc = [CompressionType::LZ4_FRAME, CompressionType::ZSTD]
        .map(|codec| (format!("Arrow {codec:?}"), "t/a.arrow", ipc_with(&batch, codec)));
    for (codec, path, bytes) in parquet.into_iter().chain(ipc) {
        let store = store_of(vec![(path, bytes)]).await;
        let read: usize = match read_epoch(&store, "t").await {
            Ok(batches) => batches.iter().map(RecordBatch::num_rows).sum(),
            Err(error) => panic!("{codec}: {}", one_line(&error)),
        };
        assert_eq!(read, 200, "{codec}");
    }
}

#[tokio::test]
async fn dictionary_columns_are_read_as_their_values() {
    let id = |first: i64| Arc::new(Int64Array::from_iter_values(first..first + 8)) as ArrayRef;
    let names = ["a", "b", "a", "c", "a", "b", "a", "c"];
    let coded = || Arc::new(names.into_iter().collect::<DictionaryArray<Int32Type>>()) as ArrayRef;
    let item = Arc::new(Field::new("item", coded().data_type().clone(), true));
    let lists = ListArray::new(item, OffsetBuffer::from_lengths([1; 8]), coded(), None);
    let first = RecordBatch::try_from_iter([
        ("id", id(0)),
        ("name", coded()),
        ("names", Arc::new(lists) as ArrayRef),
    ])
    .unwrap();
    let second = RecordBatch::try_from_iter([
        ("id", id(8)),
        ("name", Arc::new(StringArray::from(names.to_vec())) as ArrayRef),
    ])
    .unwrap();
    let third = RecordBatch::try_from_iter([("id", id(16)), ("name", coded())]).unwrap();
    let store = store_of(vec![
        ("t/0.parquet", parquet(std::slice::from_ref(&first))),
        ("t/1.parquet", parquet(&[second])),
        ("t/2.arrow", ipc(&[third])),
    ])
    .await;
    let plan = Plan::build(&store, "t", &options()).await.unwrap();
    let plan: Plan = serde_json::from_str(&serde_json::to_string(&plan).unwrap()).unwrap();
    assert_eq!(plan.dataset().schema().field_with_name("name").unwrap().data_type(), &DataType::Utf8);
    let feed = Feed::open(plan, Arc::clone(&store), &FeedOptions::default()).unwrap();
    let mut seen = 0;
    for step in 0..3 {
        let batch = feed.batch(step, 0..8).await.unwrap().batch;
        let ids = batch["id"].as_primitive::<arrow::datatypes::Int64Type>();
        let (name, lists) = (batch["name"].as_string::<i32>(), batch["names"].as_list::<i32>());
        for row in 0..8 {
            let expected = names[ids.value(row) as usize % 8];
            assert_eq!(name.value(row), expected);
            if ids.value(row) < 8 {
                assert_eq!(lists.value(row).as_string::<i32>().value(0), expected);
            }
            seen += 1;
        }
    }
    assert_eq!(seen, 24);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parts_of_a_large_row_group_yield_each_row_once() {
    const ROWS: u64 = 20_000;
    for pages in [true, false] {
        let batch = rows(0, ROWS);
        let properties = WriterProperties::builder()
            .set_offset_index_disabled(!pages)
            .set_statistics_enabled(if pages { EnabledStatistics::Page } else { EnabledStatistics::None })
            .set_data_page_row_count_limit(500)
            .build();
        let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties)).unwrap();
        writer.write(&batch).unwrap();
        let store = store_of(vec![("t/large.parquet", writer.into_inner().unwrap())]).await;
        let few = PlanOptions { batch_rows: 100, working_set_bytes_max: 200_000, ..options() };
        let plan = Plan::build(&store, "t", &few).await.unwrap();
        assert!(plan.lanes() > 1, "{} lanes", plan.lanes());
        let feed = Feed::open(plan, Arc::clone(&store), &FeedOptions::default()).unwrap();
        let mut seen = vec![false; ROWS as usize];
        for step in 0..ROWS / 100 {
            let read = feed.batch(step, 0..100).await.unwrap();
            let expected: Vec<RecordBatch> =
                read.rows.iter().map(|row| batch.slice(*row as usize, 1)).collect();
            let expected = arrow::compute::concat_batches(&batch.schema(), &expected).unwrap();
            assert_eq!(read.batch.columns(), expected.columns());
            for row in read.rows {
                assert!(!std::mem::replace(&mut seen[row as usize], true), "row {row} came twice");
            }
        }
        assert!(seen.iter().all(|seen| *seen), "pages: {pages}");
    }
}

#[tokio::test]
async fn files_changed_or_removed_after_planning_are_detected() {
    let store =
        store_of(vec![("t/0.parquet", parquet(&[rows(0, 40)])), ("t/1.parquet", parquet(&[rows(40, 40)]))])
            .await;
    let plan = Arc::new(Plan::build(&store, "t", &options()).await.unwrap());
    let feed = || Feed::open(Arc::clone(&plan), Arc::clone(&store), &FeedOptions::default()).unwrap();
    let all = |feed: Feed| async move {
        for step in 0..10 {
            feed.batch(step, 0..8).await?;
        }
        Ok::<_, FeedError>(())
    };
    all(feed()).await.unwrap();
    put(&*store, "t/1.parquet", parquet(&[rows(40, 39), rows(79, 1)])).await;
    let error = all(feed()).await.unwrap_err();
    assert!(
        matches!(&error, FeedError::Changed { file, .. } | FeedError::Corrupt { file, .. } if file == "t/1.parquet"),
        "{error:?}"
    );
    store.delete(&Path::from("t/1.parquet")).await.unwrap();
    let error = all(feed()).await.unwrap_err();
    assert!(matches!(&error, FeedError::Store { file, .. } if file == "t/1.parquet"), "{error:?}");
    assert!(!error.is_retryable());
}

#[tokio::test]
async fn a_failing_store_fails_the_batch_and_the_next_try_succeeds() {
    let watched = CountingStore::new(data::dataset(&[vec![50, 50]]).await);
    let store: Arc<dyn ObjectStore> = watched.clone();
    let plan = Plan::build(&store, "train", &options()).await.unwrap();
    let feed = Feed::open(plan, store, &FeedOptions::default()).unwrap();
    watched.failures.store(1000, Ordering::SeqCst);
    let error = feed.batch(0, 0..8).await.unwrap_err();
    assert!(error.is_retryable(), "{error:?}");
    assert!(one_line(&error).contains("reset"), "{}", one_line(&error));
    let mut stream = feed.stream(Shard::WHOLE, feed.plan().cursor(3)).unwrap();
    assert!(stream.next().await.unwrap().is_err());
    assert!(stream.next().await.is_none());
    watched.failures.store(0, Ordering::SeqCst);
    assert_eq!(feed.batch(0, 0..8).await.unwrap().batch.num_rows(), 8);
}

#[tokio::test]
async fn each_row_group_is_read_once_per_epoch_and_once_for_many_tasks() {
    // 40 row groups that fit the cache; two reads each (footer once per file, then chunks).
    let watched = CountingStore::new(data::dataset(&vec![vec![100; 10]; 4]).await);
    let store: Arc<dyn ObjectStore> = watched.clone();
    let options = PlanOptions { batch_rows: 64, window_rows: 200, ..options() };
    let plan = Plan::build(&store, "train", &options).await.unwrap();
    let feed = Feed::open(plan, store, &FeedOptions::default()).unwrap();
    let before = watched.reads();
    let steps = feed.plan().steps_for_epochs(3);
    let read = join_all((0..8).map(|_| {
        let feed = feed.clone();
        tokio::spawn(async move {
            for step in 0..steps {
                feed.batch(step, 0..64).await.unwrap();
            }
        })
    }))
    .await;
    assert!(read.into_iter().all(|r| r.is_ok()));
    let reads = watched.reads() - before;
    // Several decoders may read a footer at the same time, but not the column chunks.
    assert!((40..40 + 4 * 12 * 8).contains(&reads), "{reads} reads");
}

#[derive(Default)]
struct MemoryCache(Mutex<HashMap<String, Vec<u8>>>);

impl DatasetCache for MemoryCache {
    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, String> {
        Ok(self.0.lock().unwrap().get(key).cloned())
    }
    fn put(&self, key: &str, value: &[u8]) -> Result<(), String> {
        self.0.lock().unwrap().insert(key.to_string(), value.to_vec());
        Ok(())
    }
}

struct Broken;

impl DatasetCache for Broken {
    fn get(&self, _: &str) -> Result<Option<Vec<u8>>, String> {
        Err("locked".into())
    }
    fn put(&self, _: &str, _: &[u8]) -> Result<(), String> {
        Err("locked".into())
    }
}

#[tokio::test]
async fn footers_are_read_once_per_listing_version() {
    let watched = CountingStore::new(data::dataset(&[vec![10], vec![20], vec![30]]).await);
    let store: Arc<dyn ObjectStore> = watched.clone();
    let kept = Arc::new(MemoryCache::default());
    let build = || async {
        let before = watched.reads();
        let cache: Arc<dyn DatasetCache> = kept.clone();
        let plan = Plan::build_cached(&store, "train", &options(), cache).await.unwrap();
        (plan, watched.reads() - before)
    };
    let (first, reads) = build().await;
    assert!(reads >= 3);
    let (second, reads) = build().await;
    assert_eq!((reads, second.id()), (0, first.id()));
    assert_eq!(second.dataset(), first.dataset());
    let uncached = Plan::build(&store, "train", &options()).await.unwrap();
    assert_eq!(uncached.id(), first.id());
    // A new file changes the listing; garbage in the cache is ignored.
    put(&*store, "train/009.parquet", parquet(&[rows(60, 5)])).await;
    let (third, reads) = build().await;
    assert!(reads >= 4);
    assert_ne!(third.id(), first.id());
    for value in kept.0.lock().unwrap().values_mut() {
        value.truncate(value.len() / 2);
    }
    let (fourth, reads) = build().await;
    assert!(reads >= 4);
    assert_eq!(fourth.id(), third.id());
    let plan = Plan::build_cached(&store, "train", &options(), Arc::new(Broken)).await.unwrap();
    assert_eq!(plan.id(), third.id());
}

#[tokio::test]
async fn plan_from_json_needs_no_footer_reads() {
    let store = data::dataset(&[vec![30, 20], vec![10], vec![7]]).await;
    let plan = Plan::build(&store, "train", &options()).await.unwrap();
    let sent: Plan = serde_json::from_str(&serde_json::to_string(&plan).unwrap()).unwrap();
    let here = Feed::open(plan, Arc::clone(&store), &FeedOptions::default()).unwrap();
    let there = Feed::open(sent, store, &FeedOptions::default()).unwrap();
    for step in 0..20 {
        let (a, b) = (here.batch(step, 0..8).await.unwrap(), there.batch(step, 0..8).await.unwrap());
        assert_eq!((a.batch, a.rows), (b.batch, b.rows));
    }
    let other = PlanOptions { seed: 99, ..options() };
    let other = Plan::build(&data::dataset(&[vec![30]]).await, "train", &other).await.unwrap();
    let error = here.stream(Shard::WHOLE, other.cursor(0)).err().unwrap();
    assert!(matches!(error, FeedError::OtherPlan { .. }), "{error}");
}

#[tokio::test]
async fn a_dropped_stream_stops_and_the_feed_goes_on() {
    let store = data::dataset(&[vec![100; 20]]).await;
    let plan = Plan::build(&store, "train", &options()).await.unwrap();
    let feed = Feed::open(plan, store, &FeedOptions::default()).unwrap();
    let shard = Shard::new(1, 2).unwrap();
    let mut stream = feed.stream(shard, feed.plan().cursor(5)).unwrap();
    let first = stream.next().await.unwrap().unwrap();
    assert_eq!((first.step, first.slots.clone()), (5, 4..8));
    drop(stream);
    let again = feed.batch(5, 4..8).await.unwrap();
    assert_eq!(again.batch, first.batch);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Damage anywhere is an error that names the file, or stays undetected (Parquet without page checksums
    /// cannot tell). It never hangs, panics or invents rows.
    #[test]
    fn damaged_files_never_break_the_feed(
        arrow in any::<bool>(),
        cut in prop::option::of(0.0..1.0f64),
        damage in prop::collection::vec((0.0..1.0f64, any::<u8>()), 1..6),
    ) {
        let batches = [rows(0, 60), rows(60, 60)];
        let mut bytes = if arrow { ipc(&batches) } else { parquet(&batches) };
        let len = bytes.len() as f64;
        for (at, value) in damage {
            bytes[(at * len) as usize] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate((cut * len) as usize);
        }
        let name = if arrow { "t/a.arrow" } else { "t/a.parquet" };
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let store = store_of(vec![(name, bytes)]).await;
            match read_epoch(&store, "t").await {
                Ok(batches) => assert!(batches.iter().all(|b| b.num_rows() == 8)),
                Err(FeedError::NoRows { .. }) => {}
                Err(error) => assert!(error.to_string().contains(name), "{error}"),
            }
        });
    }
}
