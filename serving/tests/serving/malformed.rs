//! Table of malformed and edge requests, each with its exact status over gRPC and REST. The rows are in
//! `malformed_both.rs`, `malformed_grpc.rs` and `malformed_rest.rs`.

use bytes::Bytes;
use millrace_bundle::Datatype;
use millrace_serving::Limits;
use millrace_serving::client::{Client, ClientError};
use millrace_serving::tensor::Data;
use millrace_serving::wire::inference::infer_parameter::ParameterChoice;
use millrace_serving::wire::inference::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use millrace_serving::wire::inference::{InferParameter, InferTensorContents, ModelInferRequest};
use serde_json::{Map, Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tonic::Code;

use crate::support::*;

pub(crate) const MESSAGE_BYTES_MAX: usize = 64 << 10;

/// A server with small models of several datatypes, a corrupt one, and a low message limit.
pub(crate) async fn server() -> Server {
    let mut config = config();
    config.limits = Limits { message_bytes_max: MESSAGE_BYTES_MAX, ..Limits::default() };
    let dir = tempfile::tempdir().unwrap();
    publish(dir.path(), "mlp", 1, mlp()).await;
    for datatype in [Datatype::Int8, Datatype::Bool, Datatype::Bytes, Datatype::Fp32, Datatype::Uint64] {
        publish(dir.path(), &format!("echo_{datatype}"), 1, echo(&[datatype])).await;
    }
    publish(dir.path(), "echo_pair", 1, echo(&[Datatype::Int8, Datatype::Fp32])).await;
    publish(dir.path(), "corrupt", 1, mlp()).await;
    let path = dir.path().join("corrupt/1/model.onnx");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[40] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    Server::over(config, dir).await
}

/// One row of the table.
pub(crate) struct Case {
    pub(crate) what: &'static str,
    pub(crate) asked: Asked,
    /// A part of the answer: of the reason or, for a success status, of the response.
    pub(crate) says: &'static str,
}

/// A request and its expected status.
pub(crate) enum Asked {
    Grpc(ModelInferRequest, Code),
    Rest(Ask, u16),
    /// The same request over both.
    Both(ModelInferRequest, Code, u16),
}

/// A request over HTTP.
#[derive(Clone)]
pub(crate) struct Ask {
    pub(crate) method: &'static str,
    pub(crate) path: String,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) body: Vec<u8>,
}

pub(crate) fn both(
    what: &'static str,
    request: ModelInferRequest,
    code: Code,
    status: u16,
    says: &'static str,
) -> Case {
    Case { what, asked: Asked::Both(request, code, status), says }
}

pub(crate) fn tensor(name: &str, datatype: &str, shape: &[i64]) -> InferInputTensor {
    InferInputTensor {
        name: name.into(),
        datatype: datatype.into(),
        shape: shape.to_vec(),
        ..Default::default()
    }
}

pub(crate) fn requested(name: &str) -> InferRequestedOutputTensor {
    InferRequestedOutputTensor { name: name.into(), ..Default::default() }
}

pub(crate) fn good() -> ModelInferRequest {
    ModelInferRequest {
        model_name: "mlp".into(),
        inputs: vec![tensor("input", "FP32", &[1, FEATURES as i64])],
        raw_input_contents: vec![Data::Fp32(vec![0.5; FEATURES]).to_raw()],
        ..Default::default()
    }
}

pub(crate) fn edited(edit: impl FnOnce(&mut ModelInferRequest)) -> ModelInferRequest {
    let mut request = good();
    edit(&mut request);
    request
}

pub(crate) fn typed(contents: InferTensorContents) -> ModelInferRequest {
    let mut request = good();
    request.raw_input_contents.clear();
    request.inputs[0].contents = Some(contents);
    request
}

pub(crate) fn raw_echo(datatype: &str, shape: &[i64], raw: &[u8]) -> ModelInferRequest {
    ModelInferRequest {
        model_name: format!("echo_{datatype}"),
        inputs: vec![tensor(&format!("in_{datatype}"), datatype, shape)],
        raw_input_contents: vec![Bytes::copy_from_slice(raw)],
        ..Default::default()
    }
}

pub(crate) fn parameter(choice: ParameterChoice) -> InferParameter {
    InferParameter { parameter_choice: Some(choice) }
}

fn escaped(segment: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    segment
        .bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

fn parameters(parameters: &std::collections::HashMap<String, InferParameter>) -> Map<String, Value> {
    let value = |parameter: &InferParameter| match parameter.parameter_choice.as_ref().unwrap() {
        ParameterChoice::BoolParam(value) => json!(value),
        ParameterChoice::Int64Param(value) => json!(value),
        ParameterChoice::StringParam(value) => json!(value),
        ParameterChoice::DoubleParam(value) => json!(value),
        ParameterChoice::Uint64Param(value) => json!(value),
    };
    parameters.iter().map(|(name, parameter)| (name.clone(), value(parameter))).collect()
}

/// The REST form of a gRPC request: raw contents as binary data, typed ones as JSON.
pub(crate) fn as_rest(request: &ModelInferRequest) -> Ask {
    let mut path = format!("/v2/models/{}", escaped(&request.model_name));
    if !request.model_version.is_empty() {
        path.push_str(&format!("/versions/{}", escaped(&request.model_version)));
    }
    path.push_str("/infer");
    let mut inputs = Vec::new();
    for (index, input) in request.inputs.iter().enumerate() {
        let mut json = json!({ "name": input.name, "shape": input.shape, "datatype": input.datatype });
        let mut parameters = parameters(&input.parameters);
        if let Some(raw) = request.raw_input_contents.get(index) {
            parameters.insert("binary_data_size".into(), json!(raw.len()));
        }
        json["parameters"] = Value::Object(parameters);
        if let Some(contents) = &input.contents {
            json["data"] = match input.datatype.as_str() {
                "FP32" => json!(contents.fp32_contents),
                _ => json!(contents.int_contents),
            };
        }
        inputs.push(json);
    }
    let outputs: Vec<Value> = request
        .outputs
        .iter()
        .map(|output| json!({ "name": output.name, "parameters": parameters(&output.parameters) }))
        .collect();
    let json = json!({
        "id": request.id, "parameters": parameters(&request.parameters),
        "inputs": inputs, "outputs": outputs,
    })
    .to_string();
    let headers = vec![("inference-header-content-length", json.len().to_string())];
    let body = [json.as_bytes(), &request.raw_input_contents.concat()].concat();
    Ask { method: "POST", path, headers, body }
}

pub(crate) async fn ask(server: &Server, ask: &Ask) -> Reply {
    let headers: Vec<(&str, &str)> =
        ask.headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
    server.http(ask.method, &ask.path, &headers, &ask.body).await
}

/// Checks every reason: it is one line of bounded length.
fn check_reason(says: &str, reason: &str) -> Result<(), String> {
    if !reason.contains(says) {
        return Err(format!("{says:?} is not in {reason:?}"));
    }
    match reason.contains('\n') || reason.len() > 1500 {
        true => Err(format!("the reason is no line: {reason:?}")),
        false => Ok(()),
    }
}

async fn check_grpc(
    client: &mut Client,
    case: &Case,
    request: &ModelInferRequest,
    code: Code,
) -> Result<(), String> {
    match client.infer_message(request.clone()).await {
        Ok(_) if code == Code::Ok => Ok(()),
        Err(ClientError::Refused { code: found, message }) if found == code => {
            check_reason(case.says, &message)
        }
        other => Err(format!("{code:?} is expected, it is {other:?}")),
    }
}

async fn check_rest(server: &Server, case: &Case, asked: &Ask, status: u16) -> Result<(), String> {
    let reply = ask(server, asked).await;
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    match (reply.status == status, status) {
        (false, _) => Err(format!("{status} is expected, it is {}: {text}", reply.status)),
        (true, 200) if text.contains(case.says) => Ok(()),
        (true, 200) => Err(format!("{:?} is not in {text}", case.says)),
        (true, _) => check_reason(case.says, reply.json()["error"].as_str().unwrap()),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_requests_get_their_status_over_grpc_and_rest() {
    let server = server().await;
    let mut client = server.client().await;
    let mut cases = crate::malformed_both::cases();
    cases.extend(crate::malformed_grpc::cases());
    cases.extend(crate::malformed_rest::cases());
    let mut names: Vec<&str> = cases.iter().map(|case| case.what).collect();
    names.sort_unstable();
    assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
    let mut wrong = Vec::new();
    for case in &cases {
        let fault = match &case.asked {
            Asked::Grpc(_, code) => *code == Code::Internal,
            Asked::Rest(_, status) => *status == 500,
            Asked::Both(_, code, status) => *code == Code::Internal || *status == 500,
        };
        assert!(!fault, "{}: a request is never the server's fault", case.what);
        let checks = match &case.asked {
            Asked::Grpc(request, code) => vec![check_grpc(&mut client, case, request, *code).await],
            Asked::Rest(ask, status) => vec![check_rest(&server, case, ask, *status).await],
            Asked::Both(request, code, status) => vec![
                check_grpc(&mut client, case, request, *code).await,
                check_rest(&server, case, &as_rest(request), *status).await,
            ],
        };
        wrong.extend(checks.into_iter().filter_map(|check| Some(format!("{}: {}", case.what, check.err()?))));
        client.infer_message(good()).await.unwrap();
        assert_eq!(ask(&server, &as_rest(&good())).await.status, 200, "after {}", case.what);
    }
    assert!(wrong.is_empty(), "{} of {} rows:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
    for (model, version, expected) in
        [("nosuch", "", Code::NotFound), ("mlp", "9", Code::NotFound), ("mlp", "x", Code::InvalidArgument)]
    {
        match client.model_metadata(model, version).await {
            Err(ClientError::Refused { code, .. }) => assert_eq!(code, expected),
            other => panic!("{other:?}"),
        }
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_on_the_ports_does_not_affect_other_clients() {
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
