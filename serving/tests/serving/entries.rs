//! Tests of repositories with unreadable entries, versions that are replaced in place, swapped links, and of
//! server readiness.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::Path;

use millrace_serving::repository::VersionState;
use millrace_serving::wire::inference as pb;
use millrace_serving::{Config, Control, Source, serve};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use tonic_health::pb::health_check_response::ServingStatus;

use crate::support::*;

fn problems(server: &Server) -> Vec<(String, String)> {
    let failed = server.serving.repository().status().into_iter().filter_map(|status| match status.state {
        VersionState::Failed(reason) => Some((status.model, reason)),
        VersionState::Ready => None,
    });
    failed.collect()
}

async fn refresh(server: &Server) {
    server.serving.repository().refresh().await.unwrap();
}

fn versions(server: &Server, model: &str) -> Vec<u64> {
    server.serving.repository().versions(model).unwrap_or_default()
}

/// Entries that no object store can name, and links that lead to themselves.
fn spoil(folder: &Path) {
    symlink("loop", folder.join("loop")).unwrap();
    std::fs::create_dir(folder.join(OsStr::from_bytes(b"bad\xff"))).unwrap();
    std::fs::create_dir(folder.join("line\nbreak")).unwrap();
    std::fs::write(folder.join(OsStr::from_bytes(b"file\xff")), "").unwrap();
    symlink("nowhere", folder.join("dangling")).unwrap();
    std::fs::create_dir(folder.join(".git")).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entries_that_cannot_be_read_are_named_and_the_others_served() {
    for control in [Control::Poll, Control::Explicit] {
        let dir = tempfile::tempdir().unwrap();
        publish(dir.path(), "mlp", 1, mlp()).await;
        spoil(dir.path());
        spoil(&dir.path().join("mlp"));
        symlink("3", dir.path().join("mlp/3")).unwrap();
        std::fs::create_dir(dir.path().join("mlp/4")).unwrap();
        std::fs::write(dir.path().join("mlp/4").join(OsStr::from_bytes(b"\xff")), "").unwrap();
        let load = if control == Control::Explicit { vec!["mlp".into(), "loop".into()] } else { vec![] };
        let server = Server::over(Config { control, load, ..config() }, dir).await;
        assert_eq!(versions(&server, "mlp"), [1]);
        publish(server.dir.path(), "mlp", 5, mlp()).await;
        publish(server.dir.path(), "new", 1, mlp()).await;
        if control == Control::Poll {
            refresh(&server).await;
            assert_eq!((versions(&server, "mlp"), versions(&server, "new")), (vec![1, 5], vec![1]));
            let problems = problems(&server);
            for name in ["loop", "bad", "line", "mlp"] {
                assert!(problems.iter().any(|(model, _)| model.contains(name)), "{name}: {problems:?}");
            }
            assert!(!problems.iter().any(|(model, _)| model.starts_with(".git")), "{problems:?}");
        } else {
            for model in ["mlp", "new"] {
                let path = format!("/v2/repository/models/{model}/load");
                assert_eq!(
                    server.http("POST", &path, &[], b"").await.status,
                    if model == "mlp" { 503 } else { 200 }
                );
            }
            assert_eq!((versions(&server, "mlp"), versions(&server, "new")), (vec![1, 5], vec![1]));
            assert_eq!(server.http("POST", "/v2/repository/index", &[], b"").await.status, 200);
        }
        server.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn model_whose_folder_cannot_be_read_any_more_stays() {
    let server = Server::start(config(), &[("other", 1, mlp())]).await;
    let folder = server.dir.path().join("mlp");
    let away = server.dir.path().join("other/away");
    std::fs::rename(&folder, &away).unwrap();
    symlink("mlp", &folder).unwrap();
    refresh(&server).await;
    assert_eq!(versions(&server, "mlp"), [1]);
    assert!(
        problems(&server).iter().any(|(model, reason)| model == "mlp" && reason.contains("cannot be read"))
    );
    std::fs::remove_file(&folder).unwrap();
    refresh(&server).await;
    assert_eq!(versions(&server, "mlp"), [0; 0], "it goes with its folder");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn version_that_is_replaced_in_place_stays_ready() {
    let server = Server::start(config(), &[("slow", 1, slow(1))]).await;
    let version = server.dir.path().join("mlp/1");
    let file = |name: &str| version.join(name);
    let manifest = std::fs::read(file("bundle.json")).unwrap();
    let stays = async |what: &str| {
        refresh(&server).await;
        assert_eq!(versions(&server, "mlp"), [1], "{what}");
        assert_eq!(
            server.http("GET", "/v2/models/mlp/versions/1/ready", &[], b"").await.status,
            200,
            "{what}"
        );
        let index = server.http("POST", "/v2/repository/index", &[], b"").await.json();
        assert_eq!((&index[0]["name"], &index[0]["state"]), (&json!("mlp"), &json!("READY")), "{what}");
        assert_ne!(index[0]["reason"], json!(""), "{what}");
    };
    std::fs::remove_file(file("bundle.json")).unwrap();
    stays("no manifest").await;
    std::fs::write(file("model.onnx"), "half").unwrap();
    stays("half a graph").await;
    std::fs::write(file("bundle.json"), &manifest).unwrap();
    stays("another size").await;
    std::fs::remove_file(file("bundle.json")).unwrap();
    std::fs::remove_file(file("model.onnx")).unwrap();
    stays("an empty folder").await;
    std::fs::write(file("bundle.json"), "{").unwrap();
    stays("half a manifest").await;
    std::fs::remove_file(file("bundle.json")).unwrap();
    std::fs::remove_dir(&version).unwrap();
    publish(server.dir.path(), "mlp", 1, sum()).await;
    refresh(&server).await;
    let metadata = server.http("GET", "/v2/models/mlp", &[], b"").await.json();
    assert_eq!(metadata["inputs"][0]["name"], "a", "the new content: {metadata}");
    std::fs::remove_dir_all(&version).unwrap();
    refresh(&server).await;
    assert_eq!(versions(&server, "mlp"), [0; 0], "it goes with its folder");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn links_that_are_swapped_are_followed() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    for folder in ["a", "b"] {
        std::fs::create_dir(path(folder)).unwrap();
    }
    publish(&path("a"), "mlp", 1, mlp()).await;
    publish(&path("b"), "mlp", 2, mlp()).await;
    let swap = |target: &str, link: &str| {
        symlink(target, path("next")).unwrap();
        std::fs::rename(path("next"), path(link)).unwrap();
    };
    // As git-sync does: the folder itself is a link.
    swap("a", "current");
    // As a mounted ConfigMap does: links in the folder lead through another link.
    std::fs::create_dir(path("map")).unwrap();
    swap("../a", "map/..data");
    symlink("..data/mlp", path("map/mlp")).unwrap();
    for (folder, link, target) in [("current", "current", "b"), ("map", "map/..data", "../b")] {
        let cancel = CancellationToken::new();
        let source = Source::directory(&path(folder)).unwrap();
        let serving = serve(&config(), source, cancel.clone()).await.unwrap();
        assert_eq!(serving.repository().versions("mlp"), Some(vec![1]), "{folder}");
        assert_eq!(serving.repository().status().len(), 1, "{:?}", serving.repository().status());
        swap(target, link);
        serving.repository().refresh().await.unwrap();
        assert_eq!(serving.repository().versions("mlp"), Some(vec![2]), "{folder}");
        cancel.cancel();
        serving.join().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_becomes_ready_with_all_configured_models_and_stays_ready() {
    let load = vec!["mlp".to_owned(), "later".to_owned()];
    let server = Server::start(Config { control: Control::Explicit, load, ..config() }, &[]).await;
    let mut triton = server.triton().await;
    let channel = format!("http://{}", server.serving.addresses().grpc);
    let channel = tonic::transport::Endpoint::from_shared(channel).unwrap().connect().await.unwrap();
    let mut health = tonic_health::pb::health_client::HealthClient::new(channel);
    let mut told = async || {
        let rest = server.http("GET", "/v2/health/ready", &[], b"").await;
        let grpc = triton.server_ready(pb::ServerReadyRequest {}).await.unwrap().into_inner().ready;
        let check = tonic_health::pb::HealthCheckRequest::default();
        let status = health.check(check).await.unwrap().into_inner().status();
        assert_eq!(rest.status == 200, grpc);
        // The health service follows a moment later.
        assert!(grpc || status == ServingStatus::NotServing);
        grpc
    };
    assert!(!told().await, "a model of load is not there");
    assert_eq!(server.http("GET", "/v2/models/mlp/ready", &[], b"").await.status, 200);
    assert_eq!(server.http("GET", "/v2/health/live", &[], b"").await.status, 200);
    let load = async |model: &str| {
        server.http("POST", &format!("/v2/repository/models/{model}/load"), &[], b"").await.status
    };
    publish(server.dir.path(), "later", 1, mlp()).await;
    assert_eq!(load("later").await, 200);
    assert!(told().await);
    // Later changes do not reset it: a bad version, a bad entry, an unload.
    publish(server.dir.path(), "mlp", 2, mlp()).await;
    std::fs::write(server.dir.path().join("mlp/2/model.onnx"), "bad").unwrap();
    assert_eq!(load("mlp").await, 503);
    spoil(server.dir.path());
    assert_eq!(load("later").await, 200);
    assert_eq!(server.http("POST", "/v2/repository/models/later/unload", &[], b"").await.status, 200);
    assert!(told().await);
    let mut channel =
        health.watch(tonic_health::pb::HealthCheckRequest::default()).await.unwrap().into_inner();
    while channel.message().await.unwrap().unwrap().status() != ServingStatus::Serving {}
    server.stop().await;
}
