//! The feed: any slots of any global batch, assembled from cached row groups.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::{Schema, SchemaRef};
use arrow::error::ArrowError;
use object_store::ObjectStore;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::dataset::Dataset;
use crate::feed::cache::{GroupCache, Lookup};
use crate::feed::error::{FeedError, Result};
use crate::feed::footer::panic_text;
use crate::feed::gather::gather;
use crate::feed::hash::NumberMap;
use crate::feed::metrics;
use crate::feed::pick::{Picker, Picks};
use crate::feed::reader::GroupReader;
use crate::feed::{Cursor, FeedStream, Plan, Shard};

/// Batches beyond this size are gathered on a blocking thread.
const INLINE_BYTES_MAX: u64 = 4 << 20;

/// Read options of a feed. They never change which rows are delivered in which batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FeedOptions {
    /// Columns to deliver, in this order; none means all. Other columns are not read.
    pub columns: Option<Vec<String>>,
    /// Cache for decoded row groups in bytes; 0 derives the size from the plan, at least 64 MiB. A cache
    /// below the working set makes the feed decode row groups repeatedly.
    pub cache_bytes_max: u64,
    /// Row groups decoded at the same time; 0 takes the number of processors, at most 8.
    pub decode_concurrency: usize,
    /// Batches that a stream assembles ahead of its reader, 1 to 1024.
    pub prefetch_batches: usize,
    /// Largest compressed record batch of an Arrow IPC file, in bytes once it is decompressed: the delivered
    /// columns and the file's dictionaries. It can only be decoded as a whole, so the feed refuses a larger
    /// one.
    pub record_batch_bytes_max: u64,
}

impl Default for FeedOptions {
    fn default() -> Self {
        Self {
            columns: None,
            cache_bytes_max: 0,
            decode_concurrency: 0,
            prefetch_batches: 4,
            record_batch_bytes_max: 1 << 30,
        }
    }
}

/// Some slots of one global batch, in slot order.
#[derive(Debug, Clone)]
pub struct FeedBatch {
    /// Number of the global batch.
    pub step: u64,
    /// The slots in this batch; row `i` is slot `slots.start + i`.
    pub slots: Range<usize>,
    /// The rows.
    pub batch: RecordBatch,
    /// Global row index of each row: its position in the dataset in canonical order, selected or not.
    pub rows: Vec<u64>,
    /// Epoch of each row. Within one epoch the global index of every selected row comes exactly once.
    pub epochs: Vec<u64>,
}

/// Random access to the global batches of a plan. Cheap to clone; clones share the cache.
///
/// Memory: the cache limit, plus `decode_concurrency` row groups encoded and decoded (compressed record
/// batches of Arrow IPC files up to `record_batch_bytes_max`), plus the batches handed out or streamed ahead.
/// The default limit comes from the plan, which bounds lanes and windows by
/// [`crate::feed::PlanOptions::working_set_bytes_max`].
///
/// Everything async needs a tokio runtime. Futures may be dropped at any point: decoding that has begun
/// continues for the cache, and no row is lost or counted as consumed.
#[derive(Clone)]
pub struct Feed {
    inner: Arc<Inner>,
}

struct Inner {
    plan: Arc<Plan>,
    schema: SchemaRef,
    reader: Arc<GroupReader>,
    cache: Arc<GroupCache>,
    picker: Picker,
    /// Per lane, the positions whose windows were prefetched last.
    prefetched: Mutex<NumberMap<u64, Range<u64>>>,
    /// Positions of a lane to look ahead.
    lookahead: u64,
    row_bytes: u64,
    prefetch_batches: usize,
}

impl Feed {
    /// Opens a plan over the store that holds its files. Reads nothing yet.
    ///
    /// # Errors
    /// [`FeedError::NoColumn`], [`FeedError::SchemaConflict`] and [`FeedError::DuplicateColumn`] for a
    /// column that is delivered, [`FeedError::Invalid`] for a column named twice or options out of
    /// bounds.
    pub fn open(
        plan: impl Into<Arc<Plan>>,
        store: Arc<dyn ObjectStore>,
        options: &FeedOptions,
    ) -> Result<Self> {
        let plan = plan.into();
        if !(1..=1024).contains(&options.prefetch_batches) {
            return Err(FeedError::invalid(format!(
                "prefetch_batches is {}; it must be 1 to 1024",
                options.prefetch_batches
            )));
        }
        let schema = project(plan.dataset(), options.columns.as_deref())?;
        let concurrency = match options.decode_concurrency {
            0 => processors(),
            n => n.min(256),
        };
        let (lanes, window) = (plan.lanes(), plan.window_rows());
        let per_lane_set = plan.working_set_bytes() / lanes;
        let needed = plan.working_set_bytes().saturating_add(per_lane_set.saturating_mul(3));
        let bytes_max = match options.cache_bytes_max {
            0 => needed.max(64 << 20),
            n => {
                if n < plan.working_set_bytes() {
                    tracing::warn!(
                        plan = %plan.id(),
                        bytes = n,
                        needed_bytes = plan.working_set_bytes(),
                        "the feed's cache is smaller than its working set: row groups may be decoded more than once; use fewer lanes or smaller row groups"
                    );
                }
                n
            }
        };
        // About two windows ahead over all lanes, and at least the prefetched batches when windows are tiny.
        let ahead = plan.order().per_lane().saturating_mul(options.prefetch_batches as u64 + 1);
        let lookahead = (2 * window).div_ceil(lanes).max(ahead).min(window.max(ahead));
        let bytes: u64 = plan.dataset().files().iter().flat_map(|f| &f.row_groups).map(|g| g.bytes).sum();
        let decoded_max = options.record_batch_bytes_max;
        let reader =
            GroupReader::new(store, Arc::clone(&plan), Arc::clone(&schema), concurrency, decoded_max);
        Ok(Self {
            inner: Arc::new(Inner {
                row_bytes: bytes / plan.dataset().rows(),
                schema,
                reader: Arc::new(reader),
                cache: GroupCache::new(bytes_max, 4 * concurrency),
                picker: Picker::new(Arc::clone(&plan)),
                prefetched: Mutex::default(),
                lookahead,
                prefetch_batches: options.prefetch_batches,
                plan,
            }),
        })
    }

    /// The plan.
    pub fn plan(&self) -> &Arc<Plan> {
        &self.inner.plan
    }

    /// The schema of every batch: the projected columns.
    pub fn schema(&self) -> &SchemaRef {
        &self.inner.schema
    }

    /// The rows in `slots` of global batch `step`, in slot order. Callers may ask for any step and any slots,
    /// in any order, from any number of tasks. Meanwhile the feed begins to decode the row groups that the
    /// following steps need for the same slots.
    ///
    /// # Errors
    /// [`FeedError::Invalid`] for slots or a step out of bounds; errors of reading, naming the file.
    pub async fn batch(&self, step: u64, slots: Range<usize>) -> Result<FeedBatch> {
        let inner = &self.inner;
        inner.plan.check_step(step)?;
        inner.plan.check_slots(&slots)?;
        let picks = inner.picker.pick(step, slots.clone());
        let lookups = inner.cache.demand(step, &picks.groups, &picks.nearby, |g| inner.load(g));
        inner.prefetch(step, slots.clone());
        let mut sources = Vec::with_capacity(lookups.len());
        let mut waited = false;
        for lookup in lookups {
            sources.push(match lookup {
                Lookup::Ready(batch) => batch,
                Lookup::Loading(loading) => {
                    waited = true;
                    loading.await?
                }
            });
        }
        metrics::count(&metrics::BATCHES_WAITED, u64::from(waited));
        metrics::count(&metrics::ROWS, slots.len() as u64);
        let Picks { groups, index, rows, epochs, .. } = picks;
        let schema = Arc::clone(&inner.schema);
        // Some kernels panic on types that they do not know.
        let gathering = move || {
            catch_unwind(AssertUnwindSafe(|| gather(&schema, &sources, &index)))
                .unwrap_or_else(|panic| Err(ArrowError::ComputeError(panic_text(&*panic).to_string())))
        };
        let gathered = if inner.row_bytes * slots.len() as u64 <= INLINE_BYTES_MAX {
            gathering()
        } else {
            tokio::task::spawn_blocking(gathering)
                .await
                .map_err(|_| FeedError::Stopped { file: inner.files_of(&groups) })?
        };
        let batch = gathered.map_err(|e| FeedError::assemble(inner.files_of(&groups), e))?;
        Ok(FeedBatch { step, slots, batch, rows, epochs })
    }

    /// The rows of an input group ([`Plan::input_group`]) in the order of its file. Neither asks nor fills the
    /// cache: a group is decoded at each call.
    ///
    /// # Errors
    /// [`FeedError::Invalid`] for a number beyond the last group; errors of reading, naming the file.
    pub async fn read_group(&self, number: u32) -> Result<RecordBatch> {
        let groups = self.inner.plan.input_groups();
        if number >= groups {
            return Err(FeedError::invalid(format!(
                "input group {number} of a dataset with {groups} of them"
            )));
        }
        self.inner.reader.read(number).await
    }

    /// Streams a reader's slots of every global batch from the cursor on, without end (take
    /// [`Plan::steps_for_epochs`] batches), some batches ahead of the reader.
    ///
    /// # Errors
    /// [`FeedError::OtherPlan`] for a cursor of another plan.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn stream(&self, shard: Shard, cursor: Cursor) -> Result<FeedStream> {
        let step = self.inner.plan.step_of(&cursor)?;
        let places = self.inner.plan.place_of_step(step)..u64::MAX;
        Ok(FeedStream::start(self.clone(), shard, places, 1, self.inner.prefetch_batches))
    }

    /// Streams a reader's share of the rows at `places`, one global batch at a time, of which it takes every
    /// `stride`-th, beginning with the first. Place `p` is slot `p mod B` of global batch `p div B`, with `B`
    /// rows in a batch. The places of whole epochs `e` are `e·rows..(e+1)·rows`.
    ///
    /// Where the places begin or end inside a global batch, the readers share that part of it evenly. Such a
    /// batch has fewer rows, for some readers possibly none. All readers get the same number of batches.
    ///
    /// # Errors
    /// [`FeedError::Invalid`] for places beyond the last one, and for a stride of 0.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn stream_places(&self, shard: Shard, places: Range<u64>, stride: u64) -> Result<FeedStream> {
        if stride == 0 {
            return Err(FeedError::invalid("stride is 0; it must be at least 1"));
        }
        self.inner.plan.check_places(&places)?;
        Ok(FeedStream::start(self.clone(), shard, places, stride, self.inner.prefetch_batches))
    }
}

impl Inner {
    fn load(&self, group: u32) -> (u64, impl Future<Output = Result<RecordBatch>> + Send + 'static + use<>) {
        let reader = Arc::clone(&self.reader);
        (self.plan.group_bytes(group), async move { reader.read(group).await })
    }

    fn files_of(&self, groups: &[u32]) -> String {
        match groups {
            [] => "no file".to_string(),
            [one] => self.reader.path_of(*one).to_string(),
            [first, .., last] => {
                format!("{} … {}", self.reader.path_of(*first), self.reader.path_of(*last))
            }
        }
    }

    /// Begins to decode the row groups of the windows at and shortly after this batch, lane by lane.
    fn prefetch(&self, step: u64, slots: Range<usize>) {
        let order = self.plan.order();
        let mut prefetched = self.prefetched.lock();
        for (lane, positions) in order.lane_positions(step, slots) {
            let target = positions.end + self.lookahead;
            let covered = prefetched.get(&lane).cloned().unwrap_or(0..0);
            if covered.start <= positions.start && target <= covered.end {
                continue;
            }
            let mut position =
                positions.start.max(if covered.contains(&positions.start) { covered.end } else { 0 });
            let mut begin = if position == covered.end { covered.start } else { position };
            while position < target {
                let window = order.window_at(lane, position);
                let layout = self.picker.layout(window.epoch);
                let places = layout.places(window.start, window.rows);
                let wanted = &layout.groups[places];
                if self.cache.prefetch(step, wanted, |g| self.load(g)) < wanted.len() {
                    break;
                }
                begin = begin.min(position - window.offset);
                position += window.rows - window.offset;
            }
            prefetched.insert(lane, begin..position);
        }
    }
}

/// Row groups decoded at the same time where nothing else is asked for.
pub(crate) fn processors() -> usize {
    std::thread::available_parallelism().map_or(2, usize::from).min(8)
}

/// The schema of some columns of a dataset, all of them without `columns`.
pub(crate) fn project(dataset: &Dataset, columns: Option<&[String]>) -> Result<SchemaRef> {
    let schema = dataset.schema();
    let Some(columns) = columns else {
        return match dataset.conflicts().first() {
            Some(conflict) => Err(conflict.error()),
            None => Ok(Arc::clone(schema)),
        };
    };
    if columns.is_empty() {
        return Err(FeedError::invalid("columns is empty; name at least one, or leave it out for all"));
    }
    let mut fields = Vec::with_capacity(columns.len());
    for (i, column) in columns.iter().enumerate() {
        if columns[..i].contains(column) {
            return Err(FeedError::invalid(format!("column {column:?} is requested twice")));
        }
        if let Some(conflict) = dataset.conflicts().iter().find(|conflict| conflict.column == *column) {
            return Err(conflict.error());
        }
        let field = schema.field_with_name(column).map_err(|_| FeedError::NoColumn {
            column: column.clone(),
            available: schema.fields().iter().map(|f| f.name().as_str()).collect::<Vec<_>>().join(", "),
        })?;
        fields.push(field.clone());
    }
    Ok(Arc::new(Schema::new(fields)))
}
