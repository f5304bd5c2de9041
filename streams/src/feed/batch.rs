//! The feed: any slots of any global batch, assembled from cached row groups.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, RecordBatchOptions};
use arrow::datatypes::{Schema, SchemaRef};
use object_store::ObjectStore;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::dataset::Dataset;
use crate::feed::any::check_places;
use crate::feed::assembly::{Assembly, with_keys};
use crate::feed::buckets::PlaceMap;
use crate::feed::cache::{GroupCache, Lookup};
use crate::feed::error::{FeedError, Result};
use crate::feed::gather::{GatherError, gather_guarded};
use crate::feed::hash::NumberMap;
use crate::feed::image::{self, ImageOptions};
use crate::feed::metrics;
use crate::feed::node::{NodeCache, Scope, Wanted};
use crate::feed::order::PLACES_MAX;
use crate::feed::patience::Patience;
use crate::feed::pick::{Picker, Picks};
use crate::feed::places::{LanePositions, lane_positions};
use crate::feed::reader::GroupReader;
use crate::feed::tokens::{Packer, SequenceRow, pack};
use crate::feed::{AnyFeed, Cursor, FeedStream, Plan, Shard};

/// Read options of a feed. They never change which rows are delivered in which batch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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
    /// Columns of encoded images, or of names of image files, that are delivered as tensors.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub images: BTreeMap<String, ImageOptions>,
    /// Name of an additional last column of augmentation keys: 63-bit numbers that depend on the plan's seed, the
    /// epoch and the row only. None delivers no keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_column: Option<String>,
}

impl Default for FeedOptions {
    fn default() -> Self {
        Self {
            columns: None,
            cache_bytes_max: 0,
            decode_concurrency: 0,
            prefetch_batches: 4,
            record_batch_bytes_max: 1 << 30,
            images: BTreeMap::new(),
            key_column: None,
        }
    }
}

/// Some slots of one global batch, in slot order.
#[derive(Debug, Clone)]
pub struct FeedBatch {
    /// Number of the global batch.
    pub step: u64,
    /// The slots in this batch; row `i` is slot `slots.start + i`. Where a stream begins or ends inside a global batch,
    /// these number the rows of that part.
    pub slots: Range<usize>,
    /// The rows.
    pub batch: RecordBatch,
    /// Global row index of each row: its position in the dataset in canonical order, selected or not. Sequences of packed
    /// tokens are numbered in the order of their row groups.
    pub rows: Vec<u64>,
    /// Pass over the dataset to which each row belongs. Within one pass the global index of every selected row comes
    /// exactly once.
    pub epochs: Vec<u64>,
    /// The source of each row of a mixture; empty for one dataset.
    pub sources: Vec<u32>,
}

/// Rows of a batch that are found but not gathered yet.
pub(crate) struct Fetched {
    pub(crate) picks: Picks,
    /// The decoded row groups of `picks.groups`.
    pub(crate) groups: Vec<Arc<RecordBatch>>,
}

/// Random access to the global batches of a plan. Cheap to clone; clones share the cache.
///
/// Memory: the cache limit, plus `decode_concurrency` row groups encoded and decoded (compressed record
/// batches of Arrow IPC files up to `record_batch_bytes_max`), plus the batches handed out or streamed ahead.
/// The default limit comes from the plan, which bounds lanes and windows by
/// [`crate::feed::PlanOptions::working_set_bytes_max`]. Images add 512 MiB while they are decoded, 128 MiB of files,
/// and the tensors of the batches, of which a stream assembles at most 512 MiB ahead.
///
/// Everything async needs a tokio runtime. Futures may be dropped at any point: decoding that has begun
/// continues for the cache, and no row is lost or counted as consumed.
#[derive(Clone)]
pub struct Feed {
    inner: Arc<Inner>,
}

struct Inner {
    plan: Arc<Plan>,
    /// The columns of the batches.
    schema: SchemaRef,
    form: Form,
    has_keys: bool,
    reader: Arc<GroupReader>,
    cache: Arc<GroupCache>,
    /// The cache of the processes of this node.
    node: Option<Arc<NodeCache>>,
    picker: Picker,
    /// The places of rows in buckets.
    places: Option<PlaceMap>,
    /// Per lane, the positions whose windows were prefetched last.
    prefetched: Mutex<NumberMap<u64, Range<u64>>>,
    /// Positions of a lane to look ahead.
    lookahead: u64,
    row_bytes: u64,
    prefetch_batches: usize,
    patience: Patience,
}

/// What batches are made of.
pub(crate) enum Form {
    /// Rows of the dataset.
    Rows(Arc<Assembly>),
    /// Sequences of packed tokens.
    Sequences(Arc<Packer>),
}

impl Form {
    /// The stage that packs tokens, if there is one.
    pub(crate) fn packer(&self) -> Option<&Arc<Packer>> {
        match self {
            Form::Rows(_) => None,
            Form::Sequences(packer) => Some(packer),
        }
    }

    /// Size of a row's images, or of a sequence.
    pub(crate) fn tensor_bytes(&self) -> u64 {
        match self {
            Form::Rows(assembly) => assembly.tensor_bytes(),
            Form::Sequences(packer) => packer.row_bytes(),
        }
    }

    /// The columns of the batches. `key_column` is the name of the keys, which those of rows have already.
    pub(crate) fn schema(&self, key_column: Option<&str>) -> Result<SchemaRef> {
        match self {
            Form::Rows(assembly) => Ok(Arc::clone(assembly.schema())),
            Form::Sequences(packer) => with_keys(Arc::clone(packer.schema()), key_column),
        }
    }
}

impl Feed {
    /// Opens a plan over the store that holds its files. Reads nothing yet.
    ///
    /// # Errors
    /// [`FeedError::NoColumn`], [`FeedError::SchemaConflict`] and [`FeedError::DuplicateColumn`] for a
    /// column that is delivered. [`FeedError::Invalid`] for a column named twice, an image column of another type, or
    /// columns or images beside packed tokens. The same for options out of bounds.
    pub fn open(
        plan: impl Into<Arc<Plan>>,
        store: Arc<dyn ObjectStore>,
        options: &FeedOptions,
    ) -> Result<Self> {
        let plan = plan.into();
        let schema = project(plan.dataset(), columns(&plan, options)?.as_deref())?;
        Self::with_schema(plan, store, options, schema)
    }

    /// As [`Feed::open`], with the columns of `schema`, to which the columns of the files are converted.
    pub(crate) fn with_schema(
        plan: Arc<Plan>,
        store: Arc<dyn ObjectStore>,
        options: &FeedOptions,
        schema: SchemaRef,
    ) -> Result<Self> {
        if !(1..=1024).contains(&options.prefetch_batches) {
            return Err(FeedError::invalid(format!(
                "prefetch_batches is {}; it must be 1 to 1024",
                options.prefetch_batches
            )));
        }
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
        let form = match plan.packing() {
            Some(packing) => Form::Sequences(Packer::new(&plan, packing, schema.field(0))?),
            None => {
                let origins = [(Arc::clone(&plan), Arc::clone(&store))];
                let keys = options.key_column.as_deref();
                Form::Rows(Assembly::new(&origins, &schema, &options.images, keys)?)
            }
        };
        let delivered = form.schema(options.key_column.as_deref())?;
        let row_bytes = match form.packer() {
            Some(packer) => packer.row_bytes(),
            None => bytes / plan.dataset().rows(),
        };
        let reader = GroupReader::new(store, Arc::clone(&plan), schema, concurrency, decoded_max);
        let node = Scope::of(&plan, reader.schema()).and_then(|scope| NodeCache::new(&scope, bytes_max));
        Ok(Self {
            inner: Arc::new(Inner {
                row_bytes,
                schema: delivered,
                form,
                has_keys: options.key_column.is_some(),
                reader: Arc::new(reader),
                cache: GroupCache::new(bytes_max, 4 * concurrency),
                node,
                picker: Picker::new(Arc::clone(&plan)),
                places: plan.buckets().map(|buckets| PlaceMap::new(&plan, buckets)),
                prefetched: Mutex::default(),
                lookahead,
                prefetch_batches: options.prefetch_batches,
                patience: Patience::default(),
                plan,
            }),
        })
    }

    /// The plan.
    pub fn plan(&self) -> &Arc<Plan> {
        &self.inner.plan
    }

    /// The schema of every batch: the projected columns, tensors in the place of images, or the columns of packed
    /// sequences; and the keys.
    pub fn schema(&self) -> &SchemaRef {
        &self.inner.schema
    }

    /// Ends the server of shared row groups, if this process is it, until [`Feed::resume_serving`].
    pub async fn pause_serving(&self) {
        if let Some(node) = &self.inner.node {
            node.pause_serving().await;
        }
    }

    /// Lets this process serve shared row groups again.
    pub fn resume_serving(&self) {
        if let Some(node) = &self.inner.node {
            node.resume_serving();
        }
    }

    /// What the streams know of an outage of brokers.
    pub(crate) fn patience(&self) -> &Patience {
        &self.inner.patience
    }

    /// The rows in `slots` of global batch `step`, in slot order. Callers may ask for any step and any slots,
    /// in any order, from any number of tasks. Meanwhile the feed begins to decode the row groups that the
    /// following steps need for the same slots.
    ///
    /// # Errors
    /// [`FeedError::Invalid`] for slots or a step out of bounds; errors of reading, naming the file.
    pub async fn batch(&self, step: u64, slots: Range<usize>) -> Result<FeedBatch> {
        let plan = &self.inner.plan;
        plan.check_step(step)?;
        plan.check_slots(&slots)?;
        let fetched = match &self.inner.places {
            Some(map) => {
                let places = plan.place_of_step(step)..plan.place_of_step(step + 1);
                self.fetch_mapped(map, &places, &slots).await?
            }
            None => {
                let lanes: Vec<LanePositions> = plan.order().lane_positions(step, slots.clone()).collect();
                self.fetch(step, &lanes, slots.len()).await?
            }
        };
        self.gathered(step, slots, fetched).await
    }

    /// A reader's rows of a part of a global batch: those of the rows at `places`, lane by lane, that are its share.
    pub(crate) async fn part(&self, places: Range<u64>, shard: Shard) -> Result<FeedBatch> {
        let plan = &self.inner.plan;
        let step = places.start / plan.order().batch;
        plan.check_step(step)?;
        let slots = shard.slots_of(0..(places.end - places.start) as usize);
        let fetched = match &self.inner.places {
            Some(map) => self.fetch_mapped(map, &places, &slots).await?,
            None => {
                let lanes = lane_positions(plan.order(), &places, &(slots.start as u64..slots.end as u64));
                self.fetch(step, &lanes, slots.len()).await?
            }
        };
        self.gathered(step, slots, fetched).await
    }

    /// Finds the rows at some positions of lanes, `rows` in number, and decodes their row groups. Begins to decode the
    /// row groups that come next in these lanes. `step` grows from call to call: the cache keeps what was used last.
    pub(crate) async fn fetch(&self, step: u64, lanes: &[LanePositions], rows: usize) -> Result<Fetched> {
        self.fetch_ahead(step, lanes, rows, lanes).await
    }

    /// The rows with the numbers `slots` of those at `places`, which are in one batch of a plan with buckets.
    async fn fetch_mapped(
        &self,
        map: &PlaceMap,
        places: &Range<u64>,
        slots: &Range<usize>,
    ) -> Result<Fetched> {
        let lanes = map.lanes(places, &(slots.start as u64..slots.end as u64));
        let ahead = map.block_lanes(places.start);
        let step = places.start / self.inner.plan.order().batch;
        self.fetch_ahead(step, &lanes, slots.len(), &ahead).await
    }

    /// As [`Feed::fetch`], with the positions of lanes up to which row groups are needed soon.
    async fn fetch_ahead(
        &self,
        step: u64,
        lanes: &[LanePositions],
        rows: usize,
        ahead: &[LanePositions],
    ) -> Result<Fetched> {
        let inner = &self.inner;
        if let Some(packer) = inner.form.packer() {
            packer.check_batch(rows)?;
        }
        let picks = inner.picker.pick(lanes, rows);
        let lookups = inner.cache.demand(step, &picks.groups, &picks.nearby, |g| inner.load(g));
        inner.prefetch(step, ahead);
        let mut groups = Vec::with_capacity(lookups.len());
        let mut waited = false;
        for lookup in lookups {
            groups.push(match lookup {
                Lookup::Ready(batch) => batch,
                Lookup::Loading(loading) => {
                    waited = true;
                    loading.await?
                }
            });
        }
        metrics::count(&metrics::BATCHES_WAITED, u64::from(waited));
        metrics::count(&metrics::ROWS, rows as u64);
        Ok(Fetched { picks, groups })
    }

    async fn gathered(&self, step: u64, slots: Range<usize>, fetched: Fetched) -> Result<FeedBatch> {
        let inner = &self.inner;
        let assembly = match &inner.form {
            Form::Rows(assembly) => assembly,
            Form::Sequences(packer) => return self.packed(packer, step, slots, fetched).await,
        };
        let Fetched { picks: Picks { groups, index, rows, epochs, .. }, groups: sources } = fetched;
        let rows = Arc::new(image::Rows { sources, index, rows, epochs, origins: Vec::new() });
        let batch = assembly.batch(&rows, inner.row_bytes * slots.len() as u64).await?;
        let batch = batch.map_err(|error| error.in_files(|| inner.files_of(&groups)))?;
        let (rows, epochs, sources) = rows.into_numbers();
        Ok(FeedBatch { step, slots, batch, rows, epochs, sources })
    }

    /// A batch of packed sequences.
    async fn packed(
        &self,
        packer: &Arc<Packer>,
        step: u64,
        slots: Range<usize>,
        fetched: Fetched,
    ) -> Result<FeedBatch> {
        let sequences = self.sequences(&fetched);
        let Fetched { picks: Picks { groups, rows, epochs, .. }, .. } = fetched;
        let batch = pack_sequences(
            packer,
            sequences,
            self.inner.has_keys.then(|| image::keys(&[packer.seed()], &[], &epochs, &rows)),
            &self.inner.schema,
        )
        .await?;
        let batch = batch.map_err(|error| error.in_files(|| self.inner.files_of(&groups)))?;
        Ok(FeedBatch { step, slots, batch, rows, epochs, sources: Vec::new() })
    }

    /// The rows of a plan with packed tokens as sequences to pack; none for another plan.
    pub(crate) fn sequences(&self, fetched: &Fetched) -> Vec<SequenceRow> {
        let Some(packer) = self.inner.form.packer() else { return Vec::new() };
        let Fetched { picks, groups } = fetched;
        let rows = picks.index.iter().zip(&picks.epochs).map(|(&(source, row), &epoch)| SequenceRow {
            packer: Arc::clone(packer),
            group: picks.groups[source],
            documents: Arc::clone(&groups[source]),
            epoch,
            number: row as u64,
        });
        rows.collect()
    }

    /// The stage that packs tokens, if the plan has one.
    pub(crate) fn packer(&self) -> Option<&Arc<Packer>> {
        self.inner.form.packer()
    }

    /// Names of the files with some row groups, for errors.
    pub(crate) fn files_of(&self, groups: &[u32]) -> String {
        self.inner.files_of(groups)
    }

    /// Estimated size of a decoded row, all columns.
    pub(crate) fn row_bytes(&self) -> u64 {
        self.inner.row_bytes
    }

    /// Size of the tensors of a row's images.
    #[cfg(feature = "flight")]
    pub(crate) fn tensor_bytes(&self) -> u64 {
        match &self.inner.form {
            Form::Rows(assembly) => assembly.tensor_bytes(),
            Form::Sequences(_) => 0,
        }
    }

    /// The rows of an input group ([`Plan::input_group`]) in the order of its file. Neither asks nor fills the
    /// cache: a group is decoded at each call.
    ///
    /// # Errors
    /// [`FeedError::Invalid`] for a number beyond the last group, and for a plan with packed tokens; errors of reading,
    /// naming the file.
    pub async fn read_group(&self, number: u32) -> Result<RecordBatch> {
        let groups = self.inner.plan.input_groups();
        if self.inner.form.packer().is_some() {
            return Err(FeedError::invalid(
                "input groups have rows, not packed tokens; leave tokens out to read them",
            ));
        }
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
        let ahead = self.inner.batches_ahead(shard);
        Ok(FeedStream::start(AnyFeed::from(self.clone()), shard, places, 1, ahead))
    }

    /// Streams a reader's share of the rows at `places`, one global batch at a time, of which it takes every
    /// `stride`-th, beginning with the first. Global batch `b` of `B` rows has the places `[b·B, (b+1)·B)`, and pass `e`
    /// over the rows has the places `e·rows..(e+1)·rows`; [`crate::feed::Epochs`] has those of shorter epochs.
    ///
    /// Where the places begin or end inside a global batch, the stream has exactly the rows at these places, in the order
    /// of their slots, and the readers share them evenly. Such a batch has fewer rows, for some readers possibly none.
    /// All readers get the same number of batches.
    ///
    /// # Errors
    /// [`FeedError::Invalid`] for places beyond the last one, and for a stride of 0.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn stream_places(&self, shard: Shard, places: Range<u64>, stride: u64) -> Result<FeedStream> {
        check_places(&places, stride, PLACES_MAX)?;
        let ahead = self.inner.batches_ahead(shard);
        Ok(FeedStream::start(AnyFeed::from(self.clone()), shard, places, stride, ahead))
    }
}

/// Packs sequences into a batch of `schema`, which has the columns of the stage, and the column of keys if it is given.
pub(crate) async fn pack_sequences(
    packer: &Arc<Packer>,
    sequences: Vec<SequenceRow>,
    keys: Option<ArrayRef>,
    schema: &SchemaRef,
) -> Result<Result<RecordBatch, GatherError>> {
    packer.check_batch(sequences.len())?;
    let bytes = packer.row_bytes() * sequences.len() as u64;
    let (packer, schema) = (Arc::clone(packer), Arc::clone(schema));
    let packing = move || {
        let batch = pack(&packer, &sequences)?;
        let columns = batch.columns().iter().cloned().chain(keys).collect();
        let options = RecordBatchOptions::new().with_row_count(Some(sequences.len()));
        RecordBatch::try_new_with_options(schema, columns, &options)
    };
    Ok(gather_guarded(bytes, packing).await)
}

impl Inner {
    fn load(&self, group: u32) -> (u64, impl Future<Output = Result<RecordBatch>> + Send + 'static + use<>) {
        let (reader, packer) = (Arc::clone(&self.reader), self.form.packer().cloned());
        let node = self.node.clone();
        let bytes = self.plan.group_bytes(group);
        let decoding = async move {
            let batch = match node {
                None => reader.read(group).await?,
                Some(node) => {
                    let wanted = Wanted { group, rows: reader.rows_of(group), bytes };
                    node.read(&wanted, reader.permits(), reader.decode(group)).await?
                }
            };
            let Some(packer) = packer else { return Ok(batch) };
            let preparing = tokio::task::spawn_blocking(move || packer.prepare(group, &batch));
            preparing.await.map_err(|_| FeedError::Stopped { file: reader.path_of(group).to_owned() })?
        };
        (bytes, decoding)
    }

    /// Batches that a stream assembles ahead of a reader, within the bound for tensors of images and sequences.
    fn batches_ahead(&self, shard: Shard) -> usize {
        let row_bytes = self.form.tensor_bytes();
        batches_ahead(row_bytes.saturating_mul(self.plan.slots(shard).len() as u64), self.prefetch_batches)
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
    fn prefetch(&self, step: u64, lanes: &[LanePositions]) {
        let order = self.plan.order();
        let mut prefetched = self.prefetched.lock();
        for (lane, positions) in lanes {
            let lane = *lane;
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

/// Batches that a stream assembles ahead: at least 1, at most `most`, and no more than fit the bound for tensors of
/// images and sequences. `tensor_bytes` is the size of the tensors of one batch.
pub(crate) fn batches_ahead(tensor_bytes: u64, most: usize) -> usize {
    let within = image::TENSOR_BYTES_AHEAD.checked_div(tensor_bytes).unwrap_or(u64::MAX);
    usize::try_from(within).unwrap_or(usize::MAX).min(most).max(1)
}

/// Row groups decoded at the same time where nothing else is asked for.
pub(crate) fn processors() -> usize {
    std::thread::available_parallelism().map_or(2, usize::from).min(8)
}

/// The columns that a feed of a plan reads; `None` for all of them.
pub(crate) fn columns(plan: &Plan, options: &FeedOptions) -> Result<Option<Vec<String>>> {
    let Some(packing) = plan.packing() else { return Ok(options.columns.clone()) };
    if options.columns.is_some() || !options.images.is_empty() {
        let column = &packing.options().column;
        return Err(FeedError::invalid(format!(
            "tokens of column {column:?}: sequences have the columns of the packing only; leave columns and images out"
        )));
    }
    Ok(Some(vec![packing.options().column.clone()]))
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
