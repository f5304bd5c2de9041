//! Batches: a run of one or several requests on a session, and the distribution of its results to their callers.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::Runner;
use super::queue::Job;
use super::row_join::{join, last_row, split};
use super::run_end::RunEnd;
use super::scheduler::Scheduler;
use super::values::RequestedOutput;
use super::work::{Output, Work};
use millrace_serving_core::error::InferError;
use millrace_serving_core::statistics::Times;
use millrace_serving_core::tensor::{Tensor, TensorHandle, View};

/// A session in use; dropping the lease returns the session to its scheduler, also when a run panics.
#[derive(Debug)]
pub(super) struct Lease<R: Runner> {
    scheduler: Arc<Scheduler<R>>,
    session: Option<R>,
}

impl<R: Runner> Drop for Lease<R> {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            self.scheduler.give_back(session);
        }
    }
}

impl<R: Runner> Lease<R> {
    pub(super) fn new(scheduler: &Arc<Scheduler<R>>, session: R) -> Lease<R> {
        Lease { scheduler: Arc::clone(scheduler), session: Some(session) }
    }

    /// The session.
    ///
    /// # Errors
    /// [`InferError::Internal`] when the session was taken out of the lease.
    pub(super) fn session(&mut self) -> Result<&mut R, InferError> {
        self.session.as_mut().ok_or_else(|| InferError::internal("the session has been returned"))
    }

    /// Runs one request, until `end` ends the run.
    ///
    /// # Errors
    /// [`InferError::Invalid`] when the graph cannot take the inputs; [`InferError::Internal`].
    pub(super) fn run_alone(&mut self, work: &Work, end: Option<&RunEnd>) -> Result<Output, InferError> {
        let inputs: Vec<View<'_>> = work.inputs.iter().map(TensorHandle::view).collect();
        if self.scheduler.has_batches()
            && work.rows > 0
            && !work.stays.contains(&true)
            && inputs.iter().all(|input| matches!(input, View::Here(_)))
        {
            let rows = self.session()?.steady_rows(work.rows, false);
            if rows > work.rows
                && let Some(mut outputs) = self.run_filled(&[work], rows, end)
                && let Some(output) = outputs.pop()
            {
                return Ok(Output { run_rows: Some(work.rows), ..output });
            }
        }
        let (outputs, times) = self.run_inputs(&inputs, work, &work.stays, work.rows, end)?;
        Ok(Output { outputs, times, run_rows: Some(work.rows) })
    }

    /// Runs inputs of `rows` rows for the outputs that `work` requests; `stays` marks outputs that stay on the
    /// device.
    fn run_inputs(
        &mut self,
        inputs: &[View<'_>],
        work: &Work,
        stays: &[bool],
        rows: usize,
        end: Option<&RunEnd>,
    ) -> Result<(Vec<TensorHandle>, Times), InferError> {
        let scheduler = Arc::clone(&self.scheduler);
        let stays = stays.iter().copied().chain(std::iter::repeat(false));
        let wanted = work.outputs.iter().zip(stays);
        let outputs: Vec<RequestedOutput<'_>> = wanted
            .map(|(index, stays)| RequestedOutput { spec: &scheduler.outputs[*index], stays })
            .collect();
        let (outputs, times) = self.session()?.run(inputs, &outputs, work.queued, end)?;
        let elements = inputs.iter().map(|input| input.elements()).sum();
        let elapsed = times.end.saturating_duration_since(times.computing);
        scheduler.run_times.record(rows, elements, elapsed);
        Ok((outputs, times))
    }

    /// Runs several requests as one; `None` when the run failed.
    fn run_together(&mut self, jobs: &[Job], end: Option<&RunEnd>) -> Option<Vec<Output>> {
        let works: Vec<&Work> = jobs.iter().map(|job| &job.work).collect();
        let rows = works.iter().map(|work| work.rows).sum();
        let rows = self.session().ok()?.steady_rows(rows, true);
        self.run_filled(&works, rows, end)
    }

    /// Runs requests as one run of `run_rows` rows, filled with copies of the last one; `None` when the run failed.
    fn run_filled(&mut self, works: &[&Work], run_rows: usize, end: Option<&RunEnd>) -> Option<Vec<Output>> {
        let first = works.first()?;
        let mut rows: Vec<usize> = works.iter().map(|work| work.rows).collect();
        let filler = run_rows.saturating_sub(rows.iter().sum());
        rows.extend((filler > 0).then_some(filler));
        let ran = joined(works, filler).and_then(|joined| {
            let inputs: Vec<View<'_>> = joined.iter().map(View::Here).collect();
            // Outputs are split in the processor's memory, so none stays on the device.
            let (outputs, times) = self.run_inputs(&inputs, first, &[], run_rows, end)?;
            Ok((outputs.into_iter().map(TensorHandle::into_tensor).collect::<Result<Vec<_>, _>>()?, times))
        });
        let (outputs, times) = match ran {
            Ok(ran) => ran,
            Err(error) => {
                tracing::debug!(%error, requests = works.len(), "a batch failed");
                return None;
            }
        };
        let of = |work: &&Work| Output {
            outputs: Vec::with_capacity(outputs.len()),
            times: Times { queued: work.queued, ..times },
            run_rows: None,
        };
        let mut parts: Vec<Output> = works.iter().map(of).collect();
        for output in outputs {
            let name = output.name.clone();
            let Some(split) = split(output, &rows) else {
                tracing::warn!(
                    output = name,
                    "the rows of an output and of the inputs differ: requests run one by one from now on"
                );
                self.scheduler.keeps_rows.store(false, Ordering::Relaxed);
                return None;
            };
            for (part, output) in parts.iter_mut().zip(split) {
                part.outputs.push(TensorHandle::Alone(output));
            }
        }
        Some(parts)
    }
}

/// Requests that run together on a session.
#[derive(Debug)]
pub(super) struct Batch<R: Runner> {
    pub(super) lease: Lease<R>,
    pub(super) first: Job,
    pub(super) others: Vec<Job>,
}

impl<R: Runner> Batch<R> {
    /// Runs the requests on this inference thread, as long as callers wait for them, and sends the results.
    pub(super) fn run(self) {
        self.run_on(false);
    }

    /// Runs the requests on this I/O thread. If a batch fails, its requests run one by one on an inference thread.
    pub(super) fn run_inline(self) {
        self.run_on(true);
    }

    fn run_on(self, is_inline: bool) {
        let Batch { mut lease, first, others } = self;
        let begun = lease.scheduler.now();
        let jobs = std::iter::once(first).chain(others);
        let mut jobs: Vec<Job> = jobs.filter(|job| !job.reply.is_closed()).collect();
        if jobs.len() <= 1 {
            return run_each(lease, jobs, begun, is_inline);
        }
        let end = (!is_inline).then(|| RunEnd::for_jobs(&mut jobs));
        let end = end.as_deref();
        match lease.run_together(&jobs, end) {
            Some(outputs) => {
                // The batch counts once, with the first request whose caller still waits at its end.
                let rows = jobs.iter().map(|job| job.work.rows).sum();
                answer(lease, jobs, outputs.into_iter().map(Ok).collect(), begun, Some(rows));
            }
            None if end.is_some_and(RunEnd::is_ended) => {}
            // One of the requests may be the cause: run them one by one, so that the others succeed.
            None if is_inline => {
                let scheduler = Arc::clone(&lease.scheduler);
                scheduler.execute(Box::new(move || run_each(lease, jobs, begun, false)));
            }
            None => run_each(lease, jobs, begun, false),
        }
    }
}

/// Runs requests one by one and sends their results.
fn run_each<R: Runner>(mut lease: Lease<R>, mut jobs: Vec<Job>, begun: Instant, is_inline: bool) {
    let run = |job: &mut Job| {
        let end = (!is_inline).then(|| RunEnd::for_jobs(std::slice::from_mut(job)));
        lease.run_alone(&job.work, end.as_deref())
    };
    let results: Vec<_> = jobs.iter_mut().map(run).collect();
    answer(lease, jobs, results, begun, None);
}

/// Returns the session and sends results. `uncounted`: rows of the batch, to be counted by one of the requests.
fn answer<R: Runner>(
    lease: Lease<R>,
    jobs: Vec<Job>,
    results: Vec<Result<Output, InferError>>,
    begun: Instant,
    mut uncounted: Option<usize>,
) {
    // The duration of a run that was ended early says nothing about other runs.
    if jobs.iter().any(|job| job.waits) && jobs.iter().any(|job| !job.reply.is_closed()) {
        let rows = jobs.iter().map(|job| job.work.rows).sum();
        let elapsed = lease.scheduler.now().saturating_duration_since(begun);
        lease.scheduler.admission.record(rows, elapsed);
    }
    // The next batch can start while results are sent.
    drop(lease);
    for (job, mut result) in jobs.into_iter().zip(results) {
        let Job { work, reply, .. } = job;
        if let Ok(output) = &mut result {
            output.run_rows = output.run_rows.or(uncounted);
        }
        // The caller may share tensors with its request, and copies tensors that it does not own alone.
        drop(work);
        if reply.send(result).is_ok() {
            uncounted = None;
        }
    }
}

/// Concatenates the inputs of compatible requests, and `filler` copies of the last row.
fn joined(works: &[&Work], filler: usize) -> Result<Vec<Tensor>, InferError> {
    let inputs = works.first().map_or(0, |first| first.inputs.len());
    let join = |index: usize| {
        let parts = works.iter().map(|work| work.inputs[index].read()).collect::<Result<Vec<_>, _>>()?;
        let last = parts.last().filter(|_| filler > 0).and_then(|last| last_row(last));
        join(parts.into_iter().chain(std::iter::repeat_n(last.iter(), filler).flatten()))
            .ok_or_else(|| InferError::internal("the inputs of the requests differ in shape or type"))
    };
    (0..inputs).map(join).collect()
}
