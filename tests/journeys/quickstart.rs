//! Tests of `millrace quickstart`: a complete run, a repeated run, and a run that keeps the service.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::Value;

use crate::support::{Home, fuse_permitted};

fn check(report: &Value) {
    assert_eq!(report["produced"], 1797, "{report}");
    assert_eq!(report["landed"], 1797);
    assert_eq!(report["dead_letters"], 0);
    assert_eq!(report["rows_per_epoch"], 1437);
    assert!(report["epochs"].as_u64().unwrap() >= 1);
    assert_eq!(report["predicted_grpc"], 360);
    assert_eq!(report["predicted_topic"], 360);
    assert!(report["accuracy"].as_f64().unwrap() >= 0.95, "{report}");
    assert!(report["peak_rss_mib"].as_u64().unwrap() > 10);
    assert_eq!(report["model_sha256"].as_str().unwrap().len(), 64);
    for name in ["kafka", "grpc", "http", "metrics"] {
        assert!(report["addresses"][name].is_string(), "{name}: {report}");
    }
    assert_eq!(report["addresses"]["mount"].is_string(), fuse_permitted(), "{report}");
}

#[test]
fn second_run_continues_without_duplicates() {
    let home = Home::new();
    let first = home.json(["quickstart", "--free-ports"]);
    check(&first);
    assert_eq!(first["start"], "clean");
    let second = home.json(["quickstart", "--free-ports"]);
    check(&second);
    assert_eq!(second["start"], "continued");
    assert_eq!(first["model_sha256"], second["model_sha256"]);
    assert_eq!(first["version"], second["version"]);

    let anew = home.json(["quickstart", "--free-ports", "--clean", "--workers", "3"]);
    check(&anew);
    assert_eq!(anew["start"], "clean");
    assert_eq!(first["model_sha256"], anew["model_sha256"], "the number of workers must not matter");
}

#[test]
fn another_seed_gives_another_model() {
    let home = Home::new();
    let first = home.json(["quickstart", "--free-ports", "--seed", "1", "--workers", "1"]);
    let second = home.json(["quickstart", "--free-ports", "--seed", "2", "--workers", "1"]);
    check(&first);
    check(&second);
    assert_ne!(first["model_sha256"], second["model_sha256"]);
    assert_eq!(second["version"], 2);
}

#[test]
fn quickstart_table_reports_no_losses() {
    let home = Home::new();
    let text = home.ok(["quickstart", "--free-ports"]);
    for word in ["1,797", "1,437", "360", "nothing was lost", "accuracy"] {
        assert!(text.contains(word), "{word} is missing in\n{text}");
    }
}

#[test]
fn keep_leaves_everything_running_for_other_commands() {
    let home = Home::new();
    let mut service = home.start(["quickstart", "--keep", "--free-ports", "--json"]);
    let report = service.object();
    check(&report);
    let test = crate::support::project().join("examples/digits/digits-test.jsonl");
    let predicted =
        home.json(["predict", "digits", test.to_str().unwrap(), "--input", "pixels", "--label", "label"]);
    assert_eq!(predicted["predicted"], 360, "{predicted}");
    assert!(predicted["accuracy"].as_f64().unwrap() >= 0.95);
    // The bundle holds input statistics of the training, so the server measures drift from them.
    let metrics = report["addresses"]["metrics"].as_str().unwrap();
    crate::support::until("enough rows were looked at", || {
        home.ok(["predict", "digits", test.to_str().unwrap(), "--input", "pixels"]);
        crate::support::scrape(metrics)
            .contains("millrace_serving_drift_psi{feature=\"input[63]\",model=\"digits\"")
    });
    if fuse_permitted() {
        let mount = std::path::Path::new(report["addresses"]["mount"].as_str().unwrap());
        assert!(mount.join(".snapshots/quickstart/train").is_dir());
        assert!(mount.join("models/digits/1/bundle.json").is_file());
    }
    // A second run changes no file.
    let job = home.path().join("train.toml");
    let before = std::fs::read(&job).unwrap();
    let (code, line) = home.fails(["quickstart", "--seed", "99"]);
    assert_eq!(code, 4, "{line}");
    assert!(line.contains(&format!("process {}", service.pid())), "{line}");
    assert_eq!(std::fs::read(&job).unwrap(), before);
    // New records pass through the pipeline automatically.
    let line = std::fs::read_to_string(&test).unwrap().lines().next().unwrap().to_owned();
    let file = home.file("more.jsonl", line + "\n");
    home.ok(["produce", "digits-test", file.to_str().unwrap()]);
    crate::support::until("the new record has landed", || {
        let rows = home.json(["feed", "digits:/test", "--dry", "--batch-rows", "8"]);
        rows["rows"] == 361
    });
    assert_eq!(service.stop(), 0);
}

/// Everything below a folder with the files' bytes, except files that every command rewrites.
fn contents(root: &Path) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path.clone());
                found.insert(path, None);
            } else if path.extension().is_none_or(|extension| extension != "lock") {
                found.insert(path.clone(), Some(std::fs::read(&path).unwrap()));
            }
        }
    }
    found
}

#[test]
fn clean_refuses_a_home_that_quickstart_did_not_make_and_changes_nothing() {
    let home = Home::new();
    home.ok(["volume", "create", "mine"]);
    let records = home.file("r.jsonl", "{\"id\":1}\n");
    home.ok(["produce", "orders", records.to_str().unwrap()]);
    // Without a configuration, then with a configuration of the user.
    for config in [None, Some("[up]\nvolumes = [\"mine\"]\n")] {
        if let Some(config) = config {
            std::fs::write(home.path().join("millrace.toml"), config).unwrap();
        }
        std::fs::create_dir_all(home.path().join("data")).unwrap();
        std::fs::write(home.path().join("data/precious"), "kept").unwrap();
        // The temporary broker of `produce` may still be ending.
        let contents = || {
            let mut found = contents(&home.path());
            found.retain(|path, _| {
                !path.starts_with(home.path().join("broker")) && !path.ends_with("broker.log")
            });
            found
        };
        let before = contents();
        for args in [&["quickstart", "--free-ports", "--clean"][..], &["quickstart", "--free-ports"]] {
            let (code, line) = home.fails(args);
            assert_eq!(code, 4, "{line}");
            assert!(line.contains("was not written by quickstart"), "{line}");
            assert_eq!(contents(), before, "{args:?}");
        }
    }
    assert!(home.ok(["topic", "list"]).contains("orders"));
}

#[test]
fn clean_refuses_a_home_in_use_and_keeps_foreign_data() {
    let home = Home::new();
    check(&home.json(["quickstart", "--free-ports", "--workers", "1"]));
    home.ok(["volume", "create", "mine"]);
    let records = home.file("r.jsonl", "{\"id\":1}\n");
    home.ok(["produce", "orders", records.to_str().unwrap()]);
    home.ok(["cp", records.to_str().unwrap(), "mine:/r.jsonl"]);
    std::fs::write(home.path().join("data/precious"), "kept").unwrap();

    let config = std::fs::read(home.path().join("millrace.toml")).unwrap();
    let in_use = || File::open(home.path().join("in-use.lock")).unwrap().try_lock().is_err();
    let mut produce = home.command().args(["produce", "orders"]).stdin(Stdio::piped()).spawn().unwrap();
    crate::support::until("the command has opened the home", in_use);
    let (code, line) = home.fails(["quickstart", "--free-ports", "--clean", "--seed", "5"]);
    assert_eq!(code, 4, "{line}");
    assert!(line.contains("another command uses it"), "{line}");
    assert_eq!(std::fs::read(home.path().join("millrace.toml")).unwrap(), config);
    drop(produce.stdin.take());
    assert!(produce.wait().unwrap().success());
    if fuse_permitted() {
        let at = home.dir.path().join("mnt");
        home.ok(["mount", "--detach", "mine", at.to_str().unwrap()]);
        let (code, line) = home.fails(["quickstart", "--free-ports", "--clean"]);
        assert_eq!(code, 4, "{line}");
        assert!(line.contains("a mount"), "{line}");
        assert_eq!(std::fs::read_to_string(at.join("r.jsonl")).unwrap(), "{\"id\":1}\n");
        home.ok(["umount", at.to_str().unwrap()]);
        crate::support::until("the daemon of the mount has ended", || !in_use());
    }

    let anew = home.json(["quickstart", "--free-ports", "--clean", "--workers", "1"]);
    check(&anew);
    assert_eq!(anew["start"], "clean");
    assert_eq!(anew["version"], 1);
    assert_eq!(std::fs::read_to_string(home.path().join("data/precious")).unwrap(), "kept");
    let back = home.dir.path().join("back");
    home.ok(["cp", "mine:/r.jsonl", back.to_str().unwrap()]);
    assert_eq!(std::fs::read_to_string(back).unwrap(), "{\"id\":1}\n");
    assert_eq!(home.json(["ingest", "--topic", "orders", "--volume", "mine"])["report"]["records"], 1);
}
