//! Recovery of segment files at start. It reads every header after the checkpoint, and verifies every
//! checksum of the last segment there. Earlier segments were flushed before their successor was created, so
//! only the last can end in a torn write, which recovery cuts off. The checksums of earlier segments are
//! verified when batches are read ([`super::segment::ReadPosition`]).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::batch::{HEADER_BYTES, Header};
use crate::error::{Error, Result};

const BUFFER_BYTES: usize = 256 << 10;

/// End of the sound part of a segment, and the reason.
pub(crate) struct ValidPrefix {
    pub(crate) bytes: u64,
    /// Defect of the batch that follows, if any.
    pub(crate) broken: Option<String>,
}

/// A file read forwards through a buffer.
struct Window<'a> {
    file: &'a File,
    bytes: u64,
    buffer: Vec<u8>,
    start: u64,
}

impl<'a> Window<'a> {
    fn new(file: &'a File, bytes: u64) -> Self {
        Self { file, bytes, buffer: Vec::new(), start: 0 }
    }

    /// `want` bytes from `position`, or fewer at the end of the file.
    fn at(&mut self, position: u64, want: usize) -> io::Result<&[u8]> {
        let want = want.min(usize::try_from(self.bytes - position).unwrap_or(usize::MAX));
        let held = self.start..self.start + self.buffer.len() as u64;
        if !held.contains(&position) || held.end < position + want as u64 {
            let size =
                want.max(BUFFER_BYTES).min(usize::try_from(self.bytes - position).unwrap_or(usize::MAX));
            self.buffer.resize(size, 0);
            self.file.read_exact_at(&mut self.buffer, position)?;
            self.start = position;
        }
        let from = (position - self.start) as usize;
        Ok(&self.buffer[from..from + want])
    }
}

/// Walks the batches of a segment of `bytes` from a position and its offset on, handing each header
/// to `seen`.
pub(crate) fn walk(
    file: &File,
    bytes: u64,
    (mut position, mut expected): (u64, i64),
    with_checksums: bool,
    mut seen: impl FnMut(&Header),
) -> io::Result<ValidPrefix> {
    let mut window = Window::new(file, bytes);
    let broken = |bytes, reason: String| Ok(ValidPrefix { bytes, broken: Some(reason) });
    while position < bytes {
        let header = match Header::parse(window.at(position, HEADER_BYTES)?) {
            Ok(header) => header,
            Err(reason) => return broken(position, reason.to_string()),
        };
        if header.base_offset != expected {
            let found = header.base_offset;
            return broken(position, format!("offset {found} where {expected} should be"));
        }
        if header.bytes as u64 > bytes - position {
            return broken(position, "the batch is cut short".to_string());
        }
        if with_checksums && !header.crc_matches(window.at(position, header.bytes)?) {
            return broken(position, "checksum mismatch".to_string());
        }
        seen(&header);
        position += header.bytes as u64;
        expected = header.next_offset();
    }
    Ok(ValidPrefix { bytes: position, broken: None })
}

/// Offset after the last sound batch of the same log after `position`. If there is one, the damage at
/// `position` is not a torn end: cutting there would drop acknowledged records.
fn offset_after_damage(file: &File, bytes: u64, position: u64, mut expected: i64) -> io::Result<Option<i64>> {
    let mut window = Window::new(file, bytes);
    let mut at = position + 1;
    let mut end = None;
    while at + HEADER_BYTES as u64 <= bytes {
        if let Ok(header) = Header::parse(window.at(at, HEADER_BYTES)?) {
            let plausible = header.base_offset >= expected
                && header.base_offset - expected < 1 << 32
                && header.bytes as u64 <= bytes - at;
            if plausible && header.crc_matches(window.at(at, header.bytes)?) {
                expected = header.next_offset();
                end = Some(expected);
                at += header.bytes as u64;
                continue;
            }
        }
        at += 1;
    }
    Ok(end)
}

/// Offset after the last sound batch of a segment, including batches after damage.
pub(crate) fn end_of(path: &Path, base_offset: i64) -> io::Result<i64> {
    let file = File::open(path)?;
    let bytes = file.metadata()?.len();
    let mut end = base_offset;
    let sound = walk(&file, bytes, (0, base_offset), true, |header| end = header.next_offset())?;
    Ok(offset_after_damage(&file, bytes, sound.bytes, end)?.unwrap_or(end))
}

/// Cuts a torn end off the last segment; returns the number of bytes cut.
///
/// # Errors
/// [`Error::Corrupt`] when sound batches follow the damage.
pub(crate) fn cut_torn_end(
    file: &File,
    path: &Path,
    bytes: u64,
    sound: &ValidPrefix,
    expected: i64,
) -> Result<u64> {
    let Some(reason) = &sound.broken else { return Ok(0) };
    if offset_after_damage(file, bytes, sound.bytes, expected).map_err(Error::io("read", path))?.is_some() {
        return Err(corrupt(path, sound.bytes, reason, None));
    }
    file.set_len(sound.bytes).map_err(Error::io("cut the torn end of", path))?;
    file.sync_all().map_err(Error::io("flush", path))?;
    let cut = bytes - sound.bytes;
    tracing::warn!(
        path = %path.display(), bytes = cut, offset = expected, reason,
        "cut a torn write off the end of a log; nothing acknowledged was in it unless the machine lost power"
    );
    Ok(cut)
}

/// The error for a damaged segment; `next` is the base offset of the segment after it.
pub(crate) fn corrupt(path: &Path, position: u64, reason: &str, next: Option<i64>) -> Error {
    let cut = format!("cut it (truncate -s {position} {})", path.display());
    let advice = match next {
        None => format!("{cut} to give up the records from there on"),
        Some(next) => format!(
            "remove this segment and all earlier ones to keep the records from offset {next} on; or {cut} \
             and remove all later segments to keep the records before"
        ),
    };
    Error::Corrupt { path: path.to_path_buf(), position, reason: reason.to_string(), advice }
}
