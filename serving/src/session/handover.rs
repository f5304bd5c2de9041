//! How sessions go from one request to the next: who is done hands his session to the request that is
//! next in the line, whose thread runs on it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::Session;
use millrace_bundle::TensorSpec;
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use super::background::{Account, Mix};
use super::lease::{Lease, Turn};
use super::line::{Job, Line, Place, Room, Sizes, Work, late};
use crate::error::InferError;
use crate::statistics::Times;

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
    /// Rows come out as they went in.
    pub(super) keeps_rows: AtomicBool,
    /// Typical duration of a run, in microseconds.
    run_micros: AtomicUsize,
    /// Its runs beside those of other models.
    pub(super) account: Account,
}

/// While a session is free, nobody waits.
#[derive(Debug)]
pub(super) struct State {
    pub(super) free: Vec<Session>,
    line: Line,
}

impl Shared {
    pub(super) fn new(
        free: Vec<Session>,
        outputs: Vec<TensorSpec>,
        sizes: Sizes,
        delay: Duration,
        room: Room,
    ) -> Shared {
        Shared {
            state: Mutex::new(State { free, line: Line::default() }),
            outputs,
            sizes,
            delay,
            came: Notify::new(),
            room,
            keeps_rows: AtomicBool::new(true),
            run_micros: AtomicUsize::new(0),
            account: Account::default(),
        }
    }

    /// Puts a request in the line of a state in which no session is free.
    pub(super) fn wait(&self, state: &mut State, mut work: Work) -> Result<Waiting<'_>, InferError> {
        // One that began just before the answer is of no use would keep from running those after it, and so
        // on: under too much load nobody would be answered in time.
        work.allow_for(Duration::from_micros(self.run_micros() as u64));
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
    pub(super) async fn gather(&self, work: &Work) {
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

    /// Those of the line that run together with a request.
    pub(super) fn take_like(&self, work: &Work) -> Vec<Job> {
        let mut state = self.state.lock();
        state.line.take_like(work, &self.sizes)
    }

    /// Hands a session to the request that is next.
    pub(super) fn give_back(self: Arc<Shared>, session: Session) {
        let mut lease = Lease::new(&self, session);
        let mut too_late = Vec::new();
        loop {
            let job = {
                let mut state = self.state.lock();
                match state.line.next(&mut too_late) {
                    Some(job) => job,
                    None => {
                        state.free.extend(lease.session.take());
                        break;
                    }
                }
            };
            let Job { work, reply, .. } = job;
            match reply.send(Turn::Lead(lease, work)) {
                // The caller has gone just now.
                Err(Turn::Lead(unused, _)) => lease = unused,
                Ok(()) | Err(Turn::Done(_)) => break,
            }
        }
        for job in too_late {
            let error = late(job.work.queued);
            job.refuse(error);
        }
    }

    /// Notes how long a run took, and that this model was in use.
    pub(super) fn took(&self, times: &Times) {
        let elapsed = times.end.saturating_duration_since(times.computing);
        let micros = usize::try_from(elapsed.as_micros()).unwrap_or(usize::MAX);
        let typical = self.run_micros();
        self.run_micros.store(towards(typical, micros), Ordering::Relaxed);
        Mix::used(&self.account, times.end);
    }

    /// How long a run takes typically, in microseconds.
    pub(super) fn run_micros(&self) -> usize {
        self.run_micros.load(Ordering::Relaxed)
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

/// The next estimate of a typical duration: a small step towards the newest one, whatever its distance,
/// so that a run during which the thread was off the processor hardly counts.
fn towards(typical: usize, newest: usize) -> usize {
    let step = typical / 16 + 1;
    match newest.cmp(&typical) {
        _ if typical == 0 => newest,
        std::cmp::Ordering::Greater => typical.saturating_add(step).min(newest),
        std::cmp::Ordering::Less => typical.saturating_sub(step).max(newest),
        std::cmp::Ordering::Equal => typical,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::tensor::{Held, Tensor};

    fn work(deadline: Instant) -> Work {
        let input = Tensor::fp32("x", vec![1, 1], vec![0.0]).unwrap();
        Work {
            inputs: vec![Held::Alone(input)],
            outputs: Vec::new(),
            rows: 1,
            queued: Instant::now(),
            deadline: Some(deadline),
            answer_by: None,
            level: 1,
            client: None,
            beside: false,
        }
    }

    #[tokio::test]
    async fn who_was_taken_along_gets_the_answer_after_the_deadline_too() {
        let sizes = Sizes { rows_max: 8, preferred: Vec::new() };
        let room = Room { requests_max: 8, bytes_max: 1 << 20 };
        let shared = Shared::new(Vec::new(), Vec::new(), sizes, Duration::ZERO, room);
        let deadline = Instant::now() + Duration::from_millis(1);
        let [taken, left] = [0, 1].map(|_| shared.wait(&mut shared.state.lock(), work(deadline)).unwrap());
        let job = shared.state.lock().line.remove(taken.place.unwrap()).unwrap();
        let telling = async {
            tokio::time::sleep_until((deadline + Duration::from_millis(1)).into()).await;
            job.reply.send(Turn::Done(Err(InferError::invalid("told")))).unwrap();
        };
        let (told, ()) = tokio::join!(taken.turn(), telling);
        assert!(matches!(told, Turn::Done(Err(InferError::Invalid { .. }))), "{told:?}");
        let told = left.turn().await;
        assert!(matches!(told, Turn::Done(Err(InferError::DeadlineExceeded { .. }))), "{told:?}");
        assert_eq!(shared.waiting(), 0);
    }

    #[test]
    fn the_typical_duration_follows_the_rule_not_the_exception() {
        let mut typical = towards(0, 5);
        for run in 0..1000 {
            typical = towards(typical, if run % 10 == 0 { 50_000 } else { 5 });
        }
        assert!(typical < 10, "{typical}");
        for _ in 0..200 {
            typical = towards(typical, 3_000);
        }
        assert_eq!(typical, 3_000);
    }
}
