//! Tests of the object pool over a real S3 server: a bucket behaves like a directory, and requests to a
//! failing server are retried within bounds.
use std::time::{Duration, Instant};

use super::upload::PART_BYTES;
use super::writer::FRAMED_BYTES_MAX;
use super::*;
use crate::config::{Config, Secret};
use millrace_testing::s3_server::{Fault, S3Server};

const SESSION: u64 = 0xfeed_0000_0000_0002;
const MIB: usize = 1024 * 1024;

pub(super) fn config(server: &S3Server, prefix: &str) -> Config {
    let options = server.options().into_iter().map(|(k, v)| (k.to_owned(), Secret::Text(v)));
    Config {
        store_url: Some(server.url(prefix)),
        store_options: options.collect(),
        cache_bytes_max: 0,
        ..Config::default()
    }
}

pub(super) fn pool_with(config: &Config, session: u64) -> ObjectPool {
    ObjectPool::open(std::path::Path::new("/nonexistent"), config, session).unwrap()
}

pub(super) fn pattern(len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

#[test]
fn what_is_written_to_a_bucket_is_read_back_listed_and_deleted() {
    let server = S3Server::start();
    round_trip(&server, &config(&server, "some/prefix"));
}

/// Objects of all sizes below `some/prefix`: written, read, listed, deleted.
fn round_trip(server: &S3Server, config: &Config) {
    let pool = pool_with(config, SESSION);
    let mut ids = Vec::new();
    for len in [0, 1, 70_000, FRAMED_BYTES_MAX, FRAMED_BYTES_MAX + 1, PART_BYTES + 7, 21 * MIB + 3] {
        let bytes = pattern(len);
        let stored = pool.put(&bytes).unwrap();
        assert_eq!(stored.len, len as u64);
        assert!(pool.read(stored.id, 0..stored.len).unwrap() == bytes, "{len}");
        let (a, b) = (len / 3, len - len / 5);
        assert!(pool.read(stored.id, a as u64..b as u64).unwrap() == bytes[a..b], "{len}");
        assert!(pool.read(stored.id, 0..stored.len + 1).is_err());
        ids.push(stored.id);
    }
    assert_eq!(server.names("some/prefix/uploads"), Vec::<String>::new());
    assert_eq!(server.loose_parts(), 0);
    ids.sort();
    assert_eq!(pool.list_session(SESSION).unwrap(), ids);
    assert_eq!(pool.list_session(SESSION + 1).unwrap(), []);
    for id in ids {
        pool.delete(id).unwrap();
        pool.delete(id).unwrap();
        assert!(matches!(pool.read(id, 0..0), Err(ObjectError::Missing { .. })));
    }
    assert_eq!(server.names("some/prefix"), Vec::<String>::new());
    assert!(pool.space().unwrap().free_bytes > 1 << 40);
}

#[test]
fn an_upload_that_is_dropped_or_orphaned_leaves_nothing() {
    let server = S3Server::start();
    let config = config(&server, "p");
    let pool = pool_with(&config, SESSION);
    let mut writer = pool.writer(&Codec::default()).unwrap();
    writer.append(&pattern(3 * PART_BYTES)).unwrap();
    drop(writer);
    assert_eq!((server.names("p").len(), server.loose_parts()), (0, 0));
    assert!(!pool.has_left_behind());
    // A process that dies aborts nothing; the collection of its session does.
    let mut writer = pool.writer(&Codec::default()).unwrap();
    writer.append(&pattern(3 * PART_BYTES)).unwrap();
    std::mem::forget(writer);
    drop(pool);
    assert_eq!(server.names("p/uploads").len(), 1);
    let other = pool_with(&config, SESSION + 1);
    assert_eq!(other.list_session(SESSION).unwrap(), []);
    assert_eq!(server.names("p"), Vec::<String>::new());
    // A request in flight when its process died may still arrive; the store drops it.
    assert_eq!(server.faults.count("abort"), 2);
}

#[test]
fn trouble_that_passes_is_not_noticed() {
    let server = S3Server::start();
    let pool = pool_with(&config(&server, "p"), SESSION);
    let faults = &server.faults;
    let (small, large) = (pattern(1000), pattern(20 * MIB));
    faults.next("put", 2, Fault::Status(503));
    faults.next("put", 1, Fault::Lost);
    faults.next("begin", 1, Fault::Status(500));
    faults.next("part", 2, Fault::Status(503));
    faults.next("part", 1, Fault::Lost);
    faults.next("complete", 1, Fault::Lost);
    let ids = [pool.put(&small).unwrap().id, pool.put(&large).unwrap().id];
    faults.next("get", 1, Fault::Status(500));
    faults.next("get", 1, Fault::Cut(10));
    assert!(pool.read(ids[0], 0..1000).unwrap() == small);
    faults.next("get", 1, Fault::Cut(10));
    faults.next("get", 1, Fault::Status(503));
    faults.next("get", 2, Fault::Cut(MIB));
    assert!(pool.read(ids[1], 0..20 * MIB as u64).unwrap() == large);
    faults.next("list", 1, Fault::Status(503));
    assert_eq!(pool.list_session(SESSION).unwrap().len(), 2);
    faults.next("delete", 1, Fault::Lost);
    ids.into_iter().for_each(|id| pool.delete(id).unwrap());
    assert_eq!(server.names("p"), Vec::<String>::new());
}

#[test]
fn wrong_bytes_and_lengths_are_found() {
    let server = S3Server::start();
    let pool = pool_with(&config(&server, "p"), SESSION);
    let bytes = pattern(3 * MIB);
    let id = pool.put(&bytes).unwrap().id;
    assert!(pool.read(id, 0..10).unwrap() == bytes[..10]);
    let folder = server.folder().join("p/objects").join(format!("{SESSION:016x}"));
    std::fs::write(folder.join(id.to_string()), &bytes[..2 * MIB]).unwrap();
    let other = pool_with(&config(&server, "p"), SESSION + 1);
    assert!(other.read(id, 0..MIB as u64).unwrap() == bytes[..MIB]);
    let error = other.read(id, MIB as u64..3 * MIB as u64).unwrap_err();
    assert!(matches!(error, ObjectError::Corrupt { .. }), "{error}");
    std::fs::remove_file(folder.join(format!("{id}.sums"))).unwrap();
    let error = pool_with(&config(&server, "p"), SESSION + 2).read(id, 0..1).unwrap_err().to_string();
    assert!(error.contains("torn upload"), "{error}");
}

#[test]
fn small_objects_and_sidecars_of_another_length_are_told_and_not_fetched() {
    let server = S3Server::start();
    let pool = pool_with(&config(&server, "p"), SESSION);
    let (small, large) = (pool.put(&pattern(1000)).unwrap().id, pool.put(&pattern(2 * MIB)).unwrap().id);
    let folder = server.folder().join("p/objects").join(format!("{SESSION:016x}"));
    let stored = std::fs::read(folder.join(small.to_string())).unwrap();
    let read = |id, session| pool_with(&config(&server, "p"), session).read(id, 0..10).unwrap_err();
    for (number, bytes) in [&stored[..stored.len() - 1], &stored[1..], &[]].into_iter().enumerate() {
        std::fs::write(folder.join(small.to_string()), bytes).unwrap();
        let error = read(small, SESSION + 1 + number as u64);
        assert!(matches!(error, ObjectError::Corrupt { id, .. } if id == small), "{error}");
    }
    // Far larger than memory.
    for (id, name, most) in
        [(small, small.to_string(), "1048688"), (large, format!("{large}.sums"), "67108912")]
    {
        std::fs::File::create(folder.join(name)).unwrap().set_len(1 << 40).unwrap();
        let text = read(id, SESSION + 9).to_string();
        assert!(text.contains(&id.to_string()) && text.contains(most), "{text}");
        assert!(text.contains("1099511627776 bytes are stored"), "{text}");
    }
}

#[test]
fn what_the_store_did_not_take_is_sent_again() {
    let server = S3Server::start();
    let pool = pool_with(&Config { store_timeout_ms: 2_000, ..config(&server, "p") }, SESSION);
    let bytes = pattern(3 * PART_BYTES + 1000);
    let (first, rest) = bytes.split_at(PART_BYTES + 5);
    let fail = |kind| server.faults.always(Some((kind, Fault::Status(503))));
    fn away<T: std::fmt::Debug>(result: Result<T, ObjectError>) {
        assert!(matches!(result, Err(ObjectError::Away { .. })), "{result:?}");
    }
    let mut writer = pool.writer(&Codec::default()).unwrap();
    let id = writer.id();
    fail("begin");
    // The writer had taken `first` before the failure showed; it refuses the next bytes.
    writer.append(first).unwrap();
    away(writer.append(rest));
    fail("part");
    eventually(|| writer.append(rest));
    for kind in ["part", "part", "complete", "put"] {
        fail(kind);
        away(writer.complete());
        assert!(writer.append(b"more").is_err() && writer.len() == bytes.len() as u64);
        assert!(pool_with(&config(&server, "p"), SESSION + 1).read(id, 0..1).is_err());
    }
    server.faults.always(None);
    let stored = eventually(|| writer.complete()).object;
    assert_eq!((stored.id, stored.len), (id, bytes.len() as u64));
    assert!(writer.complete().is_err());
    drop(writer);
    assert!(pool_with(&config(&server, "p"), SESSION + 1).read(id, 0..stored.len).unwrap() == bytes);
    assert_eq!((server.names("p/uploads").len(), server.loose_parts()), (0, 0));
}

#[test]
fn a_part_that_could_not_be_kept_is_never_forgotten() {
    let server = S3Server::start();
    let pool = pool_with(&Config { store_timeout_ms: 2_000, ..config(&server, "p") }, SESSION);
    let kept = std::sync::Arc::clone(&pool.backend().remote().unwrap().kept);
    let room = kept.available_permits() as u32;
    let taken = kept.try_acquire_many_owned(room).unwrap();
    server.faults.always(Some(("part", Fault::Status(503))));
    let mut writer = pool.writer(&Codec::default()).unwrap();
    writer.append(&pattern(2 * PART_BYTES)).unwrap();
    assert!(matches!(writer.complete(), Err(ObjectError::Away { .. })));
    server.faults.always(None);
    drop(taken);
    for _ in 0..2 {
        let Err(ObjectError::Store { source, .. }) = writer.complete() else { panic!("it is complete") };
        assert!(source.to_string().contains("write the file anew"), "{source}");
    }
    drop(writer);
    assert_eq!((server.names("p").len(), server.loose_parts()), (0, 0));
}

/// Retries while the store is unavailable: on a busy machine it may still be for a moment.
fn eventually<T>(mut call: impl FnMut() -> Result<T, ObjectError>) -> T {
    let begun = Instant::now();
    loop {
        match call() {
            Err(ObjectError::Away { .. }) if begun.elapsed() < Duration::from_secs(120) => {}
            other => return other.unwrap(),
        }
    }
}

#[test]
fn a_store_that_is_away_is_one_bounded_error_and_comes_back() {
    let mut server = S3Server::start();
    let config = Config { store_timeout_ms: 2_000, ..config(&server, "p") };
    let pool = pool_with(&config, SESSION);
    let bytes = pattern(2 * MIB);
    let id = pool.put(&bytes).unwrap().id;
    server.stop();
    let begun = Instant::now();
    let error = pool.read(id, 0..10).unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(60));
    let ObjectError::Away { operation, place, tried_ms, .. } = &error else { panic!("{error}") };
    assert_eq!((*operation, place.as_str()), ("read", "s3://bucket/p"));
    assert!((1..=10_000).contains(tried_ms));
    let text = crate::Error::from(error).to_string();
    assert!(text.contains("s3://bucket/p") && text.contains("read") && text.contains("ms"), "{text}");
    assert!(matches!(pool.put(b"x").unwrap_err(), ObjectError::Away { .. }));
    server.start_again();
    assert!(eventually(|| pool.read(id, 0..2 * MIB as u64)) == bytes);
    eventually(|| pool.put(b"x"));
    // Requests to a server that never responds end as well.
    server.faults.always(Some(("get", Fault::Late(Duration::from_secs(3600)))));
    let other = pool_with(&config, SESSION + 1);
    assert!(matches!(other.read(id, 0..10).unwrap_err(), ObjectError::Away { .. }));
    server.faults.always(None);
    assert!(eventually(|| other.read(id, 0..10)) == bytes[..10]);
}

#[test]
fn a_refusal_is_told_at_once() {
    let server = S3Server::start();
    let mut config = config(&server, "p");
    config.store_options.insert("secret_access_key".into(), Secret::Text("wrong".into()));
    let pool = pool_with(&config, SESSION);
    let begun = Instant::now();
    let error = pool.put(b"x").unwrap_err();
    assert!(matches!(error, ObjectError::Store { .. }), "{error}");
    assert!(begun.elapsed() < Duration::from_millis(config.store_timeout_ms));
}
