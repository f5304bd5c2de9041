//! `millrace backup` and `millrace restore`: copies of all volumes in a folder, and back.

use std::path::{Path, absolute};

use anyhow::Result;
use millrace_datafs::Datafs;

use crate::cli::RestoreArgs;
use crate::context::Context;
use crate::failure::{Exit, fail};
use crate::output::{bytes, count};

/// Runs `millrace backup`.
pub(crate) fn backup(context: &Context, to: &Path) -> Result<()> {
    let to = absolute(to)?;
    if to.starts_with(context.home.root()) {
        return fail(Exit::Usage, format!("{} is inside the home: a backup belongs elsewhere", to.display()));
    }
    let datafs = context.datafs()?;
    let bar = context.out.progress("copying", "bytes", None);
    let report = datafs.backup(&to, &|bytes| {
        bar.set_position(bytes);
        !context.stop.is_cancelled()
    });
    bar.finish_and_clear();
    if report.is_err() {
        context.interrupted("the backup")?;
    }
    let report = report?;
    let row = |name: &str, value: String| vec![name.to_owned(), value];
    context.out.table(
        &report,
        &["backed up", ""],
        [
            row("objects", count(report.objects)),
            row("copied", bytes(report.bytes)),
            row("removed", count(report.removed)),
        ],
    )?;
    if report.missing > 0 {
        let missing = count(report.missing);
        return fail(
            Exit::Corrupt,
            format!(
                "the backup is complete but for {missing} objects that the store has lost: see millrace fsck"
            ),
        );
    }
    Ok(())
}

/// Runs `millrace restore`.
pub(crate) fn restore(context: &Context, args: &RestoreArgs) -> Result<()> {
    let (home, from) = (context.home.root(), &args.from);
    if !args.yes {
        return fail(
            Exit::Usage,
            format!(
                "restoring {} replaces all volumes of {}: add --yes to do so",
                from.display(),
                home.display()
            ),
        );
    }
    let bar = context.out.progress("copying", "bytes", None);
    context.home.check_store(&context.loaded.settings.datafs)?;
    let report = Datafs::restore(home, &context.loaded.settings.datafs, from, args.take_store, &|bytes| {
        bar.set_position(bytes);
        !context.stop.is_cancelled()
    });
    bar.finish_and_clear();
    if report.is_err() {
        context.interrupted("restoring")?;
    }
    let report = report?;
    let row = |name: &str, value: String| vec![name.to_owned(), value];
    context.out.table(
        &report,
        &["restored", ""],
        [row("objects", count(report.objects)), row("copied", bytes(report.bytes))],
    )?;
    if report.missing > 0 {
        let missing = count(report.missing);
        return fail(
            Exit::Corrupt,
            format!("restored but for {missing} objects that were lost before the backup: see millrace fsck"),
        );
    }
    Ok(())
}
