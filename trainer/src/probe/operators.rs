//! Every supported operator in the forms that exporters write.

use millrace_bundle::onnx::{AttributeProto, ModelProto};

use super::{Probe, float, int, ints, text};

/// A name, a model, and the shape of one input row.
pub(crate) type Case = (String, ModelProto, Vec<usize>);

fn case(
    name: &str,
    opset: i64,
    row: &[i64],
    build: impl FnOnce(&mut Probe, &str) -> String,
) -> Case {
    let mut probe = Probe::new(opset, row);
    let output = build(&mut probe, "x");
    let row = row.iter().map(|size| *size as usize).collect();
    (name.to_owned(), probe.finish(&output), row)
}

/// `op(x · w)`
fn after_mul(
    name: &str,
    op: &'static str,
    opset: i64,
    row: &[i64],
    attributes: Vec<AttributeProto>,
) -> Case {
    let weights = row.to_vec();
    case(name, opset, row, |p, x| {
        let w = p.param(&weights);
        let scaled = p.node("Mul", &[x, &w], vec![]);
        p.node(op, &[&scaled], attributes)
    })
}

/// All forms of all operators.
pub(crate) fn all() -> Vec<Case> {
    let mut cases = elementwise();
    cases.extend(linear());
    cases.extend(movement());
    cases.extend(convolutions());
    cases.extend(pools());
    cases
}

fn elementwise() -> Vec<Case> {
    let mut cases: Vec<Case> = [
        "Relu",
        "Sigmoid",
        "Tanh",
        "Erf",
        "Exp",
        "Neg",
        "Softmax",
        "LogSoftmax",
        "Identity",
    ]
    .into_iter()
    .map(|op| after_mul(op, op, 17, &[6], vec![]))
    .collect();
    cases.push(after_mul(
        "LeakyRelu",
        "LeakyRelu",
        17,
        &[6],
        vec![float("alpha", 0.2)],
    ));
    cases.push(after_mul("Gelu", "Gelu", 20, &[6], vec![]));
    cases.push(after_mul(
        "Gelu tanh",
        "Gelu",
        20,
        &[6],
        vec![text("approximate", "tanh")],
    ));
    cases.push(after_mul(
        "Softmax axis 1",
        "Softmax",
        13,
        &[3, 4],
        vec![int("axis", 1)],
    ));
    cases.push(after_mul(
        "LogSoftmax axis -2",
        "LogSoftmax",
        13,
        &[3, 4],
        vec![int("axis", -2)],
    ));
    cases.push(after_mul("Softmax before 13", "Softmax", 11, &[5], vec![]));
    for op in ["Log", "Sqrt"] {
        cases.push(case(op, 17, &[6], |p, x| {
            let w = p.param(&[6]);
            let one = p.constant(&[], vec![1.0]);
            let scaled = p.node("Mul", &[x, &w], vec![]);
            let square = p.node("Mul", &[&scaled, &scaled], vec![]);
            let positive = p.node("Add", &[&square, &one], vec![]);
            p.node(op, &[&positive], vec![])
        }));
    }
    for op in ["Add", "Sub", "Mul", "Div"] {
        for dims in [&[4][..], &[1], &[3, 1], &[1, 3, 4], &[2, 3, 4], &[2, 1, 1]] {
            cases.push(case(&format!("x {op} {dims:?}"), 17, &[2, 3, 4], |p, x| {
                let w = p.param(dims);
                let away = p.node("Exp", &[&w], vec![]);
                p.node(op, &[x, &away], vec![])
            }));
            cases.push(case(&format!("{dims:?} {op} x"), 17, &[2, 3, 4], |p, x| {
                let w = p.param(dims);
                let v = p.param(&[4]);
                let turned = p.node("Mul", &[x, &v], vec![]);
                let away = p.node("Exp", &[&turned], vec![]);
                p.node(op, &[&w, &away], vec![])
            }));
        }
        for (side, dims) in [
            ("left", &[][..]),
            ("right", &[]),
            ("left", &[4]),
            ("right", &[1, 1]),
        ] {
            cases.push(case(
                &format!("{op} constant {dims:?} {side}"),
                13,
                &[4],
                |p, x| {
                    let w = p.param(&[4]);
                    let scaled = p.node("Mul", &[x, &w], vec![]);
                    let away = p.node("Exp", &[&scaled], vec![]);
                    let count = dims.iter().product::<i64>() as usize;
                    let c = p.constant(dims, vec![1.5; count]);
                    match side {
                        "left" => p.node(op, &[&c, &away], vec![]),
                        _ => p.node(op, &[&away, &c], vec![]),
                    }
                },
            ));
        }
    }
    cases.push(case("Gelu written with Erf", 17, &[6], |p, x| {
        let w = p.param(&[6]);
        let root = p.constant(&[], vec![std::f32::consts::SQRT_2]);
        let one = p.constant(&[], vec![1.0]);
        let half = p.constant(&[], vec![0.5]);
        let scaled = p.node("Mul", &[x, &w], vec![]);
        let divided = p.node("Div", &[&scaled, &root], vec![]);
        let erf = p.node("Erf", &[&divided], vec![]);
        let plus = p.node("Add", &[&erf, &one], vec![]);
        let times = p.node("Mul", &[&scaled, &plus], vec![]);
        p.node("Mul", &[&times, &half], vec![])
    }));
    cases.push(case("rank-0 initializer", 17, &[3], |p, x| {
        let w = p.param(&[3]);
        let c = p.param_of(&[], vec![0.25]);
        let scaled = p.node("Mul", &[x, &w], vec![]);
        p.node("Mul", &[&scaled, &c], vec![])
    }));
    cases
}

fn linear() -> Vec<Case> {
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
            cases.push(case(
                &format!("LayerNormalization {name} {biased}"),
                17,
                &[3, 4],
                |p, x| {
                    let w = p.param(&[4, 4]);
                    let mixed = p.node("MatMul", &[x, &w], vec![]);
                    let scale = p.param(dims);
                    let bias = biased.then(|| p.param(dims));
                    let mut inputs = vec![mixed.as_str(), &scale];
                    inputs.extend(bias.as_deref());
                    p.node(
                        "LayerNormalization",
                        &inputs,
                        vec![int("axis", axis), float("epsilon", 1e-3)],
                    )
                },
            ));
        }
    }
    cases
}

fn movement() -> Vec<Case> {
    let mut cases = vec![
        after_mul("Flatten", "Flatten", 17, &[2, 3, 2], vec![]),
        after_mul(
            "Transpose",
            "Transpose",
            17,
            &[2, 3],
            vec![ints("perm", &[0, 2, 1])],
        ),
        after_mul(
            "ReduceMean attribute",
            "ReduceMean",
            13,
            &[2, 3, 4],
            vec![ints("axes", &[-1, 1])],
        ),
        after_mul(
            "ReduceMean squeezed",
            "ReduceMean",
            13,
            &[2, 3, 4],
            vec![ints("axes", &[2]), int("keepdims", 0)],
        ),
        after_mul(
            "ReduceSum attribute",
            "ReduceSum",
            11,
            &[2, 3],
            vec![ints("axes", &[1])],
        ),
        after_mul(
            "Squeeze attribute",
            "Squeeze",
            11,
            &[3, 1],
            vec![ints("axes", &[2])],
        ),
        after_mul(
            "Unsqueeze attribute",
            "Unsqueeze",
            11,
            &[3],
            vec![ints("axes", &[1, -1])],
        ),
        after_mul(
            "GlobalAveragePool 2d",
            "GlobalAveragePool",
            17,
            &[2, 3, 4],
            vec![],
        ),
        after_mul(
            "GlobalAveragePool 1d",
            "GlobalAveragePool",
            17,
            &[2, 5],
            vec![],
        ),
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
    cases.push(case("Concat", 17, &[2, 3], |p, x| {
        let w = p.param(&[3, 4]);
        let product = p.node("MatMul", &[x, &w], vec![]);
        let bent = p.node("Tanh", &[&product], vec![]);
        let joined = p.node("Concat", &[&product, x, &bent], vec![int("axis", 2)]);
        p.node("Concat", &[&joined, &joined], vec![int("axis", 1)])
    }));
    cases
}

fn convolutions() -> Vec<Case> {
    type Form = (
        &'static str,
        &'static [i64],
        &'static [i64],
        bool,
        Vec<AttributeProto>,
    );
    let forms: Vec<Form> = vec![
        ("Conv valid", &[2, 5, 5], &[3, 2, 3, 3], true, vec![]),
        (
            "Conv no bias",
            &[2, 5, 4],
            &[3, 2, 2, 3],
            false,
            vec![ints("kernel_shape", &[2, 3])],
        ),
        ("Conv 1x1", &[3, 4, 4], &[2, 3, 1, 1], true, vec![]),
        (
            "Conv padded",
            &[2, 4, 4],
            &[3, 2, 3, 3],
            true,
            vec![ints("pads", &[1, 1, 1, 1])],
        ),
        (
            "Conv strided",
            &[2, 6, 6],
            &[3, 2, 3, 3],
            true,
            vec![ints("strides", &[2, 2]), ints("pads", &[1, 1, 1, 1])],
        ),
        (
            "Conv strided unevenly",
            &[1, 8, 7],
            &[2, 1, 3, 2],
            true,
            vec![ints("strides", &[3, 2])],
        ),
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
        (
            "Conv grouped",
            &[4, 5, 5],
            &[6, 2, 3, 3],
            true,
            vec![int("group", 2), ints("strides", &[2, 2])],
        ),
        (
            "Conv grouped unevenly",
            &[4, 6, 6],
            &[4, 2, 3, 3],
            false,
            vec![
                int("group", 2),
                ints("strides", &[2, 2]),
                ints("pads", &[1, 0, 1, 0]),
            ],
        ),
        (
            "Conv depthwise",
            &[3, 5, 5],
            &[3, 1, 3, 3],
            true,
            vec![int("group", 3), ints("pads", &[1, 1, 1, 1])],
        ),
        (
            "Conv padded on one side",
            &[2, 4, 4],
            &[2, 2, 2, 2],
            true,
            vec![ints("pads", &[0, 1, 1, 0])],
        ),
        (
            "Conv SAME_UPPER",
            &[2, 5, 6],
            &[2, 2, 3, 2],
            true,
            vec![text("auto_pad", "SAME_UPPER"), ints("strides", &[2, 2])],
        ),
        (
            "Conv SAME_LOWER",
            &[2, 5, 6],
            &[2, 2, 2, 2],
            true,
            vec![text("auto_pad", "SAME_LOWER")],
        ),
        (
            "Conv VALID",
            &[1, 4, 4],
            &[2, 1, 3, 3],
            true,
            vec![text("auto_pad", "VALID")],
        ),
        (
            "Conv 1d",
            &[2, 7],
            &[3, 2, 3],
            true,
            vec![ints("pads", &[1, 1])],
        ),
        (
            "Conv 1d full",
            &[4, 9],
            &[4, 2, 3],
            true,
            vec![
                int("group", 2),
                ints("strides", &[2]),
                ints("dilations", &[2]),
                ints("pads", &[2, 1]),
            ],
        ),
        (
            "Conv 1d strided unevenly",
            &[4, 8],
            &[4, 2, 3],
            true,
            vec![int("group", 2), ints("strides", &[2])],
        ),
    ];
    forms
        .into_iter()
        .map(|(name, row, weight, biased, attributes)| {
            case(name, 17, row, |p, x| {
                // A parameter before the convolution asks for the gradient by its input.
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

fn pools() -> Vec<Case> {
    let square = || ints("kernel_shape", &[2, 2]);
    let three = || ints("kernel_shape", &[3, 3]);
    let twos = || ints("strides", &[2, 2]);
    let ring = || ints("pads", &[1, 1, 1, 1]);
    vec![
        after_mul("MaxPool", "MaxPool", 17, &[2, 4, 4], vec![square(), twos()]),
        after_mul(
            "MaxPool uneven",
            "MaxPool",
            17,
            &[2, 5, 5],
            vec![square(), twos()],
        ),
        after_mul(
            "MaxPool padded",
            "MaxPool",
            17,
            &[2, 5, 6],
            vec![three(), twos(), ring()],
        ),
        after_mul(
            "MaxPool overlapping",
            "MaxPool",
            17,
            &[1, 5, 5],
            vec![three()],
        ),
        after_mul(
            "MaxPool dilated",
            "MaxPool",
            17,
            &[1, 6, 6],
            vec![square(), ints("dilations", &[2, 3])],
        ),
        after_mul(
            "MaxPool 1d",
            "MaxPool",
            17,
            &[2, 7],
            vec![
                ints("kernel_shape", &[3]),
                ints("strides", &[2]),
                ints("pads", &[1, 1]),
            ],
        ),
        after_mul(
            "AveragePool",
            "AveragePool",
            17,
            &[2, 4, 4],
            vec![square(), twos()],
        ),
        after_mul(
            "AveragePool uneven",
            "AveragePool",
            17,
            &[2, 5, 5],
            vec![square(), twos()],
        ),
        after_mul(
            "AveragePool padded",
            "AveragePool",
            17,
            &[2, 5, 6],
            vec![three(), twos(), ring()],
        ),
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
