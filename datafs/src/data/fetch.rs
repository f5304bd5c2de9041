//! Fetches the bytes of an object from a store in the cloud.

use std::sync::Arc;

use bytes::Bytes;

use super::checksum::Sums;
use super::error::{ObjectError, Result};
use super::object::{Layout, ObjectId};
use super::pool::ObjectPool;
use super::reader::torn;
use super::remote::RemoteStore;
use super::runtime::Io;

/// Bytes of one request; longer reads are several requests at a time.
const RANGE_BYTES: usize = 4 * 1024 * 1024;

/// An object in the cloud.
#[derive(Debug)]
pub(super) struct RemoteData {
    // No handle of the pool, which keeps this: it would never go.
    io: Io,
    id: ObjectId,
    store: Arc<RemoteStore>,
    /// All of a small object: it came with its checksums.
    whole: Option<Bytes>,
}

impl RemoteData {
    /// The object, its checksums and how many bytes of data there are.
    pub(super) fn open(
        pool: &ObjectPool,
        store: &Arc<RemoteStore>,
        id: ObjectId,
    ) -> Result<(RemoteData, Sums, u64)> {
        let remote = Arc::clone(store);
        let path = remote.sums_path(id);
        let read = pool.runtime().wait(async move { remote.get(&path, None).await });
        let (bytes, _) = store.answer(read).map_err(|error| match id.layout() {
            _ if !error.is_not_found() => error,
            Layout::Framed | Layout::Pack => ObjectError::Missing { id },
            Layout::Plain => Self::missing(pool, store, id),
        })?;
        let end = bytes.len() as u64;
        let sums =
            Sums::parse_end(&bytes, id).map_err(|reason| ObjectError::Corrupt { id, byte: end, reason })?;
        let (whole, stored) = match id.layout() {
            Layout::Framed | Layout::Pack => (Some(bytes), end.saturating_sub(sums.trailer_bytes())),
            Layout::Plain => (None, sums.data_bytes()),
        };
        let data = RemoteData { io: pool.runtime().clone(), id, store: Arc::clone(store), whole };
        Ok((data, sums, stored))
    }

    /// Which error it is when a plain object has no checksums.
    fn missing(pool: &ObjectPool, store: &Arc<RemoteStore>, id: ObjectId) -> ObjectError {
        let (remote, path) = (Arc::clone(store), store.data_path(id));
        match store.answer(pool.runtime().wait(async move { remote.get_range(&path, 0..1).await })) {
            Ok(_) => torn(id, 0),
            Err(error) if error.is_not_found() => ObjectError::Missing { id },
            Err(error) => error,
        }
    }

    /// Fills `window` with the bytes from `from` on, not verified.
    pub(super) fn read(&self, from: u64, window: &mut [u8]) -> Result<()> {
        if let Some(whole) = &self.whole {
            let from = from as usize;
            window.copy_from_slice(&whole[from..from + window.len()]);
            return Ok(());
        }
        let parts: Vec<_> = window
            .chunks_mut(RANGE_BYTES)
            .scan(from, |at, part| {
                let range = *at..*at + part.len() as u64;
                *at = range.end;
                let (remote, path) = (Arc::clone(&self.store), self.store.data_path(self.id));
                let fetch = async move { remote.get_range(&path, range).await };
                Some((part, self.io.start_future(fetch)))
            })
            .collect();
        for (part, fetched) in parts {
            let bytes = self.store.answer(fetched.wait()).map_err(|error| {
                if error.is_not_found() { ObjectError::Missing { id: self.id } } else { error }
            })?;
            if bytes.len() != part.len() {
                let reason = "the object in the store is cut short".into();
                return Err(ObjectError::Corrupt { id: self.id, byte: from, reason });
            }
            part.copy_from_slice(&bytes);
        }
        Ok(())
    }
}
