//! Test models of embeddings, Einsum, recurrent layers and attention.

use super::super::{float, int, ints, text};
use super::{Case, case};

pub(super) fn sequences() -> Vec<Case> {
    let mut cases = vec![
        case("embedding", 17, &[3], |p, x| {
            p.of_integers();
            let (table, w) = (p.param(&[5, 4]), p.param(&[4, 2]));
            let words = p.node("Gather", &[&table, x], vec![]);
            p.node("MatMul", &[&words, &w], vec![])
        }),
        case("two embeddings and a mask of the ids", 17, &[3], |p, x| {
            p.of_integers();
            let (table, other) = (p.param(&[7, 4]), p.param(&[5, 2, 2]));
            let words = p.node("Gather", &[&table, x], vec![]);
            let same = p.node("Cast", &[x], vec![int("to", 6)]);
            let axes = p.shape(&[1]);
            let wide = p.node("Unsqueeze", &[&same, &axes], vec![]);
            let narrow = p.node("Squeeze", &[&wide, &axes], vec![]);
            let pairs = p.node("Gather", &[&other, &narrow], vec![]);
            let shape = p.shape(&[0, 0, -1]);
            let pairs = p.node("Reshape", &[&pairs, &shape], vec![]);
            let pad = p.index(0);
            let empty = p.node("Equal", &[x, &pad], vec![]);
            let last = p.shape(&[2]);
            let empty = p.node("Unsqueeze", &[&empty, &last], vec![]);
            let zero = p.constant(&[], vec![0.25]);
            let sum = p.node("Add", &[&words, &pairs], vec![]);
            p.node("Where", &[&empty, &zero, &sum], vec![])
        }),
    ];
    type Equation = (&'static str, &'static [i64], &'static [i64]);
    let equations: [Equation; 7] = [
        ("bij,jk->bik", &[2, 3], &[3, 4]),
        ("bhd,hde->bhe", &[2, 3], &[2, 3, 4]),
        ("bqhd,hde->bqe", &[2, 2, 3], &[2, 3, 2]),
        ("bij,ij->bij", &[2, 3], &[2, 3]),
        ("bi,j->bji", &[2], &[3]),
        ("bij,k->bi", &[2, 3], &[2]),
        ("jk, bij", &[2, 3], &[3, 4]),
    ];
    for (equation, row, weight) in equations {
        cases.push(case(&format!("Einsum {equation}"), 17, row, |p, x| {
            let w = p.param(weight);
            let bent = p.node("Tanh", &[x], vec![]);
            let sides = if equation.starts_with("jk") { [&w, &bent] } else { [&bent, &w] };
            p.node("Einsum", &sides.map(String::as_str), vec![text("equation", equation)])
        }));
    }
    cases.push(case("Einsum of two activations", 17, &[2, 3], |p, x| {
        let w = p.param(&[3]);
        let scaled = p.node("Mul", &[x, &w], vec![]);
        let scores = p.node("Einsum", &[&scaled, x], vec![text("equation", "bid,bjd->bij")]);
        p.node("Einsum", &[&scores], vec![text("equation", "bij->bj")])
    }));
    cases.push(case("Einsum of three operands", 17, &[2, 3], |p, x| {
        let (w, v) = (p.param(&[3, 4]), p.param(&[4, 2]));
        let bent = p.node("Tanh", &[x], vec![]);
        p.node("Einsum", &[&bent, &w, &v], vec![text("equation", "bij,jk,kl->bil")])
    }));
    cases.push(case("Einsum of three activations", 17, &[2, 3], |p, x| {
        let w = p.param(&[3]);
        let scaled = p.node("Mul", &[x, &w], vec![]);
        p.node("Einsum", &[x, &scaled, x], vec![text("equation", "bij,bkj,bkl->bil")])
    }));
    for (op, gates, attributes) in [
        ("LSTM", 4, vec![]),
        ("GRU", 3, vec![]),
        ("GRU", 3, vec![int("linear_before_reset", 1)]),
        ("RNN", 1, vec![]),
    ] {
        for (direction, ways) in [("forward", 1), ("reverse", 1), ("bidirectional", 2)] {
            for output in [0, 1] {
                let form = attributes.len();
                cases.push(case(&format!("{op} {form} {direction} {output}"), 17, &[3, 2], |p, x| {
                    let v = p.param(&[2]);
                    let scaled = p.node("Mul", &[x, &v], vec![]);
                    let steps = p.node("Transpose", &[&scaled], vec![ints("perm", &[1, 0, 2])]);
                    let weights = p.param(&[ways, gates * 2, 2]);
                    let recurrence = p.param(&[ways, gates * 2, 2]);
                    let bias = p.param(&[ways, gates * 4]);
                    // The initial state has the rows of the batch.
                    let start = p.param(&[ways, 1, 2]);
                    let rows = p.node("Shape", &[x], vec![int("end", 1)]);
                    let (one, two) = (p.shape(&[ways]), p.shape(&[2]));
                    let target = p.node("Concat", &[&one, &rows, &two], vec![int("axis", 0)]);
                    let start = p.node("Expand", &[&start, &target], vec![]);
                    let mut inputs = vec![steps.as_str(), &weights, &recurrence];
                    if output == 0 {
                        inputs.extend([bias.as_str(), "", &start]);
                        if op == "LSTM" {
                            inputs.push(&start);
                        }
                    }
                    let mut all = attributes.clone();
                    all.extend([int("hidden_size", 2), text("direction", direction)]);
                    let count = if op == "LSTM" { 3 } else { 2 };
                    let found = p.nodes(op, &inputs, all, count);
                    if output == 0 {
                        let turned = p.node("Transpose", &[&found[0]], vec![ints("perm", &[0, 2, 1, 3])]);
                        let shape = p.shape(&[0, 0, -1]);
                        let joined = p.node("Reshape", &[&turned, &shape], vec![]);
                        return p.node("Transpose", &[&joined], vec![ints("perm", &[1, 0, 2])]);
                    }
                    p.node("Transpose", &[&found[count - 1]], vec![ints("perm", &[1, 0, 2])])
                }));
            }
        }
    }
    cases.push(case("steps merged with rows around a product", 17, &[3, 4], |p, x| {
        let (w, v, bias) = (p.param(&[4]), p.param(&[4, 4]), p.param(&[4]));
        let scaled = p.node("Mul", &[x, &w], vec![]);
        let steps = p.node("Transpose", &[&scaled], vec![ints("perm", &[1, 0, 2])]);
        let (flat, apart) = (p.shape(&[-1, 4]), p.shape(&[3, -1, 2, 2]));
        let merged = p.node("Reshape", &[&steps, &flat], vec![]);
        let product = p.node("Gemm", &[&merged, &v, &bias], vec![int("transB", 1)]);
        let product = p.node("MatMul", &[&product, &v], vec![]);
        let sum = p.node("Add", &[&bias, &product], vec![]);
        let heads = p.node("Reshape", &[&sum, &apart], vec![]);
        p.node("Transpose", &[&heads], vec![ints("perm", &[1, 0, 2, 3])])
    }));
    cases.push(case("Attention of four axes", 23, &[2, 3, 4], |p, x| {
        let w = p.param(&[4]);
        let query = p.node("Mul", &[x, &w], vec![]);
        p.node("Attention", &[&query, x, &query], vec![int("is_causal", 1)])
    }));
    // Masks of truth values hide keys, also those that a node computes; a mask of floats is added.
    for mask in ["And", "Or", "Where", "Concat", "Cast"] {
        cases.push(case(&format!("Attention masked by {mask}"), 23, &[4], |p, x| {
            p.of_integers();
            let (table, w) = (p.param(&[3, 2]), p.param(&[2]));
            let (zero, axes, head) = (p.index(0), p.shape(&[1, 2]), p.shape(&[1]));
            let words = p.node("Gather", &[&table, x], vec![]);
            let values = p.node("Unsqueeze", &[&words, &head], vec![]);
            let query = p.node("Mul", &[&values, &w], vec![]);
            let empty = p.node("Equal", &[x, &zero], vec![]);
            let seen = p.node("Not", &[&empty], vec![]);
            let seen = p.node("Unsqueeze", &[&seen, &axes], vec![]);
            let causal: Vec<bool> = (0..16).map(|at| at % 4 <= at / 4).collect();
            let causal = p.flags(&[4, 4], &causal);
            let mask = match mask {
                "Where" => {
                    // ONNX Runtime selects integers, not truth values.
                    let seen = p.node("Cast", &[&seen], vec![int("to", 7)]);
                    let chosen = p.node("Where", &[&causal, &seen, &zero], vec![]);
                    p.node("Cast", &[&chosen], vec![int("to", 9)])
                }
                "Concat" => {
                    let cut = p.shape(&[3]);
                    let parts = [p.shape(&[0]), p.shape(&[2]), p.shape(&[4])];
                    let both = p.node("And", &[&seen, &causal], vec![]);
                    let first = p.node("Slice", &[&both, &parts[0], &parts[1], &cut], vec![]);
                    let last = p.node("Slice", &[&both, &parts[1], &parts[2], &cut], vec![]);
                    p.node("Concat", &[&last, &first], vec![int("axis", 3)])
                }
                "Cast" => {
                    let both = p.node("And", &[&seen, &causal], vec![]);
                    p.node("Cast", &[&both], vec![int("to", 1)])
                }
                op => p.node(op, &[&seen, &causal], vec![]),
            };
            p.node("Attention", &[&query, &values, &values, &mask], vec![])
        }));
    }
    cases.push(case("Attention with a query that sees no key", 23, &[1, 3, 2], |p, x| {
        let w = p.param(&[2]);
        let query = p.node("Mul", &[x, &w], vec![]);
        let mask = p.flags(&[3, 3], &[true, false, true, false, false, false, true, true, true]);
        p.node("Attention", &[&query, x, &query, &mask], vec![])
    }));
    cases.push(case("quotients and powers of integers", 17, &[3], |p, x| {
        p.of_integers();
        let w = p.param(&[3]);
        let (two, three) = (p.index(2), p.index(3));
        let shifted = p.node("Sub", &[x, &three], vec![]);
        let half = p.node("Div", &[&shifted, &two], vec![]);
        let odd = p.node("Pow", &[&half, &three], vec![]);
        let like = p.node("CastLike", &[&odd, &w], vec![]);
        let bent = p.node("Tanh", &[&w], vec![]);
        let whole = p.node("CastLike", &[&like, x], vec![]);
        let third = p.node("Div", &[&whole, &three], vec![]);
        let third = p.node("Cast", &[&third], vec![int("to", 1)]);
        p.node("Mul", &[&third, &bent], vec![])
    }));
    cases.push(case("tables of different sizes for parts of the input", 17, &[3], |p, x| {
        p.of_integers();
        let (large, small) = (p.param(&[700, 2]), p.param(&[2, 2]));
        let (axis, ends) = (p.shape(&[1]), [p.shape(&[0]), p.shape(&[2]), p.shape(&[3])]);
        let first = p.node("Slice", &[x, &ends[0], &ends[1], &axis], vec![]);
        let last = p.node("Slice", &[x, &ends[1], &ends[2], &axis], vec![]);
        let turned = p.node("Transpose", &[&first], vec![]);
        let (words, kinds) =
            (p.node("Gather", &[&large, &turned], vec![]), p.node("Gather", &[&small, &last], vec![]));
        let words = p.node("Transpose", &[&words], vec![ints("perm", &[1, 0, 2])]);
        p.node("Add", &[&words, &kinds], vec![])
    }));
    cases.push(case("Attention of three axes", 23, &[3, 4], |p, x| {
        let w = p.param(&[4]);
        let query = p.node("Mul", &[x, &w], vec![]);
        let mask = p.param(&[3, 3]);
        let attributes = vec![int("q_num_heads", 2), int("kv_num_heads", 2), float("scale", 0.7)];
        p.node("Attention", &[&query, x, &query, &mask], attributes)
    }));
    cases
}
