//! System calls that walk their path a second time, and what they find then.
//!
//! A node that has gone, or lost a name, since the kernel has looked it up is refused as stale. The kernel
//! then walks the path once more, asking for each name. What it finds may go as well before it comes back
//! with it: a second refusal would reach the program, which a local disk never does. So what a thread finds
//! on its second way is kept for it. It was there during the system call, and that is all that the call may
//! ask for.
//!
//! A file is opened for the thread as soon as it is found, so that nobody takes its bytes away. The kernel
//! may not believe these names: a later call, which has to see what others have closed meanwhile, asks for
//! its own.
//!
//! A thread that is refused a change of names is sent on its second way as well. So is one that opens a file of which
//! the kernel may have an old size: its look-up brings the size. Several threads may do so at once.
//!
//! Creation at a name that exists is refused in the same way, since the kernel checks no permission after it. The
//! existing file is held for the second walk. It answers that walk's look-up if the name is gone by then, so that
//! creation and removal by others never make the call fail.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fuser::{Errno, Request};
use parking_lot::Mutex;

use super::answer::Adapter;
use super::caller::{
    CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CallBy, call_by, has_capability, is_in_group, may_walk,
};
use super::coherence::Kept;
use super::outcome;
use crate::error::{Error, Result};
use crate::fs::acl;
use crate::fs::{Attr, FileKind, Node, OpenFile, OpenFlags, Owner};

/// How long after a refusal a thread may set out on its second way. It does so at once, unless the machine has
/// too much to do.
const EXPECTED: Duration = Duration::from_secs(30);
/// How long it may be served on it: finding something may take as long as a commit of others.
const SERVED: Duration = Duration::from_secs(300);
/// How long what it has found is kept for it, and then again as long as it may still be in the same system call, up to
/// [`EXPECTED`] after the refusal.
const KEPT: Duration = Duration::from_secs(1);
/// Files at a name that are gone by the time they are opened, one after the other.
const ATTEMPTS: u32 = 100;

/// What was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    Node,
    /// A file that is opened, of which the look-up on the second way brings the size.
    Size,
    /// A name in a directory that has gone.
    Name,
    /// A change of names, one of them in this directory, that lead elsewhere than the kernel was told.
    Change,
    /// The removal of such a name.
    Removal,
}

/// How a thread comes to a file that it opens.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Arrival {
    /// Its path has led here during the same system call.
    pub(super) found: bool,
    /// It was sent to bring the size, and the kernel has got that with the look-up.
    pub(super) sized: bool,
    /// It was refused the file just before. It has no other way, as by `/proc/self/fd`.
    pub(super) again: bool,
}

impl Arrival {
    /// The file was found during the system call.
    pub(super) const FOUND: Arrival = Arrival { found: true, sized: false, again: false };
}

/// What a thread has found on its second way.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) attr: Attr,
    /// Of a symbolic link.
    pub(super) target: Option<OsString>,
    /// Keeps a file's bytes.
    _file: Option<OpenFile>,
}

/// A file that was opened by its creation.
#[derive(Debug)]
pub(super) struct Created {
    pub(super) attr: Attr,
    pub(super) file: OpenFile,
    /// It did not exist before.
    pub(super) is_new: bool,
}

/// Outcome of a creation.
#[derive(Debug)]
pub(super) enum Creation {
    /// The file is open.
    Opened(Box<Created>),
    /// The name exists. The kernel has to walk the path again, since it has not checked whether the caller may open what
    /// is there.
    Exists,
    /// The name exists on the second walk, and owner and mode deny what the caller wants.
    Denied,
}

#[derive(Debug)]
struct StaleRetry {
    refused: Refused,
    node: Node,
    found: Option<Arc<Found>>,
    /// The name in the directory `node` at which the thread was to create a file, and what it led to.
    existing: Option<(OsString, Arc<Found>)>,
    since: Instant,
    until: Instant,
}

/// The threads that were refused something a short time ago.
#[derive(Debug, Default)]
pub(super) struct StaleRetries {
    /// How many: asked at each look-up.
    count: AtomicUsize,
    threads: Mutex<HashMap<u32, StaleRetry>>,
}

impl StaleRetries {
    /// Notes that a thread is refused something. False when it was refused the same just before and has
    /// found nothing else, or cannot be told from others: it has no other way.
    pub(super) fn refuse(&self, thread: u32, refused: Refused, node: Node) -> bool {
        if thread == 0 {
            return false;
        }
        let before = self.insert(thread, refused, node, None);
        before.is_none_or(|before| (before.refused, before.node) != (refused, node) || before.found.is_some())
    }

    /// Notes that a thread is refused creation at a name in a directory, which leads to something.
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

    /// What a name led to when the thread was refused creation there.
    fn existing(&self, thread: u32, parent: Node, name: &OsStr) -> Option<Arc<Found>> {
        let threads = self.threads.lock();
        let retry = threads.get(&thread).filter(|retry| retry.node == parent)?;
        let (at, found) = retry.existing.as_ref()?;
        (at == name).then(|| Arc::clone(found))
    }

    /// Whether a thread is on its second way. It is expected no longer, but served.
    fn serves(&self, thread: u32) -> bool {
        if self.count.load(Ordering::Acquire) == 0 {
            return false;
        }
        let mut threads = self.threads.lock();
        let retry = threads.get_mut(&thread);
        retry.map(|retry| retry.until = Instant::now() + SERVED).is_some()
    }

    /// Keeps what a thread has found until it finds something else: for a hard link the kernel looks the new name, which
    /// leads to nothing, up after the file.
    fn keep(&self, thread: u32, found: Option<Arc<Found>>) {
        let mut threads = self.threads.lock();
        let before = threads.get_mut(&thread).and_then(|retry| {
            retry.until = Instant::now() + KEPT;
            found.and_then(|found| retry.found.replace(found))
        });
        drop(threads);
        // Closing it may take a transaction.
        drop(before);
    }

    /// What a thread has found when it comes with it.
    pub(super) fn found(&self, thread: u32, node: Node) -> Option<Arc<Found>> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let found = self.threads.lock().get(&thread)?.found.clone()?;
        Some(found).filter(|found| found.attr.node == node)
    }

    /// [`StaleRetries::found`] by a thread that has arrived with it.
    pub(super) fn take(&self, thread: u32, node: Node) -> Option<Arc<Found>> {
        let found = self.found(thread, node)?;
        let mut threads = self.threads.lock();
        let retry = threads.remove(&thread);
        self.count.store(threads.len(), Ordering::Release);
        drop(threads);
        drop(retry);
        Some(found)
    }

    /// How a thread comes to a file that it opens, and what keeps the file's bytes until it has done so.
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
            // It walks no longer.
            retry.refused = Refused::Node;
        }
        let found = self.take(thread, node);
        (Arrival { found: found.is_some(), sized: sized && found.is_some(), again }, found)
    }

    /// A thread has no more to come back for.
    pub(super) fn forget(&self, thread: u32) {
        let mut threads = self.threads.lock();
        let retry = threads.remove(&thread);
        self.count.store(threads.len(), Ordering::Release);
        drop(threads);
        // Closing what it has found may take a transaction.
        drop(retry);
    }

    /// Whether a thread walks a path to bring the size of a node.
    pub(super) fn walks(&self, node: Node) -> bool {
        // One may have come to another file, and be served there.
        let walks = |retry: &StaleRetry| {
            (retry.refused, retry.node) == (Refused::Size, node) && retry.since.elapsed() < EXPECTED
        };
        self.count.load(Ordering::Acquire) > 0 && self.threads.lock().values().any(walks)
    }

    /// Whether a thread comes back with a change of names that it was refused. It is served no longer.
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

    /// A name on the second way of a thread has gone. The kernel answers a removal so, and the thread does not come back.
    fn misses(&self, thread: u32) {
        let is_removal = |retry: &StaleRetry| retry.refused == Refused::Removal;
        if self.threads.lock().get(&thread).is_some_and(is_removal) {
            self.forget(thread);
        }
    }

    /// When something is to be given up, at the earliest.
    pub(super) fn due(&self) -> Option<Instant> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        self.threads.lock().values().map(|retry| retry.until).min()
    }

    /// Gives up what no thread has come back for by then. A thread that has found something may not have had a
    /// processor since, on a machine that has too much to do: it is waited for as long as that may be so.
    pub(super) fn give_up(&self, now: Instant) {
        let mut threads = self.threads.lock();
        let late: Vec<_> = threads
            .extract_if(|thread, retry| {
                let is_late = retry.until <= now;
                if is_late && retry.found.is_some() && now < retry.since + EXPECTED && may_walk(*thread) {
                    retry.until = now + KEPT;
                    return false;
                }
                is_late
            })
            .collect();
        self.count.store(threads.len(), Ordering::Release);
        drop(threads);
        drop(late);
    }

    /// Gives everything up.
    pub(super) fn clear(&self) {
        let all = std::mem::take(&mut *self.threads.lock());
        self.count.store(0, Ordering::Release);
        drop(all);
    }
}

impl Adapter {
    /// What a name in a live directory is, and whether the kernel may believe it. `None` when it is not
    /// there, [`Error::NotFound`] when the directory is not.
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
            // The thread that gives up has to look again: this goes sooner than what it waits for.
            self.coherence.wake();
        }
        answer
    }

    /// What a name in a live directory is, and what is to be kept of it. Where a file loses its name before it is open,
    /// it is kept from being freed; where that comes too late each time, nothing is kept.
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

    /// Opens a file that was found a moment ago, so that its bytes stay.
    fn hold(&self, node: Node) -> Result<OpenFile> {
        let view = &self.handles.view;
        match view.open(node, OpenFlags::READ) {
            // Somebody has taken its name, and may do so each time.
            Err(error) if error.is_not_found() => view.open_orphan(node),
            opened => opened,
        }
    }

    /// Creates a file and opens it, unless the name exists.
    ///
    /// The kernel walks the path again once per system call. On the second walk the file is created when what is there
    /// goes again, and opened or refused where owner and mode alone decide.
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
            // A second refusal would reach the program.
            if attempts > 1 && self.mode_denies(request, &existing.attr, flags) {
                return Ok(Creation::Denied);
            }
            retries.refuse_creation(thread, parent, name, existing);
            // It is going to forget this.
            self.coherence.wake();
        }
        Ok(Creation::Exists)
    }

    /// Whether owner and mode of a file allow a caller to open it, and nothing else has a say: no access control list,
    /// and no sticky directory, in which the kernel may protect the files of others.
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

    /// Whether owner and mode of a file keep a caller from opening it, as far as that can be told: not with an access
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

    /// The errno of an error of a request that names a node the kernel has looked up before: when it is
    /// gone, the kernel looks the path up again and finds what has replaced it.
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

    /// Has the kernel walk a path again that leads to the same or to something else.
    pub(super) fn walk_again(&self, thread: u32, refused: Refused, node: Node) -> Errno {
        // A thread that comes back is served.
        self.coherence.retries.refuse(thread, refused, node);
        self.sent_again()
    }

    /// The answer to a thread that is noted as one that walks its path again.
    pub(super) fn sent_again(&self) -> Errno {
        // The thread that gives up has to look again.
        self.coherence.wake();
        outcome::refusal(Errno::ESTALE)
    }

    /// Whether a change by path may go on: not where the path that the kernel has walked without asking may lead
    /// elsewhere by now. With `by_descriptor` it may come by that of an open file, too: then no path is walked again,
    /// and none is wrong.
    ///
    /// The kernel does not say which it is, but the system call of the thread does. Where that cannot be read, as
    /// without the right to trace the program, the first change of an open file that has lost a name is refused.
    ///
    /// Returns what the thread has found on its second way, to be held until the change is made: it keeps the file's
    /// bytes. The change succeeds where that is gone by then, as it would have a moment before.
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
            // Else it would be refused every second time.
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
                // Directories that are open are not counted.
                CallBy::Unknown if attr.kind == FileKind::Directory => true,
                CallBy::Unknown => thread == 0 && self.handles.is_open(node),
            };
        if passes {
            return Ok(None);
        }
        if thread == 0 {
            // It is not known to come back.
            self.coherence.settles_names(&attr);
        }
        Err(self.walk_again(thread, Refused::Node, node))
    }

    /// Has the kernel walk the path again.
    pub(super) fn refused(&self, (thread, refused, node): (u32, Refused, Node)) -> Errno {
        let has_another_way = self.coherence.retries.refuse(thread, refused, node);
        // It is going to forget this.
        self.coherence.wake();
        // A thread that comes back with the same holds it: as a directory that another mount has removed. On a
        // local disk, too, there is nothing in it. What comes from a thread that cannot be told from others is
        // not known to come back.
        let none = !has_another_way && (refused == Refused::Name || thread != 0);
        outcome::refusal(if none { Errno::ENOENT } else { Errno::ESTALE })
    }
}

#[cfg(test)]
mod tests;
