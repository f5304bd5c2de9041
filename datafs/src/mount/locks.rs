//! Lock requests of a mount (`flock` and `fcntl`): the serving thread replies at once where it can. A separate
//! thread handles every request that waits, so that a waiting lock never blocks a serving thread. It also
//! counts and traces those requests, with their replies.
//!
//! Taking a lock makes the kernel drop cached data that others have changed; releasing one commits earlier
//! writes. So a lock holder sees the writes of the previous holder, on any mount.
//!
//! In a held mount a reply waits until the change survives the process. Otherwise a crash could undo a lock or a
//! release of which the program knows: two programs would hold one lock, or a free one would stay held.

pub(super) mod request;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fuser::{Errno, ReplyEmpty, ReplyLock};
use millrace_leaf::error_chain;
use parking_lot::{Condvar, Mutex};

use super::caller::is_interrupted;
use super::coherence::Coherence;
use super::errno::errno;
use super::handles::Handles;
use super::handover::journal::LockRecord;
use super::observe::stats::Op;
use super::observe::trace;
use super::observe::watch::Watch;
use super::outcome::{self, Outcome};
use crate::error::{Error, Result};
use crate::fs::{Blocker, FileLock, LOCK_END_MAX, LockFamily, LockOwner, Locking};
use crate::metrics;
use crate::node::{Attr, Node};

/// First and last interval between attempts for a contended lock. Changes by other processes also wake the
/// waiting requests, so this bounds only the delay after a missed change.
const RETRY_FIRST: Duration = Duration::from_millis(1);
const RETRY_LAST: Duration = Duration::from_millis(50);
/// The kernel reports the last close of an open file, which ends its `flock`, after `close` has returned. So a
/// request that does not wait still gets this time.
const CLOSING_TIME: Duration = Duration::from_millis(10);

/// The locks taken through one mount, and the requests that wait for one.
#[derive(Debug)]
pub(super) struct Locks {
    held: Mutex<HashMap<(Node, LockOwner), Through>>,
    /// Number of entries of `held`, so that most closes take no lock.
    held_count: AtomicUsize,
    coherence: Arc<Coherence>,
    watch: Arc<Watch>,
    /// Locks of closed files whose release failed.
    left: Mutex<Vec<(Node, LockOwner)>>,
    state: Mutex<State>,
    changed: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The handles through which an owner has taken its locks on a node, with their slots in the journal of a held
/// mount.
type Through = HashMap<u64, Option<u32>>;

#[derive(Debug, Default)]
struct State {
    queue: Vec<Waiting>,
    /// Counts events that may make a waiting request succeed.
    news: u64,
    stopped: bool,
    /// Waiting requests stay unanswered.
    abandoned: bool,
}

/// A lock request that waits for its reply.
#[derive(Debug)]
struct Waiting {
    wish: Wish,
    begun: Instant,
    until: Until,
    reply: ReplyEmpty,
}

#[derive(Debug)]
enum Until {
    /// The lock is held; the kernel must drop its cached data before the reply.
    Forgotten(Attr),
    Held,
    /// The request fails at this moment.
    Instant(Instant),
}

/// A lock request of the kernel.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wish {
    pub(super) node: Node,
    /// The kernel's number of the node, for the trace.
    pub(super) ino: u64,
    pub(super) handle: u64,
    pub(super) lock: FileLock,
    /// The request releases the range.
    pub(super) gives_up: bool,
    pub(super) waits: bool,
    /// The calling thread, to detect signals: the library does not pass on interrupts.
    pub(super) pid: u32,
}

impl Locks {
    pub(super) fn new(coherence: Arc<Coherence>, watch: Arc<Watch>) -> Locks {
        Locks {
            held: Mutex::default(),
            held_count: AtomicUsize::new(0),
            coherence,
            watch,
            left: Mutex::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
            thread: Mutex::default(),
        }
    }

    /// Starts the thread that handles waiting requests.
    pub(super) fn start(self: &Arc<Self>, handles: &Arc<Handles>) -> std::io::Result<()> {
        let (locks, handles) = (Arc::downgrade(self), Arc::downgrade(handles));
        let thread =
            std::thread::Builder::new().name("datafs-locks".into()).spawn(move || run(&locks, &handles))?;
        *self.thread.lock() = Some(thread);
        Ok(())
    }

    /// Replies to all waiting requests with EINTR, and ends the thread.
    pub(super) fn stop(&self) {
        {
            let mut state = self.state.lock();
            state.stopped = true;
            self.changed.notify_all();
        }
        if let Some(thread) = self.thread.lock().take()
            && thread.join().is_err()
        {
            tracing::error!("the thread on which locks wait has panicked");
        }
        let queue = std::mem::take(&mut self.state.lock().queue);
        for waiting in queue {
            self.answer(waiting, outcome::refused(Errno::EINTR));
        }
    }

    /// Notes a lock that an earlier server of the mount held.
    pub(super) fn inherit(&self, node: Node, owner: LockOwner) {
        let mut held = self.held.lock();
        held.entry((node, owner)).or_default();
        self.held_count.store(held.len(), Ordering::Release);
    }

    /// Notes through which handle such a lock was taken. `false` if its owner has none on the node.
    pub(super) fn inherit_through(&self, lock: LockRecord, slot: u32) -> bool {
        let LockRecord { handle, node, owner } = lock;
        let owner = LockOwner { family: LockFamily::Fcntl, id: owner };
        let mut held = self.held.lock();
        let through = held.get_mut(&(Node::from_u64(node), owner));
        through.map(|through| through.insert(handle, Some(slot))).is_some()
    }

    /// Answers no waiting request any more: the next server of the mount gets them again. The thread may still
    /// answer one that it is trying.
    pub(super) fn abandon(&self) {
        let mut state = self.state.lock();
        (state.stopped, state.abandoned) = (true, true);
        // The library answers a request whose reply is dropped.
        std::mem::forget(std::mem::take(&mut state.queue));
        self.changed.notify_all();
    }

    /// A change was committed or a lock released: waiting requests try again.
    pub(super) fn wake(&self) {
        let mut state = self.state.lock();
        state.news += 1;
        if !state.queue.is_empty() {
            self.changed.notify_all();
        }
    }

    /// Whether this mount holds a lock on a node.
    pub(super) fn has(&self, node: Node) -> bool {
        self.held_count.load(Ordering::Acquire) > 0 && self.held.lock().keys().any(|(held, _)| *held == node)
    }

    /// Replies to a lock request, now or later.
    pub(super) fn set(&self, handles: &Handles, wish: Wish, reply: ReplyEmpty) {
        let begun = Instant::now();
        match self.try_set(handles, &wish) {
            Ok(Answer::Now(None)) => reply.ok(),
            Ok(Answer::Now(Some(errno))) => reply.error(outcome::refusal(errno)),
            Ok(Answer::Later(until)) => {
                let mut state = self.state.lock();
                if state.stopped {
                    // The mount ends.
                    return reply.error(outcome::refusal(Errno::EINTR));
                }
                outcome::comes_later();
                state.queue.push(Waiting { wish, begun, until, reply });
                state.news += 1;
                self.changed.notify_all();
            }
            Err(error) => {
                tracing::warn!(error = error_chain::one_line(&error), node = wish.node.to_u64(), "locking");
                reply.error(outcome::failure(counted(&error)));
            }
        }
    }

    /// Replies to a request that has waited, and counts and traces it.
    fn answer(&self, waiting: Waiting, outcome: Outcome) {
        let Waiting { wish: Wish { ino, lock, pid, .. }, begun, reply, .. } = waiting;
        let range = Some((lock.start, lock.end.saturating_sub(lock.start).saturating_add(1)));
        let request = trace::Request { op: Op::Setlk, pid, ino, name: None, to: None, range };
        self.watch.answered(&request, outcome, begun.elapsed());
        match outcome.errno {
            0 => reply.ok(),
            errno => reply.error(Errno::from_i32(errno)),
        }
    }

    fn try_set(&self, handles: &Handles, wish: &Wish) -> Result<Answer> {
        let Wish { node, lock, handle, .. } = *wish;
        if wish.gives_up {
            self.give_up(handles, node, lock.owner, (lock.start, lock.end), Some(handle))?;
            return Ok(Answer::Now(None));
        }
        // The owner takes the lock again, so the failed release must not be repeated.
        self.left.lock().retain(|left| *left != (node, lock.owner));
        let blockers = match handles.view.lock(node, lock)? {
            Locking::Held(attr) => {
                let outdated = self.took(handles, (node, lock.owner), handle, attr.as_ref());
                settle(handles)?;
                return Ok(match outdated {
                    None => Answer::Now(None),
                    Some(attr) => Answer::Later(Until::Forgotten(attr)),
                });
            }
            Locking::Blocked(blockers) => blockers,
        };
        if !wish.waits {
            let closing = |by: &Blocker| by.is_local && by.lock.owner.family == LockFamily::Flock;
            return Ok(match blockers.iter().all(closing) {
                true => Answer::Later(Until::Instant(Instant::now() + CLOSING_TIME)),
                false => Answer::Now(Some(Errno::EAGAIN)),
            });
        }
        if lock.owner.family == LockFamily::Flock {
            // Two holders of a shared lock that both request an exclusive one would wait for each other
            // forever.
            self.give_up(handles, node, lock.owner, (0, LOCK_END_MAX), None)?;
        }
        Ok(Answer::Later(Until::Held))
    }

    /// Notes a lock that is held now. Returns the attributes if the kernel's cached data is outdated.
    fn took(
        &self,
        handles: &Handles,
        (node, owner): (Node, LockOwner),
        handle: u64,
        attr: Option<&Attr>,
    ) -> Option<Attr> {
        let mut held = self.held.lock();
        held.entry((node, owner)).or_default().entry(handle).or_insert_with(|| match owner.family {
            LockFamily::Fcntl => handles.keep_lock(node, owner.id, handle),
            // The kernel tells the owner at the end of the open file.
            LockFamily::Flock => None,
        });
        self.held_count.store(held.len(), Ordering::Release);
        drop(held);
        attr.filter(|attr| !self.coherence.has_pages(attr)).copied()
    }

    /// Makes the kernel read a file again, to its end, for the new lock holder.
    fn refresh(&self, handles: &Handles, handle: u64, attr: &Attr) {
        self.coherence.drops(attr);
        let Some(end) = attr.size.checked_sub(1) else { return };
        // A handle without read permission needs no size.
        if let Ok(handle) = handles.get(handle)
            && let Ok(last) = handle.file.read_at(end, 1)
            && let [last] = *last
        {
            self.coherence.reaches(attr, last);
        }
    }

    /// Commits writes to a file, then releases a range of its locks.
    fn give_up(
        &self,
        handles: &Handles,
        node: Node,
        owner: LockOwner,
        (start, end): (u64, u64),
        handle: Option<u64>,
    ) -> Result<()> {
        let mut published = Ok(());
        if let Some(handle) = handle.and_then(|handle| handles.get(handle).ok())
            && node.is_live()
        {
            published = handle.file.flush();
        }
        if handles.view.unlock(node, owner, start, end)? {
            self.wake();
        }
        // Before the journal forgets the lock.
        settle(handles)?;
        if (start, end) == (0, LOCK_END_MAX) {
            self.gave_up(handles, node, owner);
        }
        published
    }

    fn gave_up(&self, handles: &Handles, node: Node, owner: LockOwner) {
        let mut held = self.held.lock();
        let through = held.remove(&(node, owner));
        self.held_count.store(held.len(), Ordering::Release);
        through.into_iter().flatten().filter_map(|(_, slot)| slot).for_each(|slot| handles.forget_lock(slot));
    }

    /// A process has closed the file, which releases its `fcntl` locks.
    pub(super) fn flushed(&self, handles: &Handles, node: Node, handle: u64, owner: u64) {
        if self.held_count.load(Ordering::Acquire) == 0 {
            return;
        }
        let owner = LockOwner { family: LockFamily::Fcntl, id: owner };
        if self.held.lock().contains_key(&(node, owner)) {
            self.let_go(handles, node, owner, handle);
        }
    }

    /// An open file has ended: releases its `flock`, and locks taken through it whose close the kernel did not
    /// report.
    pub(super) fn released(&self, handles: &Handles, node: Node, handle: u64, flock: Option<u64>) {
        if self.held_count.load(Ordering::Acquire) == 0 {
            return;
        }
        let flock = flock.map(|id| LockOwner { family: LockFamily::Flock, id });
        // A lock of an earlier server whose handle is unknown ends with the last open file of the node.
        let is_last = !handles.is_shared(node);
        let ends = |through: &Through| through.contains_key(&handle) || through.is_empty() && is_last;
        let owners: Vec<LockOwner> = {
            let held = self.held.lock();
            let through = held.iter().filter(|((held, _), _)| *held == node);
            through
                .filter(|((_, owner), through)| Some(*owner) == flock || ends(through))
                .map(|((_, owner), _)| *owner)
                .collect()
        };
        for owner in owners {
            self.let_go(handles, node, owner, handle);
        }
    }

    fn let_go(&self, handles: &Handles, node: Node, owner: LockOwner, handle: u64) {
        if let Err(error) = self.give_up(handles, node, owner, (0, LOCK_END_MAX), Some(handle)) {
            tracing::warn!(
                error = error_chain::one_line(&error),
                node = node.to_u64(),
                "giving up a lock at the close of a file"
            );
            if self.held.lock().contains_key(&(node, owner)) {
                self.left.lock().push((node, owner));
                let mut state = self.state.lock();
                state.news += 1;
                self.changed.notify_all();
            }
        }
    }

    /// Retries the failed releases of closed files. Returns whether none is left.
    fn give_up_left(&self, handles: &Handles) -> bool {
        // Locked meanwhile, so that an owner that returns takes its lock after this.
        let mut left = self.left.lock();
        let unlock = |node, owner| {
            handles.view.unlock(node, owner, 0, LOCK_END_MAX)?;
            settle(handles)
        };
        left.retain(|(node, owner)| match unlock(*node, *owner) {
            Ok(()) => {
                self.gave_up(handles, *node, *owner);
                self.wake();
                false
            }
            Err(error) => {
                tracing::debug!(%error, node = node.to_u64(), "giving up a lock of a closed file");
                true
            }
        });
        left.is_empty()
    }

    /// Replies with the lock that conflicts with a requested one (GETLK).
    pub(super) fn get(&self, handles: &Handles, node: Node, lock: FileLock, reply: ReplyLock) {
        match handles.view.lock_in_the_way(node, lock) {
            Ok(None) => reply.locked(lock.start, lock.end, libc::F_UNLCK, 0),
            Ok(Some(Blocker { lock, .. })) => {
                let kind = if lock.exclusive { libc::F_WRLCK } else { libc::F_RDLCK };
                reply.locked(lock.start, lock.end, kind, lock.pid);
            }
            Err(error) => {
                tracing::warn!(
                    error = error_chain::one_line(&error),
                    node = node.to_u64(),
                    "looking for a lock"
                );
                reply.error(outcome::failure(counted(&error)));
            }
        }
    }

    /// Tries a waiting request once more. Returns it if it must wait on, with the owners in this mount that
    /// block it.
    fn retry(&self, handles: &Handles, waiting: Waiting) -> Option<(Waiting, Vec<LockOwner>)> {
        let Wish { node, lock, handle, pid, .. } = waiting.wish;
        if let Until::Forgotten(attr) = waiting.until {
            self.refresh(handles, handle, &attr);
            self.answer(waiting, Outcome::default());
            return None;
        }
        let outcome = match handles.view.lock(node, lock) {
            Ok(Locking::Held(attr)) => {
                if let Some(attr) = self.took(handles, (node, lock.owner), handle, attr.as_ref()) {
                    self.refresh(handles, handle, &attr);
                }
                match settle(handles) {
                    Ok(()) => Outcome::default(),
                    Err(error) => {
                        tracing::warn!(
                            error = error_chain::one_line(&error),
                            node = node.to_u64(),
                            "waiting for a lock"
                        );
                        outcome::failed(counted(&error))
                    }
                }
            }
            Ok(Locking::Blocked(blockers)) => {
                if matches!(waiting.until, Until::Instant(until) if Instant::now() >= until) {
                    outcome::refused(Errno::EAGAIN)
                } else if is_interrupted(pid) {
                    outcome::refused(Errno::EINTR)
                } else {
                    let here = blockers.iter().filter(|by| by.is_local).map(|by| by.lock.owner).collect();
                    return Some((waiting, here));
                }
            }
            Err(error) => {
                tracing::warn!(
                    error = error_chain::one_line(&error),
                    node = node.to_u64(),
                    "waiting for a lock"
                );
                outcome::failed(counted(&error))
            }
        };
        self.answer(waiting, outcome);
        None
    }
}

enum Answer {
    Now(Option<Errno>),
    Later(Until),
}

/// Waits until changes of locks survive the process, in a mount that another server may go on with.
fn settle(handles: &Handles) -> Result<()> {
    if handles.is_held() { handles.view.shared.meta.settle() } else { Ok(()) }
}

/// The errno of a lock request that failed, counted as an error of the mount.
fn counted(error: &Error) -> Errno {
    metrics::MOUNT_ERRORS.inc();
    errno(error)
}

/// Refuses requests that close a cycle of waiting requests (EDEADLK, as for `fcntl` on a local disk). `waiting`
/// is in order of arrival, and the last to arrive closes a cycle. No request in a cycle can release a lock, so
/// blockers that were read one after the other hold at the same time.
fn break_circles(locks: &Locks, mut waiting: Vec<(Waiting, Vec<LockOwner>)>) -> Vec<Waiting> {
    let fcntl = |waiting: &Waiting| waiting.wish.lock.owner.family == LockFamily::Fcntl;
    let mut refused = Vec::new();
    for i in (0..waiting.len()).rev() {
        let owner = waiting[i].0.wish.lock.owner;
        let mut seen = HashSet::new();
        let mut open = waiting[i].1.clone();
        while let Some(one) = open.pop() {
            if one == owner && fcntl(&waiting[i].0) {
                refused.push(i);
                // Without this request the cycle is broken.
                waiting[i].1.clear();
                break;
            }
            if seen.insert(one) {
                let its = waiting.iter().filter(|(waiting, _)| waiting.wish.lock.owner == one);
                open.extend(its.flat_map(|(_, blockers)| blockers.iter().copied()));
            }
        }
    }
    let mut rest = Vec::with_capacity(waiting.len());
    for (i, (waiting, _)) in waiting.into_iter().enumerate() {
        if refused.contains(&i) {
            locks.answer(waiting, outcome::failed(Errno::EDEADLK));
        } else {
            rest.push(waiting);
        }
    }
    rest
}

fn run(locks: &Weak<Locks>, handles: &Weak<Handles>) {
    let mut pause = RETRY_FIRST;
    let (mut news, mut none_left) = (0, true);
    while let (Some(locks), Some(handles)) = (locks.upgrade(), handles.upgrade()) {
        let queue = {
            let mut state = locks.state.lock();
            while !state.stopped && state.news == news {
                if state.queue.is_empty() && none_left {
                    locks.changed.wait(&mut state);
                } else if locks.changed.wait_for(&mut state, pause).timed_out() {
                    pause = (pause * 2).min(RETRY_LAST);
                    break;
                }
            }
            if state.stopped {
                return;
            }
            if state.news != news {
                pause = RETRY_FIRST;
            }
            news = state.news;
            std::mem::take(&mut state.queue)
        };
        none_left = locks.give_up_left(&handles);
        let waiting: Vec<_> =
            queue.into_iter().filter_map(|waiting| locks.retry(&handles, waiting)).collect();
        let waiting = break_circles(&locks, waiting);
        if waiting.is_empty() {
            continue;
        }
        let mut state = locks.state.lock();
        // New requests queue behind the ones that waited before.
        let later = std::mem::replace(&mut state.queue, waiting);
        state.queue.extend(later);
        if state.abandoned {
            std::mem::forget(std::mem::take(&mut state.queue));
        }
    }
}

#[cfg(test)]
mod tests;
