//! Test models of products, reductions and operators that move elements.

use super::super::{float, int, ints};
use super::{Case, after_mul, case};

pub(super) fn products() -> Vec<Case> {
    let mut cases = vec![
        case("MatMul", 17, &[6], |p, x| {
            let w = p.param(&[6, 4]);
            p.node("MatMul", &[x, &w], vec![])
        }),
        case("MatMul rank 3 by 2", 17, &[2, 6], |p, x| {
            let w = p.param(&[6, 4]);
            p.node("MatMul", &[x, &w], vec![])
        }),
        case("MatMul rank 4 by 3", 17, &[2, 3, 4], |p, x| {
            let w = p.param(&[2, 4, 5]);
            p.node("MatMul", &[x, &w], vec![])
        }),
        case("MatMul parameter on the left", 17, &[3, 4], |p, x| {
            let w = p.param(&[5, 3]);
            p.node("MatMul", &[&w, x], vec![])
        }),
        case("MatMul of two activations", 17, &[3, 4], |p, x| {
            let w = p.param(&[4, 4]);
            let keys = p.node("MatMul", &[x, &w], vec![]);
            let turned = p.node("Transpose", &[&keys], vec![ints("perm", &[0, 2, 1])]);
            let scores = p.node("MatMul", &[&keys, &turned], vec![]);
            let shares = p.node("Softmax", &[&scores], vec![]);
            p.node("MatMul", &[&shares, x], vec![])
        }),
        case("shared weights and a residual", 17, &[4], |p, x| {
            let w = p.param(&[4, 4]);
            let once = p.node("MatMul", &[x, &w], vec![]);
            let bent = p.node("Tanh", &[&once], vec![]);
            let twice = p.node("MatMul", &[&bent, &w], vec![]);
            p.node("Add", &[&twice, &bent], vec![])
        }),
        case("Gemm transA", 13, &[6], |p, x| {
            let w = p.param(&[6, 4]);
            let turned = p.node("Transpose", &[x], vec![]);
            p.node("Gemm", &[&turned, &w], vec![int("transA", 1)])
        }),
    ];
    let plain = vec![];
    let full = vec![float("alpha", 0.5), float("beta", -2.0), int("transB", 1)];
    for (attributes, dims) in [(&plain, [6, 4]), (&full, [4, 6])] {
        for bias in [None, Some(&[4][..]), Some(&[1, 4]), Some(&[1])] {
            let name = format!("Gemm {dims:?} C {bias:?}");
            cases.push(case(&name, 17, &[6], |p, x| {
                let w = p.param(&dims);
                let c = bias.map(|dims| p.param(dims));
                let mut inputs = vec![x, w.as_str()];
                inputs.extend(c.as_deref());
                p.node("Gemm", &inputs, attributes.clone())
            }));
        }
    }
    for (name, axis, dims) in [("last", -1, &[4][..]), ("two axes", 1, &[3, 4])] {
        for biased in [true, false] {
            cases.push(case(&format!("LayerNormalization {name} {biased}"), 17, &[3, 4], |p, x| {
                let w = p.param(&[4, 4]);
                let mixed = p.node("MatMul", &[x, &w], vec![]);
                let scale = p.param(dims);
                let bias = biased.then(|| p.param(dims));
                let mut inputs = vec![mixed.as_str(), &scale];
                inputs.extend(bias.as_deref());
                p.node("LayerNormalization", &inputs, vec![int("axis", axis), float("epsilon", 1e-3)])
            }));
        }
    }
    cases
}

pub(super) fn movement() -> Vec<Case> {
    let mut cases = vec![
        after_mul("Flatten", "Flatten", 17, &[2, 3, 2], vec![]),
        after_mul("Transpose", "Transpose", 17, &[2, 3], vec![ints("perm", &[0, 2, 1])]),
        after_mul("ReduceMean attribute", "ReduceMean", 13, &[2, 3, 4], vec![ints("axes", &[-1, 1])]),
        after_mul(
            "ReduceMean squeezed",
            "ReduceMean",
            13,
            &[2, 3, 4],
            vec![ints("axes", &[2]), int("keepdims", 0)],
        ),
        after_mul("ReduceSum attribute", "ReduceSum", 11, &[2, 3], vec![ints("axes", &[1])]),
        after_mul("Squeeze attribute", "Squeeze", 11, &[3, 1], vec![ints("axes", &[2])]),
        after_mul("Unsqueeze attribute", "Unsqueeze", 11, &[3], vec![ints("axes", &[1, -1])]),
        after_mul("GlobalAveragePool 2d", "GlobalAveragePool", 17, &[2, 3, 4], vec![]),
        after_mul("GlobalAveragePool 1d", "GlobalAveragePool", 17, &[2, 5], vec![]),
    ];
    for (name, op, opset, extra, keep) in [
        ("ReduceMean input", "ReduceMean", 18, &[1, 2][..], 0),
        ("ReduceSum input", "ReduceSum", 13, &[-1], 1),
        ("ReduceSum squeezed", "ReduceSum", 17, &[1, 3], 0),
    ] {
        cases.push(case(name, opset, &[2, 3, 4], |p, x| {
            let w = p.param(&[3, 4]);
            let scaled = p.node("Mul", &[x, &w], vec![]);
            let axes = p.shape(extra);
            p.node(op, &[&scaled, &axes], vec![int("keepdims", keep)])
        }));
    }
    for (name, op, row, extra) in [
        ("Reshape -1", "Reshape", &[2, 6][..], &[-1, 3, 4][..]),
        ("Reshape 0 and -1", "Reshape", &[2, 6], &[0, -1]),
        ("Squeeze input", "Squeeze", &[1, 4], &[1]),
        ("Unsqueeze input", "Unsqueeze", &[4], &[1, 3]),
    ] {
        cases.push(case(name, 17, row, |p, x| {
            let w = p.param(row);
            let scaled = p.node("Mul", &[x, &w], vec![]);
            let target = p.shape(extra);
            p.node(op, &[&scaled, &target], vec![])
        }));
    }
    cases.push(case("Reshape through the rows", 17, &[2, 6], |p, x| {
        let rows = p.shape(&[-1, 6]);
        let back = p.shape(&[-1, 8]);
        let w = p.param(&[6, 4]);
        let flat = p.node("Reshape", &[x, &rows], vec![]);
        let product = p.node("Gemm", &[&flat, &w], vec![]);
        p.node("Reshape", &[&product, &back], vec![])
    }));
    for (opset, name) in [(11, "flattening by attribute"), (17, "flattening by input")] {
        cases.push(case(name, opset, &[2, 3], |p, x| {
            // PyTorch exports `x.view(x.size(0), -1)` in this form.
            let w = p.param(&[3]);
            let v = p.param(&[6, 2]);
            let scaled = p.node("Mul", &[x, &w], vec![]);
            let shape = p.node("Shape", &[&scaled], vec![]);
            let first = p.index(0);
            let rows = p.node("Gather", &[&shape, &first], vec![int("axis", 0)]);
            let rows = if opset < 13 {
                p.node("Unsqueeze", &[&rows], vec![ints("axes", &[0])])
            } else {
                let axes = p.shape(&[0]);
                p.node("Unsqueeze", &[&rows, &axes], vec![])
            };
            let rest = p.shape(&[-1]);
            let target = p.node("Concat", &[&rows, &rest], vec![int("axis", 0)]);
            let flat = p.node("Reshape", &[&scaled, &target], vec![]);
            p.node("MatMul", &[&flat, &v], vec![])
        }));
    }
    cases.push(case("Concat", 17, &[2, 3], |p, x| {
        let w = p.param(&[3, 4]);
        let product = p.node("MatMul", &[x, &w], vec![]);
        let bent = p.node("Tanh", &[&product], vec![]);
        let joined = p.node("Concat", &[&product, x, &bent], vec![int("axis", 2)]);
        p.node("Concat", &[&joined, &joined], vec![int("axis", 1)])
    }));
    cases
}
