//! The writer of one object: front to back, in bounded memory.

use std::sync::Arc;

use bytes::Bytes;

use super::backend::Backend;
use super::checksum::{OBJECT_BYTES_MAX, Summer};
use super::codec::Codec;
use super::encoded::Encoder;
use super::error::{ObjectError, Result};
use super::local_file::{LocalFile, Unsynced};
use super::upload::{Upload, part_bytes};
use crate::metrics;
use crate::object::{Layout, ObjectId, StoredObject};

/// Objects up to this size keep their checksums behind the data: one file to sync instead of two. They are
/// too small for passing the file to the kernel to pay.
pub(crate) const FRAMED_BYTES_MAX: usize = 1024 * 1024;
/// On a local store, shorter appends are buffered.
const GATHER_BYTES: usize = 256 * 1024;

/// A new object: append bytes, then [`ObjectWriter::complete`] stores it. Bytes of a failed append were not
/// taken, and both calls can be retried while no bytes were lost; a full disk loses none. Bytes are lost when
/// encoding fails, or when a remote store is unavailable while more parts wait than the writer may keep. From
/// then on the writer only returns errors, so that no later success can hide the loss.
#[derive(Debug)]
pub(crate) struct ObjectWriter {
    backend: Backend,
    buffer: Vec<u8>,
    summer: Summer,
    /// Assigned before the object is finished: unless encoded, it is then plain, however small it stays.
    id: Option<ObjectId>,
    sink: Option<Sink>,
    /// Set for compressed or encrypted objects; `buffer` then holds encoded bytes.
    encoder: Option<Box<Encoder>>,
    /// Number of parts sent to a remote store.
    parts: usize,
    /// Set once the end was written, at least in memory: no more appends.
    ending: Option<StoredObject>,
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
    /// Must be synced before the object survives a power failure; `None` on remote stores.
    pub(crate) unsynced: Option<Arc<Unsynced>>,
}

impl ObjectWriter {
    pub(super) fn new(backend: Backend) -> ObjectWriter {
        ObjectWriter {
            backend,
            buffer: Vec::new(),
            summer: Summer::default(),
            id: None,
            sink: None,
            encoder: None,
            parts: 0,
            ending: None,
            failed: false,
        }
    }

    /// A writer whose object is compressed or encrypted.
    pub(super) fn encoded(backend: Backend, codec: &Codec) -> Result<ObjectWriter> {
        let id = backend.new_id(Layout::Encoded);
        let mut writer = ObjectWriter::new(backend);
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
        match (&self.ending, &self.encoder) {
            (Some(object), _) => object.len,
            (None, Some(encoder)) => encoder.data_bytes(),
            (None, None) => self.summer.data_bytes(),
        }
    }

    /// Whether [`ObjectWriter::complete`] has begun, so that nothing can be appended.
    pub(crate) fn is_ending(&self) -> bool {
        self.ending.is_some()
    }

    /// The id of the object; assigns one if needed.
    pub(crate) fn id(&mut self) -> ObjectId {
        let backend = &self.backend;
        *self.id.get_or_insert_with(|| backend.new_id(Layout::Plain))
    }

    /// Whether [`ObjectWriter::read_into`] works; otherwise the object has to be finished first.
    pub(crate) fn is_readable(&self) -> bool {
        self.backend.is_local() && self.id.is_none_or(|id| !id.is_encoded())
    }

    /// Fills `buffer` with appended bytes, from `offset` on. Not verified.
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

    /// Appends all of the bytes or, on error, none. Blocks while too many parts are in flight.
    pub(crate) fn append(&mut self, bytes: &[u8]) -> Result<()> {
        if self.failed {
            return Err(self.refusal("an earlier write of this object failed"));
        }
        if self.is_ending() {
            return Err(self.refusal("its end is not stored yet, which the next flush tries again"));
        }
        if self.len().saturating_add(bytes.len() as u64) > OBJECT_BYTES_MAX {
            return Err(self.refusal("an object holds at most 1 TiB"));
        }
        match (self.encoder.is_some(), self.backend.is_local()) {
            (false, true) => self.append_local(bytes),
            (true, true) => {
                // Bytes that the disk refused before; if it still does, none of the new ones are taken.
                self.write_if_full()?;
                self.encode(bytes).inspect_err(|_| self.failed = true)?;
                if let Err(error) = self.write_if_full() {
                    tracing::debug!(%error, "encoded bytes of an object are kept in memory");
                }
                Ok(())
            }
            (is_encoded, false) => {
                // Bytes that the store refused before; if it still does, none of the new ones are taken.
                self.send_full()?;
                if is_encoded {
                    self.encode(bytes).inspect_err(|_| self.failed = true)?;
                    self.send_taken();
                } else {
                    self.gather(bytes);
                }
                Ok(())
            }
        }
    }

    fn encode(&mut self, bytes: &[u8]) -> Result<()> {
        let Some(encoder) = &mut self.encoder else { return Ok(()) };
        let encoded = encoder.update(bytes, &mut self.buffer);
        encoded.map_err(|reason| self.not_encoded(reason))
    }

    /// Buffers bytes for a remote store and sends full parts while the store accepts them.
    fn gather(&mut self, mut bytes: &[u8]) {
        let mut sends = true;
        while !bytes.is_empty() {
            let room = if sends { part_bytes(self.parts) - self.buffer.len() } else { bytes.len() };
            let (now, rest) = bytes.split_at(room.min(bytes.len()));
            self.summer.update(now);
            self.buffer.extend_from_slice(now);
            bytes = rest;
            sends = sends && self.send_taken();
        }
    }

    /// Sends the full parts of bytes that were taken. On error they stay in the buffer; the next call sends
    /// them again and returns the error. Returns whether all were sent.
    fn send_taken(&mut self) -> bool {
        let sent = self.send_full();
        if let Err(error) = &sent {
            tracing::debug!(%error, "a part of an object is kept in memory");
        }
        sent.is_ok()
    }

    /// Sends the full parts. Parts that could not be sent stay in the buffer.
    fn send_full(&mut self) -> Result<()> {
        while self.buffer.len() >= part_bytes(self.parts) {
            self.upload()?.make_room(1)?;
            let mut rest = Vec::with_capacity(part_bytes(self.parts + 1));
            rest.extend_from_slice(&self.buffer[part_bytes(self.parts)..]);
            self.buffer.truncate(part_bytes(self.parts));
            self.send_buffer(rest)?;
        }
        Ok(())
    }

    /// Sends the buffer as the next part, after `make_room`; `rest` becomes the buffer.
    fn send_buffer(&mut self, rest: Vec<u8>) -> Result<()> {
        let Some(Sink::Upload(upload)) = &mut self.sink else {
            return Err(self.refusal("its upload is gone"));
        };
        upload.send(Bytes::from(std::mem::replace(&mut self.buffer, rest)));
        self.parts += 1;
        Ok(())
    }

    /// The upload of an object that is too large for one request.
    fn upload(&mut self) -> Result<&mut Upload> {
        let id = self.id();
        if self.sink.is_none() {
            self.sink = Some(Sink::Upload(Upload::begin(&self.backend, id)?));
        }
        match &mut self.sink {
            Some(Sink::Upload(upload)) => Ok(upload),
            _ => Err(ObjectError::Store {
                operation: "upload",
                place: "a new object".into(),
                source: "it is being written to a file".into(),
            }),
        }
    }

    fn write_if_full(&mut self) -> Result<()> {
        if self.buffer.len() >= GATHER_BYTES { self.write_gathered() } else { Ok(()) }
    }

    /// Completes an encoded object of a local store.
    fn complete_encoded(&mut self) -> Result<Finished> {
        let object = self.end()?;
        self.write_gathered()?;
        let unsynced = self.local_file()?.finish(&[])?;
        self.sink = None;
        // A finished object takes no more bytes.
        self.failed = true;
        Ok(Finished { object, unsynced: Some(Arc::new(unsynced)) })
    }

    /// Takes all of the bytes or, on error, none.
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
            self.sink = Some(Sink::Local(LocalFile::begin(&self.backend, id)?));
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

    /// Completes the object: it is readable, and durable once [`Finished::unsynced`] is synced. May be called
    /// again after an error.
    pub(crate) fn complete(&mut self) -> Result<Finished> {
        if self.failed {
            return Err(self.refusal("an earlier write of this object failed"));
        }
        let finished = if !self.backend.is_local() {
            self.complete_remote()?
        } else if self.id.is_some_and(|id| id.is_encoded()) {
            self.complete_encoded()?
        } else {
            self.complete_local()?
        };
        metrics::OBJECTS_WRITTEN.inc();
        metrics::OBJECT_WRITTEN_BYTES.inc_by(finished.object.len);
        Ok(finished)
    }

    /// Writes the end of a remote or encoded object in memory. From then on its length and last part stay the
    /// same, however often the rest is retried.
    fn end(&mut self) -> Result<StoredObject> {
        if let Some(object) = self.ending {
            return Ok(object);
        }
        let len = self.len();
        if let Some(encoder) = self.encoder.take() {
            let ended = encoder.finish(&mut self.buffer);
            ended.map_err(|reason| self.not_encoded(reason)).inspect_err(|_| self.failed = true)?;
        } else if self.id.is_none() && self.sink.is_none() && self.buffer.len() <= FRAMED_BYTES_MAX {
            let id = self.backend.new_id(Layout::Framed);
            self.buffer.extend_from_slice(&std::mem::take(&mut self.summer).finish(id));
            self.id = Some(id);
        }
        let object = StoredObject { id: self.id(), len };
        self.ending = Some(object);
        Ok(object)
    }

    fn complete_remote(&mut self) -> Result<Finished> {
        let object = self.end()?;
        self.send_full()?;
        if self.sink.is_some() {
            if !self.buffer.is_empty() {
                self.upload()?.make_room(1)?;
                self.send_buffer(Vec::new())?;
            }
            self.upload()?.complete()?;
        } else {
            let data = Bytes::from(std::mem::take(&mut self.buffer));
            let put = self.backend.put_data(object.id, vec![data.clone()]);
            put.inspect_err(|_| self.buffer = data.into())?;
        }
        if object.id.has_sums_beside() {
            // Last, because the sidecar makes the object readable.
            let sums = Bytes::from(self.summer.clone().finish(object.id));
            self.backend.put_sums(object.id, sums)?;
        }
        self.sink = None;
        // A finished object takes no more bytes.
        self.failed = true;
        Ok(Finished { object, unsynced: None })
    }

    fn complete_local(&mut self) -> Result<Finished> {
        if self.id.is_none() && self.sink.is_none() && self.buffer.len() <= FRAMED_BYTES_MAX {
            self.id = Some(self.backend.new_id(Layout::Framed));
        }
        self.write_gathered()?;
        let (id, len) = (self.id(), self.len());
        let trailer = self.summer.clone().finish(id);
        let unsynced = self.local_file()?.finish(&trailer)?;
        self.sink = None;
        // A finished object takes no more bytes.
        self.failed = true;
        Ok(Finished { object: StoredObject { id, len }, unsynced: Some(Arc::new(unsynced)) })
    }

    fn refusal(&self, reason: &'static str) -> ObjectError {
        ObjectError::Store { operation: "write", place: "a new object".into(), source: reason.into() }
    }
}
