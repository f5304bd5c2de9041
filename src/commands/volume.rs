//! `millrace volume create|list|show|set-key|delete`: the volumes of a home.

use anyhow::Result;
use millrace_datafs::{VolumeInfo, VolumeList, VolumeOptions};

use crate::cli::VolumeCommand;
use crate::context::Context;
use crate::failure::{Exit, fail};
use crate::output::{bytes, count, time};

/// Runs the command.
pub(crate) fn run(context: &Context, command: VolumeCommand) -> Result<()> {
    let datafs = context.datafs()?;
    match command {
        VolumeCommand::Create { name, compression, encrypt } => {
            let options = VolumeOptions { compression, encryption_key: encrypt };
            let info = datafs.volume_create_with(&name, &options)?;
            show(context, &[info])
        }
        VolumeCommand::List => list(context, &datafs.volume_list()?),
        VolumeCommand::Show { name } => {
            let info = datafs.volume_show(&name)?;
            let snapshots = datafs.snapshot_list(&name)?;
            if context.out.is_json() {
                return context.out.object(&serde_json::json!({ "volume": info, "snapshots": snapshots }));
            }
            show(context, &[info])?;
            super::snapshot::show(context, &snapshots)
        }
        VolumeCommand::SetKey { name, key } => {
            datafs.volume_set_key(&name, &key)?;
            show(context, &[datafs.volume_show(&name)?])
        }
        VolumeCommand::Delete { name, yes } => {
            if !yes {
                let held = datafs.volume_show(&name)?.usage.map_or(0, |usage| usage.bytes);
                return fail(
                    Exit::Usage,
                    format!(
                        "volume {name} holds {} and all of its snapshots: add --yes to delete it for good",
                        bytes(held)
                    ),
                );
            }
            datafs.volume_delete(&name)?;
            context.out.table(
                &serde_json::json!({ "deleted": name }),
                &[],
                [vec![format!("volume {name} is deleted")]],
            )
        }
    }
}

/// Shows the readable volumes, then fails if some are damaged.
fn list(context: &Context, list: &VolumeList) -> Result<()> {
    show(context, &list.volumes)?;
    if list.damaged.is_empty() {
        return Ok(());
    }
    let damaged: Vec<_> =
        list.damaged.iter().map(|(name, error)| format!("volume {name:?} cannot be read: {error}")).collect();
    fail(Exit::Corrupt, format!("{}; `millrace fsck` reports what can be repaired", damaged.join("; ")))
}

fn show(context: &Context, volumes: &[VolumeInfo]) -> Result<()> {
    // Only `volume show` counts a volume's files.
    let is_counted = volumes.iter().any(|volume| volume.usage.is_some());
    let usage: &[&str] = if is_counted { &["files", "bytes"] } else { &[] };
    let headers = [&["volume"], usage, &["snapshots", "compression", "key", "created (UTC)"]].concat();
    context.out.table(
        &volumes,
        &headers,
        volumes.iter().map(|volume| {
            let mut row = vec![volume.name.to_string()];
            if let Some(usage) = &volume.usage {
                row.extend([count(usage.files), bytes(usage.bytes)]);
            }
            row.extend([
                count(volume.snapshots),
                volume.compression.to_string(),
                volume.encryption_key.clone().unwrap_or_else(|| "-".to_owned()),
                time(volume.created_at),
            ]);
            row
        }),
    )
}
