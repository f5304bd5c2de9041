//! Lookup prefetch for snapshots: a program that reads several files of a directory mostly reads the others
//! soon. After a few lookups the mount reads the whole directory and keeps the entries. Each entry serves one
//! lookup, because the kernel asks for it once.

use std::collections::{HashMap, VecDeque};
use std::ffi::{OsStr, OsString};

use parking_lot::Mutex;

use crate::fs::{Found, View};
use crate::node::Node;

/// Most prefetched entries in memory: about 16 MiB.
const WAITING_MAX: usize = 32_768;
/// Largest directory that is prefetched. The mount looks up larger ones name by name.
const ENTRIES_MAX: usize = 8_192;
/// Lookups in a directory until the mount prefetches it: the last of them triggers the prefetch.
const MISSES_MAX: u32 = 4;
/// Misses in a prefetched directory after which its remaining entries are dropped.
const STALE_MISSES_MAX: u32 = 64;
/// Most directories whose misses are counted.
const COUNTED_MAX: usize = 4_096;
/// Unused entries allowed beyond [`RATIO_MAX`] per used one. At this bound the mount stops prefetching.
const FREE_ENTRIES: u64 = 16_384;
const RATIO_MAX: u64 = 4;

/// The prefetched entries of one snapshot that the kernel has not asked for yet.
#[derive(Debug, Default)]
pub(super) struct LookupPrefetch {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    misses: HashMap<Node, u32>,
    waiting: HashMap<Node, HashMap<OsString, Found>>,
    /// Directories in `waiting`, oldest first.
    order: VecDeque<Node>,
    entries: usize,
    found: u64,
    used: u64,
}

/// The next step of a lookup.
#[derive(Debug)]
enum Next {
    Known(Box<Found>),
    LookUp,
    /// Read the whole directory, then try again.
    Read,
}

impl LookupPrefetch {
    /// The prefetched entry of a name. `None` means that the caller must look the name up.
    pub(super) fn take(&self, view: &View, parent: Node, name: &OsStr) -> Option<Found> {
        let next = self.state.lock().next(parent, name);
        match next {
            Next::Known(found) => Some(*found),
            Next::LookUp => None,
            Next::Read => {
                // The caller's own lookup reports an error.
                let found = view.whole_directory(parent, ENTRIES_MAX).ok().flatten()?;
                let mut state = self.state.lock();
                state.put(parent, found);
                match state.next(parent, name) {
                    Next::Known(found) => Some(*found),
                    Next::LookUp | Next::Read => None,
                }
            }
        }
    }

    pub(super) fn clear(&self) {
        *self.state.lock() = State::default();
    }
}

impl State {
    fn next(&mut self, parent: Node, name: &OsStr) -> Next {
        if let Some(waiting) = self.waiting.get_mut(&parent) {
            if let Some(found) = waiting.remove(name) {
                self.entries -= 1;
                self.used += 1;
                if waiting.is_empty() {
                    self.forget(parent);
                }
                return Next::Known(Box::new(found));
            }
            if self.count_miss(parent) >= STALE_MISSES_MAX {
                self.forget(parent);
            }
            return Next::LookUp;
        }
        if self.count_miss(parent) < MISSES_MAX || self.found >= FREE_ENTRIES + RATIO_MAX * self.used {
            return Next::LookUp;
        }
        self.misses.remove(&parent);
        Next::Read
    }

    fn count_miss(&mut self, parent: Node) -> u32 {
        if self.misses.len() >= COUNTED_MAX && !self.misses.contains_key(&parent) {
            self.misses.clear();
        }
        let misses = self.misses.entry(parent).or_default();
        *misses += 1;
        *misses
    }

    fn put(&mut self, parent: Node, found: HashMap<OsString, Found>) {
        self.forget(parent);
        self.found += found.len() as u64;
        self.entries += found.len();
        self.waiting.insert(parent, found);
        self.order.push_back(parent);
        while self.entries > WAITING_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.forget(oldest);
        }
    }

    fn forget(&mut self, parent: Node) {
        self.misses.remove(&parent);
        if let Some(waiting) = self.waiting.remove(&parent) {
            self.entries -= waiting.len();
            self.order.retain(|node| *node != parent);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::node::Attr;
    use crate::{Config, Datafs};

    fn attr() -> Attr {
        let home = tempfile::tempdir().unwrap();
        let datafs = Datafs::open(home.path(), &Config::default()).unwrap();
        datafs.volume_create(&"v".parse().unwrap()).unwrap();
        datafs.view(&"v".parse().unwrap()).unwrap().stat("/").unwrap()
    }

    fn some(attr: Attr, count: usize) -> HashMap<OsString, Found> {
        (0..count).map(|i| (i.to_string().into(), Found { attr, layout: None })).collect()
    }

    fn node(ino: u64) -> Node {
        Node { snapshot: 1, ino }
    }

    #[test]
    fn a_directory_is_read_after_some_misses_and_each_entry_is_handed_out_once() {
        let (mut state, attr) = (State::default(), attr());
        let parent = node(5);
        for _ in 1..MISSES_MAX {
            assert!(matches!(state.next(parent, "0".as_ref()), Next::LookUp));
        }
        assert!(matches!(state.next(parent, "0".as_ref()), Next::Read));
        state.put(parent, some(attr, 3));
        for i in 0..3 {
            assert!(matches!(state.next(parent, i.to_string().as_ref()), Next::Known(_)));
            assert!(matches!(state.next(parent, i.to_string().as_ref()), Next::LookUp));
        }
        assert!(state.waiting.is_empty() && state.order.is_empty() && state.entries == 0);
        state.put(parent, some(attr, 3));
        for _ in 0..STALE_MISSES_MAX {
            assert!(matches!(state.next(parent, "not there".as_ref()), Next::LookUp));
        }
        assert!(state.waiting.is_empty() && state.entries == 0);
    }

    #[test]
    fn what_waits_and_what_is_found_in_vain_is_bounded() {
        let (mut state, attr) = (State::default(), attr());
        let mut read = 0;
        for ino in 0..200 {
            for _ in 0..MISSES_MAX {
                if matches!(state.next(node(ino), "0".as_ref()), Next::Read) {
                    state.put(node(ino), some(attr, 1_000));
                    read += 1;
                }
            }
            assert!(state.entries <= WAITING_MAX && state.misses.len() <= COUNTED_MAX);
        }
        assert_eq!(read, FREE_ENTRIES.div_ceil(1_000), "nobody has asked for any of them");
        for ino in 300..400 {
            state.put(node(ino), some(attr, 1_000));
        }
        assert!(state.entries <= WAITING_MAX && state.waiting.len() == state.order.len());
    }
}
