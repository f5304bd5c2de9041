//! Requests and answers in one stream: each request has one answer, in the order of the requests, and a
//! refused one does not end the stream.
//!
//! A request that comes alone runs inline, as a call does; those that have arrived together run at once,
//! each on a task of its own. No more than [`REQUESTS_MAX`] of a stream run or wait for their turn, and
//! nothing runs ahead of a client that does not read its answers: the others wait in the transport,
//! whose flow control makes the client wait.

use std::sync::Arc;

use futures::future::FutureExt;
use futures::stream::{BoxStream, FuturesOrdered, StreamExt, unfold};
use prost::Message;
use tokio_util::task::AbortOnDropHandle;
use tonic::{Request, Status, Streaming};

use super::{Admitted, Origin, Service};
use crate::connections::{Held, Quota};
use crate::error::InferError;
use crate::infer::stopping;
use crate::peer::{Peer, peer};
use crate::telemetry::{self, Active};
use crate::tokens::Caller;
use crate::wire::inference as pb;
use crate::wire::inference::infer_parameter::ParameterChoice;

/// Most requests of one stream that run or wait for a session.
const REQUESTS_MAX: usize = 32;
/// Metadata with which a client asks that an error ends the stream with its status.
const STRICT: &str = "triton_grpc_error";
/// Parameter of every answer: it is the last one of its request.
const FINAL: &str = "triton_final_response";

type Arrival = Option<Result<pb::ModelInferRequest, Status>>;
type Answer = Result<pb::ModelStreamInferResponse, Status>;
pub(super) type Answers = BoxStream<'static, Answer>;

/// The answers to a stream of requests. They end after the requests have, with an error when the stream
/// broke off, and with UNAVAILABLE when the server stops: requests that it has not answered by then were
/// not run. Dropped answers abort what waits.
pub(super) fn answers(
    service: Service,
    caller: Caller,
    request: Request<Streaming<pb::ModelInferRequest>>,
) -> Answers {
    let strict = request.metadata().get(STRICT).is_some_and(|value| value == "true");
    let conversation = Conversation {
        // A stream has no deadline but its client's: when he goes, what waits goes too.
        origin: Origin { client: peer(request.extensions()), deadline: Ok(None) },
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

struct Conversation {
    origin: Origin,
    service: Service,
    caller: Caller,
    /// That of the stream, where it is sampled.
    span: Option<Arc<Active>>,
    strict: bool,
    requests: Streaming<pb::ModelInferRequest>,
    running: FuturesOrdered<AbortOnDropHandle<(Answer, Option<Held>)>>,
    /// What the client may leave unread.
    quota: Option<Quota>,
    /// Set when no more requests are read: the status to end with, none after the first error.
    end: Option<Option<Status>>,
}

impl Conversation {
    async fn next(&mut self) -> Option<Answer> {
        let answer = self.next_answer().await;
        if matches!(answer, Some(Err(_))) {
            // A status is the last that a client hears.
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
                    // What has arrived is answered, by a refusal while the server stops.
                    biased;
                    arrival = self.requests.next() => arrival,
                    () = self.service.inference.draining() => Some(Err(stopping().into())),
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
                            Err(_) => return Some(Err(stopping().into())),
                        },
                        None => {}
                    },
                }
            }
        }
    }

    /// The request that has arrived, unless the requests have ended.
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

    fn answer(&self, request: pb::ModelInferRequest) -> impl Future<Output = (Answer, Option<Held>)> + use<> {
        // Here, as tasks begin in any order, and requests of a sequence run in that of their arrival.
        let admitted = self.service.admit(&self.caller, &request);
        let (service, origin) = (self.service.clone(), self.origin.clone());
        let (quota, strict) = (self.quota.clone(), self.strict);
        telemetry::nested(self.span.clone(), answer(service, admitted, origin, request, quota, strict))
    }
}

/// Answers one request. Errors are answers too, unless the client wants them to end the stream.
async fn answer(
    service: Service,
    admitted: Result<Admitted, InferError>,
    origin: Origin,
    request: pb::ModelInferRequest,
    quota: Option<Quota>,
    strict: bool,
) -> (Answer, Option<Held>) {
    let id = request.id.clone();
    let answer = match admitted {
        Ok(admitted) => service.infer(admitted, origin, request).await.map(|(response, _)| response),
        Err(error) => Err(error),
    };
    // It may wait for those before it, which the client may not take.
    let held =
        answer.as_ref().ok().zip(quota).map(|(response, quota)| quota.hold_behind(response.encoded_len()));
    let (answer, held) = match held.transpose() {
        Ok(held) => (answer, held),
        Err(error) => (Err(error), None),
    };
    if let Err(error) = &answer {
        telemetry::failed(None, error);
    }
    let (mut response, error_message) = match answer {
        Ok(response) => (response, String::new()),
        Err(error) if strict => return (Err(error.into()), None),
        // So that the client knows which request failed.
        Err(error) => (pb::ModelInferResponse { id, ..Default::default() }, error.to_string()),
    };
    let last = pb::InferParameter { parameter_choice: Some(ParameterChoice::BoolParam(true)) };
    response.parameters.insert(FINAL.to_owned(), last);
    (Ok(pb::ModelStreamInferResponse { error_message, infer_response: Some(response) }), held)
}
