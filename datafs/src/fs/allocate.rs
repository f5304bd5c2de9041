//! Holes in files: `fallocate`, and the search for data and holes.

use super::View;
use super::content::{self, FILE_BYTES_MAX};
use super::file::{check_file, flush_inode};
use super::tree;
use super::xattr::drop_capabilities;
use crate::error::{Error, Result};
use crate::meta::engine::Durability;
use crate::meta::inode::{Inode, Timestamp};
use crate::meta::versioned::Reader;
use crate::node::{Attr, Node};

/// What [`View::allocate`] does with a range of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allocate {
    /// Extends the file to the end of the range when it is shorter. Existing bytes stay.
    Extend,
    /// Changes only the times: no space is reserved, neither in holes nor beyond the end.
    KeepSize,
    /// The range reads as zeroes and takes no space; the size stays.
    PunchHole,
    /// The range reads as zeroes; the file is extended to its end when it is shorter.
    Zero,
    /// The range reads as zeroes as far as the file reaches; the size stays.
    ZeroKeepSize,
}

impl View {
    /// `fallocate` of `len` bytes from `offset` on. Flushes this process's writes to the file first.
    /// Extending fails with [`Error::NoSpace`] when the store has less space than the file grows by, but
    /// reserves no space.
    pub fn allocate(&self, node: Node, offset: u64, len: u64, how: Allocate) -> Result<Attr> {
        let ino = self.writable(node)?;
        if len == 0 {
            return Err(Error::Invalid("an empty range cannot be allocated".into()));
        }
        let end = offset.checked_add(len).filter(|end| *end <= FILE_BYTES_MAX);
        let end = end.ok_or(Error::TooLarge { what: "file in bytes", max: FILE_BYTES_MAX })?;
        let open = self.shared.open.get(self.volume, ino);
        // Held across the change, so that no write slips in between.
        let mut dirty = open.as_ref().map(|open| open.dirty.lock());
        if let (Some(open), Some(dirty)) = (&open, &mut dirty) {
            flush_inode(self, open, dirty, Durability::Relaxed)?;
        }
        if matches!(how, Allocate::Extend | Allocate::Zero) {
            self.check_space(node, end)?;
        }
        let inode = self.write(Durability::Relaxed, |writer| {
            let mut inode = tree::inode(writer, ino)?;
            check_file(node, &inode)?;
            match how {
                Allocate::Extend | Allocate::KeepSize => {}
                Allocate::PunchHole | Allocate::Zero | Allocate::ZeroKeepSize => {
                    if how == Allocate::PunchHole {
                        writer.txn().makes_room();
                    }
                    content::zero(writer, ino, &inode, offset, end)?;
                }
            }
            drop_capabilities(writer, ino, &inode)?;
            if matches!(how, Allocate::Extend | Allocate::Zero) {
                inode.size = inode.size.max(end);
            }
            writer.settle(ino, &mut inode);
            inode.written_by(writer.writer());
            inode.mtime = Timestamp::now();
            inode.ctime = inode.mtime;
            tree::put_inode(writer, ino, &inode)?;
            Ok(inode)
        })?;
        Ok(self.attr_of(node, &inode))
    }

    fn check_space(&self, node: Node, end: u64) -> Result<()> {
        let size = self.read(node, |reader| Ok(tree::inode(reader, node.ino)?.size))?;
        let space = self.shared.pool.space()?;
        if end.saturating_sub(size) > space.available_bytes {
            return Err(Error::NoSpace { place: "the object store".into(), quota: false });
        }
        Ok(())
    }

    /// The offset of the first byte at or after `offset` that is not in a hole. `None` when there is none, or
    /// when `offset` is at or beyond the end of the file. Flushes this process's writes to the file.
    pub fn seek_data(&self, node: Node, offset: u64) -> Result<Option<u64>> {
        self.seek(node, |reader, inode| match offset < inode.size {
            true => content::find_data(reader, node.ino, offset),
            false => Ok(None),
        })
    }

    /// The offset of the first hole at or after `offset`; the end of the file counts as one. `None` when
    /// `offset` is at or beyond the end of the file. Flushes this process's writes to the file.
    pub fn seek_hole(&self, node: Node, offset: u64) -> Result<Option<u64>> {
        self.seek(node, |reader, inode| match offset < inode.size {
            true => Ok(Some(content::find_hole(reader, node.ino, offset)?.min(inode.size))),
            false => Ok(None),
        })
    }

    fn seek(
        &self,
        node: Node,
        find: impl Fn(&mut Reader<'_>, &Inode) -> Result<Option<u64>>,
    ) -> Result<Option<u64>> {
        if self.is_snapshots_dir(node) {
            return Err(Error::IsADirectory { what: tree::SNAPSHOTS_NAME.into() });
        }
        if node.is_live()
            && let Some(open) = self.shared.open.get(self.volume, node.ino)
        {
            flush_inode(self, &open, &mut open.dirty.lock(), Durability::Relaxed)?;
        }
        self.read(node, |reader| {
            let inode = tree::inode(reader, node.ino)?;
            check_file(node, &inode)?;
            find(reader, &inode)
        })
    }
}
