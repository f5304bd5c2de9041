//! Release of GPU memory after peaks of load.
//!
//! On a GPU, a session keeps the memory of its runs in an arena, because allocations on the device are slow. The
//! arena releases free memory only at the end of a run that requests it. When the runs of a session have become far
//! smaller, a periodic task lets the idle session run one row of zeros for that purpose. On the processor there is no
//! arena, and the allocator returns unused memory.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::oneshot;

use super::batch::Lease;
use super::scheduler::Scheduler;
use super::values::release;
use millrace_serving_core::error::InferError;
use millrace_serving_core::tensor::Tensor;

/// Time between two checks: as long as the allocator of the processor keeps unused memory.
const PERIOD: Duration = Duration::from_secs(10);
/// A peak is over when all runs of a period were smaller by this factor. Allocating the memory again costs some
/// hundred microseconds.
const SMALLER: usize = 2;

/// Sizes of a session's runs, in elements of their inputs.
#[derive(Debug, Default)]
pub(super) struct Peak {
    /// Size of the first run, which is one row of zeros.
    least: usize,
    /// Size of the largest run since memory was released.
    most: usize,
    /// Size of the largest run since the last check.
    lately: usize,
    /// A peak is over, and its memory is not yet released.
    is_over: bool,
}

impl Peak {
    /// Records the start of a run whose inputs have `elements` elements.
    pub(super) fn runs(&mut self, elements: usize) {
        if self.least == 0 {
            self.least = elements;
        }
        self.most = self.most.max(elements);
        self.lately = self.lately.max(elements);
    }

    /// Checks, once in a period, whether a peak is over.
    fn measure(&mut self) {
        let lately = std::mem::take(&mut self.lately).max(self.least);
        if self.most / SMALLER > lately {
            self.most = lately;
            self.is_over = true;
        }
    }

    /// Returns whether the caller must release memory now, and resets the flag.
    fn ends(&mut self) -> bool {
        std::mem::take(&mut self.is_over)
    }
}

/// Shrinks the arenas of a version's sessions after peaks, until the version is dropped. `arenas` are the arena names
/// of its devices, `row` is one row of zeros. Without a Tokio runtime the function does nothing.
pub(super) fn shrink_periodically(scheduler: &Arc<Scheduler>, arenas: Vec<String>, row: Vec<Tensor>) {
    let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
    let scheduler = Arc::downgrade(scheduler);
    let (arenas, row) = (Arc::from(arenas), Arc::from(row));
    runtime.spawn(async move {
        loop {
            tokio::time::sleep(PERIOD).await;
            match shrink(&scheduler, &arenas, &row).await {
                None => return,
                Some(Ok(0)) => {}
                Some(Ok(sessions)) => tracing::debug!(sessions, "sessions released the memory of a peak"),
                Some(Err(error)) => {
                    tracing::warn!(%error, "device memory of peaks stays in use until the version is unloaded");
                    return;
                }
            }
        }
    });
}

/// Shrinks the arena of each idle session whose peak is over; returns the number of these sessions, or `None` when
/// the version has been dropped.
pub(super) async fn shrink(
    scheduler: &Weak<Scheduler>,
    arenas: &Arc<[String]>,
    row: &Arc<[Tensor]>,
) -> Option<Result<usize, InferError>> {
    let mut shrunk = 0;
    scheduler.upgrade()?.state.lock().idle.iter_mut().for_each(|session| session.peak.measure());
    loop {
        // One session at a time: the other sessions stay available to requests.
        let scheduler = scheduler.upgrade()?;
        let idle = scheduler.state.lock().idle.take_if(|session| session.peak.ends());
        let Some(session) = idle else { return Some(Ok(shrunk)) };
        let mut lease = Lease::new(&scheduler, session);
        let (arenas, row) = (Arc::clone(arenas), Arc::clone(row));
        let (done, released) = oneshot::channel();
        scheduler.execute(Box::new(move || {
            let result = lease.session().and_then(|session| {
                let arena = arenas.get(session.place).map_or("", String::as_str);
                release(session, &row, arena)
            });
            drop(lease);
            // Fails only when the runtime shuts down; nothing is left to do then.
            let _ = done.send(result);
        }));
        match released.await.unwrap_or_else(|_| Err(InferError::internal("the run ended without a result"))) {
            Ok(()) => shrunk += 1,
            Err(error) => return Some(Err(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use millrace_bundle::onnx::{
        GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorShapeProto, TypeProto, ValueInfoProto,
        tensor_proto, tensor_shape_proto, type_proto,
    };
    use millrace_bundle::{Datatype, TensorSpec};
    use prost::Message as _;

    use super::super::Session;
    use super::super::executor::{Executor, TaskLimits};
    use super::super::queue::QueueLimits;
    use super::super::scheduler::Policy;
    use super::super::work::tests::work;
    use super::super::work::{Output, Work};
    use super::*;
    use crate::runtime::Runtime;
    use millrace_serving_core::config::Memory;
    use millrace_serving_core::tensor::TensorHandle;

    fn is_over(peak: &mut Peak) -> bool {
        peak.measure();
        peak.ends()
    }

    #[test]
    fn peak_is_over_when_runs_were_far_smaller_for_a_period() {
        let mut peak = Peak::default();
        assert!(!is_over(&mut peak), "nothing has run");
        peak.runs(10);
        assert!(!is_over(&mut peak) && !is_over(&mut peak), "one row is no peak");
        peak.runs(1000);
        peak.runs(10);
        assert!(!is_over(&mut peak), "it was in this period");
        peak.runs(600);
        assert!(!is_over(&mut peak), "what was taken is used again");
        peak.runs(400);
        assert!(is_over(&mut peak));
        peak.runs(400);
        assert!(!is_over(&mut peak), "it was released, and 400 is the most now");
        peak.runs(10);
        peak.runs(10);
        assert!(is_over(&mut peak) && !is_over(&mut peak));
    }

    #[test]
    fn session_in_use_releases_its_memory_later() {
        let mut peak = Peak::default();
        peak.runs(1);
        peak.runs(1000);
        peak.measure();
        peak.measure();
        peak.runs(1000);
        assert!(peak.ends() && !peak.ends());
    }

    /// `y = relu(x)`, for rows of any width.
    fn graph() -> Vec<u8> {
        use tensor_shape_proto::{Dimension, dimension::Value};
        let dim = |name: &str| Dimension { value: Some(Value::DimParam(name.into())), ..Default::default() };
        let value = |name: &str| {
            let tensor = type_proto::Tensor {
                elem_type: Some(tensor_proto::DataType::Float as i32),
                shape: Some(TensorShapeProto { dim: vec![dim("rows"), dim("width")] }),
            };
            let value = Some(type_proto::Value::TensorType(tensor));
            let r#type = TypeProto { value, ..Default::default() };
            ValueInfoProto { name: Some(name.into()), r#type: Some(r#type), ..Default::default() }
        };
        let node = NodeProto {
            op_type: Some("Relu".into()),
            input: vec!["x".into()],
            output: vec!["y".into()],
            ..Default::default()
        };
        let graph = GraphProto {
            name: Some("relu".into()),
            node: vec![node],
            input: vec![value("x")],
            output: vec![value("y")],
            ..Default::default()
        };
        let opset_import = vec![OperatorSetIdProto { version: Some(17), ..Default::default() }];
        let model =
            ModelProto { ir_version: Some(8), opset_import, graph: Some(graph), ..Default::default() };
        model.encode_to_vec()
    }

    /// A scheduler with one session that has an arena. Other sessions on the processor have none; ONNX Runtime uses
    /// the same arena code as for GPUs.
    fn scheduler() -> Arc<Scheduler> {
        let arena = ort::ep::CPU::default().with_arena_allocator(true).build();
        let environment = Runtime::load().unwrap().environment();
        let builder = ort::session::builder::SessionBuilder::new(environment).unwrap();
        let mut builder = builder.with_execution_providers([arena]).unwrap();
        let session = Session::new(builder.commit_from_memory(&graph()).unwrap(), 0, Memory::Host);
        let output = TensorSpec { name: "y".into(), datatype: Datatype::Fp32, shape: vec![-1, -1] };
        let policy = Policy {
            rows_max: 0,
            preferred: Vec::new(),
            delay: Duration::ZERO,
            limits: QueueLimits { requests_max: 64, bytes_max: usize::MAX },
            is_predictable: false,
            share: TaskLimits { threads_max: 1, own: 1, is_on_cpu: true },
        };
        let executor = Box::leak(Box::new(Executor::new()));
        Arc::new(Scheduler::new(vec![session], vec![output], policy, executor, Instant::now))
    }

    async fn run(scheduler: &Arc<Scheduler>, rows: usize, width: usize) -> Output {
        let input = Tensor::fp32("x", vec![rows as i64, width as i64], vec![1.0; rows * width]).unwrap();
        let work = Work { inputs: vec![TensorHandle::Alone(input)], ..work(0, 1, &[0], 0) };
        scheduler.run(work).await.unwrap()
    }

    fn resident_mib() -> usize {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        resident.trim().split(' ').next().unwrap().parse::<usize>().unwrap() >> 10
    }

    #[tokio::test]
    async fn idle_session_releases_the_memory_of_a_peak() {
        let scheduler = scheduler();
        let row = Arc::from([Tensor::fp32("x", vec![1, 1], vec![0.0]).unwrap()]);
        let arenas = Arc::from(["cpu:0".to_owned()]);
        let weak = Arc::downgrade(&scheduler);
        let shrink = || shrink(&weak, &arenas, &row);

        drop(run(&scheduler, 1024, 1).await);
        let before = resident_mib();
        drop(run(&scheduler, 1024, 32 << 10).await);
        let peak = resident_mib();
        assert!(peak >= before + 100, "{before} MiB, then {peak}");
        assert_eq!(shrink().await.unwrap().unwrap(), 0, "the peak was just now");
        drop(run(&scheduler, 1024, 1).await);
        // A session in use stays leased to its run.
        let session = scheduler.state.lock().idle.take().unwrap();
        let lease = Lease::new(&scheduler, session);
        assert_eq!(shrink().await.unwrap().unwrap(), 0, "it is not idle");
        drop(lease);
        assert_eq!(shrink().await.unwrap().unwrap(), 1);
        let after = resident_mib();
        assert!(after <= before + 50, "{before} MiB, then {peak}, and {after} in the end");
        assert_eq!(shrink().await.unwrap().unwrap(), 0, "once");
        assert_eq!(scheduler.state.lock().idle.len(), 1);
        drop(run(&scheduler, 1024, 3).await);

        // A device whose memory the library does not know is an error; the scheduler keeps the session.
        drop(run(&scheduler, 1024, 32 << 10).await);
        assert_eq!(shrink().await.unwrap().unwrap(), 0);
        let unknown = Arc::from(["gpu:7".to_owned()]);
        let error = super::shrink(&weak, &unknown, &row).await.unwrap().unwrap_err();
        assert!(error.to_string().contains("gpu:7") || error.to_string().contains("arena"), "{error}");
        assert_eq!(scheduler.state.lock().idle.len(), 1);
        drop(run(&scheduler, 1024, 3).await);
        drop(scheduler);
        // The inference thread holds a reference to the scheduler until its task has ended.
        while weak.strong_count() > 0 {
            tokio::task::yield_now().await;
        }
        assert!(shrink().await.is_none(), "the version is gone");
    }
}
