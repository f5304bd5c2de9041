//! Tests of operators at the edges of their domain: infinite values, vectors of zeros and masked rows.

use super::*;
use crate::probe::{float, ints};

const INF: f32 = f32::INFINITY;

/// The gradient of a sum of all outputs, by element of the first parameter.
fn slopes(model: &ModelProto, inputs: &[f32], rows: usize) -> Vec<f64> {
    let (interpreter, graph, _) = exact(model);
    let slope = vec![1.0; rows * graph.output_width()];
    interpreter.differentiate(wide(inputs.to_vec()), rows, &mut |_| Ok(slope.clone())).unwrap()
}

/// Compares one row with ONNX Runtime, infinite elements too.
fn equals_onnx_runtime(model: &ModelProto, row: &[usize], inputs: &[f32]) -> Vec<f32> {
    let engine = Engine::load(model, Loss::Mse, Device::Cpu).unwrap();
    let found = engine.logits(inputs, 1).unwrap();
    let expected = run_reference(runtime(), model, row, 1, inputs).unwrap();
    assert_eq!(found.len(), expected.len());
    for (f, e) in found.iter().zip(&expected) {
        assert!(f == e || (f - e).abs() <= 1e-5 * (1.0 + e.abs()), "{found:?} differs from {expected:?}");
    }
    found
}

/// `op(x + w)` with `w` = 0.
fn of_sum(
    op: &str,
    opset: i64,
    width: i64,
    attributes: Vec<millrace_bundle::onnx::AttributeProto>,
) -> ModelProto {
    let mut probe = Probe::new(opset, &[width]);
    let w = probe.param_of(&[width], vec![0.0; width as usize]);
    let sum = probe.node("Add", &["x", &w], vec![]);
    let output = probe.node(op, &[&sum], attributes);
    probe.finish(&output)
}

#[test]
fn the_logarithm_of_powers_keeps_infinities() {
    let model = of_sum("ReduceLogSumExp", 13, 2, vec![ints("axes", &[1])]);
    for (inputs, expected) in [([-INF, -INF], -INF), ([1.0, INF], INF), ([-INF, 2.0], 2.0), ([INF, INF], INF)]
    {
        assert_eq!(equals_onnx_runtime(&model, &[2], &inputs), [expected]);
        assert!(slopes(&model, &inputs, 1).iter().all(|slope| (0.0..=1.0).contains(slope)), "{inputs:?}");
    }
}

#[test]
fn a_vector_of_zeros_has_the_norm_0_and_stays() {
    for power in [1, 2] {
        let model = of_sum("LpNormalization", 22, 3, vec![int("p", power)]);
        assert_eq!(equals_onnx_runtime(&model, &[3], &[0.0; 3]), [0.0; 3]);
        assert_eq!(slopes(&model, &[0.0; 3], 1), [0.0; 3]);
        equals_onnx_runtime(&model, &[3], &[3.0, 0.0, -4.0]);
    }
}

#[test]
fn an_exponent_of_0_has_no_slope_at_0() {
    for is_constant in [true, false] {
        let mut probe = Probe::new(17, &[3]);
        let w = probe.param_of(&[3], vec![0.0; 3]);
        let sum = probe.node("Add", &["x", &w], vec![]);
        let exponent = match is_constant {
            true => probe.constant(&[], vec![0.0]),
            false => probe.param_of(&[3], vec![0.0; 3]),
        };
        let output = probe.node("Pow", &[&sum, &exponent], vec![]);
        let model = probe.finish(&output);
        assert_eq!(equals_onnx_runtime(&model, &[3], &[0.0, 2.0, -1.0]), [1.0; 3]);
        assert_eq!(slopes(&model, &[0.0, 2.0, -1.0], 1)[..3], [0.0; 3]);
    }
}

#[test]
fn a_query_that_sees_no_key_has_no_result_and_no_slope() {
    for is_truth in [true, false] {
        let mut probe = Probe::new(23, &[1, 2, 2]);
        let w = probe.param(&[2]);
        let scaled = probe.node("Mul", &["x", &w], vec![]);
        let mask = match is_truth {
            true => probe.flags(&[2, 2], &[false, false, false, false]),
            false => probe.constant(&[2, 2], vec![-INF; 4]),
        };
        let output = probe.node("Attention", &[&scaled, &scaled, &scaled, &mask], vec![]);
        let model = probe.finish(&output);
        let inputs = [0.5, -1.0, 2.0, 0.25];
        assert_eq!(equals_onnx_runtime(&model, &[1, 2, 2], &inputs), [0.0; 4]);
        assert_eq!(slopes(&model, &inputs, 1), [0.0; 2]);
    }
}

#[test]
fn a_celu_of_a_negative_alpha_is_that_of_the_definition() {
    let model = of_sum("Celu", 17, 4, vec![float("alpha", -1.0)]);
    equals_onnx_runtime(&model, &[4], &[0.5, -2.0, 3.0, -0.25]);
}

#[test]
fn numbers_of_an_input_have_the_bounds_of_their_own_tables() {
    let mut probe = Probe::new(17, &[3]);
    probe.of_integers();
    let (large, small) = (probe.param(&[700, 1]), probe.param(&[2, 1]));
    let (first, last) = (probe.index(0), probe.shape(&[1]));
    let words = probe.node("Gather", &["x", &first], vec![int("axis", 1)]);
    let kinds = probe.node("Gather", &["x", &last], vec![int("axis", 1)]);
    let words = probe.node("Gather", &[&large, &words], vec![]);
    let kinds = probe.node("Gather", &[&small, &kinds], vec![]);
    let kinds = probe.node("Flatten", &[&kinds], vec![]);
    let output = probe.node("Add", &[&words, &kinds], vec![]);
    let model = probe.finish(&output);
    let engine = Engine::load(&model, Loss::Mse, Device::Cpu).unwrap();
    assert_eq!(engine.graph().inputs()[0].below, Some(vec![700, 2, 1 << 24]));
    equals_onnx_runtime(&model, &[3], &[699.0, 1.0, 70_000.0]);
    let error = engine.logits(&[0.0, 0.0, 0.0, 3.0, 2.0, 0.0], 2).unwrap_err().to_string();
    assert!(error.contains("row 1 holds 2") && error.contains("from 0 to 1"), "{error}");
}
