//! Tests of the loss functions: against values of PyTorch 2.15 in f64, and against finite differences.

use super::super::loss::{Truth, loss_and_gradient, measure};
use super::super::*;
use crate::probe::{Probe, numbers};

const LOGITS: [f32; 12] = [0.5, -1.25, 2.0, 1.5, 0.25, -0.75, -2.0, 0.0, 1.0, 3.0, -0.5, 0.125];
const VALUES: [f32; 12] = [0.0, 1.0, 0.25, 1.0, 0.0, 0.0, 1.0, 1.0, 0.5, 0.0, 0.0, 1.0];

fn cross_entropy(label_smoothing: f64, class_weights: &[f64], ignore_index: Option<i64>) -> Objective {
    Objective::CrossEntropy(CrossEntropy {
        label_smoothing,
        class_weights: class_weights.to_vec(),
        ignore_index,
    })
}

/// The mean of the loss and its slope, as PyTorch reduces them.
fn mean(objective: &Objective, labels: &Labels) -> (f64, Vec<f64>) {
    let found = loss_and_gradient(objective, &LOGITS, labels, 4).unwrap();
    let slope = found.slope.iter().map(|slope| f64::from(*slope) / found.weight).collect();
    (found.loss_sum / found.weight, slope)
}

fn close(found: f64, expected: f64, what: &str) {
    assert!((found - expected).abs() <= 1e-7 * (1.0 + expected.abs()), "{what}: {found} is not {expected}");
}

#[test]
fn losses_and_slopes_equal_those_of_pytorch() {
    let classes = Labels::Class(vec![2, 0, 1, -100]);
    let values = Labels::Value(VALUES.to_vec());
    let weights = [1.0, 2.5, 0.5];
    let huber = |delta| Objective::Huber(Huber { delta });
    // The loss, and the slopes of the first and of the third row.
    let cases = [
        (
            cross_entropy(0.0, &[], Some(-100)),
            &classes,
            0.6374356030924812,
            [
                0.05894006070248143,
                0.01024224677547881,
                -0.06918230747796024,
                0.011706342319779905,
                -0.24683451321919364,
                0.23512817089941368,
            ],
        ),
        (
            cross_entropy(0.1, &[], Some(-100)),
            &classes,
            0.7402133808702589,
            [
                0.047828949591370316,
                -0.0008688643356323014,
                -0.04696008525573804,
                0.0005952312086687952,
                -0.22461229099697141,
                0.2240170597883026,
            ],
        ),
        (
            cross_entropy(0.0, &weights, Some(-100)),
            &classes,
            0.9548785357196767,
            [
                0.022102522763430537,
                0.003840842540804554,
                -0.02594336530423509,
                0.021949391849587323,
                -0.4628147122859881,
                0.4408653204364007,
            ],
        ),
        (
            cross_entropy(0.1, &weights, Some(-100)),
            &classes,
            1.0512592424569571,
            [
                0.017452943224002294,
                -0.016352350369061353,
                -0.0011005928549409345,
                0.012591753563273248,
                -0.42871669237930865,
                0.4161249388160353,
            ],
        ),
        (
            Objective::Bce,
            &values,
            1.1088131692280923,
            [
                0.05187161093348788,
                -0.06477498843122427,
                0.052566423164823524,
                -0.07339975649815687,
                -0.041666666666666664,
                0.019254881552500408,
            ],
        ),
        (
            Objective::L1,
            &values,
            1.2395833333333333,
            [
                0.08333333333333333,
                -0.08333333333333333,
                0.08333333333333333,
                -0.08333333333333333,
                -0.08333333333333333,
                0.08333333333333333,
            ],
        ),
        (
            huber(1.0),
            &values,
            0.8079427083333334,
            [
                0.041666666666666664,
                -0.08333333333333333,
                0.08333333333333333,
                -0.08333333333333333,
                -0.08333333333333333,
                0.041666666666666664,
            ],
        ),
        (
            huber(0.5),
            &values,
            0.4973958333333333,
            [
                0.041666666666666664,
                -0.041666666666666664,
                0.041666666666666664,
                -0.041666666666666664,
                -0.041666666666666664,
                0.041666666666666664,
            ],
        ),
        (
            Objective::Mse,
            &values,
            2.4596354166666665,
            [
                0.08333333333333333,
                -0.375,
                0.29166666666666663,
                -0.5,
                -0.16666666666666666,
                0.08333333333333333,
            ],
        ),
    ];
    for (objective, labels, loss, slopes) in cases {
        let what = format!("{objective:?}");
        let (found, slope) = mean(&objective, labels);
        close(found, loss, &what);
        for (found, expected) in slope[..3].iter().chain(&slope[6..9]).zip(slopes) {
            close(*found, expected, &what);
        }
    }
}

#[test]
fn slopes_match_finite_differences() {
    let (rows, width) = (40, 5);
    let logits: Vec<f32> = numbers(rows * width, 3).into_iter().map(|value| 4.0 * value).collect();
    let classes = Labels::Class((0..rows as i64).map(|row| row * 7 % 6 - 1).collect());
    let values =
        Labels::Value(numbers(rows * width, 4).into_iter().map(|value| value.abs().min(1.0)).collect());
    let smooth = cross_entropy(0.3, &[0.0, 2.0, 0.5, 1.0, 3.0], Some(-1));
    let huber = Objective::Huber(Huber { delta: 0.7 });
    for (objective, labels) in
        [(smooth, &classes), (huber, &values), (Objective::Bce, &values), (Objective::L1, &values)]
    {
        let loss = |logits: &[f32]| loss_and_gradient(&objective, logits, labels, rows).unwrap();
        let slope = loss(&logits).slope;
        let step = 1.0 / 4096.0;
        for at in 0..logits.len() {
            let moved = |by: f32| {
                let mut moved = logits.clone();
                moved[at] += by;
                (f64::from(moved[at]), loss(&moved).loss_sum)
            };
            let ((above, up), (below, down)) = (moved(step), moved(-step));
            let expected = (up - down) / (above - below);
            let found = f64::from(slope[at]);
            assert!(
                (found - expected).abs() <= 1e-4 * (1.0 + expected.abs()),
                "{objective:?}: {found} {expected}"
            );
        }
    }
}

#[test]
fn extreme_logits_have_a_loss() {
    let labels = Labels::Value(vec![0.0, 1.0, 1.0]);
    let found = loss_and_gradient(&Objective::Bce, &[-1e30, 1e30, -1000.0], &labels, 3).unwrap();
    assert_eq!((found.loss_sum, found.slope), (1000.0, vec![0.0, 0.0, -1.0]));
}

#[test]
fn ignored_rows_and_classes_without_weight_do_not_count() {
    let model = crate::init::mlp(2, &[], 3, 1).unwrap();
    let load = |objective| Engine::load(&model, objective, Device::Cpu).unwrap();
    let batch = |labels: &[i64]| ShardBatch {
        rows: labels.len(),
        inputs: numbers(2 * labels.len(), 8),
        labels: Labels::Class(labels.to_vec()),
    };
    let engine = load(cross_entropy(0.0, &[1.0, 0.0, 1.0], Some(7)));
    let nothing = engine.gradients(&batch(&[7, 1, 7])).unwrap();
    assert_eq!((nothing.weight, nothing.loss_sum, nothing.ignored), (0.0, 0.0, 2));
    assert!(nothing.grad.iter().all(|slope| *slope == 0.0));
    let some = engine.gradients(&batch(&[7, 2, 0])).unwrap();
    assert_eq!((some.weight, some.rows, some.ignored), (2.0, 3, 1));
    let error = engine.gradients(&batch(&[7, 3, 0])).unwrap_err().to_string();
    assert!(error.contains("label 3 in row 1"), "{error}");
    // A class may be ignored, too.
    let first = load(cross_entropy(0.0, &[], Some(0)));
    assert_eq!(first.gradients(&batch(&[0, 1, 2])).unwrap().ignored, 1);
}

#[test]
fn binary_accuracy_looks_at_the_sign() {
    let labels = Labels::Value(vec![1.0, 0.0, 0.0, 1.0]);
    let found = loss_and_gradient(&Objective::Bce, &[0.5, -0.5, 1.0, 2.0], &labels, 2).unwrap();
    // Both outputs of the first row are right, one of the second.
    assert_eq!((found.correct, found.weight), (1, 2.0));
}

#[test]
fn measures_count_ranks_and_distances() {
    let classes = Labels::Class(vec![0, 2, 1, 9]);
    let logits = [1.0, 2.0, 3.0, 1.0, 1.0, 1.0, 0.0, 5.0, 5.0, 1.0, 0.0, 0.0];
    let objective = cross_entropy(0.0, &[], Some(9));
    let within = |top| measure(&objective, &logits, &classes, 4, (top, &[]), None).unwrap().within_top;
    // Of equal outputs the first one is ahead: the ranks are 2, 2 and 0.
    assert_eq!([within(0), within(1), within(2), within(3)], [0, 1, 1, 3]);
    let measures = measure(&objective, &logits, &classes, 4, (1, &[]), None).unwrap();
    assert_eq!((measures.rows, measures.correct, measures.ignored), (4, 1, 1));
    let values = Labels::Value(vec![1.0, 2.0, 3.0, 4.0]);
    let measures = measure(&Objective::Mse, &[2.0, 2.0, 0.0, 5.0], &values, 2, (0, &[]), None).unwrap();
    assert_eq!((measures.absolute, measures.weight), (0.5 + 2.0, 2.0));
    let measures =
        measure(&Objective::Mse, &[2.0, 2.0, 0.0, 5.0], &values, 2, (0, &[10.0, 1.0]), None).unwrap();
    assert_eq!(measures.absolute, 5.0 + 15.5);
}

#[test]
fn models_and_labels_that_do_not_fit_are_refused() {
    let mut probe = Probe::new(17, &[4]);
    let w = probe.param(&[4, 1]);
    let product = probe.node("MatMul", &["x", &w], vec![]);
    let sigmoid = probe.node("Sigmoid", &[&product], vec![]);
    let output = probe.node("Flatten", &[&sigmoid], vec![]);
    let model = probe.finish(&output);
    let error = Engine::load(&model, Loss::Bce, Device::Cpu).unwrap_err().to_string();
    assert!(error.contains("bce") && error.contains("made by Sigmoid"), "{error}");
    assert!(Engine::load(&model, Loss::Mse, Device::Cpu).is_ok());

    let model = crate::init::mlp(2, &[], 3, 1).unwrap();
    let error =
        Engine::load(&model, cross_entropy(0.0, &[1.0; 4], None), Device::Cpu).unwrap_err().to_string();
    assert!(error.contains("loss.class_weights has 4 weights") && error.contains("3 classes"), "{error}");
    let engine = Engine::load(&model, Loss::Bce, Device::Cpu).unwrap();
    for (labels, words) in [
        (Labels::Value(vec![0.0, 0.5, 1.5]), "row 0 is 1.5, bce needs labels from 0 to 1"),
        (Labels::Value(vec![0.0, f32::NAN, 1.0]), "row 0 is NaN"),
        (Labels::Class(vec![1]), "bce needs float labels"),
    ] {
        let error =
            engine.gradients(&ShardBatch { rows: 1, inputs: vec![0.5; 2], labels }).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

/// Values and slopes of PyTorch 2.15 in f64: `alpha * T**2 * kl_div(log_softmax(z / T), softmax(u / T))` with the
/// sum of the rows, plus `(1 - alpha) * cross_entropy(z, y)`.
#[test]
fn distillation_equals_that_of_pytorch() {
    let logits = [1.0, -2.0, 0.5, 0.0, 30.0, -30.0, 0.25, 0.25, 0.25];
    let taught = [0.5, 1.5, -1.0, 10.0, 0.0, 0.0, 2.0, 0.0, -2.0];
    let labels = Labels::Class(vec![0, 1, 2]);
    let cases = [
        (
            (1.0, 1.0),
            32.49169061546313,
            [
                0.3500327169895172,
                -0.6596131920814514,
                0.3095804750919342,
                -0.9999092221260071,
                0.9999545812606812,
                -4.539580913842656e-05,
                -0.5334799885749817,
                0.21602290868759155,
                0.31745707988739014,
            ],
        ),
        (
            (4.0, 0.25),
            30.0672476830125,
            [
                -0.20908662676811218,
                -0.20900443196296692,
                0.4180910587310791,
                -0.8584282994270325,
                0.9289374351501465,
                -0.0705091580748558,
                0.076852947473526,
                0.27613744139671326,
                -0.35299038887023926,
            ],
        ),
        (
            (0.5, 0.0),
            1.6032091910104866,
            [
                -0.3962511122226715,
                0.030058886855840683,
                0.3661922216415405,
                0.0,
                0.0,
                0.0,
                0.3333333432674408,
                0.3333333432674408,
                -0.6666666865348816,
            ],
        ),
        (
            (2.0, 0.5),
            32.24782262299202,
            [
                -0.019008934497833252,
                -0.40176522731781006,
                0.4207741618156433,
                -0.9867029786109924,
                0.9933513402938843,
                -0.006648354697972536,
                -0.16524095833301544,
                0.2552715241909027,
                -0.09003058075904846,
            ],
        ),
    ];
    for ((temperature, alpha), loss, slopes) in cases {
        let objective = Objective::Kl(Distillation { teacher: "t".into(), temperature, alpha });
        let truth = Truth { labels: &labels, taught: &taught };
        let found = loss_and_gradient(&objective, &logits, truth, 3).unwrap();
        close(found.loss_sum, loss, "the loss");
        assert_eq!((found.weight, found.correct), (3.0, 2));
        for (found, expected) in found.slope.iter().zip(slopes) {
            close(f64::from(*found), expected, "a slope");
        }
    }
    // Outputs of a teacher that are missing or not finite are never taken for something else.
    let objective = Objective::Kl(Distillation { teacher: "t".into(), ..Distillation::default() });
    assert!(matches!(loss_and_gradient(&objective, &logits, &labels, 3), Err(EngineError::Batch { .. })));
    let taught = [0.0, 0.0, 0.0, f32::NAN, 0.0, 0.0, 0.0, 0.0, 0.0];
    let truth = Truth { labels: &labels, taught: &taught };
    let found = loss_and_gradient(&objective, &logits, truth, 3);
    assert!(matches!(found, Err(EngineError::NonFinite { row: 1, .. })));
}

#[test]
fn unfit_teachers_are_refused_and_fit_ones_do_not_learn() {
    let kl = Objective::Kl(Distillation { teacher: "t".into(), ..Distillation::default() });
    let model = |inputs, outputs, seed| crate::init::mlp(inputs, &[4], outputs, seed).unwrap();
    let mut engine = Engine::load(&model(3, 2, 1), kl, Device::Cpu).unwrap();
    let shard = ShardBatch { rows: 1, inputs: vec![0.5, 1.0, -1.0], labels: Labels::Class(vec![1]) };
    assert!(matches!(engine.gradients(&shard), Err(EngineError::Teacher { .. })));
    for (teacher, words) in [
        (model(4, 2, 1), "takes 4 inputs per row, the trained model 3"),
        (model(3, 3, 1), "gives 3 outputs per row, the trained model 2"),
        (model(3, 1, 1), "two or more classes"),
    ] {
        let line = engine.set_teacher(&teacher).unwrap_err().to_string();
        assert!(line.contains("teacher of loss kl") && line.contains(words), "{line}");
    }
    let teacher = model(3, 2, 2);
    engine.set_teacher(&teacher).unwrap();
    let before = engine.gradients(&shard).unwrap();
    engine.set_weights(&vec![0.25; engine.layout().elements()]).unwrap();
    assert_ne!(engine.gradients(&shard).unwrap().grad, before.grad);
    // As its own teacher, a model has only the labels to learn from.
    let mut own = Engine::load(&teacher, engine.loss.clone(), Device::Cpu).unwrap();
    own.set_teacher(&teacher).unwrap();
    let entropy = Engine::load(&teacher, Loss::CrossEntropy, Device::Cpu).unwrap();
    let (mixed, alone) = (own.gradients(&shard).unwrap(), entropy.gradients(&shard).unwrap());
    close(mixed.loss_sum, 0.5 * alone.loss_sum, "the mixed loss");
    let mean = own.measure(&shard, 1, &[], None).unwrap();
    assert_eq!((mean.loss, mean.correct), (mixed.loss_sum, mixed.correct));
}
