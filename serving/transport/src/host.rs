//! gRPC server for services of other crates, with the model server's TLS, tokens, access log, health checks and bounds of
//! connections.
//!
//! It decides which callers may connect, and over which connections. The service itself bounds its answers.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::http::Extensions;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::access::AccessLogLayer;
use crate::bodies::Bodies;
use crate::connections::{Listener, PeerAddrLayer};
use crate::grpc::{AuthLayer, DecodeLayer};
use crate::tokens::{self, Caller, Guard, Tokens};
use millrace_serving_core::blocking::blocking;
use millrace_serving_core::config::{Limits, Tls};
use millrace_serving_core::error::{Error, InferError, Result};
use millrace_serving_core::reload::Reloaded;
use millrace_serving_core::tls::{Certificates, ServiceTls};

/// Settings of a host.
#[derive(Debug, Clone)]
pub struct HostConfig {
    /// Name of the service in metrics and the log.
    pub service: &'static str,
    /// Its name in health checks, beside the empty one of the whole server.
    pub health_name: &'static str,
    /// Certificates; without them connections have no TLS.
    pub tls: Option<Tls>,
    /// File of the bearer tokens, one of which every call must present, except health checks.
    pub tokens: Option<PathBuf>,
    /// Interval in milliseconds after which changed files are read again; 0 never reads them again.
    pub reload_ms: u64,
    /// Bounds of connections and requests; those of models have no meaning here.
    pub limits: Limits,
    /// Longest time for which a client may leave an answer unread.
    pub unread: Duration,
}

/// A host that has read its certificates and tokens.
#[derive(Debug)]
pub struct Host {
    config: HostConfig,
    certificates: Option<Arc<Reloaded<Certificates>>>,
    tokens: Option<Arc<Tokens>>,
}

/// The callers of a host.
#[derive(Debug, Clone)]
pub struct Callers(Guard);

/// The caller of one request.
#[derive(Debug, Clone)]
pub struct Reader(Caller);

impl Callers {
    /// The caller of a request, by its extensions.
    pub fn reader(&self, extensions: &Extensions) -> Reader {
        Reader(self.0.caller(extensions))
    }
}

impl Reader {
    /// Refuses a volume that the caller's token does not name, whether or not it exists.
    ///
    /// # Errors
    /// [`InferError::Denied`]; [`InferError::Unauthenticated`], also once the token was withdrawn.
    pub fn may_read(&self, volume: &str) -> Result<(), InferError> {
        self.0.may_read(volume)
    }
}

impl Host {
    /// Reads certificates and tokens.
    ///
    /// # Errors
    /// [`Error::Config`] with the file and its error.
    pub async fn open(config: HostConfig) -> Result<Host> {
        let (tls, tokens) = (config.tls.clone(), config.tokens.clone());
        let open = move || {
            let certificates = tls.as_ref().map(Certificates::open).transpose()?;
            Ok::<_, Error>((certificates, tokens.as_deref().map(tokens::open).transpose()?))
        };
        let (certificates, tokens) = blocking("configuration", open).await?;
        Ok(Host { config, certificates, tokens })
    }

    /// The callers, for the permissions of the service.
    pub fn callers(&self) -> Callers {
        Callers(Guard::new(self.tokens.clone()))
    }

    /// Answers calls of `routes` on a socket from now on.
    ///
    /// # Errors
    /// [`Error::Service`] for a socket without an address.
    pub async fn start(self, socket: TcpListener, routes: Routes) -> Result<HostServer> {
        let Host { config, certificates, tokens } = self;
        let failed =
            |error: std::io::Error| Error::Service { service: config.service, reason: error.to_string() };
        let address = socket.local_addr().map_err(failed)?;
        let (health, health_service) = tonic_health::server::health_reporter();
        for name in ["", config.health_name] {
            health.set_service_status(name, ServingStatus::Serving).await;
        }
        let limits = config.limits;
        let calls = PeerAddrLayer::new(routes.add_service(health_service).prepare());
        let calls = DecodeLayer::new(calls, limits, Bodies::new(limits.body_bytes_max));
        let calls = AccessLogLayer::new(AuthLayer::new(calls, Guard::new(tokens.clone())));
        let (closing, ending) = (CancellationToken::new(), CancellationToken::new());
        let listener = Listener::grpc(socket, config.service, &limits)
            .secured(certificates.as_ref().map(ServiceTls::grpc))
            .unread(config.unread);
        let transport = tokio::spawn(listener.answer(calls, closing.clone()));
        if let Some(certificates) = certificates {
            tokio::spawn(certificates.watch(config.reload_ms, ending.clone()));
        }
        if let Some(tokens) = tokens {
            tokio::spawn(tokens.watch(config.reload_ms, ending.clone()));
        }
        let health_name = config.health_name;
        Ok(HostServer { address, service: config.service, health, health_name, transport, closing, ending })
    }
}

/// A running host. Dropping it stops it at once.
pub struct HostServer {
    address: SocketAddr,
    service: &'static str,
    health: HealthReporter,
    health_name: &'static str,
    transport: JoinHandle<()>,
    closing: CancellationToken,
    /// Ends the watch over files.
    ending: CancellationToken,
}

impl HostServer {
    /// The address, with the real port in place of 0.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Tells health checks that the server takes no more calls.
    pub async fn leave(&self) {
        for name in ["", self.health_name] {
            self.health.set_service_status(name, ServingStatus::NotServing).await;
        }
    }

    /// Waits until the transport has failed, which it does only by a panic.
    ///
    /// # Errors
    /// [`Error::Service`].
    pub async fn failed(&mut self) -> Result<()> {
        let ended = (&mut self.transport).await;
        ended.map_err(|error| Error::Service { service: self.service, reason: error.to_string() })
    }

    /// Closes the socket, then the connections once their calls have ended, at the latest after `patience`.
    pub async fn close(mut self, patience: Duration) {
        self.closing.cancel();
        if tokio::time::timeout(patience, &mut self.transport).await.is_err() {
            tracing::debug!(service = self.service, "closed connections that clients kept open");
        }
    }
}

impl Drop for HostServer {
    fn drop(&mut self) {
        self.ending.cancel();
        self.transport.abort();
    }
}
