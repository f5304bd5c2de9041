//! Answer bodies of a connection, in pieces: each piece counts against the quota until the connection has
//! sent it.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tonic::Status;
use tonic::codegen::http::{self, HeaderValue, header};

use super::answer_progress::{self, AnswerProgress};
use super::quota::{Quota, Refusal, UnsentGuard};
use millrace_serving_core::error::InferError;

/// Bytes of an answer given to the connection at a time: one HTTP/2 frame, so that answers alternate. It is
/// also the unit of a client's progress.
const PIECE_BYTES: usize = 16 << 10;

/// A part of an answer, which counts against the quota until the connection has sent and dropped it.
struct Piece {
    bytes: Bytes,
    held: UnsentGuard,
    progress: Arc<AnswerProgress>,
}

impl Piece {
    fn new(bytes: Bytes, held: UnsentGuard, progress: &Arc<AnswerProgress>) -> Piece {
        progress.gave(held.quota().period());
        Piece { bytes, held, progress: progress.clone() }
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let quota = self.held.quota();
        self.progress.took(quota.period());
        quota.took();
    }
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Counts a call as cancelled if it is dropped before it is answered.
#[derive(Debug)]
struct CancelledCallGuard(Option<Quota>);

impl Drop for CancelledCallGuard {
    fn drop(&mut self) {
        if let Some(quota) = self.0.take() {
            quota.cancelled();
        }
    }
}

pin_project! {
    /// A call of a connection; its answer counts against the quota.
    pub(crate) struct Call<F> {
        #[pin]
        call: F,
        unanswered: CancelledCallGuard,
        is_grpc: bool,
    }
}

impl<F> Call<F> {
    pub(crate) fn new(call: F, quota: &Quota, is_grpc: bool) -> Call<F> {
        Call { call, unanswered: CancelledCallGuard(Some(quota.clone())), is_grpc }
    }
}

impl<F, B: Body> Future for Call<F>
where
    F: Future<Output = Result<http::Response<B>, Infallible>>,
{
    type Output = Result<http::Response<Answer<B>>, Infallible>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let Ok(response) = ready!(this.call.poll(cx));
        let Some(quota) = this.unanswered.0.take() else { return Poll::Pending };
        let bytes = usize::try_from(response.body().size_hint().lower()).unwrap_or(usize::MAX);
        let is_grpc = *this.is_grpc;
        Poll::Ready(Ok(match quota.hold(bytes) {
            Ok(held) => response.map(|body| Answer::new(Some(body), Bytes::new(), held, is_grpc)),
            Err(refusal) => refused(&quota, refusal, is_grpc),
        }))
    }
}

fn refused<B>(quota: &Quota, refusal: Refusal, is_grpc: bool) -> http::Response<Answer<B>> {
    let answer = |left| Answer::new(None, left, quota.hold_nothing(), is_grpc);
    let status = refusal.status;
    let error = InferError::from(refusal);
    if is_grpc {
        return Status::from(error).into_http::<()>().map(|()| answer(Bytes::new()));
    }
    let text = serde_json::json!({ "error": error.to_string() }).to_string();
    let mut response = http::Response::new(answer(text.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// The body of an answer, produced in pieces.
pub(crate) struct Answer<B> {
    /// `None` after the answer was refused.
    body: Option<B>,
    /// Bytes from the body that are not yet in a piece.
    left: Bytes,
    /// Counts `left`, and the known size of the rest of the body.
    held: UnsentGuard,
    progress: Arc<AnswerProgress>,
    is_grpc: bool,
}

impl<B> Answer<B> {
    fn new(body: Option<B>, left: Bytes, held: UnsentGuard, is_grpc: bool) -> Answer<B> {
        let progress = Arc::default();
        held.quota().follow(&progress);
        answer_progress::begin(&progress);
        Answer { body, left, held, progress, is_grpc }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for Answer<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = &mut *self;
        if this.left.is_empty() {
            let Some(body) = &mut this.body else { return Poll::Ready(None) };
            match ready!(Pin::new(body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => this.left = data,
                    Err(frame) => return Poll::Ready(Some(Ok(frame))),
                },
                other => return Poll::Ready(other),
            }
            let more = this.left.len().saturating_sub(this.held.bytes());
            if more > 0 {
                match this.held.quota().hold(more) {
                    Ok(more) => this.held.join(more),
                    // An HTTP response has already announced its length, so it cannot be refused any more.
                    Err(refusal) if this.is_grpc => {
                        this.body = None;
                        this.left = Bytes::new();
                        let status = Status::from(InferError::from(refusal));
                        let mut trailers = status.into_http::<()>().into_parts().0.headers;
                        trailers.remove(header::CONTENT_TYPE);
                        return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
                    }
                    Err(_) => {}
                }
            }
        }
        let bytes = this.left.split_to(this.left.len().min(PIECE_BYTES));
        let held = this.held.split(bytes.len().min(this.held.bytes()));
        let piece = Piece::new(bytes, held, &this.progress);
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_owner(piece)))))
    }

    fn is_end_stream(&self) -> bool {
        self.left.is_empty() && self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let left = self.left.len() as u64;
        let rest = self.body.as_ref().map_or(SizeHint::with_exact(0), Body::size_hint);
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower().saturating_add(left));
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper.saturating_add(left));
        }
        hint
    }
}

#[cfg(test)]
mod tests;
