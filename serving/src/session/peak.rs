//! Release of GPU memory after peaks of load.
//!
//! On a GPU, a session keeps the memory of its runs in an arena, because allocations on the device are slow. Only a run
//! can make the arena release what is free after it. When the runs of a session have become far smaller, an idle session
//! runs one row of zeros for that purpose. On the processor there is no arena, and the allocator returns unused memory.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::oneshot;

use super::batch::Lease;
use super::scheduler::Scheduler;
use super::values::release;
use crate::error::InferError;
use crate::tensor::Tensor;

/// Time between two checks: as long as the allocator of the processor keeps unused memory.
const PERIOD: Duration = Duration::from_secs(10);
/// A peak is over when runs were smaller by this factor for a period. Allocating the memory again costs some hundred
/// microseconds.
const SMALLER: usize = 2;

/// Sizes of a session's runs, in elements of their inputs.
#[derive(Debug, Default)]
pub(super) struct Peak {
    /// The first run, which is one row of zeros.
    least: usize,
    /// The largest since memory was released.
    most: usize,
    /// The largest since the last check.
    lately: usize,
    /// A peak is over, and its memory is not released yet.
    is_over: bool,
}

impl Peak {
    /// Notes the start of a run with so many elements of inputs.
    pub(super) fn runs(&mut self, elements: usize) {
        if self.least == 0 {
            self.least = elements;
        }
        self.most = self.most.max(elements);
        self.lately = self.lately.max(elements);
    }

    /// Checks for a peak that is over, once in a period.
    fn look(&mut self) {
        let lately = std::mem::take(&mut self.lately).max(self.least);
        if self.most / SMALLER > lately {
            self.most = lately;
            self.is_over = true;
        }
    }

    /// Whether memory is to be released, which the caller does.
    fn ends(&mut self) -> bool {
        std::mem::take(&mut self.is_over)
    }
}

/// Shrinks the arenas of a version's sessions after peaks, until the version is gone. `arenas` are the names of its
/// devices, `row` is one row of zeros. Without a Tokio runtime nothing is shrunk.
pub(super) fn shrink_periodically(scheduler: &Arc<Scheduler>, arenas: Vec<String>, row: Vec<Tensor>) {
    let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
    let scheduler = Arc::downgrade(scheduler);
    let (arenas, row) = (Arc::from(arenas), Arc::from(row));
    runtime.spawn(async move {
        loop {
            tokio::time::sleep(PERIOD).await;
            match shrink(&scheduler, &arenas, &row).await {
                None => return,
                Some(Ok(0)) => {}
                Some(Ok(sessions)) => tracing::debug!(sessions, "sessions released the memory of a peak"),
                Some(Err(error)) => {
                    tracing::warn!(%error, "device memory of peaks stays in use until the version is unloaded");
                    return;
                }
            }
        }
    });
}

/// Shrinks the arena of each idle session whose peak is over; the number of such sessions. `None` when the version is
/// gone.
pub(super) async fn shrink(
    scheduler: &Weak<Scheduler>,
    arenas: &Arc<[String]>,
    row: &Arc<[Tensor]>,
) -> Option<Result<usize, InferError>> {
    let mut shrunk = 0;
    scheduler.upgrade()?.state.lock().idle.iter_mut().for_each(|session| session.peak.look());
    loop {
        // One after the other: the others stay available to requests.
        let scheduler = scheduler.upgrade()?;
        let idle = scheduler.state.lock().idle.take_if(|session| session.peak.ends());
        let Some(session) = idle else { return Some(Ok(shrunk)) };
        let mut lease = Lease::new(&scheduler, session);
        let (arenas, row) = (Arc::clone(arenas), Arc::clone(row));
        let (done, released) = oneshot::channel();
        scheduler.execute(Box::new(move || {
            let result = lease.session().and_then(|session| {
                let arena = arenas.get(session.place).map_or("", String::as_str);
                release(session, &row, arena)
            });
            drop(lease);
            // Fails when the runtime shuts down, and nothing follows.
            let _ = done.send(result);
        }));
        match released.await.unwrap_or_else(|_| Err(InferError::internal("the run ended without a result"))) {
            Ok(()) => shrunk += 1,
            Err(error) => return Some(Err(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_over(peak: &mut Peak) -> bool {
        peak.look();
        peak.ends()
    }

    #[test]
    fn a_peak_is_over_when_runs_were_far_smaller_for_a_period() {
        let mut peak = Peak::default();
        assert!(!is_over(&mut peak), "nothing has run");
        peak.runs(10);
        assert!(!is_over(&mut peak) && !is_over(&mut peak), "one row is no peak");
        peak.runs(1000);
        peak.runs(10);
        assert!(!is_over(&mut peak), "it was in this period");
        peak.runs(600);
        assert!(!is_over(&mut peak), "what was taken is used again");
        peak.runs(400);
        assert!(is_over(&mut peak));
        peak.runs(400);
        assert!(!is_over(&mut peak), "it was given back, and 400 is the most now");
        peak.runs(10);
        peak.runs(10);
        assert!(is_over(&mut peak) && !is_over(&mut peak));
    }

    #[test]
    fn a_session_in_use_gives_back_later() {
        let mut peak = Peak::default();
        peak.runs(1);
        peak.runs(1000);
        peak.look();
        peak.look();
        peak.runs(1000);
        assert!(peak.ends() && !peak.ends());
    }
}
