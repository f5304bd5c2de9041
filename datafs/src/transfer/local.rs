//! A folder of this machine.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use bytes::Bytes;
use nix::unistd::{Whence, lseek};

use super::tree::{Attributes, CHUNK, Entry, Kind, PAGE, ReadFile, Source, Target, WriteFile, partial_name};
use super::xattr;
use crate::error::{Error, Result};

pub(super) struct LocalTree {
    root: PathBuf,
}

impl LocalTree {
    pub(super) fn new(root: &Path) -> LocalTree {
        LocalTree { root: root.to_owned() }
    }

    fn at(&self, path: &Path) -> PathBuf {
        // `join("")` would append a slash, and so follow a link.
        if path.as_os_str().is_empty() { self.root.clone() } else { self.root.join(path) }
    }
}

fn fail(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    move |error| match error.kind() {
        io::ErrorKind::NotFound => Error::not_found(path.display().to_string()),
        _ => Error::io(operation, path, error),
    }
}

/// Removes what has not become a file. What cannot be removed takes room until the copy is run again, so
/// it is said.
fn remove_partial(path: &Path) {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(%error, path = %path.display(), "an unfinished copy is left behind");
        }
        _ => {}
    }
}

fn entry(name: OsString, metadata: &fs::Metadata) -> Entry {
    let kind = match metadata.file_type() {
        kind if kind.is_file() => Kind::File,
        kind if kind.is_dir() => Kind::Folder,
        kind if kind.is_symlink() => Kind::Symlink,
        _ => Kind::Special,
    };
    Entry {
        name,
        kind,
        size: metadata.len(),
        mtime: metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH),
        mode: Some(metadata.mode() & 0o7777),
        identity: (metadata.nlink() > 1).then(|| (metadata.dev(), metadata.ino())),
        node: None,
        version: None,
    }
}

impl Source for LocalTree {
    fn root(&self) -> Result<Entry> {
        // What is named on the command line is followed, as cp -r does for links to folders.
        let metadata = fs::metadata(&self.root).map_err(fail("look at", &self.root))?;
        Ok(entry(self.root.as_os_str().to_owned(), &metadata))
    }

    fn list(&self, path: &Path, _: &Entry, visit: &mut dyn FnMut(Vec<Entry>) -> bool) -> Result<()> {
        let path = self.at(path);
        let mut found = fs::read_dir(&path).map_err(fail("list folder", &path))?;
        loop {
            let some = found.by_ref().take(PAGE);
            let page: io::Result<Vec<Entry>> =
                some.map(|e| e.and_then(|e| Ok(entry(e.file_name(), &e.metadata()?)))).collect();
            let page = page.map_err(fail("list folder", &path))?;
            if page.is_empty() || !visit(page) {
                return Ok(());
            }
        }
    }

    fn look(&self, path: &Path) -> Result<Entry> {
        // The root is followed, as in `root`.
        let look = if path.as_os_str().is_empty() { fs::metadata } else { fs::symlink_metadata };
        let path = self.at(path);
        Ok(entry(OsString::new(), &look(&path).map_err(fail("look at", &path))?))
    }

    fn open<'s>(&'s self, path: &Path, file: &Entry) -> Result<Box<dyn ReadFile + 's>> {
        let path = self.at(path);
        let opened = File::open(&path).map_err(fail("open", &path))?;
        Ok(Box::new(LocalFile { file: opened, path, at: 0, data_end: 0, size: file.size }))
    }

    fn target(&self, path: &Path, _: &Entry) -> Result<OsString> {
        let path = self.at(path);
        Ok(fs::read_link(&path).map_err(fail("read link", &path))?.into_os_string())
    }

    fn attributes(&self, path: &Path, _: &Entry) -> Result<Attributes> {
        let path = self.at(path);
        xattr::read(&path).map_err(fail("read extended attributes of", &path))
    }
}

struct LocalFile {
    file: File,
    path: PathBuf,
    at: u64,
    /// End of the run of data that `at` is in.
    data_end: u64,
    size: u64,
}

impl ReadFile for LocalFile {
    fn next(&mut self) -> Result<Option<(u64, Bytes)>> {
        if self.at >= self.data_end {
            let Some((start, end)) = run_of_data(&self.file, self.at, self.size) else { return Ok(None) };
            (self.at, self.data_end) = (start, end);
        }
        let mut buffer = vec![0; CHUNK.min((self.data_end - self.at) as usize)];
        let read = self.file.read_at(&mut buffer, self.at).map_err(fail("read", &self.path))?;
        if read == 0 {
            return Ok(None);
        }
        buffer.truncate(read);
        let at = self.at;
        self.at += read as u64;
        Ok(Some((at, buffer.into())))
    }

    fn size(&self) -> Result<u64> {
        Ok(self.file.metadata().map_err(fail("look at", &self.path))?.len())
    }
}

/// The next run of data at or behind an offset; the whole rest where the file system knows no holes.
fn run_of_data(file: &File, at: u64, size: u64) -> Option<(u64, u64)> {
    if at >= size {
        return None;
    }
    match lseek(file, at as i64, Whence::SeekData) {
        Ok(start) => {
            let end = lseek(file, start, Whence::SeekHole).map_or(size, |end| end as u64);
            Some((start as u64, end.min(size).max(start as u64 + 1)))
        }
        Err(nix::errno::Errno::ENXIO) => None,
        Err(_) => Some((at, size)),
    }
}

impl Target for LocalTree {
    fn keeps_times(&self) -> bool {
        true
    }

    fn has_links(&self) -> bool {
        true
    }

    fn find(&self, path: &Path) -> Result<Option<Entry>> {
        let path = self.at(path);
        match fs::symlink_metadata(&path) {
            Ok(metadata) => Ok(Some(entry(OsString::new(), &metadata))),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Error::io("look at", path, e)),
        }
    }

    fn make_folder(&self, path: &Path) -> Result<bool> {
        let path = self.at(path);
        if path.is_dir() {
            return Ok(false);
        }
        fs::create_dir_all(&path).map_err(fail("create folder", &path))?;
        Ok(true)
    }

    fn finish_folder(&self, path: &Path, like: &Entry, attributes: &Attributes) -> Result<()> {
        let path = self.at(path);
        let set = || -> io::Result<()> {
            xattr::write(&path, attributes)?;
            if let Some(mode) = like.mode {
                fs::set_permissions(&path, Permissions::from_mode(mode))?;
                File::open(&path)?.set_modified(like.mtime)?;
            }
            Ok(())
        };
        set().map_err(fail("set mode and time of", &path))
    }

    fn create<'s>(&'s self, path: &Path, like: &Entry) -> Result<Box<dyn WriteFile + 's>> {
        let path = self.at(path);
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        if let Some(parent) = parent {
            fs::create_dir_all(parent).map_err(fail("create folder", parent))?;
        }
        let partial = path.with_file_name(partial_name(&path));
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(true).open(&partial);
        let file = file.map_err(fail("create", &partial))?;
        Ok(Box::new(NewFile { file, partial: Some(partial), path, like: like.clone() }))
    }

    fn make_symlink(&self, path: &Path, target: OsString) -> Result<()> {
        let path = self.at(path);
        if fs::read_link(&path).is_ok_and(|there| there == target) {
            return Ok(());
        }
        let partial = path.with_file_name(partial_name(&path));
        remove_partial(&partial);
        std::os::unix::fs::symlink(target, &partial)
            .and_then(|()| fs::rename(&partial, &path))
            .map_err(fail("make symbolic link", &path))
    }

    fn make_link(&self, existing: &Path, path: &Path) -> Result<()> {
        let (existing, path) = (self.at(existing), self.at(path));
        let same = |a: fs::Metadata, b: fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
        if let (Ok(a), Ok(b)) = (fs::symlink_metadata(&existing), fs::symlink_metadata(&path))
            && same(a, b)
        {
            return Ok(());
        }
        let partial = path.with_file_name(partial_name(&path));
        remove_partial(&partial);
        fs::hard_link(existing, &partial)
            .and_then(|()| fs::rename(&partial, &path))
            .map_err(fail("make link", &path))
    }

    fn finish(&self) -> Result<()> {
        Ok(())
    }
}

struct NewFile {
    file: File,
    /// Until it has its final name.
    partial: Option<PathBuf>,
    path: PathBuf,
    like: Entry,
}

impl WriteFile for NewFile {
    fn write(&mut self, offset: u64, bytes: Bytes) -> Result<()> {
        self.file.write_all_at(&bytes, offset).map_err(fail("write", &self.path))
    }

    fn finish(mut self: Box<Self>, attributes: &Attributes) -> Result<()> {
        let Some(partial) = self.partial.take() else { return Ok(()) };
        let complete = || -> io::Result<()> {
            self.file.set_len(self.like.size)?;
            xattr::write(&partial, attributes)?;
            if let Some(mode) = self.like.mode {
                self.file.set_permissions(Permissions::from_mode(mode))?;
            }
            self.file.set_modified(self.like.mtime)?;
            fs::rename(&partial, &self.path)
        };
        let completed = complete().map_err(fail("complete", &self.path));
        if completed.is_err() {
            remove_partial(&partial);
        }
        completed
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(partial) = &self.partial {
            remove_partial(partial);
        }
    }
}
