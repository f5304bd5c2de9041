//! `millrace feed bench`: how fast rows come.

use std::time::Instant;

use anyhow::Result;
use futures::StreamExt;
use millrace_streams::feed::{FeedOptions, Shard};
use serde_json::json;

use super::{columns, open};
use crate::cli::FeedBenchArgs;
use crate::context::Context;
use crate::output::{bytes, count};

pub(super) async fn run(context: &Context, args: FeedBenchArgs) -> Result<()> {
    let shard = Shard::new(args.rank, args.world)?;
    let options = FeedOptions {
        columns: columns(args.columns),
        decode_concurrency: args.decoders.map_or(0, usize::from),
        prefetch_batches: args.prefetch.into(),
        ..FeedOptions::default()
    };
    let planning = Instant::now();
    let opened = open(context, &args.source, &args.order, options).await?;
    let planned = planning.elapsed().as_secs_f64();
    let (feed, batch_rows) = (&opened.feed, opened.feed.batch_rows() as u64);
    let rows_of_epoch = opened.epochs(args.epochs.rows_per_epoch)?.start(1);
    let end = args.batches.map_or(rows_of_epoch, |batches| batches.saturating_mul(batch_rows));
    let started = Instant::now();
    let mut stream = feed.stream_places(shard, 0..end, 1)?;
    let bar = context.out.progress("bench", "batches", Some(end.div_ceil(batch_rows)));
    let (mut rows, mut read, mut memory) = (0_u64, 0_u64, 0_u64);
    let (mut first, mut longest) = (None, 0_f64);
    loop {
        let waiting = Instant::now();
        let next = tokio::select! {
            next = stream.next() => next,
            () = context.stop.cancelled() => None,
        };
        let Some(batch) = next else { break };
        let batch = batch?;
        match first {
            None => first = Some(waiting.elapsed().as_secs_f64()),
            Some(_) => longest = longest.max(waiting.elapsed().as_secs_f64()),
        }
        rows += batch.rows.len() as u64;
        memory += batch.batch.get_array_memory_size() as u64;
        read += 1;
        bar.inc(1);
    }
    bar.finish_and_clear();
    context.interrupted("feed bench")?;
    let seconds = started.elapsed().as_secs_f64();
    let per_second = |amount: u64| amount as f64 / seconds.max(1e-9);
    let first = first.unwrap_or(0.0);
    context.out.table(
        &json!({
            "dataset": opened.name, "plan": feed.id().to_string(), "rows": rows, "batches": read,
            "seconds": seconds, "rows_per_second": per_second(rows), "bytes_per_second": per_second(memory),
            "plan_seconds": planned, "first_batch_seconds": first, "longest_wait_seconds": longest,
        }),
        &[
            "dataset",
            "rows",
            "batches",
            "seconds",
            "rows/s",
            "bytes/s",
            "plan",
            "first batch",
            "longest wait",
        ],
        [vec![
            opened.name.clone(),
            count(rows),
            count(read),
            format!("{seconds:.3}"),
            count(per_second(rows) as u64),
            bytes(per_second(memory) as u64),
            format!("{:.1} ms", planned * 1e3),
            format!("{:.1} ms", first * 1e3),
            format!("{:.1} ms", longest * 1e3),
        ]],
    )
}
