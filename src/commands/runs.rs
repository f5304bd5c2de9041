//! `millrace runs list|show|compare`: the runs of training jobs, from their checkpoints.

mod picture;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use millrace_datafs::{View, VolumeSpec};
use millrace_home::write_atomically;
use millrace_trainer::runs::{self, Run};
use millrace_trainer::{EpochRecord, Evaluation};
use serde_json::Value;

use crate::cli::RunsCommand;
use crate::context::Context;
use crate::failure::{Exit, fail};
use crate::output::{count, table, time};

/// Digits of a run's id that people see.
const SHOWN_DIGITS: usize = 12;
/// Epochs at the end of a run that are shown.
const SHOWN_EPOCHS: usize = 20;
/// Runs, or jobs, that an error lists.
const LISTED_MAX: usize = 8;

/// Runs the command.
pub(crate) fn run(context: &Context, command: &RunsCommand) -> Result<()> {
    match command {
        RunsCommand::List { volume, job } => {
            let job = job.as_ref().map(millrace_datafs::Name::as_str);
            let view = context.datafs()?.view(volume)?;
            let found = runs::list(&view, job)?;
            if let (Some(job), true) = (job, found.is_empty()) {
                return no_run_of(job, &view);
            }
            context.out.table(
                &found,
                &[
                    "job",
                    "run",
                    "last begun (UTC)",
                    "state",
                    "steps",
                    "epochs",
                    "loss",
                    "accuracy",
                    "validation loss",
                    "best epoch",
                    "versions",
                ],
                found.iter().map(summary),
            )
        }
        RunsCommand::Show { run, volume, svg } => {
            let found = runs::list(&context.datafs()?.view(volume)?, None)?;
            let run = find(&found, run, volume)?;
            if context.out.is_json() {
                context.out.object(run)?;
            } else {
                context.out.raw(&shown(run))?;
            }
            draw(svg.as_deref(), &[run])
        }
        RunsCommand::Compare { runs: names, volume, svg } => {
            let found = runs::list(&context.datafs()?.view(volume)?, None)?;
            let compared = names.iter().map(|name| find(&found, name, volume)).collect::<Result<Vec<_>>>()?;
            let differences = differences(&compared);
            let units = different_units(&compared);
            if context.out.is_json() {
                let losses_compare = units.is_empty();
                context.out.object(&serde_json::json!({
                    "runs": compared, "differences": differences, "losses_compare": losses_compare,
                }))?;
            } else {
                let ids: Vec<_> = compared.iter().map(|run| short(run).to_owned()).collect();
                let headers: Vec<_> = std::iter::once("").chain(ids.iter().map(String::as_str)).collect();
                context.out.raw(&table(&headers, compare(&compared, &differences)))?;
                if !units.is_empty() {
                    context.out.note(&format!(
                        "the runs differ in {}: their losses have different units and do not compare",
                        units.join(", ")
                    ));
                }
            }
            draw(svg.as_deref(), &compared)
        }
    }
}

/// The error for a job without runs, with the jobs that have some.
fn no_run_of(job: &str, view: &View) -> Result<()> {
    let jobs: BTreeSet<String> = runs::list(view, None)?.into_iter().map(|run| run.job).collect();
    let mut names: Vec<&str> = jobs.iter().take(LISTED_MAX).map(String::as_str).collect();
    if jobs.len() > names.len() {
        names.push("…");
    }
    let others = match &names[..] {
        [] => "it has none of other jobs either, millrace train begins one".to_owned(),
        names => format!("it has runs of {}", names.join(", ")),
    };
    fail(Exit::NotFound, format!("volume {} has no run of job {job:?}: {others}", view.spec()))
}

/// The run that a name means: a job's newest, the one whose id begins with it, or both parts as `JOB/DIGITS`.
fn find<'r>(found: &'r [Run], name: &str, volume: &VolumeSpec) -> Result<&'r Run> {
    let (job, digits) = match name.split_once('/') {
        Some((job, digits)) => (Some(job), digits),
        None => (None, name),
    };
    let newest = found.iter().rposition(|run| job.is_none() && run.job == name);
    let is_meant = |at: usize, run: &Run| {
        let by_id = !digits.is_empty() && run.run.starts_with(digits) && job.is_none_or(|job| run.job == job);
        by_id || newest == Some(at)
    };
    let meant: Vec<&Run> =
        found.iter().enumerate().filter(|(at, run)| is_meant(*at, run)).map(|(_, run)| run).collect();
    match &meant[..] {
        [run] => Ok(run),
        [] => fail(
            Exit::NotFound,
            format!("volume {volume} has no run or job {name:?}: see millrace runs list --volume {volume}"),
        ),
        several => {
            let id = |run: &'r Run| if digits.len() < SHOWN_DIGITS { short(run) } else { run.run.as_str() };
            let first = several.iter().take(LISTED_MAX).map(|run| format!("{}/{}", run.job, id(run)));
            let mut names = first.collect::<Vec<_>>().join(", ");
            if several.len() > LISTED_MAX {
                names += ", …";
            }
            fail(
                Exit::Usage,
                format!("{name:?} stands for several runs of volume {volume}: name one of {names}"),
            )
        }
    }
}

fn short(run: &Run) -> &str {
    run.run.get(..SHOWN_DIGITS).unwrap_or(&run.run)
}

fn begun(run: &Run) -> String {
    time(UNIX_EPOCH + Duration::from_secs(u64::try_from(run.begun).unwrap_or_default()))
}

fn state(run: &Run) -> &str {
    if let Some(script) = &run.script {
        return script.record.outcome.as_deref().unwrap_or("runs, or was killed");
    }
    match (run.finished, run.checkpoints.is_empty()) {
        (true, _) => "finished",
        (false, true) => "no checkpoint",
        (false, false) => "unfinished",
    }
}

fn loss(run: &Run) -> String {
    run.epochs.last().map_or(String::new(), |epoch| format!("{:.6}", epoch.loss))
}

/// The kind of a run's loss.
fn loss_kind(run: &Run) -> &str {
    let loss = &run.settings["loss"];
    loss.as_str().or_else(|| loss["kind"].as_str()).unwrap_or("cross_entropy")
}

/// The accuracy after an epoch; empty for regression.
fn accuracy_of(run: &Run, epoch: Option<&EpochRecord>) -> String {
    let classifies = matches!(loss_kind(run), "cross_entropy" | "bce" | "kl");
    epoch.filter(|_| classifies).map_or(String::new(), |epoch| format!("{:.4}", epoch.accuracy))
}

fn accuracy(run: &Run) -> String {
    accuracy_of(run, run.epochs.last())
}

fn validation_loss(run: &Run) -> String {
    run.evaluations.last().map_or(String::new(), |evaluation| format!("{:.6}", evaluation.loss))
}

/// The epoch with the lowest validation loss.
fn best_epoch(run: &Run) -> String {
    run.best().map_or(String::new(), |best| best.epoch.to_string())
}

fn best_loss(run: &Run) -> String {
    run.best().map_or(String::new(), |best| format!("{:.6}", best.loss))
}

fn versions(run: &Run) -> String {
    let versions: Vec<_> = run.versions.iter().map(u64::to_string).collect();
    versions.join(", ")
}

fn summary(run: &Run) -> Vec<String> {
    // The trainer does not know the steps and epochs of a script.
    let counted = |number: u64| if run.script.is_some() { String::new() } else { count(number) };
    vec![
        run.job.clone(),
        short(run).to_owned(),
        begun(run),
        state(run).to_owned(),
        counted(run.step),
        counted(run.epochs.len() as u64),
        loss(run),
        accuracy(run),
        validation_loss(run),
        best_epoch(run),
        versions(run),
    ]
}

/// A run as two tables: its facts and settings, and its last epochs.
fn shown(run: &Run) -> String {
    let checkpoints: Vec<_> = run.checkpoints.iter().map(|step| format!("step {}", count(*step))).collect();
    let mut rows = vec![
        vec!["run".to_owned(), run.run.clone()],
        vec!["last begun (UTC)".to_owned(), begun(run)],
        vec!["state".to_owned(), format!("{} at step {}", state(run), count(run.step))],
        vec!["checkpoints".to_owned(), checkpoints.join(", ")],
        vec!["model versions".to_owned(), versions(run)],
    ];
    if let Some(script) = &run.script {
        // The trainer does not know the steps of a script.
        rows[2][1] = state(run).to_owned();
        rows.remove(3);
        let published = script.published.iter();
        let published = published.map(|of| format!("{}:/models/{}/{}", of.volume, of.model, of.version));
        rows[3][1] = published.collect::<Vec<_>>().join(", ");
        let settings = settings(run).into_iter().map(|(key, value)| vec![key, value]);
        return table(&["job", &run.job], rows.into_iter().chain(settings));
    }
    if run.best().is_some() {
        rows.push(vec![
            "best epoch".to_owned(),
            format!("{}, validation loss {}", best_epoch(run), best_loss(run)),
        ]);
    }
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
    let shown = format!("{facts}\n\n{}", table(&["epoch", "rows", "loss", "accuracy"], epochs));
    if run.evaluations.is_empty() { shown } else { format!("{shown}\n\n{}", evaluations(run)) }
}

/// The last evaluations of a run, with the figures that they have.
fn evaluations(run: &Run) -> String {
    let last = &run.evaluations[run.evaluations.len().saturating_sub(SHOWN_EPOCHS)..];
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in last.iter().flat_map(Evaluation::figures) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let rows = last.iter().map(|evaluation| {
        let figures: BTreeMap<_, _> = evaluation.figures().collect();
        let figures = names.iter().map(|name| figures.get(name).map_or(String::new(), |f| format!("{f:.6}")));
        [evaluation.epoch.to_string(), count(evaluation.rows)].into_iter().chain(figures).collect()
    });
    let headers: Vec<&str> =
        ["validation after epoch", "rows"].into_iter().chain(names.iter().copied()).collect();
    table(&headers, rows)
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

/// The keys that give the losses of the runs different units.
fn different_units(runs: &[&Run]) -> Vec<&'static str> {
    let scales = |run: &Run| run.settings["standardize_labels"] == true;
    let differs = |of: &dyn Fn(&Run) -> Value| runs.iter().any(|run| of(run) != of(runs[0]));
    let loss = |run: &Run| match &run.settings["loss"] {
        Value::Object(loss) => {
            let loss: serde_json::Map<_, _> = loss
                .iter()
                .filter(|(_, value)| !value.is_null())
                .map(|(k, v)| (k.clone(), v.clone()))
                .collect();
            if loss.len() == 1 { loss_kind(run).into() } else { loss.into() }
        }
        _ => loss_kind(run).into(),
    };
    // Labels are scaled by those of the dataset.
    let data = |run: &Run| if scales(run) { run.settings["dataset"].clone() } else { Value::Null };
    let mut keys = Vec::new();
    if differs(&loss) {
        keys.push("loss");
    }
    if differs(&|run| scales(run).into()) {
        keys.push("standardize_labels");
    } else if differs(&data) {
        keys.push("dataset");
    }
    keys
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
        row("validation loss", &validation_loss),
        row("best epoch", &best_epoch),
        row("best validation loss", &best_loss),
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
    let same_unit = different_units(runs).is_empty();
    let unit = |run: &Run| match (same_unit, run.settings["standardize_labels"] == true) {
        (true, _) => String::new(),
        (false, true) => format!(", {} of scaled labels", loss_kind(run)),
        (false, false) => format!(", {}", loss_kind(run)),
    };
    let lines: Vec<_> = runs
        .iter()
        .map(|run| picture::Line {
            name: format!("{} {}{}", run.job, short(run), unit(run)),
            losses: run.epochs.iter().map(|epoch| epoch.loss).collect(),
            throughput: run.throughput.iter().map(|found| (found.step, found.rows_per_second)).collect(),
        })
        .collect();
    if lines.iter().all(|line| line.losses.is_empty()) {
        return fail(Exit::Usage, "no run has a complete epoch yet: there is nothing to draw");
    }
    let picture = picture::draw(&lines)?;
    write_atomically(file, picture.as_bytes()).with_context(|| format!("write {}", file.display()))
}

#[cfg(test)]
mod tests;
