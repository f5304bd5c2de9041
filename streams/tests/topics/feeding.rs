//! Tests of bounded topics as datasets of the feed, against the embedded broker.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use arrow::array::AsArray;
use arrow::datatypes::Int64Type;
use futures::StreamExt;
use millrace_leaf::error_chain;
use millrace_streams::KafkaConfig;
use millrace_streams::broker::Config;
use millrace_streams::dataset::{OpenDataset, SourceSpec, TopicSpec};
use millrace_streams::feed::{Feed, FeedError, FeedOptions, PlanOptions, Shard};
use millrace_streams::topic::{self, OutRecord, Producer};
use tempfile::TempDir;
use tokio::time::timeout;

use super::{broker_in, broker_with, kafka_of};

async fn produce(kafka: &KafkaConfig, ids: std::ops::Range<i64>) {
    let producer = Producer::connect(kafka).await.unwrap();
    let record = |id: i64| {
        let value = format!("{{\"id\": {id}, \"pad\": \"{}\"}}", "p".repeat(700));
        OutRecord { timestamp_ms: Some(1_700_000_000_000 + id), ..OutRecord::new("t", value) }
            .partition(id as i32 % 3)
    };
    producer.send_all(ids.map(record)).await.unwrap();
}

/// The ids of an epoch that the readers of a world get, and an error of the feed as one line.
async fn ids(dataset: &OpenDataset, world: u32) -> Result<Vec<i64>, String> {
    let text = |error: FeedError| error_chain::one_line(&error);
    let options = PlanOptions { seed: 5, batch_rows: 64, ..PlanOptions::default() };
    let plan = Arc::new(dataset.plan(&options).await.map_err(text)?);
    let mut readers = Vec::new();
    for rank in 0..world {
        let options = FeedOptions { columns: Some(vec!["id".into()]), ..FeedOptions::default() };
        let feed = Feed::open(Arc::clone(&plan), Arc::clone(dataset.store()), &options).unwrap();
        readers.push(feed.stream_places(Shard::new(rank, world).unwrap(), 0..plan.rows(), 1).unwrap());
    }
    let mut ids = Vec::new();
    for _ in 0..plan.steps_for_epochs(1) {
        for reader in &mut readers {
            let batch = reader.next().await.unwrap().map_err(text)?.batch;
            ids.extend(batch.column(0).as_primitive::<Int64Type>().values());
        }
    }
    Ok(ids)
}

fn offsets(dataset: &OpenDataset) -> Vec<(i64, i64)> {
    let range = dataset.spec().topic().unwrap().range.as_ref().unwrap();
    range.partitions().iter().map(|of| (of.first, of.next)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_goes_on_after_its_broker_was_stopped_and_started_again() {
    let (dir, home) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let broker = broker_in(dir.path()).await;
    let (kafka, listen) = (kafka_of(&broker), broker.addr());
    topic::create_topic(&kafka, "t", 3).await.unwrap();
    produce(&kafka, 0..9_000).await;
    let options = PlanOptions { batch_rows: 64, lanes: 1, window_rows: 64, ..PlanOptions::default() };
    let spec: TopicSpec = "topic:t@latest".parse().unwrap();
    let first = spec.open(&kafka, home.path()).await.unwrap();
    first.plan(&options).await.unwrap();
    // Opened again, with the plan of the home and without any record.
    let pinned = first.spec().topic().unwrap().clone();
    let opened = pinned.open(&kafka, home.path()).await.unwrap();
    let plan = Arc::new(opened.plan(&options).await.unwrap());
    let feed = Feed::open(Arc::clone(&plan), Arc::clone(opened.store()), &FeedOptions::default()).unwrap();
    let mut stream = feed.stream_places(Shard::new(0, 1).unwrap(), 0..plan.rows(), 1).unwrap();
    let mut rows = stream.next().await.unwrap().unwrap().rows;

    broker.stop().await.unwrap();
    // Reads what it has, until it waits for the broker.
    while let Ok(batch) = timeout(Duration::from_secs(1), stream.next()).await {
        rows.extend(batch.expect("records are missing").unwrap().rows);
    }
    assert!(rows.len() < 9_000, "{} rows without a broker", rows.len());
    let broker = broker_with(dir.path(), Config { listen, ..Config::default() }).await;
    while let Some(batch) = stream.next().await {
        rows.extend(batch.unwrap().rows);
    }
    // The order of a reader that saw no outage.
    let undisturbed = Feed::open(Arc::clone(&plan), Arc::clone(first.store()), &FeedOptions::default());
    let whole = undisturbed.unwrap().stream_places(Shard::new(0, 1).unwrap(), 0..plan.rows(), 1).unwrap();
    let expected: Vec<u64> =
        whole.map(|batch| batch.unwrap().rows).collect::<Vec<_>>().await.into_iter().flatten().collect();
    assert_eq!(rows, expected);
    broker.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bounded_topic_is_the_same_dataset_while_records_arrive() {
    let (dir, home) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let broker = broker_in(dir.path()).await;
    let kafka = kafka_of(&broker);
    topic::create_topic(&kafka, "t", 3).await.unwrap();
    produce(&kafka, 0..9_000).await;
    let spec: TopicSpec = "topic:t@latest".parse().unwrap();
    let opened = spec.open(&kafka, home.path()).await.unwrap();
    assert_eq!(offsets(&opened), [(0, 3_000); 3]);
    let first = ids(&opened, 3).await.unwrap();
    assert_eq!(first.iter().copied().collect::<BTreeSet<_>>(), (0..9_000).collect());
    assert_eq!(first.len(), 9_000);

    produce(&kafka, 9_000..9_900).await;
    // Another process of another world, with and without what the home knows.
    let pinned: SourceSpec = opened.spec().to_string().parse().unwrap();
    let pinned = pinned.topic().unwrap().clone();
    for home in [home.path(), TempDir::new().unwrap().path()] {
        let again = pinned.open(&kafka, home).await.unwrap();
        assert_eq!(ids(&again, 2).await.unwrap(), first);
    }
    let bounded = async |text: &str| {
        let spec: TopicSpec = text.parse().unwrap();
        spec.open(&kafka, home.path()).await.unwrap()
    };
    assert_eq!(offsets(&bounded("topic:t").await), [(0, 3_300); 3]);
    assert_eq!(offsets(&bounded("topic:t@100").await), [(0, 34), (0, 33), (0, 33)]);
    let timed = bounded("topic:t@2023-11-14T22:13:20.100Z..2023-11-14T22:13:20.200Z").await;
    assert_eq!(ids(&timed, 1).await.unwrap().into_iter().collect::<BTreeSet<_>>(), (100..200).collect());

    // The topic is deleted and created again, with as many other records.
    assert!(topic::delete_topic(&kafka, "t").await.unwrap());
    let gone = ids(&pinned.open(&kafka, TempDir::new().unwrap().path()).await.unwrap(), 1).await.unwrap_err();
    assert!(gone.contains("topic t does not exist at"), "{gone}");
    topic::create_topic(&kafka, "t", 3).await.unwrap();
    let gone = ids(&pinned.open(&kafka, TempDir::new().unwrap().path()).await.unwrap(), 1).await.unwrap_err();
    assert!(gone.contains("partition 0: the records from offset 0 up to before 3000 are needed"), "{gone}");
    produce(&kafka, 1..9_901).await;
    for home in [home.path(), TempDir::new().unwrap().path()] {
        let changed = ids(&pinned.open(&kafka, home).await.unwrap(), 1).await.unwrap_err();
        assert!(changed.contains("deleted and created again") && changed.contains("partition"), "{changed}");
    }

    // No broker: an error within bounds that names partition, offset and broker.
    broker.stop().await.unwrap();
    let away = pinned.open(&kafka, home.path()).await.unwrap();
    let error = ids(&away, 1).await.unwrap_err();
    assert!(error.contains(&kafka.bootstrap_servers) && error.contains("topic t partition "), "{error}");
}
