//! The feed of a mixture: batches gathered from the row groups of all its sources.
//!
//! A row keeps the seed of its source: its keys, and the crops and flips of its images, are those that the plan of the
//! source gives it in this pass.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use arrow::datatypes::{Field, Schema, SchemaRef};
use futures::future::try_join_all;
use object_store::ObjectStore;

use super::Mixture;
use crate::dataset::Column;
use crate::feed::any::check_places;
use crate::feed::assembly::Assembly;
use crate::feed::batch::{Fetched, Form, batches_ahead, columns, pack_sequences, project};
use crate::feed::error::{FeedError, Result};
use crate::feed::image;
use crate::feed::order::PLACES_MAX;
use crate::feed::patience::Patience;
use crate::feed::places::lane_positions;
use crate::feed::{AnyFeed, Feed, FeedBatch, FeedOptions, FeedStream, Shard};

/// The batches of a mixture. Cheap to clone; clones share the caches.
///
/// Memory: that of a [`Feed`] for each source. Of the cache limit each source has its working set first, and its part by
/// weight of the rest. The sources share the bounds of one feed for images that are decoded. A stream assembles at most
/// 512 MiB of tensors or packed tokens ahead, or one batch.
#[derive(Clone)]
pub struct MixtureFeed {
    inner: Arc<Inner>,
}

struct Inner {
    mixture: Arc<Mixture>,
    feeds: Vec<Feed>,
    schema: SchemaRef,
    form: Form,
    has_keys: bool,
    /// The largest estimate of a decoded row of a source, without its images.
    row_bytes: u64,
    prefetch_batches: usize,
    patience: Patience,
}

impl MixtureFeed {
    /// Opens a mixture over the stores that hold the files of its sources, in their order. Reads nothing yet.
    ///
    /// # Errors
    /// [`FeedError::MixedColumns`] when the sources do not have the same columns with the same types; those of
    /// [`Feed::open`]; [`FeedError::Invalid`] for another number of stores than sources, and for buckets.
    pub fn open(
        mixture: impl Into<Arc<Mixture>>,
        stores: &[Arc<dyn ObjectStore>],
        options: &FeedOptions,
    ) -> Result<Self> {
        let mixture = mixture.into();
        let sources = mixture.sources();
        if stores.len() != sources.len() {
            let (stores, sources) = (stores.len(), sources.len());
            return Err(FeedError::invalid(format!("{stores} stores for a mixture of {sources} sources")));
        }
        if sources.iter().any(|source| source.plan.buckets().is_some()) {
            return Err(FeedError::invalid("buckets are for one dataset; leave them out of a mixture"));
        }
        let packing =
            |source: &super::MixtureSource| source.plan.packing().map(|packing| packing.options().clone());
        if sources.iter().any(|source| packing(source) != sources.first().and_then(packing)) {
            return Err(FeedError::invalid(
                "a mixture packs the tokens of all its sources alike, or of none",
            ));
        }
        let read = match sources.first() {
            Some(source) => columns(&source.plan, options)?,
            None => None,
        };
        let schema = common_schema(&mixture, read.as_deref())?;
        // The sources deliver row groups: images and keys are made of the mixed rows.
        let reading = FeedOptions { images: BTreeMap::new(), key_column: None, ..options.clone() };
        let open = |((source, store), cache): ((&super::MixtureSource, &Arc<dyn ObjectStore>), u64)| {
            let reading = FeedOptions { cache_bytes_max: cache, ..reading.clone() };
            Feed::with_schema(Arc::clone(&source.plan), Arc::clone(store), &reading, Arc::clone(&schema))
        };
        let caches = mixture.cache_parts(options.cache_bytes_max);
        let feeds = sources.iter().zip(stores).zip(caches).map(open).collect::<Result<Vec<_>>>()?;
        let row_bytes = feeds.iter().map(Feed::row_bytes).max().unwrap_or(0);
        let prefetch_batches = options.prefetch_batches;
        // Sequences have other columns than those that are read, in all sources the same.
        let form = match feeds.first().and_then(Feed::packer) {
            Some(packer) => Form::Sequences(Arc::clone(packer)),
            None => {
                let origins = sources.iter().zip(stores);
                let origins = origins.map(|(source, store)| (Arc::clone(&source.plan), Arc::clone(store)));
                let (origins, keys) = (origins.collect::<Vec<_>>(), options.key_column.as_deref());
                Form::Rows(Assembly::new(&origins, &schema, &options.images, keys)?)
            }
        };
        let schema = form.schema(options.key_column.as_deref())?;
        let (has_keys, patience) = (options.key_column.is_some(), Patience::default());
        let inner = Inner { mixture, feeds, schema, form, has_keys, row_bytes, prefetch_batches, patience };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Ends the servers of shared row groups, as [`Feed::pause_serving`].
    pub async fn pause_serving(&self) {
        for feed in &self.inner.feeds {
            feed.pause_serving().await;
        }
    }

    /// Lets this process serve shared row groups again.
    pub fn resume_serving(&self) {
        self.inner.feeds.iter().for_each(Feed::resume_serving);
    }

    /// What the streams know of an outage of brokers.
    pub(crate) fn patience(&self) -> &Patience {
        &self.inner.patience
    }

    /// The mixture.
    pub fn mixture(&self) -> &Arc<Mixture> {
        &self.inner.mixture
    }

    /// The schema of every batch.
    pub fn schema(&self) -> &SchemaRef {
        &self.inner.schema
    }

    /// The largest estimate of a decoded row of a source, with the tensors of its images.
    #[cfg(feature = "flight")]
    pub(crate) fn row_bytes(&self) -> u64 {
        match &self.inner.form {
            Form::Rows(assembly) => self.inner.row_bytes.saturating_add(assembly.tensor_bytes()),
            Form::Sequences(_) => self.inner.row_bytes,
        }
    }

    /// Streams a reader's share of the rows at `places`, one global batch at a time, of which it takes every
    /// `stride`-th: as [`Feed::stream_places`]. [`FeedBatch::sources`] names the source of each row, and
    /// [`FeedBatch::rows`] and [`FeedBatch::epochs`] are those of the source.
    ///
    /// # Errors
    /// [`FeedError::Invalid`] for places beyond the last one, and for a stride of 0.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn stream_places(&self, shard: Shard, places: Range<u64>, stride: u64) -> Result<FeedStream> {
        check_places(&places, stride, PLACES_MAX)?;
        let ahead = self.inner.batches_ahead(shard);
        Ok(FeedStream::start(AnyFeed::from(self.clone()), shard, places, stride, ahead))
    }

    /// Reads some slots of a global batch, in slot order, as [`Feed::batch`]. [`super::Mixture::places_of_batch`] tells the
    /// place of each.
    ///
    /// # Errors
    /// [`FeedError::Invalid`] for a step or slots out of bounds, and those of [`Feed::batch`].
    pub async fn batch(&self, step: u64, slots: Range<usize>) -> Result<FeedBatch> {
        let mixture = &self.inner.mixture;
        let batch_rows = mixture.batch_rows();
        if slots.start > slots.end || slots.end > batch_rows {
            let Range { start, end } = slots;
            return Err(FeedError::invalid(format!("slots {start}..{end} of a batch of {batch_rows} rows")));
        }
        self.listed(mixture.place_of_step(step)..mixture.place_of_step(step.saturating_add(1)), slots).await
    }

    /// A reader's rows of a part of a global batch.
    pub(crate) async fn part(&self, places: Range<u64>, shard: Shard) -> Result<FeedBatch> {
        check_places(&places, 1, PLACES_MAX)?;
        let slots = shard.slots_of(0..(places.end - places.start) as usize);
        self.listed(places, slots).await
    }

    /// The rows with the numbers `slots` of those at `places`, which are in one global batch. The places belong to the
    /// sources in turns, and each source lists its rows lane by lane: a reader with a part of the slots touches few lanes
    /// of each source.
    async fn listed(&self, places: Range<u64>, slots: Range<usize>) -> Result<FeedBatch> {
        let Inner { mixture, feeds, schema, form, has_keys, row_bytes, .. } = &*self.inner;
        check_places(&places, 1, PLACES_MAX)?;
        let own = places.start + slots.start as u64..places.start + slots.end as u64;
        let (before, after) = (mixture.counts(places.start), mixture.counts(places.end));
        let (own_before, own_after) = (mixture.counts(own.start), mixture.counts(own.end));
        let fetching = feeds.iter().enumerate().map(|(at, feed)| {
            let share = own_before[at] - before[at]..own_after[at] - before[at];
            let order = feed.plan().order();
            let lanes = lane_positions(order, &(before[at]..after[at]), &share);
            let (step, rows) = (before[at] / order.batch, (share.end - share.start) as usize);
            async move { feed.fetch(step, &lanes, rows).await }
        });
        let fetched: Vec<Fetched> = try_join_all(fetching).await?;

        // The row groups of all sources one after another, and the rows in the order of the slots.
        let mut offsets = Vec::with_capacity(fetched.len());
        let mut groups = Vec::new();
        for source in &fetched {
            offsets.push(groups.len());
            groups.extend(source.groups.iter().cloned());
        }
        let turns = mixture.turns().sources(own);
        let mut next = vec![0; fetched.len()];
        let (mut index, mut rows, mut epochs) = (Vec::new(), Vec::new(), Vec::new());
        for &source in &turns {
            let (picks, at) = (&fetched[source].picks, next[source]);
            next[source] += 1;
            let (group, row) = picks.index[at];
            index.push((offsets[source] + group, row));
            rows.push(picks.rows[at]);
            epochs.push(picks.epochs[at]);
        }
        let sources: Vec<u32> = turns.iter().map(|&source| source as u32).collect();
        let numbers = image::Rows { sources: groups, index, rows, epochs, origins: sources };
        let numbers = Arc::new(numbers);
        let batch = match form {
            Form::Rows(assembly) => assembly.batch(&numbers, row_bytes * slots.len() as u64).await?,
            Form::Sequences(packer) => {
                let sequences =
                    feeds.iter().zip(&fetched).map(|(feed, fetched)| feed.sequences(fetched).into_iter());
                let mut sequences: Vec<_> = sequences.collect();
                let turns = turns.iter().filter_map(|&source| sequences[source].next()).collect();
                let image::Rows { rows, epochs, origins, .. } = &*numbers;
                let seeds: Vec<u64> = feeds.iter().map(|feed| feed.plan().seed()).collect();
                let keys = has_keys.then(|| image::keys(&seeds, origins, epochs, rows));
                pack_sequences(packer, turns, keys, schema).await?
            }
        };
        let batch = batch.map_err(|error| {
            let files = feeds.iter().zip(&fetched).filter(|(_, fetched)| !fetched.picks.groups.is_empty());
            let files = files.map(|(feed, fetched)| feed.files_of(&fetched.picks.groups));
            error.in_files(|| files.collect::<Vec<_>>().join(", "))
        })?;
        let step = places.start / mixture.batch_rows() as u64;
        let (rows, epochs, sources) = numbers.into_numbers();
        Ok(FeedBatch { step, slots, batch, rows, epochs, sources })
    }
}

impl Inner {
    /// Batches that a stream assembles ahead of a reader, within the bound for tensors and packed tokens.
    fn batches_ahead(&self, shard: Shard) -> usize {
        let row_bytes = self.form.tensor_bytes();
        let slots = shard.slots(self.mixture.batch_rows());
        batches_ahead(row_bytes.saturating_mul(slots.len() as u64), self.prefetch_batches)
    }
}

/// The columns of all sources, which must have the same types: `columns`, or those of the first source, which are those
/// of the others then.
fn common_schema(mixture: &Mixture, columns: Option<&[String]>) -> Result<SchemaRef> {
    let mut common: Vec<Column<'_>> = Vec::new();
    for (at, source) in mixture.sources().iter().enumerate() {
        let name = source.name.as_str();
        let schema = project(source.plan.dataset(), columns);
        if at == 0 {
            let fields = schema?
                .fields()
                .iter()
                .map(|field| Column::new(field, field.data_type().clone(), name))
                .collect();
            common = fields;
            continue;
        }
        let first = mixture.sources()[0].name.as_str();
        let differs =
            |column: &str, known: Option<&Column<'_>>, other: Option<&Field>| FeedError::MixedColumns {
                column: column.to_owned(),
                first: match known {
                    Some(known) => format!("{} in {}", known.field().data_type(), known.place()),
                    None => format!("missing in {first}"),
                },
                other: match other {
                    Some(other) => format!("{} in {name}", other.data_type()),
                    None => format!("missing in {name}"),
                },
            };
        let schema = match schema {
            Err(FeedError::NoColumn { column, .. }) => {
                let known = common.iter().find(|known| *known.field().name() == column);
                return Err(differs(&column, known, None));
            }
            schema => schema?,
        };
        for known in &mut common {
            let column = known.field().name().clone();
            let other = schema.field_with_name(&column).ok();
            if !other.is_some_and(|other| known.add(other, other.data_type(), name)) {
                return Err(differs(&column, Some(&*known), other));
            }
        }
        let is_known = |field: &Field| common.iter().any(|known| known.field().name() == field.name());
        if let Some(more) = schema.fields().iter().find(|field| !is_known(field)) {
            return Err(differs(more.name(), None, Some(more)));
        }
    }
    let sources = mixture.sources().len();
    Ok(Arc::new(Schema::new(common.into_iter().map(|column| column.finish(sources)).collect::<Vec<_>>())))
}
