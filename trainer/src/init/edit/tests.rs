//! Tests of edited models: their graphs, their weights and their refusals.

use millrace_bundle::onnx::{NodeProto, TensorProto};

use super::*;
use crate::engine::{Device, Engine, Labels, Loss, ShardBatch};
use crate::init::{CnnSpec, cnn, mlp};

fn layers(text: &[&str]) -> Vec<Layer> {
    text.iter().map(|layer| layer.parse().unwrap()).collect()
}

fn apply(model: &ModelProto, cut: Option<&str>, add: &[&str]) -> Result<ModelProto, EditError> {
    edit(model, &Edit { cut: cut.map(str::to_owned), layers: layers(add), seed: 3 })
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
    assert!(refused(Some(""), &["relu"]).contains("no node or value"));
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
