//! Restoration of a mount's state by its next server: open files, locks, files without a name.

use std::collections::HashSet;
use std::sync::Arc;

use super::held::Held;
use super::journal::{self, Left, OpenRecord};
use crate::error::Result;
use crate::fs::{OpenFile, OpenFlags};
use crate::mount::coherence::Doubt;
use crate::mount::fuse::passthrough::Backing;
use crate::mount::handles::{Handles, Lost};
use crate::mount::locks::Locks;
use crate::node::Node;

impl Held {
    /// Takes over what earlier servers of the mount had, before this one serves. Returns the open files.
    pub(in crate::mount) fn restore(
        &self,
        handles: &Handles,
        locks: &Locks,
        left: &Left,
    ) -> Result<Vec<Doubt>> {
        let view = &handles.view;
        let shared = &view.shared;
        let is_live = !view.is_snapshot();
        if is_live {
            if !shared.open.set_journal(Arc::clone(&self.journal) as _) {
                return Err(Held::second());
            }
            self.give_session(view)?;
            if left.inos_end > 0 {
                shared.skip_inos(view.volume, left.inos_end)?;
            }
        }
        handles.keep_in(Arc::clone(&self.journal), self.life());
        // Opened before the takeover, which keeps the files without a name that are open.
        let open: Vec<_> = left
            .open
            .iter()
            .map(|(slot, record)| {
                let file = OpenFile::inherit(view, Node::from_u64(record.node), flags_of(record));
                (*slot, record, file)
            })
            .collect();
        let own = shared.session.id();
        for old in self.sessions().into_iter().filter(|old| is_live && *old != own) {
            for (node, owner) in shared.take_over_locks(old, view.volume)? {
                locks.inherit(node, owner);
            }
            shared.take_over_orphans(old)?;
            handles.inherit_completed(shared.take_over_completed(old)?);
            shared.end_taken_over(old)?;
            // The holder may forget the session only if its end survives this process.
            shared.meta.settle()?;
            self.ended_session(old)?;
        }
        for (slot, lock) in &left.locks {
            if !locks.inherit_through(*lock, *slot) {
                self.journal.remove(*slot);
            }
        }
        let uncommitted: HashSet<u64> = left.uncommitted.iter().copied().collect();
        let mut doubts = Vec::new();
        // Those of open files as well, where the journal did not list all.
        let mut untold = uncommitted.clone();
        let (mut files, mut lost_files) = (0u64, 0u64);
        for (slot, record, file) in open {
            let node = file.node();
            let is_uncommitted = left.overflowed || uncommitted.contains(&node.ino);
            if is_uncommitted && node.is_live() && is_live {
                untold.insert(node.ino);
            }
            let lost = self.lost(record, &file, is_uncommitted)?;
            let mut record = *record;
            if lost.is_none() && is_uncommitted && node.is_live() {
                record.bits |= journal::UNTOLD;
            }
            if is_uncommitted || lost.is_some() {
                // In the journal, before it forgets the uncommitted inodes: this server may die before it has told the
                // kernel.
                record.data_version = journal::UNKNOWN_VERSION;
            }
            files += 1;
            lost_files += u64::from(lost.is_some());
            let backing = match (record.backing, handles.backing_of(node), handles.registrar()) {
                (0, ..) | (_, None, None) => None,
                (_, Some(backing), _) => Some(backing),
                (id, None, Some(registrar)) => Some(Arc::new(Backing::inherited(registrar, id))),
            };
            handles.inherit(file, (slot, &record), lost, backing);
            doubts.push(Doubt { node, data_version: record.data_version });
        }
        self.journal.lose(&untold);
        if left.overflowed {
            // The open files have recorded their lost writes.
            self.journal.clear_overflow();
        }
        if is_live {
            self.took_over(view)?;
        }
        if self.life() > 1 {
            tracing::info!(
                server = self.life(),
                files,
                lost_files,
                "took a mount over from the server before"
            );
        }
        Ok(doubts)
    }

    /// What the crash of the server before has cost an open file. Writes through other files of the inode are not
    /// counted: [`journal::UNTOLD`] says that they are to be reported.
    fn lost(&self, record: &OpenRecord, file: &OpenFile, uncommitted: bool) -> Result<Option<Lost>> {
        let is = |bit| record.bits & bit != 0;
        if !file.is_inherited()? {
            return Ok(Some(Lost::File));
        }
        let writes = is(journal::LOST) || is(journal::WRITE) && is(journal::WROTE) && uncommitted;
        Ok(writes.then_some(Lost::Writes))
    }
}

fn flags_of(record: &OpenRecord) -> OpenFlags {
    let is = |bit| record.bits & bit != 0;
    OpenFlags {
        read: is(journal::READ),
        write: is(journal::WRITE),
        append: is(journal::APPEND),
        ..OpenFlags::default()
    }
}
