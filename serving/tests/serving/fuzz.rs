//! Fuzz tests: random changes of valid requests, and of the bytes on the ports. No answer may blame the
//! server, and the server must keep answering. The cases are the same in every run;
//! `MILLRACE_FUZZ_REQUESTS=10000000` runs more than the few thousand of `make test`.

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use millrace_serving::wire::inference::infer_parameter::ParameterChoice;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::transport::{Channel, Endpoint};

use crate::compressed::{bare_call, frame, packed};
use crate::malformed::*;
use crate::support::*;

const REQUESTS: usize = 4000;
/// gRPC statuses that blame the server.
const UNKNOWN: i32 = 2;
const INTERNAL: i32 = 13;

fn requests() -> usize {
    match std::env::var("MILLRACE_FUZZ_REQUESTS") {
        Ok(text) => text.parse().expect("MILLRACE_FUZZ_REQUESTS is a number of requests"),
        Err(_) => REQUESTS,
    }
}

/// One change of some bytes.
#[derive(Debug, Clone)]
enum Change {
    Flip { place: usize, bit: u8 },
    Put { place: usize, byte: u8 },
    Cut { left: usize },
    Insert { place: usize, bytes: Vec<u8> },
    Remove { place: usize, count: usize },
    Double { place: usize, count: usize },
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let place = any::<usize>;
    // Bytes with a meaning: lengths, ends, JSON syntax.
    let telling = prop_oneof![
        any::<u8>(),
        proptest::sample::select(b"\x00\x01\x7f\x80\xff[]{}\",:0-e.\\ \n".to_vec()),
    ];
    let change = prop_oneof![
        4 => (place(), 0u8..8).prop_map(|(place, bit)| Change::Flip { place, bit }),
        4 => (place(), telling.clone()).prop_map(|(place, byte)| Change::Put { place, byte }),
        1 => place().prop_map(|left| Change::Cut { left }),
        2 => (place(), proptest::collection::vec(telling, 1..12))
            .prop_map(|(place, bytes)| Change::Insert { place, bytes }),
        1 => (place(), 1usize..20).prop_map(|(place, count)| Change::Remove { place, count }),
        1 => (place(), 1usize..40).prop_map(|(place, count)| Change::Double { place, count }),
    ];
    proptest::collection::vec(change, 1..5)
}

fn changed(mut bytes: Vec<u8>, changes: &[Change]) -> Vec<u8> {
    for change in changes {
        let length = bytes.len().max(1);
        let end = |place: usize, count: usize, bytes: &[u8]| (place % length + count).min(bytes.len());
        match change {
            Change::Flip { place, bit } => {
                if let Some(byte) = bytes.get_mut(place % length) {
                    *byte ^= 1 << bit;
                }
            }
            Change::Put { place, byte } => {
                if let Some(old) = bytes.get_mut(place % length) {
                    *old = *byte;
                }
            }
            Change::Cut { left } => bytes.truncate(left % length),
            Change::Insert { place, bytes: more } => {
                let place = (place % length).min(bytes.len());
                bytes.splice(place..place, more.iter().copied());
            }
            Change::Remove { place, count } => {
                let end = end(*place, *count, &bytes);
                bytes.drain((place % length).min(end)..end);
            }
            Change::Double { place, count } => {
                let end = end(*place, *count, &bytes);
                let part = bytes[(place % length).min(end)..end].to_vec();
                bytes.splice(end..end, part);
            }
        }
    }
    bytes
}

/// The same sequence of cases in every run.
struct Cases<S> {
    runner: TestRunner,
    strategy: S,
}

impl<S: Strategy> Cases<S> {
    fn new(strategy: S) -> Cases<S> {
        let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
        Cases { runner: TestRunner::new_with_rng(Config::default(), rng), strategy }
    }

    fn next(&mut self) -> S::Value {
        self.strategy.new_tree(&mut self.runner).unwrap().current()
    }
}

/// Valid requests of several forms.
fn valid() -> Vec<millrace_serving::wire::inference::ModelInferRequest> {
    let text = || parameter(ParameterChoice::StringParam("x".into()));
    let typed = typed(millrace_serving::wire::inference::InferTensorContents {
        fp32_contents: vec![1.0, -2.0, 0.5, 3.0],
        ..Default::default()
    });
    vec![
        good(),
        typed,
        raw_echo("BYTES", &[2], &[1, 0, 0, 0, b'a', 3, 0, 0, 0, b'b', b'c', b'd']),
        raw_echo("BOOL", &[3], &[0, 1, 1]),
        edited(|request| {
            request.id = "an id".into();
            request.model_version = "1".into();
            request.outputs.push(requested("logits"));
            request.outputs[0].parameters.insert("mood".into(), text());
            request.parameters.insert("priority".into(), parameter(ParameterChoice::Uint64Param(3)));
            request.inputs[0].parameters.insert("mood".into(), text());
        }),
    ]
}

async fn channel(address: std::net::SocketAddr) -> Channel {
    Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap()
}

async fn fuzz_grpc(server: &Server, requests: usize) {
    let mut channel = channel(server.serving.addresses().grpc).await;
    let valid: Vec<Vec<u8>> = valid().iter().map(Message::encode_to_vec).collect();
    let mut cases = Cases::new((0..valid.len(), 0u8..8, changes()));
    for case in 0..requests {
        let (seed, form, changes) = cases.next();
        let (encoding, body) = match form {
            // The prefix and the bytes around it.
            0 => (None, changed(frame(0, &valid[seed]), &changes)),
            1 => (Some("gzip"), changed(frame(1, &packed("gzip", &valid[seed])), &changes)),
            2 => (Some("deflate"), frame(1, &packed("deflate", &changed(valid[seed].clone(), &changes)))),
            3 => (Some("gzip"), frame(1, &changed(packed("gzip", &valid[seed]), &changes))),
            _ => (None, frame(0, &changed(valid[seed].clone(), &changes))),
        };
        let (status, message) = bare_call(&mut channel, "ModelInfer", encoding, body.clone()).await;
        assert!(
            status != INTERNAL && status != UNKNOWN,
            "case {case} ({encoding:?}): {status} {message} for {body:?}"
        );
    }
}

async fn fuzz_rest(server: &Server, requests: usize) {
    let address = server.serving.addresses().http;
    let mut channel = channel(address).await;
    let valid: Vec<Ask> = valid().iter().map(as_rest).collect();
    let mut cases = Cases::new((0..valid.len(), 0u8..8, changes(), -3i64..3));
    for case in 0..requests {
        let (seed, form, changes, shift) = cases.next();
        let ask = &valid[seed];
        let (encoding, body) = match form {
            0 => (Some("gzip"), changed(packed("gzip", &ask.body), &changes)),
            1 => (Some("deflate"), packed("deflate", &changed(ask.body.clone(), &changes))),
            _ => (None, changed(ask.body.clone(), &changes)),
        };
        let mut request = http::Request::post(format!("http://{address}{}", ask.path));
        for (name, value) in &ask.headers {
            // Mostly valid, so that cases also get beyond the first check.
            let shifted =
                if form == 7 { (value.parse::<i64>().unwrap() + shift).to_string() } else { value.clone() };
            request = request.header(*name, shifted);
        }
        if let Some(encoding) = encoding {
            request = request.header("content-encoding", encoding);
        }
        let request = request.body(Body::new(Full::new(Bytes::from(body.clone())))).unwrap();
        std::future::poll_fn(|cx| channel.poll_ready(cx)).await.unwrap();
        let reply = channel.call(request).await.unwrap();
        let status = reply.status().as_u16();
        let said = reply.into_body().collect().await.unwrap().to_bytes();
        assert!(status < 500 || status == 501, "case {case}: {status} {said:?} for {body:?}");
        if status != 200 {
            let json: serde_json::Value = serde_json::from_slice(&said).unwrap();
            assert!(json["error"].is_string(), "case {case}: {said:?}");
        }
    }
}

async fn fuzz_ports(server: &Server, requests: usize) {
    let addresses = server.serving.addresses();
    let ask = as_rest(&good());
    let head = format!(
        "POST {} HTTP/1.1\r\nhost: localhost\r\n{}: {}\r\ncontent-length: {}\r\n\r\n",
        ask.path,
        ask.headers[0].0,
        ask.headers[0].1,
        ask.body.len()
    );
    let http1 = [head.as_bytes(), &ask.body].concat();
    // The preface, empty settings, and the headers and the data of a request, without HPACK compression of
    // names.
    let mut http2 =
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0\0\0\x03\x01\x05\0\0\0\x01\x82\x86\x84"
            .to_vec();
    http2.extend_from_slice(b"\0\0\x08\x06\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x04\x08\0\0\0\0\0\0\0\x10\0");
    let seeds = [http1, http2];
    let mut cases = Cases::new((0..seeds.len(), 0u8..3, changes()));
    for case in 0..requests {
        let (seed, port, changes) = cases.next();
        let address = [addresses.grpc, addresses.http, addresses.metrics][usize::from(port)];
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let bytes = changed(seeds[seed].clone(), &changes);
        // The server may refuse before it has received everything.
        let _ = stream.write_all(&bytes).await;
        let _ = stream.shutdown().await;
        let mut said = Vec::new();
        let _ = stream.read_to_end(&mut said).await;
        assert!(!said.starts_with(b"HTTP/1.1 500"), "case {case}: {said:?} for {bytes:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn arbitrary_bytes_never_cause_a_server_error() {
    let server = server().await;
    let requests = requests();
    fuzz_grpc(&server, requests / 2).await;
    fuzz_rest(&server, requests / 2).await;
    // Each of these uses a new connection, whose port then stays in TIME_WAIT for a minute.
    fuzz_ports(&server, requests / 20).await;
    server.client().await.infer_message(good()).await.unwrap();
    assert_eq!(ask(&server, &as_rest(&good())).await.status, 200);
    server.stop().await;
}
