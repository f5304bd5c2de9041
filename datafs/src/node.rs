//! Nodes of a volume: inode numbers, kinds of files, and attributes.

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
    /// `crate::fs::watch`.
    pub(crate) writer: u64,
    pub(crate) writer_since: u64,
    /// Changes whenever a name of the file is removed or moved.
    pub names_version: u32,
    /// Number of extended attributes, including access control lists.
    pub(crate) xattrs: u32,
}
