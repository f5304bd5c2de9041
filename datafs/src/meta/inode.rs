//! Records of the name space: attributes of an inode, entries of a directory, extents of a file.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::codec::{Decoder, Encoder};
use super::keys;
use crate::error::Result;
use crate::node::{Attr, FileKind, Node};
use crate::object::{Extent, ObjectId};

/// A time as it is stored: seconds since 1970, which may be negative, and nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Timestamp {
    seconds: i64,
    nanos: u32,
}

impl Timestamp {
    pub(crate) fn now() -> Timestamp {
        SystemTime::now().into()
    }

    pub(crate) fn to_system(self) -> SystemTime {
        let nanos = Duration::from_nanos(u64::from(self.nanos));
        let seconds = Duration::from_secs(self.seconds.unsigned_abs());
        let whole =
            if self.seconds < 0 { UNIX_EPOCH.checked_sub(seconds) } else { UNIX_EPOCH.checked_add(seconds) };
        whole.and_then(|t| t.checked_add(nanos)).unwrap_or(UNIX_EPOCH)
    }

    /// Seconds since 1970 and nanoseconds.
    pub(crate) fn parts(self) -> (i64, u32) {
        (self.seconds, self.nanos)
    }

    pub(crate) fn from_parts(seconds: i64, nanos: u32) -> Timestamp {
        Timestamp { seconds, nanos }
    }

    fn encode(self, to: Encoder) -> Encoder {
        to.i64(self.seconds).u32(self.nanos)
    }

    fn decode(from: &mut Decoder<'_>) -> Result<Timestamp> {
        Ok(Timestamp { seconds: from.i64()?, nanos: from.u32()? })
    }
}

impl From<SystemTime> for Timestamp {
    fn from(time: SystemTime) -> Timestamp {
        match time.duration_since(UNIX_EPOCH) {
            Ok(after) => Timestamp {
                seconds: i64::try_from(after.as_secs()).unwrap_or(i64::MAX),
                nanos: after.subsec_nanos(),
            },
            Err(before) => {
                let before = before.duration();
                let seconds = i64::try_from(before.as_secs()).unwrap_or(i64::MAX);
                match before.subsec_nanos() {
                    0 => Timestamp { seconds: -seconds, nanos: 0 },
                    nanos => Timestamp { seconds: -seconds - 1, nanos: 1_000_000_000 - nanos },
                }
            }
        }
    }
}

/// The attributes of an inode as they are stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Inode {
    pub(crate) kind: FileKind,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) nlink: u32,
    pub(crate) rdev: u32,
    pub(crate) size: u64,
    /// The parent of a directory (the root is its own parent); 0 for everything else.
    pub(crate) parent: u64,
    pub(crate) atime: Timestamp,
    pub(crate) mtime: Timestamp,
    pub(crate) ctime: Timestamp,
    /// Counts changes of the contents.
    pub(crate) data_version: u64,
    /// The last writer of the contents; 0 for several at once.
    pub(crate) writer: u64,
    /// The version since which only that writer has changed the contents. A copy of that version or a later
    /// one is outdated only by changes of that writer.
    pub(crate) writer_since: u64,
    /// Counts the names of a file that were removed or moved.
    pub(crate) names_version: u32,
    /// Stored bytes of a file: the others are holes. It is the sum over the records of its contents, none of
    /// which is empty, so 0 means that there are no such records. Maintained by
    /// [`Writer`](super::versioned::Writer).
    pub(crate) stored_bytes: u64,
    /// Number of extended attributes, access control lists included. Maintained by `Writer` as well.
    pub(crate) xattrs: u32,
}

fn kind_to_byte(kind: FileKind) -> u8 {
    match kind {
        FileKind::File => b'f',
        FileKind::Directory => b'd',
        FileKind::Symlink => b'l',
        FileKind::BlockDevice => b'b',
        FileKind::CharDevice => b'c',
        FileKind::Fifo => b'p',
        FileKind::Socket => b's',
    }
}

fn kind_from(decoder: &mut Decoder<'_>) -> Result<FileKind> {
    Ok(match decoder.u8()? {
        b'f' => FileKind::File,
        b'd' => FileKind::Directory,
        b'l' => FileKind::Symlink,
        b'b' => FileKind::BlockDevice,
        b'c' => FileKind::CharDevice,
        b'p' => FileKind::Fifo,
        b's' => FileKind::Socket,
        _ => return Err(decoder.damaged("unknown file kind")),
    })
}

impl Inode {
    /// A new inode, one link, all times now.
    pub(crate) fn new(kind: FileKind, mode: u32, uid: u32, gid: u32) -> Inode {
        let now = Timestamp::now();
        Inode {
            kind,
            mode: mode & 0o7777,
            uid,
            gid,
            nlink: 1,
            rdev: 0,
            size: 0,
            parent: 0,
            atime: now,
            mtime: now,
            ctime: now,
            data_version: 0,
            writer: 0,
            writer_since: 0,
            names_version: 0,
            stored_bytes: 0,
            xattrs: 0,
        }
    }

    /// Records a change of the contents.
    pub(crate) fn written_by(&mut self, writer: u64) {
        if writer == 0 || self.writer != writer {
            self.writer = writer;
            self.writer_since = self.data_version;
        }
        self.data_version += 1;
    }

    /// Records that a name was removed or leads elsewhere.
    pub(crate) fn lost_name(&mut self) {
        self.names_version = self.names_version.wrapping_add(1);
    }

    pub(crate) fn is_directory(&self) -> bool {
        self.kind == FileKind::Directory
    }

    /// Whether encoded attributes are those of a directory.
    pub(crate) fn is_of_directory(bytes: &[u8]) -> bool {
        bytes.first() == Some(&kind_to_byte(FileKind::Directory))
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut to = Encoder::default()
            .u8(kind_to_byte(self.kind))
            .u32(self.mode)
            .u32(self.uid)
            .u32(self.gid)
            .u32(self.nlink)
            .u32(self.rdev)
            .u64(self.size)
            .u64(self.parent);
        for time in [self.atime, self.mtime, self.ctime] {
            to = time.encode(to);
        }
        to.u64(self.data_version)
            .u64(self.writer)
            .u64(self.writer_since)
            .u32(self.names_version)
            .u64(self.stored_bytes)
            .u32(self.xattrs)
            .finish()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Inode> {
        let mut from = Decoder::new("inode record", bytes);
        let inode = Inode {
            kind: kind_from(&mut from)?,
            mode: from.u32()?,
            uid: from.u32()?,
            gid: from.u32()?,
            nlink: from.u32()?,
            rdev: from.u32()?,
            size: from.u64()?,
            parent: from.u64()?,
            atime: Timestamp::decode(&mut from)?,
            mtime: Timestamp::decode(&mut from)?,
            ctime: Timestamp::decode(&mut from)?,
            data_version: from.u64()?,
            writer: from.u64()?,
            writer_since: from.u64()?,
            names_version: from.u32()?,
            stored_bytes: from.u64()?,
            xattrs: from.u32()?,
        };
        from.finish()?;
        Ok(inode)
    }

    pub(crate) fn attr(&self, node: Node) -> Attr {
        Attr {
            node,
            kind: self.kind,
            mode: self.mode,
            uid: self.uid,
            gid: self.gid,
            nlink: self.nlink,
            size: self.size,
            blocks: match self.kind {
                // Bytes of the file that the metadata holds may be counted twice.
                FileKind::File => self.stored_bytes.min(self.size).div_ceil(512),
                _ => self.size.div_ceil(512),
            },
            rdev: self.rdev,
            atime: self.atime.to_system(),
            mtime: self.mtime.to_system(),
            ctime: self.ctime.to_system(),
            data_version: self.data_version,
            writer: self.writer,
            writer_since: self.writer_since,
            names_version: self.names_version,
            xattrs: self.xattrs,
        }
    }
}

/// An entry of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Dentry {
    pub(crate) ino: u64,
    pub(crate) kind: FileKind,
}

impl Dentry {
    pub(crate) fn encode(self) -> Vec<u8> {
        Encoder::default().u64(self.ino).u8(kind_to_byte(self.kind)).finish()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Dentry> {
        let mut from = Decoder::new("directory entry record", bytes);
        let dentry = Dentry { ino: from.u64()?, kind: kind_from(&mut from)? };
        from.finish()?;
        Ok(dentry)
    }
}

/// An extent's value; its file offset is in the key.
pub(crate) fn encode_extent(extent: &Extent) -> Vec<u8> {
    let mut value = Encoder::default().u64(extent.len).u64(extent.object_offset).finish();
    value.extend_from_slice(&extent.object.to_bytes());
    value
}

/// Stored bytes of a record of a file's contents, from the record's key and value.
pub(crate) fn stored_bytes(record: &[u8], value: &[u8]) -> Result<u64> {
    if keys::is_extent(record) { Decoder::new("extent record", value).u64() } else { Ok(value.len() as u64) }
}

/// Decodes an extent from the file offset in its record key and its value.
pub(crate) fn decode_extent(file_offset: u64, value: &[u8]) -> Result<Extent> {
    let mut from = Decoder::new("extent record", value);
    let (len, object_offset) = (from.u64()?, from.u64()?);
    let object = ObjectId::from_bytes(from.array()?);
    if len == 0 || file_offset.checked_add(len).is_none() || object_offset.checked_add(len).is_none() {
        return Err(from.damaged("its range is impossible"));
    }
    from.finish()?;
    Ok(Extent { file_offset, len, object, object_offset })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_keep_nanoseconds_on_both_sides_of_1970() {
        for (seconds, nanos) in [(0, 0), (1, 999_999_999), (-1, 1), (-5, 0), (i64::from(i32::MAX), 7)] {
            let time = Timestamp { seconds, nanos };
            assert_eq!(Timestamp::from(time.to_system()), time);
        }
        let before = UNIX_EPOCH - Duration::new(2, 250);
        assert_eq!(Timestamp::from(before).to_system(), before);
    }

    #[test]
    fn records_round_trip_and_refuse_damage() {
        let mut inode = Inode::new(FileKind::Fifo, 0o17777, 1, 2);
        inode.size = u64::MAX;
        inode.parent = 3;
        inode.written_by(9);
        inode.lost_name();
        inode.stored_bytes = 11;
        inode.xattrs = 2;
        let bytes = inode.encode();
        assert_eq!(Inode::decode(&bytes).unwrap(), inode);
        assert!(Inode::decode(&bytes[1..]).is_err());
        let mut longer = bytes.clone();
        longer.push(0);
        assert!(Inode::decode(&longer).is_err());
        let dentry = Dentry { ino: 9, kind: FileKind::Socket };
        assert_eq!(Dentry::decode(&dentry.encode()).unwrap(), dentry);
        let object = ObjectId::from_bytes([7; 16]);
        let extent = Extent { file_offset: 5, len: 6, object, object_offset: 7 };
        assert_eq!(decode_extent(5, &encode_extent(&extent)).unwrap(), extent);
        assert!(decode_extent(u64::MAX, &encode_extent(&extent)).is_err());
    }
}
