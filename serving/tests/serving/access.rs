//! Tests of the access log and of request ids.

use std::io;
use std::sync::{Arc, Mutex};

use millrace_serving::Config;
use millrace_serving::client::{Client, Credentials};
use millrace_serving::wire::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use serde_json::Value;
use tracing_subscriber::EnvFilter;

use crate::malformed::{as_rest, ask, good};
use crate::support::*;

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Lines {
    fn take(&self) -> Vec<Value> {
        let text = String::from_utf8(std::mem::take(&mut *self.0.lock().unwrap())).unwrap();
        text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["fields"].clone()).collect()
    }
}

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The access log lines of this thread, while the guard lives.
fn listen() -> (Lines, tracing::subscriber::DefaultGuard) {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .json()
        .with_env_filter(EnvFilter::new("off,millrace_serving::access=debug"))
        .with_writer(move || writer.clone())
        .finish();
    (lines, tracing::subscriber::set_default(subscriber))
}

// One thread, because a test's subscriber is local to its thread.
#[tokio::test]
async fn access_log_has_a_line_with_client_call_and_status_for_each_call() {
    let (lines, _default) = listen();
    let server = Server::start(config(), &[]).await;

    // If another test meets a call site first at this moment, tracing may cache it as having no subscriber.
    ask(&server, &as_rest(&good())).await;
    server.client().await.infer_message(good()).await.unwrap();
    tracing::callsite::rebuild_interest_cache();
    lines.take();

    let mut request = as_rest(&good());
    request.headers.push(("x-request-id", "rest-7".into()));
    request.headers.push(("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".into()));
    let reply = ask(&server, &request).await;
    assert_eq!(reply.header("x-request-id"), Some("rest-7"));
    let said = lines.take();
    assert_eq!(said.len(), 1, "{said:?}");
    let line = &said[0];
    assert_eq!((&line["method"], &line["path"]), (&"POST".into(), &"\"/v2/models/mlp/infer\"".into()));
    assert_eq!((&line["model"], &line["version"], &line["status"]), (&"mlp".into(), &1.into(), &200.into()));
    assert_eq!(line["request_id"], "\"rest-7\"");
    assert_eq!(line["trace_id"], "4bf92f3577b34da6a3ce929d0e0e4736");
    assert_eq!(line["bytes"], reply.body.len());
    assert!(line["elapsed_ms"].as_f64().unwrap() > 0.0);
    assert!(line["peer"].as_str().unwrap().starts_with("127.0.0.1:"), "{line}");

    let long = "x".repeat(300);
    let reply = server.http("GET", "/v2/nosuch", &[("x-request-id", &long)], b"").await;
    assert_eq!(reply.header("x-request-id"), None);
    let said = lines.take();
    assert_eq!((&said[0]["status"], said[0].get("model")), (&404.into(), None));

    let channel =
        tonic::transport::Endpoint::from_shared(format!("http://{}", server.serving.addresses().grpc));
    let mut client = GrpcInferenceServiceClient::new(channel.unwrap().connect().await.unwrap());
    let mut request = tonic::Request::new(good());
    request.metadata_mut().insert("x-request-id", "grpc-8".parse().unwrap());
    let reply = client.model_infer(request).await.unwrap();
    assert_eq!(reply.metadata().get("x-request-id").unwrap(), "grpc-8");
    let mut wrong = good();
    wrong.model_name = "nosuch".into();
    client.model_infer(wrong).await.unwrap_err();
    server.stop().await;
    let said = lines.take();
    assert_eq!(said.len(), 2, "{said:?}");
    assert_eq!(said[0]["path"], "\"/inference.GRPCInferenceService/ModelInfer\"");
    assert_eq!((&said[0]["model"], &said[0]["status"]), (&"mlp".into(), &0.into()));
    assert_eq!(said[0]["request_id"], "\"grpc-8\"");
    assert!(said[0]["bytes"].as_u64().unwrap() > 0 && said[0]["peer"].is_string());
    assert_eq!((&said[1]["status"], said[1].get("model")), (&5.into(), None));
}

#[tokio::test]
async fn access_log_names_the_token_and_never_shows_its_secret() {
    let (lines, _default) = listen();
    let (token, line) = millrace_serving::new_token("ci", &["mlp".into()], false).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokens");
    std::fs::write(&path, line).unwrap();
    let server = Server::start(Config { tokens: Some(path), ..config() }, &[]).await;
    let bearer = format!("Bearer {token}");
    let get = async |path: &str, bearer: &str| {
        server.http("GET", path, &[("authorization", bearer)], b"").await.status
    };
    get("/v2", &bearer).await;
    tracing::callsite::rebuild_interest_cache();
    lines.take();

    assert_eq!(get("/v2", &bearer).await, 200);
    assert_eq!(get("/v2/models/other", &bearer).await, 403);
    assert_eq!(get("/v2", "Bearer a-wrong-one").await, 401);
    let credentials = Credentials { token: Some(token.clone()), ..Credentials::default() };
    let address = server.serving.addresses().grpc.to_string();
    Client::connect_with(&address, &credentials).await.unwrap().infer_message(good()).await.unwrap();
    server.client().await.infer_message(good()).await.unwrap_err();
    server.stop().await;
    let said = lines.take();
    let told: Vec<_> =
        said.iter().map(|line| (line["status"].as_u64().unwrap(), line["token"].as_str())).collect();
    assert_eq!(told, [(200, Some("ci")), (403, Some("ci")), (401, None), (0, Some("ci")), (16, None)]);
    let text = serde_json::to_string(&said).unwrap();
    assert!(!text.contains(&token) && !text.contains("a-wrong-one"), "{text}");
}
