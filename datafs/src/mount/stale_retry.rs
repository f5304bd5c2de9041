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

use fuser::{Errno, Request};
use parking_lot::Mutex;

use super::answer::Adapter;
use super::caller::{CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CallBy, call_by, has_capability, is_in_group};
use super::coherence::Kept;
use super::outcome;
use crate::error::{Error, Result};
use crate::fs::{OpenFile, OpenFlags, Owner, acl};
use crate::node::{Attr, FileKind, Node};

/// After ESTALE, allow 30 s for the retry. It comes at once unless the machine is overloaded.
const EXPECTED: Duration = Duration::from_secs(30);
/// Time limit of a lookup on the second walk, which may take as long as a commit by others.
const SERVED: Duration = Duration::from_secs(300);
/// How long the mount keeps what a thread has found. On a loaded machine the thread, or the request that it sends next,
/// may wait for seconds. The mount must not read `/proc/THREAD/syscall` to find out: that read waits for an `execve` of
/// the thread, which waits for the mount.
const KEPT: Duration = Duration::from_secs(5);
/// Most attempts to open a file at a name, when each one found is gone before the open.
const ATTEMPTS: u32 = 100;

/// The kind of a refused request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
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
pub(super) struct Arrival {
    /// The thread has found the file on its second walk.
    pub(super) found: bool,
    /// The thread was refused in order to refresh the size, and its lookup has done so.
    pub(super) sized: bool,
    /// The thread was refused the file just before. It cannot reach another file, as by `/proc/self/fd`.
    pub(super) again: bool,
}

impl Arrival {
    /// The file was found on the second walk.
    pub(super) const FOUND: Arrival = Arrival { found: true, sized: false, again: false };
}

/// A node that a thread has found on its second walk.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) attr: Attr,
    /// The target of a symbolic link.
    pub(super) target: Option<OsString>,
    /// Keeps a file's data from being freed.
    _file: Option<OpenFile>,
}

/// A file that a create request has opened.
#[derive(Debug)]
pub(super) struct Created {
    pub(super) attr: Attr,
    pub(super) file: OpenFile,
    /// The request has created the file.
    pub(super) is_new: bool,
}

/// Result of a create request.
#[derive(Debug)]
pub(super) enum Creation {
    /// The file is open.
    Opened(Box<Created>),
    /// The name exists. The kernel must walk the path again, since it has not checked whether the caller may
    /// open the file.
    Exists,
    /// The name exists on the second walk, and owner and mode deny the open.
    Denied,
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
pub(super) struct StaleRetries {
    /// Number of threads; read at each lookup.
    count: AtomicUsize,
    threads: Mutex<HashMap<u32, StaleRetry>>,
}

impl StaleRetries {
    /// Notes that a thread is refused a request. Returns false when a retry is useless: the thread was refused
    /// the same just before and has found nothing else. Also false for a thread without an ID in this
    /// namespace.
    pub(super) fn refuse(&self, thread: u32, refused: Refused, node: Node) -> bool {
        if thread == 0 {
            return false;
        }
        let before = self.insert(thread, refused, node, None);
        before.is_none_or(|before| (before.refused, before.node) != (refused, node) || before.found.is_some())
    }

    /// Notes that a thread is refused creation at an existing name of a directory.
    fn refuse_creation(&self, thread: u32, parent: Node, name: &OsStr, existing: Found) {
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
    fn existing(&self, thread: u32, parent: Node, name: &OsStr) -> Option<Arc<Found>> {
        let threads = self.threads.lock();
        let retry = threads.get(&thread).filter(|retry| retry.node == parent)?;
        let (at, found) = retry.existing.as_ref()?;
        (at == name).then(|| Arc::clone(found))
    }

    /// Whether a thread is on its second walk. Extends its time limit to [`SERVED`].
    fn serves(&self, thread: u32) -> bool {
        if self.count.load(Ordering::Acquire) == 0 {
            return false;
        }
        let mut threads = self.threads.lock();
        let retry = threads.get_mut(&thread);
        retry.map(|retry| retry.until = Instant::now() + SERVED).is_some()
    }

    /// Holds the node that a thread has found until it finds another. For a hard link the kernel looks up the
    /// new name, which does not exist, after the file.
    fn keep(&self, thread: u32, found: Option<Arc<Found>>) {
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
    pub(super) fn found(&self, thread: u32, node: Node) -> Option<Arc<Found>> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let found = self.threads.lock().get(&thread)?.found.clone()?;
        Some(found).filter(|found| found.attr.node == node)
    }

    /// [`StaleRetries::found`] for a thread that has reached the node; ends its retry.
    pub(super) fn take(&self, thread: u32, node: Node) -> Option<Arc<Found>> {
        let found = self.found(thread, node)?;
        let mut threads = self.threads.lock();
        let retry = threads.remove(&thread);
        self.count.store(threads.len(), Ordering::Release);
        drop(threads);
        drop(retry);
        Some(found)
    }

    /// How a thread reached the file that it opens, and the handle that keeps the file's data until the open.
    pub(super) fn arrive(&self, thread: u32, node: Node) -> (Arrival, Option<Arc<Found>>) {
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
    pub(super) fn forget(&self, thread: u32) {
        let mut threads = self.threads.lock();
        let retry = threads.remove(&thread);
        self.count.store(threads.len(), Ordering::Release);
        drop(threads);
        // Closing what it has found may take a transaction.
        drop(retry);
    }

    /// Whether a thread walks a path to refresh the size of a node.
    pub(super) fn walks(&self, node: Node) -> bool {
        // A thread may have reached another file, and its limit been extended there.
        let walks = |retry: &StaleRetry| {
            (retry.refused, retry.node) == (Refused::Size, node) && retry.since.elapsed() < EXPECTED
        };
        self.count.load(Ordering::Acquire) > 0 && self.threads.lock().values().any(walks)
    }

    /// Whether a thread retries a refused change of names in this directory. Ends the retry if so.
    pub(super) fn changes_again(&self, thread: u32, parent: Node) -> bool {
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
    fn misses(&self, thread: u32) {
        let is_removal = |retry: &StaleRetry| retry.refused == Refused::Removal;
        if self.threads.lock().get(&thread).is_some_and(is_removal) {
            self.forget(thread);
        }
    }

    /// The earliest expiry of a retry.
    pub(super) fn due(&self) -> Option<Instant> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        self.threads.lock().values().map(|retry| retry.until).min()
    }

    /// Gives up what no thread has come back for by then.
    pub(super) fn give_up(&self, now: Instant) {
        let mut threads = self.threads.lock();
        let late: Vec<_> = threads.extract_if(|_, retry| retry.until <= now).collect();
        self.count.store(threads.len(), Ordering::Release);
        drop(threads);
        drop(late);
    }

    /// Drops all retries.
    pub(super) fn clear(&self) {
        let all = std::mem::take(&mut *self.threads.lock());
        self.count.store(0, Ordering::Release);
        drop(all);
    }
}

impl Adapter {
    /// Looks a name up in a live directory; also returns whether the kernel may cache the name. `None` when the
    /// name does not exist, [`Error::NotFound`] when the directory does not.
    pub(super) fn find(&self, thread: u32, parent: Node, name: &OsStr) -> Result<Option<(Attr, bool)>> {
        let retries = &self.coherence.retries;
        if !retries.serves(thread) {
            return Ok(self.handles.view.find(parent, name)?.map(|attr| (attr, true)));
        }
        let (answer, held) = match self.find_and_hold(parent, name) {
            Ok(Some((attr, held))) => (Ok(Some((attr, false))), held.map(Arc::new)),
            Ok(None) => {
                let existing = retries.existing(thread, parent, name);
                retries.misses(thread);
                (Ok(existing.as_ref().map(|existing| (existing.attr, false))), existing)
            }
            Err(error) => (Err(error), None),
        };
        let holds = held.is_some();
        retries.keep(thread, held);
        if holds {
            // The thread that drops expired retries must compute its deadline again: this one expires sooner.
            self.coherence.wake();
        }
        answer
    }

    /// Looks a name up in a live directory and holds the node. A file that loses its name before the open is
    /// kept as an orphan. If that comes too late each time, nothing is held.
    fn find_and_hold(&self, parent: Node, name: &OsStr) -> Result<Option<(Attr, Option<Found>)>> {
        let view = &self.handles.view;
        let mut last = None;
        for _ in 0..ATTEMPTS {
            let Some((attr, target)) = view.find_with_target(parent, name)? else { return Ok(None) };
            let file = match attr.kind {
                FileKind::File => match self.hold(attr.node) {
                    Err(error) if error.is_not_found() => {
                        last = Some((attr, None));
                        self.catch_up(parent)?;
                        continue;
                    }
                    held => Some(held?),
                },
                _ => None,
            };
            return Ok(Some((attr, Some(Found { attr, target, _file: file }))));
        }
        Ok(last)
    }

    /// Opens a file that was found a moment ago, so that its data stays.
    fn hold(&self, node: Node) -> Result<OpenFile> {
        let view = &self.handles.view;
        match view.open(node, OpenFlags::READ) {
            // Another process has removed its name, and may do so on each attempt. A file that cannot be held, as on a
            // full disk, counts as gone: the caller asked for a lookup, which must not fail for that.
            Err(error) if error.is_not_found() => view.open_orphan(node).map_err(|_| error),
            opened => opened,
        }
    }

    /// Creates a file and opens it, unless the name exists.
    ///
    /// The kernel retries once per system call. On the second walk this creates the file if the existing one
    /// goes again. It opens or refuses the existing file where owner and mode alone decide.
    pub(super) fn create_new(
        &self,
        request: &Request,
        (parent, name): (Node, &OsStr),
        (mode, umask): (u32, u32),
        flags: OpenFlags,
    ) -> Result<Creation> {
        let (view, retries) = (&self.handles.view, &self.coherence.retries);
        let thread = request.pid();
        let owner = Owner { uid: request.uid(), gid: request.gid() };
        let create = OpenFlags { exclusive: true, ..flags };
        let attempts = if retries.serves(thread) { ATTEMPTS } else { 1 };
        let mut existing = None;
        for attempt in 1.. {
            match view.create_masked(parent, name, mode, umask, owner, create) {
                Err(Error::Exists { .. }) if !flags.exclusive => {}
                created => {
                    let opened =
                        |(attr, file)| Creation::Opened(Box::new(Created { attr, file, is_new: true }));
                    return created.map(opened);
                }
            }
            let found = self.find_and_hold(parent, name)?;
            if attempts > 1
                && let Some((attr, _)) = &found
                && self.mode_allows(request, parent, attr, flags)
                && !(flags.truncate && self.handles.is_executed(attr.node))
            {
                match self.open_file(request, attr.node, flags, (Arrival::FOUND, false)) {
                    Err(error) if error.is_not_found() => {}
                    Ok((_, _, Kept::Denied)) => {}
                    result => {
                        let opened = |(file, attr, _)| {
                            Creation::Opened(Box::new(Created { attr, file, is_new: false }))
                        };
                        return result.map(opened);
                    }
                }
            }
            let exists = found.is_some();
            existing = found.and_then(|(_, held)| held).or(existing);
            if attempt >= if exists { attempts } else { ATTEMPTS } {
                break;
            }
        }
        if let Some(existing) = existing {
            // A second ESTALE would reach the program.
            if attempts > 1 && self.mode_denies(request, &existing.attr, flags) {
                return Ok(Creation::Denied);
            }
            retries.refuse_creation(thread, parent, name, existing);
            // The coherence thread drops this when it expires.
            self.coherence.wake();
        }
        Ok(Creation::Exists)
    }

    /// Whether owner and mode of a file alone allow a caller to open it. False with an access control list, and
    /// in a sticky directory, in which the kernel may protect other users' files.
    fn mode_allows(&self, request: &Request, parent: Node, attr: &Attr, flags: OpenFlags) -> bool {
        let view = &self.handles.view;
        let wanted = u32::from(flags.read) << 2 | u32::from(flags.write || flags.truncate) << 1;
        let allows = |class: u32| attr.mode >> class & wanted == wanted;
        let is_own = attr.uid == request.uid();
        if attr.kind != FileKind::File {
            return false;
        }
        if is_own && allows(6) {
            return true;
        }
        if !view.getattr(parent).is_ok_and(|parent| parent.mode & 0o1000 == 0) {
            return false;
        }
        if has_capability(request.pid(), CAP_DAC_OVERRIDE) {
            return true;
        }
        let list = view.xattr_get(attr.node, acl::ACCESS.as_ref());
        !is_own
            && matches!(list, Err(Error::NoAttribute { .. }))
            && is_in_group(request, attr.gid).is_some_and(|member| allows(if member { 3 } else { 0 }))
    }

    /// Whether owner and mode of a file deny a caller the open. False where that is unknown, as with an access
    /// control list.
    pub(super) fn mode_denies(&self, request: &Request, attr: &Attr, flags: OpenFlags) -> bool {
        let wanted = u32::from(flags.read) << 2 | u32::from(flags.write || flags.truncate) << 1;
        let allows = |class: u32| attr.mode >> class & wanted == wanted;
        let has = |capability| has_capability(request.pid(), capability);
        if request.uid() == 0 || has(CAP_DAC_OVERRIDE) || wanted == 4 && has(CAP_DAC_READ_SEARCH) {
            return false;
        }
        if attr.uid == request.uid() {
            return !allows(6);
        }
        let list = self.handles.view.xattr_get(attr.node, acl::ACCESS.as_ref());
        matches!(list, Err(Error::NoAttribute { .. }))
            && is_in_group(request, attr.gid).is_some_and(|member| !allows(if member { 3 } else { 0 }))
    }

    /// The errno for a failed request that names a node from an earlier lookup. When the node is gone, ESTALE
    /// makes the kernel look the path up again and find its replacement.
    pub(super) fn failed_for(
        &self,
        operation: &'static str,
        (thread, refused, node): (u32, Refused, Node),
        error: &Error,
    ) -> Errno {
        if !error.is_not_found() || !node.is_live() {
            return self.failed_on(operation, node, error);
        }
        self.refused((thread, refused, node))
    }

    /// Makes the kernel walk a path again, which may lead to the same node or another.
    pub(super) fn walk_again(&self, thread: u32, refused: Refused, node: Node) -> Errno {
        // The retry of the thread passes.
        self.coherence.retries.refuse(thread, refused, node);
        self.sent_again()
    }

    /// The ESTALE reply to a thread that is noted as walking its path again.
    pub(super) fn sent_again(&self) -> Errno {
        // The thread that drops expired retries must compute its deadline again.
        self.coherence.wake();
        outcome::refusal(Errno::ESTALE)
    }

    /// Checks whether a change by path may proceed: not where the path that the kernel resolved from its cache
    /// may lead elsewhere by now. With `by_descriptor` the change may come through an open descriptor: then
    /// there is no path to walk again.
    ///
    /// The kernel does not tell the two apart, but the system call of the thread does. Reading it takes the
    /// right to trace the program. Without it, the first change of an open file that has lost a name is
    /// refused.
    ///
    /// Returns the node that the thread has found on its second walk, to be held until the change is made: it
    /// keeps the file's data. If that node is gone by then, the change succeeds, as it would have a moment
    /// before.
    pub(super) fn check_named(
        &self,
        operation: &'static str,
        thread: u32,
        node: Node,
        by_descriptor: bool,
    ) -> std::result::Result<Option<Arc<Found>>, Errno> {
        if !node.is_live() {
            return Ok(None);
        }
        let (arrival, held) = self.coherence.retries.arrive(thread, node);
        if held.is_some() {
            return Ok(held);
        }
        let failed = |error| self.failed_for(operation, (thread, Refused::Node, node), &error);
        let attr = self.catch_up(node).and_then(|()| self.handles.view.getattr(node)).map_err(failed)?;
        if arrival.again {
            self.coherence.retries.forget(thread);
            // Otherwise every second request would be refused.
            if by_descriptor && call_by(thread) == CallBy::Unknown {
                self.coherence.settles_names(&attr);
            }
            return Ok(None);
        }
        if !self.coherence.has_lost_name(&attr) {
            return Ok(None);
        }
        let passes = by_descriptor
            && match call_by(thread) {
                CallBy::Path => false,
                CallBy::Other => true,
                // The handle table does not count open directories.
                CallBy::Unknown if attr.kind == FileKind::Directory => true,
                CallBy::Unknown => thread == 0 && self.handles.is_open(node),
            };
        if passes {
            return Ok(None);
        }
        if thread == 0 {
            // Its retry cannot be recognized.
            self.coherence.settles_names(&attr);
        }
        Err(self.walk_again(thread, Refused::Node, node))
    }

    /// Makes the kernel walk the path again, or fails with ENOENT if that is useless.
    pub(super) fn refused(&self, (thread, refused, node): (u32, Refused, Node)) -> Errno {
        let has_another_way = self.coherence.retries.refuse(thread, refused, node);
        // The coherence thread drops this when it expires.
        self.coherence.wake();
        // A thread that retries with the same node holds it, as a directory that another mount has removed. On
        // a local disk, too, such a directory is empty. The retry of a thread without an ID in this namespace
        // cannot be recognized.
        let none = !has_another_way && (refused == Refused::Name || thread != 0);
        outcome::refusal(if none { Errno::ENOENT } else { Errno::ESTALE })
    }
}

#[cfg(test)]
mod tests;
