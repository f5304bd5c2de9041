//! Reports of what a pipe waits for.

use std::fmt;
use std::sync::Arc;

/// Tells whether a pipe waits: for its model, for brokers that do not answer, or before it starts over. The
/// default tells no one.
#[derive(Clone, Default)]
pub struct Waiting(Option<Arc<dyn Fn(bool) + Send + Sync>>);

impl Waiting {
    /// Calls `tell` when a wait begins (true) and when it is over (false), possibly several times in a row. It must
    /// not block.
    pub fn new(tell: impl Fn(bool) + Send + Sync + 'static) -> Waiting {
        Waiting(Some(Arc::new(tell)))
    }

    pub(super) fn tell(&self, waits: bool) {
        if let Some(tell) = &self.0 {
            tell(waits);
        }
    }
}

impl fmt::Debug for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Waiting").field(&self.0.is_some()).finish()
    }
}
