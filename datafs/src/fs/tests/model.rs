//! Random operations, compared with a model in memory that knows nothing of epochs, extents or
//! transactions: snapshots are copies, files are vectors.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;

use proptest::prelude::*;
use proptest::test_runner::Config as Cases;

use super::reference::{Body, Fail, Inode, NAMES, Path, ROOT, Tree, kind_of};
use super::*;
use crate::error::Result;
use crate::fs::{Allocate, FileKind, Node, OpenFile, OpenFlags, SetAttr, SetXattr};
use crate::name::{Name, VolumeSpec};
use crate::publish::Publish;

const SLOTS: usize = 3;

#[derive(Debug, Clone)]
enum Op {
    Create(Path, bool),
    Mkdir(Path),
    Symlink(Path, u8),
    Unlink(Path),
    Rmdir(Path),
    Rename(Path, Path, bool),
    Exchange(Path, Path),
    Link(Path, Path),
    Xattr(Path, u8, Option<u8>, u8),
    Chmod(Path, u32),
    Truncate(Path, u64),
    Open(usize, Path),
    Write(usize, u64, usize, u8),
    Read(usize, u64, usize),
    SetLen(usize, u64),
    Allocate(usize, u64, u64, u8),
    Copy(usize, u64, usize, u64, u64),
    Flush(usize, bool),
    Close(usize),
    Publish(Path, usize, u8),
    Keys(u8, u8, bool),
    Snapshot(u8),
    DeleteSnapshot(u8),
    ReadSnapshot(u8, Path),
    Collect,
    OtherProcess(bool),
    Reopen,
}

fn path() -> impl Strategy<Value = Path> {
    prop::collection::vec(0..NAMES.len() as u8, 1..4)
}

fn op() -> impl Strategy<Value = Op> {
    let offset = prop_oneof![0u64..64, 0u64..20_000, Just(4096u64)];
    let len = prop_oneof![0usize..64, 0usize..9_000, Just(4096usize)];
    prop_oneof![
        6 => (path(), any::<bool>()).prop_map(|(p, x)| Op::Create(p, x)),
        6 => path().prop_map(Op::Mkdir),
        1 => (path(), any::<u8>()).prop_map(|(p, t)| Op::Symlink(p, t)),
        3 => path().prop_map(Op::Unlink),
        2 => path().prop_map(Op::Rmdir),
        5 => (path(), path(), any::<bool>()).prop_map(|(a, b, n)| Op::Rename(a, b, n)),
        2 => (path(), path()).prop_map(|(a, b)| Op::Exchange(a, b)),
        2 => (path(), path()).prop_map(|(a, b)| Op::Link(a, b)),
        3 => (path(), 0u8..3, any::<Option<u8>>(), 0u8..3).prop_map(|(p, n, v, h)| Op::Xattr(p, n, v, h)),
        1 => (path(), 0u32..0o2000).prop_map(|(p, m)| Op::Chmod(p, m)),
        2 => (path(), offset.clone()).prop_map(|(p, s)| Op::Truncate(p, s)),
        8 => (0..SLOTS, path()).prop_map(|(s, p)| Op::Open(s, p)),
        10 => (0..SLOTS, offset.clone(), len.clone(), any::<u8>())
            .prop_map(|(s, o, l, b)| Op::Write(s, o, l, b)),
        4 => (0..SLOTS, offset.clone(), len.clone()).prop_map(|(s, o, l)| Op::Read(s, o, l)),
        1 => (0..SLOTS, 0u64..200_000).prop_map(|(s, o)| Op::SetLen(s, o)),
        2 => (0..SLOTS, offset.clone()).prop_map(|(s, o)| Op::SetLen(s, o)),
        3 => (0..SLOTS, offset.clone(), 1u64..9_000, 0u8..5).prop_map(|(s, o, l, h)| Op::Allocate(s, o, l, h)),
        3 => (0..SLOTS, offset.clone(), 0..SLOTS, offset.clone(), 0u64..90_000)
            .prop_map(|(s, o, t, to, l)| Op::Copy(s, o, t, to, l)),
        3 => (0..SLOTS, prop::bool::weighted(0.2)).prop_map(|(s, d)| Op::Flush(s, d)),
        3 => (0..SLOTS).prop_map(Op::Close),
        4 => (path(), len, any::<u8>()).prop_map(|(p, l, b)| Op::Publish(p, l, b)),
        2 => (0u8..3, any::<u8>(), any::<bool>()).prop_map(|(k, v, d)| Op::Keys(k, v, d)),
        3 => (0u8..4).prop_map(Op::Snapshot),
        2 => (0u8..4).prop_map(Op::DeleteSnapshot),
        4 => (0u8..4, path()).prop_map(|(s, p)| Op::ReadSnapshot(s, p)),
        1 => Just(Op::Collect),
        2 => any::<bool>().prop_map(Op::OtherProcess),
        1 => Just(Op::Reopen),
    ]
}

/// The model and the real thing, side by side.
struct World {
    home: tempfile::TempDir,
    datafs: Datafs,
    view: View,
    /// Like another process: nothing in memory is shared.
    other: Datafs,
    tree: Tree,
    next: u64,
    snapshots: BTreeMap<u8, Tree>,
    slots: [Option<(u64, OpenFile)>; SLOTS],
    use_other: bool,
}

fn v() -> Name {
    "v".parse().unwrap()
}

fn snapshot_name(n: u8) -> Name {
    format!("s{n}").parse().unwrap()
}

impl World {
    fn new() -> World {
        let home = tempfile::tempdir().unwrap();
        let datafs = open(home.path());
        let view = volume(&datafs);
        let other = open(home.path());
        World {
            home,
            datafs,
            view,
            other,
            tree: Tree::new(),
            next: 1,
            snapshots: BTreeMap::new(),
            slots: [const { None }; SLOTS],
            use_other: false,
        }
    }

    /// Who does the next operation: the other process only while this one has nothing open.
    fn actor(&self) -> View {
        if self.use_other && self.slots.iter().all(Option::is_none) {
            self.other.view(&VolumeSpec::live(v())).unwrap()
        } else {
            self.view.clone()
        }
    }

    fn walk(view: &View, parts: &[u8]) -> Result<Node> {
        parts
            .iter()
            .try_fold(view.root(), |at, part| Ok(view.lookup(at, NAMES[usize::from(*part)].as_ref())?.node))
    }

    fn place(view: &View, path: &Path) -> Result<(Node, &'static OsStr)> {
        let (name, parents) = path.split_last().unwrap();
        let parent = Self::walk(view, parents)?;
        // Lookup in what is no directory fails; so does this.
        view.readdir(parent, 0, 1)?;
        Ok((parent, NAMES[usize::from(*name)].as_ref()))
    }

    fn compare<T>(real: Result<T>, model: Result<(), Fail>) -> Option<T> {
        match (real, model) {
            (Ok(value), Ok(())) => Some(value),
            (Err(error), Err(fail)) => {
                assert_eq!(kind_of(&error), fail, "{error}");
                None
            }
            (Ok(_), Err(fail)) => panic!("succeeded, but the model says {fail:?}"),
            (Err(error), Ok(())) => panic!("failed, but the model says ok: {error}"),
        }
    }

    fn add(&mut self, place: (u64, &str), body: Body, mode: u32) -> u64 {
        let ino = self.next;
        self.next += 1;
        let directory = matches!(body, Body::Directory(_));
        self.tree
            .inodes
            .insert(ino, Inode { body, nlink: 1 + u32::from(directory), mode, xattrs: BTreeMap::new() });
        self.tree.inodes.get_mut(&place.0).unwrap().nlink += u32::from(directory);
        self.tree.children_mut(place.0).insert(place.1.to_owned(), ino);
        ino
    }

    fn empty_file() -> Body {
        Body::File { committed: Vec::new(), current: Vec::new() }
    }

    fn free(&self, path: &Path) -> Result<(u64, &'static str), Fail> {
        let place = self.tree.place(path)?;
        match self.tree.children(place.0)?.contains_key(place.1) {
            true => Err(Fail::Exists),
            false => Ok(place),
        }
    }

    fn drop_link(&mut self, ino: u64) {
        let inode = self.tree.inodes.get_mut(&ino).unwrap();
        inode.nlink -= 1;
        if inode.nlink == 0 && !self.slots.iter().flatten().any(|(open, _)| *open == ino) {
            self.tree.inodes.remove(&ino);
        }
    }

    fn close(&mut self, slot: usize) {
        if let Some((ino, file)) = self.slots[slot].take() {
            drop(file);
            self.tree.flush(ino);
            let open = self.slots.iter().flatten().any(|(open, _)| *open == ino);
            if !open && self.tree.inodes[&ino].nlink == 0 {
                self.tree.inodes.remove(&ino);
            }
        }
    }

    fn apply(&mut self, op: &Op) {
        let view = self.actor();
        match op {
            Op::Create(path, exclusive) => {
                let flags = OpenFlags { exclusive: *exclusive, ..OpenFlags::READ_WRITE };
                let real = Self::place(&view, path)
                    .and_then(|(parent, name)| view.create(parent, name, 0o640, owner(), flags));
                let model = self.free(path);
                let existing = self.tree.find(path).ok();
                let expected = match (model, existing) {
                    (Ok(_), _) => Ok(()),
                    (Err(Fail::Exists), Some(ino)) if !exclusive => match &self.tree.inodes[&ino].body {
                        Body::File { .. } => Ok(()),
                        Body::Directory(_) => Err(Fail::IsADirectory),
                        Body::Symlink(_) => Err(Fail::Invalid),
                    },
                    (Err(fail), _) => Err(fail),
                };
                let made = Self::compare(real, expected);
                if let Ok(place) = model {
                    self.add(place, Self::empty_file(), 0o640);
                } else if let (Some(_), Some(ino)) = (made, existing) {
                    // Opening and closing flushes what other handles wrote.
                    self.tree.flush(ino);
                }
            }
            Op::Mkdir(path) => {
                let real = Self::place(&view, path)
                    .and_then(|(parent, name)| view.mkdir(parent, name, 0o755, owner()));
                let model = self.free(path);
                Self::compare(real, model.map(drop));
                if let Ok(place) = model {
                    self.add(place, Body::Directory(BTreeMap::new()), 0o755);
                }
            }
            Op::Symlink(path, target) => {
                let target = format!("to/{target}");
                let real = Self::place(&view, path)
                    .and_then(|(parent, name)| view.symlink(parent, name, target.as_ref(), owner()));
                let model = self.free(path);
                Self::compare(real, model.map(drop));
                if let Ok(place) = model {
                    self.add(place, Body::Symlink(target), 0o777);
                }
            }
            Op::Unlink(path) => {
                let real = Self::place(&view, path).and_then(|(parent, name)| view.unlink(parent, name));
                let model = self.tree.place(path).and_then(|place| {
                    let ino = self.tree.find(path)?;
                    if self.tree.is_directory(ino) { Err(Fail::IsADirectory) } else { Ok((place, ino)) }
                });
                Self::compare(real, model.map(drop));
                if let Ok(((parent, name), ino)) = model {
                    self.tree.children_mut(parent).remove(name);
                    self.drop_link(ino);
                }
            }
            Op::Rmdir(path) => {
                let real = Self::place(&view, path).and_then(|(parent, name)| view.rmdir(parent, name));
                let model = self.tree.place(path).and_then(|place| {
                    let ino = self.tree.find(path)?;
                    if self.tree.children(ino)?.is_empty() { Ok((place, ino)) } else { Err(Fail::NotEmpty) }
                });
                Self::compare(real, model.map(drop));
                if let Ok(((parent, name), ino)) = model {
                    self.tree.children_mut(parent).remove(name);
                    self.tree.inodes.remove(&ino);
                    self.tree.inodes.get_mut(&parent).unwrap().nlink -= 1;
                }
            }
            Op::Rename(from, to, no_replace) => {
                let real = Self::place(&view, from).and_then(|(parent, name)| {
                    let (new_parent, new_name) = Self::place(&view, to)?;
                    view.rename(parent, name, new_parent, new_name, *no_replace)
                });
                let model = self.rename(from, to, *no_replace);
                Self::compare(real, model);
            }
            Op::Exchange(from, to) => {
                let real = Self::place(&view, from).and_then(|(parent, name)| {
                    let (other, other_name) = Self::place(&view, to)?;
                    view.exchange(parent, name, other, other_name)
                });
                let model = self.exchange(from, to);
                Self::compare(real, model);
            }
            Op::Xattr(path, name, value, how) => {
                let name = format!("user.{name}");
                let how = [SetXattr::Any, SetXattr::Create, SetXattr::Replace][usize::from(*how)];
                let real = Self::walk(&view, path).and_then(|node| match value {
                    Some(value) => view.xattr_set(node, name.as_ref(), &[*value; 9], how),
                    None => view.xattr_remove(node, name.as_ref()),
                });
                let model = self.tree.find(path).and_then(|ino| {
                    let inode = &self.tree.inodes[&ino];
                    match (value, inode.xattrs.contains_key(&name), how) {
                        (Some(_), _, _) if matches!(inode.body, Body::Symlink(_)) => Err(Fail::NotPermitted),
                        (Some(_), true, SetXattr::Create) => Err(Fail::Exists),
                        (Some(_), false, SetXattr::Replace) | (None, false, _) => Err(Fail::NoAttribute),
                        _ => Ok(ino),
                    }
                });
                Self::compare(real, model.map(drop));
                if let Ok(ino) = model {
                    let xattrs = &mut self.tree.inodes.get_mut(&ino).unwrap().xattrs;
                    match value {
                        Some(value) => xattrs.insert(name, vec![*value; 9]),
                        None => xattrs.remove(&name),
                    };
                }
            }
            Op::Link(from, to) => {
                let real = Self::walk(&view, from).and_then(|node| {
                    let (parent, name) = Self::place(&view, to)?;
                    view.link(node, parent, name)
                });
                let model = self.tree.find(from).and_then(|ino| {
                    self.tree.place(to)?;
                    if self.tree.is_directory(ino) {
                        return Err(Fail::NotPermitted);
                    }
                    Ok((ino, self.free(to)?))
                });
                Self::compare(real, model.map(drop));
                if let Ok((ino, (parent, name))) = model {
                    self.tree.children_mut(parent).insert(name.to_owned(), ino);
                    self.tree.inodes.get_mut(&ino).unwrap().nlink += 1;
                }
            }
            Op::Chmod(path, mode) => {
                let set = SetAttr { mode: Some(*mode), ..SetAttr::default() };
                let real = Self::walk(&view, path).and_then(|node| view.setattr(node, &set));
                let model = self.tree.find(path);
                Self::compare(real, model.map(drop));
                if let Ok(ino) = model {
                    self.tree.inodes.get_mut(&ino).unwrap().mode = *mode;
                }
            }
            Op::Truncate(path, size) => {
                let set = SetAttr { size: Some(*size), ..SetAttr::default() };
                let real = Self::walk(&view, path).and_then(|node| view.setattr(node, &set));
                let model = self.tree.find(path).and_then(|ino| match self.tree.inodes[&ino].body {
                    Body::File { .. } => Ok(ino),
                    Body::Directory(_) => Err(Fail::IsADirectory),
                    Body::Symlink(_) => Err(Fail::Invalid),
                });
                Self::compare(real, model.map(drop));
                if let Ok(ino) = model {
                    self.tree.file_mut(ino).1.resize(*size as usize, 0);
                    self.tree.flush(ino);
                }
            }
            Op::Open(slot, path) => {
                self.close(*slot);
                let view = self.view.clone();
                let real = Self::walk(&view, path).and_then(|node| view.open(node, OpenFlags::READ_WRITE));
                let model = self.tree.find(path).and_then(|ino| match self.tree.inodes[&ino].body {
                    Body::File { .. } => Ok(ino),
                    Body::Directory(_) => Err(Fail::IsADirectory),
                    Body::Symlink(_) => Err(Fail::Invalid),
                });
                if let Some(file) = Self::compare(real, model.map(drop)) {
                    self.slots[*slot] = Some((model.unwrap(), file));
                }
            }
            Op::Write(slot, offset, len, byte) => {
                if let Some((ino, file)) = &self.slots[*slot] {
                    let data: Vec<u8> = (0..*len).map(|i| byte.wrapping_add(i as u8)).collect();
                    assert_eq!(file.write_at(*offset, &data).unwrap(), *len);
                    let current = self.tree.file_mut(*ino).1;
                    if *len > 0 {
                        let end = *offset as usize + len;
                        if current.len() < end {
                            current.resize(end, 0);
                        }
                        current[*offset as usize..end].copy_from_slice(&data);
                    }
                }
            }
            Op::Read(slot, offset, len) => {
                if let Some((ino, file)) = &self.slots[*slot] {
                    let current = &*self.tree.file_mut(*ino).1;
                    let start = current.len().min(*offset as usize);
                    let end = current.len().min(start + len);
                    assert_eq!(file.read_at(*offset, *len).unwrap(), current[start..end]);
                    assert_eq!(file.attr().unwrap().size, current.len() as u64);
                }
            }
            Op::SetLen(slot, size) => {
                if let Some((ino, file)) = &self.slots[*slot] {
                    assert_eq!(file.set_len(*size).unwrap().size, *size);
                    self.tree.file_mut(*ino).1.resize(*size as usize, 0);
                    self.tree.flush(*ino);
                }
            }
            Op::Allocate(slot, offset, len, how) => {
                if let Some((ino, file)) = &self.slots[*slot] {
                    use Allocate::{Extend, KeepSize, PunchHole, Zero, ZeroKeepSize};
                    let how = [Extend, KeepSize, PunchHole, Zero, ZeroKeepSize][usize::from(*how)];
                    let attr = self.view.allocate(file.node(), *offset, *len, how).unwrap();
                    let current = self.tree.file_mut(*ino).1;
                    let (start, end) = (*offset as usize, (*offset + *len) as usize);
                    if matches!(how, Extend | Zero) && current.len() < end {
                        current.resize(end, 0);
                    }
                    if matches!(how, PunchHole | Zero | ZeroKeepSize) {
                        let size = current.len();
                        current[start.min(size)..end.min(size)].fill(0);
                    }
                    assert_eq!(attr.size, current.len() as u64);
                    self.tree.flush(*ino);
                }
            }
            Op::Copy(slot, offset, to_slot, to_offset, len) => {
                self.copy(*slot, *offset, *to_slot, *to_offset, *len)
            }
            Op::Flush(slot, durable) => {
                if let Some((ino, file)) = &self.slots[*slot] {
                    if *durable {
                        file.fsync().unwrap()
                    } else {
                        file.flush().unwrap()
                    }
                    self.tree.flush(*ino);
                }
            }
            Op::Close(slot) => self.close(*slot),
            Op::Publish(path, len, byte) => self.publish(&view, path, *len, *byte),
            Op::Keys(key, value, delete) => {
                let key = format!("k{key}");
                let publish = match delete {
                    true => Publish::new().delete_key(&key),
                    false => Publish::new()
                        .expect_key(&key, self.tree.keys.get(&key).cloned())
                        .put_key(&key, vec![*value]),
                };
                view.publish(publish).unwrap();
                match delete {
                    true => self.tree.keys.remove(&key),
                    false => self.tree.keys.insert(key, vec![*value]),
                };
            }
            Op::Snapshot(n) => {
                let real = self.datafs.snapshot_create(&v(), &snapshot_name(*n));
                let exists = self.snapshots.contains_key(n);
                Self::compare(real, if exists { Err(Fail::Exists) } else { Ok(()) });
                if !exists {
                    let mut tree = self.tree.clone();
                    for inode in tree.inodes.values_mut() {
                        if let Body::File { committed, current } = &mut inode.body {
                            current.clone_from(committed);
                        }
                    }
                    self.snapshots.insert(*n, tree);
                }
            }
            Op::DeleteSnapshot(n) => {
                let real = self.datafs.snapshot_delete(&v(), &snapshot_name(*n));
                let existed = self.snapshots.remove(n).is_some();
                Self::compare(real, if existed { Ok(()) } else { Err(Fail::NotFound) });
            }
            Op::ReadSnapshot(n, path) => {
                let Some(tree) = self.snapshots.get(n) else { return };
                let spec = VolumeSpec::at(v(), snapshot_name(*n));
                let view = self.other.view(&spec).unwrap();
                let model = tree.find(path);
                if let Some(node) = Self::compare(Self::walk(&view, path), model.map(drop)) {
                    check_node(&view, node, tree, model.unwrap());
                }
            }
            Op::Collect => {
                self.other.gc().unwrap();
            }
            Op::OtherProcess(on) => self.use_other = *on,
            Op::Reopen => {
                (0..SLOTS).for_each(|slot| self.close(slot));
                self.datafs = open(self.home.path());
                self.view = self.datafs.view(&VolumeSpec::live(v())).unwrap();
            }
        }
    }

    fn rename(&mut self, from: &Path, to: &Path, no_replace: bool) -> Result<(), Fail> {
        let (parent, name) = self.tree.place(from)?;
        let (new_parent, new_name) = self.tree.place(to)?;
        let ino = self.tree.find(from)?;
        let directory = self.tree.is_directory(ino);
        if directory && self.tree.is_below(new_parent, ino) {
            return Err(Fail::Invalid);
        }
        if let Some(replaced) = self.tree.children(new_parent)?.get(new_name).copied() {
            if no_replace {
                return Err(Fail::Exists);
            }
            if replaced == ino {
                return Ok(());
            }
            match (directory, self.tree.is_directory(replaced)) {
                (true, false) => return Err(Fail::NotADirectory),
                (false, true) => return Err(Fail::IsADirectory),
                (true, true) if !self.tree.children(replaced)?.is_empty() => {
                    return Err(Fail::NotEmpty);
                }
                (true, true) => {
                    self.tree.inodes.remove(&replaced);
                    self.tree.inodes.get_mut(&new_parent).unwrap().nlink -= 1;
                }
                (false, false) => self.drop_link(replaced),
            }
        }
        self.tree.children_mut(parent).remove(name);
        self.tree.children_mut(new_parent).insert(new_name.to_owned(), ino);
        self.tree.inodes.get_mut(&parent).unwrap().nlink -= u32::from(directory);
        self.tree.inodes.get_mut(&new_parent).unwrap().nlink += u32::from(directory);
        Ok(())
    }

    fn copy(&mut self, slot: usize, offset: u64, to_slot: usize, to_offset: u64, len: u64) {
        let (Some((from, source)), Some((to, target))) = (&self.slots[slot], &self.slots[to_slot]) else {
            return;
        };
        let bytes = self.tree.file_mut(*from).1.clone();
        let start = bytes.len().min(offset as usize);
        let bytes = &bytes[start..bytes.len().min(start + len as usize)];
        let real = source.copy_to(offset, target, to_offset, len);
        if from == to && offset.abs_diff(to_offset) < bytes.len() as u64 {
            assert_eq!(kind_of(&real.unwrap_err()), Fail::Invalid);
            return;
        }
        // So few extents are shared in one go, or so few bytes moved.
        assert_eq!(real.unwrap(), bytes.len() as u64);
        let current = self.tree.file_mut(*to).1;
        if !bytes.is_empty() {
            let end = to_offset as usize + bytes.len();
            if current.len() < end {
                current.resize(end, 0);
            }
            current[to_offset as usize..end].copy_from_slice(bytes);
        }
        // The real ones are flushed only where something is shared.
        for slot in [slot, to_slot] {
            if let Some((ino, file)) = &self.slots[slot] {
                file.flush().unwrap();
                self.tree.flush(*ino);
            }
        }
    }

    fn exchange(&mut self, from: &Path, to: &Path) -> Result<(), Fail> {
        let (parent, name) = self.tree.place(from)?;
        let (other, other_name) = self.tree.place(to)?;
        let (ino, other_ino) = (self.tree.find(from)?, self.tree.find(to)?);
        if ino == other_ino {
            return Ok(());
        }
        for (moved, to) in [(ino, other), (other_ino, parent)] {
            if self.tree.is_directory(moved) && self.tree.is_below(to, moved) {
                return Err(Fail::Invalid);
            }
        }
        self.tree.children_mut(parent).insert(name.to_owned(), other_ino);
        self.tree.children_mut(other).insert(other_name.to_owned(), ino);
        for (place, goes, comes) in [(parent, ino, other_ino), (other, other_ino, ino)] {
            let (goes, comes) = (self.tree.is_directory(goes), self.tree.is_directory(comes));
            let inode = self.tree.inodes.get_mut(&place).unwrap();
            inode.nlink = inode.nlink + u32::from(comes) - u32::from(goes);
        }
        Ok(())
    }

    fn publish(&mut self, view: &View, path: &Path, len: usize, byte: u8) {
        let text: Vec<&str> = path.iter().map(|part| NAMES[usize::from(*part)]).collect();
        let mut staged = view.stage().unwrap();
        staged.append(&vec![byte; len]).unwrap();
        let real = view.publish(Publish::new().file(text.join("/"), staged.finish().unwrap()));
        // Parents are made as needed; the first that is no directory stops it.
        let mut parent = Ok(ROOT);
        for depth in 1..path.len() {
            match self.tree.find(&path[..depth].to_vec()) {
                Ok(ino) if self.tree.is_directory(ino) => parent = Ok(ino),
                Ok(_) => {
                    parent = Err(Fail::NotADirectory);
                    break;
                }
                Err(_) => break,
            }
        }
        let target = self.tree.find(path).ok();
        let model = match (parent, target) {
            (Err(fail), _) => Err(fail),
            (_, Some(ino)) if self.tree.is_directory(ino) => Err(Fail::IsADirectory),
            _ => Ok(()),
        };
        if Self::compare(real, model).is_none() {
            return;
        }
        let mut parent = ROOT;
        for part in &path[..path.len() - 1] {
            let name = NAMES[usize::from(*part)];
            parent = match self.tree.children(parent).unwrap().get(name) {
                Some(ino) => *ino,
                None => self.add((parent, name), Body::Directory(BTreeMap::new()), 0o755),
            };
        }
        if let Some(old) = target {
            self.drop_link(old);
        }
        let bytes = vec![byte; len];
        let body = Body::File { committed: bytes.clone(), current: bytes };
        self.add((parent, NAMES[usize::from(*path.last().unwrap())]), body, 0o644);
    }

    /// Everything must be as the model says, and when everything is deleted nothing may be left.
    fn finish(mut self) {
        check_tree(&self.view, self.view.root(), &self.tree, ROOT);
        (0..SLOTS).for_each(|slot| self.close(slot));
        check_tree(&self.actor(), self.view.root(), &self.tree, ROOT);
        for (n, tree) in &self.snapshots {
            let view = self.datafs.view(&VolumeSpec::at(v(), snapshot_name(*n))).unwrap();
            check_tree(&view, view.root(), tree, ROOT);
            let root = self.view.stat(&format!(".snapshots/s{n}")).unwrap().node;
            check_tree(&self.view, root, tree, ROOT);
            check_keys(&view, tree);
        }
        check_keys(&self.view, &self.tree);
        assert_sound(&self.datafs);
        for n in self.snapshots.keys() {
            self.datafs.snapshot_delete(&v(), &snapshot_name(*n)).unwrap();
        }
        self.datafs.gc().unwrap();
        for table in [b'h', b'd', b's', b't', b'g', b'o', b'q'] {
            assert_eq!(rows(&self.datafs, table), 0, "table {}", char::from(table));
        }
        assert_eq!(rows(&self.datafs, b'j'), objects(self.home.path()));
        check_tree(&self.view, self.view.root(), &self.tree, ROOT);
        assert_sound(&self.datafs);
        self.datafs.volume_delete(&v()).unwrap();
        self.datafs.gc().unwrap();
        for table in [b'r', b'h', b'd', b'j', b'g', b'v', b'n', b'i'] {
            assert_eq!(rows(&self.datafs, table), 0, "table {}", char::from(table));
        }
        assert_eq!(objects(self.home.path()), 0);
    }
}

/// Links, names, references and objects agree, and all data is what its checksums say.
fn assert_sound(datafs: &Datafs) {
    let options = crate::fsck::FsckOptions { scrub: true, repair: false };
    let report = datafs.fsck(&options, &mut |_| {}).unwrap();
    assert!(report.is_sound(), "{:#?}", report.found);
}

fn check_node(view: &View, node: Node, tree: &Tree, ino: u64) {
    let attr = view.getattr(node).unwrap();
    let inode = &tree.inodes[&ino];
    assert_eq!((attr.nlink, attr.mode), (inode.nlink, inode.mode));
    match &inode.body {
        Body::Directory(_) => assert_eq!(attr.kind, FileKind::Directory),
        Body::Symlink(target) => assert_eq!(view.readlink(node).unwrap(), target.as_str()),
        Body::File { current, .. } => {
            assert_eq!(attr.size, current.len() as u64);
            let file = view.open(node, OpenFlags::READ).unwrap();
            assert_eq!(file.read_at(0, current.len() + 1).unwrap(), current);
            check_holes(view, node, current);
        }
    }
    let xattrs: Vec<_> =
        view.xattr_list(node).unwrap().into_iter().map(|n| n.into_string().unwrap()).collect();
    assert!(xattrs.iter().eq(inode.xattrs.keys()));
    for (name, value) in &inode.xattrs {
        assert_eq!(view.xattr_get(node, name.as_ref()).unwrap(), *value);
    }
}

/// Holes and data take turns, and a hole is all zeroes.
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

fn check_tree(view: &View, node: Node, tree: &Tree, ino: u64) {
    check_node(view, node, tree, ino);
    let Body::Directory(children) = &tree.inodes[&ino].body else { return };
    let mut seen = BTreeSet::new();
    let mut cursor = 0;
    loop {
        let page = view.readdir(node, cursor, 3).unwrap();
        let Some(last) = page.last() else { break };
        cursor = last.cursor;
        for entry in page.into_iter().filter(|e| e.name != "." && e.name != "..") {
            let name = entry.name.into_string().unwrap();
            check_tree(view, entry.node, tree, children[&name]);
            assert!(seen.insert(name));
        }
    }
    assert!(seen.iter().eq(children.keys()));
}

fn check_keys(view: &View, tree: &Tree) {
    let expected: Vec<_> = tree.keys.iter().map(|(k, v)| (k.clone(), v.clone())).collect();
    assert_eq!(view.key_scan("").unwrap(), expected);
}

/// Forty sequences, or as many as `PROPTEST_CASES` asks for.
fn cases() -> Cases {
    let asked = std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok());
    Cases { cases: asked.unwrap_or(40), failure_persistence: None, ..Cases::default() }
}

proptest! {
    #![proptest_config(cases())]
    #[test]
    fn operations_agree_with_the_model(ops in prop::collection::vec(op(), 1..300)) {
        run(&ops);
    }
}

/// The same on whatever engine the thread's tests use, fewer times.
pub(super) fn some_operations_agree_with_the_model(cases: u32) {
    let config = Cases { cases, failure_persistence: None, ..Cases::default() };
    proptest!(config, |(ops in prop::collection::vec(op(), 1..120))| run(&ops));
}

fn run(ops: &[Op]) {
    let mut world = World::new();
    for op in ops {
        world.apply(op);
    }
    world.finish();
}
