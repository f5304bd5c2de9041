//! Reader of data files in an object store: footers, and one row group at a time.
//!
//! I/O happens on the runtime, decoding on its blocking threads, so that a large row group never delays a
//! heartbeat on the same runtime.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use arrow::array::{ArrayRef, BooleanArray, RecordBatch};
use arrow::compute::{concat_batches, filter_record_batch};
use arrow::datatypes::{FieldRef, Schema, SchemaRef};
use object_store::ObjectStore;
use parking_lot::Mutex;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ParquetRecordBatchReader, RowSelection};
use parquet::arrow::{ParquetRecordBatchStreamBuilder, ProjectionMask};
use tokio::sync::Semaphore;

use crate::dataset::{DataFile, FileFormat, conform};
use crate::feed::Plan;
use crate::feed::error::{FeedError, Result};
use crate::feed::footer::{StoreFile, catch_panic, parquet_metadata, rows_of};
use crate::feed::ipc;
use crate::feed::source::{self, Classes};

/// Parsed footers kept; a footer is some tens of kilobytes.
const FOOTERS_KEPT: usize = 512;
/// Bytes of the dictionaries of Arrow IPC files that are kept with the footers; the newest file's are always
/// kept.
const DICTIONARIES_BYTES_KEPT: u64 = 256 << 20;

/// Decodes the row groups of one plan, projected and conformed to one schema.
pub(crate) struct GroupReader {
    store: Arc<dyn ObjectStore>,
    plan: Arc<Plan>,
    schema: SchemaRef,
    footers: Mutex<Footers>,
    permits: Semaphore,
    /// The classes of a dataset of a folder.
    classes: Arc<Classes>,
    /// Largest compressed record batch once it is decompressed.
    decoded_bytes_max: u64,
}

#[derive(Default)]
struct Footers {
    parquet: HashMap<u32, ArrowReaderMetadata>,
    ipc: HashMap<u32, Arc<ipc::IpcFile>>,
    order: VecDeque<u32>,
}

impl Footers {
    fn evict_after_insert(&mut self, file: u32) {
        self.order.push_back(file);
        let mut bytes: u64 = self.ipc.values().map(|ipc| ipc.bytes()).sum();
        while (self.order.len() > FOOTERS_KEPT || bytes > DICTIONARIES_BYTES_KEPT)
            && self.order.len() > 1
            && let Some(oldest) = self.order.pop_front()
        {
            self.parquet.remove(&oldest);
            bytes -= self.ipc.remove(&oldest).map_or(0, |ipc| ipc.bytes());
        }
    }
}

impl GroupReader {
    pub(crate) fn new(
        store: Arc<dyn ObjectStore>,
        plan: Arc<Plan>,
        schema: SchemaRef,
        concurrency: usize,
        decoded_bytes_max: u64,
    ) -> Self {
        let permits = Semaphore::new(concurrency.max(1));
        let classes = Arc::new(Classes::of(plan.dataset()));
        Self { store, plan, schema, footers: Mutex::default(), permits, classes, decoded_bytes_max }
    }

    /// Path of the file that holds a row group of the plan.
    pub(crate) fn path_of(&self, group: u32) -> &str {
        &self.plan.group_file(group).path
    }

    /// The columns of the row groups.
    pub(crate) fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    /// Rows of a decoded row group: its selected ones.
    pub(crate) fn rows_of(&self, group: u32) -> usize {
        let rows = self.plan.group(group).rows as usize;
        self.plan.mask_of(group).map_or(rows, |mask| mask.true_count())
    }

    /// Reads and decodes one row group of the plan, or the part of it that the plan names: its selected rows.
    ///
    /// Holds one of the decoding permits, so memory in flight is at most that many row groups,
    /// each once encoded and once decoded.
    pub(crate) async fn read(&self, group: u32) -> Result<RecordBatch> {
        let stopped = |_| FeedError::Stopped { file: self.path_of(group).to_owned() };
        let _permit = self.permits.acquire().await.map_err(stopped)?;
        self.decode(group).await
    }

    /// The decoding permits.
    pub(crate) fn permits(&self) -> &Semaphore {
        &self.permits
    }

    /// As [`GroupReader::read`], for a caller that holds a decoding permit.
    pub(crate) async fn decode(&self, group: u32) -> Result<RecordBatch> {
        let address = self.plan.group(group);
        let file = self.plan.group_file(group);
        let stopped = || FeedError::Stopped { file: file.path.clone() };
        let source = StoreFile::new(&self.store, &file.path, file.bytes)?;
        let index = address.index as usize;
        let (first, rows) = (address.first as usize, address.rows as usize);
        let mask = self.plan.mask_of(group);
        let schema = Arc::clone(&self.schema);
        let path = file.path.clone();
        let decoding = match file.format {
            FileFormat::Parquet => {
                let metadata = self.parquet_footer(address.file, file).await?;
                let opening = open_group(source, metadata, file, index, first..first + rows, &schema);
                let decoder = catch_panic(&path, &format!("row group {index}"), opening).await?;
                tokio::task::spawn_blocking(move || {
                    let columns = decode_parquet(decoder, &path, index)?;
                    finish(columns, rows, &schema, mask.as_ref(), &path)
                })
            }
            FileFormat::ArrowIpc => {
                let footer = self.ipc_footer(address.file, file).await?;
                let block = ipc::read_block(source, &footer, index, &path).await?;
                let bytes_max = self.decoded_bytes_max;
                tokio::task::spawn_blocking(move || {
                    let columns = ipc::decode_block(&footer, index, &block, &schema, bytes_max, &path)?;
                    finish(columns, rows, &schema, mask.as_ref(), &path)
                })
            }
            FileFormat::JsonLines | FileFormat::Csv | FileFormat::Tar | FileFormat::Folder => {
                let bytes_max = self.decoded_bytes_max;
                let own = self.own_types(&schema);
                let fetched = source::fetch(&self.store, file, index, &own, bytes_max).await?;
                let (plan, classes) = (Arc::clone(&self.plan), Arc::clone(&self.classes));
                tokio::task::spawn_blocking(move || {
                    let file = plan.group_file(group);
                    let columns = source::decode(fetched, file, index, rows, &own, &classes, bytes_max)?;
                    finish(columns, rows, &schema, mask.as_ref(), &path)
                })
            }
        };
        decoding.await.map_err(|e| match e.is_panic() {
            true => FeedError::corrupt(&file.path, format!("row group {index}"), e),
            false => stopped(),
        })?
    }

    /// The columns of `schema` with the types that the dataset has alone: in a mixture they may be those of other sources,
    /// which texts are not decoded to.
    fn own_types(&self, schema: &Schema) -> SchemaRef {
        let own = self.plan.dataset().schema();
        let field = |field: &FieldRef| match own.field_with_name(field.name()) {
            Ok(own) => own.clone(),
            Err(_) => field.as_ref().clone(),
        };
        Arc::new(Schema::new(schema.fields().iter().map(field).collect::<Vec<_>>()))
    }

    async fn parquet_footer(&self, number: u32, file: &DataFile) -> Result<ArrowReaderMetadata> {
        if let Some(found) = self.footers.lock().parquet.get(&number) {
            return Ok(found.clone());
        }
        let source = StoreFile::new(&self.store, &file.path, file.bytes)?;
        let reading = parquet_metadata(source, &file.path, self.plan.has_parts());
        let metadata = catch_panic(&file.path, "the footer", reading).await?;
        let groups = metadata.metadata().row_groups();
        let rows = groups.iter().map(|g| rows_of(g, &file.path)).collect::<Result<Vec<_>>>()?;
        check_unchanged(file, &rows)?;
        let mut footers = self.footers.lock();
        if footers.parquet.insert(number, metadata.clone()).is_none() {
            footers.evict_after_insert(number);
        }
        Ok(metadata)
    }

    async fn ipc_footer(&self, number: u32, file: &DataFile) -> Result<Arc<ipc::IpcFile>> {
        if let Some(found) = self.footers.lock().ipc.get(&number) {
            return Ok(Arc::clone(found));
        }
        let source = StoreFile::new(&self.store, &file.path, file.bytes)?;
        let reading = ipc::IpcFile::open(source, &file.path, self.decoded_bytes_max);
        let footer = Arc::new(catch_panic(&file.path, "the footer", reading).await?);
        check_unchanged(file, footer.rows())?;
        let mut footers = self.footers.lock();
        if footers.ipc.insert(number, Arc::clone(&footer)).is_none() {
            footers.evict_after_insert(number);
        }
        Ok(footer)
    }
}

fn check_unchanged(file: &DataFile, rows: &[u64]) -> Result<()> {
    if rows.iter().eq(file.row_groups.iter().map(|g| &g.rows)) {
        return Ok(());
    }
    let planned: u64 = file.row_groups.iter().map(|g| g.rows).sum();
    let found: u64 = rows.iter().sum();
    Err(FeedError::Changed {
        file: file.path.clone(),
        what: format!(
            "planned {planned} rows in {} row groups, found {found} in {}",
            file.row_groups.len(),
            rows.len()
        ),
    })
}

/// Fetches the projected column chunks of some rows of one row group, only their pages where the file has
/// an index of them; nothing is decoded yet.
async fn open_group(
    source: StoreFile,
    metadata: ArrowReaderMetadata,
    file: &DataFile,
    index: usize,
    rows: Range<usize>,
    schema: &SchemaRef,
) -> Result<Option<ParquetRecordBatchReader>> {
    let roots: Vec<usize> = metadata
        .schema()
        .fields()
        .iter()
        .enumerate()
        .filter(|(_, f)| schema.index_of(f.name()).is_ok())
        .map(|(i, _)| i)
        .collect();
    if roots.is_empty() {
        return Ok(None);
    }
    let what = || format!("row group {index}");
    let mask = ProjectionMask::roots(metadata.parquet_schema(), roots);
    let total = usize::try_from(metadata.metadata().row_group(index).num_rows()).unwrap_or(usize::MAX);
    let mut builder = ParquetRecordBatchStreamBuilder::new_with_metadata(source, metadata)
        .with_row_groups(vec![index])
        .with_projection(mask)
        .with_batch_size(rows.len().max(1));
    if rows != (0..total) {
        builder =
            builder.with_row_selection(RowSelection::from_consecutive_ranges(std::iter::once(rows), total));
    }
    let mut stream = builder.build().map_err(|e| FeedError::from_parquet(&file.path, what(), e))?;
    stream.next_row_group().await.map_err(|e| FeedError::from_parquet(&file.path, what(), e))
}

fn decode_parquet(
    decoder: Option<ParquetRecordBatchReader>,
    path: &str,
    index: usize,
) -> Result<HashMap<String, ArrayRef>> {
    let Some(decoder) = decoder else {
        return Ok(HashMap::new());
    };
    let corrupt = |e| FeedError::corrupt(path, format!("row group {index}"), e);
    let batches = decoder.collect::<Result<Vec<_>, _>>().map_err(corrupt)?;
    let batch = match batches.as_slice() {
        [] => return Ok(HashMap::new()),
        [one] => one.clone(),
        [first, ..] => concat_batches(&first.schema(), &batches).map_err(corrupt)?,
    };
    Ok(columns_of(&batch))
}

pub(crate) fn columns_of(batch: &RecordBatch) -> HashMap<String, ArrayRef> {
    let schema = batch.schema();
    let names = schema.fields().iter().map(|f| f.name().clone());
    names.zip(batch.columns().iter().cloned()).collect()
}

/// The batch of a unit of reading: its selected rows, in the columns of `schema`.
fn finish(
    columns: HashMap<String, ArrayRef>,
    rows: usize,
    schema: &SchemaRef,
    mask: Option<&BooleanArray>,
    path: &str,
) -> Result<RecordBatch> {
    if let Some(short) = columns.values().find(|c| c.len() != rows) {
        return Err(FeedError::Changed {
            file: path.to_string(),
            what: format!("planned {rows} rows in a row group, decoded {}", short.len()),
        });
    }
    let batch = conform(&columns, rows, schema).map_err(|e| FeedError::assemble(path, e))?;
    match mask {
        None => Ok(batch),
        Some(mask) => filter_record_batch(&batch, mask).map_err(|e| FeedError::assemble(path, e)),
    }
}
