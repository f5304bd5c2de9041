//! Which of two ways of doing the same takes less of the processor, found out by trying both in turn.
//!
//! Windows of so many rows are measured by what the whole process has had of the processor. Now and then one window goes
//! the other way, between two that go the usual one: what the machine's state or other work adds is in all three, so
//! that only the ways make a difference. The other way becomes the usual one when it was cheaper some times more often
//! than not.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

/// Rows of a window.
const WINDOW_ROWS: usize = 2048;
/// Windows between two comparisons, where the last one was not for the other way.
const REST_WINDOWS: usize = 29;
/// The other way has to be cheaper by this part of the usual one's cost, or the difference is taken for chance.
const CHEAPER_PART: u64 = 32;
/// Comparisons by which those for the other way have to be more than those against it.
const VOTES: usize = 3;

/// Two ways, and which of them is the usual one: the first in the beginning.
#[derive(Debug, Default)]
pub(super) struct Thrift {
    /// Whether it is the second way's turn.
    second: AtomicBool,
    /// Rows of this window so far. What others count while one ends it is lost: a few rows, of both ways alike.
    rows: AtomicUsize,
    windows: Mutex<Windows>,
}

#[derive(Debug, Default)]
struct Windows {
    /// What the process had had when the window began; `None` where that one is not measured.
    began: Option<Duration>,
    /// Whether the second way is the usual one.
    is_second_usual: bool,
    /// Windows before the next comparison.
    rest: usize,
    /// What the windows of this comparison have cost, in nanoseconds for a row: up to three.
    costs: Vec<u64>,
    /// Comparisons for the other way, less those against it.
    votes: usize,
}

impl Thrift {
    /// Whether to go the first way.
    pub(super) fn is_first(&self) -> bool {
        !self.second.load(Ordering::Relaxed)
    }

    /// Counts rows that were served. `spent` says what the process has had of the processor so far, or nothing when that
    /// tells nothing of these rows.
    pub(super) fn served(&self, rows: usize, spent: impl FnOnce() -> Option<Duration>) {
        let before = self.rows.fetch_add(rows, Ordering::Relaxed);
        if before < WINDOW_ROWS && before.saturating_add(rows) >= WINDOW_ROWS {
            let second = self.windows.lock().next(before.saturating_add(rows), spent());
            self.second.store(second, Ordering::Relaxed);
            self.rows.store(0, Ordering::Relaxed);
        }
    }
}

impl Windows {
    /// Ends a window of so many rows; whether the next one goes the second way.
    fn next(&mut self, rows: usize, spent: Option<Duration>) -> bool {
        let began = std::mem::replace(&mut self.began, spent);
        let cost = spent.zip(began).and_then(|(spent, began)| spent.checked_sub(began));
        match cost {
            None => self.costs.clear(),
            Some(_) if self.rest > 0 => self.rest -= 1,
            Some(cost) => {
                let nanos = u64::try_from(cost.as_nanos()).unwrap_or(u64::MAX);
                self.costs.push(nanos / rows.max(1) as u64);
            }
        }
        if let [before, other, after] = *self.costs {
            self.costs.clear();
            self.vote(other, before / 2 + after / 2);
        }
        self.is_second_usual != (self.costs.len() == 1)
    }

    fn vote(&mut self, other: u64, usual: u64) {
        if other < usual - usual / CHEAPER_PART {
            self.votes += 1;
        } else {
            self.votes = self.votes.saturating_sub(1);
        }
        if self.votes == VOTES {
            self.votes = 0;
            self.is_second_usual = !self.is_second_usual;
        }
        self.rest = if self.votes > 0 { 0 } else { REST_WINDOWS };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the ways take for a row in a window, and how many of so many windows went the second way.
    fn seconds(thrift: &Thrift, windows: usize, nanos: impl Fn(usize) -> [u64; 2]) -> usize {
        let mut spent = 0;
        (0..windows)
            .filter(|window| {
                let second = !thrift.is_first();
                spent += 1_000_000 + nanos(*window)[usize::from(second)] * WINDOW_ROWS as u64;
                for _ in 0..WINDOW_ROWS / 4 {
                    thrift.served(4, || Some(Duration::from_nanos(spent)));
                }
                second
            })
            .count()
    }

    #[test]
    fn the_cheaper_way_is_gone_but_for_trials() {
        let thrift = Thrift::default();
        assert!(seconds(&thrift, 320, |_| [10_000, 12_000]) <= 10, "it begins with the cheaper one");
        assert!(
            seconds(&thrift, 320, |_| [12_000, 10_000]) >= 250,
            "and goes the other when that is cheaper"
        );
        assert!(seconds(&thrift, 320, |_| [12_000, 10_000]) >= 310);
        assert!(seconds(&thrift, 320, |_| [10_000, 12_000]) <= 70, "and back");
    }

    #[test]
    fn what_changes_for_both_changes_nothing() {
        let thrift = Thrift::default();
        let slow = |window: usize| 1 + window as u64 / 50 % 2;
        assert!(seconds(&thrift, 640, |window| [10_000, 10_500].map(|nanos| nanos * slow(window))) <= 30);
    }

    #[test]
    fn ways_that_take_the_same_do_not_take_turns() {
        let thrift = Thrift::default();
        assert!(seconds(&thrift, 640, |_| [10_000, 10_000]) <= 20);
    }

    #[test]
    fn what_cannot_be_measured_goes_the_usual_way() {
        let thrift = Thrift::default();
        for _ in 0..100 {
            thrift.served(WINDOW_ROWS, || None);
            assert!(thrift.is_first());
        }
        thrift.served(usize::MAX, || Some(Duration::ZERO));
        thrift.served(WINDOW_ROWS, || Some(Duration::MAX));
        assert!(!thrift.is_first(), "a trial");
    }
}
