//! Tests of standardized labels.

use super::*;
use crate::engine::{Device, Engine, Loss};
use crate::probe::{Probe, branch, info, numbers, run_reference, runtime};

#[test]
fn moments_are_those_of_all_values() {
    let mut moments = Moments::default();
    for value in [1e9 + 4.0, 1e9 + 7.0, 1e9 + 13.0, 1e9 + 16.0] {
        moments.add(value);
    }
    assert_eq!((moments.mean, moments.deviation()), (1e9 + 10.0, 22.5f64.sqrt()));
    let mut constant = Moments::default();
    constant.add(3.0);
    constant.add(3.0);
    assert_eq!((constant.mean, constant.deviation(), Moments::default().deviation()), (3.0, 1.0, 1.0));
}

#[test]
fn labels_that_float32_cannot_tell_apart_are_lost() {
    let spread = |values: &[f64]| {
        let mut spread = Spread::default();
        values.iter().for_each(|value| spread.add(*value as f32, *value));
        spread
    };
    assert!(spread(&[1.7e9 - 1.0, 1.7e9 + 1.0]).is_lost());
    assert!(spread(&[0.1, 0.1 + 1e-12]).is_lost());
    let noise = [0.1 + 0.2, 0.3];
    let kept: [&[f64]; 6] =
        [&[1.7e9 - 1e4, 1.7e9 + 1e4], &[0.1, 0.1], &noise, &[0.1, 0.3], &[f64::from(0.1f32), 7.0], &[]];
    for kept in kept {
        assert!(!spread(kept).is_lost(), "{kept:?}");
    }
    // The scale is that of the rounded labels.
    let rounded = spread(&[0.1, 0.3]).single;
    assert_eq!(rounded.mean, f64::from(0.1f32) + (f64::from(0.3f32) - f64::from(0.1f32)) / 2.0);
}

#[test]
fn models_give_the_numbers_of_the_dataset() {
    let model = crate::init::mlp(3, &[4], 2, 1).unwrap();
    let engine = Engine::load(&model, Loss::Mse, Device::Cpu).unwrap();
    let scale = LabelScale::new(vec![1e6, -5.0], vec![2e5, 0.5]);
    let mut exported = engine.export().unwrap();
    scale.undo(&mut exported, engine.graph().output_name(), &engine.output_row());
    let inputs = numbers(3 * 5, 2);
    let plain = engine.logits(&inputs, 5).unwrap();
    let found = run_reference(runtime(), &exported, &[3], 5, &inputs).unwrap();
    for (found, plain) in found.chunks(2).zip(plain.chunks(2)) {
        let expected = [1e6 + 2e5 * plain[0], -5.0 + 0.5 * plain[1]];
        assert!((found[0] - expected[0]).abs() <= 1.0 && (found[1] - expected[1]).abs() <= 1e-5, "{found:?}");
    }
    // Labels take the opposite way.
    let mut labels = vec![1.2e6, -4.5, 8e5, -5.5];
    scale.apply(&mut labels);
    assert_eq!(labels, [1.0, 1.0, -1.0, -1.0]);
    // The result can be trained again, and the constants are not parameters.
    let again = Engine::load(&exported, Loss::Mse, Device::Cpu).unwrap();
    assert_eq!(again.layout(), engine.layout());
    let mut twice = again.export().unwrap();
    scale.undo(&mut twice, again.graph().output_name(), &again.output_row());
    run_reference(runtime(), &twice, &[3], 5, &inputs).unwrap();
}

#[test]
fn a_branch_that_computes_on_with_the_output_is_refused() {
    let model = |read: &str| {
        let mut probe = Probe::new(17, &[4]);
        let (w, condition) = (probe.param(&[4]), probe.flags(&[], &[true]));
        let output = probe.node("Mul", &["x", &w], vec![]);
        let inputs = [if read == "output" { output.as_str() } else { "x" }];
        let sides = ["then_branch", "else_branch"].map(|side| branch(side, "Tanh", &inputs, side));
        let second = probe.node("If", &[&condition], sides.to_vec());
        let mut model = probe.finish(&output);
        model.graph.as_mut().unwrap().output.push(info(&second, None));
        (model, output)
    };
    let (apart, output) = model("x");
    check(&apart, &output).unwrap();
    let (joined, output) = model("output");
    let error = check(&joined, &output).unwrap_err().to_string();
    assert!(error.contains("computes on with output"), "{error}");
}
