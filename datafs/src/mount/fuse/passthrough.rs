//! FUSE passthrough: the check whether the kernel accepts backing files from this process. The kernel may grant
//! the feature to every process when a mount begins, but accepts files from privileged ones only.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;

use nix::errno::Errno;
use nix::sys::statfs::{ECRYPTFS_SUPER_MAGIC, OVERLAYFS_SUPER_MAGIC, statfs};

use crate::fs::View;

/// `struct fuse_backing_map`.
#[repr(C)]
struct Map {
    file: i32,
    flags: u32,
    padding: u64,
}

mod ioctl {
    use super::Map;

    const MAGIC: u8 = 229;
    nix::ioctl_write_ptr!(backing_open, MAGIC, 1, Map);
    nix::ioctl_write_ptr!(backing_close, MAGIC, 2, u32);
}

/// Most stacked file systems below a backing file, plus one for the mount. The kernel allows 2; with 1 an
/// overlay above the mount is possible.
pub(in crate::mount) fn stack_depth(view: &View) -> u32 {
    // The folder of a cache may not exist yet.
    let at = view.shared.pool.image_root().and_then(|root| root.ancestors().find_map(|at| statfs(at).ok()));
    let is_stacked =
        at.is_some_and(|at| [OVERLAYFS_SUPER_MAGIC, ECRYPTFS_SUPER_MAGIC].contains(&at.filesystem_type()));
    if is_stacked { 2 } else { 1 }
}

/// Whether the kernel accepts backing files over the device of a running mount. Tried with a file that always
/// exists.
///
/// # Errors
/// Any refusal other than for lack of privilege; it says nothing of other files.
pub(in crate::mount) fn is_permitted(device: &File) -> io::Result<bool> {
    let file = File::open("/proc/self/exe")?;
    let map = Map { file: file.as_raw_fd(), flags: 0, padding: 0 };
    // SAFETY: the kernel reads the structure of the request, which lives until it has answered; both
    // descriptors are open.
    match unsafe { ioctl::backing_open(device.as_raw_fd(), &raw const map) } {
        Ok(number) => {
            let number = number as u32;
            // SAFETY: the kernel reads the number, which is one that it has given us.
            unsafe { ioctl::backing_close(device.as_raw_fd(), &raw const number)? };
            Ok(true)
        }
        Err(Errno::EPERM | Errno::EACCES) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}
