//! Tests of hostile input: the broker closes that connection and serves the others.

use std::io::Write;
use std::net::{Shutdown, SocketAddr};
use std::time::{Duration, Instant};

use bytes::{BufMut, BytesMut};
use kafka_protocol::messages::metadata_request::MetadataRequestTopic;
use kafka_protocol::messages::{
    ApiKey, ApiVersionsRequest, ApiVersionsResponse, MetadataRequest, MetadataResponse,
};
use millrace_streams::broker;
use tempfile::TempDir;

use super::wire::{Wire, name};
use super::{broker_in, broker_with};

fn serves(address: SocketAddr) {
    let mut wire = Wire::connect(address);
    let answer: ApiVersionsResponse = wire.ask(ApiKey::ApiVersions, 0, &ApiVersionsRequest::default());
    assert_eq!(answer.error_code, 0);
}

fn frame(length: i32, body: &[u8]) -> Vec<u8> {
    [&length.to_be_bytes()[..], body].concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_closes_its_connection_only() {
    let dir = TempDir::new().unwrap();
    let broker = broker_in(dir.path()).await;
    let address = broker.addr();
    let mut kept = Wire::connect(address);
    // Key 3 (metadata), version 4, correlation id, no client id, then a count of two billion.
    let liar = [&[0, 3, 0, 4, 0, 0, 0, 1, 0xff, 0xff][..], &i32::MAX.to_be_bytes(), &[1]].concat();
    let cases: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        vec![0x16, 0x03, 0x01, 0x02, 0x00, 0x01, 0x00],
        b"SSH-2.0-OpenSSH_9.9\r\n".to_vec(),
        vec![0xff; 1_000],
        vec![0; 1_000],
        frame(-1, &[]),
        frame(i32::MIN, &[1; 100]),
        frame(i32::MAX, &[1; 100]),
        frame(7, &[0, 18, 0, 0, 0, 0, 0]),
        frame(8, &[0, 99, 0, 0, 0, 0, 0, 1]),
        frame(8, &[0x80, 0, 0, 0, 0, 0, 0, 1]),
        frame(8, &[0, 1, 0, 17, 0, 0, 0, 1]),
        frame(liar.len() as i32, &liar),
        // A client id longer than its frame, and a negative one.
        frame(12, &[0, 3, 0, 4, 0, 0, 0, 1, 0x7f, 0xff, b'x', b'y']),
        frame(10, &[0, 3, 0, 4, 0, 0, 0, 1, 0x80, 0x00]),
    ];
    for case in cases {
        let mut wire = Wire::connect(address);
        // The broker may close before everything is written.
        let _ = wire.0.write_all(&case);
        assert!(wire.is_closed(), "{case:?}");
    }
    serves(address);
    let answer: ApiVersionsResponse = kept.ask(ApiKey::ApiVersions, 0, &ApiVersionsRequest::default());
    assert_eq!(answer.error_code, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_end_early_are_dropped_at_every_byte() {
    let dir = TempDir::new().unwrap();
    let broker = broker_in(dir.path()).await;
    let mut whole = BytesMut::new();
    whole.put_slice(&[0, 3, 0, 4, 0, 0, 0, 1, 0xff, 0xff]);
    whole.put_slice(&[0, 0, 0, 1, 0, 3]);
    whole.put_slice(b"abc");
    whole.put_u8(1);
    for cut in 0..whole.len() {
        let mut wire = Wire::connect(broker.addr());
        wire.0.write_all(&frame(whole.len() as i32, &whole[..cut])).unwrap();
        wire.0.shutdown(Shutdown::Write).unwrap();
        assert!(wire.is_closed());
        // The same bytes under their true length: a whole frame with a truncated request inside.
        if cut >= 8 {
            let mut wire = Wire::connect(broker.addr());
            wire.0.write_all(&frame(cut as i32, &whole[..cut])).unwrap();
            assert!(wire.is_closed(), "{cut} bytes");
        }
    }
    serves(broker.addr());
    assert!(!dir.path().join("topics/abc").exists(), "half a request did something");
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_and_sizes_have_limits() {
    let dir = TempDir::new().unwrap();
    let config = broker::Config {
        connections_max: 4,
        request_bytes_max: 2_000,
        message_bytes_max: 1_000,
        memory_bytes_max: 4_000,
        ..broker::Config::default()
    };
    let broker = broker_with(dir.path(), config).await;
    let mut wires: Vec<Wire> = (0..4).map(|_| Wire::connect(broker.addr())).collect();
    for wire in &mut wires {
        let _: ApiVersionsResponse = wire.ask(ApiKey::ApiVersions, 0, &ApiVersionsRequest::default());
    }
    assert!(Wire::connect(broker.addr()).is_closed());
    wires[0].0.write_all(&frame(2_001, &[])).unwrap();
    assert!(wires.remove(0).is_closed());
    // The broker accepts a new connection in its place.
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let mut wire = Wire::connect(broker.addr());
        wire.send(ApiKey::ApiVersions, 0, &ApiVersionsRequest::default());
        if !wire.is_closed() {
            break;
        }
        assert!(Instant::now() < deadline);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn repeated_topic_name_is_answered_once() {
    let dir = TempDir::new().unwrap();
    let broker = broker_in(dir.path()).await;
    let mut wire = Wire::connect(broker.addr());
    let topic = MetadataRequestTopic::default().with_name(Some(name("t")));
    let request = MetadataRequest::default()
        .with_topics(Some(vec![topic; 40_000]))
        .with_allow_auto_topic_creation(true);
    let answer: MetadataResponse = wire.ask(ApiKey::Metadata, 4, &request);
    assert_eq!(answer.topics.len(), 1);
    broker.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn hanging_client_does_not_block_broker_stop() {
    let dir = TempDir::new().unwrap();
    let broker = broker_in(dir.path()).await;
    let mut wire = Wire::connect(broker.addr());
    let _: ApiVersionsResponse = wire.ask(ApiKey::ApiVersions, 0, &ApiVersionsRequest::default());
    wire.0.write_all(&frame(1_000, &[0, 3, 0, 4])).unwrap();
    let started = Instant::now();
    broker.stop().await.unwrap();
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn unsent_announced_bytes_do_not_block_other_requests() {
    let dir = TempDir::new().unwrap();
    let broker = broker_in(dir.path()).await;
    let kafka = super::kafka_of(&broker);
    millrace_streams::topic::create_topic(&kafka, "t", 1).await.unwrap();
    let mut announced: Vec<Wire> = (0..3).map(|_| Wire::connect(broker.addr())).collect();
    for wire in &mut announced {
        wire.0.write_all(&frame(100 << 20, &[0; 16])).unwrap();
    }
    let mut wire = Wire::connect(broker.addr());
    let answer = wire.produce("t", super::wire::single((5, 0, 0), &[1; 4 << 20]));
    assert_eq!(answer.error_code, 0);
    broker.stop().await.unwrap();
}
