//! `millrace model label`: which version of a model a label names, also for servers that run.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context as _, Result};
use millrace_bundle::{ROLLOUT_FILE, scan_model};
use millrace_datafs::Name;
use millrace_serving::config::VOLUME_ROOT;
use millrace_serving::repository::{Rollout, check_label};
use object_store::ObjectStore;
use object_store::local::LocalFileSystem;

use crate::cli::LabelArgs;
use crate::context::{Context, live};
use crate::failure::{Exit, fail, failure};
use crate::output::Output;

/// Largest file that is read.
const BYTES_MAX: u64 = 64 << 10;

/// Moves a label of a model in a volume.
pub(super) async fn in_volume(context: &Context, args: &LabelArgs, volume: &Name) -> Result<()> {
    let datafs = context.datafs()?;
    let spec = live(volume);
    let store = context.blocking(move || Ok(datafs.view(&spec)?.object_store())).await?;
    let rollout =
        change(store.as_ref(), VOLUME_ROOT, args).await.with_context(|| format!("volume {volume}"))?;
    show(context.out, args, &rollout)
}

/// Moves a label of a model in a folder.
pub(crate) async fn in_folder(out: Output, args: &LabelArgs) -> Result<()> {
    // Clap requires one where there is no volume.
    let folder = args.models.as_deref().unwrap_or(Path::new("."));
    if !folder.is_dir() {
        return fail(Exit::NotFound, format!("there is no folder {}", folder.display()));
    }
    let store = LocalFileSystem::new_with_prefix(folder)?;
    let rollout = change(&store, "", args).await.with_context(|| format!("folder {}", folder.display()))?;
    show(out, args, &rollout)
}

/// Writes what is to be, of the versions that are there.
async fn change(store: &dyn ObjectStore, root: &str, args: &LabelArgs) -> Result<Rollout> {
    let LabelArgs { model, label, version, .. } = args;
    check_label(label).map_err(|reason| failure(Exit::Usage, reason))?;
    let listing = scan_model(store, root, model).await?;
    let complete = listing.complete.iter().map(|found| found.version);
    let there: BTreeSet<u64> = complete.chain(listing.plain.iter().map(|found| found.version)).collect();
    if there.is_empty() {
        return fail(Exit::NotFound, format!("there is no complete version of a model {model:?}"));
    }
    let read = millrace_bundle::read_beside(store, root, model, ROLLOUT_FILE, BYTES_MAX).await;
    let mut rollout = match read {
        Ok(content) => Rollout::read(&content).map_err(|reason| {
            failure(
                Exit::Corrupt,
                format!("{model}/{ROLLOUT_FILE} cannot be read: {reason} (mend or remove it)"),
            )
        })?,
        Err(millrace_bundle::Error::NotFound { .. }) => Rollout::default(),
        Err(error) => return Err(error.into()),
    };
    match version {
        Some(version) if there.contains(version) => {
            rollout.labels.insert(label.clone(), *version);
        }
        Some(version) => {
            return fail(
                Exit::NotFound,
                format!("model {model:?} has no complete version {version}, it has {there:?}"),
            );
        }
        None if rollout.labels.remove(label).is_none() => {
            return fail(Exit::NotFound, format!("model {model:?} has no label {label:?} in {ROLLOUT_FILE}"));
        }
        None => {}
    }
    rollout.check().map_err(|reason| failure(Exit::Usage, reason))?;
    millrace_bundle::write_beside(store, root, model, ROLLOUT_FILE, rollout.written().into()).await?;
    Ok(rollout)
}

fn show(out: Output, args: &LabelArgs, rollout: &Rollout) -> Result<()> {
    let rows = rollout.labels.iter().map(|(label, version)| vec![label.clone(), version.to_string()]);
    out.table(
        &serde_json::json!({ "model": args.model, "labels": rollout.labels }),
        &["label", &format!("version of {}", args.model)],
        rows.collect::<Vec<_>>(),
    )
}
