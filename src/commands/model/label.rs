//! `millrace model label`: sets, removes and shows labels of a model's versions.

use anyhow::Result;
use millrace_serving::config::{Target, check_label};

use super::rollout::Versions;
use crate::cli::LabelArgs;
use crate::failure::{Exit, fail, failure};
use crate::output::Output;

/// Sets or removes the label.
pub(super) fn change(versions: &mut Versions, args: &LabelArgs) -> Result<bool> {
    let label = &args.label;
    check_label(label).map_err(|reason| failure(Exit::Usage, reason))?;
    match args.version {
        Some(version) => {
            versions.check(version)?;
            versions.rollout.labels.insert(label.clone(), version);
        }
        None => {
            if !versions.rollout.labels.contains_key(label) {
                return versions.missing(&format!("label {label:?}"));
            }
            if let Some(user) = user(versions, label) {
                return fail(
                    Exit::Conflict,
                    format!(
                        "label {label:?} is in use by the {user} of model {:?}: change that first (millrace model {user})",
                        versions.model
                    ),
                );
            }
            versions.rollout.labels.remove(label);
        }
    }
    Ok(true)
}

/// The routing rule that uses the label, if any.
fn user(versions: &Versions, label: &str) -> Option<&'static str> {
    let named = |target: &Target| matches!(target, Target::Label(name) if name == label);
    if versions.rollout.split.keys().any(named) {
        return Some("split");
    }
    versions.rollout.shadow.as_ref().is_some_and(|shadow| named(&shadow.version)).then_some("shadow")
}

/// All labels of the model.
pub(super) fn show(out: Output, versions: &Versions) -> Result<()> {
    let Versions { model, rollout, .. } = versions;
    let rows = rollout.labels.iter().map(|(label, version)| vec![label.clone(), version.to_string()]);
    out.table(
        &serde_json::json!({ "model": model, "labels": rollout.labels }),
        &["label", &format!("version of {model}")],
        rows.collect::<Vec<_>>(),
    )
}
