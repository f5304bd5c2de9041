//! Execution of one request through an ensemble: each step runs as soon as its input tensors are available.
//!
//! All steps belong to one task, so that a dropped request drops its steps: waiting steps leave the queues of their
//! models. Independent steps run concurrently on inference threads, except for short ones (`session/scheduler.rs`).

use std::net::SocketAddr;
use std::time::Instant;

use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use millrace_bundle::TensorSpec;

use super::Ensemble;
use super::members::{Member, fits};
use super::plan::Plan;
use crate::model::Model;
use crate::model::step::{CheckedRequest, step};
use millrace_serving_core::error::{InferError, quote};
use millrace_serving_core::statistics::Times;
use millrace_serving_core::tensor::{TensorHandle, shown};
use millrace_serving_runtime::session::{Output, Work};

impl Ensemble {
    /// Runs a request whose inputs were checked. Cancel safe: when the call is dropped, steps that have not run never
    /// run.
    ///
    /// # Errors
    /// [`InferError::Unavailable`] when the model of a step is missing or does not fit; else the error of a step,
    /// with the step's name.
    pub fn run<'a>(&'a self, ensemble: &'a Model, work: Work) -> BoxFuture<'a, Result<Output, InferError>> {
        Box::pin(async move {
            let members = self.resolve(ensemble)?;
            let Work { inputs, outputs, rows, queued, deadline, answer_by, level, client, .. } = work;
            let asking = StepContext { deadline, answer_by, level, client };
            let wanted: Vec<usize> = outputs.iter().map(|place| self.plan.outputs[*place]).collect();
            let mut flow = Flow::new(&self.plan, &members, &wanted);
            for (tensor, input) in inputs.into_iter().enumerate() {
                flow.put(tensor, input);
            }
            let mut times: Option<Times> = None;
            let mut running = FuturesUnordered::new();
            loop {
                for number in flow.ready() {
                    let (checked, makes) = flow.begin(number, asking)?;
                    running.push(run_step(number, &members[number].model, checked, makes));
                }
                let Some(FinishedStep { number, makes, outcome }) = running.next().await else { break };
                let (tensors, of_step) = outcome.map_err(|error| {
                    let version = members[number].model.version();
                    error.within(&format_args!("{}, version {version}", self.place(ensemble, number)))
                })?;
                times = Some(times.map_or(of_step, |times| around(&times, &of_step)));
                for (tensor, value) in makes.into_iter().zip(tensors) {
                    flow.put(tensor, value);
                }
            }
            let specs = &ensemble.signature().outputs;
            let made =
                outputs.iter().zip(&wanted).map(|(place, tensor)| output(&mut flow, *tensor, &specs[*place]));
            let outputs = made.collect::<Result<_, _>>()?;
            let times = times.ok_or_else(|| InferError::internal("no step of the ensemble ran"))?;
            Ok(Output {
                outputs,
                times: Times { queued, end: Instant::now(), cached: false, ..times },
                run_rows: Some(rows),
            })
        })
    }
}

/// Parameters that the steps inherit from the request.
#[derive(Debug, Clone, Copy)]
struct StepContext {
    deadline: Option<Instant>,
    answer_by: Option<Instant>,
    level: usize,
    client: Option<SocketAddr>,
}

/// A finished step.
struct FinishedStep {
    number: usize,
    /// The tensors that the step produced.
    makes: Vec<usize>,
    outcome: Result<(Vec<TensorHandle>, Times), InferError>,
}

async fn run_step(number: usize, model: &Model, checked: CheckedRequest, makes: Vec<usize>) -> FinishedStep {
    FinishedStep { number, makes, outcome: step(model, checked).await }
}

/// Progress of a request.
#[derive(Debug)]
struct Flow<'a> {
    plan: &'a Plan,
    members: &'a [Member],
    /// Available tensors that are still needed.
    values: Vec<Option<TensorHandle>>,
    /// How many more times each tensor will be taken.
    takers: Vec<usize>,
    /// Whether each step will run and has not begun.
    waiting: Vec<bool>,
}

impl<'a> Flow<'a> {
    fn new(plan: &'a Plan, members: &'a [Member], wanted: &[usize]) -> Flow<'a> {
        // Steps whose outputs are not needed do not run.
        let waiting = plan.needed(wanted);
        let mut takers = vec![0; plan.tensors.len()];
        let steps = members.iter().zip(&waiting).filter(|(_, waits)| **waits);
        for tensor in steps.flat_map(|(member, _)| &member.inputs).chain(wanted) {
            takers[*tensor] += 1;
        }
        let values = std::iter::repeat_with(|| None).take(plan.tensors.len()).collect();
        Flow { plan, members, values, takers, waiting }
    }

    /// Stores an available tensor, if it is needed.
    fn put(&mut self, tensor: usize, value: TensorHandle) {
        let takers = self.takers[tensor];
        if takers > 0 {
            self.values[tensor] = Some(value.named(&self.plan.tensors[tensor].name, takers));
        }
    }

    /// Whether a tensor that a step is about to produce may stay in device memory: steps take it, and all of them
    /// from that memory.
    fn stays(&self, maker: &Member, tensor: usize) -> bool {
        let Some(memory) = maker.leaves_in() else { return false };
        let steps = self.members.iter().zip(&self.waiting).filter(|(_, waits)| **waits);
        let mut takers = steps.map(|(step, _)| step).filter(|step| step.inputs.contains(&tensor)).peekable();
        takers.peek().is_some() && takers.all(|step| step.takes_from() == Some(memory))
    }

    /// Takes an available tensor. The last taker becomes its only owner, once the others have released it.
    fn take(&mut self, tensor: usize) -> Result<TensorHandle, InferError> {
        let left = self.takers[tensor].saturating_sub(1);
        self.takers[tensor] = left;
        let value = &mut self.values[tensor];
        let taken = if left == 0 { value.take() } else { value.as_ref().and_then(TensorHandle::share) };
        taken.ok_or_else(|| {
            InferError::internal(format!("tensor {} is missing", quote(&self.plan.tensors[tensor].name)))
        })
    }

    /// Steps that have not begun and whose inputs are available.
    fn ready(&self) -> Vec<usize> {
        let steps = self.members.iter().zip(&self.waiting).enumerate();
        let ready = steps.filter(|(_, (member, waits))| {
            **waits && member.inputs.iter().all(|tensor| self.values[*tensor].is_some())
        });
        ready.map(|(number, _)| number).collect()
    }

    /// The request of a step that is ready, and the tensors that it produces.
    fn begin(
        &mut self,
        number: usize,
        asking: StepContext,
    ) -> Result<(CheckedRequest, Vec<usize>), InferError> {
        self.waiting[number] = false;
        let members = self.members;
        let member = &members[number];
        let inputs = member.inputs.iter().map(|tensor| self.take(*tensor)).collect::<Result<_, _>>()?;
        let mut outputs: Vec<(usize, usize)> =
            member.outputs.iter().copied().filter(|(_, tensor)| self.takers[*tensor] > 0).collect();
        // In signature order, as most clients request them, so that the step shares batches with other requests.
        outputs.sort_unstable();
        let stays = outputs.iter().map(|(_, tensor)| self.stays(member, *tensor)).collect();
        let (outputs, makes) = outputs.into_iter().unzip();
        let timeout = asking.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let checked = CheckedRequest {
            inputs,
            outputs,
            stays,
            priority: asking.level as u64,
            timeout,
            deadline: asking.answer_by,
            client: asking.client,
        };
        Ok((checked, makes))
    }
}

/// An output of the ensemble from its tensor.
fn output(flow: &mut Flow<'_>, tensor: usize, spec: &TensorSpec) -> Result<TensorHandle, InferError> {
    let value = flow.take(tensor)?;
    let shape = value.view().shape();
    if fits(&spec.shape, shape) {
        return Ok(value);
    }
    Err(InferError::invalid(format!(
        "output {} has shape {}, and {:?} in config.pbtxt of the ensemble",
        quote(&spec.name),
        shown(shape),
        spec.shape
    )))
}

/// Combined times of steps: the wait before the first run, and the computation from the start of the first run to the
/// end of the last.
fn around(times: &Times, step: &Times) -> Times {
    let first = if step.computing < times.computing { step } else { times };
    Times { output_start: times.output_start.max(step.output_start), end: times.end.max(step.end), ..*first }
}
