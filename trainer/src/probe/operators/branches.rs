//! Test models of branches, loops, numbers of rows, and values that follow from shapes.

use millrace_bundle::onnx::attribute_proto::AttributeType;
use millrace_bundle::onnx::tensor_proto::DataType;
use millrace_bundle::onnx::{
    AttributeProto, GraphProto, NodeProto, TensorShapeProto, ValueInfoProto, type_proto,
};

use super::super::{Probe, float, info, int, ints, text};
use super::{Case, after_mul, case};

/// A tensor of a branch: its name and the type of its elements.
fn typed(name: &str, kind: DataType) -> ValueInfoProto {
    let mut info = info(name, None);
    if let Some(type_proto::Value::TensorType(tensor)) =
        info.r#type.as_mut().and_then(|kind| kind.value.as_mut())
    {
        tensor.elem_type = Some(kind as i32);
    }
    info
}

/// [`typed`], of a scalar. ONNX Runtime asks for the shapes of a loop's number and condition.
fn scalar(name: &str, kind: DataType) -> ValueInfoProto {
    let mut info = typed(name, kind);
    if let Some(type_proto::Value::TensorType(tensor)) =
        info.r#type.as_mut().and_then(|kind| kind.value.as_mut())
    {
        tensor.shape = Some(TensorShapeProto::default());
    }
    info
}

fn inner(op: &str, inputs: &[&str], output: &str, attribute: Vec<AttributeProto>) -> NodeProto {
    NodeProto {
        input: inputs.iter().map(|name| (*name).to_owned()).collect(),
        output: vec![output.to_owned()],
        op_type: Some(op.into()),
        attribute,
        ..Default::default()
    }
}

/// A branch of nodes, with one output of floats.
fn branch(name: &str, nodes: Vec<NodeProto>, output: &str) -> AttributeProto {
    graph(
        name,
        GraphProto {
            name: Some(name.into()),
            node: nodes,
            output: vec![typed(output, DataType::Float)],
            ..Default::default()
        },
    )
}

fn graph(name: &str, value: GraphProto) -> AttributeProto {
    AttributeProto {
        name: Some(name.into()),
        r#type: Some(AttributeType::Graph as i32),
        g: Some(value),
        ..Default::default()
    }
}

fn scaled(p: &mut Probe, x: &str, dims: &[i64]) -> String {
    let w = p.param(dims);
    p.node("Mul", &[x, &w], vec![])
}

/// Whether the second dimension of `x` is 1.
fn is_one(p: &mut Probe, x: &str) -> String {
    let (axis, one) = (p.index(1), p.index(1));
    let shape = p.node("Shape", &[x], vec![]);
    let size = p.node("Gather", &[&shape, &axis], vec![]);
    p.node("Equal", &[&size, &one], vec![])
}

pub(super) fn branches() -> Vec<Case> {
    let mut cases = Vec::new();
    // As PyTorch's earlier exporter writes a squeeze, but ONNX Runtime refuses one of a known size of 3.
    for (row, op, attribute) in
        [(&[1, 4][..], "Squeeze", vec![]), (&[3, 4][..], "ReduceSum", vec![int("keepdims", 0)])]
    {
        cases.push(case(&format!("If {row:?}"), 17, row, |p, x| {
            let scaled = scaled(p, x, row);
            let (is_one, axis) = (is_one(p, x), p.shape(&[1]));
            let then =
                branch("then_branch", vec![inner(op, &[&scaled, &axis], "less", attribute.clone())], "less");
            let other = branch("else_branch", vec![inner("Identity", &[&scaled], "same", vec![])], "same");
            p.node("If", &[&is_one], vec![then, other])
        }));
    }
    cases.push(case("If within an If", 17, &[1, 4], |p, x| {
        let (scaled, w) = (scaled(p, x, &[4]), p.param(&[4, 4]));
        let is_one = is_one(p, x);
        let product = vec![inner("MatMul", &["bent", &w], "product", vec![])];
        let bent = vec![inner("Sigmoid", &["bent"], "curve", vec![])];
        let deep = vec![branch("then_branch", product, "product"), branch("else_branch", bent, "curve")];
        let nodes = vec![
            inner("Tanh", &[&scaled], "bent", vec![]),
            inner("If", &[&is_one], "chosen", deep),
            inner("Add", &["chosen", "bent"], "sum", vec![]),
        ];
        let same = vec![inner("Identity", &[&scaled], "same", vec![])];
        p.node(
            "If",
            &[&is_one],
            vec![branch("then_branch", nodes, "sum"), branch("else_branch", same, "same")],
        )
    }));
    cases.push(recurrent("Loop of a known count", true));
    cases.push(recurrent("Loop by a condition", false));
    cases
}

/// A recurrent layer over three steps, as tf2onnx writes it.
fn recurrent(name: &str, is_counted: bool) -> Case {
    case(name, 17, &[3, 4], |p, x| {
        let w = p.param(&[4, 4]);
        let (count, last, zero) = (p.index(3), p.index(2), p.index(0));
        let (goes_on, order) = (p.flags(&[], &[true]), vec![ints("perm", &[1, 0, 2])]);
        let steps = p.node("Transpose", &[x], order.clone());
        let first = p.node("Gather", &[&steps, &zero], vec![]);
        let condition = match is_counted {
            true => inner("Identity", &["on"], "still", vec![]),
            false => inner("Less", &["at", &last], "still", vec![]),
        };
        let body = GraphProto {
            name: Some("body".into()),
            node: vec![
                condition,
                inner("Gather", &[&steps, "at"], "line", vec![]),
                inner("MatMul", &["state", &w], "product", vec![]),
                inner("Add", &["line", "product"], "sum", vec![]),
                inner("Tanh", &["sum"], "next", vec![]),
                inner("Identity", &["next"], "line_out", vec![]),
            ],
            input: vec![
                scalar("at", DataType::Int64),
                scalar("on", DataType::Bool),
                typed("state", DataType::Float),
            ],
            output: vec![
                scalar("still", DataType::Bool),
                typed("next", DataType::Float),
                typed("line_out", DataType::Float),
            ],
            ..Default::default()
        };
        let limit = if is_counted { count.as_str() } else { "" };
        let found = p.nodes("Loop", &[limit, &goes_on, &first], vec![graph("body", body)], 2);
        let lines = p.node("Transpose", &[&found[1]], order);
        let (axis, last) = (p.shape(&[1]), &found[0]);
        let last = p.node("Unsqueeze", &[last, &axis], vec![]);
        p.node("Mul", &[&lines, &last], vec![])
    })
}

/// The numbers of the rows of `x`.
fn numbers(p: &mut Probe, x: &str) -> String {
    let rows = p.node("Shape", &[x], vec![int("start", 0), int("end", 1)]);
    let (zero, one) = (p.index(0), p.index(1));
    let rows = p.node("Squeeze", &[&rows], vec![]);
    p.node("Range", &[&zero, &rows, &one], vec![])
}

/// The place of the last token that is not 0, in each row.
fn last_token(p: &mut Probe, x: &str) -> String {
    let (zero, one, axis) = (p.index(0), p.index(1), p.shape(&[1]));
    let is_padding = p.node("Equal", &[x, &zero], vec![]);
    let counts = p.node("Not", &[&is_padding], vec![]);
    let counts = p.node("Cast", &[&counts], vec![int("to", 7)]);
    let count = p.node("ReduceSum", &[&counts, &axis], vec![int("keepdims", 0)]);
    let last = p.node("Sub", &[&count, &one], vec![]);
    p.node("Clip", &[&last, &zero], vec![])
}

pub(super) fn numbers_of_rows() -> Vec<Case> {
    let embedded = |p: &mut Probe, x: &str| {
        p.of_integers();
        let table = p.param(&[8, 3]);
        p.node("Gather", &[&table, x], vec![])
    };
    let pairs = case("GatherND at the row's number", 17, &[6], |p, x| {
        let found = embedded(p, x);
        let (numbers, last, axis) = (numbers(p, x), last_token(p, x), p.shape(&[-1]));
        let [numbers, last] = [numbers, last].map(|list| p.node("Unsqueeze", &[&list, &axis], vec![]));
        let places = p.node("Concat", &[&numbers, &last], vec![int("axis", -1)]);
        p.node("GatherND", &[&found, &places], vec![])
    });
    let flat = case("Gather at the row's number", 17, &[6], |p, x| {
        let found = embedded(p, x);
        let (numbers, last) = (numbers(p, x), last_token(p, x));
        let (length, shape) = (p.index(6), p.shape(&[-1, 3]));
        let lines = p.node("Reshape", &[&found, &shape], vec![]);
        let starts = p.node("Mul", &[&numbers, &length], vec![]);
        let places = p.node("Add", &[&last, &starts], vec![]);
        p.node("Gather", &[&lines, &places], vec![])
    });
    let batch = case("GatherND of batches", 17, &[6], |p, x| {
        let found = embedded(p, x);
        let (last, axis) = (last_token(p, x), p.shape(&[-1]));
        let places = p.node("Unsqueeze", &[&last, &axis], vec![]);
        p.node("GatherND", &[&found, &places], vec![int("batch_dims", 1)])
    });
    let rest = case("Gather at a remainder", 17, &[4], |p, x| {
        p.of_integers();
        let (table, five) = (p.param(&[5, 2]), p.index(5));
        let places = p.node("Mod", &[x, &five], vec![]);
        p.node("Gather", &[&table, &places], vec![])
    });
    let quotient = case("Gather at a quotient", 17, &[4], |p, x| {
        p.of_integers();
        let (table, three) = (p.param(&[5, 2]), p.index(3));
        let places = p.node("Div", &[x, &three], vec![]);
        p.node("Gather", &[&table, &places], vec![])
    });
    let tiled = case("Tile by the rows", 17, &[2, 3], |p, x| {
        let w = p.param(&[2, 3]);
        let rows = p.node("Shape", &[x], vec![int("start", 0), int("end", 1)]);
        let (one, lines, blocks) = (p.shape(&[1]), p.shape(&[-1, 3]), p.shape(&[-1, 2, 3]));
        let repeats = p.node("Concat", &[&rows, &one], vec![int("axis", 0)]);
        let all = p.node("Tile", &[&w, &repeats], vec![]);
        let x = p.node("Reshape", &[x, &lines], vec![]);
        let product = p.node("Mul", &[&x, &all], vec![]);
        p.node("Reshape", &[&product, &blocks], vec![])
    });
    let added = case("ScatterND adds twice", 18, &[3, 2], |p, x| {
        let scaled = scaled(p, x, &[3, 2]);
        let order = vec![ints("perm", &[1, 0, 2])];
        let (list, shape) = (p.shape(&[0, 1, 1]), p.shape(&[3, 1]));
        let lines = p.node("Transpose", &[&scaled], order.clone());
        let places = p.node("Reshape", &[&list, &shape], vec![]);
        let sums = p.node("ScatterND", &[&lines, &places, &lines], vec![text("reduction", "add")]);
        p.node("Transpose", &[&sums], order)
    });
    let listed = case("SplitToSequence and SequenceAt", 17, &[2, 6], |p, x| {
        let scaled = scaled(p, x, &[2, 6]);
        let (size, first, last) = (p.index(4), p.index(0), p.index(-1));
        let parts = p.node("SplitToSequence", &[&scaled, &size], vec![int("axis", 2)]);
        let [four, two] = [first, last].map(|at| p.node("SequenceAt", &[&parts, &at], vec![]));
        let bent = p.node("Tanh", &[&two], vec![]);
        p.node("Concat", &[&bent, &four], vec![int("axis", 2)])
    });
    vec![pairs, flat, batch, rest, quotient, tiled, added, listed, buckets()]
}

/// Relative positions in buckets, as T5 computes them.
fn buckets() -> Case {
    case("Gather at buckets of positions", 17, &[6], |p, x| {
        let table = p.param(&[8, 2]);
        let (zero, one, length, two, seven) = (p.index(0), p.index(1), p.index(6), p.index(2), p.index(7));
        let (first, second, inside) = (p.shape(&[0]), p.shape(&[1]), p.shape(&[1, 2]));
        let (half, factor) = (p.constant(&[], vec![2.0]), p.constant(&[], vec![1.7]));
        let line = p.node("Range", &[&zero, &length, &one], vec![]);
        let across = p.node("Unsqueeze", &[&line, &first], vec![]);
        let down = p.node("Unsqueeze", &[&line, &second], vec![]);
        let way = p.node("Sub", &[&across, &down], vec![]);
        let distance = p.node("Abs", &[&way], vec![]);
        let is_near = p.node("Less", &[&distance, &two], vec![]);
        let number = p.node("Cast", &[&distance], vec![int("to", 1)]);
        let share = p.node("Div", &[&number, &half], vec![]);
        let log = p.node("Log", &[&share], vec![]);
        let step = p.node("Mul", &[&log, &factor], vec![]);
        let step = p.node("Cast", &[&step], vec![int("to", 7)]);
        let far = p.node("Add", &[&step, &two], vec![]);
        let far = p.node("Min", &[&far, &seven], vec![]);
        let bucket = p.node("Where", &[&is_near, &distance, &far], vec![]);
        let bias = p.node("Gather", &[&table, &bucket], vec![]);
        let bias = p.node("Transpose", &[&bias], vec![ints("perm", &[2, 0, 1])]);
        let x = p.node("Unsqueeze", &[x, &inside], vec![]);
        p.node("MatMul", &[&x, &bias], vec![])
    })
}

pub(super) fn places() -> Vec<Case> {
    let mut cases = vec![
        after_mul("LRN", "LRN", 17, &[5, 2, 3], vec![int("size", 3)]),
        after_mul(
            "LRN with all attributes",
            "LRN",
            13,
            &[4, 2, 2],
            vec![int("size", 5), float("alpha", 0.5), float("beta", 0.6), float("bias", 2.0)],
        ),
    ];
    for (equation, row) in [("bii->bi", &[3, 3][..]), ("bii->b", &[3, 3]), ("bijij->bj", &[2, 3, 2, 3])] {
        let attributes = vec![text("equation", equation)];
        cases.push(after_mul(&format!("Einsum {equation}"), "Einsum", 17, row, attributes));
    }
    cases.push(case("EyeLike", 17, &[3, 4], |p, x| {
        let scaled = scaled(p, x, &[3, 4]);
        let square = p.constant(&[3, 4], vec![7.0; 12]);
        let eye = p.node("EyeLike", &[&square], vec![int("k", 1)]);
        p.node("Mul", &[&scaled, &eye], vec![])
    }));
    let twos = |name: &str| ints(name, &[2, 2]);
    cases.push(case("MaxUnpool", 17, &[2, 4, 4], |p, x| {
        let scaled = scaled(p, x, &[2, 4, 4]);
        let found = p.nodes("MaxPool", &[&scaled], vec![twos("kernel_shape"), twos("strides")], 2);
        let bent = p.node("Tanh", &[&found[0]], vec![]);
        p.node("MaxUnpool", &[&bent, &found[1]], vec![twos("kernel_shape"), twos("strides")])
    }));
    cases.push(case("MaxUnpool to a shape", 17, &[2, 5, 5], |p, x| {
        let scaled = scaled(p, x, &[2, 5, 5]);
        let found = p.nodes("MaxPool", &[&scaled], vec![twos("kernel_shape"), twos("strides")], 2);
        let shape = p.node("Shape", &[x], vec![]);
        p.node("MaxUnpool", &[&found[0], &found[1], &shape], vec![twos("kernel_shape"), twos("strides")])
    }));
    cases.push(case("MaxPool with places that no node reads", 17, &[2, 4], |p, x| {
        let scaled = scaled(p, x, &[2, 4]);
        p.nodes("MaxPool", &[&scaled], vec![ints("kernel_shape", &[2])], 2).swap_remove(0)
    }));
    cases
}
