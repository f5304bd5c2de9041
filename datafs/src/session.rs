//! Sessions: the registration of a process in the metadata, and the detection of dead processes.
//!
//! A session is a row in the metadata and a file that the process keeps locked. The kernel drops the lock
//! however the process ends. Another process may then take the session over and remove what is left of it:
//! unpublished objects, and files that were unlinked while they were open. The names of new objects carry the
//! session, so nothing is written down per object.
//!
//! Where the metadata is on a server, a lock file says nothing about processes of other machines. There the
//! engine keeps a lease of each session, and a session whose lease has lapsed is dead. Its process may still
//! be alive (cut off, stopped). But its row is gone, so commits that would point at its own new objects fail,
//! see `check_session` in `meta/versioned.rs`.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use millrace_leaf::private;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use parking_lot::Mutex;

use crate::deletion_record;
use crate::error::{Error, Result};
use crate::failpoint;
use crate::inherited::Held;
use crate::meta::codec::Encoder;
use crate::meta::engine::{Durability, Order, ReadTxn, WriteTxn};
use crate::meta::inode::Timestamp;
use crate::meta::keys;
use crate::meta::metadata::Metadata;
use crate::random::random_id;

/// Attempts to find an id whose file no other process holds.
const ATTEMPTS: u32 = 16;

/// This process's session.
#[derive(Debug)]
pub(crate) struct Session {
    id: u64,
    /// Folder of its file, if it has one.
    directory: Option<PathBuf>,
    /// Held until the process ends.
    lock: Mutex<Option<(Held, Flock<File>)>>,
    /// Something is left that another process has to remove.
    unclean: AtomicBool,
}

impl Session {
    /// Registers this process. `directory` must exist.
    pub(crate) fn start(meta: &Metadata, directory: &Path) -> Result<Session> {
        for _ in 0..ATTEMPTS {
            let id = random_id()?;
            let path = file_of(directory, id);
            let file = match private::options().write(true).create_new(true).open(&path) {
                Ok(file) => file,
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(e) => return Err(Error::io("create session file", path, e)),
            };
            let Some(lock) = try_lock(file, &path)? else { continue };
            failpoint::hit("session-locked");
            write_row(meta, id)?;
            failpoint::hit("session-begun");
            return Ok(Session {
                id,
                directory: Some(directory.to_owned()),
                lock: Mutex::new(Some((Held::new(&lock), lock))),
                unclean: AtomicBool::new(false),
            });
        }
        Err(Error::Invalid(format!("no free session file in {}", directory.display())))
    }

    /// Registers this process under `id`, for which the engine already has a lease.
    pub(crate) fn start_leased(meta: &Metadata, id: u64) -> Result<Session> {
        write_row(meta, id)?;
        Ok(Session { id, directory: None, lock: Mutex::new(None), unclean: AtomicBool::new(false) })
    }

    /// The session's number, never 0.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// The locked file, if the session has one. While any process has it open, the session counts as alive.
    pub(crate) fn lock_file(&self) -> io::Result<Option<OwnedFd>> {
        self.lock.lock().as_ref().map(|(_, lock)| lock.try_clone().map(OwnedFd::from)).transpose()
    }

    /// Records that an object may be left behind, so that the row must outlive the process.
    pub(crate) fn leave_unclean(&self) {
        self.unclean.store(true, Ordering::Release);
    }

    /// Drops the lock, as a kill of the process does.
    #[cfg(test)]
    pub(crate) fn lose_lock(&self) {
        drop(self.lock.lock().take());
    }

    /// Ends the session. Leaves an unclean one for another process to clean up.
    pub(crate) fn end(&self, meta: &Metadata) {
        if self.unclean.load(Ordering::Acquire) {
            return;
        }
        let gone = meta
            .transact_making_room(Durability::Relaxed, |txn| {
                deletion_record::forget(txn, self.id)?;
                remove_row(txn, self.id)
            })
            .inspect(|()| failpoint::hit("session-ended"))
            .and_then(|()| self.directory.as_ref().map_or(Ok(()), |folder| remove_file(folder, self.id)));
        if let Err(error) = gone {
            tracing::warn!(%error, "ending the metadata session; the next process cleans up");
        }
    }
}

/// A dead session; its lock, if it has one, is held while its remains are removed.
#[derive(Debug)]
pub(crate) struct DeadSession {
    id: u64,
    directory: Option<PathBuf>,
    _lock: Option<Flock<File>>,
}

impl DeadSession {
    /// Takes a session over; `None` while its process lives or another process takes it over. A lapsed lease ends with
    /// the claim, so that a process which comes back and renews it either keeps the session or knows that it was dead.
    pub(crate) fn claim(meta: &Metadata, directory: &Path, id: u64) -> Result<Option<DeadSession>> {
        match meta.end_lapsed(id)? {
            Some(false) => Ok(None),
            // Several processes may claim it at once: each step of the removal may run twice.
            Some(true) => Ok(Some(DeadSession { id, directory: None, _lock: None })),
            None => DeadSession::claim_file(directory, id),
        }
    }

    /// The sessions whose processes may be dead. Asks a metadata server once. [`DeadSession::claim`] decides about each:
    /// the process of a lapsed lease may come back until then.
    pub(crate) fn suspects(meta: &Metadata, mut ids: Vec<u64>) -> Result<Vec<u64>> {
        if let Some(alive) = meta.sessions_alive(&ids)? {
            ids.retain(|id| !alive.contains(id));
        }
        Ok(ids)
    }

    /// [`DeadSession::claim`] where the processes share a machine.
    pub(crate) fn claim_file(directory: &Path, id: u64) -> Result<Option<DeadSession>> {
        let path = file_of(directory, id);
        // The file is locked before the row is written, so a row without a file is dead.
        let lock = match OpenOptions::new().write(true).open(&path) {
            Ok(file) => match try_lock(file, &path)? {
                Some(lock) => Some(lock),
                None => return Ok(None),
            },
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) => return Err(Error::io("open session file", path, e)),
        };
        Ok(Some(DeadSession { id, directory: Some(directory.to_owned()), _lock: lock }))
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Removes the session's file, after its row.
    pub(crate) fn remove(self) -> Result<()> {
        self.directory.map_or(Ok(()), |directory| remove_file(&directory, self.id))
    }
}

/// Removes the row of a dead session, durably: if its process was only paused and resumes, none of its commits
/// can reference a new object any more. The transaction fails with the error of `check`.
pub(crate) fn end_dead(
    meta: &Metadata,
    id: u64,
    check: impl Fn(&mut dyn ReadTxn) -> Result<()>,
) -> Result<()> {
    let may_run = meta.has_leases()?;
    meta.transact_making_room(Durability::Durable, |txn| {
        check(txn.as_read())?;
        if !may_run {
            deletion_record::forget(txn, id)?;
        }
        // Listed as in cleanup until the rest is gone, so that a crash here loses nothing.
        txn.put(&keys::session_in_cleanup(id), &[])?;
        remove_row(txn, id)
    })
}

/// Ends the session of another process if that is dead, which frees its locks; a collection cleans up the
/// rest. Returns whether it was dead.
pub(crate) fn end_if_dead(meta: &Metadata, directory: &Path, id: u64) -> Result<bool> {
    let dead = DeadSession::claim(meta, directory, id)?;
    if dead.is_some() {
        end_dead(meta, id, |_| Ok(()))?;
    }
    Ok(dead.is_some())
}

/// The row of this process's session.
pub(crate) fn row() -> Vec<u8> {
    let (seconds, nanos) = Timestamp::now().parts();
    Encoder::default().u32(std::process::id()).i64(seconds).u32(nanos).finish()
}

fn write_row(meta: &Metadata, id: u64) -> Result<()> {
    let row = row();
    // A process that frees space must first register a session.
    meta.transact_making_room(Durability::Durable, |txn| {
        let mut all = roster(txn.as_read())?;
        all.retain(|other| *other != id);
        all.push(id);
        put_roster(txn, &all)?;
        txn.put(&keys::session(id), &row)
    })
}

/// Removes a session's row and its other records.
pub(crate) fn remove_row(txn: &mut dyn WriteTxn, id: u64) -> Result<()> {
    let mut all = roster(txn.as_read())?;
    all.retain(|other| *other != id);
    put_roster(txn, &all)?;
    txn.delete(&keys::answered(id))?;
    txn.delete(&keys::hold(id))?;
    let completed = keys::all_completed(id);
    for (key, _) in txn.scan(&completed, &keys::after_prefix(&completed), Order::Ascending, usize::MAX)? {
        txn.delete(&key)?;
    }
    txn.delete(&keys::session(id))
}

/// The sessions that have a row, oldest first. If the roster is damaged, they are in numeric order.
pub(crate) fn roster(txn: &mut dyn ReadTxn) -> Result<Vec<u64>> {
    let value = txn.get(keys::ROSTER)?.unwrap_or_default();
    if let (numbers, []) = value.as_chunks() {
        return Ok(numbers.iter().map(|number| u64::from_be_bytes(*number)).collect());
    }
    tracing::warn!("the roster of sessions is damaged; it is made anew from their rows");
    let prefix = keys::sessions();
    let rows = txn.scan(&prefix, &keys::after_prefix(&prefix), Order::Ascending, usize::MAX)?;
    Ok(rows.iter().filter_map(|(key, _)| keys::number(&key[prefix.len()..])).collect())
}

fn put_roster(txn: &mut dyn WriteTxn, all: &[u64]) -> Result<()> {
    let value = all.iter().fold(Encoder::default(), |to, id| to.u64(*id)).finish();
    txn.put(keys::ROSTER, &value)
}

/// Whether no session but `id` has the metadata open. The transaction conflicts with any process that
/// registers.
pub(crate) fn is_alone(txn: &mut dyn ReadTxn, id: u64) -> Result<bool> {
    Ok(txn.get(keys::ROSTER)?.is_none_or(|value| value == id.to_be_bytes()))
}

/// Sessions that have a file, by number.
pub(crate) fn files(directory: &Path) -> Result<Vec<u64>> {
    let fail = |e| Error::io("list session files", directory, e);
    let mut ids = Vec::new();
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        // Sessions with leases have no files.
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(ids),
        Err(e) => return Err(fail(e)),
    };
    for entry in entries {
        let name = entry.map_err(fail)?.file_name();
        ids.extend(name.to_str().and_then(|name| u64::from_str_radix(name, 16).ok()));
    }
    Ok(ids)
}

/// A number for a session with a lease: it fits a signed integer on the server.
pub(crate) fn leased_id() -> Result<u64> {
    Ok((random_id()? >> 1).max(1))
}

fn file_of(directory: &Path, id: u64) -> PathBuf {
    directory.join(format!("{id:016x}"))
}

fn remove_file(directory: &Path, id: u64) -> Result<()> {
    let path = file_of(directory, id);
    match fs::remove_file(&path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io("remove session file", path, e)),
        _ => Ok(()),
    }
}

/// Locks a session file. `None` when another process holds it, or has just removed it: a lock on a file
/// without a name protects nothing.
fn try_lock(file: File, path: &Path) -> Result<Option<Flock<File>>> {
    let fail = |e| Error::io("look at session file", path, e);
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => {
            let locked = lock.metadata().map_err(fail)?;
            match fs::metadata(path) {
                Ok(named) if (named.dev(), named.ino()) == (locked.dev(), locked.ino()) => Ok(Some(lock)),
                Err(e) if e.kind() != io::ErrorKind::NotFound => Err(fail(e)),
                _ => Ok(None),
            }
        }
        Err((_, Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, errno)) => Err(Error::io("lock session file", path, errno.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_without_a_name_is_no_lock() {
        let dir = tempfile::tempdir().unwrap();
        let path = file_of(dir.path(), 7);
        let create = || OpenOptions::new().write(true).create_new(true).open(&path).unwrap();
        // Another process finds the file before its owner has locked it, and removes it.
        let early = create();
        DeadSession::claim_file(dir.path(), 7).unwrap().unwrap().remove().unwrap();
        assert!(try_lock(early, &path).unwrap().is_none());
        let held = try_lock(create(), &path).unwrap();
        assert!(held.is_some() && DeadSession::claim_file(dir.path(), 7).unwrap().is_none());
        drop(held);
        assert!(DeadSession::claim_file(dir.path(), 7).unwrap().is_some());
        assert_eq!(files(dir.path()).unwrap(), [7]);
    }
}
