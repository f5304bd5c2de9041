//! Requests for locks: what can be answered at once is, everything that waits does so on a thread of
//! its own, so that waiting for a lock never keeps the serving threads from serving.
//!
//! Taking a lock makes the kernel forget what it has of a file that others have changed; giving one up
//! commits what was written before. So whoever locks sees what the last holder wrote, on any mount.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fuser::{Errno, ReplyEmpty, ReplyLock};
use parking_lot::{Condvar, Mutex};

use super::caller::is_interrupted;
use super::coherence::Coherence;
use super::errno;
use super::handles::Handles;
use crate::error::Result;
use crate::fs::{Attr, Blocker, FileLock, LOCK_END_MAX, LockFamily, LockOwner, Locking, Node};

/// How soon a lock that others hold is tried again, at first and at last: changes that other processes
/// make wake the waiting as well, so this only bounds what is missed.
const RETRY_FIRST: Duration = Duration::from_millis(1);
const RETRY_LAST: Duration = Duration::from_millis(50);
/// The kernel tells of the end of an open file, which ends its `flock`, after `close` has returned: who
/// does not want to wait gets this much time for it nevertheless.
const CLOSING_TIME: Duration = Duration::from_millis(10);

/// The locks that were taken through one mount, and who waits for one.
#[derive(Debug)]
pub(super) struct Locks {
    held: Mutex<HashMap<(Node, LockOwner), HashSet<u64>>>,
    /// Entries of `held`, so that most closes need not look.
    held_count: AtomicUsize,
    coherence: Arc<Coherence>,
    /// Locks whose files are closed and that could not be given up.
    left: Mutex<Vec<(Node, LockOwner)>>,
    state: Mutex<State>,
    changed: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct State {
    queue: Vec<Waiting>,
    /// Counts what may let somebody in.
    news: u64,
    stopped: bool,
}

/// A request that is answered later.
#[derive(Debug)]
struct Waiting {
    node: Node,
    wanted: FileLock,
    handle: u64,
    /// The thread that waits, to see whether it was interrupted: the library does not pass that on.
    pid: u32,
    until: Until,
    reply: ReplyEmpty,
}

#[derive(Debug)]
enum Until {
    /// It is held already; the kernel must forget what it has first.
    Forgotten(Attr),
    Held,
    /// Then it is refused.
    Instant(Instant),
}

/// A request for a lock, as the kernel sends it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wish {
    pub(super) node: Node,
    pub(super) handle: u64,
    pub(super) lock: FileLock,
    /// The range is given up.
    pub(super) gives_up: bool,
    pub(super) waits: bool,
    pub(super) pid: u32,
}

impl Locks {
    pub(super) fn new(coherence: Arc<Coherence>) -> Locks {
        Locks {
            held: Mutex::default(),
            held_count: AtomicUsize::new(0),
            coherence,
            left: Mutex::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
            thread: Mutex::default(),
        }
    }

    /// Starts the thread on which requests wait.
    pub(super) fn start(self: &Arc<Self>, handles: &Arc<Handles>) -> std::io::Result<()> {
        let (locks, handles) = (Arc::downgrade(self), Arc::downgrade(handles));
        let thread =
            std::thread::Builder::new().name("datafs-locks".into()).spawn(move || run(&locks, &handles))?;
        *self.thread.lock() = Some(thread);
        Ok(())
    }

    /// Answers everybody who waits with an error, and ends the thread.
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
            waiting.reply.error(Errno::EINTR);
        }
    }

    /// Something was committed or let go: those who wait try again.
    pub(super) fn wake(&self) {
        let mut state = self.state.lock();
        state.news += 1;
        if !state.queue.is_empty() {
            self.changed.notify_all();
        }
    }

    /// Whether a lock on a node was taken through this mount and not given up.
    pub(super) fn has(&self, node: Node) -> bool {
        self.held_count.load(Ordering::Acquire) > 0 && self.held.lock().keys().any(|(held, _)| *held == node)
    }

    /// Answers a request for a lock, now or later.
    pub(super) fn set(&self, handles: &Handles, wish: Wish, reply: ReplyEmpty) {
        match self.try_set(handles, &wish) {
            Ok(Answer::Now(errno)) => answer(reply, errno),
            Ok(Answer::Later(until)) => {
                let Wish { node, lock: wanted, handle, pid, .. } = wish;
                let mut state = self.state.lock();
                if state.stopped {
                    // The mount ends.
                    return reply.error(Errno::EINTR);
                }
                state.queue.push(Waiting { node, wanted, handle, pid, until, reply });
                state.news += 1;
                self.changed.notify_all();
            }
            Err(error) => {
                tracing::warn!(%error, node = wish.node.to_u64(), "locking");
                reply.error(errno(&error));
            }
        }
    }

    fn try_set(&self, handles: &Handles, wish: &Wish) -> Result<Answer> {
        let Wish { node, lock, handle, .. } = *wish;
        if wish.gives_up {
            self.give_up(handles, node, lock.owner, (lock.start, lock.end), Some(handle))?;
            return Ok(Answer::Now(None));
        }
        // From now on the owner has it again.
        self.left.lock().retain(|left| *left != (node, lock.owner));
        let blockers = match handles.view.lock(node, lock)? {
            Locking::Held(attr) => {
                return Ok(match self.took(node, lock.owner, handle, attr.as_ref()) {
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
            // Two that share the lock and both want it alone would wait for each other for ever.
            self.give_up(handles, node, lock.owner, (0, LOCK_END_MAX), None)?;
        }
        Ok(Answer::Later(Until::Held))
    }

    /// Notes a lock that is held now. Returns the contents that the kernel does not know yet.
    fn took(&self, node: Node, owner: LockOwner, handle: u64, attr: Option<&Attr>) -> Option<Attr> {
        let mut held = self.held.lock();
        held.entry((node, owner)).or_default().insert(handle);
        self.held_count.store(held.len(), Ordering::Release);
        drop(held);
        attr.filter(|attr| !self.coherence.has_pages(attr)).copied()
    }

    /// Has the kernel read a file anew, to its end, for whoever has locked it through a handle.
    fn refresh(&self, handles: &Handles, handle: u64, attr: &Attr) {
        self.coherence.drops(attr);
        let Some(end) = attr.size.checked_sub(1) else { return };
        // Who may not read through the handle does not ask how far.
        if let Ok(handle) = handles.get(handle)
            && let Ok(last) = handle.file.read_at(end, 1)
            && let [last] = *last
        {
            self.coherence.reaches(attr, last);
        }
    }

    /// Commits what was written to a file, then gives up a range of its locks.
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
        if (start, end) == (0, LOCK_END_MAX) {
            self.gave_up(node, owner);
        }
        published
    }

    fn gave_up(&self, node: Node, owner: LockOwner) {
        let mut held = self.held.lock();
        held.remove(&(node, owner));
        self.held_count.store(held.len(), Ordering::Release);
    }

    /// A process has closed the file: its `fcntl` locks go.
    pub(super) fn flushed(&self, handles: &Handles, node: Node, handle: u64, owner: u64) {
        if self.held_count.load(Ordering::Acquire) == 0 {
            return;
        }
        let owner = LockOwner { family: LockFamily::Fcntl, id: owner };
        if self.held.lock().contains_key(&(node, owner)) {
            self.let_go(handles, node, owner, handle);
        }
    }

    /// An open file is gone: what was locked through it goes, its own `flock` and what was left behind
    /// by who closed it without the kernel telling.
    pub(super) fn released(&self, handles: &Handles, node: Node, handle: u64, flock: Option<u64>) {
        if self.held_count.load(Ordering::Acquire) == 0 {
            return;
        }
        let flock = flock.map(|id| LockOwner { family: LockFamily::Flock, id });
        let owners: Vec<LockOwner> = {
            let held = self.held.lock();
            let through = held.iter().filter(|((held, _), _)| *held == node);
            through
                .filter(|((_, owner), through)| Some(*owner) == flock || through.contains(&handle))
                .map(|((_, owner), _)| *owner)
                .collect()
        };
        for owner in owners {
            self.let_go(handles, node, owner, handle);
        }
    }

    fn let_go(&self, handles: &Handles, node: Node, owner: LockOwner, handle: u64) {
        if let Err(error) = self.give_up(handles, node, owner, (0, LOCK_END_MAX), Some(handle)) {
            tracing::warn!(%error, node = node.to_u64(), "giving up a lock at the close of a file");
            if self.held.lock().contains_key(&(node, owner)) {
                self.left.lock().push((node, owner));
                let mut state = self.state.lock();
                state.news += 1;
                self.changed.notify_all();
            }
        }
    }

    /// Tries again to give up the locks that are left of closed files. Returns whether none is.
    fn give_up_left(&self, handles: &Handles) -> bool {
        // Held meanwhile, so that an owner that comes back takes its lock after this.
        let mut left = self.left.lock();
        left.retain(|(node, owner)| match handles.view.unlock(*node, *owner, 0, LOCK_END_MAX) {
            Ok(_) => {
                self.gave_up(*node, *owner);
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

    /// Answers a question for the lock that would be in the way.
    pub(super) fn get(&self, handles: &Handles, node: Node, lock: FileLock, reply: ReplyLock) {
        match handles.view.lock_in_the_way(node, lock) {
            Ok(None) => reply.locked(lock.start, lock.end, libc::F_UNLCK, 0),
            Ok(Some(Blocker { lock, .. })) => {
                let kind = if lock.exclusive { libc::F_WRLCK } else { libc::F_RDLCK };
                reply.locked(lock.start, lock.end, kind, lock.pid);
            }
            Err(error) => reply.error(errno(&error)),
        }
    }

    /// Tries a waiting request once more; gives it back when it has to go on waiting, with whom it waits
    /// for in this mount.
    fn retry(&self, handles: &Handles, waiting: Waiting) -> Option<(Waiting, Vec<LockOwner>)> {
        let Waiting { node, wanted, .. } = waiting;
        if let Until::Forgotten(attr) = waiting.until {
            self.refresh(handles, waiting.handle, &attr);
            waiting.reply.ok();
            return None;
        }
        match handles.view.lock(node, wanted) {
            Ok(Locking::Held(attr)) => {
                if let Some(attr) = self.took(node, wanted.owner, waiting.handle, attr.as_ref()) {
                    self.refresh(handles, waiting.handle, &attr);
                }
                waiting.reply.ok();
            }
            Ok(Locking::Blocked(blockers)) => {
                if matches!(waiting.until, Until::Instant(until) if Instant::now() >= until) {
                    waiting.reply.error(Errno::EAGAIN);
                } else if is_interrupted(waiting.pid) {
                    waiting.reply.error(Errno::EINTR);
                } else {
                    let here = blockers.iter().filter(|by| by.is_local).map(|by| by.lock.owner).collect();
                    return Some((waiting, here));
                }
            }
            Err(error) => {
                tracing::warn!(%error, node = node.to_u64(), "waiting for a lock");
                waiting.reply.error(errno(&error));
            }
        }
        None
    }
}

enum Answer {
    Now(Option<Errno>),
    Later(Until),
}

fn answer(reply: ReplyEmpty, errno: Option<Errno>) {
    match errno {
        None => reply.ok(),
        Some(errno) => reply.error(errno),
    }
}

/// Refuses those that close a circle of requests that wait for each other (EDEADLK, as for `fcntl` on a
/// local disk). `waiting` is in the order of arrival, and the last to arrive closes a circle. No request in
/// a circle can give anything up, so what was found one after the other holds at once.
fn break_circles(mut waiting: Vec<(Waiting, Vec<LockOwner>)>) -> Vec<Waiting> {
    let fcntl = |waiting: &Waiting| waiting.wanted.owner.family == LockFamily::Fcntl;
    let mut refused = Vec::new();
    for i in (0..waiting.len()).rev() {
        let owner = waiting[i].0.wanted.owner;
        let mut seen = HashSet::new();
        let mut open = waiting[i].1.clone();
        while let Some(one) = open.pop() {
            if one == owner && fcntl(&waiting[i].0) {
                refused.push(i);
                // Without it the circle is open.
                waiting[i].1.clear();
                break;
            }
            if seen.insert(one) {
                let its = waiting.iter().filter(|(waiting, _)| waiting.wanted.owner == one);
                open.extend(its.flat_map(|(_, blockers)| blockers.iter().copied()));
            }
        }
    }
    let mut rest = Vec::with_capacity(waiting.len());
    for (i, (waiting, _)) in waiting.into_iter().enumerate() {
        if refused.contains(&i) {
            waiting.reply.error(Errno::EDEADLK);
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
        let waiting = break_circles(waiting);
        if waiting.is_empty() {
            continue;
        }
        let mut state = locks.state.lock();
        // Those who came meanwhile are behind those who waited before.
        let later = std::mem::replace(&mut state.queue, waiting);
        state.queue.extend(later);
    }
}

#[cfg(test)]
mod tests;
