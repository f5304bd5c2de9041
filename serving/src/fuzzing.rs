//! Entry points of the fuzz targets (`fuzz/`) into the parsers of this crate. Not part of the interface.

use millrace_bundle::onnx::ModelProto;
use millrace_bundle::{Datatype, Signature, TensorSpec};
use prost::Message as _;
use prost_reflect::DynamicMessage;

use crate::codec::{check_tensors, decode, framed};
use crate::hazards::{self, Divisors};
use crate::infer::TENSORS_MAX;
use crate::model_config;
use crate::pbtxt;
use crate::rows;
use crate::shared_memory::Inputs;
use crate::tensor::{Data, Tensor, element_count};
use crate::wire::inference::ModelInferRequest;
use crate::wire::{Form, read_inputs, write_request};

pub use crate::rest::fuzzing::body;

/// Parses a `config.pbtxt`; a printed configuration is read as what it was.
pub fn config_pbtxt(content: &[u8]) {
    let Ok(parsed) = pbtxt::parse(content) else { return };
    let _ = model_config::to_json(&parsed.config);
    let mut message = DynamicMessage::new(pbtxt::schema().expect("the schema of this build"));
    message.transcode_from(&parsed.config).expect("the schema of this build");
    let text = message.to_text_format();
    let again = pbtxt::parse(text.as_bytes()).map(|parsed| parsed.config);
    assert!(again.as_ref() == Ok(&parsed.config) || text.contains("nan"), "{again:?} is {text}");
}

/// Decodes an inference request as the gRPC server does. Its inputs are the same after a client wrote them.
pub fn infer_request(message: &[u8]) {
    let checked = check_tensors(message);
    let Ok(mut request) = decode::<ModelInferRequest>(message) else { return };
    let tensors = [request.inputs.len(), request.outputs.len(), request.raw_input_contents.len()];
    let within = tensors.into_iter().all(|count| count <= TENSORS_MAX);
    assert!(checked.is_err() || within, "tensors are counted before they are decoded");
    let Ok((inputs, form)) = read_inputs(&mut request, Inputs::none()) else { return };
    for input in &inputs {
        let count = element_count(&input.name, &input.shape);
        assert_eq!(count.ok(), Some(input.data.len()), "input {:?} fits its shape", input.name);
    }
    let halves = |tensor: &Tensor| matches!(tensor.data.datatype(), Datatype::Fp16 | Datatype::Bf16);
    for form in [form, Form::Raw, Form::Typed] {
        if form == Form::Typed && inputs.iter().any(halves) || inputs.is_empty() {
            continue;
        }
        let framed = framed(&write_request("model", None, inputs.clone(), form)).expect("a short message");
        let (prefix, message) = framed.split_at(crate::codec::PREFIX_BYTES);
        assert_eq!(prefix[1..], (message.len() as u32).to_be_bytes());
        let mut again: ModelInferRequest = decode(message).expect("a message that was just written");
        let again = read_inputs(&mut again, Inputs::none()).expect("inputs that were just written");
        let raw = |tensor: &Tensor| (tensor.name.clone(), tensor.shape.clone(), tensor.data.to_raw());
        assert!(again.0.iter().map(raw).eq(inputs.iter().map(raw)), "{form:?}");
    }
}

/// Requests with typed and with raw contents, for seeds.
pub fn infer_requests() -> Vec<Vec<u8>> {
    let numbers = Tensor { name: "x".into(), shape: vec![2, 1], data: Data::Fp32(vec![0.5, -1.0]) };
    let texts = Tensor { name: "t".into(), shape: vec![1], data: Data::Bytes(vec!["text".into()]) };
    let small = Tensor { name: "i".into(), shape: vec![1, 1], data: Data::Int8(vec![-7]) };
    let request = |form| {
        let inputs = vec![numbers.clone(), texts.clone(), small.clone()];
        write_request("model", Some(3), inputs, form).encode_to_vec()
    };
    vec![request(Form::Raw), request(Form::Typed)]
}

/// Analyses a graph as the loader does.
pub fn graph(model: &ModelProto) {
    let shown = hazards::check(model, Divisors::Shown);
    let trusted = hazards::check(model, Divisors::Trusted);
    assert!(shown.is_err() || trusted.is_ok(), "trust allows no less: {trusted:?}");
    assert_eq!(hazards::check(model, Divisors::Shown), shown, "the same graph gets the same answer");
    if hazards::allows_empty_inputs(model) {
        assert_eq!(shown, Ok(()), "a graph that is safe with empty inputs is safe without");
    }
    let Some(graph) = &model.graph else { return };
    let spec =
        |name: &str| TensorSpec { name: name.to_owned(), datatype: Datatype::Fp32, shape: vec![-1, 4] };
    let inputs = graph.input.iter().map(|value| spec(value.name())).collect();
    let outputs = graph.output.iter().map(|value| spec(value.name())).collect();
    let signature = Signature { inputs, outputs };
    let proof = rows::prove(model, &signature);
    assert_eq!(rows::prove(model, &signature), proof, "the same graph gets the same answer");
    if proof.is_ok() {
        let made = |name: &str| {
            let of_node = graph.node.iter().any(|node| node.output.iter().any(|output| output == name));
            of_node || graph.input.iter().any(|input| input.name() == name)
        };
        assert!(signature.outputs.iter().all(|spec| made(&spec.name)), "each output is made of rows");
    }
}
