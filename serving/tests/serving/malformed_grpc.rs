//! Rows of the malformed-request table that only gRPC can send.

use bytes::Bytes;
use millrace_serving::wire::inference::infer_parameter::ParameterChoice;
use millrace_serving::wire::inference::{InferParameter, InferTensorContents, ModelInferRequest};
use tonic::Code::{self, InvalidArgument, NotFound, Ok};

use crate::malformed::*;

fn grpc(what: &'static str, request: ModelInferRequest, code: Code, says: &'static str) -> Case {
    Case { what, asked: Asked::Grpc(request, code), says }
}

fn fp32() -> InferTensorContents {
    InferTensorContents { fp32_contents: vec![0.0; 4], ..Default::default() }
}

fn halves(datatype: &str) -> ModelInferRequest {
    let mut request = typed(fp32());
    request.inputs[0].datatype = datatype.into();
    request
}

#[rustfmt::skip] // One case, one line, as far as it goes.
pub(crate) fn cases() -> Vec<Case> {
    let none = InferTensorContents::default;
    vec![
        grpc("no model at all", edited(|r| r.model_name.clear()), NotFound, "no model \"\""),
        grpc("an empty message", ModelInferRequest::default(), NotFound, "no model \"\""),
        grpc("one raw entry too many", edited(|r| r.raw_input_contents.push(Bytes::new())), InvalidArgument, "2 entries in raw_input_contents for 1 inputs"),
        grpc("raw entries without inputs", edited(|r| r.inputs.clear()), InvalidArgument, "1 entries in raw_input_contents for 0 inputs"),
        grpc("ten thousand raw entries", edited(|r| r.raw_input_contents = vec![Bytes::new(); 10_000]), InvalidArgument, "10000 entries in raw_input_contents for 1 inputs"),
        grpc("one raw entry for two inputs", edited(|r| r.inputs.push(tensor("more", "FP32", &[1]))), InvalidArgument, "1 entries in raw_input_contents for 2 inputs"),
        grpc("neither raw nor typed", edited(|r| r.raw_input_contents.clear()), InvalidArgument, "0 elements, shape [1, 4] takes 4"),
        grpc("raw and typed", edited(|r| r.inputs[0].contents = Some(fp32())), InvalidArgument, "typed contents beside raw_input_contents"),
        grpc("raw and typed with nothing in it", edited(|r| r.inputs[0].contents = Some(none())), Ok, ""),
        grpc("typed of another datatype", typed(InferTensorContents { int_contents: vec![0; 4], ..none() }), InvalidArgument, "is FP32 and has contents of another datatype"),
        grpc("typed in a wider field", typed(InferTensorContents { fp64_contents: vec![0.0; 4], ..none() }), InvalidArgument, "contents of another datatype"),
        grpc("typed of two datatypes", typed(InferTensorContents { int64_contents: vec![0], ..fp32() }), InvalidArgument, "contents of another datatype"),
        grpc("typed FP16", halves("FP16"), InvalidArgument, "FP16 has no typed contents, send it in raw_input_contents"),
        grpc("typed BF16", halves("BF16"), InvalidArgument, "BF16 has no typed contents, send it in raw_input_contents"),
        grpc("a parameter without a value", edited(|r| {
            r.parameters.insert("sequence_end".into(), InferParameter { parameter_choice: None });
        }), InvalidArgument, "parameter \"sequence_end\" takes a boolean"),
        grpc("classification that is no number", edited(|r| {
            let mut output = requested("logits");
            output.parameters.insert("classification".into(), parameter(ParameterChoice::StringParam("x".into())));
            r.outputs.push(output);
        }), InvalidArgument, "parameter \"classification\" takes an integer, it is a string"),
        grpc("two thousand unknown parameters", edited(|r| {
            r.parameters = (0..2000).map(|n| (format!("p{n}"), parameter(ParameterChoice::BoolParam(true)))).collect();
        }), Ok, ""),
    ]
}
