//! Tests of the row proof on idioms of exporters: computed shapes, functions, subgraphs.

use millrace_bundle::onnx::attribute_proto::AttributeType;
use millrace_bundle::onnx::tensor_proto::DataType;
use millrace_bundle::onnx::{AttributeProto, FunctionProto, GraphProto, NodeProto, OperatorSetIdProto};

use super::support::{Build, accepted, info, inner, int, ints, refused};

/// One extent of a value, as a scalar or as a list of one.
fn extent(g: &mut Build, value: &str, axis: i64, as_list: bool) -> String {
    let shape = g.node("Shape", &[value], vec![]);
    let place = g.number(axis);
    let extent = g.node("Gather", &[&shape, &place], vec![int("axis", 0)]);
    if !as_list {
        return extent;
    }
    let axes = g.list(&[0]);
    g.node("Unsqueeze", &[&extent, &axes], vec![])
}

#[test]
fn heads_of_attention_are_split_and_merged_by_computed_shapes() {
    for opset in [13, 17, 21] {
        accepted(opset, &[-1, 8], |g| {
            let (rows, steps) = (extent(g, "x", 0, true), extent(g, "x", 1, true));
            let (heads, width) = (g.list(&[2]), g.list(&[4]));
            let split = g.node("Concat", &[&rows, &steps, &heads, &width], vec![int("axis", 0)]);
            let mut side = |perm: &[i64]| {
                let weights = g.floats(&[8, 8]);
                let product = g.node("MatMul", &["x", &weights], vec![]);
                let apart = g.node("Reshape", &[&product, &split], vec![]);
                g.node("Transpose", &[&apart], vec![ints("perm", perm)])
            };
            let (queries, keys, values) = (side(&[0, 2, 1, 3]), side(&[0, 2, 3, 1]), side(&[0, 2, 1, 3]));
            let scores = g.node("MatMul", &[&queries, &keys], vec![]);
            let scores = g.node("Softmax", &[&scores], vec![int("axis", -1)]);
            let seen = g.node("MatMul", &[&scores, &values], vec![]);
            let turned = g.node("Transpose", &[&seen], vec![ints("perm", &[0, 2, 1, 3])]);
            let all = g.list(&[8]);
            let merged = g.node("Concat", &[&rows, &steps, &all], vec![int("axis", 0)]);
            g.node("Reshape", &[&turned, &merged], vec![])
        });
    }
}

#[test]
fn heads_may_be_merged_with_the_rows_as_one_axis() {
    accepted(17, &[-1, 8], |g| {
        // Steps, then rows times heads, as in PyTorch's multi-head attention.
        let turned = g.node("Transpose", &["x"], vec![ints("perm", &[1, 0, 2])]);
        let (steps, rows) = (extent(g, "x", 1, true), extent(g, "x", 0, true));
        let two = g.list(&[2]);
        let heads = g.node("Mul", &[&rows, &two], vec![]);
        let width = g.list(&[4]);
        let shape = g.node("Concat", &[&steps, &heads, &width], vec![int("axis", 0)]);
        let split = g.node("Reshape", &[&turned, &shape], vec![]);
        let queries = g.node("Transpose", &[&split], vec![ints("perm", &[1, 0, 2])]);
        let keys = g.node("Transpose", &[&split], vec![ints("perm", &[1, 2, 0])]);
        let scores = g.node("MatMul", &[&queries, &keys], vec![]);
        let scores = g.node("Softmax", &[&scores], vec![int("axis", 2)]);
        let seen = g.node("MatMul", &[&scores, &queries], vec![]);
        let seen = g.node("Transpose", &[&seen], vec![ints("perm", &[1, 0, 2])]);
        // Merges steps and rows into one axis, applies a layer, and splits them again.
        let all = g.node("Mul", &[&steps, &rows], vec![]);
        let eight = g.list(&[8]);
        let shape = g.node("Concat", &[&all, &eight], vec![int("axis", 0)]);
        let flat = g.node("Reshape", &[&seen, &shape], vec![]);
        let (w, b) = (g.floats(&[8, 8]), g.floats(&[8]));
        let layer = g.node("Gemm", &[&flat, &w, &b], vec![]);
        let shape = g.node("Concat", &[&steps, &rows, &eight], vec![int("axis", 0)]);
        let apart = g.node("Reshape", &[&layer, &shape], vec![]);
        g.node("Transpose", &[&apart], vec![ints("perm", &[1, 0, 2])])
    });
}

#[test]
fn a_constant_is_expanded_as_pytorch_writes_it() {
    let token = |g: &mut Build, shape: &str| {
        let fill = AttributeProto {
            name: Some("value".into()),
            r#type: Some(AttributeType::Tensor as i32),
            t: Some(millrace_bundle::onnx::TensorProto {
                dims: vec![1],
                data_type: Some(DataType::Int64 as i32),
                int64_data: vec![1],
                ..Default::default()
            }),
            ..Default::default()
        };
        let count = g.list(&[3]);
        let ones = g.node("ConstantOfShape", &[&count], vec![fill]);
        let minus = g.number(-1);
        let unset = g.node("Mul", &[&ones, &minus], vec![]);
        let equal = g.node("Equal", &[shape, &unset], vec![]);
        let shape = g.node("Where", &[&equal, &ones, shape], vec![]);
        let token = g.floats(&[1, 1, 4]);
        let tokens = g.node("Expand", &[&token, &shape], vec![]);
        g.node("Concat", &[&tokens, "x"], vec![int("axis", 1)])
    };
    accepted(17, &[6, 4], |g| {
        let (rows, rest) = (extent(g, "x", 0, true), g.list(&[-1, -1]));
        let shape = g.node("Concat", &[&rows, &rest], vec![int("axis", 0)]);
        token(g, &shape)
    });
    refused(17, &[6, 4], "constant with rows", |g| {
        let shape = g.list(&[1, -1, -1]);
        token(g, &shape)
    });
}

#[test]
fn word_positions_are_counted_along_steps_and_not_along_rows() {
    let places = |g: &mut Build, axis: i64| {
        let steps = extent(g, "x", axis, false);
        let (from, step, axes) = (g.number(0), g.number(1), g.list(&[0]));
        let places = g.node("Range", &[&from, &steps, &step], vec![]);
        let places = g.node("Unsqueeze", &[&places, &axes], vec![]);
        let table = g.floats(&[16, 4]);
        let vectors = g.node("Gather", &[&table, &places], vec![]);
        g.node("Add", &["x", &vectors], vec![])
    };
    accepted(17, &[-1, 4], |g| places(g, 1));
    refused(17, &[-1, 4], "counts the rows", |g| places(g, 0));
}

#[test]
fn a_first_state_of_zeros_has_the_number_of_rows() {
    let lstm = |g: &mut Build, axis: i64| {
        let turned = g.node("Transpose", &["x"], vec![ints("perm", &[1, 0, 2])]);
        let (one, rows, width) = (g.list(&[1]), extent(g, &turned, axis, true), g.list(&[2]));
        let shape = g.node("Concat", &[&one, &rows, &width], vec![int("axis", 0)]);
        let state = g.node("ConstantOfShape", &[&shape], vec![]);
        let (w, r) = (g.floats(&[1, 8, 3]), g.floats(&[1, 8, 2]));
        let y = g.nodes("LSTM", &[&turned, &w, &r, "", "", &state, &state], vec![int("hidden_size", 2)], 3);
        let (order, shape) = (ints("perm", &[2, 0, 1, 3]), g.list(&[0, 0, -1]));
        let y = g.node("Transpose", &[&y[0]], vec![order]);
        g.node("Reshape", &[&y, &shape], vec![])
    };
    accepted(17, &[5, 3], |g| lstm(g, 1));
    refused(17, &[5, 3], "does not have the rows", |g| lstm(g, 0));
}

#[test]
fn number_of_rows_is_accepted_as_a_shape_and_refused_as_a_value() {
    refused(17, &[4], "number of rows", |g| {
        let rows = extent(g, "x", 0, false);
        let rows = g.node("Cast", &[&rows], vec![int("to", 1)]);
        g.node("Div", &["x", &rows], vec![])
    });
    refused(17, &[4], "number of rows", |g| {
        let places = g.input("places", DataType::Int64, &[]);
        let rows = extent(g, "x", 0, false);
        g.node("Mul", &[&places, &rows], vec![])
    });
    refused(17, &[4], "depends on the number of rows", |g| {
        let (rows, one) = (extent(g, "x", 0, true), g.list(&[1]));
        let more = g.node("Add", &[&rows, &one], vec![]);
        g.node("ConstantOfShape", &[&more], vec![])
    });
    refused(17, &[4], "twice", |g| {
        let rows = extent(g, "x", 0, true);
        let square = g.node("Concat", &[&rows, &rows], vec![int("axis", 0)]);
        g.node("ConstantOfShape", &[&square], vec![])
    });
    refused(17, &[4], "number of rows alone", |g| extent(g, "x", 0, true));
    refused(17, &[4], "does not depend on the rows", |g| g.floats(&[3]));
}

#[test]
fn subgraphs_are_accepted_if_they_do_not_depend_on_rows() {
    let inside = |operator: &str, input: &str| GraphProto {
        name: Some("inside".into()),
        node: vec![NodeProto {
            op_type: Some(operator.into()),
            input: vec![input.into()],
            output: vec![format!("inside_{input}")],
            ..Default::default()
        }],
        output: vec![info(&format!("inside_{input}"), DataType::Float, None)],
        ..Default::default()
    };
    let choose = |g: &mut Build, operator: &str, value: &str| {
        let yes = g.bytes(DataType::Bool, &[], 1);
        let branches =
            vec![inner("then_branch", inside(operator, value)), inner("else_branch", inside("Neg", value))];
        g.node("If", &[&yes], branches)
    };
    // The result of `If` has no known rank; the Reshape gives it one.
    accepted(17, &[4], |g| {
        let c = g.floats(&[4]);
        let chosen = choose(g, "Relu", &c);
        let shape = g.list(&[4, 1]);
        let w = g.node("Reshape", &[&chosen, &shape], vec![]);
        g.node("MatMul", &["x", &w], vec![])
    });
    refused(17, &[4], "graph of its own", |g| choose(g, "Relu", "x"));
    refused(17, &[4], "graph of its own", |g| {
        let c = g.floats(&[4]);
        let chosen = choose(g, "RandomNormalLike", &c);
        g.node("Add", &["x", &chosen], vec![])
    });
    refused(17, &[4], "graph of its own", |g| {
        let yes = g.node("Cast", &["x"], vec![int("to", 9)]);
        let c = g.floats(&[4]);
        let branches =
            vec![inner("then_branch", inside("Relu", &c)), inner("else_branch", inside("Neg", &c))];
        g.node("If", &[&yes], branches)
    });
}

#[test]
fn functions_of_the_model_are_walked_through() {
    let function = |name: &str, domain: &str, axis: Option<i64>| {
        let reference = AttributeProto {
            name: Some("axis".into()),
            ref_attr_name: Some("along".into()),
            ..Default::default()
        };
        FunctionProto {
            name: Some(name.into()),
            domain: Some(domain.into()),
            input: vec!["a".into()],
            output: vec!["b".into()],
            attribute_proto: axis.map(|axis| int("along", axis)).into_iter().collect(),
            node: vec![NodeProto {
                op_type: Some("Softmax".into()),
                input: vec!["a".into()],
                output: vec!["b".into()],
                attribute: vec![reference],
                ..Default::default()
            }],
            opset_import: vec![OperatorSetIdProto { domain: Some(String::new()), version: Some(17) }],
            ..Default::default()
        }
    };
    let call = |g: &mut Build, default: Option<i64>, given: Option<i64>| {
        g.model.functions.push(function("soft", "own", default));
        let given = given.map(|axis| int("along", axis)).into_iter().collect();
        g.node("own:soft", &["x"], given)
    };
    accepted(17, &[4], |g| call(g, None, None));
    accepted(17, &[4], |g| call(g, Some(0), Some(1)));
    refused(17, &[4], "along the rows", |g| call(g, Some(0), None));
    refused(17, &[4], "along the rows", |g| call(g, Some(1), Some(0)));
    // ONNX Runtime may use either the operator or the function.
    refused(17, &[4], "defines an operator of this name", |g| {
        g.model.functions.push(function("Relu", "", None));
        g.node("Relu", &["x"], vec![])
    });
    // The walk ends for a function that calls itself.
    refused(17, &[4], "call each other too often", |g| {
        let mut circle = function("circle", "own", None);
        circle.node[0] = NodeProto {
            domain: Some("own".into()),
            attribute: vec![],
            op_type: Some("circle".into()),
            ..circle.node[0].clone()
        };
        g.model.functions.push(circle);
        g.node("own:circle", &["x"], vec![])
    });
}

#[test]
fn every_input_and_output_needs_rows_along_its_first_axis() {
    let mut g = Build::new(17, &[4]);
    g.graph().input.push(info("state", DataType::Float, Some(&[])));
    let sum = g.node("Add", &["x", "state"], vec![]);
    assert!(g.prove(&sum).unwrap_err().to_string().contains("no first axis"));
    let mut g = Build::new(17, &[4]);
    assert!(g.prove("nothing").unwrap_err().to_string().contains("no node gives it"));
}
