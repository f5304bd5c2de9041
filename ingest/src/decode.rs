//! Decoder of JSON records into Arrow columns: strict, never panicking, one verdict per record.
//!
//! [`Decoder::decode`] appends one record to [`Columns`], or leaves them unchanged and returns the reason.
//! There is no intermediate tree: values go from the record's bytes into column buffers.

mod columns;
mod number;
mod reject;
mod scan;
#[cfg(test)]
mod tests;
mod text;

pub use columns::Columns;
pub(crate) use reject::Fault;
pub use reject::{Reject, RejectClass};
pub(crate) use scan::{Kind, Scanner};

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::schema::{COLUMNS_MAX, Field, Schema, Shape, check_name, infer_value};

/// Bounds on one record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest value, in bytes.
    pub record_bytes_max: usize,
    /// Deepest nesting of arrays and objects, the record itself included.
    pub depth_max: usize,
    /// Most fields of the record's object.
    pub fields_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { record_bytes_max: 1 << 20, depth_max: 32, fields_max: 2 * COLUMNS_MAX }
    }
}

/// Handling of a field that has no column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UnknownFields {
    /// The record becomes a dead letter.
    Reject,
    /// The field is left out of the files, the record lands.
    Ignore,
    /// The field becomes a new nullable column, typed by its first value.
    AddColumn,
}

/// Verdict on one record.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// One row was appended.
    Landed,
    /// Nothing was appended: a dead letter.
    Rejected(Reject),
    /// Nothing was appended: the record is good under a schema that also has these columns.
    NewColumns(Vec<Field>),
}

/// Decodes JSON objects under one schema.
#[derive(Debug)]
pub struct Decoder {
    schema: Arc<Schema>,
    index: HashMap<String, usize>,
    unknown: UnknownFields,
    limits: Limits,
    /// Per column, the number of the record that last set it: no clearing between records.
    seen: Vec<u64>,
    record: u64,
    /// Column of the n-th field of the previous record: producers rarely reorder.
    order: Vec<usize>,
}

impl Decoder {
    /// A decoder for that schema; the [`Columns`] given to it must be of the same schema.
    #[must_use]
    pub fn new(schema: Arc<Schema>, unknown: UnknownFields, limits: Limits) -> Self {
        let index = schema.fields.iter().enumerate().map(|(i, f)| (f.name.clone(), i)).collect();
        Self {
            seen: vec![0; schema.fields.len()],
            order: (0..schema.fields.len()).collect(),
            record: 0,
            schema,
            index,
            unknown,
            limits,
        }
    }

    /// The schema it decodes to.
    #[must_use]
    pub fn schema(&self) -> &Arc<Schema> {
        &self.schema
    }

    /// Columns that no record had a field for so far, dead letters included.
    pub(crate) fn unseen(&self) -> impl Iterator<Item = &str> {
        let columns = self.schema.fields.iter().zip(&self.seen);
        columns.filter(|(_, seen)| **seen == 0).map(|(field, _)| field.name.as_str())
    }

    /// Decodes one record value (`None`: a tombstone) as one more row of `columns`. On any verdict
    /// but [`Outcome::Landed`] the columns are as before.
    pub fn decode(&mut self, value: Option<&[u8]>, columns: &mut Columns) -> Outcome {
        let outcome = match value {
            None => Err(Reject::no_value()),
            Some(value) => self.decode_row(value, columns),
        };
        match outcome {
            Ok(new) if new.is_empty() => {
                columns.commit_row();
                Outcome::Landed
            }
            Ok(new) => {
                columns.roll_back();
                Outcome::NewColumns(new)
            }
            Err(reject) => {
                columns.roll_back();
                Outcome::Rejected(reject)
            }
        }
    }

    fn decode_row(&mut self, value: &[u8], columns: &mut Columns) -> Result<Vec<Field>, Reject> {
        let mut scanner = Scanner::of_record(value, &self.limits)?;
        self.record += 1;
        let mut new = Vec::new();
        let mut unknown: HashSet<Cow<'_, str>> = HashSet::new();
        let mut position = 0;
        let mut set = 0;
        let mut first = true;
        scanner.begin_object()?;
        while let Some(name) = scanner.next_field(&mut first)? {
            if position >= self.limits.fields_max {
                return Err(Reject::too_many_fields(self.limits.fields_max));
            }
            match self.column_of(&name, position) {
                Some(i) => {
                    if self.seen[i] == self.record {
                        return Err(Reject::duplicate(&name));
                    }
                    self.seen[i] = self.record;
                    let field = &self.schema.fields[i];
                    let value = scanner.rest();
                    columns
                        .append(i, field.nullable, &mut scanner)
                        .map_err(|fault| Reject::of_column(field, fault, value, &self.limits))?;
                    set += 1;
                }
                None => {
                    if unknown.contains(&name) {
                        return Err(Reject::duplicate(&name));
                    }
                    if let Some(field) = self.unknown_field(&name, &mut scanner)? {
                        new.push(field);
                    }
                    unknown.insert(name);
                }
            }
            position += 1;
        }
        scanner.end()?;
        if set < self.schema.fields.len() {
            for (i, field) in self.schema.fields.iter().enumerate() {
                if self.seen[i] != self.record {
                    if !field.nullable {
                        return Err(Reject::missing(&field.name));
                    }
                    columns.append_null(i);
                }
            }
        }
        if self.schema.fields.len() + new.len() > COLUMNS_MAX {
            return Err(Reject::too_many_columns(COLUMNS_MAX));
        }
        Ok(new)
    }

    fn column_of(&mut self, name: &str, position: usize) -> Option<usize> {
        if let Some(&i) = self.order.get(position)
            && self.schema.fields[i].name == name
        {
            return Some(i);
        }
        let i = *self.index.get(name)?;
        if let Some(slot) = self.order.get_mut(position) {
            *slot = i;
        }
        Some(i)
    }

    /// Consumes the value of a field without a column.
    fn unknown_field(&self, name: &str, scanner: &mut Scanner<'_>) -> Result<Option<Field>, Reject> {
        match self.unknown {
            UnknownFields::Reject => Err(Reject::unknown(name)),
            UnknownFields::Ignore => {
                scanner.skip_value()?;
                Ok(None)
            }
            UnknownFields::AddColumn => {
                let value = scanner.rest();
                let shape = infer_value(scanner)?;
                if shape == (Shape::Beyond { exact: false }) {
                    return Err(Reject::beyond(name, value, &self.limits));
                }
                let Some(kind) = shape.into_type() else {
                    // `null` tells no more than a missing column.
                    return Ok(None);
                };
                check_name(name).map_err(|e| Reject::bad_name(&e))?;
                let field = Field { name: name.to_owned(), kind, nullable: true };
                // A list has one type, which may not hold each of its numbers: [1.5, 9007199254740993].
                let schema = Schema { origin: self.schema.origin, fields: vec![field.clone()] };
                Columns::new(&schema)
                    .append(0, field.nullable, &mut Scanner::before_value(value, &self.limits))
                    .map_err(|fault| Reject::of_column(&field, fault, value, &self.limits))?;
                Ok(Some(field))
            }
        }
    }
}
