//! The wait callback of a pipe.

use std::fmt;
use std::sync::Arc;

/// Callback that reports whether a pipe waits: for its model, for brokers that do not answer, or before a
/// restart. The default does nothing.
#[derive(Clone, Default)]
pub struct Waiting(Option<Arc<dyn Fn(bool) + Send + Sync>>);

impl Waiting {
    /// Calls `callback` with true when a wait begins and with false when it ends, possibly several times in a
    /// row. `callback` must not block.
    pub fn new(callback: impl Fn(bool) + Send + Sync + 'static) -> Waiting {
        Waiting(Some(Arc::new(callback)))
    }

    pub(super) fn set(&self, waits: bool) {
        if let Some(callback) = &self.0 {
            callback(waits);
        }
    }
}

impl fmt::Debug for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Waiting").field(&self.0.is_some()).finish()
    }
}
