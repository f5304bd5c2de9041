//! Tests of large writes: sequential writes make one object, and can be read back at any time.

use rand::rngs::StdRng;
use rand::{Rng as _, RngCore as _, SeedableRng as _};

use super::*;
use crate::fs::{OpenFile, OpenFlags, content};
use crate::meta::versioned::{At, Reader};
use crate::object::Extent;

fn setup() -> (tempfile::TempDir, Datafs, View) {
    let home = tempfile::tempdir().unwrap();
    let config = Config { garbage_grace_ms: 0, gc_interval_ms: 0, ..Config::default() };
    let datafs = Datafs::open(home.path(), &config).unwrap();
    let view = volume(&datafs);
    (home, datafs, view)
}

fn create(view: &View, name: &str) -> OpenFile {
    view.create(view.root(), name.as_ref(), 0o644, owner(), OpenFlags::READ_WRITE).unwrap().1
}

fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    StdRng::seed_from_u64(seed).fill_bytes(&mut bytes);
    bytes
}

fn extents(view: &View, file: &OpenFile) -> Vec<Extent> {
    view.shared
        .meta
        .view(|txn| {
            let mut reader = Reader::open(txn, view.volume, At::Live)?;
            content::extents_within(&mut reader, file.node().ino, 0, u64::MAX, usize::MAX)
        })
        .unwrap()
}

#[test]
fn a_sequential_writer_makes_one_object() {
    let (home, datafs, view) = setup();
    let bytes = pattern((40 << 20) + 12_345, 1);
    for (name, step) in [("a", 1 << 20), ("b", 100_000), ("c", 5 << 20)] {
        let before = objects(home.path());
        let file = create(&view, name);
        for (i, piece) in bytes.chunks(step).enumerate() {
            file.write_at((i * step) as u64, piece).unwrap();
        }
        let kept = view.shared.unflushed_bytes.load(std::sync::atomic::Ordering::Relaxed);
        assert!(kept <= 3 << 20, "{kept} bytes are in memory");
        file.fsync().unwrap();
        let [all] = extents(&view, &file)[..] else { panic!("{name}: {:?}", extents(&view, &file)) };
        assert_eq!((all.file_offset, all.object_offset, all.len), (0, 0, bytes.len() as u64));
        assert_eq!(objects(home.path()), before + 1);
        assert!(view.read_file(name).unwrap() == bytes);
        drop(file);
    }
    datafs.snapshot_create(&"v".parse().unwrap(), &"s".parse().unwrap()).unwrap();
    let old = datafs.view(&"v@s".parse().unwrap()).unwrap();
    let file = old.open(old.stat("a").unwrap().node, OpenFlags::READ).unwrap();
    assert!(file.image().unwrap().is_some(), "the kernel can have the file itself");
}

#[test]
fn a_file_that_is_removed_while_it_is_streamed_leaves_nothing() {
    let (home, datafs, view) = setup();
    let file = create(&view, "f");
    for i in 0..10 {
        file.write_at(i << 20, &pattern(1 << 20, i)).unwrap();
    }
    view.remove_file("f").unwrap();
    assert!(file.read_at(9 << 20, 1 << 20).unwrap() == pattern(1 << 20, 9));
    drop(file);
    datafs.gc().unwrap();
    assert_eq!(objects(home.path()), 0);
}

/// Streams, overwrites, truncations, flushes and reads in a random order, against a vector.
#[test]
fn anything_in_between_agrees_with_a_vector() {
    for seed in 0..6 {
        let (_home, datafs, view) = setup();
        let mut random = StdRng::seed_from_u64(seed);
        let file = create(&view, "f");
        let mut model: Vec<u8> = Vec::new();
        let mut end = 0;
        for step in 0..60 {
            match random.random_range(0..10) {
                // Continues at the end of the last sequential write.
                0..5 => {
                    let bytes = pattern(random.random_range(200_000..2_000_000), seed * 1000 + step);
                    write(&file, &mut model, end, &bytes);
                    end += bytes.len();
                }
                5..7 => {
                    let at = random.random_range(0..model.len() + 100_000);
                    let bytes = pattern(random.random_range(1..100_000), seed * 1000 + step);
                    write(&file, &mut model, at, &bytes);
                    end = if random.random_bool(0.5) { at + bytes.len() } else { end };
                }
                7 => {
                    let len = random.random_range(0..model.len() + 1);
                    file.set_len(len as u64).unwrap();
                    model.truncate(len);
                    end = end.min(len);
                }
                8 if random.random_bool(0.5) => file.flush().unwrap(),
                8 => file.fsync().unwrap(),
                _ => {
                    let at = random.random_range(0..model.len() + 1);
                    let len = random.random_range(0..3_000_000);
                    let read = file.read_at(at as u64, len).unwrap();
                    assert!(read == model[at..model.len().min(at + len)], "seed {seed} step {step}");
                }
            }
            assert_eq!(file.attr().unwrap().size, model.len() as u64);
        }
        assert!(file.read_at(0, model.len()).unwrap() == model, "seed {seed}");
        drop(file);
        assert!(view.read_file("f").unwrap() == model, "seed {seed}");
        view.remove_file("f").unwrap();
        datafs.gc().unwrap();
        assert_eq!(rows(&datafs, b'j') + rows(&datafs, b'g'), 0, "seed {seed}: nothing is referenced");
    }
}

fn write(file: &OpenFile, model: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    file.write_at(at as u64, bytes).unwrap();
    if model.len() < at + bytes.len() {
        model.resize(at + bytes.len(), 0);
    }
    model[at..at + bytes.len()].copy_from_slice(bytes);
}
