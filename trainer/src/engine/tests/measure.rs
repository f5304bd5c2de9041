//! Benchmarks that are run by name: samples per second, and the time of each part of a step.
#![allow(clippy::print_stderr)]

use super::super::*;
use super::clusters;
use super::learning::{digits_mlp, train_digits};
use crate::fixed::{FRACTION_BITS_DEFAULT, Scale};
use crate::optim::{Optimizer, OptimizerConfig};

#[test]
#[ignore = "a measurement: run it by name with --nocapture"]
fn measure_training() {
    for seed in 0..4 {
        for epochs in [15, 30, 60] {
            let start = std::time::Instant::now();
            let (_, accuracy) = train_digits(&digits_mlp(seed), &OptimizerConfig::default(), epochs);
            let seconds = start.elapsed().as_secs_f64();
            let rate = (epochs * 1437) as f64 / seconds;
            eprintln!(
                "digits seed {seed} epochs {epochs}: accuracy {accuracy:.4}, {seconds:.2} s, {rate:.0} samples/s"
            );
        }
    }
    for (name, widths, rows) in [
        ("64-128-10", vec![64, 128], 8),
        ("64-128-10", vec![64, 128], 128),
        ("784-512-512-10", vec![784, 512, 512], 11),
        ("784-512-512-10", vec![784, 512, 512], 32),
        ("784-512-512-10", vec![784, 512, 512], 128),
    ] {
        let model = crate::init::mlp(widths[0], &widths[1..], 10, 1).unwrap();
        measure(name, &model, widths[0], rows, Device::Cpu);
    }
    measure("cnn 8x8", &crate::init::cnn(8, 8, 1, 10, 1).unwrap(), 64, 8, Device::Cpu);
    for rows in [5, 16, 64] {
        measure("cnn 28x28", &crate::init::cnn(28, 28, 1, 10, 1).unwrap(), 784, rows, Device::Cpu);
    }
}

pub(super) fn measure(name: &str, model: &ModelProto, width: usize, rows: usize, device: Device) {
    let mut engine = Engine::load(model, Loss::CrossEntropy, device).unwrap();
    let elements = engine.layout().elements();
    let mut optimizer = Optimizer::new(&OptimizerConfig::default(), elements).unwrap();
    let scale = Scale::new(FRACTION_BITS_DEFAULT, 12).unwrap();
    let batch = clusters(rows, width, 10, 3);
    let shards = (128 / rows).max(1);
    let mut mean = vec![0.0; elements];
    let mut parts = [0.0f64; 3];
    // The first step of a GPU compiles its kernels.
    engine.gradients(&batch).unwrap();
    let mut steps = 0;
    let start = std::time::Instant::now();
    while start.elapsed().as_secs_f64() < 1.5 {
        let mut sum = vec![0i64; elements];
        for _ in 0..shards {
            let at = std::time::Instant::now();
            let found = engine.gradients(&batch).unwrap();
            parts[0] += at.elapsed().as_secs_f64();
            let at = std::time::Instant::now();
            scale.add(&found.grad, &mut sum).unwrap();
            parts[1] += at.elapsed().as_secs_f64();
        }
        let at = std::time::Instant::now();
        scale.mean_into(&sum, 128, &mut mean).unwrap();
        engine
            .update(|w| {
                optimizer.apply(w, &mean).unwrap();
                Ok::<_, EngineError>(())
            })
            .unwrap();
        parts[2] += at.elapsed().as_secs_f64();
        steps += 1;
    }
    let rate = (steps * shards * rows) as f64 / start.elapsed().as_secs_f64();
    let [g, f, u] = parts.map(|p| p * 1e6 / steps as f64);
    eprintln!(
        "{device}: {name} shards of {rows}: {rate:.0} samples/s; per step: gradients {g:.0} µs, fixed {f:.0} µs, update {u:.0} µs"
    );
}
