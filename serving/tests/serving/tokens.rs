//! Tests of bearer tokens: each caller's permissions over gRPC, streams and REST, and withdrawn tokens.

use std::time::Duration;

use futures::channel::mpsc::unbounded;
use millrace_serving::client::{Client, ClientError, Credentials};
use millrace_serving::wire::inference as pb;
use millrace_serving::{Config, Control, new_token};
use tempfile::TempDir;
use tonic::{Code, Request};

use crate::compressed::{bare_call, frame};
use crate::malformed::{as_rest, edited, good};
use crate::support::*;

/// Timeout: a hang is a failure; no test measures time.
const HANGING: Duration = Duration::from_secs(60);

/// Callers with their tokens, in a file.
struct Callers {
    dir: TempDir,
    lines: Vec<String>,
    /// May use `mlp`.
    reader: String,
    /// May use and control `fixed`.
    keeper: String,
    /// May do everything.
    root: String,
}

impl Callers {
    fn new() -> Callers {
        let made = [("reader", "mlp", false), ("keeper", "fi*,other", true), ("root", "*", true)];
        let [reader, keeper, root] = made.map(|(name, models, controls)| {
            let models: Vec<String> = models.split(',').map(str::to_owned).collect();
            new_token(name, &models, controls).unwrap()
        });
        let lines = vec!["# who may call".into(), reader.1, keeper.1, root.1];
        let dir = tempfile::tempdir().unwrap();
        let callers = Callers { dir, lines, reader: reader.0, keeper: keeper.0, root: root.0 };
        callers.write(&callers.lines);
        callers
    }

    fn write(&self, lines: &[String]) {
        let next = self.dir.path().join("next");
        std::fs::write(&next, lines.join("\n")).unwrap();
        std::fs::rename(next, self.dir.path().join("tokens")).unwrap();
    }

    fn config(&self) -> Config {
        let load = vec!["mlp".into(), "fixed".into()];
        let tokens = Some(self.dir.path().join("tokens"));
        Config { tokens, control: Control::Explicit, load, reload_ms: 5, ..config() }
    }

    async fn start(&self) -> Server {
        Server::start(self.config(), &[("fixed", 1, fixed())]).await
    }
}

fn with<T>(token: &str, message: T) -> Request<T> {
    let mut request = Request::new(message);
    if !token.is_empty() {
        request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
    }
    request
}

fn of(model: &str) -> pb::ModelInferRequest {
    edited(|request| request.model_name = model.into())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn token_has_the_permissions_of_its_line_over_grpc() {
    let callers = Callers::new();
    let server = callers.start().await;
    let mut client = server.triton().await;
    // The code of each call; OK for an answer.
    macro_rules! code {
        ($token:expr, $call:ident, $message:expr) => {
            client.$call(with($token, $message)).await.map_or_else(|status| status.code(), |_| Code::Ok)
        };
    }
    let named = |name: &str| pb::ModelMetadataRequest { name: name.into(), ..Default::default() };
    let load = |name: &str| pb::RepositoryModelLoadRequest { model_name: name.into(), ..Default::default() };
    let config = |name: &str| pb::ModelConfigRequest { name: name.into(), ..Default::default() };
    let trace = |name: &str, on: bool| pb::TraceSettingRequest {
        model_name: name.into(),
        settings: on
            .then(|| {
                (
                    "trace_rate".to_owned(),
                    pb::trace_setting_request::SettingValue { value: vec!["1000".into()] },
                )
            })
            .into_iter()
            .collect(),
    };
    let none = "";
    for wrong in [none, "nosuch", "Bearer"] {
        assert_eq!(code!(wrong, model_infer, good()), Code::Unauthenticated);
        assert_eq!(code!(wrong, model_metadata, named("mlp")), Code::Unauthenticated);
        assert_eq!(code!(wrong, server_metadata, pb::ServerMetadataRequest {}), Code::Unauthenticated);
        assert_eq!(
            code!(wrong, repository_index, pb::RepositoryIndexRequest::default()),
            Code::Unauthenticated
        );
        assert_eq!(code!(wrong, server_live, pb::ServerLiveRequest {}), Code::Ok);
        assert_eq!(code!(wrong, server_ready, pb::ServerReadyRequest {}), Code::Ok);
    }
    let (reader, keeper, root) = (&*callers.reader, &*callers.keeper, &*callers.root);
    for (token, model, code) in [
        (reader, "mlp", Code::Ok),
        (reader, "fixed", Code::PermissionDenied),
        // A caller cannot find out which models exist.
        (reader, "nosuch", Code::PermissionDenied),
        (keeper, "mlp", Code::PermissionDenied),
        (root, "mlp", Code::Ok),
        (root, "nosuch", Code::NotFound),
    ] {
        assert_eq!(code!(token, model_infer, of(model)), code, "{model}");
        assert_eq!(code!(token, model_metadata, named(model)), code, "{model}");
        assert_eq!(code!(token, model_config, config(model)), code, "{model}");
        let ready = pb::ModelReadyRequest { name: model.into(), ..Default::default() };
        let told = if code == Code::NotFound { Code::Ok } else { code };
        assert_eq!(code!(token, model_ready, ready), told, "{model}");
    }
    for (token, model, code) in [
        (reader, "mlp", Code::PermissionDenied),
        (keeper, "fixed", Code::Ok),
        (keeper, "mlp", Code::PermissionDenied),
        (root, "mlp", Code::Ok),
    ] {
        assert_eq!(code!(token, repository_model_load, load(model)), code, "{model}");
        let unload = pb::RepositoryModelUnloadRequest { model_name: model.into(), ..Default::default() };
        assert_eq!(code!(token, repository_model_unload, unload), code, "{model}");
        assert_eq!(code!(token, repository_model_load, load(model)), code, "{model}");
        assert_eq!(code!(token, trace_setting, trace(model, true)), code, "{model}");
    }
    assert_eq!(code!(reader, trace_setting, trace("mlp", false)), Code::Ok);
    assert_eq!(code!(reader, trace_setting, trace("fixed", false)), Code::PermissionDenied);
    for (token, code) in [(keeper, Code::PermissionDenied), (root, Code::Ok)] {
        assert_eq!(code!(token, trace_setting, trace("", true)), code);
    }
    let memory = || pb::SystemSharedMemoryStatusRequest::default();
    assert_eq!(code!(keeper, system_shared_memory_status, memory()), Code::PermissionDenied);
    // Off: with it a caller could read other callers' data.
    assert_eq!(code!(root, system_shared_memory_status, memory()), Code::Unimplemented);

    for (token, seen) in [(reader, &["mlp"][..]), (keeper, &["fixed"]), (root, &["fixed", "mlp"])] {
        let index = client
            .repository_index(with(token, pb::RepositoryIndexRequest::default()))
            .await
            .unwrap()
            .into_inner();
        assert_eq!(index.models.iter().map(|model| model.name.as_str()).collect::<Vec<_>>(), seen);
        let told = client
            .model_statistics(with(token, pb::ModelStatisticsRequest::default()))
            .await
            .unwrap()
            .into_inner();
        assert_eq!(told.model_stats.iter().map(|model| model.name.as_str()).collect::<Vec<_>>(), seen);
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn token_has_the_permissions_of_its_line_over_rest() {
    let callers = Callers::new();
    let mut config = callers.config();
    config.cors_origins = vec!["*".into()];
    let server = Server::start(config, &[("fixed", 1, fixed())]).await;
    let infer = as_rest(&good());
    let ask = async |method: &str, path: &str, token: &str| {
        let bearer = format!("Bearer {token}");
        let mut headers = vec![("authorization", bearer.as_str())];
        if token.is_empty() {
            headers.clear();
        }
        let body = if path == infer.path {
            headers.extend(infer.headers.iter().map(|(name, value)| (*name, value.as_str())));
            &infer.body[..]
        } else {
            b""
        };
        server.http(method, path, &headers, body).await
    };
    let (reader, keeper, root) = (&*callers.reader, &*callers.keeper, &*callers.root);
    for (method, path, [of_none, of_reader, of_keeper, of_root]) in [
        ("GET", "/v2/health/live", [200, 200, 200, 200]),
        ("GET", "/v2/health/ready", [200, 200, 200, 200]),
        ("GET", "/", [200, 200, 200, 200]),
        ("GET", "//", [401, 404, 404, 404]),
        ("GET", "/v2", [401, 200, 200, 200]),
        ("GET", "/v2/nosuch", [401, 404, 404, 404]),
        ("POST", infer.path.as_str(), [401, 200, 403, 200]),
        ("GET", "/v2/models/mlp", [401, 200, 403, 200]),
        ("GET", "/v2/models/mlp/ready", [401, 200, 403, 200]),
        ("GET", "/v2/models/mlp/config", [401, 200, 403, 200]),
        ("GET", "/v2/models/mlp/stats", [401, 200, 403, 200]),
        ("GET", "/v2/models/mlp/lineage", [401, 200, 403, 200]),
        ("GET", "/v2/models/mlp/versions/1/lineage", [401, 200, 403, 200]),
        ("GET", "/v2/models/nosuch", [401, 403, 403, 404]),
        // The decoded name counts, not its spelling in the path.
        ("GET", "/v2/models/%6dlp", [401, 200, 403, 200]),
        ("GET", "/v2/models/mlp/trace/setting", [401, 200, 403, 200]),
        ("POST", "/v2/repository/models/fixed/load", [401, 403, 200, 200]),
        ("POST", "/v2/repository/models/mlp/load", [401, 403, 403, 200]),
        ("GET", "/v2/systemsharedmemory/status", [401, 403, 403, 501]),
        ("POST", "/v2/systemsharedmemory/unregister", [401, 403, 403, 501]),
        ("POST", "/v2/systemsharedmemory/region/r/register", [401, 403, 403, 501]),
        ("POST", "/v2/systemsharedmemory/region/r/unregister", [401, 403, 403, 501]),
    ] {
        for (token, status) in
            [("", of_none), ("nosuch", of_none), (reader, of_reader), (keeper, of_keeper), (root, of_root)]
        {
            let reply = ask(method, path, token).await;
            // An admitted request may still be malformed.
            let met = if status == 501 { [501, 400].contains(&reply.status) } else { reply.status == status };
            assert!(met, "{method} {path}: {} instead of {status}", reply.status);
            let challenge = match status {
                401 => Some("Bearer"),
                403 => Some("Bearer error=\"insufficient_scope\""),
                _ => None,
            };
            assert_eq!(reply.header("www-authenticate"), challenge, "{method} {path}");
            if status == 401 || status == 403 {
                let told = reply.json()["error"].as_str().unwrap().to_owned();
                assert!(!told.contains(reader) && !told.contains(keeper), "{told}");
            }
        }
    }
    let index = ask("POST", "/v2/repository/index", reader).await.json();
    assert_eq!((index.as_array().unwrap().len(), &index[0]["name"]), (1, &"mlp".into()));
    let told = ask("GET", "/v2/models/stats", keeper).await.json();
    assert_eq!(told["model_stats"].as_array().unwrap().len(), 1);
    // Browsers send a preflight without a token.
    let asked = [("origin", "https://example.org"), ("access-control-request-method", "POST")];
    assert_eq!(server.http("OPTIONS", &infer.path, &asked, b"").await.status, 204);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn withdrawn_token_ends_its_calls() {
    let callers = Callers::new();
    let server = callers.start().await;
    let address = server.serving.addresses().grpc.to_string();
    let bearing = |token: &str| Credentials { token: Some(token.to_owned()), ..Credentials::default() };
    let mut reader = Client::connect_with(&address, &bearing(&callers.reader)).await.unwrap();
    let mut root = Client::connect_with(&address, &bearing(&callers.root)).await.unwrap();
    reader.infer_message(good()).await.unwrap();
    let mut triton = server.triton().await;
    let (sender, requests) = unbounded();
    let mut answers = triton.model_stream_infer(with(&callers.reader, requests)).await.unwrap().into_inner();
    let mut next = async |request: pb::ModelInferRequest| {
        sender.unbounded_send(request).unwrap();
        tokio::time::timeout(HANGING, answers.message()).await.unwrap().unwrap().unwrap().error_message
    };
    assert_eq!(next(good()).await, "");
    assert!(next(of("fixed")).await.contains("\"reader\" may not use model \"fixed\""));
    assert_eq!(next(good()).await, "");

    // A malformed line is left out; the other lines count.
    let mut broken = callers.lines.clone();
    broken.push("and some words".into());
    callers.write(&broken);
    callers.write(&[callers.lines[0].clone(), callers.lines[3].clone()]);
    let gone = async {
        loop {
            match reader.infer_message(good()).await {
                Ok(_) => {}
                Err(ClientError::Refused { code, .. }) => return code,
                Err(other) => panic!("{other}"),
            }
        }
    };
    assert_eq!(tokio::time::timeout(HANGING, gone).await.unwrap(), Code::Unauthenticated);
    let told = next(good()).await;
    assert!(told.contains("withdrawn"), "{told}");
    root.infer_message(good()).await.unwrap();

    callers.write(&callers.lines);
    let back = async { while reader.infer_message(good()).await.is_err() {} };
    tokio::time::timeout(HANGING, back).await.unwrap();
    server.stop().await;
}

#[tokio::test]
async fn files_of_tokens_that_cannot_be_used_are_named() {
    let callers = Callers::new();
    for (lines, says) in [
        (vec![], "has no token"),
        (vec!["reader".to_owned()], "line 1"),
        (
            vec![callers.lines[1].clone(), callers.lines[1].clone()],
            "line 2: the token \"reader\" appears twice",
        ),
    ] {
        callers.write(&lines);
        let source = millrace_serving::Source::directory(callers.dir.path()).unwrap();
        let error = millrace_serving::serve(&callers.config(), source, Default::default()).await.unwrap_err();
        assert!(error.to_string().contains(says), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_of_callers_without_a_token_are_not_decompressed() {
    let callers = Callers::new();
    let server = callers.start().await;
    let headers = [("content-encoding", "gzip")];
    for (path, status) in [("/", 200), ("/v2/health/live", 200), ("/v2/health/ready", 200), ("/v2", 401)] {
        assert_eq!(server.http("GET", path, &headers, b"no gzip").await.status, status, "{path}");
    }
    // An unknown field of 1 MiB, which takes 1 KiB compressed.
    let message = [&[0x7a, 0x80, 0x80, 0x40][..], &vec![0; 1 << 20]].concat();
    let packed = crate::compressed::packed("gzip", &message);
    let url = format!("http://{}", server.serving.addresses().grpc);
    let mut channel = tonic::transport::Endpoint::from_shared(url).unwrap().connect().await.unwrap();
    for method in ["ServerLive", "ServerReady"] {
        let (status, message) = bare_call(&mut channel, method, Some("gzip"), frame(1, &packed)).await;
        assert_eq!(status, 8, "{method}: {message}");
    }
    let mut health = tonic_health::pb::health_client::HealthClient::new(channel)
        .send_compressed(tonic::codec::CompressionEncoding::Gzip);
    let long = tonic_health::pb::HealthCheckRequest { service: "x".repeat(1 << 20) };
    assert_eq!(health.check(long).await.unwrap_err().code(), Code::ResourceExhausted);
    health.check(tonic_health::pb::HealthCheckRequest::default()).await.unwrap();
    server.stop().await;
}
