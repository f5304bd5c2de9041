//! Disk space of the metadata file, allocated before a commit needs it.
//!
//! A commit writes its pages to the log; the file gets them when the log is copied back. If the disk were
//! full by then, the log could be neither copied back nor restarted. Every change appends to the log, even a
//! removal. So a commit first allocates the blocks of all pages of the file ([`FileSpace::ensure`]), and
//! fails if it cannot. It also fails if the file would leave too little of the disk for the log. Without that
//! space changes could not even reuse the pages that removals free in the file. The length of the file stays
//! as it is: SQLite sets it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use parking_lot::Mutex;

use crate::error::{Error, Result, no_space};

/// Step in which the file grows while the disk has [`AHEAD_ROOM_BYTES`] free, so that few commits allocate.
const STEP_BYTES: u64 = 1 << 20;
const AHEAD_ROOM_BYTES: u64 = 128 << 20;

/// Device and inode of a file.
type FileId = (u64, u64);

/// The metadata files of this process, each opened once. Closing a file drops all `fcntl` locks that the
/// process has on it, those of SQLite too. So the last [`FileSpace`] of a file closes it, under this lock.
static OPEN: Mutex<BTreeMap<FileId, Arc<File>>> = Mutex::new(BTreeMap::new());

/// The space of one metadata file. Create it before SQLite locks the file, and drop it after the connections.
#[derive(Debug)]
pub(super) struct FileSpace {
    path: PathBuf,
    id: FileId,
    /// `None` where the file cannot be opened for writing, and while this is dropped.
    file: Option<Arc<File>>,
    noted: Mutex<Noted>,
}

/// Known state of the file.
#[derive(Debug, Default)]
struct Noted {
    /// Bytes from its start that have blocks.
    allocated: u64,
    /// Its length and blocks at that time. A process that copies all of the log back frees the blocks behind
    /// the end of the file.
    len: u64,
    blocks: u64,
}

impl FileSpace {
    /// The space of the file that is open as `handle`.
    pub(super) fn open(path: &Path, handle: &File, id: FileId) -> FileSpace {
        let mut open = OPEN.lock();
        let file = match open.get(&id) {
            Some(file) => Ok(Arc::clone(file)),
            // Reopened by the handle: another file may have the path by now.
            None => open_again(handle).map(Arc::new),
        };
        let file = file
            .inspect(|file| drop(open.insert(id, Arc::clone(file))))
            .inspect_err(|error| {
                tracing::debug!(%error, path = %path.display(), "commits take the space of their pages later");
            })
            .ok();
        FileSpace { path: path.to_owned(), id, file, noted: Mutex::default() }
    }

    /// Allocates blocks for the first `bytes`. Fails rather than leave less than `room` bytes of the disk
    /// free.
    ///
    /// # Errors
    /// [`Error::NoSpace`]. A file system that cannot preallocate is no error.
    pub(super) fn ensure(&self, bytes: u64, room: u64) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let fail = |error| Error::io("allocate space of", &self.path, error);
        let found = file.metadata().map_err(fail)?;
        let mut noted = self.noted.lock();
        let is_unchanged = (found.len(), found.blocks()) == (noted.len, noted.blocks);
        if bytes <= noted.allocated && is_unchanged {
            return Ok(());
        }
        // The count of blocks does not show how far the file reaches: it includes the file system's own
        // blocks, and compression makes it smaller.
        let reaches = found.len().max(if is_unchanged { noted.allocated } else { 0 });
        let missing = bytes.saturating_sub(reaches);
        let free = free_bytes(&self.path);
        if missing > 0 && free.is_some_and(|free| free < room.saturating_add(missing)) {
            return Err(fail(Errno::ENOSPC.into()));
        }
        // A file that is not sparse has all blocks up to its end.
        let known = if found.blocks() * 512 >= found.len() { found.len() } else { 0 };
        let has_room = free.is_some_and(|free| free >= AHEAD_ROOM_BYTES);
        let ahead = if has_room { bytes.next_multiple_of(STEP_BYTES) } else { bytes };
        let mut allocated = ahead;
        let mut done = allocate(file, known, ahead);
        if ahead > bytes && done.as_ref().is_err_and(|error| no_space(error).is_some()) {
            // A quota may be used up, which the free space of the disk does not show.
            allocated = bytes;
            done = allocate(file, known, bytes);
        }
        match done {
            Err(error) if no_space(&error).is_some() => return Err(fail(error)),
            Err(error) => tracing::debug!(%error, path = %self.path.display(), "allocating nothing ahead"),
            Ok(()) => {}
        }
        let now = file.metadata().map_err(fail)?;
        *noted = Noted { allocated: allocated.max(known), len: now.len(), blocks: now.blocks() };
        Ok(())
    }
}

/// Free bytes on the disk of a file, if the system call succeeds.
pub(super) fn free_bytes(path: &Path) -> Option<u64> {
    let stat = nix::sys::statvfs::statvfs(path).ok()?;
    Some(stat.blocks_available().saturating_mul(stat.fragment_size()))
}

impl Drop for FileSpace {
    fn drop(&mut self) {
        let mut open = OPEN.lock();
        drop(self.file.take());
        if open.get(&self.id).is_some_and(|file| Arc::strong_count(file) == 1) {
            open.remove(&self.id);
        }
    }
}

fn open_again(handle: &File) -> io::Result<File> {
    File::options().write(true).open(format!("/proc/self/fd/{}", handle.as_raw_fd()))
}

/// Allocates blocks for `start..end` of a file. Neither its length nor its contents change.
fn allocate(file: &File, start: u64, end: u64) -> io::Result<()> {
    if start >= end {
        return Ok(());
    }
    let keep_size = FallocateFlags::FALLOC_FL_KEEP_SIZE;
    loop {
        match fallocate(file, keep_size, start as libc::off_t, (end - start) as libc::off_t) {
            Err(Errno::EINTR) => {}
            done => return Ok(done?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space(path: &Path) -> FileSpace {
        let handle = File::open(path).unwrap();
        let found = handle.metadata().unwrap();
        FileSpace::open(path, &handle, (found.dev(), found.ino()))
    }

    #[test]
    fn space_is_taken_without_a_change_of_the_file_and_again_after_it_was_given_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, [7; 5_000]).unwrap();
        let space = space(&path);
        let allocated = || std::fs::metadata(&path).unwrap().blocks() * 512;
        for bytes in [5_000, 300_000, 299_000] {
            space.ensure(bytes, 0).unwrap();
            assert!(allocated() >= bytes, "{bytes}: {} bytes", allocated());
        }
        let full = space.ensure(20_000_000, u64::MAX).unwrap_err();
        assert!(matches!(full, Error::NoSpace { quota: false, .. }), "{full:?}");
        space.ensure(300_000, u64::MAX).unwrap();
        // SQLite does this when all of the log is copied back.
        File::options().write(true).open(&path).unwrap().set_len(5_000).unwrap();
        assert!(allocated() < 300_000);
        space.ensure(300_000, 0).unwrap();
        assert!(allocated() >= 300_000);
        assert_eq!(std::fs::read(&path).unwrap(), [7; 5_000]);
    }

    #[test]
    fn a_file_that_takes_fewer_blocks_than_its_length_lacks_no_space() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        // Blocks that are missing for another reason than compression look the same.
        File::create(&path).unwrap().set_len(300_000).unwrap();
        let space = space(&path);
        space.ensure(300_000, u64::MAX).unwrap();
        let full = space.ensure(20_000_000, u64::MAX).unwrap_err();
        assert!(matches!(full, Error::NoSpace { quota: false, .. }), "{full:?}");
    }

    #[test]
    fn one_process_has_a_file_open_once_until_the_last_use_ends() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, b"x").unwrap();
        let (one, other) = (space(&path), space(&path));
        assert!(Arc::ptr_eq(one.file.as_ref().unwrap(), other.file.as_ref().unwrap()));
        let id = one.id;
        drop(one);
        assert!(OPEN.lock().contains_key(&id));
        drop(other);
        assert!(!OPEN.lock().contains_key(&id));
    }
}
