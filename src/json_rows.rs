//! JSON output of Arrow batches: one object per row and line. Tables of cells share its treatment of time zones.
//!
//! Floats without a JSON number become the texts `NaN`, `Infinity` and `-Infinity`. Timestamps with time zone
//! names are written in UTC, which needs no time zone database. Keys of maps become texts.

use std::sync::{Arc, LazyLock};

use anyhow::Result;
use arrow::array::timezone::Tz;
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
    converted(batch, &writable_type)
}

/// The batch with types that Arrow's formatter of cells supports: times of named zones in UTC.
pub(crate) fn displayable(batch: &RecordBatch) -> Result<RecordBatch> {
    converted(batch, &displayable_type)
}

/// The batch, with its columns cast to other types.
fn converted(batch: &RecordBatch, to: &dyn Fn(&DataType) -> DataType) -> Result<RecordBatch> {
    let mut fields = Vec::with_capacity(batch.num_columns());
    let mut columns: Vec<ArrayRef> = Vec::with_capacity(batch.num_columns());
    for (field, column) in batch.schema_ref().fields().iter().zip(batch.columns()) {
        let kind = to(field.data_type());
        columns.push(if kind == *field.data_type() { Arc::clone(column) } else { cast(column, &kind)? });
        fields.push(field.as_ref().clone().with_data_type(kind));
    }
    Ok(RecordBatch::try_new(Arc::new(Schema::new(fields)), columns)?)
}

fn writable_type(kind: &DataType) -> DataType {
    let DataType::Map(entries, sorted) = kind else { return in_utc(kind, &writable_type) };
    let DataType::Struct(fields) = entries.data_type() else { return kind.clone() };
    let Some((key, values)) = fields.split_first() else { return kind.clone() };
    let key: FieldRef = match key.data_type() {
        DataType::Utf8 | DataType::LargeUtf8 => Arc::clone(key),
        _ => Arc::new(Field::new(key.name(), DataType::Utf8, false)),
    };
    let values = values.iter().map(|field| with_type(field, &writable_type));
    let fields = std::iter::once(key).chain(values).collect();
    let entries = entries.as_ref().clone().with_data_type(DataType::Struct(fields));
    DataType::Map(Arc::new(entries), *sorted)
}

fn displayable_type(kind: &DataType) -> DataType {
    in_utc(kind, &displayable_type)
}

/// The type without named time zones and dictionaries; `inner` gives the types inside it.
fn in_utc(kind: &DataType, inner: &dyn Fn(&DataType) -> DataType) -> DataType {
    match kind {
        DataType::Timestamp(unit, Some(zone)) if zone.parse::<Tz>().is_err() => {
            DataType::Timestamp(*unit, Some("+00:00".into()))
        }
        DataType::Dictionary(_, values) => inner(values),
        DataType::List(item) => DataType::List(with_type(item, inner)),
        DataType::LargeList(item) => DataType::LargeList(with_type(item, inner)),
        DataType::FixedSizeList(item, size) => DataType::FixedSizeList(with_type(item, inner), *size),
        DataType::Struct(fields) => {
            DataType::Struct(fields.iter().map(|field| with_type(field, inner)).collect())
        }
        DataType::Map(entries, sorted) => DataType::Map(with_type(entries, inner), *sorted),
        other => other.clone(),
    }
}

fn with_type(field: &FieldRef, to: &dyn Fn(&DataType) -> DataType) -> FieldRef {
    Arc::new(field.as_ref().clone().with_data_type(to(field.data_type())))
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
    fn cells_of_named_zones_are_shown_in_utc_inside_lists_structs_maps_and_dictionaries() {
        use arrow::array::types::Int32Type;
        use arrow::array::{DictionaryArray, Int32Array, StructArray};
        use arrow::util::display::{ArrayFormatter, FormatOptions};

        let at = |zone: &str| -> ArrayRef {
            Arc::new(TimestampMicrosecondArray::from(vec![0]).with_timezone(zone.to_owned()))
        };
        let zoned = at("Europe/Berlin").data_type().clone();
        let builder =
            || arrow::array::builder::TimestampMicrosecondBuilder::new().with_data_type(zoned.clone());
        let mut list = ListBuilder::new(builder());
        list.values().append_value(0);
        list.append(true);
        let mut map = MapBuilder::new(None, builder(), builder());
        map.keys().append_value(0);
        map.values().append_value(0);
        map.append(true).unwrap();
        let field = Arc::new(Field::new("at", zoned.clone(), true));
        let inner = StructArray::from(vec![(field, at("Europe/Berlin"))]);
        let keys = Int32Array::from(vec![0]);
        let dictionary = DictionaryArray::<Int32Type>::try_new(keys, at("Europe/Berlin")).unwrap();
        let columns: Vec<(&str, ArrayRef)> = vec![
            ("utc", at("UTC")),
            ("offset", at("+02:00")),
            ("list", Arc::new(list.finish())),
            ("map", Arc::new(map.finish())),
            ("struct", Arc::new(inner)),
            ("dictionary", Arc::new(dictionary)),
        ];
        let batch = displayable(&RecordBatch::try_from_iter(columns).unwrap()).unwrap();
        let format = FormatOptions::default();
        let cell = |name: &str| {
            let column = batch.column_by_name(name).unwrap();
            ArrayFormatter::try_new(column, &format).unwrap().value(0).try_to_string().unwrap()
        };
        assert_eq!(cell("utc"), "1970-01-01T00:00:00Z");
        assert_eq!(cell("offset"), "1970-01-01T02:00:00+02:00");
        assert_eq!(cell("list"), "[1970-01-01T00:00:00Z]");
        assert_eq!(cell("map"), "{1970-01-01T00:00:00Z: 1970-01-01T00:00:00Z}");
        assert_eq!(cell("struct"), "{at: 1970-01-01T00:00:00Z}");
        assert_eq!(cell("dictionary"), "1970-01-01T00:00:00Z");
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
