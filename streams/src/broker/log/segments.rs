//! The segments of one partition as one log: append, read, look up by time.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::batch::{HEADER_BYTES, Header, Records};
use super::producers::{Producers, Verdict};
use super::recovery;
use super::segment::{Place, Segment, base_offset_of};
use crate::error::{Error, Result};

/// A partition's log. Not shared: [`super::Partition`] puts a lock around it.
#[derive(Debug)]
pub(crate) struct Segments {
    dir: PathBuf,
    segment_bytes_max: u64,
    /// In offset order, never empty; the last one is written to.
    list: Vec<Segment>,
    producers: Producers,
    /// Index of the closed segment whose file is open, so that at most two are.
    reading: Option<usize>,
}

/// Result of an append.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Appended {
    /// The batch is in the log now.
    New { base_offset: i64 },
    /// It was there before.
    Duplicate { base_offset: i64 },
    /// It may not be appended: protocol error and reason.
    Refused(i16, &'static str),
}

impl Segments {
    /// Opens the log in `dir`, which must exist; creates the first segment when there is none.
    ///
    /// # Errors
    /// [`Error::Corrupt`], [`Error::Io`].
    pub(crate) fn open(dir: &Path, segment_bytes_max: u64) -> Result<Self> {
        let mut bases = Vec::new();
        for entry in fs::read_dir(dir).map_err(Error::io("list", dir))? {
            let entry = entry.map_err(Error::io("list", dir))?;
            match entry.file_name().to_str().and_then(base_offset_of) {
                Some(base) => bases.push(base),
                None => tracing::warn!(path = %entry.path().display(), "not a segment, left alone"),
            }
        }
        bases.sort_unstable();
        let mut log = Self {
            dir: dir.to_path_buf(),
            segment_bytes_max,
            list: Vec::with_capacity(bases.len().max(1)),
            producers: Producers::default(),
            reading: None,
        };
        for (index, &base) in bases.iter().enumerate() {
            if let Some(before) = log.list.last().filter(|before| before.next_offset != base) {
                let reason =
                    format!("it ends at offset {} but the next segment begins at {base}", before.next_offset);
                return Err(recovery::corrupt(before.path(), before.bytes, &reason));
            }
            let last = index + 1 == bases.len();
            log.load(base, last)?;
        }
        if log.list.is_empty() {
            log.add_segment(0).map_err(Error::io("create a segment in", dir))?;
        }
        Ok(log)
    }

    fn load(&mut self, base: i64, last: bool) -> Result<()> {
        let mut segment = Segment::unread(&self.dir, base);
        let path = segment.path().to_path_buf();
        let file = segment.file().map_err(Error::io("open", &path))?;
        let bytes = file.metadata().map_err(Error::io("read", &path))?.len();
        let producers = &mut self.producers;
        let sound = recovery::walk(&file, bytes, base, last, |header| {
            segment.note(header);
            producers.note(header, header.base_offset);
        })
        .map_err(Error::io("read", &path))?;
        if last {
            recovery::cut_torn_end(&file, &path, bytes, &sound, segment.next_offset)?;
        } else {
            if let Some(reason) = &sound.broken {
                return Err(recovery::corrupt(&path, sound.bytes, reason));
            }
            segment.close();
        }
        self.list.push(segment);
        Ok(())
    }

    /// First offset in the log.
    pub(crate) fn start_offset(&self) -> i64 {
        self.list.first().map_or(0, |segment| segment.base_offset)
    }

    /// Offset of the next record.
    pub(crate) fn end_offset(&self) -> i64 {
        self.list.last().map_or(0, |segment| segment.next_offset)
    }

    /// Bytes from the batch at `offset` on, roughly (exact to an index interval).
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
        match self.producers.judge(produced) {
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
        active.append(batch, &header)?;
        self.producers.note(&header, end);
        Ok(Appended::New { base_offset: end })
    }

    /// Closes the active segment and begins the next.
    fn roll(&mut self, base_offset: i64) -> io::Result<()> {
        if let Some(active) = self.list.last_mut() {
            // Recovery trusts all segments but the last.
            let flushed = active.file()?.sync_data();
            if flushed.is_err() {
                active.spoil();
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
        // A file that stays behind although this fails would be a gap at the next start, once more
        // was appended to the segment before it.
        let dir = File::open(&self.dir)?;
        let segment = Segment::create(&self.dir, base_offset)?;
        if let Err(error) = dir.sync_all() {
            fs::remove_file(segment.path())?;
            return Err(error);
        }
        self.list.push(segment);
        Ok(())
    }

    /// After a failed flush: nothing is appended or called durable any more, since the kernel may
    /// have dropped what it could not write and the next flush would succeed all the same.
    pub(crate) fn spoil(&mut self) {
        if let Some(active) = self.list.last_mut() {
            active.spoil();
        }
    }

    /// The file to force to the disk and the offset up to which that makes the log durable.
    pub(crate) fn sync_target(&mut self) -> io::Result<(Arc<File>, i64)> {
        let end = self.end_offset();
        match self.list.last_mut() {
            Some(active) => {
                active.check()?;
                Ok((active.file()?, end))
            }
            None => Err(io::Error::other("the log has no segment")),
        }
    }

    /// Where to read from `offset`, which must be in the log.
    pub(crate) fn place(&mut self, offset: i64) -> io::Result<Place> {
        let index = self.list.partition_point(|segment| segment.base_offset <= offset).saturating_sub(1);
        self.open_for_reading(index);
        self.list[index].place(offset)
    }

    fn open_for_reading(&mut self, index: usize) {
        if index + 1 == self.list.len() || self.reading == Some(index) {
            return;
        }
        if let Some(before) = self.reading.replace(index).filter(|before| before + 1 != self.list.len()) {
            self.list[before].close();
        }
    }

    /// Offset and timestamp of the first record at or after `timestamp`; exact to the record in
    /// uncompressed batches, to the batch in compressed ones.
    ///
    /// # Errors
    /// The file system's.
    pub(crate) fn by_time(&mut self, timestamp: i64) -> io::Result<Option<(i64, i64)>> {
        let Some(index) = self.list.iter().position(|segment| segment.max_timestamp >= timestamp) else {
            return Ok(None);
        };
        self.open_for_reading(index);
        let place = self.list[index].place_by_time(timestamp)?;
        let mut found = None;
        scan(&place, |header, batch| {
            if header.max_timestamp < timestamp {
                return false;
            }
            found = Some((header.base_offset, header.base_timestamp));
            if !header.is_compressed() {
                let record = Records::new(header, batch).find(|record| record.timestamp >= timestamp);
                if let Some(record) = record {
                    found = Some((header.base_offset + i64::from(record.offset_delta), record.timestamp));
                }
            }
            true
        })?;
        Ok(found)
    }
}

/// Hands whole batches to `stop` until it says so.
fn scan(place: &Place, mut stop: impl FnMut(&Header, &[u8]) -> bool) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    let mut position = place.position;
    let mut head = [0; HEADER_BYTES];
    while position + HEADER_BYTES as u64 <= place.end {
        place.file.read_exact_at(&mut head, position)?;
        let Ok(header) = Header::parse(&head) else { break };
        let mut batch = vec![0; header.bytes];
        place.file.read_exact_at(&mut batch, position)?;
        if stop(&header, &batch) {
            break;
        }
        position += header.bytes as u64;
    }
    Ok(())
}
