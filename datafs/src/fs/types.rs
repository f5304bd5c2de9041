//! The types of the inode-level API: attributes to set, directory entries, open flags, free space.

use std::ffi::OsString;
use std::time::SystemTime;

use crate::node::{FileKind, Node};

/// A time to set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetTime {
    /// The time of the call.
    Now,
    /// This time, nanoseconds kept.
    At(SystemTime),
}

/// Attributes to change; `None` leaves one as it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// Permission bits, the low 12.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Size of a regular file: cut, or extended with a hole.
    pub size: Option<u64>,
    /// Access time.
    pub atime: Option<SetTime>,
    /// Modification time.
    pub mtime: Option<SetTime>,
    /// Clears the set-user-ID bit, and the set-group-ID bit if the group may execute, of anything but a
    /// directory. An unprivileged write does the same. A change of the owner does so always.
    pub drop_privileges: bool,
}

/// Owner of a new node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// User.
    pub uid: u32,
    /// Group; a set-group-ID parent directory's group wins over it.
    pub gid: u32,
}

/// An entry of a directory at the inode level.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeEntry {
    /// Name; any bytes but NUL and `/`.
    pub name: OsString,
    /// The node that it names.
    pub node: Node,
    /// Its kind.
    pub kind: FileKind,
    /// The cursor after this entry, from which reading goes on; stable while other entries come and go.
    pub cursor: u64,
}

/// How a file is opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OpenFlags {
    /// Reading is allowed.
    pub read: bool,
    /// Writing is allowed.
    pub write: bool,
    /// Every write goes to the end of the file, whatever its offset (implies nothing about `write`).
    pub append: bool,
    /// Truncate to zero bytes while opening; needs `write`.
    pub truncate: bool,
    /// `create` only: fail with [`crate::Error::Exists`] when the name exists. With
    /// [`crate::View::create_unnamed`]: the file never gets a name.
    pub exclusive: bool,
}

impl OpenFlags {
    /// For reading only.
    pub const READ: OpenFlags =
        OpenFlags { read: true, write: false, append: false, truncate: false, exclusive: false };
    /// For reading and writing.
    pub const READ_WRITE: OpenFlags =
        OpenFlags { read: true, write: true, append: false, truncate: false, exclusive: false };
}

/// Space of the object store, as for `statvfs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatFs {
    /// Size of a block, in bytes.
    pub block_bytes: u32,
    /// Blocks in all.
    pub blocks: u64,
    /// Free blocks.
    pub blocks_free: u64,
    /// Blocks free to unprivileged users.
    pub blocks_available: u64,
    /// Inodes that can exist in all.
    pub files: u64,
    /// Inodes that can still be created.
    pub files_free: u64,
    /// Longest file name, in bytes.
    pub name_bytes_max: u32,
}
