//! The line of requests that wait for a session of one model version: in the order they came, and which
//! of them can run together.

use std::collections::VecDeque;
use std::time::Instant;

use tokio::sync::oneshot;

use super::Turn;
use crate::tensor::Tensor;

/// A checked request.
#[derive(Debug)]
pub(crate) struct Work {
    /// The inputs, in the signature's order.
    pub(crate) inputs: Vec<Tensor>,
    /// The wanted outputs, by their places in the signature, in the order asked for.
    pub(crate) outputs: Vec<usize>,
    /// Rows, where they are the first dimension of everything that goes in and out; 0 where there is
    /// none, and the request runs alone.
    pub(crate) rows: usize,
    /// When it began to wait.
    pub(crate) queued: Instant,
}

impl Work {
    /// Bytes of the inputs.
    pub(super) fn bytes(&self) -> usize {
        self.inputs.iter().fold(0, |sum, input| sum.saturating_add(input.data.raw_len()))
    }

    /// Whether both can run as one: the same outputs of rows of the same shapes.
    fn is_like(&self, other: &Work) -> bool {
        self.rows > 0
            && other.rows > 0
            && self.outputs == other.outputs
            && self.inputs.iter().zip(&other.inputs).all(|(a, b)| a.shape.get(1..) == b.shape.get(1..))
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

    fn is_waited_for(&self) -> bool {
        !self.reply.is_closed()
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

/// Requests that wait, the oldest first. Those whose callers have gone stay until they are come across.
#[derive(Debug, Default)]
pub(super) struct Line {
    jobs: VecDeque<Job>,
    bytes: usize,
}

impl Line {
    pub(super) fn push(&mut self, job: Job) {
        self.bytes = self.bytes.saturating_add(job.bytes);
        self.jobs.push_back(job);
    }

    pub(super) fn len(&self) -> usize {
        self.jobs.len()
    }

    /// Bytes of all inputs that wait.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Drops requests whose callers have gone.
    pub(super) fn purge(&mut self) {
        self.jobs.retain(Job::is_waited_for);
        self.bytes = self.jobs.iter().map(|job| job.bytes).sum();
    }

    /// Takes the oldest request that somebody waits for.
    pub(super) fn next(&mut self) -> Option<Job> {
        while let Some(job) = self.pop() {
            if job.is_waited_for() {
                return Some(job);
            }
        }
        None
    }

    /// Takes the oldest requests that can run together with `first` and others of them; as many as give a
    /// preferred size, where they reach one, else as many as fit.
    pub(super) fn take_like(&mut self, first: &Work, sizes: &Sizes) -> Vec<Job> {
        let (mut taken, mut others) = (Vec::new(), Vec::new());
        let (mut rows, mut best) = (first.rows, None);
        while first.rows > 0 && rows < sizes.rows_max {
            let Some(job) = self.next() else { break };
            if !first.is_like(&job.work) || rows + job.work.rows > sizes.rows_max {
                others.push(job);
                continue;
            }
            rows += job.work.rows;
            taken.push(job);
            if sizes.preferred.contains(&rows) {
                best = Some(taken.len());
            }
        }
        let too_many = taken.split_off(best.unwrap_or(taken.len()));
        // Back to where they were: in the order they came.
        let mut back: Vec<Job> = others.into_iter().chain(too_many).collect();
        back.sort_by_key(|job| job.work.queued);
        for job in back.into_iter().rev() {
            self.bytes = self.bytes.saturating_add(job.bytes);
            self.jobs.push_front(job);
        }
        taken
    }

    /// Rows that can run together with `first`, its own included; counting ends at `enough`.
    pub(super) fn rows_like(&self, first: &Work, enough: usize) -> usize {
        let mut rows = first.rows;
        for job in &self.jobs {
            if rows >= enough {
                break;
            }
            if job.is_waited_for() && first.is_like(&job.work) {
                rows = rows.saturating_add(job.work.rows);
            }
        }
        rows
    }

    fn pop(&mut self) -> Option<Job> {
        let job = self.jobs.pop_front()?;
        self.bytes = self.bytes.saturating_sub(job.bytes);
        Some(job)
    }
}

#[cfg(test)]
mod tests;
