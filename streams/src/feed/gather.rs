//! Gathering of a batch's rows from decoded row groups, a column at a time.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, RecordBatch, RecordBatchOptions, UInt32Array};
use arrow::compute::{interleave, take};
use arrow::datatypes::SchemaRef;
use arrow::error::ArrowError;

/// The rows `(source, row)` of `sources`, in that order: the columns at `positions`, whose schema is `schema`. Cost: one
/// kernel per column, no work per row beyond the copy.
pub(crate) fn gather(
    schema: &SchemaRef,
    positions: &[usize],
    sources: &[Arc<RecordBatch>],
    rows: &[(usize, usize)],
) -> Result<RecordBatch, ArrowError> {
    let columns = positions.iter();
    let arrays: Vec<ArrayRef> = match sources {
        [] => return Ok(RecordBatch::new_empty(Arc::clone(schema))),
        [one] => {
            let indices = UInt32Array::from_iter_values(rows.iter().map(|&(_, row)| row as u32));
            columns.map(|c| take(one.column(*c), &indices, None)).collect::<Result<_, _>>()?
        }
        many => columns
            .map(|c| {
                let parts: Vec<&dyn Array> = many.iter().map(|b| b.column(*c).as_ref()).collect();
                interleave(&parts, rows)
            })
            .collect::<Result<_, _>>()?,
    };
    let options = RecordBatchOptions::new().with_row_count(Some(rows.len()));
    RecordBatch::try_new_with_options(Arc::clone(schema), arrays, &options)
}
