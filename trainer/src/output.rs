//! The output volume of a job, through a registration of this process that lives.
//!
//! Other processes declare one dead that has not renewed its registration in the metadata for `session_lease_ms`. Its
//! writes fail from then on, although it may only have been suspended or cut off. What it writes for a job is fenced by
//! the job's owner key (`checkpoint.rs`), so it may register again and go on: if its coordinator was replaced meanwhile,
//! the write fails for that reason.
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use millrace_datafs::View;

use crate::error::{Error, Result};

/// The output volume. A clone shares the registration.
#[derive(Debug, Clone)]
pub(crate) struct Output(Arc<Mutex<View>>);

impl Output {
    pub(crate) fn new(view: View) -> Output {
        Output(Arc::new(Mutex::new(view)))
    }

    /// The volume through the present registration.
    pub(crate) fn view(&self) -> View {
        self.lock().clone()
    }

    /// Runs `write` and, if others have declared this process dead, once more through a new registration.
    pub(crate) fn write<T>(&self, mut write: impl FnMut(&View) -> Result<T>) -> Result<T> {
        let view = self.view();
        match write(&view) {
            Err(error) if error.is_declared_dead() => {
                let volume = view.spec().to_string();
                tracing::warn!(
                    volume,
                    error = error.one_line(),
                    "this process was taken for dead; opening the volumes again"
                );
                let renewed = reopen(&view)?;
                self.lock().clone_from(&renewed);
                write(&renewed)
            }
            outcome => outcome,
        }
    }

    fn lock(&self) -> MutexGuard<'_, View> {
        // A view is replaced as a whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The same volume through a new registration.
pub(crate) fn reopen(view: &View) -> Result<View> {
    view.reopen().map_err(|error| match error {
        millrace_datafs::Error::Stale { .. } => Error::Checkpoint {
            place: view.spec().to_string(),
            reason: "the volume was deleted, and another one has its name: start the job again".to_owned(),
        },
        error => Error::volume(format!("open volume {} again", view.spec()), error),
    })
}
