//! Tests of nodes with a training mode: against PyTorch, finite differences and ONNX Runtime.

use serde::Deserialize;

use super::super::run::Interpreter;
use super::super::*;
use super::{exact, wide};
use crate::optim::{Optimizer, OptimizerConfig, SgdConfig};
use crate::probe::{Probe, float, int, numbers, run_reference, runtime};

/// A model with batch normalisations over lists and over positions, written by PyTorch's earlier exporter with
/// `training=TrainingMode.TRAINING`, once for each form of the operator.
const MODELS: [&[u8]; 2] =
    [include_bytes!("data/batchnorm-13.onnx"), include_bytes!("data/batchnorm-17.onnx")];

/// What PyTorch 2.15 computes with that model in train(): 20 steps of SGD with learning rate 0.1 on [`rows`].
#[derive(Deserialize)]
struct Recorded {
    losses: Vec<f64>,
    statistics: std::collections::BTreeMap<String, Vec<f64>>,
}

fn recorded() -> Recorded {
    serde_json::from_str(include_str!("data/batchnorm.json")).unwrap()
}

fn rows() -> ShardBatch {
    let inputs = (0..16 * 36).map(|index| ((index * 7919 + 13) % 1000) as f32 / 500.0 - 1.0).collect();
    ShardBatch { rows: 16, inputs, labels: Labels::Class((0..16).map(|row| row % 3).collect()) }
}

fn recorded_model(which: usize) -> ModelProto {
    prost::Message::decode(MODELS[which]).unwrap()
}

/// Trains as a job with one virtual shard does; the loss of each step.
fn fit(engine: &mut Engine, batch: &ShardBatch, steps: u64) -> Vec<f64> {
    let config =
        OptimizerConfig::Sgd(SgdConfig { learning_rate: 0.1, momentum: 0.0, ..SgdConfig::default() });
    let mut optimizer = Optimizer::new(&config, engine.layout().elements()).unwrap();
    (0..steps)
        .map(|step| {
            let found = engine.gradients_at(batch, ShardKey { step, ..ShardKey::default() }).unwrap();
            let mean: Vec<f32> = found.grad.iter().map(|g| g / batch.rows as f32).collect();
            engine
                .update(|weights| {
                    optimizer.apply(weights, &mean).unwrap();
                    Ok::<_, EngineError>(())
                })
                .unwrap();
            engine.move_states(&[(batch.rows, &found.moments)]).unwrap();
            found.loss_sum / batch.rows as f64
        })
        .collect()
}

#[test]
fn batch_normalisation_trains_as_in_pytorch() {
    let recorded = recorded();
    for which in 0..MODELS.len() {
        let mut engine = Engine::load(&recorded_model(which), Loss::CrossEntropy, Device::Cpu).unwrap();
        let start = engine.states().to_vec();
        let losses = fit(&mut engine, &rows(), 20);
        for (step, (found, expected)) in losses.iter().zip(&recorded.losses).enumerate() {
            assert!((found - expected).abs() < 1e-5, "step {step}: {found}, PyTorch has {expected}");
        }
        assert_eq!(engine.layout().states.len(), 4);
        for state in &engine.layout().states {
            let expected = &recorded.statistics[&state.name];
            // PyTorch's share of a batch and the values of each channel in it.
            let (share, values) = if state.name.starts_with("norm.") { (0.1, 256.0) } else { (0.2, 16.0) };
            let left = (1.0f64 - share).powi(20);
            for (at, expected) in state.range.clone().zip(expected) {
                let (found, first) = (engine.states()[at], left * f64::from(start[at]));
                // PyTorch's running variance takes the unbiased variance of the batch, ONNX's that of the population.
                let expected = match state.name.ends_with("var") {
                    true => first + (expected - first) * (values - 1.0) / values,
                    false => *expected,
                };
                let distance = (f64::from(found) - expected).abs();
                assert!(distance < 1e-5 * expected.abs(), "{}: {found}, expected {expected}", state.name);
            }
        }
    }
}

#[test]
fn exported_model_is_for_inference_and_equals_the_evaluation() {
    for which in 0..MODELS.len() {
        let model = recorded_model(which);
        let mut engine = Engine::load(&model, Loss::CrossEntropy, Device::Cpu).unwrap();
        let before = engine.logits(&rows().inputs, 16).unwrap();
        fit(&mut engine, &rows(), 20);
        let found = engine.logits(&rows().inputs, 16).unwrap();
        assert!(found.iter().zip(&before).any(|(f, b)| (f - b).abs() > 0.1));
        let exported = engine.export().unwrap();
        assert_eq!(
            prost::Message::encode_to_vec(&exported),
            prost::Message::encode_to_vec(&engine.export().unwrap())
        );
        let expected = run_reference(runtime(), &exported, &[1, 6, 6], 16, &rows().inputs).unwrap();
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found - expected).abs() <= 1e-5 * (1.0 + expected.abs()), "{found} {expected}");
        }
        // It loads again, without states, and computes the same in training and evaluation.
        let again = Engine::load(&exported, Loss::CrossEntropy, Device::Cpu).unwrap();
        assert!(!again.graph().has_training_mode() && again.states().is_empty());
        for (found, expected) in again.logits(&rows().inputs, 16).unwrap().iter().zip(&expected) {
            assert!((found - expected).abs() <= 1e-5 * (1.0 + expected.abs()), "{found} {expected}");
        }
        // Rows do not mix in the evaluation.
        let first = engine.logits(&rows().inputs[..36], 1).unwrap();
        assert!(first.iter().zip(&found).all(|(one, all)| (one - all).abs() < 1e-6));
    }
}

/// `x`, scaled by a parameter, through `node`, and a product behind it.
fn probe(opset: i64, row: &[i64], node: impl FnOnce(&mut Probe, &str) -> String) -> ModelProto {
    let mut probe = Probe::new(opset, row);
    let factor = probe.param(row);
    let scaled = probe.node("Mul", &["x", &factor], vec![]);
    let found = node(&mut probe, &scaled);
    let flat = probe.node("Flatten", &[&found], vec![]);
    let weights = probe.param(&[row.iter().product(), 2]);
    let output = probe.node("MatMul", &[&flat, &weights], vec![]);
    probe.finish(&output)
}

fn normalized(opset: i64, row: &[i64]) -> ModelProto {
    probe(opset, row, |p, x| {
        let (scale, bias) = (p.param(&[row[0]]), p.param(&[row[0]]));
        let mean = p.param_of(&[row[0]], vec![0.1; row[0] as usize]);
        let variance = p.param_of(&[row[0]], vec![1.5; row[0] as usize]);
        let mut attributes = vec![float("momentum", 0.75)];
        if opset >= 14 {
            attributes.push(int("training_mode", 1));
        }
        p.nodes("BatchNormalization", &[x, &scale, &bias, &mean, &variance], attributes, 3)[0].clone()
    })
}

fn dropped(ratio: f32) -> ModelProto {
    probe(17, &[6], |p, x| {
        let ratio = p.constant(&[], vec![ratio]);
        let trains = p.index(1);
        p.node("Dropout", &[x, &ratio, &trains], vec![])
    })
}

/// Models with a node in training mode.
pub(super) fn models() -> Vec<ModelProto> {
    vec![normalized(17, &[3]), normalized(9, &[2, 3]), normalized(15, &[2, 2, 2]), dropped(0.4)]
}

#[test]
fn derivatives_in_training_match_finite_differences() {
    for (number, model) in models().into_iter().enumerate() {
        let (mut interpreter, graph, weights) = exact(&model);
        interpreter.hold_states(&wide(graph.initial_states(&model).unwrap())).unwrap();
        let rows = 4;
        let inputs = wide(numbers(rows * graph.input_width(), 5));
        let slope = wide(numbers(rows * graph.output_width(), 6));
        let run = |interpreter: &Interpreter<burn_flex::Flex, f64>| {
            let mut objective = 0.0;
            let grad = interpreter
                .differentiate(inputs.clone(), rows, &mut |outputs| {
                    objective = outputs.iter().zip(&slope).map(|(o, s)| o * s).sum();
                    Ok(slope.clone())
                })
                .unwrap();
            (objective, grad)
        };
        let grad = run(&interpreter).1;
        let step = 1e-5;
        for (index, found) in grad.iter().enumerate() {
            let mut at = |offset: f64| {
                let mut moved = weights.clone();
                moved[index] += offset;
                interpreter.hold(&moved).unwrap();
                run(&interpreter).0
            };
            let expected = (at(step) - at(-step)) / (2.0 * step);
            assert!(
                (found - expected).abs() <= 1e-7 * (1.0 + expected.abs()),
                "model {number}: element {index}: {found} differs from {expected}"
            );
        }
        // A frozen normalisation computes as in the evaluation, and its derivative, too.
        if graph.normalizations().is_empty() {
            continue;
        }
        interpreter.hold(&weights).unwrap();
        let mut engine = Engine::load(&model, Loss::Mse, Device::Cpu).unwrap();
        engine.freeze_states(&[true, true]).unwrap();
        let shard = ShardBatch {
            rows,
            inputs: inputs.iter().map(|value| *value as f32).collect(),
            labels: Labels::Value(vec![0.0; rows * graph.output_width()]),
        };
        let found = engine.gradients(&shard).unwrap();
        assert!(found.moments.is_empty());
        let plain = Engine::load(&engine.export().unwrap(), Loss::Mse, Device::Cpu).unwrap();
        let expected = plain.gradients(&shard).unwrap();
        assert!((found.loss_sum - expected.loss_sum).abs() < 1e-5 * expected.loss_sum);
        for (found, expected) in found.grad.iter().zip(&expected.grad) {
            assert!((found - expected).abs() < 1e-4 * (1.0 + expected.abs()), "{found} {expected}");
        }
    }
}

#[test]
fn running_values_move_by_the_whole_batch() {
    let model = normalized(17, &[2, 3]);
    let load = || Engine::load(&model, Loss::Mse, Device::Cpu).unwrap();
    let inputs = numbers(10 * 6, 31);
    let shard = |rows: Range<usize>| ShardBatch {
        rows: rows.len(),
        inputs: inputs[rows.start * 6..rows.end * 6].to_vec(),
        labels: Labels::Value(vec![0.5; rows.len() * 2]),
    };
    let (mut one, mut three) = (load(), load());
    let whole = one.gradients(&shard(0..10)).unwrap().moments;
    one.move_states(&[(10, &whole)]).unwrap();
    let ranges = [0..3, 3..6, 6..10];
    let parts = ranges.clone().map(|rows| three.gradients(&shard(rows)).unwrap().moments);
    assert_ne!(parts[0], parts[1]);
    let parts: Vec<(usize, &[ChannelMoments])> =
        ranges.iter().zip(&parts).map(|(rows, moments)| (rows.len(), &moments[..])).collect();
    three.move_states(&parts).unwrap();
    assert_ne!(one.states(), load().states());
    for (one, three) in one.states().iter().zip(three.states()) {
        assert!((one - three).abs() < 1e-6, "{one} {three}");
    }
    // The bits survive the sum over workers.
    for moments in &whole {
        assert_eq!(ChannelMoments::from_bits(moments.to_bits()), *moments);
    }
    // Impossible values change nothing.
    let before = one.states().to_vec();
    let mut spoiled = whole.clone();
    spoiled[1].variance = f32::INFINITY;
    let error = one.move_states(&[(10, &spoiled)]).unwrap_err().to_string();
    assert!(error.contains("running statistic") && error.contains("became"), "{error}");
    assert!(one.move_states(&[(10, &whole[1..])]).is_err());
    assert!(one.set_states(&[f32::NAN; 4]).is_err());
    assert!(one.set_states(&[0.0; 3]).is_err());
    assert_eq!(one.states(), before);
}

#[test]
fn shards_with_one_value_for_a_channel_are_refused() {
    let labels = |rows: usize| Labels::Value(vec![0.5; rows * 2]);
    let lists = Engine::load(&normalized(17, &[3]), Loss::Mse, Device::Cpu).unwrap();
    let shard = |rows: usize| ShardBatch { rows, inputs: numbers(rows * 3, 1), labels: labels(rows) };
    let error = lists.gradients(&shard(1)).unwrap_err();
    assert!(matches!(error, EngineError::ShardTooSmall { rows: 1, .. }), "{error}");
    assert!(lists.gradients(&shard(2)).is_ok());
    let empty = lists.gradients(&shard(0)).unwrap();
    assert_eq!(empty.moments.len(), 3);
    // Positions are values, too.
    let maps = Engine::load(&normalized(17, &[2, 3]), Loss::Mse, Device::Cpu).unwrap();
    maps.gradients(&ShardBatch { rows: 1, inputs: numbers(6, 1), labels: labels(1) }).unwrap();
    // A frozen normalisation takes no statistics of the shard.
    let mut frozen = Engine::load(&normalized(17, &[3]), Loss::Mse, Device::Cpu).unwrap();
    frozen.freeze_states(&[true, true]).unwrap();
    frozen.gradients(&shard(1)).unwrap();
    let error = frozen.freeze_states(&[true, false]).unwrap_err().to_string();
    assert!(error.contains("match both or neither"), "{error}");
}

/// Which elements of the dropout's output are 0, for rows of ones through weights of ones.
fn zeros(engine: &mut Engine, rows: usize, key: ShardKey) -> Vec<bool> {
    // The gradient of a factor is the sum over rows of its mask times the slope; with one row, the mask itself.
    engine.set_weights(&vec![1.0; engine.layout().elements()]).unwrap();
    let shard = ShardBatch {
        rows,
        inputs: vec![1.0; rows * engine.input_width()],
        labels: Labels::Value(vec![-1.0; rows * 2]),
    };
    engine.gradients_at(&shard, key).unwrap().grad[..engine.input_width()].iter().map(|g| *g == 0.0).collect()
}

#[test]
fn dropout_depends_on_its_key_alone() {
    let model = probe(13, &[400], |p, x| {
        let ratio = p.constant(&[], vec![0.3]);
        let trains = p.index(1);
        let once = p.node("Dropout", &[x, &ratio, &trains], vec![]);
        p.node("Relu", &[&once], vec![])
    });
    let mut engine = Engine::load(&model, Loss::Mse, Device::Cpu).unwrap();
    let key = ShardKey { seed: 7, step: 3, shard: 2 };
    let first = zeros(&mut engine, 1, key);
    assert_eq!(first, zeros(&mut engine, 1, key));
    let share = first.iter().filter(|zero| **zero).count() as f64 / 400.0;
    assert!((share - 0.3).abs() < 0.08, "{share}");
    for other in [ShardKey { seed: 8, ..key }, ShardKey { step: 4, ..key }, ShardKey { shard: 3, ..key }] {
        assert_ne!(first, zeros(&mut engine, 1, other));
    }
    let mut seeded = model.clone();
    let nodes = &mut seeded.graph.as_mut().unwrap().node;
    nodes.iter_mut().find(|node| node.op_type() == "Dropout").unwrap().attribute.push(int("seed", 1));
    let mut seeded = Engine::load(&seeded, Loss::Mse, Device::Cpu).unwrap();
    assert_ne!(first, zeros(&mut seeded, 1, key));
    // The mean of the output stays.
    let masks = super::super::training::mask::<f32>(key, 0, &engine.graph().dropouts()[0], 100_000);
    let mean = masks.iter().map(|factor| f64::from(*factor)).sum::<f64>() / 1e5;
    assert!((mean - 1.0).abs() < 0.01, "{mean}");
    assert!(masks.iter().all(|factor| *factor == 0.0 || (factor - 1.0 / 0.7).abs() < 1e-6));
}

#[test]
fn dropout_is_the_identity_in_evaluation_and_export() {
    let model = dropped(0.5);
    let engine = Engine::load(&model, Loss::Mse, Device::Cpu).unwrap();
    let inputs = numbers(3 * 6, 4);
    let found = engine.logits(&inputs, 3).unwrap();
    let exported = engine.export().unwrap();
    assert!(exported.graph.as_ref().unwrap().node.iter().all(|node| node.op_type() != "Dropout"));
    let expected = run_reference(runtime(), &exported, &[6], 3, &inputs).unwrap();
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found - expected).abs() <= 1e-5 * (1.0 + expected.abs()), "{found} {expected}");
    }
    let again = Engine::load(&exported, Loss::Mse, Device::Cpu).unwrap();
    assert!(again.graph().dropouts().is_empty());
    // The gradient is not that of the identity.
    let shard = ShardBatch { rows: 3, inputs, labels: Labels::Value(vec![0.5; 6]) };
    assert_ne!(engine.gradients(&shard).unwrap().grad, again.gradients(&shard).unwrap().grad);
}
