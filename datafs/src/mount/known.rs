//! What the kernel was told of each node, for as long as it knows the node.
//!
//! The account is bounded: beyond [`KNOWN_MAX`] nodes the kernel is told to believe nothing, so that it
//! asks again instead of being told of changes.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::{Duration, SystemTime};

use crate::fs::Attr;

/// Nodes that are kept account of. Each takes 49 bytes in a table whose size is a power of two; so many
/// fill one of 200 MiB, which takes 300 while it grows to that.
const KNOWN_MAX: usize = (1 << 22) / 8 * 7;
/// Nodes that there may be room for without need.
const SPARE_MAX: usize = 1 << 14;

/// What the kernel was told of a node.
#[derive(Debug, Clone, Copy)]
pub(super) struct Known {
    /// Looks-up that it has not forgotten; as many as can be counted are never forgotten.
    lookups: u32,
    pub(super) names_version: u32,
    /// Who was told that the names are stale, and may have the file after all: 0 for nobody.
    pub(super) told: u32,
    /// When it was told attributes last, in milliseconds since the mount.
    pub(super) answered_ms: u32,
    /// What its pages are of, at the oldest.
    pub(super) data_version: u64,
    /// Change time of those attributes, see [`stamp`].
    pub(super) ctime: u64,
    /// Whether older pages are surely gone: they go with the answer to an open, which has arrived once
    /// the file is closed again.
    pub(super) pages_settled: bool,
}

/// Nodes of the live tree that the kernel knows, by inode number.
#[derive(Debug)]
pub(super) struct KnownNodes {
    nodes: HashMap<u64, Known>,
    max: usize,
    was_crowded: bool,
}

impl Default for KnownNodes {
    fn default() -> KnownNodes {
        KnownNodes { nodes: HashMap::new(), max: KNOWN_MAX, was_crowded: false }
    }
}

impl KnownNodes {
    /// Notes attributes that are going to be answered, with `lookup` also that the kernel knows the node
    /// by one more name. Returns false where there is no room: then it must not keep them.
    pub(super) fn note(&mut self, attr: &Attr, lookup: bool, answered_ms: u32) -> bool {
        let has_room = self.nodes.len() < self.max;
        let entry = match self.nodes.entry(attr.node.ino) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(_) if !has_room => {
                self.was_crowded = true;
                return false;
            }
            Entry::Vacant(entry) => entry.insert(Known {
                lookups: 0,
                names_version: attr.names_version,
                told: 0,
                answered_ms,
                data_version: 0,
                ctime: 0,
                pages_settled: false,
            }),
        };
        if lookup {
            entry.lookups = entry.lookups.saturating_add(1);
            entry.names_version = attr.names_version;
            entry.told = 0;
        }
        entry.ctime = stamp(attr.ctime);
        entry.answered_ms = answered_ms;
        true
    }

    /// The kernel has dropped looks-up of a node.
    pub(super) fn forget(&mut self, ino: u64, lookups: u64) {
        let Some(entry) = self.nodes.get_mut(&ino) else { return };
        if entry.lookups < u32::MAX {
            entry.lookups = entry.lookups.saturating_sub(u32::try_from(lookups).unwrap_or(u32::MAX));
        }
        if entry.lookups > 0 {
            return;
        }
        self.nodes.remove(&ino);
        let room = self.nodes.capacity();
        if room > SPARE_MAX && self.nodes.len() < room / 4 {
            self.nodes.shrink_to(room / 2);
        }
    }

    pub(super) fn get(&self, ino: u64) -> Option<&Known> {
        self.nodes.get(&ino)
    }

    pub(super) fn get_mut(&mut self, ino: u64) -> Option<&mut Known> {
        self.nodes.get_mut(&ino)
    }

    pub(super) fn inos(&self) -> impl Iterator<Item = u64> {
        self.nodes.keys().copied()
    }

    /// Whether there was ever a node too many, so that the kernel may know others than these.
    pub(super) fn was_crowded(&self) -> bool {
        self.was_crowded
    }
}

/// A time in nanoseconds, to be told from others.
pub(super) fn stamp(time: SystemTime) -> u64 {
    let nanos = |duration: Duration| duration.as_nanos() as u64;
    match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(after) => nanos(after),
        Err(before) => nanos(before.duration()).wrapping_neg(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::fs::{FileKind, Node};
    use crate::meta::inode::Inode;

    fn attr(ino: u64) -> Attr {
        Inode::new(FileKind::File, 0o644, 0, 0).attr(Node { snapshot: 0, ino })
    }

    #[test]
    fn nodes_are_known_until_they_are_forgotten_and_never_too_many() {
        let mut known = KnownNodes { max: 100_000, ..KnownNodes::default() };
        for ino in 0..100_000 {
            assert!(known.note(&attr(ino), true, 7));
        }
        assert!(known.note(&attr(5), true, 8) && !known.was_crowded());
        assert!(!known.note(&attr(100_000), true, 8) && known.was_crowded());
        assert!(known.get_mut(100_000).is_none());
        known.forget(5, 1);
        assert_eq!(known.get_mut(5).unwrap().answered_ms, 8);
        for ino in 0..100_001 {
            known.forget(ino, 1);
        }
        assert_eq!(known.inos().count(), 0);
        assert!(known.nodes.capacity() <= 2 * SPARE_MAX, "{} are kept", known.nodes.capacity());
        assert!(known.note(&attr(100_000), false, 9));
    }

    #[test]
    fn an_account_is_small_and_times_differ() {
        assert_eq!(size_of::<(u64, Known)>(), 48);
        let epoch = SystemTime::UNIX_EPOCH;
        let times = [Duration::ZERO, Duration::from_nanos(1), Duration::from_secs(1 << 33)];
        for (i, time) in times.iter().enumerate() {
            for other in &times[..i] {
                assert_ne!(stamp(epoch + *time), stamp(epoch + *other));
                assert_ne!(stamp(epoch - *time), stamp(epoch + *other));
            }
        }
    }
}
