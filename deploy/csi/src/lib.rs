//! The Container Storage Interface driver: volumes and snapshots of Millrace as PersistentVolumes of pods.
//!
//! [`serve`] answers three services on a unix socket, and the kubelet's registration on another one:
//!  - identity: name, version and capabilities;
//!  - controller: volumes and snapshots are made, listed and deleted in the metadata of a home. A snapshot of the
//!    cluster is a snapshot of the volume. A read-only claim on one *is* `volume@snapshot`, whatever its size; a
//!    writable one is a copy;
//!  - node: each target of the kubelet gets a `millrace mount` process of its own, which the driver keeps running.
//!
//! [`Metrics`] is one text with the metrics of the driver and of all servers of a node.
//!
//! Not here: the file system and its mount (`millrace-datafs`), the handover of a mount between processes (`millrace
//! holder`), and the sidecars that call the controller, which the Helm chart adds.
//!
//! Invariants:
//!  - each call may be repeated, and a crash at any line is mended by the repetition;
//!  - only what the driver has made is ever deleted by it: its records name all of that;
//!  - calls for one volume, snapshot or target exclude each other, on a node also those of two drivers;
//!  - secrets reach a mount's server in private files. They are in no command line, log, error or `Debug` text;
//!  - a secret is content of a tenant: it names no file of the node, and gets no credentials of the driver;
//!  - nothing is written to a target's folder while no volume is mounted there;
//!  - the caches of all tenants of a node together have one bound, and unused ones are removed.
//!
//! Bounds: messages of 1 MiB, 512 calls per connection, 1,000 entries per page, 64 keys of a secret, 8 open homes. Of the
//! controller's calls, 16 work on the driver's own home at a time, 2 on each home of a tenant and 32 on those together.
//! A tenant's home opens within 12 s, or its call fails. Identity waits for no other call.
//!
//! ```no_run
//! use millrace_csi::{Options, serve};
//! use millrace_datafs::{Config, Datafs};
//!
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! let options = Options::new("/run/csi.sock".into(), "/var/lib/millrace".into(), Config::default());
//! let open = Box::new(|root: &std::path::Path, config: &Config| Ok(Datafs::open(root, config)?));
//! serve(options, open, tokio_util::sync::CancellationToken::new()).await?;
//! # Ok(())
//! # }
//! ```

#![deny(unsafe_code)]

mod authority;
mod busy;
mod caches;
mod check;
mod controller;
mod error;
mod exposition;
mod homes;
mod identity;
mod keys;
mod limits;
mod metrics;
mod node;
mod proto;
mod provision;
mod publication;
mod refusal;
mod registration;
mod registry;
mod restore;
mod server_config;
mod servers;
mod socket;
mod target;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use millrace_datafs::Config;
use tokio::net::UnixListener;
use tokio::sync::Semaphore;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

use crate::authority::AnyAuthority;
use crate::busy::Busy;
use crate::caches::{Caches, IDLE_MAX, SWEEP_EVERY};
use crate::controller::ControllerService;
pub use crate::error::Error;
use crate::homes::Homes;
pub use crate::homes::OpenVolumes;
use crate::identity::IdentityService;
use crate::metrics::Counted;
pub use crate::metrics::{END as METRICS_END, Metrics};
use crate::node::NodeService;
use crate::proto::csi::controller_server::ControllerServer;
use crate::proto::csi::identity_server::IdentityServer;
use crate::proto::csi::node_server::NodeServer;
use crate::proto::registration::registration_server::RegistrationServer;
use crate::publication::Publications;
use crate::registration::RegistrationService;
use crate::servers::{Launch, Servers};
use crate::socket::Socket;

/// The name of the driver.
pub const NAME: &str = "csi.millrace.io";
/// Longest message of a caller, in bytes.
const MESSAGE_BYTES_MAX: usize = 1 << 20;
/// Most calls of one connection at the same time. The controller and the node service refuse calls long before, and
/// leave room for the identity.
const STREAMS_MAX: u32 = 512;
/// Most calls of the node service at the same time.
const NODE_CALLS_MAX: usize = 256;
/// Most mounts that are asked for their numbers at the same time; each takes a thread until it answers.
const LOOKS_MAX: usize = 64;
/// Most calls of one connection of the kubelet's registration at the same time.
const REGISTRATIONS_MAX: usize = 32;
/// Longest wait for running calls when the driver ends.
const DRAIN_MAX: Duration = Duration::from_secs(5);

/// What the driver serves, and where.
#[derive(Debug, Clone)]
pub struct Options {
    /// The name of the driver.
    pub name: String,
    /// The socket of the services.
    pub endpoint: PathBuf,
    /// The socket for the kubelet's registration.
    pub registration: Option<PathBuf>,
    /// Whether to serve the controller.
    pub controller: bool,
    /// The node service, if it is served.
    pub node: Option<NodeOptions>,
    /// The folder of the driver's own home.
    pub home: PathBuf,
    /// The configuration of that home; homes of tenants take its limits.
    pub config: Config,
    /// The folder for the state of published volumes and the homes of tenants.
    pub state: PathBuf,
    /// A file that exists while the services answer and the mounts of an earlier driver are taken over. A rollout
    /// that waits for it ends the old driver after the handover: the servers of mounts end with the driver's container.
    pub ready: Option<PathBuf>,
    /// The metrics of the driver, when they are exported. The servers of mounts then export theirs to the driver.
    pub metrics: Option<Metrics>,
}

/// How volumes are published on a node.
#[derive(Debug, Clone)]
pub struct NodeOptions {
    /// The name of the node.
    pub node_id: String,
    /// Most volumes on it; 0 for no limit.
    pub volumes_max: u32,
    /// The kubelet's folder, which all targets are below.
    pub kubelet: PathBuf,
    /// The `millrace` program that serves mounts.
    pub program: PathBuf,
    /// The socket of the holder of mounts, `unix:///PATH`; without it, each mount is supervised.
    pub holder: Option<String>,
    /// The log filter of the mounts' servers.
    pub log: Option<String>,
}

impl Options {
    /// The controller and the identity at a socket, with the volumes of a home.
    pub fn new(endpoint: PathBuf, home: PathBuf, config: Config) -> Options {
        Options {
            name: NAME.into(),
            endpoint,
            registration: None,
            controller: true,
            node: None,
            state: home.join("csi"),
            home,
            config,
            ready: None,
            metrics: None,
        }
    }

    fn check(&self) -> Result<(), Error> {
        let wrong = |reason: String| Err(Error::Invalid(reason));
        let is_name_character = |c: char| c.is_ascii_alphanumeric() || "-.".contains(c);
        if self.name.is_empty() || self.name.len() > 63 || !self.name.chars().all(is_name_character) {
            return wrong(format!("driver name {:?}: 1 to 63 of a-z A-Z 0-9 - .", self.name));
        }
        if !self.controller && self.node.is_none() {
            return wrong("neither the controller nor the node service is to be served: choose one".into());
        }
        if self.registration.is_some() && self.node.is_none() {
            return wrong("a registration socket is for the node service, which is not served".into());
        }
        if let Some(node) = &self.node {
            if node.node_id.is_empty() || node.node_id.len() > 192 {
                return wrong(format!("node id {:?}: 1 to 192 bytes", node.node_id));
            }
            if !node.kubelet.is_absolute() || node.kubelet == std::path::Path::new("/") {
                return wrong(format!("kubelet folder {}: an absolute path below /", node.kubelet.display()));
            }
        }
        Ok(())
    }
}

/// Serves the driver until `stop` is cancelled. Mounts of published volumes stay, for the next driver.
///
/// # Errors
/// [`Error`] when a socket, the state folder or the ready file cannot be used.
pub async fn serve(options: Options, open: Box<OpenVolumes>, stop: CancellationToken) -> Result<(), Error> {
    options.check()?;
    if let Some(ready) = &options.ready {
        remove_ready(ready).map_err(|source| Error::Ready { path: ready.clone(), source })?;
    }
    let state = |source| Error::State { path: options.state.clone(), source };
    millrace_leaf::private::create_dir_all(&options.state).map_err(state)?;
    let tenants = options.state.join("homes");
    let homes = Homes::new(options.home.clone(), options.config.clone(), tenants.clone(), open);
    let homes = Arc::new(homes);
    let publications = Publications::open(options.state.join("published")).map_err(state)?;
    let (caches, used) = (homes.caches().clone(), publications.clone());
    let node = match &options.node {
        None => None,
        Some(node) => {
            let launch = Launch {
                program: node.program.clone(),
                holder: node.holder.clone(),
                log: node.log.clone(),
                tenants,
                metrics: options.metrics.is_some(),
            };
            let servers = Servers::new(launch, publications, stop.child_token()).map_err(state)?;
            if let Some(metrics) = &options.metrics {
                let servers = Arc::clone(&servers);
                metrics.of(move || servers.sources());
            }
            Some(NodeService {
                node_id: node.node_id.clone(),
                volumes_max: node.volumes_max.into(),
                kubelet: node.kubelet.clone(),
                homes: Arc::clone(&homes),
                servers,
                calls: Arc::new(Semaphore::new(NODE_CALLS_MAX)),
                looks: Arc::new(Semaphore::new(LOOKS_MAX)),
                looking: Busy::default(),
            })
        }
    };
    let identity = IdentityService { name: options.name.clone(), has_controller: options.controller };
    let (_socket, listener) = listen(&options.endpoint)?;
    let (servers, ready) = (node.as_ref().map(|node| Arc::clone(&node.servers)), options.ready.clone());
    let sweeping = tokio::spawn(sweep(caches, used, stop.clone()));
    let recovery = tokio::spawn(async move {
        if let Some(servers) = servers {
            servers.recover().await;
        }
        if let Some(ready) = ready
            && let Err(error) = std::fs::write(&ready, "")
        {
            tracing::error!(path = %ready.display(), %error, "cannot write the ready file: the driver counts as not ready");
        }
    });
    let services = Server::builder()
        .max_concurrent_streams(STREAMS_MAX)
        .add_service(Counted(IdentityServer::new(identity).max_decoding_message_size(MESSAGE_BYTES_MAX)))
        .add_optional_service(options.controller.then(|| {
            let service = ControllerServer::new(ControllerService::new(homes));
            Counted(service.max_decoding_message_size(MESSAGE_BYTES_MAX))
        }))
        .add_optional_service(
            node.map(|node| Counted(NodeServer::new(node).max_decoding_message_size(MESSAGE_BYTES_MAX))),
        );
    let serving =
        services.serve_with_incoming_shutdown(connections(listener), stop.clone().cancelled_owned());
    // Registered once the services answer.
    let registering = register(&options, stop.clone());
    let both = async {
        tokio::try_join!(
            async {
                let failed = |source| Error::Serve { path: options.endpoint.clone(), source };
                let ended = serving.await.map_err(failed);
                stop.cancel();
                ended
            },
            registering
        )
    };
    let drained = async {
        stop.cancelled().await;
        tokio::time::sleep(DRAIN_MAX).await;
    };
    let ended = tokio::select! {
        ended = both => ended.map(drop),
        () = drained => {
            tracing::warn!("calls were still running when the driver ended");
            Ok(())
        }
    };
    sweeping.abort();
    recovery.abort();
    // Its end, so that the file is not written after its removal.
    recovery.await.ok();
    if let Some(ready) = &options.ready
        && let Err(error) = remove_ready(ready)
    {
        tracing::warn!(path = %ready.display(), %error, "cannot remove the ready file");
    }
    ended
}

/// Removes the caches of tenants without volumes on the node from time to time.
async fn sweep(caches: Caches, publications: Publications, stop: CancellationToken) {
    loop {
        let (of, used) = (caches.clone(), publications.clone());
        let folder = caches.folder().display();
        match tokio::task::spawn_blocking(move || of.sweep(&used, IDLE_MAX)).await {
            Ok(Ok(0)) => {}
            Ok(Ok(removed)) => {
                tracing::info!(%folder, removed, "caches of tenants without volumes on this node were removed");
            }
            Ok(Err(error)) => {
                tracing::warn!(%folder, %error, "cannot remove all unused caches of tenants; the next sweep tries again");
            }
            Err(error) => tracing::warn!(%folder, %error, "the removal of unused caches ended early"),
        }
        tokio::select! {
            () = tokio::time::sleep(SWEEP_EVERY) => {}
            () = stop.cancelled() => return,
        }
    }
}

fn remove_ready(path: &std::path::Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Serves the kubelet's registration.
async fn register(options: &Options, stop: CancellationToken) -> Result<(), Error> {
    let Some(path) = &options.registration else { return Ok(()) };
    let (_socket, listener) = listen(path)?;
    let service = RegistrationService {
        name: options.name.clone(),
        endpoint: options.endpoint.to_string_lossy().into_owned(),
    };
    let service = RegistrationServer::new(service).max_decoding_message_size(MESSAGE_BYTES_MAX);
    let ended = Server::builder()
        .concurrency_limit_per_connection(REGISTRATIONS_MAX)
        .add_service(service)
        .serve_with_incoming_shutdown(connections(listener), stop.cancelled_owned())
        .await;
    ended.map_err(|source| Error::Serve { path: path.clone(), source })
}

fn listen(path: &std::path::Path) -> Result<(Socket, UnixListener), Error> {
    Socket::listen(path).map_err(|source| Error::Listen { path: path.to_owned(), source })
}

fn connections(listener: UnixListener) -> impl tokio_stream::Stream<Item = io::Result<AnyAuthority>> {
    UnixListenerStream::new(listener).map(|accepted| accepted.map(AnyAuthority::new))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use millrace_datafs::Datafs;

    use super::*;

    #[tokio::test]
    async fn the_ready_file_exists_only_while_the_driver_serves() {
        let dir = tempfile::tempdir().unwrap();
        let (ready, endpoint) = (dir.path().join("ready"), dir.path().join("csi.sock"));
        std::fs::write(&ready, "of a driver that was killed").unwrap();
        let options = Options {
            ready: Some(ready.clone()),
            ..Options::new(endpoint.clone(), dir.path().join("home"), Config::default())
        };
        let open: Box<OpenVolumes> = Box::new(|root: &Path, config: &Config| Ok(Datafs::open(root, config)?));
        let stop = CancellationToken::new();
        let look = async {
            while !std::fs::read(&ready).is_ok_and(|text| text.is_empty()) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            tokio::net::UnixStream::connect(&endpoint).await.unwrap();
            stop.cancel();
        };
        let look = tokio::time::timeout(Duration::from_secs(30), look);
        let (served, looked) = tokio::join!(serve(options, open, stop.clone()), look);
        looked.unwrap();
        served.unwrap();
        assert!(!ready.exists());
    }
}
