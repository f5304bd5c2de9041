//! Tests of models that the reader must reject, each with an error that names the location.

mod branches;
mod elements;
mod exported;
mod positions;
mod spatial;

use millrace_bundle::onnx::{
    ModelProto, StringStringEntryProto, TensorProto, tensor_proto, tensor_shape_proto, type_proto,
};
use proptest::prelude::*;
use prost::Message;

use super::*;
use crate::probe::{Probe, info, int, ints};

fn refused(model: &ModelProto, expected: &str) -> GraphError {
    let error = Graph::read(model).unwrap_err();
    assert!(error.to_string().contains(expected), "{error}");
    error
}

/// The model `x · w` after a change by `spoil`.
fn spoiled(spoil: impl FnOnce(&mut ModelProto)) -> ModelProto {
    let mut probe = Probe::new(17, &[4]);
    let w = probe.param(&[4, 3]);
    let out = probe.node("MatMul", &["x", &w], vec![]);
    let mut model = probe.finish(&out);
    spoil(&mut model);
    model
}

fn one_op(op: &str, row: &[i64], attributes: Vec<millrace_bundle::onnx::AttributeProto>) -> ModelProto {
    let mut probe = Probe::new(17, row);
    let w = probe.param(row);
    let scaled = probe.node("Mul", &["x", &w], vec![]);
    let out = probe.node(op, &[&scaled], attributes);
    probe.finish(&out)
}

#[test]
fn a_plain_model_is_read() {
    let graph = Graph::read(&spoiled(|_| {})).unwrap();
    assert_eq!((graph.input_width(), graph.output_width()), (4, 3));
    assert_eq!(graph.params().len(), 1);
    assert_eq!(graph.values()[graph.output()].dims, [Dim::Rows(1), Dim::Fixed(3)]);
}

#[test]
fn unsupported_operators_are_named_with_the_remedy() {
    let error = refused(&one_op("Unique", &[4], vec![]), "uses operator Unique");
    assert!(matches!(error, GraphError::UnsupportedOperator { .. }));
    assert!(error.to_string().contains("docs/reference/operators.md"), "{error}");
    let mut model = one_op("Relu", &[4], vec![]);
    model.graph.as_mut().unwrap().node[1].domain = Some("com.microsoft".into());
    refused(&model, "com.microsoft.Relu");
    refused(&one_op("Hardmax", &[4], vec![]), "cannot be trained");
}

#[test]
fn unknown_attributes_and_extra_tensors_are_refused() {
    refused(&one_op("Relu", &[4], vec![int("twist", 1)]), "\"twist\"");
    refused(&one_op("Softmax", &[4], vec![ints("axis", &[1])]), "attribute axis is INTS");
    let kernel = ints("kernel_shape", &[2, 2]);
    refused(
        &one_op("MaxPool", &[1, 4, 4], vec![kernel.clone(), int("storage_order", 1)]),
        "storage_order = 1",
    );
    refused(&one_op("MaxPool", &[1, 4, 4], vec![kernel.clone(), ints("pads", &[2, 2, 2, 2])]), "exceed half");
    refused(&one_op("MaxPool", &[1, 4, 4], vec![kernel.clone(), ints("strides", &[0, 1])]), "strides");
    refused(&one_op("MaxPool", &[1, 4, 4], vec![ints("kernel_shape", &[9, 2])]), "does not fit");
    let mut model = one_op("MaxPool", &[1, 4, 4], vec![kernel]);
    // Places of the largest elements that no node reads change nothing.
    model.graph.as_mut().unwrap().node[1].output.push("indices".into());
    Graph::read(&model).unwrap();
    model.graph.as_mut().unwrap().node[1].output.push("more".into());
    refused(&model, "only the first 2 outputs");
}

#[test]
fn operations_across_rows_are_refused() {
    refused(&one_op("Softmax", &[4], vec![int("axis", 0)]), "mixes rows");
    refused(&one_op("ReduceMean", &[4], vec![]), "mixes rows");
    refused(&one_op("Transpose", &[4], vec![]), "[rows, …] is needed");
    for (op, other) in [("MatMul", "turned"), ("Concat", "self")] {
        let mut probe = Probe::new(17, &[4]);
        let w = probe.param(&[4]);
        let scaled = probe.node("Mul", &["x", &w], vec![]);
        let turned = probe.node("Transpose", &[&scaled], vec![]);
        let right = if other == "turned" { &turned } else { &scaled };
        let attributes = if op == "Concat" { vec![int("axis", 0)] } else { vec![] };
        let out = probe.node(op, &[&scaled, right], attributes);
        refused(&probe.finish(&out), "mixes rows");
    }
    let mut probe = Probe::new(17, &[2, 3]);
    let w = probe.param(&[3]);
    let shape = probe.shape(&[6, -1]);
    let scaled = probe.node("Mul", &["x", &w], vec![]);
    let turned = probe.node("Transpose", &[&scaled], vec![ints("perm", &[1, 0, 2])]);
    let out = probe.node("Reshape", &[&turned, &shape], vec![]);
    refused(&probe.finish(&out), "mixes rows");
}

#[test]
fn gather_of_floats_and_shapes_with_misplaced_rows_are_refused() {
    let mut probe = Probe::new(17, &[4]);
    let w = probe.param(&[4]);
    let first = probe.index(0);
    let scaled = probe.node("Mul", &["x", &w], vec![]);
    let out = probe.node("Gather", &[&scaled, &first], vec![]);
    refused(&probe.finish(&out), "picks rows of the batch");
    let mut probe = Probe::new(17, &[4]);
    let w = probe.param(&[4]);
    let scaled = probe.node("Mul", &["x", &w], vec![]);
    let shape = probe.node("Shape", &[&scaled], vec![]);
    let out = probe.node("ReduceSum", &[&scaled, &shape], vec![]);
    refused(&probe.finish(&out), "depends on the number of rows");
    let mut probe = Probe::new(17, &[4]);
    let w = probe.param(&[4]);
    let past = probe.index(2);
    let scaled = probe.node("Mul", &["x", &w], vec![]);
    let shape = probe.node("Shape", &[&scaled], vec![]);
    let size = probe.node("Gather", &[&shape, &past], vec![]);
    let out = probe.node("Reshape", &[&scaled, &size], vec![]);
    refused(&probe.finish(&out), "axis 2");
}

#[test]
fn broken_wiring_is_refused() {
    let cycle = spoiled(|m| {
        let graph = m.graph.as_mut().unwrap();
        let mut back = graph.node[0].clone();
        back.op_type = Some("Add".into());
        back.input = vec!["x".into(), "t0".into()];
        back.output = vec!["loop".into()];
        graph.node[0].input[0] = "loop".into();
        graph.node.push(back);
    });
    assert!(matches!(Graph::read(&cycle), Err(GraphError::Cycle { .. })));
    let missing = spoiled(|m| m.graph.as_mut().unwrap().node[0].input[0] = "nowhere".into());
    assert!(matches!(Graph::read(&missing), Err(GraphError::MissingInput { .. })));
    refused(&spoiled(|m| m.graph.as_mut().unwrap().node[0].input[1].clear()), "input 1 is missing");
    refused(&spoiled(|m| m.graph.as_mut().unwrap().node[0].input.clear()), "input 0 is missing");
    refused(&spoiled(|m| m.graph = None), "holds no graph");
    refused(&spoiled(|m| m.graph.as_mut().unwrap().output.clear()), "it has no output");
    refused(&spoiled(|m| m.graph.as_mut().unwrap().output.push(info("w0", None))), "2 outputs");
    refused(&spoiled(|m| m.graph.as_mut().unwrap().output[0].name = Some("x".into())), "no node produces");
    let unread = spoiled(|m| m.graph.as_mut().unwrap().input.push(info("y", Some(&[1]))));
    assert_eq!(Graph::read(&unread).unwrap().input_width(), 5);
    refused(&spoiled(|m| m.graph.as_mut().unwrap().node[0].output[0] = "x".into()), "defined twice");
    refused(&spoiled(|m| m.opset_import.clear()), "no version");
    refused(&spoiled(|m| m.opset_import[0].version = Some(99)), "operator set 99");
    let nothing = spoiled(|m| {
        let graph = m.graph.as_mut().unwrap();
        graph.node[0].op_type = Some("Relu".into());
        graph.node[0].input.truncate(1);
    });
    refused(&nothing, "nothing to train");
}

#[test]
fn nodes_are_accepted_in_any_order_and_unused_ones_ignored() {
    let mut probe = Probe::new(17, &[4]);
    let w = probe.param(&[4]);
    let scaled = probe.node("Mul", &["x", &w], vec![]);
    probe.node("NonMaxSuppression", &[&scaled], vec![]);
    let out = probe.node("Relu", &[&scaled], vec![]);
    let mut model = probe.finish(&out);
    model.graph.as_mut().unwrap().node.reverse();
    assert_eq!(Graph::read(&model).unwrap().nodes().len(), 2);
}

fn weight(model: &mut ModelProto) -> &mut TensorProto {
    &mut model.graph.as_mut().unwrap().initializer[0]
}

#[test]
fn initializers_must_match_their_dimensions() {
    refused(
        &spoiled(|m| {
            weight(m).float_data.pop();
        }),
        "need 12 elements, its data holds 11",
    );
    refused(&spoiled(|m| weight(m).dims = vec![4, i64::MAX]), "exceed");
    refused(&spoiled(|m| weight(m).dims = vec![i64::MAX, i64::MAX]), "exceed");
    refused(&spoiled(|m| weight(m).dims = vec![4, -3]), "negative");
    refused(&spoiled(|m| weight(m).dims = vec![0, 3]), "");
    refused(&spoiled(|m| weight(m).dims = vec![1; 12]), "12 dimensions");
    refused(&spoiled(|m| weight(m).raw_data = Some(vec![0u8; 47])), "not a whole number of elements");
    refused(&spoiled(|m| weight(m).raw_data = Some(vec![0u8; 44])), "holds 11");
    refused(&spoiled(|m| weight(m).float_data[5] = f32::NAN), "element 5 is NaN");
    refused(&spoiled(|m| weight(m).data_type = Some(11)), "DOUBLE");
    refused(&spoiled(|m| weight(m).data_type = Some(12345)), "type 12345");
    refused(&spoiled(|m| weight(m).name = None), "no name");
    let external = spoiled(|m| {
        let tensor = weight(m);
        tensor.data_location = Some(tensor_proto::DataLocation::External as i32);
        tensor
            .external_data
            .push(StringStringEntryProto { key: Some("location".into()), value: Some("/etc/passwd".into()) });
    });
    refused(&external, "another file");
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    refused(&spoiled(|m| weight(m).dims = vec![3, 4]), "[rows, 4] and [3, 4] do not multiply");
    refused(&spoiled(|m| weight(m).dims = vec![12]), "do not multiply");
    fn input(model: &mut ModelProto, axis: usize, value: tensor_shape_proto::dimension::Value) {
        let info = &mut model.graph.as_mut().unwrap().input[0];
        let Some(type_proto::Value::TensorType(tensor)) = &mut info.r#type.as_mut().unwrap().value else {
            unreachable!()
        };
        tensor.shape.as_mut().unwrap().dim[axis].value = Some(value);
    }
    use tensor_shape_proto::dimension::Value;
    refused(&spoiled(|m| input(m, 0, Value::DimValue(8))), "fixed batch of 8");
    refused(&spoiled(|m| input(m, 1, Value::DimParam("n".into()))), "only the first may be");
    refused(&spoiled(|m| input(m, 1, Value::DimValue(-4))), "dimension of -4");
    refused(&spoiled(|m| input(m, 1, Value::DimValue(i64::MAX))), "more than");
    let mut probe = Probe::new(17, &[1 << 20]);
    let w = probe.param_of(&[1, 1 << 20], vec![0.0; 1 << 20]);
    let turned = probe.node("Transpose", &[&w], vec![]);
    let shape = probe.shape(&[-1, 1 << 20, 1]);
    let tall = probe.node("Reshape", &["x", &shape], vec![]);
    let square = probe.node("Mul", &[&tall, &w], vec![]);
    let out = probe.node("MatMul", &[&square, &turned], vec![]);
    refused(&probe.finish(&out), "more than");
    let mut probe = Probe::new(17, &[6]);
    let w = probe.param(&[6]);
    let shape = probe.shape(&[2, 3]);
    let scaled = probe.node("Mul", &["x", &w], vec![]);
    let out = probe.node("Reshape", &[&scaled, &shape], vec![]);
    refused(&probe.finish(&out), "write -1");
}

#[test]
fn a_deep_chain_does_not_exhaust_the_stack() {
    let mut probe = Probe::new(17, &[2]);
    let w = probe.param(&[2]);
    let mut value = probe.node("Mul", &["x", &w], vec![]);
    for _ in 0..20_000 {
        value = probe.node("Tanh", &[&value], vec![]);
    }
    assert_eq!(Graph::read(&probe.finish(&value)).unwrap().nodes().len(), 20_001);
}

/// A convolution with batch normalisation, as PyTorch's default exporter writes it; see folded.py beside it.
fn exported() -> ModelProto {
    ModelProto::decode(&include_bytes!("../../tests/fixtures/folded.onnx")[..]).unwrap()
}

fn names(graph: &Graph) -> Vec<&str> {
    graph.params().iter().map(|param| param.name.as_str()).collect()
}

#[test]
fn weights_that_the_exporter_folded_are_trained_and_buffers_are_not() {
    let model = exported();
    let graph = Graph::read(&model).unwrap();
    assert_eq!(names(&graph), ["conv.weight", "fc.weight", "fc.bias", "conv.weight_bias"]);
    let fixed: Vec<_> = graph.fixed(&model).iter().map(|tensor| tensor.name()).collect();
    assert_eq!(fixed, ["level"]);
    // Checkpoints of programs that kept the folded weights are of another run.
    assert!(graph.has_unmarked_params(&model));

    // A mark of a buffer counts more than the operator.
    let mut marked = model.clone();
    let mut info = info("conv.weight", None);
    let kind = "pkg.torch.export.graph_signature.InputSpec.kind";
    info.metadata_props =
        vec![StringStringEntryProto { key: Some(kind.into()), value: Some("BUFFER".into()) }];
    let infos = &mut marked.graph.as_mut().unwrap().value_info;
    infos.retain(|info| info.name() != "conv.weight");
    infos.push(info);
    assert_eq!(names(&Graph::read(&marked).unwrap()), ["fc.weight", "fc.bias", "conv.weight_bias"]);
    // So does the origin of a folded tensor.
    let infos = &mut marked.graph.as_mut().unwrap().value_info;
    let last = infos.last_mut().unwrap();
    last.metadata_props[0].key = Some("pkg.onnxscript.optimizer.folded_from".into());
    last.metadata_props[0].value = Some("['ones']".into());
    assert_eq!(names(&Graph::read(&marked).unwrap()), ["fc.weight", "fc.bias", "conv.weight_bias"]);
    assert!(!Graph::read(&spoiled(|_| {})).unwrap().has_unmarked_params(&spoiled(|_| {})));
}

proptest! {
    /// Reading a valid model with changed bytes always returns.
    #[test]
    fn mutated_models_never_panic(which in any::<prop::sample::Index>(), flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let cases = crate::probe::every_operator();
        let mut bytes = cases[which.index(cases.len())].1.encode_to_vec();
        for (index, value) in flips {
            let index = index.index(bytes.len());
            bytes[index] = value;
        }
        if let Ok(model) = ModelProto::decode(&bytes[..])
            && let Ok(graph) = Graph::read(&model)
        {
            prop_assert!(graph.initial_weights(&model).is_ok());
        }
    }
}
