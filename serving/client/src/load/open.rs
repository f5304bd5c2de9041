//! Open-loop load: sends requests at times that do not depend on the responses.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::task::JoinSet;

use super::client::{Connection, Server, status};
use super::clock::{Clock, Monotonic};
use super::requests::Requests;
use super::schedule::Poisson;
use super::{CLIENTS_MAX, LoadError, Measured, RATE_MAX, processor_time};
use crate::client::Credentials;

/// Maximum number of unanswered requests; further requests count as not sent. Each is a task of some kilobytes.
pub(super) const UNANSWERED_MAX: usize = 20_000;
/// Time to wait for responses after the end of the load and the deadline of its last request.
const PATIENCE: Duration = Duration::from_secs(10);
/// Status of requests that were not answered within that time.
const UNANSWERED: &str = "no answer";
/// The generator rounds send times up to multiples of 1/200 of the deadline: each wake-up takes processor time from a
/// machine that it may share with the server.
const GRAIN_PART: u32 = 200;
/// The generator yields its thread after this number of requests, in case many are due at once.
const TURN: u64 = 16;

/// Parameters of an open-loop load, which is like requests of many independent users.
#[derive(Debug, Clone, Copy)]
pub struct Open {
    /// Requests per second.
    pub rate: f64,
    /// Number of connections, used in turn.
    pub connections: usize,
    /// Time limit for a response, from the scheduled time of its request; the generator sends the remaining time to
    /// the server as `grpc-timeout`. It sends requests together that are due within 1/200 of the limit.
    pub deadline: Option<Duration>,
    /// Duration of the warm-up, which is not counted.
    pub warm_up: Duration,
    /// Duration of the measurement.
    pub duration: Duration,
    /// Seed of the random send times.
    pub seed: u64,
}

/// Runs the load on the server at `address`, without credentials.
///
/// # Errors
/// As [`open_with`].
pub async fn open(address: &str, requests: &Requests, load: &Open) -> Result<Measured, LoadError> {
    open_with(address, &Credentials::default(), requests, load).await
}

/// Runs the load on the server at `address`, with credentials. Dropping the future ends the load.
///
/// # Errors
/// [`LoadError::Load`] for a rate or number of connections out of range; [`LoadError::Client`] when the server cannot
/// be reached, or the credentials cannot be used; [`LoadError::Timer`]. Error responses are counted in the result.
pub async fn open_with(
    address: &str,
    credentials: &Credentials,
    requests: &Requests,
    load: &Open,
) -> Result<Measured, LoadError> {
    if !(load.rate > 0.0 && load.rate <= RATE_MAX) {
        return Err(LoadError::Load(format!(
            "a rate of {} requests per second: it is above 0 and at most {RATE_MAX}",
            load.rate
        )));
    }
    if load.connections == 0 || load.connections > CLIENTS_MAX {
        return Err(LoadError::Load(format!(
            "{} connections: from 1 to {CLIENTS_MAX} can be",
            load.connections
        )));
    }
    let connections = Connection::open(address, credentials, requests, load.connections).await?;
    let processor = processor_time();
    let mut measured = drive(Monotonic::start()?, connections, load).await;
    let window = load.duration.as_secs_f64() / (load.warm_up + load.duration).as_secs_f64();
    // Warm-up and measurement have the same rate, so the work is proportional to the time.
    measured.processor = processor_time().saturating_sub(processor).mul_f64(window);
    Ok(measured)
}

/// Sends requests as scheduled and waits for the responses.
pub(super) async fn drive<C: Clock, S: Server>(clock: C, servers: Vec<S>, load: &Open) -> Measured {
    let end = load.warm_up + load.duration;
    let measured = Arc::new(Mutex::new(Measured { elapsed: load.duration, ..Measured::default() }));
    let grain = load.deadline.unwrap_or_default() / GRAIN_PART;
    let (mut counted, mut unsent) = (0, 0);
    let mut requests = JoinSet::new();
    let schedule = Poisson::new(load.rate, load.seed).take_while(|at| *at < end);
    for ((number, at), server) in (0u64..).zip(schedule).zip(servers.iter().cycle()) {
        clock.until(rounded_up(at, grain)).await;
        while requests.try_join_next().is_some() {}
        let counts = at >= load.warm_up;
        counted += u64::from(counts);
        if requests.len() >= UNANSWERED_MAX {
            unsent += u64::from(counts);
        } else {
            let request = Request { number, at, counts, deadline: load.deadline };
            requests.spawn(request.send(clock.clone(), server.clone(), Arc::clone(&measured)));
        }
        if number % TURN == TURN - 1 {
            tokio::task::yield_now().await;
        }
    }
    let patience = end + load.deadline.unwrap_or_default() + PATIENCE;
    tokio::select! {
        biased;
        () = async { while requests.join_next().await.is_some() {} } => {}
        () = clock.until(patience) => {}
    }
    drop(requests);
    let mut measured = std::mem::take(&mut *measured.lock());
    measured.unsent += unsent;
    let known = measured.latency.count() + measured.failures() + measured.unsent;
    let unanswered = counted - known.min(counted);
    if unanswered > 0 {
        measured.failed.insert(UNANSWERED, unanswered);
    }
    measured
}

/// The first multiple of `grain` that is not before `at`.
pub(super) fn rounded_up(at: Duration, grain: Duration) -> Duration {
    match at.as_nanos().checked_rem(grain.as_nanos()) {
        None | Some(0) => at,
        // The remainder is shorter than the grain, and fits into 64 bits for deadlines of thousands of years.
        Some(past) => at + (grain - Duration::from_nanos(past as u64)),
    }
}

/// One request of the schedule.
struct Request {
    number: u64,
    /// Scheduled time.
    at: Duration,
    /// Whether the request is counted, because it is after the warm-up.
    counts: bool,
    deadline: Option<Duration>,
}

impl Request {
    async fn send<C: Clock, S: Server>(self, clock: C, mut server: S, measured: Arc<Mutex<Measured>>) {
        let sent = clock.now();
        let late = sent.saturating_sub(self.at);
        let left = self.deadline.map(|deadline| deadline.saturating_sub(late));
        if left.is_some_and(|left| left.is_zero()) {
            measured.lock().unsent += u64::from(self.counts);
            return;
        }
        let answer = server.call(self.number, left).await;
        if !self.counts {
            return;
        }
        let took = clock.now().saturating_sub(self.at);
        let mut measured = measured.lock();
        measured.late.record(late);
        match answer {
            Ok(()) => {
                measured.latency.record(took);
                measured.in_time += u64::from(self.deadline.is_none_or(|deadline| took <= deadline));
            }
            Err(code) => *measured.failed.entry(status(code)).or_default() += 1,
        }
    }
}
