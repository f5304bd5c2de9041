//! Tests of tensors in system shared memory over gRPC and REST, besides ordinary ones.

use std::path::PathBuf;

use bytes::Bytes;
use millrace_bundle::Datatype;
use millrace_serving::tensor::Data;
use millrace_serving::wire::inference as pb;
use pb::grpc_inference_service_client::GrpcInferenceServiceClient;
use pb::infer_parameter::ParameterChoice::{self, Int64Param, StringParam};
use pb::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use serde_json::{Value, json};
use tonic::Code::NotFound;
use tonic::transport::{Channel, Endpoint};

use crate::support::*;

/// A shared memory object, removed when dropped.
pub(crate) struct Object(pub(crate) String);

impl Object {
    pub(crate) fn new(name: &str, bytes: &[u8]) -> Object {
        let object = Object(format!("/millrace-{}-{name}", std::process::id()));
        std::fs::write(object.path(), bytes).unwrap();
        object
    }

    pub(crate) fn path(&self) -> PathBuf {
        PathBuf::from(format!("/dev/shm{}", self.0))
    }

    pub(crate) fn read(&self) -> Vec<u8> {
        std::fs::read(self.path()).unwrap()
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.path());
    }
}

pub(crate) async fn grpc(server: &Server) -> GrpcInferenceServiceClient<Channel> {
    let address = format!("http://{}", server.serving.addresses().grpc);
    GrpcInferenceServiceClient::new(Endpoint::from_shared(address).unwrap().connect().await.unwrap())
}

pub(crate) async fn register(
    client: &mut GrpcInferenceServiceClient<Channel>,
    name: &str,
    key: &str,
    offset: u64,
    byte_size: u64,
) -> Result<(), tonic::Status> {
    let (name, key) = (name.to_owned(), key.to_owned());
    let request = pb::SystemSharedMemoryRegisterRequest { name, key, offset, byte_size };
    client.system_shared_memory_register(request).await.map(drop)
}

pub(crate) type Choices = Vec<(&'static str, ParameterChoice)>;

pub(crate) fn place(region: &str, offset: i64, byte_size: i64) -> Choices {
    vec![
        ("shared_memory_region", StringParam(region.into())),
        ("shared_memory_offset", Int64Param(offset)),
        ("shared_memory_byte_size", Int64Param(byte_size)),
    ]
}

pub(crate) fn input(name: &str, datatype: &str, shape: &[i64], choices: Choices) -> InferInputTensor {
    InferInputTensor {
        name: name.into(),
        datatype: datatype.into(),
        shape: shape.to_vec(),
        parameters: parameters(choices),
        ..Default::default()
    }
}

pub(crate) fn parameters(choices: Choices) -> std::collections::HashMap<String, pb::InferParameter> {
    let parameter =
        |(name, choice): (&str, _)| (name.to_owned(), pb::InferParameter { parameter_choice: Some(choice) });
    choices.into_iter().map(parameter).collect()
}

pub(crate) fn output(name: &str, choices: Choices) -> InferRequestedOutputTensor {
    InferRequestedOutputTensor { name: name.into(), parameters: parameters(choices) }
}

fn raw(values: &[f32]) -> Vec<u8> {
    Data::Fp32(values.to_vec()).to_raw().to_vec()
}

fn close(found: &[u8], expected: &[f32]) {
    let found: Vec<f32> = found.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    assert_eq!(found.len(), expected.len());
    assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5), "{found:?} is not {expected:?}");
}

const ROW: [f32; FEATURES] = [0.5, -1.0, 2.0, 0.25];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grpc_takes_inputs_from_regions_and_leaves_outputs_there() {
    let both = echo(&[Datatype::Fp32, Datatype::Bytes, Datatype::Fp16]);
    let server = Server::start(config(), &[("both", 1, both)]).await;
    let mut client = grpc(&server).await;
    let given = Object::new("grpc-in", &[&[9; 8], raw(&ROW).as_slice(), raw(&ROW).as_slice()].concat());
    let taken = Object::new("grpc-out", &[7; 64]);
    register(&mut client, "in", &given.0, 8, 32).await.unwrap();
    register(&mut client, "out", taken.0.trim_start_matches('/'), 4, 60).await.unwrap();

    // All in shared memory; the rest of the output's object is unchanged.
    let request = pb::ModelInferRequest {
        model_name: "mlp".into(),
        inputs: vec![input("input", "FP32", &[2, 4], place("in", 0, 32))],
        outputs: vec![output("logits", place("out", 8, 30))],
        ..Default::default()
    };
    let reply = client.model_infer(request.clone()).await.unwrap().into_inner();
    assert_eq!(reply.raw_output_contents, [Bytes::new()]);
    let told = &reply.outputs[0];
    assert_eq!((told.datatype.as_str(), told.shape.as_slice()), ("FP32", &[2, 3][..]));
    assert!(told.contents.is_none());
    assert_eq!(told.parameters, parameters(place("out", 8, 24)));
    let logits = mlp_logits(&ROW);
    let object = taken.read();
    assert_eq!((&object[..12], &object[36..]), (&[7; 12][..], &[7; 28][..]));
    close(&object[12..36], &[logits.as_slice(), &logits].concat());

    // Only the second row, with the answer in the message.
    let mut request = request;
    request.inputs[0] = input("input", "FP32", &[1, 4], place("in", 16, 16));
    request.outputs.clear();
    let reply = client.model_infer(request).await.unwrap().into_inner();
    close(&reply.raw_output_contents[0], &logits);

    // Three inputs, of which the middle one is sent; three outputs, of which the middle one is in shared
    // memory.
    let strings = Data::Bytes(vec!["ab".into(), "".into()]);
    let mut request = pb::ModelInferRequest {
        model_name: "both".into(),
        inputs: vec![
            input("in_FP16", "FP16", &[2], place("in", 0, 4)),
            input("in_BYTES", "BYTES", &[2], vec![]),
            input("in_FP32", "FP32", &[2], place("in", 0, 8)),
        ],
        raw_input_contents: vec![strings.to_raw()],
        outputs: vec![
            output("out_FP32", vec![]),
            output("out_BYTES", place("out", 0, 60)),
            output("out_FP16", vec![]),
        ],
        ..Default::default()
    };
    let reply = client.model_infer(request.clone()).await.unwrap().into_inner();
    assert_eq!(reply.raw_output_contents, [raw(&ROW[..2]), vec![], raw(&ROW[..1])]);
    assert_eq!(taken.read()[4..14], strings.to_raw());
    assert_eq!(reply.outputs[1].parameters["shared_memory_byte_size"].parameter_choice, Some(Int64Param(10)));
    assert!(!reply.outputs[1].parameters.contains_key("shared_memory_offset"));

    // With a typed input the outputs are typed as well, except FP16, which has no typed form.
    request.raw_input_contents.clear();
    let contents =
        pb::InferTensorContents { bytes_contents: vec!["x".into(), "y".into()], ..Default::default() };
    request.inputs[1].contents = Some(contents.clone());
    request.outputs = vec![output("out_BYTES", vec![]), output("out_FP16", place("out", 20, 4))];
    let reply = client.model_infer(request).await.unwrap().into_inner();
    assert!(reply.raw_output_contents.is_empty());
    assert_eq!(reply.outputs[0].contents, Some(contents));
    assert!(reply.outputs[1].contents.is_none());
    assert_eq!(taken.read()[24..28], raw(&ROW[..1]));

    let status = client.system_shared_memory_status(pb::SystemSharedMemoryStatusRequest::default()).await;
    let regions = status.unwrap().into_inner().regions;
    assert_eq!(regions.len(), 2);
    assert_eq!(
        (regions["in"].key.as_str(), regions["in"].offset, regions["in"].byte_size),
        (given.0.as_str(), 8, 32)
    );
    let one = pb::SystemSharedMemoryStatusRequest { name: "out".into() };
    assert_eq!(client.system_shared_memory_status(one).await.unwrap().into_inner().regions.len(), 1);
    for name in ["out", "out", ""] {
        let request = pb::SystemSharedMemoryUnregisterRequest { name: name.into() };
        client.system_shared_memory_unregister(request).await.unwrap();
    }
    let gone =
        client.system_shared_memory_status(pb::SystemSharedMemoryStatusRequest { name: "in".into() }).await;
    assert_eq!(gone.unwrap_err().code(), NotFound);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rest_takes_inputs_from_regions_and_leaves_outputs_there() {
    let both = echo(&[Datatype::Fp32, Datatype::Int8]);
    let server = Server::start(config(), &[("both", 1, both)]).await;
    let object = Object::new("rest", &[raw(&ROW).as_slice(), &[7; 48]].concat());
    let path = "/v2/systemsharedmemory";
    let body = json!({ "key": object.0, "byte_size": 16 }).to_string();
    let reply = server.http("POST", &format!("{path}/region/in/register"), &[], body.as_bytes()).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let body = json!({ "key": object.0, "offset": 16, "byte_size": 48 }).to_string();
    let reply = server.http("POST", &format!("{path}/region/a%20b/register"), &[], body.as_bytes()).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let reply = server.http("POST", &format!("{path}/region/a%20b/register"), &[], body.as_bytes()).await;
    assert_eq!(reply.status, 400);
    assert!(reply.json()["error"].as_str().unwrap().contains("already"), "{reply:?}");
    let all = server.http("GET", &format!("{path}/status"), &[], b"").await.json();
    assert_eq!(
        all,
        json!([
            { "name": "a b", "key": object.0, "offset": 16, "byte_size": 48 },
            { "name": "in", "key": object.0, "offset": 0, "byte_size": 16 },
        ])
    );
    let one = server.http("GET", &format!("{path}/region/in/status"), &[], b"").await.json();
    assert_eq!(one[0]["name"], "in");

    let region = |name: &str, offset: u64, bytes: u64| json!({ "shared_memory_region": name, "shared_memory_offset": offset, "shared_memory_byte_size": bytes });
    let body = json!({
        "inputs": [
            { "name": "in_FP32", "shape": [4], "datatype": "FP32", "parameters": region("in", 0, 16) },
            { "name": "in_INT8", "shape": [2], "datatype": "INT8", "data": [5, -6] },
        ],
        "outputs": [
            { "name": "out_INT8", "parameters": region("a b", 1, 2) },
            { "name": "out_FP32", "parameters": { "binary_data": true } },
        ],
    });
    let infer = "/v2/models/both/infer";
    let reply = server.http("POST", infer, &[], body.to_string().as_bytes()).await;
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    let length: usize = reply.header("inference-header-content-length").unwrap().parse().unwrap();
    assert_eq!(reply.body[length..], raw(&ROW));
    let told: Value = serde_json::from_slice(&reply.body[..length]).unwrap();
    let mut placed = region("a b", 1, 2);
    placed["binary_data_size"] = json!(0);
    assert_eq!(
        told["outputs"][0],
        json!({ "name": "out_INT8", "datatype": "INT8", "shape": [2], "parameters": placed })
    );
    assert_eq!(object.read()[16..20], [7, 5, 0u8.wrapping_sub(6), 7]);

    // An answer that JSON cannot represent is refused, and shared memory is unchanged.
    std::fs::write(object.path(), [raw(&[f32::NAN; 4]).as_slice(), &[7; 48]].concat()).unwrap();
    let mut refused = body.clone();
    refused["outputs"][1]["parameters"] = json!({ "binary_data": false });
    let reply = server.http("POST", infer, &[], refused.to_string().as_bytes()).await;
    assert_eq!(reply.status, 406, "{reply:?}");
    assert_eq!(object.read()[16..], [7; 48]);

    let mut refused = body.clone();
    refused["inputs"][0]["data"] = json!([1, 2, 3, 4]);
    let mut unknown = body.clone();
    unknown["outputs"][0]["parameters"] = region("nosuch", 0, 2);
    let mut negative = body.clone();
    negative["inputs"][0]["parameters"]["shared_memory_offset"] = json!(-1);
    let mut fraction = body.clone();
    fraction["inputs"][0]["parameters"]["shared_memory_byte_size"] = json!(16.5);
    for (body, status, part) in [
        (refused, 400, "beside a shared memory region"),
        (unknown, 404, "nosuch"),
        (negative, 400, "it is -1"),
        (fraction, 400, "takes an integer"),
    ] {
        let reply = server.http("POST", infer, &[], body.to_string().as_bytes()).await;
        assert_eq!(reply.status, status, "{part}");
        assert!(reply.json()["error"].as_str().unwrap().contains(part), "{part}: {reply:?}");
    }
    for (at, body, status) in [
        ("region/x/register", "", 400),
        ("region/x/register", "[]", 400),
        ("region/x/register", r#"{"key":"/x"}"#, 400),
        ("region/x/register", r#"{"key":"/x","byte_size":-1}"#, 400),
        ("region/x/register", r#"{"key":"/x","byte_size":18446744073709551616}"#, 400),
        ("region/x/register", r#"{"key":7,"byte_size":1}"#, 400),
        ("region//register", r#"{"key":"/x","byte_size":1}"#, 400),
        ("region//unregister", "", 400),
        ("region/a/b/unregister", "", 404),
        ("region/nosuch/unregister", "", 200),
        ("region/in/unregister", "", 200),
        ("unregister", "", 200),
    ] {
        let reply = server.http("POST", &format!("{path}/{at}"), &[], body.as_bytes()).await;
        assert_eq!(reply.status, status, "{at} {body}: {}", String::from_utf8_lossy(&reply.body));
    }
    assert_eq!(server.http("GET", &format!("{path}/region/in/status"), &[], b"").await.status, 404);
    assert_eq!(server.http("GET", &format!("{path}/status"), &[], b"").await.json(), json!([]));
    assert_eq!(server.http("GET", &format!("{path}/unregister"), &[], b"").await.status, 405);
    server.stop().await;
}
