//! What the kernel was told of each node, for as long as it knows the node.
//!
//! The account is bounded: beyond [`TABLE_MAX`] nodes of a table the kernel is told to believe nothing, so that it
//! asks again instead of being told of changes.
//!
//! The name that the kernel was told last of a node is kept as a stamp of the directory, the name and the version of
//! the node's names ([`name_stamp`]). While the stamp is right, the name has led to the node since the kernel was told
//! so: the version changes whenever the node loses a name.
//!
//! A look-up without the lock of the directory may be answered while another thread goes by what the name was before.
//! So the thread that was told a name is kept too: a change of names by another one is refused for a while.
//!
//! A look-up that finds a node under a new name says nothing of its older names. The node counts as one that has lost
//! a name until the kernel has looked up again every name that it was told before.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hasher as _};
use std::os::unix::ffi::OsStrExt as _;
use std::time::{Duration, SystemTime};

use super::coherence::{IN_FLIGHT, name_lifetime};
use super::removed::Removed;
use crate::fs::Attr;

/// Tables, by the last bits of the inode number: one of them is made anew at a time, which takes little
/// memory and little time.
const TABLES: usize = 64;
/// Entries that a table of 2^16 places takes before it would grow; each place is 65 bytes.
const TABLE_FULL: usize = (1 << 16) / 8 * 7;
/// Nodes of a table that are kept account of; all tables then have 3.1 million and 260 MiB. Fewer than it
/// takes: what is removed leaves marks that take places until the table is made anew, which happens once
/// in so many as the difference at most.
const TABLE_MAX: usize = (1 << 16) / 4 * 3;
/// Nodes that there may be room for in a table without need.
const SPARE_MAX: usize = 1 << 8;

/// The access control list of a node that the kernel was told none of, see [`list_stamp`].
const LIST_NOT_TOLD: u32 = 0;
/// A node without an access control list.
pub(super) const NO_LIST: u32 = 1;
/// Of a version of a node's names in a stamp. It is odd, so that all versions of a name differ.
const VERSION_STEP: u32 = 0x9e37_79b1;

/// Stands for every thread: the kernel was told a name while it had the directory locked, as by a creation or a listing.
/// No change of names in the directory was under way.
pub(super) const EVERY_THREAD: u32 = u32::MAX;

/// A request to change a name.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asker {
    pub(super) thread: u32,
    /// The [`InodeTable::clock`] when it arrived.
    pub(super) arrived: u32,
    /// The same in milliseconds since the mount.
    pub(super) arrived_ms: u32,
    /// It was refused just before, and the kernel has looked the names up since.
    pub(super) again: bool,
    /// It removes a file, and concerns nothing but the name.
    pub(super) unlinks: bool,
}

/// Whether the kernel takes a name for the node that it leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Told {
    No,
    /// Unless the answer took longer than answers do.
    Likely,
    Surely,
}

/// What the kernel was told of a node.
#[derive(Debug, Clone, Copy)]
pub(super) struct Known {
    /// Looks-up that it has not forgotten; as many as can be counted are never forgotten.
    lookups: u32,
    /// The version of the names by which it knows the node.
    names_version: u32,
    /// The name that it was told last, see [`name_stamp`].
    named: u32,
    /// The [`InodeTable::clock`] when it was told that for the first time.
    named_at: u32,
    /// The thread that was told so, or [`EVERY_THREAD`].
    named_to: u32,
    /// When it was told attributes last, in milliseconds since the mount.
    pub(super) answered_ms: u32,
    /// Owner and permissions that it was told last, see [`access_of`].
    pub(super) access: u32,
    /// The access control list that it was told last, see [`list_stamp`].
    list: u32,
    /// It was told others before. It drops an answer that was under way when it was told of a change, and then goes
    /// on deciding by the old ones.
    pub(super) access_in_doubt: bool,
    /// A thread that cannot be told from others was refused the present access. When it comes back, the daemon decides.
    access_expected: bool,
    /// What its pages are of, at the oldest.
    pub(super) data_version: u64,
    /// Version of the contents whose size it was told last; its lower half, which makes one in 2^32 look the same.
    pub(super) told_version: u32,
    /// It was told of a change, or of another size, since its size was surely right.
    notified: bool,
    /// Threads that are telling it of a change.
    pub(super) notifying: u8,
    /// Change time of those attributes, see [`stamp`].
    pub(super) ctime: u32,
    /// Whether it was told a mode with the set-user-ID or set-group-ID bit.
    pub(super) set_id: bool,
    /// Whether older pages are surely gone: they go with the answer to an open, which has arrived once
    /// the file is closed again.
    pub(super) pages_settled: bool,
}

impl Known {
    /// Whether the kernel surely has the size that it was told last: it drops an answer to what it asked before it was
    /// told of a change, whenever that was asked.
    pub(super) fn has_size(&self, attr: &Attr) -> bool {
        self.told_version == attr.data_version as u32 && self.notifying == 0 && !self.notified
    }

    /// The kernel has walked the path of an open again, and was told of nothing meanwhile.
    pub(super) fn settle_size(&mut self) {
        self.notified = false;
    }

    /// A thread that cannot be told from others is sent to bring a size. When it comes back it passes.
    fn expects_size(&mut self, attr: &Attr) {
        (self.told_version, self.notified) = (attr.data_version as u32, false);
    }

    /// A thread that cannot be told from others is sent to walk its path again.
    pub(super) fn expects(&mut self, attr: &Attr, list: u32) {
        self.expects_size(attr);
        self.settle_names(attr);
        self.access_in_doubt |= self.access != access_of(attr) || self.has_other_list(list);
        self.access = access_of(attr);
        if self.list != LIST_NOT_TOLD {
            self.list = list;
        }
        self.access_expected = self.access_in_doubt;
    }

    /// Whether a thread that cannot be told from others was refused this access before.
    pub(super) fn expects_access(&self, access: u32, list: u32) -> bool {
        self.access_expected && self.access == access && !self.has_other_list(list)
    }

    /// The kernel has decided by the present owner and mode, or the daemon has.
    pub(super) fn settle_access(&mut self, access: u32) {
        (self.access, self.access_in_doubt, self.access_expected) = (access, false, false);
    }

    /// Whether the kernel may decide by another access control list than this one.
    pub(super) fn has_other_list(&self, list: u32) -> bool {
        self.list != LIST_NOT_TOLD && self.list != list
    }

    /// The kernel has decided with the present access control list, or has none.
    pub(super) fn settle_list(&mut self, list: u32) {
        if self.list != list {
            self.list = LIST_NOT_TOLD;
        }
    }

    /// Whether the node has lost a name since the kernel was told its last one.
    fn has_lost_name(&self, attr: &Attr) -> bool {
        is_after(attr.names_version, self.names_version)
    }

    /// The kernel knows the node by names that are right with these attributes.
    fn settle_names(&mut self, attr: &Attr) {
        if self.has_lost_name(attr) {
            self.names_version = attr.names_version;
        }
    }

    /// This mount has taken a name from the node. Where that is all that was changed to this version of its names, the
    /// kernel knows it, and the other names that it was told are right.
    fn loses_name(&mut self, names_version: u32) {
        if self.names_version.wrapping_add(1) == names_version {
            self.names_version = names_version;
            self.named = self.named.wrapping_add(VERSION_STEP);
        }
    }
}

/// Nodes of the live tree that the kernel knows, by inode number.
#[derive(Debug)]
pub(super) struct InodeTable {
    tables: [HashMap<u64, Known>; TABLES],
    removed: HashMap<u64, Removed>,
    /// Nodes that were found under a new name, and until when an older one may be kept, in milliseconds since the mount.
    doubted: HashMap<u64, u32>,
    was_crowded: bool,
    /// Counts the names that the kernel was told.
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
    /// Notes attributes that are going to be answered, with the stamp of a name also that the kernel knows the node
    /// by this name, and the thread that is told so. Returns false where there is no room: then it must not keep them.
    pub(super) fn note(&mut self, attr: &Attr, named: Option<(u32, u32)>, answered_ms: u32) -> bool {
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
            // What was read before this mount has moved the node itself is not what the kernel goes by.
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
        // The answer with another size may still be under way when the next thread opens the file.
        entry.notified |= std::mem::replace(&mut entry.told_version, told_version) != told_version;
        true
    }

    /// The kernel was told a name that it does not take note of.
    pub(super) fn untell(&mut self, ino: u64) {
        if let Some(entry) = self.get_mut(ino) {
            entry.named = 0;
        }
        self.forget(ino, 1);
    }

    /// How many names the kernel was told so far.
    pub(super) fn clock(&self) -> u32 {
        self.clock
    }

    /// Whether the kernel takes a name, by its stamp, for a node that it leads to. Where another thread was told so for
    /// the first time a moment ago, the request may still go by what the kernel was told before.
    pub(super) fn is_told(&self, ino: u64, named: u32, asker: &Asker) -> Told {
        let likely = |is_likely| if is_likely { Told::Likely } else { Told::No };
        let is_own = |entry: &Known| asker.thread != 0 && entry.named_to == asker.thread;
        match self.get(ino) {
            Some(entry) if entry.named != named => Told::No,
            Some(entry) if entry.named_to == EVERY_THREAD || is_own(entry) => Told::Surely,
            Some(entry) => {
                let counts = asker.thread == 0 || asker.unlinks;
                let since_ms = asker.arrived_ms.wrapping_sub(entry.answered_ms).cast_signed();
                let has_arrived = match counts {
                    // A second refusal of a thread that cannot be told from others would reach the program.
                    true => !is_after(entry.named_at, asker.arrived),
                    false => i64::from(since_ms) >= IN_FLIGHT.as_millis() as i64,
                };
                likely(asker.again || has_arrived)
            }
            // Of nodes that there was no room for it believes nothing longer than a request takes.
            None => likely(self.was_crowded && (asker.again || asker.thread == 0)),
        }
    }

    /// Whether a name by which the kernel knows a node may be gone.
    pub(super) fn has_lost_name(&mut self, attr: &Attr, now_ms: u32) -> bool {
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

    /// Names of a node count as right with these attributes.
    pub(super) fn settle_names(&mut self, attr: &Attr) {
        self.doubted.remove(&attr.node.ino);
        if let Some(entry) = self.get_mut(attr.node.ino) {
            entry.settle_names(attr);
        }
    }

    /// This mount has taken a name from a node, which has the given version of its names since.
    pub(super) fn loses_name(&mut self, ino: u64, names_version: u32) {
        if let Some(entry) = self.get_mut(ino) {
            entry.loses_name(names_version);
        }
    }

    /// This mount has moved a node, which has the given version of its names since, to a name of this stamp. `told` says
    /// whether the kernel has moved the same.
    pub(super) fn moves(&mut self, ino: u64, names_version: u32, named: u32, told: Told) {
        if let Some(entry) = self.get_mut(ino) {
            entry.loses_name(names_version);
            entry.named = named;
            if told != Told::Surely {
                entry.named_to = 0;
            }
        }
    }

    /// Notes the access control list that the kernel is going to be told.
    pub(super) fn tells_list(&mut self, ino: u64, list: u32) {
        if let Some(entry) = self.get_mut(ino) {
            let before = std::mem::replace(&mut entry.list, list);
            // Of two answers that are under way it may keep the older one.
            if before != LIST_NOT_TOLD && before != list {
                (entry.access_in_doubt, entry.access_expected) = (true, false);
            }
        }
    }

    /// The kernel has dropped the access control list of a node.
    pub(super) fn drops_list(&mut self, ino: u64) {
        if let Some(entry) = self.get_mut(ino) {
            entry.list = LIST_NOT_TOLD;
        }
    }

    /// Begins to tell the kernel of a change of a node.
    pub(super) fn notifies(&mut self, ino: u64) {
        if let Some(entry) = self.get_mut(ino) {
            entry.notifying = entry.notifying.saturating_add(1);
        }
    }

    /// The kernel was told of it.
    pub(super) fn notified(&mut self, ino: u64) {
        if let Some(entry) = self.get_mut(ino) {
            // The node may have been forgotten and looked up meanwhile.
            entry.notifying = entry.notifying.saturating_sub(1);
            entry.notified = true;
        }
    }

    /// The kernel has dropped looks-up of a node.
    pub(super) fn forget(&mut self, ino: u64, lookups: u64) {
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

    /// Notes a node without names, until the kernel forgets it.
    pub(super) fn remove(&mut self, removed: Removed) {
        let ino = removed.attr.node.ino;
        if self.get(ino).is_some_and(|known| known.lookups > 0) {
            self.removed.insert(ino, removed);
        }
    }

    /// A node that was removed and is still known.
    pub(super) fn removed(&self, ino: u64) -> Option<Removed> {
        self.removed.get(&ino).cloned()
    }

    pub(super) fn get(&self, ino: u64) -> Option<&Known> {
        self.tables[place(ino)].get(&ino)
    }

    pub(super) fn get_mut(&mut self, ino: u64) -> Option<&mut Known> {
        self.tables[place(ino)].get_mut(&ino)
    }

    pub(super) fn inos(&self) -> impl Iterator<Item = u64> {
        self.tables.iter().flat_map(|table| table.keys().copied())
    }

    /// Whether there was ever a node too many, so that the kernel may know others than these.
    pub(super) fn was_crowded(&self) -> bool {
        self.was_crowded
    }
}

fn place(ino: u64) -> usize {
    (ino % TABLES as u64) as usize
}

/// Whether a count is the later one of two. It wraps.
fn is_after(count: u32, other: u32) -> bool {
    count.wrapping_sub(other).cast_signed() > 0
}

/// Makes a table anew that can take no more. By itself a table that is more than half full grows then to
/// twice its size, also when marks of what was removed take the places.
fn make_room(table: &mut HashMap<u64, Known>) {
    if table.len() == table.capacity() && table.len() >= TABLE_FULL / 2 {
        let mut fresh = HashMap::with_capacity(TABLE_FULL);
        fresh.extend(table.drain());
        *table = fresh;
    }
}

/// A digest of owner, group and permissions: of what the kernel decides by who may open the file.
pub(super) fn access_of(attr: &Attr) -> u32 {
    let ids = attr.uid.wrapping_mul(0x9e37_79b1) ^ attr.gid.wrapping_mul(0x85eb_ca77).rotate_left(16);
    ids.rotate_left(9) ^ (attr.mode & 0o777)
}

/// A digest of a name in a directory and of the version of the names of what it leads to.
pub(super) fn name_stamp(parent: u64, name: &OsStr, names_version: u32) -> u32 {
    let mut hasher = DefaultHasher::new();
    hasher.write_u64(parent);
    hasher.write(name.as_bytes());
    (hasher.finish() as u32).wrapping_add(names_version.wrapping_mul(VERSION_STEP))
}

/// A digest of an access control list, none of which is [`NO_LIST`].
pub(super) fn list_stamp(value: &[u8]) -> u32 {
    let mut hasher = DefaultHasher::new();
    hasher.write(value);
    (hasher.finish() as u32).max(NO_LIST + 1)
}

/// A digest of a time in nanoseconds, to be told from others.
pub(super) fn stamp(time: SystemTime) -> u32 {
    let nanos = |duration: Duration| duration.as_nanos() as u64;
    let nanos = match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(after) => nanos(after),
        Err(before) => nanos(before.duration()).wrapping_neg(),
    };
    (nanos.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32
}

#[cfg(test)]
mod tests;
