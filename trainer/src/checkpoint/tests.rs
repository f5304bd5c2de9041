//! Tests of checkpoints in a volume: retention, adoption of format 1, and fencing of writers.

mod kills;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use millrace_datafs::{Config, Datafs, VolumeSpec};

use super::{
    CheckpointEntry, Checkpoints, FINISHED_RUNS_KEPT, Finish, MANIFEST_FILE, RunRecord, STATE_FILE,
    UNFINISHED_RUNS_KEPT, directory,
};
use crate::engine::{Param, ParamLayout};
use crate::ledger::Ledger;
use crate::optim::OptimizerState;
use crate::state::RunState;
use crate::validation::Evaluation;

fn layout() -> ParamLayout {
    // Larger than what the metadata stores inline.
    ParamLayout {
        params: vec![Param { name: "w".into(), shape: vec![64, 512], range: 0..64 * 512 }],
        states: vec![],
    }
}

fn state(step: u64) -> RunState {
    let weights = (0..64 * 512).map(|i| (i as f32 + step as f32).sin()).collect();
    let optimizer = OptimizerState { step, slots: vec![] };
    let ledger = Ledger::default();
    RunState {
        step,
        weights,
        optimizer,
        ledger,
        fraction_bits: None,
        evaluations: Vec::new(),
        best: None,
        states: Vec::new(),
        best_states: Vec::new(),
        ema: None,
        loss_scale: None,
    }
}

fn datafs(home: &Path) -> Datafs {
    let config = Config { gc_interval_ms: 0, garbage_grace_ms: 0, ..Config::default() };
    let datafs = Datafs::open(home, &config).unwrap();
    // In the test's second process the volume exists already.
    let _ = datafs.volume_create(&"models".parse().unwrap());
    datafs
}

fn checkpoints(datafs: &Datafs, run: &str) -> Checkpoints {
    Checkpoints {
        view: datafs.view(&"models".parse::<VolumeSpec>().unwrap()).unwrap(),
        job: "job".into(),
        run: run.repeat(16),
        plan: "plan".into(),
        owner: "owner".into(),
        keep: 2,
    }
    .own()
}

fn newest(checkpoints: &Checkpoints, up_to: u64) -> Option<u64> {
    let found = checkpoints.newest(&layout(), |state| state.step <= up_to).unwrap();
    if let Some(found) = &found {
        assert_eq!(found.weights, state(found.step).weights);
    }
    found.map(|found| found.step)
}

fn folders(checkpoints: &Checkpoints) -> Vec<String> {
    checkpoints.view.list(&checkpoints.folder()).unwrap().into_iter().map(|entry| entry.name).collect()
}

#[test]
fn checkpoints_of_a_larger_budget_stay_while_a_smaller_one_runs() {
    let mut record = RunRecord::new("r");
    let add = |record: &mut RunRecord, step: u64| -> Vec<u64> {
        record.insert(CheckpointEntry { step, folder: step.to_string(), sha256: None });
        record.prune(step, 2).into_iter().map(|kept| kept.step).collect()
    };
    assert!(add(&mut record, 100).is_empty());
    assert!(add(&mut record, 200).is_empty());
    assert_eq!(add(&mut record, 300), [100]);
    for (step, dropped) in [(10, vec![]), (20, vec![]), (30, vec![10]), (250, vec![20, 30])] {
        assert_eq!(add(&mut record, step), dropped);
    }
    let steps: Vec<u64> = record.kept.iter().map(|kept| kept.step).collect();
    assert_eq!(steps, [200, 250, 300]);
}

fn objects(home: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut folders = vec![home.join("datafs/objects")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.metadata().unwrap().len() > 64 << 10 {
                found.insert(path);
            }
        }
    }
    found
}

#[test]
fn damaged_checkpoint_is_skipped() {
    let home = tempfile::tempdir().unwrap();
    let run = checkpoints(&datafs(home.path()), "r");
    run.begin(b"model", None, b"{}", |_, _| false).unwrap();
    run.write(&state(10), &layout(), None).unwrap();
    let first = objects(home.path());
    run.write(&state(20), &layout(), None).unwrap();
    assert_eq!(newest(&run, 99), Some(20));
    drop(run);
    let second: Vec<PathBuf> = objects(home.path()).difference(&first).cloned().collect();
    let flip = |path: &Path| {
        let mut bytes = std::fs::read(path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(path, bytes).unwrap();
    };
    assert_eq!((first.len(), second.len()), (1, 1));
    flip(&second[0]);
    let run = checkpoints(&datafs(home.path()), "r");
    assert_eq!(newest(&run, 99), Some(10));
    first.iter().for_each(|path| flip(path));
    assert_eq!(newest(&checkpoints(&datafs(home.path()), "r"), 99), None);
    // The steps are trained again and their checkpoints rewritten.
    run.write(&state(10), &layout(), None).unwrap();
    run.write(&state(20), &layout(), None).unwrap();
    assert_eq!(newest(&run, 99), Some(20));
    // Another program has put something else in its place.
    let (_, record) = run.run_record().unwrap().unwrap();
    let path = format!("{}/{}/{STATE_FILE}", run.folder(), record.kept[1].folder);
    run.view.remove_file(&path).unwrap();
    run.view.create_dir_all(&path).unwrap();
    assert_eq!(newest(&run, 99), Some(10));
}

#[test]
fn a_deposed_coordinator_and_its_workers_write_nothing() {
    let home = tempfile::tempdir().unwrap();
    let datafs = datafs(home.path());
    let run = checkpoints(&datafs, "r");
    run.begin(b"model", None, b"{}", |_, _| false).unwrap();
    run.write(&state(10), &layout(), None).unwrap();
    let next = Checkpoints { owner: "next".into(), ..run.clone() }.own();
    let before = run.run_record().unwrap();
    let refused = |result: crate::error::Result<()>| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("taken it over"), "{error}");
        assert_eq!(run.run_record().unwrap(), before);
    };
    refused(run.write(&state(20), &layout(), Some(Finish::EpochsDone)));
    refused(run.write_if_newest(&state(20), &layout(), |_| true));
    refused(run.begin(b"another", None, b"{}", |_, _| false));
    next.write(&state(20), &layout(), None).unwrap();
    assert_eq!(newest(&next, 99), Some(20));
}

#[test]
fn a_leaving_worker_that_is_behind_changes_no_checkpoint() {
    let home = tempfile::tempdir().unwrap();
    let run = checkpoints(&datafs(home.path()), "r");
    run.begin(b"model", None, b"{}", |_, _| false).unwrap();
    run.write_if_newest(&state(10), &layout(), |_| true).unwrap();
    assert_eq!(newest(&run, 99), Some(10));
    run.write(&state(20), &layout(), None).unwrap();
    let before = run.run_record().unwrap().unwrap().0;
    run.write_if_newest(&state(15), &layout(), |_| true).unwrap();
    run.write_if_newest(&state(20), &layout(), |_| true).unwrap();
    assert_eq!(run.run_record().unwrap().unwrap().0, before);
    // Evaluations count as well.
    run.write_if_newest(&evaluated(20), &layout(), |_| true).unwrap();
    assert_ne!(run.run_record().unwrap().unwrap().0, before);
}

/// A state with an evaluation after its last step.
fn evaluated(step: u64) -> RunState {
    let evaluation = Evaluation {
        epoch: 1,
        step,
        rows: 8,
        loss: 0.5,
        accuracy: None,
        top_k: None,
        mae: None,
        auc: None,
        perplexity: None,
    };
    RunState { evaluations: vec![evaluation], ..state(step) }
}

#[test]
fn a_leaving_worker_compares_itself_with_usable_checkpoints_only() {
    let home = tempfile::tempdir().unwrap();
    let run = checkpoints(&datafs(home.path()), "r");
    run.begin(b"model", None, b"{}", |_, _| false).unwrap();
    run.write(&state(400), &layout(), Some(Finish::EpochsDone)).unwrap();
    // One of a larger budget.
    run.write_if_newest(&state(15), &layout(), |found| found.step <= 100).unwrap();
    assert_eq!(newest(&run, 100), Some(15));
    // A damaged one.
    let folder = run.run_record().unwrap().unwrap().1.kept[0].folder.clone();
    let path = format!("{}/{folder}/{STATE_FILE}", run.folder());
    run.view.write_file(&path, b"damaged").unwrap();
    assert_eq!(newest(&run, 100), None);
    run.write_if_newest(&state(12), &layout(), |found| found.step <= 100).unwrap();
    assert_eq!(newest(&run, 100), Some(12));
    run.write_if_newest(&state(15), &layout(), |found| found.step <= 100).unwrap();
    assert_eq!(newest(&run, 100), Some(15));
}

#[test]
fn a_late_write_does_not_undo_the_end() {
    let home = tempfile::tempdir().unwrap();
    let run = checkpoints(&datafs(home.path()), "r");
    run.begin(b"model", None, b"{}", |_, _| false).unwrap();
    let record = || run.run_record().unwrap().unwrap().1;
    run.write(&evaluated(20), &layout(), Some(Finish::EpochsDone)).unwrap();
    run.write(&state(10), &layout(), None).unwrap();
    assert!(record().finished);
    run.write(&state(20), &layout(), None).unwrap();
    assert!(record().finished);
    let newest = || run.newest(&layout(), |_| true).unwrap().unwrap();
    assert_eq!((newest().step, newest().evaluations.len()), (20, 1));
    // A larger budget goes on, and its stop is no end.
    run.write(&state(30), &layout(), None).unwrap();
    assert!(!record().finished);
    // A smaller one ends.
    run.write(&state(5), &layout(), Some(Finish::Converged)).unwrap();
    assert!(record().finished);
}

#[test]
fn a_file_that_another_mount_deletes_meanwhile_is_no_error() {
    let home = tempfile::tempdir().unwrap();
    let run = checkpoints(&datafs(home.path()), "r");
    run.begin(b"model", None, b"{}", |_, _| false).unwrap();
    run.write(&state(10), &layout(), None).unwrap();
    let kept = run.run_record().unwrap().unwrap().1.kept[0].clone();
    let publish = run.drop_checkpoint(millrace_datafs::Publish::new(), &kept);
    run.view.remove_file(&format!("{}/{}/{MANIFEST_FILE}", run.folder(), kept.folder)).unwrap();
    let error = run.view.publish(publish).unwrap_err();
    assert!(error.is_not_found(), "{error}");
    run.on_conflict(error).unwrap();
    // The next attempt leaves the file out.
    let again = run.drop_checkpoint(millrace_datafs::Publish::new(), &kept);
    run.view.publish(again).unwrap();
}

#[test]
fn empty_folders_of_a_killed_process_are_removed_at_the_next_start() {
    let home = tempfile::tempdir().unwrap();
    let datafs = datafs(home.path());
    let run = checkpoints(&datafs, "r");
    run.begin(b"model", None, b"{}", |_, _| false).unwrap();
    run.write(&state(10), &layout(), None).unwrap();
    let own = format!("{}/{}", run.folder(), directory(&run.run));
    let names = || -> Vec<String> {
        let entries = run.view.list(&own).unwrap();
        entries.into_iter().map(|entry| entry.name).filter(|name| name.starts_with('0')).collect()
    };
    run.view.create_dir_all(&format!("{own}/000000000005")).unwrap();
    // A folder with a file of somebody stays.
    run.view.write_file(&format!("{own}/000000000006/notes"), b"mine").unwrap();
    assert_eq!(names().len(), 3);
    checkpoints(&datafs, "r").begin(b"model", None, b"{}", |_, _| false).unwrap();
    assert_eq!(names(), ["000000000006", "000000000010"]);
    assert_eq!(newest(&run, 99), Some(10));
}

#[test]
fn removed_checkpoints_free_their_space_without_the_background_collection() {
    let home = tempfile::tempdir().unwrap();
    let run = checkpoints(&datafs(home.path()), "r");
    run.begin(b"model", None, b"{}", |_, _| false).unwrap();
    for step in 1..=12 {
        run.write(&state(step), &layout(), None).unwrap();
        let there = objects(home.path()).len();
        assert!(there <= run.keep, "{there} checkpoints on disk after step {step}");
    }
}

/// Begins a run with one checkpoint at the given time.
fn begin(datafs: &Datafs, run: &str, finish: Option<Finish>, begun: i64) -> Checkpoints {
    let run = checkpoints(datafs, run);
    run.begin(b"model", None, b"{}", |_, _| false).unwrap();
    run.write(&state(5), &layout(), finish).unwrap();
    let (_, mut record) = run.run_record().unwrap().unwrap();
    record.begun = begun;
    run.view.publish(millrace_datafs::Publish::new().put_key(run.key(), record.value())).unwrap();
    run
}

#[test]
fn oldest_finished_runs_of_a_job_are_removed() {
    let home = tempfile::tempdir().unwrap();
    let datafs = datafs(home.path());
    let begin = |run: &str, finish: Option<Finish>, begun: i64| begin(&datafs, run, finish, begun);
    let unfinished = begin("u", None, 1);
    // A run that never wrote a checkpoint.
    checkpoints(&datafs, "e").begin(b"model", None, b"{}", |_, _| false).unwrap();
    let finished: Vec<Checkpoints> = ["a", "b", "c", "d", "f"]
        .iter()
        .zip(2..)
        .map(|(run, begun)| begin(run, Some(Finish::EpochsDone), begun))
        .collect();
    let last = checkpoints(&datafs, "z");
    last.begin(b"model", None, b"{}", |_, _| false).unwrap();
    assert_eq!(newest(&unfinished, 9), Some(5));
    assert_eq!(newest(&last, 9), None);
    let kept: Vec<bool> = finished.iter().map(|run| newest(run, 9).is_some()).collect();
    assert_eq!(kept, [false, false, true, true, true]);
    assert_eq!(folders(&last).len(), FINISHED_RUNS_KEPT + 2);
    assert!(!folders(&last).contains(&"e".repeat(16)));
}

#[test]
fn newest_unfinished_runs_of_a_job_are_kept() {
    let home = tempfile::tempdir().unwrap();
    let datafs = datafs(home.path());
    let finished = begin(&datafs, "f", Some(Finish::EpochsDone), 1);
    let names = ["a", "b", "c", "d", "e"];
    let unfinished: Vec<Checkpoints> =
        names.iter().zip(2..).map(|(run, begun)| begin(&datafs, run, None, begun)).collect();
    let last = checkpoints(&datafs, "z");
    last.begin(b"model", None, b"{}", |_, _| false).unwrap();
    let kept: Vec<bool> = unfinished.iter().map(|run| newest(run, 9).is_some()).collect();
    assert_eq!(kept, [false, false, true, true, true]);
    assert_eq!(newest(&finished, 9), Some(5));
    assert_eq!(folders(&last).len(), UNFINISHED_RUNS_KEPT + 2);
    // A run that is begun again counts as the newest.
    unfinished[2].begin(b"model", None, b"{}", |_, _| false).unwrap();
    assert_eq!(newest(&unfinished[2], 9), Some(5));
    assert!(unfinished[3..].iter().all(|run| newest(run, 9).is_some()));
}

#[test]
fn runs_keep_their_order_when_the_clock_is_set_back() {
    let home = tempfile::tempdir().unwrap();
    let datafs = datafs(home.path());
    let first = begin(&datafs, "a", None, i64::from(u32::MAX));
    let later: Vec<Checkpoints> = ["b", "c", "d", "e"]
        .into_iter()
        .map(|run| {
            let run = checkpoints(&datafs, run);
            run.begin(b"model", None, b"{}", |_, _| false).unwrap();
            run.write(&state(5), &layout(), None).unwrap();
            run
        })
        .collect();
    checkpoints(&datafs, "z").begin(b"model", None, b"{}", |_, _| false).unwrap();
    assert_eq!(newest(&first, 9), None);
    let kept: Vec<bool> = later.iter().map(|run| newest(run, 9).is_some()).collect();
    assert_eq!(kept, [false, true, true, true]);
}

/// Deleting the named directories removes the run and nothing else.
#[test]
fn run_owns_its_directories_and_those_of_format_1() {
    let home = tempfile::tempdir().unwrap();
    let run = checkpoints(&datafs(home.path()), "r");
    let mut record = RunRecord::new(&run.run);
    for folder in ["000000000100", "rrrrrrrrrrrrrrrr/000000000200"] {
        record.insert(CheckpointEntry {
            step: record.kept.len() as u64,
            folder: folder.into(),
            sha256: None,
        });
    }
    let places = run.locations(record.folders());
    assert_eq!(places, "models:/checkpoints/job/rrrrrrrrrrrrrrrr, models:/checkpoints/job/000000000100");
}
