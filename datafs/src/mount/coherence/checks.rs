//! Checks of what the kernel was told, made when a request depends on it, and what this mount's own changes do to that.

use std::ffi::OsStr;
use std::time::Instant;

use super::{Coherence, Kept, NOTIFIED_MAX, News};
use crate::fs::{Attr, Moved, NameTarget, Node};
use crate::mount::known::{access_of, name_stamp, stamp};
use crate::mount::retry::{Arrival, Refused};

impl Coherence {
    /// What the kernel has of a file that is opened now by a thread, with these attributes and the access control list
    /// of this stamp; `arrival` tells how it came here. What it may not go on using is taken from it.
    /// `allows` decides where the kernel may have dropped the owner and mode that it was told in the second walk.
    /// `sizes` says that the open leaves the size as it is.
    pub(in crate::mount) fn opens(
        &self,
        (attr, list): (&Attr, u32),
        (thread, arrival): (u32, Arrival),
        sizes: bool,
        allows: impl FnOnce() -> bool,
    ) -> Kept {
        let mut known = self.known.lock();
        let Some(entry) = known.get_mut(attr.node.ino) else { return Kept::Nothing };
        let access = access_of(attr);
        let access_changed = entry.access != access || entry.access_in_doubt || entry.has_other_list(list);
        if entry.has_lost_name(attr) || access_changed {
            if !arrival.found && !arrival.again {
                drop(known);
                if access_changed {
                    // The kernel has decided by the old ones.
                    self.say(&News::Attributes(attr.node.ino));
                }
                return self.has_walked_again(thread, attr);
            }
            if access_changed {
                drop(known);
                if !allows() {
                    return Kept::Denied;
                }
                known = self.known.lock();
            }
        }
        let Some(entry) = known.get_mut(attr.node.ino) else { return Kept::Nothing };
        let walks = self.retries.walks(attr.node);
        // An answer to a thread that walks just now may not have arrived there.
        let has_size = self.is_own(entry.data_version, attr) || !walks && entry.has_size(attr);
        if sizes && !has_size && !arrival.found && !arrival.again {
            drop(known);
            return self.has_walked_again(thread, attr);
        }
        if arrival.sized && !walks {
            entry.settle_size();
        }
        entry.settle_names(attr);
        (entry.access, entry.access_in_doubt) = (access, false);
        entry.settle_list(list);
        entry.pages_settled &= self.is_own(entry.data_version, attr);
        entry.data_version = attr.data_version;
        let kept = if entry.pages_settled { Kept::Pages } else { Kept::Nothing };
        let ctime = stamp(attr.ctime);
        let outdated = std::mem::replace(&mut entry.ctime, ctime) != ctime;
        drop(known);
        if outdated {
            // Attributes alone: the notification does not block, so a serving thread may send it.
            self.say(&News::Attributes(attr.node.ino));
        }
        kept
    }

    /// Has the kernel walk a path again for a thread. It brings the size with the look-up, unless it is told of a
    /// change meanwhile: so no notification is under way when it sets out, and none begins.
    fn has_walked_again(&self, thread: u32, attr: &Attr) -> Kept {
        let is_known = self.retries.refuse(thread, Refused::Size, attr.node);
        let mut known = self.known.lock();
        // A thread that cannot be told from others passes when it comes back.
        if !is_known && let Some(entry) = known.get_mut(attr.node.ino) {
            entry.expects_size(attr);
        }
        let until = Instant::now() + NOTIFIED_MAX;
        while known.get(attr.node.ino).is_some_and(|entry| entry.notifying > 0)
            && !self.notified.wait_until(&mut known, until).timed_out()
        {}
        Kept::Stale
    }

    /// Whether something with these attributes has lost a name that the kernel may know it by.
    pub(in crate::mount) fn has_lost_name(&self, attr: &Attr) -> bool {
        self.known.lock().get(attr.node.ino).is_some_and(|entry| entry.has_lost_name(attr))
    }

    /// A thread comes back with something of these attributes, by a name that it has looked up or has no other for.
    pub(in crate::mount) fn settles_names(&self, attr: &Attr) {
        if let Some(entry) = self.known.lock().get_mut(attr.node.ino) {
            entry.settle_names(attr);
        }
    }

    /// How many names the kernel was told so far.
    pub(in crate::mount) fn names_told(&self) -> u32 {
        self.known.lock().clock()
    }

    /// Whether a request that arrived when the kernel had been told `arrived` names was decided by what the name
    /// leads to. `again` says that the kernel has looked the name up for this request.
    pub(in crate::mount) fn is_told(&self, target: &NameTarget<'_>, arrived: u32, again: bool) -> bool {
        let named = name_stamp(target.parent, target.name, target.inode.names_version);
        self.known.lock().is_told(target.ino, named, arrived, again)
    }

    /// This mount has moved something to a name in a directory.
    pub(in crate::mount) fn moves(&self, moved: Moved, parent: Node, name: &OsStr) {
        let Moved { ino, names_version } = moved;
        self.known.lock().moves(ino, names_version, name_stamp(parent.ino, name, names_version));
    }

    /// This mount has taken a name from a node, which has this version of its names since.
    pub(in crate::mount) fn loses_name(&self, ino: u64, names_version: u32) {
        self.known.lock().loses_name(ino, names_version);
    }

    /// This mount has taken a name from a node. It is not sure that the kernel knows from which one.
    pub(in crate::mount) fn outdates_attributes(&self, ino: u64) {
        // Attributes alone: the notification does not block, so a serving thread may send it.
        self.say(&News::Attributes(ino));
    }

    /// Notes the access control list that the kernel is going to be told, by its stamp.
    pub(in crate::mount) fn tells_list(&self, node: Node, list: u32) {
        self.known.lock().tells_list(node.ino, list);
    }

    /// This mount has changed an access control list, and the kernel drops the one that it has.
    pub(in crate::mount) fn drops_list(&self, node: Node) {
        self.known.lock().drops_list(node.ino);
    }
}
