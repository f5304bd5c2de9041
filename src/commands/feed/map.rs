//! `millrace feed map`: the front of the package `millrace`, which calls a Python function with each input group, and
//! another one with each key of what it returned.
//!
//! The driver is a Python process (`python/millrace/__main__.py`). It gets its arguments as a line of JSON, and tells
//! its progress and its end in lines. It stops when its input ends, so it does not outlive this command.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};

use crate::cli::FeedMapArgs;
use crate::context::Context;
use crate::failure::{Exit, fail, failure};
use crate::output::{bytes, count};

/// How long the driver has to stop after a signal.
const PATIENCE: Duration = Duration::from_secs(30);
/// Prints which of the modules are missing, behind [`MISSING`]: Python may print lines of its own when it starts.
const CHECK: &str = "
import importlib.util
def is_missing(name):
    try:
        return importlib.util.find_spec(name) is None
    except ImportError:
        return True
print()
print('missing:', *filter(is_missing, ('millrace', 'pyarrow', 'millrace.map_reduce')))
";
/// Begins the line of the missing modules.
const MISSING: &str = "missing:";

/// A line of the driver.
#[derive(Deserialize)]
#[serde(untagged)]
enum Event {
    Progress { done: u64, groups: u64 },
    Error { error: String, class: String },
    Complete { complete: Mapped },
    Interrupted { interrupted: bool },
}

/// A complete job.
#[derive(Serialize, Deserialize)]
struct Mapped {
    source: String,
    to: String,
    groups: u64,
    computed: u64,
    rows_read: u64,
    rows: u64,
    files: u64,
    bytes: u64,
    #[serde(flatten)]
    reduced: Option<Reduced>,
}

/// What a complete job with a reduce function has beside the others.
#[derive(Serialize, Deserialize)]
struct Reduced {
    parts: u64,
    reduced: u64,
    keys: u64,
}

pub(super) async fn run(context: &Context, args: FeedMapArgs) -> Result<()> {
    if let Some(topic) = args.dataset.topic() {
        return fail(
            Exit::Usage,
            format!(
                "feed map {topic}: a topic is not mapped; land it with millrace ingest and map a snapshot"
            ),
        );
    }
    tokio::select! {
        checked = check_python(&args.python) => checked?,
        () = context.stop.cancelled() => return context.interrupted("feed map"),
    }
    let (source, rows) = (&args.dataset, &args.select);
    check_names("--argument", args.arguments.iter().map(|(name, _)| name))?;
    check_names("--splits", rows.splits.iter().map(|(name, _)| name))?;
    check_names("--reduce-argument", args.reduce_arguments.iter().map(|(name, _)| name))?;
    let arguments: BTreeMap<_, _> = args.arguments.iter().cloned().collect();
    let mut request = json!({
        "function": args.function, "source": source, "to": args.to, "processes": args.processes,
        "columns": super::columns(args.columns), "where": rows.filter, "splits": rows.splits, "split": rows.split,
        "split_by": rows.split_by, "format": args.format, "arguments": arguments,
        "allow_changed_function": args.allow_changed_function,
    });
    if let Some(reduce) = &args.reduce {
        request["reduce"] = json!(reduce);
        request["key"] = json!(args.key);
        request["parts"] = json!(args.parts);
        let arguments: BTreeMap<_, _> = args.reduce_arguments.iter().cloned().collect();
        request["reduce_arguments"] = json!(arguments);
    }
    let mut driver = start(context, &args.python)?;
    let found = follow(context, &mut driver, &request).await;
    let found = match found {
        Ok(Some(found)) => found,
        other => {
            stop(&mut driver).await;
            context.interrupted("feed map")?;
            let status =
                driver.wait().await.map_or_else(|error| error.to_string(), |status| status.to_string());
            other?;
            let program = args.python.display();
            return fail(
                Exit::Failed,
                format!("feed map: {program} ended with {status} before the job was complete"),
            );
        }
    };
    let mut columns = vec![
        ("source", found.source.clone()),
        ("to", found.to.clone()),
        ("groups", count(found.groups)),
        ("computed now", count(found.computed)),
        ("rows read", count(found.rows_read)),
    ];
    if let Some(reduced) = &found.reduced {
        columns.push(("parts", count(reduced.parts)));
        columns.push(("reduced now", count(reduced.reduced)));
        columns.push(("keys", count(reduced.keys)));
    }
    columns.extend([
        ("rows", count(found.rows)),
        ("files", count(found.files)),
        ("bytes", bytes(found.bytes)),
    ]);
    let (names, values): (Vec<_>, Vec<_>) = columns.into_iter().unzip();
    context.out.table(&found, &names, [values])
}

/// Fails for a name that is given twice: only one of its values could count.
fn check_names<'a>(option: &str, names: impl Iterator<Item = &'a String>) -> Result<()> {
    let mut seen = BTreeSet::new();
    for name in names {
        if !seen.insert(name) {
            return fail(Exit::Usage, format!("feed map: {option} has {name:?} twice; give it once"));
        }
    }
    Ok(())
}

/// Fails unless the interpreter runs and finds the packages.
async fn check_python(python: &Path) -> Result<()> {
    let program = python.display();
    let hint = "name another interpreter by --python or MILLRACE_PYTHON";
    let checked =
        Command::new(python).args(["-c", CHECK]).stdin(Stdio::null()).kill_on_drop(true).output().await;
    let checked = match checked {
        Ok(checked) if checked.status.success() => checked,
        Ok(checked) => {
            let said = String::from_utf8_lossy(&checked.stderr);
            let last = said.trim_end().lines().last().unwrap_or_default();
            return fail(
                Exit::Unavailable,
                format!("feed map: {program} ended with {}: {last}; {hint}", checked.status),
            );
        }
        Err(error) => {
            return fail(
                Exit::Unavailable,
                format!("feed map: {program} cannot be started: {error}; {hint}"),
            );
        }
    };
    let printed = String::from_utf8_lossy(&checked.stdout);
    let Some(missing) = printed.lines().rev().find_map(|line| line.strip_prefix(MISSING)) else {
        return fail(Exit::Unavailable, format!("feed map: {program} runs no Python code; {hint}"));
    };
    let packages: Vec<&str> = missing.split_whitespace().filter(|name| !name.contains('.')).collect();
    if !packages.is_empty() {
        let names = packages.join(" and ");
        return fail(
            Exit::Unavailable,
            format!("feed map: {program} has no package {names}; install it there with pip, or {hint}"),
        );
    }
    if !missing.trim().is_empty() {
        return fail(
            Exit::Unavailable,
            format!(
                "feed map: the package millrace of {program} cannot be loaded, or is too old for this command; install \
                 the wheel of this version ({}), or {hint}",
                env!("CARGO_PKG_VERSION")
            ),
        );
    }
    Ok(())
}

fn start(context: &Context, python: &Path) -> Result<Child> {
    let mut command = Command::new(python);
    // Its own process group: a Ctrl-C in the terminal is for this process, which stops the driver in order.
    // The home by the environment: its path need not be text.
    command
        .args(["-m", "millrace", "map"])
        .env("MILLRACE_LOG", &context.log)
        .env("MILLRACE_HOME", context.home.root())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true);
    if let Some(file) = context.loaded.file_to_share()? {
        command.env("MILLRACE_CONFIG", file);
    }
    command.spawn().with_context(|| format!("cannot start {}", python.display()))
}

/// Hands the request to the driver and follows it; `None` when it ended, or a signal came, before the job was complete.
async fn follow(
    context: &Context,
    driver: &mut Child,
    request: &serde_json::Value,
) -> Result<Option<Mapped>> {
    let (Some(input), Some(output)) = (driver.stdin.as_mut(), driver.stdout.take()) else { return Ok(None) };
    // A driver that has ended says so by its output.
    input.write_all(format!("{request}\n").as_bytes()).await.ok();
    let mut lines = BufReader::new(output).lines();
    let mut bar = None;
    loop {
        let line = tokio::select! {
            line = lines.next_line() => line.context("read what the Python process says")?,
            () = context.stop.cancelled() => return Ok(None),
        };
        let Some(line) = line else { return Ok(None) };
        let Ok(event) = serde_json::from_str::<Event>(&line) else {
            // A module that Python loads at its start, before the driver has the output for itself.
            tracing::warn!("the Python process printed: {line}");
            continue;
        };
        match event {
            Event::Progress { done, groups } => {
                let bar = bar.get_or_insert_with(|| context.out.progress("map", "groups", Some(groups)));
                bar.set_position(done);
            }
            Event::Error { error, class } => return Err(failure(exit_of(&class), error)),
            Event::Complete { complete } => {
                if let Some(bar) = bar {
                    bar.finish_and_clear();
                }
                return Ok(Some(complete));
            }
            Event::Interrupted { interrupted } => {
                tracing::debug!(interrupted, "the driver was told to stop");
                return Ok(None);
            }
        }
    }
}

/// Lets the driver stop its workers, and kills it if it does not.
async fn stop(driver: &mut Child) {
    drop(driver.stdin.take());
    if let Some(pid) = driver.id().and_then(|pid| i32::try_from(pid).ok()) {
        kill(Pid::from_raw(pid), Signal::SIGTERM).ok();
    }
    if tokio::time::timeout(PATIENCE, driver.wait()).await.is_err() {
        driver.kill().await.ok();
    }
}

/// The exit code of a class of `millrace.errors`.
fn exit_of(class: &str) -> Exit {
    match class {
        "UsageError" => Exit::Usage,
        "NotFoundError" => Exit::NotFound,
        "ConflictError" => Exit::Conflict,
        "UnavailableError" => Exit::Unavailable,
        "CorruptError" => Exit::Corrupt,
        "NoSpaceError" => Exit::NoSpace,
        _ => Exit::Failed,
    }
}
