//! Tests of client quotas: unread answers, slow and concurrent bodies, and cancelled calls.

use std::io::ErrorKind::WouldBlock;
use std::net::SocketAddr;
use std::time::Duration;

use millrace_bundle::Datatype;
use millrace_serving::Config;
use millrace_serving::wire::inference as pb;
use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::codegen::http;

use crate::compressed::{bare_call, frame, packed};
use crate::malformed::{as_rest, good, typed};
use crate::support::*;

/// Timeout: a hang is a failure; no test measures time.
const HANGING: Duration = Duration::from_secs(300);
/// Longer than any test, so that its clients are never too slow.
const PATIENT_MS: u64 = 3_600_000;
const INFER: &str = "/inference.GRPCInferenceService/ModelInfer";
const STREAM: &str = "/inference.GRPCInferenceService/ModelStreamInfer";
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

fn impatient() -> Config {
    let mut config = config();
    config.limits.stalled_ms_max = 300;
    config
}

/// A gRPC request for that many bytes of zeros from the model `echo`.
fn zeros(bytes: usize) -> Vec<u8> {
    let input = pb::model_infer_request::InferInputTensor {
        name: "in_UINT8".into(),
        datatype: "UINT8".into(),
        shape: vec![bytes as i64],
        ..Default::default()
    };
    let request = pb::ModelInferRequest {
        model_name: "echo".into(),
        inputs: vec![input],
        raw_input_contents: vec![vec![0; bytes].into()],
        ..Default::default()
    };
    frame(0, &request.encode_to_vec())
}

/// Sends requests on one connection that answers pings but whose flow control lets the server send no byte of
/// an answer. Returns the status of each call that ended, once the server has ended the connection.
async fn never_reading(address: SocketAddr, path: &str, bodies: Vec<Vec<u8>>) -> Vec<Option<i32>> {
    let socket = TcpStream::connect(address).await.unwrap();
    let handshake = h2::client::Builder::new().initial_window_size(0).handshake::<_, bytes::Bytes>(socket);
    let (mut sender, connection) = handshake.await.unwrap();
    let connection = tokio::spawn(connection);
    let mut calls = tokio::task::JoinSet::new();
    for body in bodies {
        sender = sender.ready().await.unwrap();
        let request = http::Request::post(format!("http://{address}{path}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(())
            .unwrap();
        let (response, mut stream) = sender.send_request(request, false).unwrap();
        stream.send_data(body.into(), true).unwrap();
        calls.spawn(async move {
            let mut response = response.await.ok()?;
            let told = |headers: &http::HeaderMap| headers.get("grpc-status")?.to_str().ok()?.parse().ok();
            match told(response.headers()) {
                Some(status) => Some(status),
                None => told(&response.body_mut().trailers().await.ok()??),
            }
        });
    }
    let statuses = tokio::time::timeout(HANGING, calls.join_all()).await.expect("calls hang");
    let _ = tokio::time::timeout(HANGING, connection).await.expect("the connection stays");
    statuses
}

/// A connection whose client requested an answer and reads none of it.
struct Untaken {
    _sender: h2::client::SendRequest<bytes::Bytes>,
    _answer: http::Response<h2::RecvStream>,
    _connection: tokio_util::task::AbortOnDropHandle<()>,
}

impl Untaken {
    async fn new(address: SocketAddr, bytes: usize) -> Untaken {
        let socket = TcpStream::connect(address).await.unwrap();
        let handshake = h2::client::Builder::new().initial_window_size(0).handshake(socket);
        let (mut sender, connection) = handshake.await.unwrap();
        let connection = tokio::spawn(async move { drop(connection.await) });
        let answer = send(&mut sender, zeros(bytes)).await.await.unwrap();
        let connection = tokio_util::task::AbortOnDropHandle::new(connection);
        Untaken { _sender: sender, _answer: answer, _connection: connection }
    }
}

/// Calls `ModelInfer` with a body.
async fn send(
    sender: &mut h2::client::SendRequest<bytes::Bytes>,
    body: Vec<u8>,
) -> h2::client::ResponseFuture {
    *sender = sender.clone().ready().await.unwrap();
    let request = http::Request::post(format!("http://localhost{INFER}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())
        .unwrap();
    let (response, mut stream) = sender.send_request(request, false).unwrap();
    stream.send_data(body.into(), true).unwrap();
    response
}

async fn metric(server: &Server, line: &str) -> Option<f64> {
    let reply = http(server.serving.addresses().metrics, "GET", "/metrics", &[], b"").await;
    let text = String::from_utf8(reply.body).unwrap();
    text.lines().find_map(|found| found.strip_prefix(line)?.trim().parse().ok())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_that_reads_no_answers_is_limited_and_disconnected() {
    let mut config = config();
    config.limits.stalled_ms_max = 2_000;
    config.limits.unsent_bytes_max = 4 << 20;
    let server = Server::start(config, &[("echo", 1, echo(&[Datatype::Uint8]))]).await;
    let address = server.serving.addresses().grpc;
    let statuses = never_reading(address, INFER, vec![zeros(1 << 20); 12]).await;
    let refused = statuses.iter().filter(|status| **status == Some(8)).count();
    let cut = statuses.iter().filter(|status| status.is_none()).count();
    // An answer is some bytes larger than its tensor, so the fourth no longer fits.
    assert_eq!((cut, refused), (3, 9), "{statuses:?}");
    // The answers of a stream count even before the client may read any of them.
    let stream: Vec<u8> = std::iter::repeat_with(|| zeros(1 << 20)).take(8).flatten().collect();
    assert_eq!(never_reading(address, STREAM, vec![stream]).await, [None]);
    assert!(metric(&server, r#"millrace_serving_cut_connections_total{service="gRPC"}"#).await >= Some(2.0));
    server.client().await.infer_message(good()).await.unwrap();
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_of_all_connections_have_a_common_bound() {
    let mut config = config();
    config.limits.stalled_ms_max = PATIENT_MS;
    config.limits.answer_bytes_max = 4 << 20;
    let server = Server::start(config, &[("echo", 1, echo(&[Datatype::Uint8]))]).await;
    let addresses = server.serving.addresses();
    let mut untaken = Vec::new();
    for _ in 0..3 {
        untaken.push(Untaken::new(addresses.grpc, 1 << 20).await);
    }
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{}", addresses.grpc)).unwrap();
    let mut channel = channel.connect().await.unwrap();
    // Each answer is some bytes larger than its tensor, so a fourth does not fit.
    let refused = async {
        loop {
            let (status, message) = bare_call(&mut channel, "ModelInfer", None, zeros(1 << 20)).await;
            if status != 0 {
                return (status, message);
            }
        }
    };
    let (status, message) = tokio::time::timeout(HANGING, refused).await.expect("no common bound");
    assert!(status == 8 && message.contains("limits.answer_bytes_max"), "{status} {message}");
    let bytes = 1 << 20;
    let json = format!(
        r#"{{"inputs":[{{"name":"in_UINT8","shape":[{bytes}],"datatype":"UINT8","parameters":{{"binary_data_size":{bytes}}}}}],"parameters":{{"binary_data_output":true}}}}"#
    );
    let length = json.len().to_string();
    let headers = [("inference-header-content-length", length.as_str())];
    let body = [json.as_bytes(), &vec![7; bytes]].concat();
    let reply = server.http("POST", "/v2/models/echo/infer", &headers, &body).await;
    let said = String::from_utf8_lossy(&reply.body);
    assert!(reply.status == 503 && said.contains("limits.answer_bytes_max"), "{}: {said}", reply.status);
    // Small answers still succeed, including health checks.
    server.client().await.infer_message(good()).await.unwrap();
    assert_eq!(server.http("GET", "/v2/health/live", &[], b"").await.status, 200);
    drop(untaken);
    let again = async { while bare_call(&mut channel, "ModelInfer", None, zeros(1 << 20)).await.0 != 0 {} };
    tokio::time::timeout(HANGING, again).await.expect("what was counted stays");
    assert_eq!(server.http("POST", "/v2/models/echo/infer", &headers, &body).await.status, 200);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stalled_answer_is_reset_while_others_are_read() {
    let mut config = config();
    config.limits.stalled_ms_max = 2_000;
    let server = Server::start(config, &[("echo", 1, echo(&[Datatype::Uint8]))]).await;
    let socket = TcpStream::connect(server.serving.addresses().grpc).await.unwrap();
    // Each stream has the default window, less than 64 KiB.
    let handshake = h2::client::Builder::new().initial_connection_window_size(16 << 20).handshake(socket);
    let (mut sender, connection) = handshake.await.unwrap();
    let connection = tokio::spawn(async move { drop(connection.await) });
    let response = send(&mut sender, zeros(1 << 20)).await;
    let untaken = tokio::spawn(async move {
        let mut body = response.await.unwrap().into_body();
        let mut bytes = 0;
        // No byte is released, so the window stays exhausted.
        loop {
            match body.data().await {
                Some(Ok(part)) => bytes += part.len(),
                Some(Err(error)) => return (bytes, error.reason()),
                None => return (bytes, None),
            }
        }
    });
    let others = async {
        loop {
            let is_last = untaken.is_finished();
            let mut body = send(&mut sender, zeros(10)).await.await.unwrap().into_body();
            while let Some(part) = body.data().await {
                let bytes = part.unwrap().len();
                body.flow_control().release_capacity(bytes).unwrap();
            }
            let trailers = body.trailers().await.unwrap().unwrap();
            assert_eq!(trailers["grpc-status"], "0");
            if is_last {
                return;
            }
        }
    };
    tokio::time::timeout(HANGING, others).await.expect("the answer is kept");
    let (bytes, reason) = untaken.await.unwrap();
    assert!(bytes > 0 && bytes < 1 << 20, "{bytes}");
    assert_eq!(reason, Some(h2::Reason::CANCEL));
    connection.abort();
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_that_reads_an_answer_byte_by_byte_is_disconnected() {
    let server = Server::start(impatient(), &[("echo", 1, echo(&[Datatype::Uint8]))]).await;
    let mut stream = TcpStream::connect(server.serving.addresses().grpc).await.unwrap();
    // SETTINGS_INITIAL_WINDOW_SIZE is 0.
    let settings = http2_frame(4, 0, 0, &[0, 4, 0, 0, 0, 0]);
    let call = [http2_frame(1, 4, 1, &call_head(INFER)), http2_frame(0, 1, 1, &zeros(10_000))].concat();
    stream.write_all(&[PREFACE, &settings, &call].concat()).await.unwrap();
    let (mut reader, writer) = stream.into_split();
    let writer = tokio::sync::Mutex::new(writer);
    let write = async |frame: Vec<u8>| writer.lock().await.write_all(&frame).await;
    let taking = async {
        while write(http2_frame(8, 0, 1, &[0, 0, 0, 1])).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let answering_pings = async {
        let mut head = [0; 9];
        while reader.read_exact(&mut head).await.is_ok() {
            let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
            if reader.read_exact(&mut payload).await.is_err() || head[3] == 7 {
                break;
            }
            if head[3] == 6 && head[4] == 0 && write(http2_frame(6, 1, 0, &payload)).await.is_err() {
                break;
            }
        }
    };
    let cut = async {
        tokio::select! { () = taking => {}, () = answering_pings => {} }
    };
    tokio::time::timeout(HANGING, cut).await.expect("the connection stays");
    assert!(metric(&server, r#"millrace_serving_cut_connections_total{service="gRPC"}"#).await >= Some(1.0));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn body_of_a_control_call_has_the_same_timeout_as_any() {
    let mut config = impatient();
    config.limits.connections_max = 8;
    let server = Server::start(config, &[]).await;
    let address = server.serving.addresses().http;
    let paths = [
        "/v2/repository/index",
        "/v2/repository/models/mlp/load",
        "/v2/repository/models/mlp/unload",
        "/v2/trace/setting",
        "/v2/models/mlp/trace/setting",
        "/v2/logging",
        "/v2/systemsharedmemory/region/r/register",
        "/v2/models/mlp/infer",
    ];
    let mut clients = tokio::task::JoinSet::new();
    for (index, path) in paths.into_iter().enumerate() {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let head = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 60000\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        clients.spawn(async move {
            let (mut reader, mut writer) = stream.into_split();
            // Every second client sends a byte from time to time.
            let drip = async {
                while index % 2 == 0 && writer.write_all(b" ").await.is_ok() {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                std::future::pending::<()>().await;
            };
            let mut answer = Vec::new();
            tokio::select! {
                read = reader.read_to_end(&mut answer) => drop(read),
                () = drip => {}
            }
            (path, String::from_utf8_lossy(&answer).into_owned())
        });
    }
    for (path, answer) in
        tokio::time::timeout(HANGING, clients.join_all()).await.expect("a body is waited for")
    {
        assert!(
            answer.starts_with("HTTP/1.1 408") && answer.contains("limits.stalled_ms_max"),
            "{path}: {answer}"
        );
    }
    assert_eq!(server.http("GET", "/v2/health/live", &[], b"").await.status, 200);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_that_are_being_received_have_a_common_bound() {
    let mut config = config();
    config.limits.stalled_ms_max = PATIENT_MS;
    config.limits.body_bytes_max = 1 << 20;
    let server = Server::start(config, &[("echo", 1, echo(&[Datatype::Uint8]))]).await;
    let addresses = server.serving.addresses();
    let mut channel = tonic::transport::Endpoint::from_shared(format!("http://{}", addresses.grpc))
        .unwrap()
        .connect()
        .await
        .unwrap();
    let half = zeros(512 << 10);
    assert_eq!(bare_call(&mut channel, "ModelInfer", None, half.clone()).await.0, 0, "alone it fits");
    let headers = [("content-encoding", "gzip")];
    let blanks = packed("gzip", &vec![b' '; 512 << 10]);
    // Most of a body that never continues. The bound refuses whichever body exceeds it; where that was this one too,
    // the test begins it again.
    let refused = async {
        loop {
            let mut held = TcpStream::connect(addresses.http).await.unwrap();
            let head =
                "POST /v2/models/mlp/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n";
            held.write_all(head.as_bytes()).await.unwrap();
            let sent = held.write_all(&vec![b' '; 900 << 10]).await;
            while sent.is_ok() && held.try_read(&mut [0]).is_err_and(|error| error.kind() == WouldBlock) {
                let (status, message) = bare_call(&mut channel, "ModelInfer", None, half.clone()).await;
                if status == 0 {
                    continue;
                }
                assert!(status == 8 && message.contains("limits.body_bytes_max"), "{status} {message}");
                let reply = server.http("POST", "/v2/models/mlp/infer", &headers, &blanks).await;
                if reply.status == 429 {
                    return held;
                }
                held.readable().await.unwrap();
            }
        }
    };
    let held = tokio::time::timeout(HANGING, refused).await.expect("no common bound");
    assert_eq!(
        bare_call(&mut channel, "ModelInfer", Some("gzip"), frame(1, &packed("gzip", &half[5..]))).await.0,
        8
    );
    let small =
        as_rest(&typed(pb::InferTensorContents { fp32_contents: vec![0.5; FEATURES], ..Default::default() }));
    assert_eq!(server.http("POST", &small.path, &[], &small.body).await.status, 200, "small ones fit");
    drop(held);
    let again = async { while bare_call(&mut channel, "ModelInfer", None, half.clone()).await.0 != 0 {} };
    tokio::time::timeout(HANGING, again).await.expect("what was counted stays");
    server.stop().await;
}

/// An HTTP/2 frame.
fn http2_frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// The headers of a call, with HPACK's static table only.
fn call_head(path: &str) -> Vec<u8> {
    let text = |text: &str| [&[text.len() as u8], text.as_bytes()].concat();
    // POST, http, :path, :authority, content-type.
    [
        &[0x83, 0x86, 0x04][..],
        &text(path),
        &[0x01],
        &text("localhost"),
        &[0x0f, 0x10],
        &text("application/grpc"),
    ]
    .concat()
}

/// Calls that the client cancels immediately, beginning at a stream id.
fn cancelled(count: u32, first: u32) -> Vec<u8> {
    let head = call_head(INFER);
    let call = |stream| [http2_frame(1, 4, stream, &head), http2_frame(3, 0, stream, &[0, 0, 0, 8])].concat();
    (0..count).flat_map(|index| call(first + 2 * index)).collect()
}

/// Reads frames until one has this kind and stream; panics at GOAWAY.
async fn until(stream: &mut TcpStream, kind: u8, id: u32) -> Vec<u8> {
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).await.expect("the server closed the connection");
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        stream.read_exact(&mut payload).await.unwrap();
        assert_ne!(head[3], 7, "GOAWAY: {}", String::from_utf8_lossy(&payload));
        if (head[3], u32::from_be_bytes([head[5], head[6], head[7], head[8]])) == (kind, id) {
            return payload;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_time_out_do_not_end_other_calls() {
    let server = Server::start(config(), &[("echo", 1, echo(&[Datatype::Uint8]))]).await;
    let mut stream = TcpStream::connect(server.serving.addresses().grpc).await.unwrap();
    stream.write_all(&[PREFACE, &http2_frame(4, 0, 0, &[])].concat()).await.unwrap();
    // The first call has begun and continues while 2,000 others time out before the server accepts them.
    let body = zeros(10);
    stream.write_all(&http2_frame(1, 4, 1, &call_head(INFER))).await.unwrap();
    stream.write_all(&cancelled(2_000, 3)).await.unwrap();
    stream.write_all(&http2_frame(0, 1, 1, &body)).await.unwrap();
    let answer = tokio::time::timeout(HANGING, until(&mut stream, 0, 1)).await.unwrap();
    assert!(answer.windows(4).any(|name| name == b"echo"), "{answer:?}");
    server.stop().await;
}
