//! The segments of one partition as one log: append, read, look up by time, remove old records.
//!
//! A damaged log still opens: [`Segments::damage`] names the damage, and the records before it can be read.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use millrace_leaf::error_chain;

use super::batch::{HEADER_BYTES, Header, walk};
use super::checkpoint::{self, Checkpoint};
use super::producers::{Producers, Verdict};
use super::recovery;
use super::segment::{ReadPosition, Segment, base_offset_of};
use crate::error::{Error, Result};

/// A partition's log. Not shared: [`super::Partition`] puts a lock around it.
#[derive(Debug)]
pub(crate) struct Segments {
    dir: PathBuf,
    segment_bytes_max: u64,
    /// In offset order; the last one is written to. Empty until the first append.
    list: Vec<Segment>,
    producers: Producers,
    damage: Option<Damage>,
    /// Whether the checkpoint on the disk matches this state.
    checkpointed: bool,
    /// Index of the older segment whose file is open; with the active one, at most two files are open.
    reading: Option<usize>,
}

/// Damage that makes a log unreadable from some offset on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Damage {
    /// First offset that cannot be read.
    pub(crate) offset: i64,
    /// Offset after the last record in the files, as far as recovery can tell.
    pub(crate) end: i64,
    /// The file, what is wrong, and the remedy.
    pub(crate) reason: String,
}

/// Limits on the records that a log keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Retention {
    /// Segments whose newest record is older are removed (milliseconds since 1970-01-01 UTC).
    pub(crate) before_ms: Option<i64>,
    /// The oldest segment is removed while the remaining ones hold at least this many bytes.
    pub(crate) bytes_max: Option<u64>,
}

/// Result of an append.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Appended {
    /// The batch is in the log now.
    New { base_offset: i64 },
    /// The batch was in the log before.
    Duplicate { base_offset: i64 },
    /// The batch may not be appended: protocol error and reason.
    Refused(i16, &'static str),
}

impl Segments {
    /// Opens the log in `dir`. With `durable`, the last segment is flushed and read back from the disk: a
    /// process that was killed before may have left its records in memory only.
    pub(crate) fn open(dir: &Path, segment_bytes_max: u64, durable: bool) -> Self {
        let mut log = Self {
            dir: dir.to_path_buf(),
            segment_bytes_max,
            list: Vec::new(),
            producers: Producers::default(),
            damage: None,
            checkpointed: false,
            reading: None,
        };
        let mut bases = Vec::new();
        if let Err(error) = log.recover(&mut bases, durable) {
            let offset = log.list.last().map_or(bases.first().copied().unwrap_or(0), |last| last.next_offset);
            let held = bases.last().map(|&base| {
                let path = dir.join(super::segment::file_name(base));
                recovery::end_of(&path, base).unwrap_or(base)
            });
            // The damaged part held at least one record.
            let end = held.unwrap_or(0).max(offset + 1);
            log.damage = Some(Damage { offset, end, reason: error_chain::one_line(&error) });
        }
        log
    }

    fn recover(&mut self, bases: &mut Vec<i64>, durable: bool) -> Result<()> {
        let dir = self.dir.clone();
        let listing = "find the records of a partition in";
        for entry in fs::read_dir(&dir).map_err(Error::io(listing, &dir))? {
            let entry = entry.map_err(Error::io(listing, &dir))?;
            match entry.file_name().to_str() {
                Some(name) if checkpoint::is_checkpoint_file(name) => {}
                name => match name.and_then(base_offset_of) {
                    Some(base) => bases.push(base),
                    None => tracing::warn!(path = %entry.path().display(), "not a segment file; ignored"),
                },
            }
        }
        bases.sort_unstable();
        let known = checkpoint::read(&dir);
        let adopted = match known {
            Some(known) => self.adopt(known, bases).map_err(Error::io("read the segments in", &dir))?,
            None => false,
        };
        if adopted {
            self.checkpointed = true;
        } else {
            checkpoint::remove(&dir).map_err(Error::io("remove the checkpoint in", &dir))?;
        }
        for index in self.list.len().saturating_sub(1)..bases.len() {
            let base = bases[index];
            // The last segment of a checkpoint may have grown since.
            let segment = match self.list.pop() {
                Some(last) if last.base_offset == base => last,
                Some(before) if before.next_offset != base => {
                    let end = before.next_offset;
                    let reason = format!("it ends at offset {end} but the next segment begins at {base}");
                    let error = recovery::corrupt(before.path(), before.bytes, &reason, Some(base));
                    self.list.push(before);
                    return Err(error);
                }
                before => {
                    self.list.extend(before);
                    Segment::unread(&self.dir, base)
                }
            };
            self.load(segment, bases.get(index + 1).copied(), durable)?;
        }
        Ok(())
    }

    /// Adopts a checkpoint; `false` when it does not match the files. Oldest segments may be missing, and
    /// newer ones may exist.
    fn adopt(&mut self, known: Checkpoint, bases: &[i64]) -> io::Result<bool> {
        let Some(first) = bases.first() else { return Ok(false) };
        let mut list = Vec::new();
        for known in known.segments.iter().filter(|known| known.base_offset >= *first) {
            if bases.get(list.len()) != Some(&known.base_offset) {
                return Ok(false);
            }
            let Some(mut segment) = Segment::from_checkpoint(&self.dir, known)? else { return Ok(false) };
            let follows = list.last().is_none_or(|last: &Segment| last.next_offset == known.base_offset);
            if !follows {
                return Ok(false);
            }
            segment.close();
            list.push(segment);
        }
        if list.is_empty() {
            return Ok(false);
        }
        self.list = list;
        self.producers = known.producers;
        Ok(true)
    }

    /// Writes a checkpoint of a log that was forced to the disk.
    ///
    /// # Errors
    /// The file system's; the next start then reads more.
    pub(crate) fn checkpoint(&mut self) -> io::Result<()> {
        let sound = self.damage.is_none() && self.list.last().is_some_and(|last| last.check().is_ok());
        if sound && !self.checkpointed {
            let segments = self.list.iter().map(Segment::to_checkpoint).collect();
            checkpoint::write(&self.dir, segments, &self.producers)?;
            self.checkpointed = true;
        }
        Ok(())
    }

    /// Reads one segment from its last known batch on; `next` is the base offset of the segment after it.
    fn load(&mut self, mut segment: Segment, next: Option<i64>, durable: bool) -> Result<()> {
        let path = segment.path().to_path_buf();
        let file = segment.file().map_err(Error::io("open", &path))?;
        let last = next.is_none();
        if durable && last {
            file.sync_all().and_then(|()| forget_pages(&file)).map_err(Error::io("flush", &path))?;
        }
        let bytes = file.metadata().map_err(Error::io("read", &path))?.len();
        let (producers, checkpointed) = (&mut self.producers, &mut self.checkpointed);
        let from = (segment.bytes, segment.next_offset);
        let sound = recovery::walk(&file, bytes, from, last, |header| {
            *checkpointed = false;
            segment.record_batch(header);
            producers.record_batch(header, header.base_offset);
        })
        .map_err(Error::io("read", &path))?;
        let end = segment.next_offset;
        if !last {
            segment.close();
        }
        self.list.push(segment);
        match (next, &sound.broken) {
            (None, _) => recovery::cut_torn_end(&file, &path, bytes, &sound, end).map(drop),
            (Some(next), Some(reason)) => Err(recovery::corrupt(&path, sound.bytes, reason, Some(next))),
            (Some(_), None) => Ok(()),
        }
    }

    /// Closes all files.
    pub(crate) fn close(&mut self) {
        self.list.iter_mut().for_each(Segment::close);
    }

    /// The damage of the log, if any.
    pub(crate) fn damage(&self) -> Option<&Damage> {
        self.damage.as_ref()
    }

    /// First offset in the log.
    pub(crate) fn start_offset(&self) -> i64 {
        self.list.first().map_or(0, |segment| segment.base_offset)
    }

    /// Offset of the next record.
    pub(crate) fn end_offset(&self) -> i64 {
        match &self.damage {
            Some(damage) => damage.end,
            None => self.list.last().map_or(0, |segment| segment.next_offset),
        }
    }

    /// Approximate bytes from `offset` on: a proportional share of its segment plus all later segments. The
    /// count may end at `enough`.
    pub(crate) fn bytes_from(&self, offset: i64, enough: u64) -> u64 {
        let mut total = 0;
        for segment in self.list.iter().rev() {
            if offset <= segment.base_offset {
                total += segment.bytes;
            } else if offset < segment.next_offset {
                let records = (segment.next_offset - segment.base_offset) as u128;
                let share = (segment.next_offset - offset) as u128 * u128::from(segment.bytes) / records;
                return total + (share as u64).max(1);
            } else {
                return total;
            }
            if total >= enough {
                return total;
            }
        }
        total
    }

    /// Appends one batch that was checked, giving it the next offsets.
    ///
    /// # Errors
    /// The file system's; the log is then as before.
    pub(crate) fn append(&mut self, batch: &[u8], produced: &Header) -> io::Result<Appended> {
        match self.producers.check_sequence(produced) {
            Verdict::Append => {}
            Verdict::Duplicate(base_offset) => return Ok(Appended::Duplicate { base_offset }),
            Verdict::Refuse(code, reason) => return Ok(Appended::Refused(code, reason)),
        }
        let end = self.end_offset();
        let full = self
            .list
            .last()
            .is_none_or(|last| last.bytes > 0 && last.bytes + produced.bytes as u64 > self.segment_bytes_max);
        if full {
            self.roll(end)?;
        }
        let header = Header { base_offset: end, ..*produced };
        let Some(active) = self.list.last_mut() else {
            return Err(io::Error::other("the log has no segment"));
        };
        self.checkpointed = false;
        active.append(batch, &header)?;
        self.producers.record_batch(&header, end);
        Ok(Appended::New { base_offset: end })
    }

    /// Closes the active segment and begins the next.
    fn roll(&mut self, base_offset: i64) -> io::Result<()> {
        if let Some(active) = self.list.last_mut() {
            // Recovery trusts all segments but the last.
            let flushed = active.file()?.sync_data();
            if flushed.is_err() {
                active.refuse_writes();
            }
            flushed?;
        }
        self.add_segment(base_offset)?;
        let closed = self.list.len().checked_sub(2);
        if let Some(closed) = closed {
            self.list[closed].close();
        }
        Ok(())
    }

    fn add_segment(&mut self, base_offset: i64) -> io::Result<()> {
        // The directory is opened first, and the file is removed on failure. A leftover file would be a gap
        // at the next start, once more records were appended to the segment before it.
        let dir = File::open(&self.dir)?;
        let segment = Segment::create(&self.dir, base_offset)?;
        if let Err(error) = dir.sync_all() {
            fs::remove_file(segment.path())?;
            return Err(error);
        }
        self.list.push(segment);
        Ok(())
    }

    /// Refuses appends and flushes after a failed flush: the kernel may have dropped the pages that it could
    /// not write, and the next flush would succeed all the same.
    pub(crate) fn refuse_writes(&mut self) {
        if let Some(active) = self.list.last_mut() {
            active.refuse_writes();
        }
    }

    /// Fails where the log refuses appends and flushes.
    ///
    /// # Errors
    /// After a failed flush, or a failed write that could not be undone.
    pub(crate) fn check_writes(&self) -> io::Result<()> {
        self.list.last().map_or(Ok(()), Segment::check)
    }

    /// The file to flush, if any, and the offset up to which the flush makes the log durable.
    pub(crate) fn sync_target(&mut self) -> io::Result<(Option<Arc<File>>, i64)> {
        let end = self.end_offset();
        match self.list.last_mut() {
            Some(active) => {
                active.check()?;
                Ok((Some(active.file()?), end))
            }
            None => Ok((None, end)),
        }
    }

    /// Removes the oldest segments that are beyond `retention`; returns their number. The last one is removed
    /// only when `settled`: consumers may see all of its records.
    ///
    /// # Errors
    /// The file system's; the log is then consistent, and the next call continues.
    pub(crate) fn retain(&mut self, retention: Retention, settled: bool) -> io::Result<usize> {
        let mut removed = 0;
        let mut total: u64 = self.list.iter().map(|segment| segment.bytes).sum();
        while let Some(oldest) = self.list.first().filter(|oldest| oldest.bytes > 0) {
            let expired = match retention.before_ms {
                Some(before_ms) => newest_ms(oldest)? < before_ms,
                None => false,
            };
            let rest = total - oldest.bytes;
            if !expired && retention.bytes_max.is_none_or(|bytes_max| rest < bytes_max) {
                break;
            }
            if self.list.len() == 1 {
                if !expired || !settled {
                    break;
                }
                self.roll(self.end_offset())?;
            }
            fs::remove_file(self.list[0].path())?;
            // Each removal reaches the disk before the next, so that a power loss leaves no gap.
            File::open(&self.dir)?.sync_all()?;
            self.list.remove(0);
            self.reading = self.reading.and_then(|reading| reading.checked_sub(1));
            self.checkpointed = false;
            total = rest;
            removed += 1;
        }
        Ok(removed)
    }

    /// The read position of `offset`, which must be in the log.
    pub(crate) fn read_position(&mut self, offset: i64) -> io::Result<ReadPosition> {
        let index = self.list.partition_point(|segment| segment.base_offset <= offset).saturating_sub(1);
        self.open_for_reading(index);
        let next = self.list.get(index + 1).map(|next| next.base_offset);
        match self.list.get_mut(index) {
            Some(segment) => {
                let mut place = segment.read_position(offset)?;
                place.next = next;
                Ok(place)
            }
            None => Err(io::Error::other("the log has no segment")),
        }
    }

    fn open_for_reading(&mut self, index: usize) {
        if index + 1 == self.list.len() || self.reading == Some(index) {
            return;
        }
        if let Some(before) = self.reading.replace(index).filter(|before| before + 1 != self.list.len()) {
            self.list[before].close();
        }
    }

    /// Offset and timestamp of the first record at or after `timestamp`; those of the batch's first record
    /// where the batch cannot be decompressed.
    ///
    /// # Errors
    /// The file system's.
    pub(crate) fn by_time(&mut self, timestamp: i64) -> io::Result<Option<(i64, i64)>> {
        let Some(index) = self.list.iter().position(|segment| segment.max_timestamp >= timestamp) else {
            return Ok(None);
        };
        self.open_for_reading(index);
        let mut place = self.list[index].read_position_by_time(timestamp)?;
        place.next = self.list.get(index + 1).map(|next| next.base_offset);
        let mut found = None;
        scan(&place, |header, batch| {
            if header.max_timestamp < timestamp {
                return false;
            }
            let mut place = (header.base_offset, header.base_timestamp);
            let walked = walk(header, batch, |record| {
                let reached = record.timestamp >= timestamp;
                if reached {
                    place = (header.base_offset + i64::from(record.offset_delta), record.timestamp);
                }
                !reached
            });
            if let Err(malformed) = walked {
                tracing::debug!(offset = header.base_offset, %malformed, "a batch cannot be searched by time");
            }
            found = Some(place);
            true
        })?;
        Ok(found)
    }
}

/// Timestamp of the newest record; the file's modification time where records have none.
fn newest_ms(segment: &Segment) -> io::Result<i64> {
    if segment.max_timestamp >= 0 {
        return Ok(segment.max_timestamp);
    }
    let written = fs::metadata(segment.path())?.modified()?;
    Ok(written.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as i64))
}

/// Drops the kernel's cached pages of a flushed file, so that reads return what the disk has.
fn forget_pages(file: &File) -> io::Result<()> {
    use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
    Ok(posix_fadvise(file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?)
}

/// Passes whole batches to `stop` until it returns `true`.
fn scan(place: &ReadPosition, mut stop: impl FnMut(&Header, &[u8]) -> bool) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    let mut position = place.position;
    let mut head = [0; HEADER_BYTES];
    while position + HEADER_BYTES as u64 <= place.end {
        place.file.read_exact_at(&mut head, position)?;
        let header = match Header::parse(&head) {
            Ok(header) if header.bytes as u64 <= place.end - position => header,
            _ => return Err(place.damaged(position)),
        };
        let mut batch = vec![0; header.bytes];
        place.file.read_exact_at(&mut batch, position)?;
        place.verify(&header, &batch, position)?;
        if stop(&header, &batch) {
            break;
        }
        position += header.bytes as u64;
    }
    Ok(())
}
