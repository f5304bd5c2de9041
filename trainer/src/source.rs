//! The dataset of a job: its plan, its feed and its columns, as the coordinator and the workers open them.
use std::sync::Arc;

use millrace_datafs::{Datafs, Name};
use millrace_streams::dataset::{DatasetSpec, OpenDataset};
use millrace_streams::feed::{Feed, FeedError, FeedOptions, Plan, PlanOptions};

use crate::data::{Columns, Rows};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::job::JobFile;
use crate::labels::{self, Dictionary};

/// Rows decoded before any worker starts, to check what a schema does not state.
const PROBE_ROWS: usize = 16;

/// Opens a snapshot that the job reads.
pub(crate) async fn open_dataset(
    datafs: &Datafs,
    job: &JobFile,
    dataset: &DatasetSpec,
) -> Result<OpenDataset> {
    dataset.open(datafs).await.map_err(|e| Error::feed(format!("job {}", job.name), e))
}

/// Replaces `@latest` by the newest snapshot, which may be another one soon: the run is of the one that is the
/// newest now.
pub(crate) fn resolve(datafs: &Datafs, job: &Name, dataset: &mut DatasetSpec) -> Result<()> {
    if dataset.source.is_latest() {
        let (source, _) = datafs
            .resolve(&dataset.source)
            .map_err(|e| Error::volume(format!("job {job}: open dataset {dataset}"), e))?;
        dataset.source = source;
    }
    Ok(())
}

/// Options that decide the order of rows.
pub(crate) fn plan_options(job: &JobFile) -> PlanOptions {
    PlanOptions {
        seed: job.seed,
        batch_rows: job.batch_rows,
        lanes: job.shuffle.lanes,
        window_rows: job.shuffle.window_rows,
        working_set_bytes_max: job
            .shuffle
            .working_set_bytes_max
            .unwrap_or(PlanOptions::default().working_set_bytes_max),
        ..PlanOptions::default()
    }
}

/// The snapshot's number. A snapshot that was deleted and created again under its name has another one.
pub(crate) fn snapshot_number(datafs: &Datafs, job: &JobFile, dataset: &DatasetSpec) -> Result<u64> {
    let source = &dataset.source;
    let snapshots = datafs
        .snapshot_list(&source.volume)
        .map_err(|e| Error::volume(format!("job {}: open dataset {dataset}", job.name), e))?;
    let found = snapshots.iter().find(|snapshot| Some(&snapshot.name) == source.snapshot.as_ref());
    Ok(found.map_or(0, |snapshot| snapshot.id))
}

/// Opens the feed of the job's two columns.
pub(crate) fn open_feed(
    job: &JobFile,
    plan: Arc<Plan>,
    dataset: &OpenDataset,
    cache_bytes_max: u64,
) -> Result<Feed> {
    let options = FeedOptions {
        columns: Some(vec![job.features.clone(), job.label.clone()]),
        cache_bytes_max: cache_bytes_max.max(plan.working_set_bytes()),
        decode_concurrency: 1,
        ..FeedOptions::default()
    };
    Feed::open(plan, Arc::clone(dataset.store()), &options).map_err(|error| match error {
        FeedError::NoColumn { column, available } => Error::Data {
            dataset: dataset.spec().to_string(),
            reason: format!("no column {column:?}; it has {available}"),
        },
        error => Error::feed(format!("job {}: dataset {}", job.name, dataset.spec()), error),
    })
}

/// The column requirements of the job's model.
pub(crate) fn columns(job: &JobFile, engine: &Engine, dictionary: Option<Arc<Dictionary>>) -> Columns {
    Columns {
        dataset: job.dataset.to_string(),
        features: job.features.clone(),
        label: job.label.clone(),
        input_width: engine.input_width(),
        output_width: engine.output_width(),
        loss: job.loss.kind(),
        ignore_index: job.loss.ignore_index(),
        dictionary,
    }
}

/// The classes of the job's labels, if these are texts. Reads all of them.
pub(crate) async fn dictionary(
    job: &JobFile,
    dataset: &OpenDataset,
    plan: &Plan,
) -> Result<Option<Dictionary>> {
    let schema = plan.dataset().schema();
    let text = schema.field_with_name(&job.label).is_ok_and(|field| labels::is_text(field.data_type()));
    if !text || !job.loss.kind().takes_classes() {
        return Ok(None);
    }
    labels::read(dataset, &job.label).await.map(Some)
}

/// Checks columns, types and the widths of the first rows.
pub(crate) async fn probe(feed: &Feed, columns: &Columns) -> Result<()> {
    columns.check_schema(feed.plan().dataset().schema())?;
    let rows = feed.plan().batch_rows().min(PROBE_ROWS);
    let batch = feed
        .batch(0, 0..rows)
        .await
        .map_err(|e| Error::feed(format!("read dataset {}", columns.dataset), e))?;
    decode(feed.plan(), columns, &batch.batch, &batch.rows).map(drop)
}

/// Decodes the rows of a batch; errors name the files.
pub(crate) fn decode(
    plan: &Plan,
    columns: &Columns,
    batch: &arrow::array::RecordBatch,
    rows: &[u64],
) -> Result<Rows> {
    columns.decode(batch, &|at| {
        let row = rows.get(at).copied().unwrap_or_default();
        match plan.address_of(row) {
            Some(address) => {
                format!("row {} of row group {} of {}", address.row, address.row_group, address.file)
            }
            None => format!("row {row}"),
        }
    })
}
