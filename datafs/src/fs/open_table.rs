//! The inodes that this process has open, and what was written to them but not flushed.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::{Mutex, MutexGuard};

use super::dirty::Dirty;
use super::types::Attr;
use super::xattr::without_privileges;
use crate::meta::inode::Timestamp;

/// An inode of the live tree that is open.
#[derive(Debug)]
pub(crate) struct OpenInode {
    pub(crate) volume: u64,
    pub(crate) ino: u64,
    /// What was written and not committed. Locked before a transaction, never inside one.
    pub(crate) dirty: Mutex<Dirty>,
    /// What `dirty` means for the attributes; of its own, so that a stat never waits for a flush.
    unflushed: Mutex<Option<Unflushed>>,
    orphan: AtomicBool,
    /// It had a name once it was open.
    had_name: AtomicBool,
    /// Extents that were committed since it was opened.
    scattered: AtomicUsize,
}

/// Attributes that a flush is going to commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unflushed {
    /// The file ends here or later.
    pub(crate) end: u64,
    /// Bytes that may not have been stored before.
    pub(crate) stored_bytes: u64,
    /// Who wrote, 0 when it was more than one: see [`crate::watch`].
    pub(crate) writer: u64,
    /// Time of the last write.
    pub(crate) mtime: Timestamp,
    /// Somebody wrote who may not keep a program's privileges.
    pub(crate) drop_privileges: bool,
    /// Nothing but appends, from this end of the file on: they go to where it ends when they are
    /// committed.
    pub(crate) append_base: Option<u64>,
}

impl OpenInode {
    pub(crate) fn unflushed(&self) -> Option<Unflushed> {
        *self.unflushed.lock()
    }

    pub(crate) fn set_unflushed(&self, unflushed: Option<Unflushed>) {
        *self.unflushed.lock() = unflushed;
    }

    /// Replaces the time of the last write that is not flushed, if there is one.
    pub(crate) fn set_unflushed_mtime(&self, mtime: Timestamp) {
        if let Some(unflushed) = &mut *self.unflushed.lock() {
            unflushed.mtime = mtime;
        }
    }

    /// Whether the last name of the inode was removed.
    pub(crate) fn is_orphan(&self) -> bool {
        self.orphan.load(Ordering::Acquire)
    }

    /// Notes that it has a name, and is open.
    pub(crate) fn has_name(&self) {
        self.had_name.store(true, Ordering::Release);
    }

    /// Whether it had a name since it is open, so that it may be opened again without one.
    pub(crate) fn had_name(&self) -> bool {
        self.had_name.load(Ordering::Acquire)
    }

    /// Counts extents that were committed; returns how many there were since it was opened.
    pub(crate) fn scatter(&self, extents: usize) -> usize {
        self.scattered.fetch_add(extents, Ordering::Relaxed) + extents
    }

    /// Applies what was written but not flushed to attributes.
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

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct OpenTable(Mutex<OpenInodes>);

/// The table, locked.
#[derive(Debug, Default)]
pub(crate) struct OpenInodes(HashMap<(u64, u64), Entry>);

#[derive(Debug)]
struct Entry {
    inode: Arc<OpenInode>,
    handles: usize,
}

impl OpenTable {
    /// Locked inside write transactions and for moments; nobody waits for anything while holding it
    /// outside of one.
    pub(crate) fn lock(&self) -> MutexGuard<'_, OpenInodes> {
        self.0.lock()
    }

    /// The inode if it is open.
    pub(crate) fn get(&self, volume: u64, ino: u64) -> Option<Arc<OpenInode>> {
        let table = self.lock();
        if table.0.is_empty() {
            // Asked for each entry of a listing.
            return None;
        }
        table.0.get(&(volume, ino)).map(|entry| Arc::clone(&entry.inode))
    }

    /// Counts one more handle.
    pub(crate) fn open(&self, volume: u64, ino: u64) -> Arc<OpenInode> {
        let mut table = self.lock();
        let entry = table.0.entry((volume, ino)).or_insert_with(|| Entry {
            inode: Arc::new(OpenInode {
                volume,
                ino,
                dirty: Mutex::new(Dirty::default()),
                unflushed: Mutex::new(None),
                orphan: AtomicBool::new(false),
                had_name: AtomicBool::new(false),
                scattered: AtomicUsize::new(0),
            }),
            handles: 0,
        });
        entry.handles += 1;
        Arc::clone(&entry.inode)
    }

    /// Counts one more handle of each inode that is open.
    pub(crate) fn pin_all(&self) -> Vec<Arc<OpenInode>> {
        let mut table = self.lock();
        let pin = |entry: &mut Entry| {
            entry.handles += 1;
            Arc::clone(&entry.inode)
        };
        table.0.values_mut().map(pin).collect()
    }

    /// Counts one handle less. Returns whether that was the last.
    pub(crate) fn close(&self, inode: &OpenInode) -> bool {
        let mut table = self.lock();
        let key = (inode.volume, inode.ino);
        let Some(entry) = table.0.get_mut(&key) else { return false };
        entry.handles -= 1;
        let last = entry.handles == 0;
        if last {
            table.0.remove(&key);
        }
        last
    }
}

impl OpenInodes {
    /// Marks an inode whose last name goes, or takes the mark back; false when it is not open.
    pub(crate) fn set_orphan(&mut self, volume: u64, ino: u64, orphan: bool) -> bool {
        let Some(entry) = self.0.get(&(volume, ino)) else { return false };
        entry.inode.orphan.store(orphan, Ordering::Release);
        true
    }
}
