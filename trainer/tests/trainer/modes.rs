//! Tests of models with batch normalisation and dropout in whole jobs.
//!
//! The models were written by PyTorch's earlier exporter with `training=TrainingMode.TRAINING`:
//! `norm-dropout.onnx` is Linear, BatchNorm1d, ReLU, Dropout and Linear; `norm-first.onnx` is BatchNorm1d and Linear.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, Float32Array, RecordBatch};
use arrow::datatypes::{Float32Type, Int64Type};
use millrace_bundle::onnx::ModelProto;
use millrace_datafs::Datafs;
use millrace_trainer::TrainReport;
use millrace_trainer::engine::{Device, Engine, Loss};
use millrace_trainer::job::JobFile;

use super::{CLASSES, ROWS, WIDTH, bundle, home, job_text, parquet_bytes, rows, run, setup, signal, volume};

const NORM_DROPOUT: &[u8] = include_bytes!("norm-dropout.onnx");
const NORM_FIRST: &[u8] = include_bytes!("norm-first.onnx");
/// Shards of 6 and 7 rows.
const SHARDS: &str = "virtual_shards = 5";

/// A job with the model of `bytes`, which is written into the home.
fn text(home: &Path, bytes: &[u8], name: &str, more: &str) -> String {
    let file = home.join("model.onnx");
    std::fs::write(&file, bytes).unwrap();
    let built_in =
        format!("model = {{ kind = \"mlp\", inputs = {WIDTH}, hidden = [12], classes = {CLASSES} }}");
    let text = job_text(name, more);
    assert!(text.contains(&built_in), "{text}");
    text.replace(&built_in, &format!("model = {:?}", file.display().to_string()))
}

fn trained(home: &Path, text: &str) -> TrainReport {
    run(setup(home), JobFile::parse(text).unwrap(), |_| {}).unwrap()
}

/// The elements of an initializer.
fn tensor(model: &ModelProto, name: &str) -> Vec<f32> {
    let mut tensors = model.graph.iter().flat_map(|graph| &graph.initializer);
    let tensor = tensors.find(|tensor| tensor.name() == name).unwrap();
    tensor.raw_data().chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

fn published(home: &Path, name: &str) -> ModelProto {
    bundle(home, name, 1).graph().clone()
}

fn validation(home: &Path) -> String {
    let datafs = Datafs::open(home, &millrace_datafs::Config::default()).unwrap();
    volume(&datafs, "data").write_file("held/a.parquet", &parquet_bytes(&rows(400..500))).unwrap();
    datafs.snapshot_create(&"data".parse().unwrap(), &"held".parse().unwrap()).unwrap();
    "[validation]\ndataset = \"data@held:/held\"\n".to_owned()
}

#[test]
fn normalisation_and_dropout_do_not_depend_on_the_workers() {
    let home = home();
    let job = |name: &str, workers: usize, epochs: usize| {
        let more =
            format!("workers = {workers}\nepochs_max = {epochs}\ncheckpoint_every_steps = 7\n{SHARDS}");
        text(home.path(), NORM_DROPOUT, name, &more)
    };
    let alone = trained(home.path(), &job("alone", 1, 12));
    assert!(alone.loss_per_epoch[11] < 0.7 * alone.loss_per_epoch[0], "{alone:?}");
    for workers in [2, 3] {
        let together = trained(home.path(), &job(&format!("together-{workers}"), workers, 12));
        assert_eq!(
            (&together.model_sha256, &together.loss_per_epoch),
            (&alone.model_sha256, &alone.loss_per_epoch)
        );
    }
    // A run that goes on from a checkpoint has the statistics and the dropouts of one that was not interrupted.
    trained(home.path(), &job("continued", 3, 5));
    let continued = trained(home.path(), &job("continued", 2, 12));
    assert!(continued.resumed_from_step.is_some());
    assert_eq!(
        (&continued.model_sha256, &continued.loss_per_epoch),
        (&alone.model_sha256, &alone.loss_per_epoch)
    );
    // The published model is for inference.
    let model = published(home.path(), "alone");
    assert_ne!(
        tensor(&model, "1.running_mean"),
        tensor(&prost::Message::decode(NORM_DROPOUT).unwrap(), "1.running_mean")
    );
    let engine = Engine::load(&model, Loss::CrossEntropy, Device::Cpu).unwrap();
    assert!(!engine.graph().has_training_mode());
}

#[test]
fn killed_workers_do_not_change_the_statistics() {
    let home = home();
    let more = format!("epochs_max = 200\ncheckpoint_every_steps = 100\n{SHARDS}");
    let text = |name: &str, workers: usize| {
        text(home.path(), NORM_DROPOUT, name, &format!("workers = {workers}\n{more}"))
    };
    let plain = trained(home.path(), &text("plain", 1));
    let (mut kills, mut epoch_of_kill) = (vec![300, 150, 40], 0);
    let job = JobFile::parse(&text("battered", 3)).unwrap();
    let report = run(setup(home.path()), job, |seen| {
        let due = kills.last().is_some_and(|step| seen.step >= *step);
        // The job may end before a third worker is back.
        let workers = seen.worker_pids.len();
        if due && workers > 1 && seen.membership_epoch > epoch_of_kill {
            epoch_of_kill = seen.membership_epoch;
            signal("KILL", seen.worker_pids[kills.len() % workers]);
            kills.pop();
        }
    })
    .unwrap();
    assert!(kills.is_empty(), "kills left: {kills:?}");
    assert_eq!(report.workers_lost, 3);
    assert_eq!((report.model_sha256, report.loss_per_epoch), (plain.model_sha256, plain.loss_per_epoch));
}

/// The mean loss of a published model on the validation rows.
fn loss_of(model: &ModelProto) -> f64 {
    let batch = rows(400..500);
    let pixels =
        batch.column(0).as_fixed_size_list().values().as_primitive::<Float32Type>().values().to_vec();
    let labels = batch.column(1).as_primitive::<Int64Type>().values().to_vec();
    let engine = Engine::load(model, Loss::CrossEntropy, Device::Cpu).unwrap();
    let logits = engine.logits(&pixels, labels.len()).unwrap();
    let losses = logits.chunks_exact(CLASSES as usize).zip(&labels).map(|(row, label)| {
        let total: f64 = row.iter().map(|logit| f64::from(*logit).exp()).sum();
        total.ln() - f64::from(row[*label as usize])
    });
    losses.sum::<f64>() / labels.len() as f64
}

#[test]
fn best_weights_keep_the_statistics_of_their_evaluation() {
    let home = home();
    let validation = validation(home.path());
    let job = |name: &str, workers: usize, epochs: usize, more: &str| {
        let more = format!("workers = {workers}\nepochs_max = {epochs}\n{SHARDS}\n{validation}{more}");
        // Steps of this size overshoot, so that the last evaluation is not the best one.
        text(home.path(), NORM_DROPOUT, name, &more).replace("learning_rate = 0.01", "learning_rate = 0.5")
    };
    let last = trained(home.path(), &job("last", 1, 9, ""));
    let losses: Vec<f64> = last.validation.iter().map(|evaluation| evaluation.loss).collect();
    // The evaluation is that of the published model.
    let found = loss_of(&published(home.path(), "last"));
    assert!((found - losses[8]).abs() < 1e-5, "{found} {losses:?}");
    let best = trained(home.path(), &job("best", 2, 9, "best = true"));
    let lowest = best.best_epoch.unwrap() as usize - 1;
    assert!(lowest < 8, "{losses:?}");
    let found = loss_of(&published(home.path(), "best"));
    assert!((found - losses[lowest]).abs() < 1e-5, "{found} {losses:?}");
    let there = trained(home.path(), &job("there", 3, lowest + 1, ""));
    assert_eq!(there.model_sha256, best.model_sha256);
}

/// Labels of these magnitudes need other scales of the sum, in which steps are repeated. The normalisation reads the
/// rows alone, so its statistics must be the same.
#[test]
fn repeated_steps_move_the_statistics_once() {
    let home = home();
    let datafs = Datafs::open(home.path(), &millrace_datafs::Config::default()).unwrap();
    let batch = rows(0..ROWS);
    for (number, magnitude) in [1.0f32, 3e14].into_iter().enumerate() {
        let classes = batch.column(1).as_primitive::<Int64Type>().values();
        let prices: Vec<f32> = classes.iter().map(|class| magnitude * (*class as f32 + 1.0)).collect();
        let prices: ArrayRef = Arc::new(Float32Array::from(prices));
        assert_eq!(prices.null_count(), 0);
        let columns = [("pixels", Arc::clone(batch.column(0))), ("price", prices)];
        let bytes = parquet_bytes(&RecordBatch::try_from_iter(columns).unwrap());
        volume(&datafs, "data").write_file(&format!("prices-{number}/a.parquet"), &bytes).unwrap();
    }
    datafs.snapshot_create(&"data".parse().unwrap(), &"prices".parse().unwrap()).unwrap();
    let statistics: Vec<_> = (0..2)
        .map(|number| {
            let name = format!("prices-{number}");
            // With a trained scale in front of trained weights, steps on such labels would diverge.
            let freeze = "freeze = [\"0.weight\", \"0.bias\"]";
            let more = format!("workers = 2\nepochs_max = 3\n{SHARDS}\nloss = \"mse\"\n{freeze}");
            let text = text(home.path(), NORM_FIRST, &name, &more)
                .replace("data@v1:/train", &format!("data@prices:/{name}"))
                .replace("label = \"label\"", "label = \"price\"")
                .replace("kind = \"adamw\", learning_rate = 0.01", "kind = \"sgd\", learning_rate = 0.002");
            trained(home.path(), &text);
            let model = published(home.path(), &name);
            (tensor(&model, "0.running_mean"), tensor(&model, "0.running_var"), tensor(&model, "1.weight"))
        })
        .collect();
    assert_eq!((&statistics[0].0, &statistics[0].1), (&statistics[1].0, &statistics[1].1));
    assert_ne!(statistics[0].2, statistics[1].2);
}

#[test]
fn frozen_parameters_and_statistics_stay() {
    let home = home();
    let first: ModelProto = prost::Message::decode(NORM_DROPOUT).unwrap();
    let of = |model: &ModelProto| {
        ["1.weight", "1.bias", "1.running_mean", "1.running_var"].map(|name| tensor(model, name))
    };
    for (name, freeze, stays) in [
        ("scale", "[\"1.weight\", \"1.bias\"]", [true, true, false, false]),
        ("all", "[\"1.*\"]", [true; 4]),
        ("statistics", "[\"*.running_*\"]", [false, false, true, true]),
        ("none", "[]", [false; 4]),
    ] {
        let more = format!("workers = 2\nepochs_max = 3\n{SHARDS}\nfreeze = {freeze}");
        trained(home.path(), &text(home.path(), NORM_DROPOUT, name, &more));
        let model = published(home.path(), name);
        let equal: Vec<bool> = of(&model).iter().zip(of(&first)).map(|(a, b)| *a == b).collect();
        assert_eq!(equal, stays, "{name}");
    }
}

#[test]
fn unfit_shards_and_patterns_are_refused_before_workers_start() {
    let home = home();
    for (more, expected) in [
        ("virtual_shards = 32", "a shard of 1 row has one value for each channel"),
        ("virtual_shards = 17", "fewer virtual_shards or more batch_rows"),
        ("virtual_shards = 4\nfreeze = [\"1.running_mean\"]", "match both or neither"),
    ] {
        let mut setup = setup(home.path());
        setup.worker.program = "/does/not/exist".into();
        let text = text(home.path(), NORM_DROPOUT, "bad", more);
        let line = run(setup, JobFile::parse(&text).unwrap(), |_| {}).unwrap_err().one_line();
        assert!(line.contains(expected) && line.contains("/1/BatchNormalization"), "{line}");
    }
    // One row of a frozen normalisation is enough.
    let more = "virtual_shards = 32\nworkers = 1\nepochs_max = 1\nfreeze = [\"1.*\"]";
    trained(home.path(), &text(home.path(), NORM_DROPOUT, "frozen", more));
}
