//! Nodes that this mount has removed and that programs still hold: as a working directory, or by a descriptor
//! that is opened with `O_PATH`. The volume has nothing of them any more, but as on a local disk they tell
//! what they are. A regular file that is open is not among them: its record stays until the last close.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;

use super::answer::Adapter;
use crate::fs::{Attr, Node, Unlinked};

/// What a removed node was.
#[derive(Debug, Clone)]
pub(super) struct Removed {
    pub(super) attr: Attr,
    /// Of a symbolic link.
    pub(super) target: Option<OsString>,
}

impl Adapter {
    /// Notes what has lost a name, and keeps what has lost its last one for as long as the kernel knows it.
    pub(super) fn note_removed(&self, unlinked: Unlinked) {
        let Unlinked { ino, inode, target } = unlinked;
        self.coherence.loses_name(ino, inode.names_version);
        if inode.nlink == 0 {
            let attr = inode.attr(Node { snapshot: 0, ino });
            self.coherence.removes(Removed { attr, target: target.map(OsString::from_vec) });
        }
    }
}
