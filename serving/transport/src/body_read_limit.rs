//! Concurrency limit for long work on request bodies, which runs a few at a time on separate threads.
//!
//! A thread that reads the elements of a large body answers no other request meanwhile. With one thread for each
//! large body, short calls would get a small share of the processors. Large bodies therefore take turns on separate
//! threads.

use std::sync::Arc;

use tokio::sync::Semaphore;

use millrace_serving_core::error::InferError;
use millrace_serving_core::metrics::LARGE_BODIES;

/// The turns of a server. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct BodyReadLimit(Arc<Semaphore>);

impl BodyReadLimit {
    /// As many concurrent turns as half of the processors, at least one.
    pub(crate) fn new() -> BodyReadLimit {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        BodyReadLimit::of((processors / 2).max(1))
    }

    fn of(at_a_time: usize) -> BodyReadLimit {
        BodyReadLimit(Arc::new(Semaphore::new(at_a_time)))
    }

    /// Runs the work, on this thread unless it takes long. A panic of the work continues in the caller. When the call
    /// is dropped, long work that has begun continues and keeps its turn.
    ///
    /// # Errors
    /// [`InferError::Unavailable`] when the process is stopping.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        is_long: bool,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, InferError> {
        if !is_long {
            return Ok(work());
        }
        let counted = BodyCountGuard::new();
        let turn = self.0.clone().acquire_owned().await.map_err(|_| InferError::stopping())?;
        let working = tokio::task::spawn_blocking(move || {
            let _held = (turn, counted);
            work()
        });
        working.await.or_else(|error| match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Err(InferError::stopping()),
        })
    }
}

/// Counts a body that has a turn or waits for one.
struct BodyCountGuard;

impl BodyCountGuard {
    fn new() -> BodyCountGuard {
        LARGE_BODIES.inc();
        BodyCountGuard
    }
}

impl Drop for BodyCountGuard {
    fn drop(&mut self) {
        LARGE_BODIES.dec();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn short_calls_are_answered_while_large_bodies_are_read_in_turns() {
        // The test runs on one thread. Work that stayed on it would block it forever.
        let turns = BodyReadLimit::of(2);
        let (begun, begins) = mpsc::channel();
        let reading = Arc::new(AtomicUsize::new(0));
        let mut ends = Vec::new();
        let mut large = tokio::task::JoinSet::new();
        for index in 0..5 {
            let (end, ended) = mpsc::channel();
            ends.push(end);
            let (turns, begun, reading) = (turns.clone(), begun.clone(), reading.clone());
            large.spawn(async move {
                let work = move || {
                    let beside = reading.fetch_add(1, Ordering::SeqCst);
                    begun.send(()).unwrap();
                    ended.recv().unwrap();
                    reading.fetch_sub(1, Ordering::SeqCst);
                    (index, beside)
                };
                turns.run(true, work).await.unwrap()
            });
        }
        // The first two bodies are being read, and the others wait.
        for _ in 0..2 {
            while begins.try_recv().is_err() {
                tokio::task::yield_now().await;
            }
        }
        for _ in 0..100 {
            assert_eq!(turns.run(false, || 7).await.unwrap(), 7);
            tokio::task::yield_now().await;
        }
        assert_eq!(reading.load(Ordering::SeqCst), 2);
        assert!(large.try_join_next().is_none(), "all large ones are there still");
        for end in ends {
            end.send(()).unwrap();
        }
        let mut read = large.join_all().await;
        read.sort_unstable();
        assert!(read.iter().map(|(index, _)| *index).eq(0..5), "{read:?}");
        assert!(read.iter().all(|(_, beside)| *beside < 2), "{read:?}");
    }

    #[tokio::test]
    async fn permit_of_a_dropped_call_goes_to_the_next() {
        let turns = BodyReadLimit::of(1);
        let (end, ended) = mpsc::channel::<()>();
        let first = tokio::spawn({
            let turns = turns.clone();
            async move { turns.run(true, move || ended.recv().is_ok()).await }
        });
        while turns.0.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        first.abort();
        assert!(first.await.unwrap_err().is_cancelled());
        assert_eq!(turns.0.available_permits(), 0, "the work goes on");
        end.send(()).unwrap();
        assert_eq!(turns.run(true, || 7).await.unwrap(), 7);
    }

    #[tokio::test]
    #[should_panic(expected = "the work's own")]
    async fn panic_of_long_work_is_raised_in_its_call() {
        // The call panics before it returns a result.
        let _ = BodyReadLimit::of(1).run::<()>(true, || panic!("the work's own")).await;
    }
}
