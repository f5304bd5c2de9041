//! Tests of `strategy = "allreduce"` in whole jobs: beside strict runs, with kills, restarts and bad numbers.

use std::sync::Arc;

use arrow::array::{ArrayRef, Float32Array, Int64Array, RecordBatch};
use millrace_datafs::Datafs;
use millrace_trainer::job::JobFile;
use millrace_trainer::strategy::{Backend, Strategy};
use millrace_trainer::{End, Error, TrainReport, train};
use tokio_util::sync::CancellationToken;

use super::{
    ROWS, WORKER_EXIT, home, job, job_text, parquet_bytes, rows, run, runtime, setup, signal, volume,
};

const FAST: &str = "strategy = \"allreduce\"";

fn trained(home: &std::path::Path, job: JobFile) -> TrainReport {
    run(setup(home), job, |_| {}).unwrap()
}

/// Losses of equal steps differ by rounding only.
fn assert_close(fast: &[f64], strict: &[f64], what: &str) {
    assert_eq!(fast.len(), strict.len(), "{what}");
    for (fast, strict) in fast.iter().zip(strict) {
        assert!((fast - strict).abs() < 1e-4, "{what}: {fast} instead of {strict}");
    }
}

#[test]
fn all_reduced_losses_are_those_of_strict_runs() {
    let home = home();
    let more = "epochs_max = 12\nvalidation = { dataset = \"data@v1:/train\", every_epochs = 4 }";
    let strict = trained(home.path(), job("strict", &format!("workers = 2\n{more}")));
    for workers in 1..=3 {
        let of =
            |name: &str| job(&format!("{name}{workers}"), &format!("workers = {workers}\n{more}\n{FAST}"));
        let fast = trained(home.path(), of("fast"));
        let what = format!("{workers} workers");
        assert_eq!((fast.end, fast.steps), (End::EpochsDone, strict.steps), "{what}");
        assert_eq!(fast.rows_per_epoch, [ROWS as u64; 12], "{what}");
        assert_close(&fast.loss_per_epoch, &strict.loss_per_epoch, &what);
        let validated = |report: &TrainReport| report.validation.iter().map(|e| e.loss).collect::<Vec<_>>();
        assert_close(&validated(&fast), &validated(&strict), &what);
        // The number of workers decides the bits, chance does not.
        let again = trained(home.path(), of("again"));
        assert_eq!((&again.model_sha256, &again.loss_per_epoch), (&fast.model_sha256, &fast.loss_per_epoch));
    }
}

#[test]
fn weights_of_labels_count_in_all_reduced_means() {
    let home = home();
    let classes: Vec<i64> =
        (0..ROWS as i64).map(|row| if row % 3 == 2 { -100 } else { row * 7 % 3 }).collect();
    let batch = rows(0..ROWS);
    let columns: [(&str, ArrayRef); 2] =
        [("pixels", Arc::clone(batch.column(0))), ("label", Arc::new(Int64Array::from(classes)))];
    let datafs = Datafs::open(home.path(), &millrace_datafs::Config::default()).unwrap();
    let bytes = parquet_bytes(&RecordBatch::try_from_iter(columns).unwrap());
    volume(&datafs, "data").write_file("ignored/a.parquet", &bytes).unwrap();
    datafs.snapshot_create(&"data".parse().unwrap(), &"more".parse().unwrap()).unwrap();
    // With batches of 2 rows, many have no weight at all.
    for (rows, epochs) in [(32, 6), (2, 2)] {
        let job = |name: &str, more: &str| {
            let more = format!(
                "epochs_max = {epochs}\nvirtual_shards = 2\n{more}\nloss = {{ kind = \"cross_entropy\", \
                 class_weights = [1.0, 2.5, 0.125], ignore_index = -100 }}"
            );
            let text = job_text(&format!("{name}-{rows}"), &more)
                .replace("data@v1:/train", "data@more:/ignored")
                .replace("batch_rows = 32", &format!("batch_rows = {rows}"));
            trained(home.path(), JobFile::parse(&text).unwrap())
        };
        let strict = job("strict", "workers = 1");
        let fast = job("fast", &format!("workers = 2\n{FAST}"));
        assert_close(&fast.loss_per_epoch, &strict.loss_per_epoch, &format!("batches of {rows}"));
        assert_eq!((fast.rows_per_epoch, fast.accuracy), (strict.rows_per_epoch, strict.accuracy));
    }
}

#[test]
fn a_killed_worker_costs_an_all_reduced_run_one_step() {
    let home = home();
    // Far more steps than are applied while a worker joins again.
    let more = "epochs_max = 600\ncheckpoint_every_steps = 700";
    let strict = trained(home.path(), job("strict", &format!("workers = 1\n{more}")));
    let mut blows = vec![(900, "STOP", 1), (500, "KILL", 0), (150, "KILL", 1)];
    let mut epoch_of_blow = 0;
    let job = job("battered", &format!("workers = 3\n{more}\n{FAST}"));
    let report = run(setup(home.path()), job, |seen| {
        let due = blows.last().is_some_and(|(step, ..)| seen.step >= *step);
        if due && seen.worker_pids.len() == 3 && seen.membership_epoch > epoch_of_blow {
            let (_, how, rank) = blows.pop().unwrap();
            epoch_of_blow = seen.membership_epoch;
            signal(how, seen.worker_pids[rank]);
        }
    })
    .unwrap();
    assert!(blows.is_empty(), "blows left: {blows:?}");
    assert_eq!(report.workers_lost, 3);
    assert_eq!(report.rows_per_epoch, vec![ROWS as u64; 600]);
    assert_close(&report.loss_per_epoch, &strict.loss_per_epoch, "after three kills");
}

/// A job whose gradient leaves in two buckets: the head and the second layer fill the first one.
fn wide(name: &str, more: &str) -> JobFile {
    let optimizer = "{ kind = \"sgd\", learning_rate = 0.05, momentum = 0.0, clip_norm = 1.0 }";
    let text = job_text(name, &format!("virtual_shards = 3\n{more}"))
        .replace("hidden = [12]", "hidden = [600, 600]")
        .replace("{ kind = \"adamw\", learning_rate = 0.01 }", optimizer);
    JobFile::parse(&text).unwrap()
}

#[test]
fn gradients_in_several_buckets_give_the_losses_of_strict_runs() {
    let home = home();
    // The norm of a clipped gradient is that of all buckets.
    let more = "epochs_max = 4\naccumulate_steps = 2\nfreeze = [\"dense1.bias\"]";
    let strict = trained(home.path(), wide("strict", &format!("workers = 1\n{more}")));
    for workers in 1..=3 {
        let of =
            |name: &str| wide(&format!("{name}{workers}"), &format!("workers = {workers}\n{more}\n{FAST}"));
        let fast = trained(home.path(), of("fast"));
        let what = format!("{workers} workers");
        assert_eq!((fast.steps, &fast.rows_per_epoch), (strict.steps, &strict.rows_per_epoch), "{what}");
        assert_close(&fast.loss_per_epoch, &strict.loss_per_epoch, &what);
        let again = trained(home.path(), of("again"));
        assert_eq!((&again.model_sha256, &again.loss_per_epoch), (&fast.model_sha256, &fast.loss_per_epoch));
    }
    // Buckets with gradients that overflow are summed and dropped, on all workers.
    let narrow = format!("workers = 2\nprecision = \"fp16\"\n{more}\n{FAST}");
    let narrow = trained(home.path(), wide("narrow", &narrow));
    assert_eq!(narrow.rows_per_epoch, strict.rows_per_epoch);
    for (found, expected) in narrow.loss_per_epoch.iter().zip(&strict.loss_per_epoch) {
        assert!((found - expected).abs() < 0.02, "fp16: {found} instead of {expected}");
    }
}

#[test]
fn a_worker_killed_among_several_buckets_costs_one_step() {
    let home = home();
    let more = "epochs_max = 12\ncheckpoint_every_steps = 1000";
    let strict = trained(home.path(), wide("strict", &format!("workers = 1\n{more}")));
    let mut is_killed = false;
    let job = wide("battered", &format!("workers = 3\n{more}\n{FAST}"));
    let report = run(setup(home.path()), job, |seen| {
        if !is_killed && seen.step >= 20 && seen.worker_pids.len() == 3 {
            is_killed = true;
            signal("KILL", seen.worker_pids[1]);
        }
    });
    let report = report.unwrap();
    assert!(is_killed && report.workers_lost == 1, "{report:?}");
    assert_eq!(report.rows_per_epoch, vec![ROWS as u64; 12]);
    assert_close(&report.loss_per_epoch, &strict.loss_per_epoch, "after a kill");
}

#[test]
fn all_reduced_runs_resume_and_no_strategy_continues_another() {
    let home = home();
    let of = |name: &str, workers: usize, epochs: u64, strategy: Strategy| {
        let job =
            job(name, &format!("workers = {workers}\nepochs_max = {epochs}\ncheckpoint_every_steps = 20"));
        JobFile { strategy, ..job }
    };
    let (strict, fast) = (Strategy::Strict, Strategy::Allreduce(Backend::Tcp));
    let whole = trained(home.path(), of("whole", 2, 12, fast));

    // Stopped in an epoch, continued by as many workers, then by fewer.
    let cancel = CancellationToken::new();
    let stopped =
        runtime().block_on(train(of("cut", 2, 12, fast), setup(home.path()), cancel.clone(), |seen| {
            if seen.step >= 33 {
                cancel.cancel();
            }
        }));
    let stopped = stopped.unwrap();
    assert_eq!((stopped.end, stopped.version), (End::Stopped, None));
    let cut = trained(home.path(), of("cut", 2, 12, fast));
    assert_eq!(cut.resumed_from_step, Some(stopped.steps));
    assert_eq!((&cut.model_sha256, &cut.loss_per_epoch), (&whole.model_sha256, &whole.loss_per_epoch));
    let longer = trained(home.path(), of("cut", 1, 15, fast));
    assert_eq!((longer.resumed_from_step, &longer.run), (Some(cut.steps), &cut.run));
    assert_eq!(longer.rows_per_epoch, [ROWS as u64; 15]);

    // Another strategy is another run of the job, in both directions.
    let changed = trained(home.path(), of("cut", 1, 15, strict));
    assert_eq!((changed.resumed_from_step, changed.version), (None, Some(3)));
    assert_ne!(changed.run, longer.run);
    assert_ne!(changed.model_sha256, longer.model_sha256);
    assert_close(&changed.loss_per_epoch, &longer.loss_per_epoch, "the other strategy");
    let back = trained(home.path(), of("cut", 2, 16, fast));
    assert_eq!((back.resumed_from_step, back.version), (Some(longer.steps), Some(4)));
}

#[test]
fn sums_beyond_floats_end_an_all_reduced_job_with_the_parameter() {
    let home = home();
    // Each row's gradient is a number; the sum over the rows is not.
    let columns: [(&str, ArrayRef); 2] = [
        ("pixels", Arc::clone(rows(0..ROWS).column(0))),
        ("label", Arc::new(Float32Array::from(vec![1.5e38f32; ROWS]))),
    ];
    let datafs = Datafs::open(home.path(), &millrace_datafs::Config::default()).unwrap();
    let bytes = parquet_bytes(&RecordBatch::try_from_iter(columns).unwrap());
    volume(&datafs, "data").write_file("huge/a.parquet", &bytes).unwrap();
    datafs.snapshot_create(&"data".parse().unwrap(), &"more".parse().unwrap()).unwrap();
    let text = job_text("huge", &format!("workers = 2\nloss = \"mse\"\nvirtual_shards = 2\n{FAST}"))
        .replace("data@v1:/train", "data@more:/huge")
        .replace("batch_rows = 32", "batch_rows = 2")
        .replace(&format!("classes = {}", super::CLASSES), "classes = 1")
        .replace("hidden = [12]", "hidden = []");
    let error = run(setup(home.path()), JobFile::parse(&text).unwrap(), |_| {}).unwrap_err();
    assert!(matches!(error, Error::Worker { exit_code: WORKER_EXIT, .. }), "{error:?}");
    let line = error.one_line();
    for word in ["step 0: parameter", "of the gradient is", "standardize_labels = true"] {
        assert!(line.contains(word), "{line:?} lacks {word:?}");
    }
}
