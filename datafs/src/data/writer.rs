//! Writes one object, front to back, in bounded memory.

use std::sync::Arc;

use bytes::Bytes;
use object_store::{MultipartUpload, ObjectStoreExt as _, PutPayload};

use super::checksum::{OBJECT_BYTES_MAX, Summer};
use super::error::{ObjectError, Result};
use super::local_file::{LocalFile, Unsynced};
use super::object::{Layout, ObjectId, StoredObject};
use super::pool::ObjectPool;
use super::runtime::Pending;
use crate::metrics;

/// Objects up to this size keep their checksums behind the data: one file to sync instead of two,
/// and too small for handing the file to the kernel to pay.
pub(crate) const FRAMED_BYTES_MAX: usize = 1024 * 1024;
/// One part of a multipart upload. Two of them (one filling, one on its way) are a writer's memory.
pub(crate) const PART_BYTES: usize = 4 * 1024 * 1024;
/// On a local store, shorter pieces are gathered before they are written.
const GATHER_BYTES: usize = 256 * 1024;

/// A new object. Bytes are appended; [`ObjectWriter::complete`] makes it exist. After an error on a
/// remote store the writer only returns errors: no later success can hide bytes that were lost. On a
/// local store what failed was not taken and may be tried again.
#[derive(Debug)]
pub(crate) struct ObjectWriter {
    pool: ObjectPool,
    buffer: Vec<u8>,
    summer: Summer,
    /// Given out before the object is finished: it is plain, however small it stays.
    id: Option<ObjectId>,
    sink: Option<Sink>,
    failed: bool,
}

#[derive(Debug)]
enum Sink {
    Local(LocalFile),
    Upload(Upload),
}

/// A multipart upload under way.
#[derive(Debug)]
struct Upload {
    id: ObjectId,
    parts: Box<dyn MultipartUpload>,
    in_flight: Option<Pending<object_store::Result<()>>>,
}

/// An object that is complete.
#[derive(Debug)]
pub(crate) struct Finished {
    /// The object.
    pub(crate) object: StoredObject,
    /// What has to be done before it survives a power failure; nothing on remote stores.
    pub(crate) unsynced: Option<Arc<Unsynced>>,
}

impl ObjectWriter {
    pub(super) fn new(pool: ObjectPool) -> ObjectWriter {
        ObjectWriter {
            pool,
            buffer: Vec::new(),
            summer: Summer::default(),
            id: None,
            sink: None,
            failed: false,
        }
    }

    /// Bytes appended so far.
    pub(crate) fn len(&self) -> u64 {
        self.summer.data_bytes()
    }

    /// The name that the object is going to have.
    pub(crate) fn id(&mut self) -> ObjectId {
        let pool = &self.pool;
        *self.id.get_or_insert_with(|| pool.new_id(Layout::Plain))
    }

    /// Whether [`ObjectWriter::read_into`] works; otherwise the object has to be finished first.
    pub(crate) fn is_readable(&self) -> bool {
        self.pool.is_local()
    }

    /// Fills `buffer` with what was appended, from `offset` on. Not verified.
    pub(crate) fn read_into(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let gathered_at = self.len() - self.buffer.len() as u64;
        let end = offset.saturating_add(buffer.len() as u64);
        if end > self.len() || !self.is_readable() {
            return Err(self.refusal("these bytes cannot be read before it is finished"));
        }
        let split = gathered_at.clamp(offset, end);
        let (in_file, gathered) = buffer.split_at_mut((split - offset) as usize);
        if let (Some(Sink::Local(file)), false) = (&self.sink, in_file.is_empty()) {
            file.read_into(offset, in_file)?;
        }
        if !gathered.is_empty() {
            let at = (split - gathered_at) as usize;
            gathered.copy_from_slice(&self.buffer[at..at + gathered.len()]);
        }
        Ok(())
    }

    /// Appends bytes. Blocks while the store is more than one part behind.
    pub(crate) fn append(&mut self, mut bytes: &[u8]) -> Result<()> {
        if self.failed {
            return Err(self.refusal("an earlier write of this object failed"));
        }
        if self.len().saturating_add(bytes.len() as u64) > OBJECT_BYTES_MAX {
            return Err(self.refusal("an object holds at most 1 TiB"));
        }
        if self.pool.is_local() {
            return self.append_local(bytes);
        }
        while !bytes.is_empty() {
            let room = PART_BYTES - self.buffer.len();
            let (now, rest) = bytes.split_at(room.min(bytes.len()));
            self.summer.update(now);
            self.buffer.extend_from_slice(now);
            bytes = rest;
            if self.buffer.len() == PART_BYTES {
                self.send_part().inspect_err(|_| self.failed = true)?;
            }
        }
        Ok(())
    }

    /// All bytes or, on error, none.
    fn append_local(&mut self, bytes: &[u8]) -> Result<()> {
        let gathers = if self.sink.is_some() { GATHER_BYTES } else { FRAMED_BYTES_MAX };
        if self.buffer.len() + bytes.len() > gathers {
            self.write_gathered()?;
            if bytes.len() >= GATHER_BYTES {
                self.local_file()?.append(bytes)?;
                self.summer.update(bytes);
                return Ok(());
            }
        }
        self.buffer.extend_from_slice(bytes);
        self.summer.update(bytes);
        Ok(())
    }

    fn write_gathered(&mut self) -> Result<()> {
        let gathered = std::mem::take(&mut self.buffer);
        let written = match self.local_file() {
            Ok(file) if !gathered.is_empty() => file.append(&gathered),
            other => other.map(|_| ()),
        };
        self.buffer = gathered;
        if written.is_ok() {
            self.buffer.clear();
        }
        written
    }

    fn local_file(&mut self) -> Result<&mut LocalFile> {
        let id = self.id();
        if self.sink.is_none() {
            self.sink = Some(Sink::Local(LocalFile::begin(&self.pool, id)?));
        }
        match &mut self.sink {
            Some(Sink::Local(file)) => Ok(file),
            _ => Err(ObjectError::Store {
                operation: "write",
                place: "a new object".into(),
                source: "it is being uploaded".into(),
            }),
        }
    }

    /// Completes the object and makes it durable.
    #[cfg(test)]
    pub(crate) fn finish(mut self) -> Result<StoredObject> {
        let Finished { object, unsynced } = self.complete()?;
        unsynced.map_or(Ok(()), |unsynced| unsynced.sync())?;
        Ok(object)
    }

    /// Completes the object: it can be read, and is durable once [`Finished::unsynced`] is. After an
    /// error on a local store it may be called again.
    pub(crate) fn complete(&mut self) -> Result<Finished> {
        if self.failed {
            return Err(self.refusal("an earlier write of this object failed"));
        }
        let finished = if self.pool.is_local() {
            self.complete_local()?
        } else {
            let len = self.len();
            let id = match self.sink.take() {
                Some(Sink::Upload(upload)) => self.finish_upload(upload),
                _ => self.finish_single(),
            };
            let id = id.inspect_err(|_| self.failed = true)?;
            Finished { object: StoredObject { id, len }, unsynced: None }
        };
        metrics::OBJECTS_WRITTEN.inc();
        metrics::OBJECT_WRITTEN_BYTES.inc_by(finished.object.len);
        Ok(finished)
    }

    fn complete_local(&mut self) -> Result<Finished> {
        if self.id.is_none() && self.sink.is_none() && self.buffer.len() <= FRAMED_BYTES_MAX {
            self.id = Some(self.pool.new_id(Layout::Framed));
        }
        self.write_gathered()?;
        let (id, len) = (self.id(), self.len());
        let trailer = self.summer.clone().finish(id);
        let unsynced = self.local_file()?.finish(&trailer)?;
        self.sink = None;
        // Nothing can be appended to what is finished.
        self.failed = true;
        Ok(Finished { object: StoredObject { id, len }, unsynced: Some(Arc::new(unsynced)) })
    }

    fn finish_single(&mut self) -> Result<ObjectId> {
        let data = Bytes::from(std::mem::take(&mut self.buffer));
        if data.len() <= FRAMED_BYTES_MAX && self.id.is_none() {
            let id = self.pool.new_id(Layout::Framed);
            let sums = Bytes::from(std::mem::take(&mut self.summer).finish(id));
            self.put(id, id.data_name(), PutPayload::from_iter([data, sums]))?;
            return Ok(id);
        }
        let id = self.id();
        self.put(id, id.data_name(), PutPayload::from_bytes(data))?;
        self.put_sums(id)?;
        Ok(id)
    }

    fn finish_upload(&mut self, upload: Upload) -> Result<ObjectId> {
        self.sink = Some(Sink::Upload(upload));
        if !self.buffer.is_empty() {
            self.send_part()?;
        }
        let Some(Sink::Upload(Upload { id, mut parts, in_flight })) = self.sink.take() else {
            return Err(self.refusal("the upload is gone"));
        };
        if let Some(part) = in_flight {
            self.pool.settle("write", part.wait())?;
        }
        self.pool.on_store("complete", |_| async move { parts.complete().await })?;
        self.pool.make_durable(id, &id.data_name())?;
        self.put_sums(id)?;
        Ok(id)
    }

    /// Writes the sidecar of a plain object, last: it is what makes the object readable.
    fn put_sums(&mut self, id: ObjectId) -> Result<()> {
        let sums = Bytes::from(std::mem::take(&mut self.summer).finish(id));
        self.put(id, id.sums_name(), PutPayload::from_bytes(sums))
    }

    fn put(&self, id: ObjectId, name: String, payload: PutPayload) -> Result<()> {
        let path = object_store::path::Path::from(name.as_str());
        self.pool.on_store("write", move |store| async move { store.put(&path, payload).await })?;
        self.pool.make_durable(id, &name)
    }

    /// Sends the buffer as the next part, after the one before it has arrived.
    fn send_part(&mut self) -> Result<()> {
        let buffer = std::mem::replace(&mut self.buffer, Vec::with_capacity(PART_BYTES));
        if self.sink.is_none() {
            let id = self.id();
            let path = id.data_path();
            let parts = self
                .pool
                .on_store("start an upload", |store| async move { store.put_multipart(&path).await })?;
            self.sink = Some(Sink::Upload(Upload { id, parts, in_flight: None }));
        }
        let Some(Sink::Upload(upload)) = &mut self.sink else {
            return Err(self.refusal("the upload is gone"));
        };
        if let Some(part) = upload.in_flight.take() {
            self.pool.settle("write", part.wait())?;
        }
        let part = upload.parts.put_part(PutPayload::from(buffer));
        upload.in_flight = Some(self.pool.runtime().start_future(part));
        Ok(())
    }

    fn refusal(&self, reason: &'static str) -> ObjectError {
        ObjectError::Store { operation: "write", place: "a new object".into(), source: reason.into() }
    }
}

impl Drop for ObjectWriter {
    fn drop(&mut self) {
        if let Some(Sink::Upload(Upload { mut parts, in_flight, .. })) = self.sink.take() {
            if let Some(part) = in_flight {
                part.wait();
            }
            let aborted = self.pool.on_store("abort", |_| async move { parts.abort().await });
            if let Err(error) = aborted {
                tracing::warn!(%error, "an abandoned upload could not be removed");
            }
        }
    }
}
