//! Tests of gradient accumulation, averages of weights, plateaus and areas under ROC curves in whole jobs.
//!
//! The expected losses were recorded from PyTorch 2.15 on the rows and the first weights of these tests. Each
//! step has all rows, so that their order does not matter.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, Int64Array, RecordBatch};
use arrow::datatypes::Int64Type;
use millrace_datafs::Datafs;
use millrace_trainer::job::JobFile;
use millrace_trainer::{End, TrainReport, init};
use prost::Message;

use super::{
    CLASSES, ROWS, WIDTH, bundle, home, job_text, parquet_bytes, rows, run, setup, signal, versions, volume,
};

/// Writes a model whose weights a formula gives, and returns the job that trains it on all rows at once: seven
/// batches of 43 rows.
fn reference(home: &Path, name: &str, keys: &str) -> JobFile {
    let model = home.join("reference.onnx");
    std::fs::write(&model, formula_model(CLASSES as usize, 0)).unwrap();
    let text = format!(
        "name = \"{name}\"\ndataset = \"data@v1:/train\"\nfeatures = \"pixels\"\nlabel = \"label\"\n\
         model = \"{}\"\nbatch_rows = 43\naccumulate_steps = 7\nvirtual_shards = 5\n\
         output = {{ volume = \"models\" }}\n{keys}\n",
        model.display()
    );
    JobFile::parse(&text).unwrap()
}

/// A model of one hidden layer. The elements of its parameter `n` are `((37 i + 11 (start + n)) % 101 - 50) / 200`.
pub(super) fn formula_model(outputs: usize, start: usize) -> Vec<u8> {
    let mut model = init::mlp(WIDTH, &[12], outputs, 1).unwrap();
    let tensors = &mut model.graph.as_mut().unwrap().initializer;
    for (number, tensor) in (start..).zip(tensors) {
        let elements = tensor.dims.iter().product::<i64>() as usize;
        let value = |at: usize| ((37 * at + 11 * number) % 101) as f32 - 50.0;
        tensor.raw_data = Some((0..elements).flat_map(|at| (value(at) / 200.0).to_le_bytes()).collect());
    }
    model.encode_to_vec()
}

fn trained(home: &Path, job: JobFile) -> TrainReport {
    run(setup(home), job, |_| {}).unwrap()
}

fn close(what: &str, found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}: {found:?}");
    for (found_one, expected_one) in found.iter().zip(expected) {
        let distance = (found_one - expected_one).abs();
        assert!(distance < 1e-5 * expected_one.abs().max(0.1), "{what}: {found:?} is not {expected:?}");
    }
}

fn validation_losses(report: &TrainReport) -> Vec<f64> {
    report.validation.iter().map(|evaluation| evaluation.loss).collect()
}

const SEEN: &str = "[validation]\ndataset = \"data@v1:/train\"\n";

#[test]
fn accumulated_batches_take_the_steps_of_pytorch() {
    let home = home();
    let keys = "epochs_max = 7\nloss = { kind = \"cross_entropy\", class_weights = [1.0, 2.0, 0.5] }\n\
                optimizer = { kind = \"sgd\", learning_rate = 0.5, momentum = 0.9, \
                schedule = { kind = \"cosine\", warmup_steps = 2, total_steps = 6 } }\n";
    let report = trained(home.path(), reference(home.path(), "mean", &format!("workers = 1\n{keys}{SEEN}")));
    // The schedule counts steps of the optimizer: the rate of the last one is 0.
    assert_eq!((report.steps, report.rows_per_epoch.len()), (7, 7));
    close(
        "training",
        &report.loss_per_epoch,
        &[1.07043432, 0.990681708, 0.805754118, 0.634396039, 0.490378387, 0.3783294, 0.340723135],
    );
    close(
        "validation",
        &validation_losses(&report),
        &[0.990681708, 0.805754066, 0.634395957, 0.49037832, 0.378329426, 0.340723097, 0.340723097],
    );
}

#[test]
fn accumulated_steps_equal_those_of_one_large_batch() {
    let home = home();
    // Epochs of 301 rows end inside steps of 96, and more workers than batches share the shards.
    let small = "batch_rows = 24\nvirtual_shards = 5\naccumulate_steps = 4\nepochs_max = 9\n";
    let large = "batch_rows = 96\nvirtual_shards = 20\nepochs_max = 9\n";
    let job = |name: &str, workers: usize, keys: &str| {
        let keys = format!("workers = {workers}\n{keys}");
        JobFile::parse(&job_text(name, &keys).replace("batch_rows = 32\n", "")).unwrap()
    };
    let together = trained(home.path(), job("large", 2, large));
    assert_eq!((together.steps, together.rows_per_epoch.clone()), (29, vec![ROWS as u64; 9]));
    for workers in [1, 2, 5] {
        let report = trained(home.path(), job(&format!("small-{workers}"), workers, small));
        assert_eq!((report.steps, &report.rows_per_epoch), (29, &together.rows_per_epoch));
        assert_eq!(report.loss_per_epoch, together.loss_per_epoch);
        assert_eq!(report.model_sha256, together.model_sha256);
    }
    // It is another computation nevertheless, and has its own checkpoints.
    assert_ne!(trained(home.path(), job("large", 1, small)).run, together.run);
}

/// Kills within accumulated steps and evaluations of averaged weights, and a rate that follows evaluations.
#[test]
fn kills_and_restarts_change_neither_averages_nor_plateaus() {
    let home = home();
    let more = "batch_rows = 8\nvirtual_shards = 3\naccumulate_steps = 4\nepochs_max = 50\n\
                checkpoint_every_steps = 31\nfreeze = [\"dense1.bias\"]\nema = { decay = 0.9, warmup = true }\n\
                [validation]\ndataset = \"data@v1:/train\"\nbest = true\n";
    let job = |name: &str, workers: usize| {
        let plateau = "learning_rate = 0.3, schedule = { kind = \"plateau\", factor = 0.7, patience = 1, \
                       threshold = 0.05, cooldown = 1, min = 0.001 }";
        let text = job_text(name, &format!("workers = {workers}\n{more}"))
            .replace("batch_rows = 32\n", "")
            .replace("learning_rate = 0.01", plateau);
        JobFile::parse(&text).unwrap()
    };
    let plain = trained(home.path(), job("plain", 1));
    let mut kills = vec![300, 220, 130, 20];
    let mut epoch_of_kill = 0;
    let report = run(setup(home.path()), job("battered", 3), |seen| {
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
    assert_eq!(report.validation, plain.validation);
    assert_eq!(report.rows_per_epoch, [ROWS as u64; 50]);
    assert_eq!(report.model_sha256, plain.model_sha256);

    let mut stops = 0;
    let report = loop {
        let cancel = tokio_util::sync::CancellationToken::new();
        let mut first = None;
        let report = super::runtime()
            .block_on(millrace_trainer::train(
                job("stopped", 2),
                setup(home.path()),
                cancel.clone(),
                |seen| {
                    let first = *first.get_or_insert(seen.step);
                    if stops < 3 && seen.step > first + 70 {
                        cancel.cancel();
                    }
                },
            ))
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
fn averages_are_evaluated_and_published() {
    let home = home();
    let sgd = "workers = 1\nepochs_max = 8\noptimizer = { kind = \"sgd\", learning_rate = 0.5 }\n";
    let keys = format!("{sgd}ema = {{ decay = 0.7 }}\nfreeze = [\"dense1.bias\"]\n{SEEN}");
    let report = trained(home.path(), reference(home.path(), "average", &keys));
    close(
        "training",
        &report.loss_per_epoch,
        &[
            1.12955093,
            1.05490477,
            0.940965444,
            0.749523349,
            0.424599417,
            0.12427488,
            0.0189987118,
            0.00211136887,
        ],
    );
    let averaged = [
        1.05490482,
        1.01823592,
        0.939029217,
        0.789801478,
        0.544766903,
        0.269118994,
        0.0875723287,
        0.0193526391,
    ];
    close("validation", &validation_losses(&report), &averaged);

    let keys = format!("{sgd}ema = {{ decay = 0.7, warmup = true }}\n{SEEN}");
    let warm = trained(home.path(), reference(home.path(), "warm", &keys));
    close(
        "warm-up",
        &validation_losses(&warm),
        &[
            1.05372953,
            0.955322564,
            0.784511566,
            0.49540168,
            0.188699469,
            0.0412395597,
            0.00626872247,
            0.000818164728,
        ],
    );

    // The published weights are those that were evaluated: their loss, before one more step, says so.
    let published = bundle(home.path(), "average", 1);
    assert_eq!(published.manifest().metrics["validation_loss"], report.validation[7].loss);
    let again = home.path().join("again.onnx");
    std::fs::write(&again, published.model_onnx()).unwrap();
    let mut job = reference(home.path(), "again", "workers = 1\nepochs_max = 1");
    job.model = millrace_trainer::job::ModelSource::File(again);
    let again = trained(home.path(), job);
    close("published", &again.loss_per_epoch, &averaged[7..]);
    // Frozen parameters keep their bits in the average.
    let parameter = |model: &[u8]| {
        let model = millrace_bundle::onnx::ModelProto::decode(model).unwrap();
        let tensors = model.graph.unwrap().initializer;
        tensors.into_iter().find(|tensor| tensor.name() == "dense1.bias").unwrap().raw_data
    };
    assert_eq!(parameter(published.model_onnx()), parameter(&formula_model(CLASSES as usize, 0)));
}

const PLATEAU_TRAINING: [f64; 12] = [
    1.12955093,
    0.996242508,
    0.827239051,
    0.686835036,
    0.524732932,
    0.371487703,
    0.309862982,
    0.258381445,
    0.224470858,
    0.195932334,
    0.172015103,
    0.151976202,
];
const PLATEAU_VALIDATION: [f64; 12] = [
    0.996242464,
    0.827239096,
    0.686834931,
    0.524732947,
    0.371487767,
    0.309863031,
    0.258381426,
    0.224470854,
    0.195932314,
    0.172015086,
    0.151976213,
    0.135139212,
];

#[test]
fn plateaus_follow_the_validation_loss_as_in_pytorch() {
    let home = home();
    let keys = format!(
        "workers = 1\nepochs_max = 12\noptimizer = {{ kind = \"sgd\", learning_rate = 1.0, momentum = 0.0, schedule = \
         {{ kind = \"plateau\", factor = 0.5, patience = 0, threshold = 0.4, cooldown = 1, min = 0.2 }} }}\n{SEEN}"
    );
    let report = trained(home.path(), reference(home.path(), "plateau", &keys));
    close("training", &report.loss_per_epoch, &PLATEAU_TRAINING);
    close("validation", &validation_losses(&report), &PLATEAU_VALIDATION);
    // A raised budget goes on with the rate that the evaluations gave.
    let keys = keys.replace("epochs_max = 12", "epochs_max = 5");
    let short = trained(home.path(), reference(home.path(), "continued", &keys));
    assert_eq!(short.epochs, 5);
    let keys = keys.replace("epochs_max = 5", "epochs_max = 12").replace("workers = 1", "workers = 2");
    let long = trained(home.path(), reference(home.path(), "continued", &keys));
    assert!(long.resumed_from_step.is_some());
    assert_eq!((long.model_sha256, long.loss_per_epoch), (report.model_sha256, report.loss_per_epoch));
}

/// Rows with two classes, a fifth of which are wrong.
fn two_classes(of: std::ops::Range<usize>) -> RecordBatch {
    let batch = rows(of.clone());
    let classes = batch.column(1).as_primitive::<Int64Type>().values();
    let labels = of.zip(classes).map(|(row, class)| i64::from((*class == 2) != (row % 5 == 0)));
    let label: ArrayRef = Arc::new(Int64Array::from_iter_values(labels));
    let columns = [("pixels", Arc::clone(batch.column(0)), true), ("label", label, true)];
    RecordBatch::try_from_iter_with_nullable(columns).unwrap()
}

#[test]
fn areas_do_not_depend_on_the_workers() {
    let home = home();
    let datafs = Datafs::open(home.path(), &millrace_datafs::Config::default()).unwrap();
    let live = volume(&datafs, "data");
    live.write_file("two/a.parquet", &parquet_bytes(&two_classes(0..200))).unwrap();
    live.write_file("held/a.parquet", &parquet_bytes(&two_classes(200..ROWS))).unwrap();
    datafs.snapshot_create(&"data".parse().unwrap(), &"two".parse().unwrap()).unwrap();
    let text = |name: &str, workers: usize, outputs: usize, auc: &str| {
        let more =
            format!("workers = {workers}\nepochs_max = 6\n[validation]\ndataset = \"data@two:/held\"\n{auc}");
        job_text(name, &more)
            .replace("data@v1:/train", "data@two:/two")
            .replace("classes = 3", &format!("classes = {outputs}"))
            .replace("learning_rate = 0.01", "learning_rate = 0.001")
    };
    let job = |name: &str, workers: usize| JobFile::parse(&text(name, workers, 2, "auc = true")).unwrap();
    let alone = trained(home.path(), job("alone", 1));
    let areas: Vec<f64> = alone.validation.iter().filter_map(|evaluation| evaluation.auc).collect();
    assert_eq!(areas.len(), 6);
    assert!(areas.iter().all(|area| (0.6..0.99).contains(area)), "{areas:?}");
    let together = trained(home.path(), job("together", 3));
    assert_eq!((together.validation, &together.model_sha256), (alone.validation, &alone.model_sha256));
    // Measuring changes nothing else.
    let without = trained(home.path(), JobFile::parse(&text("without", 1, 2, "")).unwrap());
    assert_eq!((without.model_sha256, without.validation[5].auc), (alone.model_sha256, None));
    // The bundle and the list of runs have it.
    assert_eq!(bundle(home.path(), "alone", 1).manifest().metrics["validation_auc"], areas[5]);
    let datafs = Datafs::open(home.path(), &millrace_datafs::Config::default()).unwrap();
    let runs = millrace_trainer::runs::list(&volume(&datafs, "models"), Some("alone")).unwrap();
    assert_eq!(runs[0].evaluations[5].auc, Some(areas[5]));

    let before = versions(home.path());
    let job = JobFile::parse(&text("bad", 1, 3, "auc = true")).unwrap();
    let line = run(setup(home.path()), job, |_| {}).unwrap_err().one_line();
    assert!(["two classes", "model of 2 outputs", "has 3"].iter().all(|word| line.contains(word)), "{line}");
    assert_eq!(versions(home.path()), before);
}

#[test]
fn models_learn_from_a_teacher_as_in_pytorch() {
    let home = home();
    // Like a bundle: a folder with model.onnx, here beside the job and in a volume.
    let teacher = formula_model(CLASSES as usize, 5);
    std::fs::create_dir(home.path().join("teacher")).unwrap();
    std::fs::write(home.path().join("teacher/model.onnx"), &teacher).unwrap();
    let datafs = Datafs::open(home.path(), &millrace_datafs::Config::default()).unwrap();
    volume(&datafs, "models").write_file("models/big/1/model.onnx", &teacher).unwrap();
    let keys = |workers: usize, teacher: &str| {
        format!(
            "workers = {workers}\nepochs_max = 8\noptimizer = {{ kind = \"sgd\", learning_rate = 0.5 }}\n\
             loss = {{ kind = \"kl\", teacher = \"{teacher}\", temperature = 3.0, alpha = 0.7 }}\n{SEEN}"
        )
    };
    let local = home.path().join("teacher");
    let alone = trained(home.path(), reference(home.path(), "local", &keys(1, local.to_str().unwrap())));
    close(
        "training",
        &alone.loss_per_epoch,
        &[
            0.365080182,
            0.348224215,
            0.327019885,
            0.310674693,
            0.299394336,
            0.289300185,
            0.27684544,
            0.262852654,
        ],
    );
    close(
        "validation",
        &validation_losses(&alone),
        &[
            0.348224163,
            0.32701984,
            0.310674667,
            0.29939431,
            0.289300203,
            0.276845455,
            0.262852669,
            0.256411642,
        ],
    );
    assert!(alone.validation[7].perplexity.is_none() && alone.validation[7].accuracy.is_some());
    // The same teacher in a volume gives the same run, on any number of workers.
    let remote = trained(home.path(), reference(home.path(), "remote", &keys(3, "models:/models/big/1")));
    assert_eq!((&remote.run, &remote.model_sha256), (&alone.run, &alone.model_sha256));
    assert_eq!(remote.validation, alone.validation);

    // Another teacher at the same place is another run.
    let again = formula_model(CLASSES as usize, 6);
    volume(&datafs, "models").write_file("models/big/1/model.onnx", &again).unwrap();
    let other = trained(home.path(), reference(home.path(), "remote", &keys(1, "models:/models/big/1")));
    assert!(other.run != remote.run && other.resumed_from_step.is_none());
    assert_ne!(other.model_sha256, remote.model_sha256);
}

#[test]
fn unusable_teachers_are_refused_before_workers_start() {
    let home = home();
    let datafs = Datafs::open(home.path(), &millrace_datafs::Config::default()).unwrap();
    let models = volume(&datafs, "models");
    models.write_file("models/two/1/model.onnx", &formula_model(2, 0)).unwrap();
    models.write_file("models/torn/1/model.onnx", b"no model").unwrap();
    for (teacher, words) in [
        ("models:/models/two/1", ["gives 2 outputs", "trained model 3"]),
        ("models:/models/torn/1", ["models:/models/torn/1/model.onnx", "not an ONNX model"]),
        ("models:/models/none/1", ["models:/models/none/1", "not exist"]),
        ("nowhere:/models/two/1", ["nowhere:/models/two/1", "not exist"]),
        ("models:/../two", ["models:/../two", "'..'"]),
        ("no/such/folder", ["no/such/folder/model.onnx", "cannot be read"]),
    ] {
        let text = job_text("bad", &format!("loss = {{ kind = \"kl\", teacher = \"{teacher}\" }}"));
        let mut setup = setup(home.path());
        setup.worker.program = "/does/not/exist".into();
        let line = run(setup, JobFile::parse(&text).unwrap(), |_| {}).unwrap_err().one_line();
        assert!(line.len() < 400 && words.iter().all(|word| line.contains(word)), "{line}");
    }
    assert_eq!(versions(home.path()), 0);
}
