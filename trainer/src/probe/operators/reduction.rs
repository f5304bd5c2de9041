//! Test models of reductions and normalisations.

use super::super::{float, int, ints};
use super::{Case, after_mul, case};

pub(super) fn reductions() -> Vec<Case> {
    let mut cases = Vec::new();
    for op in [
        "ReduceMax",
        "ReduceMin",
        "ReduceL1",
        "ReduceL2",
        "ReduceSumSquare",
        "ReduceProd",
        "ReduceLogSum",
        "ReduceLogSumExp",
    ] {
        for (opset, keep) in [(13, 1), (18, 0)] {
            cases.push(case(&format!("{op} in operator set {opset}"), opset, &[2, 3, 4], |p, x| {
                let w = p.param(&[3, 4]);
                let mut value = p.node("Mul", &[x, &w], vec![]);
                if op == "ReduceLogSum" {
                    value = p.node("Exp", &[&value], vec![]);
                }
                let axes = p.shape(&[1, -1]);
                let mut attributes = vec![int("keepdims", keep)];
                let mut inputs = vec![value.as_str()];
                if opset < 18 {
                    attributes.push(ints("axes", &[2]));
                } else {
                    inputs.push(&axes);
                }
                p.node(op, &inputs, attributes)
            }));
        }
    }
    for op in [
        "ReduceL1",
        "ReduceL2",
        "ReduceSumSquare",
        "ReduceLogSum",
        "ReduceLogSumExp",
        "ReduceMean",
        "ReduceProd",
    ] {
        cases.push(case(&format!("{op} over no axis"), 18, &[2, 3], |p, x| {
            let w = p.param(&[3]);
            let mut value = p.node("Mul", &[x, &w], vec![]);
            if op == "ReduceLogSum" {
                value = p.node("Exp", &[&value], vec![]);
            }
            p.node(op, &[&value], vec![int("noop_with_empty_axes", 1), int("keepdims", 0)])
        }));
    }
    cases.push(after_mul("GlobalMaxPool", "GlobalMaxPool", 17, &[2, 3, 4], vec![]));
    cases
}

pub(super) fn normalizations() -> Vec<Case> {
    let mut cases = Vec::new();
    for row in [&[4, 3][..], &[4, 3, 2]] {
        cases.push(case(&format!("BatchNormalization {row:?}"), 17, row, |p, x| {
            let v = p.param(&row[row.len() - 1..]);
            let scaled = p.node("Mul", &[x, &v], vec![]);
            let (scale, bias) = (p.param(&[4]), p.param(&[4]));
            let mean = p.param_of(&[4], vec![0.1, -0.4, 0.3, 0.2]);
            let variance = p.param_of(&[4], vec![1.2, 0.3, 0.8, 0.5]);
            let attributes = vec![float("epsilon", 1e-3), float("momentum", 0.9)];
            p.node("BatchNormalization", &[&scaled, &scale, &bias, &mean, &variance], attributes)
        }));
        cases.push(case(&format!("InstanceNormalization {row:?}"), 17, row, |p, x| {
            let v = p.param(row);
            let scaled = p.node("Mul", &[x, &v], vec![]);
            let (scale, bias) = (p.param(&[4]), p.param(&[4]));
            p.node("InstanceNormalization", &[&scaled, &scale, &bias], vec![float("epsilon", 1e-2)])
        }));
        for (opset, factors) in [(18, 2), (21, 4)] {
            cases.push(case(&format!("GroupNormalization {opset} {row:?}"), opset, row, |p, x| {
                let v = p.param(row);
                let scaled = p.node("Mul", &[x, &v], vec![]);
                let (scale, bias) = (p.param(&[factors]), p.param(&[factors]));
                let attributes = vec![int("num_groups", 2), float("epsilon", 1e-2)];
                p.node("GroupNormalization", &[&scaled, &scale, &bias], attributes)
            }));
        }
    }
    cases.push(case("RMSNormalization", 23, &[3, 4], |p, x| {
        let v = p.param(&[4, 4]);
        let mixed = p.node("MatMul", &[x, &v], vec![]);
        let scale = p.param(&[4]);
        p.node("RMSNormalization", &[&mixed, &scale], vec![float("epsilon", 1e-3)])
    }));
    cases
}
