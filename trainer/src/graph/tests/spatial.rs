//! Tests of forms of spatial operators that are refused: sizes that do not fit, and modes that are not defined.

use millrace_bundle::onnx::AttributeProto;

use super::*;
use crate::probe::text;

/// `op(x · w, …)` of rows of the shape `row`, with known integers as further inputs.
fn of_rows(op: &str, row: &[i64], integers: &[&[i64]], attributes: Vec<AttributeProto>) -> ModelProto {
    let mut probe = Probe::new(20, row);
    let w = probe.param(row);
    let mut inputs = vec![probe.node("Mul", &["x", &w], vec![])];
    inputs.extend(integers.iter().map(|values| probe.shape(values)));
    let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
    let output = probe.node(op, &inputs, attributes);
    probe.finish(&output)
}

#[test]
fn blocks_that_do_not_make_an_image_are_refused() {
    let fold = |row: &[i64], image: &[i64], block: &[i64], attributes| {
        of_rows("Col2Im", row, &[image, block], attributes)
    };
    let apart = || vec![ints("strides", &[2, 2])];
    Graph::read(&fold(&[8, 4], &[4, 4], &[2, 2], apart())).unwrap();
    refused(&fold(&[8, 5], &[4, 4], &[2, 2], apart()), "does not hold blocks");
    refused(&fold(&[7, 4], &[4, 4], &[2, 2], apart()), "does not hold blocks");
    refused(&fold(&[8, 4], &[4, 4], &[5, 2], vec![]), "does not fit a padded size of 4");
    refused(&fold(&[8, 4], &[4, 4, 4], &[2, 2, 2], vec![]), "3 spatial dimensions");
    refused(&fold(&[8, 4], &[4, 4], &[2], apart()), "block_shape = [2]");
    refused(&fold(&[8, 4], &[i64::MAX, 4], &[2, 2], apart()), "image_shape");
    refused(&fold(&[8, 4], &[1 << 20, 1 << 20], &[1 << 20, 1 << 20], vec![]), "does not hold blocks");
    refused(&fold(&[8, 4], &[4, 4], &[2, 2], vec![ints("pads", &[-1, 0, 0, 0])]), "pads = [-1, 0]");
}

#[test]
fn transposed_convolutions_without_an_output_are_refused() {
    let transposed = |row: &[i64], weight: &[i64], attributes| {
        let mut probe = Probe::new(20, row);
        let w = probe.param(weight);
        let output = probe.node("ConvTranspose", &["x", &w], attributes);
        probe.finish(&output)
    };
    for row in [&[2, 3][..], &[2, 3, 3], &[2, 3, 3, 3]] {
        let axes = row.len() - 1;
        let weight = [&[2, 1][..], &vec![2; axes]].concat();
        let pads = |side: i64| vec![ints("pads", &vec![side; 2 * axes])];
        Graph::read(&transposed(row, &weight, pads(1))).unwrap();
        refused(&transposed(row, &weight, pads(2)), "leave nothing of 4 elements");
        let large = vec![ints("strides", &vec![1 << 20; axes]), ints("dilations", &vec![1 << 20; axes])];
        let found = Graph::read(&transposed(row, &weight, large));
        assert!(axes == 1 || found.unwrap_err().to_string().contains("elements per row"));
        let groups = vec![int("group", 3)];
        refused(&transposed(row, &weight, groups), "do not fit 2 channels in 3 group(s)");
    }
    refused(&transposed(&[2, 3, 3, 3], &[2, 1, 2, 2], vec![]), "do not fit 2 channels");
}

#[test]
fn grids_of_unknown_or_ambiguous_sizes_are_refused() {
    let grid = |row: &[i64], tail: &[i64], aligned: i64| {
        let mut probe = Probe::new(20, row);
        let w = probe.param(row);
        let maps = probe.node("Mul", &["x", &w], vec![]);
        let rows = probe.node("Shape", &["x"], vec![int("end", 1)]);
        let rest = probe.shape(tail);
        let size = probe.node("Concat", &[&rows, &rest], vec![int("axis", 0)]);
        let output = probe.node("AffineGrid", &[&maps, &size], vec![int("align_corners", aligned)]);
        probe.finish(&output)
    };
    Graph::read(&grid(&[2, 3], &[1, 4, 5], 1)).unwrap();
    Graph::read(&grid(&[3, 4], &[1, 1, 4, 5], 0)).unwrap();
    refused(&grid(&[2, 3], &[1, 1, 5], 1), "axis of one element");
    refused(&grid(&[2, 3], &[1, 4, 5, 6], 0), "maps [rows, 2, 3] for an image [rows, 1, 4, 5, 6]");
    refused(&grid(&[2, 3], &[1, -4, 5], 0), "of unknown sizes");
    refused(&grid(&[2, 3], &[1, 1 << 20, 1 << 20], 0), "elements per row");
    refused(&grid(&[2, 3], &[1, 1 << 14, 1 << 14], 0), "constants computed from the model");
}

#[test]
fn antialias_without_a_filter_is_refused() {
    let resized = |mode: &str, coordinates: &str| {
        let attributes = vec![
            text("mode", mode),
            text("coordinate_transformation_mode", coordinates),
            int("antialias", 1),
            ints("axes", &[2]),
        ];
        let mut probe = Probe::new(20, &[1, 6]);
        let w = probe.param(&[6]);
        let scaled = probe.node("Mul", &["x", &w], vec![]);
        let size = probe.shape(&[3]);
        let output = probe.node("Resize", &[&scaled, "", "", &size], attributes);
        probe.finish(&output)
    };
    Graph::read(&resized("linear", "half_pixel")).unwrap();
    refused(&resized("nearest", "half_pixel"), "antialias with mode \"nearest\"");
    refused(&resized("cubic", "half_pixel_symmetric"), "antialias with mode \"cubic\"");
    refused(&resized("lanczos", "half_pixel"), "mode \"lanczos\"");
}
