//! The watchdog of work that NCCL completes in the background: it polls, and decides when the communicator is aborted.
//!
//! NCCL waits for a missing rank without a limit, and does not tell its number.

use std::thread;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use crate::collective::Error;

/// Shortest and longest pause between two polls.
const PAUSE: Duration = Duration::from_micros(10);
const PAUSE_MAX: Duration = Duration::from_millis(1);
/// A pause is this part of the time waited so far, so that a poll finds the end at most 6 % late.
const PAUSE_PART: u32 = 16;

/// The state of the work, as a poll finds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    Done,
    Pending,
}

/// Why the communicator has to be aborted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Cause {
    /// The membership epoch is over.
    Cancelled,
    /// NCCL did not answer within this time.
    TimedOut(Duration),
    /// NCCL or the driver reported an error.
    Failed(String),
}

impl Cause {
    /// The error of the operation `what`, which completes "NCCL did not …".
    pub(super) fn into_error(self, epoch: u64, what: String) -> Error {
        let reason = match self {
            Cause::Cancelled => return Error::Aborted { epoch },
            Cause::TimedOut(limit) => {
                format!("no answer within {limit:?}; NCCL does not tell which rank is missing")
            }
            Cause::Failed(reason) => reason,
        };
        Error::Nccl { epoch, what, reason }
    }
}

/// What follows a poll.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Next {
    Return,
    Pause(Duration),
    Abort(Cause),
}

/// Decides what follows a poll that found `found` after `waited`.
pub(super) fn next(
    found: Result<Progress, String>,
    waited: Duration,
    limit: Duration,
    is_cancelled: bool,
) -> Next {
    match found {
        Ok(Progress::Done) => Next::Return,
        Err(reason) => Next::Abort(Cause::Failed(reason)),
        Ok(Progress::Pending) if is_cancelled => Next::Abort(Cause::Cancelled),
        Ok(Progress::Pending) if waited >= limit => Next::Abort(Cause::TimedOut(limit)),
        Ok(Progress::Pending) => Next::Pause((waited / PAUSE_PART).clamp(PAUSE, PAUSE_MAX)),
    }
}

/// Polls until the work is done, for `limit` after `began` at most.
///
/// # Errors
/// Why the communicator has to be aborted.
pub(super) fn watch(
    began: Instant,
    limit: Duration,
    abort: &CancellationToken,
    mut poll: impl FnMut() -> Result<Progress, String>,
) -> Result<(), Cause> {
    loop {
        match next(poll(), began.elapsed(), limit, abort.is_cancelled()) {
            Next::Return => return Ok(()),
            Next::Pause(pause) => thread::sleep(pause),
            Next::Abort(cause) => return Err(cause),
        }
    }
}
