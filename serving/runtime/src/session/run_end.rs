//! Early end of runs whose callers have all gone.
//!
//! The time of a run may depend on the values of a request, for example the trip count of a `Loop`. Without an early
//! end, clients that hang up would leave runs that occupy sessions and inference threads. Dropping a call closes the
//! channel of its result, which wakes the [`RunEnd`] of the run. ONNX Runtime checks the termination flag between two
//! nodes, including the nodes of subgraphs. Runs on I/O threads have no early end: they are known to be short.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Wake, Waker};

use ort::session::RunOptions;
use parking_lot::Mutex;
use tokio::task::coop::unconstrained;

use super::queue::Job;
use millrace_serving_core::error::{InferError, one_line};

/// Ends a run as soon as the last of its callers has gone.
pub(super) struct RunEnd {
    state: Mutex<RunState>,
}

struct RunState {
    /// Callers that wait for the result.
    callers: usize,
    /// Options of the run in progress.
    options: Option<Arc<RunOptions>>,
}

impl RunEnd {
    /// Watches the callers of requests that are about to run together.
    pub(super) fn for_jobs(jobs: &mut [Job]) -> Arc<RunEnd> {
        let state = RunState { callers: jobs.len(), options: None };
        let end = Arc::new(RunEnd { state: Mutex::new(state) });
        let waker = Waker::from(Arc::clone(&end));
        let mut context = Context::from_waker(&waker);
        for job in jobs {
            // A closed channel is ready now or wakes later, never both. Unconstrained, the channel does not wake for
            // any other reason.
            let closed = pin!(unconstrained(poll_fn(|context| job.reply.poll_closed(context))));
            if closed.poll(&mut context).is_ready() {
                end.remove_caller();
            }
        }
        end
    }

    /// Whether all callers have gone.
    pub(super) fn is_ended(&self) -> bool {
        self.state.lock().callers == 0
    }

    /// Options for the run, through which this ends it.
    ///
    /// # Errors
    /// [`InferError::Internal`] when all callers have gone already, or ONNX Runtime cannot create options.
    pub(super) fn options(&self) -> Result<Arc<RunOptions>, InferError> {
        let mut state = self.state.lock();
        if state.callers == 0 {
            return Err(InferError::internal("all callers of the run have disconnected"));
        }
        let options = RunOptions::new()
            .map_err(|error| InferError::internal(format!("ONNX Runtime: {}", one_line(&error))))?;
        let options = Arc::new(options);
        state.options = Some(Arc::clone(&options));
        Ok(options)
    }

    /// Records that a caller has gone; ends the run after the last one.
    fn remove_caller(&self) {
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
            tracing::warn!(%error, "cannot end a run whose callers have disconnected");
        }
    }
}

impl Wake for RunEnd {
    fn wake(self: Arc<Self>) {
        self.remove_caller();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.remove_caller();
    }
}
