//! `millrace fsck`, `millrace gc` and `millrace compact`: checks, garbage collection and compaction of
//! volumes.

use anyhow::Result;
use millrace_datafs::{Compact, Config, Datafs, FsckOptions, FsckReport, Name, Remedy};

use crate::cli::FsckArgs;
use crate::context::Context;
use crate::failure::{Exit, fail};
use crate::output::{bytes, count};

/// Runs `millrace fsck`.
pub(crate) fn run(context: &Context, args: &FsckArgs) -> Result<()> {
    // No garbage collection during the check, so that it sees a stable state.
    let config = Config { gc_interval_ms: 0, ..context.loaded.settings.datafs.clone() };
    context.home.check_store(&config)?;
    let datafs = Datafs::open(context.home.root(), &config)?;
    let mut stage = "";
    let mut bar = None;
    let options = FsckOptions { scrub: args.scrub, repair: args.repair };
    let report = datafs.fsck(&options, &mut |progress| {
        if progress.stage != stage || bar.is_none() {
            stage = progress.stage;
            let unit = if stage == "scrub" { "bytes" } else { "items" };
            bar = Some(context.out.progress(stage, unit, None));
        }
        if let Some(bar) = &bar {
            bar.set_position(progress.done);
        }
    })?;
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    show(context, &report)?;
    let (found, repaired) = (count(report.problems), count(report.repaired));
    if report.is_damaged() {
        let repairable = report.found.iter().any(|problem| problem.remedy == Remedy::Repairable);
        let next = if repairable { "; run millrace fsck --repair" } else { "" };
        return fail(Exit::Corrupt, format!("{found} problems, {repaired} of them repaired{next}"));
    }
    if report.repaired > 0 {
        return fail(Exit::Repaired, format!("{repaired} problems were found and repaired"));
    }
    Ok(())
}

fn show(context: &Context, report: &FsckReport) -> Result<()> {
    if context.out.is_json() {
        return context.out.object(report);
    }
    for problem in &report.found {
        let remedy = match problem.remedy {
            Remedy::Repaired => " (repaired)",
            Remedy::Repairable => " (--repair repairs it)",
            Remedy::None => "",
        };
        context.out.text(&format!("{}: {}{remedy}", problem.place, problem.detail))?;
    }
    let listed = report.found.len() as u64;
    if report.problems > listed {
        context.out.text(&format!("and {} more", count(report.problems - listed)))?;
    }
    let row = |name: &str, value: String| vec![name.to_owned(), value];
    let mut rows = vec![
        row("volumes", count(report.volumes)),
        row("snapshots", count(report.snapshots)),
        row("inodes", count(report.inodes)),
        row("names", count(report.names)),
        row("extents", count(report.extents)),
        row("objects", format!("{} ({})", count(report.objects), bytes(report.object_bytes))),
    ];
    if report.unclaimed_objects > 0 {
        rows.push(row("not claimed yet", format!("{} objects", count(report.unclaimed_objects))));
    }
    if report.scrubbed_bytes > 0 {
        rows.push(row("read and verified", bytes(report.scrubbed_bytes)));
    }
    if let Some(upkeep) = &report.upkeep {
        rows.push(row("background work", upkeep.to_string()));
    }
    let verdict = if report.is_sound() { "none".to_owned() } else { count(report.problems) };
    rows.push(row("problems", verdict));
    context.out.table(report, &["checked", ""], rows)
}

/// Runs `millrace gc`.
pub(crate) fn gc(context: &Context) -> Result<()> {
    let datafs = context.datafs()?;
    let bar = context.out.progress("collecting", "", None);
    let report = datafs.gc();
    bar.finish_and_clear();
    let report = report?;
    let row = |name: &str, value: u64| vec![name.to_owned(), count(value)];
    context.out.table(
        &report,
        &["collected", ""],
        [
            row("objects", report.objects),
            row("objects held for a backup", report.held),
            row("unlinked files", report.inodes),
            row("snapshots", report.snapshots),
            row("volumes", report.volumes),
            row("dead processes", report.sessions),
        ],
    )
}

/// Runs `millrace compact`.
pub(crate) fn compact(context: &Context, volume: Option<&Name>) -> Result<()> {
    let datafs = context.datafs()?;
    let bar = context.out.progress("compacting", "", None);
    let report = datafs.compact(volume, &Compact::default());
    bar.finish_and_clear();
    let report = report?;
    let row = |name: &str, value: String| vec![name.to_owned(), value];
    context.out.table(
        &report,
        &["compacted", ""],
        [
            row("files", count(report.files)),
            row("packs", count(report.packs)),
            row("extents", format!("{} to {}", count(report.extents_before), count(report.extents_after))),
            row("copied", bytes(report.bytes)),
            row("changed meanwhile", count(report.conflicts)),
        ],
    )
}
