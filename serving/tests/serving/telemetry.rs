//! Tests of request spans with a working and a failing OpenTelemetry collector.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use millrace_serving::tensor::Tensor;
use millrace_serving::wire::Form;
use millrace_serving::{Config, Source, Telemetry, serve};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTracePartialSuccess, ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;
use tokio_rustls::rustls::{ServerConfig, crypto};
use tokio_util::sync::CancellationToken;
use tonic::transport::server::TcpIncoming;
use tonic::{Code, Request, Response, Status};

use crate::shared_memory::grpc;
use crate::support::*;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

/// A collector that stores what it receives, and reports `rejected_spans` as rejected.
#[derive(Clone, Default)]
struct Collector {
    received: Arc<Mutex<Vec<Request<ExportTraceServiceRequest>>>>,
    rejected_spans: i64,
}

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.received.lock().unwrap().push(request);
        let rejected_spans = self.rejected_spans;
        let error_message = "not these".to_owned();
        let partial = ExportTracePartialSuccess { rejected_spans, error_message };
        let partial_success = (rejected_spans > 0).then_some(partial);
        Ok(Response::new(ExportTraceServiceResponse { partial_success }))
    }
}

impl Collector {
    /// Waits until the exporter has sent this many spans.
    async fn until(&self, count: usize) {
        let come = async {
            while self.spans().len() < count {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(120), come).await.unwrap();
    }

    /// Listens for as long as the test runs.
    async fn listen(&self) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = TraceServiceServer::new(self.clone());
        let serving = tonic::transport::Server::builder().add_service(service);
        tokio::spawn(serving.serve_with_incoming(TcpIncoming::from(listener)));
        address
    }

    fn spans(&self) -> Vec<Span> {
        let received = self.received.lock().unwrap();
        let resources = received.iter().flat_map(|request| &request.get_ref().resource_spans);
        resources.flat_map(|of| &of.scope_spans).flat_map(|of| &of.spans).cloned().collect()
    }
}

fn config_with(address: SocketAddr, sample_rate: f64) -> Config {
    let endpoint = format!("http://{address}");
    let headers = [("x-tenant".to_owned(), "seven".into())].into();
    let service_name = "digits-server".to_owned();
    let telemetry = Telemetry { endpoint, sample_rate, service_name, headers, ca: None };
    Config { telemetry: Some(telemetry), ..config() }
}

fn find<'a>(attributes: &'a [KeyValue], key: &str) -> Option<&'a Value> {
    let mut found = attributes.iter().filter(|attribute| attribute.key == key);
    let value = found.next()?.value.as_ref()?.value.as_ref();
    assert!(found.next().is_none(), "{key} appears twice");
    value
}

fn text(text: &str) -> Value {
    Value::StringValue(text.to_owned())
}

fn body() -> Vec<u8> {
    json!({ "inputs": [{ "name": "input", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4] }] })
        .to_string()
        .into_bytes()
}

async fn rest(server: &Server, headers: &[(&str, &str)]) -> u16 {
    server.http("POST", "/v2/models/mlp/infer", headers, &body()).await.status
}

fn message(model: &str) -> millrace_serving::wire::inference::ModelInferRequest {
    crate::response_cache::request(model, &[0.5; FEATURES])
}

/// Spans of the process by outcome; concurrent tests add to them.
async fn counted(server: &Server, outcome: &str) -> u64 {
    let reply = http(server.serving.addresses().metrics, "GET", "/metrics", &[], b"").await;
    let text = String::from_utf8(reply.body).unwrap();
    let name = format!("millrace_serving_telemetry_spans_total{{outcome=\"{outcome}\"}} ");
    text.lines().find_map(|line| line.strip_prefix(&name)).map_or(0, |count| count.parse().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_is_a_span_with_its_parent_and_its_steps() {
    let collector = Collector::default();
    let server = Server::start(config_with(collector.listen().await, 1.0), &[]).await;
    let parent = format!("00-{TRACE}-{PARENT}-01");
    let headers = [("traceparent", parent.as_str()), ("tracestate", "a=1,b=2"), ("x-request-id", "rest-7")];
    assert_eq!(rest(&server, &headers).await, 200);
    grpc(&server).await.model_infer(message("mlp")).await.unwrap();
    let mut unknown = Request::new(message("nosuch"));
    unknown.metadata_mut().insert("traceparent", parent.parse().unwrap());
    let error = grpc(&server).await.model_infer(unknown).await.unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    // None of these is sampled: the first says so, the others do not ask for inference.
    assert_eq!(rest(&server, &[("traceparent", &format!("00-{TRACE}-{PARENT}-00"))]).await, 200);
    assert_eq!(server.http("GET", "/v2/health/ready", &headers, b"").await.status, 200);
    assert!(server.client().await.server_live().await.unwrap());
    collector.until(5 + 5 + 1).await;
    server.stop().await;

    let spans = collector.spans();
    assert_eq!(spans.len(), 5 + 5 + 1, "{spans:?}");
    let named = |name: &str| spans.iter().filter(|span| span.name == name).collect::<Vec<_>>();
    let http = named("POST /v2/models/{model}/infer")[0];
    assert_eq!(
        (hex::encode(&http.trace_id), hex::encode(&http.parent_span_id)),
        (TRACE.into(), PARENT.into())
    );
    assert_eq!((http.trace_state.as_str(), http.flags, http.kind), ("a=1,b=2", 0x301, 2));
    for (key, value) in [
        ("http.request.method", text("POST")),
        ("url.path", text("/v2/models/mlp/infer")),
        ("http.response.status_code", Value::IntValue(200)),
        ("client.address", text("127.0.0.1")),
        ("millrace.model.name", text("mlp")),
        ("millrace.model.version", Value::IntValue(1)),
        ("millrace.request_id", text("rest-7")),
    ] {
        assert_eq!(find(&http.attributes, key), Some(&value), "{key}");
    }

    let calls = named("inference.GRPCInferenceService/ModelInfer");
    let (good, bad): (Vec<_>, Vec<_>) = calls.into_iter().partition(|span| span.parent_span_id.is_empty());
    let (good, bad) = (good[0], bad[0]);
    assert_eq!((good.trace_id.len(), good.span_id.len()), (16, 8));
    assert_ne!(good.trace_id, http.trace_id);
    assert_eq!(find(&good.attributes, "rpc.system"), Some(&text("grpc")));
    assert_eq!(find(&good.attributes, "rpc.method"), Some(&text("ModelInfer")));
    assert_eq!(find(&good.attributes, "rpc.grpc.status_code"), Some(&Value::IntValue(0)));
    assert_eq!(find(&bad.attributes, "rpc.grpc.status_code"), Some(&Value::IntValue(5)));
    assert_eq!((find(&bad.attributes, "millrace.model.name"), &bad.status), (None, &None));

    for server in [http, good] {
        let steps: Vec<_> = spans.iter().filter(|span| span.parent_span_id == server.span_id).collect();
        let names: Vec<_> = steps.iter().map(|step| step.name.as_str()).collect();
        assert_eq!(names, ["queue", "compute_input", "compute_infer", "compute_output"]);
        assert!(steps.iter().all(|step| step.trace_id == server.trace_id));
        let bounds: Vec<u64> = std::iter::once(server.start_time_unix_nano)
            .chain(steps.iter().flat_map(|step| [step.start_time_unix_nano, step.end_time_unix_nano]))
            .chain([server.end_time_unix_nano])
            .collect();
        assert!(bounds.is_sorted(), "{bounds:?}");
    }
    assert!(spans.iter().all(|span| span.parent_span_id != bad.span_id));

    let received = collector.received.lock().unwrap();
    for request in received.iter() {
        assert_eq!(request.metadata().get("x-tenant").unwrap(), "seven");
        let resource = request.get_ref().resource_spans[0].resource.as_ref().unwrap();
        assert_eq!(find(&resource.attributes, "service.name"), Some(&text("digits-server")));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_of_a_stream_are_spans_below_it() {
    let collector = Collector::default();
    // Only requests whose parent is sampled are sampled.
    let server = Server::start(config_with(collector.listen().await, 0.0), &[]).await;
    assert_eq!(rest(&server, &[]).await, 200);
    let requests = vec![message("mlp"), message("nosuch"), message("mlp")];
    let mut stream = Request::new(futures::stream::iter(requests));
    let parent = format!("00-{TRACE}-{PARENT}-01");
    stream.metadata_mut().insert("traceparent", parent.parse().unwrap());
    let mut answers = grpc(&server).await.model_stream_infer(stream).await.unwrap().into_inner();
    let mut refused = 0;
    while let Some(answer) = answers.message().await.unwrap() {
        refused += usize::from(!answer.error_message.is_empty());
    }
    assert_eq!(refused, 1);
    drop(answers);
    collector.until(1 + 3 + 2 * 4).await;
    server.stop().await;

    let spans = collector.spans();
    assert_eq!(spans.len(), 1 + 3 + 2 * 4, "{spans:?}");
    assert!(spans.iter().all(|span| hex::encode(&span.trace_id) == TRACE));
    let stream =
        spans.iter().find(|span| span.name == "inference.GRPCInferenceService/ModelStreamInfer").unwrap();
    assert_eq!(hex::encode(&stream.parent_span_id), PARENT);
    assert_eq!(find(&stream.attributes, "rpc.grpc.status_code"), Some(&Value::IntValue(0)));
    let requests: Vec<_> = spans.iter().filter(|span| span.name == "request").collect();
    assert!(requests.iter().all(|request| request.parent_span_id == stream.span_id));
    let steps = |request: &Span| spans.iter().filter(|span| span.parent_span_id == request.span_id).count();
    let mut told: Vec<_> = requests
        .iter()
        .map(|request| (find(&request.attributes, "error.type").is_some(), steps(request)))
        .collect();
    told.sort_unstable();
    assert_eq!(told, [(false, 4), (false, 4), (true, 0)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_parents_begin_a_new_trace() {
    let collector = Collector::default();
    let server = Server::start(config_with(collector.listen().await, 1.0), &[]).await;
    let good = format!("00-{TRACE}-{PARENT}-01");
    let long = "0".repeat(30_000);
    let hostile = [
        String::new(),
        "-".into(),
        "-".repeat(55),
        long,
        good.to_uppercase(),
        good.replace("00-", "ff-"),
        good.replace(TRACE, &"0".repeat(32)),
        good.replace(PARENT, &"0".repeat(16)),
        format!("{good}-more"),
        format!("{good}0"),
        good.replace("-01", "-+1"),
        good.replace("4bf9", "4bg9"),
    ];
    for parent in &hostile {
        assert_eq!(rest(&server, &[("traceparent", parent), ("tracestate", "a=1")]).await, 200, "{parent}");
    }
    assert_eq!(rest(&server, &[("traceparent", &good), ("traceparent", &good)]).await, 200);
    collector.until((hostile.len() + 1) * 5).await;
    server.stop().await;
    let spans = collector.spans();
    let roots: Vec<_> = spans.iter().filter(|span| span.parent_span_id.is_empty()).collect();
    assert_eq!((roots.len(), spans.len()), (hostile.len() + 1, (hostile.len() + 1) * 5));
    assert!(roots.iter().all(|root| hex::encode(&root.trace_id) != TRACE && root.trace_state.is_empty()));
    let traces: std::collections::HashSet<_> = roots.iter().map(|root| &root.trace_id).collect();
    assert_eq!(traces.len(), roots.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreachable_collector_delays_no_request() {
    // No process listens at one address; the other accepts connections and never answers.
    let away = tokio::net::TcpSocket::new_v4().unwrap();
    away.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (nobody, mute) = (away.local_addr().unwrap(), silent.local_addr().unwrap());
    let watching = Server::start(config(), &[]).await;
    for address in [nobody, mute] {
        let before = counted(&watching, "dropped").await;
        let server = Server::start(config_with(address, 1.0), &[]).await;
        let mut client = server.client().await;
        for _ in 0..20 {
            let row = Tensor::fp32("input", vec![1, FEATURES as i64], vec![0.5; FEATURES]).unwrap();
            client.infer("mlp", None, vec![row], Form::Raw).await.unwrap();
        }
        drop(client);
        server.stop().await;
        let dropped = counted(&watching, "dropped").await - before;
        assert!(dropped >= 20 * 5, "{address}: {dropped}");
    }
    watching.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spans_refused_by_the_collector_are_counted() {
    let collector = Collector { rejected_spans: 3, ..Collector::default() };
    let watching = Server::start(config(), &[]).await;
    let (sent, rejected) = (counted(&watching, "sent").await, counted(&watching, "rejected").await);
    let server = Server::start(config_with(collector.listen().await, 1.0), &[]).await;
    assert_eq!(rest(&server, &[]).await, 200);
    collector.until(5).await;
    server.stop().await;
    assert_eq!(collector.spans().len(), 5);
    assert!(counted(&watching, "sent").await - sent >= 2);
    assert!(counted(&watching, "rejected").await - rejected >= 3);
    watching.stop().await;
}

/// Puts TLS in front of a collector, with a certificate whose issuer is in the folder's `ca.pem`.
async fn secured(folder: &Path, plain: SocketAddr) -> SocketAddr {
    let made = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).unwrap();
    std::fs::write(folder.join("ca.pem"), made.cert.pem()).unwrap();
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    let mut config = ServerConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                // A client that does not trust the certificate disconnects.
                let Ok(mut outer) = acceptor.accept(stream).await else { return };
                let mut inner = TcpStream::connect(plain).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut outer, &mut inner).await;
            });
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn untrusted_tls_collector_gets_no_spans() {
    let (ours, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let collector = Collector::default();
    let plain = collector.listen().await;
    let address = secured(ours.path(), plain).await;
    secured(other.path(), plain).await;
    for (folder, received) in [(&other, 0), (&ours, 5)] {
        let mut config = config_with(address, 1.0);
        let telemetry = config.telemetry.as_mut().unwrap();
        telemetry.endpoint = format!("https://{address}");
        telemetry.ca = Some(folder.path().join("ca.pem"));
        let server = Server::start(config, &[]).await;
        assert_eq!(rest(&server, &[]).await, 200);
        collector.until(received).await;
        server.stop().await;
        assert_eq!(collector.spans().len(), received);
    }
}

#[tokio::test]
async fn invalid_collector_endpoint_is_refused_at_start() {
    let dir = tempfile::tempdir().unwrap();
    let with = |telemetry: Telemetry| Config { telemetry: Some(telemetry), ..config() };
    let good = Telemetry { endpoint: "http://127.0.0.1:4317".into(), ..Telemetry::default() };
    let secure = Telemetry { endpoint: "https://127.0.0.1:4317".into(), ..good.clone() };
    let header = [("grpc-timeout".to_owned(), "1".into())];
    for (telemetry, part) in [
        (Telemetry::default(), "telemetry.endpoint is \"\""),
        (Telemetry { endpoint: "127.0.0.1:4317".into(), ..good.clone() }, "telemetry.endpoint"),
        (Telemetry { sample_rate: 2.0, ..good.clone() }, "telemetry.sample_rate is 2"),
        (Telemetry { headers: header.into(), ..good.clone() }, "telemetry.headers: \"grpc-timeout\""),
        (Telemetry { ca: Some("/no/such/ca.pem".into()), ..secure }, "/no/such/ca.pem"),
    ] {
        let source = Source::directory(dir.path()).unwrap();
        let error = serve(&with(telemetry), source, CancellationToken::new()).await.unwrap_err();
        assert!(error.to_string().contains(part), "{part}: {error}");
    }
    for (table, part) in [
        (r#"{"telemetry":{"endpoint":1}}"#, "string"),
        (r#"{"telemetry":{"endpiont":"x"}}"#, "endpiont"),
        (r#"{"telemetry":{"headers":{"a":[]}}}"#, "a value, { env"),
    ] {
        let error = serde_json::from_str::<Config>(table).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}
