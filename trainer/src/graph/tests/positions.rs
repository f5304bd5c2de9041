//! Tests of positions that a model must not have: outside an axis, twice, of rows, or of no known range.

use millrace_bundle::onnx::AttributeProto;

use super::*;
use crate::probe::text;

/// `op(x · w, positions, …)` along axis 1 of `[rows, 4]`, with constant positions.
fn along(op: &str, positions: &[i64], updates: usize, attributes: Vec<AttributeProto>) -> ModelProto {
    let mut probe = Probe::new(18, &[4]);
    let p = &mut probe;
    let w = p.param(&[4]);
    let scaled = p.node("Mul", &["x", &w], vec![]);
    let (list, open) = (p.shape(positions), p.shape(&[1, -1]));
    let list = p.node("Reshape", &[&list, &open], vec![]);
    let rows = p.node("Shape", &["x"], vec![int("start", 0), int("end", 1)]);
    let one = p.shape(&[1]);
    let target = p.node("Concat", &[&rows, &one], vec![int("axis", 0)]);
    let places = p.node("Expand", &[&list, &target], vec![]);
    let mut inputs = vec![scaled.clone(), places];
    if updates > 0 {
        let [start, end, axis] = [0, updates as i64, 1].map(|value| p.shape(&[value]));
        inputs.push(p.node("Slice", &[&scaled, &start, &end, &axis], vec![]));
    }
    let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
    let output = p.node(op, &inputs, attributes);
    probe.finish(&output)
}

/// `op(x · w)` of `[rows, 4]` with more inputs by `build`.
fn searched(
    op: &str,
    attributes: Vec<AttributeProto>,
    build: impl FnOnce(&mut Probe) -> Vec<String>,
) -> ModelProto {
    let mut probe = Probe::new(17, &[4]);
    let w = probe.param(&[4]);
    let mut inputs = vec![probe.node("Mul", &["x", &w], vec![])];
    inputs.extend(build(&mut probe));
    let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
    let output = probe.node(op, &inputs, attributes);
    probe.finish(&output)
}

#[test]
fn positions_outside_the_axis_are_refused() {
    let one = || vec![int("axis", 1)];
    for positions in [&[0, 4][..], &[-5]] {
        refused(&along("GatherElements", positions, 0, one()), "on an axis of 4");
    }
    // Beyond what float32 tells apart, no range is known.
    for positions in [i64::MAX, i64::MIN] {
        refused(&along("GatherElements", &[positions], 0, one()), "its positions are computed");
    }
    refused(&along("ScatterElements", &[0, 9], 2, one()), "on an axis of 4");
    refused(&along("GatherElements", &[0], 0, vec![int("axis", 2)]), "axis 2");
    refused(&along("GatherElements", &[0], 0, vec![int("axis", 0)]), "its axis is the batch");
    let of_floats = searched("GatherElements", vec![int("axis", 1)], |_| vec!["x".to_owned()]);
    refused(&of_floats, "no integers");
    let computed = searched("GatherElements", vec![int("axis", 1)], |p| {
        vec![p.node("Cast", &["x"], vec![int("to", 7)])]
    });
    refused(&computed, "its positions are computed");
    let flat = searched("GatherElements", vec![int("axis", 1)], |p| vec![p.shape(&[0, 1])]);
    refused(&flat, "no axis 1");
    let first_row = searched("GatherElements", vec![int("axis", 1)], |p| {
        let (list, shape) = (p.shape(&[0, 1]), p.shape(&[1, 2]));
        vec![p.node("Reshape", &[&list, &shape], vec![])]
    });
    refused(&first_row, "the other axes must be equal");
}

#[test]
fn elements_that_meet_are_refused_unless_they_are_added() {
    let one = |reduction: &str| vec![int("axis", 1), text("reduction", reduction)];
    refused(&along("ScatterElements", &[1, 1], 2, one("none")), "may repeat");
    refused(&along("ScatterElements", &[3, -1], 2, one("none")), "may repeat");
    refused(&along("ScatterElements", &[0, 1], 2, one("mul")), "\"mul\" is not supported");
    refused(&along("ScatterElements", &[0, 1], 3, one("add")), "elements for positions");
    Graph::read(&along("ScatterElements", &[1, 1], 2, one("add"))).unwrap();
    Graph::read(&along("ScatterElements", &[1, 0], 2, one("none"))).unwrap();
    let table = |places: &[i64], shape: &[i64], part: &[i64]| {
        let mut probe = Probe::new(17, &[4]);
        let p = &mut probe;
        let (table, part) = (p.param(&[4, 3]), p.param(part));
        let (list, shape) = (p.shape(places), p.shape(shape));
        let places = p.node("Reshape", &[&list, &shape], vec![]);
        let changed = p.node("ScatterND", &[&table, &places, &part], vec![]);
        let output = p.node("MatMul", &["x", &changed], vec![]);
        probe.finish(&output)
    };
    Graph::read(&table(&[0, 3], &[2, 1], &[2, 3])).unwrap();
    refused(&table(&[3, -1], &[2, 1], &[2, 3]), "twice");
    refused(&table(&[0, 4], &[2, 1], &[2, 3]), "axis 4");
    refused(&table(&[0, 1], &[2, 1], &[1, 3]), "elements where positions take [2, 3]");
    refused(&table(&[0, 0, 0], &[1, 3], &[1]), "positions of 3 axes");
    let of_rows = searched("ScatterND", vec![], |p| {
        let (list, shape) = (p.shape(&[0]), p.shape(&[1, 1]));
        vec![p.node("Reshape", &[&list, &shape], vec![]), p.param(&[1, 4])]
    });
    refused(&of_rows, "changes rows of the batch");
}

#[test]
fn searches_that_find_nothing_or_too_much_are_refused() {
    for count in [0, 5, -1, i64::MAX] {
        refused(&searched("TopK", vec![], |p| vec![p.shape(&[count])]), "elements of axis 1");
    }
    refused(&searched("TopK", vec![int("axis", 0)], |p| vec![p.shape(&[1])]), "its axis is the batch");
    refused(&searched("ArgMax", vec![int("axis", 0)], |_| vec![]), "its axis is the batch");
    refused(&searched("ArgMax", vec![int("axis", 7)], |_| vec![]), "axis 7");
    // Positions alone depend on no weight.
    let alone = searched("ArgMax", vec![int("axis", 1)], |_| vec![]);
    refused(&alone, "depends on no trained parameter");
    for (depth, values, reason) in [(0, 2, "depth = 0"), (1 << 40, 2, "depth = "), (4, 3, "3 values")] {
        let mut probe = Probe::new(17, &[4]);
        let p = &mut probe;
        let w = p.param(&[4]);
        let scaled = p.node("Mul", &["x", &w], vec![]);
        let place = p.node("ArgMax", &[&scaled], vec![int("axis", 1), int("keepdims", 0)]);
        let (depth, values) = (p.index(depth), p.constant(&[values], vec![1.0; values as usize]));
        let gate = p.node("OneHot", &[&place, &depth, &values], vec![]);
        let output = p.node("Mul", &[&scaled, &gate], vec![]);
        refused(&probe.finish(&output), reason);
    }
}

#[test]
fn unfit_ellipses_and_samplings_are_refused() {
    let einsum =
        |equation: &str| searched("Einsum", vec![text("equation", equation)], |p| vec![p.param(&[4, 2])]);
    Graph::read(&einsum("...i,ij->...j")).unwrap();
    for (equation, reason) in [
        ("...i,ij->j", "lacks the ellipsis"),
        ("...ijk,ij->...j", "fewer axes"),
        ("..i,ij->..j", "around one ellipsis"),
        ("...i...,ij->...j", "around one ellipsis"),
        ("⁰i,ij->⁰j", "around one ellipsis"),
        ("...i->...i", "1 operands for 2 inputs"),
        ("...i,ij->...q", "in no operand"),
    ] {
        refused(&einsum(equation), reason);
    }
    let sample = |attributes: Vec<AttributeProto>, places: &[i64]| {
        let mut probe = Probe::new(20, &[1, 4, 4]);
        let p = &mut probe;
        let w = p.param(&[16, 8]);
        let flat = p.node("Flatten", &["x"], vec![]);
        let moved = p.node("MatMul", &[&flat, &w], vec![]);
        let shape = p.shape(places);
        let grid = p.node("Reshape", &[&moved, &shape], vec![]);
        let output = p.node("GridSample", &["x", &grid], attributes);
        probe.finish(&output)
    };
    Graph::read(&sample(vec![], &[-1, 2, 2, 2])).unwrap();
    Graph::read(&sample(vec![text("mode", "cubic")], &[-1, 2, 2, 2])).unwrap();
    refused(&sample(vec![text("mode", "lanczos")], &[-1, 2, 2, 2]), "mode = \"lanczos\"");
    refused(&sample(vec![text("padding_mode", "wrap")], &[-1, 2, 2, 2]), "\"wrap\"");
    refused(&sample(vec![], &[-1, 8]), "an image");
    refused(&sample(vec![], &[-1, 2, 1, 4]), "an image");
}

#[test]
fn a_scatter_of_all_rows_into_a_table_is_refused() {
    for reduction in ["add", "none"] {
        let mut probe = Probe::new(18, &[]);
        probe.of_integers();
        let table = probe.param(&[4]);
        let updates = probe.node("Cast", &["x"], vec![int("to", 1)]);
        let inputs = [table.as_str(), "x", &updates];
        let output = probe.node("ScatterElements", &inputs, vec![text("reduction", reduction)]);
        refused(&probe.finish(&output), "elements of all rows into one tensor");
    }
}

#[test]
fn sums_at_positions_beyond_float32_are_refused() {
    let model = |size: i64| {
        let mut probe = Probe::new(18, &[1]);
        let p = &mut probe;
        let (size, part) = (p.shape(&[size]), p.param(&[1]));
        let table = p.node("ConstantOfShape", &[&size], vec![]);
        let (list, shape) = (p.shape(&[3]), p.shape(&[1, 1]));
        let places = p.node("Reshape", &[&list, &shape], vec![]);
        let changed = p.node("ScatterND", &[&table, &places, &part], vec![text("reduction", "add")]);
        let first = p.index(3);
        let picked = p.node("Gather", &[&changed, &first], vec![]);
        let output = p.node("Mul", &["x", &picked], vec![]);
        probe.finish(&output)
    };
    Graph::read(&model(1 << 24)).unwrap();
    refused(&model((1 << 24) + 1), "tell at most 16777216 apart");
}

/// A lookup in five rows at positions that are computed from four tokens.
fn at_tokens(build: impl FnOnce(&mut Probe) -> String) -> ModelProto {
    let mut probe = Probe::new(17, &[4]);
    probe.of_integers();
    let table = probe.param(&[5, 2]);
    let places = build(&mut probe);
    let output = probe.node("Gather", &[&table, &places], vec![]);
    probe.finish(&output)
}

#[test]
fn computed_positions_bound_the_tokens_or_are_refused() {
    let tokens = |model: &ModelProto| Graph::read(model).unwrap().inputs()[0].below.clone().unwrap();
    let bent = |op: &'static str, other: i64| {
        at_tokens(|p| {
            let other = p.index(other);
            p.node(op, &["x", &other], vec![])
        })
    };
    // The smaller one is within the table for any token.
    assert_eq!(tokens(&bent("Min", 4)), [1 << 24; 4]);
    assert_eq!(tokens(&bent("Mod", 5)), [1 << 24; 4]);
    assert_eq!(tokens(&bent("Div", 2)), [10; 4]);
    assert_eq!(tokens(&bent("Div", 100)), [500; 4]);
    assert_eq!(tokens(&bent("Add", 2)), [3; 4]);
    assert_eq!(tokens(&bent("Mul", 2)), [3; 4]);
    // A position may count from the end.
    assert_eq!(tokens(&bent("Sub", 5)), [10; 4]);
    for (op, other) in [("Add", 4), ("Mul", 5), ("Sub", 6), ("Max", 5), ("Div", 0), ("Mul", i64::MAX)] {
        refused(&bent(op, other), "range is not known");
    }
    let of_many = at_tokens(|p| {
        let mut places = "x".to_owned();
        for _ in 0..1000 {
            places = p.node("Abs", &[&places], vec![]);
        }
        places
    });
    refused(&of_many, "range is not known");
}

#[test]
fn positions_of_several_axes_are_bound_by_their_own_axis() {
    let mut probe = Probe::new(17, &[2]);
    probe.of_integers();
    probe.graph.input.push(info("y", Some(&[3, 100])));
    let p = &mut probe;
    let w = p.param(&[100]);
    let scaled = p.node("Mul", &["y", &w], vec![]);
    let rows = p.node("Shape", &["x"], vec![int("start", 0), int("end", 1)]);
    let rows = p.node("Squeeze", &[&rows], vec![]);
    let (first, step, last) = (p.index(0), p.index(1), p.shape(&[-1]));
    let numbers = p.node("Range", &[&first, &rows, &step], vec![]);
    let numbers = p.node("Unsqueeze", &[&numbers, &last], vec![]);
    let [zero, one, two] = [0, 1, 2].map(|at| p.shape(&[at]));
    let down = p.node("Slice", &["x", &zero, &one, &one], vec![]);
    let across = p.node("Slice", &["x", &one, &two, &one], vec![]);
    let places = p.node("Concat", &[&numbers, &down, &across], vec![int("axis", -1)]);
    let output = p.node("GatherND", &[&scaled, &places], vec![]);
    let graph = Graph::read(&probe.finish(&output)).unwrap();
    assert_eq!(graph.inputs()[0].below, Some(vec![3, 100]));
}
