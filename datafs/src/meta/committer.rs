//! Threads of group commit. One commits batches and releases the writer lock, one watches for requests of
//! other processes, and one copies the log back. One per listener reports the commits of other processes.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use millrace_leaf::backoff::Backoff;
use millrace_leaf::error_chain;
use parking_lot::MutexGuard;

use super::change_log::Read;
use super::changes::{ChangeListener, Changed, Subscription};
use super::checkpoint;
use super::codec::Decoder;
use super::engine::{Durability, Engine, WriteTxn};
use super::group::{OUT_OF_TURN, Shared};
use super::group_state::{Frozen, State, StoreAway};
use super::key_hash::key_hash;
use super::keys;
use super::shared_page;
use super::sqlite::Snapshot;
use crate::error::{Error, Result};
use crate::failpoint;
use crate::metrics;

/// Minimum time that a process keeps the writer lock while others want it.
const SLICE_MIN: Duration = Duration::from_millis(2);
/// Longest wait for a running transaction when the writer lock is to be released.
const WRITER_WAIT: Duration = Duration::from_millis(2);
/// A snapshot that is unused for one to two of these periods is dropped: it keeps the log from being reused.
const IDLE_SNAPSHOT_MAX: Duration = Duration::from_secs(1);
/// How long a commit without space waits for readers. A commit that frees space also waits for other
/// processes to drop their idle snapshots.
const READERS_WAIT: Duration = Duration::from_secs(3);
/// First and longest pause before a commit that found no space is retried.
const RETRY_PAUSE: Duration = Duration::from_millis(10);
const RETRY_PAUSE_MAX: Duration = Duration::from_millis(500);
/// Records that are put into the cache under one lock.
const CACHE_CHUNK: usize = 256;

pub(super) fn start(shared: &Arc<Shared>) -> Result<Vec<JoinHandle<()>>> {
    let start = |name: &str, run: fn(&Shared)| {
        let shared = Arc::clone(shared);
        let place = shared.engine.place();
        spawn(name, &place, move || run(&shared))
    };
    Ok(vec![
        start("datafs-commit", commit_batches)?,
        start("datafs-turn", watch_requests)?,
        start("datafs-checkpoint", checkpoint::run)?,
    ])
}

fn spawn(name: &str, place: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    std::thread::Builder::new()
        .name(name.into())
        .spawn(run)
        .map_err(|e| Error::io("start a metadata thread for", place, e))
}

/// Commits batches until the metadata is closed.
fn commit_batches(shared: &Shared) {
    let mut state = shared.state.lock();
    loop {
        if state.failed.is_some() {
            if state.stopping {
                return;
            }
            shared.work.wait(&mut state);
        } else if is_due(&state) {
            let frozen = state.freeze(shared);
            MutexGuard::unlocked(&mut state, || commit_or_fail(shared, &frozen));
        } else if state.stopping && state.current.opened.is_none() {
            if state.turn_since.take().is_some() {
                shared.turn.release();
            }
            return;
        } else if state.yielding {
            MutexGuard::unlocked(&mut state, || give_up_turn(shared));
        } else {
            wait_for_work(shared, &mut state);
        }
    }
}

fn is_due(state: &State) -> bool {
    let current = &state.current;
    let Some(opened) = current.opened else { return false };
    current.awaited
        || current.synchronous
        || current.full
        || state.flush
        || state.yielding
        || state.stopping
        || opened.elapsed() >= current.fills_for()
}

fn wait_for_work(shared: &Shared, state: &mut MutexGuard<'_, State>) {
    // Release the writer lock to a process that wants it, after a minimum time.
    if let Some(since) = state.turn_since
        && shared.turn.is_wanted()
    {
        let until = since + SLICE_MIN;
        if Instant::now() >= until || state.current.opened.is_none() {
            state.yielding = true;
        } else {
            shared.work.wait_until(state, until);
        }
        return;
    }
    if state.current.opened.is_none() {
        state.flush = false;
    }
    if let Some(opened) = state.current.opened {
        let until = opened + state.current.fills_for();
        shared.work.wait_until(state, until);
    } else if state.idle.is_empty() {
        state.asleep = true;
        shared.work.wait(state);
        state.asleep = false;
    } else if shared.work.wait_for(state, IDLE_SNAPSHOT_MAX).timed_out() {
        let idle = std::mem::take(&mut state.idle);
        MutexGuard::unlocked(state, || drop(idle));
    }
}

/// Releases the writer lock unless a transaction is running; the caller then tries again.
fn give_up_turn(shared: &Shared) {
    let Some(writing) = shared.writing.try_lock_for(WRITER_WAIT) else { return };
    let mut state = shared.state.lock();
    if state.current.opened.is_some() {
        return;
    }
    state.yielding = false;
    if state.turn_since.take().is_some() {
        shared.turn.release();
    }
    shared.progress.notify_all();
    drop(state);
    drop(writing);
}

/// Commits a frozen batch, with retries. A synchronous batch is taken back when there is no space or no
/// store. After any other failure all calls fail.
fn commit_or_fail(shared: &Shared, frozen: &Frozen) {
    let begin = Instant::now();
    let mut backoff = Backoff::new(RETRY_PAUSE, RETRY_PAUSE_MAX);
    let (mut relieved, mut is_blocked) = (false, false);
    let failure = loop {
        let error = match commit(shared, frozen) {
            Ok(()) => break None,
            // Copying the log back restarts the log: the file already has the space for its pages. Another
            // process may have restored the reserve since it was released.
            //
            // A full disk of objects is different: it holds no log, and a retry would make the objects
            // durable twice.
            Err(Error::NoSpace { place, .. })
                if (frozen.makes_room && shared.reserve.release())
                    || (!relieved && (frozen.makes_room || place == shared.engine.place())) =>
            {
                relieved = true;
                is_blocked = !checkpoint::empty(shared);
                continue;
            }
            // Readers, and idle snapshots of other processes, keep the log from being emptied.
            Err(Error::NoSpace { .. })
                if (frozen.makes_room || is_blocked)
                    && frozen.synchronous
                    && begin.elapsed() < READERS_WAIT =>
            {
                std::thread::sleep(backoff.pause());
                is_blocked = !checkpoint::empty(shared);
                continue;
            }
            Err(error) => error,
        };
        let mut state = shared.state.lock();
        match &error {
            cause
                if frozen.synchronous
                    && (cause.is_store_trouble() || matches!(cause, Error::NoSpace { .. })) =>
            {
                shared.reserve.take_back();
                state.take_back(shared, error);
                shared.progress.notify_all();
                return;
            }
            // Retry without limit: acknowledged data is not given up while there is hope.
            Error::NoSpace { place, quota } if !state.stopping => {
                if state.full.is_none() {
                    tracing::error!(%place, quota, "no space to commit metadata; it is tried again and again");
                }
                state.full = Some((place.clone(), *quota));
            }
            Error::Busy { .. } if begin.elapsed() < shared.lock_wait => {}
            // Retry without limit, too.
            error if error.is_store_trouble() && !state.stopping => {
                if state.away.is_none() {
                    tracing::warn!(%error, "a commit waits for the object store; it is tried again");
                }
                let since = state.away.as_ref().map_or(begin, StoreAway::since);
                state.away = Some(StoreAway::new(error, since));
            }
            _ => break Some(error),
        }
        shared.progress.notify_all();
        drop(state);
        std::thread::sleep(backoff.pause());
    };
    if relieved {
        shared.reserve.take_back();
    }
    if let Some(error) = failure {
        shared.fail(&error);
        return;
    }
    metrics::COMMITS.inc();
    metrics::COMMIT_NANOS.inc_by(begin.elapsed().as_nanos() as u64);
    {
        let mut state = shared.state.lock();
        if state.full.take().is_some() {
            tracing::info!("there is space again: what waited for it is committed");
        }
        if state.away.take().is_some() {
            tracing::info!("the object store is back: what waited for it is committed");
        }
        state.committed = frozen.number;
        shared.progress.notify_all();
    }
    let layer = frozen.layer.read();
    metrics::COMMITTED_RECORDS.inc_by(layer.len() as u64);
    let mut records = layer.newest().peekable();
    while records.peek().is_some() {
        let mut cache = shared.cache.lock();
        for (key, value) in records.by_ref().take(CACHE_CHUNK) {
            cache.replace(key, key_hash(key), value);
        }
    }
    let mut state = shared.state.lock();
    let outdated = state.thaw(shared);
    if frozen.synchronous {
        state.synchronous = Some(Ok(()));
    }
    drop(state);
    shared.progress.notify_all();
    drop(outdated);
}

fn commit(shared: &Shared, frozen: &Frozen) -> Result<()> {
    failpoint::hit("group-frozen");
    // A commit to a file that was replaced or removed would be lost.
    if shared.turn.is_outdated() || !shared.engine.is_in_place() {
        shared.engine.note_replaced();
        return Err(shared.replaced());
    }
    frozen.prerequisites.run()?;
    failpoint::hit("group-prerequisites");
    checkpoint::finish(shared);
    let layer = frozen.layer.read();
    let keys = layer.newest().map(|(key, _)| key);
    shared.turn.log().append(shared.turn.words(), frozen.number, shared.writer, keys);
    failpoint::hit("group-logged");
    let written = write(shared, &mut |txn| {
        let newest = match txn.get(keys::BATCH)? {
            Some(value) => Decoder::new("batch number", &value).u64()?,
            None => 0,
        };
        // An earlier attempt reported an error but took place.
        if newest == frozen.number {
            return Ok(());
        }
        if newest + 1 != frozen.number {
            return Err(shared.damaged(OUT_OF_TURN));
        }
        for (key, value) in layer.newest() {
            match value {
                Some(value) => txn.put(key, value)?,
                None => txn.delete(key)?,
            }
        }
        if frozen.makes_room {
            txn.makes_room();
        }
        failpoint::hit("group-written");
        txn.put(keys::BATCH, &frozen.number.to_be_bytes())
    });
    match written {
        // The commit may have taken place in spite of the error. No other process has the writer lock, so the
        // batch number tells.
        Err(error)
            if !error.is_definite()
                && Snapshot::take(&shared.engine).is_ok_and(|now| now.batch() == frozen.number) =>
        {
            tracing::warn!(
                error = error_chain::one_line(&error),
                "a commit of metadata took place and reported an error"
            );
        }
        other => other?,
    }
    failpoint::hit("group-committed");
    if shared.checkpoints.committed(shared.engine.log_pages()) {
        shared.checkpoint.notify_one();
    }
    shared.turn.finish(frozen.number);
    failpoint::hit("group-finished");
    Ok(())
}

fn write(shared: &Shared, body: &mut dyn FnMut(&mut dyn WriteTxn) -> Result<()>) -> Result<()> {
    #[cfg(test)]
    if let Some(faults) = &shared.faults {
        faults.check_space(&shared.engine.place())?;
        return super::faulty::attempt(shared.engine.as_ref(), faults.draw(), Durability::Relaxed, body);
    }
    shared.engine.write(Durability::Relaxed, body)
}

/// Wakes the committing thread when another process asks for a commit or the writer lock.
fn watch_requests(shared: &Shared) {
    let words = shared.turn.words();
    let mut flushes = words.flushes.load(Ordering::Acquire);
    loop {
        let bell = words.bell.load(Ordering::Acquire);
        let asked = words.flushes.load(Ordering::Acquire);
        {
            let mut state = shared.state.lock();
            if state.stopping {
                return;
            }
            if state.turn_since.is_some() && (asked != flushes || shared.turn.is_wanted()) {
                state.flush |= asked != flushes;
                shared.work.notify_one();
            }
        }
        flushes = asked;
        shared_page::wait(&words.bell, bell, None);
    }
}

/// Starts a thread that reports the commits of other processes.
pub(super) fn follow(shared: &Arc<Shared>, mut listener: ChangeListener) -> Result<Subscription> {
    let (subscription, stopped) = Subscription::new();
    let shared = Arc::clone(shared);
    let mut cursor = shared.turn.log().end(shared.turn.words());
    let mut told = shared.turn.finished();
    let place = shared.engine.place();
    spawn("datafs-changes", &place, move || {
        let words = shared.turn.words();
        loop {
            let seen = words.finish_bell.load(Ordering::Acquire);
            if stopped.load(Ordering::Acquire) || shared.state.lock().stopping {
                return;
            }
            let finished = shared.turn.finished();
            if finished != told {
                told = finished;
                if let Some(changed) = changes_of_others(&shared, &mut cursor, finished) {
                    listener(&changed);
                }
                continue;
            }
            shared_page::wait(&words.finish_bell, seen, Some(IDLE_SNAPSHOT_MAX));
        }
    })?;
    Ok(subscription)
}

fn changes_of_others(shared: &Shared, cursor: &mut super::change_log::Cursor, until: u64) -> Option<Changed> {
    let mut changed = Changed::default();
    loop {
        match shared.turn.log().read(shared.turn.words(), cursor, until) {
            Read::End => break,
            Read::Gap => changed.anything = true,
            Read::Entry(entry) if entry.writer == shared.writer => {}
            Read::Entry(entry) => match entry.keys {
                None => changed.anything = true,
                Some(keys) => changed.records.extend(keys.iter().filter_map(|key| keys::live_record(key))),
            },
        }
    }
    (!changed.is_empty()).then_some(changed)
}
