//! Test models of convolutions and pools.

use millrace_bundle::onnx::AttributeProto;

use super::super::{int, ints, text};
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
