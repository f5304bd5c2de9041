//! Writes one object, front to back, in bounded memory.

use std::sync::Arc;

use bytes::Bytes;

use super::checksum::{OBJECT_BYTES_MAX, Summer};
use super::codec::Codec;
use super::encoded::Encoder;
use super::error::{ObjectError, Result};
use super::local_file::{LocalFile, Unsynced};
use super::object::{Layout, ObjectId, StoredObject};
use super::pool::ObjectPool;
use super::upload::{Upload, part_bytes};
use crate::metrics;

/// Objects up to this size keep their checksums behind the data: one file to sync instead of two,
/// and too small for handing the file to the kernel to pay.
pub(crate) const FRAMED_BYTES_MAX: usize = 1024 * 1024;
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
    /// Of an object whose frames are compressed or encrypted; the buffer holds encoded bytes then.
    encoder: Option<Box<Encoder>>,
    /// Parts that were sent to a store in the cloud.
    parts: usize,
    failed: bool,
}

#[derive(Debug)]
enum Sink {
    Local(LocalFile),
    Upload(Upload),
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
            encoder: None,
            parts: 0,
            failed: false,
        }
    }

    /// A writer whose object is compressed or encrypted. After an error it only returns errors.
    pub(super) fn encoded(pool: ObjectPool, codec: &Codec) -> Result<ObjectWriter> {
        let id = pool.new_id(Layout::Encoded);
        let mut writer = ObjectWriter::new(pool);
        let encoder = Encoder::new(codec, id).map_err(|reason| writer.not_encoded(reason))?;
        writer.id = Some(id);
        writer.encoder = Some(Box::new(encoder));
        Ok(writer)
    }

    fn not_encoded(&self, reason: String) -> ObjectError {
        ObjectError::Store { operation: "encode", place: "a new object".into(), source: reason.into() }
    }

    /// Bytes appended so far.
    pub(crate) fn len(&self) -> u64 {
        self.encoder.as_ref().map_or(self.summer.data_bytes(), |encoder| encoder.data_bytes())
    }

    /// The name that the object is going to have.
    pub(crate) fn id(&mut self) -> ObjectId {
        let pool = &self.pool;
        *self.id.get_or_insert_with(|| pool.new_id(Layout::Plain))
    }

    /// Whether [`ObjectWriter::read_into`] works; otherwise the object has to be finished first.
    pub(crate) fn is_readable(&self) -> bool {
        self.pool.is_local() && self.encoder.is_none()
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

    /// Appends bytes. Blocks while the store is too many parts behind.
    pub(crate) fn append(&mut self, mut bytes: &[u8]) -> Result<()> {
        if self.failed {
            return Err(self.refusal("an earlier write of this object failed"));
        }
        if self.len().saturating_add(bytes.len() as u64) > OBJECT_BYTES_MAX {
            return Err(self.refusal("an object holds at most 1 TiB"));
        }
        if let Some(encoder) = &mut self.encoder {
            let encoded = encoder.update(bytes, &mut self.buffer);
            let sent = encoded.map_err(|reason| self.not_encoded(reason)).and_then(|()| self.send_encoded());
            return sent.inspect_err(|_| self.failed = true);
        }
        if self.pool.is_local() {
            return self.append_local(bytes);
        }
        while !bytes.is_empty() {
            let part_bytes = part_bytes(self.parts);
            let room = part_bytes - self.buffer.len();
            let (now, rest) = bytes.split_at(room.min(bytes.len()));
            self.summer.update(now);
            self.buffer.extend_from_slice(now);
            bytes = rest;
            if self.buffer.len() == part_bytes {
                self.send_part().inspect_err(|_| self.failed = true)?;
            }
        }
        Ok(())
    }

    /// Sends on what was encoded, as far as it is enough.
    fn send_encoded(&mut self) -> Result<()> {
        if self.pool.is_local() {
            return if self.buffer.len() >= GATHER_BYTES { self.write_gathered() } else { Ok(()) };
        }
        while self.buffer.len() >= part_bytes(self.parts) {
            let rest = self.buffer.split_off(part_bytes(self.parts));
            self.send_part()?;
            self.buffer = rest;
        }
        Ok(())
    }

    /// Ends an encoded object.
    fn complete_encoded(&mut self, encoder: Encoder) -> Result<Finished> {
        let object = StoredObject { id: encoder.id(), len: encoder.data_bytes() };
        // Nothing can be appended to what is finished, or has failed half-way.
        self.failed = true;
        encoder.finish(&mut self.buffer).map_err(|reason| self.not_encoded(reason))?;
        if self.pool.is_local() {
            self.write_gathered()?;
            let unsynced = self.local_file()?.finish(&[])?;
            self.sink = None;
            return Ok(Finished { object, unsynced: Some(Arc::new(unsynced)) });
        }
        self.send_encoded()?;
        if self.sink.is_none() {
            let bytes = Bytes::from(std::mem::take(&mut self.buffer));
            self.pool.put_data(object.id, vec![bytes])?;
        } else {
            if !self.buffer.is_empty() {
                self.send_part()?;
            }
            if let Some(Sink::Upload(upload)) = self.sink.take() {
                upload.complete()?;
            }
        }
        Ok(Finished { object, unsynced: None })
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
        let finished = if let Some(encoder) = self.encoder.take() {
            self.complete_encoded(*encoder)?
        } else if self.pool.is_local() {
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
            self.pool.put_data(id, vec![data, sums])?;
            return Ok(id);
        }
        let id = self.id();
        self.pool.put_data(id, vec![data])?;
        self.put_sums(id)?;
        Ok(id)
    }

    fn finish_upload(&mut self, upload: Upload) -> Result<ObjectId> {
        let id = upload.id();
        self.sink = Some(Sink::Upload(upload));
        if !self.buffer.is_empty() {
            self.send_part()?;
        }
        if let Some(Sink::Upload(upload)) = self.sink.take() {
            upload.complete()?;
        }
        self.put_sums(id)?;
        Ok(id)
    }

    /// Writes the sidecar of a plain object, last: it is what makes the object readable.
    fn put_sums(&mut self, id: ObjectId) -> Result<()> {
        self.pool.put_sums(id, Bytes::from(std::mem::take(&mut self.summer).finish(id)))
    }

    /// Sends the buffer as the next part.
    fn send_part(&mut self) -> Result<()> {
        self.parts += 1;
        let room = Vec::with_capacity(part_bytes(self.parts));
        let part = Bytes::from(std::mem::replace(&mut self.buffer, room));
        if self.sink.is_none() {
            let id = self.id();
            self.sink = Some(Sink::Upload(Upload::begin(&self.pool, id)?));
        }
        match &mut self.sink {
            Some(Sink::Upload(upload)) => upload.send(part),
            _ => Err(self.refusal("the upload is gone")),
        }
    }

    fn refusal(&self, reason: &'static str) -> ObjectError {
        ObjectError::Store { operation: "write", place: "a new object".into(), source: reason.into() }
    }
}
