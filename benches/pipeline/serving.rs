//! A request over gRPC against a bare call of the same ONNX Runtime session.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use millrace_bundle::{Bundle, Lineage};
use millrace_serving::client::Client;
use millrace_serving::tensor::Tensor;
use millrace_serving::wire::Form;
use millrace_serving::{Config, Source, serve};
use millrace_trainer::init;
use object_store::local::LocalFileSystem;
use ort::session::Session;
use ort::value::TensorRef;
use prost::Message;
use tokio_util::sync::CancellationToken;

use crate::figure::{Figure, Kind, median};

const CALLS: usize = 20_000;
const WINDOW: Duration = Duration::from_secs(3);
const ROUNDS: usize = 3;
/// Inputs of the model: 16-64-64-4.
const INPUTS: usize = 16;

pub(crate) fn figures() -> Vec<Figure> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let model = init::mlp(INPUTS, &[64, 64], 4, 7).unwrap().encode_to_vec();
    let store = LocalFileSystem::new_with_prefix(dir.path()).unwrap();
    let bundle = Bundle::new("tiny", 1, model.clone(), Lineage::default(), Default::default()).unwrap();
    runtime.block_on(bundle.write(&store, "")).unwrap();
    let mut config = Config::default();
    for address in [&mut config.grpc, &mut config.http, &mut config.metrics] {
        address.set_port(0);
    }
    let stop = CancellationToken::new();
    let source = Source::directory(dir.path()).unwrap();
    // Loads the library too, which the bare session below shares.
    let serving = runtime.block_on(serve(&config, source, stop.clone())).unwrap();
    let address = serving.addresses().grpc.to_string();
    let mut session = Session::builder(millrace_serving::runtime::Runtime::load().unwrap().environment())
        .unwrap()
        .with_intra_threads(1)
        .unwrap()
        .commit_from_memory(&model)
        .unwrap();
    let (mut p50, mut bare_p50, mut rps, mut bare_rps) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        p50.push(runtime.block_on(latency(&address)));
        bare_p50.push(bare_latency(&mut session));
        rps.push(runtime.block_on(throughput(&address, 16)));
        bare_rps.push(bare_throughput(&mut session));
    }
    stop.cancel();
    runtime.block_on(serving.join()).unwrap();
    vec![
        Figure {
            name: "serving/p50_c1",
            kind: Kind::Time,
            unit: "us",
            value: median(&mut p50) * 1e6,
            control: median(&mut bare_p50) * 1e6,
            against: "a bare ONNX Runtime call in the same process, no network (MLP 16-64-64-4)",
        },
        Figure {
            name: "serving/rps_c16",
            kind: Kind::Rate,
            unit: "requests/s",
            value: median(&mut rps),
            control: median(&mut bare_rps),
            against: "bare ONNX Runtime calls on one thread; ours has clients and server on the same two cores",
        },
    ]
}

fn input() -> Tensor {
    Tensor::fp32("input", vec![1, INPUTS as i64], (0..INPUTS).map(|i| i as f32).collect()).unwrap()
}

async fn latency(address: &str) -> f64 {
    let mut client = Client::connect(address).await.unwrap();
    let mut times = Vec::with_capacity(CALLS);
    for call in 0..CALLS + 1000 {
        let started = Instant::now();
        client.infer("tiny", None, vec![input()], Form::Raw).await.unwrap();
        if call >= 1000 {
            times.push(started.elapsed().as_secs_f64());
        }
    }
    median(&mut times)
}

async fn throughput(address: &str, clients: usize) -> f64 {
    let done = Arc::new(AtomicU64::new(0));
    let started = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..clients {
        let mut client = Client::connect(address).await.unwrap();
        let done = done.clone();
        tasks.spawn(async move {
            while started.elapsed() < WINDOW {
                client.infer("tiny", None, vec![input()], Form::Raw).await.unwrap();
                done.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    while let Some(task) = tasks.join_next().await {
        task.unwrap();
    }
    done.load(Ordering::Relaxed) as f64 / started.elapsed().as_secs_f64()
}

fn call(session: &mut Session, values: &[f32]) {
    let input = TensorRef::from_array_view(([1, INPUTS], values)).unwrap();
    std::hint::black_box(session.run(ort::inputs!["input" => input]).unwrap());
}

fn bare_latency(session: &mut Session) -> f64 {
    let values: Vec<f32> = (0..INPUTS).map(|i| i as f32).collect();
    let mut times = Vec::with_capacity(CALLS);
    for _ in 0..CALLS {
        let started = Instant::now();
        call(session, &values);
        times.push(started.elapsed().as_secs_f64());
    }
    median(&mut times)
}

fn bare_throughput(session: &mut Session) -> f64 {
    let values: Vec<f32> = (0..INPUTS).map(|i| i as f32).collect();
    let started = Instant::now();
    let mut calls = 0_u64;
    while started.elapsed() < WINDOW {
        call(session, &values);
        calls += 1;
    }
    calls as f64 / started.elapsed().as_secs_f64()
}
