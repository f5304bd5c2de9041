//! Backing files that a holder opens for servers without the privilege, below its object folders only.

use std::fs::File;
use std::path::{Path, PathBuf};

use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};

use super::Shared;
use crate::mount::fuse::passthrough::{close_backing, open_backing};

/// Most backing files of a mount.
const BACKINGS_MAX: usize = 65_536;

impl Shared {
    /// Opens a regular file below one of the object folders as a backing file.
    pub(in crate::mount::handover) fn open_backing(
        &self,
        connection: u64,
        path: &Path,
    ) -> Result<u32, String> {
        let refused = |what: &str| Err(format!("{} {what}", path.display()));
        let below = |(root, folder)| path.strip_prefix::<&PathBuf>(root).ok().map(|path| (path, folder));
        let Some((beneath, folder)) = self.roots.iter().map(|(root, folder)| (root, folder)).find_map(below)
        else {
            return refused("is in none of the holder's object folders");
        };
        let how = OpenHow::new().flags(OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK).resolve(
            ResolveFlag::RESOLVE_BENEATH
                | ResolveFlag::RESOLVE_NO_SYMLINKS
                | ResolveFlag::RESOLVE_NO_MAGICLINKS,
        );
        let file = match openat2(folder, beneath, how) {
            Ok(file) => File::from(file),
            Err(errno) => return refused(&format!("cannot be opened: {errno}")),
        };
        if !file.metadata().is_ok_and(|metadata| metadata.is_file()) {
            return refused("is no regular file");
        }
        self.with(connection, |held| {
            if held.backings.len() >= BACKINGS_MAX {
                return Err(format!("the mount has {BACKINGS_MAX} backing files, its maximum"));
            }
            let device = held.device.try_clone().map_err(|error| error.to_string())?;
            let id = open_backing(&device.into(), &file).map_err(|error| error.to_string())?;
            held.backings.insert(id);
            Ok(id)
        })
    }

    pub(in crate::mount::handover) fn close_backing(&self, connection: u64, id: u32) -> Result<(), String> {
        self.with(connection, |held| {
            // The kernel refuses a number that it has not given out.
            if !held.backings.remove(&id) && !held.was_adopted {
                return Err(format!("the mount has no backing file {id}"));
            }
            let device = held.device.try_clone().map_err(|error| error.to_string())?;
            close_backing(&device.into(), id).map_err(|error| error.to_string())
        })
    }
}
