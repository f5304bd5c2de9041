//! Outcome of the current request, which the inference service reports to the span of the request.

use std::sync::Arc;

use parking_lot::Mutex;

use millrace_serving_core::error::InferError;
use millrace_serving_core::statistics::Times;

tokio::task_local! {
    /// The record of the current request, if it has a span.
    static CURRENT: Record;
}

/// The outcome of a request.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Name and version of the model that answered, or was asked.
    pub model: Option<(String, u64)>,
    /// Times of the steps, if it was answered.
    pub times: Option<Times>,
    /// Kind of the error.
    pub error: Option<&'static str>,
}

/// The place for the outcome of a request. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Record(Arc<Mutex<Outcome>>);

impl Record {
    /// Runs a part of the request, whose outcome goes here.
    pub fn within<T>(&self, part: impl FnOnce() -> T) -> T {
        CURRENT.sync_scope(self.clone(), part)
    }

    /// Runs the request, whose outcome goes here.
    pub async fn scope<F: Future>(self, request: F) -> F::Output {
        CURRENT.scope(self, request).await
    }

    /// The outcome so far.
    pub fn take(&self) -> Outcome {
        std::mem::take(&mut *self.0.lock())
    }
}

fn update(change: impl FnOnce(&mut Outcome)) {
    // Most requests have no span.
    let _ = CURRENT.try_with(|record| change(&mut record.0.lock()));
}

/// Records the version that answered, and the times of its steps.
pub fn answered(model: &str, version: u64, times: &Times) {
    update(|outcome| {
        outcome.model = Some((model.to_owned(), version));
        outcome.times = Some(*times);
    });
}

/// Records the error, and the version that was asked, if known.
pub fn failed(model: Option<(&str, u64)>, error: &InferError) {
    update(|outcome| {
        outcome.error = Some(error.label());
        if let Some((model, version)) = model {
            outcome.model = Some((model.to_owned(), version));
        }
    });
}
