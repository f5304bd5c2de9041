//! Extents: the mapping of a byte range of a file to a byte range of an object.

use super::ObjectId;

/// A run of a file's bytes inside one object. Extents of a file are disjoint and sorted by
/// `file_offset`; a gap between them reads as zeroes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    /// First byte in the file.
    pub(crate) file_offset: u64,
    /// Length in bytes, never 0.
    pub(crate) len: u64,
    /// The object that holds the bytes.
    pub(crate) object: ObjectId,
    /// First byte inside the object.
    pub(crate) object_offset: u64,
}

impl Extent {
    /// One past the last byte in the file.
    pub(crate) fn end(&self) -> u64 {
        self.file_offset.saturating_add(self.len)
    }
}
