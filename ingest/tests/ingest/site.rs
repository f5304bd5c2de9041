//! Test site: one home with a broker and a volume, and the proof that a topic landed exactly once.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::{Int32Type, Int64Type};
use bytes::Bytes;
use futures::TryStreamExt;
use millrace_datafs::{Config as DatafsConfig, Datafs, View};
use millrace_ingest::{IngestReport, JobConfig, Progress, Result, Until, offsets, run};
use millrace_streams::KafkaConfig;
use millrace_streams::broker::{self, Broker};
use millrace_streams::topic::{self, OutRecord, Producer};
use object_store::path::Path as StorePath;
use object_store::{ObjectStore, ObjectStoreExt};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub(crate) const VOLUME: &str = "records";
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// A separate home with a running broker and an empty volume.
pub(crate) struct Site {
    pub(crate) home: tempfile::TempDir,
    pub(crate) datafs: Datafs,
    pub(crate) kafka: KafkaConfig,
    broker: Option<Broker>,
    config: broker::Config,
}

/// Source of a record: `(partition, offset)`.
pub(crate) type SourceOffset = (i32, i64);

impl Site {
    pub(crate) async fn start() -> Self {
        Self::with(broker::Config::default()).await
    }

    pub(crate) async fn with(config: broker::Config) -> Self {
        let home = tempfile::tempdir().unwrap();
        let datafs = open(home.path());
        datafs.volume_create(&VOLUME.parse().unwrap()).unwrap();
        let config =
            broker::Config { listen: "127.0.0.1:0".parse().unwrap(), auto_create_topics: false, ..config };
        let dir = broker::dir(home.path());
        let broker = Broker::start(config.clone(), &dir, CancellationToken::new()).await.unwrap();
        let kafka = KafkaConfig::new(broker.addr().to_string());
        Self { home, datafs, kafka, broker: Some(broker), config }
    }

    /// Appends a batch to the log of partition 0 of a topic as an earlier release or another broker wrote
    /// it, unchecked: `payload` under a header that promises `count` records.
    pub(crate) async fn append(
        &mut self,
        topic: &str,
        base: i64,
        attributes: i16,
        count: i32,
        payload: &[u8],
    ) {
        let dir = broker::dir(self.home.path());
        self.broker.take().unwrap().stop().await.unwrap();
        let mut checked = Vec::new();
        checked.extend(attributes.to_be_bytes());
        checked.extend((count - 1).to_be_bytes());
        checked.extend([1_000i64, 1_000, 7].map(i64::to_be_bytes).concat());
        checked.extend(0i16.to_be_bytes());
        checked.extend((-1i32).to_be_bytes());
        checked.extend(count.to_be_bytes());
        checked.extend(payload);
        let mut batch = base.to_be_bytes().to_vec();
        batch.extend((checked.len() as i32 + 9).to_be_bytes());
        batch.extend([0, 0, 0, 0, 2]);
        batch.extend(crc32c::crc32c(&checked).to_be_bytes());
        batch.extend(checked);
        let partition = dir.join("topics").join(topic).join("0");
        std::fs::remove_file(partition.join("checkpoint.json")).unwrap();
        let log = partition.join("00000000000000000000.log");
        std::fs::OpenOptions::new().append(true).open(log).unwrap().write_all(&batch).unwrap();
        let started = Broker::start(self.config.clone(), &dir, CancellationToken::new()).await.unwrap();
        self.kafka = KafkaConfig::new(started.addr().to_string());
        self.broker = Some(started);
    }

    pub(crate) async fn stop(mut self) {
        self.broker.take().unwrap().stop().await.unwrap();
    }

    pub(crate) fn view(&self) -> View {
        self.datafs.view(&VOLUME.parse().unwrap()).unwrap()
    }

    pub(crate) async fn topic(&self, name: &str, partitions: i32) {
        topic::create_topic(&self.kafka, name, partitions).await.unwrap();
    }

    pub(crate) async fn produce(&self, records: impl IntoIterator<Item = OutRecord>) {
        let producer = Producer::connect(&self.kafka).await.unwrap();
        producer.send_all(records).await.unwrap();
    }

    pub(crate) async fn land(&self, job: &JobConfig) -> Result<IngestReport> {
        let cancel = CancellationToken::new();
        run(job, &self.datafs, &self.kafka, cancel, Until::CaughtUp).await
    }

    /// Rows of the Parquet files below a folder, by the record that they came from. A record that occurs
    /// twice fails the test.
    pub(crate) async fn rows(&self, folder: &str) -> BTreeMap<SourceOffset, RecordBatch> {
        let mut rows = BTreeMap::new();
        for (path, batches) in files(&self.view(), folder).await {
            for batch in batches {
                let partitions = column(&batch, "_partition").as_primitive::<Int32Type>();
                let offsets = column(&batch, "_offset").as_primitive::<Int64Type>();
                for row in 0..batch.num_rows() {
                    let place = (partitions.value(row), offsets.value(row));
                    let twice = rows.insert(place, batch.slice(row, 1));
                    assert!(twice.is_none(), "{place:?} is doubled, again in {path}");
                }
            }
        }
        rows
    }

    /// Proves that exactly the records below the committed offsets exist, each once, either as a row or as a
    /// dead letter. Returns the number of both.
    pub(crate) async fn prove(&self, job: &JobConfig) -> (usize, usize) {
        let landed = self.rows(&job.path).await;
        let dead = self.rows(&format!("dead_letters/{}", job.name)).await;
        let committed = offsets(&self.view()).unwrap();
        let none = BTreeMap::new();
        let committed = committed.get(&job.topic).unwrap_or(&none);
        let mut found: Vec<SourceOffset> = landed.keys().chain(dead.keys()).copied().collect();
        found.sort_unstable();
        let expected: Vec<SourceOffset> = committed
            .iter()
            .flat_map(|(partition, next)| (0..*next).map(|offset| (*partition, offset)))
            .collect();
        assert!(found == expected, "{} records are visible, {} are committed", found.len(), expected.len());
        (landed.len(), dead.len())
    }
}

pub(crate) fn open(home: &Path) -> Datafs {
    Datafs::open(home, &DatafsConfig::default()).unwrap()
}

/// A job that lands `topic` in the folder `data`.
pub(crate) fn job(topic: &str) -> JobConfig {
    JobConfig::new("job", topic, VOLUME, "data")
}

pub(crate) fn column<'a>(batch: &'a RecordBatch, name: &str) -> &'a dyn Array {
    batch.column_by_name(name).unwrap().as_ref()
}

/// All Parquet files below a folder with their rows.
pub(crate) async fn files(view: &View, folder: &str) -> Vec<(String, Vec<RecordBatch>)> {
    let store: Arc<dyn ObjectStore> = view.object_store();
    let mut files = Vec::new();
    for (path, bytes) in contents(&store, folder).await {
        let reader = ParquetRecordBatchReaderBuilder::try_new(bytes).unwrap().build().unwrap();
        files.push((path, reader.map(|batch| batch.unwrap()).collect()));
    }
    files
}

/// Path and bytes of all files below a folder, in the order of their paths.
pub(crate) async fn contents(store: &Arc<dyn ObjectStore>, folder: &str) -> Vec<(String, Bytes)> {
    let prefix = StorePath::from(folder);
    let listed: Vec<_> = store.list(Some(&prefix)).try_collect().await.unwrap();
    let mut paths: Vec<_> = listed.into_iter().map(|meta| meta.location).collect();
    paths.sort();
    let mut files = Vec::new();
    for path in paths {
        let bytes = store.get(&path).await.unwrap().bytes().await.unwrap();
        files.push((path.to_string(), bytes));
    }
    files
}

/// Waits until the progress of a running ingest fulfills a condition.
pub(crate) async fn wait_for(progress: &mut watch::Receiver<Progress>, what: impl FnMut(&Progress) -> bool) {
    tokio::time::timeout(DEADLINE, progress.wait_for(what)).await.expect("in time").expect("still running");
}

/// Polls until a condition holds.
pub(crate) async fn poll(mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < DEADLINE, "not in time");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// A small record; one in `bad_every` is broken.
pub(crate) fn record(topic: &str, id: usize, bad_every: usize) -> OutRecord {
    let value = if bad_every > 0 && id % bad_every == bad_every - 1 {
        format!("{{\"id\": {id}, \"text\": ")
    } else {
        format!("{{\"id\": {id}, \"text\": \"record {id}\"}}")
    };
    OutRecord::new(topic, value).key(format!("key-{id}"))
}

/// A sequence of numbers derived from a seed (SplitMix64).
pub(crate) struct Seeded(pub(crate) u64);

impl Seeded {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}
