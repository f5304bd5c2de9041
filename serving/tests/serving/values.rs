//! Tests of edge values in tensors: no elements, and bytes that are not text.

use bytes::Bytes;
use millrace_bundle::Datatype;
use millrace_serving::tensor::{Data, Tensor};
use millrace_serving::wire::Form;
use serde_json::json;

use crate::support::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn elements_of_bytes_may_be_any_bytes() {
    let server = Server::start(config(), &[("echo", 1, echo(&[Datatype::Bytes]))]).await;
    let mut client = server.client().await;
    let elements: [&'static [u8]; 8] =
        [b"", b"\0", b"a\0b", b"\0\0", &[0xff, 0xfe, 0x00, 0x80], b"text", "gr\u{fc}n".as_bytes(), b""];
    let all: Vec<u8> = (0..=255).collect();
    let mut data: Vec<Bytes> = elements.map(Bytes::from_static).into();
    data.push(all.into());
    for count in [1, data.len()] {
        let data = Data::Bytes(data[data.len() - count..].to_vec());
        for form in [Form::Raw, Form::Typed] {
            let input = Tensor::new("in_BYTES", vec![count as i64], data.clone()).unwrap();
            let answer = client.infer("echo", None, vec![input], form).await.unwrap();
            assert_eq!(answer.outputs[0].data, data, "{form:?}");
        }
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn inputs_may_have_an_extent_of_0() {
    let models = [("echo", 1, echo(&[Datatype::Fp32, Datatype::Bytes])), ("sum", 1, sum())];
    let server = Server::start(config(), &models).await;
    let mut client = server.client().await;
    let nothing =
        |name: &str, shape: &[i64]| Tensor::new(name, shape.to_vec(), Data::Fp32(Vec::new())).unwrap();
    for form in [Form::Raw, Form::Typed] {
        let answer = client.infer("mlp", None, vec![nothing("input", &[0, 4])], form).await.unwrap();
        assert_eq!((&answer.outputs[0].shape[..], answer.outputs[0].data.len()), (&[0, 3][..], 0));
        let texts = Tensor::new("in_BYTES", vec![0], Data::Bytes(Vec::new())).unwrap();
        let inputs = vec![nothing("in_FP32", &[0]), texts];
        let answer = client.infer("echo", None, inputs, form).await.unwrap();
        assert!(answer.outputs.iter().all(|output| output.shape == [0] && output.data.is_empty()));
        let inputs = vec![nothing("a", &[0, 4]), nothing("b", &[0, 4])];
        let answer = client.infer("sum", None, inputs, form).await.unwrap();
        assert_eq!(answer.outputs[0].shape, [0, 4]);
    }
    // Concurrent requests are answered as usual.
    let mut requests = tokio::task::JoinSet::new();
    for index in 0..48 {
        let mut client = server.client().await;
        requests.spawn(async move {
            let rows = index % 3;
            let row = [0.5, -1.0, 2.0, index as f32];
            let input = Tensor::fp32("input", vec![rows, 4], row.repeat(rows as usize)).unwrap();
            let answer = client.infer("mlp", None, vec![input], Form::Raw).await.unwrap();
            let Data::Fp32(values) = &answer.outputs[0].data else { panic!("{answer:?}") };
            assert_eq!(values.len(), 3 * rows as usize);
            for (value, expected) in values.iter().zip(mlp_logits(&row).iter().cycle()) {
                assert!((value - expected).abs() < 1e-4);
            }
        });
    }
    requests.join_all().await;
    let body = json!({"inputs": [{"name": "input", "shape": [0, 4], "datatype": "FP32", "data": []}]});
    let reply = server.http("POST", "/v2/models/mlp/infer", &[], body.to_string().as_bytes()).await;
    assert_eq!((reply.status, reply.json()["outputs"][0]["shape"].clone()), (200, json!([0, 3])));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn null_in_control_calls_means_absent() {
    let server = Server::start(config(), &[]).await;
    let reply =
        server.http("POST", "/v2/repository/index", &[], br#"{"ready": null, "parameters": null}"#).await;
    assert_eq!((reply.status, reply.json()[0]["name"].clone()), (200, json!("mlp")));
    server.stop().await;
}
