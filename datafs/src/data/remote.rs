//! The remote object store: every request has a time limit and is retried while that may help.
//!
//! Objects are `objects/SESSION/ID` below the prefix, so that one listing shows what a session wrote. While a
//! large object is uploaded, `uploads/SESSION/ID` holds the store's name for the upload. With it another
//! process can abort the uploads of a dead process, on any kind of store.

use std::collections::BTreeSet;
use std::fmt;
use std::future::ready;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
use futures::stream::BoxStream;
use futures::{StreamExt as _, TryStreamExt as _};
use millrace_leaf::error_chain;
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path as StorePath;
use object_store::{
    GetOptions, GetRange, GetResult, MultipartId, ObjectMeta, ObjectStore, ObjectStoreExt as _, PutMode,
    PutPayload,
};
use tokio::sync::Semaphore;

use super::error::{ObjectError, Result};
use super::image;
use super::retry::insist;
use crate::object::{Layout, ObjectId, SUMS_SUFFIX};

/// Parts that this process sends at a time, over all of its uploads; bounds their memory.
const PARTS_AT_A_TIME: usize = 32;
/// Most parts that are kept in memory to be sent again: as many as can be in flight when the store becomes
/// unavailable.
const PARTS_KEPT: usize = PARTS_AT_A_TIME;
/// Longest note of an upload (the store's name for it): about 100 bytes, 2,000 at Google.
const NOTE_BYTES_MAX: u64 = 64 * 1024;
/// Longest time that aborting an upload may block the thread that dropped it.
pub(super) const ABORT_LIMIT: Duration = Duration::from_secs(5);
/// Name of the marker at the root of a local store, and below the prefix of a remote one.
pub(super) const MARKER: &str = "store.json";
/// Longest marker that is read from a remote store, in bytes.
const MARKER_BYTES_MAX: u64 = 4_096;
/// Longest time to read the marker of the store.
const MARKER_LIMIT: Duration = Duration::from_secs(5);
/// Entries of a listing per page in memory.
const SURVEY_PAGE: usize = 10_000;
/// Concurrent requests when many objects are deleted or uploads aborted.
const DELETES_AT_A_TIME: usize = 16;

/// A bucket, and the prefix in it.
pub(super) struct RemoteStore {
    objects: Arc<dyn ObjectStore>,
    parts: Arc<dyn MultipartStore>,
    prefix: StorePath,
    place: String,
    timeout: Duration,
    /// Bounds the parts in flight.
    pub(super) sending: Arc<Semaphore>,
    /// Bounds the parts that wait to be sent again.
    pub(super) kept: Arc<Semaphore>,
}

/// The outcome of the deletion of several objects.
#[derive(Debug)]
pub(crate) struct Removal {
    /// The objects that are gone.
    pub(crate) gone: Vec<ObjectId>,
    /// The first error.
    pub(crate) result: Result<()>,
    /// A request had no answer, so that it may reach the store after this call.
    pub(crate) may_be_late: bool,
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

    /// The name of the store in errors.
    pub(super) fn place(&self) -> &str {
        &self.place
    }

    /// How long a request is retried.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// The objects below a path, after one of them.
    pub(super) fn listing(
        &self,
        below: &StorePath,
        after: Option<&StorePath>,
    ) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        match after {
            None => self.objects.list(Some(below)),
            Some(after) => self.objects.list_with_offset(Some(below), after),
        }
    }

    pub(super) fn below(&self, parts: &[&str]) -> StorePath {
        parts.iter().fold(self.prefix.clone(), |path, part| path.join(*part))
    }

    pub(super) fn session_path(&self, kind: &str, session: u64) -> StorePath {
        self.below(&[kind, &format!("{session:016x}")])
    }

    /// The path of an object's data.
    pub(super) fn data_path(&self, id: ObjectId) -> StorePath {
        self.session_path("objects", id.session()).join(id.to_string())
    }

    /// The path of an object's checksums.
    pub(super) fn sums_path(&self, id: ObjectId) -> StorePath {
        match id.layout() {
            Layout::Plain => self.session_path("objects", id.session()).join(format!("{id}{SUMS_SUFFIX}")),
            _ => self.data_path(id),
        }
    }

    fn upload_path(&self, id: ObjectId) -> StorePath {
        self.session_path("uploads", id.session()).join(id.to_string())
    }

    /// The bytes of `range` (all without one), or fewer at the end of the object; and the object's length.
    pub(super) async fn get(&self, path: &StorePath, range: Option<GetRange>) -> Result<(Bytes, u64)> {
        insist("read", &self.place, self.timeout, |_| async {
            let options = GetOptions { range: range.clone(), ..GetOptions::default() };
            let answer = self.objects.get_opts(path, options).await?;
            let size = answer.meta.size;
            Ok((whole(answer).await?, size))
        })
        .await
    }

    /// All of an object that has at most `bytes_max` bytes; otherwise its length, without fetching it.
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

    /// [`RemoteStore::get`] for one range, without the object's length.
    pub(super) async fn get_range(&self, path: &StorePath, range: Range<u64>) -> Result<Bytes> {
        self.get(path, Some(GetRange::Bounded(range))).await.map(|(bytes, _)| bytes)
    }

    /// Stores an object under a name that is not in use yet.
    pub(super) async fn put_new(&self, path: &StorePath, payload: PutPayload) -> Result<()> {
        let len = payload.content_length() as u64;
        let put = insist("write", &self.place, self.timeout, |_| {
            let (payload, again) = (payload.clone(), payload.clone());
            async move {
                let put = self.objects.put_opts(path, payload, PutMode::Create.into()).await;
                // An earlier try may have succeeded and only its response was lost.
                match put {
                    Err(
                        object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. },
                    ) if self.objects.head(path).await?.size == len => Ok(()),
                    // This store has no conditional put; object names are unique anyway.
                    Err(object_store::Error::NotImplemented { .. }) => {
                        self.objects.put(path, again).await.map(drop)
                    }
                    other => other.map(drop),
                }
            }
        });
        put.await
    }

    /// Reads the marker of the store; see `marker.rs`. Opening a home waits for it, and continues on an error.
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

    /// Stores an object; replaces an existing one of that name.
    pub(super) async fn put_over(&self, path: &StorePath, payload: PutPayload) -> Result<()> {
        insist("write", &self.place, self.timeout, |_| self.objects.put(path, payload.clone()))
            .await
            .map(drop)
    }

    /// Length of the object of that name; `None` when there is none.
    pub(super) async fn size(&self, path: &StorePath) -> Result<Option<u64>> {
        match insist("look at", &self.place, self.timeout, |_| self.objects.head(path)).await {
            Ok(meta) => Ok(Some(meta.size)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The bytes of `range`, or fewer at the end, and the object's length. Works for an empty object too.
    pub(super) async fn get_part(&self, path: &StorePath, range: Range<u64>) -> Result<(Bytes, u64)> {
        if range.start == 0
            && let Some(0) = self.size(path).await?
        {
            return Ok((Bytes::new(), 0));
        }
        self.get(path, Some(GetRange::Bounded(range))).await
    }

    /// Deletes an object and its sidecar.
    pub(super) async fn delete(&self, id: ObjectId) -> Result<()> {
        self.delete_noting(id, &AtomicBool::new(false)).await
    }

    async fn delete_noting(&self, id: ObjectId, may_be_late: &AtomicBool) -> Result<()> {
        self.delete_path(&self.data_path(id), may_be_late).await?;
        match id.layout() {
            Layout::Plain => self.delete_path(&self.sums_path(id), may_be_late).await,
            _ => Ok(()),
        }
    }

    /// Sets `may_be_late` if a request was repeated: the earlier one may have had no answer.
    async fn delete_path(&self, path: &StorePath, may_be_late: &AtomicBool) -> Result<()> {
        let done = insist("delete", &self.place, self.timeout, |tries| {
            may_be_late.fetch_or(tries > 0, Ordering::Relaxed);
            self.objects.delete(path)
        })
        .await;
        may_be_late.fetch_or(matches!(done, Err(ObjectError::Away { .. })), Ordering::Relaxed);
        done.or_else(|error| if error.is_not_found() { Ok(()) } else { Err(error) })
    }

    /// Deletes objects concurrently. Tries all.
    pub(super) async fn delete_all(&self, ids: Vec<ObjectId>) -> Removal {
        let delete = |id| async move {
            let may_be_late = AtomicBool::new(false);
            let done = self.delete_noting(id, &may_be_late).await;
            (id, done, may_be_late.into_inner())
        };
        let mut deleted = futures::stream::iter(ids).map(delete).buffer_unordered(DELETES_AT_A_TIME);
        let (mut gone, mut result, mut may_be_late) = (Vec::new(), Ok(()), false);
        while let Some((id, done, is_late)) = deleted.next().await {
            may_be_late |= is_late;
            match done {
                Ok(()) => gone.push(id),
                Err(error) => result = result.and(Err(error)),
            }
        }
        Removal { gone, result, may_be_late }
    }

    /// The objects of a session.
    pub(super) async fn list_session(&self, session: u64) -> Result<BTreeSet<ObjectId>> {
        self.list("objects", session).await
    }

    async fn list(&self, kind: &str, session: u64) -> Result<BTreeSet<ObjectId>> {
        let below = self.session_path(kind, session);
        insist("list", &self.place, self.timeout, |_| {
            let id = |entry: ObjectMeta| -> Option<ObjectId> {
                let name = entry.location.filename()?;
                name.strip_suffix(SUMS_SUFFIX).unwrap_or(name).parse().ok()
            };
            self.objects.list(Some(&below)).try_filter_map(move |e| ready(Ok(id(e)))).try_collect()
        })
        .await
    }

    /// Sends one entry per file in the store, page by page: object, whether the file is its data, and bytes.
    pub(super) async fn survey(&self, pages: SyncSender<Vec<(ObjectId, bool, u64)>>) -> Result<()> {
        let below = self.below(&["objects"]);
        let mut after: Option<StorePath> = None;
        loop {
            // Each page begins after the last entry of the previous one.
            let (page, last) = insist("list", &self.place, self.timeout, |_| {
                self.listing(&below, after.as_ref()).take(SURVEY_PAGE).try_fold(
                    (Vec::new(), None),
                    |(mut page, _), entry| {
                        if let Some(name) = entry.location.filename() {
                            let data = name.strip_suffix(SUMS_SUFFIX);
                            if let Ok(id) = data.unwrap_or(name).parse() {
                                page.push((id, data.is_none(), entry.size));
                            }
                        }
                        ready(Ok((page, Some(entry.location))))
                    },
                )
            })
            .await?;
            after = last;
            // The end of the listing, or the receiver is gone.
            if after.is_none() || pages.send(page).is_err() {
                return Ok(());
            }
        }
    }

    /// Begins the upload of a large object and stores its note, so that it can be aborted after a crash. The
    /// note needs the name that the store gives the upload. A process killed between the two requests leaves
    /// an upload that only a lifecycle rule of the bucket ends, because `object_store` cannot list uploads.
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

    /// Sends one part; sending the same index again replaces it.
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

    /// Completes the object; `len` is its length.
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
                    // An earlier try has completed it and only its response was lost.
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
        if let Err(error) = self.delete_note(id).await {
            tracing::warn!(
                error = error_chain::one_line(&error), object = %id,
                "the note of a finished upload stays behind"
            );
        }
    }

    /// Aborts an upload and removes its note. Returns whether nothing of it is left.
    pub(super) async fn take_back(&self, id: ObjectId, upload: &MultipartId) -> bool {
        let path = self.data_path(id);
        let aborted = insist("abort an upload", &self.place, ABORT_LIMIT.min(self.timeout), |_| async {
            match self.parts.abort_multipart(&path, upload).await {
                // The store drops unfinished parts itself, or the upload is gone.
                Err(object_store::Error::NotFound { .. } | object_store::Error::NotImplemented { .. }) => {
                    Ok(())
                }
                // The upload was completed just before the crash.
                Err(_) if self.objects.head(&path).await.is_ok() => Ok(()),
                other => other,
            }
        });
        if let Err(error) = aborted.await {
            tracing::warn!(
                error = error_chain::one_line(&error), object = %id,
                "an abandoned upload stays behind until it is collected"
            );
            return false;
        }
        self.delete_note(id).await.is_ok()
    }

    async fn delete_note(&self, id: ObjectId) -> Result<()> {
        self.delete_path(&self.upload_path(id), &AtomicBool::new(false)).await
    }

    /// Aborts the unfinished uploads of a dead session. Returns how many there were.
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

/// An empty buffer for `len` bytes; a large one is aligned so that the cache can write it with direct I/O.
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

/// The body of a response; fails unless its length is the announced one.
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
