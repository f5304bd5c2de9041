//! `millrace model split`: sets, removes and shows the split of requests that name no version.

use std::collections::BTreeMap;

use anyhow::Result;

use super::rollout::Versions;
use crate::cli::SplitArgs;
use crate::failure::{Exit, fail};
use crate::output::Output;

/// Sets or removes the split; false when the command only shows it.
pub(super) fn change(versions: &mut Versions, args: &SplitArgs) -> Result<bool> {
    if args.remove {
        if versions.rollout.split.is_empty() {
            return versions.missing("split");
        }
        versions.rollout.split.clear();
        return Ok(true);
    }
    if args.weights.is_empty() {
        return Ok(false);
    }
    let mut split = BTreeMap::new();
    for (target, weight) in &args.weights {
        versions.check_target(target)?;
        if split.insert(target.clone(), *weight).is_some() {
            return fail(Exit::Usage, format!("{target} is named twice: give it one weight"));
        }
    }
    versions.rollout.split = split;
    Ok(true)
}

/// Shows the weights and the resulting shares.
pub(super) fn show(out: Output, versions: &Versions) -> Result<()> {
    let split = &versions.rollout.split;
    let model = &versions.model;
    let value = serde_json::json!({ "model": model, "split": split });
    if split.is_empty() {
        let text = format!(
            "no split of {model}: requests without a version go to the newest one, unless millrace.toml sets a split"
        );
        return out.table(&value, &[], [vec![text]]);
    }
    let total: f64 = split.values().sum();
    let rows = split.iter().map(|(target, weight)| {
        vec![versions.shown(target), weight.to_string(), format!("{:.2} %", weight / total * 100.0)]
    });
    out.table(&value, &[&format!("version of {model}"), "weight", "share"], rows.collect::<Vec<_>>())
}
