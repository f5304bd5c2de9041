//! Raw copies of objects: their files are copied unchanged between the store and the directory of a backup,
//! which has the layout of a local store.

use std::fs::{self, File};
use std::io::{self, Seek as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use millrace_leaf::private;
use object_store::PutPayload;
use object_store::path::Path as StorePath;

use super::backend::Backend;
use super::error::{ObjectError, Result};
use super::local::LocalStore;
use super::local_data::LocalData;
use super::remote::RemoteStore;
use super::store::Store;
use crate::object::ObjectId;

/// Bytes of one request and of one comparison.
const STEP: usize = 8 << 20;

/// The result of copying an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Copied {
    /// All files exist at the target; this many bytes were written.
    Bytes(u64),
    /// The object is missing at the source.
    Missing,
}

impl Backend {
    /// Copies an object of the store into a directory. The files are synced; their names survive a power
    /// failure after [`sync_names`]. Files that are already complete there stay unchanged.
    pub(crate) fn export(&self, id: ObjectId, to: &Path) -> Result<Copied> {
        let mut bytes = 0;
        for name in names(id) {
            let target = to.join(&name);
            let copied = match self.store() {
                Store::Local(local) => export_file(&local.root().join(&name), &target)?,
                Store::Remote(_) if target.exists() => Some(0),
                Store::Remote(remote) => self.fetch_file(remote, remote_path(remote, id, &name), &target)?,
            };
            match copied {
                Some(written) => bytes += written,
                None => return Ok(Copied::Missing),
            }
        }
        Ok(Copied::Bytes(bytes))
    }

    /// Copies an object from a backup directory into the store; the written files are durable when this
    /// returns. A file that the store already has stays; one that differs is replaced.
    pub(crate) fn import(&self, id: ObjectId, from: &Path) -> Result<Copied> {
        let mut bytes = 0;
        for name in names(id) {
            let source = from.join(&name);
            let copied = match self.store() {
                Store::Local(local) => {
                    let to = local.root().join(&name);
                    import_file(local, id, &source, &to, &mut || self.is_whole(id, from))?
                }
                Store::Remote(remote) => {
                    let path = remote_path(remote, id, &name);
                    self.send_file(remote, id, path, &source, &mut || self.is_whole(id, from))?
                }
            };
            match copied {
                Some(written) => bytes += written,
                None => return Ok(Copied::Missing),
            }
        }
        Ok(Copied::Bytes(bytes))
    }

    /// Whether a backup's copy of an object agrees with its checksums. It may be the damaged one where it differs from
    /// an object of the store, which then stays.
    fn is_whole(&self, id: ObjectId, from: &Path) -> bool {
        let check = || -> Result<()> {
            let (data, index) = LocalData::open(from, id, self.keys())?;
            for frame in 0..index.frames() {
                let range = index.stored(frame..frame + 1);
                let mut stored = vec![0; usize::try_from(range.end - range.start).unwrap_or(usize::MAX)];
                data.read(id, range.start, &mut stored)?;
                if !index.check(frame, &stored) {
                    let byte = index.data(frame).start;
                    return Err(ObjectError::Corrupt { id, byte, reason: "checksum mismatch".into() });
                }
            }
            Ok(())
        };
        check()
            .inspect_err(|error| {
                tracing::warn!(%error, "an object of the backup is damaged; the store keeps its own, which differs");
            })
            .is_ok()
    }

    fn fetch_file(&self, remote: &Arc<RemoteStore>, path: StorePath, to: &Path) -> Result<Option<u64>> {
        let mut staged = Staged::create(to)?;
        let mut at = 0;
        loop {
            let (remote, path) = (Arc::clone(remote), path.clone());
            let range = at..at + STEP as u64;
            let got = self.runtime().wait(async move { remote.get_part(&path, range).await });
            let (part, len) = match self.answer(got) {
                Err(error) if error.is_not_found() => return Ok(None),
                got => got?,
            };
            staged.file.write_all(&part).map_err(|e| staged.fail(e))?;
            at += part.len() as u64;
            if at >= len || part.is_empty() {
                staged.keep()?;
                return Ok(Some(at));
            }
        }
    }

    fn send_file(
        &self,
        remote: &Arc<RemoteStore>,
        id: ObjectId,
        path: StorePath,
        from: &Path,
        is_whole: &mut dyn FnMut() -> bool,
    ) -> Result<Option<u64>> {
        let (store, at) = (Arc::clone(remote), path.clone());
        let there = self.answer(self.runtime().wait(async move { store.size(&at).await }))?;
        let Some((file, len)) = open(from)? else { return Ok(there.map(|_| 0)) };
        let fail = |e| ObjectError::io("read", from, e);
        let part = |at: u64| -> Result<Bytes> {
            let mut part = vec![0; usize::try_from(len - at).unwrap_or(STEP).min(STEP)];
            file.read_exact_at(&mut part, at).map_err(fail)?;
            Ok(part.into())
        };
        if there == Some(len) && (self.has_bytes(remote, &path, len, part)? || !is_whole()) {
            return Ok(Some(0));
        }
        if len <= STEP as u64 {
            let (store, payload) = (Arc::clone(remote), PutPayload::from(part(0)?));
            self.answer(self.runtime().wait(async move { store.put_over(&path, payload).await }))?;
            return Ok(Some(len));
        }
        let store = Arc::clone(remote);
        let upload = self.answer(self.runtime().wait(async move { store.begin_upload(id).await }))?;
        let (mut at, mut parts) = (0, Vec::new());
        while at < len {
            let (store, upload, index) = (Arc::clone(remote), upload.clone(), parts.len());
            let part = part(at)?;
            at += part.len() as u64;
            let put = async move { store.put_part(id, &upload, index, part.into()).await };
            parts.push(self.answer(self.runtime().wait(put))?);
        }
        let store = Arc::clone(remote);
        let complete = async move { store.complete_upload(id, &upload, parts, len).await };
        self.answer(self.runtime().wait(complete))?;
        Ok(Some(len))
    }

    /// Whether an object of a remote store consists of the `len` bytes that `part` reads.
    fn has_bytes(
        &self,
        remote: &Arc<RemoteStore>,
        path: &StorePath,
        len: u64,
        part: impl Fn(u64) -> Result<Bytes>,
    ) -> Result<bool> {
        let mut at = 0;
        while at < len {
            let ours = part(at)?;
            let (store, path) = (Arc::clone(remote), path.clone());
            let range = at..at + ours.len() as u64;
            let got = self.runtime().wait(async move { store.get_part(&path, range).await });
            let theirs = match self.answer(got) {
                Err(error) if error.is_not_found() => return Ok(false),
                got => got?.0,
            };
            if theirs != ours {
                return Ok(false);
            }
            at += ours.len() as u64;
        }
        Ok(true)
    }
}

/// Makes the names of exported files survive a power failure.
pub(crate) fn sync_names(directory: &Path) -> Result<()> {
    let fail = |e| ObjectError::io("sync", directory, e);
    for entry in fs::read_dir(directory).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        if path.is_dir() {
            super::durable::sync_directory(&path)?;
        }
    }
    super::durable::sync_directory(directory)
}

/// The files of an object, relative to a local store.
fn names(id: ObjectId) -> Vec<String> {
    if id.has_sums_beside() { vec![id.data_name(), id.sums_name()] } else { vec![id.data_name()] }
}

fn remote_path(remote: &RemoteStore, id: ObjectId, name: &str) -> StorePath {
    if name == id.data_name() { remote.data_path(id) } else { remote.sums_path(id) }
}

/// A file and its length; `None` when it is missing.
fn open(path: &Path) -> Result<Option<(File, u64)>> {
    let opened = File::open(path).and_then(|file| {
        let len = file.metadata()?.len();
        Ok((file, len))
    });
    match opened {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some).map_err(|e| ObjectError::io("open", path, e)),
    }
}

fn export_file(from: &Path, to: &Path) -> Result<Option<u64>> {
    let there = fs::metadata(to).map(|meta| meta.len()).ok();
    match open(from)? {
        // Packs grow. A source shorter than its copy was truncated: the copy stays.
        Some((_, len)) if there.is_some_and(|there| there >= len) => Ok(Some(0)),
        Some((source, _)) => Staged::create(to)?.fill(source, from).map(Some),
        None => Ok(there.map(|_| 0)),
    }
}

fn import_file(
    local: &LocalStore,
    id: ObjectId,
    from: &Path,
    to: &Path,
    is_whole: &mut dyn FnMut() -> bool,
) -> Result<Option<u64>> {
    let Some((source, len)) = open(from)? else {
        return Ok(fs::metadata(to).is_ok().then_some(0));
    };
    if let Some((there, there_len)) = open(to)?
        // The pack in the store may have grown since the backup.
        && (there_len == len || id.is_pack() && there_len > len)
        && (are_equal(&source, &there, len).map_err(|e| ObjectError::io("compare", to, e))? || !is_whole())
    {
        return Ok(Some(0));
    }
    let written = Staged::create(to)?.fill(source, from)?;
    local.make_name_durable(id)?;
    Ok(Some(written))
}

/// Whether the first `len` bytes of two files are equal.
fn are_equal(a: &File, b: &File, len: u64) -> io::Result<bool> {
    let (mut of_a, mut of_b) = (vec![0; STEP], vec![0; STEP]);
    let mut at = 0;
    while at < len {
        let step = usize::try_from(len - at).unwrap_or(STEP).min(STEP);
        a.read_exact_at(&mut of_a[..step], at)?;
        b.read_exact_at(&mut of_b[..step], at)?;
        if of_a[..step] != of_b[..step] {
            return Ok(false);
        }
        at += step as u64;
    }
    Ok(true)
}

/// A file that gets its final name when it is complete and synced.
struct Staged {
    file: File,
    path: PathBuf,
    to: PathBuf,
    kept: bool,
}

impl Staged {
    fn create(to: &Path) -> Result<Staged> {
        let directory = to.parent().unwrap_or(to);
        private::create_dir_all(directory).map_err(|e| ObjectError::io("create folder", directory, e))?;
        // `#` marks unfinished files, as in a local store.
        let mut path = to.as_os_str().to_owned();
        path.push(format!("#{}", std::process::id()));
        let path = PathBuf::from(path);
        let file = private::options().write(true).create(true).truncate(true).open(&path);
        let file = file.map_err(|e| ObjectError::io("create", &path, e))?;
        Ok(Staged { file, path, to: to.to_owned(), kept: false })
    }

    fn fail(&self, error: io::Error) -> ObjectError {
        ObjectError::io("write", &self.path, error)
    }

    fn fill(mut self, mut source: File, from: &Path) -> Result<u64> {
        source.rewind().map_err(|e| ObjectError::io("read", from, e))?;
        let copied = io::copy(&mut source, &mut self.file).map_err(|e| self.fail(e))?;
        self.keep()?;
        Ok(copied)
    }

    fn keep(mut self) -> Result<()> {
        let kept = self.file.sync_all().and_then(|()| fs::rename(&self.path, &self.to));
        kept.map_err(|e| self.fail(e))?;
        self.kept = true;
        Ok(())
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if !self.kept
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::debug!(path = %self.path.display(), %error, "removing an unfinished copy");
        }
    }
}
