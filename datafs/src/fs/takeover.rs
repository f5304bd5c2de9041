//! Takeover of a dead session by the process that succeeds it in serving a mount: its locks, the files
//! without a name that it had open, and the requests that it has completed.
//!
//! The kernel sends the requests again that a dead server has not answered. Such a request may have changed
//! names already, and would fail now: a directory that was made exists. So the transaction of each change of
//! names in a held mount also writes the request's number ([`RequestMark`]). A serving thread handles one request
//! at a time, so it overwrites its number only after the answer to the request before.
//!
//! Another session may have removed the last name of a file just before the death. The dead session is neither keeper
//! nor holder of such an orphan yet, and the remover waits only for its answer. So the successor registers as a holder
//! of every orphan that it has open before it removes the row of the dead session ([`Shared::end_taken_over`]).
//!
//! The file of the dead session must stay locked meanwhile (`session.rs`), so that no other process ends it. A
//! takeover that is cut off is repeated by the next process, from both sessions.

use std::collections::HashSet;

use super::lock::{self, LockOwner};
use super::orphan::Orphan;
use super::shared::Shared;
use super::tree::Closing;
use crate::error::Result;
use crate::failpoint;
use crate::meta::codec::Decoder;
use crate::meta::engine::{Durability, Order, WriteTxn};
use crate::meta::keys;
use crate::meta::metadata::PAGE;
use crate::node::{INO_MAX, Node};
use crate::session;

/// Most numbers of completed requests that are taken over from a session: those of the 64 threads of 16 servers
/// that died one after the other without an answer.
const COMPLETED_MAX: usize = 1_024;
/// Set in the slot of a number that was taken over. Numbers of the kernel do not have this bit.
const TAKEN_OVER: u64 = 1 << 63;

/// A request of the kernel that a write transaction completes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RequestMark {
    /// Number of the serving thread, below [`TAKEN_OVER`].
    pub(crate) slot: u64,
    /// The kernel's number of the request, the same when it is sent again.
    pub(crate) number: u64,
}

impl RequestMark {
    /// Records the request as completed by a session, if the transaction commits.
    pub(super) fn complete(self, txn: &mut dyn WriteTxn, session: u64) -> Result<()> {
        txn.put(&keys::completed(session, self.slot), &self.number.to_be_bytes())
    }
}

impl Shared {
    /// Moves the numbers of the requests that a session has completed to this one. Returns them; none if another
    /// process has ended the session.
    pub(crate) fn take_over_completed(&self, old: u64) -> Result<Vec<u64>> {
        let own = self.session.id();
        let prefix = keys::all_completed(old);
        let end = keys::after_prefix(&prefix);
        self.meta.transact_making_room(Durability::Relaxed, |txn| {
            let rows = txn.scan(&prefix, &end, Order::Ascending, usize::MAX)?;
            let mut numbers = Vec::with_capacity(rows.len());
            for (key, value) in &rows {
                numbers.push(Decoder::new("completed request", value).u64()?);
                txn.delete(key)?;
            }
            numbers.sort_unstable();
            numbers.dedup();
            // The newest are the largest.
            numbers.drain(..numbers.len().saturating_sub(COMPLETED_MAX));
            for number in &numbers {
                txn.put(&keys::completed(own, TAKEN_OVER | number), &number.to_be_bytes())?;
            }
            Ok(numbers)
        })
    }

    /// Moves the locks of a session to this one. Returns those of a volume; none if the session has ended, for
    /// other processes may have taken its locks then.
    pub(crate) fn take_over_locks(&self, old: u64, volume: u64) -> Result<Vec<(Node, LockOwner)>> {
        let own = self.session.id();
        let prefix = keys::all_locks();
        let (mut start, end) = (prefix.clone(), keys::after_prefix(&prefix));
        let mut taken = HashSet::new();
        loop {
            let (found, last) = self.meta.transact_making_room(Durability::Relaxed, |txn| {
                let mut found = Vec::new();
                if txn.get(&keys::session(old))?.is_none() {
                    return Ok((found, None));
                }
                let page = txn.scan(&start, &end, Order::Ascending, PAGE)?;
                for (key, value) in &page {
                    let Some((value, owners)) = lock::with_new_session(value, old, own)? else { continue };
                    let mut from = Decoder::new("lock key", &key[1..]);
                    let (of, node) = (from.u64()?, Node::from_u64(from.u64()?));
                    if of == volume {
                        found.extend(owners.into_iter().map(|owner| (node, owner)));
                    }
                    txn.put(key, &value)?;
                }
                let last = page.last().filter(|_| page.len() == PAGE).map(|(key, _)| key.clone());
                Ok((found, last))
            })?;
            taken.extend(found);
            match last {
                Some(last) => start = [last.as_slice(), &[0]].concat(),
                None => return Ok(taken.into_iter().collect()),
            }
        }
    }

    /// Becomes a holder, in place of a session, of the files without a name that it had open and that this
    /// process has open; the others are freed.
    pub(crate) fn take_over_orphans(&self, old: u64) -> Result<()> {
        let own = self.session.id();
        let prefix = keys::all_orphans();
        let (mut start, end) = (prefix.clone(), keys::after_prefix(&prefix));
        loop {
            let mut closing = Closing::default();
            let holding = self.orphans.holding();
            let last = self.meta.transact_making_room(Durability::Relaxed, |txn| {
                closing.undo();
                let page = txn.scan(&start, &end, Order::Ascending, PAGE)?;
                for (key, value) in &page {
                    let mut from = Decoder::new("orphan key", &key[1..]);
                    let (volume, ino) = (from.u64()?, from.u64()?);
                    let mut orphan = Orphan::decode(value)?;
                    if !orphan.leaves(old) {
                        continue;
                    }
                    if closing.orphan(&self.open, volume, ino) {
                        orphan.is_held_by(own);
                    } else {
                        closing.ask();
                    }
                    orphan.is_kept_by(own);
                    txn.put(key, &orphan.encode())?;
                }
                Ok(page.last().filter(|_| page.len() == PAGE).map(|(key, _)| key.clone()))
            })?;
            closing.committed(&self.orphans);
            drop(holding);
            match last {
                Some(last) => start = [last.as_slice(), &[0]].concat(),
                None => return Ok(()),
            }
        }
    }

    /// Ends a session of which everything was taken over; a collection removes its unpublished objects. The files that
    /// it had open must be open in this process.
    pub(crate) fn end_taken_over(&self, old: u64) -> Result<()> {
        // The row of the old session counts as an unanswered question about each of its open files. With the row, other
        // sessions lose that reason to keep them.
        self.hold_orphans()?;
        failpoint::hit("takeover-orphans-held");
        if self.meta.view(|txn| Ok(txn.get(&keys::session(old))?.is_some()))? {
            session::end_dead(&self.meta, old, |_| Ok(()))?;
            self.collector.wake();
        }
        Ok(())
    }

    /// Uses no inode number below `end`: a killed process may have given them to the kernel without a commit.
    pub(crate) fn skip_inos(&self, volume: u64, end: u64) -> Result<()> {
        let key = keys::next_ino(volume);
        self.meta.transact(Durability::Relaxed, |txn| {
            let next = match txn.get(&key)? {
                Some(value) => Decoder::new("inode counter", &value).u64()?,
                None => 0,
            };
            if next < end && end <= INO_MAX {
                txn.put(&key, &end.to_be_bytes())?;
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::fs::OpenFlags;
    use crate::fs::tests::{open, owner, rows, volume};

    #[test]
    fn exactly_the_committed_requests_are_taken_over() {
        let home = tempfile::tempdir().unwrap();
        let (first, second, third) = (open(home.path()), open(home.path()), open(home.path()));
        let view = volume(&first);
        let of = |slot, number| view.completing(RequestMark { slot, number });
        let mkdir =
            |slot, number, name: &str| of(slot, number).mkdir(view.root(), name.as_ref(), 0o755, owner());
        mkdir(0, 10, "a").unwrap();
        // A later request of a thread replaces the one before, unless it changes nothing.
        mkdir(1, 12, "b").unwrap();
        mkdir(1, 14, "c").unwrap();
        mkdir(1, 16, "c").unwrap_err();
        // What is written to a file later is no part of the request that has created it.
        let (_, file) =
            of(2, 18).create(view.root(), "f".as_ref(), 0o644, owner(), OpenFlags::READ_WRITE).unwrap();
        mkdir(2, 20, "d").unwrap();
        file.write_at(0, b"x").unwrap();
        file.fsync().unwrap();

        let id = |datafs: &crate::Datafs| datafs.shared.session.id();
        assert_eq!(second.shared.take_over_completed(id(&first)).unwrap(), [10, 14, 20]);
        assert!(second.shared.take_over_completed(id(&first)).unwrap().is_empty());
        // A server that dies before it answers them leaves them to the next one.
        assert_eq!(third.shared.take_over_completed(id(&second)).unwrap(), [10, 14, 20]);
        assert_eq!(rows(&third, b'w'), 3);
        drop((file, third));
        assert_eq!(rows(&second, b'w'), 0, "the end of a session leaves none");
    }
}
