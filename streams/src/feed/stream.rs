//! A reader's batches in step order, assembled ahead of it.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures::Stream;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use crate::feed::error::Result;
use crate::feed::{Feed, FeedBatch, Shard};

/// The batches of one reader, from a cursor on, without end.
///
/// At most `prefetch_batches` batches wait for the reader; beyond that the feed stands still. After
/// an error the stream ends; a new one from the last consumed step goes on. Dropping it stops the
/// work at once. A batch counts as consumed when the reader says so, by storing
/// `plan.cursor(batch.step + 1)`: what was prefetched and dropped is delivered again.
pub struct FeedStream {
    receiver: mpsc::Receiver<Result<FeedBatch>>,
    _task: AbortOnDropHandle<()>,
}

impl FeedStream {
    pub(crate) fn start(feed: Feed, shard: Shard, first: u64, ahead: usize) -> Self {
        let (sender, receiver) = mpsc::channel(ahead.max(1));
        let slots = feed.plan().slots(shard);
        let task = tokio::spawn(async move {
            for step in first.. {
                // Waiting for room first keeps the batches in memory at the number asked for.
                let Ok(permit) = sender.reserve().await else { return };
                let batch = feed.batch(step, slots.clone()).await;
                let failed = batch.is_err();
                permit.send(batch);
                if failed {
                    return;
                }
            }
        });
        Self { receiver, _task: AbortOnDropHandle::new(task) }
    }
}

impl Stream for FeedStream {
    type Item = Result<FeedBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.receiver.poll_recv(cx)
    }
}
