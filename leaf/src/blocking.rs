//! Blocking work next to asynchronous tasks, on the threads that Tokio keeps for it.

/// Error of work that has not begun: the runtime is shutting down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stopping;

impl std::fmt::Display for Stopping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the runtime is shutting down")
    }
}

impl std::error::Error for Stopping {}

/// Runs work on a thread of Tokio's blocking pool. A panic of the work continues in the caller. Work that has begun
/// goes on when the future is dropped.
///
/// # Errors
/// [`Stopping`] when the runtime shuts down before the work has begun.
pub async fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Stopping> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => Ok(done),
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Err(Stopping),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_runs_on_another_thread() {
        let caller = std::thread::current().id();
        assert_eq!(run(move || std::thread::current().id() != caller).await, Ok(true));
    }

    #[tokio::test]
    async fn a_panic_of_the_work_continues_in_the_caller() {
        let caller = tokio::spawn(run(|| panic!("out of range")));
        let panic: Box<_> = caller.await.unwrap_err().into_panic();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"out of range"));
    }
}
