//! Tests of the control calls over gRPC and REST: the repository index, loading, unloading, and refusals.

use std::time::Duration;

use millrace_serving::client::ClientError;
use millrace_serving::tensor::Tensor;
use millrace_serving::wire::Form;
use millrace_serving::wire::inference as pb;
use millrace_serving::{Config, Control, ModelOptions, Source, serve};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use tonic::Code;

use crate::support::*;

const PATIENCE: Duration = Duration::from_secs(30);

fn explicit(load: &[&str]) -> Config {
    let load = load.iter().map(ToString::to_string).collect();
    Config { control: Control::Explicit, load, ..config() }
}

fn row() -> Vec<Tensor> {
    vec![Tensor::fp32("input", vec![1, FEATURES as i64], vec![0.5; FEATURES]).unwrap()]
}

/// The version that answers, or the error code.
async fn answers(server: &Server, model: &str) -> Result<String, Code> {
    match server.client().await.infer(model, None, row(), Form::Raw).await {
        Ok(prediction) => Ok(prediction.version),
        Err(ClientError::Refused { code, .. }) => Err(code),
        Err(other) => panic!("{other}"),
    }
}

async fn index(client: &mut Triton, ready: bool) -> Vec<(String, String, String)> {
    let request = pb::RepositoryIndexRequest { ready, ..Default::default() };
    let models = client.repository_index(request).await.unwrap().into_inner().models;
    models
        .into_iter()
        .map(|model| (format!("{}/{}", model.name, model.version), model.state, model.reason))
        .collect()
}

async fn load(client: &mut Triton, model: &str) -> Result<(), tonic::Status> {
    let request = pb::RepositoryModelLoadRequest { model_name: model.into(), ..Default::default() };
    client.repository_model_load(request).await.map(drop)
}

async fn unload(client: &mut Triton, model: &str) -> Result<(), tonic::Status> {
    let request = pb::RepositoryModelUnloadRequest { model_name: model.into(), ..Default::default() };
    client.repository_model_unload(request).await.map(drop)
}

fn entry(name: &str, state: &str, reason: &str) -> (String, String, String) {
    (name.to_owned(), state.to_owned(), reason.to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn explicit_control_serves_only_loaded_models() {
    let mut config = explicit(&["mlp", "missing"]);
    config.poll_ms = 1;
    let server = Server::start(config, &[("other", 4, mlp())]).await;
    let repository = server.serving.repository().clone();
    let mut client = server.triton().await;
    let not_loaded = entry("other/4", "UNAVAILABLE", "not loaded");
    assert_eq!(index(&mut client, false).await, [entry("mlp/1", "READY", ""), not_loaded.clone()]);
    assert_eq!(index(&mut client, true).await, [entry("mlp/1", "READY", "")]);
    assert_eq!(answers(&server, "other").await, Err(Code::NotFound));

    load(&mut client, "other").await.unwrap();
    assert_eq!(answers(&server, "other").await, Ok("4".into()));
    // The server does not scan the repository, whatever `poll_ms` is.
    tokio::time::timeout(PATIENCE, repository.poll(CancellationToken::new())).await.unwrap();
    publish(server.dir.path(), "mlp", 2, mlp()).await;
    assert_eq!(answers(&server, "mlp").await, Ok("1".into()));
    load(&mut client, "mlp").await.unwrap();
    assert_eq!(answers(&server, "mlp").await, Ok("2".into()));

    let reply = server.http("POST", "/v2/repository/models/mlp/unload", &[], b"").await;
    assert_eq!((reply.status, reply.json()), (200, json!({})));
    assert_eq!(answers(&server, "mlp").await, Err(Code::NotFound));
    repository.refresh().await.unwrap();
    assert_eq!((repository.versions("mlp"), repository.versions("other")), (None, Some(vec![4])));
    let reply = server.http("POST", "/v2/repository/index", &[], b"").await;
    assert_eq!(
        reply.json(),
        json!([
            { "name": "mlp", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded" },
            { "name": "mlp", "version": "2", "state": "UNAVAILABLE", "reason": "unloaded" },
            { "name": "other", "version": "4", "state": "READY", "reason": "" },
        ])
    );
    let reply = server.http("POST", "/v2/repository/index", &[], br#"{"ready": true}"#).await;
    assert_eq!(reply.json().as_array().unwrap().len(), 1);
    assert_eq!(unload(&mut client, "mlp").await.unwrap_err().code(), Code::NotFound);
    let reply = server.http("POST", "/v2/repository/models/mlp/load", &[], b"{}").await;
    assert_eq!(reply.status, 200);
    assert_eq!(answers(&server, "mlp").await, Ok("2".into()));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_version_is_answered_with_its_reason_and_the_good_one_stays() {
    let server = Server::start(explicit(&["mlp"]), &[]).await;
    let mut client = server.triton().await;
    let damage = |version: u64| {
        let path = server.dir.path().join(format!("mlp/{version}/model.onnx"));
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[60] ^= 0x55;
        std::fs::write(&path, bytes).unwrap();
    };
    publish(server.dir.path(), "mlp", 2, mlp()).await;
    damage(2);
    let error = load(&mut client, "mlp").await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.message().contains("version 2") && error.message().contains("SHA-256"), "{error}");
    assert_eq!(answers(&server, "mlp").await, Ok("1".into()));
    let found = index(&mut client, false).await;
    assert_eq!(found[0], entry("mlp/1", "READY", ""));
    assert!(found[1].1 == "UNAVAILABLE" && found[1].2.contains("SHA-256"), "{found:?}");
    let reply = server.http("POST", "/v2/repository/models/mlp/load", &[], b"").await;
    assert_eq!(reply.status, 503);
    assert!(reply.json()["error"].as_str().unwrap().contains("SHA-256"));

    // An invalid manifest is reported; a version that is still being written is not.
    std::fs::remove_dir_all(server.dir.path().join("mlp/2")).unwrap();
    publish(server.dir.path(), "mlp", 3, mlp()).await;
    std::fs::write(server.dir.path().join("mlp/3/bundle.json"), "{").unwrap();
    let error = load(&mut client, "mlp").await.unwrap_err();
    assert!(error.message().contains("bundle.json"), "{error}");
    std::fs::remove_file(server.dir.path().join("mlp/3/bundle.json")).unwrap();
    std::fs::create_dir(server.dir.path().join("mlp/latest")).unwrap();
    std::fs::write(server.dir.path().join("mlp/latest/notes"), "x").unwrap();
    load(&mut client, "mlp").await.unwrap();
    assert_eq!(answers(&server, "mlp").await, Ok("1".into()));

    // The next call loads a model whose only version was bad and is now repaired.
    publish(server.dir.path(), "new", 1, mlp()).await;
    // The state while a bundle is being written.
    let file = |name: &str| server.dir.path().join("new/1").join(name);
    std::fs::rename(file("bundle.json"), file("bundle.json.writing")).unwrap();
    let error = load(&mut client, "new").await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.message().contains("no complete version"), "{error}");
    std::fs::remove_dir_all(server.dir.path().join("new")).unwrap();
    assert_eq!(load(&mut client, "new").await.unwrap_err().code(), Code::NotFound);
    publish(server.dir.path(), "new", 1, mlp()).await;
    load(&mut client, "new").await.unwrap();
    assert_eq!(answers(&server, "new").await, Ok("1".into()));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unloading_waits_for_requests_that_hold_the_model() {
    let mut config = explicit(&["mlp"]);
    config.drain_ms_max = 60_000;
    let server = Server::start(config, &[]).await;
    let repository = server.serving.repository().clone();
    let held = repository.get("mlp", None).unwrap();
    let mut client = server.triton().await;
    let unloading = tokio::spawn(async move { unload(&mut client, "mlp").await });
    let gone = async {
        while repository.versions("mlp").is_some() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, gone).await.unwrap();
    assert!(!unloading.is_finished());
    // A new version takes its place meanwhile.
    load(&mut server.triton().await, "mlp").await.unwrap();
    assert_eq!(answers(&server, "mlp").await, Ok("1".into()));
    assert!(!unloading.is_finished());
    drop(held);
    tokio::time::timeout(PATIENCE, unloading).await.unwrap().unwrap().unwrap();
    assert_eq!(answers(&server, "mlp").await, Ok("1".into()));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn polling_refuses_to_load_and_unload() {
    let server = Server::start(config(), &[]).await;
    let mut client = server.triton().await;
    assert_eq!(index(&mut client, false).await, [entry("mlp/1", "READY", "")]);
    for error in [load(&mut client, "mlp").await, unload(&mut client, "mlp").await] {
        let error = error.unwrap_err();
        assert_eq!(error.code(), Code::Unavailable);
        assert!(error.message().contains("not allowed if polling is enabled"), "{error}");
        assert!(error.message().contains("--control explicit"), "{error}");
    }
    for call in ["load", "unload"] {
        let path = format!("/v2/repository/models/mlp/{call}");
        assert_eq!(server.http("POST", &path, &[], b"{}").await.status, 503);
        assert_eq!(server.http("GET", &path, &[], b"").await.status, 405);
    }
    assert_eq!(answers(&server, "mlp").await, Ok("1".into()));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_control_calls_are_refused_by_name() {
    let server = Server::start(explicit(&["mlp"]), &[]).await;
    let mut client = server.triton().await;
    let long = "m".repeat(10_000);
    for name in ["", "../mlp", "..", "mlp/1", "a\0b", ".hidden", "-x", "mlp ", "é", &long] {
        for error in [load(&mut client, name).await, unload(&mut client, name).await] {
            let error = error.unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument, "{name:?}: {error}");
            assert!(
                error.message().contains("is not a model name") && error.message().len() < 1_000,
                "{error}"
            );
        }
    }
    for path in ["..%2Fmlp", "a%00b", "mlp%2F1", "%2E%2E", &long] {
        let reply = server.http("POST", &format!("/v2/repository/models/{path}/load"), &[], b"").await;
        assert_eq!(reply.status, 400, "{path}");
    }
    assert_eq!(load(&mut client, "nosuch").await.unwrap_err().code(), Code::NotFound);

    use pb::model_repository_parameter::ParameterChoice;
    let parameters = |name: &str, choice: Option<ParameterChoice>| {
        let value = pb::ModelRepositoryParameter { parameter_choice: choice };
        std::collections::HashMap::from([(name.to_owned(), value)])
    };
    for (name, choice, part) in [
        ("config", ParameterChoice::StringParam("{}".into()), "does not change"),
        ("file:1/model.onnx", ParameterChoice::BytesParam(vec![1, 2]), "publish the files"),
        ("colour", ParameterChoice::BoolParam(true), "\"colour\""),
    ] {
        let parameters = parameters(name, Some(choice));
        let request =
            pb::RepositoryModelLoadRequest { model_name: "mlp".into(), parameters, ..Default::default() };
        let error = client.repository_model_load(request).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.message().contains(part), "{error}");
    }
    for (name, choice) in [
        ("unload_dependents", None),
        ("unload_dependents", Some(ParameterChoice::Int64Param(1))),
        ("unload_everything", Some(ParameterChoice::BoolParam(true))),
    ] {
        let parameters = parameters(name, choice);
        let request =
            pb::RepositoryModelUnloadRequest { model_name: "mlp".into(), parameters, ..Default::default() };
        let error = client.repository_model_unload(request).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        assert!(error.message().contains("unload_dependents"), "{error}");
    }
    let request = pb::RepositoryIndexRequest { repository_name: "second".into(), ..Default::default() };
    assert_eq!(client.repository_index(request).await.unwrap_err().code(), Code::Unimplemented);

    let huge = vec![b' '; 1 << 20];
    let bodies: [(&str, &[u8], u16); 9] = [
        ("index", b"{", 400),
        ("index", b"[]", 400),
        ("index", br#"{"ready": "yes"}"#, 400),
        ("index", br#"{"all": true}"#, 400),
        ("index", &huge, 413),
        ("models/mlp/load", br#"{"parameters": {"config": "{}"}}"#, 400),
        ("models/mlp/load", br#"{"parameters": []}"#, 400),
        ("models/mlp/unload", br#"{"parameters": {"unload_dependents": "no"}}"#, 400),
        ("models/mlp/unload", b"\xff", 400),
    ];
    for (path, body, status) in bodies {
        let reply = server.http("POST", &format!("/v2/repository/{path}"), &[], body).await;
        assert_eq!(reply.status, status, "{path}: {}", String::from_utf8_lossy(&reply.body));
    }
    assert_eq!(answers(&server, "mlp").await, Ok("1".into()));
    let body = br#"{"parameters": {"unload_dependents": false}}"#;
    let reply = server.http("POST", "/v2/repository/models/mlp/unload", &[], body).await;
    assert_eq!(reply.status, 200);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_that_contradict_each_other_are_refused_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    for (config, part) in [
        (Config { control: Control::Poll, ..explicit(&["mlp"]) }, "control is \"poll\""),
        (explicit(&["../mlp"]), "is not a model name"),
    ] {
        let source = Source::directory(dir.path()).unwrap();
        let error = serve(&config, source, CancellationToken::new()).await.unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("load"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn options_of_an_unloaded_model_do_not_delay_readiness() {
    let options = ModelOptions { sessions_max: Some(1), ..ModelOptions::default() };
    let models = || std::collections::BTreeMap::from([("later".to_owned(), options.clone())]);
    for (config, is_ready) in [
        (Config { models: models(), ..explicit(&["mlp"]) }, true),
        (Config { models: models(), ..explicit(&[]) }, true),
        // The first serves what exists; the second must be told to load it.
        (Config { models: models(), ..config() }, false),
        (Config { models: models(), ..explicit(&["later"]) }, false),
    ] {
        let server = Server::start(config, &[]).await;
        let ready = server.http("GET", "/v2/health/ready", &[], b"").await.status == 200;
        assert_eq!(ready, is_ready);
        server.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn draining_refuses_to_load_and_still_lists_models() {
    let server = Server::start(explicit(&["mlp"]), &[]).await;
    let mut client = server.triton().await;
    server.serving.inference().drain();
    assert_eq!(load(&mut client, "mlp").await.unwrap_err().code(), Code::Unavailable);
    assert_eq!(unload(&mut client, "nosuch").await.unwrap_err().code(), Code::Unavailable);
    assert_eq!(index(&mut client, true).await, [entry("mlp/1", "READY", "")]);
    server.stop().await;
}
