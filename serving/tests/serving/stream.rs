//! Tests of streams: order, refusals in between, concurrency, draining, and disconnecting clients.

use std::time::Duration;

use futures::channel::mpsc::{UnboundedSender, unbounded};
use millrace_serving::tensor::Data;
use millrace_serving::wire::inference as pb;
use pb::infer_parameter::ParameterChoice::BoolParam;
use pb::model_infer_request::InferInputTensor;
use tonic::{Code, Request, Streaming};

use crate::shared_memory::grpc;
use crate::support::*;

const WAIT: Duration = Duration::from_secs(30);

fn request(model: &str, id: impl ToString, rows: usize, width: usize) -> pb::ModelInferRequest {
    pb::ModelInferRequest {
        model_name: model.into(),
        id: id.to_string(),
        inputs: vec![InferInputTensor {
            name: "input".into(),
            datatype: "FP32".into(),
            shape: vec![rows as i64, width as i64],
            ..Default::default()
        }],
        raw_input_contents: vec![Data::Fp32(vec![0.01; rows * width]).to_raw()],
        ..Default::default()
    }
}

fn quick(id: impl ToString) -> pb::ModelInferRequest {
    request("mlp", id, 1, FEATURES)
}

/// A stream that stays open until the sender is dropped.
async fn open(
    server: &Server,
) -> (UnboundedSender<pb::ModelInferRequest>, Streaming<pb::ModelStreamInferResponse>) {
    let (sender, requests) = unbounded();
    let answers = grpc(server).await.model_stream_infer(requests).await.unwrap().into_inner();
    (sender, answers)
}

async fn next(answers: &mut Streaming<pb::ModelStreamInferResponse>) -> pb::ModelStreamInferResponse {
    tokio::time::timeout(WAIT, answers.message()).await.unwrap().unwrap().unwrap()
}

fn id(answer: &pb::ModelStreamInferResponse) -> &str {
    &answer.infer_response.as_ref().unwrap().id
}

/// Waits until `count` requests are in flight.
async fn in_flight(server: &Server, count: usize) {
    let wait = async {
        while server.serving.inference().in_flight() != count {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(WAIT, wait).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stream_answers_and_errors_come_in_request_order() {
    let server = Server::start(config(), &[("slow", 1, slow(20))]).await;
    let mut requests = Vec::new();
    for index in 0..60 {
        requests.push(match index % 6 {
            0 => request("slow", index, 16, 512),
            2 => request("nosuch", index, 1, FEATURES),
            4 => request("mlp", index, 1, FEATURES + 1),
            _ => quick(index),
        });
    }
    let stream = futures::stream::iter(requests);
    let mut answers = grpc(&server).await.model_stream_infer(stream).await.unwrap().into_inner();
    for index in 0..60 {
        let answer = next(&mut answers).await;
        assert_eq!(id(&answer), index.to_string());
        let response = answer.infer_response.as_ref().unwrap();
        assert_eq!(response.parameters["triton_final_response"].parameter_choice, Some(BoolParam(true)));
        match index % 6 {
            2 => assert!(answer.error_message.contains("no model \"nosuch\""), "{answer:?}"),
            4 => assert!(answer.error_message.contains("[-1, 4]"), "{answer:?}"),
            _ => {
                assert_eq!(answer.error_message, "");
                assert_eq!(response.outputs.len(), 1, "{index}");
            }
        }
        assert_eq!(response.outputs.is_empty(), !answer.error_message.is_empty());
    }
    assert_eq!(answers.message().await.unwrap(), None);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stream_answers_before_the_client_has_sent_all_requests() {
    let server = Server::start(config(), &[]).await;
    let (sender, mut answers) = open(&server).await;
    for index in 0..100 {
        let mut request = quick(index);
        let empty = pb::InferParameter { parameter_choice: Some(BoolParam(index % 2 == 0)) };
        request.parameters.insert("triton_enable_empty_final_response".into(), empty);
        sender.unbounded_send(request).unwrap();
        let answer = next(&mut answers).await;
        assert_eq!((id(&answer), answer.error_message.as_str()), (index.to_string().as_str(), ""));
    }
    let mut request = quick("typed");
    let wrong = pb::InferParameter { parameter_choice: None };
    request.parameters.insert("triton_enable_empty_final_response".into(), wrong);
    sender.unbounded_send(request).unwrap();
    let answer = next(&mut answers).await;
    assert!(answer.error_message.contains("takes a boolean"), "{answer:?}");
    drop(sender);
    assert_eq!(answers.message().await.unwrap(), None);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_of_one_stream_run_at_once() {
    // One runs and one may wait: if they ran one after another, none would be refused.
    let mut config = config();
    config.sessions_max = 1;
    config.limits.requests_waiting_max = 1;
    let server = Server::start(config, &[("slow", 1, slow(40))]).await;
    let requests = futures::stream::iter((0..8).map(|index| request("slow", index, 64, 512)));
    let mut answers = grpc(&server).await.model_stream_infer(requests).await.unwrap().into_inner();
    let mut refused = 0;
    for index in 0..8 {
        let answer = next(&mut answers).await;
        assert_eq!(id(&answer), index.to_string());
        if !answer.error_message.is_empty() {
            assert!(answer.error_message.contains("limits are 1 "), "{answer:?}");
            refused += 1;
        }
    }
    assert!((1..=6).contains(&refused), "{refused}");
    assert_eq!(answers.message().await.unwrap(), None);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_reads_late_gets_every_answer() {
    let server = Server::start(config(), &[]).await;
    let (sender, mut answers) = open(&server).await;
    for index in 0..5000 {
        sender.unbounded_send(quick(index)).unwrap();
    }
    drop(sender);
    // It does not block another client.
    let mut other = grpc(&server).await;
    for index in 0..10 {
        assert_eq!(other.model_infer(quick(index)).await.unwrap().into_inner().id, index.to_string());
    }
    for index in 0..5000 {
        assert_eq!(id(&next(&mut answers).await), index.to_string());
    }
    assert_eq!(answers.message().await.unwrap(), None);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn draining_finishes_running_requests_and_ends_the_stream() {
    let server = Server::start(config(), &[("slow", 1, slow(40))]).await;
    let (_idle, mut nothing) = open(&server).await;
    let (sender, mut answers) = open(&server).await;
    sender.unbounded_send(request("slow", "running", 256, 512)).unwrap();
    in_flight(&server, 1).await;
    server.cancel.cancel();
    tokio::time::timeout(WAIT, server.serving.inference().draining()).await.unwrap();
    sender.unbounded_send(quick("late")).unwrap();
    let answer = next(&mut answers).await;
    assert_eq!((id(&answer), answer.error_message.as_str()), ("running", ""));
    // The late request is refused by an answer or by the end of the stream, whichever comes first.
    let mut status = None;
    while status.is_none() {
        match tokio::time::timeout(WAIT, answers.message()).await.unwrap() {
            Ok(Some(answer)) => {
                assert_eq!(id(&answer), "late");
                assert!(answer.error_message.contains("stopping"), "{answer:?}");
            }
            Ok(None) => panic!("the stream ended as if every request had been answered"),
            Err(end) => status = Some(end),
        }
    }
    assert_eq!(status.unwrap().code(), Code::Unavailable);
    let status = tokio::time::timeout(WAIT, nothing.message()).await.unwrap().unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.message().contains("stopping"), "{status}");
    tokio::time::timeout(WAIT, server.serving.join()).await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queued_requests_of_a_disconnected_client_are_not_run() {
    let mut config = config();
    config.sessions_max = 1;
    let server = Server::start(config, &[("abandoned", 1, slow(40))]).await;
    let (sender, mut answers) = open(&server).await;
    for index in 0..12 {
        sender.unbounded_send(request("abandoned", index, 32, 512)).unwrap();
    }
    assert_eq!(id(&next(&mut answers).await), "0");
    drop((sender, answers));
    in_flight(&server, 0).await;
    let metrics = http(server.serving.addresses().metrics, "GET", "/metrics", &[], b"").await;
    let text = String::from_utf8(metrics.body).unwrap();
    let line = r#"millrace_serving_requests_total{model="abandoned",outcome="ok",version="1"} "#;
    let count: u64 = text.lines().find_map(|found| found.strip_prefix(line)).unwrap().parse().unwrap();
    assert!((1..12).contains(&count), "{count}");
    server.client().await.infer_message(quick(0)).await.unwrap();
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_ends_with_a_status_when_it_must_or_is_asked_to() {
    let mut config = config();
    config.limits.message_bytes_max = 4096;
    let server = Server::start(config, &[]).await;
    // A message that is too large: the requests before it are answered.
    let requests = futures::stream::iter([quick(0), quick(1), request("mlp", 2, 1000, FEATURES), quick(3)]);
    let mut answers = grpc(&server).await.model_stream_infer(requests).await.unwrap().into_inner();
    for index in 0..2 {
        assert_eq!(id(&next(&mut answers).await), index.to_string());
    }
    assert_eq!(answers.message().await.unwrap_err().code(), Code::ResourceExhausted);

    // Errors as statuses.
    let mut wrong = quick(1);
    wrong.model_name = "nosuch".into();
    let mut strict = Request::new(futures::stream::iter([quick(0), wrong, quick(2)]));
    strict.metadata_mut().insert("triton_grpc_error", "true".parse().unwrap());
    let mut answers = grpc(&server).await.model_stream_infer(strict).await.unwrap().into_inner();
    assert_eq!(id(&next(&mut answers).await), "0");
    let status = answers.message().await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound, "{status}");
    assert_eq!(answers.message().await.unwrap(), None);

    // Nothing to answer.
    let none = futures::stream::iter([]);
    let mut answers = grpc(&server).await.model_stream_infer(none).await.unwrap().into_inner();
    assert_eq!(answers.message().await.unwrap(), None);
    server.stop().await;
}
