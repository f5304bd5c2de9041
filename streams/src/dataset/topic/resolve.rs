//! Resolution of bounds into offsets, and the scan that cuts a range into blocks.

use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures::{StreamExt, TryStreamExt, stream};

use super::block::{Block, Cutter, partition_range};
use super::bound::{Since, Until, shown};
use super::log::Log;
use super::range::{PARTITIONS_MAX, TopicRange};
use super::spec::TopicSpec;
use crate::error::{Error, Result};
use crate::topic::blocking;

/// Partitions scanned at the same time.
const CONCURRENT: usize = 4;
/// Questions whether a transaction has ended, and the time between two of them: 10 s together.
const TRANSACTION_POLLS: u32 = 40;
const TRANSACTION_PAUSE: Duration = Duration::from_millis(250);

/// A range with the blocks of all its partitions, in the order of partitions and offsets.
pub(super) struct Resolved {
    pub(super) range: TopicRange,
    pub(super) blocks: Vec<Block>,
}

/// Stops the scans when the command that waits for them is gone.
#[derive(Default)]
struct StopOnDrop(Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Resolves the bounds of a specification into offsets, and scans the records between them.
pub(super) async fn resolve(log: &Arc<dyn Log>, spec: &TopicSpec) -> Result<Resolved> {
    let spans = {
        let (log, spec) = (Arc::clone(log), spec.clone());
        let stop = StopOnDrop::default();
        let flag = Arc::clone(&stop.0);
        blocking(move || spans(log.as_ref(), &spec, &flag)).await?
    };
    let rows_max = if let Until::Rows(rows) = spec.until { rows } else { u64::MAX };
    let (scanned, refused): (Vec<_>, Vec<_>) = scan(log, spec, &spans, rows_max).await?.into_iter().unzip();
    let Until::Rows(wanted) = spec.until else { return Ok(joined(&spans, scanned)) };
    // How many rows follow a bad record is not known: enough.
    let count = |(blocks, refused): (&Vec<Block>, &Option<Error>)| match refused {
        Some(_) => wanted,
        None => rows_of(blocks),
    };
    let counts: Vec<u64> = scanned.iter().zip(&refused).map(count).collect();
    let quotas = quotas(wanted, &counts).ok_or_else(|| Error::TooFewRecords {
        topic: spec.topic.clone(),
        wanted,
        found: counts.iter().sum(),
    })?;
    for ((blocks, refused), quota) in scanned.iter().zip(refused).zip(&quotas) {
        if let Some(error) = refused
            && *quota > rows_of(blocks)
        {
            return Err(error);
        }
    }
    let (mut ends, mut kept) = (Vec::with_capacity(spans.len()), Vec::with_capacity(spans.len()));
    for (number, (span, blocks)) in spans.iter().zip(scanned).enumerate() {
        let quota = quotas.get(number).copied().unwrap_or_default();
        let blocks = truncated(log, spec, number as i32, blocks, quota).await?;
        ends.push(span.start..blocks.last().map_or(span.start, |last| last.next));
        kept.push(blocks);
    }
    Ok(joined(&ends, kept))
}

/// Scans a range that was resolved before, and finds the same records or fails.
pub(super) async fn rescan(log: &Arc<dyn Log>, spec: &TopicSpec, range: &TopicRange) -> Result<Vec<Block>> {
    let spans: Vec<Range<i64>> = range.partitions().iter().map(|of| of.first..of.next).collect();
    let scanned = scan(log, spec, &spans, u64::MAX).await?.into_iter().map(|(blocks, _)| blocks).collect();
    let found = joined(&spans, scanned);
    check(&spec.topic, range, &found.range)?;
    Ok(found.blocks)
}

/// The blocks of a range if they have its digests.
pub(super) fn verified(range: &TopicRange, blocks: Vec<Block>) -> Option<Vec<Block>> {
    let mut of_partition = vec![Vec::new(); range.partitions().len()];
    for block in &blocks {
        of_partition.get_mut(usize::try_from(block.partition).ok()?)?.push(block.clone());
    }
    let found = range.partitions().iter().zip(&of_partition);
    let mut found = found.map(|(of, blocks)| partition_range(of.first, of.next, blocks));
    let is_sorted = blocks.is_sorted_by_key(|block| (block.partition, block.first));
    (is_sorted && range.partitions().iter().all(|of| found.next() == Some(*of))).then_some(blocks)
}

fn check(topic: &str, wanted: &TopicRange, found: &TopicRange) -> Result<()> {
    for (number, (wanted, found)) in wanted.partitions().iter().zip(found.partitions()).enumerate() {
        if wanted != found {
            return Err(Error::RecordsChanged {
                topic: topic.to_owned(),
                partition: number as i32,
                first: wanted.first,
                next: wanted.next,
            });
        }
    }
    Ok(())
}

/// The offsets of each partition within the bounds, before a number of rows cuts them.
fn spans(log: &dyn Log, spec: &TopicSpec, stop: &AtomicBool) -> Result<Vec<Range<i64>>> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as i64);
    if let Until::Time(until) = spec.until
        && until > now
    {
        return Err(Error::OpenRange { topic: spec.topic.clone(), until: spec.until.to_string() });
    }
    let mut marks = log.watermarks()?;
    if marks.len() > PARTITIONS_MAX {
        let reason = format!(
            "topic {} has {} partitions, and one that is read as a dataset has at most {PARTITIONS_MAX}",
            spec.topic,
            marks.len()
        );
        return Err(Error::Config { reason });
    }
    let partitions: Vec<i32> = marks.keys().copied().collect();
    let mut ends = None;
    if let Until::Time(until) = spec.until {
        let found = log.ends_at(until, &partitions)?;
        marks = settled(log, spec, &found, stop)?;
        ends = Some(found);
    }
    let since = match spec.since {
        Since::Earliest => None,
        Since::Time(since) => Some(log.offsets_at(since, &partitions)?),
    };
    let span = |partition: &i32| {
        let (low, high) = marks.get(partition).copied().unwrap_or_default();
        let end = ends.as_ref().and_then(|ends| ends.get(partition)).map_or(high, |end| (*end).max(low));
        // A time after all records is the end of the range.
        let from = |offsets: &BTreeMap<i32, i64>| offsets.get(partition).map_or(end, |at| (*at).min(end));
        since.as_ref().map_or(low, from).max(low)..end
    };
    Ok(partitions.iter().map(span).collect())
}

/// The marks of all partitions once no transaction is open before `ends`.
///
/// Waits [`TRANSACTION_POLLS`] times [`TRANSACTION_PAUSE`] for the end of open ones.
fn settled(
    log: &dyn Log,
    spec: &TopicSpec,
    ends: &BTreeMap<i32, i64>,
    stop: &AtomicBool,
) -> Result<BTreeMap<i32, (i64, i64)>> {
    let started = Instant::now();
    for polls in 0.. {
        let marks = log.watermarks()?;
        let open =
            marks.iter().find(|(partition, (_, stable))| ends.get(partition).is_some_and(|end| stable < end));
        let Some((partition, (_, stable))) = open else { return Ok(marks) };
        if stop.load(Ordering::Relaxed) {
            break;
        }
        if polls == TRANSACTION_POLLS {
            let since = log.time_of(*partition, *stable, stop)?;
            return Err(Error::OpenTransaction {
                topic: spec.topic.clone(),
                partition: *partition,
                offset: *stable,
                since: since.map_or_else(|| "an unknown time".to_owned(), shown),
                until: spec.until.to_string(),
                waited_s: started.elapsed().as_secs(),
            });
        }
        log.pause(TRANSACTION_PAUSE);
    }
    Err(Error::Closed { what: "reader of the topic" })
}

/// Scans spans of partitions from 0 on, each up to `rows_max` rows. With such a bound, a bad record ends the scan of its
/// partition and comes with the blocks before it: it may be beyond the rows that are wanted of the partition.
async fn scan(
    log: &Arc<dyn Log>,
    spec: &TopicSpec,
    spans: &[Range<i64>],
    rows_max: u64,
) -> Result<Vec<(Vec<Block>, Option<Error>)>> {
    let stop = StopOnDrop::default();
    let one = |(partition, span): (i32, &Range<i64>)| {
        let (log, topic, bad) = (Arc::clone(log), spec.topic.clone(), spec.bad);
        let (span, stop) = (span.clone(), Arc::clone(&stop.0));
        blocking(move || {
            let mut cutter = Cutter::new(&topic, partition, bad, rows_max);
            let mut refused = None;
            log.read(partition, span, &stop, &mut |record| match cutter.add(&record) {
                Err(error @ Error::BadRecord { .. }) if rows_max < u64::MAX => {
                    refused = Some(error);
                    Ok(ControlFlow::Break(()))
                }
                added => added,
            })?;
            Ok((cutter.finish(), refused))
        })
    };
    let scans: Vec<_> = (0..).zip(spans).map(one).collect();
    stream::iter(scans).buffered(CONCURRENT).try_collect().await
}

fn joined(spans: &[Range<i64>], blocks: Vec<Vec<Block>>) -> Resolved {
    let ranges =
        spans.iter().zip(&blocks).map(|(span, blocks)| partition_range(span.start, span.end, blocks));
    // Watermarks and offsets of records are ranges, and the number of partitions was checked. A topic has at least one.
    let range = TopicRange::new(ranges.collect()).unwrap_or_else(TopicRange::none);
    Resolved { range, blocks: blocks.into_iter().flatten().collect() }
}

fn rows_of(blocks: &[Block]) -> u64 {
    blocks.iter().map(|block| u64::from(block.rows)).sum()
}

/// The first blocks of a partition with `quota` rows together; the last one is cut anew.
async fn truncated(
    log: &Arc<dyn Log>,
    spec: &TopicSpec,
    partition: i32,
    mut blocks: Vec<Block>,
    quota: u64,
) -> Result<Vec<Block>> {
    let (mut rows, mut whole) = (0, 0);
    while let Some(block) = blocks.get(whole)
        && rows + u64::from(block.rows) <= quota
        && rows < quota
    {
        rows += u64::from(block.rows);
        whole += 1;
    }
    let cut = blocks.get(whole).map(|block| block.first..block.next);
    blocks.truncate(whole);
    if let Some(span) = cut
        && rows < quota
    {
        let (log, topic, bad) = (Arc::clone(log), spec.topic.clone(), spec.bad);
        let stop = StopOnDrop::default();
        let flag = Arc::clone(&stop.0);
        let last = blocking(move || {
            let mut cutter = Cutter::new(&topic, partition, bad, quota - rows);
            log.read(partition, span, &flag, &mut |record| cutter.add(&record))?;
            Ok(cutter.finish())
        });
        blocks.extend(last.await?);
    }
    Ok(blocks)
}

/// Divides `wanted` rows evenly among partitions that have `counts` rows; none if there are fewer.
///
/// Each next row is one of the partition with the fewest so far, the first of them.
fn quotas(wanted: u64, counts: &[u64]) -> Option<Vec<u64>> {
    let taken = |level: u64| counts.iter().map(|count| u128::from(*count.min(&level))).sum::<u128>();
    if taken(u64::MAX) < u128::from(wanted) {
        return None;
    }
    // The highest level that takes no more than is wanted.
    let (mut level, mut above) = (0, wanted.saturating_add(1));
    while level + 1 < above {
        let middle = level.midpoint(above);
        if taken(middle) <= u128::from(wanted) { level = middle } else { above = middle }
    }
    let mut rest = u128::from(wanted) - taken(level);
    let quota = |count: &u64| {
        let more = *count > level && rest > 0;
        rest -= u128::from(more);
        (*count).min(level) + u64::from(more)
    };
    Some(counts.iter().map(quota).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::quotas;

    proptest! {
        /// A naive division gives each row to the partition with the fewest that still has some.
        #[test]
        fn rows_are_divided_one_by_one(counts in prop::collection::vec(0u64..40, 1..8), wanted in 1u64..200) {
            let mut naive = vec![0; counts.len()];
            for _ in 0..wanted {
                let open = (0..counts.len()).filter(|at| naive[*at] < counts[*at]);
                if let Some(least) = open.min_by_key(|at| (naive[*at], *at)) {
                    naive[least] += 1;
                }
            }
            let enough = counts.iter().sum::<u64>() >= wanted;
            prop_assert_eq!(quotas(wanted, &counts), enough.then_some(naive));
        }
    }
}
