//! Tests of numbers at their limits, and of moments between two steps of another process.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::*;
use crate::Publish;
use crate::config::Config;
use crate::error::Error;
use crate::fs::content::{self, FILE_BYTES_MAX};
use crate::fs::{OpenFlags, SetAttr, tree};
use crate::meta::engine::Durability;
use crate::meta::{keys, snapshot};
use crate::name::{Name, VolumeSpec};

const RW: OpenFlags = OpenFlags::READ_WRITE;

#[test]
fn offsets_at_the_end_of_the_world() {
    let (home, datafs, view) = setup();
    let (attr, file) = view.create(view.root(), "f".as_ref(), 0o644, owner(), RW).unwrap();
    let too_large = |result: crate::Result<usize>| matches!(result, Err(Error::TooLarge { .. }));
    for offset in [FILE_BYTES_MAX, FILE_BYTES_MAX + 1, u64::MAX - 1, u64::MAX] {
        assert!(too_large(file.write_at(offset, b"x")), "{offset}");
        assert!(file.read_at(offset, 10).unwrap().is_empty());
    }
    assert_eq!(file.attr().unwrap().size, 0);
    assert_eq!(file.write_at(FILE_BYTES_MAX - 1, b"z").unwrap(), 1);
    assert!(too_large(file.write_at(FILE_BYTES_MAX - 1, b"zz")));
    for flushed in [false, true] {
        if flushed {
            file.fsync().unwrap();
        }
        assert_eq!(file.attr().unwrap().size, FILE_BYTES_MAX);
        assert_eq!(&file.read_at(FILE_BYTES_MAX - 3, 100).unwrap()[..], b"\0\0z");
        assert_eq!(&file.read_at(FILE_BYTES_MAX - 3, 2).unwrap()[..], b"\0\0");
        assert_eq!(file.read_at(1 << 40, 10).unwrap(), vec![0; 10]);
        // No machine has this much memory; an error, not an abort.
        assert!(matches!(file.read_at(0, usize::MAX), Err(Error::TooLarge { .. })));
    }
    let append = OpenFlags { append: true, ..RW };
    let appender = view.open(attr.node, append).unwrap();
    assert!(too_large(appender.write_at(0, b"x")));
    let size = |size| SetAttr { size: Some(size), ..SetAttr::default() };
    assert!(matches!(view.setattr(attr.node, &size(u64::MAX)), Err(Error::TooLarge { .. })));
    assert!(matches!(view.setattr(attr.node, &size(FILE_BYTES_MAX + 1)), Err(Error::TooLarge { .. })));
    assert!(matches!(view.read_file("f"), Err(Error::TooLarge { .. })));
    file.write_at(5, b"head").unwrap();
    assert_eq!(file.set_len(1 << 62).unwrap().size, 1 << 62);
    assert_eq!(&file.read_at(0, 10).unwrap()[..], b"\0\0\0\0\0head\0");
    assert_eq!(file.read_at((1 << 62) - 5, 100).unwrap(), vec![0; 5]);
    datafs.snapshot_create(&"v".parse().unwrap(), &"s".parse().unwrap()).unwrap();
    assert_eq!(file.set_len(6).unwrap().size, 6);
    assert_eq!(&file.read_at(0, 10).unwrap()[..], b"\0\0\0\0\0h");
    let at = datafs.view(&"v@s".parse().unwrap()).unwrap();
    let old = at.open(at.stat("f").unwrap().node, OpenFlags::READ).unwrap();
    assert_eq!(old.attr().unwrap().size, 1 << 62);
    assert_eq!(&old.read_at(5, 5).unwrap()[..], b"head\0");
    assert!(old.image().unwrap().is_none());
    drop((file, appender));
    datafs.gc().unwrap();
    assert_eq!(objects(home.path()), 0);
}

#[test]
fn scattered_writes_take_bounded_memory() {
    let home = tempfile::tempdir().unwrap();
    let datafs = Datafs::open(home.path(), &Config::default()).unwrap();
    let view = volume(&datafs);
    let (attr, file) = view.create(view.root(), "f".as_ref(), 0o644, owner(), RW).unwrap();
    let open = datafs.shared.open.get(view.volume, attr.node.ino).unwrap();
    let count = 140_000u64;
    for i in 0..count {
        file.write_at(i * 3, &[i as u8 | 1]).unwrap();
        if i % 1_000 == 0 {
            let (runs, extents) = open.dirty.lock().pieces();
            assert!(runs <= 65_536 && extents <= 2 * 65_536, "{runs} {extents}");
        }
    }
    let read = file.read_at(0, 3 * count as usize).unwrap();
    assert!((0..count).all(|i| read[3 * i as usize] == i as u8 | 1));
    assert!((1..count).all(|i| read[3 * i as usize - 1] == 0));
}

/// Tells a thread to end, also when the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Replaces a file in one step, again and again, as another process does.
fn replacing(home: &std::path::Path, run: impl FnOnce()) {
    let other = open(home).view(&"v".parse().unwrap()).unwrap();
    other.write_file("pointer", &[0; 5_000]).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for i in 0u64.. {
                other.write_file("pointer", &[i as u8; 5_000]).unwrap();
                if done.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
        let _done = Stop(&done);
        run();
    });
}

#[test]
fn a_file_that_is_replaced_is_never_missing() {
    use futures::executor::block_on;
    use object_store::ObjectStoreExt as _;
    let (home, _datafs, view) = setup();
    let store = view.object_store();
    let path = object_store::path::Path::from("pointer");
    replacing(home.path(), || {
        for _ in 0..300 {
            let read = view.read_file("pointer").unwrap();
            assert!(read.len() == 5_000 && read.iter().all(|b| *b == read[0]));
            assert_eq!(view.stat("pointer").unwrap().size, 5_000);
            let ranges = block_on(store.get_ranges(&path, &[0..10, 4_990..5_000])).unwrap();
            assert_eq!(ranges[0], ranges[1]);
            block_on(store.get(&path)).unwrap();
        }
    });
}

#[test]
fn objects_go_only_when_their_loss_is_durable() {
    let (home, datafs, view) = setup();
    view.write_file("f", &[1; 10_000]).unwrap();
    let syncs = || datafs.shared.meta.syncs();
    let before = syncs();
    datafs.gc().unwrap();
    assert_eq!(syncs(), before, "nothing to collect needs no sync");
    view.remove_file("f").unwrap();
    datafs.gc().unwrap();
    assert_eq!((syncs(), objects(home.path())), (before + 1, 0));
}

#[test]
fn a_snapshot_and_its_volume_are_freed_by_two_processes() {
    let (_home, datafs, view) = setup();
    let (v, s): (Name, Name) = ("v".parse().unwrap(), "s".parse().unwrap());
    view.write_file("f", &[1; 10_000]).unwrap();
    let number = datafs.snapshot_create(&v, &s).unwrap().id;
    view.remove_file("f").unwrap();
    datafs.snapshot_delete(&v, &s).unwrap();
    datafs.volume_delete(&v).unwrap();
    // One process has come to the volume's history, the other one to the snapshot.
    let meta = &datafs.shared.meta;
    let start = keys::history(view.volume, &[]);
    meta.transact(Durability::Relaxed, |txn| {
        let held = txn.scan(&start, &keys::after_prefix(&start), Order::Ascending, 1_000)?;
        assert!(!held.is_empty());
        held.iter().try_for_each(|(key, _)| txn.delete(key))
    })
    .unwrap();
    let free = meta.transact(Durability::Relaxed, |txn| snapshot::free_batch(txn, view.volume, number));
    assert!(free.unwrap());
}

#[test]
fn snapshots_deleted_in_any_order_keep_the_others() {
    let v: Name = "v".parse().unwrap();
    let name = |i: u64| -> Name { format!("s{i}").parse().unwrap() };
    for order in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 2, 0, 3], [2, 0, 3, 1], [1, 3, 2, 0]] {
        let (home, datafs, view) = setup();
        let mut expected: BTreeMap<u64, u8> = BTreeMap::new();
        for i in 0..4u64 {
            let byte = i as u8 + 1;
            let mut staged = view.stage().unwrap();
            staged.append(&[byte; 9_000]).unwrap();
            let publish = Publish::new().file("d/f", staged.finish().unwrap()).put_key("k", vec![byte]);
            view.publish(publish).unwrap();
            view.write_file(&format!("old-{i}"), &[byte; 9_000]).unwrap();
            datafs.snapshot_create(&v, &name(i)).unwrap();
            expected.insert(i, byte);
            // The file gets a second link, is changed in place, and is renamed.
            let f = view.stat("d/f").unwrap().node;
            view.link(f, view.root(), format!("link-{i}").as_ref()).unwrap();
            view.open(f, RW).unwrap().write_at(4_000, &[0xee; 200]).unwrap();
            view.rename_path("d/f", &format!("moved-{i}")).unwrap();
            view.remove_file(&format!("old-{i}")).unwrap();
        }
        for i in order {
            datafs.snapshot_delete(&v, &name(i)).unwrap();
            expected.remove(&i);
            // A change while the deletion is pending.
            view.write_file("busy", &[i as u8; 9_000]).unwrap();
            for collected in [false, true] {
                if collected {
                    datafs.gc().unwrap();
                }
                for (kept, byte) in &expected {
                    let at = datafs.view(&VolumeSpec::at(v.clone(), name(*kept))).unwrap();
                    assert_eq!(at.read_file("d/f").unwrap(), vec![*byte; 9_000], "{order:?} {i} {kept}");
                    assert_eq!(at.read_file(&format!("old-{kept}")).unwrap(), vec![*byte; 9_000]);
                    assert_eq!(at.key_get("k").unwrap(), Some(vec![*byte]));
                    assert_eq!(at.stat("d/f").unwrap().nlink, 1);
                    assert!(at.stat(&format!("link-{kept}")).unwrap_err().is_not_found());
                }
            }
        }
        assert_eq!((rows(&datafs, b'h'), rows(&datafs, b'd'), rows(&datafs, b's')), (0, 0, 0));
        for i in 0..4 {
            let name = ["moved", "link"][i % 2];
            assert_eq!(view.read_file(&format!("{name}-{i}")).unwrap()[4_000..4_200], [0xee; 200]);
        }
        datafs.volume_delete(&v).unwrap();
        datafs.gc().unwrap();
        assert_eq!((objects(home.path()), rows(&datafs, b'j'), rows(&datafs, b'g')), (0, 0, 0));
    }
}

#[test]
fn two_processes_write_parts_of_one_file() {
    let (home, datafs, view) = setup();
    let others = open(home.path());
    let other = others.view(&"v".parse().unwrap()).unwrap();
    let (attr, a) = view.create(view.root(), "f".as_ref(), 0o644, owner(), RW).unwrap();
    let b = other.open(attr.node, RW).unwrap();
    // Interleaved, inline and in objects; the session that flushes last loses none of the other's writes.
    for (offset, byte) in [(0u64, 1u8), (100, 2), (4_000, 3), (9_000, 4), (30_000, 5), (50, 6)] {
        let file = if byte % 2 == 0 { &a } else { &b };
        file.write_at(offset, &[byte; 40]).unwrap();
    }
    b.write_at(20_000, &[9; 7_000]).unwrap();
    a.flush().unwrap();
    assert_eq!(b.read_at(9_000, 40).unwrap(), vec![4; 40]);
    b.flush().unwrap();
    for file in [&a, &b] {
        assert_eq!(file.attr().unwrap().size, 30_040);
        for (offset, byte) in [(0u64, 1u8), (100, 2), (4_000, 3), (9_000, 4), (30_000, 5), (50, 6)] {
            assert_eq!(file.read_at(offset, 40).unwrap(), vec![byte; 40]);
        }
        assert_eq!(file.read_at(20_000, 7_000).unwrap(), vec![9; 7_000]);
    }
    // Removed by the other session: later writes go to a file without a name, which its last close frees.
    other.write_file("g", &[1; 9_000]).unwrap();
    let g = view.open(view.stat("g").unwrap().node, RW).unwrap();
    g.write_at(0, &[2; 9_000]).unwrap();
    other.remove_file("g").unwrap();
    g.fsync().unwrap();
    assert_eq!(g.read_at(0, 10_000).unwrap(), vec![2; 9_000]);
    drop(g);
    assert!(view.stat("g").unwrap_err().is_not_found());
    assert_eq!(others.gc().unwrap().inodes, 0);
    datafs.gc().unwrap();
    assert_eq!(others.gc().unwrap().inodes, 1);
    assert_eq!(rows(&datafs, b'o'), 0);
}

#[test]
fn a_file_staged_elsewhere_is_refused() {
    let (_a, _datafs, view) = setup();
    let (_b, _other, elsewhere) = setup();
    let mut staged = elsewhere.stage().unwrap();
    staged.append(&[1; 9_000]).unwrap();
    let publish = Publish::new().file("f", staged.finish().unwrap());
    assert!(matches!(view.publish(publish), Err(Error::Invalid(_))));
    assert!(view.stat("f").unwrap_err().is_not_found());
}

#[test]
fn a_home_that_stays_locked_is_busy() {
    let home = tempfile::tempdir().unwrap();
    let config = Config { lock_wait_ms: 50, ..config() };
    drop(Datafs::open(home.path(), &config).unwrap());
    let alone = rusqlite::Connection::open(config.meta_path(home.path())).unwrap();
    alone.busy_timeout(Duration::from_secs(5)).unwrap();
    alone.execute_batch("PRAGMA locking_mode = EXCLUSIVE; BEGIN EXCLUSIVE").unwrap();
    let error = Datafs::open(home.path(), &config).unwrap_err();
    assert!(error.is_retryable(), "{error}");
    drop(alone);
    Datafs::open(home.path(), &config).unwrap();
}

#[test]
fn the_last_handle_leaves_nothing_uncommitted() {
    let home = tempfile::tempdir().unwrap();
    let other = open(home.path());
    let other_view = volume(&other);
    for round in 0..20 {
        let datafs = open(home.path());
        let view = datafs.view(&"v".parse().unwrap()).unwrap();
        // The collection keeps such a reference too; the end of the process may cut it off.
        let kept = std::sync::Arc::clone(&datafs.shared);
        let name = format!("d{round}");
        view.mkdir(view.root(), name.as_ref(), 0o755, owner()).unwrap();
        drop((datafs, view));
        // Reads what is committed, without asking for a commit.
        let name = keys::child(crate::node::ROOT_INO, name.as_bytes());
        let key = keys::live(other_view.volume, &name);
        let committed = other.shared.meta.view_recent(|txn| Ok(txn.get(&key)?.is_some())).unwrap();
        assert!(committed, "round {round}");
        drop(kept);
    }
}

#[test]
fn what_was_not_synced_is_synced_before_the_next_attempt_to_commit_it() {
    let (home, datafs, view) = setup();
    let (attr, file) = view.create(view.root(), "f".as_ref(), 0o644, owner(), RW).unwrap();
    let bytes = vec![7; 600_000];
    file.write_at(0, &bytes).unwrap();
    let open_inode = datafs.shared.open.get(view.volume, attr.node.ino).unwrap();
    {
        let mut dirty = open_inode.dirty.lock();
        dirty.seal(&datafs.shared, view.codec()).unwrap();
        assert_eq!(dirty.prerequisites().count(), 1);
        // The metadata server was unavailable before anything was synced.
        dirty.outcome_unknown();
        assert_eq!(dirty.prerequisites().count(), 1, "the next commit points at it all the same");
    }
    file.fsync().unwrap();
    drop((file, open_inode, view, datafs));
    let datafs = open(home.path());
    datafs.gc().unwrap();
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    assert!(view.read_file("f").unwrap() == bytes);
}

#[test]
fn what_landed_and_was_collected_is_not_pointed_at_again() {
    let (home, datafs, view) = setup();
    let (attr, file) = view.create(view.root(), "f".as_ref(), 0o644, owner(), RW).unwrap();
    file.write_at(0, &vec![7; 600_000]).unwrap();
    let open_inode = datafs.shared.open.get(view.volume, attr.node.ino).unwrap();
    {
        // The commit takes place, and its answer is lost.
        let mut dirty = open_inode.dirty.lock();
        dirty.seal(&datafs.shared, view.codec()).unwrap();
        let extents = dirty.sealed();
        view.write(Durability::Durable, |writer| {
            let mut inode = tree::inode(writer, attr.node.ino)?;
            content::write_extents(writer, attr.node.ino, &inode, &extents)?;
            writer.settle(attr.node.ino, &mut inode);
            inode.size = 600_000;
            tree::put_inode(writer, attr.node.ino, &inode)
        })
        .unwrap();
        dirty.outcome_unknown();
    }
    let other = open(home.path());
    let other_view = other.view(&"v".parse().unwrap()).unwrap();
    let size = SetAttr { size: Some(0), ..SetAttr::default() };
    let node = other_view.lookup(other_view.root(), "f".as_ref()).unwrap().node;
    other_view.setattr(node, &size).unwrap();
    assert!(other.shared.make_room(), "nothing was collected");
    file.write_at(600_000, &vec![8; 600_000]).unwrap();
    file.fsync().unwrap();
    let expected = [vec![0; 600_000], vec![8; 600_000]].concat();
    assert!(other_view.read_file("f").unwrap() == expected);
}
