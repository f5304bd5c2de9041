//! CSV with a header: a scan finds the rows and infers the columns; decoding is that of `arrow-csv`.
//!
//! Both use the parser of `csv-core`: a field in quotes may have line breaks and doubled quotes. An empty field is null.

use std::collections::{HashMap, HashSet};
use std::io::{BufRead, Cursor, Read};
use std::sync::Arc;

use arrow::array::ArrayRef;
use arrow::compute::concat_batches;
use arrow::compute::kernels::cast_utils::Parser;
use arrow::csv::ReaderBuilder;
use arrow::datatypes::{Field, Float64Type, Int64Type, Schema};
use arrow::error::ArrowError;
use csv_core::ReadRecordResult;

use super::columns::Columns;
use super::cutter::{Bounds, Cutter};
use super::shape::{FIELDS_MAX, Kind, Place, Shape};
use super::{BOM, DecodeError, ROW_BYTES_MAX, ScanError, Scanned};
use crate::feed::reader::columns_of;

/// Most fields of the rows that are decoded at a time; more than most row groups have.
const FIELDS_AT_ONCE: usize = 1 << 20;
/// Longest header with the empty lines behind it, in bytes: they are read with every row group.
const HEADER_BYTES_MAX: u64 = 1 << 20;

/// The sign between the fields of a file.
pub(super) fn delimiter(path: &str) -> u8 {
    let name = path.to_ascii_lowercase();
    let plain = name.strip_suffix(".gz").or_else(|| name.strip_suffix(".zst")).unwrap_or(&name);
    if plain.ends_with(".tsv") { b'\t' } else { b',' }
}

/// Reads all rows of a file. `file` is its index in the dataset.
pub(super) fn scan(
    reader: &mut dyn BufRead,
    delimiter: u8,
    file: u32,
    bounds: Bounds,
) -> Result<Scanned, ScanError> {
    let mut records = Records::new(reader, delimiter);
    let mut columns = Columns::default();
    let mut cutter = Cutter::new(bounds);
    let Some(head) = records.next()? else { return Ok(Scanned::default()) };
    if head.end > HEADER_BYTES_MAX {
        let reason = format!("the header ends after {} bytes; it must within {HEADER_BYTES_MAX}", head.end);
        return Err(ScanError::line(1, reason));
    }
    let names = records.header(&head)?;
    let width = names.len();
    for name in names {
        columns.index(&name);
    }
    while let Some(record) = records.next()? {
        if record.fields != width {
            return Err(ScanError::line(
                record.line,
                format!("it has {} fields, and the header has {width}", record.fields),
            ));
        }
        if columns.rows == 0 && record.start > HEADER_BYTES_MAX {
            let reason =
                format!("the first row begins after {HEADER_BYTES_MAX} bytes; remove the empty lines");
            return Err(ScanError::line(record.line, reason));
        }
        columns.rows += 1;
        let place = Place { file, at: record.line };
        let mut bytes = 0;
        for index in 0..width {
            let text = records.text(index).map_err(|()| {
                let name = &columns.at(index).name;
                ScanError::line(record.line, format!("column {name:?} is no UTF-8 text"))
            })?;
            bytes += 8 + text.len() as u64;
            if text.is_empty() {
                continue;
            }
            let column = columns.at(index);
            column.present += 1;
            if !matches!(column.shape.kind, Kind::Text) {
                column.take(Shape::new(kind_of(text), place), true);
            }
        }
        cutter.add(record.start, record.end, bytes);
    }
    let (row_groups, cuts) = cutter.finish();
    Ok(Scanned { row_groups, cuts, columns, is_open: false })
}

/// The kind that a field is written as. Numbers that would not be written back as they are, such as `007`, are texts.
fn kind_of(text: &str) -> Kind {
    if text.eq_ignore_ascii_case("true") || text.eq_ignore_ascii_case("false") {
        return Kind::Flag;
    }
    let digits = text.trim_ascii().trim_start_matches(['+', '-']);
    let is_number_of_digits = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    if is_number_of_digits {
        let is_code = digits.len() > 1 && digits.starts_with('0');
        return match Int64Type::parse(text) {
            Some(value) if !is_code => Kind::integer(value),
            _ => Kind::Text,
        };
    }
    match Float64Type::parse(text) {
        // A number too large for a float, and not the word for infinity.
        Some(value) if value.is_infinite() && text.bytes().any(|byte| byte.is_ascii_digit()) => Kind::Text,
        Some(_) => Kind::Float,
        None => Kind::Text,
    }
}

/// Decodes the rows of a row group, only the columns of `schema`. `bytes` begin with the header of the file.
pub(super) fn decode(
    bytes: &[u8],
    delimiter: u8,
    rows: usize,
    schema: &Schema,
) -> Result<HashMap<String, ArrayRef>, DecodeError> {
    let bad = |error: ScanError| ArrowError::CsvError(error.to_string());
    let mut input = bytes;
    let mut records = Records::new(&mut input, delimiter);
    let head = records.next().map_err(bad)?;
    let head = head.ok_or_else(|| ArrowError::CsvError("no header".to_string()))?;
    let names = records.header(&head).map_err(bad)?;
    let mut wanted = Vec::new();
    let mut fields = Vec::with_capacity(names.len());
    for (index, name) in names.iter().enumerate() {
        match schema.field_with_name(name) {
            Ok(field) => {
                wanted.push(index);
                fields.push(field.clone().with_nullable(true));
            }
            Err(_) => fields.push(Field::new(name, arrow::datatypes::DataType::Utf8, true)),
        }
    }
    if wanted.is_empty() {
        return Ok(HashMap::new());
    }
    let body = usize::try_from(head.end).ok().and_then(|end| bytes.get(end..)).unwrap_or_default();
    // The decoder would take a byte order mark at the beginning of a row for that of a file.
    let body = Cursor::new(b"\n").chain(Cursor::new(body));
    // The decoder allots memory for the fields of a whole batch before it reads them.
    let at_once = (FIELDS_AT_ONCE / names.len().max(1)).clamp(1, rows.saturating_add(1));
    let batches = ReaderBuilder::new(Arc::new(Schema::new(fields)))
        .with_delimiter(delimiter)
        .with_projection(wanted)
        .with_batch_size(at_once)
        .build_buffered(body)?;
    // A file that has changed may have any number of rows: one more than expected is an error of the caller.
    let most = rows / at_once + 1;
    let batches = batches.take(most).collect::<Result<Vec<_>, _>>()?;
    Ok(match batches.as_slice() {
        [] => HashMap::new(),
        [one] => columns_of(one),
        [first, ..] => columns_of(&concat_batches(&first.schema(), &batches)?),
    })
}

/// One record of a file.
struct Record {
    start: u64,
    end: u64,
    /// The line where it begins, from 1.
    line: u64,
    fields: usize,
}

/// Records of a file, with their places.
struct Records<'r> {
    reader: &'r mut dyn BufRead,
    parser: csv_core::Reader,
    /// The fields of the last record without quotes, one after the other, and where each ends.
    values: Vec<u8>,
    ends: Vec<usize>,
    position: u64,
    line: u64,
}

impl<'r> Records<'r> {
    fn new(reader: &'r mut dyn BufRead, delimiter: u8) -> Self {
        let mut parser = csv_core::ReaderBuilder::new().delimiter(delimiter).build();
        // The parser removes a byte order mark from its first input. That of the file is removed here, and a field may
        // begin with another.
        parser.read_record(b"\n", &mut [0], &mut [0]);
        Self { reader, parser, values: vec![0; 4096], ends: vec![0; 64], position: 0, line: 1 }
    }

    /// The next record; empty lines are none.
    fn next(&mut self) -> Result<Option<Record>, ScanError> {
        let (mut values, mut fields) = (0, 0);
        let mut begin = None;
        loop {
            let input = self.reader.fill_buf()?;
            let is_end = input.is_empty();
            let Some((start, line)) = begin else {
                if is_end {
                    return Ok(None);
                }
                if self.position == 0 && input.starts_with(BOM) {
                    self.position = BOM.len() as u64;
                    self.reader.consume(BOM.len());
                    continue;
                }
                let breaks = input.iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
                self.line += lines(&input[..breaks]);
                self.position += breaks as u64;
                if breaks < input.len() {
                    begin = Some((self.position, self.line));
                }
                self.reader.consume(breaks);
                continue;
            };
            // A line break ends the last record, unless it is inside of quotes.
            let input = if is_end { &b"\n"[..] } else { input };
            let (result, read, wrote, ended) =
                self.parser.read_record(input, &mut self.values[values..], &mut self.ends[fields..]);
            values += wrote;
            fields += ended;
            if !is_end {
                self.line += lines(&input[..read]);
                self.position += read as u64;
                self.reader.consume(read);
            }
            let bytes = self.position - start;
            let too_large = |what: String| Err(ScanError::line(line, what));
            match result {
                ReadRecordResult::Record => {
                    return Ok(Some(Record { start, end: self.position, line, fields }));
                }
                ReadRecordResult::InputEmpty | ReadRecordResult::End if is_end => {
                    return too_large("the quotes that begin in this row do not end".to_owned());
                }
                ReadRecordResult::OutputFull => self.values.resize(self.values.len() * 2, 0),
                ReadRecordResult::OutputEndsFull if fields > FIELDS_MAX => {
                    return too_large(format!("it has more than {FIELDS_MAX} fields"));
                }
                ReadRecordResult::OutputEndsFull => self.ends.resize(self.ends.len() * 2, 0),
                ReadRecordResult::InputEmpty | ReadRecordResult::End => {}
            }
            if bytes > ROW_BYTES_MAX {
                return too_large(format!(
                    "it is longer than {ROW_BYTES_MAX} bytes, or its quotes do not end"
                ));
            }
        }
    }

    /// A field of the last record.
    fn text(&self, index: usize) -> Result<&str, ()> {
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        std::str::from_utf8(&self.values[start..self.ends[index]]).map_err(drop)
    }

    /// The names of the columns, if the last record is the header.
    fn header(&self, head: &Record) -> Result<Vec<String>, ScanError> {
        if head.fields > FIELDS_MAX {
            return Err(ScanError::line(head.line, format!("it has more than {FIELDS_MAX} columns")));
        }
        let mut names = Vec::with_capacity(head.fields);
        let mut seen = HashSet::new();
        for index in 0..head.fields {
            let wrong = |what: &str| {
                Err(ScanError::line(head.line, format!("the header's column {} {what}", index + 1)))
            };
            match self.text(index) {
                Err(()) => return wrong("is no UTF-8 text"),
                Ok("") => return wrong("has no name"),
                Ok(name) if !seen.insert(name.to_owned()) => {
                    return wrong(&format!("has the name {name:?} of another one"));
                }
                Ok(name) => names.push(name.to_owned()),
            }
        }
        Ok(names)
    }
}

fn lines(bytes: &[u8]) -> u64 {
    bytes.iter().filter(|byte| **byte == b'\n').count() as u64
}
