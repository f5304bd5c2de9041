//! Memory of GPUs that a peak of load took and that runs do not need any more.
//!
//! On a GPU a session keeps what its runs have taken in an arena, since the device is slow to give memory; only a run can
//! have the arena give back what is free after it. So when its runs have become far smaller, a session that is free runs
//! a row of zeros for that. On the processor there is no arena, and the allocator gives back what is not used.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::background;
use super::handover::Shared;
use super::lease::Lease;
use super::values::release;
use crate::error::InferError;
use crate::tensor::Tensor;

/// How often is looked for peaks that are over: as long as the allocator of the processor's memory keeps what is not used.
const PERIOD: Duration = Duration::from_secs(10);
/// A peak is over when runs were smaller by this factor for a period. What is given back has to be taken again when
/// they become larger, which costs some hundred microseconds.
const SMALLER: usize = 2;

/// What runs of a session have taken in, in elements of inputs.
#[derive(Debug, Default)]
pub(super) struct Peak {
    /// The first one, which is one row of zeros.
    least: usize,
    /// The largest since memory was given back.
    most: usize,
    /// The largest since peaks were looked for.
    lately: usize,
    /// There was a peak that is over.
    is_over: bool,
}

impl Peak {
    /// Notes a run that begins, of so many elements of inputs.
    pub(super) fn runs(&mut self, elements: usize) {
        if self.least == 0 {
            self.least = elements;
        }
        self.most = self.most.max(elements);
        self.lately = self.lately.max(elements);
    }

    /// Looks whether there was a peak that is over, once in a period.
    fn look(&mut self) {
        let lately = std::mem::take(&mut self.lately).max(self.least);
        if self.most / SMALLER > lately {
            self.most = lately;
            self.is_over = true;
        }
    }

    /// Whether memory is to be given back, which is up to whoever asks.
    fn ends(&mut self) -> bool {
        std::mem::take(&mut self.is_over)
    }
}

/// Has the sessions of a version give back what peaks took, from now until it is gone. `arenas` are those of its
/// devices, `row` a row of zeros. Without a runtime of tasks nothing is given back.
pub(super) fn end_from_time_to_time(shared: &Arc<Shared>, arenas: Vec<String>, row: Vec<Tensor>) {
    let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
    let shared = Arc::downgrade(shared);
    let (arenas, row) = (Arc::from(arenas), Arc::from(row));
    runtime.spawn(async move {
        loop {
            tokio::time::sleep(PERIOD).await;
            match end(&shared, &arenas, &row).await {
                None => return,
                Some(Ok(0)) => {}
                Some(Ok(sessions)) => tracing::debug!(sessions, "memory of a peak of load was given back"),
                Some(Err(error)) => {
                    tracing::warn!(%error, "what peaks of load take on the device stays until the version is unloaded");
                    return;
                }
            }
        }
    });
}

/// Has each session that is free and had a peak that is over give back what it took; how many there were. `None` when
/// the version is gone.
pub(super) async fn end(
    shared: &Weak<Shared>,
    arenas: &Arc<[String]>,
    row: &Arc<[Tensor]>,
) -> Option<Result<usize, InferError>> {
    let mut ended = 0;
    shared.upgrade()?.state.lock().free.iter_mut().for_each(|session| session.peak.look());
    loop {
        // One after the other: the others are free for requests meanwhile.
        let shared = shared.upgrade()?;
        let free = shared.state.lock().free.take_if(|session| session.peak.ends());
        let Some(session) = free else { return Some(Ok(ended)) };
        let mut lease = Lease::new(&shared, session);
        let (arenas, row) = (Arc::clone(arenas), Arc::clone(row));
        let run = move || {
            let session =
                lease.session.as_mut().ok_or_else(|| InferError::internal("the session is gone"))?;
            let arena = arenas.get(session.place).map_or("", String::as_str);
            release(session, &row, arena)
        };
        if let Err(error) = background::run(&shared.account, shared.run_micros(), 1, run).await {
            return Some(Err(error));
        }
        ended += 1;
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
