//! Requests whose path the kernel walks a second time, and nodes that are gone: see `coherence/stale_retry.rs`
//! and `coherence/removed.rs`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt as _;
use std::sync::Arc;

use fuser::{Errno, Request};

use super::answer::Adapter;
use crate::error::{Error, Result};
use crate::fs::{OpenFile, OpenFlags, Owner, Unlinked, acl};
use crate::mount::caller::{
    CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CallBy, call_by, has_capability, is_in_group,
};
use crate::mount::coherence::Kept;
use crate::mount::coherence::removed::Removed;
use crate::mount::coherence::stale_retry::{Arrival, Found, Refused};
use crate::mount::handover::resent::completing;
use crate::mount::outcome;
use crate::node::{Attr, FileKind, Node};

/// Most attempts to open a file at a name, when each one found is gone before the open.
const ATTEMPTS: u32 = 100;

/// A file that a create request has opened.
#[derive(Debug)]
pub(in crate::mount) struct Created {
    pub(in crate::mount) attr: Attr,
    pub(in crate::mount) file: OpenFile,
    /// The request has created the file.
    pub(in crate::mount) is_new: bool,
}

/// Result of a create request.
#[derive(Debug)]
pub(in crate::mount) enum Creation {
    /// The file is open.
    Opened(Box<Created>),
    /// The name exists. The kernel must walk the path again, since it has not checked whether the caller may
    /// open the file.
    Exists,
    /// The name exists on the second walk, and owner and mode deny the open.
    Denied,
}

impl Adapter {
    /// Looks a name up in a live directory; also returns whether the kernel may cache the name. `None` when the
    /// name does not exist, [`Error::NotFound`] when the directory does not.
    pub(in crate::mount) fn find(
        &self,
        thread: u32,
        parent: Node,
        name: &OsStr,
    ) -> Result<Option<(Attr, bool)>> {
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
            return Ok(Some((attr, Some(Found::new(attr, target, file)))));
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
    pub(in crate::mount) fn create_new(
        &self,
        request: &Request,
        (parent, name): (Node, &OsStr),
        (mode, umask): (u32, u32),
        flags: OpenFlags,
    ) -> Result<Creation> {
        let (view, retries) = (completing(&self.handles, request), &self.coherence.retries);
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

    /// Opens the file that an earlier server has created for the same request.
    pub(in crate::mount) fn open_created(
        &self,
        (parent, name): (Node, &OsStr),
        flags: OpenFlags,
    ) -> Result<Creation> {
        let view = &self.handles.view;
        let node = view.lookup(parent, name)?.node;
        let flags = OpenFlags { truncate: false, exclusive: false, ..flags };
        let (file, attr) = view.open_with_attr(node, flags)?;
        Ok(Creation::Opened(Box::new(Created { attr, file, is_new: true })))
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
    pub(in crate::mount) fn mode_denies(&self, request: &Request, attr: &Attr, flags: OpenFlags) -> bool {
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
    pub(in crate::mount) fn failed_for(
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
    pub(in crate::mount) fn walk_again(&self, thread: u32, refused: Refused, node: Node) -> Errno {
        // The retry of the thread passes.
        self.coherence.retries.refuse(thread, refused, node);
        self.sent_again()
    }

    /// The ESTALE reply to a thread that is noted as walking its path again.
    pub(in crate::mount) fn sent_again(&self) -> Errno {
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
    pub(in crate::mount) fn check_named(
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
    pub(in crate::mount) fn refused(&self, (thread, refused, node): (u32, Refused, Node)) -> Errno {
        let has_another_way = self.coherence.retries.refuse(thread, refused, node);
        // The coherence thread drops this when it expires.
        self.coherence.wake();
        // A thread that retries with the same node holds it, as a directory that another mount has removed. On
        // a local disk, too, such a directory is empty. The retry of a thread without an ID in this namespace
        // cannot be recognized.
        let none = !has_another_way && (refused == Refused::Name || thread != 0);
        outcome::refusal(if none { Errno::ENOENT } else { Errno::ESTALE })
    }

    /// Notes that a node has lost a name. If it was the last one, keeps the node's state for as long as the
    /// kernel knows it.
    pub(in crate::mount) fn note_removed(&self, unlinked: Unlinked) {
        let Unlinked { ino, inode, target } = unlinked;
        self.coherence.loses_name(ino, inode.names_version);
        if inode.nlink == 0 {
            let attr = inode.attr(Node { snapshot: 0, ino });
            self.coherence.removes(Removed { attr, target: target.map(OsString::from_vec) });
        }
    }
}
