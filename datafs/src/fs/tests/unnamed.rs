//! Tests of files that are created without a name.
use std::path::Path;

use super::*;
use crate::datafs::Datafs;
use crate::fs::tests::{objects, open, owner, rows, setup};
use crate::fs::{SetAttr, SetXattr};
use crate::fsck::FsckOptions;
use crate::name::Name;

const RW: OpenFlags = OpenFlags::READ_WRITE;

fn another(home: &Path) -> (Datafs, View) {
    let datafs = open(home);
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    (datafs, view)
}

pub(crate) fn make(view: &View) -> OpenFile {
    view.create_unnamed(view.root(), 0o640, owner(), RW).unwrap().1
}

/// The tests without dead processes, on the engine that the thread's tests use.
pub(crate) fn everything_but_deaths_holds() {
    a_file_without_a_name_is_like_any_other_and_gets_one();
    a_name_that_is_taken_leaves_it_without_one();
    only_what_never_had_a_name_gets_one();
    without_a_name_it_goes_with_its_last_close();
    what_cannot_be_made_says_so();
    folders_pass_on_what_they_pass_on_to_files_with_names();
    snapshots_do_not_have_it();
    collections_of_others_leave_it_and_do_what_is_due_once_it_has_a_name();
    a_lost_answer_loses_no_file_and_leaves_none_behind();
}

/// Rows of orphans, files (the root is a folder) and objects.
fn counts(datafs: &Datafs, home: &Path) -> (usize, u64, usize) {
    let info = datafs.volume_show(&"v".parse().unwrap()).unwrap();
    (rows(datafs, b'o'), info.usage.unwrap().files, objects(home))
}

fn assert_sound(datafs: &Datafs) {
    let report = datafs.fsck(&FsckOptions { scrub: true, repair: false }, &mut |_| {}).unwrap();
    assert!(report.is_sound(), "{:#?}", report.found);
}

#[test]
fn a_file_without_a_name_is_like_any_other_and_gets_one() {
    let (home, datafs, view) = setup();
    let before = view.getattr(view.root()).unwrap();
    let (attr, file) = view.create_unnamed(view.root(), 0o4640, owner(), RW).unwrap();
    assert_eq!((attr.kind, attr.nlink, attr.mode, attr.size), (FileKind::File, 0, 0o4640, 0));
    assert_eq!((attr.uid, attr.gid), (1000, 100));
    file.write_at(0, &[1; 20_000]).unwrap();
    file.fsync().unwrap();
    file.write_at(5_000, &[2; 100]).unwrap();
    file.set_len(10_000).unwrap();
    let mut expected = vec![1; 10_000];
    expected[5_000..5_100].fill(2);
    assert_eq!(file.read_at(0, 20_000).unwrap(), expected);
    // As by `/proc/self/fd`.
    assert_eq!(view.open(file.node(), RW).unwrap().read_at(0, 20_000).unwrap(), expected);
    let chmod = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    assert_eq!(view.setattr(file.node(), &chmod).unwrap().nlink, 0);
    view.xattr_set(file.node(), "user.a".as_ref(), b"b", SetXattr::Any).unwrap();
    // It takes space and has no name; fsck and the collector leave it alone.
    assert!(view.list("").unwrap().is_empty() && view.getattr(view.root()).unwrap() == before);
    assert_sound(&datafs);
    assert_eq!(datafs.gc().unwrap().inodes, 0);
    assert_eq!(counts(&datafs, home.path()).1, 1);

    // Unflushed writes get the name too.
    file.write_at(0, b"head").unwrap();
    expected[..4].copy_from_slice(b"head");
    let attr = file.link(view.root(), "f".as_ref()).unwrap();
    assert_eq!((attr.node, attr.nlink, attr.mode), (file.node(), 1, 0o600));
    assert_eq!(counts(&datafs, home.path()).0, 0);
    let (_other, there) = another(home.path());
    assert_eq!(there.read_file("f").unwrap(), expected);
    assert_eq!(there.xattr_get(attr.node, "user.a".as_ref()).unwrap(), b"b");
    // From now on it is an ordinary file.
    assert!(matches!(file.link(view.root(), "f".as_ref()), Err(Error::Exists { .. })));
    assert_eq!(file.link(view.root(), "g".as_ref()).unwrap().nlink, 2);
    file.write_at(0, b"more").unwrap();
    drop(file);
    assert_eq!(&there.read_file("g").unwrap()[..4], b"more");
    assert_sound(&datafs);
}

#[test]
fn a_name_that_is_taken_leaves_it_without_one() {
    let (_home, datafs, view) = setup();
    view.write_file("taken", b"t").unwrap();
    let folder = view.mkdir(view.root(), "folder".as_ref(), 0o755, owner()).unwrap().node;
    let taken = view.stat("taken").unwrap().node;
    let file = make(&view);
    file.write_at(0, b"contents").unwrap();
    for (at, name) in [(view.root(), "taken"), (view.root(), "folder"), (view.root(), ".snapshots")] {
        assert!(matches!(file.link(at, name.as_ref()), Err(Error::Exists { .. })));
    }
    assert!(matches!(file.link(taken, "x".as_ref()), Err(Error::NotADirectory { .. })));
    assert!(matches!(file.link(folder, "..".as_ref()), Err(Error::InvalidName { .. })));
    // Its inode number alone does not give it a name.
    assert!(view.link(file.node(), folder, "x".as_ref()).unwrap_err().is_not_found());
    view.remove_dir("folder").unwrap();
    assert!(file.link(folder, "x".as_ref()).unwrap_err().is_not_found());
    assert_eq!((file.attr().unwrap().nlink, rows(&datafs, b'o')), (0, 1));
    assert_eq!(file.link(view.root(), "free".as_ref()).unwrap().nlink, 1);
    assert_eq!(view.read_file("free").unwrap(), b"contents"[..]);
}

#[test]
fn only_what_never_had_a_name_gets_one() {
    let (_home, datafs, view) = setup();
    let (_, usual) = view.create(view.root(), "usual".as_ref(), 0o644, owner(), RW).unwrap();
    view.remove_file("usual").unwrap();
    let renamed = make(&view);
    renamed.link(view.root(), "one".as_ref()).unwrap();
    view.rename_path("one", "two").unwrap();
    view.remove_file("two").unwrap();
    let exclusive = OpenFlags { exclusive: true, ..RW };
    let (_, never) = view.create_unnamed(view.root(), 0o600, owner(), exclusive).unwrap();
    // Another handle gives it none either.
    let again = view.open(never.node(), RW).unwrap();
    for file in [&usual, &renamed, &never, &again] {
        file.write_at(0, b"still there").unwrap();
        file.flush().unwrap();
        assert!(file.link(view.root(), "again".as_ref()).unwrap_err().is_not_found());
        assert_eq!(file.read_at(0, 100).unwrap(), b"still there"[..]);
        assert_eq!(file.attr().unwrap().nlink, 0);
    }
    assert_sound(&datafs);
    drop((usual, renamed, never, again));
    assert_eq!((rows(&datafs, b'o'), rows(&datafs, b'r')), (0, 1));
}

#[test]
fn without_a_name_it_goes_with_its_last_close() {
    let (home, datafs, view) = setup();
    // Also while other sessions live: they cannot have it open, so they are not asked.
    let others = another(home.path());
    for with_others in [true, false] {
        let file = make(&view);
        file.write_at(0, &[1; 10_000]).unwrap();
        file.fsync().unwrap();
        let again = view.open(file.node(), OpenFlags::READ).unwrap();
        // No process can read this any more.
        file.write_at(0, &[2; 100_000]).unwrap();
        drop(file);
        assert_eq!(again.read_at(0, 1).unwrap(), [2][..]);
        assert_eq!(counts(&datafs, home.path()).0, 1);
        drop(again);
        assert_eq!((rows(&datafs, b'o'), rows(&datafs, b'r')), (0, 1), "with others: {with_others}");
        datafs.gc().unwrap();
        assert_eq!(objects(home.path()), 0);
        if with_others {
            others.0.gc().unwrap();
        }
    }
    assert_sound(&datafs);
}

#[test]
fn what_cannot_be_made_says_so() {
    let (_home, datafs, view) = setup();
    view.write_file("file", b"x").unwrap();
    let file = view.stat("file").unwrap().node;
    let gone = view.mkdir(view.root(), "gone".as_ref(), 0o755, owner()).unwrap().node;
    view.remove_dir("gone").unwrap();
    let name: Name = "s".parse().unwrap();
    datafs.snapshot_create(&"v".parse().unwrap(), &name).unwrap();
    let at = datafs.view(&"v@s".parse().unwrap()).unwrap();
    let snapshots = view.lookup(view.root(), ".snapshots".as_ref()).unwrap().node;
    let make = |view: &View, directory| view.create_unnamed(directory, 0o600, owner(), RW).unwrap_err();
    assert!(matches!(make(&view, file), Error::NotADirectory { .. }));
    assert!(make(&view, gone).is_not_found());
    assert!(matches!(make(&at, at.root()), Error::ReadOnly { .. }));
    assert!(matches!(make(&view, at.root()), Error::ReadOnly { .. }));
    assert!(matches!(make(&view, snapshots), Error::ReadOnly { .. }));
    let reading = view.create_unnamed(view.root(), 0o600, owner(), OpenFlags::READ);
    assert!(matches!(reading, Err(Error::Invalid(_))));
    // A file of a snapshot gets no further names.
    let past = at.open(at.stat("file").unwrap().node, OpenFlags::READ).unwrap();
    assert!(matches!(past.link(view.root(), "x".as_ref()), Err(Error::ReadOnly { .. })));
    assert_eq!(rows(&datafs, b'o'), 0);
}

#[test]
fn folders_pass_on_what_they_pass_on_to_files_with_names() {
    let (_home, _datafs, view) = setup();
    let folder = view.mkdir(view.root(), "folder".as_ref(), 0o755, owner()).unwrap().node;
    let set = SetAttr { mode: Some(0o2775), gid: Some(77), ..SetAttr::default() };
    view.setattr(folder, &set).unwrap();
    // user::rwx, user:1000:r-x, group::r-x, mask::rwx, other::---
    let mut acl = 2_u32.to_le_bytes().to_vec();
    for (tag, perm, id) in
        [(1_u16, 7_u16, u32::MAX), (2, 5, 1000), (4, 5, u32::MAX), (16, 7, u32::MAX), (32, 0, u32::MAX)]
    {
        acl.extend_from_slice(&[&tag.to_le_bytes()[..], &perm.to_le_bytes(), &id.to_le_bytes()].concat());
    }
    view.xattr_set(folder, acl::DEFAULT.as_ref(), &acl, SetXattr::Any).unwrap();
    let (named, _file) = view.create(folder, "named".as_ref(), 0o666, owner(), RW).unwrap();
    let (unnamed, file) = view.create_unnamed(folder, 0o666, owner(), RW).unwrap();
    assert_eq!((named.gid, named.mode), (77, 0o660));
    assert_eq!((unnamed.uid, unnamed.gid, unnamed.mode), (named.uid, named.gid, named.mode));
    let list = |node| view.xattr_get(node, acl::ACCESS.as_ref()).unwrap();
    assert_eq!(list(unnamed.node), list(named.node));
    file.link(view.root(), "here".as_ref()).unwrap();
    assert_eq!(view.stat("here").unwrap().mode, 0o660);
}

#[test]
fn snapshots_do_not_have_it() {
    let (home, datafs, view) = setup();
    let v: Name = "v".parse().unwrap();
    let snapshot = |name: &str| {
        datafs.snapshot_create(&v, &name.parse().unwrap()).unwrap();
        datafs.view(&format!("v@{name}").parse().unwrap()).unwrap()
    };
    let file = make(&view);
    file.write_at(0, &[1; 10_000]).unwrap();
    file.flush().unwrap();
    let other = make(&view);
    other.write_at(0, &[3; 10_000]).unwrap();
    other.flush().unwrap();
    let before = snapshot("before");
    file.write_at(0, &[2; 5_000]).unwrap();
    file.link(view.root(), "f".as_ref()).unwrap();
    let after = snapshot("after");
    assert!(before.list("").unwrap().is_empty());
    assert!(before.stat("f").unwrap_err().is_not_found());
    assert_eq!(&after.read_file("f").unwrap()[4_998..5_002], [2, 2, 1, 1]);
    // Its inode number does not open it either.
    let past = Node { snapshot: before.root().snapshot, ..file.node() };
    for view in [&before, &view] {
        assert!(view.getattr(past).unwrap_err().is_not_found());
        assert!(view.open(past, OpenFlags::READ).unwrap_err().is_not_found());
    }
    drop((file, other));
    assert_sound(&datafs);
    view.remove_file("f").unwrap();
    drop((before, after));
    for name in ["before", "after"] {
        datafs.snapshot_delete(&v, &name.parse().unwrap()).unwrap();
    }
    datafs.gc().unwrap();
    assert_eq!(counts(&datafs, home.path()), (0, 0, 0));
    assert_eq!(rows(&datafs, b'h'), 0);
    assert_sound(&datafs);
}

#[test]
fn collections_of_others_leave_it_and_do_what_is_due_once_it_has_a_name() {
    let (home, a, at_a) = setup();
    let (b, at_b) = another(home.path());
    let file = make(&at_a);
    file.write_at(0, &[1; 10_000]).unwrap();
    file.flush().unwrap();
    let collect = || {
        let mut freed = 0;
        for _ in 0..3 {
            freed += b.gc().unwrap().inodes + a.gc().unwrap().inodes;
        }
        freed
    };
    // An orphan that a round has to ask about.
    at_b.write_file("other", b"x").unwrap();
    at_b.remove_file("other").unwrap();
    assert_eq!(collect(), 1);
    assert!(at_b.open(file.node(), OpenFlags::READ).unwrap_err().is_not_found());
    assert!(at_b.getattr(file.node()).unwrap_err().is_not_found());
    assert_eq!(file.read_at(0, 20_000).unwrap(), vec![1; 10_000]);
    file.link(at_a.root(), "f".as_ref()).unwrap();
    assert_eq!((collect(), rows(&a, b'o')), (0, 0));
    // Open in this session and unlinked in the other, it is covered by a round.
    at_b.remove_file("f").unwrap();
    assert_eq!((collect(), rows(&a, b'o')), (0, 1));
    assert_eq!(file.read_at(0, 20_000).unwrap(), vec![1; 10_000]);
    assert!(file.link(at_a.root(), "f".as_ref()).unwrap_err().is_not_found());
    drop(file);
    assert_eq!(collect(), 1);
    assert_eq!(counts(&a, home.path()), (0, 0, 0));
}

#[test]
fn what_a_dead_process_has_not_named_is_collected() {
    let (home, a, at_a) = setup();
    let (b, at_b) = another(home.path());
    let [named, unnamed] = [make(&at_b), make(&at_b)];
    for file in [&named, &unnamed] {
        file.write_at(0, &[1; 10_000]).unwrap();
        file.flush().unwrap();
    }
    named.link(at_b.root(), "named".as_ref()).unwrap();
    b.shared.session.lose_lock();
    let report = a.gc().unwrap();
    assert_eq!((report.sessions, report.inodes), (1, 1));
    a.gc().unwrap();
    assert_eq!(counts(&a, home.path()), (0, 1, 1));
    assert_eq!(at_a.read_file("named").unwrap(), vec![1; 10_000]);
    assert_sound(&a);
    // The process was only cut off; what was collected stays so.
    assert!(unnamed.link(at_b.root(), "late".as_ref()).unwrap_err().is_not_found());
}

/// Puts a file into the state after a lost answer: only the metadata tells whether it has a name.
fn doubt(file: &OpenFile) {
    let mut naming = LastNames::default();
    naming.add(&file.view().shared.open, file.view().volume, file.node().ino);
    naming.named(false);
}

#[test]
fn a_lost_answer_loses_no_file_and_leaves_none_behind() {
    let (home, datafs, view) = setup();
    let (other, there) = another(home.path());
    // It has no name: it may still get one, or it is freed.
    let [file, gone] = [make(&view), make(&view)];
    doubt(&file);
    doubt(&gone);
    drop(gone);
    file.write_at(0, b"contents").unwrap();
    file.link(view.root(), "f".as_ref()).unwrap();
    // It has one: later writes to it are kept, and the name is reported as taken.
    doubt(&file);
    assert!(matches!(file.link(view.root(), "f".as_ref()), Err(Error::Exists { .. })));
    file.write_at(0, b"CONTENTS").unwrap();
    drop(file);
    assert_eq!(there.read_file("f").unwrap(), b"CONTENTS"[..]);
    // It had one that another session has removed since: it is kept while it is open, like any other file.
    let file = make(&view);
    file.link(view.root(), "g".as_ref()).unwrap();
    doubt(&file);
    file.write_at(0, b"kept").unwrap();
    file.flush().unwrap();
    there.remove_file("g").unwrap();
    for datafs in [&other, &datafs, &other] {
        datafs.gc().unwrap();
    }
    assert!(file.link(view.root(), "h".as_ref()).unwrap_err().is_not_found());
    assert_eq!(file.read_at(0, 10).unwrap(), b"kept"[..]);
    drop(file);
    for datafs in [&datafs, &other].into_iter().cycle().take(6) {
        datafs.gc().unwrap();
    }
    assert_eq!(counts(&datafs, home.path()), (0, 1, 0));
    assert_sound(&datafs);
}
