//! Conversions between the kernel's FUSE types and the view's types.

use std::time::{Duration, SystemTime};

use fuser::{FileAttr, FileType, INodeNo, TimeOrNow};

use crate::fs::{OpenFlags, SetTime};
use crate::node::{Attr, FileKind, Node};

/// The block size that `stat` suggests to programs.
const IO_BYTES: u32 = 128 * 1024;

/// Translates nodes of one view to inode numbers of its mount and back. The root of the mounted tree is inode
/// 1.
#[derive(Debug, Clone, Copy)]
pub(super) struct Inodes {
    root: Node,
}

impl Inodes {
    pub(super) fn new(root: Node) -> Inodes {
        Inodes { root }
    }

    pub(super) fn node(self, ino: INodeNo) -> Node {
        if ino == INodeNo::ROOT { self.root } else { Node::from_u64(ino.0) }
    }

    pub(super) fn ino(self, node: Node) -> INodeNo {
        if node == self.root { INodeNo::ROOT } else { INodeNo(node.to_u64()) }
    }

    pub(super) fn attr(self, attr: &Attr) -> FileAttr {
        FileAttr {
            ino: self.ino(attr.node),
            size: attr.size,
            blocks: attr.blocks,
            atime: attr.atime,
            mtime: attr.mtime,
            ctime: attr.ctime,
            crtime: attr.ctime,
            kind: file_type(attr.kind),
            // The low 12 bits fit.
            perm: (attr.mode & 0o7777) as u16,
            nlink: attr.nlink,
            uid: attr.uid,
            gid: attr.gid,
            rdev: attr.rdev,
            blksize: IO_BYTES,
            flags: 0,
        }
    }
}

pub(super) fn file_type(kind: FileKind) -> FileType {
    match kind {
        FileKind::File => FileType::RegularFile,
        FileKind::Directory => FileType::Directory,
        FileKind::Symlink => FileType::Symlink,
        FileKind::BlockDevice => FileType::BlockDevice,
        FileKind::CharDevice => FileType::CharDevice,
        FileKind::Fifo => FileType::NamedPipe,
        FileKind::Socket => FileType::Socket,
    }
}

/// The file kind in a mode of `mknod`, where 0 stands for a regular file.
pub(super) fn kind_of_mode(mode: u32) -> Option<FileKind> {
    Some(match mode & libc::S_IFMT {
        0 | libc::S_IFREG => FileKind::File,
        libc::S_IFIFO => FileKind::Fifo,
        libc::S_IFSOCK => FileKind::Socket,
        libc::S_IFBLK => FileKind::BlockDevice,
        libc::S_IFCHR => FileKind::CharDevice,
        _ => return None,
    })
}

pub(super) fn set_time(time: TimeOrNow) -> SetTime {
    match time {
        TimeOrNow::Now => SetTime::Now,
        TimeOrNow::SpecificTime(time) => SetTime::At(as_sent(time)),
    }
}

/// The time that the kernel sent. Before 1970 the FUSE library (0.18) subtracts the fraction of a second, which
/// must be added to the whole seconds there, too.
fn as_sent(time: SystemTime) -> SystemTime {
    let Err(before) = time.duration_since(SystemTime::UNIX_EPOCH) else { return time };
    let before = before.duration();
    let fraction = Duration::from_nanos(before.subsec_nanos().into());
    SystemTime::UNIX_EPOCH.checked_sub(before - fraction).map_or(time, |second| second + fraction)
}

pub(super) fn open_flags(flags: i32) -> OpenFlags {
    let access = flags & libc::O_ACCMODE;
    OpenFlags {
        read: access != libc::O_WRONLY,
        write: access != libc::O_RDONLY,
        append: flags & libc::O_APPEND != 0,
        truncate: flags & libc::O_TRUNC != 0,
        exclusive: flags & libc::O_EXCL != 0,
    }
}

/// Whether the kernel opens the file to run it. It sets a bit that programs cannot set.
pub(super) fn is_execution(flags: i32) -> bool {
    const FMODE_EXEC: i32 = 0x20;
    flags & FMODE_EXEC != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_of_any_tree_is_inode_1() {
        let live = Inodes::new(Node::LIVE_ROOT);
        assert_eq!(live.ino(Node::LIVE_ROOT), INodeNo::ROOT);
        let root = Node { snapshot: 7, ino: 1 };
        let snapshot = Inodes::new(root);
        assert_eq!(snapshot.ino(root), INodeNo::ROOT);
        assert_eq!(snapshot.node(INodeNo::ROOT), root);
        let file = Node { snapshot: 7, ino: 99 };
        assert_eq!(snapshot.node(snapshot.ino(file)), file);
    }

    #[test]
    fn access_modes() {
        assert_eq!(open_flags(libc::O_RDONLY), OpenFlags::READ);
        assert_eq!(open_flags(libc::O_RDWR), OpenFlags::READ_WRITE);
        let append = open_flags(libc::O_WRONLY | libc::O_APPEND | libc::O_TRUNC);
        assert!(append.write && !append.read && append.append && append.truncate);
    }
}
