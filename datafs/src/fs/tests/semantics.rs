//! Tests of POSIX semantics, case by case.

use std::collections::BTreeSet;
use std::time::{Duration, UNIX_EPOCH};

use super::*;
use crate::error::Error;
use crate::fs::{OpenFlags, SetAttr, SetTime};
use crate::node::{FileKind, Node};
use crate::publish::Publish;

const RW: OpenFlags = OpenFlags::READ_WRITE;

fn names(view: &View, node: Node) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut cursor = 0;
    loop {
        let page = view.readdir(node, cursor, 2).unwrap();
        let Some(last) = page.last() else { return names };
        cursor = last.cursor;
        for entry in page {
            assert!(names.insert(entry.name.into_string().unwrap()));
        }
    }
}

#[test]
pub(super) fn bytes_come_back_across_every_border() {
    let (_home, _datafs, view) = setup();
    let (_, file) = view.create(view.root(), "f".as_ref(), 0o644, owner(), RW).unwrap();
    let mut expected = vec![0u8; 20_000];
    for (i, (offset, len)) in
        [(0, 10), (4_090, 12), (100, 5_000), (15_000, 5_000), (0, 1), (9_000, 7_000)].into_iter().enumerate()
    {
        let data = vec![i as u8 + 1; len];
        expected[offset..offset + len].copy_from_slice(&data);
        assert_eq!(file.write_at(offset as u64, &data).unwrap(), len);
        let size = file.attr().unwrap().size as usize;
        assert_eq!(file.read_at(0, usize::MAX >> 1).unwrap(), expected[..size]);
        if i % 2 == 1 {
            file.flush().unwrap();
            assert_eq!(file.read_at(0, 30_000).unwrap(), expected[..size]);
        }
    }
    file.fsync().unwrap();
    assert_eq!(file.read_at(4_000, 200).unwrap(), expected[4_000..4_200]);
    assert_eq!(file.read_at(19_999, 200).unwrap(), expected[19_999..]);
    assert!(file.read_at(20_000, 200).unwrap().is_empty());
    file.set_len(4_095).unwrap();
    file.set_len(20_000).unwrap();
    expected[4_095..].fill(0);
    assert_eq!(file.read_at(0, 20_000).unwrap(), expected);
    assert_eq!(view.read_file("f").unwrap(), expected);
}

#[test]
pub(super) fn a_small_file_costs_no_object() {
    let (home, datafs, view) = setup();
    view.write_file("small", &[7; 4096]).unwrap();
    let (_, file) = view.create(view.root(), "f".as_ref(), 0o644, owner(), RW).unwrap();
    file.write_at(0, &[7; 4096]).unwrap();
    drop(file);
    assert_eq!(rows(&datafs, b'j'), 0);
    assert_eq!(view.read_file("f").unwrap(), vec![7; 4096]);
    view.write_file("large", &[7; 4097]).unwrap();
    assert_eq!((rows(&datafs, b'j'), objects(home.path())), (1, 1));
}

#[test]
pub(super) fn append_goes_to_the_end() {
    let (_home, _datafs, view) = setup();
    let flags = OpenFlags { append: true, ..RW };
    let (_, file) = view.create(view.root(), "f".as_ref(), 0o644, owner(), flags).unwrap();
    file.write_at(0, b"abc").unwrap();
    file.flush().unwrap();
    file.write_at(0, b"def").unwrap();
    file.write_at(100, b"ghi").unwrap();
    assert_eq!(file.read_at(0, 100).unwrap(), b"abcdefghi"[..]);
}

#[test]
pub(super) fn open_flags_are_kept() {
    let (_home, _datafs, view) = setup();
    view.write_file("f", b"text").unwrap();
    let node = view.stat("f").unwrap().node;
    let file = view.open(node, OpenFlags::READ).unwrap();
    assert!(matches!(file.write_at(0, b"x"), Err(Error::BadHandle(_))));
    let write = OpenFlags { write: true, ..OpenFlags::default() };
    let file = view.open(node, write).unwrap();
    assert!(matches!(file.read_at(0, 1), Err(Error::BadHandle(_))));
    let file = view.open(node, OpenFlags { truncate: true, ..RW }).unwrap();
    assert_eq!(file.attr().unwrap().size, 0);
    let exclusive = OpenFlags { exclusive: true, ..RW };
    let again = view.create(view.root(), "f".as_ref(), 0o644, owner(), exclusive);
    assert!(matches!(again, Err(Error::Exists { .. })));
    assert!(matches!(view.open(view.root(), RW), Err(Error::IsADirectory { .. })));
    let fifo = view.mknod(view.root(), "p".as_ref(), FileKind::Fifo, 0o600, 0, owner()).unwrap();
    assert!(matches!(view.open(fifo.node, RW), Err(Error::Invalid(_))));
    let device = view.mknod(view.root(), "d".as_ref(), FileKind::CharDevice, 0o600, 0x0103, owner()).unwrap();
    assert_eq!((device.rdev, fifo.rdev), (0x0103, 0));
}

#[test]
pub(super) fn an_unlinked_open_file_stays_readable() {
    let (home, datafs, view) = setup();
    view.write_file("f", &[1; 10_000]).unwrap();
    let node = view.stat("f").unwrap().node;
    let first = view.open(node, RW).unwrap();
    let second = view.open(node, RW).unwrap();
    view.remove_file("f").unwrap();
    assert!(view.stat("f").unwrap_err().is_not_found());
    drop(second);
    first.write_at(0, b"xx").unwrap();
    first.flush().unwrap();
    assert_eq!(first.attr().unwrap().nlink, 0);
    assert_eq!(first.read_at(0, 3).unwrap(), [b'x', b'x', 1][..]);
    assert!(matches!(view.link(node, view.root(), "g".as_ref()), Err(Error::NotFound { .. })));
    drop(first);
    assert!(view.getattr(node).unwrap_err().is_not_found());
    datafs.gc().unwrap();
    assert_eq!((rows(&datafs, b'o'), rows(&datafs, b'j'), objects(home.path())), (0, 0, 0));
}

#[test]
pub(super) fn a_replaced_open_file_stays_readable() {
    let (_home, _datafs, view) = setup();
    view.write_file("f", b"old").unwrap();
    let old = view.open(view.stat("f").unwrap().node, OpenFlags::READ).unwrap();
    view.write_file("f", b"new").unwrap();
    view.write_file("g", b"newest").unwrap();
    let new = view.open(view.stat("f").unwrap().node, OpenFlags::READ).unwrap();
    view.rename(view.root(), "g".as_ref(), view.root(), "f".as_ref(), false).unwrap();
    assert_eq!(old.read_at(0, 9).unwrap(), b"old"[..]);
    assert_eq!(new.read_at(0, 9).unwrap(), b"new"[..]);
    assert_eq!(view.read_file("f").unwrap(), b"newest"[..]);
}

#[test]
pub(super) fn renames_keep_the_rules() {
    let (_home, _datafs, view) = setup();
    let root = view.root();
    let rename = |a: &str, b: &str| view.rename_path(a, b);
    view.create_dir_all("d/e/f").unwrap();
    view.create_dir_all("empty").unwrap();
    view.write_file("x", b"x").unwrap();
    assert!(matches!(rename("d", "d/e/g"), Err(Error::Invalid(_))));
    assert!(matches!(rename("d", "d/e"), Err(Error::Invalid(_))));
    assert!(matches!(rename("x", "d"), Err(Error::IsADirectory { .. })));
    assert!(matches!(rename("d", "x"), Err(Error::NotADirectory { .. })));
    assert!(matches!(rename("empty", "d"), Err(Error::NotEmpty { .. })));
    assert!(matches!(rename("missing", "y"), Err(Error::NotFound { .. })));
    let kept = view.rename(root, "x".as_ref(), root, "d".as_ref(), true);
    assert!(matches!(kept, Err(Error::Exists { .. })));
    assert_eq!(view.stat("").unwrap().nlink, 4);
    rename("d/e", "empty").unwrap();
    assert_eq!((view.stat("").unwrap().nlink, view.stat("d").unwrap().nlink), (4, 2));
    assert_eq!(view.lookup(view.stat("empty").unwrap().node, "..".as_ref()).unwrap().node, root);
    view.link(view.stat("x").unwrap().node, root, "y".as_ref()).unwrap();
    rename("x", "y").unwrap();
    assert_eq!(view.stat("x").unwrap().nlink, 2);
    assert_eq!(names(&view, root), [".", "..", "d", "empty", "x", "y"].map(String::from).into());
}

#[test]
pub(super) fn directories_and_links_keep_the_rules() {
    let (_home, _datafs, view) = setup();
    let root = view.root();
    let dir = view.mkdir(root, "d".as_ref(), 0o2775, owner()).unwrap();
    let other = crate::fs::Owner { uid: 5, gid: 6 };
    let sub = view.mkdir(dir.node, "s".as_ref(), 0o755, other).unwrap();
    assert_eq!((sub.gid, sub.mode, sub.uid), (100, 0o2755, 5));
    assert!(matches!(view.rmdir(root, "d".as_ref()), Err(Error::NotEmpty { .. })));
    assert!(matches!(view.unlink(root, "d".as_ref()), Err(Error::IsADirectory { .. })));
    assert!(matches!(view.link(dir.node, root, "l".as_ref()), Err(Error::NotPermitted { .. })));
    view.symlink(dir.node, "up".as_ref(), "../d/s".as_ref(), owner()).unwrap();
    view.symlink(root, "loop".as_ref(), "loop".as_ref(), owner()).unwrap();
    view.symlink(root, "abs".as_ref(), "/etc".as_ref(), owner()).unwrap();
    view.write_file("d/s/file", b"1").unwrap();
    assert_eq!(view.read_file("d/up/file").unwrap(), b"1"[..]);
    assert!(matches!(view.stat("loop"), Err(Error::Loop { .. })));
    assert!(matches!(view.stat("abs"), Err(Error::Unsupported(_))));
    assert!(matches!(view.stat("d/s/file/x"), Err(Error::NotADirectory { .. })));
    assert!(matches!(view.rmdir(dir.node, "up".as_ref()), Err(Error::NotADirectory { .. })));
    let long = "n".repeat(256);
    assert!(matches!(view.lookup(root, long.as_ref()), Err(Error::NameTooLong { .. })));
    assert!(matches!(view.list("d/s/file"), Err(Error::NotADirectory { .. })));
    let listed: Vec<_> = view.list("d").unwrap().into_iter().map(|e| e.name).collect();
    assert_eq!(listed, ["s", "up"]);
}

#[test]
pub(super) fn attributes_keep_nanoseconds() {
    let (_home, _datafs, view) = setup();
    view.write_file("f", b"x").unwrap();
    let node = view.stat("f").unwrap().node;
    let time = UNIX_EPOCH + Duration::new(1, 123_456_789);
    let early = UNIX_EPOCH - Duration::new(1, 1);
    let set = SetAttr {
        mode: Some(0o107_755),
        uid: Some(1),
        gid: Some(2),
        atime: Some(SetTime::At(early)),
        mtime: Some(SetTime::At(time)),
        size: None,
        drop_privileges: false,
    };
    let attr = view.setattr(node, &set).unwrap();
    assert_eq!((attr.mode, attr.uid, attr.gid), (0o7755, 1, 2));
    let attr = view.getattr(node).unwrap();
    assert_eq!((attr.atime, attr.mtime), (early, time));
    // An explicit time wins over an earlier write, not over a later one.
    let file = view.open(node, RW).unwrap();
    file.write_at(0, b"y").unwrap();
    view.setattr(node, &SetAttr { mtime: Some(SetTime::At(time)), ..SetAttr::default() }).unwrap();
    file.flush().unwrap();
    assert_eq!(view.getattr(node).unwrap().mtime, time);
    file.write_at(0, b"z").unwrap();
    assert!(view.getattr(node).unwrap().mtime > time);
    let directory = SetAttr { size: Some(0), ..SetAttr::default() };
    assert!(matches!(view.setattr(view.root(), &directory), Err(Error::IsADirectory { .. })));
}

#[test]
pub(super) fn a_cursor_survives_changes_of_the_directory() {
    let (_home, _datafs, view) = setup();
    let root = view.root();
    let all: BTreeSet<String> = (0..200).map(|i| format!("file-{i}")).collect();
    for name in &all {
        view.mknod(root, name.as_ref(), FileKind::File, 0o644, 0, owner()).unwrap();
    }
    let mut seen = BTreeSet::new();
    let mut cursor = 0;
    let mut round = 0;
    loop {
        let page = view.readdir_attrs(root, cursor, 7).unwrap();
        let Some((last, _)) = page.last() else { break };
        cursor = last.cursor;
        let newest = last.name.clone();
        seen.extend(page.into_iter().map(|(entry, _)| entry.name.into_string().unwrap()));
        // Removes the entry that the cursor stands on, and adds another.
        if newest != "." && newest != ".." {
            view.unlink(root, &newest).unwrap();
        }
        view.mknod(root, format!("new-{round}").as_ref(), FileKind::File, 0o644, 0, owner()).unwrap();
        round += 1;
    }
    assert!(all.is_subset(&seen));
}

#[test]
pub(super) fn snapshots_appear_below_the_root() {
    let (_home, datafs, view) = setup();
    let (v, s1, s2) = ("v".parse().unwrap(), "s1".parse().unwrap(), "s2".parse().unwrap());
    view.write_file("dir/f", b"one").unwrap();
    view.write_file("dir/large", &[1; 9_000]).unwrap();
    datafs.snapshot_create(&v, &s1).unwrap();
    view.remove_file("dir/large").unwrap();
    view.write_file("dir/f", b"two").unwrap();
    datafs.snapshot_create(&v, &s2).unwrap();
    view.remove_file("dir/f").unwrap();
    assert_eq!(view.read_file(".snapshots/s1/dir/f").unwrap(), b"one"[..]);
    assert_eq!(view.read_file(".snapshots/s2/dir/f").unwrap(), b"two"[..]);
    let dot = view.stat(".snapshots").unwrap();
    assert_eq!(names(&view, dot.node), [".", "..", "s1", "s2"].map(String::from).into());
    assert!(!names(&view, view.root()).contains(".snapshots"));
    let one = view.stat(".snapshots/s1").unwrap();
    assert_ne!(one.node.to_u64(), view.root().to_u64());
    assert_eq!(Node::from_u64(one.node.to_u64()), one.node);
    assert_eq!(view.lookup(one.node, "..".as_ref()).unwrap().node, dot.node);
    assert_eq!(view.lookup(dot.node, "..".as_ref()).unwrap().node, view.root());
    let file = view.stat(".snapshots/s1/dir/f").unwrap().node;
    assert!(matches!(view.open(file, RW), Err(Error::ReadOnly { .. })));
    assert!(matches!(view.setattr(file, &SetAttr::default()), Err(Error::ReadOnly { .. })));
    for parent in [dot.node, one.node] {
        let made = view.mkdir(parent, "x".as_ref(), 0o755, owner());
        assert!(matches!(made, Err(Error::ReadOnly { .. })));
    }
    let made = view.mkdir(view.root(), ".snapshots".as_ref(), 0o755, owner());
    assert!(matches!(made, Err(Error::Exists { .. })));
    assert!(view.rmdir(view.root(), ".snapshots".as_ref()).is_err());
    let snapshot = datafs.view(&"v@s1".parse().unwrap()).unwrap();
    assert!(snapshot.is_snapshot() && snapshot.stat(".snapshots").unwrap_err().is_not_found());
    assert_eq!(snapshot.lookup(snapshot.root(), "..".as_ref()).unwrap().node, snapshot.root());
    assert!(matches!(snapshot.write_file("g", b""), Err(Error::ReadOnly { .. })));
    assert!(matches!(snapshot.create_dir_all("g"), Err(Error::ReadOnly { .. })));
    let held = snapshot.open(snapshot.stat("dir/large").unwrap().node, OpenFlags::READ).unwrap();
    assert_eq!(held.read_at(8_000, 9_000).unwrap(), vec![1; 1_000]);
    datafs.snapshot_delete(&v, &s1).unwrap();
    assert!(matches!(snapshot.read_file("dir/f"), Err(Error::Stale { .. })));
    assert!(view.stat(".snapshots/s1").unwrap_err().is_not_found());
    datafs.gc().unwrap();
    assert!(matches!(held.read_at(0, 9), Err(Error::Stale { .. })));
    assert_eq!(view.read_file(".snapshots/s2/dir/f").unwrap(), b"two"[..]);
}

#[test]
pub(super) fn a_publish_is_whole_or_nothing() {
    let (home, datafs, view) = setup();
    let stage = |len: usize| {
        let mut staged = view.stage().unwrap();
        staged.append(&vec![len as u8; len]).unwrap();
        staged.finish().unwrap()
    };
    let publish = Publish::new()
        .file("a/one", stage(10))
        .file("a/b/two", stage(10_000))
        .put_key("k/1", b"x".to_vec())
        .expect_key("k/1", None);
    view.publish(publish).unwrap();
    assert_eq!(view.read_file("a/b/two").unwrap(), vec![16; 10_000]);
    // Each of these has a valid part, and fails as a whole.
    let conflict = Publish::new()
        .file("a/three", stage(10_000))
        .put_key("k/1", b"y".to_vec())
        .expect_key("k/1", Some(b"other".to_vec()));
    assert!(matches!(view.publish(conflict), Err(Error::Conflict { .. })));
    let there = Publish::new().file("a/three", stage(10_000)).expect_absent("a/one");
    assert!(matches!(view.publish(there), Err(Error::Exists { .. })));
    let one = view.stat("a/one").unwrap();
    for path in ["a/b/two", "a/nothing", "nothing/x", "a/one/x"] {
        let other = Publish::new().file("a/three", stage(10_000)).expect_unchanged(path, &one);
        assert!(matches!(view.publish(other), Err(Error::Changed { .. })), "{path}");
    }
    let same = Publish::new().put_key("k/1", b"x".to_vec()).expect_unchanged("a/one", &one);
    view.publish(same.expect_absent("a/three").expect_absent("nothing/x")).unwrap();
    let missing = Publish::new().file("a/three", stage(9_000)).remove("a/nothing");
    assert!(matches!(view.publish(missing), Err(Error::NotFound { .. })));
    let not_dir = Publish::new().put_key("k/2", b"".to_vec()).file("a/one/x", stage(9_000));
    assert!(matches!(view.publish(not_dir), Err(Error::NotADirectory { .. })));
    let is_dir = Publish::new().file("a/b", stage(9_000));
    assert!(matches!(view.publish(is_dir), Err(Error::IsADirectory { .. })));
    assert!(view.publish(Publish::new().put_key("", b"".to_vec())).is_err());
    assert!(view.stat("a/three").unwrap_err().is_not_found());
    assert_eq!(view.key_scan("k/").unwrap(), [("k/1".to_owned(), b"x".to_vec())]);
    drop(stage(9_000));
    assert_eq!((rows(&datafs, b'j'), objects(home.path())), (1, 1));
    let swap = Publish::new()
        .file("a/b/two", stage(20_000))
        .remove("a/one")
        .delete_key("k/1")
        .expect_key("k/1", Some(b"x".to_vec()));
    view.publish(swap).unwrap();
    datafs.gc().unwrap();
    assert_eq!((rows(&datafs, b'j'), rows(&datafs, b'g'), objects(home.path())), (1, 0, 1));
    assert_eq!(view.list("a").unwrap().len(), 1);
    assert!(view.key_scan("").unwrap().is_empty());
    let elsewhere = datafs.volume_create(&"w".parse().unwrap()).unwrap();
    let other = datafs.view(&crate::name::VolumeSpec::live(elsewhere.name)).unwrap();
    let foreign = Publish::new().file("x", stage(10));
    assert!(matches!(other.publish(foreign), Err(Error::Invalid(_))));
}

#[test]
pub(super) fn a_large_unlinked_file_is_freed_in_batches() {
    let (home, datafs, view) = setup();
    let (_, file) = view.create(view.root(), "f".as_ref(), 0o644, owner(), RW).unwrap();
    for i in 0..600u64 {
        file.write_at(i * 8_192 + 4_096, b"x").unwrap();
    }
    drop(file);
    assert!(rows(&datafs, b'r') > 600);
    view.remove_file("f").unwrap();
    assert_eq!(rows(&datafs, b'o'), 1);
    assert_eq!(datafs.gc().unwrap().inodes, 1);
    assert_eq!((rows(&datafs, b'o'), rows(&datafs, b'r'), objects(home.path())), (0, 1, 0));
}

#[test]
pub(super) fn a_dead_process_is_cleaned_up_after() {
    let (home, datafs, view) = setup();
    let dead = open(home.path());
    let its_view = dead.view(&"v".parse().unwrap()).unwrap();
    its_view.write_file("kept", &[1; 10_000]).unwrap();
    its_view.write_file("orphan", &[2; 10_000]).unwrap();
    let file = its_view.open(its_view.stat("orphan").unwrap().node, RW).unwrap();
    its_view.remove_file("orphan").unwrap();
    let mut staged = its_view.stage().unwrap();
    staged.append(&[3; 10_000]).unwrap();
    let staged = staged.finish().unwrap();
    assert_eq!((objects(home.path()), rows(&datafs, b'p')), (3, 2));
    // While the session lives, the collector leaves it alone.
    assert_eq!(datafs.gc().unwrap(), crate::gc::GcReport::default());
    // A kill drops the lock and nothing else.
    dead.shared.session.lose_lock();
    let report = datafs.gc().unwrap();
    assert_eq!((report.sessions, report.inodes, report.objects), (1, 1, 2));
    assert_eq!((objects(home.path()), rows(&datafs, b'p'), rows(&datafs, b'o')), (1, 1, 0));
    assert_eq!(view.read_file("kept").unwrap(), vec![1; 10_000]);
    // If the process was only paused, it cannot publish what was collected.
    let late = its_view.publish(Publish::new().file("late", staged));
    assert!(matches!(late, Err(Error::Stale { .. })));
    drop(file);
    assert!(view.stat("late").unwrap_err().is_not_found());
    // Through a new registration it writes again.
    let again = its_view.reopen().unwrap();
    again.write_file("again", &[4; 10_000]).unwrap();
    assert_eq!(view.read_file("again").unwrap(), vec![4; 10_000]);
    assert!(matches!(its_view.write_file("late", &[5; 10_000]), Err(Error::Stale { .. })));
    // A volume of the same name is another one.
    drop(again);
    datafs.volume_delete(&"v".parse().unwrap()).unwrap();
    assert!(its_view.reopen().unwrap_err().is_not_found());
    datafs.volume_create(&"v".parse().unwrap()).unwrap();
    assert!(matches!(its_view.reopen(), Err(Error::Stale { .. })));
}

#[test]
pub(super) fn volumes_come_and_go() {
    let (home, datafs, view) = setup();
    let (v, w): (crate::Name, crate::Name) = ("v".parse().unwrap(), "w".parse().unwrap());
    assert!(matches!(datafs.volume_create(&v), Err(Error::Exists { .. })));
    datafs.volume_create(&w).unwrap();
    view.write_file("d/large", &[1; 50_000]).unwrap();
    view.write_file("small", &[1; 5]).unwrap();
    let snapshot = "s".parse().unwrap();
    datafs.snapshot_create(&v, &snapshot).unwrap();
    assert!(matches!(datafs.snapshot_create(&v, &snapshot), Err(Error::Exists { .. })));
    view.write_file("d/large", &[2; 50_000]).unwrap();
    let names: Vec<_> = datafs.volume_list().unwrap().volumes.into_iter().map(|v| v.name).collect();
    assert_eq!(names, [v.clone(), w.clone()]);
    let info = datafs.volume_show(&v).unwrap();
    let usage = info.usage.unwrap();
    assert_eq!((info.snapshots, usage.files, usage.directories), (1, 2, 1));
    assert_eq!((usage.bytes, usage.others), (50_005, 0));
    assert_eq!(datafs.snapshot_list(&v).unwrap()[0].name, snapshot);
    let missing = datafs.view(&"v@nothing".parse().unwrap());
    assert!(missing.unwrap_err().to_string().contains("v@nothing"));
    assert!(datafs.snapshot_delete(&v, &w).unwrap_err().is_not_found());
    datafs.volume_delete(&v).unwrap();
    assert!(datafs.volume_show(&v).unwrap_err().is_not_found());
    assert!(matches!(view.stat("small"), Err(Error::Stale { .. })));
    datafs.volume_create(&v).unwrap();
    assert_eq!(datafs.gc().unwrap().volumes, 1);
    assert_eq!((objects(home.path()), rows(&datafs, b'h'), rows(&datafs, b'd')), (0, 0, 0));
    assert_eq!((rows(&datafs, b'r'), rows(&datafs, b's'), rows(&datafs, b'j')), (2, 0, 0));
}
