//! What the process remembers of the map, and how it learns that it must forget.
//!
//! The rows are an image of the map at one position in the order of commits: what a key is said to
//! have, or not to have, it has at that position. Every answer of the server brings along which keys
//! others have committed since, and moves the position on. A value that was asked for before a change
//! of its key was noted is not remembered; forgetting is always right.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::meta::changes::Changed;

/// A key's value, or that it has none.
pub(super) type Value = Option<Arc<[u8]>>;

/// Changes that are remembered, for those who read before them.
const CHANGES_MAX: usize = 16_384;
/// Keys that wait for the listeners; with more, they are told that anything may have changed.
const NEWS_MAX: usize = 4_096;
/// An image that was not confirmed for so long is not brought up to date: the commits that would be
/// needed may have been thrown away.
const LAG_MAX: Duration = Duration::from_secs(45);
/// What a remembered row costs beside its bytes.
const ROW_BYTES: usize = 96;

/// Remembered rows and the position at which they hold.
#[derive(Debug)]
pub(super) struct Rows {
    /// Rows that were used lately, and those before them; together at most `bytes_max`.
    young: HashMap<Arc<[u8]>, Value>,
    old: HashMap<Arc<[u8]>, Value>,
    young_bytes: usize,
    bytes_max: usize,
    /// Counts what happened to the image.
    clock: u64,
    changes: VecDeque<(u64, Change)>,
    /// Changes up to this count are forgotten.
    forgotten: u64,
    position: Position,
    news: Option<Changed>,
}

#[derive(Debug)]
enum Change {
    Key(Arc<[u8]>),
    Anything,
}

/// A place in the order of commits: all transactions before the horizon, and some after it.
#[derive(Debug)]
struct Position {
    /// `i64::MAX` until the server has said it for the first time, when nothing is remembered yet.
    horizon: i64,
    after: HashSet<i64>,
    /// When the server last answered, if it ever did.
    asked: Option<Instant>,
}

/// What a transaction has read.
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
            news: None,
        }
    }

    /// The count of changes so far.
    pub(super) fn clock(&self) -> u64 {
        self.clock
    }

    /// The transaction from which on the server has to be asked for commits.
    pub(super) fn horizon(&self) -> i64 {
        self.position.horizon
    }

    /// When the server last said what others have committed.
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

    /// Forgets rows that may be wrong.
    pub(super) fn forget_all<'k>(&mut self, keys: impl Iterator<Item = &'k [u8]>) {
        self.clock += 1;
        for key in keys {
            self.forget(key);
            self.note(Change::Key(key.into()));
        }
    }

    /// Forgets everything.
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

    /// Keys that have changed since `clock`; `None` when that may be any.
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

    /// Remembers what the server said; `changed` is what had changed since it was asked.
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

    /// A commit of this process: what it wrote holds from now on.
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

    /// Whether something that was read, from `clock` on, may be different now. `current` knows values
    /// that are not remembered here.
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

    /// Takes in what the server said: commits of others, by transaction, with the keys that they
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
                    self.news = Some(Changed::Anything);
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
        match self.news.get_or_insert_with(|| Changed::Records(Vec::new())) {
            Changed::Anything => {}
            Changed::Records(known) => {
                known.extend(records);
                if known.len() > NEWS_MAX {
                    self.news = Some(Changed::Anything);
                }
            }
        }
    }

    /// Everything that is remembered may be wrong, and others may have changed anything.
    pub(super) fn start_over(&mut self) {
        self.clear();
        self.news = Some(Changed::Anything);
    }

    /// The server is another one: also the order of commits begins anew.
    pub(super) fn begin_anew(&mut self) {
        self.start_over();
        self.position = Position { horizon: i64::MAX, after: HashSet::new(), asked: None };
    }

    /// What others have changed since the last call.
    pub(super) fn take_news(&mut self) -> Option<Changed> {
        self.news.take()
    }
}

fn row_bytes(key_len: usize, value: &Value) -> usize {
    ROW_BYTES + key_len + value.as_ref().map_or(0, |value| value.len())
}
