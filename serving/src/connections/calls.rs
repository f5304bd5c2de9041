//! The calls of a connection of HTTP/2, each of which is a future of its own: one that comes alone is
//! answered where it was read, before the connection goes on, as most can be; others are tasks.
//!
//! A task for each call costs a client that waits for each answer before it asks again some microseconds: the
//! task is made, the thread goes from the connection to it and back, and other threads wake up to look
//! whether there is something for them. A connection that brings several calls at a time has them run as tasks,
//! on all threads, and so has one whose calls take long: nothing that comes meanwhile would be read.
//!
//! The first of these tasks that is done would have its answer sent at once, alone, since what a task wakes comes before
//! all that waits for the thread. So a connection that is woken while calls of it are tasks lets others have their turn
//! first, as long as that finds more of its answers: they are sent together (seen: refusals under too much load, a
//! write for four of five of them before).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use hyper::rt::Executor;
use parking_lot::Mutex;

use super::rests::Rests;

/// How often a connection that woke itself goes on at once, before others have their turn.
const AGAIN_MAX: usize = 2;
/// Calls that keep a connection for longer are for tasks. A model that takes 90 us for a client with one connection,
/// who asks without waiting for answers, has its typical answer a tenth later otherwise.
const LONG: Duration = Duration::from_micros(60);

/// The calls of one connection. All clones are one.
#[derive(Debug, Clone)]
pub(super) struct Calls(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// Wakes the task of the connection, which is always the same one once it is known.
    task: Mutex<Option<Waker>>,
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
    /// Calls that were tasks and have ended.
    ended: AtomicUsize,
    /// How long a call may keep the connection.
    long: Duration,
    /// From trying calls where they were read, which is in vain for long ones.
    rests: Rests,
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
        Attended {
            connection: Box::pin(connection),
            waker: Waker::from(self.0.clone()),
            calls: self.clone(),
            task: None,
            behind: None,
            rests: Rests::default(),
        }
    }

    /// A call has come; whether it is to be tried before the connection goes on. The connection alone asks, so that
    /// no two do at a time.
    fn come(&self) -> bool {
        let Shared { came, crowded, tasks, rests, .. } = &*self.0;
        let first = came.fetch_add(1, Ordering::Relaxed) == 0;
        rests.are_over() && first && !crowded.load(Ordering::Relaxed) && tasks.load(Ordering::Relaxed) == 0
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
            self.0.rests.note(began.elapsed() > self.0.long);
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
        self.0.0.ended.fetch_add(1, Ordering::Relaxed);
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
        } else if let Some(task) = &*self.task.lock() {
            task.wake_by_ref();
        }
    }
}

/// A connection that goes on by itself when it was woken by one of its calls meanwhile.
pub(super) struct Attended<C> {
    connection: Pin<Box<C>>,
    waker: Waker,
    calls: Calls,
    /// What the calls wake, so that telling them anew takes a comparison.
    task: Option<Waker>,
    /// While others have their turn first: how many calls had ended before.
    behind: Option<usize>,
    /// From letting others go first.
    rests: Rests,
}

impl<C> Attended<C> {
    pub(super) fn connection(&mut self) -> Pin<&mut C> {
        self.connection.as_mut()
    }
}

impl<C: Future> Future for Attended<C> {
    type Output = C::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<C::Output> {
        let Attended { connection, waker, calls: Calls(calls), task, behind, rests } = &mut *self;
        if !task.as_ref().is_some_and(|task| task.will_wake(cx.waker())) {
            *task = Some(cx.waker().clone());
            calls.task.lock().clone_from(task);
        }
        let ended = calls.ended.load(Ordering::Relaxed);
        match behind.take() {
            Some(before) => rests.note(ended == before),
            None if calls.tasks.load(Ordering::Relaxed) > 0 && rests.are_over() => {
                *behind = Some(ended);
                // A task that wakes itself goes behind all others that can run.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            None => {}
        }
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
