//! The background thread of an open datafs.
//!
//! Each process looks after what only it can know: files that it has unlinked while they were open, files that it has
//! scattered, and questions of other sessions about unlinked files. The rest is done by one elected process for all
//! (`election.rs`), in slices of bounded work (`slice.rs`), one per interval. So the requests of
//! the elected process per interval depend neither on the number of processes nor on that of objects. The others hear
//! of its one commit. In order:
//!  1. sessions whose processes have died lose their rows;
//!  2. listed garbage whose grace is over is deleted;
//!  3. deletions of snapshots and volumes go on;
//!  4. unlinked files of dead keepers are freed;
//!  5. the sweep goes on (`sweep.rs`), and packs that it has found are compacted.
//!
//! One transaction at the end of a slice saves the position and renews the turn.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use millrace_leaf::error_chain;

use crate::collector::Collector;
use crate::election::{self, Candidate, Turn};
use crate::error::{Error, Result};
use crate::failpoint;
use crate::fs::shared::Shared;
use crate::garbage::Deleted;
use crate::gc::{GcReport, Marks};
use crate::meta::codec::Decoder;
use crate::meta::engine::Durability;
use crate::meta::metadata::Metadata;
use crate::metrics;
use crate::slice::{Done, Limits, Slice};
use crate::sweep::{Position, Progress, Sweep};

/// How often a process answers the orphan rounds of other sessions, and checks the answers to its rounds.
const ANSWER_EVERY: Duration = Duration::from_secs(1);
/// Shortest time between the beginnings of two passes over the store that no cleanup needs.
const PASS_EVERY: Duration = Duration::from_secs(600);

/// The background work of a home or schema.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct UpkeepReport {
    /// The process that is elected for it, by its number on its machine.
    pub pid: u32,
    /// Its turn: grows by one with each election.
    pub turn: u64,
    /// Passes over the store that have ended.
    pub passes: u64,
    /// How far the current pass has come, 0 to 1, by the names of objects.
    pub position: f64,
}

impl fmt::Display for UpkeepReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = (self.position * 100.0) as u8;
        write!(
            f,
            "process {}, turn {}, pass {}, {percent} %",
            self.pid,
            self.turn,
            self.passes.saturating_add(1)
        )
    }
}

/// The state of the background work; `None` while no process is elected.
pub(crate) fn report(meta: &Metadata) -> Result<Option<UpkeepReport>> {
    let found = meta.view(|txn| Ok((election::elected(txn)?, Position::get(txn)?)))?;
    let (Some((turn, row)), position) = found else { return Ok(None) };
    // A damaged row must not keep fsck from its work.
    let pid = Decoder::new("session", &row).u32().ok();
    Ok(pid.map(|pid| UpkeepReport { pid, turn, passes: position.passes, position: position.fraction() }))
}

/// Starts the thread, unless the configuration turns it off. It ends with the datafs.
pub(crate) fn start(shared: &Arc<Shared>) -> Result<()> {
    if shared.config.gc_interval_ms == 0 {
        return Ok(());
    }
    let interval = Duration::from_millis(shared.config.gc_interval_ms);
    let collector = Arc::clone(&shared.collector);
    let weak = Arc::downgrade(shared);
    let keeper = Keeper::new(shared, interval);
    std::thread::Builder::new()
        .name("datafs-gc".into())
        .spawn(move || run(&collector, &weak, keeper))
        .map(drop)
        .map_err(|e| Error::io("start the collection thread of", &shared.sessions_dir, e))
}

fn run(collector: &Collector, shared: &Weak<Shared>, mut keeper: Keeper) {
    let interval = keeper.interval;
    let mut last: Option<Instant> = None;
    while let Some(busy) = collector.next(interval.min(ANSWER_EVERY)) {
        let Some(shared) = shared.upgrade() else { return };
        let is_due = last.is_none_or(|before| before.elapsed() >= interval);
        if busy.urgent {
            told(&shared, "collecting garbage", shared.collect().map(drop));
        }
        if busy.wanted || is_due {
            told(&shared, "background work", keeper.tick(&shared, Limits::BACKGROUND).map(drop));
            told(&shared, "compacting", shared.compact_noted());
            last = Some(Instant::now());
        }
        let tended =
            shared.answer_recent_round().and_then(|()| match busy.wanted || shared.orphans.are_waiting() {
                true => shared.tend_orphans(),
                false => Ok(0),
            });
        told(&shared, "looking after unlinked files", tended.map(drop));
    }
}

/// Logs an error, unless it is the end of the datafs.
fn told(shared: &Shared, what: &str, result: Result<()>) {
    match result {
        Err(error) if !shared.collector.is_stopped() => {
            tracing::warn!(error = error_chain::one_line(&error), "{what}; it is tried again later");
        }
        _ => {}
    }
}

/// The part of a process in the background work of all.
#[derive(Debug)]
pub(crate) struct Keeper {
    interval: Duration,
    candidate: Candidate,
    turn: Option<Turn>,
    marks: Marks,
    sweep: Sweep,
    /// The position in the metadata.
    saved: Position,
    /// When the next pass over the store begins that no cleanup needs.
    next_pass: Option<Instant>,
}

impl Keeper {
    pub(crate) fn new(shared: &Shared, interval: Duration) -> Keeper {
        Keeper {
            interval,
            candidate: Candidate::new(shared.session.id(), interval),
            turn: None,
            marks: Marks::default(),
            sweep: Sweep::default(),
            saved: Position::default(),
            next_pass: None,
        }
    }

    /// Does a slice if this process is elected or can be. Returns what was done.
    pub(crate) fn tick(&mut self, shared: &Shared, limits: Limits) -> Result<Option<Done>> {
        if self.turn.is_none() {
            let directory = shared.config.meta_url.is_none().then_some(shared.sessions_dir.as_path());
            let Some(turn) = self.candidate.look(&shared.meta, directory)? else { return Ok(None) };
            tracing::debug!(fence = turn.fence(), "elected for the background work");
            self.sweep = Sweep { position: shared.meta.view(Position::get)?, ..Sweep::default() };
            (self.saved, self.marks) = (self.sweep.position.clone(), Marks::default());
            self.next_pass = None;
            self.turn = Some(turn);
        }
        let Some(turn) = self.turn.take() else { return Ok(None) };
        let mut slice = Slice::new(&turn, limits);
        let result = self.slice(shared, &mut slice);
        let done = slice.done;
        metrics::UPKEEP_SLICES.inc();
        metrics::UPKEEP_LISTED.inc_by(done.listed);
        metrics::UPKEEP_LISTS.inc_by(done.lists);
        metrics::UPKEEP_DELETED.inc_by(done.deleted);
        metrics::UPKEEP_POSITION.set(self.sweep.position.fraction());
        let is_lost = turn.is_lost();
        metrics::UPKEEP_ELECTED.set(f64::from(u8::from(!is_lost)));
        if is_lost {
            tracing::debug!(fence = turn.fence(), "another process was elected for the background work");
            return Ok(Some(done));
        }
        self.turn = Some(turn);
        result.map(|()| Some(done))
    }

    /// One slice. A step that fails does not keep the later ones from their work; the first error is returned.
    fn slice(&mut self, shared: &Shared, slice: &mut Slice<'_>) -> Result<()> {
        let mut report = GcReport::default();
        shared.meta.restore_reserve();
        let (living, mut result) = match shared.end_dead_sessions(slice, &mut report) {
            Ok((living, ended)) => (Some(living), ended),
            Err(error) => (None, Err(error)),
        };
        let mut deleted = Deleted::default();
        let grace = shared.garbage_grace();
        result =
            result.and(shared.garbage().delete_older(grace, slice, &mut self.marks.garbage, &mut deleted));
        result = result.and(shared.collect_deletions(slice, &mut self.marks.snapshots, &mut report));
        result = result.and(shared.tend_orphans().map(|freed| report.inodes += freed));
        // The first one begins a while after the election.
        let due = self.next_pass.is_some_and(|at| at <= Instant::now());
        if due || self.next_pass.is_none() {
            self.next_pass = Some(Instant::now() + PASS_EVERY);
        }
        let mut progress = Progress::default();
        // Without the sessions that live, no file is known to be abandoned.
        if let Some(living) = living {
            result = result.and(self.sweep.step(shared, slice, &living, due, &mut progress));
        }
        result = result.and(shared.compact_swept(&mut self.sweep.hollow, slice));
        result = result.and(self.save(shared, slice, &progress));
        report.objects = slice.done.deleted;
        if report != GcReport::default() {
            tracing::debug!(?report, "collected garbage");
        }
        result
    }

    /// Saves the position and renews the turn, if there is something to save or it is time.
    fn save(&mut self, shared: &Shared, slice: &Slice<'_>, progress: &Progress) -> Result<()> {
        let position = &self.sweep.position;
        if progress.is_empty() && *position == self.saved && !slice.is_due(self.interval) {
            return Ok(());
        }
        shared.meta.transact_making_room(Durability::Relaxed, |txn| {
            slice.renew(txn)?;
            progress.put(txn)?;
            if *position == self.saved { Ok(()) } else { position.put(txn) }
        })?;
        self.saved = position.clone();
        failpoint::hit("gc-slice-saved");
        Ok(())
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        if self.turn.is_some() {
            metrics::UPKEEP_ELECTED.set(0.0);
        }
    }
}

#[cfg(test)]
mod tests;
