//! How sessions go from one request to the next: who is done hands his session to the request that is
//! next in the line, whose thread runs on it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::Session;
use millrace_bundle::TensorSpec;
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use super::background;
use super::company::Company;
use super::efficiency::Efficiency;
use super::free::Free;
use super::lease::{Lease, Turn};
use super::line::{Job, Line, Place, Room, Sizes, Work, late};
use super::mix::{Account, Mix};
use super::outlook::Outlook;
use super::spent::{self, Spent};
use super::typical::Typical;
use crate::error::InferError;
use crate::statistics::Times;

/// What shorter runs cost is not measured more exactly than by the clock.
const MEASURED_MICROS_MIN: usize = 40;

/// What the requests of one model version share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) state: Mutex<State>,
    pub(super) outputs: Vec<TensorSpec>,
    pub(super) sizes: Sizes,
    /// How long a request that leads waits for others that could run with it.
    pub(super) delay: Duration,
    /// Somebody came, where there is a delay.
    came: Notify,
    pub(super) room: Room,
    /// Whether the thread that runs does all of it.
    runs_in_thread: bool,
    /// Rows come out as they went in.
    pub(super) keeps_rows: AtomicBool,
    /// Duration of a run, in microseconds.
    run_micros: Typical,
    /// How long the line is.
    outlook: Outlook,
    /// How many rows are best run at once.
    efficiency: Efficiency,
    /// Whether there is company to wait for.
    pub(super) company: Company,
    /// Its runs beside those of other models.
    pub(super) account: Account,
}

/// While a session is free, nobody waits but for one who gathers.
#[derive(Debug)]
pub(super) struct State {
    pub(super) free: Free,
    line: Line,
    /// Somebody with a session looks for company: who could run with him waits for him, although a session is
    /// free.
    gathering: bool,
}

/// How a request begins.
#[derive(Debug)]
pub(super) enum Begun<'a> {
    /// There is a session, and nobody else.
    Alone(Lease, Work),
    /// There is a session, and others may come to run with it.
    Gathers(Lease, Work),
    /// It waits in line.
    Waits(Waiting<'a>),
}

impl Shared {
    pub(super) fn new(
        free: Vec<Session>,
        outputs: Vec<TensorSpec>,
        sizes: Sizes,
        delay: Duration,
        room: Room,
        runs_in_thread: bool,
    ) -> Shared {
        Shared {
            outlook: Outlook::new(free.len(), sizes.rows_max),
            state: Mutex::new(State { free: Free::new(free), line: Line::default(), gathering: false }),
            outputs,
            sizes,
            delay,
            came: Notify::new(),
            room,
            runs_in_thread,
            keeps_rows: AtomicBool::new(true),
            run_micros: Typical::default(),
            efficiency: Efficiency::default(),
            company: Company::default(),
            account: Account::default(),
        }
    }

    /// Gives a request a session, or a place in the line. `gathers` says whether one that gets a session
    /// looks for company, by how many sessions are free beside it.
    ///
    /// # Errors
    /// [`InferError::Overloaded`] when there is no room in the line, or it could not begin in time.
    pub(super) fn begin(
        self: &Arc<Self>,
        work: Work,
        gathers: impl FnOnce(usize) -> bool,
    ) -> Result<Begun<'_>, InferError> {
        let mut state = self.state.lock();
        let joins = state.gathering && work.rows > 0;
        let Some(session) = (if joins { None } else { state.free.take() }) else {
            return Ok(Begun::Waits(self.wait(&mut state, work)?));
        };
        let gathers = !state.gathering && work.rows > 0 && gathers(state.free.len());
        state.gathering |= gathers;
        drop(state);
        let mut lease = Lease::new(self, session);
        lease.gathers = gathers;
        Ok(if gathers { Begun::Gathers(lease, work) } else { Begun::Alone(lease, work) })
    }

    /// Has others wait for the run of a request that has a session already, unless they wait for another one.
    pub(super) fn gather_for(&self, lease: &mut Lease, work: &Work) {
        let mut state = self.state.lock();
        if !state.gathering && work.rows > 0 {
            state.gathering = true;
            lease.gathers = true;
        }
    }

    /// Puts a request in the line.
    fn wait(&self, state: &mut State, mut work: Work) -> Result<Waiting<'_>, InferError> {
        // One that began just before the answer is of no use would keep from running those after it, and so
        // on: under too much load nobody would be answered in time.
        work.allow_for(Duration::from_micros(self.run_micros() as u64));
        if work.deadline.is_some() {
            self.outlook.check(&state.line, &work, Instant::now())?;
        }
        let (deadline, answer_by, queued) = (work.deadline, work.answer_by, work.queued);
        let (job, turn) = Job::new(work);
        let (bytes, of_line) = (job.bytes(), (state.line.len(), state.line.bytes()));
        let admitted = state.line.admit(job, self.room);
        match admitted {
            Ok((place, leaving)) => {
                for job in leaving {
                    let error =
                        self.overloaded(of_line, job.bytes(), "and one came that is served before it");
                    job.refuse(error);
                }
                Ok(Waiting { shared: self, place: Some(place), deadline, answer_by, queued, turn })
            }
            Err(_) => Err(self.overloaded(of_line, bytes, "and none of them is served after it")),
        }
    }

    fn overloaded(&self, (requests, bytes): (usize, usize), own: usize, why: &str) -> InferError {
        InferError::Overloaded {
            reason: format!(
                "{requests} requests with {bytes} bytes wait for this model and this one has {own}, {why}; the limits \
                 are {} and {} (limits.requests_waiting_max, limits.waiting_bytes_max)",
                self.room.requests_max, self.room.bytes_max
            ),
        }
    }

    /// Tells a request that leads that others have come.
    pub(super) fn notify(&self) {
        if !self.delay.is_zero() {
            self.came.notify_waiters();
        }
    }

    /// Waits until enough others have come to run together, at most for the delay since the request did;
    /// not at all when its deadline comes before that.
    pub(super) async fn linger(&self, work: &Work) {
        if self.delay.is_zero() || work.rows == 0 {
            return;
        }
        let until = work.queued + self.delay;
        if work.deadline.is_some_and(|deadline| deadline <= until) {
            return;
        }
        let until = tokio::time::Instant::from_std(until);
        let enough = self.sizes.preferred.last().copied().unwrap_or(self.sizes.rows_max);
        loop {
            let came = self.came.notified();
            tokio::pin!(came);
            came.as_mut().enable();
            if self.state.lock().line.rows_like(work, enough) >= enough
                || tokio::time::timeout_at(until, came).await.is_err()
            {
                return;
            }
        }
    }

    /// How many wait.
    pub(super) fn waiting(&self) -> usize {
        self.state.lock().line.len()
    }

    /// Rows that could run together with a request by now, up to the most that do, its own included.
    pub(super) fn rows_like(&self, work: &Work) -> usize {
        self.state.lock().line.rows_like(work, self.sizes.rows_max)
    }

    /// Those of the line that run together with a request: of all that could, as many as is efficient, unless the
    /// configuration says how many there are to be.
    pub(super) fn take_like(&self, work: &Work) -> Vec<Job> {
        let mut state = self.state.lock();
        let Sizes { rows_max, preferred } = &self.sizes;
        if *rows_max < 2 || !preferred.is_empty() || !self.delay.is_zero() {
            return state.line.take_like(work, &self.sizes);
        }
        let free = state.free.len();
        let rows = state.line.rows_like(work, rows_max.saturating_mul(free + 1));
        let rows_max = self.efficiency.share(rows, *rows_max, free);
        state.line.take_like(work, &Sizes { rows_max, preferred: Vec::new() })
    }

    /// Whether requests run together.
    pub(super) fn runs_together(&self) -> bool {
        self.sizes.rows_max > 1 && self.keeps_rows.load(Ordering::Relaxed)
    }

    /// Nobody gathers any more: who waits still gets the sessions that are free.
    pub(super) fn gathered(self: &Arc<Self>) {
        self.hand_out(|state| state.gathering = false);
    }

    /// A session is free again.
    pub(super) fn give_back(self: &Arc<Self>, session: Session) {
        self.hand_out(|state| state.free.put(session));
    }

    /// Hands the sessions that are free after a change to the requests that are next, unless somebody gathers,
    /// who has them all.
    fn hand_out(self: &Arc<Self>, change: impl FnOnce(&mut State)) {
        let mut too_late = Vec::new();
        {
            let mut state = self.state.lock();
            change(&mut state);
            // Another one may begin to gather meanwhile.
            while !state.gathering
                && state.line.len() > 0
                && let Some(session) = state.free.take()
            {
                let Some(Job { work, reply, .. }) = state.line.next(&mut too_late) else {
                    state.free.put(session);
                    break;
                };
                let more = state.line.len() > 0 && state.free.len() > 0;
                drop(state);
                let lease = Lease::of_line(self, session);
                let unused = if self.delay.is_zero()
                    && background::is_free_next()
                    && self.is_long(work.beside)
                {
                    background::follow(&self.account, self.run_micros(), move || lease.run_for(work, reply));
                    None
                } else {
                    match reply.send(Turn::Lead(lease, work)) {
                        // The caller has gone just now.
                        Err(Turn::Lead(mut unused, _)) => unused.session.take(),
                        Ok(()) | Err(Turn::Done(_)) => None,
                    }
                };
                if unused.is_none() && !more {
                    break;
                }
                state = self.state.lock();
                if let Some(session) = unused {
                    state.free.put(session);
                }
            }
        }
        for job in too_late {
            let error = late(job.work.queued);
            job.refuse(error);
        }
    }

    /// Begins to measure what a run costs.
    pub(super) fn spend(&self) -> Spent {
        Spent::begin(self.runs_in_thread && self.run_micros() >= MEASURED_MICROS_MIN)
    }

    /// Notes how long a run took on inputs of so many rows and elements, and what it spent; and that this model was in
    /// use. Where it was one of the line, `handed` is when it got its session.
    pub(super) fn took(
        &self,
        times: &Times,
        spent: Option<Duration>,
        (rows, elements): (usize, usize),
        handed: Option<Instant>,
    ) {
        let elapsed = times.end.saturating_duration_since(times.computing);
        self.run_micros.note(elapsed.as_micros());
        if rows > 0 {
            self.efficiency.ran(rows, elements, spent.unwrap_or(elapsed));
        }
        if let Some(handed) = handed {
            self.outlook.ran(rows, times.end.saturating_duration_since(handed));
        }
        // While others run, too, what the process spends is theirs as well.
        self.company.ran(rows, || if Mix::is_mixed() { None } else { spent::of_process() });
        Mix::used(&self.account, times.end);
    }

    /// Whether runs take so long that they are for threads of their own: sooner where other models are in use, or
    /// the task has others to run `beside`.
    pub(super) fn is_long(&self, beside: bool) -> bool {
        let micros = self.run_micros();
        micros > background::MICROS_MIN
            || (micros > background::MIXED_MICROS_MIN && (beside || Mix::is_mixed()))
    }

    /// How long a run takes typically, in microseconds.
    pub(super) fn run_micros(&self) -> usize {
        self.run_micros.get()
    }
}

/// A request in the line. Dropped before its turn has come, it leaves the line.
#[derive(Debug)]
pub(super) struct Waiting<'a> {
    shared: &'a Shared,
    place: Option<Place>,
    /// When it is too late to begin to run it, and when nobody wants the answer any more.
    deadline: Option<Instant>,
    answer_by: Option<Instant>,
    queued: Instant,
    turn: oneshot::Receiver<Turn>,
}

impl Waiting<'_> {
    /// Waits for the turn, at most until the deadline; one that a run has taken along by then waits on, at most
    /// until nobody wants the answer any more. Cancel safe.
    pub(super) async fn turn(mut self) -> Turn {
        let told = match self.deadline {
            None => (&mut self.turn).await,
            Some(deadline) => match tokio::time::timeout_at(deadline.into(), &mut self.turn).await {
                Ok(told) => told,
                Err(_) if self.leave() => return Turn::Done(Err(late(self.queued))),
                // It runs already, so that its answer may come in time.
                Err(_) => match self.answer_by {
                    None => (&mut self.turn).await,
                    Some(answer_by) => {
                        match tokio::time::timeout_at(answer_by.into(), &mut self.turn).await {
                            Ok(told) => told,
                            Err(_) => return Turn::Done(Err(late(self.queued))),
                        }
                    }
                },
            },
        };
        self.place = None;
        told.unwrap_or_else(|_| {
            // Whoever took this request along broke off.
            let reason = "the run that this request was part of ended without an answer";
            Turn::Done(Err(InferError::internal(reason)))
        })
    }
}

impl Waiting<'_> {
    /// Leaves the line; whether it was still there.
    fn leave(&mut self) -> bool {
        let Some(place) = self.place.take() else { return false };
        // Its tensors may be large: they are freed without the lock.
        let left = { self.shared.state.lock().line.remove(place) };
        left.is_some()
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests;
