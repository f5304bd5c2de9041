//! Rates of the embedded broker with our clients, printed. Run it by name with `--ignored`, in release mode
//! for meaningful figures.

use std::time::{Duration, Instant};

use millrace_streams::broker::{Config, Flush};
use millrace_streams::topic::{Consumer, EARLIEST, OutRecord, Producer};
use tempfile::TempDir;

use super::{broker_with, kafka_of};

const RECORDS: usize = 1_000_000;

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement: run it by name with --ignored --nocapture"]
async fn records_of_200_bytes_per_second() {
    for flush in [Flush::Os, Flush::Always] {
        let dir = TempDir::new().unwrap();
        let broker = broker_with(dir.path(), Config { flush, ..Config::default() }).await;
        let kafka = kafka_of(&broker);
        let producer = Producer::connect(&kafka).await.unwrap();
        let value = bytes::Bytes::from(vec![b'v'; 200]);
        let started = Instant::now();
        producer.send_all((0..RECORDS).map(|_| OutRecord::new("t", value.clone()))).await.unwrap();
        let produced = started.elapsed();
        let started = Instant::now();
        let mut consumer = Consumer::assign(&kafka, &[("t".to_string(), 0, EARLIEST)]).await.unwrap();
        let mut rows = 0;
        while rows < RECORDS {
            if let Some(batch) = consumer.next(65_536, 64 << 20, Duration::from_secs(5)).await.unwrap() {
                rows += batch.num_rows();
            }
        }
        let consumed = started.elapsed();
        let started = Instant::now();
        for _ in 0..200 {
            producer.send(OutRecord::new("t", value.clone())).await.unwrap();
        }
        println!(
            "flush {flush:?}: produced {:.0}/s, consumed {:.0}/s, one at a time {:?} each",
            RECORDS as f64 / produced.as_secs_f64(),
            RECORDS as f64 / consumed.as_secs_f64(),
            started.elapsed() / 200,
        );
        broker.stop().await.unwrap();
    }
}
