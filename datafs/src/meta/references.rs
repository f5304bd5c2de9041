//! How many extents point at each object, and at how many of its bytes.
//!
//! An object whose last reference goes is noted as garbage by the transaction that takes it.

use std::collections::BTreeMap;

use super::codec::{Decoder, Encoder};
use super::engine::{ReadTxn, WriteTxn};
use super::inode::{Timestamp, decode_extent};
use super::keys;
use crate::data::ObjectId;
use crate::error::{Error, Result};

/// What points at one object.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct References {
    /// Extents, those that only snapshots hold included.
    pub(crate) extents: u32,
    /// Sum of their lengths: a byte that two extents share counts twice.
    pub(crate) bytes: u64,
}

impl References {
    /// What is noted about an object; `None` when nothing points at it.
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

/// What a transaction changes: applied together, so that an extent that moves costs nothing and an
/// object that is merely cut never counts zero.
#[derive(Debug, Default)]
pub(crate) struct ReferenceChanges(BTreeMap<ObjectId, Change>);

#[derive(Debug, Default, Clone, Copy)]
struct Change {
    extents: i64,
    bytes: i64,
}

impl ReferenceChanges {
    /// An extent of this value comes.
    pub(crate) fn add(&mut self, extent: &[u8]) -> Result<()> {
        self.change(extent, 1)
    }

    /// An extent of this value goes.
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

    /// Writes the new counts. `on_new` is called once before the first object that nothing pointed at
    /// gets a reference.
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
                // It may have lost its last reference in a step of this transaction that was applied.
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

/// Drops a version of a record that nothing holds any more; an extent gives up its object. One that cannot
/// be read goes as well, so that it does not keep its snapshot or volume; `fsck` then finds the object.
pub(crate) fn forget_version(txn: &mut dyn WriteTxn, record: &[u8], version: &[u8]) -> Result<()> {
    if !keys::is_extent(record) {
        return Ok(());
    }
    let mut changes = ReferenceChanges::default();
    if let Err(error) = changes.remove(version.get(8..).unwrap_or_default()) {
        tracing::warn!(%error, "a damaged extent is dropped: fsck --repair counts the references anew");
        return Ok(());
    }
    changes.apply(txn, |_| Ok(()))
}
