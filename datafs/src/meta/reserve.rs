//! Space that is set aside on the disk of the metadata, for changes that make room.
//!
//! Every change needs space itself: SQLite appends it to the log first. So a file beside the metadata holds
//! some blocks. A commit that makes room and finds no space gives them up and is tried again. Until they can be
//! set aside again, every process of the home refuses what takes space.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use parking_lot::Mutex;

use super::shared_page;
use crate::data::no_space;
use crate::error::{Error, Result};

/// The part of the disk that is set aside, in bytes of it for each, and the limits of that.
const PART: u64 = 64;
const BYTES_MIN: u64 = 1 << 20;
const BYTES_MAX: u64 = 8 << 20;
/// Steps in which a nearly full disk is asked for it.
const STEP_BYTES: u64 = 64 << 10;
/// How often a process looks whether another one has given up the space.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// With less free space the file is given up before the metadata is opened, which takes some.
const OPENING_BYTES: u64 = 256 << 10;

/// The file, and whether it holds its blocks as far as this process knows.
#[derive(Debug)]
pub(crate) struct Reserve {
    path: PathBuf,
    place: PathBuf,
    bytes: u64,
    short: AtomicBool,
    looked: Mutex<Instant>,
}

impl Reserve {
    /// The one of a metadata file. Sets nothing aside yet.
    pub(crate) fn of(metadata: &Path) -> Reserve {
        let mut path = metadata.to_owned().into_os_string();
        path.push("-reserve");
        let bytes = share_of_disk(metadata);
        Reserve {
            path: path.into(),
            place: metadata.to_owned(),
            bytes,
            short: AtomicBool::new(false),
            looked: Mutex::new(Instant::now()),
        }
    }

    /// Gives up the space where the metadata could not be opened without it. To be followed by
    /// [`Reserve::take_back`].
    pub(crate) fn let_open(&self) {
        if Space::beside(&self.place).is_some_and(|space| space.available < OPENING_BYTES) {
            self.release();
        }
    }

    /// Fails while the space is not set aside. For what takes space and goes past the metadata; costs next to
    /// nothing unless the space was given up. What another process has given up is noticed within [`LOOK_EVERY`].
    pub(crate) fn check(&self) -> Result<()> {
        if let Some(mut looked) = self.looked.try_lock()
            && looked.elapsed() >= LOOK_EVERY
        {
            *looked = Instant::now();
            self.short.fetch_or(!self.is_whole(), Ordering::AcqRel);
        }
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
        // With less than twice as much, what room was just made for would find none.
        let has_room = || Space::beside(&self.place).is_none_or(|space| space.free >= 2 * self.bytes);
        let whole = self.is_whole() || (has_room() && self.set_aside(self.bytes));
        self.short.store(!whole, Ordering::Release);
        whole
    }

    /// Gives up the space. Returns whether any was set aside.
    pub(crate) fn release(&self) -> bool {
        self.short.store(true, Ordering::Release);
        let held = fs::metadata(&self.path).is_ok_and(|file| file.blocks() > 0);
        held && OpenOptions::new().write(true).open(&self.path).and_then(|file| file.set_len(0)).is_ok()
    }

    /// Sets aside again what was given up and not used, however little that is: others take free space, too.
    pub(crate) fn take_back(&self) {
        for step in 1..=self.bytes / STEP_BYTES {
            if self.is_whole() || !self.set_aside(step * STEP_BYTES) {
                return;
            }
        }
    }

    fn is_whole(&self) -> bool {
        fs::metadata(&self.path)
            .is_ok_and(|file| file.len() >= self.bytes && file.blocks() * 512 >= self.bytes)
    }

    fn set_aside(&self, bytes: u64) -> bool {
        let open =
            || OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&self.path);
        let set =
            open().and_then(|file| Ok(fallocate(&file, FallocateFlags::empty(), 0, bytes as libc::off_t)?));
        // Where nothing can be set aside for another reason, writes go on without.
        set.err().is_none_or(|error| no_space(&error).is_none())
    }
}

/// How much of the disk of a metadata file is set aside for changes that make room, in bytes; so much is left for the
/// log as well, see `file_space.rs`.
pub(super) fn share_of_disk(metadata: &Path) -> u64 {
    let total = Space::beside(metadata).map_or(0, |space| space.total);
    (total / PART).clamp(BYTES_MIN, BYTES_MAX) / STEP_BYTES * STEP_BYTES
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

/// [`allocate`] of a file that something else in this process has open. It is not opened: to close it once more
/// would drop the locks (`fcntl`) that the process has on it.
pub(crate) fn allocate_open(path: &Path, bytes: u64) -> std::io::Result<()> {
    let identity = |file: fs::Metadata| (file.dev(), file.ino());
    let wanted = identity(fs::metadata(path)?);
    for entry in fs::read_dir("/proc/self/fd")? {
        let entry = entry?;
        let descriptor = entry.file_name().to_str().and_then(|number| number.parse().ok());
        if let Some(descriptor) = descriptor
            && fs::metadata(entry.path()).is_ok_and(|file| identity(file) == wanted)
        {
            return match shared_page::fallocate(descriptor, bytes) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            };
        }
    }
    Ok(())
}

/// The space of a disk, in bytes.
struct Space {
    total: u64,
    /// What this process may take of it.
    free: u64,
    /// What is left without privilege, and without what the file system keeps for itself.
    available: u64,
}

impl Space {
    /// That of the disk of a file, whose folder exists; `None` where the system does not tell.
    fn beside(file: &Path) -> Option<Space> {
        let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let stat = nix::sys::statvfs::statvfs(folder).ok()?;
        let bytes = |blocks: u64| blocks.saturating_mul(stat.fragment_size());
        let [total, available] = [stat.blocks(), stat.blocks_available()].map(bytes);
        let free = if nix::unistd::geteuid().is_root() { bytes(stat.blocks_free()) } else { available };
        Some(Space { total, free, available })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_another_process_gave_up_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let [ours, theirs] = [(); 2].map(|()| Reserve::of(&dir.path().join("meta.sqlite")));
        assert!(ours.restore() && theirs.is_whole() && theirs.release() && !ours.is_whole());
        let until = Instant::now() + Duration::from_secs(20);
        while !ours.is_whole() {
            ours.check().unwrap();
            assert!(Instant::now() < until, "taken for whole");
            std::thread::yield_now();
        }
    }
}
