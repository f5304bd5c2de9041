//! Reloaded files, certificates and tokens: read again after each change. Their readers decide which settings
//! apply while a file has errors; the errors are always reported.

use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tokio_util::sync::CancellationToken;

use crate::blocking::blocking;
use crate::error::{Error, Result, chain};
use crate::metrics::RELOADS;

/// Largest file of certificates or tokens, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Identity of a file's content. It changes when the file is modified or replaced, or when a link leads to
/// another file.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Identity {
    /// `None` if the file does not exist.
    fn of(path: &Path) -> Option<Identity> {
        let file = std::fs::metadata(path).ok()?;
        Some(Identity {
            device: file.dev(),
            inode: file.ino(),
            bytes: file.size(),
            modified: (file.mtime(), file.mtime_nsec()),
            changed: (file.ctime(), file.ctime_nsec()),
        })
    }
}

/// The result of a reader.
#[derive(Debug)]
pub struct ReadResult<T> {
    /// The new value in force.
    pub value: T,
    /// Errors; the parts that they concern are not in the value.
    pub wrong: Vec<Error>,
}

type Reader<T> = dyn Fn(Option<&T>) -> Result<ReadResult<T>> + Send + Sync;

/// Most errors of one reading that are logged.
const WRONG_LOGGED_MAX: usize = 20;

/// A value read from files.
pub struct Reloaded<T> {
    /// Name in the log and the metrics.
    what: &'static str,
    paths: Vec<PathBuf>,
    read: Box<Reader<T>>,
    /// Called with the value in force at each check.
    check: fn(&T),
    current: RwLock<Arc<T>>,
    /// Identities of the files at the last read, successful or not.
    seen: Mutex<Vec<Option<Identity>>>,
}

impl<T: Send + Sync + 'static> Reloaded<T> {
    /// Reads the files. `read` gets the value in force when it runs again; if it fails, that value stays.
    ///
    /// # Errors
    /// The error of `read`, else the first error in the result: at the start the user can fix it.
    pub fn open(
        what: &'static str,
        paths: Vec<PathBuf>,
        read: impl Fn(Option<&T>) -> Result<ReadResult<T>> + Send + Sync + 'static,
    ) -> Result<Reloaded<T>> {
        // Taken before reading, so that a change in between causes another read.
        let seen = paths.iter().map(|path| Identity::of(path)).collect();
        let first = read(None)?;
        if let Some(error) = first.wrong.into_iter().next() {
            return Err(error);
        }
        let current = RwLock::new(Arc::new(first.value));
        let seen = Mutex::new(seen);
        Ok(Reloaded { what, paths, read: Box::new(read), check: |_| {}, current, seen })
    }

    /// Also runs `check` on the value in force, now and at each check.
    pub fn with_check(self, check: fn(&T)) -> Reloaded<T> {
        check(&self.get());
        Reloaded { check, ..self }
    }

    /// The value in force.
    pub fn get(&self) -> Arc<T> {
        self.current.read().clone()
    }

    /// Checks the files every `period_ms` until cancelled; returns at once when that is 0.
    pub async fn watch(self: Arc<Self>, period_ms: u64, cancel: CancellationToken) {
        if period_ms == 0 {
            return;
        }
        let period = Duration::from_millis(period_ms);
        while cancel.run_until_cancelled(tokio::time::sleep(period)).await.is_some() {
            let files = self.clone();
            let look = blocking(self.what, move || {
                files.check_for_changes();
                Ok::<(), Error>(())
            });
            if look.await.is_err() {
                return;
            }
        }
    }

    /// Reads the files again if they have changed since the last read, so errors are reported once.
    pub fn check_for_changes(&self) {
        let found: Vec<_> = self.paths.iter().map(|path| Identity::of(path)).collect();
        let mut seen = self.seen.lock();
        if *seen != found {
            self.read_again();
            *seen = found;
        }
        (self.check)(&self.get());
    }

    fn read_again(&self) {
        let outcome = (self.read)(Some(&self.get()));
        let is_right = outcome.as_ref().is_ok_and(|read| read.wrong.is_empty());
        RELOADS.with_label_values(&[self.what, if is_right { "ok" } else { "failed" }]).inc();
        match outcome {
            Ok(ReadResult { value, wrong }) => {
                *self.current.write() = Arc::new(value);
                tracing::info!(what = self.what, "reloaded changed files");
                for error in wrong.iter().take(WRONG_LOGGED_MAX) {
                    tracing::error!(
                        what = self.what, error = %chain(error), errors = wrong.len(),
                        "part of the changed files is invalid and has no effect"
                    );
                }
            }
            Err(error) => tracing::error!(
                what = self.what, error = %chain(&error),
                "cannot use the changed files: the earlier content stays in force"
            ),
        }
    }
}

impl<T> fmt::Debug for Reloaded<T> {
    /// Leaves the content out, which may be secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reloaded")
            .field("what", &self.what)
            .field("paths", &self.paths)
            .finish_non_exhaustive()
    }
}

/// Reads the whole file of a setting.
///
/// # Errors
/// [`Error::Config`] with the setting and the file.
pub fn read_file(setting: &str, path: &Path) -> Result<Vec<u8>> {
    let wrong = |reason: String| setting_error(setting, path, &reason);
    let cannot = |error: std::io::Error| wrong(format!("cannot be read: {error}"));
    // Checked before opening: opening a FIFO would wait for a writer.
    if !std::fs::metadata(path).map_err(cannot)?.is_file() {
        return Err(wrong("is no file".into()));
    }
    let mut content = Vec::new();
    File::open(path)
        .and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut content))
        .map_err(cannot)?;
    if content.len() as u64 > FILE_BYTES_MAX {
        return Err(wrong(format!("has more than {FILE_BYTES_MAX} bytes")));
    }
    Ok(content)
}

/// The error for the file of a setting.
pub fn setting_error(setting: &str, path: &Path, reason: &str) -> Error {
    Error::Config { reason: format!("{setting} {} {reason}", path.display()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_text(path: &Path) -> Reloaded<String> {
        let file = path.to_owned();
        let read = move |_: Option<&String>| {
            let value = String::from_utf8(read_file("tokens", &file)?).unwrap();
            match value.starts_with("bad") {
                true => Err(setting_error("tokens", &file, "is bad")),
                false => Ok(ReadResult { value, wrong: Vec::new() }),
            }
        };
        Reloaded::open("tokens", vec![path.to_owned()], read).unwrap()
    }

    #[test]
    fn changed_file_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "first").unwrap();
        let files = of_text(&path);
        files.check_for_changes();
        assert_eq!(*files.get(), "first");
        std::fs::write(&path, "second one").unwrap();
        files.check_for_changes();
        assert_eq!(*files.get(), "second one");
        // Replaced by a file with equal size and modification time.
        let (next, time) = (dir.path().join("next"), std::fs::metadata(&path).unwrap().modified().unwrap());
        std::fs::write(&next, "third file").unwrap();
        File::options().write(true).open(&next).unwrap().set_modified(time).unwrap();
        std::fs::rename(&next, &path).unwrap();
        files.check_for_changes();
        assert_eq!(*files.get(), "third file");
    }

    #[test]
    fn invalid_or_missing_file_changes_nothing_and_is_read_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "good").unwrap();
        let files = of_text(&path);
        let failed = || RELOADS.with_label_values(&["tokens", "failed"]).get();
        let before = failed();
        std::fs::write(&path, "bad one").unwrap();
        files.check_for_changes();
        files.check_for_changes();
        assert_eq!((files.get().as_str(), failed()), ("good", before + 1));
        std::fs::remove_file(&path).unwrap();
        files.check_for_changes();
        files.check_for_changes();
        assert_eq!((files.get().as_str(), failed()), ("good", before + 2));
        std::fs::write(&path, "good again").unwrap();
        files.check_for_changes();
        assert_eq!(*files.get(), "good again");
    }

    #[test]
    fn path_that_is_no_file_or_too_large_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let large = dir.path().join("large");
        std::fs::write(&large, vec![b'x'; FILE_BYTES_MAX as usize + 1]).unwrap();
        let pipe = dir.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        for (path, says) in [
            (dir.path().join("none"), "cannot be read"),
            (dir.path().to_owned(), "is no file"),
            (pipe, "is no file"),
            (large, "more than 1048576 bytes"),
        ] {
            let error = read_file("tls.key", &path).unwrap_err().to_string();
            assert!(error.contains(says) && error.contains(path.to_str().unwrap()), "{error}");
            assert!(error.starts_with("[serving] tls.key"), "{error}");
        }
    }
}
