//! Place of one request in its sequence, held from its arrival to its response.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::Sequences;
use super::live::Claim;
use millrace_serving_core::error::InferError;
use millrace_serving_core::parameters::Step;
use millrace_serving_core::tensor::TensorHandle;
use millrace_serving_runtime::session::{Output, Pool, Work};

/// A place in the queue. Dropping it lets the next request run; without a commit, the state is unchanged.
#[derive(Debug)]
pub struct SequencePosition {
    sequences: Arc<Sequences>,
    pub(super) step: Step,
    number: u64,
    /// Fires when the requests before it are done; `None` if there are none.
    pub(super) turn: Option<oneshot::Receiver<()>>,
    pub(super) claim: Claim,
    /// The states that the run left, and their bytes.
    pub(super) left: Option<(Vec<TensorHandle>, usize)>,
    /// Versions in which a sequence of the same id ends when this one starts.
    others: Vec<Arc<Sequences>>,
}

impl SequencePosition {
    pub(super) fn new(
        sequences: Arc<Sequences>,
        step: Step,
        number: u64,
        turn: Option<oneshot::Receiver<()>>,
    ) -> SequencePosition {
        SequencePosition {
            sequences,
            step,
            number,
            turn,
            claim: Claim::default(),
            left: None,
            others: Vec::new(),
        }
    }

    /// Sets the other versions in which a sequence of the same id ends when this one starts.
    pub(crate) fn replaces(&mut self, others: Vec<Arc<Sequences>>) {
        self.others = others;
    }

    /// Runs a request, with inputs and outputs as clients see them, after the requests before it. Cancel safe.
    ///
    /// # Errors
    /// [`InferError::Invalid`] when the sequence is not live, or the request has several rows;
    /// [`InferError::DeadlineExceeded`], [`InferError::Overloaded`]; as [`Pool::run`].
    pub async fn run(&mut self, pool: &Pool, mut work: Work) -> Result<Output, InferError> {
        let sequences = Arc::clone(&self.sequences);
        let plan = sequences.plan();
        plan.check_rows(work.rows)?;
        self.wait(&work).await?;
        let wanted = work.outputs.len();
        {
            let states = sequences.begin(&self.step, &mut self.claim)?;
            work.inputs = plan.inputs(std::mem::take(&mut work.inputs), &self.step, &states)?;
            work.outputs = plan.outputs(&work.outputs);
            // States stay on the device if all sessions share its memory, since the next request may run on any
            // session. States that the client also gets do not stay.
            let common = pool.memory().is_some();
            let (client, kept) = work.outputs.split_at(wanted);
            let stays = kept.iter().map(|place| common && !client.contains(place));
            work.stays = std::iter::repeat_n(false, wanted).chain(stays).collect();
        }
        let mut ran = pool.run(work).await?;
        let states = plan.states(ran.outputs.split_off(wanted))?;
        let bytes = states.iter().fold(0usize, |sum, state| sum.saturating_add(state.view().bytes()));
        if !self.step.end {
            sequences.claim(&self.step, bytes, &mut self.claim)?;
        }
        self.left = Some((states, bytes));
        Ok(ran)
    }

    /// Waits for the requests before it, until its deadline at the latest.
    async fn wait(&mut self, work: &Work) -> Result<(), InferError> {
        let Some(turn) = &mut self.turn else { return Ok(()) };
        if turn.try_recv().is_err() {
            let _waiting = self.sequences.wait(work.bytes())?;
            match work.deadline {
                // The sender stays in the queue as long as this place exists.
                None => {
                    let _ = turn.await;
                }
                Some(deadline) => {
                    if tokio::time::timeout_at(deadline.into(), turn).await.is_err() {
                        return Err(self.deadline_error(work));
                    }
                }
            }
        }
        self.turn = None;
        Ok(())
    }

    fn deadline_error(&self, work: &Work) -> InferError {
        InferError::DeadlineExceeded {
            reason: format!(
                "the request waited for {} us for those before it of sequence {} and could not be answered in time: the \
                 least of its parameter timeout, grpc-timeout and batching.timeout_us_max",
                work.queued.elapsed().as_micros(),
                self.step.id
            ),
        }
    }

    /// Makes the state that the run left current for the next request of the sequence.
    pub fn commit(&mut self) {
        if let Some((states, bytes)) = self.left.take() {
            let claim = std::mem::take(&mut self.claim);
            self.sequences.commit(&self.step, claim, states, bytes);
            for other in self.others.drain(..) {
                other.forget(&self.step.id);
            }
        }
    }
}

impl Drop for SequencePosition {
    fn drop(&mut self) {
        self.sequences.leave(&self.step, self.number, &self.claim);
    }
}
