//! Negative lookup cache: directories with all names known, so that a missing name needs no engine lookup.
//!
//! For each directory it keeps the hashes of all names that a reader may find committed, and perhaps of
//! others. A name is added before any reader can read it from the engine, and is never removed. So a name
//! that is not in the set is missing for every reader. A directory that this process created is known from
//! the start. Any other directory is read after enough failed lookups in it.

use std::collections::{HashMap, HashSet};

use super::key_hash::{Hashed, key_hash};
use super::keys;

/// Limit of names in all directories: with up to 18 bytes each, 5 MiB.
const NAMES_MAX: usize = 1 << 18;
/// Limit of directories: with up to 150 bytes each, 5 MiB.
const DIRECTORIES_MAX: usize = 1 << 15;
/// Failed lookups before a directory is read.
const MISSES_MAX: u32 = 16;
/// Directories with more names are not read: it takes a microsecond for each name.
pub(super) const READ_MAX: usize = 1_024;

/// Volume and inode number.
pub(super) type DirectoryId = (u64, u64);

/// The known directories.
#[derive(Debug, Default)]
pub(super) struct KnownNames {
    directories: HashMap<u64, Directory, Hashed>,
    names: usize,
}

#[derive(Debug)]
struct Directory {
    id: DirectoryId,
    names: Names,
}

#[derive(Debug)]
enum Names {
    /// Hashes of all names.
    All(HashSet<u64, Hashed>),
    /// Number of failed lookups so far.
    Missed(u32),
    /// There are too many names.
    Many,
}

fn place((volume, ino): DirectoryId) -> u64 {
    let mut key = [0; 16];
    key[..8].copy_from_slice(&volume.to_le_bytes());
    key[8..].copy_from_slice(&ino.to_le_bytes());
    key_hash(&key)
}

/// The hash under which a name's hash is kept.
fn kept(name_hash: u64) -> u64 {
    key_hash(&name_hash.to_le_bytes())
}

impl KnownNames {
    fn get_mut(&mut self, id: DirectoryId) -> Option<&mut Names> {
        self.directories.get_mut(&place(id)).filter(|of| of.id == id).map(|of| &mut of.names)
    }

    /// Whether a record is certainly not committed, for any reader.
    pub(super) fn is_absent(&self, key: &[u8]) -> bool {
        let Some((id, name)) = keys::live_child(key) else { return false };
        match self.directories.get(&place(id)) {
            Some(Directory { id: of, names: Names::All(names) }) => *of == id && !names.contains(&kept(name)),
            _ => false,
        }
    }

    /// Counts a failed lookup. Returns the directory if it should be read.
    pub(super) fn missed(&mut self, key: &[u8]) -> Option<DirectoryId> {
        let (id, _) = keys::live_child(key)?;
        match self.get_mut(id) {
            Some(Names::Missed(misses)) if *misses < MISSES_MAX => *misses += 1,
            Some(Names::Missed(_)) => return Some(id),
            Some(Names::All(_) | Names::Many) => {}
            None => self.put(id, Names::Missed(1)),
        }
        None
    }

    /// Adds a directory that was just created, so no reader has seen it.
    pub(super) fn begin(&mut self, id: DirectoryId) {
        self.put(id, Names::All(HashSet::default()));
    }

    /// Keeps the name hashes of a directory that was read; `None` if it has too many.
    pub(super) fn learn(&mut self, id: DirectoryId, names: Option<HashSet<u64>>) {
        let names = names.map_or(Names::Many, |names| {
            let names: HashSet<u64, _> = names.into_iter().map(kept).collect();
            self.names += names.len();
            Names::All(names)
        });
        self.put(id, names);
    }

    /// Adds the name of a record that any process is about to commit, or may have committed.
    pub(super) fn note(&mut self, key: &[u8]) {
        let Some((id, name)) = keys::live_child(key) else { return };
        if let Some(Names::All(names)) = self.get_mut(id)
            && names.insert(kept(name))
        {
            self.names += 1;
            self.bound();
        }
    }

    /// Drops everything.
    pub(super) fn clear(&mut self) {
        *self = KnownNames::default();
    }

    fn put(&mut self, id: DirectoryId, names: Names) {
        // Of two directories with the same hash, the newer replaces the older.
        if let Some(Directory { names: Names::All(gone), .. }) =
            self.directories.insert(place(id), Directory { id, names })
        {
            self.names -= gone.len();
        }
        self.bound();
    }

    /// Starts over above the limits: by then most entries are not needed any more.
    fn bound(&mut self) {
        if self.names > NAMES_MAX || self.directories.len() > DIRECTORIES_MAX {
            self.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn child(ino: u64, name: &str) -> Vec<u8> {
        keys::live(3, &keys::child(ino, name.as_bytes()))
    }

    #[test]
    fn what_is_not_known_to_be_there_is_absent_in_known_directories_alone() {
        let mut known = KnownNames::default();
        assert!(!known.is_absent(&child(5, "a")));
        known.begin((3, 5));
        assert!(known.is_absent(&child(5, "a")) && !known.is_absent(&child(6, "a")));
        assert!(!known.is_absent(&keys::live(3, &keys::attributes(5))));
        known.note(&child(5, "a"));
        assert!(!known.is_absent(&child(5, "a")) && known.is_absent(&child(5, "b")));
        assert_eq!(known.missed(&child(5, "b")), None);
        known.clear();
        assert!(!known.is_absent(&child(5, "b")));
    }

    #[test]
    fn a_directory_is_read_after_some_misses_unless_it_is_large() {
        let mut known = KnownNames::default();
        for _ in 0..MISSES_MAX {
            assert_eq!(known.missed(&child(7, "x")), None);
        }
        assert_eq!(known.missed(&child(7, "x")), Some((3, 7)));
        known.learn((3, 7), Some(HashSet::from([keys::name_hash(b"there")])));
        assert!(known.is_absent(&child(7, "x")) && !known.is_absent(&child(7, "there")));
        known.learn((3, 8), None);
        assert_eq!(known.missed(&child(8, "x")), None);
        assert!(!known.is_absent(&child(8, "x")));
    }

    #[test]
    fn it_is_bounded() {
        let mut known = KnownNames::default();
        for ino in 0..2 * DIRECTORIES_MAX as u64 {
            known.begin((1, ino));
            assert!(known.directories.len() <= DIRECTORIES_MAX);
        }
        known.begin((3, 7));
        for i in 0..NAMES_MAX {
            known.note(&child(7, &i.to_string()));
        }
        assert!(known.names <= NAMES_MAX && known.is_absent(&child(7, "x")));
        known.note(&child(7, "one more"));
        assert!(known.names == 0 && !known.is_absent(&child(7, "x")));
    }
}
