//! Session pool of one model version: its sessions and the scheduler that runs requests on them.

use std::sync::Arc;
use std::time::Duration;

use millrace_bundle::{Manifest, Signature};

use super::Session;
use super::executor::{Executor, TaskLimits};
use super::limited::{self, Failure};
use super::peak;
use super::placement::Placement;
use super::queue::QueueLimits;
use super::scheduler::{Policy, Scheduler};
use super::work::{Output, Work};
use millrace_serving_core::config::{Config, Device, Engine, Memory};
use millrace_serving_core::error::{InferError, Result};
use millrace_serving_core::statistics::Times;
use millrace_serving_core::tensor::{Data, Tensor};

/// Extents for open dimensions in a warm-up, tried in turn until the graph can run. The first is more than 1, as in
/// requests.
const WARM_EXTENTS: [i64; 3] = [16, 2, 1];
/// Runs of a warm-up: the first one also allocates buffers and tells little about the time of later runs.
const WARM_RUNS: usize = 3;
/// A warm-up run longer than this is not repeated.
const WARM_REPEATED_MAX: Duration = Duration::from_millis(10);
/// Maximum number of elements of a warm-up input.
const WARM_ELEMENTS_MAX: usize = 1 << 24;

/// Sessions of one model version.
#[derive(Debug)]
pub struct Pool {
    placement: Placement,
    priority_levels: usize,
    priority_default: usize,
    timeout: Option<Duration>,
    /// Whether the graph accepts empty tensors.
    accepts_empty_inputs: bool,
    scheduler: Arc<Scheduler>,
}

impl Pool {
    /// A pool of `sessions`, which run up to `rows_max` rows together. `has_fixed_cost` says whether the duration of
    /// a run depends only on the shapes of its inputs.
    pub(super) fn new(
        sessions: Vec<Session>,
        placement: Placement,
        signature: &Signature,
        config: &Config,
        rows_max: usize,
        has_fixed_cost: bool,
    ) -> Pool {
        let batching = &config.batching;
        let mut preferred = batching.preferred_rows.clone();
        preferred.retain(|rows| (1..=rows_max).contains(rows));
        preferred.sort_unstable();
        let policy = Policy {
            rows_max,
            preferred,
            delay: Duration::from_micros(batching.delay_us_max),
            limits: QueueLimits {
                requests_max: config.limits.requests_waiting_max,
                bytes_max: config.limits.waiting_bytes_max,
            },
            // On a GPU, runs of other models take part of the time.
            is_predictable: has_fixed_cost && placement.on().is_cpu(),
            share: TaskLimits {
                threads_max: config.threads(),
                // Runs on GPUs hardly use their thread: it waits for the device.
                own: if placement.on().is_cpu() { 1 } else { sessions.len() },
                is_on_cpu: placement.on().is_cpu(),
            },
        };
        let outputs = signature.outputs.clone();
        let scheduler =
            Scheduler::new(sessions, outputs, policy, Executor::shared(), std::time::Instant::now);
        Pool {
            placement,
            priority_levels: batching.priority_levels,
            priority_default: batching.priority_default,
            timeout: (batching.timeout_us_max > 0).then(|| Duration::from_micros(batching.timeout_us_max)),
            accepts_empty_inputs: false,
            scheduler: Arc::new(scheduler),
        }
    }

    /// Warms all sessions up.
    ///
    /// # Errors
    /// [`Error::Model`](millrace_serving_core::Error::Model) when a run does not end.
    pub(super) fn warmed_up(self, manifest: &Manifest) -> Result<Pool> {
        let row = self
            .warm_up(&manifest.signature)
            .map_err(|failure| super::failed(manifest, format!("on a row of zeros, {failure}")))?;
        let memories = self.placement.on().each().into_iter().map(Device::memory);
        let arenas: Vec<String> = memories.filter_map(Memory::arena).collect();
        if let Some(row) = row
            && !arenas.is_empty()
        {
            peak::shrink_periodically(&self.scheduler, arenas, row);
        }
        Ok(self)
    }

    /// Sets whether the graph accepts empty tensors.
    pub(super) fn accepting_empty_inputs(self, accepts_empty_inputs: bool) -> Pool {
        Pool { accepts_empty_inputs, ..self }
    }

    /// Whether the graph accepts empty tensors: some operators of ONNX Runtime end the process on them.
    pub fn accepts_empty_inputs(&self) -> bool {
        self.accepts_empty_inputs
    }

    /// Devices that the sessions run on.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// The memory in which all runs have their tensors; `None` if the sessions use several.
    pub fn memory(&self) -> Option<Memory> {
        self.placement.on().memory()
    }

    /// Number of requests that wait for a session.
    pub fn waiting(&self) -> usize {
        self.scheduler.waiting()
    }

    /// Maximum number of rows in a batch; `None` where each request runs alone.
    pub fn batch_rows_max(&self) -> Option<usize> {
        self.scheduler.has_batches().then_some(self.scheduler.policy.rows_max)
    }

    /// Preferred batch sizes in rows, ascending.
    pub fn preferred_rows(&self) -> &[usize] {
        &self.scheduler.policy.preferred
    }

    /// Maximum time in microseconds that a request waits for a fuller batch.
    pub fn delay_us(&self) -> u64 {
        u64::try_from(self.scheduler.policy.delay.as_micros()).unwrap_or(u64::MAX)
    }

    /// Number of priority levels that requests may choose from.
    pub fn priority_levels(&self) -> usize {
        self.priority_levels
    }

    /// The priority level of a request. As in Triton, an absent or unknown priority means the default.
    pub fn level(&self, priority: u64) -> usize {
        match usize::try_from(priority) {
            Ok(level) if (1..=self.priority_levels).contains(&level) => level,
            _ => self.priority_default,
        }
    }

    /// Maximum number of waiting requests.
    pub fn requests_waiting_max(&self) -> usize {
        self.scheduler.policy.limits.requests_max
    }

    /// Maximum time that a request may wait for a session.
    pub fn timeout(&self) -> Option<Duration> {
        self.timeout
    }

    /// Runs a request, alone or in a batch. Cancel safe: a request whose call is dropped leaves the queue.
    ///
    /// # Errors
    /// [`InferError::Overloaded`] when the queue is full, or so long that the request could not start in time;
    /// [`InferError::DeadlineExceeded`] when it did not start in time; [`InferError::Invalid`] when the graph cannot
    /// take the inputs; [`InferError::Internal`] when ONNX Runtime fails.
    pub async fn run(&self, work: Work) -> Result<Output, InferError> {
        self.scheduler.run(work).await
    }

    /// Runs each session on zeros, so that the first request does not wait for buffers and the run time is known.
    /// TensorRT compiles the graph for the sizes that it has seen, and therefore also runs a full batch. A graph that
    /// refuses zeros, or every extent tried, is served all the same. Returns the inputs of one row if the graph could
    /// run them.
    ///
    /// # Errors
    /// [`Failure::Endless`].
    fn warm_up(&self, signature: &Signature) -> Result<Option<Vec<Tensor>>, Failure> {
        let rows_max = self.scheduler.policy.rows_max;
        let is_closed =
            signature.inputs.iter().all(|spec| spec.shape.iter().skip(1).all(|extent| *extent >= 0));
        let extents: &[i64] = if is_closed && rows_max > 1 { &WARM_EXTENTS[2..] } else { &WARM_EXTENTS };
        for extent in extents {
            let row = zeros(signature, if rows_max > 1 { 1 } else { *extent }, *extent);
            let Some(row) = row.filter(|row| self.may_run(row)) else { continue };
            if !self.try_out(&row, 1, signature)? {
                continue;
            }
            if rows_max > 1
                && self.placement.on().engine() == Some(Engine::TensorRt)
                && let Some(batch) = zeros(signature, rows_max as i64, *extent)
            {
                self.try_out(&batch, rows_max, signature)?;
            }
            return Ok(Some(row));
        }
        Ok(None)
    }

    /// Whether the graph may run warm-up inputs: it accepts empty tensors, or none of the inputs is empty.
    fn may_run(&self, inputs: &[Tensor]) -> bool {
        self.accepts_empty_inputs || inputs.iter().all(|input| !input.data.is_empty())
    }

    /// Time limit for a warm-up run.
    fn run_max(&self) -> Duration {
        match self.placement.on().engine() {
            Some(Engine::TensorRt) => limited::COMPILATION_MAX,
            _ => limited::RUN_MAX,
        }
    }

    /// Runs each session `count` times on configured warm-up inputs.
    ///
    /// # Errors
    /// [`Error::Model`](millrace_serving_core::Error::Model) when a run fails.
    pub fn warm_up_on(&self, inputs: &[Tensor], count: u32, manifest: &Manifest) -> Result<()> {
        let failed = |reason: &dyn std::fmt::Display| {
            super::failed(manifest, format!("config.pbtxt: model_warmup: {reason}"))
        };
        if !self.may_run(inputs) {
            return Err(failed(
                &"an input has no elements; the graph has operators that are not known to take that",
            ));
        }
        for session in self.scheduler.state.lock().idle.iter_mut() {
            for _ in 0..count {
                limited::run(session, inputs, &manifest.signature.outputs, self.run_max())
                    .map_err(|failure| failed(&failure))?;
            }
        }
        Ok(())
    }

    /// Runs each session on inputs of `rows` rows; returns whether all sessions could.
    ///
    /// # Errors
    /// [`Failure::Endless`].
    fn try_out(&self, inputs: &[Tensor], rows: usize, signature: &Signature) -> Result<bool, Failure> {
        let elements = inputs.iter().map(|input| input.data.len()).sum();
        let elapsed = |times: &Times| times.end.saturating_duration_since(times.computing);
        for session in self.scheduler.state.lock().idle.iter_mut() {
            for _ in 0..WARM_RUNS {
                match limited::run(session, inputs, &signature.outputs, self.run_max()) {
                    Ok((_, times)) => {
                        session.peak.runs(elements);
                        self.scheduler.run_times.record(rows, elements, elapsed(&times));
                        if elapsed(&times) > WARM_REPEATED_MAX {
                            break;
                        }
                    }
                    Err(Failure::Refused(error)) => {
                        tracing::debug!(%error, "the warm-up run failed");
                        return Ok(false);
                    }
                    Err(endless) => return Err(endless),
                }
            }
        }
        Ok(true)
    }
}

/// Inputs of zeros with `rows` rows and the extent `open` for the other open dimensions. `None` if an input would
/// exceed [`WARM_ELEMENTS_MAX`].
fn zeros(signature: &Signature, rows: i64, open: i64) -> Option<Vec<Tensor>> {
    let inputs = signature.inputs.iter().map(|spec| {
        let extent = |(index, extent): (usize, &i64)| match (index, *extent) {
            (0, ..0) => rows,
            (_, ..0) => open,
            (_, extent) => extent,
        };
        let shape: Vec<i64> = spec.shape.iter().enumerate().map(extent).collect();
        let count = millrace_serving_core::tensor::element_count(&spec.name, &shape).ok()?;
        let small = count <= WARM_ELEMENTS_MAX;
        small.then(|| Tensor { name: spec.name.clone(), shape, data: Data::zeros(spec.datatype, count) })
    });
    inputs.collect()
}

#[cfg(test)]
mod tests {
    use millrace_bundle::{Datatype, TensorSpec};

    use super::*;

    #[test]
    fn warm_up_gives_open_extents_more_than_one() {
        let input = |name: &str, shape: &[i64]| TensorSpec {
            name: name.into(),
            datatype: Datatype::Int64,
            shape: shape.to_vec(),
        };
        let inputs = vec![input("ids", &[-1, -1]), input("mask", &[-1, 3]), input("fixed", &[5])];
        let signature = Signature { inputs, outputs: Vec::new() };
        let zeros = zeros(&signature, 1, WARM_EXTENTS[0]).unwrap();
        let shapes: Vec<_> =
            zeros.iter().map(|tensor| (tensor.shape.as_slice(), tensor.data.len())).collect();
        assert_eq!(shapes, [(&[1, 16][..], 16), (&[1, 3][..], 3), (&[5][..], 5)]);
        assert!(WARM_EXTENTS[0] > 1 && WARM_EXTENTS.is_sorted_by(|a, b| a > b));
        let large = Signature { inputs: vec![input("x", &[-1, 1 << 20, -1])], outputs: Vec::new() };
        assert!(super::zeros(&large, 1, 17).is_none(), "that many elements are not worth a warm-up");
    }
}
