//! Opening of remote objects: their frame index comes from the cache, or else from the store.

use std::sync::Arc;

use bytes::Bytes;
use object_store::GetRange;
use object_store::path::Path as StorePath;

use super::backend::Backend;
use super::checksum::{OBJECT_BYTES_MAX, Sums, trailer_bytes_max};
use super::encoded::{self, EncodedIndex};
use super::error::{ObjectError, Result};
use super::fetch::{Kept, RemoteData};
use super::index::Index;
use super::local_data::{LocalData, check_length, torn};
use super::remote::RemoteStore;
use super::writer::FRAMED_BYTES_MAX;
use crate::object::{Layout, ObjectId};

/// First request for an encoded object, in bytes: all of a small one, and the length of a large one.
const FIRST_BYTES: u64 = 64 * 1024;
/// Most bytes of a framed object, checksums included. The metadata holds no closer bound: an extent may be a
/// part of the object.
const SMALL_BYTES_MAX: u64 = FRAMED_BYTES_MAX as u64 + trailer_bytes_max(FRAMED_BYTES_MAX as u64);
/// Most bytes of the sidecar of a plain object: 64 MiB.
const SUMS_BYTES_MAX: u64 = trailer_bytes_max(OBJECT_BYTES_MAX);

/// Where the bytes of an open object are.
#[derive(Debug)]
pub(super) enum Data {
    /// In a local file.
    Local {
        data: LocalData,
        /// The file is a copy in the cache.
        cached: bool,
    },
    /// In memory: a small object of a remote store.
    Whole(Bytes),
    /// In the remote store.
    Remote(Arc<RemoteData>),
}

impl Backend {
    /// Opens a remote object: the source of its data, and its frame index.
    pub(super) fn open_remote(&self, store: &Arc<RemoteStore>, id: ObjectId) -> Result<(Data, Arc<Index>)> {
        match id.layout() {
            Layout::Framed | Layout::Pack => self.open_small(store, id),
            Layout::Plain | Layout::Encoded | Layout::RemotePack => self.open_large(store, id),
        }
    }

    fn get(
        &self,
        store: &Arc<RemoteStore>,
        path: StorePath,
        range: Option<GetRange>,
    ) -> Result<(Bytes, u64)> {
        let store = Arc::clone(store);
        self.answer(self.runtime().wait(async move { store.get(&path, range).await }))
    }

    /// All bytes at a path of an object; an error when there are more than `bytes_max`.
    fn get_small(
        &self,
        store: &Arc<RemoteStore>,
        path: StorePath,
        id: ObjectId,
        bytes_max: u64,
    ) -> Result<Bytes> {
        let store = Arc::clone(store);
        let got = self.answer(self.runtime().wait(async move { store.get_small(&path, bytes_max).await }))?;
        got.map_err(|bytes| ObjectError::Corrupt {
            id,
            byte: bytes_max,
            reason: format!("{bytes} bytes are stored, at most {bytes_max} belong there"),
        })
    }

    fn open_small(&self, store: &Arc<RemoteStore>, id: ObjectId) -> Result<(Data, Arc<Index>)> {
        if let Some(cache) = self.cache()
            && let Some((path, file)) = cache.whole(id)
        {
            match LocalData::over(cache.root(), path, file, id, self.keys()) {
                Ok((data, index)) => return Ok((Data::Local { data, cached: true }, Arc::new(index))),
                Err(_) => cache.discard(id),
            }
        }
        let bytes =
            self.get_small(store, store.data_path(id), id, SMALL_BYTES_MAX).map_err(|e| missing(e, id))?;
        let end = bytes.len() as u64;
        let sums =
            Sums::parse_end(&bytes, id).map_err(|reason| ObjectError::Corrupt { id, byte: end, reason })?;
        let stored = end.saturating_sub(sums.trailer_bytes());
        let index = Index::Plain(sums);
        check_length(id, &index, stored)?;
        if let Some(wrong) = index.first_wrong(0..index.frames(), &bytes) {
            let (byte, reason) = (index.data(wrong).start, "checksum mismatch".into());
            return Err(ObjectError::Corrupt { id, byte, reason });
        }
        if let Some(cache) = self.cache() {
            cache.put_whole(id, bytes.clone());
        }
        Ok((Data::Whole(bytes), Arc::new(index)))
    }

    fn open_large(&self, store: &Arc<RemoteStore>, id: ObjectId) -> Result<(Data, Arc<Index>)> {
        let cached = self.cache().and_then(|cache| Some((Arc::clone(cache), cache.entry(id)?)));
        if let Some((cache, entry)) = cached {
            let index = self.index_of(entry.trailer(), id, Some(entry.frames_bytes()));
            match index {
                Ok((index, _)) if index.frames() == entry.frames() => {
                    return Ok(self.remote_data(store, id, index, Some((cache, entry))));
                }
                // A missing or wrong key does not mean that the cache is damaged.
                Err(error @ ObjectError::Key { .. }) => return Err(error),
                _ => cache.discard(id),
            }
        }
        let trailer = match id.layout() {
            Layout::Encoded | Layout::RemotePack => self.encoded_trailer(store, id)?,
            _ => {
                let sums = self.get_small(store, store.sums_path(id), id, SUMS_BYTES_MAX);
                sums.map(|bytes| (bytes, None)).map_err(|error| match error.is_not_found() {
                    true => self.without_sums(store, id),
                    false => error,
                })?
            }
        };
        let (trailer, stored) = trailer;
        let (index, frames_bytes) = self.index_of(&trailer, id, stored)?;
        let kept = self.cache().and_then(|cache| {
            let entry = cache.create(id, index.frames(), frames_bytes, &trailer)?;
            // An entry that another process has created meanwhile is used if it has the same trailer.
            (entry.trailer() == &trailer).then(|| (Arc::clone(cache), entry))
        });
        Ok(self.remote_data(store, id, index, kept))
    }

    /// Parses a trailer: the frame index, and the total length of the frames. The caller passes that length
    /// as `frames_bytes` where the trailer does not tell it.
    fn index_of(&self, trailer: &Bytes, id: ObjectId, frames_bytes: Option<u64>) -> Result<(Index, u64)> {
        if id.is_encoded() {
            let frames_bytes = frames_bytes.unwrap_or(0);
            let end = frames_bytes + trailer.len() as u64;
            return Ok((
                Index::Encoded(Box::new(EncodedIndex::parse(trailer, end, id, self.keys())?)),
                frames_bytes,
            ));
        }
        let byte = trailer.len() as u64;
        let sums = Sums::parse_end(trailer, id)
            .and_then(|sums| match sums.trailer_bytes() == byte {
                true => Ok(sums),
                false => Err("the checksums have another length than they should".into()),
            })
            .map_err(|reason| ObjectError::Corrupt { id, byte, reason })?;
        let data_bytes = sums.data_bytes();
        Ok((Index::Plain(sums), data_bytes))
    }

    fn remote_data(
        &self,
        store: &Arc<RemoteStore>,
        id: ObjectId,
        index: Index,
        kept: Option<Kept>,
    ) -> (Data, Arc<Index>) {
        let index = Arc::new(index);
        let data = RemoteData {
            id,
            io: self.runtime().clone(),
            store: Arc::clone(store),
            index: Arc::clone(&index),
            kept,
            buffers: Arc::clone(self.buffers()),
            progress: parking_lot::Mutex::default(),
        };
        (Data::Remote(Arc::new(data)), index)
    }

    /// Fetches table and footer of an encoded object; also returns the total length of its frames.
    fn encoded_trailer(&self, store: &Arc<RemoteStore>, id: ObjectId) -> Result<(Bytes, Option<u64>)> {
        let path = store.data_path(id);
        let ask = |range| self.get(store, path.clone(), Some(range)).map_err(|e| missing(e, id));
        let (first, end) = ask(GetRange::Bounded(0..FIRST_BYTES))?;
        let corrupt = |reason: &str| ObjectError::Corrupt { id, byte: end, reason: reason.to_owned() };
        // The last `len` bytes; no request when the first one got the whole object.
        let last = |len: u64| -> Result<Bytes> {
            let at = end.checked_sub(len).ok_or_else(|| corrupt("it is cut short"))?;
            if end == first.len() as u64 {
                return Ok(first.slice(at as usize..));
            }
            let (bytes, _) = ask(GetRange::Bounded(at..end))?;
            if bytes.len() as u64 == len { Ok(bytes) } else { Err(corrupt("it is cut short")) }
        };
        let tail = last(end.min(FIRST_BYTES))?;
        let Some((_, footer)) = tail.split_last_chunk::<{ encoded::FOOTER_BYTES }>() else {
            return Err(corrupt("too short for a footer"));
        };
        let trailer_bytes = encoded::trailer_bytes(footer).map_err(|reason| corrupt(&reason))?;
        let trailer = match (tail.len() as u64).checked_sub(trailer_bytes) {
            Some(at) => tail.slice(at as usize..),
            None => last(trailer_bytes)?,
        };
        let frames_bytes = end.checked_sub(trailer_bytes).ok_or_else(|| corrupt("it is cut short"))?;
        Ok((trailer, Some(frames_bytes)))
    }

    /// The error for a plain object without checksums: torn if its data exists, else missing.
    fn without_sums(&self, store: &Arc<RemoteStore>, id: ObjectId) -> ObjectError {
        match self.get(store, store.data_path(id), Some(GetRange::Bounded(0..1))) {
            Ok(_) => torn(id, 0),
            Err(error) => missing(error, id),
        }
    }
}

fn missing(error: ObjectError, id: ObjectId) -> ObjectError {
    if error.is_not_found() { ObjectError::Missing { id } } else { error }
}
