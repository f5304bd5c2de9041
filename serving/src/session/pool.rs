//! Runs requests on the sessions of one model version, each of which runs one thing at a time.
//!
//! While a session is free a request runs on the thread that it came in on: a hop to another thread costs
//! more than a small model takes. When all are busy it waits in line, and whoever is done hands his
//! session to the oldest in the line, whose thread takes along all that can run with it. So nothing waits
//! for a batch to fill, and batches grow with the load by themselves; there is no thread of their own
//! that all would have to go through.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use millrace_bundle::{Signature, TensorSpec};
use ort::session::Session;
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use super::joined::{join, split};
use super::line::{Job, Line, Sizes, Work};
use super::values::run;
use crate::config::{Config, Device};
use crate::error::InferError;
use crate::statistics::Times;
use crate::tensor::{Data, Tensor};

/// Runs that take longer give their worker thread's other tasks away first.
const INLINE_MICROS_MAX: usize = 500;

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
    /// It was taken along.
    Done(Result<Ran, InferError>),
}

/// Sessions of one model version.
#[derive(Debug)]
pub(crate) struct Pool {
    device: Device,
    sessions: usize,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    outputs: Vec<TensorSpec>,
    sizes: Sizes,
    /// How long a request that leads waits for others that could run with it.
    delay: Duration,
    /// Somebody came, where there is a delay.
    came: Notify,
    waiting_max: usize,
    waiting_bytes_max: usize,
    /// Rows come out as they went in.
    keeps_rows: AtomicBool,
    /// Typical duration of a run, in microseconds.
    run_micros: AtomicUsize,
}

/// While a session is free, nobody waits.
#[derive(Debug)]
struct State {
    free: Vec<Session>,
    line: Line,
}

impl Pool {
    /// Takes sessions of a version, up to `rows_max` rows of which may run together.
    pub(super) fn new(free: Vec<Session>, signature: &Signature, config: &Config, rows_max: usize) -> Pool {
        let batching = &config.batching;
        let mut preferred = batching.preferred_rows.clone();
        preferred.retain(|rows| (1..=rows_max).contains(rows));
        preferred.sort_unstable();
        let pool = Pool {
            device: config.device,
            sessions: free.len(),
            shared: Arc::new(Shared {
                state: Mutex::new(State { free, line: Line::default() }),
                outputs: signature.outputs.clone(),
                sizes: Sizes { rows_max, preferred },
                delay: Duration::from_micros(batching.delay_us_max),
                came: Notify::new(),
                waiting_max: config.limits.requests_waiting_max,
                waiting_bytes_max: config.limits.waiting_bytes_max,
                keeps_rows: AtomicBool::new(true),
                run_micros: AtomicUsize::new(0),
            }),
        };
        pool.warm_up(signature);
        pool
    }

    /// Where the sessions run.
    pub(crate) fn device(&self) -> Device {
        self.device
    }

    /// How many runs there are at once.
    pub(crate) fn sessions(&self) -> usize {
        self.sessions
    }

    /// How many requests wait for a session.
    pub(crate) fn waiting(&self) -> usize {
        self.shared.state.lock().line.len()
    }

    /// Most rows that run together; `None` where each request runs alone.
    pub(crate) fn batch_rows_max(&self) -> Option<usize> {
        let batches = self.shared.sizes.rows_max > 1 && self.shared.keeps_rows.load(Ordering::Relaxed);
        batches.then_some(self.shared.sizes.rows_max)
    }

    /// Sizes of batches that are preferred, ascending.
    pub(crate) fn preferred_rows(&self) -> &[usize] {
        &self.shared.sizes.preferred
    }

    /// How long a request waits for others once it could run, in microseconds.
    pub(crate) fn delay_us(&self) -> u64 {
        u64::try_from(self.shared.delay.as_micros()).unwrap_or(u64::MAX)
    }

    /// Runs a request, alone or with others. Cancel safe: a caller who goes while it waits is not served.
    ///
    /// # Errors
    /// [`InferError::Overloaded`] when too much waits already; [`InferError::Internal`] when ONNX Runtime
    /// fails.
    pub(crate) async fn run(&self, work: Work) -> Result<Ran, InferError> {
        let turn = {
            let mut state = self.shared.state.lock();
            match state.free.pop() {
                Some(session) => {
                    drop(state);
                    let mut lease = Lease { shared: Arc::clone(&self.shared), session: Some(session) };
                    return in_place(&self.shared, || lease.run_alone(&work));
                }
                None => self.shared.wait(&mut state, work)?,
            }
        };
        if !self.shared.delay.is_zero() {
            self.shared.came.notify_waiters();
        }
        match turn.await {
            Ok(Turn::Done(result)) => result,
            Ok(Turn::Lead(lease, work)) => {
                self.shared.gather(&work).await;
                in_place(&self.shared, || lease.run(work))
            }
            // Whoever took this request along broke off.
            Err(_) => {
                Err(InferError::internal("the run that this request was part of ended without an answer"))
            }
        }
    }

    /// One run per session on a row of zeros, so that the first request does not pay for lazily made
    /// buffers. A graph may well refuse zeros or a batch of one, which is no reason not to serve it.
    fn warm_up(&self, signature: &Signature) {
        let inputs: Option<Vec<Tensor>> = signature
            .inputs
            .iter()
            .map(|spec| {
                let shape: Vec<i64> =
                    spec.shape.iter().map(|extent| if *extent < 0 { 1 } else { *extent }).collect();
                let count = crate::tensor::element_count(&spec.name, &shape).ok()?;
                let small = count <= 1 << 24;
                small.then(|| Tensor {
                    name: spec.name.clone(),
                    shape,
                    data: Data::zeros(spec.datatype, count),
                })
            })
            .collect();
        let Some(inputs) = inputs else { return };
        let inputs: Vec<&Tensor> = inputs.iter().collect();
        let outputs: Vec<&TensorSpec> = signature.outputs.iter().collect();
        for session in &mut self.shared.state.lock().free {
            match run(session, &inputs, &outputs, Instant::now()) {
                Ok((_, times)) => self.shared.took(&times),
                Err(error) => {
                    tracing::debug!(%error, "the warm-up run failed");
                    return;
                }
            }
        }
    }
}

impl Shared {
    fn wait(&self, state: &mut State, work: Work) -> Result<oneshot::Receiver<Turn>, InferError> {
        let (job, turn) = Job::new(work);
        let is_full = |line: &Line| {
            line.len() >= self.waiting_max
                || line.bytes().saturating_add(job.bytes()) > self.waiting_bytes_max
        };
        if is_full(&state.line) {
            state.line.purge();
        }
        if is_full(&state.line) {
            return Err(InferError::Overloaded {
                reason: format!(
                    "{} requests with {} bytes wait for this model already and this one has {}, the limits are {} \
                     and {} (limits.requests_waiting_max, limits.waiting_bytes_max)",
                    state.line.len(),
                    state.line.bytes(),
                    job.bytes(),
                    self.waiting_max,
                    self.waiting_bytes_max
                ),
            });
        }
        state.line.push(job);
        Ok(turn)
    }

    /// Waits until enough others have come to run together, at most for the delay since the request did.
    async fn gather(&self, work: &Work) {
        if self.delay.is_zero() || work.rows == 0 {
            return;
        }
        let enough = self.sizes.preferred.last().copied().unwrap_or(self.sizes.rows_max);
        let until = tokio::time::Instant::from_std(work.queued + self.delay);
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

    /// Hands a session to the oldest request that waits.
    fn give_back(self: Arc<Shared>, session: Session) {
        let mut lease = Lease { shared: Arc::clone(&self), session: Some(session) };
        loop {
            let job = {
                let mut state = self.state.lock();
                match state.line.next() {
                    Some(job) => job,
                    None => {
                        state.free.extend(lease.session.take());
                        return;
                    }
                }
            };
            let Job { work, reply, .. } = job;
            match reply.send(Turn::Lead(lease, work)) {
                Ok(()) => return,
                // The caller has gone just now.
                Err(Turn::Lead(unused, _)) => lease = unused,
                Err(Turn::Done(_)) => return,
            }
        }
    }

    fn took(&self, times: &Times) {
        let elapsed = times.end.saturating_duration_since(times.computing);
        let micros = usize::try_from(elapsed.as_micros()).unwrap_or(usize::MAX);
        let typical = self.run_micros.load(Ordering::Relaxed);
        self.run_micros.store(towards(typical, micros), Ordering::Relaxed);
    }
}

/// A session that somebody runs on; goes to the next one when dropped, also when the run panics.
#[derive(Debug)]
pub(super) struct Lease {
    shared: Arc<Shared>,
    session: Option<Session>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            Arc::clone(&self.shared).give_back(session);
        }
    }
}

impl Lease {
    /// Runs a request and those in the line that can run with it.
    fn run(mut self, work: Work) -> Result<Ran, InferError> {
        let shared = Arc::clone(&self.shared);
        if !shared.keeps_rows.load(Ordering::Relaxed) {
            return self.run_alone(&work);
        }
        let others = shared.state.lock().line.take_like(&work, &shared.sizes);
        if others.is_empty() {
            return self.run_alone(&work);
        }
        let all: Vec<&Work> = std::iter::once(&work).chain(others.iter().map(|job| &job.work)).collect();
        let together = self.run_together(&all);
        let Some((parts, times)) = together else {
            // One of them may be the reason: the others shall not suffer from it.
            let own = self.run_alone(&work);
            for job in others {
                let _ = job.reply.send(Turn::Done(self.run_alone(&job.work)));
            }
            return own;
        };
        let rows = all.iter().map(|work| work.rows).sum();
        // The next run can begin while this one is told.
        drop(self);
        let mut parts = parts.into_iter();
        let own = parts.next().unwrap_or_default();
        for (job, outputs) in others.into_iter().zip(parts) {
            let times = Times { queued: job.work.queued, ..times };
            let _ = job.reply.send(Turn::Done(Ok(Ran { outputs, times, run_rows: None })));
        }
        let times = Times { queued: work.queued, ..times };
        Ok(Ran { outputs: own, times, run_rows: Some(rows) })
    }

    fn run_alone(&mut self, work: &Work) -> Result<Ran, InferError> {
        let inputs: Vec<&Tensor> = work.inputs.iter().collect();
        let (outputs, times) = self.run_inputs(&inputs, work)?;
        Ok(Ran { outputs, times, run_rows: Some(work.rows) })
    }

    /// The outputs of each, which are alike; `None` when they could not be run together.
    fn run_together(&mut self, all: &[&Work]) -> Option<(Vec<Vec<Tensor>>, Times)> {
        let first = all.first()?;
        let joined: Vec<Tensor> = (0..first.inputs.len())
            .map(|place| join(all.iter().map(|work| &work.inputs[place])))
            .collect::<Option<_>>()?;
        let inputs: Vec<&Tensor> = joined.iter().collect();
        let (outputs, times) = match self.run_inputs(&inputs, first) {
            Ok(ran) => ran,
            Err(error) => {
                tracing::debug!(%error, requests = all.len(), "a batch failed: its requests run one by one");
                return None;
            }
        };
        let rows: Vec<usize> = all.iter().map(|work| work.rows).collect();
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

    fn run_inputs(&mut self, inputs: &[&Tensor], work: &Work) -> Result<(Vec<Tensor>, Times), InferError> {
        let session = self.session.as_mut().ok_or_else(|| InferError::internal("the session is gone"))?;
        let outputs: Vec<&TensorSpec> =
            work.outputs.iter().map(|place| &self.shared.outputs[*place]).collect();
        let (tensors, times) = run(session, inputs, &outputs, work.queued)?;
        self.shared.took(&times);
        Ok((tensors, times))
    }
}

/// Runs on this thread. Where that takes long, its other tasks go to another one first.
fn in_place<T>(shared: &Shared, run: impl FnOnce() -> T) -> T {
    use tokio::runtime::{Handle, RuntimeFlavor};
    let slow = shared.run_micros.load(Ordering::Relaxed) > INLINE_MICROS_MAX;
    let has_others =
        || Handle::try_current().is_ok_and(|it| it.runtime_flavor() == RuntimeFlavor::MultiThread);
    if slow && has_others() { tokio::task::block_in_place(run) } else { run() }
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
    use super::towards;

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
