//! The upload to the cloud of one object that is too large for a single request, part by part.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use object_store::multipart::PartId;
use object_store::{MultipartId, PutPayload};
use tokio::task::AbortHandle;

use super::error::Result;
use super::object::ObjectId;
use super::pool::ObjectPool;
use super::remote::{ABORT_LIMIT, RemoteStore};
use super::runtime::Pending;

/// Bytes of the first [`PARTS_EQUAL`] parts; stores want at least 5 MiB.
pub(super) const PART_BYTES: usize = 8 * 1024 * 1024;
/// So many parts are of one size, which some stores demand. Beyond (8 GiB) they grow, because an object
/// has at most 10,000 of them.
const PARTS_EQUAL: usize = 1_000;
/// Parts of one upload that are on their way at a time.
const PARTS_IN_FLIGHT: usize = 8;

/// An upload under way. Dropping it takes it back.
#[derive(Debug)]
pub(super) struct Upload {
    pool: ObjectPool,
    store: Arc<RemoteStore>,
    id: ObjectId,
    upload: MultipartId,
    /// In the order of the object, behind `parts`.
    in_flight: VecDeque<Part>,
    parts: Vec<PartId>,
    bytes: u64,
    completed: bool,
}

#[derive(Debug)]
struct Part {
    sent: Pending<Result<PartId>>,
    task: AbortHandle,
}

/// How large the part of this index is: 8 GiB, 24 GiB and 1.2 TiB in all.
pub(super) fn part_bytes(index: usize) -> usize {
    match index {
        0..PARTS_EQUAL => PART_BYTES,
        PARTS_EQUAL..2_000 => 3 * PART_BYTES,
        _ => 20 * PART_BYTES,
    }
}

impl Upload {
    pub(super) fn begin(pool: &ObjectPool, id: ObjectId) -> Result<Upload> {
        let store = pool.remote()?;
        let remote = Arc::clone(&store);
        let begun = async move { remote.begin_upload(id).await };
        let upload = pool.answer(pool.runtime().wait(begun))?;
        Ok(Upload {
            pool: pool.clone(),
            store,
            id,
            upload,
            in_flight: VecDeque::new(),
            parts: Vec::new(),
            bytes: 0,
            completed: false,
        })
    }

    pub(super) fn id(&self) -> ObjectId {
        self.id
    }

    /// Sends the next part. Blocks while too many are on their way.
    pub(super) fn send(&mut self, part: Bytes) -> Result<()> {
        if self.in_flight.len() >= PARTS_IN_FLIGHT {
            self.await_first()?;
        }
        self.bytes += part.len() as u64;
        let (id, index) = (self.id, self.parts.len() + self.in_flight.len());
        let (store, upload) = (Arc::clone(&self.store), self.upload.clone());
        // Taken here, so that the caller waits and not a growing number of tasks. The semaphore is never
        // closed; a part without a slot would only be one more on its way.
        let slots = Arc::clone(&self.store.sending);
        let slot = self.pool.runtime().wait(async move { slots.acquire_owned().await.ok() });
        let (sent, task) = self.pool.runtime().start_task(async move {
            let sent = store.put_part(id, &upload, index, PutPayload::from(part)).await;
            drop(slot);
            sent
        });
        self.in_flight.push_back(Part { sent, task });
        Ok(())
    }

    fn await_first(&mut self) -> Result<()> {
        if let Some(first) = self.in_flight.pop_front() {
            self.parts.push(self.pool.answer(first.sent.wait())?);
        }
        Ok(())
    }

    /// Makes the object exist with the parts that were sent.
    pub(super) fn complete(mut self) -> Result<()> {
        while !self.in_flight.is_empty() {
            self.await_first()?;
        }
        let (store, upload) = (Arc::clone(&self.store), self.upload.clone());
        let (id, parts, bytes) = (self.id, std::mem::take(&mut self.parts), self.bytes);
        let completed = async move { store.complete_upload(id, &upload, parts, bytes).await };
        self.pool.answer(self.pool.runtime().wait(completed))?;
        self.completed = true;
        Ok(())
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if self.completed {
            return;
        }
        // A part that arrives behind the end of its upload may stay on the store: those that are on
        // their way come first, for a bounded time.
        let deadline = Instant::now() + ABORT_LIMIT;
        for part in self.in_flight.drain(..) {
            if part.sent.wait_until(deadline).is_none() {
                part.task.abort();
                self.pool.leave_behind();
            }
        }
        let (store, id, upload) = (Arc::clone(&self.store), self.id, std::mem::take(&mut self.upload));
        let taken = self.pool.runtime().wait(async move { store.take_back(id, &upload).await });
        if taken != Some(true) {
            self.pool.leave_behind();
        }
    }
}
