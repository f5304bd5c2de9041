//! Steps of the model test that change or show names, attributes and snapshots.

use std::collections::BTreeMap;

use super::beside::ALL;
use super::check::{assert_sound, check_node, compare};
use super::files::Handle;
use super::step::{Op, Step};
use super::world::{World, place, snapshot, snapshot_name, v, walk};
use crate::error::Result;
use crate::fs::tests::owner;
use crate::fs::tests::reference::{Body, Fail, NAMES, ROOT};
use crate::fs::{OpenFlags, SetAttr, SetXattr, View};
use crate::node::{FileKind, Node};
use crate::publish::Publish;

impl World {
    pub(super) fn apply(&mut self, Step { actor, op }: &Step) {
        let actor = *actor;
        let view = self.session(actor).view.clone();
        match op {
            Op::Create { path, exclusive, slot } => self.create(actor, path, *exclusive, *slot),
            Op::CreateUnnamed { directory, exclusive, slot } => {
                self.create_unnamed(actor, directory, *exclusive, *slot);
            }
            Op::Mkdir(path) => {
                let real =
                    place(&view, path).and_then(|(parent, name)| view.mkdir(parent, name, 0o755, owner()));
                self.made(path, real.map(|attr| attr.node), Body::Directory(BTreeMap::new()), 0o755);
            }
            Op::Symlink(path, target) => {
                let target = format!("to/{target}");
                let real = place(&view, path)
                    .and_then(|(parent, name)| view.symlink(parent, name, target.as_ref(), owner()));
                self.made(path, real.map(|attr| attr.node), Body::Symlink(target), 0o777);
            }
            Op::Mkfifo(path) => {
                let real = place(&view, path)
                    .and_then(|(parent, name)| view.mknod(parent, name, FileKind::Fifo, 0o600, 0, owner()));
                self.made(path, real.map(|attr| attr.node), Body::Fifo, 0o600);
            }
            Op::Unlink(path) => {
                let real = place(&view, path).and_then(|(parent, name)| view.unlink(parent, name));
                let model = self.tree.place(path).and_then(|place| {
                    let ino = self.tree.find(path)?;
                    if self.tree.is_directory(ino) { Err(Fail::IsADirectory) } else { Ok((place, ino)) }
                });
                compare(real, model.map(drop));
                if let Ok((place, ino)) = model {
                    self.tree.remove_name(place);
                    self.drop_link(ino);
                }
            }
            Op::Rmdir(path) => {
                let real = place(&view, path).and_then(|(parent, name)| view.rmdir(parent, name));
                compare(real, self.tree.remove_directory(path));
            }
            Op::Rename { from, to, no_replace } => {
                let real = place(&view, from).and_then(|(parent, name)| {
                    let (new_parent, new_name) = place(&view, to)?;
                    view.rename(parent, name, new_parent, new_name, *no_replace)
                });
                let model = self.tree.rename(from, to, *no_replace);
                compare(real, model.map(drop));
                if let Ok(Some(dropped)) = model {
                    self.drop_link(dropped);
                }
            }
            Op::Exchange(from, to) => {
                let real = place(&view, from).and_then(|(parent, name)| {
                    let (other, other_name) = place(&view, to)?;
                    view.exchange(parent, name, other, other_name)
                });
                compare(real, self.tree.exchange(from, to));
            }
            Op::Xattr { path, name, value, how } => self.xattr(&view, path, *name, *value, *how),
            Op::Link(from, to) => {
                let real = walk(&view, from).and_then(|node| {
                    let (parent, name) = place(&view, to)?;
                    view.link(node, parent, name)
                });
                let model = self.tree.find(from).and_then(|ino| {
                    self.tree.place(to)?;
                    if self.tree.is_directory(ino) {
                        return Err(Fail::NotPermitted);
                    }
                    Ok((ino, self.tree.free(to)?))
                });
                compare(real, model.map(drop));
                if let Ok((ino, place)) = model {
                    self.tree.link(ino, place);
                }
            }
            Op::Chmod(path, mode) => {
                let set = SetAttr { mode: Some(*mode), ..SetAttr::default() };
                let real = walk(&view, path).and_then(|node| view.setattr(node, &set));
                let model = self.tree.find(path);
                compare(real, model.map(drop));
                if let Ok(ino) = model {
                    self.tree.inodes.get_mut(&ino).unwrap().mode = *mode;
                }
            }
            Op::Look(path) => {
                let model = self.tree.find(path);
                if let Some(node) = compare(walk(&view, path), model.map(drop)) {
                    let ino = model.unwrap();
                    self.meet(ino, node);
                    check_node(&view, node, &self.seen_by(actor), ino, false);
                }
            }
            Op::Publish { path, len, byte } => self.publish(actor, path, *len, *byte),
            Op::Key { key, value, delete } => {
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
                let real = self.session(actor).datafs.snapshot_create(&v(), &snapshot_name(*n));
                let exists = self.snapshots.contains_key(n);
                compare(real, if exists { Err(Fail::Exists) } else { Ok(()) });
                if !exists {
                    self.snapshots.insert(*n, self.tree.clone());
                }
            }
            Op::DeleteSnapshot(n) => {
                let real = self.session(actor).datafs.snapshot_delete(&v(), &snapshot_name(*n));
                let existed = self.snapshots.remove(n).is_some();
                compare(real, if existed { Ok(()) } else { Err(Fail::NotFound) });
                for session in self.sessions.iter_mut().flatten() {
                    session.past.iter_mut().for_each(|past| past.snapshot_is_gone(*n));
                }
            }
            Op::ReadSnapshot(n, path) => {
                let Some(tree) = self.snapshots.get(n) else { return };
                let view = self.sessions[actor].as_ref().unwrap().datafs.view(&snapshot(*n)).unwrap();
                let model = tree.find(path);
                if let Some(node) = compare(walk(&view, path), model.map(drop)) {
                    check_node(&view, node, tree, model.unwrap(), true);
                }
            }
            Op::List(path) => self.list(actor, path),
            Op::ListOn(count) => self.list_on(actor, *count),
            Op::Compact => {
                self.session(actor).datafs.compact(None, &ALL).unwrap();
            }
            Op::Collect => {
                self.session(actor).datafs.gc().unwrap();
            }
            Op::SyncFolder => view.fsync_dir(view.root()).unwrap(),
            Op::Fsck => assert_sound(&self.session(actor).datafs),
            Op::LookAtAll => self.look_at_all(actor),
            Op::Reopen => {
                self.reopen(actor);
            }
            of_a_file => self.apply_to_file(actor, of_a_file),
        }
        self.note_names();
    }

    fn made(&mut self, path: &[u8], real: Result<Node>, body: Body, mode: u32) {
        let model = self.tree.free(path);
        let node = compare(real, model.map(drop));
        if let Ok(place) = model {
            let ino = self.tree.add(place, body, mode);
            self.meet(ino, node.unwrap());
        }
    }

    fn xattr(&mut self, view: &View, path: &[u8], name: u8, value: Option<u8>, how: u8) {
        let name = format!("user.{name}");
        let how = [SetXattr::Any, SetXattr::Create, SetXattr::Replace][usize::from(how)];
        let real = walk(view, path).and_then(|node| match value {
            Some(value) => view.xattr_set(node, name.as_ref(), &[value; 9], how),
            None => view.xattr_remove(node, name.as_ref()),
        });
        let model = self.tree.find(path).and_then(|ino| {
            let inode = &self.tree.inodes[&ino];
            let special = matches!(inode.body, Body::Symlink(_) | Body::Fifo);
            match (value, inode.xattrs.contains_key(&name), how) {
                (Some(_), _, _) if special => Err(Fail::NotPermitted),
                (Some(_), true, SetXattr::Create) => Err(Fail::Exists),
                (Some(_), false, SetXattr::Replace) | (None, false, _) => Err(Fail::NoAttribute),
                _ => Ok(ino),
            }
        });
        compare(real, model.map(drop));
        if let Ok(ino) = model {
            let xattrs = &mut self.tree.inodes.get_mut(&ino).unwrap().xattrs;
            match value {
                Some(value) => xattrs.insert(name, vec![value; 9]),
                None => xattrs.remove(&name),
            };
        }
    }

    fn publish(&mut self, actor: usize, path: &[u8], len: usize, byte: u8) {
        let view = self.session(actor).view.clone();
        let text: Vec<&str> = path.iter().map(|part| NAMES[usize::from(*part)]).collect();
        let mut staged = view.stage().unwrap();
        staged.append(&vec![byte; len]).unwrap();
        let real = view.publish(Publish::new().file(text.join("/"), staged.finish().unwrap()));
        // Missing parents are created; a parent that is no directory stops the publish.
        let blocked = (1..path.len()).find_map(|depth| {
            self.tree.find(&path[..depth]).ok().filter(|ino| !self.tree.is_directory(*ino))
        });
        let target = self.tree.find(path).ok();
        let model = match (blocked, target) {
            (Some(_), _) => Err(Fail::NotADirectory),
            (None, Some(ino)) if self.tree.is_directory(ino) => Err(Fail::IsADirectory),
            _ => Ok(()),
        };
        if compare(real, model).is_none() {
            return;
        }
        let mut parent = ROOT;
        for part in &path[..path.len() - 1] {
            let name = NAMES[usize::from(*part)];
            parent = match self.tree.children(parent).unwrap().get(name) {
                Some(ino) => *ino,
                None => self.tree.add((parent, name), Body::Directory(BTreeMap::new()), 0o755),
            };
        }
        if let Some(old) = target {
            self.drop_link(old);
        }
        let place = (parent, NAMES[usize::from(*path.last().unwrap())]);
        self.tree.add(place, Body::File(vec![byte; len]), 0o644);
    }

    fn create_unnamed(&mut self, actor: usize, directory: &[u8], exclusive: bool, slot: usize) {
        self.close(actor, slot);
        let view = self.session(actor).view.clone();
        let flags = OpenFlags { exclusive, ..OpenFlags::READ_WRITE };
        let real = walk(&view, directory).and_then(|node| view.create_unnamed(node, 0o640, owner(), flags));
        let model = self.tree.find(directory).and_then(|ino| self.tree.children(ino).map(drop));
        let Some((attr, file)) = compare(real, model) else { return };
        assert_eq!((attr.nlink, attr.size), (0, 0));
        let ino = self.tree.add_unnamed(!exclusive, 0o640);
        self.meet(ino, attr.node);
        self.session(actor).slots[slot] = Some(Handle::new(ino, file));
    }

    fn create(&mut self, actor: usize, path: &[u8], exclusive: bool, slot: Option<usize>) {
        if let Some(slot) = slot {
            self.close(actor, slot);
        }
        let view = self.session(actor).view.clone();
        let flags = OpenFlags { exclusive, ..OpenFlags::READ_WRITE };
        let real =
            place(&view, path).and_then(|(parent, name)| view.create(parent, name, 0o640, owner(), flags));
        let model = self.tree.free(path);
        let expected = match model {
            Err(Fail::Exists) if !exclusive => self.tree.find_file(path).map(drop),
            other => other.map(drop),
        };
        let Some((attr, file)) = compare(real, expected) else { return };
        let ino = match model {
            Ok(place) => self.tree.add(place, Body::File(Vec::new()), 0o640),
            Err(_) => self.tree.find(path).unwrap(),
        };
        self.meet(ino, attr.node);
        let handle = Handle::new(ino, file);
        match slot {
            Some(slot) => self.session(actor).slots[slot] = Some(handle),
            None => self.dropped(actor, handle),
        }
    }
}
