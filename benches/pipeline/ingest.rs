//! Records landed as Parquet per second against a bare librdkafka drain of the same topic.

use std::time::{Duration, Instant};

use millrace_datafs::{Config, Datafs};
use millrace_ingest::{JobConfig, Until};
use millrace_streams::broker::{self, Broker};
use millrace_streams::config::KafkaConfig;
use millrace_streams::topic::{self, OutRecord, Producer};
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::{Message, Offset, TopicPartitionList};
use tokio_util::sync::CancellationToken;

use crate::figure::{Figure, Kind};
use crate::turns::in_turn;

const RECORDS: u64 = 1_000_000;
const ROUNDS: usize = 3;

pub(crate) fn figures() -> Vec<Figure> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut config = broker::Config::default();
    config.listen.set_port(0);
    let broker =
        runtime.block_on(Broker::start(config, &broker::dir(dir.path()), CancellationToken::new())).unwrap();
    let kafka = KafkaConfig::new(broker.addr().to_string());
    runtime.block_on(produce(&kafka));
    let datafs = Datafs::open(dir.path(), &Config::default()).unwrap();
    datafs.volume_create(&"v".parse().unwrap()).unwrap();
    let mut round = 0;
    let (ours, control) = in_turn(
        ROUNDS,
        || {
            round += 1;
            let job = JobConfig::new(&format!("job-{round}"), "t", "v", &format!("round-{round}"));
            let started = Instant::now();
            let report = runtime
                .block_on(millrace_ingest::run(
                    &job,
                    &datafs,
                    &kafka,
                    CancellationToken::new(),
                    Until::CaughtUp,
                ))
                .unwrap();
            let elapsed = started.elapsed();
            assert_eq!(report.landed, RECORDS);
            elapsed
        },
        || drain(&kafka.bootstrap_servers),
    );
    runtime.block_on(broker.stop()).unwrap();
    vec![Figure {
        name: "ingest/landed",
        kind: Kind::Rate,
        unit: "records/s",
        value: RECORDS as f64 / ours,
        control: RECORDS as f64 / control,
        against: "a bare rdkafka `BaseConsumer` drain of the same topic (records of 110 bytes, four fields)",
    }]
}

async fn produce(kafka: &KafkaConfig) {
    topic::create_topic(kafka, "t", 1).await.unwrap();
    let producer = Producer::connect(kafka).await.unwrap();
    for chunk in (0..RECORDS).collect::<Vec<_>>().chunks(50_000) {
        let records = chunk.iter().map(|i| {
            OutRecord::new(
                "t",
                format!(
                    r#"{{"id":{i},"user":"user-{:08}","amount":{}.{:02},"tags":["alpha","beta"],"note":"some short text here"}}"#,
                    i * 7919 % 99_999_989,
                    i % 1000,
                    i % 100
                ),
            )
        });
        producer.send_all(records.collect::<Vec<_>>()).await.unwrap();
    }
}

fn drain(bootstrap: &str) -> Duration {
    let started = Instant::now();
    let consumer: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", bootstrap)
        .set("group.id", "unused")
        .set("enable.auto.commit", "false")
        // The default of a second would have the drain wait most of its time.
        .set("fetch.queue.backoff.ms", "5")
        .create()
        .unwrap();
    let mut assignment = TopicPartitionList::new();
    assignment.add_partition_offset("t", 0, Offset::Beginning).unwrap();
    consumer.assign(&assignment).unwrap();
    let (mut records, mut bytes) = (0, 0);
    while records < RECORDS {
        let message = consumer.poll(Duration::from_secs(10)).expect("the topic holds more").unwrap();
        records += 1;
        bytes += message.payload().map_or(0, <[u8]>::len);
    }
    std::hint::black_box(bytes);
    started.elapsed()
}
