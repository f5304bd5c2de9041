//! The types of the inode-level API: nodes, attributes, directory entries, open flags.

use std::ffi::OsString;
use std::time::SystemTime;

/// Inode number of every volume's root directory.
pub(crate) const ROOT_INO: u64 = 1;
/// Inode number of the `.snapshots` directory of a live volume; it exists in no snapshot.
pub(crate) const SNAPSHOTS_INO: u64 = 2;
/// First inode number that is assigned to a new inode.
pub(crate) const FIRST_INO: u64 = 16;
/// Bits of a node's 64-bit form that carry the inode number; the others carry the snapshot.
pub(crate) const INO_BITS: u32 = 40;
/// Largest inode number.
pub(crate) const INO_MAX: u64 = (1 << INO_BITS) - 1;
/// Largest snapshot number of a volume.
pub(crate) const SNAPSHOT_MAX: u64 = (1 << (64 - INO_BITS)) - 1;

/// One inode in one tree: the live tree or that of a snapshot. A file and the same file in a
/// snapshot are different nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Node {
    /// 0 in the live tree, else the snapshot's number ([`crate::SnapshotInfo::id`]), below 2^24.
    pub snapshot: u64,
    /// The inode number inside the tree, below 2^40.
    pub ino: u64,
}

impl Node {
    /// The root directory of the live tree; its 64-bit form is 1, as FUSE wants.
    pub const LIVE_ROOT: Node = Node { snapshot: 0, ino: ROOT_INO };

    /// The node as one number: distinct for distinct nodes of a volume, never 0.
    pub fn to_u64(self) -> u64 {
        (self.snapshot << INO_BITS) | self.ino
    }

    /// The node of a number made by [`Node::to_u64`].
    pub fn from_u64(number: u64) -> Node {
        Node { snapshot: number >> INO_BITS, ino: number & INO_MAX }
    }

    /// Whether the node is in the live tree.
    pub fn is_live(self) -> bool {
        self.snapshot == 0
    }
}

/// The kind of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A block device node.
    BlockDevice,
    /// A character device node.
    CharDevice,
    /// A named pipe.
    Fifo,
    /// A socket node.
    Socket,
}

/// Attributes of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attr {
    /// The node.
    pub node: Node,
    /// Its kind.
    pub kind: FileKind,
    /// Permission bits with setuid, setgid and sticky: the low 12 bits of `st_mode`.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Hard links; of a directory 2 plus its subdirectories.
    pub nlink: u32,
    /// Bytes: the length of a file or of a link's target, 0 for everything else.
    pub size: u64,
    /// 512-byte blocks of a file that are stored: holes are deducted. Unflushed writes count in full, even
    /// where they replace stored bytes.
    pub blocks: u64,
    /// Device number of a device node, else 0.
    pub rdev: u32,
    /// Last access as set explicitly; reading does not change it (as with `noatime`).
    pub atime: SystemTime,
    /// Last change of the contents.
    pub mtime: SystemTime,
    /// Last change of the contents or attributes.
    pub ctime: SystemTime,
    /// Changes with each change of the contents.
    pub data_version: u64,
    /// Id of the last writer of the contents, which alone has changed them since version `writer_since`: see
    /// `crate::watch`.
    pub(crate) writer: u64,
    pub(crate) writer_since: u64,
    /// Changes whenever a name of the file is removed or moved.
    pub names_version: u32,
    /// Number of extended attributes, including access control lists.
    pub(crate) xattrs: u32,
}

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
