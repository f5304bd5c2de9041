//! Tests of every call of the protocol over gRPC and REST, with raw and typed tensors.

use bytes::Bytes;
use half::{bf16, f16};
use millrace_bundle::Datatype;
use millrace_serving::tensor::{Data, Tensor};
use millrace_serving::wire::Form;
use millrace_serving::wire::inference as pb;
use serde_json::json;

use crate::support::*;

fn input(rows: usize) -> Tensor {
    let values = (0..rows * FEATURES).map(|index| index as f32 / 7.0 - 1.0).collect();
    Tensor::fp32("input", vec![rows as i64, FEATURES as i64], values).unwrap()
}

fn expected(tensor: &Tensor) -> Vec<f32> {
    let Data::Fp32(values) = &tensor.data else { panic!("{tensor:?}") };
    values.chunks(FEATURES).flat_map(mlp_logits).collect()
}

fn assert_close(found: &Data, expected: &[f32]) {
    let Data::Fp32(found) = found else { panic!("{found:?}") };
    assert_eq!(found.len(), expected.len());
    for (a, b) in found.iter().zip(expected) {
        assert!((a - b).abs() < 1e-5, "{found:?} is not {expected:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grpc_answers_every_call_of_the_protocol() {
    let server = Server::start(config(), &[("mlp", 3, mlp())]).await;
    let mut client = server.client().await;
    assert!(client.server_live().await.unwrap());
    assert!(client.server_ready().await.unwrap());
    assert!(client.model_ready("mlp", "").await.unwrap());
    assert!(client.model_ready("mlp", "1").await.unwrap());
    assert!(!client.model_ready("mlp", "2").await.unwrap());
    assert!(!client.model_ready("other", "").await.unwrap());
    let metadata = client.server_metadata().await.unwrap();
    assert_eq!(metadata.name, "millrace");
    for extension in ["binary_tensor_data", "classification", "system_shared_memory"] {
        assert!(metadata.extensions.iter().any(|found| found == extension), "{metadata:?}");
    }
    let metadata = client.model_metadata("mlp", "").await.unwrap();
    assert_eq!(metadata.versions, ["1", "3"]);
    assert_eq!(metadata.platform, "onnxruntime_onnx");
    assert_eq!(metadata.inputs[0].datatype, "FP32");
    assert_eq!(metadata.inputs[0].shape, [-1, FEATURES as i64]);
    assert_eq!(metadata.outputs[0].name, "logits");
    let signature = client.signature("mlp", "1").await.unwrap();
    assert_eq!(signature.inputs[0].datatype, Datatype::Fp32);

    for rows in [1, 2, 33] {
        let input = input(rows);
        for form in [Form::Raw, Form::Typed] {
            let prediction = client.infer("mlp", None, vec![input.clone()], form).await.unwrap();
            assert_eq!(prediction.version, "3");
            let logits = prediction.output("logits").unwrap();
            assert_eq!(logits.shape, [rows as i64, CLASSES as i64]);
            assert_close(&logits.data, &expected(&input));
        }
    }
    let prediction = client.infer("mlp", Some(1), vec![input(1)], Form::Raw).await.unwrap();
    assert_eq!(prediction.version, "1");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replies_mirror_the_form_and_the_id_of_the_request() {
    let server = Server::start(config(), &[]).await;
    let mut client = server.client().await;
    let raw = Data::Fp32(vec![0.5; FEATURES]).to_raw();
    let tensor = pb::model_infer_request::InferInputTensor {
        name: "input".into(),
        datatype: "FP32".into(),
        shape: vec![1, FEATURES as i64],
        ..Default::default()
    };
    let mut request = pb::ModelInferRequest {
        model_name: "mlp".into(),
        id: "a-17".into(),
        inputs: vec![tensor],
        raw_input_contents: vec![raw],
        ..Default::default()
    };
    let reply = client.infer_message(request.clone()).await.unwrap();
    assert_eq!((reply.id.as_str(), reply.model_version.as_str()), ("a-17", "1"));
    assert_eq!(reply.raw_output_contents.len(), 1);
    assert_eq!(reply.raw_output_contents[0].len(), 4 * CLASSES);
    assert!(reply.outputs[0].contents.is_none());
    request.raw_input_contents.clear();
    request.inputs[0].contents =
        Some(pb::InferTensorContents { fp32_contents: vec![0.5; FEATURES], ..Default::default() });
    request.outputs.push(pb::model_infer_request::InferRequestedOutputTensor {
        name: "logits".into(),
        ..Default::default()
    });
    let reply = client.infer_message(request).await.unwrap();
    assert!(reply.raw_output_contents.is_empty());
    let contents = reply.outputs[0].contents.as_ref().unwrap();
    assert_eq!(contents.fp32_contents.len(), CLASSES);
    server.stop().await;
}

fn all_datatypes() -> Vec<Tensor> {
    let data = vec![
        Data::Bool(vec![true, false]),
        Data::Uint8(vec![0, u8::MAX]),
        Data::Uint16(vec![0, u16::MAX]),
        Data::Uint32(vec![0, u32::MAX]),
        Data::Uint64(vec![0, u64::MAX]),
        Data::Int8(vec![i8::MIN, i8::MAX]),
        Data::Int16(vec![i16::MIN, i16::MAX]),
        Data::Int32(vec![i32::MIN, i32::MAX]),
        Data::Int64(vec![i64::MIN, i64::MAX]),
        Data::Fp16(vec![f16::MIN, f16::from_f32(0.1)]),
        Data::Bf16(vec![bf16::MIN, bf16::from_f32(0.1)]),
        Data::Fp32(vec![f32::MIN, 0.1]),
        Data::Fp64(vec![f64::MIN, 0.1]),
        Data::Bytes(vec![Bytes::new(), Bytes::from("é\n\"")]),
    ];
    let named = |data: Data| Tensor::new(&format!("in_{}", data.datatype()), vec![2], data).unwrap();
    data.into_iter().map(named).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_datatype_goes_through_every_form() {
    let halves = |tensor: &Tensor| matches!(tensor.data.datatype(), Datatype::Fp16 | Datatype::Bf16);
    let server = Server::start(config(), &[("echo", 1, echo(&Datatype::ALL))]).await;
    let no_halves: Vec<Datatype> = Datatype::ALL
        .into_iter()
        .filter(|datatype| !matches!(datatype, Datatype::Fp16 | Datatype::Bf16))
        .collect();
    publish(server.dir.path(), "echo", 2, echo(&no_halves)).await;
    server.serving.repository().refresh().await.unwrap();
    let mut client = server.client().await;
    let check = |sent: &[Tensor], outputs: &[Tensor]| {
        assert_eq!(sent.len(), outputs.len());
        for (sent, back) in sent.iter().zip(outputs) {
            assert_eq!(back.name, sent.name.replace("in_", "out_"));
            assert_eq!((&back.shape, &back.data), (&sent.shape, &sent.data));
        }
    };
    let tensors = all_datatypes();
    let raw = client.infer("echo", Some(1), tensors.clone(), Form::Raw).await.unwrap();
    check(&tensors, &raw.outputs);
    let typed: Vec<Tensor> = tensors.iter().filter(|tensor| !halves(tensor)).cloned().collect();
    let reply = client.infer("echo", Some(2), typed.clone(), Form::Typed).await.unwrap();
    check(&typed, &reply.outputs);
    let mut backwards = typed.clone();
    backwards.reverse();
    let reply = client.infer("echo", Some(2), backwards, Form::Typed).await.unwrap();
    check(&typed, &reply.outputs);

    // REST: everything binary, then everything as JSON.
    let mut blobs = Vec::new();
    let inputs: Vec<_> = tensors
        .iter()
        .map(|tensor| {
            let raw = tensor.data.to_raw();
            blobs.extend_from_slice(&raw);
            json!({
                "name": tensor.name, "shape": tensor.shape,
                "datatype": tensor.data.datatype().as_str(),
                "parameters": { "binary_data_size": raw.len() },
            })
        })
        .collect();
    let head = json!({ "inputs": inputs, "parameters": { "binary_data_output": true } }).to_string();
    let body = [head.as_bytes(), &blobs].concat();
    let length = head.len().to_string();
    let headers = [("Inference-Header-Content-Length", length.as_str())];
    let reply = server.http("POST", "/v2/models/echo/versions/1/infer", &headers, &body).await;
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    assert_eq!(reply.header("content-type"), Some("application/octet-stream"));
    let length: usize = reply.header("inference-header-content-length").unwrap().parse().unwrap();
    assert_eq!(&reply.body[length..], blobs.as_slice());
    let json: serde_json::Value = serde_json::from_slice(&reply.body[..length]).unwrap();
    assert_eq!(json["outputs"][0]["parameters"]["binary_data_size"], 2);

    let list = |data: &Data| match data {
        Data::Bool(values) => json!(values),
        Data::Uint8(values) => json!(values),
        Data::Uint16(values) => json!(values),
        Data::Uint32(values) => json!(values),
        Data::Uint64(values) => json!(values),
        Data::Int8(values) => json!(values),
        Data::Int16(values) => json!(values),
        Data::Int32(values) => json!(values),
        Data::Int64(values) => json!(values),
        Data::Fp16(values) => json!(values.iter().map(|v| v.to_f32()).collect::<Vec<_>>()),
        Data::Bf16(values) => json!(values.iter().map(|v| v.to_f32()).collect::<Vec<_>>()),
        Data::Fp32(values) => json!(values),
        Data::Fp64(values) => json!(values),
        Data::Bytes(values) => {
            json!(values.iter().map(|v| String::from_utf8(v.to_vec()).unwrap()).collect::<Vec<_>>())
        }
    };
    let inputs: Vec<_> = tensors
        .iter()
        .map(|tensor| {
            json!({
                "name": tensor.name, "shape": tensor.shape,
                "datatype": tensor.data.datatype().as_str(), "data": list(&tensor.data),
            })
        })
        .collect();
    let body = json!({ "id": "x", "inputs": inputs }).to_string();
    let reply = server.http("POST", "/v2/models/echo/versions/1/infer", &[], body.as_bytes()).await;
    let json = reply.json();
    assert_eq!((reply.status, &json["id"], &json["model_version"]), (200, &json!("x"), &json!("1")));
    for (tensor, output) in tensors.iter().zip(json["outputs"].as_array().unwrap()) {
        if matches!(tensor.data.datatype(), Datatype::Fp16 | Datatype::Bf16 | Datatype::Fp32) {
            let numbers =
                |value: &serde_json::Value| -> Vec<f32> { serde_json::from_value(value.clone()).unwrap() };
            assert_eq!(numbers(&output["data"]), numbers(&list(&tensor.data)), "{}", tensor.name);
        } else {
            assert_eq!(output["data"], list(&tensor.data), "{}", tensor.name);
        }
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rest_answers_every_path() {
    let server = Server::start(config(), &[]).await;
    let get = async |path: &str| server.http("GET", path, &[], b"").await;
    assert_eq!(get("/v2").await.json()["name"], "millrace");
    assert_eq!(get("/v2/health/live").await.status, 200);
    assert_eq!(get("/v2/health/ready").await.status, 200);
    for path in ["/v2/models/mlp", "/v2/models/mlp/versions/1"] {
        let metadata = get(path).await.json();
        assert_eq!(metadata["versions"], json!(["1"]));
        assert_eq!(metadata["inputs"][0]["shape"], json!([-1, FEATURES]));
        assert_eq!(metadata["outputs"][0]["datatype"], "FP32");
        assert_eq!(get(&format!("{path}/ready")).await.status, 200);
    }
    assert_eq!(get("/v2/models/nosuch/ready").await.status, 404);
    let row = [0.25f32, -1.0, 2.0, 0.0];
    let input = json!({ "name": "input", "shape": [1, FEATURES], "datatype": "FP32", "data": [row] });
    let body = json!({ "inputs": [input], "outputs": [{ "name": "logits" }] }).to_string();
    let reply = server.http("POST", "/v2/models/mlp/infer", &[], body.as_bytes()).await;
    let output = &reply.json()["outputs"][0];
    assert_eq!(output["shape"], json!([1, CLASSES]));
    let logits: Vec<f32> = serde_json::from_value(output["data"].clone()).unwrap();
    assert_close(&Data::Fp32(logits), &mlp_logits(&row));

    // One output binary although the input is JSON.
    let outputs = json!([{ "name": "logits", "parameters": { "binary_data": true } }]);
    let input = json!({ "name": "input", "shape": [1, FEATURES], "datatype": "FP32", "data": row });
    let body = json!({ "inputs": [input], "outputs": outputs }).to_string();
    let reply = server.http("POST", "/v2/models/mlp/infer", &[], body.as_bytes()).await;
    let length: usize = reply.header("inference-header-content-length").unwrap().parse().unwrap();
    assert_eq!(reply.body.len() - length, 4 * CLASSES);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_and_metrics_report_the_state_of_the_server() {
    let server = Server::start(config(), &[("counted", 1, mlp())]).await;
    let channel =
        tonic::transport::Endpoint::from_shared(format!("http://{}", server.serving.addresses().grpc))
            .unwrap()
            .connect()
            .await
            .unwrap();
    let mut health = tonic_health::pb::health_client::HealthClient::new(channel);
    for service in ["", "inference.GRPCInferenceService"] {
        let request = tonic_health::pb::HealthCheckRequest { service: service.into() };
        assert_eq!(health.check(request).await.unwrap().into_inner().status, 1, "{service:?}");
    }
    let request = tonic_health::pb::HealthCheckRequest { service: "nosuch".into() };
    assert_eq!(health.check(request).await.unwrap_err().code(), tonic::Code::NotFound);

    let mut client = server.client().await;
    client.infer("counted", None, vec![input(5)], Form::Raw).await.unwrap();
    client.infer("counted", None, vec![], Form::Raw).await.unwrap_err();
    client.infer("made-up-by-a-request", None, vec![], Form::Raw).await.unwrap_err();
    let metrics = http(server.serving.addresses().metrics, "GET", "/metrics", &[], b"").await;
    let text = String::from_utf8(metrics.body).unwrap();
    for line in [
        r#"millrace_serving_requests_total{model="counted",outcome="ok",version="1"} 1"#,
        r#"millrace_serving_requests_total{model="counted",outcome="invalid",version="1"} 1"#,
        r#"millrace_serving_rows_total{model="counted",version="1"} 5"#,
        r#"millrace_serving_request_seconds_count{model="counted",version="1"} 1"#,
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
    assert!(!text.contains("made-up"), "{text}");
    assert!(metrics.head.contains("text/plain"));
    server.stop().await;
}
