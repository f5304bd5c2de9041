//! The requests that servers send to a holder, and its responses.
//!
//! Version 1 begins with [`Question::Hello`] and names the identity of the volume. A holder also serves programs of
//! version 0, as far as it can be sure that they serve the volume of the mount. A program of version 1 refuses a
//! holder of version 0. `List` and `Unmount` need no `Hello` and are the same in both.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::fs::View;
use crate::identity::StoreRow;
use crate::meta::versioned::VolumeRow;
use crate::mount::options::MountOptions;

/// The bytes in the control pipe of a server: to hand over, and that no other server waits any more. A server of
/// version 0 takes both for the first.
pub(super) const REQUEST: u8 = 1;
pub(super) const WITHDRAWAL: u8 = 2;

/// Version of the protocol.
pub(super) const VERSION: u32 = 1;

/// The properties that distinguish a volume or snapshot from another one of its name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct VolumeIdentity {
    /// The store that the metadata belongs to; `None` before the two were first opened together.
    store: Option<String>,
    /// The number of the volume in the metadata.
    volume: u64,
    /// When it was created: seconds since 1970, and nanoseconds.
    created: (i64, u32),
    /// The number of the snapshot; 0 for the live volume.
    snapshot: u64,
}

impl VolumeIdentity {
    pub(super) fn of(view: &View) -> Result<VolumeIdentity> {
        view.shared.meta.view(|txn| {
            Ok(VolumeIdentity {
                store: StoreRow::get(txn)?.map(|row| row.id.to_string()),
                volume: view.volume,
                created: VolumeRow::get(txn, view.volume)?.created.parts(),
                snapshot: view.root().snapshot,
            })
        })
    }

    /// Whether both are the same volume or snapshot.
    fn is(&self, other: &VolumeIdentity) -> bool {
        let has_other_store = matches!((&self.store, &other.store), (Some(one), Some(two)) if one != two);
        !has_other_store && VolumeIdentity { store: self.store.clone(), ..other.clone() } == *self
    }
}

/// Refuses a program that would serve another volume than the mount's, to which the open files belong. An unknown
/// identity of the mount, from a program of version 0, permits every one.
pub(super) fn check_identity(
    mounted: Option<&VolumeIdentity>,
    theirs: Option<&VolumeIdentity>,
) -> std::result::Result<(), &'static str> {
    match (mounted, theirs) {
        (Some(mounted), Some(theirs)) if !mounted.is(theirs) => Err(
            "the mount is of another volume of that name, to which its open files belong: unmount it first",
        ),
        (Some(_), None) => {
            Err("this program is older than the one that served the mount before and does not \
                                say which volume it serves: use that version or a newer one")
        }
        _ => Ok(()),
    }
}

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
    /// `None` from a program of version 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) volume: Option<VolumeIdentity>,
}

impl MountWish {
    /// The wish to mount a view at an absolute path.
    pub(super) fn new(
        view: &View,
        target: PathBuf,
        read_only: bool,
        options: &MountOptions,
    ) -> Result<MountWish> {
        let MountOptions { allow_other, suid, dev, noexec, .. } = *options;
        let volume = Some(VolumeIdentity::of(view)?);
        let spec = view.spec().to_string();
        Ok(MountWish { spec, target, read_only, allow_other, suid, dev, noexec, volume })
    }

    /// Refuses a mount that exists at the same path if it is not the wished one.
    pub(super) fn check_same(&self, mounted: &MountWish) -> std::result::Result<(), String> {
        let other = |what: &str| {
            Err(format!(
                "{} is mounted at {} {what}: unmount it first",
                mounted.spec,
                mounted.target.display()
            ))
        };
        if self.spec != mounted.spec {
            return other("already");
        }
        let like = |wish: &MountWish| {
            let MountWish { read_only, allow_other, suid, dev, noexec, .. } = *wish;
            [read_only, allow_other, suid, dev, noexec]
        };
        if like(self) != like(mounted) {
            return other("with other options");
        }
        check_identity(mounted.volume.as_ref(), self.volume.as_ref()).map_err(str::to_owned)
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
    /// The first request: the version of the protocol that the program speaks.
    Hello {
        version: u32,
    },
    /// Mounts the target, unless the holder has mounted the same there.
    Mount(MountWish),
    /// Makes this connection the server of a mount. Ends the server before it, and waits for its end.
    Attach {
        target: PathBuf,
        /// `None` from a program of version 0.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        volume: Option<VolumeIdentity>,
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
    /// The server has taken over everything of one earlier session and ended it.
    SessionEnded {
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
    /// The version of the protocol that the holder speaks.
    Hello {
        version: u32,
    },
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn wish() -> MountWish {
        let volume = VolumeIdentity { store: Some("ab".into()), volume: 1, created: (7, 8), snapshot: 0 };
        MountWish {
            spec: "v".into(),
            target: "/mnt".into(),
            read_only: false,
            allow_other: true,
            suid: false,
            dev: false,
            noexec: false,
            volume: Some(volume),
        }
    }

    #[test]
    fn a_program_of_version_0_is_understood_unless_the_volume_is_known() {
        let text = r#"{"mount":{"spec":"v","target":"/mnt","read_only":false,"allow_other":true,"suid":false,"dev":false,"noexec":false}}"#;
        let Question::Mount(old) = serde_json::from_str(text).unwrap() else { panic!("another request") };
        assert_eq!(old, MountWish { volume: None, ..wish() });
        assert_eq!(serde_json::to_string(&Question::Mount(old.clone())).unwrap(), text);
        let attach: Question = serde_json::from_str(r#"{"attach":{"target":"/mnt"}}"#).unwrap();
        assert!(matches!(attach, Question::Attach { volume: None, .. }));
        old.check_same(&old).unwrap();
        wish().check_same(&old).unwrap();
        assert!(old.check_same(&wish()).unwrap_err().contains("older"));
    }

    #[test]
    fn another_volume_of_the_same_name_is_not_the_same_mount() {
        let of = |change: fn(&mut VolumeIdentity)| {
            let mut wish = wish();
            change(wish.volume.as_mut().unwrap());
            wish
        };
        wish().check_same(&wish()).unwrap();
        of(|volume| volume.store = None).check_same(&wish()).unwrap();
        let others = [
            of(|volume| volume.store = Some("cd".into())),
            of(|volume| volume.volume = 2),
            of(|volume| volume.created = (7, 9)),
            of(|volume| volume.snapshot = 3),
        ];
        for other in others {
            let error = other.check_same(&wish()).unwrap_err();
            assert!(error.contains("another volume of that name"), "{error}");
        }
        let options = MountWish { noexec: true, ..wish() };
        assert!(options.check_same(&wish()).unwrap_err().contains("other options"));
    }
}
