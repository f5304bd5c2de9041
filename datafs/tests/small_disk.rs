//! Small file systems, for tests of full disks. Dropping the value unmounts it.
#![allow(clippy::print_stderr)]

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::mount::{MntFlags, MsFlags};

/// A mounted file system of a few mebibytes.
pub(crate) struct SmallDisk {
    _dir: tempfile::TempDir,
    at: PathBuf,
}

impl SmallDisk {
    /// A tmpfs; `None`, and the reason on standard error, where mounting is not permitted.
    pub(crate) fn new(mib: u32) -> Option<SmallDisk> {
        let dir = tempfile::tempdir().unwrap();
        let (at, options) = (dir.path().to_owned(), format!("size={mib}m"));
        let source = Some("millrace-test");
        match nix::mount::mount(source, &at, Some("tmpfs"), MsFlags::empty(), Some(options.as_str())) {
            Ok(()) => Some(SmallDisk { _dir: dir, at }),
            Err(error) => {
                millrace_testing::skip(
                    millrace_testing::Need::Disk,
                    format_args!("a tmpfs cannot be mounted: {error}"),
                );
                None
            }
        }
    }

    /// An ext4 image with blocks of 1 KiB; `None`, and the reason on standard error, where it cannot be
    /// mounted.
    pub(crate) fn with_small_blocks(mib: u64) -> Option<SmallDisk> {
        let dir = tempfile::tempdir().unwrap();
        let (image, at) = (dir.path().join("image"), dir.path().join("mnt"));
        File::create(&image).unwrap().set_len(mib << 20).unwrap();
        fs::create_dir(&at).unwrap();
        let run = |command: &str, arguments: &[&OsStr]| {
            let status = Command::new(command).args(arguments).status();
            status.is_ok_and(|status| status.success())
        };
        let made = run("mkfs.ext4", &["-q".as_ref(), "-b".as_ref(), "1024".as_ref(), image.as_os_str()]);
        if made && run("mount", &["-o".as_ref(), "loop".as_ref(), image.as_os_str(), at.as_os_str()]) {
            return Some(SmallDisk { _dir: dir, at });
        }
        millrace_testing::skip(millrace_testing::Need::Disk, "an ext4 image cannot be mounted");
        None
    }

    /// The mount point.
    pub(crate) fn path(&self) -> &Path {
        &self.at
    }

    /// Changes the size of a tmpfs.
    pub(crate) fn grow(&self, mib: u32) {
        let options = format!("size={mib}m");
        nix::mount::mount(None::<&str>, &self.at, None::<&str>, MsFlags::MS_REMOUNT, Some(options.as_str()))
            .unwrap();
    }

    /// Fills all free space, with the files `ballast` and `last-ballast`.
    pub(crate) fn fill(&self) {
        for (name, piece) in [("ballast", 4_096), ("last-ballast", 1)] {
            let mut file = File::create(self.at.join(name)).unwrap();
            while file.write_all(&vec![1; piece]).is_ok() {}
        }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // If the unmount fails the folder stays; the message says so.
        if let Err(error) = nix::mount::umount2(&self.at, MntFlags::MNT_DETACH) {
            eprintln!("{} stays mounted: {error}", self.at.display());
        }
    }
}
