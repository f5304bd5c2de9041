//! A server as clients reach it: its address and the credentials, read once for any number of connections.

use std::io;
use std::time::Duration;

use millrace_leaf::discovery;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tonic::codegen::Service as _;
use tonic::codegen::http::Uri;
use tonic::metadata::{Ascii, MetadataMap, MetadataValue};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Response, Status};

use super::credentials::{Connector, Credentials};
use super::{ClientError, hints};

/// Longest time to connect.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// Longest wait for an answer that needs no inference.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// TCP keepalive interval; detects a dead peer after a few intervals.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// A byte stream to a server, encrypted for `https`.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// A server's address with the client's credentials.
#[derive(Debug, Clone)]
pub(crate) struct Remote {
    address: String,
    endpoint: Endpoint,
    /// For `https` addresses.
    secure: Option<Connector>,
    bearer: Option<MetadataValue<Ascii>>,
}

impl Remote {
    /// Reads the files of the credentials; does not connect yet.
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
            // Credentials for TLS, such as a token, must not be sent without it.
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

    /// The server of an address. Of the servers that SRV records name, the first one in their order that accepts a
    /// connection.
    ///
    /// # Errors
    /// As [`Remote::new`]; those of the last server when none of several accepts a connection.
    pub(crate) async fn find(address: &str, credentials: &Credentials) -> Result<Remote, ClientError> {
        if !discovery::is_service(address) {
            return Remote::new(address, credentials);
        }
        let unreachable = |source: Box<dyn std::error::Error + Send + Sync>| ClientError::Unreachable {
            address: address.to_owned(),
            source,
        };
        let name = address.to_owned();
        let servers = tokio::task::spawn_blocking(move || discovery::servers(&name))
            .await
            .map_err(|error| unreachable(error.into()))?
            .map_err(|error| unreachable(error.into()))?;
        let mut last = None;
        for server in servers {
            let remote = Remote::new(&server, credentials)?;
            match remote.connect().await {
                Ok(_) => return Ok(remote),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| ClientError::Address { address: address.to_owned() }))
    }

    /// Opens another connection.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`], [`ClientError::Tls`].
    pub(crate) async fn connect(&self) -> Result<Channel, ClientError> {
        let connected = match &self.secure {
            Some(connector) => self.endpoint.connect_with_connector(connector.clone()).await,
            None => self.endpoint.connect().await,
        };
        match connected {
            Ok(channel) => Ok(channel),
            Err(source) => Err(match (self.unreachable(source), self.needs_tls().await) {
                (ClientError::Unreachable { address, .. }, Some(reason)) => {
                    ClientError::Tls { address, reason }
                }
                (error, _) => error,
            }),
        }
    }

    /// Waits for an answer that needs no inference.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`] after ten seconds; [`ClientError::Tls`], [`ClientError::Refused`].
    pub(crate) async fn answer<T>(
        &self,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, ClientError> {
        match tokio::time::timeout(ANSWER_MAX, call).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => Err(self.explained(status).await),
            Err(_) => {
                let reason = format!("it takes connections and has not answered for {ANSWER_MAX:?}");
                Err(self.unreachable(reason))
            }
        }
    }

    /// Opens another connection, for callers that speak HTTP/2 themselves.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`].
    pub(crate) async fn stream(&self) -> Result<Box<dyn Stream>, ClientError> {
        let connected = tokio::time::timeout(CONNECT_MAX, async {
            Ok::<Box<dyn Stream>, io::Error>(match &self.secure {
                Some(connector) => Box::new(connector.clone().call(self.uri().clone()).await?.into_inner()),
                None => {
                    let stream =
                        TcpStream::connect((self.host(), self.uri().port_u16().unwrap_or(80))).await?;
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

    /// The error for a failure to communicate with the server.
    pub(crate) fn unreachable(
        &self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> ClientError {
        let (address, source) = (self.address.clone(), source.into());
        match hints::of_failure(source.as_ref(), self.host()) {
            Some(reason) => ClientError::Tls { address, reason },
            None => ClientError::Unreachable { address, source },
        }
    }

    /// The error of a call. A connection error may come from TLS on one side only. Some servers refuse the
    /// client's certificate only in the first answer.
    async fn explained(&self, status: Status) -> ClientError {
        // The server itself has answered.
        let Some(source) = std::error::Error::source(&status) else { return status.into() };
        let reason = match hints::of_failure(source, self.host()) {
            Some(reason) => Some(reason),
            None => self.needs_tls().await,
        };
        match reason {
            Some(reason) => ClientError::Tls { address: self.address.clone(), reason },
            None => status.into(),
        }
    }

    /// The hint for a client without TLS and a server with it.
    async fn needs_tls(&self) -> Option<String> {
        let is_wrong = self.secure.is_none()
            && hints::speaks_tls(self.host(), self.uri().port_u16().unwrap_or(80)).await;
        is_wrong.then(|| {
            "it takes connections with TLS alone: say https://, and name the PEM file of its authority with --ca where \
             the system does not trust it"
                .to_owned()
        })
    }

    fn host(&self) -> &str {
        self.uri().host().unwrap_or_default().trim_matches(['[', ']'])
    }

    /// Scheme and address of the server.
    pub(crate) fn uri(&self) -> &Uri {
        self.endpoint.uri()
    }

    /// The metadata of each call.
    pub(crate) fn metadata(&self) -> MetadataMap {
        self.call(()).into_parts().0
    }

    /// A call with the token.
    pub(crate) fn call<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        if let Some(bearer) = &self.bearer {
            request.metadata_mut().insert("authorization", bearer.clone());
        }
        request
    }
}
