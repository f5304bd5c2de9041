//! Tests of labels: a label moves between versions while a server answers.

use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use millrace_serving::client::{Client, ClientError};
use millrace_serving::wire::inference as pb;
use serde_json::json;

use crate::support::{Home, program};

/// A repository in Triton's layout, with a model of two versions.
pub(crate) fn repository(home: &Home) -> String {
    let folder = home.dir.path().join("models");
    let onnx = home.dir.path().join("mlp.onnx");
    home.ok(["model", "init", "mlp", "--inputs", "2", "--classes", "2", onnx.to_str().unwrap()]);
    for version in ["1", "2"] {
        let place = folder.join("m").join(version);
        std::fs::create_dir_all(&place).unwrap();
        std::fs::copy(&onnx, place.join("model.onnx")).unwrap();
        let file = std::fs::File::options().write(true).open(place.join("model.onnx")).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(60)).unwrap();
    }
    std::fs::write(folder.join("m/config.pbtxt"), "name: \"m\"\nmax_batch_size: 8\n").unwrap();
    folder.to_str().unwrap().to_owned()
}

/// Sends a request for a version or label; returns the version that answered.
pub(crate) async fn answers(client: &mut Client, version: &str) -> Result<String, ClientError> {
    let request = pb::ModelInferRequest {
        model_name: "m".into(),
        model_version: version.into(),
        inputs: vec![pb::model_infer_request::InferInputTensor {
            name: "input".into(),
            datatype: "FP32".into(),
            shape: vec![1, 2],
            ..Default::default()
        }],
        raw_input_contents: vec![vec![0; 8].into()],
        ..Default::default()
    };
    Ok(client.infer_message(request).await?.model_version)
}

/// Concurrent commands on a model keep each other's changes, in a folder and in a volume.
#[test]
fn concurrent_label_commands_keep_each_others_changes() {
    let home = Home::new();
    let models = repository(&home);
    home.ok(["volume", "create", "models"]);
    let onnx = home.dir.path().join("mlp.onnx");
    home.ok(["model", "import", onnx.to_str().unwrap(), "--name", "m", "--volume", "models"]);
    for place in [["--models", models.as_str()], ["--volume", "models"]] {
        std::thread::scope(|scope| {
            for label in 0..6 {
                let home = &home;
                scope.spawn(move || {
                    home.ok(["model", "label", "m", &format!("l{label}"), "1", place[0], place[1]]);
                });
            }
        });
        let all = home.json(["model", "split", "m", "l0=1", place[0], place[1]]);
        let labels = home.json(["model", "label", "m", "last", "1", place[0], place[1]]);
        assert_eq!(labels["labels"].as_object().unwrap().len(), 7, "{labels} {all}");
    }
}

#[test]
fn a_label_moves_to_another_version_while_the_server_answers() {
    let home = Home::new();
    let models = repository(&home);
    let models = models.as_str();
    let label = |version: &str| home.json(["model", "label", "m", "stable", version, "--models", models]);
    assert_eq!(label("1"), json!({ "model": "m", "labels": { "stable": 1 } }));
    let (service, served) = home.serve(["--models", models]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut client = Client::connect(served["grpc"].as_str().unwrap()).await.unwrap();
        assert_eq!(answers(&mut client, "stable").await.unwrap(), "1");
        assert_eq!(answers(&mut client, "").await.unwrap(), "2");
        assert_eq!(label("2")["labels"]["stable"], 2);
        let deadline = Instant::now() + Duration::from_secs(60);
        while answers(&mut client, "stable").await.unwrap() != "2" {
            assert!(Instant::now() < deadline, "the label has not moved");
        }
    });
    assert_eq!(service.stop(), 0);
}

#[test]
fn label_of_a_missing_version_is_refused_in_one_line() {
    let home = Home::new();
    let models = repository(&home);
    let models = models.as_str();
    let fails = |args: &[&str], code: i32, expected: &str| {
        let output = home.command().args(["model", "label"]).args(args).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {error}");
        assert!(error.contains(expected), "{args:?}: {error}");
    };
    let at = ["--models", models];
    fails(&[&["m", "stable", "3"][..], &at].concat(), 3, "has no complete version 3, it has {1, 2}");
    fails(&[&["n", "stable", "1"][..], &at].concat(), 3, "there is no complete version of a model \"n\"");
    fails(&[&["m", "7", "1"][..], &at].concat(), 2, "\"7\" is not a label");
    fails(&[&["m", "stable", "0"][..], &at].concat(), 2, "0 is not in 1");
    fails(&[&["m", "stable"][..], &at].concat(), 2, "VERSION");
    fails(&["m", "stable", "1"], 2, "--volume");
    fails(&[&["../m", "stable", "1"][..], &at].concat(), 2, "is not a model name");
    fails(&[&["m", "stable", "--remove"][..], &at].concat(), 3, "has no label \"stable\"");
    fails(&["m", "stable", "1", "--models", "/nosuch"], 3, "there is no folder");
    let file = Path::new(models).join("m/rollout.json");
    assert!(!file.exists());
    std::fs::write(&file, "{").unwrap();
    fails(&[&["m", "stable", "1"][..], &at].concat(), 6, "rollout.json cannot be read");
    std::fs::remove_file(&file).unwrap();
    // A folder needs no home.
    let stable = ["model", "label", "m", "stable", "1", "--models", models];
    program(home.command().env("MILLRACE_HOME", "/proc/millrace").args(stable));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "{\n  \"labels\": {\n    \"stable\": 1\n  }\n}\n");
    let removed = home.json(["model", "label", "m", "stable", "--remove", "--models", models]);
    assert_eq!(removed["labels"], json!({}));
}
