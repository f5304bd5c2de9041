//! The plan: everything that decides the order of rows, under one hash.

mod address;
mod groups;
mod record;
mod resume;
mod sizing;

#[cfg(test)]
mod tests;

pub use address::RowAddress;
pub use groups::InputGroup;
pub(crate) use record::Encoder;
pub use record::PlanId;

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use arrow::array::BooleanArray;
use millrace_datafs::SnapshotId;
use object_store::ObjectStore;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::dataset::{CachedBuckets, CachedRows, CachedTokens, DataFile, Dataset, DatasetCache, FileFormat};
use crate::feed::buckets::{self, BucketOptions, Buckets};
use crate::feed::error::{FeedError, Result};
use crate::feed::order::{EpochLayout, Order, PLACES_MAX};
use crate::feed::select::{RowSet, Selected, Selection, scan};
use crate::feed::tokens::{self, Packing, TokenOptions, UnitTokens};
use crate::feed::{Cursor, Shard};
use sizing::Units;

/// Version of the order's algorithm. Part of the plan id: another version is another order.
pub const ALGORITHM_VERSION: u32 = 1;
/// Most rows of a global batch.
pub const BATCH_ROWS_MAX: usize = 1 << 22;
/// Most lanes.
pub const LANES_MAX: u32 = 1 << 16;
/// Most rows of a window.
pub const WINDOW_ROWS_MAX: u64 = 1 << 32;

/// Options of a plan. Together with the dataset they decide the order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PlanOptions {
    /// Origin of the files, for example `digits@v1`. It is part of the plan id, so that a cursor is never
    /// used with another snapshot.
    pub source: String,
    /// Seed of the order; any number.
    pub seed: u64,
    /// Rows of a global batch, 1 to [`BATCH_ROWS_MAX`].
    pub batch_rows: usize,
    /// Maximum number of lanes, 1 to [`LANES_MAX`]: contiguous stretches of the dataset from which a batch
    /// takes its rows. Readers beyond this number share row groups. The plan takes the greatest divisor of
    /// `batch_rows` up to this number. It takes fewer lanes for small datasets and for row groups that are
    /// large beside `working_set_bytes_max`.
    pub lanes: u32,
    /// Most rows of a window, 1 to [`WINDOW_ROWS_MAX`]: rows of a lane are shuffled within a window.
    /// A dataset that fits into one window is shuffled whole.
    pub window_rows: u64,
    /// Bound for the decoded row groups that all lanes together need at a time, in bytes, all
    /// columns. Lanes and window shrink until it holds; where row groups are too large for that, they
    /// are read in parts. Only large record batches of Arrow IPC files and huge rows exceed it.
    pub working_set_bytes_max: u64,
    /// The rows that the plan has; none means all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selection: Option<Selection>,
    /// The format of the files; their names tell it without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<FileFormat>,
    /// Packing of a column of tokens: the rows of the order are sequences of one length then, and `batch_rows` and
    /// `window_rows` count these.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<TokenOptions>,
    /// Batches of rows with lists of like length. Not with `tokens`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub buckets: Option<BucketOptions>,
}

impl Default for PlanOptions {
    fn default() -> Self {
        Self {
            source: String::new(),
            seed: 0,
            batch_rows: 256,
            lanes: 64,
            window_rows: 16_384,
            working_set_bytes_max: 512 << 20,
            selection: None,
            format: None,
            tokens: None,
            buckets: None,
        }
    }
}

impl PlanOptions {
    fn check(&self) -> Result<()> {
        let within = |name: &str, value: u64, max: u64| {
            if (1..=max).contains(&value) {
                return Ok(());
            }
            Err(FeedError::invalid(format!("{name} is {value}; it must be 1 to {max}")))
        };
        within("batch_rows", self.batch_rows as u64, BATCH_ROWS_MAX as u64)?;
        within("lanes", u64::from(self.lanes), u64::from(LANES_MAX))?;
        within("window_rows", self.window_rows, WINDOW_ROWS_MAX)?;
        if let (Some(tokens), Some(_)) = (&self.tokens, &self.buckets) {
            return Err(FeedError::invalid(format!(
                "tokens of column {:?}: packed tokens have one length; leave buckets out",
                tokens.column
            )));
        }
        self.tokens.as_ref().map_or(Ok(()), TokenOptions::check)?;
        self.buckets.as_ref().map_or(Ok(()), BucketOptions::check)
    }
}

/// A unit of reading: a non-empty row group, or a part of a large one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GroupAddress {
    /// Index of its file in the dataset.
    pub(crate) file: u32,
    /// Index of the row group inside the file.
    pub(crate) index: u32,
    /// First row inside the row group.
    pub(crate) first: u32,
    /// Rows to decode, never 0.
    pub(crate) rows: u32,
}

/// A unit of reading with the estimated size of its selected rows once decoded.
#[derive(Debug, Clone, Copy)]
struct Group {
    address: GroupAddress,
    /// Selected rows, or the sequences of their tokens. Never 0.
    rows: u32,
    bytes: u64,
}

/// An immutable order over an immutable dataset.
///
/// Serializes with the description of the dataset, so that workers get it from a coordinator and read no
/// footer twice. Deserializing checks everything again.
///
/// ```
/// # use std::sync::Arc;
/// use millrace_streams::feed::{Plan, PlanOptions};
/// # async fn example(store: Arc<dyn object_store::ObjectStore>) -> millrace_streams::feed::Result<()> {
/// let options = PlanOptions { source: "digits@v1".into(), seed: 7, ..PlanOptions::default() };
/// let plan = Plan::build(&store, "/train", &options).await?;
/// println!("plan {}: {} rows, {} steps for 3 epochs", plan.id(), plan.rows(), plan.steps_for_epochs(3));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Plan {
    id: PlanId,
    source: String,
    dataset: Dataset,
    order: Order,
    groups: Vec<Group>,
    group_rows: Vec<u32>,
    selected: Option<Arc<Selected>>,
    packing: Option<Arc<Packing>>,
    buckets: Option<Arc<Buckets>>,
    /// With a selection, the global index of the first row of each group, selected or not.
    firsts: Vec<u64>,
    /// Size of the parts of large row groups, in bytes; 0 where row groups are read whole.
    part_bytes: u64,
    /// Number of the first row of each group among the selected rows (or of its first sequence), and their total at the
    /// end.
    bases: Vec<u64>,
    working_set_bytes: u64,
    /// Hash of the rows without their order, once it was asked for.
    rows_id: OnceLock<PlanId>,
    /// Digest of the snapshot and of its listed files, if processes of a node share decoded row groups.
    content: Option<[u8; 32]>,
}

impl Plan {
    /// Lists the dataset at `path` of `store`, reads its footers, selects its rows and makes the plan.
    ///
    /// # Errors
    /// Those of [`Dataset::read`]; [`FeedError::Invalid`] for options out of bounds; with a selection
    /// [`FeedError::NothingSelected`], [`FeedError::NoColumn`] and [`FeedError::Invalid`] for its columns; with tokens
    /// [`FeedError::Row`] for a list that is no document, too.
    pub async fn build(store: &Arc<dyn ObjectStore>, path: &str, options: &PlanOptions) -> Result<Self> {
        options.check()?;
        let dataset = Dataset::read_as(store, path, options.format).await?;
        let rows = match &options.selection {
            Some(selection) => Some(scan(store, &dataset, selection).await?),
            None => None,
        };
        let plan = Self::with_rows(dataset, options, rows)?;
        if let Some(buckets) = &options.buckets {
            let plan = Arc::new(plan);
            let of_rows = buckets::scan(store, &plan, buckets).await?;
            return plan.bucketed(buckets, of_rows);
        }
        let Some(tokens) = &options.tokens else { return Ok(plan) };
        let plan = Arc::new(plan);
        let units = tokens::scan(store, &plan, tokens).await?;
        plan.packed(options, tokens, units)
    }

    /// As [`Plan::build`], with the footers, the selected rows, counts of tokens and buckets remembered in `cache`.
    ///
    /// # Errors
    /// Those of [`Plan::build`]; a failing cache is not an error.
    pub async fn build_cached(
        store: &Arc<dyn ObjectStore>,
        path: &str,
        options: &PlanOptions,
        cache: Arc<dyn DatasetCache>,
    ) -> Result<Self> {
        Ok(Self::build_listed(store, path, options, cache).await?.0)
    }

    /// As [`Plan::build_cached`], with the digest of the listing of the files.
    pub(crate) async fn build_listed(
        store: &Arc<dyn ObjectStore>,
        path: &str,
        options: &PlanOptions,
        cache: Arc<dyn DatasetCache>,
    ) -> Result<(Self, String)> {
        options.check()?;
        let (dataset, listing) =
            Dataset::read_listed(store, path, options.format, Arc::clone(&cache)).await?;
        let plan = Self::of_listed(store, dataset, listing.clone(), options, cache).await?;
        Ok((plan, listing))
    }

    async fn of_listed(
        store: &Arc<dyn ObjectStore>,
        dataset: Dataset,
        listing: String,
        options: &PlanOptions,
        cache: Arc<dyn DatasetCache>,
    ) -> Result<Self> {
        let rows = match &options.selection {
            None => None,
            Some(selection) => match CachedRows::lookup(&cache, &dataset, &listing, selection).await {
                Some(rows) => Some(rows),
                None => {
                    let rows = scan(store, &dataset, selection).await?;
                    let cache = Arc::clone(&cache);
                    CachedRows::remember(cache, &dataset, listing.clone(), selection, &rows).await;
                    Some(rows)
                }
            },
        };
        let plan = Self::with_rows(dataset, options, rows)?;
        if let Some(buckets) = &options.buckets {
            let plan = Arc::new(plan);
            let of_rows = match CachedBuckets::lookup(&cache, &plan, &listing, buckets).await {
                Some(of_rows) => of_rows,
                None => {
                    let of_rows = buckets::scan(store, &plan, buckets).await?;
                    CachedBuckets::remember(cache, &plan, listing, buckets, &of_rows).await;
                    of_rows
                }
            };
            return plan.bucketed(buckets, of_rows);
        }
        let Some(tokens) = &options.tokens else { return Ok(plan) };
        let plan = Arc::new(plan);
        let units = match CachedTokens::lookup(&cache, &plan, &listing, &tokens.column).await {
            Some(units) => units,
            None => {
                let units = tokens::scan(store, &plan, tokens).await?;
                CachedTokens::remember(cache, &plan, listing, &tokens.column, &units).await;
                units
            }
        };
        plan.packed(options, tokens, units)
    }

    /// Makes the plan of a dataset that is already described. Pure.
    ///
    /// # Errors
    /// [`FeedError::Invalid`] for options out of bounds, and for a selection, tokens or buckets, which read columns;
    /// [`FeedError::TooLarge`] for row groups in too many parts.
    pub fn new(dataset: Dataset, options: &PlanOptions) -> Result<Self> {
        if options.tokens.is_some() || options.buckets.is_some() {
            return Err(FeedError::invalid(
                "a plan with tokens or buckets is made by Plan::build, which reads columns",
            ));
        }
        Self::with_rows(dataset, options, None)
    }

    /// The same plan, whose decoded row groups the processes of a node share: those of this snapshot with these files.
    pub(crate) fn sharing(self, snapshot: &SnapshotId, listing: &str) -> Self {
        let mut digest = Sha256::new();
        digest.update(snapshot.as_bytes());
        digest.update(listing);
        Self { content: Some(digest.finalize().into()), ..self }
    }

    /// Digest of the content, if processes of a node share decoded row groups.
    pub(crate) fn content(&self) -> Option<&[u8; 32]> {
        self.content.as_ref()
    }

    /// The plan of the sequences of this plan's rows, whose units of reading have these tokens.
    fn packed(&self, options: &PlanOptions, tokens: &TokenOptions, units: Vec<UnitTokens>) -> Result<Self> {
        let packing = Packing::new(tokens.clone(), units)?;
        let selected = self.selected.as_deref().cloned();
        let mut units = sizing::units(&self.dataset, self.part_bytes, selected.as_ref());
        units.pack(&packing);
        let is_uneven = sizing::has_uneven_rows(&self.dataset);
        let (lanes, window) = sizing::lanes_and_window(&units.groups, is_uneven, options);
        let rows = units.groups.iter().map(|group| u64::from(group.rows)).sum();
        let order = Order { rows, lanes, window, ..self.order };
        let (dataset, source) = (self.dataset.clone(), self.source.clone());
        Ok(Self::assemble(dataset, source, order, self.part_bytes, units, selected, Some(packing)))
    }

    /// This plan of rows with the bucket of each of them.
    fn bucketed(&self, options: &BucketOptions, of_rows: Vec<u8>) -> Result<Self> {
        let buckets = Arc::new(Buckets::new(options.clone(), of_rows)?);
        Ok(self.with_buckets(buckets))
    }

    fn with_buckets(&self, buckets: Arc<Buckets>) -> Self {
        let mut plan = Self { buckets: Some(buckets), rows_id: OnceLock::new(), ..self.clone() };
        plan.id = record::plan_id(&plan.dataset, &plan.source, &plan.order, &plan.contents());
        plan
    }

    /// The plan of rows; tokens are counted afterwards.
    fn with_rows(dataset: Dataset, options: &PlanOptions, rows: Option<RowSet>) -> Result<Self> {
        options.check()?;
        let selected = match (&options.selection, rows) {
            (Some(selection), Some(rows)) => Some(Selected::new(selection.clone(), rows, &dataset)?),
            (Some(_), None) => {
                return Err(FeedError::invalid(
                    "a plan with a selection is made by Plan::build, which reads columns",
                ));
            }
            (None, _) => None,
        };
        let part_bytes = sizing::part_bytes(&dataset, options);
        sizing::check_count(&dataset, part_bytes)?;
        let units = sizing::units(&dataset, part_bytes, selected.as_ref());
        let is_uneven = sizing::has_uneven_rows(&dataset);
        let (lanes, window) = sizing::lanes_and_window(&units.groups, is_uneven, options);
        let order = Order {
            seed: options.seed,
            rows: selected.as_ref().map_or(dataset.rows(), |selected| selected.rows.len()),
            lanes,
            window,
            batch: options.batch_rows as u64,
        };
        let source = options.source.clone();
        let plan = Self::assemble(dataset, source, order, part_bytes, units, selected, None);
        let (needed, limit) = (plan.working_set_bytes, options.working_set_bytes_max);
        if needed > limit {
            tracing::warn!(
                dataset = plan.dataset.path(),
                bytes = needed,
                limit,
                lanes,
                window_rows = window,
                "row groups or record batches are too large for a good shuffle: neighbouring rows come \
                 together; write smaller ones, or raise working_set_bytes_max"
            );
        }
        Ok(plan)
    }

    fn assemble(
        dataset: Dataset,
        source: String,
        order: Order,
        part_bytes: u64,
        units: Units,
        selected: Option<Selected>,
        packing: Option<Packing>,
    ) -> Self {
        let Units { groups, firsts } = units;
        let mut bases = vec![0u64];
        let mut total = 0u64;
        for group in &groups {
            total += u64::from(group.rows);
            bases.push(total);
        }
        let group_rows: Vec<u32> = groups.iter().map(|g| g.rows).collect();
        let parts = (part_bytes > 0).then_some(&group_rows[..]);
        let packing = packing.map(Arc::new);
        let selected_rows = selected.as_ref();
        let rows =
            record::Contents { parts, selected: selected_rows, packing: packing.as_deref(), buckets: None };
        let id = record::plan_id(&dataset, &source, &order, &rows);
        let is_uneven = sizing::has_uneven_rows(&dataset);
        let working_set_bytes = sizing::working_set_bytes(&groups, is_uneven, order.lanes, order.window);
        let selected = selected.map(Arc::new);
        Self {
            id,
            source,
            dataset,
            order,
            groups,
            group_rows,
            selected,
            packing,
            buckets: None,
            firsts,
            part_bytes,
            bases,
            working_set_bytes,
            rows_id: OnceLock::new(),
            content: None,
        }
    }

    /// The hash of everything that decides the order: algorithm version, source, path, files with
    /// their sizes and row groups (with their parts), seed, lanes, window and batch size, and the selection with
    /// its rows.
    pub fn id(&self) -> PlanId {
        self.id
    }

    /// Origin of the files, as given in the options.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The dataset with its schema and files.
    pub fn dataset(&self) -> &Dataset {
        &self.dataset
    }

    /// Rows of an epoch, at least 1: those of the dataset, or the selected ones, or the sequences of packed tokens.
    pub fn rows(&self) -> u64 {
        self.order.rows
    }

    /// The selection of rows, if the plan has not all of them.
    pub fn selection(&self) -> Option<&Selection> {
        self.selected.as_ref().map(|selected| &selected.selection)
    }

    /// The packing, if the rows of the order are sequences of tokens.
    pub fn packing(&self) -> Option<&Packing> {
        self.packing.as_deref()
    }

    /// The buckets, if batches have rows with lists of like length.
    pub fn buckets(&self) -> Option<&Arc<Buckets>> {
        self.buckets.as_ref()
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.order.seed
    }

    /// Lanes in use; divides [`Plan::batch_rows`].
    pub fn lanes(&self) -> u64 {
        self.order.lanes
    }

    /// Rows of a window in use.
    pub fn window_rows(&self) -> u64 {
        self.order.window
    }

    /// Rows of a global batch.
    pub fn batch_rows(&self) -> usize {
        self.order.batch as usize
    }

    /// Upper bound of the decoded row groups, all columns, that a reader of whole batches needs at a
    /// time to read each row group once per epoch, in bytes. An estimate from the footers.
    pub fn working_set_bytes(&self) -> u64 {
        self.working_set_bytes
    }

    /// The cursor whose next global batch is `step`.
    pub fn cursor(&self, step: u64) -> Cursor {
        Cursor { plan_id: self.id, step }
    }

    /// The step of a cursor of this plan.
    ///
    /// # Errors
    /// [`FeedError::OtherPlan`] when it belongs to another one.
    pub fn step_of(&self, cursor: &Cursor) -> Result<u64> {
        if cursor.plan_id != self.id {
            return Err(FeedError::OtherPlan { cursor: cursor.plan_id, plan: self.id });
        }
        self.check_step(cursor.step)?;
        Ok(cursor.step)
    }

    /// The smallest number of steps after which every row was delivered at least `epochs` times.
    /// Saturates where steps are no longer valid.
    pub fn steps_for_epochs(&self, epochs: u64) -> u64 {
        let rows = u128::from(self.order.rows) * u128::from(epochs);
        u64::try_from(rows.div_ceil(u128::from(self.order.batch))).unwrap_or(u64::MAX)
    }

    /// Number of whole epochs delivered after `steps` steps.
    pub fn epochs_after(&self, steps: u64) -> u64 {
        let places = u128::from(steps) * u128::from(self.order.batch);
        u64::try_from(places / u128::from(self.order.rows)).unwrap_or(u64::MAX)
    }

    /// Number of rows of `epoch` that the global batches of `steps` deliver. Summed over all steps it is
    /// [`Plan::rows`].
    pub fn rows_of_epoch(&self, epoch: u64, steps: Range<u64>) -> u64 {
        let (batch, rows) = (u128::from(self.order.batch), u128::from(self.order.rows));
        let (first, last) = (u128::from(steps.start) * batch, u128::from(steps.end) * batch);
        let (from, to) = (u128::from(epoch) * rows, (u128::from(epoch) + 1) * rows);
        u64::try_from(last.min(to).saturating_sub(first.max(from))).unwrap_or(u64::MAX)
    }

    /// The slots of a reader in every global batch.
    pub fn slots(&self, shard: Shard) -> Range<usize> {
        shard.slots(self.batch_rows())
    }

    /// The first place of the global batch that is `batches` after the one that holds a place. Saturates.
    pub fn place_after(&self, place: u64, batches: u64) -> u64 {
        self.place_of_step((place / self.order.batch).saturating_add(batches))
    }

    /// The first place of a global batch: its rows are at `[step·B, (step+1)·B)`. Saturates.
    pub fn place_of_step(&self, step: u64) -> u64 {
        step.saturating_mul(self.order.batch)
    }

    pub(crate) fn order(&self) -> &Order {
        &self.order
    }

    pub(crate) fn layout(&self, epoch: u64) -> EpochLayout {
        EpochLayout::new(&self.order, epoch, &self.group_rows)
    }

    pub(crate) fn group(&self, group: u32) -> GroupAddress {
        self.groups[group as usize].address
    }

    /// Number of units of reading.
    pub(crate) fn units(&self) -> u32 {
        // At most `ROW_GROUPS_MAX`.
        self.groups.len() as u32
    }

    /// The global index of the row with number `n` among the selected rows, which is in `group`. Sequences of tokens are
    /// numbered as they are.
    pub(crate) fn dataset_row(&self, n: u64, group: u32) -> u64 {
        match self.selected_rows() {
            None => n,
            Some(selected) => selected.rows.select(n, &self.rows_of_group(group)),
        }
    }

    /// The selection of rows of the order; `None` for all rows, and for sequences.
    fn selected_rows(&self) -> Option<&Arc<Selected>> {
        self.selected.as_ref().filter(|_| self.packing.is_none())
    }

    /// One more than the greatest global index of a row of the order.
    pub(crate) fn row_indices(&self) -> u64 {
        if self.packing.is_some() { self.rows() } else { self.dataset.rows() }
    }

    /// The place in its file of a row of a decoded unit, for errors.
    pub(crate) fn place_in_file(&self, group: u32, at: usize) -> String {
        let address = self.group(group);
        let within = match &self.selected {
            None => at as u64,
            Some(selected) => {
                let rows = self.rows_of_group(group);
                selected.rows.select(selected.rows.rank(rows.start) + at as u64, &rows) - rows.start
            }
        };
        format!("row {} of row group {}", u64::from(address.first) + within, address.index)
    }

    /// A bit for each row of the dataset that is selected; `None` for all rows, and for sequences.
    pub(crate) fn selected_words(&self) -> Option<&[u64]> {
        self.selected_rows().map(|selected| selected.rows.words())
    }

    /// Which rows of a group are selected; `None` for all of them.
    pub(crate) fn mask_of(&self, group: u32) -> Option<BooleanArray> {
        let selected = self.selected.as_ref()?;
        let rows = self.rows_of_group(group);
        (selected.count(rows.clone()) < rows.end - rows.start).then(|| selected.rows.mask(rows))
    }

    /// The rows of a group of a plan with a selection, selected or not.
    fn rows_of_group(&self, group: u32) -> Range<u64> {
        let first = self.firsts[group as usize];
        first..first + u64::from(self.group(group).rows)
    }

    /// Size of the parts of large row groups, in bytes; 0 where row groups are read whole.
    pub(crate) fn part_bytes(&self) -> u64 {
        self.part_bytes
    }

    /// Whether large row groups are read in parts.
    pub(crate) fn has_parts(&self) -> bool {
        self.part_bytes > 0
    }

    pub(crate) fn group_file(&self, group: u32) -> &DataFile {
        &self.dataset.files()[self.group(group).file as usize]
    }

    /// Estimated decoded size of the selected rows of a row group, all columns.
    pub(crate) fn group_bytes(&self, group: u32) -> u64 {
        self.groups[group as usize].bytes
    }

    pub(crate) fn base(&self, group: u32) -> u64 {
        self.bases[group as usize]
    }

    pub(crate) fn check_step(&self, step: u64) -> Result<()> {
        let last = (PLACES_MAX / self.order.batch).saturating_sub(1);
        if step > last {
            return Err(FeedError::invalid(format!("step {step} is beyond {last}, the last one")));
        }
        Ok(())
    }

    pub(crate) fn check_slots(&self, slots: &Range<usize>) -> Result<()> {
        if slots.start > slots.end || slots.end > self.batch_rows() {
            return Err(FeedError::invalid(format!(
                "slots {}..{} of a batch of {} rows",
                slots.start,
                slots.end,
                self.batch_rows()
            )));
        }
        Ok(())
    }
}
