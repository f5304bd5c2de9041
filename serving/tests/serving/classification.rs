//! Tests of classification over gRPC and REST.

use bytes::Bytes;
use millrace_bundle::Datatype;
use millrace_serving::tensor::Data;
use millrace_serving::wire::inference as pb;
use pb::infer_parameter::ParameterChoice::{self, Int64Param, StringParam, Uint64Param};
use serde_json::json;
use tonic::Code;

use crate::shared_memory::{grpc, input, output};
use crate::support::*;

const ROWS: [[f32; FEATURES]; 2] = [[0.5, -1.0, 2.0, 0.25], [-2.0, 1.5, 0.0, 1.0]];

/// Class indices of a row, the best first, by the test's own arithmetic.
fn order(row: &[f32]) -> Vec<usize> {
    let logits = mlp_logits(row);
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    order
}

fn check(texts: &[String], rows: &[&[f32]], classes: usize) {
    assert_eq!(texts.len(), rows.len() * classes);
    for (row, texts) in rows.iter().zip(texts.chunks(classes)) {
        let logits = mlp_logits(row);
        for (text, expected) in texts.iter().zip(order(row)) {
            let (value, index) = text.split_once(':').unwrap();
            assert_eq!(index, expected.to_string(), "{texts:?} of {logits:?}");
            assert!(
                (value.parse::<f32>().unwrap() - logits[expected]).abs() < 1e-5,
                "{texts:?} of {logits:?}"
            );
        }
    }
}

fn request(choice: ParameterChoice) -> pb::ModelInferRequest {
    pb::ModelInferRequest {
        model_name: "mlp".into(),
        inputs: vec![input("input", "FP32", &[2, FEATURES as i64], vec![])],
        raw_input_contents: vec![Data::Fp32(ROWS.concat()).to_raw()],
        outputs: vec![output("logits", vec![("classification", choice)])],
        ..Default::default()
    }
}

fn strings(raw: &Bytes) -> Vec<String> {
    let mut texts = Vec::new();
    let mut rest = raw.as_ref();
    while let Some((length, tail)) = rest.split_first_chunk::<4>() {
        let (text, tail) = tail.split_at(u32::from_le_bytes(*length) as usize);
        texts.push(String::from_utf8(text.to_vec()).unwrap());
        rest = tail;
    }
    texts
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grpc_gives_the_best_classes_of_each_row() {
    let types = [Datatype::Bool, Datatype::Fp32];
    let server = Server::start(config(), &[("both", 1, echo(&types))]).await;
    let mut client = grpc(&server).await;
    for (count, classes) in [(1, 1), (2, 2), (3, 3), (100, 3), (i64::MAX, 3)] {
        let reply = client.model_infer(request(Int64Param(count))).await.unwrap().into_inner();
        assert_eq!(reply.outputs[0].datatype, "BYTES");
        assert_eq!(reply.outputs[0].shape, [2, classes]);
        check(&strings(&reply.raw_output_contents[0]), &[&ROWS[0], &ROWS[1]], classes as usize);
    }
    let mut typed = request(Uint64Param(u64::MAX));
    typed.raw_input_contents.clear();
    let contents = pb::InferTensorContents { fp32_contents: ROWS.concat(), ..Default::default() };
    typed.inputs[0].contents = Some(contents);
    let reply = client.model_infer(typed).await.unwrap().into_inner();
    let texts = reply.outputs[0].contents.as_ref().unwrap().bytes_contents.iter();
    let texts: Vec<String> = texts.map(|text| String::from_utf8(text.to_vec()).unwrap()).collect();
    check(&texts, &[&ROWS[0], &ROWS[1]], CLASSES);

    for (choice, part) in [
        (Int64Param(0), "it is 0"),
        (Int64Param(-1), "it is -1"),
        (StringParam("3".into()), "it is a string"),
        (ParameterChoice::DoubleParam(3.0), "takes an integer"),
    ] {
        let status = client.model_infer(request(choice)).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains(part), "{status}");
    }
    // Only numbers have classes; the other output of the request can still be classified.
    let mut request = pb::ModelInferRequest {
        model_name: "both".into(),
        inputs: vec![input("in_BOOL", "BOOL", &[1], vec![]), input("in_FP32", "FP32", &[2], vec![])],
        raw_input_contents: vec![Bytes::from_static(&[1]), Data::Fp32(vec![0.5, f32::NAN]).to_raw()],
        outputs: vec![
            output("out_FP32", vec![("classification", Int64Param(5))]),
            output("out_BOOL", vec![("classification", Int64Param(1))]),
        ],
        ..Default::default()
    };
    let status = client.model_infer(request.clone()).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("only numbers"), "{status}");
    request.outputs[1].parameters.clear();
    let reply = client.model_infer(request).await.unwrap().into_inner();
    assert_eq!(reply.outputs[0].shape, [2, 1]);
    assert_eq!(strings(&reply.raw_output_contents[0]), ["0.5:0", "NaN:0"]);
    assert_eq!(reply.raw_output_contents[1], Bytes::from_static(&[1]));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rest_gives_the_best_classes_of_each_row() {
    let server = Server::start(config(), &[]).await;
    let body = |parameters: serde_json::Value| {
        json!({
            "inputs": [{ "name": "input", "shape": [2, FEATURES], "datatype": "FP32", "data": ROWS }],
            "outputs": [{ "name": "logits", "parameters": parameters }],
        })
        .to_string()
        .into_bytes()
    };
    let infer = "/v2/models/mlp/infer";
    let reply = server.http("POST", infer, &[], &body(json!({ "classification": 2 }))).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let output = &reply.json()["outputs"][0];
    assert_eq!((&output["datatype"], &output["shape"]), (&json!("BYTES"), &json!([2, 2])));
    let texts: Vec<String> = serde_json::from_value(output["data"].clone()).unwrap();
    check(&texts, &[&ROWS[0], &ROWS[1]], 2);

    let binary = body(json!({ "classification": 1000, "binary_data": true }));
    let reply = server.http("POST", infer, &[], &binary).await;
    let length: usize = reply.header("inference-header-content-length").unwrap().parse().unwrap();
    check(&strings(&Bytes::from(reply.body[length..].to_vec())), &[&ROWS[0], &ROWS[1]], CLASSES);

    for classes in [json!(0), json!(-3), json!(1.5), json!("2"), json!(true), json!([2])] {
        let reply = server.http("POST", infer, &[], &body(json!({ "classification": classes }))).await;
        assert_eq!(reply.status, 400, "{classes}: {reply:?}");
        assert!(reply.json()["error"].as_str().unwrap().contains("\"classification\""), "{reply:?}");
    }
    server.stop().await;
}
