//! The open table: the inodes that this process has open, with their unflushed writes. Opens and closes wait
//! here for transactions that remove or give an inode's last name.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::dirty::Dirty;
use super::xattr::without_privileges;
use crate::meta::inode::Timestamp;
use crate::node::Attr;

/// What this process knows of the names of an open inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Naming {
    /// It has a name, or had one; or nothing is known of it yet.
    Usual,
    /// This process created it without a name and it has never had one, so no other process has it open.
    Unnamed,
    /// This process created it without a name. The outcome of the transaction that created or named it is
    /// unknown.
    Unsure,
}

/// A record of uncommitted writes outside of this process. It tells a successor of a killed process what was
/// lost. Each method returns once the record survives the process.
pub(crate) trait WriteJournal: std::fmt::Debug + Send + Sync {
    /// An inode is about to get unflushed writes.
    fn has_unflushed(&self, volume: u64, ino: u64);

    /// The unflushed writes of an inode were committed or dropped. The commit may not have left this process.
    fn has_flushed(&self, volume: u64, ino: u64);

    /// This process may use the inode numbers below `end`.
    fn reserves(&self, volume: u64, end: u64);
}

/// An inode of the live tree that is open.
#[derive(Debug)]
pub(crate) struct OpenInode {
    pub(crate) volume: u64,
    pub(crate) ino: u64,
    /// Unflushed writes. Locked before a transaction, never inside one.
    pub(crate) dirty: Mutex<Dirty>,
    /// The effect of `dirty` on the attributes. It has a separate lock, so that a stat never waits for a
    /// flush.
    unflushed: Mutex<Option<Unflushed>>,
    orphan: AtomicBool,
    /// It was opened as an orphan, or an attempt was made to.
    maybe_orphan: AtomicBool,
    /// It had a name at some time while it was open.
    had_name: AtomicBool,
    naming: Mutex<Naming>,
    /// Extents that were committed since it was opened.
    scattered: AtomicUsize,
    journal: Option<Arc<dyn WriteJournal>>,
}

/// Attributes that a flush is going to commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unflushed {
    /// The file ends here or later.
    pub(crate) end: u64,
    /// Bytes that may not have been stored before.
    pub(crate) stored_bytes: u64,
    /// Id of the writer, 0 when there were several: see [`super::watch`].
    pub(crate) writer: u64,
    /// Time of the oldest unflushed write.
    pub(crate) since: Instant,
    /// Time of the last write.
    pub(crate) mtime: Timestamp,
    /// A process without privilege wrote: the set-user-ID and set-group-ID bits are gone.
    pub(crate) drop_privileges: bool,
    /// The capabilities are gone, because a write removes them. False after an attribute change, which may
    /// set them again.
    pub(crate) drop_capabilities: bool,
    /// Set when all unflushed writes are appends: the end of the file that they started from. The commit
    /// moves them to the file's current end.
    pub(crate) append_base: Option<u64>,
}

impl OpenInode {
    pub(crate) fn unflushed(&self) -> Option<Unflushed> {
        *self.unflushed.lock()
    }

    /// Replaces the effect of the unflushed writes. The caller has locked `dirty`.
    pub(crate) fn set_unflushed(&self, unflushed: Option<Unflushed>) {
        let now = unflushed.is_some();
        if let Some(journal) = self.journal.as_ref().filter(|_| now && self.unflushed().is_none()) {
            journal.has_unflushed(self.volume, self.ino);
        }
        let before = std::mem::replace(&mut *self.unflushed.lock(), unflushed).is_some();
        if let Some(journal) = self.journal.as_ref().filter(|_| before && !now) {
            journal.has_flushed(self.volume, self.ino);
        }
    }

    /// Records a committed change of the attributes, which has applied the effects of unflushed writes first
    /// (see `drop_pending`): the flush does not apply them again. `mtime` is the time that the change has
    /// set, if any.
    pub(crate) fn attributes_set(&self, mtime: Option<Timestamp>) {
        if let Some(unflushed) = &mut *self.unflushed.lock() {
            unflushed.drop_privileges = false;
            unflushed.drop_capabilities = false;
            unflushed.mtime = mtime.unwrap_or(unflushed.mtime);
        }
    }

    /// Whether the inode has no name: the last one was removed, or it was created without one.
    pub(crate) fn is_orphan(&self) -> bool {
        self.orphan.load(Ordering::Acquire)
    }

    /// Records that a transaction is about to register this session as a holder of the inode, if that is an
    /// orphan.
    pub(crate) fn note_maybe_orphan(&self) {
        self.maybe_orphan.store(true, Ordering::Release);
    }

    /// Whether the last close has to give up the orphan, if it is one.
    pub(crate) fn is_maybe_orphan(&self) -> bool {
        self.is_orphan() || self.maybe_orphan.load(Ordering::Acquire)
    }

    /// Records that the open inode has a name.
    pub(crate) fn has_name(&self) {
        self.had_name.store(true, Ordering::Release);
    }

    /// Whether it had a name while it was open, so that it may be opened again without one.
    pub(crate) fn had_name(&self) -> bool {
        self.had_name.load(Ordering::Acquire)
    }

    pub(crate) fn naming(&self) -> Naming {
        *self.naming.lock()
    }

    /// Records that it was created without a name: an orphan from the beginning.
    pub(crate) fn is_born_unnamed(&self) {
        *self.naming.lock() = Naming::Unnamed;
        self.orphan.store(true, Ordering::Release);
    }

    /// Records that it may have been created without a name; this may never be known.
    pub(crate) fn may_be_unnamed(&self) {
        *self.naming.lock() = Naming::Unsure;
    }

    /// Counts committed extents; returns their number since the inode was opened.
    pub(crate) fn scatter(&self, extents: usize) -> usize {
        self.scattered.fetch_add(extents, Ordering::Relaxed) + extents
    }

    /// Applies the effects of unflushed writes to attributes.
    pub(crate) fn overlay(&self, attr: &mut Attr) {
        if let Some(unflushed) = self.unflushed() {
            attr.size = attr.size.max(unflushed.end);
            let stored = (attr.blocks * 512).saturating_add(unflushed.stored_bytes);
            attr.blocks = stored.min(attr.size).div_ceil(512);
            attr.mtime = unflushed.mtime.to_system();
            attr.ctime = attr.ctime.max(attr.mtime);
            if unflushed.drop_privileges {
                attr.mode = without_privileges(attr.mode);
            }
        }
    }
}

/// The open inodes of this process.
#[derive(Debug, Default)]
pub(crate) struct OpenTable {
    inodes: Mutex<OpenInodes>,
    /// Signaled when a transaction that removes or gives last names has ended.
    decided: Condvar,
}

#[derive(Debug, Default)]
struct OpenInodes {
    open: HashMap<(u64, u64), Entry>,
    /// Inodes whose last name a running transaction may remove or give, with the number of those
    /// transactions. Opens and closes of these inodes wait.
    closing: HashMap<(u64, u64), usize>,
    journal: Option<Arc<dyn WriteJournal>>,
}

#[derive(Debug)]
struct Entry {
    inode: Arc<OpenInode>,
    handles: usize,
}

impl OpenTable {
    /// The table, once no transaction is deciding about the last name of an inode.
    fn lock_decided(&self, key: (u64, u64)) -> MutexGuard<'_, OpenInodes> {
        let mut table = self.inodes.lock();
        while table.closing.contains_key(&key) {
            self.decided.wait(&mut table);
        }
        table
    }

    /// The inode if it is open.
    pub(crate) fn get(&self, volume: u64, ino: u64) -> Option<Arc<OpenInode>> {
        let table = self.inodes.lock();
        if table.open.is_empty() {
            // A listing asks for each entry.
            return None;
        }
        table.open.get(&(volume, ino)).map(|entry| Arc::clone(&entry.inode))
    }

    /// Registers a handle. Waits while a transaction removes the last name of the inode, so it must not be
    /// called inside one. The same holds for [`OpenTable::close`].
    pub(crate) fn open(&self, volume: u64, ino: u64) -> Arc<OpenInode> {
        let mut table = self.lock_decided((volume, ino));
        let journal = table.journal.clone();
        let entry = table.open.entry((volume, ino)).or_insert_with(|| Entry {
            inode: Arc::new(OpenInode {
                volume,
                ino,
                dirty: Mutex::new(Dirty::default()),
                unflushed: Mutex::new(None),
                orphan: AtomicBool::new(false),
                maybe_orphan: AtomicBool::new(false),
                had_name: AtomicBool::new(false),
                naming: Mutex::new(Naming::Usual),
                scattered: AtomicUsize::new(0),
                journal,
            }),
            handles: 0,
        });
        entry.handles += 1;
        Arc::clone(&entry.inode)
    }

    /// Records uncommitted writes of the inodes that are opened from now on. `false` if another journal already
    /// does.
    pub(crate) fn set_journal(&self, journal: Arc<dyn WriteJournal>) -> bool {
        let mut table = self.inodes.lock();
        let is_free = table.journal.is_none();
        if is_free {
            table.journal = Some(journal);
        }
        is_free
    }

    /// Ends the recording by [`OpenTable::set_journal`], for inodes that are opened from now on.
    pub(crate) fn end_journal(&self) {
        self.inodes.lock().journal = None;
    }

    /// The journal of this process.
    pub(crate) fn journal(&self) -> Option<Arc<dyn WriteJournal>> {
        self.inodes.lock().journal.clone()
    }

    /// Registers another handle of each open inode.
    pub(crate) fn pin_all(&self) -> Vec<Arc<OpenInode>> {
        let mut table = self.inodes.lock();
        let pin = |entry: &mut Entry| {
            entry.handles += 1;
            Arc::clone(&entry.inode)
        };
        table.open.values_mut().map(pin).collect()
    }

    /// Removes a handle. Returns whether that was the last.
    pub(crate) fn close(&self, inode: &OpenInode) -> bool {
        let key = (inode.volume, inode.ino);
        let mut table = self.lock_decided(key);
        let Some(entry) = table.open.get_mut(&key) else { return false };
        entry.handles -= 1;
        let last = entry.handles == 0;
        if last {
            table.open.remove(&key);
        }
        last
    }

    /// [`OpenInode::is_orphan`], once no transaction is deciding about it.
    pub(crate) fn is_orphan(&self, inode: &OpenInode) -> bool {
        let _table = self.lock_decided((inode.volume, inode.ino));
        inode.is_orphan()
    }
}

/// Inodes whose last name a transaction removes, or one that it gives its first name. Opens and closes of
/// these inodes wait from that decision until after the commit; everything else goes on.
#[derive(Debug, Default)]
pub(crate) struct LastNames<'a> {
    table: Option<&'a OpenTable>,
    inodes: Vec<(u64, u64)>,
}

impl<'a> LastNames<'a> {
    /// Adds an inode. Returns whether this process has it open.
    pub(crate) fn add(&mut self, table: &'a OpenTable, volume: u64, ino: u64) -> bool {
        self.table = Some(table);
        self.inodes.push((volume, ino));
        let mut inodes = table.inodes.lock();
        *inodes.closing.entry((volume, ino)).or_default() += 1;
        inodes.open.contains_key(&(volume, ino))
    }

    /// The transaction was committed: the inodes that are open are orphans.
    pub(crate) fn gone(&mut self) {
        self.end(|open, key| {
            if let Some(entry) = open.get(key) {
                entry.inode.orphan.store(true, Ordering::Release);
            }
        });
    }

    /// The transaction that gave them names was committed or, unless `known`, may have been.
    pub(crate) fn named(&mut self, known: bool) {
        self.end(|open, key| {
            if let Some(Entry { inode, .. }) = open.get(key) {
                inode.has_name();
                *inode.naming.lock() = if known { Naming::Usual } else { Naming::Unsure };
                // A file that has a name after all must not count as one that no other process can have open.
                inode.orphan.store(false, Ordering::Release);
            }
        });
    }

    /// The transaction was rolled back.
    pub(crate) fn stay(&mut self) {
        self.end(|_, _| {});
    }

    fn end(&mut self, each: impl Fn(&HashMap<(u64, u64), Entry>, &(u64, u64))) {
        let Some(table) = self.table.take() else { return };
        let mut inodes = table.inodes.lock();
        for key in self.inodes.drain(..) {
            each(&inodes.open, &key);
            match inodes.closing.get_mut(&key) {
                Some(count) if *count > 1 => *count -= 1,
                _ => drop(inodes.closing.remove(&key)),
            }
        }
        drop(inodes);
        table.decided.notify_all();
    }
}

impl Drop for LastNames<'_> {
    fn drop(&mut self) {
        self.stay();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn only_who_wants_the_inode_waits_for_who_takes_its_last_name() {
        let table = OpenTable::default();
        let held = table.open(1, 7);
        let (mut one, mut other) = (LastNames::default(), LastNames::default());
        assert!(one.add(&table, 1, 7) && !one.add(&table, 1, 8));
        assert!(other.add(&table, 1, 7));
        assert!(table.close(&table.open(1, 9)));
        assert!(table.get(1, 7).is_some() && !held.is_orphan());
        std::thread::scope(|scope| {
            let (closed, last) = channel();
            let (table, held) = (&table, &held);
            scope.spawn(move || closed.send((table.is_orphan(held), table.close(held))).unwrap());
            // The rolled-back transaction does not undo what the other one has committed.
            one.gone();
            assert!(last.try_recv().is_err());
            drop(other);
            assert_eq!(last.recv().unwrap(), (true, true));
        });
        assert!(table.get(1, 7).is_none() && table.inodes.lock().closing.is_empty());
    }
}
