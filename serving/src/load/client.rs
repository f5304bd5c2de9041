//! A client that costs little: messages that were encoded before go out, answers come in and are thrown
//! away.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf as _, BufMut as _, Bytes};
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::requests::Requests;
use crate::client::{ClientError, Credentials, Remote};

const PATH: &str = "/inference.GRPCInferenceService/ModelInfer";

/// Who answers the requests of a load.
pub(super) trait Server: Clone + Send + 'static {
    /// Sends a request; returns when it has its answer, or its time is over.
    fn call(
        &mut self,
        number: u64,
        timeout: Option<Duration>,
    ) -> impl Future<Output = Result<(), Code>> + Send;
}

/// A connection to a server. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct Connection {
    grpc: Grpc<Channel>,
    remote: Arc<Remote>,
    requests: Requests,
}

impl Connection {
    /// Opens so many connections to a server.
    pub(super) async fn open(
        address: &str,
        credentials: &Credentials,
        requests: &Requests,
        count: usize,
    ) -> Result<Vec<Connection>, ClientError> {
        let remote = Arc::new(Remote::new(address, credentials)?);
        let mut connections = Vec::with_capacity(count);
        for _ in 0..count {
            let grpc = Grpc::new(remote.connect().await?).max_decoding_message_size(usize::MAX);
            connections.push(Connection { grpc, remote: Arc::clone(&remote), requests: requests.clone() });
        }
        Ok(connections)
    }
}

impl Server for Connection {
    async fn call(&mut self, number: u64, timeout: Option<Duration>) -> Result<(), Code> {
        self.grpc.ready().await.map_err(|_| Code::Unavailable)?;
        let mut request = self.remote.call(self.requests.message(number));
        if let Some(timeout) = timeout {
            // Tells the server, and gives up here when it is over.
            request.set_timeout(timeout);
        }
        match self.grpc.unary(request, PathAndQuery::from_static(PATH), Bare).await {
            Ok(_) => Ok(()),
            // What tonic calls a time that is over on this side.
            Err(status) if timeout.is_some() && status.code() == Code::Cancelled => {
                Err(Code::DeadlineExceeded)
            }
            Err(status) => Err(status.code()),
        }
    }
}

/// Messages as bytes.
#[derive(Debug)]
struct Bare;

impl Codec for Bare {
    type Encode = Bytes;
    type Decode = ();
    type Encoder = Bare;
    type Decoder = Bare;

    fn encoder(&mut self) -> Bare {
        Bare
    }

    fn decoder(&mut self) -> Bare {
        Bare
    }
}

impl Encoder for Bare {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, message: Bytes, into: &mut EncodeBuf<'_>) -> Result<(), Status> {
        into.reserve(message.len());
        into.put(message);
        Ok(())
    }
}

impl Decoder for Bare {
    type Item = ();
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<()>, Status> {
        from.advance(from.remaining());
        Ok(Some(()))
    }
}

/// The name of a status as the protocol has it.
pub(super) fn status(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}
