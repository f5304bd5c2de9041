//! Latency and rate of the gRPC server beside two controls: a bare ONNX Runtime call, and a bare tonic
//! handler around one session behind a mutex. Ignored by default; run with
//! `cargo test -p millrace-serving --test serving -- --ignored --nocapture measure`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace_serving::client::Client;
use millrace_serving::runtime::Runtime;
use millrace_serving::tensor::Data;
use millrace_serving::wire::inference as pb;
use ort::session::Session;
use ort::value::TensorRef;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Context, Poll, Service, http};
use tonic::server::{NamedService, UnaryService};
use tonic::{Request, Response, Status};

use crate::support::*;

const WINDOW: Duration = Duration::from_secs(1);

fn request() -> pb::ModelInferRequest {
    pb::ModelInferRequest {
        model_name: "mlp".into(),
        inputs: vec![pb::model_infer_request::InferInputTensor {
            name: "input".into(),
            datatype: "FP32".into(),
            shape: vec![1, FEATURES as i64],
            ..Default::default()
        }],
        raw_input_contents: vec![Data::Fp32(vec![0.5; FEATURES]).to_raw()],
        ..Default::default()
    }
}

/// Median microseconds of one client that calls without a pause.
async fn p50(address: &str) -> f64 {
    let mut client = Client::connect(address).await.unwrap();
    let mut micros = Vec::new();
    let start = Instant::now();
    while start.elapsed() < WINDOW {
        let call = Instant::now();
        client.infer_message(request()).await.unwrap();
        micros.push(call.elapsed().as_nanos() as f64 / 1000.0);
    }
    micros.sort_by(f64::total_cmp);
    micros[micros.len() / 2]
}

/// Requests per second of `clients` clients over one connection each.
async fn rate(address: &str, clients: usize) -> f64 {
    let mut tasks = tokio::task::JoinSet::new();
    let start = Instant::now();
    for _ in 0..clients {
        let mut client = Client::connect(address).await.unwrap();
        tasks.spawn(async move {
            let mut count = 0u64;
            while start.elapsed() < WINDOW {
                client.infer_message(request()).await.unwrap();
                count += 1;
            }
            count
        });
    }
    let counts = tasks.join_all().await;
    counts.iter().sum::<u64>() as f64 / start.elapsed().as_secs_f64()
}

/// A handler of the one call that does nothing else; made by hand, as the rest of the service is not needed.
#[derive(Clone)]
struct Bare(Arc<parking_lot::Mutex<Session>>);

impl NamedService for Bare {
    const NAME: &'static str = "inference.GRPCInferenceService";
}

impl Service<http::Request<Body>> for Bare {
    type Response = http::Response<Body>;
    type Error = std::convert::Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let bare = self.clone();
        let mut grpc = tonic::server::Grpc::new(tonic_prost::ProstCodec::default());
        Box::pin(async move { Ok(grpc.unary(bare, request).await) })
    }
}

impl UnaryService<pb::ModelInferRequest> for Bare {
    type Response = pb::ModelInferResponse;
    type Future = std::future::Ready<Result<Response<pb::ModelInferResponse>, Status>>;

    fn call(&mut self, request: Request<pb::ModelInferRequest>) -> Self::Future {
        let request = request.into_inner();
        let raw = &request.raw_input_contents[0];
        let values: Vec<f32> =
            raw.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let shape = request.inputs[0].shape.clone();
        let mut session = self.0.lock();
        let outputs = session
            .run(ort::inputs![TensorRef::from_array_view((shape, values.as_slice())).unwrap()])
            .unwrap();
        let (shape, logits) = outputs["logits"].try_extract_tensor::<f32>().unwrap();
        let raw: Vec<u8> = logits.iter().flat_map(|value| value.to_le_bytes()).collect();
        std::future::ready(Ok(Response::new(pb::ModelInferResponse {
            model_name: request.model_name,
            model_version: "1".into(),
            outputs: vec![pb::model_infer_response::InferOutputTensor {
                name: "logits".into(),
                datatype: "FP32".into(),
                shape: shape.to_vec(),
                ..Default::default()
            }],
            raw_output_contents: vec![raw.into()],
            ..Default::default()
        })))
    }
}

fn session() -> Session {
    Session::builder(Runtime::load().unwrap().environment())
        .unwrap()
        .with_intra_threads(1)
        .unwrap()
        .with_intra_op_spinning(false)
        .unwrap()
        .commit_from_memory(&mlp())
        .unwrap()
}

/// Median microseconds and calls per second of the session alone.
fn bare_session() -> (f64, f64) {
    let mut session = session();
    let values = vec![0.5f32; FEATURES];
    let mut micros = Vec::new();
    let start = Instant::now();
    while start.elapsed() < WINDOW {
        let call = Instant::now();
        let view = TensorRef::from_array_view(([1usize, FEATURES], values.as_slice())).unwrap();
        session.run(ort::inputs![view]).unwrap();
        micros.push(call.elapsed().as_nanos() as f64 / 1000.0);
    }
    let rate = micros.len() as f64 / start.elapsed().as_secs_f64();
    micros.sort_by(f64::total_cmp);
    (micros[micros.len() / 2], rate)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes half a minute and wants an idle machine: run it by name with --ignored --nocapture"]
async fn measure() {
    if !have_runtime() {
        return;
    }
    let (call_p50, call_rate) = tokio::task::spawn_blocking(bare_session).await.unwrap();
    let server = Server::start(config(), &[]).await;
    let ours = server.serving.addresses().grpc.to_string();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let bare = listener.local_addr().unwrap().to_string();
    let service = Bare(Arc::new(parking_lot::Mutex::new(session())));
    let incoming = tonic::transport::server::TcpIncoming::from(listener).with_nodelay(Some(true));
    let control =
        tokio::spawn(tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming));
    let (mut ours_p50, mut bare_p50) = (Vec::new(), Vec::new());
    for _ in 0..9 {
        bare_p50.push(p50(&bare).await);
        ours_p50.push(p50(&ours).await);
    }
    ours_p50.sort_by(f64::total_cmp);
    bare_p50.sort_by(f64::total_cmp);
    // The best window of each: other load on the machine only ever adds to a window.
    let (ours_p50, bare_p50) = (ours_p50[0], bare_p50[0]);
    let (bare_rate, ours_rate) = (rate(&bare, 16).await, rate(&ours, 16).await);
    println!("serving/p50_c1 {ours_p50:.1} us control={call_p50:.1} ratio={:.2}", call_p50 / ours_p50);
    println!("serving/rps_c16 {ours_rate:.0} 1/s control={call_rate:.0} ratio={:.2}", ours_rate / call_rate);
    println!("serving/p50_c1_tonic {ours_p50:.1} us control={bare_p50:.1} ratio={:.2}", bare_p50 / ours_p50);
    println!(
        "serving/rps_c16_tonic {ours_rate:.0} 1/s control={bare_rate:.0} ratio={:.2}",
        ours_rate / bare_rate
    );
    control.abort();
    server.stop().await;
}
