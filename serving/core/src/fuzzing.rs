//! Entry points of the fuzz targets (`fuzz/`) into the parsers of this crate. Not part of the interface.

use millrace_bundle::Datatype;
use prost::Message as _;

use crate::tensor::{Data, TENSORS_MAX, Tensor, element_count};
use crate::wire::codec::{PREFIX_BYTES, check_tensors, decode, framed};
use crate::wire::inference::ModelInferRequest;
use crate::wire::{Form, read_inputs, write_request};

/// Decodes an inference request as the gRPC server does. Its inputs are the same after a client wrote them.
pub fn infer_request(message: &[u8]) {
    let checked = check_tensors(message);
    let Ok(mut request) = decode::<ModelInferRequest>(message) else { return };
    let tensors = [request.inputs.len(), request.outputs.len(), request.raw_input_contents.len()];
    let within = tensors.into_iter().all(|count| count <= TENSORS_MAX);
    assert!(checked.is_err() || within, "tensors are counted before they are decoded");
    let Ok((inputs, form)) = read_inputs(&mut request, |_| Ok(None)) else { return };
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
        let (prefix, message) = framed.split_at(PREFIX_BYTES);
        assert_eq!(prefix[1..], (message.len() as u32).to_be_bytes());
        let mut again: ModelInferRequest = decode(message).expect("a message that was just written");
        let again = read_inputs(&mut again, |_| Ok(None)).expect("inputs that were just written");
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
