//! Tests of version policies and routing: labels that move, and split requests.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use millrace_serving::config::{Target, VersionPolicy};
use millrace_serving::repository::VersionState;
use millrace_serving::wire::inference as pb;
use millrace_serving::{Config, ModelOptions};
use serde_json::json;
use tempfile::TempDir;
use tonic::Code;

use crate::support::*;
use crate::triton_layout::put;

pub(crate) fn with_options(options: ModelOptions) -> Config {
    Config { models: [("mlp".to_owned(), options)].into(), ..config() }
}

pub(crate) async fn versions(server: &Server) -> Vec<u64> {
    server.serving.repository().refresh().await.unwrap();
    server.serving.repository().versions("mlp").unwrap()
}

async fn with_versions(options: ModelOptions, versions: &[u64]) -> Server {
    let dir = TempDir::new().unwrap();
    for version in versions {
        publish(dir.path(), "mlp", *version, mlp()).await;
    }
    Server::over(with_options(options), dir).await
}

/// A request of one row with an id, for a version or a label.
fn request(version: &str, id: &str) -> pb::ModelInferRequest {
    pb::ModelInferRequest {
        model_name: "mlp".into(),
        model_version: version.into(),
        id: id.into(),
        inputs: vec![pb::model_infer_request::InferInputTensor {
            name: "input".into(),
            datatype: "FP32".into(),
            shape: vec![1, FEATURES as i64],
            ..Default::default()
        }],
        raw_input_contents: vec![vec![0; FEATURES * 4].into()],
        ..Default::default()
    }
}

/// The version that answers, or the error.
pub(crate) async fn answers(client: &mut Triton, version: &str, id: &str) -> Result<String, tonic::Status> {
    Ok(client.model_infer(request(version, id)).await?.into_inner().model_version)
}

pub(crate) fn problems(server: &Server) -> String {
    let status = server.serving.repository().status();
    let reasons = status.into_iter().filter(|it| it.version.is_none()).map(|it| match it.state {
        VersionState::Failed(reason) => reason,
        VersionState::Ready => String::new(),
    });
    reasons.collect::<Vec<_>>().join("\n")
}

pub(crate) fn split(weights: &[(&str, f64)]) -> BTreeMap<Target, f64> {
    weights.iter().map(|(target, weight)| (target.parse().unwrap(), *weight)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn version_policy_selects_the_served_versions() {
    let latest = |count| Some(VersionPolicy::Latest(NonZeroU32::new(count).unwrap()));
    let specific = |versions: &[u64]| Some(VersionPolicy::specific(versions).unwrap());
    let cases = [
        (None, vec![1, 2, 3, 5]),
        (latest(1), vec![5]),
        (latest(2), vec![3, 5]),
        (latest(9), vec![1, 2, 3, 5]),
        (Some(VersionPolicy::All), vec![1, 2, 3, 5]),
        (specific(&[2]), vec![2]),
        (specific(&[1, 3, 4]), vec![1, 3]),
    ];
    for (policy, expected) in cases {
        let shown = format!("{policy:?}");
        let options = ModelOptions { versions: policy, ..ModelOptions::default() };
        let server = with_versions(options, &[1, 2, 3, 5]).await;
        assert_eq!(versions(&server).await, expected, "{shown}");
        let config = server.http("GET", "/v2/models/mlp/config", &[], b"").await.json();
        let policy = &config["version_policy"];
        match shown.contains("Specific") {
            true => assert!(policy["specific"]["versions"].is_array(), "{policy}"),
            false => assert!(shown == "None" || policy["specific"].is_null(), "{policy}"),
        }
        server.stop().await;
    }
    // Missing versions are named.
    let options = ModelOptions { versions: specific(&[1, 4]), ..ModelOptions::default() };
    let server = with_versions(options, &[1]).await;
    let error = answers(&mut server.triton().await, "4", "").await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.message().contains("versions names it ([1, 4])"), "{error}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn version_policy_of_triton_applies_unless_the_server_sets_one() {
    for (options, expected) in [
        (ModelOptions::default(), vec![2]),
        (ModelOptions { versions: Some(VersionPolicy::All), ..ModelOptions::default() }, vec![1, 2]),
    ] {
        let server = with_versions(options, &[1]).await;
        put(server.dir.path(), "mlp/config.pbtxt", "version_policy { latest { num_versions: 1 } }");
        put(server.dir.path(), "mlp/2/model.onnx", mlp());
        assert_eq!(versions(&server).await, expected);
        server.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn previous_version_stays_when_the_newest_is_invalid() {
    let latest = Some(VersionPolicy::Latest(NonZeroU32::MIN));
    let server = with_versions(ModelOptions { versions: latest, ..ModelOptions::default() }, &[1]).await;
    publish(server.dir.path(), "mlp", 2, mlp()).await;
    let graph = server.dir.path().join("mlp/2/model.onnx");
    let mut bytes = std::fs::read(&graph).unwrap();
    bytes[60] ^= 0x55;
    std::fs::write(&graph, bytes).unwrap();
    assert_eq!(versions(&server).await, [1]);
    publish(server.dir.path(), "mlp", 3, mlp()).await;
    assert_eq!(versions(&server).await, [3]);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn labels_name_versions_and_move_while_the_server_runs() {
    let options = ModelOptions {
        versions: Some(VersionPolicy::Latest(NonZeroU32::MIN)),
        labels: [("stable".to_owned(), 1)].into(),
        ..ModelOptions::default()
    };
    let server = with_versions(options, &[1, 2, 3]).await;
    // A version with a label is served whatever the policy is.
    assert_eq!(versions(&server).await, [1, 3]);
    let mut client = server.triton().await;
    assert_eq!(answers(&mut client, "stable", "").await.unwrap(), "1");
    assert_eq!(answers(&mut client, "", "").await.unwrap(), "3");
    let rollout = |text: &str| put(server.dir.path(), "mlp/rollout.json", text);
    rollout(r#"{"labels": {"stable": 2, "canary": 3}}"#);
    assert_eq!(versions(&server).await, [2, 3]);
    assert_eq!(answers(&mut client, "stable", "").await.unwrap(), "2");
    assert_eq!(answers(&mut client, "canary", "").await.unwrap(), "3");

    // Every call accepts a label as the version.
    let body =
        br#"{"inputs": [{"name": "input", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}"#;
    let reply = server.http("POST", "/v2/models/mlp/versions/stable/infer", &[], body).await;
    assert_eq!((reply.status, &reply.json()["model_version"]), (200, &json!("2")));
    for (path, status) in [
        ("/v2/models/mlp/versions/canary", 200),
        ("/v2/models/mlp/versions/canary/ready", 200),
        ("/v2/models/mlp/versions/canary/config", 200),
        ("/v2/models/mlp/versions/canary/stats", 200),
        ("/v2/models/mlp/versions/nosuch", 400),
        ("/v2/models/mlp/versions/nosuch/stats", 400),
    ] {
        assert_eq!(server.http("GET", path, &[], b"").await.status, status, "{path}");
    }
    let ready = pb::ModelReadyRequest { name: "mlp".into(), version: "canary".into() };
    assert!(client.model_ready(ready).await.unwrap().into_inner().ready);
    let error = answers(&mut client, "latest", "").await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.message().contains("[\"canary\", \"stable\"]"), "{error}");

    // A label that cannot move stays, and the others move.
    for (text, expected) in [
        (
            r#"{"labels": {"stable": 9, "canary": 2}}"#,
            "label \"stable\": version 9 is not in the repository, it stays",
        ),
        ("{\"labels\": {\"stable\": 3", "mlp/rollout.json: EOF"),
        ("{\"labels\": {\"4\": 3}}", "\"4\" is not a label"),
    ] {
        rollout(text);
        versions(&server).await;
        assert!(problems(&server).contains(expected), "{}", problems(&server));
        assert_eq!(answers(&mut client, "stable", "").await.unwrap(), "2", "{text}");
        assert_eq!(answers(&mut client, "canary", "").await.unwrap(), "2", "{text}");
    }
    // A label that was never in force reports why.
    rollout(r#"{"labels": {"next": 8}}"#);
    versions(&server).await;
    let error = answers(&mut client, "next", "").await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.message().contains("version 8, which label \"next\" names, is not in the"), "{error}");
    // Without the file the configuration is in force again.
    std::fs::remove_file(server.dir.path().join("mlp/rollout.json")).unwrap();
    assert_eq!(versions(&server).await, [1, 3]);
    assert_eq!(answers(&mut client, "stable", "").await.unwrap(), "1");
    assert_eq!(problems(&server), "");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn moving_a_label_under_load_fails_no_request() {
    let options = ModelOptions { labels: [("live".to_owned(), 1)].into(), ..ModelOptions::default() };
    let server = with_versions(options, &[1, 2]).await;
    let done = Arc::new(AtomicBool::new(false));
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let (mut client, done) = (server.triton().await, Arc::clone(&done));
        clients.spawn(async move {
            let mut count = 0;
            while !done.load(Ordering::SeqCst) {
                let version = answers(&mut client, "live", "").await.unwrap();
                assert!(version == "1" || version == "2", "{version}");
                count += 1;
            }
            count
        });
    }
    let mut client = server.triton().await;
    for turn in 0..50 {
        let version = turn % 2 + 1;
        put(server.dir.path(), "mlp/rollout.json", format!("{{\"labels\": {{\"live\": {version}}}}}"));
        versions(&server).await;
        assert_eq!(answers(&mut client, "live", "").await.unwrap(), version.to_string());
    }
    done.store(true, Ordering::SeqCst);
    while let Some(count) = clients.join_next().await {
        assert!(count.unwrap() > 0);
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_name_no_version_are_split() {
    let options = ModelOptions {
        labels: [("stable".to_owned(), 1)].into(),
        split: split(&[("stable", 3.0), ("2", 1.0)]),
        ..ModelOptions::default()
    };
    let server = with_versions(options, &[1, 2, 3]).await;
    let mut client = server.triton().await;
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for _ in 0..100 {
        *counts.entry(answers(&mut client, "", "").await.unwrap()).or_default() += 1;
    }
    assert!(counts["2"].abs_diff(25) <= 3 && counts.len() == 2, "{counts:?}");
    // A request that names a version gets that version.
    assert_eq!(answers(&mut client, "3", "").await.unwrap(), "3");

    // An id goes to one version, over either protocol.
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    for n in 0..40 {
        let id = format!("request-{n}");
        let version = answers(&mut client, "", &id).await.unwrap();
        assert_eq!(answers(&mut client, "", &id).await.unwrap(), version);
        let body = json!({
            "id": id,
            "inputs": [{ "name": "input", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4] }],
        });
        let reply =
            server.http("POST", "/v2/models/mlp/infer", &[], body.to_string().as_bytes()).await.json();
        assert_eq!((&reply["model_version"], &reply["id"]), (&json!(version), &json!(id)));
        *seen.entry(version).or_default() += 1;
    }
    assert_eq!(seen.len(), 2, "{seen:?}");
    // Errors of a request are reported as usual.
    let reply = server.http("POST", "/v2/models/mlp/infer", &[], b"[").await;
    assert_eq!(reply.status, 400);

    // The other versions take the share of a deleted version.
    std::fs::remove_dir_all(server.dir.path().join("mlp/2")).unwrap();
    versions(&server).await;
    assert!(problems(&server).contains("split: 2 is not served"), "{}", problems(&server));
    for n in 0..20 {
        assert_eq!(answers(&mut client, "", &format!("request-{n}")).await.unwrap(), "1");
    }
    // The whole traffic moves at run time, also to a single version.
    put(server.dir.path(), "mlp/rollout.json", r#"{"split": {"3": 1}}"#);
    versions(&server).await;
    for n in 0..20 {
        assert_eq!(answers(&mut client, "", &format!("request-{n}")).await.unwrap(), "3");
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_options_are_refused_at_start() {
    let labels = |label: &str, version| ModelOptions {
        labels: [(label.to_owned(), version)].into(),
        ..ModelOptions::default()
    };
    let weights = |weights: &[(&str, f64)]| ModelOptions { split: split(weights), ..ModelOptions::default() };
    let cases = [
        ("mlp", labels("7", 1), "models.mlp: \"7\" is not a label"),
        ("mlp", labels("stable", 0), "version 0"),
        ("mlp", weights(&[("1", -1.0)]), "weight -1"),
        ("mlp", weights(&[("1", f64::NAN)]), "weight NaN"),
        ("mlp", weights(&[("1", 0.0)]), "a positive weight"),
        ("../mlp", ModelOptions::default(), "is not a model name"),
    ];
    let dir = TempDir::new().unwrap();
    for (name, options, expected) in cases {
        let config = Config { models: [(name.to_owned(), options)].into(), ..config() };
        let source = millrace_serving::Source::directory(dir.path()).unwrap();
        let error =
            millrace_serving::serve(&config, source, Default::default()).await.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
