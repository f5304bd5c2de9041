//! Tests of the CUDA backend: outputs, gradients and a training against the processor, on a machine with a GPU.
#![allow(clippy::print_stderr)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use millrace_testing::{Need, skip};

use super::learning::fit;
use super::measure::measure;
use super::resident::fit_on_device;
use super::*;
use crate::optim::{
    AdaGradConfig, AdamConfig, AdamWConfig, Optimizer, OptimizerConfig, RmsPropConfig, SgdConfig,
};

const GPU: Device = Device::Cuda(0);
/// Largest difference from the processor, in parts of 1 + the value.
const DIFFERENCE_MAX: f32 = 1e-3;

/// Whether the first GPU computes; skips the calling test otherwise.
fn gpu_is_here() -> bool {
    let model = crate::init::mlp(4, &[], 3, 0).unwrap();
    match Engine::load(&model, Loss::CrossEntropy, GPU) {
        Ok(_) => true,
        Err(error) => {
            skip(Need::Gpu, error);
            false
        }
    }
}

fn largest_difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let differences = found.iter().zip(expected).map(|(f, e)| (f - e).abs() / (1.0 + e.abs()));
    differences.fold(0.0, |most, difference| if difference <= most { most } else { difference })
}

/// Outputs and gradients of a model on the GPU against those on the processor; says what differs.
fn compare(model: &ModelProto) -> Result<(f32, f32), String> {
    let load = |device| Engine::load(model, Loss::Mse, device).map_err(|error| error.to_string());
    let (gpu, cpu) = (load(GPU)?, load(Device::Cpu)?);
    let batch = ShardBatch {
        rows: ROWS,
        inputs: probe::inputs(cpu.graph(), ROWS, 25),
        labels: Labels::Value(numbers(ROWS * cpu.output_width(), 26)),
    };
    let outputs = |engine: &Engine| engine.logits(&batch.inputs, ROWS).map_err(|error| error.to_string());
    let of_outputs = largest_difference(&outputs(&gpu)?, &outputs(&cpu)?);
    let gradient = |engine: &Engine| engine.gradients(&batch).map_err(|error| error.to_string());
    let (first, again) = (gradient(&gpu)?, gradient(&gpu)?);
    let of_gradients = largest_difference(&first.grad, &gradient(&cpu)?.grad);
    let bits = |found: &ShardGradients| found.grad.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    if bits(&first) != bits(&again) {
        return Err("two gradients of the same batch have different bits".to_owned());
    }
    if of_outputs > DIFFERENCE_MAX || of_gradients > DIFFERENCE_MAX {
        return Err(format!("outputs differ by {of_outputs:e}, gradients by {of_gradients:e}"));
    }
    Ok((of_outputs, of_gradients))
}

#[test]
fn every_operator_on_a_gpu_equals_the_processor() {
    if !gpu_is_here() {
        return;
    }
    let mut models: Vec<(String, ModelProto)> =
        every_operator().into_iter().map(|(name, model, _)| (name, model)).collect();
    for spec in specs() {
        models.push((format!("{spec:?}"), spec.build().unwrap()));
    }
    let mut most = (0f32, 0f32);
    let mut failed = Vec::new();
    for (name, model) in &models {
        match catch_unwind(AssertUnwindSafe(|| compare(model))) {
            Ok(Ok(found)) => most = (most.0.max(found.0), most.1.max(found.1)),
            Ok(Err(reason)) => failed.push(format!("{name}: {reason}")),
            Err(_) => failed.push(format!("{name}: a panic")),
        }
    }
    eprintln!("{} models: outputs differ by {:e}, gradients by {:e} at most", models.len(), most.0, most.1);
    assert!(failed.is_empty(), "{} of {}:\n{}", failed.len(), models.len(), failed.join("\n"));
}

#[test]
fn exported_models_train_on_a_gpu_as_on_the_processor() {
    if !gpu_is_here() {
        return;
    }
    let (mut most, mut trained, mut failed) = (0f32, 0, Vec::new());
    let losses = |device, file: &Path, is_squared| {
        let losses = || zoo::losses_on(device, file, zoo::STEPS, is_squared);
        let losses = catch_unwind(AssertUnwindSafe(losses)).map_err(|_| "a panic".to_owned())?;
        let losses = losses.map_err(|error| error.to_string())?;
        Ok::<_, String>(losses.iter().map(|loss| *loss as f32).collect::<Vec<f32>>())
    };
    for (exporter, name, file) in zoo::models() {
        let is_squared = zoo::SQUARED.contains(&name.as_str());
        let Ok(expected) = losses(Device::Cpu, &file, is_squared) else { continue };
        trained += 1;
        match losses(GPU, &file, is_squared).map(|found| largest_difference(&found, &expected)) {
            Ok(difference) if difference <= DIFFERENCE_MAX => most = most.max(difference),
            Ok(difference) => failed.push(format!("{exporter} {name}: the losses differ by {difference:e}")),
            Err(reason) => failed.push(format!("{exporter} {name}: {reason}")),
        }
    }
    eprintln!("{trained} exported models: losses of {} steps differ by {most:e} at most", zoo::STEPS);
    assert!(trained >= 200, "{trained} models trained on the processor");
    assert!(failed.is_empty(), "{} of {trained}:\n{}", failed.len(), failed.join("\n"));
}

#[test]
fn training_on_a_gpu_has_the_losses_of_the_processor() {
    if !gpu_is_here() {
        return;
    }
    for spec in specs() {
        let model = spec.build().unwrap();
        let mut batch = clusters(40, 144, 10, 8);
        batch.inputs.iter_mut().for_each(|x| *x *= 16.0);
        let losses = [GPU, Device::Cpu].map(|device| {
            let mut engine = Engine::load(&model, Loss::CrossEntropy, device).unwrap();
            let mut optimizer =
                Optimizer::new(&OptimizerConfig::default(), engine.layout().elements()).unwrap();
            let losses = (0..40).map(|_| {
                let found = engine.gradients(&batch).unwrap();
                let mean: Vec<f32> = found.grad.iter().map(|g| g / batch.rows as f32).collect();
                let step = engine.update(|weights| {
                    optimizer.apply(weights, &mean).unwrap();
                    Ok::<_, EngineError>(())
                });
                step.unwrap();
                (found.loss_sum / batch.rows as f64) as f32
            });
            losses.collect::<Vec<f32>>()
        });
        let difference = largest_difference(&losses[0], &losses[1]);
        eprintln!("{spec:?}: losses differ by {difference:e} at most, the last is {:?}", losses[0].last());
        assert!(difference <= DIFFERENCE_MAX, "{spec:?}: {losses:?}");
    }
}

#[test]
fn steps_that_stay_on_a_gpu_have_the_losses_of_the_processor() {
    if !gpu_is_here() {
        return;
    }
    let clip_norm = Some(1.0);
    for config in [
        OptimizerConfig::Sgd(SgdConfig {
            learning_rate: 0.05,
            nesterov: true,
            clip_norm,
            ..SgdConfig::default()
        }),
        OptimizerConfig::AdamW(AdamWConfig { clip_norm, ..AdamWConfig::default() }),
        OptimizerConfig::Adam(AdamConfig { weight_decay: 0.01, ..AdamConfig::default() }),
        OptimizerConfig::AdaGrad(AdaGradConfig::default()),
        OptimizerConfig::RmsProp(RmsPropConfig {
            learning_rate: 1e-3,
            centered: true,
            momentum: 0.5,
            ..RmsPropConfig::default()
        }),
    ] {
        for spec in specs() {
            let model = spec.build().unwrap();
            let mut batch = clusters(40, 144, 10, 8);
            batch.inputs.iter_mut().for_each(|x| *x *= 16.0);
            let load = |device| Engine::load(&model, Loss::CrossEntropy, device).unwrap();
            let (mut gpu, mut cpu) = (load(GPU), load(Device::Cpu));
            let losses = [fit_on_device(&mut gpu, &config, &batch, 20), fit(&mut cpu, &config, &batch, 20)];
            let [found, expected] =
                losses.each_ref().map(|losses| losses.iter().map(|loss| *loss as f32).collect::<Vec<f32>>());
            let difference = largest_difference(&found, &expected);
            let weights = largest_difference(gpu.weights().unwrap(), cpu.weights().unwrap());
            eprintln!(
                "{config:?}, {spec:?}: losses differ by {difference:e}, weights by {weights:e} at most"
            );
            assert!(difference <= DIFFERENCE_MAX, "{config:?}, {spec:?}: {losses:?}");
        }
    }
}

#[test]
#[ignore = "a measurement: run it by name with --nocapture"]
fn measure_training_on_a_gpu() {
    if !gpu_is_here() {
        return;
    }
    let cnn = |side: usize, filters: &[usize], hidden: &[usize]| {
        let spec = CnnSpec {
            height: side,
            width: side,
            channels: 3,
            filters: filters.to_vec(),
            hidden: hidden.to_vec(),
            classes: 10,
            scale: 1.0,
            seed: 1,
        };
        ModelSpec::Cnn(spec).build().unwrap()
    };
    for (name, model, width, rows) in [
        ("mlp 64-128-10", crate::init::mlp(64, &[128], 10, 1).unwrap(), 64, 96),
        ("mlp 784-2048-2048-10", crate::init::mlp(784, &[2048, 2048], 10, 1).unwrap(), 784, 1024),
        ("cnn 32x32x3, 64-128-256", cnn(32, &[64, 128, 256], &[256]), 3072, 256),
    ] {
        for device in [GPU, Device::Cpu] {
            measure(name, &model, width, rows, device);
        }
    }
}
