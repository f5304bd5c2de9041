//! Tests of jobs that train on a part of a dataset, and of epochs that take a part of the rows.

use std::path::Path;

use millrace_datafs::Datafs;
use millrace_streams::dataset::DatasetSpec;
use millrace_streams::feed::{PlanOptions, Selection};
use millrace_trainer::job::JobFile;
use millrace_trainer::{End, TrainReport};

use super::{ROWS, bundle, home, job, job_text, run, runtime, setup, signal, versions};

const SPLIT: &str = "where = \"label != 2\"\nsplits = { train = 0.75, test = 0.25 }\nsplit = \"train\"\n";

fn trained(home: &Path, name: &str, more: &str) -> TrainReport {
    run(setup(home), job(name, more), |_| {}).unwrap()
}

/// How many rows of the dataset a selection has, by the feed.
fn rows_of(home: &Path, part: &str) -> u64 {
    let parts = [("train".to_owned(), "0.75".to_owned()), ("test".to_owned(), "0.25".to_owned())];
    let selection = Selection::new(Some("label != 2"), &parts, Some(part), &[]).unwrap();
    let datafs = Datafs::open(home, &millrace_datafs::Config::default()).unwrap();
    let spec: DatasetSpec = "data@v1:/train".parse().unwrap();
    runtime().block_on(async {
        let dataset = spec.open(&datafs).await.unwrap();
        dataset.plan(&PlanOptions { selection, ..PlanOptions::default() }).await.unwrap().rows()
    })
}

#[test]
fn a_job_trains_on_one_part_and_validates_on_the_other() {
    let home = home();
    let (train, test) = (rows_of(home.path(), "train"), rows_of(home.path(), "test"));
    assert!(train > 2 * test && test > 10, "{train} {test}");
    assert_eq!(train + test, (0..ROWS).filter(|row| row * 7 % 3 != 2).count() as u64);
    let more = |workers: usize| {
        format!("{SPLIT}workers = {workers}\nepochs_max = 40\n[validation]\nsplit = \"test\"\nbest = true")
    };
    let plain = trained(home.path(), "w1", &more(1));
    assert_eq!(plain.end, End::EpochsDone);
    assert_eq!(plain.rows_per_epoch, vec![train; 40]);
    assert_eq!(plain.steps, (40 * train).div_ceil(32));
    assert!(plain.validation.iter().all(|found| found.rows == test), "{:?}", plain.validation);
    assert!(plain.validation.last().unwrap().accuracy.unwrap() > 0.95, "{:?}", plain.validation.last());
    let published = bundle(home.path(), "w1", 1);
    let lineage = &published.manifest().lineage;
    let selection = &lineage.selection;
    assert!(selection.contains("\"label\" != 2") && selection.contains("split \"train\""), "{selection}");
    assert_eq!(published.statistics().unwrap().unwrap().rows, train);

    // Kills change nothing: rows are still counted once per epoch, by their ids.
    let mut kills = vec![60, 20];
    let mut epoch_of_kill = 0;
    let battered = run(setup(home.path()), job("w3", &more(3)), |seen| {
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
    assert_eq!(battered.rows_per_epoch, plain.rows_per_epoch);
    assert_eq!((battered.model_sha256, battered.validation), (plain.model_sha256, plain.validation));

    // Another part, condition or order of the parts is another run.
    for (from, to) in [
        ("split = \"train\"", "split = \"test\""),
        ("label != 2", "label != 1"),
        ("{ train = 0.75, test = 0.25 }", "{ test = 0.25, train = 0.75 }"),
    ] {
        let text = job_text("w1", &format!("{SPLIT}workers = 1\nepochs_max = 1")).replace(from, to);
        let other = run(setup(home.path()), JobFile::parse(&text).unwrap(), |_| {}).unwrap();
        assert!(other.run != plain.run && other.resumed_from_step.is_none(), "{to}");
    }
    // Raising the budget goes on with the run.
    let longer = trained(home.path(), "w1", &more(1).replace("epochs_max = 40", "epochs_max = 41"));
    assert_eq!((longer.run, longer.resumed_from_step), (plain.run, Some(plain.steps)));
}

#[test]
fn epochs_of_a_part_of_the_rows_take_all_rows_in_turn() {
    let home = home();
    let more = |workers: usize, epochs: u64, length: &str| {
        format!("workers = {workers}\nepochs_max = {epochs}\ncheckpoint_every_steps = 3\n{length}")
    };
    let quarters = trained(home.path(), "quarters", &more(1, 8, "rows_per_epoch = 0.25"));
    assert_eq!(quarters.rows_per_epoch, [75, 75, 75, 76, 75, 75, 75, 76]);
    // Eight quarters are two passes: the same steps on the same rows.
    let whole = trained(home.path(), "whole", &more(2, 2, ""));
    assert_eq!((quarters.steps, &quarters.model_sha256), (whole.steps, &whole.model_sha256));
    assert_ne!(quarters.run, whole.run);

    // Epochs that cross the end of a pass, resumed after stops, by another number of workers.
    let hundred = trained(home.path(), "hundred", &more(1, 7, "rows_per_epoch = 100"));
    assert_eq!((hundred.rows_per_epoch.as_slice(), hundred.steps), (&[100; 7][..], 22));
    let mut stops = 0;
    let stopped = loop {
        let cancel = tokio_util::sync::CancellationToken::new();
        let workers = stops % 3 + 1;
        let job = job("stopped", &more(workers, 7, "rows_per_epoch = 100"));
        let mut first = None;
        let training = millrace_trainer::train(job, setup(home.path()), cancel.clone(), |seen| {
            let first = *first.get_or_insert(seen.step);
            if stops < 3 && seen.step > first {
                cancel.cancel();
            }
        });
        let report = runtime().block_on(training).unwrap();
        if report.end != End::Stopped {
            break report;
        }
        stops += 1;
    };
    assert_eq!(
        (stopped.rows_per_epoch, stopped.model_sha256),
        (hundred.rows_per_epoch, hundred.model_sha256)
    );
}

#[test]
fn selections_that_cannot_work_are_refused_before_workers_start() {
    let home = home();
    let validation = "\n[validation]\n";
    for (more, words) in [
        ("where = \"lable = 3\"".to_owned(), vec!["data@v1:/train", "\"lable\"", "pixels, label"]),
        ("where = \"label > 3\"".to_owned(), vec!["data@v1:/train", "none of its 301 rows", "\"label\" > 3"]),
        ("where = \"label = 'x'\"".to_owned(), vec!["\"label\" is Int64", "'x'"]),
        (format!("{SPLIT}split_by = \"pixels\""), vec!["pixels"]),
        ("rows_per_epoch = 302".to_owned(), vec!["rows_per_epoch is 302", "301 rows"]),
        (
            format!("{SPLIT}{validation}split = \"test\"\nwhere = \"label > 3\""),
            vec!["validation dataset data@v1:/train", "none of its 301 rows"],
        ),
    ] {
        let job = JobFile::parse(&job_text("bad", &more)).unwrap();
        let line = run(setup(home.path()), job, |_| panic!("{more} started")).unwrap_err().one_line();
        for word in words {
            assert!(line.contains(word), "{line:?} lacks {word:?}");
        }
    }
    assert_eq!(versions(home.path()), 0);
}
