//! Client-side cache of the map: rows, and the changes that invalidate them.
//!
//! The rows are an image of the map at one position in the order of commits. At that position, each cached
//! key has its cached value, or none. Every answer of the server lists the keys that other clients committed
//! since, and moves the position on. A value requested before a change of its key was recorded is not cached.
//! Dropping a row is always safe.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::meta::changes::Changed;

/// A key's value; `None` if it has none.
pub(super) type Value = Option<Arc<[u8]>>;

/// Changes that are kept, for runs that began before them.
const CHANGES_MAX: usize = 16_384;
/// Keys that wait for the listeners; with more, listeners are told that anything may have changed.
const NEWS_MAX: usize = 4_096;
/// An image that was not confirmed for this long is dropped, not updated: the server may have deleted the
/// commits that an update needs.
const LAG_MAX: Duration = Duration::from_secs(45);
/// Memory of a cached row in addition to its bytes.
const ROW_BYTES: usize = 96;

/// Cached rows and the position at which they hold.
#[derive(Debug)]
pub(super) struct Rows {
    /// Recently used rows, and older ones; together at most `bytes_max`.
    young: HashMap<Arc<[u8]>, Value>,
    old: HashMap<Arc<[u8]>, Value>,
    young_bytes: usize,
    bytes_max: usize,
    /// Counts the changes of the image.
    clock: u64,
    changes: VecDeque<(u64, Change)>,
    /// Changes up to this clock are not kept any more.
    forgotten: u64,
    position: Position,
    news: Changed,
}

#[derive(Debug)]
enum Change {
    Key(Arc<[u8]>),
    Anything,
}

/// A position in the order of commits: all transactions before the horizon, and some after it.
#[derive(Debug)]
struct Position {
    /// `i64::MAX` until the first answer of the server; nothing is cached before it.
    horizon: i64,
    after: HashSet<i64>,
    /// When the server last answered, if it ever did.
    asked: Option<Instant>,
}

/// The keys and ranges that a transaction has read.
#[derive(Debug, Default)]
pub(super) struct Reads {
    pub(super) keys: HashMap<Vec<u8>, Value>,
    pub(super) ranges: Vec<RangeInclusive<Vec<u8>>>,
}

impl Reads {
    fn covers(&self, key: &[u8]) -> bool {
        self.ranges.iter().any(|range| range.start().as_slice() <= key && key < range.end().as_slice())
    }
}

impl Rows {
    pub(super) fn new(bytes_max: usize) -> Rows {
        Rows {
            young: HashMap::new(),
            old: HashMap::new(),
            young_bytes: 0,
            bytes_max,
            clock: 0,
            changes: VecDeque::new(),
            forgotten: 0,
            position: Position { horizon: i64::MAX, after: HashSet::new(), asked: None },
            news: Changed::default(),
        }
    }

    /// The clock of the image: the count of its changes.
    pub(super) fn clock(&self) -> u64 {
        self.clock
    }

    /// The transaction from which on the server must list commits.
    pub(super) fn horizon(&self) -> i64 {
        self.position.horizon
    }

    /// When the server last reported the commits of other clients.
    pub(super) fn asked(&self) -> Option<Instant> {
        self.position.asked
    }

    pub(super) fn get(&mut self, key: &[u8]) -> Option<Value> {
        if let Some(value) = self.young.get(key) {
            return Some(value.clone());
        }
        let (key, value) = self.old.remove_entry(key)?;
        self.insert(key, value.clone());
        Some(value)
    }

    fn insert(&mut self, key: Arc<[u8]>, value: Value) {
        let len = key.len();
        self.young_bytes += row_bytes(len, &value);
        if let Some(before) = self.young.insert(key, value) {
            self.young_bytes -= row_bytes(len, &before);
        }
        if self.young_bytes > self.bytes_max / 2 {
            self.old = std::mem::take(&mut self.young);
            self.young_bytes = 0;
        }
    }

    fn forget(&mut self, key: &[u8]) {
        if let Some(before) = self.young.remove(key) {
            self.young_bytes -= row_bytes(key.len(), &before);
        }
        self.old.remove(key);
    }

    /// Drops rows that may be wrong.
    pub(super) fn forget_all<'k>(&mut self, keys: impl Iterator<Item = &'k [u8]>) {
        self.clock += 1;
        for key in keys {
            self.forget(key);
            self.note(Change::Key(key.into()));
        }
    }

    /// Drops all rows.
    pub(super) fn clear(&mut self) {
        self.clock += 1;
        self.note(Change::Anything);
        self.young.clear();
        self.old.clear();
        self.young_bytes = 0;
    }

    fn note(&mut self, change: Change) {
        self.changes.push_back((self.clock, change));
        if self.changes.len() > CHANGES_MAX
            && let Some((clock, _)) = self.changes.pop_front()
        {
            self.forgotten = clock;
        }
    }

    /// Keys that have changed since `clock`; `None` if any may have.
    pub(super) fn changed_since(&self, clock: u64) -> Option<HashSet<Arc<[u8]>>> {
        if self.forgotten > clock {
            return None;
        }
        self.since(clock)
            .map(|(_, change)| match change {
                Change::Key(key) => Some(Arc::clone(key)),
                Change::Anything => None,
            })
            .collect()
    }

    /// Caches an answer of the server. `changed` are the keys that have changed since the request; with
    /// `None` nothing is cached.
    pub(super) fn remember<'k>(
        &mut self,
        changed: Option<&HashSet<Arc<[u8]>>>,
        pairs: impl Iterator<Item = (&'k [u8], Value)>,
    ) {
        let Some(changed) = changed else { return };
        for (key, value) in pairs.filter(|(key, _)| !changed.contains(*key)) {
            self.old.remove(key);
            self.insert(key.into(), value);
        }
    }

    /// Applies a commit of this process: its writes hold from now on, except for keys that other clients have
    /// changed since `since`.
    pub(super) fn land<'k>(&mut self, since: u64, writes: impl Iterator<Item = (&'k Vec<u8>, &'k Value)>) {
        let foreign = self.changed_since(since);
        self.clock += 1;
        for (key, value) in writes {
            let key: Arc<[u8]> = key.as_slice().into();
            if foreign.as_ref().is_none_or(|foreign| foreign.contains(&key)) {
                self.forget(&key);
            } else {
                self.old.remove(&key);
                self.insert(Arc::clone(&key), value.clone());
            }
            self.note(Change::Key(key));
        }
    }

    fn since(&self, clock: u64) -> impl Iterator<Item = &(u64, Change)> {
        self.changes.iter().rev().take_while(move |(at, _)| *at > clock)
    }

    /// Whether something that was read since `clock` may be different now. `current` gives values that are
    /// not cached here.
    pub(super) fn outdated(
        &self,
        clock: u64,
        reads: &Reads,
        current: impl Fn(&[u8]) -> Option<Value>,
    ) -> bool {
        if self.clock == clock {
            return false;
        }
        if self.forgotten > clock {
            return true;
        }
        self.since(clock).any(|(_, change)| match change {
            Change::Anything => true,
            Change::Key(key) => {
                reads.covers(key)
                    || reads.keys.get(&key[..]).is_some_and(|read| {
                        let now = current(key)
                            .or_else(|| self.young.get(key).cloned())
                            .or_else(|| self.old.get(key).cloned());
                        now.as_ref() != Some(read)
                    })
            }
        })
    }

    /// Applies an answer of the server: commits of other clients, by transaction, with the keys that they
    /// touched (`None`: not listed), and the horizon.
    pub(super) fn follow(&mut self, commits: Vec<(i64, Option<Vec<Vec<u8>>>)>, horizon: i64, now: Instant) {
        if self.position.asked.is_some_and(|at| now.duration_since(at) > LAG_MAX) {
            self.start_over();
        }
        for (xid, touched) in commits {
            if xid < self.position.horizon || !self.position.after.insert(xid) {
                continue;
            }
            match touched {
                None => {
                    self.clear();
                    self.news.anything = true;
                }
                Some(keys) => {
                    self.forget_all(keys.iter().map(Vec::as_slice));
                    self.tell(&keys);
                }
            }
        }
        if horizon > self.position.horizon || self.position.horizon == i64::MAX {
            self.position.horizon = horizon;
            self.position.after.retain(|xid| *xid >= horizon);
        }
        self.position.asked = Some(now);
    }

    fn tell(&mut self, keys: &[Vec<u8>]) {
        let records = keys.iter().filter_map(|key| crate::meta::keys::live_record(key));
        self.news.add(records, NEWS_MAX);
    }

    /// Drops all rows, and reports that anything may have changed.
    pub(super) fn start_over(&mut self) {
        self.clear();
        self.news.anything = true;
    }

    /// Starts over with another server, which has a new order of commits.
    pub(super) fn begin_anew(&mut self) {
        self.start_over();
        self.position = Position { horizon: i64::MAX, after: HashSet::new(), asked: None };
    }

    /// The changes by other clients since the last call.
    pub(super) fn take_news(&mut self) -> Changed {
        std::mem::take(&mut self.news)
    }
}

fn row_bytes(key_len: usize, value: &Value) -> usize {
    ROW_BYTES + key_len + value.as_ref().map_or(0, |value| value.len())
}
