//! `millrace feed`: a dataset in training order, printed, described, verified, measured or transformed.

mod bench;
mod head;
mod map;
mod plan;
mod stats;
mod verify;

use std::time::Instant;

use anyhow::Result;
use futures::StreamExt;
use millrace_streams::dataset::OpenDataset;
use millrace_streams::feed::{Cursor, Feed, FeedBatch, FeedOptions, Plan, PlanOptions, Selection, Shard};

use crate::cli::{ColumnsArgs, FeedArgs, FeedCommand, OrderArgs, RowsArgs};
use crate::context::Context;
use crate::failure::{Exit, fail};
use crate::json_rows;
use crate::output::count;

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
    }
}

async fn read(context: &Context, args: FeedArgs) -> Result<()> {
    let (dataset, plan) = open(context, &args.order).await?;
    let shard = Shard::new(args.rank, args.world)?;
    let batches = args.batches.unwrap_or(if args.dry { plan.steps_for_epochs(1) } else { 1 });
    let (id, rows_total) = (plan.id(), plan.rows());
    let feed = Feed::open(plan, dataset.store().clone(), &FeedOptions::default())?;
    let stream = feed.stream(shard, Cursor { plan_id: id, step: args.step })?;
    let mut stream = stream.take(usize::try_from(batches).unwrap_or(usize::MAX));

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
            "dataset": dataset.spec(), "plan": id.to_string(), "rows": rows_total,
            "rows_read": rows, "batches": seen, "seconds": seconds, "rows_per_second": rate,
        }),
        &["dataset", "rows", "read", "batches", "seconds", "rows/s"],
        [vec![
            dataset.spec().to_string(),
            count(rows_total),
            count(rows),
            count(seen),
            format!("{seconds:.3}"),
            count(rate as u64),
        ]],
    )
}

/// Opens the dataset and plans it.
async fn open(context: &Context, args: &OrderArgs) -> Result<(OpenDataset, Plan)> {
    let options = PlanOptions { seed: args.seed, batch_rows: args.batch_rows, ..PlanOptions::default() };
    open_rows(context, &args.rows, options).await
}

/// Opens the dataset and plans the chosen rows of it.
async fn open_rows(context: &Context, args: &RowsArgs, options: PlanOptions) -> Result<(OpenDataset, Plan)> {
    let Some(spec) = &args.dataset else {
        return fail(Exit::Usage, "no dataset is named; write VOLUME@SNAPSHOT:/PATH");
    };
    let split = args.split.as_deref();
    let selection = Selection::new(args.filter.as_deref(), &args.splits, split, &args.split_by)?;
    let dataset = spec.open(&context.volumes().await?).await?;
    let plan = dataset.plan(&PlanOptions { selection, ..options }).await?;
    Ok((dataset, plan))
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
