//! Listings of the model test: directories that are read a few entries at a time while names come and go.

use std::collections::BTreeSet;

use super::world::{World, walk};
use crate::fs::tests::reference::Body;
use crate::node::Node;

/// A directory that is read a few entries at a time.
pub(super) struct Listing {
    ino: u64,
    node: Node,
    cursor: u64,
    seen: Vec<String>,
    /// Names that existed the whole time, and those that existed at some time.
    always: BTreeSet<String>,
    ever: BTreeSet<String>,
}

impl World {
    pub(super) fn list(&mut self, actor: usize, path: &[u8]) {
        let view = self.session(actor).view.clone();
        let Ok(ino) = self.tree.find(path) else { return };
        let Ok(children) = self.tree.children(ino) else { return };
        let names: BTreeSet<String> = children.keys().cloned().collect();
        let node = walk(&view, path).unwrap();
        self.session(actor).listing =
            Some(Listing { ino, node, cursor: 0, seen: Vec::new(), always: names.clone(), ever: names });
    }

    pub(super) fn list_on(&mut self, actor: usize, count: usize) {
        let session = self.session(actor);
        let Some(mut listing) = session.listing.take() else { return };
        let page = session.view.readdir(listing.node, listing.cursor, count).unwrap();
        if let Some(last) = page.last() {
            listing.cursor = last.cursor;
            let names = page.into_iter().map(|entry| entry.name.into_string().unwrap());
            listing.seen.extend(names.filter(|name| name != "." && name != ".."));
            session.listing = Some(listing);
            return;
        }
        for name in &listing.always {
            let times = listing.seen.iter().filter(|seen| *seen == name).count();
            assert_eq!(times, 1, "{name} was there the whole time");
        }
        for name in &listing.seen {
            assert!(listing.ever.contains(name), "{name} was never there");
        }
    }

    /// Records which names have come and gone in the directories that are being read.
    pub(super) fn note_names(&mut self) {
        for session in self.sessions.iter_mut().flatten() {
            let Some(listing) = &mut session.listing else { continue };
            let Some(inode) = self.tree.inodes.get(&listing.ino) else {
                session.listing = None;
                continue;
            };
            let Body::Directory(children) = &inode.body else { continue };
            listing.always.retain(|name| children.contains_key(name));
            listing.ever.extend(children.keys().cloned());
        }
    }
}
