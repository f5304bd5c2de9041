//! Durability by shared flushes: one flush of the server's log serves all callers that wait for one.

use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::Shared;
use super::fault::Fault;
use super::pool::block_on;
use super::schema;
use crate::error::Result;
use crate::metrics;

/// State of the flushes, and their waiters.
#[derive(Debug, Default)]
pub(super) struct Flush {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    running: bool,
    started: u64,
    /// Number of the newest successful flush, among the started ones.
    finished: u64,
}

impl Shared {
    /// Makes every commit durable that was finished before the call.
    pub(super) fn flush(&self) -> Result<()> {
        self.flush_by(self.pool.deadline()).map_err(|fault| self.error(fault))
    }

    /// [`Shared::flush`] with a deadline.
    pub(super) fn flush_by(&self, deadline: Instant) -> std::result::Result<(), Fault> {
        let mut state = self.flush.state.lock();
        // A running flush may have begun before the commits of this caller.
        let needed = state.started + 1;
        loop {
            if state.finished >= needed {
                return Ok(());
            }
            if state.running {
                if self.flush.ended.wait_until(&mut state, deadline).timed_out() {
                    return Err(Fault::TakenBack("another flush has not ended".into()));
                }
                continue;
            }
            state.running = true;
            state.started += 1;
            let this = state.started;
            drop(state);
            let newest = self.state.lock().kept.last();
            let running = Running(&self.flush);
            let result = self
                .pool
                .repeat(deadline, |link, until| block_on(link.client.batch_execute(schema::flush()), until));
            if result.is_ok() {
                self.state.lock().kept.flushed(newest);
            }
            state = self.flush.state.lock();
            if result.is_ok() {
                metrics::METADATA_SYNCS.inc();
                state.finished = state.finished.max(this);
            }
            drop(state);
            drop(running);
            result?;
            state = self.flush.state.lock();
        }
    }
}

/// Ends a flush, also when its thread panics.
struct Running<'a>(&'a Flush);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.state.lock().running = false;
        self.0.ended.notify_all();
    }
}
