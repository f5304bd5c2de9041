//! Runs requests on the sessions of one model version, each of which runs one thing at a time.
//!
//! While a session is free a request runs on the thread that it came in on: a hop to another thread costs
//! more than a small model takes. When all are busy it waits in line, and whoever is done hands his
//! session to the one that is next in the line, whose thread takes along all that can run with it. So
//! nothing waits for a batch to fill, and batches grow with the load by themselves; there is no thread of
//! their own that all would have to go through, but for long runs.
//!
//! Where many ask, a request that finds a session free gathers company first: its thread takes in what has
//! been sent by then, and who comes meanwhile waits for it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace_bundle::{Manifest, Signature};

use super::background;
use super::handover::{Begun, Shared};
use super::lease::{Ran, Turn};
use super::limited::{self, Failure};
use super::line::{Room, Sizes, Work, late};
use super::peak;
use super::placement::Placement;
use super::{Session, intra_threads};
use crate::config::{Config, Device, Engine, Memory};
use crate::error::{InferError, Result};
use crate::tensor::{Data, Tensor};

/// Before runs that take longer, the thread takes in what clients have sent, if others run, too; before
/// shorter ones where that was worth it lately. It costs some microseconds, or 50 where a thread that is idle
/// takes the task over.
const READ_ON_MICROS_MIN: usize = 40;

/// Of the time that a run takes, the part for which more may be taken in before it, where that is longer than
/// [`READ_ON_MICROS_MIN`].
const LOOK_PART: usize = 4;

/// Sessions of one model version.
#[derive(Debug)]
pub(crate) struct Pool {
    placement: Placement,
    sessions: usize,
    /// Threads that long runs may use together.
    threads: usize,
    priority_levels: usize,
    priority_default: usize,
    timeout: Option<Duration>,
    /// Whether tensors without elements may be run.
    takes_nothing: bool,
    shared: Arc<Shared>,
}

impl Pool {
    /// Takes sessions of a version, up to `rows_max` rows of which may run together.
    pub(super) fn new(
        free: Vec<Session>,
        placement: Placement,
        signature: &Signature,
        config: &Config,
        rows_max: usize,
    ) -> Pool {
        let batching = &config.batching;
        let mut preferred = batching.preferred_rows.clone();
        preferred.retain(|rows| (1..=rows_max).contains(rows));
        preferred.sort_unstable();
        let room = Room {
            requests_max: config.limits.requests_waiting_max,
            bytes_max: config.limits.waiting_bytes_max,
        };
        let runs_in_thread = placement.on().is_cpu() && intra_threads(config.threads(), free.len()) == 1;
        Pool {
            placement,
            sessions: free.len(),
            threads: config.threads(),
            priority_levels: batching.priority_levels,
            priority_default: batching.priority_default,
            timeout: (batching.timeout_us_max > 0).then(|| Duration::from_micros(batching.timeout_us_max)),
            takes_nothing: false,
            shared: Arc::new(Shared::new(
                free,
                signature.outputs.clone(),
                Sizes { rows_max, preferred },
                Duration::from_micros(batching.delay_us_max),
                room,
                runs_in_thread,
            )),
        }
    }

    /// Warms all sessions up.
    ///
    /// # Errors
    /// [`Error::Model`] when a run does not end.
    pub(super) fn warmed_up(self, manifest: &Manifest) -> Result<Pool> {
        let row = self
            .warm_up(&manifest.signature)
            .map_err(|failure| super::failed(manifest, format!("on a row of zeros, {failure}")))?;
        let memories = self.placement.on().each().into_iter().map(Device::memory);
        let arenas: Vec<String> = memories.filter_map(Memory::arena).collect();
        if let Some(row) = row
            && !arenas.is_empty()
        {
            peak::end_from_time_to_time(&self.shared, arenas, row);
        }
        Ok(self)
    }

    /// Says whether tensors without elements may be run.
    pub(super) fn taking_nothing(self, takes_nothing: bool) -> Pool {
        Pool { takes_nothing, ..self }
    }

    /// Whether tensors without elements may be run: ONNX Runtime ends the process on them in some operators.
    pub(crate) fn takes_nothing(&self) -> bool {
        self.takes_nothing
    }

    /// Where the sessions run.
    pub(crate) fn placement(&self) -> &Placement {
        &self.placement
    }

    /// The memory in which all runs have their tensors; `None` where there are several.
    pub(crate) fn memory(&self) -> Option<Memory> {
        self.placement.on().memory()
    }

    /// How many requests wait for a session.
    pub(crate) fn waiting(&self) -> usize {
        self.shared.waiting()
    }

    /// Most rows that run together; `None` where each request runs alone.
    pub(crate) fn batch_rows_max(&self) -> Option<usize> {
        self.shared.runs_together().then_some(self.shared.sizes.rows_max)
    }

    /// Sizes of batches that are preferred, ascending.
    pub(crate) fn preferred_rows(&self) -> &[usize] {
        &self.shared.sizes.preferred
    }

    /// How long a request waits for others once it could run, in microseconds.
    pub(crate) fn delay_us(&self) -> u64 {
        u64::try_from(self.shared.delay.as_micros()).unwrap_or(u64::MAX)
    }

    /// Levels of priority that requests may choose from.
    pub(crate) fn priority_levels(&self) -> usize {
        self.priority_levels
    }

    /// The level of a request by the priority that it gives: as Triton has it, the default for none and for
    /// one that there is not.
    pub(crate) fn level(&self, priority: u64) -> usize {
        match usize::try_from(priority) {
            Ok(level) if (1..=self.priority_levels).contains(&level) => level,
            _ => self.priority_default,
        }
    }

    /// How many requests may wait.
    pub(crate) fn requests_waiting_max(&self) -> usize {
        self.shared.room.requests_max
    }

    /// The longest that a request may wait for a session.
    pub(crate) fn timeout(&self) -> Option<Duration> {
        self.timeout
    }

    /// Runs a request, alone or with others. Cancel safe: a caller who goes while it waits is not served.
    ///
    /// # Errors
    /// [`InferError::Overloaded`] when too much waits already, or so much that it could not begin in time;
    /// [`InferError::DeadlineExceeded`] when it did not begin in time; [`InferError::Invalid`] when the graph cannot
    /// take the inputs; [`InferError::Internal`] when ONNX Runtime fails.
    pub(crate) async fn run(&self, work: Work) -> Result<Ran, InferError> {
        if work.is_late() {
            return Err(late(work.queued));
        }
        let (deadline, queued, beside) = (work.deadline, work.queued, work.beside);
        let client = work.client;
        let waiting = match self.shared.begin(work, |free| self.gathers(client, free))? {
            Begun::Alone(mut lease, work) => {
                return self.execute(deadline, queued, beside, move || lease.run_alone(&work)).await;
            }
            Begun::Gathers(lease, work) => {
                self.look(&work).await;
                return self.execute(deadline, queued, beside, move || lease.run(work)).await;
            }
            Begun::Waits(waiting) => waiting,
        };
        self.shared.notify();
        match waiting.turn().await {
            Turn::Done(result) => result,
            Turn::Lead(mut lease, work) => {
                if self.shared.run_micros() >= READ_ON_MICROS_MIN {
                    if self.batch_rows_max().is_some() {
                        self.shared.gather_for(&mut lease, &work);
                    }
                    self.look(&work).await;
                }
                if !self.shared.delay.is_zero() {
                    lease.end_gathering();
                    self.shared.linger(&work).await;
                }
                self.execute(deadline, queued, beside, move || lease.run(work)).await
            }
        }
    }

    /// Whether a request of a client that has a session, beside which so many are free, looks for company. Where nobody
    /// else runs there is hardly anything to take in, unless it was otherwise lately.
    fn gathers(&self, client: Option<SocketAddr>, free: usize) -> bool {
        let long = self.shared.run_micros() >= READ_ON_MICROS_MIN;
        let beside = free + 1 < self.sessions;
        self.batch_rows_max().is_some() && ((long && beside) || self.shared.company.is_likely(client, beside))
    }

    /// Takes in what clients have sent, as long as more comes, and not longer than it is worth.
    async fn look(&self, work: &Work) {
        let began = Instant::now();
        let longest = (self.shared.run_micros() / LOOK_PART).max(READ_ON_MICROS_MIN);
        let mut seen = work.rows;
        loop {
            read_on().await;
            let rows = self.shared.rows_like(work);
            if rows <= seen
                || rows >= self.shared.sizes.rows_max
                || began.elapsed() >= Duration::from_micros(longest as u64)
            {
                return;
            }
            seen = rows;
        }
    }

    /// Runs on this thread, or, where that takes long, on one for long runs.
    async fn execute(
        &self,
        deadline: Option<Instant>,
        queued: Instant,
        beside: bool,
        run: impl FnOnce() -> Result<Ran, InferError> + Send + 'static,
    ) -> Result<Ran, InferError> {
        if !self.shared.is_long(beside) {
            return run();
        }
        let in_time = move || match deadline {
            // It may have waited for the thread.
            Some(deadline) if deadline <= Instant::now() => Err(late(queued)),
            _ => run(),
        };
        background::run(&self.shared.account, self.shared.run_micros(), self.threads, in_time).await
    }

    /// Runs each session on a row of zeros, so that the first request does not pay for lazily made buffers; with
    /// TensorRT on as many rows as run together, too, since it compiles the graph for the sizes that it has seen. A graph
    /// may well refuse zeros or a batch of one, which is no reason not to serve it. Comes back with the row where it does
    /// not.
    ///
    /// # Errors
    /// [`Failure::Endless`].
    fn warm_up(&self, signature: &Signature) -> Result<Option<Vec<Tensor>>, Failure> {
        let Some(row) = zeros(signature, 1).filter(|row| self.may_run(row)) else { return Ok(None) };
        let warm = self.try_out(&row, 1, signature)?;
        let rows = self.shared.sizes.rows_max;
        if warm
            && rows > 1
            && self.placement.on().engine() == Some(Engine::TensorRt)
            && let Some(rows_of_zeros) = zeros(signature, rows as i64)
        {
            self.try_out(&rows_of_zeros, rows, signature)?;
        }
        Ok(warm.then_some(row))
    }

    /// Whether inputs of a warm-up have elements where the graph needs them.
    fn may_run(&self, inputs: &[Tensor]) -> bool {
        self.takes_nothing || inputs.iter().all(|input| !input.data.is_empty())
    }

    /// The longest that a run of a warm-up may take.
    fn run_max(&self) -> Duration {
        match self.placement.on().engine() {
            Some(Engine::TensorRt) => limited::COMPILATION_MAX,
            _ => limited::RUN_MAX,
        }
    }

    /// Runs each session so often on the inputs of a warm-up that its configuration asks for.
    ///
    /// # Errors
    /// [`Error::Model`] when a run fails.
    pub(crate) fn warm_up_on(&self, inputs: &[Tensor], count: u32, manifest: &Manifest) -> Result<()> {
        let failed = |reason: &dyn std::fmt::Display| {
            super::failed(manifest, format!("config.pbtxt: model_warmup: {reason}"))
        };
        if !self.may_run(inputs) {
            return Err(failed(
                &"an input has no elements; the graph has operators that are not known to take that",
            ));
        }
        for session in self.shared.state.lock().free.iter_mut() {
            for _ in 0..count {
                limited::run(session, inputs, &manifest.signature.outputs, self.run_max())
                    .map_err(|failure| failed(&failure))?;
            }
        }
        Ok(())
    }

    /// Runs each session on inputs of so many rows; whether all could.
    ///
    /// # Errors
    /// [`Failure::Endless`].
    fn try_out(&self, inputs: &[Tensor], rows: usize, signature: &Signature) -> Result<bool, Failure> {
        let elements = inputs.iter().map(|input| input.data.len()).sum();
        for session in self.shared.state.lock().free.iter_mut() {
            session.peak.runs(elements);
            match limited::run(session, inputs, &signature.outputs, self.run_max()) {
                Ok((_, times)) => self.shared.took(&times, None, (rows, elements), None),
                Err(Failure::Refused(error)) => {
                    tracing::debug!(%error, "the warm-up run failed");
                    return Ok(false);
                }
                Err(endless) => return Err(endless),
            }
        }
        Ok(true)
    }
}

/// Inputs of so many rows, where there are rows; other extents that may be any are 1. `None` when that is much.
fn zeros(signature: &Signature, rows: i64) -> Option<Vec<Tensor>> {
    let inputs = signature.inputs.iter().map(|spec| {
        let extent = |(place, extent): (usize, &i64)| match (place, *extent) {
            (0, ..0) => rows,
            (_, ..0) => 1,
            (_, extent) => extent,
        };
        let shape: Vec<i64> = spec.shape.iter().enumerate().map(extent).collect();
        let count = crate::tensor::element_count(&spec.name, &shape).ok()?;
        let small = count <= 1 << 24;
        small.then(|| Tensor { name: spec.name.clone(), shape, data: Data::zeros(spec.datatype, count) })
    });
    inputs.collect()
}

/// Has this thread take in all that clients have sent by now. Runs keep it from that: without this a server
/// whose threads all run would leave requests in its sockets, where they can neither run together with
/// others nor be seen to be too late.
async fn read_on() {
    // The first time this task comes back together with what was found to be readable then, and before it.
    tokio::task::yield_now().await;
    tokio::task::yield_now().await;
}
