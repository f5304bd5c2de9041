//! Tests of row rules for operators that change the shape, order or position of elements.

use millrace_bundle::onnx::tensor_proto::DataType;

use super::support::{Build, accepted, int, ints, refused};

fn reshaped(g: &mut Build, shape: &[i64]) -> String {
    let shape = g.list(shape);
    g.node("Reshape", &["x", &shape], vec![])
}

#[test]
fn reshape_keeps_rows_that_stay_one_axis() {
    for shape in [&[-1, 12][..], &[0, -1], &[0, 4, 3], &[0, 0, -1], &[0, 2, -1, 3], &[-1, 3, 4], &[-1, 1, 12]]
    {
        accepted(17, &[3, 4], |g| reshaped(g, shape));
    }
    // Rows merged with an inner axis: accepted if split again; otherwise there are more rows than in the inputs.
    accepted(17, &[3, 4], |g| {
        let flat = reshaped(g, &[-1, 4]);
        let soft = g.node("Softmax", &[&flat], vec![]);
        let shape = g.list(&[-1, 3, 4]);
        g.node("Reshape", &[&soft, &shape], vec![])
    });
    refused(17, &[3, 4], "one row for each row", |g| reshaped(g, &[-1, 4]));
    refused(17, &[3, 4], "cut a row apart", |g| reshaped(g, &[-1, 5]));
    refused(17, &[3, 4], "cut a row apart", |g| reshaped(g, &[-1, 24]));
    refused(17, &[3, 4], "fixes the number of rows", |g| reshaped(g, &[3, 4]));
    refused(17, &[3, 4], "does not fit its input", |g| reshaped(g, &[0, 6]));
    refused(17, &[3, 4], "splits or merges the rows", |g| reshaped(g, &[4, -1]));
    refused(17, &[3, 4], "not along the first axis", |g| reshaped(g, &[1, -1, 12]));
    refused(17, &[3, 4], "splits or merges the rows", |g| {
        let turned = g.node("Transpose", &["x"], vec![ints("perm", &[1, 0, 2])]);
        let shape = g.list(&[-1, 12]);
        g.node("Reshape", &[&turned, &shape], vec![])
    });
    refused(17, &[-1, 4], "cut a row apart", |g| reshaped(g, &[-1, 8]));
    accepted(17, &[-1, 4], |g| reshaped(g, &[0, -1, 2]));
    refused(17, &[3, 4], "not known", |g| {
        let shape = g.input("shape", DataType::Int64, &[]);
        g.node("Reshape", &["x", &shape], vec![])
    });
    refused(17, &[3, 4], "not known", |g| {
        let shape = g.list(&[0, 12]);
        g.node("Reshape", &["x", &shape], vec![int("allowzero", 1)])
    });
    accepted(17, &[3, 4], |g| g.node("Flatten", &["x"], vec![]));
    refused(17, &[3, 4], "not along the first axis", |g| g.node("Flatten", &["x"], vec![int("axis", 0)]));
}

#[test]
fn axis_with_merged_rows_is_split_again() {
    // Merges steps and rows into one axis, as PyTorch's attention does, and splits them again.
    accepted(17, &[5, 4], |g| {
        let turned = g.node("Transpose", &["x"], vec![ints("perm", &[1, 0, 2])]);
        let flat = g.list(&[-1, 4]);
        let flat = g.node("Reshape", &[&turned, &flat], vec![]);
        let w = g.floats(&[4, 4]);
        let product = g.node("MatMul", &[&flat, &w], vec![]);
        let shape = g.list(&[5, -1, 4]);
        let apart = g.node("Reshape", &[&product, &shape], vec![]);
        g.node("Transpose", &[&apart], vec![ints("perm", &[1, 0, 2])])
    });
    // A merged axis does not consist of rows.
    refused(17, &[5, 4], "not along the first axis", |g| {
        let turned = g.node("Transpose", &["x"], vec![ints("perm", &[1, 0, 2])]);
        let flat = g.list(&[-1, 4]);
        g.node("Reshape", &[&turned, &flat], vec![])
    });
    refused(17, &[5, 4], "rows of one input with rows of another", |g| {
        let flat = g.list(&[-1, 4]);
        let other = g.node("Reshape", &["x", &flat], vec![]);
        let turned = g.node("Transpose", &["x"], vec![ints("perm", &[1, 0, 2])]);
        let flat = g.node("Reshape", &[&turned, &flat], vec![]);
        let sum = g.node("Add", &[&flat, &other], vec![]);
        let shape = g.list(&[-1, 5, 4]);
        g.node("Reshape", &[&sum, &shape], vec![])
    });
}

#[test]
fn axes_are_added_and_dropped_beside_the_rows() {
    let unsqueezed = |g: &mut Build, axes: &[i64]| {
        let axes = g.list(axes);
        g.node("Unsqueeze", &["x", &axes], vec![])
    };
    accepted(17, &[4], |g| unsqueezed(g, &[1]));
    accepted(17, &[4], |g| unsqueezed(g, &[-1, 1]));
    accepted(11, &[4], |g| g.node("Unsqueeze", &["x"], vec![ints("axes", &[2])]));
    refused(17, &[4], "not along the first axis", |g| unsqueezed(g, &[0]));
    accepted(17, &[4], |g| {
        let wide = unsqueezed(g, &[0]);
        let axes = g.list(&[0]);
        g.node("Squeeze", &[&wide, &axes], vec![])
    });
    refused(17, &[1], "drops the axis of the rows", |g| {
        let axes = g.list(&[0]);
        g.node("Squeeze", &["x", &axes], vec![])
    });
    refused(17, &[1], "the rows of a request with one row", |g| g.node("Squeeze", &["x"], vec![]));
    refused(17, &[4], "not along the first axis", |g| g.node("Transpose", &["x"], vec![]));
}

#[test]
fn slices_and_concatenations_along_other_axes_keep_rows() {
    accepted(17, &[4], |g| g.node("Concat", &["x", "x"], vec![int("axis", -1)]));
    refused(17, &[4], "concatenates tensors along the rows", |g| {
        g.node("Concat", &["x", "x"], vec![int("axis", 0)])
    });
    refused(17, &[4], "a constant with rows", |g| {
        let c = g.floats(&[1, 4]);
        g.node("Concat", &["x", &c], vec![int("axis", 1)])
    });
    accepted(17, &[4], |g| g.nodes("Split", &["x"], vec![int("axis", 1)], 2).remove(1));
    refused(17, &[4], "along the rows", |g| g.nodes("Split", &["x"], vec![], 2).remove(1));
    let sliced = |g: &mut Build, places: [i64; 4]| {
        let [start, end, axis, step] = places.map(|place| g.list(&[place]));
        g.node("Slice", &["x", &start, &end, &axis, &step], vec![])
    };
    accepted(17, &[4], |g| sliced(g, [1, 3, 1, 1]));
    accepted(17, &[4], |g| sliced(g, [-1, i64::MIN, 1, -1]));
    accepted(17, &[4], |g| sliced(g, [0, i64::MAX, 0, 1]));
    for places in
        [[0, 1, 0, 1], [1, i64::MAX, 0, 1], [0, i64::MAX, 0, 2], [-1, i64::MIN, 0, -1], [0, -1, -2, 1]]
    {
        refused(17, &[4], "along the rows", |g| sliced(g, places));
    }
    refused(9, &[4], "along the rows", |g| {
        g.node("Slice", &["x"], vec![ints("starts", &[0]), ints("ends", &[1]), ints("axes", &[0])])
    });
    let padded = |g: &mut Build, pads: &[i64]| {
        let pads = g.list(pads);
        g.node("Pad", &["x", &pads], vec![])
    };
    accepted(17, &[4], |g| padded(g, &[0, 1, 0, 2]));
    refused(17, &[4], "along the rows", |g| padded(g, &[0, 0, 1, 0]));
    let top = |g: &mut Build, axis: i64| {
        let count = g.list(&[1]);
        g.nodes("TopK", &["x", &count], vec![int("axis", axis)], 2).remove(1)
    };
    accepted(17, &[4], |g| top(g, -1));
    refused(17, &[4], "along the rows", |g| top(g, 0));
    refused(17, &[4], "side of a matrix", |g| g.node("Trilu", &["x"], vec![]));
    accepted(17, &[4, 4], |g| g.node("Trilu", &["x"], vec![]));
}

#[test]
fn rows_gather_from_constants_and_from_their_own_values() {
    let places = |g: &mut Build, row: &[i64]| g.input("places", DataType::Int64, row);
    // Word indexes, and their embedding vectors.
    accepted(17, &[4], |g| {
        let (table, places) = (g.floats(&[10, 3]), places(g, &[-1]));
        let words = g.node("Gather", &[&table, &places], vec![]);
        g.node("ReduceMean", &[&words], vec![ints("axes", &[1])])
    });
    accepted(17, &[4], |g| {
        let place = g.number(2);
        g.node("Gather", &["x", &place], vec![int("axis", 1)])
    });
    refused(17, &[4], "along the rows", |g| {
        let place = g.list(&[0]);
        g.node("Gather", &["x", &place], vec![])
    });
    refused(17, &[4], "rows choose from other rows", |g| {
        let places = places(g, &[]);
        g.node("Gather", &["x", &places], vec![])
    });
    refused(17, &[4], "rows choose from other rows", |g| {
        let places = places(g, &[]);
        g.node("Gather", &["x", &places], vec![int("axis", 1)])
    });
    accepted(17, &[4], |g| {
        let places = places(g, &[2]);
        g.node("GatherElements", &["x", &places], vec![int("axis", 1)])
    });
    refused(17, &[4], "along the rows", |g| {
        let places = places(g, &[4]);
        g.node("GatherElements", &["x", &places], vec![])
    });
    refused(17, &[4], "the same rows along the same axis", |g| {
        let places = g.integers(&[1, 2], &[0, 1]);
        g.node("GatherElements", &["x", &places], vec![int("axis", 1)])
    });
    let nd = |g: &mut Build, batch_dims: i64| {
        let places = places(g, &[1, 1]);
        g.node("GatherND", &["x", &places], vec![int("batch_dims", batch_dims)])
    };
    accepted(17, &[4], |g| nd(g, 1));
    refused(17, &[4], "rows choose from other rows", |g| nd(g, 0));
    let hot = |g: &mut Build, depth: &str| {
        let (places, values) = (places(g, &[]), g.floats(&[2]));
        g.node("OneHot", &[&places, depth, &values], vec![])
    };
    accepted(17, &[4], |g| {
        let depth = g.number(5);
        hot(g, &depth)
    });
    // The depth would depend on the largest label of all rows.
    refused(17, &[4], "along the rows", |g| {
        let depth = g.node("ReduceMax", &["x"], vec![int("keepdims", 0)]);
        hot(g, &depth)
    });
    let reversed = |g: &mut Build, batch: i64, time: i64| {
        let lengths = g.input("lengths", DataType::Int64, &[]);
        g.node("ReverseSequence", &["x", &lengths], vec![int("batch_axis", batch), int("time_axis", time)])
    };
    accepted(17, &[4], |g| reversed(g, 0, 1));
    refused(17, &[4], "not one for each row", |g| reversed(g, 1, 0));
}

#[test]
fn expand_to_the_number_of_rows_is_accepted_and_expand_of_rows_is_refused() {
    let shape = |g: &mut Build, rest: &[i64]| {
        let (shape, first) = (g.node("Shape", &["x"], vec![]), g.list(&[0]));
        let (rows, rest) = (g.node("Gather", &[&shape, &first], vec![]), g.list(rest));
        g.node("Concat", &[&rows, &rest], vec![int("axis", 0)])
    };
    accepted(17, &[4], |g| {
        let (c, shape) = (g.floats(&[1, 3]), shape(g, &[3]));
        g.node("Expand", &[&c, &shape], vec![])
    });
    accepted(17, &[4], |g| {
        let (c, shape) = (g.floats(&[3]), shape(g, &[3]));
        g.node("Expand", &[&c, &shape], vec![])
    });
    refused(17, &[4], "another axis to the number of rows", |g| {
        let (c, shape) = (g.floats(&[2, 3]), shape(g, &[3]));
        g.node("Expand", &[&c, &shape], vec![])
    });
    refused(17, &[1], "stretches the rows", |g| {
        let shape = g.list(&[3, 4]);
        g.node("Expand", &["x", &shape], vec![])
    });
    accepted(17, &[1], |g| {
        let shape = g.list(&[1, 4]);
        g.node("Expand", &["x", &shape], vec![])
    });
    accepted(17, &[4], |g| {
        let shape = shape(g, &[3]);
        g.node("ConstantOfShape", &[&shape], vec![])
    });
    accepted(17, &[4], |g| {
        let (c, shape) = (g.floats(&[1, 3]), shape(g, &[2]));
        g.node("Tile", &[&c, &shape], vec![])
    });
    refused(17, &[4], "repeats the rows", |g| {
        let repeats = g.list(&[2, 1]);
        g.node("Tile", &["x", &repeats], vec![])
    });
    refused(17, &[4], "counts the rows", |g| {
        let (shape, place) = (g.node("Shape", &["x"], vec![]), g.number(0));
        let rows = g.node("Gather", &[&shape, &place], vec![]);
        let (from, step) = (g.number(0), g.number(1));
        g.node("Range", &[&from, &rows, &step], vec![])
    });
}
