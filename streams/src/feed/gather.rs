//! Gathering of a batch's rows from decoded row groups, a column at a time.

mod size;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, RecordBatch, RecordBatchOptions, UInt32Array};
use arrow::compute::{interleave, take};
use arrow::datatypes::SchemaRef;
use arrow::error::ArrowError;

use crate::feed::error::FeedError;
use crate::feed::footer::panic_text;

/// Batches beyond this size are gathered on a blocking thread.
const INLINE_BYTES_MAX: u64 = 4 << 20;

/// The rows `(source, row)` of `sources`, in that order: the columns at `positions`, whose schema is `schema`. Cost: one
/// kernel per column, no work per row beyond the copy and the sum of lengths.
///
/// # Errors
/// Names the column whose values are too large for one batch; others are those of Arrow's kernels.
pub(crate) fn gather(
    schema: &SchemaRef,
    positions: &[usize],
    sources: &[Arc<RecordBatch>],
    rows: &[(usize, usize)],
) -> Result<RecordBatch, ArrowError> {
    size::check(schema, positions, sources, rows)?;
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

/// Why rows were not gathered.
pub(crate) enum GatherError {
    Arrow(ArrowError),
    Stopped,
}

impl GatherError {
    /// The error for a batch of rows of `files`.
    pub(crate) fn in_files(self, files: impl FnOnce() -> String) -> FeedError {
        match self {
            GatherError::Arrow(error) => FeedError::assemble(files(), error),
            GatherError::Stopped => FeedError::Stopped { file: files() },
        }
    }
}

/// Runs `gather` for a batch of `bytes` bytes; that of a large one on a blocking thread.
pub(crate) async fn gather_guarded(
    bytes: u64,
    gather: impl FnOnce() -> Result<RecordBatch, ArrowError> + Send + 'static,
) -> Result<RecordBatch, GatherError> {
    // Some kernels panic on types that they do not know.
    let gathering = move || {
        catch_unwind(AssertUnwindSafe(gather))
            .unwrap_or_else(|panic| Err(ArrowError::ComputeError(panic_text(&*panic).to_string())))
    };
    let gathered = match bytes {
        0..=INLINE_BYTES_MAX => gathering(),
        _ => tokio::task::spawn_blocking(gathering).await.map_err(|_| GatherError::Stopped)?,
    };
    gathered.map_err(GatherError::Arrow)
}
