//! Tests of extended attributes, holes, copies by reference, exchanges of names, and privileges.

use std::ffi::OsStr;

use super::*;
use crate::error::{Error, Result};
use crate::fs::{Allocate, OpenFile, OpenFlags, SetAttr, SetXattr, XATTR_VALUE_BYTES_MAX};
use crate::name::VolumeSpec;
use crate::node::{FileKind, Node};

const RW: OpenFlags = OpenFlags::READ_WRITE;

fn file(view: &View, name: &str) -> OpenFile {
    view.create(view.root(), name.as_ref(), 0o644, owner(), RW).unwrap().1
}

fn node(view: &View, path: &str) -> Node {
    view.stat(path).unwrap().node
}

fn set(view: &View, node: Node, name: &str, value: &[u8], how: SetXattr) -> Result<()> {
    view.xattr_set(node, name.as_ref(), value, how)
}

fn get(view: &View, node: Node, name: &str) -> Result<Vec<u8>> {
    view.xattr_get(node, name.as_ref())
}

#[test]
pub(super) fn extended_attributes_are_set_listed_and_removed() {
    let (_home, datafs, view) = setup();
    view.write_file("f", b"x").unwrap();
    let f = node(&view, "f");
    let before = view.getattr(f).unwrap();
    assert!(matches!(get(&view, f, "user.a"), Err(Error::NoAttribute { .. })));
    set(&view, f, "user.a", b"1", SetXattr::Any).unwrap();
    set(&view, f, "user.a", b"22", SetXattr::Replace).unwrap();
    set(&view, f, "user.empty", b"", SetXattr::Create).unwrap();
    set(&view, f, "trusted.t", &vec![7; XATTR_VALUE_BYTES_MAX], SetXattr::Create).unwrap();
    assert!(view.getattr(f).unwrap().ctime > before.ctime);
    assert_eq!(view.getattr(f).unwrap().mtime, before.mtime);
    assert_eq!(get(&view, f, "user.a").unwrap(), b"22");
    assert_eq!(get(&view, f, "user.empty").unwrap(), b"");
    assert_eq!(view.xattr_list(f).unwrap(), ["trusted.t", "user.a", "user.empty"]);
    assert!(matches!(set(&view, f, "user.a", b"", SetXattr::Create), Err(Error::Exists { .. })));
    assert!(matches!(set(&view, f, "user.b", b"", SetXattr::Replace), Err(Error::NoAttribute { .. })));

    // A snapshot keeps them.
    datafs.snapshot_create(&"v".parse().unwrap(), &"s".parse().unwrap()).unwrap();
    view.xattr_remove(f, "user.a".as_ref()).unwrap();
    assert!(matches!(view.xattr_remove(f, "user.a".as_ref()), Err(Error::NoAttribute { .. })));
    set(&view, f, "user.empty", b"no more", SetXattr::Any).unwrap();
    let s = datafs.view(&VolumeSpec::at("v".parse().unwrap(), "s".parse().unwrap())).unwrap();
    let kept = node(&s, "f");
    assert_eq!(get(&s, kept, "user.a").unwrap(), b"22");
    assert_eq!(get(&s, kept, "user.empty").unwrap(), b"");
    assert_eq!(s.xattr_list(kept).unwrap().len(), 3);
    assert!(matches!(set(&s, kept, "user.a", b"", SetXattr::Any), Err(Error::ReadOnly { .. })));

    // The attributes are deleted with the file.
    view.remove_file("f").unwrap();
    datafs.snapshot_delete(&"v".parse().unwrap(), &"s".parse().unwrap()).unwrap();
    datafs.gc().unwrap();
    assert_eq!((rows(&datafs, b'h'), rows(&datafs, b'd')), (0, 0));
    assert!(view.xattr_list(f).is_err());
}

#[test]
pub(super) fn extended_attributes_have_rules() {
    let (_home, _datafs, view) = setup();
    view.write_file("f", b"x").unwrap();
    view.symlink(view.root(), "l".as_ref(), "f".as_ref(), owner()).unwrap();
    let link = view.lookup(view.root(), "l".as_ref()).unwrap().node;
    let f = node(&view, "f");
    for name in ["system.other", "other.a", "plain"] {
        assert!(matches!(set(&view, f, name, b"", SetXattr::Any), Err(Error::Unsupported(_))), "{name}");
        assert!(matches!(get(&view, f, name), Err(Error::Unsupported(_))), "{name}");
    }
    assert!(matches!(set(&view, f, "user.", b"", SetXattr::Any), Err(Error::InvalidName { .. })));
    let long = format!("user.{}", "n".repeat(251));
    assert!(matches!(set(&view, f, &long, b"", SetXattr::Any), Err(Error::NameTooLong { .. })));
    let large = vec![0; XATTR_VALUE_BYTES_MAX + 1];
    assert!(matches!(set(&view, f, "user.a", &large, SetXattr::Any), Err(Error::TooLarge { .. })));
    assert!(matches!(set(&view, link, "user.a", b"", SetXattr::Any), Err(Error::NotPermitted { .. })));
    set(&view, link, "trusted.a", b"", SetXattr::Any).unwrap();
    set(&view, view.root(), "user.root", b"yes", SetXattr::Any).unwrap();

    // The most that the kernel can list: 64 KiB of names, NUL bytes included.
    let name = |n: usize| format!("user.{n:0250}");
    (0..256).for_each(|n| set(&view, f, &name(n), b"", SetXattr::Any).unwrap());
    assert_eq!(view.xattr_list(f).unwrap().len(), 256);
    assert!(matches!(set(&view, f, "user.a", b"", SetXattr::Any), Err(Error::NoSpace { .. })));
    set(&view, f, &name(7), b"again", SetXattr::Any).unwrap();
    view.xattr_remove(f, name(3).as_ref()).unwrap();
    set(&view, f, "user.a", b"", SetXattr::Any).unwrap();
}

#[test]
pub(super) fn blocks_tell_holes() {
    let (_home, datafs, view) = setup();
    let f = file(&view, "f");
    let at = f.node();
    let blocks = || view.getattr(at).unwrap().blocks;
    let flushed = || {
        f.flush().unwrap();
        blocks()
    };
    f.set_len(10_000_000).unwrap();
    assert_eq!(blocks(), 0);
    // Before a flush, after it, and after a write over the same range.
    f.write_at(5_000_000, &[1; 512_000]).unwrap();
    assert_eq!((blocks(), flushed()), (1_000, 1_000));
    f.write_at(5_000_000, &[2; 512_000]).unwrap();
    assert_eq!(flushed(), 1_000);
    f.write_at(5_256_000, &[3; 512_000]).unwrap();
    assert_eq!(flushed(), 1_500);
    f.write_at(0, &[4; 1_024]).unwrap();
    assert_eq!(flushed(), 1_502);
    assert_eq!(view.allocate(at, 5_000_000, 51_200, Allocate::PunchHole).unwrap().blocks, 1_402);
    assert_eq!(view.allocate(at, 5_000_000, 51_200, Allocate::Zero).unwrap().blocks, 1_402);
    assert_eq!(view.allocate(at, 0, 20_000_000, Allocate::Extend).unwrap().blocks, 1_402);
    datafs.snapshot_create(&"v".parse().unwrap(), &"s".parse().unwrap()).unwrap();
    // The copy's blocks include shared objects.
    let copy = file(&view, "copy");
    let mut copied = 0;
    while copied < 20_000_000 {
        copied += f.copy_to(copied, &copy, copied, 20_000_000 - copied).unwrap();
    }
    copy.flush().unwrap();
    // The first 4 KiB are copied as bytes, zeroes too.
    assert_eq!(copy.attr().unwrap().blocks, 1_408);
    assert_eq!(f.set_len(5_051_200).unwrap().blocks, 2);
    assert_eq!(f.set_len(100).unwrap().blocks, 1);
    assert_eq!(f.set_len(0).unwrap().blocks, 0);
    f.write_at(0, &[5; 10]).unwrap();
    assert_eq!((blocks(), flushed()), (1, 1));
    assert_eq!(view.stat(".snapshots/s/f").unwrap().blocks, 1_402);
    view.write_file("whole", &[6; 5_121]).unwrap();
    assert_eq!(view.stat("whole").unwrap().blocks, 11);
}

#[test]
pub(super) fn ranges_become_holes_and_holes_are_found() {
    let (home, datafs, view) = setup();
    let f = file(&view, "f");
    let at = f.node();
    let data: Vec<u8> = (0..40_000u32).map(|i| (i % 251) as u8 + 1).collect();
    f.write_at(0, &data).unwrap();
    assert_eq!((view.seek_data(at, 5).unwrap(), view.seek_hole(at, 5).unwrap()), (Some(5), Some(40_000)));
    let mut expected = data;

    view.allocate(at, 10_000, 5_000, Allocate::PunchHole).unwrap();
    expected[10_000..15_000].fill(0);
    assert_eq!(f.read_at(0, 50_000).unwrap(), expected);
    assert_eq!(view.seek_hole(at, 0).unwrap(), Some(10_000));
    assert_eq!(view.seek_data(at, 10_000).unwrap(), Some(15_000));
    assert_eq!(view.seek_hole(at, 12_345).unwrap(), Some(12_345));
    assert_eq!(view.seek_hole(at, 15_000).unwrap(), Some(40_000));

    // Unflushed bytes are zeroed as well; the size stays or grows as asked.
    f.write_at(39_990, &[9; 20]).unwrap();
    expected.resize(40_010, 9);
    expected[39_990..].fill(9);
    let attr = view.allocate(at, 40_000, 100, Allocate::ZeroKeepSize).unwrap();
    expected[40_000..].fill(0);
    assert_eq!(attr.size, 40_010);
    assert_eq!(f.read_at(0, 50_000).unwrap(), expected);
    assert_eq!(view.allocate(at, 40_000, 2_000, Allocate::Zero).unwrap().size, 42_000);
    assert_eq!(view.allocate(at, 50_000, 1, Allocate::KeepSize).unwrap().size, 42_000);
    assert_eq!(view.allocate(at, 10, 10, Allocate::Extend).unwrap().size, 42_000);
    assert_eq!(view.allocate(at, 50_000, 10, Allocate::Extend).unwrap().size, 50_010);
    expected.resize(50_010, 0);
    assert_eq!(f.read_at(0, 60_000).unwrap(), expected);
    assert_eq!((view.seek_data(at, 40_000).unwrap(), view.seek_hole(at, 50_010).unwrap()), (None, None));
    assert_eq!(view.seek_hole(at, 50_009).unwrap(), Some(50_009));

    // A file that is all hole costs no object.
    view.allocate(at, 0, 50_010, Allocate::PunchHole).unwrap();
    assert_eq!(view.seek_data(at, 0).unwrap(), None);
    datafs.gc().unwrap();
    assert_eq!((rows(&datafs, b'j'), objects(home.path())), (0, 0));
    assert_eq!(f.read_at(0, 60_000).unwrap(), vec![0; 50_010]);
}

#[test]
pub(super) fn small_files_have_holes_too() {
    let (_home, _datafs, view) = setup();
    view.write_file("f", &[7; 100]).unwrap();
    let at = node(&view, "f");
    view.allocate(at, 10, 20, Allocate::PunchHole).unwrap();
    let mut expected = [7; 100];
    expected[10..30].fill(0);
    assert_eq!(view.read_file("f").unwrap(), expected.as_slice());
    view.allocate(at, 50, 1_000, Allocate::PunchHole).unwrap();
    expected[50..].fill(0);
    assert_eq!(view.read_file("f").unwrap(), expected.as_slice());
    assert_eq!((view.seek_hole(at, 0).unwrap(), view.seek_data(at, 50).unwrap()), (Some(50), None));
}

#[test]
pub(super) fn what_cannot_be_allocated_says_so() {
    let (_home, _datafs, view) = setup();
    let f = file(&view, "f");
    let fails = |offset, len, how| view.allocate(f.node(), offset, len, how).unwrap_err();
    assert!(matches!(fails(0, 0, Allocate::Extend), Error::Invalid(_)));
    assert!(matches!(fails(u64::MAX, 1, Allocate::PunchHole), Error::TooLarge { .. }));
    assert!(matches!(fails(1 << 62, 1, Allocate::Extend), Error::NoSpace { .. }));
    assert_eq!(f.attr().unwrap().size, 0);
    let root = view.allocate(view.root(), 0, 1, Allocate::Extend);
    assert!(matches!(root, Err(Error::IsADirectory { .. })));
    assert!(matches!(view.seek_data(view.root(), 0), Err(Error::IsADirectory { .. })));
    let fifo = view.mknod(view.root(), "p".as_ref(), FileKind::Fifo, 0o644, 0, owner()).unwrap();
    assert!(matches!(view.seek_hole(fifo.node, 0), Err(Error::Invalid(_))));
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 % 253) as u8 + 1).collect()
}

#[test]
pub(super) fn large_ranges_are_copied_by_reference() {
    let (home, datafs, view) = setup();
    let data = pattern(300_000);
    view.write_file("source", &data).unwrap();
    datafs.snapshot_create(&"v".parse().unwrap(), &"s".parse().unwrap()).unwrap();
    let source = view.open(node(&view, "source"), OpenFlags::READ).unwrap();
    let target = file(&view, "target");
    target.write_at(0, &[9; 1_000]).unwrap();
    assert_eq!(source.copy_to(0, &target, 500, u64::MAX).unwrap(), 300_000);
    let mut expected = vec![9; 500];
    expected.extend_from_slice(&data);
    assert_eq!(target.read_at(0, 400_000).unwrap(), expected);
    target.fsync().unwrap();
    assert!(objects(home.path()) <= 2, "the large part is shared");

    // A snapshot's file can be the source after it is gone from the live tree. An overwrite in one file does
    // not change the other.
    drop(source);
    view.remove_file("source").unwrap();
    let s = datafs.view(&VolumeSpec::at("v".parse().unwrap(), "s".parse().unwrap())).unwrap();
    let old = s.open(node(&s, "source"), OpenFlags::READ).unwrap();
    assert_eq!(old.copy_to(100_000, &target, 0, 150_000).unwrap(), 150_000);
    expected[..150_000].copy_from_slice(&data[100_000..250_000]);
    target.write_at(70_000, &[1; 100]).unwrap();
    expected[70_000..70_100].fill(1);
    assert_eq!(old.read_at(0, 300_000).unwrap(), data);
    drop(old);
    target.fsync().unwrap();
    datafs.snapshot_delete(&"v".parse().unwrap(), &"s".parse().unwrap()).unwrap();
    datafs.gc().unwrap();
    assert_eq!(target.read_at(0, 400_000).unwrap(), expected);
    assert_eq!(rows(&datafs, b'j'), objects(home.path()));
}

#[test]
pub(super) fn copies_inside_one_file_and_with_holes() {
    let (home, datafs, view) = setup();
    let f = file(&view, "f");
    let mut expected = pattern(200_000);
    f.write_at(0, &expected).unwrap();
    view.allocate(f.node(), 90_000, 10_000, Allocate::PunchHole).unwrap();
    expected[90_000..100_000].fill(0);
    assert!(matches!(f.copy_to(0, &f, 1, 100_000), Err(Error::Invalid(_))));
    assert_eq!(f.copy_to(0, &f, 100_000, 100_000).unwrap(), 100_000);
    expected.copy_within(0..100_000, 100_000);
    assert_eq!(f.read_at(0, 300_000).unwrap(), expected);
    assert_eq!(view.seek_hole(f.node(), 100_000).unwrap(), Some(190_000));
    // Small copies copy bytes.
    assert_eq!(f.copy_to(5, &f, 1_000, 10).unwrap(), 10);
    expected.copy_within(5..15, 1_000);
    assert_eq!(f.copy_to(199_995, &f, 0, 100).unwrap(), 5);
    expected.copy_within(199_995..200_000, 0);
    assert_eq!(f.copy_to(200_000, &f, 0, 100).unwrap(), 0);
    assert_eq!(f.read_at(0, 300_000).unwrap(), expected);
    drop(f);
    view.remove_file("f").unwrap();
    datafs.gc().unwrap();
    assert_eq!((rows(&datafs, b'j'), objects(home.path())), (0, 0));
}

#[test]
pub(super) fn names_are_exchanged() {
    let (_home, _datafs, view) = setup();
    view.write_file("a/deep/f", b"file").unwrap();
    view.write_file("b/g", b"other").unwrap();
    let (root, a, b) = (view.root(), node(&view, "a"), node(&view, "b"));
    let swap = |p: Node, n: &str, q: Node, m: &str| view.exchange(p, n.as_ref(), q, m.as_ref());
    // A directory and a file, in different directories: the link counts follow.
    swap(a, "deep", b, "g").unwrap();
    assert_eq!(view.read_file("a/deep").unwrap(), b"other".as_slice());
    assert_eq!(view.read_file("b/g/f").unwrap(), b"file".as_slice());
    assert_eq!((view.getattr(a).unwrap().nlink, view.getattr(b).unwrap().nlink), (2, 3));
    assert_eq!(view.lookup(node(&view, "b/g"), OsStr::new("..")).unwrap().node, b);
    // Two directories, beside each other.
    swap(root, "a", root, "b").unwrap();
    assert_eq!((node(&view, "a"), node(&view, "b")), (b, a));
    assert_eq!(view.getattr(root).unwrap().nlink, 4);
    // Neither may end up below itself, and both must exist.
    assert!(matches!(swap(root, "a", b, "g"), Err(Error::Invalid(_))));
    assert!(matches!(swap(b, "g", root, "a"), Err(Error::Invalid(_))));
    assert!(matches!(swap(root, "a", root, "none"), Err(Error::NotFound { .. })));
    assert!(matches!(swap(root, "none", root, "a"), Err(Error::NotFound { .. })));
    swap(root, "a", root, "a").unwrap();
    assert_eq!(view.read_file("a/g/f").unwrap(), b"file".as_slice());
}

#[test]
pub(super) fn whoever_changes_a_program_takes_its_privileges() {
    let (_home, _datafs, view) = setup();
    let f = file(&view, "f");
    let chmod = |mode| view.setattr(f.node(), &SetAttr { mode: Some(mode), ..SetAttr::default() }).unwrap();
    let mode = || view.getattr(f.node()).unwrap().mode;
    chmod(0o6775);
    f.write_at(0, b"x").unwrap();
    f.flush().unwrap();
    assert_eq!(mode(), 0o6775, "with privilege it keeps them");
    f.write_at_unprivileged(0, b"y").unwrap();
    assert_eq!(mode(), 0o775, "gone at once");
    f.write_at(0, b"z").unwrap();
    f.flush().unwrap();
    assert_eq!(mode(), 0o775);
    chmod(0o6765);
    let cut = SetAttr { size: Some(0), drop_privileges: true, ..SetAttr::default() };
    assert_eq!(
        view.setattr(f.node(), &cut).unwrap().mode,
        0o2765,
        "no group execution: a lock, no privilege"
    );
    chmod(0o6775);
    view.setattr(f.node(), &SetAttr { uid: Some(5), ..SetAttr::default() }).unwrap();
    assert_eq!(mode(), 0o775);
    let capability = "security.capability";
    set(&view, f.node(), capability, b"all", SetXattr::Any).unwrap();
    f.write_at(0, b"x").unwrap();
    f.flush().unwrap();
    assert!(matches!(get(&view, f.node(), capability), Err(Error::NoAttribute { .. })));
    set(&view, f.node(), capability, b"all", SetXattr::Any).unwrap();
    view.allocate(f.node(), 0, 1, Allocate::PunchHole).unwrap();
    assert!(matches!(get(&view, f.node(), capability), Err(Error::NoAttribute { .. })));
    let source = file(&view, "source");
    source.write_at(0, &[7; 300_000]).unwrap();
    let program = file(&view, "program");
    for len in [1_000, 300_000] {
        set(&view, program.node(), capability, b"all", SetXattr::Any).unwrap();
        assert_eq!(source.copy_to(0, &program, 0, len).unwrap(), len);
        program.flush().unwrap();
        assert!(matches!(get(&view, program.node(), capability), Err(Error::NoAttribute { .. })), "{len}");
    }
    let d = view.mkdir(view.root(), "d".as_ref(), 0o3777, owner()).unwrap().node;
    assert_eq!(view.setattr(d, &SetAttr { gid: Some(5), ..SetAttr::default() }).unwrap().mode, 0o3777);
}
