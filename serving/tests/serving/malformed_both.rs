//! Rows of the malformed-request table for both gRPC and REST.

use bytes::Bytes;
use millrace_serving::wire::inference::infer_parameter::ParameterChoice;
use millrace_serving::wire::inference::model_infer_request::InferInputTensor;
use millrace_serving::wire::inference::{InferTensorContents, ModelInferRequest};
use tonic::Code::{InvalidArgument, NotFound, Ok, ResourceExhausted, Unavailable};

use crate::malformed::*;

fn named(model: &str) -> ModelInferRequest {
    edited(|request| request.model_name = model.into())
}

fn version(version: &str) -> ModelInferRequest {
    edited(|request| request.model_version = version.into())
}

fn shape(shape: &[i64]) -> ModelInferRequest {
    edited(|request| request.inputs[0].shape = shape.to_vec())
}

fn datatype(datatype: &str) -> ModelInferRequest {
    edited(|request| request.inputs[0].datatype = datatype.into())
}

fn raw(bytes: &'static [u8]) -> ModelInferRequest {
    edited(|request| request.raw_input_contents[0] = Bytes::from_static(bytes))
}

fn outputs(names: &[&str]) -> ModelInferRequest {
    edited(|request| request.outputs = names.iter().map(|name| requested(name)).collect())
}

fn fp32(values: &[f32]) -> ModelInferRequest {
    typed(InferTensorContents { fp32_contents: values.to_vec(), ..Default::default() })
}

/// INT8 and FP32 of these shapes, with the bytes of two elements each.
fn pair(names: &[(&str, &str, i64)]) -> ModelInferRequest {
    ModelInferRequest {
        model_name: "echo_pair".into(),
        inputs: names.iter().map(|(name, datatype, rows)| tensor(name, datatype, &[*rows])).collect(),
        raw_input_contents: names
            .iter()
            .map(|(_, datatype, _)| Bytes::from(vec![0; if *datatype == "FP32" { 8 } else { 2 }]))
            .collect(),
        ..Default::default()
    }
}

fn int8(value: i32) -> ModelInferRequest {
    let contents = Some(InferTensorContents { int_contents: vec![value], ..Default::default() });
    ModelInferRequest {
        model_name: "echo_INT8".into(),
        inputs: vec![InferInputTensor { contents, ..tensor("in_INT8", "INT8", &[1]) }],
        ..Default::default()
    }
}

fn with_parameter(name: &str, choice: ParameterChoice) -> ModelInferRequest {
    edited(|request| drop(request.parameters.insert(name.into(), parameter(choice))))
}

fn of_input(name: &str, choice: ParameterChoice) -> ModelInferRequest {
    edited(|request| drop(request.inputs[0].parameters.insert(name.into(), parameter(choice))))
}

fn of_output(name: &str, choice: ParameterChoice) -> ModelInferRequest {
    edited(|request| {
        let mut output = requested("logits");
        output.parameters.insert(name.into(), parameter(choice));
        request.outputs.push(output);
    })
}

#[rustfmt::skip] // One case, one line, as far as it goes.
pub(crate) fn cases() -> Vec<Case> {
    let text = |value: &str| ParameterChoice::StringParam(value.into());
    vec![
        // Valid, though unusual.
        both("nothing wrong", good(), Ok, 200, "logits"),
        both("the version by its number", version("1"), Ok, 200, "logits"),
        both("an output by its name", outputs(&["logits"]), Ok, 200, "logits"),
        both("an id of a thousand letters", edited(|r| r.id = "é".repeat(1000)), Ok, 200, "logits"),
        both("a parameter that nobody knows", with_parameter("mood", text("good")), Ok, 200, "logits"),
        both("a priority", with_parameter("priority", ParameterChoice::Uint64Param(u64::MAX)), Ok, 200, "logits"),
        both("a patient request", with_parameter("timeout", ParameterChoice::Uint64Param(u64::MAX)), Ok, 200, "logits"),
        both("inputs in another order", pair(&[("in_FP32", "FP32", 2), ("in_INT8", "INT8", 2)]), Ok, 200, "out_INT8"),

        // Scheduling.
        both("a priority in letters", with_parameter("priority", text("1")), InvalidArgument, 400, "\"priority\" takes an integer, it is a string"),
        both("a negative priority", with_parameter("priority", ParameterChoice::Int64Param(-1)), InvalidArgument, 400, "\"priority\" takes an integer from 0"),
        both("a timeout in letters", with_parameter("timeout", text("5s")), InvalidArgument, 400, "\"timeout\" takes an integer, it is a string"),
        both("a negative timeout", with_parameter("timeout", ParameterChoice::Int64Param(i64::MIN)), InvalidArgument, 400, "\"timeout\" takes an integer from 0"),
        both("a timeout that is a flag", with_parameter("timeout", ParameterChoice::BoolParam(true)), InvalidArgument, 400, "\"timeout\" takes an integer, it is a boolean"),
        both("a timeout in parts", with_parameter("timeout", ParameterChoice::DoubleParam(0.5)), InvalidArgument, 400, "\"timeout\" takes an integer"),

        // Models and versions.
        both("unknown model", named("nosuch"), NotFound, 404, "no model \"nosuch\""),
        both("model upwards", named("../mlp"), NotFound, 404, "no model \"../mlp\""),
        both("model with a slash", named("mlp/1"), NotFound, 404, "no model \"mlp/1\""),
        both("model of a blank", named(" "), NotFound, 404, "no model \" \""),
        both("model in capitals", named("MLP"), NotFound, 404, "no model \"MLP\""),
        both("model with a line break", named("ml\np"), NotFound, 404, r#"no model "ml\np""#),
        both("model with NUL", named("mlp\0"), NotFound, 404, r#"no model "mlp\0""#),
        both("model of ten thousand letters", named(&"m".repeat(10_000)), NotFound, 404, "mmm…"),
        both("model of signs beyond ASCII", named(&"模".repeat(300)), NotFound, 404, "模…"),
        both("corrupt model", named("corrupt"), Unavailable, 503, "cannot be served"),
        both("unknown version", version("99"), NotFound, 404, "no version 99"),
        both("largest version", version("18446744073709551615"), NotFound, 404, "no version 18446744073709551615"),
        both("version beyond 64 bits", version("18446744073709551616"), InvalidArgument, 400, "positive integer"),
        both("version 0", version("0"), InvalidArgument, 400, "positive integer"),
        both("negative version", version("-1"), InvalidArgument, 400, "positive integer"),
        both("version with a sign", version("+1"), InvalidArgument, 400, "positive integer"),
        both("version with a zero before", version("01"), InvalidArgument, 400, "positive integer"),
        both("version with a blank", version(" 1"), InvalidArgument, 400, "positive integer"),
        both("version with a fraction", version("1.0"), InvalidArgument, 400, "positive integer"),
        both("version in letters", version("latest"), InvalidArgument, 400, "\"latest\" is not a positive integer"),
        both("version in wide digits", version("１"), InvalidArgument, 400, "positive integer"),
        both("version of ten thousand digits", version(&"1".repeat(10_000)), InvalidArgument, 400, "positive integer"),

        // Names of inputs.
        both("no inputs", edited(|r| { r.inputs.clear(); r.raw_input_contents.clear() }), InvalidArgument, 400, "\"input\" is missing"),
        both("wrong input name", edited(|r| r.inputs[0].name = "inputs".into()), InvalidArgument, 400, "no input \"inputs\", its inputs are [\"input\"]"),
        both("empty input name", edited(|r| r.inputs[0].name.clear()), InvalidArgument, 400, "no input \"\""),
        both("input name of ten thousand letters", edited(|r| r.inputs[0].name = "i".repeat(10_000)), InvalidArgument, 400, "iii…"),
        both("input twice", edited(|r| {
            r.inputs.push(r.inputs[0].clone());
            r.raw_input_contents.push(r.raw_input_contents[0].clone());
        }), InvalidArgument, 400, "\"input\" appears twice"),
        both("one input too many", edited(|r| {
            r.inputs.push(tensor("extra", "FP32", &[1]));
            r.raw_input_contents.push(Bytes::from_static(&[0; 4]));
        }), InvalidArgument, 400, "no input \"extra\""),
        both("one of two inputs", pair(&[("in_INT8", "INT8", 2)]), InvalidArgument, 400, "\"in_FP32\" is missing"),
        both("the same of two inputs twice", pair(&[("in_INT8", "INT8", 2), ("in_INT8", "INT8", 2)]), InvalidArgument, 400, "\"in_INT8\" appears twice"),
        both("two inputs under each other's names", pair(&[("in_FP32", "INT8", 2), ("in_INT8", "FP32", 2)]), InvalidArgument, 400, "\"in_FP32\" is INT8, the model takes FP32"),
        both("too many inputs", edited(|r| {
            r.inputs = vec![tensor("x", "FP32", &[0]); 1025];
            r.raw_input_contents.clear();
        }), InvalidArgument, 400, "1025 inputs, the limit is 1024"),

        // Datatypes.
        both("unknown datatype", datatype("FP31"), InvalidArgument, 400, "\"FP31\" is not a datatype"),
        both("datatype in small letters", datatype("fp32"), InvalidArgument, 400, "\"fp32\" is not a datatype"),
        both("datatype of the configuration", datatype("TYPE_FP32"), InvalidArgument, 400, "\"TYPE_FP32\" is not a datatype"),
        both("no datatype", datatype(""), InvalidArgument, 400, "\"\" is not a datatype"),
        both("datatype of ten thousand letters", datatype(&"F".repeat(10_000)), InvalidArgument, 400, "is not a datatype"),
        both("another datatype of the same width", datatype("INT32"), InvalidArgument, 400, "is INT32, the model takes FP32"),
        both("another datatype of another width", datatype("FP64"), InvalidArgument, 400, "shape [1, 4] of FP64 takes 32"),

        // Shapes.
        both("no extents", shape(&[]), InvalidArgument, 400, "shape [] of FP32 takes 4"),
        both("rank too low", shape(&[4]), InvalidArgument, 400, "has shape [4], the model takes [-1, 4]"),
        both("rank too high", shape(&[1, 1, 4]), InvalidArgument, 400, "has shape [1, 1, 4], the model takes [-1, 4]"),
        both("five thousand extents", shape(&[1; 5000]), InvalidArgument, 400, "and 4984 more extents of FP32 takes 4"),
        both("wrong extent", shape(&[2, 2]), InvalidArgument, 400, "has shape [2, 2], the model takes [-1, 4]"),
        both("extents turned round", shape(&[4, 1]), InvalidArgument, 400, "has shape [4, 1], the model takes [-1, 4]"),
        both("no rows", edited(|r| { r.inputs[0].shape = vec![0, 4]; r.raw_input_contents[0] = Bytes::new() }), Ok, 200, "logits"),
        both("no columns", edited(|r| { r.inputs[0].shape = vec![1, 0]; r.raw_input_contents[0] = Bytes::new() }), InvalidArgument, 400, "has shape [1, 0]"),
        both("rows that are not there", shape(&[2, 4]), InvalidArgument, 400, "16 bytes of raw data, shape [2, 4] of FP32 takes 32"),
        both("nothing times too much", edited(|r| { r.inputs[0].shape = vec![0, i64::MAX, i64::MAX]; r.raw_input_contents[0] = Bytes::new() }), InvalidArgument, 400, "the model takes [-1, 4]"),
        both("the model's own shape", shape(&[-1, 4]), InvalidArgument, 400, "[-1, 4] is negative"),
        both("two negative extents", shape(&[-1, -4]), InvalidArgument, 400, "[-1, -4] is negative"),
        both("least extent", shape(&[i64::MIN, 4]), InvalidArgument, 400, "is negative"),
        both("overflowing shape", shape(&[i64::MAX, 4]), InvalidArgument, 400, "too large"),
        both("shape that overflows to the right size", shape(&[1 << 62, 4, 4]), InvalidArgument, 400, "too large"),
        both("bytes that overflow", shape(&[1 << 61, 2]), InvalidArgument, 400, "bytes of raw data"),
        both("huge shape", shape(&[1 << 40, 4]), InvalidArgument, 400, "bytes of raw data"),

        // Raw data.
        both("raw too short", raw(&[0; 15]), InvalidArgument, 400, "15 bytes of raw data, shape [1, 4] of FP32 takes 16"),
        both("raw too long", raw(&[0; 17]), InvalidArgument, 400, "17 bytes of raw data, shape [1, 4] of FP32 takes 16"),
        both("raw empty", raw(&[]), InvalidArgument, 400, "0 bytes of raw data"),
        both("BOOL of 2", raw_echo("BOOL", &[1], &[2]), InvalidArgument, 400, "neither 0 nor 1"),
        both("BYTES of nothing", raw_echo("BYTES", &[1], &[]), InvalidArgument, 400, "cannot hold 1"),
        both("BYTES with half a length", raw_echo("BYTES", &[1], &[5, 0, 0]), InvalidArgument, 400, "cannot hold 1"),
        both("BYTES with half a second length", raw_echo("BYTES", &[2], &[1, 0, 0, 0, b'a', 1, 0, 0]), InvalidArgument, 400, "element 1 is cut off: its length takes 4 bytes, but 3 are left"),
        both("BYTES cut off", raw_echo("BYTES", &[1], &[5, 0, 0, 0, b'a']), InvalidArgument, 400, "element 0 is cut off: its length says 5 bytes, but 1 are left"),
        both("BYTES of huge length", raw_echo("BYTES", &[1], &[255, 255, 255, 255]), InvalidArgument, 400, "length says 4294967295 bytes, but 0 are left"),
        both("BYTES too many", raw_echo("BYTES", &[1], &[0; 8]), InvalidArgument, 400, "more than 1 BYTES elements, 4 bytes"),
        both("BYTES for no element", raw_echo("BYTES", &[0], &[0; 4]), InvalidArgument, 400, "more than 0"),
        both("BYTES too few", raw_echo("BYTES", &[3], &[8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), InvalidArgument, 400, "1 BYTES elements, the shape takes 3"),
        both("BYTES that cannot fit", raw_echo("BYTES", &[1 << 40], &[0; 8]), InvalidArgument, 400, "cannot hold 1099511627776"),
        both("BYTES that are not text", raw_echo("BYTES", &[1], &[1, 0, 0, 0, 255]), Ok, 406, "bytes that are not UTF-8"),
        both("BYTES with NUL", raw_echo("BYTES", &[1], &[1, 0, 0, 0, 0]), Ok, 200, "out_BYTES"),
        both("message too large", edited(|r| r.raw_input_contents[0] = vec![0; MESSAGE_BYTES_MAX].into()), ResourceExhausted, 413, "the limit is 65536 (limits.message_bytes_max)"),

        // Typed data.
        both("typed too short", fp32(&[0.0; 3]), InvalidArgument, 400, "3 elements, shape [1, 4] takes 4"),
        both("typed too long", fp32(&[0.0; 5]), InvalidArgument, 400, "5 elements, shape [1, 4] takes 4"),
        both("typed with nothing in it", fp32(&[]), InvalidArgument, 400, "0 elements, shape [1, 4] takes 4"),
        both("typed INT8 that fits", int8(-128), Ok, 200, "-128"),
        both("typed INT8 too large", int8(128), InvalidArgument, 400, "128 does not fit INT8"),
        both("typed INT8 too small", int8(-129), InvalidArgument, 400, "-129 does not fit INT8"),

        // Outputs and parameters.
        both("unknown output", outputs(&["probabilities"]), InvalidArgument, 400, "no output \"probabilities\", its outputs are [\"logits\"]"),
        both("empty output name", outputs(&[""]), InvalidArgument, 400, "no output \"\""),
        both("output twice", outputs(&["logits", "logits"]), InvalidArgument, 400, "\"logits\" is requested twice"),
        both("too many outputs", outputs(&["logits"; 1025]), InvalidArgument, 400, "1025 outputs, the limit is 1024"),
        both("classification", of_output("classification", ParameterChoice::Int64Param(3)), Ok, 200, ":2"),
        both("classification into no classes", of_output("classification", ParameterChoice::Int64Param(0)), InvalidArgument, 400, "\"classification\""),
        both("a custom parameter of an input", of_input("mine", text("r")), Ok, 200, "logits"),
        both("output in shared memory without a size", of_output("shared_memory_region", text("r")), InvalidArgument, 400, "shared_memory_region needs shared_memory_byte_size"),
        both("a sequence", with_parameter("sequence_id", ParameterChoice::Int64Param(1)), Ok, 200, "logits"),
        both("a sequence below 0", with_parameter("sequence_id", ParameterChoice::Int64Param(-1)), InvalidArgument, 400, "takes an integer from 0"),
        both("the start of a sequence", with_parameter("sequence_start", ParameterChoice::BoolParam(true)), Ok, 200, "logits"),
    ]
}
