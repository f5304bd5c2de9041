//! `millrace scaler`: the external scaler of KEDA, until a signal stops it.

use std::time::Duration;

use anyhow::Result;
use millrace_serving::host::{Host, HostConfig};
use millrace_serving::{Limits, Tls};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::time::MissedTickBehavior;
use tonic::service::Routes;

use crate::cli::ScalerArgs;
use crate::context::Context;
use crate::failure::{Exit, fail};
use crate::ready;
use crate::scaler::measurements::Measurements;
use crate::scaler::service::Scaler;

/// Largest message of a request: the metadata of a trigger has at most 16 KiB.
const REQUEST_BYTES_MAX: usize = 64 << 10;
/// Most bytes of all requests in receipt.
const REQUESTS_BYTES_MAX: usize = 16 << 20;
/// Interval in milliseconds after which changed certificates and tokens are read again.
const RELOAD_MS: u64 = 30_000;
/// Interval at which a lost broker of this home is given up.
const RELEASE: Duration = Duration::from_secs(1);
/// How long calls may run after a signal.
const CLOSING: Duration = Duration::from_secs(2);

/// Runs the command.
pub(crate) async fn run(context: &Context, args: ScalerArgs) -> Result<()> {
    let tls = match (args.tls_cert, args.tls_key) {
        (Some(certificate), Some(key)) => Some(Tls { certificate, key, client_ca: args.tls_client_ca }),
        // Clap requires both or neither.
        _ => None,
    };
    let knows_clients = tls.as_ref().is_some_and(|tls| tls.client_ca.is_some()) || args.token_file.is_some();
    if !args.listen.ip().to_canonical().is_loopback() && !knows_clients {
        tracing::warn!(
            listen = %args.listen,
            "every client that reaches the scaler can read lags and queue times: let only KEDA connect, by a network \
             policy, --tls-client-ca or --token-file"
        );
    }
    let limits = Limits {
        message_bytes_max: REQUEST_BYTES_MAX,
        body_bytes_max: REQUESTS_BYTES_MAX,
        ..Limits::default()
    };
    let host = HostConfig {
        service: "scaler",
        health_name: "externalscaler.ExternalScaler",
        tls,
        tokens: args.token_file,
        reload_ms: RELOAD_MS,
        unread: Duration::from_millis(limits.stalled_ms_max),
        limits,
    };
    let host = Host::open(host).await?;
    let socket = match TcpListener::bind(args.listen).await {
        Ok(socket) => socket,
        Err(error) => {
            return fail(
                Exit::Unavailable,
                format!(
                    "scaler: cannot listen on {}: {error}; choose another address with --listen (port 0 takes a free one)",
                    args.listen
                ),
            );
        }
    };
    let address = socket.local_addr()?;
    let measurements = Measurements::new(context.clone(), context.volumes().await?)?;
    let settings = context.loaded.settings.clone();
    let scaler = Scaler::new(measurements.clone(), settings, host.callers(), context.stop.clone());
    let mut server = host.start(socket, Routes::new(scaler.server())).await?;
    context.out.table(
        &json!({ "grpc": address }),
        &[],
        [vec![format!("scaler ready at {address}, Ctrl-C stops it")]],
    )?;
    ready::notify_systemd();
    let mut ticks = tokio::time::interval(RELEASE);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = context.stop.cancelled() => break,
            failed = server.failed() => return Ok(failed?),
            _ = ticks.tick() => measurements.release_lost().await,
        }
    }
    server.leave().await;
    server.close(CLOSING).await;
    Ok(())
}
