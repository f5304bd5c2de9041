//! Tests of training: against a plain loop, to convergence, and on the handwritten digits.

use super::super::*;
use super::{clusters, specs};
use crate::fixed::{FRACTION_BITS_DEFAULT, Scale};
use crate::init::ModelSpec;
use crate::optim::{AdamWConfig, Optimizer, OptimizerConfig, SgdConfig};
use crate::probe::{digits, numbers, run_reference, runtime};

pub(super) fn fit(
    engine: &mut Engine,
    optimizer: &OptimizerConfig,
    batch: &ShardBatch,
    steps: usize,
) -> Vec<f64> {
    let mut optimizer = Optimizer::new(optimizer, engine.layout().elements()).unwrap();
    (0..steps)
        .map(|_| {
            let found = engine.gradients(batch).unwrap();
            let mean: Vec<f32> = found.grad.iter().map(|g| g / batch.rows as f32).collect();
            engine
                .update(|weights| {
                    optimizer.apply(weights, &mean).unwrap();
                    Ok::<_, EngineError>(())
                })
                .unwrap();
            found.loss_sum / batch.rows as f64
        })
        .collect()
}

#[test]
fn softmax_regression_follows_the_curve_of_a_plain_loop() {
    // The same training written out in f64: one layer, full batch, plain gradient descent.
    let (width, classes, rows, rate) = (4, 3, 30, 0.5);
    let batch = clusters(rows, width, classes, 7);
    let Labels::Class(labels) = &batch.labels else { unreachable!() };
    let model = crate::init::mlp(width, &[], classes, 9).unwrap();
    let mut engine = Engine::load(&model, Loss::CrossEntropy, Device::Cpu).unwrap();
    let start: Vec<f64> = engine.weights().unwrap().iter().map(|w| f64::from(*w)).collect();
    let config = SgdConfig { learning_rate: rate, momentum: 0.0, ..SgdConfig::default() };
    let curve = fit(&mut engine, &OptimizerConfig::Sgd(config), &batch, 40);

    let mut weights = start;
    for (step, found) in curve.iter().enumerate() {
        let mut grad = vec![0.0; weights.len()];
        let mut loss = 0.0;
        for (row, label) in labels.iter().enumerate() {
            let x: Vec<f64> = (0..width).map(|i| f64::from(batch.inputs[row * width + i])).collect();
            let z: Vec<f64> = (0..classes)
                .map(|c| {
                    (0..width).map(|i| x[i] * weights[i * classes + c]).sum::<f64>()
                        + weights[width * classes + c]
                })
                .collect();
            let total: f64 = z.iter().map(|v| v.exp()).sum();
            let label = *label as usize;
            loss += total.ln() - z[label];
            for c in 0..classes {
                let slope = z[c].exp() / total - f64::from(u8::from(c == label));
                for i in 0..width {
                    grad[i * classes + c] += slope * x[i];
                }
                grad[width * classes + c] += slope;
            }
        }
        assert!((found - loss / rows as f64).abs() < 1e-5, "step {step}: {found} {}", loss / rows as f64);
        for (w, g) in weights.iter_mut().zip(&grad) {
            *w -= rate * g / rows as f64;
        }
    }
    assert!(curve[39] < 0.4 * curve[0], "{curve:?}");
}

#[test]
fn both_model_kinds_learn_their_clusters() {
    for spec in specs() {
        let model = spec.build().unwrap();
        let mut engine = Engine::load(&model, Loss::CrossEntropy, Device::Cpu).unwrap();
        let mut batch = clusters(40, 144, 10, 8);
        batch.inputs.iter_mut().for_each(|x| *x *= 16.0);
        let curve = fit(&mut engine, &OptimizerConfig::AdamW(AdamWConfig::default()), &batch, 40);
        assert!((curve[0] - 10f64.ln()).abs() < 1.0, "{curve:?}");
        assert!(curve[39] < 0.1, "{spec:?}: {curve:?}");
        let (loss, correct) = engine.evaluate(&batch).unwrap();
        assert_eq!(correct, 40, "loss {loss}");
    }
}

#[test]
fn regression_by_squared_error_finds_the_line() {
    let model = crate::init::mlp(3, &[], 2, 1).unwrap();
    let mut engine = Engine::load(&model, Loss::Mse, Device::Cpu).unwrap();
    let inputs = numbers(150, 2);
    let truth = inputs.chunks(3).flat_map(|x| [x[0] - 2.0 * x[1] + 0.5, 3.0 * x[2]]).collect();
    let batch = ShardBatch { rows: 50, inputs, labels: Labels::Value(truth) };
    let config = SgdConfig { learning_rate: 0.3, ..SgdConfig::default() };
    let curve = fit(&mut engine, &OptimizerConfig::Sgd(config), &batch, 150);
    assert!(curve[149] < 1e-6, "{}", curve[149]);
    let expected = [1.0, 0.0, -2.0, 0.0, 0.0, 3.0, 0.5, 0.0];
    for (found, expected) in engine.weights().unwrap().iter().zip(expected) {
        assert!((found - expected).abs() < 3e-3, "{:?}", engine.weights().unwrap());
    }
}

/// Trains on the digits in shards with exact sums, as a job does; returns the held-out accuracy.
pub(super) fn train_digits(spec: &ModelSpec, optimizer: &OptimizerConfig, epochs: usize) -> (Engine, f64) {
    const SHARDS: usize = 12;
    const BATCH: usize = 96;
    let train = digits::load("digits.jsonl");
    let held_out = digits::load("digits-test.jsonl");
    assert_eq!((train.rows, held_out.rows), (1437, 360));
    let mut engine = Engine::load(&spec.build().unwrap(), Loss::CrossEntropy, Device::Cpu).unwrap();
    let elements = engine.layout().elements();
    let mut optimizer = Optimizer::new(optimizer, elements).unwrap();
    let scale = Scale::new(FRACTION_BITS_DEFAULT, SHARDS as u32).unwrap();
    let mut mean = vec![0.0; elements];
    // A fixed stride that shares no factor with the rows visits all of them, in a mixed order.
    let mut row = 0;
    for _ in 0..epochs * train.rows / BATCH {
        let mut sum = vec![0i64; elements];
        for _ in 0..SHARDS {
            let rows: Vec<usize> = (0..BATCH / SHARDS)
                .map(|_| {
                    row = (row + 1000) % train.rows;
                    row
                })
                .collect();
            let found = engine.gradients(&digits::select(&train, &rows)).unwrap();
            scale.add(&found.grad, &mut sum).unwrap();
        }
        scale.mean_into(&sum, BATCH as u64, &mut mean).unwrap();
        engine
            .update(|weights| {
                optimizer.apply(weights, &mean).unwrap();
                Ok::<_, EngineError>(())
            })
            .unwrap();
    }
    let (_, correct) = engine.evaluate(&held_out).unwrap();
    let accuracy = correct as f64 / held_out.rows as f64;
    (engine, accuracy)
}

pub(super) fn digits_mlp(seed: u64) -> ModelSpec {
    ModelSpec::Mlp(crate::init::MlpSpec { inputs: 64, hidden: vec![64], classes: 10, scale: 0.0625, seed })
}

#[test]
fn the_digits_are_learned() {
    let (engine, accuracy) = train_digits(&digits_mlp(0), &OptimizerConfig::default(), 30);
    assert!(accuracy >= 0.96, "{accuracy}");
    let environment = runtime();
    let held_out = digits::load("digits-test.jsonl");
    let found = engine.logits(&held_out.inputs, held_out.rows).unwrap();
    let expected =
        run_reference(environment, &engine.export().unwrap(), &[64], held_out.rows, &held_out.inputs)
            .unwrap();
    for (f, e) in found.iter().zip(&expected) {
        assert!((f - e).abs() <= 1e-5, "{f} differs from {e}");
    }
}
