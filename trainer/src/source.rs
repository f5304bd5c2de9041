//! The datasets of a job: their plans, their feed and their columns, as the coordinator and the workers open them.
use std::collections::BTreeMap;
use std::fmt;
use std::slice;
use std::sync::Arc;

use millrace_datafs::{Datafs, Name, VolumeSpec};
use millrace_streams::KafkaConfig;
use millrace_streams::dataset::{DatasetSpec, OpenDataset, SourceSpec};
use millrace_streams::feed::{
    AnyFeed, Feed, FeedBatch, FeedError, FeedOptions, ImageOptions, Mixture, MixtureFeed, Plan, PlanOptions,
    Selection, Values,
};
use serde::{Deserialize, Serialize};

use crate::data::{Columns, InputColumns, Rows, list_length};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::job::JobFile;
use crate::labels::{self, Dictionary};
use crate::order::Order;
use crate::scaling::LabelScale;

/// Rows decoded before any worker starts, to check what a schema does not state.
const PROBE_ROWS: usize = 16;
/// Rows of a column read at a time.
const COLUMN_ROWS: usize = 1 << 16;
/// Labels of numbers from this magnitude on bring a warning.
const LARGE_LABEL: f32 = 1e4;

/// Where datasets are read from: volumes, and the brokers of topics where there are some.
#[derive(Clone)]
pub(crate) struct Sources {
    pub(crate) datafs: Datafs,
    pub(crate) kafka: Option<KafkaConfig>,
}

/// Opens a snapshot or a range of a topic that the job reads.
pub(crate) async fn open_dataset(
    sources: &Sources,
    job: &JobFile,
    dataset: &SourceSpec,
) -> Result<OpenDataset> {
    let opened = dataset.open(&sources.datafs, sources.kafka.as_ref()).await;
    opened.map_err(|e| Error::feed(format!("job {}", job.name), e))
}

/// Opens the datasets that the job trains on, in their order.
pub(crate) async fn open_datasets(sources: &Sources, job: &JobFile) -> Result<Vec<OpenDataset>> {
    let mut datasets = Vec::new();
    for dataset in job.dataset.sources() {
        datasets.push(open_dataset(sources, job, dataset).await?);
    }
    Ok(datasets)
}

/// Plans the order of the job's rows over its datasets.
pub(crate) async fn plan(job: &JobFile, datasets: &[OpenDataset]) -> Result<Order> {
    let options = plan_options(job)?;
    let failed = |dataset: &dyn fmt::Display, e: FeedError| {
        Error::feed(format!("job {}: dataset {dataset}", job.name), e)
    };
    let Some(mixed) = job.dataset.mixture() else {
        let [dataset] = datasets else { return Err(other_number(job, datasets)) };
        let plan = dataset.plan(&options).await.map_err(|e| failed(&job.dataset, e))?;
        return Ok(Arc::new(plan).into());
    };
    if mixed.len() != datasets.len() {
        return Err(other_number(job, datasets));
    }
    let weighted: Vec<_> = datasets.iter().cloned().zip(mixed.iter().map(|source| source.weight)).collect();
    let error = match Mixture::plan(&weighted, &options, job.until).await {
        Ok(mixture) => return Ok(Order::Mixture(Arc::new(mixture))),
        Err(error) => error,
    };
    // Errors name paths, which several volumes may have.
    for dataset in datasets {
        if let Err(error) = dataset.plan(&options).await {
            return Err(failed(dataset.spec(), error));
        }
    }
    Err(failed(&job.dataset, error))
}

fn other_number(job: &JobFile, datasets: &[OpenDataset]) -> Error {
    let reason = format!("{} datasets were opened for {}; start the job again", datasets.len(), job.dataset);
    Error::Job { job: job.name.to_string(), reason }
}

/// Replaces `@latest` by the newest snapshot, which may be another one soon: the run is of the one that is the
/// newest now.
pub(crate) fn resolve_snapshot(datafs: &Datafs, job: &Name, dataset: &mut DatasetSpec) -> Result<()> {
    if dataset.source.is_latest() {
        let (source, _) = datafs
            .resolve(&dataset.source)
            .map_err(|e| Error::volume(format!("job {job}: open dataset {dataset}"), e))?;
        dataset.source = source;
    }
    Ok(())
}

/// [`resolve_snapshot`] for all datasets of a job. Those of one volume get one snapshot: between two looks another one could
/// be created.
pub(crate) fn resolve_snapshots(datafs: &Datafs, job: &mut JobFile) -> Result<()> {
    let name = job.name.clone();
    let validation = job.validation.as_mut().and_then(|validation| validation.dataset.as_mut());
    let mut resolved: Vec<(VolumeSpec, VolumeSpec)> = Vec::new();
    for dataset in job.dataset.sources_mut().chain(validation) {
        let SourceSpec::Dataset(files) = dataset else { continue };
        let declared = files.source.clone();
        match resolved.iter().find(|(other, _)| *other == declared) {
            Some((_, source)) => files.source = source.clone(),
            None => {
                resolve_snapshot(datafs, &name, files)?;
                resolved.push((declared, files.source.clone()));
            }
        }
    }
    Ok(())
}

/// Replaces the bounds of a topic by the offsets that they mean now.
pub(crate) async fn resolve(sources: &Sources, job: &Name, dataset: &mut SourceSpec) -> Result<()> {
    if let SourceSpec::Topic(topic) = dataset
        && topic.range.is_none()
    {
        let opened = dataset.open(&sources.datafs, sources.kafka.as_ref()).await;
        *dataset = opened.map_err(|e| Error::feed(format!("job {job}"), e))?.spec().clone();
    }
    Ok(())
}

/// What rows are read for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    Training,
    Evaluation,
}

/// Options that decide the rows and their order.
pub(crate) fn plan_options(job: &JobFile) -> Result<PlanOptions> {
    let selection = job.selection().map_err(|e| Error::feed(format!("job {}", job.name), e))?;
    Ok(PlanOptions {
        selection,
        seed: job.seed,
        batch_rows: job.step_rows(),
        lanes: job.shuffle.lanes,
        window_rows: job.shuffle.window_rows,
        working_set_bytes_max: job
            .shuffle
            .working_set_bytes_max
            .unwrap_or(PlanOptions::default().working_set_bytes_max),
        ..PlanOptions::default()
    })
}

/// The snapshot's number. A snapshot that was deleted and created again under its name has another one.
/// That of a topic is 0: the source of its plan has a digest of its records.
pub(crate) fn snapshot_number(datafs: &Datafs, job: &JobFile, dataset: &SourceSpec) -> Result<u64> {
    let Some(files) = dataset.dataset() else { return Ok(0) };
    let source = &files.source;
    let snapshots = datafs
        .snapshot_list(&source.volume)
        .map_err(|e| Error::volume(format!("job {}: open dataset {dataset}", job.name), e))?;
    let found = snapshots.iter().find(|snapshot| Some(&snapshot.name) == source.snapshot.as_ref());
    Ok(found.map_or(0, |snapshot| snapshot.id))
}

/// The numbers of the snapshots that the job trains on, with commas between them.
pub(crate) fn snapshot_numbers(datafs: &Datafs, job: &JobFile) -> Result<String> {
    let number =
        |dataset: &SourceSpec| snapshot_number(datafs, job, dataset).map(|number| number.to_string());
    Ok(job.dataset.sources().map(number).collect::<Result<Vec<_>>>()?.join(","))
}

/// Opens the feed of the job's columns; images are augmented for training only.
pub(crate) fn open_feed(
    job: &JobFile,
    order: &Order,
    datasets: &[OpenDataset],
    cache_bytes_max: u64,
    use_of_rows: Use,
) -> Result<AnyFeed> {
    let image = |(column, options): (&String, &ImageOptions)| {
        let mut options = match use_of_rows {
            Use::Training => options.clone(),
            Use::Evaluation => options.without_augmentation(),
        };
        options.dtype = options.dtype.or(Some(Values::Float32));
        (column.clone(), options)
    };
    let options = FeedOptions {
        images: job.images.iter().map(image).collect(),
        columns: Some(job.columns()),
        cache_bytes_max: cache_bytes_max.max(order.working_set_bytes()),
        decode_concurrency: 1,
        ..FeedOptions::default()
    };
    let opened = match order {
        Order::Dataset(plan) => {
            let [dataset] = datasets else { return Err(other_number(job, datasets)) };
            Feed::open(Arc::clone(plan), Arc::clone(dataset.store()), &options).map(AnyFeed::from)
        }
        Order::Mixture(mixture) => {
            let stores: Vec<_> = datasets.iter().map(|dataset| Arc::clone(dataset.store())).collect();
            MixtureFeed::open(Arc::clone(mixture), &stores, &options).map(AnyFeed::from)
        }
    };
    opened.map_err(|error| {
        let mut names = datasets.iter().map(|dataset| dataset.spec().to_string());
        match error {
            // Of a mixture, the first dataset lacks it: others are compared with that one.
            FeedError::NoColumn { column, available } => {
                Error::NoColumn { dataset: names.next().unwrap_or_default(), column, available }
            }
            error => {
                let names = names.collect::<Vec<_>>().join(", ");
                Error::feed(format!("job {}: dataset {names}", job.name), error)
            }
        }
    })
}

/// What the training data has told.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct DataFacts {
    /// The classes, if the labels are texts.
    pub(crate) dictionary: Option<Dictionary>,
    /// Their scale, if the job standardizes them.
    pub(crate) scale: Option<LabelScale>,
    /// Values per row of columns whose lists have no fixed length, where several columns feed an input.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) lengths: BTreeMap<String, usize>,
}

impl DataFacts {
    /// Reads the lengths of lists and the labels if that is needed.
    pub(crate) async fn read(
        job: &JobFile,
        engine: &Engine,
        datasets: &[OpenDataset],
        feed: &AnyFeed,
    ) -> Result<DataFacts> {
        let order = Order::of(feed);
        let dictionary = dictionary(job, datasets, &order).await?;
        let mut facts = DataFacts { dictionary, ..DataFacts::default() };
        let inputs = InputColumns::of(job, engine.graph())?;
        let schema = feed.schema();
        let open: Vec<&str> = inputs.iter().flat_map(|input| input.open(schema)).collect();
        if !open.is_empty() {
            facts.lengths = lengths(feed, &job.dataset.to_string(), &open).await?;
        }
        if job.standardize_labels {
            let columns = columns(job, engine, &facts)?;
            columns.check_schema(feed.schema())?;
            facts.scale = Some(LabelScale::read(datasets, order.selection(), &columns).await?);
        }
        Ok(facts)
    }
}

/// The lengths of the lists of the first row; other rows must have the same.
async fn lengths(feed: &AnyFeed, dataset: &str, columns: &[&str]) -> Result<BTreeMap<String, usize>> {
    let read = feed.batch(0, 0..1).await.map_err(|e| Error::feed(format!("read dataset {dataset}"), e))?;
    let order = Order::of(feed);
    let length = |name: &&str| {
        let found = read.batch.column_by_name(name).and_then(|column| list_length(column, 0));
        let length = found.ok_or_else(|| Error::Data {
            dataset: dataset.to_owned(),
            reason: format!("{} has no value in column {name:?}", order.row_name(&read, 0)),
        })?;
        Ok(((*name).to_owned(), length))
    };
    columns.iter().map(length).collect()
}

/// Reads one column of the selected rows of a dataset, in the order of its files.
pub(crate) async fn read_column(
    dataset: &OpenDataset,
    selection: Option<&Selection>,
    column: &str,
    mut visit: impl FnMut(&Order, &FeedBatch) -> Result<()>,
) -> Result<()> {
    let failed = |e| Error::feed(format!("read column {column:?} of dataset {}", dataset.spec()), e);
    let selection = selection.cloned();
    let options = PlanOptions {
        batch_rows: COLUMN_ROWS,
        lanes: 1,
        window_rows: 1,
        selection,
        ..PlanOptions::default()
    };
    let plan = Arc::new(dataset.plan(&options).await.map_err(failed)?);
    let options = FeedOptions {
        columns: Some(vec![column.to_owned()]),
        cache_bytes_max: plan.working_set_bytes(),
        decode_concurrency: 1,
        ..FeedOptions::default()
    };
    let feed = Feed::open(Arc::clone(&plan), Arc::clone(dataset.store()), &options).map_err(failed)?;
    let order = Order::from(Arc::clone(&plan));
    let mut first = 0u64;
    while first < plan.rows() {
        let rows = usize::try_from(plan.rows() - first).map_or(COLUMN_ROWS, |left| left.min(COLUMN_ROWS));
        let batch = feed.batch(first / COLUMN_ROWS as u64, 0..rows).await.map_err(failed)?;
        visit(&order, &batch)?;
        first += rows as u64;
    }
    Ok(())
}

/// The column requirements of the job's model. Refuses columns of inputs that the model lacks, and inputs without
/// columns.
pub(crate) fn columns(job: &JobFile, engine: &Engine, facts: &DataFacts) -> Result<Columns> {
    Ok(Columns {
        dataset: job.dataset.to_string(),
        inputs: InputColumns::of(job, engine.graph())?,
        lengths: Arc::new(facts.lengths.clone()),
        label: job.label.clone(),
        output_width: engine.output_width(),
        loss: job.loss.kind(),
        ignore_index: job.loss.ignore_index(),
        dictionary: facts.dictionary.clone().map(Arc::new),
        scale: facts.scale.clone().map(Arc::new),
    })
}

/// The classes of the job's labels, if these are texts. Reads all of them.
pub(crate) async fn dictionary(
    job: &JobFile,
    datasets: &[OpenDataset],
    order: &Order,
) -> Result<Option<Dictionary>> {
    // The datasets of a mixture have the same types.
    let has_texts = |plan: &Arc<Plan>| {
        let field = plan.dataset().schema().field_with_name(&job.label);
        field.is_ok_and(|field| labels::is_text(field.data_type()))
    };
    if !order.plans().next().is_some_and(has_texts) || !job.loss.kind().takes_classes() {
        return Ok(None);
    }
    labels::read(datasets, order.selection(), &job.label).await.map(Some)
}

/// Checks columns, types and the widths of the first rows of each dataset.
pub(crate) async fn probe_all(
    job: &JobFile,
    datasets: &[OpenDataset],
    feed: &AnyFeed,
    columns: &Columns,
) -> Result<()> {
    let AnyFeed::Mixture(mixed) = feed else { return probe(feed, columns).await };
    for (source, dataset) in mixed.mixture().sources().iter().zip(datasets) {
        let order = Order::from(Arc::clone(&source.plan));
        let feed = open_feed(job, &order, slice::from_ref(dataset), 0, Use::Training)?;
        let columns = Columns { dataset: dataset.spec().to_string(), ..columns.clone() };
        probe(&feed, &columns).await?;
    }
    Ok(())
}

/// Checks columns, types and the widths of the first rows.
pub(crate) async fn probe(feed: &AnyFeed, columns: &Columns) -> Result<()> {
    columns.check_schema(feed.schema())?;
    let rows = feed.batch_rows().min(PROBE_ROWS);
    let batch = feed
        .batch(0, 0..rows)
        .await
        .map_err(|e| Error::feed(format!("read dataset {}", columns.dataset), e))?;
    let decoded = decode(&Order::of(feed), columns, &batch)?;
    if decoded.largest_label() > LARGE_LABEL {
        tracing::warn!(
            dataset = columns.dataset,
            label = decoded.largest_label(),
            "labels of this magnitude train slowly or diverge: set standardize_labels = true, or scale them"
        );
    }
    Ok(())
}

/// Decodes the rows of a batch; errors name the files.
pub(crate) fn decode(order: &Order, columns: &Columns, batch: &FeedBatch) -> Result<Rows> {
    columns.decode(&batch.batch, &|at| order.row_name(batch, at))
}

/// The labels of a batch as the dataset has them, for losses of numbers; errors name the files.
pub(crate) fn label_values(order: &Order, columns: &Columns, batch: &FeedBatch) -> Result<Vec<f32>> {
    columns.label_values(&batch.batch, &|at| order.row_name(batch, at))
}
