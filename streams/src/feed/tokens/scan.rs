//! Counting of the tokens of a dataset: each unit of reading once, some at a time.

use std::sync::Arc;

use futures::{StreamExt, TryStreamExt, stream};
use object_store::ObjectStore;

use super::documents::{Refused, TokenType, count};
use super::{TokenOptions, UnitTokens};
use crate::feed::batch::{processors, project};
use crate::feed::error::{FeedError, Result};
use crate::feed::reader::GroupReader;
use crate::feed::{FeedOptions, Plan};

/// The documents and tokens of each unit of reading of a plan of rows. Reads the column of tokens.
///
/// # Errors
/// [`FeedError::NoColumn`] and [`FeedError::Invalid`] for a column that is missing or has another type, or added tokens
/// that do not fit it; [`FeedError::Row`] for a list with nulls or negative numbers; errors of reading.
pub(crate) async fn scan(
    store: &Arc<dyn ObjectStore>,
    plan: &Arc<Plan>,
    options: &TokenOptions,
) -> Result<Vec<UnitTokens>> {
    let schema = project(plan.dataset(), Some(std::slice::from_ref(&options.column)))?;
    let kind = TokenType::of(schema.field(0))?;
    let concurrency = processors();
    let decoded_max = FeedOptions::default().record_batch_bytes_max;
    let reader = GroupReader::new(Arc::clone(store), Arc::clone(plan), schema, concurrency, decoded_max);
    let reader = &reader;
    let counts = stream::iter(0..plan.units()).map(|unit| async move {
        let batch = reader.read(unit).await?;
        let file = reader.path_of(unit).to_owned();
        let counting =
            tokio::task::spawn_blocking(move || kind.documents(batch.column(0)).map(|lists| count(&lists)));
        let counted = counting.await.map_err(|_| FeedError::Stopped { file: file.clone() })?;
        counted.map_err(|refused| refused.in_unit(plan, unit, &options.column))
    });
    counts.buffered(concurrency).try_collect().await
}

impl Refused {
    /// The error for a row of a unit of reading.
    pub(super) fn in_unit(self, plan: &Plan, unit: u32, column: &str) -> FeedError {
        FeedError::Row {
            file: plan.group_file(unit).path.clone(),
            place: plan.place_in_file(unit, self.row),
            reason: format!("column {column:?}: {}", self.reason),
        }
    }
}
