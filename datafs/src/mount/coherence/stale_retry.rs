//! Stale retries: the threads that the kernel makes walk a path a second time after ESTALE, and the files held
//! for them.
//!
//! The mount refuses a node as stale when it has gone, or lost a name, since the kernel's lookup. The kernel
//! then walks the path once more and looks up each name. The node found on that second walk may also go before
//! the kernel uses it. A second ESTALE would reach the program, which a local disk never causes. So the mount
//! holds the node that a thread finds on its second walk. It existed during the system call, which is all that
//! the call may ask for.
//!
//! The mount opens a file for the thread as soon as it is found, so that its data is not freed. The kernel may
//! not cache the names of a second walk: a later call must see changes that others have closed meanwhile.
//!
//! A thread that is refused a change of names also walks a second time. So does one that opens a file whose
//! size in the kernel may be old: its lookup refreshes the size. Several threads may do so at once.
//!
//! Creation at an existing name is refused in the same way, since the kernel checks no permission after it. The
//! mount holds the existing file for the second walk. If the name is gone by then, the held file answers the
//! lookup. So creation and removal by others never make the call fail.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::fs::OpenFile;
use crate::node::{Attr, Node};

/// After ESTALE, allow 30 s for the retry. It comes at once unless the machine is overloaded.
const EXPECTED: Duration = Duration::from_secs(30);
/// Time limit of a lookup on the second walk, which may take as long as a commit by others.
const SERVED: Duration = Duration::from_secs(300);
/// How long the mount keeps what a thread has found. On a loaded machine the thread, or the request that it sends next,
/// may wait for seconds. The mount must not read `/proc/THREAD/syscall` to find out: that read waits for an `execve` of
/// the thread, which waits for the mount.
const KEPT: Duration = Duration::from_secs(5);

/// The kind of a refused request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::mount) enum Refused {
    Node,
    /// An open of a file whose size the lookup on the second walk refreshes.
    Size,
    /// A lookup or creation in a directory.
    Name,
    /// A change of names, one of them in this directory, that lead elsewhere than the kernel was told.
    Change,
    /// The removal of such a name.
    Removal,
}

/// How a thread reached the file that it opens.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::mount) struct Arrival {
    /// The thread has found the file on its second walk.
    pub(in crate::mount) found: bool,
    /// The thread was refused in order to refresh the size, and its lookup has done so.
    pub(in crate::mount) sized: bool,
    /// The thread was refused the file just before. It cannot reach another file, as by `/proc/self/fd`.
    pub(in crate::mount) again: bool,
}

impl Arrival {
    /// The file was found on the second walk.
    pub(in crate::mount) const FOUND: Arrival = Arrival { found: true, sized: false, again: false };
}

/// A node that a thread has found on its second walk.
#[derive(Debug)]
pub(in crate::mount) struct Found {
    pub(in crate::mount) attr: Attr,
    /// The target of a symbolic link.
    pub(in crate::mount) target: Option<OsString>,
    /// Keeps a file's data from being freed.
    _file: Option<OpenFile>,
}

impl Found {
    pub(in crate::mount) fn new(attr: Attr, target: Option<OsString>, file: Option<OpenFile>) -> Found {
        Found { attr, target, _file: file }
    }
}

#[derive(Debug)]
struct StaleRetry {
    refused: Refused,
    node: Node,
    found: Option<Arc<Found>>,
    /// The name in the directory `node` at which the thread tried to create a file, and the existing node.
    existing: Option<(OsString, Arc<Found>)>,
    since: Instant,
    until: Instant,
}

/// The threads that were refused a request a short time ago.
#[derive(Debug, Default)]
pub(in crate::mount) struct StaleRetries {
    /// Number of threads; read at each lookup.
    count: AtomicUsize,
    threads: Mutex<HashMap<u32, StaleRetry>>,
}

impl StaleRetries {
    /// Notes that a thread is refused a request. Returns false when a retry is useless: the thread was refused
    /// the same just before and has found nothing else. Also false for a thread without an ID in this
    /// namespace.
    pub(in crate::mount) fn refuse(&self, thread: u32, refused: Refused, node: Node) -> bool {
        if thread == 0 {
            return false;
        }
        let before = self.insert(thread, refused, node, None);
        before.is_none_or(|before| (before.refused, before.node) != (refused, node) || before.found.is_some())
    }

    /// Notes that a thread is refused creation at an existing name of a directory.
    pub(in crate::mount) fn refuse_creation(&self, thread: u32, parent: Node, name: &OsStr, existing: Found) {
        if thread != 0 {
            let existing = (name.to_owned(), Arc::new(existing));
            drop(self.insert(thread, Refused::Name, parent, Some(existing)));
        }
    }

    fn insert(
        &self,
        thread: u32,
        refused: Refused,
        node: Node,
        existing: Option<(OsString, Arc<Found>)>,
    ) -> Option<StaleRetry> {
        let since = Instant::now();
        let retry = StaleRetry { refused, node, found: None, existing, since, until: since + EXPECTED };
        let mut threads = self.threads.lock();
        let before = threads.insert(thread, retry);
        self.count.store(threads.len(), Ordering::Release);
        before
    }

    /// The existing node at a name where the thread was refused creation.
    pub(in crate::mount) fn existing(&self, thread: u32, parent: Node, name: &OsStr) -> Option<Arc<Found>> {
        let threads = self.threads.lock();
        let retry = threads.get(&thread).filter(|retry| retry.node == parent)?;
        let (at, found) = retry.existing.as_ref()?;
        (at == name).then(|| Arc::clone(found))
    }

    /// Whether a thread is on its second walk. Extends its time limit to [`SERVED`].
    pub(in crate::mount) fn serves(&self, thread: u32) -> bool {
        if self.count.load(Ordering::Acquire) == 0 {
            return false;
        }
        let mut threads = self.threads.lock();
        let retry = threads.get_mut(&thread);
        retry.map(|retry| retry.until = Instant::now() + SERVED).is_some()
    }

    /// Holds the node that a thread has found until it finds another. For a hard link the kernel looks up the
    /// new name, which does not exist, after the file.
    pub(in crate::mount) fn keep(&self, thread: u32, found: Option<Arc<Found>>) {
        let mut threads = self.threads.lock();
        let before = threads.get_mut(&thread).and_then(|retry| {
            retry.until = Instant::now() + KEPT;
            found.and_then(|found| retry.found.replace(found))
        });
        drop(threads);
        // Closing the file may take a transaction.
        drop(before);
    }

    /// The node that a thread has found, if it is this one.
    pub(in crate::mount) fn found(&self, thread: u32, node: Node) -> Option<Arc<Found>> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let found = self.threads.lock().get(&thread)?.found.clone()?;
        Some(found).filter(|found| found.attr.node == node)
    }

    /// [`StaleRetries::found`] for a thread that has reached the node; ends its retry.
    pub(in crate::mount) fn take(&self, thread: u32, node: Node) -> Option<Arc<Found>> {
        let found = self.found(thread, node)?;
        let mut threads = self.threads.lock();
        let retry = threads.remove(&thread);
        self.count.store(threads.len(), Ordering::Release);
        drop(threads);
        drop(retry);
        Some(found)
    }

    /// How a thread reached the file that it opens, and the handle that keeps the file's data until the open.
    pub(in crate::mount) fn arrive(&self, thread: u32, node: Node) -> (Arrival, Option<Arc<Found>>) {
        if self.count.load(Ordering::Acquire) == 0 {
            return (Arrival::default(), None);
        }
        let (mut sized, mut again) = (false, false);
        if let Some(retry) = self.threads.lock().get_mut(&thread)
            && retry.node == node
            && matches!(retry.refused, Refused::Node | Refused::Size)
        {
            sized = retry.refused == Refused::Size;
            again = true;
            // The thread no longer walks the path.
            retry.refused = Refused::Node;
        }
        let found = self.take(thread, node);
        (Arrival { found: found.is_some(), sized: sized && found.is_some(), again }, found)
    }

    /// Ends the retry of a thread.
    pub(in crate::mount) fn forget(&self, thread: u32) {
        let mut threads = self.threads.lock();
        let retry = threads.remove(&thread);
        self.count.store(threads.len(), Ordering::Release);
        drop(threads);
        // Closing what it has found may take a transaction.
        drop(retry);
    }

    /// Whether a thread walks a path to refresh the size of a node.
    pub(in crate::mount) fn walks(&self, node: Node) -> bool {
        // A thread may have reached another file, and its limit been extended there.
        let walks = |retry: &StaleRetry| {
            (retry.refused, retry.node) == (Refused::Size, node) && retry.since.elapsed() < EXPECTED
        };
        self.count.load(Ordering::Acquire) > 0 && self.threads.lock().values().any(walks)
    }

    /// Whether a thread retries a refused change of names in this directory. Ends the retry if so.
    pub(in crate::mount) fn changes_again(&self, thread: u32, parent: Node) -> bool {
        if self.count.load(Ordering::Acquire) == 0 {
            return false;
        }
        let is_change = |retry: &StaleRetry| {
            matches!(retry.refused, Refused::Change | Refused::Removal) && retry.node == parent
        };
        let again = self.threads.lock().get(&thread).is_some_and(is_change);
        if again {
            self.forget(thread);
        }
        again
    }

    /// A name is missing on the second walk of a thread. A removal then fails in the kernel, so the thread
    /// sends no retry.
    pub(in crate::mount) fn misses(&self, thread: u32) {
        let is_removal = |retry: &StaleRetry| retry.refused == Refused::Removal;
        if self.threads.lock().get(&thread).is_some_and(is_removal) {
            self.forget(thread);
        }
    }

    /// The earliest expiry of a retry.
    pub(in crate::mount) fn due(&self) -> Option<Instant> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        self.threads.lock().values().map(|retry| retry.until).min()
    }

    /// Gives up what no thread has come back for by then.
    pub(in crate::mount) fn give_up(&self, now: Instant) {
        let mut threads = self.threads.lock();
        let late: Vec<_> = threads.extract_if(|_, retry| retry.until <= now).collect();
        self.count.store(threads.len(), Ordering::Release);
        drop(threads);
        drop(late);
    }

    /// Drops all retries.
    pub(in crate::mount) fn clear(&self) {
        let all = std::mem::take(&mut *self.threads.lock());
        self.count.store(0, Ordering::Release);
        drop(all);
    }
}

#[cfg(test)]
mod tests;
