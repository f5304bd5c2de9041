//! `millrace feed head`: the first rows in training order.

use anyhow::Result;
use arrow::error::ArrowError;
use arrow::util::display::{ArrayFormatter, FormatOptions};
use futures::StreamExt;
use millrace_streams::feed::{FeedOptions, Shard};

use super::{columns, open};
use crate::cli::FeedHeadArgs;
use crate::context::Context;
use crate::json_rows;

/// Characters of a cell that the table shows.
const CELL_CHARS_MAX: usize = 60;

pub(super) async fn run(context: &Context, args: FeedHeadArgs) -> Result<()> {
    let options =
        FeedOptions { columns: columns(args.columns), prefetch_batches: 1, ..FeedOptions::default() };
    let opened = open(context, &args.source, &args.order, options).await?;
    let feed = &opened.feed;
    let places = 0..u64::from(args.rows).min(feed.rows());
    let mut stream = feed.stream_places(Shard::WHOLE, places, 1)?;
    let mut rows: Vec<Vec<String>> = Vec::new();
    let format = FormatOptions::default().with_null("null");
    while let Some(batch) = stream.next().await {
        let batch = batch?.batch;
        if context.out.is_json() {
            let lines = json_rows::lines(&batch, true)?;
            if !context.out.partial(&String::from_utf8(lines)?)? {
                return Ok(());
            }
            continue;
        }
        let batch = json_rows::displayable(&batch)?;
        let columns = batch.columns().iter().map(|column| ArrayFormatter::try_new(column, &format));
        let columns = columns.collect::<Result<Vec<_>, _>>()?;
        for row in 0..batch.num_rows() {
            let cells = columns
                .iter()
                .map(|column| Ok::<_, ArrowError>(clipped(&column.value(row).try_to_string()?)));
            rows.push(cells.collect::<Result<_, _>>()?);
        }
    }
    if context.out.is_json() {
        return Ok(());
    }
    let names: Vec<&str> = feed.schema().fields().iter().map(|field| field.name().as_str()).collect();
    context.out.table(&(), &names, rows)
}

/// The text of a cell, with its end left out where it is long.
fn clipped(text: &str) -> String {
    match text.char_indices().nth(CELL_CHARS_MAX) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}
