//! Test of short calls beside large bodies; a program of its own, because it reads a metric of the whole
//! process.
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "serving/support.rs"]
#[allow(dead_code, reason = "the tests of the protocol use the rest")]
mod support;

use std::time::Duration;

use millrace_bundle::Datatype;
use millrace_serving::tensor::Tensor;
use millrace_serving::wire::Form;
use support::*;

/// Timeout: a hang is a failure; no test measures time.
const HANGING: Duration = Duration::from_secs(300);

/// Bodies that are being decoded or wait for it.
async fn large_bodies(server: &Server) -> usize {
    let reply = http(server.serving.addresses().metrics, "GET", "/metrics", &[], b"").await;
    let text = String::from_utf8(reply.body).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("millrace_serving_large_bodies "));
    line.map_or(0, |value| value.trim().parse().unwrap())
}

/// One thread runs everything, so decoding a body on it would block all other calls.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn short_calls_are_answered_while_large_bodies_are_read() {
    let server = Server::start(config(), &[("echo", 1, echo(&[Datatype::Uint8]))]).await;
    let mut client = server.client().await;
    let elements = 4 << 20;
    let body = format!(
        r#"{{"inputs":[{{"name":"in_UINT8","shape":[{elements}],"datatype":"UINT8","data":[{}1]}}],"parameters":{{"binary_data_output":true}}}}"#,
        "1,".repeat(elements - 1)
    );
    let address = server.serving.addresses().http;
    let answered = async {
        loop {
            let body = body.clone();
            let large = tokio::spawn(async move {
                http(address, "POST", "/v2/models/echo/infer", &[], body.as_bytes()).await.status
            });
            let mut answered = 0;
            // It is the only large body; the metric drops to 0 when it is decoded.
            while !large.is_finished() {
                if large_bodies(&server).await == 0 {
                    tokio::task::yield_now().await;
                    continue;
                }
                let input = Tensor::fp32("input", vec![1, FEATURES as i64], vec![0.5; FEATURES]).unwrap();
                client.infer("mlp", None, vec![input], Form::Raw).await.unwrap();
                if large_bodies(&server).await > 0 {
                    answered += 1;
                }
            }
            assert_eq!(large.await.unwrap(), 200);
            if answered > 0 {
                return;
            }
        }
    };
    tokio::time::timeout(HANGING, answered).await.expect("no short call is answered meanwhile");
    assert_eq!(large_bodies(&server).await, 0);
    server.stop().await;
}
