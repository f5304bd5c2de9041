//! Tests of reading from a bucket through the cache while it is filled, shared, damaged, full or gone: reads
//! always succeed.
use std::fs;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::time::Duration;

use super::fetch::SEGMENT_BYTES;
use super::s3_tests::{config, pattern, pool_with};
use super::*;
use crate::config::Config;
use crate::object::{ExpectedKeys, ObjectId};
use millrace_testing::s3_server::{Fault, S3Server};

const MIB: usize = 1024 * 1024;
const SESSION: u64 = 0xfeed_0000_0000_0003;

fn cached(server: &S3Server, dir: &Path) -> Config {
    Config {
        cache_dir: dir.to_owned(),
        cache_bytes_max: 1 << 30,
        cache_free_bytes_min: 0,
        ..config(server, "p")
    }
}

fn read_all(pool: &ObjectPool, id: ObjectId, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    for (i, part) in bytes.chunks_mut(128 * 1024).enumerate() {
        pool.read_into(id, (i * 128 * 1024) as u64, part).unwrap();
    }
    bytes
}

fn files(dir: &Path) -> Vec<std::path::PathBuf> {
    let mut files = Vec::new();
    for folder in fs::read_dir(dir).unwrap().flatten().filter(|e| e.path().is_dir()) {
        files.extend(fs::read_dir(folder.path()).unwrap().flatten().map(|e| e.path()));
    }
    files.sort();
    files
}

fn disk_bytes(dir: &Path) -> u64 {
    files(dir).iter().map(|file| fs::metadata(file).map_or(0, |m| m.blocks() * 512)).sum()
}

/// Fetches all of an object into the cache.
fn warm(pool: &ObjectPool, id: ObjectId) {
    let mut bytes = 0;
    pool.warm(id, &mut |more| bytes += more).unwrap();
    pool.settle_cache().unwrap();
    assert!(bytes > 0);
}

#[test]
fn what_was_read_once_is_read_from_this_machine_by_every_process() {
    let (server, dir) = (S3Server::start(), tempfile::tempdir().unwrap());
    let config = cached(&server, dir.path());
    let pool = pool_with(&config, SESSION);
    let large = pattern(17 * MIB + 5);
    let small = pattern(300_000);
    let ids = [pool.put(&large).unwrap().id, pool.put(&small).unwrap().id];
    assert!(read_all(&pool, ids[0], large.len()) == large);
    assert!(read_all(&pool, ids[1], small.len()) == small);
    warm(&pool, ids[0]);
    let other = pool_with(&config, SESSION + 1);
    let before = server.faults.count("get");
    assert!(read_all(&other, ids[0], large.len()) == large);
    assert!(read_all(&other, ids[1], small.len()) == small);
    assert_eq!(server.faults.count("get"), before, "all of it was here");
    let mut image = Vec::new();
    std::io::Read::read_to_end(&mut other.image(ids[0]).unwrap().unwrap(), &mut image).unwrap();
    assert!(image == large, "a complete image is the file");
    assert!(other.image(ids[1]).unwrap().is_none());
    other.delete(ids[0]).unwrap();
    assert!(files(dir.path()).iter().all(|file| !file.to_string_lossy().contains(&ids[0].to_string())));
}

#[test]
fn an_image_is_complete_or_not_given_out() {
    let (server, dir) = (S3Server::start(), tempfile::tempdir().unwrap());
    let pool = pool_with(&cached(&server, dir.path()), SESSION);
    let bytes = pattern(9 * MIB);
    let id = pool.put(&bytes).unwrap().id;
    pool.read(id, 5..6).unwrap();
    pool.settle_cache().unwrap();
    assert!(pool.image(id).unwrap().is_none());
    warm(&pool, id);
    assert!(pool.image(id).unwrap().is_some());
    // As if filled before the machine was booted, and torn by a power failure.
    let [image, map] = &files(dir.path())[..] else { panic!("two files") };
    let file = fs::OpenOptions::new().read(true).write(true).open(map).unwrap();
    file.write_all_at(&[7; 16], 16).unwrap();
    fs::OpenOptions::new().write(true).open(image).unwrap().write_all_at(&[0; 4096], 1 << 20).unwrap();
    assert!(pool.image(id).unwrap().is_none(), "what is torn is not given out");
    warm(&pool, id);
    assert!(pool.image(id).unwrap().is_some(), "verified, and noted");
    let mut boot = [0; 16];
    file.read_exact_at(&mut boot, 16).unwrap();
    assert_ne!(boot, [7; 16]);
}

#[test]
fn damage_in_the_cache_is_fetched_again() {
    let (server, dir) = (S3Server::start(), tempfile::tempdir().unwrap());
    let config = cached(&server, dir.path());
    let pool = pool_with(&config, SESSION);
    let (large, small) = (pattern(6 * MIB), pattern(200_000));
    let ids = [pool.put(&large).unwrap().id, pool.put(&small).unwrap().id];
    warm(&pool, ids[0]);
    pool.read(ids[1], 0..1).unwrap();
    pool.settle_cache().unwrap();
    for file in files(dir.path()).iter().filter(|f| !f.to_string_lossy().ends_with(".map")) {
        let file = fs::OpenOptions::new().write(true).open(file).unwrap();
        file.write_all_at(b"damage", 100_000).unwrap();
    }
    let other = pool_with(&config, SESSION + 1);
    let before = server.faults.count("get");
    assert!(read_all(&other, ids[0], large.len()) == large);
    assert_eq!(server.faults.count("get"), before + 1, "the frame that was damaged");
    assert!(read_all(&other, ids[1], small.len()) == small);
    // Maps that are cut, empty or nonsense.
    other.settle_cache().unwrap();
    for (i, file) in files(dir.path()).iter().filter(|f| f.to_string_lossy().ends_with(".map")).enumerate() {
        fs::write(file, [&b""[..], b"nonsense"][i % 2]).unwrap();
    }
    let third = pool_with(&config, SESSION + 2);
    assert!(read_all(&third, ids[0], large.len()) == large);
}

#[test]
fn a_cache_that_is_gone_or_cannot_be_written_costs_only_time() {
    let (server, dir) = (S3Server::start(), tempfile::tempdir().unwrap());
    let root = dir.path().join("cache");
    let config = cached(&server, &root);
    let pool = pool_with(&config, SESSION);
    let bytes = pattern(6 * MIB);
    let ids: Vec<_> = (0..3).map(|_| pool.put(&bytes).unwrap().id).collect();
    warm(&pool, ids[0]);
    fs::remove_dir_all(&root).unwrap();
    assert!(read_all(&pool, ids[0], bytes.len()) == bytes);
    assert!(read_all(&pool, ids[1], bytes.len()) == bytes);
    pool.settle_cache().unwrap();
    // A file in place of the directory: nothing can be created below.
    fs::remove_dir_all(&root).unwrap();
    fs::write(&root, b"").unwrap();
    assert!(read_all(&pool, ids[0], bytes.len()) == bytes);
    assert!(read_all(&pool, ids[2], bytes.len()) == bytes);
    let other = pool_with(&config, SESSION + 1);
    assert!(read_all(&other, ids[0], bytes.len()) == bytes);
    assert!(other.image(ids[0]).unwrap().is_none());
}

#[test]
fn the_cache_keeps_its_bounds_and_readers_their_files() {
    let (server, dir) = (S3Server::start(), tempfile::tempdir().unwrap());
    let max = 10 * MIB as u64;
    let config = Config { cache_bytes_max: max, ..cached(&server, dir.path()) };
    let pool = pool_with(&config, SESSION);
    let bytes = pattern(4 * MIB);
    let ids: Vec<_> = (0..5).map(|_| pool.put(&bytes).unwrap().id).collect();
    for id in &ids {
        warm(&pool, *id);
        let look = SEGMENT_BYTES + max / 16;
        assert!(disk_bytes(dir.path()) <= max + look, "{}", disk_bytes(dir.path()));
    }
    // All of them are open, and most of them evicted.
    for id in &ids {
        assert!(read_all(&pool, *id, bytes.len()) == bytes);
    }
    // A disk with less free space than required: the cache keeps nothing.
    let dir = tempfile::tempdir().unwrap();
    let config = Config { cache_free_bytes_min: u64::MAX, ..cached(&server, dir.path()) };
    let pool = pool_with(&config, SESSION + 1);
    warm(&pool, ids[0]);
    assert!(disk_bytes(dir.path()) < MIB as u64);
    assert!(read_all(&pool, ids[0], bytes.len()) == bytes);
}

#[test]
fn pools_that_share_a_small_cache_keep_it_within_bounds() {
    let (server, dir) = (S3Server::start(), tempfile::tempdir().unwrap());
    let max = 8 * MIB as u64;
    let config = Config { cache_bytes_max: max, ..cached(&server, dir.path()) };
    let bytes = pattern(2 * MIB);
    let writer = pool_with(&config, SESSION);
    let ids: Vec<_> = (0..16).map(|_| writer.put(&bytes).unwrap().id).collect();
    // The cache's locks belong to open files, so pools exclude each other as processes do.
    let pools: Vec<_> = (1..5).map(|i| pool_with(&config, SESSION + i)).collect();
    std::thread::scope(|scope| {
        for (i, pool) in pools.iter().enumerate() {
            let (ids, bytes) = (&ids, &bytes);
            scope.spawn(move || {
                for k in 0..24 {
                    let id = ids[(k * (2 * i + 1) + i) % ids.len()];
                    assert!(read_all(pool, id, bytes.len()) == *bytes);
                }
            });
        }
    });
    for pool in &pools {
        pool.settle_cache().unwrap();
        warm(pool, ids[0]);
    }
    // Each pool scans after this many bytes of its own.
    let look = 4 * (SEGMENT_BYTES + max / 16);
    assert!(disk_bytes(dir.path()) <= max + look, "{}", disk_bytes(dir.path()));
}

#[test]
fn caches_side_by_side_share_a_bound_and_nothing_else_beside_them_is_evicted() {
    let (server, dir) = (S3Server::start(), tempfile::tempdir().unwrap());
    let max = 10 * MIB as u64;
    let caches: Vec<_> = ["a", "b", "c"].iter().map(|name| dir.path().join(name.repeat(32))).collect();
    let shared = |cache_dir: &Path| Config {
        cache_bytes_max: max,
        cache_shared_bound: true,
        ..cached(&server, cache_dir)
    };
    // A store, another folder with the layout of a cache, and a link to it under the name of a cache.
    let mut others = Vec::new();
    for name in ["objects", "elsewhere"] {
        let folder = dir.path().join(name).join("aa");
        fs::create_dir_all(&folder).unwrap();
        others.push(folder.join("a".repeat(32)));
        fs::write(others.last().unwrap(), vec![1_u8; 12 * MIB]).unwrap();
    }
    std::os::unix::fs::symlink(dir.path().join("elsewhere"), dir.path().join("d".repeat(32))).unwrap();
    let bytes = pattern(4 * MIB);
    for (i, cache) in caches.iter().enumerate() {
        let pool = pool_with(&shared(cache), SESSION + i as u64);
        for _ in 0..2 {
            let id = pool.put(&bytes).unwrap().id;
            warm(&pool, id);
            let used: u64 = caches[..=i].iter().map(|cache| disk_bytes(cache)).sum();
            assert!(used <= max + SEGMENT_BYTES + max / 16, "{used}");
            assert!(disk_bytes(cache) >= bytes.len() as u64, "the newest stays");
        }
    }
    // Two of the last cache are the newest of all.
    assert!(disk_bytes(&caches[0]) < MIB as u64, "{}", disk_bytes(&caches[0]));
    assert!(others.iter().all(|other| fs::metadata(other).unwrap().len() == 12 * MIB as u64));
    let refused = ObjectPool::open(dir.path(), &shared(&dir.path().join("cache")), SESSION).unwrap_err();
    assert!(refused.to_string().contains("32 lower-case hex digits"), "{refused}");
}

#[test]
fn readers_share_requests_and_a_sequential_one_reads_ahead() {
    let server = S3Server::start();
    let config = config(&server, "p");
    let pool = pool_with(&config, SESSION);
    let bytes = pattern(24 * MIB);
    let id = pool.put(&bytes).unwrap().id;
    let before = server.faults.count("get");
    assert!(read_all(&pool, id, bytes.len()) == bytes);
    let requests = server.faults.count("get") - before;
    assert!(requests <= 10, "{requests} requests for six segments and the checksums");
    // Eight readers of the same bytes at once.
    let other = pool_with(&config, SESSION + 1);
    other.read(id, 0..1).unwrap();
    let before = server.faults.count("get");
    server.faults.next("get", 8, Fault::Late(Duration::from_millis(100)));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let range = 8 * MIB as u64..16 * MIB as u64;
                assert!(other.read(id, range).unwrap() == bytes[8 * MIB..16 * MIB]);
            });
        }
    });
    let requests = server.faults.count("get") - before;
    assert!(requests <= 10, "{requests} requests for two segments, and what was read ahead");
}

#[test]
fn a_reader_of_a_part_fetches_that_part_only() {
    let server = S3Server::start();
    let [pool, other] = [SESSION, SESSION + 1].map(|session| pool_with(&config(&server, "p"), session));
    let bytes = pattern(24 * MIB);
    let id = pool.put(&bytes).unwrap().id;
    // Eight neighbouring pieces of each third part, as columns of row groups are.
    let fetched = |pool: &ObjectPool, ahead_to: &dyn Fn(usize) -> u64| {
        pool.read(id, 0..0).unwrap();
        let before = server.faults.fetched_bytes();
        for part in [1, 4, 7, 10] {
            for piece in 0..8 {
                let at = part * 2 * MIB + piece * MIB / 4;
                let mut buffer = vec![0; MIB / 4];
                let (into, from) = (&mut buffer, at as u64);
                pool.read_part_ahead(&ExpectedKeys::Unknown, id, from, from, into, ahead_to(part)).unwrap();
                assert!(buffer == bytes[at..at + MIB / 4]);
            }
        }
        server.faults.fetched_bytes() - before
    };
    let bounded = fetched(&pool, &|part| (part as u64 + 1) * 2 * MIB as u64);
    assert_eq!(bounded, 8 * MIB as u64);
    // Without a bound, whole segments follow each part; those that later parts wait for are counted for certain.
    let unbounded = fetched(&other, &|_| u64::MAX);
    assert!(unbounded >= 14 * MIB as u64, "{unbounded} bytes");
}

#[test]
fn bytes_that_were_changed_on_the_way_are_asked_for_again() {
    let server = S3Server::start();
    let config = config(&server, "p");
    let pool = pool_with(&config, SESSION);
    let bytes = pattern(2 * MIB);
    let id = pool.put(&bytes).unwrap().id;
    pool.read(id, 0..0).unwrap();
    server.faults.next("get", 1, Fault::Flip(1000));
    assert!(pool.read(id, 0..1_000_000).unwrap() == bytes[..1_000_000]);
    server.faults.next("get", 2, Fault::Flip(70_000));
    let error = pool.read(id, MIB as u64..2 * MIB as u64).unwrap_err();
    let ObjectError::Corrupt { byte, .. } = error else { panic!("{error}") };
    assert_eq!(byte, (MIB + 65536) as u64);
    server.faults.next("get", 2, Fault::Short(10));
    assert!(pool.read(id, 0..2 * MIB as u64).unwrap() == bytes, "an error is not kept");
}

#[test]
fn a_cache_whose_thread_has_panicked_is_not_waited_for() {
    let (server, dir) = (S3Server::start(), tempfile::tempdir().unwrap());
    let pool = pool_with(&cached(&server, dir.path()), SESSION);
    let bytes = pattern(5 * MIB);
    let id = pool.put(&bytes).unwrap().id;
    warm(&pool, id);
    let cache = pool.backend().cache().unwrap();
    let entry = cache.entry(id).unwrap();
    // An invalid range of frames panics the writer thread.
    cache.put(&entry, std::ops::Range { start: 2, end: 1 }, 0, bytes::Bytes::new(), true);
    for _ in 0..2 {
        let error = pool.settle_cache().unwrap_err();
        assert!(matches!(error, ObjectError::Io { .. }), "{error}");
    }
    // Reads continue without the cache.
    cache.discard(id);
    let other = pool.put(&bytes).unwrap().id;
    assert!(read_all(&pool, other, bytes.len()) == bytes);
}
