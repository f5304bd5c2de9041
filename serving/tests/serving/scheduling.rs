//! Tests of scheduling under overload: deadlines, disconnecting clients, priorities, clients that share a
//! queue, long requests, and several models at once.

use std::time::{Duration, Instant};

use millrace_bundle::onnx::tensor_proto::DataType::{Bool, Float, Int64};
use millrace_bundle::onnx::{AttributeProto, GraphProto, TensorProto, attribute_proto, tensor_proto};
use millrace_serving::client::{Client, ClientError};
use millrace_serving::infer::Request;
use millrace_serving::tensor::{Data, Tensor};
use millrace_serving::wire::Form;
use millrace_serving::wire::inference as pb;
use millrace_serving::wire::inference::infer_parameter::ParameterChoice;
use millrace_serving::{Config, Error, InferError, Source, serve};
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::Code;

use crate::support::*;

/// Rows of a full batch.
pub(crate) const ROWS_MAX: usize = 8;
/// Rows of the request that keeps the session busy at first.
const BUSY_ROWS: usize = 128;
/// The metric of requests that wait for a session.
const PENDING: &str = "nv_inference_pending_request_count";

/// One session with a batching delay longer than a test: a request that had to wait runs only once eight rows
/// are queued.
pub(crate) fn holding() -> Config {
    let mut config = config();
    config.sessions_max = 1;
    config.batching.rows_max = ROWS_MAX;
    config.batching.delay_us_max = 600_000_000;
    config
}

fn rows(count: usize) -> Tensor {
    Tensor::fp32("input", vec![count as i64, 512], vec![0.25; count * 512]).unwrap()
}

pub(crate) fn message(model: &str, count: usize, parameters: &[(&str, u64)]) -> pb::ModelInferRequest {
    let input = pb::model_infer_request::InferInputTensor {
        name: "input".into(),
        datatype: "FP32".into(),
        shape: vec![count as i64, 512],
        ..Default::default()
    };
    let mut message = pb::ModelInferRequest {
        model_name: model.into(),
        inputs: vec![input],
        raw_input_contents: vec![0.25f32.to_le_bytes().repeat(count * 512).into()],
        ..Default::default()
    };
    for (name, value) in parameters {
        let choice = Some(ParameterChoice::Uint64Param(*value));
        message.parameters.insert((*name).to_owned(), pb::InferParameter { parameter_choice: choice });
    }
    message
}

fn code(answer: &Result<pb::ModelInferResponse, ClientError>) -> Code {
    match answer {
        Ok(_) => Code::Ok,
        Err(ClientError::Refused { code, .. }) => *code,
        Err(error) => panic!("{error}"),
    }
}

/// Waits until a condition holds, for at most the time of a test.
pub(crate) async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let begin = Instant::now();
    while !is_so().await {
        assert!(begin.elapsed() < Duration::from_secs(120), "it never was so: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// A server with one model whose name no other test uses, as metrics are per process.
pub(crate) struct Line {
    pub(crate) server: Server,
    model: &'static str,
}

pub(crate) type Answer = JoinHandle<Result<pb::ModelInferResponse, ClientError>>;

impl Line {
    pub(crate) async fn start(config: Config, model: &'static str) -> Line {
        Line { server: Server::start(config, &[(model, 1, slow(60))]).await, model }
    }

    /// A metric of the model; 0 if missing.
    async fn metric(&self, name: &str) -> u64 {
        let address = self.server.serving.addresses().metrics;
        let text = String::from_utf8(http(address, "GET", "/metrics", &[], b"").await.body).unwrap();
        let of_model = format!("model=\"{}\"", self.model);
        let lines = text.lines().filter(|line| line.starts_with(name) && line.contains(&of_model));
        lines.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
    }

    pub(crate) async fn outcome(&self, outcome: &str) -> u64 {
        let name = format!("millrace_serving_requests_total{{model=\"{}\",outcome=\"{outcome}\"", self.model);
        self.metric(&name).await
    }

    /// Waits until `count` requests wait besides the one of [`Line::hold`].
    pub(crate) async fn waiting(&self, count: u64) {
        let what = format!("{count} requests wait");
        until(&what, async || self.metric(PENDING).await == count + 1).await;
    }

    pub(crate) fn send(&self, client: &Client, count: usize, parameters: &[(&str, u64)]) -> Answer {
        let (mut client, message) = (client.clone(), message(self.model, count, parameters));
        tokio::spawn(async move { client.infer_message(message).await })
    }

    pub(crate) async fn statistics(&self) -> pb::ModelStatistics {
        let request = pb::ModelStatisticsRequest { name: self.model.into(), version: String::new() };
        let mut client = self.server.triton().await;
        client.model_statistics(request).await.unwrap().into_inner().model_stats.remove(0)
    }

    /// Queues a request of one row that waits for a full batch, so that all later ones wait with it. Returns
    /// the number of runs so far, and the future answer.
    pub(crate) async fn hold(&self) -> (u64, Answer) {
        // Two clients: behind the rows of its own client, still queued, the holder would run after those of others.
        let (client, other) = (self.server.client().await, self.server.client().await);
        loop {
            let before = self.statistics().await.execution_count;
            let busy = self.send(&other, BUSY_ROWS, &[]);
            let inference = self.server.serving.inference();
            until("one is there", async || inference.in_flight() > 0 || busy.is_finished()).await;
            let holder = self.send(&client, 1, &[]);
            until("the holder waits or was served", async || {
                self.metric(PENDING).await == 1 || holder.is_finished()
            })
            .await;
            busy.await.unwrap().unwrap();
            let runs = self.statistics().await.execution_count;
            // Retries if it found the session idle and ran alone.
            if !holder.is_finished() && runs == before + 1 {
                return (runs, holder);
            }
            // These rows end any wait, and run alone.
            self.send(&client, ROWS_MAX, &[]).await.unwrap().unwrap();
            holder.await.unwrap().unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn caller_that_disconnects_while_queued_leaves_the_queue() {
    let line = Line::start(holding(), "line-of-leavers").await;
    let (runs, holder) = line.hold().await;
    // Calls of a connection that stays open, and connections that close.
    let client = line.server.client().await;
    let calls: Vec<Answer> = (0..3).map(|_| line.send(&client, 1, &[])).collect();
    let body = json!({
        "inputs": [{ "name": "input", "datatype": "FP32", "shape": [1, 512], "data": vec![0.5; 512] }],
    });
    let body = body.to_string();
    let mut streams = Vec::new();
    for _ in 0..3 {
        let address = line.server.serving.addresses().http;
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let head = format!(
            "POST /v2/models/{}/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n{body}",
            line.model,
            body.len()
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        streams.push(stream);
    }
    line.waiting(6).await;
    calls.iter().for_each(JoinHandle::abort);
    line.waiting(3).await;
    drop(streams);
    line.waiting(0).await;
    until("all of them are counted", async || line.outcome("cancelled").await == 6).await;

    // The rest of a run of eight ends the hold; no other request ran.
    let filler = line.send(&client, ROWS_MAX - 1, &[]);
    filler.await.unwrap().unwrap();
    holder.await.unwrap().unwrap();
    let statistics = line.statistics().await;
    assert_eq!(statistics.execution_count, runs + 1);
    let sizes: Vec<u64> = statistics.batch_stats.iter().map(|size| size.batch_size).collect();
    assert!(sizes.contains(&(ROWS_MAX as u64)), "{sizes:?}");
    assert_eq!(statistics.inference_stats.unwrap().fail.unwrap().count, 6);
    line.server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_that_cannot_run_in_time_is_refused_and_not_run() {
    let line = Line::start(holding(), "line-of-the-late").await;
    let (runs, holder) = line.hold().await;
    let client = line.server.client().await;
    // All of these are answered while the queue is held.
    let refused = line.send(&client, 1, &[("timeout", 1_000)]).await.unwrap();
    assert_eq!(code(&refused), Code::DeadlineExceeded);
    assert!(refused.unwrap_err().to_string().contains("timeout"));
    let body = json!({
        "parameters": { "timeout": 1 },
        "inputs": [{ "name": "input", "datatype": "FP32", "shape": [1, 512], "data": vec![0.5; 512] }],
    });
    let path = format!("/v2/models/{}/infer", line.model);
    let reply = line.server.http("POST", &path, &[], body.to_string().as_bytes()).await;
    assert_eq!(reply.status, 504, "{}", reply.json());
    let inference = line.server.serving.inference();
    let now = Instant::now();
    for deadline in [now, now + Duration::from_millis(3)] {
        let request = Request {
            model: line.model.into(),
            inputs: vec![rows(1)],
            deadline: Some(deadline),
            // The earlier one counts.
            timeout: Some(Duration::from_secs(600)),
            ..Default::default()
        };
        let error = inference.infer(request).await.unwrap_err();
        assert!(matches!(error, InferError::DeadlineExceeded { .. }), "{error}");
        assert!(error.is_retryable());
    }
    assert_eq!(line.outcome("deadline_exceeded").await, 4);

    // A tonic client checks the deadline itself, and may notice it first.
    let mut triton = line.server.triton().await;
    let mut request = tonic::Request::new(message(line.model, 1, &[]));
    request.set_timeout(Duration::from_millis(20));
    let refused = triton.model_infer(request).await.unwrap_err();
    assert!(matches!(refused.code(), Code::DeadlineExceeded | Code::Cancelled), "{refused}");
    line.waiting(0).await;
    let mut request = tonic::Request::new(message(line.model, 1, &[]));
    request.metadata_mut().insert("grpc-timeout", "soon".parse().unwrap());
    let refused = triton.model_infer(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert!(refused.message().contains("grpc-timeout is \"soon\""), "{refused}");

    // A request with enough time is served, and so is one without a bound.
    let patient = line.send(&client, 2, &[("timeout", 600_000_000)]);
    let unbounded = line.send(&client, ROWS_MAX - 3, &[("timeout", 0)]);
    patient.await.unwrap().unwrap();
    unbounded.await.unwrap().unwrap();
    holder.await.unwrap().unwrap();
    assert_eq!(line.statistics().await.execution_count, runs + 1);
    line.server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_server_bounds_how_long_requests_wait() {
    let mut config = config();
    config.sessions_max = 1;
    config.batching.timeout_us_max = 1;
    let line = Line::start(config, "line-of-the-impatient").await;
    let described = pb::ModelConfigRequest { name: line.model.into(), version: String::new() };
    let described = line.server.triton().await.model_config(described).await.unwrap().into_inner();
    let Some(pb::model_config::SchedulingChoice::DynamicBatching(batching)) =
        described.config.unwrap().scheduling_choice
    else {
        panic!("it batches");
    };
    let policy = batching.default_queue_policy.unwrap();
    assert_eq!((policy.default_timeout_microseconds, policy.allow_timeout_override), (1, true));
    let client = line.server.client().await;
    // A microsecond may pass before the scheduler finds a free session, so any request may be refused.
    let mut late = 0;
    for _ in 0..1_000 {
        let busy = line.send(&client, BUSY_ROWS, &[]);
        // No request may wait longer than the server allows.
        let next = line.send(&client, 1, &[("timeout", u64::MAX)]);
        for answer in [busy.await.unwrap(), next.await.unwrap()] {
            match code(&answer) {
                Code::Ok => {}
                Code::DeadlineExceeded => late += 1,
                other => panic!("{other:?}"),
            }
        }
        if late > 0 {
            break;
        }
    }
    assert!(late > 0, "nobody was late");
    line.server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_is_ordered_by_priority_and_shared_among_clients() {
    let mut config = holding();
    // One is the holder.
    config.limits.requests_waiting_max = 4;
    config.batching.priority_levels = 2;
    config.batching.priority_default = 2;
    let line = Line::start(config, "line-of-the-unequal").await;
    let (runs, holder) = line.hold().await;
    let (flood, other) = (line.server.client().await, line.server.client().await);
    let mut flooding = Vec::new();
    for place in 1..=3 {
        flooding.push(line.send(&flood, 1, &[]));
        line.waiting(place).await;
    }
    let refused = async |answer: Answer| {
        let answer = answer.await.unwrap();
        assert_eq!(code(&answer), Code::ResourceExhausted);
        let text = answer.unwrap_err().to_string();
        assert!(text.contains("limits.requests_waiting_max"), "{text}");
    };
    refused(line.send(&flood, 1, &[])).await;
    // Another client is entitled to a place: the first client's last one.
    let others = line.send(&other, 1, &[]);
    refused(flooding.pop().unwrap()).await;
    // A higher level precedes all of a lower one.
    let urgent = line.send(&flood, 1, &[("priority", 1)]);
    refused(flooding.pop().unwrap()).await;
    // An unknown level means the default.
    refused(line.send(&flood, 1, &[("priority", 99)])).await;
    let filler = line.send(&other, ROWS_MAX - 3, &[("priority", 1)]);
    refused(others).await;
    for answer in [holder, urgent, flooding.pop().unwrap(), filler] {
        answer.await.unwrap().unwrap();
    }
    assert_eq!(line.statistics().await.execution_count, runs + 1);
    assert_eq!(line.outcome("overloaded").await, 5);
    line.server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_priority_levels_are_refused() {
    for (levels, default, key) in [
        (0, 1, "priority_levels"),
        (65, 1, "priority_levels"),
        (2, 0, "priority_default"),
        (2, 3, "to priority_levels"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let mut config = config();
        config.batching.priority_levels = levels;
        config.batching.priority_default = default;
        let source = Source::directory(dir.path()).unwrap();
        match serve(&config, source, CancellationToken::new()).await {
            Err(Error::Config { reason }) => assert!(reason.contains(key), "{reason}"),
            other => panic!("{levels} {default}: {other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_that_are_used_together_all_answer() {
    let server = Server::start(config(), &[("large", 1, slow(30)), ("larger", 1, slow(40))]).await;
    let mut client = server.client().await;
    let mut alone = Vec::new();
    for model in ["large", "larger"] {
        alone.push(client.infer(model, None, vec![rows(16)], Form::Raw).await.unwrap().outputs);
    }
    let mut callers = tokio::task::JoinSet::new();
    for (model, alone) in ["large", "larger"].into_iter().zip(alone) {
        let mut client = server.client().await;
        callers.spawn(async move {
            for _ in 0..12 {
                let answer = client.infer(model, None, vec![rows(16)], Form::Raw).await.unwrap();
                assert_eq!(answer.outputs, alone);
            }
        });
    }
    // A small model meanwhile.
    let row = [0.1, -0.2, 0.3, 0.4];
    let expected = mlp_logits(&row);
    while !callers.is_empty() {
        let input = Tensor::fp32("input", vec![1, FEATURES as i64], row.to_vec()).unwrap();
        let answer = client.infer("mlp", None, vec![input], Form::Raw).await.unwrap();
        let millrace_serving::tensor::Data::Fp32(logits) = &answer.outputs[0].data else { panic!() };
        assert!(logits.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-4), "{logits:?}");
        while let Some(done) = callers.try_join_next() {
            done.unwrap();
        }
    }
    server.stop().await;
}

/// The sum of `m * m`, where `m` is the outer product of the input with itself: `input` FP32 [1, any] to `output`
/// FP32 [1, 1]. Ten times the elements take a thousand times as long.
fn cubic() -> Vec<u8> {
    model(GraphProto {
        name: Some("cubic".into()),
        node: vec![
            node("Transpose", &["input"], "column"),
            node("MatMul", &["column", "input"], "m"),
            node("MatMul", &["m", "m"], "square"),
            node("ReduceSum", &["square"], "output"),
        ],
        input: vec![value("input", Float, &[1, -1])],
        output: vec![value("output", Float, &[1, 1])],
        ..Default::default()
    })
}

/// Counts: `input` INT64 [batch] to `output`, which adds the largest element; a `Loop` of as many iterations
/// computes it.
fn counting() -> Vec<u8> {
    let single = |name: &str, data_type: tensor_proto::DataType, raw: Vec<u8>| TensorProto {
        name: Some(name.into()),
        data_type: Some(data_type as i32),
        raw_data: Some(raw),
        ..Default::default()
    };
    let body = GraphProto {
        name: Some("body".into()),
        node: vec![node("Identity", &["go"], "go_on"), node("Add", &["count", "one"], "next")],
        initializer: vec![single("one", Int64, 1i64.to_le_bytes().to_vec())],
        input: vec![value("turn", Int64, &[]), value("go", Bool, &[]), value("count", Int64, &[])],
        output: vec![value("go_on", Bool, &[]), value("next", Int64, &[])],
        ..Default::default()
    };
    let mut most = node("ReduceMax", &["input"], "turns");
    most.attribute.push(AttributeProto {
        name: Some("keepdims".into()),
        r#type: Some(attribute_proto::AttributeType::Int as i32),
        i: Some(0),
        ..Default::default()
    });
    let mut turns = node("Loop", &["turns", "go_first", "zero"], "counted");
    turns.attribute.push(AttributeProto {
        name: Some("body".into()),
        r#type: Some(attribute_proto::AttributeType::Graph as i32),
        g: Some(body),
        ..Default::default()
    });
    model(GraphProto {
        name: Some("counting".into()),
        node: vec![most, turns, node("Add", &["input", "counted"], "output")],
        initializer: vec![
            single("go_first", Bool, vec![1]),
            single("zero", Int64, 0i64.to_le_bytes().to_vec()),
        ],
        input: vec![value("input", Int64, &[-1])],
        output: vec![value("output", Int64, &[-1])],
        ..Default::default()
    })
}

/// A request whose run would take days is ended by its client's disconnect, and by its deadline: the session
/// is free each time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn runs_of_disconnected_callers_are_ended() {
    const ENDLESS: i64 = 1 << 40;
    let mut config = config();
    (config.threads_max, config.sessions_max) = (1, 1);
    let model = "line-of-those-who-hang-up";
    let server = Server::start(config, &[(model, 1, counting())]).await;
    let line = Line { server, model };
    let count = |turns: i64| vec![Tensor::new("input", vec![1], Data::Int64(vec![turns])).unwrap()];
    let send = |client: &Client, turns: i64| {
        let (mut client, inputs) = (client.clone(), count(turns));
        tokio::spawn(async move { client.infer(model, None, inputs, Form::Raw).await })
    };
    let client = line.server.client().await;
    let inference = line.server.serving.inference();
    for _ in 0..3 {
        let endless = send(&client, ENDLESS);
        until("it is there", async || inference.in_flight() == 1).await;
        let next = send(&client, 3);
        until("the next one waits", async || line.metric(PENDING).await == 1 || next.is_finished()).await;
        endless.abort();
        let answer = tokio::time::timeout(Duration::from_secs(60), next).await.expect("the run does not end");
        assert_eq!(answer.unwrap().unwrap().outputs[0].data, Data::Int64(vec![6]));
        until("both have gone", async || inference.in_flight() == 0).await;
    }
    let request = Request {
        model: model.into(),
        inputs: count(ENDLESS),
        deadline: Some(Instant::now() + Duration::from_millis(200)),
        ..Default::default()
    };
    let error = inference.infer(request).await.unwrap_err();
    assert!(matches!(error, InferError::DeadlineExceeded { .. }), "{error}");
    let next = tokio::time::timeout(Duration::from_secs(60), send(&client, 4)).await;
    let answer = next.expect("the run does not end").unwrap().unwrap();
    assert_eq!(answer.outputs[0].data, Data::Int64(vec![8]));
    line.server.stop().await;
}

/// One I/O thread: if the long run used it, nothing else would be answered.
#[tokio::test]
async fn long_request_of_a_model_with_short_runs_does_not_stall_the_others() {
    let mut config = config();
    config.sessions_max = 2;
    let server = Server::start(config, &[("cubic", 1, cubic())]).await;
    let input =
        |extent: usize| vec![Tensor::fp32("input", vec![1, extent as i64], vec![0.01; extent]).unwrap()];
    let mut client = server.client().await;
    // The typical run is short.
    for _ in 0..100 {
        client.infer("cubic", None, input(4), Form::Raw).await.unwrap();
    }
    let (mut other, long) = (server.client().await, input(3000));
    let long = tokio::spawn(async move { other.infer("cubic", None, long, Form::Raw).await });
    let mut longest = Duration::ZERO;
    while !long.is_finished() {
        let sent = Instant::now();
        client.infer("cubic", None, input(4), Form::Raw).await.unwrap();
        client.infer("mlp", None, vec![mlp_row()], Form::Raw).await.unwrap();
        assert_eq!(server.http("GET", "/v2/health/live", &[], b"").await.status, 200);
        let metrics = http(server.serving.addresses().metrics, "GET", "/metrics", &[], b"").await;
        assert_eq!(metrics.status, 200);
        longest = longest.max(sent.elapsed());
    }
    long.await.unwrap().unwrap();
    let request = pb::ModelStatisticsRequest { name: "cubic".into(), version: String::new() };
    let statistics = server.triton().await.model_statistics(request).await.unwrap().into_inner();
    // Nearly all of it belongs to the long run.
    let spent = statistics.model_stats[0].inference_stats.as_ref().unwrap().compute_infer.unwrap();
    let run = Duration::from_nanos(spent.ns);
    assert!(longest < run / 2, "four requests took {longest:?} beside a run of {run:?}");
    server.stop().await;
}

fn mlp_row() -> Tensor {
    Tensor::fp32("input", vec![1, FEATURES as i64], vec![0.5; FEATURES]).unwrap()
}
