//! One request through an ensemble: steps run as soon as the tensors that they take are there.
//!
//! All steps belong to one task, so that a dropped request drops its steps: those that wait leave the queues of their
//! models. Independent steps run at the same time on inference threads, except for short ones
//! (`session/scheduler.rs`).

use std::net::SocketAddr;
use std::time::Instant;

use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use millrace_bundle::TensorSpec;

use super::Ensemble;
use super::members::{Member, fits};
use super::plan::Plan;
use crate::error::{InferError, quote};
use crate::infer::{self, Checked};
use crate::repository::Model;
use crate::session::{Output, Work};
use crate::statistics::Times;
use crate::tensor::{Held, shown};

impl Ensemble {
    /// Runs a request whose inputs were checked. Cancel safe: steps of a caller who goes that did not run yet
    /// never do.
    ///
    /// # Errors
    /// [`InferError::Unavailable`] when the model of a step is not there or does not fit; what a step fails with,
    /// with its name.
    pub(crate) fn run<'a>(
        &'a self,
        ensemble: &'a Model,
        work: Work,
    ) -> BoxFuture<'a, Result<Output, InferError>> {
        Box::pin(async move {
            let members = self.resolve(ensemble)?;
            let Work { inputs, outputs, rows, queued, deadline, answer_by, level, client, .. } = work;
            let asking = Asking { deadline, answer_by, level, client };
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
                let Some(Ended { number, makes, outcome }) = running.next().await else { break };
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

/// What the steps have from the request.
#[derive(Debug, Clone, Copy)]
struct Asking {
    deadline: Option<Instant>,
    answer_by: Option<Instant>,
    level: usize,
    client: Option<SocketAddr>,
}

/// A step that is done.
struct Ended {
    number: usize,
    /// The tensors that it made.
    makes: Vec<usize>,
    outcome: Result<(Vec<Held>, Times), InferError>,
}

async fn run_step(number: usize, model: &Model, checked: Checked, makes: Vec<usize>) -> Ended {
    Ended { number, makes, outcome: infer::step(model, checked).await }
}

/// How far a request is.
#[derive(Debug)]
struct Flow<'a> {
    plan: &'a Plan,
    members: &'a [Member],
    /// Tensors that are there, and that somebody will take.
    values: Vec<Option<Held>>,
    /// How often each tensor will be taken still.
    takers: Vec<usize>,
    /// Steps that will run and did not begin.
    waiting: Vec<bool>,
}

impl<'a> Flow<'a> {
    fn new(plan: &'a Plan, members: &'a [Member], wanted: &[usize]) -> Flow<'a> {
        // Steps of which nothing is wanted do not run.
        let waiting = plan.needed(wanted);
        let mut takers = vec![0; plan.tensors.len()];
        let steps = members.iter().zip(&waiting).filter(|(_, waits)| **waits);
        for tensor in steps.flat_map(|(member, _)| &member.inputs).chain(wanted) {
            takers[*tensor] += 1;
        }
        let values = std::iter::repeat_with(|| None).take(plan.tensors.len()).collect();
        Flow { plan, members, values, takers, waiting }
    }

    /// A tensor is there.
    fn put(&mut self, tensor: usize, value: Held) {
        let takers = self.takers[tensor];
        if takers > 0 {
            self.values[tensor] = Some(value.named(&self.plan.tensors[tensor].name, takers));
        }
    }

    /// Whether a tensor that a step is about to make may stay where its run leaves it: steps take it, and all of them
    /// from that memory.
    fn stays(&self, maker: &Member, tensor: usize) -> bool {
        let Some(memory) = maker.leaves_in() else { return false };
        let steps = self.members.iter().zip(&self.waiting).filter(|(_, waits)| **waits);
        let mut takers = steps.map(|(step, _)| step).filter(|step| step.inputs.contains(&tensor)).peekable();
        takers.peek().is_some() && takers.all(|step| step.takes_from() == Some(memory))
    }

    /// Takes a tensor that is there. The last one to take it has it alone, once the others are done.
    fn take(&mut self, tensor: usize) -> Result<Held, InferError> {
        let left = self.takers[tensor].saturating_sub(1);
        self.takers[tensor] = left;
        let value = &mut self.values[tensor];
        let taken = if left == 0 { value.take() } else { value.as_ref().and_then(Held::share) };
        taken.ok_or_else(|| {
            InferError::internal(format!("tensor {} is not there", quote(&self.plan.tensors[tensor].name)))
        })
    }

    /// Steps that did not begin and could.
    fn ready(&self) -> Vec<usize> {
        let steps = self.members.iter().zip(&self.waiting).enumerate();
        let ready = steps.filter(|(_, (member, waits))| {
            **waits && member.inputs.iter().all(|tensor| self.values[*tensor].is_some())
        });
        ready.map(|(number, _)| number).collect()
    }

    /// The request of a step that is ready, and the tensors that it makes.
    fn begin(&mut self, number: usize, asking: Asking) -> Result<(Checked, Vec<usize>), InferError> {
        self.waiting[number] = false;
        let members = self.members;
        let member = &members[number];
        let inputs = member.inputs.iter().map(|tensor| self.take(*tensor)).collect::<Result<_, _>>()?;
        let mut outputs: Vec<(usize, usize)> =
            member.outputs.iter().copied().filter(|(_, tensor)| self.takers[*tensor] > 0).collect();
        // In the order of the signature, in which most ask, so that they run together with others.
        outputs.sort_unstable();
        let stays = outputs.iter().map(|(_, tensor)| self.stays(member, *tensor)).collect();
        let (outputs, makes) = outputs.into_iter().unzip();
        let timeout = asking.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let checked = Checked {
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

/// A tensor that was made, as an output of the ensemble.
fn output(flow: &mut Flow<'_>, tensor: usize, spec: &TensorSpec) -> Result<Held, InferError> {
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

/// The times of steps together: up to the first one's turn it waited, from when the first one's run began to
/// when the last one's ended it computed.
fn around(times: &Times, step: &Times) -> Times {
    let first = if step.computing < times.computing { step } else { times };
    Times { output_start: times.output_start.max(step.output_start), end: times.end.max(step.end), ..*first }
}
