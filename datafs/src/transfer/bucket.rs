//! The bucket side of a copy: one object, or all objects below a prefix.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use millrace_leaf::error_chain;
use object_store::path::Path as StorePath;
use object_store::{
    GetOptions, GetRange, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt as _, PutPayload,
};

use super::tree::{Attributes, CHUNK, Entry, Kind, PAGE, ReadFile, Source, Target, WriteFile};
use crate::data::{Io, Pending};
use crate::error::{Error, Result};

/// Bytes of one part of an upload and of one range of a download.
const PART: usize = 8 << 20;
/// Parts or ranges of one file in flight at a time.
const AHEAD: usize = 4;

pub(super) struct BucketTree {
    store: Arc<dyn ObjectStore>,
    prefix: StorePath,
    runtime: Io,
}

impl BucketTree {
    pub(super) fn new(store: &Arc<dyn ObjectStore>, prefix: &StorePath, runtime: &Io) -> BucketTree {
        BucketTree { store: Arc::clone(store), prefix: prefix.clone(), runtime: runtime.clone() }
    }

    fn at(&self, path: &Path) -> Result<StorePath> {
        let mut at = self.prefix.clone();
        for name in path {
            let name = name
                .to_str()
                .ok_or_else(|| Error::Invalid(format!("{} is no name for an object", path.display())))?;
            at = at.clone().join(name);
        }
        Ok(at)
    }

    /// Runs a call on the store and waits; `None` when the object does not exist.
    fn wait<T, F, Fut>(&self, call: F) -> Result<Option<T>>
    where
        T: Send + 'static,
        F: FnOnce(Arc<dyn ObjectStore>) -> Fut,
        Fut: Future<Output = object_store::Result<T>> + Send + 'static,
    {
        settle(self.runtime.wait(call(Arc::clone(&self.store))))
    }
}

/// Converts the outcome of a call; `None` when the object does not exist.
fn settle<T>(outcome: Option<object_store::Result<T>>) -> Result<Option<T>> {
    match outcome {
        Some(Ok(value)) => Ok(Some(value)),
        Some(Err(object_store::Error::NotFound { .. })) => Ok(None),
        Some(Err(error)) => Err(Error::Object(Box::new(error))),
        None => Err(Error::Object("the threads of the store have stopped".into())),
    }
}

fn gone(path: &StorePath) -> Error {
    Error::not_found(format!("object {path}"))
}

/// The error for an object that was replaced.
fn stale(path: &StorePath) -> Error {
    Error::Stale { what: format!("the version of object {path} that was read") }
}

fn entry(meta: &ObjectMeta) -> Entry {
    Entry {
        name: meta.location.filename().unwrap_or_default().into(),
        kind: Kind::File,
        size: meta.size,
        mtime: meta.last_modified.into(),
        mode: None,
        owner: None,
        identity: None,
        node: None,
        version: meta.e_tag.clone(),
    }
}

fn folder(name: &str) -> Entry {
    Entry {
        name: name.into(),
        kind: Kind::Folder,
        size: 0,
        mtime: SystemTime::UNIX_EPOCH,
        mode: None,
        owner: None,
        identity: None,
        node: None,
        version: None,
    }
}

impl Source for BucketTree {
    fn root(&self) -> Result<Entry> {
        let name = self.prefix.clone();
        if !name.as_ref().is_empty() {
            let head = name.clone();
            if let Some(meta) = self.wait(|store| async move { store.head(&head).await })? {
                return Ok(entry(&meta));
            }
        }
        let prefix = name.clone();
        let below = self.wait(|store| async move { store.list_with_delimiter(Some(&prefix)).await })?;
        match below {
            Some(below) if !below.objects.is_empty() || !below.common_prefixes.is_empty() => {
                Ok(folder(name.as_ref()))
            }
            _ => Err(gone(&name)),
        }
    }

    fn list(&self, path: &Path, _: &Entry, visit: &mut dyn FnMut(Vec<Entry>) -> bool) -> Result<()> {
        let prefix = self.at(path)?;
        // All in memory: the interface cannot list one folder page by page.
        let below = self.wait(|store| async move { store.list_with_delimiter(Some(&prefix)).await })?;
        let Some(below) = below else { return Ok(()) };
        let mut folders = below.common_prefixes.iter().filter_map(|prefix| prefix.filename().map(folder));
        let mut objects = below.objects.iter().map(entry);
        loop {
            let page: Vec<Entry> = folders.by_ref().chain(objects.by_ref()).take(PAGE).collect();
            if page.is_empty() || !visit(page) {
                return Ok(());
            }
        }
    }

    fn look(&self, path: &Path) -> Result<Entry> {
        let location = self.at(path)?;
        let head = location.clone();
        let meta = self.wait(|store| async move { store.head(&head).await })?;
        meta.as_ref().map(entry).ok_or_else(|| gone(&location))
    }

    fn open<'s>(&'s self, path: &Path, file: &Entry) -> Result<Box<dyn ReadFile + 's>> {
        let location = self.at(path)?;
        let mut version = file.version.clone();
        if version.is_none() && file.size > PART as u64 {
            // Not every listing has tags.
            let now = self.look(path)?;
            if now.size != file.size {
                return Err(stale(&location));
            }
            version = now.version;
        }
        Ok(Box::new(BucketFile {
            tree: self,
            location,
            version,
            asked: 0,
            at: 0,
            size: file.size,
            ahead: std::collections::VecDeque::new(),
        }))
    }

    fn target(&self, path: &Path, _: &Entry) -> Result<OsString> {
        Err(Error::Invalid(format!("{} is no symbolic link", path.display())))
    }

    fn attributes(&self, _: &Path, _: &Entry) -> Result<Attributes> {
        Ok(Vec::new())
    }
}

/// The bytes of a range, and the length of the object.
type Range = Pending<object_store::Result<(Bytes, u64)>>;

struct BucketFile<'s> {
    tree: &'s BucketTree,
    location: StorePath,
    /// The tag that all ranges must have.
    version: Option<String>,
    /// Start of the next range to request.
    asked: u64,
    /// Start of the next range to return.
    at: u64,
    size: u64,
    ahead: std::collections::VecDeque<Range>,
}

impl ReadFile for BucketFile<'_> {
    fn next(&mut self) -> Result<Option<(u64, Bytes)>> {
        while self.ahead.len() < AHEAD && self.asked < self.size {
            let end = (self.asked + PART as u64).min(self.size);
            let (store, location) = (Arc::clone(&self.tree.store), self.location.clone());
            let range = GetOptions {
                range: Some(GetRange::Bounded(self.asked..end)),
                if_match: self.version.clone(),
                ..GetOptions::default()
            };
            let future = async move {
                let answer = store.get_opts(&location, range).await?;
                let size = answer.meta.size;
                Ok((answer.bytes().await?, size))
            };
            self.ahead.push_back(self.tree.runtime.start_future(future));
            self.asked = end;
        }
        let Some(range) = self.ahead.pop_front() else { return Ok(None) };
        let range = match range.wait() {
            Some(Err(object_store::Error::Precondition { .. })) => return Err(stale(&self.location)),
            other => settle(other)?,
        };
        let (bytes, size) = range.ok_or_else(|| gone(&self.location))?;
        let at = self.at;
        let expected = (self.size - at).min(PART as u64);
        if bytes.len() as u64 != expected || size != self.size {
            return Err(stale(&self.location));
        }
        self.at += expected;
        Ok(Some((at, bytes)))
    }

    fn size(&self) -> Result<u64> {
        // `next` has checked the length of every range.
        Ok(self.size)
    }
}

impl Target for BucketTree {
    fn keeps_times(&self) -> bool {
        false
    }

    fn has_links(&self) -> bool {
        false
    }

    fn find(&self, path: &Path) -> Result<Option<Entry>> {
        let location = self.at(path)?;
        let meta = self.wait(|store| async move { store.head(&location).await })?;
        Ok(meta.as_ref().map(entry))
    }

    fn make_folder(&self, _: &Path, _: &Entry) -> Result<bool> {
        Ok(false)
    }

    fn finish_folder(&self, _: &Path, _: &Entry, _: &Attributes) -> Result<()> {
        Ok(())
    }

    fn create<'s>(&'s self, path: &Path, like: &Entry) -> Result<Box<dyn WriteFile + 's>> {
        Ok(Box::new(NewObject {
            tree: self,
            location: self.at(path)?,
            buffer: Vec::new(),
            at: 0,
            size: like.size,
            upload: None,
            parts: std::collections::VecDeque::new(),
        }))
    }

    fn make_symlink(&self, _: &Path, _: OsString, _: &Entry) -> Result<()> {
        Err(Error::Unsupported("a symbolic link in a bucket"))
    }

    fn make_link(&self, _: &Path, _: &Path) -> Result<()> {
        Err(Error::Unsupported("a link in a bucket"))
    }

    fn finish(&self) -> Result<()> {
        Ok(())
    }
}

struct NewObject<'s> {
    tree: &'s BucketTree,
    location: StorePath,
    buffer: Vec<u8>,
    at: u64,
    size: u64,
    upload: Option<Box<dyn MultipartUpload>>,
    parts: std::collections::VecDeque<Pending<object_store::Result<()>>>,
}

impl NewObject<'_> {
    fn take(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let (now, rest) = bytes.split_at(bytes.len().min(PART - self.buffer.len()));
            self.buffer.extend_from_slice(now);
            self.at += now.len() as u64;
            bytes = rest;
            if self.buffer.len() == PART && self.at < self.size {
                self.send()?;
            }
        }
        Ok(())
    }

    /// Appends zeros up to an offset: a bucket has no holes.
    fn fill(&mut self, offset: u64) -> Result<()> {
        let zeroes = vec![0; CHUNK.min(offset.saturating_sub(self.at) as usize)];
        while self.at < offset {
            let len = zeroes.len().min((offset - self.at) as usize);
            self.take(&zeroes[..len])?;
        }
        Ok(())
    }

    fn send(&mut self) -> Result<()> {
        let location = self.location.clone();
        let upload = match &mut self.upload {
            Some(upload) => upload,
            none => {
                let begun = self.tree.wait(|store| async move { store.put_multipart(&location).await })?;
                none.insert(begun.ok_or_else(|| gone(&self.location))?)
            }
        };
        if self.parts.len() >= AHEAD
            && let Some(oldest) = self.parts.pop_front()
        {
            settle(oldest.wait())?;
        }
        let buffer = std::mem::replace(&mut self.buffer, Vec::with_capacity(PART));
        let part = upload.put_part(PutPayload::from(buffer));
        self.parts.push_back(self.tree.runtime.start_future(part));
        Ok(())
    }
}

impl WriteFile for NewObject<'_> {
    fn write(&mut self, offset: u64, bytes: Bytes) -> Result<()> {
        self.fill(offset)?;
        self.take(&bytes)
    }

    fn finish(mut self: Box<Self>, _: &Attributes) -> Result<()> {
        self.fill(self.size)?;
        let location = self.location.clone();
        if self.upload.is_none() {
            let payload = PutPayload::from(std::mem::take(&mut self.buffer));
            let put = self.tree.wait(|store| async move { store.put(&location, payload).await })?;
            return put.map(drop).ok_or_else(|| gone(&self.location));
        }
        if !self.buffer.is_empty() {
            self.send()?;
        }
        while let Some(part) = self.parts.pop_front() {
            settle(part.wait())?;
        }
        let Some(mut upload) = self.upload.take() else { return Ok(()) };
        let completed = self.tree.runtime.wait(async move {
            let done = upload.complete().await;
            (upload, done)
        });
        let (upload, done) = completed.map_or((None, None), |(upload, done)| (Some(upload), Some(done)));
        let done = settle(done).and_then(|done| done.ok_or_else(|| gone(&self.location)));
        if done.is_err() {
            // The drop aborts it.
            self.upload = upload;
        }
        done.map(drop)
    }
}

impl Drop for NewObject<'_> {
    fn drop(&mut self) {
        let Some(mut upload) = self.upload.take() else { return };
        self.parts.drain(..).for_each(|part| drop(part.wait()));
        if let Err(error) = self.tree.wait(|_| async move { upload.abort().await }) {
            tracing::warn!(
                error = error_chain::one_line(&error), location = %self.location,
                "an upload could not be given up"
            );
        }
    }
}
