//! Key space of the metadata: the encoding of the keys of all records.
//!
//! The first byte is the table. Numbers are big-endian, so that byte order is number order. Records of a
//! volume (inodes, entries, extents, application keys) have a *record key*, which is prefix-free. The live
//! version is at `r volume record-key`. Older versions, which snapshots hold, are at
//! `h volume record-key until-snapshot`.

use sha2::{Digest as _, Sha256};

use crate::object::ObjectId;

/// Format version of the metadata.
pub(crate) const FORMAT: &[u8] = b"mformat";
/// Rewritten to make earlier commits durable.
pub(crate) const BARRIER: &[u8] = b"mbarrier";
/// The number of the newest batch that was committed.
pub(crate) const BATCH: &[u8] = b"mbatch";
/// The sessions that have a row: their numbers, eight bytes each.
pub(crate) const ROSTER: &[u8] = b"mroster";
/// Number of the last round of questions about orphans.
pub(crate) const ROUND: &[u8] = b"mround";
/// The object store that the metadata belongs to.
pub(crate) const STORE: &[u8] = b"mstore";
/// The random number of the metadata, drawn when it is first asked for.
pub(crate) const NUMBER: &[u8] = b"mnumber";
/// The process that does the background work.
pub(crate) const ELECTED: &[u8] = b"melected";
/// The position of the background work in the store.
pub(crate) const UPKEEP: &[u8] = b"mupkeep";
/// The last volume id that was assigned.
pub(crate) const LAST_VOLUME: &[u8] = b"mvolume";

/// Tag of directory entries among the records of a node.
const CHILD: u8 = b'c';
const ATTRIBUTES: u8 = b'a';
const HEAD: u8 = b'd';
const EXTENT: u8 = b'e';
const TARGET: u8 = b'l';
const XATTR: u8 = b'x';
const NODE: u8 = b'n';
const APPLICATION: u8 = b'k';

/// Table of derived data, with its two parts.
const DERIVED: u8 = b'c';
const DERIVED_LIST: u8 = b'l';
const DERIVED_SLOT: u8 = b's';

/// Table of the versions that snapshots hold.
pub(crate) const HISTORY: u8 = b'h';

/// Smallest hash of a child's name: lower readdir cursors are for `.` and `..`.
pub(crate) const HASH_MIN: u64 = 16;

fn table(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
    let mut key = Vec::with_capacity(1 + parts.iter().map(|p| p.len()).sum::<usize>());
    key.push(tag);
    for part in parts {
        key.extend_from_slice(part);
    }
    key
}

/// The smallest key above all keys that start with `prefix` (which is not all 0xff).
pub(crate) fn after_prefix(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            break;
        }
    }
    end
}

/// Decodes a number of eight bytes; `None` for another length.
pub(crate) fn number(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(bytes.try_into().ok()?))
}

/// Volume name to volume id.
pub(crate) fn volume_name(name: &str) -> Vec<u8> {
    table(b'n', &[name.as_bytes()])
}

/// All volume names.
pub(crate) fn volume_names() -> Vec<u8> {
    table(b'n', &[])
}

/// A volume's row.
pub(crate) fn volume(id: u64) -> Vec<u8> {
    table(b'v', &[&id.to_be_bytes()])
}

/// All volume rows.
pub(crate) fn volumes() -> Vec<u8> {
    table(b'v', &[])
}

/// The next inode number of a volume.
pub(crate) fn next_ino(volume: u64) -> Vec<u8> {
    table(b'i', &[&volume.to_be_bytes()])
}

/// A snapshot's row.
pub(crate) fn snapshot(volume: u64, snapshot: u64) -> Vec<u8> {
    table(b's', &[&volume.to_be_bytes(), &snapshot.to_be_bytes()])
}

/// All snapshot rows of a volume.
pub(crate) fn snapshots(volume: u64) -> Vec<u8> {
    table(b's', &[&volume.to_be_bytes()])
}

/// All snapshot rows.
pub(crate) fn all_snapshots() -> Vec<u8> {
    table(b's', &[])
}

/// Snapshot name to snapshot number.
pub(crate) fn snapshot_name(volume: u64, name: &str) -> Vec<u8> {
    table(b't', &[&volume.to_be_bytes(), name.as_bytes()])
}

/// All snapshot names of a volume.
pub(crate) fn snapshot_names(volume: u64) -> Vec<u8> {
    table(b't', &[&volume.to_be_bytes()])
}

/// The live version of a record.
pub(crate) fn live(volume: u64, record: &[u8]) -> Vec<u8> {
    table(b'r', &[&volume.to_be_bytes(), record])
}

/// Bytes before the record key in a live record's key: table and volume.
pub(crate) const LIVE_PREFIX_BYTES: usize = 9;
/// Keys of live records up to this length are built without allocation: all but those of long names.
const SHORT_BYTES: usize = 96;

/// Calls `body` with the key that [`live`] returns.
pub(crate) fn with_live<T>(volume: u64, record: &[u8], body: impl FnOnce(&[u8]) -> T) -> T {
    let len = LIVE_PREFIX_BYTES + record.len();
    if len > SHORT_BYTES {
        return body(&live(volume, record));
    }
    let mut key = [0; SHORT_BYTES];
    key[0] = b'r';
    key[1..LIVE_PREFIX_BYTES].copy_from_slice(&volume.to_be_bytes());
    key[LIVE_PREFIX_BYTES..len].copy_from_slice(record);
    body(&key[..len])
}

/// Length of the prefix that defines a key's scope: reads of key ranges mostly stay within one scope.
pub(crate) fn scope_len(key: &[u8]) -> usize {
    let len = match key.first() {
        // Everything about one inode: table, volume, tag, number.
        Some(b'r' | b'h') if key.get(9) == Some(&NODE) => 18,
        // One dead list: table, volume, number.
        Some(b'd') => 17,
        // The snapshots of a volume.
        Some(b's') => 9,
        _ => key.len(),
    };
    len.min(key.len())
}

/// Prefix of the versions of a record that snapshots hold; the number of the last such snapshot follows.
pub(crate) fn history(volume: u64, record: &[u8]) -> Vec<u8> {
    table(b'h', &[&volume.to_be_bytes(), record])
}

/// One version of a record: the last snapshot that holds it is `until`.
pub(crate) fn history_version(volume: u64, record: &[u8], until: u64) -> Vec<u8> {
    table(b'h', &[&volume.to_be_bytes(), record, &until.to_be_bytes()])
}

/// A dead list: the versions whose last snapshot was `list` when they died.
pub(crate) fn dead_list(volume: u64, list: u64) -> Vec<u8> {
    table(b'd', &[&volume.to_be_bytes(), &list.to_be_bytes()])
}

/// An entry of a dead list. The youngest version comes first, so that a deletion frees a prefix of the list.
pub(crate) fn dead(volume: u64, list: u64, since: u64, record: &[u8]) -> Vec<u8> {
    let youngest_first = (u64::MAX - since).to_be_bytes();
    table(b'd', &[&volume.to_be_bytes(), &list.to_be_bytes(), &youngest_first, record])
}

/// All dead lists of a volume.
pub(crate) fn dead_lists(volume: u64) -> Vec<u8> {
    table(b'd', &[&volume.to_be_bytes()])
}

/// An inode without a name that a process may have open: see `fs/orphan.rs`.
pub(crate) fn orphan(volume: u64, ino: u64) -> Vec<u8> {
    table(b'o', &[&volume.to_be_bytes(), &ino.to_be_bytes()])
}

/// All orphans of a volume.
pub(crate) fn orphans(volume: u64) -> Vec<u8> {
    table(b'o', &[&volume.to_be_bytes()])
}

/// All orphans.
pub(crate) fn all_orphans() -> Vec<u8> {
    table(b'o', &[])
}

/// The locks on a node, by its 64-bit form.
pub(crate) fn lock(volume: u64, node: u64) -> Vec<u8> {
    table(b'l', &[&volume.to_be_bytes(), &node.to_be_bytes()])
}

/// All locks of a volume.
pub(crate) fn locks(volume: u64) -> Vec<u8> {
    table(b'l', &[&volume.to_be_bytes()])
}

/// All locks.
pub(crate) fn all_locks() -> Vec<u8> {
    table(b'l', &[])
}

/// The reference count of an object.
pub(crate) fn references(object: ObjectId) -> Vec<u8> {
    table(b'j', &[&object.to_bytes()])
}

/// All reference counts.
pub(crate) fn all_references() -> Vec<u8> {
    table(b'j', &[])
}

/// The garbage record of an object without references.
pub(crate) fn garbage(object: ObjectId) -> Vec<u8> {
    table(b'g', &[&object.to_bytes()])
}

/// All garbage.
pub(crate) fn all_garbage() -> Vec<u8> {
    table(b'g', &[])
}

/// A process that has this metadata open.
pub(crate) fn session(id: u64) -> Vec<u8> {
    table(b'p', &[&id.to_be_bytes()])
}

/// All sessions.
pub(crate) fn sessions() -> Vec<u8> {
    table(b'p', &[])
}

/// The last round of questions about orphans that a session has answered.
pub(crate) fn answered(id: u64) -> Vec<u8> {
    table(b'a', &[&id.to_be_bytes()])
}

/// A dead session whose unpublished objects are being removed.
pub(crate) fn session_in_cleanup(id: u64) -> Vec<u8> {
    table(b'q', &[&id.to_be_bytes()])
}

/// All dead sessions in cleanup.
pub(crate) fn sessions_in_cleanup() -> Vec<u8> {
    table(b'q', &[])
}

/// The hold of a session, which keeps garbage from being deleted.
pub(crate) fn hold(session: u64) -> Vec<u8> {
    table(b'b', &[&session.to_be_bytes()])
}

/// All holds.
pub(crate) fn holds() -> Vec<u8> {
    table(b'b', &[])
}

/// The number of a kernel request whose change a session has committed, in a slot: see `fs/takeover.rs`.
pub(crate) fn completed(session: u64, slot: u64) -> Vec<u8> {
    table(b'w', &[&session.to_be_bytes(), &slot.to_be_bytes()])
}

/// All such numbers.
pub(crate) fn completed_requests() -> Vec<u8> {
    table(b'w', &[])
}

/// All such numbers of a session.
pub(crate) fn all_completed(session: u64) -> Vec<u8> {
    table(b'w', &[&session.to_be_bytes()])
}

/// A deletion record of a session: the objects that it is deleting from the store.
pub(crate) fn deletion(session: u64, number: u64) -> Vec<u8> {
    table(b'u', &[&session.to_be_bytes(), &number.to_be_bytes()])
}

/// All deletion records of a session.
pub(crate) fn deletions_of(session: u64) -> Vec<u8> {
    table(b'u', &[&session.to_be_bytes()])
}

/// All deletion records.
pub(crate) fn deletions() -> Vec<u8> {
    table(b'u', &[])
}

/// The table of derived data, see `derived.rs`. It is a cache: backups leave it out.
pub(crate) fn derived() -> Vec<u8> {
    table(DERIVED, &[])
}

/// The list of the derived data of a volume's snapshots.
pub(crate) fn derived_list(volume: u64) -> Vec<u8> {
    table(DERIVED, &[&[DERIVED_LIST], &volume.to_be_bytes()])
}

/// All such lists.
pub(crate) fn derived_lists() -> Vec<u8> {
    table(DERIVED, &[&[DERIVED_LIST]])
}

/// One piece of derived data of a volume, in a slot.
pub(crate) fn derived_slot(volume: u64, slot: u8) -> Vec<u8> {
    table(DERIVED, &[&[DERIVED_SLOT], &volume.to_be_bytes(), &[slot]])
}

/// The check value of an encryption key, which tells it from others of its name.
pub(crate) fn encryption_key(name: &str) -> Vec<u8> {
    table(b'e', &[name.as_bytes()])
}

/// All encryption keys.
pub(crate) fn encryption_keys() -> Vec<u8> {
    table(b'e', &[])
}

/// Record key: everything about one inode, and the entries of a directory.
pub(crate) fn node(ino: u64) -> Vec<u8> {
    table(NODE, &[&ino.to_be_bytes()])
}

/// Record keys of all inodes.
pub(crate) fn nodes() -> Vec<u8> {
    table(NODE, &[])
}

/// Kind of an inode's record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NodeTag {
    Attributes,
    Child,
    Head,
    Extent,
    Target,
    Xattr,
    Other,
}

/// The inode of a record key, and the kind of the record; `None` for application keys.
pub(crate) fn node_of(record: &[u8]) -> Option<(u64, NodeTag)> {
    let ino = u64::from_be_bytes(record.get(1..9)?.try_into().ok()?);
    let tag = match *record.get(9)? {
        ATTRIBUTES => NodeTag::Attributes,
        CHILD => NodeTag::Child,
        HEAD => NodeTag::Head,
        EXTENT => NodeTag::Extent,
        TARGET => NodeTag::Target,
        XATTR => NodeTag::Xattr,
        _ => NodeTag::Other,
    };
    (record[0] == NODE).then_some((ino, tag))
}

/// Record key: attributes of an inode.
pub(crate) fn attributes(ino: u64) -> Vec<u8> {
    table(NODE, &[&ino.to_be_bytes(), &[ATTRIBUTES]])
}

/// Whether a record key is that of attributes.
pub(crate) fn is_attributes(record: &[u8]) -> bool {
    record.len() == 10 && record[0] == NODE && record[9] == ATTRIBUTES
}

/// Record key: the first bytes of a file, kept in the metadata.
pub(crate) fn head(ino: u64) -> Vec<u8> {
    table(NODE, &[&ino.to_be_bytes(), &[HEAD]])
}

/// Record key: the target of a symbolic link.
pub(crate) fn target(ino: u64) -> Vec<u8> {
    table(NODE, &[&ino.to_be_bytes(), &[TARGET]])
}

/// Record key: an extended attribute.
pub(crate) fn xattr(ino: u64, name: &[u8]) -> Vec<u8> {
    table(NODE, &[&ino.to_be_bytes(), &[XATTR], name, &[0]])
}

/// Record keys of all extended attributes of an inode.
pub(crate) fn xattrs(ino: u64) -> Vec<u8> {
    table(NODE, &[&ino.to_be_bytes(), &[XATTR]])
}

/// The name of an extended attribute's record key.
pub(crate) fn xattr_name(record: &[u8]) -> Option<&[u8]> {
    let name = record.get(10..record.len().checked_sub(1)?)?;
    (record[0] == NODE && record[9] == XATTR).then_some(name)
}

/// Whether a record key is that of an extended attribute.
pub(crate) fn is_xattr(record: &[u8]) -> bool {
    record.get(9) == Some(&XATTR) && record[0] == NODE
}

/// Record key: an extent.
pub(crate) fn extent(ino: u64, file_offset: u64) -> Vec<u8> {
    table(NODE, &[&ino.to_be_bytes(), &[EXTENT], &file_offset.to_be_bytes()])
}

/// Whether a record key is that of an extent, so that its value points at an object.
pub(crate) fn is_extent(record: &[u8]) -> bool {
    record.len() == 18 && record[0] == NODE && record[9] == EXTENT
}

/// File offset of an extent's record key.
pub(crate) fn extent_offset(record: &[u8]) -> Option<u64> {
    let bytes = record.get(10..18)?.try_into().ok()?;
    is_extent(record).then_some(u64::from_be_bytes(bytes))
}

/// Record keys of all extents of a file.
pub(crate) fn extents(ino: u64) -> Vec<u8> {
    table(NODE, &[&ino.to_be_bytes(), &[EXTENT]])
}

/// Record key: an entry of a directory. Entries are ordered by the hash of the name, which is the cursor of
/// readdir. A cursor stays valid while entries are added and removed.
pub(crate) fn child(parent: u64, name: &[u8]) -> Vec<u8> {
    let hash = name_hash(name).to_be_bytes();
    table(NODE, &[&parent.to_be_bytes(), &[CHILD], &hash, name, &[0]])
}

/// Record keys of all entries of a directory.
pub(crate) fn children(parent: u64) -> Vec<u8> {
    table(NODE, &[&parent.to_be_bytes(), &[CHILD]])
}

/// Record keys of the entries of a directory whose hash is at least `hash`.
pub(crate) fn children_from(parent: u64, hash: u64) -> Vec<u8> {
    table(NODE, &[&parent.to_be_bytes(), &[CHILD], &hash.to_be_bytes()])
}

/// Hash and name of an entry's record key.
pub(crate) fn child_name(record: &[u8]) -> Option<(u64, &[u8])> {
    let hash = u64::from_be_bytes(record.get(10..18)?.try_into().ok()?);
    let name = record.get(18..record.len().checked_sub(1)?)?;
    (record[0] == NODE && record[9] == CHILD).then_some((hash, name))
}

/// The inode that a record key of a node is about.
pub(crate) fn ino_of(record: &[u8]) -> Option<u64> {
    let ino = record.get(1..9)?.try_into().ok()?;
    (record[0] == NODE).then_some(u64::from_be_bytes(ino))
}

/// Directory and name of an entry's record key.
pub(crate) fn child_of(record: &[u8]) -> Option<(u64, &[u8])> {
    let (_, name) = child_name(record)?;
    Some((ino_of(record)?, name))
}

/// Whether a record key of a node is about the contents of a file.
pub(crate) fn is_contents(record: &[u8]) -> bool {
    matches!(record.get(9), Some(&(HEAD | EXTENT))) && record[0] == NODE
}

/// The readdir cursor of a name: 63 bits of its SHA-256, at least [`HASH_MIN`]. On-disk format.
pub(crate) fn name_hash(name: &[u8]) -> u64 {
    let digest = Sha256::digest(name);
    let mut first = [0; 8];
    first.copy_from_slice(&digest[..8]);
    (u64::from_be_bytes(first) >> 1).max(HASH_MIN)
}

/// Record key: an application key.
pub(crate) fn application(key: &str) -> Vec<u8> {
    table(APPLICATION, &[key.as_bytes(), &[0]])
}

/// Record keys of the application keys with a prefix.
pub(crate) fn applications(prefix: &str) -> Vec<u8> {
    table(APPLICATION, &[prefix.as_bytes()])
}

/// The application key of a record key.
pub(crate) fn application_name(record: &[u8]) -> Option<&str> {
    let name = record.get(1..record.len().checked_sub(1)?)?;
    std::str::from_utf8(name).ok()
}

/// Volume and directory, and hash of the name, of a live entry's key.
pub(crate) fn live_child(key: &[u8]) -> Option<((u64, u64), u64)> {
    let number = |at: usize| Some(u64::from_be_bytes(*key.get(at..)?.first_chunk()?));
    let tags = (*key.first()?, *key.get(9)?, *key.get(18)?);
    if tags == (b'r', NODE, CHILD) { Some(((number(1)?, number(10)?), number(19)?)) } else { None }
}

/// Volume and record key of a live record's key.
pub(crate) fn live_record(key: &[u8]) -> Option<(u64, Vec<u8>)> {
    let (volume, record) = key.strip_prefix(b"r")?.split_first_chunk()?;
    Some((u64::from_be_bytes(*volume), record.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefix_ends_are_above_everything_below() {
        assert_eq!(after_prefix(b"ab"), b"ac");
        assert_eq!(after_prefix(&[1, 0xff]), [2]);
        assert_eq!(after_prefix(&[1, 0xff, 0xff]), [2]);
    }

    #[test]
    fn a_live_key_is_the_same_either_way() {
        for len in [0, 10, SHORT_BYTES - LIVE_PREFIX_BYTES, SHORT_BYTES] {
            let record = vec![7; len];
            let key = with_live(5, &record, <[u8]>::to_vec);
            assert_eq!(key, live(5, &record));
            assert_eq!(live_record(&key), Some((5, record)));
        }
    }

    #[test]
    fn record_keys_are_taken_apart() {
        let key = child(7, b"name");
        assert_eq!(child_name(&key), Some((name_hash(b"name"), &b"name"[..])));
        assert_eq!((child_of(&key), ino_of(&key)), (Some((7, &b"name"[..])), Some(7)));
        assert!(!is_contents(&key) && is_contents(&head(7)) && is_contents(&extent(7, 0)));
        assert!(!is_extent(&key) && !is_attributes(&key));
        assert_eq!(live_child(&live(3, &key)), Some(((3, 7), name_hash(b"name"))));
        assert_eq!(live_child(&live(3, &head(7))), None);
        let key = extent(7, 4096);
        assert_eq!(extent_offset(&key), Some(4096));
        assert!(is_extent(&key));
        assert_eq!(child_name(&key), None);
        assert!(is_attributes(&attributes(7)));
        // An entry whose name makes it as long as an extent key, and one of attributes.
        assert!(!is_extent(&child(7, b"")) && !is_attributes(&target(7)));
        let key = xattr(7, b"user.aaa");
        assert_eq!(xattr_name(&key), Some(&b"user.aaa"[..]));
        assert!(!is_extent(&key) && !is_attributes(&key) && xattr_name(&attributes(7)).is_none());
        assert!(is_xattr(&key) && !is_xattr(&attributes(7)) && !is_xattr(&application("0123456789x")));
        assert_eq!(application_name(&application("a/b")), Some("a/b"));
    }

    #[test]
    fn the_name_hash_is_frozen() {
        assert_eq!(name_hash(b"a"), 0x654b_c089_650d_dee5);
    }
}
