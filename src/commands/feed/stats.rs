//! `millrace feed stats`: the columns of a dataset.

use anyhow::Result;
use futures::StreamExt;
use millrace_streams::feed::{ColumnSummary, Feed, FeedOptions, PlanOptions, Shard, Statistics};
use serde_json::json;

use super::{OpenRows, columns, open_rows};
use crate::cli::FeedStatsArgs;
use crate::context::Context;
use crate::output::count;

/// Rows that are added at a time.
const BATCH_ROWS: usize = 4096;
/// Characters of a value that the table shows.
const VALUE_CHARS_MAX: usize = 24;

pub(super) async fn run(context: &Context, args: FeedStatsArgs) -> Result<()> {
    // Every row comes once whatever the order; one lane reads one row group after the other.
    let options = PlanOptions { batch_rows: BATCH_ROWS, lanes: 1, ..PlanOptions::default() };
    let OpenRows { dataset, plan, _topics } = open_rows(context, &args.rows, options).await?;
    let (rows, selection) = (plan.rows(), plan.selection().map(ToString::to_string));
    let options = FeedOptions { columns: columns(args.columns), ..FeedOptions::default() };
    let feed = Feed::open(plan, dataset.store().clone(), &options)?;
    let mut stream = feed.stream_places(Shard::WHOLE, 0..rows, 1)?;
    let mut statistics = Statistics::new(feed.schema());
    let bar = context.out.progress("stats", "rows", Some(rows));
    loop {
        let next = tokio::select! {
            next = stream.next() => next,
            () = context.stop.cancelled() => None,
        };
        let Some(batch) = next else { break };
        let batch = batch?.batch;
        bar.inc(batch.num_rows() as u64);
        statistics = context
            .blocking(move || {
                statistics.add(&batch)?;
                Ok(statistics)
            })
            .await?;
    }
    bar.finish_and_clear();
    context.interrupted("feed stats")?;
    let found = statistics.summaries();
    let value = json!({ "dataset": dataset.spec(), "rows": rows, "selection": selection, "columns": found });
    let headers = ["column", "type", "nulls", "min", "max", "mean", "std", "distinct", "frequent"];
    context.out.table(&value, &headers, found.iter().map(row))
}

fn row(found: &ColumnSummary) -> Vec<String> {
    let number = |number: Option<f64>| number.map_or_else(String::new, |number| format!("{number:.4}"));
    let frequent: Vec<String> = found
        .top
        .iter()
        .take(3)
        .map(|(value, times)| format!("{} ×{}", shown(value), count(*times)))
        .collect();
    let mut data_type = found.data_type.clone();
    if let Some((least, most)) = found.lengths {
        data_type = format!("{data_type}, {least} to {most} items");
    }
    let mut nulls = count(found.nulls);
    for (more, what) in [(found.null_items, "in lists"), (found.nans, "NaN")] {
        if more > 0 {
            nulls = format!("{nulls}, {} {what}", count(more));
        }
    }
    vec![
        found.column.clone(),
        data_type,
        nulls,
        shown(&found.min),
        shown(&found.max),
        number(found.mean),
        number(found.std),
        found.distinct.map_or_else(String::new, count),
        frequent.join(", "),
    ]
}

fn shown(value: &serde_json::Value) -> String {
    let text = match value {
        serde_json::Value::Null => String::new(),
        serde_json::Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    match text.char_indices().nth(VALUE_CHARS_MAX) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text,
    }
}
