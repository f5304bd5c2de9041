//! Serialisation of calls: at most one call at a time for a volume, a snapshot or a target of this process.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;
use tonic::Status;

use crate::refusal::busy;

/// The things that calls work on at present.
#[derive(Debug, Clone, Default)]
pub(crate) struct Busy(Arc<Mutex<HashSet<String>>>);

/// The right to work on one thing; dropping it gives it back.
#[derive(Debug)]
pub(crate) struct Turn {
    busy: Busy,
    what: String,
}

impl Busy {
    /// Takes the turn for a thing.
    ///
    /// # Errors
    /// `ABORTED` while another call has it.
    pub(crate) fn take(&self, what: impl Into<String>) -> Result<Turn, Status> {
        let what = what.into();
        if !self.0.lock().insert(what.clone()) {
            return Err(busy(&what));
        }
        Ok(Turn { busy: self.clone(), what })
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.busy.0.lock().remove(&self.what);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_call_for_the_same_thing_is_aborted_until_the_first_ends() {
        let busy = Busy::default();
        let first = busy.take("volume a").unwrap();
        let other = busy.take("volume b").unwrap();
        let refused = busy.take("volume a").unwrap_err();
        assert_eq!(refused.code(), tonic::Code::Aborted);
        assert!(refused.message().contains("volume a"), "{refused}");
        drop(first);
        drop(other);
        assert!(busy.take("volume a").is_ok());
    }
}
