//! JSON lines: one object a line. A scan checks every line and infers the columns; decoding is that of `arrow-json`.

use std::collections::HashMap;
use std::fmt;
use std::io::{BufRead, Read};
use std::sync::Arc;

use arrow::array::ArrayRef;
use arrow::datatypes::{Field, Schema};
use arrow::error::ArrowError;
use arrow::json::ReaderBuilder;
use serde::de::{DeserializeSeed, Error, MapAccess, SeqAccess, Visitor};

use super::columns::Columns;
use super::cutter::{Bounds, Cutter};
use super::shape::{Clash, FIELDS_MAX, Fields, Kind, Place, Shape};
use super::{BOM, DecodeError, ROW_BYTES_MAX, ScanError, Scanned, lists, shortened};
use crate::feed::reader::columns_of;

/// Least magnitude of floats that may be written as integers of more than 64 bits.
const BEYOND: f64 = 9e18;

/// Reads all lines of a file. `file` is its index in the dataset.
pub(super) fn scan(reader: &mut dyn BufRead, file: u32, bounds: Bounds) -> Result<Scanned, ScanError> {
    let mut cutter = Cutter::new(bounds);
    let mut values = Values::default();
    let (mut line, mut position, mut number) = (Vec::new(), 0u64, 0u64);
    loop {
        line.clear();
        let read = (&mut *reader).take(ROW_BYTES_MAX + 1).read_until(b'\n', &mut line)? as u64;
        if read == 0 {
            break;
        }
        let start = position;
        (position, number) = (position + read, number + 1);
        if read > ROW_BYTES_MAX {
            return Err(ScanError::line(number, format!("it is longer than {ROW_BYTES_MAX} bytes")));
        }
        let (text, start) = match line.strip_prefix(BOM) {
            Some(text) if number == 1 => (text, start + BOM.len() as u64),
            _ => (&line[..], start),
        };
        let text = trimmed(text);
        if text.is_empty() {
            continue;
        }
        values.context.place = Place { file, at: number };
        values.context.bytes = 0;
        values.row(text).map_err(|reason| ScanError::line(number, reason))?;
        cutter.add(start, position, values.context.bytes);
    }
    let (row_groups, cuts) = cutter.finish();
    Ok(Scanned { row_groups, cuts, columns: values.columns, is_open: false })
}

/// A text without the white space of JSON at its ends.
fn trimmed(text: &[u8]) -> &[u8] {
    let is_space = |byte: &u8| matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
    let start = text.iter().position(|byte| !is_space(byte)).unwrap_or(text.len());
    let end = text.iter().rposition(|byte| !is_space(byte)).map_or(start, |last| last + 1);
    &text[start..end]
}

/// Checks that a text is a row.
///
/// # Errors
/// The reason why it is none.
pub(crate) fn check_row(text: &[u8]) -> Result<(), String> {
    Values::default().row(trimmed(text))
}

/// Decodes the rows of a row group, only the columns of `schema`, within `bytes_max` bytes for the items of lists.
pub(super) fn decode(
    bytes: &[u8],
    rows: usize,
    schema: &Schema,
    bytes_max: u64,
) -> Result<HashMap<String, ArrayRef>, DecodeError> {
    // The scan knows which columns have no nulls; the decoder need not.
    let fields: Vec<Field> =
        schema.fields().iter().map(|field| field.as_ref().clone().with_nullable(true)).collect();
    if fields.is_empty() {
        return Ok(HashMap::new());
    }
    // Only a compressed file is read with its first bytes.
    let bytes = bytes.strip_prefix(BOM).unwrap_or(bytes);
    let items = lists::bytes(bytes, schema, bytes_max);
    let items = items.map_err(|error| ArrowError::JsonError(error.to_string()))?;
    if items > bytes_max {
        return Err(DecodeError::Oversized(items));
    }
    let builder = ReaderBuilder::new(Arc::new(Schema::new(fields))).with_batch_size(rows + 1);
    let mut decoder = builder.build_decoder()?;
    if decoder.decode(bytes)? != bytes.len() {
        return Err(ArrowError::JsonError(format!("more than {rows} rows")).into());
    }
    Ok(decoder.flush()?.as_ref().map(columns_of).unwrap_or_default())
}

/// Observer of JSON values: infers their shapes without building them.
#[derive(Default)]
pub(super) struct Values {
    pub(super) columns: Columns,
    pub(super) context: Context,
}

/// What holds for the value that is being read.
#[derive(Default)]
pub(super) struct Context {
    pub(super) place: Place,
    /// Estimated bytes of the values of the row once they are decoded.
    pub(super) bytes: u64,
    /// Objects seen, by which two fields of one name are found.
    objects: u64,
    /// Columns and fields so far.
    fields: usize,
    /// Whether a number was found that may be an integer of more than 64 bits.
    is_beyond: bool,
    clash: Option<Clash>,
}

impl Values {
    /// Reads a row: one object.
    ///
    /// # Errors
    /// The reason why it is none.
    fn row(&mut self, text: &[u8]) -> Result<(), String> {
        self.columns.rows += 1;
        let mut json = serde_json::Deserializer::from_slice(text);
        Row(self).deserialize(&mut json).and_then(|()| json.end()).map_err(reason)?;
        self.check_integers(text)
    }

    /// Reads one value of a column, as a whole text.
    ///
    /// # Errors
    /// The reason why it is no JSON.
    pub(super) fn value(&mut self, column: usize, text: &[u8]) -> Result<(), String> {
        let mut json = serde_json::Deserializer::from_slice(text);
        self.observe(column, &mut json).and_then(|()| json.end()).map_err(reason)?;
        self.check_integers(text)
    }

    /// Refuses integers of more than 64 bits, which became floats, if that has rounded them.
    fn check_integers(&mut self, text: &[u8]) -> Result<(), String> {
        if !std::mem::take(&mut self.context.is_beyond) {
            return Ok(());
        }
        match rounded_integer(text) {
            Some(number) => Err(format!(
                "the integer {} has more than 64 bits, and a float does not hold it exactly; write it as a text",
                shortened(number)
            )),
            None => Ok(()),
        }
    }

    fn observe<'de, D: serde::Deserializer<'de>>(&mut self, index: usize, json: D) -> Result<(), D::Error> {
        let Values { columns, context } = self;
        let column = columns.at(index);
        let is_present = Observe { shape: &mut column.shape, context: &mut *context }.deserialize(json)?;
        column.present += u64::from(is_present);
        if let Some(clash) = context.clash.take() {
            column.clash.get_or_insert(clash);
        }
        Ok(())
    }
}

/// The first integer of a JSON text that has more than 64 bits and that a float rounds.
fn rounded_integer(text: &[u8]) -> Option<&str> {
    let is_start = |byte: &u8| matches!(byte, b'"' | b'-' | b'0'..=b'9');
    let mut rest = text;
    while let Some(at) = rest.iter().position(is_start) {
        let found = &rest[at..];
        let is_text = found.starts_with(b"\"");
        let length = if is_text { text_length(found) } else { number_length(found) };
        let (token, after) = found.split_at(length);
        rest = after;
        let number = std::str::from_utf8(token).ok().filter(|_| !is_text);
        if let Some(number) = number.filter(|number| is_rounded(number)) {
            return Some(number);
        }
    }
    None
}

/// Length of the text in quotes at the beginning of a part of a JSON text.
fn text_length(part: &[u8]) -> usize {
    let mut is_escaped = false;
    let end = part.iter().skip(1).position(|byte| {
        let is_end = *byte == b'"' && !is_escaped;
        is_escaped = *byte == b'\\' && !is_escaped;
        is_end
    });
    end.map_or(part.len(), |end| end + 2)
}

fn number_length(part: &[u8]) -> usize {
    let is_part = |byte: &&u8| matches!(byte, b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E');
    part.iter().take_while(is_part).count()
}

/// Whether a number of a JSON text is an integer that neither 64 bits nor a float hold.
fn is_rounded(number: &str) -> bool {
    let digits = number.strip_prefix('-').unwrap_or(number);
    let is_integer = digits.bytes().all(|byte| byte.is_ascii_digit());
    let is_beyond = is_integer && number.parse::<i64>().is_err() && number.parse::<u64>().is_err();
    is_beyond && number.parse().is_ok_and(|float: f64| format!("{float:.0}") != number)
}

/// The text of an error without its line, which is always the first one.
fn reason(error: serde_json::Error) -> String {
    let text = error.to_string();
    let at = format!(" at line {} column {}", error.line(), error.column());
    match text.strip_suffix(&at) {
        Some(what) => format!("{what} (byte {} of it)", error.column()),
        None => text,
    }
}

struct Row<'v>(&'v mut Values);

impl<'de> DeserializeSeed<'de> for Row<'_> {
    type Value = ();
    fn deserialize<D: serde::Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Row<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object, the columns of one row")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let row = self.0.columns.rows;
        loop {
            let Values { columns, context } = &mut *self.0;
            let Some((index, is_new)) = map.next_key_seed(Key(|name: &str| columns.index(name)))? else {
                break;
            };
            context.count(is_new)?;
            let column = columns.at(index);
            if std::mem::replace(&mut column.seen, row) == row {
                return Err(A::Error::custom(format!("it has {:?} twice", column.name)));
            }
            map.next_value_seed(OfColumn { values: &mut *self.0, index })?;
        }
        Ok(())
    }
}

struct OfColumn<'v> {
    values: &'v mut Values,
    index: usize,
}

impl<'de> DeserializeSeed<'de> for OfColumn<'_> {
    type Value = ();
    fn deserialize<D: serde::Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        self.values.observe(self.index, json)
    }
}

/// A key, looked up without a copy.
struct Key<F>(F);

impl<'de, F: FnOnce(&str) -> (usize, bool)> DeserializeSeed<'de> for Key<F> {
    type Value = (usize, bool);
    fn deserialize<D: serde::Deserializer<'de>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_str(self)
    }
}

impl<F: FnOnce(&str) -> (usize, bool)> Visitor<'_> for Key<F> {
    type Value = (usize, bool);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a column")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<Self::Value, E> {
        Ok((self.0)(name))
    }
}

/// A value; yields whether it is not null.
struct Observe<'s> {
    shape: &'s mut Shape,
    context: &'s mut Context,
}

impl Context {
    fn count<E: Error>(&mut self, is_new: bool) -> Result<(), E> {
        self.fields += usize::from(is_new);
        match self.fields > FIELDS_MAX {
            true => {
                Err(E::custom(format!("the file has more than {FIELDS_MAX} columns and fields up to here")))
            }
            false => Ok(()),
        }
    }
}

impl Observe<'_> {
    fn add(self, kind: Kind, bytes: u64) -> bool {
        self.context.bytes += bytes;
        if let Err(clash) = self.shape.add(kind, self.context.place) {
            self.context.clash.get_or_insert(clash);
        }
        true
    }
}

impl<'de> DeserializeSeed<'de> for Observe<'_> {
    type Value = bool;
    fn deserialize<D: serde::Deserializer<'de>>(self, json: D) -> Result<bool, D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Observe<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<bool, E> {
        Ok(false)
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<bool, E> {
        Ok(self.add(Kind::Flag, 1))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<bool, E> {
        Ok(self.add(Kind::integer(value), 8))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<bool, E> {
        Ok(self.add(Kind::integer(value), 8))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<bool, E> {
        self.context.is_beyond |= value.abs() >= BEYOND;
        Ok(self.add(Kind::Float, 8))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<bool, E> {
        Ok(self.add(Kind::Text, text.len() as u64 + 4))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<bool, A::Error> {
        let Observe { shape, context } = self;
        context.bytes += 4;
        if matches!(shape.kind, Kind::Null) {
            *shape = Shape::new(Kind::List(Box::default()), context.place);
        }
        let Kind::List(inner) = &mut shape.kind else {
            let mut other = Shape::default();
            Observe { shape: &mut other, context: &mut *context }.visit_seq(items)?;
            return Ok(Observe { shape, context }.add(other.kind, 0));
        };
        while items.next_element_seed(Observe { shape: &mut *inner, context: &mut *context })?.is_some() {}
        Ok(true)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<bool, A::Error> {
        let Observe { shape, context } = self;
        if matches!(shape.kind, Kind::Null) {
            *shape = Shape::new(Kind::Object(Fields::default()), context.place);
        }
        let Kind::Object(fields) = &mut shape.kind else {
            let mut other = Shape::default();
            Observe { shape: &mut other, context: &mut *context }.visit_map(map)?;
            return Ok(Observe { shape, context }.add(other.kind, 0));
        };
        context.objects += 1;
        let object = context.objects;
        while let Some((index, is_new)) = map.next_key_seed(Key(|name: &str| fields.index(name)))? {
            context.count(is_new)?;
            let field = fields.at(index);
            if std::mem::replace(&mut field.seen, object) == object {
                return Err(A::Error::custom(format!("an object has {:?} twice", field.name)));
            }
            let had_clash = context.clash.is_some();
            map.next_value_seed(Observe { shape: &mut field.shape, context: &mut *context })?;
            if !had_clash && let Some(clash) = context.clash.take() {
                context.clash = Some(clash.within(&field.name));
            }
        }
        Ok(true)
    }
}
