//! The line of requests that wait for a session of one model version: who is next, and which of them can
//! run together.
//!
//! The levels of priority are served one after the other. Within a level clients take turns by the rows
//! that they ask for (start-time fair queueing: Goyal, Vin, Cheng, 1996): a request begins, on a clock that
//! counts rows, when its client's last one ends, or now if none of its client waits. The one that begins
//! first is next, of equals the oldest. So a client that has much waiting delays itself alone: of clients that
//! all wait, none is served more rows than another beyond those of one request of each, but for rows that
//! fill up the runs of others. One client's requests keep their order, and all steps take time in the
//! logarithm of the length.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::lease::Turn;
use crate::error::InferError;
use crate::tensor::Held;

/// Requests that are looked at in vain, at most, for those that could run with another one.
const PASSED_MAX: usize = 256;
/// Requests behind one that just comes that are looked at, at most, to tell its place.
const BEHIND_MAX: usize = 64;

/// Of the time that a client gives a request, the part that is left for the ways of the messages.
const WAYS_PART: u32 = 10;

/// A checked request.
#[derive(Debug)]
pub(crate) struct Work {
    /// The inputs, in the signature's order.
    pub(crate) inputs: Vec<Held>,
    /// The wanted outputs, by their places in the signature, in the order asked for.
    pub(crate) outputs: Vec<usize>,
    /// Which of them may stay where the run leaves them, in that order; none of those that it does not reach.
    pub(crate) stays: Vec<bool>,
    /// Rows, where they are the first dimension of everything that goes in and out; 0 where there is
    /// none, and the request runs alone.
    pub(crate) rows: usize,
    /// When it began to wait.
    pub(crate) queued: Instant,
    /// When it is too late to begin to run it.
    pub(crate) deadline: Option<Instant>,
    /// When nobody wants the answer any more.
    pub(crate) answer_by: Option<Instant>,
    /// Level of priority; lower ones first.
    pub(crate) level: usize,
    /// Who asks. Requests of nobody are those of one client.
    pub(crate) client: Option<SocketAddr>,
    /// Whether its task has others to run meanwhile.
    pub(crate) beside: bool,
}

impl Work {
    /// Bytes of the inputs.
    pub(crate) fn bytes(&self) -> usize {
        self.inputs.iter().fold(0, |sum, input| sum.saturating_add(input.view().bytes()))
    }

    /// Whether its deadline has passed. The clock is read only where there is one.
    pub(super) fn is_late(&self) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= Instant::now())
    }

    /// It has to begin so long before the answer is not wanted any more, and a part of its time earlier: the
    /// client counts the ways of both messages, too. Who waits longest goes first, so that under too much
    /// load all that run would be answered just too late otherwise.
    pub(super) fn allow_for(&mut self, run: Duration) {
        let begin_by = self.answer_by.map(|answer_by| {
            let ways = answer_by.saturating_duration_since(self.queued) / WAYS_PART;
            answer_by.checked_sub(run.saturating_add(ways)).unwrap_or(self.queued)
        });
        self.deadline = self.deadline.into_iter().chain(begin_by).min();
    }

    /// What it takes of its client's share: what has no rows counts as one.
    fn cost(&self) -> u64 {
        self.rows.max(1) as u64
    }

    /// Whether both can run as one: the same outputs of rows of the same shapes.
    fn is_like(&self, other: &Work) -> bool {
        self.rows > 0
            && other.rows > 0
            && self.outputs == other.outputs
            && self
                .inputs
                .iter()
                .zip(&other.inputs)
                .all(|(a, b)| a.view().shape().get(1..) == b.view().shape().get(1..))
    }
}

/// The answer to a request that waited since `queued` until it was too late to run it.
pub(super) fn late(queued: Instant) -> InferError {
    InferError::DeadlineExceeded {
        reason: format!(
            "the request waited for a session for {} us and could not be answered in time: the least of its parameter \
             timeout, grpc-timeout and batching.timeout_us_max",
            queued.elapsed().as_micros()
        ),
    }
}

/// A request in the line, and who waits for it.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) work: Work,
    pub(super) reply: oneshot::Sender<Turn>,
    bytes: usize,
}

impl Job {
    pub(super) fn new(work: Work) -> (Job, oneshot::Receiver<Turn>) {
        let (reply, turn) = oneshot::channel();
        let bytes = work.bytes();
        (Job { work, reply, bytes }, turn)
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Tells who waits that it will not run.
    pub(super) fn refuse(self, error: InferError) {
        // Nobody is there to learn it when this fails.
        let _ = self.reply.send(Turn::Done(Err(error)));
    }
}

/// How many rows run together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sizes {
    /// The most; below 2 none do.
    pub(super) rows_max: usize,
    /// Sizes that are better than others, ascending.
    pub(super) preferred: Vec<usize>,
}

/// How much may wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Room {
    pub(super) requests_max: usize,
    pub(super) bytes_max: usize,
}

impl Room {
    fn holds(&self, requests: usize, bytes: usize) -> bool {
        requests <= self.requests_max && bytes <= self.bytes_max
    }
}

/// Where a request waits; in the order in which they are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    level: usize,
    /// When it begins, on the level's clock.
    start: u64,
    /// Counts requests, so that no two places are equal.
    number: u64,
}

/// What waits of one client on one level.
#[derive(Debug, Default)]
struct Backlog {
    requests: usize,
    bytes: usize,
    /// When the last of them ends, on the level's clock.
    finish: u64,
}

/// Requests that wait.
#[derive(Debug, Default)]
pub(super) struct Line {
    jobs: BTreeMap<Place, Job>,
    bytes: usize,
    /// What all of them take of their clients' shares.
    rows: u64,
    backlogs: HashMap<(usize, Option<SocketAddr>), Backlog>,
    /// When the request began that was served last, on the clock of each level.
    clocks: Vec<u64>,
    pushed: u64,
}

impl Line {
    pub(super) fn len(&self) -> usize {
        self.jobs.len()
    }

    /// Bytes of all inputs that wait.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Rows of all that wait.
    pub(super) fn rows(&self) -> u64 {
        self.rows
    }

    /// Rows that are served before a request that comes now, by those that wait already; 0 where so many are
    /// served after it that counting them would take long.
    pub(super) fn rows_before(&self, work: &Work) -> u64 {
        let place = self.place(work);
        let mut rows = self.rows;
        for (behind, (other, job)) in self.jobs.iter().rev().enumerate() {
            if *other < place {
                return rows;
            }
            if behind == BEHIND_MAX {
                return 0;
            }
            rows = rows.saturating_sub(job.work.cost());
        }
        rows
    }

    /// Where a request belongs that comes now.
    fn place(&self, work: &Work) -> Place {
        let level = work.level;
        let clock = self.clocks.get(level).copied().unwrap_or(0);
        let finished = self.backlogs.get(&(level, work.client)).map_or(0, |backlog| backlog.finish);
        Place { level, start: clock.max(finished), number: self.pushed }
    }

    /// Puts a request where it belongs. Where there is no room, the requests give way that would be served
    /// last, if they would be served after this one: they come back, to be refused. One that claims the
    /// bytes of others must be within its client's share of them.
    ///
    /// # Errors
    /// The request, when there is no room for it.
    pub(super) fn admit(&mut self, job: Job, room: Room) -> Result<(Place, Vec<Job>), Box<Job>> {
        let level = job.work.level;
        if self.clocks.len() <= level {
            self.clocks.resize(level + 1, 0);
        }
        let place = self.place(&job.work);
        let key = (level, job.work.client);
        let backlog = self.backlogs.entry(key).or_default();
        let finished = backlog.finish;
        backlog.requests += 1;
        backlog.bytes = backlog.bytes.saturating_add(job.bytes);
        backlog.finish = place.start.saturating_add(job.work.cost());
        let own = backlog.bytes;
        let leaving = if room.holds(self.jobs.len() + 1, self.bytes.saturating_add(job.bytes)) {
            Vec::new()
        } else if let Some(leaving) = self.who_gives_way(place, job.bytes, own, room) {
            leaving.into_iter().filter_map(|place| self.remove(place)).collect()
        } else {
            self.left(place, &job);
            if let Some(backlog) = self.backlogs.get_mut(&key) {
                backlog.finish = finished;
            }
            return Err(Box::new(job));
        };
        self.pushed += 1;
        self.bytes = self.bytes.saturating_add(job.bytes);
        self.rows = self.rows.saturating_add(job.work.cost());
        self.jobs.insert(place, job);
        Ok((place, leaving))
    }

    /// Those that leave so that one with so many bytes can take a place, of whose client `own` bytes wait
    /// with it; `None` when that does not make room.
    fn who_gives_way(&self, place: Place, job_bytes: usize, own: usize, room: Room) -> Option<Vec<Place>> {
        let (mut requests, mut bytes) = (self.jobs.len() + 1, self.bytes.saturating_add(job_bytes));
        if bytes > room.bytes_max && own > room.bytes_max / self.backlogs.len().max(1) {
            return None;
        }
        let mut leaving = Vec::new();
        for (last, other) in self.jobs.iter().rev() {
            if room.holds(requests, bytes) || *last < place {
                break;
            }
            requests -= 1;
            bytes = bytes.saturating_sub(other.bytes);
            leaving.push(*last);
        }
        room.holds(requests, bytes).then_some(leaving)
    }

    /// Takes a request out, if it still waits.
    pub(super) fn remove(&mut self, place: Place) -> Option<Job> {
        let job = self.jobs.remove(&place)?;
        self.left_line(place, &job);
        Some(job)
    }

    /// Takes the request that is next. Those whose time is over go to `late` instead.
    pub(super) fn next(&mut self, late: &mut Vec<Job>) -> Option<Job> {
        while let Some((place, job)) = self.jobs.pop_first() {
            self.left_line(place, &job);
            if job.work.is_late() {
                late.push(job);
                continue;
            }
            self.clocks[place.level] = self.clocks[place.level].max(place.start);
            return Some(job);
        }
        None
    }

    /// Takes requests that can run together with `first` and each other, in their order; as many as give a
    /// preferred size, where they reach one, else as many as fit.
    pub(super) fn take_like(&mut self, first: &Work, sizes: &Sizes) -> Vec<Job> {
        let mut taken = Vec::new();
        let (mut rows, mut best, mut passed) = (first.rows, None, 0);
        for (place, job) in &self.jobs {
            if first.rows == 0 || rows >= sizes.rows_max || passed == PASSED_MAX {
                break;
            }
            let work = &job.work;
            if !first.is_like(work) || rows + work.rows > sizes.rows_max || work.is_late() {
                passed += 1;
                continue;
            }
            rows += work.rows;
            taken.push(*place);
            if sizes.preferred.contains(&rows) {
                best = Some(taken.len());
            }
        }
        taken.truncate(best.unwrap_or(taken.len()));
        taken.into_iter().filter_map(|place| self.remove(place)).collect()
    }

    /// Rows that can run together with `first`, its own included; counting ends at `enough`.
    pub(super) fn rows_like(&self, first: &Work, enough: usize) -> usize {
        let mut rows = first.rows;
        for job in self.jobs.values() {
            if rows >= enough {
                break;
            }
            if first.is_like(&job.work) {
                rows = rows.saturating_add(job.work.rows);
            }
        }
        rows
    }

    /// Takes a request that was in the line off all accounts.
    fn left_line(&mut self, place: Place, job: &Job) {
        self.bytes = self.bytes.saturating_sub(job.bytes);
        self.rows = self.rows.saturating_sub(job.work.cost());
        self.left(place, job);
    }

    /// Takes a request off its client's account. A client of which nothing waits any more begins anew.
    fn left(&mut self, place: Place, job: &Job) {
        if let Entry::Occupied(mut backlog) = self.backlogs.entry((place.level, job.work.client)) {
            let left = backlog.get_mut();
            left.requests = left.requests.saturating_sub(1);
            left.bytes = left.bytes.saturating_sub(job.bytes);
            if left.requests == 0 {
                backlog.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests;
