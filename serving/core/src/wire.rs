//! Messages and services of the Open Inference Protocol, generated from `proto/inference.proto`, and their
//! conversion from and to tensors.

pub mod codec;
mod status;

use std::collections::HashMap;

use bytes::Bytes;
use millrace_bundle::Datatype;

use crate::error::{InferError, quote};
use crate::tensor::{Data, TENSORS_MAX, Tensor, element_count, wrong_count};

#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic)]
pub mod inference {
    //! The generated types.
    tonic::include_proto!("inference");
}

/// Descriptors of the inference service and its messages, compiled by the build script.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/inference.bin"));

use inference::model_infer_request::InferInputTensor;
use inference::model_infer_response::InferOutputTensor;
use inference::{InferParameter, InferTensorContents, ModelInferRequest, ModelInferResponse};

/// Encoding of tensors: raw little-endian bytes in a list of the message, or typed fields of each tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// `raw_input_contents`, one entry per tensor that is not in shared memory.
    Raw,
    /// `contents` of each tensor. FP16 and BF16 have no typed field.
    Typed,
}

/// Reads the inputs of a request; `region` reads the bytes of one whose parameters name a shared memory region, and
/// is `None` for the others.
///
/// # Errors
/// [`InferError::Invalid`], and the errors of `region`.
pub fn read_inputs(
    request: &mut ModelInferRequest,
    mut region: impl FnMut(&InferInputTensor) -> Result<Option<Bytes>, InferError>,
) -> Result<(Vec<Tensor>, Form), InferError> {
    let inputs = std::mem::take(&mut request.inputs);
    let raw = std::mem::take(&mut request.raw_input_contents);
    if inputs.len() > TENSORS_MAX {
        return Err(InferError::invalid(format!("{} inputs, the limit is {TENSORS_MAX}", inputs.len())));
    }
    let placed = |input: &&InferInputTensor| input.parameters.contains_key("shared_memory_region");
    let sent = inputs.len() - inputs.iter().filter(placed).count();
    // Clients that put every input into shared memory expect raw outputs.
    let all_placed = sent == 0 && !inputs.is_empty();
    let form = if raw.is_empty() && !all_placed { Form::Typed } else { Form::Raw };
    if form == Form::Raw && raw.len() != sent {
        return Err(InferError::invalid(format!(
            "{} entries in raw_input_contents for {} inputs, of which {sent} are not in shared memory: each of those \
             has one",
            raw.len(),
            inputs.len()
        )));
    }
    let mut raw = raw.into_iter();
    let mut tensors = Vec::with_capacity(inputs.len());
    for input in inputs {
        let placed = region(&input)?;
        tensors.push(match placed.or_else(|| raw.next()) {
            Some(raw) => read_raw(input, &raw)?,
            None => read_typed(input)?,
        });
    }
    Ok((tensors, form))
}

fn read_datatype(input: &InferInputTensor) -> Result<Datatype, InferError> {
    input
        .datatype
        .parse()
        .map_err(|error| InferError::invalid(format!("input {}: {error}", quote(&input.name))))
}

fn read_raw(input: InferInputTensor, raw: &Bytes) -> Result<Tensor, InferError> {
    let datatype = read_datatype(&input)?;
    if input.contents.as_ref().is_some_and(|contents| *contents != InferTensorContents::default()) {
        return Err(InferError::invalid(format!(
            "input {} has typed contents beside raw_input_contents or a shared memory region: use one of them for all \
             inputs",
            quote(&input.name)
        )));
    }
    Tensor::from_raw(input.name, datatype, input.shape, raw)
}

fn read_typed(input: InferInputTensor) -> Result<Tensor, InferError> {
    let datatype = read_datatype(&input)?;
    let InferInputTensor { name, shape, contents, .. } = input;
    let mut contents = contents.unwrap_or_default();
    let count = element_count(&name, &shape)?;
    macro_rules! take {
        ($field:ident) => {
            std::mem::take(&mut contents.$field)
        };
    }
    macro_rules! narrow {
        ($variant:ident, $field:ident, $number:ty) => {
            Data::$variant(
                take!($field)
                    .into_iter()
                    .map(|value| {
                        <$number>::try_from(value).map_err(|_| {
                            InferError::invalid(format!(
                                "input {}: {value} does not fit {datatype}",
                                quote(&name)
                            ))
                        })
                    })
                    .collect::<Result<_, _>>()?,
            )
        };
    }
    let data = match datatype {
        Datatype::Bool => Data::Bool(take!(bool_contents)),
        Datatype::Int8 => narrow!(Int8, int_contents, i8),
        Datatype::Int16 => narrow!(Int16, int_contents, i16),
        Datatype::Int32 => Data::Int32(take!(int_contents)),
        Datatype::Int64 => Data::Int64(take!(int64_contents)),
        Datatype::Uint8 => narrow!(Uint8, uint_contents, u8),
        Datatype::Uint16 => narrow!(Uint16, uint_contents, u16),
        Datatype::Uint32 => Data::Uint32(take!(uint_contents)),
        Datatype::Uint64 => Data::Uint64(take!(uint64_contents)),
        Datatype::Fp32 => Data::Fp32(take!(fp32_contents)),
        Datatype::Fp64 => Data::Fp64(take!(fp64_contents)),
        Datatype::Bytes => Data::Bytes(take!(bytes_contents)),
        Datatype::Fp16 | Datatype::Bf16 => {
            return Err(InferError::invalid(format!(
                "input {}: {datatype} has no typed contents, send it in raw_input_contents",
                quote(&name)
            )));
        }
    };
    if contents != InferTensorContents::default() {
        return Err(InferError::invalid(format!(
            "input {} is {datatype} and has contents of another datatype",
            quote(&name)
        )));
    }
    if data.len() != count {
        return Err(wrong_count(&name, &shape, count, data.len()));
    }
    Ok(Tensor { name, shape, data })
}

/// An output of a response.
#[derive(Debug)]
pub struct Output {
    /// Name, shape and elements.
    pub tensor: Tensor,
    /// The parameters that name its shared memory region, if its elements are there and not in the response.
    pub region: Option<HashMap<String, InferParameter>>,
}

/// Builds a response. FP16 and BF16 outputs make a typed response raw, because they have no typed field. An
/// output in shared memory has an empty raw entry: clients find an output's entry by its index among all
/// outputs.
pub fn write_response(
    model: String,
    version: u64,
    id: String,
    outputs: Vec<Output>,
    form: Form,
) -> ModelInferResponse {
    let halves = |output: &Output| {
        output.region.is_none() && matches!(output.tensor.data, Data::Fp16(_) | Data::Bf16(_))
    };
    let raw = form == Form::Raw || outputs.iter().any(halves);
    let raw_of = |output: &Output| match output.region {
        Some(_) => Bytes::new(),
        None => output.tensor.data.to_raw(),
    };
    let raw_output_contents = if raw { outputs.iter().map(raw_of).collect() } else { Vec::new() };
    let outputs = outputs
        .into_iter()
        .map(|Output { tensor, region }| InferOutputTensor {
            name: tensor.name,
            datatype: tensor.data.datatype().as_str().to_owned(),
            shape: tensor.shape,
            contents: (!raw && region.is_none()).then(|| write_contents(tensor.data)),
            parameters: region.unwrap_or_default(),
        })
        .collect();
    ModelInferResponse {
        model_name: model,
        model_version: version.to_string(),
        id,
        parameters: Default::default(),
        outputs,
        raw_output_contents,
    }
}

/// Builds a request, for clients.
pub fn write_request(
    model: &str,
    version: Option<u64>,
    inputs: Vec<Tensor>,
    form: Form,
) -> ModelInferRequest {
    let raw_input_contents = match form {
        Form::Raw => inputs.iter().map(|tensor| tensor.data.to_raw()).collect(),
        Form::Typed => Vec::new(),
    };
    let inputs = inputs
        .into_iter()
        .map(|tensor| InferInputTensor {
            name: tensor.name,
            datatype: tensor.data.datatype().as_str().to_owned(),
            shape: tensor.shape,
            parameters: Default::default(),
            contents: (form == Form::Typed).then(|| write_contents(tensor.data)),
        })
        .collect();
    ModelInferRequest {
        model_name: model.to_owned(),
        model_version: version.map(|version| version.to_string()).unwrap_or_default(),
        inputs,
        raw_input_contents,
        ..Default::default()
    }
}

/// Reads the outputs of a response, for clients.
///
/// # Errors
/// [`InferError::Invalid`] when the response violates the protocol.
pub fn read_outputs(response: ModelInferResponse) -> Result<Vec<Tensor>, InferError> {
    let as_input = |output: InferOutputTensor| InferInputTensor {
        name: output.name,
        datatype: output.datatype,
        shape: output.shape,
        parameters: Default::default(),
        contents: output.contents,
    };
    let mut mirror = ModelInferRequest {
        inputs: response.outputs.into_iter().map(as_input).collect(),
        raw_input_contents: response.raw_output_contents,
        ..Default::default()
    };
    read_inputs(&mut mirror, |_| Ok(None)).map(|(tensors, _)| tensors)
}

fn write_contents(data: Data) -> InferTensorContents {
    let mut contents = InferTensorContents::default();
    match data {
        Data::Bool(values) => contents.bool_contents = values,
        Data::Int8(values) => contents.int_contents = values.into_iter().map(i32::from).collect(),
        Data::Int16(values) => contents.int_contents = values.into_iter().map(i32::from).collect(),
        Data::Int32(values) => contents.int_contents = values,
        Data::Int64(values) => contents.int64_contents = values,
        Data::Uint8(values) => contents.uint_contents = values.into_iter().map(u32::from).collect(),
        Data::Uint16(values) => contents.uint_contents = values.into_iter().map(u32::from).collect(),
        Data::Uint32(values) => contents.uint_contents = values,
        Data::Uint64(values) => contents.uint64_contents = values,
        Data::Fp32(values) => contents.fp32_contents = values,
        Data::Fp64(values) => contents.fp64_contents = values,
        Data::Bytes(values) => contents.bytes_contents = values,
        // Responses send these raw; a client that asks for typed inputs gets the server's refusal.
        Data::Fp16(_) | Data::Bf16(_) => {}
    }
    contents
}
