//! Checks of the model test: compare what a view shows with the reference.

use std::collections::BTreeSet;

use crate::datafs::Datafs;
use crate::error::Result;
use crate::fs::tests::reference::{Body, Fail, Tree, kind_of};
use crate::fs::{OpenFlags, View};
use crate::node::{FileKind, Node};

/// Asserts that both failed in the same way or both succeeded; then returns the value of the real call.
pub(super) fn compare<T>(real: Result<T>, model: Result<(), Fail>) -> Option<T> {
    match (real, model) {
        (Ok(value), Ok(())) => Some(value),
        (Err(error), Err(fail)) => {
            assert_eq!(kind_of(&error), fail, "{error}");
            None
        }
        (Ok(_), Err(fail)) => panic!("succeeded, but the model says {fail:?}"),
        (Err(error), Ok(())) => panic!("failed, but the model says ok: {error:?}"),
    }
}

/// Asserts that links, names, references and objects agree, and that all data matches its checksums.
pub(super) fn assert_sound(datafs: &Datafs) {
    let options = crate::fsck::FsckOptions { scrub: true, repair: false };
    let report = datafs.fsck(&options, &mut |_| {}).unwrap();
    assert!(report.is_sound(), "{:#?}", report.found);
}

/// With `holes` the check also looks for holes, which flushes what this process has written to the file.
pub(super) fn check_node(view: &View, node: Node, tree: &Tree, ino: u64, holes: bool) {
    let attr = view.getattr(node).unwrap();
    let inode = &tree.inodes[&ino];
    assert_eq!((attr.nlink, attr.mode), (inode.nlink, inode.mode), "links and mode");
    match &inode.body {
        Body::Directory(_) => assert_eq!(attr.kind, FileKind::Directory),
        Body::Fifo => assert_eq!(attr.kind, FileKind::Fifo),
        Body::Symlink(target) => assert_eq!(view.readlink(node).unwrap(), target.as_str()),
        Body::File(bytes) => {
            assert_eq!(attr.size, bytes.len() as u64);
            let file = view.open(node, OpenFlags::READ).unwrap();
            assert_bytes(&file.read_at(0, bytes.len() + 1).unwrap(), bytes);
            if holes {
                check_holes(view, node, bytes);
            }
        }
    }
    let xattrs: Vec<_> =
        view.xattr_list(node).unwrap().into_iter().map(|n| n.into_string().unwrap()).collect();
    assert!(xattrs.iter().eq(inode.xattrs.keys()));
    for (name, value) in &inode.xattrs {
        assert_eq!(view.xattr_get(node, name.as_ref()).unwrap(), *value);
    }
}

/// A short message where `assert_eq` would print all of both.
pub(super) fn assert_bytes(real: &[u8], model: &[u8]) {
    assert_eq!(real.len(), model.len(), "length of what was read");
    let differs = real.iter().zip(model).position(|(a, b)| a != b);
    if let Some(at) = differs {
        panic!("byte {at} of {} is {}, but the model says {}", real.len(), real[at], model[at]);
    }
}

/// Asserts that holes and data alternate, and that a hole is all zeroes.
fn check_holes(view: &View, node: Node, bytes: &[u8]) {
    let mut at = 0;
    while at < bytes.len() as u64 {
        let data = view.seek_data(node, at).unwrap().unwrap_or(bytes.len() as u64);
        assert!(bytes[at as usize..data as usize].iter().all(|byte| *byte == 0));
        let Some(hole) = view.seek_hole(node, data).unwrap() else { break };
        assert!(hole > data);
        at = hole;
    }
}

pub(super) fn check_tree(view: &View, node: Node, tree: &Tree, ino: u64, holes: bool) {
    check_node(view, node, tree, ino, holes);
    let Body::Directory(children) = &tree.inodes[&ino].body else { return };
    let mut seen = BTreeSet::new();
    let mut cursor = 0;
    loop {
        let page = view.readdir(node, cursor, 3).unwrap();
        let Some(last) = page.last() else { break };
        cursor = last.cursor;
        for entry in page.into_iter().filter(|e| e.name != "." && e.name != "..") {
            let name = entry.name.into_string().unwrap();
            let Some(child) = children.get(&name) else { panic!("{name} is listed, but not there") };
            check_tree(view, entry.node, tree, *child, holes);
            assert!(seen.insert(name));
        }
    }
    assert!(seen.iter().eq(children.keys()));
}

pub(super) fn check_keys(view: &View, tree: &Tree) {
    let expected: Vec<_> = tree.keys.iter().map(|(k, v)| (k.clone(), v.clone())).collect();
    assert_eq!(view.key_scan("").unwrap(), expected);
}
