//! A client's progress with one answer, and the end of calls whose answers the client does not read.
//!
//! A call is a future that hyper gives to its executor, and the answer is part of it. Dropping the future
//! resets the stream, which frees HTTP/2's share of the answer. So the executor wraps each call, and an
//! answer registers with the call that is being polled on its thread.

use std::cell::Cell;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

use hyper::rt::Executor;
use parking_lot::Mutex;
use pin_project_lite::pin_project;

/// One piece, in the fixed-point unit of a client's fair share per answer.
pub(super) const WHOLE: usize = 1 << 16;

/// A client's progress with one answer.
#[derive(Debug, Default)]
pub(super) struct AnswerProgress {
    /// Pieces that the connection holds.
    pieces: AtomicUsize,
    /// The patience period in which a piece was last produced or dropped.
    moved: AtomicUsize,
    /// Sum of the client's fair shares per waiting answer since then, in units of 1/[`WHOLE`] piece.
    missed: AtomicUsize,
    call: Mutex<CallEnd>,
}

/// The requested end of a call.
#[derive(Debug, Default)]
struct CallEnd {
    is_due: bool,
    /// Wakes the call; `None` while the call does not wait for its client, and once it cannot be ended.
    call: Option<Waker>,
}

impl AnswerProgress {
    /// Records that a piece was given to the connection.
    pub(super) fn gave(&self, period: usize) {
        self.moved.store(period, Ordering::Relaxed);
        self.pieces.fetch_add(1, Ordering::Release);
    }

    /// Records that the client read a piece, or gave it up.
    pub(super) fn took(&self, period: usize) {
        self.moved.store(period, Ordering::Relaxed);
        self.pieces.fetch_sub(1, Ordering::Release);
    }

    /// Whether there is a piece for the client to read.
    pub(super) fn waits(&self) -> bool {
        self.pieces.load(Ordering::Acquire) > 0
    }

    /// Ends a patience period in which the client read `share` per waiting answer, in units of 1/[`WHOLE`]
    /// piece. True once the client has read nothing of this answer while its fair share added up to a piece.
    pub(super) fn is_stalled(&self, period: usize, share: usize) -> bool {
        let waited = self.waits() && self.moved.load(Ordering::Relaxed) < period;
        let missed = if waited { self.missed.load(Ordering::Relaxed).saturating_add(share) } else { 0 };
        self.missed.store(missed, Ordering::Relaxed);
        missed >= WHOLE
    }

    /// Ends the call, and gives the connection one more period to drop the pieces. False if the call has
    /// ended or cannot be ended; the connection then holds all of the answer.
    pub(super) fn end_call(&self, period: usize) -> bool {
        let mut ending = self.call.lock();
        let Some(call) = ending.call.take() else { return false };
        ending.is_due = true;
        drop(ending);
        self.moved.store(period, Ordering::Relaxed);
        call.wake();
        true
    }

    /// Registers the waiting call; true if it must end instead.
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

/// The answer of a call, once it has one. After the drop, the call can no longer be ended.
#[derive(Debug, Default)]
struct StartedAnswer(Option<Arc<AnswerProgress>>);

impl Drop for StartedAnswer {
    fn drop(&mut self) {
        if let Some(answer) = &self.0 {
            answer.call.lock().call = None;
        }
    }
}

/// The future that a thread polls.
#[derive(Debug, Default)]
enum PolledCall {
    /// Not a call that can be ended.
    #[default]
    Other,
    Call(StartedAnswer),
}

thread_local! {
    static CURRENT: Cell<PolledCall> = const { Cell::new(PolledCall::Other) };
}

/// Registers an answer with the call that is being polled on this thread.
pub(super) fn begin(answer: &Arc<AnswerProgress>) {
    if let PolledCall::Call(_) = CURRENT.take() {
        CURRENT.set(PolledCall::Call(StartedAnswer(Some(answer.clone()))));
    }
}

/// Scope in which a call is polled on this thread.
struct PollScope {
    outer: PolledCall,
}

impl PollScope {
    fn begin(begun: StartedAnswer) -> PollScope {
        PollScope { outer: CURRENT.replace(PolledCall::Call(begun)) }
    }

    fn end(self) -> StartedAnswer {
        match CURRENT.take() {
            PolledCall::Call(begun) => begun,
            PolledCall::Other => StartedAnswer::default(),
        }
    }
}

impl Drop for PollScope {
    fn drop(&mut self) {
        CURRENT.set(std::mem::take(&mut self.outer));
    }
}

pin_project! {
    /// A call that ends if its client does not read the answer.
    pub(super) struct EndableCall<F> {
        #[pin]
        call: F,
        begun: StartedAnswer,
    }
}

impl<F> EndableCall<F> {
    pub(super) fn new(call: F) -> EndableCall<F> {
        EndableCall { call, begun: StartedAnswer::default() }
    }
}

impl<F: Future<Output = ()>> Future for EndableCall<F> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.project();
        if this.begun.0.as_ref().is_some_and(|answer| answer.is_due()) {
            return Poll::Ready(());
        }
        let polled = PollScope::begin(std::mem::take(this.begun));
        let ended = this.call.poll(cx);
        let begun = polled.end();
        if ended.is_ready() || begun.0.as_ref().is_some_and(|answer| answer.wait(cx.waker())) {
            return Poll::Ready(());
        }
        *this.begun = begun;
        Poll::Pending
    }
}

/// An executor that makes calls endable and runs them on another executor.
#[derive(Debug, Clone)]
pub(super) struct EndableExecutor<E>(pub(super) E);

impl<F, E> Executor<F> for EndableExecutor<E>
where
    F: Future<Output = ()>,
    E: Executor<EndableCall<F>>,
{
    fn execute(&self, call: F) {
        self.0.execute(EndableCall::new(call));
    }
}
