//! The assembly of a batch: columns gathered as they are, tensors in the place of images, and augmentation keys.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, RecordBatchOptions};
use arrow::datatypes::{Field, Schema, SchemaRef};
use arrow::error::ArrowError;
use object_store::ObjectStore;

use crate::feed::Plan;
use crate::feed::error::{FeedError, Result};
use crate::feed::gather::{GatherError, gather, gather_guarded};
use crate::feed::image::{self, ImageOptions, Images, Rows};

/// How the batches of one dataset or of a mixture are assembled from decoded row groups.
pub(crate) struct Assembly {
    /// The columns of the batches.
    schema: SchemaRef,
    /// The columns that are gathered as they are, with their positions among those of the row groups.
    plain: (SchemaRef, Vec<usize>),
    images: Option<Images>,
    /// The seed of each origin of rows; none without a column of keys.
    key_seeds: Vec<u64>,
}

impl Assembly {
    /// The assembly for row groups with the columns of `schema`. `origins` are the dataset, or those of a mixture, with
    /// the stores of their files. `key_column` is the name of the column of keys, if there is one.
    ///
    /// # Errors
    /// [`FeedError::NoColumn`] and [`FeedError::Invalid`] for images and keys that are not possible.
    pub(crate) fn new(
        origins: &[(Arc<Plan>, Arc<dyn ObjectStore>)],
        schema: &SchemaRef,
        images: &BTreeMap<String, ImageOptions>,
        key_column: Option<&str>,
    ) -> Result<Arc<Self>> {
        let images = Images::new(origins, schema, images)?;
        let is_plain = |at: &usize| images.as_ref().is_none_or(|images| !images.has(*at));
        let plain: Vec<usize> = (0..schema.fields().len()).filter(is_plain).collect();
        let fields: Vec<Field> = plain.iter().map(|at| schema.field(*at).clone()).collect();
        let delivered = images.as_ref().map_or_else(|| Arc::clone(schema), |images| images.schema(schema));
        let key_seeds = match key_column {
            Some(_) => origins.iter().map(|(plan, _)| plan.seed()).collect(),
            None => Vec::new(),
        };
        Ok(Arc::new(Self {
            schema: with_keys(delivered, key_column)?,
            plain: (Arc::new(Schema::new(fields)), plain),
            images,
            key_seeds,
        }))
    }

    /// The schema of every batch.
    pub(crate) fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    /// Size of the tensors of a row's images.
    pub(crate) fn tensor_bytes(&self) -> u64 {
        self.images.as_ref().map_or(0, Images::row_bytes)
    }

    /// The batch of some rows, whose columns other than images take about `bytes`.
    pub(crate) async fn batch(
        self: &Arc<Self>,
        rows: &Arc<Rows>,
        bytes: u64,
    ) -> Result<Result<RecordBatch, GatherError>> {
        let tensors = match &self.images {
            Some(images) => images.tensors(rows).await?,
            None => Vec::new(),
        };
        let (assembly, rows) = (Arc::clone(self), Arc::clone(rows));
        Ok(gather_guarded(bytes, move || assembly.gathered(&rows, tensors)).await)
    }

    /// The columns of some rows, in the order of the schema.
    fn gathered(&self, rows: &Rows, tensors: Vec<(usize, ArrayRef)>) -> Result<RecordBatch, ArrowError> {
        let (schema, positions) = &self.plain;
        let plain = gather(schema, positions, &rows.sources, &rows.index)?;
        if tensors.is_empty() && self.key_seeds.is_empty() {
            return Ok(plain);
        }
        let plain = positions.iter().copied().zip(plain.columns().iter().cloned());
        let mut columns: Vec<(usize, ArrayRef)> = plain.chain(tensors).collect();
        columns.sort_by_key(|(at, _)| *at);
        let mut columns: Vec<ArrayRef> = columns.into_iter().map(|(_, column)| column).collect();
        if !self.key_seeds.is_empty() {
            columns.push(image::keys(&self.key_seeds, &rows.origins, &rows.epochs, &rows.rows));
        }
        let options = RecordBatchOptions::new().with_row_count(Some(rows.index.len()));
        RecordBatch::try_new_with_options(Arc::clone(&self.schema), columns, &options)
    }
}

/// The schema with a last column of augmentation keys, if it has a name.
pub(crate) fn with_keys(schema: SchemaRef, name: Option<&str>) -> Result<SchemaRef> {
    let Some(name) = name else { return Ok(schema) };
    if name.is_empty() || schema.column_with_name(name).is_some() {
        return Err(FeedError::invalid(format!(
            "the column of augmentation keys cannot be named {name:?}: the name is empty, or a delivered column has it; \
             choose another one"
        )));
    }
    let mut fields: Vec<Field> = schema.fields().iter().map(|f| f.as_ref().clone()).collect();
    fields.push(Field::new(name, image::KEY_FIELD_TYPE, false));
    Ok(Arc::new(Schema::new(fields)))
}
