//! Bodies of inference requests and replies: JSON, optionally followed by the raw bytes of tensors that
//! say `binary_data_size`.

use bytes::Bytes;
use millrace_bundle::Datatype;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::elements::Elements;
use super::output::{JsonData, check_representable};
use crate::error::{InferError, quote};
use crate::infer::{Request, Response, TENSORS_MAX};
use crate::tensor::Tensor;
use crate::wire::{check_output_parameters, check_parameters};

#[derive(Debug, Deserialize)]
#[serde(expecting = "an object")]
struct RequestJson {
    #[serde(default)]
    id: String,
    #[serde(default)]
    parameters: Map<String, Value>,
    inputs: Vec<InputJson>,
    #[serde(default)]
    outputs: Vec<OutputJson>,
}

#[derive(Debug, Deserialize)]
#[serde(expecting = "an object")]
struct InputJson {
    name: String,
    shape: Vec<i64>,
    datatype: String,
    #[serde(default)]
    parameters: Map<String, Value>,
    #[serde(default)]
    data: Option<Elements>,
}

#[derive(Debug, Deserialize)]
#[serde(expecting = "an object")]
struct OutputJson {
    name: String,
    #[serde(default)]
    parameters: Map<String, Value>,
}

/// What a reply takes from its request beside the outputs.
#[derive(Debug)]
pub(super) struct Reply {
    id: String,
    /// Form of the outputs that do not say.
    binary: bool,
    /// Outputs that say.
    chosen: Vec<(String, bool)>,
}

/// Reads a body. `header_length` is the length of its JSON part when raw bytes follow.
///
/// # Errors
/// [`InferError::Invalid`], [`InferError::Unsupported`].
pub(super) fn decode(body: &Bytes, header_length: Option<usize>) -> Result<(Request, Reply), InferError> {
    let json_length = header_length.unwrap_or(body.len());
    if json_length > body.len() {
        return Err(InferError::invalid(format!(
            "Inference-Header-Content-Length is {json_length}, the body has {} bytes",
            body.len()
        )));
    }
    let request: RequestJson = serde_json::from_slice(&body[..json_length]).map_err(|error| {
        InferError::invalid(format!("the body is not an inference request in JSON: {}", shortened(&error)))
    })?;
    check_parameters(request.parameters.keys())?;
    for (what, count) in [("inputs", request.inputs.len()), ("outputs", request.outputs.len())] {
        if count > TENSORS_MAX {
            return Err(InferError::invalid(format!("{count} {what}, the limit is {TENSORS_MAX}")));
        }
    }
    let mut rest = body.slice(json_length..);
    let inputs =
        request.inputs.into_iter().map(|input| read_input(input, &mut rest)).collect::<Result<_, _>>()?;
    if !rest.is_empty() {
        return Err(InferError::invalid(format!("{} bytes of binary data belong to no input", rest.len())));
    }
    let binary = flag(&request.parameters, "binary_data_output")?.unwrap_or(false);
    let mut chosen = Vec::new();
    let mut outputs = Vec::with_capacity(request.outputs.len());
    for output in request.outputs {
        check_output_parameters(&output.name, output.parameters.keys())?;
        if let Some(binary) = flag(&output.parameters, "binary_data")? {
            chosen.push((output.name.clone(), binary));
        }
        outputs.push(output.name);
    }
    let reply = Reply { id: request.id, binary, chosen };
    Ok((Request { inputs, outputs, ..Default::default() }, reply))
}

/// What the parser says, which may repeat a string of the body whole.
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

fn read_input(input: InputJson, rest: &mut Bytes) -> Result<Tensor, InferError> {
    let InputJson { name, shape, datatype, parameters, data } = input;
    let datatype: Datatype =
        datatype.parse().map_err(|error| InferError::invalid(format!("input {}: {error}", quote(&name))))?;
    if parameters.contains_key("shared_memory_region") {
        return Err(InferError::Unsupported {
            reason: format!("input {}: shared memory is not supported", quote(&name)),
        });
    }
    match (data, parameters.get("binary_data_size")) {
        (Some(data), None) => {
            let data = data.into_data(&name, datatype, &shape)?;
            Ok(Tensor { name, shape, data })
        }
        (None, Some(value)) => {
            let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
            match size.filter(|size| *size <= rest.len()) {
                Some(size) => Tensor::from_raw(&name, datatype, shape, &rest.split_to(size)),
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
    parameters: Option<BinarySize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<JsonData<'a>>,
}

#[derive(Serialize)]
struct BinarySize {
    binary_data_size: usize,
}

/// Writes a reply; gives the length of its JSON part when raw bytes follow it.
///
/// # Errors
/// [`InferError::NotRepresentable`].
pub(super) fn encode(response: Response, reply: &Reply) -> Result<(Option<usize>, Bytes), InferError> {
    let mut raw = Vec::new();
    let mut outputs = Vec::with_capacity(response.outputs.len());
    for tensor in &response.outputs {
        let chosen = reply.chosen.iter().find(|(name, _)| *name == tensor.name);
        let binary = chosen.map_or(reply.binary, |(_, binary)| *binary);
        if !binary {
            check_representable(&tensor.name, &tensor.data)?;
        }
        let parameters = binary.then(|| {
            let bytes = tensor.data.to_raw();
            let binary_data_size = bytes.len();
            raw.push(bytes);
            BinarySize { binary_data_size }
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
    if raw.is_empty() {
        return Ok((None, body.into()));
    }
    let json_length = body.len();
    for bytes in raw {
        body.extend_from_slice(&bytes);
    }
    Ok((Some(json_length), body.into()))
}
