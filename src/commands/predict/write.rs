//! Output of `millrace predict`: a table for people, one JSON object, JSON lines, or Parquet.

use std::collections::BTreeSet;
use std::fs::{File, Permissions};
use std::io::{BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use millrace_serving::record::{RowOutputs, row_outputs};
use millrace_serving::tensor::Tensor;
use serde_json::{Map, Value, json};
use tempfile::TempPath;

use super::columns::Columns;
use crate::context::Context;
use crate::failure::{Exit, fail};
use crate::inference::{Accuracy, Answer, RecordInfo};
use crate::output::{count, printable};

/// Predictions shown to people; programs get all.
const SHOWN: usize = 10;
/// Elements of an output that are shown to people.
const ELEMENTS_SHOWN: usize = 4;
/// Most predictions of one JSON object: it is built in memory before it is printed.
const OBJECT_MAX: usize = 1_000_000;
/// Most versions that are kept: a server could send a new one with each answer.
const VERSIONS_MAX: usize = 100;

/// The predictions so far.
pub(super) struct Predictions {
    out: Sink,
    accuracy: Accuracy,
    labelled: bool,
    predicted: u64,
    versions: Versions,
}

/// The versions that answered, in order of their numbers, at most [`VERSIONS_MAX`]. A split has several.
#[derive(Debug, Default)]
struct Versions {
    /// Each with its length: numbers without leading zeros are in order by length and text.
    found: BTreeSet<(usize, String)>,
}

enum Sink {
    /// The first ones, for people.
    Table(Vec<Vec<String>>),
    /// All of them, for programs.
    Object(Vec<Value>),
    /// One JSON object per line, to standard output.
    Lines,
    /// One JSON object per line, to a file.
    LinesFile(BufWriter<File>, TempFile),
    Parquet(Box<Columns>, TempFile),
}

/// A temporary file that gets its name once it is complete.
struct TempFile {
    written: TempPath,
    name: PathBuf,
}

impl Predictions {
    /// Writes to a file, to standard output for `-`, or without a name as tables or JSON. The file name
    /// determines the format.
    pub(super) fn new(context: &Context, output: Option<&Path>, labelled: bool) -> Result<Predictions> {
        let extension = output.and_then(Path::extension).and_then(|extension| extension.to_str());
        let out = match (output, extension) {
            (None, _) if context.out.is_json() => Sink::Object(Vec::new()),
            (None, _) => Sink::Table(Vec::new()),
            (Some(path), _) if path == Path::new("-") => Sink::Lines,
            (Some(path), Some("parquet")) => {
                let (file, whole) = TempFile::create(path)?;
                Sink::Parquet(Box::new(Columns::new(file, labelled)), whole)
            }
            (Some(path), Some("jsonl" | "ndjson")) => {
                let (file, whole) = TempFile::create(path)?;
                Sink::LinesFile(BufWriter::new(file), whole)
            }
            (Some(path), _) => {
                let message = format!(
                    "--output {}: the name ends in .parquet or .jsonl, or is - for JSON lines on standard output",
                    path.display()
                );
                return fail(Exit::Usage, message);
            }
        };
        let (accuracy, versions) = (Accuracy::default(), Versions::default());
        Ok(Predictions { out, accuracy, labelled, predicted: 0, versions })
    }

    /// Adds an answer; false once the reader of standard output has closed it.
    pub(super) fn add(&mut self, context: &Context, answer: &Answer) -> Result<bool> {
        let outputs = &answer.prediction.outputs;
        let rows = answer.known.len();
        if let Sink::Parquet(columns, _) = &mut self.out {
            columns.write(answer)?;
        }
        for (row, known) in answer.known.iter().enumerate() {
            let number = self.predicted + row as u64 + 1;
            let shown = matches!(&self.out, Sink::Table(shown) if shown.len() < SHOWN);
            let whole = matches!(self.out, Sink::Object(_) | Sink::Lines | Sink::LinesFile(..));
            if !shown && !whole && known.label.is_none() {
                continue;
            }
            let one = row_outputs(outputs, row, rows)?;
            self.accuracy.count(answer.class(&one.argmax), known.label);
            match &mut self.out {
                Sink::Table(lines) if shown => lines.push(self::line(number, outputs, &one, known)),
                Sink::Object(predictions) if predictions.len() == OBJECT_MAX => {
                    let message = format!(
                        "more than {} predictions for one JSON object: write them with --output FILE.parquet, FILE.jsonl or -",
                        count(OBJECT_MAX as u64)
                    );
                    return fail(Exit::Usage, message);
                }
                Sink::Object(predictions) => predictions.push(object(one, known)),
                Sink::Lines => {
                    if !context.out.partial(&object(one, known).to_string())? {
                        return Ok(false);
                    }
                }
                Sink::LinesFile(file, whole) => {
                    writeln!(file, "{}", object(one, known)).with_context(|| whole.unwritable())?;
                }
                Sink::Table(_) | Sink::Parquet(..) => {}
            }
        }
        self.predicted += rows as u64;
        self.versions.add(&answer.prediction.version);
        Ok(true)
    }

    /// Completes the file, or shows the kept predictions.
    pub(super) fn finish(self, context: &Context, model: &str, seconds: f64) -> Result<()> {
        let mut summary = json!({
            "model": model, "version": self.versions.only(), "versions": self.versions.all(),
            "predicted": self.predicted,
            "accuracy": self.accuracy.value(), "seconds": seconds,
        });
        let right =
            self.accuracy.value().map_or(String::new(), |accuracy| format!(", accuracy {accuracy:.4}"));
        let said = |more: &str| {
            let records = count(self.predicted);
            let versions = self.versions.text();
            format!("{records} predicted by {model}{versions} in {seconds:.2} s{right}{more}")
        };
        match self.out {
            Sink::Object(predictions) => {
                summary["predictions"] = Value::Array(predictions);
                context.out.object(&summary)
            }
            Sink::Table(lines) => {
                let more = if self.predicted > lines.len() as u64 {
                    format!(" (the first {SHOWN} are shown, --json and --output give all)")
                } else {
                    String::new()
                };
                let headers: &[&str] = if self.labelled {
                    &["record", "output", "largest", "label"]
                } else {
                    &["record", "output", "largest"]
                };
                context.out.table(&(), headers, lines.into_iter().flat_map(rows))?;
                context.out.text(&said(&more))
            }
            // Standard output holds only the predictions.
            Sink::Lines => Ok(()),
            Sink::LinesFile(mut file, whole) => {
                file.flush().with_context(|| whole.unwritable())?;
                drop(file);
                let name = whole.persist()?;
                context.out.table(&summary, &[], [vec![said(&format!(", written to {name}"))]])
            }
            Sink::Parquet(columns, whole) => {
                columns.finish()?;
                let name = whole.persist()?;
                context.out.table(&summary, &[], [vec![said(&format!(", written to {name}"))]])
            }
        }
    }
}

impl Versions {
    /// Notes the version of an answer; servers may send none.
    fn add(&mut self, version: &str) {
        let is_last = self.found.last().is_some_and(|(_, last)| last == version);
        if !is_last && !version.is_empty() && self.found.len() < VERSIONS_MAX {
            self.found.insert((version.len(), version.to_owned()));
        }
    }

    /// All of them.
    fn all(&self) -> Vec<&str> {
        self.found.iter().map(|(_, version)| version.as_str()).collect()
    }

    /// The version of all answers; `None` if several versions answered, or the server named none.
    fn only(&self) -> Option<&str> {
        match self.all()[..] {
            [only] => Some(only),
            _ => None,
        }
    }

    /// For people, with a leading space: ` version 2`, ` versions 1, 2`, or nothing.
    fn text(&self) -> String {
        match (self.only(), self.found.is_empty()) {
            (Some(only), _) => format!(" version {}", printable(only)),
            (None, true) => String::new(),
            (None, false) => format!(" versions {}", printable(&self.all().join(", "))),
        }
    }
}

impl TempFile {
    /// Creates a temporary file beside `name`. [`TempFile::persist`] renames it; otherwise it is deleted.
    fn create(name: &Path) -> Result<(File, TempFile)> {
        let folder = name.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let made = tempfile::Builder::new()
            .prefix(".predict-")
            // The usual mode of a new file; temporary files are private by default.
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(folder)
            .with_context(|| format!("cannot write {}", name.display()))?;
        let (file, written) = made.into_parts();
        Ok((file, TempFile { written, name: name.to_owned() }))
    }

    fn unwritable(&self) -> String {
        format!("cannot write {}", self.name.display())
    }

    /// Renames the file to its final name, which it returns.
    fn persist(self) -> Result<String> {
        let unwritable = self.unwritable();
        self.written.persist(&self.name).with_context(|| unwritable)?;
        Ok(self.name.display().to_string())
    }
}

/// A prediction as JSON.
fn object(one: RowOutputs, known: &RecordInfo) -> Value {
    let mut object = Map::from_iter([
        ("outputs".to_owned(), Value::Object(one.outputs)),
        ("argmax".to_owned(), json!(one.argmax)),
    ]);
    if let Some(label) = known.label {
        object.insert("label".to_owned(), label.into());
    }
    if let Some(file) = &known.file {
        object.insert("file".to_owned(), file.as_str().into());
    }
    Value::Object(object)
}

/// A prediction as the cells of a table, with a line for each output: the record's number or file, and each output
/// with its first elements and the index of its largest.
fn line(number: u64, outputs: &[Tensor], one: &RowOutputs, known: &RecordInfo) -> Vec<String> {
    let elements = |values: &[Value]| {
        let first: Vec<String> = values.iter().take(ELEMENTS_SHOWN).map(element).collect();
        let more = values.len().saturating_sub(ELEMENTS_SHOWN);
        if more > 0 { format!("{}, … {more} more", first.join(", ")) } else { first.join(", ") }
    };
    let shown = outputs.iter().filter_map(|output| {
        let values = one.outputs.get(&output.name)?.as_array()?;
        Some(format!("{}: {}", printable(&output.name), elements(values)))
    });
    let largest = outputs.iter().filter_map(|output| {
        let at = *one.argmax.get(&output.name)?;
        let value = one.outputs.get(&output.name)?.get(at).map(element)?;
        Some(format!("{at} ({value})"))
    });
    let mut cells = vec![
        known.file.as_deref().map_or_else(|| number.to_string(), printable),
        shown.collect::<Vec<_>>().join("\n"),
        largest.collect::<Vec<_>>().join("\n"),
    ];
    cells.extend(known.label.map(|label| label.to_string()));
    cells
}

/// The rows of a table for the lines of a prediction's cells.
fn rows(cells: Vec<String>) -> Vec<Vec<String>> {
    let height = cells.iter().map(|cell| cell.lines().count()).max().unwrap_or_default();
    let row = |at| cells.iter().map(|cell| cell.lines().nth(at).unwrap_or_default().to_owned()).collect();
    (0..height).map(row).collect()
}

/// Formats an element: text in quotes and shortened, floats with four digits after the point.
fn element(value: &Value) -> String {
    match value {
        Value::Number(number) if number.is_f64() => {
            let value = number.as_f64().unwrap_or(f64::NAN);
            let far = value != 0.0 && (value.abs() < 1e-3 || value.abs() >= 1e9);
            if far { format!("{value:.4e}") } else { format!("{value:.4}") }
        }
        Value::String(text) if text.chars().count() > 40 => {
            format!("{:?}…", text.chars().take(40).collect::<String>())
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn versions<'a>(answers: impl IntoIterator<Item = &'a str>) -> Versions {
        let mut versions = Versions::default();
        answers.into_iter().for_each(|version| versions.add(version));
        versions
    }

    #[test]
    fn versions_of_a_split_are_all_named_in_order() {
        let one = versions(["2", "2"]);
        assert_eq!((one.only(), one.text().as_str()), (Some("2"), " version 2"));
        let several = versions(["10", "9", "10", "9", "1"]);
        assert_eq!((several.only(), several.all()), (None, vec!["1", "9", "10"]));
        assert_eq!(several.text(), " versions 1, 9, 10");
        let none = versions(["", ""]);
        assert_eq!((none.only(), none.all().len(), none.text().as_str()), (None, 0, ""));
    }

    #[test]
    fn versions_of_a_hostile_server_are_bounded() {
        let many: Vec<String> = (0..1000).map(|version| version.to_string()).collect();
        assert_eq!(versions(many.iter().map(String::as_str)).all().len(), VERSIONS_MAX);
    }
}
