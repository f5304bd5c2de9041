//! Stream of one reader's batches in step order, assembled ahead of the reader.

use std::collections::VecDeque;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::Stream;
use tokio::task::JoinHandle;
use tokio_util::task::AbortOnDropHandle;

use crate::feed::error::{FeedError, Result};
use crate::feed::{Feed, FeedBatch, Shard};

/// The batches of one reader, from a cursor on, without end.
///
/// At most `prefetch_batches` batches are ready or being assembled ahead of the reader, in parallel where
/// processors allow; beyond that the feed pauses. After an error the stream ends; a new stream from the last
/// consumed step continues. Dropping the stream stops the work. A batch counts as consumed when the reader
/// stores `plan.cursor(batch.step + 1)`: batches that were prefetched and dropped are delivered again.
pub struct FeedStream {
    feed: Feed,
    slots: Range<usize>,
    /// The step that is begun next; none after an error.
    next: Option<u64>,
    prefetch_batches: usize,
    begun: VecDeque<AbortOnDropHandle<Result<FeedBatch>>>,
}

impl FeedStream {
    pub(crate) fn start(feed: Feed, shard: Shard, first: u64, prefetch_batches: usize) -> Self {
        let slots = feed.plan().slots(shard);
        let mut stream = Self { feed, slots, next: Some(first), prefetch_batches, begun: VecDeque::new() };
        stream.begin();
        stream
    }

    fn begin(&mut self) {
        while self.begun.len() < self.prefetch_batches
            && let Some(step) = self.next
        {
            let (feed, slots) = (self.feed.clone(), self.slots.clone());
            let task: JoinHandle<_> = tokio::spawn(async move { feed.batch(step, slots).await });
            self.begun.push_back(AbortOnDropHandle::new(task));
            self.next = step.checked_add(1);
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
            Err(_) => Err(FeedError::Stopped { file: self.feed.plan().dataset().path().into() }),
        };
        self.begun.pop_front();
        if batch.is_err() {
            self.next = None;
            self.begun.clear();
        }
        self.begin();
        Poll::Ready(Some(batch))
    }
}
