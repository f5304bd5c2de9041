//! Malformed requests over gRPC: each gets its exact status, and the server goes on.

use bytes::Bytes;
use millrace_bundle::Datatype;
use millrace_serving::Limits;
use millrace_serving::client::ClientError;
use millrace_serving::tensor::Data;
use millrace_serving::wire::inference::infer_parameter::ParameterChoice;
use millrace_serving::wire::inference::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use millrace_serving::wire::inference::{InferParameter, InferTensorContents, ModelInferRequest};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tonic::Code;

use crate::support::*;

pub(crate) const MESSAGE_BYTES_MAX: usize = 64 << 10;

/// A server with small models of several datatypes, a corrupt one, and a low limit on messages.
pub(crate) async fn server() -> Server {
    let mut config = config();
    config.limits = Limits { message_bytes_max: MESSAGE_BYTES_MAX, ..Limits::default() };
    let types = [Datatype::Int8, Datatype::Bool, Datatype::Bytes, Datatype::Fp32];
    let mut more: Vec<(String, u64, Vec<u8>)> = Vec::new();
    for datatype in types {
        more.push((format!("echo_{datatype}"), 1, echo(&[datatype])));
    }
    let dir = tempfile::tempdir().unwrap();
    publish(dir.path(), "mlp", 1, mlp()).await;
    for (name, version, onnx) in more {
        publish(dir.path(), &name, version, onnx).await;
    }
    publish(dir.path(), "corrupt", 1, mlp()).await;
    let path = dir.path().join("corrupt/1/model.onnx");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[40] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    Server::over(config, dir).await
}

fn tensor(name: &str, datatype: &str, shape: &[i64]) -> InferInputTensor {
    InferInputTensor {
        name: name.into(),
        datatype: datatype.into(),
        shape: shape.to_vec(),
        ..Default::default()
    }
}

fn good() -> ModelInferRequest {
    ModelInferRequest {
        model_name: "mlp".into(),
        inputs: vec![tensor("input", "FP32", &[1, FEATURES as i64])],
        raw_input_contents: vec![Data::Fp32(vec![0.5; FEATURES]).to_raw()],
        ..Default::default()
    }
}

fn typed(contents: InferTensorContents) -> ModelInferRequest {
    let mut request = good();
    request.raw_input_contents.clear();
    request.inputs[0].contents = Some(contents);
    request
}

fn raw_echo(datatype: &str, shape: &[i64], raw: &[u8]) -> ModelInferRequest {
    ModelInferRequest {
        model_name: format!("echo_{datatype}"),
        inputs: vec![tensor(&format!("in_{datatype}"), datatype, shape)],
        raw_input_contents: vec![Bytes::copy_from_slice(raw)],
        ..Default::default()
    }
}

fn parameter(choice: ParameterChoice) -> InferParameter {
    InferParameter { parameter_choice: Some(choice) }
}

fn edited(edit: impl FnOnce(&mut ModelInferRequest)) -> ModelInferRequest {
    let mut request = good();
    edit(&mut request);
    request
}

#[rustfmt::skip] // One case, one line, as far as it goes.
fn grpc_cases() -> Vec<(&'static str, ModelInferRequest, Code, &'static str)> {
    use Code::{InvalidArgument, NotFound, OutOfRange, Unavailable, Unimplemented};
    let fp32 = |values: Vec<f32>| InferTensorContents { fp32_contents: values, ..Default::default() };
    let requested = |name: &str| InferRequestedOutputTensor { name: name.into(), ..Default::default() };
    vec![
        ("unknown model", edited(|r| r.model_name = "nosuch".into()), NotFound, "no model \"nosuch\""),
        ("empty model", edited(|r| r.model_name.clear()), NotFound, "no model"),
        ("unknown version", edited(|r| r.model_version = "99".into()), NotFound, "no version 99"),
        ("version in letters", edited(|r| r.model_version = "latest".into()), InvalidArgument, "positive integer"),
        ("negative version", edited(|r| r.model_version = "-1".into()), InvalidArgument, "positive integer"),
        ("version 0", edited(|r| r.model_version = "0".into()), InvalidArgument, "positive integer"),
        ("huge version", edited(|r| r.model_version = "99999999999999999999".into()), InvalidArgument, "positive integer"),
        ("corrupt model", edited(|r| r.model_name = "corrupt".into()), Unavailable, "cannot be served"),
        ("no inputs", edited(|r| { r.inputs.clear(); r.raw_input_contents.clear() }), InvalidArgument, "\"input\" is missing"),
        ("wrong input name", edited(|r| r.inputs[0].name = "inputs".into()), InvalidArgument, "no input \"inputs\""),
        ("empty input name", edited(|r| r.inputs[0].name.clear()), InvalidArgument, "no input"),
        ("input twice", edited(|r| {
            r.inputs.push(r.inputs[0].clone());
            r.raw_input_contents.push(r.raw_input_contents[0].clone());
        }), InvalidArgument, "twice"),
        ("one input too many", edited(|r| {
            r.inputs.push(tensor("extra", "FP32", &[1]));
            r.raw_input_contents.push(Bytes::from_static(&[0; 4]));
        }), InvalidArgument, "no input \"extra\""),
        ("too many inputs", edited(|r| {
            r.inputs = vec![tensor("x", "FP32", &[0]); 2000];
        }), InvalidArgument, "limit is 1024"),
        ("unknown datatype", edited(|r| r.inputs[0].datatype = "FP31".into()), InvalidArgument, "not a datatype"),
        ("datatype in small letters", edited(|r| r.inputs[0].datatype = "fp32".into()), InvalidArgument, "not a datatype"),
        ("no datatype", edited(|r| r.inputs[0].datatype.clear()), InvalidArgument, "not a datatype"),
        ("another datatype", edited(|r| r.inputs[0].datatype = "INT32".into()), InvalidArgument, "takes FP32"),
        ("rank too low", edited(|r| r.inputs[0].shape = vec![4]), InvalidArgument, "[-1, 4]"),
        ("rank too high", edited(|r| r.inputs[0].shape = vec![1, 1, 4]), InvalidArgument, "[-1, 4]"),
        ("wrong extent", edited(|r| r.inputs[0].shape = vec![2, 2]), InvalidArgument, "[-1, 4]"),
        ("no rows", edited(|r| {
            r.inputs[0].shape = vec![0, 4];
            r.raw_input_contents[0] = Bytes::new();
        }), InvalidArgument, "from 1 on"),
        ("negative extent", edited(|r| r.inputs[0].shape = vec![-1, 4]), InvalidArgument, "negative"),
        ("overflowing shape", edited(|r| r.inputs[0].shape = vec![i64::MAX, 4]), InvalidArgument, "too large"),
        ("huge shape", edited(|r| r.inputs[0].shape = vec![1 << 40, 4]), InvalidArgument, "bytes of raw data"),
        ("raw too short", edited(|r| r.raw_input_contents[0] = Bytes::from_static(&[0; 15])), InvalidArgument, "15 bytes"),
        ("raw too long", edited(|r| r.raw_input_contents[0] = Bytes::from_static(&[0; 17])), InvalidArgument, "17 bytes"),
        ("raw empty", edited(|r| r.raw_input_contents[0] = Bytes::new()), InvalidArgument, "0 bytes"),
        ("one raw entry too many", edited(|r| r.raw_input_contents.push(Bytes::new())), InvalidArgument, "2 entries"),
        ("neither raw nor typed", edited(|r| r.raw_input_contents.clear()), InvalidArgument, "0 elements"),
        ("raw and typed", edited(|r| r.inputs[0].contents = Some(fp32(vec![0.0; 4]))), InvalidArgument, "typed contents"),
        ("typed too short", typed(fp32(vec![0.0; 3])), InvalidArgument, "3 elements"),
        ("typed too long", typed(fp32(vec![0.0; 5])), InvalidArgument, "5 elements"),
        ("typed of another datatype", typed(InferTensorContents {
            int_contents: vec![0; 4],
            ..Default::default()
        }), InvalidArgument, "another datatype"),
        ("typed of two datatypes", typed(InferTensorContents {
            int64_contents: vec![0],
            ..fp32(vec![0.0; 4])
        }), InvalidArgument, "another datatype"),
        ("typed FP16", {
            let mut request = typed(fp32(vec![0.0; 4]));
            request.inputs[0].datatype = "FP16".into();
            request
        }, InvalidArgument, "raw_input_contents"),
        ("typed INT8 out of range", ModelInferRequest {
            model_name: "echo_INT8".into(),
            inputs: vec![InferInputTensor {
                contents: Some(InferTensorContents { int_contents: vec![128], ..Default::default() }),
                ..tensor("in_INT8", "INT8", &[1])
            }],
            ..Default::default()
        }, InvalidArgument, "128 does not fit"),
        ("BOOL of 2", raw_echo("BOOL", &[1], &[2]), InvalidArgument, "neither 0 nor 1"),
        ("BYTES cut off", raw_echo("BYTES", &[1], &[5, 0, 0, 0, b'a']), InvalidArgument, "cut off"),
        ("BYTES of huge length", raw_echo("BYTES", &[1], &[255, 255, 255, 255]), InvalidArgument, "cut off"),
        ("BYTES too many", raw_echo("BYTES", &[1], &[0; 8]), InvalidArgument, "more than 1"),
        ("BYTES too few", raw_echo("BYTES", &[3], &[8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), InvalidArgument, "the shape takes 3"),
        ("BYTES that cannot fit", raw_echo("BYTES", &[1 << 40], &[0; 8]), InvalidArgument, "cannot hold"),
        ("BYTES that are not text", raw_echo("BYTES", &[1], &[1, 0, 0, 0, 255]), InvalidArgument, "not UTF-8"),
        ("BYTES with NUL", raw_echo("BYTES", &[1], &[1, 0, 0, 0, 0]), InvalidArgument, "NUL"),
        ("unknown output", edited(|r| r.outputs.push(requested("probabilities"))), InvalidArgument, "no output \"probabilities\""),
        ("output twice", edited(|r| r.outputs = vec![requested("logits"), requested("logits")]), InvalidArgument, "twice"),
        ("classification", edited(|r| {
            let mut output = requested("logits");
            output.parameters.insert("classification".into(), parameter(ParameterChoice::Int64Param(3)));
            r.outputs.push(output);
        }), Unimplemented, "classification"),
        ("input in shared memory", edited(|r| {
            let region = parameter(ParameterChoice::StringParam("r".into()));
            r.inputs[0].parameters.insert("shared_memory_region".into(), region);
        }), Unimplemented, "shared memory"),
        ("output in shared memory", edited(|r| {
            let mut output = requested("logits");
            let region = parameter(ParameterChoice::StringParam("r".into()));
            output.parameters.insert("shared_memory_region".into(), region);
            r.outputs.push(output);
        }), Unimplemented, "shared_memory_region"),
        ("a sequence", edited(|r| {
            r.parameters.insert("sequence_id".into(), parameter(ParameterChoice::Int64Param(1)));
        }), Unimplemented, "sequence_id"),
        ("message too large", edited(|r| {
            r.raw_input_contents[0] = vec![0; MESSAGE_BYTES_MAX].into();
        }), OutOfRange, "too large"),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grpc_refuses_each_with_its_status() {
    if !have_runtime() {
        return;
    }
    let server = server().await;
    let mut client = server.client().await;
    for (what, request, expected, reason) in grpc_cases() {
        match client.infer_message(request).await {
            Err(ClientError::Refused { code, message }) => {
                assert_eq!(code, expected, "{what}: {message}");
                assert!(message.contains(reason), "{what}: {reason:?} is not in {message:?}");
                assert!(!message.contains('\n'), "{what}: {message}");
            }
            other => panic!("{what}: {other:?}"),
        }
    }
    for (model, version, expected) in
        [("nosuch", "", Code::NotFound), ("mlp", "9", Code::NotFound), ("mlp", "x", Code::InvalidArgument)]
    {
        match client.model_metadata(model, version).await {
            Err(ClientError::Refused { code, .. }) => assert_eq!(code, expected),
            other => panic!("{other:?}"),
        }
    }
    client.infer_message(good()).await.unwrap();
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_on_the_ports_harms_nobody() {
    if !have_runtime() {
        return;
    }
    let server = server().await;
    let addresses = server.serving.addresses();
    for address in [addresses.grpc, addresses.http, addresses.metrics] {
        for garbage in [
            &b"\x00\x01\x02\x03garbage\r\n\r\n"[..],
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        ] {
            let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
            stream.write_all(garbage).await.unwrap();
            stream.shutdown().await.unwrap();
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer).await;
        }
    }
    server.client().await.infer_message(good()).await.unwrap();
    assert_eq!(server.http("GET", "/v2/health/live", &[], b"").await.status, 200);
    server.stop().await;
}
