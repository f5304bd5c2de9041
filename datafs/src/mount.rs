//! A FUSE mount: one view of a volume served as a directory of this machine.
//!
//! [`mount`] attaches a view to a path and starts threads that serve the kernel's requests until the mount
//! ends. It ends by [`Mount::unmount`], by a drop, by [`umount`] from any process or by the `umount` command. A
//! live view is mounted read/write, with its snapshots at `.snapshots/NAME`; a snapshot is mounted read-only.
//!
//! Consistency: close-to-open. Data that a process wrote and closed (or fsynced) through one mount is seen by
//! every later `open`, through any mount of the volume. The kernel caches attributes until the mount revokes
//! them, and names of the live tree for up to 60 s. The mount notifies the kernel of changes by other mounts
//! and checks the kernel's copy of a file at `open`. `close` makes changes visible, `fsync` makes them durable.
//! A timer does both for files that stay open.
//!
//! Locks (`flock`, `fcntl`) hold between all mounts of a volume and end with their holder. Taking a lock makes
//! the kernel drop data that others have changed since; releasing one commits what was written. So a lock
//! holder sees what the previous holder wrote. In a mount of a snapshot the kernel handles locks alone. A write
//! without the privilege to keep them clears the set-user-ID and set-group-ID bits of the file.
//!
//! Not here: the semantics of the file system (see [`View`]), and `O_TMPFILE`. The FUSE library does not
//! support `O_TMPFILE`, so it fails with EOPNOTSUPP; [`View::create_unnamed`] creates unnamed files.

mod caller;
mod coherence;
mod convert;
mod errno;
mod fuse;
mod handles;
mod handover;
mod locks;
mod lookup_prefetch;
mod observe;
mod opening;
mod options;
mod outcome;
mod stateless;

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::fs::View;

pub use fuse::point::mount_points;
pub use fuse::session::{End, Mount, Stopper};
use fuse::{point, session};
pub use handover::{HeldMount, Holder, HolderOptions, can_hand_over, held, umount_held};
pub use observe::control::{Served, served};
pub use observe::stats::{Latency, MountStats, OperationStats, TraceStats};
pub use observe::trace::TraceOptions;
pub use opening::{Open, Opening};
pub use options::MountOptions;

/// Mounts a view on a directory. Creates the directory if it is missing; it must be empty. Detaches a mount
/// that a dead process has left there.
///
/// # Errors
/// [`Error::Exists`] when the path is a mount already, [`Error::NotEmpty`], [`Error::NotADirectory`],
/// [`Error::Invalid`] for options out of bounds, and [`Error::Io`] when the system refuses. [`can_mount`] tells
/// the reason in words beforehand.
pub fn mount(view: View, at: &Path, options: MountOptions) -> Result<Mount> {
    session::mount(view, at, &options)
}

/// Mounts a view through the holder at a socket, or takes the mount over from the process that serves it now.
/// That process commits everything and ends first; if it has crashed, this one continues where it stopped. Files
/// and directories stay open, locks stay held. The mount must be of the same volume or snapshot, with the same
/// options of the system (`allow_other`, `read_only`, `suid`, `dev`, `noexec`).
///
/// Wait for the end with [`Mount::wait`]: the process must end when the mount was handed over.
///
/// # Errors
/// [`Error::Io`] when no holder answers, when it refuses this user or the options, or when the running server
/// does not hand over within 60 s and cannot be killed; [`Error::Invalid`] for options out of bounds, and for a
/// second live volume in one process.
pub fn mount_held(view: View, at: &Path, options: MountOptions, holder: &Path) -> Result<Mount> {
    session::mount_held(view, at, &options, holder)
}

/// Unmounts the volume that any process has mounted at `at`. While files are open below, the path becomes free
/// at once and the files stay usable until they are closed.
///
/// # Errors
/// [`Error::NotFound`] when no volume is mounted there.
pub fn umount(at: &Path) -> Result<()> {
    let named = at;
    let at = point::absolute(named)?;
    let Some(mounted) = point::find(&at)? else {
        let what = format!("a mounted volume at {}", at.display());
        return Err(Error::not_found_hinted(what, point::other_mounts(named)?));
    };
    if point::detach(&at, false).is_ok() {
        return Ok(());
    }
    // Mostly the mount is busy. Its process or another one may also have unmounted it meanwhile.
    match point::detach(&at, true) {
        Err(error) if point::find(&at)?.as_ref() == Some(&mounted) => {
            Err(point::refused("unmount", &at, error))
        }
        _ => Ok(()),
    }
}

/// Whether a volume is mounted at `at`, by any process, including one that has died.
///
/// # Errors
/// When the system's table of mounts cannot be read.
pub fn is_mounted(at: &Path) -> Result<bool> {
    Ok(point::find(&point::absolute(at)?)?.is_some())
}

/// Makes `at` ready for a mount, as [`mount`] does first: an empty folder without a mount. Creates it if it is
/// missing, and detaches a mount of this crate whose process has died. Returns the absolute path.
///
/// # Errors
/// As for [`mount`].
pub fn prepare(at: &Path) -> Result<PathBuf> {
    point::prepare(at)
}

/// Whether this process may mount. Otherwise the reason and the remedy, in one line.
///
/// # Errors
/// The reason.
pub fn can_mount() -> Result<(), String> {
    point::can_mount()
}
