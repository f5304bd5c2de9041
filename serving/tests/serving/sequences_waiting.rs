//! Tests of waiting sequence requests: they are batched with those of other sequences, and cancelled or late
//! requests change no state.

use std::time::{Duration, Instant};

use millrace_bundle::onnx::{GraphProto, tensor_proto::DataType};
use millrace_serving::wire::inference as pb;
use millrace_serving::wire::inference::infer_parameter::ParameterChoice;
use tempfile::TempDir;
use tonic::{Code, Status};

use crate::sequences::{END, NEXT, START, first, request};
use crate::support::*;
use crate::triton_layout::put;

const WAIT: Duration = Duration::from_secs(120);

/// Waits until a condition holds, for at most the time of a test.
async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let begin = Instant::now();
    while !is_so().await {
        assert!(begin.elapsed() < WAIT, "it never was so: {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Counts the requests of a sequence in `next`, each taking some milliseconds: `x` FP32 [batch, 512] of ones.
fn counter(layers: usize) -> Vec<u8> {
    let wide = [-1, 512];
    let mut graph = GraphProto {
        name: Some("counter".into()),
        initializer: vec![floats("w", &[512, 512])],
        node: vec![node("Add", &["past", "x"], "next")],
        input: vec![value("x", DataType::Float, &wide), value("past", DataType::Float, &wide)],
        output: vec![value("y", DataType::Float, &wide), value("next", DataType::Float, &wide)],
        ..Default::default()
    };
    let mut last = "next".to_string();
    for layer in 0..layers {
        let product = format!("m{layer}");
        let out = if layer + 1 == layers { "y".to_string() } else { format!("t{layer}") };
        graph.node.push(node("MatMul", &[&last, "w"], &product));
        graph.node.push(node("Tanh", &[&product], &out));
        last = out;
    }
    model(graph)
}

/// One session; clients see the state, because the outputs list it.
const COUNTING: &str = r#"
    max_batch_size: 64
    instance_group { count: 1 }
    input { name: "x" data_type: TYPE_FP32 dims: 512 }
    output [ { name: "y" data_type: TYPE_FP32 dims: 512 }, { name: "next" data_type: TYPE_FP32 dims: 512 } ]
    sequence_batching {
      max_sequence_idle_microseconds: 3600000000
      state { input_name: "past" output_name: "next" data_type: TYPE_FP32 dims: 512 }
    }
"#;

async fn counting(name: &str, layers: usize) -> Server {
    let dir = TempDir::new().unwrap();
    put(dir.path(), &format!("{name}/config.pbtxt"), COUNTING);
    put(dir.path(), &format!("{name}/1/model.onnx"), counter(layers));
    Server::over(config(), dir).await
}

async fn count(client: &mut Triton, name: &str, id: u64, (start, end): (bool, bool)) -> Result<f32, Status> {
    let response = client.model_infer(request(name, id, start, end, &[1.0; 512])).await?;
    Ok(first(response.get_ref(), "next"))
}

async fn statistics(server: &Server, name: &str) -> pb::ModelStatistics {
    let request = pb::ModelStatisticsRequest { name: name.into(), version: String::new() };
    server.triton().await.model_statistics(request).await.unwrap().into_inner().model_stats.remove(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_of_different_sequences_run_together() {
    let server = counting("together", 20).await;
    let client = server.triton().await;
    for (counted, flags) in [(1.0, START), (2.0, NEXT), (3.0, END)] {
        let mut requests = tokio::task::JoinSet::new();
        for id in 1..=24 {
            let mut client = client.clone();
            requests.spawn(async move { count(&mut client, "together", id, flags).await.unwrap() });
        }
        assert_eq!(requests.join_all().await, vec![counted; 24]);
    }
    let statistics = statistics(&server, "together").await;
    assert_eq!(statistics.inference_count, 3 * 24);
    assert!(statistics.execution_count < 3 * 24, "{statistics:?}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancelled_or_late_request_leaves_the_sequence_state_unchanged() {
    let server = counting("leavers", 60).await;
    let mut client = server.triton().await;
    count(&mut client, "leavers", 7, START).await.unwrap();
    let figures = async || {
        let spent = statistics(&server, "leavers").await.inference_stats.unwrap();
        (spent.success.unwrap().count, spent.fail.unwrap().count)
    };
    // Clients disconnect until one does before its answer.
    let begin = Instant::now();
    while figures().await.1 == 0 {
        assert!(begin.elapsed() < WAIT, "nobody went in time");
        let calls: Vec<_> = (0..8)
            .map(|_| {
                let mut client = client.clone();
                tokio::spawn(async move { count(&mut client, "leavers", 7, NEXT).await })
            })
            .collect();
        let inference = server.serving.inference();
        until("all have come", async || {
            let done = calls.iter().filter(|call| call.is_finished()).count();
            done + inference.in_flight() >= 8
        })
        .await;
        for call in &calls {
            call.abort();
        }
        until("all are gone", async || inference.in_flight() == 0).await;
    }
    // Requests without time left.
    let mut late = request("leavers", 7, false, false, &[1.0; 512]);
    let micro = pb::InferParameter { parameter_choice: Some(ParameterChoice::Uint64Param(1)) };
    late.parameters.insert("timeout".into(), micro);
    loop {
        match client.model_infer(late.clone()).await {
            Ok(_) => assert!(begin.elapsed() < WAIT, "nobody was late"),
            Err(status) => {
                assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
                break;
            }
        }
    }
    // Only answered requests were counted.
    let (answered, failed) = figures().await;
    assert!(failed >= 2, "{failed}");
    assert_eq!(count(&mut client, "leavers", 7, NEXT).await.unwrap(), (answered + 1) as f32);
    server.stop().await;
}
