//! Record input of `millrace predict`: JSON lines, JSON documents, CSV, Parquet, images. Every error names
//! the file and the position in it.

use std::io::{BufRead, Read};

use anyhow::{Context as _, Result};
use arrow::array::RecordBatch;
use arrow::datatypes::DataType;
use millrace_serving::record::{self, Document, Row};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Map, Value};

use super::pixels::ImageConversion;
use super::source::{Content, Source};
use crate::cli::RecordFormat;
use crate::commands::produce::BYTE_ORDER_MARK;
use crate::failure::{Exit, fail};
use crate::inference::{Batch, Intake, RecordInfo};
use crate::json_rows;

/// Longest line of JSON, in bytes.
const LINE_BYTES_MAX: u64 = 16 << 20;
/// Largest JSON document, in bytes: it is held in memory.
const DOCUMENT_BYTES_MAX: u64 = 1 << 30;
/// Fields that an error names.
const FIELDS_SHOWN: usize = 20;
/// Rows of a Parquet file decoded at a time.
const PARQUET_ROWS: usize = 1024;

/// The conversion of records.
pub(super) struct RecordConversion {
    /// The model's inputs.
    pub(super) intake: Intake,
    /// The field with the true class, if any.
    pub(super) label: Option<String>,
    /// The conversion of images, if the records are images.
    pub(super) images: Option<ImageConversion>,
}

impl RecordConversion {
    /// The option that names a required field.
    fn option_of(&self, field: &str) -> &'static str {
        let is_input = self.intake.inputs().any(|(_, fields)| fields.iter().any(|name| name == field));
        if is_input { "--input" } else { "--label" }
    }
}

/// Reads all records as model inputs. `send` gets them in batches and returns false when the receiver wants
/// no more.
pub(super) fn all(
    sources: Vec<Source>,
    conversion: &RecordConversion,
    send: impl FnMut(Batch) -> bool,
) -> Result<()> {
    let mut records = Records { conversion, send, pending: Batch::new(), read: 0, receiver_closed: false };
    for source in sources {
        match source.format {
            RecordFormat::Jsonl => source.lines(&mut records)?,
            RecordFormat::Json => source.document(&mut records)?,
            RecordFormat::Csv => source.csv(&mut records)?,
            RecordFormat::Parquet => source.parquet(&mut records)?,
            RecordFormat::Image => source.image(&mut records)?,
        }
        if records.receiver_closed {
            break;
        }
    }
    if records.read == 0 {
        return fail(Exit::Usage, "there are no records to predict");
    }
    records.flush(true);
    Ok(())
}

impl Source {
    fn lines<S: FnMut(Batch) -> bool>(mut self, records: &mut Records<'_, S>) -> Result<()> {
        let mut source = self.reader()?;
        let mut line = Vec::new();
        for number in 1_u64.. {
            line.clear();
            let read = (&mut source).take(LINE_BYTES_MAX + 1).read_until(b'\n', &mut line);
            if read.with_context(|| format!("cannot read {}", self.name))? == 0 || records.receiver_closed {
                break;
            }
            let place = || format!("{} line {number}", self.name);
            if line.len() as u64 > LINE_BYTES_MAX {
                return fail(Exit::Usage, format!("{} is longer than {LINE_BYTES_MAX} bytes", place()));
            }
            let text = without_mark(&line, number == 1);
            if text.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            match record::parse(text) {
                Ok(value) => records.take(value, place)?,
                Err(error) => return fail(Exit::Usage, format!("{}: {error}", place())),
            }
        }
        Ok(())
    }

    fn document<S: FnMut(Batch) -> bool>(mut self, records: &mut Records<'_, S>) -> Result<()> {
        let mut text = Vec::new();
        let read = self.reader()?.take(DOCUMENT_BYTES_MAX + 1).read_to_end(&mut text);
        if read.with_context(|| format!("cannot read {}", self.name))? as u64 > DOCUMENT_BYTES_MAX {
            let message = format!(
                "{} is larger than {DOCUMENT_BYTES_MAX} bytes: write one record per line (JSON lines)",
                self.name
            );
            return fail(Exit::Usage, message);
        }
        let name = &self.name;
        match record::parse_document(without_mark(&text, true)) {
            Ok(Document::Records(rows)) => {
                for (row, value) in rows.into_iter().enumerate() {
                    records.take(value, || format!("{name} record {}", row + 1))?;
                }
                Ok(())
            }
            Ok(Document::Columns(columns)) => {
                let conversion = records.conversion;
                let rows = rows_of(name, columns, &records.fields(), |field| conversion.option_of(field))?;
                for (row, record) in rows.into_iter().enumerate() {
                    records.take(record, || format!("{name} entry {} of each column", row + 1))?;
                }
                Ok(())
            }
            Err(error) => fail(Exit::Usage, format!("{name}: {error}")),
        }
    }

    fn parquet<S: FnMut(Batch) -> bool>(self, records: &mut Records<'_, S>) -> Result<()> {
        let name = &self.name;
        let Content::Open(file) = self.content else {
            return fail(Exit::Usage, "Parquet cannot be read from standard input: name a file");
        };
        let unreadable = |error: &dyn std::fmt::Display| format!("{name} cannot be read as Parquet: {error}");
        let builder = match ParquetRecordBatchReaderBuilder::try_new(file) {
            Ok(builder) => builder,
            Err(error) => return fail(Exit::Corrupt, unreadable(&error)),
        };
        let schema = builder.schema().clone();
        let mut roots = Vec::new();
        for field in records.fields() {
            if schema.fields().iter().filter(|found| found.name() == field).count() > 1 {
                let message = format!("{name} has two columns {field:?}: rename one");
                return fail(Exit::Usage, message);
            }
            let Some((index, found)) = schema.column_with_name(field) else {
                let names: Vec<&str> = schema.fields().iter().map(|field| field.name().as_str()).collect();
                let option = records.conversion.option_of(field);
                let message = format!(
                    "{name} has no column {field:?} ({option} names it); it has {}",
                    names.join(", ")
                );
                return fail(Exit::Usage, message);
            };
            if !is_readable(found.data_type()) {
                let message = format!(
                    "{name}: column {field:?} holds {}, numbers, booleans, texts or lists of them are expected",
                    found.data_type()
                );
                return fail(Exit::Usage, message);
            }
            roots.push(index);
        }
        let projection = ProjectionMask::roots(builder.parquet_schema(), roots);
        let batches = builder.with_projection(projection).with_batch_size(PARQUET_ROWS).build();
        let mut row = 0;
        for batch in batches.with_context(|| format!("cannot read {name}"))? {
            let batch = match batch {
                Ok(batch) => batch,
                Err(error) => return fail(Exit::Corrupt, unreadable(&error)),
            };
            for record in json(&batch)? {
                row += 1;
                records.take(record, || format!("{name} row {row}"))?;
            }
            if records.receiver_closed {
                break;
            }
        }
        Ok(())
    }
}

/// Collects records into batches and sends them.
pub(super) struct Records<'a, S> {
    pub(super) conversion: &'a RecordConversion,
    send: S,
    pending: Batch,
    read: u64,
    /// The receiver wants no more records.
    pub(super) receiver_closed: bool,
}

impl<'a, S: FnMut(Batch) -> bool> Records<'a, S> {
    /// The required fields.
    fn fields(&self) -> Vec<&'a str> {
        let mut fields: Vec<&str> = self
            .conversion
            .intake
            .inputs()
            .flat_map(|(_, fields)| fields)
            .map(String::as_str)
            .chain(self.conversion.label.as_deref())
            .collect();
        fields.sort_unstable();
        fields.dedup();
        fields
    }

    fn take(&mut self, record: Map<String, Value>, place: impl Fn() -> String) -> Result<()> {
        let wrong = |reason: &dyn std::fmt::Display| fail(Exit::Usage, format!("{}: {reason}", place()));
        let row = match self.conversion.intake.row(&record) {
            Ok(row) => row,
            Err(error) => return wrong(&format!("{error} (--input names the field of an input)")),
        };
        let label = match &self.conversion.label {
            None => None,
            Some(field) if !record.contains_key(field) => {
                let names: Vec<&str> = record.keys().take(FIELDS_SHOWN).map(String::as_str).collect();
                let names = names.join(", ");
                return wrong(&format!(
                    "the record has no field {field:?} (--label names it); it has {names}"
                ));
            }
            Some(field) => match record.get(field).and_then(Value::as_i64) {
                Some(label) => Some(label),
                None => {
                    return wrong(&format!(
                        "field {field:?} holds no class number (--label names it; of a text, the number is its place in \
                         the model's labels.json, from 0)"
                    ));
                }
            },
        };
        self.push(row, RecordInfo { label, file: None });
        Ok(())
    }

    /// Adds a converted record.
    pub(super) fn push(&mut self, row: Row, known: RecordInfo) {
        self.pending.push(row, known);
        self.read += 1;
        self.flush(false);
    }

    fn flush(&mut self, all: bool) {
        for batch in self.conversion.intake.batches(&mut self.pending, all) {
            self.receiver_closed = self.receiver_closed || !(self.send)(batch);
        }
    }
}

/// Turns columns into records: each column is a list with one entry per record. `option_of` gives the option
/// that names a field.
fn rows_of(
    name: &str,
    mut columns: Map<String, Value>,
    fields: &[&str],
    option_of: impl Fn(&str) -> &'static str,
) -> Result<Vec<Map<String, Value>>> {
    let mut rows: Vec<Map<String, Value>> = Vec::new();
    let mut first: Option<(&str, usize)> = None;
    for &field in fields {
        let entries = match columns.remove(field) {
            Some(Value::Array(entries)) => entries,
            Some(_) => {
                let message = format!("{name}: column {field:?} is no list with an entry for each record");
                return fail(Exit::Usage, message);
            }
            None => {
                let names: Vec<String> = columns.keys().take(FIELDS_SHOWN).cloned().collect();
                let (option, names) = (option_of(field), names.join(", "));
                let message = format!("{name} has no column {field:?} ({option} names it); it has {names}");
                return fail(Exit::Usage, message);
            }
        };
        let (other, expected) = *first.get_or_insert((field, entries.len()));
        if entries.len() != expected {
            let message = format!(
                "{name}: column {field:?} has {} entries, column {other:?} has {expected}",
                entries.len()
            );
            return fail(Exit::Usage, message);
        }
        rows.resize_with(entries.len(), Map::new);
        for (row, entry) in rows.iter_mut().zip(entries) {
            row.insert(field.to_owned(), entry);
        }
    }
    Ok(rows)
}

/// Whether JSON represents the column's values without change.
fn is_readable(column: &DataType) -> bool {
    match column {
        DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => {
            is_readable(item.data_type())
        }
        DataType::Dictionary(_, values) => is_readable(values),
        DataType::Boolean | DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => true,
        other => other.is_integer() || other.is_floating(),
    }
}

/// The text without the byte order mark that some programs write at its start.
fn without_mark(text: &[u8], at_start: bool) -> &[u8] {
    if at_start { text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text) } else { text }
}

/// Rows as JSON objects; null values stay as null.
fn json(batch: &RecordBatch) -> Result<Vec<Map<String, Value>>> {
    let text = json_rows::lines(batch, true)?;
    let rows = serde_json::Deserializer::from_slice(&text).into_iter();
    Ok(rows.collect::<Result<_, _>>()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn columns_become_records() {
        let columns = |value: Value| value.as_object().unwrap().clone();
        let given = columns(json!({ "a": [[1, 2], [3, 4]], "b": ["x", "y"], "unused": 7 }));
        let option_of = |field: &str| if field == "a" { "--input" } else { "--label" };
        let rows = rows_of("f", given, &["a", "b"], option_of).unwrap();
        assert_eq!(json!(rows), json!([{ "a": [1, 2], "b": "x" }, { "a": [3, 4], "b": "y" }]));
        for (value, says) in [
            (json!({ "a": [1], "b": [] }), "column \"b\" has 0 entries, column \"a\" has 1"),
            (json!({ "a": [1], "b": 2 }), "column \"b\" is no list"),
            (json!({ "a": [1], "c": [2] }), "no column \"b\" (--label names it); it has c"),
        ] {
            let refused = rows_of("f", columns(value), &["a", "b"], option_of).unwrap_err().to_string();
            assert!(refused.contains(says), "{refused}");
        }
    }
}
