//! The progress of a client with one answer, and the end of calls whose answers it does not take.
//!
//! A call is a future that hyper gives its executor, and its answer is part of it. Dropping the future resets the
//! stream, which drops what HTTP/2 holds of it. So the executor wraps each call, and the answer makes itself known to
//! the call that is polled on the thread.

use std::cell::Cell;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

use hyper::rt::Executor;
use parking_lot::Mutex;
use pin_project_lite::pin_project;

/// A piece, of which a client takes parts when it shares a connection fairly among its answers.
pub(super) const WHOLE: usize = 1 << 16;

/// How far the client has come with one answer.
#[derive(Debug, Default)]
pub(super) struct Taking {
    /// Pieces that were handed to the connection and are not gone.
    pieces: AtomicUsize,
    /// The period of patience in which a piece last came or went.
    moved: AtomicUsize,
    /// What the client took of other answers since, for each that waited, in parts of [`WHOLE`].
    missed: AtomicUsize,
    call: Mutex<Ending>,
}

/// The end of a call.
#[derive(Debug, Default)]
struct Ending {
    is_due: bool,
    /// Wakes the call; `None` while it does not wait for its client, and where it cannot be ended.
    call: Option<Waker>,
}

impl Taking {
    /// A piece is handed out.
    pub(super) fn gave(&self, period: usize) {
        self.moved.store(period, Ordering::Relaxed);
        self.pieces.fetch_add(1, Ordering::Release);
    }

    /// A piece is taken, or given up.
    pub(super) fn took(&self, period: usize) {
        self.moved.store(period, Ordering::Relaxed);
        self.pieces.fetch_sub(1, Ordering::Release);
    }

    /// Whether there is a piece for the client to take.
    pub(super) fn waits(&self) -> bool {
        self.pieces.load(Ordering::Acquire) > 0
    }

    /// Ends a period in which the client took `share` for each of its answers, in parts of [`WHOLE`]. Whether it took
    /// none of this one for so long that its share of the connection was a piece.
    pub(super) fn is_stalled(&self, period: usize, share: usize) -> bool {
        let waited = self.waits() && self.moved.load(Ordering::Relaxed) < period;
        let missed = if waited { self.missed.load(Ordering::Relaxed).saturating_add(share) } else { 0 };
        self.missed.store(missed, Ordering::Relaxed);
        missed >= WHOLE
    }

    /// Ends the call, and gives the connection until the end of a period to let go of its pieces. False where the call
    /// has ended or cannot be ended: all of its answer is the connection's then.
    pub(super) fn end_call(&self, period: usize) -> bool {
        let mut ending = self.call.lock();
        let Some(call) = ending.call.take() else { return false };
        ending.is_due = true;
        drop(ending);
        self.moved.store(period, Ordering::Relaxed);
        call.wake();
        true
    }

    /// The call waits; whether it is to end instead.
    fn wait(&self, waker: &Waker) -> bool {
        let mut ending = self.call.lock();
        if !ending.call.as_ref().is_some_and(|call| call.will_wake(waker)) {
            ending.call = Some(waker.clone());
        }
        ending.is_due
    }

    fn is_due(&self) -> bool {
        self.call.lock().is_due
    }
}

/// The answer of a call, as far as it has one. The call cannot be ended after this is dropped.
#[derive(Debug, Default)]
struct Begun(Option<Arc<Taking>>);

impl Drop for Begun {
    fn drop(&mut self) {
        if let Some(answer) = &self.0 {
            answer.call.lock().call = None;
        }
    }
}

/// What a thread polls.
#[derive(Debug, Default)]
enum Current {
    /// No call that can be ended.
    #[default]
    Other,
    Call(Begun),
}

thread_local! {
    static CURRENT: Cell<Current> = const { Cell::new(Current::Other) };
}

/// Tells the call that is polled on this thread that its answer has begun.
pub(super) fn begin(answer: &Arc<Taking>) {
    if let Current::Call(_) = CURRENT.take() {
        CURRENT.set(Current::Call(Begun(Some(answer.clone()))));
    }
}

/// A call that is polled on this thread.
struct Polled {
    outer: Current,
}

impl Polled {
    fn begin(begun: Begun) -> Polled {
        Polled { outer: CURRENT.replace(Current::Call(begun)) }
    }

    fn end(self) -> Begun {
        match CURRENT.take() {
            Current::Call(begun) => begun,
            Current::Other => Begun::default(),
        }
    }
}

impl Drop for Polled {
    fn drop(&mut self) {
        CURRENT.set(std::mem::take(&mut self.outer));
    }
}

pin_project! {
    /// A call that ends when its client does not take the answer.
    pub(super) struct Endable<F> {
        #[pin]
        call: F,
        begun: Begun,
    }
}

impl<F> Endable<F> {
    pub(super) fn new(call: F) -> Endable<F> {
        Endable { call, begun: Begun::default() }
    }
}

impl<F: Future<Output = ()>> Future for Endable<F> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.project();
        if this.begun.0.as_ref().is_some_and(|answer| answer.is_due()) {
            return Poll::Ready(());
        }
        let polled = Polled::begin(std::mem::take(this.begun));
        let ended = this.call.poll(cx);
        let begun = polled.end();
        if ended.is_ready() || begun.0.as_ref().is_some_and(|answer| answer.wait(cx.waker())) {
            return Poll::Ready(());
        }
        *this.begun = begun;
        Poll::Pending
    }
}

/// Runs calls on another executor, such that they can be ended.
#[derive(Debug, Clone)]
pub(super) struct Endings<E>(pub(super) E);

impl<F, E> Executor<F> for Endings<E>
where
    F: Future<Output = ()>,
    E: Executor<Endable<F>>,
{
    fn execute(&self, call: F) {
        self.0.execute(Endable::new(call));
    }
}
