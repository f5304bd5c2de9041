//! The common bound of request bodies that are being received.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::error::InferError;

/// A client has to send so many bytes of a body, or its rest, in each period of patience.
pub(crate) const PROGRESS_BYTES: usize = 64 << 10;

/// The bytes of all bodies. Clones are one.
#[derive(Debug, Clone)]
pub(crate) struct Bodies(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    bytes: AtomicUsize,
    bytes_max: usize,
}

impl Bodies {
    pub(crate) fn new(bytes_max: usize) -> Bodies {
        Bodies(Arc::new(Shared { bytes: AtomicUsize::new(0), bytes_max }))
    }

    /// A body of which nothing has come.
    pub(crate) fn begin(&self) -> InBody {
        InBody { bodies: self.clone(), bytes: 0 }
    }
}

/// Bodies up to this size are bounded by the connections and their streams alone.
const SMALL_BYTES: usize = 64 << 10;

/// The bytes of one body, which count until this is dropped.
#[derive(Debug)]
pub(crate) struct InBody {
    bodies: Bodies,
    bytes: usize,
}

impl InBody {
    /// Counts bytes that have come.
    ///
    /// # Errors
    /// [`InferError::Overloaded`].
    pub(crate) fn grow(&mut self, bytes: usize) -> Result<(), InferError> {
        let Shared { bytes: all, bytes_max } = &*self.bodies.0;
        let before = all.fetch_add(bytes, Ordering::Relaxed);
        self.bytes += bytes;
        // Small ones, of health checks and control calls among them, never wait for large ones; one alone may have
        // any size.
        let is_alone = before.saturating_add(bytes) == self.bytes;
        if self.bytes <= SMALL_BYTES || is_alone || before.saturating_add(bytes) <= *bytes_max {
            return Ok(());
        }
        let reason = format!(
            "the server is receiving {before} bytes of requests, with these {bytes} more than limits.body_bytes_max ({bytes_max}): try again later"
        );
        Err(InferError::Overloaded { reason })
    }

    /// Bytes that no longer belong to the body.
    pub(crate) fn shrink(&mut self) {
        self.bodies.0.bytes.fetch_sub(std::mem::take(&mut self.bytes), Ordering::Relaxed);
    }
}

impl Drop for InBody {
    fn drop(&mut self) {
        self.shrink();
    }
}

/// The time that a client has for the next part of a body.
#[derive(Debug)]
pub(crate) struct Patience {
    stalled: Duration,
    sleep: std::pin::Pin<Box<tokio::time::Sleep>>,
    /// Bytes that came since it began.
    bytes: usize,
}

impl Patience {
    pub(crate) fn new(stalled: Duration) -> Patience {
        Patience { stalled, sleep: Box::pin(tokio::time::sleep(stalled)), bytes: 0 }
    }

    /// Counts bytes that came; the time begins anew after enough of them.
    pub(crate) fn came(&mut self, bytes: usize) {
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes >= PROGRESS_BYTES {
            self.bytes = 0;
            self.sleep.as_mut().reset(tokio::time::Instant::now() + self.stalled);
        }
    }

    /// Ends when the time is over.
    pub(crate) fn over(&mut self) -> std::pin::Pin<&mut tokio::time::Sleep> {
        self.sleep.as_mut()
    }
}
