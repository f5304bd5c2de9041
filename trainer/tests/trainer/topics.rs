//! Tests of jobs on a topic: rows of bounded offsets, resumed with the same ones.

use std::net::SocketAddr;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arrow::array::AsArray;
use arrow::datatypes::{Float32Type, Int64Type};
use millrace_datafs::Publish;
use millrace_streams::KafkaConfig;
use millrace_streams::broker::{self, Broker};
use millrace_streams::topic::{self, OutRecord, Producer};
use millrace_trainer::{End, Setup, train};
use tokio_util::sync::CancellationToken;

use super::{ROWS, bundle, home, job, rows, run, runtime, setup};

/// Rows as JSON objects.
pub(super) fn json_rows(range: Range<usize>) -> Vec<String> {
    let batch = rows(range);
    let pixels = batch.column(0).as_fixed_size_list();
    let labels = batch.column(1).as_primitive::<Int64Type>().values();
    let row = |at: usize| {
        let pixels = pixels.value(at);
        let pixels = pixels.as_primitive::<Float32Type>().values().to_vec();
        format!("{{\"pixels\":{pixels:?},\"label\":{}}}", labels[at])
    };
    (0..batch.num_rows()).map(row).collect()
}

/// Produces rows as JSON, to two partitions.
pub(super) async fn produce(kafka: &KafkaConfig, range: Range<usize>) {
    let values = range.clone().zip(json_rows(range));
    let record = |(row, value): (usize, String)| OutRecord::new("points", value).partition(row as i32 % 2);
    let producer = Producer::connect(kafka).await.unwrap();
    producer.send_all(values.map(record)).await.unwrap();
}

/// A broker at this address.
pub(super) async fn serve(listen: SocketAddr, log: &Path) -> Broker {
    let config = broker::Config { listen, ..broker::Config::default() };
    Broker::start(config, log, CancellationToken::new()).await.unwrap()
}

/// A broker with [`ROWS`] rows in the topic `points`.
pub(super) async fn start(log: &Path) -> (Broker, KafkaConfig) {
    let broker = serve(([127, 0, 0, 1], 0).into(), log).await;
    let kafka = KafkaConfig::new(broker.addr().to_string());
    topic::create_topic(&kafka, "points", 2).await.unwrap();
    produce(&kafka, 0..ROWS).await;
    (broker, kafka)
}

#[test]
fn a_job_on_a_topic_goes_on_with_its_offsets_and_names_them() {
    let (home, log) = (home(), tempfile::tempdir().unwrap());
    let serving = runtime();
    let (broker, kafka) = serving.block_on(start(log.path()));
    let setup = || Setup { kafka: Some(kafka.clone()), ..setup(home.path()) };
    let on_topic = |name: &str, workers: usize, epochs: u64| {
        let more = format!("workers = {workers}\nepochs_max = {epochs}");
        let mut job = job(name, &more);
        job.dataset = "topic:points@latest".parse().unwrap();
        job
    };

    let whole = run(setup(), on_topic("whole", 1, 30), |_| {}).unwrap();
    assert_eq!((whole.end, &whole.rows_per_epoch[..]), (End::EpochsDone, &[ROWS as u64; 30][..]));

    // Stopped, and started again when more records have arrived.
    let stop = CancellationToken::new();
    let told = Arc::new(AtomicBool::new(false));
    let (token, flag) = (stop.clone(), Arc::clone(&told));
    let stopped = runtime().block_on(train(on_topic("halves", 3, 30), setup(), stop, move |seen| {
        if seen.step >= 3 {
            flag.store(true, Ordering::Relaxed);
            token.cancel();
        }
    }));
    let stopped = stopped.unwrap();
    assert!(told.load(Ordering::Relaxed));
    serving.block_on(produce(&kafka, ROWS..ROWS + 50));
    let halves = run(setup(), on_topic("halves", 2, 30), |_| {}).unwrap();
    assert_eq!((stopped.end, halves.resumed_from_step), (End::Stopped, Some(stopped.steps)));
    assert_eq!(halves.rows_per_epoch, [ROWS as u64; 30]);
    assert_eq!(halves.model_sha256, whole.model_sha256, "the model depends neither on workers nor on stops");

    // The finished run is over: the next one reads what has arrived until then.
    let next = run(setup(), on_topic("halves", 2, 30), |_| {}).unwrap();
    assert_eq!((next.version, &next.rows_per_epoch[..]), (Some(2), &[ROWS as u64 + 50; 30][..]));

    // Rows with even numbers are in partition 0: 151 of 301, then 25 of 50.
    for (name, version, even, odd) in [("whole", 1, 151, 150), ("halves", 2, 176, 175)] {
        let bundle = bundle(home.path(), name, version);
        let lineage = &bundle.manifest().lineage;
        assert_eq!((lineage.volume.as_str(), lineage.offsets["points"][&0]), ("", even));
        let text = format!("topic:points@latest?offsets=0:0-{even}:");
        assert!(lineage.topic.starts_with(&text), "{}", lineage.topic);
        assert!(lineage.topic.contains(&format!(",1:0-{odd}:")), "{}", lineage.topic);
    }

    let mut nowhere = on_topic("nowhere", 1, 1);
    nowhere.output.volume = None;
    let error = run(setup(), nowhere, |_| {}).unwrap_err().to_string();
    assert!(error.contains("set output.volume"), "{error}");
    let error = run(super::setup(home.path()), on_topic("apart", 1, 1), |_| {}).unwrap_err();
    assert!(error.one_line().contains("no broker is known here"), "{}", error.one_line());
    serving.block_on(broker.stop()).unwrap();
}

/// A process that was killed after its last checkpoint, before the model was published, has left such a home.
#[test]
fn a_run_on_a_topic_whose_model_was_not_published_is_not_over() {
    let (home, log) = (home(), tempfile::tempdir().unwrap());
    let serving = runtime();
    let (broker, kafka) = serving.block_on(start(log.path()));
    let setup = || Setup { kafka: Some(kafka.clone()), ..setup(home.path()) };
    let live = || {
        let mut job = job("live", "workers = 1\nepochs_max = 2");
        job.dataset = "topic:points@latest".parse().unwrap();
        job
    };
    let first = run(setup(), live(), |_| {}).unwrap();
    let view = setup().datafs.view(&"models".parse().unwrap()).unwrap();
    let published = view.key_scan("trainer/live/published/").unwrap();
    assert_eq!(published.len(), 1);
    view.publish(Publish::new().delete_key(published[0].0.clone())).unwrap();

    serving.block_on(produce(&kafka, ROWS..ROWS + 50));
    let again = run(setup(), live(), |_| {}).unwrap();
    assert_eq!((again.rows_per_epoch, again.version), (vec![ROWS as u64; 2], Some(2)));
    assert_eq!((again.run, again.model_sha256), (first.run, first.model_sha256));
    let next = run(setup(), live(), |_| {}).unwrap();
    assert_eq!((next.rows_per_epoch, next.version), (vec![ROWS as u64 + 50; 2], Some(3)));
    serving.block_on(broker.stop()).unwrap();
}

/// The newest snapshot beside the topic, here that of the validation, is part of the run whose offsets are kept.
#[test]
fn a_job_on_a_topic_goes_on_beside_the_newest_snapshot() {
    let (home, log) = (home(), tempfile::tempdir().unwrap());
    let serving = runtime();
    let (broker, kafka) = serving.block_on(start(log.path()));
    let setup = || Setup { kafka: Some(kafka.clone()), ..setup(home.path()) };
    let beside = || {
        let validation = "[validation]\ndataset = \"data@latest:/train\"\nevery_epochs = 10";
        let mut job = job("beside", &format!("workers = 1\nepochs_max = 30\n{validation}"));
        job.dataset = "topic:points@latest".parse().unwrap();
        job
    };
    let stop = CancellationToken::new();
    let token = stop.clone();
    let training = train(beside(), setup(), stop, move |seen| {
        if seen.step >= 3 {
            token.cancel();
        }
    });
    let stopped = runtime().block_on(training).unwrap();
    serving.block_on(produce(&kafka, ROWS..ROWS + 50));
    let again = run(setup(), beside(), |_| {}).unwrap();
    assert_eq!((stopped.end, again.resumed_from_step), (End::Stopped, Some(stopped.steps)));
    assert_eq!(again.rows_per_epoch, [ROWS as u64; 30]);
    serving.block_on(broker.stop()).unwrap();
}

#[test]
fn a_run_whose_records_were_removed_is_left_behind_on_demand_only() {
    let (home, log) = (home(), tempfile::tempdir().unwrap());
    let serving = runtime();
    let (broker, kafka) = serving.block_on(start(log.path()));
    let setup = || Setup { kafka: Some(kafka.clone()), ..setup(home.path()) };
    let abandoning = || Setup { abandon_run: true, ..setup() };
    let live = || {
        let mut job = job("live", "workers = 1\nepochs_max = 30");
        job.dataset = "topic:points@latest".parse().unwrap();
        job
    };
    let stopped = |setup: Setup| {
        let stop = CancellationToken::new();
        let token = stop.clone();
        let training = train(live(), setup, stop, move |seen| {
            if seen.step >= 3 {
                token.cancel();
            }
        });
        let report = runtime().block_on(training).unwrap();
        assert_eq!(report.end, End::Stopped);
        report
    };
    stopped(setup());
    serving.block_on(async {
        topic::delete_topic(&kafka, "points").await.unwrap();
        topic::create_topic(&kafka, "points", 2).await.unwrap();
        produce(&kafka, ROWS..ROWS + 200).await;
    });

    // The run has rows of two topics in no case: the job fails until a new run is asked for.
    for _ in 0..2 {
        let error = run(setup(), live(), |_| {}).unwrap_err().one_line();
        assert!(error.contains("topic points partition"), "{error}");
        assert!(error.contains("millrace train --abandon-run"), "{error}");
    }
    let begun = stopped(abandoning());
    assert_eq!(begun.resumed_from_step, None);
    // Without the flag, the job goes on with the new run and its records, also when more have arrived.
    serving.block_on(produce(&kafka, 0..10));
    let ended = run(setup(), live(), |_| {}).unwrap();
    assert_eq!(ended.resumed_from_step, Some(begun.steps));
    assert_eq!((ended.version, &ended.rows_per_epoch[..]), (Some(1), &[200; 30][..]));
    serving.block_on(broker.stop()).unwrap();

    let error = run(abandoning(), job("fixed", "epochs_max = 1"), |_| {}).unwrap_err().to_string();
    assert!(error.contains("change the seed"), "{error}");
}
