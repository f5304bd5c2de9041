//! `millrace snapshot create|list|delete`: snapshots of volumes.

use anyhow::Result;
use millrace_datafs::{Name, SnapshotInfo, VolumeSpec};

use crate::cli::SnapshotCommand;
use crate::context::Context;
use crate::failure::{Exit, fail};
use crate::output::time;

/// Runs the command.
pub(crate) fn run(context: &Context, command: SnapshotCommand) -> Result<()> {
    let datafs = context.datafs()?;
    match command {
        SnapshotCommand::Create { spec } => {
            let (volume, name) = volume_and_snapshot(spec)?;
            show(context, &[datafs.snapshot_create(&volume, &name)?])
        }
        SnapshotCommand::List { volume } => show(context, &datafs.snapshot_list(&volume)?),
        SnapshotCommand::Delete { spec } => {
            let (volume, name) = volume_and_snapshot(spec)?;
            datafs.snapshot_delete(&volume, &name)?;
            context.out.table(
                &serde_json::json!({ "deleted": format!("{volume}@{name}") }),
                &[],
                [vec![format!("snapshot {volume}@{name} is deleted")]],
            )
        }
    }
}

fn volume_and_snapshot(spec: VolumeSpec) -> Result<(Name, Name)> {
    match spec.snapshot {
        Some(name) => Ok((spec.volume, name)),
        None => fail(Exit::Usage, format!("name the snapshot: {}@NAME", spec.volume)),
    }
}

/// Shows snapshots as a table or as JSON.
pub(crate) fn show(context: &Context, snapshots: &[SnapshotInfo]) -> Result<()> {
    context.out.table(
        &snapshots,
        &["snapshot", "created (UTC)"],
        snapshots.iter().map(|snapshot| {
            vec![format!("{}@{}", snapshot.volume, snapshot.name), time(snapshot.created_at)]
        }),
    )
}
