//! A fast path for `ModelInfer`, without tonic's message streams: it reads the one message into a buffer of
//! its size and encodes the answer into another buffer. For a small model, tonic's streams cost about as much
//! as the rest of the request outside ONNX Runtime. tonic handles all other calls, and those with compressed
//! answers.

use std::convert::Infallible;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures::TryFutureExt;
use http_body::{Frame, SizeHint};
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, StdError, http};
use tonic::metadata::{GRPC_CONTENT_TYPE, MetadataMap};
use tonic::server::NamedService;
use tonic::{Request, Status};

use super::Service as Calls;
use super::messages::{ACCEPTED, ENCODING, Frames};
use crate::connections::{Peer, PeerService};
use millrace_serving_core::blocking::{COPIED_BYTES, in_place};
use millrace_serving_core::wire::codec::{PREFIX_BYTES, check_tensors, decode, framed, is_long};
use millrace_serving_core::wire::inference as pb;
use millrace_serving_core::wire::inference::grpc_inference_service_server::GrpcInferenceServiceServer;

/// Trailer with the status code of a call.
const GRPC_STATUS: &str = "grpc-status";
const MODEL_INFER: &str = "/inference.GRPCInferenceService/ModelInfer";

/// The inference service, over checked and decompressed messages.
#[derive(Debug, Clone)]
pub(crate) struct Unary {
    calls: Arc<Calls>,
    others: GrpcInferenceServiceServer<Calls>,
    /// The client's end of the connection.
    peer: Option<Peer>,
}

impl PeerService for Unary {
    fn for_peer(&self, peer: &Peer) -> Unary {
        Unary { peer: Some(peer.clone()), ..self.clone() }
    }
}

impl Unary {
    pub(super) fn new(calls: Arc<Calls>, others: GrpcInferenceServiceServer<Calls>) -> Unary {
        Unary { calls, others, peer: None }
    }
}

impl NamedService for Unary {
    const NAME: &'static str = <GrpcInferenceServiceServer<Calls> as NamedService>::NAME;
}

impl<B> Service<http::Request<Frames<B>>> for Unary
where
    B: http_body::Body<Data = Bytes, Error: Into<StdError>> + Send + Unpin + 'static,
{
    type Response = http::Response<Reply>;
    type Error = Infallible;
    type Future = BoxFuture<http::Response<Reply>, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: http::Request<Frames<B>>) -> Self::Future {
        let headers = request.headers();
        if request.uri().path() != MODEL_INFER
            || headers.contains_key(&ENCODING)
            || headers.contains_key(&ACCEPTED)
        {
            crate::connections::peer::attach(request.extensions_mut(), self.peer.as_ref());
            return Box::pin(self.others.call(request).map_ok(|reply| reply.map(Reply::Other)));
        }
        let (calls, client) = (Arc::clone(&self.calls), self.peer.as_ref().map(|peer| peer.address));
        Box::pin(async move {
            let answered = answer(&calls, client, request).await;
            Ok(answered.unwrap_or_else(Status::into_http))
        })
    }
}

async fn answer(
    calls: &Calls,
    client: Option<SocketAddr>,
    request: http::Request<impl http_body::Body<Data = Bytes, Error = Status> + Unpin>,
) -> Result<http::Response<Reply>, Status> {
    let (head, body) = request.into_parts();
    let request = parse(calls, read(body).await?).await?;
    let request = Request::from_parts(MetadataMap::from_headers(head.headers), head.extensions, request);
    let (metadata, message, extensions) = calls.answer(client, request).await?.into_parts();
    let is_long = message.raw_output_contents.iter().map(Bytes::len).sum::<usize>() >= COPIED_BYTES;
    let answer = Answer { message: in_place(is_long, || framed(&message))?, ended: false };
    let mut response = http::Response::new(Reply::Answer(answer));
    *response.headers_mut() = metadata.into_headers();
    response.headers_mut().insert(http::header::CONTENT_TYPE, GRPC_CONTENT_TYPE);
    *response.extensions_mut() = extensions;
    Ok(response)
}

/// Decodes a message; one with many elements waits for a turn on the decoding threads.
async fn parse(calls: &Calls, message: Bytes) -> Result<pb::ModelInferRequest, Status> {
    if !is_long(&message)? {
        return decode(message);
    }
    let mut in_body = calls.bodies.begin();
    in_body.grow(message.len())?;
    let work = move || {
        let _in_body = in_body;
        check_tensors(&message)?;
        decode(message)
    };
    calls.bodies.read_limit().run(true, work).await?
}

/// The first message of a request, without its prefix, once the whole request has arrived. Like tonic, drops
/// further messages.
async fn read(mut body: impl http_body::Body<Data = Bytes, Error = Status> + Unpin) -> Result<Bytes, Status> {
    let mut prefix = [0; PREFIX_BYTES];
    let mut prefix_bytes = 0;
    let mut message = Vec::new();
    let mut left = 0;
    while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
        let Ok(data) = frame?.into_data() else { continue };
        let mut data = &data[..];
        if prefix_bytes < PREFIX_BYTES {
            let (came, rest) = data.split_at(data.len().min(PREFIX_BYTES - prefix_bytes));
            prefix[prefix_bytes..][..came.len()].copy_from_slice(came);
            prefix_bytes += came.len();
            data = rest;
            if prefix_bytes == PREFIX_BYTES {
                // Within the limit: `Frames` passes no prefix on that exceeds it.
                let [_, length @ ..] = prefix;
                left = u32::from_be_bytes(length) as usize;
                message.reserve_exact(left);
            }
        }
        let data = &data[..data.len().min(left)];
        message.extend_from_slice(data);
        left -= data.len();
    }
    Ok(message.into())
}

/// The body of a response; tonic's bodies are boxed.
#[derive(Debug)]
pub(crate) enum Reply {
    Answer(Answer),
    Other(Body),
}

impl Default for Reply {
    fn default() -> Reply {
        Reply::Other(Body::empty())
    }
}

impl http_body::Body for Reply {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        match self.get_mut() {
            Reply::Answer(answer) => Poll::Ready(answer.next().map(Ok)),
            Reply::Other(body) => Pin::new(body).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Reply::Answer(answer) => answer.ended,
            Reply::Other(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Reply::Answer(_) => SizeHint::default(),
            Reply::Other(body) => body.size_hint(),
        }
    }
}

/// Body of a successful answer: the message, then the trailers.
#[derive(Debug)]
pub(crate) struct Answer {
    /// Empty once it was sent.
    message: Bytes,
    ended: bool,
}

impl Answer {
    fn next(&mut self) -> Option<Frame<Bytes>> {
        if !self.message.is_empty() {
            return Some(Frame::data(std::mem::take(&mut self.message)));
        }
        if std::mem::replace(&mut self.ended, true) {
            return None;
        }
        let mut trailers = http::HeaderMap::with_capacity(1);
        trailers.insert(GRPC_STATUS, http::HeaderValue::from_static("0"));
        Some(Frame::trailers(trailers))
    }
}

#[cfg(test)]
mod tests {
    use futures::stream;
    use http_body_util::{BodyExt, StreamBody};
    use prost::Message as _;

    use super::*;

    fn body(parts: &[&[u8]]) -> Body {
        let frames: Vec<_> =
            parts.iter().map(|part| Ok::<_, Status>(Frame::data(Bytes::copy_from_slice(part)))).collect();
        Body::new(StreamBody::new(stream::iter(frames)))
    }

    fn prefixed(message: &[u8]) -> Vec<u8> {
        [&[0][..], &(message.len() as u32).to_be_bytes(), message].concat()
    }

    #[tokio::test]
    async fn message_is_read_from_parts_of_any_size() {
        let message: Vec<u8> = (0..40).collect();
        let whole = prefixed(&message);
        for first in 0..=whole.len() {
            for second in first..=whole.len() {
                let parts = [&whole[..first], &whole[first..second], &whole[second..]];
                assert_eq!(read(body(&parts)).await.unwrap(), message, "{first} {second}");
            }
        }
        let bytes: Vec<&[u8]> = whole.chunks(1).collect();
        assert_eq!(read(body(&bytes)).await.unwrap(), message);
        assert_eq!(read(body(&[&prefixed(&[])])).await.unwrap(), Bytes::new());
    }

    #[tokio::test]
    async fn bytes_after_the_first_message_are_ignored() {
        let both = [prefixed(b"first"), prefixed(b"second")].concat();
        assert_eq!(read(body(&[&both])).await.unwrap(), "first");
        assert_eq!(read(body(&[&both[..7], &both[7..]])).await.unwrap(), "first");
    }

    #[tokio::test]
    async fn error_of_a_broken_body_is_passed_on() {
        let frames = [Ok(Frame::data(Bytes::from(prefixed(b"all")))), Err(Status::aborted("gone"))];
        let broken = Body::new(StreamBody::new(stream::iter(frames)));
        assert_eq!(read(broken).await.unwrap_err().message(), "gone");
    }

    #[tokio::test]
    async fn reply_is_a_message_and_a_trailer_with_status_0() {
        for name in ["", "model"] {
            let message = pb::ModelInferResponse { model_name: name.into(), ..Default::default() };
            let answer = Answer { message: framed(&message).unwrap(), ended: false };
            let collected = Reply::Answer(answer).collect().await.unwrap();
            let trailers = collected.trailers().cloned().unwrap();
            assert_eq!((trailers.len(), &trailers["grpc-status"]), (1, &http::HeaderValue::from(0)));
            assert_eq!(collected.to_bytes(), prefixed(&message.encode_to_vec()));
        }
    }
}
