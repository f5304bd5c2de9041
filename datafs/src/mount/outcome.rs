//! What became of the request that the current thread answers, for statistics and traces: the library
//! consumes an answer without telling what it was.

use std::cell::Cell;

use fuser::Errno;

/// What became of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    /// The error that the kernel was told, 0 for none.
    pub(super) errno: i32,
    /// It is one that somebody should know of, not a plain no.
    pub(super) failed: bool,
    /// Bytes that were read or written.
    pub(super) bytes: u64,
    /// The kernel serves an opened file from what it has: its pages, or a file that it was handed.
    pub(super) kernel_serves: bool,
}

thread_local! {
    static OUTCOME: Cell<Outcome> = const {
        Cell::new(Outcome { errno: 0, failed: false, bytes: 0, kernel_serves: false })
    };
}

/// Forgets the request before.
pub(super) fn reset() {
    OUTCOME.set(Outcome::default());
}

/// Of the current request, so far.
pub(super) fn get() -> Outcome {
    OUTCOME.get()
}

/// Notes an error that the kernel is told, and hands it on.
pub(super) fn failure(errno: Errno) -> Errno {
    OUTCOME.set(Outcome { errno: errno.code(), failed: true, ..OUTCOME.get() });
    errno
}

/// Notes an answer of no that is not a failure: no such file, no such attribute, not offered.
pub(super) fn refusal(errno: Errno) -> Errno {
    OUTCOME.set(Outcome { errno: errno.code(), ..OUTCOME.get() });
    errno
}

/// Notes how many bytes were read or written.
pub(super) fn moved(bytes: usize) {
    OUTCOME.set(Outcome { bytes: bytes as u64, ..OUTCOME.get() });
}

/// Notes that the kernel serves the opened file by itself.
pub(super) fn kernel_serves() {
    OUTCOME.set(Outcome { kernel_serves: true, ..OUTCOME.get() });
}
