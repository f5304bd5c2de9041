//! The file of an unfinished object in a local store: beside its future name, written in place.
//!
//! No data is copied, so the file system's speed is the limit. Writeback to the disk starts early, so that
//! little is left for the sync at the end.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use millrace_leaf::private;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use parking_lot::Mutex;

use super::backend::Backend;
use super::error::{ObjectError, Result};
use crate::failpoint;
use crate::object::{Layout, ObjectId};

/// Writeback is started each time this many bytes were appended.
const EARLY_BYTES: u64 = 8 << 20;
/// Suffix of the name of an unfinished file.
const UNFINISHED: &str = "#0";

/// A file that becomes an object. Dropping it removes it.
#[derive(Debug)]
pub(super) struct LocalFile {
    backend: Backend,
    id: ObjectId,
    path: PathBuf,
    file: Arc<File>,
    len: u64,
    /// Where the range of started writeback ends.
    early: u64,
    named: bool,
}

impl LocalFile {
    pub(super) fn begin(backend: &Backend, id: ObjectId) -> Result<LocalFile> {
        let (path, file) = backend.create_local(&(id.data_name() + UNFINISHED))?;
        failpoint::hit("object-begun");
        Ok(LocalFile {
            backend: backend.clone(),
            id,
            path,
            file: Arc::new(file),
            len: 0,
            early: 0,
            named: false,
        })
    }

    /// Appends all of the bytes or, on error, none.
    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<()> {
        let written = self.file.write_all_at(bytes, self.len);
        written.map_err(|e| ObjectError::io("write object file", &self.path, e))?;
        self.len += bytes.len() as u64;
        if self.len - self.early >= EARLY_BYTES {
            self.write_early();
        }
        Ok(())
    }

    /// Starts writeback of the newest bytes in the background: for the file system, allocating space takes
    /// about as long as copying the bytes.
    fn write_early(&mut self) {
        let (offset, len) = (self.early as libc::off_t, (self.len - self.early) as libc::off_t);
        self.early = self.len;
        let file = Arc::clone(&self.file);
        self.backend.runtime().handle().spawn_blocking(move || {
            // Starts writeback of dirty pages; pages under writeback stay in memory.
            let advice = PosixFadviseAdvice::POSIX_FADV_DONTNEED;
            if let Err(error) = posix_fadvise(file.as_ref(), offset, len, advice) {
                tracing::debug!(%error, "early writing of an object");
            }
        });
    }

    /// Fills `buffer` with appended bytes, from `offset` on.
    pub(super) fn read_into(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let read = self.file.read_exact_at(buffer, offset);
        read.map_err(|e| ObjectError::io("read object file", &self.path, e))
    }

    /// Writes the trailer (after the data, or into a sidecar) and renames the file to its final name. The
    /// object is then readable, not yet durable. May be called again after an error.
    pub(super) fn finish(&mut self, trailer: &[u8]) -> Result<Unsynced> {
        let root = self.backend.local_root();
        let mut files = Vec::with_capacity(2);
        match self.id.layout() {
            Layout::Plain => files.push(self.put_sums(root, trailer)?),
            Layout::Framed | Layout::Pack | Layout::Encoded | Layout::RemotePack => {
                let written = self.file.write_all_at(trailer, self.len);
                written.map_err(|e| ObjectError::io("write object file", &self.path, e))?;
            }
        }
        failpoint::hit("object-written");
        let file = Arc::clone(&self.file);
        let name = root.join(self.id.data_name());
        // Last: the name makes it readable.
        rename(&self.path, &name)?;
        failpoint::hit("object-named");
        self.named = true;
        files.push((name, file));
        Ok(Unsynced { backend: self.backend.clone(), id: self.id, state: Mutex::new(State::Written(files)) })
    }

    fn put_sums(&self, root: &Path, sums: &[u8]) -> Result<(PathBuf, Arc<File>)> {
        let name = root.join(self.id.sums_name());
        let unfinished = root.join(self.id.sums_name() + UNFINISHED);
        let write = || {
            let file = private::options().write(true).create(true).truncate(true).open(&unfinished)?;
            file.write_all_at(sums, 0)?;
            Ok(file)
        };
        match write() {
            Ok(file) => {
                rename(&unfinished, &name)?;
                failpoint::hit("object-sums-named");
                Ok((name, Arc::new(file)))
            }
            Err(e) => {
                // A file that stays is removed by its age when the session is gone.
                let _ = fs::remove_file(&unfinished);
                Err(ObjectError::io("write checksum file", unfinished, e))
            }
        }
    }
}

impl Drop for LocalFile {
    fn drop(&mut self) {
        if self.named {
            return;
        }
        // The checksums of a plain object may have been written before the failure.
        let sums = self.backend.local_root().join(self.id.sums_name());
        for path in [&self.path, &sums] {
            if let Err(error) = fs::remove_file(path)
                && error.kind() != std::io::ErrorKind::NotFound
            {
                tracing::warn!(path = %path.display(), %error, "removing an object that was not finished");
                self.backend.leave_behind();
            }
        }
    }
}

/// A complete object whose bytes may still be only in the page cache.
#[derive(Debug)]
pub(crate) struct Unsynced {
    backend: Backend,
    id: ObjectId,
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    Written(Vec<(PathBuf, Arc<File>)>),
    Durable,
    /// The kernel reports a lost write once: a later sync that succeeds proves nothing.
    Lost,
}

impl Unsynced {
    /// Makes the object survive a power failure. After an error every further call fails.
    pub(crate) fn sync(&self) -> Result<()> {
        let mut state = self.state.lock();
        let synced = match &*state {
            State::Durable => return Ok(()),
            State::Lost => Err(ObjectError::Io {
                operation: "sync again, after it failed, object",
                path: self.id.data_name().into(),
                source: std::io::Error::other("an earlier write was lost"),
            }),
            State::Written(files) => files
                .iter()
                .try_for_each(|(path, file)| {
                    file.sync_data().map_err(|e| ObjectError::io("sync object file", path, e))
                })
                .and_then(|()| {
                    failpoint::hit("object-synced");
                    self.backend.make_name_durable(self.id)
                }),
        };
        failpoint::hit("object-durable");
        *state = if synced.is_ok() { State::Durable } else { State::Lost };
        synced
    }
}

fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).map_err(|e| ObjectError::io("name object file", to, e))
}
