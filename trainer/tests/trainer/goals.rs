//! Tests of losses, labels, optimizers and validation in whole jobs.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{
    ArrayRef, AsArray, BooleanArray, FixedSizeListArray, Float32Array, Int64Array, RecordBatch, StringArray,
};
use arrow::datatypes::{DataType, Field, Float32Type, Int64Type};
use millrace_datafs::Datafs;
use millrace_trainer::job::JobFile;
use millrace_trainer::{End, TrainReport};

use super::{
    CLASSES, ROWS, WIDTH, bundle, home, job_text, parquet_bytes, rows, run, setup, signal, versions, volume,
};

/// Writes each batch as a dataset of its name, then takes the snapshot `data@more`.
fn datasets(home: &Path, batches: &[(&str, RecordBatch)]) {
    let datafs = Datafs::open(home, &millrace_datafs::Config::default()).unwrap();
    for (name, batch) in batches {
        volume(&datafs, "data").write_file(&format!("{name}/a.parquet"), &parquet_bytes(batch)).unwrap();
    }
    datafs.snapshot_create(&"data".parse().unwrap(), &"more".parse().unwrap()).unwrap();
}

/// The rows with another label column.
fn labelled(of: std::ops::Range<usize>, label: impl Fn(usize, i64) -> ArrayItem) -> RecordBatch {
    let batch = rows(of.clone());
    let classes = batch.column(1).as_primitive::<Int64Type>().values().to_vec();
    let items: Vec<ArrayItem> = of.zip(classes).map(|(row, class)| label(row, class)).collect();
    let label: ArrayRef = match &items[0] {
        ArrayItem::Text(_) => Arc::new(StringArray::from_iter_values(items.iter().map(|item| match item {
            ArrayItem::Text(text) => text.clone(),
            _ => unreachable!(),
        }))),
        ArrayItem::Bool(_) => Arc::new(BooleanArray::from_iter(items.iter().map(|item| match item {
            ArrayItem::Bool(value) => Some(*value),
            _ => unreachable!(),
        }))),
        ArrayItem::Class(_) => Arc::new(Int64Array::from_iter_values(items.iter().map(|item| match item {
            ArrayItem::Class(class) => *class,
            _ => unreachable!(),
        }))),
        ArrayItem::Number(_) => {
            Arc::new(Float32Array::from_iter_values(items.iter().map(|item| match item {
                ArrayItem::Number(number) => *number,
                _ => unreachable!(),
            })))
        }
    };
    let columns = [("pixels", Arc::clone(batch.column(0)), true), ("label", label, true)];
    RecordBatch::try_from_iter_with_nullable(columns).unwrap()
}

enum ArrayItem {
    Text(String),
    Bool(bool),
    Class(i64),
    Number(f32),
}

/// A job on a dataset of the snapshot `data@more`.
fn on(name: &str, dataset: &str, more: &str) -> String {
    job_text(name, more).replace("data@v1:/train", &format!("data@more:/{dataset}"))
}

fn trained(home: &Path, text: &str) -> TrainReport {
    run(setup(home), JobFile::parse(text).unwrap(), |_| {}).unwrap()
}

fn refused(home: &Path, text: &str) -> String {
    let mut setup = setup(home);
    setup.worker.program = "/does/not/exist".into();
    JobFile::parse(text).and_then(|job| run(setup, job, |_| {})).unwrap_err().one_line()
}

const VALIDATION: &str = "[validation]\ndataset = \"data@more:/held\"\n";

#[test]
fn weighted_losses_and_every_optimizer_do_not_depend_on_the_workers() {
    let home = home();
    // The last third of the rows has the ignored label, so that whole shards have no weight.
    let ignored = labelled(0..ROWS, |row, class| ArrayItem::Class(if row % 3 == 2 { -100 } else { class }));
    let values = labelled(0..ROWS, |_, class| ArrayItem::Number(0.5 * class as f32));
    datasets(home.path(), &[("ignored", ignored), ("values", values)]);
    let weighted = "loss = { kind = \"cross_entropy\", label_smoothing = 0.1, class_weights = [1.0, 2.5, 0.125], \
                    ignore_index = -100 }";
    let cases = [
        ("ignored", weighted, "kind = \"adam\", learning_rate = 0.01, weight_decay = 0.001"),
        ("values", "loss = { kind = \"huber\", delta = 0.5 }", "kind = \"adagrad\", learning_rate = 0.05"),
        (
            "values",
            "loss = \"bce\"",
            "kind = \"rmsprop\", momentum = 0.5, centered = true, \
             schedule = { kind = \"one_cycle\", total_steps = 57 }",
        ),
        (
            "values",
            "loss = \"l1\"\nfreeze = [\"dense1.*\"]",
            "kind = \"sgd\", schedule = { kind = \"exponential\", gamma = 0.99 }",
        ),
        ("ignored", weighted, "kind = \"adamw\", schedule = { kind = \"linear\", warmup_steps = 9 }"),
    ];
    for (number, (dataset, keys, optimizer)) in cases.into_iter().enumerate() {
        let job = |name: &str, workers: usize, epochs: usize| {
            let more = format!("workers = {workers}\nepochs_max = {epochs}\nno_decay = [\"*.bias\"]\n{keys}");
            let text = on(&format!("{name}-{number}"), dataset, &more)
                .replace("kind = \"adamw\", learning_rate = 0.01", optimizer);
            if dataset == "values" {
                text.replace(&format!("classes = {CLASSES}"), "classes = 1")
            } else {
                text
            }
        };
        let alone = trained(home.path(), &job("alone", 1, 6));
        let losses = &alone.loss_per_epoch;
        assert!(losses[5] < losses[0], "{keys}, {optimizer}: {losses:?}");
        let together = trained(home.path(), &job("together", 3, 6));
        assert_eq!((&together.model_sha256, &together.loss_per_epoch), (&alone.model_sha256, losses));
        // Also when it goes on from a checkpoint.
        trained(home.path(), &job("continued", 2, 3));
        let continued = trained(home.path(), &job("continued", 1, 6));
        assert!(continued.resumed_from_step.is_some());
        assert_eq!((&continued.model_sha256, &continued.loss_per_epoch), (&alone.model_sha256, losses));
    }
}

#[test]
fn batches_without_any_weight_change_nothing() {
    let home = home();
    let ignored = labelled(0..ROWS, |row, class| ArrayItem::Class(if row % 3 == 0 { class } else { -100 }));
    datasets(home.path(), &[("ignored", ignored)]);
    let job = |name: &str, workers: usize| {
        let more = format!(
            "workers = {workers}\nepochs_max = 4\nvirtual_shards = 2\n\
             loss = {{ kind = \"cross_entropy\", ignore_index = -100 }}"
        );
        // About half of the batches have two ignored rows.
        trained(home.path(), &on(name, "ignored", &more).replace("batch_rows = 32", "batch_rows = 2"))
    };
    let alone = job("alone", 1);
    assert!(alone.loss_per_epoch[3] < alone.loss_per_epoch[0], "{alone:?}");
    assert_eq!(alone.rows_per_epoch, [ROWS as u64; 4]);
    let together = job("together", 2);
    assert_eq!((together.model_sha256, together.loss_per_epoch), (alone.model_sha256, alone.loss_per_epoch));
}

#[test]
fn texts_and_booleans_are_labels() {
    let home = home();
    let words = ["ant", "bee", "cat"];
    let text = |row: usize, class: i64| {
        let _ = row;
        ArrayItem::Text(words[class as usize].to_owned())
    };
    let other = |row: usize, class: i64| {
        if row == 205 { ArrayItem::Text("dog".to_owned()) } else { text(row, class) }
    };
    datasets(
        home.path(),
        &[
            ("texts", labelled(0..200, text)),
            ("held", labelled(200..ROWS, text)),
            ("strange", labelled(200..ROWS, other)),
            ("flags", labelled(0..ROWS, |_, class| ArrayItem::Bool(class == 1))),
        ],
    );
    trained(home.path(), &job_text("numbers", "epochs_max = 1"));
    let texts = trained(home.path(), &on("texts", "texts", &format!("epochs_max = 30\n{VALIDATION}")));
    assert!(texts.accuracy.unwrap() > 0.95, "{texts:?}");
    assert!(texts.validation[29].accuracy.unwrap() > 0.9, "{texts:?}");
    let published = bundle(home.path(), "texts", 1);
    let files = published.files();
    let (_, labels) = files.iter().find(|(path, _)| path == millrace_trainer::LABELS_FILE).unwrap();
    let labels: serde_json::Value = serde_json::from_slice(labels).unwrap();
    assert_eq!(labels, serde_json::json!({"format_version": 1, "column": "label", "labels": words}));
    assert!(bundle(home.path(), "numbers", 1).files().iter().all(|(path, _)| path != "labels.json"));

    let line = refused(home.path(), &on("strange", "texts", &VALIDATION.replace("held", "strange")));
    assert!(line.contains("\"dog\"") && line.contains("\"ant\", \"bee\", \"cat\""), "{line}");
    let line = refused(home.path(), &on("few", "texts", "").replace("classes = 3", "classes = 2"));
    assert!(line.contains("3 different labels") && line.contains("2 classes"), "{line}");

    let flags = on("flags", "flags", "epochs_max = 30\nloss = \"bce\"").replace("classes = 3", "classes = 1");
    let flags = trained(home.path(), &flags);
    assert!(flags.accuracy.unwrap() > 0.95, "{flags:?}");
    let classes = on("flags2", "flags", "epochs_max = 30").replace("classes = 3", "classes = 2");
    assert!(trained(home.path(), &classes).accuracy.unwrap() > 0.95);
}

/// Labels of the validation data that fit less and less as the model fits those of the training data.
fn contrary() -> RecordBatch {
    labelled(0..90, |row, class| ArrayItem::Class(if row % 2 == 0 { class } else { (class + 1) % CLASSES }))
}

#[test]
fn evaluations_end_a_job_early_and_choose_its_weights() {
    let home = home();
    datasets(home.path(), &[("held", contrary())]);
    let text = |name: &str, workers: usize, keys: &str| {
        job_text(name, &format!("workers = {workers}\nepochs_max = 60\n{VALIDATION}top_k = 2\n{keys}"))
    };
    let last = trained(home.path(), &text("last", 1, ""));
    assert_eq!((last.end, last.validation.len()), (End::EpochsDone, 60));
    let losses: Vec<f64> = last.validation.iter().map(|evaluation| evaluation.loss).collect();
    let lowest = (0..60).min_by(|a, b| losses[*a].total_cmp(&losses[*b])).unwrap();
    assert!(lowest < 40, "the validation loss does not rise: {losses:?}");
    assert_eq!(last.best_epoch, Some(lowest as u64 + 1));
    // Measuring does not change the training.
    let plain = trained(home.path(), &job_text("plain", "workers = 2\nepochs_max = 60"));
    assert_eq!(plain.model_sha256, last.model_sha256);
    let first = last.validation[0];
    assert_eq!((first.epoch, first.rows, first.mae), (1, 90, None));
    assert!((first.perplexity.unwrap() - first.loss.exp()).abs() < 1e-12);
    assert!(first.top_k.unwrap() >= first.accuracy.unwrap());

    let mut digests = Vec::new();
    for workers in 1..=3 {
        let name = format!("best-{workers}");
        let report = trained(home.path(), &text(&name, workers, "early_stopping = 4\nbest = true"));
        assert_eq!((report.end, report.epochs), (End::NoImprovement, lowest as u64 + 5));
        assert_eq!(
            (report.best_epoch, &report.validation[..]),
            (last.best_epoch, &last.validation[..lowest + 5])
        );
        let published = bundle(home.path(), &name, 1);
        let (metrics, lineage) = (&published.manifest().metrics, &published.manifest().lineage);
        assert_eq!(metrics["validation_loss"], losses[lowest]);
        assert_eq!((metrics["validation_epoch"], lineage.epochs), (lowest as f64 + 1.0, lowest as u64 + 1));
        assert_eq!(
            (metrics["train_loss"], lineage.steps),
            (last.loss_per_epoch[lowest], report.validation[lowest].step)
        );
        digests.push(report.model_sha256.unwrap());
    }
    assert_eq!(digests, vec![digests[0].clone(); 3]);
    // The weights of that epoch, as a job that ends there publishes them.
    let there =
        trained(home.path(), &job_text("there", &format!("workers = 1\nepochs_max = {}", lowest + 1)));
    assert_eq!(there.model_sha256.as_ref(), Some(&digests[0]));

    // More patience goes on from the end; less finds the earlier end again.
    let patient = trained(home.path(), &text("best-1", 1, "early_stopping = 8\nbest = true"));
    assert_eq!((patient.end, patient.epochs), (End::NoImprovement, lowest as u64 + 9));
    assert!(patient.resumed_from_step.is_some());
    assert_eq!(patient.model_sha256.as_ref(), Some(&digests[0]));
    let again = trained(home.path(), &text("best-1", 1, "early_stopping = 4\nbest = true"));
    assert_eq!((again.epochs, again.already_published), (lowest as u64 + 5, true));
}

/// Kills hit evaluations, too: they take most of the time of this job.
#[test]
fn kills_between_best_and_last_change_nothing() {
    let home = home();
    let batch = contrary();
    let many = arrow::compute::concat_batches(&batch.schema(), &vec![batch; 8]).unwrap();
    datasets(home.path(), &[("held", many)]);
    let more =
        format!("epochs_max = 60\ncheckpoint_every_steps = 37\n{VALIDATION}every_epochs = 2\nbest = true\n");
    let plain = trained(home.path(), &job_text("plain", &format!("workers = 1\n{more}")));
    let mut kills = vec![30, 120, 260, 420];
    kills.reverse();
    let mut epoch_of_kill = 0;
    let job = JobFile::parse(&job_text("battered", &format!("workers = 3\n{more}"))).unwrap();
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
    assert_eq!(report.workers_lost, 4);
    assert_eq!((&report.validation, report.best_epoch), (&plain.validation, plain.best_epoch));
    assert_eq!(report.model_sha256, plain.model_sha256);
    assert!(plain.best_epoch.unwrap() < 60, "{plain:?}");

    // A job that is stopped again and again, also within evaluations, ends with the same model.
    let job = || JobFile::parse(&job_text("stopped", &format!("workers = 2\n{more}"))).unwrap();
    let mut stops = 0;
    let report = loop {
        let cancel = tokio_util::sync::CancellationToken::new();
        let mut first = None;
        let report = super::runtime()
            .block_on(millrace_trainer::train(job(), setup(home.path()), cancel.clone(), |seen| {
                let first = *first.get_or_insert(seen.step);
                if stops < 4 && seen.step > first + 70 {
                    cancel.cancel();
                }
            }))
            .unwrap();
        if report.end != End::Stopped {
            break report;
        }
        stops += 1;
    };
    assert!(stops > 1, "{report:?}");
    assert_eq!((report.model_sha256, report.validation), (plain.model_sha256, plain.validation));
}

#[test]
fn unfit_validation_and_patterns_are_refused_before_workers_start() {
    let home = home();
    let held = labelled(0..40, |row, class| ArrayItem::Class(if row == 3 { 7 } else { class }));
    let nan = labelled(0..40, |_, _| ArrayItem::Number(f32::NAN));
    datasets(home.path(), &[("held", held), ("empty", rows(0..40).slice(0, 0)), ("nan", nan)]);
    let with = |dataset: &str, keys: &str| {
        job_text("bad", &format!("[validation]\ndataset = \"{dataset}\"\n{keys}"))
    };
    let mse = |text: String| {
        text.replace("batch_rows", "loss = \"mse\"\nbatch_rows").replace("classes = 3", "classes = 1")
    };
    for (text, words) in [
        (with("data@never:/held", ""), vec!["data@never", "not exist"]),
        (with("nowhere@v1:/held", ""), vec!["nowhere", "not exist"]),
        (with("data@more:/none", ""), vec!["/none", "no data file"]),
        (with("data@more:/empty", ""), vec!["validation dataset data@more:/empty", "hold no row"]),
        (with("data@more:/held", ""), vec!["data@more:/held", "label 7", "0 to 2"]),
        (mse(with("data@more:/nan", "")), vec!["data@more:/nan", "NaN", "a.parquet"]),
        (with("data@v1:/train", "top_k = 4"), vec!["validation.top_k = 4", "3 classes"]),
        (job_text("bad", "freeze = [\"body.*\"]"), vec!["freeze", "body.*", "dense1.weight"]),
        (job_text("bad", "no_decay = [\"bias\"]"), vec!["no_decay", "\"bias\"", "dense1.weight"]),
        (job_text("bad", "freeze = [\"*\"]"), vec!["freeze", "nothing is left to train"]),
        (
            job_text("bad", "loss = { kind = \"cross_entropy\", class_weights = [1, 2] }"),
            vec!["loss.class_weights has 2 weights", "3 classes"],
        ),
    ] {
        let line = refused(home.path(), &text);
        assert!(line.len() < 400, "{line}");
        for word in words {
            assert!(line.contains(word), "{line:?} lacks {word:?}\n{text}");
        }
    }
    assert_eq!(versions(home.path()), 0);
}

#[test]
fn extreme_datasets_train_or_say_why_not() {
    let home = home();
    let wide = |values: Vec<f32>| {
        let item = Arc::new(Field::new("item", DataType::Float32, true));
        FixedSizeListArray::new(item, WIDTH as i32, Arc::new(Float32Array::from(values)), None)
    };
    let pixels =
        rows(0..90).column(0).as_fixed_size_list().values().as_primitive::<Float32Type>().values().to_vec();
    let prices: Vec<f32> = pixels.chunks(WIDTH).map(|row| 1e6 + 1e5 * (row[0] - row[1])).collect();
    let prices: ArrayRef = Arc::new(Float32Array::from(prices));
    let prices = RecordBatch::try_from_iter_with_nullable([
        ("pixels", Arc::new(wide(pixels)) as ArrayRef, true),
        ("label", prices, true),
    ])
    .unwrap();
    datasets(
        home.path(),
        &[
            ("prices", prices),
            ("one-class", labelled(0..ROWS, |_, _| ArrayItem::Class(1))),
            ("one-row", labelled(5..6, |_, class| ArrayItem::Class(class))),
            ("none", labelled(0..ROWS, |_, _| ArrayItem::Class(-100))),
            ("held", labelled(0..40, |_, _| ArrayItem::Class(-100))),
        ],
    );
    let one_class = trained(home.path(), &on("one-class", "one-class", "epochs_max = 20"));
    assert_eq!(one_class.accuracy, Some(1.0));
    assert!(one_class.loss.unwrap() < 0.1, "{one_class:?}");
    // One row, in batches that are larger than the data.
    let one_row = "epochs_max = 3200\n[validation]\ndataset = \"data@more:/one-row\"\nevery_epochs = 7";
    let one_row = trained(home.path(), &on("one-row", "one-row", one_row));
    assert_eq!((one_row.accuracy, one_row.rows_per_epoch[0]), (Some(1.0), 1));
    // A step completes 32 epochs, and is evaluated once.
    assert_eq!((one_row.steps, one_row.validation.len()), (100, 100));

    let ignoring = "loss = { kind = \"cross_entropy\", ignore_index = -100 }\n";
    let text = on("none", "none", ignoring);
    let line = run(setup(home.path()), JobFile::parse(&text).unwrap(), |_| {}).unwrap_err().one_line();
    assert!(line.contains("data@more:/none") && line.contains("loss.ignore_index"), "{line}");
    let text = job_text("held", &format!("{ignoring}{VALIDATION}"));
    let line = run(setup(home.path()), JobFile::parse(&text).unwrap(), |_| {}).unwrap_err().one_line();
    assert!(line.contains("data@more:/held") && line.contains("loss.ignore_index"), "{line}");

    let price = |name: &str, optimizer: &str| {
        on(name, "prices", "epochs_max = 200\nloss = \"mse\"\nvirtual_shards = 4")
            .replace("classes = 3", "classes = 1")
            .replace("hidden = [12]", "hidden = []")
            .replace("kind = \"adamw\", learning_rate = 0.01", optimizer)
    };
    let learned = trained(home.path(), &price("prices", "kind = \"sgd\", learning_rate = 0.01"));
    let losses = &learned.loss_per_epoch;
    assert!(losses[199] < 1e-3 * losses[0], "{losses:?}");
    // With the default optimizer, labels of this magnitude need their scale.
    let standardized = |name: &str, workers: usize| {
        let more = format!(
            "workers = {workers}\nstandardize_labels = true\n[validation]\ndataset = \"data@more:/prices\"\n\
             every_epochs = 100"
        );
        trained(home.path(), &(price(name, "kind = \"adamw\", learning_rate = 0.01") + &more))
    };
    let alone = standardized("standard-1", 1);
    assert!(alone.loss.unwrap() < 0.02, "{:?}", alone.loss);
    // The labels are spread over 1e5.
    assert!(alone.validation[1].mae.unwrap() < 1e4, "{:?}", alone.validation);
    assert_eq!(standardized("standard-2", 2).model_sha256, alone.model_sha256);
    let text = price("diverges", "kind = \"sgd\", learning_rate = 10.0");
    let line = run(setup(home.path()), JobFile::parse(&text).unwrap(), |_| {}).unwrap_err().one_line();
    assert!(line.contains("lower the learning rate") && line.contains("standardize_labels"), "{line}");
}
