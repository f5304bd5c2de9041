//! Test of a damaged partition beside others: they serve, and it is read up to the damage, which the error
//! names.

use std::os::unix::fs::FileExt;
use std::time::Duration;

use millrace_streams::topic::{Consumer, EARLIEST, OutRecord, Producer, create_topic, watermarks};
use millrace_streams::{Error, broker};
use tempfile::TempDir;

use super::{broker_with, kafka_of, rows, take};

#[tokio::test(flavor = "multi_thread")]
async fn other_partitions_serve_and_the_damaged_one_is_read_up_to_the_damage() {
    let dir = TempDir::new().unwrap();
    // Each batch has a separate segment.
    let config = broker::Config { segment_bytes_max: 1 << 10, ..broker::Config::default() };
    let broker = broker_with(dir.path(), config.clone()).await;
    let kafka = kafka_of(&broker);
    create_topic(&kafka, "t", 2).await.unwrap();
    create_topic(&kafka, "other", 1).await.unwrap();
    let producer = Producer::connect(&kafka).await.unwrap();
    for id in 0..6u8 {
        producer.send(OutRecord::new("t", vec![id; 800]).partition(0)).await.unwrap();
        producer.send(OutRecord::new("t", vec![id; 800]).partition(1)).await.unwrap();
    }
    drop(producer);
    broker.stop().await.unwrap();
    // As after a kill: the next start reads all of the log.
    std::fs::remove_file(dir.path().join("topics/t/0/checkpoint.json")).unwrap();
    // The header of the third batch of partition 0.
    let segment = dir.path().join("topics/t/0/00000000000000000002.log");
    let opened = std::fs::OpenOptions::new().write(true).open(&segment).unwrap();
    opened.write_all_at(&[9], 16).unwrap();

    let broker = broker_with(dir.path(), config.clone()).await;
    let kafka = kafka_of(&broker);
    assert_eq!(watermarks(&kafka, "t").await.unwrap()[&0], (0, 6));
    let producer = Producer::connect(&kafka).await.unwrap();
    producer.send(OutRecord::new("other", "v")).await.unwrap();
    producer.send(OutRecord::new("t", vec![6; 800]).partition(1)).await.unwrap();
    let refused = producer.send(OutRecord::new("t", "v").partition(0)).await.unwrap_err();
    assert!(matches!(refused, Error::NotDelivered { retryable: false, .. }), "{refused:?}");
    let start = [("t".to_string(), 0, EARLIEST), ("t".to_string(), 1, EARLIEST)];
    let mut consumer = Consumer::assign(&kafka, &start[1..]).await.unwrap();
    assert_eq!(rows(&take(&mut consumer, 7).await).len(), 7);
    let mut consumer = Consumer::assign(&kafka, &start[..1]).await.unwrap();
    assert_eq!(rows(&take(&mut consumer, 2).await).last().unwrap().1, 1);
    let error = loop {
        match consumer.next(10, 1 << 20, Duration::from_millis(500)).await {
            Ok(batch) => assert!(batch.is_none(), "records behind the damage"),
            Err(error) => break error,
        }
    };
    match error {
        Error::Damaged { topic, partition, offset, .. } => {
            assert_eq!((topic.as_str(), partition, offset), ("t", 0, 2));
        }
        other => panic!("{other:?}"),
    }
    broker.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flipped_byte_in_a_closed_segment_reaches_no_consumer() {
    let dir = TempDir::new().unwrap();
    let config = broker::Config { segment_bytes_max: 1 << 10, ..broker::Config::default() };
    let broker = broker_with(dir.path(), config.clone()).await;
    let mut kafka = kafka_of(&broker);
    // As with clients that do not verify checksums.
    kafka.properties.insert("check.crcs".to_string(), "false".into());
    create_topic(&kafka, "t", 1).await.unwrap();
    let producer = Producer::connect(&kafka).await.unwrap();
    for id in 0..4u8 {
        producer.send(OutRecord::new("t", vec![id; 800])).await.unwrap();
    }
    let segment = dir.path().join("topics/t/0/00000000000000000001.log");
    std::fs::OpenOptions::new().write(true).open(&segment).unwrap().write_all_at(&[0xee], 400).unwrap();
    let mut consumer = Consumer::assign(&kafka, &[("t".to_string(), 0, EARLIEST)]).await.unwrap();
    assert_eq!(rows(&take(&mut consumer, 1).await)[0].2, Some(vec![0; 800]));
    let error = loop {
        match consumer.next(10, 1 << 20, Duration::from_millis(500)).await {
            Ok(batch) => assert!(batch.is_none(), "records behind the damage"),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::Damaged { offset: 1, .. }), "{error:?}");
    broker.stop().await.unwrap();
}
