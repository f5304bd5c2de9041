//! The controls: a tonic handler of the one call that does nothing beside it, and three ways from it to
//! ONNX Runtime.

use std::path::Path;
use std::sync::{Arc, Mutex, mpsc};

use futures::future::{Either, Ready, ready};
use millrace_serving::runtime::Runtime;
use millrace_serving::wire::inference as pb;
use ort::session::Session;
use ort::value::TensorRef;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Context, Poll, Service, http};
use tonic::server::{NamedService, UnaryService};
use tonic::{Request, Response, Status};

/// Most rows of a batch of the naive batcher; as many as ours takes by default.
const ROWS_MAX: usize = 64;

/// A way from requests to sessions.
enum Way {
    /// `bare`: one session behind a mutex, run where the request came in.
    One(Mutex<Session>),
    /// `unbatched`: a session for each thread of the server, each request alone, run where it came in.
    Each(Vec<Mutex<Session>>),
    /// `naive`: one queue to one thread, which takes what is there, runs it, and answers.
    Queue(mpsc::Sender<Waiting>),
}

struct Waiting {
    rows: usize,
    values: Vec<f32>,
    answer: oneshot::Sender<Vec<f32>>,
}

/// Answers at a free port of this machine, which it prints, until it is to stop.
pub(crate) async fn serve(kind: &str, graph: &Path, stop: CancellationToken) {
    let graph = std::fs::read(graph).unwrap();
    let way = match kind {
        "bare" => Way::One(Mutex::new(session(&graph))),
        "unbatched" => {
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            Way::Each((0..threads).map(|_| Mutex::new(session(&graph))).collect())
        }
        "naive" => {
            let (sender, queue) = mpsc::channel();
            let session = session(&graph);
            std::thread::spawn(move || batch(session, &queue));
            Way::Queue(sender)
        }
        other => panic!("no control {other}"),
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("{}", listener.local_addr().unwrap());
    let incoming = tonic::transport::server::TcpIncoming::from(listener).with_nodelay(Some(true));
    let server = tonic::transport::Server::builder().add_service(Handler(Arc::new(way)));
    tokio::select! {
        served = server.serve_with_incoming(incoming) => served.unwrap(),
        () = stop.cancelled() => {}
    }
}

fn session(graph: &[u8]) -> Session {
    Session::builder(Runtime::load().unwrap().environment())
        .unwrap()
        .with_intra_threads(1)
        .unwrap()
        .with_intra_op_spinning(false)
        .unwrap()
        .commit_from_memory(graph)
        .unwrap()
}

/// The outputs of rows that lie one behind the other.
fn run(session: &mut Session, rows: usize, values: &[f32]) -> Vec<f32> {
    let input = TensorRef::from_array_view(([rows, values.len() / rows], values)).unwrap();
    let outputs = session.run(ort::inputs![input]).unwrap();
    outputs["logits"].try_extract_tensor::<f32>().unwrap().1.to_vec()
}

/// The thread of the naive batcher, until all senders have gone.
fn batch(mut session: Session, queue: &mpsc::Receiver<Waiting>) {
    while let Ok(first) = queue.recv() {
        let mut rows = first.rows;
        let mut waiting = vec![first];
        while rows < ROWS_MAX
            && let Ok(next) = queue.try_recv()
        {
            rows += next.rows;
            waiting.push(next);
        }
        let values: Vec<f32> = waiting.iter().flat_map(|one| one.values.iter().copied()).collect();
        let outputs = run(&mut session, rows, &values);
        let width = outputs.len() / rows;
        let mut rest = outputs.as_slice();
        for one in waiting {
            let (mine, others) = rest.split_at(one.rows * width);
            rest = others;
            // A caller that has gone misses nothing.
            one.answer.send(mine.to_vec()).ok();
        }
    }
}

#[derive(Clone)]
struct Handler(Arc<Way>);

impl NamedService for Handler {
    const NAME: &'static str = "inference.GRPCInferenceService";
}

impl Service<http::Request<Body>> for Handler {
    type Response = http::Response<Body>;
    type Error = std::convert::Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let handler = self.clone();
        let mut grpc = tonic::server::Grpc::new(tonic_prost::ProstCodec::default());
        Box::pin(async move { Ok(grpc.unary(handler, request).await) })
    }
}

type Answer = Result<Response<pb::ModelInferResponse>, Status>;

impl UnaryService<pb::ModelInferRequest> for Handler {
    type Response = pb::ModelInferResponse;
    /// A box only where there is something to wait for.
    type Future = Either<Ready<Answer>, BoxFuture<Response<pb::ModelInferResponse>, Status>>;

    fn call(&mut self, request: Request<pb::ModelInferRequest>) -> Self::Future {
        let request = request.into_inner();
        let raw = &request.raw_input_contents[0];
        let values: Vec<f32> =
            raw.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let rows = request.inputs[0].shape[0] as usize;
        let name = request.model_name;
        match &*self.0 {
            Way::One(session) => {
                let outputs = run(&mut session.lock().unwrap(), rows, &values);
                Either::Left(ready(Ok(reply(name, rows, &outputs))))
            }
            Way::Each(sessions) => {
                let free = sessions.iter().find_map(|session| session.try_lock().ok());
                let mut session = free.unwrap_or_else(|| sessions[0].lock().unwrap());
                let outputs = run(&mut session, rows, &values);
                Either::Left(ready(Ok(reply(name, rows, &outputs))))
            }
            Way::Queue(queue) => {
                let (answer, answered) = oneshot::channel();
                queue.send(Waiting { rows, values, answer }).unwrap();
                Either::Right(Box::pin(async move {
                    let outputs = answered.await.map_err(|_| Status::unavailable("stopping"))?;
                    Ok(reply(name, rows, &outputs))
                }))
            }
        }
    }
}

fn reply(model_name: String, rows: usize, outputs: &[f32]) -> Response<pb::ModelInferResponse> {
    let raw: Vec<u8> = outputs.iter().flat_map(|value| value.to_le_bytes()).collect();
    Response::new(pb::ModelInferResponse {
        model_name,
        model_version: "1".into(),
        outputs: vec![pb::model_infer_response::InferOutputTensor {
            name: "logits".into(),
            datatype: "FP32".into(),
            shape: vec![rows as i64, (outputs.len() / rows) as i64],
            ..Default::default()
        }],
        raw_output_contents: vec![raw.into()],
        ..Default::default()
    })
}
