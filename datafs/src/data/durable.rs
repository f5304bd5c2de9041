//! Durability of a local store's names: directory syncs.

use std::fs::File;
use std::path::Path;

use super::error::{ObjectError, Result};

/// Syncs a directory, so that the names in it survive.
pub(crate) fn sync_directory(path: &Path) -> Result<()> {
    File::open(path)
        .and_then(|directory| directory.sync_all())
        .map_err(|e| ObjectError::io("sync object directory", path, e))
}
