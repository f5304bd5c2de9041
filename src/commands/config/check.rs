//! `millrace config check`: all problems of a configuration file or of a job file, found without connecting to
//! anything.

mod findings;
mod network;
mod parts;

use std::path::{Path, PathBuf};

use anyhow::Result;
use millrace_home::check::{self, Problem, Severity};
use millrace_home::settings::{check_size, from_folder};
use millrace_leaf::bounded_file;
use millrace_trainer::job::{JobFile, ModelSource};
use serde_json::json;
use toml::de::DeTable;

use self::findings::Findings;
use crate::failure::{Exit, fail};
use crate::output::{Output, printable};
use crate::settings::{self, LoadedSettings, Settings};

/// Longest file that is checked, in bytes: a longer one is told as such.
const FILE_BYTES_MAX: u64 = millrace_home::settings::FILE_BYTES_MAX as u64;
/// Most problems that are printed.
const REPORTED_MAX: usize = 60;

/// Keys at the top of job files, and of no configuration file.
const JOB_KEYS: [&str; 3] = ["dataset", "model", "loss"];

/// Runs the command on the named file, or on the one that other commands read. `root` is the home.
pub(crate) async fn run(out: Output, named: Option<&Path>, root: &Path) -> Result<()> {
    let Some(path) = named.map(Path::to_owned).or_else(|| usual(root)) else {
        return fail(
            Exit::NotFound,
            format!("config check: no millrace.toml here or in {}; name a file", root.display()),
        );
    };
    let text = text_of(&path)?;
    let is_job = is_job(&text);
    let mut problems =
        if is_job { of_job(&path, &text) } else { of_configuration(&path, &text, root).await? };
    check::sort(&mut problems);
    let errors = problems.iter().filter(|problem| problem.severity == Severity::Error).count();
    let warnings = problems.len() - errors;
    let more = problems.len().saturating_sub(REPORTED_MAX);
    // Errors before warnings, where not all are printed.
    if more > 0 {
        problems.sort_by_key(|problem| problem.severity == Severity::Warning);
        problems.truncate(REPORTED_MAX);
        check::sort(&mut problems);
    }
    if out.is_json() {
        let kind = if is_job { "job" } else { "configuration" };
        out.object(&json!({ "file": path, "kind": kind, "errors": errors, "warnings": warnings,
            "problems": problems, "more": more }))?;
    } else {
        for problem in &problems {
            out.text(&line(&path, problem))?;
        }
        if more > 0 {
            out.text(&format!("{}: and {more} more", path.display()))?;
        }
    }
    match errors {
        0 => out.text(&format!("{}: no errors, {}", path.display(), counted(warnings, "warning"))),
        errors => fail(Exit::Usage, format!("config check {}: {}", path.display(), counted(errors, "error"))),
    }
}

fn counted(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

/// The configuration file that the other commands read.
fn usual(root: &Path) -> Option<PathBuf> {
    [PathBuf::from("millrace.toml"), root.join("millrace.toml")].into_iter().find(|path| path.is_file())
}

/// The text of the file.
fn text_of(path: &Path) -> Result<String> {
    match bounded_file::read_text(path, FILE_BYTES_MAX) {
        Ok(text) => Ok(text),
        Err(error) => {
            let missing = error.kind() == std::io::ErrorKind::NotFound;
            let exit = if missing { Exit::NotFound } else { Exit::Usage };
            fail(exit, format!("config check {}: cannot read the file: {error}", path.display()))
        }
    }
}

/// Whether a text is a job file rather than a configuration file.
fn is_job(text: &str) -> bool {
    if check_size(text).is_err() {
        return false;
    }
    let (table, _) = DeTable::parse_recoverable(text);
    table.get_ref().keys().any(|key| JOB_KEYS.contains(&key.get_ref().as_ref()))
}

/// One line for people, in the form that editors jump to.
fn line(path: &Path, problem: &Problem) -> String {
    let place = match (problem.line, problem.column) {
        (Some(line), Some(column)) => format!("{}:{line}:{column}", path.display()),
        _ => path.display().to_string(),
    };
    let severity = match problem.severity {
        Severity::Error => "error",
        Severity::Warning => "warning",
    };
    let key = problem.key.as_ref().map_or_else(String::new, |key| format!("{key}: "));
    printable(&format!("{place}: {severity}: {key}{}", problem.message))
}

/// The problems of a job file.
fn of_job(path: &Path, text: &str) -> Vec<Problem> {
    let checked = check::read_verified::<JobFile>(text, |job| job.complete(text));
    let mut findings = Findings::new(checked.places, checked.problems);
    if let Some(JobFile { model: ModelSource::File(model), .. }) = &checked.settings {
        let model = path.parent().map_or_else(|| model.clone(), |folder| folder.join(model));
        if !model.is_file() {
            let message = format!("the model {} is not a file; correct the path", model.display());
            findings.error("model", message);
        }
    }
    if findings.is_sound() {
        match JobFile::of_file(path, text) {
            Ok(_) => {}
            Err(millrace_trainer::Error::JobFile { reason, .. }) => findings.message("", &reason),
            Err(error) => findings.cause("", &error),
        }
    }
    findings.problems
}

/// The problems of a configuration file: first those of keys and types, then those of what is left.
async fn of_configuration(path: &Path, text: &str, root: &Path) -> Result<Vec<Problem>> {
    let checked = check::read::<Settings>(text);
    let mut findings = Findings::new(checked.places, checked.problems);
    let Some(settings) = checked.settings else { return Ok(findings.problems) };
    let file = std::path::absolute(path)?;
    let settings = match file.parent() {
        Some(folder) => from_folder(settings, folder)?,
        None => settings,
    };
    let loaded = LoadedSettings { settings, file: Some(file) };
    parts::volumes(&mut findings, &loaded, root);
    parts::topics(&mut findings, &loaded);
    parts::ingest(&mut findings, &loaded);
    parts::trainer(&mut findings, &loaded);
    parts::serving(&mut findings, &loaded).await;
    parts::feed(&mut findings, &loaded).await;
    parts::service(&mut findings, &loaded);
    network::addresses(&mut findings, &loaded.settings);
    network::cluster(&mut findings, &loaded.settings);
    // Variables are checked last: their errors have no lines.
    if findings.is_sound()
        && let Err(error) = settings::load(Some(path), root)
    {
        let message = crate::output::one_line(&error);
        findings.problems.push(Problem::new(None, None, message));
    }
    Ok(findings.problems)
}
