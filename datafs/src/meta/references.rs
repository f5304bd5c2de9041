//! Reference counts of objects: the number of extents that point at each object, and their bytes.
//!
//! The transaction that removes an object's last reference lists the object as garbage.

use std::collections::BTreeMap;

use millrace_leaf::error_chain;

use super::codec::{Decoder, Encoder};
use super::engine::{ReadTxn, WriteTxn};
use super::inode::{Timestamp, decode_extent};
use super::keys;
use crate::error::{Error, Result};
use crate::object::ObjectId;

/// The references to one object.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct References {
    /// Number of extents, including those that only snapshots hold.
    pub(crate) extents: u32,
    /// Sum of their lengths: a byte that two extents share counts twice.
    pub(crate) bytes: u64,
}

impl References {
    /// The reference count of an object; `None` when no extent points at it.
    pub(crate) fn get(txn: &mut dyn ReadTxn, object: ObjectId) -> Result<Option<References>> {
        txn.get(&keys::references(object))?.map(|value| References::decode(&value)).transpose()
    }

    pub(crate) fn encode(self) -> Vec<u8> {
        Encoder::default().u32(self.extents).u64(self.bytes).finish()
    }

    pub(crate) fn decode(value: &[u8]) -> Result<References> {
        let mut from = Decoder::new("reference count", value);
        let references = References { extents: from.u32()?, bytes: from.u64()? };
        from.finish()?;
        Ok(references)
    }
}

/// Reference changes of a transaction, applied together: an extent that moves costs nothing, and an object
/// that is only trimmed never counts zero.
#[derive(Debug, Default)]
pub(crate) struct ReferenceChanges(BTreeMap<ObjectId, Change>);

#[derive(Debug, Default, Clone, Copy)]
struct Change {
    extents: i64,
    bytes: i64,
}

impl ReferenceChanges {
    /// Counts an extent that is added, given its encoded value.
    pub(crate) fn add(&mut self, extent: &[u8]) -> Result<()> {
        self.change(extent, 1)
    }

    /// Counts an extent that is removed, given its encoded value.
    pub(crate) fn remove(&mut self, extent: &[u8]) -> Result<()> {
        self.change(extent, -1)
    }

    fn change(&mut self, extent: &[u8], by: i64) -> Result<()> {
        let extent = decode_extent(0, extent)?;
        let change = self.0.entry(extent.object).or_default();
        change.extents += by;
        // Objects are far below 2^63 bytes.
        change.bytes = change.bytes.saturating_add(by * extent.len as i64);
        Ok(())
    }

    /// Writes the new counts. Calls `on_new` once, before the first object without references gets one.
    pub(crate) fn apply(
        &mut self,
        txn: &mut dyn WriteTxn,
        on_new: impl FnOnce(&mut dyn ReadTxn) -> Result<()>,
    ) -> Result<()> {
        let mut on_new = Some(on_new);
        for (object, change) in std::mem::take(&mut self.0) {
            if change.extents == 0 && change.bytes == 0 {
                continue;
            }
            let key = keys::references(object);
            let old = References::get(txn.as_read(), object)?;
            if old.is_none() {
                if change.extents < 0 {
                    return Err(Error::corrupt(
                        format!("object {object}"),
                        "an extent points at it, but it has no references",
                    ));
                }
                if let Some(check) = on_new.take() {
                    check(txn.as_read())?;
                }
                // An earlier step of this transaction may have removed its last reference and listed it as
                // garbage.
                txn.delete(&keys::garbage(object))?;
            }
            let old = old.unwrap_or_default();
            let extents = (i64::from(old.extents) + change.extents).max(0);
            if extents == 0 {
                txn.delete(&key)?;
                let (seconds, nanos) = Timestamp::now().parts();
                txn.put(&keys::garbage(object), &Encoder::default().i64(seconds).u32(nanos).finish())?;
                continue;
            }
            let too_large =
                Error::TooLarge { what: "number of extents that share an object", max: u64::from(u32::MAX) };
            let extents = u32::try_from(extents).map_err(|_| too_large)?;
            let bytes = old.bytes.saturating_add_signed(change.bytes);
            txn.put(&key, &References { extents, bytes }.encode())?;
        }
        Ok(())
    }
}

/// Releases the object of an extent version that no tree or snapshot holds any more. An extent that cannot be
/// decoded is skipped, so that it does not keep its snapshot or volume; `fsck` then finds the object.
pub(crate) fn forget_version(txn: &mut dyn WriteTxn, record: &[u8], version: &[u8]) -> Result<()> {
    if !keys::is_extent(record) {
        return Ok(());
    }
    let mut changes = ReferenceChanges::default();
    if let Err(error) = changes.remove(version.get(8..).unwrap_or_default()) {
        tracing::warn!(
            error = error_chain::one_line(&error),
            "a damaged extent is dropped: fsck --repair counts the references anew"
        );
        return Ok(());
    }
    changes.apply(txn, |_| Ok(()))
}
