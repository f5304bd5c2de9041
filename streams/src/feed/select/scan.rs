//! Reading of the columns by which rows are selected: some units of reading at a time, each only once.

use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::buffer::BooleanBuffer;
use arrow::datatypes::SchemaRef;
use futures::{StreamExt, TryStreamExt, stream};
use object_store::ObjectStore;

use super::filter::{Filter, no_column};
use super::rows::{RowSetBuilder, SELECTABLE_ROWS_MAX};
use super::split::{HashRange, hash_of_key, hash_of_row};
use super::value::{Kind, Value, Values};
use super::{RowSet, Selection};
use crate::dataset::Dataset;
use crate::feed::batch::{processors, project};
use crate::feed::error::{FeedError, Result};
use crate::feed::reader::GroupReader;
use crate::feed::{FeedOptions, Plan, PlanOptions};

/// Rows whose numbers alone are hashed at a time.
const NUMBERED_ROWS: u64 = 1 << 20;

/// A selection bound to the columns of a dataset.
struct Bound {
    filter: Option<Filter>,
    /// Places of the filter's columns among those that are read.
    filtered: Vec<usize>,
    part: Option<HashRange>,
    /// Places of the key columns among those that are read; none for the row's file and number.
    keys: Vec<usize>,
}

/// Consecutive rows of one file.
struct Rows {
    file: String,
    /// Number of the first row in the file.
    first: u64,
    rows: u64,
}

/// The rows that a selection selects. Reads the columns of the filter and the key, and nothing without them.
///
/// # Errors
/// [`FeedError::NoColumn`] and [`FeedError::Invalid`] for columns that are missing or have a wrong type; errors of
/// reading, naming the file.
pub(crate) async fn scan(
    store: &Arc<dyn ObjectStore>,
    dataset: &Dataset,
    selection: &Selection,
) -> Result<RowSet> {
    let limit = SELECTABLE_ROWS_MAX;
    if dataset.rows() > limit {
        let path = dataset.path().to_owned();
        return Err(FeedError::TooLarge { path, what: "the number of rows to select from", limit });
    }
    let columns = columns(selection);
    let mut set = RowSetBuilder::new(dataset.rows());
    let schema = match columns.is_empty() {
        true => None,
        false => Some(project(dataset, Some(&columns))?),
    };
    let bound = Arc::new(Bound::new(selection, &columns, schema.as_ref())?);
    match schema {
        Some(schema) => read_columns(store, dataset, schema, bound, &mut set).await?,
        None => number_rows(dataset, bound, &mut set).await?,
    }
    Ok(set.finish())
}

/// The columns to read, each once.
fn columns(selection: &Selection) -> Vec<String> {
    let mut columns: Vec<String> = Vec::new();
    let filtered = selection.filter.iter().flat_map(Filter::columns);
    for column in filtered.chain(selection.split.iter().flat_map(|split| split.by())) {
        if !columns.contains(column) {
            columns.push(column.clone());
        }
    }
    columns
}

async fn read_columns(
    store: &Arc<dyn ObjectStore>,
    dataset: &Dataset,
    schema: SchemaRef,
    bound: Arc<Bound>,
    set: &mut RowSetBuilder,
) -> Result<()> {
    let plan = Arc::new(Plan::new(dataset.clone(), &PlanOptions::default())?);
    let decoded_max = FeedOptions::default().record_batch_bytes_max;
    let concurrency = processors();
    let reader = GroupReader::new(Arc::clone(store), Arc::clone(&plan), schema, concurrency, decoded_max);
    let (mut units, mut before) = (Vec::new(), (0, 0));
    for unit in 0..plan.units() {
        let (address, first) = (plan.group(unit), plan.base(unit));
        if address.file != before.0 {
            before = (address.file, first);
        }
        let file = plan.group_file(unit).path.clone();
        units.push((unit, first, Rows { file, first: first - before.1, rows: address.rows.into() }));
    }
    let reader = &reader;
    let mut masks = stream::iter(units)
        .map(|(unit, first, rows)| {
            let bound = Arc::clone(&bound);
            async move {
                let batch = reader.read(unit).await?;
                let stopped = FeedError::Stopped { file: rows.file.clone() };
                let mask = tokio::task::spawn_blocking(move || bound.mask(&batch, &rows));
                Ok::<_, FeedError>((first, mask.await.map_err(|_| stopped)??))
            }
        })
        .buffer_unordered(concurrency);
    while let Some((first, mask)) = masks.try_next().await? {
        set.add(first, &mask);
    }
    Ok(())
}

async fn number_rows(dataset: &Dataset, bound: Arc<Bound>, set: &mut RowSetBuilder) -> Result<()> {
    let mut base = 0;
    for file in dataset.files() {
        let total: u64 = file.row_groups.iter().map(|group| group.rows).sum();
        let mut first = 0;
        while first < total {
            let rows = Rows { file: file.path.clone(), first, rows: (total - first).min(NUMBERED_ROWS) };
            let (bound, count) = (Arc::clone(&bound), rows.rows);
            let mask = tokio::task::spawn_blocking(move || {
                (0..count as usize).map(|row| bound.selects(row, &rows, &[])).collect::<BooleanBuffer>()
            });
            let mask = mask.await.map_err(|_| FeedError::Stopped { file: file.path.clone() })?;
            set.add(base + first, &mask);
            first += count;
        }
        base += total;
    }
    Ok(())
}

impl Bound {
    fn new(selection: &Selection, columns: &[String], schema: Option<&SchemaRef>) -> Result<Self> {
        let place = |name: &String| columns.iter().position(|column| column == name).unwrap_or(0);
        let mut bound = Bound { filter: None, filtered: Vec::new(), part: None, keys: Vec::new() };
        if let (Some(filter), Some(schema)) = (&selection.filter, schema) {
            bound.filter = Some(filter.bind(schema)?);
            bound.filtered = filter.columns().iter().map(place).collect();
        }
        if let Some(split) = &selection.split {
            for name in split.by() {
                let schema = schema.ok_or_else(|| FeedError::invalid("split_by needs columns"))?;
                let field = schema.field_with_name(name).map_err(|_| no_column(name, schema))?;
                if Kind::of(field.data_type()).is_none() {
                    return Err(FeedError::invalid(format!(
                        "split_by: column {name:?} is {}; a key has integers, floats, flags, texts, bytes, dates or \
                         timestamps",
                        field.data_type()
                    )));
                }
            }
            bound.part = Some(split.range());
            bound.keys = split.by().iter().map(place).collect();
        }
        Ok(bound)
    }

    /// Which rows of a batch are selected.
    fn mask(&self, batch: &RecordBatch, rows: &Rows) -> Result<BooleanBuffer> {
        let columns = batch.columns().iter().map(Values::new).collect::<Result<Vec<_>, _>>();
        let columns = columns.map_err(|error| FeedError::assemble(&rows.file, error))?;
        Ok((0..batch.num_rows()).map(|row| self.selects(row, rows, &columns)).collect())
    }

    fn selects(&self, row: usize, rows: &Rows, columns: &[Values]) -> bool {
        let value = |place: &usize| columns.get(*place).map_or(Value::Null, |values| values.get(row));
        if self.filter.as_ref().is_some_and(|filter| {
            !filter.selects(|column| self.filtered.get(column).map_or(Value::Null, value))
        }) {
            return false;
        }
        let Some(part) = self.part else { return true };
        part.contains(match self.keys.as_slice() {
            [] => hash_of_row(&rows.file, rows.first + row as u64),
            keys => hash_of_key(keys.iter().map(value)),
        })
    }
}
