//! Removed nodes that programs still hold: as a working directory, or by a descriptor opened with `O_PATH`. The
//! volume has no record of them any more. As on a local disk, `stat` still returns their attributes. An open
//! regular file is not among them: its record stays until the last close.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;

use super::answer::Adapter;
use crate::fs::Unlinked;
use crate::node::{Attr, Node};

/// The last state of a removed node.
#[derive(Debug, Clone)]
pub(super) struct Removed {
    pub(super) attr: Attr,
    /// The target of a symbolic link.
    pub(super) target: Option<OsString>,
}

impl Adapter {
    /// Notes that a node has lost a name. If it was the last one, keeps the node's state for as long as the
    /// kernel knows it.
    pub(super) fn note_removed(&self, unlinked: Unlinked) {
        let Unlinked { ino, inode, target } = unlinked;
        self.coherence.loses_name(ino, inode.names_version);
        if inode.nlink == 0 {
            let attr = inode.attr(Node { snapshot: 0, ino });
            self.coherence.removes(Removed { attr, target: target.map(OsString::from_vec) });
        }
    }
}
