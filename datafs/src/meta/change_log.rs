//! Change log: the keys that each batch touched, in a ring in the file of the writer lock, behind the shared
//! page.
//!
//! The process with the writer lock appends before it commits the batch; all processes read at their own
//! pace. The log is not part of the metadata: a missing, overwritten or torn entry means that anything may
//! have changed.
//!
//! An entry: length (u32) and CRC-32C (u32) of the rest; batch (u64), writer (u64); then per record a length
//! (u16) and its key. If there were too many keys, none are listed.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::Ordering;

use super::shared_page::{PAGE_BYTES, Words};

/// Bytes of the ring.
pub(crate) const LOG_BYTES: u64 = 2 << 20;
/// Longest entry; a batch that needs more is logged without its keys.
const ENTRY_BYTES_MAX: usize = 512 << 10;
/// Bytes before the checked part of an entry.
const PREFIX_BYTES: usize = 8;
/// Bytes of an entry without keys.
const HEADER_BYTES: usize = PREFIX_BYTES + 16;

/// Position of a reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cursor {
    position: u64,
    gaps: u64,
}

/// A batch in the log.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) batch: u64,
    /// The open metadata that wrote it.
    pub(crate) writer: u64,
    /// Touched keys; `None` means that they are not known.
    pub(crate) keys: Option<Vec<Vec<u8>>>,
}

/// Result of a read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Read {
    /// No more entries up to the given batch.
    End,
    Entry(Entry),
    /// Entries were missed: anything may have changed.
    Gap,
}

/// The ring and its file.
#[derive(Debug)]
pub(crate) struct ChangeLog {
    file: File,
}

impl ChangeLog {
    pub(crate) fn new(file: File) -> ChangeLog {
        ChangeLog { file }
    }

    /// A cursor at the end.
    pub(crate) fn end(&self, words: &Words) -> Cursor {
        let gaps = words.log_gaps.load(Ordering::Acquire);
        Cursor { position: words.log_end.load(Ordering::Acquire), gaps }
    }

    /// Appends a batch; the caller holds the writer lock. A failed write counts as a gap.
    pub(crate) fn append<'a>(
        &self,
        words: &Words,
        batch: u64,
        writer: u64,
        keys: impl Iterator<Item = &'a [u8]>,
    ) {
        let mut entry = vec![0; PREFIX_BYTES];
        entry.extend_from_slice(&batch.to_be_bytes());
        entry.extend_from_slice(&writer.to_be_bytes());
        for key in keys {
            let Ok(len) = u16::try_from(key.len()) else {
                entry.truncate(HEADER_BYTES);
                break;
            };
            if entry.len() + 2 + key.len() > ENTRY_BYTES_MAX {
                entry.truncate(HEADER_BYTES);
                break;
            }
            entry.extend_from_slice(&len.to_be_bytes());
            entry.extend_from_slice(key);
        }
        let body = &entry[PREFIX_BYTES..];
        let (len, sum) = (body.len() as u32, crc32c::crc32c(body));
        entry[..4].copy_from_slice(&len.to_be_bytes());
        entry[4..8].copy_from_slice(&sum.to_be_bytes());
        let start = words.log_end.load(Ordering::Acquire);
        let end = start + entry.len() as u64;
        words.log_reserved.store(end, Ordering::SeqCst);
        match self.write_at(&entry, start) {
            Ok(()) => words.log_end.store(end, Ordering::SeqCst),
            Err(error) => {
                tracing::debug!(%error, "the change log cannot be written");
                self.lose(words);
            }
        }
    }

    /// Records a gap: a batch may have touched anything. The caller holds the writer lock.
    pub(crate) fn lose(&self, words: &Words) {
        words.log_gaps.fetch_add(1, Ordering::SeqCst);
    }

    /// The next entry, if its batch is at most `until`.
    pub(crate) fn read(&self, words: &Words, cursor: &mut Cursor, until: u64) -> Read {
        let gaps = words.log_gaps.load(Ordering::SeqCst);
        let end = words.log_end.load(Ordering::SeqCst);
        if gaps != cursor.gaps || cursor.position > end {
            *cursor = Cursor { position: end, gaps };
            return Read::Gap;
        }
        if cursor.position == end {
            return Read::End;
        }
        let entry = self.read_entry(cursor.position);
        let reserved = words.log_reserved.load(Ordering::SeqCst);
        match entry {
            Ok(Some((entry, len))) if reserved.saturating_sub(cursor.position) <= LOG_BYTES => {
                if entry.batch > until {
                    return Read::End;
                }
                cursor.position += len;
                Read::Entry(entry)
            }
            _ => {
                // Overwritten, or torn by a writer that was killed.
                cursor.position = end;
                Read::Gap
            }
        }
    }

    fn read_entry(&self, position: u64) -> io::Result<Option<(Entry, u64)>> {
        let mut prefix = [0; PREFIX_BYTES];
        self.read_at(&mut prefix, position)?;
        let [a, b, c, d, e, f, g, h] = prefix;
        let (len, sum) = (u32::from_be_bytes([a, b, c, d]), u32::from_be_bytes([e, f, g, h]));
        let mut body = vec![0; (len as usize).min(ENTRY_BYTES_MAX)];
        if body.len() < HEADER_BYTES - PREFIX_BYTES {
            return Ok(None);
        }
        self.read_at(&mut body, position + PREFIX_BYTES as u64)?;
        if crc32c::crc32c(&body) != sum {
            return Ok(None);
        }
        let number = |bytes: &[u8]| bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
        let (batch, writer) = (number(&body[..8]), number(&body[8..16]));
        let mut keys = Vec::new();
        let mut rest = &body[16..];
        while let Some((key_len, tail)) = rest.split_at_checked(2) {
            let Some((key, tail)) = tail.split_at_checked(number(key_len) as usize) else { return Ok(None) };
            keys.push(key.to_vec());
            rest = tail;
        }
        let keys = Some(keys).filter(|keys| !keys.is_empty());
        Ok(Some((Entry { batch, writer, keys }, PREFIX_BYTES as u64 + u64::from(len))))
    }

    fn write_at(&self, mut bytes: &[u8], mut position: u64) -> io::Result<()> {
        while !bytes.is_empty() {
            let (at, room) = place(position);
            let (now, rest) = bytes.split_at(bytes.len().min(room));
            self.file.write_all_at(now, at)?;
            position += now.len() as u64;
            bytes = rest;
        }
        Ok(())
    }

    fn read_at(&self, mut bytes: &mut [u8], mut position: u64) -> io::Result<()> {
        while !bytes.is_empty() {
            let (at, room) = place(position);
            let now = bytes.len().min(room);
            let (part, rest) = bytes.split_at_mut(now);
            self.file.read_exact_at(part, at)?;
            position += now as u64;
            bytes = rest;
        }
        Ok(())
    }
}

/// File offset of a position, and the bytes from there to the end of the ring.
fn place(position: u64) -> (u64, usize) {
    let inside = position % LOG_BYTES;
    (PAGE_BYTES + inside, (LOG_BYTES - inside) as usize)
}
