//! `millrace model shadow`: sets, removes and shows the shadow version of a model. The server runs copies of
//! answered requests on it and compares the answers.

use anyhow::Result;
use millrace_serving::config::ShadowTarget;

use super::rollout::Versions;
use crate::cli::ShadowArgs;
use crate::output::Output;

/// Sets or removes the shadow in `versions`, which the caller writes back; false when the command only shows it.
pub(super) fn change(versions: &mut Versions, args: &ShadowArgs) -> Result<bool> {
    if args.remove {
        if versions.rollout.shadow.take().is_none() {
            return versions.missing("shadow");
        }
        return Ok(true);
    }
    // Clap requires both or neither.
    let Some((target, share)) = args.target.as_ref().zip(args.share) else { return Ok(false) };
    versions.check_target(target)?;
    versions.rollout.shadow = Some(ShadowTarget { version: target.clone(), share });
    Ok(true)
}

/// Shows the shadow, if there is one.
pub(super) fn show(out: Output, versions: &Versions) -> Result<()> {
    let model = &versions.model;
    let value = serde_json::json!({ "model": model, "shadow": versions.rollout.shadow });
    match &versions.rollout.shadow {
        None => {
            let text =
                format!("no shadow of {model}: no request is copied, unless millrace.toml sets a shadow");
            out.table(&value, &[], [vec![text]])
        }
        Some(shadow) => out.table(
            &value,
            &[&format!("shadow of {model}"), "share of the requests to others"],
            [vec![versions.shown(&shadow.version), format!("{:.2} %", shadow.share * 100.0)]],
        ),
    }
}
