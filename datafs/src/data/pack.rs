//! Packs: one object that holds the bytes of many small files.
//!
//! A pack is a sequence of pieces, each a header of 64 bytes and at most 256 KiB of data. Format, all
//! integers little-endian: 4 bytes magic; `u32` CRC-32C of the object's id, of the header's position
//! (`u64`) and of the rest of the header; `u32` length of the data; `u32` 0; `u64` volume; `u64` inode;
//! `u64` file offset; 4 × `u32` CRC-32C of each 64 KiB of the data; `u64` 0. The owner (volume, inode,
//! file offset) is the one that the piece was written for; the metadata says who points at it now.
//!
//! On a local store the process that writes a pack appends to it in place. What was appended can be
//! read at once; it survives a power failure after [`Pack::sync`], so that a pointer to it may be
//! committed. Behind the last piece that was committed there may be anything (a torn tail).

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::checksum::FRAME_BYTES;
use super::error::{ObjectError, Result};
use super::extent::Extent;
use super::object::{Layout, ObjectId};
use super::pool::ObjectPool;
use crate::failpoint;
use crate::metrics;

/// Most bytes of data in one piece.
pub(crate) const PIECE_BYTES_MAX: usize = 256 * 1024;
/// A pack of this size gets no more pieces.
pub(crate) const PACK_BYTES: u64 = 4 << 20;
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

    /// The header at a position of a pack; `None` when there is none.
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

    /// Checks frames of the data that begin at `start` (a multiple of the frame's length) of the piece;
    /// the error is the first byte of the frame that differs.
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

/// Bound to the object and the position, so that data which looks like a header is none.
fn header_sum(header: &[u8; HEADER_BYTES], id: ObjectId, at: u64) -> u32 {
    let sum = crc32c::crc32c_append(crc32c::crc32c(&id.to_bytes()), &at.to_le_bytes());
    crc32c::crc32c_append(sum, &header[8..])
}

/// A pack that this process has begun. Dropping one that no transaction has referred to deletes it.
#[derive(Debug)]
pub(crate) struct Pack {
    pool: ObjectPool,
    id: ObjectId,
    path: PathBuf,
    file: File,
    /// Where the next piece goes.
    end: Mutex<u64>,
    synced: Mutex<Synced>,
    referenced: AtomicBool,
}

#[derive(Debug, Default)]
struct Synced {
    end: u64,
    named: bool,
    lost: bool,
}

impl Pack {
    fn begin(pool: &ObjectPool) -> Result<Pack> {
        let id = pool.new_id(Layout::Pack);
        let (path, file) = pool.create_local(&id.data_name())?;
        failpoint::hit("pack-begun");
        metrics::OBJECTS_WRITTEN.inc();
        Ok(Pack {
            pool: pool.clone(),
            id,
            path,
            file,
            end: Mutex::new(0),
            synced: Mutex::new(Synced::default()),
            referenced: AtomicBool::new(false),
        })
    }

    /// Its name.
    pub(crate) fn id(&self) -> ObjectId {
        self.id
    }

    /// Notes that a transaction is going to refer to it. Returns whether one had tried before.
    pub(crate) fn refer(&self) -> bool {
        self.referenced.swap(true, Ordering::AcqRel)
    }

    /// Makes everything that was appended before the call survive a power failure.
    pub(crate) fn sync(&self) -> Result<()> {
        let end = *self.end.lock();
        let mut synced = self.synced.lock();
        if synced.end < end {
            if synced.lost {
                return Err(ObjectError::Io {
                    operation: "sync again, after it failed, pack",
                    path: self.path.clone(),
                    source: std::io::Error::other("an earlier write was lost"),
                });
            }
            if let Err(e) = self.file.sync_data() {
                // The kernel reports a lost write once; nobody may take the next answer for a success.
                synced.lost = true;
                return Err(ObjectError::io("sync pack", &self.path, e));
            }
            failpoint::hit("pack-synced");
            synced.end = end;
        }
        if !synced.named {
            self.pool.make_name_durable(self.id)?;
            synced.named = true;
        }
        Ok(())
    }
}

impl Drop for Pack {
    fn drop(&mut self) {
        if self.referenced.load(Ordering::Acquire) {
            return;
        }
        if let Err(error) = self.pool.delete(self.id) {
            tracing::warn!(object = %self.id, %error, "deleting a pack that nothing points at");
        }
    }
}

/// Bytes that were appended to a pack, and where.
#[derive(Debug)]
pub(crate) struct Packed {
    /// The pack.
    pub(crate) pack: Arc<Pack>,
    /// The runs as extents, in order.
    pub(crate) extents: Vec<Extent>,
}

/// The packs of this process: one at a time is appended to.
#[derive(Debug)]
pub(crate) struct Packs {
    pool: ObjectPool,
    current: Mutex<Option<Arc<Pack>>>,
}

impl Packs {
    /// None is begun before it is needed.
    pub(crate) fn new(pool: ObjectPool) -> Packs {
        Packs { pool, current: Mutex::new(None) }
    }

    /// Appends runs of a file (by file offset, disjoint, in order), one piece for each that is no longer
    /// than [`PIECE_BYTES_MAX`]; neighbours share a piece. They survive a power failure after
    /// [`Pack::sync`].
    pub(crate) fn append<'a>(
        &self,
        volume: u64,
        ino: u64,
        runs: impl Iterator<Item = (u64, &'a [u8])>,
    ) -> Result<Packed> {
        let mut buffer = Vec::new();
        let mut pieces: Vec<(Piece, usize)> = Vec::new();
        // The data first, each piece behind room for its header.
        let mut spans: Vec<(u64, usize, usize)> = Vec::new();
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
                        buffer.resize(buffer.len() + HEADER_BYTES, 0);
                        spans.push((at, buffer.len(), part.len()));
                    }
                }
                buffer.extend_from_slice(part);
                at += part.len() as u64;
            }
        }
        for (offset, at, len) in spans {
            pieces.push((Piece::new(volume, ino, offset, &buffer[at..at + len]), at));
        }
        let mut current = self.current.lock();
        if current.as_ref().is_some_and(|pack| *pack.end.lock() >= PACK_BYTES) {
            *current = None;
        }
        let pack = match &*current {
            Some(pack) => Arc::clone(pack),
            None => Arc::clone(current.insert(Arc::new(Pack::begin(&self.pool)?))),
        };
        let mut end = pack.end.lock();
        let mut extents = Vec::with_capacity(pieces.len());
        for (piece, at) in &pieces {
            let object_offset = *end + *at as u64;
            let header_at = at - HEADER_BYTES;
            let header = piece.encode(pack.id, object_offset - HEADER_BYTES as u64);
            buffer[header_at..*at].copy_from_slice(&header);
            extents.push(Extent {
                file_offset: piece.file_offset,
                len: u64::from(piece.len),
                object: pack.id,
                object_offset,
            });
        }
        // After a failure the next pieces are written over what arrived.
        let written = pack.file.write_all_at(&buffer, *end);
        written.map_err(|e| ObjectError::io("append to pack", &pack.path, e))?;
        failpoint::hit("pack-appended");
        *end += buffer.len() as u64;
        drop(end);
        metrics::OBJECT_WRITTEN_BYTES.inc_by(buffer.len() as u64);
        Ok(Packed { pack, extents })
    }

    /// Appends no more to a pack: it is being deleted.
    pub(crate) fn give_up(&self, pack: &Arc<Pack>) {
        let mut current = self.current.lock();
        if current.as_ref().is_some_and(|current| Arc::ptr_eq(current, pack)) {
            *current = None;
        }
    }

    /// Begins no pack any more and lets go of the current one.
    pub(crate) fn close(&self) {
        *self.current.lock() = None;
    }
}
