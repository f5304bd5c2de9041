//! The object-store interface of a view ([`object_store::ObjectStore`]): Arrow, Parquet and DataFusion read
//! and, on a live view, write a volume in-process, without a mount.
//!
//! A location is a path of the volume, taken literally. Objects are regular files. `get` follows symbolic
//! links, but listings leave them out and do not descend into `.snapshots`.
//!  - `put` and `put_multipart` make the whole file visible in one durable step, or not at all. Missing
//!    parent directories are created. Dropping an upload deletes its bytes.
//!  - `get` streams the version of the file that existed when it began, or fails; it never mixes versions.
//!    Every byte is verified. Nothing is fetched ahead beyond what a call asks for: readers that share a file, each with
//!    row groups of its own, fetch it about once together.
//!  - `put`, `copy` and `rename` "only if absent" and `put` "only if unchanged" (`PutMode::Update` with the
//!    tag from the read) check this in the transaction that makes the file visible. So they also hold between
//!    processes and mounts. A write through the file system changes the tag. An update of a symbolic link
//!    always fails.
//!
//! All blocking work runs on the crate's own threads, so any executor may poll the futures.

mod list;
mod upload;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use chrono::{DateTime, Utc};
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use object_store::path::Path;
use object_store::{
    CopyMode, CopyOptions, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions,
    RenameTargetMode, Result as StoreResult, UpdateVersion,
};
use tokio::runtime::Handle;

use crate::error::Error;
use crate::fs::path::split_last;
use crate::fs::{OpenFile, View};
use crate::node::{Attr, FileKind};
use crate::publish::{Publish, StagedFile};
use list::{Walk, directory_at, read_page};
use upload::Upload;

/// The name of this store in errors.
const STORE: &str = "datafs volume";
/// Bytes of one chunk of a stream, and of one step of a copy.
const CHUNK_BYTES: u64 = 2 * 1024 * 1024;

impl View {
    /// This view as an object store: reads on every view, also writes on a live one.
    ///
    /// Any executor may poll its futures. Dropping a future abandons the call, but its write may still take
    /// effect.
    pub fn object_store(&self) -> Arc<dyn ObjectStore> {
        Arc::new(VolumeStore { view: self.clone() })
    }
}

#[derive(Debug, Clone)]
struct VolumeStore {
    view: View,
}

impl fmt::Display for VolumeStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "datafs volume {}", self.view.spec())
    }
}

/// Runs blocking work of the view on the crate's threads.
async fn blocking<T: Send + 'static>(
    runtime: &Handle,
    work: impl FnOnce() -> StoreResult<T> + Send + 'static,
) -> StoreResult<T> {
    runtime.spawn_blocking(work).await?
}

fn store_error(location: &str, error: Error) -> object_store::Error {
    let path = location.to_owned();
    match error {
        Error::NotFound { .. } | Error::NotADirectory { .. } | Error::IsADirectory { .. } => {
            object_store::Error::NotFound { path, source: error.into() }
        }
        Error::Exists { .. } => object_store::Error::AlreadyExists { path, source: error.into() },
        Error::ReadOnly { .. } | Error::NotWritable { .. } | Error::NotPermitted { .. } => {
            object_store::Error::PermissionDenied { path, source: error.into() }
        }
        Error::Conflict { .. } | Error::Changed { .. } => {
            object_store::Error::Precondition { path, source: error.into() }
        }
        Error::Unsupported(_) => object_store::Error::NotSupported { source: error.into() },
        other => object_store::Error::Generic { store: STORE, source: other.into() },
    }
}

fn refused(reason: String) -> object_store::Error {
    object_store::Error::Generic { store: STORE, source: reason.into() }
}

/// The entity tag of a file; each change of the file changes it.
fn tag(attr: &Attr) -> String {
    let changed = DateTime::<Utc>::from(attr.ctime);
    format!(
        "{:x}-{:x}.{:x}-{:x}",
        attr.node.to_u64(),
        changed.timestamp(),
        changed.timestamp_subsec_nanos(),
        attr.size
    )
}

fn meta(location: Path, attr: &Attr) -> ObjectMeta {
    ObjectMeta {
        location,
        last_modified: DateTime::<Utc>::from(attr.mtime),
        size: attr.size,
        e_tag: Some(tag(attr)),
        version: None,
    }
}

impl VolumeStore {
    fn runtime(&self) -> Handle {
        self.view.shared.pool.runtime().handle().clone()
    }

    fn not_implemented(&self, operation: &str) -> object_store::Error {
        object_store::Error::NotImplemented { operation: operation.to_owned(), implementer: self.to_string() }
    }

    /// Runs `work` with the view, on the crate's threads.
    async fn on_view<T: Send + 'static>(
        &self,
        location: &Path,
        work: impl FnOnce(&View, &str) -> crate::error::Result<T> + Send + 'static,
    ) -> StoreResult<T> {
        let (view, location) = (self.view.clone(), location.clone());
        blocking(&self.runtime(), move || {
            work(&view, location.as_ref()).map_err(|e| store_error(location.as_ref(), e))
        })
        .await
    }
}

/// Attributes of the file at a location.
fn stat_file(view: &View, location: &str) -> crate::error::Result<Attr> {
    let attr = view.stat(location)?;
    match attr.kind {
        FileKind::File => Ok(attr),
        _ => Err(Error::not_found(format!("file {location}"))),
    }
}

/// Opens the file at a location, with its attributes at that moment.
fn open_file(view: &View, location: &str) -> crate::error::Result<(Attr, OpenFile)> {
    view.with_file(location, |file| Ok((file.attr()?, file))).map_err(no_file(location))
}

/// Maps the error for a file that is not regular to "not found".
fn no_file(location: &str) -> impl Fn(Error) -> Error {
    move |error| match error {
        Error::Invalid(_) => Error::not_found(format!("file {location}")),
        other => other,
    }
}

/// Reads exactly a range of the version of a file that `attr` describes, of a part that ends at `ahead_to`.
fn read_exactly(
    file: &OpenFile,
    attr: &Attr,
    range: Range<u64>,
    ahead_to: u64,
) -> crate::error::Result<Bytes> {
    let len = usize::try_from(range.end - range.start)
        .map_err(|_| Error::TooLarge { what: "range in bytes", max: usize::MAX as u64 })?;
    let bytes = file.read_within(range.start, len, ahead_to)?;
    let now = file.attr()?;
    // The attributes are read after the bytes, so that a change in between is an error.
    if bytes.len() != len
        || (now.data_version, now.mtime, now.size) != (attr.data_version, attr.mtime, attr.size)
    {
        return Err(replaced());
    }
    Ok(bytes)
}

/// [`read_exactly`] without a retry of the lookup: a removed file is an error of this version.
fn read_on(file: &OpenFile, attr: &Attr, range: Range<u64>, ahead_to: u64) -> crate::error::Result<Bytes> {
    read_exactly(file, attr, range, ahead_to).map_err(|error| match error {
        // Another process has replaced or removed it.
        Error::NotFound { .. } => replaced(),
        other => other,
    })
}

fn replaced() -> Error {
    Error::Stale { what: "the version of the file that was being read".into() }
}

fn stream_file(
    runtime: Handle,
    location: Path,
    file: OpenFile,
    attr: Attr,
    range: Range<u64>,
) -> BoxStream<'static, StoreResult<Bytes>> {
    let state = (runtime, location, Arc::new(file), range);
    stream::try_unfold(state, move |(runtime, location, file, range)| async move {
        if range.is_empty() {
            return Ok(None);
        }
        let end = range.end.min(range.start.saturating_add(CHUNK_BYTES));
        let (now, rest, ahead_to) = (range.start..end, end..range.end, range.end);
        let (reader, place) = (Arc::clone(&file), location.clone());
        let bytes = blocking(&runtime, move || {
            read_on(&reader, &attr, now, ahead_to).map_err(|e| store_error(place.as_ref(), e))
        })
        .await?;
        Ok(Some((bytes, (runtime, location, file, rest))))
    })
    .boxed()
}

#[async_trait]
impl ObjectStore for VolumeStore {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> StoreResult<PutResult> {
        if !options.attributes.is_empty() {
            return Err(self.not_implemented("put with attributes"));
        }
        self.on_view(location, move |view, path| {
            let publish = expecting(view, path, &options.mode)?;
            let mut staged = view.stage()?;
            payload.iter().try_for_each(|bytes| staged.append(bytes))?;
            put(view, path, publish, staged.finish()?)
        })
        .await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> StoreResult<Box<dyn MultipartUpload>> {
        if !options.attributes.is_empty() {
            return Err(self.not_implemented("put with attributes"));
        }
        let staged = self.view.stage().map_err(|e| store_error(location.as_ref(), e))?;
        let upload = Upload::new(self.runtime(), self.view.clone(), location.clone(), staged);
        Ok(Box::new(upload))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> StoreResult<GetResult> {
        if options.version.is_some() {
            return Err(self.not_implemented("get of a version"));
        }
        let head = options.head;
        let (attr, file) = self
            .on_view(location, move |view, path| {
                if head {
                    return Ok((stat_file(view, path)?, None));
                }
                let (attr, file) = open_file(view, path)?;
                Ok((attr, Some(file)))
            })
            .await?;
        let meta = meta(location.clone(), &attr);
        options.check_preconditions(&meta)?;
        let range = match &options.range {
            None => 0..meta.size,
            Some(range) => range.as_range(meta.size).map_err(|e| refused(format!("{location}: {e}")))?,
        };
        let payload = match file {
            Some(file) => stream_file(self.runtime(), location.clone(), file, attr, range.clone()),
            None => stream::empty().boxed(),
        };
        Ok(GetResult {
            payload: GetResultPayload::Stream(payload),
            meta,
            range,
            attributes: object_store::Attributes::default(),
        })
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> StoreResult<Vec<Bytes>> {
        let (view, location, ranges) = (self.view.clone(), location.clone(), ranges.to_vec());
        blocking(&self.runtime(), move || {
            let failed = |e| store_error(location.as_ref(), e);
            let read = |file: OpenFile| {
                let attr = file.attr()?;
                let mut parts = Vec::with_capacity(ranges.len());
                let ahead_to = ranges.iter().map(|range| range.end).max().unwrap_or(0);
                for range in &ranges {
                    if range.start > range.end || range.end > attr.size {
                        return Ok(Err(refused(format!(
                            "{location}: range {}..{} of a file of {} bytes",
                            range.start, range.end, attr.size
                        ))));
                    }
                    parts.push(read_exactly(&file, &attr, range.clone(), ahead_to)?);
                }
                Ok(Ok(parts))
            };
            let path = location.as_ref();
            view.with_file(path, read).map_err(no_file(path)).map_err(failed)?
        })
        .await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, StoreResult<Path>>,
    ) -> BoxStream<'static, StoreResult<Path>> {
        let store = self.clone();
        locations
            .then(move |location| {
                let store = store.clone();
                async move {
                    let location = location?;
                    let remove = |view: &View, path: &str| {
                        stat_file(view, path)?;
                        view.remove_file(path)
                    };
                    store.on_view(&location, remove).await?;
                    Ok(location)
                }
            })
            .boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, StoreResult<ObjectMeta>> {
        let prefix = prefix.cloned().unwrap_or_default();
        let walk = Walk::new(self.view.clone(), prefix);
        let runtime = self.runtime();
        stream::try_unfold((runtime, walk), |(runtime, mut walk)| async move {
            let (page, walk) = blocking(&runtime, move || {
                let page = walk.next_page()?;
                Ok((page, walk))
            })
            .await?;
            Ok::<_, object_store::Error>(page.map(|page| (page, (runtime, walk))))
        })
        .flat_map(|page| match page {
            Ok(page) => stream::iter(page.into_iter().map(Ok).collect::<Vec<_>>()),
            Err(error) => stream::iter(vec![Err(error)]),
        })
        .boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> StoreResult<ListResult> {
        let prefix = prefix.cloned().unwrap_or_default();
        let view = self.view.clone();
        blocking(&self.runtime(), move || {
            let mut result = ListResult { common_prefixes: Vec::new(), objects: Vec::new() };
            let Some(node) = directory_at(&view, &prefix)? else { return Ok(result) };
            let mut cursor = 0;
            while let Some(page) = read_page(&view, &prefix, node, &mut cursor)? {
                for (location, attr) in page {
                    match attr.kind {
                        FileKind::File => result.objects.push(meta(location, &attr)),
                        FileKind::Directory => result.common_prefixes.push(location),
                        _ => {}
                    }
                }
            }
            result.common_prefixes.sort();
            result.objects.sort_by(|a, b| a.location.cmp(&b.location));
            Ok(result)
        })
        .await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> StoreResult<()> {
        let publish = match options.mode {
            CopyMode::Overwrite => Publish::new(),
            CopyMode::Create => Publish::new().expect_absent(to.as_ref()),
        };
        let to = to.clone();
        self.on_view(from, move |view, from| {
            let (attr, file) = open_file(view, from)?;
            let mut staged = view.stage()?;
            let mut at = 0;
            while at < attr.size {
                let end = attr.size.min(at + CHUNK_BYTES);
                staged.append(&read_on(&file, &attr, at..end, attr.size)?)?;
                at = end;
            }
            put(view, to.as_ref(), publish, staged.finish()?).map(drop)
        })
        .await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> StoreResult<()> {
        let to = to.clone();
        let no_replace = options.target_mode == RenameTargetMode::Create;
        self.on_view(from, move |view, from| {
            stat_file(view, from)?;
            let (from_parent, from_name) = split_last(from)?;
            let (to_parent, to_name) = split_last(to.as_ref())?;
            view.create_dir_all(to_parent)?;
            let from_parent = view.stat(from_parent)?.node;
            let to_parent = view.stat(to_parent)?.node;
            view.rename(from_parent, from_name.as_ref(), to_parent, to_name.as_ref(), no_replace)?;
            view.sync()
        })
        .await
    }
}

/// A publish that requires of a path what `mode` says. A tag that is already outdated is refused here, before
/// anything is stored.
fn expecting(view: &View, path: &str, mode: &PutMode) -> crate::error::Result<Publish> {
    let wanted = match mode {
        PutMode::Overwrite => return Ok(Publish::new()),
        PutMode::Create => return Ok(Publish::new().expect_absent(path)),
        PutMode::Update(UpdateVersion { e_tag: Some(tag), .. }) => tag,
        PutMode::Update(_) => {
            return Err(Error::Invalid(format!("{path}: an update needs the tag of what was read")));
        }
    };
    match stat_file(view, path) {
        Ok(attr) if tag(&attr) == *wanted => Ok(Publish::new().expect_unchanged(path, &attr)),
        Ok(_) | Err(Error::NotFound { .. }) => Err(Error::Changed { what: path.to_owned() }),
        Err(error) => Err(error),
    }
}

/// Publishes a staged file at a path and returns its tag.
fn put(view: &View, path: &str, publish: Publish, staged: StagedFile) -> crate::error::Result<PutResult> {
    let files = view.publish_files(publish.file(path, staged))?;
    Ok(PutResult { e_tag: files.first().map(tag), version: None })
}

#[cfg(test)]
mod tests;
