//! Records as Arrow batches: the schema, a builder for it, and row access without downcasts.

use std::borrow::Cow;
use std::sync::{Arc, LazyLock};

use arrow::array::{
    Array, ArrayRef, AsArray, BinaryArray, BooleanBufferBuilder, DictionaryArray, Int32Array, Int64Array,
    ListArray, RecordBatch, StringArray, StructArray, TimestampMillisecondArray,
};
use arrow::buffer::{NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow::datatypes::{
    DataType, Field, Fields, Int32Type, Schema, SchemaRef, TimeUnit, TimestampMillisecondType,
};
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

/// Memory of a record in bytes beside its key, value and headers: its entries in these columns and in those
/// of a decoder.
const RECORD_OVERHEAD_BYTES: usize = 100;
/// Memory of a header in bytes beside its name and value.
const HEADER_OVERHEAD_BYTES: usize = 32;

static SCHEMA: LazyLock<SchemaRef> = LazyLock::new(|| {
    Arc::new(Schema::new(vec![
        Field::new("_topic", DataType::Dictionary(DataType::Int32.into(), DataType::Utf8.into()), false),
        Field::new("_partition", DataType::Int32, false),
        Field::new("_offset", DataType::Int64, false),
        Field::new("_timestamp", DataType::Timestamp(TimeUnit::Millisecond, Some("UTC".into())), true),
        Field::new("_key", DataType::Binary, true),
        Field::new("_headers", DataType::List(header_item()), false),
        Field::new("_value", DataType::Binary, true),
    ]))
});

fn header_fields() -> Fields {
    Fields::from(vec![Field::new("key", DataType::Utf8, false), Field::new("value", DataType::Binary, true)])
}

fn header_item() -> Arc<Field> {
    Arc::new(Field::new("item", DataType::Struct(header_fields()), false))
}

/// The schema of consumed records: `_topic` dictionary of Utf8, `_partition` Int32, `_offset` Int64,
/// `_timestamp` Timestamp(ms, UTC) nullable, `_key` Binary nullable, `_headers` List<Struct{key Utf8, value
/// Binary nullable}>, `_value` Binary nullable. Invalid UTF-8 in a header name becomes U+FFFD.
pub fn schema() -> SchemaRef {
    SCHEMA.clone()
}

/// A batch of one record without time, key, headers and value, as a placeholder for offsets that could not be
/// read.
///
/// # Errors
/// [`Error::Arrow`].
pub fn blank_record(topic: &str, partition: i32, offset: i64) -> Result<RecordBatch> {
    let mut chunk = Chunk::new(Arc::new(StringArray::from(vec![topic])));
    chunk.push((0, partition, offset), None, None, None, std::iter::empty());
    chunk.finish()
}

/// Rows of a consumed batch, by index. All methods panic when `row >= len()`.
#[derive(Debug, Clone, Copy)]
pub struct Records<'a> {
    topic_keys: &'a [i32],
    topic_names: &'a StringArray,
    partition: &'a [i32],
    offset: &'a [i64],
    timestamp: &'a TimestampMillisecondArray,
    key: &'a BinaryArray,
    headers: &'a ListArray,
    value: &'a BinaryArray,
}

impl<'a> Records<'a> {
    /// Reads `batch` as consumed records.
    ///
    /// # Errors
    /// [`Error::Arrow`] when the batch does not have [`schema`].
    pub fn new(batch: &'a RecordBatch) -> Result<Self> {
        if batch.schema_ref().fields() != SCHEMA.fields() {
            return Err(Error::Arrow(arrow::error::ArrowError::SchemaError(format!(
                "not a batch of consumed records: {:?}",
                batch.schema_ref()
            ))));
        }
        let topic = batch.column(0).as_dictionary::<Int32Type>();
        Ok(Self {
            topic_keys: topic.keys().values(),
            topic_names: topic.values().as_string(),
            partition: batch.column(1).as_primitive::<Int32Type>().values(),
            offset: batch.column(2).as_primitive::<arrow::datatypes::Int64Type>().values(),
            timestamp: batch.column(3).as_primitive::<TimestampMillisecondType>(),
            key: batch.column(4).as_binary(),
            headers: batch.column(5).as_list(),
            value: batch.column(6).as_binary(),
        })
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.offset.len()
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.offset.is_empty()
    }

    /// Topic of a row.
    pub fn topic(&self, row: usize) -> &'a str {
        self.topic_names.value(self.topic_keys[row] as usize)
    }

    /// Partition of a row.
    pub fn partition(&self, row: usize) -> i32 {
        self.partition[row]
    }

    /// Offset of a row in its partition.
    pub fn offset(&self, row: usize) -> i64 {
        self.offset[row]
    }

    /// Milliseconds since 1970-01-01 UTC, when the record carries a timestamp.
    pub fn timestamp_ms(&self, row: usize) -> Option<i64> {
        self.timestamp.is_valid(row).then(|| self.timestamp.value(row))
    }

    /// Key of a row.
    pub fn key(&self, row: usize) -> Option<&'a [u8]> {
        self.key.is_valid(row).then(|| self.key.value(row))
    }

    /// Value of a row; `None` is a tombstone.
    pub fn value(&self, row: usize) -> Option<&'a [u8]> {
        self.value.is_valid(row).then(|| self.value.value(row))
    }

    /// Headers of a row in their order.
    pub fn headers(&self, row: usize) -> Vec<(&'a str, Option<&'a [u8]>)> {
        let range =
            self.headers.value_offsets()[row] as usize..self.headers.value_offsets()[row + 1] as usize;
        let items = self.headers.values().as_struct();
        let keys = items.column(0).as_string::<i32>();
        let values = items.column(1).as_binary::<i32>();
        range.map(|i| (keys.value(i), values.is_valid(i).then(|| values.value(i)))).collect()
    }

    /// Memory of a row in bytes: key, value, headers, and a fixed cost for each record and header, so that
    /// many tiny records count too.
    pub fn memory(&self, row: usize) -> usize {
        self.memory_before(row + 1) - self.memory_before(row)
    }

    /// As [`Records::memory`], of all rows.
    pub fn memory_total(&self) -> usize {
        self.memory_before(self.len())
    }

    /// As [`Records::memory`], of the rows up to and excluding `row`.
    pub(crate) fn memory_before(&self, row: usize) -> usize {
        let headers = self.headers.value_offsets();
        let (first, next) = (headers[0] as usize, headers[row] as usize);
        let items = self.headers.values().as_struct();
        let names = items.column(0).as_string::<i32>().value_offsets();
        let values = items.column(1).as_binary::<i32>().value_offsets();
        let of_headers = (names[next] - names[first]) as usize + (values[next] - values[first]) as usize;
        self.payload_before(row)
            + of_headers
            + (next - first) * HEADER_OVERHEAD_BYTES
            + row * RECORD_OVERHEAD_BYTES
    }

    /// Key and value bytes of the rows up to and excluding `row`.
    pub(crate) fn payload_before(&self, row: usize) -> usize {
        let of = |array: &BinaryArray| (array.value_offsets()[row] - array.value_offsets()[0]) as usize;
        of(self.key) + of(self.value)
    }

    /// Digest of timestamp, key, value and headers of a row, in hexadecimal. The record at an offset never
    /// changes, so another digest at the same offset means a record of another topic.
    pub fn digest(&self, row: usize) -> String {
        let mut digest = Sha256::new();
        let mut add = |bytes: Option<&[u8]>| {
            // No field is as long as `u64::MAX`, which stands for null.
            digest.update(bytes.map_or(u64::MAX, |bytes| bytes.len() as u64).to_le_bytes());
            digest.update(bytes.unwrap_or_default());
        };
        add(self.timestamp_ms(row).map(i64::to_le_bytes).as_ref().map(<[u8; 8]>::as_slice));
        add(self.key(row));
        add(self.value(row));
        for (name, value) in self.headers(row) {
            add(Some(name.as_bytes()));
            add(value);
        }
        hex::encode(&digest.finalize()[..16])
    }
}

/// Nullable byte strings under construction.
#[derive(Default)]
struct Binaries {
    offsets: Vec<i32>,
    data: Vec<u8>,
    valid: Option<BooleanBufferBuilder>,
}

impl Binaries {
    fn new() -> Self {
        Self { offsets: vec![0], ..Self::default() }
    }

    fn len(&self) -> usize {
        self.offsets.len() - 1
    }

    fn push(&mut self, value: Option<&[u8]>) {
        match value {
            Some(bytes) => self.data.extend_from_slice(bytes),
            None => {
                // Columns without a null never pay for a validity buffer.
                let rows = self.len();
                self.valid.get_or_insert_with(|| {
                    let mut valid = BooleanBufferBuilder::new(rows + 64);
                    valid.append_n(rows, true);
                    valid
                });
            }
        }
        if let Some(valid) = &mut self.valid {
            valid.append(value.is_some());
        }
        // A chunk is passed on at 1 MiB, and one record is below 1 GB.
        self.offsets.push(self.data.len() as i32);
    }

    fn finish(mut self) -> Result<BinaryArray> {
        let nulls = self.valid.as_mut().map(|valid| NullBuffer::new(valid.finish()));
        let offsets = OffsetBuffer::new(ScalarBuffer::from(self.offsets));
        Ok(BinaryArray::try_new(offsets, self.data.into(), nulls)?)
    }
}

/// Records of one consumer under construction.
pub(crate) struct Chunk {
    topics: Arc<StringArray>,
    topic: Vec<i32>,
    partition: Vec<i32>,
    offset: Vec<i64>,
    timestamp: Vec<Option<i64>>,
    key: Binaries,
    value: Binaries,
    header_offsets: Vec<i32>,
    header_keys: Vec<String>,
    header_values: Binaries,
    /// Bytes of header names, plus the fixed cost of each header.
    header_bytes: usize,
}

impl Chunk {
    /// A chunk whose topic column indexes `topics`.
    pub(crate) fn new(topics: Arc<StringArray>) -> Self {
        Self {
            topics,
            topic: Vec::new(),
            partition: Vec::new(),
            offset: Vec::new(),
            timestamp: Vec::new(),
            key: Binaries::new(),
            value: Binaries::new(),
            header_offsets: vec![0],
            header_keys: Vec::new(),
            header_values: Binaries::new(),
            header_bytes: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.offset.len()
    }

    /// Key, value and header bytes so far, including the fixed cost of each header.
    pub(crate) fn bytes(&self) -> usize {
        self.key.data.len() + self.value.data.len() + self.header_values.data.len() + self.header_bytes
    }

    pub(crate) fn push<'h>(
        &mut self,
        (topic, partition, offset): (i32, i32, i64),
        timestamp_ms: Option<i64>,
        key: Option<&[u8]>,
        value: Option<&[u8]>,
        headers: impl Iterator<Item = (Cow<'h, str>, Option<&'h [u8]>)>,
    ) {
        self.topic.push(topic);
        self.partition.push(partition);
        self.offset.push(offset);
        self.timestamp.push(timestamp_ms);
        self.key.push(key);
        self.value.push(value);
        for (key, value) in headers {
            self.header_bytes += key.len() + HEADER_OVERHEAD_BYTES;
            self.header_keys.push(key.into_owned());
            self.header_values.push(value);
        }
        self.header_offsets.push(self.header_keys.len() as i32);
    }

    pub(crate) fn finish(self) -> Result<RecordBatch> {
        let headers = StructArray::try_new(
            header_fields(),
            vec![
                Arc::new(StringArray::from_iter_values(self.header_keys)) as ArrayRef,
                Arc::new(self.header_values.finish()?) as ArrayRef,
            ],
            None,
        )?;
        let columns: Vec<ArrayRef> = vec![
            Arc::new(DictionaryArray::<Int32Type>::try_new(Int32Array::from(self.topic), self.topics)?),
            Arc::new(Int32Array::from(self.partition)),
            Arc::new(Int64Array::from(self.offset)),
            Arc::new(TimestampMillisecondArray::from(self.timestamp).with_timezone("UTC")),
            Arc::new(self.key.finish()?),
            Arc::new(ListArray::try_new(
                header_item(),
                OffsetBuffer::new(ScalarBuffer::from(self.header_offsets)),
                Arc::new(headers),
                None,
            )?),
            Arc::new(self.value.finish()?),
        ];
        Ok(RecordBatch::try_new(schema(), columns)?)
    }
}
