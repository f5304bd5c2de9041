//! Group commit for SQLite: transactions are acknowledged from memory and committed together.
//!
//! The process with the writer lock (see `writer_lock.rs`) collects transactions in a batch. A thread commits the
//! batch after [`ANSWERED_MAX`], or after the longer delay that its prerequisites allow. It commits earlier
//! when the batch is large, when a caller waits for durability, or when another process asks. The next batch
//! fills meanwhile. A caller that wants durability then syncs the log, once for all waiting callers. Reads go
//! through the two batches and a record cache to a snapshot of the engine. All are of one moment, so readers
//! and writers do not wait for each other.
//!
//! On a nearly full disk each transaction is a *synchronous* batch, acknowledged after its
//! commit. Transactions acknowledged before the disk or a quota was full stay in memory, and their commit is
//! retried until there is space. Meanwhile reads work and changes are refused. Transactions that free space
//! take the reserved space (`reserve.rs`).
//!
//! While a cloud store is unreachable, transactions that point at its objects stay in memory, and their
//! commit is retried until the store is back. Callers that want durability get an error; acknowledged data is
//! kept.
//!
//! A crash may undo operations that were acknowledged within the last few milliseconds and not synced: all of
//! a batch or none. After a commit has failed for good, every call of this process returns its error.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use millrace_leaf::error_chain;
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::changes::{ChangeListener, Subscription};
use super::checkpoint::{self, Checkpoints};
use super::closing::Open;
use super::committer;
use super::engine::{Durability, Engine, FileIdentity, Order, Pairs, ReadTxn, WriteTxn};
use super::group_state::{Batch, State};
use super::keys;
use super::overlay::{Changes, View, Write};
use super::prerequisites::Prerequisites;
use super::record_cache::RecordCache;
use super::reserve::Reserve;
use super::sqlite::{Snapshot, Sqlite};
use super::writer_lock::WriterLock;
use crate::error::{Error, Result};
use crate::failpoint;
use crate::metrics;

/// Longest time from the acknowledgment of an operation to the start of its commit; longer where its
/// prerequisites allow it.
pub(super) const ANSWERED_MAX: Duration = Duration::from_millis(5);
/// Changed records, and bytes, after which a batch is committed early. Up to twice as much is in memory.
const BATCH_RECORDS_MAX: usize = 16_384;
const BATCH_BYTES_MAX: usize = 4 << 20;
/// With less free space on the disk each transaction is acknowledged after its commit, so that its caller
/// learns of missing space. A batch takes less.
const SYNCHRONOUS_BELOW_BYTES: u64 = 128 << 20;
/// Memory for cached records, in bytes.
const CACHE_BYTES_MAX: usize = 16 << 20;
/// Error when another process wrote without the writer lock.
pub(super) const OUT_OF_TURN: &str =
    "another process wrote to it out of turn: the file with the suffix -turn was removed or replaced";
/// How long a wait for another process sleeps before it checks whether that process is alive.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Metadata in a SQLite file, with group commit. Dropping it commits pending transactions.
pub(crate) struct Group {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// State that the threads share.
pub(super) struct Shared {
    pub(super) engine: Arc<Sqlite>,
    pub(super) turn: WriterLock,
    /// Identifies this open metadata in the change log.
    pub(super) writer: u64,
    pub(super) lock_wait: Duration,
    /// Held while a write transaction runs, until it is acknowledged. A synchronous one holds it until its
    /// commit.
    pub(super) writing: Mutex<()>,
    pub(super) state: Mutex<State>,
    /// Wakes callers that wait for progress.
    pub(super) progress: Condvar,
    /// Wakes the committing thread.
    pub(super) work: Condvar,
    pub(super) cache: Mutex<RecordCache>,
    pub(super) reserve: Reserve,
    pub(super) checkpoints: Checkpoints,
    /// Wakes the checkpoint thread.
    pub(super) checkpoint: Condvar,
    /// Held while the log is synced.
    syncing: Mutex<()>,
    syncs: AtomicU64,
    #[cfg(test)]
    pub(super) faults: Option<Arc<super::faulty::Faults>>,
    /// Dropped last, after the writer lock.
    _open_mark: Open,
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.fmt(f)
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group").field("engine", &self.engine).finish_non_exhaustive()
    }
}

impl Group {
    /// Group commit on an engine whose file other processes use in the same way.
    pub(crate) fn new(engine: Arc<Sqlite>) -> Result<Group> {
        let lock_wait = engine.lock_wait();
        engine.checkpoint_elsewhere()?;
        let turn = WriterLock::open(engine.path(), lock_wait, &mut || Ok(Snapshot::take(&engine)?.batch()))?;
        let cursor = turn.log().end(turn.words());
        let base = Snapshot::take(&engine)?.batch();
        let reserve = Reserve::of(engine.path());
        if !reserve.restore() {
            // A killed process may have left a log, whose space may be enough.
            if let Err(error) = engine.empty_log() {
                tracing::debug!(%error, "copying the metadata log back for its space");
            }
            reserve.restore();
        }
        let open_mark = engine.open_mark();
        let shared = Arc::new(Shared {
            engine,
            turn,
            writer: crate::random::random_id()?,
            lock_wait,
            writing: Mutex::new(()),
            state: Mutex::new(State {
                version: 0,
                base,
                epoch: 0,
                cursor,
                current: Batch::default(),
                frozen: None,
                committed: 0,
                readers: Vec::new(),
                idle: Vec::new(),
                turn_since: None,
                yielding: false,
                flush: false,
                asleep: false,
                stopping: false,
                synchronous: None,
                full: None,
                away: None,
                failed: None,
            }),
            progress: Condvar::new(),
            work: Condvar::new(),
            cache: Mutex::new(RecordCache::new(CACHE_BYTES_MAX)),
            reserve,
            checkpoints: Checkpoints::default(),
            checkpoint: Condvar::new(),
            syncing: Mutex::new(()),
            syncs: AtomicU64::new(0),
            #[cfg(test)]
            faults: super::faulty::at(super::faulty::Place::Inside),
            _open_mark: open_mark,
        });
        let threads = committer::start(&shared)?;
        Ok(Group { shared, threads: Mutex::new(threads) })
    }

    /// See [`Engine::read`].
    pub(crate) fn read(&self, body: &mut dyn FnMut(&mut dyn ReadTxn) -> Result<()>) -> Result<()> {
        self.barrier()?;
        body(&mut self.shared.open_view()?)
    }

    /// [`Group::read`] of what this process knows. It may miss what other processes acknowledged within the
    /// last few milliseconds, and waits for no process.
    pub(crate) fn read_recent(&self, body: &mut dyn FnMut(&mut dyn ReadTxn) -> Result<()>) -> Result<()> {
        body(&mut self.shared.open_view()?)
    }

    /// See [`Engine::write`].
    pub(crate) fn write(
        &self,
        durability: Durability,
        body: &mut dyn FnMut(&mut dyn WriteTxn) -> Result<()>,
    ) -> Result<()> {
        let shared = &self.shared;
        if durability == Durability::Durable {
            shared.state.lock().check_store()?;
        }
        let batch = {
            let _writing = shared.begin_write()?;
            let mut write = Write {
                view: shared.open_view()?,
                changes: Changes::new(),
                prerequisites: Prerequisites::default(),
                directories: Vec::new(),
                makes_room: false,
            };
            body(&mut write)?;
            let Write { view, changes, prerequisites, directories, makes_room } = write;
            drop(view);
            if !directories.is_empty() {
                // Their numbers are not used again, even if the transaction fails now.
                shared.cache.lock().begin_directories(&directories);
            }
            if changes.is_empty() && prerequisites.is_empty() {
                None
            } else {
                Some(shared.answer(changes, prerequisites, durability, makes_room)?)
            }
        };
        match (durability, batch) {
            (Durability::Relaxed, _) => Ok(()),
            (Durability::Durable, Some(batch)) => shared.make_durable(batch),
            (Durability::Durable, None) => self.sync(),
        }
    }

    /// Runs `body` once on committed data, which includes everything that any process acknowledged before the
    /// call.
    pub(crate) fn read_committed(&self, body: &mut dyn FnMut(&mut dyn ReadTxn) -> Result<()>) -> Result<()> {
        self.settle()?;
        self.barrier()?;
        self.shared.engine.read(body)
    }

    /// See [`Engine::replace`].
    pub(crate) fn replace(&self, check: &mut dyn FnMut() -> Result<()>, pairs: Pairs<'_>) -> Result<()> {
        let shared = &self.shared;
        let _writing = shared.begin_write()?;
        shared.wait_committed(shared.commit_soon()?)?;
        let number = {
            let mut state = shared.state.lock();
            while state.frozen.is_some() {
                shared.progress.wait(&mut state);
            }
            state.next_batch()
        };
        check()?;
        shared.turn.start(number);
        let replaced = shared.engine.write(Durability::Durable, &mut |txn| {
            delete_all(txn)?;
            failpoint::hit("replace-deleted");
            for pair in &mut *pairs {
                let (key, value) = pair?;
                txn.put(&key, &value)?;
            }
            failpoint::hit("replace-written");
            txn.put(keys::BATCH, &number.to_be_bytes())
        });
        failpoint::hit("replace-committed");
        // The commit may have taken place in spite of an error.
        let committed =
            replaced.is_ok() || Snapshot::take(&shared.engine).is_ok_and(|now| now.batch() == number);
        let mut state = shared.state.lock();
        if !committed {
            shared.turn.start(state.base);
            return replaced;
        }
        shared.turn.log().lose(shared.turn.words());
        shared.turn.finish(number);
        let outdated = state.replace(number, shared);
        drop(state);
        drop(outdated);
        Ok(())
    }

    /// See [`Engine::sync`].
    pub(crate) fn sync(&self) -> Result<()> {
        let shared = &self.shared;
        shared.syncs.fetch_add(1, Ordering::Relaxed);
        let pending = shared.commit_soon()?;
        shared.make_durable(pending)
    }

    /// Waits until everything that this process acknowledged before the call is committed.
    pub(crate) fn settle(&self) -> Result<()> {
        let pending = self.shared.commit_soon()?;
        self.shared.wait_committed(pending)
    }

    /// See [`Engine::barrier`].
    pub(crate) fn barrier(&self) -> Result<()> {
        let shared = &self.shared;
        let turn = &shared.turn;
        let started = turn.started();
        if turn.finished() >= started || shared.state.lock().turn_since.is_some() {
            return Ok(());
        }
        let begin = Instant::now();
        loop {
            turn.ask_for_flush();
            // A batch that was taken back is not started any more.
            if turn.wait_finished(started, LOOK_AGAIN) || turn.finished() >= turn.started() {
                return Ok(());
            }
            // Was the process that started it killed?
            if let Some(_writing) = shared.writing.try_lock() {
                if shared.state.lock().turn_since.is_some() {
                    return Ok(());
                }
                if turn.try_take()? {
                    let repaired = shared.repair();
                    turn.release();
                    return repaired;
                }
            }
            if begin.elapsed() >= shared.lock_wait {
                let waited_ms = u64::try_from(begin.elapsed().as_millis()).unwrap_or(u64::MAX);
                return Err(Error::Busy { place: shared.engine.place(), waited_ms });
            }
        }
    }

    /// See [`Sqlite::open_mark`].
    pub(crate) fn open_mark(&self) -> Open {
        self.shared.engine.open_mark()
    }

    /// See [`Engine::file_identity`].
    pub(crate) fn file_identity(&self) -> Result<FileIdentity> {
        self.shared.engine.file_identity()
    }

    /// The reserved space.
    pub(crate) fn reserve(&self) -> &Reserve {
        &self.shared.reserve
    }

    /// Restores the reserve; where the disk has too little, with the space of the log.
    pub(crate) fn restore_reserve(&self) {
        if !self.shared.reserve.restore() {
            // Readers may keep part of the log; the next call tries again.
            let _ = checkpoint::empty(&self.shared);
            self.shared.reserve.take_back();
        }
    }

    /// How often [`Group::sync`] was called.
    #[cfg(test)]
    pub(crate) fn syncs(&self) -> u64 {
        self.shared.syncs.load(Ordering::Relaxed)
    }

    /// See [`Engine::on_change`].
    pub(crate) fn on_change(&self, listener: ChangeListener) -> Result<Subscription> {
        committer::follow(&self.shared, listener)
    }
}

/// Records that are deleted per scan.
const DELETE_PAGE: usize = 10_000;

fn delete_all(txn: &mut dyn WriteTxn) -> Result<()> {
    loop {
        let page = txn.as_read().scan(&[], &[u8::MAX], Order::Ascending, DELETE_PAGE)?;
        for (key, _) in &page {
            txn.delete(key)?;
        }
        if page.len() < DELETE_PAGE {
            return Ok(());
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.shared.state.lock().stopping = true;
        self.shared.work.notify_one();
        self.shared.checkpoint.notify_one();
        self.shared.turn.wake_all();
        for thread in self.threads.lock().drain(..) {
            // A listener may drop the last handle.
            if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
                tracing::error!("a thread of the metadata panicked");
            }
        }
    }
}

impl Shared {
    pub(super) fn damaged(&self, reason: &str) -> Error {
        Error::corrupt(self.engine.place(), reason)
    }

    /// The error after another file has replaced the metadata file.
    pub(super) fn replaced(&self) -> Error {
        let what = format!("the metadata file {} that this process has open", self.engine.place());
        Error::Replaced { what }
    }

    fn refuse_replaced(&self) -> Error {
        self.engine.note_replaced();
        let error = self.replaced();
        self.fail(&error);
        error
    }

    /// Opens a view of the current state.
    pub(super) fn open_view(&self) -> Result<View<'_>> {
        let mut fresh: Option<Snapshot> = None;
        loop {
            let mut outdated = Vec::new();
            if self.turn.is_outdated() {
                return Err(self.refuse_replaced());
            }
            let mut state = self.state.lock();
            state.check(self)?;
            if state.turn_since.is_none() {
                let committed = fresh.as_ref().map_or(0, Snapshot::batch);
                outdated = state.refresh(self.turn.finished().max(committed), self);
            }
            let frozen = state.frozen.as_ref().map(|frozen| frozen.number);
            if fresh.as_ref().is_some_and(|fresh| fresh.batch() > frozen.unwrap_or(state.base)) {
                drop(state);
                let error = self.damaged(OUT_OF_TURN);
                self.fail(&error);
                return Err(error);
            }
            let fits =
                |snapshot: &Snapshot| snapshot.batch() == state.base || Some(snapshot.batch()) == frozen;
            let snapshot = match fresh.take().filter(fits) {
                Some(fresh) => Some(fresh),
                None => {
                    let idle = state.idle.iter().position(fits);
                    idle.map(|i| state.idle.swap_remove(i))
                }
            };
            if let Some(snapshot) = snapshot {
                let version = state.version;
                state.readers.push(version);
                let current = state.current.opened.map(|_| Arc::clone(&state.current.layer));
                let frozen = state.frozen.as_ref().map(|frozen| Arc::clone(&frozen.layer));
                let epoch = state.epoch;
                drop(state);
                drop(outdated);
                return Ok(View {
                    shared: self,
                    snapshot: Some(snapshot),
                    layers: [current, frozen],
                    version,
                    epoch,
                });
            }
            let committed = state.base;
            drop(state);
            drop(outdated);
            let taken = Snapshot::take(&self.engine)?;
            if taken.batch() < committed {
                return Err(self.refuse_replaced());
            }
            fresh = Some(taken);
        }
    }

    pub(super) fn close_view(&self, version: u64, snapshot: Option<Snapshot>) {
        let mut state = self.state.lock();
        if let Some(i) = state.readers.iter().position(|reader| *reader == version) {
            state.readers.swap_remove(i);
        }
        let frozen = state.frozen.as_ref().map(|frozen| frozen.number);
        let mut outdated = None;
        if let Some(snapshot) = snapshot {
            if snapshot.batch() == state.base || Some(snapshot.batch()) == frozen {
                state.idle.push(snapshot);
                // The committing thread must wake up later to drop it if it stays unused.
                if state.asleep {
                    self.work.notify_one();
                }
            } else {
                outdated = Some(snapshot);
            }
        }
        drop(state);
        drop(outdated);
    }

    /// Waits until a transaction may run: no other one runs, this process has the writer lock, and memory has
    /// space.
    fn begin_write(&self) -> Result<MutexGuard<'_, ()>> {
        loop {
            let writing = self.writing.lock();
            let mut state = self.state.lock();
            state.check(self)?;
            state.check_space()?;
            if state.yielding || state.current.full {
                state.check_store()?;
                drop(writing);
                self.progress.wait(&mut state);
            } else if state.turn_since.is_some() {
                return Ok(writing);
            } else {
                drop(state);
                self.take_turn()?;
                return Ok(writing);
            }
        }
    }

    /// Takes the writer lock; the caller has `writing` locked.
    fn take_turn(&self) -> Result<()> {
        self.turn.take(self.lock_wait)?;
        if let Err(error) = self.repair() {
            self.turn.release();
            return Err(error);
        }
        let mut state = self.state.lock();
        let outdated = state.refresh(self.turn.finished(), self);
        state.turn_since = Some(Instant::now());
        if self.turn.is_wanted() {
            self.work.notify_one();
        }
        drop(state);
        drop(outdated);
        Ok(())
    }

    /// Settles the batches of a killed process: what it has not committed is lost. The caller has the writer
    /// lock and no batches.
    fn repair(&self) -> Result<()> {
        let started = self.turn.started();
        if self.turn.finished() >= started {
            return Ok(());
        }
        let committed = Snapshot::take(&self.engine)?.batch();
        if committed < started {
            // Its number is not used again: another process may have waited for it.
            let write = || {
                self.engine
                    .write(Durability::Relaxed, &mut |txn| txn.put(keys::BATCH, &started.to_be_bytes()))
            };
            let mut written = write();
            let mut released = false;
            while matches!(written, Err(Error::NoSpace { .. })) && self.reserve.release() {
                released = true;
                written = write();
            }
            if released {
                self.reserve.take_back();
            }
            written?;
        }
        self.turn.finish(started.max(committed));
        Ok(())
    }

    /// Adds a transaction to the current batch, which makes it visible. Returns the batch's number. A
    /// synchronous transaction first waits for its commit. The caller has `writing` locked.
    fn answer(
        &self,
        changes: Changes,
        prerequisites: Prerequisites,
        durability: Durability,
        makes_room: bool,
    ) -> Result<u64> {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        state.check(self)?;
        let number = state.next_batch();
        let opens = state.current.opened.is_none();
        if opens {
            let synchronous = self.engine.free_bytes().is_some_and(|free| free < SYNCHRONOUS_BELOW_BYTES);
            if synchronous && !makes_room && !self.reserve.restore() {
                return Err(self.reserve.refusal());
            }
            failpoint::hit("group-start");
            self.turn.start(number);
            state.current.opened = Some(Instant::now());
            state.current.synchronous = synchronous;
            state.synchronous = None;
        }
        state.current.makes_room |= makes_room;
        state.version += 1;
        metrics::TRANSACTIONS.inc();
        {
            let mut layer = state.current.layer.write();
            for (key, value) in changes {
                layer.put(key, value, state.version, &state.readers);
            }
            state.current.full = layer.bytes() >= BATCH_BYTES_MAX || layer.len() >= BATCH_RECORDS_MAX;
        }
        state.current.linger = state.current.linger.max(prerequisites.linger());
        state.current.prerequisites.append(prerequisites);
        let awaited = durability == Durability::Durable;
        state.current.awaited |= awaited;
        if opens || awaited || state.current.full {
            self.work.notify_one();
        }
        if !state.current.synchronous {
            return Ok(number);
        }
        loop {
            if let Some(result) = guard.synchronous.take() {
                return result.map(|()| number);
            }
            guard.check(self)?;
            // The previous batch waits for space.
            guard.check_space_to_commit()?;
            self.progress.wait(&mut guard);
        }
    }

    /// Has pending transactions committed without delay. Returns the number of their last batch, 0 if there
    /// is none.
    fn commit_soon(&self) -> Result<u64> {
        let mut state = self.state.lock();
        state.check(self)?;
        state.check_space()?;
        if state.current.opened.is_none() {
            return Ok(state.frozen.as_ref().map_or(0, |frozen| frozen.number));
        }
        state.current.awaited = true;
        self.work.notify_one();
        Ok(state.next_batch())
    }

    fn wait_committed(&self, batch: u64) -> Result<()> {
        let mut state = self.state.lock();
        while state.committed < batch {
            state.check(self)?;
            // The batch stays in memory and is committed as soon as that is possible.
            state.check_store()?;
            state.check_space_to_commit()?;
            self.progress.wait(&mut state);
        }
        Ok(())
    }

    /// Waits until a batch of this process is committed, then makes all committed batches durable.
    fn make_durable(&self, batch: u64) -> Result<()> {
        self.wait_committed(batch)?;
        let committed = self.turn.finished().max(batch);
        // One sync at a time: it mostly covers the callers that wait here, too.
        let _syncing = self.syncing.lock();
        if self.turn.is_synced(committed) {
            return Ok(());
        }
        let committed = self.turn.finished();
        failpoint::hit("group-sync");
        if let Err(error) = self.engine.sync_log() {
            // The kernel may have dropped data that it could not write, so a second sync would prove nothing.
            self.fail(&error);
            // Do not return the error itself. For a full disk it would say that nothing was changed, and the
            // caller would delete the objects that the commit points at.
            return self.state.lock().check(self);
        }
        metrics::METADATA_SYNCS.inc();
        self.turn.synced(committed);
        failpoint::hit("group-synced");
        Ok(())
    }

    /// Makes every call fail from now on.
    pub(super) fn fail(&self, error: &Error) {
        let cause = error_chain::one_line(error);
        tracing::error!(place = %self.engine.place(), %cause, "committing metadata failed for good");
        let mut state = self.state.lock();
        state.failed = Some(cause.into());
        state.yielding = false;
        // Other processes find that the batches are lost, and go on.
        if state.turn_since.take().is_some() {
            self.turn.release();
        }
        self.work.notify_one();
        self.progress.notify_all();
    }
}
