//! Tests of our producer and consumer against the embedded broker.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bytes::Bytes;
use millrace_streams::topic::{self, Consumer, EARLIEST, LATEST, OutRecord, Producer, Records};
use millrace_streams::{Config, Error, KafkaConfig, TopicConfig, broker};
use tempfile::TempDir;

use super::{broker_in, broker_with, kafka_of, rows, take};

#[tokio::test(flavor = "multi_thread")]
async fn hundred_thousand_records_are_read_in_order_also_after_restart() {
    let dir = TempDir::new().unwrap();
    let broker = broker_in(dir.path()).await;
    let address = broker.addr();
    let kafka = kafka_of(&broker);
    assert!(topic::create_topic(&kafka, "t", 3).await.unwrap());
    assert!(!topic::create_topic(&kafka, "t", 9).await.unwrap());
    let producer = Producer::connect(&kafka).await.unwrap();
    let record = |id: i32| OutRecord::new("t", format!("value {id}")).partition(id % 3);
    let deliveries = producer.send_all((0..100_000).map(record)).await.unwrap();
    assert_eq!(deliveries.len(), 100_000);
    for (id, delivery) in deliveries.iter().enumerate() {
        assert_eq!((delivery.partition, delivery.offset), (id as i32 % 3, id as i64 / 3));
    }
    let start: Vec<_> = (0..3).map(|partition| ("t".to_string(), partition, EARLIEST)).collect();
    let mut consumer = Consumer::assign(&kafka, &start).await.unwrap();
    let check = |batches: &[arrow::array::RecordBatch], next: &mut [i64; 3]| {
        for (partition, offset, value) in rows(batches) {
            let expected = &mut next[partition as usize];
            assert_eq!(offset, *expected);
            *expected += 1;
            assert_eq!(value.unwrap(), format!("value {}", offset * 3 + i64::from(partition)).into_bytes());
        }
    };
    let mut next = [0; 3];
    check(&take(&mut consumer, 100_000).await, &mut next);
    let positions: BTreeMap<_, _> =
        (0..3).map(|partition| (("t".to_string(), partition), next[partition as usize])).collect();
    assert_eq!(consumer.positions(), &positions);

    // The same clients continue after a restart of the broker.
    broker.stop().await.unwrap();
    let broker = broker_with(dir.path(), broker::Config { listen: address, ..Default::default() }).await;
    assert_eq!(broker.addr(), address);
    producer.send_all((100_000..101_000).map(record)).await.unwrap();
    check(&take(&mut consumer, 1_000).await, &mut next);
    // So does a new consumer that starts inside the log, in the middle of a batch as well.
    let start: Vec<_> =
        (0..3).map(|partition| ("t".to_string(), partition, 33_000 + i64::from(partition))).collect();
    let mut next = [33_000, 33_001, 33_002];
    let mut consumer = Consumer::assign(&kafka, &start).await.unwrap();
    let marks = topic::watermarks(&kafka, "t").await.unwrap();
    let left = (0..3).map(|partition| marks[&partition].1 - start[partition as usize].2).sum::<i64>();
    check(&take(&mut consumer, left as usize).await, &mut next);
    broker.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn every_field_of_a_record_survives() {
    let dir = TempDir::new().unwrap();
    let broker = broker_in(dir.path()).await;
    let kafka = kafka_of(&broker);
    let producer = Producer::connect(&kafka).await.unwrap();
    let mut full = OutRecord::new("fields", "value").key("key").header("a", "1").header("a", "2");
    full.headers.push(("none".to_string(), None));
    full.timestamp_ms = Some(1_700_000_000_123);
    let empty = OutRecord { topic: "fields".to_string(), key: Some(Bytes::new()), ..OutRecord::default() };
    let bare = OutRecord { topic: "fields".to_string(), ..OutRecord::default() };
    // Producing to the topic creates it.
    for (offset, record) in [&full, &empty, &bare].into_iter().enumerate() {
        assert_eq!(producer.send(record.clone()).await.unwrap().offset, offset as i64);
    }
    let mut consumer = Consumer::assign(&kafka, &[("fields".to_string(), 0, EARLIEST)]).await.unwrap();
    let batches = take(&mut consumer, 3).await;
    let batch = arrow::compute::concat_batches(&topic::schema(), &batches).unwrap();
    let records = Records::new(&batch).unwrap();
    assert_eq!((records.topic(0), records.partition(0), records.offset(0)), ("fields", 0, 0));
    assert_eq!(records.timestamp_ms(0), Some(1_700_000_000_123));
    assert_eq!((records.key(0), records.value(0)), (Some(&b"key"[..]), Some(&b"value"[..])));
    assert_eq!(records.headers(0), [("a", Some(&b"1"[..])), ("a", Some(&b"2"[..])), ("none", None)]);
    assert_eq!((records.key(1), records.value(1)), (Some(&b""[..]), None));
    assert_eq!((records.key(2), records.value(2)), (None, None));
    assert!(records.headers(2).is_empty());
    assert!(records.timestamp_ms(2).unwrap() > 1_700_000_000_000);
    producer.flush(Duration::from_secs(5)).await.unwrap();
    assert_eq!(
        topic::list_topics(&kafka).await.unwrap(),
        [topic::TopicInfo { name: "fields".into(), partitions: 1 }]
    );
    assert!(topic::delete_topic(&kafka, "fields").await.unwrap());
    assert!(!topic::delete_topic(&kafka, "fields").await.unwrap());
    assert!(topic::list_topics(&kafka).await.unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_keep_to_rows_and_bytes() {
    let dir = TempDir::new().unwrap();
    let broker = broker_in(dir.path()).await;
    let kafka = kafka_of(&broker);
    let producer = Producer::connect(&kafka).await.unwrap();
    producer.send_all((0..2_000).map(|id| OutRecord::new("t", vec![b'x'; id % 50]))).await.unwrap();
    let mut consumer = Consumer::assign(&kafka, &[("t".to_string(), 0, EARLIEST)]).await.unwrap();
    let mut seen = 0;
    for (rows_max, bytes_max) in
        [(1, 1_000), (7, 1_000_000), (1_000, 100), (1_000, 0), (0, 0)].into_iter().cycle()
    {
        if seen == 2_000 {
            break;
        }
        let Some(batch) = consumer.next(rows_max, bytes_max, Duration::from_secs(5)).await.unwrap() else {
            panic!("{seen} records");
        };
        let records = Records::new(&batch).unwrap();
        let bytes: usize = (0..records.len()).map(|row| records.value(row).unwrap().len()).sum();
        assert!(batch.num_rows() <= rows_max.max(1));
        assert!(bytes <= bytes_max || batch.num_rows() == 1, "{bytes} of {bytes_max}");
        for row in 0..records.len() {
            assert_eq!(records.offset(row), seen);
            seen += 1;
        }
    }
    assert!(consumer.next(10, 10, Duration::from_millis(50)).await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn impossible_start_offsets_are_named() {
    let dir = TempDir::new().unwrap();
    let broker = broker_in(dir.path()).await;
    let kafka = kafka_of(&broker);
    let producer = Producer::connect(&kafka).await.unwrap();
    producer.send_all((0..10).map(|_| OutRecord::new("t", "v"))).await.unwrap();
    let assign = async |topic: &str, partition, offset| {
        Consumer::assign(&kafka, &[(topic.to_string(), partition, offset)]).await
    };
    assert!(matches!(assign("absent", 0, EARLIEST).await, Err(Error::UnknownTopic { .. })));
    assert!(topic::list_topics(&kafka).await.unwrap().iter().all(|topic| topic.name != "absent"));
    assert!(matches!(assign("t", 3, EARLIEST).await, Err(Error::UnknownPartition { partitions: 1, .. })));
    match assign("t", 0, 11).await {
        Err(error @ Error::OffsetOutOfRange { requested: 11, low: 0, high: 10, .. }) => {
            assert!(error.to_string().contains("0..=10"));
        }
        other => panic!("{other:?}"),
    }
    let mut consumer = assign("t", 0, LATEST).await.unwrap();
    assert_eq!(consumer.positions()[&("t".to_string(), 0)], 10);
    producer.send(OutRecord::new("t", "new")).await.unwrap();
    assert_eq!(rows(&take(&mut consumer, 1).await), [(0, 10, Some(b"new".to_vec()))]);
    match Consumer::subscribe(&kafka, "group", &["t"]).await {
        Err(error @ Error::GroupsUnsupported { .. }) => assert!(error.to_string().contains("assign")),
        other => panic!("{other:?}"),
    }
    match topic::create_topic(&kafka, "no spaces", 1).await {
        Err(Error::InvalidTopic { .. }) => {}
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn recreated_topic_ends_its_consumer() {
    let dir = TempDir::new().unwrap();
    let broker = broker_in(dir.path()).await;
    let kafka = kafka_of(&broker);
    let producer = Producer::connect(&kafka).await.unwrap();
    producer.send_all((0..10).map(|_| OutRecord::new("t", "v"))).await.unwrap();
    let mut consumer = Consumer::assign(&kafka, &[("t".to_string(), 0, EARLIEST)]).await.unwrap();
    take(&mut consumer, 10).await;
    topic::delete_topic(&kafka, "t").await.unwrap();
    topic::create_topic(&kafka, "t", 1).await.unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        match consumer.next(10, 10, Duration::from_millis(200)).await {
            Ok(None) if Instant::now() < deadline => {}
            Err(
                Error::OffsetOutOfRange { requested: 10, low: 0, high: 0, .. } | Error::UnknownTopic { .. },
            ) => break,
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn compressed_batches_pass_through() {
    let dir = TempDir::new().unwrap();
    let broker = broker_in(dir.path()).await;
    // librdkafka uses lz4 only with brokers that have group coordinators; protocol.rs sends an lz4 batch.
    for codec in ["gzip", "snappy", "zstd"] {
        let mut kafka = kafka_of(&broker);
        kafka.properties.insert("compression.type".to_string(), codec.into());
        let producer = Producer::connect(&kafka).await.unwrap();
        let value = |id: usize| format!("{id} ").repeat(100);
        producer.send_all((0..5_000).map(|id| OutRecord::new(codec, value(id)))).await.unwrap();
        let file = dir.path().join("topics").join(codec).join("0/00000000000000000000.log");
        assert!(std::fs::metadata(file).unwrap().len() < 500_000, "{codec} was not compressed");
        let mut consumer = Consumer::assign(&kafka, &[(codec.to_string(), 0, 2_345)]).await.unwrap();
        for (index, (_, offset, found)) in rows(&take(&mut consumer, 2_655).await).into_iter().enumerate() {
            assert_eq!(offset as usize, 2_345 + index);
            assert_eq!(found.unwrap(), value(offset as usize).into_bytes());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn large_records_pass_and_too_large_ones_are_named() {
    let dir = TempDir::new().unwrap();
    let broker = broker_in(dir.path()).await;
    let mut kafka = kafka_of(&broker);
    kafka.properties.insert("message.max.bytes".to_string(), "20000000".into());
    let producer = Producer::connect(&kafka).await.unwrap();
    producer.send(OutRecord::new("t", vec![7; 9 << 20])).await.unwrap();
    match producer.send(OutRecord::new("t", vec![7; 17 << 20])).await {
        Err(error @ Error::RecordTooLarge { .. }) => assert!(error.to_string().contains("message_bytes_max")),
        other => panic!("{other:?}"),
    }
    producer.send(OutRecord::new("t", "small")).await.unwrap();
    let mut consumer = Consumer::assign(&kafka, &[("t".to_string(), 0, EARLIEST)]).await.unwrap();
    let found = rows(&take(&mut consumer, 2).await);
    assert_eq!(found[0].2.as_ref().unwrap().len(), 9 << 20);
    assert_eq!(found[1].2.as_deref(), Some(&b"small"[..]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_is_larger_than_the_queue_is_refused_at_once() {
    let dir = TempDir::new().unwrap();
    let broker = broker_in(dir.path()).await;
    let mut kafka = kafka_of(&broker);
    kafka.properties.insert("queue.buffering.max.kbytes".to_string(), "16".into());
    let producer = Producer::connect(&kafka).await.unwrap();
    let record = |bytes: usize| OutRecord::new("t", vec![7; bytes]);
    let sent = tokio::time::timeout(Duration::from_secs(30), producer.send(record((16 << 10) + 1)));
    match sent.await.unwrap() {
        Err(error @ Error::RecordTooLarge { .. }) => {
            assert!(error.to_string().contains("queue.buffering.max.kbytes"), "{error}");
        }
        other => panic!("{other:?}"),
    }
    // A record that fills the queue has to wait for the others.
    let records = [record(9 << 10), record(20 << 10), record(16 << 10), record(1)];
    let sent = tokio::time::timeout(Duration::from_secs(30), producer.send_fitting(&records));
    assert_eq!(sent.await.unwrap().unwrap(), [1]);
    broker.stop().await.unwrap();
}

/// The client library refuses records beyond the producer's limit at once; the broker refuses whole batches.
#[tokio::test(flavor = "multi_thread")]
async fn records_that_are_too_large_do_not_keep_others_from_their_topic() {
    let dir = TempDir::new().unwrap();
    let settings = broker::Config { message_bytes_max: 20_000, ..Default::default() };
    let broker = broker_with(dir.path(), settings).await;
    for message_bytes_max in ["10000", "1000000"] {
        let topic = format!("t{message_bytes_max}");
        let mut kafka = kafka_of(&broker);
        kafka.properties.insert("message.max.bytes".to_string(), message_bytes_max.into());
        let producer = Producer::connect(&kafka).await.unwrap();
        let large = [7, 8, 40];
        let record = |id: usize| {
            let bytes = if large.contains(&id) { 50_000 } else { 1_000 };
            OutRecord::new(topic.clone(), vec![id as u8; bytes]).partition(0)
        };
        let records: Vec<OutRecord> = (0..60).map(record).collect();
        assert_eq!(producer.send_fitting(&records).await.unwrap(), large);
        let mut consumer = Consumer::assign(&kafka, &[(topic.clone(), 0, EARLIEST)]).await.unwrap();
        let found = rows(&take(&mut consumer, 57).await);
        let mut ids: Vec<usize> = found.iter().map(|row| usize::from(row.2.as_ref().unwrap()[0])).collect();
        ids.sort_unstable();
        let fitting: Vec<usize> = (0..60).filter(|id| !large.contains(id)).collect();
        assert_eq!(ids, fitting, "message.max.bytes={message_bytes_max}");
        // The producer still works.
        assert!(producer.send_fitting(&records[..3]).await.unwrap().is_empty());
    }
    broker.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn unreachable_broker_is_named_in_bounded_time() {
    // A port that was free a moment ago.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    drop(listener);
    let kafka = KafkaConfig::new(address.clone());
    let started = Instant::now();
    let start = [("t".to_string(), 0, EARLIEST)];
    let (connected, assigned, created, listed) = tokio::join!(
        Producer::connect(&kafka),
        Consumer::assign(&kafka, &start),
        topic::create_topic(&kafka, "t", 1),
        topic::list_topics(&kafka),
    );
    assert!(started.elapsed() < Duration::from_secs(15));
    let errors = [connected.err(), assigned.err(), created.err(), listed.err()];
    for (what, error) in ["connect", "assign", "create", "list"].into_iter().zip(errors) {
        let error = error.unwrap();
        assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
        assert!(error.is_retryable());
        assert!(error.to_string().contains(&address), "{error}");
        assert!(error.to_string().contains("refused"), "{what}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn default_configuration_connects_to_the_home_broker() {
    let home = TempDir::new().unwrap();
    let broker = broker_in(&broker::dir(home.path())).await;
    let config =
        Config { topics: vec![TopicConfig { name: "t".to_string(), partitions: 4 }], ..Config::default() };
    let kafka = config.kafka(home.path()).unwrap();
    assert_eq!(kafka.bootstrap_servers, broker.addr().to_string());
    topic::ensure_topics(&kafka, &config.topics).await.unwrap();
    topic::ensure_topics(&kafka, &config.topics).await.unwrap();
    assert_eq!(topic::watermarks(&kafka, "t").await.unwrap().len(), 4);
    broker.stop().await.unwrap();
    assert_eq!(config.kafka(home.path()).unwrap().bootstrap_servers, "127.0.0.1:9092");
    let mut config = config;
    config.broker.listen.set_port(0);
    assert!(matches!(config.kafka(home.path()), Err(Error::NotRunning { .. })));
    let bad = KafkaConfig { properties: [("no.such".to_string(), "1".into())].into(), ..kafka };
    assert!(matches!(Producer::connect(&bad).await, Err(Error::Config { .. })));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes 40 s: run it by name with --ignored"]
async fn lost_broker_is_named_and_reading_resumes_when_it_returns() {
    let dir = TempDir::new().unwrap();
    let broker = broker_in(dir.path()).await;
    let (kafka, address) = (kafka_of(&broker), broker.addr());
    let producer = Producer::connect(&kafka).await.unwrap();
    producer.send(OutRecord::new("t", "before")).await.unwrap();
    let mut consumer = Consumer::assign(&kafka, &[("t".to_string(), 0, EARLIEST)]).await.unwrap();
    take(&mut consumer, 1).await;
    broker.stop().await.unwrap();
    let started = Instant::now();
    let (sent, received) = tokio::join!(
        producer.send(OutRecord::new("t", "meanwhile")),
        consumer.next(10, 10, Duration::from_secs(60)),
    );
    assert!(started.elapsed() < Duration::from_secs(50), "{:?}", started.elapsed());
    for error in [sent.err(), received.err()] {
        let error = error.unwrap();
        assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
        assert!(error.to_string().contains(&address.to_string()), "{error}");
    }
    let broker = broker_with(dir.path(), broker::Config { listen: address, ..Default::default() }).await;
    producer.send(OutRecord::new("t", "after")).await.unwrap();
    assert_eq!(rows(&take(&mut consumer, 1).await)[0].2.as_deref(), Some(&b"after"[..]));
    broker.stop().await.unwrap();
}
