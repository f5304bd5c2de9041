//! Tests of topic-to-topic inference over the embedded broker: every record is predicted or dead-lettered,
//! and progress is kept.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_bundle::{Bundle, Lineage};
use millrace_datafs::{Datafs, Publish, View, VolumeSpec};
use millrace_serving::pipe::{self, Deps, Faults, PipeReport, Until, Waiting, run};
use millrace_serving::{Error, InferError, Inference, PipeConfig, Repository, Source};
use millrace_streams::KafkaConfig;
use millrace_streams::broker::{self, Broker};
use millrace_streams::topic::{self, Consumer, EARLIEST, OutRecord, Producer, Records};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

use crate::support::*;

pub(crate) struct World {
    pub(crate) home: TempDir,
    pub(crate) kafka: KafkaConfig,
    pub(crate) deps: Deps,
    pub(crate) broker: Broker,
}

pub(crate) async fn world() -> World {
    world_of("mlp", mlp()).await
}

/// A broker, and a volume with version 4 of a model.
async fn world_of(model: &str, onnx: Vec<u8>) -> World {
    let home = tempfile::tempdir().unwrap();
    let settings = broker::Config { listen: "127.0.0.1:0".parse().unwrap(), ..broker::Config::default() };
    let dir = broker::dir(home.path());
    let broker = Broker::start(settings, &dir, CancellationToken::new()).await.unwrap();
    let kafka = KafkaConfig::new(broker.addr().to_string());
    let path = home.path().to_path_buf();
    let view = tokio::task::spawn_blocking(move || {
        let datafs = Datafs::open(&path, &millrace_datafs::Config::default()).unwrap();
        let name: millrace_datafs::Name = "digits".parse().unwrap();
        datafs.volume_create(&name).unwrap();
        datafs.view(&VolumeSpec { volume: name, snapshot: None }).unwrap()
    })
    .await
    .unwrap();
    for (name, version, onnx) in [(model, 4, onnx), ("other", 1, mlp())] {
        let bundle = Bundle::new(name, version, onnx, Lineage::default(), Default::default()).unwrap();
        bundle.write(view.object_store().as_ref(), "models").await.unwrap();
    }
    let repository = Repository::open(Source::volume(&view), &config()).await.unwrap();
    let inference = Inference::new(repository);
    let deps = Deps {
        kafka: kafka.clone(),
        inference,
        progress: view,
        waiting: Waiting::default(),
        faults: Faults::default(),
        allow_unfit: false,
    };
    World { home, kafka, deps, broker }
}

pub(crate) fn pipe() -> PipeConfig {
    PipeConfig {
        name: "p".into(),
        input: "in".into(),
        output: "out".into(),
        model: "mlp".into(),
        columns: [("input".to_string(), "x".to_string())].into(),
        carry: vec!["id".into()],
        batch_rows_max: 16,
        ..PipeConfig::default()
    }
}

pub(crate) fn row_of(id: usize) -> [f32; FEATURES] {
    std::array::from_fn(|index| ((id * 3 + index) % 13) as f32 / 13.0 - 0.5)
}

fn record(id: usize) -> OutRecord {
    let value = json!({ "id": id, "x": row_of(id) }).to_string();
    OutRecord::new("in", value).key(format!("k{id}")).partition((id % 2) as i32)
}

#[derive(Debug)]
pub(crate) struct Seen {
    key: Option<Vec<u8>>,
    value: Option<Vec<u8>>,
    headers: BTreeMap<String, String>,
}

pub(crate) async fn read(kafka: &KafkaConfig, topic: &str) -> Vec<Seen> {
    let marks = topic::watermarks(kafka, topic).await.unwrap();
    let start: Vec<_> = marks.keys().map(|p| (topic.to_string(), *p, EARLIEST)).collect();
    let wanted: i64 = marks.values().map(|(low, high)| high - low).sum();
    let mut consumer = Consumer::assign(kafka, &start).await.unwrap();
    let mut seen = Vec::new();
    while (seen.len() as i64) < wanted {
        let batch = consumer.next(1000, 1 << 20, Duration::from_secs(10)).await.unwrap().unwrap();
        let records = Records::new(&batch).unwrap();
        for index in 0..records.len() {
            let text = |bytes: Option<&[u8]>| String::from_utf8(bytes.unwrap_or_default().to_vec()).unwrap();
            seen.push(Seen {
                key: records.key(index).map(<[u8]>::to_vec),
                value: records.value(index).map(<[u8]>::to_vec),
                headers: records
                    .headers(index)
                    .into_iter()
                    .map(|(key, value)| (key.to_string(), text(value)))
                    .collect(),
            });
        }
    }
    seen
}

pub(crate) async fn catch_up(world: &World) -> PipeReport {
    catch_up_as(world, &pipe()).await
}

pub(crate) async fn catch_up_as(world: &World, config: &PipeConfig) -> PipeReport {
    let cancel = CancellationToken::new();
    let running = run(config, world.deps.clone(), Until::CaughtUp, cancel);
    tokio::time::timeout(Duration::from_secs(30), running).await.unwrap().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_record_is_predicted_or_dead_lettered_once() {
    let world = world().await;
    topic::create_topic(&world.kafka, "in", 2).await.unwrap();
    let producer = Producer::connect(&world.kafka).await.unwrap();
    let bad = [
        OutRecord::new("in", "not json").key("bad0").header("trace", "t1"),
        OutRecord::new("in", r#"{"id":1}"#).key("bad1"),
        OutRecord::new("in", r#"{"id":2,"x":[1,2,3]}"#).key("bad2"),
        OutRecord::new("in", r#"{"id":3,"x":["a","b","c","d"]}"#).key("bad3"),
        OutRecord { payload: None, ..OutRecord::new("in", "") }.key("bad4"),
    ]
    .map(|record| record.partition(0));
    producer.send_all((0..60).map(record).chain(bad)).await.unwrap();
    producer.send_all((60..100).map(record)).await.unwrap();

    let report = catch_up(&world).await;
    assert_eq!((report.records, report.predicted, report.dead_letters), (105, 100, 5));
    assert_eq!(report.offsets, [(0, 55), (1, 50)].into());

    let mut ids = BTreeMap::new();
    let mut sources = std::collections::BTreeSet::new();
    for seen in read(&world.kafka, "out").await {
        let value: Value = serde_json::from_slice(seen.value.as_deref().unwrap()).unwrap();
        let id = value["id"].as_u64().unwrap() as usize;
        assert_eq!(seen.key.unwrap(), format!("k{id}").into_bytes());
        assert_eq!((&value["model"], &value["version"]), (&json!("mlp"), &json!(4)));
        let logits: Vec<f32> = serde_json::from_value(value["outputs"]["logits"].clone()).unwrap();
        let expected = mlp_logits(&row_of(id));
        assert!(logits.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5));
        let best = value["argmax"]["logits"].as_u64().unwrap() as usize;
        assert!(logits.iter().all(|logit| *logit <= logits[best]));
        let source = &value["source"];
        assert_eq!(source["topic"], "in");
        let header = format!("in/{}/{}", source["partition"], source["offset"]);
        assert_eq!(seen.headers["millrace-source"], header);
        assert_eq!(seen.headers["millrace-model"], "mlp/4");
        assert!(sources.insert(header));
        ids.insert(id, ());
    }
    assert_eq!(ids.len(), 100);

    let dead = read(&world.kafka, "out-dead").await;
    let reason = |key: &str| {
        let found = dead.iter().find(|seen| seen.key.as_deref() == Some(key.as_bytes())).unwrap();
        found.headers["millrace-reason"].clone()
    };
    assert_eq!(dead.len(), 5);
    assert!(reason("bad0").contains("not a JSON object"));
    assert!(reason("bad1").contains("no field \"x\""));
    assert!(reason("bad2").contains("3 elements"));
    assert!(reason("bad3").contains("strings for FP32"));
    assert!(reason("bad4").contains("no value"));
    let kept = dead.iter().find(|seen| seen.key.as_deref() == Some(b"bad0")).unwrap();
    assert_eq!(kept.value.as_deref(), Some(&b"not json"[..]));
    assert_eq!(kept.headers["trace"], "t1");

    // A second run resumes where the first one stopped.
    assert_eq!(catch_up(&world).await.records, 0);
    producer.send_all((100..110).map(record)).await.unwrap();
    assert_eq!(catch_up(&world).await.predicted, 10);
    assert_eq!(read(&world.kafka, "out").await.len(), 110);
    world.broker.stop().await.unwrap();
}

/// A wrong field name, in one run and then in a later one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bounded_run_of_which_no_first_record_fits_writes_nothing_and_keeps_its_position() {
    let world = world().await;
    topic::create_topic(&world.kafka, "in", 1).await.unwrap();
    let producer = Producer::connect(&world.kafka).await.unwrap();
    let record =
        |id: usize| OutRecord::new("in", json!({ "id": id, "pixels": row_of(id), "tag": "t" }).to_string());
    let right = PipeConfig { columns: [("input".to_string(), "pixels".to_string())].into(), ..pipe() };
    for (records, offset) in [(0..20, 0), (20..25, 20)] {
        let added = records.len() as u64;
        producer.send_all(records.map(record)).await.unwrap();
        let config = pipe();
        let running = run(&config, world.deps.clone(), Until::CaughtUp, CancellationToken::new());
        let ended = tokio::time::timeout(Duration::from_secs(30), running).await.unwrap().unwrap_err();
        assert!(matches!(ended, pipe::Error::Unfit { .. }), "{ended:?}");
        let line = ended.to_string();
        let place = format!("partition 0 offset {offset}");
        for part in ["topic in", &place, r#"no field "x""#, r#""id", "pixels", "tag""#, "--allow-unfit"] {
            assert!(line.contains(part), "{line}");
        }
        assert!(topic::watermarks(&world.kafka, "out-dead").await.is_err(), "a dead letter was written");
        let report = catch_up_as(&world, &right).await;
        assert_eq!((report.records, report.predicted), (added, added));
    }

    // Allowed, and in a pipe that runs forever, they become dead letters with their places.
    producer.send_all((25..28).map(record)).await.unwrap();
    let (config, deps) = (pipe(), Deps { allow_unfit: true, ..world.deps.clone() });
    let running = run(&config, deps, Until::CaughtUp, CancellationToken::new());
    let report = tokio::time::timeout(Duration::from_secs(30), running).await.unwrap().unwrap();
    assert_eq!((report.predicted, report.dead_letters), (0, 3));
    let dead = read(&world.kafka, "out-dead").await;
    let places: Vec<&str> = dead.iter().map(|seen| seen.headers["millrace-source"].as_str()).collect();
    assert_eq!(places, ["in/0/25", "in/0/26", "in/0/27"]);
    producer.send(record(28)).await.unwrap();
    let (deps, cancel) = (world.deps.clone(), CancellationToken::new());
    let running = tokio::spawn({
        let cancel = cancel.clone();
        async move { run(&pipe(), deps, Until::Forever, cancel).await }
    });
    committed(&world.deps.progress, |next| next == Some(b"29")).await;
    cancel.cancel();
    let report = tokio::time::timeout(Duration::from_secs(30), running).await.unwrap().unwrap().unwrap();
    assert_eq!(report.dead_letters, 1);
    world.broker.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pipe_that_is_interrupted_at_any_moment_loses_no_record() {
    let world = world().await;
    topic::create_topic(&world.kafka, "in", 2).await.unwrap();
    topic::create_topic(&world.kafka, "out", 2).await.unwrap();
    let producer = Producer::connect(&world.kafka).await.unwrap();
    let mut produced = 0;
    for round in 0..10u64 {
        producer.send_all((produced..produced + 40).map(record)).await.unwrap();
        produced += 40;
        let deps = world.deps.clone();
        let cancel = CancellationToken::new();
        let running = tokio::spawn(async move { run(&pipe(), deps, Until::Forever, cancel).await });
        // Cancelled after more and more answers, some before their commit.
        let goal = (round * 37) % 50;
        let before = ids(&world.kafka).await.len() as u64;
        let reached =
            async { while (ids(&world.kafka).await.len() as u64) < (before + goal).min(produced as u64) {} };
        tokio::time::timeout(Duration::from_secs(20), reached).await.unwrap();
        running.abort();
        assert!(running.await.is_err_and(|error| error.is_cancelled()));
    }
    catch_up(&world).await;
    let ids = ids(&world.kafka).await;
    assert_eq!(ids.len(), produced);
    assert_eq!(catch_up(&world).await.records, 0);
    world.broker.stop().await.unwrap();
}

/// The state after a kill between the answers and their commit: all answers are written, the progress is old.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uncommitted_answers_are_not_repeated() {
    let world = world().await;
    topic::create_topic(&world.kafka, "in", 2).await.unwrap();
    let producer = Producer::connect(&world.kafka).await.unwrap();
    producer.send_all((0..60).map(record)).await.unwrap();
    producer.send_all([OutRecord::new("in", "no JSON").partition(1)]).await.unwrap();
    assert_eq!(catch_up(&world).await.predicted, 60);
    let (answers, dead) = (read(&world.kafka, "out").await.len(), read(&world.kafka, "out-dead").await.len());
    assert_eq!((answers, dead), (60, 1));
    for (partition, next) in [(0, "7"), (1, "0")] {
        let (view, key) = (world.deps.progress.clone(), format!("pipe/p/in/out/mlp/{partition}"));
        let old = Publish::new().put_key(&key, next.as_bytes().to_vec());
        tokio::task::spawn_blocking(move || view.publish(old)).await.unwrap().unwrap();
    }
    producer.send_all((60..64).map(record)).await.unwrap();
    let again = catch_up(&world).await;
    assert_eq!((again.predicted, again.dead_letters), (4, 0), "{again:?}");
    assert_eq!(read(&world.kafka, "out").await.len(), 64);
    assert_eq!(read(&world.kafka, "out-dead").await.len(), 1);
    assert_eq!(ids(&world.kafka).await.len(), 64);
    assert_eq!(catch_up(&world).await.records, 0);
    world.broker.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_pipe_to_the_same_output_answers_every_record_too() {
    let world = world().await;
    topic::create_topic(&world.kafka, "in", 2).await.unwrap();
    let producer = Producer::connect(&world.kafka).await.unwrap();
    producer.send_all((0..60).map(record)).await.unwrap();
    assert_eq!(catch_up(&world).await.predicted, 60);
    let second = PipeConfig { name: "q".into(), ..pipe() };
    assert_eq!(catch_up_as(&world, &second).await.predicted, 60, "another name");
    let other = PipeConfig { model: "other".into(), ..pipe() };
    assert_eq!(catch_up_as(&world, &other).await.predicted, 60, "another model under the same name");
    let elsewhere = PipeConfig { output: "out2".into(), ..pipe() };
    assert_eq!(catch_up_as(&world, &elsewhere).await.predicted, 60, "another output under the same name");
    assert_eq!(read(&world.kafka, "out").await.len(), 180);
    for config in [&pipe(), &second, &other, &elsewhere] {
        assert_eq!(catch_up_as(&world, config).await.records, 0);
    }
    world.broker.stop().await.unwrap();
}

/// Positions by name and input, and answers without the pipe's identity, as an earlier release left them.
async fn earlier_release(world: &World, model: &str) {
    topic::create_topic(&world.kafka, "in", 2).await.unwrap();
    topic::create_topic(&world.kafka, "out", 2).await.unwrap();
    let producer = Producer::connect(&world.kafka).await.unwrap();
    producer.send_all((0..60).map(record)).await.unwrap();
    // Offsets 10 and 11 were answered but not committed.
    let answer = |offset: usize| {
        OutRecord::new("out", json!({ "id": 2 * offset }).to_string())
            .header("millrace-source", format!("in/0/{offset}"))
            .header("millrace-model", format!("{model}/1"))
    };
    producer.send_all((10..12).map(answer)).await.unwrap();
    let (view, old) = (world.deps.progress.clone(), Publish::new().put_key("pipe/p/in/0", b"10".to_vec()));
    tokio::task::spawn_blocking(move || view.publish(old)).await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn positions_of_an_earlier_release_are_adopted() {
    let world = world().await;
    earlier_release(&world, "mlp").await;
    assert_eq!(catch_up(&world).await.predicted, 60 - 12);
    assert_eq!(catch_up(&world).await.records, 0);
    let other = PipeConfig { model: "other".into(), ..pipe() };
    assert_eq!(catch_up_as(&world, &other).await.predicted, 60, "they belong to one pipe");
    world.broker.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn positions_of_another_model_are_not_adopted() {
    let world = world().await;
    earlier_release(&world, "other").await;
    assert_eq!(catch_up(&world).await.predicted, 60);
    let other = PipeConfig { model: "other".into(), ..pipe() };
    assert_eq!(catch_up_as(&world, &other).await.predicted, 60 - 12);
    world.broker.stop().await.unwrap();
}

/// The state after a kill before the first commit: an id without positions.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn started_pipe_adopts_no_positions() {
    let world = world().await;
    earlier_release(&world, "mlp").await;
    let (view, id) =
        (world.deps.progress.clone(), Publish::new().put_key("pipe/p/in/out/mlp/id", b"begun".to_vec()));
    tokio::task::spawn_blocking(move || view.publish(id)).await.unwrap().unwrap();
    assert_eq!(catch_up(&world).await.predicted, 60);
    let view = world.deps.progress.clone();
    let kept = move || view.key_get("pipe/p/in/0").unwrap();
    assert!(tokio::task::spawn_blocking(kept).await.unwrap().is_some());
    world.broker.stop().await.unwrap();
}

/// Waits until the pipe's progress on partition 0 matches.
async fn committed(view: &View, wanted: impl Fn(Option<&[u8]>) -> bool) {
    let reached = async {
        loop {
            let view = view.clone();
            let read = move || view.key_get("pipe/p/in/out/mlp/0").unwrap();
            if wanted(tokio::task::spawn_blocking(read).await.unwrap().as_deref()) {
                break;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(20), reached).await.unwrap();
}

/// Ids of all predictions, without duplicates.
async fn ids(kafka: &KafkaConfig) -> std::collections::BTreeSet<u64> {
    let id = |seen: &Seen| {
        let value: Value = serde_json::from_slice(seen.value.as_deref().unwrap()).unwrap();
        value["id"].as_u64().unwrap()
    };
    read(kafka, "out").await.iter().map(id).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn running_pipe_follows_its_topic_and_detects_a_second_process() {
    let world = world().await;
    topic::create_topic(&world.kafka, "in", 2).await.unwrap();
    topic::create_topic(&world.kafka, "out", 2).await.unwrap();
    let producer = Producer::connect(&world.kafka).await.unwrap();
    let cancel = CancellationToken::new();
    let start = |cancel: &CancellationToken| {
        let (deps, cancel) = (world.deps.clone(), cancel.clone());
        tokio::spawn(async move { run(&pipe(), deps, Until::Forever, cancel).await })
    };
    let running = start(&cancel);
    producer.send(record(0)).await.unwrap();
    let view = world.deps.progress.clone();
    committed(&view, |next| next.is_some()).await;
    let rival = view.clone();
    tokio::task::spawn_blocking(move || {
        rival.publish(Publish::new().put_key("pipe/p/in/out/mlp/0", b"0".to_vec())).unwrap();
    })
    .await
    .unwrap();
    producer.send(record(2)).await.unwrap();
    let outcome = tokio::time::timeout(Duration::from_secs(20), running).await.unwrap().unwrap();
    assert!(matches!(outcome, Err(pipe::Error::Fenced { partition: 0, .. })), "{outcome:?}");

    // The next run starts at the offset in the volume and finds both records answered.
    let running = start(&cancel);
    committed(&view, |next| next == Some(b"2")).await;
    assert_eq!(read(&world.kafka, "out").await.len(), 2);
    cancel.cancel();
    let report = tokio::time::timeout(Duration::from_secs(20), running).await.unwrap().unwrap().unwrap();
    assert_eq!(report.records, 2);
    world.broker.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_settings_are_refused() {
    let world = world().await;
    topic::create_topic(&world.kafka, "in", 1).await.unwrap();
    let try_run = async |config: PipeConfig| {
        run(&config, world.deps.clone(), Until::CaughtUp, CancellationToken::new()).await.unwrap_err()
    };
    for config in [
        PipeConfig { name: String::new(), ..pipe() },
        PipeConfig { name: "a/b".into(), ..pipe() },
        PipeConfig { model: String::new(), ..pipe() },
        PipeConfig { output: "in".into(), ..pipe() },
        PipeConfig { dead_letter: "out".into(), ..pipe() },
    ] {
        let error = try_run(config).await;
        assert!(matches!(error, pipe::Error::Server(Error::Config { .. })), "{error}");
    }
    let error = try_run(PipeConfig { model: "nosuch".into(), ..pipe() }).await;
    assert!(matches!(error, pipe::Error::Infer(_)), "{error}");
    let error = try_run(PipeConfig { input: "nosuch".into(), ..pipe() }).await;
    assert!(matches!(error, pipe::Error::Streams(_)), "{error}");
    world.broker.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_of_a_model_that_sums_up_rows_are_predicted_one_by_one() {
    let world = world_of("steps", steps()).await;
    topic::create_topic(&world.kafka, "in", 1).await.unwrap();
    let producer = Producer::connect(&world.kafka).await.unwrap();
    let record = |id: usize| OutRecord::new("in", json!({ "id": id, "x": row_of(id) }).to_string());
    producer.send_all((0..40).map(record)).await.unwrap();
    let config = PipeConfig { model: "steps".into(), ..pipe() };
    let running = run(&config, world.deps.clone(), Until::CaughtUp, CancellationToken::new());
    let report = tokio::time::timeout(Duration::from_secs(30), running).await.unwrap().unwrap();
    assert_eq!((report.predicted, report.dead_letters), (40, 0));
    for seen in read(&world.kafka, "out").await {
        let value: Value = serde_json::from_slice(seen.value.as_deref().unwrap()).unwrap();
        let found: Vec<f32> = serde_json::from_value(value["outputs"]["output"].clone()).unwrap();
        assert_eq!(found, row_of(value["id"].as_u64().unwrap() as usize));
    }
    world.broker.stop().await.unwrap();
}

/// Carried numbers that are longer in the answer than in the record, a string too large for a dead letter,
/// and records that fit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn oversized_answers_become_dead_letters_and_other_records_are_answered() {
    let world = world().await;
    topic::create_topic(&world.kafka, "in", 1).await.unwrap();
    let producer = Producer::connect(&world.kafka).await.unwrap();
    let record = |id: usize| {
        let x = json!(row_of(id));
        let blob = match id {
            7 => format!("[{}0]", "1E5,".repeat(1500)),
            8 => format!("\"{}\"", "t".repeat(9_900)),
            _ => "0".to_owned(),
        };
        OutRecord::new("in", format!("{{\"id\":{id},\"x\":{x},\"blob\":{blob}}}")).key(format!("k{id}"))
    };
    producer.send_all((0..20).map(record)).await.unwrap();
    let config = PipeConfig { carry: vec!["id".into(), "blob".into()], ..pipe() };
    let mut deps = world.deps.clone();
    deps.kafka.properties.insert("message.max.bytes".into(), "10000".into());
    for (predicted, dead_letters) in [(18, 2), (0, 0)] {
        let running = run(&config, deps.clone(), Until::CaughtUp, CancellationToken::new());
        let report = tokio::time::timeout(Duration::from_secs(30), running).await.unwrap().unwrap();
        assert_eq!((report.predicted, report.dead_letters), (predicted, dead_letters));
    }
    assert_eq!(ids(&world.kafka).await.len(), 18);
    let dead = read(&world.kafka, "out-dead").await;
    let letter = |key: &str| dead.iter().find(|seen| seen.key.as_deref() == Some(key.as_bytes())).unwrap();
    let (numbers, text) = (letter("k7"), letter("k8"));
    assert_eq!(numbers.value.as_deref(), record(7).payload.as_deref());
    let bytes = record(8).payload.unwrap().len().to_string();
    assert!(text.value.is_none() && text.headers["millrace-value-bytes"] == bytes, "{text:?}");
    for letter in [numbers, text] {
        let reason = &letter.headers["millrace-reason"];
        assert!(reason.contains("too large for topic out"), "{reason}");
        assert!(letter.headers["millrace-source"].starts_with("in/0/"), "{letter:?}");
    }
    world.broker.stop().await.unwrap();
}

fn picky_pipe() -> PipeConfig {
    let columns = [("input".to_string(), "x".to_string()), ("shape".to_string(), "shape".to_string())];
    PipeConfig { model: "picky".into(), columns: columns.into(), ..pipe() }
}

/// A record for [`picky`].
fn picky_record(id: usize, fails: bool) -> OutRecord {
    let shape = [1, if fails { FEATURES + 1 } else { FEATURES }];
    OutRecord::new("in", json!({ "id": id, "x": row_of(id), "shape": shape }).to_string())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn single_record_on_which_the_model_fails_becomes_a_dead_letter() {
    let world = world_of("picky", picky(false)).await;
    topic::create_topic(&world.kafka, "in", 1).await.unwrap();
    let producer = Producer::connect(&world.kafka).await.unwrap();
    producer.send_all((0..40).map(|id| picky_record(id, id == 7 || id >= 30))).await.unwrap();
    let report = catch_up_as(&world, &picky_pipe()).await;
    assert_eq!((report.predicted, report.dead_letters), (29, 11));
    let dead = read(&world.kafka, "out-dead").await;
    assert!(dead.iter().all(|letter| letter.headers["millrace-reason"].contains("Reshape")), "{dead:?}");
    world.broker.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_stay_in_the_topic_while_the_server_fails_on_all() {
    let world = world_of("picky", picky(false)).await;
    topic::create_topic(&world.kafka, "in", 1).await.unwrap();
    let producer = Producer::connect(&world.kafka).await.unwrap();
    producer.send_all((0..40).map(|id| picky_record(id, true))).await.unwrap();
    for until in [Until::CaughtUp, Until::Forever] {
        let (config, cancel) = (picky_pipe(), CancellationToken::new());
        let running = run(&config, world.deps.clone(), until, cancel);
        let ended = tokio::time::timeout(Duration::from_secs(30), running).await.unwrap().unwrap_err();
        let pipe::Error::Infer(InferError::Internal { reason }) = &ended else { panic!("{ended:?}") };
        assert!(reason.contains("16 records in a row") && reason.contains("Reshape"), "{reason}");
    }
    assert!(topic::watermarks(&world.kafka, "out-dead").await.is_err(), "a dead letter was written");
    let view = world.deps.progress.clone();
    let committed = move || view.key_get("pipe/p/in/out/picky/0").unwrap();
    assert_eq!(tokio::task::spawn_blocking(committed).await.unwrap(), None);

    let mended = Bundle::new("picky", 5, picky(true), Lineage::default(), Default::default()).unwrap();
    mended.write(world.deps.progress.object_store().as_ref(), "models").await.unwrap();
    world.deps.inference.repository().refresh().await.unwrap();
    let report = catch_up_as(&world, &picky_pipe()).await;
    assert_eq!((report.predicted, report.dead_letters), (40, 0));
    world.broker.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pipe_reports_that_it_waits_for_its_model() {
    let world = world().await;
    topic::create_topic(&world.kafka, "in", 1).await.unwrap();
    let producer = Producer::connect(&world.kafka).await.unwrap();
    producer.send(OutRecord::new("in", json!({ "id": 1, "x": row_of(1) }).to_string())).await.unwrap();
    let (told, mut waits) = tokio::sync::mpsc::unbounded_channel();
    let waiting = Waiting::new(move |waits| {
        // At its end the test no longer receives.
        let _ = told.send(waits);
    });
    let deps = Deps { waiting, ..world.deps.clone() };
    let cancel = CancellationToken::new();
    let config = PipeConfig { model: "late".into(), ..pipe() };
    let running = tokio::spawn({
        let cancel = cancel.clone();
        async move { run(&config, deps, Until::Forever, cancel).await }
    });
    let mut told = async |wanted: bool| {
        let until = async { while waits.recv().await.unwrap() != wanted {} };
        tokio::time::timeout(Duration::from_secs(30), until).await.unwrap();
    };
    told(true).await;
    let bundle = Bundle::new("late", 1, mlp(), Lineage::default(), Default::default()).unwrap();
    bundle.write(world.deps.progress.object_store().as_ref(), "models").await.unwrap();
    world.deps.inference.repository().refresh().await.unwrap();
    told(false).await;
    cancel.cancel();
    let report = tokio::time::timeout(Duration::from_secs(30), running).await.unwrap().unwrap().unwrap();
    assert_eq!(report.dead_letters, 0);
    world.broker.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pipe_with_an_unreachable_broker_ends_when_cancelled() {
    let World { home: _home, kafka, deps, broker } = world().await;
    topic::create_topic(&kafka, "in", 1).await.unwrap();
    let producer = Producer::connect(&kafka).await.unwrap();
    producer.send(OutRecord::new("in", json!({ "id": 1, "x": row_of(1) }).to_string())).await.unwrap();
    drop(producer);
    let (told, mut waits) = tokio::sync::mpsc::unbounded_channel();
    let waiting = Waiting::new(move |waits| {
        // At its end the test no longer receives.
        let _ = told.send(waits);
    });
    let (progress, inference) = (deps.progress.clone(), deps.inference.clone());
    let mut deps = Deps { waiting, ..deps };
    deps.kafka.properties.insert("message.timeout.ms".into(), "600000".into());
    let cancel = CancellationToken::new();
    let config = PipeConfig { model: "late".into(), ..pipe() };
    let running = tokio::spawn({
        let cancel = cancel.clone();
        async move { run(&config, deps, Until::Forever, cancel).await }
    });
    let mut told = async |wanted: bool| {
        let until = async { while waits.recv().await.unwrap() != wanted {} };
        tokio::time::timeout(Duration::from_secs(30), until).await.unwrap();
    };
    // The pipe has read its record, and now nothing can be written.
    told(true).await;
    broker.stop().await.unwrap();
    let bundle = Bundle::new("late", 1, mlp(), Lineage::default(), Default::default()).unwrap();
    bundle.write(progress.object_store().as_ref(), "models").await.unwrap();
    inference.repository().refresh().await.unwrap();
    told(false).await;
    cancel.cancel();
    let report = tokio::time::timeout(Duration::from_secs(120), running).await.unwrap().unwrap().unwrap();
    assert_eq!((report.records, report.predicted), (0, 0));
}
