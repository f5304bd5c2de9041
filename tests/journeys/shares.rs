//! Tests of splits and shadows: commands change them while a server answers.

use std::path::Path;

use millrace_serving::client::Client;
use serde_json::{Value, json};

use crate::labels::{answers, repository};
use crate::support::{Home, scrape, until};

/// Copies that the shadow of `m` has run and compared.
fn compared(metrics: &str) -> f64 {
    let text = scrape(metrics);
    let name = "millrace_serving_shadow_requests_total{";
    let mut lines =
        text.lines().filter(|line| line.starts_with(name) && line.contains("outcome=\"compared\""));
    lines.next().map_or(0.0, |line| line.rsplit_once(' ').unwrap().1.parse().unwrap())
}

#[test]
fn splits_and_shadows_move_while_the_server_answers() {
    let home = Home::new();
    let models = repository(&home);
    let models = models.as_str();
    let model = |args: &[&str]| home.json([&["model"][..], args, &["--models", models]].concat());
    let (service, served) = home.serve(["--models", models]);
    let metrics = served["metrics"].as_str().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut client = runtime.block_on(Client::connect(served["grpc"].as_str().unwrap())).unwrap();
    // The versions that answer requests without a version.
    let mut seen = || {
        let mut seen: Vec<String> =
            (0..8).map(|_| runtime.block_on(answers(&mut client, "")).unwrap()).collect();
        seen.sort_unstable();
        seen.dedup();
        seen
    };
    assert_eq!(seen(), ["2"]);
    assert_eq!(model(&["split", "m"]), json!({ "model": "m", "split": {} }));
    assert_eq!(model(&["split", "m", "1=3"]), json!({ "model": "m", "split": { "1": 3.0 } }));
    until("version 1 has all requests", || seen() == ["1"]);
    model(&["label", "m", "stable", "1"]);
    model(&["label", "m", "canary", "2"]);
    let both = model(&["split", "m", "stable=0.5", "canary=0.5"]);
    assert_eq!(both["split"], json!({ "canary": 0.5, "stable": 0.5 }));
    until("both versions have requests", || seen() == ["1", "2"]);
    let shown = home.ok(["model", "split", "m", "--models", models]);
    for text in ["stable (version 1)", "canary (version 2)", "50.00 %"] {
        assert!(shown.contains(text), "{text} is missing in\n{shown}");
    }

    assert_eq!(compared(metrics), 0.0);
    let shadow = model(&["shadow", "m", "canary", "1"]);
    assert_eq!(shadow, json!({ "model": "m", "shadow": { "version": "canary", "share": 1.0 } }));
    until("a copy is compared", || {
        seen();
        compared(metrics) > 0.0
    });
    assert_eq!(model(&["shadow", "m"]), shadow);
    let shown = home.ok(["model", "shadow", "m", "--models", models]);
    assert!(shown.contains("canary (version 2)") && shown.contains("100.00 %"), "{shown}");

    assert_eq!(model(&["shadow", "m", "--remove"])["shadow"], Value::Null);
    assert_eq!(model(&["split", "m", "--remove"])["split"], json!({}));
    until("the newest version has all requests again", || seen() == ["2"]);
    let shown = ["split", "shadow"].map(|what| home.ok(["model", what, "m", "--models", models]));
    assert!(shown[0].contains("no split of m") && shown[1].contains("no shadow of m"), "{shown:?}");
    let file = std::fs::read_to_string(Path::new(models).join("m/rollout.json")).unwrap();
    assert_eq!(
        serde_json::from_str::<Value>(&file).unwrap(),
        json!({ "labels": { "canary": 2, "stable": 1 } })
    );
    assert_eq!(service.stop(), 0);
}

#[test]
fn invalid_shares_are_refused_in_one_line() {
    let home = Home::new();
    let models = repository(&home);
    let models = models.as_str();
    let file = Path::new(models).join("m/rollout.json");
    let fails = |args: &[&str], code: i32, expected: &str| {
        let output = home.command().arg("model").args(args).args(["--models", models]).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {error}");
        assert!(error.contains(expected), "{args:?}: {error}");
    };
    let cases: [(&[&str], i32, &str); 21] = [
        (&["split", "m", "3=1"], 3, "has no complete version 3, it has {1, 2}"),
        (&["split", "m", "1=1", "stable=1"], 3, "has no label \"stable\" in rollout.json"),
        (&["split", "m", "1"], 2, "as in stable=95"),
        (&["split", "m", "1=x"], 2, "as in stable=95"),
        (&["split", "m", "1="], 2, "as in stable=95"),
        (&["split", "m", "=1"], 2, "neither a version nor a label"),
        (&["split", "m", "0=1"], 2, "neither a version nor a label"),
        (&["split", "m", "1=-1"], 2, "the weight -1"),
        (&["split", "m", "1=nan"], 2, "the weight NaN"),
        (&["split", "m", "1=inf"], 2, "the weight inf"),
        (&["split", "m", "1=0", "2=0"], 2, "give at least one version a positive weight"),
        (&["split", "m", "1=1", "1=2"], 2, "1 is named twice"),
        (&["split", "m", "--remove"], 3, "has no split"),
        (&["split", "m", "1=1", "--remove"], 2, "cannot be used"),
        (&["split", "n", "1=1"], 3, "there is no complete version of a model \"n\""),
        (&["split", "../m"], 2, "is not a model name"),
        (&["shadow", "m", "1"], 2, "SHARE"),
        (&["shadow", "m", "1", "1.5"], 2, "the share 1.5"),
        (&["shadow", "m", "9", "0.1"], 3, "has no complete version 9"),
        (&["shadow", "m", "canary", "0.1"], 3, "has no label \"canary\""),
        (&["shadow", "m", "--remove"], 3, "has no shadow"),
    ];
    for (args, code, expected) in cases {
        fails(args, code, expected);
        assert!(!file.exists(), "{args:?}");
    }
    fails(&["shadow", "m", "1", "much"], 2, "much");
    let nowhere = home.run(["model", "split", "m", "1=1"]);
    assert_eq!(nowhere.status.code(), Some(2));

    // A label cannot be removed while a split uses it.
    let model = |args: &[&str]| home.json([&["model"][..], args, &["--models", models]].concat());
    model(&["label", "m", "stable", "1"]);
    model(&["split", "m", "stable=1"]);
    fails(&["label", "m", "stable", "--remove"], 4, "in use by the split of model \"m\"");
    model(&["split", "m", "--remove"]);
    model(&["shadow", "m", "stable", "0"]);
    fails(&["label", "m", "stable", "--remove"], 4, "in use by the shadow of model \"m\"");
    model(&["shadow", "m", "--remove"]);
    std::fs::remove_dir_all(Path::new(models).join("m/1")).unwrap();
    fails(&["split", "m", "stable=1"], 3, "label \"stable\": model \"m\" has no complete version 1");
    assert_eq!(model(&["label", "m", "stable", "--remove"])["labels"], json!({}));
    std::fs::write(&file, "{\"split\": []}").unwrap();
    fails(&["split", "m"], 6, "rollout.json cannot be read");
    fails(&["shadow", "m", "2", "1"], 6, "rollout.json cannot be read");
}

#[test]
fn shares_of_a_model_in_a_volume_are_kept_in_it() {
    let home = Home::new();
    let onnx = home.dir.path().join("mlp.onnx");
    let onnx = onnx.to_str().unwrap();
    home.ok(["model", "init", "mlp", "--inputs", "2", "--classes", "2", onnx]);
    home.ok(["volume", "create", "v"]);
    for _ in 0..2 {
        home.ok(["model", "import", onnx, "--name", "m", "--volume", "v"]);
    }
    let model = |args: &[&str]| home.json([&["model"][..], args, &["--volume", "v"]].concat());
    model(&["split", "m", "1=95", "2=5"]);
    model(&["shadow", "m", "2", "0.25"]);
    assert_eq!(model(&["split", "m"])["split"], json!({ "1": 95.0, "2": 5.0 }));
    assert_eq!(model(&["shadow", "m"])["shadow"], json!({ "version": "2", "share": 0.25 }));
    let (code, line) = home.fails(["model", "split", "m", "3=1", "--volume", "v"]);
    assert!(code == 3 && line.contains("volume v: ") && line.contains("version 3"), "{code} {line}");
}
