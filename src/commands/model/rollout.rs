//! `millrace model label`, `split` and `shadow`: version routing of a model, also in running servers. All
//! rules are in one file beside the versions, which a command reads, changes and writes as a whole.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context as _, Result};
use millrace_bundle::{FileBeside, ROLLOUT_FILE, scan_model};
use millrace_datafs::Name;
use millrace_serving::config::VOLUME_ROOT;
use millrace_serving::config::{Rollout, Target};
use object_store::ObjectStore;
use object_store::local::LocalFileSystem;

use super::{check_folder, label, shadow, split};
use crate::cli::RolloutCommand;
use crate::context::{Context, live};
use crate::failure::{Exit, fail, failure};
use crate::output::Output;

/// Largest rollout file.
const BYTES_MAX: u64 = 64 << 10;
/// Attempts at a change that conflicts with another process.
const TRIES_MAX: usize = 100;

/// A model's complete versions and its routing rules.
pub(super) struct Versions {
    pub(super) model: String,
    /// The complete versions.
    complete_versions: BTreeSet<u64>,
    pub(super) rollout: Rollout,
    /// The rollout file, if it exists.
    file: Option<FileBeside>,
}

/// Runs the command on a model in a volume.
pub(super) async fn in_volume(context: &Context, command: &RolloutCommand, volume: &Name) -> Result<()> {
    let datafs = context.volumes().await?;
    let spec = live(volume);
    let store = context.blocking(move || Ok(datafs.view(&spec)?.object_store())).await?;
    let versions =
        change(store.as_ref(), VOLUME_ROOT, command).await.with_context(|| format!("volume {volume}"))?;
    show(context.out, command, &versions)
}

/// Runs the command on a model in a folder, without a home.
pub(crate) async fn in_folder(out: Output, command: &RolloutCommand) -> Result<()> {
    // Clap requires a folder if no volume is given.
    let folder = command.place().models.as_deref().unwrap_or(Path::new("."));
    check_folder(folder)?;
    let store = LocalFileSystem::new_with_prefix(folder)?;
    // A folder cannot detect that a file has changed, so a lock admits one command at a time. A file system
    // without locks, as some network file systems, works without it.
    let alone = std::fs::File::open(folder).and_then(|folder| folder.lock().map(|()| folder));
    if let Err(error) = &alone {
        tracing::warn!(%error, folder = %folder.display(), "the folder cannot be locked against other commands");
    }
    let versions =
        change(&store, "", command).await.with_context(|| format!("folder {}", folder.display()))?;
    show(out, command, &versions)
}

/// Applies the command's change to the rollout file, unless the command only shows it. Retries on a conflict,
/// so concurrent changes are kept.
async fn change(store: &dyn ObjectStore, root: &str, command: &RolloutCommand) -> Result<Versions> {
    for _ in 0..TRIES_MAX {
        let mut versions = Versions::read(store, root, command.model()).await?;
        let changed = match command {
            RolloutCommand::Label(args) => label::change(&mut versions, args)?,
            RolloutCommand::Split(args) => split::change(&mut versions, args)?,
            RolloutCommand::Shadow(args) => shadow::change(&mut versions, args)?,
        };
        if !changed {
            return Ok(versions);
        }
        let Versions { model, rollout, file, .. } = &versions;
        rollout.check().map_err(|reason| failure(Exit::Usage, reason))?;
        let content = rollout.written().into();
        if millrace_bundle::replace_model_file(store, root, model, ROLLOUT_FILE, file.as_ref(), content)
            .await?
        {
            return Ok(versions);
        }
    }
    let model = command.model();
    fail(
        Exit::Conflict,
        format!(
            "cannot change {model}/{ROLLOUT_FILE}: other commands changed it during each of {TRIES_MAX} attempts; \
             try again"
        ),
    )
}

fn show(out: Output, command: &RolloutCommand, versions: &Versions) -> Result<()> {
    match command {
        RolloutCommand::Label(_) => label::show(out, versions),
        RolloutCommand::Split(_) => split::show(out, versions),
        RolloutCommand::Shadow(_) => shadow::show(out, versions),
    }
}

impl Versions {
    async fn read(store: &dyn ObjectStore, root: &str, model: &str) -> Result<Versions> {
        let listing = scan_model(store, root, model).await?;
        let complete = listing.complete.iter().map(|found| found.version);
        let complete_versions: BTreeSet<u64> =
            complete.chain(listing.plain.iter().map(|found| found.version)).collect();
        if complete_versions.is_empty() {
            return fail(Exit::NotFound, format!("there is no complete version of a model {model:?}"));
        }
        let read = millrace_bundle::read_model_file(store, root, model, ROLLOUT_FILE, BYTES_MAX).await;
        let file = match read {
            Ok(file) => Some(file),
            Err(millrace_bundle::Error::NotFound { .. }) => None,
            Err(error) => return Err(error.into()),
        };
        let rollout = file.as_ref().map_or(Ok(Rollout::default()), |file| Rollout::read(&file.content));
        let rollout = rollout.map_err(|reason| {
            failure(
                Exit::Corrupt,
                format!("{model}/{ROLLOUT_FILE} cannot be read: {reason} (correct or remove it)"),
            )
        })?;
        Ok(Versions { model: model.to_owned(), complete_versions, rollout, file })
    }

    /// Fails unless the version is complete.
    pub(super) fn check(&self, version: u64) -> Result<()> {
        if self.complete_versions.contains(&version) {
            return Ok(());
        }
        let Versions { model, complete_versions, .. } = self;
        fail(
            Exit::NotFound,
            format!("model {model:?} has no complete version {version}, it has {complete_versions:?}"),
        )
    }

    /// Fails unless the target is a complete version or a label of one.
    pub(super) fn check_target(&self, target: &Target) -> Result<()> {
        let model = &self.model;
        match target {
            Target::Version(version) => self.check(*version),
            Target::Label(label) => match self.rollout.labels.get(label) {
                Some(version) => self.check(*version).with_context(|| format!("label {label:?}")),
                None => fail(
                    Exit::NotFound,
                    format!(
                        "model {model:?} has no label {label:?} in {ROLLOUT_FILE}: give it to a version first \
                         (millrace model label {model} {label} VERSION)"
                    ),
                ),
            },
        }
    }

    /// Formats a target for people: a label with the version that it names.
    pub(super) fn shown(&self, target: &Target) -> String {
        let version = match target {
            Target::Version(_) => None,
            Target::Label(label) => self.rollout.labels.get(label),
        };
        version.map_or_else(|| target.to_string(), |version| format!("{target} (version {version})"))
    }

    /// The error for a missing rule.
    pub(super) fn missing<T>(&self, what: &str) -> Result<T> {
        fail(Exit::NotFound, format!("model {:?} has no {what} in {ROLLOUT_FILE}", self.model))
    }
}
