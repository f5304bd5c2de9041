//! Tests of models and requests that would end the process, or run as another model than the file describes.
//! They are refused, and the others are served.

use millrace_bundle::onnx::*;
use millrace_serving::client::ClientError;
use millrace_serving::tensor::{Data, Tensor};
use millrace_serving::wire::Form;
use millrace_serving::{Config, ModelOptions, Repository};
use prost::Message;
use tensor_proto::DataType::{Float, Int64};
use tonic::Code;

use crate::support::*;
use crate::triton_layout::put;

fn ints(mut node: NodeProto, name: &str, numbers: &[i64]) -> NodeProto {
    use attribute_proto::AttributeType;
    let (kind, i, ints) = match numbers {
        [one] => (AttributeType::Int, Some(*one), vec![]),
        all => (AttributeType::Ints, None, all.to_vec()),
    };
    let attribute =
        AttributeProto { name: Some(name.into()), r#type: Some(kind as i32), i, ints, ..Default::default() };
    node.attribute.push(attribute);
    node
}

fn whole(name: &str, dims: &[i64], value: i64) -> TensorProto {
    TensorProto {
        name: Some(name.into()),
        dims: dims.to_vec(),
        data_type: Some(Int64 as i32),
        raw_data: Some(value.to_le_bytes().to_vec()),
        ..Default::default()
    }
}

/// Divides integers: `a` INT64 [batch] by `b`, or by the maximum of `b` and 1.
fn quotient(bounded: bool) -> Vec<u8> {
    let nodes = if bounded {
        vec![node("Max", &["b", "one"], "most"), node("Div", &["a", "most"], "output")]
    } else {
        vec![node("Div", &["a", "b"], "output")]
    };
    model(GraphProto {
        name: Some("quotient".into()),
        node: nodes,
        initializer: vec![whole("one", &[], 1)],
        input: vec![value("a", Int64, &[-1]), value("b", Int64, &[-1])],
        output: vec![value("output", Int64, &[-1])],
        ..Default::default()
    })
}

/// An LSTM over steps: `input` FP32 [batch, any, 3] to the last state, `output` FP32 [batch, 2].
fn lstm() -> Vec<u8> {
    let mut cell = ints(node("LSTM", &["steps", "w", "r"], ""), "hidden_size", &[2]);
    cell.output.push("last".into());
    let mut input = value("input", Float, &[-1, -1, 3]);
    if let Some(type_proto::Value::TensorType(tensor)) = input.r#type.as_mut().unwrap().value.as_mut() {
        let name = tensor_shape_proto::dimension::Value::DimParam("steps".into());
        tensor.shape.as_mut().unwrap().dim[1].value = Some(name);
    }
    model(GraphProto {
        name: Some("lstm".into()),
        node: vec![
            ints(node("Transpose", &["input"], "steps"), "perm", &[1, 0, 2]),
            cell,
            node("Squeeze", &["last", "first"], "output"),
        ],
        initializer: vec![floats("w", &[1, 8, 3]), floats("r", &[1, 8, 2]), whole("first", &[1], 0)],
        input: vec![input],
        output: vec![value("output", Float, &[-1, 2])],
        ..Default::default()
    })
}

fn reason(repository: &Repository, model: &str) -> String {
    let status = repository.status();
    let found = status.iter().find(|found| found.model == model).unwrap();
    format!("{:?}", found.state)
}

fn pair(a: i64, b: i64) -> Vec<Tensor> {
    [("a", a), ("b", b)]
        .map(|(name, value)| Tensor::new(name, vec![1], Data::Int64(vec![value])).unwrap())
        .into()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_that_may_end_the_process_by_a_division_are_refused_unless_the_user_vouches_for_them() {
    let models = ["vouched", "denied"].map(|name| {
        let trusted_divisors = Some(name == "vouched");
        (name.to_owned(), ModelOptions { trusted_divisors, ..ModelOptions::default() })
    });
    let more = [("bounded", true), ("free", false), ("vouched", false), ("denied", false)];
    let more = more.map(|(name, bounded)| (name, 1, quotient(bounded)));
    let server = Server::start(Config { models: models.into(), ..config() }, &more).await;
    for name in ["free", "denied"] {
        let reason = reason(server.serving.repository(), name);
        assert!(reason.contains("Div_output") && reason.contains("trusted_divisors"), "{reason}");
    }
    let mut client = server.client().await;
    for name in ["bounded", "vouched"] {
        let answer = client.infer(name, None, pair(7, 2), Form::Raw).await.unwrap();
        assert_eq!(answer.outputs[0].data, Data::Int64(vec![3]), "{name}");
    }
    let answer = client.infer("bounded", None, pair(7, 0), Form::Raw).await.unwrap();
    assert_eq!(answer.outputs[0].data, Data::Int64(vec![7]));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lstm_without_steps_is_a_bad_request_and_the_server_survives() {
    let server = Server::start(config(), &[("lstm", 1, lstm())]).await;
    let mut client = server.client().await;
    let input = |rows: i64, steps: i64| {
        let values = (0..rows * steps * 3).map(|place| place as f32 / 10.0).collect();
        vec![Tensor::fp32("input", vec![rows, steps, 3], values).unwrap()]
    };
    for (rows, steps) in [(1, 0), (0, 1), (0, 0), (2, 0)] {
        let refused = client.infer("lstm", None, input(rows, steps), Form::Raw).await.unwrap_err();
        let ClientError::Refused { code, message, .. } = &refused else { panic!("{refused}") };
        assert_eq!(*code, Code::InvalidArgument, "{message}");
        assert!(message.contains("\"input\" has no elements"), "{message}");
    }
    let answer = client.infer("lstm", None, input(2, 5), Form::Raw).await.unwrap();
    assert_eq!(answer.outputs[0].shape, [2, 2]);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_warm_up_without_elements_is_refused_where_the_graph_cannot_take_it() {
    let dir = tempfile::tempdir().unwrap();
    let warmup = "model_warmup { name: \"none\" batch_size: 1 inputs { key: \"input\" value { \
        data_type: TYPE_FP32 dims: [ 0, 3 ] zero_data: true } } }";
    put(dir.path(), "lstm/config.pbtxt", format!("max_batch_size: 4 {warmup}"));
    put(dir.path(), "lstm/1/model.onnx", lstm());
    publish(dir.path(), "mlp", 1, mlp()).await;
    let server = Server::over(config(), dir).await;
    let reason = reason(server.serving.repository(), "lstm");
    assert!(reason.contains("model_warmup: an input has no elements"), "{reason}");
    let ready = server.http("GET", "/v2/models/mlp/ready", &[], b"").await;
    assert_eq!(ready.status, 200);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn onnx_file_that_begins_like_another_format_runs_as_onnx() {
    // The name of its producer puts the magic of ONNX Runtime's own format at its expected offset.
    let mark = ModelProto { producer_name: Some("abORTM".into()), ..Default::default() }.encode_to_vec();
    let onnx = [mark, mlp()].concat();
    assert_eq!(&onnx[4..8], b"ORTM");
    let server = Server::start(config(), &[("both", 1, onnx)]).await;
    let row = [0.5, -1.0, 2.0, 0.25];
    let input = Tensor::fp32("input", vec![1, FEATURES as i64], row.to_vec()).unwrap();
    let answer = server.client().await.infer("both", None, vec![input], Form::Raw).await.unwrap();
    let Data::Fp32(found) = &answer.outputs[0].data else { panic!("{answer:?}") };
    let expected = mlp_logits(&row);
    assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5), "{found:?}");
    server.stop().await;
}

/// Copies each row in as many pieces as the graph believes its rows to have: `input` FP32 [batch, 4] to
/// `output`.
fn measured(declared: i64) -> Vec<u8> {
    let graph = GraphProto {
        name: Some("measured".into()),
        node: vec![
            node("Relu", &["input"], "hidden"),
            node("Shape", &["hidden"], "shape"),
            node("Reshape", &["hidden", "shape"], "output"),
        ],
        input: vec![value("input", Float, &[-1, FEATURES as i64])],
        output: vec![value("output", Float, &[-1, FEATURES as i64])],
        value_info: vec![value("hidden", Float, &[declared, FEATURES as i64])],
        ..Default::default()
    };
    model(graph)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn declared_shapes_that_are_wrong_change_no_answer() {
    let more = [("wrong", 1, measured(1)), ("right", 1, measured(-1))];
    let server = Server::start(config(), &more).await;
    let mut client = server.client().await;
    let values: Vec<f32> = (0..3 * FEATURES).map(|place| place as f32).collect();
    for name in ["wrong", "right"] {
        let input = Tensor::fp32("input", vec![3, FEATURES as i64], values.clone()).unwrap();
        let answer = client.infer(name, None, vec![input], Form::Raw).await.unwrap();
        let expected = Tensor::fp32("output", vec![3, FEATURES as i64], values.clone()).unwrap();
        assert_eq!(answer.outputs, [expected], "{name}");
    }
    server.stop().await;
}
