//! Tests of element types, and of models of a few kilobytes that describe too much.

use super::*;

/// A model that scales its input and hands it to `build`.
fn scaled(opset: i64, row: &[i64], build: impl FnOnce(&mut Probe, &str) -> String) -> ModelProto {
    let mut probe = Probe::new(opset, row);
    let w = probe.param(&row[row.len() - 1..]);
    let scaled = probe.node("Mul", &["x", &w], vec![]);
    let output = build(&mut probe, &scaled);
    probe.finish(&output)
}

/// A model of integers that looks its input up in a table and hands the input to `build`, whose result it adds.
fn of_integers(row: &[i64], build: impl FnOnce(&mut Probe) -> String) -> ModelProto {
    let mut probe = Probe::new(17, row);
    probe.of_integers();
    let w = probe.param(&[1]);
    let found = build(&mut probe);
    let found = probe.node("Cast", &[&found], vec![int("to", 1)]);
    let output = probe.node("Mul", &[&found, &w], vec![]);
    probe.finish(&output)
}

#[test]
fn integers_that_an_operator_does_not_take_are_refused() {
    refused(
        &of_integers(&[3], |p| p.node("ReduceMean", &["x"], vec![ints("axes", &[1])])),
        "holds INT64, which ReduceMean",
    );
    refused(&of_integers(&[3], |p| p.node("Sqrt", &["x"], vec![])), "holds INT64, which Sqrt");
    let fourth = of_integers(&[3], |p| {
        let four = p.index(4);
        p.node("Pow", &["x", &four], vec![])
    });
    refused(&fourth, "exponents 1, 2 and 3");
    let mixed = of_integers(&[3], |p| {
        let half = p.constant(&[], vec![0.5]);
        p.node("Add", &["x", &half], vec![])
    });
    refused(&mixed, "input 1 holds FLOAT, the inputs before it hold INT64");
    let condition = of_integers(&[3], |p| {
        let one = p.index(1);
        p.node("Where", &["x", "x", &one], vec![])
    });
    refused(&condition, "no truth values");
    let masked = scaled(23, &[1, 2, 2], |p, x| {
        let mask = p.shape(&[0, 1]);
        p.node("Attention", &[x, x, x, &mask], vec![])
    });
    refused(&masked, "neither truth values nor floats");
}

#[test]
fn powers_beyond_integers_are_refused() {
    for exponent in [1e30, f32::INFINITY, -3e9] {
        let model = scaled(17, &[3], |p, x| {
            let exponent = p.constant(&[], vec![exponent]);
            p.node("Pow", &[x, &exponent], vec![])
        });
        refused(&model, "less than 2^31");
    }
}

#[test]
fn casts_that_may_not_fit_are_refused() {
    let narrow = scaled(17, &[3], |p, x| {
        let whole = p.node("Cast", &[x], vec![int("to", 2)]);
        p.node("Cast", &[&whole], vec![int("to", 1)])
    });
    refused(&narrow, "casts of FLOAT to UINT8");
    refused(&of_integers(&[3], |p| p.node("Cast", &["x"], vec![int("to", 3)])), "casts of INT64 to INT8");
    let large = scaled(17, &[3], |p, x| {
        let large = p.constant(&[1], vec![1e30]);
        let whole = p.node("Cast", &[&large], vec![int("to", 7)]);
        p.node("Reshape", &[x, &whole], vec![])
    });
    refused(&large, "that the type does not hold");
    let overflow = scaled(17, &[3], |p, x| {
        let many = p.shape(&[1 << 20]);
        let narrow = p.node("Cast", &[&many], vec![int("to", 6)]);
        let square = p.node("Mul", &[&narrow, &narrow], vec![]);
        p.node("Reshape", &[x, &square], vec![])
    });
    refused(&overflow, "does not fit INT32");
}

#[test]
fn positions_by_arithmetic_in_other_float_types_are_refused() {
    let model = |kind: i64| {
        let mut probe = Probe::new(17, &[50]);
        let p = &mut probe;
        let (table, first, end, one) = (p.param(&[80]), p.index(0), p.index(50), p.index(1));
        let numbers = p.node("Range", &[&first, &end, &one], vec![]);
        let numbers = p.node("Cast", &[&numbers], vec![int("to", kind)]);
        let factor = p.constant(&[], vec![1.4]);
        let factor = p.node("Cast", &[&factor], vec![int("to", kind)]);
        let product = p.node("Mul", &[&numbers, &factor], vec![]);
        let whole = p.node("Floor", &[&product], vec![]);
        let places = p.node("Cast", &[&whole], vec![int("to", 7)]);
        let picked = p.node("Gather", &[&table, &places], vec![]);
        let output = p.node("Mul", &["x", &picked], vec![]);
        probe.finish(&output)
    };
    Graph::read(&model(1)).unwrap();
    // DOUBLE gives 62 for 45 times 1.4, FLOAT gives 63.
    for kind in [10, 11, 16] {
        refused(&model(kind), "range is not known");
    }
}

#[test]
fn sizes_by_arithmetic_in_other_float_types_are_refused() {
    let model = |kind: i64| {
        scaled(17, &[63], |p, x| {
            let [size, factor] = [45.0, 1.4].map(|number| p.constant(&[1], vec![number]));
            let [size, factor] = [size, factor].map(|name| p.node("Cast", &[&name], vec![int("to", kind)]));
            let product = p.node("Mul", &[&size, &factor], vec![]);
            let whole = p.node("Floor", &[&product], vec![]);
            let whole = p.node("Cast", &[&whole], vec![int("to", 7)]);
            let rest = p.shape(&[-1]);
            let shape = p.node("Concat", &[&rest, &whole], vec![int("axis", 0)]);
            p.node("Reshape", &[x, &shape], vec![])
        })
    };
    Graph::read(&model(1)).unwrap();
    refused(&model(11), "casts of DOUBLE to INT64");
}

#[test]
fn constants_that_depend_on_the_rows_are_refused() {
    let clipped = scaled(17, &[3], |p, x| {
        let first = p.index(0);
        let shape = p.node("Shape", &[x], vec![]);
        let rows = p.node("Gather", &[&shape, &first], vec![]);
        p.node("Clip", &[x, "", &rows], vec![])
    });
    refused(&clipped, "input 2 ");
}

#[test]
fn a_mask_with_fewer_keys_is_refused_from_operator_set_24_on() {
    let masked = |opset: i64| {
        scaled(opset, &[1, 2, 2], |p, x| {
            let mask = p.constant(&[2, 1], vec![0.5, 1.0]);
            p.node("Attention", &[x, x, x, &mask], vec![])
        })
    };
    refused(&masked(24), "for 2 keys");
    assert!(Graph::read(&masked(23)).is_ok());
    let wide = scaled(23, &[1, 2, 2], |p, x| {
        let mask = p.constant(&[3, 2, 2], vec![0.5; 12]);
        p.node("Attention", &[x, x, x, &mask], vec![])
    });
    refused(&wide, "does not broadcast");
}

#[test]
fn a_table_of_more_rows_than_float32_tells_apart_is_refused() {
    let table = |rows: i64| {
        let mut probe = Probe::new(17, &[2]);
        probe.of_integers();
        let w = probe.param(&[1, 1]);
        let size = probe.shape(&[rows, 1]);
        let table = probe.node("Expand", &[&w, &size], vec![]);
        let output = probe.node("Gather", &[&table, "x"], vec![]);
        probe.finish(&output)
    };
    assert_eq!(Graph::read(&table(1 << 24)).unwrap().inputs()[0].below, Some(vec![1 << 24; 2]));
    refused(&table((1 << 24) + 1), "a table of 16777217 rows");
}

#[test]
fn an_empty_dimension_does_not_hide_a_large_one() {
    for (dims, expected) in [(vec![0, 1 << 40], "exceed"), (vec![1 << 20, 0, 1 << 20, 1 << 20], "exceed")] {
        let empty = scaled(17, &[3], |p, x| {
            let name = p.shape(&[]);
            p.graph.initializer.last_mut().unwrap().dims = dims.clone();
            let turned = p.node("Transpose", &[&name], vec![]);
            p.node("Reshape", &[x, &turned], vec![])
        });
        refused(&empty, expected);
    }
    // Within the limit, no operator on known integers lists the positions of an empty tensor.
    for op in ["Slice", "Transpose", "Concat", "ReduceSum", "Not"] {
        let empty = scaled(17, &[3], |p, x| {
            let name = p.shape(&[]);
            p.graph.initializer.last_mut().unwrap().dims = vec![0, 1 << 30];
            let (start, end) = (p.shape(&[1]), p.shape(&[i64::MAX]));
            let inputs = match op {
                "Slice" => vec![name.as_str(), &start, &end],
                "Concat" => vec![name.as_str(), &name, &name],
                _ => vec![name.as_str()],
            };
            let attributes = if op == "Concat" { vec![int("axis", 1)] } else { vec![] };
            let found = p.node(op, &inputs, attributes);
            p.node("Reshape", &[x, &found], vec![])
        });
        refused(&empty, op_site(op));
    }
    let shape = scaled(17, &[3], |p, x| {
        let sizes = p.shape(&[0, 1 << 40]);
        let value = int_value(7);
        let all = p.node("ConstantOfShape", &[&sizes], vec![value]);
        p.node("Reshape", &[x, &all], vec![])
    });
    refused(&shape, "ConstantOfShape");
}

fn op_site(op: &str) -> &str {
    if op == "Not" || op == "ReduceSum" { "" } else { op }
}

fn int_value(value: i64) -> millrace_bundle::onnx::AttributeProto {
    let one = TensorProto {
        dims: vec![1],
        data_type: Some(tensor_proto::DataType::Int64 as i32),
        int64_data: vec![value],
        ..Default::default()
    };
    crate::probe::tensor("value", one)
}

#[test]
fn known_integers_keep_the_limit_on_dimensions() {
    let grown = scaled(17, &[3], |p, x| {
        let mut list = p.shape(&[0]);
        for _ in 0..40 {
            list = p.node("Gather", &[&list, &list], vec![]);
            let axes = p.shape(&[0, 1, 2]);
            list = p.node("Unsqueeze", &[&list, &axes], vec![]);
        }
        p.node("Reshape", &[x, &list], vec![])
    });
    refused(&grown, "dimensions");
}

#[test]
fn a_wide_window_over_many_places_is_counted_without_visiting_each_element() {
    let size = 1 << 20;
    let model = scaled(17, &[1, size], |p, x| {
        let attributes = vec![
            ints("kernel_shape", &[size]),
            ints("pads", &[size / 2, size / 2 - 1]),
            int("count_include_pad", 0),
        ];
        p.node("AveragePool", &[x], attributes)
    });
    assert!(Graph::read(&model).is_ok());
}

#[test]
fn constants_beyond_the_budget_are_refused_and_dropped_ones_do_not_count() {
    let large = scaled(17, &[3], |p, x| {
        let one = p.constant(&[1], vec![1.0]);
        let size = p.shape(&[1 << 28]);
        let all = p.node("Expand", &[&one, &size], vec![]);
        let part = p.node("ReduceSum", &[&all], vec![]);
        p.node("Mul", &[x, &part], vec![])
    });
    refused(&large, "the limit is");
    // 200 tensors of 2^20 elements, of which two are needed at a time.
    let chain = scaled(17, &[3], |p, x| {
        let one = p.constant(&[1], vec![1.0]);
        let size = p.shape(&[1 << 20]);
        let mut all = p.node("Expand", &[&one, &size], vec![]);
        for _ in 0..200 {
            all = p.node("Tanh", &[&all], vec![]);
        }
        let part = p.node("ReduceSum", &[&all], vec![]);
        p.node("Mul", &[x, &part], vec![])
    });
    assert!(Graph::read(&chain).is_ok());
    // 200 of them that stay, since parameters join them.
    let wide = scaled(17, &[3], |p, x| {
        let (one, w) = (p.constant(&[1], vec![1.0]), p.param(&[1]));
        let size = p.shape(&[1 << 20]);
        let all = p.node("Expand", &[&one, &size], vec![]);
        let mut found = x.to_owned();
        for _ in 0..200 {
            let part = p.node("Tanh", &[&all], vec![]);
            let weighted = p.node("Mul", &[&part, &w], vec![]);
            let sum = p.node("ReduceSum", &[&weighted], vec![]);
            found = p.node("Mul", &[&found, &sum], vec![]);
        }
        found
    });
    refused(&wide, "the limit is");
    let mut budget = budget::Budget::of(&Default::default());
    let site = builder::NodeRef { op: "Range".to_owned(), node: "steps".to_owned() };
    for _ in 0..32 {
        budget.charge_integers(1 << 20, &site).unwrap();
    }
    assert!(budget.charge_integers(1 << 20, &site).unwrap_err().to_string().contains("steps"));
    for _ in 0..2048 {
        budget.release_integers(1 << 20);
        let folded = budget.charge_integers(1 << 20, &site);
        if let Err(error) = folded {
            assert!(error.to_string().contains("when it is read"), "{error}");
            return;
        }
    }
    panic!("integers are folded without a limit");
}
