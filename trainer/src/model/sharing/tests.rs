//! Tests of merged and copied weights, on models of the zoo.

use std::path::Path;

use millrace_bundle::onnx::{GraphProto, ModelProto, NodeProto, StringStringEntryProto, TensorProto};
use prost::Message;

use super::{Restored, calls, is_further_call, like, numbered, restore};
use crate::graph::Graph;
use crate::probe::{self, run_reference, runtime};

fn exported(name: &str) -> ModelProto {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/zoo").join(name).with_extension("onnx");
    ModelProto::decode(&std::fs::read(path).unwrap()[..]).unwrap()
}

fn restored(name: &str) -> Restored {
    let mut model = exported(name);
    let restored = restore(&mut model);
    assert_eq!(restore(&mut model), Restored::default(), "{name}: a second time");
    restored
}

#[test]
fn merged_parameters_of_new_layers_are_separate() {
    for exporter in ["default", "earlier"] {
        let found = restored(&format!("{exporter}/encoder_layer"));
        let names = ["layer.norm2.weight", "layer.norm2.bias"];
        assert!(
            names.iter().all(|name| found.separated.iter().any(|found| found == name)),
            "{exporter}: {found:?}"
        );
        assert_eq!(found.tied, [""; 0]);
    }
    let copies = restored("default/bert_4_layers").separated;
    for layer in 1..4 {
        let weight = format!("layers.layers.{layer}.self_attn.out_proj.weight");
        assert!(copies.contains(&weight), "{copies:?}");
    }
}

#[test]
fn tied_and_transposed_weights_are_tied() {
    assert_eq!(
        restored("default/tied_embedding"),
        Restored { tied: vec!["t".into()], ..Restored::default() }
    );
    assert_eq!(restored("earlier/tied_embedding").tied.len(), 1);
    assert_eq!(restored("earlier/transposed_weight").tied.len(), 1);
    for model in ["default/tied_layers", "default/layer_called_twice", "earlier/layer_called_twice"] {
        assert_eq!(restored(model), Restored::default(), "{model}");
    }
}

/// What the earlier exporter folds from one parameter for two nodes, and layers that only look alike.
#[test]
fn squares_of_a_parameter_are_computed_and_equal_layers_stay_apart() {
    let squares = exported("earlier/cosine_similarity");
    assert_eq!(restored("earlier/cosine_similarity").tied.len(), 1);
    assert_eq!(restored("earlier/bert_4_layers").tied, [""; 0]);
    let tensor = |name: &str, values: &[f32]| TensorProto {
        name: Some(name.to_owned()),
        dims: vec![values.len() as i64],
        data_type: Some(1),
        float_data: values.to_vec(),
        ..TensorProto::default()
    };
    let node = |op: &str, name: &str, inputs: &[&str]| NodeProto {
        op_type: Some(op.to_owned()),
        name: Some(name.to_owned()),
        input: inputs.iter().map(|input| (*input).to_owned()).collect(),
        output: vec![format!("{name}_output_0")],
        ..NodeProto::default()
    };
    let tied = |nodes: Vec<NodeProto>, tensors: Vec<TensorProto>| {
        let mut model = squares.clone();
        model.graph = Some(GraphProto { node: nodes, initializer: tensors, ..GraphProto::default() });
        restore(&mut model).tied
    };
    let (x, y) = (tensor("onnx::A_1", &[1.0, 3.0]), tensor("onnx::A_2", &[1.0, 3.0]));
    let both = || vec![x.clone(), y.clone()];
    let reads = |path: &str| {
        vec![
            node("Mul", &format!("{path}/Mul"), &["x", "onnx::A_1"]),
            node("Add", &format!("{path}/Add"), &["x", "onnx::A_2"]),
        ]
    };
    assert_eq!(tied(reads("/part"), both()), ["onnx::A_2"]);
    assert_eq!(tied(reads(""), both()), [""; 0], "nodes of the outermost module");
    let layers = vec![
        node("LSTM", "/rnn/LSTM", &["x", "onnx::A_1"]),
        node("LSTM", "/rnn/LSTM_1", &["x", "onnx::A_2"]),
    ];
    assert_eq!(tied(layers, both()), [""; 0], "layers of one module");
    // A square of a square stays.
    let powers = vec![
        tensor("onnx::A_1", &[2.0, 3.0]),
        tensor("onnx::A_2", &[4.0, 9.0]),
        tensor("onnx::A_3", &[16.0, 81.0]),
    ];
    let mut nodes = reads("/part");
    nodes.push(node("Sub", "/part/Sub", &["x", "onnx::A_3"]));
    assert_eq!(tied(nodes, powers), ["onnx::A_2"]);
}

#[test]
fn outputs_stay_equal() {
    let models = [
        ("default/bert_4_layers", 8),
        ("earlier/bert_4_layers", 8),
        ("default/tied_embedding", 6),
        ("earlier/transposed_weight", 8),
        ("earlier/cosine_similarity", 8),
    ];
    for (name, width) in models {
        let before = exported(name);
        let mut after = before.clone();
        assert_ne!(restore(&mut after), Restored::default());
        let inputs = probe::inputs(&Graph::read(&after).unwrap(), 3, 1);
        let outputs =
            [before, after].map(|model| run_reference(runtime(), &model, &[width], 3, &inputs).unwrap());
        assert_eq!(outputs[0], outputs[1], "{name}");
    }
}

#[test]
fn batch_normalizations_exported_in_training_are_in_training_mode() {
    let found = restored("default/resnet18_narrow");
    assert_eq!(found.training.len(), 20, "{found:?}");
    assert_eq!(restored("earlier/resnet18_narrow").training, [""; 0]);
}

#[test]
fn models_of_other_origin_stay_as_they_are() {
    let mut model = exported("default/encoder_layer");
    model.producer_name = Some("another".into());
    assert_eq!(restore(&mut model), Restored::default());
    assert_eq!(restore(&mut ModelProto::default()), Restored::default());
}

#[test]
fn an_oversized_graph_stays_as_it_is() {
    let mut model = exported("default/encoder_layer");
    let graph = model.graph.as_mut().unwrap();
    let info = graph.value_info[0].clone();
    graph.value_info.resize(super::OPERANDS_MAX + 1, info);
    assert_eq!(restore(&mut model), Restored::default());
}

#[test]
fn names_in_calls_get_their_dots_back() {
    assert_eq!(
        like("layers.9.inProj_weight", "layers_10_inproj_weight").as_deref(),
        Some("layers.10.inProj_weight")
    );
    for other in ["layers_9_out_weight", "layers_9_inproj", "layers_9_inproj_weight_x"] {
        assert_eq!(like("layers.9.inProj_weight", other), None, "{other}");
    }
}

/// Quoted calls of which a trial found that the wrong operand was taken.
#[test]
fn calls_tell_which_parameter_an_operand_is() {
    let node = |op: &str, call: &str| NodeProto {
        op_type: Some(op.to_owned()),
        metadata_props: vec![StringStringEntryProto {
            key: Some("pkg.torch.onnx.fx_node".to_owned()),
            value: Some(format!(
                "%y : [num_users=1] = call_function[target=torch.ops.aten.{call}, kwargs = {{}})"
            )),
        }],
        ..NodeProto::default()
    };
    let norm = "layer_norm.default](args = (%p_lat, [8], %p_n_weight, %p_n_bias, 1e-05)";
    let linear = "linear.default](args = (%p_queries, %p_w, %p_b)";
    let addmm = "addmm.default](args = (%p_b, %x, %p_w)";
    for (op, call, expected) in [
        ("LayerNormalization", norm, [Some("lat"), Some("n_weight"), Some("n_bias")]),
        ("MatMul", linear, [Some("queries"), Some("w"), Some("b")]),
        ("Gemm", addmm, [None, Some("w"), Some("b")]),
        ("Conv", "conv2d.default](args = (%x, %p_c_weight)", [None, Some("c_weight"), None]),
        ("LSTM", "lstm.input](args = (%x, [%h], [%p_a, %p_b], True)", [None, None, None]),
    ] {
        let node = node(op, call);
        assert_eq!([0, 1, 2].map(|at| calls::parameter(&node, at)), expected, "{call}");
    }
}

#[test]
fn paths_that_differ_in_numbers_only_are_those_of_copies() {
    assert_eq!(numbered("layers.0.a", "layers.12.a"), Some(("layers.0", "layers.12")));
    assert_eq!(numbered("a.0.b.1", "a.2.b.3"), Some(("a.0.b.1", "a.2.b.3")));
    for (one, other) in
        [("layers.0", "layers.0"), ("layers.0", "layers.a"), ("a.0", "b.0"), ("0.a", "0"), ("", "1")]
    {
        assert_eq!(numbered(one, other), None, "{one} {other}");
    }
}

#[test]
fn numbered_calls_are_those_of_one_module() {
    for (path, first, expected) in [
        ("norm_1", "norm", true),
        ("a.norm_12", "a.norm", true),
        ("a_1.norm", "a.norm", true),
        ("b.norm", "a.norm", false),
        ("norm_a", "norm", false),
        ("a.norm", "norm", false),
        ("norm", "norm_1", false),
    ] {
        assert_eq!(is_further_call(path, first), expected, "{path} {first}");
    }
}

/// Scales of two new layers, which the earlier exporter writes once, and those of a layer that is called twice.
#[test]
fn equal_scales_without_names_are_separate_unless_one_layer_is_called_twice() {
    let node = |op: &str, name: &str, inputs: [&str; 2], output: &str| NodeProto {
        op_type: Some(op.to_owned()),
        name: Some(name.to_owned()),
        input: inputs.iter().filter(|input| !input.is_empty()).map(|input| (*input).to_owned()).collect(),
        output: vec![output.to_owned()],
        ..NodeProto::default()
    };
    let model = |second: &str, last: f32| ModelProto {
        producer_name: Some("pytorch".to_owned()),
        ir_version: Some(8),
        graph: Some(GraphProto {
            node: vec![
                node("Identity", "Identity_0", ["onnx::Mul_1", ""], "onnx::Mul_2"),
                node("Mul", "/a/norm/Mul", ["x", "onnx::Mul_1"], "/a/norm/Mul_output_0"),
                node("Mul", second, ["/a/norm/Mul_output_0", "onnx::Mul_2"], "y"),
            ],
            initializer: vec![TensorProto {
                name: Some("onnx::Mul_1".to_owned()),
                dims: vec![2],
                data_type: Some(1),
                float_data: vec![1.0, last],
                ..TensorProto::default()
            }],
            ..GraphProto::default()
        }),
        ..ModelProto::default()
    };
    for (second, last, expected) in
        [("/b/norm/Mul", 1.0, &["onnx::Mul_2"][..]), ("/a/norm_1/Mul", 1.0, &[]), ("/b/norm/Mul", 2.0, &[])]
    {
        assert_eq!(restore(&mut model(second, last)).separated, expected, "{second} {last}");
    }
}
