//! Removed nodes that programs still hold: as a working directory, or by a descriptor opened with `O_PATH`. The
//! volume has no record of them any more. As on a local disk, `stat` still returns their attributes. An open
//! regular file is not among them: its record stays until the last close.

use std::ffi::OsString;

use crate::node::Attr;

/// The last state of a removed node.
#[derive(Debug, Clone)]
pub(in crate::mount) struct Removed {
    pub(in crate::mount) attr: Attr,
    /// The target of a symbolic link.
    pub(in crate::mount) target: Option<OsString>,
}
