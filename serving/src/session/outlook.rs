//! Whether a request that comes can begin in time.
//!
//! One that cannot hears so at once, so that it can go to another server; it neither takes the room of others nor
//! the time of the server, which under too much load has none to give away. After that the line is kept short until it
//! has been empty: who is served does not profit from having waited long, and what has waited long is out of the
//! caches when its turn comes. A line that does not become empty is too much load, not a burst (as in CoDel: Nichols,
//! Jacobson, 2012); a burst that all can wait for is served.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::line::{Line, Work};
use super::typical::Typical;
use crate::error::InferError;

/// How long the line is kept short at least once a request came that could not begin in time.
const SHORT_FOR: Duration = Duration::from_secs(1);
/// Of the time within which a request must begin, the part for which it may wait meanwhile.
const SHORT_PART: u32 = 6;
/// A short line has full runs for each session nevertheless, so many one after the other.
const RUNS_MIN: u64 = 2;

/// How long those of one model version wait.
#[derive(Debug)]
pub(super) struct Outlook {
    /// For how long a row of the line has a session, in nanoseconds; a request without rows counts as one.
    row_nanos: Typical,
    /// How many runs there are at a time.
    sessions: u64,
    /// How many rows the line has at least when it is short.
    rows_min: u64,
    /// Until when the line is kept short at least, where it is.
    short_until: Mutex<Option<Instant>>,
}

impl Outlook {
    /// For so many sessions, of which each runs so many rows at a time.
    pub(super) fn new(sessions: usize, rows_max: usize) -> Outlook {
        let sessions = sessions.max(1) as u64;
        let rows_min = RUNS_MIN.saturating_mul(sessions).saturating_mul(rows_max.max(1) as u64);
        Outlook { row_nanos: Typical::default(), sessions, rows_min, short_until: Mutex::new(None) }
    }

    /// Notes for how long requests of so many rows had a session that came from the line.
    pub(super) fn ran(&self, rows: usize, elapsed: Duration) {
        self.row_nanos.note(elapsed.as_nanos() / rows.max(1) as u128);
    }

    #[cfg(test)]
    pub(super) fn row_nanos(&self) -> usize {
        self.row_nanos.get()
    }

    /// How long it takes to serve so many rows.
    fn wait(&self, rows: u64) -> Duration {
        Duration::from_nanos(rows.saturating_mul(self.row_nanos.get() as u64) / self.sessions)
    }

    /// Refuses a request that has a time within which it must begin when it had better not wait. Requests that come
    /// later and are served before it would only make it wait longer, and so do the runs under way, which do not count
    /// here: where nobody waits nobody is refused, so that one wrong estimate does not last.
    ///
    /// # Errors
    /// [`InferError::Overloaded`].
    pub(super) fn check(&self, line: &Line, work: &Work, now: Instant) -> Result<(), InferError> {
        let Some(deadline) = work.deadline else { return Ok(()) };
        let left = deadline.saturating_duration_since(now);
        if line.len() == 0 {
            let mut short_until = self.short_until.lock();
            *short_until = short_until.filter(|until| now < *until);
        }
        let short = (left / SHORT_PART).max(self.wait(self.rows_min)).min(left);
        if self.wait(line.rows()) <= short {
            return Ok(());
        }
        let wait = self.wait(line.rows_before(work));
        let mut short_until = self.short_until.lock();
        if wait > left {
            *short_until = now.checked_add(SHORT_FOR);
        }
        let allowed = if short_until.is_some() { short } else { left };
        if wait <= allowed {
            return Ok(());
        }
        // Short, and of few words that change, since under too much load nearly as many hear it as get an answer.
        Err(InferError::Overloaded {
            reason: format!(
                "more is asked of this model than it can answer: requests before this one take {} ms, it may wait {} ms",
                wait.as_millis(),
                allowed.as_millis()
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::line::{Job, Room};
    use super::*;

    const ROOM: Room = Room { requests_max: usize::MAX, bytes_max: usize::MAX };

    /// A request of so many rows that has to begin so many milliseconds after a time.
    fn work(rows: usize, begin: Instant, millis: Option<u64>) -> Work {
        Work {
            inputs: Vec::new(),
            outputs: vec![0],
            stays: Vec::new(),
            rows,
            queued: begin,
            deadline: millis.map(|millis| begin + Duration::from_millis(millis)),
            answer_by: None,
            level: 1,
            client: None,
            beside: false,
        }
    }

    /// A line of so many rows.
    fn line(rows: usize, begin: Instant) -> Line {
        let mut line = Line::default();
        for _ in 0..rows {
            line.admit(Job::new(work(1, begin, None)).0, ROOM).unwrap();
        }
        line
    }

    #[test]
    fn who_cannot_begin_in_time_hears_so_at_once_and_the_line_is_short_for_a_while() {
        let outlook = Outlook::new(2, 1);
        let begin = Instant::now();
        let check = |rows: usize, millis: Option<u64>, after: Duration| {
            let now = begin + after;
            outlook.check(&line(rows, now), &work(1, now, millis), now)
        };
        assert!(check(1000, Some(0), Duration::ZERO).is_ok(), "nobody knows how long a run takes");
        // Two at a time, of 2 ms a row.
        outlook.ran(8, Duration::from_millis(16));
        assert!(check(1000, None, Duration::ZERO).is_ok(), "it can wait for ever");
        assert!(check(0, Some(0), Duration::ZERO).is_ok(), "nobody waits");
        assert!(check(40, Some(40), Duration::ZERO).is_ok(), "all can begin in time");
        let refused = check(41, Some(40), Duration::ZERO).unwrap_err().to_string();
        assert!(refused.contains("take 41 ms") && refused.contains("wait 6 ms"), "{refused}");
        let soon = SHORT_FOR - Duration::from_millis(1);
        assert!(check(40, Some(40), soon).is_err(), "the line is short");
        assert!(check(6, Some(40), soon).is_ok());
        assert!(check(7, Some(40), soon).is_err());
        assert!(check(0, Some(40), soon).is_ok());
        assert!(check(40, Some(40), soon).is_err(), "it is so for a while at least");
        assert!(check(40, Some(40), SHORT_FOR).is_err(), "and until nobody waits");
        assert!(check(0, Some(40), SHORT_FOR).is_ok());
        assert!(check(40, Some(40), SHORT_FOR).is_ok(), "that is over");
    }

    #[test]
    fn a_short_line_has_full_runs() {
        let now = Instant::now();
        // Of 2 ms a row, which two sessions run by four.
        for (rows, millis, is_let_in) in [(16, 40, true), (17, 40, false), (16, 15, false), (15, 15, true)] {
            let outlook = Outlook::new(2, 4);
            outlook.ran(8, Duration::from_millis(16));
            outlook.check(&line(100, now), &work(1, now, Some(40)), now).unwrap_err();
            let checked = outlook.check(&line(rows, now), &work(1, now, Some(millis)), now);
            assert_eq!(checked.is_ok(), is_let_in, "{rows} rows, {millis} ms");
        }
    }

    #[test]
    fn who_is_served_first_does_not_wait_for_the_others() {
        let outlook = Outlook::new(1, 1);
        let now = Instant::now();
        outlook.ran(1, Duration::from_millis(1));
        let line = line(50, now);
        assert!(outlook.check(&line, &work(1, now, Some(10)), now).is_err());
        assert!(outlook.check(&line, &Work { level: 0, ..work(1, now, Some(10)) }, now).is_ok());
    }
}
