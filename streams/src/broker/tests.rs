//! Tests of the broker below its socket: hostile requests, topics, durability, locks.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use futures::FutureExt;
use kafka_protocol::messages::fetch_request::{FetchPartition, FetchTopic};
use kafka_protocol::messages::{
    ApiKey, ApiVersionsResponse, FetchRequest, FetchResponse, ResponseHeader, TopicName,
};
use kafka_protocol::protocol::{Decodable, Encodable, StrBytes};
use proptest::prelude::*;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

use super::api::{self, Reply, SPOKEN};
use super::log::segments::Retention;
use super::log::tests::batch;
use super::memory::{Memory, MemoryReservation};
use super::store::Store;
use super::{Broker, BrokerState, Config, Flush, code, running_address, shape};
use crate::error::Error;

fn shared(dir: &TempDir, config: Config) -> BrokerState {
    BrokerState {
        store: Store::open(dir.path(), &config).unwrap(),
        config,
        stopping: CancellationToken::new(),
        memory: Memory::new(2 << 20, 1 << 20),
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

fn config_on_free_port() -> Config {
    Config { listen: SocketAddr::from(([127, 0, 0, 1], 0)), ..Config::default() }
}

async fn ask(shared: &BrokerState, key: i16, version: i16, body: &[u8]) -> Reply {
    let mut frame = BytesMut::new();
    frame.put_i16(key);
    frame.put_i16(version);
    frame.put_i32(77);
    frame.put_i16(-1);
    if key == ApiKey::ApiVersions as i16 && version >= 3 {
        frame.put_u8(0);
    }
    frame.extend_from_slice(body);
    api::answer(shared, SocketAddr::from(([127, 0, 0, 1], 1)), frame.freeze(), MemoryReservation::default())
        .await
}

#[test]
fn unsupported_api_versions_are_answered_in_version_0() {
    let dir = TempDir::new().unwrap();
    let shared = shared(&dir, config_on_free_port());
    runtime().block_on(async {
        let Reply::Frame { frame, .. } = ask(&shared, ApiKey::ApiVersions as i16, 9, &[]).await else {
            panic!("no answer");
        };
        let mut body = frame.slice(4..);
        assert_eq!(ResponseHeader::decode(&mut body, 0).unwrap().correlation_id, 77);
        let answer = ApiVersionsResponse::decode(&mut body, 0).unwrap();
        assert_eq!(answer.error_code, code::UNSUPPORTED_VERSION);
        assert_eq!(answer.api_keys.len(), SPOKEN.len());
        // Other requests are not supported: the broker closes the connection.
        assert!(matches!(ask(&shared, ApiKey::FindCoordinator as i16, 0, &[0, 0]).await, Reply::Close(_)));
        assert!(matches!(ask(&shared, ApiKey::Fetch as i16, 12, &[]).await, Reply::Close(_)));
        assert!(matches!(ask(&shared, 9_999, 0, &[]).await, Reply::Close(_)));
        assert!(matches!(ask(&shared, -1, 0, &[]).await, Reply::Close(_)));
    });
}

#[test]
fn announced_counts_do_not_allocate_memory() {
    let huge = [&i32::MAX.to_be_bytes()[..], &[0; 40]].concat();
    assert!(shape::check(ApiKey::Metadata, 4, &huge).is_err());
    assert!(shape::check(ApiKey::Metadata, 4, &(-2i32).to_be_bytes()).is_err());
    assert!(shape::check(ApiKey::Metadata, 4, &(-1i32).to_be_bytes()).is_ok());
    // Too many elements are refused even when all of them are present.
    let many = [&200_000i32.to_be_bytes()[..], &vec![0; 400_000]].concat();
    assert!(shape::check(ApiKey::Metadata, 4, &many).is_err());
    // Every supported request, filled with large numbers only.
    for (key, low, high) in SPOKEN {
        for version in *low..=*high {
            // These requests have no arrays.
            if !matches!(key, ApiKey::ApiVersions | ApiKey::InitProducerId) {
                assert!(shape::check(*key, version, &[0x7f; 4_000]).is_err(), "{key:?} {version}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Random bodies under every supported key are answered or refused; none panics.
    #[test]
    fn random_requests_do_not_crash_the_broker(
        which in 0..SPOKEN.len(),
        version in 0i16..16,
        body in prop::collection::vec(prop_oneof![3 => Just(0u8), 1 => Just(1u8), 1 => any::<u8>()], 0..200),
    ) {
        thread_local! {
            static PLACE: (TempDir, tokio::runtime::Runtime) = (TempDir::new().unwrap(), runtime());
        }
        PLACE.with(|(dir, runtime)| {
            let shared = shared(dir, config_on_free_port());
            let (key, low, high) = SPOKEN[which];
            let version = low + version % (high - low + 1);
            // Long polls of random length would only wait.
            shared.stopping.cancel();
            runtime.block_on(async {
                let _ = ask(&shared, key as i16, version, &body).await;
            });
        });
    }
}

#[tokio::test]
async fn topics_survive_restart_and_limits_are_enforced() {
    let dir = TempDir::new().unwrap();
    let config = Config { partitions_max: 5, ..config_on_free_port() };
    {
        let store = Store::open(dir.path(), &config).unwrap();
        store.create("a", 2).unwrap();
        store.create("b", 3).unwrap();
        assert_eq!(store.create("a", 1).unwrap_err().code, code::TOPIC_ALREADY_EXISTS);
        assert_eq!(store.create("c", 1).unwrap_err().code, code::POLICY_VIOLATION);
        for bad in ["", ".", "..", "a/b", "ü", "a b"] {
            assert_eq!(store.create(bad, 1).unwrap_err().code, code::INVALID_TOPIC, "{bad:?}");
        }
        assert_eq!(store.create("c", 0).unwrap_err().code, code::INVALID_PARTITIONS);
        assert_eq!(store.new_producer_id().unwrap(), 0);
        assert_eq!(store.new_producer_id().unwrap(), 1);
        store.partition("a", 1).unwrap().append(&batch((-1, -1, -1), 0, &[b"v"])).unwrap();
        store.delete("b").unwrap();
        assert_eq!(store.delete("b").unwrap_err().code, code::UNKNOWN_TOPIC_OR_PARTITION);
        // The files of an unfinished creation do not return as records.
        std::fs::create_dir_all(dir.path().join("topics/c/0")).unwrap();
        std::fs::write(dir.path().join("topics/c/0/00000000000000000000.log"), b"old").unwrap();
        store.create("c", 1).unwrap();
        assert_eq!(store.partition("c", 0).unwrap().high_watermark(), 0);
    }
    let store = Store::open(dir.path(), &config).unwrap();
    assert_eq!(store.list().into_iter().collect::<Vec<_>>(), [("a".to_string(), 2), ("c".to_string(), 1)]);
    assert_eq!(store.partition("a", 1).unwrap().high_watermark(), 1);
    assert!(store.new_producer_id().unwrap() > 1, "ids are never given out twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn flushed_batches_become_visible_together() {
    let dir = TempDir::new().unwrap();
    let store = Store::open(dir.path(), &Config { flush: Flush::Always, ..config_on_free_port() }).unwrap();
    store.create("t", 1).unwrap();
    let partition = store.partition("t", 0).unwrap();
    partition.append(&batch((-1, -1, -1), 0, &[b"v"])).unwrap();
    assert_eq!(partition.high_watermark(), 0, "not durable yet");
    let mut writers = Vec::new();
    for _ in 0..20 {
        let partition = partition.clone();
        writers.push(tokio::spawn(async move {
            let offset = partition.append(&batch((-1, -1, -1), 0, &[b"v"])).unwrap();
            partition.wait_durable().await.unwrap();
            assert!(partition.high_watermark() > offset);
        }));
    }
    for writer in writers {
        writer.await.unwrap();
    }
    assert_eq!(partition.high_watermark(), 21);
}

#[tokio::test]
async fn second_broker_on_a_directory_is_refused_with_the_holders_address() {
    let dir = TempDir::new().unwrap();
    assert_eq!(running_address(dir.path()), None);
    let broker = Broker::start(config_on_free_port(), dir.path(), CancellationToken::new()).await.unwrap();
    assert_eq!(running_address(dir.path()), Some(broker.addr()));
    match Broker::start(config_on_free_port(), dir.path(), CancellationToken::new()).await {
        Err(Error::HeldByAnother { pid, .. }) => assert_eq!(pid, std::process::id().to_string()),
        other => panic!("{other:?}"),
    }
    let other = TempDir::new().unwrap();
    let config = Config { listen: broker.addr(), ..config_on_free_port() };
    match Broker::start(config, other.path(), CancellationToken::new()).await {
        Err(error @ Error::AddressTaken { .. }) => {
            assert!(error.to_string().contains(&broker.addr().to_string()));
            assert!(error.to_string().contains("streams.broker.listen"));
        }
        other => panic!("{other:?}"),
    }
    broker.stop().await.unwrap();
    assert_eq!(running_address(dir.path()), None);
    let cancel = CancellationToken::new();
    let broker = Broker::start(config_on_free_port(), dir.path(), cancel.clone()).await.unwrap();
    cancel.cancel();
    broker.stopped().await.unwrap();
}

#[tokio::test]
async fn probing_for_a_broker_does_not_block_its_start() {
    let dir = TempDir::new().unwrap();
    let looking = Arc::new(std::sync::atomic::AtomicBool::new(true));
    let lookers: Vec<_> = (0..2)
        .map(|_| {
            let (looking, path) = (looking.clone(), dir.path().to_path_buf());
            std::thread::spawn(move || {
                while looking.load(std::sync::atomic::Ordering::Relaxed) {
                    let _ = running_address(&path);
                }
            })
        })
        .collect();
    for _ in 0..20 {
        let broker =
            Broker::start(config_on_free_port(), dir.path(), CancellationToken::new()).await.unwrap();
        broker.stop().await.unwrap();
    }
    looking.store(false, std::sync::atomic::Ordering::Relaxed);
    for looker in lookers {
        looker.join().unwrap();
    }
}

#[tokio::test]
async fn a_newer_format_and_a_damaged_file_are_refused() {
    let dir = TempDir::new().unwrap();
    std::fs::write(dir.path().join("meta.json"), r#"{"format_version": 2, "new": true}"#).unwrap();
    assert!(matches!(
        Store::open(dir.path(), &config_on_free_port()),
        Err(Error::NewerFormat { found: 2, supported: 1, .. })
    ));
    std::fs::write(dir.path().join("meta.json"), b"{").unwrap();
    assert!(matches!(Store::open(dir.path(), &config_on_free_port()), Err(Error::DamagedMeta { .. })));
    for unusable in [
        Config { partitions_default: 0, ..config_on_free_port() },
        Config { connections_max: 0, ..config_on_free_port() },
    ] {
        assert!(matches!(
            Broker::start(unusable, dir.path(), CancellationToken::new()).await,
            Err(Error::Config { .. })
        ));
    }
}

#[test]
fn a_frame_is_released_before_its_answer_is_reserved() {
    // With memory for one large request only, a fetch must not wait for its frame's memory.
    let dir = TempDir::new().unwrap();
    let shared = shared(&dir, config_on_free_port());
    shared.stopping.cancel();
    runtime().block_on(async {
        let reservation = shared.memory.reserve(usize::MAX).await;
        let mut frame = BytesMut::new();
        frame.put_slice(&[0, 1, 0, 4, 0, 0, 0, 1, 0xff, 0xff]);
        frame.put_slice(&[0; 17]);
        frame.put_i32(0);
        let local = SocketAddr::from(([127, 0, 0, 1], 1));
        assert!(matches!(
            api::answer(&shared, local, Bytes::from(frame), reservation).await,
            Reply::Frame { .. }
        ));
    });
}

/// A broker with 1 MiB for responses and 100 small batches of topic `t`, and the bytes of one batch.
fn broker_with_small_batches(dir: &TempDir) -> (BrokerState, usize) {
    let shared = shared(dir, config_on_free_port());
    shared.store.create("t", 1).unwrap();
    let small = batch((-1, -1, -1), 0, &[&[7; 100]]);
    append(&shared, &small, 100);
    (shared, small.len())
}

fn append(shared: &BrokerState, records: &[u8], times: usize) {
    let partition = shared.store.partition("t", 0).unwrap();
    for _ in 0..times {
        partition.append(records).unwrap();
    }
}

/// Fetches partition 0 of topic `t` from `offset` on, and returns the bytes of its records.
async fn fetch(shared: &BrokerState, offset: i64, partition_bytes_max: i32) -> usize {
    let partition =
        FetchPartition::default().with_fetch_offset(offset).with_partition_max_bytes(partition_bytes_max);
    let topic = FetchTopic::default()
        .with_topic(TopicName(StrBytes::from_static_str("t")))
        .with_partitions(vec![partition]);
    let request = FetchRequest::default().with_max_bytes(i32::MAX).with_topics(vec![topic]);
    let mut body = BytesMut::new();
    request.encode(&mut body, 4).unwrap();
    let Reply::Frame { frame, .. } = ask(shared, ApiKey::Fetch as i16, 4, &body).await else {
        panic!("no answer");
    };
    let mut body = frame.slice(4..);
    ResponseHeader::decode(&mut body, 0).unwrap();
    let response = FetchResponse::decode(&mut body, 4).unwrap();
    let partition = &response.responses[0].partitions[0];
    assert_eq!(partition.error_code, code::NONE);
    partition.records.as_ref().map_or(0, Bytes::len)
}

#[tokio::test]
async fn a_fetch_reads_no_more_than_it_has_reserved() {
    let dir = TempDir::new().unwrap();
    let (shared, small) = broker_with_small_batches(&dir);
    let rest = shared.memory.reserve(usize::MAX).await;
    let mut fetched = std::pin::pin!(fetch(&shared, 0, i32::MAX));
    assert!((&mut fetched).now_or_never().is_none(), "there is no memory");
    append(&shared, &batch((-1, -1, -1), 0, &[&vec![7; 900_000]]), 3);
    drop(rest);
    assert_eq!(fetched.await, 100 * small, "the size at the time of the reservation");
}

#[tokio::test]
async fn a_batch_that_is_larger_than_the_limits_of_a_fetch_is_reserved_as_a_whole() {
    let dir = TempDir::new().unwrap();
    let (shared, _) = broker_with_small_batches(&dir);
    let large = batch((-1, -1, -1), 0, &[&vec![7; 300_000]]);
    append(&shared, &large, 2);
    let rest = shared.memory.reserve(700_000).await;
    let mut fetched = std::pin::pin!(fetch(&shared, 100, 1));
    assert!((&mut fetched).now_or_never().is_none(), "the batch and its copy need 600 kB");
    drop(rest);
    assert_eq!(fetched.await, large.len());
}

#[tokio::test]
async fn missing_partition_folder_damages_only_that_partition() {
    let dir = TempDir::new().unwrap();
    let value = batch((-1, -1, -1), 0, &[b"v"]);
    {
        let store = Store::open(dir.path(), &config_on_free_port()).unwrap();
        store.create("t", 2).unwrap();
        store.partition("t", 0).unwrap().append(&value).unwrap();
    }
    let folder = dir.path().join("topics/t/0");
    std::fs::rename(&folder, dir.path().join("aside")).unwrap();
    {
        let store = Store::open(dir.path(), &config_on_free_port()).unwrap();
        let lost = store.partition("t", 0).unwrap();
        // Not an empty partition: a reader learns that records are missing.
        assert_eq!((lost.start_offset(), lost.high_watermark()), (0, 1));
        let refused = lost.read(0, 1 << 20, true).unwrap_err();
        assert_eq!(refused.code, code::CORRUPT_MESSAGE);
        assert!(refused.reason.contains(folder.to_str().unwrap()), "{}", refused.reason);
        assert_eq!(lost.append(&value).unwrap_err().code, code::UNKNOWN_SERVER_ERROR);
        assert!(!folder.exists(), "opening hides no loss");
        assert_eq!(store.partition("t", 1).unwrap().append(&value).unwrap(), 0);
        store.close().unwrap();
    }
    std::fs::rename(dir.path().join("aside"), &folder).unwrap();
    let store = Store::open(dir.path(), &config_on_free_port()).unwrap();
    assert_eq!(store.partition("t", 0).unwrap().high_watermark(), 1);
    // A damaged topic can be deleted.
    std::fs::remove_dir_all(&folder).unwrap();
    let store = Store::open(dir.path(), &config_on_free_port()).unwrap();
    store.delete("t").unwrap();
    store.create("t", 1).unwrap();
    assert_eq!(store.partition("t", 0).unwrap().append(&value).unwrap(), 0);
}

#[tokio::test]
async fn old_records_are_removed_at_start() {
    let dir = TempDir::new().unwrap();
    {
        let store = Store::open(dir.path(), &config_on_free_port()).unwrap();
        store.create("t", 1).unwrap();
        store.partition("t", 0).unwrap().append(&batch((-1, -1, -1), 1_000, &[b"v"])).unwrap();
    }
    let config = Config { retention_ms: 60_000, ..config_on_free_port() };
    let broker = Broker::start(config, dir.path(), CancellationToken::new()).await.unwrap();
    broker.stop().await.unwrap();
    let store = Store::open(dir.path(), &config_on_free_port()).unwrap();
    let partition = store.partition("t", 0).unwrap();
    assert_eq!((partition.start_offset(), partition.high_watermark()), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn work_on_a_deleted_topic_does_not_touch_the_recreated_one() {
    let dir = TempDir::new().unwrap();
    let store = Store::open(dir.path(), &Config { flush: Flush::Always, ..config_on_free_port() }).unwrap();
    store.create("t", 1).unwrap();
    let old = store.partition("t", 0).unwrap();
    for _ in 0..2 {
        old.append(&batch((-1, -1, -1), 1_000, &[b"old"])).unwrap();
        old.wait_durable().await.unwrap();
    }
    store.delete("t").unwrap();
    store.create("t", 1).unwrap();
    let new = store.partition("t", 0).unwrap();
    new.append(&batch((-1, -1, -1), 1_000, &[b"new"])).unwrap();
    new.wait_durable().await.unwrap();
    let folder = || {
        let entries = std::fs::read_dir(dir.path().join("topics/t/0")).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let before = folder();

    // Calls that had found the partition before its topic was deleted.
    old.retain(Retention { before_ms: Some(i64::MAX), bytes_max: Some(0) });
    old.sync().unwrap();
    old.close().unwrap();
    assert_eq!(old.wait_durable().await.unwrap_err().code, code::UNKNOWN_TOPIC_OR_PARTITION);
    assert_eq!(old.by_time(0).unwrap_err().code, code::UNKNOWN_TOPIC_OR_PARTITION);
    assert_eq!(old.read(0, 1 << 20, true).unwrap_err().code, code::UNKNOWN_TOPIC_OR_PARTITION);
    assert_eq!(folder(), before);
    drop((store, old, new));

    let store = Store::open(dir.path(), &config_on_free_port()).unwrap();
    let kept = store.partition("t", 0).unwrap();
    assert_eq!((kept.start_offset(), kept.high_watermark()), (0, 1));
    assert!(!kept.read(0, 1 << 20, true).unwrap().is_empty());
}

#[tokio::test]
async fn a_log_that_cannot_be_flushed_is_not_served_where_records_are_to_be_durable() {
    let dir = TempDir::new().unwrap();
    Store::open(dir.path(), &config_on_free_port()).unwrap().create("t", 1).unwrap();
    // A file that opens, is empty, and refuses to be flushed.
    let segment = dir.path().join("topics/t/0/00000000000000000000.log");
    std::os::unix::fs::symlink("/dev/null", &segment).unwrap();
    let damage = |flush| {
        let store = Store::open(dir.path(), &Config { flush, ..config_on_free_port() }).unwrap();
        store.partition("t", 0).unwrap().read(0, 1, true).err()
    };
    assert_eq!(damage(Flush::Os), None);
    let refused = damage(Flush::Always).expect("the log was served without a flush");
    assert!(refused.reason.contains("flush"), "{}", refused.reason);
}

#[tokio::test]
async fn requests_that_share_the_memory_all_complete() {
    let memory = Arc::new(Memory::new(4 << 20, 2 << 20));
    let mut arriving = Vec::new();
    for _ in 0..8 {
        let mut reservation = MemoryReservation::default();
        // Two fill the pool, one grows beyond it, the others wait without holding memory.
        let started = memory.grow(&mut reservation, 1 << 20).now_or_never().is_some();
        arriving.push((reservation, started));
    }
    assert_eq!(arriving.iter().filter(|(_, started)| *started).count(), 3);
    let mut ended = tokio::task::JoinSet::new();
    for (mut reservation, _) in arriving {
        let memory = memory.clone();
        ended.spawn(async move { memory.grow(&mut reservation, 2 << 20).await });
    }
    tokio::time::timeout(Duration::from_secs(60), ended.join_all()).await.expect("they wait for each other");
}
