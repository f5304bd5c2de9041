//! Test models of convolutions and pools.

use millrace_bundle::onnx::AttributeProto;

use super::super::{floats, int, ints, text};
use super::{Case, after_mul, case};

pub(super) fn convolutions() -> Vec<Case> {
    type Form = (&'static str, &'static [i64], &'static [i64], bool, Vec<AttributeProto>);
    let forms: Vec<Form> = vec![
        ("Conv valid", &[2, 5, 5], &[3, 2, 3, 3], true, vec![]),
        ("Conv no bias", &[2, 5, 4], &[3, 2, 2, 3], false, vec![ints("kernel_shape", &[2, 3])]),
        ("Conv 1x1", &[3, 4, 4], &[2, 3, 1, 1], true, vec![]),
        ("Conv padded", &[2, 4, 4], &[3, 2, 3, 3], true, vec![ints("pads", &[1, 1, 1, 1])]),
        (
            "Conv strided",
            &[2, 6, 6],
            &[3, 2, 3, 3],
            true,
            vec![ints("strides", &[2, 2]), ints("pads", &[1, 1, 1, 1])],
        ),
        ("Conv strided unevenly", &[1, 8, 7], &[2, 1, 3, 2], true, vec![ints("strides", &[3, 2])]),
        (
            "Conv dilated",
            &[2, 7, 7],
            &[2, 2, 3, 3],
            true,
            vec![ints("dilations", &[2, 2]), ints("pads", &[2, 2, 2, 2])],
        ),
        (
            "Conv dilated and strided",
            &[1, 8, 8],
            &[2, 1, 2, 3],
            true,
            vec![ints("dilations", &[3, 2]), ints("strides", &[2, 3])],
        ),
        ("Conv grouped", &[4, 5, 5], &[6, 2, 3, 3], true, vec![int("group", 2), ints("strides", &[2, 2])]),
        (
            "Conv grouped unevenly",
            &[4, 6, 6],
            &[4, 2, 3, 3],
            false,
            vec![int("group", 2), ints("strides", &[2, 2]), ints("pads", &[1, 0, 1, 0])],
        ),
        (
            "Conv depthwise",
            &[3, 5, 5],
            &[3, 1, 3, 3],
            true,
            vec![int("group", 3), ints("pads", &[1, 1, 1, 1])],
        ),
        ("Conv padded on one side", &[2, 4, 4], &[2, 2, 2, 2], true, vec![ints("pads", &[0, 1, 1, 0])]),
        (
            "Conv SAME_UPPER",
            &[2, 5, 6],
            &[2, 2, 3, 2],
            true,
            vec![text("auto_pad", "SAME_UPPER"), ints("strides", &[2, 2])],
        ),
        ("Conv SAME_LOWER", &[2, 5, 6], &[2, 2, 2, 2], true, vec![text("auto_pad", "SAME_LOWER")]),
        ("Conv VALID", &[1, 4, 4], &[2, 1, 3, 3], true, vec![text("auto_pad", "VALID")]),
        ("Conv 1d", &[2, 7], &[3, 2, 3], true, vec![ints("pads", &[1, 1])]),
        (
            "Conv 1d full",
            &[4, 9],
            &[4, 2, 3],
            true,
            vec![int("group", 2), ints("strides", &[2]), ints("dilations", &[2]), ints("pads", &[2, 1])],
        ),
        ("Conv 3d", &[2, 3, 4, 4], &[3, 2, 2, 3, 3], true, vec![ints("pads", &[0, 1, 1, 0, 1, 1])]),
        (
            "Conv 3d full",
            &[4, 4, 5, 5],
            &[2, 2, 2, 2, 3],
            true,
            vec![
                int("group", 2),
                ints("strides", &[2, 1, 2]),
                ints("dilations", &[1, 2, 1]),
                ints("pads", &[1, 0, 1, 0, 1, 1]),
            ],
        ),
        ("Conv 1d strided unevenly", &[4, 8], &[4, 2, 3], true, vec![int("group", 2), ints("strides", &[2])]),
    ];
    forms
        .into_iter()
        .map(|(name, row, weight, biased, attributes)| {
            case(name, 17, row, |p, x| {
                // A parameter before the convolution requires the gradient with respect to its input.
                let v = p.param(&row[1..]);
                let scaled = p.node("Mul", &[x, &v], vec![]);
                let w = p.param(weight);
                let bias = biased.then(|| p.param(&weight[..1]));
                let mut inputs = vec![scaled.as_str(), &w];
                inputs.extend(bias.as_deref());
                p.node("Conv", &inputs, attributes)
            })
        })
        .collect()
}

pub(super) fn pools() -> Vec<Case> {
    let square = || ints("kernel_shape", &[2, 2]);
    let three = || ints("kernel_shape", &[3, 3]);
    let twos = || ints("strides", &[2, 2]);
    let ring = || ints("pads", &[1, 1, 1, 1]);
    vec![
        after_mul("MaxPool", "MaxPool", 17, &[2, 4, 4], vec![square(), twos()]),
        after_mul("MaxPool uneven", "MaxPool", 17, &[2, 5, 5], vec![square(), twos()]),
        after_mul("MaxPool padded", "MaxPool", 17, &[2, 5, 6], vec![three(), twos(), ring()]),
        after_mul("MaxPool overlapping", "MaxPool", 17, &[1, 5, 5], vec![three()]),
        after_mul("MaxPool dilated", "MaxPool", 17, &[1, 6, 6], vec![square(), ints("dilations", &[2, 3])]),
        after_mul(
            "MaxPool 1d",
            "MaxPool",
            17,
            &[2, 7],
            vec![ints("kernel_shape", &[3]), ints("strides", &[2]), ints("pads", &[1, 1])],
        ),
        after_mul(
            "MaxPool with a cut window",
            "MaxPool",
            17,
            &[2, 5, 6],
            vec![square(), twos(), int("ceil_mode", 1)],
        ),
        after_mul(
            "MaxPool padded on one side",
            "MaxPool",
            17,
            &[2, 5, 5],
            vec![three(), twos(), ints("pads", &[0, 1, 1, 0])],
        ),
        after_mul(
            "MaxPool SAME_UPPER",
            "MaxPool",
            17,
            &[2, 5, 5],
            vec![square(), twos(), text("auto_pad", "SAME_UPPER")],
        ),
        after_mul("MaxPool 3d", "MaxPool", 17, &[2, 3, 4, 5], vec![ints("kernel_shape", &[2, 2, 3])]),
        after_mul(
            "MaxPool 3d full",
            "MaxPool",
            17,
            &[2, 4, 5, 5],
            vec![
                ints("kernel_shape", &[2, 2, 2]),
                ints("strides", &[2, 2, 1]),
                ints("pads", &[0, 1, 0, 0, 0, 1]),
                int("ceil_mode", 1),
            ],
        ),
        after_mul("AveragePool 3d", "AveragePool", 17, &[2, 3, 4, 4], vec![ints("kernel_shape", &[2, 2, 3])]),
        after_mul(
            "AveragePool 3d full",
            "AveragePool",
            17,
            &[2, 4, 5, 4],
            vec![
                ints("kernel_shape", &[2, 3, 2]),
                ints("strides", &[2, 2, 1]),
                ints("pads", &[1, 1, 0, 1, 1, 1]),
            ],
        ),
        after_mul(
            "AveragePool with a cut window",
            "AveragePool",
            17,
            &[2, 5, 6],
            vec![square(), twos(), int("ceil_mode", 1)],
        ),
        after_mul(
            "AveragePool padded on one side",
            "AveragePool",
            17,
            &[2, 5, 5],
            vec![three(), twos(), ints("pads", &[0, 1, 1, 0])],
        ),
        after_mul(
            "AveragePool counting pads on one side",
            "AveragePool",
            17,
            &[2, 5, 5],
            vec![three(), twos(), ints("pads", &[0, 1, 1, 0]), int("count_include_pad", 1)],
        ),
        after_mul(
            "AveragePool counting pads before the input, with a cut window",
            "AveragePool",
            19,
            &[2, 4, 5],
            vec![
                square(),
                twos(),
                ints("pads", &[1, 1, 0, 0]),
                int("ceil_mode", 1),
                int("count_include_pad", 1),
            ],
        ),
        after_mul(
            "AveragePool counting pads on both sides, with a cut window",
            "AveragePool",
            19,
            &[2, 6, 5],
            vec![three(), twos(), ring(), int("ceil_mode", 1), int("count_include_pad", 1)],
        ),
        after_mul("AveragePool", "AveragePool", 17, &[2, 4, 4], vec![square(), twos()]),
        after_mul("AveragePool uneven", "AveragePool", 17, &[2, 5, 5], vec![square(), twos()]),
        after_mul("AveragePool padded", "AveragePool", 17, &[2, 5, 6], vec![three(), twos(), ring()]),
        after_mul(
            "AveragePool counting pads",
            "AveragePool",
            17,
            &[2, 5, 6],
            vec![three(), twos(), ring(), int("count_include_pad", 1)],
        ),
        after_mul(
            "AveragePool 1d",
            "AveragePool",
            17,
            &[2, 7],
            vec![ints("kernel_shape", &[2]), ints("pads", &[1, 1])],
        ),
    ]
}

pub(super) fn transposes() -> Vec<Case> {
    type Form = (&'static str, &'static [i64], &'static [i64], i64, Vec<AttributeProto>);
    let twos = || ints("strides", &[2, 2]);
    let forms: Vec<Form> = vec![
        ("plain", &[2, 3, 3], &[2, 3, 2, 3], 3, vec![]),
        ("strided", &[2, 3, 4], &[2, 3, 3, 3], 3, vec![twos(), ints("pads", &[1, 1, 1, 1])]),
        (
            "with extra elements",
            &[2, 3, 3],
            &[2, 2, 3, 3],
            2,
            vec![twos(), ints("pads", &[1, 0, 0, 1]), ints("output_padding", &[1, 1])],
        ),
        ("grouped", &[4, 3, 3], &[4, 2, 2, 2], 4, vec![twos(), int("group", 2)]),
        ("dilated", &[2, 3, 3], &[2, 2, 2, 2], 2, vec![ints("dilations", &[2, 1])]),
        ("to a shape", &[2, 3, 3], &[2, 2, 3, 3], 2, vec![twos(), ints("output_shape", &[6, 6])]),
        ("to a larger shape", &[2, 3, 3], &[2, 2, 1, 2], 2, vec![twos(), ints("output_shape", &[6, 7])]),
        (
            "1d",
            &[3, 4],
            &[3, 2, 3],
            2,
            vec![ints("strides", &[2]), ints("pads", &[1, 1]), ints("output_padding", &[1])],
        ),
        ("3d", &[2, 2, 3, 2], &[2, 2, 2, 1, 3], 2, vec![]),
        (
            "3d full",
            &[4, 2, 2, 3],
            &[4, 1, 2, 3, 2],
            2,
            vec![
                int("group", 2),
                ints("strides", &[2, 1, 3]),
                ints("dilations", &[1, 2, 1]),
                ints("pads", &[0, 1, 1, 1, 0, 0]),
                ints("output_padding", &[1, 0, 2]),
            ],
        ),
    ];
    forms
        .into_iter()
        .map(|(name, row, weight, channels, attributes)| {
            case(&format!("ConvTranspose {name}"), 17, row, |p, x| {
                let v = p.param(&row[1..]);
                let scaled = p.node("Mul", &[x, &v], vec![]);
                let (w, bias) = (p.param(weight), p.param(&[channels]));
                p.node("ConvTranspose", &[&scaled, &w, &bias], attributes)
            })
        })
        .collect()
}

/// Sums of blocks in an image.
pub(super) fn folds() -> Vec<Case> {
    type Form = (&'static str, &'static [i64], &'static [i64], &'static [i64], Vec<AttributeProto>);
    let forms: Vec<Form> = vec![
        ("apart", &[8, 4], &[4, 4], &[2, 2], vec![ints("strides", &[2, 2])]),
        (
            "over one another",
            &[12, 12],
            &[5, 4],
            &[3, 2],
            vec![ints("strides", &[2, 1]), ints("pads", &[1, 0, 1, 1])],
        ),
        (
            "dilated, with a rest",
            &[4, 4],
            &[6, 6],
            &[2, 2],
            vec![ints("dilations", &[2, 2]), ints("strides", &[3, 2])],
        ),
        ("1d", &[6, 4], &[8], &[3], vec![ints("strides", &[2]), ints("pads", &[0, 1])]),
    ];
    forms
        .into_iter()
        .map(|(name, row, image, block, attributes)| {
            case(&format!("Col2Im {name}"), 18, row, |p, x| {
                let w = p.param(row);
                let scaled = p.node("Mul", &[x, &w], vec![]);
                let (image, block) = (p.shape(image), p.shape(block));
                p.node("Col2Im", &[&scaled, &image, &block], attributes)
            })
        })
        .collect()
}

pub(super) fn resizes() -> Vec<Case> {
    let mut cases = Vec::new();
    for (mode, coordinates, outside, size, factor) in [
        ("linear", "half_pixel", 0, [3, 5], [0.5, 1.5]),
        ("linear", "half_pixel", 1, [8, 7], [0.5, 0.7]),
        ("linear", "align_corners", 1, [6, 4], [0.5, 0.5]),
        ("cubic", "half_pixel", 1, [7, 5], [0.5, 2.0]),
        ("cubic", "asymmetric", 0, [9, 4], [0.4, 0.75]),
    ] {
        cases.push(case(
            &format!("Resize with antialias {mode} {coordinates} {outside}"),
            18,
            &[1, size[0], size[1]],
            |p, x| {
                let w = p.param(&[size[1]]);
                let scaled = p.node("Mul", &[x, &w], vec![]);
                let scales = p.param_of(&[4], [&[1.0, 1.0], &factor[..]].concat());
                let attributes = vec![
                    text("mode", mode),
                    text("coordinate_transformation_mode", coordinates),
                    int("antialias", 1),
                    int("exclude_outside", outside),
                ];
                p.node("Resize", &[&scaled, "", &scales], attributes)
            },
        ));
    }
    for (mode, coordinates, nearest) in [
        ("nearest", "asymmetric", "floor"),
        ("nearest", "half_pixel", "round_prefer_floor"),
        ("linear", "half_pixel", "floor"),
        ("linear", "pytorch_half_pixel", "floor"),
        ("linear", "align_corners", "floor"),
        ("linear", "asymmetric", "floor"),
        ("cubic", "half_pixel", "floor"),
    ] {
        for sizes in [false, true] {
            cases.push(case(&format!("Resize {mode} {coordinates} {sizes}"), 17, &[2, 3, 4], |p, x| {
                let w = p.param(&[4]);
                let scaled = p.node("Mul", &[x, &w], vec![]);
                let attributes = vec![
                    text("mode", mode),
                    text("coordinate_transformation_mode", coordinates),
                    text("nearest_mode", nearest),
                ];
                if sizes {
                    let shape = p.node("Shape", &[&scaled], vec![int("end", 2)]);
                    let rest = p.shape(&[5, 6]);
                    let target = p.node("Concat", &[&shape, &rest], vec![int("axis", 0)]);
                    return p.node("Resize", &[&scaled, "", "", &target], attributes);
                }
                // An initializer of an operand that must be constant is not trained.
                let scales = p.param_of(&[4], vec![1.0, 1.0, 2.0, 1.5]);
                p.node("Resize", &[&scaled, "", &scales], attributes)
            }));
        }
    }
    for (factor, size) in [(0.7, 10), (2.3, 10), (0.9, 20), (1.3, 3)] {
        cases.push(case(&format!("Resize of {size} by {factor}"), 13, &[2, size], |p, x| {
            let w = p.param(&[size]);
            let scaled = p.node("Mul", &[x, &w], vec![]);
            let scales = p.constant(&[3], vec![1.0, 1.0, factor]);
            p.node("Resize", &[&scaled, "", &scales], vec![])
        }));
    }
    // Float32 decides which element is nearest.
    for (coordinates, nearest, from, to) in [
        ("half_pixel", "floor", 7, 1),
        ("half_pixel", "round_prefer_floor", 14, 17),
        ("half_pixel", "ceil", 7, 17),
        ("half_pixel", "round_prefer_ceil", 14, 9),
        ("half_pixel", "round_prefer_floor", 14, 19),
        ("half_pixel", "round_prefer_ceil", 14, 1),
        ("asymmetric", "floor", 14, 2),
        ("asymmetric", "round_prefer_ceil", 7, 18),
        ("pytorch_half_pixel", "floor", 7, 9),
    ] {
        cases.push(case(
            &format!("Resize {coordinates} {nearest} {from} to {to}"),
            18,
            &[2, from],
            |p, x| {
                let w = p.param(&[from]);
                let scaled = p.node("Mul", &[x, &w], vec![]);
                let size = p.shape(&[to]);
                let attributes = vec![
                    ints("axes", &[-1]),
                    text("coordinate_transformation_mode", coordinates),
                    text("nearest_mode", nearest),
                ];
                p.node("Resize", &[&scaled, "", "", &size], attributes)
            },
        ));
    }
    cases.push(case("Resize of operator set 10 to fewer elements", 10, &[2, 10], |p, x| {
        let w = p.param(&[10]);
        let scaled = p.node("Mul", &[x, &w], vec![]);
        let scales = p.constant(&[3], vec![1.0, 1.0, 0.6]);
        p.node("Resize", &[&scaled, &scales], vec![])
    }));
    cases.push(case("Resize of operator set 10", 10, &[2, 3, 4], |p, x| {
        let w = p.param(&[4]);
        let scaled = p.node("Mul", &[x, &w], vec![]);
        let scales = p.constant(&[4], vec![1.0, 1.0, 2.0, 2.0]);
        p.node("Resize", &[&scaled, &scales], vec![])
    }));
    cases.push(after_mul(
        "Upsample",
        "Upsample",
        7,
        &[2, 3, 4],
        vec![floats("scales", &[1.0, 1.0, 2.0, 3.0])],
    ));
    cases
}
