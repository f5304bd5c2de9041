//! The inode table of a live mount: what the kernel was told about each node, for as long as it knows the node.
//!
//! The table is bounded. Beyond [`TABLE_MAX`] nodes in one of its hash tables, replies get lifetime zero: the
//! kernel then asks again instead of being notified of changes.
//!
//! The table keeps the last name that the kernel was told for a node as a stamp ([`name_stamp`]). The stamp
//! covers the directory, the name and the version of the node's names. The version changes whenever the node
//! loses a name. So while the stamp matches, the name has led to the node since the kernel was told.
//!
//! A lookup without the directory lock may be answered while another thread uses the previous meaning of the
//! name. So the table also keeps the thread that was told the name. For a while it refuses a change of names by
//! another thread.
//!
//! A lookup that finds a node under a new name says nothing about its older names. The node counts as one that
//! has lost a name until the lifetime of its older names is over.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hasher as _};
use std::os::unix::ffi::OsStrExt as _;
use std::time::{Duration, SystemTime};

use super::lifetime::{IN_FLIGHT, name_lifetime};
use super::removed::Removed;
use crate::node::Attr;

/// Hash tables, chosen by the last bits of the inode number. A rebuild concerns one of them, which bounds its
/// memory and time.
const TABLES: usize = 64;
/// Entries that a table of 2^16 slots takes before it would grow; each slot has 65 bytes.
const TABLE_FULL: usize = (1 << 16) / 8 * 7;
/// Most nodes of a table; all tables together hold 3.1 million in 260 MiB. Below [`TABLE_FULL`]: tombstones use
/// slots until a rebuild. A rebuild happens at most once per as many insertions as the difference.
const TABLE_MAX: usize = (1 << 16) / 4 * 3;
/// Spare capacity up to which a table is not shrunk.
const SPARE_MAX: usize = 1 << 8;

/// Stamp of an access control list that the kernel was not told, see [`list_stamp`].
const LIST_NOT_TOLD: u32 = 0;
/// Stamp of a node without an access control list.
pub(in crate::mount) const NO_LIST: u32 = 1;
/// Factor of the names version in a stamp. It is odd, so that all versions of a name differ.
const VERSION_STEP: u32 = 0x9e37_79b1;

/// Stands for every thread: the kernel held the directory lock when it was told the name, as for a creation or
/// a listing. No change of names in the directory was in progress.
pub(in crate::mount) const EVERY_THREAD: u32 = u32::MAX;

/// The thread and the circumstances of a request to change a name.
#[derive(Debug, Clone, Copy)]
pub(in crate::mount) struct Asker {
    pub(in crate::mount) thread: u32,
    /// The [`InodeTable::clock`] when the request arrived.
    pub(in crate::mount) arrived: u32,
    /// The arrival time in milliseconds since the mount.
    pub(in crate::mount) arrived_ms: u32,
    /// The request was refused just before, and the kernel has looked the names up since.
    pub(in crate::mount) again: bool,
    /// The request removes a file and concerns only the name.
    pub(in crate::mount) unlinks: bool,
}

/// Whether the kernel knows a name as the node that the name leads to now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::mount) enum Told {
    No,
    /// Yes, unless the reply took longer than replies do.
    Likely,
    Surely,
}

/// What the kernel was told about a node.
#[derive(Debug, Clone, Copy)]
pub(in crate::mount) struct Known {
    /// Lookups that the kernel has not forgotten. A saturated count is never decreased.
    lookups: u32,
    /// The version of the names by which the kernel knows the node.
    names_version: u32,
    /// The last name that the kernel was told, see [`name_stamp`].
    named: u32,
    /// The [`InodeTable::clock`] when the kernel was first told that name.
    named_at: u32,
    /// The thread that was told that name, or [`EVERY_THREAD`].
    named_to: u32,
    /// When the kernel was last told attributes, in milliseconds since the mount.
    pub(in crate::mount) answered_ms: u32,
    /// The last owner and permissions that the kernel was told, see [`access_of`].
    pub(in crate::mount) access: u32,
    /// The last access control list that the kernel was told, see [`list_stamp`].
    list: u32,
    /// The kernel was told other access data before and may still check by it: a notification makes it drop a
    /// reply that is in flight.
    pub(in crate::mount) access_in_doubt: bool,
    /// A thread without an ID in this namespace was refused the present access. On its retry the daemon
    /// decides.
    access_expected: bool,
    /// The oldest version of the contents that the kernel's pages may have.
    pub(in crate::mount) data_version: u64,
    /// The version of the contents whose size the kernel was last told. Only its lower half: one version in
    /// 2^32 looks the same.
    pub(in crate::mount) told_version: u32,
    /// The kernel was notified, or told another size, since its size was surely right.
    notified: bool,
    /// Threads that are sending the kernel a notification.
    pub(in crate::mount) notifying: u8,
    /// Change time of the attributes, see [`stamp`].
    pub(in crate::mount) ctime: u32,
    /// Whether the kernel was told a mode with the set-user-ID or set-group-ID bit.
    pub(in crate::mount) set_id: bool,
    /// Whether the kernel has surely dropped older pages. It drops them with the reply to an open, which has
    /// arrived once the file is closed again.
    pub(in crate::mount) pages_settled: bool,
}

impl Known {
    /// Whether the kernel surely has the size that it was last told. After a notification it drops replies to
    /// earlier requests.
    pub(in crate::mount) fn has_size(&self, attr: &Attr) -> bool {
        self.told_version == attr.data_version as u32 && self.notifying == 0 && !self.notified
    }

    /// The kernel has walked the path of an open again, without a notification meanwhile.
    pub(in crate::mount) fn settle_size(&mut self) {
        self.notified = false;
    }

    /// A thread without an ID in this namespace is refused in order to refresh a size. It passes on its retry.
    fn expects_size(&mut self, attr: &Attr) {
        (self.told_version, self.notified) = (attr.data_version as u32, false);
    }

    /// A thread without an ID in this namespace is refused and walks its path again.
    pub(in crate::mount) fn expects(&mut self, attr: &Attr, list: u32) {
        self.expects_size(attr);
        self.settle_names(attr);
        self.access_in_doubt |= self.access != access_of(attr) || self.has_other_list(list);
        self.access = access_of(attr);
        if self.list != LIST_NOT_TOLD {
            self.list = list;
        }
        self.access_expected = self.access_in_doubt;
    }

    /// Whether a thread without an ID in this namespace was refused this access before.
    pub(in crate::mount) fn expects_access(&self, access: u32, list: u32) -> bool {
        self.access_expected && self.access == access && !self.has_other_list(list)
    }

    /// The kernel, or the daemon, has checked access by the present owner and mode.
    pub(in crate::mount) fn settle_access(&mut self, access: u32) {
        (self.access, self.access_in_doubt, self.access_expected) = (access, false, false);
    }

    /// Whether the kernel may check access by another access control list than this one.
    pub(in crate::mount) fn has_other_list(&self, list: u32) -> bool {
        self.list != LIST_NOT_TOLD && self.list != list
    }

    /// The kernel has checked access by the present access control list, or has none.
    pub(in crate::mount) fn settle_list(&mut self, list: u32) {
        if self.list != list {
            self.list = LIST_NOT_TOLD;
        }
    }

    /// Whether the node has lost a name since the kernel was told its names version.
    fn has_lost_name(&self, attr: &Attr) -> bool {
        is_after(attr.names_version, self.names_version)
    }

    /// The kernel knows the node by the names of these attributes.
    fn settle_names(&mut self, attr: &Attr) {
        if self.has_lost_name(attr) {
            self.names_version = attr.names_version;
        }
    }

    /// This mount has removed a name of the node. If that is the only change to this version of its names, the
    /// kernel knows it, and its other names are right.
    fn loses_name(&mut self, names_version: u32) {
        if self.names_version.wrapping_add(1) == names_version {
            self.names_version = names_version;
            self.named = self.named.wrapping_add(VERSION_STEP);
        }
    }
}

/// The nodes of the live tree that the kernel knows, by inode number.
#[derive(Debug)]
pub(in crate::mount) struct InodeTable {
    tables: [HashMap<u64, Known>; TABLES],
    removed: HashMap<u64, Removed>,
    /// Nodes that were found under a new name, with the time until which the kernel may keep an older one, in
    /// milliseconds since the mount.
    doubted: HashMap<u64, u32>,
    was_crowded: bool,
    /// Number of names that the kernel was told.
    clock: u32,
}

impl Default for InodeTable {
    fn default() -> InodeTable {
        InodeTable {
            tables: std::array::from_fn(|_| HashMap::new()),
            removed: HashMap::new(),
            doubted: HashMap::new(),
            was_crowded: false,
            clock: 0,
        }
    }
}

impl InodeTable {
    /// Notes attributes of a reply. `named` is the stamp of a name by which the kernel then knows the node, and
    /// the thread that receives the reply. Returns false when the table is full: the kernel must not cache the
    /// attributes then.
    pub(in crate::mount) fn note(
        &mut self,
        attr: &Attr,
        named: Option<(u32, u32)>,
        answered_ms: u32,
    ) -> bool {
        let ino = attr.node.ino;
        let table = &mut self.tables[place(ino)];
        make_room(table);
        let has_room = table.len() < TABLE_MAX;
        let entry = match table.entry(ino) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(_) if !has_room => {
                self.was_crowded = true;
                return false;
            }
            Entry::Vacant(entry) => entry.insert(Known {
                lookups: 0,
                names_version: attr.names_version,
                named: 0,
                named_at: 0,
                named_to: 0,
                answered_ms,
                access: access_of(attr),
                list: LIST_NOT_TOLD,
                access_in_doubt: false,
                access_expected: false,
                data_version: 0,
                told_version: attr.data_version as u32,
                notified: false,
                notifying: 0,
                ctime: 0,
                set_id: false,
                pages_settled: false,
            }),
        };
        if let Some((named, to)) = named {
            entry.lookups = entry.lookups.saturating_add(1);
            // The kernel does not use names read before this mount has moved the node.
            let is_outdated = is_after(entry.names_version, attr.names_version);
            if !is_outdated && entry.named != named {
                self.clock = self.clock.wrapping_add(1);
                (entry.named, entry.named_at, entry.named_to) = (named, self.clock, to);
            } else if !is_outdated && entry.named_to != EVERY_THREAD {
                entry.named_to = to;
            }
            if entry.has_lost_name(attr) {
                entry.settle_names(attr);
                let kept_ms = name_lifetime(attr).as_millis() as u32;
                self.doubted.insert(ino, answered_ms.wrapping_add(kept_ms));
            }
        }
        let access = access_of(attr);
        if std::mem::replace(&mut entry.access, access) != access {
            (entry.access_in_doubt, entry.access_expected) = (true, false);
        }
        entry.set_id = attr.mode & 0o6000 != 0;
        entry.ctime = stamp(attr.ctime);
        entry.answered_ms = answered_ms;
        let told_version = attr.data_version as u32;
        // A reply with another size may still be in flight when the next thread opens the file.
        entry.notified |= std::mem::replace(&mut entry.told_version, told_version) != told_version;
        true
    }

    /// The kernel knows nodes that are not in the table, from an earlier server.
    pub(in crate::mount) fn inherits(&mut self) {
        self.was_crowded = true;
    }

    /// Reverts the note of a name that was in a reply but that the kernel ignores.
    pub(in crate::mount) fn untell(&mut self, ino: u64) {
        if let Some(entry) = self.get_mut(ino) {
            entry.named = 0;
        }
        self.forget(ino, 1);
    }

    /// The number of names that the kernel was told so far.
    pub(in crate::mount) fn clock(&self) -> u32 {
        self.clock
    }

    /// Whether the kernel knows a name, by its stamp, as a node that it leads to. If another thread was first
    /// told so a moment ago, the request may still use the previous meaning.
    pub(in crate::mount) fn is_told(&self, ino: u64, named: u32, asker: &Asker) -> Told {
        let likely = |is_likely| if is_likely { Told::Likely } else { Told::No };
        let is_own = |entry: &Known| asker.thread != 0 && entry.named_to == asker.thread;
        match self.get(ino) {
            Some(entry) if entry.named != named => Told::No,
            Some(entry) if entry.named_to == EVERY_THREAD || is_own(entry) => Told::Surely,
            Some(entry) => {
                let counts = asker.thread == 0 || asker.unlinks;
                let since_ms = asker.arrived_ms.wrapping_sub(entry.answered_ms).cast_signed();
                let has_arrived = match counts {
                    // A second refusal of a thread without an ID in this namespace would reach the program.
                    true => !is_after(entry.named_at, asker.arrived),
                    false => i64::from(since_ms) >= IN_FLIGHT.as_millis() as i64,
                };
                likely(asker.again || has_arrived)
            }
            // For nodes outside the full table the kernel caches nothing longer than one request.
            None => likely(self.was_crowded && (asker.again || asker.thread == 0)),
        }
    }

    /// Whether the kernel may know the node by a name that is gone.
    pub(in crate::mount) fn has_lost_name(&mut self, attr: &Attr, now_ms: u32) -> bool {
        let ino = attr.node.ino;
        match self.doubted.get(&ino) {
            Some(until) if is_after(*until, now_ms) => return true,
            Some(_) => {
                self.doubted.remove(&ino);
            }
            None => {}
        }
        self.get(ino).is_some_and(|entry| entry.has_lost_name(attr))
    }

    /// Accepts the names of a node as right with these attributes.
    pub(in crate::mount) fn settle_names(&mut self, attr: &Attr) {
        self.doubted.remove(&attr.node.ino);
        if let Some(entry) = self.get_mut(attr.node.ino) {
            entry.settle_names(attr);
        }
    }

    /// This mount has removed a name of a node, which now has the given names version.
    pub(in crate::mount) fn loses_name(&mut self, ino: u64, names_version: u32) {
        if let Some(entry) = self.get_mut(ino) {
            entry.loses_name(names_version);
        }
    }

    /// This mount has moved a node to the name of this stamp; the node now has the given names version. `told`
    /// says whether the kernel has made the same move.
    pub(in crate::mount) fn moves(&mut self, ino: u64, names_version: u32, named: u32, told: Told) {
        if let Some(entry) = self.get_mut(ino) {
            entry.loses_name(names_version);
            entry.named = named;
            if told != Told::Surely {
                entry.named_to = 0;
            }
        }
    }

    /// Notes the access control list of the next reply.
    pub(in crate::mount) fn tells_list(&mut self, ino: u64, list: u32) {
        if let Some(entry) = self.get_mut(ino) {
            let before = std::mem::replace(&mut entry.list, list);
            // Of two replies in flight the kernel may keep the older one.
            if before != LIST_NOT_TOLD && before != list {
                (entry.access_in_doubt, entry.access_expected) = (true, false);
            }
        }
    }

    /// The kernel has dropped the access control list of a node.
    pub(in crate::mount) fn drops_list(&mut self, ino: u64) {
        if let Some(entry) = self.get_mut(ino) {
            entry.list = LIST_NOT_TOLD;
        }
    }

    /// A notification of a node begins.
    pub(in crate::mount) fn notifies(&mut self, ino: u64) {
        if let Some(entry) = self.get_mut(ino) {
            entry.notifying = entry.notifying.saturating_add(1);
        }
    }

    /// The notification has ended.
    pub(in crate::mount) fn notified(&mut self, ino: u64) {
        if let Some(entry) = self.get_mut(ino) {
            // The node may have been forgotten and looked up meanwhile.
            entry.notifying = entry.notifying.saturating_sub(1);
            entry.notified = true;
        }
    }

    /// The kernel has dropped lookups of a node.
    pub(in crate::mount) fn forget(&mut self, ino: u64, lookups: u64) {
        let table = &mut self.tables[place(ino)];
        let Some(entry) = table.get_mut(&ino) else { return };
        if entry.lookups < u32::MAX {
            entry.lookups = entry.lookups.saturating_sub(u32::try_from(lookups).unwrap_or(u32::MAX));
        }
        if entry.lookups > 0 {
            return;
        }
        table.remove(&ino);
        self.removed.remove(&ino);
        self.doubted.remove(&ino);
        let room = table.capacity();
        if room > SPARE_MAX && table.len() < room / 4 {
            table.shrink_to(room / 2);
        }
    }

    /// Keeps the last state of a removed node until the kernel forgets it.
    pub(in crate::mount) fn remove(&mut self, removed: Removed) {
        let ino = removed.attr.node.ino;
        if self.get(ino).is_some_and(|known| known.lookups > 0) {
            self.removed.insert(ino, removed);
        }
    }

    /// The last state of a removed node that the kernel still knows.
    pub(in crate::mount) fn removed(&self, ino: u64) -> Option<Removed> {
        self.removed.get(&ino).cloned()
    }

    pub(in crate::mount) fn get(&self, ino: u64) -> Option<&Known> {
        self.tables[place(ino)].get(&ino)
    }

    pub(in crate::mount) fn get_mut(&mut self, ino: u64) -> Option<&mut Known> {
        self.tables[place(ino)].get_mut(&ino)
    }

    pub(in crate::mount) fn inos(&self) -> impl Iterator<Item = u64> {
        self.tables.iter().flat_map(|table| table.keys().copied())
    }

    /// Whether the table was ever full, so that the kernel may know nodes outside it.
    pub(in crate::mount) fn was_crowded(&self) -> bool {
        self.was_crowded
    }
}

fn place(ino: u64) -> usize {
    (ino % TABLES as u64) as usize
}

/// Whether a wrapping counter is later than another.
fn is_after(count: u32, other: u32) -> bool {
    count.wrapping_sub(other).cast_signed() > 0
}

/// Rebuilds a table without free slots. Otherwise a table that is more than half full would double its size,
/// even if tombstones use the slots.
fn make_room(table: &mut HashMap<u64, Known>) {
    if table.len() == table.capacity() && table.len() >= TABLE_FULL / 2 {
        let mut fresh = HashMap::with_capacity(TABLE_FULL);
        fresh.extend(table.drain());
        *table = fresh;
    }
}

/// A digest of owner, group and permissions: the data by which the kernel checks an open.
pub(in crate::mount) fn access_of(attr: &Attr) -> u32 {
    let ids = attr.uid.wrapping_mul(0x9e37_79b1) ^ attr.gid.wrapping_mul(0x85eb_ca77).rotate_left(16);
    ids.rotate_left(9) ^ (attr.mode & 0o777)
}

/// A digest of a name in a directory and of the names version of its node.
pub(in crate::mount) fn name_stamp(parent: u64, name: &OsStr, names_version: u32) -> u32 {
    let mut hasher = DefaultHasher::new();
    hasher.write_u64(parent);
    hasher.write(name.as_bytes());
    (hasher.finish() as u32).wrapping_add(names_version.wrapping_mul(VERSION_STEP))
}

/// A digest of an access control list, never [`NO_LIST`].
pub(in crate::mount) fn list_stamp(value: &[u8]) -> u32 {
    let mut hasher = DefaultHasher::new();
    hasher.write(value);
    (hasher.finish() as u32).max(NO_LIST + 1)
}

/// A digest of a time in nanoseconds, to detect changes.
pub(in crate::mount) fn stamp(time: SystemTime) -> u32 {
    let nanos = |duration: Duration| duration.as_nanos() as u64;
    let nanos = match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(after) => nanos(after),
        Err(before) => nanos(before.duration()).wrapping_neg(),
    };
    (nanos.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32
}

#[cfg(test)]
mod tests;
