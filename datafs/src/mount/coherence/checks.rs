//! Checks of the kernel's cached data when a request depends on it, and updates of the record after this
//! mount's changes of names.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::time::Instant;

use super::inode_table::{Asker, Told, access_of, name_stamp, stamp};
use super::stale_retry::{Arrival, Refused};
use super::{Coherence, Kept, NOTIFIED_MAX, News, QUEUE_MAX};
use crate::fs::{Moved, NameTarget};
use crate::node::{Attr, Node};

impl Coherence {
    /// Checks the kernel's cached data of a file at an open by a thread. `attr` and `list` are the present
    /// attributes and the stamp of the access control list; `arrival` tells how the thread reached the file.
    /// Outdated attributes are revoked. `allows` decides where the kernel may have dropped the owner and mode
    /// of the second walk's reply. `sizes` says that the open does not change the size.
    pub(in crate::mount) fn opens(
        &self,
        (attr, list): (&Attr, u32),
        (thread, arrival): (u32, Arrival),
        sizes: bool,
        allows: impl FnOnce() -> bool,
    ) -> Kept {
        let now_ms = self.now_ms();
        let mut known = self.known.lock();
        let lost_name = known.has_lost_name(attr, now_ms);
        if known.get(attr.node.ino).is_none() {
            let is_unknown = known.was_crowded();
            drop(known);
            if is_unknown {
                // An earlier server of the mount may have told the kernel older ones.
                self.say(&News::Attributes(attr.node.ino));
            }
            return Kept::Nothing;
        }
        let Some(entry) = known.get_mut(attr.node.ino) else { return Kept::Nothing };
        let access = access_of(attr);
        let access_changed = entry.access != access || entry.access_in_doubt || entry.has_other_list(list);
        let is_expected = thread == 0 && !lost_name && entry.expects_access(access, list);
        let comes_back = arrival.found || arrival.again || is_expected;
        if lost_name || access_changed {
            if !comes_back {
                drop(known);
                if access_changed {
                    // The kernel has checked access by the old ones.
                    self.say(&News::Attributes(attr.node.ino));
                }
                return self.has_walked_again(thread, (attr, list));
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
        // A reply to a thread that walks now may not have arrived in the kernel.
        let has_size = self.is_own(entry.data_version, attr) || !walks && entry.has_size(attr);
        if sizes && !has_size && !comes_back {
            drop(known);
            return self.has_walked_again(thread, (attr, list));
        }
        if arrival.sized && !walks {
            entry.settle_size();
        }
        // Not the names: older ones may still lead here.
        entry.settle_access(access);
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

    /// Makes the kernel walk a path again for a thread. The lookup refreshes the size, unless a notification
    /// arrives meanwhile. So this waits for notifications in progress, and new ones are delayed.
    fn has_walked_again(&self, thread: u32, (attr, list): (&Attr, u32)) -> Kept {
        let is_known = self.retries.refuse(thread, Refused::Size, attr.node);
        let mut known = self.known.lock();
        // A thread without an ID in this namespace passes on its retry.
        if !is_known {
            known.settle_names(attr);
            if let Some(entry) = known.get_mut(attr.node.ino) {
                entry.expects(attr, list);
            }
        }
        let until = Instant::now() + NOTIFIED_MAX;
        while known.get(attr.node.ino).is_some_and(|entry| entry.notifying > 0)
            && !self.notified.wait_until(&mut known, until).timed_out()
        {}
        Kept::Stale
    }

    /// Whether a node with these attributes has lost a name that the kernel may still know.
    pub(in crate::mount) fn has_lost_name(&self, attr: &Attr) -> bool {
        let now_ms = self.now_ms();
        self.known.lock().has_lost_name(attr, now_ms)
    }

    /// Accepts the names of a node with these attributes, so that the next request is not refused for a lost
    /// name. Used for a thread that retries, has no ID in this namespace, or has no path.
    pub(in crate::mount) fn settles_names(&self, attr: &Attr) {
        self.known.lock().settle_names(attr);
    }

    /// Begins a request of a thread to change names. To be called first: the kernel did not decide the request
    /// by names that it learns later.
    pub(in crate::mount) fn asks(&self, thread: u32, again: bool, unlinks: bool) -> Asker {
        let arrived_ms = self.now_ms();
        Asker { thread, arrived: self.known.lock().clock(), arrived_ms, again, unlinks }
    }

    /// Whether the kernel decided a request by the node that a name leads to now.
    pub(in crate::mount) fn is_told(&self, target: &NameTarget<'_>, asker: &Asker) -> Told {
        let named = name_stamp(target.parent, target.name, target.inode.names_version);
        self.known.lock().is_told(target.ino, named, asker)
    }

    /// This mount has moved a node to a name in a directory. Unless the kernel has surely made the same move,
    /// the name is expired.
    pub(in crate::mount) fn moves(&self, moved: Moved, parent: Node, name: &OsStr, told: Told) {
        let Moved { ino, names_version } = moved;
        self.known.lock().moves(ino, names_version, name_stamp(parent.ino, name, names_version), told);
        if told == Told::Surely {
            return;
        }
        // On the notification thread: a notification waits for the directory lock, which the kernel holds until
        // the reply.
        let mut queue = self.queue.lock();
        if queue.news.len() < QUEUE_MAX {
            queue.news.push_back(News::Name(parent.ino, name.as_bytes().to_vec()));
            self.arrived.notify_all();
        }
    }

    /// This mount has removed a name of a node, which now has this version of its names.
    pub(in crate::mount) fn loses_name(&self, ino: u64, names_version: u32) {
        self.known.lock().loses_name(ino, names_version);
    }

    /// This mount has removed a name of a node. The kernel may have removed it from another node.
    pub(in crate::mount) fn outdates_attributes(&self, ino: u64) {
        // Attributes alone: the notification does not block, so a serving thread may send it.
        self.say(&News::Attributes(ino));
    }

    /// Notes the stamp of the access control list in the next reply.
    pub(in crate::mount) fn tells_list(&self, node: Node, list: u32) {
        self.known.lock().tells_list(node.ino, list);
    }

    /// This mount has changed an access control list, and the kernel drops its copy.
    pub(in crate::mount) fn drops_list(&self, node: Node) {
        self.known.lock().drops_list(node.ino);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::mount::coherence::Telling;
    use crate::mount::coherence::inode_table::{NO_LIST, list_stamp};
    use crate::mount::convert::Inodes;
    use crate::{Config, Datafs};

    /// Runs `test` with the record of a mount that is not attached, and a file that its kernel knows by a name
    /// in the root.
    fn with_file(test: impl FnOnce(&Coherence, &Attr, (Node, &OsStr))) {
        let home = tempfile::tempdir().unwrap();
        let datafs = Datafs::open(home.path(), &Config::default()).unwrap();
        let name = "v".parse().unwrap();
        datafs.volume_create(&name).unwrap();
        let view = datafs.view(&"v".parse().unwrap()).unwrap();
        view.write_file("file", b"x").unwrap();
        let coherence = Coherence::new(&view, Inodes::new(view.root()));
        let attr = view.stat("file").unwrap();
        let at = (view.root(), OsStr::new("file"));
        coherence.answers(&attr, coherence.moment(), Some(Telling::locked(at)));
        test(&coherence, &attr, at);
    }

    fn opens(
        coherence: &Coherence,
        (attr, list): (&Attr, u32),
        thread: u32,
        arrival: Arrival,
        allows: bool,
    ) -> Kept {
        coherence.opens((attr, list), (thread, arrival), true, || allows)
    }

    #[test]
    fn a_thread_of_another_namespace_is_refused_a_changed_access_once() {
        with_file(|coherence, attr, at| {
            let first = Arrival::default();
            assert_eq!(
                opens(coherence, (attr, NO_LIST), 0, first, false),
                Kept::Nothing,
                "nothing was changed"
            );
            let changed = Attr { mode: attr.mode ^ 0o044, ..*attr };
            assert_eq!(opens(coherence, (&changed, NO_LIST), 0, first, true), Kept::Stale);
            coherence.answers(&changed, coherence.moment(), Some(Telling::looked_up(at, 0)));
            assert_eq!(opens(coherence, (&changed, NO_LIST), 0, first, false), Kept::Denied);
            assert_eq!(opens(coherence, (&changed, NO_LIST), 0, first, true), Kept::Nothing);
            assert_eq!(
                opens(coherence, (&changed, NO_LIST), 0, first, false),
                Kept::Nothing,
                "that is settled"
            );

            // An access control list.
            coherence.tells_list(attr.node, NO_LIST);
            let list = list_stamp(b"list");
            assert_eq!(opens(coherence, (&changed, list), 0, first, true), Kept::Stale);
            coherence.answers(&changed, coherence.moment(), Some(Telling::looked_up(at, 0)));
            coherence.tells_list(attr.node, list);
            assert_eq!(opens(coherence, (&changed, list), 0, first, true), Kept::Nothing);
            assert_eq!(opens(coherence, (&changed, list), 0, first, false), Kept::Nothing, "that is settled");

            // A lost name, without a lookup: the thread uses a descriptor.
            let moved = Attr { names_version: changed.names_version + 1, ..changed };
            assert_eq!(opens(coherence, (&moved, list), 0, first, true), Kept::Stale);
            assert_eq!(opens(coherence, (&moved, list), 0, first, true), Kept::Nothing);
        });
    }

    #[test]
    fn an_open_by_an_old_name_walks_again_after_a_look_up_of_the_new_one() {
        with_file(|coherence, attr, (root, _)| {
            let moved = Attr { names_version: attr.names_version + 1, ..*attr };
            let named = Telling::looked_up((root, OsStr::new("file.1")), 5);
            coherence.answers(&moved, coherence.moment(), Some(named));
            assert!(coherence.has_lost_name(&moved));
            let opened = |arrival| opens(coherence, (&moved, NO_LIST), 6, arrival, true);
            assert_eq!(opened(Arrival::default()), Kept::Stale);
            assert_eq!(opened(Arrival::FOUND), Kept::Nothing);
            assert_eq!(opened(Arrival::default()), Kept::Stale, "another path may lead here");
        });
    }

    #[test]
    fn the_kernel_looks_up_what_it_may_have_moved_wrongly() {
        with_file(|coherence, attr, (root, _)| {
            let moved = || Moved { ino: attr.node.ino, names_version: attr.names_version + 1 };
            coherence.moves(moved(), root, OsStr::new("to"), Told::Surely);
            assert!(coherence.queue.lock().news.is_empty());
            coherence.moves(moved(), root, OsStr::new("to"), Told::Likely);
            let news = coherence.queue.lock().news.clone();
            assert_eq!(news, [News::Name(root.ino, b"to".to_vec())]);
        });
    }
}
