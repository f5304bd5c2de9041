//! The image stage of a feed: the image columns of a batch, decoded on all processors into one buffer.
//!
//! Bounds: one image is decoded per processor at a time, and all that are decoded together take at most
//! [`DECODED_BYTES_MAX`] (a larger one is decoded alone). Files that are fetched take at most [`FETCHED_BYTES_MAX`].
//! The tensors of a batch take at most [`BATCH_BYTES_MAX`], those of batches ahead of the reader
//! [`TENSOR_BYTES_AHEAD`], or one batch.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use arrow::array::{ArrayRef, FixedSizeListArray, Float32Array, RecordBatch, UInt8Array};
use arrow::buffer::{Buffer, ScalarBuffer};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use bytes::{Bytes, BytesMut};
use fast_image_resize::Resizer;
use futures::{StreamExt, TryStreamExt, stream};
use object_store::{ObjectStore, ObjectStoreExt};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::task::AbortOnDropHandle;

use super::decode::{Budget, Pixels, Share, decode};
use super::error::ImageError;
use super::geometry::Geometry;
use super::key::Draws;
use super::render::Renderer;
use super::source::{Source, folder_of, locate};
use super::{ImageOptions, Layout, Values};
use crate::feed::Plan;
use crate::feed::error::{FeedError, Result};
use crate::feed::footer::panic_text;

/// Tensors of batches that are assembled ahead of a reader.
pub(crate) const TENSOR_BYTES_AHEAD: u64 = 512 << 20;
/// Tensors of one batch of one reader.
const BATCH_BYTES_MAX: u64 = 4 << 30;
/// Memory of the images that are decoded and scaled at a time.
const DECODED_BYTES_MAX: u64 = 512 << 20;
/// Image files in memory that wait for a processor.
const FETCHED_BYTES_MAX: u64 = 128 << 20;
/// Largest image file.
const FILE_BYTES_MAX: u64 = 64 << 20;
/// Image files of one batch that are fetched at a time.
const FETCHES: usize = 16;
/// Encoded bytes and rows that one task decodes: a task costs about 20 µs.
const TASK_BYTES: usize = 128 << 10;
const TASK_ROWS: usize = 32;

/// The rows of a batch: where they are in decoded row groups, and which ones they are.
pub(crate) struct Rows {
    pub(crate) sources: Vec<Arc<RecordBatch>>,
    pub(crate) index: Vec<(usize, usize)>,
    pub(crate) rows: Vec<u64>,
    pub(crate) epochs: Vec<u64>,
    /// The source of each row of a mixture; empty for one dataset.
    pub(crate) origins: Vec<u32>,
}

impl Rows {
    /// The rows, epochs and origins.
    pub(crate) fn into_numbers(self: Arc<Self>) -> (Vec<u64>, Vec<u64>, Vec<u32>) {
        match Arc::try_unwrap(self) {
            Ok(own) => (own.rows, own.epochs, own.origins),
            Err(shared) => (shared.rows.clone(), shared.epochs.clone(), shared.origins.clone()),
        }
    }
}

/// The image columns of a feed.
pub(crate) struct Images {
    columns: Vec<Arc<Column>>,
    shared: Arc<Shared>,
}

struct Column {
    /// Its position in the batch.
    at: usize,
    name: String,
    source: Source,
    renderer: Renderer,
}

/// A dataset that rows come from.
struct Origin {
    plan: Arc<Plan>,
    store: Arc<dyn ObjectStore>,
    /// The folder that names are relative to.
    folder: String,
}

struct Shared {
    /// The dataset, or the sources of a mixture.
    origins: Vec<Origin>,
    processors: usize,
    permits: Arc<Semaphore>,
    /// Kilobytes of files in memory.
    fetching: Arc<Semaphore>,
    budget: Budget,
}

/// Rows that one task decodes, and their part of the tensor.
struct Task {
    rows: Range<usize>,
    slot: BytesMut,
}

/// A file in memory, and its part of the bound.
struct Fetched {
    content: Bytes,
    _permit: OwnedSemaphorePermit,
}

impl Images {
    /// The stage for columns of `schema`; `None` without any. `origins` are the dataset, or the sources of a mixture.
    pub(crate) fn new(
        origins: &[(Arc<Plan>, Arc<dyn ObjectStore>)],
        schema: &Schema,
        options: &BTreeMap<String, ImageOptions>,
    ) -> Result<Option<Images>> {
        if options.is_empty() {
            return Ok(None);
        }
        let column = |(name, options): (&String, &ImageOptions)| {
            options.check(name)?;
            let (at, field) = schema.column_with_name(name).ok_or_else(|| {
                let delivered: Vec<&str> = schema.fields().iter().map(|f| f.name().as_str()).collect();
                FeedError::NoColumn { column: name.clone(), available: delivered.join(", ") }
            })?;
            let source = Source::of(field.data_type()).ok_or_else(|| {
                FeedError::invalid(format!(
                    "image column {name:?} is {}; images are binary, a struct with binary \"bytes\", or names of files",
                    field.data_type()
                ))
            })?;
            let renderer = Renderer::new(options.clone());
            Ok(Arc::new(Column { at, name: name.clone(), source, renderer }))
        };
        let columns = options.iter().map(column).collect::<Result<Vec<_>>>()?;
        let processors = std::thread::available_parallelism().map_or(2, usize::from);
        let origin = |(plan, store): &(Arc<Plan>, Arc<dyn ObjectStore>)| Origin {
            folder: folder_of(plan.dataset()),
            plan: Arc::clone(plan),
            store: Arc::clone(store),
        };
        let shared = Shared {
            origins: origins.iter().map(origin).collect(),
            processors,
            permits: Arc::new(Semaphore::new(processors)),
            fetching: Arc::new(Semaphore::new(kilobytes(FETCHED_BYTES_MAX) as usize)),
            budget: Budget::new(DECODED_BYTES_MAX),
        };
        Ok(Some(Images { columns, shared: Arc::new(shared) }))
    }

    /// Whether the column at a position holds images.
    pub(crate) fn has(&self, at: usize) -> bool {
        self.columns.iter().any(|column| column.at == at)
    }

    /// The schema with tensors in the place of images.
    pub(crate) fn schema(&self, schema: &Schema) -> SchemaRef {
        let mut fields: Vec<Field> = schema.fields().iter().map(|f| f.as_ref().clone()).collect();
        for column in &self.columns {
            fields[column.at] = column.field();
        }
        Arc::new(Schema::new(fields))
    }

    /// Bytes of the tensors of one row.
    pub(crate) fn row_bytes(&self) -> u64 {
        self.columns.iter().map(|column| column.renderer.row_bytes() as u64).sum()
    }

    /// The tensors of some rows, each with its position among the columns. The first bad row is the error.
    pub(crate) async fn tensors(&self, rows: &Arc<Rows>) -> Result<Vec<(usize, ArrayRef)>> {
        let count = rows.index.len() as u64;
        let bytes = count.saturating_mul(self.row_bytes());
        if bytes > BATCH_BYTES_MAX {
            return Err(FeedError::invalid(format!(
                "the image tensors of {count} rows take {bytes} bytes, more than {BATCH_BYTES_MAX} of a reader's batch; \
                 read smaller batches (batch_rows), with more readers, smaller images or bytes instead of floats"
            )));
        }
        let mut tensors = Vec::with_capacity(self.columns.len());
        for column in &self.columns {
            tensors.push((column.at, self.shared.clone().tensor(column, rows).await?));
        }
        Ok(tensors)
    }
}

impl Column {
    /// A list of a fixed size, which Arrow's canonical extension `arrow.fixed_shape_tensor` gives a shape.
    fn field(&self) -> Field {
        let options = self.renderer.options();
        let [a, b, c] = options.shape();
        let names = match options.layout {
            Layout::Chw => r#"["C","H","W"]"#,
            Layout::Hwc => r#"["H","W","C"]"#,
        };
        let metadata = HashMap::from([
            ("ARROW:extension:name".to_string(), "arrow.fixed_shape_tensor".to_string()),
            (
                "ARROW:extension:metadata".to_string(),
                format!(r#"{{"shape":[{a},{b},{c}],"dim_names":{names}}}"#),
            ),
        ]);
        let list = DataType::FixedSizeList(Arc::new(self.item()), options.width() as i32);
        Field::new(&self.name, list, false).with_metadata(metadata)
    }

    fn item(&self) -> Field {
        let kind = match self.renderer.options().values() {
            Values::Uint8 => DataType::UInt8,
            Values::Float32 => DataType::Float32,
        };
        Field::new_list_field(kind, false)
    }

    /// The array over a buffer of whole rows.
    fn array(&self, buffer: BytesMut) -> Result<ArrayRef> {
        let mut buffer = Buffer::from_vec(Vec::<u8>::from(buffer));
        let options = self.renderer.options();
        let values: ArrayRef = match options.values() {
            Values::Uint8 => Arc::new(UInt8Array::new(buffer.into(), None)),
            Values::Float32 => {
                // Allocators align far more than that.
                if buffer.as_ptr().align_offset(align_of::<f32>()) != 0 {
                    buffer = Buffer::from(buffer.as_slice());
                }
                let count = buffer.len() / size_of::<f32>();
                Arc::new(Float32Array::new(ScalarBuffer::new(buffer, 0, count), None))
            }
        };
        let list = FixedSizeListArray::try_new(Arc::new(self.item()), options.width() as i32, values, None);
        Ok(Arc::new(list.map_err(|error| FeedError::assemble(&self.name, error))?))
    }

    /// Cuts rows into tasks.
    fn tasks(&self, rows: &Rows) -> Vec<Task> {
        let row_bytes = self.renderer.row_bytes();
        let count = rows.index.len();
        let mut buffer = BytesMut::zeroed(count * row_bytes);
        let mut tasks = Vec::new();
        let (mut start, mut bytes) = (0, 0);
        for end in 1..=count {
            bytes += match self.source {
                Source::Names => TASK_BYTES,
                Source::Bytes | Source::Field(_) => self.encoded(rows, end - 1).map_or(0, <[u8]>::len),
            };
            if end == count || bytes >= TASK_BYTES || end - start == TASK_ROWS {
                tasks.push(Task { rows: start..end, slot: buffer.split_to((end - start) * row_bytes) });
                (start, bytes) = (end, 0);
            }
        }
        tasks
    }

    fn encoded<'r>(&self, rows: &'r Rows, at: usize) -> Option<&'r [u8]> {
        let (source, row) = rows.index[at];
        self.source.bytes(rows.sources[source].column(self.at), row)
    }
}

impl Shared {
    async fn tensor(self: Arc<Self>, column: &Arc<Column>, rows: &Arc<Rows>) -> Result<ArrayRef> {
        let ahead = match column.source {
            Source::Names => FETCHES.max(2 * self.processors),
            Source::Bytes | Source::Field(_) => 2 * self.processors,
        };
        let tasks = column.tasks(rows).into_iter().map(|task| {
            let running = Arc::clone(&self).run(Arc::clone(column), Arc::clone(rows), task);
            // A task of its own goes on, and gives its permits back, when the caller does not poll.
            async move { AbortOnDropHandle::new(tokio::spawn(running)).await }
        });
        let mut done = stream::iter(tasks).buffered(ahead);
        let stopped = || self.stopped();
        let mut tensor = BytesMut::new();
        while let Some(slot) = done.try_next().await.map_err(|_| stopped())? {
            // Neighbours of one buffer: nothing is copied.
            tensor.unsplit(slot?);
        }
        column.array(tensor)
    }

    async fn run(self: Arc<Self>, column: Arc<Column>, rows: Arc<Rows>, task: Task) -> Result<BytesMut> {
        let Task { rows: range, mut slot } = task;
        let fetched = match column.source {
            Source::Names => Some(self.fetch(&column, &rows, range.start).await?),
            Source::Bytes | Source::Field(_) => None,
        };
        let stopped = || self.stopped();
        let permit = Arc::clone(&self.permits).acquire_owned().await.map_err(|_| stopped())?;
        let shared = Arc::clone(&self);
        let rendering = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            let content = fetched.as_ref().map(|fetched| &fetched.content[..]);
            shared.render(&column, &rows, range, content, &mut slot).map(|()| slot)
        });
        rendering.await.map_err(|_| stopped())?
    }

    /// Reads the file that a row names.
    async fn fetch(&self, column: &Column, rows: &Rows, at: usize) -> Result<Fetched> {
        let origin = self.origin(rows, at);
        let wrong = |reason: String| self.failure(column, rows, at, reason);
        let (source, row) = rows.index[at];
        let name = Source::name(rows.sources[source].column(column.at), row).ok_or_else(|| wrong(null()))?;
        let path = locate(&origin.folder, name).map_err(wrong)?;
        let shown = format!("/{path}");
        let found = match origin.store.get(&path).await {
            Ok(found) => found,
            Err(object_store::Error::NotFound { .. }) => {
                return Err(wrong(format!(
                    "the file {shown} does not exist there; correct the name, add the file and take a new snapshot, or \
                     leave the row out (where)"
                )));
            }
            Err(error) => return Err(FeedError::store(shown, error)),
        };
        let bytes = found.meta.size;
        if bytes > FILE_BYTES_MAX {
            return Err(wrong(format!(
                "the file {shown} has {bytes} bytes, more than {FILE_BYTES_MAX}; write a smaller image"
            )));
        }
        let stopped = |_| FeedError::Stopped { file: shown.clone() };
        let permit =
            Arc::clone(&self.fetching).acquire_many_owned(kilobytes(bytes)).await.map_err(stopped)?;
        let content = found.bytes().await.map_err(|error| FeedError::store(shown, error))?;
        Ok(Fetched { content, _permit: permit })
    }

    /// Decodes some rows into their part of the tensor.
    fn render(
        &self,
        column: &Column,
        rows: &Rows,
        range: Range<usize>,
        fetched: Option<&[u8]>,
        slot: &mut [u8],
    ) -> Result<()> {
        let Column { renderer, .. } = column;
        let mut resizer = Resizer::new();
        for (at, out) in range.zip(slot.chunks_exact_mut(renderer.row_bytes())) {
            let content = fetched.or_else(|| column.encoded(rows, at));
            let draws = Draws::new(self.origin(rows, at).plan.seed(), rows.epochs[at], rows.rows[at]);
            let rendered = catch_unwind(AssertUnwindSafe(|| {
                let content = content.ok_or_else(null)?;
                let (pixels, _share) = self.pixels(content, renderer).map_err(|error| {
                    let remedy = error.remedy_for_rows();
                    format!("{error}; {remedy}")
                })?;
                let geometry = Geometry::new(renderer.options(), pixels.width, pixels.height, draws);
                renderer.render(&mut resizer, &pixels, &geometry, out)
            }));
            let rendered = rendered.unwrap_or_else(|panic| {
                Err(format!(
                    "the decoder failed ({}); write the image again, or leave the row out (where)",
                    panic_text(&*panic)
                ))
            });
            rendered.map_err(|reason| {
                let name = fetched.and_then(|_| {
                    let (source, row) = rows.index[at];
                    Source::name(rows.sources[source].column(column.at), row)
                });
                let reason = match name {
                    Some(name) => format!("file {name:?}: {reason}"),
                    None => reason,
                };
                self.failure(column, rows, at, reason)
            })?;
        }
        Ok(())
    }

    /// Decodes an image when the images that are decoded at a time leave enough memory, for its scaling too.
    fn pixels(&self, content: &[u8], renderer: &Renderer) -> Result<(Pixels, Share<'_>), ImageError> {
        let ImageOptions { channels, pixels_max, .. } = *renderer.options();
        decode(content, channels, pixels_max, |demand| {
            let scratch = renderer.scratch_bytes(demand.size)?;
            Ok(self.budget.take(demand.bytes.saturating_add(scratch)))
        })
    }

    /// The origin of a row of a batch.
    fn origin(&self, rows: &Rows, at: usize) -> &Origin {
        &self.origins[rows.origins.get(at).map_or(0, |origin| *origin as usize)]
    }

    fn stopped(&self) -> FeedError {
        let paths: Vec<&str> = self.origins.iter().map(|origin| origin.plan.dataset().path()).collect();
        FeedError::Stopped { file: paths.join(", ") }
    }

    fn failure(&self, column: &Column, rows: &Rows, at: usize, reason: String) -> FeedError {
        let row = rows.rows[at];
        let place = match self.origin(rows, at).plan.address_of(row) {
            Some(found) => format!("row {} of row group {} of {}", found.row, found.row_group, found.file),
            None => format!("row {row}"),
        };
        FeedError::Image { column: column.name.clone(), place, reason }
    }
}

fn null() -> String {
    "the value is null; write an image there, or leave such rows out (where)".into()
}

/// Kilobytes of a size, at least 1.
fn kilobytes(bytes: u64) -> u32 {
    // At most `FETCHED_BYTES_MAX`.
    (bytes.min(FETCHED_BYTES_MAX) / 1024 + 1) as u32
}
