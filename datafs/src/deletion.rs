//! Deletions of objects from the store: the transaction that decides on them, and its record.
//!
//! A store has no fence: a process that is suspended before a deletion carries it out when it resumes, whatever has
//! happened meanwhile. Only a restore gives an object without references new ones, so only a restore can be harmed.
//!
//! One transaction decides ([`GarbageList::decide`]). It checks that
//!  - the session of this process has its row, and its turn at the background work is valid, if it has one;
//!  - no backup or restore holds the objects;
//!  - each object has no reference, and is listed as garbage or left by a session without a row.
//!
//! It also writes a *deletion record*: the objects, under the session and a number. The decision is durable before the
//! first deletion. It is good for [`DECIDED_MAX`]: then the process decides anew. The process removes the record once
//! the store has answered, and so does its end.
//!
//! A restore first takes its hold, so that no transaction decides later. Then it reads the records. It needs no object
//! of a record whose process may still run, or it fails ([`Pending`](crate::deletion_record::Pending)). Where file locks show that a process has ended,
//! the record goes with the session. A lapsed lease does not prove it. Such a record stays until the process resumes
//! and removes it, or until a lock file in its home proves its end (`deletion_lock.rs`). A restore that takes the store
//! over ignores it.
//!
//! A request to a bucket may arrive after its process gave it up or ended. Then the record stays as a *late record* until
//! the request cannot arrive any more (`deletion_record.rs`).

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::collector::Collector;
use crate::data::ObjectPool;
use crate::deletion_lock;
use crate::deletion_record;
use crate::error::{Error, Result};
use crate::failpoint;
use crate::meta::engine::{Durability, Order, ReadTxn};
use crate::meta::keys;
use crate::meta::metadata::Metadata;
use crate::object::ObjectId;
use crate::slice::Slice;

/// Objects that are deleted at a time: a remote store takes several requests at once.
const DELETED_TOGETHER: usize = 64;
/// Objects that one transaction decides on: their record has 16 bytes for each.
const DECIDED_TOGETHER: usize = 1_000;
/// Longest time between a decision and a deletion: a process that was stopped meanwhile decides anew.
const DECIDED_MAX: Duration = Duration::from_secs(10);

/// The garbage list of an open datafs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GarbageList<'a> {
    pub(crate) meta: &'a Metadata,
    pub(crate) pool: &'a ObjectPool,
    pub(crate) collector: &'a Collector,
    pub(crate) home: &'a Path,
    /// The session of this process.
    pub(crate) session: u64,
}

/// Why no extent needs the objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unneeded {
    /// They are on the garbage list, and leave it with the deletion.
    Garbage,
    /// Sessions without a row have left them unpublished.
    Left,
}

/// The outcome of deletions.
#[derive(Debug, Default)]
pub(crate) struct Deletions {
    /// Objects deleted from the store.
    pub(crate) objects: usize,
    /// A running backup or restore needs the others.
    pub(crate) is_held: bool,
    /// Others are left for a later call.
    pub(crate) is_cut: bool,
    /// Those that the store did not delete. They keep no other object from its deletion.
    pub(crate) failed: Option<Failure>,
}

/// Objects that the store did not delete.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) objects: Vec<ObjectId>,
    /// The first error.
    pub(crate) error: Error,
}

impl Deletions {
    /// How many objects the store did not delete.
    pub(crate) fn refused(&self) -> usize {
        self.failed.as_ref().map_or(0, |failure| failure.objects.len())
    }

    fn add(&mut self, tried: Tried) {
        self.objects += tried.deleted.len();
        match (&mut self.failed, tried.failed) {
            (Some(before), Some(failure)) => before.objects.extend(failure.objects),
            (before, failure) => *before = before.take().or(failure),
        }
    }
}

/// A decision that is durable.
struct Decided {
    record: Vec<u8>,
    objects: Vec<ObjectId>,
    /// When the transaction read the state that it rests on.
    at: Duration,
}

/// What became of the first `count` objects of a decision.
#[derive(Debug, Default)]
struct Tried {
    count: usize,
    deleted: Vec<ObjectId>,
    failed: Option<Failure>,
    /// A request had no answer, so that it may reach the store later.
    may_be_late: bool,
}

/// Numbers of the deletion records of this process.
static NUMBER: AtomicU64 = AtomicU64::new(0);

impl GarbageList<'_> {
    /// Deletes those of the objects that nothing needs, in order, until a backup or restore holds them. One that the
    /// store does not delete is left, and told.
    pub(crate) fn delete_unneeded(
        self,
        objects: &[ObjectId],
        why: Unneeded,
        slice: &Slice<'_>,
    ) -> Result<Deletions> {
        let mut done = Deletions::default();
        for some in objects.chunks(DECIDED_TOGETHER) {
            let mut rest = some.to_vec();
            while !rest.is_empty() {
                let Some(decided) = self.decide(&rest, why, slice)? else {
                    return Ok(Deletions { is_held: true, ..done });
                };
                let (tried, result) = self.carry_out(&decided);
                self.finish(&decided, &tried, why, slice)?;
                let count = tried.count;
                done.add(tried);
                result?;
                rest = decided.objects[count..].to_vec();
                if count == 0 && !rest.is_empty() {
                    // The metadata needs longer than a decision is good for.
                    return Ok(Deletions { is_cut: true, ..done });
                }
            }
        }
        Ok(done)
    }

    /// Decides on the deletion of those of the objects that nothing needs; `None` while a backup or restore holds them.
    fn decide(self, objects: &[ObjectId], why: Unneeded, slice: &Slice<'_>) -> Result<Option<Decided>> {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let number = if self.pool.is_local() { number } else { number | deletion_record::OF_BUCKET };
        let record = keys::deletion(self.session, number);
        self.collector.show_end(|| deletion_lock::take(self.meta, self.home, self.session));
        let wanted: Vec<_> = objects
            .iter()
            .flat_map(|id| [keys::references(*id), keys::garbage(*id), keys::session(id.session())])
            .collect();
        let decided = self.meta.transact_making_room(Durability::Relaxed, |txn| {
            let at = now();
            self.check_turn(txn.as_read(), slice)?;
            let holds = keys::holds();
            if !txn.scan(&holds, &keys::after_prefix(&holds), Order::Ascending, 1)?.is_empty() {
                return Ok(None);
            }
            txn.prefetch(&wanted)?;
            let mut chosen = Vec::new();
            for object in objects {
                let is_referenced = txn.get(&keys::references(*object))?.is_some();
                let is_listed = txn.get(&keys::garbage(*object))?.is_some();
                let is_unneeded = !is_referenced
                    && match why {
                        Unneeded::Garbage => is_listed,
                        Unneeded::Left => !is_listed && txn.get(&keys::session(object.session()))?.is_none(),
                    };
                chosen.extend(is_unneeded.then_some(*object));
            }
            if !chosen.is_empty() {
                txn.put(&record, &deletion_record::encode(&chosen))?;
            }
            Ok(Some((chosen, at)))
        })?;
        let Some((objects, at)) = decided else { return Ok(None) };
        if !objects.is_empty() {
            failpoint::hit("gc-deletion-decided");
            // The commits that released the objects may be relaxed too: a power failure must bring back neither a
            // reference to an object that is deleted now, nor a state without the record.
            self.meta.sync()?;
            failpoint::hit("gc-deletion-durable");
        }
        Ok(Some(Decided { record, objects, at }))
    }

    /// Deletes the objects of a decision while it is good. The error is one that the next objects would meet too: the
    /// store is away, or this process ends.
    fn carry_out(self, decided: &Decided) -> (Tried, Result<()>) {
        let mut tried = Tried::default();
        for few in decided.objects.chunks(if self.pool.is_local() { 1 } else { DELETED_TOGETHER }) {
            if let Err(error) = self.collector.go_on(self.home) {
                return (tried, Err(error));
            }
            if now().saturating_sub(decided.at) > DECIDED_MAX {
                break;
            }
            failpoint::hit("gc-object-chosen");
            let removal = self.pool.delete_all(few);
            let left: Vec<ObjectId> = few.iter().copied().filter(|id| !removal.gone.contains(id)).collect();
            tried.deleted.extend(removal.gone);
            tried.may_be_late |= removal.may_be_late;
            if let Err(error) = removal.result.map_err(Error::from) {
                if error.is_retryable() {
                    return (tried, Err(error));
                }
                match &mut tried.failed {
                    Some(failure) => failure.objects.extend(left),
                    None => tried.failed = Some(Failure { objects: left, error }),
                }
            }
            tried.count += few.len();
            failpoint::hit("gc-object-deleted");
        }
        (tried, Ok(()))
    }

    /// Removes the record of a decision. The objects that were deleted leave the garbage list, unless this process has
    /// lost its session or its turn.
    fn finish(self, decided: &Decided, tried: &Tried, why: Unneeded, slice: &Slice<'_>) -> Result<()> {
        if decided.objects.is_empty() {
            return Ok(());
        }
        let checked = self.meta.transact_making_room(Durability::Relaxed, |txn| {
            txn.delete(&decided.record)?;
            if tried.may_be_late {
                deletion_record::keep_late(txn, &deletion_record::encode(&decided.objects))?;
            }
            match self.check_turn(txn.as_read(), slice) {
                Err(lost @ Error::Stale { .. }) => return Ok(Err(lost)),
                checked => checked?,
            }
            if why == Unneeded::Garbage {
                tried.deleted.iter().try_for_each(|object| txn.delete(&keys::garbage(*object)))?;
            }
            Ok(Ok(()))
        })?;
        failpoint::hit("gc-garbage-forgotten");
        checked
    }

    /// Fails with [`Error::Stale`] once the session of this process has no row, or another process has its turn.
    fn check_turn(self, txn: &mut dyn ReadTxn, slice: &Slice<'_>) -> Result<()> {
        slice.check(txn)?;
        match txn.get(&keys::session(self.session))? {
            Some(_) => Ok(()),
            None => Err(Error::Stale { what: "the session of this process, which deletes objects,".into() }),
        }
    }
}

/// Time since the machine started.
fn now() -> Duration {
    #[cfg(test)]
    let slept = SLEPT.get();
    #[cfg(not(test))]
    let slept = Duration::ZERO;
    millrace_leaf::lease::boot_time() + slept
}

#[cfg(test)]
thread_local! {
    /// Time for which tests of this thread pretend that it was suspended.
    pub(crate) static SLEPT: std::cell::Cell<Duration> = const { std::cell::Cell::new(Duration::ZERO) };
}

#[cfg(test)]
pub(crate) mod tests;
