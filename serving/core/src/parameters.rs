//! Request and tensor parameters, read alike from gRPC messages and from JSON. Each parameter of the protocol
//! has a type; an error about a wrong type names the parameter.

mod sequence;

use std::collections::HashMap;
use std::fmt::{self, Display};
use std::time::Duration;

use serde_json::Value;

use crate::error::{InferError, quote};
use crate::wire::inference::InferParameter;
use crate::wire::inference::infer_parameter::ParameterChoice;
use sequence::read_step;
pub use sequence::{SequenceId, Step, peek_step};

/// The only name with the prefix `triton_` that requests may carry.
const ENABLE_EMPTY_FINAL_RESPONSE: &str = "triton_enable_empty_final_response";

/// The input or output that has the parameters, for error messages; formatted only on error.
#[derive(Debug, Clone, Copy)]
pub struct ParameterOwner<'a>(pub &'static str, pub &'a str);

impl Display for ParameterOwner<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.0, quote(self.1))
    }
}

/// A parameter's value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Parameter<'a> {
    /// A boolean.
    Flag(bool),
    /// Holds both 64-bit integer types of the protocol.
    Integer(i128),
    /// A string.
    Text(&'a str),
    /// A fraction, a list, or null; no parameter of the protocol has these types.
    Other,
}

impl Parameter<'_> {
    /// The type, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Parameter::Flag(_) => "a boolean",
            Parameter::Integer(_) => "an integer",
            Parameter::Text(_) => "a string",
            Parameter::Other => "neither a boolean nor an integer nor a string",
        }
    }
}

/// The parameters of one request, input or output; `of` names it in error messages.
pub trait Parameters {
    /// A parameter by its name.
    fn parameter(&self, name: &str) -> Option<Parameter<'_>>;

    /// All names, in no order.
    fn names(&self) -> impl Iterator<Item = &str>;

    /// A boolean.
    fn flag(&self, of: &dyn Display, name: &str) -> Result<Option<bool>, InferError> {
        match self.parameter(name) {
            None => Ok(None),
            Some(Parameter::Flag(value)) => Ok(Some(value)),
            Some(other) => Err(parameter_error(of, name, "a boolean", other.kind())),
        }
    }

    /// A string.
    fn text(&self, of: &dyn Display, name: &str) -> Result<Option<&str>, InferError> {
        match self.parameter(name) {
            None => Ok(None),
            Some(Parameter::Text(value)) => Ok(Some(value)),
            Some(other) => Err(parameter_error(of, name, "a string", other.kind())),
        }
    }

    /// A non-negative integer.
    fn count(&self, of: &dyn Display, name: &str) -> Result<Option<u64>, InferError> {
        match self.parameter(name) {
            None => Ok(None),
            Some(Parameter::Integer(value)) => u64::try_from(value)
                .map(Some)
                .map_err(|_| parameter_error(of, name, "an integer from 0 to 2^64 - 1", &value.to_string())),
            Some(other) => Err(parameter_error(of, name, "an integer", other.kind())),
        }
    }
}

/// The error for a parameter that is not what the protocol has for its name.
pub fn parameter_error(of: &dyn Display, name: &str, expected: &str, found: &str) -> InferError {
    InferError::invalid(format!("{of}: parameter {} takes {expected}, it is {found}", quote(name)))
}

impl Parameters for HashMap<String, InferParameter> {
    fn parameter(&self, name: &str) -> Option<Parameter<'_>> {
        Some(match self.get(name)?.parameter_choice.as_ref() {
            Some(ParameterChoice::BoolParam(value)) => Parameter::Flag(*value),
            Some(ParameterChoice::Int64Param(value)) => Parameter::Integer((*value).into()),
            Some(ParameterChoice::Uint64Param(value)) => Parameter::Integer((*value).into()),
            Some(ParameterChoice::StringParam(value)) => Parameter::Text(value),
            Some(ParameterChoice::DoubleParam(_)) | None => Parameter::Other,
        })
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        self.keys().map(String::as_str)
    }
}

impl Parameters for serde_json::Map<String, Value> {
    fn parameter(&self, name: &str) -> Option<Parameter<'_>> {
        Some(match self.get(name)? {
            Value::Bool(value) => Parameter::Flag(*value),
            Value::String(value) => Parameter::Text(value),
            Value::Number(value) => match (value.as_i64(), value.as_u64()) {
                (Some(value), _) => Parameter::Integer(value.into()),
                (None, Some(value)) => Parameter::Integer(value.into()),
                (None, None) => Parameter::Other,
            },
            Value::Null | Value::Array(_) | Value::Object(_) => Parameter::Other,
        })
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        self.keys().map(String::as_str)
    }
}

/// The scheduling parameters of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Schedule {
    /// Priority level, 1 is the highest; 0 means the default.
    pub priority: u64,
    /// Longest wait for a session.
    pub timeout: Option<Duration>,
}

/// Checks the parameters of a request and reads those about scheduling. Parameters of the protocol must have
/// their types, names with the prefix `triton_` are reserved, and all others are accepted. Sequence
/// parameters have no effect on a model without sequences.
///
/// # Errors
/// [`InferError::Invalid`].
pub fn check_request(parameters: &impl Parameters) -> Result<Schedule, InferError> {
    let of = &"the request";
    read_step(parameters)?;
    parameters.flag(of, ENABLE_EMPTY_FINAL_RESPONSE)?;
    let reserved = |name: &&str| name.starts_with("triton_") && *name != ENABLE_EMPTY_FINAL_RESPONSE;
    match parameters.names().find(reserved) {
        Some(name) => Err(InferError::invalid(format!(
            "parameter {} is reserved: of the names that begin with triton_, requests may carry {ENABLE_EMPTY_FINAL_RESPONSE} only",
            quote(name)
        ))),
        None => Ok(Schedule {
            priority: parameters.count(of, "priority")?.unwrap_or(0),
            timeout: match parameters.count(of, "timeout")? {
                // Clients send 0 for no timeout.
                None | Some(0) => None,
                Some(micros) => Some(Duration::from_micros(micros)),
            },
        }),
    }
}

#[cfg(test)]
mod tests;
