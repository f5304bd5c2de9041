//! Test models of operators that take elements at positions, and find them.

use super::super::{Probe, int, ints, text};
use super::{Case, case};

/// `x · w` with a weight of the shape `dims`.
fn scaled(p: &mut Probe, x: &str, dims: &[i64]) -> String {
    let w = p.param(dims);
    p.node("Mul", &[x, &w], vec![])
}

/// The rows of `x`, as a list of one number.
fn rows(p: &mut Probe, x: &str) -> String {
    p.node("Shape", &[x], vec![int("start", 0), int("end", 1)])
}

/// The constant positions `[1, count]`, repeated for every row.
fn for_each_row(p: &mut Probe, x: &str, positions: &[i64]) -> String {
    let (list, open) = (p.shape(positions), p.shape(&[1, -1]));
    let list = p.node("Reshape", &[&list, &open], vec![]);
    let (rows, one) = (rows(p, x), p.shape(&[1]));
    let target = p.node("Concat", &[&rows, &one], vec![int("axis", 0)]);
    p.node("Expand", &[&list, &target], vec![])
}

/// Zeros in the shape of `x`.
fn zeros(p: &mut Probe, x: &str) -> String {
    let shape = p.node("Shape", &[x], vec![]);
    p.node("ConstantOfShape", &[&shape], vec![])
}

pub(super) fn positions() -> Vec<Case> {
    let mut cases = searches();
    cases.extend(gathers());
    cases.extend(computed());
    cases.extend(scatters());
    cases.extend(samples());
    for (equation, row, weight) in [
        ("...i,ij->...j", &[2, 3][..], &[3, 4][..]),
        ("...i,...i->...", &[2, 3], &[1, 1, 3]),
        ("a...b,b->...a", &[2, 3], &[3]),
    ] {
        cases.push(case(&format!("Einsum {equation} {weight:?}"), 17, row, |p, x| {
            let w = p.param(weight);
            let bent = p.node("Tanh", &[x], vec![]);
            let found = p.node("Einsum", &[&bent, &w], vec![text("equation", equation)]);
            match equation {
                // The rows go first again.
                "a...b,b->...a" => p.node("Transpose", &[&found], vec![ints("perm", &[1, 0])]),
                _ => found,
            }
        }));
    }
    cases
}

/// Rows of a table at whole numbers that are computed from tokens.
fn computed() -> Vec<Case> {
    let places = case("Gather at the places of tokens that are no padding", 17, &[6], |p, x| {
        p.of_integers();
        let table = p.param(&[8, 3]);
        let (padding, axis) = (p.index(1), p.index(1));
        let is_padding = p.node("Equal", &[x, &padding], vec![]);
        let counts = p.node("Not", &[&is_padding], vec![]);
        let counts = p.node("Cast", &[&counts], vec![int("to", 7)]);
        let sums = p.node("CumSum", &[&counts, &axis], vec![]);
        let places = p.node("Mul", &[&sums, &counts], vec![]);
        let places = p.node("Add", &[&places, &padding], vec![]);
        p.node("Gather", &[&table, &places], vec![])
    });
    // As tf2onnx writes an embedding: what is negative counts from the end.
    let turned = case("Gather at tokens from both ends", 17, &[4], |p, x| {
        p.of_integers();
        let table = p.param(&[5, 2]);
        let (zero, size) = (p.index(0), p.index(5));
        let below = p.node("Less", &[x, &zero], vec![]);
        let above = p.node("Not", &[&below], vec![]);
        let [below, above] = [below, above].map(|flag| p.node("Cast", &[&flag], vec![int("to", 7)]));
        let moved = p.node("Add", &[x, &size], vec![]);
        let first = p.node("Mul", &[&moved, &below], vec![]);
        let second = p.node("Mul", &[x, &above], vec![]);
        let places = p.node("Add", &[&first, &second], vec![]);
        p.node("Gather", &[&table, &places], vec![])
    });
    let chosen = case("Gather at a choice, from the end", 17, &[4], |p, x| {
        p.of_integers();
        let table = p.param(&[5, 2]);
        let (three, two) = (p.index(3), p.index(2));
        let is_three = p.node("Equal", &[x, &three], vec![]);
        let moved = p.node("Sub", &[x, &three], vec![]);
        let least = p.node("Min", &[&moved, &two], vec![]);
        let places = p.node("Where", &[&is_three, &two, &least], vec![]);
        p.node("Gather", &[&table, &places], vec![])
    });
    vec![places, turned, chosen]
}

fn searches() -> Vec<Case> {
    let mut cases = Vec::new();
    for (axis, largest, count) in [(-1, 1, 3), (1, 0, 2), (2, 1, 5)] {
        cases.push(case(&format!("TopK {axis} {largest} {count}"), 17, &[3, 5], |p, x| {
            let scaled = scaled(p, x, &[3, 5]);
            let count = p.shape(&[count]);
            let attributes = vec![int("axis", axis), int("largest", largest), int("sorted", 1)];
            let found = p.nodes("TopK", &[&scaled, &count], attributes, 2);
            let other = p.node("Tanh", &[&scaled], vec![]);
            let beside = p.node("GatherElements", &[&other, &found[1]], vec![int("axis", axis)]);
            let places = p.node("Cast", &[&found[1]], vec![int("to", 1)]);
            let sum = p.node("Mul", &[&beside, &places], vec![]);
            p.node("Add", &[&found[0], &sum], vec![])
        }));
    }
    for (op, last) in [("ArgMax", 0), ("ArgMin", 1)] {
        cases.push(case(&format!("{op} of equal elements, last {last}"), 17, &[6], |p, x| {
            let scaled = scaled(p, x, &[6]);
            let steps = p.node("Sign", &[x], vec![]);
            let attributes = vec![int("axis", 1), int("keepdims", 1), int("select_last_index", last)];
            let place = p.node(op, &[&steps], attributes);
            let found = p.node("GatherElements", &[&scaled, &place], vec![int("axis", 1)]);
            p.node("Mul", &[&scaled, &found], vec![])
        }));
    }
    cases.push(case("OneHot of ArgMax", 17, &[6], |p, x| {
        let scaled = scaled(p, x, &[6]);
        let place = p.node("ArgMax", &[&scaled], vec![int("axis", 1), int("keepdims", 0)]);
        let depth = p.index(6);
        let values = p.constant(&[2], vec![0.5, 2.0]);
        let gate = p.node("OneHot", &[&place, &depth, &values], vec![]);
        p.node("Mul", &[&scaled, &gate], vec![])
    }));
    cases
}

fn gathers() -> Vec<Case> {
    let constant = case("GatherElements, constant", 17, &[5], |p, x| {
        let scaled = scaled(p, x, &[5]);
        let places = for_each_row(p, x, &[3, -1, 0, 3]);
        p.node("GatherElements", &[&scaled, &places], vec![int("axis", 1)])
    });
    let fed = case("GatherElements, fed", 17, &[3], |p, x| {
        p.of_integers();
        let table = p.param(&[7]);
        let places = p.node("Transpose", &[x], vec![]);
        let places = p.node("Transpose", &[&places], vec![]);
        let rows = rows(p, x);
        let width = p.shape(&[7]);
        let target = p.node("Concat", &[&rows, &width], vec![int("axis", 0)]);
        let wide = p.node("Expand", &[&table, &target], vec![]);
        p.node("GatherElements", &[&wide, &places], vec![int("axis", -1)])
    });
    let part = case("GatherElements, a part of another axis", 17, &[3, 4], |p, x| {
        let scaled = scaled(p, x, &[3, 4]);
        let best = p.node("ArgMax", &[&scaled], vec![int("axis", 1)]);
        let [start, end, axis] = [0, 2, 2].map(|value| p.shape(&[value]));
        let places = p.node("Slice", &[&best, &start, &end, &axis], vec![]);
        p.node("GatherElements", &[&scaled, &places], vec![int("axis", 1)])
    });
    let whole = case("positions in integers", 17, &[6], |p, x| {
        let scaled = scaled(p, x, &[6]);
        let [list, places, updates] = [&[4, 3, 2][..], &[2, 0], &[5, 1]].map(|list| p.shape(list));
        // 1, 3, 5
        let changed = p.node("ScatterElements", &[&list, &places, &updates], vec![]);
        // 5, 1
        let picked = p.node("GatherElements", &[&changed, &places], vec![]);
        p.node("Gather", &[&scaled, &picked], vec![int("axis", 1)])
    });
    vec![constant, fed, part, whole]
}

fn scatters() -> Vec<Case> {
    let replace = case("ScatterElements", 18, &[6], |p, x| {
        let scaled = scaled(p, x, &[6]);
        let count = p.shape(&[3]);
        let found = p.nodes("TopK", &[&scaled, &count], vec![], 2);
        let bent = p.node("Tanh", &[&found[0]], vec![]);
        p.node("ScatterElements", &[&scaled, &found[1], &bent], vec![int("axis", 1)])
    });
    let constant = case("ScatterElements at constant places", 18, &[6], |p, x| {
        let scaled = scaled(p, x, &[6]);
        let places = for_each_row(p, x, &[4, 1]);
        let [start, end, axis] = [0, 2, 1].map(|value| p.shape(&[value]));
        let two = p.node("Slice", &[&scaled, &start, &end, &axis], vec![]);
        let zeros = zeros(p, x);
        p.node("ScatterElements", &[&zeros, &places, &two], vec![int("axis", 1), text("reduction", "none")])
    });
    let add = case("ScatterElements that add", 18, &[4], |p, x| {
        let scaled = scaled(p, x, &[4]);
        let places = for_each_row(p, x, &[2, 2, 0, 2]);
        let bent = p.node("Tanh", &[&scaled], vec![]);
        p.node("ScatterElements", &[&bent, &places, &scaled], vec![int("axis", 1), text("reduction", "add")])
    });
    let mut cases = vec![replace, constant, add];
    for (name, reduction) in [("replaces", "none"), ("adds", "add")] {
        cases.push(case(&format!("ScatterND that {name} columns"), 18, &[5], |p, x| {
            let scaled = scaled(p, x, &[5]);
            let turned = p.node("Transpose", &[&scaled], vec![]);
            let (list, shape) = (p.shape(&[3, -5]), p.shape(&[2, 1]));
            let places = p.node("Reshape", &[&list, &shape], vec![]);
            let [start, end, axis] = [1, 3, 0].map(|value| p.shape(&[value]));
            let part = p.node("Slice", &[&turned, &start, &end, &axis], vec![]);
            let bent = p.node("Tanh", &[&part], vec![]);
            let found = p.node("ScatterND", &[&turned, &places, &bent], vec![text("reduction", reduction)]);
            p.node("Transpose", &[&found], vec![])
        }));
    }
    cases.push(case("ScatterND in a table", 18, &[3], |p, x| {
        let (table, part) = (p.param(&[2, 3, 3]), p.param(&[2, 3]));
        let (list, shape) = (p.shape(&[1, 2, 0, 1]), p.shape(&[2, 2]));
        let places = p.node("Reshape", &[&list, &shape], vec![]);
        let changed = p.node("ScatterND", &[&table, &places, &part], vec![]);
        let first = p.index(1);
        let matrix = p.node("Gather", &[&changed, &first], vec![]);
        p.node("MatMul", &[x, &matrix], vec![])
    }));
    cases
}

fn samples() -> Vec<Case> {
    let forms = [
        (16, "bilinear", "zeros", 0),
        (16, "bilinear", "border", 1),
        (20, "linear", "zeros", 1),
        (20, "linear", "border", 0),
        (20, "linear", "reflection", 0),
        (16, "bilinear", "reflection", 1),
        (20, "nearest", "zeros", 0),
        (16, "nearest", "border", 1),
        (20, "nearest", "reflection", 0),
        (20, "cubic", "zeros", 0),
        (16, "bicubic", "border", 1),
        (20, "cubic", "reflection", 0),
    ];
    let sample = |(opset, mode, padding, aligned): (i64, &'static str, &'static str, i64)| {
        sampled(opset, &[2, 4, 3], &[-1, 3, 2, 2], [mode, padding], aligned)
    };
    let mut cases: Vec<Case> = forms.into_iter().map(sample).collect();
    for (mode, padding, aligned) in
        [("linear", "zeros", 0), ("linear", "reflection", 1), ("nearest", "border", 0)]
    {
        cases.push(sampled(20, &[2, 2, 3, 2], &[-1, 1, 2, 2, 3], [mode, padding], aligned));
    }
    for (mode, padding, aligned) in
        [("linear", "zeros", 1), ("cubic", "border", 0), ("nearest", "reflection", 0)]
    {
        cases.push(case(&format!("GridSample {mode} {padding} at no places"), 20, &[2, 4, 3], |p, x| {
            let image = scaled(p, x, &[2, 4, 3]);
            let (weight, shape) = (p.param(&[24, 8]), p.shape(&[-1, 2, 2, 2]));
            let flat = p.node("Flatten", &[x], vec![]);
            let moved = p.node("MatMul", &[&flat, &weight], vec![]);
            let grid = p.node("Reshape", &[&moved, &shape], vec![]);
            // The logarithm is 0, no number, or infinite.
            let odd = p.constant(&[2, 2, 2], vec![1.0, 1.0, -1.0, 1.0, 1.0, 0.0, 0.0, -1.0]);
            let odd = p.node("Log", &[&odd], vec![]);
            let grid = p.node("Add", &[&grid, &odd], vec![]);
            let attributes =
                vec![text("mode", mode), text("padding_mode", padding), int("align_corners", aligned)];
            p.node("GridSample", &[&image, &grid], attributes)
        }));
    }
    for (aligned, row, sizes) in
        [(0, [2, 3], &[2, 3, 4][..]), (1, [2, 3], &[1, 2, 3]), (0, [3, 4], &[2, 1, 3, 2])]
    {
        cases.push(case(&format!("AffineGrid {aligned} {row:?}"), 20, &row, |p, x| {
            let maps = scaled(p, x, &row);
            // The size begins with the rows.
            let shape = p.node("Shape", &[x], vec![int("end", 1)]);
            let rest = p.shape(sizes);
            let size = p.node("Concat", &[&shape, &rest], vec![int("axis", 0)]);
            p.node("AffineGrid", &[&maps, &size], vec![int("align_corners", aligned)])
        }));
    }
    cases
}

/// A GridSample of the input at places that depend on the rows, up to beyond the edges.
fn sampled(opset: i64, row: &[i64], places: &[i64], [mode, padding]: [&str; 2], aligned: i64) -> Case {
    case(&format!("GridSample {mode} {padding} {aligned} {}d", places.len() - 2), opset, row, |p, x| {
        let image = scaled(p, x, row);
        let elements = row.iter().product();
        let weight = p.param(&[elements, places[1..].iter().product()]);
        let flat = p.node("Flatten", &[x], vec![]);
        let moved = p.node("MatMul", &[&flat, &weight], vec![]);
        let shape = p.shape(places);
        let grid = p.node("Reshape", &[&moved, &shape], vec![]);
        let attributes =
            vec![text("mode", mode), text("padding_mode", padding), int("align_corners", aligned)];
        p.node("GridSample", &[&image, &grid], attributes)
    })
}
