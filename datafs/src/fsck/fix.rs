//! Repairs as the checks propose them, with what identifies the record that each one changes.

use crate::meta::keys;
use crate::object::ObjectId;

/// One repair.
#[derive(Debug, Clone)]
pub(super) enum Fix {
    /// Removes a name that leads to no inode, or a directory's second one.
    RemoveName { volume: u64, record: Vec<u8>, ino: u64 },
    /// Gives an inode a name in `lost+found`.
    Adopt { volume: u64, ino: u64 },
    /// Adds an unlinked inode, or the remaining records of one, to the orphan list, from which it is freed.
    Free { volume: u64, ino: u64 },
    /// Removes an inode that has a name from the orphan list.
    NoOrphan { volume: u64, ino: u64 },
    /// Corrects the link count of an inode whose attributes still have this checksum.
    SetLinks { volume: u64, ino: u64, sum: u32, links: u32 },
    /// Corrects the parent of a directory whose attributes still have this checksum.
    SetParent { volume: u64, ino: u64, sum: u32, parent: u64 },
    /// Cuts the extents of a file so that they are disjoint: see `repair.rs`.
    Separate { volume: u64, ino: u64 },
    /// Replaces the value `was` of a key by `is`; `None` stands for no value. Does nothing unless the key
    /// still has the value `was`, and the key in `beside` still has the value there.
    Replace { key: Vec<u8>, was: Option<Vec<u8>>, is: Option<Vec<u8>>, beside: Option<(Vec<u8>, Vec<u8>)> },
    /// Makes the next inode number at least this.
    RaiseCounter { volume: u64, next: u64 },
    /// Adds a version to the dead list of its last snapshot.
    AddDead { volume: u64, key: Vec<u8> },
    /// Removes an entry without a version from a dead list.
    RemoveDead { volume: u64, key: Vec<u8> },
    /// Removes an object in use from the garbage list.
    NoGarbage { object: ObjectId },
    /// Adds an object that nothing references to the garbage list.
    Discard { object: ObjectId, was: Option<Vec<u8>> },
}

/// Checksum by which a repair verifies that attributes are unchanged since the check.
pub(super) fn sum_of(value: &[u8]) -> u32 {
    crc32c::crc32c(value)
}

/// The version's key that an entry of a dead list names, and the epoch since which the entry says it existed.
pub(super) fn version_of(volume: u64, dead: &[u8]) -> Option<(Vec<u8>, u64)> {
    let number = |at: usize| Some(u64::from_be_bytes(*dead.get(at..)?.first_chunk()?));
    Some((keys::history_version(volume, dead.get(25..)?, number(9)?), u64::MAX - number(17)?))
}
