//! Derived data of a snapshot: what a program has computed from it and keeps for all processes on the same metadata.
//!
//! It is a cache. Any entry may be missing at any time: the oldest ones of a volume are replaced beyond
//! [`DERIVED_ENTRIES_MAX`], a deleted snapshot takes its entries along, and a backup holds none. Contents are verified
//! by their SHA-256. Encrypted volumes have none: entries are not encrypted. An entry belongs to the number of its
//! snapshot, which no other snapshot of the volume ever has.

use crate::error::{Error, Result};
use crate::fs::View;
use crate::meta::derived;
use crate::meta::engine::Durability;
use crate::meta::snapshot::SnapshotRow;
use crate::meta::versioned::VolumeRow;

/// Most bytes of one entry.
pub const DERIVED_BYTES_MAX: usize = 1 << 20;
/// Longest name of an entry, in bytes.
pub const DERIVED_NAME_BYTES_MAX: usize = 256;
/// Most entries of a volume, those of all its snapshots together.
pub const DERIVED_ENTRIES_MAX: usize = derived::ENTRIES_MAX;

impl View {
    /// What [`View::derived_put`] has kept of this snapshot under a name; `None` also where it is damaged, or of a
    /// newer program. Sees what any process has kept before the call.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a live volume, and those of reading metadata.
    pub fn derived_get(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let snapshot = self.derived_from(name)?;
        self.shared.meta.view(|txn| derived::get(txn, self.volume, snapshot, name))
    }

    /// Keeps what was computed from this snapshot, in the place of an earlier entry of the name. One short transaction,
    /// or none if the entry is there. Not durable: a power failure may lose it. Returns false, and keeps nothing, where a
    /// newer program keeps the entries and for an encrypted volume.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a live volume or a name that is empty or too long, [`Error::TooLarge`] beyond
    /// [`DERIVED_BYTES_MAX`], [`Error::Stale`] for a snapshot that is gone, and those of writing metadata.
    pub fn derived_put(&self, name: &str, content: &[u8]) -> Result<bool> {
        let snapshot = self.derived_from(name)?;
        if content.len() > DERIVED_BYTES_MAX {
            return Err(Error::TooLarge { what: "derived data in bytes", max: DERIVED_BYTES_MAX as u64 });
        }
        if self.derived_get(name)?.as_deref() == Some(content) {
            return Ok(true);
        }
        self.shared.meta.check_reserve()?;
        self.shared.meta.transact(Durability::Relaxed, |txn| {
            // Of the volume, too: its snapshots keep their rows while it is being deleted.
            let volume = VolumeRow::get(txn.as_read(), self.volume)?;
            if volume.key.is_some() {
                return Ok(false);
            }
            SnapshotRow::get(txn.as_read(), self.volume, snapshot)?;
            derived::put(txn, self.volume, snapshot, name, content)
        })
    }

    /// The number of this view's snapshot, for an entry of a name.
    fn derived_from(&self, name: &str) -> Result<u64> {
        if name.is_empty() || name.len() > DERIVED_NAME_BYTES_MAX {
            return Err(Error::Invalid(format!(
                "the name of derived data has 1 to {DERIVED_NAME_BYTES_MAX} bytes, not {}",
                name.len()
            )));
        }
        if !self.is_snapshot() {
            return Err(Error::Invalid(format!(
                "volume {} is live; derived data belongs to a snapshot",
                self.spec()
            )));
        }
        Ok(self.root().snapshot)
    }
}

#[cfg(test)]
mod tests;
