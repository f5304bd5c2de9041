//! Tests of topics over real sockets: our producer and consumer, the wire protocol, kcat, hostile input and
//! kills, all against the embedded broker.

// The tests print skips and measurements on the terminal.
#![allow(clippy::print_stderr, clippy::print_stdout)]

mod clients;
mod damaged;
mod disk_full;
mod feeding;
mod hostile;
mod kcat;
mod kill;
mod protocol;
mod rates;
mod undecodable;
mod wire;

use std::path::Path;
use std::time::{Duration, Instant};

use arrow::array::RecordBatch;
use millrace_streams::KafkaConfig;
use millrace_streams::broker::{self, Broker};
use millrace_streams::topic::{Consumer, Records};
use tokio_util::sync::CancellationToken;

/// A broker on a free port.
async fn broker_in(dir: &Path) -> Broker {
    broker_with(dir, broker::Config::default()).await
}

async fn broker_with(dir: &Path, config: broker::Config) -> Broker {
    let config = broker::Config {
        listen: ([127, 0, 0, 1], if config.listen.port() == 9092 { 0 } else { config.listen.port() }).into(),
        ..config
    };
    Broker::start(config, dir, CancellationToken::new()).await.unwrap()
}

fn kafka_of(broker: &Broker) -> KafkaConfig {
    quick(KafkaConfig::new(broker.addr().to_string()))
}

/// Makes clients reconnect fast, since tests restart brokers.
fn quick(mut kafka: KafkaConfig) -> KafkaConfig {
    for key in ["reconnect.backoff.ms", "reconnect.backoff.max.ms"] {
        kafka.properties.insert(key.to_string(), "20".into());
    }
    kafka
}

/// Consumes until `rows` records have arrived.
async fn take(consumer: &mut Consumer, rows: usize) -> Vec<RecordBatch> {
    let deadline = Instant::now() + Duration::from_secs(30);
    let (mut batches, mut taken) = (Vec::new(), 0);
    while taken < rows {
        assert!(Instant::now() < deadline, "{taken} of {rows} records came");
        if let Some(batch) = consumer.next(100_000, 16 << 20, Duration::from_millis(500)).await.unwrap() {
            taken += batch.num_rows();
            batches.push(batch);
        }
    }
    assert_eq!(taken, rows);
    batches
}

/// `(partition, offset, value)` of every row.
fn rows(batches: &[RecordBatch]) -> Vec<(i32, i64, Option<Vec<u8>>)> {
    let mut all = Vec::new();
    for batch in batches {
        let records = Records::new(batch).unwrap();
        all.extend((0..records.len()).map(|row| {
            (records.partition(row), records.offset(row), records.value(row).map(<[u8]>::to_vec))
        }));
    }
    all
}
