//! Tests of batches that a consumer cannot decode, of odd records, and of offsets without records.

use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use arrow::compute::concat_batches;
use millrace_streams::broker::Broker;
use millrace_streams::topic::{
    Consumer, EARLIEST, OutRecord, Producer, Records, create_topic, schema, watermarks,
};
use millrace_streams::{Error, KafkaConfig};
use tempfile::TempDir;

use super::wire::{Wire, batch, records};
use super::{broker_in, kafka_of, rows, take};

/// Appends batches to the log of a topic as an earlier release or another broker wrote them, unchecked.
async fn append(broker: Broker, dir: &Path, topic: &str, batches: &[(i64, Vec<u8>)]) -> Broker {
    broker.stop().await.unwrap();
    let partition = dir.join("topics").join(topic).join("0");
    std::fs::remove_file(partition.join("checkpoint.json")).unwrap();
    let mut log =
        std::fs::OpenOptions::new().append(true).open(partition.join("00000000000000000000.log")).unwrap();
    for (base, batch) in batches {
        let mut batch = batch.clone();
        batch[..8].copy_from_slice(&base.to_be_bytes());
        log.write_all(&batch).unwrap();
    }
    drop(log);
    broker_in(dir).await
}

async fn produce(kafka: &KafkaConfig, count: usize) {
    let producer = Producer::connect(kafka).await.unwrap();
    producer.send_all((0..count).map(|id| OutRecord::new("t", format!("{id}")))).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn reading_continues_after_an_undecodable_batch() {
    let dir = TempDir::new().unwrap();
    let broker = broker_in(dir.path()).await;
    create_topic(&kafka_of(&broker), "t", 1).await.unwrap();
    produce(&kafka_of(&broker), 5).await;
    let noise = |codec, count| batch((-1, -1, -1), codec, count, &[0xa5; 64]).to_vec();
    let good = batch((-1, -1, -1), 0, 1, &records(&[b"between"])).to_vec();
    let bad = [(5, noise(1, 300)), (305, good), (306, noise(4, 2)), (308, noise(5, 1))];
    let broker = append(broker, dir.path(), "t", &bad).await;
    let kafka = kafka_of(&broker);
    produce(&kafka, 3).await;

    let mut consumer = Consumer::assign(&kafka, &[("t".to_string(), 0, EARLIEST)]).await.unwrap();
    let (mut offsets, mut passed) = (Vec::new(), Vec::new());
    while offsets.len() < 9 {
        match consumer.next(100, 1 << 20, Duration::from_secs(10)).await {
            Ok(Some(batch)) => offsets.extend(rows(&[batch]).into_iter().map(|(_, offset, _)| offset)),
            Ok(None) => {}
            Err(Error::Undecodable { topic, partition, first, next, reason }) => {
                assert_eq!((topic.as_str(), partition), ("t", 0), "{reason}");
                assert_eq!(consumer.positions()[&("t".to_string(), 0)], next);
                passed.push((first, next));
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(offsets, [0, 1, 2, 3, 4, 305, 309, 310, 311]);
    assert_eq!(passed, [(5, 305), (306, 308), (308, 309)]);

    // A consumer that begins inside a bad batch skips the rest of it.
    let mut consumer = Consumer::assign(&kafka, &[("t".to_string(), 0, 100)]).await.unwrap();
    match consumer.next(100, 1 << 20, Duration::from_secs(10)).await {
        Err(Error::Undecodable { first: 100, next: 305, .. }) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(rows(&take(&mut consumer, 1).await)[0].1, 305);
    broker.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn positions_pass_transaction_markers() {
    let dir = TempDir::new().unwrap();
    let broker = broker_in(dir.path()).await;
    create_topic(&kafka_of(&broker), "t", 1).await.unwrap();
    produce(&kafka_of(&broker), 5).await;
    let broker = append(broker, dir.path(), "t", &[(5, commit_marker()), (6, commit_marker())]).await;
    let kafka = kafka_of(&broker);
    assert_eq!(watermarks(&kafka, "t").await.unwrap()[&0], (0, 7));
    let mut consumer = Consumer::assign(&kafka, &[("t".to_string(), 0, EARLIEST)]).await.unwrap();
    assert_eq!(rows(&take(&mut consumer, 5).await).len(), 5);
    let reached = async {
        while consumer.positions()[&("t".to_string(), 0)] < 7 {
            assert!(consumer.next(100, 1 << 20, Duration::from_secs(10)).await.unwrap().is_none());
        }
    };
    tokio::time::timeout(Duration::from_secs(20), reached).await.expect("the position passes the markers");
    broker.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_header_name_that_is_not_utf8_is_read_with_replacements() {
    let dir = TempDir::new().unwrap();
    let broker = broker_in(dir.path()).await;
    let kafka = kafka_of(&broker);
    create_topic(&kafka, "t", 1).await.unwrap();
    // Attributes, time, offset, no key, the value "v", one header: a name of two bytes, the value "h".
    let record = [0, 0, 0, 1, 2, b'v', 2, 4, 0xff, 0xfe, 2, b'h'];
    let payload = [&[2 * record.len() as u8][..], &record].concat();
    let answer = Wire::connect(broker.addr()).produce("t", batch((-1, -1, -1), 0, 1, &payload));
    assert_eq!(answer.error_code, 0, "{:?}", answer.error_message);
    produce(&kafka, 1).await;
    let mut consumer = Consumer::assign(&kafka, &[("t".to_string(), 0, EARLIEST)]).await.unwrap();
    let all = concat_batches(&schema(), &take(&mut consumer, 2).await).unwrap();
    let all = Records::new(&all).unwrap();
    assert_eq!(all.value(0), Some(&b"v"[..]));
    assert_eq!(all.headers(0), [("\u{fffd}\u{fffd}", Some(&b"h"[..]))]);
    assert_eq!(all.value(1), Some(&b"0"[..]), "reading goes on behind it");
    broker.stop().await.unwrap();
}

/// The control batch that ends a transaction: attributes "transactional" and "control", one record whose
/// key is version 0 and type 1 (commit).
fn commit_marker() -> Vec<u8> {
    let record = [0, 0, 0, 8, 0, 0, 0, 1, 12, 0, 0, 0, 0, 0, 0, 0];
    let mut payload = vec![2 * record.len() as u8];
    payload.extend(record);
    batch((7, 0, -1), 0x30, 1, &payload).to_vec()
}
