//! Reader of a feed: its plan, and batches at any places of it.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arrow::datatypes::SchemaRef;
use futures::StreamExt;
use millrace_streams::dataset::{SourceSpec, TopicRange};
use millrace_streams::feed::staging::{Device, StagedBatch, StagedStream, Staging};
use millrace_streams::feed::{
    AnyFeed, BucketOptions, EpochRows, Epochs, Feed, FeedBatch, FeedError, FeedOptions, FeedStream,
    ImageOptions, InputGroup, Mixture, MixtureFeed, PlanId, PlanOptions, Selection, Shard, TokenOptions,
    Until, Weight,
};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::columns::{Columns, Format, RecordBatch, Schema};
use crate::engine::{self, Engine, GivenUp, lock};
use crate::error::{Failure, Result};

/// How long a wait for a batch may delay Ctrl-C and a fork.
const SLICE: Duration = Duration::from_millis(50);

/// A feed that is open, with the stream that was used last.
pub(crate) struct Reading {
    feed: AnyFeed,
    stream: Option<Streaming>,
    /// The slots of batches for a device.
    staging: Option<Arc<Staging>>,
}

struct Streaming {
    stream: Batches,
    /// Places that the stream has not delivered yet.
    places: Range<u64>,
    stride: u64,
}

enum Batches {
    Plain(FeedStream),
    Staged(StagedStream),
}

/// A batch, or one in a slot.
enum Delivered {
    Plain(FeedBatch),
    Staged(StagedBatch),
}

enum Waited {
    Batch(Converted),
    End,
    /// No batch within [`SLICE`].
    Nothing,
}

/// What a batch is for its format.
enum Converted {
    Columns(Columns),
    Record(RecordBatch),
}

/// A dataset, or several with their weights.
#[derive(Clone)]
struct Sources {
    datasets: Vec<(SourceSpec, Weight)>,
    /// The end of an epoch of a mixture; none for one dataset.
    until: Option<Until>,
}

/// All that decides the rows of a feed and their order.
#[derive(Clone)]
struct Recipe {
    home: PathBuf,
    sources: Sources,
    options: PlanOptions,
    /// The columns, and what becomes of images.
    reading: FeedOptions,
    /// The device of the batches, which are staged in slots then.
    device: Option<String>,
    /// The order in which another feed has counted, once its state was loaded.
    order: Option<PlanId>,
    /// Whether row groups of snapshots are shared with other processes of this machine.
    share_cache: bool,
}

/// Reads batches in one order. Holds no position: the caller does.
#[pyclass(frozen, module = "millrace")]
pub(crate) struct Reader {
    number: u64,
    recipe: Recipe,
    shard: Shard,
    format: Format,
    schema: SchemaRef,
    id: PlanId,
    order_id: PlanId,
    /// [`OpenDataset::content`] of each dataset.
    ///
    /// [`OpenDataset::content`]: millrace_streams::dataset::OpenDataset::content
    contents: Vec<Option<String>>,
    rows: u64,
    epochs: Epochs,
    epoch_rows: Option<EpochRows>,
    has_found_offsets: bool,
}

#[pymethods]
impl Reader {
    #[new]
    #[pyo3(signature = (
        datasets, *, until, batch_rows, rows_per_epoch, seed, rank, world, columns, filter, splits, split, split_by,
        format, device, home, images, keys, tokens, buckets, share_cache
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn new(
        py: Python<'_>,
        datasets: Vec<(String, String)>,
        until: Option<&str>,
        batch_rows: usize,
        rows_per_epoch: Option<&str>,
        seed: u64,
        rank: u32,
        world: u32,
        columns: Option<Vec<String>>,
        filter: Option<&str>,
        splits: Vec<(String, String)>,
        split: Option<&str>,
        split_by: Vec<String>,
        format: &str,
        device: Option<String>,
        home: Option<PathBuf>,
        images: Vec<(String, String)>,
        keys: Option<String>,
        tokens: Option<&str>,
        buckets: Option<(String, Vec<u32>)>,
        share_cache: bool,
    ) -> PyResult<Reader> {
        engine::with(py, |engine| {
            let format: Format = format.parse()?;
            let shard = Shard::new(rank, world)?;
            let selection = Selection::new(filter, &splits, split, &split_by)?;
            let tokens = tokens.map(packing).transpose()?;
            let buckets = buckets.map(|(column, bounds)| BucketOptions { column, bounds });
            let options =
                PlanOptions { seed, batch_rows, selection, tokens, buckets, ..PlanOptions::default() };
            let images = images.into_iter().map(image).collect::<Result<BTreeMap<_, _>>>()?;
            let reading = FeedOptions { columns, images, key_column: keys, ..FeedOptions::default() };
            let epoch_rows: Option<EpochRows> = rows_per_epoch.map(str::parse).transpose()?;
            let weighed = datasets.iter().map(|(dataset, weight)| Ok((dataset.parse()?, weight.parse()?)));
            let sources = Sources {
                datasets: weighed.collect::<Result<_, FeedError>>()?,
                until: until.map(str::parse).transpose()?,
            };
            let home = engine::locate(home)?;
            let recipe = Recipe { home, sources, options, reading, device, order: None, share_cache };
            Reader::open(engine, recipe, shard, format, epoch_rows)
        })
    }

    /// The next batch of those at places `start..end`, of which every `stride`-th is read; none at the end.
    fn next<'py>(
        &self,
        py: Python<'py>,
        start: u64,
        end: u64,
        stride: u64,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        loop {
            py.check_signals()?;
            match engine::with(py, |engine| self.wait(engine, start..end, stride))? {
                Waited::Batch(Converted::Columns(columns)) => {
                    return columns.into_dict(py).map(|dict: Bound<'py, PyDict>| Some(dict.into_any()));
                }
                Waited::Batch(Converted::Record(batch)) => {
                    return Ok(Some(Bound::new(py, batch)?.into_any()));
                }
                Waited::End => return Ok(None),
                Waited::Nothing => {}
            }
        }
    }

    /// The place after the batch at a place, of which every `stride`-th is read.
    fn place_after(&self, place: u64, stride: u64) -> u64 {
        let batch = self.recipe.options.batch_rows as u64;
        (place / batch).saturating_add(stride).saturating_mul(batch)
    }

    /// Number of input groups: row groups, and parts of large ones.
    #[getter]
    fn groups(&self, py: Python<'_>) -> PyResult<u32> {
        engine::with(py, |engine| Ok(self.one_dataset(engine)?.plan().input_groups()))
    }

    /// An input group by its number: its file, row group, first row in it, and number of selected rows.
    fn group(&self, py: Python<'_>, number: u32) -> PyResult<Option<(String, u32, u32, u32)>> {
        let group = engine::with(py, |engine| Ok(self.one_dataset(engine)?.plan().input_group(number)))?;
        Ok(group.map(|InputGroup { file, row_group, first_row, rows }| (file, row_group, first_row, rows)))
    }

    /// The rows of an input group.
    fn read_group<'py>(&self, py: Python<'py>, number: u32) -> PyResult<Bound<'py, PyAny>> {
        let read = engine::with(py, |engine| {
            let feed = self.one_dataset(engine)?;
            let stopped = || FeedError::Stopped { file: self.recipe.sources.to_string() };
            let batch = engine.block_on(feed.read_group(number)).ok_or_else(stopped)??;
            match self.format {
                Format::Arrow => Ok(Converted::Record(RecordBatch(batch))),
                Format::Numpy | Format::Torch | Format::Dlpack => match Columns::new(batch, 0) {
                    Err(Failure::Null { column, row, .. }) => Err(Failure::NullInGroup { column, row }),
                    columns => columns.map(Converted::Columns),
                },
            }
        })?;
        match read {
            Converted::Columns(columns) => columns.into_dict(py).map(Bound::into_any),
            Converted::Record(batch) => Ok(Bound::new(py, batch)?.into_any()),
        }
    }

    /// The first place of an epoch.
    fn epoch_start(&self, epoch: u64) -> u64 {
        self.epochs.start(epoch)
    }

    /// The epoch of a place.
    fn epoch_of(&self, place: u64) -> u64 {
        self.epochs.of_place(place)
    }

    /// Checks that a position belongs to this plan.
    fn check_plan(&self, py: Python<'_>, plan: &str) -> PyResult<()> {
        let check = || match plan.parse::<PlanId>()? {
            cursor if cursor != self.id => Err(FeedError::OtherPlan { cursor, plan: self.id }),
            _ => Ok(()),
        };
        check().map_err(|error: FeedError| self.refused(py, &error))
    }

    /// What tells the content of each dataset from that of another one with the same plan; none where that is unknown.
    #[getter]
    fn contents(&self) -> Vec<Option<String>> {
        self.contents.clone()
    }

    /// Checks that another reader, of another process, has read the same content.
    fn check_contents(&self, py: Python<'_>, contents: Vec<Option<String>>) -> PyResult<()> {
        self.check_content(&contents).map_err(|error| Failure::from(error).raise(py))
    }

    /// A reader of the order in which a position counts, with the batches of this one; none if it is that of this reader.
    fn in_order(&self, py: Python<'_>, order: &str) -> PyResult<Option<Reader>> {
        let order = order.parse::<PlanId>().map_err(|error| self.refused(py, &error))?;
        if order == self.order_id {
            return Ok(None);
        }
        engine::with(py, |engine| {
            let recipe = Recipe { order: Some(order), ..self.recipe.clone() };
            let opened = Reader::open(engine, recipe, self.shard, self.format, self.epoch_rows);
            opened.map(Some).map_err(|error| match error {
                Failure::Feed(error @ (FeedError::OtherOrder { .. } | FeedError::Invalid { .. })) => {
                    Failure::Usage(format!("resume {}: {error}", self.recipe.sources))
                }
                error => error,
            })
        })
    }

    /// The dataset; `@latest` has become a snapshot.
    #[getter]
    fn dataset(&self) -> String {
        self.recipe.sources.to_string()
    }

    /// The datasets with their weights; `@latest` has become a snapshot.
    #[getter]
    fn datasets(&self) -> Vec<(String, String)> {
        let datasets = self.recipe.sources.datasets.iter();
        datasets.map(|(dataset, weight)| (dataset.to_string(), weight.to_string())).collect()
    }

    /// The home folder.
    #[getter]
    fn home(&self) -> &PathBuf {
        &self.recipe.home
    }

    /// The digest of all that decides the order.
    #[getter]
    fn plan(&self) -> String {
        self.id.to_string()
    }

    /// The digest of all that decides the sequence of rows, but the batches.
    #[getter]
    fn order(&self) -> String {
        self.order_id.to_string()
    }

    /// Rows of a pass: those of the dataset, or the selected ones, or the sequences of their tokens. For a mixture, those
    /// until its first or last source is read.
    #[getter]
    fn rows(&self) -> u64 {
        self.rows
    }

    /// Rows of a global batch.
    #[getter]
    fn batch_rows(&self) -> usize {
        self.recipe.options.batch_rows
    }

    /// The offsets of each dataset that is a topic, as base64 of 32 bytes for each partition.
    #[getter]
    fn ranges(&self) -> Vec<String> {
        let topics = self.recipe.sources.datasets.iter().filter_map(|(spec, _)| spec.topic());
        topics.filter_map(|topic| topic.range.as_ref().map(TopicRange::to_base64)).collect()
    }

    /// Whether this reader has found the offsets of a topic itself: another one can find others.
    #[getter]
    fn has_found_offsets(&self) -> bool {
        self.has_found_offsets
    }

    /// A reader of these offsets of the topics, in place of those that this one has found.
    fn with_ranges(&self, py: Python<'_>, ranges: Vec<String>) -> PyResult<Reader> {
        engine::with(py, |engine| {
            let mut recipe = Recipe { order: None, ..self.recipe.clone() };
            let topics = recipe.sources.datasets.iter_mut().filter_map(|(spec, _)| match spec {
                SourceSpec::Topic(topic) => Some(topic),
                SourceSpec::Dataset(_) => None,
            });
            let mut ranges = ranges.iter().map(|text| TopicRange::from_base64(text));
            for topic in topics {
                topic.range = ranges.next().flatten();
                if topic.range.is_none() {
                    return Err(self.unusable_ranges());
                }
            }
            if ranges.next().is_some() {
                return Err(self.unusable_ranges());
            }
            Reader::open(engine, recipe, self.shard, self.format, self.epoch_rows)
        })
    }

    /// The columns that are read.
    #[getter]
    fn schema(&self) -> Schema {
        Schema(Arc::clone(&self.schema))
    }

    /// The columns that are read, with their types as texts.
    #[getter]
    fn fields(&self) -> Vec<(String, String)> {
        let fields = self.schema.fields().iter();
        fields.map(|field| (field.name().clone(), field.data_type().to_string())).collect()
    }
}

impl Reader {
    fn open(
        engine: &Engine,
        recipe: Recipe,
        shard: Shard,
        format: Format,
        epoch_rows: Option<EpochRows>,
    ) -> Result<Reader> {
        let has_found_offsets =
            recipe.sources.datasets.iter().any(|(spec, _)| spec.is_moving() && spec.topic().is_some());
        let (sources, feed, contents) = recipe.open(engine)?;
        let schema = Arc::clone(feed.schema());
        format.check(&schema)?;
        let (id, order_id, rows) = (feed.id(), feed.order_id(), feed.rows());
        let epochs = feed.epochs(epoch_rows)?;
        let staging = recipe.staging(&feed, shard)?;
        let number = engine::number();
        engine.readings.put(number, Mutex::new(Reading { feed, stream: None, staging }));
        let recipe = Recipe { sources, ..recipe };
        Ok(Reader {
            number,
            recipe,
            shard,
            format,
            schema,
            id,
            order_id,
            contents,
            rows,
            epochs,
            epoch_rows,
            has_found_offsets,
        })
    }

    fn unusable_ranges(&self) -> Failure {
        Failure::Usage(format!("resume {}: the state has no offsets of these topics", self.recipe.sources))
    }

    fn refused(&self, py: Python<'_>, error: &FeedError) -> PyErr {
        Failure::Usage(format!("resume {}: {error}", self.recipe.sources)).raise(py)
    }

    fn check_content(&self, contents: &[Option<String>]) -> Result<(), FeedError> {
        let differs = |(ours, theirs): (&Option<String>, &Option<String>)| {
            ours.is_some() && theirs.is_some() && ours != theirs
        };
        let datasets = self.recipe.sources.datasets.iter();
        match datasets.zip(self.contents.iter().zip(contents)).find(|(_, pair)| differs(*pair)) {
            Some(((dataset, _), _)) => Err(FeedError::OtherContent { dataset: dataset.to_string() }),
            None => Ok(()),
        }
    }

    /// Waits for the next batch, for [`SLICE`] at most.
    fn wait(&self, engine: &Engine, places: Range<u64>, stride: u64) -> Result<Waited> {
        if places.is_empty() {
            return Ok(Waited::End);
        }
        let reading = self.opened(engine)?;
        let mut reading = lock(&reading);
        let Reading { feed, stream, staging } = &mut *reading;
        if stream.as_ref().is_none_or(|open| open.places != places || open.stride != stride) {
            *stream = None;
        }
        let waited = engine.block_on(async {
            let open = match &mut *stream {
                Some(open) => open,
                none => {
                    let stream = match staging {
                        None => Batches::Plain(feed.stream_places(self.shard, places.clone(), stride)?),
                        Some(staging) => {
                            let places = places.clone();
                            Batches::Staged(feed.stream_staged(self.shard, places, stride, staging)?)
                        }
                    };
                    none.insert(Streaming { stream, places: places.clone(), stride })
                }
            };
            Ok::<_, FeedError>(tokio::time::timeout(SLICE, open.stream.next()).await)
        });
        match waited.transpose()? {
            None | Some(Err(_)) => Ok(Waited::Nothing),
            Some(Ok(None)) => Ok(Waited::End),
            Some(Ok(Some(batch))) => match self.convert(batch) {
                Ok(converted) => {
                    if let Some(open) = stream {
                        open.places.start = self.place_after(open.places.start, stride).min(open.places.end);
                    }
                    Ok(Waited::Batch(converted))
                }
                Err(error) => {
                    *stream = None;
                    Err(error)
                }
            },
        }
    }

    fn convert(&self, batch: millrace_streams::feed::Result<Delivered>) -> Result<Converted> {
        let FeedBatch { step, batch, .. } = match batch? {
            Delivered::Plain(batch) => batch,
            Delivered::Staged(batch) => {
                return Columns::staged(batch, &self.schema).map(Converted::Columns);
            }
        };
        match self.format {
            Format::Arrow => Ok(Converted::Record(RecordBatch(batch))),
            Format::Numpy | Format::Torch | Format::Dlpack => {
                Columns::new(batch, step).map(Converted::Columns)
            }
        }
    }

    /// The open feed of one dataset.
    fn one_dataset(&self, engine: &Engine) -> Result<Feed> {
        let reading = self.opened(engine)?;
        match &lock(&reading).feed {
            AnyFeed::Dataset(feed) => Ok(feed.clone()),
            AnyFeed::Mixture(_) => {
                Err(Failure::Usage("a mixture has no input groups; read its datasets one by one".to_owned()))
            }
        }
    }

    /// The open feed; opened again if it was closed.
    fn opened(&self, engine: &Engine) -> Result<Arc<Mutex<Reading>>> {
        match engine.readings.get(self.number) {
            Some(reading) => Ok(reading),
            None => Ok(engine.readings.put(self.number, Mutex::new(self.reopen(engine)?))),
        }
    }

    /// Opens the feed again, for example after a fork. Plan and content must be the same.
    fn reopen(&self, engine: &Engine) -> Result<Reading> {
        let (_, feed, contents) = self.recipe.open(engine)?;
        let (cursor, plan) = (self.id, feed.id());
        if cursor != plan {
            return Err(FeedError::OtherPlan { cursor, plan }.into());
        }
        self.check_content(&contents)?;
        let staging = self.recipe.staging(&feed, self.shard)?;
        Ok(Reading { feed, stream: None, staging })
    }
}

impl Reading {
    /// The feed.
    pub(crate) fn feed(&self) -> &AnyFeed {
        &self.feed
    }
}

impl Batches {
    async fn next(&mut self) -> Option<millrace_streams::feed::Result<Delivered>> {
        match self {
            Batches::Plain(stream) => stream.next().await.map(|batch| batch.map(Delivered::Plain)),
            Batches::Staged(stream) => stream.next().await.map(|batch| batch.map(Delivered::Staged)),
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        engine::give_up(GivenUp::Reading(self.number));
    }
}

/// The transform of an image column, which Python gives as JSON.
fn image((column, options): (String, String)) -> Result<(String, ImageOptions)> {
    match serde_json::from_str(&options) {
        Ok(options) => Ok((column, options)),
        Err(error) => Err(Failure::Usage(format!("images, column {column:?}: {error}"))),
    }
}

/// The packing of tokens, which Python gives as JSON.
fn packing(options: &str) -> Result<TokenOptions> {
    serde_json::from_str(options).map_err(|error| Failure::Usage(format!("tokens: {error}")))
}

impl Recipe {
    /// The slots of a reader's batches, if they are for a device. Allocates none yet.
    fn staging(&self, feed: &AnyFeed, shard: Shard) -> Result<Option<Arc<Staging>>> {
        let Some(device) = &self.device else { return Ok(None) };
        let rows = feed.batch_rows().div_ceil(shard.world() as usize);
        Ok(Some(Staging::new(feed.schema(), rows, Device::open(device)?)?))
    }

    /// Opens the datasets, of which `@latest` becomes a snapshot, and their feed. Gives also their contents.
    fn open(&self, engine: &Engine) -> Result<(Sources, AnyFeed, Vec<Option<String>>)> {
        let volumes = engine.volumes(&self.home)?;
        let has_topic = self.sources.datasets.iter().any(|(spec, _)| spec.topic().is_some());
        let kafka = if has_topic { Some(engine.kafka(&self.home)?) } else { None };
        let opened = engine.block_on(async {
            let mut datasets = Vec::with_capacity(self.sources.datasets.len());
            for (spec, weight) in &self.sources.datasets {
                let dataset = spec.open(&volumes, kafka.as_ref()).await?;
                datasets.push((if self.share_cache { dataset.shared().await } else { dataset }, *weight));
            }
            let specs = datasets.iter().map(|(dataset, weight)| (dataset.spec().clone(), *weight));
            let sources = Sources { datasets: specs.collect(), until: self.sources.until };
            let read = &self.reading;
            let mut contents = Vec::with_capacity(datasets.len());
            for (dataset, _) in &datasets {
                contents.push(dataset.content().await?);
            }
            let feed: AnyFeed = match (&datasets[..], self.sources.until) {
                ([(dataset, _)], None) => {
                    let plan = dataset.plan(&self.options).await?;
                    let plan = match self.order {
                        Some(order) => plan.in_order(order, &self.options)?,
                        None => plan,
                    };
                    Feed::open(plan, Arc::clone(dataset.store()), read)?.into()
                }
                (_, until) => {
                    let mixture = Mixture::plan(&datasets, &self.options, until.unwrap_or_default()).await?;
                    if let Some(order) = self.order {
                        return Err(FeedError::OtherOrder { order, plan: mixture.order_id() }.into());
                    }
                    let stores: Vec<_> =
                        datasets.iter().map(|(dataset, _)| Arc::clone(dataset.store())).collect();
                    MixtureFeed::open(mixture, &stores, read)?.into()
                }
            };
            Ok((sources, feed, contents))
        });
        opened.unwrap_or_else(|| Err(FeedError::Stopped { file: self.sources.to_string() }.into()))
    }
}

/// One dataset, or the datasets of a mixture with their weights.
impl fmt::Display for Sources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let ([(dataset, _)], None) = (&self.datasets[..], self.until) {
            return write!(f, "{dataset}");
        }
        for (at, (dataset, weight)) in self.datasets.iter().enumerate() {
            write!(f, "{}{dataset}={weight}", if at > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}
