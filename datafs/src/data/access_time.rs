//! Access times off: the files of a store are marked so that the file system does not record their last read.
//! Only this program reads them, and recording costs 1/20 of a 4 KiB read.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};

/// Sets the no-access-time flag on a directory; ext4 and XFS pass it on to files and folders created below
/// later. Where that fails (another file system, another owner), access times are kept.
pub(super) fn leave_out(directory: &Path) {
    let ask = || -> io::Result<()> {
        let file = File::open(directory)?;
        let flags = ioctl_getflags(&file)?;
        // Every process that opens the store runs this; only the first has to write.
        if !flags.contains(IFlags::NOATIME) {
            ioctl_setflags(&file, flags | IFlags::NOATIME)?;
        }
        Ok(())
    };
    if let Err(error) = ask() {
        tracing::debug!(%error, directory = %directory.display(), "access times are kept");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaves_out(path: &Path) -> io::Result<bool> {
        Ok(ioctl_getflags(File::open(path).unwrap())?.contains(IFlags::NOATIME))
    }

    #[test]
    fn what_is_made_below_has_none_either() {
        let dir = tempfile::tempdir().unwrap();
        leave_out(dir.path());
        leave_out(dir.path());
        match leaves_out(dir.path()) {
            Ok(true) => {}
            // File systems that have the flag let the owner set it.
            other => {
                return millrace_testing::skip(
                    millrace_testing::Need::Filesystem,
                    format_args!("the file system keeps no such flag: {other:?}"),
                );
            }
        }
        let folder = dir.path().join("00");
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("object"), b"bytes").unwrap();
        let passed_on = [folder.clone(), folder.join("object")].map(|path| leaves_out(&path).unwrap());
        // Btrfs has the flag but does not pass it on.
        assert!(passed_on == [true; 2] || passed_on == [false; 2], "{passed_on:?}");
    }

    #[test]
    fn where_it_cannot_be_had_nothing_happens() {
        leave_out(Path::new("/proc/self"));
        leave_out(Path::new("/nowhere/at/all"));
    }
}
