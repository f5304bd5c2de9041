//! The garbage collector: frees what nothing references any more. It may be stopped anywhere, and may run in
//! several processes at once.
//!
//! Four kinds of garbage, each recorded in the metadata by the transaction that made it garbage:
//!  - objects whose last extent is gone: on the garbage list, deleted after a grace period;
//!  - snapshots and volumes in deletion: freed in batches;
//!  - inodes without a name that no session has open any more, or that were too large to free at once;
//!  - dead sessions: their objects that no extent references.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::collector::Collector;
use crate::compact::PackSurvey;
use crate::error::{Error, Result};
use crate::failpoint;
use crate::fs::shared::Shared;
use crate::fs::{View, lock};
use crate::garbage::Deleted;
use crate::meta::codec::Decoder;
use crate::meta::engine::{Durability, Order, WriteTxn};
use crate::meta::references::forget_version;
use crate::meta::versioned::{VolumeRow, record_of};
use crate::meta::{keys, snapshot};
use crate::session::{self, DeadSession};

/// Records that one transaction reads or removes.
const BATCH: usize = 1_000;
/// How often a process answers the orphan rounds of other sessions, and checks the answers to its rounds.
const ANSWER_EVERY: Duration = Duration::from_secs(1);
/// Age at which unfinished files are removed when their session is neither known to live nor known to be
/// dead.
const ABANDONED_AGE: Duration = Duration::from_secs(24 * 3600);

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
        self.shared.garbage().delete_older(self.shared.garbage_grace(), &mut deleted)?;
        Ok(deleted.objects)
    }
}

/// Starts the thread of the background collection, unless the configuration turns it off. It ends with the
/// datafs.
pub(crate) fn start(shared: &Arc<Shared>) -> Result<()> {
    if shared.config.gc_interval_ms == 0 {
        return Ok(());
    }
    let interval = Duration::from_millis(shared.config.gc_interval_ms);
    let collector = Arc::clone(&shared.collector);
    let weak = Arc::downgrade(shared);
    std::thread::Builder::new()
        .name("datafs-gc".into())
        .spawn(move || run(&collector, &weak, interval))
        .map(drop)
        .map_err(|e| Error::io("start the collection thread of", &shared.sessions_dir, e))
}

fn run(collector: &Collector, shared: &Weak<Shared>, interval: Duration) {
    let mut collected: Option<Instant> = None;
    let mut survey = PackSurvey::default();
    while let Some(busy) = collector.next(interval.min(ANSWER_EVERY)) {
        let Some(shared) = shared.upgrade() else { return };
        if busy.wanted || collected.is_none_or(|before| before.elapsed() >= interval) {
            collect_and_compact(&shared, &mut survey);
            collected = Some(Instant::now());
            continue;
        }
        let tended = shared.answer_round().and_then(|()| match shared.orphans.are_waiting() {
            true => shared.tend_orphans(),
            false => Ok(0),
        });
        if let Err(error) = tended {
            tracing::warn!(%error, "looking after unlinked files; it is tried again later");
        }
    }
}

fn collect_and_compact(shared: &Arc<Shared>, survey: &mut PackSurvey) {
    match shared.collect() {
        Ok(report) if report != GcReport::default() => tracing::debug!(?report, "collected garbage"),
        Ok(_) => {}
        Err(_) if shared.collector.is_stopped() => return,
        Err(error) => tracing::warn!(%error, "collecting garbage; it is tried again later"),
    }
    if let Err(error) = shared.compact_noted(survey) {
        tracing::warn!(%error, "compacting; it is tried again later");
    }
}

impl Shared {
    fn garbage_grace(&self) -> Duration {
        Duration::from_millis(self.config.garbage_grace_ms)
    }

    pub(crate) fn collect(&self) -> Result<GcReport> {
        let mut report = GcReport::default();
        self.meta.restore_reserve();
        self.answer_round()?;
        self.collect_sessions(&mut report)?;
        self.collect_deletions(&mut report)?;
        report.inodes += self.tend_orphans()?;
        let mut deleted = Deleted::default();
        self.garbage().delete_older(self.garbage_grace(), &mut deleted)?;
        report.objects += deleted.objects;
        report.held += deleted.held;
        Ok(report)
    }

    fn collect_sessions(&self, report: &mut GcReport) -> Result<()> {
        let mut known = Vec::new();
        self.meta.each(&keys::sessions(), |key, _| {
            known.push(Decoder::new("session key", &key[1..]).u64()?);
            Ok(())
        })?;
        let mut living = BTreeSet::from([self.session.id()]);
        let mut ended = Vec::new();
        for id in known.iter().copied().filter(|id| *id != self.session.id()) {
            if let Some(dead) = DeadSession::claim(&self.meta, &self.sessions_dir, id)? {
                self.clean_up_after(id, report)?;
                failpoint::hit("gc-session-cleaned");
                report.sessions += 1;
                ended.push(dead);
            } else {
                living.insert(id);
            }
        }
        for id in session::files(&self.sessions_dir)? {
            if known.contains(&id) || id == self.session.id() {
                continue;
            }
            // A session that died before it wrote its row, or one that started after the rows were read.
            if let Some(dead) = DeadSession::claim(&self.meta, &self.sessions_dir, id)?
                && self.meta.view(|txn| txn.get(&keys::session(id)))?.is_none()
            {
                ended.push(dead);
            }
        }
        if !ended.is_empty() {
            let gone: BTreeSet<u64> =
                ended.iter().filter(|dead| dead.is_gone()).map(DeadSession::id).collect();
            self.pool.remove_abandoned(&|session| match session {
                _ if gone.contains(&session) => Some(Duration::ZERO),
                _ if living.contains(&session) => None,
                _ => Some(ABANDONED_AGE),
            })?;
            failpoint::hit("gc-abandoned-removed");
        }
        // The session files are removed last: after a crash before this, the next collection finds them.
        ended.into_iter().try_for_each(DeadSession::remove)
    }

    /// Removes the remains of a dead session, its row first.
    fn clean_up_after(&self, id: u64, report: &mut GcReport) -> Result<()> {
        session::end_dead(&self.meta, id)?;
        failpoint::hit("gc-session-claimed");
        self.clean_up_rest(id, report)
    }

    /// Removes the locks and objects of a session whose row is gone.
    fn clean_up_rest(&self, id: u64, report: &mut GcReport) -> Result<()> {
        self.clean_up_locks(id)?;
        self.clean_up_objects(id, report)
    }

    /// Removes the locks of an ended session. They block no other session, but their records take space.
    fn clean_up_locks(&self, id: u64) -> Result<()> {
        let mut last: Option<Vec<u8>> = None;
        loop {
            let page = |txn: &mut dyn WriteTxn| lock::forget_session(txn, id, last.as_deref(), BATCH);
            self.collector.go_on(&self.home)?;
            last = self.meta.transact_making_room(Durability::Relaxed, page)?;
            if last.is_none() {
                return Ok(());
            }
        }
    }

    fn clean_up_objects(&self, id: u64, report: &mut GcReport) -> Result<()> {
        for object in self.pool.list_session(id)? {
            let known = self.meta.view(|txn| {
                Ok(txn.get(&keys::references(object))?.is_some()
                    || txn.get(&keys::garbage(object))?.is_some())
            })?;
            // A restore may be about to reference it. The session stays in cleanup.
            if !known && self.garbage().is_held()? {
                return Ok(());
            }
            if !known {
                self.collector.go_on(&self.home)?;
                self.pool.delete(object)?;
                failpoint::hit("gc-session-object-deleted");
                report.objects += 1;
            }
        }
        self.meta.transact_making_room(Durability::Relaxed, |txn| txn.delete(&keys::session_in_cleanup(id)))
    }

    fn collect_deletions(&self, report: &mut GcReport) -> Result<()> {
        let mut cleanups = Vec::new();
        self.meta.each(&keys::sessions_in_cleanup(), |key, _| {
            cleanups.push(Decoder::new("session key", &key[1..]).u64()?);
            Ok(())
        })?;
        for id in cleanups {
            self.clean_up_rest(id, report)?;
        }
        let mut volumes = Vec::new();
        self.meta.each(&keys::volumes(), |key, value| {
            let id = Decoder::new("volume key", &key[1..]).u64()?;
            match VolumeRow::decode(value) {
                Ok(row) => volumes.push((id, row.deleting)),
                // A damaged row must not block the other volumes.
                Err(error) => tracing::warn!(volume = id, %error, "a volume is left as it is; see fsck"),
            }
            Ok(())
        })?;
        for (id, deleting) in volumes {
            if deleting {
                self.delete_volume(id)?;
                report.volumes += 1;
                continue;
            }
            for number in self.meta.view(|txn| snapshot::deleting(txn, id))? {
                let free = || {
                    self.meta.transact_making_room(Durability::Relaxed, |txn| {
                        snapshot::free_batch(txn, id, number)
                    })
                };
                while !free()? {
                    failpoint::hit("gc-snapshot-batch");
                    self.collector.go_on(&self.home)?;
                }
                failpoint::hit("gc-snapshot-freed");
                report.snapshots += 1;
            }
        }
        Ok(())
    }

    fn delete_volume(&self, id: u64) -> Result<()> {
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
            let batch = || {
                self.meta.transact_making_room(Durability::Relaxed, |txn| {
                    let page = txn.scan(&prefix, &end, Order::Ascending, BATCH)?;
                    for (key, value) in &page {
                        if versioned {
                            let record = if history { record_of(key) } else { &key[9..] };
                            forget_version(txn, record, value)?;
                        }
                        txn.delete(key)?;
                    }
                    Ok(page.len() < BATCH)
                })
            };
            while !batch()? {
                self.collector.go_on(&self.home)?;
            }
            failpoint::hit("gc-volume-part");
        }
        self.meta.transact_making_room(Durability::Relaxed, |txn| txn.delete(&keys::volume(id)))
    }
}

#[cfg(test)]
mod tests;
