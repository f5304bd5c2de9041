//! Codec for the bodies of inference requests and responses: JSON, optionally followed by the raw bytes of
//! the tensors that have `binary_data_size`.

mod not_finite;

use bytes::Bytes;
use millrace_bundle::{Datatype, Signature};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::output_target::{OutputTarget, deliver, read_output_targets, write_regions};
use crate::shared_memory::{Inputs, SharedMemory};
use millrace_serving_core::elements::Elements;
use millrace_serving_core::elements::output::{JsonData, check_representable};
use millrace_serving_core::error::{InferError, quote};
use millrace_serving_core::parameters::{Schedule, Step, check_request, peek_step};
use millrace_serving_core::tensor::{TENSORS_MAX, Tensor};
use millrace_serving_repository::infer::{Request, Response};

#[derive(Debug, Deserialize)]
#[serde(expecting = "an object")]
struct RequestJson {
    #[serde(default, deserialize_with = "nullable")]
    id: String,
    #[serde(default, deserialize_with = "parameters")]
    parameters: Map<String, Value>,
    inputs: Vec<InputJson>,
    #[serde(default, deserialize_with = "nullable")]
    outputs: Vec<OutputJson>,
}

#[derive(Debug, Deserialize)]
#[serde(expecting = "an object")]
struct InputJson {
    name: String,
    shape: Vec<i64>,
    datatype: String,
    #[serde(default, deserialize_with = "parameters")]
    parameters: Map<String, Value>,
    #[serde(default)]
    data: Option<Elements>,
}

#[derive(Debug, Deserialize)]
#[serde(expecting = "an object")]
struct OutputJson {
    name: String,
    #[serde(default, deserialize_with = "parameters")]
    parameters: Map<String, Value>,
}

/// Reads a field for which null means absent.
pub(super) fn nullable<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// Parameters; null means absent.
pub(super) fn parameters<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Map<String, Value>, D::Error> {
    let mut parameters: Map<String, Value> = nullable(deserializer)?;
    parameters.retain(|_, value| !value.is_null());
    Ok(parameters)
}

/// The part of a request that its response needs, besides the outputs.
#[derive(Debug)]
pub(super) struct ReplyOptions {
    id: String,
    /// Form of outputs without a form of their own.
    binary: bool,
    /// Outputs with a form of their own.
    chosen: Vec<(String, bool)>,
    deliveries: Vec<OutputTarget>,
}

/// Decodes a body. `header_length` is the length of its JSON part when raw bytes follow.
///
/// # Errors
/// [`InferError::Invalid`], [`InferError::Unsupported`], and errors of shared memory.
pub(super) fn decode(
    body: &Bytes,
    header_length: Option<usize>,
    memory: &SharedMemory,
) -> Result<(Request, ReplyOptions), InferError> {
    let json_length = header_length.unwrap_or(body.len());
    if json_length > body.len() {
        return Err(InferError::invalid(format!(
            "Inference-Header-Content-Length is {json_length}, the body has {} bytes",
            body.len()
        )));
    }
    let json = &body[..json_length];
    // Serde would accept a list, whose elements it takes for the fields in order.
    if json.trim_ascii_start().first() == Some(&b'[') {
        return Err(InferError::invalid("the body is a list, an object with \"inputs\" is expected"));
    }
    let request: RequestJson = serde_json::from_slice(json).map_err(|error| {
        not_finite::refusal(json).unwrap_or_else(|| {
            let reason = shortened(&error);
            InferError::invalid(format!("the body is not an inference request in JSON: {reason}"))
        })
    })?;
    let Schedule { priority, timeout } = check_request(&request.parameters)?;
    for (what, count) in [("inputs", request.inputs.len()), ("outputs", request.outputs.len())] {
        if count > TENSORS_MAX {
            return Err(InferError::invalid(format!("{count} {what}, the limit is {TENSORS_MAX}")));
        }
    }
    let wanted = request.outputs.iter().map(|output| (output.name.as_str(), &output.parameters));
    let deliveries = read_output_targets(wanted, memory)?;
    let mut rest = body.slice(json_length..);
    let mut regions = Inputs::of(memory);
    let read = |input| read_input(input, &mut rest, &mut regions);
    let inputs = request.inputs.into_iter().map(read).collect::<Result<_, _>>()?;
    if !rest.is_empty() {
        return Err(InferError::invalid(format!("{} bytes of binary data belong to no input", rest.len())));
    }
    let binary = flag(&request.parameters, "binary_data_output")?.unwrap_or(false);
    let mut chosen = Vec::new();
    let mut outputs = Vec::with_capacity(request.outputs.len());
    for output in request.outputs {
        if let Some(binary) = flag(&output.parameters, "binary_data")? {
            chosen.push((output.name.clone(), binary));
        }
        outputs.push(output.name);
    }
    let reply = ReplyOptions { id: request.id, binary, chosen, deliveries };
    Ok((Request { inputs, outputs, priority, timeout, ..Default::default() }, reply))
}

/// The id of a request and its sequence parameters; empty if the body is not a request.
pub(super) fn head(body: &Bytes, header_length: Option<usize>) -> (String, Option<Step>) {
    #[derive(Default, Deserialize)]
    struct Head {
        #[serde(default, deserialize_with = "nullable")]
        id: String,
        #[serde(default, deserialize_with = "parameters")]
        parameters: Map<String, Value>,
    }
    let json_length = header_length.map_or(body.len(), |length| length.min(body.len()));
    let Head { id, parameters } = serde_json::from_slice(&body[..json_length]).unwrap_or_default();
    (id, peek_step(&parameters))
}

/// The parser's message, shortened: it may repeat a long string of the body.
fn shortened(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.char_indices().nth(300) {
        Some((cut, _)) => format!("{}… at line {} column {}", &text[..cut], error.line(), error.column()),
        None => text,
    }
}

fn flag(parameters: &Map<String, Value>, name: &str) -> Result<Option<bool>, InferError> {
    match parameters.get(name) {
        None => Ok(None),
        Some(Value::Bool(value)) => Ok(Some(*value)),
        Some(value) => Err(InferError::invalid(format!(
            "parameter {name:?} is {}, true or false is expected",
            quote(&value.to_string())
        ))),
    }
}

fn read_input(input: InputJson, rest: &mut Bytes, regions: &mut Inputs<'_>) -> Result<Tensor, InferError> {
    let InputJson { name, shape, datatype, parameters, data } = input;
    let datatype: Datatype =
        datatype.parse().map_err(|error| InferError::invalid(format!("input {}: {error}", quote(&name))))?;
    if let Some(raw) = regions.read(&name, &parameters)? {
        if data.is_some() || parameters.contains_key("binary_data_size") {
            return Err(InferError::invalid(format!(
                "input {} has data or binary_data_size beside a shared memory region",
                quote(&name)
            )));
        }
        return Tensor::from_raw(name, datatype, shape, &raw);
    }
    match (data, parameters.get("binary_data_size")) {
        (Some(data), None) => {
            let data = data.into_data(&name, datatype, &shape)?;
            Ok(Tensor { name, shape, data })
        }
        (None, Some(value)) => {
            let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
            match size.filter(|size| *size <= rest.len()) {
                Some(size) => Tensor::from_raw(name, datatype, shape, &rest.split_to(size)),
                None => Err(InferError::invalid(format!(
                    "input {}: binary_data_size is {}, a number up to the {} bytes that the body still has after its JSON is expected",
                    quote(&name),
                    quote(&value.to_string()),
                    rest.len()
                ))),
            }
        }
        (Some(_), Some(_)) => {
            Err(InferError::invalid(format!("input {} has both data and binary_data_size", quote(&name))))
        }
        (None, None) => {
            Err(InferError::invalid(format!("input {} has neither data nor binary_data_size", quote(&name))))
        }
    }
}

#[derive(Serialize)]
struct ResponseJson<'a> {
    model_name: &'a str,
    model_version: String,
    #[serde(skip_serializing_if = "str::is_empty")]
    id: &'a str,
    outputs: Vec<OutputReplyJson<'a>>,
}

#[derive(Serialize)]
struct OutputReplyJson<'a> {
    name: &'a str,
    datatype: &'static str,
    shape: &'a [i64],
    #[serde(skip_serializing_if = "Option::is_none")]
    parameters: Option<OutputLocation<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<JsonData<'a>>,
}

/// The place of an output's elements that are not in the JSON.
#[derive(Serialize)]
#[serde(untagged)]
enum OutputLocation<'a> {
    Body {
        binary_data_size: usize,
    },
    Region {
        shared_memory_region: &'a str,
        shared_memory_offset: u64,
        shared_memory_byte_size: usize,
        /// Always 0: Triton's C++ client expects this field in every output that has parameters.
        binary_data_size: usize,
    },
}

/// Encodes a response and writes outputs to shared memory. Returns the length of the JSON part when raw bytes
/// follow it.
///
/// # Errors
/// [`InferError::NotRepresentable`], and what the outputs that were asked for say.
pub(super) fn encode(
    signature: &Signature,
    response: Response,
    mut reply: ReplyOptions,
) -> Result<(Option<usize>, Bytes), InferError> {
    let delivered = deliver(signature, response.outputs, std::mem::take(&mut reply.deliveries))?;
    let mut raw = Vec::new();
    let mut outputs = Vec::with_capacity(delivered.len());
    for output in &delivered {
        let tensor = &output.tensor;
        if let Some(span) = &output.span {
            outputs.push(OutputReplyJson {
                name: &tensor.name,
                datatype: tensor.data.datatype().as_str(),
                shape: &tensor.shape,
                parameters: Some(OutputLocation::Region {
                    shared_memory_region: span.region(),
                    shared_memory_offset: span.offset(),
                    shared_memory_byte_size: tensor.data.raw_len(),
                    binary_data_size: 0,
                }),
                data: None,
            });
            continue;
        }
        let chosen = reply.chosen.iter().find(|(name, _)| *name == tensor.name);
        let binary = chosen.map_or(reply.binary, |(_, binary)| *binary);
        if !binary {
            check_representable(&tensor.name, &tensor.data)?;
        }
        let parameters = binary.then(|| {
            let bytes = tensor.data.to_raw();
            let binary_data_size = bytes.len();
            raw.push(bytes);
            OutputLocation::Body { binary_data_size }
        });
        outputs.push(OutputReplyJson {
            name: &tensor.name,
            datatype: tensor.data.datatype().as_str(),
            shape: &tensor.shape,
            parameters,
            data: (!binary).then_some(JsonData(&tensor.data)),
        });
    }
    let json = ResponseJson {
        model_name: &response.model,
        model_version: response.version.to_string(),
        id: &reply.id,
        outputs,
    };
    let mut body = serde_json::to_vec(&json)
        .map_err(|error| InferError::internal(format!("the reply cannot be written: {error}")))?;
    write_regions(&delivered)?;
    if raw.is_empty() {
        return Ok((None, body.into()));
    }
    let json_length = body.len();
    for bytes in raw {
        body.extend_from_slice(&bytes);
    }
    Ok((Some(json_length), body.into()))
}
