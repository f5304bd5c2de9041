//! Job lock: a locked file that admits one coordinator per job and home, and names its process.
use std::path::Path;

use millrace_leaf::lock_file::{LockFile, NotTaken};
use millrace_leaf::private;

use crate::error::{Error, Result};

/// The lock of a running job; the operating system releases it whenever the process ends.
#[derive(Debug)]
pub(crate) struct JobLock {
    _file: LockFile,
}

impl JobLock {
    /// Locks `<home>/trainer/<job>.lock`; the error names the process that holds it.
    pub(crate) fn take(home: &Path, job: &str) -> Result<JobLock> {
        let folder = home.join("trainer");
        let path = folder.join(format!("{job}.lock"));
        let io = |e| Error::io(format!("lock {}", path.display()), e);
        private::create_dir_all(&folder).map_err(io)?;
        let mut file = LockFile::take(&path).map_err(|error| match error {
            NotTaken::Held { holder } => Error::Busy {
                job: job.to_owned(),
                reason: format!(
                    "it is already running in process {} (wait for it, or stop it)",
                    holder.trim()
                ),
            },
            NotTaken::Io(error) => io(error),
        })?;
        file.describe(&format!("{}\n", std::process::id())).map_err(io)?;
        Ok(JobLock { _file: file })
    }
}
