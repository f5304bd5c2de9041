//! The mount point of a held mount: a pinned folder, and the kernel's record of what is mounted there.
//!
//! A pinned folder stays the same between a check and the mount, whatever other processes rename or link
//! meanwhile. Nothing but [`Place::prepare`] sends a request to a mount, so that no server is waited for.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use nix::fcntl::{AT_FDCWD, OFlag, OpenHow, ResolveFlag, openat2};
use nix::mount::{MntFlags, umount2};
use nix::sys::stat::fstat;
use nix::sys::statvfs::fstatvfs;

use crate::error::{Error, Result};
use crate::mount::fuse::point::{self, Attach};

/// How long a mount may take to say whether its server lives.
const PROBE_MAX: Duration = Duration::from_millis(if cfg!(test) { 100 } else { 2_000 });
/// Most mounts that are asked at a time. The thread of one that does not answer waits for its end.
const PROBES_MAX: usize = 16;
static PROBES: AtomicUsize = AtomicUsize::new(0);

/// A pinned folder.
#[derive(Debug)]
pub(super) struct Place {
    path: PathBuf,
    folder: OwnedFd,
}

impl Place {
    /// Pins the folder at an absolute path without symbolic links.
    ///
    /// # Errors
    /// Those of opening; ELOOP for a symbolic link.
    pub(super) fn open(path: &Path) -> io::Result<Place> {
        let how = OpenHow::new()
            .flags(OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC)
            .resolve(ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_MAGICLINKS);
        Ok(Place { path: path.to_owned(), folder: openat2(AT_FDCWD, path, how)? })
    }

    /// The user that owns the folder.
    pub(super) fn owner(&self) -> io::Result<u32> {
        Ok(fstat(&self.folder)?.st_uid)
    }

    /// Whether any file system is mounted here.
    pub(super) fn is_mount_point(&self) -> Result<bool> {
        Ok(point::mount_of(self.folder.as_fd())?.is_some_and(|on| on.at == self.path))
    }

    /// `major:minor` of the mount of this crate here.
    pub(super) fn mounted(&self) -> Result<Option<String>> {
        let on = point::mount_of(self.folder.as_fd())?;
        Ok(on.filter(|on| on.is_ours && on.at == self.path).map(|on| on.device))
    }

    /// The path of the pinned folder, for this process only.
    fn through(&self) -> PathBuf {
        Path::new("/proc/self/fd").join(self.folder.as_raw_fd().to_string())
    }

    /// Makes sure that the folder is empty and no mount of this crate. Detaches one whose server has died.
    pub(super) fn prepare(mut self) -> Result<Place> {
        if self.mounted()?.is_some() {
            if !self.is_dead()? {
                return Err(Error::Exists { what: format!("a mount at {}", self.path.display()) });
            }
            tracing::info!(path = %self.path.display(), "taking off a mount whose process has died");
            let failed = |source| point::refused("take off the dead mount at", &self.path, source);
            self.detach(true).map_err(failed)?;
            self = Place::open(&self.path)
                .map_err(|source| point::refused("open mount point", &self.path, source))?;
        }
        let failed = |source| point::refused("open mount point", &self.path, source);
        match fs::read_dir(self.through()).map_err(failed)?.next() {
            Some(_) => Err(Error::NotEmpty { what: self.path.display().to_string() }),
            None => Ok(self),
        }
    }

    /// Whether the server of the mount here has died for good.
    ///
    /// # Errors
    /// [`Error::Io`] when the mount does not answer within [`PROBE_MAX`].
    fn is_dead(&self) -> Result<bool> {
        let failed = |source| point::refused("ask the mount at", &self.path, source);
        if PROBES.fetch_add(1, Ordering::AcqRel) >= PROBES_MAX {
            PROBES.fetch_sub(1, Ordering::AcqRel);
            return Err(failed(io::Error::other(format!(
                "{PROBES_MAX} mounts do not answer: end their servers or unmount them"
            ))));
        }
        let (tell, told) = mpsc::channel();
        let spawned = self.folder.try_clone().and_then(|folder| {
            std::thread::Builder::new().name("datafs-probe".into()).spawn(move || {
                let answer = fstatvfs(&folder).map(drop);
                drop(folder);
                PROBES.fetch_sub(1, Ordering::AcqRel);
                // The other thread may have given up.
                let _ = tell.send(answer);
            })
        });
        if let Err(error) = spawned {
            PROBES.fetch_sub(1, Ordering::AcqRel);
            return Err(failed(error));
        }
        match told.recv_timeout(PROBE_MAX) {
            Ok(answer) => Ok(answer == Err(nix::errno::Errno::ENOTCONN)),
            Err(_) => Err(failed(io::Error::other(format!(
                "a mount is there, and its server has not answered for {} ms: end that server, or unmount it",
                PROBE_MAX.as_millis()
            )))),
        }
    }

    /// Mounts here. Returns the device.
    pub(super) fn attach(&self, how: &Attach<'_>) -> Result<OwnedFd> {
        point::attach_through(&self.path, &self.through(), how)
    }

    /// Detaches the mount here. The path is free at once; open files stay usable while a server lives. Without one,
    /// `end` fails the requests that wait: otherwise the kernel may wait for their answers for ever.
    fn detach(&self, end: bool) -> io::Result<()> {
        if point::is_privileged() {
            let force = if end { MntFlags::MNT_FORCE } else { MntFlags::empty() };
            return Ok(umount2(&self.through(), MntFlags::MNT_DETACH | force)?);
        }
        point::detach(&self.path, true)
    }
}

/// Whether a mount is attached at a path.
pub(super) fn is_at(path: &Path, number: &str) -> io::Result<bool> {
    let place = match Place::open(path) {
        Ok(place) => place,
        Err(error) if is_missing(&error) => return Ok(false),
        Err(error) => return Err(error),
    };
    Ok(place.mounted().map_err(io::Error::other)?.as_deref() == Some(number))
}

/// Whether an error says that there is no folder at a path, and so no mount.
fn is_missing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR | libc::ELOOP))
}

/// Detaches a mount from its path, unless another one is there by now. `end` is for a mount without a server.
pub(super) fn detach(path: &Path, number: &str, end: bool) -> io::Result<()> {
    let place = match Place::open(path) {
        Ok(place) => place,
        Err(error) if is_missing(&error) => return Ok(()),
        Err(error) => return Err(error),
    };
    match place.mounted().map_err(io::Error::other)? {
        Some(found) if found == number => place.detach(end),
        _ => Ok(()),
    }
}

/// The path by which a client names a mount point to its holder, which follows links only for trusted users.
pub(super) fn as_named(path: &Path) -> io::Result<PathBuf> {
    let path = std::path::absolute(path)?;
    if nix::unistd::geteuid().is_root() { Ok(path) } else { resolved(&path) }
}

/// Refuses a path that is relative or goes up.
pub(super) fn check_plain(path: &Path) -> std::result::Result<(), String> {
    let is_plain = |part: Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
    match path.is_absolute() && path.components().all(is_plain) {
        true => Ok(()),
        false => Err(format!("the mount point {} is no absolute path without `..`", path.display())),
    }
}

/// The path of a mount point without symbolic links; folders at its end may be missing. Sends no request to a
/// mount there: it may have no server.
pub(super) fn resolved(path: &Path) -> io::Result<PathBuf> {
    if fs::read_link(path).is_ok() || path.file_name().is_none() {
        return fs::canonicalize(path);
    }
    // The last component is taken as it is.
    for folder in path.ancestors().skip(1) {
        match fs::canonicalize(folder) {
            Ok(found) => return Ok(found.join(path.strip_prefix(folder).unwrap_or(path))),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(path.to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_are_resolved_also_above_missing_folders() {
        let dir = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(dir.path()).unwrap();
        fs::create_dir(root.join("real")).unwrap();
        symlink("real", root.join("link")).unwrap();
        assert_eq!(resolved(&root.join("link")).unwrap(), root.join("real"));
        assert_eq!(resolved(&root.join("link/a/b")).unwrap(), root.join("real/a/b"));
        assert_eq!(resolved(&root.join("new")).unwrap(), root.join("new"));
        assert_eq!(resolved(&root.join("link/../new")).unwrap(), root.join("new"));
        assert_eq!(resolved(&root.join("real/..")).unwrap(), root);
        assert_eq!(resolved(Path::new("/")).unwrap(), Path::new("/"));
    }

    #[test]
    fn a_path_with_a_link_is_not_pinned() {
        let dir = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(dir.path()).unwrap();
        fs::create_dir_all(root.join("real/folder")).unwrap();
        symlink("real", root.join("link")).unwrap();
        assert!(Place::open(&root.join("link/folder")).is_err());
        let place = Place::open(&root.join("real/folder")).unwrap();
        assert_eq!(place.owner().unwrap(), nix::unistd::geteuid().as_raw());
        assert!(!place.is_mount_point().unwrap() && place.mounted().unwrap().is_none());
        fs::write(root.join("real/folder/file"), b"x").unwrap();
        assert!(matches!(place.prepare(), Err(Error::NotEmpty { .. })));
    }

    #[test]
    fn paths_that_go_up_are_refused() {
        assert!(check_plain(Path::new("/a/b")).is_ok());
        for path in ["a", "/a/../b", "", "/.."] {
            assert!(check_plain(Path::new(path)).is_err(), "{path}");
        }
    }
}
