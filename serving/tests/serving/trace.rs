//! Tests of request traces, as clients enable them and tools read them.

use std::collections::HashMap;
use std::path::Path;

use millrace_serving::tensor::Tensor;
use millrace_serving::wire::Form;
use millrace_serving::wire::inference as pb;
use millrace_serving::{Config, Source, serve};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tonic::Code;

use crate::support::*;

const STEPS: [&str; 7] = [
    "REQUEST_START",
    "QUEUE_START",
    "COMPUTE_START",
    "COMPUTE_INPUT_END",
    "COMPUTE_OUTPUT_START",
    "COMPUTE_END",
    "REQUEST_END",
];

async fn ask(server: &Server, model: &str, count: usize) {
    let mut client = server.client().await;
    for _ in 0..count {
        let row = Tensor::fp32("input", vec![1, FEATURES as i64], vec![0.5; FEATURES]).unwrap();
        client.infer(model, None, vec![row], Form::Raw).await.unwrap();
    }
}

fn request(model: &str, settings: &[(&str, &[&str])]) -> pb::TraceSettingRequest {
    let value = |values: &[&str]| pb::trace_setting_request::SettingValue {
        value: values.iter().map(ToString::to_string).collect(),
    };
    let settings = settings.iter().map(|(name, values)| ((*name).to_owned(), value(values)));
    pb::TraceSettingRequest { settings: settings.collect(), model_name: model.to_owned() }
}

async fn set(client: &mut Triton, model: &str, settings: &[(&str, &[&str])]) -> HashMap<String, Vec<String>> {
    let told = client.trace_setting(request(model, settings)).await.unwrap().into_inner().settings;
    told.into_iter().map(|(name, setting)| (name, setting.value)).collect()
}

fn read(path: &Path) -> Vec<Value> {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_are_traced_as_clients_set_it() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let config = Config { trace_directory: Some(folder.path().to_owned()), ..config() };
    let server = Server::start(config, &[("other", 3, mlp())]).await;
    let mut client = server.triton().await;
    let started = set(&mut client, "", &[]).await;
    assert_eq!((&started["trace_level"][0], &started["trace_rate"][0]), (&"OFF".into(), &"1000".into()));
    assert_eq!((&started["trace_count"][0], &started["trace_mode"][0]), (&"-1".into(), &"triton".into()));
    ask(&server, "mlp", 2).await;

    let told = set(&mut client, "", &[("trace_level", &["TIMESTAMPS"]), ("trace_rate", &["2"])]).await;
    assert_eq!((&told["trace_level"][0], &told["trace_rate"][0]), (&"TIMESTAMPS".into(), &"2".into()));
    ask(&server, "mlp", 4).await;
    ask(&server, "other", 2).await;
    set(&mut client, "", &[("trace_level", &["OFF"])]).await;
    ask(&server, "mlp", 2).await;
    let traces = read(&at("trace.json"));
    let models: Vec<_> =
        traces.iter().map(|trace| (trace["model_name"].clone(), trace["model_version"].clone())).collect();
    assert_eq!(models, [(json!("mlp"), json!(1)), (json!("mlp"), json!(1)), (json!("other"), json!(3))]);
    let ids: Vec<_> = traces.iter().map(|trace| trace["id"].as_u64().unwrap()).collect();
    assert_eq!(ids, [1, 2, 3]);
    for trace in &traces {
        let steps = trace["timestamps"].as_array().unwrap();
        assert_eq!(steps.iter().map(|step| step["name"].as_str().unwrap()).collect::<Vec<_>>(), STEPS);
        assert!(steps.is_sorted_by_key(|step| step["ns"].as_u64().unwrap()), "{trace}");
    }

    // Settings of one model: every request, two in total, one per file.
    let body = json!({
        "trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": 2, "log_frequency": "1",
        "trace_file": "own.json",
    });
    let path = "/v2/models/mlp/trace/setting";
    let reply = server.http("POST", path, &[], body.to_string().as_bytes()).await;
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    assert_eq!(reply.json()["trace_count"], "2");
    ask(&server, "mlp", 5).await;
    ask(&server, "other", 5).await;
    let shown = server.http("GET", path, &[], b"").await.json();
    assert_eq!((&shown["trace_count"], &shown["trace_level"]), (&json!("0"), &json!(["TIMESTAMPS"])));
    assert_eq!((read(&at("own.json.0")).len(), read(&at("own.json.1")).len()), (1, 1));
    assert!(!at("own.json.2").exists());
    let all = server.http("GET", "/v2/trace/setting", &[], b"").await.json();
    assert_eq!((&all["trace_level"], &all["trace_rate"]), (&json!(["OFF"]), &json!("2")));
    let cleared = json!({ "trace_level": null, "trace_rate": null, "trace_count": null });
    let reply = server.http("POST", path, &[], cleared.to_string().as_bytes()).await;
    assert_eq!((&reply.json()["trace_level"], &reply.json()["trace_rate"]), (&json!(["OFF"]), &json!("2")));

    // The file that is open when the server stops is complete.
    let last: &[(&str, &[&str])] =
        &[("trace_level", &["TIMESTAMPS"]), ("trace_rate", &["1"]), ("trace_file", &["last.json"])];
    set(&mut client, "", last).await;
    ask(&server, "other", 3).await;
    server.stop().await;
    assert_eq!(read(&at("last.json")).len(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trace_settings_that_cannot_be_are_refused() {
    let nowhere = Config { trace_directory: Some("/no/such/folder".into()), ..config() };
    let dir = tempfile::tempdir().unwrap();
    let source = Source::directory(dir.path()).unwrap();
    let error = serve(&nowhere, source, CancellationToken::new()).await.unwrap_err();
    assert!(error.to_string().contains("/no/such/folder is not a folder"), "{error}");

    let server = Server::start(config(), &[]).await;
    let mut client = server.triton().await;
    let on: &[(&str, &[&str])] = &[("trace_level", &["TIMESTAMPS"])];
    let error = client.trace_setting(request("", on)).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.message().contains("trace_directory"), "{error}");
    assert_eq!(client.trace_setting(request("nosuch", &[])).await.unwrap_err().code(), Code::NotFound);
    for (settings, part) in [
        (&[("trace_rate", ["7"].as_slice()), ("trace_file", &["../../etc/passwd"])], "trace_file"),
        (&[("trace_rate", ["7"].as_slice()), ("trace_level", &["TENSORS"])], "trace_level"),
        (&[("trace_rate", ["7"].as_slice()), ("trace_mode", &["opentelemetry"])], "trace_mode"),
    ] {
        let error = client.trace_setting(request("", settings)).await.unwrap_err();
        assert!(error.code() == Code::InvalidArgument && error.message().contains(part), "{error}");
    }
    for body in
        [r#"{"trace_rate": 7, "trace_rate2": 1}"#, r#"{"trace_rate": true}"#, r#"{"trace_rate": [[1]]}"#, "7"]
    {
        let reply = server.http("POST", "/v2/trace/setting", &[], body.as_bytes()).await;
        assert_eq!(reply.status, 400, "{body}");
    }
    assert_eq!(server.http("GET", "/v2/models/nosuch/trace/setting", &[], b"").await.status, 404);
    assert_eq!(set(&mut client, "", &[]).await["trace_rate"], ["1000"]);
    let extensions = server.client().await.server_metadata().await.unwrap().extensions;
    assert!(!extensions.contains(&"trace".to_owned()), "{extensions:?}");
    server.stop().await;
}
