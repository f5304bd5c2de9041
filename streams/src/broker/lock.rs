//! Lock of a broker directory, which admits one process. The file names the holder's process id and address.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use millrace_leaf::lock_file::{self, LockFile, NotTaken};

use crate::error::{Error, Result};

const FILE: &str = "lock";

/// The held lock; dropping it releases it.
#[derive(Debug)]
pub(crate) struct DirLock {
    file: LockFile,
    path: PathBuf,
}

impl DirLock {
    /// Takes the lock of `dir`, which must exist. Blocks up to half a second.
    ///
    /// # Errors
    /// [`Error::HeldByAnother`], [`Error::Io`].
    pub(crate) fn take(dir: &Path) -> Result<Self> {
        let path = dir.join(FILE);
        let file = LockFile::take(&path).map_err(|error| match error {
            NotTaken::Held { holder } => {
                let pid =
                    holder.lines().next().filter(|pid| !pid.is_empty()).unwrap_or("unknown").to_string();
                Error::HeldByAnother { dir: dir.to_path_buf(), pid }
            }
            NotTaken::Io(source) => Error::io("lock", &path)(source),
        })?;
        let mut lock = Self { file, path };
        lock.write(&format!("{}\n", std::process::id()))?;
        Ok(lock)
    }

    /// Writes the address on which the holder listens.
    pub(crate) fn set_address(&mut self, address: SocketAddr) -> Result<()> {
        self.write(&format!("{}\n{address}\n", std::process::id()))
    }

    fn write(&mut self, text: &str) -> Result<()> {
        self.file.describe(text).map_err(Error::io("write", &self.path))
    }
}

/// Whether a process holds `dir`.
pub(crate) fn is_held(dir: &Path) -> bool {
    lock_file::holder(&dir.join(FILE)).is_some()
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
    lock_file::holder(&dir.join(FILE))?.lines().nth(index).map(str::to_owned)
}
