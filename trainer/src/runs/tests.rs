//! Tests of the list of runs against checkpoints in a volume.

use millrace_datafs::{Config, Datafs, VolumeSpec};
use serde_json::json;

use super::*;
use crate::checkpoint::{Checkpoints, Finish};
use crate::engine::{Param, ParamLayout};
use crate::optim::OptimizerState;
use crate::state::RunState;

const JOB: &str =
    "name = \"digits\"\ndataset = \"v@s:/train\"\nfeatures = \"x\"\nlabel = \"y\"\nmodel = \"m.onnx\"\n";

fn layout() -> ParamLayout {
    ParamLayout {
        params: vec![Param { name: "w".into(), shape: vec![64, 512], range: 0..64 * 512 }],
        states: vec![],
    }
}

/// The second epoch has the lowest loss.
fn evaluation(epoch: u64) -> Evaluation {
    let loss = if epoch == 2 { 0.25 } else { 0.5 };
    serde_json::from_value(json!({ "epoch": epoch, "step": epoch * 10, "rows": 50, "loss": loss })).unwrap()
}

/// A state after `epochs` epochs of ten steps, with falling losses.
fn state(epochs: u64) -> RunState {
    let records: Vec<_> = (1..=epochs)
        .map(|epoch| json!({ "rows": 640, "loss": 1.0 / epoch as f64, "accuracy": 0.5 }))
        .collect();
    let ledger = json!({ "epochs": records, "open": {}, "rows": 0, "correct": 0, "loss": 0.0 });
    RunState {
        step: epochs * 10,
        weights: vec![1.0; 64 * 512],
        optimizer: OptimizerState { step: epochs * 10, slots: vec![] },
        ledger: serde_json::from_value(ledger).unwrap(),
        fraction_bits: None,
        evaluations: (1..=epochs).map(evaluation).collect(),
        best: None,
        states: Vec::new(),
        best_states: Vec::new(),
        ema: None,
        loss_scale: None,
    }
}

#[test]
fn runs_are_listed_with_their_epochs_and_versions() {
    let home = tempfile::tempdir().unwrap();
    let datafs = Datafs::open(home.path(), &Config::default()).unwrap();
    datafs.volume_create(&"models".parse().unwrap()).unwrap();
    let view = datafs.view(&"models".parse::<VolumeSpec>().unwrap()).unwrap();
    assert_eq!(list(&view, None).unwrap(), []);
    let job = JobFile::parse(JOB).unwrap();
    let begin = |job_name: &str, run: &str| {
        let checkpoints = Checkpoints {
            view: view.clone(),
            job: job_name.into(),
            run: run.repeat(32),
            plan: "plan".into(),
            owner: "owner".into(),
            keep: 2,
        }
        .own();
        let job = JobFile { name: job_name.parse().unwrap(), ..job.clone() };
        checkpoints.begin(b"model", None, &serde_json::to_vec(&job).unwrap(), |_, _| false).unwrap();
        (checkpoints, job)
    };
    let (first, first_job) = begin("digits", "1a");
    for epochs in 1..=3 {
        let finish = (epochs == 3).then_some(Finish::EpochsDone);
        first.write(&state(epochs), &layout(), finish).unwrap();
    }
    let published = br#"{"version": 7, "model_sha256": "00"}"#;
    let key = publish::key_of(&first_job, &first.run, 30);
    view.publish(millrace_datafs::Publish::new().put_key(key, published.to_vec())).unwrap();
    let (second, _) = begin("digits", "2b");
    second.write(&state(1), &layout(), None).unwrap();
    begin("other", "3c");

    let all = list(&view, None).unwrap();
    let mut found: Vec<_> =
        all.iter().map(|run| (run.job.as_str(), &run.run[..2], run.step, run.finished)).collect();
    // A run of the same job is begun later by the clock as well; that of another job may share a second.
    found.sort_unstable();
    let runs = list(&view, Some("digits")).unwrap();
    assert_eq!(found, [("digits", "1a", 30, true), ("digits", "2b", 10, false), ("other", "3c", 0, false)]);
    assert_eq!(runs[0].checkpoints, [20, 30]);
    assert_eq!(runs[0].epochs.iter().map(|epoch| epoch.loss).collect::<Vec<_>>(), [1.0, 0.5, 1.0 / 3.0]);
    assert_eq!((&runs[0].versions[..], &runs[1].versions[..]), (&[7][..], &[][..]));
    assert_eq!(runs[0].evaluations, (1..=3).map(evaluation).collect::<Vec<_>>());
    assert_eq!(runs[0].best().map(|best| best.epoch), Some(2));
    assert_eq!(runs[0].settings["batch_rows"], 64);
    assert_eq!(runs.iter().map(|run| &run.run[..2]).collect::<Vec<_>>(), ["1a", "2b"]);
    assert_eq!(list(&view, Some("dig")).unwrap(), []);

    // A publication that cannot be read hides neither its run nor the others.
    let damaged = publish::key_of(&first_job, &first.run, 20);
    view.publish(millrace_datafs::Publish::new().put_key(damaged, b"{".to_vec())).unwrap();
    assert_eq!(list(&view, Some("digits")).unwrap()[0].versions, [7]);
    // The version of a checkpoint that is gone: the run went on with a larger budget.
    for epochs in 4..=5 {
        first.write(&state(epochs), &layout(), None).unwrap();
    }
    let runs = list(&view, Some("digits")).unwrap();
    assert_eq!((&runs[0].checkpoints[..], &runs[0].versions[..]), (&[40, 50][..], &[7][..]));
    // Without evaluations, the rows say when epochs ended.
    assert_eq!(ends(&runs[0].epochs, &[], &first_job), [10, 20, 30, 40, 50]);
    // A run of format 1 hides no other.
    let former = "trainer/digits/checkpoint".to_owned();
    view.publish(millrace_datafs::Publish::new().put_key(former, b"{}".to_vec())).unwrap();
    assert_eq!(list(&view, Some("digits")).unwrap().len(), 2);

    // The newest checkpoint is damaged: the one before it tells the history.
    view.write_file(
        &format!("checkpoints/digits/{}/000000000050/state.safetensors", "1a".repeat(8)),
        b"short",
    )
    .unwrap();
    assert_eq!(list(&view, Some("digits")).unwrap()[0].step, 40);
    // A record of a newer program does not hide the others.
    let key = format!("trainer/digits/checkpoint/{}", "4d".repeat(32));
    view.publish(millrace_datafs::Publish::new().put_key(key, b"{\"format_version\": 9}".to_vec())).unwrap();
    assert_eq!(list(&view, None).unwrap().len(), 3);
}
