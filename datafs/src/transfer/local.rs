//! The local side of a copy: a file or folder of this machine.
//!
//! Symbolic links in the path that the caller gave are followed. Everything below it is opened through folder
//! handles, one name at a time, and never through a symbolic link: other users may change the tree during the
//! copy.

use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::SystemTime;

use bytes::Bytes;
use millrace_leaf::error_chain;
use nix::unistd::{Whence, geteuid, lseek};
use rustix::fs::{
    AtFlags, CWD, Dir, Mode, OFlags, Timespec, Timestamps, UTIME_OMIT, linkat, mkdirat, openat, readlinkat,
    renameat, symlinkat, unlinkat, utimensat,
};
use rustix::io::Errno;

use super::tree::{
    Attributes, CHUNK, Entry, Kind, PAGE, ReadFile, Source, Target, WriteFile, is_partial, partial_name,
};
use super::xattr;
use crate::error::{Error, Result};
use crate::meta::inode::Timestamp;

/// Opens a folder to look up names in it.
const FOLDER: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
/// Opens any kind of entry, also a symbolic link itself, for its metadata only.
const LOOK: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// Opens for reading; neither blocks on a pipe or device nor follows a link.
const READ: OFlags = OFlags::RDONLY
    .union(OFlags::NOFOLLOW)
    .union(OFlags::NONBLOCK)
    .union(OFlags::NOCTTY)
    .union(OFlags::CLOEXEC);
/// Creates a new file.
const NEW: OFlags =
    OFlags::WRONLY.union(OFlags::CREATE).union(OFlags::EXCL).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

pub(super) struct LocalTree {
    root: PathBuf,
    /// The handle of the root, opened at the first use.
    top: OnceLock<OwnedFd>,
}

impl LocalTree {
    pub(super) fn new(root: &Path) -> LocalTree {
        LocalTree { root: root.to_owned(), top: OnceLock::new() }
    }

    /// The full path, for messages.
    fn shown(&self, path: &Path) -> PathBuf {
        if path.as_os_str().is_empty() { self.root.clone() } else { self.root.join(path) }
    }

    /// A handle of a folder at or below the root.
    fn folder(&self, path: &Path) -> io::Result<OwnedFd> {
        let top = match self.top.get() {
            Some(top) => top,
            None => {
                let opened = openat(CWD, &self.root, FOLDER, Mode::empty())?;
                self.top.get_or_init(|| opened)
            }
        };
        let mut folder = openat(top, ".", FOLDER, Mode::empty())?;
        for name in path {
            folder = openat(&folder, name, FOLDER | OFlags::NOFOLLOW, Mode::empty())?;
        }
        Ok(folder)
    }

    /// The parent folder of a path, and its name. The parent of the root comes from the path that the caller
    /// gave.
    fn place<'p>(&'p self, path: &'p Path) -> io::Result<(OwnedFd, &'p OsStr)> {
        if path.as_os_str().is_empty() {
            let parent = self.root.parent().filter(|parent| !parent.as_os_str().is_empty());
            let folder = openat(CWD, parent.unwrap_or(Path::new(".")), FOLDER, Mode::empty())?;
            return Ok((folder, self.root.file_name().ok_or(Errno::ISDIR)?));
        }
        let folder = self.folder(path.parent().unwrap_or(Path::new("")))?;
        Ok((folder, path.file_name().ok_or(Errno::INVAL)?))
    }

    fn metadata(&self, path: &Path) -> io::Result<fs::Metadata> {
        if path.as_os_str().is_empty() {
            return fs::metadata(&self.root);
        }
        let (folder, name) = self.place(path)?;
        metadata_at(&folder, name)
    }

    /// Opens an entry that was found before, for reading. Fails with [`Error::Stale`] if its kind, owner or
    /// mode has changed: otherwise the copy would have the mode of one file and the content of another.
    fn open_found(&self, path: &Path, found: &Entry) -> Result<File> {
        let shown = self.shown(path);
        let opened = self.open_to_read(path);
        let is_replaced = match &opened {
            Ok(opened) => {
                let now = entry(OsString::new(), &opened.metadata().map_err(fail("look at", &shown))?);
                (now.kind, now.mode, now.owner) != (found.kind, found.mode, found.owner)
            }
            Err(error) => error.raw_os_error() == Some(Errno::LOOP.raw_os_error()),
        };
        if is_replaced {
            return Err(Error::Stale { what: format!("the file {} that was found", shown.display()) });
        }
        opened.map_err(fail("open", &shown))
    }

    /// Opens a file or folder for reading.
    fn open_to_read(&self, path: &Path) -> io::Result<File> {
        if path.as_os_str().is_empty() {
            return Ok(openat(CWD, &self.root, READ - OFlags::NOFOLLOW, Mode::empty())?.into());
        }
        let (folder, name) = self.place(path)?;
        Ok(openat(&folder, name, READ, Mode::empty())?.into())
    }
}

fn metadata_at(folder: &impl AsFd, name: &OsStr) -> io::Result<fs::Metadata> {
    File::from(openat(folder, name, LOOK, Mode::empty())?).metadata()
}

fn fail(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    move |error| match error.kind() {
        io::ErrorKind::NotFound => Error::not_found(path.display().to_string()),
        _ => Error::io(operation, path, error),
    }
}

/// Removes an unfinished file. A failure is logged, because the file takes space until the copy is run again.
fn remove_partial(folder: &OwnedFd, partial: &OsStr, path: &Path) {
    match unlinkat(folder, partial, AtFlags::empty()) {
        Err(error) if error != Errno::NOENT => {
            tracing::warn!(
                error = error_chain::one_line(&error), path = %path.display(), ?partial,
                "an unfinished copy is left behind"
            );
        }
        _ => {}
    }
}

/// Removes unfinished files that killed copies of this user left in a folder. A running copy locks its files.
fn remove_leftovers(folder: &OwnedFd, path: &Path) -> io::Result<()> {
    for entry in Dir::new(openat(folder, ".", OFlags::DIRECTORY | READ, Mode::empty())?)? {
        let entry = entry?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if !is_partial(name) {
            continue;
        }
        let Ok(metadata) = metadata_at(folder, name) else { continue };
        let is_in_use = metadata.is_file()
            && openat(folder, name, READ, Mode::empty())
                .is_ok_and(|file| matches!(File::from(file).try_lock(), Err(fs::TryLockError::WouldBlock)));
        if metadata.uid() == geteuid().as_raw() && !metadata.is_dir() && !is_in_use {
            remove_partial(folder, name, path);
        }
    }
    Ok(())
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
        owner: Some((metadata.uid(), metadata.gid())),
        identity: (metadata.nlink() > 1).then(|| (metadata.dev(), metadata.ino())),
        node: None,
        version: None,
    }
}

impl Source for LocalTree {
    fn root(&self) -> Result<Entry> {
        // Links in the caller's path are followed, as `cp -r` does for links to folders.
        let metadata = self.metadata(Path::new("")).map_err(fail("look at", &self.root))?;
        Ok(entry(self.root.as_os_str().to_owned(), &metadata))
    }

    fn list(&self, path: &Path, _: &Entry, visit: &mut dyn FnMut(Vec<Entry>) -> bool) -> Result<()> {
        let shown = self.shown(path);
        let open = || -> io::Result<(OwnedFd, Dir)> {
            let folder = self.folder(path)?;
            let listed = Dir::new(openat(&folder, ".", OFlags::DIRECTORY | READ, Mode::empty())?)?;
            Ok((folder, listed))
        };
        let (folder, listed) = open().map_err(fail("list folder", &shown))?;
        let mut names = listed
            .map(|entry| -> io::Result<OsString> {
                Ok(OsStr::from_bytes(entry?.file_name().to_bytes()).to_owned())
            })
            .filter(|name| !name.as_ref().is_ok_and(|name| name == "." || name == ".."));
        loop {
            let page: io::Result<Vec<Entry>> = names
                .by_ref()
                .take(PAGE)
                .map(|name| name.and_then(|name| Ok(entry(name.clone(), &metadata_at(&folder, &name)?))))
                .collect();
            let page = page.map_err(fail("list folder", &shown))?;
            if page.is_empty() || !visit(page) {
                return Ok(());
            }
        }
    }

    fn look(&self, path: &Path) -> Result<Entry> {
        let metadata = self.metadata(path).map_err(fail("look at", &self.shown(path)))?;
        Ok(entry(OsString::new(), &metadata))
    }

    fn open<'s>(&'s self, path: &Path, file: &Entry) -> Result<Box<dyn ReadFile + 's>> {
        let opened = self.open_found(path, file)?;
        let path = self.shown(path);
        Ok(Box::new(LocalFile { file: opened, path, at: 0, data_end: 0, size: file.size }))
    }

    fn target(&self, path: &Path, _: &Entry) -> Result<OsString> {
        let read = || -> io::Result<OsString> {
            let (folder, name) = self.place(path)?;
            Ok(OsString::from_vec(readlinkat(&folder, name, Vec::new())?.into_bytes()))
        };
        read().map_err(fail("read link", &self.shown(path)))
    }

    fn attributes(&self, path: &Path, found: &Entry) -> Result<Attributes> {
        let opened = self.open_found(path, found)?;
        xattr::read(&opened).map_err(fail("read extended attributes of", &self.shown(path)))
    }
}

struct LocalFile {
    file: File,
    path: PathBuf,
    at: u64,
    /// End of the data run that contains `at`.
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

/// The next data run at or after an offset; the whole rest where the file system does not report holes.
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
        let mut found = self.metadata(path);
        if path.as_os_str().is_empty() && !found.as_ref().is_ok_and(fs::Metadata::is_dir) {
            // A link to a folder stands for the folder; any other link is replaced itself.
            found = fs::symlink_metadata(&self.root);
        }
        match found {
            Ok(metadata) => Ok(Some(entry(OsString::new(), &metadata))),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Error::io("look at", self.shown(path), e)),
        }
    }

    fn make_folder(&self, path: &Path, like: &Entry) -> Result<bool> {
        let mode = if like.mode.is_some() { 0o700 } else { 0o777 };
        let make = || -> io::Result<bool> {
            if path.as_os_str().is_empty() {
                if let Some(parent) = self.root.parent() {
                    fs::create_dir_all(parent)?;
                }
                match DirBuilder::new().mode(mode).create(&self.root) {
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                    other => return other.map(|()| true),
                }
            } else {
                let (folder, name) = self.place(path)?;
                match mkdirat(&folder, name, Mode::from_raw_mode(mode)) {
                    Err(Errno::EXIST) => {}
                    other => return Ok(other.map(|()| true)?),
                }
            }
            // Fails when the entry is not a folder, or is a symbolic link.
            remove_leftovers(&self.folder(path)?, path)?;
            Ok(false)
        };
        make().map_err(fail("create folder", &self.shown(path)))
    }

    fn finish_folder(&self, path: &Path, like: &Entry, attributes: &Attributes) -> Result<()> {
        let set = || -> io::Result<()> {
            let folder = openat(&self.folder(path)?, ".", OFlags::DIRECTORY | READ, Mode::empty())?;
            let folder = File::from(folder);
            xattr::write(&folder, attributes)?;
            let metadata = folder.metadata()?;
            if let Some(mode) = like.mode_of_copy(metadata.uid(), metadata.gid()) {
                folder.set_permissions(Permissions::from_mode(mode))?;
                folder.set_modified(like.mtime)?;
            }
            Ok(())
        };
        set().map_err(fail("set mode and time of", &self.shown(path)))
    }

    fn create<'s>(&'s self, path: &Path, like: &Entry) -> Result<Box<dyn WriteFile + 's>> {
        // If the source has no modes, use the default of new files.
        let mode = Mode::from_raw_mode(if like.mode.is_some() { 0o600 } else { 0o666 });
        let shown = self.shown(path);
        let create = || -> io::Result<NewFile> {
            if path.as_os_str().is_empty() {
                if let Some(parent) = self.root.parent() {
                    fs::create_dir_all(parent)?;
                }
                remove_leftovers(&self.place(path)?.0, path)?;
            }
            let (folder, name) = self.place(path)?;
            loop {
                let partial = partial_name();
                let file = File::from(openat(&folder, &partial, NEW, mode)?);
                // The lock shows other copies that this one runs; without lock support they remove the file.
                // If another copy removed it before it was locked, create it again.
                file.lock().ok();
                if file.metadata()?.nlink() > 0 {
                    let (name, path, like) = (name.to_owned(), shown.clone(), like.clone());
                    return Ok(NewFile { file, folder, partial: Some(partial), name, path, like });
                }
            }
        };
        Ok(Box::new(create().map_err(fail("create", &shown))?))
    }

    fn make_symlink(&self, path: &Path, target: OsString, like: &Entry) -> Result<()> {
        let make = || -> io::Result<()> {
            let (folder, name) = self.place(path)?;
            if readlinkat(&folder, name, Vec::new()).is_ok_and(|there| there.to_bytes() == target.as_bytes())
            {
                return Ok(());
            }
            let partial = partial_name();
            symlinkat(&target, &folder, &partial)?;
            utimensat(&folder, &partial, &times_of(like), AtFlags::SYMLINK_NOFOLLOW)?;
            settle(&folder, &partial, name, path)
        };
        make().map_err(fail("make symbolic link", &self.shown(path)))
    }

    fn make_link(&self, existing: &Path, path: &Path) -> Result<()> {
        let make = || -> io::Result<()> {
            let ((from, existing), (folder, name)) = (self.place(existing)?, self.place(path)?);
            let identity = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
            if let (Ok(a), Ok(b)) = (metadata_at(&from, existing), metadata_at(&folder, name))
                && identity(a) == identity(b)
            {
                return Ok(());
            }
            let partial = partial_name();
            linkat(&from, existing, &folder, &partial, AtFlags::empty())?;
            settle(&folder, &partial, name, path)
        };
        make().map_err(fail("make link", &self.shown(path)))
    }

    fn finish(&self) -> Result<()> {
        Ok(())
    }
}

/// The modification time of an entry, without its access time.
fn times_of(like: &Entry) -> Timestamps {
    let (seconds, nanos) = Timestamp::from(like.mtime).parts();
    let last_modification = Timespec { tv_sec: seconds, tv_nsec: nanos.into() };
    Timestamps { last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT }, last_modification }
}

/// Renames an entry from its partial to its final name.
fn settle(folder: &OwnedFd, partial: &OsStr, name: &OsStr, path: &Path) -> io::Result<()> {
    let settled = renameat(folder, partial, folder, name);
    if settled.is_err() {
        remove_partial(folder, partial, path);
    }
    Ok(settled?)
}

struct NewFile {
    file: File,
    folder: OwnedFd,
    /// `None` once it has its final name.
    partial: Option<OsString>,
    name: OsString,
    path: PathBuf,
    like: Entry,
}

impl WriteFile for NewFile {
    fn write(&mut self, offset: u64, bytes: Bytes) -> Result<()> {
        self.file.write_all_at(&bytes, offset).map_err(fail("write", &self.path))
    }

    fn finish(mut self: Box<Self>, attributes: &Attributes) -> Result<()> {
        let complete = || -> io::Result<()> {
            self.file.set_len(self.like.size)?;
            xattr::write(&self.file, attributes)?;
            let metadata = self.file.metadata()?;
            if let Some(mode) = self.like.mode_of_copy(metadata.uid(), metadata.gid()) {
                self.file.set_permissions(Permissions::from_mode(mode))?;
            }
            self.file.set_modified(self.like.mtime)
        };
        complete().map_err(fail("complete", &self.path))?;
        let Some(partial) = self.partial.take() else { return Ok(()) };
        settle(&self.folder, &partial, &self.name, &self.path).map_err(fail("complete", &self.path))
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(partial) = &self.partial {
            remove_partial(&self.folder, partial, &self.path);
        }
    }
}
