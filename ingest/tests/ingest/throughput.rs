//! Rate at which records land, against a drain of the same topic that only counts them:
//! `cargo test --release -p millrace-ingest --test ingest throughput -- --ignored --nocapture`.

use std::time::{Duration, Instant};

use millrace_streams::topic::{Consumer, EARLIEST, OutRecord};

use crate::landing::declared;
use crate::site::{Site, job};

const RECORDS: usize = 1_000_000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement: run it by name with --ignored --nocapture"]
async fn landed_records_per_second() {
    let site = Site::start().await;
    site.topic("events", 2).await;
    for chunk in 0..10 {
        let ids = chunk * RECORDS / 10..(chunk + 1) * RECORDS / 10;
        site.produce(ids.map(|id| {
            let value = format!(
                "{{\"id\": {id}, \"user\": \"user-{}\", \"value\": {:.3}, \"ok\": true}}",
                id % 1000,
                id as f64 * 0.37
            );
            OutRecord::new("events", value).partition((id % 2) as i32)
        }))
        .await;
    }

    let start = [("events".to_owned(), 0, EARLIEST), ("events".to_owned(), 1, EARLIEST)];
    let started = Instant::now();
    let mut consumer = Consumer::assign(&site.kafka, &start).await.unwrap();
    let mut drained = 0;
    while drained < RECORDS {
        let batch = consumer.next(16_384, 4 << 20, Duration::from_secs(30)).await.unwrap();
        drained += batch.expect("records").num_rows();
    }
    let control = RECORDS as f64 / started.elapsed().as_secs_f64();

    let mut job = job("events");
    job.schema = Some(declared(&[("id", "int64"), ("user", "utf8"), ("value", "float64"), ("ok", "bool")]));
    let report = site.land(&job).await.unwrap();
    assert_eq!(report.landed, RECORDS as u64);
    let landed = RECORDS as f64 / report.elapsed.as_secs_f64();
    println!("ingest/landed {landed:.0} records/s control={control:.0} ratio={:.2}", landed / control);
    site.stop().await;
}
