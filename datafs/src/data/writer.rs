//! Writes one object, front to back, in bounded memory.

use bytes::Bytes;
use object_store::{MultipartUpload, ObjectStoreExt as _, PutPayload};

use super::checksum::{OBJECT_BYTES_MAX, Summer};
use super::error::{ObjectError, Result};
use super::object::{Layout, ObjectId, StoredObject};
use super::pool::ObjectPool;
use super::runtime::Pending;
use crate::metrics;

/// Objects up to this size keep their checksums behind the data: one file to sync instead of two,
/// and too small for handing the file to the kernel to pay.
pub(crate) const FRAMED_BYTES_MAX: usize = 1024 * 1024;
/// One part of a multipart upload. Two of them (one filling, one on its way) are a writer's memory.
pub(crate) const PART_BYTES: usize = 4 * 1024 * 1024;

/// A new object. Bytes are appended; [`ObjectWriter::finish`] makes it exist. After an error the
/// writer only returns errors: no later success can hide bytes that were lost.
#[derive(Debug)]
pub(crate) struct ObjectWriter {
    pool: ObjectPool,
    buffer: Vec<u8>,
    summer: Summer,
    upload: Option<Upload>,
    failed: bool,
}

/// A multipart upload under way.
#[derive(Debug)]
struct Upload {
    id: ObjectId,
    parts: Box<dyn MultipartUpload>,
    in_flight: Option<Pending<object_store::Result<()>>>,
}

impl ObjectWriter {
    pub(super) fn new(pool: ObjectPool) -> ObjectWriter {
        ObjectWriter { pool, buffer: Vec::new(), summer: Summer::default(), upload: None, failed: false }
    }

    /// Bytes appended so far.
    pub(crate) fn len(&self) -> u64 {
        self.summer.data_bytes()
    }

    /// Appends bytes. Blocks while the store is more than one part behind.
    pub(crate) fn append(&mut self, mut bytes: &[u8]) -> Result<()> {
        if self.failed {
            return Err(self.refusal("an earlier write of this object failed"));
        }
        if self.len().saturating_add(bytes.len() as u64) > OBJECT_BYTES_MAX {
            return Err(self.refusal("an object holds at most 1 TiB"));
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

    /// Completes the object and makes it durable.
    pub(crate) fn finish(mut self) -> Result<StoredObject> {
        if self.failed {
            return Err(self.refusal("an earlier write of this object failed"));
        }
        let len = self.len();
        let id = match self.upload.take() {
            None => self.finish_single()?,
            Some(upload) => self.finish_upload(upload)?,
        };
        metrics::OBJECTS_WRITTEN.inc();
        metrics::OBJECT_WRITTEN_BYTES.inc_by(len);
        Ok(StoredObject { id, len })
    }

    fn finish_single(&mut self) -> Result<ObjectId> {
        let data = Bytes::from(std::mem::take(&mut self.buffer));
        if data.len() <= FRAMED_BYTES_MAX {
            let id = self.pool.new_id(Layout::Framed);
            let sums = Bytes::from(std::mem::take(&mut self.summer).finish(id));
            self.put(id, id.data_name(), PutPayload::from_iter([data, sums]))?;
            return Ok(id);
        }
        let id = self.pool.new_id(Layout::Plain);
        self.put(id, id.data_name(), PutPayload::from_bytes(data))?;
        self.put_sums(id)?;
        Ok(id)
    }

    fn finish_upload(&mut self, upload: Upload) -> Result<ObjectId> {
        self.upload = Some(upload);
        if !self.buffer.is_empty() {
            self.send_part()?;
        }
        let Some(Upload { id, mut parts, in_flight }) = self.upload.take() else {
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
        let upload = match &mut self.upload {
            Some(upload) => upload,
            none => {
                let id = self.pool.new_id(Layout::Plain);
                let path = id.data_path();
                let parts = self
                    .pool
                    .on_store("start an upload", |store| async move { store.put_multipart(&path).await })?;
                none.insert(Upload { id, parts, in_flight: None })
            }
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
        if let Some(Upload { mut parts, in_flight, .. }) = self.upload.take() {
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
