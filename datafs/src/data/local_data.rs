//! The local file of an object: in a local store, or a copy of a small object in the cache.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use super::checksum::{FOOTER_BYTES, Footer, Sums};
use super::deleted::is_deleted;
use super::encoded::{self, EncodedIndex};
use super::error::{ObjectError, Result};
use super::index::Index;
use super::keyring::Keyring;
use crate::object::{Layout, ObjectId};

/// Read-ahead distance of a sequential reader, in bytes.
const AHEAD_BYTES: u64 = 8 * 1024 * 1024;
/// Reads at most this far apart are one sequential reader, whose requests may arrive out of order.
const NEAR_BYTES: u64 = 4 * 1024 * 1024;

/// The open file, with the state of its read-ahead.
#[derive(Debug)]
pub(super) struct LocalData {
    path: PathBuf,
    file: File,
    /// Where the last read ended.
    position: AtomicU64,
    /// Where the requested read-ahead ends.
    ahead: AtomicU64,
}

impl LocalData {
    /// Opens the file of an object in a local store and reads its frame index.
    pub(super) fn open(root: &Path, id: ObjectId, keys: &Keyring) -> Result<(LocalData, Index)> {
        let path = root.join(id.data_name());
        let file = open_file(&path, id)?;
        Self::over(root, path, file, id, keys)
    }

    /// [`LocalData::open`] for a file that is already open.
    pub(super) fn over(
        root: &Path,
        path: PathBuf,
        file: File,
        id: ObjectId,
        keys: &Keyring,
    ) -> Result<(LocalData, Index)> {
        let file_bytes = size_of_file(&file, &path)?;
        let (index, stored_bytes) = match id.layout() {
            // `pack_reader.rs` reads packs; none arrives here.
            Layout::Framed | Layout::Pack => {
                let sums = read_sums(&file, &path, file_bytes, id)?;
                let data_bytes = file_bytes.saturating_sub(sums.trailer_bytes());
                (Index::Plain(sums), data_bytes)
            }
            Layout::Plain => {
                let sums_path = root.join(id.sums_name());
                let sums_file = open_file(&sums_path, id).map_err(|e| match e {
                    ObjectError::Missing { id } => torn(id, file_bytes),
                    other => other,
                })?;
                let sums_bytes = size_of_file(&sums_file, &sums_path)?;
                (Index::Plain(read_sums(&sums_file, &sums_path, sums_bytes, id)?), file_bytes)
            }
            Layout::Encoded | Layout::RemotePack => {
                let index = Index::Encoded(Box::new(read_encoded(&file, &path, file_bytes, id, keys)?));
                let data_bytes = index.data_bytes();
                (index, data_bytes)
            }
        };
        check_length(id, &index, stored_bytes)?;
        let (position, ahead) = (AtomicU64::new(0), AtomicU64::new(0));
        Ok((LocalData { path, file, position, ahead }, index))
    }

    /// Whether the file has been unlinked.
    pub(super) fn is_deleted(&self) -> bool {
        is_deleted(&self.file)
    }

    /// Fills `window` with stored bytes from `from` on, not verified.
    pub(super) fn read(&self, id: ObjectId, from: u64, window: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(window, from).map_err(|e| match e.kind() {
            ErrorKind::UnexpectedEof => {
                ObjectError::Corrupt { id, byte: from, reason: "the file was cut short".into() }
            }
            _ => ObjectError::io("read object file", &self.path, e),
        })
    }

    /// Requests read-ahead for a sequential reader. The kernel's own read-ahead stops at 128 KiB by default,
    /// less than one request of a mount.
    pub(super) fn read_ahead(&self, from: u64, to: u64, data_bytes: u64) {
        let last = self.position.swap(to, Ordering::Relaxed);
        if from.abs_diff(last) > NEAR_BYTES {
            self.ahead.store(0, Ordering::Relaxed);
            return;
        }
        let start = self.ahead.load(Ordering::Relaxed).max(to);
        let end = to.saturating_add(AHEAD_BYTES).min(data_bytes);
        // In steps of half the distance, so that few reads pay for a system call.
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

/// Fails when the number of stored data bytes differs from the index.
pub(super) fn check_length(id: ObjectId, index: &Index, stored_bytes: u64) -> Result<()> {
    let data_bytes = index.data_bytes();
    if data_bytes == stored_bytes {
        return Ok(());
    }
    Err(ObjectError::Corrupt {
        id,
        byte: stored_bytes.min(data_bytes),
        reason: format!("{stored_bytes} bytes are stored, {data_bytes} belong there"),
    })
}

/// The error for an upload that stopped between data and checksums.
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
    // `Footer::parse` bounds data_bytes, and the file is at least this long.
    let mut table = vec![0; footer.table_bytes() as usize];
    read(&mut table, table_at)?;
    Sums::parse(&table, &raw, footer).map_err(corrupt)
}

/// Reads the table and footer of an encoded object.
fn read_encoded(file: &File, path: &Path, end: u64, id: ObjectId, keys: &Keyring) -> Result<EncodedIndex> {
    let corrupt = |reason: &str| ObjectError::Corrupt { id, byte: end, reason: reason.to_owned() };
    let read = |buffer: &mut [u8], at: u64| {
        file.read_exact_at(buffer, at).map_err(|e| ObjectError::io("read object file", path, e))
    };
    let footer_at = end.checked_sub(encoded::FOOTER_BYTES as u64);
    let mut footer = [0; encoded::FOOTER_BYTES];
    read(&mut footer, footer_at.ok_or_else(|| corrupt("too short for a footer"))?)?;
    let trailer_bytes = encoded::trailer_bytes(&footer).map_err(|reason| corrupt(&reason))?;
    let trailer_at = end.checked_sub(trailer_bytes);
    let mut trailer = vec![0; trailer_bytes as usize];
    read(&mut trailer, trailer_at.ok_or_else(|| corrupt("too short for its table of frames"))?)?;
    EncodedIndex::parse(&trailer, end, id, keys)
}
