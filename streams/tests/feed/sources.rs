//! Tests of datasets without footers through the feed: JSON lines, CSV, tar shards, and folders of files.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arrow::array::{Array as _, AsArray, RecordBatch};
use arrow::datatypes::Int64Type;
use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use futures::StreamExt;
use futures::stream::BoxStream;
use millrace_datafs::{Config, Datafs};
use millrace_streams::dataset::{Dataset, DatasetSpec, FileFormat};
use millrace_streams::feed::{Feed, FeedError, FeedOptions, Plan, PlanOptions, Selection, Shard};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult,
};

use super::data::{parquet, put, rows};

const ROWS: i64 = 3000;

fn options() -> PlanOptions {
    PlanOptions { batch_rows: 64, seed: 3, window_rows: 256, ..PlanOptions::default() }
}

async fn store_of(files: &[(&str, Vec<u8>)]) -> Arc<dyn ObjectStore> {
    let store = InMemory::new();
    for (path, bytes) in files {
        put(&store, path, bytes.clone()).await;
    }
    Arc::new(store)
}

fn line(id: i64) -> String {
    format!(
        "{{\"id\": {id}, \"label\": {}, \"x\": [{id}, 0.5], \"pad\": \"{}\"}}\n",
        id % 10,
        "p".repeat(900)
    )
}

fn csv_line(id: i64) -> String {
    format!("{id},{},\"{}\n,\"\n", id % 10, "p".repeat(900))
}

fn tar_of(ids: Range<i64>) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    let mut add = |name: String, content: &[u8]| {
        let mut header = tar::Header::new_ustar();
        header.set_size(content.len() as u64);
        builder.append_data(&mut header, name, content).unwrap();
    };
    for id in ids {
        add(format!("{id:06}.id"), id.to_string().as_bytes());
        add(format!("{id:06}.cls"), (id % 10).to_string().as_bytes());
        add(format!("{id:06}.bin"), &[id as u8; 1200]);
    }
    builder.into_inner().unwrap()
}

/// Rows `0..ROWS` in three files of each format, some of several row groups.
async fn datasets() -> Vec<(&'static str, Arc<dyn ObjectStore>)> {
    let parts = [0..100, 100..2900, 2900..ROWS];
    let text = |line: fn(i64) -> String, head: &str, part: &Range<i64>| {
        let mut text = head.to_owned();
        part.clone().for_each(|id| text += &line(id));
        text.into_bytes()
    };
    let named = |suffix: &str, file: &dyn Fn(&Range<i64>) -> Vec<u8>| {
        let files: Vec<(String, Vec<u8>)> =
            parts.iter().enumerate().map(|(at, part)| (format!("t/{at}{suffix}"), file(part))).collect();
        async move {
            let store = InMemory::new();
            for (path, bytes) in files {
                put(&store, &path, bytes).await;
            }
            Arc::new(store) as Arc<dyn ObjectStore>
        }
    };
    let packed = |bytes: Vec<u8>| {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        std::io::Write::write_all(&mut encoder, &bytes).unwrap();
        encoder.finish().unwrap()
    };
    vec![
        ("jsonl", named(".jsonl", &|part| text(line, "", part)).await),
        ("jsonl.gz", named(".jsonl.gz", &|part| packed(text(line, "", part))).await),
        ("csv", named(".csv", &|part| text(csv_line, "id,label,pad\n", part)).await),
        (
            "csv.zst",
            named(".csv.zst", &|part| {
                zstd::encode_all(&text(csv_line, "id,label,pad\n", part)[..], 1).unwrap()
            })
            .await,
        ),
        ("tar", named(".tar", &|part| tar_of(part.clone())).await),
    ]
}

fn ids(batch: &RecordBatch) -> Vec<i64> {
    batch.column_by_name("id").unwrap().as_primitive::<Int64Type>().values().to_vec()
}

/// The ids of the places `0..places` of a plan, put together from the parts of `world` readers.
async fn read(store: &Arc<dyn ObjectStore>, plan: &Arc<Plan>, places: u64, world: u32) -> Vec<i64> {
    let steps = usize::try_from(places.div_ceil(plan.batch_rows() as u64)).unwrap();
    let mut batches: Vec<Vec<i64>> = vec![Vec::new(); steps];
    for rank in 0..world {
        let feed = Feed::open(Arc::clone(plan), Arc::clone(store), &FeedOptions::default()).unwrap();
        let mut stream = feed.stream_places(Shard::new(rank, world).unwrap(), 0..places, 1).unwrap();
        let mut step = 0;
        while let Some(batch) = stream.next().await {
            let batch = batch.unwrap();
            assert_eq!(batch.rows.iter().map(|row| *row as i64).collect::<Vec<_>>(), ids(&batch.batch));
            batches[step].extend(ids(&batch.batch));
            step += 1;
        }
        assert_eq!(step, steps);
    }
    batches.concat()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_row_comes_once_in_one_order_for_any_readers() {
    for (name, store) in datasets().await {
        let plan = Arc::new(Plan::build(&store, "t", &options()).await.unwrap());
        assert_eq!(plan.rows(), ROWS as u64, "{name}");
        let groups: usize = plan.dataset().files().iter().map(|file| file.row_groups.len()).sum();
        assert!(if name.contains('.') { groups == 3 } else { groups > 3 }, "{name}: {groups} row groups");
        let order = read(&store, &plan, ROWS as u64, 1).await;
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert!(sorted.iter().copied().eq(0..ROWS), "{name}");
        assert_ne!(order, sorted);
        for world in [2, 5] {
            assert_eq!(read(&store, &plan, ROWS as u64, world).await, order, "{name}, {world} readers");
        }
        // A worker gets the plan as text, and reads no file to use it.
        let text = serde_json::to_string(&*plan).unwrap();
        let sent: Plan = serde_json::from_str(&text).unwrap();
        assert_eq!(sent.id(), plan.id());
        assert_eq!(read(&store, &Arc::new(sent), 640, 3).await, order[..640], "{name}");
        // The first step of a reader that comes late.
        let feed = Feed::open(Arc::clone(&plan), Arc::clone(&store), &FeedOptions::default()).unwrap();
        assert_eq!(ids(&feed.batch(20, 0..64).await.unwrap().batch), order[1280..1344], "{name}");
        let again = Plan::build(&store, "t", &options()).await.unwrap();
        assert_eq!(again.id(), plan.id(), "{name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conditions_splits_and_columns_work_on_any_source() {
    for (name, store) in datasets().await {
        let label = if name == "tar" { "cls" } else { "label" };
        let parts = [("a".to_owned(), "0.5".to_owned()), ("b".to_owned(), "0.5".to_owned())];
        let mut seen = Vec::new();
        for part in ["a", "b"] {
            let filter = format!("{label} != 3");
            let selection = Selection::new(Some(&filter), &parts, Some(part), &["id".to_owned()]).unwrap();
            let options = PlanOptions { selection, ..options() };
            let plan = Arc::new(Plan::build(&store, "t", &options).await.unwrap());
            seen.extend(read(&store, &plan, plan.rows(), 2).await);
        }
        seen.sort_unstable();
        assert!(seen.into_iter().eq((0..ROWS).filter(|id| id % 10 != 3)), "{name}");

        let plan = Plan::build(&store, "t", &options()).await.unwrap();
        let columns = Some(vec![label.to_owned(), "id".to_owned()]);
        let options = FeedOptions { columns, ..FeedOptions::default() };
        let feed = Feed::open(plan, Arc::clone(&store), &options).unwrap();
        let batch = feed.batch(0, 0..64).await.unwrap().batch;
        assert_eq!(batch.num_columns(), 2);
        let labels = batch.column(0).as_primitive::<Int64Type>().values().to_vec();
        assert_eq!(labels, ids(&batch).iter().map(|id| id % 10).collect::<Vec<_>>(), "{name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_epoch_fetches_each_byte_about_once() {
    for (name, inner) in datasets().await {
        let store = Metered::new(inner);
        let shared: Arc<dyn ObjectStore> = store.clone();
        let size: u64 =
            Dataset::read(&shared, "t").await.unwrap().files().iter().map(|file| file.bytes).sum();
        let plan = Arc::new(Plan::build(&shared, "t", &options()).await.unwrap());
        store.bytes.store(0, Ordering::SeqCst);
        read(&shared, &plan, ROWS as u64, 1).await;
        let fetched = store.bytes.load(Ordering::SeqCst);
        assert!(fetched <= size * 11 / 10, "{name}: {fetched} of {size} bytes");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn folders_are_labelled_as_torchvision_does() {
    let mut files = Vec::new();
    for (class, count) in [("zebra", 3), ("ant", 4), ("Bee", 2), ("ü", 1)] {
        for number in 0..count {
            files.push((format!("t/{class}/deep/{number}.jpg"), format!("{class} {number}").into_bytes()));
        }
    }
    files.push(("t/README.md".to_owned(), b"beside the classes".to_vec()));
    files.push(("t/ant/.hidden.jpg".to_owned(), b"hidden".to_vec()));
    let inner = InMemory::new();
    for (path, bytes) in &files {
        put(&inner, path, bytes.clone()).await;
    }
    let metered = Metered::new(Arc::new(inner));
    let store: Arc<dyn ObjectStore> = metered.clone();
    let options = PlanOptions { batch_rows: 10, format: Some(FileFormat::Folder), ..PlanOptions::default() };
    let plan = Arc::new(Plan::build(&store, "/t", &options).await.unwrap());
    assert_eq!(metered.bytes.load(Ordering::SeqCst), 0, "a plan needs the names alone");
    assert_eq!(plan.rows(), 10);
    let feed = Feed::open(Arc::clone(&plan), Arc::clone(&store), &FeedOptions::default()).unwrap();
    let batch = feed.batch(0, 0..10).await.unwrap().batch;
    let names: Vec<&str> = batch.schema_ref().fields().iter().map(|field| field.name().as_str()).collect();
    assert_eq!(names, ["path", "data", "label", "class"]);
    let labels: BTreeMap<&str, i64> = BTreeMap::from([("Bee", 0), ("ant", 1), ("zebra", 2), ("ü", 3)]);
    for row in 0..10 {
        let class = batch.column(3).as_string::<i32>().value(row);
        let path = batch.column(0).as_string::<i32>().value(row);
        assert!(path.starts_with(&format!("{class}/deep/")), "{path}");
        assert_eq!(batch.column(2).as_primitive::<Int64Type>().value(row), labels[class]);
        let content = &files.iter().find(|(name, _)| name == &format!("t/{path}")).unwrap().1;
        assert_eq!(batch.column(1).as_binary::<i32>().value(row), content);
    }
    // Columns without the bytes read no file.
    metered.bytes.store(0, Ordering::SeqCst);
    let columns = Some(vec!["label".to_owned()]);
    let selection = Selection::new(Some("class = 'ant'"), &[], None, &[]).unwrap();
    let ants = Plan::build(&store, "t", &PlanOptions { selection, ..options.clone() }).await.unwrap();
    assert_eq!(ants.rows(), 4);
    let feed =
        Feed::open(ants, Arc::clone(&store), &FeedOptions { columns, ..FeedOptions::default() }).unwrap();
    let batch = feed.batch(0, 0..4).await.unwrap().batch;
    assert_eq!(batch.column(0).as_primitive::<Int64Type>().values().to_vec(), [1; 4]);
    assert_eq!(metered.bytes.load(Ordering::SeqCst), 0);
    // A file that shrinks is noticed.
    put(&*store, "t/ant/deep/0.jpg", b"x".to_vec()).await;
    let feed = Feed::open(plan, Arc::clone(&store), &FeedOptions::default()).unwrap();
    let error = feed.batch(0, 0..10).await.unwrap_err();
    assert!(error.to_string().contains("ant/deep/0.jpg"), "{error}");
}

async fn error_of(files: &[(&str, &str)], format: Option<FileFormat>) -> FeedError {
    let files: Vec<(&str, Vec<u8>)> =
        files.iter().map(|(path, text)| (*path, text.as_bytes().to_vec())).collect();
    let store = store_of(&files).await;
    let plan = Plan::build(&store, "t", &PlanOptions { format, ..options() }).await;
    let opened = plan.and_then(|plan| Feed::open(plan, store, &FeedOptions::default()));
    opened.err().expect("the dataset is accepted")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn datasets_that_are_not_of_one_format_say_so() {
    let error = error_of(&[("t/a.csv", "a\n1\n"), ("t/b.jsonl", "{\"a\":1}\n")], None).await;
    assert!(matches!(error, FeedError::MixedFormats { .. }), "{error}");
    for part in ["t/a.csv is CSV", "t/b.jsonl is JSON lines", "csv:VOLUME@SNAPSHOT:/PATH"] {
        assert!(error.to_string().contains(part), "{error}");
    }
    let error = error_of(&[("t/cat/1.jpg", "x"), ("t/dog/1.jpg", "x")], None).await;
    assert!(matches!(error, FeedError::NoFiles { ignored: 2, .. }), "{error}");
    assert!(error.to_string().contains("folder:VOLUME@SNAPSHOT:/PATH"), "{error}");
    let error = error_of(&[("t/a.tar.gz", "x")], None).await;
    assert!(error.to_string().contains("t/a.tar.gz") && error.to_string().contains("gzip -d"), "{error}");
    let error = error_of(&[("t/a.jpg", "x")], Some(FileFormat::Folder)).await;
    assert!(matches!(error, FeedError::NoFiles { .. }), "{error}");
    let error = error_of(&[("t/a.csv", "a\n"), ("t/b.csv", "")], None).await;
    assert!(matches!(error, FeedError::NoRows { files: 2, .. }), "{error}");

    let error = error_of(&[("t/a.jsonl", "{}\n{}\n")], None).await.to_string();
    assert!(error.contains("2 rows without a single column"), "{error}");
    let deep = format!("{{\"a\":{}1{}}}", "[".repeat(100), "]".repeat(100));
    let error = error_of(&[("t/a.jsonl", deep.as_str())], None).await.to_string();
    assert!(error.contains("nested too deeply"), "{error}");

    // The format in front chooses among files, and among names without a suffix that is known.
    let files = [
        ("t/a.csv", b"a\n1\n".to_vec()),
        ("t/b.jsonl", b"{\"a\":1}\n{\"a\":2}\n".to_vec()),
        ("t/c.parquet", parquet(&[rows(0, 5)])),
        ("u/export.txt", b"a\n1\n2\n3\n".to_vec()),
    ];
    let store = store_of(&files).await;
    for (path, format, rows) in [
        ("t", Some(FileFormat::Csv), 1),
        ("t", Some(FileFormat::JsonLines), 2),
        // As earlier releases: only files with footers count where there are some.
        ("t", None, 5),
        ("u", Some(FileFormat::Csv), 3),
        ("u/export.txt", Some(FileFormat::Csv), 3),
    ] {
        assert_eq!(Dataset::read_as(&store, path, format).await.unwrap().rows(), rows, "{path} {format:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn schemas_unite_over_files_and_clashes_name_both_lines() {
    let error = error_of(&[("t/a.jsonl", "{\"x\":1}\n"), ("t/b.jsonl", "\n{\"x\":\"1\"}\n")], None).await;
    for part in ["\"x\"", "Int64 in t/a.jsonl, line 1", "Utf8 in t/b.jsonl, line 2"] {
        assert!(error.to_string().contains(part), "{error}");
    }
    let error = error_of(&[("t/a.csv", "x,y\n1,2\n"), ("t/b.csv", "x,y\n1\n")], None).await;
    assert!(error.to_string().contains("t/b.csv, line 2"), "{error}");

    let files = [
        ("t/a.csv", b"x,y\n1,2\n".to_vec()),
        ("t/b.csv", b"y,z\n0.5,a\n".to_vec()),
        ("t/c.csv", b"z,y,x\n7,3,4\n".to_vec()),
    ];
    let store = store_of(&files).await;
    let plan = Plan::build(&store, "t", &PlanOptions { batch_rows: 3, ..options() }).await.unwrap();
    let fields = plan.dataset().schema().fields();
    let kinds: Vec<String> = fields.iter().map(|f| format!("{} {}", f.name(), f.data_type())).collect();
    assert_eq!(kinds, ["x Int64", "y Float64", "z Utf8"]);
    let feed = Feed::open(plan, store, &FeedOptions::default()).unwrap();
    let batch = feed.batch(0, 0..3).await.unwrap();
    let row = |index: u64| batch.rows.iter().position(|row| *row == index).unwrap();
    let (x, z) =
        (batch.batch.column(0).as_primitive::<Int64Type>(), batch.batch.column(2).as_string::<i32>());
    assert!(x.is_null(row(1)) && z.is_null(row(0)));
    assert_eq!((x.value(row(2)), z.value(row(2)), z.value(row(1))), (4, "7", "a"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_description_of_a_snapshot_is_made_once() {
    let home = tempfile::tempdir().unwrap();
    let datafs = Datafs::open(home.path(), &Config::default()).unwrap();
    let name = "lines".parse().unwrap();
    datafs.volume_create(&name).unwrap();
    let live = datafs.view(&"lines".parse().unwrap()).unwrap();
    live.create_dir_all("train").unwrap();
    let text: String = (0..ROWS).map(line).collect();
    live.write_file("train/a.jsonl", text.as_bytes()).unwrap();
    datafs.snapshot_create(&name, &"v1".parse().unwrap()).unwrap();

    let spec: DatasetSpec = "lines@v1:/train".parse().unwrap();
    let opened = spec.open(&datafs).await.unwrap();
    let plan = Arc::new(opened.plan(&options()).await.unwrap());
    let mut seen = read(opened.store(), &plan, ROWS as u64, 2).await;
    seen.sort_unstable();
    assert!(seen.into_iter().eq(0..ROWS));
    assert_eq!(std::fs::read_dir(home.path().join("feed")).unwrap().count(), 1);
    let again = spec.open(&datafs).await.unwrap().plan(&options()).await.unwrap();
    assert_eq!(again.id(), plan.id());

    // Another format is another description, and another plan.
    let spec: DatasetSpec = "csv:lines@v1:/train".parse().unwrap();
    assert_eq!(spec.to_string(), "csv:lines@v1:/train");
    let cells = spec.open(&datafs).await.unwrap().plan(&options()).await.unwrap();
    assert_ne!(cells.id(), plan.id());
    let spec: DatasetSpec = "folder:lines@v1:/".parse().unwrap();
    let folder = spec.open(&datafs).await.unwrap().plan(&options()).await.unwrap();
    assert_eq!(folder.rows(), 1);
    assert_ne!(folder.id(), plan.id());
    let error = "xml:lines@v1:/train".parse::<DatasetSpec>().unwrap_err().to_string();
    assert!(error.contains("format \"xml\" is unknown") && error.contains("jsonl"), "{error}");
    // A volume may have the name of a format.
    let spec: DatasetSpec = "csv:/train".parse().unwrap();
    assert_eq!((spec.format, spec.source.volume.to_string().as_str()), (None, "csv"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scan_that_is_given_up_stops_reading() {
    let text: String = (0..40_000).map(line).collect();
    let files: Vec<(&str, Vec<u8>)> = vec![("t/a.jsonl", text.into_bytes())];
    let store = Metered::new(store_of(&files).await);
    let shared: Arc<dyn ObjectStore> = store.clone();
    let planning = tokio::spawn({
        let shared = Arc::clone(&shared);
        async move { Plan::build(&shared, "t", &options()).await.map(drop) }
    });
    store.reading.notified().await;
    planning.abort();
    assert!(planning.await.unwrap_err().is_cancelled());
    // The thread has its own reference to the store until it stops.
    while Arc::strong_count(&store) > 2 {
        tokio::task::yield_now().await;
    }
    let read = store.bytes.load(Ordering::SeqCst);
    assert!(read < 20 << 20, "{read} bytes");
}

/// A store that counts the bytes it delivers.
#[derive(Debug)]
pub(crate) struct Metered {
    inner: Arc<dyn ObjectStore>,
    pub(crate) bytes: AtomicU64,
    reading: tokio::sync::Notify,
}

impl Metered {
    pub(crate) fn new(inner: Arc<dyn ObjectStore>) -> Arc<Self> {
        Arc::new(Self { inner, bytes: AtomicU64::new(0), reading: tokio::sync::Notify::new() })
    }
}

impl std::fmt::Display for Metered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Metered({})", self.inner)
    }
}

#[async_trait::async_trait]
impl ObjectStore for Metered {
    async fn put_opts(&self, p: &Path, b: PutPayload, o: PutOptions) -> object_store::Result<PutResult> {
        self.inner.put_opts(p, b, o).await
    }
    async fn put_multipart_opts(
        &self,
        p: &Path,
        o: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(p, o).await
    }
    async fn get_opts(&self, p: &Path, o: GetOptions) -> object_store::Result<GetResult> {
        let is_head = o.head;
        let got = self.inner.get_opts(p, o).await?;
        if !is_head {
            self.bytes.fetch_add(got.range.end - got.range.start, Ordering::SeqCst);
            self.reading.notify_one();
        }
        Ok(got)
    }
    async fn get_ranges(&self, p: &Path, ranges: &[Range<u64>]) -> object_store::Result<Vec<Bytes>> {
        let got = self.inner.get_ranges(p, ranges).await?;
        self.bytes.fetch_add(got.iter().map(|bytes| bytes.len() as u64).sum(), Ordering::SeqCst);
        Ok(got)
    }
    fn delete_stream(
        &self,
        locations: BoxStream<'static, object_store::Result<Path>>,
    ) -> BoxStream<'static, object_store::Result<Path>> {
        self.inner.delete_stream(locations)
    }
    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        self.inner.list(prefix)
    }
    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }
    async fn copy_opts(&self, from: &Path, to: &Path, o: CopyOptions) -> object_store::Result<()> {
        self.inner.copy_opts(from, to, o).await
    }
}
