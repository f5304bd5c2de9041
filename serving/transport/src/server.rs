//! The server: binds the three addresses, runs the transports, and drains on a stop request.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::header;
use axum::middleware::from_fn_with_state;
use axum::routing::get;
use futures::FutureExt;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic_health::ServingStatus;

use crate::access::AccessLogLayer;
use crate::bodies::Bodies;
use crate::connections::PeerAddrLayer;
use crate::connections::{Answers, Listener};
use crate::control::Controls;
use crate::grpc::{AuthLayer, DecodeLayer, Front};
use crate::logging::Logging;
use crate::rest::pages::{self, Pages};
use crate::shared_memory::SharedMemory;
use crate::tokens::{self, Guard, Tokens};
use crate::{grpc, reflection, rest, scrape, telemetry};
use millrace_serving_core::blocking::blocking;
use millrace_serving_core::config::{Config, Limits};
use millrace_serving_core::error::{Error, Result};
use millrace_serving_core::metrics;
use millrace_serving_core::reload::Reloaded;
use millrace_serving_core::tls::{Certificates, ServiceTls};
use millrace_serving_repository::infer::Inference;
use millrace_serving_repository::repository::{Repository, Source};

/// Full name of the inference service, for health checks.
const SERVICE_NAME: &str = "inference.GRPCInferenceService";
/// The media type of metrics.
const TEXT_FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";
/// Names in the health protocol: the service's own, and the empty one of the whole server.
const HEALTH_NAMES: [&str; 2] = ["", SERVICE_NAME];

/// The addresses on which a server listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    /// gRPC: inference, health and reflection.
    pub grpc: SocketAddr,
    /// REST.
    pub http: SocketAddr,
    /// Prometheus metrics at `/metrics`.
    pub metrics: SocketAddr,
}

/// A running server.
#[derive(Debug)]
pub struct Serving {
    addresses: Addresses,
    inference: Inference,
    task: tokio::task::JoinHandle<Result<()>>,
}

impl Serving {
    /// The addresses on which the server listens, with the real ports in place of 0.
    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// The models.
    pub fn repository(&self) -> &Repository {
        self.inference.repository()
    }

    /// The inference service, for pipes in the same process.
    pub fn inference(&self) -> &Inference {
        &self.inference
    }

    /// Waits until the server has stopped after its token was cancelled, or has failed. Not cancel safe:
    /// dropping the future leaves the server running.
    ///
    /// # Errors
    /// [`Error::Service`] if a transport failed.
    pub async fn join(self) -> Result<()> {
        match self.task.await {
            Ok(result) => result,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_) => Ok(()),
            },
        }
    }
}

/// Starts a server: binds the addresses, loads the models, then answers. Returns once every version that can
/// be loaded is ready and the addresses accept connections.
///
/// When `cancel` fires, the server reports that it is not ready, refuses new requests with UNAVAILABLE, and
/// finishes running ones for at most `drain_ms_max`. Then the listeners close and [`Serving::join`] returns.
///
/// # Errors
/// [`Error::Config`] for a limit of 0, an invalid origin, unusable certificates or tokens, and an invalid
/// collector; [`Error::Bind`] if the port is in use; the errors of [`Repository::open`]. After an error
/// nothing keeps running.
pub async fn serve(config: &Config, source: Source, cancel: CancellationToken) -> Result<Serving> {
    serve_with(config, source, Deps::default(), cancel).await
}

/// Parts of the host process that a server may use.
#[derive(Debug, Clone, Default)]
pub struct Deps {
    /// Switches the process's log; without it the logging calls are unimplemented.
    pub logging: Option<Arc<dyn Logging>>,
}

/// Like [`serve`], with parts of the host process.
///
/// # Errors
/// As [`serve`].
pub async fn serve_with(
    config: &Config,
    source: Source,
    deps: Deps,
    cancel: CancellationToken,
) -> Result<Serving> {
    config.limits.check()?;
    if config.realtime.is_some() {
        tracing::warn!(
            "[serving] realtime has no effect any more and will be refused by the next release: remove it"
        );
    }
    if config.trace_directory.is_some() {
        tracing::warn!(
            "[serving] trace_directory has no effect any more and will be refused by the next release: remove it, and \
             set [serving.telemetry] to send the spans of requests to an OpenTelemetry collector"
        );
    }
    let entrance = Security::open(config).await?;
    let grpc = bind(config.grpc, "gRPC", "grpc").await?;
    let http = bind(config.http, "REST", "http").await?;
    let scrape = bind(config.metrics, "metrics", "metrics").await?;
    let repository = Repository::open(source, config).await?;
    serve_on(config, Inference::new(repository), deps, entrance, [grpc, http, scrape], cancel)
}

/// The security of the server: certificates, tokens, and the collector of spans.
struct Security {
    certificates: Option<Arc<Reloaded<Certificates>>>,
    tokens: Option<Arc<Tokens>>,
    /// The collector for spans of admitted requests.
    telemetry: Option<telemetry::CheckedCollector>,
}

impl Security {
    async fn open(config: &Config) -> Result<Security> {
        let (tls, tokens, spans) = (config.tls.clone(), config.tokens.clone(), config.telemetry.clone());
        if tokens.is_some() && tls.is_none() && !config.is_local() {
            tracing::warn!(
                "clients send tokens over connections without TLS, which others may read: set [serving.tls]"
            );
        }
        let open = move || {
            Ok(Security {
                certificates: tls.as_ref().map(Certificates::open).transpose()?,
                tokens: tokens.as_deref().map(tokens::open).transpose()?,
                telemetry: spans.as_ref().map(telemetry::CheckedCollector::open).transpose()?,
            })
        };
        blocking("configuration", open).await
    }

    /// Watches the files for changes until cancelled.
    fn watch(&self, reload_ms: u64, cancel: &CancellationToken) {
        if let Some(certificates) = &self.certificates {
            tokio::spawn(certificates.clone().watch(reload_ms, cancel.clone()));
        }
        if let Some(tokens) = &self.tokens {
            tokio::spawn(tokens.clone().watch(reload_ms, cancel.clone()));
        }
    }
}

/// A service other than inference, behind the token check and the access log.
fn guarded<S>(
    service: S,
    guard: &Guard,
    limits: &Limits,
    bodies: &Bodies,
) -> AccessLogLayer<AuthLayer<DecodeLayer<S>>> {
    AccessLogLayer::new(AuthLayer::new(DecodeLayer::new(service, *limits, bodies.clone()), guard.clone()))
}

async fn bind(address: SocketAddr, service: &'static str, flag: &'static str) -> Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|error| Error::Bind {
        address,
        service,
        flag,
        reason: match error.kind() {
            std::io::ErrorKind::AddrInUse => "the port is taken by another process".into(),
            _ => error.to_string(),
        },
        is_taken: error.kind() == std::io::ErrorKind::AddrInUse,
    })
}

fn serve_on(
    config: &Config,
    inference: Inference,
    deps: Deps,
    mut entrance: Security,
    [grpc, http, scrape]: [TcpListener; 3],
    cancel: CancellationToken,
) -> Result<Serving> {
    let address = |listener: &TcpListener, service| {
        listener.local_addr().map_err(|error| Error::Service { service, reason: error.to_string() })
    };
    let addresses = Addresses {
        grpc: address(&grpc, "gRPC")?,
        http: address(&http, "REST")?,
        metrics: address(&scrape, "metrics")?,
    };
    let controls = Controls::new(inference.clone(), deps.logging);
    let limits = &config.limits;
    let memory = SharedMemory::new(config.shares_memory(), limits.message_bytes_max);
    let guard = Guard::new(entrance.tokens.clone());
    let bodies = Bodies::new(limits.body_bytes_max);
    let routes = rest::router(
        inference.clone(),
        controls.clone(),
        memory.clone(),
        guard.clone(),
        config,
        bodies.clone(),
    )?;
    let pages = Pages::new(&config.cors_origins, is_loopback(addresses.metrics))?;
    let exporting = entrance.telemetry.take().map(telemetry::CheckedCollector::start);
    let telemetry = exporting.as_ref().map(telemetry::ExportTask::telemetry);
    metrics::STARTS.inc();
    let (health, health_service) = tonic_health::server::health_reporter();
    for name in HEALTH_NAMES {
        // No other task holds the reporter yet, so this does not wait.
        let _ = health.set_service_status(name, ServingStatus::NotServing).now_or_never();
    }
    // Closes the inference listeners once the requests are drained; the metrics stay until `ending` fires.
    let closing = CancellationToken::new();
    let ending = CancellationToken::new();

    let mut transports = JoinSet::new();
    let inference_calls =
        grpc::service(inference.clone(), controls, memory, guard.clone(), limits, bodies.clone())
            .traced(telemetry.clone());
    let other_calls =
        Routes::new(AccessLogLayer::new(DecodeLayer::new(health_service, *limits, bodies.clone())))
            .add_service(guarded(reflection::v1()?, &guard, limits, &bodies))
            .add_service(guarded(reflection::v1alpha()?, &guard, limits, &bodies))
            .prepare();
    let calls = Front::new(inference_calls, other_calls);
    let securing =
        |of: fn(&Arc<Reloaded<Certificates>>) -> ServiceTls| entrance.certificates.as_ref().map(of);
    // The metrics listener does not share this quota, so scraping works under load.
    let answers = Answers::new(limits.answer_bytes_max);
    let grpc = Listener::grpc(grpc, "gRPC", limits).counted(&answers);
    transports.spawn(grpc.secured(securing(ServiceTls::grpc)).answer(calls, closing.clone()));
    let http = Listener::http(http, "REST", limits).counted(&answers).secured(securing(ServiceTls::http));
    transports.spawn(
        http.answer(AccessLogLayer::new(PeerAddrLayer::new(routes)).traced(telemetry), closing.clone()),
    );
    let mut scraping = JoinSet::new();
    let scrape = Listener::http(scrape, "metrics", limits);
    let models = Some(inference.repository().clone());
    scraping.spawn(scrape.answer(AccessLogLayer::new(scrape_routes(models, pages)), ending.clone()));

    entrance.watch(config.reload_ms, &ending);
    let polling = tokio::spawn({
        let (repository, cancel) = (inference.repository().clone(), cancel.clone());
        async move { repository.poll(cancel).await }
    });
    let drain = Duration::from_millis(config.drain_ms_max);
    let served = inference.clone();
    let task = tokio::spawn(async move {
        let ready = async {
            served.repository().became_ready().await;
            for name in HEALTH_NAMES {
                health.set_service_status(name, ServingStatus::Serving).await;
            }
            tracing::info!("the server is ready");
            std::future::pending::<()>().await;
        };
        let failed = tokio::select! {
            () = cancel.cancelled() => None,
            first = transports.join_next() => first,
            () = ready => None,
        };
        served.drain();
        for name in HEALTH_NAMES {
            health.set_service_status(name, ServingStatus::NotServing).await;
        }
        tracing::info!("the server accepts no more requests");
        if tokio::time::timeout(drain, served.idle()).await.is_err() {
            tracing::warn!(drain_ms_max = drain.as_millis() as u64, "closing while requests still run");
        }
        closing.cancel();
        let mut outcome = failed.map_or(Ok(()), ended);
        let finish = async {
            while let Some(next) = transports.join_next().await {
                outcome = std::mem::replace(&mut outcome, Ok(())).and(ended(next));
            }
        };
        // Idle connections that clients keep open do not delay the stop indefinitely.
        if tokio::time::timeout(drain.max(Duration::from_millis(100)), finish).await.is_err() {
            tracing::debug!("closed connections that clients kept open");
        }
        transports.shutdown().await;
        if let Some(exporting) = exporting {
            exporting.finish().await;
        }
        ending.cancel();
        scraping.shutdown().await;
        polling.abort();
        tracing::info!("the server has stopped");
        outcome
    });
    tracing::info!(
        grpc = %addresses.grpc, http = %addresses.http, metrics = %addresses.metrics,
        tls = config.tls.is_some(), tokens = config.tokens.is_some(),
        "serving models"
    );
    Ok(Serving { addresses, inference, task })
}

/// The result of a transport's task; a task that ended early has panicked or was aborted.
fn ended(transport: std::result::Result<(), tokio::task::JoinError>) -> Result<()> {
    transport.map_err(|error| Error::Service { service: "transport", reason: error.to_string() })
}

fn is_loopback(address: SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}

/// The metrics of the process and, on a model server, those of its models.
fn scrape_routes(models: Option<Repository>, pages: Arc<Pages>) -> PeerAddrLayer<Router> {
    let routes = Router::new().route("/metrics", get(scrape_metrics)).with_state(models);
    PeerAddrLayer::new(routes.layer(from_fn_with_state(pages, pages::answer)))
}

/// The metrics of the process over HTTP, at `/metrics`, without a model server.
#[derive(Debug)]
pub struct MetricsServer {
    address: SocketAddr,
    task: tokio::task::JoinHandle<()>,
}

impl MetricsServer {
    /// Answers until `cancel` fires or the value is dropped.
    ///
    /// # Errors
    /// [`Error::Bind`] if the port is in use.
    pub async fn start(address: SocketAddr, cancel: CancellationToken) -> Result<MetricsServer> {
        MetricsServer::start_with(address, cancel, || std::future::ready(metrics_text())).await
    }

    /// [`MetricsServer::start`] with another text, which each scrape asks for.
    ///
    /// # Errors
    /// As there.
    pub async fn start_with<F>(
        address: SocketAddr,
        cancel: CancellationToken,
        text: impl Fn() -> F + Clone + Send + Sync + 'static,
    ) -> Result<MetricsServer>
    where
        F: Future<Output = String> + Send + 'static,
    {
        let listener = bind(address, "metrics", "metrics").await?;
        let address = listener
            .local_addr()
            .map_err(|error| Error::Service { service: "metrics", reason: error.to_string() })?;
        let listener = Listener::http(listener, "metrics", &Limits::default());
        let pages = Pages::new(&[], is_loopback(address))?;
        let answer = move || {
            let text = text.clone();
            async move { ([(header::CONTENT_TYPE, TEXT_FORMAT)], text().await) }
        };
        let routes = Router::new().route("/metrics", get(answer));
        let routes = PeerAddrLayer::new(routes.layer(from_fn_with_state(pages, pages::answer)));
        let task = tokio::spawn(listener.answer(AccessLogLayer::new(routes), cancel));
        Ok(MetricsServer { address, task })
    }

    /// The address, with the real port in place of 0.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn scrape_metrics(State(models): State<Option<Repository>>) -> impl axum::response::IntoResponse {
    ([(header::CONTENT_TYPE, TEXT_FORMAT)], scrape::render(models.as_ref()))
}

/// The metrics of the process in the Prometheus text format.
pub fn metrics_text() -> String {
    scrape::render(None)
}
