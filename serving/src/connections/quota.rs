//! The quota of one connection: answers that its client has not taken yet, and calls that its client cancels.
//!
//! A client of HTTP/2 decides when the server may send (flow control). Without a bound it could have answers made and
//! never take them, while it answers pings. So a connection holds a bounded number of unsent bytes, and it ends when its
//! client takes none of them for too long.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use parking_lot::Mutex;
use pin_project_lite::pin_project;
use tokio::sync::oneshot;
use tonic::Status;
use tonic::codegen::http::{self, HeaderValue, header};

use crate::error::InferError;

/// Bytes of an answer that are handed to the connection at a time. Taking fewer of them is no progress.
const PIECE_BYTES: usize = 64 << 10;
/// Calls that a client may cancel each second, and so many at once. A client reaches this by deadlines only if that
/// many of its calls run out of time; a flood of calls that are cancelled at once reaches a million.
pub(super) const CANCELLED_PER_SECOND_MAX: usize = 10_000;

/// The quota of one connection. Clones are one.
#[derive(Debug, Clone)]
pub(crate) struct Quota(Arc<State>);

#[derive(Debug)]
struct State {
    unsent: AtomicUsize,
    /// Those of them that wait for others of their stream.
    behind: AtomicUsize,
    unsent_max: usize,
    /// Counts pieces of answers that the client has taken, or given up.
    taken: AtomicUsize,
    cancelled: Mutex<Bucket>,
    /// Ends the connection.
    cut: Mutex<Option<oneshot::Sender<()>>>,
}

/// A token bucket of cancelled calls.
#[derive(Debug)]
struct Bucket {
    left: f64,
    at: Instant,
}

impl Bucket {
    /// Takes one out; whether there was one.
    fn take(&mut self, now: Instant) -> bool {
        let most = CANCELLED_PER_SECOND_MAX as f64;
        let refilled = now.saturating_duration_since(self.at).as_secs_f64() * most;
        self.at = now;
        self.left = (self.left + refilled).min(most) - 1.0;
        self.left >= 0.0
    }
}

/// Wakes when a connection is to end for what its client does.
#[derive(Debug)]
pub(super) struct Watch {
    quota: Quota,
    cut: oneshot::Receiver<()>,
}

impl Quota {
    pub(super) fn new(unsent_max: usize) -> (Quota, Watch) {
        let (sender, cut) = oneshot::channel();
        let state = State {
            unsent: AtomicUsize::new(0),
            behind: AtomicUsize::new(0),
            unsent_max,
            taken: AtomicUsize::new(0),
            cancelled: Mutex::new(Bucket { left: CANCELLED_PER_SECOND_MAX as f64, at: Instant::now() }),
            cut: Mutex::new(Some(sender)),
        };
        let quota = Quota(Arc::new(state));
        (quota.clone(), Watch { quota, cut })
    }

    /// Counts bytes of an answer as unsent until the guard is dropped. An answer that is the only one may have any size.
    ///
    /// # Errors
    /// [`InferError::Overloaded`].
    pub(crate) fn hold(&self, bytes: usize) -> Result<Held, InferError> {
        self.hold_as(bytes, false)
    }

    /// [`Quota::hold`] of an answer that waits for others of its stream, so that the client cannot take it yet.
    ///
    /// # Errors
    /// [`InferError::Overloaded`].
    pub(crate) fn hold_behind(&self, bytes: usize) -> Result<Held, InferError> {
        self.hold_as(bytes, true)
    }

    fn hold_as(&self, bytes: usize, behind: bool) -> Result<Held, InferError> {
        let State { unsent, unsent_max, .. } = &*self.0;
        let before = unsent.fetch_add(bytes, Ordering::Relaxed);
        if behind {
            self.0.behind.fetch_add(bytes, Ordering::Relaxed);
        }
        let held = Held { quota: self.clone(), bytes, behind };
        if before == 0 || bytes == 0 || before.saturating_add(bytes) <= *unsent_max {
            return Ok(held);
        }
        let reason = format!(
            "the client has not taken {before} bytes of answers on this connection, with this one of {bytes} bytes more than limits.unsent_bytes_max ({unsent_max}): read answers before more requests are sent"
        );
        Err(InferError::Overloaded { reason })
    }

    fn cancelled(&self) {
        if !self.0.cancelled.lock().take(Instant::now())
            && let Some(cut) = self.0.cut.lock().take()
        {
            // The connection may have ended meanwhile.
            let _ = cut.send(());
        }
    }
}

impl Watch {
    /// What the client did that ends its connection; pending while it does nothing of the kind.
    pub(super) async fn exceeded(&mut self, patience: Duration) -> &'static str {
        let Watch { quota: Quota(state), cut } = self;
        let to_take = || {
            let behind = state.behind.load(Ordering::Relaxed);
            state.unsent.load(Ordering::Relaxed).saturating_sub(behind)
        };
        let look = || (to_take(), state.taken.load(Ordering::Relaxed));
        let mut before = look();
        loop {
            tokio::select! {
                Ok(()) = &mut *cut => return "cancelled too many calls",
                () = tokio::time::sleep(patience) => {}
            }
            let now = look();
            if before.0 > 0 && now.0 > 0 && before.1 == now.1 {
                return "took none of its answers";
            }
            before = now;
        }
    }
}

/// Bytes that count as unsent.
#[derive(Debug)]
pub(crate) struct Held {
    quota: Quota,
    bytes: usize,
    /// It waits for other answers.
    behind: bool,
}

impl Held {
    fn split(&mut self, bytes: usize) -> Held {
        self.bytes -= bytes;
        if self.behind {
            self.quota.0.behind.fetch_sub(bytes, Ordering::Relaxed);
        }
        Held { quota: self.quota.clone(), bytes, behind: false }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.behind {
            self.quota.0.behind.fetch_sub(self.bytes, Ordering::Relaxed);
        }
        self.quota.0.unsent.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Part of an answer, which counts until the connection has sent it.
struct Piece {
    bytes: Bytes,
    held: Held,
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.held.quota.0.taken.fetch_add(1, Ordering::Relaxed);
    }
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Counts a call as cancelled when it is dropped before it was answered.
#[derive(Debug)]
struct Unanswered(Option<Quota>);

impl Drop for Unanswered {
    fn drop(&mut self) {
        if let Some(quota) = self.0.take() {
            quota.cancelled();
        }
    }
}

pin_project! {
    /// A call of a connection, whose answer counts against the quota.
    pub(crate) struct Call<F> {
        #[pin]
        call: F,
        unanswered: Unanswered,
        is_grpc: bool,
    }
}

impl<F> Call<F> {
    pub(crate) fn new(call: F, quota: &Quota, is_grpc: bool) -> Call<F> {
        Call { call, unanswered: Unanswered(Some(quota.clone())), is_grpc }
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
        Poll::Ready(Ok(match quota.hold(bytes) {
            Ok(held) => {
                let is_grpc = *this.is_grpc;
                response.map(|body| Answer { body: Some(body), left: Bytes::new(), held, is_grpc })
            }
            Err(error) => refused(&quota, error, *this.is_grpc),
        }))
    }
}

fn refused<B>(quota: &Quota, error: InferError, is_grpc: bool) -> http::Response<Answer<B>> {
    let answer = |left| Answer {
        body: None,
        left,
        held: Held { quota: quota.clone(), bytes: 0, behind: false },
        is_grpc,
    };
    if is_grpc {
        return Status::from(error).into_http::<()>().map(|()| answer(Bytes::new()));
    }
    let text = serde_json::json!({ "error": error.to_string() }).to_string();
    let mut response = http::Response::new(answer(text.into()));
    *response.status_mut() = http::StatusCode::TOO_MANY_REQUESTS;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// The body of an answer, handed out in pieces.
pub(crate) struct Answer<B> {
    /// None after the answer was refused.
    body: Option<B>,
    /// What the body gave and was not handed out yet.
    left: Bytes,
    /// Counts `left`, and what is known of the rest of the body.
    held: Held,
    is_grpc: bool,
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
            let more = this.left.len().saturating_sub(this.held.bytes);
            if more > 0 {
                match this.held.quota.hold(more) {
                    Ok(mut more) => this.held.bytes += std::mem::take(&mut more.bytes),
                    // An answer of HTTP says how long it is before it begins.
                    Err(error) if this.is_grpc => {
                        this.body = None;
                        this.left = Bytes::new();
                        let mut trailers = Status::from(error).into_http::<()>().into_parts().0.headers;
                        trailers.remove(header::CONTENT_TYPE);
                        return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
                    }
                    Err(_) => {}
                }
            }
        }
        let bytes = this.left.split_to(this.left.len().min(PIECE_BYTES));
        let held = this.held.split(bytes.len().min(this.held.bytes));
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_owner(Piece { bytes, held })))))
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
mod tests {
    #![allow(clippy::unwrap_used)]

    use http_body_util::{BodyExt, Full};

    use super::*;

    #[test]
    fn cancelled_calls_are_bounded_by_a_rate() {
        let start = Instant::now();
        let mut bucket = Bucket { left: CANCELLED_PER_SECOND_MAX as f64, at: start };
        let mut taken =
            |now: Instant| (0..2 * CANCELLED_PER_SECOND_MAX).take_while(|_| bucket.take(now)).count();
        assert_eq!(taken(start), CANCELLED_PER_SECOND_MAX);
        let half = taken(start + Duration::from_millis(500));
        assert!((CANCELLED_PER_SECOND_MAX / 2 - 2..=CANCELLED_PER_SECOND_MAX / 2).contains(&half), "{half}");
    }

    #[tokio::test]
    async fn an_answer_counts_until_its_pieces_are_gone() {
        let (quota, _watch) = Quota::new(100);
        let unsent = || quota.0.unsent.load(Ordering::Relaxed);
        let content: Bytes = (0..3 * PIECE_BYTES + 7).map(|index| index as u8).collect();
        let response = || std::future::ready(Ok(http::Response::new(Full::new(content.clone()))));
        let mut body = Call::new(response(), &quota, false).await.unwrap().into_body();
        assert_eq!(unsent(), content.len(), "the only one may have any size");
        let refused = Call::new(response(), &quota, false).await.unwrap();
        assert_eq!(refused.status(), http::StatusCode::TOO_MANY_REQUESTS);
        let mut pieces = Vec::new();
        while let Some(frame) = body.frame().await {
            pieces.push(frame.unwrap().into_data().unwrap());
        }
        drop(body);
        assert_eq!((pieces.len(), pieces.concat()), (4, content.to_vec()));
        assert_eq!(unsent(), content.len());
        drop(pieces.pop());
        assert_eq!(unsent(), 3 * PIECE_BYTES);
        drop(pieces);
        assert_eq!(unsent(), 0);
    }
}
