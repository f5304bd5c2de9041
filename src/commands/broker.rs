//! `millrace broker`: the embedded broker alone, until it is told to stop.

use std::net::SocketAddr;

use anyhow::Result;
use millrace_streams::broker::{self, Broker};
use tokio_util::sync::CancellationToken;

use crate::context::Context;
use crate::home::Addresses;

/// Runs the command.
pub(crate) async fn run(context: &Context, listen: Option<SocketAddr>) -> Result<()> {
    let mut lock = context.home.lock("broker")?;
    let mut config = context.loaded.settings.streams.broker.clone();
    if let Some(listen) = listen {
        config.listen = listen;
    }
    let dir = broker::dir(context.home.root());
    let broker = Broker::start(config, &dir, CancellationToken::new()).await?;
    let address = broker.addr().to_string();
    lock.announce(Addresses { kafka: Some(address.clone()), ..Addresses::default() })?;
    context.out.table(
        &serde_json::json!({ "kafka": address }),
        &[],
        [vec![format!("broker ready at {address}, Ctrl-C stops it")]],
    )?;
    context.stop.cancelled().await;
    broker.stop().await?;
    Ok(())
}
