//! Lock of a broker directory: an advisory file lock that admits one process. The file names the holder's
//! process id and address. The kernel drops the lock with the process, so no lock is stale after a crash.

use std::fs::{self, File, TryLockError};
use std::io::{Seek, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use millrace_leaf::private;

use crate::error::{Error, Result};

const FILE: &str = "lock";

/// Retry limit of [`DirLock::take`]: [`is_held`] takes a shared lock for microseconds, which must not keep a
/// broker from starting.
const LOOKED_AT_MAX: Duration = Duration::from_millis(500);
const RETRY: Duration = Duration::from_millis(2);

/// The held lock; dropping it releases it.
#[derive(Debug)]
pub(crate) struct DirLock {
    file: File,
    path: PathBuf,
}

impl DirLock {
    /// Takes the lock of `dir`, which must exist. Blocks up to half a second.
    ///
    /// # Errors
    /// [`Error::HeldByAnother`], [`Error::Io`].
    pub(crate) fn take(dir: &Path) -> Result<Self> {
        let path = dir.join(FILE);
        let file = private::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&path)
            .map_err(Error::io("open", &path))?;
        let started = Instant::now();
        let locked = loop {
            match file.try_lock() {
                Err(TryLockError::WouldBlock) if started.elapsed() < LOOKED_AT_MAX => {
                    std::thread::sleep(RETRY)
                }
                other => break other,
            }
        };
        match locked {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let text = fs::read_to_string(&path).unwrap_or_default();
                let pid = text.lines().next().filter(|pid| !pid.is_empty()).unwrap_or("unknown").to_string();
                return Err(Error::HeldByAnother { dir: dir.to_path_buf(), pid });
            }
            Err(TryLockError::Error(source)) => return Err(Error::io("lock", path)(source)),
        }
        let mut lock = Self { file, path };
        lock.write(&format!("{}\n", std::process::id()))?;
        Ok(lock)
    }

    /// Writes the address on which the holder listens.
    pub(crate) fn set_address(&mut self, address: SocketAddr) -> Result<()> {
        self.write(&format!("{}\n{address}\n", std::process::id()))
    }

    fn write(&mut self, text: &str) -> Result<()> {
        let mut file = &self.file;
        file.rewind()
            .and_then(|()| file.write_all(text.as_bytes()))
            .and_then(|()| file.set_len(text.len() as u64))
            .map_err(Error::io("write", &self.path))
    }
}

/// Whether a process holds `dir`.
pub(crate) fn is_held(dir: &Path) -> bool {
    let Ok(file) = File::open(dir.join(FILE)) else { return false };
    matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock))
}

/// Address on which the process that holds `dir` listens; `None` when no process holds it.
pub(crate) fn holder_address(dir: &Path) -> Option<SocketAddr> {
    holder_line(dir, 1)?.parse().ok()
}

/// Id of the process that holds `dir`; `None` when no process does.
pub(crate) fn holder_pid(dir: &Path) -> Option<u32> {
    holder_line(dir, 0)?.parse().ok()
}

fn holder_line(dir: &Path, index: usize) -> Option<String> {
    if !is_held(dir) {
        return None;
    }
    let text = fs::read_to_string(dir.join(FILE)).ok()?;
    text.lines().nth(index).map(str::to_owned)
}
