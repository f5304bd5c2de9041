//! Tests of models with several inputs and outputs.

use millrace_bundle::onnx::type_proto;

use super::super::*;
use crate::probe::{Probe, info, int, numbers, run_all, runtime};
use crate::scaling;

const ROWS: usize = 5;

fn typed(probe: &mut Probe, name: &str, row: &[i64], element: i32) {
    let mut declared = info(name, Some(row));
    if let Some(type_proto::Value::TensorType(tensor)) =
        declared.r#type.as_mut().and_then(|kind| kind.value.as_mut())
    {
        tensor.elem_type = Some(element);
    }
    probe.graph.input.push(declared);
}

/// Token ids, their mask and numbers, to the class logits; also an embedding, the joined values and probabilities.
pub(super) fn model(outputs: &[&str]) -> ModelProto {
    let mut probe = Probe::new(17, &[1]);
    probe.graph.input.clear();
    typed(&mut probe, "ids", &[3], 7);
    typed(&mut probe, "mask", &[3], 9);
    typed(&mut probe, "x", &[2], 1);
    let (table, w) = (probe.param(&[5, 4]), probe.param(&[6, 3]));
    let embedding = probe.node("Gather", &[&table, "ids"], vec![]);
    let mask = probe.node("Cast", &["mask"], vec![int("to", 1)]);
    let column = probe.shape(&[0, 3, 1]);
    let mask = probe.node("Reshape", &[&mask, &column], vec![]);
    let masked = probe.node("Mul", &[&embedding, &mask], vec![]);
    let axis = probe.shape(&[1]);
    let pooled = probe.node("ReduceSum", &[&masked, &axis], vec![int("keepdims", 0)]);
    let joined = probe.node("Concat", &[&pooled, "x"], vec![int("axis", 1)]);
    let logits = probe.node("MatMul", &[&joined, &w], vec![]);
    let probabilities = probe.node("Softmax", &[&logits], vec![int("axis", 1)]);
    let named =
        [(embedding, "embedding"), (joined, "joined"), (logits, "logits"), (probabilities, "probabilities")];
    let mut model = probe.finish("logits");
    let graph = model.graph.as_mut().unwrap();
    for node in &mut graph.node {
        for name in node.input.iter_mut().chain(&mut node.output) {
            if let Some((_, renamed)) = named.iter().find(|(value, _)| value == name) {
                *name = (*renamed).to_owned();
            }
        }
    }
    graph.output = outputs.iter().map(|name| info(name, None)).collect();
    model
}

fn batch() -> ShardBatch {
    let numbers = numbers(ROWS * 2, 3);
    let row = |row: usize| {
        let ids = (0..3).map(move |at| ((7 * row + 3 * at) % 5) as f32);
        let mask = (0..3).map(move |at| f32::from(u8::from(at <= row % 3)));
        ids.chain(mask).chain(numbers[2 * row..2 * row + 2].to_vec())
    };
    let labels = (0..ROWS).map(|row| (row % 3) as i64).collect();
    ShardBatch { rows: ROWS, inputs: (0..ROWS).flat_map(row).collect(), labels: Labels::Class(labels) }
}

#[test]
fn published_models_keep_all_outputs_and_equal_onnx_runtime() {
    let all = ["embedding", "logits", "probabilities"];
    let mut engine = Engine::load(&model(&all), Loss::CrossEntropy, Device::Cpu).unwrap();
    assert_eq!((engine.graph().output_name(), engine.input_width()), ("logits", 8));
    let (before, batch) = (engine.evaluate(&batch()).unwrap().0, batch());
    for _ in 0..20 {
        let found = engine.gradients(&batch).unwrap();
        engine
            .update(|weights| {
                weights.iter_mut().zip(&found.grad).for_each(|(weight, grad)| *weight -= 0.05 * grad);
                Ok::<_, EngineError>(())
            })
            .unwrap();
    }
    assert!(engine.evaluate(&batch).unwrap().0 < 0.8 * before);
    let outputs = run_all(runtime(), &engine.export().unwrap(), engine.graph(), ROWS, &batch.inputs);
    assert_eq!(outputs.keys().collect::<Vec<_>>(), all);
    let logits = engine.logits(&batch.inputs, ROWS).unwrap();
    for (found, expected) in logits.iter().zip(&outputs["logits"]) {
        assert!((found - expected).abs() < 1e-5, "{found} is not {expected}");
    }
    // Rows that the mask hides do not count, and their tokens get no gradient.
    let hidden = ShardBatch {
        rows: 1,
        inputs: vec![1.0, 2.0, 2.0, 1.0, 0.0, 0.0, 0.5, 0.5],
        labels: Labels::Class(vec![1]),
    };
    let grad = engine.gradients(&hidden).unwrap().grad;
    let is_used = |token: usize| grad[4 * token..4 * token + 4].iter().any(|value| *value != 0.0);
    assert_eq!([0, 1, 2].map(is_used), [false, true, false]);
}

/// A model whose embedding the exporter quotes with the arguments after its positions.
fn quoted_embedding(arguments: &str) -> ModelProto {
    let mut model = model(&["logits"]);
    let call = format!(
        "%e : [num_users=1] = call_function[target=torch.ops.aten.embedding.default](args = (%p_table, %ids{arguments}), \
         kwargs = {{}})"
    );
    model.graph.as_mut().unwrap().node[0].metadata_props.push(
        millrace_bundle::onnx::StringStringEntryProto {
            key: Some("pkg.torch.onnx.fx_node".to_owned()),
            value: Some(call),
        },
    );
    model
}

/// The row that `padding_idx` names gets no gradient.
#[test]
fn a_quoted_padding_row_of_an_embedding_stays() {
    let gradient = |arguments: &str| {
        let engine = Engine::load(&quoted_embedding(arguments), Loss::CrossEntropy, Device::Cpu).unwrap();
        engine.gradients(&batch()).unwrap().grad
    };
    let before = gradient("");
    assert!(before[8..12].iter().all(|value| *value != 0.0), "{before:?}");
    for arguments in [", 2", ", 2, False, False"] {
        let after = gradient(arguments);
        assert_eq!(after[8..12], [0.0; 4]);
        assert_eq!((&after[..8], &after[12..]), (&before[..8], &before[12..]));
    }
}

#[test]
fn an_embedding_that_scales_gradients_by_frequency_is_refused() {
    let error = Engine::load(&quoted_embedding(", -1, True"), Loss::CrossEntropy, Device::Cpu).unwrap_err();
    assert!(error.to_string().contains("scale_grad_by_freq"), "{error}");
}

#[test]
fn the_loss_reads_the_output_that_suits_it_or_is_named() {
    let load = |outputs: &[&str], wanted: Option<&str>, loss: Loss| {
        let loaded = Engine::load_output(&model(outputs), wanted, loss, Device::Cpu);
        loaded.map(|engine| engine.graph().output_name().to_owned()).map_err(|error| error.to_string())
    };
    let all = ["probabilities", "joined", "logits", "embedding"];
    assert_eq!(load(&["probabilities", "logits"], None, Loss::CrossEntropy).unwrap(), "logits");
    assert_eq!(load(&all, Some("joined"), Loss::CrossEntropy).unwrap(), "joined");
    assert_eq!(load(&all, Some("embedding"), Loss::Mse).unwrap(), "embedding");
    for (outputs, wanted, loss, words) in [
        (
            &all[..],
            None,
            Loss::CrossEntropy,
            ["\"joined\" [rows, 6] and \"logits\" [rows, 3]", "loss_output = \"joined\""],
        ),
        (
            &["probabilities", "embedding"],
            None,
            Loss::CrossEntropy,
            ["made by Softmax", "\"embedding\" has 3 dim"],
        ),
        (&all, Some("logit"), Loss::Mse, ["no output \"logit\"", "\"logits\", \"embedding\""]),
        (&all, Some("probabilities"), Loss::CrossEntropy, ["made by Softmax", "the logits before it"]),
    ] {
        let error = load(outputs, wanted, loss).unwrap_err();
        assert!(words.iter().all(|word| error.contains(word)), "{error} lacks one of {words:?}");
    }
    // A fault that all outputs share is told once.
    let mut spoiled = model(&["logits", "probabilities"]);
    spoiled.graph.as_mut().unwrap().node[0].op_type = Some("Scatter".into());
    let error = Engine::load(&spoiled, Loss::CrossEntropy, Device::Cpu).unwrap_err().to_string();
    assert!(error.contains("uses operator Scatter") && !error.contains("several"), "{error}");
    // Where no job can tell, all outputs are listed.
    let error = Graph::read(&model(&all)).unwrap_err().to_string();
    assert!(
        error.contains("4 outputs") && error.contains("loss_output") && error.contains("--cut"),
        "{error}"
    );
}

#[test]
fn values_of_each_input_are_checked_by_its_name() {
    let engine = Engine::load(&model(&["logits"]), Loss::CrossEntropy, Device::Cpu).unwrap();
    for (place, value, words) in [
        (8, 5.0, ["row 1 holds 5 in input \"ids\"", "from 0 to 4"]),
        (11, 2.0, ["row 1 holds 2 in input \"mask\"", "from 0 to 1"]),
        (3, 0.5, ["row 0 holds 0.5 in input \"mask\"", "whole numbers"]),
        (0, -1.0, ["row 0 holds -1 in input \"ids\"", "from 0 to 4"]),
    ] {
        let mut inputs = batch().inputs;
        inputs[place] = value;
        let error = engine.logits(&inputs, ROWS).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error} lacks one of {words:?}");
    }
    let error = engine.logits(&[0.0; 7], 1).unwrap_err().to_string();
    assert!(error.contains("1 rows of 8 values"), "{error}");
}

#[test]
fn inputs_that_rows_cannot_have_are_refused() {
    let refused = |spoil: fn(&mut Probe), words: &str| {
        let mut probe = Probe::new(17, &[2]);
        spoil(&mut probe);
        let w = probe.param(&[2, 3]);
        let output = probe.node("MatMul", &["x", &w], vec![]);
        let error = Graph::read(&probe.finish(&output)).unwrap_err().to_string();
        assert!(error.contains(words), "{error} lacks {words}");
    };
    refused(|probe| probe.graph.input.clear(), "it has no input");
    refused(|probe| typed(probe, "x", &[2], 1), "input \"x\" is defined twice");
    refused(
        |probe| typed(probe, "text", &[2], 8),
        "input \"text\" holds STRING, FLOAT, INT64, INT32 or BOOL",
    );
    refused(
        |probe| (0..256).for_each(|at| typed(probe, &format!("i{at}"), &[1], 1)),
        "257 inputs, the limit is 256",
    );
    refused(|probe| typed(probe, "large", &[1 << 30], 1), "more than 1073741824 elements per row");
}

#[test]
fn teachers_take_inputs_by_name() {
    let kl = Objective::Kl(Distillation { teacher: "t".into(), ..Distillation::default() });
    let load = |model: &ModelProto| Engine::load(model, kl.clone(), Device::Cpu).unwrap();
    let student = model(&["logits"]);
    let mut same = load(&student);
    same.set_teacher(&student).unwrap();
    let expected = same.gradients(&batch()).unwrap();
    // The same teacher with its inputs in another order, and with more outputs.
    let mut teacher = model(&["joined", "logits"]);
    teacher.graph.as_mut().unwrap().input.rotate_left(1);
    let mut other = load(&student);
    other.set_teacher(&teacher).unwrap();
    assert_eq!(other.gradients(&batch()).unwrap(), expected);
    // Graphs without one of the inputs can teach, graphs with another one cannot.
    teacher.graph.as_mut().unwrap().input[2].name = Some("tokens".into());
    for node in &mut teacher.graph.as_mut().unwrap().node {
        node.input.iter_mut().filter(|name| *name == "ids").for_each(|name| *name = "tokens".into());
    }
    let error = other.set_teacher(&teacher).unwrap_err().to_string();
    assert!(error.contains("takes input \"tokens\", the trained model takes ids, mask, x"), "{error}");
    assert_eq!(same.gradients(&batch()).unwrap(), expected);
}

#[test]
fn other_outputs_are_neither_in_training_mode_nor_of_standardized_numbers() {
    let mut training = model(&["logits", "extra"]);
    let graph = training.graph.as_mut().unwrap();
    let mut probe = Probe::new(17, &[1]);
    probe.node("Dropout", &["joined", "", "on"], vec![]);
    probe.graph.node[0].output = vec!["extra".into()];
    graph.node.push(probe.graph.node.remove(0));
    let error =
        Engine::load_output(&training, Some("logits"), Loss::Mse, Device::Cpu).unwrap_err().to_string();
    assert!(error.contains("(Dropout): it is in training mode") && error.contains("--cut logits"), "{error}");
    let error = scaling::check(&model(&["logits", "probabilities"]), "logits").unwrap_err().to_string();
    assert!(error.contains("standardize_labels = true") && error.contains("\"logits\""), "{error}");
    assert!(scaling::check(&model(&["joined", "probabilities"]), "probabilities").is_ok());
    assert!(scaling::check(&model(&["logits"]), "logits").is_ok());
}
