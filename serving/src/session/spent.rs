//! What a run costs. Where the thread that runs does all of it, that is what it had of the processor: who else had
//! the processor meanwhile is not the run's doing, and takes more from long runs than from short ones.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// What a run has spent since it began.
#[derive(Debug)]
pub(super) struct Spent {
    began: Option<Duration>,
}

impl Spent {
    /// Begins, where what this thread has of the processor is to be measured: the kernel is asked, which takes a
    /// part of a microsecond.
    pub(super) fn begin(is_measured: bool) -> Spent {
        Spent { began: is_measured.then(of_thread).flatten() }
    }

    /// What this thread has had of the processor since; `None` where it was not measured.
    pub(super) fn so_far(&self) -> Option<Duration> {
        let began = self.began?;
        of_thread()?.checked_sub(began)
    }
}

fn of_thread() -> Option<Duration> {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).ok().map(Duration::from)
}

/// What the process has had of the processor so far.
pub(super) fn of_process() -> Option<Duration> {
    clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).ok().map(Duration::from)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::Instant;

    use super::*;

    #[test]
    fn a_thread_that_works_spends_and_one_that_waits_does_not() {
        let (began, working) = (Instant::now(), Spent::begin(true));
        let work = (0..1_000_000_u64).fold(0, |sum, number| std::hint::black_box(sum ^ number));
        let spent = working.so_far().unwrap();
        assert!(spent > Duration::ZERO && spent <= began.elapsed(), "{spent:?} {work}");
        let waiting = Spent::begin(true);
        // Another thread works, which this one waits for.
        let worked = std::thread::spawn(|| {
            let working = Spent::begin(true);
            while working.so_far().unwrap() < Duration::from_millis(50) {
                std::hint::spin_loop();
            }
        });
        worked.join().unwrap();
        assert!(waiting.so_far().unwrap() < Duration::from_millis(25));
        assert_eq!(Spent::begin(false).so_far(), None);
    }
}
