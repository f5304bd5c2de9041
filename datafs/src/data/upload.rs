//! The upload to the cloud of one object that is too large for a single request, part by part.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use object_store::multipart::PartId;
use object_store::{MultipartId, PutPayload};
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::AbortHandle;

use super::error::{ObjectError, Result};
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
///
/// What the store does not take, because it is away or refuses, is kept and sent again by the next call, so
/// that an upload fails for good only when more waits in memory than [`RemoteStore`] allows.
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

/// What became of a part; one that the store did not take comes back.
type Outcome = std::result::Result<PartId, (ObjectError, Bytes)>;

#[derive(Debug)]
enum Part {
    /// On its way.
    Sent { outcome: Pending<Outcome>, task: AbortHandle },
    /// The store has it, and not all parts before it.
    Taken(PartId),
    /// The store did not take it.
    Kept { bytes: Bytes, _room: OwnedSemaphorePermit },
    /// Nor did the store take this one, and there was no room to keep it: the object is never completed.
    Lost,
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

    /// Waits until so many more parts may be on their way. On error nothing is lost, and what the store did
    /// not take is sent again by the next call.
    pub(super) fn make_room(&mut self, parts: usize) -> Result<()> {
        self.settle(PARTS_IN_FLIGHT.saturating_sub(parts))
    }

    /// Sends the next part, for which [`Upload::make_room`] has made room.
    pub(super) fn send(&mut self, part: Bytes) {
        self.bytes += part.len() as u64;
        let part = self.start(self.in_flight.len(), part);
        self.in_flight.push_back(part);
    }

    /// Sends a part by its place in the queue.
    fn start(&self, at: usize, part: Bytes) -> Part {
        let (id, index) = (self.id, self.parts.len() + at);
        let (store, upload) = (Arc::clone(&self.store), self.upload.clone());
        // Taken here, so that the caller waits and not a growing number of tasks. The semaphore is never
        // closed; a part without a slot would only be one more on its way.
        let slots = Arc::clone(&self.store.sending);
        let slot = self.pool.runtime().wait(async move { slots.acquire_owned().await.ok() });
        let (outcome, task) = self.pool.runtime().start_task(async move {
            let sent = store.put_part(id, &upload, index, PutPayload::from(part.clone())).await;
            drop(slot);
            sent.map_err(|error| (error, part))
        });
        Part::Sent { outcome, task }
    }

    /// Waits until at most `most` parts are on their way.
    fn settle(&mut self, most: usize) -> Result<()> {
        for at in 0..self.in_flight.len() {
            match std::mem::replace(&mut self.in_flight[at], Part::Lost) {
                Part::Kept { bytes, .. } => self.in_flight[at] = self.start(at, bytes),
                Part::Lost => return Err(self.lost()),
                other => self.in_flight[at] = other,
            }
        }
        while self.in_flight.len() > most {
            if let Err(error) = self.await_part(0) {
                // All that failed is sent again at once; the first error stands for all of them.
                (1..self.in_flight.len()).for_each(|at| drop(self.await_part(at)));
                return Err(error);
            }
            match self.in_flight.pop_front() {
                Some(Part::Taken(part)) => self.parts.push(part),
                _ => return Err(self.lost()),
            }
        }
        Ok(())
    }

    /// Waits for a part that is on its way.
    fn await_part(&mut self, at: usize) -> Result<()> {
        let (part, result) = match std::mem::replace(&mut self.in_flight[at], Part::Lost) {
            Part::Sent { outcome, .. } => match outcome.wait() {
                Some(Ok(part)) => (Part::Taken(part), Ok(())),
                Some(Err((error, bytes))) => (self.keep(bytes), Err(error)),
                None => (Part::Lost, self.pool.answer(None)),
            },
            other => (other, Ok(())),
        };
        self.in_flight[at] = part;
        result
    }

    fn keep(&self, bytes: Bytes) -> Part {
        match Arc::clone(&self.store.kept).try_acquire_owned() {
            Ok(room) => Part::Kept { bytes, _room: room },
            Err(_) => Part::Lost,
        }
    }

    fn lost(&self) -> ObjectError {
        let source = "too much waited in memory while the store took nothing, so that a part was given up: \
                      write the file anew";
        ObjectError::Store { operation: "write", place: self.store.place().to_owned(), source: source.into() }
    }

    /// Makes the object exist with the parts that were sent. May be called again after an error.
    pub(super) fn complete(&mut self) -> Result<()> {
        if self.completed {
            return Ok(());
        }
        self.settle(0)?;
        let (store, upload) = (Arc::clone(&self.store), self.upload.clone());
        let (id, parts, bytes) = (self.id, self.parts.clone(), self.bytes);
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
            if let Part::Sent { outcome, task } = part
                && outcome.wait_until(deadline).is_none()
            {
                task.abort();
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
