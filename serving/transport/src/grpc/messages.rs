//! Request messages of gRPC, checked before tonic reads them. Each message is bounded, decompressed within
//! the bound, and must be complete; violations are reported as the client's errors. tonic alone decompresses
//! without a bound and answers INTERNAL.
//!
//! Each body counts in a bound on all bodies of the server until its message is complete. Large messages are
//! decompressed a few at a time.

use std::convert::Infallible;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use futures::future::BoxFuture;
use http_body::Frame;
use tonic::Status;
use tonic::codegen::{Service, StdError, http};
use tonic::server::NamedService;

use super::{deadline, guard};
use crate::bodies::{Bodies, BodyBytesGuard, BodyTimeout, PROGRESS_BYTES};
use crate::compression::Encoding;
use crate::connections::{Peer, PeerService};
use millrace_serving_core::config::Limits;
use millrace_serving_core::error::InferError;
use millrace_serving_core::wire::codec::PREFIX_BYTES;

/// Header with the compression of the request's messages.
pub(super) static ENCODING: http::HeaderName = http::HeaderName::from_static("grpc-encoding");
/// Header with the compressions that the client accepts.
pub(super) static ACCEPTED: http::HeaderName = http::HeaderName::from_static("grpc-accept-encoding");
/// Most bytes of a message of a call without a token, compressed or not; such messages hold at most a name.
const OPEN_BYTES_MAX: usize = 4096;
/// Calls whose client sends any number of messages, including none.
const STREAMING: [&str; 2] = ["ModelStreamInfer", "ServerReflectionInfo"];

/// A service whose requests are checked message by message. `bodies` bounds the bytes of all bodies.
#[derive(Debug, Clone)]
pub(crate) struct DecodeLayer<S> {
    service: S,
    limits: Limits,
    bodies: Bodies,
}

impl<S> DecodeLayer<S> {
    pub(crate) fn new(service: S, limits: Limits, bodies: Bodies) -> DecodeLayer<S> {
        DecodeLayer { service, limits, bodies }
    }
}

impl<S: PeerService> PeerService for DecodeLayer<S> {
    fn for_peer(&self, peer: &Peer) -> DecodeLayer<S> {
        DecodeLayer { service: self.service.for_peer(peer), limits: self.limits, bodies: self.bodies.clone() }
    }
}

impl<S: NamedService> NamedService for DecodeLayer<S> {
    const NAME: &'static str = S::NAME;
}

impl<S, B> Service<http::Request<B>> for DecodeLayer<S>
where
    S: Service<http::Request<Frames<B>>, Error = Infallible>,
    B: http_body::Body<Data = Bytes, Error: Into<StdError>> + Unpin,
{
    type Response = S::Response;
    type Error = Infallible;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.service.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<B>) -> S::Future {
        let (mut head, body) = request.into_parts();
        let encoding = head.headers.get(&ENCODING).and_then(|name| Encoding::named(name.to_str().ok()?));
        if encoding.is_some() {
            head.headers.remove(&ENCODING);
        }
        mirror(&mut head.headers, encoding);
        deadline::record_arrival(&head.headers, &mut head.extensions);
        let streaming = STREAMING.iter().any(|method| head.uri.path().ends_with(method));
        let mut limits = self.limits;
        if guard::is_open(head.uri.path()) {
            limits.message_bytes_max = limits.message_bytes_max.min(OPEN_BYTES_MAX);
        }
        let body = Frames::new(body, encoding, streaming, &limits, self.bodies.begin());
        self.service.call(http::Request::from_parts(head, body))
    }
}

/// Compresses a response like its request, if the client accepts that. Clients announce every compression
/// they support with each call, so compressing for all of them would slow down clients that did not ask.
fn mirror(headers: &mut http::HeaderMap, encoding: Option<Encoding>) {
    let Some(accepted) = headers.remove(&ACCEPTED) else { return };
    let reads = |encoding: &Encoding| {
        accepted.to_str().is_ok_and(|names| names.split(',').any(|name| name.trim() == encoding.name()))
    };
    if let Some(encoding) = encoding.filter(reads) {
        headers.insert(&ACCEPTED, http::HeaderValue::from_static(encoding.name()));
    }
}

/// The body of a request as gRPC frames, each a prefix and a payload. Frames that are not compressed pass
/// through as they arrive.
#[derive(Debug)]
pub(crate) struct Frames<B> {
    body: B,
    encoding: Option<Encoding>,
    streaming: bool,
    bytes_max: usize,
    stalled: Duration,
    /// Counts the bytes of the message that is arriving.
    in_body: BodyBytesGuard,
    /// Received bytes that are not yet parsed.
    chunk: Bytes,
    prefix: [u8; PREFIX_BYTES],
    prefix_bytes: usize,
    /// Bytes of the payload that have not arrived yet.
    left: usize,
    /// The received part of a compressed message's payload.
    packed: BytesMut,
    /// The decompression of a complete message, while it runs.
    unpacking: Option<Unpacking>,
    /// The decompressed payload whose prefix was already returned.
    unpacked: Bytes,
    /// Whether a complete message has arrived.
    any: bool,
    /// Runs while the client owes bytes.
    patience: Option<BodyTimeout>,
    /// An error behind the messages that were returned last.
    failure: Option<InferError>,
    ended: bool,
}

/// A decompression in progress.
struct Unpacking(BoxFuture<'static, Result<Vec<u8>, InferError>>);

impl fmt::Debug for Unpacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Unpacking")
    }
}

impl<B> Frames<B> {
    fn new(
        body: B,
        encoding: Option<Encoding>,
        streaming: bool,
        limits: &Limits,
        in_body: BodyBytesGuard,
    ) -> Frames<B> {
        Frames {
            body,
            encoding,
            streaming,
            bytes_max: limits.message_bytes_max.min(u32::MAX as usize),
            stalled: Duration::from_millis(limits.stalled_ms_max),
            in_body,
            chunk: Bytes::new(),
            prefix: [0; PREFIX_BYTES],
            prefix_bytes: 0,
            left: 0,
            packed: BytesMut::new(),
            unpacking: None,
            unpacked: Bytes::new(),
            any: false,
            patience: None,
            failure: None,
            ended: false,
        }
    }

    fn packed(&self) -> bool {
        self.prefix_bytes > 0 && self.prefix[0] == 1
    }

    /// Parses the received bytes and returns those to pass on, including complete messages before an invalid
    /// one.
    fn advance(&mut self) -> Result<Option<Bytes>, InferError> {
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        let (mut plain, mut whole) = (0, 0);
        match self.look(&mut plain, &mut whole) {
            Ok(()) => Ok((plain > 0).then(|| self.chunk.split_to(plain))),
            Err(failure) if whole > 0 => {
                self.failure = Some(failure);
                Ok(Some(self.chunk.split_to(whole)))
            }
            Err(failure) => Err(failure),
        }
    }

    /// Counts the bytes of uncompressed messages in `plain`, and those up to the end of the last complete one
    /// in `whole`. Stops where a compressed message begins, or when one is complete.
    fn look(&mut self, plain: &mut usize, whole: &mut usize) -> Result<(), InferError> {
        while *plain < self.chunk.len() {
            if self.prefix_bytes < PREFIX_BYTES {
                let byte = self.chunk[*plain];
                if self.prefix_bytes == 0 {
                    self.check_flag(byte)?;
                    if byte == 1 && *plain > 0 {
                        break;
                    }
                }
                self.prefix[self.prefix_bytes] = byte;
                self.prefix_bytes += 1;
                if self.packed() {
                    self.chunk.advance(1);
                } else {
                    *plain += 1;
                }
                if self.prefix_bytes == PREFIX_BYTES {
                    self.begin()?;
                }
            } else {
                let bytes = self.left.min(self.chunk.len() - *plain);
                self.left -= bytes;
                if self.packed() {
                    self.packed.extend_from_slice(&self.chunk.split_to(bytes));
                } else {
                    *plain += bytes;
                }
            }
            if self.prefix_bytes == PREFIX_BYTES && self.left == 0 {
                let is_packed = self.packed();
                self.prefix_bytes = 0;
                if is_packed {
                    self.unpacking = Some(self.unpack()?);
                    return Ok(());
                }
                self.end_message();
                *whole = *plain;
            }
        }
        Ok(())
    }

    /// Marks the message as complete, so that it no longer counts as being received.
    fn end_message(&mut self) {
        self.any = true;
        self.in_body.shrink();
        self.patience = None;
    }

    fn check_flag(&self, flag: u8) -> Result<(), InferError> {
        match flag {
            0 => Ok(()),
            1 if self.encoding.is_some() => Ok(()),
            1 => Err(InferError::invalid(
                "a message is compressed, but grpc-encoding names no encoding: use gzip or deflate",
            )),
            flag => Err(InferError::invalid(format!(
                "a message begins with {flag}, 0 (plain) or 1 (compressed) is expected"
            ))),
        }
    }

    fn begin(&mut self) -> Result<(), InferError> {
        let [_, length @ ..] = self.prefix;
        self.left = u32::from_be_bytes(length) as usize;
        if self.left > self.bytes_max {
            return Err(InferError::TooLarge { bytes: self.left as u64, bytes_max: self.bytes_max as u64 });
        }
        Ok(())
    }

    fn unpack(&mut self) -> Result<Unpacking, InferError> {
        let packed = std::mem::take(&mut self.packed).freeze();
        // `check_flag` accepts 1 only with an encoding.
        let encoding = self.encoding.ok_or_else(|| InferError::invalid("grpc-encoding is missing"))?;
        let decode_limit = self.in_body.read_limit().clone();
        Ok(Unpacking(Box::pin(encoding.decompress_limited(decode_limit, packed, self.bytes_max))))
    }

    /// The new prefix of a decompressed message; its payload is returned next.
    fn unpacked(&mut self, plain: Vec<u8>) -> Result<Bytes, InferError> {
        self.in_body.grow(plain.len())?;
        self.end_message();
        let mut prefix = BytesMut::with_capacity(PREFIX_BYTES);
        prefix.put_u8(0);
        // Does not overflow: `bytes_max` is at most `u32::MAX`.
        prefix.put_u32(plain.len() as u32);
        self.unpacked = plain.into();
        Ok(prefix.freeze())
    }

    /// The error if the client's end of stream cuts a message off or leaves a required one out.
    fn check_end(&self) -> Result<(), InferError> {
        if self.prefix_bytes > 0 {
            let missing = if self.prefix_bytes < PREFIX_BYTES {
                format!("{} bytes of its prefix of {PREFIX_BYTES}", PREFIX_BYTES - self.prefix_bytes)
            } else {
                format!("{} bytes", self.left)
            };
            return Err(InferError::invalid(format!("the message is cut off: {missing} is missing")));
        }
        if !self.any && !self.streaming {
            return Err(InferError::invalid("the request has no message, one is expected"));
        }
        Ok(())
    }

    /// Whether the client has stalled for too long in what it owes: the rest of a message or, for a call with
    /// one message, that message and the end of the stream.
    fn is_stalled(&mut self, cx: &mut Context<'_>) -> bool {
        if self.streaming && self.prefix_bytes == 0 {
            self.patience = None;
            return false;
        }
        self.patience.get_or_insert_with(|| BodyTimeout::new(self.stalled)).elapsed().poll(cx).is_ready()
    }
}

impl<B: http_body::Body<Data = Bytes, Error: Into<StdError>> + Unpin> http_body::Body for Frames<B> {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        loop {
            if self.ended {
                return Poll::Ready(None);
            }
            if !self.unpacked.is_empty() {
                let payload = std::mem::take(&mut self.unpacked);
                return Poll::Ready(Some(Ok(Frame::data(payload))));
            }
            if let Some(Unpacking(unpacking)) = &mut self.unpacking {
                let plain = ready!(unpacking.as_mut().poll(cx));
                self.unpacking = None;
                return Poll::Ready(Some(match plain.and_then(|plain| self.unpacked(plain)) {
                    Ok(prefix) => Ok(Frame::data(prefix)),
                    Err(error) => {
                        self.ended = true;
                        Err(error.into())
                    }
                }));
            }
            if !self.chunk.is_empty() {
                match self.advance() {
                    Ok(Some(bytes)) => return Poll::Ready(Some(Ok(Frame::data(bytes)))),
                    Ok(None) => continue,
                    Err(error) => {
                        self.ended = true;
                        return Poll::Ready(Some(Err(error.into())));
                    }
                }
            }
            let next = match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Pending if self.is_stalled(cx) => {
                    self.ended = true;
                    let waited = self.stalled.as_millis();
                    return Poll::Ready(Some(Err(Status::deadline_exceeded(format!(
                        "the client sent a request too slowly: less than {PROGRESS_BYTES} bytes of it in the last {waited} ms (limits.stalled_ms_max)"
                    )))));
                }
                polled => ready!(polled),
            };
            match next.map(|frame| frame.map(Frame::into_data)) {
                Some(Ok(Ok(data))) => {
                    if let Some(patience) = &mut self.patience {
                        patience.received(data.len());
                    }
                    if let Err(error) = self.in_body.grow(data.len()) {
                        self.ended = true;
                        return Poll::Ready(Some(Err(error.into())));
                    }
                    self.chunk = data;
                }
                Some(Ok(Err(other))) => return Poll::Ready(Some(Ok(other))),
                Some(Err(error)) => {
                    self.ended = true;
                    return Poll::Ready(Some(Err(Status::from_error(error.into()))));
                }
                None => {
                    self.ended = true;
                    return match self.check_end() {
                        Ok(()) => Poll::Ready(None),
                        Err(error) => Poll::Ready(Some(Err(error.into()))),
                    };
                }
            }
        }
    }
}
