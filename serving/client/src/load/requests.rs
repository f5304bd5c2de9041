//! Requests of a load: generated from a model's signature, or read from the records of a file, and encoded once.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use millrace_bundle::{Datatype, Signature, TensorSpec};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use millrace_serving_core::error::InferError;
use millrace_serving_core::record::{Mapping, Row};
use millrace_serving_core::tensor::{Data, Tensor, element_count, shown};
use millrace_serving_core::wire::codec::framed;
use millrace_serving_core::wire::inference::ModelInferRequest;
use millrace_serving_core::wire::{Form, write_request};

/// Maximum size of the inputs of a generated request: the default message limit of a server.
const INPUT_BYTES_MAX: usize = 64 << 20;
/// Maximum number of requests made from the records of a file; further records are left out.
const REQUESTS_MAX: usize = 1024;

/// Requests that a load sends in turn. Cheap to clone.
#[derive(Clone)]
pub struct Requests {
    first: Arc<ModelInferRequest>,
    /// Encoded messages, each with its gRPC prefix.
    messages: Arc<[Bytes]>,
}

impl fmt::Debug for Requests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Requests({} of {})", self.messages.len(), self.first.model_name)
    }
}

impl Requests {
    /// One request of `rows` rows with random inputs from `seed`: floats from 0 to 1, integers 0 or 1 (valid indexes
    /// in any table), and short strings. `shapes` has the extents after the rows for inputs whose model leaves them
    /// open; the default is 1.
    ///
    /// # Errors
    /// [`InferError::Invalid`] for a shape of an unknown input, for a shape that does not fit, and for inputs that
    /// are too large for a message.
    pub fn generated(
        model: &str,
        version: Option<u64>,
        signature: &Signature,
        rows: usize,
        shapes: &BTreeMap<String, Vec<i64>>,
        seed: u64,
    ) -> Result<Requests, InferError> {
        let inputs = drawn_inputs(signature, rows, shapes, seed)?;
        Requests::of([write_request(model, version, inputs, Form::Raw)])
    }

    /// Requests of up to `rows_max` rows each. A request has fewer rows if it is the last one, or if the next row has
    /// another shape.
    ///
    /// # Errors
    /// [`InferError::Invalid`] when there are no rows, and for requests that are too large for a message.
    pub fn from_rows(
        model: &str,
        version: Option<u64>,
        mapping: &Mapping,
        rows: &[Row],
        rows_max: usize,
    ) -> Result<Requests, InferError> {
        if rows.is_empty() {
            return Err(InferError::invalid("the input has no records to make requests from"));
        }
        let mut requests = Vec::new();
        let mut rest = rows;
        while !rest.is_empty() && requests.len() < REQUESTS_MAX {
            let (now, later) = rest.split_at(mapping.fitting(rest, rows_max).max(1));
            requests.push(write_request(model, version, mapping.batch(now)?, Form::Raw));
            rest = later;
        }
        Requests::of(requests)
    }

    /// Encodes requests, of which there must be at least one.
    fn of(requests: impl IntoIterator<Item = ModelInferRequest>) -> Result<Requests, InferError> {
        let mut first = None;
        let mut messages = Vec::new();
        for request in requests {
            messages.push(framed(&request).map_err(|status| InferError::invalid(status.message()))?);
            first.get_or_insert(request);
        }
        Ok(Requests { first: Arc::new(first.unwrap_or_default()), messages: messages.into() })
    }

    /// The first request, for a trial before the load.
    pub fn first(&self) -> ModelInferRequest {
        (*self.first).clone()
    }

    /// Number of different requests.
    pub fn distinct(&self) -> usize {
        self.messages.len()
    }

    /// The encoded message for the request with a number, with its prefix.
    pub(super) fn framed(&self, number: u64) -> Bytes {
        self.messages[(number % self.messages.len() as u64) as usize].clone()
    }
}

/// Random inputs of `rows` rows for a model, as in [`Requests::generated`].
///
/// # Errors
/// As [`Requests::generated`].
pub fn drawn_inputs(
    signature: &Signature,
    rows: usize,
    shapes: &BTreeMap<String, Vec<i64>>,
    seed: u64,
) -> Result<Vec<Tensor>, InferError> {
    if let Some(name) = shapes.keys().find(|name| signature.inputs.iter().all(|spec| spec.name != **name)) {
        let inputs: Vec<&str> = signature.inputs.iter().map(|spec| spec.name.as_str()).collect();
        return Err(InferError::invalid(format!(
            "a shape for input {name:?}, the inputs of the model are {inputs:?}"
        )));
    }
    let mut random = StdRng::seed_from_u64(seed);
    let mut left = INPUT_BYTES_MAX;
    let mut inputs = Vec::with_capacity(signature.inputs.len());
    for spec in &signature.inputs {
        let shape = extents(spec, rows, shapes.get(&spec.name))?;
        let count = element_count(&spec.name, &shape)?;
        let bytes = count.checked_mul(spec.datatype.element_bytes().unwrap_or(TEXT_BYTES));
        left = bytes.and_then(|bytes| left.checked_sub(bytes)).ok_or_else(|| {
            InferError::invalid(format!(
                "input {:?} with shape {} takes the request beyond {INPUT_BYTES_MAX} bytes: send fewer rows",
                spec.name,
                shown(&shape)
            ))
        })?;
        inputs.push(Tensor::new(&spec.name, shape, draw(spec.datatype, count, &mut random))?);
    }
    Ok(inputs)
}

/// Size of a generated string in a message.
const TEXT_BYTES: usize = 8;

fn draw(datatype: Datatype, count: usize, random: &mut StdRng) -> Data {
    macro_rules! numbers {
        ($variant:ident, $draw:expr) => {
            Data::$variant((0..count).map(|_| $draw).collect())
        };
    }
    match datatype {
        Datatype::Bool => numbers!(Bool, random.random()),
        Datatype::Uint8 => numbers!(Uint8, random.random_range(0..=1)),
        Datatype::Uint16 => numbers!(Uint16, random.random_range(0..=1)),
        Datatype::Uint32 => numbers!(Uint32, random.random_range(0..=1)),
        Datatype::Uint64 => numbers!(Uint64, random.random_range(0..=1)),
        Datatype::Int8 => numbers!(Int8, random.random_range(0..=1)),
        Datatype::Int16 => numbers!(Int16, random.random_range(0..=1)),
        Datatype::Int32 => numbers!(Int32, random.random_range(0..=1)),
        Datatype::Int64 => numbers!(Int64, random.random_range(0..=1)),
        Datatype::Fp16 => numbers!(Fp16, half::f16::from_f32(random.random())),
        Datatype::Bf16 => numbers!(Bf16, half::bf16::from_f32(random.random())),
        Datatype::Fp32 => numbers!(Fp32, random.random()),
        Datatype::Fp64 => numbers!(Fp64, random.random()),
        Datatype::Bytes => numbers!(Bytes, Bytes::from(random.random_range(1000..10_000_u32).to_string())),
    }
}

/// The shape of an input of `rows` rows.
fn extents(spec: &TensorSpec, rows: usize, wanted: Option<&Vec<i64>>) -> Result<Vec<i64>, InferError> {
    let behind = spec.shape.get(1..).unwrap_or_default();
    if let Some(wanted) = wanted {
        let fits = wanted.len() == behind.len()
            && behind
                .iter()
                .zip(wanted)
                .all(|(model, wanted)| *wanted >= 0 && (*model == -1 || model == wanted));
        if !fits {
            return Err(InferError::invalid(format!(
                "input {:?} takes shape {} behind the rows, {} was given",
                spec.name,
                shown(behind),
                shown(wanted)
            )));
        }
    }
    let behind =
        wanted.map_or(behind, Vec::as_slice).iter().map(|extent| if *extent == -1 { 1 } else { *extent });
    let rows = match spec.shape.first() {
        // A scalar has no rows.
        None => None,
        Some(-1) => Some(i64::try_from(rows).unwrap_or(i64::MAX)),
        Some(fixed) => Some(*fixed),
    };
    Ok(rows.into_iter().chain(behind).collect())
}

#[cfg(test)]
mod tests;
