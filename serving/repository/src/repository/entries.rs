//! The object store of a model repository: lists a folder even if one of its entries cannot be read.
//!
//! The underlying stores refuse a whole listing for one name that is not UTF-8 or has control characters, or
//! for a symbolic link that leads to itself. This store lists such an entry as a folder under a printable
//! name. The reader of the listing then reports an error for that entry alone.

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use millrace_datafs::{FileKind, View};
use object_store::local::LocalFileSystem;
use object_store::path::{Path, PathPart};
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use parking_lot::Mutex;

/// Entries of a volume read at a time.
const ENTRIES_MAX: usize = 512;

/// A local folder or a volume as an object store of models.
#[derive(Debug)]
pub(super) struct Entries(EntryStore);

#[derive(Debug)]
enum EntryStore {
    Folder {
        path: PathBuf,
        /// The store of the path's last target.
        opened: Mutex<Option<(PathBuf, Arc<LocalFileSystem>)>>,
    },
    Volume {
        view: View,
        store: Arc<dyn ObjectStore>,
    },
}

/// An entry of a folder.
struct Entry {
    name: OsString,
    is_folder: bool,
}

impl Entries {
    /// A local folder. The path may be a symbolic link whose target changes later.
    pub(super) fn folder(path: PathBuf) -> Entries {
        Entries(EntryStore::Folder { path, opened: Mutex::default() })
    }

    pub(super) fn volume(view: &View) -> Entries {
        Entries(EntryStore::Volume { view: view.clone(), store: view.object_store() })
    }

    /// The store of the path's current target.
    fn store(&self) -> Result<Arc<dyn ObjectStore>> {
        match &self.0 {
            EntryStore::Volume { store, .. } => Ok(store.clone()),
            EntryStore::Folder { path, opened } => {
                let target = path.canonicalize().map_err(failed)?;
                let mut opened = opened.lock();
                if let Some((known, store)) = &*opened
                    && *known == target
                {
                    return Ok(store.clone());
                }
                let store = Arc::new(LocalFileSystem::new_with_prefix(&target)?);
                *opened = Some((target, store.clone()));
                Ok(store)
            }
        }
    }

    /// The entries of a folder.
    async fn entries(&self, folder: &Path) -> Result<Vec<Entry>> {
        match &self.0 {
            EntryStore::Folder { path, .. } => {
                let path = path.join(folder.as_ref());
                tokio::task::spawn_blocking(move || of_folder(&path)).await.map_err(failed)?.map_err(failed)
            }
            EntryStore::Volume { view, .. } => {
                let (view, folder) = (view.clone(), folder.to_string());
                tokio::task::spawn_blocking(move || of_volume(&view, &folder))
                    .await
                    .map_err(failed)?
                    .map_err(failed)
            }
        }
    }
}

fn failed(error: impl std::error::Error + Send + Sync + 'static) -> object_store::Error {
    object_store::Error::Generic { store: "model repository", source: Box::new(error) }
}

fn of_folder(path: &std::path::Path) -> io::Result<Vec<Entry>> {
    let entry = |entry: io::Result<std::fs::DirEntry>| {
        let entry = entry?;
        let is_folder = match std::fs::metadata(entry.path()) {
            Ok(found) => found.is_dir(),
            // Skips a link whose target is missing; other errors are reported when the entry is read.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(_) => true,
        };
        Ok(Some(Entry { name: entry.file_name(), is_folder }))
    };
    std::fs::read_dir(path)?.map(entry).filter_map(io::Result::transpose).collect()
}

fn of_volume(view: &View, folder: &str) -> millrace_datafs::Result<Vec<Entry>> {
    let node = view.stat(folder)?.node;
    let (mut entries, mut cursor) = (Vec::new(), 0);
    loop {
        let page = view.readdir_attrs(node, cursor, ENTRIES_MAX)?;
        let Some((last, _)) = page.last() else { return Ok(entries) };
        cursor = last.cursor;
        for (entry, attr) in page {
            if ![".", "..", ".snapshots"].iter().any(|name| entry.name == *name) {
                let is_folder = attr.kind == FileKind::Directory;
                entries.push(Entry { name: entry.name, is_folder });
            }
        }
    }
}

impl fmt::Display for Entries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            EntryStore::Folder { path, .. } => write!(f, "{}", path.display()),
            EntryStore::Volume { store, .. } => write!(f, "{store}"),
        }
    }
}

#[async_trait]
impl ObjectStore for Entries {
    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.store()?.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.store()?.put_multipart_opts(location, options).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.store()?.get_opts(location, options).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.store()?.get_ranges(location, ranges).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        match self.store() {
            Ok(store) => store.delete_stream(locations),
            Err(error) => stream::iter([Err(error)]).boxed(),
        }
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        match self.store() {
            Ok(store) => store.list(prefix),
            Err(error) => stream::iter([Err(error)]).boxed(),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let store = self.store()?;
        let whole = store.list_with_delimiter(prefix).await;
        if whole.is_ok() {
            return whole;
        }
        let folder = prefix.cloned().unwrap_or_default();
        let mut listing = ListResult { common_prefixes: Vec::new(), objects: Vec::new() };
        for Entry { name, is_folder } in self.entries(&folder).await? {
            let place = name
                .to_str()
                .and_then(|name| PathPart::parse(name).ok())
                .map(|name| folder.clone().join(name));
            match place {
                Some(place) if is_folder => listing.common_prefixes.push(place),
                // Skips a file that was deleted meanwhile or has no readable metadata.
                Some(place) => listing.objects.extend(store.head(&place).await.ok()),
                None => listing
                    .common_prefixes
                    .push(folder.clone().join(PathPart::from(&*name.to_string_lossy()))),
            }
        }
        Ok(listing)
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.store()?.copy_opts(from, to, options).await
    }
}
