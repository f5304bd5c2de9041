//! Time limit tests: a graph that loops forever, alone and beside a graph that does not.
use millrace_bundle::onnx::*;
use millrace_bundle::{Bundle, Lineage};
use prost::Message;
use tensor_proto::DataType::{Bool, Float, Int64};

use super::*;
use crate::session::sessions;
use millrace_serving_core::config::{Config, Devices};

fn value(name: &str, elem_type: tensor_proto::DataType, shape: &[i64]) -> ValueInfoProto {
    use tensor_shape_proto::{Dimension, dimension::Value};
    let dim = |extent: &i64| Dimension {
        value: Some(match extent {
            -1 => Value::DimParam("batch".into()),
            extent => Value::DimValue(*extent),
        }),
        ..Default::default()
    };
    let tensor = type_proto::Tensor {
        elem_type: Some(elem_type as i32),
        shape: Some(TensorShapeProto { dim: shape.iter().map(dim).collect() }),
    };
    ValueInfoProto {
        name: Some(name.into()),
        r#type: Some(TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..Default::default() }),
        ..Default::default()
    }
}

fn node(op_type: &str, inputs: &[&str], output: &str) -> NodeProto {
    NodeProto {
        op_type: Some(op_type.into()),
        name: Some(format!("{op_type}_{output}")),
        input: inputs.iter().map(ToString::to_string).collect(),
        output: vec![output.into()],
        ..Default::default()
    }
}

/// A bundle of one node from `input` FP32 [batch, 4] to `output`.
fn bundle(name: &str, node: NodeProto, initializer: Vec<TensorProto>) -> Bundle {
    let model = ModelProto {
        ir_version: Some(8),
        opset_import: vec![OperatorSetIdProto { domain: Some(String::new()), version: Some(17) }],
        graph: Some(GraphProto {
            name: Some(name.into()),
            node: vec![node],
            initializer,
            input: vec![value("input", Float, &[-1, 4])],
            output: vec![value("output", Float, &[-1, 4])],
            ..Default::default()
        }),
        ..Default::default()
    };
    Bundle::new(name, 1, model.encode_to_vec(), Lineage::default(), Default::default()).unwrap()
}

fn plain() -> Bundle {
    bundle("plain", node("Relu", &["input"], "output"), vec![])
}

fn endless() -> Bundle {
    let single = |name: &str, data_type: tensor_proto::DataType, raw: Vec<u8>| TensorProto {
        name: Some(name.into()),
        data_type: Some(data_type as i32),
        raw_data: Some(raw),
        ..Default::default()
    };
    let body = GraphProto {
        name: Some("body".into()),
        node: vec![node("Identity", &["go"], "go_on"), node("Add", &["state", "state"], "next")],
        input: vec![value("turn", Int64, &[]), value("go", Bool, &[]), value("state", Float, &[-1, 4])],
        output: vec![value("go_on", Bool, &[]), value("next", Float, &[-1, 4])],
        ..Default::default()
    };
    let mut turns = node("Loop", &["turns", "go_first", "input"], "output");
    turns.attribute.push(AttributeProto {
        name: Some("body".into()),
        r#type: Some(attribute_proto::AttributeType::Graph as i32),
        g: Some(body),
        ..Default::default()
    });
    let turns_max = single("turns", Int64, i64::MAX.to_le_bytes().to_vec());
    bundle("endless", turns, vec![turns_max, single("go_first", Bool, vec![1])])
}

fn config() -> Config {
    Config { sessions_max: 1, poll_ms: 0, ..Config::default() }
}

#[test]
fn a_limit_ends_runs_that_are_longer_and_no_others() {
    let attempt = |bundle: &Bundle, limit: Duration| {
        let mut session = sessions(bundle, &config(), &Devices::CPU).unwrap().remove(0);
        let input = Tensor::fp32("input", vec![1, 4], vec![1.0; 4]).unwrap();
        run(&mut session, &[input], &bundle.manifest().signature.outputs, limit)
    };
    let failure = attempt(&endless(), Duration::from_millis(200)).unwrap_err();
    assert!(matches!(failure, Failure::Endless(_)), "{failure}");
    let (outputs, _) = attempt(&plain(), RUN_MAX).unwrap();
    assert_eq!(outputs, [Tensor::fp32("output", vec![1, 4], vec![1.0; 4]).unwrap()]);
}

#[test]
fn a_graph_whose_warm_up_does_not_end_is_refused() {
    let build = |bundle: Bundle| crate::session::build(&bundle, &config(), None).map(drop);
    let error = build(endless()).unwrap_err().to_string();
    assert!(error.contains("model endless version 1") && error.contains("did not end within 5 s"), "{error}");
    build(plain()).unwrap();
}
