//! Identity of a snapshot that no path and no name is part of: the key of what processes share about its content.
//!
//! It is a digest of the identity of the metadata, and of the numbers and times of creation of the volume and of the
//! snapshot. The metadata has a random number, which a restored backup does not take over. A metadata file adds its
//! device, inode and time of creation, which a copied or new home does not share. Metadata on a server has the number
//! alone, so that all homes over one schema agree.

use std::fmt;

use sha2::{Digest as _, Sha256};

use crate::error::Result;
use crate::fs::View;
use crate::meta::codec::Decoder;
use crate::meta::engine::Durability;
use crate::meta::keys;
use crate::meta::metadata::Metadata;
use crate::meta::snapshot::SnapshotRow;
use crate::meta::versioned::VolumeRow;
use crate::random::random_id;

/// Version of the digest.
const VERSION: &[u8] = b"millrace-snapshot-id-1";

/// The identity of a snapshot. Snapshots with one identity have the same content.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SnapshotId([u8; 32]);

impl SnapshotId {
    /// The digest.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for SnapshotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl View {
    /// The identity of the snapshot of this view; `None` for a live volume, whose content changes.
    ///
    /// The first call on a home records the random number of its metadata.
    ///
    /// # Errors
    /// [`crate::Error::Stale`] when the snapshot is being deleted, and errors of the metadata.
    pub fn snapshot_id(&self) -> Result<Option<SnapshotId>> {
        if !self.is_snapshot() {
            return Ok(None);
        }
        let (meta, snapshot) = (&self.shared.meta, self.root().snapshot);
        let number = number_of(meta)?;
        let file = meta.file_identity()?;
        let (volume_created, snapshot_created) = meta.view(|txn| {
            let volume = VolumeRow::get(txn, self.volume)?;
            let snapshot = SnapshotRow::get(txn, self.volume, snapshot)?;
            Ok((volume.created.parts(), snapshot.created.parts()))
        })?;
        // Every field has a fixed length.
        let mut digest = Sha256::new();
        digest.update(VERSION);
        digest.update(number.to_be_bytes());
        digest.update(file.device.to_be_bytes());
        digest.update(file.inode.to_be_bytes());
        digest.update(file.created.as_nanos().to_be_bytes());
        for (number, (seconds, nanos)) in [(self.volume, volume_created), (snapshot, snapshot_created)] {
            digest.update(number.to_be_bytes());
            digest.update(seconds.to_be_bytes());
            digest.update(nanos.to_be_bytes());
        }
        Ok(Some(SnapshotId(digest.finalize().into())))
    }
}

/// The random number of the metadata, drawn if it has none.
fn number_of(meta: &Metadata) -> Result<u64> {
    let known = |value: Option<Vec<u8>>| {
        value.map(|value| Decoder::new("number of the metadata", &value).u64()).transpose()
    };
    if let Some(number) = meta.view(|txn| known(txn.get(keys::NUMBER)?))? {
        return Ok(number);
    }
    let drawn = random_id()?;
    meta.transact(Durability::Durable, |txn| match known(txn.get(keys::NUMBER)?)? {
        // Another process was faster.
        Some(number) => Ok(number),
        None => {
            txn.put(keys::NUMBER, &drawn.to_be_bytes())?;
            Ok(drawn)
        }
    })
}

#[cfg(test)]
mod tests;
