//! Tests of the load generator over real sockets: the client and the server account for every request.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_bundle::Signature;
use millrace_serving::client::{Client, ClientError, Credentials};
use millrace_serving::load::{
    CLIENTS_MAX, Closed, LoadError, Measured, Open, Poisson, RATE_MAX, Requests, closed, closed_with, open,
    open_with,
};
use millrace_serving::{Config, new_token};

use crate::support::*;
use crate::tls::Files;

const WARM_UP: Duration = Duration::from_millis(200);
const DURATION: Duration = Duration::from_millis(800);

async fn requests(server: &Server, model: &str) -> Requests {
    let signature = server.client().await.signature(model, "").await.unwrap();
    Requests::generated(model, None, &signature, 2, &BTreeMap::new(), 5).unwrap()
}

fn poisson(rate: f64) -> Open {
    Open { rate, connections: 3, deadline: None, warm_up: WARM_UP, duration: DURATION, seed: 9 }
}

/// Number of requests that an open loop sends, and number of those that it counts.
fn scheduled(load: &Open) -> (u64, u64) {
    let times: Vec<_> =
        Poisson::new(load.rate, load.seed).take_while(|at| *at < WARM_UP + DURATION).collect();
    let counted = times.iter().filter(|at| **at >= WARM_UP).count();
    (times.len() as u64, counted as u64)
}

fn accounted(measured: &Measured) -> u64 {
    measured.latency.count() + measured.failures() + measured.unsent
}

async fn answered(server: &Server, model: &str) -> u64 {
    let name = model.to_owned();
    let request = millrace_serving::wire::inference::ModelStatisticsRequest { name, version: String::new() };
    let statistics = server.triton().await.model_statistics(request).await.unwrap().into_inner();
    statistics.model_stats[0].inference_stats.as_ref().unwrap().success.as_ref().unwrap().count
}

#[tokio::test(flavor = "multi_thread")]
async fn open_loop_sends_all_scheduled_requests() {
    let server = Server::start(config(), &[]).await;
    let address = server.serving.addresses().grpc.to_string();
    let load = poisson(300.0);
    let measured = open(&address, &requests(&server, "mlp").await, &load).await.unwrap();
    let (sent, counted) = scheduled(&load);
    assert_eq!(accounted(&measured), counted);
    assert!(measured.failed.is_empty() && measured.unsent == 0, "{measured:?}");
    assert_eq!(measured.late.count(), counted);
    assert_eq!(measured.in_time, counted);
    assert_eq!(answered(&server, "mlp").await, sent);
    let rate = counted as f64 / DURATION.as_secs_f64();
    assert!((measured.rate() - rate).abs() < 1e-6);
    let [p50, p99] = [0.5, 0.99].map(|quantile| measured.latency.quantile(quantile));
    assert!(Duration::ZERO < p50 && p50 <= p99 && p99 <= measured.latency.longest());
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_of_a_closed_loop_wait_for_their_answers() {
    let server = Server::start(config(), &[]).await;
    let address = server.serving.addresses().grpc.to_string();
    let requests = requests(&server, "mlp").await;
    let load = Closed { clients: 4, warm_up: Duration::ZERO, duration: DURATION };
    let measured = closed(&address, &requests, &load).await.unwrap();
    assert!(measured.failed.is_empty() && measured.unsent == 0, "{measured:?}");
    // Each client has at most one request in flight when the time ends.
    let answered = answered(&server, "mlp").await;
    let counted = measured.latency.count();
    assert!((counted..=counted + 4).contains(&answered), "{counted} counted, {answered} answered");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_are_counted_by_their_status() {
    let server = Server::start(config(), &[]).await;
    let address = server.serving.addresses().grpc.to_string();
    let signature = server.client().await.signature("mlp", "").await.unwrap();
    let missing = Requests::generated("missing", None, &signature, 1, &BTreeMap::new(), 5).unwrap();
    let load = poisson(100.0);
    let measured = open(&address, &missing, &load).await.unwrap();
    let (_, counted) = scheduled(&load);
    assert_eq!(measured.failed, BTreeMap::from([("NOT_FOUND", counted)]));
    assert_eq!(failed(&address, &missing).await, ["NOT_FOUND"]);
    let nothing = Signature { inputs: vec![], ..signature };
    let nothing = Requests::generated("mlp", None, &nothing, 1, &BTreeMap::new(), 5).unwrap();
    assert_eq!(failed(&address, &nothing).await, ["INVALID_ARGUMENT"]);
    server.stop().await;
}

/// The errors of a closed loop whose requests all fail.
async fn failed(address: &str, requests: &Requests) -> Vec<&'static str> {
    let load = Closed { clients: 2, warm_up: Duration::ZERO, duration: DURATION };
    loop {
        let measured = closed(address, requests, &load).await.unwrap();
        assert_eq!((measured.latency.count(), measured.in_time), (0, 0));
        // A busy machine may have answered none.
        if !measured.failed.is_empty() {
            return measured.failed.into_keys().collect();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_after_the_deadline_do_not_count_as_in_time() {
    let server = Server::start(config(), &[("slow", 1, slow(100))]).await;
    let address = server.serving.addresses().grpc.to_string();
    let requests = requests(&server, "slow").await;
    // Less than one run takes on any machine.
    let load = Open { deadline: Some(Duration::from_micros(500)), ..poisson(40.0) };
    let measured = open(&address, &requests, &load).await.unwrap();
    let (_, counted) = scheduled(&load);
    assert_eq!(accounted(&measured), counted);
    assert_eq!(measured.in_time, 0, "{measured:?}");
    let expected = ["DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"];
    assert!(measured.failed.keys().all(|status| expected.contains(status)), "{:?}", measured.failed);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn impossible_loads_are_refused_with_a_reason() {
    let server = Server::start(config(), &[]).await;
    let address = server.serving.addresses().grpc.to_string();
    let requests = requests(&server, "mlp").await;
    let refused = |done: Result<Measured, LoadError>, says: &str| match done {
        Err(LoadError::Load(reason)) => assert!(reason.contains(says), "{reason}"),
        other => panic!("{other:?}"),
    };
    for rate in [0.0, -1.0, f64::NAN, f64::INFINITY, RATE_MAX * 1.01] {
        refused(open(&address, &requests, &poisson(rate)).await, "above 0 and at most 1000000");
    }
    for number in [0, CLIENTS_MAX + 1] {
        let load = Open { connections: number, ..poisson(10.0) };
        refused(open(&address, &requests, &load).await, "from 1 to 10000");
        let load = Closed { clients: number, warm_up: WARM_UP, duration: DURATION };
        refused(closed(&address, &requests, &load).await, "from 1 to 10000");
    }
    let load = Closed { clients: 1, warm_up: WARM_UP, duration: DURATION };
    for (address, unreachable) in [("127.0.0.1:1", true), ("not an address", false)] {
        match closed(address, &requests, &load).await {
            Err(LoadError::Client(ClientError::Unreachable { .. })) => assert!(unreachable),
            Err(LoadError::Client(ClientError::Address { .. })) => assert!(!unreachable),
            other => panic!("{other:?}"),
        }
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn loads_send_the_credentials_that_the_server_requires() {
    let files = Files::new();
    let (token, line) = new_token("bench", &["mlp".to_owned()], false).unwrap();
    files.write("tokens", &line);
    let mut config = Config { tokens: Some(files.path("tokens")), ..files.config() };
    config.tls.as_mut().unwrap().client_ca = Some(files.path("ca.pem"));
    let server = Server::start(config, &[]).await;
    let address = server.serving.addresses().grpc.to_string();
    let known = Credentials { token: Some(token), ..files.credentials(Some("client")) };
    let mut client = Client::connect_with(&address, &known).await.unwrap();
    let signature = client.signature("mlp", "").await.unwrap();
    let requests = Requests::generated("mlp", None, &signature, 2, &BTreeMap::new(), 5).unwrap();

    let rate = poisson(100.0);
    let (_, counted) = scheduled(&rate);
    let measured = open_with(&address, &known, &requests, &rate).await.unwrap();
    assert!(measured.failed.is_empty() && measured.in_time == counted, "{measured:?}");
    let unknown = Credentials { token: None, ..known.clone() };
    let measured = open_with(&address, &unknown, &requests, &rate).await.unwrap();
    assert_eq!(measured.failed, BTreeMap::from([("UNAUTHENTICATED", counted)]));

    let load = Closed { clients: 2, warm_up: Duration::ZERO, duration: DURATION };
    loop {
        let measured = closed_with(&address, &known, &requests, &load).await.unwrap();
        assert!(measured.failed.is_empty(), "{measured:?}");
        // A busy machine may have answered none.
        if measured.latency.count() > 0 {
            break;
        }
    }
    let lost = Credentials { ca: Some(files.path("none")), ..known };
    match closed_with(&address, &lost, &requests, &load).await {
        Err(LoadError::Client(ClientError::Credentials { reason })) => assert!(reason.contains("none")),
        other => panic!("{other:?}"),
    }
    server.stop().await;
}
