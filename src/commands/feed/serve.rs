//! `millrace feed serve`: batches of snapshots over Arrow Flight, until a signal stops it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use millrace_datafs::{Datafs, View, VolumeSpec};
use millrace_serving::host::{Callers, Host, HostConfig};
use millrace_serving::{Limits, MetricsServer};
use millrace_streams::dataset::DatasetSpec;
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
    let (of_check, to_check) = (datafs.clone(), exposed.clone());
    let check = move || {
        to_check.iter().for_each(|dataset| warn_of_missing(&of_check, dataset));
        Ok(())
    };
    context.run_abandonable(check).await?;
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

/// Warns of a dataset that clients cannot read, since it does not exist. It may be created later.
fn warn_of_missing(datafs: &Datafs, dataset: &DatasetSpec) {
    if let Some(missing) = missing(datafs, dataset) {
        tracing::warn!(
            %dataset,
            missing,
            "clients cannot read a dataset until it exists: correct --volume, --dataset or [feed], or create it"
        );
    }
}

/// What of a dataset does not exist, if anything. Without a snapshot in its name, its path may exist in the live volume or
/// in the newest snapshot. Other errors are left to the calls of clients. Blocks on metadata.
fn missing(datafs: &Datafs, dataset: &DatasetSpec) -> Option<String> {
    let DatasetSpec { source, path, .. } = dataset;
    let volume = &source.volume;
    let live = match datafs.view(&VolumeSpec::live(volume.clone())) {
        Ok(live) => live,
        Err(error) => return error.is_not_found().then(|| format!("volume {volume} does not exist")),
    };
    let has_path = |view: &View| !view.stat(path).is_err_and(|error| error.is_not_found());
    if source.snapshot.is_some() {
        return match datafs.view(source) {
            Ok(view) => (!has_path(&view)).then(|| format!("{path} does not exist in snapshot {source}")),
            Err(error) => error.is_not_found().then(|| format!("snapshot {source} does not exist")),
        };
    }
    let newest = VolumeSpec { snapshot: VolumeSpec::LATEST.parse().ok(), ..source.clone() };
    let newest = match datafs.resolve(&newest).and_then(|(newest, _)| datafs.view(&newest)) {
        Ok(newest) => newest,
        Err(error) => return error.is_not_found().then(|| format!("volume {volume} has no snapshot")),
    };
    (!has_path(&newest) && !has_path(&live))
        .then(|| format!("{path} does not exist in volume {volume}, nor in its newest snapshot"))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datasets_that_do_not_exist_are_found_with_what_is_missing() {
        let home = tempfile::tempdir().unwrap();
        let datafs = Datafs::open(home.path(), &millrace_datafs::Config::default()).unwrap();
        let told = |dataset: &str| missing(&datafs, &dataset.parse().unwrap());
        assert_eq!(told("v:/train").unwrap(), "volume v does not exist");
        datafs.volume_create(&"v".parse().unwrap()).unwrap();
        assert_eq!(told("v:/").unwrap(), "volume v has no snapshot");
        let live = datafs.view(&"v".parse().unwrap()).unwrap();
        live.create_dir_all("/train").unwrap();
        datafs.snapshot_create(&"v".parse().unwrap(), &"s".parse().unwrap()).unwrap();
        assert_eq!(told("v@t:/train").unwrap(), "snapshot v@t does not exist");
        assert_eq!(told("v@s:/trian").unwrap(), "/trian does not exist in snapshot v@s");
        assert_eq!(
            told("v:/trian").unwrap(),
            "/trian does not exist in volume v, nor in its newest snapshot"
        );
        live.create_dir_all("/later").unwrap();
        for dataset in ["v:/", "v:/train", "v@s:/train", "v@s:/", "v:/later"] {
            assert_eq!(told(dataset), None, "{dataset}");
        }
    }
}
