//! Tests of products in 16 bits: against a loop over rounded numbers, beside 32 bits, and with scaled losses.

use super::super::*;
use super::learning::fit;
use super::{clusters, specs};
use crate::optim::{OptimizerConfig, SgdConfig};
use crate::precision::{Half, Precision};
use crate::probe::numbers;

fn rounded(half: Half, value: f64) -> f64 {
    let mut value = [value as f32];
    half.round(&mut value);
    f64::from(value[0])
}

/// One layer of `width` inputs and one output without activation, and a batch for it.
fn line(width: usize, rows: usize, size: f32) -> (Engine, ShardBatch) {
    let model = crate::init::mlp(width, &[], 1, 3).unwrap();
    let engine = Engine::load(&model, Loss::Mse, Device::Cpu).unwrap();
    let inputs = numbers(rows * width, 4);
    let labels = numbers(rows, 5).iter().map(|label| label * size).collect();
    (engine, ShardBatch { rows, inputs, labels: Labels::Value(labels) })
}

#[test]
fn products_take_and_give_rounded_numbers_and_sums_keep_32_bits() {
    let (width, rows) = (7, 5);
    for (precision, half) in [(Precision::Bf16, Half::Bf16), (Precision::Fp16, Half::Fp16)] {
        let (mut engine, batch) = line(width, rows, 1.0);
        engine.set_precision(precision);
        let found = engine.gradients(&batch).unwrap();
        let weights: Vec<f64> = engine.weights().unwrap().iter().map(|weight| f64::from(*weight)).collect();
        let Labels::Value(labels) = &batch.labels else { unreachable!() };
        let mut expected = vec![0.0; width + 1];
        for (x, label) in batch.inputs.chunks_exact(width).zip(labels) {
            let x: Vec<f64> = x.iter().map(|value| rounded(half, f64::from(*value))).collect();
            let product: f64 = x.iter().zip(&weights).map(|(x, w)| x * rounded(half, *w)).sum();
            // The bias is added in 32 bits.
            let output = rounded(half, product) + weights[width];
            let slope = 2.0 * (output - f64::from(*label));
            expected[width] += slope;
            for (sum, x) in expected.iter_mut().zip(&x) {
                *sum += x * rounded(half, slope);
            }
        }
        for sum in &mut expected[..width] {
            *sum = rounded(half, *sum);
        }
        for (index, (found, expected)) in found.grad.iter().zip(&expected).enumerate() {
            // Sums of few numbers may fall on the other side of a tie.
            let unit = if half == Half::Bf16 { 2f64.powi(-8) } else { 2f64.powi(-11) };
            let close = (f64::from(*found) - expected).abs() <= unit * expected.abs();
            assert!(close, "{precision:?} element {index}: {found} instead of {expected}");
        }
        let exact = line(width, rows, 1.0).0.gradients(&batch).unwrap();
        assert_ne!(exact.grad, found.grad, "{precision:?} changes the gradient");
    }
}

#[test]
fn models_learn_in_16_bits_as_in_32() {
    let config =
        OptimizerConfig::Sgd(SgdConfig { learning_rate: 0.1, momentum: 0.0, ..SgdConfig::default() });
    for spec in specs() {
        let mut batch = clusters(40, 144, 10, 8);
        batch.inputs.iter_mut().for_each(|x| *x *= 16.0);
        let curve = |precision| {
            let mut engine = Engine::load(&spec.build().unwrap(), Loss::CrossEntropy, Device::Cpu).unwrap();
            engine.set_precision(precision);
            fit(&mut engine, &config, &batch, 20)
        };
        let exact = curve(Precision::Fp32);
        for precision in [Precision::Bf16, Precision::Fp16] {
            let found = curve(precision);
            // Later steps multiply the differences of earlier ones.
            for (found, exact) in found.iter().zip(&exact).take(8) {
                let close = (found - exact).abs() < 0.03 * exact.max(0.1);
                assert!(close, "{spec:?} {precision:?}: {found}, {exact}");
            }
            assert!(found[19] < 0.8 * found[0], "{spec:?} {precision:?}: {found:?}");
        }
    }
}

#[test]
fn a_scaled_loss_keeps_gradients_that_fp16_rounds_to_zero() {
    let (mut engine, batch) = line(4, 3, 1.0);
    engine.set_weights(&[0.0; 5]).unwrap();
    let tiny = ShardBatch { labels: Labels::Value(vec![2e-9, -3e-9, 4e-9]), ..batch };
    let exact = engine.gradients(&tiny).unwrap().grad;
    engine.set_precision(Precision::Fp16);
    let plain = engine.gradients(&tiny).unwrap().grad;
    assert_eq!(plain[..4], [0.0; 4], "fp16 has no such small numbers");
    let scaled = engine.gradients_scaled(&tiny, ShardKey::default(), (1 << 16) as f32).unwrap().grad;
    for (scaled, exact) in scaled.iter().zip(&exact) {
        assert!((scaled - exact).abs() <= 0.01 * exact.abs(), "{scaled} instead of {exact}");
    }
}

#[test]
fn too_large_a_scale_shows_in_the_gradient_and_not_in_the_loss() {
    let (mut engine, batch) = line(4, 3, 100.0);
    engine.set_precision(Precision::Fp16);
    let found = engine.gradients_scaled(&batch, ShardKey::default(), (1 << 16) as f32).unwrap();
    assert!(found.loss_sum.is_finite());
    assert!(found.grad.iter().any(|value| !value.is_finite()), "{:?}", found.grad);
    let found = engine.gradients_scaled(&batch, ShardKey::default(), 16.0).unwrap();
    assert!(found.grad.iter().all(|value| value.is_finite()), "{:?}", found.grad);
}

#[test]
fn evaluations_keep_32_bits() {
    let (mut engine, batch) = line(7, 5, 1.0);
    let before = engine.logits(&batch.inputs, 5).unwrap();
    engine.set_precision(Precision::Bf16);
    assert_eq!(engine.logits(&batch.inputs, 5).unwrap(), before);
}
