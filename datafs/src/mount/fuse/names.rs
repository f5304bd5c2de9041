//! Removals and moves of names, checked against the names that the kernel knows.
//!
//! The kernel moves and removes the node that it knows under a name, which another mount may have replaced a
//! moment ago. If the volume moved the new node and the kernel the old one, everything below the new name would
//! reach the old node. So the transaction compares the node of the name with the one that the kernel was told.
//! It refuses a difference as stale: the kernel then looks the names up and repeats the call once.
//!
//! A name that another thread was told a moment ago is in doubt: the kernel may have decided the change by its
//! previous meaning. The mount refuses such a change as well. Where the doubt remains on the second walk, the
//! mount expires the resulting names.
//!
//! The removal of a file is repeated at most once and then removes the file that has the name, because it
//! concerns nothing else. Other changes are refused again if a name was replaced again meanwhile, and the
//! program gets `ESTALE`.

use std::cell::{Cell, RefCell};
use std::ffi::OsStr;

use fuser::{Errno, RenameFlags, ReplyEmpty, Request};

use super::answer::Adapter;
use crate::error::{Error, Result};
use crate::fs::{NameChecks, NameTarget};
use crate::mount::caller::{CAP_FOWNER, has_capability};
use crate::mount::coherence::inode_table::{Asker, Told};
use crate::mount::coherence::stale_retry::Refused;
use crate::mount::handover::resent::{completing, is_completed};
use crate::mount::outcome;
use crate::node::Node;

/// A directory and a name in it.
type Name<'n> = (Node, &'n OsStr);

impl Adapter {
    pub(in crate::mount) fn unlink_name(
        &self,
        request: &Request,
        (parent, name): Name<'_>,
        reply: ReplyEmpty,
    ) {
        if is_completed(&self.handles, request) {
            return reply.ok();
        }
        let change = Change { kind: Refused::Removal, ..Change::arrives(self, request, parent, true) };
        let view = completing(&self.handles, request);
        let removed = change.run(request, |checks| view.unlink_by(parent, name, checks));
        self.changed(&change, "unlink", removed.map(|removed| self.note_removed(removed)), reply);
    }

    pub(in crate::mount) fn rmdir_name(
        &self,
        request: &Request,
        (parent, name): Name<'_>,
        reply: ReplyEmpty,
    ) {
        if is_completed(&self.handles, request) {
            return reply.ok();
        }
        let change = Change { kind: Refused::Removal, ..Change::arrives(self, request, parent, false) };
        let view = completing(&self.handles, request);
        let removed = change.run(request, |checks| view.rmdir_by(parent, name, checks));
        self.changed(&change, "rmdir", removed.map(|removed| self.note_removed(removed)), reply);
    }

    pub(in crate::mount) fn rename_name(
        &self,
        request: &Request,
        from: Name<'_>,
        to: Name<'_>,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        if is_completed(&self.handles, request) {
            return reply.ok();
        }
        let view = completing(&self.handles, request);
        let change = Change::arrives(self, request, from.0, false);
        let renamed = if flags.is_empty() || flags == RenameFlags::RENAME_NOREPLACE {
            let no_replace = !flags.is_empty();
            change.run(request, |checks| view.rename_by(from, to, no_replace, checks)).map(|renamed| {
                if let Some(moved) = renamed.moved {
                    self.coherence.moves(moved, to.0, to.1, change.told());
                }
                if let Some(replaced) = renamed.replaced {
                    self.note_removed(replaced);
                }
            })
        } else if flags == RenameFlags::RENAME_EXCHANGE {
            change.run(request, |checks| view.exchange_by(from, to, checks)).map(|exchanged| {
                if let Some([there, back]) = exchanged {
                    self.coherence.moves(there, to.0, to.1, change.told());
                    self.coherence.moves(back, from.0, from.1, change.told());
                }
            })
        } else {
            Err(Error::Invalid("this way of renaming".into()))
        };
        self.changed(&change, "rename", renamed, reply);
    }

    /// Replies to a change of names.
    fn changed(&self, change: &Change<'_>, operation: &'static str, result: Result<()>, reply: ReplyEmpty) {
        if result.is_ok() {
            for ino in change.unsure.take() {
                self.coherence.outdates_attributes(ino);
            }
        }
        match result {
            // The kernel does not repeat the call a second time.
            Err(_) if change.refused.get() && change.asker.again => {
                reply.error(outcome::failure(Errno::ESTALE))
            }
            Err(_) if change.refused.get() => {
                reply.error(self.walk_again(change.asker.thread, change.kind, change.parent));
            }
            result => self.empty(operation, change.parent, result, reply),
        }
    }
}

/// A change of names that the kernel asks for.
struct Change<'a> {
    adapter: &'a Adapter,
    asker: Asker,
    /// The kind that [`StaleRetries`](crate::mount::coherence::stale_retry::StaleRetries) notes for a refusal.
    kind: Refused,
    parent: Node,
    /// A name led elsewhere than the kernel was told, so the change was not made.
    refused: Cell<bool>,
    /// The kernel may have used the previous meaning of a name.
    likely: Cell<bool>,
    /// Inodes that lost a name, where the kernel may have removed the name from another node.
    unsure: RefCell<Vec<u64>>,
}

impl<'a> Change<'a> {
    /// Begins a change; to be called first. `unlinks` says that the change removes a name of a file that is not
    /// a directory.
    fn arrives(adapter: &'a Adapter, request: &Request, parent: Node, unlinks: bool) -> Change<'a> {
        let (thread, coherence) = (request.pid(), &adapter.coherence);
        let asker = coherence.asks(thread, false, unlinks);
        let asker = Asker { again: coherence.retries.changes_again(thread, parent), ..asker };
        let (refused, likely) = (Cell::new(false), Cell::new(false));
        Change { adapter, asker, kind: Refused::Change, parent, refused, likely, unsure: RefCell::default() }
    }

    /// Whether the kernel has surely made the same change.
    fn told(&self) -> Told {
        if self.likely.get() { Told::Likely } else { Told::Surely }
    }

    /// Makes the change as the calling user. A thread with CAP_FOWNER may make it in any directory.
    fn run<T>(&self, request: &Request, change: impl Fn(NameChecks<'_>) -> Result<T>) -> Result<T> {
        let expects = |target: &NameTarget<'_>| self.expects(target);
        let run = |user| change(NameChecks { user, expects: &expects });
        let user = Some(request.uid()).filter(|user| *user != 0);
        match run(user) {
            Err(Error::NotPermitted { .. })
                if user.is_some() && has_capability(self.asker.thread, CAP_FOWNER) =>
            {
                run(None)
            }
            changed => changed,
        }
    }

    /// Decides inside the transaction, which may run more than once, whether the kernel expects this target.
    fn expects(&self, target: &NameTarget<'_>) -> bool {
        let Asker { again, unlinks, .. } = self.asker;
        let is_told = self.adapter.coherence.is_told(target, &self.asker);
        let told = is_told != Told::No;
        // For a file with several names the record has only the last name that the kernel was told.
        let is_linked = !target.inode.is_directory() && target.inode.nlink > 1;
        let passes = told || unlinks && is_linked || again && (unlinks || is_linked);
        self.refused.set(!passes);
        if is_told != Told::Surely {
            self.likely.set(true);
        }
        let mut unsure = self.unsure.borrow_mut();
        if !told && passes && !unsure.contains(&target.ino) {
            unsure.push(target.ino);
        }
        passes
    }
}
