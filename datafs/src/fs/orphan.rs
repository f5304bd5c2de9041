//! Orphans: files without a name that a session may still have open, and the protocol that frees them.
//!
//! Opening a file leaves no trace in the metadata. So a session that removes the last name of a file while
//! other sessions live cannot know whether they have it open. The file becomes an *orphan*, and this session
//! its *keeper*. The keeper starts a *round*: it raises the round's number. Every live session then registers
//! as a *holder* of the orphans that it has open, and answers with the number. Once all have answered, the
//! keeper frees the orphans that have no holder. One round covers every file that was unlinked before it, so
//! removing many files costs each session one small commit a second.
//!
//! This is safe because there are only two ways to open a file without a name. A session that has it open may
//! open it again; a transaction may register the session as a holder ([`View::open_orphan`]). So a session
//! that has answered can open no more of the round's files without registering. The last holder that closes
//! an orphan becomes its keeper. A dead holder holds nothing; any session may free the orphans of a dead
//! keeper.
//!
//! A session that is alone frees a file with its last name, or with its last close.
//!
//! A file that is created without a name (`unnamed.rs`) is an orphan from the beginning, held by the session
//! that created it. No other session can have it open, so none is asked.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use super::View;
use super::file::{OpenFile, discard};
use super::open_table::{Naming, OpenInode};
use super::scattered;
use super::shared::Shared;
use super::tree::{self, Closing};
use super::types::OpenFlags;
use crate::error::{Error, Result};
use crate::failpoint;
use crate::meta::codec::{Decoder, Encoder};
use crate::meta::engine::{Durability, Order, ReadTxn, WriteTxn};
use crate::meta::keys;
use crate::meta::versioned::Writer;
use crate::node::Node;
use crate::session;

/// Keeper of an orphan that no session has open: any session may free it.
const NOBODY: u64 = 0;
/// Records that one transaction reads or removes.
const BATCH: usize = 1_000;
/// Orphans that one transaction frees.
const FREED_TOGETHER: usize = 64;
/// Open files that one transaction looks up.
const LOOKED_UP_TOGETHER: usize = 256;
/// Orphans that one round covers: with sixteen bytes each, 1 MiB.
const ROUND_MAX: usize = 65_536;

/// An orphan's record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Orphan {
    keeper: u64,
    /// Sessions that have it open.
    holders: Vec<u64>,
}

impl Orphan {
    /// An orphan that no session has open.
    pub(crate) fn free() -> Orphan {
        Orphan { keeper: NOBODY, holders: Vec::new() }
    }

    /// An orphan that other sessions may have open.
    pub(crate) fn of(keeper: u64) -> Orphan {
        Orphan { keeper, holders: Vec::new() }
    }

    /// An orphan that its keeper has open.
    pub(crate) fn held_by(keeper: u64) -> Orphan {
        Orphan { keeper, holders: vec![keeper] }
    }

    /// A session has it open no more. Returns whether it was keeper or holder.
    pub(super) fn leaves(&mut self, session: u64) -> bool {
        let holders = self.holders.len();
        self.holders.retain(|holder| *holder != session);
        self.holders.len() != holders || self.keeper == session
    }

    pub(super) fn is_held_by(&mut self, session: u64) {
        if !self.holders.contains(&session) {
            self.holders.push(session);
        }
    }

    pub(super) fn is_kept_by(&mut self, session: u64) {
        self.keeper = session;
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        self.holders.iter().fold(Encoder::default().u64(self.keeper), |to, holder| to.u64(*holder)).finish()
    }

    pub(crate) fn decode(value: &[u8]) -> Result<Orphan> {
        let (numbers, []) = value.as_chunks() else {
            return Err(Error::corrupt("orphan record", "it is of no whole numbers"));
        };
        let mut numbers = numbers.iter().map(|number| u64::from_be_bytes(*number));
        let missing = || Error::corrupt("orphan record", "it has no keeper");
        Ok(Orphan { keeper: numbers.next().ok_or_else(missing)?, holders: numbers.collect() })
    }
}

/// The state of the protocol in one process.
#[derive(Debug, Default)]
pub(crate) struct Orphans {
    /// The last round that this process has answered.
    answered: AtomicU64,
    /// There may be orphans to start a round for.
    noted: AtomicBool,
    round: Mutex<Option<Round>>,
    /// Held while a transaction notes this process as a holder, or gives that up: each depends on what the process has
    /// open, which is no part of the metadata.
    holding: Mutex<()>,
}

/// A round that this process has started.
#[derive(Debug)]
struct Round {
    number: u64,
    /// The orphans that it covers, by volume and inode number.
    orphans: Vec<(u64, u64)>,
    unanswered: Vec<u64>,
}

impl Orphans {
    /// Records that this process has become the keeper of an orphan.
    pub(crate) fn note(&self) {
        self.noted.store(true, Ordering::Release);
    }

    /// Excludes other transactions that note this process as a holder, or give that up.
    pub(super) fn holding(&self) -> parking_lot::MutexGuard<'_, ()> {
        self.holding.lock()
    }

    /// Whether there is work before the next full collection.
    pub(crate) fn are_waiting(&self) -> bool {
        self.noted.load(Ordering::Acquire) || self.round.lock().is_some()
    }
}

/// Open inodes, each with one more handle while this lives.
struct Pinned<'a> {
    shared: &'a Shared,
    inodes: Vec<Arc<OpenInode>>,
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        for inode in &self.inodes {
            self.shared.close_inode(inode);
        }
    }
}

impl View {
    /// Opens a file for reading whose last name another session has just removed. [`Error::NotFound`] when
    /// the file is freed or about to be.
    pub(crate) fn open_orphan(&self, node: Node) -> Result<OpenFile> {
        let shared = &self.shared;
        let (key, own) = (keys::orphan(self.volume, node.ino), shared.session.id());
        // Registered before the transaction, so that a later transaction that would free the file finds it
        // open.
        let file = OpenFile::register(self, node, OpenFlags::READ);
        if let Some(open) = file.open_inode() {
            open.note_maybe_orphan();
        }
        let mut closing = Closing::default();
        let holding = shared.orphans.holding.lock();
        shared.meta.transact_making_room(Durability::Relaxed, |txn| {
            closing.undo();
            let found = txn.get(&key)?.map(|value| Orphan::decode(&value)).transpose()?;
            let Some(mut orphan) = found.filter(|orphan| orphan.keeper != NOBODY) else {
                return Err(Error::not_found(format!("inode {}", node.ino)));
            };
            // A file that is freed in several transactions loses its attributes first.
            Writer::run(txn, self.volume, own, |writer| tree::inode(writer, node.ino))?;
            closing.orphan(&shared.open, self.volume, node.ino);
            if !orphan.holders.contains(&own) {
                orphan.holders.push(own);
                txn.put(&key, &orphan.encode())?;
            }
            Ok(())
        })?;
        closing.committed(&shared.orphans);
        drop(holding);
        Ok(file)
    }
}

impl Shared {
    /// Removes a handle that [`OpenTable::open`](super::open_table::OpenTable::open) has registered. The last
    /// close drops unflushed writes and gives up an orphan.
    pub(crate) fn close_inode(&self, open: &OpenInode) {
        if !self.open.close(open) {
            return;
        }
        discard(self, open, &mut open.dirty.lock());
        if !open.is_maybe_orphan() && open.naming() == Naming::Usual {
            if open.scatter(0) > scattered::EXTENTS_MIN {
                self.scattered.note(open.volume, open.ino);
            }
        } else if let Err(error) = self.let_go(open) {
            tracing::warn!(
                inode = open.ino, %error,
                "freeing a file without a name; it is collected once this process has ended"
            );
        }
    }

    /// Whether another session may read what is written to a file without a name.
    pub(crate) fn others_may_have_open(&self) -> bool {
        self.meta.view(|txn| session::is_alone(txn, self.session.id())).is_ok_and(|alone| !alone)
    }

    /// Gives up an orphan that this process had open; frees it unless another session may have it open.
    fn let_go(&self, open: &OpenInode) -> Result<()> {
        let (volume, ino) = (open.volume, open.ino);
        let (key, own) = (keys::orphan(volume, ino), self.session.id());
        let was_named = open.naming() != Naming::Unnamed;
        let holding = self.orphans.holding.lock();
        let freed = self.meta.transact_making_room(Durability::Relaxed, |txn| {
            let Some(value) = txn.get(&key)? else { return Ok(true) };
            if self.open.get(volume, ino).is_some_and(|open| open.is_maybe_orphan()) {
                // Opened again meanwhile: the next last close gives it up.
                return Ok(true);
            }
            let mut orphan = Orphan::decode(&value)?;
            let mut holders = Vec::new();
            for holder in orphan.holders.drain(..).filter(|holder| *holder != own) {
                if txn.get(&keys::session(holder))?.is_some() {
                    holders.push(holder);
                }
            }
            orphan.holders = holders;
            let others_may_have_it =
                !orphan.holders.is_empty() || (was_named && !session::is_alone(txn.as_read(), own)?);
            if others_may_have_it {
                if orphan.holders.is_empty() {
                    orphan.keeper = own;
                    self.orphans.note();
                }
                txn.put(&key, &orphan.encode())?;
                return Ok(true);
            }
            txn.put(&key, &Orphan::free().encode())?;
            self.free_in(txn, volume, ino, BATCH).map(|left| left > 0)
        })?;
        drop(holding);
        if freed { Ok(()) } else { self.free(&[(volume, ino)]).map(drop) }
    }

    /// [`Shared::answer_round`] that may miss a round that began a moment ago. It costs no request of a metadata
    /// server while there is no new one.
    pub(crate) fn answer_recent_round(&self) -> Result<()> {
        let number = self.meta.view_recent(round_number)?;
        if number == self.orphans.answered.load(Ordering::Acquire) { Ok(()) } else { self.answer_round() }
    }

    /// Answers the current round, unless this process already has.
    pub(crate) fn answer_round(&self) -> Result<()> {
        let number = self.meta.view(round_number)?;
        if number == self.orphans.answered.load(Ordering::Acquire) {
            return Ok(());
        }
        self.hold_orphans()?;
        crate::failpoint::hit("orphans-held");
        let key = keys::answered(self.session.id());
        self.meta.transact_making_room(Durability::Relaxed, |txn| txn.put(&key, &number.to_be_bytes()))?;
        self.orphans.answered.store(number, Ordering::Release);
        Ok(())
    }

    /// Registers this process as a holder of the orphans that it has open. Call it before a reason goes for which other
    /// sessions keep them: the question that this process answers, or the session that it succeeds.
    pub(super) fn hold_orphans(&self) -> Result<()> {
        // After this, an open by this process sees that the file has no name, and fails.
        self.meta.barrier()?;
        let pinned = Pinned { shared: self, inodes: self.open.pin_all() };
        let own = self.session.id();
        let unknown: Vec<_> = pinned.inodes.iter().filter(|inode| !self.open.is_orphan(inode)).collect();
        for inodes in unknown.chunks(LOOKED_UP_TOGETHER) {
            let wanted: Vec<_> = inodes.iter().map(|inode| keys::orphan(inode.volume, inode.ino)).collect();
            let found = self.meta.view(|txn| {
                txn.prefetch(&wanted)?;
                wanted.iter().try_fold(false, |found, key| Ok(found | txn.get(key)?.is_some()))
            })?;
            if !found {
                continue;
            }
            let mut closing = Closing::default();
            let holding = self.orphans.holding.lock();
            let held = self.meta.transact_making_room(Durability::Relaxed, |txn| {
                closing.undo();
                for (inode, key) in inodes.iter().zip(&wanted) {
                    let Some(value) = txn.get(key)? else { continue };
                    let mut orphan = Orphan::decode(&value)?;
                    closing.orphan(&self.open, inode.volume, inode.ino);
                    if !orphan.holders.contains(&own) {
                        orphan.holders.push(own);
                        txn.put(key, &orphan.encode())?;
                    }
                }
                Ok(())
            });
            held?;
            closing.committed(&self.orphans);
            drop(holding);
        }
        Ok(())
    }

    /// Frees the orphans that this process or a dead one keeps, once all sessions have answered the round.
    /// Starts a round for those that no round covers yet. Returns how many were freed. Never waits for an
    /// answer: call it again while [`Orphans::are_waiting`].
    pub(crate) fn tend_orphans(&self) -> Result<u64> {
        let mut freed = 0;
        let mut under_way = self.orphans.round.lock();
        loop {
            if under_way.is_none() {
                self.orphans.noted.store(false, Ordering::Release);
                let asked = self.ask(&mut freed).inspect_err(|_| self.orphans.note())?;
                *under_way = asked;
            }
            let Some(round) = &mut *under_way else { return Ok(freed) };
            self.wait_for_less(round)?;
            if !round.unanswered.is_empty() {
                return Ok(freed);
            }
            let now = self.free(&round.orphans)?;
            let more = round.orphans.len() == ROUND_MAX && now > 0;
            freed += now;
            *under_way = None;
            if !more && !self.orphans.noted.load(Ordering::Acquire) {
                return Ok(freed);
            }
        }
    }

    /// Starts a round for the orphans without a known holder. Frees those that no session has open.
    fn ask(&self, freed: &mut u64) -> Result<Option<Round>> {
        let own = self.session.id();
        let (mut free, mut orphans) = (Vec::new(), Vec::new());
        let mut living = HashMap::from([(own, true)]);
        let prefix = keys::all_orphans();
        let (mut start, end) = (prefix.clone(), keys::after_prefix(&prefix));
        while orphans.len() < ROUND_MAX {
            let page = self.meta.view(|txn| {
                let page = txn.scan(&start, &end, Order::Ascending, BATCH)?;
                for (_, value) in &page {
                    let Orphan { keeper, holders } = Orphan::decode(value)?;
                    for session in holders.into_iter().chain([keeper]) {
                        if let std::collections::hash_map::Entry::Vacant(unknown) = living.entry(session) {
                            unknown.insert(txn.get(&keys::session(session))?.is_some());
                        }
                    }
                }
                Ok(page)
            })?;
            let lives = |session: &u64| living.get(session).copied().unwrap_or(true);
            for (key, value) in &page {
                let orphan = Orphan::decode(value)?;
                let mut from = Decoder::new("orphan key", &key[1..]);
                let which = (from.u64()?, from.u64()?);
                let is_kept = orphan.keeper != own && lives(&orphan.keeper);
                if orphan.keeper == NOBODY {
                    free.push(which);
                } else if !is_kept && !orphan.holders.iter().any(lives) && orphans.len() < ROUND_MAX {
                    orphans.push(which);
                }
            }
            match page.last() {
                Some((last, _)) if page.len() == BATCH => start = [last.as_slice(), &[0]].concat(),
                _ => break,
            }
        }
        *freed += self.free(&free)?;
        if orphans.is_empty() {
            return Ok(None);
        }
        let (number, everybody) = self.meta.transact_making_room(Durability::Relaxed, |txn| {
            let everybody = session::roster(txn.as_read())?;
            let number = round_number(txn.as_read())?;
            if everybody == [own] {
                return Ok((number, everybody));
            }
            txn.put(keys::ROUND, &(number + 1).to_be_bytes())?;
            Ok((number + 1, everybody))
        })?;
        // This process may have orphans of dead keepers open without knowing it.
        self.hold_orphans()?;
        let unanswered = everybody.into_iter().filter(|session| *session != own).collect();
        Ok(Some(Round { number, orphans, unanswered }))
    }

    /// Removes the sessions that have answered or ended from the round.
    fn wait_for_less(&self, round: &mut Round) -> Result<()> {
        round.unanswered = self.meta.view(|txn| {
            let mut unanswered = Vec::new();
            for session in &round.unanswered {
                let answered = match txn.get(&keys::answered(*session))? {
                    Some(value) => Decoder::new("answer about orphans", &value).u64()?,
                    None => 0,
                };
                if answered < round.number && txn.get(&keys::session(*session))?.is_some() {
                    unanswered.push(*session);
                }
            }
            Ok(unanswered)
        })?;
        Ok(())
    }

    /// Frees those of the orphans (sorted by volume) that have no live holder, in batches. Returns how many.
    fn free(&self, orphans: &[(u64, u64)]) -> Result<u64> {
        let mut freed = 0;
        for volume in orphans.chunk_by(|(one, _), (other, _)| one == other) {
            for together in volume.chunks(FREED_TOGETHER) {
                match self.free_together(together) {
                    Ok(count) => freed += count,
                    // The volume is being deleted, and its orphans with it.
                    Err(Error::Stale { .. }) => break,
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(freed)
    }

    fn free_together(&self, orphans: &[(u64, u64)]) -> Result<u64> {
        let mut freed = 0;
        let mut rest = orphans;
        while !rest.is_empty() {
            let (done, now) = self.meta.transact_making_room(Durability::Relaxed, |txn| {
                let (mut done, mut now, mut room) = (0, 0, BATCH);
                for (volume, ino) in rest {
                    let Some(value) = txn.get(&keys::orphan(*volume, *ino))? else {
                        done += 1;
                        continue;
                    };
                    let orphan = Orphan::decode(&value)?;
                    let mut held = false;
                    for holder in &orphan.holders {
                        held |= txn.get(&keys::session(*holder))?.is_some();
                    }
                    if !held {
                        room = self.free_in(txn, *volume, *ino, room)?;
                        if room == 0 {
                            break;
                        }
                        now += 1;
                    }
                    done += 1;
                }
                Ok((done, now))
            })?;
            failpoint::hit("gc-orphans-freed");
            freed += now;
            rest = &rest[done..];
        }
        Ok(freed)
    }

    /// Removes at most `room` records of an orphan, and then its orphan record if none is left. Returns how
    /// many more could have been removed; 0 when there may be more.
    fn free_in(&self, txn: &mut dyn WriteTxn, volume: u64, ino: u64, room: usize) -> Result<usize> {
        Writer::run(txn, volume, self.session.id(), |writer| {
            let removed = tree::remove_records(writer, ino, room)?;
            if removed < room {
                writer.txn().delete(&keys::orphan(volume, ino))?;
            }
            Ok(room - removed)
        })
    }
}

fn round_number(txn: &mut dyn ReadTxn) -> Result<u64> {
    match txn.get(keys::ROUND)? {
        Some(value) => Decoder::new("round of questions about orphans", &value).u64(),
        None => Ok(0),
    }
}

#[cfg(test)]
#[path = "tests/orphan.rs"]
pub(crate) mod tests;
