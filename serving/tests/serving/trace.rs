//! Tests of the trace settings: fixed, reported to clients, and refused where a client changes them.

use std::collections::HashMap;

use millrace_serving::Config;
use millrace_serving::wire::inference as pb;
use serde_json::json;
use tonic::Code;

use crate::support::*;

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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fixed_settings_are_reported_over_both_protocols() {
    let server = Server::start(config(), &[]).await;
    let mut client = server.triton().await;
    let path = "/v2/models/mlp/trace/setting";
    for model in ["", "mlp"] {
        let told = set(&mut client, model, &[]).await;
        assert_eq!((&told["trace_level"][0], &told["trace_rate"][0]), (&"OFF".into(), &"1000".into()));
        assert_eq!((&told["trace_count"][0], &told["trace_mode"][0]), (&"-1".into(), &"triton".into()));
        assert_eq!(set(&mut client, model, &[("trace_level", &["OFF"]), ("trace_file", &[])]).await, told);
    }
    let cleared = json!({ "trace_level": null, "trace_rate": 1000, "trace_count": "-1" }).to_string();
    for (path, method, body) in
        [(path, "GET", ""), ("/v2/trace/setting", "GET", ""), (path, "POST", cleared.as_str())]
    {
        let reply = server.http(method, path, &[], body.as_bytes()).await;
        assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
        assert_eq!(
            (&reply.json()["trace_level"], &reply.json()["trace_rate"]),
            (&json!(["OFF"]), &json!("1000"))
        );
    }
    let extensions = server.client().await.server_metadata().await.unwrap().extensions;
    assert!(!extensions.contains(&"trace".to_owned()), "{extensions:?}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changes_of_settings_are_refused() {
    // A key of earlier versions, which has no effect.
    let dir = tempfile::tempdir().unwrap();
    let server =
        Server::start(Config { trace_directory: Some(dir.path().to_owned()), ..config() }, &[]).await;
    let mut client = server.triton().await;
    assert_eq!(client.trace_setting(request("nosuch", &[])).await.unwrap_err().code(), Code::NotFound);
    for (settings, parts) in [
        ([("trace_level", ["TIMESTAMPS"].as_slice())].as_slice(), ["trace_level", "[serving.telemetry]"]),
        (&[("trace_rate", &["1000"]), ("trace_file", &["own.json"])], ["trace_file", "[serving.telemetry]"]),
        (&[("trace_mode", &["opentelemetry"])], ["trace_mode", "[serving.telemetry]"]),
        (&[("trace_colour", &["red"])], ["trace_colour", "not a trace setting"]),
    ] {
        let error = client.trace_setting(request("", settings)).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        assert!(parts.iter().all(|part| error.message().contains(part)), "{error}");
    }
    for body in [
        r#"{"trace_rate": 7}"#,
        r#"{"trace_rate2": 1}"#,
        r#"{"trace_rate": true}"#,
        r#"{"trace_rate": [[1]]}"#,
        "7",
    ] {
        let reply = server.http("POST", "/v2/trace/setting", &[], body.as_bytes()).await;
        assert_eq!(reply.status, 400, "{body}");
    }
    assert_eq!(server.http("GET", "/v2/models/nosuch/trace/setting", &[], b"").await.status, 404);
    server.stop().await;
}
