//! Test models of operators that cut, repeat, pad and pick elements, and of shapes that a graph computes.

use super::super::{float, int, ints, tensor, text};
use super::{Case, after_mul, case, ones};

pub(super) fn movement() -> Vec<Case> {
    let mut cases = vec![after_mul(
        "Slice by attributes",
        "Slice",
        9,
        &[2, 6],
        vec![ints("axes", &[2]), ints("starts", &[1]), ints("ends", &[-1])],
    )];
    type Cut = (&'static str, &'static [i64], &'static [i64], &'static [i64], &'static [i64]);
    let cuts: [Cut; 5] = [
        ("range", &[1], &[4], &[2], &[1]),
        ("every second", &[0], &[i64::MAX], &[-1], &[2]),
        ("backwards", &[-1], &[i64::MIN], &[2], &[-1]),
        ("two axes", &[1, 2], &[2, 100], &[1, 2], &[1, 1]),
        ("all rows", &[0, 1], &[i64::MAX, 5], &[0, 2], &[1, 2]),
    ];
    for (name, starts, ends, axes, steps) in cuts {
        cases.push(case(&format!("Slice {name}"), 17, &[2, 6], |p, x| {
            let w = p.param(&[6]);
            let scaled = p.node("Mul", &[x, &w], vec![]);
            let [starts, ends, axes, steps] = [starts, ends, axes, steps].map(|list| p.shape(list));
            p.node("Slice", &[&scaled, &starts, &ends, &axes, &steps], vec![])
        }));
    }
    for (name, opset) in [("attribute", 11), ("input", 17), ("equal", 17), ("count", 18)] {
        cases.push(case(&format!("Split {name}"), opset, &[2, 7], |p, x| {
            let w = p.param(&[7, 6]);
            let product = p.node("MatMul", &[x, &w], vec![]);
            let mut attributes = vec![int("axis", 2)];
            let parts = p.shape(&[1, 3, 2]);
            let mut inputs = vec![product.as_str()];
            match name {
                "attribute" => attributes.push(ints("split", &[1, 3, 2])),
                "input" => inputs.push(&parts),
                "count" => attributes.push(int("num_outputs", 3)),
                _ => {}
            }
            let found = p.nodes("Split", &inputs, attributes, 3);
            let bent = p.node("Tanh", &[&found[2]], vec![]);
            p.node("Concat", &[&bent, &found[0], &found[0], &found[1]], vec![int("axis", -1)])
        }));
    }
    for (mode, pads) in [
        ("constant", &[0, 1, 2, 0, 0, 1][..]),
        ("constant", &[0, 0, -1, 0, 1, 2]),
        ("reflect", &[0, 0, 3, 0, 0, 2]),
        ("edge", &[0, 2, 1, 0, 1, 3]),
    ] {
        cases.push(case(&format!("Pad {mode} {pads:?}"), 17, &[2, 5], |p, x| {
            let w = p.param(&[5]);
            let scaled = p.node("Mul", &[x, &w], vec![]);
            let pads = p.shape(pads);
            let value = p.constant(&[], vec![0.5]);
            let inputs = [scaled.as_str(), &pads, &value];
            let used = if mode == "constant" { 3 } else { 2 };
            p.node("Pad", &inputs[..used], vec![text("mode", mode)])
        }));
    }
    cases.push(after_mul(
        "Pad by attributes",
        "Pad",
        10,
        &[2, 3],
        vec![ints("pads", &[0, 0, 1, 0, 0, 2]), float("value", 0.3)],
    ));
    cases.push(case("Pad wrapping some axes", 19, &[2, 5], |p, x| {
        let w = p.param(&[5]);
        let scaled = p.node("Mul", &[x, &w], vec![]);
        let (pads, axes) = (p.shape(&[2, 1]), p.shape(&[-1]));
        p.node("Pad", &[&scaled, &pads, "", &axes], vec![text("mode", "wrap")])
    }));
    for repeats in [[1, 1, 3], [1, 2, 2]] {
        cases.push(case(&format!("Tile {repeats:?}"), 17, &[2, 3], |p, x| {
            let w = p.param(&[3]);
            let scaled = p.node("Mul", &[x, &w], vec![]);
            let repeats = p.shape(&repeats);
            p.node("Tile", &[&scaled, &repeats], vec![])
        }));
    }
    for mode in ["DCR", "CRD"] {
        cases.push(after_mul(
            &format!("DepthToSpace {mode}"),
            "DepthToSpace",
            17,
            &[8, 2, 3],
            vec![int("blocksize", 2), text("mode", mode)],
        ));
    }
    cases.push(after_mul("SpaceToDepth", "SpaceToDepth", 17, &[2, 4, 6], vec![int("blocksize", 2)]));
    for (name, axis, positions) in
        [("one", 2, None), ("several", -1, Some(&[3, 0, 0, -1][..])), ("outer", 1, Some(&[1, 0]))]
    {
        cases.push(case(&format!("Gather {name}"), 17, &[2, 5], |p, x| {
            let w = p.param(&[5]);
            let scaled = p.node("Mul", &[x, &w], vec![]);
            let positions = match positions {
                Some(positions) => p.shape(positions),
                None => p.index(-2),
            };
            p.node("Gather", &[&scaled, &positions], vec![int("axis", axis)])
        }));
    }
    cases.push(case("GatherND", 17, &[4], |p, x| {
        let w = p.param(&[4]);
        let scaled = p.node("Mul", &[x, &w], vec![]);
        let turned = p.node("Transpose", &[&scaled], vec![]);
        let flat = p.shape(&[3, 1, 1]);
        let shape = p.shape(&[3, 1]);
        let positions = p.node("Reshape", &[&flat, &shape], vec![]);
        let found = p.node("GatherND", &[&turned, &positions], vec![]);
        p.node("Transpose", &[&found], vec![])
    }));
    cases.push(case("class token before patches", 17, &[3, 4], |p, x| {
        let (token, places) = (p.param(&[1, 1, 4]), p.param(&[1, 4, 4]));
        let shape = p.node("Shape", &[x], vec![int("start", 0), int("end", 1)]);
        let rest = p.shape(&[-1, -1]);
        let target = p.node("Concat", &[&shape, &rest], vec![int("axis", 0)]);
        let size = p.shape(&[3]);
        let all = p.node("ConstantOfShape", &[&size], vec![tensor("value", whole(1))]);
        let open = p.shape(&[-1]);
        let is_open = p.node("Equal", &[&target, &open], vec![]);
        let target = p.node("Where", &[&is_open, &all, &target], vec![]);
        let tokens = p.node("Expand", &[&token, &target], vec![]);
        let joined = p.node("Concat", &[&tokens, x], vec![int("axis", 1)]);
        p.node("Add", &[&joined, &places], vec![])
    }));
    cases.push(case("Expand of an axis", 17, &[1, 4], |p, x| {
        let w = p.param(&[4]);
        let scaled = p.node("Mul", &[x, &w], vec![]);
        let target = p.shape(&[1, 3, 1]);
        p.node("Expand", &[&scaled, &target], vec![])
    }));
    cases
}

/// An int64 tensor of one element.
pub(super) fn whole(value: i64) -> millrace_bundle::onnx::TensorProto {
    millrace_bundle::onnx::TensorProto {
        dims: vec![1],
        data_type: Some(millrace_bundle::onnx::tensor_proto::DataType::Int64 as i32),
        int64_data: vec![value],
        ..Default::default()
    }
}

pub(super) fn shapes() -> Vec<Case> {
    let mut cases = Vec::new();
    cases.push(case("shape arithmetic", 17, &[2, 6], |p, x| {
        let w = p.param(&[6]);
        let scaled = p.node("Mul", &[x, &w], vec![]);
        let shape = p.node("Shape", &[&scaled], vec![]);
        let (zero, one, two, three) = (p.index(0), p.index(1), p.index(2), p.index(3));
        let rows = p.node("Gather", &[&shape, &zero], vec![]);
        let width = p.node("Gather", &[&shape, &two], vec![]);
        // (rows · 6 / rows + 6) / 3 − 1 = 3, and 6 mod 4 = 2
        let all = p.node("Mul", &[&rows, &width], vec![]);
        let back = p.node("Div", &[&all, &rows], vec![]);
        let sum = p.node("Add", &[&back, &width], vec![]);
        let third = p.node("Div", &[&sum, &three], vec![]);
        let third = p.node("Sub", &[&third, &one], vec![]);
        let four = p.node("Add", &[&third, &one], vec![]);
        let rest = p.node("Mod", &[&width, &four], vec![]);
        let axes = p.shape(&[0]);
        let lists = [&rows, &rest, &third].map(|value| p.node("Unsqueeze", &[value, &axes], vec![]));
        let open = p.shape(&[-1]);
        let target = p.node("Concat", &[&lists[0], &lists[1], &lists[2], &open], vec![int("axis", 0)]);
        p.node("Reshape", &[&scaled, &target], vec![int("allowzero", 1)])
    }));
    cases.push(case("positions by Range", 17, &[3, 4], |p, x| {
        let table = p.param(&[8, 4]);
        let size = p.node("Size", &[x], vec![]);
        let shape = p.node("Shape", &[x], vec![int("start", 1), int("end", -1)]);
        let axes = p.shape(&[0]);
        let steps = p.node("Squeeze", &[&shape, &axes], vec![]);
        let (zero, one) = (p.index(0), p.index(1));
        let whole = p.node("Cast", &[&steps], vec![int("to", 7)]);
        let positions = p.node("Range", &[&zero, &whole, &one], vec![]);
        let doubled = p.node("Add", &[&positions, &positions], vec![]);
        let places = p.node("Gather", &[&table, &doubled], vec![]);
        let sum = p.node("Add", &[x, &places], vec![]);
        let list = p.node("Unsqueeze", &[&size, &axes], vec![]);
        let flat = p.node("Reshape", &[&sum, &list], vec![]);
        let target = p.shape(&[-1, 12]);
        p.node("Reshape", &[&flat, &target], vec![])
    }));
    cases.push(case("causal mask from Range", 17, &[3, 4], |p, x| {
        let w = p.param(&[4, 3]);
        let scores = p.node("MatMul", &[x, &w], vec![]);
        let [zero, one, three] = [0, 1, 3].map(|value| p.index(value));
        let steps = p.node("Range", &[&zero, &three, &one], vec![]);
        let (rows, columns) = (p.shape(&[1]), p.shape(&[0]));
        let down = p.node("Unsqueeze", &[&steps, &rows], vec![]);
        let across = p.node("Unsqueeze", &[&steps, &columns], vec![]);
        let later = p.node("Greater", &[&across, &down], vec![]);
        let low = p.constant(&[], vec![-1e9]);
        let masked = p.node("Where", &[&later, &low, &scores], vec![]);
        p.node("Softmax", &[&masked], vec![])
    }));
    cases.push(case("integers that count down, wrap and keep their sign", 18, &[6], |p, x| {
        let w = p.param(&[6]);
        let scaled = p.node("Mul", &[x, &w], vec![]);
        let [four, zero, down, three] = [4, 0, -2, 3].map(|value| p.index(value));
        // 4, 2
        let steps = p.node("Range", &[&four, &zero, &down], vec![]);
        let list = p.shape(&[-1]);
        let three_list = p.shape(&[3]);
        // −1, and 300 as UINT8 is 44, which is 2 mod 3.
        let rest = p.node("Mod", &[&list, &three_list], vec![int("fmod", 1)]);
        let large = p.shape(&[300]);
        let narrow = p.node("Cast", &[&large], vec![int("to", 2)]);
        let wide = p.node("Cast", &[&narrow], vec![int("to", 7)]);
        let wrapped = p.node("Mod", &[&wide, &three], vec![]);
        let same = p.node("ReduceSum", &[&steps], vec![int("noop_with_empty_axes", 1)]);
        let two = p.index(2);
        // 2² = 4
        let square = p.node("Pow", &[&two, &two], vec![]);
        let axes = p.shape(&[0]);
        let square = p.node("Unsqueeze", &[&square, &axes], vec![]);
        let places = p.node("Concat", &[&same, &rest, &wrapped, &square], vec![int("axis", 0)]);
        p.node("Gather", &[&scaled, &places], vec![int("axis", 1)])
    }));
    cases.push(case("scale from a shape", 17, &[3, 4], |p, x| {
        let w = p.param(&[4]);
        let scaled = p.node("Mul", &[x, &w], vec![]);
        let shape = p.node("Shape", &[&scaled], vec![]);
        let (last, end) = (p.shape(&[-1]), p.shape(&[i64::MAX]));
        let width = p.node("Slice", &[&shape, &last, &end], vec![]);
        let width = p.node("Cast", &[&width], vec![int("to", 1)]);
        let root = p.node("Sqrt", &[&width], vec![]);
        let divided = p.node("Div", &[&scaled, &root], vec![]);
        let like = p.node("CastLike", &[&divided, &root], vec![]);
        let flags = p.node("Cast", &[&like], vec![int("to", 9)]);
        let gate = p.node("Cast", &[&flags], vec![int("to", 1)]);
        p.node("Mul", &[&like, &gate], vec![])
    }));
    cases.push(case("integers of every operator", 17, &[3, 4], |p, x| {
        let w = p.param(&[4]);
        let scaled = p.node("Mul", &[x, &w], vec![]);
        let list = p.shape(&[4, -3, 2]);
        let size = p.node("Abs", &[&list], vec![]);
        let negative = p.node("Neg", &[&size], vec![]);
        let (low, high) = (p.node("Min", &[&list, &size], vec![]), p.node("Max", &[&list, &size], vec![]));
        let less = p.node("Less", &[&low, &high], vec![]);
        let other = p.node("GreaterOrEqual", &[&low, &high], vec![]);
        let either = p.node("Or", &[&less, &other], vec![]);
        let both = p.node("And", &[&either, &less], vec![]);
        let none = p.node("Not", &[&both], vec![]);
        let picked = p.node("Where", &[&none, &size, &negative], vec![]);
        let positive = p.node("Abs", &[&picked], vec![]);
        let axis = p.index(0);
        let sums = p.node("CumSum", &[&positive, &axis], vec![]);
        let repeats = p.shape(&[2]);
        let twice = p.node("Tile", &[&sums, &repeats], vec![]);
        let table = p.shape(&[2, 3]);
        let matrix = p.node("Reshape", &[&twice, &table], vec![]);
        let turned = p.node("Transpose", &[&matrix], vec![]);
        let flat = p.shape(&[-1]);
        let line = p.node("Reshape", &[&turned, &flat], vec![]);
        let product = p.node("ReduceProd", &[&line], vec![int("keepdims", 0)]);
        let float = p.node("Cast", &[&product], vec![int("to", 1)]);
        let small = p.constant(&[], vec![1e-4]);
        let factor = p.node("Mul", &[&float, &small], vec![]);
        let expanded = p.shape(&[3, 4]);
        let mask = p.node("ConstantOfShape", &[&expanded], vec![ones()]);
        let scaled = p.node("Mul", &[&scaled, &mask], vec![]);
        p.node("Mul", &[&scaled, &factor], vec![])
    }));
    cases.push(case("Dropout outside training", 17, &[6], |p, x| {
        let w = p.param(&[6]);
        let scaled = p.node("Mul", &[x, &w], vec![]);
        let ratio = p.constant(&[], vec![0.5]);
        p.node("Dropout", &[&scaled, &ratio], vec![])
    }));
    cases.push(case("rows stay apart behind other axes", 17, &[4, 6], |p, x| {
        let w = p.param(&[6]);
        let scaled = p.node("Mul", &[x, &w], vec![]);
        let steps = p.node("Transpose", &[&scaled], vec![ints("perm", &[1, 0, 2])]);
        let target = p.shape(&[0, -1, 2, 3]);
        let apart = p.node("Reshape", &[&steps, &target], vec![]);
        let bent = p.node("Tanh", &[&apart], vec![]);
        p.node("Transpose", &[&bent], vec![ints("perm", &[1, 0, 3, 2])])
    }));
    cases
}
