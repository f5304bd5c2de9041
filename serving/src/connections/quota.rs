//! The quota of one connection: answers that its client has not taken yet, and calls that its client cancels.
//!
//! A client of HTTP/2 decides when the server may send (flow control). Without a bound it could have answers made and
//! never take them, while it answers pings. So a connection holds a bounded number of unsent bytes, and all connections
//! together do. Each answer has to go on as fast as the client's others do on average: the call of one that does not is
//! ended, and the connection is when its client takes nothing at all.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tonic::codegen::http::StatusCode;

use super::taking::{Taking, WHOLE};
use crate::error::InferError;

/// Calls that a client may cancel each second, and so many at once. A client reaches this by deadlines only if that
/// many of its calls run out of time; a flood of calls that are cancelled at once reaches a million.
pub(super) const CANCELLED_PER_SECOND_MAX: usize = 10_000;
/// Unsent answers of one connection up to this size, of health checks among them, are never refused because of those
/// of other connections.
const SMALL_BYTES: usize = 64 << 10;
/// Answers of a connection between two looks for those that have ended, at least.
const FOLLOWED_MIN: usize = 64;

/// The bytes of the answers that clients have not taken, over all connections. Clones are one.
#[derive(Debug, Clone)]
pub(crate) struct Answers(Arc<Total>);

#[derive(Debug)]
struct Total {
    unsent: AtomicUsize,
    unsent_max: usize,
}

impl Answers {
    pub(crate) fn new(unsent_max: usize) -> Answers {
        Answers(Arc::new(Total { unsent: AtomicUsize::new(0), unsent_max }))
    }
}

/// The quota of one connection. Clones are one.
#[derive(Debug, Clone)]
pub(crate) struct Quota(Arc<State>);

#[derive(Debug)]
struct State {
    unsent: AtomicUsize,
    /// Those of them that wait for others of their stream.
    behind: AtomicUsize,
    unsent_max: usize,
    /// The answers of all connections.
    all: Answers,
    /// Counts pieces of answers that the client has taken, or given up.
    taken: AtomicUsize,
    /// The number of the period of patience that runs.
    period: AtomicUsize,
    followed: Mutex<Followed>,
    cancelled: Mutex<Bucket>,
    /// Ends the connection.
    cut: Mutex<Option<oneshot::Sender<()>>>,
}

/// The answers of a connection that have begun and not ended, and some that have.
#[derive(Debug, Default)]
struct Followed {
    answers: Vec<Weak<Taking>>,
    /// With so many, those that have ended are left out.
    full: usize,
}

impl Followed {
    fn follow(&mut self, answer: Weak<Taking>) {
        if self.answers.len() >= self.full {
            self.answers.retain(|answer| answer.strong_count() > 0);
            self.full = (2 * self.answers.len()).max(FOLLOWED_MIN);
        }
        self.answers.push(answer);
    }
}

/// A refused answer.
#[derive(Debug)]
pub(super) struct Refusal {
    /// As HTTP tells it.
    pub(super) status: StatusCode,
    reason: String,
}

impl From<Refusal> for InferError {
    fn from(Refusal { reason, .. }: Refusal) -> InferError {
        InferError::Overloaded { reason }
    }
}

/// A token bucket of cancelled calls.
#[derive(Debug)]
struct Bucket {
    left: f64,
    at: Instant,
}

impl Bucket {
    /// Takes one out; whether there was one.
    fn take(&mut self, now: Instant) -> bool {
        let most = CANCELLED_PER_SECOND_MAX as f64;
        let refilled = now.saturating_duration_since(self.at).as_secs_f64() * most;
        self.at = now;
        self.left = (self.left + refilled).min(most) - 1.0;
        self.left >= 0.0
    }
}

impl Quota {
    pub(super) fn new(unsent_max: usize, all: &Answers) -> (Quota, Watch) {
        let (sender, cut) = oneshot::channel();
        let state = State {
            unsent: AtomicUsize::new(0),
            behind: AtomicUsize::new(0),
            unsent_max,
            all: all.clone(),
            taken: AtomicUsize::new(0),
            period: AtomicUsize::new(0),
            followed: Mutex::default(),
            cancelled: Mutex::new(Bucket { left: CANCELLED_PER_SECOND_MAX as f64, at: Instant::now() }),
            cut: Mutex::new(Some(sender)),
        };
        let quota = Quota(Arc::new(state));
        (quota.clone(), Watch { quota, cut })
    }

    /// Counts bytes of an answer as unsent until the guard is dropped. An answer that is the only one of its connection
    /// and of all may have any size.
    pub(super) fn hold(&self, bytes: usize) -> Result<Held, Refusal> {
        self.hold_as(bytes, false)
    }

    /// [`Quota::hold`] of an answer that waits for others of its stream, so that the client cannot take it yet.
    ///
    /// # Errors
    /// [`InferError::Overloaded`].
    pub(crate) fn hold_behind(&self, bytes: usize) -> Result<Held, InferError> {
        Ok(self.hold_as(bytes, true)?)
    }

    /// Counts nothing, for an answer that says why another one was refused.
    pub(super) fn hold_nothing(&self) -> Held {
        Held { quota: self.clone(), bytes: 0, behind: false }
    }

    fn hold_as(&self, bytes: usize, behind: bool) -> Result<Held, Refusal> {
        let State { unsent, unsent_max, all, .. } = &*self.0;
        let before = unsent.fetch_add(bytes, Ordering::Relaxed);
        let all_before = all.0.unsent.fetch_add(bytes, Ordering::Relaxed);
        if behind {
            self.0.behind.fetch_add(bytes, Ordering::Relaxed);
        }
        let held = Held { quota: self.clone(), bytes, behind };
        let (after, all_after) = (before.saturating_add(bytes), all_before.saturating_add(bytes));
        if bytes > 0 && before > 0 && after > *unsent_max {
            let reason = format!(
                "the client has not taken {before} bytes of answers on this connection, with this one of {bytes} bytes more than limits.unsent_bytes_max ({unsent_max}): read answers before more requests are sent"
            );
            return Err(Refusal { status: StatusCode::TOO_MANY_REQUESTS, reason });
        }
        let all_max = all.0.unsent_max;
        if bytes > 0 && all_before > 0 && after > SMALL_BYTES && all_after > all_max {
            let reason = format!(
                "clients have not taken {all_before} bytes of answers on all connections, with this one of {bytes} bytes more than limits.answer_bytes_max ({all_max}): try again later"
            );
            return Err(Refusal { status: StatusCode::SERVICE_UNAVAILABLE, reason });
        }
        Ok(held)
    }

    /// Has the watch look after an answer that has begun.
    pub(super) fn follow(&self, answer: &Arc<Taking>) {
        self.0.followed.lock().follow(Arc::downgrade(answer));
    }

    /// The period of patience that runs.
    pub(super) fn period(&self) -> usize {
        self.0.period.load(Ordering::Relaxed)
    }

    /// The client has taken a piece of an answer, or given it up.
    pub(super) fn took(&self) {
        self.0.taken.fetch_add(1, Ordering::Relaxed);
    }

    /// The client has cancelled a call.
    pub(super) fn cancelled(&self) {
        if !self.0.cancelled.lock().take(Instant::now())
            && let Some(cut) = self.0.cut.lock().take()
        {
            // The connection may have ended meanwhile.
            let _ = cut.send(());
        }
    }

    /// What the client could take now, and what it has taken so far.
    pub(super) fn look(&self) -> Looked {
        let State { unsent, behind, taken, .. } = &*self.0;
        let behind = behind.load(Ordering::Relaxed);
        Looked {
            to_take: unsent.load(Ordering::Relaxed).saturating_sub(behind),
            taken: taken.load(Ordering::Relaxed),
            waiting: self.answers().iter().filter(|answer| answer.waits()).count(),
        }
    }

    /// The answers that have begun. They are let go of outside of the lock, as the end of a call lets go of its answer.
    fn answers(&self) -> Vec<Arc<Taking>> {
        self.0.followed.lock().answers.iter().filter_map(Weak::upgrade).collect()
    }

    /// Ends a period of patience that began with a look, and the calls whose answers did not go on in it. The error is
    /// what the client did that ends its connection.
    pub(super) fn end_period(&self, before: Looked) -> Result<Looked, &'static str> {
        let now = self.look();
        if before.to_take > 0 && now.to_take > 0 && before.taken == now.taken {
            return Err("took none of its answers");
        }
        let ended = self.0.period.fetch_add(1, Ordering::Relaxed);
        // A slow client cannot take a piece of each of many answers in one period.
        let taken = now.taken.wrapping_sub(before.taken);
        let share = taken.saturating_mul(WHOLE) / before.waiting.max(now.waiting).max(1);
        let mut answers = self.answers().into_iter();
        match answers.all(|answer| !answer.is_stalled(ended, share) || answer.end_call(ended + 1)) {
            true => Ok(now),
            false => Err("did not take an answer that was sent in part"),
        }
    }

    #[cfg(test)]
    pub(super) fn unsent(&self) -> (usize, usize) {
        (self.0.unsent.load(Ordering::Relaxed), self.0.all.0.unsent.load(Ordering::Relaxed))
    }
}

/// A look at what a client takes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Looked {
    to_take: usize,
    /// Pieces.
    taken: usize,
    /// Answers of which there is a piece to take.
    waiting: usize,
}

/// Wakes when a connection is to end for what its client does.
#[derive(Debug)]
pub(super) struct Watch {
    quota: Quota,
    cut: oneshot::Receiver<()>,
}

impl Watch {
    /// What the client did that ends its connection; pending while it does nothing of the kind.
    pub(super) async fn exceeded(&mut self, patience: Duration) -> &'static str {
        let mut looked = self.quota.look();
        loop {
            tokio::select! {
                Ok(()) = &mut self.cut => return "cancelled too many calls",
                () = tokio::time::sleep(patience) => {}
            }
            match self.quota.end_period(looked) {
                Ok(now) => looked = now,
                Err(done) => return done,
            }
        }
    }
}

/// Bytes that count as unsent.
#[derive(Debug)]
pub(crate) struct Held {
    quota: Quota,
    bytes: usize,
    /// It waits for other answers.
    behind: bool,
}

impl Held {
    pub(super) fn quota(&self) -> &Quota {
        &self.quota
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes a part out, which the client can take.
    pub(super) fn split(&mut self, bytes: usize) -> Held {
        self.bytes -= bytes;
        if self.behind {
            self.quota.0.behind.fetch_sub(bytes, Ordering::Relaxed);
        }
        Held { quota: self.quota.clone(), bytes, behind: false }
    }

    /// Counts the bytes of another one from now on.
    pub(super) fn join(&mut self, mut other: Held) {
        self.bytes += std::mem::take(&mut other.bytes);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.behind {
            self.quota.0.behind.fetch_sub(self.bytes, Ordering::Relaxed);
        }
        self.quota.0.unsent.fetch_sub(self.bytes, Ordering::Relaxed);
        self.quota.0.all.0.unsent.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
