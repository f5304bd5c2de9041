//! Tests of graphs that ONNX Runtime reads differently than they seem: omitted values, empty lists, narrow integers,
//! duplicate names, wrong declared shapes.

use millrace_bundle::onnx::attribute_proto::AttributeType;
use millrace_bundle::onnx::tensor_proto::DataType;
use millrace_bundle::onnx::{
    AttributeProto, FunctionProto, GraphProto, NodeProto, OperatorSetIdProto, TensorProto,
};

use super::support::{Build, accepted, info, inner, int, ints, refused};

/// The number of rows of `x`, as a list.
fn rows(g: &mut Build) -> String {
    let (shape, place) = (g.node("Shape", &["x"], vec![]), g.list(&[0]));
    g.node("Gather", &[&shape, &place], vec![])
}

fn joined(g: &mut Build, parts: &[&str]) -> String {
    g.node("Concat", parts, vec![int("axis", 0)])
}

fn cast(g: &mut Build, value: &str, to: DataType) -> String {
    g.node("Cast", &[value], vec![int("to", i64::from(to as i32))])
}

/// Constant integers whose values the proof does not know.
fn unread(g: &mut Build, count: i64) -> String {
    let floats = g.floats(&[count]);
    cast(g, &floats, DataType::Int64)
}

/// An attribute of value 0, omitted as writers do.
fn zero(name: &str) -> AttributeProto {
    AttributeProto { i: None, ..int(name, 0) }
}

#[test]
fn declared_shapes_that_contradict_the_inputs_run_alone() {
    let declared = |g: &mut Build, shape: &[i64]| {
        let y = g.node("Relu", &["x"], vec![]);
        g.graph().value_info.push(info(&y, DataType::Float, Some(shape)));
        y
    };
    accepted(17, &[4], |g| declared(g, &[-1, 4]));
    // A wrong rank, a wrong number of rows, and a wrong extent.
    for shape in [&[-1][..], &[1, 4], &[-1, 5]] {
        refused(17, &[4], "declared shape", |g| declared(g, shape));
    }
    refused(17, &[4], "declared shape", |g| {
        let y = g.node("Relu", &["x"], vec![]);
        g.graph().output.push(info(&y, DataType::Float, Some(&[1, 4])));
        y
    });
    // A declaration may fix an extent that callers choose, but then the graph must not compute from it.
    let steps = |g: &mut Build, read: &str| {
        let y = g.node("Relu", &["x"], vec![]);
        g.graph().output.push(info(&y, DataType::Float, Some(&[-1, 7])));
        g.node(read, &[&y], vec![]);
        y
    };
    accepted(17, &[-1], |g| steps(g, "Neg"));
    refused(17, &[-1], "declared shape", |g| steps(g, "Shape"));
}

#[test]
fn values_that_are_left_out_are_zero_and_not_the_default() {
    refused(13, &[4], "along the rows", |g| g.node("Softmax", &["x"], vec![zero("axis")]));
    refused(17, &[4], "not along the first axis", |g| g.node("Flatten", &["x"], vec![zero("axis")]));
    accepted(17, &[4], |g| {
        let y = g.node("ArgMax", &["x"], vec![int("axis", 1), zero("keepdims")]);
        g.graph().value_info.push(info(&y, DataType::Int64, Some(&[-1])));
        y
    });
}

#[test]
fn mistyped_and_duplicate_attributes_are_refused() {
    refused(13, &[4], "another type", |g| {
        let kind = Some(AttributeType::Float as i32);
        g.node("Softmax", &["x"], vec![AttributeProto { r#type: kind, ..int("axis", 1) }])
    });
    refused(13, &[4], "an attribute twice", |g| {
        g.node("Softmax", &["x"], vec![int("axis", 1), int("axis", 0)])
    });
}

#[test]
fn empty_lists_of_axes_mean_all_axes() {
    refused(17, &[1], "the rows of a request with one row", |g| {
        let axes = g.list(&[]);
        g.node("Squeeze", &["x", &axes], vec![])
    });
    refused(11, &[1], "the rows of a request with one row", |g| {
        g.node("Squeeze", &["x"], vec![ints("axes", &[])])
    });
    refused(17, &[4], "along the rows", |g| {
        g.node("MeanVarianceNormalization", &["x"], vec![ints("axes", &[])])
    });
    refused(18, &[4], "along the rows", |g| {
        let axes = g.list(&[]);
        g.node("ReduceProd", &["x", &axes], vec![])
    });
    refused(18, &[4], "not known", |g| {
        let axes = unread(g, 1);
        g.node("ReduceProd", &["x", &axes], vec![])
    });
    let resized = |g: &mut Build, scales: [f32; 3]| {
        let (none, scales) = (g.constant(&[0], vec![]), g.constant(&[3], scales.into()));
        g.node("Resize", &["x", &none, &scales], vec![ints("axes", &[])])
    };
    accepted(18, &[3, 8], |g| resized(g, [1.0, 1.0, 2.0]));
    refused(18, &[3, 8], "changes the number of rows", |g| resized(g, [2.0, 1.0, 1.0]));
    refused(9, &[4], "differ in number", |g| {
        g.node("Slice", &["x"], vec![ints("starts", &[1]), ints("ends", &[2]), ints("axes", &[])])
    });
}

#[test]
fn product_over_no_axes_is_the_identity() {
    let shaped = |g: &mut Build, attributes: Vec<AttributeProto>| {
        let rest = g.node("Shape", &["x"], vec![int("start", 1)]);
        let product = g.node("ReduceProd", &[&rest], attributes);
        let rows = rows(g);
        let shape = joined(g, &[&rows, &product]);
        g.node("Reshape", &["x", &shape], vec![])
    };
    accepted(18, &[3, 4], |g| shaped(g, vec![]));
    refused(18, &[3, 4], "number of rows", |g| shaped(g, vec![int("noop_with_empty_axes", 1)]));
}

#[test]
fn integers_of_32_bits_wrap_around() {
    // The largest 64-bit integer is -1 in 32 bits, and leaves out the last row.
    let sliced = |g: &mut Build, end: i64| {
        let places = [0, end, 0].map(|place| g.list(&[place]));
        let [start, end, axis] = places.map(|place| cast(g, &place, DataType::Int32));
        g.node("Slice", &["x", &start, &end, &axis], vec![])
    };
    accepted(17, &[4], |g| sliced(g, i64::from(i32::MAX)));
    refused(17, &[4], "along the rows", |g| sliced(g, i64::MAX));
    // 256 rows times 2^24 wrap around to 0 in 32 bits, which then means another extent in a shape.
    let shaped = |g: &mut Build, factor: i32| {
        let rows = rows(g);
        let rows = cast(g, &rows, DataType::Int32);
        let factor = g.bytes(DataType::Int32, &[1], factor);
        let times = g.node("Mul", &[&rows, &factor], vec![]);
        let rows = g.node("Div", &[&times, &factor], vec![]);
        let rest = g.bytes(DataType::Int32, &[1], -1);
        let shape = joined(g, &[&rows, &rest]);
        let shape = cast(g, &shape, DataType::Int64);
        g.node("Reshape", &["x", &shape], vec![])
    };
    accepted(17, &[3, 4], |g| shaped(g, 16));
    refused(17, &[3, 4], "not known", |g| shaped(g, 1 << 24));
}

#[test]
fn true_bytes_other_than_1_count_as_1() {
    refused(17, &[3, 4], "splits or merges", |g| {
        let (one, two) = (g.bytes(DataType::Bool, &[1], 1), g.bytes(DataType::Bool, &[1], 2));
        let equal = g.node("Equal", &[&one, &two], vec![]);
        let (yes, no) = (g.list(&[4, -1]), g.list(&[0, -1]));
        let shape = g.node("Where", &[&equal, &yes, &no], vec![]);
        g.node("Reshape", &["x", &shape], vec![])
    });
}

#[test]
fn unknown_slices_and_sizes_have_no_extents() {
    let flat = |g: &mut Build, part: &str, width: i64| {
        let shape = g.list(&[-1, width]);
        g.node("Reshape", &[part, &shape], vec![])
    };
    accepted(17, &[4], |g| {
        let part = g.nodes("Split", &["x"], vec![int("axis", 1)], 2).remove(0);
        flat(g, &part, 2)
    });
    refused(17, &[4], "cut a row apart", |g| {
        let sizes = unread(g, 2);
        let part = g.nodes("Split", &["x", &sizes], vec![int("axis", 1)], 2).remove(0);
        flat(g, &part, 2)
    });
    // An output without a name also takes a part.
    refused(17, &[4], "cut a row apart", |g| {
        let part = g.nodes("Split", &["x"], vec![int("axis", 1)], 2).remove(0);
        if let Some(node) = g.graph().node.last_mut() {
            node.output[1].clear();
        }
        flat(g, &part, 4)
    });
    refused(17, &[3, 8], "changes the number of rows", |g| {
        let (none, scales) = (g.constant(&[0], vec![]), g.constant(&[3], vec![1.0, 1.0, 2.0]));
        let sizes = unread(g, 3);
        g.node("Resize", &["x", &none, &scales, &sizes], vec![])
    });
}

#[test]
fn duplicate_names_are_refused() {
    let twice = |g: &mut Build, name: &str| {
        let c = TensorProto {
            name: Some(name.into()),
            dims: vec![2],
            data_type: Some(DataType::Int64 as i32),
            int64_data: vec![0, -1],
            ..Default::default()
        };
        g.graph().initializer.push(c);
    };
    refused(17, &[3, 4], "two values have this name", |g| {
        let shape = g.list(&[4, -1]);
        twice(g, &shape);
        g.node("Reshape", &["x", &shape], vec![])
    });
    refused(17, &[3, 4], "two values have this name", |g| {
        twice(g, "shape");
        let y = g.node("Reshape", &["x", "shape"], vec![]);
        let other = g.list(&[4, -1]);
        g.node("Identity", &[&other], vec![]);
        if let Some(node) = g.graph().node.last_mut() {
            node.output = vec!["shape".into()];
        }
        y
    });
}

#[test]
fn constants_with_several_or_mistyped_values_are_refused() {
    let shaped = |g: &mut Build, attributes: Vec<AttributeProto>| {
        let shape = g.node("Constant", &[], attributes);
        g.node("Reshape", &["x", &shape], vec![])
    };
    accepted(17, &[3, 4], |g| shaped(g, vec![ints("value_ints", &[0, -1])]));
    refused(17, &[3, 4], "one value", |g| {
        shaped(g, vec![ints("value_ints", &[0, -1]), ints("value_floats", &[4, -1])])
    });
    refused(17, &[3, 4], "not known", |g| {
        let kind = Some(AttributeType::Tensor as i32);
        shaped(g, vec![AttributeProto { r#type: kind, ..ints("value_ints", &[0, -1]) }])
    });
    // A negative extent is invalid.
    refused(17, &[4], "rank of an input is not known", |g| {
        let c = g.constant(&[0], vec![]);
        if let Some(tensor) = g.graph().initializer.last_mut() {
            tensor.dims = vec![-3];
        }
        let [start, end] = [0, 2].map(|bound| g.list(&[bound]));
        let c = g.node("Slice", &[&c, &start, &end], vec![]);
        g.node("Add", &["x", &c], vec![])
    });
}

#[test]
fn functions_hide_no_operators_and_no_graphs() {
    let function = |name: &str, domain: &str, node: NodeProto| FunctionProto {
        name: Some(name.into()),
        domain: Some(domain.into()),
        input: vec!["a".into()],
        output: vec!["b".into()],
        node: vec![NodeProto { input: vec!["a".into()], output: vec!["b".into()], ..node }],
        opset_import: vec![OperatorSetIdProto { domain: Some(String::new()), version: Some(17) }],
        ..Default::default()
    };
    let softmax = || NodeProto { op_type: Some("Softmax".into()), ..Default::default() };
    // Both spellings name the same domain.
    refused(17, &[4], "defines an operator of this name", |g| {
        g.model.functions.push(function("Relu", "ai.onnx", softmax()));
        g.node("Relu", &["x"], vec![])
    });
    refused(17, &[4], "several functions", |g| {
        let first = NodeProto { attribute: vec![int("axis", 0)], ..softmax() };
        g.model.functions.extend([function("soft", "own", softmax()), function("soft", "own", first)]);
        g.node("own:soft", &["x"], vec![])
    });
    // A graph that the caller passes as an attribute runs inside the function.
    refused(17, &[4], "graph of its own", |g| {
        let refers = |name: &str| AttributeProto {
            name: Some(name.into()),
            ref_attr_name: Some("inside".into()),
            r#type: Some(AttributeType::Graph as i32),
            ..Default::default()
        };
        let choose = NodeProto {
            op_type: Some("If".into()),
            attribute: vec![refers("then_branch"), refers("else_branch")],
            ..Default::default()
        };
        g.model.functions.push(function("choose", "own", choose));
        let yes = g.bytes(DataType::Bool, &[], 1);
        let inside = GraphProto {
            name: Some("inside".into()),
            node: vec![NodeProto {
                op_type: Some("RandomNormal".into()),
                output: vec!["drawn".into()],
                ..Default::default()
            }],
            output: vec![info("drawn", DataType::Float, None)],
            ..Default::default()
        };
        let chosen = g.node("own:choose", &[&yes], vec![inner("inside", inside)]);
        let shape = g.list(&[4, 1]);
        let w = g.node("Reshape", &[&chosen, &shape], vec![]);
        g.node("MatMul", &["x", &w], vec![])
    });
}

#[test]
fn repeatedly_squared_extents_stay_bounded() {
    accepted(17, &[-1, 4], |g| {
        let (shape, place) = (g.node("Shape", &["x"], vec![]), g.list(&[1]));
        let mut steps = g.node("Gather", &[&shape, &place], vec![]);
        for _ in 0..64 {
            steps = g.node("Mul", &[&steps, &steps], vec![]);
        }
        let rows = rows(g);
        let shape = joined(g, &[&rows, &steps]);
        g.node("Reshape", &["x", &shape], vec![])
    });
}
