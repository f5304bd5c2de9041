//! Attributes: getattr, setattr, statfs.

use super::View;
use super::acl;
use super::content;
use super::file::{discard, flush_inode};
use super::open_table::Unflushed;
use super::types::{SetAttr, SetTime, StatFs};
use super::xattr::{drop_capabilities, drop_pending, without_privileges};
use super::{content::FILE_BYTES_MAX, tree};
use crate::error::{Error, Result};
use crate::meta::engine::Durability;
use crate::meta::inode::{Inode, Timestamp};
use crate::meta::versioned::Reader;
use crate::node::{Attr, FileKind, INO_MAX, Node, SNAPSHOTS_INO};

/// Size of a block in statfs, in bytes.
const BLOCK_BYTES: u32 = 4096;

impl View {
    /// Attributes of a node, including this process's unflushed writes.
    pub fn getattr(&self, node: Node) -> Result<Attr> {
        self.read(node, |reader| self.attr_in(reader, node))
    }

    /// [`View::getattr`] inside a transaction.
    pub(crate) fn attr_in(&self, reader: &mut Reader<'_>, node: Node) -> Result<Attr> {
        if self.is_snapshots_dir(node) {
            return self.snapshots_dir_attr(reader);
        }
        let inode = tree::inode(reader, node.ino)?;
        self.check_reachable(node, &inode)?;
        Ok(self.attr_of(node, &inode))
    }

    /// Refuses a file without a name, unless it is in the live tree and this process has it open.
    fn check_reachable(&self, node: Node, inode: &Inode) -> Result<()> {
        let is_open = || node.is_live() && self.shared.open.get(self.volume, node.ino).is_some();
        if inode.nlink == 0 && !is_open() {
            return Err(Error::not_found(format!("inode {}", node.ino)));
        }
        Ok(())
    }

    /// The attributes from an inode that the caller has read, including unflushed writes.
    pub(crate) fn attr_of(&self, node: Node, inode: &Inode) -> Attr {
        let mut attr = inode.attr(node);
        if node.is_live()
            && inode.kind == FileKind::File
            && let Some(open) = self.shared.open.get(self.volume, node.ino)
        {
            open.overlay(&mut attr);
        }
        attr
    }

    /// The directory of snapshots looks like the root, but read-only.
    fn snapshots_dir_attr(&self, reader: &mut Reader<'_>) -> Result<Attr> {
        let root = Node::LIVE_ROOT;
        let mut attr = tree::inode(reader, root.ino)?.attr(Node { snapshot: 0, ino: SNAPSHOTS_INO });
        attr.mode &= !0o222;
        attr.nlink = 2;
        Ok(attr)
    }

    /// Changes attributes in one transaction. A new size of a file first flushes this process's writes to it,
    /// unless it cuts all of them off.
    pub fn setattr(&self, node: Node, set: &SetAttr) -> Result<Attr> {
        let ino = self.writable(node)?;
        if set.size.is_some_and(|size| size > FILE_BYTES_MAX) {
            return Err(Error::TooLarge { what: "file in bytes", max: FILE_BYTES_MAX });
        }
        let Some(open) = self.shared.open.get(self.volume, ino) else {
            return Ok(self.attr_of(node, &self.setattr_in(node, set, None)?));
        };
        // Held across the change, so that no write and no flush slips in between.
        let mut dirty = open.dirty.lock();
        // Writes that are cut off need no flush, and so no space.
        let cut_off = set.size.is_some_and(|size| dirty.start() >= size);
        if set.size.is_some() && !cut_off {
            flush_inode(self, &open, &mut dirty, Durability::Relaxed)?;
        }
        let inode = self.setattr_in(node, set, open.unflushed())?;
        if cut_off {
            discard(&self.shared, &open, &mut dirty);
        }
        // An explicit time wins over that of unflushed writes.
        open.attributes_set(set.mtime.map(|_| inode.mtime));
        Ok(self.attr_of(node, &inode))
    }

    fn setattr_in(&self, node: Node, set: &SetAttr, unflushed: Option<Unflushed>) -> Result<Inode> {
        let ino = node.ino;
        self.write(Durability::Relaxed, |writer| {
            let mut inode = tree::inode(writer, ino)?;
            self.check_reachable(node, &inode)?;
            drop_pending(writer, ino, &mut inode, unflushed)?;
            let now = Timestamp::now();
            if let Some(size) = set.size {
                match inode.kind {
                    FileKind::File => {}
                    FileKind::Directory => {
                        return Err(Error::IsADirectory { what: format!("inode {ino}") });
                    }
                    _ => return Err(Error::Invalid("only files have a size to set".into())),
                }
                if size < inode.size {
                    content::truncate(writer, ino, &inode, size)?;
                    writer.settle(ino, &mut inode);
                }
                inode.size = size;
                inode.mtime = now;
                inode.written_by(writer.writer());
            }
            let new_owner = set.uid.is_some() || set.gid.is_some();
            if (new_owner || set.drop_privileges) && !inode.is_directory() {
                inode.mode = without_privileges(inode.mode);
            }
            if new_owner || set.size.is_some() {
                drop_capabilities(writer, ino, &inode)?;
            }
            inode.mode = set.mode.map_or(inode.mode, |mode| mode & 0o7777);
            if set.mode.is_some() {
                acl::follow_mode(writer, ino, &inode)?;
            }
            inode.uid = set.uid.unwrap_or(inode.uid);
            inode.gid = set.gid.unwrap_or(inode.gid);
            inode.atime = set.atime.map_or(inode.atime, |time| resolve(time, now));
            inode.mtime = set.mtime.map_or(inode.mtime, |time| resolve(time, now));
            if *set != SetAttr::default() {
                inode.ctime = now;
            }
            if *set != SetAttr::default() || unflushed.is_some() {
                tree::put_inode(writer, ino, &inode)?;
            }
            Ok(inode)
        })
    }

    /// Space of the object store.
    pub fn statfs(&self) -> Result<StatFs> {
        let space = self.shared.pool.space()?;
        let blocks = |bytes: u64| bytes / u64::from(BLOCK_BYTES);
        Ok(StatFs {
            block_bytes: BLOCK_BYTES,
            blocks: blocks(space.total_bytes),
            blocks_free: blocks(space.free_bytes),
            blocks_available: blocks(space.available_bytes),
            files: INO_MAX,
            files_free: INO_MAX,
            name_bytes_max: tree::NAME_BYTES_MAX as u32,
        })
    }
}

fn resolve(time: SetTime, now: Timestamp) -> Timestamp {
    match time {
        SetTime::Now => now,
        SetTime::At(time) => time.into(),
    }
}
