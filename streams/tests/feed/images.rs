//! Images in the feed: the same pixels for any world and resume, files of the volume, types, hostile rows.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use arrow::array::{
    Array, ArrayRef, AsArray, BinaryArray, BinaryViewArray, Int64Array, LargeBinaryArray, RecordBatch,
    StringArray, StructArray,
};
use arrow::datatypes::{DataType, Field, Float32Type, Int64Type, UInt8Type};
use futures::{StreamExt, TryStreamExt};
use image::{ImageFormat, Rgb, RgbImage};
use millrace_streams::feed::{
    Channels, Crop, Feed, FeedBatch, FeedError, FeedOptions, ImageOptions, Mixture, MixtureFeed,
    MixtureSource, Plan, PlanOptions, Result, Shard, Until, Values,
};
use object_store::ObjectStore;
use object_store::memory::InMemory;

use super::data::{CountingStore, parquet, put};

const ROWS: u64 = 50;

/// An image of its own size and pixels for each row.
fn picture(id: u64) -> Vec<u8> {
    let (width, height) = (20 + id as u32 % 7, 24 + id as u32 % 5);
    let pixel = |x: u32, y: u32| Rgb([x * 9, y * 8, x * y].map(|v| (u64::from(v) + 31 * id) as u8));
    let format = [ImageFormat::Jpeg, ImageFormat::Png, ImageFormat::WebP][id as usize % 3];
    let mut bytes = Cursor::new(Vec::new());
    RgbImage::from_fn(width, height, pixel).write_to(&mut bytes, format).unwrap();
    bytes.into_inner()
}

fn table(ids: std::ops::Range<u64>, images: ArrayRef) -> RecordBatch {
    let ids = Int64Array::from_iter_values(ids.map(|id| id as i64));
    RecordBatch::try_from_iter_with_nullable([
        ("id", Arc::new(ids) as ArrayRef, false),
        ("image", images, true),
    ])
    .unwrap()
}

/// Two files with row groups of 20, 5 and 25 rows.
async fn dataset(store: &dyn ObjectStore) {
    let group = |ids: std::ops::Range<u64>| {
        let images: Vec<Vec<u8>> = ids.clone().map(picture).collect();
        table(ids, Arc::new(BinaryArray::from_iter_values(images)))
    };
    put(store, "train/a.parquet", parquet(&[group(0..20), group(20..25)])).await;
    put(store, "train/b.parquet", parquet(&[group(25..50)])).await;
}

fn augmented() -> ImageOptions {
    ImageOptions { crop: Crop::RandomResized, flip: 0.5, ..ImageOptions::new(6, 8) }
}

fn images(column: &str, options: ImageOptions) -> FeedOptions {
    FeedOptions { images: BTreeMap::from([(column.to_string(), options)]), ..FeedOptions::default() }
}

async fn plan(store: &Arc<dyn ObjectStore>, batch_rows: usize) -> Arc<Plan> {
    let options = PlanOptions { batch_rows, seed: 3, ..PlanOptions::default() };
    Arc::new(Plan::build(store, "train", &options).await.unwrap())
}

/// The tensor of each row, by row and epoch.
type Tensors = BTreeMap<(u64, u64), Vec<u8>>;

/// Reads some steps of all ranks of a world.
async fn read(
    store: &Arc<dyn ObjectStore>,
    plan: &Arc<Plan>,
    world: u32,
    steps: std::ops::Range<u64>,
    tensors: &mut Tensors,
) {
    for rank in 0..world {
        let feed = Feed::open(Arc::clone(plan), Arc::clone(store), &images("image", augmented())).unwrap();
        let shard = Shard::new(rank, world).unwrap();
        let mut stream = feed.stream(shard, plan.cursor(steps.start)).unwrap();
        for _ in steps.clone() {
            let batch = stream.next().await.unwrap().unwrap();
            let ids = batch.batch.column_by_name("id").unwrap().as_primitive::<Int64Type>().clone();
            let list = batch.batch.column_by_name("image").unwrap().as_fixed_size_list().clone();
            for at in 0..batch.rows.len() {
                assert_eq!(ids.value(at) as u64, batch.rows[at]);
                let pixels = list.value(at).as_primitive::<UInt8Type>().values().to_vec();
                let before = tensors.insert((batch.rows[at], batch.epochs[at]), pixels.clone());
                assert!(before.is_none_or(|before| before == pixels), "row {} differs", batch.rows[at]);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_world_and_resume_give_the_same_pixels() {
    let memory = InMemory::new();
    dataset(&memory).await;
    let store: Arc<dyn ObjectStore> = Arc::new(memory);
    // 50 steps of 4 rows: four epochs.
    let four = plan(&store, 4).await;
    let mut whole = Tensors::new();
    read(&store, &four, 1, 0..50, &mut whole).await;
    assert_eq!(whole.len() as u64, 4 * ROWS);
    // Each epoch sees another crop of a row.
    let different = (0..ROWS).filter(|row| whole[&(*row, 0)] != whole[&(*row, 1)]).count();
    assert!(different > 45, "{different}");
    for world in 2..=4 {
        let mut parts = Tensors::new();
        read(&store, &four, world, 0..17, &mut parts).await;
        // Resumed by another world.
        read(&store, &four, 5 - world, 17..50, &mut parts).await;
        assert_eq!(parts, whole, "{world} readers");
    }
    // Another batch size is another order of the same pixels.
    let ten = plan(&store, 10).await;
    let mut tens = Tensors::new();
    read(&store, &ten, 3, 0..20, &mut tens).await;
    assert_eq!(tens, whole);
}

#[tokio::test]
async fn tensors_have_the_type_and_the_metadata_of_arrows_extension() {
    let memory = InMemory::new();
    dataset(&memory).await;
    let store: Arc<dyn ObjectStore> = Arc::new(memory);
    let options =
        ImageOptions { dtype: Some(Values::Float32), channels: Channels::Grey, ..ImageOptions::new(4, 5) };
    let options = FeedOptions { key_column: Some("key".into()), ..images("image", options) };
    let feed = Feed::open(plan(&store, 8).await, Arc::clone(&store), &options).unwrap();
    let batch = feed.batch(0, 0..8).await.unwrap();
    assert_eq!(batch.batch.schema(), *feed.schema());
    let field = feed.schema().field_with_name("image").unwrap();
    assert_eq!(field.metadata()["ARROW:extension:name"], "arrow.fixed_shape_tensor");
    assert_eq!(
        field.metadata()["ARROW:extension:metadata"],
        r#"{"shape":[1,4,5],"dim_names":["C","H","W"]}"#
    );
    let list = batch.batch.column_by_name("image").unwrap().as_fixed_size_list();
    assert_eq!((list.len(), list.value_length()), (8, 20));
    let values = list.values().as_primitive::<Float32Type>().values();
    assert!(values.iter().all(|value| (0.0..=1.0).contains(value)));
    // Keys depend on the row and the epoch only.
    let keys = |batch: &RecordBatch| batch.column_by_name("key").unwrap().as_primitive::<Int64Type>().clone();
    let first = keys(&batch.batch);
    assert!(first.values().iter().all(|key| *key >= 0));
    let part = feed.batch(0, 3..5).await.unwrap();
    assert_eq!(keys(&part.batch).values(), &first.values()[3..5]);
    let taken = FeedOptions { key_column: Some("id".into()), ..FeedOptions::default() };
    let error = Feed::open(plan(&store, 8).await, Arc::clone(&store), &taken).err().unwrap();
    assert!(error.to_string().contains("choose another one"), "{error}");
    let empty = feed.batch(0, 2..2).await.unwrap();
    assert_eq!((empty.batch.num_rows(), empty.batch.schema()), (0, Arc::clone(feed.schema())));
}

#[tokio::test]
async fn images_may_be_any_binary_type_a_struct_or_files() {
    let all: Vec<Vec<u8>> = (0..ROWS).map(picture).collect();
    let bytes = BinaryArray::from_iter_values(&all);
    let none = StringArray::from(vec![None::<&str>; ROWS as usize]);
    let fields = vec![
        (Arc::new(Field::new("bytes", DataType::Binary, true)), Arc::new(bytes.clone()) as ArrayRef),
        (Arc::new(Field::new("path", DataType::Utf8, true)), Arc::new(none) as ArrayRef),
    ];
    let names = (0..ROWS).map(|id| match id % 3 {
        0 => format!("./pictures/{id}"),
        1 => format!("pictures/{id}"),
        _ => format!("/train/pictures/{id}"),
    });
    let columns: Vec<ArrayRef> = vec![
        Arc::new(bytes),
        Arc::new(LargeBinaryArray::from_iter_values(&all)),
        Arc::new(BinaryViewArray::from_iter_values(&all)),
        Arc::new(StructArray::from(fields)),
        Arc::new(StringArray::from_iter_values(names)),
    ];
    let mut expected = None;
    for column in columns {
        let (memory, kind) = (InMemory::new(), column.data_type().clone());
        for (id, picture) in all.iter().enumerate() {
            put(&memory, &format!("train/pictures/{id}"), picture.clone()).await;
        }
        put(&memory, "train/0.parquet", parquet(&[table(0..ROWS, column)])).await;
        let watched = CountingStore::new(Arc::new(memory));
        let store: Arc<dyn ObjectStore> = watched.clone();
        let plan = plan(&store, 25).await;
        let feed = Feed::open(Arc::clone(&plan), Arc::clone(&store), &images("image", augmented())).unwrap();
        let before = watched.reads();
        let batch = feed.batch(0, 5..15).await.unwrap();
        if kind == DataType::Utf8 {
            // Only the files of the delivered rows are read; the footer and the row group take few reads.
            assert!((10..=14).contains(&(watched.reads() - before)), "{}", watched.reads() - before);
        }
        let pixels = batch.batch.column_by_name("image").unwrap().clone();
        assert_eq!(&pixels, expected.get_or_insert_with(|| pixels.clone()), "{kind}");
    }
}

async fn failing(image: Option<&[u8]>) -> FeedError {
    let memory = InMemory::new();
    let good = picture(1);
    let images = BinaryArray::from(vec![Some(&good[..]), Some(&good[..]), image, Some(&good[..])]);
    put(&memory, "train/0.parquet", parquet(&[table(0..4, Arc::new(images))])).await;
    let store: Arc<dyn ObjectStore> = Arc::new(memory);
    let feed = Feed::open(plan(&store, 4).await, store, &self::images("image", augmented())).unwrap();
    feed.batch(0, 0..4).await.unwrap_err()
}

#[tokio::test]
async fn a_bad_image_names_its_column_row_and_file() {
    let good = picture(0);
    for (image, words) in [
        (None, "is null"),
        (Some(&b""[..]), "has no bytes"),
        (Some(&b"plain text"[..]), "neither JPEG, PNG nor WebP"),
        (Some(&good[..good.len() / 2]), "write it again"),
    ] {
        let error = failing(image).await;
        assert!(matches!(error, FeedError::Image { .. }) && !error.is_retryable(), "{error:?}");
        let text = error.to_string();
        let place = "column \"image\" in row 2 of row group 0 of train/0.parquet";
        assert!(text.contains(place) && text.contains(words), "{text}");
    }
}

async fn named(name: Option<&str>) -> (Arc<CountingStore>, Feed) {
    let memory = InMemory::new();
    put(&memory, "train/good.png", picture(1)).await;
    put(&memory, "train/bad.png", b"not an image".to_vec()).await;
    let names = StringArray::from(vec![Some("good.png"), name]);
    put(&memory, "train/0.parquet", parquet(&[table(0..2, Arc::new(names))])).await;
    let watched = CountingStore::new(Arc::new(memory));
    let store: Arc<dyn ObjectStore> = watched.clone();
    let feed = Feed::open(plan(&store, 2).await, store, &images("image", augmented())).unwrap();
    (watched, feed)
}

#[tokio::test]
async fn a_bad_file_name_is_an_error_and_a_failing_store_may_be_retried() {
    for (name, words) in [
        (None, "is null"),
        (Some(""), "names no file"),
        (Some("../secret.png"), "has '..' in it"),
        (Some("missing.png"), "/train/missing.png does not exist"),
        (Some("bad.png"), "file \"bad.png\": the bytes are neither"),
    ] {
        let error = named(name).await.1.batch(0, 0..2).await.unwrap_err();
        let text = error.to_string();
        assert!(text.contains("row 1 of row group 0 of train/0.parquet") && text.contains(words), "{text}");
    }
    let (store, feed) = named(Some("good.png")).await;
    feed.batch(0, 0..2).await.unwrap();
    store.failures.store(1, Ordering::SeqCst);
    let error = feed.batch(0, 0..2).await.unwrap_err();
    assert!(error.is_retryable(), "{error}");
    feed.batch(0, 0..2).await.unwrap();
}

#[tokio::test]
async fn unfit_columns_and_batches_are_refused() {
    let memory = InMemory::new();
    dataset(&memory).await;
    let store: Arc<dyn ObjectStore> = Arc::new(memory);
    let plan = plan(&store, 50).await;
    let open = |options: &FeedOptions| -> Result<Feed> {
        Feed::open(Arc::clone(&plan), Arc::clone(&store), options)
    };
    let refused = |options: &FeedOptions, words: &str| {
        let error = open(options).err().unwrap().to_string();
        assert!(error.contains(words), "{error:?} without {words:?}");
    };
    refused(&images("id", augmented()), "image column \"id\" is Int64");
    refused(&images("photo", augmented()), "column \"photo\" is not in the dataset");
    let other = FeedOptions { columns: Some(vec!["id".into()]), ..images("image", augmented()) };
    refused(&other, "column \"image\" is not");
    refused(&images("image", ImageOptions { flip: 2.0, ..augmented() }), "flip is 2");
    // 50 rows of 192 MiB.
    let huge = ImageOptions { dtype: Some(Values::Float32), ..ImageOptions::new(4096, 4096) };
    let error = open(&images("image", huge)).unwrap().batch(0, 0..50).await.unwrap_err().to_string();
    assert!(error.contains("batch_rows"), "{error}");
}

/// The pixels and the key of each row of some batches, by source, row and epoch.
type Mixed = BTreeMap<(u32, u64, u64), (Vec<u8>, i64)>;

fn take(batch: &FeedBatch, source: Option<u32>, found: &mut Mixed) {
    let list = batch.batch.column_by_name("image").unwrap().as_fixed_size_list().clone();
    let keys = batch.batch.column_by_name("key").unwrap().as_primitive::<Int64Type>().clone();
    for at in 0..batch.rows.len() {
        let pixels = list.value(at).as_primitive::<UInt8Type>().values().to_vec();
        let source = source.unwrap_or_else(|| batch.sources[at]);
        let before = found.insert((source, batch.rows[at], batch.epochs[at]), (pixels, keys.value(at)));
        assert!(before.is_none(), "row {} of source {source} comes twice", batch.rows[at]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn images_and_keys_of_a_mixture_are_those_of_its_sources() {
    let options = FeedOptions { key_column: Some("key".into()), ..images("image", augmented()) };
    let (mut sources, mut stores, mut alone) = (Vec::new(), Vec::new(), Mixed::new());
    for (number, rows) in [(0, 30), (1, 12), (2, 7)] {
        // Files of one name are other pictures in each source.
        let memory = InMemory::new();
        for id in 0..rows {
            put(&memory, &format!("train/pictures/{id}"), picture(id + u64::from(number) * 50)).await;
        }
        let names = StringArray::from_iter_values((0..rows).map(|id| format!("pictures/{id}")));
        put(&memory, "train/0.parquet", parquet(&[table(0..rows, Arc::new(names))])).await;
        let store: Arc<dyn ObjectStore> = Arc::new(memory);
        let seed = 3 + u64::from(number);
        let plan = PlanOptions { batch_rows: 4, lanes: 4, seed, ..PlanOptions::default() };
        let plan = Arc::new(Plan::build(&store, "train", &plan).await.unwrap());
        let feed = Feed::open(Arc::clone(&plan), Arc::clone(&store), &options).unwrap();
        let passes = feed.stream_places(Shard::new(0, 1).unwrap(), 0..rows * 3, 1).unwrap();
        let batches: Vec<FeedBatch> = passes.try_collect().await.unwrap();
        batches.iter().for_each(|batch| take(batch, Some(number), &mut alone));
        let weight = ["3", "2", "1"][number as usize].parse().unwrap();
        sources.push(MixtureSource { name: format!("s{number}"), plan, weight });
        stores.push(store);
    }
    let mixture = Arc::new(Mixture::new(sources, 10, Until::First).unwrap());
    let mut first = None;
    for world in [1, 3] {
        let mut found = Mixed::new();
        let mut schema = None;
        for rank in 0..world {
            let feed = MixtureFeed::open(Arc::clone(&mixture), &stores, &options).unwrap();
            let stream = feed.stream_places(Shard::new(rank, world).unwrap(), 0..42, 1).unwrap();
            let batches: Vec<FeedBatch> = stream.try_collect().await.unwrap();
            for batch in &batches {
                assert_eq!(batch.batch.schema(), *feed.schema());
                take(batch, None, &mut found);
            }
            schema = Some(Arc::clone(feed.schema()));
        }
        let names: Vec<String> = schema.unwrap().fields().iter().map(|field| field.name().clone()).collect();
        assert_eq!(names, ["id", "image", "key"]);
        assert_eq!(found.len(), 42);
        for (row, mixed) in &found {
            assert_eq!(Some(mixed), alone.get(row), "{row:?}");
        }
        assert_eq!(&found, first.get_or_insert_with(|| found.clone()));
    }
    let refused = MixtureFeed::open(mixture, &stores, &images("id", augmented())).err().unwrap();
    assert!(refused.to_string().contains("image column \"id\" is Int64"), "{refused}");
}
