//! Tests of repositories in Triton's layout: a `config.pbtxt` next to the versions, and graphs without a
//! manifest.

use std::path::Path;
use std::time::{Duration, SystemTime};

use millrace_serving::client::ClientError;
use millrace_serving::repository::VersionState;
use millrace_serving::tensor::{Data, Tensor};
use millrace_serving::wire::Form;
use millrace_serving::wire::inference as pb;
use millrace_serving::{Config, Control};
use serde_json::json;
use tempfile::TempDir;
use tonic::Code;

use crate::support::*;

const PATIENCE: Duration = Duration::from_secs(60);

/// Writes a file whose modification time counts as settled.
pub(crate) fn put(dir: &Path, path: &str, content: impl AsRef<[u8]>) {
    put_at(dir, path, content, SystemTime::now() - Duration::from_secs(60));
}

fn put_at(dir: &Path, path: &str, content: impl AsRef<[u8]>, modified: SystemTime) {
    let path = dir.join(path);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, content).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_modified(modified).unwrap();
}

const MLP: &str = r#"
name: "mlp"
platform: "onnxruntime_onnx"
max_batch_size: 8
input [ { name: "input" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "logits" data_type: TYPE_FP32 dims: [ 3 ] } ]
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 50 }
instance_group [ { count: 1 kind: KIND_CPU } ]
optimization { graph { level: 1 } }
"#;

fn rows(count: usize) -> Vec<Tensor> {
    let values = (0..count * FEATURES).map(|value| value as f32 / 8.0).collect();
    vec![Tensor::fp32("input", vec![count as i64, FEATURES as i64], values).unwrap()]
}

/// The version that answers, or the refusal.
async fn answers(server: &Server, model: &str, version: Option<u64>) -> Result<String, (Code, String)> {
    match server.client().await.infer(model, version, rows(1), Form::Raw).await {
        Ok(prediction) => Ok(prediction.version),
        Err(ClientError::Refused { code, message }) => Err((code, message)),
        Err(other) => panic!("{other}"),
    }
}

/// Why a version is not served, or `""`.
fn why(server: &Server, model: &str, version: Option<u64>) -> String {
    let status = server.serving.repository().status();
    let found = status.iter().find(|it| it.model == model && it.version == version);
    match found.map(|it| &it.state) {
        Some(VersionState::Failed(reason)) => reason.clone(),
        _ => String::new(),
    }
}

async fn refresh(server: &Server) {
    server.serving.repository().refresh().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn triton_repository_is_served_unchanged() {
    let dir = TempDir::new().unwrap();
    put(dir.path(), "mlp/config.pbtxt", MLP);
    put(dir.path(), "mlp/1/model.onnx", mlp());
    // An empty configuration leaves everything to the graph; another one names the file of the graph.
    put(dir.path(), "auto/config.pbtxt", "");
    put(dir.path(), "auto/3/model.onnx", mlp());
    put(dir.path(), "fixed/config.pbtxt", "default_model_filename: \"net.onnx\"\nbackend: \"onnxruntime\"");
    put(dir.path(), "fixed/1/net.onnx", fixed());
    // A bundle may have a configuration, too.
    publish(dir.path(), "both", 7, mlp()).await;
    put(dir.path(), "both/config.pbtxt", MLP.replace("\"mlp\"", "\"both\""));
    let server = Server::over(config(), dir).await;

    for model in ["mlp", "both"] {
        let prediction = server.client().await.infer(model, None, rows(2), Form::Raw).await.unwrap();
        let Some(Tensor { data: Data::Fp32(logits), shape, .. }) = prediction.output("logits") else {
            panic!("{prediction:?}")
        };
        assert_eq!(shape, &[2, 3]);
        let Data::Fp32(input) = &rows(2)[0].data else { panic!() };
        let expected: Vec<f32> = input.chunks(FEATURES).flat_map(mlp_logits).collect();
        assert!(logits.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-4), "{logits:?} {expected:?}");

        let reply = server.http("GET", &format!("/v2/models/{model}/config"), &[], b"").await.json();
        assert_eq!(reply["max_batch_size"], 8);
        assert_eq!(reply["input"][0]["dims"], json!([4]));
        assert_eq!(reply["dynamic_batching"]["preferred_batch_size"], json!([4, 8]));
        assert_eq!(reply["dynamic_batching"]["max_queue_delay_microseconds"], 50);
        assert_eq!(reply["instance_group"][0]["count"], 1);
        let reply = server.http("GET", &format!("/v2/models/{model}"), &[], b"").await.json();
        assert_eq!(reply["inputs"][0]["shape"], json!([-1, 4]));

        let error = server.client().await.infer(model, None, rows(9), Form::Raw).await.unwrap_err();
        let ClientError::Refused { code, message } = error else { panic!("{error}") };
        assert_eq!(code, Code::InvalidArgument);
        assert!(message.contains("9 rows") && message.contains("at most 8"), "{message}");
    }
    assert_eq!(answers(&server, "auto", None).await, Ok("3".into()));
    assert!(server.client().await.infer("auto", None, rows(9), Form::Raw).await.is_ok());
    let reply = server.http("GET", "/v2/models/fixed/config", &[], b"").await.json();
    assert_eq!((&reply["default_model_filename"], &reply["max_batch_size"]), (&json!("net.onnx"), &json!(0)));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_version_that_is_still_being_written_is_never_served() {
    let dir = TempDir::new().unwrap();
    put(dir.path(), "mlp/config.pbtxt", "");
    put(dir.path(), "mlp/1/model.onnx", mlp());
    let server = Server::over(config(), dir).await;
    let model = mlp();
    // Whichever part of the graph exists, and however old it is.
    for part in [0, 1, model.len() / 2, model.len() - 1] {
        put(server.dir.path(), "mlp/2/model.onnx", &model[..part]);
        refresh(&server).await;
        assert_eq!(answers(&server, "mlp", None).await, Ok("1".into()), "{part}");
        assert_eq!(answers(&server, "mlp", Some(2)).await.unwrap_err().0, Code::Unavailable, "{part}");
    }
    // Complete, but with a time in the future: only staying unchanged shows that it is complete.
    let later = SystemTime::now() + Duration::from_secs(3600);
    put_at(server.dir.path(), "mlp/2/model.onnx", &model, later);
    refresh(&server).await;
    let (code, reason) = answers(&server, "mlp", Some(2)).await.unwrap_err();
    assert_eq!(code, Code::Unavailable);
    assert!(reason.contains("more of it may come"), "{reason}");
    let served = async {
        while server.serving.repository().versions("mlp") != Some(vec![1, 2]) {
            refresh(&server).await;
        }
    };
    tokio::time::timeout(PATIENCE, served).await.unwrap();
    assert_eq!(answers(&server, "mlp", None).await, Ok("2".into()));
    // A version without its graph does not exist. A ready version stays while its folder is replaced, and is
    // dropped with it.
    put(server.dir.path(), "mlp/3/model.onnx.part", &model);
    std::fs::remove_file(server.dir.path().join("mlp/2/model.onnx")).unwrap();
    put(server.dir.path(), "mlp/2/notes.txt", "x");
    refresh(&server).await;
    assert_eq!(answers(&server, "mlp", None).await, Ok("2".into()));
    assert!(
        why(&server, "mlp", Some(3)).contains("model.onnx is missing"),
        "{}",
        why(&server, "mlp", Some(3))
    );
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_models_are_named_and_the_others_served() {
    let dir = TempDir::new().unwrap();
    publish(dir.path(), "mlp", 1, mlp()).await;
    let cases = [
        ("python", "backend: \"python\"".to_owned(), "backend: \"python\": only ONNX models are served here"),
        (
            "plan",
            "\nplatform: \"tensorrt_plan\"".into(),
            "plan/config.pbtxt: line 2: platform: \"tensorrt_plan\"",
        ),
        ("broken", "input {".into(), "broken/config.pbtxt: line 1: expected"),
        ("large", "#".repeat(300 << 10), "the limit is 262144"),
        ("binary", "\u{0}".into(), "binary/config.pbtxt: line 1: invalid token"),
        ("renamed", "name: \"mlp\"".into(), "name is \"mlp\", but the folder is \"renamed\""),
        (
            "rows",
            MLP.replace("\"mlp\"", "\"rows\"").replace("dims: [ 4 ]", "dims: [ 5 ]"),
            "input \"input\" is [-1, 5]",
        ),
        ("gpu", "instance_group { kind: KIND_GPU gpus: 99 }".into(), "cuda:99"),
        (
            "sequence",
            "sequence_batching { iterative_sequence: true }".into(),
            "line 1: sequence_batching: iterative",
        ),
        ("file", "default_model_filename: \"other.onnx\"".into(), "other.onnx is missing"),
    ];
    for (name, content, _) in &cases {
        put(dir.path(), &format!("{name}/config.pbtxt"), content);
        put(dir.path(), &format!("{name}/1/model.onnx"), mlp());
    }
    put(dir.path(), "graph/config.pbtxt", "");
    put(dir.path(), "graph/1/model.onnx", "this is no graph");
    let server = Server::over(config(), dir).await;
    for (name, _, expected) in &cases {
        let reason = why(&server, name, Some(1));
        assert!(reason.contains(expected), "{name}: {reason}");
        let (code, message) = answers(&server, name, None).await.unwrap_err();
        assert_eq!(code, Code::Unavailable, "{name}");
        assert!(message.contains(expected), "{name}: {message}");
        let reply = server.http("GET", &format!("/v2/models/{name}/ready"), &[], b"").await;
        assert_eq!(reply.status, 503, "{name}");
    }
    assert!(
        why(&server, "graph", Some(1)).contains("not a servable ONNX model"),
        "{}",
        why(&server, "graph", Some(1))
    );
    assert_eq!(answers(&server, "mlp", None).await, Ok("1".into()));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn served_version_stays_when_its_folder_becomes_invalid() {
    let dir = TempDir::new().unwrap();
    put(dir.path(), "mlp/config.pbtxt", MLP);
    put(dir.path(), "mlp/1/model.onnx", mlp());
    let server = Server::over(config(), dir).await;
    // The configuration becomes invalid: ready versions stay, new ones wait.
    put(server.dir.path(), "mlp/config.pbtxt", "max_batch_size: many");
    put(server.dir.path(), "mlp/2/model.onnx", mlp());
    refresh(&server).await;
    assert_eq!(answers(&server, "mlp", None).await, Ok("1".into()));
    assert!(why(&server, "mlp", None).contains("mlp/config.pbtxt: line 1"), "{}", why(&server, "mlp", None));
    assert!(answers(&server, "mlp", Some(2)).await.unwrap_err().1.contains("line 1: expected an integer"));
    // A bad graph replaces a good one in place.
    put(server.dir.path(), "mlp/config.pbtxt", MLP.replace(": 8", ": 16"));
    put(server.dir.path(), "mlp/1/model.onnx", "not a graph");
    refresh(&server).await;
    assert_eq!(answers(&server, "mlp", None).await, Ok("2".into()));
    assert_eq!(answers(&server, "mlp", Some(1)).await, Ok("1".into()));
    let reply = server.http("POST", "/v2/repository/index", &[], b"").await.json();
    assert_eq!((&reply[0]["version"], &reply[0]["state"]), (&json!("1"), &json!("READY")));
    assert!(reply[0]["reason"].as_str().unwrap().contains("ModelProto"), "{reply}");
    // Version 2 was loaded with the new configuration; version 1 is unchanged.
    let of = async |version: u64| {
        let path = format!("/v2/models/mlp/versions/{version}/config");
        server.http("GET", &path, &[], b"").await.json()["max_batch_size"].clone()
    };
    assert_eq!((of(1).await, of(2).await), (json!(8), json!(16)));
    put(server.dir.path(), "mlp/1/model.onnx", mlp());
    refresh(&server).await;
    assert_eq!((of(1).await, why(&server, "mlp", Some(1))), (json!(16), String::new()));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn load_call_reads_files_written_just_before() {
    let dir = TempDir::new().unwrap();
    publish(dir.path(), "mlp", 1, mlp()).await;
    let server = Server::over(Config { control: Control::Explicit, ..config() }, dir).await;
    let mut client = server.triton().await;
    let load =
        |model: &str| pb::RepositoryModelLoadRequest { model_name: model.into(), ..Default::default() };
    put(server.dir.path(), "new/config.pbtxt", MLP.replace("\"mlp\"", "\"new\""));
    put_at(server.dir.path(), "new/1/model.onnx", mlp(), SystemTime::now());
    let reply = server.http("POST", "/v2/repository/index", &[], b"").await.json();
    assert_eq!(
        reply[1],
        json!({ "name": "new", "version": "1", "state": "UNAVAILABLE", "reason": "not loaded" })
    );
    client.repository_model_load(load("new")).await.unwrap();
    assert_eq!(answers(&server, "new", None).await, Ok("1".into()));
    // The call returns the reason for a bad configuration.
    put(server.dir.path(), "bad/config.pbtxt", "backend: \"pytorch\"");
    put(server.dir.path(), "bad/1/model.onnx", mlp());
    let error = client.repository_model_load(load("bad")).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.message().contains("backend: \"pytorch\": only ONNX models"), "{error}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn graphs_without_a_configuration_are_served_unless_bundles_are_written_there() {
    let dir = TempDir::new().unwrap();
    put(dir.path(), "plain/1/model.onnx", mlp());
    put(dir.path(), "plain/2/model.onnx", mlp());
    // A bundle whose manifest is not yet written, and one next to complete bundles.
    put(dir.path(), "half/1/model.onnx", mlp());
    put(dir.path(), "half/1/bundle.json.writing", "");
    publish(dir.path(), "mlp", 1, mlp()).await;
    put(dir.path(), "mlp/2/model.onnx", mlp());
    let server = Server::over(config(), dir).await;
    assert_eq!(server.serving.repository().versions("plain"), Some(vec![1, 2]));
    assert_eq!(answers(&server, "plain", None).await, Ok("2".into()));
    let shown = server.http("GET", "/v2/models/plain/config", &[], b"").await.json();
    assert_eq!(shown["input"][0]["name"], "input", "{shown}");
    assert!(answers(&server, "half", None).await.is_err());
    assert!(why(&server, "half", Some(1)).contains("no bundle.json"), "{}", why(&server, "half", Some(1)));
    assert_eq!(answers(&server, "mlp", None).await, Ok("1".into()));
    assert!(why(&server, "mlp", Some(2)).contains("no bundle.json"), "{}", why(&server, "mlp", Some(2)));
    // The writing mark does not stay next to a complete bundle.
    assert!(!server.dir.path().join("mlp/1/bundle.json.writing").exists());
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_policies_and_warm_ups_are_honoured_or_refused() {
    let dir = TempDir::new().unwrap();
    let batching = |content: &str| format!("max_batch_size: 8 dynamic_batching {{ {content} }}");
    let warmup = |content: &str| format!("model_warmup {{ name: \"first\" {content} }}");
    let fp32 = |name: &str, dims: &str| {
        format!(
            "inputs {{ key: \"{name}\" value {{ data_type: TYPE_FP32 dims: [ {dims} ] random_data: true }} }}"
        )
    };
    let good = [
        (
            "queue",
            batching(
                "priority_levels: 3 default_priority_level: 2 \
                 default_queue_policy { default_timeout_microseconds: 50000 max_queue_size: 2 timeout_action: REJECT }",
            ),
            mlp(),
        ),
        (
            "warm",
            format!(
                "max_batch_size: 8 {}",
                warmup(&format!("batch_size: 2 count: 3 {}", fp32("input", "4")))
            ),
            mlp(),
        ),
    ];
    let bad = [
        (
            "delay",
            batching("default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 1 }"),
            mlp(),
            "dynamic_batching: timeout_action DELAY is not supported",
        ),
        ("levels", batching("priority_levels: 65 default_priority_level: 1"), mlp(), "allowed are up to 64"),
        ("level", batching("priority_levels: 2"), mlp(), "default_priority_level is 0"),
        (
            "each",
            batching(
                "priority_levels: 1 default_priority_level: 1 priority_queue_policy { key: 1 value {} }",
            ),
            mlp(),
            "priority_queue_policy is not supported",
        ),
        (
            "file",
            warmup(
                "inputs { key: \"input\" value { data_type: TYPE_FP32 dims: [ 1, 4 ] input_data_file: \"x\" } }",
            ),
            mlp(),
            "model_warmup: \"first\": input \"input\": input_data_file is not supported",
        ),
        ("lacking", warmup(&fp32("a", "1, 4")), sum(), "input \"b\" is missing"),
        ("foreign", warmup(&fp32("other", "1, 4")), mlp(), "no input \"other\""),
        ("shape", warmup(&fp32("input", "1, 5")), mlp(), "is FP32 [1, 5], the model takes FP32 [-1, 4]"),
        // It fits the signature, but the model cannot run on it.
        ("run", warmup(&format!("{} {}", fp32("a", "2, 4"), fp32("b", "3, 4"))), sum(), "model_warmup: "),
    ];
    let all = good.iter().map(|(name, config, onnx)| (*name, config, onnx));
    for (name, config, onnx) in all.chain(bad.iter().map(|(name, config, onnx, _)| (*name, config, onnx))) {
        put(dir.path(), &format!("{name}/config.pbtxt"), config);
        put(dir.path(), &format!("{name}/1/model.onnx"), onnx);
    }
    let server = Server::over(config(), dir).await;
    for (name, ..) in &good {
        assert_eq!(why(&server, name, Some(1)), "", "{name}");
        assert_eq!(answers(&server, name, None).await, Ok("1".into()), "{name}");
    }
    for (name, _, _, expected) in &bad {
        assert!(why(&server, name, Some(1)).contains(expected), "{name}: {}", why(&server, name, Some(1)));
    }
    let request = pb::ModelConfigRequest { name: "queue".into(), ..Default::default() };
    let shown = server.triton().await.model_config(request).await.unwrap().into_inner().config.unwrap();
    let Some(pb::model_config::SchedulingChoice::DynamicBatching(batching)) = shown.scheduling_choice else {
        panic!("{shown:?}")
    };
    let policy = batching.default_queue_policy.unwrap();
    assert_eq!((batching.priority_levels, batching.default_priority_level), (3, 2));
    assert_eq!((policy.default_timeout_microseconds, policy.max_queue_size), (50_000, 2));
    server.stop().await;
}
