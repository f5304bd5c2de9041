//! Test data: datasets in memory, and stores that count reads and fail.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arrow::array::{ArrayRef, FixedSizeListArray, Float32Array, Int64Array, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Field};
use bytes::Bytes;
use futures::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use parquet::arrow::ArrowWriter;
use parquet::basic::Compression;
use parquet::file::properties::WriterProperties;

/// Rows `first..first + rows` with columns that follow from `id`, the global row index.
pub(crate) fn rows(first: u64, rows: u64) -> RecordBatch {
    let ids: Vec<i64> = (first..first + rows).map(|i| i as i64).collect();
    let pixels: Vec<f32> = ids.iter().flat_map(|&i| (0..4).map(move |k| pixel(i, k))).collect();
    let item = Arc::new(Field::new("item", DataType::Float32, false));
    let pixels = FixedSizeListArray::new(item, 4, Arc::new(Float32Array::from(pixels)), None);
    let names: Vec<Option<String>> = ids.iter().map(|&i| name(i)).collect();
    RecordBatch::try_from_iter_with_nullable([
        ("id", Arc::new(Int64Array::from(ids)) as ArrayRef, false),
        ("pixels", Arc::new(pixels) as ArrayRef, false),
        ("name", Arc::new(StringArray::from(names)) as ArrayRef, true),
    ])
    .unwrap()
}

pub(crate) fn pixel(id: i64, k: i64) -> f32 {
    (id * 4 + k) as f32
}

pub(crate) fn name(id: i64) -> Option<String> {
    (id % 7 != 0).then(|| format!("row {id}"))
}

/// A Parquet file, one row group per batch.
pub(crate) fn parquet(batches: &[RecordBatch]) -> Vec<u8> {
    let properties = WriterProperties::builder().set_compression(Compression::SNAPPY).build();
    let mut writer = ArrowWriter::try_new(Vec::new(), batches[0].schema(), Some(properties)).unwrap();
    for batch in batches {
        writer.write(batch).unwrap();
        writer.flush().unwrap();
    }
    writer.into_inner().unwrap()
}

/// An Arrow IPC file, one record batch per batch.
pub(crate) fn ipc(batches: &[RecordBatch]) -> Vec<u8> {
    let mut writer = arrow::ipc::writer::FileWriter::try_new(Vec::new(), &batches[0].schema()).unwrap();
    for batch in batches {
        writer.write(batch).unwrap();
    }
    writer.into_inner().unwrap()
}

pub(crate) async fn put(store: &dyn ObjectStore, path: &str, bytes: Vec<u8>) {
    store.put(&Path::parse(path).unwrap(), PutPayload::from(bytes)).await.unwrap();
}

/// `train/NNN.parquet` (every third one `.arrow`) with row groups of the sizes in `shape`.
pub(crate) async fn dataset(shape: &[Vec<u64>]) -> Arc<dyn ObjectStore> {
    let store = InMemory::new();
    let mut first = 0;
    for (i, sizes) in shape.iter().enumerate() {
        let groups: Vec<RecordBatch> = sizes
            .iter()
            .map(|&n| {
                first += n;
                rows(first - n, n)
            })
            .collect();
        match i % 3 {
            2 => put(&store, &format!("train/{i:03}.arrow"), ipc(&groups)).await,
            _ => put(&store, &format!("train/{i:03}.parquet"), parquet(&groups)).await,
        }
    }
    Arc::new(store)
}

/// A store that passes requests on to another one, counts ranged reads and fails some.
#[derive(Debug)]
pub(crate) struct CountingStore {
    inner: Arc<dyn ObjectStore>,
    pub(crate) reads: AtomicUsize,
    /// Number of following reads that fail.
    pub(crate) failures: AtomicUsize,
}

impl CountingStore {
    pub(crate) fn new(inner: Arc<dyn ObjectStore>) -> Arc<Self> {
        Arc::new(Self { inner, reads: AtomicUsize::new(0), failures: AtomicUsize::new(0) })
    }

    pub(crate) fn reads(&self) -> usize {
        self.reads.load(Ordering::SeqCst)
    }

    fn pass(&self) -> Result<()> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        let failing = self.failures.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
        match failing {
            Ok(_) => Err(object_store::Error::Generic { store: "test", source: "reset".into() }),
            Err(_) => Ok(()),
        }
    }
}

impl fmt::Display for CountingStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Watched({})", self.inner)
    }
}

#[async_trait::async_trait]
impl ObjectStore for CountingStore {
    async fn put_opts(&self, p: &Path, b: PutPayload, o: PutOptions) -> Result<PutResult> {
        self.inner.put_opts(p, b, o).await
    }
    async fn put_multipart_opts(&self, p: &Path, o: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(p, o).await
    }
    async fn get_opts(&self, p: &Path, o: GetOptions) -> Result<GetResult> {
        if !o.head {
            self.pass()?;
        }
        self.inner.get_opts(p, o).await
    }
    async fn get_ranges(&self, p: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.pass()?;
        self.inner.get_ranges(p, ranges).await
    }
    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(locations)
    }
    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }
    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }
    async fn copy_opts(&self, from: &Path, to: &Path, o: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, o).await
    }
}
