//! Authority of a holder's clients: the folders that each may mount on, and the mounts that each may use.
//!
//! Root and the holder's own user are trusted. With folders of [`HolderOptions::below`](super::HolderOptions::below),
//! each user mounts below those and nowhere else. Without them, trusted users mount anywhere, and another user that is
//! permitted mounts on folders that it owns. That user may not ask for set-user-ID bits and device nodes, and uses only
//! its own mounts.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;

use super::place::Place;
use super::protocol::MountWish;

/// A client's rights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rights {
    pub(super) uid: u32,
    /// Root, or the holder's own user.
    pub(super) is_trusted: bool,
}

impl Rights {
    /// The rights of a user.
    pub(super) fn of(uid: u32) -> Rights {
        Rights { uid, is_trusted: uid == 0 || uid == geteuid().as_raw() }
    }

    /// The rights of the holder itself.
    pub(super) fn own() -> Rights {
        Rights::of(geteuid().as_raw())
    }

    /// Whether a client may use the mount that a user has made.
    pub(super) fn reaches(self, owner: u32) -> bool {
        self.is_trusted || self.uid == owner
    }
}

/// The users that share one limit of connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Share {
    Trusted,
    /// The user that is permitted besides.
    Permitted,
    /// All others.
    Refused,
}

/// The rules of a holder.
#[derive(Debug)]
pub(super) struct Authority {
    /// A user that is permitted besides the trusted ones.
    uid: Option<u32>,
    below: Vec<PathBuf>,
}

impl Authority {
    /// # Errors
    /// When one of the folders does not exist.
    pub(super) fn new(uid: Option<u32>, below: &[PathBuf]) -> Result<Authority, (PathBuf, io::Error)> {
        let resolved = |path: &PathBuf| fs::canonicalize(path).map_err(|error| (path.clone(), error));
        Ok(Authority { uid, below: below.iter().map(resolved).collect::<Result<_, _>>()? })
    }

    /// The users with whom a user shares the limit of connections.
    pub(super) fn share_of(&self, uid: u32) -> Share {
        match Rights::of(uid).is_trusted {
            true => Share::Trusted,
            false if Some(uid) == self.uid => Share::Permitted,
            false => Share::Refused,
        }
    }

    /// Whether a user may connect.
    pub(super) fn permits(&self, uid: u32) -> bool {
        self.share_of(uid) != Share::Refused
    }

    fn is_below(&self, target: &Path) -> bool {
        self.below.iter().any(|folder| target.starts_with(folder) && target != folder)
    }

    /// Whether missing folders of a mount point may be created for a client.
    pub(super) fn creates(&self, rights: Rights) -> bool {
        rights.is_trusted && self.below.is_empty()
    }

    /// Refuses options and paths that a client may not have, before anything is opened there.
    pub(super) fn check_wish(&self, rights: Rights, wish: &MountWish, target: &Path) -> Result<(), String> {
        if !rights.is_trusted && (wish.suid || wish.dev) {
            return Err(format!("user {} may not mount with --suid or --dev, only root may", rights.uid));
        }
        if !self.below.is_empty() && !self.is_below(target) {
            return Err(format!(
                "cannot mount on {}: it is not below a folder of the holder's --allow-below",
                target.display()
            ));
        }
        Ok(())
    }

    /// Refuses a folder on which a client may not mount.
    pub(super) fn check_place(&self, rights: Rights, target: &Path, place: &Place) -> Result<(), String> {
        if rights.is_trusted || self.is_below(target) {
            return Ok(());
        }
        let refused =
            |what: &str| Err(format!("user {} may not mount on {}: {what}", rights.uid, target.display()));
        match place.is_mount_point() {
            Ok(false) => {}
            Ok(true) => return refused("a file system is mounted there"),
            Err(error) => return refused(&millrace_leaf::error_chain::one_line(&error)),
        }
        match place.owner() {
            Ok(owner) if owner == rights.uid => Ok(()),
            Ok(_) => refused(
                "it belongs to another user; mount on your own folder, or start the holder with --allow-below",
            ),
            Err(error) => refused(&error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use nix::unistd::chown;

    use super::*;

    const OTHER: Rights = Rights { uid: 65_534, is_trusted: false };
    const ROOT: Rights = Rights { uid: 0, is_trusted: true };

    fn wish(target: &Path) -> MountWish {
        MountWish {
            spec: "v".into(),
            target: target.to_owned(),
            read_only: false,
            allow_other: false,
            suid: false,
            dev: false,
            noexec: false,
            volume: None,
        }
    }

    #[test]
    fn a_permitted_user_gets_no_set_user_id_bits_and_no_device_nodes() {
        let (authority, at) = (Authority::new(Some(OTHER.uid), &[]).unwrap(), Path::new("/mnt/v"));
        let suid = MountWish { suid: true, ..wish(at) };
        let dev = MountWish { dev: true, ..wish(at) };
        authority.check_wish(OTHER, &wish(at), at).unwrap();
        for wish in [suid, dev] {
            assert!(authority.check_wish(OTHER, &wish, at).is_err());
            authority.check_wish(ROOT, &wish, at).unwrap();
        }
        assert!(authority.permits(OTHER.uid) && authority.permits(0) && !authority.permits(OTHER.uid - 1));
        let shares = [0, OTHER.uid, OTHER.uid - 1].map(|uid| authority.share_of(uid));
        assert_eq!(shares, [Share::Trusted, Share::Permitted, Share::Refused]);
    }

    #[test]
    fn folders_of_mount_points_bind_all_users() {
        let dir = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(dir.path()).unwrap();
        let authority = Authority::new(Some(OTHER.uid), std::slice::from_ref(&root)).unwrap();
        for rights in [ROOT, OTHER] {
            authority.check_wish(rights, &wish(&root), &root.join("a/b")).unwrap();
            for outside in [root.clone(), root.parent().unwrap().join("x")] {
                let refused = authority.check_wish(rights, &wish(&outside), &outside).unwrap_err();
                assert!(refused.contains("--allow-below"), "{refused}");
            }
        }
        assert!(!authority.creates(ROOT));
        assert!(Authority::new(None, &[]).unwrap().creates(ROOT));
        assert!(Authority::new(None, &[root.join("missing")]).is_err());
    }

    #[test]
    fn a_permitted_user_mounts_on_its_own_folders_only() {
        if !geteuid().is_root() {
            return millrace_testing::skip(millrace_testing::Need::Root, "only root may give a folder away");
        }
        let dir = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(dir.path()).unwrap();
        let [own, foreign] = ["own", "foreign"].map(|name| root.join(name));
        fs::create_dir(&own).unwrap();
        fs::create_dir(&foreign).unwrap();
        chown(&own, Some(OTHER.uid.into()), None).unwrap();
        let authority = Authority::new(Some(OTHER.uid), &[]).unwrap();
        authority.check_place(OTHER, &own, &Place::open(&own).unwrap()).unwrap();
        let refused = authority.check_place(OTHER, &foreign, &Place::open(&foreign).unwrap());
        assert!(refused.unwrap_err().contains("another user"));
        let proc = Path::new("/proc");
        let refused = authority.check_place(OTHER, proc, &Place::open(proc).unwrap());
        assert!(refused.unwrap_err().contains("is mounted there"));
        let below = Authority::new(Some(OTHER.uid), &[root]).unwrap();
        below.check_place(OTHER, &foreign, &Place::open(&foreign).unwrap()).unwrap();
        assert!(OTHER.reaches(OTHER.uid) && !OTHER.reaches(0) && ROOT.reaches(OTHER.uid));
    }
}
