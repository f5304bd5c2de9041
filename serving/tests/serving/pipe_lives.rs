//! Tests of pipes whose topics or volumes are deleted and created again under the same names.

use std::time::Duration;

use millrace_datafs::{Datafs, Name, Publish, VolumeSpec};
use millrace_serving::PipeConfig;
use millrace_serving::pipe::{Deps, Error, Until, run};
use millrace_streams::topic::{self, OutRecord, Producer};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::pipe::{World, catch_up, catch_up_as, pipe, read, row_of, world};

/// Longest duration of a run.
const HANGING: Duration = Duration::from_secs(60);

/// Produces records of one incarnation of the input, with timestamps from `began_ms` on.
async fn produce(world: &World, records: std::ops::Range<usize>, began_ms: i64) {
    topic::create_topic(&world.kafka, "in", 1).await.unwrap();
    let producer = Producer::connect(&world.kafka).await.unwrap();
    let record = |id: usize| OutRecord {
        timestamp_ms: Some(began_ms + id as i64),
        ..OutRecord::new("in", json!({ "id": id, "x": row_of(id) }).to_string())
    };
    producer.send_all(records.map(record)).await.unwrap();
}

async fn refused(world: &World) -> String {
    let config = pipe();
    let running = run(&config, world.deps.clone(), Until::CaughtUp, CancellationToken::new());
    match tokio::time::timeout(HANGING, running).await.unwrap() {
        Err(error @ Error::InputChanged { partition: 0, .. }) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

/// Sets or removes the position of the pipe.
async fn set_position(world: &World, next: Option<i64>) {
    let view = world.deps.progress.clone();
    let key = "pipe/p/in/out/mlp/0";
    let publish = match next {
        Some(next) => Publish::new().put_key(key, next.to_string().into_bytes()),
        None => Publish::new().delete_key(key),
    };
    tokio::task::spawn_blocking(move || view.publish(publish)).await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recreated_input_topic_is_refused_and_a_new_pipe_name_starts_from_the_beginning() {
    let world = world().await;
    produce(&world, 0..20, 1_000_000).await;
    assert_eq!(catch_up(&world).await.predicted, 20);
    for (records, words) in
        [(5, "the partition ends at 5"), (30, "1000019, the one that is there has 2000019")]
    {
        assert!(topic::delete_topic(&world.kafka, "in").await.unwrap());
        produce(&world, 0..records, 2_000_000).await;
        let line = refused(&world).await;
        assert!(line.contains(words) && line.contains("pipe p: topic in partition 0"), "{line}");
        assert!(line.contains("--name"), "{line}");
        assert_eq!(read(&world.kafka, "out").await.len(), 20);
    }
    let renamed = PipeConfig { name: "q".into(), ..pipe() };
    assert_eq!(catch_up_as(&world, &renamed).await.predicted, 30);
    assert_eq!(read(&world.kafka, "out").await.len(), 50);
    world.broker.stop().await.unwrap();
}

/// The state after a kill before the first commit: answers, and no position to compare.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uncommitted_answers_of_an_earlier_input_are_detected() {
    let world = world().await;
    produce(&world, 0..20, 1_000_000).await;
    assert_eq!(catch_up(&world).await.predicted, 20);
    set_position(&world, None).await;
    assert!(topic::delete_topic(&world.kafka, "in").await.unwrap());
    produce(&world, 0..5, 2_000_000).await;
    assert!(refused(&world).await.contains("answered offset 19, and the partition ends at 5"));
    produce(&world, 5..40, 2_000_000).await;
    assert!(refused(&world).await.contains("offset 19"));
    assert_eq!(read(&world.kafka, "out").await.len(), 20);
    world.broker.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_position_beyond_the_end_is_refused_and_one_before_answers_is_not() {
    let world = world().await;
    produce(&world, 0..20, 1_000_000).await;
    assert_eq!(catch_up(&world).await.predicted, 20);
    set_position(&world, Some(7)).await;
    // The same input again: answered records are skipped.
    assert_eq!(catch_up(&world).await.predicted, 0);
    set_position(&world, Some(21)).await;
    assert!(refused(&world).await.contains("has read up to offset 21, and the partition ends at 20"));
    world.broker.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_of_a_recreated_volume_do_not_count_for_this_pipe() {
    let world = world().await;
    produce(&world, 0..60, 1_000_000).await;
    assert_eq!(catch_up(&world).await.predicted, 60);
    let home = world.home.path().to_path_buf();
    let progress = tokio::task::spawn_blocking(move || {
        let datafs = Datafs::open(&home, &millrace_datafs::Config::default()).unwrap();
        let name: Name = "again".parse().unwrap();
        datafs.volume_create(&name).unwrap();
        datafs.view(&VolumeSpec { volume: name, snapshot: None }).unwrap()
    })
    .await
    .unwrap();
    let deps = Deps { progress, ..world.deps.clone() };
    let config = pipe();
    let running = run(&config, deps, Until::CaughtUp, CancellationToken::new());
    let report = tokio::time::timeout(HANGING, running).await.unwrap().unwrap();
    assert_eq!(report.predicted, 60);
    assert_eq!(catch_up(&world).await.records, 0);
    world.broker.stop().await.unwrap();
}

/// Answers with the pipe's identity but without its id and the record's timestamp.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_of_a_release_without_ids_count_where_its_positions_are() {
    for positions in [true, false] {
        let world = world().await;
        produce(&world, 0..60, 1_000_000).await;
        topic::create_topic(&world.kafka, "out", 1).await.unwrap();
        let producer = Producer::connect(&world.kafka).await.unwrap();
        let answer = |offset: usize| {
            OutRecord::new("out", json!({ "id": offset }).to_string())
                .header("millrace-source", format!("in/0/{offset}"))
                .header("millrace-pipe", "p/mlp/out")
                .header("millrace-model", "mlp/4")
        };
        producer.send_all((10..12).map(answer)).await.unwrap();
        set_position(&world, positions.then_some(10)).await;
        let predicted = if positions { 60 - 12 } else { 60 };
        assert_eq!(catch_up(&world).await.predicted, predicted, "positions: {positions}");
        assert_eq!(catch_up(&world).await.records, 0);
        world.broker.stop().await.unwrap();
    }
}
