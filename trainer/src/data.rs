//! Conversion of feed batches to the virtual shards of a step: column checks, decoding and slicing.
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Float32Type, Float64Type, Int64Type};
use arrow::util::display::array_value_to_string;

use crate::engine::{Labels, Loss, ShardBatch};
use crate::error::{Error, Result};
use crate::labels::{self, Dictionary};
use crate::scaling::LabelScale;

mod inputs;
#[cfg(test)]
mod tests;

pub(crate) use inputs::{InputColumns, list_length};

/// The columns that a job reads, with their expected types and widths.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Columns {
    /// The dataset, for messages.
    pub(crate) dataset: String,
    /// The columns of each input of the model, in the order in which a row has them.
    pub(crate) inputs: Vec<InputColumns>,
    /// Values per row of columns whose lists have no fixed length, where several columns feed an input.
    pub(crate) lengths: Arc<BTreeMap<String, usize>>,
    pub(crate) label: String,
    pub(crate) output_width: usize,
    pub(crate) loss: Loss,
    /// The label whose rows do not count.
    pub(crate) ignore_index: Option<i64>,
    /// The classes, if the labels are texts.
    pub(crate) dictionary: Option<Arc<Dictionary>>,
    /// The scale of the labels, if the job standardizes them.
    pub(crate) scale: Option<Arc<LabelScale>>,
}

/// Decoded rows: inputs in row-major order, one label per row.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Rows {
    input_width: usize,
    output_width: usize,
    inputs: Vec<f32>,
    labels: Labels,
}

impl Rows {
    /// The inputs, row by row.
    pub(crate) fn inputs(&self) -> impl Iterator<Item = &[f32]> {
        self.inputs.chunks_exact(self.input_width.max(1))
    }

    /// The largest magnitude of the labels; 0 for classes.
    pub(crate) fn largest_label(&self) -> f32 {
        match &self.labels {
            Labels::Class(_) => 0.0,
            Labels::Value(values) => values.iter().fold(0.0, |largest, value| largest.max(value.abs())),
        }
    }

    /// The shard of the rows in `range`.
    pub(crate) fn shard(&self, range: Range<usize>) -> ShardBatch {
        let labels = match &self.labels {
            Labels::Class(classes) => Labels::Class(classes[range.clone()].to_vec()),
            Labels::Value(values) => {
                let width = self.output_width;
                Labels::Value(values[range.start * width..range.end * width].to_vec())
            }
        };
        ShardBatch {
            rows: range.len(),
            inputs: self.inputs[range.start * self.input_width..range.end * self.input_width].to_vec(),
            labels,
        }
    }
}

/// The slots of virtual shard `shard` of `shards` in a batch of `batch_rows`.
pub(crate) fn shard_slots(shard: usize, shards: usize, batch_rows: usize) -> Range<usize> {
    let cut = |at: usize| (at as u128 * batch_rows as u128 / shards as u128) as usize;
    cut(shard)..cut(shard + 1)
}

/// The virtual shards of rank `rank` of `world`: contiguous, and together all of them.
pub(crate) fn rank_shards(rank: usize, world: usize, shards: usize) -> Range<usize> {
    let cut = |at: usize| at * shards / world;
    cut(rank)..cut(rank + 1)
}

impl Columns {
    /// Rejects a dataset with unsuitable column types before any row is read.
    pub(crate) fn check_schema(&self, schema: &arrow::datatypes::Schema) -> Result<()> {
        for input in &self.inputs {
            self.check_input(schema, input)?;
        }
        let label = self.field(schema, &self.label)?;
        let (kind, width) = element(label);
        if self.loss.takes_classes() {
            return self.check_classes(label);
        }
        if !is_number(kind) {
            return Err(self.bad(format!(
                "column {:?} is {label}; loss {} needs numbers, true and false, or lists of these",
                self.label, self.loss
            )));
        }
        self.check_width(&self.label, width, self.output_width, "the model gives")
    }

    /// Rejects a column of labels that are not classes.
    fn check_classes(&self, label: &DataType) -> Result<()> {
        if labels::is_text(label) {
            let labels = self.dictionary.as_ref().map_or(0, |dictionary| dictionary.len());
            return match self.ignore_index {
                Some(ignored) => Err(self.bad(format!(
                    "column {:?} holds texts; loss.ignore_index = {ignored} needs whole class numbers",
                    self.label
                ))),
                None if labels > self.output_width => Err(self.bad(format!(
                    "column {:?} has {labels} different labels, the model's output has {} classes",
                    self.label, self.output_width
                ))),
                None => Ok(()),
            };
        }
        if self.dictionary.is_some() {
            // Numbers would be taken for places in the sorted list of texts.
            return Err(self.bad(format!(
                "column {:?} is {label}; the labels of the training data are texts",
                self.label
            )));
        }
        if label.is_integer() || *label == DataType::Boolean {
            return Ok(());
        }
        Err(self.bad(format!(
            "column {:?} is {label}; loss {} needs whole class numbers, true and false, or texts",
            self.label, self.loss
        )))
    }

    /// Decodes a batch; `row_name` names a row of the batch in errors.
    pub(crate) fn decode(&self, batch: &RecordBatch, row_name: &dyn Fn(usize) -> String) -> Result<Rows> {
        let inputs = self.inputs(batch, row_name)?;
        let labels = match self.loss {
            loss if loss.takes_classes() => Labels::Class(self.classes(batch, row_name)?),
            loss => {
                let mut values = self.label_values(batch, row_name)?;
                if let Some(scale) = &self.scale {
                    scale.apply(&mut values);
                }
                let outside = |value: &f32| loss == Loss::Bce && !(0.0..=1.0).contains(value);
                if let Some(at) = values.iter().position(outside) {
                    return Err(self.bad(format!(
                        "{} has {} in column {:?}; loss bce needs labels from 0 to 1",
                        row_name(at / self.output_width.max(1)),
                        values[at],
                        self.label
                    )));
                }
                Labels::Value(values)
            }
        };
        Ok(Rows { input_width: self.input_width(), output_width: self.output_width, inputs, labels })
    }

    /// The labels of a batch as the dataset has them, for losses of numbers.
    pub(crate) fn label_values(
        &self,
        batch: &RecordBatch,
        row_name: &dyn Fn(usize) -> String,
    ) -> Result<Vec<f32>> {
        self.numbers(batch, &self.label, self.output_width, None, row_name)
    }

    /// The same labels in float64, once [`Columns::label_values`] has accepted the batch.
    pub(crate) fn wide_label_values(&self, batch: &RecordBatch) -> Result<Vec<f64>> {
        let (values, ranges) = elements_of_rows(self.column(batch, &self.label)?);
        let numbers = self.cast(values, &self.label, &DataType::Float64)?;
        let numbers = numbers.as_primitive::<Float64Type>().values();
        Ok(ranges.into_iter().flat_map(move |range| numbers[range].iter().copied()).collect())
    }

    fn field<'s>(&self, schema: &'s arrow::datatypes::Schema, name: &str) -> Result<&'s DataType> {
        schema.field_with_name(name).map(|field| field.data_type()).map_err(|_| {
            let have: Vec<&str> = schema.fields().iter().map(|f| f.name().as_str()).collect();
            let (dataset, available) = (self.dataset.clone(), have.join(", "));
            Error::NoColumn { dataset, column: name.to_owned(), available }
        })
    }

    fn check_width(&self, column: &str, width: Option<usize>, wanted: usize, who: &str) -> Result<()> {
        match width {
            Some(width) if width != wanted => {
                Err(self.bad(format!("column {column:?} has {width} values per row, {who} {wanted}")))
            }
            _ => Ok(()),
        }
    }

    fn column<'b>(&self, batch: &'b RecordBatch, name: &str) -> Result<&'b ArrayRef> {
        batch.column_by_name(name).ok_or_else(|| self.bad(format!("no column {name:?}")))
    }

    fn classes(&self, batch: &RecordBatch, row_name: &dyn Fn(usize) -> String) -> Result<Vec<i64>> {
        let column = self.column(batch, &self.label)?;
        self.check_classes(column.data_type())?;
        self.no_nulls(column, &self.label, row_name)?;
        if labels::is_text(column.data_type()) {
            return self.classes_of_texts(column, row_name);
        }
        let numbers = self.cast(column, &self.label, &DataType::Int64)?;
        let numbers = numbers.as_primitive::<Int64Type>();
        let most = self.output_width as i64;
        let fits = |class: i64| (0..most).contains(&class) || self.ignore_index == Some(class);
        // The cast makes a number that the type cannot hold null.
        match numbers.iter().position(|class| !class.is_some_and(fits)) {
            Some(row) => Err(self.bad(format!(
                "{} has label {}; the model's classes are 0 to {}",
                row_name(row),
                array_value_to_string(column, row).unwrap_or_default(),
                most - 1
            ))),
            None => Ok(numbers.values().to_vec()),
        }
    }

    fn classes_of_texts(&self, column: &ArrayRef, row_name: &dyn Fn(usize) -> String) -> Result<Vec<i64>> {
        let texts = labels::texts(column)
            .map_err(|e| self.bad(format!("column {:?} cannot be read as text ({e})", self.label)))?;
        let class_of = |text: &str| self.dictionary.as_ref().and_then(|dictionary| dictionary.class_of(text));
        let classes = texts.iter().flatten().enumerate().map(|(row, text)| {
            class_of(text).ok_or_else(|| {
                let known = self.dictionary.as_ref().map_or(String::new(), |dictionary| dictionary.listed());
                self.bad(format!(
                    "{} has label {text:?}, which the training data does not have; its labels are {known}",
                    row_name(row)
                ))
            })
        });
        classes.collect()
    }

    /// The values of a column, `width` in each row. `bound` gives for each of these the number that a whole number stays
    /// below, where the column feeds an input of such numbers.
    fn numbers(
        &self,
        batch: &RecordBatch,
        name: &str,
        width: usize,
        bound: Option<&dyn Fn(usize) -> u32>,
        row_name: &dyn Fn(usize) -> String,
    ) -> Result<Vec<f32>> {
        let column = self.column(batch, name)?;
        self.no_nulls(column, name, row_name)?;
        let wrong_width = |row: usize, found: usize| {
            self.bad(format!("{} has {found} values in column {name:?}, not {width}", row_name(row)))
        };
        let rows = column.len();
        let (values, ranges) = elements_of_rows(column);
        if !is_number(values.data_type()) {
            return Err(self.bad(format!("column {name:?} is {}, not numbers", column.data_type())));
        }
        if let Some(row) = ranges.iter().position(|range| range.len() != width) {
            return Err(wrong_width(row, ranges[row].len()));
        }
        let numbers = self.cast(values, name, &DataType::Float32)?;
        let numbers = numbers.as_primitive::<Float32Type>();
        let mut flat = Vec::with_capacity(rows * width);
        for (row, range) in ranges.into_iter().enumerate() {
            // The cast makes a number that the type cannot hold null, too.
            if numbers.null_count() > 0
                && let Some(at) = range.clone().find(|at| numbers.is_null(*at))
            {
                let found = match values.is_null(at) {
                    true => "a null".to_owned(),
                    false => array_value_to_string(values, at).unwrap_or_default(),
                };
                return Err(self.bad(format!("{} has {found} in column {name:?}", row_name(row))));
            }
            let found = &numbers.values()[range.clone()];
            if let Some(at) = found.iter().position(|value| !value.is_finite()) {
                return Err(self.not_finite(values, range.start + at, name, &row_name(row)));
            }
            if let Some(bound) = bound {
                let fits = |(at, value): (usize, &f32)| {
                    value.fract() == 0.0 && (0.0..bound(at) as f32).contains(value)
                };
                if let Some(at) = found.iter().enumerate().position(|pair| !fits(pair)) {
                    return Err(self.bad(format!(
                        "{} has {} in column {name:?}; the model takes whole numbers from 0 to {} there",
                        row_name(row),
                        array_value_to_string(values, range.start + at).unwrap_or_default(),
                        bound(at).saturating_sub(1)
                    )));
                }
            }
            flat.extend_from_slice(found);
        }
        Ok(flat)
    }

    /// The error of a value that is not finite as float32.
    fn not_finite(&self, values: &ArrayRef, at: usize, name: &str, row: &str) -> Error {
        let found = array_value_to_string(values, at).unwrap_or_default();
        let is_finite = match values.data_type() {
            DataType::Float64 => values.as_primitive::<Float64Type>().value(at).is_finite(),
            DataType::Float32 | DataType::Float16 => false,
            // Other numbers are always finite.
            _ => true,
        };
        let cause = match is_finite {
            true => ", which float32 cannot hold: scale the column",
            false => "",
        };
        self.bad(format!("{row} has {found} in column {name:?}{cause}"))
    }

    fn no_nulls(&self, column: &ArrayRef, name: &str, row_name: &dyn Fn(usize) -> String) -> Result<()> {
        if column.null_count() == 0 {
            return Ok(());
        }
        let row = (0..column.len()).find(|row| column.is_null(*row)).unwrap_or_default();
        Err(self.bad(format!("{} has no value in column {name:?}", row_name(row))))
    }

    fn cast(&self, values: &ArrayRef, name: &str, to: &DataType) -> Result<ArrayRef> {
        cast(values, to).map_err(|e| self.bad(format!("column {name:?} cannot be read as {to} ({e})")))
    }

    fn bad(&self, reason: String) -> Error {
        Error::Data { dataset: self.dataset.clone(), reason }
    }
}

/// The elements of a column, and those of each row.
fn elements_of_rows(column: &ArrayRef) -> (&ArrayRef, Vec<Range<usize>>) {
    let rows = column.len();
    match column.data_type() {
        DataType::FixedSizeList(_, size) => {
            let list = column.as_fixed_size_list();
            let size = usize::try_from(*size).unwrap_or_default();
            let start = |row: usize| list.value_offset(row) as usize;
            (list.values(), (0..rows).map(|row| start(row)..start(row) + size).collect())
        }
        DataType::List(_) => {
            let list = column.as_list::<i32>();
            let at = list.value_offsets();
            (list.values(), (0..rows).map(|r| at[r] as usize..at[r + 1] as usize).collect())
        }
        DataType::LargeList(_) => {
            let list = column.as_list::<i64>();
            let at = list.value_offsets();
            (list.values(), (0..rows).map(|r| at[r] as usize..at[r + 1] as usize).collect())
        }
        _ => (column, (0..rows).map(|row| row..row + 1).collect()),
    }
}

/// Whether elements of this type can be read as numbers.
fn is_number(kind: &DataType) -> bool {
    kind.is_numeric() || *kind == DataType::Boolean
}

/// The element type of a column and, if the type fixes it, the number of elements per row.
fn element(column: &DataType) -> (&DataType, Option<usize>) {
    match column {
        DataType::FixedSizeList(field, size) => (field.data_type(), usize::try_from(*size).ok()),
        DataType::List(field) | DataType::LargeList(field) => (field.data_type(), None),
        other => (other, Some(1)),
    }
}
