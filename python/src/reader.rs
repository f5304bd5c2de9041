//! Reader of a feed: its plan, and batches at any places of it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arrow::datatypes::SchemaRef;
use futures::StreamExt;
use millrace_streams::dataset::DatasetSpec;
use millrace_streams::feed::{
    Cursor, Feed, FeedBatch, FeedError, FeedOptions, FeedStream, ImageOptions, InputGroup, Plan, PlanId,
    PlanOptions, Selection, Shard,
};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::columns::{Columns, Format, RecordBatch, Schema};
use crate::engine::{self, Engine, lock};
use crate::error::{Failure, Result};

/// How long a wait for a batch may delay Ctrl-C and a fork.
const SLICE: Duration = Duration::from_millis(50);

/// A feed that is open, with the stream that was used last.
pub(crate) struct Reading {
    feed: Feed,
    stream: Option<Streaming>,
}

struct Streaming {
    stream: FeedStream,
    /// Places that the stream has not delivered yet.
    places: Range<u64>,
    stride: u64,
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

/// Reads batches of one plan. Holds no position: the caller does.
#[pyclass(frozen, module = "millrace")]
pub(crate) struct Reader {
    number: u64,
    home: PathBuf,
    spec: DatasetSpec,
    options: PlanOptions,
    reading: FeedOptions,
    shard: Shard,
    format: Format,
    schema: SchemaRef,
    plan: Arc<Plan>,
}

#[pymethods]
impl Reader {
    #[new]
    #[pyo3(signature = (
        dataset, *, batch_rows, seed, rank, world, columns, filter, splits, split, split_by, format, home,
        images, keys
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn new(
        py: Python<'_>,
        dataset: &str,
        batch_rows: usize,
        seed: u64,
        rank: u32,
        world: u32,
        columns: Option<Vec<String>>,
        filter: Option<&str>,
        splits: Vec<(String, String)>,
        split: Option<&str>,
        split_by: Vec<String>,
        format: &str,
        home: Option<PathBuf>,
        images: Vec<(String, String)>,
        keys: Option<String>,
    ) -> PyResult<Reader> {
        engine::with(py, |engine| {
            let format: Format = format.parse()?;
            let shard = Shard::new(rank, world)?;
            let selection = Selection::new(filter, &splits, split, &split_by)?;
            let options = PlanOptions { seed, batch_rows, selection, ..PlanOptions::default() };
            let images = images.into_iter().map(image).collect::<Result<BTreeMap<_, _>>>()?;
            let reading = FeedOptions { columns, images, key_column: keys, ..FeedOptions::default() };
            let home = engine::locate(home)?;
            let (spec, feed) = open(engine, &home, &dataset.parse()?, &options, &reading)?;
            let schema = Arc::clone(feed.schema());
            format.check(&schema)?;
            let plan = Arc::clone(feed.plan());
            let number = engine::number();
            engine.readings.put(number, Mutex::new(Reading { feed, stream: None }));
            Ok(Reader { number, home, spec, options, reading, shard, format, schema, plan })
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
        self.plan.place_after(place, stride)
    }

    /// Number of input groups: row groups, and parts of large ones.
    #[getter]
    fn groups(&self) -> u32 {
        self.plan.input_groups()
    }

    /// An input group by its number: its file, row group, first row in it, and number of selected rows.
    fn group(&self, number: u32) -> Option<(String, u32, u32, u32)> {
        let InputGroup { file, row_group, first_row, rows } = self.plan.input_group(number)?;
        Some((file, row_group, first_row, rows))
    }

    /// The rows of an input group.
    fn read_group<'py>(&self, py: Python<'py>, number: u32) -> PyResult<Bound<'py, PyAny>> {
        let read = engine::with(py, |engine| {
            let reading = self.opened(engine)?;
            let feed = lock(&reading).feed.clone();
            let stopped = || FeedError::Stopped { file: self.spec.to_string() };
            let batch = engine.block_on(feed.read_group(number)).ok_or_else(stopped)??;
            match self.format {
                Format::Arrow => Ok(Converted::Record(RecordBatch(batch))),
                Format::Numpy | Format::Torch => match Columns::new(batch, 0) {
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

    /// Checks a position that was stored: the plan that it belongs to, and its place.
    fn check_position(&self, py: Python<'_>, plan: &str, place: u64) -> PyResult<()> {
        let check = || {
            let cursor = Cursor { plan_id: plan.parse()?, step: place / self.plan.batch_rows() as u64 };
            self.plan.step_of(&cursor).map(drop)
        };
        check().map_err(|error: FeedError| Failure::Usage(format!("resume {}: {error}", self.spec)).raise(py))
    }

    /// The dataset; `@latest` has become a snapshot.
    #[getter]
    fn dataset(&self) -> String {
        self.spec.to_string()
    }

    /// The home folder.
    #[getter]
    fn home(&self) -> &PathBuf {
        &self.home
    }

    /// The digest of all that decides the order.
    #[getter]
    fn plan(&self) -> String {
        self.plan.id().to_string()
    }

    /// Rows of an epoch: those of the dataset, or the selected ones.
    #[getter]
    fn rows(&self) -> u64 {
        self.plan.rows()
    }

    /// Rows of a global batch.
    #[getter]
    fn batch_rows(&self) -> usize {
        self.plan.batch_rows()
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
    /// Waits for the next batch, for [`SLICE`] at most.
    fn wait(&self, engine: &Engine, places: Range<u64>, stride: u64) -> Result<Waited> {
        if places.is_empty() {
            return Ok(Waited::End);
        }
        let reading = self.opened(engine)?;
        let mut reading = lock(&reading);
        let Reading { feed, stream } = &mut *reading;
        if stream.as_ref().is_none_or(|open| open.places != places || open.stride != stride) {
            *stream = None;
        }
        let waited = engine.block_on(async {
            let open = match &mut *stream {
                Some(open) => open,
                none => {
                    let stream = feed.stream_places(self.shard, places.clone(), stride)?;
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
                        open.places.start =
                            self.plan.place_after(open.places.start, stride).min(open.places.end);
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

    fn convert(&self, batch: millrace_streams::feed::Result<FeedBatch>) -> Result<Converted> {
        let FeedBatch { step, batch, .. } = batch?;
        match self.format {
            Format::Arrow => Ok(Converted::Record(RecordBatch(batch))),
            Format::Numpy | Format::Torch => Columns::new(batch, step).map(Converted::Columns),
        }
    }

    /// The open feed; opened again if it was closed.
    fn opened(&self, engine: &Engine) -> Result<Arc<Mutex<Reading>>> {
        match engine.readings.get(self.number) {
            Some(reading) => Ok(reading),
            None => Ok(engine.readings.put(self.number, Mutex::new(self.reopen(engine)?))),
        }
    }

    /// Opens the feed again, for example after a fork. The plan must be the same.
    fn reopen(&self, engine: &Engine) -> Result<Reading> {
        let (_, feed) = open(engine, &self.home, &self.spec, &self.options, &self.reading)?;
        let (cursor, plan): (PlanId, PlanId) = (self.plan.id(), feed.plan().id());
        if cursor != plan {
            return Err(FeedError::OtherPlan { cursor, plan }.into());
        }
        Ok(Reading { feed, stream: None })
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        engine::with_running(|engine| drop(engine.readings.take(self.number)));
    }
}

/// The transform of an image column, which Python gives as JSON.
fn image((column, options): (String, String)) -> Result<(String, ImageOptions)> {
    match serde_json::from_str(&options) {
        Ok(options) => Ok((column, options)),
        Err(error) => Err(Failure::Usage(format!("images, column {column:?}: {error}"))),
    }
}

fn open(
    engine: &Engine,
    home: &std::path::Path,
    spec: &DatasetSpec,
    options: &PlanOptions,
    reading: &FeedOptions,
) -> Result<(DatasetSpec, Feed)> {
    let volumes = engine.volumes(home)?;
    let opened = engine.block_on(async {
        let dataset = spec.open(&volumes).await?;
        let plan = dataset.plan(options).await?;
        let feed = Feed::open(plan, Arc::clone(dataset.store()), reading)?;
        Ok((dataset.spec().clone(), feed))
    });
    opened.unwrap_or_else(|| Err(FeedError::Stopped { file: spec.to_string() }.into()))
}
