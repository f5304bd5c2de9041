//! Tests on the zoo: small models that PyTorch exported, trained as PyTorch trained them.
//!
//! `tests/zoo/export.py` writes the models, one folder per exporter, and the losses of PyTorch.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::super::*;
use super::learning::fit;
use crate::graph::Input;
use crate::optim::{OptimizerConfig, SgdConfig};

const ROWS: usize = 8;
const RATE: f64 = 0.05;
/// Largest difference of a step's loss from PyTorch's.
const TOLERANCE: f64 = 1e-5;

/// Models that are refused, or that train in another way than PyTorch, and why.
const EXCEPTIONS: &[(&str, &str, &str)] = &[
    ("default", "frozen_weight", FROZEN),
    ("default", "weight_norm", "the exporter multiplies the parts of the weight ahead"),
    ("earlier", "buffers", "the exporter tells buffers from parameters by nothing"),
    ("earlier", "frozen_weight", FROZEN),
    ("earlier", "local_response_norm", "the exporter writes an If"),
];
const FROZEN: &str = "ONNX does not say that a parameter is frozen";

/// The exported models: the exporter, the model and its file.
fn models() -> Vec<(&'static str, String, PathBuf)> {
    let zoo = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/zoo");
    let mut models = Vec::new();
    for exporter in ["default", "earlier"] {
        for entry in std::fs::read_dir(zoo.join(exporter)).unwrap() {
            let file = entry.unwrap().path();
            models.push((exporter, file.file_stem().unwrap().to_string_lossy().into_owned(), file));
        }
    }
    models.sort();
    models
}

/// The rows that `export.py` trains on.
fn batch(engine: &Engine) -> ShardBatch {
    let value = |input: &Input, row: usize, at: usize| {
        let i = row * input.range.len() + at;
        match &input.below {
            Some(_) if input.name.contains("mask") => f32::from(u8::from(at < input.range.len() - row % 3)),
            Some(below) => ((7 * i + i / 5) % below[at] as usize) as f32,
            None => {
                let i = i as f64;
                (0.7391 * i + 0.0013 * i * i).sin() as f32
            }
        }
    };
    let mut inputs = Vec::new();
    for row in 0..ROWS {
        for input in engine.graph.inputs() {
            inputs.extend((0..input.range.len()).map(|at| value(input, row, at)));
        }
    }
    let labels = (0..ROWS).map(|row| ((5 * row + 1) % engine.output_width()) as i64).collect();
    ShardBatch { rows: ROWS, inputs, labels: Labels::Class(labels) }
}

/// The largest difference from PyTorch's losses, or the refusal.
fn difference(file: &Path, losses: &[f64]) -> Result<f64, EngineError> {
    let model = crate::model::read(file).unwrap();
    let mut engine = Engine::load(&model, Loss::CrossEntropy, Device::Cpu)?;
    let batch = batch(&engine);
    let config = SgdConfig { learning_rate: RATE, momentum: 0.0, ..SgdConfig::default() };
    let found = fit(&mut engine, &OptimizerConfig::Sgd(config), &batch, losses.len());
    Ok(found.iter().zip(losses).map(|(found, loss)| (found - loss).abs()).fold(0.0, f64::max))
}

#[test]
fn exported_models_train_as_in_pytorch() {
    let losses = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/zoo/losses.json");
    let losses: BTreeMap<String, Vec<f64>> = serde_json::from_slice(&std::fs::read(losses).unwrap()).unwrap();
    let (mut unexpected, mut all, mut equal) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
    for (exporter, name, file) in models() {
        *all.entry(exporter).or_insert(0) += 1;
        let found = difference(&file, &losses[&name]);
        let is_equal = found.as_ref().is_ok_and(|found| *found <= TOLERANCE);
        *equal.entry(exporter).or_insert(0) += u32::from(is_equal);
        let is_exception = EXCEPTIONS.iter().any(|(of, model, _)| (*of, *model) == (exporter, &name));
        if is_equal == is_exception {
            unexpected.push(match found {
                Ok(found) => format!("{exporter} {name}: the losses differ by {found:e}"),
                Err(error) => format!("{exporter} {name}: {error}"),
            });
        }
    }
    assert!(unexpected.is_empty(), "{equal:?} of {all:?} train equally\n{}", unexpected.join("\n"));
    for (exporter, all) in &all {
        assert!(*all >= 100 && 10 * equal[exporter] >= 9 * all, "{exporter}: {equal:?} of {all}");
    }
}
