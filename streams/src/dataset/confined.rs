//! Wrapper of a snapshot's object store that refuses every location outside of one folder.
//!
//! Names of image files in a dataset can begin at the root of the volume, and reads follow symbolic links. A service
//! that exposes one folder must follow neither out of it.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use millrace_datafs::View;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use parking_lot::Mutex;

/// Locations that are remembered as checked. Beyond this number the memory begins anew.
const CHECKED_MAX: usize = 1 << 16;

/// Passes reads of one folder through and refuses all other calls. For snapshots, where a checked location stays as it is.
#[derive(Clone)]
pub(crate) struct ConfinedStore {
    store: Arc<dyn ObjectStore>,
    view: View,
    folder: Path,
    /// Locations without a symbolic link on their way.
    checked: Arc<Mutex<HashSet<Path>>>,
}

impl ConfinedStore {
    pub(crate) fn new(store: Arc<dyn ObjectStore>, view: View, folder: Path) -> Self {
        Self { store, view, folder, checked: Arc::default() }
    }

    fn refused(&self, location: &str, what: &str) -> Error {
        Error::PermissionDenied {
            path: location.to_owned(),
            source: format!("it {what} /{}, the folder that is served", self.folder).into(),
        }
    }

    fn check_folder(&self, location: &Path) -> Result<()> {
        match location.prefix_matches(&self.folder) {
            true => Ok(()),
            false => Err(self.refused(location.as_ref(), "lies outside of")),
        }
    }

    /// Checks that a location lies in the folder, and that no symbolic link below the folder leads to it.
    async fn check(&self, location: &Path) -> Result<()> {
        self.check_folder(location)?;
        if self.checked.lock().contains(location) {
            return Ok(());
        }
        let (view, path, below) = (self.view.clone(), location.clone(), self.folder.parts().count());
        let has_link = tokio::task::spawn_blocking(move || {
            let mut node = view.root();
            for (at, part) in path.parts().enumerate() {
                let attr = view.lookup(node, part.as_ref().as_ref())?;
                let is_link = attr.kind == millrace_datafs::FileKind::Symlink;
                if is_link && at >= below {
                    return Ok(true);
                }
                // The folder that is served can itself be reached by a link.
                node = match is_link {
                    true => view.stat(&path.parts().take(at + 1).fold(String::new(), join))?.node,
                    false => attr.node,
                };
            }
            Ok::<_, millrace_datafs::Error>(false)
        });
        match has_link.await {
            Ok(Ok(false)) => {
                let mut checked = self.checked.lock();
                if checked.len() >= CHECKED_MAX {
                    checked.clear();
                }
                checked.insert(location.clone());
                Ok(())
            }
            Ok(Ok(true)) => Err(self.refused(location.as_ref(), "is reached by a symbolic link inside of")),
            // The store tells what is wrong.
            Ok(Err(millrace_datafs::Error::NotFound { .. })) => Ok(()),
            Ok(Err(error)) => Err(Error::Generic { store: "volume", source: Box::new(error) }),
            Err(source) => Err(Error::JoinError { source }),
        }
    }
}

fn join(path: String, part: object_store::path::PathPart<'_>) -> String {
    format!("{path}/{}", part.as_ref())
}

impl fmt::Debug for ConfinedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConfinedStore").field("folder", &self.folder).finish_non_exhaustive()
    }
}

impl fmt::Display for ConfinedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "/{} of {}", self.folder, self.store)
    }
}

#[async_trait]
impl ObjectStore for ConfinedStore {
    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.check(location).await?;
        self.store.get_opts(location, options).await
    }

    async fn get_ranges(
        &self,
        location: &Path,
        ranges: &[std::ops::Range<u64>],
    ) -> Result<Vec<bytes::Bytes>> {
        self.check(location).await?;
        self.store.get_ranges(location, ranges).await
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        // Listings follow the links on the way to their prefix, and a known description needs no other check.
        let (this, prefix) = (self.clone(), prefix.cloned().unwrap_or_default());
        let listing = async move {
            this.check(&prefix).await?;
            Ok::<_, Error>(this.store.list(Some(&prefix)))
        };
        futures::stream::once(listing).try_flatten().boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.check(prefix.unwrap_or(&Path::default())).await?;
        self.store.list_with_delimiter(prefix).await
    }

    async fn put_opts(&self, location: &Path, _: PutPayload, _: PutOptions) -> Result<PutResult> {
        Err(self.refused(location.as_ref(), "cannot be written in"))
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        Err(self.refused(location.as_ref(), "cannot be written in"))
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let folder = self.folder.to_string();
        let refuse = move |location: Result<Path>| {
            let source = format!("nothing is deleted in /{folder}, the folder that is served").into();
            Err(Error::PermissionDenied { path: location?.to_string(), source })
        };
        locations.map(refuse).boxed()
    }

    async fn copy_opts(&self, _: &Path, to: &Path, _: CopyOptions) -> Result<()> {
        Err(self.refused(to.as_ref(), "cannot be written in"))
    }
}
