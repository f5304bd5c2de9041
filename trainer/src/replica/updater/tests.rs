//! Tests of steps on the device, with the processor as the device: against the host's loops, and state round trips.

use super::*;
use crate::collective::Ring;
use crate::engine::{Labels, Loss, ShardBatch, ShardGradients, ShardKey};
use crate::ledger::Tally;
use crate::optim::{AdaGradConfig, AdamConfig, AdamWConfig, RmsPropConfig, Schedule, SgdConfig};
use crate::probe::numbers;
use crate::replica::reduce::{ReduceError, Reduced};

const INPUTS: usize = 5;
const CLASSES: usize = 3;
const ROWS: usize = 8;

/// A sum over two ranks, which gives this mean.
struct Given(Vec<f32>);

impl Reduction for Given {
    fn parts(&self, world: usize) -> usize {
        world
    }

    fn begin(&mut self) {}

    fn clear(&mut self, _parameters: usize) {}

    fn add(&mut self, _part: usize, _found: ShardGradients) -> Result<(), FixedError> {
        Ok(())
    }

    fn reduce(&mut self, _step: u64, tally: Tally, _ring: &mut Ring<'_>) -> Result<Reduced, ReduceError> {
        Ok(Reduced::Sum(tally))
    }

    fn mean(&mut self, _weight: f64, mean: &mut Vec<f32>) -> Result<(), FixedError> {
        mean.clone_from(&self.0);
        Ok(())
    }
}

/// An engine with an updater, and the groups of its parameters.
struct Training {
    engine: Engine,
    groups: Groups,
    updater: Updater,
}

impl Training {
    fn new(config: &OptimizerConfig, ema: Option<EmaConfig>, freeze: &[&str], home: Home) -> Training {
        let model = crate::init::mlp(INPUTS, &[4], CLASSES, 1).unwrap();
        let mut engine = Engine::load(&model, Loss::CrossEntropy, Device::Cpu).unwrap();
        let freeze: Vec<String> = freeze.iter().map(|pattern| (*pattern).to_owned()).collect();
        let groups = Groups::new(engine.layout(), &freeze, &["*.bias".to_owned()]).unwrap();
        let updater = Updater::new((config, ema), &mut engine, &groups, home).unwrap();
        Training { engine, groups, updater }
    }

    /// A step with a mean gradient that comes from the host.
    fn step(&mut self, mean: Vec<f32>) -> Result<(), UpdateError> {
        let Training { engine, groups, updater } = self;
        updater.apply(engine, groups, &mut Given(mean), (1.0, 2))
    }

    /// A step of a rank alone that keeps the gradients of both batches on the device. Returns the loss.
    fn step_kept(&mut self, batches: &[ShardBatch]) -> f64 {
        assert!(self.updater.keeps_gradients(1) && !self.updater.keeps_gradients(2));
        self.engine.clear_gradients().unwrap();
        let mut loss = 0.0;
        let mut weight = 0.0;
        for batch in batches {
            let (found, is_finite) =
                self.engine.add_gradients(batch, ShardKey::default(), (1.0, true)).unwrap();
            assert!(is_finite && found.grad.is_empty());
            loss += found.loss_sum;
            weight += found.weight;
        }
        let Training { engine, groups, updater } = self;
        updater.apply(engine, groups, &mut Given(Vec::new()), (weight, 1)).unwrap();
        loss / weight
    }

    fn weights(&self) -> Vec<f32> {
        self.engine.weights().unwrap().to_vec()
    }

    fn average(&self) -> Option<Vec<f32>> {
        self.updater.average(&self.engine).unwrap()
    }

    fn slots(&self) -> Vec<(String, Vec<f32>)> {
        self.updater.state(&self.engine).unwrap().slots
    }
}

fn batch(seed: u64) -> ShardBatch {
    let labels = (0..ROWS).map(|row| (row % CLASSES) as i64).collect();
    ShardBatch { rows: ROWS, inputs: numbers(ROWS * INPUTS, seed), labels: Labels::Class(labels) }
}

fn assert_close(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let difference = (found - expected).abs();
        assert!(
            difference <= 1e-6 * (1.0 + expected.abs()),
            "{what}, element {index}: {found} is not {expected}"
        );
    }
}

/// Each optimizer in its variants.
fn optimizers() -> Vec<OptimizerConfig> {
    let clip_norm = Some(0.5);
    let schedule = Schedule::Cosine { warmup_steps: 3, total_steps: 15, floor: 0.1 };
    let sgd = SgdConfig { weight_decay: 0.01, clip_norm, schedule, ..SgdConfig::default() };
    let rms = RmsPropConfig { weight_decay: 0.01, clip_norm, schedule, ..RmsPropConfig::default() };
    vec![
        OptimizerConfig::Sgd(SgdConfig { momentum: 0.0, ..sgd.clone() }),
        OptimizerConfig::Sgd(SgdConfig { nesterov: true, ..sgd.clone() }),
        OptimizerConfig::Sgd(SgdConfig { clip_norm: Some(1e6), ..sgd.clone() }),
        OptimizerConfig::Sgd(SgdConfig { clip_norm: None, ..sgd }),
        OptimizerConfig::AdamW(AdamWConfig { clip_norm, schedule, ..AdamWConfig::default() }),
        OptimizerConfig::Adam(AdamConfig {
            weight_decay: 0.01,
            clip_norm,
            schedule,
            ..AdamConfig::default()
        }),
        OptimizerConfig::AdaGrad(AdaGradConfig {
            learning_rate_decay: 0.1,
            initial_accumulator: 0.2,
            weight_decay: 0.01,
            clip_norm,
            ..AdaGradConfig::default()
        }),
        OptimizerConfig::RmsProp(rms.clone()),
        OptimizerConfig::RmsProp(RmsPropConfig { momentum: 0.5, ..rms.clone() }),
        OptimizerConfig::RmsProp(RmsPropConfig { centered: true, ..rms.clone() }),
        OptimizerConfig::RmsProp(RmsPropConfig { centered: true, momentum: 0.5, ..rms }),
    ]
}

fn momentum() -> OptimizerConfig {
    OptimizerConfig::Sgd(SgdConfig::default())
}

#[test]
fn steps_on_the_device_equal_those_of_the_host() {
    for config in optimizers() {
        for decay in [0.3, 0.9] {
            let ema = Some(EmaConfig { decay, warmup: decay > 0.5 });
            let [mut host, mut device] =
                [Home::Host, Home::Device].map(|home| Training::new(&config, ema, &["dense1.bias"], home));
            let start = host.weights();
            for step in 0..20 {
                let mut mean = numbers(start.len(), 100 + step);
                host.groups.clear_frozen(&mut mean);
                host.step(mean.clone()).unwrap();
                device.step(mean).unwrap();
                let what = format!("{config:?}, step {step}");
                assert_close(&device.weights(), &host.weights(), &what);
                assert_close(&device.average().unwrap(), &host.average().unwrap(), &what);
                for (found, expected) in device.slots().iter().zip(&host.slots()) {
                    assert_eq!(found.0, expected.0);
                    assert_close(&found.1, &expected.1, &what);
                }
            }
            assert_eq!(device.slots().len(), host.slots().len());
            let layout = device.engine.layout();
            let frozen = layout.params.iter().find(|param| param.name == "dense1.bias").unwrap();
            let (moved, frozen) = (device.weights(), frozen.range.clone());
            assert_eq!(moved[frozen.clone()], start[frozen]);
            assert_ne!(moved, start);
        }
    }
}

#[test]
fn gradients_of_several_batches_add_up_on_the_device() {
    let batches = [batch(1), batch(2)];
    for clip_norm in [None, Some(0.05), Some(1e6)] {
        let config = OptimizerConfig::Sgd(SgdConfig { clip_norm, ..SgdConfig::default() });
        let [mut host, mut device] =
            [Home::Host, Home::Device].map(|home| Training::new(&config, None, &["dense1.weight"], home));
        for step in 0..5 {
            let found = batches.each_ref().map(|batch| host.engine.gradients(batch).unwrap());
            let weight: f64 = found.iter().map(|found| found.weight).sum();
            let loss = found.iter().map(|found| found.loss_sum).sum::<f64>() / weight;
            let sum = found[0].grad.iter().zip(&found[1].grad).map(|(first, second)| first + second);
            let mut mean: Vec<f32> = sum.map(|sum| (f64::from(sum) / weight) as f32).collect();
            host.groups.clear_frozen(&mut mean);
            host.step(mean).unwrap();
            let kept = device.step_kept(&batches);
            assert!((kept - loss).abs() < 1e-5, "{clip_norm:?}, step {step}: loss {kept} is not {loss}");
            for (found, expected) in device.weights().iter().zip(host.weights()) {
                let close = (found - expected).abs() < 1e-5;
                assert!(close, "{clip_norm:?}, step {step}: {found} is not {expected}");
            }
        }
    }
}

#[test]
fn a_restored_state_goes_on_with_equal_losses() {
    for config in optimizers() {
        let ema = Some(EmaConfig { decay: 0.9, warmup: false });
        let mut training = Training::new(&config, ema, &[], Home::Device);
        let batches = [batch(3)];
        for _ in 0..4 {
            training.step_kept(&batches);
        }
        let state = (training.updater.state(&training.engine).unwrap(), training.average());
        assert_eq!(state.0.step, 4);
        for home in [Home::Device, Home::Host] {
            let mut again = Training::new(&config, ema, &[], home);
            again.engine.set_weights(&training.weights()).unwrap();
            let Training { engine, groups, updater } = &mut again;
            updater.restore(engine, groups, state.clone()).unwrap();
            assert_eq!(again.slots(), training.slots(), "{config:?}");
            assert_eq!(again.average(), training.average(), "{config:?}");
            assert_eq!(again.weights(), training.weights(), "{config:?}");
        }
        let mut again = Training::new(&config, ema, &[], Home::Device);
        again.engine.set_weights(&training.weights()).unwrap();
        let Training { engine, groups, updater } = &mut again;
        updater.restore(engine, groups, state).unwrap();
        for _ in 0..4 {
            let (found, expected) = (again.step_kept(&batches), training.step_kept(&batches));
            assert_eq!(found.to_bits(), expected.to_bits(), "{config:?}");
        }
        assert_eq!(again.weights(), training.weights(), "{config:?}");
    }
}

#[test]
fn a_step_that_fails_names_the_element_and_changes_nothing() {
    let adam = OptimizerConfig::Adam(AdamConfig::default());
    let at = 7;
    for (config, weight, slope, bad) in [
        (&momentum(), 0.5, f32::NAN, "gradient"),
        (&adam, 0.5, f32::NEG_INFINITY, "gradient"),
        (&momentum(), f32::MAX, -f32::MAX, "weight"),
        (&adam, 0.5, 1e30, "slot"),
    ] {
        let mut training = Training::new(config, None, &[], Home::Device);
        let mut weights = training.weights();
        weights[at] = weight;
        training.engine.set_weights(&weights).unwrap();
        let slots = training.slots();
        let mut mean = vec![0.25; weights.len()];
        mean[at] = slope;
        let (found, index) = match training.step(mean.clone()).unwrap_err() {
            UpdateError::Gradient(error) => ("gradient", error.index().unwrap()),
            UpdateError::Weight { index, .. } => ("weight", index),
            UpdateError::Slot { index } => ("slot", index),
            other => panic!("{other:?}"),
        };
        assert_eq!((found, index), (bad, at));
        assert_eq!(training.weights(), weights);
        assert_eq!(training.slots(), slots);
        mean[at] = 0.25;
        training.step(mean).unwrap();
        assert_ne!(training.weights(), weights);
    }
}

#[test]
fn a_state_that_is_not_finite_is_refused() {
    let mut training = Training::new(&momentum(), None, &[], Home::Device);
    let mut state = training.updater.state(&training.engine).unwrap();
    state.slots[0].1[3] = f32::INFINITY;
    let Training { engine, groups, updater } = &mut training;
    let error = updater.restore(engine, groups, (state, None)).unwrap_err();
    assert!(matches!(error, UpdateError::Slot { index: 3 }), "{error:?}");
}

#[test]
fn weights_and_average_change_places_on_the_device() {
    let ema = Some(EmaConfig { decay: 0.9, warmup: false });
    let mut training = Training::new(&momentum(), ema, &[], Home::Device);
    let start = training.weights();
    let exchange = |training: &mut Training| {
        let Training { engine, updater, .. } = training;
        updater.exchange_average(engine).unwrap();
    };
    // There is no average before the first step.
    exchange(&mut training);
    assert_eq!((training.weights(), training.average()), (start.clone(), None));
    for seed in 0..3 {
        training.step(numbers(start.len(), seed)).unwrap();
    }
    let (weights, average) = (training.weights(), training.average().unwrap());
    assert_ne!(weights, average);
    let inputs = numbers(INPUTS, 9);
    let logits = training.engine.logits(&inputs, 1).unwrap();
    exchange(&mut training);
    assert_eq!((training.weights(), training.average()), (average, Some(weights.clone())));
    assert_ne!(training.engine.logits(&inputs, 1).unwrap(), logits);
    exchange(&mut training);
    assert_eq!(training.weights(), weights);
    assert_eq!(training.engine.logits(&inputs, 1).unwrap(), logits);
}

#[test]
fn a_changed_weight_on_the_host_reaches_the_device() {
    let mut training = Training::new(&momentum(), None, &[], Home::Device);
    training.step(vec![0.5; training.weights().len()]).unwrap();
    let before = training.weights();
    training
        .engine
        .update(|weights| {
            weights[0] += 1.0;
            Ok::<_, EngineError>(())
        })
        .unwrap();
    training.step(vec![0.0; before.len()]).unwrap();
    let after = training.weights();
    // The momentum of the first step moves all weights alike.
    assert!((after[0] - before[0] - 1.0 - (after[1] - before[1])).abs() < 1e-6);
}
