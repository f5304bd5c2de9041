//! The calls of a connection of HTTP/2, each of which is a future of its own: one that comes alone is
//! answered where it was read, before the connection goes on, as most can be; others are tasks.
//!
//! A task for each call costs a client that waits for each answer before it asks again some microseconds: the
//! task is made, the thread goes from the connection to it and back, and other threads wake up to look
//! whether there is something for them. A connection that brings several calls at a time has them run as tasks,
//! on all threads, and so has one whose calls take long: nothing that comes meanwhile would be read.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use futures::task::AtomicWaker;
use hyper::rt::Executor;

/// How often a connection that woke itself goes on at once, before others have their turn.
const AGAIN_MAX: usize = 2;
/// Calls that keep a connection for longer are for tasks. A model that takes 90 us for a client with one connection,
/// who asks without waiting for answers, has its typical answer a tenth later otherwise.
const LONG: Duration = Duration::from_micros(60);
/// So many calls are tasks, at most, before one is tried again.
const RESTS_MAX: usize = 64;

/// The calls of one connection. All clones are one.
#[derive(Debug, Clone)]
pub(super) struct Calls(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// Wakes the task of the connection.
    task: AtomicWaker,
    /// The thread that the connection is on just now, 0 where it is on none.
    thread: AtomicUsize,
    /// Something that the connection waits for has come while it was on a thread, and from there.
    again: AtomicBool,
    /// Calls that came in this turn of the connection.
    came: AtomicUsize,
    /// Whether several came in the turn before it.
    crowded: AtomicBool,
    /// Calls that are tasks.
    tasks: AtomicUsize,
    /// How long a call may keep the connection.
    long: Duration,
    /// Calls in a row that were tried and long.
    long_ones: AtomicUsize,
    /// Calls still to come that are to be tasks for that.
    resting: AtomicUsize,
}

thread_local! {
    /// Its address tells threads from each other.
    static HERE: u8 = const { 0 };
}

/// A number of this thread that is not 0.
fn here() -> usize {
    HERE.with(|here| std::ptr::from_ref(here).addr())
}

impl Calls {
    pub(super) fn new() -> Calls {
        Calls::of(LONG)
    }

    fn of(long: Duration) -> Calls {
        Calls(Arc::new(Shared { long, ..Shared::default() }))
    }

    /// A connection, which is polled by this alone. Its calls are to run by a clone of this.
    pub(super) fn attend<C: Future>(&self, connection: C) -> Attended<C> {
        Attended { connection: Box::pin(connection), waker: Waker::from(self.0.clone()), calls: self.clone() }
    }

    /// A call has come; whether it is to be tried before the connection goes on. The connection alone asks, so that
    /// no two do at a time.
    fn come(&self) -> bool {
        let Shared { came, crowded, tasks, resting, .. } = &*self.0;
        let first = came.fetch_add(1, Ordering::Relaxed) == 0;
        let rests = resting.load(Ordering::Relaxed);
        resting.store(rests.saturating_sub(1), Ordering::Relaxed);
        first && rests == 0 && !crowded.load(Ordering::Relaxed) && tasks.load(Ordering::Relaxed) == 0
    }

    /// Notes how long a call has kept the connection. The first long one in a row may be the machine's doing; with
    /// each one more, twice as many calls are not tried.
    fn kept(&self, elapsed: Duration) {
        let Shared { long, long_ones, resting, .. } = &*self.0;
        let row = if elapsed > *long { long_ones.load(Ordering::Relaxed).saturating_add(1) } else { 0 };
        long_ones.store(row, Ordering::Relaxed);
        let doubled =
            row.checked_sub(2).map_or(0, |times| 1_usize.checked_shl(times as u32).unwrap_or(RESTS_MAX));
        resting.store(doubled.min(RESTS_MAX), Ordering::Relaxed);
    }
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Calls {
    fn execute(&self, call: F) {
        let mut call = Box::pin(call);
        if self.come() {
            let again = self.0.again.load(Ordering::Relaxed);
            let began = Instant::now();
            // A task polls it again as soon as there is one, so nothing needs to be woken.
            let mut context = Context::from_waker(Waker::noop());
            // As in a task, a panic is the end of the call and not that of the others.
            let polled = catch_unwind(AssertUnwindSafe(|| call.as_mut().poll(&mut context)));
            self.kept(began.elapsed());
            // The connection is being polled and has its part in what the call has done, an answer to be sent, still
            // before it: it needs no other turn for that.
            self.0.again.store(again, Ordering::Relaxed);
            match polled {
                Ok(Poll::Pending) => {}
                Ok(Poll::Ready(())) | Err(_) => return,
            }
        }
        self.0.tasks.fetch_add(1, Ordering::Relaxed);
        let counted = Counted(self.clone());
        tokio::spawn(async move {
            let _counted = counted;
            call.await;
        });
    }
}

/// A call that is a task.
struct Counted(Calls);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.0.tasks.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Wake for Shared {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.thread.load(Ordering::Relaxed) == here() {
            // The runtime would put the task in its line and wake another thread for it.
            self.again.store(true, Ordering::Relaxed);
        } else {
            self.task.wake();
        }
    }
}

/// A connection that goes on by itself when it was woken by one of its calls meanwhile.
pub(super) struct Attended<C> {
    connection: Pin<Box<C>>,
    waker: Waker,
    calls: Calls,
}

impl<C> Attended<C> {
    pub(super) fn connection(&mut self) -> Pin<&mut C> {
        self.connection.as_mut()
    }
}

impl<C: Future> Future for Attended<C> {
    type Output = C::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<C::Output> {
        let Attended { connection, waker, calls: Calls(calls) } = &mut *self;
        calls.task.register(cx.waker());
        for _ in 0..=AGAIN_MAX {
            calls.again.store(false, Ordering::Relaxed);
            calls.thread.store(here(), Ordering::Relaxed);
            let polled = connection.as_mut().poll(&mut Context::from_waker(waker));
            calls.thread.store(0, Ordering::Relaxed);
            match calls.came.swap(0, Ordering::Relaxed) {
                0 => {}
                came => calls.crowded.store(came > 1, Ordering::Relaxed),
            }
            if polled.is_ready() || !calls.again.load(Ordering::Relaxed) {
                return polled;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

#[cfg(test)]
mod tests;
