//! FUSE passthrough: backing files, from which the kernel reads without requests.
//!
//! The kernel may grant the feature to every process when a mount begins, but accepts files from privileged
//! ones only. A server without privilege asks the holder of its mount. The kernel's numbers of backing files
//! belong to the mount, so a later server goes on using them.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;
use std::sync::Arc;

use fuser::{FileHandle, FopenFlags, ReplyOpen};
use nix::sys::statfs::{ECRYPTFS_SUPER_MAGIC, OVERLAYFS_SUPER_MAGIC, statfs};

use crate::fs::View;
use crate::mount::handover::Client;

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

/// The way to open and close backing files.
#[derive(Debug)]
pub(in crate::mount) enum Registrar {
    /// Over the device of the mount, with privilege.
    Own(File),
    /// Through the holder of the mount.
    Holder(Arc<Client>),
}

/// A backing file. The drop closes it; it must live as long as an open file of the kernel uses it.
#[derive(Debug)]
pub(in crate::mount) struct Backing {
    id: u32,
    registrar: Arc<Registrar>,
}

impl Backing {
    /// Opens a backing file.
    pub(in crate::mount) fn open(registrar: &Arc<Registrar>, file: &File) -> io::Result<Backing> {
        let id = match &**registrar {
            Registrar::Own(device) => open_backing(device, file)?,
            Registrar::Holder(client) => {
                // The name of the open file; the holder opens it again, and only below its own folders.
                let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd())).read_link()?;
                client.open_backing(&path)?
            }
        };
        Ok(Backing { id, registrar: Arc::clone(registrar) })
    }

    /// A backing file that an earlier server has opened.
    pub(in crate::mount) fn inherited(registrar: &Arc<Registrar>, id: u32) -> Backing {
        Backing { id, registrar: Arc::clone(registrar) }
    }

    /// The kernel's number of the backing file.
    pub(in crate::mount) fn id(&self) -> u32 {
        self.id
    }

    /// Replies to an open: the kernel reads from the backing file.
    pub(in crate::mount) fn answer(&self, reply: ReplyOpen, handle: FileHandle, flags: FopenFlags) {
        // SAFETY: the number is open in this session, and stays so while `self` lives. The library's value gives
        // it up again below instead of closing it.
        let id = unsafe { reply.wrap_backing(self.id) };
        reply.opened_passthrough(handle, flags, &id);
        id.into_raw();
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        let closed = match &*self.registrar {
            Registrar::Own(device) => close_backing(device, self.id),
            Registrar::Holder(client) => client.close_backing(self.id),
        };
        if let Err(error) = closed {
            tracing::debug!(%error, id = self.id, "closing a backing file");
        }
    }
}

/// Gives the kernel a backing file over the device of a mount.
pub(in crate::mount) fn open_backing(device: &File, file: &File) -> io::Result<u32> {
    let map = Map { file: file.as_raw_fd(), flags: 0, padding: 0 };
    // SAFETY: the kernel reads the structure of the request, which lives until it has answered; both
    // descriptors are open.
    let number = unsafe { ioctl::backing_open(device.as_raw_fd(), &raw const map) }?;
    Ok(number as u32)
}

/// Takes a backing file away from the kernel. Files that are open keep it.
pub(in crate::mount) fn close_backing(device: &File, number: u32) -> io::Result<()> {
    // SAFETY: the kernel reads the number; it refuses one that it has not given out.
    unsafe { ioctl::backing_close(device.as_raw_fd(), &raw const number)? };
    Ok(())
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
    match open_backing(device, &file) {
        Ok(number) => close_backing(device, number).map(|()| true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES)) => Ok(false),
        Err(error) => Err(error),
    }
}
