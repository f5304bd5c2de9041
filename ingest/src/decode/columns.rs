//! Column buffers that can roll back the last row.

use std::sync::Arc;

use arrow::array::{
    ArrayRef, BinaryArray, BooleanArray, BooleanBufferBuilder, FixedSizeListArray, Float32Array,
    Float64Array, Int32Array, Int64Array, ListArray, NullBufferBuilder, StringArray,
    TimestampMicrosecondArray,
};
use arrow::buffer::{Buffer, NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow::error::ArrowError;

use super::reject::Fault;
use super::scan::{Kind, Scanner};
use super::text;
use crate::schema::{Schema, Type};

/// Rows under construction, one buffer per column of a [`Schema`].
#[derive(Debug)]
pub struct Columns {
    columns: Vec<Column>,
    rows: usize,
}

#[derive(Debug)]
struct Column {
    values: Values,
    nulls: NullBufferBuilder,
}

/// Values without nulls; a null row holds a placeholder.
#[derive(Debug)]
enum Values {
    Bool(BooleanBufferBuilder),
    Int32(Vec<i32>),
    Int64(Vec<i64>),
    Float32(Vec<f32>),
    Float64(Vec<f64>),
    Timestamp(Vec<i64>),
    Utf8(Strings),
    Json(Strings),
    Binary(Strings),
    List { kind: Type, ends: Vec<i32>, items: Box<Values> },
    FixedList { kind: Type, width: usize, rows: usize, items: Box<Values> },
}

/// Bytes of variable length: `ends[i]..ends[i + 1]`.
#[derive(Debug)]
struct Strings {
    ends: Vec<i32>,
    bytes: Vec<u8>,
}

impl Strings {
    fn new() -> Self {
        Self { ends: vec![0], bytes: Vec::new() }
    }

    fn seal(&mut self) -> Result<(), Fault> {
        self.ends.push(i32::try_from(self.bytes.len()).map_err(|_| Fault::Range)?);
        Ok(())
    }

    fn placeholder(&mut self) {
        self.ends.push(self.ends.last().copied().unwrap_or(0));
    }

    fn truncate(&mut self, rows: usize) {
        self.ends.truncate(rows + 1);
        self.bytes.truncate(self.ends.last().map_or(0, |end| *end as usize));
    }
}

impl Columns {
    /// Empty buffers for that schema.
    #[must_use]
    pub fn new(schema: &Schema) -> Self {
        Self {
            columns: schema
                .fields
                .iter()
                .map(|field| Column { values: Values::new(&field.kind), nulls: NullBufferBuilder::new(0) })
                .collect(),
            rows: 0,
        }
    }

    /// Complete rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Takes all rows as one array per column and leaves the buffers empty.
    ///
    /// # Errors
    /// None that the decoder can cause; Arrow checks its own invariants.
    pub fn take(&mut self) -> Result<Vec<ArrayRef>, ArrowError> {
        self.rows = 0;
        self.columns
            .iter_mut()
            .map(|column| {
                let nulls = column.nulls.finish();
                column.values.take(nulls)
            })
            .collect()
    }

    /// Appends the value at the scanner to column `i`.
    pub(crate) fn append(
        &mut self,
        i: usize,
        nullable: bool,
        scanner: &mut Scanner<'_>,
    ) -> Result<(), Fault> {
        let column = &mut self.columns[i];
        if scanner.null()? {
            if !nullable {
                return Err(Fault::Null);
            }
            column.append_null();
            return Ok(());
        }
        column.values.append(scanner)?;
        column.nulls.append_non_null();
        Ok(())
    }

    pub(crate) fn append_null(&mut self, i: usize) {
        self.columns[i].append_null();
    }

    pub(crate) fn commit_row(&mut self) {
        self.rows += 1;
    }

    /// Drops everything appended since the last [`Self::commit_row`].
    pub(crate) fn roll_back(&mut self) {
        for column in &mut self.columns {
            column.values.truncate(self.rows);
            if column.nulls.len() > self.rows {
                column.nulls.truncate(self.rows);
            }
        }
    }
}

impl Column {
    fn append_null(&mut self) {
        self.values.placeholder();
        self.nulls.append_null();
    }
}

impl Values {
    fn new(kind: &Type) -> Self {
        match kind {
            Type::Bool => Self::Bool(BooleanBufferBuilder::new(0)),
            Type::Int32 => Self::Int32(Vec::new()),
            Type::Int64 => Self::Int64(Vec::new()),
            Type::Float32 => Self::Float32(Vec::new()),
            Type::Float64 => Self::Float64(Vec::new()),
            Type::Timestamp => Self::Timestamp(Vec::new()),
            Type::Utf8 => Self::Utf8(Strings::new()),
            Type::Json => Self::Json(Strings::new()),
            Type::Binary => Self::Binary(Strings::new()),
            Type::List(item) => {
                Self::List { kind: (**item).clone(), ends: vec![0], items: Box::new(Self::new(item)) }
            }
            Type::FixedList(item, width) => Self::FixedList {
                kind: (**item).clone(),
                width: *width as usize,
                rows: 0,
                items: Box::new(Self::new(item)),
            },
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Bool(values) => values.len(),
            Self::Int32(values) => values.len(),
            Self::Int64(values) | Self::Timestamp(values) => values.len(),
            Self::Float32(values) => values.len(),
            Self::Float64(values) => values.len(),
            Self::Utf8(strings) | Self::Json(strings) | Self::Binary(strings) => strings.ends.len() - 1,
            Self::List { ends, .. } => ends.len() - 1,
            Self::FixedList { rows, .. } => *rows,
        }
    }

    /// Appends one value that is not null; on a fault the caller truncates.
    fn append(&mut self, scanner: &mut Scanner<'_>) -> Result<(), Fault> {
        match self {
            Self::Bool(values) => values.append(scanner.bool()?),
            Self::Int32(values) => values.push(scanner.number()?.to_i32()?),
            Self::Int64(values) => values.push(scanner.number()?.to_i64()?),
            Self::Float32(values) => values.push(scanner.number()?.to_f32()?),
            Self::Float64(values) => values.push(scanner.number()?.to_f64()?),
            Self::Timestamp(values) => values.push(match scanner.kind()? {
                Kind::Number => text::timestamp_of_ms(scanner.number()?.to_i64()?)?,
                _ => text::timestamp_us(&scanner.string()?)?,
            }),
            Self::Utf8(strings) => {
                strings.bytes.extend_from_slice(scanner.string()?.as_bytes());
                strings.seal()?;
            }
            Self::Json(strings) => {
                strings.bytes.extend_from_slice(scanner.skip_value()?.as_bytes());
                strings.seal()?;
            }
            Self::Binary(strings) => {
                text::base64(&scanner.string()?, &mut strings.bytes)?;
                strings.seal()?;
            }
            Self::List { ends, items, .. } => {
                items.append_items(scanner)?;
                ends.push(i32::try_from(items.len()).map_err(|_| Fault::Range)?);
            }
            Self::FixedList { width, rows, items, .. } => {
                let found = items.append_items(scanner)?;
                if found != *width {
                    return Err(Fault::Length { found });
                }
                *rows += 1;
            }
        }
        Ok(())
    }

    fn append_items(&mut self, scanner: &mut Scanner<'_>) -> Result<usize, Fault> {
        scanner.begin_array()?;
        let before = self.len();
        let mut first = true;
        while scanner.next_item(&mut first)? {
            self.append(scanner)?;
        }
        Ok(self.len() - before)
    }

    fn placeholder(&mut self) {
        match self {
            Self::Bool(values) => values.append(false),
            Self::Int32(values) => values.push(0),
            Self::Int64(values) | Self::Timestamp(values) => values.push(0),
            Self::Float32(values) => values.push(0.0),
            Self::Float64(values) => values.push(0.0),
            Self::Utf8(strings) | Self::Json(strings) | Self::Binary(strings) => {
                strings.placeholder();
            }
            Self::List { ends, .. } => ends.push(ends.last().copied().unwrap_or(0)),
            Self::FixedList { width, rows, items, .. } => {
                for _ in 0..*width {
                    items.placeholder();
                }
                *rows += 1;
            }
        }
    }

    fn truncate(&mut self, rows: usize) {
        match self {
            Self::Bool(values) => {
                if values.len() > rows {
                    values.truncate(rows);
                }
            }
            Self::Int32(values) => values.truncate(rows),
            Self::Int64(values) | Self::Timestamp(values) => values.truncate(rows),
            Self::Float32(values) => values.truncate(rows),
            Self::Float64(values) => values.truncate(rows),
            Self::Utf8(strings) | Self::Json(strings) | Self::Binary(strings) => {
                strings.truncate(rows);
            }
            Self::List { ends, items, .. } => {
                ends.truncate(rows + 1);
                items.truncate(ends.last().map_or(0, |end| *end as usize));
            }
            Self::FixedList { width, rows: len, items, .. } => {
                *len = rows.min(*len);
                items.truncate(*len * *width);
            }
        }
    }

    fn take(&mut self, nulls: Option<NullBuffer>) -> Result<ArrayRef, ArrowError> {
        Ok(match self {
            Self::Bool(values) => Arc::new(BooleanArray::new(values.finish(), nulls)),
            Self::Int32(values) => Arc::new(Int32Array::try_new(take_buffer(values), nulls)?),
            Self::Int64(values) => Arc::new(Int64Array::try_new(take_buffer(values), nulls)?),
            Self::Float32(values) => Arc::new(Float32Array::try_new(take_buffer(values), nulls)?),
            Self::Float64(values) => Arc::new(Float64Array::try_new(take_buffer(values), nulls)?),
            Self::Timestamp(values) => {
                Arc::new(TimestampMicrosecondArray::try_new(take_buffer(values), nulls)?.with_timezone("UTC"))
            }
            Self::Utf8(strings) | Self::Json(strings) => {
                let (ends, bytes) = take_strings(strings);
                Arc::new(StringArray::try_new(ends, bytes, nulls)?)
            }
            Self::Binary(strings) => {
                let (ends, bytes) = take_strings(strings);
                Arc::new(BinaryArray::try_new(ends, bytes, nulls)?)
            }
            Self::List { kind, ends, items } => {
                let ends = OffsetBuffer::new(std::mem::replace(ends, vec![0]).into());
                let items = items.take(None)?;
                Arc::new(ListArray::try_new(kind.item_field(), ends, items, nulls)?)
            }
            Self::FixedList { kind, width, rows, items } => {
                *rows = 0;
                let items = items.take(None)?;
                let width = i32::try_from(*width)
                    .map_err(|_| ArrowError::InvalidArgumentError("list width".to_owned()))?;
                Arc::new(FixedSizeListArray::try_new(kind.item_field(), width, items, nulls)?)
            }
        })
    }
}

fn take_buffer<T: arrow::datatypes::ArrowNativeType>(values: &mut Vec<T>) -> ScalarBuffer<T> {
    std::mem::take(values).into()
}

fn take_strings(strings: &mut Strings) -> (OffsetBuffer<i32>, Buffer) {
    let Strings { ends, bytes } = std::mem::replace(strings, Strings::new());
    (OffsetBuffer::new(ends.into()), bytes.into())
}
