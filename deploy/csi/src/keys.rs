//! Encryption keys of a call's secret. The volumes' library takes keys from files only, never from a configuration.
//!
//! The server of a mount gets private files in a folder beside its configuration ([`Keys::write`]). The controller opens
//! volumes itself, with files that exist in its memory only ([`Keys::in_memory`]).

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use millrace_datafs::{Config, FromFile, Secret};
use millrace_leaf::{atomic_file, private};
use rustix::fs::{MemfdFlags, memfd_create};
use sha2::{Digest as _, Sha256};

/// Keys by name. `Debug` shows the names alone.
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct Keys(BTreeMap<String, String>);

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

impl Keys {
    /// Adds a key.
    pub(crate) fn insert(&mut self, name: &str, value: &str) {
        self.0.insert(name.to_owned(), value.to_owned());
    }

    /// The values, by name.
    pub(crate) fn reveal(&self) -> &BTreeMap<String, String> {
        &self.0
    }

    /// A configuration that takes these keys from the files of a folder.
    pub(crate) fn in_files(&self, config: &Config, folder: &Path) -> Config {
        let mut config = config.clone();
        for name in self.0.keys() {
            config.encryption_keys.insert(name.clone(), of_file(folder.join(file_name(name))));
        }
        config
    }

    /// A configuration that takes these keys from files in memory. They exist as long as the second value.
    ///
    /// # Errors
    /// Those of creating and writing the files.
    pub(crate) fn in_memory(&self, config: &Config) -> io::Result<(Config, Vec<File>)> {
        let (mut config, mut files) = (config.clone(), Vec::with_capacity(self.0.len()));
        for (name, value) in &self.0 {
            let create = |flags| memfd_create("millrace-key", flags);
            // Kernels before 6.3 do not know the second flag, which later ones may demand.
            let created = create(MemfdFlags::CLOEXEC | MemfdFlags::NOEXEC_SEAL);
            let mut file = File::from(created.or_else(|_| create(MemfdFlags::CLOEXEC))?);
            file.write_all(value.as_bytes())?;
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            config.encryption_keys.insert(name.clone(), of_file(path.into()));
            files.push(file);
        }
        Ok((config, files))
    }

    /// Whether the files of a folder hold these keys.
    pub(crate) fn are_in(&self, folder: &Path) -> bool {
        self.0.iter().all(|(name, value)| {
            fs::read(folder.join(file_name(name))).is_ok_and(|found| found == value.as_bytes())
        })
    }

    /// Writes these keys to private files of a folder, each atomically. Creates the folder if there is a key.
    ///
    /// # Errors
    /// Those of creating the folder, and of writing and syncing.
    pub(crate) fn write(&self, folder: &Path) -> io::Result<()> {
        if self.0.is_empty() {
            return Ok(());
        }
        private::create_dir_all(folder)?;
        for (name, value) in &self.0 {
            let path = folder.join(file_name(name));
            atomic_file::replace(&path, &path.with_extension("new"), value.as_bytes())?;
        }
        File::open(folder)?.sync_all()
    }

    /// Removes all other files of a folder, and the folder itself if no key is left.
    ///
    /// # Errors
    /// Those of listing and removing; a missing folder is an error only if there is a key.
    pub(crate) fn remove_others(&self, folder: &Path) -> io::Result<()> {
        if self.0.is_empty() {
            return remove_all(folder);
        }
        let own: HashSet<OsString> = self.0.keys().map(|name| file_name(name).into()).collect();
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            if !own.contains(&entry.file_name()) {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }
}

/// Removes a folder with keys; a missing one is not an error.
///
/// # Errors
/// Those of removing it.
pub(crate) fn remove_all(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// The name of a key's file. Names of keys may hold any characters.
fn file_name(name: &str) -> String {
    hex::encode(&Sha256::digest(name)[..16])
}

fn of_file(file: PathBuf) -> Secret {
    Secret::File(FromFile { file })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn keys(pairs: &[(&str, &str)]) -> Keys {
        let mut keys = Keys::default();
        pairs.iter().for_each(|(name, value)| keys.insert(name, value));
        keys
    }

    #[test]
    fn keys_are_private_files_which_new_ones_replace() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("keys");
        let first = keys(&[("a/../b", "hunter2"), ("old", "1")]);
        first.write(&folder).unwrap();
        assert!(first.are_in(&folder));
        let config = first.in_files(&Config::default(), &folder);
        assert_eq!(config.encryption_keys["a/../b"].text("").unwrap(), "hunter2");
        for entry in fs::read_dir(&folder).unwrap() {
            assert_eq!(entry.unwrap().metadata().unwrap().permissions().mode() & 0o777, 0o600);
        }
        assert_eq!(fs::metadata(&folder).unwrap().permissions().mode() & 0o777, 0o700);
        assert!(!format!("{first:?}").contains("hunter2"), "{first:?}");

        let second = keys(&[("a/../b", "hunter3")]);
        assert!(!second.are_in(&folder));
        second.write(&folder).unwrap();
        second.remove_others(&folder).unwrap();
        assert!(second.are_in(&folder));
        assert_eq!(config.encryption_keys["a/../b"].text("").unwrap(), "hunter3");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);

        let none = Keys::default();
        none.write(&folder).unwrap();
        none.remove_others(&folder).unwrap();
        assert!(!folder.exists() && none.are_in(&folder));
        none.remove_others(&folder).unwrap();
    }

    #[test]
    fn keys_in_memory_are_read_like_files() {
        let (config, files) = keys(&[("a", "one"), ("b", "two")]).in_memory(&Config::default()).unwrap();
        assert_eq!(files.len(), 2);
        for (name, value) in [("a", "one"), ("b", "two")] {
            assert_eq!(config.encryption_keys[name].text("").unwrap(), value);
        }
    }
}
