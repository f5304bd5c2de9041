//! Mapping between the requests of a sequence and runs of the graph: the inputs that come from the client, those that
//! come from the server, and the outputs that are kept for the next request.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use millrace_bundle::{Datatype, Signature, TensorSpec};

use millrace_serving_core::error::{InferError, quote};
use millrace_serving_core::parameters::{SequenceId, Step};
use millrace_serving_core::tensor::{Data, Tensor, TensorHandle, element_count, shown};
use millrace_serving_core::wire::inference as pb;

/// Maximum number of names in a message.
const SHOWN_MAX: usize = 16;

/// A model's configuration of sequences.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Declaration {
    /// The configuration as shown to clients.
    pub shown: pb::ModelSequenceBatching,
    /// Maximum time between two requests of a sequence.
    pub idle: Duration,
    /// Maximum number of live sequences, if configured.
    pub sequences_max: Option<usize>,
    pub controls: Vec<Control>,
    pub states: Vec<StateTensor>,
}

impl Declaration {
    /// Whether the server provides an input.
    pub(crate) fn has_input(&self, name: &str) -> bool {
        self.controls.iter().any(|control| control.input == name)
            || self.states.iter().any(|state| state.input == name)
    }

    /// Whether the server keeps an output for the next request.
    pub(crate) fn has_output(&self, name: &str) -> bool {
        self.states.iter().any(|state| state.output == name)
    }
}

/// An input that tells the graph the position of a request in its sequence.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Control {
    pub input: String,
    pub signal: Signal,
}

/// Meaning of a control input. Flags have the elements for false and for true.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Signal {
    Start(Data, Data),
    Ready(Data, Data),
    End(Data, Data),
    Id(Datatype),
}

/// A state that is kept between the requests of a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StateTensor {
    pub input: String,
    pub output: String,
    pub datatype: Datatype,
    /// Shape including the rows, as in the graph.
    pub dims: Vec<i64>,
    /// Shape of the initial zeros, for one row.
    pub(crate) initial: Vec<i64>,
}

/// Origin of an input of the graph.
#[derive(Debug)]
enum Source {
    Client,
    Control { place: usize, shape: Vec<i64> },
    State(usize),
}

/// The mapping for a model version.
#[derive(Debug)]
pub(crate) struct Plan {
    client: Signature,
    /// Sources of the graph's inputs, in the graph's order.
    sources: Vec<Source>,
    /// Indexes in the graph of the outputs that clients see.
    outputs: Vec<usize>,
    /// Indexes in the graph of the outputs that are kept.
    kept: Vec<usize>,
    /// Whether the model has rows; a request then has exactly one.
    has_rows: bool,
    /// Initial states of a sequence.
    initial: Arc<Vec<TensorHandle>>,
    /// The declared shapes of the states.
    dims: Vec<Vec<i64>>,
    controls: Vec<Control>,
}

impl Plan {
    /// Checks a declaration against the graph. Clients see a kept output only if `listed` contains it. The initial
    /// states may have up to `bytes_max` bytes.
    ///
    /// # Errors
    /// The first conflict between the two.
    pub(crate) fn new(
        declaration: &Declaration,
        graph: &Signature,
        listed: &[TensorSpec],
        has_rows: bool,
        bytes_max: usize,
    ) -> Result<Plan, String> {
        let Declaration { controls, states, .. } = declaration;
        let named = controls.iter().map(|control| &control.input);
        for name in named.chain(states.iter().map(|state| &state.input)) {
            find("input", name, &graph.inputs)?;
        }
        let mut client = Signature { inputs: Vec::new(), outputs: Vec::new() };
        let mut sources = Vec::with_capacity(graph.inputs.len());
        for spec in &graph.inputs {
            if let Some(place) = controls.iter().position(|control| control.input == spec.name) {
                let shape = controls[place].shape(spec)?;
                sources.push(Source::Control { place, shape });
            } else if let Some(place) = states.iter().position(|state| state.input == spec.name) {
                states[place].check("input", spec)?;
                sources.push(Source::State(place));
            } else {
                client.inputs.push(spec.clone());
                sources.push(Source::Client);
            }
        }
        let mut kept = Vec::with_capacity(states.len());
        for state in states {
            let place = find("output", &state.output, &graph.outputs)?;
            state.check("output", &graph.outputs[place])?;
            kept.push(place);
        }
        let mut outputs = Vec::with_capacity(graph.outputs.len());
        for (place, spec) in graph.outputs.iter().enumerate() {
            if !kept.contains(&place) || listed.iter().any(|listed| listed.name == spec.name) {
                client.outputs.push(spec.clone());
                outputs.push(place);
            }
        }
        let initial = Arc::new(begin(states, bytes_max)?);
        let dims = states.iter().map(|state| state.dims.clone()).collect();
        let controls = controls.clone();
        Ok(Plan { client, sources, outputs, kept, has_rows, initial, dims, controls })
    }

    /// Inputs and outputs that clients see.
    pub(crate) fn client(&self) -> &Signature {
        &self.client
    }

    /// Initial states of a sequence.
    pub(super) fn initial(&self) -> Arc<Vec<TensorHandle>> {
        Arc::clone(&self.initial)
    }

    /// Refuses requests of several rows, which would belong to one sequence at the same time.
    pub(super) fn check_rows(&self, rows: usize) -> Result<(), InferError> {
        if self.has_rows && rows != 1 {
            return Err(InferError::invalid(
                "a request of a sequence has one row: set the first extent of every input to 1, and send the next row \
                 with the next request",
            ));
        }
        Ok(())
    }

    /// The inputs of the graph, from the client's inputs and the current states.
    pub(super) fn inputs(
        &self,
        client: Vec<TensorHandle>,
        step: &Step,
        states: &[TensorHandle],
    ) -> Result<Vec<TensorHandle>, InferError> {
        let mut client = client.into_iter();
        let inputs = self.sources.iter().map(|source| match source {
            // Client inputs were checked and are in the graph's order.
            Source::Client => client.next().ok_or_else(|| InferError::internal("an input is missing")),
            Source::Control { place, shape } => {
                self.controls[*place].tensor(shape, step).map(TensorHandle::Alone)
            }
            Source::State(place) => {
                states[*place].share().ok_or_else(|| InferError::internal("a state is not shared"))
            }
        });
        inputs.collect()
    }

    /// Indexes in the graph of the outputs that a client requests, then of the kept outputs.
    pub(super) fn outputs(&self, wanted: &[usize]) -> Vec<usize> {
        wanted.iter().map(|place| self.outputs[*place]).chain(self.kept.iter().copied()).collect()
    }

    /// The states that a run left. A wrong shape would make the next request fail; other rows would mix sequences.
    ///
    /// # Errors
    /// [`InferError::Internal`] for states of a wrong shape: a graph may return any extent where its shape is open.
    pub(super) fn states(&self, outputs: Vec<TensorHandle>) -> Result<Vec<TensorHandle>, InferError> {
        let named = outputs.into_iter().zip(self.initial.iter().zip(&self.dims));
        let states = named.map(|(output, (input, dims))| {
            let (name, shape) = (input.view().name(), output.view().shape());
            let is_one = !self.has_rows || shape.first() == Some(&1);
            let fits = shape.len() == dims.len()
                && dims.iter().zip(shape).all(|(declared, found)| *declared == -1 || declared == found);
            if !is_one || !fits {
                return Err(InferError::internal(format!(
                    "the model left state {} of shape {}, sequence_batching declares {dims:?} of one row",
                    quote(name),
                    shown(shape)
                )));
            }
            Ok(shared(output, name))
        });
        states.collect()
    }
}

/// Zeros for every state.
fn begin(states: &[StateTensor], bytes_max: usize) -> Result<Vec<TensorHandle>, String> {
    let mut bytes = 0usize;
    let zeros = states.iter().map(|state| {
        let count = element_count(&state.input, &state.initial).map_err(|error| error.to_string())?;
        // A BYTES element takes at least its length prefix.
        let width = state.datatype.element_bytes().unwrap_or(4);
        bytes = bytes.saturating_add(count.saturating_mul(width));
        if bytes > bytes_max {
            return Err(format!(
                "the states of one sequence have {bytes} bytes, those of all may have {bytes_max} (limits.sequence_bytes_max)"
            ));
        }
        let data = Data::zeros(state.datatype, count);
        let zeros = Tensor { name: state.input.clone(), shape: state.initial.clone(), data };
        Ok(shared(TensorHandle::Alone(zeros), &state.input))
    });
    zeros.collect()
}

/// Shares a state: its sequence keeps it until the next request has left a new one.
fn shared(state: TensorHandle, name: &str) -> TensorHandle {
    state.named(name, 2)
}

/// Index of the input or output with a name.
fn find(side: &str, name: &str, specs: &[TensorSpec]) -> Result<usize, String> {
    specs.iter().position(|spec| spec.name == name).ok_or_else(|| {
        let names: Vec<&str> = specs.iter().take(SHOWN_MAX).map(|spec| spec.name.as_str()).collect();
        format!(
            "sequence_batching names {side} {}, the graph has none of that name, its {side}s are {names:?}",
            quote(name)
        )
    })
}

impl StateTensor {
    fn check(&self, side: &str, found: &TensorSpec) -> Result<(), String> {
        let fits = found.shape.len() == self.dims.len()
            && found.shape.iter().zip(&self.dims).all(|(graph, declared)| *graph == -1 || graph == declared);
        if found.datatype == self.datatype && fits {
            return Ok(());
        }
        Err(format!(
            "state {} is {} {:?} in sequence_batching (with the rows of max_batch_size), and {side} {} of the graph is \
             {} {:?}",
            quote(&self.input),
            self.datatype,
            self.dims,
            quote(&found.name),
            found.datatype,
            found.shape
        ))
    }
}

impl Control {
    fn datatype(&self) -> Datatype {
        match &self.signal {
            Signal::Start(no, _) | Signal::Ready(no, _) | Signal::End(no, _) => no.datatype(),
            Signal::Id(datatype) => *datatype,
        }
    }

    /// The shape of the single element that the graph takes.
    fn shape(&self, found: &TensorSpec) -> Result<Vec<i64>, String> {
        let name = quote(&self.input);
        if found.datatype != self.datatype() {
            return Err(format!(
                "control_input {name} is {} in sequence_batching and {} in the graph",
                self.datatype(),
                found.datatype
            ));
        }
        if found.shape.iter().any(|extent| ![1, -1].contains(extent)) {
            return Err(format!(
                "control_input {name} is {:?} in the graph, it gets one element for each request",
                found.shape
            ));
        }
        Ok(vec![1; found.shape.len()])
    }

    fn tensor(&self, shape: &[i64], step: &Step) -> Result<Tensor, InferError> {
        let data = match &self.signal {
            Signal::Start(_, yes) if step.start => yes.clone(),
            Signal::End(_, yes) if step.end => yes.clone(),
            Signal::Start(no, _) | Signal::End(no, _) => no.clone(),
            // Every request is ready: batches are not padded with empty rows.
            Signal::Ready(_, yes) => yes.clone(),
            Signal::Id(datatype) => id(*datatype, &step.id)?,
        };
        Ok(Tensor { name: self.input.clone(), shape: shape.to_vec(), data })
    }
}

/// An id in the model's datatype. As in Triton, narrow types get the lower bits of a number.
fn id(datatype: Datatype, id: &SequenceId) -> Result<Data, InferError> {
    Ok(match (datatype, id) {
        (Datatype::Uint64, SequenceId::Number(number)) => Data::Uint64(vec![*number]),
        (Datatype::Int64, SequenceId::Number(number)) => Data::Int64(vec![*number as i64]),
        (Datatype::Uint32, SequenceId::Number(number)) => Data::Uint32(vec![*number as u32]),
        (Datatype::Int32, SequenceId::Number(number)) => Data::Int32(vec![*number as i32]),
        (_, SequenceId::Number(number)) => Data::Bytes(vec![Bytes::from(number.to_string())]),
        (Datatype::Bytes, SequenceId::Text(text)) => Data::Bytes(vec![Bytes::from(text.clone())]),
        (datatype, SequenceId::Text(_)) => {
            return Err(InferError::invalid(format!(
                "sequence_id is {id}, and the model takes ids as {datatype}: give an integer"
            )));
        }
    })
}
