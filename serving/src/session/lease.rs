//! A session that somebody runs on: one request alone, or together with those that it takes along.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use tokio::sync::oneshot;

use super::Session;
use millrace_bundle::TensorSpec;

use super::handover::Shared;
use super::joined::{join, split};
use super::line::{Job, Work, late};
use super::values::{elements, run};
use crate::error::InferError;
use crate::statistics::Times;
use crate::tensor::Tensor;

/// The answer to one request.
#[derive(Debug)]
pub(crate) struct Ran {
    /// The wanted outputs, in the order asked for.
    pub(crate) outputs: Vec<Tensor>,
    /// When each step was reached.
    pub(crate) times: Times,
    /// Rows of the run, where this request is the one to count it.
    pub(crate) run_rows: Option<usize>,
}

/// What a request that waits is told.
#[derive(Debug)]
pub(super) enum Turn {
    /// It runs now, on this session, and takes others along.
    Lead(Lease, Work),
    /// It was taken along, or will not run.
    Done(Result<Ran, InferError>),
}

/// A session that somebody runs on; goes to the next one when dropped, also when the run panics.
#[derive(Debug)]
pub(super) struct Lease {
    pub(super) shared: Arc<Shared>,
    pub(super) session: Option<Session>,
    /// Whether others wait for it to run, although sessions are free.
    pub(super) gathers: bool,
    /// When it was handed to one of the line.
    handed: Option<Instant>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.end_gathering();
        if let Some(session) = self.session.take() {
            self.shared.give_back(session);
        }
    }
}

impl Lease {
    pub(super) fn new(shared: &Arc<Shared>, session: Session) -> Lease {
        Lease { shared: Arc::clone(shared), session: Some(session), gathers: false, handed: None }
    }

    /// For one who has waited in line.
    pub(super) fn of_line(shared: &Arc<Shared>, session: Session) -> Lease {
        let mut lease = Lease::new(shared, session);
        lease.handed = Some(Instant::now());
        lease
    }

    /// Others get the sessions that are free from now on.
    pub(super) fn end_gathering(&mut self) {
        if std::mem::take(&mut self.gathers) {
            self.shared.gathered();
        }
    }

    /// Runs a request and those in the line that can run with it.
    pub(super) fn run(mut self, work: Work) -> Result<Ran, InferError> {
        let shared = Arc::clone(&self.shared);
        if !shared.keeps_rows.load(Ordering::Relaxed) {
            self.end_gathering();
            return self.run_alone(&work);
        }
        let others = shared.take_like(&work);
        if self.gathers {
            shared.company.found(1 + others.len());
            self.end_gathering();
        }
        if others.is_empty() {
            return self.run_alone(&work);
        }
        let all: Vec<&Work> = std::iter::once(&work).chain(others.iter().map(|job| &job.work)).collect();
        let together = self.run_together(&all);
        let Some((parts, times)) = together else {
            // One of them may be the reason: the others shall not suffer from it.
            let own = self.run_alone(&work);
            for Job { work, reply, .. } in others {
                let ran = self.run_alone(&work);
                drop(work);
                let _ = reply.send(Turn::Done(ran));
            }
            return own;
        };
        let rows = all.iter().map(|work| work.rows).sum();
        // The next run can begin while this one is told.
        drop(self);
        let mut parts = parts.into_iter();
        let own = parts.next().unwrap_or_default();
        for (job, outputs) in others.into_iter().zip(parts) {
            let Job { work, reply, .. } = job;
            let times = Times { queued: work.queued, ..times };
            // Whoever is told may want tensors for himself that he shares with it.
            drop(work);
            let _ = reply.send(Turn::Done(Ok(Ran { outputs, times, run_rows: None })));
        }
        let times = Times { queued: work.queued, ..times };
        Ok(Ran { outputs: own, times, run_rows: Some(rows) })
    }

    /// Runs a request and those in the line that can run with it, for one who waits to be told. Without him nothing
    /// runs.
    pub(super) fn run_for(self, work: Work, reply: oneshot::Sender<Turn>) {
        if reply.is_closed() {
            return;
        }
        let ran = if work.is_late() { Err(late(work.queued)) } else { self.run(work) };
        // He may have gone during the run, which others had a part in.
        let _ = reply.send(Turn::Done(ran));
    }

    /// Runs a request and nothing else.
    pub(super) fn run_alone(&mut self, work: &Work) -> Result<Ran, InferError> {
        let inputs: Vec<&Tensor> = work.inputs.iter().map(Deref::deref).collect();
        let (outputs, times) = self.run_inputs(&inputs, work, work.rows)?;
        Ok(Ran { outputs, times, run_rows: Some(work.rows) })
    }

    /// The outputs of each, which are alike; `None` when they could not be run together.
    fn run_together(&mut self, all: &[&Work]) -> Option<(Vec<Vec<Tensor>>, Times)> {
        let first = all.first()?;
        let joined: Vec<Tensor> = (0..first.inputs.len())
            .map(|place| join(all.iter().map(|work| &*work.inputs[place])))
            .collect::<Option<_>>()?;
        let inputs: Vec<&Tensor> = joined.iter().collect();
        let rows: Vec<usize> = all.iter().map(|work| work.rows).collect();
        let (outputs, times) = match self.run_inputs(&inputs, first, rows.iter().sum()) {
            Ok(ran) => ran,
            Err(error) => {
                tracing::debug!(%error, requests = all.len(), "a batch failed: its requests run one by one");
                return None;
            }
        };
        let mut parts: Vec<Vec<Tensor>> = all.iter().map(|_| Vec::with_capacity(outputs.len())).collect();
        for output in outputs {
            let name = output.name.clone();
            let Some(split) = split(output, &rows) else {
                tracing::warn!(
                    output = name,
                    "rows do not come out as they went in: requests run one by one"
                );
                self.shared.keeps_rows.store(false, Ordering::Relaxed);
                return None;
            };
            for (part, output) in parts.iter_mut().zip(split) {
                part.push(output);
            }
        }
        Some((parts, times))
    }

    /// Runs inputs of so many rows, for the outputs that a request wants.
    fn run_inputs(
        &mut self,
        inputs: &[&Tensor],
        work: &Work,
        rows: usize,
    ) -> Result<(Vec<Tensor>, Times), InferError> {
        let session = self.session.as_mut().ok_or_else(|| InferError::internal("the session is gone"))?;
        let outputs: Vec<&TensorSpec> =
            work.outputs.iter().map(|place| &self.shared.outputs[*place]).collect();
        let spent = self.shared.spend();
        let elements = elements(inputs);
        // Before the run: one that fails may have taken memory as well.
        session.peak.runs(elements);
        let (tensors, times) = run(session, inputs, &outputs, work.queued)?;
        // A second run, where the first one failed, has had the session since that.
        self.shared.took(&times, spent.so_far(), (rows, elements), self.handed.take());
        Ok((tensors, times))
    }
}
