//! Tests of shared weights: comparison with sessions that do not share, and invalid graphs.
use millrace_bundle::onnx::*;
use ort::value::TensorRef;

use super::super::options;
use super::*;
use crate::runtime::Runtime;
use millrace_serving_core::config::Device;

fn builder() -> SessionBuilder {
    options::builder(Runtime::load().unwrap(), Device::Cpu, 1, false).unwrap()
}

fn floats(name: &str, dims: &[i64]) -> TensorProto {
    let count = dims.iter().product::<i64>();
    let value = |index: i64| ((index * 7919 + name.len() as i64) % 1013) as f32 / 1013.0 - 0.4;
    TensorProto {
        name: Some(name.into()),
        dims: dims.to_vec(),
        data_type: Some(DataType::Float as i32),
        raw_data: Some((0..count).flat_map(|index| value(index).to_le_bytes()).collect()),
        ..Default::default()
    }
}

fn node(op_type: &str, inputs: &[&str], output: &str) -> NodeProto {
    NodeProto {
        op_type: Some(op_type.into()),
        input: inputs.iter().map(ToString::to_string).collect(),
        output: vec![output.into()],
        ..Default::default()
    }
}

fn with_ints(mut node: NodeProto, name: &str, ints: &[i64]) -> NodeProto {
    use attribute_proto::AttributeType;
    let (kind, i, ints) = match ints {
        [one] => (AttributeType::Int, Some(*one), vec![]),
        all => (AttributeType::Ints, None, all.to_vec()),
    };
    let attribute =
        AttributeProto { name: Some(name.into()), r#type: Some(kind as i32), i, ints, ..Default::default() };
    node.attribute.push(attribute);
    node
}

fn value(name: &str, elem_type: DataType, shape: &[i64]) -> ValueInfoProto {
    use tensor_shape_proto::{Dimension, dimension::Value};
    let dim = |extent: &i64| Dimension { value: Some(Value::DimValue(*extent)), ..Default::default() };
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

fn model(graph: GraphProto) -> Vec<u8> {
    ModelProto {
        ir_version: Some(8),
        opset_import: vec![OperatorSetIdProto { domain: Some(String::new()), version: Some(17) }],
        graph: Some(graph),
        ..Default::default()
    }
    .encode_to_vec()
}

/// A convolution that absorbs a normalization, a flattened image through two matrix products, one of them transposed,
/// and a lookup table: `input` FP32 [2, 8, 16, 16] to `output` FP32 [2, 96].
fn network() -> GraphProto {
    let positive = |name: &str| {
        let mut tensor = floats(name, &[64]);
        tensor.raw_data = Some((0..64).flat_map(|index| (1.0 + index as f32 / 64.0).to_le_bytes()).collect());
        tensor
    };
    let rows = TensorProto {
        name: Some("rows".into()),
        dims: vec![2],
        data_type: Some(DataType::Int64 as i32),
        int64_data: vec![7, 300],
        ..Default::default()
    };
    GraphProto {
        name: Some("network".into()),
        node: vec![
            with_ints(node("Conv", &["input", "kernel"], "c"), "pads", &[1, 1, 1, 1]),
            node("BatchNormalization", &["c", "scale", "shift", "mean", "variance"], "n"),
            node("Relu", &["n"], "r"),
            with_ints(node("Flatten", &["r"], "f"), "axis", &[1]),
            with_ints(node("Gemm", &["f", "w1", "b1"], "g"), "transB", &[1]),
            node("MatMul", &["g", "w2"], "m"),
            node("Gather", &["table", "rows"], "t"),
            node("Add", &["m", "t"], "output"),
        ],
        initializer: vec![
            floats("kernel", &[64, 8, 3, 3]),
            positive("scale"),
            floats("shift", &[64]),
            floats("mean", &[64]),
            positive("variance"),
            floats("w1", &[64, 64 * 16 * 16]),
            floats("b1", &[64]),
            floats("w2", &[64, 96]),
            floats("table", &[400, 96]),
            rows,
        ],
        input: vec![value("input", DataType::Float, &[2, 8, 16, 16])],
        output: vec![value("output", DataType::Float, &[2, 96])],
        ..Default::default()
    }
}

fn output(session: &mut ort::session::Session) -> Vec<u32> {
    let elements: Vec<f32> = (0..2 * 8 * 16 * 16).map(|index| (index % 89) as f32 / 89.0 - 0.5).collect();
    let input = TensorRef::from_array_view(([2usize, 8, 16, 16], elements.as_slice())).unwrap();
    let outputs = session.run(ort::inputs![input]).unwrap();
    outputs["output"].try_extract_tensor::<f32>().unwrap().1.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn sessions_that_share_answer_bit_for_bit_as_ones_that_do_not() {
    let builder = builder();
    let onnx = model(network());
    let expected = output(&mut builder.clone().commit_from_memory(&onnx).unwrap());
    assert!(expected.iter().any(|bits| *bits != 0));
    let mut sessions = sessions(&builder, &builder, &onnx, 3).unwrap();
    assert_eq!(sessions.len(), 3);
    for session in &mut sessions {
        assert_eq!(output(session), expected);
    }
    // The other sessions still work after one was dropped.
    sessions.remove(0);
    for session in &mut sessions {
        assert_eq!(output(session), expected);
    }
}

#[test]
fn weights_that_a_request_may_give_or_that_two_graphs_have_stay_in_the_graph() {
    let mut graph = network();
    graph.input.push(value("w1", DataType::Float, &[64, 64 * 16 * 16]));
    let inner = GraphProto { initializer: vec![floats("table", &[400, 96])], ..Default::default() };
    let attribute = AttributeProto { g: Some(inner), ..Default::default() };
    graph.node.push(NodeProto { attribute: vec![attribute], ..Default::default() });
    let mut weights = Weights::default();
    take_weights(&mut graph, &mut weights).unwrap();
    let names: Vec<&str> = weights.0.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["kernel", "w2"], "biases are small");
    let taken = graph.initializer.iter().find(|tensor| tensor.name() == "w2").unwrap();
    assert_eq!((taken.raw_data.as_ref(), taken.dims.as_slice()), (None, [64, 96].as_slice()));
    let kept = graph.initializer.iter().find(|tensor| tensor.name() == "w1").unwrap();
    assert!(kept.external_data.is_empty() && kept.raw_data.is_some());
}

#[test]
fn inconsistent_graphs_are_refused_with_a_reason() {
    let builder = builder();
    let changed = |change: fn(&mut GraphProto)| {
        let mut graph = network();
        change(&mut graph);
        model(graph)
    };
    let whole = model(network());
    let cases = [
        ("nothing", vec![]),
        ("no model", b"this is no model".to_vec()),
        ("half a model", whole[..whole.len() / 2].to_vec()),
        ("an operator that is none", changed(|graph| graph.node[2].op_type = Some("Nothing".into()))),
        ("fewer elements", changed(|graph| graph.initializer[5].dims[0] += 1)),
        ("more elements", changed(|graph| graph.initializer[5].dims[0] -= 1)),
        ("a negative extent", changed(|graph| graph.initializer[5].dims[0] = -64)),
        ("extents without end", changed(|graph| graph.initializer[5].dims = vec![i64::MAX; 8])),
        (
            "half an element",
            changed(|graph| graph.initializer[5].raw_data.as_mut().unwrap().truncate(65_537)),
        ),
        ("a type that is none", changed(|graph| graph.initializer[5].data_type = Some(4711))),
        (
            "another file",
            changed(|graph| {
                let entry = StringStringEntryProto {
                    key: Some("location".into()),
                    value: Some("/etc/passwd".into()),
                };
                graph.initializer[5].external_data = vec![entry];
                graph.initializer[5].data_location = Some(DataLocation::External as i32);
            }),
        ),
    ];
    for (what, onnx) in cases {
        let reason = sessions(&builder, &builder, &onnx, 2).unwrap_err();
        assert!(!reason.is_empty() && reason.len() < 3_000, "{what}: {reason}");
    }
    let mut small = network();
    small.initializer.clear();
    small.node = vec![node("Relu", &["input"], "output")];
    small.output = vec![value("output", DataType::Float, &[2, 8, 16, 16])];
    let reason = sessions(&builder, &builder, &model(small), 2).unwrap_err();
    assert!(reason.contains("no weight"), "{reason}");
}
