//! Check of the size of a batch before its rows are gathered: a column with offsets of 32 bits holds 2 GiB, or as many
//! items of lists. Some kernels of Arrow panic beyond that, after they have taken the memory.

use std::ops::Range;
use std::sync::Arc;

use arrow::array::{Array, AsArray, OffsetSizeTrait, RecordBatch};
use arrow::datatypes::{DataType, SchemaRef};
use arrow::error::ArrowError;

/// Most bytes or items of a column with offsets of 32 bits.
const HELD_MAX: usize = i32::MAX as usize;

/// Consecutive rows of one of several arrays.
type Rows = (usize, Range<usize>);

/// Refuses the rows `(source, row)` where a column cannot hold them. The columns are those of [`super::gather`].
pub(super) fn check(
    schema: &SchemaRef,
    positions: &[usize],
    sources: &[Arc<RecordBatch>],
    rows: &[(usize, usize)],
) -> Result<(), ArrowError> {
    let mut ranges: Vec<Rows> = Vec::new();
    for (field, position) in schema.fields().iter().zip(positions) {
        if !is_bounded(field.data_type()) {
            continue;
        }
        if ranges.is_empty() {
            ranges = rows.iter().map(|&(source, row)| (source, row..row + 1)).collect();
        }
        let parts: Vec<&dyn Array> = sources.iter().map(|batch| batch.column(*position).as_ref()).collect();
        if !fits(&parts, &ranges) {
            let (name, kind) = (field.name(), field.data_type());
            return Err(ArrowError::InvalidArgumentError(format!(
                "column {name:?} is {kind}, and {} rows of it take more than {HELD_MAX} bytes or items, the most of one \
                 batch; read fewer batch_rows, or write the column as large_string, large_binary or large_list",
                rows.len()
            )));
        }
    }
    Ok(())
}

/// Whether values of a type have offsets of 32 bits, also inside.
fn is_bounded(kind: &DataType) -> bool {
    match kind {
        DataType::Utf8 | DataType::Binary | DataType::List(_) | DataType::Map(..) => true,
        DataType::LargeList(item) | DataType::FixedSizeList(item, _) => is_bounded(item.data_type()),
        DataType::Struct(fields) => fields.iter().any(|field| is_bounded(field.data_type())),
        _ => false,
    }
}

/// Whether one array can hold these rows of arrays of one type.
fn fits(parts: &[&dyn Array], rows: &[Rows]) -> bool {
    let Some(first) = parts.first() else { return true };
    match first.data_type() {
        kind if !is_bounded(kind) => true,
        DataType::Utf8 => is_held(&offsets(parts, |part| part.as_string::<i32>().value_offsets()), rows),
        DataType::Binary => is_held(&offsets(parts, |part| part.as_binary::<i32>().value_offsets()), rows),
        DataType::List(_) => {
            let offsets = offsets(parts, |part| part.as_list::<i32>().value_offsets());
            let items = inner(parts, |part| part.as_list::<i32>().values().as_ref());
            is_held(&offsets, rows) && fits_inside(&items, &offsets, rows)
        }
        DataType::Map(..) => {
            let offsets = offsets(parts, |part| part.as_map().value_offsets());
            let entries = inner(parts, |part| part.as_map().entries());
            is_held(&offsets, rows) && fits_inside(&entries, &offsets, rows)
        }
        DataType::LargeList(_) => {
            let offsets = offsets(parts, |part| part.as_list::<i64>().value_offsets());
            fits_inside(&inner(parts, |part| part.as_list::<i64>().values().as_ref()), &offsets, rows)
        }
        DataType::FixedSizeList(_, size) => {
            let size = usize::try_from(*size).unwrap_or(0);
            let items = inner(parts, |part| part.as_fixed_size_list().values().as_ref());
            let ranges = rows.iter().map(|(part, rows)| (*part, rows.start * size..rows.end * size));
            fits(&items, &ranges.collect::<Vec<_>>())
        }
        DataType::Struct(fields) => {
            (0..fields.len()).all(|at| fits(&inner(parts, |part| part.as_struct().column(at).as_ref()), rows))
        }
        _ => true,
    }
}

/// As [`fits`], for the items of lists with these offsets.
fn fits_inside<O: OffsetSizeTrait>(items: &[&dyn Array], offsets: &[&[O]], rows: &[Rows]) -> bool {
    if items.first().is_none_or(|items| !is_bounded(items.data_type())) {
        return true;
    }
    let ranges = rows.iter().map(|(part, rows)| (*part, span(offsets[*part], rows)));
    fits(items, &ranges.collect::<Vec<_>>())
}

/// Whether offsets of 32 bits reach the end of these rows together.
fn is_held(offsets: &[&[i32]], rows: &[Rows]) -> bool {
    rows.iter().map(|(part, rows)| span(offsets[*part], rows).len()).sum::<usize>() <= HELD_MAX
}

/// The bytes or items of some rows.
fn span<O: OffsetSizeTrait>(offsets: &[O], rows: &Range<usize>) -> Range<usize> {
    offsets[rows.start].as_usize()..offsets[rows.end].as_usize()
}

fn offsets<'a, O>(parts: &[&'a dyn Array], of: impl Fn(&'a dyn Array) -> &'a [O]) -> Vec<&'a [O]> {
    parts.iter().map(|part| of(*part)).collect()
}

fn inner<'a>(parts: &[&'a dyn Array], of: impl Fn(&'a dyn Array) -> &'a dyn Array) -> Vec<&'a dyn Array> {
    parts.iter().map(|part| of(*part)).collect()
}

#[cfg(test)]
mod tests {
    use arrow::array::{
        ArrayRef, BinaryArray, FixedSizeListArray, Int32Array, LargeListArray, LargeStringArray, ListArray,
        StringArray, StructArray,
    };
    use arrow::buffer::OffsetBuffer;
    use arrow::datatypes::Field;

    use super::*;
    use crate::feed::gather::gather;

    const LARGE: usize = 1 << 20;

    fn item(values: &ArrayRef) -> Arc<Field> {
        Arc::new(Field::new_list_field(values.data_type().clone(), true))
    }

    #[test]
    fn rows_beyond_two_gibibytes_name_their_column_before_memory_is_taken() {
        let text: ArrayRef = Arc::new(StringArray::from(vec!["x".repeat(LARGE)]));
        let bytes: ArrayRef = Arc::new(BinaryArray::from(vec!["x".repeat(LARGE).as_bytes()]));
        let numbers: ArrayRef = Arc::new(Int32Array::from(vec![0; LARGE]));
        let list = |values: &ArrayRef| -> ArrayRef {
            let offsets = OffsetBuffer::from_lengths([values.len()]);
            Arc::new(ListArray::new(item(values), offsets, Arc::clone(values), None))
        };
        let large_list: ArrayRef = {
            let offsets = OffsetBuffer::from_lengths([1]);
            Arc::new(LargeListArray::new(item(&text), offsets, Arc::clone(&text), None))
        };
        let fixed: ArrayRef = Arc::new(FixedSizeListArray::new(item(&text), 1, Arc::clone(&text), None));
        let inside: ArrayRef = Arc::new(StructArray::from(vec![(
            Arc::new(Field::new("text", DataType::Utf8, true)),
            text.clone(),
        )]));
        for column in [text.clone(), bytes, list(&numbers), list(&text), large_list, fixed, inside] {
            let batch = RecordBatch::try_from_iter([("id", numbers.slice(0, 1)), ("long", column)]).unwrap();
            let schema = batch.schema();
            let batch = Arc::new(batch);
            for sources in [vec![Arc::clone(&batch)], vec![Arc::clone(&batch), Arc::clone(&batch)]] {
                let last = sources.len() - 1;
                let rows = |count: usize| (0..count).map(|row| (row % 2 * last, 0)).collect::<Vec<_>>();
                let error = gather(&schema, &[0, 1], &sources, &rows(2048)).unwrap_err().to_string();
                for part in ["column \"long\"", "2048 rows", "batch_rows", "large_string"] {
                    assert!(error.contains(part), "{error}");
                }
                assert_eq!(gather(&schema, &[0, 1], &sources, &rows(3)).unwrap().num_rows(), 3);
                assert!(check(&schema, &[0, 1], &sources, &rows(2047)).is_ok());
            }
        }
        let wide: ArrayRef = Arc::new(LargeStringArray::from(vec!["x".repeat(LARGE)]));
        let batch = Arc::new(RecordBatch::try_from_iter([("long", wide)]).unwrap());
        assert!(check(&batch.schema(), &[0], &[Arc::clone(&batch)], &[(0, 0); 4096]).is_ok());
    }
}
