//! Tests of edited models: their graphs, their weights and their refusals.

use millrace_bundle::onnx::{NodeProto, TensorProto};
use prost::Message;

use super::*;
use crate::engine::{Device, Engine, Labels, Loss, ShardBatch};
use crate::init::{CnnSpec, cnn, mlp};

fn layers(text: &[&str]) -> Vec<Layer> {
    text.iter().map(|layer| layer.parse().unwrap()).collect()
}

fn apply(model: &ModelProto, cut: Option<&str>, add: &[&str]) -> Result<ModelProto, EditError> {
    edit(model, &Edit { cut: cut.map(str::to_owned), layers: layers(add), seed: 3, ..Edit::default() })
}

fn names(model: &ModelProto) -> Vec<&str> {
    model.graph.as_ref().unwrap().initializer.iter().map(TensorProto::name).collect()
}

#[test]
fn a_head_is_replaced_and_the_body_keeps_its_weights() {
    let model = mlp(6, &[5, 4], 3, 1).unwrap();
    let edited = apply(&model, Some("dense2.relu"), &["linear=7", "relu", "linear=2"]).unwrap();
    // The old head is called so.
    assert_eq!(
        names(&edited),
        [
            "dense1.weight",
            "dense1.bias",
            "dense2.weight",
            "dense2.bias",
            "head.1.weight",
            "head.1.bias",
            "head.3.weight",
            "head.3.bias"
        ]
    );
    let weights = |model: &ModelProto| model.graph.as_ref().unwrap().initializer[..4].to_vec();
    assert_eq!(weights(&edited), weights(&model));
    let engine = Engine::load(&edited, Loss::CrossEntropy, Device::Cpu).unwrap();
    assert_eq!((engine.input_width(), engine.output_width()), (6, 2));
    let batch = ShardBatch {
        rows: 2,
        inputs: (0..12).map(|i| i as f32 - 4.0).collect(),
        labels: Labels::Class(vec![0, 0]),
    };
    let found = engine.gradients(&batch).unwrap();
    assert!(found.loss_sum.is_finite() && found.grad.iter().any(|slope| *slope != 0.0));
    // The same edit gives the same bits.
    assert_eq!(edited, apply(&model, Some("dense2.relu"), &["linear=7", "relu", "linear=2"]).unwrap());
}

#[test]
fn layers_continue_a_model_at_its_output() {
    let model = mlp(6, &[5], 3, 1).unwrap();
    let edited = apply(&model, None, &["relu", "linear=2"]).unwrap();
    let again = apply(&edited, None, &["linear=4"]).unwrap();
    // No name is used twice.
    let all = names(&again);
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len(), "{all:?}");
    assert_eq!(Graph::read(&again).unwrap().output_width(), 4);
}

#[test]
fn channels_are_pooled_or_flattened() {
    let spec = CnnSpec {
        height: 8,
        width: 8,
        channels: 1,
        filters: vec![4],
        hidden: vec![],
        classes: 10,
        scale: 1.0,
        seed: 1,
    };
    let model = spec.build().unwrap();
    for (add, weights) in [(["pool", "linear=2"], 4 * 2), (["flatten", "linear=2"], 4 * 16 * 2)] {
        let edited = apply(&model, Some("conv1.pool"), &add).unwrap();
        let head =
            edited.graph.as_ref().unwrap().initializer.iter().find(|t| t.name() == "head.2.weight").unwrap();
        assert_eq!(head.dims.iter().product::<i64>(), weights, "{add:?}");
    }
    let body = apply(&model, Some("conv1.relu"), &[]).unwrap();
    assert_eq!(Graph::read(&body).unwrap().output_width(), 4 * 64);
    assert!(body.graph.unwrap().output[0].r#type.is_some(), "servers need the shape");
}

#[test]
fn what_does_not_fit_is_refused_with_the_way_out() {
    let model = cnn(8, 8, 1, 10, 1).unwrap();
    let refused = |cut: Option<&str>, add: &[&str]| apply(&model, cut, add).unwrap_err().to_string();
    let text = refused(Some("nothing"), &["relu"]);
    assert!(text.contains("\"nothing\"") && text.contains("logits"), "{text}");
    assert!(refused(Some(""), &["relu"]).contains("no node, value or module"));
    let text = refused(Some("conv1.relu"), &["linear=3"]);
    assert!(text.contains("layer 1 (linear)") && text.contains("flatten or pool"), "{text}");
    let text = refused(None, &["relu", "pool"]);
    assert!(text.contains("layer 2 (pool)"), "{text}");
    assert!(refused(None, &["linear=1073741824"]).contains("weights"));
    assert!(apply(&ModelProto::default(), None, &["relu"]).is_err());
    for text in ["linear", "linear=0", "linear=-1", "linear=x", "Dense", ""] {
        assert!(text.parse::<Layer>().unwrap_err().contains("linear=N"), "{text}");
    }
}

#[test]
fn a_node_with_several_outputs_must_be_named_by_one() {
    let mut model = mlp(4, &[], 2, 1).unwrap();
    let node = NodeProto {
        name: Some("split".into()),
        op_type: Some("Split".into()),
        input: vec!["logits".into()],
        output: vec!["a".into(), "b".into()],
        ..NodeProto::default()
    };
    model.graph.as_mut().unwrap().node.push(node);
    let text = apply(&model, Some("split"), &["relu"]).unwrap_err().to_string();
    assert!(text.contains("a, b"), "{text}");
}

/// A convolution with batch normalisation, as PyTorch's default exporter writes it; see folded.py beside it.
fn exported() -> ModelProto {
    ModelProto::decode(&include_bytes!("../../../tests/fixtures/folded.onnx")[..]).unwrap()
}

fn trained(model: &ModelProto) -> Vec<String> {
    Graph::read(model).unwrap().params().iter().map(|param| param.name.clone()).collect()
}

#[test]
fn new_layers_of_an_exported_model_are_trained() {
    let model = exported();
    let head = ["head.1.weight", "head.1.bias", "head.3.weight", "head.3.bias"];
    let edited = apply(&model, Some("mul_6"), &["linear=5", "relu", "linear=2"]).unwrap();
    assert_eq!(trained(&edited)[2..], head);
    // Another program reads the marks, not the operators.
    let infos = &edited.graph.as_ref().unwrap().value_info;
    for name in head {
        let info = infos.iter().find(|info| info.name() == name).unwrap();
        assert!(info.metadata_props.iter().any(|entry| entry.value() == "PARAMETER"), "{name}");
    }
    // A step moves them.
    let mut engine = Engine::load(&edited, Loss::CrossEntropy, Device::Cpu).unwrap();
    let batch = ShardBatch {
        rows: 2,
        inputs: (0..128).map(|i| (i % 7) as f32 - 3.0).collect(),
        labels: Labels::Class(vec![0, 1]),
    };
    let found = engine.gradients(&batch).unwrap();
    for name in ["conv.weight", "head.3.weight"] {
        let param = engine.layout().params.iter().find(|param| param.name == name).unwrap();
        assert!(found.grad[param.range.clone()].iter().any(|slope| *slope != 0.0), "{name}");
    }
    engine
        .update(|weights| {
            weights.fill(0.25);
            Ok::<_, crate::engine::EngineError>(())
        })
        .unwrap();
    let moved = engine.export().unwrap();
    let tensors = &moved.graph.as_ref().unwrap().initializer;
    assert!(
        tensors.iter().any(|t| t.name() == "head.3.bias" && t.raw_data() == 0.25f32.to_le_bytes().repeat(2))
    );
    // Without the marked head that the cut removed, the marks still say what is new.
    let without = apply(&model, Some("mean"), &["flatten", "linear=2"]).unwrap();
    assert_eq!(trained(&without), ["conv.weight", "conv.weight_bias", "head.2.weight", "head.2.bias"]);
    // Models without marks get none.
    let plain = apply(&mlp(6, &[5], 3, 1).unwrap(), None, &["linear=2"]).unwrap();
    assert!(plain.graph.unwrap().value_info.is_empty());
}

#[test]
fn a_body_without_weights_gets_layers_and_a_body_alone_need_not_train() {
    let mut model = mlp(6, &[], 3, 1).unwrap();
    let relu = NodeProto {
        name: Some("first".into()),
        op_type: Some("Relu".into()),
        input: vec!["input".into()],
        output: vec!["first".into()],
        ..NodeProto::default()
    };
    let graph = model.graph.as_mut().unwrap();
    graph.node[0].input[0] = "first".into();
    graph.node.insert(0, relu);
    let edited = apply(&model, Some("first"), &["linear=2"]).unwrap();
    assert_eq!(trained(&edited), ["head.1.weight", "head.1.bias"]);
    let body = apply(&model, Some("first"), &[]).unwrap();
    assert_eq!(Graph::infer(&body).unwrap().output_width(), 6);
    let text = apply(&model, Some("first"), &["relu"]).unwrap_err().to_string();
    assert!(text.contains("nothing to train"), "{text}");
}

#[test]
fn a_name_that_stands_for_several_values_lists_them() {
    let mut model = mlp(6, &[5], 3, 1).unwrap();
    for node in &mut model.graph.as_mut().unwrap().node {
        node.name = Some("fc".into());
    }
    let text = apply(&model, Some("fc"), &["relu"]).unwrap_err().to_string();
    assert!(text.contains("dense1, dense1.relu, logits"), "{text}");
    // A value's own name is never ambiguous.
    assert!(apply(&model, Some("dense1"), &["relu", "linear=2"]).is_ok());
}

#[test]
fn outputs_without_a_name_are_no_values() {
    let mut model = mlp(4, &[], 2, 1).unwrap();
    let graph = model.graph.as_mut().unwrap();
    let node = |name: &str, op: &str, inputs: &[&str], outputs: &[&str]| NodeProto {
        name: Some(name.into()),
        op_type: Some(op.into()),
        input: inputs.iter().map(|input| (*input).into()).collect(),
        output: outputs.iter().map(|output| (*output).into()).collect(),
        ..NodeProto::default()
    };
    graph.node.push(node("drop", "Dropout", &["logits", "", ""], &["dropped", ""]));
    // Makes an output without a name, which nothing reads.
    graph.node.push(node("other", "Dropout", &["logits"], &["", "other.mask"]));
    let edited = apply(&model, Some("drop"), &["linear=2"]).unwrap();
    let names: Vec<_> = edited.graph.as_ref().unwrap().node.iter().map(NodeProto::name).collect();
    assert_eq!(names, ["logits", "drop", "head2.1"]);
}

#[test]
fn a_module_stands_for_the_value_that_it_gives() {
    let model = exported();
    for (name, value) in [("avgpool", "mean"), ("/avgpool", "mean"), ("bn", "getitem"), ("relu", "relu")] {
        assert_eq!(value_named(model.graph.as_ref().unwrap(), name).unwrap(), value, "{name}");
    }
    // The earlier exporter's names.
    let node = |name: &str, input: &str, output: &str| NodeProto {
        name: Some(name.into()),
        op_type: Some("Relu".into()),
        input: vec![input.into()],
        output: vec![output.into()],
        ..NodeProto::default()
    };
    let graph = GraphProto {
        node: vec![
            node("/layer1/layer1.0/conv1/Conv", "x", "a"),
            node("/layer1/layer1.0/relu/Relu", "a", "b"),
            node("/layer1/layer1.0/conv2/Conv", "b", "c"),
            node("/layer1/layer1.0/relu_1/Relu", "c", "d"),
            node("/layer10/Flatten", "d", "y"),
        ],
        output: vec![rows_info("y", &[1])],
        ..GraphProto::default()
    };
    for (name, value) in [
        ("layer1", "d"),
        ("/layer1", "d"),
        ("layer1.0", "d"),
        ("/layer1/layer1.0", "d"),
        ("layer1.0.conv2", "c"),
        ("/layer1/layer1.0/conv1", "a"),
        ("layer10", "y"),
    ] {
        assert_eq!(value_named(&graph, name).unwrap(), value, "{name}");
    }
    for name in ["layer", "layer1.", "/", "0", "conv1", "layer1.1"] {
        assert!(matches!(value_named(&graph, name), Err(EditError::NoValue { .. })), "{name}");
    }
}

#[test]
fn rows_of_one_value_are_flattened_before_a_layer() {
    let mut model = mlp(4, &[], 2, 1).unwrap();
    let axes = millrace_bundle::onnx::AttributeProto {
        name: Some("axes".into()),
        r#type: Some(millrace_bundle::onnx::attribute_proto::AttributeType::Ints as i32),
        ints: vec![1],
        ..Default::default()
    };
    let keep = millrace_bundle::onnx::AttributeProto {
        name: Some("keepdims".into()),
        r#type: Some(millrace_bundle::onnx::attribute_proto::AttributeType::Int as i32),
        i: Some(0),
        ..Default::default()
    };
    model.graph.as_mut().unwrap().node.push(NodeProto {
        name: Some("mean".into()),
        op_type: Some("ReduceMean".into()),
        input: vec!["logits".into()],
        output: vec!["mean".into()],
        attribute: vec![axes, keep],
        ..NodeProto::default()
    });
    let text = apply(&model, Some("mean"), &["linear=2"]).unwrap_err().to_string();
    assert!(text.contains("add flatten before it") && !text.contains("pool"), "{text}");
    assert!(apply(&model, Some("mean"), &["flatten", "linear=2"]).is_ok());
}

#[test]
fn a_dimension_of_the_inputs_gets_its_size_wherever_it_is_named() {
    use millrace_bundle::onnx::tensor_shape_proto::dimension::Value;
    use millrace_bundle::onnx::type_proto;
    let mut model = mlp(6, &[5], 3, 1).unwrap();
    let input = &mut model.graph.as_mut().unwrap().input[0];
    let Some(type_proto::Value::TensorType(tensor)) =
        input.r#type.as_mut().and_then(|kind| kind.value.as_mut())
    else {
        unreachable!()
    };
    let dims = &mut tensor.shape.as_mut().unwrap().dim;
    dims[0].value = Some(Value::DimParam("batch".into()));
    dims[1].value = Some(Value::DimParam("length".into()));
    let refused = Engine::load(&model, Loss::CrossEntropy, Device::Cpu).unwrap_err().to_string();
    assert!(refused.contains("--dim length=SIZE"), "{refused}");
    let fixed = |size: &str| edit(&model, &Edit { sizes: vec![size.parse().unwrap()], ..Edit::default() });
    let engine = Engine::load(&fixed("length=6").unwrap(), Loss::CrossEntropy, Device::Cpu).unwrap();
    assert_eq!(engine.input_width(), 6);
    for name in ["batch", "width"] {
        let error = fixed(&format!("{name}=6")).unwrap_err().to_string();
        assert!(error.contains("those are length"), "{error}");
    }
    for text in ["length", "length=0", "length=-1", "=4", "length=2000000000"] {
        assert!(text.parse::<NamedSize>().unwrap_err().contains("NAME=SIZE"), "{text}");
    }
}

#[test]
fn a_cut_keeps_what_branches_read_from_outside() {
    use crate::probe::{Probe, branch};
    let mut probe = Probe::new(17, &[4]);
    let (w, factor, condition) = (probe.param(&[4, 4]), probe.param(&[4]), probe.flags(&[], &[true]));
    let product = probe.node("MatMul", &["x", &w], vec![]);
    let bent = probe.node("Tanh", &[&product], vec![]);
    let then = branch("then_branch", "Mul", &[&bent, &factor], "scaled");
    let other = branch("else_branch", "Identity", &[&product], "same");
    let chosen = probe.node("If", &[&condition], vec![then, other]);
    let out = probe.node("Relu", &[&chosen], vec![]);
    let edited = apply(&probe.finish(&out), Some(&chosen), &["linear=2"]).unwrap();
    assert_eq!(names(&edited), [w.as_str(), &factor, &condition, "head.1.weight", "head.1.bias"]);
}
