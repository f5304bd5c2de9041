//! Mount handover: a mount whose server may crash or be replaced without an error in any process that uses it.
//!
//! A privileged *holder* mounts and keeps what the kernel ties to a mount. A *server* attaches to it and serves
//! the requests. When a server dies, the requests that it has read and not answered stay in the kernel; the next
//! server makes the kernel send them again (`FUSE_NOTIFY_RESEND`, Linux 6.9). Before Linux 6.9 the death of a
//! server ends the mount, as without a holder.
//!
//! These survive:
//!  - open files: the handle numbers, nodes and flags are in a journal in the holder's memory;
//!  - directories: the kernel sends the position with each request;
//!  - locks and files without a name: the metadata has them under the server's session. The holder keeps the
//!    session's file locked, so that no process ends the session before the next server has taken it over;
//!  - uncommitted writes: a planned handover commits them. A crash loses them; then `write`, `fsync` and `close`
//!    of the open files that wrote to those inodes return EIO. The next `fsync` through each other open file of
//!    those inodes returns EIO once, as does that of a file opened before an `fsync` has told of the loss.
//!
//! Two servers never serve at once: a server gets the device when the connection of the one before has closed,
//! after the last thread of that process.

mod authority;
mod client;
mod connection;
mod device;
pub(super) mod gate;
mod held;
mod holder;
pub(super) mod journal;
mod peer;
mod place;
mod protocol;
pub(super) mod rehearsal;
pub(super) mod resent;
mod restore;
mod wire;

use std::path::Path;

use crate::error::{Error, Result};

pub(super) use client::Client;
pub(super) use held::Held;
pub use holder::{Holder, HolderOptions};
pub use protocol::HeldMount;

/// The first Linux that sends requests of a dead server again.
const LINUX_MIN: (u32, u32) = (6, 9);

/// Whether the kernel lets a mount outlive its server. Otherwise the reason, in one line.
///
/// # Errors
/// The reason.
pub fn can_hand_over() -> std::result::Result<(), String> {
    let path = "/proc/sys/kernel/osrelease";
    let release = std::fs::read_to_string(path).map_err(|error| format!("cannot read {path}: {error}"))?;
    let release = release.trim();
    match version_of(release) {
        Some(version) if version >= LINUX_MIN => Ok(()),
        _ => {
            Err(format!("a handover takes Linux {}.{} or newer, this is {release}", LINUX_MIN.0, LINUX_MIN.1))
        }
    }
}

/// Major and minor version of a kernel release like `6.12.3-arch1`.
fn version_of(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// The mounts of the holder at a socket.
///
/// # Errors
/// [`Error::Io`] when no holder answers there, or when it refuses this user.
pub fn held(socket: &Path) -> Result<Vec<HeldMount>> {
    Client::connect(socket)?.list()
}

/// Has the holder at `socket` unmount what it has mounted at `at`. The path is free at once; open files stay usable
/// while the server of the mount lives.
///
/// # Errors
/// [`Error::Io`] when no holder answers there, when it refuses this user, or has nothing mounted at `at`.
pub fn umount_held(at: &Path, socket: &Path) -> Result<()> {
    // The holder resolves links: a mount without a server gives no answer.
    let at = place::as_named(at).map_err(|e| Error::io("resolve", at, e))?;
    let failed = |source| Error::Io { operation: "have the holder unmount", path: at.clone(), source };
    Client::connect(socket)?.unmount(&at).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_kernels_since_6_9_hand_over() {
        let hands_over = |release: &str| version_of(release).is_some_and(|version| version >= LINUX_MIN);
        assert!(["6.9.0", "6.9-rc1", "6.18.44-fc", "10.0"].into_iter().all(hands_over));
        assert!(!["6.8.12-generic", "5.15.0", "6", "", "linux"].into_iter().any(hands_over));
    }
}
