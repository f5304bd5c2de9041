//! The target of a published volume: a folder that the kubelet names, guarded so that nothing is ever written to it
//! while no volume is mounted there.
//!
//! The folder gets mode 0500, and the immutable flag where the process may set it and the file system has it. A
//! program that meets the bare folder, before the mount or after its end, gets an error instead of losing its files
//! below a later mount.

use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Component, Path, PathBuf};

use millrace_datafs::mount;
use rustix::fs::{IFlags, Mode, OFlags};
use tonic::{Code, Status};

use crate::refusal::{invalid, missing, of_volumes, refused};

/// Longest path, in bytes: below that of the kernel, for the names that are appended.
const PATH_BYTES_MAX: usize = 3_072;
/// Mounts on top of each other that one call removes.
const MOUNTS_MAX: usize = 16;

/// Checks a path of the kubelet: absolute, plain, and below its folder even when links are followed.
pub(crate) fn check(field: &str, path: &str, kubelet: &Path) -> Result<PathBuf, Status> {
    if path.is_empty() {
        return Err(missing(field));
    }
    if path.len() > PATH_BYTES_MAX {
        return Err(invalid(field, format!("is longer than {PATH_BYTES_MAX} bytes")));
    }
    if path.contains(|c: char| c.is_control()) {
        return Err(invalid(field, "contains control characters"));
    }
    let found = Path::new(path);
    let plain = found.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    if !found.is_absolute() || !plain || path.contains("/./") || path.ends_with("/.") {
        return Err(invalid(field, format!("{path} is not an absolute path without `.` and `..`")));
    }
    let outside =
        || invalid(field, format!("{path} is not below the kubelet's folder {}", kubelet.display()));
    if !found.starts_with(kubelet) || found == kubelet {
        return Err(outside());
    }
    // A missing parent is reported where it is needed.
    if let (Some(Ok(parent)), Ok(root)) = (found.parent().map(fs::canonicalize), fs::canonicalize(kubelet))
        && !parent.starts_with(&root)
    {
        return Err(outside());
    }
    Ok(found.components().collect())
}

fn failed(attempt: &str, path: &Path, error: impl std::fmt::Display) -> Status {
    refused(Code::Internal, format!("cannot {attempt} {}: {error}", path.display()))
}

/// Makes the target a guarded, empty folder without a mount.
pub(crate) fn prepare(path: &Path) -> Result<(), Status> {
    detach(path)?;
    match DirBuilder::new().mode(0o500).create(path) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        Err(error) => return Err(failed("create the target", path, error)),
    }
    let metadata = fs::symlink_metadata(path).map_err(|error| failed("look at the target", path, error))?;
    if !metadata.is_dir() {
        return Err(invalid("target_path", format!("{} is not a folder", path.display())));
    }
    if foreign_mount(path)? {
        let reason = "another file system is mounted there: unmount it";
        return Err(refused(Code::FailedPrecondition, format!("target_path: {}: {reason}", path.display())));
    }
    let mut entries = fs::read_dir(path).map_err(|error| failed("read the target", path, error))?;
    if entries.next().is_some() {
        let reason = "the folder is not empty, and a mount would hide its files: move them away";
        return Err(refused(Code::FailedPrecondition, format!("target_path: {}: {reason}", path.display())));
    }
    guard(path);
    Ok(())
}

/// Guards the bare folder. What a file system cannot do is left out.
fn guard(path: &Path) {
    if let Err(error) = set_immutable(path, true) {
        tracing::debug!(path = %path.display(), %error, "the target cannot be made immutable; its mode guards it");
        let mode = rustix::fs::chmod(path, Mode::from_raw_mode(0o500));
        if let Err(error) = mode {
            tracing::warn!(path = %path.display(), %error, "cannot guard the target against writes");
        }
    }
}

fn set_immutable(path: &Path, on: bool) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = rustix::fs::open(path, flags, Mode::empty())?;
    let mut attributes = rustix::fs::ioctl_getflags(&folder)?;
    if attributes.contains(IFlags::IMMUTABLE) != on {
        attributes.set(IFlags::IMMUTABLE, on);
        rustix::fs::ioctl_setflags(&folder, attributes)?;
    }
    Ok(())
}

/// Whether a volume is mounted at a path, alive or dead.
pub(crate) fn is_mounted(path: &Path) -> Result<bool, Status> {
    mount::is_mounted(path).map_err(|error| of_volumes("read the table of mounts", &error))
}

/// Whether something else than a volume is mounted at a path.
fn foreign_mount(path: &Path) -> Result<bool, Status> {
    let device = |path: &Path| {
        let found = rustix::fs::lstat(path).map(|found| found.st_dev);
        found.map_err(|error| failed("look at", path, error))
    };
    match path.parent() {
        Some(parent) => Ok(device(path)? != device(parent)?),
        None => Ok(false),
    }
}

/// Removes all mounts of volumes from a path. Files below that are open stay usable until they are closed.
pub(crate) fn detach(path: &Path) -> Result<(), Status> {
    for _ in 0..MOUNTS_MAX {
        if !is_mounted(path)? {
            return Ok(());
        }
        match mount::umount(path) {
            Ok(()) => {}
            // Its server may just have ended.
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(of_volumes(&format!("unmount {}", path.display()), &error)),
        }
    }
    if is_mounted(path)? {
        return Err(failed("unmount", path, format!("more than {MOUNTS_MAX} mounts are there")));
    }
    Ok(())
}

/// Removes the target after its mount.
pub(crate) fn remove(path: &Path) -> Result<(), Status> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed("look at the target", path, error)),
        Ok(metadata) if !metadata.is_dir() => {
            return Err(invalid("target_path", format!("{} is not a folder", path.display())));
        }
        Ok(_) => {}
    }
    if foreign_mount(path)? {
        let reason = "another file system is mounted there: unmount it";
        return Err(refused(Code::FailedPrecondition, format!("target_path: {}: {reason}", path.display())));
    }
    if let Err(error) = set_immutable(path, false) {
        tracing::debug!(path = %path.display(), %error, "the immutable flag of the target cannot be cleared");
    }
    match fs::remove_dir(path) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(failed("remove the target", path, error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_outside_of_the_kubelets_folder_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("kubelet");
        fs::create_dir_all(root.join("pods/a")).unwrap();
        std::os::unix::fs::symlink("/", root.join("pods/link")).unwrap();
        let at = |rest: &str| format!("{}{rest}", root.display());
        let good = at("/pods/a/mount");
        assert_eq!(check("f", &good, &root).unwrap(), Path::new(&good));
        assert_eq!(check("f", &at("/pods/a//mount/"), &root).unwrap(), Path::new(&good));
        for bad in [
            String::new(),
            "pods/a".into(),
            at(""),
            at("/"),
            at("x/pods"),
            at("/pods/../../x"),
            at("/pods/./a"),
            at("/pods/."),
            at("/pods/link/x"),
            at("/pods/a\n"),
            at(&"/x".repeat(PATH_BYTES_MAX)),
            "/etc".into(),
        ] {
            let refused = check("f", &bad, &root).unwrap_err();
            assert!(
                refused.code() == Code::InvalidArgument && refused.message().starts_with("f: "),
                "{bad}: {refused}"
            );
        }
    }

    #[test]
    fn a_bare_target_is_guarded_and_goes_with_its_guard() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("mount");
        prepare(&target).unwrap();
        // Again, as after a crash.
        prepare(&target).unwrap();
        use std::os::unix::fs::PermissionsExt as _;
        let mode = fs::metadata(&target).unwrap().permissions().mode();
        assert_eq!(mode & 0o222, 0);
        remove(&target).unwrap();
        assert!(!target.exists());
        remove(&target).unwrap();
    }

    #[test]
    fn a_target_with_files_is_neither_hidden_nor_removed() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("mount");
        fs::create_dir(&target).unwrap();
        fs::write(target.join("file"), "bytes").unwrap();
        assert_eq!(prepare(&target).unwrap_err().code(), Code::FailedPrecondition);
        assert_eq!(remove(&target).unwrap_err().code(), Code::Internal);
        assert_eq!(fs::read(target.join("file")).unwrap(), b"bytes");
        let file = dir.path().join("plain");
        fs::write(&file, "").unwrap();
        assert_eq!(prepare(&file).unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(remove(&file).unwrap_err().code(), Code::InvalidArgument);
    }
}
