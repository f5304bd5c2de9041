//! Tests of bounded topics over a log in memory: random partitions, gaps, bad records, worlds and resumes.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use arrow::array::AsArray;
use arrow::datatypes::Int64Type;
use parking_lot::Mutex;
use proptest::prelude::*;

use super::block::Block;
use super::log::{Log, Visit};
use super::open::OpenTopic;
use super::{TopicRange, TopicSpec};
use crate::dataset::{DatasetCache, OpenDataset, SourceSpec};
use crate::error::{Error, Result};
use crate::feed::{Feed, FeedError, FeedOptions, PlanOptions, Selection, Shard};
use crate::topic::Record;

/// A record in memory: offset, timestamp and value.
type Stored = (i64, i64, Option<Vec<u8>>);

/// Partitions in memory. Offsets can have gaps.
#[derive(Default)]
struct MemoryLog {
    partitions: Mutex<Vec<Partition>>,
    reads: AtomicU64,
    /// Next reads that fail because no broker answers.
    failures: AtomicU64,
}

#[derive(Debug, Default, Clone)]
struct Partition {
    low: i64,
    high: i64,
    records: Vec<Stored>,
    /// First offset of an open transaction, and the pauses after which it is committed.
    open: Option<(i64, u32)>,
}

impl Partition {
    fn stable(&self) -> i64 {
        self.open.map_or(self.high, |(first, _)| first)
    }
}

impl Log for MemoryLog {
    fn watermarks(&self) -> Result<BTreeMap<i32, (i64, i64)>> {
        let partitions = self.partitions.lock();
        Ok((0..).zip(partitions.iter().map(|partition| (partition.low, partition.stable()))).collect())
    }

    fn offsets_at(&self, time_ms: i64, partitions: &[i32]) -> Result<BTreeMap<i32, i64>> {
        let logs = self.partitions.lock();
        let first = |partition: &i32| {
            let Partition { records, .. } = &logs[*partition as usize];
            let found = records.iter().find(|record| record.1 >= time_ms)?.0;
            (found < logs[*partition as usize].stable()).then_some((*partition, found))
        };
        Ok(partitions.iter().filter_map(first).collect())
    }

    fn ends_at(&self, time_ms: i64, partitions: &[i32]) -> Result<BTreeMap<i32, i64>> {
        let logs = self.partitions.lock();
        let end = |partition: &i32| {
            let Partition { records, high, .. } = &logs[*partition as usize];
            (*partition, records.iter().find(|record| record.1 >= time_ms).map_or(*high, |record| record.0))
        };
        Ok(partitions.iter().map(end).collect())
    }

    fn time_of(&self, partition: i32, offset: i64, _: &AtomicBool) -> Result<Option<i64>> {
        let logs = self.partitions.lock();
        let record = logs[partition as usize].records.iter().find(|record| record.0 == offset);
        Ok(record.map(|record| record.1))
    }

    fn pause(&self, _: Duration) {
        for partition in self.partitions.lock().iter_mut() {
            let left = |(first, pauses): (i64, u32)| Some((first, pauses.checked_sub(1)?));
            partition.open = partition.open.and_then(left);
        }
    }

    fn read(&self, partition: i32, offsets: Range<i64>, _: &AtomicBool, visit: Visit<'_>) -> Result<()> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        let failed =
            self.failures.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        if failed.is_ok() {
            let (bootstrap_servers, reason) = ("memory".to_owned(), "away".to_owned());
            return Err(Error::Unreachable { bootstrap_servers, waited_ms: 1, reason });
        }
        let read = self.partitions.lock()[partition as usize].clone();
        let (low, high, records) = (read.low, read.stable(), read.records);
        if offsets.start < low || offsets.end > high {
            let (topic, first, next) = ("t".into(), offsets.start, offsets.end);
            return Err(Error::RecordsRemoved { topic, partition, first, next, low, high });
        }
        for (offset, time, value) in records.iter().filter(|record| offsets.contains(&record.0)) {
            let record = Record { offset: *offset, timestamp_ms: Some(*time), value: value.as_deref() };
            if visit(record)?.is_break() {
                return Ok(());
            }
        }
        Ok(())
    }
}

/// A cache in memory.
#[derive(Default)]
struct MemoryCache(Mutex<BTreeMap<String, Vec<u8>>>);

impl DatasetCache for MemoryCache {
    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, String> {
        Ok(self.0.lock().get(key).cloned())
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), String> {
        self.0.lock().insert(key.to_owned(), value.to_vec());
        Ok(())
    }
}

fn log_of(partitions: Vec<Partition>) -> Arc<MemoryLog> {
    Arc::new(MemoryLog { partitions: Mutex::new(partitions), ..MemoryLog::default() })
}

/// Records from offset `low` on, each after a gap; `None` is a bad record.
fn partition(low: i64, records: &[(u8, Option<u16>)]) -> Partition {
    let mut at = low;
    let mut stored = Vec::new();
    for (gap, pad) in records {
        at += i64::from(*gap);
        let value = pad
            .map(|pad| format!("{{\n \"id\": {at}, \"pad\": \"{}\"}}", "p".repeat(pad.into())).into_bytes());
        stored.push((at, at * 10, value));
        at += 1;
    }
    // The log ends with offsets without records, as after an aborted transaction.
    Partition { low, high: at + 2, records: stored, open: None }
}

fn spec(text: &str) -> TopicSpec {
    text.parse().unwrap()
}

async fn open(log: &Arc<MemoryLog>, spec: &TopicSpec) -> Result<OpenTopic> {
    OpenTopic::open_log(spec, Arc::clone(log) as Arc<dyn Log>, None).await
}

/// Partition and offset of each row of `places` that the readers of a world get, in order.
async fn read(
    dataset: &OpenDataset,
    options: &PlanOptions,
    world: u32,
    places: Range<u64>,
) -> Vec<(i64, i64)> {
    use futures::StreamExt;
    let plan = Arc::new(dataset.plan(options).await.unwrap());
    let mut readers = Vec::new();
    for rank in 0..world {
        let feed =
            Feed::open(Arc::clone(&plan), Arc::clone(dataset.store()), &FeedOptions::default()).unwrap();
        readers.push(feed.stream_places(Shard::new(rank, world).unwrap(), places.clone(), 1).unwrap());
    }
    let mut rows = Vec::new();
    loop {
        let mut is_over = true;
        for reader in &mut readers {
            let Some(batch) = reader.next().await else { continue };
            is_over = false;
            let batch = batch.unwrap().batch;
            let numbers = |name: &str| {
                batch.column_by_name(name).unwrap().as_primitive::<Int64Type>().values().to_vec()
            };
            assert_eq!(numbers("id"), numbers("_offset"));
            rows.extend(numbers("_partition").into_iter().zip(numbers("_offset")));
        }
        if is_over {
            return rows;
        }
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn expected(log: &MemoryLog, range: &TopicRange) -> BTreeSet<(i64, i64)> {
    let partitions = log.partitions.lock();
    let mut rows = BTreeSet::new();
    for (number, (partition, of)) in partitions.iter().zip(range.partitions()).enumerate() {
        for (offset, _, value) in &partition.records {
            if (of.first..of.next).contains(offset) && value.is_some() {
                rows.insert((number as i64, *offset));
            }
        }
    }
    rows
}

fn partitions() -> impl Strategy<Value = Vec<Partition>> {
    // Pads of 40 kB make partitions of several blocks.
    let pad = prop_oneof![4 => (0u16..40).prop_map(Some), 1 => Just(Some(40_000)), 1 => Just(None)];
    let records = prop::collection::vec((prop_oneof![5 => Just(0u8), 1 => 1u8..5], pad), 0..120);
    prop::collection::vec((0i64..1000, records).prop_map(|(low, records)| partition(low, &records)), 1..5)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Each row of the range comes once per epoch, in one order for every world, also after a resume in another world,
    /// and whatever arrives meanwhile.
    #[test]
    fn rows_divide_exactly_over_any_world_and_resume(
        logs in partitions(), worlds in (1u32..7, 1u32..7), seed in 0u64..4, cut in 0u64..400, more in 0usize..30,
    ) {
        runtime().block_on(async {
            let log = log_of(logs);
            let opened = match open(&log, &spec("topic:t@latest?bad=skip")).await {
                Err(Error::NoRecords { .. }) => return Ok(()),
                opened => OpenDataset::of_topic(opened.unwrap()),
            };
            let range = opened.spec().topic().unwrap().range.clone().unwrap();
            let rows = expected(&log, &range);
            let options = PlanOptions { seed, batch_rows: 16, window_rows: 64, ..PlanOptions::default() };
            let all = read(&opened, &options, worlds.0, 0..rows.len() as u64).await;
            prop_assert_eq!(all.len(), rows.len());
            prop_assert_eq!(&all.iter().copied().collect::<BTreeSet<_>>(), &rows);

            // Records arrive, and another process resumes in another world from the text of the range.
            for partition in log.partitions.lock().iter_mut() {
                for offset in partition.high..partition.high + more as i64 {
                    partition.records.push((offset, offset * 10, Some(format!("{{\"id\":{offset}}}").into_bytes())));
                }
                partition.high += more as i64;
            }
            let text: SourceSpec = opened.spec().to_string().parse().unwrap();
            prop_assert_eq!(&text, opened.spec());
            let again = OpenDataset::of_topic(open(&log, text.topic().unwrap()).await.unwrap());
            prop_assert_eq!(again.identity(), opened.identity());
            let step = cut.min(rows.len() as u64) / 16;
            let rest = read(&again, &options, worlds.1, step * 16..rows.len() as u64).await;
            prop_assert_eq!(&rest[..], &all[(step * 16) as usize..]);
            Ok(())
        })?;
    }

    /// A number of rows takes the first ones of each partition, evenly, as a naive selection does.
    #[test]
    fn a_number_of_rows_is_exact(logs in partitions(), wanted in 1u64..300) {
        runtime().block_on(async {
            let log = log_of(logs.clone());
            let rows: Vec<usize> = logs.iter().map(|of| of.records.iter().filter(|r| r.2.is_some()).count()).collect();
            let found: u64 = rows.iter().sum::<usize>() as u64;
            let opened = open(&log, &spec(&format!("topic:t@{wanted}?bad=skip"))).await;
            if found < wanted {
                let is_expected = matches!(opened, Err(Error::TooFewRecords { wanted: w, found: f, .. }) if (w, f) == (wanted, found));
                prop_assert!(is_expected);
                return Ok(());
            }
            let mut quotas = vec![0; rows.len()];
            for _ in 0..wanted {
                let open = (0..rows.len()).filter(|at| quotas[*at] < rows[*at]);
                let least = open.min_by_key(|at| (quotas[*at], *at)).unwrap();
                quotas[least] += 1;
            }
            let opened = opened.unwrap();
            let range = opened.spec().range.clone().unwrap();
            let taken = expected(&log, &range);
            for (number, quota) in quotas.into_iter().enumerate() {
                prop_assert_eq!(taken.iter().filter(|row| row.0 == number as i64).count(), quota);
            }
            // The range that was cut is scanned again as it is.
            open(&log, opened.spec()).await.unwrap().prepare().await.unwrap();
            Ok(())
        })?;
    }

    #[test]
    fn specifications_are_read_as_they_are_printed(
        name in "[a-zA-Z0-9._-]{1,20}", rows in 1u64..1 << 40, time in 0i64..4_000_000_000_000, kind in 0u8..4, skip in any::<bool>(),
        ranges in prop::collection::vec((0i64..1 << 50, 0i64..1 << 50, any::<[u8; 16]>()), 0..5),
    ) {
        prop_assume!(name != "." && name != "..");
        let until = match kind { 0 => "latest".to_owned(), 1 => rows.to_string(), _ => format!("{}", super::Until::Time(time)) };
        let since = if kind == 3 { format!("{}..", super::Since::Time(time)) } else { String::new() };
        let partitions = ranges.into_iter().map(|(first, more, digest)| super::PartitionRange { first, next: first + more, digest });
        let range = TopicRange::new(partitions.collect());
        let mut options: Vec<String> = if skip { vec!["bad=skip".into()] } else { vec![] };
        options.extend(range.as_ref().map(|range| format!("offsets={range}")));
        let mark = if options.is_empty() { "" } else { "?" };
        let text = format!("topic:{name}@{since}{until}{mark}{}", options.join("&"));
        let parsed: SourceSpec = text.parse().unwrap();
        prop_assert_eq!(parsed.to_string(), text);
        if let Some(range) = range {
            prop_assert_eq!(range.to_bytes().len(), 32 * range.partitions().len());
            prop_assert_eq!(TopicRange::from_base64(&range.to_base64()), Some(range.clone()));
            prop_assert_eq!(parsed.topic().unwrap().range.clone(), Some(range));
        }
    }
}

#[test]
fn unusable_specifications_say_what_is_wrong() {
    let error = |text: &str| text.parse::<SourceSpec>().unwrap_err().to_string();
    for (text, part) in [
        ("topic:", "no name of a topic"),
        ("topic:..", "no name of a topic"),
        ("topic:a b", "no name of a topic"),
        ("topic:t@", "neither \"latest\""),
        ("topic:t@0", "must be 1 to"),
        ("topic:t@99999999999999999999", "must be 1 to"),
        ("topic:t@1969-01-01", "neither \"latest\""),
        ("topic:t@yesterday", "2026-11-28T06:00:00Z"),
        ("topic:t@1..5", "neither \"earliest\""),
        ("topic:t@latest?bad=drop", "option \"bad=drop\""),
        ("topic:t@latest?offsets=1:0-5:00", "of partition 0"),
        ("topic:t@latest?offsets=0:6-5:00000000000000000000000000000000", "end before they begin"),
    ] {
        assert!(error(text).contains(part), "{text}: {}", error(text));
    }
    assert!(matches!("topic:/train".parse(), Ok(SourceSpec::Dataset(_))));
}

#[test]
fn a_time_bounds_each_partition_at_its_first_later_record() {
    runtime().block_on(async {
        let log = log_of(vec![partition(0, &[(0, Some(1)); 10]), partition(5, &[(0, Some(1)); 3])]);
        // Timestamps are ten times the offset.
        let range = async |text: &str| open(&log, &spec(text)).await.unwrap().spec().range.clone().unwrap();
        let offsets =
            |range: &TopicRange| range.partitions().iter().map(|of| (of.first, of.next)).collect::<Vec<_>>();
        let until = range("topic:t@1970-01-01T00:00:00.045Z").await;
        assert_eq!(offsets(&until), [(0, 5), (5, 5)]);
        let since = range("topic:t@1970-01-01T00:00:00.061Z..latest").await;
        assert_eq!(offsets(&since), [(7, 12), (7, 10)]);
        let future = open(&log, &spec("topic:t@2999-01-01")).await.unwrap_err();
        assert!(matches!(future, Error::OpenRange { .. }), "{future}");
    });
}

#[test]
fn a_time_inside_an_open_transaction_waits_for_its_end_or_is_refused() {
    runtime().block_on(async {
        // Offsets 5 to 14 with times of ten times the offset; 9 is the first record of a transaction.
        let held = |pauses: u32| {
            let held = Partition { open: Some((9, pauses)), ..partition(5, &[(0, Some(1)); 10]) };
            log_of(vec![partition(0, &[(0, Some(1)); 10]), held])
        };
        let offsets = async |log: Arc<MemoryLog>, text: &str| {
            let range = open(&log, &spec(text)).await?.spec().range.clone().unwrap();
            Ok::<_, Error>(range.partitions().iter().map(|of| (of.first, of.next)).collect::<Vec<_>>())
        };
        let (at, behind) = ("topic:t@1970-01-01T00:00:00.090Z", "topic:t@1970-01-01T00:00:00.121Z");
        // All records before the time are stable.
        assert_eq!(offsets(held(u32::MAX), at).await.unwrap(), [(0, 9), (5, 9)]);
        // Records of the transaction are earlier than the time.
        assert_eq!(offsets(held(7), behind).await.unwrap(), [(0, 12), (5, 13)]);
        let since = "topic:t@1970-01-01T00:00:00.101Z..1970-01-01T00:00:00.121Z";
        assert_eq!(offsets(held(7), since).await.unwrap(), [(12, 12), (11, 13)]);
        let error = offsets(held(u32::MAX), behind).await.unwrap_err().to_string();
        for part in [
            "topic t cannot be read until 1970-01-01T00:00:00.121Z: partition 1",
            "offset 9",
            "not after 1970-01-01T00:00:00.090Z",
            "try again",
            "topic:t@latest",
        ] {
            assert!(error.contains(part), "{part}: {error}");
        }
        // Without a time, a range ends at the last stable offset.
        assert_eq!(offsets(held(u32::MAX), "topic:t@latest").await.unwrap(), [(0, 12), (5, 9)]);
    });
}

#[test]
fn a_bad_record_is_an_error_that_names_its_offset() {
    runtime().block_on(async {
        for (value, reason) in [
            (None, "no value"),
            (Some("[1]"), "no JSON object"),
            (Some("{\"id\":1"), "EOF"),
            (Some("{\"id\":\"a\nb\"}"), "control character"),
            (Some("{\"_offset\":1}"), "\"_offset\" twice"),
            (Some("{} {}"), "trailing"),
        ] {
            let mut bad = partition(3, &[(0, Some(1)); 4]);
            bad.records[2].2 = value.map(|value| value.as_bytes().to_vec());
            let log = log_of(vec![partition(0, &[(0, Some(1))]), bad]);
            let error = open(&log, &spec("topic:t")).await.unwrap_err().to_string();
            assert!(error.contains("topic t partition 1 offset 5: ") && error.contains(reason), "{error}");
            let skipped = open(&log, &spec("topic:t@latest?bad=skip")).await.unwrap();
            assert_eq!(
                skipped.blocks().unwrap().iter().map(|block| (block.rows, block.skipped)).collect::<Vec<_>>(),
                [(1, 0), (3, 1)]
            );
        }
        let nothing = open(&log_of(vec![partition(0, &[(0, None); 3])]), &spec("topic:t@latest?bad=skip"))
            .await
            .unwrap_err();
        assert!(nothing.to_string().contains("3 others were left out"), "{nothing}");
        let empty = open(&log_of(vec![Partition::default()]), &spec("topic:t")).await.unwrap_err();
        assert!(matches!(empty, Error::NoRecords { skipped: 0, .. }), "{empty}");
    });
}

/// Reads all rows of a range that was opened before.
async fn resume(
    log: &Arc<MemoryLog>,
    spec: &TopicSpec,
    cache: Option<Arc<dyn DatasetCache>>,
) -> crate::feed::Result<u64> {
    let open = OpenTopic::open_log(spec, Arc::clone(log) as Arc<dyn Log>, cache).await.unwrap();
    let dataset = OpenDataset::of_topic(open);
    let plan = dataset.plan(&PlanOptions::default()).await?;
    let feed = Feed::open(plan, Arc::clone(dataset.store()), &FeedOptions::default())?;
    for step in 0..feed.plan().steps_for_epochs(1) {
        feed.batch(step, 0..128).await?;
    }
    Ok(feed.plan().rows())
}

#[test]
fn deleted_and_replaced_records_are_errors_that_name_them() {
    runtime().block_on(async {
        let log = log_of(vec![partition(0, &[(0, Some(1))]), partition(0, &[(0, Some(9)); 20])]);
        let cache: Arc<dyn DatasetCache> = Arc::new(MemoryCache::default());
        let asked = spec("topic:t");
        let opened = OpenTopic::open_log(&asked, Arc::clone(&log) as Arc<dyn Log>, Some(Arc::clone(&cache)));
        let pinned = opened.await.unwrap().spec().clone();
        assert_eq!(resume(&log, &pinned, None).await.unwrap(), 21);
        assert_eq!(resume(&log, &pinned, Some(Arc::clone(&cache))).await.unwrap(), 21);
        let reads = log.reads.load(Ordering::Relaxed);
        assert_eq!(resume(&log, &pinned, Some(Arc::clone(&cache))).await.unwrap(), 21);
        assert_eq!(
            log.reads.load(Ordering::Relaxed) - reads,
            2,
            "the home knows the blocks: each is read once"
        );

        // A topic of the same name with other records of the same sizes, found with and without the home's memory.
        let before = log.partitions.lock().clone();
        log.partitions.lock()[1].records[7].1 += 1;
        for cache in [None, Some(Arc::clone(&cache))] {
            let error = resume(&log, &pinned, cache).await.unwrap_err();
            let text = millrace_leaf::error_chain::one_line(&error);
            assert!(text.contains("topic t partition 1: the records from offset 0 up to before"), "{text}");
            assert!(!error.is_retryable(), "{text}");
        }
        // A record that compaction has removed.
        *log.partitions.lock() = before.clone();
        log.partitions.lock()[1].records.remove(3);
        let error = resume(&log, &pinned, None).await.unwrap_err();
        assert!(millrace_leaf::error_chain::one_line(&error).contains("compacted"), "{error}");
        // Retention has deleted the first records.
        *log.partitions.lock() = before;
        log.partitions.lock()[1].low = 4;
        for cache in [None, Some(Arc::clone(&cache))] {
            let error = resume(&log, &pinned, cache).await.unwrap_err();
            let text = millrace_leaf::error_chain::one_line(&error);
            let begun =
                "read topic t as a dataset: topic t partition 1: the records from offset 0 up to before 2";
            assert!(text.starts_with(begun), "{text}");
            assert!(text.contains("the log has those from 4 up to before 22"), "{text}");
            assert!(text.contains("millrace train --abandon-run"), "{text}");
            assert!(matches!(error, crate::feed::FeedError::Topic { .. }), "{error:?}");
            assert!(!error.is_retryable(), "{text}");
        }
    });
}

#[test]
fn an_outage_in_the_middle_of_a_range_is_outlasted() {
    use futures::StreamExt;
    runtime().block_on(async {
        // Six blocks, of which a batch reads one or two.
        let log = log_of(vec![partition(0, &vec![(0, Some(40_000)); 300])]);
        let cache: Arc<dyn DatasetCache> = Arc::new(MemoryCache::default());
        let opened = async |asked: &TopicSpec| {
            let open = OpenTopic::open_log(asked, Arc::clone(&log) as Arc<dyn Log>, Some(Arc::clone(&cache)));
            OpenDataset::of_topic(open.await.unwrap())
        };
        let options = PlanOptions { batch_rows: 8, lanes: 1, window_rows: 16, ..PlanOptions::default() };
        let first = opened(&spec("topic:t")).await;
        let expected = read(&first, &options, 1, 0..300).await;
        // With the plan and the blocks of the cache, and without the records that were read before.
        let again = opened(first.spec().topic().unwrap()).await;
        let reading = FeedOptions { prefetch_batches: 1, ..FeedOptions::default() };
        let plan = again.plan(&options).await.unwrap();
        let feed = Feed::open(plan, Arc::clone(again.store()), &reading).unwrap();
        let mut stream = feed.stream_places(Shard::new(0, 1).unwrap(), 0..300, 1).unwrap();
        let mut rows = Vec::new();
        while let Some(batch) = stream.next().await {
            let batch = batch.unwrap().batch;
            if rows.is_empty() {
                log.failures.store(3, Ordering::Relaxed);
            }
            let offsets = batch.column_by_name("_offset").unwrap();
            rows.extend(offsets.as_primitive::<Int64Type>().values().iter().map(|offset| (0, *offset)));
        }
        assert_eq!(rows, expected);
        assert_eq!(log.failures.load(Ordering::Relaxed), 0, "reads have failed");
    });
}

#[test]
fn a_damaged_memory_of_the_home_is_not_used() {
    runtime().block_on(async {
        let log = log_of(vec![partition(0, &[(0, Some(9)); 20])]);
        let cache = Arc::new(MemoryCache::default());
        let kept: Arc<dyn DatasetCache> = Arc::clone(&cache) as Arc<dyn DatasetCache>;
        let asked = spec("topic:t");
        let opened = OpenTopic::open_log(&asked, Arc::clone(&log) as Arc<dyn Log>, Some(Arc::clone(&kept)));
        let pinned = opened.await.unwrap().spec().clone();
        for value in cache.0.lock().values_mut() {
            let mut blocks: Vec<Block> = serde_json::from_slice(value).unwrap();
            blocks[0].rows -= 1;
            *value = serde_json::to_vec(&blocks).unwrap();
        }
        assert_eq!(resume(&log, &pinned, Some(kept)).await.unwrap(), 20);
    });
}

#[test]
fn a_record_stays_in_its_part_of_a_split_when_more_arrive() {
    runtime().block_on(async {
        let parts = [("a".to_owned(), "0.5".to_owned()), ("b".to_owned(), "0.5".to_owned())];
        let options = |take: &str| PlanOptions {
            selection: Selection::new(None, &parts, Some(take), &[]).unwrap(),
            batch_rows: 4,
            ..PlanOptions::default()
        };
        let rows = async |records: usize, take: &str| -> BTreeSet<(i64, i64)> {
            let log = log_of(vec![partition(0, &vec![(0, Some(3)); records])]);
            let dataset = OpenDataset::of_topic(open(&log, &spec("topic:t")).await.unwrap());
            let end = dataset.plan(&options(take)).await.unwrap().rows();
            read(&dataset, &options(take), 1, 0..end).await.into_iter().collect()
        };
        let (before, a, b) = (rows(100, "a").await, rows(150, "a").await, rows(150, "b").await);
        assert!(before.is_subset(&a) && a.is_disjoint(&b) && a.len() + b.len() == 150);
    });
}

#[test]
fn a_bad_record_beyond_the_wanted_rows_is_not_read() {
    runtime().block_on(async {
        let good = vec![(0, Some(3)); 40];
        let bad = [&good[..], &[(0, None)]].concat();
        let log = log_of(vec![partition(0, &good), partition(0, &bad)]);
        let opened = open(&log, &spec("topic:t@60")).await.unwrap();
        assert_eq!(opened.blocks().unwrap().iter().map(|block| block.rows).sum::<u32>(), 60);
        let error = open(&log, &spec("topic:t@81")).await.map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("partition 1") && error.contains("40"), "{error}");
    });
}

#[test]
fn paths_of_blocks_are_read_as_they_are_printed() {
    let block = Block { partition: 7, first: 3, next: 9, rows: 5, skipped: 1, bytes: 77, digest: [9; 16] };
    assert_eq!(Block::of_path("t.1", &block.path("t.1")), Some(block.clone()));
    for path in ["", "t.1/7/3-9-5-1-77-00.jsonl", "t.1/00007/x.jsonl", "t/00007/3"] {
        assert_eq!(Block::of_path("t.1", path), None, "{path}");
    }
    assert_eq!(Block::of_path("t", &block.path("t.1")), None);
}

#[test]
fn columns_that_records_type_differently_are_named_with_their_places() {
    runtime().block_on(async {
        let mut other = partition(0, &[(0, Some(1)); 3]);
        other.records[1].2 = Some(b"{\"id\":\"text\"}".to_vec());
        let log = log_of(vec![other]);
        let dataset = OpenDataset::of_topic(open(&log, &spec("topic:t")).await.unwrap());
        let plan = dataset.plan(&PlanOptions::default()).await.unwrap();
        let options = FeedOptions { columns: Some(vec!["id".into()]), ..FeedOptions::default() };
        let error = Feed::open(plan, Arc::clone(dataset.store()), &options).err().unwrap();
        assert!(matches!(&error, FeedError::SchemaConflict { column, .. } if column == "id"), "{error}");
    });
}
