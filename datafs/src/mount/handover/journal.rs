//! The journal of a held mount: its open files, the locks taken through them, the inodes with uncommitted writes,
//! and those whose loss no program knows, in memory that the holder keeps.
//!
//! The journal is a memory file of slots of [`SLOT_BYTES`]. Each change is one `pwrite` of one slot, which the
//! kernel finishes even if the process is killed meanwhile. Slot 0 is the header: [`MAGIC`] or
//! [`MAGIC_WITH_LOCKS`], the end of the inode numbers that servers have reserved, and whether there were more
//! inodes than slots. A slot is an open file, a lock, an inode with uncommitted writes or untold loss, or free.
//!
//! The metadata has the locks. The journal tells through which open file each was taken, because the end of that
//! file releases it.
//!
//! An inode counts as uncommitted until its commit survives a kill of the process: an answered commit is in the
//! metadata file only some milliseconds later. A thread waits for that and then frees the slots.
//!
//! A crash turns the slot of an inode with uncommitted writes into one of untold loss. It stays until an `fsync` has
//! reported the loss, also over further servers. A file opened before that reports the loss as well. This is how
//! the kernel reports errors of its own write-back (`errseq_t`).

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::thread::JoinHandle;

use millrace_leaf::error_chain;
use nix::sys::memfd::{MFdFlags, memfd_create};
use parking_lot::{Condvar, Mutex};

use crate::fs::View;
use crate::fs::open_table::WriteJournal;

/// Bytes of a slot.
const SLOT_BYTES: usize = 40;
/// Most slots: 40 MiB. Open files beyond do not survive a crash of their server.
const SLOTS_MAX: u32 = 1 << 20;
/// Most inodes with untold loss: 2.5 MiB. Those of a later crash replace those of earlier ones.
const UNTOLD_MAX: usize = 1 << 16;
/// Marks a journal of this format.
const MAGIC: u64 = u64::from_be_bytes(*b"mlrjrnl1");
/// Marks one that has or had slots of locks, which programs of the format before do not know.
const MAGIC_WITH_LOCKS: u64 = u64::from_be_bytes(*b"mlrjrnl2");

/// The file is open for reading, writing, appending.
pub(in crate::mount) const READ: u32 = 1 << 0;
pub(in crate::mount) const WRITE: u32 = 1 << 1;
pub(in crate::mount) const APPEND: u32 = 1 << 2;
/// The kernel runs the file as a program.
pub(in crate::mount) const EXECUTES: u32 = 1 << 3;
/// The kernel writes through without caching pages.
pub(in crate::mount) const STREAMS: u32 = 1 << 4;
/// Something was written through the handle.
pub(in crate::mount) const WROTE: u32 = 1 << 5;
/// What was written through the handle is lost. With [`INODE`]: what was written to the inode is lost, and no
/// `fsync` has reported it. A program that does not know the pair takes the inode for one with uncommitted writes.
pub(in crate::mount) const LOST: u32 = 1 << 6;
/// The next `fsync` through the handle reports that writes to the file are lost.
pub(in crate::mount) const UNTOLD: u32 = 1 << 7;
/// The slot is a lock.
const LOCK: u32 = 1 << 29;
/// The slot is an inode with uncommitted writes.
const INODE: u32 = 1 << 30;
/// The slot is used.
const USED: u32 = 1 << 31;

/// The data version of an open file of which the kernel may have lost contents. No file has it.
pub(in crate::mount) const UNKNOWN_VERSION: u64 = u64::MAX;

/// An open file in the journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::mount) struct OpenRecord {
    pub(in crate::mount) bits: u32,
    /// The kernel's number of the backing file, or 0.
    pub(in crate::mount) backing: u32,
    /// The handle number.
    pub(in crate::mount) number: u64,
    pub(in crate::mount) node: u64,
    pub(in crate::mount) data_version: u64,
    /// The kernel's number of the request that opened the file.
    pub(in crate::mount) request: u64,
}

/// A lock (`fcntl`) in the journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::mount) struct LockRecord {
    /// The number of the handle through which it was taken.
    pub(in crate::mount) handle: u64,
    pub(in crate::mount) node: u64,
    /// The kernel's number of the owner.
    pub(in crate::mount) owner: u64,
}

/// What an earlier server has left in a journal.
#[derive(Debug, Default)]
pub(in crate::mount) struct Left {
    pub(in crate::mount) open: Vec<(u32, OpenRecord)>,
    /// Locks, some of which may be released by now.
    pub(in crate::mount) locks: Vec<(u32, LockRecord)>,
    /// Inodes with uncommitted writes.
    pub(in crate::mount) uncommitted: Vec<u64>,
    /// End of the reserved inode numbers; 0 if none was reserved.
    pub(in crate::mount) inos_end: u64,
    /// Not all inodes with uncommitted writes are listed, because the journal was full.
    pub(in crate::mount) overflowed: bool,
}

/// The journal of the mount that this process serves.
#[derive(Debug)]
pub(in crate::mount) struct Journal {
    file: File,
    /// The volume of the mount.
    volume: u64,
    state: Mutex<State>,
    settling: Condvar,
    /// Held by the thread that settles, so that the others return after it.
    one: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    free: Vec<u32>,
    /// Slots in the file.
    len: u32,
    inodes: HashMap<u64, Inode>,
    /// Inodes whose loss no `fsync` has reported yet.
    untold: HashMap<u64, Untold>,
    /// Inodes whose commit was answered, with their `writes` then.
    answered: Vec<(u64, u64)>,
    inos_end: u64,
    stopped: bool,
    is_full: bool,
    /// The header says that there are slots of locks.
    has_locks: bool,
}

/// An inode with uncommitted writes.
#[derive(Debug)]
struct Inode {
    slot: u32,
    /// Counts how often it got uncommitted writes.
    writes: u64,
}

/// An inode whose writes were lost.
#[derive(Debug)]
struct Untold {
    slot: u32,
    /// An `fsync` is about to report the loss: files that are opened now do not report it again.
    is_told: bool,
}

impl Journal {
    /// A new, empty journal.
    pub(super) fn create() -> io::Result<OwnedFd> {
        let file = File::from(memfd_create("millrace-mount", MFdFlags::MFD_CLOEXEC)?);
        let mut header = [0; SLOT_BYTES];
        header[..8].copy_from_slice(&MAGIC.to_le_bytes());
        file.write_all_at(&header, 0)?;
        Ok(file.into())
    }

    /// Opens a journal, with what an earlier server has left in it.
    pub(in crate::mount) fn open(file: OwnedFd, volume: u64) -> io::Result<(Journal, Left)> {
        let damaged = |what: &str| io::Error::new(ErrorKind::InvalidData, format!("the journal {what}"));
        let file = File::from(file);
        let bytes = file.metadata()?.len();
        if bytes > u64::from(SLOTS_MAX) * SLOT_BYTES as u64 || bytes % SLOT_BYTES as u64 != 0 {
            return Err(damaged("is cut off or too long"));
        }
        let mut content = vec![0; bytes as usize];
        file.read_exact_at(&mut content, 0)?;
        let (slots, _) = content.as_chunks::<SLOT_BYTES>();
        let is_known = |header: &&[u8; SLOT_BYTES]| [MAGIC, MAGIC_WITH_LOCKS].contains(&long(header, 0));
        let header = slots.first().filter(is_known);
        let inos_end = long(header.ok_or_else(|| damaged("is of an unknown format"))?, 8);
        let overflowed = slots.first().is_some_and(|header| long(header, 16) != 0);
        let mut left = Left { inos_end, overflowed, ..Left::default() };
        let has_locks = slots.first().is_some_and(|header| long(header, 0) == MAGIC_WITH_LOCKS);
        let mut state = State { len: slots.len() as u32, inos_end, has_locks, ..State::default() };
        for (slot, bytes) in (0u32..).zip(slots).skip(1) {
            let record = OpenRecord::decode(bytes);
            if record.bits & USED == 0 {
                state.free.push(slot);
            } else if record.bits & (INODE | LOST) == INODE | LOST {
                state.untold.insert(record.number, Untold { slot, is_told: false });
            } else if record.bits & INODE != 0 {
                left.uncommitted.push(record.number);
                state.inodes.insert(record.number, Inode { slot, writes: 0 });
            } else if record.bits & LOCK != 0 {
                let OpenRecord { number: handle, node, data_version: owner, .. } = record;
                left.locks.push((slot, LockRecord { handle, node, owner }));
            } else {
                left.open.push((slot, record));
            }
        }
        let journal = Journal {
            file,
            volume,
            state: Mutex::new(state),
            settling: Condvar::new(),
            one: Mutex::default(),
        };
        Ok((journal, left))
    }

    /// Records an open file. Returns its slot, or `None` when the journal is full or out of memory.
    pub(in crate::mount) fn insert(&self, record: OpenRecord) -> Option<u32> {
        let slot = self.state.lock().take_slot()?;
        match self.put(slot, record) {
            Ok(()) => Some(slot),
            Err(error) => {
                tracing::warn!(
                    error = error_chain::one_line(&error),
                    "an open file is not recorded: it will not survive a crash of its server"
                );
                self.state.lock().free.push(slot);
                None
            }
        }
    }

    /// Records a lock, until [`Journal::remove`]. Returns its slot, or `None` as [`Journal::insert`] does.
    pub(in crate::mount) fn insert_lock(&self, lock: LockRecord) -> Option<u32> {
        {
            let mut state = self.state.lock();
            if !state.has_locks {
                if let Err(error) = self.file.write_all_at(&MAGIC_WITH_LOCKS.to_le_bytes(), 0) {
                    tracing::warn!(error = error_chain::one_line(&error), "a lock is not recorded");
                    return None;
                }
                state.has_locks = true;
            }
        }
        let LockRecord { handle, node, owner } = lock;
        self.insert(OpenRecord {
            bits: LOCK,
            backing: 0,
            number: handle,
            node,
            data_version: owner,
            request: 0,
        })
    }

    /// Changes the record of an open file.
    pub(in crate::mount) fn update(&self, slot: u32, record: OpenRecord) {
        if let Err(error) = self.put(slot, record) {
            tracing::warn!(error = error_chain::one_line(&error), "the record of an open file is outdated");
        }
    }

    /// Frees the slot of a closed file, or of a released lock.
    pub(in crate::mount) fn remove(&self, slot: u32) {
        if self.clear(slot) {
            self.state.lock().free.push(slot);
        }
    }

    /// All commits answered so far have survived the process: frees their slots.
    pub(in crate::mount) fn settle(&self, view: &View) -> crate::error::Result<()> {
        let _one = self.one.lock();
        let answered = std::mem::take(&mut self.state.lock().answered);
        if answered.is_empty() {
            return Ok(());
        }
        if let Err(error) = view.shared.meta.settle() {
            self.state.lock().answered.extend(answered);
            return Err(error);
        }
        for (ino, writes) in answered {
            let mut state = self.state.lock();
            if let Some(inode) = state.inodes.get(&ino)
                && inode.writes == writes
            {
                let slot = inode.slot;
                state.inodes.remove(&ino);
                if self.clear(slot) {
                    state.free.push(slot);
                }
            }
        }
        Ok(())
    }

    /// Turns inodes that an earlier server has left with uncommitted writes into ones with untold loss.
    pub(super) fn lose(&self, inos: &HashSet<u64>) {
        let mut state = self.state.lock();
        if state.untold.len() + inos.len() > UNTOLD_MAX {
            let earlier: Vec<_> = state.untold.extract_if(|ino, _| !inos.contains(ino)).collect();
            tracing::warn!(
                files = earlier.len(),
                "too many files lost writes: files of earlier crashes that are opened from now on do not report it"
            );
            for (_, untold) in earlier {
                self.free(&mut state, untold.slot);
            }
        }
        for ino in inos {
            let slot = state.inodes.remove(ino).map(|inode| inode.slot);
            if state.untold.contains_key(ino) || state.untold.len() >= UNTOLD_MAX {
                if let Some(slot) = slot {
                    self.free(&mut state, slot);
                }
                continue;
            }
            // One without a slot did not fit into the journal of the server before.
            let Some(slot) = slot.or_else(|| state.take_slot()) else { continue };
            state.untold.insert(*ino, Untold { slot, is_told: false });
            self.update(slot, OpenRecord::of_inode(INODE | LOST, *ino));
        }
    }

    /// Whether writes to an inode were lost, and no `fsync` has reported it yet.
    pub(in crate::mount) fn is_untold(&self, ino: u64) -> bool {
        self.state.lock().untold.get(&ino).is_some_and(|untold| !untold.is_told)
    }

    /// An `fsync` is about to report the loss of an inode. The journal keeps it until [`Journal::has_told`]: this
    /// server may die before the program gets the answer.
    pub(in crate::mount) fn tells(&self, ino: u64) {
        if let Some(untold) = self.state.lock().untold.get_mut(&ino) {
            untold.is_told = true;
        }
    }

    /// An `fsync` has reported the loss of an inode.
    pub(in crate::mount) fn has_told(&self, ino: u64) {
        let mut state = self.state.lock();
        if let Some(untold) = state.untold.remove(&ino) {
            self.free(&mut state, untold.slot);
        }
    }

    /// Takes back that the journal was too full for all inodes with uncommitted writes: all are committed, or open
    /// files have recorded the loss.
    pub(in crate::mount) fn clear_overflow(&self) {
        if let Err(error) = self.file.write_all_at(&[0], 16) {
            tracing::warn!(
                error = error_chain::one_line(&error),
                "the journal of the mount still says that it was full"
            );
        }
    }

    /// Starts the thread that frees the slots of committed inodes.
    pub(in crate::mount) fn start(self: &Arc<Self>, view: View) -> io::Result<JoinHandle<()>> {
        let journal = Arc::clone(self);
        std::thread::Builder::new().name("datafs-journal".into()).spawn(move || {
            loop {
                {
                    let mut state = journal.state.lock();
                    while state.answered.is_empty() && !state.stopped {
                        journal.settling.wait(&mut state);
                    }
                    if state.stopped {
                        return;
                    }
                }
                if let Err(error) = journal.settle(&view) {
                    tracing::warn!(%error, "waiting for a commit; it is tried again");
                    let mut state = journal.state.lock();
                    if !state.stopped {
                        journal.settling.wait_for(&mut state, std::time::Duration::from_secs(1));
                    }
                }
            }
        })
    }

    /// Ends that thread.
    pub(in crate::mount) fn stop(&self) {
        self.state.lock().stopped = true;
        self.settling.notify_all();
    }

    fn put(&self, slot: u32, record: OpenRecord) -> io::Result<()> {
        self.file.write_all_at(&record.encode(), u64::from(slot) * SLOT_BYTES as u64)
    }

    /// Clears a slot for the next record.
    fn free(&self, state: &mut State, slot: u32) {
        if self.clear(slot) {
            state.free.push(slot);
        }
    }

    fn clear(&self, slot: u32) -> bool {
        let cleared = self.file.write_all_at(&[0; SLOT_BYTES], u64::from(slot) * SLOT_BYTES as u64);
        if let Err(error) = &cleared {
            tracing::warn!(error = error_chain::one_line(&error), "the record of a closed file stays");
        }
        cleared.is_ok()
    }
}

impl State {
    fn take_slot(&mut self) -> Option<u32> {
        if let Some(slot) = self.free.pop() {
            return Some(slot);
        }
        if self.len >= SLOTS_MAX {
            if !std::mem::replace(&mut self.is_full, true) {
                tracing::warn!(
                    files = SLOTS_MAX,
                    "the journal of the mount is full: further open files do not survive a crash of the server"
                );
            }
            return None;
        }
        self.len += 1;
        Some(self.len - 1)
    }
}

impl WriteJournal for Journal {
    fn has_unflushed(&self, volume: u64, ino: u64) {
        if volume != self.volume {
            return;
        }
        let mut state = self.state.lock();
        if let Some(inode) = state.inodes.get_mut(&ino) {
            inode.writes += 1;
            return;
        }
        let Some(slot) = state.take_slot() else {
            if let Err(error) = self.file.write_all_at(&[1], 16) {
                tracing::warn!(
                    error = error_chain::one_line(&error),
                    "the journal of the mount is full and cannot say so"
                );
            }
            return;
        };
        state.inodes.insert(ino, Inode { slot, writes: 0 });
        // Under the lock: a settled commit must not free the slot before it is written.
        self.update(slot, OpenRecord::of_inode(INODE, ino));
    }

    fn has_flushed(&self, volume: u64, ino: u64) {
        if volume != self.volume {
            return;
        }
        let mut state = self.state.lock();
        if let Some(writes) = state.inodes.get(&ino).map(|inode| inode.writes) {
            state.answered.push((ino, writes));
            self.settling.notify_all();
        }
    }

    fn reserves(&self, volume: u64, end: u64) {
        if volume != self.volume {
            return;
        }
        let mut state = self.state.lock();
        if end > state.inos_end {
            state.inos_end = end;
            if let Err(error) = self.file.write_all_at(&end.to_le_bytes(), 8) {
                tracing::warn!(
                    error = error_chain::one_line(&error),
                    "reserved inode numbers are not recorded"
                );
            }
        }
    }
}

impl OpenRecord {
    /// The record of an inode.
    fn of_inode(bits: u32, ino: u64) -> OpenRecord {
        OpenRecord { bits, backing: 0, number: ino, node: 0, data_version: 0, request: 0 }
    }

    fn encode(self) -> [u8; SLOT_BYTES] {
        let mut bytes = [0; SLOT_BYTES];
        bytes[..4].copy_from_slice(&(self.bits | USED).to_le_bytes());
        bytes[4..8].copy_from_slice(&self.backing.to_le_bytes());
        let longs = [self.number, self.node, self.data_version, self.request];
        for (to, long) in bytes[8..].chunks_exact_mut(8).zip(longs) {
            to.copy_from_slice(&long.to_le_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8; SLOT_BYTES]) -> OpenRecord {
        let first = long(bytes, 0);
        OpenRecord {
            bits: first as u32,
            backing: (first >> 32) as u32,
            number: long(bytes, 8),
            node: long(bytes, 16),
            data_version: long(bytes, 24),
            request: long(bytes, 32),
        }
    }
}

fn long(bytes: &[u8; SLOT_BYTES], at: usize) -> u64 {
    let mut long = [0; 8];
    long.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(long)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::fs::tests::setup;

    fn record(number: u64) -> OpenRecord {
        OpenRecord { bits: READ | WRITE, backing: 7, number, node: 16 + number, data_version: 3, request: 2 }
    }

    fn reopen(journal: &Journal) -> (Journal, Left) {
        Journal::open(journal.file.try_clone().unwrap().into(), journal.volume).unwrap()
    }

    #[test]
    fn open_files_and_uncommitted_inodes_are_found_by_the_next_server() {
        let (_home, _datafs, view) = setup();
        let (journal, left) = Journal::open(Journal::create().unwrap(), view.volume).unwrap();
        assert!(left.open.is_empty() && left.uncommitted.is_empty());
        let slots = [1, 2, 3].map(|number| journal.insert(record(number)).unwrap());
        journal.remove(slots[1]);
        journal.has_unflushed(view.volume, 20);
        journal.has_unflushed(view.volume, 21);
        journal.has_unflushed(view.volume + 1, 22);
        journal.reserves(view.volume, 1_024);
        journal.has_flushed(view.volume, 21);
        let (_, left) = reopen(&journal);
        let mut uncommitted = left.uncommitted;
        uncommitted.sort_unstable();
        assert_eq!(uncommitted, [20, 21], "an answered commit may be lost until it has settled");
        journal.settle(&view).unwrap();
        let (next, left) = reopen(&journal);
        assert_eq!(left.uncommitted, [20]);
        assert_eq!(left.inos_end, 1_024);
        let open: Vec<_> = left.open.iter().map(|(_, record)| record.number).collect();
        assert_eq!(open, [1, 3]);
        assert_eq!(left.open[0].1, OpenRecord { bits: READ | WRITE | USED, ..record(1) });
        next.lose(&left.uncommitted.iter().copied().collect());
        assert!(reopen(&next).1.uncommitted.is_empty());
    }

    #[test]
    fn untold_loss_survives_servers_until_a_report_was_answered() {
        let (_home, _datafs, view) = setup();
        let (journal, _) = Journal::open(Journal::create().unwrap(), view.volume).unwrap();
        journal.has_unflushed(view.volume, 20);
        journal.has_unflushed(view.volume, 21);
        let (second, left) = reopen(&journal);
        // 22 had no slot.
        second.lose(&left.uncommitted.iter().copied().chain([22]).collect());
        let (third, left) = reopen(&second);
        assert!(left.uncommitted.is_empty() && left.open.is_empty());
        assert!([20, 21, 22].into_iter().all(|ino| third.is_untold(ino)) && !third.is_untold(23));
        // A further crash with new writes to the inode adds no second mark.
        third.has_unflushed(view.volume, 20);
        let (fourth, left) = reopen(&third);
        assert_eq!(left.uncommitted, [20]);
        fourth.lose(&HashSet::from([20]));
        fourth.tells(20);
        assert!(!fourth.is_untold(20));
        assert!(reopen(&fourth).0.is_untold(20), "the answer may not have reached the program");
        fourth.has_told(20);
        let (fifth, left) = reopen(&fourth);
        assert!(left.uncommitted.is_empty() && !fifth.is_untold(20) && fifth.is_untold(21));
        let state = fifth.state.lock();
        assert_eq!(state.free.len() as u32 + 2, state.len - 1, "two slots are used");
    }

    #[test]
    fn untold_loss_of_earlier_crashes_makes_place() {
        let (_home, _datafs, view) = setup();
        let (journal, _) = Journal::open(Journal::create().unwrap(), view.volume).unwrap();
        journal.lose(&HashSet::from([1, 2]));
        let many = 2..2 + UNTOLD_MAX as u64 + 5;
        journal.lose(&many.collect());
        assert!(!journal.is_untold(1));
        assert_eq!(journal.state.lock().untold.len(), UNTOLD_MAX);
    }

    #[test]
    fn locks_are_found_until_they_are_released() {
        let (_home, _datafs, view) = setup();
        let (journal, _) = Journal::open(Journal::create().unwrap(), view.volume).unwrap();
        let magic = || {
            let mut header = [0; SLOT_BYTES];
            journal.file.read_exact_at(&mut header, 0).unwrap();
            long(&header, 0)
        };
        journal.insert(record(1)).unwrap();
        assert_eq!(magic(), MAGIC, "earlier programs can read it");
        let locks = [7, 8].map(|owner| LockRecord { handle: 1, node: 17, owner });
        let slots = locks.map(|lock| journal.insert_lock(lock).unwrap());
        assert_eq!(magic(), MAGIC_WITH_LOCKS);
        let (_, left) = reopen(&journal);
        assert_eq!(left.locks, [(slots[0], locks[0]), (slots[1], locks[1])]);
        assert_eq!(left.open.len(), 1);
        journal.remove(slots[0]);
        assert_eq!(reopen(&journal).1.locks, [(slots[1], locks[1])]);
    }

    #[test]
    fn a_write_after_the_answer_stays_uncommitted() {
        let (_home, _datafs, view) = setup();
        let (journal, _) = Journal::open(Journal::create().unwrap(), view.volume).unwrap();
        journal.has_unflushed(view.volume, 20);
        journal.has_flushed(view.volume, 20);
        journal.has_unflushed(view.volume, 20);
        journal.settle(&view).unwrap();
        assert_eq!(reopen(&journal).1.uncommitted, [20]);
    }

    #[test]
    fn a_full_journal_says_so_until_all_writes_are_committed() {
        let (_home, _datafs, view) = setup();
        let (journal, _) = Journal::open(Journal::create().unwrap(), view.volume).unwrap();
        journal.state.lock().len = SLOTS_MAX;
        journal.has_unflushed(view.volume, 20);
        let left = reopen(&journal).1;
        assert!(left.overflowed && left.uncommitted.is_empty());
        journal.clear_overflow();
        assert!(!reopen(&journal).1.overflowed);
        journal.has_unflushed(view.volume, 20);
        assert!(reopen(&journal).1.overflowed, "the next one is recorded again");
    }

    #[test]
    fn a_foreign_file_is_refused() {
        let file = File::from(memfd_create("none", MFdFlags::MFD_CLOEXEC).unwrap());
        file.write_all_at(&[1; SLOT_BYTES], 0).unwrap();
        assert!(Journal::open(file.try_clone().unwrap().into(), 1).is_err());
        file.write_all_at(&[1; 3], SLOT_BYTES as u64).unwrap();
        assert!(Journal::open(file.into(), 1).is_err());
    }
}
