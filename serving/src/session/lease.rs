//! A session that somebody runs on: one request alone, or together with those that it takes along.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use tokio::sync::oneshot;

use super::Session;
use super::handover::Shared;
use super::joined::{join, split};
use super::line::{Job, Work, late};
use super::values::{Wanted, elements, run};
use crate::error::InferError;
use crate::statistics::Times;
use crate::tensor::{Held, Tensor, View};

/// The answer to one request.
#[derive(Debug)]
pub(crate) struct Ran {
    /// The wanted outputs, in the order asked for.
    pub(crate) outputs: Vec<Held>,
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
        let inputs: Vec<View<'_>> = work.inputs.iter().map(Held::view).collect();
        let (outputs, times) = self.run_inputs(&inputs, work, &work.stays, work.rows)?;
        Ok(Ran { outputs, times, run_rows: Some(work.rows) })
    }

    /// The outputs of each, which are alike; `None` when they could not be run together.
    fn run_together(&mut self, all: &[&Work]) -> Option<(Vec<Vec<Held>>, Times)> {
        let first = all.first()?;
        let rows: Vec<usize> = all.iter().map(|work| work.rows).collect();
        let ran = joined(all).and_then(|joined| {
            let inputs: Vec<View<'_>> = joined.iter().map(View::Here).collect();
            // In one piece they would stay where each request wants a part of them.
            let (outputs, times) = self.run_inputs(&inputs, first, &[], rows.iter().sum())?;
            Ok((outputs.into_iter().map(Held::into_tensor).collect::<Result<Vec<_>, _>>()?, times))
        });
        let (outputs, times) = match ran {
            Ok(ran) => ran,
            Err(error) => {
                tracing::debug!(%error, requests = all.len(), "a batch failed: its requests run one by one");
                return None;
            }
        };
        let mut parts: Vec<Vec<Held>> = all.iter().map(|_| Vec::with_capacity(outputs.len())).collect();
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
                part.push(Held::Alone(output));
            }
        }
        Some((parts, times))
    }

    /// Runs inputs of so many rows, for the outputs that a request wants, of which those stay.
    fn run_inputs(
        &mut self,
        inputs: &[View<'_>],
        work: &Work,
        stays: &[bool],
        rows: usize,
    ) -> Result<(Vec<Held>, Times), InferError> {
        let session = self.session.as_mut().ok_or_else(|| InferError::internal("the session is gone"))?;
        let stays = stays.iter().copied().chain(std::iter::repeat(false));
        let outputs: Vec<Wanted<'_>> = work
            .outputs
            .iter()
            .zip(stays)
            .map(|(place, stays)| Wanted { spec: &self.shared.outputs[*place], stays })
            .collect();
        let spent = self.shared.spend();
        let elements = elements(inputs);
        // Before the run: one that fails may have taken memory as well.
        session.peak.runs(elements);
        let (outputs, times) = run(session, inputs, &outputs, work.queued)?;
        // A second run, where the first one failed, has had the session since that.
        self.shared.took(&times, spent.so_far(), (rows, elements), self.handed.take());
        Ok((outputs, times))
    }
}

/// The inputs of all requests, which are alike, as those of one.
fn joined(all: &[&Work]) -> Result<Vec<Tensor>, InferError> {
    let inputs = all.first().map_or(0, |first| first.inputs.len());
    let join = |place: usize| {
        let parts = all.iter().map(|work| work.inputs[place].read()).collect::<Result<Vec<_>, _>>()?;
        join(parts.into_iter()).ok_or_else(|| InferError::internal("the inputs of requests are not alike"))
    };
    (0..inputs).map(join).collect()
}
