//! `millrace cp`: copies files and folders between this machine, volumes and buckets.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use millrace_datafs::{CopyOptions, Datafs, Endpoint, VolumeSpec};

use crate::cli::CopyArgs;
use crate::context::Context;
use crate::failure::{Exit, fail, failure};
use crate::output::{bytes, count};

/// Runs the command.
pub(crate) fn run(context: &Context, args: &CopyArgs) -> Result<()> {
    let datafs = context.datafs()?;
    let (from, to) = (endpoint(&datafs, &args.from)?, endpoint(&datafs, &args.to)?);
    if let Endpoint::Volume(view, path) = &to
        && view.is_snapshot()
    {
        let (spec, volume) = (view.spec(), &view.spec().volume);
        let message = format!(
            "cannot copy to {}: {spec} is a snapshot, which never changes; copy to the volume, {volume}:{}, and take \
             another snapshot",
            args.to,
            path.display()
        );
        return fail(Exit::Usage, message);
    }
    let options = CopyOptions { recursive: args.recursive, parallel: usize::from(args.parallel) };
    let bar = context.out.progress("copying", "files", Some(0));
    let report = datafs.copy(&from, &to, &options, &|progress| {
        bar.set_length(progress.found);
        bar.set_position(progress.done);
        bar.set_message(format!("copying {}", bytes(progress.bytes)));
        !context.stop.is_cancelled()
    });
    bar.finish_and_clear();
    context.interrupted("the copy")?;
    let report = report?;
    let row = |name: &str, value: String| vec![name.to_owned(), value];
    let mut rows = vec![
        row("files", format!("{} ({})", count(report.files), bytes(report.bytes))),
        row("there already", count(report.unchanged)),
        row("folders", count(report.folders)),
        row("links", count(report.links)),
    ];
    if report.left_out > 0 {
        rows.push(row("left out", format!("{} that cannot be copied", count(report.left_out))));
    }
    context.out.table(&report, &["copied", ""], rows)?;
    for (path, reason) in &report.failed {
        context.out.note(&format!("{}: {reason}", if path.is_empty() { &args.from } else { path }));
    }
    if report.failures > 0 {
        let failures = count(report.failures);
        return fail(
            Exit::Failed,
            format!(
                "{failures} were not copied, for the reasons above; correct them and run it again to copy the rest"
            ),
        );
    }
    Ok(())
}

/// Parses `s3://BUCKET/PATH` and other store URLs, `VOLUME[@SNAPSHOT]:/PATH`, or a local path.
fn endpoint(datafs: &Datafs, text: &str) -> Result<Endpoint> {
    if text.contains("://") {
        let url: reqwest::Url = text.parse().map_err(|error| usage(format!("{text}: {error}")))?;
        if url.scheme() == "file" {
            let path = url.to_file_path();
            return path.map(Endpoint::Local).map_err(|()| usage(format!("{text}: write file:///PATH")));
        }
        // Credentials and endpoints come from the environment, as in other tools of these stores.
        let known = ["AWS_", "GOOGLE_", "AZURE_"];
        let variables = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        let options = variables.filter(|(name, _)| known.iter().any(|k| name.starts_with(k)));
        let options = options.map(|(name, value)| (name.to_ascii_lowercase(), value));
        let (store, path) = object_store::parse_url_opts(&url, options)
            .with_context(|| format!("{text} cannot be used (s3://, gs://, az:// and file:// can)"))?;
        return Ok(Endpoint::Bucket(Arc::from(store), path));
    }
    let Some((spec, path)) = text.split_once(':').filter(|(spec, _)| !spec.contains('/')) else {
        return Ok(Endpoint::Local(PathBuf::from(text)));
    };
    let spec: VolumeSpec = spec
        .parse()
        .map_err(|error| usage(format!("{text}: {error} (write ./{text} for a file of this name)")))?;
    Ok(Endpoint::Volume(datafs.view(&spec)?, PathBuf::from(path)))
}

fn usage(message: String) -> anyhow::Error {
    failure(Exit::Usage, message)
}
