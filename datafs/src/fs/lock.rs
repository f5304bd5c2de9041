//! Advisory file locks, stored in the metadata, so that they work between the processes, mounts and machines
//! that share a volume.
//!
//! One record holds all locks on a node. A lock belongs to an owner within a session. The owner is a number
//! that the mount got from its kernel for what POSIX calls the process or the open file. Locks end with their
//! session. A blocked session checks, at most once a second, whether the sessions that hold the conflicting
//! locks are alive, and ends dead ones.
//!
//! The two families, `fcntl` and `flock`, do not see each other, as on Linux.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::View;
use crate::error::{Error, Result};
use crate::meta::codec::{Decoder, Encoder};
use crate::meta::engine::{Durability, Order, ReadTxn, WriteTxn};
use crate::meta::keys;
use crate::node::{Attr, Node};
use crate::session;

/// Locks on one node: more are refused, because each change rewrites the record.
const LOCKS_MAX: usize = 4_096;
/// Shortest time between two liveness checks of the sessions that hold conflicting locks. A check is a query
/// to the metadata server, or a look at a session file.
const HOLDERS_ASKED_EVERY: Duration = Duration::from_secs(1);
/// The last byte that a lock can cover: the end of any file.
pub const LOCK_END_MAX: u64 = i64::MAX as u64;

/// The system call that a lock is taken with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LockFamily {
    /// `fcntl`: ranges of bytes, owned by a process.
    Fcntl,
    /// `flock`: the whole file, owned by an open file.
    Flock,
}

/// The owner of a held or wanted lock, inside one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LockOwner {
    /// The family that the lock is in.
    pub family: LockFamily,
    /// Distinct for distinct owners of the family in this process.
    pub id: u64,
}

/// A lock, held or wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileLock {
    /// The owner.
    pub owner: LockOwner,
    /// Whether the lock is exclusive; otherwise owners can share it.
    pub exclusive: bool,
    /// First byte.
    pub start: u64,
    /// Last byte, at most [`LOCK_END_MAX`].
    pub end: u64,
    /// Process id, reported to other lock owners.
    pub pid: u32,
}

/// A held lock that conflicts with a wanted one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blocker {
    /// The lock.
    pub lock: FileLock,
    /// Whether it is held through this process; otherwise the owner's number has no meaning here.
    pub is_local: bool,
}

/// The outcome of a lock request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Locking {
    /// The lock is held. Carries the attributes as read after that, so that they show what earlier holders
    /// have changed. `None` for a node that is gone or in a snapshot.
    Held(Option<Attr>),
    /// These locks conflict; nothing was changed.
    Blocked(Vec<Blocker>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Held {
    session: u64,
    lock: FileLock,
}

impl Held {
    fn is_of(&self, session: u64, owner: LockOwner) -> bool {
        self.session == session && self.lock.owner == owner
    }

    /// The lock as reported to a session.
    fn blocks(&self, session: u64) -> Blocker {
        Blocker { lock: self.lock, is_local: self.session == session }
    }

    fn is_in_the_way_of(&self, session: u64, wanted: &FileLock) -> bool {
        !self.is_of(session, wanted.owner)
            && self.lock.owner.family == wanted.owner.family
            && (self.lock.exclusive || wanted.exclusive)
            && self.lock.start <= wanted.end
            && wanted.start <= self.lock.end
    }
}

/// Time of this process's last liveness check of sessions that hold conflicting locks.
#[derive(Debug, Default)]
pub(crate) struct HoldersAsked(Mutex<Option<Instant>>);

impl HoldersAsked {
    /// Whether a check is due. If so, records it as done now; the caller has to do it.
    fn is_due(&self) -> bool {
        let mut last = self.0.lock();
        let due = last.is_none_or(|last| last.elapsed() >= HOLDERS_ASKED_EVERY);
        if due {
            *last = Some(Instant::now());
        }
        due
    }
}

impl View {
    /// Takes a lock, or changes one that the owner has, unless another owner's lock conflicts. Never waits
    /// for the holder of a lock.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an invalid range, [`Error::TooLarge`] for too many locks on one file.
    pub fn lock(&self, node: Node, wanted: FileLock) -> Result<Locking> {
        check(wanted.start, wanted.end)?;
        let mut taken = self.try_lock(node, &wanted)?;
        if let Err(in_the_way) = &taken
            && self.take_over_dead(in_the_way)?
        {
            taken = self.try_lock(node, &wanted)?;
        }
        let session = self.shared.session.id();
        match taken {
            Err(in_the_way) => {
                Ok(Locking::Blocked(in_the_way.iter().map(|held| held.blocks(session)).collect()))
            }
            Ok(()) if node.is_live() => match self.getattr(node) {
                Ok(attr) => Ok(Locking::Held(Some(attr))),
                Err(Error::NotFound { .. }) => Ok(Locking::Held(None)),
                Err(error) => Err(error),
            },
            Ok(()) => Ok(Locking::Held(None)),
        }
    }

    /// Takes a lock, or returns the conflicting ones.
    fn try_lock(&self, node: Node, wanted: &FileLock) -> Result<std::result::Result<(), Vec<Held>>> {
        let session = self.shared.session.id();
        let key = keys::lock(self.volume, node.to_u64());
        self.shared.meta.transact(Durability::Relaxed, |txn| {
            let mut held = read(txn.as_read(), &key)?;
            let before = held.clone();
            let in_the_way = in_the_way(txn.as_read(), &mut held, session, wanted)?;
            if !in_the_way.is_empty() {
                return Ok(Err(in_the_way));
            }
            cut(&mut held, session, wanted.owner, wanted.start, wanted.end);
            insert(&mut held, session, *wanted);
            if held.len() > LOCKS_MAX {
                return Err(Error::TooLarge { what: "number of locks on a file", max: LOCKS_MAX as u64 });
            }
            if held != before {
                write(txn, &key, &held)?;
            }
            Ok(Ok(()))
        })
    }

    /// Ends the sessions among the holders whose processes are dead. Returns whether there were any.
    fn take_over_dead(&self, holders: &[Held]) -> Result<bool> {
        let own = self.shared.session.id();
        let mut others: Vec<u64> =
            holders.iter().map(|held| held.session).filter(|other| *other != own).collect();
        others.sort_unstable();
        others.dedup();
        if others.is_empty() || !self.shared.holders_asked.is_due() {
            return Ok(false);
        }
        let mut any = false;
        for other in others {
            if session::end_if_dead(&self.shared.meta, &self.shared.sessions_dir, other)? {
                self.shared.collector.wake();
                any = true;
            }
        }
        Ok(any)
    }

    /// Releases an owner's locks between two bytes, both included. Returns whether there were any.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an invalid range.
    pub fn unlock(&self, node: Node, owner: LockOwner, start: u64, end: u64) -> Result<bool> {
        check(start, end)?;
        let session = self.shared.session.id();
        let key = keys::lock(self.volume, node.to_u64());
        self.shared.meta.transact(Durability::Relaxed, |txn| {
            let mut held = read(txn.as_read(), &key)?;
            let before = held.clone();
            cut(&mut held, session, owner, start, end);
            if held == before {
                return Ok(false);
            }
            write(txn, &key, &held).map(|()| true)
        })
    }

    /// The first lock that conflicts with a wanted one.
    pub fn lock_in_the_way(&self, node: Node, wanted: FileLock) -> Result<Option<Blocker>> {
        check(wanted.start, wanted.end)?;
        let session = self.shared.session.id();
        let key = keys::lock(self.volume, node.to_u64());
        self.shared.meta.view(|txn| {
            let mut held = read(txn, &key)?;
            Ok(in_the_way(txn, &mut held, session, &wanted)?.first().map(|held| held.blocks(session)))
        })
    }
}

fn check(start: u64, end: u64) -> Result<()> {
    if start > end || end > LOCK_END_MAX {
        return Err(Error::Invalid(format!(
            "no lock covers the bytes {start} to {end}: the last one comes after the first and is at most \
             {LOCK_END_MAX}"
        )));
    }
    Ok(())
}

/// The conflicting locks. A conflicting lock of an ended session does not count; all locks of that session
/// are removed from `held`.
fn in_the_way(
    txn: &mut dyn ReadTxn,
    held: &mut Vec<Held>,
    session: u64,
    wanted: &FileLock,
) -> Result<Vec<Held>> {
    let mut gone = Vec::new();
    let mut found = Vec::new();
    for other in held.iter().filter(|other| other.is_in_the_way_of(session, wanted)) {
        if other.session != session && txn.get(&keys::session(other.session))?.is_none() {
            gone.push(other.session);
        } else {
            found.push(*other);
        }
    }
    held.retain(|other| !gone.contains(&other.session));
    Ok(found)
}

/// Removes a range from an owner's locks.
fn cut(held: &mut Vec<Held>, session: u64, owner: LockOwner, start: u64, end: u64) {
    let mut rest = Vec::with_capacity(held.len() + 1);
    for other in held.drain(..) {
        let lock = other.lock;
        if !other.is_of(session, owner) || lock.end < start || lock.start > end {
            rest.push(other);
            continue;
        }
        if lock.start < start {
            rest.push(Held { lock: FileLock { end: start - 1, ..lock }, ..other });
        }
        if lock.end > end {
            rest.push(Held { lock: FileLock { start: end + 1, ..lock }, ..other });
        }
    }
    *held = rest;
}

/// Adds a lock that overlaps none of its owner's; merges it with adjacent ones of the same owner and mode.
fn insert(held: &mut Vec<Held>, session: u64, mut lock: FileLock) {
    held.retain(|other| {
        let (their, kind) = (other.lock, other.lock.exclusive == lock.exclusive);
        let touches =
            their.end.checked_add(1) == Some(lock.start) || lock.end.checked_add(1) == Some(their.start);
        let merges = other.is_of(session, lock.owner) && kind && touches;
        if merges {
            lock.start = lock.start.min(their.start);
            lock.end = lock.end.max(their.end);
        }
        !merges
    });
    held.push(Held { session, lock });
}

fn read(txn: &mut dyn ReadTxn, key: &[u8]) -> Result<Vec<Held>> {
    match txn.get(key)? {
        Some(value) => decode(&value),
        None => Ok(Vec::new()),
    }
}

fn write(txn: &mut dyn WriteTxn, key: &[u8], held: &[Held]) -> Result<()> {
    if held.is_empty() { txn.delete(key) } else { txn.put(key, &encode(held)) }
}

pub(crate) fn encode(held: &[Held]) -> Vec<u8> {
    let mut to = Encoder::default().u32(held.len() as u32);
    for Held { session, lock } in held {
        let family = match lock.owner.family {
            LockFamily::Fcntl => b'p',
            LockFamily::Flock => b'f',
        };
        to = to
            .u64(*session)
            .u8(family)
            .u64(lock.owner.id)
            .u8(u8::from(lock.exclusive))
            .u64(lock.start)
            .u64(lock.end)
            .u32(lock.pid);
    }
    to.finish()
}

pub(crate) fn decode(value: &[u8]) -> Result<Vec<Held>> {
    let mut from = Decoder::new("lock record", value);
    let count = from.u32()?;
    let mut held = Vec::new();
    for _ in 0..count {
        let session = from.u64()?;
        let family = match from.u8()? {
            b'p' => LockFamily::Fcntl,
            b'f' => LockFamily::Flock,
            _ => return Err(from.damaged("unknown family of locks")),
        };
        let owner = LockOwner { family, id: from.u64()? };
        let exclusive = from.u8()? != 0;
        let lock = FileLock { owner, exclusive, start: from.u64()?, end: from.u64()?, pid: from.u32()? };
        held.push(Held { session, lock });
    }
    from.finish()?;
    Ok(held)
}

/// A lock record in which a session's locks belong to another session, and their owners; `None` if it has none.
pub(super) fn with_new_session(
    value: &[u8],
    old: u64,
    new: u64,
) -> Result<Option<(Vec<u8>, Vec<LockOwner>)>> {
    let mut held = decode(value)?;
    let mut owners = Vec::new();
    for held in held.iter_mut().filter(|held| held.session == old) {
        held.session = new;
        owners.push(held.lock.owner);
    }
    Ok((!owners.is_empty()).then(|| (encode(&held), owners)))
}

/// Removes all locks of sessions, page by page: `after` is the last key of the page before. Returns the last
/// key of this page, or `None` when it was the last page.
pub(crate) fn forget_sessions(
    txn: &mut dyn WriteTxn,
    sessions: &BTreeSet<u64>,
    after: Option<&[u8]>,
    limit: usize,
) -> Result<Option<Vec<u8>>> {
    let prefix = keys::all_locks();
    let start = after.map_or_else(|| prefix.clone(), |key| [key, &[0]].concat());
    let page = txn.scan(&start, &keys::after_prefix(&prefix), Order::Ascending, limit)?;
    for (key, value) in &page {
        let mut held = decode(value)?;
        let before = held.len();
        held.retain(|other| !sessions.contains(&other.session));
        if held.len() != before {
            write(txn, key, &held)?;
        }
    }
    Ok(if page.len() < limit { None } else { page.into_iter().next_back().map(|(key, _)| key) })
}

#[cfg(test)]
#[path = "tests/lock.rs"]
mod tests;
