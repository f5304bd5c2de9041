//! Tests of branches, loops, numbers of rows and places of pools that are refused.

use millrace_bundle::onnx::attribute_proto::AttributeType;
use millrace_bundle::onnx::{AttributeProto, GraphProto, NodeProto};

use super::*;

fn inner(op: &str, inputs: &[&str], output: &str) -> NodeProto {
    NodeProto {
        input: inputs.iter().map(|name| (*name).to_owned()).collect(),
        output: vec![output.to_owned()],
        op_type: Some(op.into()),
        ..Default::default()
    }
}

fn graph(name: &str, node: Vec<NodeProto>, inputs: &[&str], outputs: &[&str]) -> AttributeProto {
    let infos = |names: &[&str]| names.iter().map(|name| info(name, None)).collect();
    let graph = GraphProto { node, input: infos(inputs), output: infos(outputs), ..Default::default() };
    AttributeProto {
        name: Some(name.into()),
        r#type: Some(AttributeType::Graph as i32),
        g: Some(graph),
        ..Default::default()
    }
}

/// An `If` on `x · w` of `[rows, 4]`, with a condition by `build`.
fn chosen(build: impl FnOnce(&mut Probe, &str) -> String) -> ModelProto {
    let mut probe = Probe::new(17, &[4]);
    let w = probe.param(&[4]);
    let scaled = probe.node("Mul", &["x", &w], vec![]);
    let condition = build(&mut probe, &scaled);
    let then = graph("then_branch", vec![inner("Tanh", &[&scaled], "bent")], &[], &["bent"]);
    let other = graph("else_branch", vec![inner("Unique", &[&scaled], "odd")], &[], &["odd"]);
    let out = probe.node("If", &[&condition], vec![then, other]);
    probe.finish(&out)
}

#[test]
fn the_branch_that_is_not_taken_may_hold_any_operator() {
    let taken = chosen(|p, _| p.flags(&[], &[true]));
    assert_eq!(Graph::read(&taken).unwrap().nodes().len(), 2);
    refused(&chosen(|p, _| p.flags(&[], &[false])), "uses operator Unique");
}

#[test]
fn conditions_of_rows_and_branches_that_do_not_fit_are_refused() {
    let computed = chosen(|p, scaled| {
        let (zero, axes) = (p.constant(&[], vec![0.0]), p.shape(&[1]));
        let sum = p.node("ReduceSum", &[scaled, &axes], vec![int("keepdims", 0)]);
        p.node("Less", &[&sum, &zero], vec![])
    });
    refused(&computed, "computed from the rows");
    refused(&chosen(|p, _| p.flags(&[2], &[true, false])), "computed from the rows");
    let mut model = chosen(|p, _| p.flags(&[], &[true]));
    let branching = |model: &mut ModelProto| model.graph.as_mut().unwrap().node.last_mut().unwrap().clone();
    let mut node = branching(&mut model);
    node.output.push("second".into());
    *model.graph.as_mut().unwrap().node.last_mut().unwrap() = node;
    refused(&model, "1 outputs for 2");
    let mut model = chosen(|p, _| p.flags(&[], &[true]));
    model.graph.as_mut().unwrap().node.last_mut().unwrap().attribute.clear();
    refused(&model, "its graph then_branch is missing");
}

/// A loop over `x · w` with this number of steps, whose body gives `outputs`.
fn repeated(steps: i64, outputs: &[&str]) -> ModelProto {
    let mut probe = Probe::new(17, &[4]);
    let w = probe.param(&[4]);
    let (count, on) = (probe.index(steps), probe.flags(&[], &[true]));
    let scaled = probe.node("Mul", &["x", &w], vec![]);
    let nodes = vec![inner("Identity", &["on"], "still"), inner("Tanh", &["state"], "next")];
    let body = graph("body", nodes, &["at", "on", "state"], outputs);
    let out = probe.node("Loop", &[&count, &on, &scaled], vec![body]);
    probe.finish(&out)
}

#[test]
fn loops_run_their_steps_within_a_bound() {
    assert_eq!(Graph::read(&repeated(3, &["still", "next"])).unwrap().nodes().len(), 4);
    assert_eq!(Graph::read(&repeated(0, &["still", "next"])).unwrap().nodes().len(), 1);
    refused(&repeated(i64::MAX, &["still", "next"]), "more than 1024 steps");
    refused(&repeated(3, &["still"]), "its body has 3 inputs and 1 outputs");
    refused(&repeated(3, &["next", "next"]), "the condition of its next step");
}

#[test]
fn steps_that_become_too_many_bytes_are_refused() {
    let model = |bytes: usize| {
        let mut model = repeated(1000, &["still", "next"]);
        let node = model.graph.as_mut().unwrap().node.last_mut().unwrap();
        node.attribute[0].g.as_mut().unwrap().node[1].doc_string = Some("x".repeat(bytes));
        model
    };
    assert_eq!(Graph::read(&model(1 << 10)).unwrap().nodes().len(), 1001);
    refused(&model(1 << 20), "bytes of nodes");
}

#[test]
fn numbers_of_rows_are_read_at_parts_of_the_row_only() {
    let model = |used: &str| {
        let mut probe = Probe::new(17, &[4]);
        let w = probe.param(&[4]);
        let scaled = probe.node("Mul", &["x", &w], vec![]);
        let rows = probe.node("Shape", &["x"], vec![int("start", 0), int("end", 1)]);
        let rows = probe.node("Squeeze", &[&rows], vec![]);
        let (zero, one, axis) = (probe.index(0), probe.index(1), probe.shape(&[1]));
        let numbers = probe.node("Range", &[&zero, &rows, &one], vec![]);
        let out = match used {
            "number" => {
                let numbers = probe.node("Cast", &[&numbers], vec![int("to", 1)]);
                let numbers = probe.node("Unsqueeze", &[&numbers, &axis], vec![]);
                probe.node("Mul", &[&scaled, &numbers], vec![])
            }
            "next" => {
                let numbers = probe.node("Add", &[&numbers, &one], vec![]);
                probe.node("Gather", &[&scaled, &numbers], vec![])
            }
            _ => probe.node("Gather", &[&scaled, &numbers], vec![]),
        };
        probe.finish(&out)
    };
    Graph::read(&model("own")).unwrap();
    refused(&model("number"), "reads the number of a row");
    refused(&model("next"), "not known to be within an axis of 1");
}

#[test]
fn places_of_a_pool_are_for_unpooling_alone() {
    let model = |strides: i64, op: &str| {
        let mut probe = Probe::new(17, &[1, 4, 4]);
        let w = probe.param(&[4, 4]);
        let scaled = probe.node("Mul", &["x", &w], vec![]);
        let attributes = vec![ints("kernel_shape", &[2, 2]), ints("strides", &[strides, strides])];
        let found = probe.nodes("MaxPool", &[&scaled], attributes.clone(), 2);
        let out = match op {
            "MaxUnpool" => probe.node(op, &[&found[0], &found[1]], attributes),
            _ => {
                let places = probe.node("Cast", &[&found[1]], vec![int("to", 1)]);
                probe.node("Mul", &[&found[0], &places], vec![])
            }
        };
        probe.finish(&out)
    };
    Graph::read(&model(2, "MaxUnpool")).unwrap();
    refused(&model(1, "MaxUnpool"), "windows of its MaxPool overlap");
    refused(&model(2, "Mul"), "mixes rows");
}

/// An `If` that is taken, with these nodes in either branch, which give `then` and `other`.
fn taken(probe: &mut Probe, then: NodeProto, other: NodeProto) -> String {
    let condition = probe.flags(&[], &[true]);
    let [first, second] = [&then, &other].map(|node| node.output[0].clone());
    let then = graph("then_branch", vec![then], &[], &[&first]);
    let other = graph("else_branch", vec![other], &[], &[&second]);
    probe.node("If", &[&condition], vec![then, other])
}

#[test]
fn operands_that_a_branch_reads_from_outside_are_constants() {
    let mut probe = Probe::new(17, &[4]);
    let (w, low) = (probe.param(&[4]), probe.param_of(&[], vec![-0.5]));
    let scaled = probe.node("Mul", &["x", &w], vec![]);
    let clip = inner("Clip", &[&scaled, &low], "bent");
    let out = taken(&mut probe, clip, inner("Identity", &[&scaled], "same"));
    let mut model = probe.finish(&out);
    // PyTorch's earlier exporter keeps parameters of rank 0.
    model.producer_name = Some("pytorch".into());
    assert_eq!(names(&Graph::read(&model).unwrap()), [w]);
}

#[test]
fn a_branch_reads_the_places_of_a_pool_outside() {
    let mut probe = Probe::new(17, &[1, 4, 4]);
    let w = probe.param(&[4, 4]);
    let scaled = probe.node("Mul", &["x", &w], vec![]);
    let attributes = vec![ints("kernel_shape", &[2, 2]), ints("strides", &[2, 2])];
    let found = probe.nodes("MaxPool", &[&scaled], attributes.clone(), 2);
    let unpool = NodeProto { attribute: attributes, ..inner("MaxUnpool", &[&found[0], &found[1]], "wide") };
    let out = taken(&mut probe, unpool, inner("Identity", &[&scaled], "same"));
    Graph::read(&probe.finish(&out)).unwrap();
}

/// A dropout in training mode, and an `If` of which the branch that is not taken reads its mask.
#[test]
fn a_mask_that_only_another_branch_reads_is_refused() {
    let mut probe = Probe::new(17, &[4]);
    let (w, ratio, trains) = (probe.param(&[4]), probe.constant(&[], vec![0.25]), probe.index(1));
    let scaled = probe.node("Mul", &["x", &w], vec![]);
    let found = probe.nodes("Dropout", &[&scaled, &ratio, &trains], vec![], 2);
    let mask = inner("Identity", &[&found[1]], "mask");
    let out = taken(&mut probe, inner("Tanh", &[&found[0]], "bent"), mask);
    refused(&probe.finish(&out), "only its first output may be used");
}

#[test]
fn a_branch_of_another_output_in_training_mode_is_refused() {
    let model = |trains: i64| {
        let mut probe = Probe::new(17, &[4]);
        let (w, ratio) = (probe.param(&[4]), probe.constant(&[], vec![0.25]));
        let scaled = probe.node("Mul", &["x", &w], vec![]);
        let trains = if trains == 1 { probe.index(1) } else { String::new() };
        let drop = inner("Dropout", &[&scaled, &ratio, &trains], "less");
        let other = taken(&mut probe, drop, inner("Identity", &[&scaled], "same"));
        let out = probe.node("Tanh", &[&scaled], vec![]);
        let mut model = probe.finish(&out);
        model.graph.as_mut().unwrap().output.push(info(&other, None));
        (model, out)
    };
    let (model_in_evaluation, out) = model(0);
    Graph::read_output(&model_in_evaluation, Some(&out)).unwrap();
    let (model_in_training, out) = model(1);
    let error = Graph::read_output(&model_in_training, Some(&out)).unwrap_err().to_string();
    assert!(error.contains("it is in training mode, and output"), "{error}");
}

#[test]
fn a_dropout_of_a_branch_may_be_switched_off() {
    let model = |trains: bool| {
        let mut probe = Probe::new(17, &[4]);
        let (w, ratio) = (probe.param(&[4]), probe.constant(&[], vec![0.25]));
        let trains = probe.flags(&[], &[trains]);
        let scaled = probe.node("Mul", &["x", &w], vec![]);
        let drop = inner("Dropout", &[&scaled, &ratio, &trains], "less");
        let out = taken(&mut probe, drop, inner("Identity", &[&scaled], "same"));
        probe.finish(&out)
    };
    Graph::read(&model(false)).unwrap();
    refused(&model(true), "in training mode within a branch");
}

#[test]
fn joined_steps_take_no_name_of_the_model() {
    let mut model = repeated(3, &["still", "next", "next"]);
    let nodes = &mut model.graph.as_mut().unwrap().node;
    let node = nodes.last_mut().unwrap();
    node.output.insert(0, "last".into());
    let other = format!("{}/0", node.output[1]);
    nodes.push(inner("Identity", &["x"], &other));
    // The steps come first, but all names are free.
    refused(&model, "[rows, …] is needed");
}
