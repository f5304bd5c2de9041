//! Scheduler of one model version: dispatches queued requests to idle sessions, on I/O threads or inference threads.
//!
//! Every session runs one batch at a time. A request is queued; a dispatch then takes an idle session, the head of
//! the queue and all requests that can share its batch. Two kinds of threads dispatch:
//!
//! - An **inference thread** ([`Executor`]) is the rule. Requests that arrive until it has woken up run in its batch.
//! - The **I/O thread** of the request saves a hop to another thread, which costs 20 to 60 us. It dispatches only if
//!   a session is idle that no queued request will take, and the run is known to be short for these shapes. The
//!   request leads: it first yields to the other tasks of its thread. Requests that other connections have sent by
//!   then run in its batch. With one client no other task is ready, and the yield costs about a microsecond.
//!
//! When a session finishes a batch while requests wait, the scheduler dispatches again, on an inference thread.
//! Batches therefore grow with the load, and no request waits while a session is idle, except for the configured
//! delay. A long request that waits for an inference thread reserves a session: short requests use only the other
//! sessions.
//!
//! A run on an inference thread ends early when all its callers have gone ([`RunEnd`](super::run_end::RunEnd)).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use millrace_bundle::TensorSpec;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::timeout_at;

use super::admission::AdmissionControl;
use super::batch::{Batch, Lease};
use super::batch_sizer::BatchSizer;
use super::executor::{Executor, Owner, TaskLimits};
use super::idle_sessions::IdleSessions;
use super::queue::{Job, Position, QueueLimits, RequestQueue};
use super::run_time::RunTimeEstimate;
use super::work::{Output, Work, deadline_error};
use super::{Runner, Session};
use millrace_serving_core::error::InferError;

/// Longest run on an I/O thread: a few times the cost of a hop to an inference thread.
const INLINE_MAX: Duration = Duration::from_micros(150);

/// Upper bound for the configured delay: one year, so that adding it to a time does not overflow.
const DELAY_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// Scheduling policy of a model version, from its configuration and its graph.
#[derive(Debug)]
pub(super) struct Policy {
    /// Maximum number of rows of a batch; below 2 each request runs alone.
    pub(super) rows_max: usize,
    /// Preferred batch sizes, ascending.
    pub(super) preferred: Vec<usize>,
    /// How long a request that had to wait may continue to wait for a full batch.
    pub(super) delay: Duration,
    pub(super) limits: QueueLimits,
    /// Whether the run time depends only on shapes, so that short runs may take place on I/O threads.
    pub(super) is_predictable: bool,
    /// Limits on the running dispatches of the version.
    pub(super) share: TaskLimits,
}

/// The scheduler; `R` runs the batches.
#[derive(Debug)]
pub(super) struct Scheduler<R = Session> {
    pub(super) state: Mutex<SchedulerState<R>>,
    pub(super) policy: Policy,
    pub(super) outputs: Vec<TensorSpec>,
    pub(super) run_times: RunTimeEstimate,
    pub(super) admission: AdmissionControl,
    sizer: BatchSizer,
    /// Whether outputs of batches had the rows of the inputs; once false, each request runs alone.
    pub(super) keeps_rows: AtomicBool,
    /// The inference threads of the process.
    executor: &'static Executor,
    /// This version, by which the executor counts its running tasks.
    owner: Owner,
    clock: fn() -> Instant,
}

#[derive(Debug)]
pub(super) struct SchedulerState<R> {
    pub(super) idle: IdleSessions<R>,
    queue: RequestQueue,
    /// Whether a request leads: its I/O thread will dispatch once.
    leading: bool,
    /// Dispatches submitted to the executor that have not started.
    dispatches: usize,
}

impl<R> SchedulerState<R> {
    /// Number of idle sessions that dispatches will take.
    fn reserved(&self) -> usize {
        self.dispatches + usize::from(self.leading)
    }

    /// Whether there is a submitted dispatch for each queued request.
    fn is_covered(&self) -> bool {
        self.queue.len() <= self.dispatches
    }
}

impl<R: Runner> Scheduler<R> {
    pub(super) fn new(
        sessions: Vec<R>,
        outputs: Vec<TensorSpec>,
        policy: Policy,
        executor: &'static Executor,
        clock: fn() -> Instant,
    ) -> Scheduler<R> {
        let admission = AdmissionControl::new(sessions.len(), policy.rows_max);
        let idle = IdleSessions::new(sessions);
        Scheduler {
            state: Mutex::new(SchedulerState {
                idle,
                queue: RequestQueue::default(),
                leading: false,
                dispatches: 0,
            }),
            policy,
            outputs,
            run_times: RunTimeEstimate::default(),
            admission,
            sizer: BatchSizer::default(),
            keeps_rows: AtomicBool::new(true),
            executor,
            owner: Owner::new(),
            clock,
        }
    }

    /// Runs a request, alone or in a batch. Cancel safe: a request whose call is dropped leaves the queue.
    ///
    /// # Errors
    /// [`InferError::Overloaded`] when the queue is full, or so long that the request could not start in time;
    /// [`InferError::DeadlineExceeded`] when it did not start in time; [`InferError::Invalid`] when the graph cannot
    /// take the inputs; [`InferError::Internal`] when the run fails.
    pub(super) async fn run(self: &Arc<Self>, work: Work) -> Result<Output, InferError> {
        let now = self.now();
        if work.is_late(now) {
            return Err(deadline_error(work.queued, now));
        }
        let (is_short, is_batched) = (self.is_short(work.rows, work.elements()), self.may_batch(&work));
        if is_short
            && !is_batched
            && let Some(mut lease) = self.take_idle_session()
        {
            return lease.run_alone(&work, None);
        }
        let (waiting, leads) = self.submit(work, is_short && is_batched, now)?;
        if let Some(position) = waiting.position.filter(|_| leads) {
            let leader = Leader(Some(self));
            tokio::task::yield_now().await;
            leader.dispatch(position);
        }
        waiting.answer().await
    }

    /// The present time.
    pub(super) fn now(&self) -> Instant {
        (self.clock)()
    }

    /// Whether a run of these sizes is known to be short enough for an I/O thread.
    fn is_short(&self, rows: usize, elements: usize) -> bool {
        self.policy.is_predictable
            && self.run_times.of(rows, elements).is_some_and(|estimate| estimate <= INLINE_MAX)
    }

    /// Whether requests run in batches.
    pub(super) fn has_batches(&self) -> bool {
        self.policy.rows_max > 1 && self.keeps_rows.load(Ordering::Relaxed)
    }

    /// Whether a request may share a batch with others.
    fn may_batch(&self, work: &Work) -> bool {
        work.rows > 0 && self.has_batches()
    }

    /// Takes a session that no queued request will take.
    fn take_idle_session(self: &Arc<Self>) -> Option<Lease<R>> {
        let mut state = self.state.lock();
        let is_free = state.is_covered() && state.idle.len() > state.reserved();
        let session = if is_free { state.idle.take() } else { None };
        drop(state);
        session.map(|session| Lease::new(self, session))
    }

    /// Queues a request and submits dispatches for idle sessions. Returns whether the request leads; `may_lead`
    /// allows it.
    ///
    /// # Errors
    /// [`InferError::Overloaded`].
    fn submit(
        self: &Arc<Self>,
        mut work: Work,
        may_lead: bool,
        now: Instant,
    ) -> Result<(Waiting<'_, R>, bool), InferError> {
        let mut state = self.state.lock();
        let is_covered = state.is_covered();
        let has_spare = state.idle.len() > state.reserved();
        let starts = has_spare && (is_covered || state.queue.waiting() == 0);
        let joins = state.leading && self.may_batch(&work) && state.queue.len() < self.policy.rows_max;
        let waits = !(starts || joins);
        if waits {
            work.allow_for(self.run_times.typical());
            self.admission.check(&state.queue, &work, now)?;
        }
        let lingers_until = self.lingers_until(&work).filter(|_| waits);
        let (deadline, answer_by, queued) = (work.deadline, work.answer_by, work.queued);
        let (mut job, reply) = Job::new(work, waits);
        job.lingers_until = lingers_until;
        let (bytes, before) = (job.bytes(), (state.queue.waiting(), state.queue.bytes()));
        let (position, displaced) = match state.queue.push(job, self.policy.limits) {
            Ok(pushed) => pushed,
            Err(_) => return Err(self.queue_full_error(before, bytes, "and none of them runs after it")),
        };
        let leads = may_lead && starts && is_covered && !state.leading;
        state.leading |= leads;
        let dispatches = self.new_dispatches(&mut state, now);
        drop(state);
        for job in displaced {
            let error = self.queue_full_error(before, job.bytes(), "and one arrived that runs before it");
            job.refuse(error);
        }
        self.submit_dispatches(dispatches);
        let waiting = Waiting {
            scheduler: self,
            position: Some(position),
            lingers_until,
            deadline,
            answer_by,
            queued,
            reply,
        };
        Ok((waiting, leads))
    }

    fn queue_full_error(&self, (requests, bytes): (usize, usize), own: usize, why: &str) -> InferError {
        InferError::Overloaded {
            reason: format!(
                "{requests} requests with {bytes} bytes wait for this model and this one has {own}, {why}; the limits \
                 are {} and {} (limits.requests_waiting_max, limits.waiting_bytes_max)",
                self.policy.limits.requests_max, self.policy.limits.bytes_max
            ),
        }
    }

    /// Number of requests that wait for a session.
    pub(super) fn waiting(&self) -> usize {
        self.state.lock().queue.waiting()
    }

    /// Number of dispatches to submit: one for each idle session while requests are queued, less those submitted.
    /// None while all queued requests fit into the batch of a leader.
    fn new_dispatches(&self, state: &mut SchedulerState<R>, now: Instant) -> usize {
        let is_taken = state.leading && state.queue.len() <= self.policy.rows_max;
        if is_taken || !self.is_ready(&state.queue, now) {
            return 0;
        }
        let idle = state.idle.len().saturating_sub(usize::from(state.leading));
        let wanted = idle.min(state.queue.len());
        let new = wanted.saturating_sub(state.dispatches);
        state.dispatches += new;
        new
    }

    fn submit_dispatches(self: &Arc<Self>, dispatches: usize) {
        for _ in 0..dispatches {
            let scheduler = Arc::clone(self);
            self.execute(Box::new(move || scheduler.dispatch()));
        }
    }

    /// Runs a task on an inference thread.
    pub(super) fn execute(&self, task: Box<dyn FnOnce() + Send>) {
        self.executor.submit(self.owner, self.policy.share, task);
    }

    /// End of the time during which a waiting request continues to wait for a fuller batch. `None` if no delay
    /// applies, or the deadline of the request comes first.
    fn lingers_until(&self, work: &Work) -> Option<Instant> {
        if self.policy.delay.is_zero() || !self.may_batch(work) {
            return None;
        }
        let until = work.queued.checked_add(self.policy.delay.min(DELAY_MAX))?;
        Some(until).filter(|until| work.deadline.is_none_or(|deadline| deadline > *until))
    }

    /// Whether a batch may start now: the head of the queue does not wait for a fuller batch, enough rows are queued,
    /// or the wait of any request is over.
    fn is_ready(&self, queue: &RequestQueue, now: Instant) -> bool {
        let Some(head) = queue.head() else { return false };
        if head.lingers_until.is_none() || !self.has_batches() || queue.is_due(now) {
            return true;
        }
        let enough = self.policy.preferred.last().copied().unwrap_or(self.policy.rows_max);
        queue.rows_like(&head.work, enough) >= enough
    }

    /// Runs the next batch on this inference thread.
    fn dispatch(self: &Arc<Self>) {
        let mut expired = Vec::new();
        let batch = {
            let mut state = self.state.lock();
            state.dispatches = state.dispatches.saturating_sub(1);
            let rows_max = |state: &SchedulerState<R>, head: &Work| Some(self.batch_rows(state, head));
            self.take_batch(&mut state, &mut expired, None, rows_max)
        };
        self.refuse_late(expired);
        if let Some(batch) = batch {
            batch.run();
        }
    }

    /// Runs the batch of a leader on this I/O thread if it is short; leaves all other work to inference threads.
    fn dispatch_inline(self: &Arc<Self>, leader: Position) {
        let mut expired = Vec::new();
        let (batch, dispatches) = {
            let mut state = self.state.lock();
            state.leading = false;
            let rows_max = |state: &SchedulerState<R>, head: &Work| {
                let rows_max = self.policy.rows_max;
                let rows = state.queue.rows_like(head, rows_max).clamp(head.rows, rows_max.max(head.rows));
                let elements = head.elements() / head.rows.max(1) * rows.max(1);
                self.is_short(rows, elements).then_some(rows_max)
            };
            let batch = self.take_batch(&mut state, &mut expired, Some(leader), rows_max);
            let dispatches = self.new_dispatches(&mut state, self.now());
            (batch, dispatches)
        };
        self.refuse_late(expired);
        self.submit_dispatches(dispatches);
        if let Some(batch) = batch {
            batch.run_inline();
        }
    }

    /// Takes the leader or else the head of the queue, the requests that share its batch, and a session. `rows_max`
    /// returns the maximum number of rows of the batch, or `None` to take no batch.
    fn take_batch(
        self: &Arc<Self>,
        state: &mut SchedulerState<R>,
        expired: &mut Vec<Job>,
        leader: Option<Position>,
        rows_max: impl FnOnce(&SchedulerState<R>, &Work) -> Option<usize>,
    ) -> Option<Batch<R>> {
        // Read under the lock, so that expired deadlines are detected.
        let now = self.now();
        state.queue.expire(now, expired);
        if state.idle.len() == 0 || (leader.is_none() && !self.is_ready(&state.queue, now)) {
            return None;
        }
        let rows_max = {
            let state: &SchedulerState<R> = state;
            let next = match leader {
                Some(leader) => state.queue.get(leader).filter(|job| !job.work.is_late(now)),
                None => state.queue.head(),
            };
            rows_max(state, &next?.work)?
        };
        let first = match leader {
            Some(leader) => state.queue.take(leader),
            None => state.queue.pop(),
        }?;
        let lease = Lease::new(self, state.idle.take()?);
        let others = if self.may_batch(&first.work) {
            state.queue.take_like(&first.work, rows_max, &self.policy.preferred, now)
        } else {
            Vec::new()
        };
        Some(Batch { lease, first, others })
    }

    /// Maximum number of rows of the next batch on an inference thread: the learned size, unless the configuration
    /// sets one.
    fn batch_rows(&self, state: &SchedulerState<R>, head: &Work) -> usize {
        let Policy { rows_max, preferred, delay, .. } = &self.policy;
        if !self.may_batch(head) || !preferred.is_empty() || !delay.is_zero() {
            return *rows_max;
        }
        let further = state.idle.len().saturating_sub(1);
        let rows = state.queue.rows_like(head, rows_max.saturating_mul(further + 1));
        let costs = self.run_times.batch_costs(head.rows, head.elements());
        self.sizer.rows(costs, rows, *rows_max, further)
    }

    fn refuse_late(&self, expired: Vec<Job>) {
        for job in expired {
            let error = deadline_error(job.work.queued, self.now());
            job.refuse(error);
        }
    }

    /// Returns a session to the idle ones and dispatches again if requests wait.
    pub(super) fn give_back(self: &Arc<Self>, session: R) {
        self.change(|state| state.idle.put(session));
    }

    /// Changes the state and submits the dispatches that the change requires.
    fn change<T>(self: &Arc<Self>, change: impl FnOnce(&mut SchedulerState<R>) -> T) -> T {
        let (changed, dispatches) = {
            let mut state = self.state.lock();
            let changed = change(&mut state);
            let dispatches =
                if state.queue.is_empty() { 0 } else { self.new_dispatches(&mut state, self.now()) };
            (changed, dispatches)
        };
        self.submit_dispatches(dispatches);
        changed
    }
}

/// The duty of a leader to dispatch once. If it is dropped before, because its request's call is dropped, an
/// inference thread dispatches instead.
struct Leader<'a, R: Runner>(Option<&'a Arc<Scheduler<R>>>);

impl<R: Runner> Leader<'_, R> {
    /// Dispatches the request at a position.
    fn dispatch(mut self, position: Position) {
        if let Some(scheduler) = self.0.take() {
            scheduler.dispatch_inline(position);
        }
    }
}

impl<R: Runner> Drop for Leader<'_, R> {
    fn drop(&mut self) {
        if let Some(scheduler) = self.0 {
            scheduler.change(|state| state.leading = false);
        }
    }
}

/// A queued request. Dropping it before its run removes it from the queue.
#[derive(Debug)]
struct Waiting<'a, R: Runner> {
    scheduler: &'a Arc<Scheduler<R>>,
    position: Option<Position>,
    /// End of the wait for a fuller batch.
    lingers_until: Option<Instant>,
    /// Latest start of the run; in `answer_by`, the time after which the client does not need the answer.
    deadline: Option<Instant>,
    answer_by: Option<Instant>,
    queued: Instant,
    reply: oneshot::Receiver<Result<Output, InferError>>,
}

impl<R: Runner> Waiting<'_, R> {
    /// Waits for the result until the deadline; if the request runs by then, until `answer_by`. Cancel safe.
    async fn answer(mut self) -> Result<Output, InferError> {
        if let Some(until) = self.lingers_until {
            match timeout_at(until.into(), &mut self.reply).await {
                Ok(reply) => return self.received(reply),
                Err(_) => self.scheduler.change(|_| ()),
            }
        }
        let reply = match self.deadline {
            None => (&mut self.reply).await,
            Some(deadline) => match timeout_at(deadline.into(), &mut self.reply).await {
                Ok(reply) => reply,
                Err(_) if self.leave() => return Err(self.deadline_error()),
                Err(_) => match self.answer_by {
                    None => (&mut self.reply).await,
                    Some(answer_by) => match timeout_at(answer_by.into(), &mut self.reply).await {
                        Ok(reply) => reply,
                        Err(_) => return Err(self.deadline_error()),
                    },
                },
            },
        };
        self.received(reply)
    }

    fn received(
        &mut self,
        reply: Result<Result<Output, InferError>, oneshot::error::RecvError>,
    ) -> Result<Output, InferError> {
        self.position = None;
        reply.unwrap_or_else(|_| Err(InferError::internal("the run of this request ended without an answer")))
    }

    fn deadline_error(&self) -> InferError {
        deadline_error(self.queued, self.scheduler.now())
    }

    /// Leaves the queue; returns whether the request was still queued.
    fn leave(&mut self) -> bool {
        let Some(position) = self.position.take() else { return false };
        // The request's tensors may be large: they are freed outside the lock.
        let left = self.scheduler.change(|state| state.queue.remove(position));
        left.is_some()
    }
}

impl<R: Runner> Drop for Waiting<'_, R> {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests;
