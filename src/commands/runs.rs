//! `millrace runs list|show|compare`: the runs of training jobs, from their checkpoints.

mod picture;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use millrace_datafs::VolumeSpec;
use millrace_trainer::EpochRecord;
use millrace_trainer::runs::{self, Run};
use serde_json::Value;

use crate::cli::RunsCommand;
use crate::context::Context;
use crate::failure::{Exit, fail};
use crate::home::write_atomically;
use crate::output::{count, table, time};

/// Digits of a run's id that people see.
const SHOWN_DIGITS: usize = 12;
/// Epochs at the end of a run that are shown.
const SHOWN_EPOCHS: usize = 20;

/// Runs the command.
pub(crate) fn run(context: &Context, command: &RunsCommand) -> Result<()> {
    match command {
        RunsCommand::List { volume, job } => {
            let job = job.as_ref().map(millrace_datafs::Name::as_str);
            let found = runs::list(&context.datafs()?.view(volume)?, job)?;
            context.out.table(
                &found,
                &["job", "run", "begun (UTC)", "state", "steps", "epochs", "loss", "accuracy", "versions"],
                found.iter().map(summary),
            )
        }
        RunsCommand::Show { run, volume, svg } => {
            let found = runs::list(&context.datafs()?.view(volume)?, None)?;
            let run = find(&found, run, volume)?;
            draw(svg.as_deref(), &[run])?;
            if context.out.is_json() {
                return context.out.object(run);
            }
            context.out.raw(&shown(run))
        }
        RunsCommand::Compare { runs: names, volume, svg } => {
            let found = runs::list(&context.datafs()?.view(volume)?, None)?;
            let compared = names.iter().map(|name| find(&found, name, volume)).collect::<Result<Vec<_>>>()?;
            draw(svg.as_deref(), &compared)?;
            let differences = differences(&compared);
            if context.out.is_json() {
                return context
                    .out
                    .object(&serde_json::json!({ "runs": compared, "differences": differences }));
            }
            let ids: Vec<_> = compared.iter().map(|run| short(run).to_owned()).collect();
            let headers: Vec<_> = std::iter::once("").chain(ids.iter().map(String::as_str)).collect();
            context.out.raw(&table(&headers, compare(&compared, &differences)))
        }
    }
}

/// The run that a name means: a job's newest, or the one whose id begins with it.
fn find<'r>(found: &'r [Run], name: &str, volume: &VolumeSpec) -> Result<&'r Run> {
    if let Some(run) = found.iter().rev().find(|run| run.job == name) {
        return Ok(run);
    }
    let mut matching = found.iter().filter(|run| !name.is_empty() && run.run.starts_with(name));
    match (matching.next(), matching.next()) {
        (Some(run), None) => Ok(run),
        (Some(_), Some(_)) => fail(
            Exit::Usage,
            format!("several runs of volume {volume} begin with {name:?}: give more digits"),
        ),
        (None, _) => fail(
            Exit::NotFound,
            format!("volume {volume} has no run or job {name:?}: see millrace runs list --volume {volume}"),
        ),
    }
}

fn short(run: &Run) -> &str {
    run.run.get(..SHOWN_DIGITS).unwrap_or(&run.run)
}

fn begun(run: &Run) -> String {
    time(UNIX_EPOCH + Duration::from_secs(u64::try_from(run.begun).unwrap_or_default()))
}

fn state(run: &Run) -> &'static str {
    match (run.finished, run.checkpoints.is_empty()) {
        (true, _) => "finished",
        (false, true) => "no checkpoint",
        (false, false) => "unfinished",
    }
}

fn loss(run: &Run) -> String {
    run.epochs.last().map_or(String::new(), |epoch| format!("{:.6}", epoch.loss))
}

/// The accuracy after an epoch; empty for regression.
fn accuracy_of(run: &Run, epoch: Option<&EpochRecord>) -> String {
    let loss = &run.settings["loss"];
    let loss = loss.as_str().or_else(|| loss["kind"].as_str()).unwrap_or("cross_entropy");
    let classifies = matches!(loss, "cross_entropy" | "bce");
    epoch.filter(|_| classifies).map_or(String::new(), |epoch| format!("{:.4}", epoch.accuracy))
}

fn accuracy(run: &Run) -> String {
    accuracy_of(run, run.epochs.last())
}

fn versions(run: &Run) -> String {
    let versions: Vec<_> = run.versions.iter().map(u64::to_string).collect();
    versions.join(", ")
}

fn summary(run: &Run) -> Vec<String> {
    vec![
        run.job.clone(),
        short(run).to_owned(),
        begun(run),
        state(run).to_owned(),
        count(run.step),
        count(run.epochs.len() as u64),
        loss(run),
        accuracy(run),
        versions(run),
    ]
}

/// A run as two tables: its facts and settings, and its last epochs.
fn shown(run: &Run) -> String {
    let checkpoints: Vec<_> = run.checkpoints.iter().map(|step| format!("step {}", count(*step))).collect();
    let mut rows = vec![
        vec!["run".to_owned(), run.run.clone()],
        vec!["begun (UTC)".to_owned(), begun(run)],
        vec!["state".to_owned(), format!("{} at step {}", state(run), count(run.step))],
        vec!["checkpoints".to_owned(), checkpoints.join(", ")],
        vec!["model versions".to_owned(), versions(run)],
    ];
    rows.extend(settings(run).into_iter().map(|(key, value)| vec![key, value]));
    let facts = table(&["job", &run.job], rows);
    let first = run.epochs.len().saturating_sub(SHOWN_EPOCHS);
    let epochs = run.epochs.iter().enumerate().skip(first).map(|(at, epoch)| {
        vec![
            (at + 1).to_string(),
            count(epoch.rows),
            format!("{:.6}", epoch.loss),
            accuracy_of(run, Some(epoch)),
        ]
    });
    format!("{facts}\n\n{}", table(&["epoch", "rows", "loss", "accuracy"], epochs))
}

/// The settings of a run by key, tables with dots.
fn settings(run: &Run) -> BTreeMap<String, String> {
    fn add(into: &mut BTreeMap<String, String>, key: &str, value: &Value) {
        match value {
            Value::Object(table) => {
                for (name, value) in table {
                    let key = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
                    add(into, &key, value);
                }
            }
            Value::Null => {}
            Value::String(text) => drop(into.insert(key.to_owned(), text.clone())),
            value => drop(into.insert(key.to_owned(), value.to_string())),
        }
    }
    let mut found = BTreeMap::new();
    add(&mut found, "", &run.settings);
    found
}

/// The settings that are not the same in all runs: per key, the value of each run.
fn differences(runs: &[&Run]) -> BTreeMap<String, Vec<Option<String>>> {
    let settings: Vec<_> = runs.iter().map(|run| settings(run)).collect();
    let keys = settings.iter().flat_map(BTreeMap::keys);
    keys.map(|key| (key.clone(), settings.iter().map(|of| of.get(key).cloned()).collect::<Vec<_>>()))
        .filter(|(_, values)| values.iter().any(|value| *value != values[0]))
        .collect()
}

fn compare(runs: &[&Run], differences: &BTreeMap<String, Vec<Option<String>>>) -> Vec<Vec<String>> {
    let row = |name: &str, of: &dyn Fn(&Run) -> String| {
        std::iter::once(name.to_owned()).chain(runs.iter().map(|run| of(run))).collect::<Vec<_>>()
    };
    let mut rows = vec![
        row("job", &|run| run.job.clone()),
        row("state", &|run| state(run).to_owned()),
        row("steps", &|run| count(run.step)),
        row("epochs", &|run| count(run.epochs.len() as u64)),
        row("loss", &loss),
        row("accuracy", &accuracy),
        row("model versions", &versions),
    ];
    rows.extend(differences.iter().map(|(key, values)| {
        let values = values.iter().map(|value| value.clone().unwrap_or_else(|| "unset".to_owned()));
        std::iter::once(key.clone()).chain(values).collect()
    }));
    rows
}

fn draw(file: Option<&Path>, runs: &[&Run]) -> Result<()> {
    let Some(file) = file else { return Ok(()) };
    let lines: Vec<_> = runs
        .iter()
        .map(|run| {
            let losses = run.epochs.iter().map(|epoch| epoch.loss).collect();
            (format!("{} {}", run.job, short(run)), losses)
        })
        .collect();
    if lines.iter().all(|(_, losses): &(String, Vec<f64>)| losses.is_empty()) {
        return fail(Exit::Usage, "no run has a complete epoch yet: there is nothing to draw");
    }
    let picture = picture::losses(&lines)?;
    write_atomically(file, picture.as_bytes()).with_context(|| format!("write {}", file.display()))
}
