//! The handle table of one mount: its open files, and the cached pages or the backing file that the kernel may
//! use for each.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use millrace_leaf::error_chain;
use parking_lot::{Mutex, RwLock};

use super::fuse::passthrough::{Backing, Registrar};
use super::handover::journal::{self, Journal, LockRecord, OpenRecord};
use super::lookup_prefetch::LookupPrefetch;
use super::stateless::Stateless;
use crate::error::{Error, Result};
use crate::fs::{OpenFile, View};
use crate::node::{Attr, Node};

/// The handle number of a request without a handle.
pub(super) const NO_HANDLE: u64 = 0;
/// Position of the server's number in the handle numbers of a held mount.
const LIFE_SHIFT: u32 = 40;

/// One open file of the mount.
#[derive(Debug)]
pub(super) struct Handle {
    pub(super) file: OpenFile,
    pub(super) node: Node,
    pub(super) writes: bool,
    /// The kernel has opened the file to run it as a program.
    pub(super) executes: bool,
    /// The version of the contents at the open.
    pub(super) data_version: u64,
    /// The file was empty at the open, and this handle only writes, so the kernel may write through without
    /// caching pages. In the table: whether the kernel does so.
    pub(super) streams: bool,
    pub(super) kept: Kept,
}

/// What the journal of a held mount keeps of an open file.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// The kernel's number of the request that opened the file.
    pub(super) request: u64,
    slot: OnceLock<u32>,
    backing: OnceLock<u32>,
    /// Something was written through the handle.
    wrote: AtomicBool,
    lost: AtomicU8,
    /// [`TOLD`], [`UNTOLD`] or [`TELLS`].
    untold: AtomicU8,
    /// The slot is given back. Locked while the record changes, so that the last one written is the newest.
    is_closed: Mutex<bool>,
}

/// `fsync` has no lost writes of the file to report.
const TOLD: u8 = 0;
/// The next `fsync` reports that writes to the file are lost, whichever handle wrote them.
const UNTOLD: u8 = 1;
/// An `fsync` reports it; the program may not have the answer yet.
const TELLS: u8 = 2;

impl Kept {
    /// For a file that a request with this number opens.
    pub(super) fn of(request: u64) -> Kept {
        Kept { request, ..Kept::default() }
    }
}

/// What a crash of an earlier server has cost an open file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lost {
    /// Writes that were not committed.
    Writes = 1,
    /// The file itself: its creation was not committed.
    File = 2,
}

impl Handle {
    /// Fails if a crash has lost writes through this handle, or the file.
    pub(super) fn check_writes(&self) -> Result<()> {
        match self.kept.lost.load(Ordering::Relaxed) {
            0 => Ok(()),
            _ => Err(Error::LostWrites { what: format!("inode {}", self.node.ino) }),
        }
    }

    /// Fails if a crash has lost the file.
    pub(super) fn check_file(&self) -> Result<()> {
        if self.kept.lost.load(Ordering::Relaxed) == Lost::File as u8 { self.check_writes() } else { Ok(()) }
    }

    /// Fails if a crash has lost writes to the file that no `fsync` through this handle has reported.
    fn check_told(&self) -> Result<()> {
        let untold = &self.kept.untold;
        match untold.compare_exchange(UNTOLD, TELLS, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => Err(Error::LostWrites { what: format!("inode {}", self.node.ino) }),
            Err(_) => Ok(()),
        }
    }

    fn record(&self, number: u64) -> OpenRecord {
        let flags = self.file.flags();
        let lost = self.kept.lost.load(Ordering::Relaxed) != 0;
        let bits = [
            (flags.read, journal::READ),
            (flags.write, journal::WRITE),
            (flags.append, journal::APPEND),
            (self.executes, journal::EXECUTES),
            (self.streams, journal::STREAMS),
            (self.kept.wrote.load(Ordering::Relaxed), journal::WROTE),
            (lost, journal::LOST),
            (self.kept.untold.load(Ordering::Relaxed) != TOLD, journal::UNTOLD),
        ];
        OpenRecord {
            bits: bits.into_iter().filter(|(is, _)| *is).fold(0, |all, (_, bit)| all | bit),
            backing: self.kept.backing.get().copied().unwrap_or_default(),
            number,
            node: self.node.to_u64(),
            data_version: self.data_version,
            request: self.kept.request,
        }
    }
}

/// How the kernel uses an open file.
#[derive(Debug)]
pub(super) struct Registered {
    pub(super) number: u64,
    /// The kernel reads from this file without requests.
    pub(super) backing: Option<Arc<Backing>>,
    /// The kernel caches no pages of the file.
    pub(super) direct: bool,
}

/// The open files of one mount. Separate from the FUSE session, so that the mount can flush them in any state
/// of the session.
#[derive(Debug)]
pub(super) struct Handles {
    pub(super) view: View,
    next: AtomicU64,
    open: RwLock<HashMap<u64, Arc<Handle>>>,
    nodes: Mutex<HashMap<Node, OpenNode>>,
    /// End cursors of open directories that were read to their end, by handle.
    ends: Mutex<HashMap<u64, u64>>,
    /// Files that the kernel reads without an open request.
    stateless: Stateless,
    /// Prefetched lookups of those files.
    ahead: LookupPrefetch,
    /// Whether the kernel accepts backing files for passthrough.
    passthrough: AtomicBool,
    registrar: OnceLock<Arc<Registrar>>,
    /// In a held mount.
    journal: OnceLock<Arc<Journal>>,
    /// Handles of earlier servers whose opening request may not have been answered, by its number.
    unanswered: Mutex<HashMap<u64, u64>>,
    /// Numbers of the requests whose change of names earlier servers have committed, maybe without an answer.
    completed: Mutex<HashSet<u64>>,
}

/// A node with files open. The kernel serves all of a node's open files either from its page cache or from one
/// backing file, so the first open decides.
#[derive(Debug)]
struct OpenNode {
    count: usize,
    /// Handles whose writes the kernel does not cache. A page that it reads for another process during a write
    /// might be older than that write. So every open of the file uses direct I/O while this count is above
    /// zero.
    streams: usize,
    backing: Option<Arc<Backing>>,
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
            registrar: OnceLock::new(),
            journal: OnceLock::new(),
            unanswered: Mutex::default(),
            completed: Mutex::default(),
        }
    }

    /// Records open files in a journal from now on. `life` is the number of this server: handle numbers of
    /// several servers are distinct.
    pub(super) fn keep_in(&self, journal: Arc<Journal>, life: u64) {
        self.next.store(life << LIFE_SHIFT | (NO_HANDLE + 1), Ordering::Relaxed);
        // Set only here, once.
        let _ = self.journal.set(journal);
    }

    /// Adds a file that an earlier server had open, with its slot in the journal.
    pub(super) fn inherit(
        &self,
        file: OpenFile,
        (slot, record): (u32, &OpenRecord),
        lost: Option<Lost>,
        backing: Option<Arc<Backing>>,
    ) {
        let is = |bit| record.bits & bit != 0;
        let kept = Kept {
            request: record.request,
            slot: OnceLock::from(slot),
            backing: OnceLock::new(),
            wrote: AtomicBool::new(is(journal::WROTE)),
            lost: AtomicU8::new(lost.map_or(0, |lost| lost as u8)),
            untold: AtomicU8::new(if lost.is_none() && is(journal::UNTOLD) { UNTOLD } else { TOLD }),
            is_closed: Mutex::default(),
        };
        if record.backing != 0 {
            let _ = kept.backing.set(record.backing);
        }
        let handle = Handle {
            node: file.node(),
            file,
            writes: is(journal::WRITE),
            executes: is(journal::EXECUTES),
            data_version: record.data_version,
            streams: is(journal::STREAMS),
            kept,
        };
        if (lost.is_some() || record.data_version == journal::UNKNOWN_VERSION)
            && let Some(journal) = self.journal.get()
        {
            journal.update(slot, handle.record(record.number));
        }
        {
            let mut nodes = self.nodes.lock();
            let node = nodes.entry(handle.node).or_insert(OpenNode { count: 0, streams: 0, backing: None });
            node.count += 1;
            node.streams += usize::from(handle.streams);
            if node.backing.is_none() {
                node.backing = backing;
            }
        }
        self.unanswered.lock().insert(record.request, record.number);
        self.open.write().insert(record.number, Arc::new(handle));
    }

    /// The backing file of a node that is open.
    pub(super) fn backing_of(&self, node: Node) -> Option<Arc<Backing>> {
        self.nodes.lock().get(&node)?.backing.clone()
    }

    /// The kernel sends a request again that opens a file. An earlier server may have opened it without the
    /// kernel's knowledge: that handle is closed.
    pub(super) fn opens_again(&self, request: u64) {
        let earlier = self.unanswered.lock().remove(&request);
        if let Some(number) = earlier {
            self.release(number);
        }
    }

    /// Whether the mount has a holder, so that another server may go on with it.
    pub(super) fn is_held(&self) -> bool {
        self.journal.get().is_some()
    }

    /// Records through which handle an owner has taken locks (`fcntl`) on a node, in a held mount. Returns the
    /// slot in the journal.
    pub(super) fn keep_lock(&self, node: Node, owner: u64, handle: u64) -> Option<u32> {
        self.journal.get()?.insert_lock(LockRecord { handle, node: node.to_u64(), owner })
    }

    /// Frees the slot of a lock.
    pub(super) fn forget_lock(&self, slot: u32) {
        if let Some(journal) = self.journal.get() {
            journal.remove(slot);
        }
    }

    /// Notes requests that an earlier server has completed.
    pub(super) fn inherit_completed(&self, requests: Vec<u64>) {
        self.completed.lock().extend(requests);
    }

    /// Whether an earlier server has completed a request.
    pub(super) fn has_completed(&self, request: u64) -> bool {
        self.completed.lock().contains(&request)
    }

    /// Notes a write through a handle, before it is answered.
    pub(super) fn writes_through(&self, number: u64, handle: &Handle) {
        if !handle.kept.wrote.swap(true, Ordering::Relaxed) {
            self.record_again(number, handle);
        }
    }

    /// Puts the present state of a handle into the journal.
    fn record_again(&self, number: u64, handle: &Handle) {
        let (Some(journal), Some(slot)) = (self.journal.get(), handle.kept.slot.get()) else { return };
        let is_closed = handle.kept.is_closed.lock();
        if !*is_closed {
            journal.update(*slot, handle.record(number));
        }
    }

    /// Commits the writes to a file, and reports those that a crash of an earlier server has lost: through the handle
    /// that wrote always, through each other one once. After the answer of [`Error::LostWrites`], the caller calls
    /// [`Handles::has_told`].
    pub(super) fn sync(&self, handle: &Handle) -> Result<()> {
        let synced = handle.check_writes().and_then(|()| {
            handle.file.fsync()?;
            self.settle()?;
            handle.check_told()
        });
        if let (Err(Error::LostWrites { .. }), Some(journal)) = (&synced, self.journal.get()) {
            journal.tells(handle.node.ino);
        }
        synced
    }

    /// A program has got the report of lost writes by [`Handles::sync`]: no later server repeats it.
    pub(super) fn has_told(&self, number: u64, handle: &Handle) {
        let untold = &handle.kept.untold;
        if untold.compare_exchange(TELLS, TOLD, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            self.record_again(number, handle);
        }
        if let Some(journal) = self.journal.get() {
            journal.has_told(handle.node.ino);
        }
    }

    /// Makes a successor see that everything committed so far is not lost.
    pub(super) fn settle(&self) -> Result<()> {
        self.journal.get().map_or(Ok(()), |journal| journal.settle(&self.view))
    }

    /// Registers an open file. `insert` calls `backing` when this is the node's only open file. Otherwise the
    /// kernel goes on reading the node as it did.
    pub(super) fn insert(
        &self,
        mut handle: Handle,
        backing: impl FnOnce(&Handle) -> Option<Backing>,
    ) -> Registered {
        // Opening a backing file may read the disk, so the lock is not held: other files are opened and closed
        // meanwhile.
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
        if let Some(journal) = self.journal.get() {
            if handle.node.is_live() && journal.is_untold(handle.node.ino) {
                handle.kept.untold = AtomicU8::new(UNTOLD);
            }
            if let Some(backing) = &backing {
                // No other thread has the handle yet.
                let _ = handle.kept.backing.set(backing.id());
            }
            if let Some(slot) = journal.insert(handle.record(number)) {
                let _ = handle.kept.slot.set(slot);
            }
        }
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

    /// Number of open files.
    pub(super) fn count(&self) -> usize {
        self.open.read().len()
    }

    pub(super) fn get(&self, number: u64) -> Result<Arc<Handle>> {
        self.open.read().get(&number).cloned().ok_or(Error::BadHandle("anything"))
    }

    /// Removes an open file. The drop of the file commits writes through a mapping after the last flush. The
    /// kernel can no longer report an error to a program then.
    pub(super) fn release(&self, number: u64) {
        let Some(handle) = self.open.write().remove(&number) else { return };
        if let (Some(journal), Some(slot)) = (self.journal.get(), handle.kept.slot.get()) {
            *handle.kept.is_closed.lock() = true;
            journal.remove(*slot);
        }
        let mut nodes = self.nodes.lock();
        if let Some(node) = nodes.get_mut(&handle.node) {
            node.count -= 1;
            node.streams -= usize::from(handle.streams);
            if node.count == 0 {
                nodes.remove(&handle.node);
            }
        }
    }

    /// A new handle for an open directory.
    pub(super) fn open_directory(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Notes that the reader of an open directory has reached its end, at this cursor.
    pub(super) fn ends_at(&self, number: u64, cursor: u64) {
        if number != NO_HANDLE {
            self.ends.lock().insert(number, cursor);
        }
    }

    /// Whether the previous listing of an open directory ended at this cursor. A reader sends one more request
    /// after the last entry. A further request sees entries added since.
    pub(super) fn is_at_end(&self, number: u64, cursor: u64) -> bool {
        number != NO_HANDLE && self.ends.lock().remove(&number) == Some(cursor)
    }

    /// Removes an open directory.
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

    /// Makes the writes through a handle visible.
    pub(super) fn flush(&self, handle: &Handle) -> Result<()> {
        if handle.writes { handle.file.flush() } else { Ok(()) }
    }

    /// Flushes every open file; the first error is returned, the others are logged.
    pub(super) fn flush_all(&self) -> Result<()> {
        let open: Vec<_> = self.open.read().values().cloned().collect();
        let mut result = Ok(());
        for handle in open {
            if let Err(error) = self.flush(&handle) {
                tracing::error!(
                    error = error_chain::one_line(&error),
                    node = handle.node.to_u64(),
                    "flushing an open file"
                );
                if result.is_ok() {
                    result = Err(error);
                }
            }
        }
        result
    }

    /// Removes everything, once the kernel uses no handle any more.
    pub(super) fn clear(&self) {
        self.open.write().clear();
        self.nodes.lock().clear();
        self.ends.lock().clear();
        self.stateless.clear();
        self.ahead.clear();
    }

    /// A file of a snapshot that the kernel reads without an open request.
    pub(super) fn stateless(&self, node: Node) -> Result<Arc<OpenFile>> {
        if node.is_live() {
            return Err(Error::BadHandle("anything"));
        }
        self.stateless.get(&self.view, node)
    }

    /// The entry of a name in a directory of a snapshot. Remembers the layout of a prefetched file, because the
    /// kernel is going to read it.
    pub(super) fn lookup_stateless(&self, parent: Node, name: &OsStr) -> Result<Attr> {
        let Some(found) = self.ahead.take(&self.view, parent, name) else {
            return self.view.lookup(parent, name);
        };
        if let Some(layout) = found.layout {
            self.stateless.put(Arc::new(OpenFile::known(&self.view, found.attr.node, layout)));
        }
        Ok(found.attr)
    }

    /// Sets how backing files are opened and closed; only the first call counts.
    pub(super) fn set_registrar(&self, registrar: Registrar) {
        let _ = self.registrar.set(Arc::new(registrar));
    }

    pub(super) fn registrar(&self) -> Option<&Arc<Registrar>> {
        self.registrar.get()
    }

    pub(super) fn set_passthrough(&self, granted: bool) {
        self.passthrough.store(granted, Ordering::Relaxed);
    }

    /// Whether the kernel accepts backing files for passthrough.
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
            Handle {
                file,
                node,
                writes: true,
                executes: false,
                data_version: 0,
                streams: true,
                kept: Kept::default(),
            }
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
