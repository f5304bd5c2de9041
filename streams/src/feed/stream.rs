//! Stream of one reader's batches in step order, assembled ahead of the reader.

use std::collections::VecDeque;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::Stream;
use tokio::task::JoinHandle;
use tokio_util::task::AbortOnDropHandle;

use crate::feed::error::{FeedError, Result};
use crate::feed::{AnyFeed, FeedBatch, Shard};

/// The batches of one reader, from a cursor on, without end ([`Feed::stream`](crate::feed::Feed::stream)), or those of a
/// range of places ([`Feed::stream_places`](crate::feed::Feed::stream_places)).
///
/// At most `prefetch_batches` batches are ready or being assembled ahead of the reader, in parallel where
/// processors allow; beyond that the feed pauses. Once a batch was read, brokers of a topic may be away for five minutes:
/// the stream waits, and goes on at the same row. After an error the stream ends; a new stream from the last
/// consumed step continues. Dropping the stream stops the work. A batch counts as consumed when the reader
/// stores `plan.cursor(batch.step + 1)`: batches that were prefetched and dropped are delivered again.
pub struct FeedStream {
    feed: AnyFeed,
    shard: Shard,
    /// Places that are not begun yet; empty after an error.
    places: Range<u64>,
    /// Global batches from one batch of this stream to the next one.
    stride: u64,
    prefetch_batches: usize,
    begun: VecDeque<AbortOnDropHandle<Result<FeedBatch>>>,
}

impl FeedStream {
    pub(crate) fn start(
        feed: AnyFeed,
        shard: Shard,
        places: Range<u64>,
        stride: u64,
        prefetch_batches: usize,
    ) -> Self {
        let mut stream = Self { feed, shard, places, stride, prefetch_batches, begun: VecDeque::new() };
        stream.begin();
        stream
    }

    fn begin(&mut self) {
        while self.begun.len() < self.prefetch_batches && !self.places.is_empty() {
            let part = self.feed.part_at(&self.places);
            let (feed, shard) = (self.feed.clone(), self.shard);
            let task: JoinHandle<_> = tokio::spawn(async move { feed.lasting_part(part, shard).await });
            self.begun.push_back(AbortOnDropHandle::new(task));
            self.places.start = self.feed.place_after(self.places.start, self.stride);
        }
    }
}

impl Stream for FeedStream {
    type Item = Result<FeedBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(first) = self.begun.front_mut() else {
            return Poll::Ready(None);
        };
        let batch = match ready!(Pin::new(first).poll(cx)) {
            Ok(batch) => batch,
            Err(_) => Err(FeedError::Stopped { file: self.feed.name() }),
        };
        self.begun.pop_front();
        if batch.is_err() {
            self.places = 0..0;
            self.begun.clear();
        }
        self.begin();
        Poll::Ready(Some(batch))
    }
}
