//! Copies of a file range into a file: by reference where the bytes are in objects.

use std::sync::Arc;

use super::content::{self, INLINE_BYTES_MAX};
use super::file::{OpenFile, flush_inode};
use super::tree;
use super::xattr::drop_capabilities;
use crate::error::{Error, Result};
use crate::meta::engine::Durability;
use crate::meta::inode::Timestamp;
use crate::meta::versioned::{At, Reader, Records, Writer};
use crate::node::Node;
use crate::object::Extent;

/// Shorter copies move bytes: a reference would cost more than it saves.
const REFERENCE_BYTES_MIN: u64 = 64 * 1024;
/// Most extents that one call shares; it then copies less than requested.
const EXTENTS_MAX: usize = 1_024;
/// Most bytes that one call copies when it shares no objects.
const MOVE_BYTES_MAX: u64 = 8 << 20;
/// Bytes that are in memory at a time.
const PIECE_BYTES: u64 = 1 << 20;

/// A requested copy, cut to the size of the source.
#[derive(Debug, Clone, Copy)]
struct Copy {
    from: Node,
    offset: u64,
    to: u64,
    target_offset: u64,
    len: u64,
}

impl OpenFile {
    /// Copies up to `len` bytes from `offset` of this file to `target_offset` of another, or of this one if
    /// the ranges do not overlap. Returns how many were copied: 0 only at the end of the file. It is fewer
    /// than `len` there, and when the rest is left to the next call. Between files of one volume, its
    /// snapshots included, large ranges share the objects instead of copying them.
    pub fn copy_to(&self, offset: u64, target: &OpenFile, target_offset: u64, len: u64) -> Result<u64> {
        if !self.flags().read {
            return Err(Error::BadHandle("reading"));
        }
        if !target.flags().write || target.flags().append {
            return Err(Error::BadHandle("writing anywhere"));
        }
        let (view, other) = (self.view(), target.view());
        let same_volume = Arc::ptr_eq(&view.shared, &other.shared) && view.volume == other.volume;
        let len = len.min(self.attr()?.size.saturating_sub(offset));
        let end = target_offset.checked_add(len).filter(|end| *end <= content::FILE_BYTES_MAX);
        if end.is_none() {
            return Err(Error::TooLarge { what: "file in bytes", max: content::FILE_BYTES_MAX });
        }
        if same_volume && self.node() == target.node() && offset.abs_diff(target_offset) < len {
            return Err(Error::Invalid("the ranges of the copy overlap".into()));
        }
        if !same_volume || len < REFERENCE_BYTES_MIN {
            return self.move_bytes(offset, target, target_offset, len.min(MOVE_BYTES_MAX));
        }
        // The first bytes of a file may be in the metadata, where no extent can reference them.
        let head = (INLINE_BYTES_MAX as u64).saturating_sub(offset);
        let moved = self.move_bytes(offset, target, target_offset, head)?;
        if moved < head {
            return Ok(moved);
        }
        let copy = Copy {
            from: self.node(),
            offset: offset + head,
            to: other.writable(target.node())?,
            target_offset: target_offset + head,
            len: len - head,
        };
        self.flush()?;
        Ok(head + share(target, copy)?)
    }

    fn move_bytes(&self, offset: u64, target: &OpenFile, target_offset: u64, len: u64) -> Result<u64> {
        let mut done = 0;
        while done < len {
            let bytes = self.read_at(offset + done, (len - done).min(PIECE_BYTES) as usize)?;
            if bytes.is_empty() {
                break;
            }
            done += target.write_at(target_offset + done, &bytes)? as u64;
        }
        Ok(done)
    }
}

/// Makes the target reference the objects of the source. Returns the number of bytes.
fn share(target: &OpenFile, copy: Copy) -> Result<u64> {
    let view = target.view();
    let open = view.shared.open.get(view.volume, copy.to);
    let open = open.ok_or(Error::BadHandle("writing"))?;
    // Held across the change, so that no write slips in between.
    let mut dirty = open.dirty.lock();
    flush_inode(view, &open, &mut dirty, Durability::Relaxed)?;
    view.write(Durability::Relaxed, |writer| {
        let mut inode = tree::inode(writer, copy.to)?;
        let (len, extents) = find_extents(writer, copy)?;
        content::zero(writer, copy.to, &inode, copy.target_offset, copy.target_offset + len)?;
        for extent in extents {
            let file_offset = extent.file_offset - copy.offset + copy.target_offset;
            content::write_extent(writer, copy.to, &inode, &Extent { file_offset, ..extent })?;
        }
        drop_capabilities(writer, copy.to, &inode)?;
        writer.settle(copy.to, &mut inode);
        inode.size = inode.size.max(copy.target_offset + len);
        inode.written_by(writer.writer());
        inode.mtime = Timestamp::now();
        inode.ctime = inode.mtime;
        tree::put_inode(writer, copy.to, &inode)?;
        Ok(len)
    })
}

/// How many bytes can be shared, holes included, and the extents of the source in them. Reads them in the
/// transaction that references their objects, so that the collector cannot free them in between.
fn find_extents(writer: &mut Writer<'_>, copy: Copy) -> Result<(u64, Vec<Extent>)> {
    if copy.from.is_live() {
        return extents_of(writer, copy);
    }
    let (volume, at) = (writer.volume(), At::Snapshot(copy.from.snapshot));
    extents_of(&mut Reader::open(writer.txn().as_read(), volume, at)?, copy)
}

fn extents_of(records: &mut dyn Records, copy: Copy) -> Result<(u64, Vec<Extent>)> {
    // The source may have been truncated since `copy_to` read its size.
    let size = tree::inode(records, copy.from.ino)?.size;
    let end = size.min(copy.offset + copy.len).max(copy.offset);
    let extents = content::extents_within(records, copy.from.ino, copy.offset, end, EXTENTS_MAX)?;
    let end = match extents.last() {
        Some(last) if extents.len() >= EXTENTS_MAX => last.end(),
        _ => end,
    };
    Ok((end - copy.offset, extents))
}
