//! JSON output of Arrow batches: one object per row and line.
//!
//! Floats without a JSON number become the texts `NaN`, `Infinity` and `-Infinity`. Timestamps with time zone
//! names are written in UTC, which needs no time zone database. Keys of maps become texts.

use std::sync::{Arc, LazyLock};

use anyhow::Result;
use arrow::array::types::{Float16Type, Float32Type, Float64Type};
use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Field, FieldRef, Schema};
use arrow::error::ArrowError;
use arrow::json::WriterBuilder;
use arrow::json::writer::{
    Encoder, EncoderFactory, EncoderOptions, LineDelimited, NullableEncoder, make_encoder,
};
use millrace_serving::record::float_name;

/// The rows of a batch. With `nulls`, null values are written as null; otherwise they are omitted.
pub(crate) fn lines(batch: &RecordBatch, nulls: bool) -> Result<Vec<u8>> {
    let mut writer = WriterBuilder::new()
        .with_explicit_nulls(nulls)
        .with_encoder_factory(Arc::new(NonFiniteFloats))
        .build::<_, LineDelimited>(Vec::new());
    writer.write(&writable(batch)?)?;
    writer.finish()?;
    Ok(writer.into_inner())
}

/// The batch, cast to types that the writer supports.
fn writable(batch: &RecordBatch) -> Result<RecordBatch> {
    let mut fields = Vec::with_capacity(batch.num_columns());
    let mut columns: Vec<ArrayRef> = Vec::with_capacity(batch.num_columns());
    for (field, column) in batch.schema_ref().fields().iter().zip(batch.columns()) {
        let kind = writable_type(field.data_type());
        columns.push(if kind == *field.data_type() { Arc::clone(column) } else { cast(column, &kind)? });
        fields.push(field.as_ref().clone().with_data_type(kind));
    }
    Ok(RecordBatch::try_new(Arc::new(Schema::new(fields)), columns)?)
}

fn writable_type(kind: &DataType) -> DataType {
    let inner = |field: &FieldRef| -> FieldRef {
        Arc::new(field.as_ref().clone().with_data_type(writable_type(field.data_type())))
    };
    match kind {
        DataType::Timestamp(unit, Some(zone)) if !zone.starts_with(['+', '-']) => {
            DataType::Timestamp(*unit, Some("+00:00".into()))
        }
        DataType::Dictionary(_, values) => writable_type(values),
        DataType::List(item) => DataType::List(inner(item)),
        DataType::LargeList(item) => DataType::LargeList(inner(item)),
        DataType::FixedSizeList(item, size) => DataType::FixedSizeList(inner(item), *size),
        DataType::Struct(fields) => DataType::Struct(fields.iter().map(inner).collect()),
        DataType::Map(entries, sorted) => {
            let DataType::Struct(fields) = entries.data_type() else { return kind.clone() };
            let Some((key, values)) = fields.split_first() else { return kind.clone() };
            let key: FieldRef = match key.data_type() {
                DataType::Utf8 | DataType::LargeUtf8 => Arc::clone(key),
                _ => Arc::new(Field::new(key.name(), DataType::Utf8, false)),
            };
            let fields = std::iter::once(key).chain(values.iter().map(inner)).collect();
            let entries = entries.as_ref().clone().with_data_type(DataType::Struct(fields));
            DataType::Map(Arc::new(entries), *sorted)
        }
        other => other.clone(),
    }
}

/// Encodes arrays with floats that are not finite.
#[derive(Debug)]
struct NonFiniteFloats;

/// The writer's default options.
static PLAIN: LazyLock<EncoderOptions> = LazyLock::new(EncoderOptions::default);

impl EncoderFactory for NonFiniteFloats {
    fn make_default_encoder<'a>(
        &self,
        field: &'a FieldRef,
        array: &'a dyn Array,
        _options: &'a EncoderOptions,
    ) -> Result<Option<NullableEncoder<'a>>, ArrowError> {
        let value: Box<dyn Fn(usize) -> f64 + 'a> = match array.data_type() {
            DataType::Float16 => {
                let array = array.as_primitive::<Float16Type>();
                Box::new(move |row| array.value(row).to_f64())
            }
            DataType::Float32 => {
                let array = array.as_primitive::<Float32Type>();
                Box::new(move |row| f64::from(array.value(row)))
            }
            DataType::Float64 => {
                let array = array.as_primitive::<Float64Type>();
                Box::new(move |row| array.value(row))
            }
            _ => return Ok(None),
        };
        if (0..array.len()).all(|row| value(row).is_finite()) {
            return Ok(None);
        }
        let finite = make_encoder(field, array, &PLAIN)?;
        Ok(Some(NullableEncoder::new(Box::new(FloatEncoder { value, finite }), array.nulls().cloned())))
    }
}

struct FloatEncoder<'a> {
    value: Box<dyn Fn(usize) -> f64 + 'a>,
    finite: NullableEncoder<'a>,
}

impl Encoder for FloatEncoder<'_> {
    fn encode(&mut self, row: usize, out: &mut Vec<u8>) {
        match float_name((self.value)(row)) {
            Some(name) => out.extend_from_slice(format!("\"{name}\"").as_bytes()),
            None => self.finite.encode(row, out),
        }
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::builder::{Int32Builder, ListBuilder, MapBuilder, StringBuilder};
    use arrow::array::{Float32Array, Float64Array, TimestampMicrosecondArray};

    use super::*;

    fn written(columns: Vec<(&str, ArrayRef)>) -> String {
        let batch = RecordBatch::try_from_iter(columns).unwrap();
        String::from_utf8(lines(&batch, false).unwrap()).unwrap()
    }

    #[test]
    fn floats_that_are_not_finite_keep_their_meaning() {
        let wide = Float64Array::from(vec![Some(0.1), Some(f64::NAN), None, Some(f64::INFINITY)]);
        let narrow = Float32Array::from(vec![0.1, f32::NEG_INFINITY, f32::NAN, 2.5]);
        let text = written(vec![("a", Arc::new(wide)), ("b", Arc::new(narrow))]);
        let expected = "{\"a\":0.1,\"b\":0.1}\n{\"a\":\"NaN\",\"b\":\"-Infinity\"}\n{\"b\":\"NaN\"}\n\
                        {\"a\":\"Infinity\",\"b\":2.5}\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn timestamps_of_named_zones_are_written_in_utc() {
        let at = |zone: &str| -> ArrayRef {
            Arc::new(TimestampMicrosecondArray::from(vec![0]).with_timezone(zone.to_owned()))
        };
        let mut list = ListBuilder::new(
            arrow::array::builder::TimestampMicrosecondBuilder::new()
                .with_data_type(at("Asia/Tokyo").data_type().clone()),
        );
        list.values().append_value(0);
        list.append(true);
        let columns = vec![
            ("berlin", at("Europe/Berlin")),
            ("utc", at("UTC")),
            ("offset", at("+02:00")),
            ("list", Arc::new(list.finish()) as ArrayRef),
        ];
        let text = written(columns);
        let expected = "{\"berlin\":\"1970-01-01T00:00:00Z\",\"utc\":\"1970-01-01T00:00:00Z\",\
                        \"offset\":\"1970-01-01T02:00:00+02:00\",\"list\":[\"1970-01-01T00:00:00Z\"]}\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn maps_are_objects_whatever_their_keys() {
        let mut map = MapBuilder::new(None, Int32Builder::new(), StringBuilder::new());
        map.keys().append_value(7);
        map.values().append_value("seven");
        map.append(true).unwrap();
        assert_eq!(written(vec![("m", Arc::new(map.finish()))]), "{\"m\":{\"7\":\"seven\"}}\n");
    }
}
