//! `millrace feed serve`: batches of snapshots over Arrow Flight, until a signal stops it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use millrace_serving::host::{Callers, Host, HostConfig};
use millrace_serving::{Limits, MetricsServer};
use millrace_streams::feed::flight::{self, Exposure, FlightFeeds, Permission};
use serde_json::json;
use tokio::net::TcpListener;
use tonic::Status;
use tonic::service::Routes;

use crate::cli::FeedServeArgs;
use crate::context::Context;
use crate::failure::{Exit, fail};
use crate::ready;
use crate::settings::FeedConfig;

/// Largest message of a request; requests have at most 256 KiB.
const REQUEST_BYTES_MAX: usize = 1 << 20;
/// Most bytes of all requests in receipt.
const REQUESTS_BYTES_MAX: usize = 64 << 20;
/// Schemes of Flight locations.
const SCHEMES: [&str; 3] = ["grpc", "grpc+tcp", "grpc+tls"];
/// How long connections may stay open once their streams have ended.
const CLOSING: Duration = Duration::from_secs(1);

pub(super) async fn run(context: &Context, args: FeedServeArgs) -> Result<()> {
    let config = configured(context, args)?;
    let mut exposed: Vec<_> = config.volumes.iter().cloned().map(Exposure::whole).collect();
    exposed.extend(config.datasets.iter().cloned());
    if exposed.is_empty() {
        return fail(
            Exit::Usage,
            "no dataset to serve: name --volume VOLUME or --dataset VOLUME:/PATH, or set volumes or datasets in [feed]",
        );
    }
    if let Some(dataset) = exposed.iter().find(|dataset| dataset.source.is_latest()) {
        return fail(
            Exit::Usage,
            format!(
                "feed serve: {dataset} is not one snapshot; name a snapshot, or leave @latest out for all of them"
            ),
        );
    }
    let limits = Limits {
        connections_max: config.limits.connections_max,
        message_bytes_max: REQUEST_BYTES_MAX,
        body_bytes_max: REQUESTS_BYTES_MAX,
        // The service bounds its batches itself.
        unsent_bytes_max: usize::MAX,
        answer_bytes_max: usize::MAX,
        ..Limits::default()
    };
    let host = HostConfig {
        service: "Flight",
        health_name: "arrow.flight.protocol.FlightService",
        tls: config.tls.clone(),
        tokens: config.tokens.clone(),
        reload_ms: config.reload_ms,
        limits,
        unread: Duration::from_millis(config.limits.unread_ms_max),
    };
    let host = Host::open(host).await?;
    let socket = match TcpListener::bind(config.grpc).await {
        Ok(socket) => socket,
        Err(error) => {
            return fail(
                Exit::Unavailable,
                format!(
                    "feed serve: cannot listen on {}: {error}; choose another address with --grpc or [feed] grpc (port 0 \
                     takes a free one)",
                    config.grpc
                ),
            );
        }
    };
    let address = socket.local_addr()?;
    let locations = locations(&config, address);
    let datafs = context.volumes().await?;
    let exposure = Exposure::new(exposed);
    let shown: Vec<String> = exposure.entries().iter().map(ToString::to_string).collect();
    let callers = host.callers();
    let callers: flight::Callers =
        Arc::new(move |extensions: &tonic::Extensions| permission(&callers, extensions));
    let feeds = FlightFeeds::new(datafs, exposure, locations.clone(), config.limits, callers)?;
    let metrics = match config.metrics {
        Some(address) => Some(MetricsServer::start(address, context.stop.child_token()).await?),
        None => None,
    };
    let mut server = host.start(socket, Routes::new(feeds.server())).await?;
    let metrics_at = metrics.as_ref().map(MetricsServer::address);
    let lines = [vec!["Flight".to_owned(), address.to_string()]]
        .into_iter()
        .chain(metrics_at.map(|at| vec!["metrics".to_owned(), format!("http://{at}/metrics")]))
        .chain(shown.iter().map(|dataset| vec!["dataset".to_owned(), dataset.clone()]));
    context.out.table(
        &json!({ "grpc": address, "metrics": metrics_at, "datasets": shown, "locations": locations }),
        &["service", "address"],
        lines,
    )?;
    ready::notify_systemd();
    context.out.text("ready, Ctrl-C drains and stops")?;

    tokio::select! {
        () = context.stop.cancelled() => {}
        failed = server.failed() => return Ok(failed?),
    }
    feeds.drain();
    server.leave().await;
    tracing::info!("the server accepts no more calls");
    let drain = Duration::from_millis(config.drain_ms_max);
    if tokio::time::timeout(drain, feeds.idle()).await.is_err() {
        tracing::info!(drain_ms_max = config.drain_ms_max, "ending streams that still run");
        feeds.end_streams();
    }
    server.close(CLOSING).await;
    Ok(())
}

/// The table `[feed]` with the flags over it, checked.
fn configured(context: &Context, args: FeedServeArgs) -> Result<FeedConfig> {
    let mut config = context.loaded.settings.feed.clone();
    if !args.volumes.is_empty() || !args.datasets.is_empty() {
        (config.volumes, config.datasets) = (args.volumes, args.datasets);
    }
    config.grpc = args.grpc.unwrap_or(config.grpc);
    config.metrics = args.metrics.or(config.metrics);
    config.advertise = args.advertise.or(config.advertise);
    if !args.peers.is_empty() {
        config.peers = args.peers;
    }
    config.limits.streams_max = args.streams.unwrap_or(config.limits.streams_max);
    config.limits.check()?;
    if let Some(tls) = &mut config.tls {
        let files = [Some(&mut tls.certificate), Some(&mut tls.key), tls.client_ca.as_mut()];
        for path in files.into_iter().flatten() {
            *path = context.loaded.resolve(path);
        }
    }
    config.tokens = config.tokens.map(|path| context.loaded.resolve(&path));
    for uri in config.advertise.iter().chain(&config.peers) {
        check_location(uri)?;
    }
    let is_local = config.grpc.ip().to_canonical().is_loopback();
    let knows_clients = config.tls.as_ref().is_some_and(|tls| tls.client_ca.is_some());
    if !is_local && config.tokens.is_none() && !knows_clients {
        return fail(
            Exit::Usage,
            format!(
                "feed serve: other machines reach {}, and every client could read the datasets: set tokens or \
                 tls.client_ca in [feed], or listen on 127.0.0.1",
                config.grpc
            ),
        );
    }
    if !is_local && config.tokens.is_some() && config.tls.is_none() {
        tracing::warn!(
            "clients send tokens over connections without TLS, which others may read: set [feed.tls]"
        );
    }
    Ok(config)
}

pub(crate) fn check_location(uri: &str) -> Result<()> {
    let parts = uri.split_once("://").filter(|(scheme, _)| SCHEMES.contains(scheme));
    let has_port = |place: &str| {
        let port = place.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port);
        port.is_some_and(|port| port.parse::<u16>().is_ok_and(|port| port > 0))
    };
    match parts {
        Some((_, place)) if has_port(place) && !place.contains(['/', '?', '#', '@']) => Ok(()),
        _ => fail(
            Exit::Usage,
            format!(
                "feed serve: {uri:?} is no location of a Flight server; write grpc://HOST:PORT, or grpc+tls://HOST:PORT \
                 for one with TLS"
            ),
        ),
    }
}

/// The URIs of all servers, this one first. Without a URI of its own, clients stay on the connection that they have.
fn locations(config: &FeedConfig, address: SocketAddr) -> Vec<String> {
    let scheme = if config.tls.is_some() { "grpc+tls" } else { "grpc" };
    let mut locations = vec![match &config.advertise {
        Some(uri) => uri.clone(),
        None if address.ip().is_unspecified() => flight::SAME_CONNECTION.to_owned(),
        None => format!("{scheme}://{address}"),
    }];
    for peer in &config.peers {
        if !locations.contains(peer) {
            locations.push(peer.clone());
        }
    }
    locations
}

/// The permission of the caller of a request.
fn permission(callers: &Callers, extensions: &tonic::Extensions) -> Permission {
    let reader = callers.reader(extensions);
    Arc::new(move |volume: &str| reader.may_read(volume).map_err(Status::from))
}
