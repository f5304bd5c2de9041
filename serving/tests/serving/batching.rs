//! Tests of batching: each request gets its own answer, and only independent rows are batched.

use millrace_serving::Config;
use millrace_serving::client::ClientError;
use millrace_serving::tensor::{Data, Tensor};
use millrace_serving::wire::Form;
use millrace_serving::wire::inference as pb;
use serde_json::json;
use tonic::Code;

use crate::support::*;

/// One session, so that all requests but one wait.
fn one_session() -> Config {
    let mut config = config();
    config.sessions_max = 1;
    config
}

async fn statistics(server: &Server, name: &str) -> pb::ModelStatistics {
    let request = pb::ModelStatisticsRequest { name: name.into(), version: String::new() };
    server.triton().await.model_statistics(request).await.unwrap().into_inner().model_stats.remove(0)
}

fn fp32(data: &Data) -> &[f32] {
    match data {
        Data::Fp32(values) => values,
        other => panic!("{other:?}"),
    }
}

/// Rows for the model `slow` that differ between clients.
fn slow_rows(rows: usize, seed: usize) -> Tensor {
    let values = (0..rows * 512).map(|i| ((i * 31 + seed * 17) % 101) as f32 / 101.0 - 0.5).collect();
    Tensor::fp32("input", vec![rows as i64, 512], values).unwrap()
}

/// Sends all inputs at once and returns the first output of each.
async fn ask_all(server: &Server, model: &'static str, inputs: &[Tensor]) -> Vec<Tensor> {
    // Connects first: connecting may take longer than a run, and a single request is not batched.
    let mut clients = Vec::with_capacity(inputs.len());
    for _ in inputs {
        clients.push(server.client().await);
    }
    let mut requests = tokio::task::JoinSet::new();
    for ((place, input), mut client) in inputs.iter().cloned().enumerate().zip(clients) {
        requests.spawn(async move {
            let mut answer = client.infer(model, None, vec![input], Form::Raw).await.unwrap();
            (place, answer.outputs.remove(0))
        });
    }
    let mut answers = requests.join_all().await;
    answers.sort_by_key(|(place, _)| *place);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_wait_run_together_and_each_gets_its_own_rows() {
    let server = Server::start(one_session(), &[("slow", 1, slow(20))]).await;
    let inputs: Vec<Tensor> = (0..24).map(|seed| slow_rows(1 + seed % 3, seed)).collect();
    let answers = ask_all(&server, "slow", &inputs).await;
    let mut client = server.client().await;
    for (input, answer) in inputs.iter().zip(&answers) {
        assert_eq!(answer.shape, input.shape);
        let alone = client.infer("slow", None, vec![input.clone()], Form::Raw).await.unwrap();
        let (alone, answer) = (fp32(&alone.outputs[0].data), fp32(&answer.data));
        let apart = alone.iter().zip(answer).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(apart < 1e-4, "{apart}");
    }
    let statistics = statistics(&server, "slow").await;
    // Twice each: once with the others, once alone.
    assert_eq!(statistics.inference_count, 2 * 48);
    let runs: u64 = statistics.batch_stats.iter().map(|size| size.compute_infer.unwrap().count).sum();
    let rows: u64 =
        statistics.batch_stats.iter().map(|size| size.batch_size * size.compute_infer.unwrap().count).sum();
    assert_eq!((statistics.execution_count, rows), (runs, 2 * 48));
    assert!(runs < 2 * 24, "{statistics:?}");
    assert!(statistics.batch_stats.iter().any(|size| size.batch_size > 3), "{statistics:?}");
    let spent = statistics.inference_stats.unwrap();
    assert_eq!((spent.success.unwrap().count, spent.queue.unwrap().count), (48, 48));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_clients_of_a_short_run_share_runs() {
    const CLIENTS: usize = 16;
    const REQUESTS: usize = 200;
    // As many sessions as threads, so that no request waits for another one's session.
    let server = Server::start(config(), &[("sum", 1, sum())]).await;
    let mut clients = tokio::task::JoinSet::new();
    for number in 0..CLIENTS {
        let mut client = server.client().await;
        clients.spawn(async move {
            for request in 0..REQUESTS {
                let row = |from: usize| (0..4).map(|place| (from + place) as f32).collect::<Vec<f32>>();
                let tensor = |name, from| Tensor::fp32(name, vec![1, 4], row(from)).unwrap();
                let inputs = vec![tensor("a", number * REQUESTS), tensor("b", request)];
                let answer = client.infer("sum", None, inputs, Form::Raw).await.unwrap();
                let from = number * REQUESTS + request;
                let expected: Vec<f32> = (0..4).map(|place| (from + 2 * place) as f32).collect();
                assert_eq!(fp32(&answer.outputs[0].data), expected);
            }
        });
    }
    clients.join_all().await;
    let statistics = statistics(&server, "sum").await;
    assert_eq!(statistics.inference_count, (CLIENTS * REQUESTS) as u64);
    assert!(statistics.execution_count < statistics.inference_count, "{statistics:?}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batch_rows_are_limited() {
    for (rows_max, largest) in [(4, 4), (0, 1), (1, 1)] {
        let mut config = one_session();
        config.batching.rows_max = rows_max;
        let server = Server::start(config, &[("slow", 1, slow(8))]).await;
        let inputs: Vec<Tensor> = (0..16).map(|seed| slow_rows(1, seed)).collect();
        ask_all(&server, "slow", &inputs).await;
        // A single larger request runs all the same.
        ask_all(&server, "slow", &[slow_rows(9, 1)]).await;
        let statistics = statistics(&server, "slow").await;
        assert_eq!(statistics.inference_count, 16 + 9);
        let sizes: Vec<u64> = statistics.batch_stats.iter().map(|size| size.batch_size).collect();
        assert!(sizes.iter().all(|size| *size <= largest || *size == 9), "{rows_max}: {sizes:?}");
        let mut client = server.triton().await;
        let config =
            client.model_config(pb::ModelConfigRequest { name: "slow".into(), ..Default::default() });
        let config = config.await.unwrap().into_inner().config.unwrap();
        assert_eq!(config.scheduling_choice.is_some(), rows_max > 1);
        server.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_whose_first_extent_is_no_rows_runs_one_by_one() {
    // Both accept any number of rows, but the result for one row depends on the others.
    let server = Server::start(one_session(), &[("steps", 1, steps()), ("reversed", 1, reversed())]).await;
    for model in ["steps", "reversed"] {
        let inputs: Vec<Tensor> = (0..24)
            .map(|seed| {
                let values = (0..2 * FEATURES).map(|i| (i + seed) as f32).collect();
                Tensor::fp32("input", vec![2, FEATURES as i64], values).unwrap()
            })
            .collect();
        for (input, answer) in inputs.iter().zip(ask_all(&server, model, &inputs).await) {
            let (first, second) = fp32(&input.data).split_at(FEATURES);
            let expected: Vec<f32> = match model {
                "steps" => {
                    first.iter().copied().chain(first.iter().zip(second).map(|(a, b)| a + b)).collect()
                }
                _ => second.iter().chain(first).copied().collect(),
            };
            assert_eq!(fp32(&answer.data), expected, "{model}");
        }
        let statistics = statistics(&server, model).await;
        assert_eq!(statistics.execution_count, 24);
        let mut client = server.triton().await;
        let config = client.model_config(pb::ModelConfigRequest { name: model.into(), ..Default::default() });
        assert_eq!(config.await.unwrap().into_inner().config.unwrap().scheduling_choice, None);
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_that_breaks_a_batch_is_the_only_one_that_fails() {
    let server = Server::start(one_session(), &[("table", 1, table())]).await;
    let mut requests = tokio::task::JoinSet::new();
    for place in 0..64usize {
        let mut client = server.client().await;
        requests.spawn(async move {
            // The table has four rows.
            let index = if place % 8 == 3 { 9 } else { 2 };
            let input = Tensor::new("index", vec![1], Data::Int64(vec![index])).unwrap();
            (place, client.infer("table", None, vec![input], Form::Raw).await)
        });
    }
    for (place, answer) in requests.join_all().await {
        match answer {
            Ok(answer) => {
                assert!(place % 8 != 3);
                assert_eq!(answer.outputs[0].shape, [1, 3]);
            }
            Err(error) => {
                assert!(place % 8 == 3, "{error}");
                assert!(error.to_string().contains("out of"), "{error}");
            }
        }
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_that_disconnects_while_queued_is_not_served() {
    let mut config = one_session();
    config.batching.rows_max = 0;
    let server = Server::start(config, &[("slow", 1, slow(60))]).await;
    let before = statistics(&server, "slow").await.execution_count;
    let running = {
        let mut client = server.client().await;
        tokio::spawn(async move { client.infer("slow", None, vec![slow_rows(200, 1)], Form::Raw).await })
    };
    // These wait behind the first one; then their clients disconnect.
    let waiting: Vec<_> = (0..8)
        .map(|seed| {
            let inference = server.serving.inference().clone();
            tokio::spawn(async move {
                let request = millrace_serving::infer::Request {
                    model: "slow".into(),
                    inputs: vec![slow_rows(1, seed)],
                    ..Default::default()
                };
                inference.infer(request).await
            })
        })
        .collect();
    waiting.iter().for_each(tokio::task::JoinHandle::abort);
    let mut served = 1;
    for task in waiting {
        // Some may have finished before the abort.
        served += u64::from(task.await.is_ok());
    }
    running.await.unwrap().unwrap();
    // A further request works after the cancellations.
    ask_all(&server, "slow", &[slow_rows(1, 9)]).await;
    assert_eq!(statistics(&server, "slow").await.execution_count - before, served + 1);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn max_queue_delay_lets_requests_share_a_batch() {
    let mut config = one_session();
    config.batching.rows_max = 8;
    // Longer than the test: only a full run ends the wait.
    config.batching.delay_us_max = 600_000_000;
    let server = Server::start(config, &[("slow", 1, slow(60))]).await;
    let mut client = server.client().await;
    let large = slow_rows(200, 0);
    let large = tokio::spawn(async move { client.infer("slow", None, vec![large], Form::Raw).await });
    // A request that finds no free session waits until there are eight rows, so more are sent until all are
    // answered.
    let mut requests = tokio::task::JoinSet::new();
    for seed in 0.. {
        assert!(seed < 1_000, "the last ones were never answered");
        let mut client = server.client().await;
        requests.spawn(async move {
            client.infer("slow", None, vec![slow_rows(1, seed)], Form::Raw).await.unwrap()
        });
        let all = async { while requests.join_next().await.is_some() {} };
        let done = tokio::time::timeout(std::time::Duration::from_millis(50), all).await.is_ok();
        if done && large.is_finished() && seed >= 16 {
            break;
        }
    }
    large.await.unwrap().unwrap();
    let sizes = statistics(&server, "slow").await.batch_stats;
    assert!(sizes.iter().all(|size| [1, 8, 200].contains(&size.batch_size)), "{sizes:?}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contradicting_extents_are_a_bad_request() {
    let server = Server::start(config(), &[("sum", 1, sum())]).await;
    let input = |name: &str, rows: i64| {
        Tensor::fp32(name, vec![rows, FEATURES as i64], vec![1.0; rows as usize * FEATURES]).unwrap()
    };
    let mut client = server.client().await;
    client.infer("sum", None, vec![input("a", 2), input("b", 2)], Form::Raw).await.unwrap();
    match client.infer("sum", None, vec![input("a", 2), input("b", 3)], Form::Raw).await {
        Err(ClientError::Refused { code: Code::InvalidArgument, message }) => {
            assert!(message.contains(r#""a" of shape [2, 4], "b" of shape [3, 4]"#), "{message}");
        }
        other => panic!("{other:?}"),
    }
    let of = |name: &str, rows: usize| json!({ "name": name, "datatype": "FP32", "shape": [rows, FEATURES], "data": vec![1.0; rows * FEATURES] });
    let body = json!({ "inputs": [of("a", 3), of("b", 2)] }).to_string();
    let reply = server.http("POST", "/v2/models/sum/infer", &[], body.as_bytes()).await;
    assert_eq!(reply.status, 400, "{}", reply.json());
    server.stop().await;
}
