//! Early end of runs whose callers have all gone.
//!
//! The time of a run may depend on the values of a request, as with the trip count of a `Loop`. Without an end, clients
//! that hang up would leave runs behind that occupy sessions and inference threads. A call that is dropped closes the
//! channel of its result, which wakes the [`RunEnd`] of the run. ONNX Runtime checks between two nodes, also those of
//! inner graphs, whether a run is to end. Runs on I/O threads have no such end: they are known to be short.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Wake, Waker};

use ort::session::RunOptions;
use parking_lot::Mutex;
use tokio::task::coop::unconstrained;

use super::queue::Job;
use crate::error::{InferError, one_line};

/// Ends a run as soon as the last of its callers has gone.
pub(super) struct RunEnd {
    state: Mutex<State>,
}

struct State {
    /// Callers that wait for the result.
    callers: usize,
    /// Options of the run in progress.
    options: Option<Arc<RunOptions>>,
}

impl RunEnd {
    /// Watches the callers of requests that are about to run together.
    pub(super) fn watching(jobs: &mut [Job]) -> Arc<RunEnd> {
        let state = State { callers: jobs.len(), options: None };
        let end = Arc::new(RunEnd { state: Mutex::new(state) });
        let waker = Waker::from(Arc::clone(&end));
        let mut context = Context::from_waker(&waker);
        for job in jobs {
            // A channel that is closed says so now, or wakes later: never both. Unconstrained, as it wakes for no other
            // reason then.
            let closed = pin!(unconstrained(poll_fn(|context| job.reply.poll_closed(context))));
            if closed.poll(&mut context).is_ready() {
                end.leave();
            }
        }
        end
    }

    /// Whether all callers have gone.
    pub(super) fn is_ended(&self) -> bool {
        self.state.lock().callers == 0
    }

    /// Options for the run, by which it is ended.
    ///
    /// # Errors
    /// [`InferError::Internal`] when all callers have gone already, or ONNX Runtime makes no options.
    pub(super) fn options(&self) -> Result<Arc<RunOptions>, InferError> {
        let mut state = self.state.lock();
        if state.callers == 0 {
            return Err(InferError::internal("all callers of the run have gone"));
        }
        let options = RunOptions::new()
            .map_err(|error| InferError::internal(format!("ONNX Runtime: {}", one_line(&error))))?;
        let options = Arc::new(options);
        state.options = Some(Arc::clone(&options));
        Ok(options)
    }

    /// Notes that a caller has gone.
    fn leave(&self) {
        let options = {
            let mut state = self.state.lock();
            state.callers = state.callers.saturating_sub(1);
            if state.callers > 0 {
                return;
            }
            state.options.take()
        };
        if let Some(options) = options
            && let Err(error) = options.terminate()
        {
            tracing::warn!(%error, "a run whose callers have gone cannot be ended");
        }
    }
}

impl Wake for RunEnd {
    fn wake(self: Arc<Self>) {
        self.leave();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.leave();
    }
}
