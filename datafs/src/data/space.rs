//! Space of a store.

use std::path::Path;

use super::error::{ObjectError, Result};

/// The space of a store, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StoreSpace {
    /// Size of the store.
    pub(crate) total_bytes: u64,
    /// Unused, including blocks reserved for root.
    pub(crate) free_bytes: u64,
    /// Usable without privilege.
    pub(crate) available_bytes: u64,
}

impl StoreSpace {
    /// The reported space of a bucket, which has no size: 1 PiB, all of it free.
    pub(super) const BUCKET: StoreSpace =
        StoreSpace { total_bytes: 1 << 50, free_bytes: 1 << 50, available_bytes: 1 << 50 };

    /// The space of the disk under a directory.
    pub(super) fn of_disk(directory: &Path) -> Result<StoreSpace> {
        let stat = nix::sys::statvfs::statvfs(directory)
            .map_err(|e| ObjectError::io("get free space of", directory, e.into()))?;
        let bytes = |blocks: u64| blocks.saturating_mul(stat.fragment_size());
        Ok(StoreSpace {
            total_bytes: bytes(stat.blocks()),
            free_bytes: bytes(stat.blocks_free()),
            available_bytes: bytes(stat.blocks_available()),
        })
    }
}
