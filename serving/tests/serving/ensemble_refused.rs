//! Tests of ensembles that cannot run: each reports its reason and takes no other model down.

use millrace_serving::client::ClientError;
use millrace_serving::repository::VersionState;
use millrace_serving::wire::Form;
use serde_json::json;
use tempfile::TempDir;
use tonic::Code;

use crate::ensemble::{DIAMOND, put_diamond, put_ensemble, rows};
use crate::support::*;
use crate::triton_layout::put;

/// Why a version is not served, or `""`.
fn why(server: &Server, model: &str) -> String {
    let status = server.serving.repository().status();
    let found = status.iter().find(|it| it.model == model && it.version == Some(1)).unwrap();
    match &found.state {
        VersionState::Failed(reason) => reason.clone(),
        VersionState::Ready => String::new(),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ensembles_that_cannot_run_are_named_and_the_others_served() {
    let dir = TempDir::new().unwrap();
    put_diamond(dir.path()).await;
    publish(dir.path(), "fixed", 1, fixed()).await;
    put(dir.path(), "few/config.pbtxt", "max_batch_size: 4");
    put(dir.path(), "few/1/model.onnx", steps());
    let changed = |from: &str, to: &str| {
        assert_eq!(DIAMOND.matches(from).count(), 1, "{from}");
        DIAMOND.replace("name: \"diamond\"\n", "").replace(from, to)
    };
    let steps_of = |model: &str| changed("model_name: \"steps\"", &format!("model_name: \"{model}\""));
    let cases = [
        // Errors in the configuration alone, with their line.
        (
            "cycle",
            changed("key: \"a\" value: \"sums\"", "key: \"a\" value: \"total\""),
            "cycle/config.pbtxt: line 9: ensemble_scheduling: a cycle of steps that wait for each other's tensors: step 2 \
             (model \"sum\")",
        ),
        (
            "nobody",
            changed("value: \"sums\" }\n    },", "value: \"others\" }\n    },"),
            "nobody/config.pbtxt: line 9: ensemble_scheduling: step 2 (model \"sum\"): input \"a\" takes tensor \
             \"sums\", which no step makes and which is no input of the ensemble",
        ),
        (
            "twice",
            changed("key: \"output\" value: \"turned\"", "key: \"output\" value: \"sums\""),
            "twice/config.pbtxt: line 9: ensemble_scheduling: tensor \"sums\" is made twice, by step 3 (model \
             \"steps\") and by step 4 (model \"reversed\")",
        ),
        (
            "unmade",
            changed("{ name: \"total\" data_type", "{ name: \"sum\" data_type"),
            "unmade/config.pbtxt: line 9: ensemble_scheduling: output \"sum\" of the ensemble is made by no step",
        ),
        (
            "graph",
            changed("max_batch_size: 8", "default_model_filename: \"model.onnx\""),
            "graph/config.pbtxt: line 3: default_model_filename names a graph, and an ensemble has none: leave it out, \
             as the model has ensemble_scheduling",
        ),
        (
            "sessions",
            changed("max_batch_size: 8", "instance_group { count: 1 }"),
            "sessions/config.pbtxt: line 3: instance_group belongs to its steps' models: leave it out, as the model has \
             ensemble_scheduling",
        ),
        (
            "stepless",
            "platform: \"ensemble\"".to_owned(),
            "stepless/config.pbtxt: line 1: platform: \"ensemble\" needs ensemble_scheduling, which lists its \
             steps",
        ),
        // Errors found in its models.
        ("missing", steps_of("nosuch"), "step 3 (model \"nosuch\"): the server has no model \"nosuch\""),
        (
            "version",
            changed("model_version: 2", "model_version: 7"),
            "step 2 (model \"sum\"): model \"sum\" has no version 7",
        ),
        (
            "broken",
            steps_of("cycle"),
            "step 3 (model \"cycle\"): model \"cycle\" version 1 cannot be served: cycle/config.pbtxt: line 9: \
             ensemble_scheduling: a cycle of steps that wait for each other's tensors: step 2 (model \"sum\")",
        ),
        (
            "nested",
            steps_of("diamond"),
            "step 3 (model \"diamond\"): the model is itself an ensemble: list its steps in this ensemble instead",
        ),
        ("itself", steps_of("itself"), "step 3 (model \"itself\"): the model is itself an ensemble: list its steps in this ensemble instead"),
        (
            "input",
            changed("key: \"a\" value", "key: \"c\" value"),
            "step 2 (model \"sum\"): it has no input \"c\", its inputs are [\"a\", \"b\"]",
        ),
        (
            "output",
            changed("key: \"logits\" value", "key: \"y\" value"),
            "step 1 (model \"mlp\"): it has no output \"y\", its outputs are [\"logits\"]",
        ),
        (
            "half",
            changed("input_map [ { key: \"a\" value: \"sums\" }, { key: \"b\" value: \"turned\" } ]", "input_map { key: \"a\" value: \"sums\" }")
                .replace("{ name: \"total\" data_type: TYPE_FP32 dims: [ 4 ] }", "{ name: \"turned\" data_type: TYPE_FP32 dims: [ 4 ] }"),
            "step 2 (model \"sum\"): its input \"b\" gets no tensor: name it in input_map",
        ),
        (
            "shape",
            changed("name: \"x\" data_type: TYPE_FP32 dims: [ 4 ]", "name: \"x\" data_type: TYPE_FP32 dims: [ 5 ]"),
            "step 3 (model \"steps\"): its input \"input\" takes FP32 [-1, 4], and tensor \"x\", which the ensemble has \
             as its input, is FP32 [-1, 5]",
        ),
        (
            "rank",
            changed("name: \"x\" data_type: TYPE_FP32 dims: [ 4 ]", "name: \"x\" data_type: TYPE_FP32 dims: [ 4, 1 ]"),
            "step 3 (model \"steps\"): its input \"input\" takes FP32 [-1, 4], and tensor \"x\", which the ensemble has \
             as its input, is FP32 [-1, 4, 1]",
        ),
        (
            "between",
            changed("key: \"input\" value: \"total\"", "key: \"input\" value: \"wide\"").replace(
                "step [",
                "step [ { model_name: \"mlp\" input_map { key: \"input\" value: \"x\" } output_map { key: \"logits\" value: \"wide\" } },",
            ),
            "step 2 (model \"mlp\"): its input \"input\" takes FP32 [-1, 4], and tensor \"wide\", which step 1 (model \
             \"mlp\") makes, is FP32 [-1, 3]",
        ),
        (
            "type",
            changed("name: \"logits\" data_type: TYPE_FP32", "name: \"logits\" data_type: TYPE_FP64"),
            "output \"logits\" of the ensemble is FP64 [-1, 3], and what step 1 (model \"mlp\") makes is FP32 [-1, 3]",
        ),
        (
            "rows",
            steps_of("few"),
            "step 3 (model \"few\"): it takes at most 4 rows, and max_batch_size of the ensemble is 8",
        ),
        (
            "rowless",
            steps_of("fixed"),
            "step 3 (model \"fixed\"): it takes no rows, and max_batch_size of the ensemble is 8: leave that out, and \
             give dims as its steps have them",
        ),
    ];
    for (name, config, _) in &cases {
        put_ensemble(dir.path(), name, config);
    }
    publish(dir.path(), "bundle", 1, mlp()).await;
    put(dir.path(), "bundle/config.pbtxt", changed("max_batch_size: 8", "max_batch_size: 8"));
    let server = Server::over(config(), dir).await;
    let mut client = server.client().await;
    let index = server.http("POST", "/v2/repository/index", &[], b"").await.json();
    for (name, _, expected) in &cases {
        assert_eq!(why(&server, name), *expected, "{name}");
        let entry = index.as_array().unwrap().iter().find(|entry| entry["name"] == *name).unwrap();
        assert_eq!((&entry["state"], &entry["reason"]), (&json!("UNAVAILABLE"), &json!(expected)), "{name}");
        assert!(!client.model_ready(name, "").await.unwrap(), "{name}");
        let reply = server.http("GET", &format!("/v2/models/{name}/ready"), &[], b"").await;
        assert_eq!(reply.status, 503, "{name}");
        let error = client.infer(name, None, vec![rows("x", 1)], Form::Raw).await.unwrap_err();
        let ClientError::Refused { code, message } = error else { panic!("{name}: {error}") };
        // Models with known inputs check the request against them first.
        if !["shape", "rank"].contains(name) {
            assert_eq!(code, Code::Unavailable, "{name}: {message}");
            assert!(message.ends_with(expected), "{name}: {message}");
        }
    }
    assert_eq!(
        why(&server, "bundle"),
        "config.pbtxt has ensemble_scheduling, and this version is a bundle: an ensemble has no graph of its own"
    );
    for model in ["diamond", "sum", "few", "fixed"] {
        assert!(client.model_ready(model, "").await.unwrap(), "{model}");
    }
    client.infer("diamond", None, vec![rows("x", 8)], Form::Raw).await.unwrap();
    server.stop().await;
}
