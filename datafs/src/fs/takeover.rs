//! Takeover of a dead session by the process that succeeds it in serving a mount: its locks and the files
//! without a name that it had open.
//!
//! The file of the dead session must stay locked meanwhile (`session.rs`), so that no other process ends it. A
//! takeover that is cut off is repeated by the next process, from both sessions.

use std::collections::HashSet;

use super::lock::{self, LockOwner};
use super::orphan::Orphan;
use super::shared::Shared;
use super::tree::Closing;
use crate::error::Result;
use crate::meta::codec::Decoder;
use crate::meta::engine::{Durability, Order};
use crate::meta::keys;
use crate::meta::metadata::PAGE;
use crate::node::{INO_MAX, Node};
use crate::session;

impl Shared {
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

    /// Ends a session of which everything was taken over; a collection removes its unpublished objects.
    pub(crate) fn end_taken_over(&self, old: u64) -> Result<()> {
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
