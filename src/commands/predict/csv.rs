//! CSV input of `millrace predict`: reads rows one by one and parses each cell as the type of its input.
//! Errors name the line and the column.

use std::fmt::Display;
use std::io::{self, BufRead, Read};
use std::ops::Range;
use std::str::FromStr;

use anyhow::{Context as _, Result};
use bytes::Bytes;
use csv::{ByteRecord, ErrorKind, Reader, ReaderBuilder, Trim};
use millrace_bundle::{Datatype, TensorSpec};
use millrace_leaf::quoting;
use millrace_serving::record::input;
use millrace_serving::tensor::Data;
use serde_json::Value;

use super::read::Records;
use super::source::Source;
use crate::failure::{Exit, fail};
use crate::inference::{Batch, RecordInfo};

/// Longest row, in bytes: an unclosed quote turns the rest of the file into one row.
const ROW_BYTES_MAX: usize = 16 << 20;
/// Columns listed in an error, and characters shown of each.
const COLUMNS_SHOWN: usize = 20;
const NAME_SHOWN: usize = 40;

impl Source {
    /// Reads the rows below the header; each is a record.
    pub(super) fn csv<S: FnMut(Batch) -> bool>(mut self, records: &mut Records<'_, S>) -> Result<()> {
        let mut rows = Rows::new(self.reader()?);
        let name = self.name;
        let header = rows.header(&name)?;
        let unknown = |reason: String| fail(Exit::Usage, format!("{name} {reason}"));
        let conversion = records.conversion;
        let mut inputs = Vec::new();
        for (spec, fields) in conversion.intake.inputs() {
            let ranges = fields.iter().map(|field| header.range(field)).collect::<Result<Vec<_>, _>>();
            match ranges {
                Ok(ranges) => inputs.push((spec, ranges.into_iter().flatten().collect::<Vec<_>>())),
                Err(reason) => return unknown(reason),
            }
        }
        let label = match conversion.label.as_deref().map(|field| header.column(field, "--label")).transpose()
        {
            Ok(label) => label,
            Err(reason) => return unknown(reason),
        };
        let mut row = ByteRecord::new();
        while !records.receiver_closed && rows.next(&name, &mut row)? {
            let read = || -> Result<_, String> {
                let elements = inputs.iter().map(|(spec, columns)| header.elements(spec, columns, &row));
                let elements = elements.collect::<Result<Vec<_>, _>>()?;
                let inputs = conversion.intake.row_of(elements).map_err(|error| error.to_string())?;
                let label = label.map(|column| header.cell(column, &row).class()).transpose()?;
                Ok((inputs, label))
            };
            match read() {
                Ok((inputs, label)) => records.push(inputs, RecordInfo { label, file: None }),
                Err(reason) => {
                    return fail(Exit::Usage, format!("{name} line {}: {reason}", rows.line(&row)));
                }
            }
        }
        Ok(())
    }
}

/// The names of the columns.
struct Header(Vec<String>);

impl Header {
    /// The index of a column, which `option` names.
    fn column(&self, field: &str, option: &str) -> Result<usize, String> {
        let mut found = self.0.iter().enumerate().filter(|(_, name)| *name == field);
        match (found.next(), found.next()) {
            (Some((column, _)), None) => Ok(column),
            (Some(_), Some(_)) => Err(format!("has two columns {field:?}: rename one")),
            (None, _) => {
                let names = self.0.iter().take(COLUMNS_SHOWN);
                let names: Vec<String> = names.map(|name| quoting::shorten(name, NAME_SHOWN)).collect();
                Err(format!("has no column {field:?} ({option} names it); it has {}", names.join(", ")))
            }
        }
    }

    /// The indexes of the columns that feed an input: one column, or `FIRST..LAST`.
    fn range(&self, field: &str) -> Result<Range<usize>, String> {
        let ends = field.split_once("..").filter(|_| !self.0.iter().any(|name| name == field));
        let Some((first, last)) = ends else {
            let column = self.column(field, "--input")?;
            return Ok(column..column + 1);
        };
        let (start, end) = (self.column(first, "--input")?, self.column(last, "--input")?);
        if start > end {
            return Err(format!("has column {first:?} after column {last:?}: write {last}..{first}"));
        }
        Ok(start..end + 1)
    }

    fn cell<'a>(&'a self, column: usize, row: &'a ByteRecord) -> Cell<'a> {
        let name = self.0.get(column).map_or("", String::as_str);
        Cell { column: name, content: row.get(column).unwrap_or_default() }
    }

    /// A row's values for an input: shape without the batch dimension, and elements.
    fn elements(
        &self,
        spec: &TensorSpec,
        columns: &[usize],
        row: &ByteRecord,
    ) -> Result<(Vec<i64>, Data), String> {
        let cells: Vec<Cell<'_>> = columns.iter().map(|column| self.cell(*column, row)).collect();
        let declared = spec.shape.get(1..).unwrap_or_default();
        let fits = shape(declared, cells.len());
        if let [cell] = &cells[..]
            && (fits.is_none() || declared.contains(&-1))
            && let Some(list) = match cell.list() {
                // A text may begin with a bracket.
                Err(_) if spec.datatype == Datatype::Bytes && fits.is_some() => None,
                list => list?,
            }
        {
            return input(spec, cell.column, &list).map_err(|error| error.to_string());
        }
        match (fits, &cells[..]) {
            (Some(shape), cells) => Ok((shape, data(spec.datatype, cells)?)),
            (None, [cell]) => Err(cell.error(&format_args!(
                "it is one value, the input takes shape {declared:?}: write a JSON list, or name several columns \
                 with --input {}=FIRST..LAST",
                spec.name
            ))),
            (None, cells) => Err(format!(
                "{} columns for input {:?}, which takes shape {declared:?}",
                cells.len(),
                spec.name
            )),
        }
    }
}

/// A shape of `count` elements that matches the declared one, of which one dimension may be open.
fn shape(declared: &[i64], count: usize) -> Option<Vec<i64>> {
    let count = i64::try_from(count).ok()?;
    let mut known = declared.iter().filter(|extent| **extent >= 0);
    let known = known.try_fold(1i64, |product, extent| product.checked_mul(*extent))?;
    let open = match declared.iter().filter(|extent| **extent < 0).count() {
        0 if known == count => 1,
        1 if known > 0 && count % known == 0 => count / known,
        _ => return None,
    };
    Some(declared.iter().map(|extent| if *extent < 0 { open } else { *extent }).collect())
}

/// Parses elements of a type, one per cell.
fn data(datatype: Datatype, cells: &[Cell<'_>]) -> Result<Data, String> {
    macro_rules! read {
        ($kind:ident, $one:ident) => {
            Data::$kind(cells.iter().map(|cell| cell.$one(datatype)).collect::<Result<_, _>>()?)
        };
    }
    Ok(match datatype {
        Datatype::Bool => read!(Bool, boolean),
        Datatype::Uint8 => read!(Uint8, number),
        Datatype::Uint16 => read!(Uint16, number),
        Datatype::Uint32 => read!(Uint32, number),
        Datatype::Uint64 => read!(Uint64, number),
        Datatype::Int8 => read!(Int8, number),
        Datatype::Int16 => read!(Int16, number),
        Datatype::Int32 => read!(Int32, number),
        Datatype::Int64 => read!(Int64, number),
        Datatype::Fp16 => read!(Fp16, float),
        Datatype::Bf16 => read!(Bf16, float),
        Datatype::Fp32 => read!(Fp32, float),
        Datatype::Fp64 => read!(Fp64, float),
        Datatype::Bytes => {
            Data::Bytes(cells.iter().map(|cell| Bytes::copy_from_slice(cell.content)).collect())
        }
    })
}

/// A cell and the name of its column.
struct Cell<'a> {
    column: &'a str,
    content: &'a [u8],
}

impl<'a> Cell<'a> {
    fn error(&self, reason: &dyn Display) -> String {
        format!("column {:?}: {reason}", self.column)
    }

    /// The text without surrounding spaces; an error if it is empty.
    fn text(&self, expected: &dyn Display) -> Result<&'a str, String> {
        match std::str::from_utf8(self.content).map(str::trim) {
            Ok("") => Err(self.error(&format_args!("it is empty, {expected} is expected"))),
            Ok(text) => Ok(text),
            Err(_) => Err(self.error(&"it is not UTF-8")),
        }
    }

    fn not_a_value(&self, text: &str, expected: &dyn Display) -> String {
        let start = quoting::shorten(text, NAME_SHOWN);
        self.error(&format_args!("{start:?} is not a valid {expected}"))
    }

    fn number<T: FromStr>(&self, datatype: Datatype) -> Result<T, String> {
        let text = self.text(&datatype)?;
        text.parse().map_err(|_| self.not_a_value(text, &datatype))
    }

    /// Parses a float; rejects numbers that are too large for its type.
    fn float<T: FromStr>(&self, datatype: Datatype) -> Result<T, String> {
        let text = self.text(&format_args!("{datatype} (nan where a value is missing)"))?;
        // From here on, a value is rounded to infinity.
        let beyond = match datatype {
            Datatype::Fp16 => 65_520.0,
            Datatype::Bf16 => 2f64.powi(128) - 2f64.powi(119),
            Datatype::Fp32 => 2f64.powi(128) - 2f64.powi(103),
            _ => f64::INFINITY,
        };
        let value: f64 = text.parse().map_err(|_| self.not_a_value(text, &datatype))?;
        // Text without digits names infinity.
        if value.abs() >= beyond && text.contains(|c: char| c.is_ascii_digit()) {
            return Err(self.error(&format_args!("{value:e} is too large for {datatype}")));
        }
        text.parse().map_err(|_| self.not_a_value(text, &datatype))
    }

    fn boolean(&self, datatype: Datatype) -> Result<bool, String> {
        let text = self.text(&datatype)?;
        match text {
            "1" => Ok(true),
            "0" => Ok(false),
            _ if text.eq_ignore_ascii_case("true") => Ok(true),
            _ if text.eq_ignore_ascii_case("false") => Ok(false),
            _ => Err(self.not_a_value(text, &"BOOL (true, false, 1 or 0)")),
        }
    }

    /// The true class of a record.
    fn class(&self) -> Result<i64, String> {
        let text = self.text(&"a class number")?;
        text.parse().map_err(|_| self.not_a_value(text, &"class number (--label names the column)"))
    }

    /// Parses a JSON list, if the cell looks like one.
    fn list(&self) -> Result<Option<Value>, String> {
        if !self.content.trim_ascii_start().starts_with(b"[") {
            return Ok(None);
        }
        serde_json::from_slice(self.content)
            .map(Some)
            .map_err(|error| self.error(&format_args!("not a JSON list: {error}")))
    }
}

/// The rows of a file.
struct Rows {
    reader: Reader<Input>,
}

impl Rows {
    fn new(source: Box<dyn BufRead>) -> Rows {
        let input = Input { source, left: ROW_BYTES_MAX, given: 0, lines: 0, last: Vec::new() };
        Rows { reader: ReaderBuilder::new().trim(Trim::Headers).from_reader(input) }
    }

    /// Reads the first row, which names the columns.
    fn header(&mut self, name: &str) -> Result<Header> {
        let names: Result<Vec<String>, _> = match self.reader.byte_headers() {
            Ok(header) => header.iter().map(|name| String::from_utf8(name.to_vec())).collect(),
            Err(error) => return self.failed(name, error, &ByteRecord::new()),
        };
        match names {
            Ok(names) => Ok(Header(names)),
            Err(_) => fail(Exit::Usage, format!("{name}: the names of the columns are not UTF-8")),
        }
    }

    /// Reads the next row; false when there is none.
    fn next(&mut self, name: &str, row: &mut ByteRecord) -> Result<bool> {
        self.reader.get_mut().left = ROW_BYTES_MAX;
        match self.reader.read_byte_record(row) {
            Ok(more) => Ok(more),
            Err(error) => self.failed(name, error, row),
        }
    }

    fn failed<T>(&self, name: &str, error: csv::Error, row: &ByteRecord) -> Result<T> {
        let reason = match error.into_kind() {
            ErrorKind::Io(error) if error.kind() == io::ErrorKind::FileTooLarge => {
                let near = self.reader.position().line();
                format!("near line {near}: a row has more than {ROW_BYTES_MAX} bytes; is a quote not closed?")
            }
            ErrorKind::Io(error) => return Err(error).with_context(|| format!("cannot read {name}")),
            ErrorKind::UnequalLengths { expected_len, len, .. } => {
                format!("line {}: {len} cells, the header names {expected_len} columns", self.line(row))
            }
            other => format!("cannot be read as CSV: {other:?}"),
        };
        fail(Exit::Usage, format!("{name} {reason}"))
    }

    /// The line in which the last read row begins. The library reports where it began to search for the row,
    /// which may be lines before.
    fn line(&self, row: &ByteRecord) -> u64 {
        let input = self.reader.get_ref();
        let ahead = input.given.saturating_sub(self.reader.position().byte());
        let ahead = usize::try_from(ahead).unwrap_or(usize::MAX).min(input.last.len());
        let (done, ahead) = input.last.split_at(input.last.len() - ahead);
        let within = lines(row.as_slice()) + u64::from(done.ends_with(b"\n"));
        (input.lines - lines(ahead) + 1).saturating_sub(within)
    }
}

fn lines(bytes: &[u8]) -> u64 {
    bytes.iter().filter(|byte| **byte == b'\n').count() as u64
}

/// A file that limits the bytes per row and counts lines.
struct Input {
    source: Box<dyn BufRead>,
    /// Bytes that may still be read for the row.
    left: usize,
    /// Bytes and line ends returned so far.
    given: u64,
    lines: u64,
    /// The last returned bytes, which the parser may not have consumed yet.
    last: Vec<u8>,
}

impl Read for Input {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let most = into.len().min(self.left);
        let read = self.source.read(&mut into[..most])?;
        let given = &into[..read];
        self.left -= read;
        self.given += read as u64;
        self.lines += lines(given);
        if read > 0 {
            self.last.clear();
            self.last.extend_from_slice(given);
        }
        Ok(read)
    }
}

#[cfg(test)]
mod tests;
