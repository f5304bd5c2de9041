//! Tests of row rules for operators that compute values.

use millrace_bundle::onnx::tensor_proto::DataType;

use super::support::{Build, accepted, int, ints, refused, text};

#[test]
fn elementwise_operators_keep_rows_unless_a_constant_has_rows_of_its_own() {
    accepted(17, &[4], |g| g.node("Relu", &["x"], vec![]));
    accepted(17, &[4], |g| g.node("Cast", &["x"], vec![int("to", 11)]));
    for dims in [&[][..], &[1], &[4], &[1, 4], &[1, 1]] {
        accepted(17, &[4], |g| {
            let c = g.floats(dims);
            g.node("Mul", &["x", &c], vec![])
        });
    }
    for dims in [&[3, 4][..], &[3, 1], &[2, 4]] {
        refused(17, &[4], "extent of its own along the rows", |g| {
            let c = g.floats(dims);
            g.node("Mul", &["x", &c], vec![])
        });
    }
    accepted(17, &[4], |g| g.node("Add", &["x", "x"], vec![]));
    accepted(17, &[4], |g| {
        let (low, high) = (g.floats(&[]), g.floats(&[]));
        g.node("Clip", &["x", &low, &high], vec![])
    });
    refused(17, &[4], "rows of one input with rows of another", |g| {
        let turned = g.node("Transpose", &["x"], vec![]);
        g.node("Sub", &["x", &turned], vec![])
    });
    refused(17, &[4], "rows of one input with rows of another", |g| {
        let axes = g.list(&[1]);
        let column = g.node("Unsqueeze", &["x", &axes], vec![]);
        g.node("Sub", &["x", &column], vec![])
    });
}

#[test]
fn reductions_keep_rows_along_other_axes_alone() {
    for axes in [&[1][..], &[-1], &[1, 2]] {
        accepted(17, &[4, 5], |g| {
            let max = g.node("ReduceMax", &["x"], vec![ints("axes", axes), int("keepdims", 0)]);
            g.node("Neg", &[&max], vec![])
        });
        accepted(18, &[4, 5], |g| {
            let axes = g.list(axes);
            g.node("ReduceMean", &["x", &axes], vec![])
        });
    }
    for axes in [&[0][..], &[-3], &[0, 1]] {
        refused(17, &[4, 5], "along the rows", |g| g.node("ReduceMax", &["x"], vec![ints("axes", axes)]));
        refused(13, &[4, 5], "along the rows", |g| {
            let axes = g.list(axes);
            g.node("ReduceSum", &["x", &axes], vec![])
        });
    }
    // All axes, unless `noop_with_empty_axes` makes an empty list mean no axes.
    refused(17, &[4], "along the rows", |g| g.node("ReduceMax", &["x"], vec![]));
    refused(18, &[4], "along the rows", |g| g.node("ReduceMax", &["x"], vec![ints("axes", &[1])]));
    accepted(18, &[4], |g| g.node("ReduceMax", &["x"], vec![int("noop_with_empty_axes", 1)]));
    accepted(17, &[4], |g| g.node("ArgMax", &["x"], vec![int("axis", 1)]));
    refused(17, &[4], "along the rows", |g| g.node("ArgMax", &["x"], vec![]));
    for (axis, keeps) in [(1, true), (0, false), (-2, false)] {
        let sum = |g: &mut Build| {
            let axis = g.number(axis);
            g.node("CumSum", &["x", &axis], vec![])
        };
        if keeps { accepted(17, &[4], sum) } else { refused(17, &[4], "along the rows", sum) }
    }
    refused(17, &[4], "not known", |g| {
        let axes = g.node("Cast", &["x"], vec![int("to", 7)]);
        g.node("CumSum", &["x", &axes], vec![])
    });
}

#[test]
fn maximum_over_all_rows_is_refused_with_its_node() {
    refused(17, &[4], r#"ReduceMax "n0" that gives "t0_0": it works along the rows"#, |g| {
        let max = g.node("ReduceMax", &["x"], vec![int("keepdims", 0)]);
        let scaled = g.node("Div", &["x", &max], vec![]);
        g.node("Relu", &[&scaled], vec![])
    });
}

#[test]
fn softmax_works_along_one_axis_and_before_operator_set_13_from_one_on() {
    accepted(13, &[4], |g| g.node("Softmax", &["x"], vec![]));
    accepted(12, &[4], |g| g.node("Softmax", &["x"], vec![]));
    accepted(12, &[4, 5], |g| g.node("LogSoftmax", &["x"], vec![int("axis", 2)]));
    refused(13, &[4], "along the rows", |g| g.node("Softmax", &["x"], vec![int("axis", 0)]));
    refused(12, &[4], "along the rows", |g| g.node("Softmax", &["x"], vec![int("axis", 0)]));
    // Since operator set 13, axis 1 means only the rows here; before, axis 0 means all axes.
    refused(13, &[4, 5], "along the rows", |g| {
        let turned = g.node("Transpose", &["x"], vec![ints("perm", &[1, 0, 2])]);
        g.node("Softmax", &[&turned], vec![int("axis", 1)])
    });
    refused(12, &[4, 5], "along the rows", |g| {
        let turned = g.node("Transpose", &["x"], vec![ints("perm", &[1, 0, 2])]);
        g.node("Softmax", &[&turned], vec![int("axis", 0)])
    });
    refused(17, &[4], "along the rows", |g| g.node("Hardmax", &["x"], vec![int("axis", -2)]));
}

#[test]
fn normalisations_keep_rows_unless_they_take_statistics_of_all() {
    let norm = |g: &mut Build, axis: i64, scale: &[i64]| {
        let scale = g.floats(scale);
        g.node("LayerNormalization", &["x", &scale], vec![int("axis", axis)])
    };
    accepted(17, &[4], |g| norm(g, -1, &[4]));
    accepted(17, &[3, 4], |g| norm(g, 1, &[3, 4]));
    refused(17, &[4], "along the rows", |g| norm(g, 0, &[4]));
    refused(17, &[4], "of its own along the rows", |g| norm(g, 1, &[3, 4]));
    let batch = |g: &mut Build, training: i64, outputs: usize| {
        let [a, b, c, d] = [(); 4].map(|()| g.floats(&[3]));
        g.nodes("BatchNormalization", &["x", &a, &b, &c, &d], vec![int("training_mode", training)], outputs)
            .remove(0)
    };
    accepted(15, &[3, 4], |g| batch(g, 0, 1));
    refused(15, &[3, 4], "as in training", |g| batch(g, 1, 1));
    refused(15, &[3, 4], "as in training", |g| batch(g, 0, 3));
    accepted(17, &[3, 4, 4], |g| g.node("MeanVarianceNormalization", &["x"], vec![ints("axes", &[1, 2, 3])]));
    refused(17, &[3, 4, 4], "along the rows", |g| g.node("MeanVarianceNormalization", &["x"], vec![]));
    accepted(17, &[3, 4, 4], |g| {
        let (scale, shift) = (g.floats(&[3]), g.floats(&[3]));
        g.node("InstanceNormalization", &["x", &scale, &shift], vec![])
    });
    accepted(17, &[4], |g| g.node("LpNormalization", &["x"], vec![]));
    refused(17, &[4], "along the rows", |g| g.node("LpNormalization", &["x"], vec![int("axis", 0)]));
}

#[test]
fn matrix_products_keep_rows_beside_the_summed_axis() {
    accepted(17, &[4], |g| {
        let w = g.floats(&[4, 3]);
        g.node("MatMul", &["x", &w], vec![])
    });
    accepted(17, &[4], |g| {
        let w = g.floats(&[4]);
        g.node("MatMul", &["x", &w], vec![])
    });
    accepted(17, &[5, 4], |g| {
        let w = g.floats(&[1, 4, 3]);
        g.node("MatMul", &["x", &w], vec![])
    });
    refused(17, &[5, 4], "of its own along the rows", |g| {
        let w = g.floats(&[2, 4, 3]);
        g.node("MatMul", &["x", &w], vec![])
    });
    refused(17, &[4], "along the rows", |g| {
        let w = g.floats(&[2, 3]);
        g.node("MatMul", &[&w, "x"], vec![])
    });
    accepted(17, &[4], |g| {
        let (w, turned) = (g.floats(&[3, 4]), g.node("Transpose", &["x"], vec![]));
        let product = g.node("MatMul", &[&w, &turned], vec![]);
        g.node("Transpose", &[&product], vec![])
    });
    refused(17, &[4], "rows with other rows", |g| {
        let turned = g.node("Transpose", &["x"], vec![]);
        g.node("MatMul", &["x", &turned], vec![])
    });
    refused(17, &[4], "along the rows", |g| {
        let turned = g.node("Transpose", &["x"], vec![]);
        g.node("MatMul", &[&turned, "x"], vec![])
    });
    accepted(17, &[5, 4], |g| {
        let turned = g.node("Transpose", &["x"], vec![ints("perm", &[0, 2, 1])]);
        g.node("MatMul", &["x", &turned], vec![])
    });
    refused(17, &[5, 4], "rows with other rows", |g| {
        let turned = g.node("Transpose", &["x"], vec![ints("perm", &[1, 2, 0])]);
        g.node("MatMul", &["x", &turned], vec![])
    });
}

#[test]
fn gemm_keeps_rows_if_its_addend_is_the_same_for_all_rows() {
    let gemm = |g: &mut Build, added: &[i64]| {
        let (w, c) = (g.floats(&[3, 4]), g.floats(added));
        g.node("Gemm", &["x", &w, &c], vec![int("transB", 1)])
    };
    for added in [&[][..], &[3], &[1, 3], &[1, 1]] {
        accepted(17, &[4], |g| gemm(g, added));
    }
    for added in [&[2, 3][..], &[2, 1]] {
        refused(17, &[4], "of its own along the rows", |g| gemm(g, added));
    }
    refused(17, &[4], "along the rows", |g| {
        let w = g.floats(&[2, 3]);
        g.node("Gemm", &["x", &w], vec![int("transA", 1)])
    });
}

#[test]
fn einsum_keeps_rows_whose_letter_is_in_every_term_and_in_the_result() {
    let einsum = |g: &mut Build, equation: &str, other: &str| {
        g.node("Einsum", &["x", other], vec![text("equation", equation)])
    };
    accepted(17, &[4, 5], |g| {
        let w = g.floats(&[5, 3]);
        einsum(g, "bij, jk -> bik", &w)
    });
    accepted(17, &[4, 5], |g| einsum(g, "bij,bkj->bik", "x"));
    refused(17, &[4, 5], "rows with other rows", |g| einsum(g, "bij,cij->bc", "x"));
    refused(17, &[4, 5], "sums up over the rows", |g| einsum(g, "bij,bij->ij", "x"));
    refused(17, &[4, 5], "not known", |g| einsum(g, "...ij,...kj->...ik", "x"));
    refused(17, &[4, 5], "rows with other rows", |g| {
        let w = g.floats(&[2, 3]);
        einsum(g, "bij,bk->bijk", &w)
    });
}

#[test]
fn convolutions_and_pools_take_rows_along_the_first_axis() {
    accepted(17, &[3, 8, 8], |g| {
        let w = g.floats(&[4, 3, 3, 3]);
        let conv = g.node("Conv", &["x", &w], vec![ints("pads", &[1, 1, 1, 1])]);
        let pool = g.node("MaxPool", &[&conv], vec![ints("kernel_shape", &[2, 2]), ints("strides", &[2, 2])]);
        // 4 channels of 4 times 4, derived without a declared shape.
        let shape = g.list(&[-1, 64]);
        g.node("Reshape", &[&pool, &shape], vec![])
    });
    refused(17, &[3, 8, 8], "cut a row apart", |g| {
        let w = g.floats(&[4, 3, 3, 3]);
        let conv = g.node("Conv", &["x", &w], vec![]);
        let shape = g.list(&[-1, 256]);
        g.node("Reshape", &[&conv, &shape], vec![])
    });
    refused(17, &[3, 8], "not read the rows from the first axis", |g| {
        let w = g.floats(&[4, 2, 3]);
        let turned = g.node("Transpose", &["x"], vec![ints("perm", &[1, 0, 2])]);
        g.node("Conv", &[&turned, &w], vec![])
    });
    refused(17, &[3, 8], "depends on rows", |g| {
        let w = g.floats(&[1, 3, 8]);
        g.node("Conv", &[&w, "x"], vec![])
    });
    refused(17, &[3, 8], "count positions over all rows", |g| {
        g.nodes("MaxPool", &["x"], vec![ints("kernel_shape", &[2])], 2).remove(1)
    });
    accepted(17, &[3, 8], |g| g.node("GlobalAveragePool", &["x"], vec![]));
    accepted(17, &[3, 8], |g| {
        let none = g.constant(&[0], vec![]);
        let scales = g.constant(&[3], vec![1.0, 1.0, 2.0]);
        g.node("Resize", &["x", &none, &scales], vec![])
    });
    refused(17, &[3, 8], "changes the number of rows", |g| {
        let none = g.constant(&[0], vec![]);
        let scales = g.constant(&[3], vec![2.0, 1.0, 1.0]);
        g.node("Resize", &["x", &none, &scales], vec![])
    });
}

#[test]
fn interpolation_keeps_rows_apart_beside_channels_alone() {
    let resized = |g: &mut Build, operator: &str, mode: &str, rank: usize| {
        let mut scales = vec![1.0; rank - 1];
        scales.push(2.0);
        let (none, scales) = (g.constant(&[0], vec![]), g.constant(&[rank as i64], scales));
        let inputs = match operator {
            "Resize" => vec!["x", none.as_str(), scales.as_str()],
            _ => vec!["x", scales.as_str()],
        };
        g.node(operator, &inputs, vec![text("mode", mode)])
    };
    for (opset, operator, modes) in [(17, "Resize", &["linear", "cubic"][..]), (9, "Upsample", &["linear"])] {
        for row in [&[3][..], &[2, 3], &[2, 3, 4], &[2, 3, 4, 5]] {
            accepted(opset, row, |g| resized(g, operator, "nearest", row.len() + 1));
            for mode in modes {
                match row.len() {
                    1 | 2 => refused(opset, row, "interpolates between rows", |g| {
                        resized(g, operator, mode, row.len() + 1)
                    }),
                    _ => accepted(opset, row, |g| resized(g, operator, mode, row.len() + 1)),
                }
            }
        }
    }
    // Rows along another axis count as positions or channels there.
    refused(17, &[2, 3, 4], "interpolates between rows", |g| {
        let turned = g.node("Transpose", &["x"], vec![ints("perm", &[1, 2, 0, 3])]);
        let scales = g.constant(&[4], vec![1.0, 1.0, 1.0, 2.0]);
        g.node("Resize", &[&turned, "", &scales], vec![text("mode", "linear")])
    });
}

#[test]
fn recurrent_operators_have_rows_along_their_second_axis() {
    let lstm = |g: &mut Build, turned: bool, constant_state: bool| {
        let x = if turned { g.node("Transpose", &["x"], vec![ints("perm", &[1, 0, 2])]) } else { "x".into() };
        let (w, r) = (g.floats(&[1, 8, 3]), g.floats(&[1, 8, 2]));
        let state = if constant_state { g.floats(&[1, 1, 2]) } else { String::new() };
        let y = g.nodes("LSTM", &[&x, &w, &r, "", "", &state], vec![int("hidden_size", 2)], 3);
        let axes = g.list(&[0]);
        let last = g.node("Squeeze", &[&y[1], &axes], vec![]);
        g.node("Relu", &[&last], vec![])
    };
    accepted(17, &[5, 3], |g| lstm(g, true, false));
    refused(17, &[5, 3], "uses the rows as steps", |g| lstm(g, false, false));
    refused(17, &[5, 3], "does not have the rows", |g| lstm(g, true, true));
}

#[test]
fn quantized_operators_need_constant_scales() {
    let quantized = |g: &mut Build, scale: &[i64], axis: i64| {
        let (scale, zero) = (g.floats(scale), g.bytes(DataType::Uint8, scale, 0));
        let q = g.node("QuantizeLinear", &["x", &scale, &zero], vec![int("axis", axis)]);
        g.node("DequantizeLinear", &[&q, &scale, &zero], vec![int("axis", axis)])
    };
    accepted(17, &[4], |g| quantized(g, &[], 0));
    accepted(17, &[4], |g| quantized(g, &[1], 0));
    accepted(17, &[4], |g| quantized(g, &[4], 1));
    refused(17, &[4], "along the rows", |g| quantized(g, &[4], 0));
    refused(17, &[4], "one range over all rows", |g| {
        let q = g.nodes("DynamicQuantizeLinear", &["x"], vec![], 3);
        g.node("DequantizeLinear", &[&q[0], &q[1], &q[2]], vec![])
    });
    // A value computed from constants is a constant, too.
    accepted(17, &[4], |g| {
        let w = g.floats(&[4, 3]);
        let q = g.nodes("DynamicQuantizeLinear", &[&w], vec![], 3);
        let w = g.node("DequantizeLinear", &[&q[0], &q[1], &q[2]], vec![]);
        g.node("MatMul", &["x", &w], vec![])
    });
    let product = |g: &mut Build, zero_a: &[i64], zero_b: &[i64]| {
        let q = g.node("Cast", &["x"], vec![int("to", 3)]);
        let w = g.bytes(DataType::Int8, &[4, 3], 2);
        let (a, b) = (g.bytes(DataType::Int8, zero_a, 1), g.bytes(DataType::Int8, zero_b, 1));
        g.node("MatMulInteger", &[&q, &w, &a, &b], vec![])
    };
    accepted(17, &[4], |g| product(g, &[], &[3]));
    refused(17, &[4], "not one number", |g| product(g, &[2], &[]));
}

#[test]
fn operators_of_scikit_learn_take_tables() {
    accepted(17, &[4], |g| g.node("ai.onnx.ml:Scaler", &["x"], vec![]));
    accepted(17, &[4], |g| g.nodes("ai.onnx.ml:TreeEnsembleClassifier", &["x"], vec![], 2).remove(0));
    accepted(17, &[4], |g| {
        let out = g.nodes("ai.onnx.ml:LinearClassifier", &["x"], vec![], 2);
        g.node("ai.onnx.ml:Normalizer", &[&out[1]], vec![])
    });
    // A normalizer treats a list as one sample.
    refused(17, &[], "not a table", |g| g.node("ai.onnx.ml:Normalizer", &["x"], vec![]));
    // Looks up labels by index, as scikit-learn's converter does.
    accepted(17, &[4], |g| {
        let (classes, places) = (g.list(&[3, 5, 7, 9]), g.node("ArgMax", &["x"], vec![int("axis", 1)]));
        let labels = g.node("ai.onnx.ml:ArrayFeatureExtractor", &[&classes, &places], vec![]);
        let shape = g.list(&[-1]);
        g.node("Reshape", &[&labels, &shape], vec![])
    });
    accepted(17, &[4], |g| {
        let places = g.list(&[0, 2]);
        g.node("ai.onnx.ml:ArrayFeatureExtractor", &["x", &places], vec![])
    });
    refused(17, &[4], "gives \"t0_1\"", |g| g.nodes("ai.onnx.ml:ZipMap", &["x"], vec![], 2).remove(1));
}

#[test]
fn fused_operators_keep_rows_where_their_parts_do() {
    accepted(17, &[5, 8], |g| {
        let (w, b) = (g.floats(&[8, 24]), g.floats(&[24]));
        g.node("com.microsoft:Attention", &["x", &w, &b], vec![int("num_heads", 2)])
    });
    refused(17, &[5, 8], "list of lengths", |g| {
        let (w, b, lengths) = (g.floats(&[8, 24]), g.floats(&[24]), g.input("lengths", DataType::Int32, &[]));
        g.node("com.microsoft:Attention", &["x", &w, &b, &lengths], vec![int("num_heads", 2)])
    });
    accepted(17, &[5, 8], |g| {
        let (scale, shift) = (g.floats(&[8]), g.floats(&[8]));
        g.node("com.microsoft:SkipLayerNormalization", &["x", "x", &scale, &shift], vec![])
    });
    refused(17, &[5, 8], "of its own along the rows", |g| {
        let (skip, scale) = (g.floats(&[2, 5, 8]), g.floats(&[8]));
        g.node("com.microsoft:SkipLayerNormalization", &["x", &skip, &scale], vec![])
    });
    accepted(17, &[4], |g| {
        let w = g.floats(&[3, 4]);
        g.node("com.microsoft:FusedMatMul", &["x", &w], vec![int("transB", 1)])
    });
    refused(17, &[4], "rows with other rows", |g| {
        g.node("com.microsoft:FusedMatMul", &["x", "x"], vec![int("transB", 1)])
    });
    refused(17, &[4], "not known to keep rows apart", |g| {
        let (w, scale) = (g.bytes(DataType::Int8, &[4, 3], 2), g.floats(&[1]));
        g.node("com.microsoft:DynamicQuantizeMatMul", &["x", &w, &scale], vec![])
    });
}

#[test]
fn unknown_operators_domains_and_versions_are_refused() {
    refused(17, &[4], "not known to keep rows apart", |g| g.node("Later", &["x"], vec![]));
    refused(17, &[4], "own.Relu", |g| g.node("own:Relu", &["x"], vec![]));
    refused(27, &[4], "version 27 of its operator set", |g| g.node("Relu", &["x"], vec![]));
    refused(6, &[4], "version 6 of its operator set", |g| g.node("Relu", &["x"], vec![]));
    for operator in
        ["NonZero", "Unique", "Compress", "EyeLike", "RandomNormalLike", "Bernoulli", "StringSplit"]
    {
        refused(17, &[4], "not known to keep rows apart", |g| g.node(operator, &["x"], vec![]));
    }
    refused(17, &[4], "at random", |g| {
        let (ratio, training) = (g.floats(&[]), g.bytes(DataType::Bool, &[], 1));
        g.node("Dropout", &["x", &ratio, &training], vec![])
    });
    accepted(17, &[4], |g| g.node("Dropout", &["x"], vec![]));
}
