//! The streaming inference call: many requests and answers in one stream. Each request has one answer, in the
//! order of the requests, and a refused request does not end the stream.
//!
//! A request that arrives alone runs inline, as a unary call does; requests that arrive together run
//! concurrently, each on its own task. At most [`REQUESTS_MAX`] requests of a stream run or wait for a
//! session. No further ones start while the client does not read its answers: they wait in the transport,
//! whose flow control stops the client.

use std::sync::Arc;

use futures::future::FutureExt;
use futures::stream::{BoxStream, FuturesOrdered, StreamExt, unfold};
use prost::Message;
use tokio_util::task::AbortOnDropHandle;
use tonic::{Request, Status, Streaming};

use super::{AdmittedCall, CallOrigin, Service};
use crate::connections::{Peer, peer};
use crate::connections::{Quota, UnsentGuard};
use crate::telemetry::{self, ActiveSpan};
use crate::tokens::Caller;
use millrace_serving_core::error::InferError;
use millrace_serving_core::wire::inference as pb;
use millrace_serving_core::wire::inference::infer_parameter::ParameterChoice;
use millrace_serving_repository::outcome;

/// Most requests of one stream that run or wait for a session.
const REQUESTS_MAX: usize = 32;
/// Metadata with which a client asks for errors to end the stream with their status.
const STRICT: &str = "triton_grpc_error";
/// Parameter in every answer: this is the request's last answer.
const FINAL: &str = "triton_final_response";

type Arrival = Option<Result<pb::ModelInferRequest, Status>>;
type Answer = Result<pb::ModelStreamInferResponse, Status>;
pub(super) type Answers = BoxStream<'static, Answer>;

/// The answers to a stream of requests. They end after the requests have ended, with an error if the stream
/// broke. When the server stops, they end with UNAVAILABLE; the requests without an answer were not run.
/// Dropping the stream aborts the waiting requests.
pub(super) fn answers(
    service: Service,
    caller: Caller,
    request: Request<Streaming<pb::ModelInferRequest>>,
) -> Answers {
    let strict = request.metadata().get(STRICT).is_some_and(|value| value == "true");
    let conversation = InferStream {
        // The only deadline is the client's disconnect, which drops the stream and its waiting requests.
        origin: CallOrigin { client: peer(request.extensions()), deadline: Ok(None) },
        quota: request.extensions().get().map(|peer: &Peer| peer.quota.clone()),
        service,
        caller,
        span: telemetry::current(),
        strict,
        requests: request.into_inner(),
        running: FuturesOrdered::new(),
        end: None,
    };
    unfold(conversation, |mut conversation| async move {
        let answer = conversation.next().await?;
        Some((answer, conversation))
    })
    .boxed()
}

struct InferStream {
    origin: CallOrigin,
    service: Service,
    caller: Caller,
    /// The span of the stream, if it is sampled.
    span: Option<Arc<ActiveSpan>>,
    strict: bool,
    requests: Streaming<pb::ModelInferRequest>,
    running: FuturesOrdered<AbortOnDropHandle<(Answer, Option<UnsentGuard>)>>,
    /// The quota for answers that the client has not read.
    quota: Option<Quota>,
    /// Set once no more requests are read: the final status, or `None` if there is none to send.
    end: Option<Option<Status>>,
}

impl InferStream {
    async fn next(&mut self) -> Option<Answer> {
        let answer = self.next_answer().await;
        if matches!(answer, Some(Err(_))) {
            // A status is the last message of a stream.
            self.end = Some(None);
            self.running.clear();
        }
        answer
    }

    async fn next_answer(&mut self) -> Option<Answer> {
        loop {
            if self.running.is_empty() {
                if let Some(status) = &mut self.end {
                    return status.take().map(Err);
                }
                let arrival = tokio::select! {
                    // Requests that have arrived are answered first, with a refusal while the server stops.
                    biased;
                    arrival = self.requests.next() => arrival,
                    () = self.service.inference.draining() => Some(Err(InferError::stopping().into())),
                };
                let Some(request) = self.accept(arrival) else { continue };
                match self.requests.next().now_or_never() {
                    None => return Some(self.answer(request).await.0),
                    Some(second) => {
                        self.start(request);
                        if let Some(request) = self.accept(second) {
                            self.start(request);
                        }
                    }
                }
            } else {
                let room = self.end.is_none() && self.running.len() < REQUESTS_MAX;
                tokio::select! {
                    biased;
                    arrival = self.requests.next(), if room => {
                        if let Some(request) = self.accept(arrival) {
                            self.start(request);
                        }
                    }
                    answered = self.running.next() => match answered {
                        Some(Ok((answer, _held))) => return Some(answer),
                        Some(Err(error)) => match error.try_into_panic() {
                            Ok(panic) => std::panic::resume_unwind(panic),
                            Err(_) => return Some(Err(InferError::stopping().into())),
                        },
                        None => {}
                    },
                }
            }
        }
    }

    /// The request that has arrived; `None` if the requests have ended.
    fn accept(&mut self, arrival: Arrival) -> Option<pb::ModelInferRequest> {
        match arrival {
            Some(Ok(request)) => return Some(request),
            Some(Err(status)) => self.end = Some(Some(status)),
            None => self.end = Some(None),
        }
        None
    }

    fn start(&mut self, request: pb::ModelInferRequest) {
        let task = tokio::spawn(self.answer(request));
        self.running.push_back(AbortOnDropHandle::new(task));
    }

    fn answer(
        &self,
        request: pb::ModelInferRequest,
    ) -> impl Future<Output = (Answer, Option<UnsentGuard>)> + use<> {
        // Admitted before the task starts: tasks start in any order, and requests of a sequence must run in
        // the order of their arrival.
        let admitted = self.service.admit(&self.caller, &request);
        let (service, origin) = (self.service.clone(), self.origin.clone());
        let (quota, strict) = (self.quota.clone(), self.strict);
        telemetry::nested(self.span.clone(), answer(service, admitted, origin, request, quota, strict))
    }
}

/// Answers one request. An error becomes an answer, unless the client wants errors to end the stream.
async fn answer(
    service: Service,
    admitted: Result<AdmittedCall, InferError>,
    origin: CallOrigin,
    request: pb::ModelInferRequest,
    quota: Option<Quota>,
    strict: bool,
) -> (Answer, Option<UnsentGuard>) {
    let id = request.id.clone();
    let answer = match admitted {
        Ok(admitted) => service.infer(admitted, origin, request).await.map(|(response, _)| response),
        Err(error) => Err(error),
    };
    // Counted as waiting behind earlier answers, which the client may not have read.
    let held =
        answer.as_ref().ok().zip(quota).map(|(response, quota)| quota.hold_behind(response.encoded_len()));
    let (answer, held) = match held.transpose() {
        Ok(held) => (answer, held),
        Err(error) => (Err(error), None),
    };
    if let Err(error) = &answer {
        outcome::failed(None, error);
    }
    let (mut response, error_message) = match answer {
        Ok(response) => (response, String::new()),
        Err(error) if strict => return (Err(error.into()), None),
        // The id tells the client which request failed.
        Err(error) => (pb::ModelInferResponse { id, ..Default::default() }, error.to_string()),
    };
    let last = pb::InferParameter { parameter_choice: Some(ParameterChoice::BoolParam(true)) };
    response.parameters.insert(FINAL.to_owned(), last);
    (Ok(pb::ModelStreamInferResponse { error_message, infer_response: Some(response) }), held)
}
