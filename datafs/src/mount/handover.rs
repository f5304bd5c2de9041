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
//!    of the open files that wrote to those inodes return EIO.
//!
//! Two servers never serve at once: a server gets the device when the connection of the one before has closed,
//! after the last thread of that process.

mod client;
mod connection;
mod device;
pub(super) mod gate;
mod held;
mod holder;
pub(super) mod journal;
mod protocol;
pub(super) mod resent;
mod restore;
mod wire;

use std::path::Path;

use crate::error::{Error, Result};

pub(super) use client::Client;
pub(super) use held::Held;
pub use holder::{Holder, HolderOptions};
pub use protocol::HeldMount;

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
    let at = std::path::absolute(at).map_err(|e| Error::io("resolve", at, e))?;
    let failed = |source| Error::Io { operation: "have the holder unmount", path: at.clone(), source };
    Client::connect(socket)?.unmount(&at).map_err(failed)
}
