//! Job lock: a locked file that admits one coordinator per job and home, and names its process.
use std::path::{Path, PathBuf};

use millrace_leaf::lock_file::{LockFile, NotTaken};
use millrace_leaf::private;

use crate::error::{Error, Result};

/// The lock of a running job; the operating system releases it whenever the process ends.
#[derive(Debug)]
pub(crate) struct JobLock {
    file: LockFile,
    path: PathBuf,
    former: Option<String>,
}

impl JobLock {
    /// Locks `<home>/trainer/<job>.lock`; the error names the process that holds it.
    pub(crate) fn take(home: &Path, job: &str) -> Result<JobLock> {
        let folder = home.join("trainer");
        let path = folder.join(format!("{job}.lock"));
        let io = |e| Error::io(format!("lock {}", path.display()), e);
        private::create_dir_all(&folder).map_err(io)?;
        let file = LockFile::take(&path).map_err(|error| match error {
            NotTaken::Held { holder } => Error::Busy {
                job: job.to_owned(),
                reason: format!(
                    "it is already running in process {} (wait for it, or stop it)",
                    holder.lines().next().unwrap_or_default().trim()
                ),
            },
            NotTaken::Io(error) => io(error),
        })?;
        // Not text only after damage, and then it names no holder.
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let former = text.lines().nth(1).map(str::to_owned);
        let mut lock = JobLock { file, path, former: former.clone() };
        // The former holder stays until this process holds the lease.
        lock.write(former.as_deref())?;
        Ok(lock)
    }

    /// The holder of the job's lease in the last process with this lock. That process has ended.
    pub(crate) fn former(&self) -> Option<&str> {
        self.former.as_deref()
    }

    /// Names this process as a holder of the job's lease.
    pub(crate) fn name(&mut self, holder: &str) -> Result<()> {
        self.write(Some(holder))
    }

    fn write(&mut self, holder: Option<&str>) -> Result<()> {
        let text = format!("{}\n{}\n", std::process::id(), holder.unwrap_or_default());
        self.file.describe(&text).map_err(|e| Error::io(format!("write {}", self.path.display()), e))
    }
}
