//! The requests that servers send to a holder, and its responses.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::mount::options::MountOptions;

/// A mount that a holder makes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MountWish {
    /// The volume or snapshot, as `df` shows it.
    pub(super) spec: String,
    /// Absolute path of the mount point.
    pub(super) target: PathBuf,
    pub(super) read_only: bool,
    pub(super) allow_other: bool,
    pub(super) suid: bool,
    pub(super) dev: bool,
    pub(super) noexec: bool,
}

impl MountWish {
    pub(super) fn new(spec: String, target: PathBuf, read_only: bool, options: &MountOptions) -> MountWish {
        let MountOptions { allow_other, suid, dev, noexec, .. } = *options;
        MountWish { spec, target, read_only, allow_other, suid, dev, noexec }
    }

    pub(super) fn options(&self) -> MountOptions {
        MountOptions {
            allow_other: self.allow_other,
            read_only: self.read_only,
            suid: self.suid,
            dev: self.dev,
            noexec: self.noexec,
            ..MountOptions::default()
        }
    }
}

/// What a server needs to serve a mount. The descriptors of the message: the device, the journal, and the read
/// end of the control pipe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Attached {
    pub(super) wish: MountWish,
    /// `major:minor` of the mount.
    pub(super) device: String,
    /// The kernel's INIT request.
    pub(super) init: Vec<u8>,
    /// The first server's answer to it, once the kernel has it.
    pub(super) reply: Option<Vec<u8>>,
    /// Number of this server, from 1.
    pub(super) life: u64,
    /// Metadata sessions of earlier servers that this one takes over.
    pub(super) sessions: Vec<u64>,
    /// The holder opens backing files.
    pub(super) backs: bool,
}

/// A mount as [`Holder::mounts`](super::Holder::mounts) lists it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeldMount {
    /// The volume or snapshot.
    pub spec: String,
    /// The mount point.
    pub target: PathBuf,
    /// Servers so far, with the present one.
    pub servers: u64,
    /// Whether a server is attached now.
    pub is_served: bool,
}

/// A request.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Question {
    /// Mounts the target, unless the holder has mounted the same there.
    Mount(MountWish),
    /// Makes this connection the server of a mount. Ends the server before it, and waits for its end.
    Attach {
        target: PathBuf,
    },
    /// The kernel has the answer to INIT. `resends` says whether it can resend requests.
    Negotiated {
        reply: Vec<u8>,
        resends: bool,
    },
    /// The metadata session of the server; with its locked file, if it has one.
    Session {
        id: u64,
    },
    /// The server has taken over everything of the sessions before its own.
    TookOver,
    /// Opens a backing file, an absolute path below one of the holder's object folders.
    OpenBacking {
        path: PathBuf,
    },
    CloseBacking {
        id: u32,
    },
    /// Unmounts; the path is free afterwards.
    Unmount {
        target: PathBuf,
    },
    /// A server gives a restarted holder what that has lost: device, journal, and maybe the session's file.
    Adopt(Box<Attached>),
    List,
}

/// A response.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Answer {
    Done,
    Mounted {
        target: PathBuf,
    },
    Attached(Box<Attached>),
    Backing {
        id: u32,
    },
    Mounts(Vec<HeldMount>),
    /// The reason, in words.
    Refused(String),
}
