//! `millrace feed`: a dataset in training order, printed, described, verified, measured, transformed or served.

mod bench;
mod head;
mod map;
mod plan;
mod serve;
mod stats;
mod verify;

use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use futures::StreamExt;
use millrace_streams::dataset::{OpenDataset, SourceSpec};
use millrace_streams::feed::{
    AnyFeed, EpochRows, Epochs, Feed, FeedBatch, FeedOptions, Mixture, MixtureFeed, Plan, PlanOptions,
    Selection, Shard,
};

use crate::cli::{ColumnsArgs, FeedArgs, FeedCommand, OrderArgs, RowsArgs, SelectArgs, SourceArgs};
use crate::context::{Context, TopicSession};
use crate::failure::{Exit, fail};
use crate::json_rows;
use crate::output::count;

pub(crate) use serve::check_location;

/// Runs the command.
pub(crate) async fn run(context: &Context, args: FeedArgs) -> Result<()> {
    match args.command {
        None => read(context, args).await,
        Some(FeedCommand::Plan(args)) => plan::run(context, args).await,
        Some(FeedCommand::Head(args)) => head::run(context, args).await,
        Some(FeedCommand::Stats(args)) => stats::run(context, args).await,
        Some(FeedCommand::Verify(args)) => verify::run(context, args).await,
        Some(FeedCommand::Bench(args)) => bench::run(context, args).await,
        Some(FeedCommand::Map(args)) => map::run(context, args).await,
        Some(FeedCommand::Serve(args)) => serve::run(context, args).await,
    }
}

async fn read(context: &Context, args: FeedArgs) -> Result<()> {
    let mut sources = args.source.dataset.iter().chain(args.source.mix.iter().map(|(source, _)| source));
    if args.world > 1 && sources.any(|source| source.topic().is_some() && source.is_moving()) {
        return fail(
            Exit::Usage,
            "each reader would find its own end of the topic: give all of them the offsets that millrace feed plan shows",
        );
    }
    let read = FeedOptions { columns: columns(args.columns), ..FeedOptions::default() };
    let opened = open(context, &args.source, &args.order, read).await?;
    let shard = Shard::new(args.rank, args.world)?;
    let epochs = opened.epochs(args.epochs.rows_per_epoch)?;
    let batch_rows = opened.feed.batch_rows() as u64;
    let places = match args.epoch {
        Some(epoch) => epochs.places(epoch..epoch.saturating_add(1)),
        None => {
            let place_of = |step: u64| step.saturating_mul(batch_rows);
            let start = place_of(args.step);
            match args.batches {
                None if args.dry => start..start.saturating_add(epochs.start(1)),
                batches => start..place_of(args.step.saturating_add(batches.unwrap_or(1))),
            }
        }
    };
    let batches = places.end.div_ceil(batch_rows) - places.start / batch_rows;
    let (id, rows_total) = (opened.feed.id(), epochs.start(1));
    let mut stream = opened.feed.stream_places(shard, places, 1)?;

    let started = Instant::now();
    let bar = context.out.progress("feed", "batches", args.dry.then_some(batches));
    let (mut rows, mut seen) = (0_u64, 0_u64);
    loop {
        let next = tokio::select! {
            next = stream.next() => next,
            () = context.stop.cancelled() => None,
        };
        let Some(batch) = next else { break };
        let batch = batch?;
        rows += batch.rows.len() as u64;
        seen += 1;
        bar.inc(1);
        if !args.dry && !print(context, &batch)? {
            break;
        }
    }
    bar.finish_and_clear();
    context.interrupted("feed")?;
    if !args.dry {
        return Ok(());
    }
    let seconds = started.elapsed().as_secs_f64();
    let rate = rows as f64 / seconds.max(1e-9);
    context.out.table(
        &serde_json::json!({
            "dataset": opened.name, "plan": id.to_string(), "rows": rows_total,
            "rows_read": rows, "batches": seen, "seconds": seconds, "rows_per_second": rate,
        }),
        &["dataset", "rows", "read", "batches", "seconds", "rows/s"],
        [vec![
            opened.name,
            count(rows_total),
            count(rows),
            count(seen),
            format!("{seconds:.3}"),
            count(rate as u64),
        ]],
    )
}

/// A dataset or a mixture, ready to be read.
struct Opened {
    /// The dataset, or the datasets with their weights.
    name: String,
    feed: AnyFeed,
    /// The broker of topics: a temporary one lives as long as the session.
    _topics: Option<TopicSession>,
}

impl Opened {
    /// The places of its epochs.
    fn epochs(&self, length: Option<EpochRows>) -> Result<Epochs> {
        Ok(self.feed.epochs(length)?)
    }
}

/// Opens a dataset or a mixture of datasets, and plans the chosen rows. A signal ends it.
async fn open(
    context: &Context,
    source: &SourceArgs,
    order: &OrderArgs,
    read: FeedOptions,
) -> Result<Opened> {
    context.abandonable(opened(context, source, order, read)).await
}

async fn opened(
    context: &Context,
    source: &SourceArgs,
    order: &OrderArgs,
    read: FeedOptions,
) -> Result<Opened> {
    let options = plan_options(order);
    if let Some(spec) = &source.dataset {
        let (dataset, topics) = open_source(context, spec).await?;
        let selection = selection(&source.select)?;
        let plan = dataset.plan(&PlanOptions { selection, ..options }).await?;
        let feed = Feed::open(plan, Arc::clone(dataset.store()), &read)?;
        return Ok(Opened { name: dataset.spec().to_string(), feed: feed.into(), _topics: topics });
    }
    if source.mix.is_empty() {
        return fail(Exit::Usage, "no dataset is named; write VOLUME@SNAPSHOT:/PATH");
    }
    let volumes = context.volumes().await?;
    let topics = session(context, source.mix.iter().map(|(spec, _)| spec)).await?;
    let mut datasets = Vec::with_capacity(source.mix.len());
    for (spec, weight) in &source.mix {
        let kafka = topics.as_ref().map(|topics| &topics.kafka);
        datasets.push((spec.open(&volumes, kafka).await?, *weight));
    }
    let options = PlanOptions { selection: selection(&source.select)?, ..options };
    let mixture = Mixture::plan(&datasets, &options, source.until).await?;
    let stores: Vec<_> = datasets.iter().map(|(dataset, _)| Arc::clone(dataset.store())).collect();
    let name = mixture.to_string();
    Ok(Opened { name, feed: MixtureFeed::open(mixture, &stores, &read)?.into(), _topics: topics })
}

/// One dataset with the plan of the chosen rows of it.
struct OpenRows {
    dataset: OpenDataset,
    plan: Plan,
    /// The broker of a topic: a temporary one lives as long as the session.
    _topics: Option<TopicSession>,
}

/// All of a plan that the flags of the order decide.
fn plan_options(order: &OrderArgs) -> PlanOptions {
    PlanOptions {
        seed: order.seed,
        batch_rows: order.batch_rows,
        tokens: order.tokens.options(),
        buckets: order.buckets.clone(),
        ..PlanOptions::default()
    }
}

/// Opens one dataset and plans the chosen rows of it. A signal ends it.
async fn open_rows(context: &Context, args: &RowsArgs, options: PlanOptions) -> Result<OpenRows> {
    let planned = async {
        let (dataset, topics) = open_source(context, &args.dataset).await?;
        let selection = selection(&args.select)?;
        let plan = dataset.plan(&PlanOptions { selection, ..options }).await?;
        Ok(OpenRows { dataset, plan, _topics: topics })
    };
    context.abandonable(planned).await
}

/// Opens a dataset of a volume or a range of a topic.
async fn open_source(context: &Context, spec: &SourceSpec) -> Result<(OpenDataset, Option<TopicSession>)> {
    let topics = session(context, std::iter::once(spec)).await?;
    let volumes = context.volumes().await?;
    let dataset = spec.open(&volumes, topics.as_ref().map(|topics| &topics.kafka)).await?;
    Ok((dataset, topics))
}

/// A session with the topics, if one of the datasets is a topic.
async fn session<'s>(
    context: &Context,
    mut specs: impl Iterator<Item = &'s SourceSpec>,
) -> Result<Option<TopicSession>> {
    match specs.any(|spec| spec.topic().is_some()) {
        true => Ok(Some(context.topics().await?)),
        false => Ok(None),
    }
}

fn selection(args: &SelectArgs) -> Result<Option<Selection>> {
    let split = args.split.as_deref();
    Ok(Selection::new(args.filter.as_deref(), &args.splits, split, &args.split_by)?)
}

/// The columns to read; none means all.
fn columns(args: ColumnsArgs) -> Option<Vec<String>> {
    Some(args.columns).filter(|columns| !columns.is_empty())
}

/// Prints one batch: a line that identifies it, then a JSON object per row (with `--json`, the objects only).
/// Returns false once the reader has closed standard output.
fn print(context: &Context, batch: &FeedBatch) -> Result<bool> {
    let lines = json_rows::lines(&batch.batch, false)?;
    context.out.text(&format!(
        "# step {}, slots {:?}, {} rows",
        batch.step,
        batch.slots,
        batch.rows.len()
    ))?;
    context.out.partial(&String::from_utf8(lines)?)
}
