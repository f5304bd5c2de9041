//! Packs: one object that holds the bytes of many small files.
//!
//! A pack is a sequence of pieces, each a header of 64 bytes and at most 256 KiB of data. Format, all
//! integers little-endian: 4 bytes magic; `u32` CRC-32C of the object's id, of the header's position (`u64`)
//! and of the rest of the header; `u32` length of the data; `u32` 0; `u64` volume; `u64` inode; `u64` file
//! offset; 4 × `u32` CRC-32C of each 64 KiB of the data; `u64` 0. Volume, inode and file offset name the file
//! that the piece was written for; the metadata says which files point at it now.
//!
//! `pack_writer.rs` writes packs, `pack_reader.rs` reads them. Any bytes may follow the last committed piece
//! (a torn tail). For a bucket, `remote_pack.rs` collects a pack in memory and stores it in one request.

use super::checksum::FRAME_BYTES;
use crate::object::{Extent, ObjectId};

/// Most bytes of data in one piece.
pub(crate) const PIECE_BYTES_MAX: usize = 256 * 1024;
/// A pack of this size gets no more pieces. A new pack costs two directory syncs and, after many deletions, a
/// long search of the file system for an inode (38 ms seen): once per 2,000 files of 8 KiB.
pub(crate) const PACK_BYTES: u64 = 16 << 20;
/// Length of a piece's header.
pub(super) const HEADER_BYTES: usize = 64;

const MAGIC: &[u8; 4] = b"MRpc";
const FRAMES_MAX: usize = PIECE_BYTES_MAX / FRAME_BYTES as usize;

/// The header of a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The volume of the file that it was written for.
    pub(crate) volume: u64,
    /// The inode of that file.
    pub(crate) ino: u64,
    /// Its first byte in that file.
    pub(crate) file_offset: u64,
    /// Bytes of data.
    pub(crate) len: u32,
    /// CRC-32C of each frame of the data.
    sums: [u32; FRAMES_MAX],
}

impl Piece {
    fn new(volume: u64, ino: u64, file_offset: u64, data: &[u8]) -> Piece {
        let mut sums = [0; FRAMES_MAX];
        for (sum, frame) in sums.iter_mut().zip(data.chunks(FRAME_BYTES as usize)) {
            *sum = crc32c::crc32c(frame);
        }
        // At most `PIECE_BYTES_MAX`.
        Piece { volume, ino, file_offset, len: data.len() as u32, sums }
    }

    fn encode(&self, id: ObjectId, at: u64) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[..4].copy_from_slice(MAGIC);
        out[8..12].copy_from_slice(&self.len.to_le_bytes());
        out[16..24].copy_from_slice(&self.volume.to_le_bytes());
        out[24..32].copy_from_slice(&self.ino.to_le_bytes());
        out[32..40].copy_from_slice(&self.file_offset.to_le_bytes());
        for (into, sum) in out[40..56].chunks_exact_mut(4).zip(&self.sums) {
            into.copy_from_slice(&sum.to_le_bytes());
        }
        let sum = header_sum(&out, id, at);
        out[4..8].copy_from_slice(&sum.to_le_bytes());
        out
    }

    /// Parses the header at a position of a pack; `None` when the bytes are not a valid header.
    pub(super) fn decode(bytes: &[u8; HEADER_BYTES], id: ObjectId, at: u64) -> Option<Piece> {
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap_or([0; 4]));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap_or([0; 8]));
        if &bytes[..4] != MAGIC || u32_at(4) != header_sum(bytes, id, at) {
            return None;
        }
        let len = u32_at(8);
        let sums = [u32_at(40), u32_at(44), u32_at(48), u32_at(52)];
        let piece = Piece { volume: u64_at(16), ino: u64_at(24), file_offset: u64_at(32), len, sums };
        (len > 0 && len as usize <= PIECE_BYTES_MAX).then_some(piece)
    }

    /// Checks frames of the data that begin at `start` of the piece (a multiple of the frame length). The
    /// error is the first byte of the wrong frame.
    pub(super) fn verify(&self, start: u64, data: &[u8]) -> std::result::Result<(), u64> {
        let frame_bytes = u64::from(FRAME_BYTES);
        let first = (start / frame_bytes) as usize;
        for (i, frame) in data.chunks(FRAME_BYTES as usize).enumerate() {
            if self.sums.get(first + i) != Some(&crc32c::crc32c(frame)) {
                return Err((first + i) as u64 * frame_bytes);
            }
        }
        Ok(())
    }
}

/// The checksum covers the object and the position, so that data which looks like a header is not taken for one.
fn header_sum(header: &[u8; HEADER_BYTES], id: ObjectId, at: u64) -> u32 {
    let sum = crc32c::crc32c_append(crc32c::crc32c(&id.to_bytes()), &at.to_le_bytes());
    crc32c::crc32c_append(sum, &header[8..])
}

/// Appends runs of a file (by file offset, disjoint, in order) to `bytes` as pieces; adjacent runs share one.
/// `bytes` begins at `base` of the pack. Returns where the data is in the pack.
pub(super) fn append_pieces<'a>(
    bytes: &mut Vec<u8>,
    (id, base): (ObjectId, u64),
    (volume, ino): (u64, u64),
    runs: impl Iterator<Item = (u64, &'a [u8])>,
) -> Vec<Extent> {
    // First the data, each piece after space for its header.
    let mut spans: Vec<(u64, usize, usize)> = Vec::with_capacity(1);
    for (offset, run) in runs {
        let mut at = offset;
        for part in run.chunks(PIECE_BYTES_MAX) {
            match spans.last_mut() {
                Some((start, _, len))
                    if *start + *len as u64 == at && *len + part.len() <= PIECE_BYTES_MAX =>
                {
                    *len += part.len();
                }
                _ => {
                    bytes.resize(bytes.len() + HEADER_BYTES, 0);
                    spans.push((at, bytes.len(), part.len()));
                }
            }
            bytes.extend_from_slice(part);
            at += part.len() as u64;
        }
    }
    let mut extents = Vec::with_capacity(spans.len());
    for (file_offset, at, len) in spans {
        let piece = Piece::new(volume, ino, file_offset, &bytes[at..at + len]);
        let header_at = at - HEADER_BYTES;
        bytes[header_at..at].copy_from_slice(&piece.encode(id, base + header_at as u64));
        let object_offset = base + at as u64;
        extents.push(Extent { file_offset, len: len as u64, object: id, object_offset });
    }
    extents
}
