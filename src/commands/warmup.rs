//! `millrace warmup`: prefetches files of a volume into this machine's cache.

use anyhow::Result;
use millrace_datafs::VolumeSpec;

use crate::context::Context;
use crate::failure::{Exit, failure};
use crate::output::{bytes, count};

/// Runs the command.
pub(crate) fn run(context: &Context, what: &str) -> Result<()> {
    let (spec, path) = what.split_once(':').unwrap_or((what, "/"));
    let spec: VolumeSpec = spec.parse().map_err(|error| failure(Exit::Usage, format!("{what}: {error}")))?;
    let view = context.datafs()?.view(&spec)?;
    let bar = context.out.progress("fetching", "files", None);
    let done = view.warmup(path, &mut |now| bar.set_position(now.files));
    bar.finish_and_clear();
    let done = done?;
    context.out.table(
        &done,
        &[],
        [vec![format!("{} files checked, {} are in the cache", count(done.files), bytes(done.bytes))]],
    )
}
