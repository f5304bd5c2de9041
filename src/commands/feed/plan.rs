//! `millrace feed plan`: what a training run will read.

use std::ops::Range;

use anyhow::Result;
use millrace_streams::feed::{AnyFeed, Epochs, FeedOptions, Mixture, Plan, Shard};
use serde_json::{Value, json};

use super::{columns, open};
use crate::cli::FeedPlanArgs;
use crate::context::Context;
use crate::output::{bytes, count};

/// Readers that the table shows.
const READERS_SHOWN: usize = 16;

/// A reader's part of the first epoch.
struct Reader {
    rank: u32,
    slots: Range<usize>,
    rows: u64,
}

pub(super) async fn run(context: &Context, args: FeedPlanArgs) -> Result<()> {
    let options = FeedOptions { columns: columns(args.columns), ..FeedOptions::default() };
    let opened = open(context, &args.source, &args.order, options).await?;
    let epochs = opened.epochs(args.epochs.rows_per_epoch)?;
    let (batch_rows, rows) = (opened.feed.batch_rows(), epochs.start(1));
    let steps = epochs.steps(1, batch_rows as u64);
    // The last batch of an epoch has the rows that are left.
    let rest = (rows - (steps - 1) * batch_rows as u64) as usize;
    let mut readers = Vec::with_capacity(args.world as usize);
    for rank in 0..args.world {
        let shard = Shard::new(rank, args.world)?;
        let slots = shard.slots(batch_rows);
        let rows = (steps - 1) * slots.len() as u64 + shard.slots(rest).len() as u64;
        readers.push(Reader { rank, slots, rows });
    }
    let seed = args.order.seed;
    if context.out.is_json() {
        let mut shown = match &opened.feed {
            AnyFeed::Dataset(feed) => dataset_json(feed.plan()),
            AnyFeed::Mixture(feed) => mixture_json(feed.mixture(), rows),
        };
        let readers: Vec<_> = readers
            .iter()
            .map(|Reader { rank, slots, rows }| {
                json!({ "rank": rank, "slots": [slots.start, slots.end], "rows": rows, "batches": steps })
            })
            .collect();
        let common = json!({
            "dataset": opened.name, "plan": opened.feed.id().to_string(), "seed": seed, "batch_rows": batch_rows,
            "rows_per_epoch": rows, "steps_per_epoch": steps, "readers": readers,
        });
        if let (Some(shown), Value::Object(common)) = (shown.as_object_mut(), common) {
            shown.extend(common);
        }
        return context.out.object(&shown);
    }
    let mut lines = match &opened.feed {
        AnyFeed::Dataset(feed) => dataset_lines(&opened.name, feed.plan(), &epochs),
        AnyFeed::Mixture(feed) => mixture_lines(feed.mixture(), rows),
    };
    lines.extend([
        ["batch".to_owned(), format!("{} rows", count(batch_rows as u64))],
        ["steps of an epoch".to_owned(), count(steps)],
        ["seed".to_owned(), seed.to_string()],
        ["plan".to_owned(), opened.feed.id().to_string()],
    ]);
    context.out.table(&(), &[], lines.into_iter().map(Vec::from))?;
    let shown = readers.iter().take(READERS_SHOWN);
    let rows = shown.map(|Reader { rank, slots, rows }| {
        vec![rank.to_string(), format!("{}..{}", slots.start, slots.end), count(*rows), count(steps)]
    });
    context.out.text("")?;
    context.out.table(&(), &["rank", "slots of a batch", "rows of an epoch", "batches"], rows)?;
    match readers.len().saturating_sub(READERS_SHOWN) {
        0 => Ok(()),
        more => context.out.text(&format!("… and {more} more readers; --json lists all")),
    }
}

/// Sizes of a plan's files.
struct Files {
    row_groups: u64,
    bytes: u64,
    decoded_bytes: u64,
}

fn files(plan: &Plan) -> Files {
    let files = plan.dataset().files();
    Files {
        row_groups: files.iter().map(|file| file.row_groups.len() as u64).sum(),
        bytes: files.iter().map(|file| file.bytes).sum(),
        decoded_bytes: files.iter().flat_map(|file| &file.row_groups).map(|group| group.bytes).sum(),
    }
}

fn dataset_json(plan: &Plan) -> Value {
    let sizes = files(plan);
    json!({
        "selection": plan.selection().map(ToString::to_string),
        "rows": plan.rows(), "dataset_rows": plan.dataset().rows(),
        "files": plan.dataset().files().len(), "row_groups": sizes.row_groups, "file_bytes": sizes.bytes,
        "decoded_bytes": sizes.decoded_bytes, "lanes": plan.lanes(), "window_rows": plan.window_rows(),
        "working_set_bytes": plan.working_set_bytes(),
        "packing": plan.packing().map(|packing| json!({
            "column": packing.options().column, "length": packing.options().length,
            "documents": packing.documents(), "tokens": packing.tokens(), "padding": packing.padding(),
        })),
        "buckets": plan.buckets().map(|buckets| json!({
            "column": buckets.options().column, "bounds": buckets.options().bounds, "rows": buckets.counts(),
        })),
    })
}

fn dataset_lines(name: &str, plan: &Plan, epochs: &Epochs) -> Vec<[String; 2]> {
    let mut lines = vec![["dataset".to_owned(), name.to_owned()], ["rows".to_owned(), count(plan.rows())]];
    if let Some(selection) = plan.selection() {
        lines.push(["rows of the dataset".to_owned(), count(plan.dataset().rows())]);
        lines.push(["selected by".to_owned(), selection.to_string()]);
    }
    if let Some(packing) = plan.packing() {
        let (tokens, padding) = (packing.tokens(), packing.padding());
        let share = padding as f64 * 100.0 / (tokens + padding) as f64;
        lines.extend([
            ["rows are".to_owned(), format!("sequences of {} tokens", packing.options().length)],
            ["documents".to_owned(), count(packing.documents())],
            ["tokens".to_owned(), count(tokens)],
            ["padding".to_owned(), format!("{} tokens ({share:.2} %)", count(padding))],
        ]);
    }
    if let Some(buckets) = plan.buckets() {
        let counts = buckets.counts().into_iter().map(count);
        let bounds = buckets.options().bounds.iter().map(|bound| format!("up to {bound}"));
        let bounds = bounds.chain(["longer".to_owned()]);
        let shown = bounds.zip(counts).map(|(bound, rows)| format!("{bound}: {rows}"));
        lines.push(["rows by length".to_owned(), shown.collect::<Vec<_>>().join(", ")]);
    }
    if epochs.start(1) != plan.rows() {
        lines.push(["rows of an epoch".to_owned(), count(epochs.start(1))]);
    }
    let sizes = files(plan);
    lines.extend([
        [
            "files".to_owned(),
            format!("{}, {}", count(plan.dataset().files().len() as u64), bytes(sizes.bytes)),
        ],
        [
            "row groups".to_owned(),
            format!("{}, {} decoded", count(sizes.row_groups), bytes(sizes.decoded_bytes)),
        ],
        ["lanes".to_owned(), count(plan.lanes())],
        ["window".to_owned(), format!("{} rows", count(plan.window_rows()))],
        ["working set".to_owned(), format!("{}, all columns", bytes(plan.working_set_bytes()))],
    ]);
    lines
}

/// `rows` are those of an epoch.
fn mixture_json(mixture: &Mixture, rows: u64) -> Value {
    let sources = mixture.sources().iter().zip(mixture.counts(rows));
    let sources: Vec<_> = sources
        .map(|(source, taken)| {
            let mut shown = dataset_json(&source.plan);
            shown["dataset"] = json!(source.name);
            shown["weight"] = json!(source.weight.to_string());
            shown["rows_per_epoch"] = json!(taken);
            shown
        })
        .collect();
    json!({ "rows": rows, "sources": sources })
}

fn mixture_lines(mixture: &Mixture, rows: u64) -> Vec<[String; 2]> {
    let mut lines = Vec::new();
    let mut working_set = 0u64;
    for (source, taken) in mixture.sources().iter().zip(mixture.counts(rows)) {
        let share = taken as f64 * 100.0 / rows as f64;
        let (all, taken) = (count(source.plan.rows()), count(taken));
        working_set = working_set.saturating_add(source.plan.working_set_bytes());
        lines.push([source.name.clone(), format!("{taken} of an epoch ({share:.1} %), {all} rows in all")]);
    }
    if let Some(selection) = mixture.sources().first().and_then(|source| source.plan.selection()) {
        lines.push(["selected by".to_owned(), selection.to_string()]);
    }
    lines.extend([
        ["rows of an epoch".to_owned(), count(rows)],
        ["working set".to_owned(), format!("{}, all columns", bytes(working_set))],
    ]);
    lines
}
