//! Open files in the model test: what a session has written and not flushed, and when other sessions see it.

use super::check::{assert_bytes, compare};
use super::step::{How, Op, SLOTS};
use super::world::{World, place, snapshot, walk};
use crate::error::{Error, Result};
use crate::fs::tests::reference::{Fail, kind_of};
use crate::fs::{Allocate, OpenFile, OpenFlags, SetAttr};

/// An open file of the live tree.
pub(super) struct Handle {
    pub(super) ino: u64,
    file: OpenFile,
}

impl Handle {
    pub(super) fn new(ino: u64, file: OpenFile) -> Handle {
        Handle { ino, file }
    }
}

/// An open file of a snapshot.
pub(super) struct Past {
    /// `None` once it was deleted: reads may fail then, but must not return wrong bytes.
    snapshot: Option<u8>,
    bytes: Vec<u8>,
    file: OpenFile,
}

impl Past {
    pub(super) fn snapshot_is_gone(&mut self, n: u8) {
        self.snapshot = self.snapshot.filter(|snapshot| *snapshot != n);
    }
}

/// Unflushed writes of a session to a file.
#[derive(Debug, Default)]
pub(super) struct Pending {
    writes: Vec<(usize, Vec<u8>)>,
    start: usize,
    end: usize,
    /// Set when all writes are appends: the end of the file that they started from.
    append_base: Option<usize>,
}

impl Pending {
    /// Puts the writes over the file's bytes, as the session reads them.
    pub(super) fn put_over(&self, bytes: &mut Vec<u8>) {
        self.put(bytes, |offset| offset);
    }

    fn put(&self, bytes: &mut Vec<u8>, place: impl Fn(usize) -> usize) {
        for (offset, data) in &self.writes {
            put(bytes, place(*offset), data);
        }
    }
}

fn put(bytes: &mut Vec<u8>, offset: usize, data: &[u8]) {
    if data.is_empty() {
        return;
    }
    let end = offset + data.len();
    if bytes.len() < end {
        bytes.resize(end, 0);
    }
    bytes[offset..end].copy_from_slice(data);
}

impl World {
    /// The bytes of a file as a session sees them.
    fn current(&self, actor: usize, ino: u64) -> Vec<u8> {
        let mut bytes = self.tree.bytes(ino).to_vec();
        if let Some(pending) = self.sessions[actor].as_ref().unwrap().pending.get(&ino) {
            pending.put_over(&mut bytes);
        }
        bytes
    }

    fn flush(&mut self, actor: usize, ino: u64) {
        let Some(pending) = self.session(actor).pending.remove(&ino) else { return };
        let bytes = self.tree.bytes_mut(ino);
        // Appends go to the current end of the file.
        let len = bytes.len();
        let base = pending.append_base.unwrap_or(len);
        pending.put(bytes, |offset| offset + len - base);
    }

    /// Truncates or extends the file. The session's writes before the new end are flushed first.
    fn resize(&mut self, actor: usize, ino: u64, size: usize) {
        match self.session(actor).pending.get(&ino) {
            Some(pending) if pending.start >= size => drop(self.session(actor).pending.remove(&ino)),
            _ => self.flush(actor, ino),
        }
        self.tree.bytes_mut(ino).resize(size, 0);
    }

    pub(super) fn close(&mut self, actor: usize, slot: usize) {
        if let Some(handle) = self.session(actor).slots[slot].take() {
            self.dropped(actor, handle);
        }
    }

    pub(super) fn close_all(&mut self, actor: usize) {
        (0..SLOTS).for_each(|slot| self.close(actor, slot));
        self.session(actor).past = None;
    }

    /// Applies the close of a handle.
    pub(super) fn dropped(&mut self, actor: usize, handle: Handle) {
        let (ino, write) = (handle.ino, handle.file.flags().write);
        drop(handle);
        if write {
            self.flush(actor, ino);
        }
        if !self.session(actor).has_open(ino) {
            self.session(actor).pending.remove(&ino);
        }
        if !self.is_open(ino) && self.tree.inodes[&ino].nlink == 0 {
            self.tree.inodes.remove(&ino);
        }
    }

    pub(super) fn apply_to_file(&mut self, actor: usize, op: &Op) {
        match op {
            Op::Truncate(path, size) => {
                let view = self.session(actor).view.clone();
                let set = SetAttr { size: Some(*size), ..SetAttr::default() };
                let real = walk(&view, path).and_then(|node| view.setattr(node, &set));
                let model = self.tree.find_file(path);
                compare(real, model.map(drop));
                if let Ok(ino) = model {
                    self.resize(actor, ino, *size as usize);
                }
            }
            Op::Open { slot, path, how } => {
                self.close(actor, *slot);
                let flags = match how {
                    How::Read => OpenFlags::READ,
                    How::ReadWrite => OpenFlags::READ_WRITE,
                    How::Append => OpenFlags { append: true, ..OpenFlags::READ_WRITE },
                    How::Truncate => OpenFlags { truncate: true, ..OpenFlags::READ_WRITE },
                };
                let view = self.session(actor).view.clone();
                let real = walk(&view, path).and_then(|node| view.open(node, flags));
                let model = self.tree.find_file(path);
                if let Some(file) = compare(real, model.map(drop)) {
                    let ino = model.unwrap();
                    if *how == How::Truncate {
                        self.resize(actor, ino, 0);
                    }
                    self.session(actor).slots[*slot] = Some(Handle { ino, file });
                }
            }
            Op::Close(slot) => self.close(actor, *slot),
            Op::Copy { from, offset, slot, to, len } => {
                self.copy(*from, *offset, (actor, *slot), *to, *len);
            }
            Op::CopyPast { offset, slot, to, len } => self.copy_past(*offset, (actor, *slot), *to, *len),
            Op::OpenPast(n, path) => {
                let Some(tree) = self.snapshots.get(n) else { return };
                let model = tree.find_file(path);
                let bytes = model.map_or_else(|_| Vec::new(), |ino| tree.bytes(ino).to_vec());
                let view = self.session(actor).datafs.view(&snapshot(*n)).unwrap();
                let real = walk(&view, path).and_then(|node| view.open(node, OpenFlags::READ));
                if let Some(file) = compare(real, model.map(drop)) {
                    self.session(actor).past = Some(Past { snapshot: Some(*n), bytes, file });
                }
            }
            Op::ReadPast { offset, len } => {
                let Some(past) = &self.session(actor).past else { return };
                let start = past.bytes.len().min(*offset as usize);
                let end = past.bytes.len().min(start + len);
                match past.file.read_at(*offset, *len) {
                    Ok(read) => assert_bytes(&read, &past.bytes[start..end]),
                    Err(error) => assert!(past.snapshot.is_none(), "{error:?}"),
                }
            }
            Op::Write { slot, .. }
            | Op::Name(slot, _)
            | Op::Read { slot, .. }
            | Op::SetLen(slot, _)
            | Op::Allocate { slot, .. }
            | Op::Flush(slot, _) => {
                let Some(handle) = self.session(actor).slots[*slot].take() else { return };
                self.use_handle(actor, &handle, op);
                self.session(actor).slots[*slot] = Some(handle);
            }
            other => unreachable!("{other:?}"),
        }
    }

    fn use_handle(&mut self, actor: usize, handle: &Handle, op: &Op) {
        let Handle { ino, file } = handle;
        let (ino, flags) = (*ino, file.flags());
        match op {
            Op::Write { offset, len, byte, .. } => {
                let data = pattern(*len, *byte);
                let real = file.write_at(*offset, &data);
                if !flags.write {
                    assert!(matches!(real, Err(Error::BadHandle(_))), "{real:?}");
                    return;
                }
                assert_eq!(real.unwrap(), *len);
                self.write(actor, ino, *offset as usize, data, flags.append);
            }
            Op::Read { offset, len, .. } => {
                let current = self.current(actor, ino);
                let start = current.len().min(*offset as usize);
                let end = current.len().min(start + len);
                assert_bytes(&file.read_at(*offset, *len).unwrap(), &current[start..end]);
                assert_eq!(file.attr().unwrap().size, current.len() as u64);
            }
            Op::SetLen(_, size) => {
                let real = file.set_len(*size);
                if !flags.write {
                    assert!(matches!(real, Err(Error::BadHandle(_))), "{real:?}");
                    return;
                }
                assert_eq!(real.unwrap().size, *size);
                self.resize(actor, ino, *size as usize);
            }
            Op::Allocate { offset, len, how, .. } => {
                use Allocate::{Extend, KeepSize, PunchHole, Zero, ZeroKeepSize};
                let how = [Extend, KeepSize, PunchHole, Zero, ZeroKeepSize][usize::from(*how)];
                let attr = self.session(actor).view.allocate(file.node(), *offset, *len, how).unwrap();
                self.flush(actor, ino);
                let bytes = self.tree.bytes_mut(ino);
                let (start, end) = (*offset as usize, (*offset + *len) as usize);
                if matches!(how, Extend | Zero) && bytes.len() < end {
                    bytes.resize(end, 0);
                }
                if matches!(how, PunchHole | Zero | ZeroKeepSize) {
                    let size = bytes.len();
                    bytes[start.min(size)..end.min(size)].fill(0);
                }
                assert_eq!(attr.size, bytes.len() as u64);
            }
            Op::Name(_, path) => {
                let view = self.session(actor).view.clone();
                let real = place(&view, path).and_then(|(parent, name)| file.link(parent, name));
                let model = self.tree.place(path).and_then(|_| {
                    let inode = &self.tree.inodes[&ino];
                    let may_get_one = inode.nlink > 0 || inode.unnamed == Some(true);
                    if may_get_one { self.tree.free(path) } else { Err(Fail::NotFound) }
                });
                // The first name flushes what was written; a failure does not take that back.
                if self.tree.place(path).is_ok() && self.tree.inodes[&ino].unnamed.is_some() {
                    self.flush(actor, ino);
                }
                let attr = compare(real, model.map(drop));
                if let Ok(place) = model {
                    self.tree.link(ino, place);
                    assert_eq!(attr.unwrap().nlink, self.tree.inodes[&ino].nlink);
                }
            }
            Op::Flush(_, durable) => {
                if *durable {
                    file.fsync().unwrap()
                } else {
                    file.flush().unwrap()
                }
                self.flush(actor, ino);
            }
            other => unreachable!("{other:?}"),
        }
    }

    fn write(&mut self, actor: usize, ino: u64, offset: usize, data: Vec<u8>, append: bool) {
        if data.is_empty() {
            return;
        }
        let size = self.tree.bytes(ino).len();
        let before = self.session(actor).pending.remove(&ino);
        let known_end = before.as_ref().map_or(0, |pending| pending.end);
        let (offset, append_base) = match before.as_ref().map(|pending| pending.append_base) {
            _ if !append => (offset, None),
            Some(Some(base)) => (known_end, Some(base)),
            Some(None) => (size.max(known_end), None),
            None => (size, Some(size)),
        };
        let mut pending = before.unwrap_or(Pending { start: usize::MAX, ..Pending::default() });
        pending.start = pending.start.min(offset);
        pending.end = pending.end.max(offset + data.len());
        pending.append_base = append_base;
        pending.writes.push((offset, data));
        self.session(actor).pending.insert(ino, pending);
    }

    /// The handle in a slot and its file.
    fn handle(&self, (actor, slot): (usize, usize)) -> Option<(u64, &OpenFile)> {
        let handle = self.sessions[actor].as_ref().unwrap().slots[slot].as_ref()?;
        Some((handle.ino, &handle.file))
    }

    /// Flushes the file in a slot, because a copy flushes only when it shares objects.
    fn flush_slot(&mut self, at: (usize, usize)) {
        let Some((ino, file)) = self.handle(at) else { return };
        file.flush().unwrap();
        self.flush(at.0, ino);
    }

    fn copy(&mut self, from: (usize, usize), offset: u64, at: (usize, usize), to: u64, len: u64) {
        let Some((source, source_file)) = self.handle(from) else { return };
        let Some((target, target_file)) = self.handle(at) else { return };
        let flags = target_file.flags();
        // This test does not cover a session that overtakes another in the middle of a file.
        if !source_file.flags().read || !flags.write || flags.append || from.0 != at.0 && source == target {
            return;
        }
        self.flush_slot(from);
        self.flush_slot(at);
        let bytes = cut(self.tree.bytes(source), offset, len);
        let (Some((_, source_file)), Some((_, target_file))) = (self.handle(from), self.handle(at)) else {
            return;
        };
        let real = source_file.copy_to(offset, target_file, to, len);
        if source == target && offset.abs_diff(to) < bytes.len() as u64 {
            assert_eq!(kind_of(&real.unwrap_err()), Fail::Invalid);
            return;
        }
        self.copied(real, at, to, &bytes);
    }

    fn copy_past(&mut self, offset: u64, at: (usize, usize), to: u64, len: u64) {
        self.flush_slot(at);
        let Some((_, target)) = self.handle(at) else { return };
        let Some(past) = &self.sessions[at.0].as_ref().unwrap().past else { return };
        if past.snapshot.is_none() || !target.flags().write || target.flags().append {
            return;
        }
        let bytes = cut(&past.bytes, offset, len);
        let real = past.file.copy_to(offset, target, to, len);
        self.copied(real, at, to, &bytes);
    }

    /// A copy of so few bytes and extents is complete in one call.
    fn copied(&mut self, real: Result<u64>, at: (usize, usize), to: u64, bytes: &[u8]) {
        assert_eq!(real.unwrap(), bytes.len() as u64);
        let (ino, _) = self.handle(at).unwrap();
        put(self.tree.bytes_mut(ino), to as usize, bytes);
        self.flush_slot(at);
    }
}

/// The bytes of a range, as far as there are any.
fn cut(bytes: &[u8], offset: u64, len: u64) -> Vec<u8> {
    let start = bytes.len().min(offset as usize);
    bytes[start..bytes.len().min(start + len as usize)].to_vec()
}

fn pattern(len: usize, byte: u8) -> Vec<u8> {
    (0..len).map(|i| byte.wrapping_add((i % 251) as u8)).collect()
}
