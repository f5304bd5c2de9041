//! The garbage collector: frees what nothing references any more. It may be stopped anywhere, and may run in
//! several processes at once.
//!
//! Four kinds of garbage, each recorded in the metadata by the transaction that made it garbage:
//!  - objects whose last extent is gone: on the garbage list, deleted after a grace period;
//!  - snapshots and volumes in deletion: freed in batches;
//!  - inodes without a name that no session has open any more, or that were too large to free at once;
//!  - dead sessions: their objects that no extent references.

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime};

use parking_lot::{Condvar, Mutex};

use crate::datafs::{Datafs, Shared};
use crate::error::{Error, Result};
use crate::failpoint;
use crate::fs::lock;
use crate::meta::codec::Decoder;
use crate::meta::engine::{Durability, Order, Pair, WriteTxn};
use crate::meta::inode::Timestamp;
use crate::meta::references::forget_version;
use crate::meta::versioned::{VolumeRow, record_of};
use crate::meta::{keys, snapshot};
use crate::object::ObjectId;
use crate::session::{self, DeadSession};
use crate::view::View;

/// Records that one transaction reads or removes.
const BATCH: usize = 1_000;
/// Longest wait for a running collection to stop.
const STOP_MAX: Duration = Duration::from_secs(5);
/// Shortest time between two full collections that a full disk requests.
const FULL_EVERY: Duration = Duration::from_secs(1);
/// How often a process answers the orphan rounds of other sessions, and checks the answers to its rounds.
const ANSWER_EVERY: Duration = Duration::from_secs(1);
/// Objects that are deleted at a time: a remote store takes several requests at once.
const DELETED_TOGETHER: usize = 64;
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

impl Datafs {
    /// Collects garbage now; returns when nothing more can be collected at this time. Runs beside all other
    /// operations; may be stopped (or killed) anywhere.
    pub fn gc(&self) -> Result<GcReport> {
        self.shared.collect()
    }
}

impl View {
    /// Deletes the objects of removed and replaced files whose grace period is over, in all volumes. This
    /// part of [`Datafs::gc`] frees space soon after a large file was replaced. Returns their number.
    pub fn collect_objects(&self) -> Result<u64> {
        let mut report = GcReport::default();
        let grace = Duration::from_millis(self.shared.config.garbage_grace_ms);
        self.shared.collect_objects(grace, &mut report)?;
        Ok(report.objects)
    }
}

/// The background collection of one open datafs.
#[derive(Debug, Default)]
pub(crate) struct Collector {
    signal: Arc<Signal>,
}

#[derive(Debug, Default)]
struct Signal {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    wanted: bool,
    stopped: bool,
    /// The thread holds the datafs open at this moment.
    busy: bool,
}

impl Default for State {
    /// The first collection starts at once: it cleans up after processes that died before.
    fn default() -> State {
        State { wanted: true, stopped: false, busy: false }
    }
}

impl Collector {
    /// Starts the thread, unless the configuration turns it off. It ends with the datafs.
    pub(crate) fn start(shared: &Arc<Shared>) -> Result<()> {
        if shared.config.gc_interval_ms == 0 {
            return Ok(());
        }
        let interval = Duration::from_millis(shared.config.gc_interval_ms);
        let signal = Arc::clone(&shared.collector.signal);
        let weak = Arc::downgrade(shared);
        std::thread::Builder::new()
            .name("datafs-gc".into())
            .spawn(move || run(&signal, &weak, interval))
            .map(drop)
            .map_err(|e| Error::io("start the collection thread of", &shared.sessions_dir, e))
    }

    /// Runs a collection soon.
    pub(crate) fn wake(&self) {
        self.signal.state.lock().wanted = true;
        self.signal.changed.notify_all();
    }

    /// Ends the thread. A running collection stops after its current transaction or deletion.
    pub(crate) fn stop(&self) {
        self.signal.state.lock().stopped = true;
        self.signal.changed.notify_all();
    }

    /// Waits after [`Collector::stop`], up to [`STOP_MAX`], until the thread does not hold the datafs open.
    /// Otherwise the process could end first and leave its session behind. That thread must not call this.
    pub(crate) fn wait_for_stop(&self) {
        let mut state = self.signal.state.lock();
        let until = Instant::now() + STOP_MAX;
        while state.busy && !self.signal.changed.wait_until(&mut state, until).timed_out() {}
    }

    fn is_stopped(&self) -> bool {
        self.signal.state.lock().stopped
    }
}

fn run(signal: &Signal, shared: &Weak<Shared>, interval: Duration) {
    let mut collected: Option<Instant> = None;
    loop {
        let wanted = {
            let mut state = signal.state.lock();
            if !state.wanted && !state.stopped {
                signal.changed.wait_for(&mut state, interval.min(ANSWER_EVERY));
            }
            if state.stopped {
                return;
            }
            state.busy = true;
            std::mem::take(&mut state.wanted)
        };
        let _idle = Idle(signal);
        let Some(shared) = shared.upgrade() else { return };
        if wanted || collected.is_none_or(|before| before.elapsed() >= interval) {
            collect_and_compact(&shared);
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

/// Reports on drop that the thread does not hold the datafs open any more. Create it before the reference
/// that does.
struct Idle<'a>(&'a Signal);

impl Drop for Idle<'_> {
    fn drop(&mut self) {
        self.0.state.lock().busy = false;
        self.0.changed.notify_all();
    }
}

fn collect_and_compact(shared: &Arc<Shared>) {
    match shared.collect() {
        Ok(report) if report != GcReport::default() => tracing::debug!(?report, "collected garbage"),
        Ok(_) => {}
        Err(_) if shared.collector.is_stopped() => return,
        Err(error) => tracing::warn!(%error, "collecting garbage; it is tried again later"),
    }
    if let Err(error) = shared.compact_noted() {
        tracing::warn!(%error, "compacting; it is tried again later");
    }
}

/// Garbage collections for operations that found no space.
#[derive(Debug, Default)]
pub(crate) struct RoomMaker {
    /// Locked during such a collection: when a full collection was last requested.
    running: Mutex<Option<Instant>>,
    /// Number of such collections that have deleted something.
    successes: AtomicU64,
}

impl Shared {
    /// Deletes garbage for an operation that found no space, without the grace period: readers in other
    /// processes look up again when an object is missing. Returns whether space was freed since the call.
    pub(crate) fn make_room(&self) -> bool {
        let before = self.room_maker.successes.load(Ordering::Acquire);
        let mut asked = self.room_maker.running.lock();
        if self.room_maker.successes.load(Ordering::Acquire) > before {
            return true;
        }
        let mut report = GcReport::default();
        if let Err(error) = self.collect_objects(Duration::ZERO, &mut report) {
            tracing::warn!(%error, "collecting garbage on a full disk");
        }
        // The background collection does what takes longer: snapshots and volumes in deletion, and the
        // remains of dead processes.
        if asked.is_none_or(|at| at.elapsed() >= FULL_EVERY) {
            *asked = Some(Instant::now());
            self.collector.wake();
        }
        if report.objects > 0 {
            self.room_maker.successes.fetch_add(1, Ordering::AcqRel);
        }
        report.objects > 0
    }

    pub(crate) fn collect(&self) -> Result<GcReport> {
        let mut report = GcReport::default();
        self.meta.restore_reserve();
        self.answer_round()?;
        self.collect_sessions(&mut report)?;
        self.collect_deletions(&mut report)?;
        report.inodes += self.tend_orphans()?;
        self.collect_objects(Duration::from_millis(self.config.garbage_grace_ms), &mut report)?;
        Ok(report)
    }

    /// Fails once the datafs is being closed: a collection may stop anywhere.
    fn go_on(&self) -> Result<()> {
        if !self.collector.is_stopped() {
            return Ok(());
        }
        let source = io::ErrorKind::Interrupted.into();
        Err(Error::io("collect garbage of", &self.home, source))
    }

    fn page(&self, prefix: &[u8], after: Option<&[u8]>) -> Result<Vec<Pair>> {
        let start = after.map_or_else(|| prefix.to_vec(), |key| [key, &[0]].concat());
        let end = keys::after_prefix(prefix);
        self.meta.view(|txn| txn.scan(&start, &end, Order::Ascending, BATCH))
    }

    /// All pairs under a prefix, page by page.
    pub(crate) fn each(
        &self,
        prefix: &[u8],
        mut visit: impl FnMut(&[u8], &[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut last: Option<Vec<u8>> = None;
        loop {
            let page = self.page(prefix, last.as_deref())?;
            for (key, value) in &page {
                visit(key, value)?;
            }
            match page.last() {
                Some((key, _)) if page.len() == BATCH => last = Some(key.clone()),
                _ => return Ok(()),
            }
        }
    }

    fn collect_sessions(&self, report: &mut GcReport) -> Result<()> {
        let mut known = Vec::new();
        self.each(&keys::sessions(), |key, _| {
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

    /// Removes the remains of a dead session. Deletes its row first, durably: if the process was only paused
    /// and resumes, none of its commits can reference a new object any more.
    fn clean_up_after(&self, id: u64, report: &mut GcReport) -> Result<()> {
        self.end_session(id)?;
        failpoint::hit("gc-session-claimed");
        self.clean_up_rest(id, report)
    }

    fn end_session(&self, id: u64) -> Result<()> {
        self.meta.transact_making_room(Durability::Durable, |txn| {
            // Listed as in cleanup until the rest is gone, so that a crash here loses nothing.
            txn.put(&keys::session_in_cleanup(id), &[])?;
            session::remove_row(txn, id)
        })
    }

    /// Ends the session of another process if that is dead, which frees its locks; a collection cleans up the
    /// rest. Returns whether it was dead.
    pub(crate) fn end_if_dead(&self, id: u64) -> Result<bool> {
        let dead = DeadSession::claim(&self.meta, &self.sessions_dir, id)?;
        if dead.is_some() {
            self.end_session(id)?;
            self.collector.wake();
        }
        Ok(dead.is_some())
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
            self.go_on()?;
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
            if !known && self.is_held()? {
                return Ok(());
            }
            if !known {
                self.go_on()?;
                self.pool.delete(object)?;
                failpoint::hit("gc-session-object-deleted");
                report.objects += 1;
            }
        }
        self.meta.transact_making_room(Durability::Relaxed, |txn| txn.delete(&keys::session_in_cleanup(id)))
    }

    fn collect_deletions(&self, report: &mut GcReport) -> Result<()> {
        let mut cleanups = Vec::new();
        self.each(&keys::sessions_in_cleanup(), |key, _| {
            cleanups.push(Decoder::new("session key", &key[1..]).u64()?);
            Ok(())
        })?;
        for id in cleanups {
            self.clean_up_rest(id, report)?;
        }
        let mut volumes = Vec::new();
        self.each(&keys::volumes(), |key, value| {
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
                    self.go_on()?;
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
                self.go_on()?;
            }
            failpoint::hit("gc-volume-part");
        }
        self.meta.transact_making_room(Durability::Relaxed, |txn| txn.delete(&keys::volume(id)))
    }

    fn collect_objects(&self, grace: Duration, report: &mut GcReport) -> Result<()> {
        let mut last: Option<Vec<u8>> = None;
        loop {
            let page = self.page(&keys::all_garbage(), last.as_deref())?;
            let mut due = Vec::new();
            for (key, value) in &page {
                let mut from = Decoder::new("garbage record", value);
                let freed = Timestamp::from_parts(from.i64()?, from.u32()?).to_system();
                if SystemTime::now().duration_since(freed).is_ok_and(|age| age >= grace) {
                    due.push(ObjectId::from_bytes(Decoder::new("garbage key", &key[1..]).array()?));
                }
            }
            // Checked after the page was read: objects that a hold protects became garbage after the hold.
            if !due.is_empty() && self.is_held()? {
                report.held += due.len() as u64;
            } else if !due.is_empty() {
                self.delete_objects(&due, report)?;
            }
            match page.into_iter().nth(BATCH - 1) {
                Some((key, _)) => last = Some(key),
                None => return Ok(()),
            }
        }
    }

    /// Whether a running backup or restore needs every object. The holds of dead processes go with their
    /// sessions.
    fn is_held(&self) -> Result<bool> {
        Ok(!self.page(&keys::holds(), None)?.is_empty())
    }

    fn delete_objects(&self, due: &[ObjectId], report: &mut GcReport) -> Result<()> {
        // The commits that released the objects may be relaxed: a power failure must not bring back a
        // reference to an object that is deleted now.
        self.meta.sync()?;
        for few in due.chunks(if self.pool.is_local() { 1 } else { DELETED_TOGETHER }) {
            self.go_on()?;
            self.pool.delete_all(few)?;
            failpoint::hit("gc-object-deleted");
        }
        self.meta.transact_making_room(Durability::Relaxed, |txn| {
            due.iter().try_for_each(|object| txn.delete(&keys::garbage(*object)))
        })?;
        failpoint::hit("gc-garbage-forgotten");
        report.objects += due.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
