//! Tests of quantized graphs: outputs against the original graph, and the parts that must not change.

use std::collections::BTreeSet;

use millrace_bundle::onnx::{
    AttributeProto, StringStringEntryProto, TrainingInfoProto, attribute_proto::AttributeType,
};
use proptest::prelude::*;
use prost::Message;

use super::*;
use crate::probe::{Probe, float, info, int, numbers, run_reference, runtime};

/// Layers of these widths with ReLU between them, as `Gemm` with a bias or as `MatMul` without.
struct Net {
    widths: Vec<usize>,
    gemm: bool,
    transposed: bool,
    seed: u64,
}

impl Net {
    fn weights(&self, layer: usize) -> Vec<f32> {
        numbers(self.widths[layer] * self.widths[layer + 1], self.seed + layer as u64)
    }

    fn model(&self) -> ModelProto {
        let mut probe = Probe::new(17, &[self.widths[0] as i64]);
        let mut last = "x".to_owned();
        for layer in 0..self.widths.len() - 1 {
            let (rows, columns) = (self.widths[layer], self.widths[layer + 1]);
            let mut data = self.weights(layer);
            let mut dims = [rows as i64, columns as i64];
            if self.transposed {
                data = (0..rows * columns).map(|i| data[i % rows * columns + i / rows]).collect();
                dims.reverse();
            }
            let weights = probe.param_of(&dims, data);
            if layer > 0 {
                last = probe.node("Relu", &[&last], vec![]);
            }
            last = if self.gemm {
                let bias = probe.param_of(&[columns as i64], numbers(columns, self.seed + 100));
                let trans_b = int("transB", i64::from(self.transposed));
                probe.node("Gemm", &[&last, &weights, &bias], vec![trans_b])
            } else {
                probe.node("MatMul", &[&last, &weights], vec![])
            };
        }
        probe.finish(&last)
    }

    /// The largest possible deviation of an output. Each input deviates by its previous error and a step of
    /// its range, each weight by half a step. The order of 32-bit sums adds a little.
    fn bound(&self, inputs: &[f32]) -> f64 {
        let mut values: Vec<f64> = inputs.iter().map(|value| f64::from(*value)).collect();
        let mut off = 0.0f64;
        for layer in 0..self.widths.len() - 1 {
            let (rows, columns) = (self.widths[layer], self.widths[layer + 1]);
            let weights = self.weights(layer);
            let bias = numbers(columns, self.seed + 100);
            if layer > 0 {
                values.iter_mut().for_each(|value| *value = value.max(0.0));
            }
            let (low, high) = values.iter().fold((0.0f64, 0.0f64), |(l, h), v| (l.min(*v), h.max(*v)));
            let step = (high - low + 2.0 * off) / 255.0;
            let largest = high.max(-low) + off;
            let mut next = Vec::new();
            let mut worst = 0.0f64;
            for row in values.chunks_exact(rows) {
                for column in 0..columns {
                    let of = |k: usize| f64::from(weights[k * columns + column]);
                    let half = (0..rows).map(|k| of(k).abs()).fold(0.0, f64::max) / 64.0 / 2.0;
                    let apart: f64 =
                        (0..rows).map(|k| of(k).abs() * (off + step) + (largest + step) * half).sum();
                    let sum: f64 = (0..rows).map(|k| row[k] * of(k)).sum();
                    let sum = if self.gemm { sum + f64::from(bias[column]) } else { sum };
                    worst = worst.max(apart + 1e-4 * (1.0 + sum.abs()));
                    next.push(sum);
                }
            }
            (values, off) = (next, worst);
        }
        off
    }

    /// Outputs before and after quantization for `rows` random rows, with the inputs.
    fn answers(&self, rows: usize) -> [Vec<f32>; 3] {
        let environment = runtime();
        let inputs = numbers(rows * self.widths[0], self.seed + 7);
        let model = self.model();
        let quantized = quantize(model.clone()).unwrap();
        assert_eq!(quantized.layers.len(), self.widths.len() - 1);
        let answers =
            |model: &ModelProto| run_reference(environment, model, &self.widths[..1], rows, &inputs).unwrap();
        [answers(&model), answers(&quantized.model), inputs.clone()]
    }
}

fn range(values: &[f32]) -> f32 {
    values.iter().copied().fold(f32::MIN, f32::max) - values.iter().copied().fold(f32::MAX, f32::min)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn quantized_answers_stay_within_the_quantization_step(
        widths in prop::collection::vec(1usize..40, 2..4),
        gemm in any::<bool>(),
        transposed in any::<bool>(),
        seed in 0u64..1000,
        rows in 1usize..6,
    ) {
        let net = Net { widths, gemm, transposed: gemm && transposed, seed };
        let [before, after, inputs] = net.answers(rows);
        prop_assert_eq!(before.len(), after.len());
        let bound = net.bound(&inputs);
        for (before, after) in before.iter().zip(&after) {
            prop_assert!(f64::from((before - after).abs()) <= bound, "{} {} {}", before, after, bound);
        }
    }

    #[test]
    fn random_bytes_do_not_panic(cut in 0usize..2000, place in 0usize..2000, byte in any::<u8>()) {
        let net = Net { widths: vec![8, 5, 3], gemm: true, transposed: false, seed: 1 };
        let mut bytes = net.model().encode_to_vec();
        let place = place % bytes.len();
        bytes[place] = byte;
        bytes.truncate(bytes.len() - cut % 64);
        if let Ok(model) = ModelProto::decode(&bytes[..]) {
            let _ = quantize(model);
        }
    }
}

#[test]
fn a_network_keeps_its_answers_and_loses_most_of_its_bytes() {
    let net = Net { widths: vec![64, 256, 10], gemm: true, transposed: true, seed: 3 };
    let (before, after) = (net.model().encoded_len(), quantize(net.model()).unwrap().model.encoded_len());
    assert!(after * 3 < before, "{after} of {before} bytes");
    let [before, after, _] = net.answers(50);
    let mean = before.iter().zip(&after).map(|(a, b)| (a - b).abs()).sum::<f32>() / before.len() as f32;
    assert!(mean > 0.0 && mean < 0.02 * range(&before), "{mean} of {}", range(&before));
}

/// The model `y = x · w` after a change by `change`.
fn product(change: impl FnOnce(&mut ModelProto)) -> ModelProto {
    let mut probe = Probe::new(17, &[4]);
    let weights = probe.param(&[4, 3]);
    let out = probe.node("MatMul", &["x", &weights], vec![]);
    let mut model = probe.finish(&out);
    change(&mut model);
    model
}

fn graph(model: &mut ModelProto) -> &mut GraphProto {
    model.graph.as_mut().unwrap()
}

fn operators(model: &ModelProto) -> Vec<&str> {
    model.graph.as_ref().unwrap().node.iter().map(|node| node.op_type()).collect()
}

/// Checks that every value is produced once, before it is read.
fn check_order(model: &ModelProto) {
    let graph = model.graph.as_ref().unwrap();
    let mut made: BTreeSet<&str> =
        graph.input.iter().map(|v| v.name()).chain(graph.initializer.iter().map(|t| t.name())).collect();
    let mut named = BTreeSet::new();
    for node in &graph.node {
        assert!(node.input.iter().all(|name| name.is_empty() || made.contains(name.as_str())), "{node:?}");
        assert!(node.output.iter().all(|name| made.insert(name)), "{node:?}");
        assert!(node.name().is_empty() || named.insert(node.name().to_owned()), "{node:?}");
    }
    assert!(graph.output.iter().all(|value| made.contains(value.name())));
}

const OF_MATMUL: [&str; 5] = ["DynamicQuantizeLinear", "MatMulInteger", "Cast", "Mul", "Mul"];

#[test]
fn a_product_that_is_the_output_becomes_five_nodes() {
    let model = product(|model| {
        let node = &mut graph(model).node[0];
        (node.name, node.doc_string) = (Some("last".into()), Some("says".into()));
        model.doc_string = Some("kept".into());
    });
    let Quantized { model: made, layers, kept } = quantize(model.clone()).unwrap();
    assert_eq!(layers, [Layer { node: "last".into(), operator: "MatMul".into(), inputs: 4, outputs: 3 }]);
    assert!(kept.is_empty());
    assert_eq!(operators(&made), OF_MATMUL);
    check_order(&made);
    let (old, new) = (model.graph.as_ref().unwrap(), made.graph.as_ref().unwrap());
    assert_eq!((&old.input, &old.output), (&new.input, &new.output));
    let last = new.node.last().unwrap();
    assert_eq!((last.name(), last.doc_string(), last.output[0].as_str()), ("last", "says", "t0"));
    assert_eq!((made.doc_string(), &made.opset_import), ("kept", &model.opset_import));
    assert_eq!(new.initializer.iter().map(|t| t.raw_data().len()).collect::<Vec<_>>(), [12, 12]);
}

#[test]
fn products_of_one_input_share_its_integers() {
    let mut probe = Probe::new(13, &[4]);
    let weights: Vec<String> = (0..3).map(|_| probe.param(&[4, 4])).collect();
    let made: Vec<String> = weights.iter().map(|w| probe.node("MatMul", &["x", w], vec![])).collect();
    let sum = probe.node("Sum", &[&made[0], &made[1], &made[2]], vec![]);
    let quantized = quantize(probe.finish(&sum)).unwrap();
    assert_eq!(quantized.layers.len(), 3);
    check_order(&quantized.model);
    let shared = operators(&quantized.model).iter().filter(|op| **op == "DynamicQuantizeLinear").count();
    assert_eq!(shared, 1);
}

#[test]
fn unsupported_nodes_stay_unchanged_and_are_reported() {
    let mut probe = Probe::new(17, &[4]);
    let shared = probe.param(&[4, 4]);
    let a = probe.node("MatMul", &["x", &shared], vec![]);
    let b = probe.node("MatMul", &[&a, &shared], vec![]);
    let inline = probe.constant(&[4, 4], numbers(16, 1));
    let c = probe.node("MatMul", &[&b, &inline], vec![]);
    let weights = probe.param(&[4, 4]);
    let d = probe.node("Gemm", &[&c, &weights], vec![float("alpha", 0.5)]);
    let weights = probe.param(&[4, 4]);
    let e = probe.node("Gemm", &[&d, &weights], vec![int("transA", 1)]);
    let weights = probe.param(&[2, 4, 4]);
    let f = probe.node("MatMul", &[&e, &weights], vec![]);
    let weights = probe.param(&[4, 4]);
    let g = probe.node("MatMul", &[&weights, &f], vec![]);
    let given = probe.param(&[4, 4]);
    let h = probe.node("MatMul", &[&g, &given], vec![]);
    let kernel = probe.param(&[1, 1, 1, 1]);
    let i = probe.node("Conv", &[&h, &kernel], vec![]);
    let last = probe.param(&[4, 4]);
    let out = probe.node("Gemm", &[&i, &last, ""], vec![float("alpha", 1.0), float("beta", 1.0)]);
    let mut model = probe.finish(&out);
    graph(&mut model).output.push(info(&given, None));
    let quantized = quantize(model.clone()).unwrap();
    assert_eq!(quantized.layers.len(), 1);
    let said: Vec<&str> = quantized.kept.iter().map(|kept| kept.reason.as_str()).collect();
    let expected = [
        "its weights are read in 2 places",
        "its weights are read in 2 places",
        "its second input is not an initializer of the graph",
        "its alpha is not the default",
        "its transA is not the default",
        "its weights have 3 dimensions",
        "its second input is not an initializer of the graph",
        "its weights are read in 2 places",
        "only matrix products are quantized",
    ];
    assert_eq!(said, expected);
    check_order(&quantized.model);
    // Unchanged nodes are all there, in their order.
    let before = &model.graph.as_ref().unwrap().node;
    let after = &quantized.model.graph.as_ref().unwrap().node;
    assert_eq!(before[..before.len() - 1], after[..before.len() - 1]);
    assert_eq!(operators(&quantized.model)[before.len() - 1..], OF_MATMUL);
}

#[test]
fn existing_names_are_not_reused() {
    let mut probe = Probe::new(17, &[4]);
    let weights = probe.param(&[4, 4]);
    let out = probe.node("MatMul", &["x", &weights], vec![]);
    let mut model = probe.finish(&out);
    let taken = ["w0_int8", "w0_scales", "x_uint8", "x_scale", "x_zero", "t0_sums", "t0_factors", "t0_Mul"];
    let values = taken.iter().map(|name| info(name, None));
    graph(&mut model).value_info.extend(values);
    graph(&mut model).value_info.push(info("w0", None));
    let made = quantize(model).unwrap().model;
    check_order(&made);
    let graph = made.graph.as_ref().unwrap();
    let new: Vec<&str> = graph
        .node
        .iter()
        .flat_map(|node| node.output.iter().map(String::as_str).chain([node.name()]))
        .collect();
    assert!(new.iter().all(|name| !taken.contains(name)), "{new:?}");
    assert!(graph.value_info.iter().all(|value| value.name() != "w0"));
    assert_eq!(graph.value_info.len(), taken.len());
}

#[test]
fn subgraphs_and_their_inputs_stay_unchanged() {
    let model = product(|model| {
        let inner = GraphProto {
            node: vec![NodeProto {
                op_type: Some("MatMul".into()),
                input: vec!["x".into(), "w0".into()],
                output: vec!["inner".into()],
                ..Default::default()
            }],
            ..Default::default()
        };
        graph(model).node.push(NodeProto {
            op_type: Some("If".into()),
            input: vec!["t0".into()],
            output: vec!["t1".into()],
            attribute: vec![AttributeProto {
                name: Some("then_branch".into()),
                r#type: Some(AttributeType::Graph as i32),
                g: Some(inner),
                ..Default::default()
            }],
            ..Default::default()
        });
    });
    let error = quantize(model).unwrap_err().to_string();
    assert!(error.contains("no node to quantize") && error.contains("read in 2 places"), "{error}");
    assert!(error.contains("control-flow"), "{error}");
}

#[test]
fn weights_listed_as_inputs_by_old_exporters_are_removed_from_inputs() {
    let model = product(|model| graph(model).input.push(info("w0", Some(&[3]))));
    let made = quantize(model).unwrap().model;
    let inputs: Vec<&str> = made.graph.as_ref().unwrap().input.iter().map(|value| value.name()).collect();
    assert_eq!(inputs, ["x"]);
}

#[test]
fn unquantizable_models_are_refused_with_the_remedy() {
    let refused = |change: &dyn Fn(&mut ModelProto), says: &str| {
        let error = quantize(product(|model| change(model))).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    };
    refused(&|model| model.graph = None, "no graph");
    refused(&|model| model.opset_import.clear(), "operator set none, 11 to 25");
    refused(&|model| model.opset_import[0].version = Some(10), "operator set 10");
    refused(&|model| model.opset_import[0].version = Some(26), "operator set 26");
    refused(&|model| model.opset_import[0].version = Some(i64::MIN), "operator set -");
    refused(&|model| model.opset_import[0].domain = Some("com.microsoft".into()), "operator set none");
    refused(&|model| model.ir_version = Some(3), "IR version 3");
    refused(&|model| model.training_info.push(TrainingInfoProto::default()), "for inference");
    let entry = StringStringEntryProto { key: Some("location".into()), value: Some("w".into()) };
    refused(&|model| graph(model).initializer[0].external_data = vec![entry.clone()], "in another file");
    refused(&|model| graph(model).node[0].op_type = Some("MatMulNBits".into()), "quantized already");
    refused(&|model| graph(model).node[0].op_type = Some("Add".into()), "no MatMul and no Gemm");
    refused(&|model| graph(model).node[0].domain = Some("other".into()), "no MatMul and no Gemm");
    refused(&|model| graph(model).node[0].input.clear(), "it has 0 inputs");
    refused(&|model| graph(model).node[0].input.push("x".into()), "it has 3 inputs");
    refused(&|model| graph(model).node[0].output.clear(), "it has 0 outputs");
    refused(&|model| graph(model).node[0].attribute.push(int("twist", 1)), "attribute \"twist\"");
    refused(&|model| graph(model).initializer[0].float_data.truncate(5), "hold 5 elements");
    let once = quantize(product(|_| {})).unwrap().model;
    let twice = quantize(once).unwrap_err();
    assert!(matches!(twice, QuantizeError::Already { .. }), "{twice}");
}
