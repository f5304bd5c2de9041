//! Nodes that this mount has removed and that programs still hold: as a working directory, or by a descriptor
//! that is opened with `O_PATH`. The volume has nothing of them any more, but as on a local disk they tell
//! what they are. A regular file that is open is not among them: its record stays until the last close.

use std::ffi::{OsStr, OsString};
use std::time::SystemTime;

use super::answer::Adapter;
use crate::error::Result;
use crate::fs::{Attr, FileKind, Node};

/// What a removed node was.
#[derive(Debug, Clone)]
pub(super) struct Removed {
    pub(super) attr: Attr,
    /// Of a symbolic link.
    pub(super) target: Option<OsString>,
}

impl Adapter {
    /// What a name stands for that is going to be removed, if it is the last one.
    pub(super) fn held(&self, parent: Node, name: &OsStr) -> Option<Removed> {
        let view = &self.handles.view;
        let attr = view.find(parent, name).ok()??;
        if attr.nlink > 1 && attr.kind != FileKind::Directory {
            return None;
        }
        let target = match attr.kind {
            FileKind::Symlink => Some(view.readlink(attr.node).ok()?),
            _ => None,
        };
        Some(Removed { attr: Attr { nlink: 0, ..attr }, target })
    }

    /// Keeps what was removed for as long as the kernel knows it. It is shown only when the volume has
    /// nothing of it: another process may have changed the name since it was looked up.
    pub(super) fn note_removed(&self, held: Option<Removed>, removed: &Result<()>) {
        if let (Some(mut held), Ok(())) = (held, removed) {
            held.attr.ctime = SystemTime::now();
            self.coherence.removes(held);
        }
    }
}
