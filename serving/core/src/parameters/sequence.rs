//! Sequence parameters of a request: the id of its sequence, and whether it starts or ends it.

use std::fmt;

use super::{Parameter, Parameters, parameter_error};
use crate::error::{InferError, quote};

/// Maximum length of a string id in bytes, as in Triton.
const ID_BYTES_MAX: usize = 128;

/// The id of a sequence, chosen by its client. A number and a string are never the same id.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SequenceId {
    /// An integer other than 0.
    Number(u64),
    /// A string that is not empty.
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

/// The sequence parameters of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// The sequence.
    pub id: SequenceId,
    /// Whether it is the first request of its sequence.
    pub start: bool,
    /// Whether it is the last request of its sequence.
    pub end: bool,
}

impl Step {
    /// The id as the key for version routing.
    pub fn key(&self) -> String {
        match &self.id {
            SequenceId::Number(number) => number.to_string(),
            SequenceId::Text(text) => text.clone(),
        }
    }
}

/// Reads the sequence parameters of a request; `None` for a request outside of sequences.
///
/// # Errors
/// [`InferError::Invalid`] for parameters of a wrong type, and for invalid ids.
pub(crate) fn read_step(parameters: &impl Parameters) -> Result<Option<Step>, InferError> {
    let of = &"the request";
    let id = match parameters.parameter("sequence_id") {
        // Values that clients without a sequence send.
        None | Some(Parameter::Integer(0) | Parameter::Text("")) => None,
        Some(Parameter::Integer(number)) => match u64::try_from(number) {
            Ok(number) => Some(SequenceId::Number(number)),
            Err(_) => {
                let found = number.to_string();
                return Err(parameter_error(of, "sequence_id", "an integer from 0 to 2^64 - 1", &found));
            }
        },
        Some(Parameter::Text(text)) if text.len() > ID_BYTES_MAX => {
            let found = format!("one of {}", text.len());
            return Err(parameter_error(
                of,
                "sequence_id",
                &format!("a string of up to {ID_BYTES_MAX} bytes"),
                &found,
            ));
        }
        Some(Parameter::Text(text)) => Some(SequenceId::Text(text.to_owned())),
        Some(other) => {
            return Err(parameter_error(of, "sequence_id", "an integer or a string", other.kind()));
        }
    };
    let start = parameters.flag(of, "sequence_start")?.unwrap_or(false);
    let end = parameters.flag(of, "sequence_end")?.unwrap_or(false);
    Ok(id.map(|id| Step { id, start, end }))
}

/// Like `read_step`, without errors: decoding the request reports invalid parameters later.
pub fn peek_step(parameters: &impl Parameters) -> Option<Step> {
    read_step(parameters).ok().flatten()
}
