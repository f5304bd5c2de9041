//! `millrace holder`: the process that keeps mounts while their servers come and go.

use anyhow::Result;
use millrace_datafs::mount::{Holder, HolderOptions, can_mount};

use crate::cli::HolderArgs;
use crate::context::Context;
use crate::failure::{Exit, failure};
use crate::ready;

/// Runs the command until a stop signal. Mounts that a process serves go on afterwards.
pub(crate) async fn run(context: &Context, args: &HolderArgs) -> Result<()> {
    if let Err(reason) = can_mount() {
        return Err(failure(Exit::Unavailable, format!("the holder cannot mount: {reason}")));
    }
    let options =
        HolderOptions { uid: args.allow_uid, below: args.allow_below.clone(), objects: args.objects.clone() };
    let socket = args.socket.clone();
    let holder = context.blocking(move || Ok(Holder::start(&socket, &options)?)).await?;
    // A holder with a current folder below a mount would keep that mount busy.
    super::mount::leave_folder(context)?;
    context.out.table(
        &serde_json::json!({ "socket": holder.socket(), "pid": std::process::id() }),
        &[],
        [vec![format!("holds mounts at unix://{}", holder.socket().display())]],
    )?;
    ready::notify_systemd();
    context.stop.cancelled().await;
    context
        .blocking(move || {
            drop(holder);
            Ok(())
        })
        .await
}
