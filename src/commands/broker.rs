//! `millrace broker`: the embedded broker alone, until a signal stops it.

use std::net::SocketAddr;

use anyhow::Result;
use millrace_home::Addresses;

use crate::context::Context;
use crate::shared_broker;

/// Runs the command.
pub(crate) async fn run(context: &Context, listen: Option<SocketAddr>) -> Result<()> {
    let mut lock = context.home.lock("broker")?;
    let mut config = context.loaded.settings.streams.broker.clone();
    if let Some(listen) = listen {
        config.listen = listen;
    }
    let broker = shared_broker::start_for_service(context, config).await?;
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
