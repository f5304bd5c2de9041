//! `millrace csi`: the driver of the Container Storage Interface on the volumes of this home.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use millrace_csi::{Metrics, NodeOptions, Options};
use millrace_datafs::Config;
use millrace_home::Home;
use millrace_serving::{Error, MetricsServer, metrics_text};

use crate::cli::{CsiArgs, CsiServices};
use crate::context::Context;
use crate::failure::{Exit, fail};
use crate::{metrics_address, output, ready};

/// Runs the command.
pub(crate) async fn run(context: &Context, args: CsiArgs) -> Result<()> {
    let node = match (args.services, args.node_id) {
        (CsiServices::Controller, _) => None,
        (_, None) => {
            return fail(Exit::Usage, "the node service needs the name of the node: pass --node-id NAME");
        }
        (_, Some(node_id)) => Some(NodeOptions {
            node_id,
            volumes_max: args.volumes_max,
            kubelet: args.kubelet_dir,
            // The running program, also after an upgrade has replaced its file.
            program: "/proc/self/exe".into(),
            holder: args.holder,
            log: Some(context.log.clone()),
        }),
    };
    let metrics = args.metrics.map(|address| (address, Metrics::new()));
    if let Some((address, metrics)) = &metrics {
        export(context, *address, metrics.clone()).await?;
    }
    let root = context.home.root();
    let options = Options {
        name: args.driver_name,
        endpoint: args.endpoint,
        registration: args.registration_socket,
        controller: args.services != CsiServices::Node,
        node,
        home: root.to_owned(),
        config: context.loaded.settings.datafs.clone(),
        state: args.state_dir.map_or_else(|| Ok(root.join("csi")), std::path::absolute)?,
        ready: args.ready_file,
        metrics: metrics.map(|(_, metrics)| metrics),
    };
    let out = context.out;
    let open = Box::new(move |root: &Path, config: &Config| {
        let home = Home::open(root.to_owned(), true, |text| out.note(text))?;
        Ok(home.volumes(config)?)
    });
    out.note(&format!("the driver {} serves at {}", options.name, options.endpoint.display()));
    ready::notify_systemd();
    Ok(millrace_csi::serve(options, open, context.stop.clone()).await?)
}

/// Serves metrics until the end of the command. The driver that this one replaces may have the address until it ends,
/// which is after this one has taken over its mounts: so this driver then serves without metrics until the address is
/// free. If it stays taken, the log says so again and again.
async fn export(context: &Context, address: SocketAddr, metrics: Metrics) -> Result<()> {
    let (out, stop) = (context.out, context.stop.clone());
    let ends = stop.clone();
    let attempt = move || {
        let metrics = metrics.clone();
        let text = move || {
            let metrics = metrics.clone();
            async move { metrics.text(metrics_text).await }
        };
        MetricsServer::start_with(address, ends.child_token(), text)
    };
    let started = match attempt().await {
        Err(Error::Bind { is_taken: true, .. }) => {
            tracing::warn!(%address, "another process has the metrics address; metrics are served once it is free");
            None
        }
        started => Some(started?),
    };
    tokio::spawn(async move {
        let server = match started {
            Some(server) => Ok(server),
            None => tokio::select! {
                taken = metrics_address::take(Duration::MAX, attempt) => taken,
                never = metrics_address::remind(metrics_address::REMINDERS, |waited| still_taken(address, waited)) =>
                    match never {},
                () = stop.cancelled() => return,
            },
        };
        match server {
            Ok(server) => {
                out.note(&format!("metrics at http://{}/metrics", server.address()));
                stop.cancelled().await;
            }
            Err(error) => {
                let error = output::one_line(&error.into());
                tracing::error!(error, "the driver goes on without metrics");
            }
        }
    });
    Ok(())
}

/// Logs that the metrics address has been taken for longer than a handover.
fn still_taken(address: SocketAddr, waited: Duration) {
    tracing::error!(
        %address, waited_s = waited.as_secs(),
        "the driver still serves no metrics, because another process has their address: end that process, or start the \
         driver with another --metrics"
    );
}
