//! Lock files: a private file that one process keeps locked and that describes this process. The kernel drops the
//! lock with the process, so no lock is stale after a crash.

use std::fs::{File, TryLockError};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::private;

/// How long to retry a lock that is held. [`holder`] takes a shared lock for microseconds, which must not keep a
/// service from starting.
const LOOKED_AT_MAX: Duration = Duration::from_millis(500);
const RETRY: Duration = Duration::from_millis(2);

/// A held lock; dropping it releases it.
#[derive(Debug)]
pub struct LockFile {
    file: File,
}

/// Why a lock was not taken.
#[derive(Debug)]
pub enum NotTaken {
    /// Another process holds it.
    Held {
        /// What the file says about that process; empty if it cannot be read.
        holder: String,
    },
    /// The file cannot be opened or locked.
    Io(io::Error),
}

impl LockFile {
    /// Opens or creates a file and locks it. Blocks up to half a second.
    ///
    /// # Errors
    /// [`NotTaken`]
    pub fn take(path: &Path) -> Result<LockFile, NotTaken> {
        let mut file = private::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(NotTaken::Io)?;
        let started = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(LockFile { file }),
                Err(TryLockError::WouldBlock) if started.elapsed() < LOOKED_AT_MAX => {
                    std::thread::sleep(RETRY)
                }
                Err(TryLockError::WouldBlock) => return Err(NotTaken::Held { holder: text_of(&mut file) }),
                Err(TryLockError::Error(error)) => return Err(NotTaken::Io(error)),
            }
        }
    }

    /// Replaces the description of this process.
    ///
    /// # Errors
    /// Those of writing the file.
    pub fn describe(&mut self, text: &str) -> io::Result<()> {
        // In place, since the lock belongs to this file; a reader may see a torn text. The file is cut last, so that
        // a full disk has room for the text.
        self.file.rewind()?;
        self.file.write_all(text.as_bytes())?;
        self.file.set_len(text.len() as u64)
    }
}

impl Drop for LockFile {
    fn drop(&mut self) {
        // A child that was forked just now has the file open until it runs its own program. Closing the file alone
        // would leave it locked as long. An error leaves just that.
        let _ = self.file.unlock();
    }
}

/// What a lock file says about the process that holds it; empty if it cannot be read. `None` when no process holds
/// it: the file then describes a process that has ended.
pub fn holder(path: &Path) -> Option<String> {
    let mut file = File::open(path).ok()?;
    match file.try_lock_shared() {
        Err(TryLockError::WouldBlock) => Some(text_of(&mut file)),
        Ok(()) | Err(TryLockError::Error(_)) => None,
    }
}

fn text_of(file: &mut File) -> String {
    let mut text = String::new();
    // Every caller works without the description.
    file.read_to_string(&mut text).ok();
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_held_lock_is_refused_with_its_holder_and_free_after_the_drop() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        assert_eq!(holder(&path), None);
        let mut lock = LockFile::take(&path).unwrap();
        lock.describe("process 4711").unwrap();
        lock.describe("process 7").unwrap();
        assert_eq!(holder(&path).as_deref(), Some("process 7"));
        let refused = LockFile::take(&path).unwrap_err();
        assert!(matches!(&refused, NotTaken::Held { holder } if holder == "process 7"), "{refused:?}");
        drop(lock);
        assert_eq!(holder(&path), None);
        drop(LockFile::take(&path).unwrap());
    }

    #[test]
    fn a_lock_that_is_looked_at_is_taken_afterwards() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        drop(LockFile::take(&path).unwrap());
        let looking = File::open(&path).unwrap();
        looking.lock_shared().unwrap();
        let ended = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            drop(looking);
        });
        drop(LockFile::take(&path).unwrap());
        ended.join().unwrap();
    }
}
