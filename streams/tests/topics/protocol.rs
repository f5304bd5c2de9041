//! Tests of the broker's answers on the wire.

use std::time::{Duration, Instant};

use bytes::Bytes;
use kafka_protocol::messages::fetch_request::{FetchPartition, FetchTopic};
use kafka_protocol::messages::fetch_response::PartitionData;
use kafka_protocol::messages::list_offsets_request::{ListOffsetsPartition, ListOffsetsTopic};
use kafka_protocol::messages::{
    ApiKey, ApiVersionsRequest, ApiVersionsResponse, CreateTopicsRequest, CreateTopicsResponse, FetchRequest,
    FetchResponse, InitProducerIdRequest, InitProducerIdResponse, ListOffsetsRequest, ListOffsetsResponse,
    MetadataRequest, MetadataResponse, create_topics_request, metadata_request,
};
use kafka_protocol::protocol::StrBytes;
use millrace_streams::topic::{self, Consumer, EARLIEST};
use tempfile::TempDir;

use super::wire::{Wire, batch, name, produce_request, records, single};
use super::{broker_in, kafka_of, rows, take};

fn fetch_request(topic: &str, offset: i64, wait_ms: i32, bytes_min: i32) -> FetchRequest {
    let partition = FetchPartition::default()
        .with_partition(0)
        .with_fetch_offset(offset)
        .with_partition_max_bytes(1 << 20);
    FetchRequest::default()
        .with_replica_id((-1).into())
        .with_max_wait_ms(wait_ms)
        .with_min_bytes(bytes_min)
        .with_max_bytes(1 << 20)
        .with_session_epoch(-1)
        .with_topics(vec![FetchTopic::default().with_topic(name(topic)).with_partitions(vec![partition])])
}

fn only(mut response: FetchResponse) -> PartitionData {
    response.responses.remove(0).partitions.remove(0)
}

fn create(wire: &mut Wire, topic: &str) {
    let topics = Some(vec![metadata_request::MetadataRequestTopic::default().with_name(Some(name(topic)))]);
    let request = MetadataRequest::default().with_topics(topics).with_allow_auto_topic_creation(true);
    let response: MetadataResponse = wire.ask(ApiKey::Metadata, 8, &request);
    assert_eq!(response.topics[0].error_code, 0);
    assert_eq!(response.topics[0].partitions.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn batch_sent_twice_is_stored_once() {
    let dir = TempDir::new().unwrap();
    let broker = broker_in(dir.path()).await;
    let address = broker.addr();
    let mut wire = Wire::connect(address);
    create(&mut wire, "t");
    let init = InitProducerIdRequest::default().with_transactional_id(None);
    let id: InitProducerIdResponse = wire.ask(ApiKey::InitProducerId, 1, &init);
    let other: InitProducerIdResponse = wire.ask(ApiKey::InitProducerId, 1, &init);
    assert_eq!((id.error_code, id.producer_epoch), (0, 0));
    assert_ne!(id.producer_id, other.producer_id);
    let id = id.producer_id.0;
    for sequence in 0..7 {
        let sent = single((id, 0, sequence), b"v");
        assert_eq!(wire.produce("t", sent.clone()).base_offset, i64::from(sequence));
        assert_eq!(wire.produce("t", sent).base_offset, i64::from(sequence), "again");
    }
    assert_eq!(wire.produce("t", single((id, 0, 2), b"v")).base_offset, 2, "the fifth last");
    let older = wire.produce("t", single((id, 0, 1), b"v"));
    assert_eq!((older.error_code, older.base_offset), (46, -1), "known to be there, not where");
    let gap = wire.produce("t", single((id, 0, 8), b"v"));
    assert_eq!(gap.error_code, 45);
    assert!(gap.error_message.unwrap().contains("missing"));
    assert_eq!(wire.produce("t", single((other.producer_id.0, 0, 3), b"v")).error_code, 59);

    broker.stop().await.unwrap();
    let broker = broker_in(dir.path()).await;
    let mut wire = Wire::connect(broker.addr());
    assert_eq!(wire.produce("t", single((id, 0, 5), b"v")).base_offset, 5, "known after a restart");
    assert_eq!(wire.produce("t", single((id, 0, 7), b"v")).base_offset, 7);
    let fresh: InitProducerIdResponse = wire.ask(ApiKey::InitProducerId, 1, &init);
    assert!(fresh.producer_id.0 > id + 1, "ids are never given out twice");
    let mut consumer = Consumer::assign(&kafka_of(&broker), &[("t".to_string(), 0, EARLIEST)]).await.unwrap();
    let offsets: Vec<i64> =
        rows(&take(&mut consumer, 8).await).into_iter().map(|(_, offset, _)| offset).collect();
    assert_eq!(offsets, (0..8).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn api_versions_are_answered_in_every_version() {
    let dir = TempDir::new().unwrap();
    let broker = broker_in(dir.path()).await;
    let mut wire = Wire::connect(broker.addr());
    for version in 0..=3 {
        let request = ApiVersionsRequest::default()
            .with_client_software_name(StrBytes::from_static_str(if version == 3 { "test" } else { "" }))
            .with_client_software_version(StrBytes::from_static_str(if version == 3 { "1" } else { "" }));
        let response: ApiVersionsResponse = wire.ask(ApiKey::ApiVersions, version, &request);
        assert_eq!(response.error_code, 0);
        let keys: Vec<i16> = response.api_keys.iter().map(|key| key.api_key).collect();
        assert_eq!(keys, [0, 1, 2, 3, 18, 19, 20, 22]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_batch_gets_the_matching_error_code() {
    let dir = TempDir::new().unwrap();
    let broker = broker_in(dir.path()).await;
    let mut wire = Wire::connect(broker.addr());
    create(&mut wire, "t");
    let good = single((-1, -1, -1), b"v");
    let mut bad_crc = good.to_vec();
    *bad_crc.last_mut().unwrap() ^= 1;
    let mut old_format = good.to_vec();
    old_format[16] = 1;
    let two = Bytes::from([&good[..], &good[..]].concat());
    let cases = [
        (Bytes::from(bad_crc), 2),
        (Bytes::from(old_format), 43),
        (good.slice(..40), 2),
        (Bytes::new(), 2),
        (two, 87),
        (batch((-1, -1, -1), 0x10, 1, &records(&[b"transaction"])), 87),
        (batch((-1, -1, -1), 0, 2, &records(&[b"one instead of two"])), 87),
    ];
    for (records, code) in cases {
        let response = wire.produce("t", records);
        assert_eq!((response.error_code, response.base_offset), (code, -1));
        assert!(response.error_message.is_some());
    }
    assert_eq!(wire.produce("absent", good.clone()).error_code, 3);
    // Without acknowledgements only a closed connection reports a failure; success is silent.
    wire.send(ApiKey::Produce, 7, &produce_request("t", 0, good.clone()));
    assert_eq!(wire.produce("t", good.clone()).base_offset, 1);
    wire.send(ApiKey::Produce, 7, &produce_request("absent", 0, good));
    assert!(wire.is_closed());
}

#[tokio::test(flavor = "multi_thread")]
async fn fetch_waits_for_min_bytes_or_max_wait() {
    let dir = TempDir::new().unwrap();
    let broker = broker_in(dir.path()).await;
    let address = broker.addr();
    let mut wire = Wire::connect(address);
    create(&mut wire, "t");
    for version in 4..=11 {
        let empty = only(wire.ask(ApiKey::Fetch, version, &fetch_request("t", 0, 0, 1)));
        assert_eq!((empty.error_code, empty.high_watermark), (0, 0));
        assert!(empty.records.unwrap_or_default().is_empty());
    }
    let started = Instant::now();
    only(wire.ask(ApiKey::Fetch, 11, &fetch_request("t", 0, 150, 1)));
    assert!(started.elapsed() >= Duration::from_millis(150), "it comes back only after the wait");

    // An append wakes the waiting fetch.
    wire.send(ApiKey::Fetch, 11, &fetch_request("t", 0, 20_000, 1));
    let mut producer = Wire::connect(address);
    let started = Instant::now();
    producer.produce("t", single((-1, -1, -1), b"one"));
    let woken = only(wire.receive(ApiKey::Fetch, 11));
    assert!(started.elapsed() < Duration::from_secs(5));
    assert_eq!(woken.high_watermark, 1);
    let size = woken.records.unwrap().len();

    // A minimum that the first new record does not reach.
    wire.send(ApiKey::Fetch, 11, &fetch_request("t", 1, 20_000, size as i32 * 2));
    producer.produce("t", single((-1, -1, -1), b"two"));
    producer.produce("t", single((-1, -1, -1), b"333"));
    assert_eq!(only(wire.receive(ApiKey::Fetch, 11)).records.unwrap().len(), size * 2);

    let beyond = only(wire.ask(ApiKey::Fetch, 11, &fetch_request("t", 4, 20_000, 1)));
    assert_eq!(beyond.error_code, 1, "offset out of range is told at once");
    assert_eq!(only(wire.ask(ApiKey::Fetch, 11, &fetch_request("absent", 0, 20_000, 1))).error_code, 3);

    // The broker declines sessions; an unknown session id is an error.
    let session: FetchResponse =
        wire.ask(ApiKey::Fetch, 11, &fetch_request("t", 0, 0, 1).with_session_epoch(0));
    assert_eq!((session.error_code, session.session_id), (0, 0));
    let unknown: FetchResponse =
        wire.ask(ApiKey::Fetch, 11, &fetch_request("t", 0, 0, 1).with_session_id(9).with_session_epoch(1));
    assert_eq!(unknown.error_code, 70);

    // A broker that stops does not wait for long polls.
    wire.send(ApiKey::Fetch, 11, &fetch_request("t", 3, 60_000, 1));
    let started = Instant::now();
    broker.stop().await.unwrap();
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[tokio::test(flavor = "multi_thread")]
async fn offsets_are_listed_by_position_and_time() {
    let dir = TempDir::new().unwrap();
    let broker = broker_in(dir.path()).await;
    let mut wire = Wire::connect(broker.addr());
    create(&mut wire, "t");
    for _ in 0..3 {
        wire.produce("t", single((-1, -1, -1), b"v"));
    }
    let mut list = |timestamp: i64, topic: &str| {
        let partition = ListOffsetsPartition::default().with_partition_index(0).with_timestamp(timestamp);
        let topics =
            vec![ListOffsetsTopic::default().with_name(name(topic)).with_partitions(vec![partition])];
        let request = ListOffsetsRequest::default().with_replica_id((-1).into()).with_topics(topics);
        let mut answer: ListOffsetsResponse = wire.ask(ApiKey::ListOffsets, 5, &request);
        let found = answer.topics.remove(0).partitions.remove(0);
        (found.error_code, found.offset, found.timestamp)
    };
    assert_eq!(list(-2, "t"), (0, 0, -1));
    assert_eq!(list(-1, "t"), (0, 3, -1));
    assert_eq!(list(1_000, "t"), (0, 0, 1_000));
    assert_eq!(list(1_001, "t"), (0, -1, -1));
    assert_eq!(list(-7, "t").0, 35);
    assert_eq!(list(-1, "absent").0, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn lz4_passes_through() {
    let dir = TempDir::new().unwrap();
    let broker = broker_in(dir.path()).await;
    let mut wire = Wire::connect(broker.addr());
    create(&mut wire, "t");
    let plain = records(&[b"first", b"second", b"third"]);
    // An LZ4 frame (version 1, independent blocks of at most 64 KiB, header checksum 0x82) with
    // one stored block and the end mark.
    let mut frame = vec![0x04, 0x22, 0x4d, 0x18, 0x60, 0x40, 0x82];
    frame.extend((plain.len() as u32 | 1 << 31).to_le_bytes());
    frame.extend(&plain);
    frame.extend([0; 4]);
    let response = wire.produce("t", batch((-1, -1, -1), 3, 3, &frame));
    assert_eq!((response.error_code, response.base_offset), (0, 0));
    let mut consumer = Consumer::assign(&kafka_of(&broker), &[("t".to_string(), 0, 1)]).await.unwrap();
    let values: Vec<_> =
        rows(&take(&mut consumer, 2).await).into_iter().map(|(_, _, value)| value.unwrap()).collect();
    assert_eq!(values, [b"second".to_vec(), b"third".to_vec()]);
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_that_no_consumer_can_decode_are_refused() {
    let dir = TempDir::new().unwrap();
    let broker = broker_in(dir.path()).await;
    let mut wire = Wire::connect(broker.addr());
    create(&mut wire, "t");
    for (codec, error) in [(1, 2), (2, 2), (3, 2), (4, 2), (5, 76)] {
        let response = wire.produce("t", batch((-1, -1, -1), codec, 3, &[0xa5; 64]));
        assert_eq!(response.error_code, error, "codec {codec}: {:?}", response.error_message);
    }
    assert_eq!(topic::watermarks(&kafka_of(&broker), "t").await.unwrap()[&0], (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_topic_settings_are_refused() {
    let dir = TempDir::new().unwrap();
    let broker = broker_in(dir.path()).await;
    let mut wire = Wire::connect(broker.addr());
    let topic = |name_of: &str, partitions, replicas| {
        create_topics_request::CreatableTopic::default()
            .with_name(name(name_of))
            .with_num_partitions(partitions)
            .with_replication_factor(replicas)
    };
    let setting = create_topics_request::CreatableTopicConfig::default()
        .with_name(StrBytes::from_static_str("retention.ms"))
        .with_value(Some(StrBytes::from_static_str("1")));
    let topics = vec![
        topic("a", 2, 1),
        topic("a", 2, 1),
        topic("b", 2, 3),
        topic("c", 0, 1),
        topic("d", 100_000, 1),
        topic("e", 1, 1).with_configs(vec![setting]),
        topic("f/g", 1, 1),
        topic("h", -1, -1),
    ];
    let request = CreateTopicsRequest::default().with_topics(topics).with_timeout_ms(1_000);
    let response: CreateTopicsResponse = wire.ask(ApiKey::CreateTopics, 4, &request);
    let codes: Vec<i16> = response.topics.iter().map(|topic| topic.error_code).collect();
    assert_eq!(codes, [0, 36, 38, 37, 44, 40, 17, 0]);
    let dry = CreateTopicsRequest::default().with_topics(vec![topic("z", 1, 1)]).with_validate_only(true);
    let response: CreateTopicsResponse = wire.ask(ApiKey::CreateTopics, 4, &dry);
    assert_eq!(response.topics[0].error_code, 0);
    let all: MetadataResponse = wire.ask(ApiKey::Metadata, 1, &MetadataRequest::default().with_topics(None));
    let names: Vec<&str> =
        all.topics.iter().filter_map(|topic| topic.name.as_ref()).map(|name| name.0.as_str()).collect();
    assert_eq!(names, ["a", "h"]);
}
