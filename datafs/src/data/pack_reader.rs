//! The reader of packs: a bounded set of open files, positional reads, every frame verified.
//!
//! An extent points at the data of a piece, so that one read gets header and data. The rest of an extent that
//! was cut may begin in the middle of a piece; then the reader scans the headers once.

use std::collections::HashMap;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::checksum::FRAME_BYTES;
use super::deleted::{KeepsOpen, is_deleted, is_idle};
use super::error::{ObjectError, Result};
use super::pack::{HEADER_BYTES, Piece};
use super::pack_ahead::{Budget, Strides};
use crate::metrics;
use crate::object::ObjectId;

/// Most packs kept open: 2 GiB of small files at 16 MiB each.
const OPEN_MAX: usize = 128;
/// A pack without a reader for this long is closed when the next one is opened.
const IDLE_MAX: Duration = Duration::from_secs(30);

/// A pack that is open for reading.
#[derive(Debug)]
pub(super) struct OpenPack {
    id: ObjectId,
    path: PathBuf,
    file: File,
    index: Mutex<Index>,
    asked: Strides,
}

/// The pieces that the header scan has found so far.
#[derive(Debug, Default)]
struct Index {
    /// Position of the data, and the header.
    pieces: Vec<(u64, Piece)>,
    end: u64,
}

impl OpenPack {
    fn open(root: &std::path::Path, id: ObjectId) -> Result<OpenPack> {
        let path = root.join(id.data_name());
        let file = File::open(&path).map_err(|e| match e.kind() {
            ErrorKind::NotFound => ObjectError::Missing { id },
            _ => ObjectError::io("open pack", &path, e),
        })?;
        metrics::OBJECTS_OPENED.inc();
        let (index, asked) = (Mutex::new(Index::default()), Strides::default());
        Ok(OpenPack { id, path, file, index, asked })
    }

    /// Fills `buffer` with the bytes from `offset` on. `start` is the caller's guess of where the piece's
    /// data begins; if no piece begins there, the reader scans for it.
    pub(super) fn read_into(&self, start: u64, offset: u64, buffer: &mut [u8]) -> Result<()> {
        if buffer.is_empty() {
            return Ok(());
        }
        if let Some(header_at) = start.checked_sub(HEADER_BYTES as u64) {
            // One read gets header and data when the request begins at the piece's start.
            let data = if start == offset { buffer.len() } else { 0 };
            let mut window = vec![0; HEADER_BYTES + data];
            self.read_exact(&mut window, header_at)?;
            let mut header = [0; HEADER_BYTES];
            header.copy_from_slice(&window[..HEADER_BYTES]);
            if let Some(piece) = Piece::decode(&header, self.id, header_at)
                && offset + buffer.len() as u64 <= start + u64::from(piece.len)
            {
                let data = &window[HEADER_BYTES..];
                let whole = data.len().is_multiple_of(FRAME_BYTES as usize);
                if data.len() == buffer.len() && (whole || data.len() == piece.len as usize) {
                    self.check(&piece, start, 0, data)?;
                    buffer.copy_from_slice(data);
                    return Ok(());
                }
                return self.read_piece(&piece, start, offset, buffer);
            }
        }
        let (start, piece) = self.find(offset)?;
        self.read_piece(&piece, start, offset, buffer)
    }

    /// Reads the frames of a piece that hold a range, and takes the range out of them.
    fn read_piece(&self, piece: &Piece, start: u64, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let frame = u64::from(FRAME_BYTES);
        let from = (offset - start) / frame * frame;
        let end = offset - start + buffer.len() as u64;
        let to = end.div_ceil(frame).saturating_mul(frame).min(u64::from(piece.len));
        if end > to {
            return Err(self.corrupt(start + to, "an extent reaches beyond its piece"));
        }
        let mut window = vec![0; (to - from) as usize];
        self.read_exact(&mut window, start + from)?;
        self.check(piece, start, from, &window)?;
        let at = (offset - start - from) as usize;
        buffer.copy_from_slice(&window[at..at + buffer.len()]);
        Ok(())
    }

    fn check(&self, piece: &Piece, start: u64, from: u64, data: &[u8]) -> Result<()> {
        piece.verify(from, data).map_err(|byte| self.corrupt(start + byte, "checksum mismatch"))?;
        metrics::OBJECT_READ_BYTES.inc_by(data.len() as u64);
        Ok(())
    }

    fn corrupt(&self, byte: u64, reason: &str) -> ObjectError {
        ObjectError::Corrupt { id: self.id, byte, reason: reason.to_owned() }
    }

    fn read_exact(&self, buffer: &mut [u8], at: u64) -> Result<()> {
        self.file.read_exact_at(buffer, at).map_err(|e| match e.kind() {
            ErrorKind::UnexpectedEof => self.corrupt(at, "the pack was cut short"),
            _ => ObjectError::io("read pack", &self.path, e),
        })
    }

    /// The piece that holds a byte.
    fn find(&self, offset: u64) -> Result<(u64, Piece)> {
        let mut index = self.index.lock();
        while index.end <= offset {
            if !self.walk(&mut index)? {
                return Err(self.corrupt(offset, "no piece begins before this byte"));
            }
        }
        let after = index.pieces.partition_point(|(at, _)| *at <= offset);
        let found = after.checked_sub(1).map(|i| index.pieces[i]);
        found
            .filter(|(at, piece)| offset < at + u64::from(piece.len))
            .ok_or_else(|| self.corrupt(offset, "the byte is in no piece"))
    }

    /// Adds the next piece to the index; false after the last one.
    fn walk(&self, index: &mut Index) -> Result<bool> {
        let mut header = [0; HEADER_BYTES];
        match self.file.read_exact_at(&mut header, index.end) {
            Err(e) if e.kind() == ErrorKind::UnexpectedEof => return Ok(false),
            other => other.map_err(|e| ObjectError::io("read pack", &self.path, e))?,
        }
        let Some(piece) = Piece::decode(&header, self.id, index.end) else { return Ok(false) };
        let at = index.end + HEADER_BYTES as u64;
        index.pieces.push((at, piece));
        index.end = at + u64::from(piece.len);
        Ok(true)
    }

    /// All pieces up to the end or to a torn tail: position of the data, and the header.
    pub(super) fn pieces(&self) -> Result<Vec<(u64, Piece)>> {
        let mut index = self.index.lock();
        while self.walk(&mut index)? {}
        Ok(index.pieces.clone())
    }
}

/// The open packs of a pool; the least recently used one is closed first.
#[derive(Debug)]
pub(super) struct OpenPacks {
    root: PathBuf,
    open: Mutex<HashMap<ObjectId, Slot>>,
    ahead: Budget,
}

#[derive(Debug)]
struct Slot {
    pack: Arc<OpenPack>,
    used: Instant,
}

impl OpenPacks {
    pub(super) fn new(root: PathBuf) -> OpenPacks {
        OpenPacks { root, open: Mutex::default(), ahead: Budget::default() }
    }

    pub(super) fn get(&self, id: ObjectId) -> Result<Arc<OpenPack>> {
        let now = Instant::now();
        if let Some(slot) = self.open.lock().get_mut(&id) {
            slot.used = now;
            return Ok(Arc::clone(&slot.pack));
        }
        // Opened outside of the lock; of two threads that race here, the later one's file replaces the other's.
        let pack = Arc::new(OpenPack::open(&self.root, id)?);
        let mut open = self.open.lock();
        open.retain(|_, slot| now.saturating_duration_since(slot.used) < IDLE_MAX);
        if open.len() >= OPEN_MAX {
            let oldest = open.iter().min_by_key(|(_, slot)| slot.used).map(|(id, _)| *id);
            oldest.and_then(|id| open.remove(&id));
        }
        open.insert(id, Slot { pack: Arc::clone(&pack), used: now });
        Ok(pack)
    }

    /// Reads from a pack, see [`OpenPack::read_into`].
    pub(super) fn read_into(&self, id: ObjectId, start: u64, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let pack = self.get(id)?;
        pack.asked.ask(&self.ahead, &pack.file, &pack.path, offset, buffer.len() as u64);
        pack.read_into(start, offset, buffer)
    }

    pub(super) fn forget(&self, id: ObjectId) {
        self.open.lock().remove(&id);
    }
}

impl KeepsOpen for OpenPacks {
    fn close_deleted(&self) {
        let is_over = |slot: &mut Slot| is_idle(slot.used) && is_deleted(&slot.pack.file);
        let over: Vec<_> = self.open.lock().extract_if(|_, slot| is_over(slot)).collect();
        drop(over);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::codec::Codec;
    use crate::data::pack::{PACK_BYTES, PIECE_BYTES_MAX};
    use crate::data::pack_writer::Packs;
    use crate::data::pool::ObjectPool;
    use crate::object::ExpectedKeys;

    fn pattern(len: usize) -> Vec<u8> {
        (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
    }

    fn pool() -> (tempfile::TempDir, ObjectPool) {
        let dir = tempfile::tempdir().unwrap();
        let pool = ObjectPool::open_local(&dir.path().join("objects"), 9).unwrap();
        (dir, pool)
    }

    #[test]
    fn pieces_read_back_whole_and_in_parts() {
        let (_dir, pool) = pool();
        let packs = Packs::new(pool.clone());
        for len in [1, 63, 4096, 65_535, 65_536, 65_537, 200_000, PIECE_BYTES_MAX] {
            let bytes = pattern(len);
            let packed = packs.append(&Codec::default(), 1, 2, [(7, &bytes[..])].into_iter()).unwrap();
            packed.pack.refer();
            let [extent] = packed.extents[..] else { panic!("{len} bytes are one extent") };
            assert_eq!((extent.file_offset, extent.len), (7, len as u64));
            let read = |from: usize, to: usize, start: u64| {
                let mut into = vec![0; to - from];
                let offset = extent.object_offset + from as u64;
                pool.read_part(&ExpectedKeys::None, extent.object, start, offset, &mut into).unwrap();
                assert!(into == bytes[from..to], "{from}..{to} of {len}");
            };
            for (from, to) in [(0, len), (0, len / 2), (len / 3, len), (len / 2, len / 2 + 1), (len - 1, len)]
            {
                read(from, to, extent.object_offset);
                // The rest of an extent that was cut: the reader has to find the piece.
                read(from, to, extent.object_offset + from as u64);
            }
        }
    }

    #[test]
    fn neighbours_share_a_piece_and_long_runs_are_split() {
        let (_dir, pool) = pool();
        let packs = Packs::new(pool.clone());
        let bytes = pattern(PIECE_BYTES_MAX + 10);
        let (a, b) = bytes.split_at(100);
        let packed =
            packs.append(&Codec::default(), 1, 2, [(0, a), (100, b), (1 << 30, a)].into_iter()).unwrap();
        let lens: Vec<_> = packed.extents.iter().map(|e| (e.file_offset, e.len)).collect();
        let max = PIECE_BYTES_MAX as u64;
        assert_eq!(lens.iter().map(|(_, len)| len).sum::<u64>(), max + 110);
        assert!(lens.iter().all(|(_, len)| *len <= max), "{lens:?}");
        for extent in &packed.extents {
            let mut into = vec![0; extent.len as usize];
            pool.read_part(
                &ExpectedKeys::None,
                extent.object,
                extent.object_offset,
                extent.object_offset,
                &mut into,
            )
            .unwrap();
            let at = if extent.file_offset == 1 << 30 { 0 } else { extent.file_offset as usize };
            assert!(into == bytes[at..at + into.len()]);
        }
        let pieces = pool.pack_pieces(packed.pack.id()).unwrap();
        assert_eq!(pieces.len(), packed.extents.len());
        assert!(pieces.iter().all(|(_, piece)| (piece.volume, piece.ino) == (1, 2)));
    }

    #[test]
    fn damage_is_named_and_a_torn_tail_hurts_nobody() {
        let (dir, pool) = pool();
        let packs = Packs::new(pool.clone());
        let bytes = pattern(100_000);
        let one = packs.append(&Codec::default(), 1, 2, [(0, &bytes[..])].into_iter()).unwrap();
        let two = packs.append(&Codec::default(), 1, 3, [(0, &bytes[..])].into_iter()).unwrap();
        one.pack.sync().unwrap();
        one.pack.refer();
        let id = one.pack.id();
        let path = dir.path().join("objects").join(id.data_name());
        let file = File::options().write(true).open(&path).unwrap();
        let torn = two.extents[0].object_offset + 70_000;
        file.set_len(torn).unwrap();
        let read = |extent: &crate::object::Extent| {
            let mut into = vec![0; extent.len as usize];
            pool.read_part(
                &ExpectedKeys::None,
                extent.object,
                extent.object_offset,
                extent.object_offset,
                &mut into,
            )?;
            assert!(into == bytes);
            Ok(())
        };
        read(&one.extents[0]).unwrap();
        assert!(matches!(read(&two.extents[0]), Err(ObjectError::Corrupt { .. })));
        let at = one.extents[0].object_offset + 65_536 + 17;
        file.write_all_at(&[!bytes[65_536 + 17]], at).unwrap();
        match read(&one.extents[0]) {
            Err(ObjectError::Corrupt { byte, .. }) => assert_eq!(byte, one.extents[0].object_offset + 65_536),
            other => panic!("{other:?}"),
        }
        let mut first = [0; 100];
        let start = one.extents[0].object_offset;
        pool.read_part(&ExpectedKeys::None, id, start, start, &mut first).unwrap();
        assert_eq!(first, bytes[..100]);
        // A header is not valid at another position.
        let whole = std::fs::read(&path).unwrap();
        file.write_all_at(&whole[..HEADER_BYTES], start + 1000 - HEADER_BYTES as u64).unwrap();
        assert!(pool.read_part(&ExpectedKeys::None, id, start + 1000, start + 1000, &mut first).is_err());
    }

    #[test]
    fn packs_are_bounded_and_unused_ones_go() {
        let (_dir, pool) = pool();
        let packs = Packs::new(pool.clone());
        let bytes = pattern(PIECE_BYTES_MAX);
        let mut ids = std::collections::BTreeSet::new();
        for _ in 0..3 * PACK_BYTES / PIECE_BYTES_MAX as u64 {
            let packed = packs.append(&Codec::default(), 1, 2, [(0, &bytes[..])].into_iter()).unwrap();
            ids.insert(packed.pack.id());
        }
        assert_eq!(ids.len(), 3);
        let there = pool.list_session(9).unwrap();
        assert!(there.len() <= 2, "those that nobody refers to are gone, the next one may be there");
        assert_eq!(there.iter().filter(|id| ids.contains(id)).count(), 1);
        let packed = packs.append(&Codec::default(), 1, 2, [(0, &bytes[..])].into_iter()).unwrap();
        assert!(!packed.pack.refer() && packed.pack.refer());
        packs.give_up(&packed.pack);
        drop(packed);
        packs.append(&Codec::default(), 1, 2, [(0, &bytes[..])].into_iter()).unwrap();
        packs.close();
        assert_eq!(pool.list_session(9).unwrap().len(), 1, "only that which somebody may refer to stays");
    }

    #[test]
    fn what_is_appended_is_written_when_it_is_read_or_synced() {
        let (dir, pool) = pool();
        let packs = Packs::new(pool.clone());
        let bytes = pattern(10_000);
        let append = |ino| packs.append(&Codec::default(), 1, ino, [(0, &bytes[..])].into_iter()).unwrap();
        let first = append(1);
        first.pack.refer();
        let path = dir.path().join("objects").join(first.pack.id().data_name());
        let on_disk = || std::fs::metadata(&path).unwrap().len();
        assert_eq!(on_disk(), 0);
        let read = |packed: &crate::data::Packed| {
            let [extent] = packed.extents[..] else { panic!("one extent") };
            let mut into = vec![0; bytes.len()];
            pool.read_part(
                &ExpectedKeys::None,
                extent.object,
                extent.object_offset,
                extent.object_offset,
                &mut into,
            )
            .unwrap();
            assert!(into == bytes);
        };
        read(&first);
        let piece = (HEADER_BYTES + bytes.len()) as u64;
        assert_eq!(on_disk(), piece);
        let (second, third) = (append(2), append(3));
        // Bytes that are already in the file need no write.
        read(&first);
        assert_eq!(on_disk(), piece);
        third.pack.sync().unwrap();
        assert_eq!(on_disk(), 3 * piece);
        read(&second);
        read(&third);
        // The writer writes out by itself once 4 MiB are in memory.
        for ino in 4..700 {
            read(&append(ino));
            append(ino);
        }
        assert_eq!(pool.pack_pieces(first.pack.id()).unwrap().len(), 3 + 2 * 696);
    }

    #[test]
    fn threads_append_read_and_sync_one_pack() {
        let (_dir, pool) = pool();
        let packs = Packs::new(pool.clone());
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let (packs, pool) = (&packs, &pool);
                scope.spawn(move || {
                    for i in 0..200u64 {
                        let bytes = pattern(5_000 + (thread * 1_000 + i) as usize);
                        let packed = packs
                            .append(&Codec::default(), thread, i, [(0, &bytes[..])].into_iter())
                            .unwrap();
                        packed.pack.refer();
                        if i % 7 == thread {
                            packed.pack.sync().unwrap();
                        }
                        let [extent] = packed.extents[..] else { panic!("one extent") };
                        let mut into = vec![0; bytes.len()];
                        let at = extent.object_offset;
                        pool.read_part(&ExpectedKeys::None, extent.object, at, at, &mut into).unwrap();
                        assert!(into == bytes, "{thread}/{i}");
                    }
                });
            }
        });
    }
}
