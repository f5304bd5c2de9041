//! Tests of nodes with a training mode that the reader must take, or refuse by name.

use millrace_bundle::onnx::{ModelProto, NodeProto, TensorProto, tensor_proto};

use crate::graph::Graph;
use crate::probe::{Probe, float, info, int};

/// A model with one batch normalisation in training mode, after a change by `spoil`.
fn spoiled(opset: i64, spoil: impl FnOnce(&mut ModelProto)) -> Result<Graph, String> {
    let mut probe = Probe::new(opset, &[3]);
    let weights = probe.param(&[3, 3]);
    let product = probe.node("MatMul", &["x", &weights], vec![]);
    let (scale, bias) = (probe.param(&[3]), probe.param(&[3]));
    let mean = probe.param_of(&[3], vec![0.0; 3]);
    let variance = probe.param_of(&[3], vec![1.0; 3]);
    let mut attributes = vec![float("epsilon", 1e-5), float("momentum", 0.9)];
    if opset >= 14 {
        attributes.push(int("training_mode", 1));
    }
    let outputs =
        probe.nodes("BatchNormalization", &[&product, &scale, &bias, &mean, &variance], attributes, 3);
    let head = probe.param(&[3, 2]);
    let output = probe.node("MatMul", &[&outputs[0], &head], vec![]);
    let mut model = probe.finish(&output);
    spoil(&mut model);
    Graph::read(&model).map_err(|error| error.to_string())
}

fn norm(model: &mut ModelProto) -> &mut NodeProto {
    let nodes = &mut model.graph.as_mut().unwrap().node;
    nodes.iter_mut().find(|node| node.op_type() == "BatchNormalization").unwrap()
}

fn tensor<'m>(model: &'m mut ModelProto, name: &str) -> &'m mut TensorProto {
    let tensors = &mut model.graph.as_mut().unwrap().initializer;
    tensors.iter_mut().find(|tensor| tensor.name() == name).unwrap()
}

#[test]
fn training_forms_of_batch_normalisation_have_states() {
    for opset in [7, 9, 13, 14, 15, 22] {
        let graph = spoiled(opset, |_| {}).unwrap();
        let names: Vec<&str> = graph.states().iter().map(|state| state.name.as_str()).collect();
        assert_eq!((names, graph.params().len()), (vec!["w3", "w4"], 4), "operator set {opset}");
        assert_eq!(graph.normalizations()[0].values(5), 5);
    }
    // In evaluation mode they are constants.
    let graph = spoiled(17, |model| {
        let node = norm(model);
        node.attribute.pop();
        node.output.truncate(1);
    });
    assert!(!graph.unwrap().has_training_mode());
    let graph = spoiled(13, |model| norm(model).output.truncate(1));
    assert!(!graph.unwrap().has_training_mode());
    let graph = spoiled(13, |model| norm(model).output[1..].iter_mut().for_each(String::clear));
    assert!(!graph.unwrap().has_training_mode());
}

#[test]
fn attributes_out_of_range_are_refused() {
    for (name, value, expected) in [
        ("epsilon", 0.0, "epsilon = 0: a number above 0"),
        ("epsilon", -1e-3, "epsilon = -0.001: a number above 0"),
        ("epsilon", -2.0, "a variance is 1"),
        ("epsilon", f32::NAN, "attribute epsilon is NaN"),
        ("momentum", 1.5, "momentum = 1.5: allowed are 0 to 1"),
        ("momentum", -0.1, "momentum = -0.1: allowed are 0 to 1"),
        ("momentum", f32::INFINITY, "attribute momentum is inf"),
    ] {
        let error = spoiled(17, |model| {
            let attribute = norm(model).attribute.iter_mut().find(|attribute| attribute.name() == name);
            attribute.unwrap().f = Some(value);
        })
        .unwrap_err();
        assert!(error.contains(expected) && error.contains("BatchNormalization"), "{error}");
    }
}

#[test]
fn statistics_that_are_not_the_nodes_own_are_refused() {
    type Spoil = fn(&mut ModelProto);
    let cases: [(Spoil, &str); 11] = [
        (|model| tensor(model, "w3").dims = vec![1, 3], "[1, 3] for 3 channels"),
        (
            |model| {
                let mean = tensor(model, "w3");
                mean.dims = vec![2];
                mean.float_data.pop();
            },
            "2 means and 3 variances",
        ),
        (|model| tensor(model, "w4").float_data[1] = -1.0, "a variance is -1"),
        (|model| tensor(model, "w3").float_data[1] = f32::INFINITY, "holds inf"),
        (
            |model| {
                let mean = tensor(model, "w3");
                mean.data_type = Some(tensor_proto::DataType::Double as i32);
                mean.double_data = mean.float_data.drain(..).map(f64::from).collect();
            },
            "\"w3\" is no float32 initializer",
        ),
        (|model| norm(model).input[4] = "w3".into(), "\"w3\" is also read elsewhere"),
        (|model| norm(model).input[3] = "w2".into(), "\"w2\" is also read elsewhere"),
        (
            |model| {
                // A second node with the same statistics.
                let twin = NodeProto { output: vec!["twin".into()], ..norm(model).clone() };
                model.graph.as_mut().unwrap().node.push(twin);
            },
            "is also read elsewhere",
        ),
        (
            |model| {
                let running = norm(model).output[1].clone();
                model.graph.as_mut().unwrap().node.last_mut().unwrap().input[0] = running;
                let first = norm(model).output[0].clone();
                norm(model).output = vec![first, "t1_1".into()];
            },
            "only its first output may be used",
        ),
        (
            |model| {
                let running = norm(model).output[2].clone();
                model.graph.as_mut().unwrap().output[0] = info(&running, None);
            },
            "only its first output may be used",
        ),
        (
            |model| {
                let running = norm(model).output[2].clone();
                model.graph.as_mut().unwrap().output.push(info(&running, None));
            },
            "2 outputs",
        ),
    ];
    for (number, (spoil, expected)) in cases.into_iter().enumerate() {
        let error = spoiled(17, spoil).unwrap_err();
        assert!(error.contains(expected), "case {number}: {error}");
    }
    let error =
        spoiled(17, |model| norm(model).attribute.retain(|a| a.name() != "training_mode")).unwrap_err();
    assert!(error.contains("only the first output"), "{error}");
}

/// A model with one dropout of the given attributes and operands.
fn dropout(opset: i64, producer: &str, ratio: f32, trains: Option<i64>) -> Result<Graph, String> {
    let mut probe = Probe::new(opset, &[3]);
    let weights = probe.param(&[3, 3]);
    let product = probe.node("MatMul", &["x", &weights], vec![]);
    let dropped = if opset < 12 {
        probe.node("Dropout", &[&product], vec![float("ratio", ratio)])
    } else {
        let ratio = probe.constant(&[], vec![ratio]);
        let trains = trains.map(|trains| probe.index(trains));
        let inputs: Vec<&str> = [product.as_str(), &ratio].into_iter().chain(trains.as_deref()).collect();
        probe.node("Dropout", &inputs, vec![])
    };
    let mut model = probe.finish(&dropped);
    model.producer_name = Some(producer.into());
    Graph::read(&model).map_err(|error| error.to_string())
}

#[test]
fn dropouts_train_where_the_model_says_so() {
    let ratios = |graph: Result<Graph, String>| -> Vec<f32> {
        graph.unwrap().dropouts().iter().map(|dropout| dropout.ratio).collect()
    };
    for opset in [12, 13, 22] {
        assert_eq!(ratios(dropout(opset, "pytorch", 0.25, Some(1))), [0.25]);
        assert_eq!(ratios(dropout(opset, "other", 0.25, Some(1))), [0.25]);
        assert!(ratios(dropout(opset, "pytorch", 0.25, Some(0))).is_empty());
        assert!(ratios(dropout(opset, "pytorch", 0.25, None)).is_empty());
        assert!(ratios(dropout(opset, "pytorch", 0.0, Some(1))).is_empty());
    }
    for opset in [7, 10, 11] {
        assert_eq!(ratios(dropout(opset, "pytorch", 0.25, None)), [0.25]);
        assert!(ratios(dropout(opset, "onnx-caffe2", 0.25, None)).is_empty());
    }
    for ratio in [1.0, 1.5, -0.1, f32::INFINITY] {
        let error = dropout(13, "pytorch", ratio, Some(1)).unwrap_err();
        assert!(error.contains("allowed are 0 to below 1"), "{error}");
    }
    // Outside training, the ratio has no meaning.
    assert!(dropout(13, "pytorch", 1.0, None).is_ok());
}
