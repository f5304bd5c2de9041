//! `millrace feed verify`: proof that several readers deliver every row exactly once.

use std::sync::Arc;

use anyhow::Result;
use futures::StreamExt;
use millrace_streams::feed::{Coverage, Feed, FeedOptions, Plan, Rows, Shard};
use serde_json::json;

use super::{OpenRows, columns, open_rows, plan_options};
use crate::cli::FeedVerifyArgs;
use crate::context::Context;
use crate::failure::{Exit, fail};
use crate::output::count;

pub(super) async fn run(context: &Context, args: FeedVerifyArgs) -> Result<()> {
    let OpenRows { dataset, plan, _topics } =
        open_rows(context, &args.rows, plan_options(&args.order)).await?;
    let plan = Arc::new(plan);
    let options = FeedOptions { columns: columns(args.columns), ..FeedOptions::default() };
    // Readers share nothing, like processes on several machines.
    let mut readers = Vec::with_capacity(args.readers as usize);
    for rank in 0..args.readers {
        let feed = Feed::open(Arc::clone(&plan), dataset.store().clone(), &options)?;
        readers.push(feed.stream_places(Shard::new(rank, args.readers)?, 0..plan.rows(), 1)?);
    }
    let mut coverage = Coverage::new(Arc::clone(&plan))?;
    let steps = plan.steps_for_epochs(1);
    let bar = context.out.progress("verify", "batches", Some(steps));
    for step in 0..steps {
        for (rank, reader) in readers.iter_mut().enumerate() {
            let next = tokio::select! {
                next = reader.next() => next,
                () = context.stop.cancelled() => break,
            };
            let Some(batch) = next else {
                return fail(Exit::Failed, format!("reader {rank} ended before step {step} of {steps}"));
            };
            let batch = batch?;
            if batch.step != step || batch.batch.num_rows() != batch.rows.len() {
                let (found, rows) = (batch.step, batch.batch.num_rows());
                let what =
                    format!("reader {rank} delivered step {found} with {rows} rows in place of step {step}");
                return fail(Exit::Failed, what);
            }
            coverage.add(&batch.rows);
        }
        context.interrupted("feed verify")?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    let report = coverage.report();
    if !report.is_exact() {
        let kinds =
            [("missing", &report.missing), ("repeated", &report.repeated), ("not selected", &report.foreign)];
        let found =
            kinds.iter().filter(|(_, rows)| rows.count > 0).map(|(kind, rows)| named(kind, rows, &plan));
        let found = found.collect::<Vec<_>>().join("; ");
        return fail(
            Exit::Corrupt,
            format!("feed verify {}: {found}; this is a defect of the feed", dataset.spec()),
        );
    }
    context.out.table(
        &json!({
            "dataset": dataset.spec(), "plan": plan.id().to_string(), "readers": args.readers,
            "rows": report.rows, "batches": steps, "digest": report.digest,
        }),
        &["dataset", "readers", "rows", "batches", "each row", "digest of the order"],
        [vec![
            dataset.spec().to_string(),
            args.readers.to_string(),
            count(report.rows),
            count(steps),
            "once".to_owned(),
            report.digest.clone(),
        ]],
    )
}

/// Rows of some kind, the first of them with their places.
fn named(kind: &str, rows: &Rows, plan: &Plan) -> String {
    let first = rows.first.iter().map(|row| match plan.address_of(*row) {
        Some(at) => format!("{row} (row {} of row group {} of {})", at.row, at.row_group, at.file),
        None => row.to_string(),
    });
    format!("{} rows {kind}: {}", count(rows.count), first.collect::<Vec<_>>().join(", "))
}
