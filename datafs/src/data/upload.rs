//! Multipart upload of one object that is too large for a single request.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use object_store::multipart::PartId;
use object_store::{MultipartId, PutPayload};
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::AbortHandle;

use super::backend::Backend;
use super::error::{ObjectError, Result};
use super::remote::{ABORT_LIMIT, RemoteStore};
use super::runtime::Pending;
use crate::object::ObjectId;

/// Bytes of the first [`PARTS_EQUAL`] parts; stores want at least 5 MiB.
pub(super) const PART_BYTES: usize = 8 * 1024 * 1024;
/// This many parts have equal size, which some stores demand. After them (8 GiB) parts grow, because an
/// object has at most 10,000 parts.
const PARTS_EQUAL: usize = 1_000;
/// Parts of one upload that are in flight at a time.
const PARTS_IN_FLIGHT: usize = 8;

/// An upload in progress. Dropping it aborts it.
///
/// Parts that the store does not accept (unavailable or refused) are kept, and the next call sends them
/// again. An upload fails for good only when more parts wait in memory than [`RemoteStore`] allows.
#[derive(Debug)]
pub(super) struct Upload {
    backend: Backend,
    store: Arc<RemoteStore>,
    id: ObjectId,
    upload: MultipartId,
    /// In the order of the object, after `parts`.
    in_flight: VecDeque<Part>,
    parts: Vec<PartId>,
    bytes: u64,
    completed: bool,
}

/// The result of sending a part; an error returns the part's bytes.
type Outcome = std::result::Result<PartId, (ObjectError, Bytes)>;

#[derive(Debug)]
enum Part {
    /// In flight.
    Sent { outcome: Pending<Outcome>, task: AbortHandle },
    /// The store has it, but not yet all parts before it.
    Taken(PartId),
    /// The store did not accept it; the next call sends it again.
    Kept { bytes: Bytes, _room: OwnedSemaphorePermit },
    /// The store did not accept it and there was no room to keep it: the object is never completed.
    Lost,
}

/// Size of the part with this index. The three sizes hold 8 GiB, 24 GiB and 1.2 TiB in all.
pub(super) fn part_bytes(index: usize) -> usize {
    match index {
        0..PARTS_EQUAL => PART_BYTES,
        PARTS_EQUAL..2_000 => 3 * PART_BYTES,
        _ => 20 * PART_BYTES,
    }
}

impl Upload {
    pub(super) fn begin(backend: &Backend, id: ObjectId) -> Result<Upload> {
        let store = backend.remote()?;
        let remote = Arc::clone(&store);
        let begun = async move { remote.begin_upload(id).await };
        let upload = backend.answer(backend.runtime().wait(begun))?;
        Ok(Upload {
            backend: backend.clone(),
            store,
            id,
            upload,
            in_flight: VecDeque::new(),
            parts: Vec::new(),
            bytes: 0,
            completed: false,
        })
    }

    /// Waits until `parts` more parts may be in flight. On error nothing is lost; the next call sends again
    /// what the store did not accept.
    pub(super) fn make_room(&mut self, parts: usize) -> Result<()> {
        self.settle(PARTS_IN_FLIGHT.saturating_sub(parts))
    }

    /// Sends the next part; [`Upload::make_room`] must have made room for it.
    pub(super) fn send(&mut self, part: Bytes) {
        self.bytes += part.len() as u64;
        let part = self.start(self.in_flight.len(), part);
        self.in_flight.push_back(part);
    }

    /// Sends the part at position `at` of the queue.
    fn start(&self, at: usize, part: Bytes) -> Part {
        let (id, index) = (self.id, self.parts.len() + at);
        let (store, upload) = (Arc::clone(&self.store), self.upload.clone());
        // Acquired here, so that the caller blocks instead of a growing number of tasks. The semaphore is
        // never closed; a part without a slot would only be one more in flight.
        let slots = Arc::clone(&self.store.sending);
        let slot = self.backend.runtime().wait(async move { slots.acquire_owned().await.ok() });
        let (outcome, task) = self.backend.runtime().start_task(async move {
            let sent = store.put_part(id, &upload, index, PutPayload::from(part.clone())).await;
            drop(slot);
            sent.map_err(|error| (error, part))
        });
        Part::Sent { outcome, task }
    }

    /// Sends kept parts again, then waits until at most `most` parts are in flight.
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
                // Collect all outcomes, so that the next call sends every failed part; the first error is
                // returned.
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

    /// Waits for the outcome of a part that is in flight.
    fn await_part(&mut self, at: usize) -> Result<()> {
        let (part, result) = match std::mem::replace(&mut self.in_flight[at], Part::Lost) {
            Part::Sent { outcome, .. } => match outcome.wait() {
                Some(Ok(part)) => (Part::Taken(part), Ok(())),
                Some(Err((error, bytes))) => (self.keep(bytes), Err(error)),
                None => (Part::Lost, self.backend.answer(None)),
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

    /// Completes the object from the parts that were sent. May be called again after an error.
    pub(super) fn complete(&mut self) -> Result<()> {
        if self.completed {
            return Ok(());
        }
        self.settle(0)?;
        let (store, upload) = (Arc::clone(&self.store), self.upload.clone());
        let (id, parts, bytes) = (self.id, self.parts.clone(), self.bytes);
        let completed = async move { store.complete_upload(id, &upload, parts, bytes).await };
        self.backend.answer(self.backend.runtime().wait(completed))?;
        self.completed = true;
        Ok(())
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if self.completed {
            return;
        }
        // A part that arrives after the abort may stay in the store: wait for the parts in flight first, for
        // a bounded time.
        let deadline = Instant::now() + ABORT_LIMIT;
        for part in self.in_flight.drain(..) {
            if let Part::Sent { outcome, task } = part
                && outcome.wait_until(deadline).is_none()
            {
                task.abort();
                self.backend.leave_behind();
            }
        }
        let (store, id, upload) = (Arc::clone(&self.store), self.id, std::mem::take(&mut self.upload));
        let taken = self.backend.runtime().wait(async move { store.take_back(id, &upload).await });
        if taken != Some(true) {
            self.backend.leave_behind();
        }
    }
}
