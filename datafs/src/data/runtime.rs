//! The crate's small tokio runtime: it lets blocking callers drive object-store futures.

use std::future::Future;
use std::io;
use std::sync::mpsc;
use std::time::Instant;

use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::AbortHandle;

/// Threads that poll object-store futures; callers block on their own threads, so two are plenty.
const WORKER_THREADS: usize = 2;

/// A tokio runtime that may be used, and dropped, from any thread, inside or outside of another
/// tokio runtime.
#[derive(Debug)]
pub(crate) struct IoRuntime {
    runtime: Option<Runtime>,
    io: Io,
}

/// A handle to the runtime. It does not keep the runtime alive: once that is gone, waits return `None`.
#[derive(Debug, Clone)]
pub(crate) struct Io(Handle);

/// A future that runs on the runtime; dropping it leaves the future running.
#[derive(Debug)]
pub(crate) struct Pending<T>(mpsc::Receiver<T>);

impl<T> Pending<T> {
    /// Waits for the result. `None` when the future panicked or the runtime is gone.
    pub(crate) fn wait(self) -> Option<T> {
        self.0.recv().ok()
    }

    /// [`Pending::wait`], but no longer than until `deadline`; then also `None`.
    pub(crate) fn wait_until(&self, deadline: Instant) -> Option<T> {
        self.0.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok()
    }
}

impl IoRuntime {
    /// Starts the worker threads.
    pub(crate) fn start() -> io::Result<IoRuntime> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(WORKER_THREADS)
            .thread_name("datafs-io")
            .enable_all()
            .build()?;
        let io = Io(runtime.handle().clone());
        Ok(IoRuntime { runtime: Some(runtime), io })
    }

    /// The handle for starting futures.
    pub(crate) fn io(&self) -> &Io {
        &self.io
    }
}

impl Io {
    /// A handle for `spawn` and `spawn_blocking`.
    pub(crate) fn handle(&self) -> &Handle {
        &self.0
    }

    /// Starts a future without waiting for it.
    pub(crate) fn start_future<T: Send + 'static>(
        &self,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Pending<T> {
        self.start_task(future).0
    }

    /// [`Io::start_future`] for a future that the caller can abort through the handle.
    pub(crate) fn start_task<T: Send + 'static>(
        &self,
        future: impl Future<Output = T> + Send + 'static,
    ) -> (Pending<T>, AbortHandle) {
        // A std channel, not `block_on`: the caller may itself be inside a runtime, where
        // `block_on` panics.
        let (sender, receiver) = mpsc::sync_channel(1);
        let task = self.0.spawn(async move {
            // Fails when the caller no longer waits.
            let _ = sender.send(future.await);
        });
        (Pending(receiver), task.abort_handle())
    }

    /// Runs a future to its end, blocking the calling thread. `None` as in [`Pending::wait`].
    pub(crate) fn wait<T: Send + 'static>(
        &self,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        self.start_future(future).wait()
    }
}

impl Drop for IoRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // The plain drop of a runtime panics inside an async context.
            runtime.shutdown_background();
        }
    }
}
