//! Prerequisites of commits: file data that must be durable before a record points at it.

use std::sync::Arc;
use std::time::Duration;

use super::engine::Prerequisite;
use crate::error::Result;

/// Prerequisites that are made durable in parallel, at most.
const PARALLEL_MAX: usize = 8;

/// The distinct prerequisites of a transaction or of a batch.
#[derive(Debug, Default)]
pub(crate) struct Prerequisites(Vec<Arc<dyn Prerequisite>>);

impl Prerequisites {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How long a commit that no caller waits for may be delayed for their sake.
    pub(crate) fn linger(&self) -> Duration {
        self.0.iter().map(|prerequisite| prerequisite.linger()).max().unwrap_or_default()
    }

    pub(crate) fn add(&mut self, prerequisite: Arc<dyn Prerequisite>) {
        // The newest are the most likely duplicates.
        if !self.0.iter().rev().any(|known| Arc::ptr_eq(known, &prerequisite)) {
            self.0.push(prerequisite);
        }
    }

    pub(crate) fn append(&mut self, other: Prerequisites) {
        other.0.into_iter().for_each(|prerequisite| self.add(prerequisite));
    }

    /// Makes all of them durable, several at a time. Safe to repeat after an error.
    pub(crate) fn run(&self) -> Result<()> {
        if let [all] = self.0.as_slice() {
            return all.make_durable();
        }
        for some in self.0.chunks(PARALLEL_MAX) {
            std::thread::scope(|scope| {
                let (first, rest) = some.split_at(1);
                let threads: Vec<_> =
                    rest.iter().map(|prerequisite| scope.spawn(|| prerequisite.make_durable())).collect();
                let own = first[0].make_durable();
                threads.into_iter().fold(own, |result, thread| match thread.join() {
                    Ok(other) => result.and(other),
                    Err(panic) => std::panic::resume_unwind(panic),
                })
            })?;
        }
        Ok(())
    }
}
