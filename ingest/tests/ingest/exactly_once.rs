//! Tests with kills, restarts and rival ingesters: no record is lost or doubled.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use millrace_datafs::Datafs;
use millrace_ingest::{Error, JobConfig, Progress, Until, offsets, run, run_with_progress};
use millrace_streams::KafkaConfig;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::site::{Seeded, Site, job, open, poll, record, wait_for};

const CHILD_HOME: &str = "MILLRACE_TEST_INGEST_HOME";
const CHILD_SERVERS: &str = "MILLRACE_TEST_INGEST_SERVERS";
const ROUNDS: usize = 12;

/// A job that publishes often, so that kills hit every phase of it.
fn busy_job() -> JobConfig {
    JobConfig { flush_rows_max: 150, flush_ms: 10, ..job("events") }
}

/// The process that [`ingest_killed_at_random_moments_lands_each_record_once`] kills; without its environment
/// variables it does nothing.
#[test]
fn child() {
    let (Ok(home), Ok(servers)) = (std::env::var(CHILD_HOME), std::env::var(CHILD_SERVERS)) else {
        return;
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let datafs = open(&PathBuf::from(home));
        let kafka = KafkaConfig::new(servers);
        let never = CancellationToken::new();
        run(&busy_job(), &datafs, &kafka, never, Until::Forever).await.unwrap();
    });
}

fn spawn_child(site: &Site) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "exactly_once::child", "--test-threads=1"])
        .env(CHILD_HOME, site.home.path())
        .env(CHILD_SERVERS, &site.kafka.bootstrap_servers)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn committed(datafs: &Datafs) -> i64 {
    let view = datafs.view(&"records".parse().unwrap()).unwrap();
    let offsets = offsets(&view).unwrap();
    offsets.get("events").map_or(0, |p| p.values().sum())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ingest_killed_at_random_moments_lands_each_record_once() {
    let seed = std::env::var("MILLRACE_TEST_SEED").map_or(20_261_121, |s| s.parse().unwrap());
    println!("MILLRACE_TEST_SEED={seed}");
    let mut seeded = Seeded(seed);
    let site = Site::start().await;
    site.topic("events", 3).await;
    let mut produced = 0;
    for round in 0..ROUNDS {
        let more = 3000;
        site.produce((produced..produced + more).map(|id| record("events", id, 50))).await;
        produced += more;
        let before = committed(&site.datafs);
        let mut child = spawn_child(&site);
        // In every third round the kill may come before the first publish, otherwise after one.
        if round % 3 != 0 {
            poll(|| {
                assert!(child.try_wait().unwrap().is_none(), "the child ended by itself");
                committed(&site.datafs) > before
            })
            .await;
        }
        let moment = Duration::from_micros(seeded.below(120_000));
        tokio::time::sleep(moment).await;
        child.kill().unwrap();
        child.wait().unwrap();
        site.prove(&busy_job()).await;
    }
    let halfway = committed(&site.datafs);
    assert!(halfway > 0 && halfway <= produced as i64);
    site.land(&busy_job()).await.unwrap();
    assert_eq!(committed(&site.datafs), produced as i64);
    let (landed, dead) = site.prove(&busy_job()).await;
    assert_eq!((landed, dead), (produced - produced / 50, produced / 50));
    site.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restarted_ingest_continues_at_committed_offset() {
    let site = Site::start().await;
    site.topic("events", 2).await;
    let job = busy_job();
    for round in 0..4 {
        let ids = round * 500..(round + 1) * 500;
        site.produce(ids.map(|id| record("events", id, 100))).await;
        let (progress, mut watched) = watch::channel(Progress::default());
        let cancel = CancellationToken::new();
        let running = {
            let (job, datafs, kafka) = (job.clone(), site.datafs.clone(), site.kafka.clone());
            let cancel = cancel.clone();
            tokio::spawn(async move {
                run_with_progress(&job, &datafs, &kafka, cancel, Until::Forever, progress).await
            })
        };
        wait_for(&mut watched, |p| p.commits >= 1).await;
        cancel.cancel();
        let report = running.await.unwrap().unwrap();
        assert_eq!(report.records, report.landed + report.dead_letters);
        site.prove(&job).await;
    }
    site.land(&job).await.unwrap();
    assert_eq!(site.prove(&job).await, (1980, 20));
    site.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn second_ingester_fences_the_first() {
    let site = Site::start().await;
    site.topic("events", 2).await;
    site.produce((0..500).map(|id| record("events", id, 0))).await;
    let slow = JobConfig { flush_ms: 3_600_000, ..job("events") };
    let (progress, mut watched) = watch::channel(Progress::default());
    let cancel = CancellationToken::new();
    let first = {
        let (job, datafs, kafka) = (slow, site.datafs.clone(), site.kafka.clone());
        let cancel = cancel.clone();
        tokio::spawn(async move {
            run_with_progress(&job, &datafs, &kafka, cancel, Until::Forever, progress).await
        })
    };
    // The first run has claimed the job and has published nothing yet.
    wait_for(&mut watched, |p| p.high.len() == 2).await;
    let report = site.land(&job("events")).await.unwrap();
    assert_eq!(report.landed, 500);
    site.produce((500..1500).map(|id| record("events", id, 0))).await;
    wait_for(&mut watched, |p| p.records >= 1000).await;
    cancel.cancel();
    let error = first.await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Fenced { .. }), "{error:?}");
    assert!(error.to_string().contains("another ingester took it over"));
    assert_eq!(site.prove(&job("events")).await, (500, 0));
    site.land(&job("events")).await.unwrap();
    assert_eq!(site.prove(&job("events")).await, (1500, 0));
    site.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn racing_ingesters_land_every_record_once() {
    let site = Site::start().await;
    site.topic("events", 3).await;
    site.produce((0..6000).map(|id| record("events", id, 60))).await;
    let job = busy_job();
    let racers: Vec<_> = (0..3)
        .map(|_| {
            let (job, datafs, kafka) = (job.clone(), site.datafs.clone(), site.kafka.clone());
            let never = CancellationToken::new();
            tokio::spawn(async move { run(&job, &datafs, &kafka, never, Until::CaughtUp).await })
        })
        .collect();
    for racer in racers {
        match racer.await.unwrap() {
            Ok(_) | Err(Error::Fenced { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
    site.land(&job).await.unwrap();
    assert_eq!(site.prove(&job).await, (5900, 100));
    site.stop().await;
}
