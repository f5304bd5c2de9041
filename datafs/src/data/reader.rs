//! The reader of objects: a bounded set of open objects, positional reads, frames verified.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[cfg(test)]
use bytes::Bytes;
use parking_lot::Mutex;

use super::backend::Backend;
use super::deleted::{KeepsOpen, is_idle};
use super::error::{ObjectError, Result};
use super::fetch::RemoteData;
use super::index::Index;
use super::local_data::LocalData;
use super::remote_open::Data;
use super::store::Store;
use super::verified::Verified;
use crate::metrics;
use crate::object::{ExpectedKeys, ObjectId};

/// Most files kept open: a quarter of the usual limit of 1024 descriptors.
const OPEN_MAX: usize = 256;
/// Most bytes of small remote objects that are kept whole in memory.
const WHOLE_BYTES_MAX: usize = 32 * 1024 * 1024;
/// A file without a reader for this long is closed when the next one is opened.
const IDLE_MAX: Duration = Duration::from_secs(30);
/// Frames of a local encoded object per read.
const FRAMES_AT_A_TIME: u64 = 16;

/// An object with the index of its frames in memory.
#[derive(Debug)]
pub(super) struct OpenObject {
    id: ObjectId,
    data: Data,
    index: Arc<Index>,
    verified: Verified,
}

impl OpenObject {
    fn open(backend: &Backend, id: ObjectId) -> Result<OpenObject> {
        let (data, index) = match backend.store() {
            Store::Local(local) => {
                let (data, index) = LocalData::open(local.root(), id, backend.keys())?;
                (Data::Local { data, cached: false }, Arc::new(index))
            }
            Store::Remote(remote) => backend.open_remote(remote, id)?,
        };
        metrics::OBJECTS_OPENED.inc();
        let verified = Verified::new(index.data_bytes());
        Ok(OpenObject { id, data, index, verified })
    }

    /// Whether the reads come from a cached copy, which may be damaged while the original is not.
    pub(super) fn is_copy(&self) -> bool {
        matches!(self.data, Data::Local { cached: true, .. })
    }

    /// The data of an object that is read from a remote store.
    pub(super) fn remote(&self) -> Option<&Arc<RemoteData>> {
        if let Data::Remote(data) = &self.data { Some(data) } else { None }
    }

    /// Bytes of data.
    pub(super) fn data_bytes(&self) -> u64 {
        self.index.data_bytes()
    }

    /// Fails unless the object is protected as its volume requires. The layout in the id shows that other
    /// objects are not protected, and the metadata holds the id.
    pub(super) fn check_protection(&self, expected: &ExpectedKeys) -> Result<()> {
        let Index::Encoded(index) = &*self.index else { return Ok(()) };
        if expected.allow(index.sealed_with()) {
            return Ok(());
        }
        let found = match index.sealed_with() {
            None => "not encrypted".to_owned(),
            Some((key, _)) => format!("encrypted with the key {key:?}"),
        };
        Err(ObjectError::Protection { id: self.id, found })
    }

    /// Whether its local file has been unlinked.
    fn is_deleted(&self) -> bool {
        match &self.data {
            Data::Local { data, .. } => data.is_deleted(),
            Data::Whole(_) => false,
            Data::Remote(data) => data.kept.as_ref().is_some_and(|(_, entry)| entry.is_deleted()),
        }
    }

    fn memory_bytes(&self) -> usize {
        if let Data::Whole(bytes) = &self.data { bytes.len() } else { 0 }
    }

    #[cfg(test)]
    pub(super) fn read(&self, range: Range<u64>) -> Result<Bytes> {
        self.check_range(range.start, range.end)?;
        let mut buffer = vec![0; (range.end - range.start) as usize];
        self.read_into(range.start, &mut buffer, u64::MAX)?;
        Ok(buffer.into())
    }

    /// Fills a buffer with the bytes from `offset` on. From `ahead_to` on, nothing is fetched ahead from a remote store.
    pub(super) fn read_into(&self, offset: u64, buffer: &mut [u8], ahead_to: u64) -> Result<()> {
        let end = offset.saturating_add(buffer.len() as u64);
        self.check_range(offset, end)?;
        if buffer.is_empty() {
            return Ok(());
        }
        match (&self.data, &*self.index) {
            (Data::Local { data, cached }, Index::Plain(sums)) => {
                // Any process that maintains the cache may replace or damage a copy: verify every read.
                if !cached && self.verified.covers(offset, end) {
                    data.read(self.id, offset, buffer)?;
                    metrics::OBJECT_READ_BYTES.inc_by(buffer.len() as u64);
                    data.read_ahead(offset, end, self.index.data_bytes());
                    return Ok(());
                }
                let (from, to) = sums.window(offset, end);
                if (from, to) == (offset, end) {
                    return self.read_frames(data, from, buffer);
                }
                let mut window = vec![0; (to - from) as usize];
                self.read_frames(data, from, &mut window)?;
                let at = (offset - from) as usize;
                buffer.copy_from_slice(&window[at..at + buffer.len()]);
                Ok(())
            }
            (Data::Local { data, .. }, Index::Encoded(_)) => self.read_encoded(data, offset, buffer),
            // `open_remote` has verified it.
            (Data::Whole(bytes), _) => {
                buffer.copy_from_slice(&bytes[offset as usize..end as usize]);
                Ok(())
            }
            (Data::Remote(data), _) => data.read(offset, buffer, ahead_to),
        }
    }

    fn check_range(&self, start: u64, end: u64) -> Result<()> {
        let data_bytes = self.index.data_bytes();
        if start <= end && end <= data_bytes {
            return Ok(());
        }
        let reason = format!("bytes {start}..{end} were asked for, but it ends there");
        Err(ObjectError::Corrupt { id: self.id, byte: data_bytes, reason })
    }

    fn corrupt(&self, frame: u64, reason: String) -> ObjectError {
        ObjectError::Corrupt { id: self.id, byte: self.index.data(frame).start, reason }
    }

    fn verify(&self, frames: Range<u64>, stored: &[u8]) -> Result<()> {
        if let Some(wrong) = self.index.first_wrong(frames, stored) {
            return Err(self.corrupt(wrong, "checksum mismatch".into()));
        }
        metrics::OBJECT_READ_BYTES.inc_by(stored.len() as u64);
        Ok(())
    }

    /// Reads and verifies whole frames that are stored unchanged.
    fn read_frames(&self, data: &LocalData, from: u64, window: &mut [u8]) -> Result<()> {
        let to = from + window.len() as u64;
        data.read(self.id, from, window)?;
        self.verify(self.index.frames_of(from, to), window)?;
        self.verified.add(from, to);
        data.read_ahead(from, to, self.index.data_bytes());
        Ok(())
    }

    /// Reads, verifies and decodes the frames that hold a range.
    fn read_encoded(&self, data: &LocalData, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let frames = self.index.frames_of(offset, offset + buffer.len() as u64);
        let mut first = frames.start;
        while first < frames.end {
            let last = (first + FRAMES_AT_A_TIME).min(frames.end);
            let stored = self.index.stored(first..last);
            let mut bytes = vec![0; (stored.end - stored.start) as usize];
            data.read(self.id, stored.start, &mut bytes)?;
            self.verify(first..last, &bytes)?;
            for frame in first..last {
                let at = self.index.stored(frame..frame + 1);
                let inside = (at.start - stored.start) as usize..(at.end - stored.start) as usize;
                let delivered = self.index.deliver(frame, &bytes[inside], offset, buffer);
                delivered.map_err(|reason| self.corrupt(frame, reason))?;
            }
            first = last;
        }
        Ok(())
    }
}

/// The open objects of a pool; the least recently used one is closed first.
#[derive(Debug, Default)]
pub(super) struct OpenObjects {
    open: Mutex<HashMap<ObjectId, Slot>>,
}

#[derive(Debug)]
struct Slot {
    object: Arc<OpenObject>,
    used: Instant,
}

impl OpenObjects {
    pub(super) fn get(&self, backend: &Backend, id: ObjectId) -> Result<Arc<OpenObject>> {
        let now = Instant::now();
        if let Some(slot) = self.open.lock().get_mut(&id) {
            slot.used = now;
            return Ok(Arc::clone(&slot.object));
        }
        // Opened outside of the lock; of two threads that race here, the first one's object stays.
        let object = Arc::new(OpenObject::open(backend, id)?);
        let mut open = self.open.lock();
        if let Some(slot) = open.get(&id) {
            return Ok(Arc::clone(&slot.object));
        }
        open.retain(|_, slot| now.saturating_duration_since(slot.used) < IDLE_MAX);
        let in_memory = |open: &HashMap<ObjectId, Slot>| -> usize {
            open.values().map(|slot| slot.object.memory_bytes()).sum()
        };
        let room = WHOLE_BYTES_MAX.saturating_sub(object.memory_bytes());
        while open.len() >= OPEN_MAX || (object.memory_bytes() > 0 && in_memory(&open) > room) {
            let oldest = open.iter().min_by_key(|(_, slot)| slot.used).map(|(id, _)| *id);
            let Some(oldest) = oldest else { break };
            open.remove(&oldest);
        }
        open.insert(id, Slot { object: Arc::clone(&object), used: now });
        Ok(object)
    }

    pub(super) fn forget(&self, id: ObjectId) {
        self.open.lock().remove(&id);
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.open.lock().len()
    }
}

impl KeepsOpen for OpenObjects {
    fn close_deleted(&self) {
        let is_over = |slot: &mut Slot| is_idle(slot.used) && slot.object.is_deleted();
        let over: Vec<_> = self.open.lock().extract_if(|_, slot| is_over(slot)).collect();
        // Closed outside of the lock. A thread that reads now keeps its object open until it is done.
        drop(over);
    }
}
