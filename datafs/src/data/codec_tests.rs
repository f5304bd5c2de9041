//! Tests of encoded objects: data reads back as written, any change is detected, and a reader without the key
//! gets an error.
use std::fs;
use std::path::Path;

use proptest::prelude::*;
use tempfile::TempDir;

use super::encoded::{Encoder, FOOTER_BYTES};
use super::s3_tests::pattern;
use super::*;
use crate::config::{Config, FromFile, Secret};
use crate::object::{Layout, ObjectId};
use millrace_testing::s3_server::S3Server;

const SESSION: u64 = 0xfeed_0000_0000_0004;

/// A configuration with keys, each of 32 equal bytes.
fn keys(dir: &Path, config: Config, keys: &[(&str, u8)]) -> Config {
    let key = |(name, byte): &(&str, u8)| {
        let file = dir.join(format!("{name}-{byte}"));
        fs::write(&file, [*byte; 32]).unwrap();
        ((*name).to_owned(), Secret::File(FromFile { file }))
    };
    Config { encryption_keys: keys.iter().map(key).collect(), ..config }
}

fn open(dir: &Path, config: &Config, session: u64) -> ObjectPool {
    ObjectPool::open(dir, config, session).unwrap()
}

fn local() -> (TempDir, Config, ObjectPool) {
    let dir = tempfile::tempdir().unwrap();
    let config = keys(dir.path(), Config::default(), &[("main", 1), ("next", 2)]);
    let pool = open(dir.path(), &config, SESSION);
    (dir, config, pool)
}

fn codec(pool: &ObjectPool, compression: &str, key: Option<&str>) -> Codec {
    let key = key.map(|name| pool.keys().get(name).unwrap().clone());
    Codec { compression: compression.parse().unwrap(), key }
}

fn put(pool: &ObjectPool, codec: &Codec, bytes: &[u8]) -> ObjectId {
    let mut writer = pool.writer(codec).unwrap();
    let id = writer.id();
    bytes.chunks(100_001).for_each(|part| writer.append(part).unwrap());
    let stored = writer.finish().unwrap();
    assert_eq!((stored.id, stored.len), (id, bytes.len() as u64));
    id
}

/// The stored form of an object with this id and these bytes.
pub(crate) fn encode(codec: &Codec, id: ObjectId, bytes: &[u8]) -> Vec<u8> {
    let mut encoder = Encoder::new(codec, id).unwrap();
    let mut out = Vec::new();
    encoder.update(bytes, &mut out).unwrap();
    encoder.finish(&mut out).unwrap();
    out
}

fn path(dir: &TempDir, id: ObjectId) -> std::path::PathBuf {
    dir.path().join("datafs/objects").join(id.data_name())
}

/// Text-like bytes, and some that do not shrink.
fn mixed(len: usize) -> Vec<u8> {
    let noise = pattern(len);
    (0..len).map(|i| if i / 70_000 % 3 == 2 { noise[i] } else { b"abcdefgh"[i / 50 % 8] }).collect()
}

#[test]
fn every_pair_of_compression_and_encryption_reads_back() {
    let (dir, config, pool) = local();
    let server = S3Server::start();
    let cloud =
        Config { encryption_keys: config.encryption_keys.clone(), ..super::s3_tests::config(&server, "p") };
    let cloud = open(dir.path(), &cloud, SESSION + 1);
    for compression in ["none", "lz4", "zstd", "zstd:9"] {
        for key in [None, Some("main")] {
            let codec = codec(&pool, compression, key);
            for len in [0, 1, 65_536, 65_537, 1_500_000] {
                let bytes = mixed(len);
                for pool in [&pool, &cloud] {
                    let id = put(pool, &codec, &bytes);
                    assert_eq!(id.layout() == Layout::Encoded, !codec.is_plain());
                    assert!(pool.read(id, 0..len as u64).unwrap() == bytes, "{compression} {key:?} {len}");
                    assert!(pool.read(id, 0..len as u64 + 1).is_err());
                    let (a, b) = (len / 3, len - len / 7);
                    assert!(pool.read(id, a as u64..b as u64).unwrap() == bytes[a..b]);
                    if !codec.is_plain() {
                        assert!(pool.image(id).unwrap().is_none());
                    }
                }
            }
        }
    }
}

#[test]
fn large_objects_are_uploaded_in_parts_and_read_in_ranges() {
    let (dir, config, _pool) = local();
    let server = S3Server::start();
    let cloud = super::s3_tests::config(&server, "p");
    let cloud = Config { encryption_keys: config.encryption_keys, cache_bytes_max: 1 << 30, ..cloud };
    let pool = open(dir.path(), &cloud, SESSION);
    let bytes = mixed(21 << 20);
    let id = put(&pool, &codec(&pool, "none", Some("main")), &bytes);
    assert!(server.faults.count("part") >= 3);
    let other = open(dir.path(), &cloud, SESSION + 1);
    let before = server.faults.count("get");
    assert!(other.read(id, 10 << 20..(10 << 20) + 100).unwrap() == bytes[10 << 20..(10 << 20) + 100]);
    assert!(server.faults.count("get") - before <= 3);
    assert!(other.read(id, 0..21 << 20).unwrap() == bytes);
    // The cache holds the stored form: its content cannot be read without the key.
    other.settle_cache().unwrap();
    let third = open(dir.path(), &cloud, SESSION + 2);
    assert!(third.read(id, 0..21 << 20).unwrap() == bytes);
}

#[test]
fn compression_saves_space_and_encryption_hides_the_bytes() {
    let (dir, _, pool) = local();
    let bytes = b"all work and no play makes a dull file ".repeat(50_000);
    for compression in ["lz4", "zstd"] {
        let id = put(&pool, &codec(&pool, compression, None), &bytes);
        assert!(fs::metadata(path(&dir, id)).unwrap().len() < bytes.len() as u64 / 4);
    }
    let id = put(&pool, &codec(&pool, "none", Some("main")), &bytes);
    let stored = fs::read(path(&dir, id)).unwrap();
    assert!(!stored.windows(8).any(|window| window == b"all work"));
    let again = put(&pool, &codec(&pool, "none", Some("main")), &bytes);
    assert!(fs::read(path(&dir, again)).unwrap()[..1000] != stored[..1000], "each object has its own key");
}

#[test]
fn whatever_was_changed_is_found() {
    let (dir, config, pool) = local();
    let bytes = mixed(200_000);
    let id = put(&pool, &codec(&pool, "lz4", Some("main")), &bytes);
    let whole = fs::read(path(&dir, id)).unwrap();
    let read = |stored: &[u8], session| {
        fs::write(path(&dir, id), stored).unwrap();
        open(dir.path(), &config, session).read(id, 0..200_000)
    };
    for (i, at) in (0..whole.len()).step_by(997).chain(whole.len() - 400..whole.len()).enumerate() {
        let mut wrong = whole.clone();
        wrong[at] ^= 1;
        assert!(read(&wrong, SESSION + i as u64).is_err(), "byte {at} of {}", whole.len());
    }
    for cut in [0, 1, 135, 1000, whole.len() - 1] {
        let error = read(&whole[..cut], SESSION).unwrap_err();
        assert!(matches!(error, ObjectError::Corrupt { .. }), "cut at {cut}: {error}");
    }
    // An attacker who knows the format but not the key fixes the checksums.
    let frames = 4;
    let table = whole.len() - FOOTER_BYTES - frames * 8;
    let fixed = |mut stored: Vec<u8>| {
        let footer = stored.len() - FOOTER_BYTES;
        let sum = crc32c::crc32c_append(crc32c::crc32c(&stored[table..footer]), &stored[footer + 4..]);
        stored[footer..footer + 4].copy_from_slice(&sum.to_le_bytes());
        stored
    };
    let first_len = u32::from_le_bytes(whole[table..table + 4].try_into().unwrap()) & !(1 << 31);
    let mut wrong = whole.clone();
    wrong[10] ^= 1;
    let sum = crc32c::crc32c(&wrong[..first_len as usize]);
    wrong[table + 4..table + 8].copy_from_slice(&sum.to_le_bytes());
    let error = read(&fixed(wrong), SESSION).unwrap_err().to_string();
    assert!(error.contains("changed after it was written"), "{error}");
    let mut shorter = whole.clone();
    let footer = whole.len() - FOOTER_BYTES;
    shorter[footer + 8..footer + 16].copy_from_slice(&199_999u64.to_le_bytes());
    assert!(read(&fixed(shorter), SESSION).is_err());
    assert!(read(&whole, SESSION).unwrap() == bytes);
}

#[test]
fn a_wrong_or_missing_key_is_named_and_old_keys_read_on() {
    let (dir, _, pool) = local();
    let old = put(&pool, &codec(&pool, "none", Some("main")), b"old");
    let new = put(&pool, &codec(&pool, "none", Some("next")), b"new");
    assert_eq!(pool.read(old, 0..3).unwrap(), &b"old"[..]);
    assert_eq!(pool.read(new, 0..3).unwrap(), &b"new"[..]);
    for (has, missing) in [(vec![("next", 2)], true), (vec![("main", 9), ("next", 2)], false)] {
        let config = keys(dir.path(), Config::default(), &has);
        let other = open(dir.path(), &config, SESSION + 1);
        assert_eq!(other.read(new, 0..3).unwrap(), &b"new"[..]);
        let error = other.read(old, 0..3).unwrap_err();
        assert!(matches!(&error, ObjectError::Key { key, missing: m, .. } if key == "main" && *m == missing));
        assert!(error.to_string().contains("\"main\""), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]
    #[test]
    fn any_range_of_any_encoded_object_reads_back(
        len in 1usize..400_000,
        compression in prop::sample::select(vec!["none", "lz4", "zstd"]),
        sealed: bool,
        ranges in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 1..8),
    ) {
        let (_dir, _, pool) = local();
        let bytes = mixed(len);
        let id = put(&pool, &codec(&pool, compression, sealed.then_some("main")), &bytes);
        for (a, b) in ranges {
            let (a, b) = (a.index(len + 1), b.index(len + 1));
            let (start, end) = (a.min(b), a.max(b));
            let read = pool.read(id, start as u64..end as u64).unwrap();
            prop_assert_eq!(&read[..], &bytes[start..end]);
        }
    }
}
