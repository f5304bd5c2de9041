//! Bytes that several ranks fetch for an epoch, each with its shard and its caches, counted at the store.
//!
//! Where the number of ranks divides the lanes, each rank reads the row groups of its lanes: 1.10 times the dataset.
//! Otherwise two ranks share a lane here and there, and both read its row groups: 1.30 times. The rest is footers, which
//! each rank reads, row groups across the border of two lanes, and what was prefetched of the next epoch.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use arrow::array::{ArrayRef, FixedSizeBinaryArray, RecordBatch};
use futures::StreamExt;
use millrace_datafs::{Config, Datafs, Secret};
use millrace_streams::dataset::DatasetSpec;
use millrace_streams::feed::{Feed, FeedOptions, Plan, PlanOptions, Shard};
use millrace_testing::s3_server::S3Server;
use object_store::ObjectStore;
use object_store::memory::InMemory;
use parquet::arrow::ArrowWriter;
use parquet::basic::Compression;
use parquet::file::properties::{EnabledStatistics, WriterProperties};

use super::data::put;
use super::sources::Metered;

const WORLDS: [u32; 5] = [1, 2, 3, 4, 8];
const LANES: u32 = 16;
const ROW_BYTES: usize = 128;

/// A Parquet file of row groups with `columns` columns, which together have [`ROW_BYTES`] a row.
fn file(groups: usize, rows_of_group: usize, columns: usize, seed: u64) -> Vec<u8> {
    let properties = WriterProperties::builder()
        .set_compression(Compression::UNCOMPRESSED)
        .set_dictionary_enabled(false)
        .set_statistics_enabled(EnabledStatistics::None)
        .build();
    let mut state = seed;
    let mut noise = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state.to_le_bytes()
    };
    let cell = ROW_BYTES / columns;
    let mut column = |number: usize| {
        let bytes: Vec<u8> = (0..rows_of_group * cell / 8).flat_map(|_| noise()).collect();
        let cells = FixedSizeBinaryArray::try_from_iter(bytes.chunks(cell)).unwrap();
        (format!("x{number}"), Arc::new(cells) as ArrayRef)
    };
    let mut group = || RecordBatch::try_from_iter((0..columns).map(&mut column)).unwrap();
    let first = group();
    let mut writer = ArrowWriter::try_new(Vec::new(), first.schema(), Some(properties)).unwrap();
    writer.write(&first).unwrap();
    writer.flush().unwrap();
    for _ in 1..groups {
        writer.write(&group()).unwrap();
        writer.flush().unwrap();
    }
    writer.into_inner().unwrap()
}

/// Reads an epoch as one rank; adds the rows to `seen`, each of which is new.
async fn read(
    plan: &Arc<Plan>,
    store: &Arc<dyn ObjectStore>,
    shard: Shard,
    cache_bytes_max: u64,
    seen: &mut BTreeSet<u64>,
) {
    let options = FeedOptions { cache_bytes_max, decode_concurrency: 2, ..FeedOptions::default() };
    let feed = Feed::open(Arc::clone(plan), Arc::clone(store), &options).unwrap();
    let mut stream = feed.stream_places(shard, 0..plan.rows(), 1).unwrap();
    while let Some(batch) = stream.next().await {
        for row in batch.unwrap().rows {
            assert!(seen.insert(row), "row {row} came twice");
        }
    }
}

/// The most bytes that all ranks together may fetch.
fn bound(size: u64, world: u32) -> u64 {
    if LANES.is_multiple_of(world) { size * 110 / 100 } else { size * 130 / 100 }
}

fn options(batch_rows: usize, window_rows: u64) -> PlanOptions {
    PlanOptions { seed: 9, batch_rows, lanes: LANES, window_rows, ..PlanOptions::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_together_fetch_each_byte_about_once() {
    // 1000 row groups of 64 KiB.
    let store = InMemory::new();
    let mut size = 0;
    for number in 0..4u64 {
        let bytes = file(250, 512, 1, number);
        size += bytes.len() as u64;
        put(&store, &format!("t/{number}.parquet"), bytes).await;
    }
    let store: Arc<dyn ObjectStore> = Arc::new(store);
    let plan = Arc::new(Plan::build(&store, "t", &options(256, 512)).await.unwrap());
    assert_eq!((plan.lanes(), plan.rows()), (u64::from(LANES), 512_000));
    // An eighth of the dataset, so that a rank that reads all of it would have to read row groups again.
    let cache_bytes_max = 8 << 20;
    assert!(plan.working_set_bytes() < cache_bytes_max && cache_bytes_max < size / 4);
    for world in WORLDS {
        let (mut seen, mut fetched) = (BTreeSet::new(), 0);
        for rank in 0..world {
            // Each rank has a feed, a cache and a store of its own, as processes have.
            let metered = Metered::new(Arc::clone(&store));
            let own: Arc<dyn ObjectStore> = metered.clone();
            read(&plan, &own, Shard::new(rank, world).unwrap(), cache_bytes_max, &mut seen).await;
            fetched += metered.bytes.load(Ordering::SeqCst);
        }
        assert_eq!(seen.len() as u64, plan.rows());
        let factor = fetched as f64 / size as f64;
        eprintln!("{world} ranks fetch {factor:.3} times the dataset");
        assert!(fetched <= bound(size, world), "{world} ranks fetch {factor:.3} times the dataset");
    }
}

fn on_bucket(server: &S3Server, home: &Path, cache: &str) -> Datafs {
    let options = server.options().into_iter().map(|(key, value)| (key.to_owned(), Secret::Text(value)));
    let config = Config {
        store_url: Some(server.url("p")),
        store_options: options.collect(),
        cache_dir: cache.into(),
        cache_free_bytes_min: 0,
        gc_interval_ms: 0,
        ..Config::default()
    };
    Datafs::open(home, &config).unwrap()
}

/// The bytes that ranks of a world fetch from a bucket, each with the local cache that `cache` names.
fn from_bucket(server: &S3Server, home: &Path, world: u32, cache: impl Fn(u32) -> String) -> u64 {
    let before = server.faults.fetched_bytes();
    let mut seen = BTreeSet::new();
    let mut rows = 0;
    for rank in 0..world {
        let datafs = on_bucket(server, home, &cache(rank));
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(async {
            let spec: DatasetSpec = "v@s:/t".parse().unwrap();
            let opened = spec.open(&datafs).await.unwrap();
            let plan = Arc::new(opened.plan(&options(256, 4096)).await.unwrap());
            assert_eq!(plan.lanes(), u64::from(LANES));
            read(&plan, opened.store(), Shard::new(rank, world).unwrap(), 0, &mut seen).await;
            rows = plan.rows();
        });
    }
    assert_eq!(seen.len() as u64, rows);
    server.faults.fetched_bytes() - before
}

/// The local cache lies before the bucket. What it rounds to frames of 64 KiB is part of the count, and large beside row
/// groups of 512 KiB.
#[test]
fn ranks_on_machines_of_their_own_fetch_their_lanes_from_the_bucket() {
    let (server, home) = (S3Server::start(), tempfile::tempdir().unwrap());
    let size = {
        let datafs = on_bucket(&server, home.path(), "none");
        datafs.volume_create(&"v".parse().unwrap()).unwrap();
        let live = datafs.view(&"v".parse().unwrap()).unwrap();
        let mut size = 0;
        for number in 0..2u64 {
            let bytes = file(64, 4096, 8, number);
            size += bytes.len() as u64;
            // Columns are read one after the other, as a sequential reader of the file would.
            live.write_file(&format!("t/{number}.parquet"), &bytes).unwrap();
        }
        datafs.snapshot_create(&"v".parse().unwrap(), &"s".parse().unwrap()).unwrap();
        size
    };
    for world in [2, 3, 4, 8] {
        let shared = from_bucket(&server, home.path(), world, |_| format!("shared-{world}"));
        let own = from_bucket(&server, home.path(), world, |rank| format!("own-{world}-{rank}"));
        let [shared, own] = [shared, own].map(|bytes| bytes as f64 / size as f64);
        eprintln!(
            "{world} ranks fetch {shared:.3} times the dataset with one cache, {own:.3} with their own"
        );
        // A cache that is behind, as on a busy machine, may skip frames; they are fetched again. Else it is about 1.0.
        assert!(shared <= 1.5, "{world} ranks with one cache fetch {shared:.3} times the dataset");
        // Reads ahead of lanes and row groups would make it as many times as there are ranks.
        assert!(own <= 1.7, "{world} ranks with caches of their own fetch {own:.3} times the dataset");
    }
}
