//! Tests of the engine: derivatives against finite differences, outputs against ONNX Runtime, equal bits for
//! any number of threads.

mod buckets;
mod edges;
#[cfg(feature = "cuda")]
mod gpu;
mod hostile;
mod inputs;
mod learning;
mod losses;
mod measure;
mod precision;
mod resident;
mod training;
mod zoo;

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use burn_flex::{Flex, FlexDevice};
use prost::Message;

use super::run::Interpreter;
use super::*;
use crate::graph::SUPPORTED_OPERATORS;
use crate::init::{CnnSpec, ModelSpec};
use crate::probe::{self, Probe, every_operator, int, numbers, run_reference, runtime};

const ROWS: usize = 3;

impl<B: super::kernels::Kernels, E: burn_backend::Element> Interpreter<B, E> {
    /// The gradient with the key of the first shard.
    fn differentiate(
        &self,
        inputs: Vec<E>,
        rows: usize,
        loss_fn: &mut super::run::LossFn<'_, E>,
    ) -> Result<Vec<E>, EngineError> {
        let (whole, mut flat) = (Buckets::whole(&self.graph), Vec::new());
        let mut keep = |values: Vec<E>| {
            flat = values;
            Ok::<_, EngineError>(())
        };
        self.train(inputs, rows, ShardKey::default(), &whole, &mut keep, loss_fn)?;
        Ok(flat)
    }
}

/// An interpreter in f64, for precise finite differences.
fn exact(model: &ModelProto) -> (Interpreter<Flex, f64>, Graph, Vec<f64>) {
    let graph = Graph::read(model).unwrap();
    let weights: Vec<f64> = graph.initial_weights(model).unwrap().into_iter().map(f64::from).collect();
    let mut interpreter = Interpreter::new(Arc::new(graph.clone()), FlexDevice, Device::Cpu);
    interpreter.hold(&weights).unwrap();
    (interpreter, graph, weights)
}

fn wide(values: Vec<f32>) -> Vec<f64> {
    values.into_iter().map(f64::from).collect()
}

/// Runs a check for each model and reports all that fail.
fn check_each(models: Vec<(String, ModelProto, Vec<usize>)>, check: impl Fn(&str, &ModelProto, &[usize])) {
    let mut failed = Vec::new();
    for (name, model, row) in models {
        if catch_unwind(AssertUnwindSafe(|| check(&name, &model, &row))).is_err() {
            failed.push(name);
        }
    }
    assert!(failed.is_empty(), "{} models failed: {failed:?}", failed.len());
}

#[test]
fn every_derivative_matches_finite_differences() {
    let mut seen = BTreeSet::new();
    for (_, model, _) in every_operator() {
        for node in &model.graph.as_ref().unwrap().node {
            seen.insert(node.op_type().to_owned());
        }
    }
    check_each(every_operator(), |name, model, _| {
        let (mut interpreter, graph, weights) = exact(model);
        let inputs = wide(probe::inputs(&graph, ROWS, 5));
        let slope = wide(numbers(ROWS * graph.output_width(), 6));
        let objective = |interpreter: &Interpreter<Flex, f64>| -> f64 {
            let outputs = interpreter.evaluate(inputs.clone(), ROWS).unwrap();
            outputs.iter().zip(&slope).map(|(o, s)| o * s).sum()
        };
        let grad = interpreter.differentiate(inputs.clone(), ROWS, &mut |_| Ok(slope.clone())).unwrap();
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
    });
    let listed: BTreeSet<String> = SUPPORTED_OPERATORS.iter().map(|op| (*op).to_owned()).collect();
    assert_eq!(seen, listed, "every supported operator has a probe, and no other");
}

#[test]
fn gradients_of_row_subsets_add_up() {
    check_each(every_operator(), |name, model, _| {
        let (interpreter, graph, _) = exact(model);
        let (inner, outer) = (graph.input_width(), graph.output_width());
        let inputs = wide(probe::inputs(&graph, ROWS, 15));
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
    });
}

#[test]
fn every_operator_equals_onnx_runtime() {
    let environment = runtime();
    let mut models = every_operator();
    for spec in specs() {
        let model = spec.build().unwrap();
        models.push((format!("{spec:?}"), model, vec![144]));
    }
    check_each(models, |name, model, row| {
        let engine = Engine::load(model, Loss::Mse, Device::Cpu).unwrap();
        let inputs = probe::inputs(engine.graph(), ROWS, 25);
        let found = engine.logits(&inputs, ROWS).unwrap();
        let exported = engine.export().unwrap();
        let expected = run_reference(environment, &exported, row, ROWS, &inputs)
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(found.len(), expected.len(), "{name}");
        for (f, e) in found.iter().zip(&expected) {
            assert!((f - e).abs() <= 1e-5 * (1.0 + e.abs()), "{name}: {f} differs from {e}");
        }
    });
}

pub(super) fn specs() -> [ModelSpec; 2] {
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
    let mlp = crate::init::MlpSpec { inputs: 144, hidden: vec![32, 16], classes: 10, scale: 0.0625, seed: 3 };
    [ModelSpec::Mlp(mlp), ModelSpec::Cnn(cnn)]
}

/// Points around one centre per class.
pub(super) fn clusters(rows: usize, width: usize, classes: usize, seed: u64) -> ShardBatch {
    let centres = numbers(classes * width, 100);
    let noise = numbers(rows * width, seed);
    let labels: Vec<i64> = (0..rows).map(|row| (row % classes) as i64).collect();
    let inputs = (0..rows * width)
        .map(|index| {
            let (row, column) = (index / width, index % width);
            centres[labels[row] as usize * width + column] + 0.5 * noise[index]
        })
        .collect();
    ShardBatch { rows, inputs, labels: Labels::Class(labels) }
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
        assert_eq!(engine.export().unwrap().encode_to_vec(), model.encode_to_vec());
        let weights = numbers(engine.layout().elements(), 1);
        engine.set_weights(&weights).unwrap();
        let bytes = engine.export().unwrap().encode_to_vec();
        assert_eq!(bytes, engine.export().unwrap().encode_to_vec());
        let again = ModelProto::decode(&bytes[..]).unwrap();
        let again = Engine::load(&again, Loss::CrossEntropy, Device::Cpu).unwrap();
        assert_eq!(again.weights().unwrap(), weights);
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
    assert_eq!(next, engine.weights().unwrap().len());
    assert_eq!(layout.name_of(0), Some("dense1.weight"));
    assert_eq!(layout.name_of(next - 1), Some("head.bias"));
    assert_eq!(layout.name_of(next), None);
}

#[test]
fn batches_and_weights_that_do_not_fit_are_refused() {
    let mut engine =
        Engine::load(&crate::init::mlp(4, &[], 3, 0).unwrap(), Loss::CrossEntropy, Device::Cpu).unwrap();
    let batch =
        |rows: usize, inputs: usize, labels: Labels| ShardBatch { rows, inputs: vec![0.5; inputs], labels };
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
fn weights_do_not_count_for_each_row_of_a_batch() {
    let side = 1 << 10;
    let engine =
        Engine::load(&crate::init::mlp(side, &[side], 2, 0).unwrap(), Loss::CrossEntropy, Device::Cpu)
            .unwrap();
    let fits = |rows: usize| engine.graph().elements_max(rows).unwrap();
    assert_eq!((fits(1), fits(side), fits(2 * side)), (side * side, side * side, 2 * side * side));
    assert_eq!(engine.graph().elements_max(usize::MAX), None);
}

#[test]
fn outputs_that_do_not_fit_the_loss_are_refused() {
    let mut probe = Probe::new(17, &[4]);
    let w = probe.param(&[4, 3]);
    let product = probe.node("MatMul", &["x", &w], vec![]);
    let output = probe.node("Softmax", &[&product], vec![]);
    let error = Engine::load(&probe.finish(&output), Loss::CrossEntropy, Device::Cpu).unwrap_err();
    assert!(error.to_string().contains("made by Softmax"), "{error}");
    // Also behind nodes that only move elements.
    type Behind = fn(&mut Probe, &str) -> String;
    let behind: [Behind; 5] = [
        |p, softmax| p.node("Identity", &[softmax], vec![]),
        |p, softmax| p.node("Flatten", &[softmax], vec![]),
        |p, softmax| {
            let shape = p.shape(&[-1, 3]);
            let same = p.node("Identity", &[softmax], vec![]);
            p.node("Reshape", &[&same, &shape], vec![])
        },
        |p, softmax| {
            let axis = p.shape(&[1]);
            let wide = p.node("Unsqueeze", &[softmax, &axis], vec![]);
            p.node("Squeeze", &[&wide, &axis], vec![])
        },
        |p, softmax| p.node("Concat", &[softmax], vec![int("axis", 1)]),
    ];
    for make in behind {
        let mut probe = Probe::new(17, &[4]);
        let w = probe.param(&[4, 3]);
        let product = probe.node("MatMul", &["x", &w], vec![]);
        let softmax = probe.node("Softmax", &[&product], vec![]);
        let output = make(&mut probe, &softmax);
        let error = Engine::load(&probe.finish(&output), Loss::CrossEntropy, Device::Cpu).unwrap_err();
        assert!(error.to_string().contains("made by Softmax"), "{error}");
    }
    // A Softmax between layers is allowed.
    let mut probe = Probe::new(17, &[4]);
    let (w, v) = (probe.param(&[4, 3]), probe.param(&[3, 3]));
    let product = probe.node("MatMul", &["x", &w], vec![]);
    let softmax = probe.node("Softmax", &[&product], vec![]);
    let output = probe.node("MatMul", &[&softmax, &v], vec![]);
    assert!(Engine::load(&probe.finish(&output), Loss::CrossEntropy, Device::Cpu).is_ok());
    let single = crate::init::mlp(4, &[], 1, 0).unwrap();
    assert!(Engine::load(&single, Loss::CrossEntropy, Device::Cpu).is_err());
    assert!(Engine::load(&single, Loss::Mse, Device::Cpu).is_ok());
}

#[test]
fn device_names_are_parsed_and_missing_devices_explained() {
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
