//! A store in the cloud: every request is bounded in time and tried again while that may help.
//!
//! Objects are `objects/SESSION/ID` below the prefix, so that what one session wrote is one listing.
//! While a large object is uploaded, `uploads/SESSION/ID` holds the store's name for the upload, so that
//! what a dead process has begun can be taken back, whatever kind of store it is.

use std::collections::BTreeSet;
use std::fmt;
use std::future::ready;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
use futures::{StreamExt as _, TryStreamExt as _};
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path as StorePath;
use object_store::{
    GetOptions, GetRange, GetResult, MultipartId, ObjectStore, ObjectStoreExt as _, PutMode, PutPayload,
};
use tokio::sync::Semaphore;

use super::error::{ObjectError, Result};
use super::image;
use super::marker::{MARKER, MARKER_BYTES_MAX};
use super::object::{Layout, ObjectId, SUMS_SUFFIX};
use super::retry::insist;

/// Parts that this process sends at a time, over all of its uploads: bounds their memory.
const PARTS_AT_A_TIME: usize = 32;
/// Parts that the store did not take and that are kept in memory, to be sent again: as many as can be on
/// their way when a store goes away.
const PARTS_KEPT: usize = PARTS_AT_A_TIME;
/// The note of an upload is what the store calls it: about a hundred bytes, two thousand at Google.
const NOTE_BYTES_MAX: u64 = 64 * 1024;
/// How long taking back an upload may hold up whoever has dropped it.
pub(super) const ABORT_LIMIT: Duration = Duration::from_secs(5);
/// How long the marker of the store is asked for.
const MARKER_LIMIT: Duration = Duration::from_secs(5);
/// Entries of a listing that are in memory at a time.
const SURVEY_PAGE: usize = 10_000;
/// Requests for listings that end in deletions, at a time.
const DELETES_AT_A_TIME: usize = 16;

/// A bucket, and the prefix in it.
pub(super) struct RemoteStore {
    objects: Arc<dyn ObjectStore>,
    parts: Arc<dyn MultipartStore>,
    prefix: StorePath,
    place: String,
    timeout: Duration,
    /// Bounds the parts on their way.
    pub(super) sending: Arc<Semaphore>,
    /// Bounds the parts that wait to be sent again.
    pub(super) kept: Arc<Semaphore>,
}

impl fmt::Debug for RemoteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteStore").field("place", &self.place).finish_non_exhaustive()
    }
}

impl RemoteStore {
    pub(super) fn new(
        objects: Arc<dyn ObjectStore>,
        parts: Arc<dyn MultipartStore>,
        prefix: StorePath,
        place: String,
        timeout: Duration,
    ) -> RemoteStore {
        let [sending, kept] = [PARTS_AT_A_TIME, PARTS_KEPT].map(|parts| Arc::new(Semaphore::new(parts)));
        RemoteStore { objects, parts, prefix, place, timeout, sending, kept }
    }

    /// What errors call it.
    pub(super) fn place(&self) -> &str {
        &self.place
    }

    fn below(&self, parts: &[&str]) -> StorePath {
        parts.iter().fold(self.prefix.clone(), |path, part| path.join(*part))
    }

    fn session_path(&self, kind: &str, session: u64) -> StorePath {
        self.below(&[kind, &format!("{session:016x}")])
    }

    /// Where an object's data is.
    pub(super) fn data_path(&self, id: ObjectId) -> StorePath {
        self.session_path("objects", id.session()).join(id.to_string())
    }

    /// Where an object's checksums are.
    pub(super) fn sums_path(&self, id: ObjectId) -> StorePath {
        match id.layout() {
            Layout::Plain => self.session_path("objects", id.session()).join(format!("{id}{SUMS_SUFFIX}")),
            _ => self.data_path(id),
        }
    }

    fn upload_path(&self, id: ObjectId) -> StorePath {
        self.session_path("uploads", id.session()).join(id.to_string())
    }

    /// All bytes of `range`, or fewer at the end of the object, and how long the object is.
    pub(super) async fn get(&self, path: &StorePath, range: Option<GetRange>) -> Result<(Bytes, u64)> {
        insist("read", &self.place, self.timeout, |_| async {
            let options = GetOptions { range: range.clone(), ..GetOptions::default() };
            let answer = self.objects.get_opts(path, options).await?;
            let size = answer.meta.size;
            Ok((whole(answer).await?, size))
        })
        .await
    }

    /// All of an object that has at most `bytes_max` bytes; else how many it has, and nothing is fetched.
    pub(super) async fn get_small(
        &self,
        path: &StorePath,
        bytes_max: u64,
    ) -> Result<std::result::Result<Bytes, u64>> {
        insist("read", &self.place, self.timeout, |_| async {
            let answer = self.objects.get_opts(path, GetOptions::default()).await?;
            match answer.range.end - answer.range.start {
                bytes if bytes > bytes_max => Ok(Err(bytes)),
                _ => whole(answer).await.map(Ok),
            }
        })
        .await
    }

    /// [`RemoteStore::get`] of exactly these bytes.
    pub(super) async fn get_range(&self, path: &StorePath, range: Range<u64>) -> Result<Bytes> {
        self.get(path, Some(GetRange::Bounded(range))).await.map(|(bytes, _)| bytes)
    }

    /// Stores what nobody has stored under that name before.
    pub(super) async fn put_new(&self, path: &StorePath, payload: PutPayload) -> Result<()> {
        let len = payload.content_length() as u64;
        let put = insist("write", &self.place, self.timeout, |_| {
            let (payload, again) = (payload.clone(), payload.clone());
            async move {
                let put = self.objects.put_opts(path, payload, PutMode::Create.into()).await;
                // The answer to an earlier try, of this call or of one before, may be what was lost.
                match put {
                    Err(
                        object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. },
                    ) if self.objects.head(path).await?.size == len => Ok(()),
                    // Such a store cannot tell; no two names are equal anyway.
                    Err(object_store::Error::NotImplemented { .. }) => {
                        self.objects.put(path, again).await.map(drop)
                    }
                    other => other.map(drop),
                }
            }
        });
        put.await
    }

    /// The marker of the store; see `marker.rs`. Opening a home waits for it, and goes on without it.
    pub(super) async fn read_marker(&self) -> Result<Option<Vec<u8>>> {
        let path = self.below(&[MARKER]);
        let read = insist("read", &self.place, MARKER_LIMIT.min(self.timeout), |_| async {
            let range = Some(GetRange::Bounded(0..MARKER_BYTES_MAX));
            let answer = self.objects.get_opts(&path, GetOptions { range, ..GetOptions::default() }).await?;
            whole(answer).await
        });
        match read.await {
            Ok(bytes) => Ok(Some(bytes.to_vec())),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(super) async fn write_marker(&self, text: Vec<u8>) -> Result<()> {
        self.put_over(&self.below(&[MARKER]), text.into()).await
    }

    /// Stores what may be there under that name already.
    pub(super) async fn put_over(&self, path: &StorePath, payload: PutPayload) -> Result<()> {
        insist("write", &self.place, self.timeout, |_| self.objects.put(path, payload.clone()))
            .await
            .map(drop)
    }

    /// How many bytes are stored under a name; `None` when there is nothing.
    pub(super) async fn size(&self, path: &StorePath) -> Result<Option<u64>> {
        match insist("look at", &self.place, self.timeout, |_| self.objects.head(path)).await {
            Ok(meta) => Ok(Some(meta.size)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Bytes of `range`, or fewer at the end, and how long the object is. An object without bytes has none.
    pub(super) async fn get_part(&self, path: &StorePath, range: Range<u64>) -> Result<(Bytes, u64)> {
        if range.start == 0
            && let Some(0) = self.size(path).await?
        {
            return Ok((Bytes::new(), 0));
        }
        self.get(path, Some(GetRange::Bounded(range))).await
    }

    /// Deletes an object with what belongs to it.
    pub(super) async fn delete(&self, id: ObjectId) -> Result<()> {
        self.delete_path(&self.data_path(id)).await?;
        if id.layout() == Layout::Plain { self.delete_path(&self.sums_path(id)).await } else { Ok(()) }
    }

    async fn delete_path(&self, path: &StorePath) -> Result<()> {
        let done = insist("delete", &self.place, self.timeout, |_| self.objects.delete(path)).await;
        done.or_else(|error| if error.is_not_found() { Ok(()) } else { Err(error) })
    }

    /// Deletes objects, several at a time; all of them are tried.
    pub(super) async fn delete_all(&self, ids: Vec<ObjectId>) -> Result<()> {
        let deleted =
            futures::stream::iter(ids).map(|id| self.delete(id)).buffer_unordered(DELETES_AT_A_TIME);
        deleted.fold(Ok(()), |all, one| ready(all.and(one))).await
    }

    /// The objects of a session.
    pub(super) async fn list_session(&self, session: u64) -> Result<BTreeSet<ObjectId>> {
        self.list("objects", session).await
    }

    async fn list(&self, kind: &str, session: u64) -> Result<BTreeSet<ObjectId>> {
        let below = self.session_path(kind, session);
        insist("list", &self.place, self.timeout, |_| {
            let id = |entry: object_store::ObjectMeta| -> Option<ObjectId> {
                let name = entry.location.filename()?;
                name.strip_suffix(SUMS_SUFFIX).unwrap_or(name).parse().ok()
            };
            self.objects.list(Some(&below)).try_filter_map(move |e| ready(Ok(id(e)))).try_collect()
        })
        .await
    }

    /// Sends everything in the store, page by page: object, whether that is its data, and bytes.
    pub(super) async fn survey(&self, pages: SyncSender<Vec<(ObjectId, bool, u64)>>) -> Result<()> {
        let below = self.below(&["objects"]);
        let mut after: Option<StorePath> = None;
        loop {
            // A listing that breaks off goes on where it was.
            let (page, last) = insist("list", &self.place, self.timeout, |_| {
                let listing = match &after {
                    None => self.objects.list(Some(&below)),
                    Some(after) => self.objects.list_with_offset(Some(&below), after),
                };
                listing.take(SURVEY_PAGE).try_fold((Vec::new(), None), |(mut page, _), entry| {
                    if let Some(name) = entry.location.filename() {
                        let data = name.strip_suffix(SUMS_SUFFIX);
                        if let Ok(id) = data.unwrap_or(name).parse() {
                            page.push((id, data.is_none(), entry.size));
                        }
                    }
                    ready(Ok((page, Some(entry.location))))
                })
            })
            .await?;
            after = last;
            // Nobody listens any more.
            if after.is_none() || pages.send(page).is_err() {
                return Ok(());
            }
        }
    }

    /// Begins the upload of a large object, noted so that it can be taken back after a crash. The note needs
    /// the name that the store has given the upload: a process that is killed between the two leaves an
    /// upload that only a lifecycle rule of the bucket ends, because `object_store` lists none.
    pub(super) async fn begin_upload(&self, id: ObjectId) -> Result<MultipartId> {
        let path = self.data_path(id);
        let upload =
            insist("begin an upload", &self.place, self.timeout, |_| self.parts.create_multipart(&path))
                .await?;
        let note = PutPayload::from(upload.clone().into_bytes());
        if let Err(error) = self.put_new(&self.upload_path(id), note).await {
            self.take_back(id, &upload).await;
            return Err(error);
        }
        Ok(upload)
    }

    /// Sends one part; the same again replaces it.
    pub(super) async fn put_part(
        &self,
        id: ObjectId,
        upload: &MultipartId,
        index: usize,
        part: PutPayload,
    ) -> Result<PartId> {
        let path = self.data_path(id);
        insist("write", &self.place, self.timeout, |_| {
            self.parts.put_part(&path, upload, index, part.clone())
        })
        .await
    }

    /// Makes the object exist; `len` is its length.
    pub(super) async fn complete_upload(
        &self,
        id: ObjectId,
        upload: &MultipartId,
        parts: Vec<PartId>,
        len: u64,
    ) -> Result<()> {
        let path = self.data_path(id);
        insist("complete an upload", &self.place, self.timeout, |_| {
            let (path, parts) = (&path, parts.clone());
            async move {
                match self.parts.complete_multipart(path, upload, parts).await {
                    // An earlier try, of this call or of one before, was the one that did it, and its
                    // answer was lost.
                    Err(_) if self.has(path, len).await => Ok(()),
                    other => other.map(drop),
                }
            }
        })
        .await?;
        self.forget_upload(id).await;
        Ok(())
    }

    async fn has(&self, path: &StorePath, len: u64) -> bool {
        self.objects.head(path).await.is_ok_and(|meta| meta.size == len)
    }

    async fn forget_upload(&self, id: ObjectId) {
        if let Err(error) = self.delete_path(&self.upload_path(id)).await {
            tracing::warn!(%error, object = %id, "the note of a finished upload stays behind");
        }
    }

    /// Takes back an upload that nobody will complete. Returns whether nothing of it is left.
    pub(super) async fn take_back(&self, id: ObjectId, upload: &MultipartId) -> bool {
        let path = self.data_path(id);
        let aborted = insist("abort an upload", &self.place, ABORT_LIMIT.min(self.timeout), |_| async {
            match self.parts.abort_multipart(&path, upload).await {
                // Stores that forget unfinished parts by themselves, and uploads that are gone.
                Err(object_store::Error::NotFound { .. } | object_store::Error::NotImplemented { .. }) => {
                    Ok(())
                }
                // It was completed, just before the crash.
                Err(_) if self.objects.head(&path).await.is_ok() => Ok(()),
                other => other,
            }
        });
        if let Err(error) = aborted.await {
            tracing::warn!(%error, object = %id, "an abandoned upload stays behind until it is collected");
            return false;
        }
        self.delete_path(&self.upload_path(id)).await.is_ok()
    }

    /// Takes back the uploads that a dead session has begun. Returns how many there were.
    pub(super) async fn take_back_session(&self, session: u64) -> Result<u64> {
        let uploads = self.list("uploads", session).await?;
        let taken = futures::stream::iter(uploads).map(|id| async move {
            let note = self.upload_path(id);
            let upload = match self.get_small(&note, NOTE_BYTES_MAX).await {
                Ok(Ok(upload)) => upload,
                Ok(Err(bytes)) => return Err(self.no_note(&note, bytes)),
                Err(error) if error.is_not_found() => return Ok(0),
                Err(error) => return Err(error),
            };
            let upload = String::from_utf8_lossy(&upload).into_owned();
            if self.take_back(id, &upload).await { Ok(1) } else { Err(self.not_taken_back()) }
        });
        taken.buffer_unordered(DELETES_AT_A_TIME).try_fold(0, |sum, n| ready(Ok(sum + n))).await
    }

    fn no_note(&self, path: &StorePath, bytes: u64) -> ObjectError {
        let source = format!("{path} has {bytes} bytes, the note of an upload at most {NOTE_BYTES_MAX}");
        ObjectError::Store { operation: "abort an upload", place: self.place.clone(), source: source.into() }
    }

    fn not_taken_back(&self) -> ObjectError {
        ObjectError::Store {
            operation: "abort an upload",
            place: self.place.clone(),
            source: "it is tried again at the next collection".into(),
        }
    }
}

/// Room for so many bytes; for many, where the cache can write them from directly.
pub(super) fn room(len: usize) -> BytesMut {
    if len < image::DIRECT_BYTES_MIN {
        return BytesMut::with_capacity(len);
    }
    let mut bytes = BytesMut::with_capacity(len + image::ALIGN);
    let before = (bytes.as_ptr() as usize).wrapping_neg() % image::ALIGN;
    bytes.resize(before, 0);
    bytes.advance(before);
    bytes
}

/// The body of an answer, which is as long as it was announced.
async fn whole(answer: GetResult) -> object_store::Result<Bytes> {
    let expected = answer.range.end - answer.range.start;
    let wrong = |found: u64| {
        let reason = format!("the answer has {found} bytes instead of {expected}");
        object_store::Error::Generic { store: "datafs", source: reason.into() }
    };
    let mut body = answer.into_stream();
    let mut bytes = room(expected.min(1 << 30) as usize);
    while let Some(piece) = body.next().await {
        let piece = piece?;
        if (bytes.len() + piece.len()) as u64 > expected {
            return Err(wrong((bytes.len() + piece.len()) as u64));
        }
        bytes.extend_from_slice(&piece);
    }
    if bytes.len() as u64 == expected { Ok(bytes.freeze()) } else { Err(wrong(bytes.len() as u64)) }
}
