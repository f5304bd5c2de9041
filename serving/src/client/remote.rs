//! A server as clients reach it: its address, and what it is shown, read once for any number of connections.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tonic::codegen::Service as _;
use tonic::codegen::http::Uri;
use tonic::metadata::{Ascii, MetadataMap, MetadataValue};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Response, Status};

use super::ClientError;
use super::credentials::{Connector, Credentials};

/// Longest wait for a connection.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// Longest wait for an answer to what a server knows without computing.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// A connection whose other machine has gone is noticed after a few of these.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// Bytes to and from a server, encrypted where it is one of `https`.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// A server at an address, and what it is shown.
#[derive(Debug, Clone)]
pub(crate) struct Remote {
    address: String,
    endpoint: Endpoint,
    /// For addresses of `https`.
    secure: Option<Connector>,
    bearer: Option<MetadataValue<Ascii>>,
}

impl Remote {
    /// Reads what the credentials name. Connects to nobody yet.
    ///
    /// # Errors
    /// [`ClientError::Address`]; [`ClientError::Credentials`] for files that cannot be used.
    pub(crate) fn new(address: &str, credentials: &Credentials) -> Result<Remote, ClientError> {
        let bearer = credentials.bearer()?;
        let secured = credentials.ca.is_some() || credentials.identity.is_some();
        let scheme = if secured { "https" } else { "http" };
        let url = if address.contains("://") { address.to_owned() } else { format!("{scheme}://{address}") };
        let secure = url.starts_with("https://");
        if secured && !secure {
            // What is meant for TLS alone, such as a token, is not to go without it.
            let reason =
                format!("certificates are for TLS, and {address} is an address without it: say https://");
            return Err(ClientError::Credentials { reason });
        }
        let endpoint = Endpoint::from_shared(url)
            .map_err(|_| ClientError::Address { address: address.to_owned() })?
            .connect_timeout(CONNECT_MAX)
            .tcp_keepalive(Some(KEEPALIVE))
            .tcp_nodelay(true);
        let secure = if secure { Some(credentials.connector()?) } else { None };
        Ok(Remote { address: address.to_owned(), endpoint, secure, bearer })
    }

    /// Connects once more.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`].
    pub(crate) async fn connect(&self) -> Result<Channel, ClientError> {
        let connected = match &self.secure {
            Some(connector) => self.endpoint.connect_with_connector(connector.clone()).await,
            None => self.endpoint.connect().await,
        };
        connected.map_err(|source| self.unreachable(source))
    }

    /// Waits for an answer that takes no computing.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`] after ten seconds; [`ClientError::Refused`].
    pub(crate) async fn answer<T>(
        &self,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, ClientError> {
        match tokio::time::timeout(ANSWER_MAX, call).await {
            Ok(answer) => Ok(answer?.into_inner()),
            Err(_) => {
                let reason = format!("it takes connections and has not answered for {ANSWER_MAX:?}");
                Err(self.unreachable(reason))
            }
        }
    }

    /// Connects once more, for who speaks HTTP/2 himself.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`].
    pub(crate) async fn stream(&self) -> Result<Box<dyn Stream>, ClientError> {
        let connected = tokio::time::timeout(CONNECT_MAX, async {
            Ok::<Box<dyn Stream>, io::Error>(match &self.secure {
                Some(connector) => Box::new(connector.clone().call(self.uri().clone()).await?.into_inner()),
                None => {
                    let host = self.uri().host().unwrap_or_default().trim_matches(['[', ']']);
                    let stream = TcpStream::connect((host, self.uri().port_u16().unwrap_or(80))).await?;
                    stream.set_nodelay(true)?;
                    Box::new(stream)
                }
            })
        });
        match connected.await {
            Ok(connected) => connected.map_err(|source| self.unreachable(source)),
            Err(late) => Err(self.unreachable(late)),
        }
    }

    /// The failure to speak with it.
    pub(crate) fn unreachable(
        &self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> ClientError {
        ClientError::Unreachable { address: self.address.clone(), source: source.into() }
    }

    /// Scheme and place of the server.
    pub(crate) fn uri(&self) -> &Uri {
        self.endpoint.uri()
    }

    /// What goes with each call.
    pub(crate) fn metadata(&self) -> MetadataMap {
        self.call(()).into_parts().0
    }

    /// A call with its token.
    pub(crate) fn call<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        if let Some(bearer) = &self.bearer {
            request.metadata_mut().insert("authorization", bearer.clone());
        }
        request
    }
}
