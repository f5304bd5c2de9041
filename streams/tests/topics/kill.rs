//! Test of `kill -9`: a broker process is killed repeatedly while an idempotent producer writes. Every
//! acknowledged record is in the log exactly once, at the acknowledged offset.

use std::collections::HashMap;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use millrace_streams::KafkaConfig;
use millrace_streams::broker::{self, Broker, running_address};
use millrace_streams::topic::{Consumer, Delivery, EARLIEST, OutRecord, Producer, create_topic, watermarks};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

use super::{quick, rows, take};

const DIR: &str = "MILLRACE_TEST_BROKER_DIR";
const LISTEN: &str = "MILLRACE_TEST_BROKER_LISTEN";

/// Not a test: the process that is killed.
#[test]
fn broker_process() {
    let (Ok(dir), Ok(listen)) = (std::env::var(DIR), std::env::var(LISTEN)) else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let config = broker::Config {
            listen: listen.parse().unwrap(),
            // Small, so that kills also meet the change from one segment to the next.
            segment_bytes_max: 100_000,
            ..broker::Config::default()
        };
        let _broker = Broker::start(config, Path::new(&dir), CancellationToken::new()).await.unwrap();
        std::future::pending::<()>().await;
    });
}

/// A child process that is killed when a test fails.
struct Process(Child);

impl Process {
    fn start(dir: &Path, listen: &str) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["topics::kill::broker_process", "--exact", "--nocapture", "--test-threads=1"])
            .env(DIR, dir)
            .env(LISTEN, listen)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while running_address(dir).is_none() {
            assert!(Instant::now() < deadline, "the broker process does not come up");
            std::thread::yield_now();
        }
        Self(child)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn broker_killed_with_sigkill_loses_and_duplicates_nothing() {
    let dir = TempDir::new().unwrap();
    let mut process = Process::start(dir.path(), "127.0.0.1:0");
    let address = running_address(dir.path()).unwrap().to_string();
    let mut kafka = quick(KafkaConfig::new(address.clone()));
    // Small batches, so that kills hit many states.
    kafka.properties.insert("batch.num.messages".to_string(), "50".into());
    kafka.properties.insert("message.timeout.ms".to_string(), "60000".into());
    create_topic(&kafka, "t", 2).await.unwrap();
    let producer = Producer::connect(&kafka).await.unwrap();

    let stop = CancellationToken::new();
    let in_the_log = Arc::new(AtomicUsize::new(0));
    let writer = tokio::spawn({
        let (stop, in_the_log) = (stop.clone(), Arc::clone(&in_the_log));
        async move {
            let mut acknowledged: Vec<Delivery> = Vec::new();
            while !stop.is_cancelled() {
                let first = acknowledged.len();
                let records = (first..first + 2_000)
                    .map(|id| OutRecord::new("t", id.to_string()).partition(id as i32 % 2));
                acknowledged.extend(producer.send_all(records).await.unwrap());
                in_the_log.store(acknowledged.len(), Ordering::Release);
            }
            acknowledged
        }
    });
    // A fixed sequence of pauses (a linear congruential generator); the state that a kill hits still varies.
    let mut seed = 20_260_117_u64;
    let mut cuts = 0;
    // On a busy machine more kills come before enough records are in the log.
    while cuts < 10 || in_the_log.load(Ordering::Acquire) <= 10_000 {
        assert!(cuts < 500, "{} records", in_the_log.load(Ordering::Acquire));
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let until = Instant::now() + Duration::from_micros(20_000 + (seed >> 33) % 130_000);
        while Instant::now() < until {
            std::thread::yield_now();
        }
        drop(process);
        cuts += 1;
        process = Process::start(dir.path(), &address);
    }
    stop.cancel();
    let acknowledged = writer.await.unwrap();

    let marks = watermarks(&kafka, "t").await.unwrap();
    let total: i64 = marks.values().map(|(low, high)| high - low).sum();
    assert_eq!(total, acknowledged.len() as i64, "records in the log against acknowledged ones");
    let start = [("t".to_string(), 0, EARLIEST), ("t".to_string(), 1, EARLIEST)];
    let mut consumer = Consumer::assign(&kafka, &start).await.unwrap();
    let mut seen = HashMap::new();
    for (partition, offset, value) in rows(&take(&mut consumer, acknowledged.len()).await) {
        let id: usize = String::from_utf8(value.unwrap()).unwrap().parse().unwrap();
        assert_eq!(acknowledged[id], Delivery { partition, offset });
        assert_eq!(seen.insert(id, offset), None, "record {id} is there twice");
    }
    assert_eq!(seen.len(), acknowledged.len());
}
