//! One segment file: consecutive batches, with a sparse index in memory.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use millrace_leaf::private;

use super::batch::{HEADER_BYTES, Header, REWRITTEN_BYTES};
use super::checkpoint::SegmentState;
use super::recovery;

/// Least distance in bytes between two indexed batches.
const INDEX_BYTES: u64 = 32 << 10;

#[derive(Debug, Clone, Copy)]
struct IndexEntry {
    offset: i64,
    position: u64,
    /// Largest timestamp of the batches before this one.
    max_timestamp_before: i64,
}

/// A segment; the next one begins at `next_offset`.
#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) base_offset: i64,
    pub(crate) next_offset: i64,
    pub(crate) bytes: u64,
    pub(crate) max_timestamp: i64,
    path: PathBuf,
    file: Option<Arc<File>>,
    index: Vec<IndexEntry>,
    /// Whether `index` covers the whole file. A segment from a checkpoint is indexed when it is first read.
    indexed: bool,
    /// Position and checksum of the last batch.
    last: Option<(u64, u32)>,
    /// Set when a failed write could not be undone or a flush failed. Only a restart repairs that: recovery
    /// reads what the disk has.
    writes_refused: bool,
}

/// A read position: an open file, the byte range to read, and the next segment for error messages.
#[derive(Debug)]
pub(crate) struct ReadPosition {
    path: PathBuf,
    pub(crate) file: Arc<File>,
    pub(crate) position: u64,
    pub(crate) end: u64,
    /// Base offset of the segment after this one.
    pub(crate) next: Option<i64>,
}

/// `00000000000000000042.log`
pub(crate) fn file_name(base_offset: i64) -> String {
    format!("{base_offset:020}.log")
}

/// The base offset in a segment's file name.
pub(crate) fn base_offset_of(name: &str) -> Option<i64> {
    let digits = name.strip_suffix(".log")?;
    (digits.len() == 20 && digits.bytes().all(|byte| byte.is_ascii_digit())).then(|| digits.parse().ok())?
}

impl Segment {
    /// A segment whose file was not read yet.
    pub(crate) fn unread(dir: &Path, base_offset: i64) -> Self {
        Self {
            base_offset,
            next_offset: base_offset,
            bytes: 0,
            max_timestamp: -1,
            path: dir.join(file_name(base_offset)),
            file: None,
            index: Vec::new(),
            indexed: true,
            last: None,
            writes_refused: false,
        }
    }

    /// The segment of a checkpoint; `None` when the file in `dir` is another one. The file may have grown.
    pub(crate) fn from_checkpoint(dir: &Path, known: &SegmentState) -> io::Result<Option<Self>> {
        let mut segment = Self {
            next_offset: known.next_offset,
            bytes: known.bytes,
            max_timestamp: known.max_timestamp,
            indexed: false,
            last: known.last,
            ..Self::unread(dir, known.base_offset)
        };
        let file = segment.file()?;
        let recognised = match known.last {
            None => known.bytes == 0,
            Some((position, crc)) if position + HEADER_BYTES as u64 <= file.metadata()?.len() => {
                let mut head = [0; HEADER_BYTES];
                file.read_exact_at(&mut head, position)?;
                Header::parse(&head).is_ok_and(|header| {
                    header.crc == crc
                        && header.next_offset() == known.next_offset
                        && position + header.bytes as u64 == known.bytes
                })
            }
            Some(_) => false,
        };
        Ok((recognised && file.metadata()?.len() >= known.bytes).then_some(segment))
    }

    /// The entry of this segment in a checkpoint.
    pub(crate) fn to_checkpoint(&self) -> SegmentState {
        SegmentState {
            base_offset: self.base_offset,
            next_offset: self.next_offset,
            bytes: self.bytes,
            max_timestamp: self.max_timestamp,
            last: self.last,
        }
    }

    /// Creates the file; the caller makes the directory entry durable.
    pub(crate) fn create(dir: &Path, base_offset: i64) -> io::Result<Self> {
        let mut segment = Self::unread(dir, base_offset);
        let file = private::options().create(true).append(true).read(true).open(&segment.path)?;
        // A file of this name can only be left from a crash right after an earlier creation.
        file.set_len(0)?;
        segment.file = Some(Arc::new(file));
        Ok(segment)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The open file; opens it when it is closed.
    pub(crate) fn file(&mut self) -> io::Result<Arc<File>> {
        if let Some(file) = &self.file {
            return Ok(file.clone());
        }
        let file = Arc::new(OpenOptions::new().append(true).read(true).open(&self.path)?);
        self.file = Some(file.clone());
        Ok(file)
    }

    /// Drops the open file; readers that still use it keep their handle.
    pub(crate) fn close(&mut self) {
        self.file = None;
    }

    /// Records the batch that follows the last known one in the file.
    pub(crate) fn record_batch(&mut self, header: &Header) {
        self.last = Some((self.bytes, header.crc));
        let due = self.index.last().is_none_or(|last| self.bytes - last.position >= INDEX_BYTES);
        if due {
            self.index.push(IndexEntry {
                offset: header.base_offset,
                position: self.bytes,
                max_timestamp_before: self.max_timestamp,
            });
        }
        self.bytes += header.bytes as u64;
        self.next_offset = header.next_offset();
        self.max_timestamp = self.max_timestamp.max(header.max_timestamp);
    }

    /// Refuses every further append and flush.
    pub(crate) fn refuse_writes(&mut self) {
        self.writes_refused = true;
    }

    /// # Errors
    /// After [`Segment::refuse_writes`].
    pub(crate) fn check(&self) -> io::Result<()> {
        if self.writes_refused {
            return Err(io::Error::other("an earlier write or flush failed; restart the broker"));
        }
        Ok(())
    }

    /// Appends a batch at `header.base_offset`. On failure the file is cut back to its old length, or else
    /// the segment refuses further appends.
    pub(crate) fn append(&mut self, batch: &[u8], header: &Header) -> io::Result<()> {
        self.check()?;
        let file = self.file()?;
        let mut head = [0; REWRITTEN_BYTES];
        head.copy_from_slice(&batch[..REWRITTEN_BYTES]);
        head[..8].copy_from_slice(&header.base_offset.to_be_bytes());
        head[12..].copy_from_slice(&0i32.to_be_bytes());
        if let Err(error) = write_both(&file, &head, &batch[REWRITTEN_BYTES..]) {
            self.writes_refused = file.set_len(self.bytes).is_err();
            return Err(error);
        }
        self.record_batch(header);
        Ok(())
    }

    /// Builds the index of a segment from a checkpoint.
    fn complete_index(&mut self) -> io::Result<()> {
        if self.indexed {
            return Ok(());
        }
        let file = self.file()?;
        let mut read = Self::unread(Path::new(""), self.base_offset);
        // The walk ends at damage, which later reads detect.
        recovery::walk(&file, self.bytes, (0, self.base_offset), false, |header| read.record_batch(header))?;
        (self.index, self.indexed) = (read.index, true);
        Ok(())
    }

    /// The last indexed position at or before the batch that holds `offset`.
    pub(crate) fn read_position(&mut self, offset: i64) -> io::Result<ReadPosition> {
        self.complete_index()?;
        let at = self.index.partition_point(|entry| entry.offset <= offset);
        let position = at.checked_sub(1).map_or(0, |at| self.index[at].position);
        self.read_position_at(position)
    }

    /// The last indexed position with only older records before it.
    pub(crate) fn read_position_by_time(&mut self, timestamp: i64) -> io::Result<ReadPosition> {
        self.complete_index()?;
        let at = self.index.partition_point(|entry| entry.max_timestamp_before < timestamp);
        let position = at.checked_sub(1).map_or(0, |at| self.index[at].position);
        self.read_position_at(position)
    }

    fn read_position_at(&mut self, position: u64) -> io::Result<ReadPosition> {
        Ok(ReadPosition {
            path: self.path.clone(),
            file: self.file()?,
            position,
            end: self.bytes,
            next: None,
        })
    }
}

fn write_both(mut file: &File, head: &[u8], rest: &[u8]) -> io::Result<()> {
    let written = loop {
        match file.write_vectored(&[IoSlice::new(head), IoSlice::new(rest)]) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => break other?,
        }
    };
    if written < head.len() {
        file.write_all(&head[written..])?;
        return file.write_all(rest);
    }
    file.write_all(&rest[written - head.len()..])
}

impl ReadPosition {
    /// The error for a batch whose bytes are not those that were written.
    pub(crate) fn damaged(&self, position: u64) -> io::Error {
        let error = recovery::corrupt(&self.path, position, "not what was written", self.next);
        io::Error::new(io::ErrorKind::InvalidData, error)
    }

    /// Checks a whole batch that was read at `position`.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`].
    pub(crate) fn verify(&self, header: &Header, batch: &[u8], position: u64) -> io::Result<()> {
        if header.crc_matches(batch) { Ok(()) } else { Err(self.damaged(position)) }
    }

    /// Reads whole batches that hold offsets in `from..until`, at most `bytes_max` together. With
    /// `at_least_one` the first batch may be larger. Ends before a damaged batch.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] when the first batch is damaged; the file system's.
    pub(crate) fn read(
        &self,
        from: i64,
        until: i64,
        bytes_max: usize,
        at_least_one: bool,
    ) -> io::Result<Vec<u8>> {
        let mut start = self.position;
        // The bytes between the index entry and the batch are skipped in memory, so the chunk includes them.
        let ahead = INDEX_BYTES as usize + HEADER_BYTES;
        let mut buffer = self.chunk(start, bytes_max.saturating_add(ahead))?;
        let mut skip = 0;
        let first = loop {
            let Ok(header) = Header::parse(&buffer[skip..]) else {
                // The chunk ends inside this header, or the header is damaged: reading again from here tells
                // which.
                if start + (skip as u64) >= self.end {
                    return Ok(Vec::new());
                }
                if skip == 0 {
                    return Err(self.damaged(start));
                }
                start += skip as u64;
                buffer = self.chunk(start, bytes_max.saturating_add(ahead))?;
                skip = 0;
                continue;
            };
            if header.next_offset() > from {
                break header;
            }
            skip += header.bytes;
            if skip >= buffer.len() {
                start += skip as u64;
                if start >= self.end {
                    return Ok(Vec::new());
                }
                buffer = self.chunk(start, bytes_max.saturating_add(ahead))?;
                skip = 0;
            }
        };
        let position = start + skip as u64;
        if first.bytes as u64 > self.end - position || first.base_offset > from {
            return Err(self.damaged(position));
        }
        if first.next_offset() > until || (first.bytes > bytes_max && !at_least_one) {
            return Ok(Vec::new());
        }
        if first.bytes > bytes_max.min(buffer.len() - skip) {
            let batch = self.chunk(position, first.bytes)?;
            self.verify(&first, &batch, position)?;
            return Ok(batch);
        }
        self.verify(&first, &buffer[skip..], position)?;
        let mut end = skip + first.bytes;
        let mut expected = first.next_offset();
        while let Ok(header) = Header::parse(&buffer[end.min(buffer.len())..]) {
            let next = end + header.bytes;
            if next > buffer.len() || next - skip > bytes_max || header.next_offset() > until {
                break;
            }
            if header.base_offset != expected || !header.crc_matches(&buffer[end..]) {
                break;
            }
            (end, expected) = (next, header.next_offset());
        }
        buffer.truncate(end);
        buffer.drain(..skip);
        if buffer.capacity() > 2 * buffer.len() {
            // A fetch response may hold many of these at once, each accounted for by its length.
            buffer.shrink_to_fit();
        }
        Ok(buffer)
    }

    /// Bytes of the batch that holds `offset`; 0 when the segment ends before it.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] for a damaged header before it; the file system's.
    pub(crate) fn batch_bytes(&self, offset: i64) -> io::Result<usize> {
        let mut position = self.position;
        while position < self.end {
            let header = Header::parse(&self.chunk(position, HEADER_BYTES)?);
            let header = header.map_err(|_| self.damaged(position))?;
            if header.next_offset() > offset {
                // No more than the file holds, whatever a damaged header says.
                return Ok(header.bytes.min(usize::try_from(self.end - position).unwrap_or(usize::MAX)));
            }
            position += header.bytes as u64;
        }
        Ok(0)
    }

    fn chunk(&self, position: u64, bytes: usize) -> io::Result<Vec<u8>> {
        let left = self.end.saturating_sub(position);
        let mut buffer = vec![0; bytes.min(usize::try_from(left).unwrap_or(usize::MAX))];
        self.file.read_exact_at(&mut buffer, position)?;
        Ok(buffer)
    }
}
