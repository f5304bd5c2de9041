//! Tests of training state on the device, with the processor as the device: losses judged there, gradients that overflow,
//! and copies for the host.

use burn_flex::{Flex, FlexDevice, FlexTensor};

use super::super::device_loss::judge;
use super::super::loss::{LossResult, Truth, loss_and_gradient};
use super::super::tensor::{dims, download, upload};
use super::super::*;
use super::clusters;
use crate::optim::{Course, Groups, OptimizerConfig, SgdConfig};
use crate::precision::Precision;
use crate::probe::numbers;

/// The mean losses of steps whose state stays on the device of `engine`.
pub(super) fn fit_on_device(
    engine: &mut Engine,
    config: &OptimizerConfig,
    batch: &ShardBatch,
    steps: usize,
) -> Vec<f64> {
    let groups = Groups::all(engine.layout().elements());
    let mut course = Course::new(config, &groups).unwrap();
    let slots = course.slot_names().len();
    engine.keep_state(|range| groups.decays(range), slots, course.first_value()).unwrap();
    let step = |_| {
        engine.clear_gradients().unwrap();
        let (found, _) = engine.add_gradients(batch, ShardKey::default(), (1.0, false)).unwrap();
        engine.step(Gradient::Kept(found.weight), &course.update()).unwrap();
        course.advance();
        found.loss_sum / found.weight
    };
    (0..steps).map(step).collect()
}

/// The loss on the device, its slope on the host; none if the device leaves it to the host.
fn on_device(objective: &Objective, logits: &[f32], labels: &Labels, shape: &[usize]) -> Option<LossResult> {
    let output: FlexTensor = upload::<Flex, f32>(logits.to_vec(), shape, &FlexDevice);
    let (judged, slope) = judge::<Flex>(objective, labels, output, shape[0]).unwrap()?;
    assert_eq!(dims::<Flex>(&slope), shape);
    let mut host = Vec::new();
    download::<Flex, f32>(slope, &mut host).unwrap();
    Some(LossResult {
        loss_sum: judged.loss_sum,
        weight: judged.weight,
        correct: judged.correct,
        ignored: judged.ignored,
        slope: host,
    })
}

fn check(objective: &Objective, logits: &[f32], labels: &Labels, shape: &[usize]) {
    let found = on_device(objective, logits, labels, shape).unwrap();
    let expected = loss_and_gradient(objective, logits, Truth::from(labels), shape[0]).unwrap();
    let what = format!("{objective:?} of {logits:?} with {labels:?}");
    let close = |found: f64, expected: f64| (found - expected).abs() <= 1e-6 * (1.0 + expected.abs());
    assert!(
        close(found.loss_sum, expected.loss_sum),
        "{what}: {} is not {}",
        found.loss_sum,
        expected.loss_sum
    );
    assert!(close(found.weight, expected.weight), "{what}: weight {}", found.weight);
    assert_eq!((found.correct, found.ignored), (expected.correct, expected.ignored), "{what}");
    assert_eq!(found.slope.len(), expected.slope.len(), "{what}");
    for (found, expected) in found.slope.iter().zip(&expected.slope) {
        assert!(close(f64::from(*found), f64::from(*expected)), "{what}: {found} is not {expected}");
    }
}

#[test]
fn cross_entropy_on_the_device_equals_that_of_the_host() {
    let logits = numbers(8 * 5, 1).into_iter().map(|value| value * 6.0).collect::<Vec<f32>>();
    let labels = [3, 0, -100, 4, 1, 1, -100, 2];
    // The first of equal outputs counts.
    let ties = [1.0, 1.0, 0.0, 0.0, 2.0, 2.0, 3.0, 3.0, 3.0];
    for label_smoothing in [0.0, 0.1, 1.0] {
        for class_weights in [vec![], vec![1.0, 0.0, 2.5, 0.5, 3.0]] {
            let settings = CrossEntropy { label_smoothing, class_weights, ignore_index: Some(-100) };
            let objective = Objective::CrossEntropy(settings);
            check(&objective, &logits, &Labels::Class(labels.to_vec()), &[8, 5]);
            check(&objective, &logits[..5], &Labels::Class(vec![2]), &[1, 5]);
            check(&objective, &logits[..5], &Labels::Class(vec![-100]), &[1, 5]);
            check(&objective, &logits[..15], &Labels::Class(vec![-100; 3]), &[3, 5]);
            check(&objective, &[-500.0, 400.0, 0.0, 90.0, -1.0], &Labels::Class(vec![0]), &[1, 5]);
        }
        let settings = CrossEntropy { label_smoothing, ..CrossEntropy::default() };
        for labels in [[0, 2, 0], [1, 1, 1], [2, 2, 2]] {
            let labels = Labels::Class(labels.to_vec());
            check(&Objective::CrossEntropy(settings.clone()), &ties, &labels, &[3, 3]);
        }
    }
}

#[test]
fn other_losses_on_the_device_equal_those_of_the_host() {
    let outputs = numbers(4 * 6, 2).into_iter().map(|value| value * 3.0).collect::<Vec<f32>>();
    let labels = numbers(4 * 6, 3);
    let shares = labels.iter().map(|label| (label + 1.0) / 2.0).collect::<Vec<f32>>();
    for (objective, labels) in [
        (Objective::Mse, &labels),
        (Objective::L1, &labels),
        (Objective::L1, &outputs),
        (Objective::Huber(Huber { delta: 0.75 }), &labels),
        (Objective::Bce, &shares),
    ] {
        for shape in [vec![4, 6], vec![4, 2, 3], vec![24, 1], vec![24], vec![1, 24]] {
            check(&objective, &outputs, &Labels::Value(labels.clone()), &shape);
        }
    }
    // Rows on the right side, and a label between the sides.
    let objective = Objective::Bce;
    check(&objective, &[2.0, -1.0, 3.0, 0.0], &Labels::Value(vec![1.0, 0.0, 0.5, 0.0]), &[2, 2]);
    check(&objective, &[90.0, -90.0], &Labels::Value(vec![0.0, 1.0]), &[1, 2]);
}

#[test]
fn the_host_names_the_row_of_a_loss_that_is_not_finite() {
    let objective = Objective::CrossEntropy(CrossEntropy::default());
    for bad in [f32::NAN, f32::INFINITY] {
        let logits = [0.0, 1.0, bad, 2.0];
        assert!(on_device(&objective, &logits, &Labels::Class(vec![0, 1]), &[2, 2]).is_none());
    }
    let model = crate::init::mlp(4, &[], 3, 1).unwrap();
    let mut engine = Engine::load(&model, Loss::CrossEntropy, Device::Cpu).unwrap();
    engine.keep_state(|_| Some(true), 0, 0.0).unwrap();
    let mut batch = clusters(6, 4, 3, 2);
    batch.inputs[4 * 4] = f32::INFINITY;
    let error = engine.add_gradients(&batch, ShardKey::default(), (1.0, false)).unwrap_err();
    assert!(matches!(error, EngineError::NonFinite { row: 4, .. }), "{error}");
}

#[test]
fn the_device_leaves_the_teachers_loss_to_the_host() {
    let objective = Objective::Kl(Distillation::default());
    assert!(on_device(&objective, &[0.0, 1.0], &Labels::Class(vec![0]), &[1, 2]).is_none());
}

#[test]
fn a_gradient_that_overflows_is_told_and_dropped() {
    let model = crate::init::mlp(4, &[], 1, 3).unwrap();
    let mut engine = Engine::load(&model, Loss::Mse, Device::Cpu).unwrap();
    engine.set_precision(Precision::Fp16);
    engine.keep_state(|_| Some(true), 0, 0.0).unwrap();
    let labels = numbers(3, 5).iter().map(|label| label * 100.0).collect();
    let batch = ShardBatch { rows: 3, inputs: numbers(12, 4), labels: Labels::Value(labels) };
    let add = |engine: &mut Engine, scale| {
        engine.clear_gradients().unwrap();
        engine.add_gradients(&batch, ShardKey::default(), (scale, true)).unwrap()
    };
    let (found, is_finite) = add(&mut engine, (1 << 16) as f32);
    assert!(found.loss_sum.is_finite() && !is_finite);
    let (_, is_finite) = add(&mut engine, 16.0);
    assert!(is_finite);
    let config =
        OptimizerConfig::Sgd(SgdConfig { learning_rate: 0.01, momentum: 0.0, ..SgdConfig::default() });
    let course = Course::new(&config, &Groups::all(engine.layout().elements())).unwrap();
    let expected: Vec<f32> = {
        let found = engine.gradients_scaled(&batch, ShardKey::default(), 16.0).unwrap();
        let weights = engine.weights().unwrap().iter();
        weights.zip(found.grad).map(|(weight, slope)| weight - 0.01 * slope / 3.0).collect()
    };
    engine.step(Gradient::Kept(3.0), &course.update()).unwrap();
    for (found, expected) in engine.weights().unwrap().iter().zip(&expected) {
        assert!((found - expected).abs() <= 1e-6 * (1.0 + expected.abs()), "{found} is not {expected}");
    }
}

#[test]
fn a_copy_of_the_weights_is_never_older_than_the_last_step() {
    let batch = clusters(12, 4, 3, 2);
    let mut engine =
        Engine::load(&crate::init::mlp(4, &[5], 3, 1).unwrap(), Loss::CrossEntropy, Device::Cpu).unwrap();
    let before = engine.weights().unwrap().to_vec();
    let losses = fit_on_device(&mut engine, &OptimizerConfig::default(), &batch, 30);
    assert!(losses[29] < losses[0], "{losses:?}");
    let after = engine.weights().unwrap().to_vec();
    assert_ne!(after, before);
    let exported = engine.export().unwrap();
    let again = Engine::load(&exported, Loss::CrossEntropy, Device::Cpu).unwrap();
    assert_eq!(again.weights().unwrap(), after);
    assert_eq!(again.logits(&batch.inputs, 12).unwrap(), engine.logits(&batch.inputs, 12).unwrap());
}

#[test]
fn a_step_without_a_state_is_refused() {
    let model = crate::init::mlp(4, &[], 3, 1).unwrap();
    let mut engine = Engine::load(&model, Loss::CrossEntropy, Device::Cpu).unwrap();
    let error = engine.clear_gradients().unwrap_err();
    assert!(error.to_string().contains("no state was begun"), "{error}");
}
