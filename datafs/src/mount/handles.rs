//! The open files of one mount, and what the kernel may keep cached of each.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use fuser::BackingId;
use parking_lot::{Mutex, RwLock};

use super::lookup_prefetch::LookupPrefetch;
use super::stateless::Stateless;
use crate::error::{Error, Result};
use crate::fs::{Attr, Node, OpenFile};
use crate::view::View;

/// What the kernel sends for "no handle".
pub(super) const NO_HANDLE: u64 = 0;

/// One open file of the mount.
#[derive(Debug)]
pub(super) struct Handle {
    pub(super) file: OpenFile,
    pub(super) node: Node,
    pub(super) writes: bool,
    /// The kernel runs it as a program.
    pub(super) executes: bool,
    /// The contents when it was opened.
    pub(super) data_version: u64,
    /// It is only written, and the file was empty when it was opened: the kernel may hand over what is
    /// written as it comes, without keeping it. Once registered: whether it does.
    pub(super) streams: bool,
}

/// How the kernel is to use an open file.
#[derive(Debug)]
pub(super) struct Registered {
    pub(super) number: u64,
    /// It reads from this file by itself.
    pub(super) backing: Option<Arc<BackingId>>,
    /// It keeps no pages of it.
    pub(super) direct: bool,
}

/// The open files of one mount. Kept apart from the FUSE session, so that they can be flushed
/// whatever state the session is in.
#[derive(Debug)]
pub(super) struct Handles {
    pub(super) view: View,
    next: AtomicU64,
    open: RwLock<HashMap<u64, Arc<Handle>>>,
    nodes: Mutex<HashMap<Node, OpenNode>>,
    /// The cursors behind which open directories, by their handles, had no entries when they were read.
    ends: Mutex<HashMap<u64, u64>>,
    /// Files that are read without being opened here.
    stateless: Stateless,
    /// What such files are, before the kernel asks.
    ahead: LookupPrefetch,
    /// Whether the kernel takes files from us.
    passthrough: AtomicBool,
}

/// A node with files open. The kernel serves all of a node's open files either from its page cache
/// or from one backing file, so the first one decides.
#[derive(Debug)]
struct OpenNode {
    count: usize,
    /// Those whose writes the kernel does not keep. A page that it reads for somebody else meanwhile might
    /// be older than the write, so whoever opens the file as long keeps no pages either.
    streams: usize,
    backing: Option<Arc<BackingId>>,
}

impl Handles {
    pub(super) fn new(view: View) -> Handles {
        Handles {
            view,
            next: AtomicU64::new(NO_HANDLE + 1),
            open: RwLock::default(),
            nodes: Mutex::default(),
            ends: Mutex::default(),
            stateless: Stateless::default(),
            ahead: LookupPrefetch::default(),
            passthrough: AtomicBool::new(false),
        }
    }

    /// Registers an open file. `backing` is asked for a backing file when this is the node's only
    /// open file; otherwise the node's way of being read stays as it is.
    pub(super) fn insert(
        &self,
        mut handle: Handle,
        backing: impl FnOnce(&Handle) -> Option<BackingId>,
    ) -> Registered {
        // Opening a backing file may take a look at the disk: other files are opened and closed meanwhile.
        let is_first = !self.nodes.lock().contains_key(&handle.node);
        let mut backing = if is_first { backing(&handle).map(Arc::new) } else { None };
        let (backing, direct) = {
            let mut nodes = self.nodes.lock();
            let new = || OpenNode { count: 0, streams: 0, backing: backing.take() };
            let node = nodes.entry(handle.node).or_insert_with(new);
            handle.streams &= node.count == 0 && node.backing.is_none();
            node.count += 1;
            node.streams += usize::from(handle.streams);
            (node.backing.clone(), node.streams > 0)
        };
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.open.write().insert(number, Arc::new(handle));
        Registered { number, backing, direct }
    }

    /// Whether a node is open more than once.
    pub(super) fn is_shared(&self, node: Node) -> bool {
        self.nodes.lock().get(&node).is_some_and(|node| node.count > 1)
    }

    pub(super) fn is_open(&self, node: Node) -> bool {
        self.nodes.lock().contains_key(&node)
    }

    /// Files that are open.
    pub(super) fn count(&self) -> usize {
        self.open.read().len()
    }

    pub(super) fn get(&self, number: u64) -> Result<Arc<Handle>> {
        self.open.read().get(&number).cloned().ok_or(Error::BadHandle("anything"))
    }

    /// Forgets an open file. What was written through a mapping after the last flush is committed when
    /// the file is dropped; the kernel has nobody left to tell an error.
    pub(super) fn release(&self, number: u64) {
        let Some(handle) = self.open.write().remove(&number) else { return };
        let mut nodes = self.nodes.lock();
        if let Some(node) = nodes.get_mut(&handle.node) {
            node.count -= 1;
            node.streams -= usize::from(handle.streams);
            if node.count == 0 {
                nodes.remove(&handle.node);
            }
        }
    }

    /// A number for a directory that is opened.
    pub(super) fn open_directory(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Notes that an open directory was read up to its end, which is at this cursor.
    pub(super) fn ends_at(&self, number: u64, cursor: u64) {
        if number != NO_HANDLE {
            self.ends.lock().insert(number, cursor);
        }
    }

    /// Whether an open directory was read up to its end at this cursor just before. Its reader asks once
    /// more than there is; who asks again sees what was added since.
    pub(super) fn is_at_end(&self, number: u64, cursor: u64) -> bool {
        number != NO_HANDLE && self.ends.lock().remove(&number) == Some(cursor)
    }

    /// Forgets an open directory.
    pub(super) fn release_directory(&self, number: u64) {
        self.ends.lock().remove(&number);
    }

    /// Whether a node is open to be run as a program.
    pub(super) fn is_executed(&self, node: Node) -> bool {
        self.open.read().values().any(|handle| handle.executes && handle.node == node)
    }

    /// The files that are open for writing.
    pub(super) fn writers(&self) -> Vec<Arc<Handle>> {
        self.open.read().values().filter(|handle| handle.writes).cloned().collect()
    }

    /// Makes what was written through a handle visible.
    pub(super) fn flush(&self, handle: &Handle) -> Result<()> {
        if handle.writes { handle.file.flush() } else { Ok(()) }
    }

    /// Flushes every open file; the first error is returned, the others are logged.
    pub(super) fn flush_all(&self) -> Result<()> {
        let open: Vec<_> = self.open.read().values().cloned().collect();
        let mut result = Ok(());
        for handle in open {
            if let Err(error) = self.flush(&handle) {
                tracing::error!(%error, node = handle.node.to_u64(), "flushing an open file");
                if result.is_ok() {
                    result = Err(error);
                }
            }
        }
        result
    }

    /// Forgets everything, after the kernel has.
    pub(super) fn clear(&self) {
        self.open.write().clear();
        self.nodes.lock().clear();
        self.ends.lock().clear();
        self.stateless.clear();
        self.ahead.clear();
    }

    /// A file of a snapshot that the kernel reads without having opened it here.
    pub(super) fn stateless(&self, node: Node) -> Result<Arc<OpenFile>> {
        if node.is_live() {
            return Err(Error::BadHandle("anything"));
        }
        self.stateless.get(&self.view, node)
    }

    /// An entry of a directory of a snapshot, with whose file the kernel is going to do the same.
    pub(super) fn lookup_stateless(&self, parent: Node, name: &OsStr) -> Result<Attr> {
        let Some(found) = self.ahead.take(&self.view, parent, name) else {
            return self.view.lookup(parent, name);
        };
        if let Some(layout) = found.layout {
            self.stateless.put(Arc::new(OpenFile::known(&self.view, found.attr.node, layout)));
        }
        Ok(found.attr)
    }

    pub(super) fn set_passthrough(&self, granted: bool) {
        self.passthrough.store(granted, Ordering::Relaxed);
    }

    /// Whether the kernel takes files from us.
    pub(super) fn has_passthrough(&self) -> bool {
        self.passthrough.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::fs::OpenFlags;
    use crate::fs::tests::{owner, setup};

    #[test]
    fn other_files_are_opened_while_a_backing_file_is() {
        let (_home, _datafs, view) = setup();
        let handles = Handles::new(view.clone());
        let handle = |name: &str| {
            let flags = OpenFlags::READ_WRITE;
            let (attr, file) = view.create(view.root(), name.as_ref(), 0o644, owner(), flags).unwrap();
            let node = attr.node;
            Handle { file, node, writes: true, executes: false, data_version: 0, streams: true }
        };
        let slow = handle("slow");
        let node = slow.node;
        let registered = handles.insert(slow, |_| {
            assert!(handles.nodes.try_lock().is_some(), "the table is locked");
            let other = handles.insert(handle("other"), |_| None).number;
            handles.release(other);
            None
        });
        assert!(registered.direct && registered.backing.is_none() && !handles.is_shared(node));
        handles.release(registered.number);
        assert_eq!(handles.count(), 0);
    }
}
