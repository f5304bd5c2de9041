//! Reading of the lengths of a column of lists: each unit of reading once, some at a time.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray};
use arrow::datatypes::DataType;
use futures::{StreamExt, TryStreamExt, stream};
use object_store::ObjectStore;

use super::{BucketOptions, ROWS_MAX};
use crate::feed::batch::{processors, project};
use crate::feed::error::{FeedError, Result};
use crate::feed::reader::GroupReader;
use crate::feed::{FeedOptions, Plan};

/// The bucket of each row of a plan, in the order of the dataset. Reads the column of lists.
///
/// # Errors
/// [`FeedError::NoColumn`] and [`FeedError::Invalid`] for a column that is missing or has no lists;
/// [`FeedError::TooLarge`] for more than 2^31 rows; errors of reading, naming the file.
pub(crate) async fn scan(
    store: &Arc<dyn ObjectStore>,
    plan: &Arc<Plan>,
    options: &BucketOptions,
) -> Result<Vec<u8>> {
    if plan.rows() > ROWS_MAX {
        let path = plan.dataset().path().to_owned();
        return Err(FeedError::TooLarge { path, what: "the number of rows in buckets", limit: ROWS_MAX });
    }
    let schema = project(plan.dataset(), Some(std::slice::from_ref(&options.column)))?;
    let data_type = schema.field(0).data_type();
    if !matches!(data_type, DataType::List(_) | DataType::LargeList(_)) {
        return Err(FeedError::invalid(format!(
            "buckets of column {:?}: it is {data_type}; buckets are for lists of any length",
            options.column
        )));
    }
    let concurrency = processors();
    let decoded_max = FeedOptions::default().record_batch_bytes_max;
    let reader = GroupReader::new(Arc::clone(store), Arc::clone(plan), schema, concurrency, decoded_max);
    let reader = &reader;
    let mut units = stream::iter(0..plan.units())
        .map(|unit| async move { reader.read(unit).await })
        .buffered(concurrency);
    let mut buckets = Vec::with_capacity(plan.rows() as usize);
    while let Some(batch) = units.try_next().await? {
        buckets.extend(lengths(batch.column(0)).map(|length| options.bucket_of(length)));
    }
    Ok(buckets)
}

/// The length of each list; 0 for a null.
fn lengths(lists: &ArrayRef) -> Box<dyn Iterator<Item = usize> + Send + '_> {
    let valid = move |row: usize, length: usize| if lists.is_null(row) { 0 } else { length };
    match lists.as_list_opt::<i64>() {
        Some(lists) => {
            Box::new(lists.offsets().lengths().enumerate().map(move |(row, length)| valid(row, length)))
        }
        None => {
            let lists = lists.as_list::<i32>();
            Box::new(lists.offsets().lengths().enumerate().map(move |(row, length)| valid(row, length)))
        }
    }
}
