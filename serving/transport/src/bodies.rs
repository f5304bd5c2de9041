//! The shared bound on request bodies in receipt, and the progress timeout of each.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::body_read_limit::BodyReadLimit;
use millrace_serving_core::error::InferError;

/// Bytes of a body, unless less is left, that a client must send in each patience period.
pub(crate) const PROGRESS_BYTES: usize = 64 << 10;

/// The bytes of all bodies, and the limit on large bodies that are decoded at a time. All clones share them.
#[derive(Debug, Clone)]
pub(crate) struct Bodies(Arc<BodyBytes>);

#[derive(Debug)]
struct BodyBytes {
    /// Bytes of bodies up to [`SMALL_BYTES`].
    small: AtomicUsize,
    /// Bytes of larger ones.
    large: AtomicUsize,
    /// Bound on each of `small` and `large`.
    bytes_max: usize,
    read_limit: BodyReadLimit,
}

impl Bodies {
    pub(crate) fn new(bytes_max: usize) -> Bodies {
        let (small, large) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Bodies(Arc::new(BodyBytes { small, large, bytes_max, read_limit: BodyReadLimit::new() }))
    }

    /// A body of which no byte has arrived.
    pub(crate) fn begin(&self) -> BodyBytesGuard {
        BodyBytesGuard { bodies: self.clone(), bytes: 0 }
    }

    /// The limit on large bodies that are decoded at a time.
    pub(crate) fn read_limit(&self) -> &BodyReadLimit {
        &self.0.read_limit
    }
}

/// Largest body in the small class, which includes health checks and control calls; large bodies never block
/// it.
const SMALL_BYTES: usize = 64 << 10;

/// Guard of the bytes of one body; they count until it is dropped.
#[derive(Debug)]
pub(crate) struct BodyBytesGuard {
    bodies: Bodies,
    bytes: usize,
}

impl BodyBytesGuard {
    /// Counts received bytes. The only body of its class may have any size.
    ///
    /// # Errors
    /// [`InferError::Overloaded`].
    pub(crate) fn grow(&mut self, bytes: usize) -> Result<(), InferError> {
        let BodyBytes { small, large, bytes_max, .. } = &*self.bodies.0;
        let after = self.bytes.saturating_add(bytes);
        let (kind, moved) = match (self.bytes <= SMALL_BYTES, after <= SMALL_BYTES) {
            (true, false) => {
                small.fetch_sub(self.bytes, Ordering::Relaxed);
                (large, after)
            }
            (_, true) => (small, bytes),
            (false, false) => (large, bytes),
        };
        let before = kind.fetch_add(moved, Ordering::Relaxed);
        self.bytes = after;
        let all = before.saturating_add(moved);
        if all == after || all <= *bytes_max {
            return Ok(());
        }
        let reason = format!(
            "the server is receiving {before} bytes of requests, with these {moved} more than limits.body_bytes_max ({bytes_max}): try again later"
        );
        Err(InferError::Overloaded { reason })
    }

    /// The limit on large bodies that are decoded at a time.
    pub(crate) fn read_limit(&self) -> &BodyReadLimit {
        self.bodies.read_limit()
    }

    /// Stops counting the body's bytes.
    pub(crate) fn shrink(&mut self) {
        let BodyBytes { small, large, .. } = &*self.bodies.0;
        let kind = if self.bytes <= SMALL_BYTES { small } else { large };
        kind.fetch_sub(std::mem::take(&mut self.bytes), Ordering::Relaxed);
    }
}

impl Drop for BodyBytesGuard {
    fn drop(&mut self) {
        self.shrink();
    }
}

/// The timeout for a client's next part of a body.
#[derive(Debug)]
pub(crate) struct BodyTimeout {
    stalled: Duration,
    sleep: std::pin::Pin<Box<tokio::time::Sleep>>,
    /// Bytes received in the current period.
    bytes: usize,
}

impl BodyTimeout {
    pub(crate) fn new(stalled: Duration) -> BodyTimeout {
        BodyTimeout { stalled, sleep: Box::pin(tokio::time::sleep(stalled)), bytes: 0 }
    }

    /// Counts received bytes; a new period begins after enough of them.
    pub(crate) fn received(&mut self, bytes: usize) {
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes >= PROGRESS_BYTES {
            self.bytes = 0;
            self.sleep.as_mut().reset(tokio::time::Instant::now() + self.stalled);
        }
    }

    /// Completes when the period has elapsed.
    pub(crate) fn elapsed(&mut self) -> std::pin::Pin<&mut tokio::time::Sleep> {
        self.sleep.as_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(grown: Result<(), InferError>) -> bool {
        match grown {
            Ok(()) => false,
            Err(error) => {
                assert!(error.to_string().contains("limits.body_bytes_max"), "{error}");
                true
            }
        }
    }

    #[test]
    fn small_bodies_are_not_refused_because_of_large_ones() {
        let bodies = Bodies::new(2 * SMALL_BYTES);
        let mut large = bodies.begin();
        large.grow(1).unwrap();
        large.grow(100 * SMALL_BYTES).expect("the only large one may have any size");
        let mut other = bodies.begin();
        assert!(refused(other.grow(SMALL_BYTES + 1)));
        let mut small = [bodies.begin(), bodies.begin()];
        for body in &mut small {
            body.grow(SMALL_BYTES - 1).unwrap();
            body.grow(1).unwrap();
        }
        assert!(refused(small[0].grow(1)), "it is a large one from now on");
        small[0].shrink();
        drop((large, other));
        small[0].grow(2 * SMALL_BYTES).expect("the large ones have gone");
    }

    #[test]
    fn small_bodies_have_a_bound_of_their_own() {
        let bodies = Bodies::new(2 * SMALL_BYTES);
        let mut held: Vec<BodyBytesGuard> = std::iter::repeat_with(|| bodies.begin()).take(3).collect();
        held[0].grow(SMALL_BYTES).unwrap();
        held[1].grow(SMALL_BYTES).unwrap();
        assert!(refused(held[2].grow(1)));
        held.clear();
        let BodyBytes { small, large, .. } = &*bodies.0;
        assert_eq!((small.load(Ordering::Relaxed), large.load(Ordering::Relaxed)), (0, 0));
    }
}
