//! The quota of one connection: bounds the answers that its client has not read yet, and the calls that its
//! client cancels.
//!
//! In HTTP/2 the client decides when the server may send (flow control). Without a bound, a client that
//! answers pings could request answers and never read them. So the unsent bytes of each connection, and of
//! all connections together, are bounded. Each answer must progress as fast as the client's other answers do
//! on average; otherwise the server ends its call. If the client reads nothing at all, the server ends the
//! connection.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tonic::codegen::http::StatusCode;

use super::answer_progress::{AnswerProgress, WHOLE};
use millrace_serving_core::error::InferError;

/// Calls that a client may cancel per second, which is also the burst size. A client with deadlines reaches
/// this only if as many of its calls run out of time; a flood of immediately cancelled calls reaches a
/// million per second.
pub(super) const CANCELLED_PER_SECOND_MAX: usize = 10_000;
/// A connection with at most this many unsent bytes, which covers health checks, is never refused because of
/// other connections.
const SMALL_BYTES: usize = 64 << 10;
/// Followed answers before the list is first pruned of answers that have ended.
const FOLLOWED_MIN: usize = 64;

/// The quota for unread answers of all connections. All clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Answers(Arc<UnsentBytes>);

#[derive(Debug)]
struct UnsentBytes {
    unsent: AtomicUsize,
    unsent_max: usize,
}

impl Answers {
    pub(crate) fn new(unsent_max: usize) -> Answers {
        Answers(Arc::new(UnsentBytes { unsent: AtomicUsize::new(0), unsent_max }))
    }
}

/// The quota of one connection. All clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Quota(Arc<QuotaState>);

#[derive(Debug)]
struct QuotaState {
    unsent: AtomicUsize,
    /// The unsent bytes that wait behind other answers of their stream.
    behind: AtomicUsize,
    unsent_max: usize,
    /// The answers of all connections.
    all: Answers,
    /// Number of answer pieces that the client has read, or given up.
    taken: AtomicUsize,
    /// Number of the current patience period.
    period: AtomicUsize,
    followed: Mutex<TrackedAnswers>,
    cancelled: Mutex<Bucket>,
    /// Ends the connection.
    cut: Mutex<Option<oneshot::Sender<()>>>,
}

/// The answers of a connection that have begun, including some that have ended.
#[derive(Debug, Default)]
struct TrackedAnswers {
    answers: Vec<Weak<AnswerProgress>>,
    /// At this length, [`TrackedAnswers::follow`] removes the answers that have ended.
    full: usize,
}

impl TrackedAnswers {
    fn follow(&mut self, answer: Weak<AnswerProgress>) {
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
    /// Status over HTTP.
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
    /// Takes one token; false if there was none.
    fn take(&mut self, now: Instant) -> bool {
        let most = CANCELLED_PER_SECOND_MAX as f64;
        let refilled = now.saturating_duration_since(self.at).as_secs_f64() * most;
        self.at = now;
        self.left = (self.left + refilled).min(most) - 1.0;
        self.left >= 0.0
    }
}

impl Quota {
    pub(super) fn new(unsent_max: usize, all: &Answers) -> (Quota, QuotaWatch) {
        let (sender, cut) = oneshot::channel();
        let state = QuotaState {
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
        (quota.clone(), QuotaWatch { quota, cut })
    }

    /// Counts bytes of an answer as unsent until the guard is dropped. The only unsent answer of its
    /// connection, or of all connections, may have any size under the respective bound.
    pub(super) fn hold(&self, bytes: usize) -> Result<UnsentGuard, Refusal> {
        self.hold_as(bytes, false)
    }

    /// [`Quota::hold`] for an answer that waits behind others of its stream, so that the client cannot read
    /// it yet.
    ///
    /// # Errors
    /// [`InferError::Overloaded`].
    pub(crate) fn hold_behind(&self, bytes: usize) -> Result<UnsentGuard, InferError> {
        Ok(self.hold_as(bytes, true)?)
    }

    /// Counts nothing; for an answer with a refusal.
    pub(super) fn hold_nothing(&self) -> UnsentGuard {
        UnsentGuard { quota: self.clone(), bytes: 0, behind: false }
    }

    fn hold_as(&self, bytes: usize, behind: bool) -> Result<UnsentGuard, Refusal> {
        let QuotaState { unsent, unsent_max, all, .. } = &*self.0;
        let before = unsent.fetch_add(bytes, Ordering::Relaxed);
        let all_before = all.0.unsent.fetch_add(bytes, Ordering::Relaxed);
        if behind {
            self.0.behind.fetch_add(bytes, Ordering::Relaxed);
        }
        let held = UnsentGuard { quota: self.clone(), bytes, behind };
        let (after, all_after) = (before.saturating_add(bytes), all_before.saturating_add(bytes));
        if bytes > 0 && before > 0 && after > *unsent_max {
            let reason = format!(
                "the client has not read {before} bytes of answers on this connection, with this one of {bytes} bytes more than limits.unsent_bytes_max ({unsent_max}): read answers before more requests are sent"
            );
            return Err(Refusal { status: StatusCode::TOO_MANY_REQUESTS, reason });
        }
        let all_max = all.0.unsent_max;
        if bytes > 0 && all_before > 0 && after > SMALL_BYTES && all_after > all_max {
            let reason = format!(
                "clients have not read {all_before} bytes of answers on all connections, with this one of {bytes} bytes more than limits.answer_bytes_max ({all_max}): try again later"
            );
            return Err(Refusal { status: StatusCode::SERVICE_UNAVAILABLE, reason });
        }
        Ok(held)
    }

    /// Lets the watch follow an answer that has begun.
    pub(super) fn follow(&self, answer: &Arc<AnswerProgress>) {
        self.0.followed.lock().follow(Arc::downgrade(answer));
    }

    /// Number of the current patience period.
    pub(super) fn period(&self) -> usize {
        self.0.period.load(Ordering::Relaxed)
    }

    /// Records that the client has read a piece of an answer, or given it up.
    pub(super) fn took(&self) {
        self.0.taken.fetch_add(1, Ordering::Relaxed);
    }

    /// Records that the client has cancelled a call.
    pub(super) fn cancelled(&self) {
        if !self.0.cancelled.lock().take(Instant::now())
            && let Some(cut) = self.0.cut.lock().take()
        {
            // The connection may have ended meanwhile.
            let _ = cut.send(());
        }
    }

    /// A snapshot of the bytes that the client could read now, and of the pieces that it has read so far.
    pub(super) fn look(&self) -> ReadingSnapshot {
        let QuotaState { unsent, behind, taken, .. } = &*self.0;
        let behind = behind.load(Ordering::Relaxed);
        ReadingSnapshot {
            to_take: unsent.load(Ordering::Relaxed).saturating_sub(behind),
            taken: taken.load(Ordering::Relaxed),
            waiting: self.answers().iter().filter(|answer| answer.waits()).count(),
        }
    }

    /// The answers that have begun. Returned so that they are dropped outside the lock: dropping an answer
    /// can end its call.
    fn answers(&self) -> Vec<Arc<AnswerProgress>> {
        self.0.followed.lock().answers.iter().filter_map(Weak::upgrade).collect()
    }

    /// Ends a patience period that began with `before`, and the calls whose answers made no progress in it.
    /// The error says why the connection must end.
    pub(super) fn end_period(&self, before: ReadingSnapshot) -> Result<ReadingSnapshot, &'static str> {
        let now = self.look();
        if before.to_take > 0 && now.to_take > 0 && before.taken == now.taken {
            return Err("read none of its answers");
        }
        let ended = self.0.period.fetch_add(1, Ordering::Relaxed);
        // A slow client cannot read a piece of each of many answers in one period.
        let taken = now.taken.wrapping_sub(before.taken);
        let share = taken.saturating_mul(WHOLE) / before.waiting.max(now.waiting).max(1);
        let mut answers = self.answers().into_iter();
        match answers.all(|answer| !answer.is_stalled(ended, share) || answer.end_call(ended + 1)) {
            true => Ok(now),
            false => Err("did not read the rest of an answer"),
        }
    }

    #[cfg(test)]
    pub(super) fn unsent(&self) -> (usize, usize) {
        (self.0.unsent.load(Ordering::Relaxed), self.0.all.0.unsent.load(Ordering::Relaxed))
    }
}

/// A snapshot of a client's reading.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReadingSnapshot {
    to_take: usize,
    /// Pieces read.
    taken: usize,
    /// Answers with a piece to read.
    waiting: usize,
}

/// Watches a connection for clients that exceed its quota.
#[derive(Debug)]
pub(super) struct QuotaWatch {
    quota: Quota,
    cut: oneshot::Receiver<()>,
}

impl QuotaWatch {
    /// Returns how the client exceeded the quota; pending while it does not.
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

/// Guard of bytes that count as unsent.
#[derive(Debug)]
pub(crate) struct UnsentGuard {
    quota: Quota,
    bytes: usize,
    /// The bytes wait behind other answers.
    behind: bool,
}

impl UnsentGuard {
    pub(super) fn quota(&self) -> &Quota {
        &self.quota
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Splits off bytes that the client can now read.
    pub(super) fn split(&mut self, bytes: usize) -> UnsentGuard {
        self.bytes -= bytes;
        if self.behind {
            self.quota.0.behind.fetch_sub(bytes, Ordering::Relaxed);
        }
        UnsentGuard { quota: self.quota.clone(), bytes, behind: false }
    }

    /// Takes over the bytes of another guard.
    pub(super) fn join(&mut self, mut other: UnsentGuard) {
        self.bytes += std::mem::take(&mut other.bytes);
    }
}

impl Drop for UnsentGuard {
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
