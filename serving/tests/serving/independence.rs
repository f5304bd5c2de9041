//! Tests of models whose rows depend on each other: they run one request at a time, in every layout, unless
//! their configuration enables batching.

use millrace_bundle::onnx::*;
use millrace_serving::client::Client;
use millrace_serving::tensor::{Data, Tensor};
use millrace_serving::wire::Form;
use millrace_serving::wire::inference as pb;
use millrace_serving::{Config, ModelOptions};
use tempfile::TempDir;
use tensor_proto::DataType::Float;

use crate::response_cache::caching;
use crate::support::*;
use crate::triton_layout::put;

const CLIENTS: usize = 24;
const REQUESTS: usize = 40;

fn tensor(name: &str, data_type: tensor_proto::DataType, dims: &[i64], raw: Vec<u8>) -> TensorProto {
    TensorProto {
        name: Some(name.into()),
        dims: dims.to_vec(),
        data_type: Some(data_type as i32),
        raw_data: Some(raw),
        ..Default::default()
    }
}

fn number(name: &str, value: f32) -> TensorProto {
    tensor(name, Float, &[], value.to_le_bytes().to_vec())
}

fn with(mut node: NodeProto, name: &str, value: i64) -> NodeProto {
    let kind = attribute_proto::AttributeType::Int as i32;
    node.attribute.push(AttributeProto {
        name: Some(name.into()),
        r#type: Some(kind),
        i: Some(value),
        ..Default::default()
    });
    node
}

/// `input` FP32 [batch, 4] to `output` FP32 [batch, `width`].
fn graph(nodes: Vec<NodeProto>, initializer: Vec<TensorProto>, width: i64) -> Vec<u8> {
    model(GraphProto {
        name: Some("rows".into()),
        node: nodes,
        initializer,
        input: vec![value("input", Float, &[-1, FEATURES as i64])],
        output: vec![value("output", Float, &[-1, width])],
        ..Default::default()
    })
}

fn largest(output: &str) -> NodeProto {
    with(node("ReduceMax", &["input"], output), "keepdims", 0)
}

/// Models whose rows depend on the others: on their maximum, their range or their number.
fn dependent() -> Vec<(&'static str, Vec<u8>)> {
    let whole = |name: &str, value: i64| {
        tensor(name, tensor_proto::DataType::Int64, &[], value.to_le_bytes().to_vec())
    };
    let mut quantized = node("DynamicQuantizeLinear", &["input"], "q");
    quantized.output.extend(["scale".into(), "zero".into()]);
    vec![
        ("scaled", graph(vec![largest("max"), node("Div", &["input", "max"], "output")], vec![], 4)),
        (
            "min_max",
            graph(
                vec![
                    largest("max"),
                    with(node("ReduceMin", &["input"], "min"), "keepdims", 0),
                    node("Sub", &["max", "min"], "range"),
                    node("Sub", &["input", "min"], "shifted"),
                    node("Div", &["shifted", "range"], "output"),
                ],
                vec![],
                4,
            ),
        ),
        (
            "bytes_or_not",
            graph(
                vec![
                    largest("max"),
                    node("Greater", &["max", "one"], "are_bytes"),
                    node("Div", &["input", "most"], "divided"),
                    node("Where", &["are_bytes", "divided", "input"], "output"),
                ],
                vec![number("one", 1.0), number("most", 255.0)],
                4,
            ),
        ),
        ("soft", graph(vec![with(node("Softmax", &["input"], "output"), "axis", 0)], vec![], 4)),
        (
            "dynamic",
            graph(vec![quantized, node("DequantizeLinear", &["q", "scale", "zero"], "output")], vec![], 4),
        ),
        ("summed", graph(vec![node("CumSum", &["input", "axis"], "output")], vec![whole("axis", 0)], 4)),
    ]
}

/// Rows of very different magnitudes between clients and between requests.
fn rows(client: usize, request: usize) -> Tensor {
    let count = 1 + request % 2;
    let magnitude = [0.01f32, 1.0, 300.0][(client + request) % 3];
    let values = (0..count * FEATURES)
        .map(|place| ((place * 31 + client * 17 + request * 7) % 101) as f32 / 101.0 * magnitude)
        .collect();
    Tensor::fp32("input", vec![count as i64, FEATURES as i64], values).unwrap()
}

async fn answer(client: &mut Client, model: &str, input: Tensor) -> Data {
    client.infer(model, None, vec![input], Form::Raw).await.unwrap().outputs.remove(0).data
}

async fn described(server: &Server, model: &str) -> pb::ModelConfig {
    let request = pb::ModelConfigRequest { name: model.into(), ..Default::default() };
    server.triton().await.model_config(request).await.unwrap().into_inner().config.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_under_load_are_those_of_single_requests() {
    let dir = TempDir::new().unwrap();
    let models = dependent();
    // Bundles, and graphs in Triton's layout.
    for (place, (name, onnx)) in models.iter().enumerate() {
        if place % 2 == 0 {
            publish(dir.path(), name, 1, onnx.clone()).await;
        } else {
            put(dir.path(), &format!("{name}/config.pbtxt"), "");
            put(dir.path(), &format!("{name}/1/model.onnx"), onnx);
        }
    }
    let server = Server::over(Config { sessions_max: 1, ..config() }, dir).await;
    for (name, _) in models {
        let mut alone = server.client().await;
        let mut expected = Vec::new();
        for client in 0..CLIENTS {
            let mut answers = Vec::new();
            for request in 0..REQUESTS {
                answers.push(answer(&mut alone, name, rows(client, request)).await);
            }
            expected.push(answers);
        }
        let mut clients = tokio::task::JoinSet::new();
        for (number, expected) in expected.into_iter().enumerate() {
            let mut client = server.client().await;
            clients.spawn(async move {
                for (request, expected) in expected.into_iter().enumerate() {
                    let found = answer(&mut client, name, rows(number, request)).await;
                    assert_eq!(found, expected, "{name}: client {number}, request {request}");
                }
            });
        }
        clients.join_all().await;
        let config = described(&server, name).await;
        assert_eq!((config.max_batch_size, config.scheduling_choice), (0, None), "{name}");
        let rows = &config.parameters["rows"].string_value;
        assert!(rows.starts_with("dependent: "), "{rows}");
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_configuration_that_asks_for_batches_gets_them() {
    let summed = || dependent().pop().unwrap().1;
    let dir = TempDir::new().unwrap();
    let batching = "max_batch_size: 8 dynamic_batching { }";
    for (name, content) in [("asked", batching), ("bounded", "max_batch_size: 8"), ("forbidden", batching)] {
        put(dir.path(), &format!("{name}/config.pbtxt"), content);
        put(dir.path(), &format!("{name}/1/model.onnx"), summed());
    }
    publish(dir.path(), "configured", 1, summed()).await;
    publish(dir.path(), "mlp", 1, mlp()).await;
    let option = |name: &str, independent_rows| {
        (name.to_owned(), ModelOptions { independent_rows, ..ModelOptions::default() })
    };
    let models =
        [option("configured", Some(true)), option("forbidden", Some(false)), option("mlp", None)].into();
    let server = Server::over(Config { models, ..config() }, dir).await;
    for (name, together, rows_max, says) in [
        ("asked", true, 8, "independent as configured, not proven: CumSum"),
        ("configured", true, 65_536, "independent as configured, not proven: CumSum"),
        ("bounded", false, 8, "dependent: CumSum"),
        ("forbidden", false, 8, "dependent: \"input\": independent_rows"),
        ("mlp", true, 65_536, "independent"),
    ] {
        let config = described(&server, name).await;
        assert_eq!(config.scheduling_choice.is_some(), together, "{name}");
        assert_eq!(config.max_batch_size, rows_max, "{name}");
        let rows = &config.parameters["rows"].string_value;
        assert!(rows.starts_with(says), "{name}: {rows}");
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_that_may_depend_on_other_requests_are_not_cached() {
    let dir = TempDir::new().unwrap();
    for (name, content) in
        [("asked", "max_batch_size: 8 dynamic_batching { }"), ("alone", "max_batch_size: 8")]
    {
        put(dir.path(), &format!("{name}/config.pbtxt"), content);
        put(dir.path(), &format!("{name}/1/model.onnx"), dependent().pop().unwrap().1);
    }
    let server = Server::over(caching(&["asked", "alone"], 1 << 20), dir).await;
    assert_eq!(described(&server, "asked").await.response_cache, None);
    assert!(described(&server, "alone").await.response_cache.is_some());
    server.stop().await;
}
