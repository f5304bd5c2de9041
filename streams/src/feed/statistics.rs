//! Statistics of columns, in memory that does not depend on the number of rows.

mod counting;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::compute::{filter, is_not_null};
use arrow::datatypes::{DataType, SchemaRef};
use arrow::error::ArrowError;
use arrow::temporal_conversions::timestamp_ns_to_datetime;
use serde::Serialize;
use serde_json::{Value as Json, json};

use crate::feed::select::value::{Value, Values};
use counting::{DistinctCounter, FrequentValues};

/// Bytes of a text that are kept: longer texts with the same beginning count as one frequent value.
const TEXT_BYTES_MAX: usize = 96;

/// Statistics of the columns of one schema.
pub struct Statistics {
    columns: Vec<Column>,
}

/// What is known of a column.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ColumnSummary {
    /// Name of the column.
    pub column: String,
    /// Its Arrow type.
    #[serde(rename = "type")]
    pub data_type: String,
    /// Rows.
    pub rows: u64,
    /// Rows in which the column is null.
    pub nulls: u64,
    /// Shortest and longest list, for lists of any length.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lengths: Option<(u64, u64)>,
    /// Nulls inside lists.
    #[serde(skip_serializing_if = "is_zero")]
    pub null_items: u64,
    /// Values that are not a number; they are left out of the other statistics.
    #[serde(skip_serializing_if = "is_zero")]
    pub nans: u64,
    /// Least value: of the items, for lists.
    pub min: Json,
    /// Greatest value.
    pub max: Json,
    /// Mean of numbers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mean: Option<f64>,
    /// Standard deviation of numbers, over all of them (not of a sample).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub std: Option<f64>,
    /// Number of distinct values; beyond some hundreds an estimate, within about 5 %. Not for floats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub distinct: Option<u64>,
    /// The most frequent values with their counts; with many distinct values the counts are lower bounds. Not for
    /// floats, times and lists.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub top: Vec<(Json, u64)>,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

struct Column {
    name: String,
    data_type: DataType,
    rows: u64,
    nulls: u64,
    lengths: Option<(u64, u64)>,
    null_items: u64,
    values: Accumulator,
}

/// What is known of the values of a column.
#[derive(Default)]
struct Accumulator {
    nans: u64,
    range: Option<(Known, Known)>,
    /// Numbers with their mean and the sum of the squares of their distances from it.
    count: f64,
    mean: f64,
    squares: f64,
    distinct: DistinctCounter,
    is_countable: bool,
    frequent: FrequentValues<Known>,
}

/// A value that is kept.
#[derive(Debug, Clone, PartialEq)]
enum Known {
    Flag(bool),
    Integer(i128),
    Float(f64),
    Text(String),
    Bytes(Vec<u8>),
    Time(i128),
}

impl Statistics {
    /// No rows yet.
    pub fn new(schema: &SchemaRef) -> Self {
        let columns = schema.fields().iter().map(|field| Column {
            name: field.name().clone(),
            data_type: field.data_type().clone(),
            rows: 0,
            nulls: 0,
            lengths: None,
            null_items: 0,
            values: Accumulator::default(),
        });
        Self { columns: columns.collect() }
    }

    /// Adds the rows of a batch of the schema.
    ///
    /// # Errors
    /// Arrow's, for a type that it cannot convert.
    pub fn add(&mut self, batch: &RecordBatch) -> Result<(), ArrowError> {
        self.columns.iter_mut().zip(batch.columns()).try_for_each(|(column, array)| column.add(array))
    }

    /// The statistics of each column.
    pub fn summaries(&self) -> Vec<ColumnSummary> {
        self.columns.iter().map(Column::summary).collect()
    }
}

impl Column {
    fn add(&mut self, array: &ArrayRef) -> Result<(), ArrowError> {
        self.rows += array.len() as u64;
        self.nulls += array.logical_null_count() as u64;
        let mut items = Arc::clone(array);
        let mut is_list = false;
        loop {
            // A null list may have items behind it that mean nothing.
            if items.null_count() > 0 && items.data_type().is_nested() {
                items = filter(&items, &is_not_null(&items)?)?;
            }
            let lengths: Option<(u64, u64)>;
            (items, lengths) = match items.data_type() {
                DataType::List(_) => {
                    let list = items.as_list::<i32>();
                    let offsets = list.value_offsets();
                    let (first, last) = (offsets.first().copied(), offsets.last().copied());
                    let (first, last) = (first.unwrap_or(0) as usize, last.unwrap_or(0) as usize);
                    (list.values().slice(first, last - first), range(list.offsets().lengths()))
                }
                DataType::LargeList(_) => {
                    let list = items.as_list::<i64>();
                    let offsets = list.value_offsets();
                    let (first, last) = (offsets.first().copied(), offsets.last().copied());
                    let (first, last) = (first.unwrap_or(0) as usize, last.unwrap_or(0) as usize);
                    (list.values().slice(first, last - first), range(list.offsets().lengths()))
                }
                DataType::FixedSizeList(..) => (Arc::clone(items.as_fixed_size_list().values()), None),
                _ => break,
            };
            if !is_list {
                self.lengths = joined(self.lengths, lengths);
            }
            is_list = true;
            self.null_items += items.logical_null_count() as u64;
        }
        let values = Values::new(&items)?;
        self.values.is_countable = !is_list;
        for row in 0..items.len() {
            self.values.add(values.get(row));
        }
        Ok(())
    }

    fn summary(&self) -> ColumnSummary {
        let values = &self.values;
        let numbers = values.count > 0.0;
        let (min, max) = match &values.range {
            Some((min, max)) => (min.json(), max.json()),
            None => (Json::Null, Json::Null),
        };
        let is_float = matches!(values.range, Some((Known::Float(_), _)));
        ColumnSummary {
            column: self.name.clone(),
            data_type: self.data_type.to_string(),
            rows: self.rows,
            nulls: self.nulls,
            lengths: self.lengths,
            null_items: self.null_items,
            nans: values.nans,
            min,
            max,
            mean: numbers.then_some(values.mean),
            std: numbers.then(|| (values.squares / values.count).sqrt()),
            distinct: (values.range.is_some() && !is_float).then(|| values.distinct.estimate()),
            top: values.frequent.top().into_iter().map(|(value, count)| (value.json(), count)).collect(),
        }
    }
}

fn range(lengths: impl Iterator<Item = usize>) -> Option<(u64, u64)> {
    lengths.fold(None, |range, length| joined(range, Some((length as u64, length as u64))))
}

fn joined(a: Option<(u64, u64)>, b: Option<(u64, u64)>) -> Option<(u64, u64)> {
    match (a, b) {
        (Some(a), Some(b)) => Some((a.0.min(b.0), a.1.max(b.1))),
        (one, other) => one.or(other),
    }
}

impl Accumulator {
    fn add(&mut self, value: Value<'_>) {
        match value {
            Value::Null | Value::Other | Value::Above(_) => return,
            Value::Float(number) if number.is_nan() => {
                self.nans += 1;
                return;
            }
            Value::Float(number) => self.add_number(number),
            Value::Integer(number) => self.add_number(number as f64),
            Value::Flag(_) | Value::Text(_) | Value::Bytes(_) | Value::Time(_) => {}
        }
        match &mut self.range {
            None => self.range = Some((Known::of(value), Known::of(value))),
            Some((min, max)) => {
                if value.order(min.value()).is_some_and(|order| order.is_lt()) {
                    *min = Known::of(value);
                }
                if value.order(max.value()).is_some_and(|order| order.is_gt()) {
                    *max = Known::of(value);
                }
            }
        }
        let Some(hash) = hash(value) else { return };
        self.distinct.add(hash);
        let is_countable = matches!(value, Value::Flag(_) | Value::Integer(_) | Value::Text(_));
        if self.is_countable && is_countable {
            self.frequent.add(hash, || Known::of(value));
        }
    }

    /// Welford's method, which loses no digits where the mean is large beside the deviation.
    fn add_number(&mut self, number: f64) {
        self.count += 1.0;
        let distance = number - self.mean;
        self.mean += distance / self.count;
        self.squares += distance * (number - self.mean);
    }
}

/// A hash of a value that is counted; not for floats.
fn hash(value: Value<'_>) -> Option<u64> {
    let mut hasher = DefaultHasher::new();
    match value {
        Value::Flag(flag) => flag.hash(&mut hasher),
        Value::Integer(number) | Value::Time(number) => number.hash(&mut hasher),
        Value::Text(text) => text.hash(&mut hasher),
        Value::Bytes(bytes) => bytes.hash(&mut hasher),
        Value::Float(_) | Value::Above(_) | Value::Null | Value::Other => return None,
    }
    Some(hasher.finish())
}

impl Known {
    /// A copy of a value that is not null, with the beginning of a long text.
    fn of(value: Value<'_>) -> Known {
        match value {
            Value::Flag(flag) => Known::Flag(flag),
            Value::Integer(number) => Known::Integer(number),
            Value::Float(number) => Known::Float(number),
            Value::Text(text) => {
                let end = (0..=TEXT_BYTES_MAX.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
                Known::Text(text.get(..end.unwrap_or(0)).unwrap_or_default().to_owned())
            }
            Value::Bytes(bytes) => Known::Bytes(bytes.get(..TEXT_BYTES_MAX).unwrap_or(bytes).to_vec()),
            Value::Time(nanoseconds) => Known::Time(nanoseconds),
            Value::Null | Value::Other | Value::Above(_) => Known::Flag(false),
        }
    }

    fn value(&self) -> Value<'_> {
        match self {
            Known::Flag(flag) => Value::Flag(*flag),
            Known::Integer(number) => Value::Integer(*number),
            Known::Float(number) => Value::Float(*number),
            Known::Text(text) => Value::Text(text),
            Known::Bytes(bytes) => Value::Bytes(bytes),
            Known::Time(nanoseconds) => Value::Time(*nanoseconds),
        }
    }

    fn json(&self) -> Json {
        match self {
            Known::Flag(flag) => json!(flag),
            // Integers of columns have at most 64 bits.
            Known::Integer(number) => i64::try_from(*number)
                .map_or_else(|_| json!(u64::try_from(*number).ok()), |number| json!(number)),
            // JSON has no infinities.
            Known::Float(number) if number.is_infinite() => json!(number.to_string()),
            Known::Float(number) => json!(number),
            Known::Text(text) => json!(text),
            Known::Bytes(bytes) => json!(hex::encode(bytes)),
            Known::Time(nanoseconds) => {
                let time = i64::try_from(*nanoseconds).ok().and_then(timestamp_ns_to_datetime);
                time.map_or(Json::Null, |time| json!(format!("{}Z", time.to_string().replace(' ', "T"))))
            }
        }
    }
}

#[cfg(test)]
mod tests;
