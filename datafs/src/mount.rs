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

mod adapter;
mod answer;
mod caller;
mod coherence;
mod control;
mod convert;
mod extended;
mod fusermount;
mod handles;
mod inode_table;
mod instrumented;
mod lock_request;
mod locks;
mod lookup_prefetch;
mod names;
mod opening;
mod outcome;
mod passthrough;
mod point;
mod removed;
mod session;
mod stale_retry;
mod stateless;
mod stats;
mod trace;

mod write_back;

use std::path::Path;

use fuser::Errno;

use crate::error::{Error, Result};
use crate::fs::View;

pub use control::{Served, served};
pub use opening::{Open, Opening};
pub use session::Mount;
pub use stats::{Latency, MountStats, OperationStats, TraceStats};
pub use trace::TraceOptions;

/// Options of [`mount`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountOptions {
    /// Gives users other than the mounting one access, subject to owners and modes. Unprivileged users need
    /// `user_allow_other` in `/etc/fuse.conf` for it. Default: on for root only.
    pub allow_other: bool,
    /// Makes the kernel refuse every change, also of a live volume. A snapshot is always mounted read-only.
    pub read_only: bool,
    /// Makes the kernel honor set-user-ID and set-group-ID bits and capabilities of programs. For root only.
    pub suid: bool,
    /// Makes the kernel open device nodes. For root only.
    pub dev: bool,
    /// Makes the kernel refuse to run programs.
    pub noexec: bool,
    /// Threads that serve the kernel's requests, 1 to 64. Default 8: requests that wait (for a commit, the
    /// disk, the network) then wait in parallel.
    pub threads: usize,
    /// How the mount opens files. Default: [`Open::Auto`].
    pub open: Open,
    /// Trace file for requests. Default: no trace.
    pub trace: Option<TraceOptions>,
}

impl Default for MountOptions {
    fn default() -> Self {
        let allow_other = nix::unistd::geteuid().is_root();
        Self {
            allow_other,
            read_only: false,
            suid: false,
            dev: false,
            noexec: false,
            threads: 8,
            open: Open::Auto,
            trace: None,
        }
    }
}

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

/// Unmounts the volume that any process has mounted at `at`. While files are open below, the path becomes free
/// at once and the files stay usable until they are closed.
///
/// # Errors
/// [`Error::NotFound`] when no volume is mounted there.
pub fn umount(at: &Path) -> Result<()> {
    let at = point::absolute(at)?;
    let Some(mounted) = point::find(&at)? else {
        return Err(Error::NotFound { what: format!("a mounted volume at {}", at.display()) });
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

/// Whether this process may mount. Otherwise the reason and the remedy, in one line.
///
/// # Errors
/// The reason.
pub fn can_mount() -> Result<(), String> {
    point::can_mount()
}

/// The errno that the kernel receives for an error. Exhaustive on purpose: a new variant must choose one.
pub(crate) fn errno(error: &Error) -> Errno {
    match error {
        Error::NotFound { .. } => Errno::ENOENT,
        Error::NoAttribute { .. } => Errno::ENODATA,
        Error::Exists { .. } => Errno::EEXIST,
        Error::NotADirectory { .. } => Errno::ENOTDIR,
        Error::IsADirectory { .. } => Errno::EISDIR,
        Error::NotEmpty { .. } => Errno::ENOTEMPTY,
        Error::ReadOnly { .. } => Errno::EROFS,
        Error::NotPermitted { .. } => Errno::EPERM,
        Error::BadHandle(_) => Errno::EBADF,
        Error::InvalidName { .. } | Error::Invalid(_) => Errno::EINVAL,
        Error::NameTooLong { .. } => Errno::ENAMETOOLONG,
        Error::Loop { .. } => Errno::ELOOP,
        Error::TooManyLinks { .. } => Errno::EMLINK,
        Error::TooLarge { .. } => Errno::EFBIG,
        Error::NoSpace { quota: false, .. } | Error::NoSpaceToCommit { quota: false, .. } => Errno::ENOSPC,
        Error::NoSpace { quota: true, .. } | Error::NoSpaceToCommit { quota: true, .. } => Errno::EDQUOT,
        Error::Conflict { .. } | Error::Changed { .. } => Errno::EAGAIN,
        Error::Busy { .. } | Error::InUse { .. } => Errno::EBUSY,
        Error::Stale { .. } => Errno::ESTALE,
        Error::NotWritable { .. } | Error::WrongKey { .. } => Errno::EACCES,
        Error::Unsupported(_) => Errno::EOPNOTSUPP,
        Error::NewerFormat { .. }
        | Error::Replaced { .. }
        | Error::Corrupt { .. }
        | Error::Object(_)
        | Error::StoreAway { .. }
        | Error::Metadata { .. }
        | Error::Failed { .. }
        | Error::Io { .. } => Errno::EIO,
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::data::ObjectError;

    #[test]
    fn a_full_disk_and_a_used_up_quota_are_told_apart() {
        for (code, expected) in [(libc::ENOSPC, Errno::ENOSPC), (libc::EDQUOT, Errno::EDQUOT)] {
            let full = || io::Error::from_raw_os_error(code);
            assert_eq!(errno(&Error::io("write", "a pack", full())), expected);
            assert_eq!(errno(&ObjectError::io("write", "a pack", full()).into()), expected);
        }
    }
}
