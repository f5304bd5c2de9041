//! Stream of one reader's batches in slots, filled ahead of the reader.

use std::collections::VecDeque;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures::Stream;
use tokio::task::JoinHandle;
use tokio::time::{Sleep, sleep};
use tokio_util::task::AbortOnDropHandle;

use crate::feed::error::{FeedError, Result};
use crate::feed::staging::ring::Ring;
use crate::feed::staging::{StagedBatch, Staging};
use crate::feed::{AnyFeed, Shard};

/// The batches of one reader at a range of places, in slots ([`AnyFeed::stream_staged`]).
///
/// A batch is begun when there is a slot for it, up to four ahead of the reader. A reader that holds all slots is waited
/// for, for [`HELD_MAX`](crate::feed::staging::HELD_MAX). After an error the stream ends; a new one from the first batch that
/// was not delivered goes on. Dropping the stream stops the work; slots that are being filled go back to the ring.
pub struct StagedStream {
    feed: AnyFeed,
    shard: Shard,
    /// Places that are not begun yet; empty after an error.
    places: Range<u64>,
    stride: u64,
    staging: Arc<Staging>,
    ring: Arc<Ring>,
    begun: VecDeque<AbortOnDropHandle<Result<StagedBatch>>>,
    /// The end of the wait for a reader that holds all slots.
    patience: Option<Pin<Box<Sleep>>>,
}

impl StagedStream {
    pub(super) fn new(
        feed: AnyFeed,
        shard: Shard,
        places: Range<u64>,
        stride: u64,
        staging: Arc<Staging>,
    ) -> Result<Self> {
        let ring = staging.ring()?;
        Ok(Self { feed, shard, places, stride, staging, ring, begun: VecDeque::new(), patience: None })
    }

    /// Begins batches in their order as long as there are slots: a later batch never takes the slot of an earlier one.
    fn begin(&mut self, cx: &mut Context<'_>) {
        while self.begun.len() < self.staging.ahead && !self.places.is_empty() {
            let Poll::Ready(lease) = self.staging.poll_lease(&self.ring, cx) else { break };
            let part = self.feed.part_at(&self.places);
            let (feed, shard, staging) = (self.feed.clone(), self.shard, Arc::clone(&self.staging));
            let task: JoinHandle<Result<StagedBatch>> = tokio::spawn(async move {
                let batch = feed.lasting_part(part, shard).await?;
                let filling = tokio::task::spawn_blocking(move || staging.fill(lease, batch));
                filling.await.map_err(|_| FeedError::Stopped { file: feed.name() })?
            });
            self.begun.push_back(AbortOnDropHandle::new(task));
            self.places.start = self.feed.place_after(self.places.start, self.stride);
        }
    }

    fn end(&mut self) {
        self.places = 0..0;
        self.begun.clear();
    }
}

impl Stream for StagedStream {
    type Item = Result<StagedBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        this.begin(cx);
        let Some(first) = this.begun.front_mut() else {
            if this.places.is_empty() {
                return Poll::Ready(None);
            }
            let held_max = this.staging.held_max;
            ready!(this.patience.get_or_insert_with(|| Box::pin(sleep(held_max))).as_mut().poll(cx));
            let error = this.staging.held(&this.ring);
            this.end();
            return Poll::Ready(Some(Err(error)));
        };
        this.patience = None;
        let batch = match ready!(Pin::new(first).poll(cx)) {
            Ok(batch) => batch,
            Err(_) => Err(FeedError::Stopped { file: this.feed.name() }),
        };
        this.begun.pop_front();
        match &batch {
            Ok(_) => this.begin(cx),
            Err(_) => this.end(),
        }
        Poll::Ready(Some(batch))
    }
}
