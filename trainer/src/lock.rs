//! Job lock: a locked file that admits one coordinator per job and home, and names its process.
use std::fs::{File, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::Path;

use millrace_leaf::private;

use crate::error::{Error, Result};

/// The lock of a running job; the operating system releases it whenever the process ends.
#[derive(Debug)]
pub(crate) struct JobLock {
    file: File,
}

impl JobLock {
    /// Locks `<home>/trainer/<job>.lock`; the error names the process that holds it.
    pub(crate) fn take(home: &Path, job: &str) -> Result<JobLock> {
        let folder = home.join("trainer");
        let path = folder.join(format!("{job}.lock"));
        let io = |e| Error::io(format!("lock {}", path.display()), e);
        private::create_dir_all(&folder).map_err(io)?;
        let mut file =
            private::options().read(true).write(true).create(true).truncate(false).open(&path).map_err(io)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                // Best effort: the error message works without the process number.
                let _ = file.read_to_string(&mut holder);
                return Err(Error::Busy {
                    job: job.to_owned(),
                    reason: format!(
                        "it is already running in process {} (wait for it, or stop it)",
                        holder.trim()
                    ),
                });
            }
            Err(TryLockError::Error(error)) => return Err(io(error)),
        }
        file.set_len(0).map_err(io)?;
        file.rewind().map_err(io)?;
        writeln!(file, "{}", std::process::id()).map_err(io)?;
        Ok(JobLock { file })
    }
}

impl Drop for JobLock {
    fn drop(&mut self) {
        // A child that was forked just now has the file open until it runs its own program. Closing the file alone would
        // leave the job locked as long. An error leaves just that.
        let _ = self.file.unlock();
    }
}
