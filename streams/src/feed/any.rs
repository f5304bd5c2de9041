//! A feed of one dataset or of a mixture, for readers that take either.

use std::ops::Range;

use arrow::datatypes::SchemaRef;

use crate::feed::error::{FeedError, Result};
use crate::feed::patience::Patience;
use crate::feed::{EpochRows, Epochs, Feed, FeedBatch, FeedStream, MixtureFeed, PlanId, Shard};

/// A feed of one dataset or of a mixture. Cheap to clone; clones share the caches.
#[derive(Clone)]
pub enum AnyFeed {
    /// One dataset.
    Dataset(Feed),
    /// Several datasets by weight.
    Mixture(MixtureFeed),
}

impl From<Feed> for AnyFeed {
    fn from(feed: Feed) -> Self {
        Self::Dataset(feed)
    }
}

impl From<MixtureFeed> for AnyFeed {
    fn from(feed: MixtureFeed) -> Self {
        Self::Mixture(feed)
    }
}

impl AnyFeed {
    /// The hash of everything that decides the batches.
    pub fn id(&self) -> PlanId {
        match self {
            Self::Dataset(feed) => feed.plan().id(),
            Self::Mixture(feed) => feed.mixture().id(),
        }
    }

    /// The hash of the sequence of rows, see [`crate::feed::Plan::order_id`].
    pub fn order_id(&self) -> PlanId {
        match self {
            Self::Dataset(feed) => feed.plan().order_id(),
            Self::Mixture(feed) => feed.mixture().order_id(),
        }
    }

    /// Rows of an epoch whose length is not given: a pass over the dataset, or [`crate::feed::Mixture::rows`].
    pub fn rows(&self) -> u64 {
        match self {
            Self::Dataset(feed) => feed.plan().rows(),
            Self::Mixture(feed) => feed.mixture().rows(),
        }
    }

    /// The places of epochs of some length. An epoch of a mixture may have any number of rows, since its sources have no
    /// end.
    ///
    /// # Errors
    /// Those of [`Epochs::new`].
    pub fn epochs(&self, length: Option<EpochRows>) -> Result<Epochs> {
        match (self, length) {
            (Self::Mixture(_), Some(EpochRows::Rows(rows))) => Epochs::new(rows, None),
            (_, length) => Epochs::new(self.rows(), length),
        }
    }

    /// Ends the servers of shared row groups that this process runs for the feed, until [`AnyFeed::resume_serving`]: before
    /// a fork, whose child would inherit their sockets.
    pub async fn pause_serving(&self) {
        match self {
            Self::Dataset(feed) => feed.pause_serving().await,
            Self::Mixture(feed) => feed.pause_serving().await,
        }
    }

    /// Lets this process serve shared row groups again.
    pub fn resume_serving(&self) {
        match self {
            Self::Dataset(feed) => feed.resume_serving(),
            Self::Mixture(feed) => feed.resume_serving(),
        }
    }

    /// Rows of a global batch.
    pub fn batch_rows(&self) -> usize {
        match self {
            Self::Dataset(feed) => feed.plan().batch_rows(),
            Self::Mixture(feed) => feed.mixture().batch_rows(),
        }
    }

    /// The schema of every batch.
    pub fn schema(&self) -> &SchemaRef {
        match self {
            Self::Dataset(feed) => feed.schema(),
            Self::Mixture(feed) => feed.schema(),
        }
    }

    /// The first place of the global batch that is `batches` after the one that holds a place. Saturates.
    pub fn place_after(&self, place: u64, batches: u64) -> u64 {
        let batch = self.batch_rows() as u64;
        (place / batch).saturating_add(batches).saturating_mul(batch)
    }

    /// The share of a reader of the rows at `places`, see [`Feed::stream_places`].
    ///
    /// # Errors
    /// [`FeedError::Invalid`] for places beyond the last one, and for a stride of 0.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn stream_places(&self, shard: Shard, places: Range<u64>, stride: u64) -> Result<FeedStream> {
        match self {
            Self::Dataset(feed) => feed.stream_places(shard, places, stride),
            Self::Mixture(feed) => feed.stream_places(shard, places, stride),
        }
    }

    /// Reads some slots of a global batch, in slot order, see [`Feed::batch`] and [`MixtureFeed::batch`].
    ///
    /// # Errors
    /// Those of the reads.
    pub async fn batch(&self, step: u64, slots: Range<usize>) -> Result<FeedBatch> {
        match self {
            Self::Dataset(feed) => feed.batch(step, slots).await,
            Self::Mixture(feed) => feed.batch(step, slots).await,
        }
    }

    /// Estimated size of a decoded row in bytes: all columns, and the tensors of images.
    #[cfg(feature = "flight")]
    pub(crate) fn row_bytes(&self) -> u64 {
        match self {
            Self::Dataset(feed) => feed.row_bytes().saturating_add(feed.tensor_bytes()),
            Self::Mixture(feed) => feed.row_bytes(),
        }
    }

    /// A reader's rows of a part of a global batch.
    pub(crate) async fn part(&self, places: Range<u64>, shard: Shard) -> Result<FeedBatch> {
        match self {
            Self::Dataset(feed) => feed.part(places, shard).await,
            Self::Mixture(feed) => feed.part(places, shard).await,
        }
    }

    /// As [`AnyFeed::part`], and repeats a read that brokers do not answer: see [`Patience`].
    pub(crate) async fn lasting_part(&self, places: Range<u64>, shard: Shard) -> Result<FeedBatch> {
        let feed = self;
        feed.patience().outlast(move || feed.part(places.clone(), shard)).await
    }

    fn patience(&self) -> &Patience {
        match self {
            Self::Dataset(feed) => feed.patience(),
            Self::Mixture(feed) => feed.patience(),
        }
    }

    /// The part of a global batch at the beginning of a range of places, which must not be empty.
    pub(crate) fn part_at(&self, places: &Range<u64>) -> Range<u64> {
        places.start..self.place_after(places.start, 1).min(places.end)
    }

    /// The dataset or the sources, for errors.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Dataset(feed) => feed.plan().dataset().path().to_owned(),
            Self::Mixture(feed) => feed.mixture().to_string(),
        }
    }
}

/// Checks a range of places and a stride.
pub(crate) fn check_places(places: &Range<u64>, stride: u64, last: u64) -> Result<()> {
    if stride == 0 {
        return Err(FeedError::invalid("stride is 0; it must be at least 1"));
    }
    let end = places.start.max(places.end);
    if end > last {
        return Err(FeedError::invalid(format!("place {end} is beyond {last}")));
    }
    Ok(())
}
