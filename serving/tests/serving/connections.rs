//! Tests of connections: HTTP/1.1 and HTTP/2 on one port, keep-alive, clients that stall, and more clients
//! than the limit.

use std::net::SocketAddr;
use std::time::Duration;

use http_body_util::BodyExt;
use millrace_serving::Config;
use millrace_serving::client::Client;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::transport::{Channel, Endpoint};

use crate::malformed::{as_rest, ask, good, server};
use crate::support::*;

/// Timeout: a hang is a failure; no test measures time.
const HANGING: Duration = Duration::from_secs(60);
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const EMPTY_SETTINGS: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];

fn impatient() -> Config {
    let mut config = config();
    config.limits.stalled_ms_max = 200;
    config
}

async fn connect(address: SocketAddr) -> TcpStream {
    TcpStream::connect(address).await.unwrap()
}

/// All bytes until the server closes or resets the connection.
async fn to_the_end(stream: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    let read = stream.read_to_end(&mut answer);
    let _ = tokio::time::timeout(HANGING, read).await.expect("the server keeps the connection");
    String::from_utf8_lossy(&answer).into_owned()
}

/// Reads one response by its length, and leaves the connection open.
async fn one_reply(stream: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&answer).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head
                .to_lowercase()
                .split_once("content-length: ")
                .map(|(_, rest)| rest.lines().next().unwrap().trim().parse::<usize>().unwrap());
            if body.len() >= length.unwrap_or(0) {
                return text;
            }
        }
        let read = stream.read_buf(&mut answer);
        let bytes = tokio::time::timeout(HANGING, read).await.expect("no reply").unwrap();
        assert!(bytes > 0, "the server closed after {text:?}");
    }
}

async fn http2(address: SocketAddr) -> Channel {
    Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap()
}

async fn call(channel: &mut Channel, request: http::Request<Body>) -> http::Response<Body> {
    std::future::poll_fn(|cx| channel.poll_ready(cx)).await.unwrap();
    channel.call(request).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rest_speaks_both_versions_of_http_on_one_port() {
    let server = server().await;
    let address = server.serving.addresses().http;
    let mut channel = http2(address).await;
    let request = as_rest(&good());
    for _ in 0..3 {
        let mut builder = http::Request::post(format!("http://{address}{}", request.path));
        for (name, value) in &request.headers {
            builder = builder.header(*name, value);
        }
        let body = Body::new(http_body_util::Full::new(bytes::Bytes::from(request.body.clone())));
        let reply = call(&mut channel, builder.body(body).unwrap()).await;
        assert_eq!((reply.status(), reply.version()), (http::StatusCode::OK, http::Version::HTTP_2));
        let body = reply.into_body().collect().await.unwrap().to_bytes();
        assert!(String::from_utf8_lossy(&body).contains("logits"));
    }
    // Three requests over one HTTP/1.1 connection, the last two pipelined.
    let mut stream = connect(address).await;
    let get = b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n";
    stream.write_all(get).await.unwrap();
    assert!(one_reply(&mut stream).await.starts_with("HTTP/1.1 200"));
    stream.write_all(get).await.unwrap();
    stream
        .write_all(b"GET /v2/nosuch HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        .await
        .unwrap();
    let rest = to_the_end(&mut stream).await;
    assert!(rest.contains("HTTP/1.1 200") && rest.contains("HTTP/1.1 404"), "{rest}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_stall_lose_their_connection() {
    let server = Server::start(impatient(), &[]).await;
    let addresses = server.serving.addresses();
    let body =
        b"POST /v2/models/mlp/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{\"inputs\":";
    let beginnings: [(&str, &[u8]); 6] = [
        ("nothing", b""),
        ("one byte", b"G"),
        ("one byte of the preface", b"P"),
        ("half a head", b"GET /v2 HTTP/1.1\r\nhost: localhost\r\nx-"),
        ("half a preface", &PREFACE[..20]),
        ("a request and then nothing", b"GET /v2 HTTP/1.1\r\nhost: localhost\r\n\r\n"),
    ];
    for address in [addresses.http, addresses.grpc, addresses.metrics] {
        for (what, beginning) in &beginnings {
            let mut stream = connect(address).await;
            stream.write_all(beginning).await.unwrap();
            let said = to_the_end(&mut stream).await;
            let answered = address == addresses.http && what.starts_with("a request");
            assert_eq!(said.contains("binary_tensor_data"), answered, "{what}: {said}");
        }
        // A client of HTTP/2 that does not answer pings.
        let mut stream = connect(address).await;
        stream.write_all(&[PREFACE, EMPTY_SETTINGS].concat()).await.unwrap();
        to_the_end(&mut stream).await;
    }
    let mut stream = connect(addresses.http).await;
    stream.write_all(body).await.unwrap();
    let said = to_the_end(&mut stream).await;
    assert!(said.starts_with("HTTP/1.1 408") && said.contains("limits.stalled_ms_max"), "{said}");
    server.client().await.infer_message(good()).await.unwrap();
    assert_eq!(server.http("GET", "/v2/health/live", &[], b"").await.status, 200);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grpc_client_that_stops_within_a_message_gets_an_error() {
    let server = Server::start(impatient(), &[]).await;
    let address = server.serving.addresses().grpc;
    let mut channel = http2(address).await;
    for beginning in [&b""[..], b"\0\0\0", b"\0\0\0\0\x10abc"] {
        let (mut sender, receiver) = futures::channel::mpsc::channel(1);
        sender.try_send(bytes::Bytes::from_static(beginning)).unwrap();
        let frames =
            futures::StreamExt::map(receiver, |bytes| Ok::<_, tonic::Status>(http_body::Frame::data(bytes)));
        let request =
            http::Request::post(format!("http://{address}/inference.GRPCInferenceService/ModelInfer"))
                .header("content-type", "application/grpc")
                .header("te", "trailers")
                .body(Body::new(http_body_util::StreamBody::new(frames)))
                .unwrap();
        let reply = tokio::time::timeout(HANGING, call(&mut channel, request)).await.unwrap();
        assert_eq!(reply.headers()["grpc-status"], "4", "{reply:?}");
        drop(sender);
    }
    server.client().await.infer_message(good()).await.unwrap();
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_never_reads_its_answer_is_cut_off() {
    let mut config = impatient();
    config.limits.connections_max = 1;
    let server = Server::start(config, &[("echo", 1, echo(&[millrace_bundle::Datatype::Uint8]))]).await;
    let address = server.serving.addresses().http;
    // More than the kernel buffers for a client that does not read.
    let bytes = 24 << 20;
    let json = format!(
        r#"{{"inputs":[{{"name":"in_UINT8","shape":[{bytes}],"datatype":"UINT8","parameters":{{"binary_data_size":{bytes}}}}}],"parameters":{{"binary_data_output":true}}}}"#
    );
    let head = format!(
        "POST /v2/models/echo/infer HTTP/1.1\r\nhost: localhost\r\ninference-header-content-length: {}\r\ncontent-length: {}\r\n\r\n{json}",
        json.len(),
        json.len() + bytes
    );
    let mut stream = connect(address).await;
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(&vec![7; bytes]).await.unwrap();
    // The only slot becomes free although the client keeps its end open.
    let place = async { while server.http("GET", "/v2/health/live", &[], b"").await.status != 200 {} };
    tokio::time::timeout(HANGING, place).await.unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    assert!(answer.starts_with(b"HTTP/1.1 200") && answer.len() < bytes, "{}", answer.len());
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endless_and_too_many_headers_are_refused() {
    let server = server().await;
    let address = server.serving.addresses().http;
    let long = format!("GET /v2 HTTP/1.1\r\nhost: localhost\r\nx-long: {}", "a".repeat(1 << 20));
    let many = format!("GET /v2 HTTP/1.1\r\nhost: localhost\r\n{}\r\n", "x-many: 1\r\n".repeat(2000));
    let line = format!("GET /{} HTTP/1.1\r\nhost: localhost\r\n\r\n", "a".repeat(1 << 20));
    for (head, statuses) in [(long, ["431"].as_slice()), (many, &["431"]), (line, &["414", "431"])] {
        let mut stream = connect(address).await;
        // The server may answer and close before it has received everything.
        let _ = stream.write_all(head.as_bytes()).await;
        let said = to_the_end(&mut stream).await;
        let told =
            said.is_empty() || statuses.iter().any(|status| said.starts_with(&format!("HTTP/1.1 {status}")));
        assert!(told, "{said}");
    }
    for address in [address, server.serving.addresses().grpc] {
        let mut channel = http2(address).await;
        let request = http::Request::get(format!("http://{address}/v2"))
            .header("x-long", "a".repeat(100 << 10))
            .body(Body::empty())
            .unwrap();
        std::future::poll_fn(|cx| channel.poll_ready(cx)).await.unwrap();
        if let Ok(reply) = channel.call(request).await {
            assert_eq!(reply.status(), 431);
        }
    }
    assert_eq!(ask(&server, &as_rest(&good())).await.status, 200);
    server.client().await.infer_message(good()).await.unwrap();
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_of_the_wrong_length_are_refused() {
    let server = server().await;
    let address = server.serving.addresses().http;
    let endless = format!(
        "transfer-encoding: chunked\r\n\r\n{}",
        format!("1000\r\n{}\r\n", " ".repeat(4096)).repeat(64)
    );
    for (what, rest) in [
        ("two lengths", "content-length: 5\r\ncontent-length: 6\r\n\r\n{}"),
        ("a negative length", "content-length: -1\r\n\r\n{}"),
        ("a length beyond 64 bits", "content-length: 99999999999999999999\r\n\r\n{}"),
        ("a length of everything", "content-length: 18446744073709551615\r\n\r\n{}"),
        ("a chunk beyond 64 bits", "transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}"),
        ("a chunk of a negative size", "transfer-encoding: chunked\r\n\r\n-1\r\n{}"),
        ("chunks without an end", &endless),
    ] {
        let mut stream = connect(address).await;
        let head = "POST /v2/models/mlp/infer HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n";
        // The server may answer and close before it has received everything.
        let _ = stream.write_all(format!("{head}{rest}").as_bytes()).await;
        let said = to_the_end(&mut stream).await;
        // A client that is still sending may be reset before it has read the answer.
        let told = said.starts_with("HTTP/1.1 4") || (rest.contains("chunked") && said.is_empty());
        assert!(told, "{what}: {said}");
    }
    assert_eq!(ask(&server, &as_rest(&good())).await.status, 200);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_beyond_the_limit_get_an_error() {
    let mut config = config();
    config.limits.connections_max = 3;
    let server = Server::start(config, &[]).await;
    let addresses = server.serving.addresses();
    let get = b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let mut held = Vec::new();
    for _ in 0..3 {
        let mut stream = connect(addresses.http).await;
        stream.write_all(get).await.unwrap();
        assert!(one_reply(&mut stream).await.starts_with("HTTP/1.1 200"));
        held.push(stream);
    }
    let mut stream = connect(addresses.http).await;
    stream.write_all(get).await.unwrap();
    let said = to_the_end(&mut stream).await;
    assert!(said.starts_with("HTTP/1.1 503") && said.contains("limits.connections_max"), "{said}");
    // The first clients are still served, and a free slot is reused.
    held[0].write_all(get).await.unwrap();
    assert!(one_reply(&mut held[0]).await.starts_with("HTTP/1.1 200"));
    drop(held.pop());
    let again = async { while server.http("GET", "/v2/health/live", &[], b"").await.status != 200 {} };
    tokio::time::timeout(HANGING, again).await.unwrap();

    let mut clients: Vec<Client> = Vec::new();
    for _ in 0..3 {
        let mut client = server.client().await;
        client.infer_message(good()).await.unwrap();
        clients.push(client);
    }
    // How a client reports it depends on its progress; none of them gets an answer.
    if let Ok(mut client) = Client::connect(&addresses.grpc.to_string()).await {
        client.infer_message(good()).await.unwrap_err();
    }
    clients[0].infer_message(good()).await.unwrap();
    let mut refused = connect(addresses.grpc).await;
    let said = to_the_end(&mut refused).await;
    assert!(said.contains("limits.connections_max"), "{said:?}");
    let metrics = http(addresses.metrics, "GET", "/metrics", &[], b"").await;
    let text = String::from_utf8(metrics.body).unwrap();
    assert!(text.contains(r#"millrace_serving_refused_connections_total{service="REST"}"#), "{text}");
    server.stop().await;
}

#[tokio::test]
async fn limits_of_zero_are_refused() {
    for edit in [
        |config: &mut Config| config.limits.connections_max = 0,
        |config: &mut Config| config.limits.stalled_ms_max = 0,
    ] {
        let mut config = config();
        edit(&mut config);
        let dir = tempfile::tempdir().unwrap();
        let source = millrace_serving::Source::directory(dir.path()).unwrap();
        let refused = millrace_serving::serve(&config, source, Default::default()).await.unwrap_err();
        assert!(refused.to_string().contains("is 0: set it to 1 or more"), "{refused}");
    }
}
