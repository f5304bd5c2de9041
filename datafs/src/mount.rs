//! A view as a directory of this machine, through FUSE.
//!
//! [`mount`] attaches a view to a path and serves the kernel's requests on threads of its own until
//! the mount ends: by [`Mount::unmount`], by dropping it, by [`umount`] from any process or by the
//! `umount` command. A live view is mounted read/write, with its snapshots at `.snapshots/NAME`; a
//! snapshot is mounted read-only.
//!
//! Consistency: close-to-open. What a process wrote and closed (or fsynced) through one mount is
//! seen by every `open` that follows, through any mount of the volume. The kernel keeps entries and
//! attributes for as long as it likes; of the live tree it is told soon what others have changed, and what
//! it has of a file is checked at `open`. `close` makes changes visible, `fsync` makes them durable;
//! both happen by time to what is written to a file that stays open.
//!
//! Locks (`flock`, `fcntl`) hold between all mounts of a volume and end with their holder. Taking one
//! makes the kernel forget what others have changed since, giving one up commits what was written: whoever
//! locks sees what the last holder wrote. In a mount of a snapshot locks are the kernel's own. Whoever writes through a mount without the privilege to keep them loses the
//! set-user-ID and set-group-ID bits of the file.
//!
//! Not here: what the file system *means* (that is the view), `O_TMPFILE` (EOPNOTSUPP: the FUSE library
//! does not know it; [`View::create_unnamed`] does).

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
use crate::view::View;

pub use control::{Served, served};
pub use opening::{Open, Opening};
pub use session::Mount;
pub use stats::{Latency, MountStats, OperationStats, TraceStats};
pub use trace::TraceOptions;

/// How to mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountOptions {
    /// Lets users other than the one that mounts in, subject to owners and modes. Unprivileged users
    /// need `user_allow_other` in `/etc/fuse.conf` for it. Default: on for root only.
    pub allow_other: bool,
    /// Has the kernel refuse every change, also of a live volume. A snapshot is mounted so in any case.
    pub read_only: bool,
    /// Has the kernel honour set-user-ID and set-group-ID bits and capabilities of programs. For root only.
    pub suid: bool,
    /// Has the kernel open device nodes. For root only.
    pub dev: bool,
    /// Has the kernel refuse to run programs.
    pub noexec: bool,
    /// Threads that answer the kernel at once, 1 to 64. Default 8: requests that wait (for a commit, the
    /// disk, the network) do so beside each other.
    pub threads: usize,
    /// How files are opened. Default: [`Open::Auto`].
    pub open: Open,
    /// Where each request is written down. Default: nowhere.
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

/// Mounts a view on a directory, which is created when missing and must be empty. What a process
/// that died left mounted there is taken off first.
///
/// # Errors
/// [`Error::Exists`] when the path is a mount already, [`Error::NotEmpty`], [`Error::NotADirectory`],
/// [`Error::Invalid`] for options out of bounds, and [`Error::Io`] when the system refuses; ask
/// [`can_mount`] first for the reason in words.
pub fn mount(view: View, at: &Path, options: MountOptions) -> Result<Mount> {
    session::mount(view, at, &options)
}

/// Unmounts what any process has mounted at `at`. While files are open below, the path is freed at
/// once and the files stay usable until they are closed.
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
    // Busy, mostly; or its process, or somebody else, has unmounted it meanwhile.
    match point::detach(&at, true) {
        Err(error) if point::find(&at)?.as_ref() == Some(&mounted) => {
            Err(point::refused("unmount", &at, error))
        }
        _ => Ok(()),
    }
}

/// Whether a volume is mounted at `at`, by whatever process, also one that has died.
///
/// # Errors
/// When the system's table of mounts cannot be read.
pub fn is_mounted(at: &Path) -> Result<bool> {
    Ok(point::find(&point::absolute(at)?)?.is_some())
}

/// Whether this process may mount; else the reason and the way out, in one line.
///
/// # Errors
/// The reason.
pub fn can_mount() -> Result<(), String> {
    point::can_mount()
}

/// What the kernel is told about an error. Exhaustive on purpose: a new variant must choose.
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
