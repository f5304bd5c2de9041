//! Reserved space on the disk of the metadata, for transactions that free space.
//!
//! Every change needs space, because SQLite appends it to the log first. So a file beside the metadata holds
//! some blocks. When a commit that frees space finds none, it releases a part of these blocks and is retried.
//! Until the blocks are reserved again, every process of the home refuses operations that take space. Only a
//! part, because a process that fills the disk may take what was released before the commit does.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use millrace_leaf::private;
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use parking_lot::Mutex;

use super::shared_page;
use crate::error::{Error, Result, no_space};

/// The reserve is 1/`PART` of the disk, within these limits in bytes.
const PART: u64 = 64;
const BYTES_MIN: u64 = 1 << 20;
const BYTES_MAX: u64 = 8 << 20;
/// Step in which space is reserved on a nearly full disk.
const STEP_BYTES: u64 = 64 << 10;
/// A commit without space releases 1/`RELEASED_PART` of the reserve at a time, at least [`STEP_BYTES`].
const RELEASED_PART: u64 = 16;
/// How often a process checks whether another one has released the reserve.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// With less free space as much of the reserve is released before the metadata is opened, which takes some.
const OPENING_BYTES: u64 = 256 << 10;

/// The reserve file, and whether it holds its blocks as far as this process knows.
#[derive(Debug)]
pub(crate) struct Reserve {
    path: PathBuf,
    place: PathBuf,
    bytes: u64,
    short: AtomicBool,
    looked: Mutex<Instant>,
}

impl Reserve {
    /// The reserve of a metadata file. Reserves nothing yet.
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

    /// Releases [`OPENING_BYTES`] if the metadata could not be opened without them. Returns whether any were
    /// reserved; the caller then calls [`Reserve::take_back`].
    pub(crate) fn let_open(&self) -> bool {
        let is_full = Space::beside(&self.place).is_some_and(|space| space.available < OPENING_BYTES);
        is_full && self.release_bytes(OPENING_BYTES)
    }

    /// Fails while the space is not reserved. For operations that take space outside of the metadata. Costs
    /// next to nothing unless the reserve was released. A release by another process is noticed within
    /// [`LOOK_EVERY`].
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

    /// The error of an operation that takes space while none is reserved.
    pub(crate) fn refusal(&self) -> Error {
        Error::NoSpace { place: self.place.display().to_string(), quota: false }
    }

    /// Reserves the space if it is not reserved. Returns false when the disk has too little.
    pub(crate) fn restore(&self) -> bool {
        // Twice as much must be free: else the operations that space was just freed for would find none.
        let has_room = || Space::beside(&self.place).is_none_or(|space| space.free >= 2 * self.bytes);
        let whole = self.is_whole() || (has_room() && self.set_aside(self.bytes));
        self.short.store(!whole, Ordering::Release);
        whole
    }

    /// Releases a part of the reserve. Returns false when none was left. A caller that still finds no space
    /// calls again.
    pub(crate) fn release(&self) -> bool {
        self.release_bytes((self.bytes / RELEASED_PART).max(STEP_BYTES))
    }

    fn release_bytes(&self, bytes: u64) -> bool {
        self.short.store(true, Ordering::Release);
        let cut = || {
            let file = OpenOptions::new().write(true).open(&self.path)?;
            let found = file.metadata()?;
            // The blocks are those of the file's beginning: a length set by two processes at once has a hole.
            let held = found.len().min(found.blocks() * 512);
            file.set_len(held.saturating_sub(bytes))?;
            Ok::<_, std::io::Error>(held > 0)
        };
        cut().unwrap_or(false)
    }

    /// Reserves released and unused space again, however little: other processes take free space, too.
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
        let open = || private::options().write(true).create(true).truncate(false).open(&self.path);
        let set =
            open().and_then(|file| Ok(fallocate(&file, FallocateFlags::empty(), 0, bytes as libc::off_t)?));
        // When reserving fails for another reason, writes go on without a reserve.
        set.err().is_none_or(|error| no_space(&error).is_none())
    }
}

/// Bytes to reserve on the disk of a metadata file. The same amount is left for the log, see `file_space.rs`.
pub(super) fn share_of_disk(metadata: &Path) -> u64 {
    let total = Space::beside(metadata).map_or(0, |space| space.total);
    (total / PART).clamp(BYTES_MIN, BYTES_MAX) / STEP_BYTES * STEP_BYTES
}

/// Allocates blocks for the first bytes of a file without changing its contents. A write to mapped memory
/// without a block for its page would end the process. Extends a shorter file.
pub(crate) fn allocate(file: &File, bytes: u64) -> std::io::Result<()> {
    match fallocate(file, FallocateFlags::empty(), 0, bytes as libc::off_t) {
        Err(Errno::EOPNOTSUPP | Errno::ENOSYS) if file.metadata()?.len() >= bytes => Ok(()),
        // This writes zeroes, which is safe only for new files.
        Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => {
            Ok(nix::fcntl::posix_fallocate(file, 0, bytes as libc::off_t)?)
        }
        done => Ok(done?),
    }
}

/// [`allocate`] for a file that this process already has open. It uses that descriptor: opening and closing
/// the file once more would drop the `fcntl` locks that the process has on it.
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
    /// Free space that this process may take.
    free: u64,
    /// Free space for a process without privileges.
    available: u64,
}

impl Space {
    /// The space of the disk of `file`, whose folder exists; `None` if the system call fails.
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

    #[test]
    fn it_is_released_part_by_part_until_none_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let reserve = Reserve::of(&dir.path().join("meta.sqlite"));
        assert!(reserve.restore());
        let held = || fs::metadata(&reserve.path).unwrap().len();
        let mut parts = 0;
        let mut last = held();
        while reserve.release() {
            assert!(held() < last);
            last = held();
            parts += 1;
        }
        assert_eq!((last, parts), (0, RELEASED_PART));
        assert!(!reserve.release() && !reserve.is_whole());
        reserve.take_back();
        assert!(reserve.is_whole());
        // A process killed after its first step, and two at once, leave a hole behind the blocks.
        assert!(reserve.release() && reserve.release());
        OpenOptions::new().write(true).open(&reserve.path).unwrap().set_len(reserve.bytes).unwrap();
        let blocks = || fs::metadata(&reserve.path).unwrap().blocks();
        let before = blocks();
        assert!(!reserve.is_whole() && reserve.release() && blocks() < before);
    }
}
