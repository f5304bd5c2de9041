//! The outcome of the request that the current thread serves, for statistics and traces. The library consumes a
//! reply without telling its content.

use std::cell::Cell;

use fuser::Errno;

/// The outcome of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    /// The error of the reply, 0 for none.
    pub(super) errno: i32,
    /// The error is a failure to count, not an expected one like ENOENT.
    pub(super) failed: bool,
    /// Bytes that were read or written.
    pub(super) bytes: u64,
    /// The kernel serves an opened file from cached pages or from a backing file.
    pub(super) kernel_serves: bool,
    /// Another thread replies, and counts and traces the request then.
    pub(super) comes_later: bool,
}

thread_local! {
    static OUTCOME: Cell<Outcome> = const {
        Cell::new(Outcome { errno: 0, failed: false, bytes: 0, kernel_serves: false, comes_later: false })
    };
}

/// The outcome of a request that failed, see [`failure`].
pub(super) fn failed(errno: Errno) -> Outcome {
    Outcome { failed: true, ..refused(errno) }
}

/// The outcome of a request with an expected error, see [`refusal`].
pub(super) fn refused(errno: Errno) -> Outcome {
    Outcome { errno: errno.code(), ..Outcome::default() }
}

/// Clears the outcome of the previous request.
pub(super) fn reset() {
    OUTCOME.set(Outcome::default());
}

/// The outcome of the current request, so far.
pub(super) fn get() -> Outcome {
    OUTCOME.get()
}

/// Notes an error of the reply as a failure, and returns it.
pub(super) fn failure(errno: Errno) -> Errno {
    OUTCOME.set(Outcome { errno: errno.code(), failed: true, ..OUTCOME.get() });
    errno
}

/// Notes an expected error that is not a failure (no such file, no such attribute, unsupported), and returns
/// it.
pub(super) fn refusal(errno: Errno) -> Errno {
    OUTCOME.set(Outcome { errno: errno.code(), ..OUTCOME.get() });
    errno
}

/// Notes how many bytes were read or written.
pub(super) fn moved(bytes: usize) {
    OUTCOME.set(Outcome { bytes: bytes as u64, ..OUTCOME.get() });
}

/// Notes that the kernel serves the opened file without read requests.
pub(super) fn kernel_serves() {
    OUTCOME.set(Outcome { kernel_serves: true, ..OUTCOME.get() });
}

/// Notes that another thread replies.
pub(super) fn comes_later() {
    OUTCOME.set(Outcome { comes_later: true, ..OUTCOME.get() });
}
