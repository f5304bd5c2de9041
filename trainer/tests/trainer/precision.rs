//! Tests of `precision = "bf16"` and `"fp16"` in whole jobs: beside jobs of 32 bits, with kills, restarts and numbers
//! beyond fp16.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, Float32Array, RecordBatch};
use millrace_datafs::Datafs;
use millrace_trainer::job::JobFile;
use millrace_trainer::precision::Precision;
use millrace_trainer::{End, Error, TrainReport, train};
use tokio_util::sync::CancellationToken;

use super::{
    CLASSES, ROWS, WORKER_EXIT, home, job, job_text, parquet_bytes, rows, run, runtime, setup, signal, volume,
};

fn trained(home: &Path, job: JobFile) -> TrainReport {
    run(setup(home), job, |_| {}).unwrap()
}

fn assert_near(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 0.02, "{what}: {found} instead of {expected}");
    }
}

#[test]
fn narrow_jobs_give_one_model_for_any_number_of_workers_and_kills() {
    let home = home();
    let more = "epochs_max = 40\ncheckpoint_every_steps = 90";
    let exact = trained(home.path(), job("fp32", &format!("workers = 1\n{more}")));
    // Gradients of fp16 overflow with the first scales of the loss.
    for precision in ["bf16", "fp16"] {
        let of = |name: &str, workers: usize| {
            job(name, &format!("workers = {workers}\nprecision = \"{precision}\"\n{more}"))
        };
        let plain = trained(home.path(), of(&format!("{precision}-plain"), 1));
        assert_ne!(plain.model_sha256, exact.model_sha256, "{precision}");
        assert_near(&plain.loss_per_epoch, &exact.loss_per_epoch, precision);
        assert_eq!(plain.rows_per_epoch, [ROWS as u64; 40], "{precision}");

        let mut kills = vec![(260, 0), (120, 2)];
        let mut epoch_of_kill = 0;
        let battered = of(&format!("{precision}-battered"), 3);
        let report = run(setup(home.path()), battered, |seen| {
            let due = kills.last().is_some_and(|(step, _)| seen.step >= *step);
            // The job may end before a third worker is back.
            let workers = seen.worker_pids.len();
            if due && workers > 1 && seen.membership_epoch > epoch_of_kill {
                let (_, rank) = kills.pop().unwrap();
                epoch_of_kill = seen.membership_epoch;
                signal("KILL", seen.worker_pids[rank % workers]);
            }
        });
        let report = report.unwrap();
        assert!(kills.is_empty(), "{precision}: kills left: {kills:?}");
        let figures = |report: &TrainReport| (report.model_sha256.clone(), report.loss_per_epoch.clone());
        assert_eq!(figures(&report), figures(&plain), "{precision}");
    }
}

#[test]
fn narrow_jobs_resume_and_no_precision_continues_another() {
    let home = home();
    let of = |name: &str, workers: usize, precision: Precision| {
        let job = job(name, &format!("workers = {workers}\nepochs_max = 12\ncheckpoint_every_steps = 20"));
        JobFile { precision, ..job }
    };
    let whole = trained(home.path(), of("whole", 1, Precision::Fp16));
    let cancel = CancellationToken::new();
    let half = of("cut", 2, Precision::Fp16);
    let stopped = runtime().block_on(train(half, setup(home.path()), cancel.clone(), |seen| {
        if seen.step >= 33 {
            cancel.cancel();
        }
    }));
    let stopped = stopped.unwrap();
    assert_eq!((stopped.end, stopped.version), (End::Stopped, None));
    let cut = trained(home.path(), of("cut", 3, Precision::Fp16));
    assert_eq!(cut.resumed_from_step, Some(stopped.steps));
    assert_eq!((&cut.model_sha256, &cut.loss_per_epoch), (&whole.model_sha256, &whole.loss_per_epoch));
    let other = trained(home.path(), of("cut", 1, Precision::Fp32));
    assert_eq!((other.resumed_from_step, other.version), (None, Some(2)));
    assert_ne!(other.run, cut.run);
}

#[test]
fn all_reduced_narrow_jobs_repeat_steps_that_overflow() {
    let home = home();
    let more = "workers = 2\nstrategy = \"allreduce\"\nepochs_max = 12";
    let exact = trained(home.path(), job("fp32", more));
    for precision in ["bf16", "fp16"] {
        let narrow = job(precision, &format!("{more}\nprecision = \"{precision}\""));
        let narrow = trained(home.path(), narrow);
        assert_eq!(
            (narrow.steps, &narrow.rows_per_epoch),
            (exact.steps, &exact.rows_per_epoch),
            "{precision}"
        );
        assert_near(&narrow.loss_per_epoch, &exact.loss_per_epoch, precision);
    }
}

#[test]
fn numbers_beyond_fp16_end_the_job_with_the_remedy() {
    let home = home();
    // The slope of the loss is beyond fp16 with any scale.
    let columns: [(&str, ArrayRef); 2] = [
        ("pixels", Arc::clone(rows(0..ROWS).column(0))),
        ("label", Arc::new(Float32Array::from(vec![1e6f32; ROWS]))),
    ];
    let datafs = Datafs::open(home.path(), &millrace_datafs::Config::default()).unwrap();
    let bytes = parquet_bytes(&RecordBatch::try_from_iter(columns).unwrap());
    volume(&datafs, "data").write_file("large/a.parquet", &bytes).unwrap();
    datafs.snapshot_create(&"data".parse().unwrap(), &"more".parse().unwrap()).unwrap();
    let of = |precision: &str| {
        let more = format!("workers = 2\nloss = \"mse\"\nepochs_max = 1\nprecision = \"{precision}\"");
        let text = job_text(precision, &more)
            .replace("data@v1:/train", "data@more:/large")
            .replace(&format!("classes = {CLASSES}"), "classes = 1");
        run(setup(home.path()), JobFile::parse(&text).unwrap(), |_| {})
    };
    let error = of("fp16").unwrap_err();
    assert!(matches!(error, Error::Worker { exit_code: WORKER_EXIT, .. }), "{error:?}");
    let line = error.one_line();
    for word in ["step 0: parameter", "precision = \"bf16\""] {
        assert!(line.contains(word), "{line:?} lacks {word:?}");
    }
    of("bf16").unwrap();
}
