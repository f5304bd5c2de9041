//! Requests that belong to a sequence: the server keeps a state for each sequence between its requests,
//! feeds it to the graph and takes the next one out of it, as Triton's implicit state management does.
//!
//! Requests of one sequence run one after the other, in the order in which they came, those of different
//! sequences at once or together. A request takes its [`Place`] when it arrives; what it leaves behind
//! counts from the moment when its answer is ready, so that one that failed has changed nothing.

mod idle;
mod live;
mod place;
mod plan;
mod refusals;
mod shown;

use std::fmt;
use std::sync::Arc;

use crate::error::{InferError, quote};
use crate::infer::{Inference, count_unknown};
use crate::parameters::{Parameter, Parameters, wrong};
use crate::repository::{Asked, Model};

pub(crate) use live::Sequences;
pub(crate) use place::Place;
pub(crate) use plan::{Control, Declaration, Plan, Signal, State};
pub(crate) use shown::to_json;

/// Longest id that is a text, in bytes; Triton's bound.
const ID_BYTES_MAX: usize = 128;

/// The id of a sequence, of its client's choice. A number and a text are never the same id.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum SequenceId {
    Number(u64),
    Text(String),
}

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SequenceId::Number(number) => write!(f, "{number}"),
            SequenceId::Text(text) => f.write_str(&quote(text)),
        }
    }
}

/// What a request says of its sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) id: SequenceId,
    /// It is the first of its sequence.
    pub(crate) start: bool,
    /// It is the last one.
    pub(crate) end: bool,
}

impl Step {
    /// The id as what chooses between versions.
    pub(crate) fn key(&self) -> String {
        match &self.id {
            SequenceId::Number(number) => number.to_string(),
            SequenceId::Text(text) => text.clone(),
        }
    }
}

/// Reads what a request says of its sequence; `None` for one that belongs to none.
///
/// # Errors
/// [`InferError::Invalid`] for parameters of other types, and for ids that none can have.
pub(crate) fn read(parameters: &impl Parameters) -> Result<Option<Step>, InferError> {
    let of = &"the request";
    let id = match parameters.parameter("sequence_id") {
        // What clients send that have no sequence.
        None | Some(Parameter::Integer(0) | Parameter::Text("")) => None,
        Some(Parameter::Integer(number)) => match u64::try_from(number) {
            Ok(number) => Some(SequenceId::Number(number)),
            Err(_) => {
                let found = number.to_string();
                return Err(wrong(of, "sequence_id", "an integer from 0 to 2^64 - 1", &found));
            }
        },
        Some(Parameter::Text(text)) if text.len() > ID_BYTES_MAX => {
            let found = format!("one of {}", text.len());
            return Err(wrong(of, "sequence_id", &format!("a string of up to {ID_BYTES_MAX} bytes"), &found));
        }
        Some(Parameter::Text(text)) => Some(SequenceId::Text(text.to_owned())),
        Some(other) => return Err(wrong(of, "sequence_id", "an integer or a string", other.kind())),
    };
    let start = parameters.flag(of, "sequence_start")?.unwrap_or(false);
    let end = parameters.flag(of, "sequence_end")?.unwrap_or(false);
    Ok(id.map(|id| Step { id, start, end }))
}

/// The same for whoever looks ahead: what is wrong with the parameters is told when the request is decoded.
pub(crate) fn peek(parameters: &impl Parameters) -> Option<Step> {
    read(parameters).ok().flatten()
}

impl Inference {
    /// The version that answers a request with that id, and its place in its sequence where it has one and the
    /// model keeps them. Requests of a sequence run in the order of these calls.
    ///
    /// # Errors
    /// As [`Inference::route`].
    pub(crate) fn admit(
        &self,
        model: &str,
        asked: Asked<'_>,
        id: &str,
        step: Option<Step>,
    ) -> Result<(Arc<Model>, Option<Box<Place>>), InferError> {
        let Some(step) = step else { return Ok((self.route(model, asked, id)?, None)) };
        let routed = self.repository().route_step(model, asked, id, &step);
        let (model, others) = routed.inspect_err(count_unknown)?;
        let mut place = model.sequences.as_ref().map(|sequences| sequences.queue(step));
        if let Some(place) = &mut place {
            place.replaces(others);
        }
        Ok((model, place))
    }
}

#[cfg(test)]
mod tests;
