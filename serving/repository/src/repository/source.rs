//! The source of models: a volume, a snapshot, a local directory, or any object store.

use std::path::Path;
use std::sync::Arc;

use millrace_datafs::View;
use object_store::ObjectStore;

use super::entries::Entries;
use millrace_serving_core::config::VOLUME_ROOT;
use millrace_serving_core::error::{Error, Result};

/// A store and the path of the models in it.
#[derive(Debug, Clone)]
pub struct Source {
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) root: String,
}

impl Source {
    /// Models below `root` in any object store.
    pub fn new(store: Arc<dyn ObjectStore>, root: impl Into<String>) -> Source {
        Source { store, root: root.into() }
    }

    /// Models in the `models/` directory of a volume or a snapshot.
    pub fn volume(view: &View) -> Source {
        Source::new(Arc::new(Entries::volume(view)), VOLUME_ROOT)
    }

    /// Models in a directory of the local file system: `<directory>/<name>/<version>/`. If the path is a
    /// symbolic link and its target changes, the source serves the models of the new target.
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
