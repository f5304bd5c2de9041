//! Tests of compaction: compacted files read as before and take less space; snapshots and writers are
//! unharmed.
use std::sync::atomic::{AtomicBool, Ordering};

use rand::rngs::StdRng;
use rand::{Rng as _, RngCore as _, SeedableRng as _};

use super::*;
use crate::config::Config;
use crate::datafs::Datafs;
use crate::fs::tests::setup_with;
use crate::fs::{OpenFlags, Owner, View};
use crate::fsck::FsckOptions;

const OWNER: Owner = Owner { uid: 0, gid: 0 };

struct Home {
    datafs: Datafs,
    view: View,
    dir: tempfile::TempDir,
}

impl Home {
    fn new() -> Home {
        let config = Config { gc_interval_ms: 0, garbage_grace_ms: 0, ..Config::default() };
        let (dir, datafs, view) = setup_with(config);
        Home { datafs, view, dir }
    }

    fn create(&self, name: &str) -> crate::fs::OpenFile {
        let flags = OpenFlags::READ_WRITE;
        self.view.create(self.view.root(), name.as_ref(), 0o644, OWNER, flags).unwrap().1
    }

    fn extents(&self, name: &str) -> Vec<Extent> {
        let node = self.view.stat(name).unwrap().node;
        self.datafs.shared.extents_from(self.view.volume, node.ino, 0, usize::MAX).unwrap()
    }

    fn compact(&self) -> CompactReport {
        self.datafs.compact(None, &Compact::default()).unwrap()
    }

    /// Bytes of all files in the store.
    fn stored(&self) -> u64 {
        let mut bytes = 0;
        for directory in std::fs::read_dir(self.dir.path().join("datafs/objects")).unwrap() {
            for file in std::fs::read_dir(directory.unwrap().path()).into_iter().flatten() {
                bytes += file.unwrap().metadata().unwrap().len();
            }
        }
        bytes
    }

    fn check(&self) {
        let report = self.datafs.fsck(&FsckOptions::default(), &mut |_| {}).unwrap();
        assert!(report.is_sound(), "{:?}", report.found);
    }
}

/// Writes through an open file: `View::write_file` would publish a separate object for each file.
fn write(home: &Home, name: &str, content: &[u8]) {
    let file = home.create(name);
    file.write_at(0, content).unwrap();
    file.flush().unwrap();
}

fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    StdRng::seed_from_u64(seed).fill_bytes(&mut bytes);
    bytes
}

/// A file of 1 MiB with pages written over it, each at a random place in a separate commit.
fn scatter(home: &Home, name: &str, seed: u64) -> Vec<u8> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut content = pattern(1 << 20, seed);
    let file = home.create(name);
    file.write_at(0, &content).unwrap();
    file.flush().unwrap();
    for i in 0..150 {
        let at = random.random_range(0..250usize) * 4096 + 100;
        let page = pattern(3000, seed + i);
        file.write_at(at as u64, &page).unwrap();
        content[at..at + page.len()].copy_from_slice(&page);
        file.flush().unwrap();
    }
    content
}

#[test]
fn a_scattered_file_becomes_one_extent() {
    let home = Home::new();
    let content = scatter(&home, "f", 1);
    let mtime = home.view.stat("f").unwrap().mtime;
    assert!(home.extents("f").len() > 64);
    let report = home.compact();
    assert_eq!((report.files, report.conflicts, report.extents_after), (1, 0, 1), "{report:?}");
    assert_eq!(report.bytes, 1 << 20);
    let [only] = home.extents("f")[..] else { panic!() };
    assert_eq!((only.file_offset, only.len, only.object_offset), (0, 1 << 20, 0));
    assert!(home.view.read_file("f").unwrap() == content);
    assert_eq!(home.view.stat("f").unwrap().mtime, mtime);
    home.datafs.gc().unwrap();
    home.check();
    assert_eq!(home.compact(), CompactReport::default());
    assert!(home.stored() < 2 << 20, "{}", home.stored());
}

#[test]
fn holes_and_snapshots_stay() {
    let home = Home::new();
    let before = scatter(&home, "f", 2);
    home.datafs.snapshot_create(&"v".parse().unwrap(), &"s".parse().unwrap()).unwrap();
    let file = home.view.open(home.view.stat("f").unwrap().node, OpenFlags::READ_WRITE).unwrap();
    home.view.allocate(file.node(), 300_000, 100_000, crate::fs::Allocate::PunchHole).unwrap();
    file.write_at(3 << 20, b"behind a hole").unwrap();
    file.flush().unwrap();
    let mut content = before.clone();
    content[300_000..400_000].fill(0);
    content.resize(3 << 20, 0);
    content.extend_from_slice(b"behind a hole");
    let report = home.compact();
    assert_eq!((report.files, report.extents_after), (1, 3), "{report:?}");
    home.datafs.gc().unwrap();
    assert!(home.view.read_file("f").unwrap() == content);
    assert_eq!(home.view.seek_hole(file.node(), 0).unwrap(), Some(300_000));
    let old = home.datafs.view(&"v@s".parse().unwrap()).unwrap();
    assert!(old.read_file("f").unwrap() == before);
    home.check();
    drop(old);
    home.datafs.snapshot_delete(&"v".parse().unwrap(), &"s".parse().unwrap()).unwrap();
    home.datafs.gc().unwrap();
    assert!(home.view.read_file("f").unwrap() == content);
    home.check();
    assert!(home.stored() < 3 << 20, "{}", home.stored());
}

#[test]
fn packs_that_are_mostly_dead_are_emptied() {
    let home = Home::new();
    let name = |i: u64| format!("{i}");
    // Two packs are filled, a third one is not.
    let bytes = PACK_BYTES as usize / 400;
    for i in 0..1_000 {
        write(&home, &name(i), &pattern(bytes, i));
    }
    home.view.sync().unwrap();
    let full = home.stored();
    for i in (0..1_000).filter(|i| i % 5 != 0) {
        home.view.remove_file(&name(i)).unwrap();
    }
    home.datafs.gc().unwrap();
    assert_eq!(home.stored(), full, "each pack still holds something");
    let report = home.compact();
    assert!(report.packs == 2 && report.conflicts == 0, "{report:?}");
    home.datafs.gc().unwrap();
    for i in (0..1_000).step_by(5) {
        assert!(home.view.read_file(&name(i)).unwrap() == pattern(bytes, i), "{i}");
    }
    home.check();
    assert!(home.stored() < full / 2, "{} of {full}", home.stored());
}

#[test]
fn a_pack_that_a_snapshot_holds_is_left() {
    let home = Home::new();
    for i in 0..1_000 {
        write(&home, &i.to_string(), &pattern(9_000, i));
    }
    home.datafs.snapshot_create(&"v".parse().unwrap(), &"s".parse().unwrap()).unwrap();
    for i in 5..1_000 {
        home.view.remove_file(&i.to_string()).unwrap();
    }
    // The snapshot still uses everything.
    assert_eq!(home.compact(), CompactReport::default());
    home.check();
}

/// The collector finds the pack that was begun for the pieces after the session that began it has ended.
#[test]
fn a_pack_begun_for_pieces_that_changed_meanwhile_is_found_again() {
    let home = Home::new();
    write(&home, "f", &pattern(9_000, 1));
    home.view.sync().unwrap();
    let pack = home.extents("f")[0].object;
    let config = Config { gc_interval_ms: 0, garbage_grace_ms: 0, ..Config::default() };
    let other = Datafs::open(home.dir.path(), &config).unwrap();
    let live = packs::find(&other.shared, pack, true).unwrap().unwrap();
    assert_eq!(live.len(), 1);
    write(&home, "f", &pattern(9_000, 2));
    home.view.sync().unwrap();
    let mut report = CompactReport::default();
    assert!(packs::move_some(&other.shared, &live, &mut report).unwrap());
    assert_eq!(report, CompactReport::default(), "nothing could be moved");
    drop(other);
    home.check();
    home.datafs.gc().unwrap();
    home.check();
    assert!(home.view.read_file("f").unwrap() == pattern(9_000, 2));
    let left = home.datafs.fsck(&FsckOptions::default(), &mut |_| {}).unwrap();
    assert_eq!(left.objects, 1, "the collection took the pack of the other session");
}

#[test]
fn what_was_cut_gives_its_space_back() {
    let home = Home::new();
    let content = pattern(8 << 20, 3);
    home.view.write_file("f", &content).unwrap();
    let file = home.view.open(home.view.stat("f").unwrap().node, OpenFlags::READ_WRITE).unwrap();
    file.set_len(1 << 20).unwrap();
    let report = home.compact();
    assert_eq!((report.files, report.bytes), (1, 1 << 20), "{report:?}");
    home.datafs.gc().unwrap();
    assert!(home.view.read_file("f").unwrap() == content[..1 << 20]);
    assert!(home.stored() < 2 << 20);
    home.check();
}

#[test]
fn writers_do_not_notice() {
    let home = Home::new();
    let mut content = scatter(&home, "f", 4);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let compactor = scope.spawn(|| {
            let mut sum = CompactReport::default();
            while !done.load(Ordering::Relaxed) {
                let report = home.compact();
                home.datafs.gc().unwrap();
                sum.files += report.files;
                sum.conflicts += report.conflicts;
            }
            sum
        });
        let file = home.view.open(home.view.stat("f").unwrap().node, OpenFlags::READ_WRITE).unwrap();
        let mut random = StdRng::seed_from_u64(5);
        for i in 0..400 {
            let at = random.random_range(0..(1 << 20) - 5_000usize);
            let page = pattern(random.random_range(1..5_000), 1000 + i);
            file.write_at(at as u64, &page).unwrap();
            content[at..at + page.len()].copy_from_slice(&page);
            if i % 3 == 0 {
                file.flush().unwrap();
            }
            if i % 50 == 0 {
                assert!(file.read_at(0, 1 << 20).unwrap() == content);
            }
        }
        file.flush().unwrap();
        done.store(true, Ordering::Relaxed);
        compactor.join().unwrap();
    });
    assert!(home.view.read_file("f").unwrap() == content);
    home.compact();
    home.datafs.gc().unwrap();
    assert!(home.view.read_file("f").unwrap() == content);
    home.check();
}

/// A file whose first 4 KiB are in the metadata, with small writes between them and a long tail behind.
fn scatter_over_head(home: &Home, name: &str) -> Vec<u8> {
    let mut content = pattern(4096, 7);
    let file = home.create(name);
    file.write_at(0, &content).unwrap();
    file.flush().unwrap();
    for i in 0..100 {
        let piece = pattern(10, i);
        if i < 30 {
            let at = 16 + i as usize * 100;
            file.write_at(at as u64, &piece).unwrap();
            content[at..at + 10].copy_from_slice(&piece);
        }
        let tail = pattern(9_000, i);
        file.write_at(content.len() as u64, &tail).unwrap();
        content.extend_from_slice(&tail);
        file.flush().unwrap();
    }
    content
}

#[test]
fn a_write_into_a_gap_during_the_copy_keeps_the_old_extents() {
    let home = Home::new();
    let mut content = scatter_over_head(&home, "f");
    let (shared, volume) = (&home.datafs.shared, home.view.volume);
    let ino = home.view.stat("f").unwrap().node.ino;
    let old = file::Old { head: shared.head_of(volume, ino).unwrap(), extents: home.extents("f") };
    assert_eq!(old.head.as_ref().map(Vec::len), Some(4096));
    let copied = file::copy(shared, volume, &old).unwrap().unwrap();
    let writer = home.view.open(home.view.stat("f").unwrap().node, OpenFlags::READ_WRITE).unwrap();
    writer.write_at(50, b"new").unwrap();
    writer.write_at(content.len() as u64, &[3; 300]).unwrap();
    writer.flush().unwrap();
    content[50..53].copy_from_slice(b"new");
    content.extend_from_slice(&[3; 300]);
    let mut report = CompactReport::default();
    assert!(!file::put_in_place(shared, volume, ino, &old, copied, &mut report).unwrap());
    assert_eq!(report.conflicts, 1);
    assert!(home.view.read_file("f").unwrap() == content);
    home.check();
    assert_eq!(home.compact().files, 1);
    assert!(home.view.read_file("f").unwrap() == content);
    home.check();
}

#[test]
fn the_background_pass_takes_what_was_closed() {
    let home = Home::new();
    let content = scatter(&home, "f", 6);
    let held = home.view.open(home.view.stat("f").unwrap().node, OpenFlags::READ_WRITE).unwrap();
    home.datafs.shared.compact_noted().unwrap();
    assert!(home.extents("f").len() > 64, "it is open");
    drop(held);
    home.datafs.shared.compact_noted().unwrap();
    assert_eq!(home.extents("f").len(), 1);
    assert!(home.view.read_file("f").unwrap() == content);
    home.check();
}
