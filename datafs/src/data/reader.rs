//! Reads objects: a small set of open ones, positional reads, every frame verified.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use parking_lot::Mutex;

use super::checksum::{FOOTER_BYTES, Footer, Sums};
use super::error::{ObjectError, Result};
use super::fetch::RemoteData;
use super::object::{Layout, ObjectId};
use super::pool::ObjectPool;
use super::store::Store;
use crate::metrics;

/// Most files kept open: a quarter of the usual limit of 1024 descriptors.
const OPEN_MAX: usize = 256;
/// A file that nobody has read for this long is closed when the next one is opened, so that the
/// space of an object that another process deleted comes free.
const IDLE_MAX: Duration = Duration::from_secs(30);

/// How far ahead of a sequential reader the disk is asked for data.
const AHEAD_BYTES: u64 = 8 * 1024 * 1024;
/// Reads no further apart than this are one sequential reader, whose requests may arrive out of order.
const NEAR_BYTES: u64 = 4 * 1024 * 1024;

/// An object with its checksums in memory.
#[derive(Debug)]
pub(super) struct OpenObject {
    id: ObjectId,
    data: Data,
    sums: Sums,
}

/// Where the bytes of an open object are.
#[derive(Debug)]
enum Data {
    Local(LocalData),
    Remote(RemoteData),
}

impl OpenObject {
    fn open(pool: &ObjectPool, id: ObjectId) -> Result<OpenObject> {
        let (data, sums, stored_bytes) = match pool.store() {
            Store::Local(local) => {
                let (data, sums, bytes) = LocalData::open(local.root(), id)?;
                (Data::Local(data), sums, bytes)
            }
            Store::Remote(remote) => {
                let (data, sums, bytes) = RemoteData::open(pool, remote, id)?;
                (Data::Remote(data), sums, bytes)
            }
        };
        if sums.data_bytes() != stored_bytes {
            return Err(ObjectError::Corrupt {
                id,
                byte: stored_bytes.min(sums.data_bytes()),
                reason: format!("{stored_bytes} bytes are stored, {} belong there", sums.data_bytes()),
            });
        }
        metrics::OBJECTS_OPENED.inc();
        Ok(OpenObject { id, data, sums })
    }

    pub(super) fn read(&self, range: Range<u64>) -> Result<Bytes> {
        self.check_range(range.start, range.end)?;
        let (from, to) = self.sums.window(range.start, range.end);
        let mut window = vec![0; self.length(from, to)?];
        self.read_window(from, &mut window)?;
        let start = (range.start - from) as usize;
        let len = (range.end - range.start) as usize;
        Ok(Bytes::from(window).slice(start..start + len))
    }

    pub(super) fn read_into(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let end = offset.saturating_add(buffer.len() as u64);
        self.check_range(offset, end)?;
        if self.sums.window(offset, end) == (offset, end) {
            return self.read_window(offset, buffer);
        }
        let bytes = self.read(offset..end)?;
        buffer.copy_from_slice(&bytes);
        Ok(())
    }

    fn check_range(&self, start: u64, end: u64) -> Result<()> {
        if start <= end && end <= self.sums.data_bytes() {
            return Ok(());
        }
        Err(ObjectError::Corrupt {
            id: self.id,
            byte: self.sums.data_bytes(),
            reason: format!("bytes {start}..{end} were asked for, but it ends there"),
        })
    }

    fn length(&self, from: u64, to: u64) -> Result<usize> {
        usize::try_from(to - from).map_err(|_| {
            ObjectError::io("read", self.id.data_name(), io::Error::from(ErrorKind::OutOfMemory))
        })
    }

    /// Reads and verifies whole frames.
    fn read_window(&self, from: u64, window: &mut [u8]) -> Result<()> {
        if window.is_empty() {
            return Ok(());
        }
        match &self.data {
            Data::Local(data) => data.read(self.id, from, window)?,
            Data::Remote(data) => data.read(from, window)?,
        }
        self.sums.verify(from, window).map_err(|byte| ObjectError::Corrupt {
            id: self.id,
            byte,
            reason: "checksum mismatch".into(),
        })?;
        metrics::OBJECT_READ_BYTES.inc_by(window.len() as u64);
        if let Data::Local(data) = &self.data {
            data.read_ahead(from, from + window.len() as u64, self.sums.data_bytes());
        }
        Ok(())
    }
}

/// The file of an object on a local store.
#[derive(Debug)]
struct LocalData {
    path: PathBuf,
    file: File,
    /// Where the last read ended.
    position: AtomicU64,
    /// Up to where the disk has been asked for data.
    ahead: AtomicU64,
}

impl LocalData {
    /// The file, its checksums and how many bytes of data there are.
    fn open(root: &Path, id: ObjectId) -> Result<(LocalData, Sums, u64)> {
        let path = root.join(id.data_name());
        let file = open_file(&path, id)?;
        let file_bytes = size_of_file(&file, &path)?;
        let (sums, stored_bytes) = match id.layout() {
            // A pack is read piece by piece, by another reader.
            Layout::Framed | Layout::Pack => {
                let sums = read_sums(&file, &path, file_bytes, id)?;
                let data_bytes = file_bytes.saturating_sub(sums.trailer_bytes());
                (sums, data_bytes)
            }
            Layout::Plain => {
                let sums_path = root.join(id.sums_name());
                let sums_file = open_file(&sums_path, id).map_err(|e| match e {
                    ObjectError::Missing { id } => torn(id, file_bytes),
                    other => other,
                })?;
                let sums_bytes = size_of_file(&sums_file, &sums_path)?;
                (read_sums(&sums_file, &sums_path, sums_bytes, id)?, file_bytes)
            }
        };
        let (position, ahead) = (AtomicU64::new(0), AtomicU64::new(0));
        Ok((LocalData { path, file, position, ahead }, sums, stored_bytes))
    }

    fn read(&self, id: ObjectId, from: u64, window: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(window, from).map_err(|e| match e.kind() {
            ErrorKind::UnexpectedEof => {
                ObjectError::Corrupt { id, byte: from, reason: "the file was cut short".into() }
            }
            _ => ObjectError::io("read object file", &self.path, e),
        })
    }

    /// Asks the disk for what a sequential reader will want next. The kernel's own read-ahead stops at
    /// 128 KiB by default, less than one request of a mount.
    fn read_ahead(&self, from: u64, to: u64, data_bytes: u64) {
        let last = self.position.swap(to, Ordering::Relaxed);
        if from.abs_diff(last) > NEAR_BYTES {
            self.ahead.store(0, Ordering::Relaxed);
            return;
        }
        let start = self.ahead.load(Ordering::Relaxed).max(to);
        let end = to.saturating_add(AHEAD_BYTES).min(data_bytes);
        // In steps of half the distance, so that few reads pay for a call.
        if last == 0 || start.saturating_add(AHEAD_BYTES / 2) > end {
            return;
        }
        self.ahead.store(end, Ordering::Relaxed);
        let advice = PosixFadviseAdvice::POSIX_FADV_WILLNEED;
        let (offset, len) = (start as libc::off_t, (end - start) as libc::off_t);
        if let Err(error) = posix_fadvise(&self.file, offset, len, advice) {
            tracing::debug!(%error, path = %self.path.display(), "read-ahead");
        }
    }
}

/// What an upload that died between data and checksums leaves.
pub(super) fn torn(id: ObjectId, byte: u64) -> ObjectError {
    ObjectError::Corrupt { id, byte, reason: "its checksum file is missing (torn upload)".into() }
}

fn open_file(path: &Path, id: ObjectId) -> Result<File> {
    File::open(path).map_err(|e| match e.kind() {
        ErrorKind::NotFound => ObjectError::Missing { id },
        _ => ObjectError::io("open object file", path, e),
    })
}

fn size_of_file(file: &File, path: &Path) -> Result<u64> {
    let metadata = file.metadata().map_err(|e| ObjectError::io("open object file", path, e))?;
    Ok(metadata.len())
}

/// Reads the checksum table and footer that end at `end`.
fn read_sums(file: &File, path: &Path, end: u64, id: ObjectId) -> Result<Sums> {
    let corrupt = |reason: String| ObjectError::Corrupt { id, byte: end, reason };
    let read = |buffer: &mut [u8], at: u64| {
        file.read_exact_at(buffer, at).map_err(|e| ObjectError::io("read object file", path, e))
    };
    let footer_at = end.checked_sub(FOOTER_BYTES).ok_or_else(|| corrupt("too short for a footer".into()))?;
    let mut raw = [0; FOOTER_BYTES as usize];
    read(&mut raw, footer_at)?;
    let footer = Footer::parse(&raw, id).map_err(&corrupt)?;
    let table_at = footer_at
        .checked_sub(footer.table_bytes())
        .ok_or_else(|| corrupt("too short for its checksum table".into()))?;
    // Bounded by the footer's own limit on data_bytes and by the file that holds it.
    let mut table = vec![0; footer.table_bytes() as usize];
    read(&mut table, table_at)?;
    Sums::parse(&table, &raw, footer).map_err(corrupt)
}

/// The open objects of a pool, least recently used out first.
#[derive(Debug, Default)]
pub(super) struct OpenObjects {
    open: Mutex<HashMap<ObjectId, Slot>>,
}

#[derive(Debug)]
struct Slot {
    object: Arc<OpenObject>,
    used: Instant,
}

impl OpenObjects {
    pub(super) fn get(&self, pool: &ObjectPool, id: ObjectId) -> Result<Arc<OpenObject>> {
        let now = Instant::now();
        if let Some(slot) = self.open.lock().get_mut(&id) {
            slot.used = now;
            return Ok(Arc::clone(&slot.object));
        }
        // Opened outside of the lock; two threads that race here open the file twice, once.
        let object = Arc::new(OpenObject::open(pool, id)?);
        let mut open = self.open.lock();
        open.retain(|_, slot| now.saturating_duration_since(slot.used) < IDLE_MAX);
        if open.len() >= OPEN_MAX {
            let oldest = open.iter().min_by_key(|(_, slot)| slot.used).map(|(id, _)| *id);
            oldest.and_then(|id| open.remove(&id));
        }
        open.insert(id, Slot { object: Arc::clone(&object), used: now });
        Ok(object)
    }

    pub(super) fn forget(&self, id: ObjectId) {
        self.open.lock().remove(&id);
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.open.lock().len()
    }
}
