//! Space that is set aside on the disk of the metadata, for changes that make room.
//!
//! Every change needs space itself: SQLite appends it to the log first. So a file beside the metadata holds
//! some blocks. A commit that makes room and finds no space gives them up and is tried again. Until they can be
//! set aside again, every process of the home refuses what takes space.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};

use crate::error::{Error, Result};

/// The part of the disk that is set aside, in bytes of it for each, and the limits of that.
const PART: u64 = 64;
const BYTES_MIN: u64 = 256 << 10;
const BYTES_MAX: u64 = 4 << 20;
/// With less free space the file is given up before the metadata is opened, which takes some.
const OPENING_BYTES: u64 = 256 << 10;

/// The file, and whether it holds its blocks as far as this process knows.
#[derive(Debug)]
pub(crate) struct Reserve {
    path: PathBuf,
    place: PathBuf,
    bytes: u64,
    short: AtomicBool,
}

impl Reserve {
    /// The one of a metadata file. Sets nothing aside yet.
    pub(crate) fn of(metadata: &Path) -> Reserve {
        let mut path = metadata.to_owned().into_os_string();
        path.push("-reserve");
        let (total, _) = space_beside(metadata).unwrap_or((0, 0));
        let bytes = (total / PART).clamp(BYTES_MIN, BYTES_MAX);
        Reserve { path: path.into(), place: metadata.to_owned(), bytes, short: AtomicBool::new(false) }
    }

    /// Gives up the space where the metadata could not be opened without it.
    pub(crate) fn let_open(&self) {
        if space_beside(&self.place).is_some_and(|(_, free)| free < OPENING_BYTES) {
            self.release();
        }
    }

    /// Fails while the space is not set aside. For what takes space and goes past the metadata; costs nothing
    /// unless the space was given up.
    pub(crate) fn check(&self) -> Result<()> {
        if !self.short.load(Ordering::Acquire) || self.restore() {
            return Ok(());
        }
        Err(self.refusal())
    }

    /// The error of what takes space while none is set aside.
    pub(crate) fn refusal(&self) -> Error {
        Error::NoSpace { place: self.place.display().to_string(), quota: false }
    }

    /// Sees that the space is set aside. Returns false where there is too little.
    pub(crate) fn restore(&self) -> bool {
        let whole = self.is_whole() || self.set_aside();
        self.short.store(!whole, Ordering::Release);
        whole
    }

    /// Gives up the space. Returns whether any was set aside.
    pub(crate) fn release(&self) -> bool {
        self.short.store(true, Ordering::Release);
        let held = fs::metadata(&self.path).is_ok_and(|file| file.blocks() > 0);
        held && OpenOptions::new().write(true).open(&self.path).and_then(|file| file.set_len(0)).is_ok()
    }

    fn is_whole(&self) -> bool {
        fs::metadata(&self.path)
            .is_ok_and(|file| file.len() >= self.bytes && file.blocks() * 512 >= self.bytes)
    }

    fn set_aside(&self) -> bool {
        // Not the last of it: somebody just made that room for a purpose.
        if space_beside(&self.place).is_some_and(|(_, free)| free < 2 * self.bytes) {
            return false;
        }
        let open =
            || OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&self.path);
        let Ok(file) = open() else { return false };
        match fallocate(&file, FallocateFlags::empty(), 0, self.bytes as libc::off_t) {
            Ok(()) => true,
            // Nothing can be set aside there, and nobody is made to suffer for it.
            Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => true,
            Err(_) => {
                // What of it was allocated is worth more as free space.
                let _ = file.set_len(0);
                false
            }
        }
    }
}

/// Gives the first bytes of a file their blocks, without a change of what is in them: a write to mapped memory
/// that finds no block for its page ends the process. Makes the file longer where it is shorter.
pub(crate) fn allocate(file: &File, bytes: u64) -> std::io::Result<()> {
    match fallocate(file, FallocateFlags::empty(), 0, bytes as libc::off_t) {
        Err(Errno::EOPNOTSUPP | Errno::ENOSYS) if file.metadata()?.len() >= bytes => Ok(()),
        // Writes zeroes, which is right for new files alone.
        Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => {
            Ok(nix::fcntl::posix_fallocate(file, 0, bytes as libc::off_t)?)
        }
        done => Ok(done?),
    }
}

/// Size and free bytes of the disk of a file, whose folder exists.
fn space_beside(file: &Path) -> Option<(u64, u64)> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let stat = nix::sys::statvfs::statvfs(folder).ok()?;
    let bytes = |blocks: u64| blocks.saturating_mul(stat.fragment_size());
    Some((bytes(stat.blocks()), bytes(stat.blocks_available())))
}
