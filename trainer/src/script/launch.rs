//! The launches of a job in a home, in their order: processes of an earlier one may still run on machines that its
//! coordinator has lost, and are told from those of the newest one.

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;

use millrace_leaf::{atomic_file, bounded_file, random};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The variable that processes of a launch carry, see [`Launch::value`].
pub(super) const ENV_LAUNCH: &str = "MILLRACE_LAUNCH";
const FILE_BYTES_MAX: u64 = 4096;

/// A launch of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Launch {
    /// The same for all launches of a job in a home: 32 hexadecimal digits.
    pub(crate) job: String,
    /// Grows with each launch.
    pub(crate) number: u64,
}

impl Launch {
    /// The next launch of a job, whose lock the caller holds. It is durable before this returns.
    ///
    /// Without a readable file `<home>/trainer/<job>.launches` the numbers begin anew, under another id.
    ///
    /// # Errors
    /// Those of the file.
    pub(super) fn next(home: &Path, job: &str) -> Result<Launch> {
        let path = home.join("trainer").join(format!("{job}.launches"));
        let failed = |error| Error::io(format!("write {}", path.display()), error);
        let last = match bounded_file::read(&path, FILE_BYTES_MAX) {
            Ok(bytes) => Launch::parse(String::from_utf8_lossy(&bytes).trim()),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::FileTooLarge) => None,
            // Another id would let the processes of earlier launches in.
            Err(error) => return Err(Error::io(format!("read {}", path.display()), error)),
        };
        let next = match last.and_then(|last| Some((last.job, last.number.checked_add(1)?))) {
            Some((job, number)) => Launch { job, number },
            None => Launch { job: hex::encode(random::bytes::<16>().map_err(failed)?), number: 1 },
        };
        atomic_file::replace(&path, &path.with_extension("launches.new"), next.value().as_bytes())
            .and_then(|()| File::open(home.join("trainer"))?.sync_all())
            .map_err(failed)?;
        Ok(next)
    }

    /// `ID:NUMBER`
    pub(super) fn value(&self) -> String {
        format!("{}:{}", self.job, self.number)
    }

    fn parse(value: &str) -> Option<Launch> {
        let (job, number) = value.split_once(':')?;
        let is_id = job.len() == 32 && job.bytes().all(|byte| byte.is_ascii_hexdigit());
        Some(Launch { job: job.to_owned(), number: number.parse().ok()? }).filter(|_| is_id)
    }

    /// Whether a variable `NAME=VALUE` of a process says that it belongs to an earlier launch of the same job.
    pub(super) fn is_after(&self, variable: &[u8]) -> bool {
        let value = std::str::from_utf8(variable)
            .ok()
            .and_then(|text| text.strip_prefix(ENV_LAUNCH)?.strip_prefix('='));
        value.and_then(Launch::parse).is_some_and(|other| other.job == self.job && other.number < self.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_of_a_job_are_numbered_and_begin_anew_after_damage() {
        let home = tempfile::tempdir().unwrap();
        std::fs::create_dir(home.path().join("trainer")).unwrap();
        let next = |job| Launch::next(home.path(), job).unwrap();
        let (first, second, other) = (next("a"), next("a"), next("b"));
        assert_eq!((first.number, second.number, other.number), (1, 2, 1));
        assert!(first.job == second.job && first.job != other.job);
        std::fs::write(home.path().join("trainer/a.launches"), "torn").unwrap();
        let anew = next("a");
        assert!(anew.number == 1 && anew.job != first.job);

        let variable = |launch: &Launch| format!("{ENV_LAUNCH}={}", launch.value()).into_bytes();
        assert!(second.is_after(&variable(&first)));
        assert!(!first.is_after(&variable(&first)) && !first.is_after(&variable(&second)));
        assert!(!second.is_after(&variable(&other)) && !second.is_after(b"MILLRACE_LAUNCH=:1"));
    }
}
