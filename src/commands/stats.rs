//! `millrace stats` and `millrace trace`: statistics and request traces of running mounts.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use millrace_datafs::mount::{self, MountStats, OperationStats, Served, TraceOptions, TraceStats};
use serde::Serialize;
use tokio::time::MissedTickBehavior;

use crate::cli::{StatsArgs, TraceArgs};
use crate::context::Context;
use crate::failure::{Exit, fail};
use crate::output::{bytes, count, duration, table};

/// Runs `millrace stats`.
pub(crate) async fn run(context: &Context, args: StatsArgs) -> Result<()> {
    let mut before: HashMap<Served, MountStats> = HashMap::new();
    let interval = Duration::from_secs_f64(args.interval);
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The first measurement is a baseline, unless it is the only one.
    for look in 0_u64.. {
        tokio::select! {
            _ = ticks.tick() => {}
            () = context.stop.cancelled() => return Ok(()),
        }
        let (asked, wanted) = (context.clone(), args.mount.clone());
        let found = context.blocking(move || find(&asked, wanted.as_deref(), look > 0)).await?;
        if args.once {
            let shown: Vec<_> = found.iter().map(|(_, stats)| MountReport::new(stats)).collect();
            return show(context, &shown, false).map(drop);
        }
        if look > 0 {
            let new = |(served, stats): &(Served, MountStats)| {
                Some(stats.since(before.get(served).filter(|old| old.since == stats.since)?))
            };
            let new: Vec<_> = found.iter().filter_map(new).collect();
            let shown: Vec<_> = new.iter().map(MountReport::new).collect();
            if !show(context, &shown, true)? || (shown.is_empty() && found.is_empty()) {
                return Ok(());
            }
        }
        before = found.into_iter().collect();
    }
    Ok(())
}

/// The requested mounts with their statistics. Finding none is an error unless some existed before.
fn find(context: &Context, wanted: Option<&str>, were_there: bool) -> Result<Vec<(Served, MountStats)>> {
    let home = context.home.root();
    let mut found = Vec::new();
    let mut refused = None;
    for served in mount::served(home)? {
        match served.stats() {
            Ok(Some(stats)) => found.push((served, stats)),
            Ok(None) => {}
            // Another user's mount, or its process hangs: the other mounts are shown.
            Err(error) => refused = Some(error),
        }
    }
    let all: Vec<String> = found.iter().map(|(_, stats)| stats.path.display().to_string()).collect();
    if let Some(wanted) = wanted {
        let path = std::path::absolute(wanted)?;
        found.retain(|(_, stats)| is_called(stats, wanted, &path));
    }
    match refused {
        _ if were_there || !found.is_empty() => Ok(found),
        Some(error) => Err(error.into()),
        None if all.is_empty() => fail(
            Exit::NotFound,
            format!(
                "no volume of home {} is mounted: run millrace mount VOLUME PATH, or name another home with --home",
                home.display()
            ),
        ),
        None => fail(
            Exit::NotFound,
            format!(
                "{} is neither a mount point nor a mounted volume; mounted are: {}",
                wanted.unwrap_or(""),
                all.join(", ")
            ),
        ),
    }
}

fn is_called(stats: &MountStats, name: &str, path: &Path) -> bool {
    stats.path == path
        || stats.volume == name
        || stats.volume.split_once('@').is_some_and(|(volume, _)| volume == name)
}

/// The displayed data of a mount, for an interval or since it was mounted.
#[derive(Debug, Serialize)]
struct MountReport<'a> {
    volume: &'a str,
    mount: &'a Path,
    pid: u32,
    opening: &'a str,
    /// Seconds that the numbers cover.
    seconds: f64,
    operations_per_s: f64,
    read_bytes_per_s: f64,
    written_bytes_per_s: f64,
    errors: u64,
    open_files: u64,
    kernel_served_opens: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    waiting_requests: Option<u64>,
    /// Share of lookups that memory or the cache answered; none without lookups.
    record_cache_hit_ratio: Option<f64>,
    object_cache_hit_ratio: Option<f64>,
    commits_per_s: f64,
    transactions_per_commit: Option<f64>,
    commit_mean_us: Option<f64>,
    operations: Vec<Operation<'a>>,
    /// Counters of the mount's process, by metric name.
    process: &'a std::collections::BTreeMap<String, u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    trace: Option<&'a TraceStats>,
}

#[derive(Debug, Serialize)]
struct Operation<'a> {
    op: &'a str,
    count: u64,
    per_s: f64,
    bytes: u64,
    errors: u64,
    in_flight: u64,
    mean_us: f64,
    p50_us: f64,
    p99_us: f64,
}

fn ratio(part: u64, of: u64) -> Option<f64> {
    (of > 0).then(|| part as f64 / of as f64)
}

impl<'a> MountReport<'a> {
    fn new(stats: &'a MountStats) -> MountReport<'a> {
        let seconds = stats.uptime_s.max(1e-9);
        let process =
            |name: &str| stats.process.get(&format!("millrace_datafs_{name}_total")).copied().unwrap_or(0);
        let bytes_of = |op: &str| -> u64 {
            stats.operations.iter().filter(|found| found.op == op).map(|found| found.bytes).sum()
        };
        let (hits, misses) = (process("record_cache_hits"), process("record_cache_misses"));
        let (cached, fetched) = (process("cache_read_bytes"), process("store_read_bytes"));
        let commits = process("metadata_commits");
        let active = |operation: &&OperationStats| operation.latency.count() + operation.in_flight > 0;
        let micros = |time: Duration| time.as_nanos() as f64 / 1e3;
        let operation = |found: &'a OperationStats| Operation {
            op: &found.op,
            count: found.latency.count(),
            per_s: found.latency.count() as f64 / seconds,
            bytes: found.bytes,
            errors: found.errors,
            in_flight: found.in_flight,
            mean_us: micros(found.latency.mean()),
            p50_us: micros(found.latency.quantile(0.5)),
            p99_us: micros(found.latency.quantile(0.99)),
        };
        let mut operations: Vec<_> = stats.operations.iter().filter(active).map(operation).collect();
        operations.sort_by(|a, b| b.count.cmp(&a.count).then_with(|| a.op.cmp(b.op)));
        MountReport {
            volume: &stats.volume,
            mount: &stats.path,
            pid: stats.pid,
            opening: &stats.opening,
            seconds: stats.uptime_s,
            operations_per_s: operations.iter().map(|operation| operation.per_s).sum(),
            read_bytes_per_s: bytes_of("read") as f64 / seconds,
            written_bytes_per_s: (bytes_of("write") + bytes_of("copy_file_range")) as f64 / seconds,
            errors: operations.iter().map(|operation| operation.errors).sum(),
            open_files: stats.open_files,
            kernel_served_opens: stats.kernel_served_opens,
            waiting_requests: stats.waiting,
            record_cache_hit_ratio: ratio(hits, hits + misses),
            object_cache_hit_ratio: ratio(cached, cached + fetched),
            commits_per_s: commits as f64 / seconds,
            transactions_per_commit: ratio(process("metadata_transactions"), commits),
            commit_mean_us: ratio(process("metadata_commit_nanoseconds"), commits).map(|nanos| nanos / 1e3),
            operations,
            process: &stats.process,
            trace: stats.trace.as_ref(),
        }
    }

    fn text(&self) -> String {
        let rate = |per_s: f64| count(per_s.round() as u64);
        let mut lines = vec![
            format!(
                "{} at {} (process {}, {} seconds)",
                self.volume,
                self.mount.display(),
                self.pid,
                if self.seconds < 10.0 { format!("{:.1}", self.seconds) } else { rate(self.seconds) },
            ),
            format!(
                "{} requests/s, {}/s read, {}/s written, {} errors, {} files open{}",
                rate(self.operations_per_s),
                bytes(self.read_bytes_per_s as u64),
                bytes(self.written_bytes_per_s as u64),
                count(self.errors),
                count(self.open_files),
                self.waiting_requests
                    .map_or(String::new(), |waiting| format!(", {waiting} requests waiting")),
            ),
        ];
        let percent = |share: f64| format!("{:.1} %", share * 100.0);
        let mut caches = Vec::new();
        if let Some(share) = self.record_cache_hit_ratio {
            caches.push(format!("{} of metadata records were in memory", percent(share)));
        }
        if let Some(share) = self.object_cache_hit_ratio {
            caches.push(format!("{} of file data came from the cache", percent(share)));
        }
        if self.kernel_served_opens > 0 {
            caches.push(format!(
                "{} opened files the kernel may serve by itself",
                count(self.kernel_served_opens)
            ));
        }
        if let (Some(group), Some(mean)) = (self.transactions_per_commit, self.commit_mean_us) {
            let mean = duration(Duration::from_nanos((mean * 1e3) as u64));
            caches.push(format!("{:.1} commits/s of {group:.1} changes, {mean} each", self.commits_per_s));
        }
        if !caches.is_empty() {
            lines.push(caches.join(", "));
        }
        if let Some(trace) = self.trace {
            let (written, lost) = (count(trace.written), count(trace.lost));
            lines.push(format!("traced to {}: {written} requests, {lost} lost", trace.file.display()));
        }
        let time = |micros: f64| duration(Duration::from_nanos((micros * 1e3) as u64));
        let row = |operation: &Operation<'_>| {
            vec![
                operation.op.to_owned(),
                rate(operation.per_s),
                count(operation.count),
                time(operation.mean_us),
                time(operation.p50_us),
                time(operation.p99_us),
                if operation.bytes > 0 { bytes(operation.bytes) } else { String::new() },
                if operation.errors > 0 { count(operation.errors) } else { String::new() },
                if operation.in_flight > 0 { count(operation.in_flight) } else { String::new() },
            ]
        };
        if self.operations.is_empty() {
            lines.push("no requests".to_owned());
        } else {
            let headers = ["request", "/s", "count", "mean", "p50", "p99", "bytes", "errors", "in flight"];
            lines.push(table(&headers, self.operations.iter().map(row)));
        }
        lines.join("\n")
    }
}

/// Prints the mounts; false once the reader has closed standard output.
fn show(context: &Context, shown: &[MountReport<'_>], again: bool) -> Result<bool> {
    let text = || match shown {
        [] => "what was mounted has ended, or was mounted just now".to_owned(),
        _ => shown.iter().map(MountReport::text).collect::<Vec<_>>().join("\n\n"),
    };
    context.out.sample(serde_json::json!({ "mounts": shown }), text, again)
}

/// Runs `millrace trace`.
pub(crate) fn trace(context: &Context, args: &TraceArgs) -> Result<()> {
    let found = find(context, Some(&args.mount), false)?;
    let [(served, stats)] = found.as_slice() else {
        let paths: Vec<_> = found.iter().map(|(_, stats)| stats.path.display().to_string()).collect();
        let message = format!("{} is mounted more than once: name one of {}", args.mount, paths.join(", "));
        return fail(Exit::Usage, message);
    };
    if args.off {
        served.end_trace()?;
    } else if let Some(file) = &args.file {
        let file = std::path::absolute(file)?;
        served.trace(&TraceOptions { file, file_bytes_max: args.file_mib << 20 })?;
    }
    let at = stats.path.display();
    let now = served.stats()?.and_then(|stats| stats.trace);
    let text = match (&now, &stats.trace) {
        (Some(trace), _) => format!(
            "{at} is traced to {}: {} requests so far, {} lost (millrace trace {} --off ends it)",
            trace.file.display(),
            count(trace.written),
            count(trace.lost),
            crate::output::quoted(&args.mount)
        ),
        (None, Some(ended)) => format!("{at} is not traced any more; the trace is {}", ended.file.display()),
        (None, None) => format!("{at} is not traced"),
    };
    context.out.table(&serde_json::json!({ "mount": stats.path, "trace": now }), &[], [vec![text]])
}
