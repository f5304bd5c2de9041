//! Bounded request queue of one model version.
//!
//! The queue serves levels of priority one after the other. Within a level, clients share the sessions by start-time
//! fair queueing (Goyal, Vin, Cheng, 1996) over a virtual clock that counts rows. A request starts when the last
//! request of its client ends, or at the present time of the clock if its client has none queued. The request with
//! the earliest start is next; among equals, the oldest.
//!
//! A client that floods the queue therefore delays only its own requests. Between two clients that always have
//! requests queued, the rows served differ by at most one request of each, except for rows that fill batches of
//! others. Requests of one client keep their order. Every operation takes logarithmic time.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::SocketAddr;
use std::time::Instant;

use tokio::sync::oneshot;

use super::work::{Output, Work};
use millrace_serving_core::error::InferError;

/// Maximum number of requests skipped in the search for requests that fit into a batch.
const SKIPPED_MAX: usize = 256;
/// Maximum number of requests behind a new one that are counted to find its place.
const BEHIND_MAX: usize = 64;

/// A queued request and the channel for its result.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) work: Work,
    pub(super) reply: oneshot::Sender<Result<Output, InferError>>,
    /// Whether the request found no idle session, so that it counts toward the limits of the queue.
    pub(super) waits: bool,
    /// End of the request's wait for a fuller batch.
    pub(super) lingers_until: Option<Instant>,
    bytes: usize,
}

impl Job {
    pub(super) fn new(work: Work, waits: bool) -> (Job, oneshot::Receiver<Result<Output, InferError>>) {
        let (reply, answer) = oneshot::channel();
        let bytes = work.bytes();
        (Job { work, reply, waits, lingers_until: None, bytes }, answer)
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Answers with an error instead of a run.
    pub(super) fn refuse(self, error: InferError) {
        // Fails when the caller has gone and needs no answer.
        let _ = self.reply.send(Err(error));
    }
}

/// Limits on waiting requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct QueueLimits {
    pub(super) requests_max: usize,
    pub(super) bytes_max: usize,
}

impl QueueLimits {
    fn allow(&self, requests: usize, bytes: usize) -> bool {
        requests <= self.requests_max && bytes <= self.bytes_max
    }
}

/// Position of a request in the queue, in the order of service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Position {
    level: usize,
    /// Start on the level's virtual clock.
    start: u64,
    /// Sequence number, so that no two positions are equal.
    number: u64,
}

/// Queued requests of one client on one level.
#[derive(Debug, Default)]
struct Backlog {
    requests: usize,
    bytes: usize,
    /// End of the client's last request, on the level's virtual clock.
    finish: u64,
}

/// Queued requests.
#[derive(Debug, Default)]
pub(super) struct RequestQueue {
    jobs: BTreeMap<Position, Job>,
    /// Jobs that wait for a fuller batch, by the end of that wait.
    lingering: BTreeSet<(Instant, Position)>,
    /// Number of jobs that found no idle session, and their bytes.
    waiting: usize,
    bytes: usize,
    /// Cost of all jobs.
    rows: u64,
    backlogs: HashMap<(usize, Option<SocketAddr>), Backlog>,
    /// Start of the request served last, on the virtual clock of each level.
    clocks: Vec<u64>,
    pushed: u64,
}

impl RequestQueue {
    pub(super) fn len(&self) -> usize {
        self.jobs.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Number of requests that found no idle session.
    pub(super) fn waiting(&self) -> usize {
        self.waiting
    }

    /// Bytes of the inputs of waiting requests.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Rows of all requests.
    pub(super) fn rows(&self) -> u64 {
        self.rows
    }

    /// Queued rows that run before a new request; 0 if more than [`BEHIND_MAX`] requests run after it.
    pub(super) fn rows_before(&self, work: &Work) -> u64 {
        let position = self.position(work);
        let mut rows = self.rows;
        for (behind, (other, job)) in self.jobs.iter().rev().enumerate() {
            if *other < position {
                return rows;
            }
            if behind == BEHIND_MAX {
                return 0;
            }
            rows = rows.saturating_sub(job.work.cost());
        }
        rows
    }

    /// The position of a new request.
    fn position(&self, work: &Work) -> Position {
        let level = work.level;
        let clock = self.clocks.get(level).copied().unwrap_or(0);
        let finished = self.backlogs.get(&(level, work.client)).map_or(0, |backlog| backlog.finish);
        Position { level, start: clock.max(finished), number: self.pushed }
    }

    /// Adds a request. When the queue is full, the request displaces waiting requests that would run after it, the
    /// last ones first. They are returned for the caller to refuse. A request that claims the bytes of other clients
    /// must stay within its own client's share of them.
    ///
    /// # Errors
    /// The request, when the queue has no room for it.
    pub(super) fn push(&mut self, job: Job, limits: QueueLimits) -> Result<(Position, Vec<Job>), Box<Job>> {
        let level = job.work.level;
        if self.clocks.len() <= level {
            self.clocks.resize(level + 1, 0);
        }
        let position = self.position(&job.work);
        let key = (level, job.work.client);
        let backlog = self.backlogs.entry(key).or_default();
        let finished = backlog.finish;
        backlog.requests += 1;
        backlog.bytes = backlog.bytes.saturating_add(job.bytes);
        backlog.finish = position.start.saturating_add(job.work.cost());
        let own = backlog.bytes;
        let fits = !job.waits || limits.allow(self.waiting + 1, self.bytes.saturating_add(job.bytes));
        let displaced = if fits {
            Vec::new()
        } else if let Some(displaced) = self.displaced_by(position, job.bytes, own, limits) {
            displaced.into_iter().filter_map(|position| self.remove(position)).collect()
        } else {
            self.settle(position, &job);
            if let Some(backlog) = self.backlogs.get_mut(&key) {
                backlog.finish = finished;
            }
            return Err(Box::new(job));
        };
        self.pushed += 1;
        if job.waits {
            self.waiting += 1;
            self.bytes = self.bytes.saturating_add(job.bytes);
        }
        self.rows = self.rows.saturating_add(job.work.cost());
        self.lingering.extend(job.lingers_until.map(|until| (until, position)));
        self.jobs.insert(position, job);
        Ok((position, displaced))
    }

    /// The waiting requests to displace so that one of `job_bytes` fits at a position; `own` counts its client's
    /// queued bytes, including it. `None` when displacing them does not make room.
    fn displaced_by(
        &self,
        position: Position,
        job_bytes: usize,
        own: usize,
        limits: QueueLimits,
    ) -> Option<Vec<Position>> {
        let (mut requests, mut bytes) = (self.waiting + 1, self.bytes.saturating_add(job_bytes));
        if bytes > limits.bytes_max && own > limits.bytes_max / self.backlogs.len().max(1) {
            return None;
        }
        let mut displaced = Vec::new();
        for (last, other) in self.jobs.iter().rev() {
            if limits.allow(requests, bytes) || *last < position {
                break;
            }
            if other.waits {
                requests -= 1;
                bytes = bytes.saturating_sub(other.bytes);
                displaced.push(*last);
            }
        }
        limits.allow(requests, bytes).then_some(displaced)
    }

    /// Removes a request, if it is still queued.
    pub(super) fn remove(&mut self, position: Position) -> Option<Job> {
        let job = self.jobs.remove(&position)?;
        self.removed(position, &job);
        Some(job)
    }

    /// Moves requests at the head of the queue whose deadline has passed to `late`.
    pub(super) fn expire(&mut self, now: Instant, late: &mut Vec<Job>) {
        while let Some(head) = self.jobs.first_entry()
            && head.get().work.is_late(now)
        {
            let (position, job) = head.remove_entry();
            self.removed(position, &job);
            late.push(job);
        }
    }

    /// The next request.
    pub(super) fn head(&self) -> Option<&Job> {
        self.jobs.first_key_value().map(|(_, job)| job)
    }

    /// A request, if it is still queued.
    pub(super) fn get(&self, position: Position) -> Option<&Job> {
        self.jobs.get(&position)
    }

    /// Whether the wait of any queued request for a fuller batch is over.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.lingering.first().is_some_and(|(until, _)| *until <= now)
    }

    /// Takes the next request.
    pub(super) fn pop(&mut self) -> Option<Job> {
        let (position, _) = self.jobs.first_key_value()?;
        self.take(*position)
    }

    /// Takes a request to run it now, if it is still queued.
    pub(super) fn take(&mut self, position: Position) -> Option<Job> {
        let job = self.remove(position)?;
        self.clocks[position.level] = self.clocks[position.level].max(position.start);
        Some(job)
    }

    /// Takes requests for a batch with `first`, in queue order. Takes enough for the largest preferred size that they
    /// reach; if they reach none, takes as many as fit into `rows_max`.
    pub(super) fn take_like(
        &mut self,
        first: &Work,
        rows_max: usize,
        preferred: &[usize],
        now: Instant,
    ) -> Vec<Job> {
        let mut taken = Vec::new();
        let (mut rows, mut best, mut skipped) = (first.rows, None, 0);
        for (position, job) in &self.jobs {
            if first.rows == 0 || rows >= rows_max || skipped == SKIPPED_MAX {
                break;
            }
            let work = &job.work;
            if !first.is_like(work) || rows + work.rows > rows_max || work.is_late(now) {
                skipped += 1;
                continue;
            }
            rows += work.rows;
            taken.push(*position);
            if preferred.contains(&rows) {
                best = Some(taken.len());
            }
        }
        taken.truncate(best.unwrap_or(taken.len()));
        taken.into_iter().filter_map(|position| self.remove(position)).collect()
    }

    /// Queued rows that can share a batch with `first`, including `first` if it is queued; stops counting at
    /// `enough`.
    pub(super) fn rows_like(&self, first: &Work, enough: usize) -> usize {
        let mut rows = 0usize;
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

    /// Subtracts a request that was in the queue from all counts.
    fn removed(&mut self, position: Position, job: &Job) {
        if job.waits {
            self.waiting -= 1;
            self.bytes = self.bytes.saturating_sub(job.bytes);
        }
        if let Some(until) = job.lingers_until {
            self.lingering.remove(&(until, position));
        }
        self.rows = self.rows.saturating_sub(job.work.cost());
        self.settle(position, job);
    }

    /// Subtracts a request from its client's backlog. A client without queued requests starts at the level's clock
    /// again.
    fn settle(&mut self, position: Position, job: &Job) {
        if let Entry::Occupied(mut backlog) = self.backlogs.entry((position.level, job.work.client)) {
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
