//! The time for which the volumes have not answered, and the patience of an operation with them.
//!
//! Only time in which the process runs and tries counts. A process that was suspended (SIGSTOP, a machine that sleeps)
//! has not tried meanwhile, so its next attempt may well succeed.
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::lease::boot_time;

/// Interval at which the time of an operation that fails is counted.
const TICK: Duration = Duration::from_millis(100);

/// How long the volumes have not answered, for any thread.
#[derive(Debug, Default)]
pub(crate) struct Outage {
    /// Milliseconds since the first failure; 0 while they answer.
    tried_ms: AtomicU64,
}

impl Outage {
    /// Zero while the volumes answer.
    pub(crate) fn elapsed(&self) -> Duration {
        Duration::from_millis(self.tried_ms.load(Ordering::Relaxed))
    }

    /// The volumes have answered; gives whether they had not before.
    pub(crate) fn clear(&self) -> bool {
        self.tried_ms.swap(0, Ordering::Relaxed) > 0
    }

    /// The volumes have not answered an operation. No time is counted before the next one tries.
    pub(crate) fn begin(&self) {
        self.tried_ms.fetch_max(1, Ordering::Relaxed);
    }

    /// Counts the time since the last tick. A longer time means that this process did not run.
    fn tick(&self, passed: Duration) {
        self.tried_ms.fetch_add(passed.min(2 * TICK).as_millis() as u64, Ordering::Relaxed);
    }
}

/// The attempts at one operation. The time from its first failure until it is dropped counts.
#[derive(Debug)]
pub(crate) struct Attempts {
    outage: Arc<Outage>,
    failing: Option<(Duration, Ticker)>,
}

impl Attempts {
    pub(crate) fn new(outage: &Arc<Outage>) -> Attempts {
        Attempts { outage: Arc::clone(outage), failing: None }
    }

    /// Notes that an attempt has failed; gives for how long this operation fails.
    pub(crate) fn failed(&mut self) -> Result<Duration> {
        if let Some((before, _)) = &self.failing {
            return Ok(self.outage.elapsed().saturating_sub(*before));
        }
        let ticker = Ticker::start(&self.outage)?;
        self.outage.begin();
        self.failing = Some((self.outage.elapsed(), ticker));
        Ok(Duration::ZERO)
    }
}

/// A thread that counts the time of an outage.
#[derive(Debug)]
struct Ticker {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Ticker {
    fn start(outage: &Arc<Outage>) -> Result<Ticker> {
        let (stop, stopped) = mpsc::channel();
        let outage = Arc::clone(outage);
        let thread = std::thread::Builder::new()
            .name("outage".to_owned())
            .spawn(move || {
                let mut ticked = boot_time();
                while stopped.recv_timeout(TICK) == Err(mpsc::RecvTimeoutError::Timeout) {
                    let now = boot_time();
                    outage.tick(now.saturating_sub(ticked));
                    ticked = now;
                }
            })
            .map_err(|e| Error::io("start a thread for the time of an outage", e))?;
        Ok(Ticker { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Ticker {
    /// Waits for the thread, so that none of its time is counted after the outage.
    fn drop(&mut self) {
        drop(self.stop.take());
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that counts the time of an outage has panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_suspension_counts_as_two_ticks() {
        let outage = Outage::default();
        outage.tick(TICK / 2);
        outage.tick(Duration::from_secs(3_600));
        assert_eq!(outage.elapsed(), TICK / 2 + 2 * TICK);
        assert!(outage.clear() && !outage.clear());
    }

    #[test]
    fn time_counts_from_the_first_failure_of_each_operation_until_its_end() {
        let outage = Arc::new(Outage::default());
        let mut first = Attempts::new(&outage);
        assert!(outage.elapsed().is_zero());
        assert_eq!(first.failed().unwrap(), Duration::ZERO);
        assert!(!outage.elapsed().is_zero());
        outage.tick(TICK);
        assert!(first.failed().unwrap() >= TICK);
        drop(first);
        let between = outage.elapsed();
        assert!(between > TICK, "the outage outlasts the operation");
        let mut second = Attempts::new(&outage);
        assert_eq!(second.failed().unwrap(), Duration::ZERO);
        assert!(outage.elapsed() >= between, "the outage goes on");
    }
}
