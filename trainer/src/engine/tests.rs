//! Derivatives against finite differences, outputs against ONNX Runtime, bits against threads.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use std::collections::BTreeSet;
use std::sync::Arc;

use burn_flex::{Flex, FlexDevice};
use prost::Message;

use super::run::Interpreter;
use super::*;
use crate::fixed::{FRACTION_BITS_DEFAULT, Scale};
use crate::graph::SUPPORTED_OPERATORS;
use crate::init::{CnnSpec, ModelSpec};
use crate::optim::{AdamWConfig, Optimizer, OptimizerConfig, SgdConfig};
use crate::probe::{Probe, digits, every_operator, numbers, run_reference, runtime};

const ROWS: usize = 3;

/// An interpreter in f64, where finite differences are sharp.
fn exact(model: &ModelProto) -> (Interpreter<Flex, f64>, Graph, Vec<f64>) {
    let graph = Graph::read(model).unwrap();
    let weights: Vec<f64> = graph
        .initial_weights(model)
        .unwrap()
        .into_iter()
        .map(f64::from)
        .collect();
    let mut interpreter = Interpreter::new(Arc::new(graph.clone()), FlexDevice, Device::Cpu);
    interpreter.hold(&weights).unwrap();
    (interpreter, graph, weights)
}

fn wide(values: Vec<f32>) -> Vec<f64> {
    values.into_iter().map(f64::from).collect()
}

#[test]
fn every_derivative_matches_finite_differences() {
    let mut seen = BTreeSet::new();
    for (name, model, _) in every_operator() {
        for node in &model.graph.as_ref().unwrap().node {
            seen.insert(node.op_type().to_owned());
        }
        let (mut interpreter, graph, weights) = exact(&model);
        let inputs = wide(numbers(ROWS * graph.input_width(), 5));
        let slope = wide(numbers(ROWS * graph.output_width(), 6));
        let objective = |interpreter: &Interpreter<Flex, f64>| -> f64 {
            let outputs = interpreter.evaluate(inputs.clone(), ROWS).unwrap();
            outputs.iter().zip(&slope).map(|(o, s)| o * s).sum()
        };
        let grad = interpreter
            .differentiate(inputs.clone(), ROWS, &mut |_| Ok(slope.clone()))
            .unwrap();
        assert!(grad.iter().any(|g| g.abs() > 1e-6), "{name}: no gradient");
        let step = 1e-5;
        for (index, found) in grad.iter().enumerate() {
            let mut at = |offset: f64| {
                let mut moved = weights.clone();
                moved[index] += offset;
                interpreter.hold(&moved).unwrap();
                objective(&interpreter)
            };
            let expected = (at(step) - at(-step)) / (2.0 * step);
            assert!(
                (found - expected).abs() <= 1e-7 * (1.0 + expected.abs()),
                "{name}: element {index}: {found} differs from {expected}"
            );
        }
    }
    let listed: BTreeSet<String> = SUPPORTED_OPERATORS.iter().map(|op| (*op).to_owned()).collect();
    assert_eq!(seen, listed, "every supported operator has a probe, and no other");
}

#[test]
fn gradients_of_row_subsets_add_up() {
    for (name, model, _) in every_operator() {
        let (interpreter, graph, _) = exact(&model);
        let (inner, outer) = (graph.input_width(), graph.output_width());
        let inputs = wide(numbers(ROWS * inner, 15));
        let slope = wide(numbers(ROWS * outer, 16));
        let part = |from: usize, to: usize| {
            interpreter
                .differentiate(inputs[from * inner..to * inner].to_vec(), to - from, &mut |_| {
                    Ok(slope[from * outer..to * outer].to_vec())
                })
                .unwrap()
        };
        let (whole, first, rest) = (part(0, ROWS), part(0, 1), part(1, ROWS));
        for index in 0..whole.len() {
            let sum = first[index] + rest[index];
            assert!((whole[index] - sum).abs() <= 1e-12 * (1.0 + sum.abs()), "{name}");
        }
    }
}

#[test]
fn every_operator_equals_onnx_runtime() {
    let Some(environment) = runtime() else { return };
    let mut models = every_operator();
    for spec in specs() {
        let model = spec.build().unwrap();
        models.push((format!("{spec:?}"), model, vec![144]));
    }
    for (name, model, row) in models {
        let engine = Engine::load(&model, Loss::Mse, Device::Cpu).unwrap();
        let inputs = numbers(ROWS * engine.input_width(), 25);
        let found = engine.logits(&inputs, ROWS).unwrap();
        let exported = engine.export();
        let expected = run_reference(environment, &exported, &row, ROWS, &inputs)
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(found.len(), expected.len(), "{name}");
        for (f, e) in found.iter().zip(&expected) {
            assert!((f - e).abs() <= 1e-5 * (1.0 + e.abs()), "{name}: {f} differs from {e}");
        }
    }
}

fn specs() -> [ModelSpec; 2] {
    let cnn = CnnSpec {
        height: 12,
        width: 12,
        channels: 1,
        filters: vec![8, 12],
        hidden: vec![24],
        classes: 10,
        scale: 0.0625,
        seed: 4,
    };
    let mlp = crate::init::MlpSpec {
        inputs: 144,
        hidden: vec![32, 16],
        classes: 10,
        scale: 0.0625,
        seed: 3,
    };
    [ModelSpec::Mlp(mlp), ModelSpec::Cnn(cnn)]
}

/// Points around one centre per class.
fn clusters(rows: usize, width: usize, classes: usize, seed: u64) -> ShardBatch {
    let centres = numbers(classes * width, 100);
    let noise = numbers(rows * width, seed);
    let labels: Vec<i64> = (0..rows).map(|row| (row % classes) as i64).collect();
    let inputs = (0..rows * width)
        .map(|index| {
            let (row, column) = (index / width, index % width);
            centres[labels[row] as usize * width + column] + 0.5 * noise[index]
        })
        .collect();
    ShardBatch {
        rows,
        inputs,
        labels: Labels::Class(labels),
    }
}

fn fit(engine: &mut Engine, optimizer: &OptimizerConfig, batch: &ShardBatch, steps: usize) -> Vec<f64> {
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
    let start: Vec<f64> = engine.weights().iter().map(|w| f64::from(*w)).collect();
    let config = SgdConfig { learning_rate: rate, momentum: 0.0, ..SgdConfig::default() };
    let curve = fit(&mut engine, &OptimizerConfig::Sgd(config), &batch, 40);

    let mut weights = start;
    for (step, found) in curve.iter().enumerate() {
        let mut grad = vec![0.0; weights.len()];
        let mut loss = 0.0;
        for (row, label) in labels.iter().enumerate() {
            let x: Vec<f64> = (0..width).map(|i| f64::from(batch.inputs[row * width + i])).collect();
            let z: Vec<f64> = (0..classes)
                .map(|c| (0..width).map(|i| x[i] * weights[i * classes + c]).sum::<f64>() + weights[width * classes + c])
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
    let truth = inputs
        .chunks(3)
        .flat_map(|x| [x[0] - 2.0 * x[1] + 0.5, 3.0 * x[2]])
        .collect();
    let batch = ShardBatch { rows: 50, inputs, labels: Labels::Value(truth) };
    let config = SgdConfig { learning_rate: 0.3, ..SgdConfig::default() };
    let curve = fit(&mut engine, &OptimizerConfig::Sgd(config), &batch, 150);
    assert!(curve[149] < 1e-6, "{}", curve[149]);
    let expected = [1.0, 0.0, -2.0, 0.0, 0.0, 3.0, 0.5, 0.0];
    for (found, expected) in engine.weights().iter().zip(expected) {
        assert!((found - expected).abs() < 3e-3, "{:?}", engine.weights());
    }
}

#[test]
fn gradients_have_the_same_bits_for_any_number_of_threads() {
    let mut wide = specs()[1].clone();
    if let ModelSpec::Cnn(spec) = &mut wide {
        spec.filters = vec![24, 32];
    }
    let large = crate::init::mlp(512, &[384, 256], 10, 1).unwrap();
    for (model, width) in [(large, 512), (wide.build().unwrap(), 144)] {
        let engine = Engine::load(&model, Loss::CrossEntropy, Device::Cpu).unwrap();
        let batch = clusters(48, width, 10, 3);
        let found: Vec<ShardGradients> = [1, 2, 4]
            .into_iter()
            .map(|threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| engine.gradients(&batch).unwrap())
            })
            .collect();
        let bits = |g: &ShardGradients| g.grad.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        for other in &found[1..] {
            assert_eq!(bits(&found[0]), bits(other));
            assert_eq!(found[0].loss_sum.to_bits(), other.loss_sum.to_bits());
        }
    }
}

#[test]
fn an_export_loads_again_with_the_same_weights_and_bytes() {
    for spec in specs() {
        let model = spec.build().unwrap();
        let mut engine = Engine::load(&model, Loss::CrossEntropy, Device::Cpu).unwrap();
        assert_eq!(engine.export().encode_to_vec(), model.encode_to_vec());
        let weights = numbers(engine.layout().elements(), 1);
        engine.set_weights(&weights).unwrap();
        let bytes = engine.export().encode_to_vec();
        assert_eq!(bytes, engine.export().encode_to_vec());
        let again = ModelProto::decode(&bytes[..]).unwrap();
        let again = Engine::load(&again, Loss::CrossEntropy, Device::Cpu).unwrap();
        assert_eq!(again.weights(), weights);
        let inputs = numbers(2 * 144, 2);
        assert_eq!(engine.logits(&inputs, 2).unwrap(), again.logits(&inputs, 2).unwrap());
    }
}

#[test]
fn the_layout_covers_the_flat_vector_and_names_its_elements() {
    let engine = Engine::load(&specs()[0].build().unwrap(), Loss::CrossEntropy, Device::Cpu).unwrap();
    let layout = engine.layout();
    let mut next = 0;
    for param in &layout.params {
        assert_eq!(param.range.start, next);
        assert_eq!(param.range.len(), param.shape.iter().product::<usize>());
        next = param.range.end;
    }
    assert_eq!(next, engine.weights().len());
    assert_eq!(layout.name_of(0), Some("dense1.weight"));
    assert_eq!(layout.name_of(next - 1), Some("head.bias"));
    assert_eq!(layout.name_of(next), None);
}

#[test]
fn batches_and_weights_that_do_not_fit_are_refused() {
    let mut engine = Engine::load(&crate::init::mlp(4, &[], 3, 0).unwrap(), Loss::CrossEntropy, Device::Cpu).unwrap();
    let batch = |rows: usize, inputs: usize, labels: Labels| ShardBatch {
        rows,
        inputs: vec![0.5; inputs],
        labels,
    };
    for (shard, expected) in [
        (batch(2, 7, Labels::Class(vec![0, 1])), "2 rows of 4 values"),
        (batch(2, 8, Labels::Class(vec![0])), "2 rows with 1 labels"),
        (batch(2, 8, Labels::Class(vec![0, 3])), "label 3 in row 1"),
        (batch(2, 8, Labels::Class(vec![-1, 0])), "label -1 in row 0"),
        (batch(2, 8, Labels::Value(vec![0.0; 6])), "integer classes"),
        (batch(usize::MAX, 8, Labels::Class(vec![])), "rows of 4 values"),
    ] {
        let error = engine.gradients(&shard).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert!(matches!(engine.set_weights(&[0.0; 3]), Err(EngineError::Weights { expected: 15, found: 3 })));
    let empty = engine.gradients(&batch(0, 0, Labels::Class(vec![]))).unwrap();
    assert_eq!((empty.loss_sum, empty.grad), (0.0, vec![0.0; 15]));
    let mut shard = batch(2, 8, Labels::Class(vec![0, 1]));
    shard.inputs[5] = f32::NAN;
    let error = engine.gradients(&shard).unwrap_err();
    assert!(matches!(error, EngineError::NonFinite { row: 1, .. }), "{error}");
    assert!(engine.logits(&[], 0).unwrap().is_empty());
}

#[test]
fn outputs_that_do_not_fit_the_loss_are_refused() {
    let mut probe = Probe::new(17, &[4]);
    let w = probe.param(&[4, 3]);
    let product = probe.node("MatMul", &["x", &w], vec![]);
    let output = probe.node("Softmax", &[&product], vec![]);
    let error = Engine::load(&probe.finish(&output), Loss::CrossEntropy, Device::Cpu).unwrap_err();
    assert!(error.to_string().contains("made by Softmax"), "{error}");
    let single = crate::init::mlp(4, &[], 1, 0).unwrap();
    assert!(Engine::load(&single, Loss::CrossEntropy, Device::Cpu).is_err());
    assert!(Engine::load(&single, Loss::Mse, Device::Cpu).is_ok());
}

#[test]
fn devices_have_names_and_a_missing_one_says_why() {
    for (text, device) in [("cpu", Device::Cpu), ("cuda", Device::Cuda(0)), ("cuda:3", Device::Cuda(3))] {
        assert_eq!(text.parse::<Device>().unwrap(), device);
    }
    assert!("gpu".parse::<Device>().is_err());
    assert_eq!(serde_json::to_string(&Device::Cuda(1)).unwrap(), "\"cuda:1\"");
    #[cfg(not(feature = "cuda"))]
    {
        let model = crate::init::mlp(4, &[], 3, 0).unwrap();
        let error = Engine::load(&model, Loss::CrossEntropy, Device::Cuda(0)).unwrap_err();
        assert!(error.to_string().contains("--features cuda"), "{error}");
    }
}

/// Trains on the digits in shards with exact sums, as a job does; returns the held-out accuracy.
fn train_digits(spec: &ModelSpec, optimizer: &OptimizerConfig, epochs: usize) -> (Engine, f64) {
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

fn digits_mlp(seed: u64) -> ModelSpec {
    ModelSpec::Mlp(crate::init::MlpSpec {
        inputs: 64,
        hidden: vec![64],
        classes: 10,
        scale: 0.0625,
        seed,
    })
}

#[test]
fn the_digits_are_learned() {
    let (engine, accuracy) = train_digits(&digits_mlp(0), &OptimizerConfig::default(), 30);
    assert!(accuracy >= 0.96, "{accuracy}");
    let Some(environment) = runtime() else { return };
    let held_out = digits::load("digits-test.jsonl");
    let found = engine.logits(&held_out.inputs, held_out.rows).unwrap();
    let expected = run_reference(environment, &engine.export(), &[64], held_out.rows, &held_out.inputs).unwrap();
    for (f, e) in found.iter().zip(&expected) {
        assert!((f - e).abs() <= 1e-5 * (1.0 + e.abs()), "{f} differs from {e}");
    }
}

#[test]
#[ignore = "a measurement: run it by name with --nocapture"]
fn measure_training() {
    for seed in 0..4 {
        for epochs in [15, 30, 60] {
            let start = std::time::Instant::now();
            let (_, accuracy) = train_digits(&digits_mlp(seed), &OptimizerConfig::default(), epochs);
            let seconds = start.elapsed().as_secs_f64();
            let rate = (epochs * 1437) as f64 / seconds;
            eprintln!("digits seed {seed} epochs {epochs}: accuracy {accuracy:.4}, {seconds:.2} s, {rate:.0} samples/s");
        }
    }
    for (name, widths, rows) in [
        ("64-128-10", vec![64, 128], 8),
        ("64-128-10", vec![64, 128], 96),
        ("784-512-512-10", vec![784, 512, 512], 8),
        ("784-512-512-10", vec![784, 512, 512], 96),
    ] {
        let model = crate::init::mlp(widths[0], &widths[1..], 10, 1).unwrap();
        measure(name, &model, widths[0], rows);
    }
    measure("cnn 8x8", &crate::init::cnn(8, 8, 1, 10, 1).unwrap(), 64, 8);
    measure("cnn 28x28", &crate::init::cnn(28, 28, 1, 10, 1).unwrap(), 784, 8);
}

fn measure(name: &str, model: &ModelProto, width: usize, rows: usize) {
    let mut engine = Engine::load(model, Loss::CrossEntropy, Device::Cpu).unwrap();
    let elements = engine.layout().elements();
    let mut optimizer = Optimizer::new(&OptimizerConfig::default(), elements).unwrap();
    let scale = Scale::new(FRACTION_BITS_DEFAULT, 12).unwrap();
    let batch = clusters(rows, width, 10, 3);
    let shards = (96 / rows).max(1);
    let mut mean = vec![0.0; elements];
    let mut parts = [0.0f64; 3];
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
        scale.mean_into(&sum, 96, &mut mean).unwrap();
        engine.update(|w| { optimizer.apply(w, &mean).unwrap(); Ok::<_, EngineError>(()) }).unwrap();
        parts[2] += at.elapsed().as_secs_f64();
        steps += 1;
    }
    let rate = (steps * shards * rows) as f64 / start.elapsed().as_secs_f64();
    let [g, f, u] = parts.map(|p| p * 1e6 / steps as f64);
    eprintln!("{name} shards of {rows}: {rate:.0} samples/s; per step: gradients {g:.0} µs, fixed {f:.0} µs, update {u:.0} µs");
}
