//! Tests of the object pool: objects read back as written, errors name the damage, and unfinished objects are
//! not visible.
use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use proptest::prelude::*;
use tempfile::TempDir;

use super::checksum::{FOOTER_BYTES, FRAME_BYTES};
use super::writer::FRAMED_BYTES_MAX;
use super::*;
use crate::object::{Layout, ObjectId};

/// Larger than what a writer keeps in memory.
const PART_BYTES: usize = 4 * 1024 * 1024;
const SESSION: u64 = 0xfeed_0000_0000_0001;

fn pool() -> (TempDir, ObjectPool) {
    let dir = tempfile::tempdir().unwrap();
    let pool = ObjectPool::open_local(&dir.path().join("objects"), SESSION).unwrap();
    (dir, pool)
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

fn data_file(dir: &TempDir, id: ObjectId) -> PathBuf {
    dir.path().join("objects").join(id.data_name())
}

fn files(dir: &TempDir) -> Vec<String> {
    let mut names = Vec::new();
    for fan_out in fs::read_dir(dir.path().join("objects")).unwrap() {
        for file in fs::read_dir(fan_out.unwrap().path()).unwrap() {
            names.push(file.unwrap().file_name().into_string().unwrap());
        }
    }
    names.sort();
    names
}

#[test]
fn sizes_around_every_border_come_back() {
    let (_dir, pool) = pool();
    let frame = FRAME_BYTES as usize;
    for len in [
        0,
        1,
        frame - 1,
        frame,
        frame + 1,
        FRAMED_BYTES_MAX,
        FRAMED_BYTES_MAX + 1,
        PART_BYTES - 1,
        PART_BYTES,
        PART_BYTES + 1,
        2 * PART_BYTES + 3 * frame + 7,
    ] {
        let bytes = pattern(len);
        let stored = pool.put(&bytes).unwrap();
        assert_eq!(stored.len, len as u64);
        let plain = len > FRAMED_BYTES_MAX;
        assert_eq!(stored.id.layout(), if plain { Layout::Plain } else { Layout::Framed });
        assert_eq!(pool.read(stored.id, 0..len as u64).unwrap(), bytes, "{len} bytes");
    }
}

#[test]
fn appends_of_odd_sizes_make_one_object() {
    let (dir, pool) = pool();
    let bytes = pattern(PART_BYTES + 1_234_567);
    let mut writer = pool.writer(&Codec::default()).unwrap();
    for chunk in bytes.chunks(77_777) {
        writer.append(chunk).unwrap();
    }
    assert_eq!(writer.len(), bytes.len() as u64);
    let stored = writer.finish().unwrap();
    assert_eq!(pool.read(stored.id, 0..stored.len).unwrap(), bytes);
    assert_eq!(files(&dir), [stored.id.to_string(), format!("{}.sums", stored.id)]);
    let mut image = Vec::new();
    std::io::Read::read_to_end(&mut pool.image(stored.id).unwrap().unwrap(), &mut image).unwrap();
    assert!(image == bytes, "the image of a plain object is the file itself");
}

#[test]
fn an_unfinished_object_leaves_nothing() {
    let (dir, pool) = pool();
    let mut writer = pool.writer(&Codec::default()).unwrap();
    writer.append(&pattern(2 * PART_BYTES)).unwrap();
    assert_eq!(pool.list_session(SESSION).unwrap(), []);
    drop(writer);
    assert_eq!(files(&dir), Vec::<String>::new());
}

#[test]
fn one_wrong_byte_is_named_and_the_other_frames_still_read() {
    let (dir, pool) = pool();
    let frame = u64::from(FRAME_BYTES);
    for len in [5 * frame + 10, 2 * FRAMED_BYTES_MAX as u64] {
        let bytes = pattern(len as usize);
        let stored = pool.put(&bytes).unwrap();
        let file = fs::OpenOptions::new().write(true).open(data_file(&dir, stored.id)).unwrap();
        let at = 2 * frame + 17;
        file.write_all_at(&[!bytes[at as usize]], at).unwrap();
        let error = pool.read(stored.id, 0..len).unwrap_err();
        match &error {
            ObjectError::Corrupt { id, byte, .. } => {
                assert_eq!((*id, *byte), (stored.id, 2 * frame));
            }
            other => panic!("{other}"),
        }
        let text = error.to_string();
        assert!(text.contains(&stored.id.to_string()) && text.contains("131072"), "{text}");
        assert_eq!(pool.read(stored.id, 0..2 * frame).unwrap(), bytes[..2 * frame as usize]);
        assert_eq!(pool.read(stored.id, 3 * frame..len).unwrap(), bytes[3 * frame as usize..]);
    }
}

#[test]
fn damaged_and_missing_checksums_are_told_apart() {
    let (dir, pool) = pool();
    let small = pool.put(&pattern(1000)).unwrap();
    let path = data_file(&dir, small.id);
    let whole = fs::read(&path).unwrap();
    assert_eq!(whole.len() as u64, 1000 + 4 + FOOTER_BYTES);
    for cut in [0, 10, 900, 1003, whole.len() - 1] {
        fs::write(&path, &whole[..cut]).unwrap();
        let error = pool.read(small.id, 0..1).unwrap_err();
        assert!(matches!(error, ObjectError::Corrupt { .. }), "cut at {cut}: {error}");
    }
    for at in 1000..whole.len() {
        let mut wrong = whole.clone();
        wrong[at] ^= 0x40;
        fs::write(&path, &wrong).unwrap();
        assert!(pool.read(small.id, 0..1).is_err(), "byte {at} of the trailer");
    }
    fs::remove_file(&path).unwrap();
    assert!(matches!(pool.read(small.id, 0..1), Err(ObjectError::Missing { id }) if id == small.id));

    let large = pool.put(&pattern(FRAMED_BYTES_MAX + 1)).unwrap();
    fs::remove_file(dir.path().join("objects").join(large.id.sums_name())).unwrap();
    let error = pool.read(large.id, 0..1).unwrap_err().to_string();
    assert!(error.contains("torn upload"), "{error}");
}

#[test]
fn reading_past_the_end_is_an_error() {
    let (_dir, pool) = pool();
    let stored = pool.put(&pattern(100)).unwrap();
    assert!(pool.read(stored.id, 50..101).is_err());
    assert!(pool.read_into(stored.id, 99, &mut [0; 2]).is_err());
    assert!(pool.read_into(stored.id, u64::MAX, &mut [0; 2]).is_err());
    assert_eq!(pool.read(stored.id, 100..100).unwrap(), Vec::<u8>::new());
}

#[test]
fn listed_then_deleted() {
    let (dir, pool) = pool();
    let mut ids: Vec<_> = [10, FRAMED_BYTES_MAX + 1].map(|len| pool.put(&pattern(len)).unwrap().id).into();
    ids.sort();
    fs::write(dir.path().join("objects/stray"), b"not an object").unwrap();
    let other = ObjectPool::open_local(&dir.path().join("objects"), 7).unwrap();
    let of_other = other.put(b"of another session").unwrap().id;
    assert_eq!(pool.list_session(SESSION).unwrap(), ids);
    assert_eq!(pool.list_session(7).unwrap(), [of_other]);
    for id in ids {
        pool.delete(id).unwrap();
        pool.delete(id).unwrap();
        assert!(matches!(pool.read(id, 0..1), Err(ObjectError::Missing { .. })));
    }
    assert_eq!(pool.list_session(SESSION).unwrap(), []);
}

#[test]
fn open_files_are_bounded() {
    let (_dir, pool) = pool();
    let before = crate::metrics::OBJECTS_OPENED.get();
    let stored: Vec<_> = (0..300u32).map(|i| pool.put(&i.to_le_bytes()).unwrap()).collect();
    for (i, object) in stored.iter().enumerate() {
        let bytes = pool.read(object.id, 0..4).unwrap();
        assert_eq!(bytes, (i as u32).to_le_bytes().as_slice());
    }
    assert!(pool.open_files() <= 256);
    assert!(crate::metrics::OBJECTS_OPENED.get() >= before + 300);
}

#[test]
fn works_from_inside_a_runtime() {
    for flavor in ["current", "multi"] {
        let runtime = match flavor {
            "current" => tokio::runtime::Builder::new_current_thread().build().unwrap(),
            _ => tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap(),
        };
        runtime.block_on(async {
            let (_dir, pool) = pool();
            let bytes = pattern(PART_BYTES + 1);
            let stored = pool.put(&bytes).unwrap();
            assert_eq!(pool.read(stored.id, 0..stored.len).unwrap(), bytes);
        });
    }
}

#[test]
fn a_store_that_cannot_be_written_says_where() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, b"").unwrap();
    let error = ObjectPool::open_local(&file.join("objects"), SESSION).unwrap_err();
    assert!(error.to_string().contains("file/objects"), "{error}");
}

#[test]
fn space_is_that_of_the_disk() {
    let (_dir, pool) = pool();
    let space = pool.space().unwrap();
    assert!(space.total_bytes >= space.free_bytes && space.free_bytes > 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn any_range_of_any_object_reads_back(
        len in 1usize..3 * 1024 * 1024,
        ranges in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 1..12),
    ) {
        let (_dir, pool) = pool();
        let bytes = pattern(len);
        let stored = pool.put(&bytes).unwrap();
        for (a, b) in ranges {
            let (a, b) = (a.index(len + 1), b.index(len + 1));
            let (start, end) = (a.min(b), a.max(b));
            let read = pool.read(stored.id, start as u64..end as u64).unwrap();
            prop_assert_eq!(&read[..], &bytes[start..end]);
            let mut buffer = vec![0; end - start];
            pool.read_into(stored.id, start as u64, &mut buffer).unwrap();
            prop_assert_eq!(&buffer[..], &bytes[start..end]);
        }
    }

    #[test]
    fn ids_read_back_from_text_and_bytes(bytes in any::<[u8; 16]>()) {
        let id = ObjectId::from_bytes(bytes);
        prop_assert_eq!(id.to_bytes(), bytes);
        prop_assert_eq!(id.to_string().parse::<ObjectId>(), Ok(id));
    }
}
