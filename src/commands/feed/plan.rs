//! `millrace feed plan`: what a training run will read.

use anyhow::Result;
use millrace_streams::feed::Shard;
use serde_json::json;

use super::open;
use crate::cli::FeedPlanArgs;
use crate::context::Context;
use crate::output::{bytes, count};

/// Readers that the table shows.
const READERS_SHOWN: usize = 16;

pub(super) async fn run(context: &Context, args: FeedPlanArgs) -> Result<()> {
    let (dataset, plan) = open(context, &args.order).await?;
    let files = plan.dataset().files();
    let row_groups: usize = files.iter().map(|file| file.row_groups.len()).sum();
    let file_bytes: u64 = files.iter().map(|file| file.bytes).sum();
    let decoded_bytes: u64 = files.iter().flat_map(|file| &file.row_groups).map(|group| group.bytes).sum();
    let (batch_rows, steps) = (plan.batch_rows(), plan.steps_for_epochs(1));
    // The last batch of an epoch has the rows that are left.
    let rest = (plan.rows() - (steps - 1) * batch_rows as u64) as usize;
    let mut readers = Vec::with_capacity(args.world as usize);
    for rank in 0..args.world {
        let shard = Shard::new(rank, args.world)?;
        let slots = shard.slots(batch_rows);
        let rows = (steps - 1) * slots.len() as u64 + shard.slots(rest).len() as u64;
        readers.push((rank, slots, rows));
    }
    let selection = plan.selection().map(ToString::to_string);
    if context.out.is_json() {
        let readers: Vec<_> = readers
            .iter()
            .map(|(rank, slots, rows)| {
                json!({ "rank": rank, "slots": [slots.start, slots.end], "rows": rows, "batches": steps })
            })
            .collect();
        return context.out.object(&json!({
            "dataset": dataset.spec(), "plan": plan.id().to_string(), "selection": selection,
            "rows": plan.rows(), "dataset_rows": plan.dataset().rows(),
            "files": files.len(), "row_groups": row_groups, "file_bytes": file_bytes,
            "decoded_bytes": decoded_bytes, "lanes": plan.lanes(), "window_rows": plan.window_rows(),
            "working_set_bytes": plan.working_set_bytes(), "seed": plan.seed(), "batch_rows": batch_rows,
            "steps_per_epoch": steps, "readers": readers,
        }));
    }
    let mut lines = vec![
        ["dataset", &dataset.spec().to_string()].map(str::to_owned),
        ["rows", &count(plan.rows())].map(str::to_owned),
    ];
    if let Some(selection) = selection {
        lines.push(["rows of the dataset".to_owned(), count(plan.dataset().rows())]);
        lines.push(["selected by".to_owned(), selection]);
    }
    lines.extend([
        ["files".to_owned(), format!("{}, {}", count(files.len() as u64), bytes(file_bytes))],
        ["row groups".to_owned(), format!("{}, {} decoded", count(row_groups as u64), bytes(decoded_bytes))],
        ["lanes".to_owned(), count(plan.lanes())],
        ["window".to_owned(), format!("{} rows", count(plan.window_rows()))],
        ["working set".to_owned(), format!("{}, all columns", bytes(plan.working_set_bytes()))],
        ["batch".to_owned(), format!("{} rows", count(batch_rows as u64))],
        ["steps of an epoch".to_owned(), count(steps)],
        ["seed".to_owned(), plan.seed().to_string()],
        ["plan".to_owned(), plan.id().to_string()],
    ]);
    context.out.table(&(), &[], lines.into_iter().map(Vec::from))?;
    let shown = readers.iter().take(READERS_SHOWN);
    let rows = shown.map(|(rank, slots, rows)| {
        vec![rank.to_string(), format!("{}..{}", slots.start, slots.end), count(*rows), count(steps)]
    });
    context.out.text("")?;
    context.out.table(&(), &["rank", "slots of a batch", "rows of an epoch", "batches"], rows)?;
    match readers.len().saturating_sub(READERS_SHOWN) {
        0 => Ok(()),
        more => context.out.text(&format!("… and {more} more readers; --json lists all")),
    }
}
