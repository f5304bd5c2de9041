//! Executor for the calls of one HTTP/2 connection: one call at a time runs in the connection's task,
//! concurrent calls in tasks of their own.
//!
//! Most clients wait for each answer before they send the next request. Their calls need no task: the
//! connection polls the call that it has just read, and sends the answer in the same poll. A task per call
//! would cost some microseconds, because the thread switches from the connection to the call and back.

use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures::FutureExt;
use futures::future::BoxFuture;
use futures::task::AtomicWaker;
use hyper::rt::Executor;
use parking_lot::Mutex;

/// Rounds in which a connection and its call may wake each other before the task yields.
const ROUNDS_MAX: usize = 4;

/// The executor that hyper gets for one connection. All clones share one slot.
#[derive(Clone, Default)]
pub(super) struct Calls(Arc<Slot>);

/// Slot for the call that runs in the connection's task.
#[derive(Default)]
struct Slot {
    /// Whether the slot is in use.
    is_taken: AtomicBool,
    /// The call, until the connection has taken it.
    arrived: Mutex<Option<BoxFuture<'static, ()>>>,
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Calls {
    fn execute(&self, call: F) {
        if self.0.is_taken.swap(true, Ordering::Relaxed) {
            tokio::spawn(call);
            return;
        }
        // As in a task, a panic ends the call alone. The panic hook has reported it.
        let call = AssertUnwindSafe(call).catch_unwind().map(drop);
        *self.0.arrived.lock() = Some(call.boxed());
    }
}

/// The task of a connection, which either of its two parts wakes.
#[derive(Default)]
struct ConnectionTask {
    task: AtomicWaker,
    /// Whether the task is being polled. It then looks for wake-ups itself, and need not be scheduled again.
    is_polled: AtomicBool,
}

/// One part of the task, and whether it must be polled.
struct TaskPart {
    is_woken: AtomicBool,
    turns: Arc<ConnectionTask>,
}

impl TaskPart {
    fn new(turns: &Arc<ConnectionTask>, is_woken: bool) -> (Arc<TaskPart>, Waker) {
        let part = Arc::new(TaskPart { is_woken: AtomicBool::new(is_woken), turns: Arc::clone(turns) });
        let waker = Waker::from(Arc::clone(&part));
        (part, waker)
    }

    fn take(&self) -> bool {
        self.is_woken.swap(false, Ordering::SeqCst)
    }
}

impl Wake for TaskPart {
    fn wake(self: Arc<TaskPart>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<TaskPart>) {
        // Sequentially consistent, as are the steps of `WithCalls::poll` in the opposite order. So either
        // this code sees that the task is no longer polled, or the task sees this wake-up.
        if !self.is_woken.swap(true, Ordering::SeqCst) && !self.turns.is_polled.load(Ordering::SeqCst) {
            self.turns.task.wake();
        }
    }
}

/// A connection together with the call in its slot.
pub(super) struct WithCalls<C> {
    connection: Pin<Box<C>>,
    calls: Calls,
    call: Option<BoxFuture<'static, ()>>,
    turns: Arc<ConnectionTask>,
    of_connection: (Arc<TaskPart>, Waker),
    of_call: (Arc<TaskPart>, Waker),
}

impl<C> WithCalls<C> {
    /// A connection whose calls go to a clone of `calls`.
    pub(super) fn new(connection: C, calls: Calls) -> WithCalls<C> {
        let turns = Arc::default();
        WithCalls {
            connection: Box::pin(connection),
            calls,
            call: None,
            of_connection: TaskPart::new(&turns, true),
            of_call: TaskPart::new(&turns, false),
            turns,
        }
    }

    /// The connection, marked for polling because the caller changes it.
    pub(super) fn connection(&mut self) -> Pin<&mut C> {
        self.of_connection.0.is_woken.store(true, Ordering::SeqCst);
        self.connection.as_mut()
    }
}

impl<C: Future> WithCalls<C> {
    fn poll_parts(&mut self) -> Poll<C::Output> {
        for _ in 0..ROUNDS_MAX {
            let is_woken = self.of_call.0.take();
            if let Some(call) = self.call.as_mut().filter(|_| is_woken)
                && call.as_mut().poll(&mut Context::from_waker(&self.of_call.1)).is_ready()
            {
                self.call = None;
                self.calls.0.is_taken.store(false, Ordering::Relaxed);
            }
            // Polled after the call, whose answer wakes the connection.
            if self.of_connection.0.take() {
                let mut context = Context::from_waker(&self.of_connection.1);
                if let Poll::Ready(ended) = self.connection.as_mut().poll(&mut context) {
                    return Poll::Ready(ended);
                }
            }
            if self.call.is_none() {
                self.call = self.calls.0.arrived.lock().take();
                if self.call.is_some() {
                    self.of_call.0.is_woken.store(true, Ordering::SeqCst);
                }
            }
            if !self.is_woken() {
                break;
            }
        }
        Poll::Pending
    }

    fn is_woken(&self) -> bool {
        [&self.of_connection, &self.of_call].into_iter().any(|(part, _)| part.is_woken.load(Ordering::SeqCst))
    }
}

impl<C: Future> Future for WithCalls<C> {
    type Output = C::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<C::Output> {
        self.turns.task.register(cx.waker());
        self.turns.is_polled.store(true, Ordering::SeqCst);
        let polled = self.poll_parts();
        self.turns.is_polled.store(false, Ordering::SeqCst);
        if polled.is_pending() && self.is_woken() {
            cx.waker().wake_by_ref();
        }
        polled
    }
}

#[cfg(test)]
mod tests;
