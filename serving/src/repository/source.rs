//! The places that models are served from: a volume, a snapshot of one, a directory, any store.

use std::path::Path;
use std::sync::Arc;

use millrace_datafs::View;
use object_store::ObjectStore;

use super::entries::Entries;
use crate::config::VOLUME_ROOT;
use crate::error::{Error, Result};

/// Where models are found.
#[derive(Debug, Clone)]
pub struct Source {
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) root: String,
}

impl Source {
    /// Models below `root` of any store.
    pub fn new(store: Arc<dyn ObjectStore>, root: impl Into<String>) -> Source {
        Source { store, root: root.into() }
    }

    /// Models in the `models/` directory of a volume or a snapshot.
    pub fn volume(view: &View) -> Source {
        Source::new(Arc::new(Entries::volume(view)), VOLUME_ROOT)
    }

    /// Models in a directory of the local file system: `<directory>/<name>/<version>/`. Where the path is a
    /// symbolic link that is replaced, the models are those of its new target.
    ///
    /// # Errors
    /// [`Error::Directory`] when it is not a readable directory.
    pub fn directory(path: &Path) -> Result<Source> {
        let failed = |reason: String| Error::Directory { path: path.to_path_buf(), reason };
        std::fs::read_dir(path).map_err(|error| failed(error.to_string()))?;
        let path = std::path::absolute(path).map_err(|error| failed(error.to_string()))?;
        Ok(Source::new(Arc::new(Entries::folder(path)), ""))
    }
}
