//! `sequence_batching` of a `config.pbtxt`, read and checked as far as possible without the graph.

use std::collections::BTreeSet;
use std::time::Duration;

use millrace_bundle::Datatype;

use super::fields::datatype;
use crate::sequence::{Control, Declaration, Signal, StateTensor};
use batching::control::Kind;
use batching::initial_state::StateData;
use millrace_serving_core::error::quote;
use millrace_serving_core::tensor::Data;
use millrace_serving_core::wire::inference as pb;
use millrace_serving_core::wire::inference::model_config::SchedulingChoice;
use millrace_serving_core::wire::inference::model_sequence_batching as batching;

/// Default idle time of a sequence in microseconds; Triton's default.
const IDLE_US: u64 = 1_000_000;

fn declared(config: &pb::ModelConfig) -> Option<&pb::ModelSequenceBatching> {
    match &config.scheduling_choice {
        Some(SchedulingChoice::SequenceBatching(batching)) => Some(batching),
        _ => None,
    }
}

/// The controls and states of the sequences.
pub(super) fn read(config: &pb::ModelConfig) -> Result<Option<Declaration>, String> {
    let Some(batching) = declared(config) else { return Ok(None) };
    if batching.iterative_sequence {
        return Err("iterative_sequence is not supported: a request has one run and one answer here".into());
    }
    let mut shown = batching.clone();
    if shown.max_sequence_idle_microseconds == 0 {
        shown.max_sequence_idle_microseconds = IDLE_US;
    }
    let has_rows = config.max_batch_size > 0;
    let declaration = Declaration {
        idle: Duration::from_micros(shown.max_sequence_idle_microseconds),
        sequences_max: sequences_max(batching)?,
        controls: batching.control_input.iter().map(control).collect::<Result<_, _>>()?,
        states: batching.state.iter().map(|of| state(of, has_rows)).collect::<Result<_, _>>()?,
        shown,
    };
    let inputs = declaration.controls.iter().map(|control| &control.input);
    unique("input", inputs.chain(declaration.states.iter().map(|state| &state.input)))?;
    unique("output", declaration.states.iter().map(|state| &state.output))?;
    match config.input.iter().find(|input| declaration.has_input(&input.name)) {
        Some(input) => Err(format!(
            "input {} is set by the server, not by clients: remove it from the fields input",
            quote(&input.name)
        )),
        None => Ok(Some(declaration)),
    }
}

/// Fields that are set but have no effect here.
pub(super) fn ignored(config: &pb::ModelConfig) -> Vec<(&'static str, bool)> {
    let Some(batching) = declared(config) else { return Vec::new() };
    let (direct, oldest) = match &batching.strategy_choice {
        Some(batching::StrategyChoice::Direct(direct)) => (Some(direct), None),
        Some(batching::StrategyChoice::Oldest(oldest)) => (None, Some(oldest)),
        None => (None, None),
    };
    vec![
        (
            "sequence_batching.direct.minimum_slot_utilization",
            direct.is_some_and(|direct| direct.minimum_slot_utilization > 0.0),
        ),
        ("sequence_batching.oldest.preserve_ordering", oldest.is_some_and(|oldest| oldest.preserve_ordering)),
        (
            "sequence_batching.state.use_same_buffer_for_input_output",
            batching.state.iter().any(|state| state.use_same_buffer_for_input_output),
        ),
        (
            "sequence_batching.state.use_growable_memory",
            batching.state.iter().any(|state| state.use_growable_memory),
        ),
    ]
}

/// Most live sequences.
fn sequences_max(batching: &pb::ModelSequenceBatching) -> Result<Option<usize>, String> {
    match &batching.strategy_choice {
        Some(batching::StrategyChoice::Oldest(oldest)) => {
            match usize::try_from(oldest.max_candidate_sequences) {
                Ok(0) => Ok(None),
                Ok(max) => Ok(Some(max)),
                Err(_) => {
                    Err(format!("max_candidate_sequences is {}, below 0", oldest.max_candidate_sequences))
                }
            }
        }
        Some(batching::StrategyChoice::Direct(direct))
            if !(0.0..=1.0).contains(&direct.minimum_slot_utilization) =>
        {
            Err(format!(
                "minimum_slot_utilization is {}, allowed are 0 to 1",
                direct.minimum_slot_utilization
            ))
        }
        _ => Ok(None),
    }
}

fn control(input: &batching::ControlInput) -> Result<Control, String> {
    let name = quote(&input.name);
    if input.name.is_empty() {
        return Err("a control_input has no name".into());
    }
    let [control] = input.control.as_slice() else {
        return Err(format!("control_input {name} has {} controls, one is expected", input.control.len()));
    };
    let kind = Kind::try_from(control.kind)
        .map_err(|_| format!("control_input {name}: kind {} is unknown", control.kind))?;
    let signal = match kind {
        Kind::ControlSequenceStart => flag(&name, control).map(|(no, yes)| Signal::Start(no, yes)),
        Kind::ControlSequenceReady => flag(&name, control).map(|(no, yes)| Signal::Ready(no, yes)),
        Kind::ControlSequenceEnd => flag(&name, control).map(|(no, yes)| Signal::End(no, yes)),
        Kind::ControlSequenceCorrid => id(&name, control).map(Signal::Id),
    };
    Ok(Control { input: input.name.clone(), signal: signal? })
}

/// The elements for false and true.
fn flag(name: &str, control: &batching::Control) -> Result<(Data, Data), String> {
    let batching::Control { int32_false_true, fp32_false_true, bool_false_true, .. } = control;
    match (int32_false_true.as_slice(), fp32_false_true.as_slice(), bool_false_true.as_slice()) {
        ([no, yes], [], []) => Ok((Data::Int32(vec![*no]), Data::Int32(vec![*yes]))),
        ([], [no, yes], []) if !no.is_nan() && !yes.is_nan() => {
            Ok((Data::Fp32(vec![*no]), Data::Fp32(vec![*yes])))
        }
        ([], [], [no, yes]) => Ok((Data::Bool(vec![*no]), Data::Bool(vec![*yes]))),
        _ => Err(format!(
            "control_input {name} takes one of int32_false_true, fp32_false_true and bool_false_true, with two values"
        )),
    }
}

fn id(name: &str, control: &batching::Control) -> Result<Datatype, String> {
    let batching::Control { int32_false_true, fp32_false_true, bool_false_true, .. } = control;
    if !(int32_false_true.is_empty() && fp32_false_true.is_empty() && bool_false_true.is_empty()) {
        return Err(format!(
            "control_input {name} is the ID of a sequence, which has no false and true values"
        ));
    }
    match datatype(control.data_type()) {
        Some(
            datatype @ (Datatype::Uint64
            | Datatype::Int64
            | Datatype::Uint32
            | Datatype::Int32
            | Datatype::Bytes),
        ) => Ok(datatype),
        _ => Err(format!(
            "control_input {name}: data_type is {}, ids are TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 or TYPE_STRING",
            control.data_type().as_str_name()
        )),
    }
}

fn state(state: &batching::State, has_rows: bool) -> Result<StateTensor, String> {
    let name = quote(&state.input_name);
    if state.input_name.is_empty() || state.output_name.is_empty() {
        return Err(format!(
            "a state has input_name {name} and output_name {}, both are needed",
            quote(&state.output_name)
        ));
    }
    let datatype = datatype(state.data_type())
        .ok_or_else(|| format!("state {name}: data_type is missing or unknown"))?;
    if let Some(dim) = state.dims.iter().find(|dim| **dim < 1 && **dim != -1) {
        return Err(format!("state {name}: dims has {dim}, which is neither -1 nor positive"));
    }
    let initial: Vec<i64> = match state.initial_state.as_slice() {
        // Triton's default.
        [] => state.dims.iter().map(|dim| if *dim == -1 { 1 } else { *dim }).collect(),
        [initial] => zeros(&name, state, initial)?,
        more => {
            return Err(format!(
                "state {name}: initial_state appears {} times, the limit is one",
                more.len()
            ));
        }
    };
    let with = |rows: i64, dims: &[i64]| {
        let rows = has_rows.then_some(rows);
        rows.into_iter().chain(dims.iter().copied()).collect::<Vec<i64>>()
    };
    Ok(StateTensor {
        input: state.input_name.clone(),
        output: state.output_name.clone(),
        datatype,
        dims: with(-1, &state.dims),
        initial: with(1, &initial),
    })
}

/// The shape of the zeros with which a sequence begins.
fn zeros(name: &str, state: &batching::State, initial: &batching::InitialState) -> Result<Vec<i64>, String> {
    match &initial.state_data {
        Some(StateData::ZeroData(_)) => {}
        Some(StateData::DataFile(_)) => {
            return Err(format!(
                "state {name}: data_file is not supported: begin with zero_data, and let the graph make another state \
                 where its control_input of kind CONTROL_SEQUENCE_START says so"
            ));
        }
        None => return Err(format!("state {name}: initial_state has no zero_data: true")),
    }
    if initial.data_type != state.data_type {
        return Err(format!(
            "state {name} is {} and its initial_state {}",
            state.data_type().as_str_name(),
            initial.data_type().as_str_name()
        ));
    }
    // A dimension of -1 may begin with extent 0: a sequence may begin with an empty past.
    let fits = initial.dims.len() == state.dims.len()
        && state.dims.iter().zip(&initial.dims).all(|(dim, found)| match dim {
            -1 => *found >= 0,
            dim => dim == found,
        });
    if !fits {
        return Err(format!(
            "state {name} has dims {:?} and its initial_state {:?}, which has an extent from 0 on for each -1",
            state.dims, initial.dims
        ));
    }
    Ok(initial.dims.clone())
}

fn unique<'a>(side: &str, names: impl Iterator<Item = &'a String>) -> Result<(), String> {
    let mut seen = BTreeSet::new();
    for name in names {
        if !seen.insert(name) {
            return Err(format!("{side} {} appears twice", quote(name)));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
