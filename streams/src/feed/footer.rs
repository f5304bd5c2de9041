//! Footers of data files in an object store: row groups, sizes and schema.

use std::any::Any;
use std::ops::Range;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use arrow::error::ArrowError;
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{FutureExt, TryFutureExt};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions};
use parquet::arrow::async_reader::AsyncFileReader;
use parquet::basic::Type as PhysicalType;
use parquet::errors::ParquetError;
use parquet::file::metadata::{PageIndexPolicy, ParquetMetaData, ParquetMetaDataReader, RowGroupMetaData};

use crate::dataset::{FileFormat, Footer, RowGroup};
use crate::feed::error::{FeedError, Result};
use crate::feed::ipc;

/// First read of a Parquet file, from its end: one request for nearly every footer.
const FOOTER_GUESS_BYTES: usize = 64 << 10;

/// One file of an object store, as input of the Parquet reader.
pub(crate) struct StoreFile {
    pub(crate) store: Arc<dyn ObjectStore>,
    pub(crate) path: Path,
    pub(crate) bytes: u64,
}

impl StoreFile {
    pub(crate) fn new(store: &Arc<dyn ObjectStore>, path: &str, bytes: u64) -> Result<Self> {
        let parsed = Path::parse(path)
            .map_err(|e| FeedError::invalid(format!("path {path:?} of the dataset: {e}")))?;
        Ok(Self { store: Arc::clone(store), path: parsed, bytes })
    }
}

fn external(error: object_store::Error) -> ParquetError {
    ParquetError::External(Box::new(error))
}

impl AsyncFileReader for StoreFile {
    fn get_bytes(&mut self, range: Range<u64>) -> BoxFuture<'_, parquet::errors::Result<Bytes>> {
        self.store.get_range(&self.path, range).map_err(external).boxed()
    }

    fn get_byte_ranges(
        &mut self,
        ranges: Vec<Range<u64>>,
    ) -> BoxFuture<'_, parquet::errors::Result<Vec<Bytes>>> {
        async move { self.store.get_ranges(&self.path, &ranges).await.map_err(external) }.boxed()
    }

    fn get_metadata<'a>(
        &'a mut self,
        options: Option<&'a ArrowReaderOptions>,
    ) -> BoxFuture<'a, parquet::errors::Result<Arc<ParquetMetaData>>> {
        async move {
            let bytes = self.bytes;
            let reader = ParquetMetaDataReader::new()
                .with_arrow_reader_options(options)
                .with_prefetch_hint(Some(FOOTER_GUESS_BYTES));
            reader.load_and_finish(self, bytes).await.map(Arc::new)
        }
        .boxed()
    }
}

/// Reads the footer of a file.
pub(crate) async fn read_footer(
    store: &Arc<dyn ObjectStore>,
    path: &str,
    bytes: u64,
    format: FileFormat,
) -> Result<Footer> {
    let file = StoreFile::new(store, path, bytes)?;
    catch_panic(path, "the footer", parse_footer(file, path, format)).await
}

/// Runs `reading`, and turns a panic into an error: some corruptions make the decoders panic instead of
/// failing.
pub(crate) async fn catch_panic<T>(
    path: &str,
    what: &str,
    reading: impl Future<Output = Result<T>>,
) -> Result<T> {
    let caught = AssertUnwindSafe(reading).catch_unwind().await;
    caught.unwrap_or_else(|panic| {
        Err(FeedError::corrupt(path, what, ArrowError::ParseError(panic_text(&*panic).to_string())))
    })
}

/// The message of a library's panic.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("the library panicked")
}

async fn parse_footer(file: StoreFile, path: &str, format: FileFormat) -> Result<Footer> {
    match format {
        FileFormat::Parquet => {
            let metadata = parquet_metadata(file, path, false).await?;
            let row_groups = metadata
                .metadata()
                .row_groups()
                .iter()
                .map(|g| {
                    let rows = rows_of(g, path)?;
                    Ok(RowGroup { rows, bytes: decoded_bytes(g) })
                })
                .collect::<Result<Vec<_>>>()?;
            Ok(Footer { schema: metadata.schema().as_ref().clone(), row_groups })
        }
        FileFormat::ArrowIpc => ipc::read_footer(file, path).await,
        other => Err(FeedError::invalid(format!("{path} is {other}, which has no footer"))),
    }
}

/// The Parquet footer; with `pages` also the offset index of the pages, where the file has one.
pub(crate) async fn parquet_metadata(
    mut file: StoreFile,
    path: &str,
    pages: bool,
) -> Result<ArrowReaderMetadata> {
    let policy = if pages { PageIndexPolicy::Optional } else { PageIndexPolicy::Skip };
    let options = ArrowReaderOptions::new()
        .with_column_index_policy(PageIndexPolicy::Skip)
        .with_offset_index_policy(policy);
    ArrowReaderMetadata::load_async(&mut file, options)
        .await
        .map_err(|e| FeedError::from_parquet(path, "the Parquet footer", e))
}

pub(crate) fn rows_of(group: &RowGroupMetaData, path: &str) -> Result<u64> {
    // Rows are addressed with 32 bits inside a row group.
    match u32::try_from(group.num_rows()) {
        Ok(rows) => Ok(u64::from(rows)),
        Err(e) => Err(FeedError::corrupt(path, "the row count of a row group", e)),
    }
}

/// Decoded size of a row group in bytes: exact for fixed-width columns, else the size that its encoder
/// reported, else its size before compression.
fn decoded_bytes(group: &RowGroupMetaData) -> u64 {
    let bytes = |n: i64| u64::try_from(n).unwrap_or(0);
    group
        .columns()
        .iter()
        .map(|column| {
            let values = bytes(column.num_values());
            match column.column_type() {
                PhysicalType::BOOLEAN => values / 8 + 1,
                PhysicalType::INT32 | PhysicalType::FLOAT => values.saturating_mul(4),
                PhysicalType::INT64 | PhysicalType::DOUBLE => values.saturating_mul(8),
                PhysicalType::INT96 => values.saturating_mul(8),
                PhysicalType::FIXED_LEN_BYTE_ARRAY => {
                    let width = column.column_descr().type_length();
                    values.saturating_mul(u64::try_from(width).unwrap_or(0))
                }
                PhysicalType::BYTE_ARRAY => {
                    let data = column.unencoded_byte_array_data_bytes();
                    bytes(data.unwrap_or_else(|| column.uncompressed_size()))
                        .saturating_add(values.saturating_mul(4))
                }
            }
        })
        .fold(0, u64::saturating_add)
}
