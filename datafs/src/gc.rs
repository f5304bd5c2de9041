//! The garbage collector: frees what nothing references any more. It may be stopped anywhere, and may run in
//! several processes at once. The elected process (`upkeep.rs`) collects in bounded slices; [`Datafs::gc`] collects all
//! at once.
//!
//! Four kinds of garbage, each recorded in the metadata by the transaction that made it garbage:
//!  - objects whose last extent is gone: on the garbage list, deleted after a grace period;
//!  - snapshots and volumes in deletion: freed in batches, with what programs derived from them;
//!  - inodes without a name that no session has open any more, or that were too large to free at once;
//!  - dead sessions: their objects that no extent references (`sweep.rs`).
//!
//! [`Datafs::gc`]: crate::Datafs::gc

use std::collections::BTreeSet;
use std::time::Duration;

use crate::error::Result;
use crate::failpoint;
use crate::fs::View;
use crate::fs::shared::Shared;
use crate::garbage::Deleted;
use crate::meta::codec::Decoder;
use crate::meta::engine::{Durability, Order};
use crate::meta::metadata::PAGE;
use crate::meta::references::forget_version;
use crate::meta::snapshot::SnapshotRow;
use crate::meta::versioned::{VolumeRow, record_of};
use crate::meta::{derived, keys, snapshot};
use crate::session::{self, DeadSession};
use crate::slice::Slice;

/// Records that one transaction reads or removes.
const BATCH: usize = 1_000;

/// What a collection has removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct GcReport {
    /// Objects deleted from the store.
    pub objects: u64,
    /// Objects that stay until a running backup or restore has ended.
    pub held: u64,
    /// Snapshots whose deletion was completed.
    pub snapshots: u64,
    /// Volumes whose deletion was completed.
    pub volumes: u64,
    /// Unlinked inodes that were freed.
    pub inodes: u64,
    /// Dead sessions that were cleaned up.
    pub sessions: u64,
}

impl View {
    /// Deletes the objects of removed and replaced files whose grace period is over, in all volumes. This
    /// part of [`Datafs::gc`] frees space soon after a large file was replaced. Returns their number.
    ///
    /// [`Datafs::gc`]: crate::Datafs::gc
    pub fn collect_objects(&self) -> Result<u64> {
        let mut deleted = Deleted::default();
        let grace = self.shared.garbage_grace();
        self.shared.garbage().delete_older(grace, &mut Slice::unbounded(), &mut None, &mut deleted)?;
        Ok(deleted.objects)
    }
}

/// Where the list of garbage and that of snapshots go on, in slices.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    pub(crate) garbage: Option<Vec<u8>>,
    pub(crate) snapshots: Option<Vec<u8>>,
}

impl Shared {
    pub(crate) fn garbage_grace(&self) -> Duration {
        Duration::from_millis(self.config.garbage_grace_ms)
    }

    /// A whole collection, at once.
    pub(crate) fn collect(&self) -> Result<GcReport> {
        let mut report = GcReport::default();
        let slice = &mut Slice::unbounded();
        self.meta.restore_reserve();
        self.answer_round()?;
        let (living, ended) = self.end_dead_sessions(slice, &mut report)?;
        let cleaned = self.clean_up_all(slice, &living);
        report.objects += slice.done.deleted;
        self.collect_deletions(slice, &mut None, &mut report)?;
        self.collect_derived()?;
        report.inodes += self.tend_orphans()?;
        let mut deleted = Deleted::default();
        self.garbage().delete_older(self.garbage_grace(), slice, &mut None, &mut deleted)?;
        report.objects += deleted.objects;
        report.held += deleted.held;
        ended.and(cleaned).map(|()| report)
    }

    /// Removes the rows of dead sessions, which begins their cleanup. Returns the sessions that live, and the first
    /// error of a session that could not be ended. It keeps no other one from its end.
    pub(crate) fn end_dead_sessions(
        &self,
        slice: &mut Slice<'_>,
        report: &mut GcReport,
    ) -> Result<(BTreeSet<u64>, Result<()>)> {
        let own = self.session.id();
        let mut known = BTreeSet::new();
        self.meta.each(&keys::sessions(), |key, _| {
            known.insert(Decoder::new("session key", &key[1..]).u64()?);
            Ok(())
        })?;
        let others: Vec<u64> = known.iter().copied().filter(|id| *id != own).collect();
        let (mut living, mut result) = (known.clone(), Ok(()));
        for id in DeadSession::suspects(&self.meta, others)? {
            failpoint::hit("gc-session-suspected");
            let dead = match DeadSession::claim(&self.meta, &self.sessions_dir, id) {
                Ok(Some(dead)) => dead,
                Ok(None) => continue,
                Err(error) => {
                    result = result.and(Err(error));
                    continue;
                }
            };
            if !slice.transaction() {
                return Ok((living, result));
            }
            session::end_dead(&self.meta, dead.id(), |txn| slice.check(txn))?;
            failpoint::hit("gc-session-claimed");
            report.sessions += 1;
            living.remove(&dead.id());
            // Its row of the cleanup is durable, and says that it is dead.
            result = result.and(dead.remove());
        }
        for id in session::files(&self.sessions_dir)? {
            if known.contains(&id) || id == own {
                continue;
            }
            // A session that died before it wrote its row, or one that started after the rows were read.
            let removed =
                DeadSession::claim(&self.meta, &self.sessions_dir, id).and_then(|dead| match dead {
                    Some(dead) if self.meta.view(|txn| txn.get(&keys::session(id)))?.is_none() => {
                        dead.remove()
                    }
                    _ => Ok(()),
                });
            result = result.and(removed);
        }
        Ok((living, result))
    }

    /// Goes on with the deletion of volumes and snapshots. A bounded slice reads the snapshots after the key in `from`
    /// and sets it, to `None` at the end.
    pub(crate) fn collect_deletions(
        &self,
        slice: &mut Slice<'_>,
        from: &mut Option<Vec<u8>>,
        report: &mut GcReport,
    ) -> Result<()> {
        let mut gone = BTreeSet::new();
        self.meta.each(&keys::volumes(), |key, value| {
            let id = Decoder::new("volume key", &key[1..]).u64()?;
            match VolumeRow::decode(value) {
                Ok(row) if row.deleting => drop(gone.insert(id)),
                Ok(_) => {}
                // A damaged row must not block the other volumes.
                Err(error) => tracing::warn!(volume = id, %error, "a volume is left as it is; see fsck"),
            }
            Ok(())
        })?;
        for id in &gone {
            if !self.delete_volume(*id, slice)? {
                return Ok(());
            }
            report.volumes += 1;
        }
        while slice.transaction() {
            let page = self.meta.page(&keys::all_snapshots(), from.as_deref())?;
            for (key, value) in &page {
                let mut numbers = Decoder::new("snapshot key", &key[1..]);
                let (volume, number) = (numbers.u64()?, numbers.u64()?);
                let row = SnapshotRow::decode(value);
                if gone.contains(&volume) || !row.is_ok_and(|row| row.deleting) {
                    continue;
                }
                if !self.delete_snapshot((volume, number), slice)? {
                    return Ok(());
                }
                report.snapshots += 1;
            }
            *from = page.into_iter().nth(PAGE - 1).map(|(key, _)| key);
            if from.is_none() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Frees what only this snapshot holds. Returns false when the slice is used up.
    fn delete_snapshot(&self, (volume, number): (u64, u64), slice: &mut Slice<'_>) -> Result<bool> {
        while slice.transaction() {
            self.collector.go_on(&self.home)?;
            let done = self.meta.transact_making_room(Durability::Relaxed, |txn| {
                slice.check(txn.as_read())?;
                snapshot::free_batch(txn, volume, number)
            })?;
            if done {
                failpoint::hit("gc-snapshot-freed");
                return Ok(true);
            }
            failpoint::hit("gc-snapshot-batch");
        }
        Ok(false)
    }

    /// Removes derived data of snapshots and volumes that are gone: programs before this table leave it behind.
    fn collect_derived(&self) -> Result<()> {
        let mut volumes = Vec::new();
        self.meta.each(&keys::derived_lists(), |key, _| {
            volumes.extend(key.get(2..).and_then(keys::number));
            Ok(())
        })?;
        for volume in volumes {
            if self.meta.view(|txn| derived::outdated(txn, volume))?.is_empty() {
                continue;
            }
            self.meta.transact_making_room(Durability::Relaxed, |txn| {
                let outdated = derived::outdated(txn.as_read(), volume)?;
                outdated.iter().try_for_each(|snapshot| derived::forget_snapshot(txn, volume, *snapshot))
            })?;
        }
        Ok(())
    }

    /// Removes the records of a volume. Returns false when the slice is used up.
    fn delete_volume(&self, id: u64, slice: &mut Slice<'_>) -> Result<bool> {
        for (prefix, versioned) in [
            (keys::live(id, &[]), true),
            (keys::history(id, &[]), true),
            (keys::dead_lists(id), false),
            (keys::orphans(id), false),
            (keys::locks(id), false),
            (keys::snapshot_names(id), false),
            (keys::snapshots(id), false),
            (keys::next_ino(id), false),
        ] {
            let end = keys::after_prefix(&prefix);
            let history = prefix == keys::history(id, &[]);
            loop {
                if !slice.transaction() {
                    return Ok(false);
                }
                self.collector.go_on(&self.home)?;
                let done = self.meta.transact_making_room(Durability::Relaxed, |txn| {
                    slice.check(txn.as_read())?;
                    let page = txn.scan(&prefix, &end, Order::Ascending, BATCH)?;
                    for (key, value) in &page {
                        if versioned {
                            let record = if history { record_of(key) } else { &key[9..] };
                            forget_version(txn, record, value)?;
                        }
                        txn.delete(key)?;
                    }
                    Ok(page.len() < BATCH)
                })?;
                if done {
                    break;
                }
            }
            failpoint::hit("gc-volume-part");
        }
        self.meta.transact_making_room(Durability::Relaxed, |txn| {
            slice.check(txn.as_read())?;
            derived::forget_volume(txn, id)?;
            txn.delete(&keys::volume(id))
        })?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests;
