//! Admission control by deadline for the request queue of a model version.
//!
//! The scheduler refuses a request at once if it cannot start in time. Its client can then ask another replica, and
//! the server spends no time on it. After a refusal the server sheds load: it keeps the queue short until the queue
//! has been empty. A queue that does not become empty is overload, not a burst (as in CoDel: Nichols, Jacobson,
//! 2012). A burst that the server can serve in time is admitted.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::queue::RequestQueue;
use super::run_time::MedianEstimate;
use super::work::Work;
use millrace_serving_core::error::InferError;

/// Least time of load shedding after a request that could not start in time.
const SHED_MIN: Duration = Duration::from_secs(1);
/// While shedding load, a request may queue for at most 1/6 of its remaining time.
const SHED_PART: u32 = 6;
/// While shedding load, the queue may still hold this number of full batches for each session.
const SHED_BATCHES_MIN: u64 = 2;

/// Admission control of one model version.
#[derive(Debug)]
pub(super) struct AdmissionControl {
    /// Nanoseconds of session time for one row of requests that waited; a request without rows counts as one row.
    row_nanos: MedianEstimate,
    sessions: u64,
    /// Rows that the queue may always hold while the server sheds load.
    shed_rows_min: u64,
    /// Earliest end of load shedding; set while the server sheds load.
    shedding: Mutex<Option<Instant>>,
}

impl AdmissionControl {
    /// For `sessions` sessions that run batches of up to `rows_max` rows.
    pub(super) fn new(sessions: usize, rows_max: usize) -> AdmissionControl {
        let sessions = sessions.max(1) as u64;
        let rows = SHED_BATCHES_MIN.saturating_mul(sessions).saturating_mul(rows_max.max(1) as u64);
        AdmissionControl {
            row_nanos: MedianEstimate::default(),
            sessions,
            shed_rows_min: rows,
            shedding: Mutex::new(None),
        }
    }

    /// Records how long a batch of `rows` rows that had to wait occupied a session.
    pub(super) fn record(&self, rows: usize, elapsed: Duration) {
        self.row_nanos.record(elapsed.as_nanos() / rows.max(1) as u128);
    }

    /// Estimated time to serve `rows` rows.
    fn wait(&self, rows: u64) -> Duration {
        Duration::from_nanos(rows.saturating_mul(self.row_nanos.get() as u64) / self.sessions)
    }

    /// Refuses a request with a deadline that would wait too long. Requests that arrive later and run before it, and
    /// runs in progress, do not count. An empty queue admits every request, so that a wrong estimate corrects itself.
    ///
    /// # Errors
    /// [`InferError::Overloaded`].
    pub(super) fn check(&self, queue: &RequestQueue, work: &Work, now: Instant) -> Result<(), InferError> {
        let Some(deadline) = work.deadline else { return Ok(()) };
        let left = deadline.saturating_duration_since(now);
        if queue.is_empty() {
            let mut shedding = self.shedding.lock();
            *shedding = shedding.filter(|until| now < *until);
        }
        let short = (left / SHED_PART).max(self.wait(self.shed_rows_min)).min(left);
        if self.wait(queue.rows()) <= short {
            return Ok(());
        }
        let wait = self.wait(queue.rows_before(work));
        let mut shedding = self.shedding.lock();
        if wait > left {
            *shedding = now.checked_add(SHED_MIN);
        }
        let allowed = if shedding.is_some() { short } else { left };
        if wait <= allowed {
            return Ok(());
        }
        Err(InferError::Overloaded {
            reason: format!(
                "the model is overloaded: the estimated wait of {} ms exceeds {} ms; ask another replica",
                wait.as_millis(),
                allowed.as_millis()
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::queue::{Job, QueueLimits};
    use super::super::work::tests::work;
    use super::*;

    const UNLIMITED: QueueLimits = QueueLimits { requests_max: usize::MAX, bytes_max: usize::MAX };

    /// A request whose deadline is `millis` milliseconds after `now`.
    fn within(millis: Option<u64>, now: Instant) -> Work {
        Work { deadline: millis.map(|millis| now + Duration::from_millis(millis)), ..work(1, 1, &[0], 0) }
    }

    /// A queue of `rows` rows.
    fn queue(rows: usize) -> RequestQueue {
        let mut queue = RequestQueue::default();
        for at in 0..rows {
            queue.push(Job::new(work(1, 1, &[0], at as u64), true).0, UNLIMITED).unwrap();
        }
        queue
    }

    #[test]
    fn request_that_cannot_start_in_time_is_refused_and_the_queue_is_kept_short() {
        let admission = AdmissionControl::new(2, 1);
        let begin = Instant::now();
        let check = |rows: usize, millis: Option<u64>, after: Duration| {
            let now = begin + after;
            admission.check(&queue(rows), &within(millis, now), now)
        };
        assert!(check(1000, Some(0), Duration::ZERO).is_ok(), "the run time is unknown");
        // Two sessions, 2 ms a row.
        admission.record(8, Duration::from_millis(16));
        assert!(check(1000, None, Duration::ZERO).is_ok(), "it has no deadline");
        assert!(check(0, Some(0), Duration::ZERO).is_ok(), "the queue is empty");
        assert!(check(40, Some(40), Duration::ZERO).is_ok(), "it starts in time");
        let refused = check(41, Some(40), Duration::ZERO).unwrap_err().to_string();
        assert!(refused.contains("wait of 41 ms exceeds 6 ms"), "{refused}");
        let soon = SHED_MIN - Duration::from_millis(1);
        assert!(check(40, Some(40), soon).is_err(), "the server sheds load");
        assert!(check(6, Some(40), soon).is_ok());
        assert!(check(7, Some(40), soon).is_err());
        assert!(check(0, Some(40), soon).is_ok());
        assert!(check(40, Some(40), soon).is_err(), "for the least time");
        assert!(check(40, Some(40), SHED_MIN).is_err(), "and until the queue is empty");
        assert!(check(0, Some(40), SHED_MIN).is_ok());
        assert!(check(40, Some(40), SHED_MIN).is_ok(), "the overload is over");
    }

    #[test]
    fn full_batches_are_admitted_while_load_is_shed() {
        let now = Instant::now();
        // Two sessions, 2 ms a row, batches of four.
        for (rows, millis, is_admitted) in [(16, 40, true), (17, 40, false), (16, 15, false), (15, 15, true)]
        {
            let admission = AdmissionControl::new(2, 4);
            admission.record(8, Duration::from_millis(16));
            admission.check(&queue(100), &within(Some(40), now), now).unwrap_err();
            let checked = admission.check(&queue(rows), &within(Some(millis), now), now);
            assert_eq!(checked.is_ok(), is_admitted, "{rows} rows, {millis} ms");
        }
    }

    #[test]
    fn request_of_a_higher_level_does_not_wait_for_lower_ones() {
        let admission = AdmissionControl::new(1, 1);
        let now = Instant::now();
        admission.record(1, Duration::from_millis(1));
        let queue = queue(50);
        assert!(admission.check(&queue, &within(Some(10), now), now).is_err());
        assert!(admission.check(&queue, &Work { level: 0, ..within(Some(10), now) }, now).is_ok());
    }
}
