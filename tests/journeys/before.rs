//! Tests of a home that an earlier version wrote (`tests/fixtures/make-home` documents how). The program
//! opens, checks, reads, writes and continues training on it.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

use crate::support::{Home, files_below, project};

/// Key of the encrypted volume.
const KEY: &str = "0000000000000000000000000000000000000000000000000000000000000007";

fn unpacked() -> Home {
    let home = Home::new();
    let archive = project().join("tests/fixtures/home.tar.gz");
    let unpacked = Command::new("tar").arg("-xpzf").arg(archive).arg("-C").arg(home.dir.path()).status();
    assert!(unpacked.unwrap().success());
    home
}

fn run(home: &Home, args: &[&str]) -> Output {
    let output = home.command().env("VOLUME_KEY", KEY).args(args).arg("--json").output().unwrap();
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {printed}");
    output
}

fn json(home: &Home, args: &[&str]) -> Value {
    serde_json::from_slice(&run(home, args).stdout).unwrap()
}

/// Copies a folder out of a volume and returns its file names and contents.
fn copied(home: &Home, from: &str) -> BTreeMap<String, Vec<u8>> {
    let to = home.dir.path().join("copy");
    std::fs::remove_dir_all(&to).ok();
    run(home, &["cp", "-r", from, to.to_str().unwrap()]);
    assert_eq!(std::fs::read_link(to.join("sub/soft")).unwrap(), Path::new("../small-2"));
    let names = ["empty", "large", "small-1", "small-2", "small-3", "sub/hard"];
    names.map(|name| (name.to_owned(), std::fs::read(to.join(name)).unwrap())).into()
}

#[test]
fn volumes_of_earlier_release_are_read_and_written() {
    let home = unpacked();
    let first = run(&home, &["volume", "list"]);
    // The fixture's home was open to other users.
    let notes = String::from_utf8_lossy(&first.stderr).into_owned();
    assert!(notes.contains("was open to other users"), "{notes}");
    run(&home, &["fsck", "--scrub"]);
    let line = b"a line of a large file\n".repeat(3_000_000 / 23 + 1);
    for from in ["v@first:/files", "v:/files", "sealed@first:/files", "sealed:/files"] {
        let files = copied(&home, from);
        assert!(files["large"] == line[..3_000_000] && files["empty"].is_empty(), "{from}");
        assert_eq!((&files["small-1"], &files["sub/hard"]), (&b"small 1\n".to_vec(), &b"small 1\n".to_vec()));
        let changed: &[u8] = if from == "v@first:/files" { b"small 2\n" } else { b"changed since\n" };
        assert_eq!(files["small-2"], changed, "{from}");
    }
    // Writes, snapshots and collects garbage beside the earlier data.
    for volume in ["v", "sealed"] {
        let file = home.file("new", "new text");
        run(&home, &["cp", file.to_str().unwrap(), &format!("{volume}:/files/small-1")]);
        run(&home, &["snapshot", "create", &format!("{volume}@second")]);
        run(&home, &["snapshot", "delete", &format!("{volume}@first")]);
        run(&home, &["gc"]);
        run(&home, &["compact", volume]);
        let files = copied(&home, &format!("{volume}@second:/files"));
        assert!(files["small-1"] == b"new text" && files["sub/hard"] == b"small 1\n", "{volume}");
        assert_eq!(files["large"].len(), 3_000_000);
    }
    run(&home, &["fsck", "--scrub"]);
}

#[test]
fn topics_of_earlier_release_are_read_and_ingest_continues_at_its_offset() {
    let home = unpacked();
    assert_eq!(json(&home, &["ingest", "--topic", "trips", "--volume", "v"])["report"]["records"], 0);
    let more = home.file("more.jsonl", "{\"id\":201,\"x\":[0.5,0.5],\"label\":0}\n");
    run(&home, &["produce", "trips", more.to_str().unwrap()]);
    assert_eq!(json(&home, &["ingest", "--topic", "trips", "--volume", "v"])["report"]["landed"], 1);
    assert_eq!(json(&home, &["feed", "v:/trips", "--dry", "--batch-rows", "1"])["rows"], 201);
    assert_eq!(json(&home, &["feed", "v@first:/trips", "--dry", "--batch-rows", "1"])["rows"], 200);
    // A topic that was never ingested.
    assert_eq!(json(&home, &["ingest", "--topic", "notes", "--volume", "v"])["report"]["landed"], 200);
    run(&home, &["fsck"]);
}

#[test]
fn training_of_earlier_release_continues_from_checkpoint_and_its_model_is_served() {
    let home = unpacked();
    let job = home.path().join("steps.toml");
    let report = json(&home, &["train", job.to_str().unwrap()]);
    assert!(report["resumed_from_step"].as_u64().is_some_and(|step| step > 0), "{report}");
    assert_eq!((&report["end"], &report["steps"]), (&"epochs_done".into(), &25_000.into()), "{report}");
    // The finished training of two epochs counts as published, and continues with a larger budget.
    let done = |epochs: u64| {
        let text = std::fs::read_to_string(&job).unwrap();
        let text = text.replace("epochs_max = 500", &format!("epochs_max = {epochs}"));
        home.file("done.toml", text.replace("\"steps\"", "\"done\""))
    };
    let again = json(&home, &["train", done(2).to_str().unwrap()]);
    assert_eq!((&again["already_published"], &again["version"]), (&true.into(), &1.into()), "{again}");
    let more = json(&home, &["train", done(3).to_str().unwrap()]);
    assert_eq!((&more["resumed_from_step"], &more["steps"]), (&100.into(), &150.into()), "{more}");
    assert_eq!((&more["already_published"], &more["version"]), (&false.into(), &2.into()), "{more}");
    let models = home.dir.path().join("models");
    run(&home, &["cp", "-r", "v:/models", models.to_str().unwrap()]);
    assert_eq!(files_below(&models, "onnx").len(), 3);
    let (service, addresses) = home.serve(["--models", models.to_str().unwrap()]);
    let records = home.file("r.jsonl", "{\"x\":[0.5,0.5]}\n");
    for model in ["done", "steps"] {
        let grpc = addresses["grpc"].as_str().unwrap();
        let args = ["predict", model, records.to_str().unwrap(), "--input", "x", "--grpc", grpc];
        assert_eq!(json(&home, &args)["predicted"], 1);
    }
    assert_eq!(service.stop(), 0);
}
